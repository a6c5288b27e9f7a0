"""Who is asking: bearer tokens for two roles, compared in constant time, and how much one token may spend.

Only digests of tokens are kept, so that a token is in no process list, actor argument, log line or traceback. Without
any token the service is for this machine alone, and for analysts alone: what an operator may see needs a token always.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fairpate.types import UsageError

Role = Literal["analyst", "operator"]
MIN_TOKEN_CHARACTERS = 24
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")


class TokenError(UsageError, ValueError):
    """A token that cannot be used; the message names where it came from and the remedy, never the token."""


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who sent a request. ``name`` tells the analysts of one token file apart: those of one name share a quota."""

    name: str
    role: Role


LOCAL_ANALYST = Caller(name="local", role="analyst")


@dataclass(frozen=True, kw_only=True)
class TokenBook:
    """Every token's SHA-256 digest and whose it is; empty where none is configured."""

    entries: tuple[tuple[bytes, Caller], ...] = ()

    def __post_init__(self) -> None:
        if len({digest for digest, _ in self.entries}) != len(self.entries):
            raise TokenError("Expected different tokens for different callers, got one token twice; make another.")

    @property
    def is_empty(self) -> bool:
        """Whether no token is configured."""
        return not self.entries

    def caller(self, token: str | None) -> Caller | None:
        """Whose ``token`` this is. Every entry is compared, whole, whichever matches: the time tells nothing."""
        offered, found = _digest(token or ""), None
        for digest, caller in self.entries:
            if hmac.compare_digest(digest, offered):
                found = caller
        return found


def read_tokens(
    environment: Mapping[str, str], *, analyst_file: Path | None = None, operator_file: Path | None = None
) -> TokenBook:
    """Tokens from files, or from FAIRPATE_ANALYST_TOKEN and FAIRPATE_OPERATOR_TOKEN for a role without a file.

    A file holds one token per line, each with the name of its analyst in front of it or without. TokenError for a token
    shorter than 24 characters, a token given twice, or a file that others than its owner may read.
    """
    entries: list[tuple[bytes, Caller]] = []
    sources: tuple[tuple[Role, Path | None], ...] = (("analyst", analyst_file), ("operator", operator_file))
    for role, path in sources:
        variable = f"FAIRPATE_{role.upper()}_TOKEN"
        if path is not None:
            entries += _parse(_read(path), role, str(path))
        elif environment.get(variable):
            entries += _parse(environment[variable], role, variable)
    return TokenBook(entries=tuple(entries))


def is_loopback(host: str) -> bool:
    """Whether ``host`` is reached from this machine only. A name other than localhost counts as not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class QuotaRule:
    """``max_queries`` new queries per token at once, refilled evenly over ``period_s``; inf: no quota."""

    max_queries: float = math.inf
    period_s: float = 3600.0

    def __post_init__(self) -> None:
        if not self.max_queries > 0 or not 0 < self.period_s < math.inf:
            raise ValueError(
                f"Expected max_queries > 0 and 0 < period_s < inf, got {self.max_queries} and {self.period_s}."
            )


@dataclass(frozen=True, kw_only=True)
class QuotaRefusal:
    """Why a request is refused: ``allowed_now`` new queries are left, ``retry_after_s`` (inf: never) until it fits."""

    allowed_now: int
    retry_after_s: float


class QuotaExceededError(Exception):
    """A request of ``num_new`` new queries that its caller's quota has no room for."""

    def __init__(self, refusal: QuotaRefusal, num_new: int) -> None:
        super().__init__(f"{num_new} new queries, {refusal.allowed_now} allowed now")
        self.refusal, self.num_new = refusal, num_new


class Quotas:
    """What every caller may still spend: a bucket each, in memory, full at the start. Operators have none."""

    def __init__(self, rule: QuotaRule) -> None:
        self._rule = rule
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, caller: Caller, num_queries: int, *, now_s: float) -> QuotaRefusal | None:
        """Take ``num_queries`` from the caller's bucket, or say why not and take nothing."""
        rule = self._rule
        if caller.role == "operator" or math.isinf(rule.max_queries):
            return None
        level, filled_at_s = self._buckets.get(caller.name, (rule.max_queries, now_s))
        rate = rule.max_queries / rule.period_s
        level = min(rule.max_queries, level + (now_s - filled_at_s) * rate)
        if num_queries > level:
            self._buckets[caller.name] = (level, now_s)
            wait_s = (num_queries - level) / rate if num_queries <= rule.max_queries else math.inf
            return QuotaRefusal(allowed_now=int(level), retry_after_s=wait_s)
        self._buckets[caller.name] = (level - num_queries, now_s)
        return None

    def give_back(self, caller: Caller, num_queries: int) -> None:
        """Put back what was taken for queries that were not charged after all."""
        if caller.name in self._buckets:
            level, filled_at_s = self._buckets[caller.name]
            self._buckets[caller.name] = (min(self._rule.max_queries, level + num_queries), filled_at_s)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _read(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenError(f"{path}: cannot be read as a token file ({error}).") from error
    if os.name == "posix" and mode & 0o077:
        raise TokenError(f"{path}: others may read it (mode {mode & 0o777:o}); run `chmod 600 {path}`.")
    return text


def _parse(text: str, role: Role, source: str) -> list[tuple[bytes, Caller]]:
    rows = [line.split() for line in text.splitlines() if line.strip()]
    if not rows:
        raise TokenError(f"{source}: holds no token; write one of at least {MIN_TOKEN_CHARACTERS} characters.")
    salt = secrets.token_bytes(16)
    return [_entry(row, role, f"{source}, line {number}", salt) for number, row in enumerate(rows, start=1)]


def _entry(row: Sequence[str], role: Role, source: str, salt: bytes) -> tuple[bytes, Caller]:
    if len(row) not in (1, 2):
        raise TokenError(f"{source}: expected `token` or `name token`, got {len(row)} words.")
    token = row[-1]
    name = row[0] if len(row) == 2 else f"{role}-{hmac.digest(salt, _digest(token), 'sha256').hex()[:16]}"
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise TokenError(
            f"{source}: expected a token of at least {MIN_TOKEN_CHARACTERS} characters, got {len(token)}; "
            "make one with `openssl rand -hex 32`."
        )
    return _digest(token), Caller(name=name, role=role)
