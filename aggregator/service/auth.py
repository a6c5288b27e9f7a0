"""Who may ask an aggregator: bearer tokens for two roles, and the token store of a run.

Tokens come from the environment or from files when a service starts, and from the token store; files and store are read
again when they change. Only SHA-256 digests of tokens are kept, so that a token is in no process list, actor argument,
log line or traceback. Without any token the service is for this machine alone, and for analysts alone: what an operator
may see always needs a token.

The store is one file of the operator's (mode 0600), written whole or not at all, and changed while the run is served.
It holds digests of tokens that were made here from 256 random bits, so that nothing in it opens anything. Changes are
pure functions of what the store holds; :func:`change` applies one under a lock on the folder. A store that cannot be
read admits nobody.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from aggregator.ledger import NO_LIMIT, OwnLimit
from aggregator.sqlite import folder_held
from fairpate.config_reader import expected
from fairpate.files import file_version, write_atomically
from fairpate.http_requests import LOCAL_ANALYST, Caller, Role
from fairpate.types import UsageError

MIN_TOKEN_CHARACTERS = 24
NAME = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"


class TokenError(UsageError, ValueError):
    """A token that cannot be used; the message names where it came from and the remedy, never the token."""


@dataclass(frozen=True, kw_only=True)
class TokenBook:
    """The SHA-256 digest of every token with its caller. ``files``: where the tokens of a role came from.

    ``store``: the token store of the run. A mark is made next to it once a token was asked for, so that a store that is
    lost opens nothing, also after a restart.
    """

    entries: tuple[tuple[bytes, Caller], ...] = ()
    store: Path | None = None
    files: tuple[tuple[Role, Path], ...] = ()

    def __post_init__(self) -> None:
        if len({digest for digest, _ in self.entries}) != len(self.entries):
            raise TokenError("Expected different tokens for different callers, got one token twice; make another.")

    @property
    def is_empty(self) -> bool:
        """Whether no token is configured and none ever was; a store asks for tokens whatever it holds."""
        stored = self.store is not None and any(map(os.path.lexists, (self.store, mark(self.store))))
        return not (self.entries or stored)

    def caller(self, token: str | None) -> Caller | None:
        """Return the owner of ``token``; None for an unknown one."""
        # Every entry is compared, whole, whichever matches: the time says nothing about a token.
        offered, found, now_s = token_digest(token or ""), None, time.time()
        for digest, caller in self.entries:
            if hmac.compare_digest(digest, offered) and (caller.expires_s is None or now_s < caller.expires_s):
                found = caller
        return found if token else None


def read_tokens(
    environment: Mapping[str, str],
    *,
    analyst_file: Path | None = None,
    operator_file: Path | None = None,
) -> TokenBook:
    """Tokens from files, or from FAIRPATE_ANALYST_TOKEN and FAIRPATE_OPERATOR_TOKEN for a role without a file.

    A file holds one token per line, each with a name in front of it or without: then it is called by its role and its
    line. TokenError for a token shorter than 24 characters, a token given twice, or a file that others than its owner
    may read.
    """
    entries: list[tuple[bytes, Caller]] = []
    files: list[tuple[Role, Path]] = []
    sources: tuple[tuple[Role, Path | None], ...] = (("analyst", analyst_file), ("operator", operator_file))
    for role, path in sources:
        variable = f"FAIRPATE_{role.upper()}_TOKEN"
        if path is not None:
            files.append((role, path.absolute()))
            entries += _parse(read_private(path), role, str(path))
        elif environment.get(variable):
            entries += _parse(environment[variable], role, variable)
    return TokenBook(entries=tuple(entries), files=tuple(files))


def _with_files_read(book: TokenBook) -> TokenBook:
    """The book with the tokens that its files hold now. TokenError as :func:`read_tokens`."""
    roles = {role for role, _ in book.files}
    entries = [entry for entry in book.entries if entry[1].role not in roles]
    for role, path in book.files:
        entries += _parse(read_private(path), role, str(path))
    return replace(book, entries=tuple(entries))


def mark(store: Path) -> Path:
    """The file that says that tokens are needed, whatever becomes of the store beside it."""
    return store.with_suffix(".needed")


def is_loopback(host: str) -> bool:
    """Whether ``host`` is reached from this machine only. A name other than localhost counts as not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_name(name: str, source: str) -> None:
    """TokenError for a name that is not a plain word, or that callers without a token are charged under."""
    # A plain word can stand in the ledger, in logs and on a terminal.
    if not re.fullmatch(NAME, name):
        raise TokenError(f"{source}: expected a name of at most 64 letters, digits, '.', '_', '@' and '-'.")
    if name == LOCAL_ANALYST.name:
        raise TokenError(f"{source}: '{name}' is the name of callers without a token; give another name.")


