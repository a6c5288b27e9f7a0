"""Carry out ``fairpate ledger`` and ``fairpate tokens``: show, verify, copy, restore, audit; tokens of callers.

A copy of a ledger in any store is a ledger in files, with its head; it may be made while a service writes. It is
restored only if it holds the last entry that the present ledger, its head and its anchor are known to have, and as many
queries as were stated: no charge may be forgotten. The files of the ledger that it replaces are renamed, never removed.
Restored to another place, a copy moves a ledger between stores.

Every action of an operator on a run is noted in the run's journal of actions before it is done.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from aggregator import audit
from aggregator.ledger import (
    NO_LIMIT,
    LedgerState,
    OwnLimit,
    noted_at,
    open_anchor,
    open_store,
    read_ledger,
    reading,
    write_store,
)
from aggregator.service import auth
from aggregator.service.auth import TokenStore
from aggregator.store import (
    Head,
    Header,
    LedgerError,
    Place,
    Row,
    Stored,
    beside,
    head_path,
    ledger_files,
    lock,
    noted_head,
    shown,
)
from fairpate.config import ConfigError
from fairpate.http_server import Role
from fairpate.methods.label_queries import (
    LedgerPlace,
    choose_queries,
    missing_labels,
    parsed,
    place_of,
)
from fairpate.methods.own_votes import OwnVotes, read_votes_file
from fairpate.methods.pate import VotingMethod
from fairpate.pages import epsilon_text
from fairpate.run.context import RunDirectory, RunDirectoryError, RunFolderError, read_json, run_at, write_json
from fairpate.run.folder import open_run_directory
from fairpate.run.learn import as_trained, load_for
from fairpate.run.release_log import Odometer, OdometerError
from fairpate.terminal import Output, listing, say
from fairpate.types import UsageError, UserError
from fairpate.words import delta_text

T = TypeVar("T")
_KEY_SHOWN = 12  # of 64 digits; `--json` and an export have all
_SQLITE = b"SQLite format 3"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def back_up_run(path: Path, out: Path) -> int:
    """Write a verified copy of a ledger to ``out``; return the number of its entries. A service may write meanwhile.

    ConfigError where ``out`` exists, LedgerError for a ledger that cannot be trusted.
    """
    run, source = ledger_of(path)
    if ledger_files(out):
        raise ConfigError(f"{out}: already exists; choose another name.")
    # Verified before it is copied: a copy of a damaged ledger would pass for a backup.
    header, rows, _ = verified(source.ledger, source.anchor)
    _note_reading(run, "backup", out=str(out))
    write_store(out, header, rows)
    if run is not None:
        # Last: the time of the last backup is that of a complete one.
        run.ledger_backup.touch(mode=0o600)
    return len(rows)


def last_backup_s(run: RunDirectory) -> float | None:
    """Return when :func:`back_up_run` last copied the ledger of ``run``, in seconds since 1970; None: never."""
    with suppress(OSError):
        return run.ledger_backup.stat().st_mtime
    return None


def restore(run: RunDirectory, copy: Place, *, to: str | None) -> str:
    """Replace the ledger of ``run`` by a copy, in its place or in another one; return the place as messages show it.

    LedgerError for a copy that cannot be trusted or lacks an entry that the ledger is known to have, and where another
    process writes the ledger; RunDirectoryError for a copy that lacks queries that were stated.
    """
    before = place_of(run)
    header, rows, num_outcomes = verified(copy, before.anchor)
    target = LedgerPlace(ledger=before.ledger if to is None else parsed(to), anchor=before.anchor)
    with _held(run, before):
        # Under the lock: a service that ended a moment ago may have charged after a look without it.
        heads, known = {Head(number, digest) for number, _, _, digest in rows}, []
        with suppress(LedgerError):
            known.append(noted_head(run.ledger))
        with suppress(LedgerError):
            # Without the anchor: what a ledger holds was charged, even if it lacks its anchor's entry.
            present = verified(before.ledger, None)[1]
            known += [Head(present[-1][0], present[-1][3])] if present else []
        for head in known:
            # Number 0 notes a ledger without an entry, which every copy holds.
            if head.number and head not in heads:
                raise LedgerError(
                    f"{shown(copy)}: holds {len(rows)} entries, and not the number {head.number} of the ledger it "
                    "would replace: charges would be forgotten. Give a copy made later."
                )
        # The statement may be all that is left of a ledger whose files are lost.
        stated = read_json(run.statement)["queries"]["submitted"] if run.statement.exists() else 0
        if num_outcomes < stated:
            raise RunDirectoryError(
                f"{shown(copy)}: holds the outcomes of {num_outcomes} queries, and {stated} were stated; give a later "
                "copy."
            )
        audit.note_action(run.actions, "restore", copy=shown(copy), entries=len(rows), to=shown(target.ledger))
        if target.is_in_folder:
            # Renamed first: nothing is written over a ledger, and a crash in between leaves the old one whole.
            _set_aside(Path(target.ledger))
            write_store(target.ledger, header, rows)
        else:
            found: list[Row] = []
            with suppress(LedgerError):
                found = verified(target.ledger, None)[1]
            if found != rows:  # otherwise a crash came before the place was noted
                write_store(target.ledger, header, rows)
        # Before the old files are set aside: a crash in between leaves them there unused.
        note_place(run, target)
        if not target.is_in_folder:
            _set_aside(run.ledger)
    return shown(target.ledger)


def verified(place: Place, anchor: Place | None) -> tuple[Header, list[Row], int]:
    """Verify the chain of a ledger and its anchor's entry; return header, entries and the number of outcomes."""
    noted = noted_at(anchor)
    with reading(place) as found:
        rows = list(found.rows)
        state = LedgerState(shown(place), Stored(header=found.header, noted=found.noted, rows=rows), noted)
        return found.header, rows, len(state.outcome_of)


