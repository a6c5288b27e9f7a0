"""What `fairpate tokens` does: the tokens of a run's service, changed while it runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aggregator.ledger.audit import stored_limits
from aggregator.ledger.entries import NO_LIMIT, OwnLimit
from aggregator.ledger.files import LedgerError
from aggregator.service import token_store
from aggregator.service.token_store import TokenStore
from aggregator.service.tokens import OIDC_PREFIX, Role
from fairpate.app.ledgers.place import has_ledger, place_of
from fairpate.app.rundir import RunFolderError, open_run_directory, run_at
from fairpate.app.terminal.console import listing
from fairpate.app.terminal.output import Output, say
from fairpate.config import ConfigError
from fairpate.methods.voting import VotingMethod
from fairpate.types import UsageError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def own_limit(*, epsilon: float | None, queries: int | None, per_day: float | None) -> OwnLimit:
    """The limit that the options mean. ConfigError for one that is none."""
    try:
        return OwnLimit(epsilon=epsilon, max_queries=queries, per_day=per_day)
    except ValueError as error:
        raise ConfigError(f"{error} Leave the option out for no limit.") from error


def add(root: Path, name: str, *, role: Role, limit: OwnLimit, expires: str | None) -> str:
    """Make a token for a new name; returns it. It is kept nowhere. RunFolderError for a run that no service serves."""
    if role == "operator":
        _require_no_quota(limit)
    expires_s = None if expires is None else moment(expires)
    _, config = open_run_directory(root)
    if not (isinstance(config, VotingMethod) and config.keeps_teachers):
        raise RunFolderError(
            f"{root}: a run of {config.method} that has no teachers to ask, so that no service takes a token for it; "
            "its published student takes none (`fairpate serve --student`)."
        )
    # Asked of the ledger only where a limit is given: without one, a token is made while its database is down.
    before = NO_LIMIT if limit == NO_LIMIT else _ledger_limits(root).get(name, NO_LIMIT)
    return token_store.change(
        _path(root),
        lambda store: token_store.added(
            store, name, role=role, limit=limit, before=before, expires_s=expires_s, now_s=time.time()
        ),
    )


def _ledger_limits(root: Path) -> Mapping[str, OwnLimit]:
    """What each name may spend, as the ledger has it: a token store that was lost knows no limit."""
    run = run_at(root)
    return stored_limits(place_of(run).ledger) if has_ledger(run) else {}


def _require_no_quota(own: OwnLimit) -> None:
    if own.per_day is not None:
        raise UsageError("--per-day: an operator has no quota; leave it out, or limit --queries or --epsilon.")


def rotate(root: Path, name: str, *, keep_old: str) -> str:
    """Make another token for a name; returns it. Those before end after ``keep_old``."""
    ends_s = moment(keep_old)
    return token_store.change(
        _path(root), lambda store: token_store.rotated(store, name, old_expires_s=ends_s, now_s=time.time())
    )


def expire(root: Path, name: str, when: str) -> None:
    """Let the tokens of a name end at a moment, or never."""
    expires_s = None if when == "never" else moment(when)
    _change(root, lambda store: token_store.expired(store, name, expires_s=expires_s))


def limit(root: Path, name: str, own: OwnLimit) -> None:
    """Give a name this limit instead of the one it has."""

    def limited(store: TokenStore) -> TokenStore:
        if any(token.name == name and token.role == "operator" for token in store.tokens):
            _require_no_quota(own)
        return token_store.limited(store, name, own)

    _change(root, limited)


def revoke(root: Path, name: str) -> None:
    """Take all tokens of a name away; what it was charged with and its limit stay."""
    _change(root, lambda store: token_store.revoked(store, name))


def describe(root: Path) -> Output:
    """Whose tokens there are, until when, under which limits; and limits of names that have no token here."""
    path, now_s = _path(root), time.time()
    store = token_store.read_store(path) if path.exists() else TokenStore()
    # A change waits in the store until a service writes it into the ledger, which never forgets one.
    limits = {**_limits_to_show(root), **store.limits}
    others = sorted({name for name, own in limits.items() if own != NO_LIMIT} - {token.name for token in store.tokens})
    if not store.tokens and not others:
        return Output(facts={"tokens": []}, words="No token yet; `fairpate tokens add` makes one.")
    table = listing("name", "role", "made", "ends", "epsilon", "queries", "per day")
    found = []
    for token in store.tokens:
        own, is_good = limits.get(token.name, NO_LIMIT), token.is_good(now_s)
        made, ends = _text(token.created_s), None if token.expires_s is None else _text(token.expires_s)
        table.add_row(
            token.name, token.role, made, (ends or "never") + ("" if is_good else " (ended)"), *_limit_words(own)
        )
        known = {"name": token.name, "role": token.role, "made": made, "ends": ends, "ended": not is_good}
        found.append(known | {"limit": own})
    for name in others:
        role = "by its issuer" if name.startswith(OIDC_PREFIX) else "no token"
        table.add_row(name, role, "", "", *_limit_words(limits[name]))
        found.append({"name": name, "role": None, "made": None, "ends": None, "ended": False, "limit": limits[name]})
    return Output(facts={"tokens": found}, words=table)


def _limits_to_show(root: Path) -> Mapping[str, OwnLimit]:
    """The ledger's, where it can be read: tokens are listed, and revoked, while its database is down too."""
    try:
        return _ledger_limits(root)
    except LedgerError as error:
        say(f"limits that stand in the ledger alone are not shown: {error}")
        return {}


def _limit_words(own: OwnLimit) -> list[str]:
    return ["" if value is None else f"{value:g}" for value in (own.epsilon, own.max_queries, own.per_day)]


def moment(text: str) -> float:
    """Seconds since 1970 of `30d`, `12h`, `90m` or `0s` from now, or of a date such as 2027-01-31 (UTC)."""
    try:
        if found := re.fullmatch(r"(\d{1,9})([smhd])", text):
            date = datetime.now(UTC) + timedelta(seconds=int(found[1]) * _SECONDS[found[2]])
        else:
            date = datetime.fromisoformat(text)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:  # beyond year 9999 no list of tokens could show it
        raise ConfigError(f"{text}: expected a time from now such as 30d or 12h, or a date as 2027-01-31.") from error


def _change(root: Path, function: Callable[[TokenStore], TokenStore]) -> None:
    token_store.change(_path(root), lambda store: (function(store), None))


def _path(root: Path) -> Path:
    return run_at(root).tokens


def _text(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")