def token_digest(token: str) -> bytes:
    """What is kept of a token."""
    # A token of bytes that are no text is nobody's, and no error.
    # No slow hash: one is taken at every request, and tokens are longer than what can be guessed.
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def read_private(path: Path) -> str:
    """The text of a file with tokens. TokenError where it cannot be read, or others than its owner may."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise TokenError(
            f"{path}: cannot be read as a token file ({reason}); give the file with the tokens."
        ) from error
    if os.name == "posix" and mode & 0o077:
        raise TokenError(f"{path}: others may read it (mode {mode & 0o777:o}); run `chmod 600 {path}`.")
    return text


def _parse(text: str, role: Role, source: str) -> list[tuple[bytes, Caller]]:
    rows = [line.split() for line in text.splitlines() if line.strip()]
    if not rows:
        raise TokenError(f"{source}: holds no token; write one of at least {MIN_TOKEN_CHARACTERS} characters.")
    return [_entry(row, role, f"{source}, line {number}", f"{role}-{number}") for number, row in enumerate(rows, 1)]


def _entry(row: Sequence[str], role: Role, source: str, name: str) -> tuple[bytes, Caller]:
    if len(row) not in (1, 2):
        raise TokenError(f"{source}: expected `token` or `name token`, got {len(row)} words.")
    token = row[-1]
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise TokenError(
            f"{source}: expected a token of at least {MIN_TOKEN_CHARACTERS} characters, got {len(token)}; "
            "make one with `openssl rand -hex 32`."
        )
    if len(row) == 2:
        name = row[0]
        check_name(name, source)  # not shown: it may be a token that was put in its place
    return token_digest(token), Caller(name=name, role=role)


FORMAT: Literal["fairpate.tokens/1"] = "fairpate.tokens/1"
Name = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]
_LOOK_EVERY_S = 0.5
_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class StoredToken:
    """One token's digest, and whose it is. Seconds since 1970; ``expires_s`` None: never."""

    name: Name
    role: Role
    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
    created_s: float
    expires_s: float | None = None

    def is_good(self, now_s: float) -> bool:
        """Whether it admits its caller now."""
        return self.expires_s is None or now_s < self.expires_s


