"""Authenticate callers of an aggregator: bearer tokens for two roles, and the token store of a run.

Tokens come from the environment or from files when a service starts, and from the token store; files and store are read
again when they change. Only SHA-256 digests of tokens are kept, so no token is in a process list, actor argument, log
line or traceback. Without any token the service is open to this machine only, and to analysts only.

The store is one file that only the operator can read (mode 0600), changed while the run is served. It contains digests
of tokens that were made here from 256 random bits, so a reader of the file gains no access. Changes are pure functions
of the store; :func:`change` applies one. While a store cannot be read, no caller is admitted.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from aggregator.ledger import NO_LIMIT, CallerLimit
from aggregator.store import folder_held
from fairpate.config import expected
from fairpate.files import file_version, write_atomically
from fairpate.types import LOCAL_ANALYST, KnownCaller, Role, UsageError

# 96 bits if the characters are hexadecimal digits: too many to guess.
_MIN_TOKEN_CHARACTERS = 24
_NAME = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"
# A revoked token may be admitted for this long; a look per request would cost a `stat` of every file.
_LOOK_EVERY_S = 0.5
_VARIABLES: dict[Role, str] = {"analyst": "FAIRPATE_ANALYST_TOKEN", "operator": "FAIRPATE_OPERATOR_TOKEN"}
_log = logging.getLogger(__name__)

Entry = tuple[bytes, KnownCaller]
"""The SHA-256 digest of a token, and the caller that owns it."""
ResultT = TypeVar("ResultT")


class TokenError(UsageError, ValueError):
    """A token cannot be used; the message names the token's source and the remedy, never the token."""


def token_digest(token: str) -> bytes:
    """Return the SHA-256 digest of a token."""
    # surrogateescape: a token whose bytes are not text is an unknown one, not an error.
    # No slow hash: one is computed for each request, and tokens are too long to be guessed.
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, kw_only=True)
class TokenBook:
    """The tokens with which a service starts.

    ``files`` are the files that were read, with the role of their tokens. ``store`` is the path of the run's token
    store. A marker file is written next to the store as soon as a token is needed, so that losing the store gives
    nobody access, even after a restart.
    """

    entries: tuple[Entry, ...] = ()
    store: Path | None = None
    files: tuple[tuple[Role, Path], ...] = ()

    def __post_init__(self) -> None:
        if len({digest for digest, _ in self.entries}) != len(self.entries):
            raise TokenError(
                "Expected a different token for each caller, got one token twice in the token files or environment "
                "variables; make another with `openssl rand -hex 32`."
            )

    @property
    def is_empty(self) -> bool:
        """True if no token was ever configured for this service. A token store counts as a token, even if it is
        empty."""
        stored = self.store is not None and any(map(os.path.lexists, (self.store, _mark(self.store))))
        return not (self.entries or stored)


def read_tokens(
    environment: Mapping[str, str], *, analyst_file: Path | None = None, operator_file: Path | None = None
) -> TokenBook:
    """Read tokens from files, or from FAIRPATE_ANALYST_TOKEN and FAIRPATE_OPERATOR_TOKEN for a role without a file.

    A file has one token per line, optionally preceded by the owner's name; without one, the owner is named after role
    and line number. TokenError for a token shorter than 24 characters, a token given twice, or a file that others than
    its owner may read.
    """
    entries: list[Entry] = []
    files: list[tuple[Role, Path]] = []
    sources: tuple[tuple[Role, Path | None], ...] = (("analyst", analyst_file), ("operator", operator_file))
    for role, path in sources:
        variable = _VARIABLES[role]
        if path is not None:
            # Read again by the actor, whose working directory may be another one.
            files.append((role, path.absolute()))
            entries += _parse(read_private(path), role, str(path))
        elif environment.get(variable):
            entries += _parse(environment[variable], role, variable)
    return TokenBook(entries=tuple(entries), files=tuple(files))