@contextmanager
def _held(run: RunDirectory, before: LedgerPlace) -> Iterator[None]:
    """Keep other writers away from the ledger that will be replaced. LedgerError if another process writes it."""
    with ExitStack() as stack:
        # A writer of files keeps the head locked: under that lock nothing is charged.
        if head_path(run.ledger).exists():
            stack.callback(os.close, lock(head_path(run.ledger)))
        # A database that is lost or damaged has no writer to keep out; that is when a copy is put back.
        is_readable = False
        if not before.is_in_folder:
            with suppress(LedgerError):
                # Always true: what cannot be read raises.
                is_readable = bool(verified(before.ledger, None))
        if is_readable:
            store = open_store(before.ledger, "", create=False, take_over=False)
            stack.callback(store.close)
        yield


def _set_aside(path: Path) -> None:
    """Rename the files of a ledger such that they can still be read as a ledger."""
    # The index of the write-ahead log, which SQLite makes again.
    beside(path, "-shm").unlink(missing_ok=True)
    for number in itertools.count(1):
        aside = path.with_name(f"{path.stem}.replaced-{number}{path.suffix}")
        # The log first: a database without the log that its head counts on is refused, and a log without its database
        # would be left to the ledger that is made next. The head last: until then it shows that a ledger was here.
        renames = [(beside(path, "-wal"), beside(aside, "-wal")), (path, aside), (head_path(path), head_path(aside))]
        # A file without its like there may belong to this ledger: a crash came after some of the files were renamed.
        if not any(os.path.lexists(target) for source, target in renames if os.path.lexists(source)):
            break
    for source, target in renames:
        with suppress(FileNotFoundError):
            source.rename(target)


def add_anchor(run: RunDirectory, text: str) -> str:
    """Note the last entry of a run's ledger at another place too, from now on; returns the place in words.

    RunFolderError without a ledger. ConfigError if it has an anchor, or the place is in the run's folder. LedgerError
    if a service writes.
    """
    if not has_ledger(run):
        raise RunFolderError(f"{run.root}: no ledger; give a run of a method that asks teachers.")
    place, anchor = place_of(run), parsed(text)
    if place.anchor is not None:
        raise ConfigError(f"{run.root}: its ledger has an anchor already, {shown(place.anchor)}.")
    if isinstance(anchor, Path) and run.root.absolute() in anchor.parents:
        raise ConfigError(f"{anchor}: is rolled back with the run, in whose folder it lies; give a place elsewhere.")
    audit.note_action(run.actions, "anchor", place=shown(anchor))
    # Made before the note: a crash between the two leaves an anchor unused, and never a ledger that lacks its own.
    with closing(open_anchor(anchor)) as noted:
        noted.make(read_ledger(place.ledger).head)
    note_place(run, LedgerPlace(ledger=place.ledger, anchor=anchor))
    return shown(anchor)