class _File(BaseModel):
    """The store as it is written, every type checked."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    format: Literal["fairpate.tokens/1"] = FORMAT
    tokens: tuple[StoredToken, ...]
    limits: dict[Name, OwnLimit]


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """The tokens of a run, ended ones until the next change, and the limits of their names."""

    tokens: tuple[StoredToken, ...] = ()
    limits: Mapping[str, OwnLimit] = field(default_factory=dict)

    @property
    def book(self) -> TokenBook:
        """The tokens as a service looks them up."""
        return TokenBook(
            entries=tuple(
                (bytes.fromhex(t.sha256), Caller(name=t.name, role=t.role, expires_s=t.expires_s)) for t in self.tokens
            )
        )

    def of(self, name: str) -> tuple[StoredToken, ...]:
        """The tokens of ``name``. TokenError if it has none."""
        found = tuple(token for token in self.tokens if token.name == name)
        if not found:
            known = ", ".join(sorted({token.name for token in self.tokens})) or "none yet"
            raise TokenError(f"{name}: has no token here that is good; add one, or give one of: {known}.")
        return found

    def without_ended(self, now_s: float) -> TokenStore:
        """The store without the tokens that ended: nothing makes one of them good again."""
        return replace(self, tokens=tuple(token for token in self.tokens if token.is_good(now_s)))


def added(
    store: TokenStore,
    name: str,
    *,
    role: Role,
    limit: OwnLimit,
    expires_s: float | None,
    now_s: float,
    before: OwnLimit = NO_LIMIT,
) -> tuple[TokenStore, str]:
    """The store with a new token for a new ``name``, and the token. TokenError for a name that is taken or unfit.

    ``before``: the limit that the name is known to have where the store knows none.
    """
    check_name(name, repr(name))
    if any(token.name == name for token in store.tokens):
        raise TokenError(f"{name}: has a token already; rotate it, or give another name.")
    store, token = _with_new_token(store, name, role=role, expires_s=expires_s, now_s=now_s)
    # A name that was here before keeps its limits, but for those that are stated: a new token must not lift them.
    given = {kind: value for kind, value in asdict(limit).items() if value is not None}
    before = store.limits.get(name, before)
    return (limited(store, name, replace(before, **given)) if given else store), token


def rotated(store: TokenStore, name: str, *, old_expires_s: float, now_s: float) -> tuple[TokenStore, str]:
    """The store with another token for ``name``, and the token; those before end at ``old_expires_s``, or sooner."""
    newest = store.of(name)[-1]
    store = replace(store, tokens=tuple(_by(t, old_expires_s) if t.name == name else t for t in store.tokens))
    return _with_new_token(store, name, role=newest.role, expires_s=newest.expires_s, now_s=now_s)


def expired(store: TokenStore, name: str, *, expires_s: float | None) -> TokenStore:
    """The store in which the newest token of ``name`` ends at ``expires_s``, and those before it then or sooner."""
    newest = store.of(name)[-1]

    def ending(token: StoredToken) -> StoredToken:
        if token.name != name:
            return token
        # One that was rotated out lasts no longer for it: it may have leaked.
        return replace(token, expires_s=expires_s) if token is newest else _by(token, expires_s)

    return replace(store, tokens=tuple(map(ending, store.tokens)))


def _by(token: StoredToken, expires_s: float | None) -> StoredToken:
    """The token, which ends at ``expires_s`` at the latest."""
    return token if expires_s is None or not token.is_good(expires_s) else replace(token, expires_s=expires_s)


def limited(store: TokenStore, name: str, limit: OwnLimit) -> TokenStore:
    """The store in which ``name`` has this limit. TokenError for a name without a token."""
    store.of(name)
    return replace(store, limits={**store.limits, name: limit})


def revoked(store: TokenStore, name: str) -> TokenStore:
    """The store without the tokens of ``name``; its limit stays."""
    store.of(name)
    return replace(store, tokens=tuple(token for token in store.tokens if token.name != name))


def _with_new_token(
    store: TokenStore, name: str, *, role: Role, expires_s: float | None, now_s: float
) -> tuple[TokenStore, str]:
    token = secrets.token_hex(32)
    stored = StoredToken(
        name=name, role=role, sha256=token_digest(token).hex(), created_s=round(now_s), expires_s=expires_s
    )
    return replace(store, tokens=(*store.tokens, stored)), token


def read_store(path: Path) -> TokenStore:
    """The store at ``path``. TokenError where it cannot be read, is damaged, or others than its owner may read it."""
    text = read_private(path)
    try:
        found = _File.model_validate_json(text)
        store = TokenStore(tokens=found.tokens, limits=found.limits)
        # Built for its check: one token under two names is damage.
        _ = store.book
    except ValueError as error:
        raise TokenError(f"{path}: is damaged ({_damage(error)}); restore it, or remove it and add tokens.") from error
    return store


def _damage(error: ValueError) -> str:
    """What is wrong, without what the file holds."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {expected(first)}"
    return str(error)