def forget_variables() -> None:
    """Remove the variables of :func:`read_tokens` from this process's environment, so that no process that it starts
    inherits a token, and overwrite them where ``/proc/PID/environ`` shows them."""
    find = ctypes.CDLL(None).getenv
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    for variable in _VARIABLES.values():
        if (value := os.environ.get(variable)) is not None:
            # Without this, the memory from which the system shows a process's first environment would keep the token.
            if address := find(variable.encode()):
                ctypes.memset(address, 0, len(os.fsencode(value)))
            del os.environ[variable]


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address ``host``; False for any name except localhost."""
    # No other name is trusted: it may resolve to another address tomorrow.
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_private(path: Path) -> str:
    """Return the text of the token file ``path``. TokenError if it cannot be read, or if users other than its owner may
    read it."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise TokenError(
            f"{path}: cannot be read as a token file ({reason}); give a readable file of tokens."
        ) from error
    if os.name == "posix" and mode & 0o077:
        raise TokenError(
            f"{path}: other users may read this token file (mode {mode & 0o777:o}); run `chmod 600 {path}`."
        )
    return text


def _parse(text: str, role: Role, source: str) -> list[Entry]:
    rows = [line.split() for line in text.splitlines() if line.strip()]
    if not rows:
        raise TokenError(f"{source}: contains no token; write one of at least {_MIN_TOKEN_CHARACTERS} characters.")
    found = []
    for number, row in enumerate(rows, 1):
        at = f"{source}, line {number}"
        if len(row) not in (1, 2):
            raise TokenError(f"{at}: expected a token, or a name and a token, got {len(row)} words; remove the others.")
        if len(row[-1]) < _MIN_TOKEN_CHARACTERS:
            what = f"expected a token of at least {_MIN_TOKEN_CHARACTERS} characters, got {len(row[-1])}"
            raise TokenError(f"{at}: {what}; make one with `openssl rand -hex 32`.")
        if len(row) == 2:
            _check_name(row[0], at)  # its error does not show the name, which may be a misplaced token
        name = row[0] if len(row) == 2 else f"{role}-{number}"
        found.append((token_digest(row[-1]), KnownCaller(name=name, role=role)))
    return found


def _check_name(name: str, source: str) -> None:
    """Raise TokenError unless ``name``, the owner of a token, is one plain word and not the name of callers without a
    token. ``source`` says in the message where the name was given."""
    # One plain word can be shown in the ledger, in logs and on a terminal.
    if not re.fullmatch(_NAME, name):
        raise TokenError(f"{source}: expected a name of at most 64 letters, digits, '.', '_', '@' and '-'; correct it.")
    if name == LOCAL_ANALYST.name:
        raise TokenError(f"{source}: '{name}' is the name of callers without a token; give another name.")


Name = Annotated[str, StringConstraints(pattern=f"^{_NAME}$")]


@dataclass(frozen=True, kw_only=True)
class StoredToken:
    """The digest of one token, with its owner and role. Times are in seconds since 1970; ``expires_s`` None: never."""

    name: Name
    role: Role
    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
    created_s: float
    expires_s: float | None = None

    def is_good(self, now_s: float) -> bool:
        """Return whether the token is still valid at ``now_s``."""
        return self.expires_s is None or now_s < self.expires_s


class TokenStore(BaseModel):
    """The tokens of a run and the limits of their owners: the content of the token store's file, with all types
    checked.

    Expired tokens stay in the file until the next change.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    format: Literal["fairpate.tokens/1"] = "fairpate.tokens/1"
    tokens: tuple[StoredToken, ...]
    limits: dict[Name, CallerLimit]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The stored tokens, each as a pair of its digest and the caller that it identifies."""
        return tuple(
            (bytes.fromhex(t.sha256), KnownCaller(name=t.name, role=t.role, expires_s=t.expires_s)) for t in self.tokens
        )

    def with_tokens(self, tokens: Iterable[StoredToken]) -> TokenStore:
        """Return this store with its tokens replaced by ``tokens``."""
        return self.model_copy(update={"tokens": tuple(tokens)})

    def of(self, name: str) -> tuple[StoredToken, ...]:
        """Return the tokens whose owner is ``name``, oldest first. TokenError if this owner has no token."""
        if not (found := tuple(token for token in self.tokens if token.name == name)):
            known = ", ".join(sorted({token.name for token in self.tokens})) or "none yet"
            raise TokenError(f"{name}: this name has no valid token; add one, or give one of these names: {known}.")
        return found


NO_TOKENS = TokenStore(tokens=(), limits={})


