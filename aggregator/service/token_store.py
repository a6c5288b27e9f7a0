"""The token store of a run: whose tokens are good, until when, and what each name may spend.

One file of the operator's (mode 0600), written whole or not at all, changed while the run is served, and read again by
the service as soon as it changed. It holds SHA-256 digests of tokens that were made here from 256 random bits, so that
nothing in it opens anything. Changes are pure functions of what the store holds; :func:`change` applies one under a
lock on the folder. A store that cannot be read admits nobody.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from aggregator.ledger.entries import NO_LIMIT, OwnLimit
from aggregator.ledger.files import folder_held
from aggregator.service.tokens import (
    LOCAL_ANALYST,
    NAME,
    OIDC_PREFIX,
    Caller,
    Role,
    TokenBook,
    TokenError,
    check_name,
    mark,
    read_private,
    token_digest,
)
from fairpate.faults import expected
from fairpate.files import write_atomically

if TYPE_CHECKING:
    from aggregator.service.oidc import Issuer

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
    """The store in which ``name`` has this limit: one with a token here, or with one of an OpenID Connect issuer."""
    if not (name.startswith(OIDC_PREFIX) and re.fullmatch(NAME, name)):
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


def _issuer_of(book: TokenBook) -> Issuer | None:
    if book.oidc is None:
        return None
    from aggregator.service.oidc import Issuer

    return Issuer(book.oidc)


class LiveTokens:
    """Who may ask a service now: the tokens it was started with, and those of its store as the file is now.

    Once a token was asked for, one is needed for ever, also after a restart: a store that is emptied or lost opens
    nothing.
    """

    def __init__(self, book: TokenBook) -> None:
        self._book, self._stored = book, TokenStore()
        self._stored_book = self._stored.book
        self._seen: tuple[int, ...] | None = None
        self._look_again_s = 0.0
        self._issuer = _issuer_of(book)
        self._needs_token = False
        if not book.is_empty:
            self._need_token()

    @property
    def limits(self) -> Mapping[str, OwnLimit]:
        """The limits of the store, as they were last looked at."""
        return self._stored.limits

    def caller(self, token: str | None) -> Caller | None:
        """Whose ``token`` this is; None: nobody's. Where no token is needed everybody is the local analyst."""
        self._look()
        if not self._needs_token:
            return LOCAL_ANALYST
        stored, given = self._stored_book.caller(token), self._book.caller(token)
        return given or stored or (self._issuer.caller(token) if self._issuer else None)

    async def prepare(self, token: str) -> None:
        """Before :meth:`caller`: let the issuer of a signed token say which keys it has now."""
        if self._issuer is not None:
            await self._issuer.prepare(token)

    @property
    def needs_token(self) -> bool:
        """Whether callers must send a token."""
        self._look()
        return self._needs_token

    def _look(self) -> None:
        """Read the store if it changed."""
        now_s, path = time.monotonic(), self._book.store
        if path is None or now_s < self._look_again_s:
            return
        self._look_again_s = now_s + _LOOK_EVERY_S
        try:
            # Before it is read: one that is replaced in between is read again at the next look.
            found = path.stat()
            # Any of these: a store may be replaced within a tick of the clock, in its old size, or opened to others.
            seen = (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode)
            if seen == self._seen:
                return
            self._need_token()
            # Tokens were asked for just above: a store that is damaged, too, lets in nobody without one.
            self._seen = seen
            self._take(read_store(path))
        except FileNotFoundError:
            self._seen = None
            self._take(replace(self._stored, tokens=()))
        except Exception as error:  # noqa: BLE001 - whatever it is, what was good before may be so no more
            # The limits stay: nobody may spend more because a file cannot be read.
            _log.error("Nobody is admitted by the token store: %s", error)
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