def change(path: Path, function: Callable[[TokenStore], tuple[TokenStore, ResultT]]) -> ResultT:
    """Put what ``function`` makes of the store, without what ended, in its place. Errors as :func:`read_store`.

    One process at a time.
    """
    with folder_held(path, create=False):
        before = read_store(path) if os.path.lexists(path) else TokenStore()
        # Before the store: a crash in between asks for tokens that nobody has, and never for none.
        _make_mark(path)
        store, result = function(before.without_ended(time.time()))
        write_atomically(path, lambda unfinished: _write(unfinished, store), private=True)
    return result


def _make_mark(store: Path) -> None:
    """Note, durably, that tokens are needed from now on."""
    if not os.path.lexists(mark(store)):
        write_atomically(mark(store), lambda unfinished: unfinished.touch(mode=0o600))


def _write(path: Path, store: TokenStore) -> None:
    values = {
        "format": FORMAT,
        "tokens": [asdict(token) for token in store.tokens],
        "limits": {name: asdict(limit) for name, limit in store.limits.items()},
    }
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


class LiveTokens:
    """Who may ask a service now: the tokens it was started with, and those of its files and its store as they are now.

    Once a token was asked for, one is needed for ever, also after a restart: a store that is emptied or lost opens
    nothing.
    """

    def __init__(self, book: TokenBook) -> None:
        self._book, self._stored = book, TokenStore()
        self._stored_book = self._stored.book
        self._store_version: tuple[int, ...] = ()
        self._file_versions: dict[Path, tuple[int, ...]] = {}
        self._look_again_s = 0.0
        self._needs_token = False
        if not book.is_empty:
            self._need_token()

    @property
    def limits(self) -> Mapping[str, OwnLimit]:
        """The limits of the store, as they were last looked at."""
        return self._stored.limits

    def caller(self, token: str | None) -> Caller | None:
        """Return the owner of ``token``, None for an unknown one; where no token is needed, the local analyst."""
        self._look()
        if not self._needs_token:
            return LOCAL_ANALYST
        # Both are asked, so that the time does not say which of them knows the token.
        stored, given = self._stored_book.caller(token), self._book.caller(token)
        return given or stored

    @property
    def needs_token(self) -> bool:
        """Whether callers must send a token."""
        self._look()
        return self._needs_token

    def _look(self) -> None:
        """Read files and store again if they changed."""
        now_s = time.monotonic()
        if now_s < self._look_again_s:
            return
        self._look_again_s = now_s + _LOOK_EVERY_S
        self._look_at_files()
        if self._book.store is not None:
            self._look_at_store(self._book.store)

    def _look_at_files(self) -> None:
        found = {path: version for _, path in self._book.files if (version := file_version(path))}
        # A file that is gone leaves its tokens as they are: the service may have moved to a node without it.
        if len(found) < len(self._book.files) or found == self._file_versions:
            return
        self._file_versions = found
        try:
            self._book = _with_files_read(self._book)
        except TokenError as error:
            # Closed rather than open: a token may have been taken out of the file that cannot be read.
            _log.error("Nobody is admitted by the token files: %s", error)
            roles = {role for role, _ in self._book.files}
            kept = tuple(entry for entry in self._book.entries if entry[1].role not in roles)
            self._book = replace(self._book, entries=kept)

    def _look_at_store(self, path: Path) -> None:
        # Before it is read: one that is replaced in between is read again at the next look.
        version = file_version(path)
        if version and version == self._store_version:
            return
        self._store_version = version
        try:
            if version:
                # Before it is read: a store that is damaged, too, lets in nobody without a token.
                self._need_token()
                self._take(read_store(path))
                return
        except Exception as error:  # noqa: BLE001 - whatever it is, what was good before may be so no more
            _log.error("Nobody is admitted by the token store: %s", error)
        # The limits stay: nobody may spend more because a file is gone or cannot be read.
        self._take(replace(self._stored, tokens=()))

    def _need_token(self) -> None:
        self._needs_token = True
        try:
            if self._book.store is not None:
                _make_mark(self._book.store)
        except OSError as error:
            _log.error("Tokens are needed, and after a restart without the token store they may not be: %s", error)

    def _take(self, store: TokenStore) -> None:
        self._stored, self._stored_book = store, store.book