def added(
    store: TokenStore,
    name: str,
    *,
    role: Role,
    limit: CallerLimit,
    expires_s: float | None,
    now_s: float,
    before: CallerLimit = NO_LIMIT,
) -> tuple[TokenStore, str]:
    """Return ``store`` with a new token for the new owner ``name``, and this token. TokenError for a name that is taken
    or invalid.

    ``limit`` is stored for the owner. Values that it does not set are taken from the store's limit for this name, or
    else from ``before``, the limit in the ledger.
    """
    _check_name(name, repr(name))
    if any(token.name == name for token in store.tokens):
        raise TokenError(f"{name}: this name has a token already; rotate the token, or give another name.")
    store, token = _with_new_token(store, name, role=role, expires_s=expires_s, now_s=now_s)
    # A name that was used before keeps the limits that are not given now: a new token must not lift them.
    given = {kind: value for kind, value in asdict(limit).items() if value is not None}
    before = store.limits.get(name, before)
    return (limited(store, name, replace(before, **given)) if given else store), token


def rotated(store: TokenStore, name: str, *, old_expires_s: float, now_s: float) -> tuple[TokenStore, str]:
    """Return ``store`` with another token for the owner ``name``, and this token. The owner's older tokens expire at
    ``old_expires_s`` at the latest."""
    # The new token inherits the end of the newest one: rotating must not prolong access.
    newest = store.of(name)[-1]
    store = store.with_tokens(_by(t, old_expires_s) if t.name == name else t for t in store.tokens)
    return _with_new_token(store, name, role=newest.role, expires_s=newest.expires_s, now_s=now_s)


def expired(store: TokenStore, name: str, *, expires_s: float | None) -> TokenStore:
    """Return ``store`` with another expiry for the owner ``name``: its newest token expires at ``expires_s``, and older
    ones no later."""
    newest = store.of(name)[-1]
    # A token that was rotated out is never prolonged: it may have leaked.
    changed = {token: _by(token, expires_s) for token in store.of(name)}
    changed[newest] = replace(newest, expires_s=expires_s)
    return store.with_tokens(changed.get(token, token) for token in store.tokens)


def _by(token: StoredToken, expires_s: float | None) -> StoredToken:
    """Return ``token`` changed so that it expires at ``expires_s`` at the latest; None changes nothing."""
    return token if expires_s is None or not token.is_good(expires_s) else replace(token, expires_s=expires_s)


def limited(store: TokenStore, name: str, limit: CallerLimit) -> TokenStore:
    """Return ``store`` with ``limit`` for the owner ``name``. TokenError for an owner without a token."""
    store.of(name)
    return store.model_copy(update={"limits": {**store.limits, name: limit}})


def revoked(store: TokenStore, name: str) -> TokenStore:
    """Return ``store`` without the tokens of the owner ``name``; the owner's limit stays. TokenError for an owner
    without a token."""
    store.of(name)
    # The limit stays: otherwise a new token would give the name what the limit had refused.
    return store.with_tokens(token for token in store.tokens if token.name != name)


def _with_new_token(
    store: TokenStore, name: str, *, role: Role, expires_s: float | None, now_s: float
) -> tuple[TokenStore, str]:
    token = secrets.token_hex(32)
    digest = token_digest(token).hex()
    stored = StoredToken(name=name, role=role, sha256=digest, created_s=round(now_s), expires_s=expires_s)
    return store.with_tokens((*store.tokens, stored)), token


def read_store(path: Path) -> TokenStore:
    """Read the token store at ``path``. TokenError if it is damaged or cannot be read, or if users other than its owner
    may read it."""
    text = read_private(path)
    try:
        store = TokenStore.model_validate_json(text)
        TokenBook(entries=store.entries)  # refuses one token under two names
    except ValueError as error:
        damage = str(error)
        if isinstance(error, ValidationError):  # its own text would show what the file holds
            first = error.errors(include_url=False, include_input=False)[0]
            damage = f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {expected(first)}"
        raise TokenError(
            f"{path}: the token store is damaged ({damage}); restore it, or remove it and add tokens."
        ) from error
    return store


def change(
    path: Path,
    function: Callable[[TokenStore], tuple[TokenStore, ResultT]],
    *,
    before: Callable[[], object] = lambda: None,
) -> ResultT:
    """Change the token store at ``path`` by ``function``, which gets the store without expired tokens, and returns the
    store to write and a result. Return this result.

    ``before`` is called once ``function`` has accepted the change, before anything is written. Only one process changes
    the store at a time. TokenError for a store that :func:`read_store` does not accept; after an error, no file was
    changed and a service that needed no token needs none.
    """
    with folder_held(path, create=False):
        kept = read_store(path) if os.path.lexists(path) else NO_TOKENS
        now_s = time.time()
        store, result = function(kept.with_tokens(t for t in kept.tokens if t.is_good(now_s)))
        before()
        # Before the store: a crash in between leaves a service that admits no caller, never one without tokens.
        _make_mark(path)
        text = store.model_dump_json(indent=1) + "\n"
        write_atomically(path, lambda unfinished: unfinished.write_text(text, encoding="utf-8"), private=True)
    return result