def note_place(run: RunDirectory, place: LedgerPlace) -> None:
    """Write the note that the ledger of ``run`` is the one in ``place``."""
    values = {
        name: str(value)
        for name, value in dataclasses.asdict(place).items()
        if value is not None and value != run.ledger
    }
    write_json(run.ledger_place, values, private=True)  # an address may hold a password


def has_ledger(run: RunDirectory) -> bool:
    """True if any part of a ledger is there, as far as is seen without asking a database."""
    return run.ledger_place.exists() or bool(ledger_files(run.ledger))


def ledger_of(path: Path) -> tuple[RunDirectory | None, LedgerPlace]:
    """Return the ledger of a run directory, or of a file. RunFolderError where there is no ledger."""
    run = RunDirectory(root=path) if path.is_dir() else None
    if run is not None and has_ledger(run):
        return run, place_of(run)
    if run is None and ledger_files(path):
        # A file without a head that is not of SQLite is no ledger, not even a damaged one.
        is_ledger = head_path(path).exists() or not path.is_file()
        if not is_ledger:
            with path.open("rb") as file:
                is_ledger = file.read(len(_SQLITE)) == _SQLITE
        if is_ledger:
            return None, LedgerPlace(ledger=path)
    found = "no ledger" if path.exists() else "no such file or folder"
    raise RunFolderError(f"{path}: {found}; give a ledger file, or a run of a method that asks teachers.")


def verified_facts(path: Path) -> dict[str, Any]:
    """Verify a ledger and that it holds the labels that its run released; return the summary.

    LedgerError where the ledger cannot be trusted, RunDirectoryError where it lacks a released label.
    """
    run, place = ledger_of(path)
    summary = dataclasses.asdict(audit.verify(place.ledger, anchor=place.anchor))
    config = open_run_directory(run.root)[1] if run is not None and run.config.exists() else None
    if run is not None and isinstance(config, VotingMethod):
        outcome = read_ledger(place.ledger).outcome
        try:
            if isinstance(config, OwnVotes):
                dataset = read_votes_file(config.votes).dataset
            else:
                dataset = config.queried(as_trained(run, config, load_for(run, config.data)))
        except UserError as error:
            # The chain holds: a data set that cannot be read is reported, and is no fault of the ledger.
            held = f"not compared, because the data set cannot be read ({error})"
        else:
            queries = choose_queries(dataset, config.queries)
            total, lost = missing_labels(run, queries, outcome)
            if lost:
                raise RunDirectoryError(
                    f"{run.labels}: {lost} of {total} released labels are not in the ledger; restore it."
                )
            held = f"all {total} are in it"
        summary["released_labels"] = held
    if place.anchor is not None:
        summary["anchor"] = shown(place.anchor)
    return summary


def export(path: Path, out: Path) -> None:
    """Write every entry to a Parquet or JSON file. LedgerError for a ledger that cannot be trusted."""
    run, place = ledger_of(path)
    _note_reading(run, "export", out=str(out))
    audit.export(place.ledger, out)


def audit_lines(path: Path, *, follow: bool, out: Path | None) -> Iterator[str]:
    """Yield the lines of the audit log, or append new ones to ``out``. With ``follow``, wait for further lines
    forever."""
    run, place = ledger_of(path)
    actions = None if run is None else run.actions
    end = audit.START if out is None else audit.log_end(out)
    lines = audit.follow(place.ledger, end, actions) if follow else audit.lines_after(place.ledger, end, actions)
    if out is None:
        yield from (line for _, line in lines)
        return
    descriptor = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.fchmod(descriptor, 0o600)  # a log that exists too: its lines name who asked, and when
    with open(descriptor, "a", encoding="utf-8") as file:  # noqa: PTH123 - of the descriptor, with its rights
        for last, line in lines:
            end = last
            file.write(line + "\n")
            if follow:
                file.flush()
    say(f"{out} ends with the head {end.chain}; note it elsewhere, for --check.")


