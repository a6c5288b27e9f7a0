"""The operator's work on the tokens of a run's service: add, rotate, limit, expire, revoke and list them.

Every change is noted in the run's journal of actions before it is made.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

from aggregator import ledger_audit
from aggregator.ledger import NO_LIMIT, CallerLimit, read_ledger
from aggregator.service import auth
from aggregator.service.auth import TokenStore
from aggregator.store import LedgerError
from fairpate.config import ConfigError
from fairpate.releases.directory import RunFolderError, run_at
from fairpate.releases.run_ledger import place_of
from fairpate.run.folder import open_run_directory
from fairpate.run.ledgers import has_ledger
from fairpate.terminal import Output, listing, say
from fairpate.types import Role, UsageError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_NO_QUOTA = "--per-day: an operator has no quota; leave it out, or limit --queries or --epsilon."


def change_tokens(
    root: Path,
    change: Literal["add", "rotate", "expire", "limit", "revoke"],
    name: str,
    *,
    role: Role = "analyst",
    limit: Mapping[str, Any] | None = None,
    when: str | None = None,
) -> str:
    """Change the tokens of the caller ``name`` of a run's service, after noting the change in the run's log of
    operators' actions. A change that is refused is not noted.

    The values of ``change``:

    * ``add``: create a token for a new caller. It expires at the time ``when`` (None: never).
    * ``rotate``: create another token for the caller. The earlier tokens expire at ``when``.
    * ``expire``: let all tokens of the caller expire at ``when`` (`never`: the latest token does not expire).
    * ``limit``: set the limit of the caller.
    * ``revoke``: remove all tokens of the caller.

    ``limit``: the fields of a :class:`CallerLimit`, for ``add`` and ``limit``. Return the new token of ``add`` and
    ``rotate``, which is stored nowhere; otherwise "". RunFolderError for a run without teachers, ConfigError for a
    limit or a time out of range, UsageError for a quota per day on an operator's token.
    """
    run, before, facts = run_at(root), NO_LIMIT, dict[str, object]()
    try:
        own = CallerLimit(**(limit or {}))
    except ValueError as error:
        raise ConfigError(f"Limit of a token: {error} For no limit, leave the option out.") from error
    ends_s = None if when is None or (change, when) == ("expire", "never") else moment(when)
    if change == "add":
        facts = {"role": role}
        if role == "operator" and own.per_day is not None:
            raise UsageError(_NO_QUOTA)
        _, config = open_run_directory(root)
        if not config.keeps_teachers:
            raise RunFolderError(
                f"{root}: this run of {config.method} has no stored teachers, so no service could use a token for it; "
                "serve its published student (`fairpate serve --student`), which needs no token."
            )
        # The ledger is asked only where a limit is given: without one, a token can be made while its database is down.
        if own != NO_LIMIT and has_ledger(run):
            # A lost token store has no limits.
            before = read_ledger(place_of(run).ledger).limits.get(name, NO_LIMIT)
    elif change in ("expire", "limit"):
        facts = {"when": when} if change == "expire" else {"limit": dataclasses.asdict(own)}

    def made(kept: TokenStore) -> tuple[TokenStore, str]:
        now_s = time.time()
        match change:
            case "add":
                return auth.added(kept, name, role=role, limit=own, before=before, expires_s=ends_s, now_s=now_s)
            case "rotate":
                assert ends_s is not None
                return auth.rotated(kept, name, old_expires_s=ends_s, now_s=now_s)
            case "expire":
                return auth.expired(kept, name, expires_s=ends_s), ""
            case "revoke":
                return auth.revoked(kept, name), ""
        is_operator = any(token.name == name and token.role == "operator" for token in kept.tokens)
        if is_operator and own.per_day is not None:
            raise UsageError(_NO_QUOTA)
        return auth.limited(kept, name, own), ""

    # The journal before the change: a crash in between leaves a note without a change, never a change without a note.
    noted = partial(ledger_audit.note_action, run.actions, "tokens", change=change, name=name, **facts)
    return auth.change(run.tokens, made, before=noted)


def describe(root: Path) -> Output:
    """Return a table of the tokens of a run's service, with name, role, expiry and limit, and of the limits of callers
    who have no token."""
    run, now_s = run_at(root), time.time()
    kept = auth.read_store(run.tokens) if run.tokens.exists() else auth.NO_TOKENS
    in_ledger: Mapping[str, CallerLimit] = {}
    try:
        in_ledger = read_ledger(place_of(run).ledger).limits if has_ledger(run) else {}
    except LedgerError as error:  # tokens can be listed while the ledger's database is down
        say(f"limits that are in the ledger alone are not shown: {error}")
    # A change waits in the store until a service writes it into the ledger, which keeps it.
    limits = {**in_ledger, **kept.limits}
    others = sorted({name for name, own in limits.items() if own != NO_LIMIT} - {token.name for token in kept.tokens})
    if not kept.tokens and not others:
        return Output(facts={"tokens": []}, words="No token yet; `fairpate tokens add` makes one.")
    found: list[dict[str, Any]] = []
    for token in kept.tokens:
        made, ends = (
            None if at_s is None else f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M}"
            for at_s in (token.created_s, token.expires_s)
        )
        known = {"name": token.name, "role": token.role, "made": made, "ends": ends, "ended": not token.is_good(now_s)}
        found.append(known | {"limit": limits.get(token.name, NO_LIMIT)})
    for name in others:
        found.append({"name": name, "role": None, "made": None, "ends": None, "ended": False, "limit": limits[name]})
    table = listing("name", "role", "made", "ends", "epsilon", "queries", "per day")
    for each in found:
        own, role, made = each["limit"], each["role"] or "no token", each["made"] or ""
        ends = (each["ends"] or "never") + (" (ended)" if each["ended"] else "") if each["role"] else ""
        numbers = ("" if value is None else f"{value:g}" for value in (own.epsilon, own.max_queries, own.per_day))
        table.add_row(each["name"], role, made, ends, *numbers)
    return Output(facts={"tokens": found}, words=table)


def moment(text: str) -> float:
    """Return the time that ``text`` describes, in seconds since 1970: a time from now (`30d`, `12h`, `90m`, `0s`) or a
    date such as 2027-01-31 (UTC). ConfigError for any other text."""
    try:
        if found := re.fullmatch(r"(\d{1,9})([smhd])", text):
            date = datetime.now(UTC) + timedelta(seconds=int(found[1]) * _SECONDS[found[2]])
        else:
            date = datetime.fromisoformat(text)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:  # beyond year 9999 no list of tokens could show it
        raise ConfigError(
            f"{text}: not a time; give a time from now such as 30d or 12h, or a date such as 2027-01-31."
        ) from error