def _mark(store: Path) -> Path:
    """Return the path of the marker file next to a token store. If the marker exists, callers need tokens even if the
    store is lost."""
    return store.with_suffix(".needed")


def _make_mark(store: Path) -> None:
    """Create the marker file next to a token store, durably: from now on callers need tokens."""
    if not os.path.lexists(_mark(store)):
        write_atomically(_mark(store), lambda unfinished: unfinished.touch(mode=0o600))


class LiveTokens:
    """The tokens that a running service accepts: those with which it started, and the present ones of its token files
    and its token store.

    Once a token was needed, one is always needed, even after a restart: emptying or losing the store gives nobody
    access. ``stored`` is the store as it was last read.
    """

    def __init__(self, book: TokenBook) -> None:
        self._book, self.stored = book, NO_TOKENS
        self._stored_entries: tuple[Entry, ...] = ()
        self._store_version: tuple[int, ...] = ()
        self._file_versions: dict[Path, tuple[int, ...]] = {}
        self._look_again_s = 0.0
        # The event loop asks, and so does the thread that charges: an older content must not be kept as the newest.
        self._looking = threading.Lock()
        self._needs_token = False
        if not book.is_empty:
            self._need_token()

    def caller(self, token: str | None) -> KnownCaller | None:
        """Return the caller that ``token`` identifies, None for an unknown token; the local analyst if no token is
        needed."""
        self._look()
        if not self._needs_token:
            return LOCAL_ANALYST
        # Every digest is compared in full even after a match, so that the time reveals nothing about a token. Tokens of
        # the start are last, so that they win.
        offered, found, now_s = token_digest(token or ""), None, time.time()
        for digest, caller in (*self._stored_entries, *self._book.entries):
            if hmac.compare_digest(digest, offered) and (caller.expires_s is None or now_s < caller.expires_s):
                found = caller
        return found if token else None

    @property
    def needs_token(self) -> bool:
        """True if callers must send a token."""
        self._look()
        return self._needs_token

    def _look(self) -> None:
        """Look at most every half second whether the token files or the store have changed, and read those again."""
        with self._looking:
            now_s = time.monotonic()
            if now_s < self._look_again_s:
                return
            self._look_again_s = now_s + _LOOK_EVERY_S
            found = {path: version for _, path in self._book.files if (version := file_version(path))}
            # A file that is gone leaves its tokens in force: the service may have moved to a node without it.
            if len(found) == len(self._book.files) and found != self._file_versions:
                self._file_versions = found
                roles = {role for role, _ in self._book.files}
                kept = tuple(entry for entry in self._book.entries if entry[1].role not in roles)
                try:
                    read = [_parse(read_private(path), role, str(path)) for role, path in self._book.files]
                    self._book = replace(self._book, entries=(*kept, *(entry for part in read for entry in part)))
                except TokenError as error:
                    # No access rather than too much: a token may have been removed from the file that cannot be read.
                    _log.error("No token of the token files is accepted until this error is fixed: %s", error)
                    self._book = replace(self._book, entries=kept)
            path = self._book.store
            # The version before the content: a store that is replaced in between is read again at the next look.
            version = () if path is None else file_version(path)
            if path is None or (version and version == self._store_version):
                return
            self._store_version = version
            # The limits stay: no caller may spend more because a file is gone or cannot be read.
            store = self.stored.with_tokens(())
            try:
                if version:
                    # Before the store is read: a damaged store, too, admits no caller without a token.
                    self._need_token()
                    store = read_store(path)
            except Exception as error:  # noqa: BLE001 - after any error, tokens that were good may be revoked
                _log.error("No token of the token store is accepted until this error is fixed: %s", error)
            self.stored, self._stored_entries = store, store.entries

    def _need_token(self) -> None:
        self._needs_token = True
        try:
            if self._book.store is not None:
                _make_mark(self._book.store)
        except OSError as error:
            _log.error(
                "The token store's marker file cannot be written, so that without the store a restarted service may "
                "admit callers without a token; repair the folder: %s",
                error,
            )