def check_audit_log(log: Path, head: str) -> Output:
    """Verify an audit log against a head that was noted elsewhere. LedgerError where it does not hold."""
    count, number, last = audit.check_log(log, head)
    words = f"{log}: {count} lines, none changed; line {number} has the head, the last line has {last}"
    return Output(facts={"file": log, "lines": count, "head_line": number, "head": last}, words=words)


def _note_reading(run: RunDirectory | None, event: str, **facts: object) -> None:
    """Note in the journal that an operator reads private entries. If the folder cannot be written, print a remark
    instead."""
    try:
        # An operator can read the files without this command, so refusing here would protect nothing.
        audit.note_action(None if run is None else run.actions, event, **facts)
    except LedgerError as error:
        say(f"not noted in the journal: {error}")


def last_charges(path: Path, count: int) -> Output:
    """Return the last ``count`` charges."""
    run, place = ledger_of(path)
    _note_reading(run, "show", last=count)
    rows = [charge.to_json() for charge in audit.rows(place.ledger)[-count:]]
    table = listing(*audit.COLUMNS.names[:-1], "charged (UTC)")
    for row in rows:
        at = f"{datetime.fromtimestamp(row['at_s'], UTC):%Y-%m-%d %H:%M:%S}" if row["at_s"] else None
        values = (row | {"key": row["key"][:_KEY_SHOWN], "at_s": at}).values()
        table.add_row(*("" if value is None else str(value) for value in values))
    return Output(facts={"charges": rows}, words=table)


def describe_totals(*, data: str | None, delta: float) -> Output:
    """Return what all releases cost together, per data set, unit and relation.

    OdometerError for a damaged odometer, and where no release on ``data`` is counted.
    """
    totals = Odometer().totals(delta=delta, data=data)
    if data is None and not totals:
        return Output(facts={"totals": []}, words="No release is counted yet.")
    if data is not None and not totals:
        raise OdometerError(
            f"{data}: no release is counted; `fairpate ledger total` lists the data sets that have one."
        )
    at = f"epsilon at {delta_text(delta)}"
    table = listing(
        "data set", "unit", "relation", "releases", f"{at}, fixed beforehand", "adaptive", "limit", "not private"
    )
    for total in totals:
        limit = "none" if total.epsilon_limit is None else f"{total.epsilon_limit:g}"
        sums = (epsilon_text(total.epsilon), epsilon_text(total.epsilon_adaptive))
        counts = (str(total.releases), *sums, limit, str(total.not_private))
        table.add_row(total.data, total.unit, total.relation, *counts)
    return Output(facts={"totals": totals}, words=table)


def own_limit(*, epsilon: float | None, queries: int | None, per_day: float | None) -> OwnLimit:
    """Return the limit with these options. ConfigError for one out of range."""
    try:
        return OwnLimit(epsilon=epsilon, max_queries=queries, per_day=per_day)
    except ValueError as error:
        raise ConfigError(f"{error} Leave the option out for no limit.") from error


def add(root: Path, name: str, *, role: Role, limit: OwnLimit, expires: str | None) -> str:
    """Make a token for a new name and return it; it is stored nowhere. RunFolderError for a run without teachers."""
    if role == "operator":
        _require_no_quota(limit)
    expires_s = None if expires is None else moment(expires)
    _, config = open_run_directory(root)
    if not (isinstance(config, VotingMethod) and config.keeps_teachers):
        raise RunFolderError(
            f"{root}: a run of {config.method} that has no teachers to ask, so that no service takes a token for it; "
            "its published student takes none (`fairpate serve --student`)."
        )
    # The ledger is asked only where a limit is given: without one, a token can be made while its database is down.
    before = NO_LIMIT if limit == NO_LIMIT else _ledger_limits(root).get(name, NO_LIMIT)
    return _changed(
        root,
        "add",
        name,
        lambda store: auth.added(
            store, name, role=role, limit=limit, before=before, expires_s=expires_s, now_s=time.time()
        ),
        role=role,
    )


def _changed(
    root: Path, change: str, name: str, made: Callable[[TokenStore], tuple[TokenStore, T]], **facts: object
) -> T:
    """Write a change of tokens to the journal, then make the change; return the new token, if any."""
    # The journal first: a crash in between leaves a note without a change, never a change without a note.
    audit.note_action(run_at(root).actions, "tokens", change=change, name=name, **facts)
    return auth.change(run_at(root).tokens, made)


