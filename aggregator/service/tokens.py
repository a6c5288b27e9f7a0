"""Who is asking: bearer tokens for two roles, compared in constant time.

Tokens come from the environment or from files when a service starts, and from the token store of its run, which may
change while it runs (:mod:`aggregator.service.token_store`). Only digests of tokens are kept, so that a token is in no
process list, actor argument, log line or traceback. Without any token the service is for this machine alone, and for
analysts alone: what an operator may see needs a token always.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fairpate.types import UsageError

if TYPE_CHECKING:
    from aggregator.service.oidc import OidcConfig

Role = Literal["analyst", "operator"]
MIN_TOKEN_CHARACTERS = 24
NAME = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"
OIDC_PREFIX = "oidc-"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")


class TokenError(UsageError, ValueError):
    """A token that cannot be used; the message names where it came from and the remedy, never the token."""


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who sent a request. Those of one ``name`` share what they may spend. ``expires_s``: since 1970; None: never."""

    name: str
    role: Role
    expires_s: float | None = None

    def __post_init__(self) -> None:
        if self.role not in ("analyst", "operator"):
            raise ValueError(f"Expected a role of analyst or operator, got {self.role}.")


LOCAL_ANALYST = Caller(name="local", role="analyst")


@dataclass(frozen=True, kw_only=True)
class TokenBook:
    """Every token's SHA-256 digest and whose it is; empty where none is configured. ``store``: where more may lie;
    ``oidc``: whose signed tokens are good besides.

    Beside the store lies a mark once a token was asked for, so that a store that is lost opens nothing, also after a
    restart.
    """

    entries: tuple[tuple[bytes, Caller], ...] = ()
    store: Path | None = None
    oidc: OidcConfig | None = None

    def __post_init__(self) -> None:
        if len({digest for digest, _ in self.entries}) != len(self.entries):
            raise TokenError("Expected different tokens for different callers, got one token twice; make another.")

    @property
    def is_empty(self) -> bool:
        """Whether no token is configured and none ever was; a store asks for tokens whatever it holds."""
        stored = self.store is not None and any(map(os.path.lexists, (self.store, mark(self.store))))
        return not (self.entries or self.oidc or stored)

    def caller(self, token: str | None) -> Caller | None:
        """Whose ``token`` this is. Every entry is compared, whole, whichever matches: the time tells nothing."""
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
    sources: tuple[tuple[Role, Path | None], ...] = (("analyst", analyst_file), ("operator", operator_file))
    for role, path in sources:
        variable = f"FAIRPATE_{role.upper()}_TOKEN"
        if path is not None:
            entries += _parse(read_private(path), role, str(path))
        elif environment.get(variable):
            entries += _parse(environment[variable], role, variable)
    return TokenBook(entries=tuple(entries))


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
    """TokenError for a name that is not a plain word, which the ledger, logs and a terminal can all hold.

    And for one that others are charged under: who needs no token, or comes with one of an OpenID Connect issuer.
    """
    if not re.fullmatch(NAME, name):
        raise TokenError(f"{source}: expected a name of at most 64 letters, digits, '.', '_', '@' and '-'.")
    if name == LOCAL_ANALYST.name or name.startswith(OIDC_PREFIX):
        raise TokenError(
            f"{source}: '{LOCAL_ANALYST.name}' and names that begin with '{OIDC_PREFIX}' are those of callers without "
            "a token of this service; give another name."
        )


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