def _ledger_limits(root: Path) -> Mapping[str, OwnLimit]:
    """Return the limits of all names that the ledger stores, because a lost token store has none."""
    run = run_at(root)
    return read_ledger(place_of(run).ledger).limits if has_ledger(run) else {}


def _require_no_quota(own: OwnLimit) -> None:
    if own.per_day is not None:
        raise UsageError("--per-day: an operator has no quota; leave it out, or limit --queries or --epsilon.")


def rotate(root: Path, name: str, *, keep_old: str) -> str:
    """Make another token for a name and return it. Earlier ones end after ``keep_old``."""
    ends_s = moment(keep_old)
    return _changed(
        root, "rotate", name, lambda store: auth.rotated(store, name, old_expires_s=ends_s, now_s=time.time())
    )


def expire(root: Path, name: str, when: str) -> None:
    """Set when the tokens of ``name`` expire: at the time ``when``, or ``never``."""
    expires_s = None if when == "never" else moment(when)
    _changed(root, "expire", name, lambda store: (auth.expired(store, name, expires_s=expires_s), None), when=when)


def limit(root: Path, name: str, own: OwnLimit) -> None:
    """Replace the limit of a name."""

    def limited(store: TokenStore) -> tuple[TokenStore, None]:
        if any(token.name == name and token.role == "operator" for token in store.tokens):
            _require_no_quota(own)
        return auth.limited(store, name, own), None

    _changed(root, "limit", name, limited, limit=dataclasses.asdict(own))


def revoke(root: Path, name: str) -> None:
    """Remove all tokens of a name; its charges and its limit stay."""
    _changed(root, "revoke", name, lambda store: (auth.revoked(store, name), None))


def describe(root: Path) -> Output:
    """Return all tokens with name, role, expiry and limit, and the limits of names without a token."""
    path, now_s = run_at(root).tokens, time.time()
    store = auth.read_store(path) if path.exists() else auth.NO_TOKENS
    try:
        in_ledger = _ledger_limits(root)
    except LedgerError as error:  # tokens can be listed while the ledger's database is down
        in_ledger = {}
        say(f"limits that are in the ledger alone are not shown: {error}")
    # A change waits in the store until a service writes it into the ledger, which keeps it.
    limits = {**in_ledger, **store.limits}
    others = sorted({name for name, own in limits.items() if own != NO_LIMIT} - {token.name for token in store.tokens})
    if not store.tokens and not others:
        return Output(facts={"tokens": []}, words="No token yet; `fairpate tokens add` makes one.")
    table, found = listing("name", "role", "made", "ends", "epsilon", "queries", "per day"), []

    def add_row(name: str, role: str, made: str, ends: str) -> None:
        own = limits.get(name, NO_LIMIT)
        numbers = ("" if value is None else f"{value:g}" for value in (own.epsilon, own.max_queries, own.per_day))
        table.add_row(name, role, made, ends, *numbers)

    for token in store.tokens:
        made, is_good = _text(token.created_s), token.is_good(now_s)
        ends = None if token.expires_s is None else _text(token.expires_s)
        add_row(token.name, token.role, made, (ends or "never") + ("" if is_good else " (ended)"))
        known = {"name": token.name, "role": token.role, "made": made, "ends": ends, "ended": not is_good}
        found.append(known | {"limit": limits.get(token.name, NO_LIMIT)})
    for name in others:
        add_row(name, "no token", "", "")
        found.append({"name": name, "role": None, "made": None, "ends": None, "ended": False, "limit": limits[name]})
    return Output(facts={"tokens": found}, words=table)


def moment(text: str) -> float:
    """Return `30d`, `12h`, `90m` or `0s` from now, or a date such as 2027-01-31 (UTC), as seconds since 1970."""
    try:
        if found := re.fullmatch(r"(\d{1,9})([smhd])", text):
            date = datetime.now(UTC) + timedelta(seconds=int(found[1]) * _SECONDS[found[2]])
        else:
            date = datetime.fromisoformat(text)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:  # beyond year 9999 no list of tokens could show it
        raise ConfigError(f"{text}: expected a time from now such as 30d or 12h, or a date as 2027-01-31.") from error


def _text(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")
