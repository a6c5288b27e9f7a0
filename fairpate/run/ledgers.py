"""The operator's work on ledgers: verify, back up, restore, anchor, export, follow and show one; add up all releases.

A ledger is that of a run, in its folder or at the place that its file ``ledger.json`` names, or a file by itself.

A backup of a ledger may be made while a service writes. A backup is restored only if it contains the last entry that is
known from the present ledger, from its head file and from its anchor (a copy of the last entry at a second location),
and as many queries as the statement says: no charge may be forgotten. The files of the replaced ledger are renamed,
never removed.

Every action of an operator on a run is noted in the run's journal of actions before it is done.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from aggregator import ledger_audit, store
from aggregator.ledger import LedgerState, back_end, noted_at, read_ledger
from aggregator.store import Address, LedgerError, head_path, is_database, ledger_files, lock, shown
from fairpate.config import ConfigError
from fairpate.files import check_output, give_to_owner, write_atomically
from fairpate.pages import delta_text
from fairpate.releases.directory import RunDirectory, RunDirectoryError, RunFolderError, read_json, write_json
from fairpate.releases.odometer import COLUMNS, Odometer, OdometerError
from fairpate.releases.run_ledger import LedgerPlace, missing_labels, parsed, place_of
from fairpate.run.folder import as_trained, load_for, open_run_directory
from fairpate.terminal import Output, listing, say
from fairpate.types import UserError

_KEY_SHOWN = 12  # of 64 digits; `--json` and an export have all
_SQLITE = b"SQLite format 3"


def back_up_run(path: Path, out: Path) -> int:
    """Write a verified backup of a ledger to the file ``out``; return the number of its entries. A service may write to
    the ledger meanwhile.

    ``path``: a run's folder, or a ledger file. ConfigError if ``out`` exists, LedgerError for a ledger whose hash chain
    is broken.
    """
    run, source = ledger_of(path)
    if ledger_files(out):
        raise ConfigError(f"OUT: {out} already exists; give the backup another name.")
    # Verified before it is copied: a copy of a damaged ledger would pass for a backup. The note comes after this, so
    # that a refused command leaves none, and before the first byte is written.
    state, rows = verified(source.ledger, source.anchor)
    _note_reading(run, "backup", out=str(out))
    back_end(out).write(out, state.header, rows)
    if run is not None:
        # Last: the time of the last backup is that of a complete one.
        write_atomically(run.ledger_backup, Path.touch, private=True)
    return len(rows)


def last_backup_s(run: RunDirectory) -> float | None:
    """Return the time of the last backup (:func:`back_up_run`) of the run's ledger, in seconds since 1970; None if
    there was no backup."""
    with suppress(OSError):
        return run.ledger_backup.stat().st_mtime
    return None


def restore(run: RunDirectory, copy: Address, *, to: str | None) -> str:
    """Replace the ledger of ``run`` by the backup ``copy``, at the ledger's present location or at the new location
    ``to``; return the location as text, without a password.

    LedgerError if the backup's hash chain is broken, or if another process writes to the ledger. LedgerError also if
    the backup lacks an entry that was made: the last one in the present ledger, in its head file, or in its anchor (a
    copy of the last entry elsewhere). RunDirectoryError if the backup has fewer queries than the privacy statement
    says.
    """
    before = place_of(run)
    state, rows = verified(copy, before.anchor)
    target = LedgerPlace(ledger=before.ledger if to is None else parsed(to), anchor=before.anchor)
    with _without_writer(run, before.ledger):
        # Under the lock: a service that ended a moment ago may have charged after a look without it.
        heads, known = {store.Head(number, digest) for number, _, _, digest in rows}, []
        with suppress(LedgerError):
            known.append(store.noted_head(head_path(run.ledger)))
        with suppress(LedgerError):
            # Without the anchor: what a ledger holds was charged, even if it lacks its anchor's entry.
            known.append(read_ledger(before.ledger).head)
        for head in known:
            # Number 0 notes a ledger without an entry, which every copy holds.
            if head.number and head not in heads:
                raise LedgerError(
                    f"{shown(copy)}: this backup has {len(rows)} entries, but not entry number {head.number} of the "
                    "ledger that it would replace, so charges would be forgotten; give a backup made later."
                )
        # The statement may be all that is left of a ledger whose files are lost.
        stated = read_json(run.statement)["queries"]["submitted"] if run.statement.exists() else 0
        if len(state.outcome_of) < stated:
            raise RunDirectoryError(
                f"{shown(copy)}: this backup contains the outcomes of {len(state.outcome_of)} queries, but "
                f"{run.statement} states {stated}; give a later backup."
            )
        found: list[store.Row] | None = None
        if is_database(target.ledger):
            try:
                found = verified(target.ledger, None)[1]
            except store.UnreachableError:
                raise
            except LedgerError:
                pass  # none there yet, or one that is damaged, which is not written over
            if found is not None and found != rows:
                raise LedgerError(f"{shown(target.ledger)}: there is another ledger; give the URL of a new one.")
        else:
            path = Path(target.ledger).absolute()
            check_output(path.parent, "--to" if to else "FOLDER")
            if path not in (run.ledger.absolute(), before.ledger) and (left := ledger_files(path)):
                raise ConfigError(f"--to: {left[0]} exists already; give the path of a new file.")
        # After every check: what is refused is not in the journal.
        ledger_audit.note_action(run.actions, "restore", copy=shown(copy), entries=len(rows), to=shown(target.ledger))
        if not is_database(target.ledger):
            # Renamed first: nothing is written over a ledger, and a crash in between leaves the old one whole.
            _set_aside(Path(target.ledger))
        if found != rows:  # otherwise a crash came before the place was noted
            back_end(target.ledger).write(target.ledger, state.header, rows)
        # Before the old files are set aside: a crash in between leaves them there unused.
        note_place(run, target)
        if is_database(target.ledger):
            _set_aside(run.ledger)
    return shown(target.ledger)


@contextmanager
def _without_writer(run: RunDirectory, ledger: Address) -> Iterator[None]:
    """Context manager: keep every process from writing the ledger of ``run`` at ``ledger`` inside the ``with`` block.
    LedgerError if a process writes it."""
    with ExitStack() as held:
        # A writer of files keeps the head locked: under that lock nothing is charged.
        if head_path(run.ledger).exists():
            held.callback(os.close, lock(head_path(run.ledger)))
        if is_database(ledger):
            try:
                read_ledger(ledger)
            except LedgerError:
                pass  # a database that is lost or damaged has no writer to keep out; that is when a copy is put back
            else:
                held.callback(back_end(ledger).store(ledger, "", create=False, take_over=False).close)
        yield


def verified(place: Address, anchor: Address | None) -> tuple[LedgerState, list[store.Row]]:
    """Verify the hash chain of the ledger at ``place``, a path or a database URL. Return the ledger's state and its
    entries.

    LedgerError if an entry is wrong, or if the entry is missing that is noted in the file or database ``anchor`` (None:
    no anchor).
    """
    noted = noted_at(anchor)
    with closing(back_end(place).reader(place)) as reader:
        noted = (reader.noted, *noted)
        rows = list(store.rows_after(reader))
        return LedgerState(shown(place), reader.header, noted, rows), rows


def _set_aside(path: Path) -> None:
    """Rename the files of the ledger at ``path``, so that another ledger can be written there. The renamed files can
    still be read as a ledger."""
    # The index of the write-ahead log, which SQLite makes again.
    Path(f"{path}-shm").unlink(missing_ok=True)
    for number in itertools.count(1):
        aside = path.with_name(f"{path.stem}.replaced-{number}{path.suffix}")
        # The log first: a database without the log that its head counts on is refused, and a log without its database
        # would be left to the ledger that is made next. The head last: until then it shows that a ledger was here.
        logs = Path(f"{path}-wal"), Path(f"{aside}-wal")
        renames = [logs, (path, aside), (head_path(path), head_path(aside))]
        # A file without its like there may belong to this ledger: a crash came after some of the files were renamed.
        if not any(os.path.lexists(target) for source, target in renames if os.path.lexists(source)):
            break
    for source, target in renames:
        with suppress(FileNotFoundError):
            source.rename(target)


def add_anchor(run: RunDirectory, text: str) -> str:
    """Give the ledger of ``run`` an anchor: from now on the ledger's last entry is also noted at the location ``text``,
    a file or a database URL. A ledger that was replaced by an older copy then lacks this entry, and is refused.

    Return the location as text, without a password. RunFolderError for a run without a ledger. ConfigError if the
    ledger has an anchor already, or the location is in the run's folder. LedgerError if a service writes to the ledger.
    """
    if not has_ledger(run):
        raise RunFolderError(f"{run.root}: this run has no ledger; give a run of a method that asks teachers.")
    place, anchor = place_of(run), parsed(text)
    if place.anchor is not None:
        raise ConfigError(
            f"{run.root}: the ledger of this run already has an anchor, {shown(place.anchor)}, and can have only one; "
            "nothing has to be done."
        )
    if isinstance(anchor, Path) and run.root.absolute() in anchor.parents:
        raise ConfigError(
            f"PLACE: {anchor} is in the run's folder and would be rolled back with it; give a file on another disk."
        )
    # A service that runs would not note its entries there: the anchor would stand still until its next start.
    with _without_writer(run, place.ledger):
        # Made before the note: a crash between the two leaves an anchor unused, and never a ledger that lacks its own.
        with closing(back_end(anchor).anchor(anchor)) as noted:
            noted.make(read_ledger(place.ledger).head)
        # After all that may be refused, and before the ledger has its anchor.
        ledger_audit.note_action(run.actions, "anchor", place=shown(anchor))
        note_place(run, LedgerPlace(ledger=place.ledger, anchor=anchor))
    return shown(anchor)


def note_place(run: RunDirectory, place: LedgerPlace) -> None:
    """Write the file ``ledger.json`` of ``run``, which states ``place``: the location of its ledger and that of the
    ledger's anchor, a copy of the last entry elsewhere."""
    places = dataclasses.asdict(place).items()
    values = {name: str(value) for name, value in places if value not in (None, run.ledger)}
    write_json(run.ledger_place, values, private=True)  # an address may hold a password


def has_ledger(run: RunDirectory) -> bool:
    """Return True if the run has a ledger, either as a file in its folder, or elsewhere, as its file ``ledger.json``
    states."""
    return run.ledger_place.exists() or bool(ledger_files(run.ledger))


def ledger_of(path: Path) -> tuple[RunDirectory | None, LedgerPlace]:
    """Return the run in the folder ``path`` and the location of its ledger. If ``path`` is a ledger file, return None
    instead of a run, and the location of this file.

    RunFolderError if there is no ledger.
    """
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
    """Verify the ledger in ``path``, a run's folder or a ledger file, and that it contains all labels that its run
    released; return the results of both checks by name.

    LedgerError if the ledger's hash chain is broken, RunDirectoryError if it lacks a released label.
    """
    run, place = ledger_of(path)
    summary = dataclasses.asdict(ledger_audit.verify(place.ledger, anchor=place.anchor))
    config = open_run_directory(run.root)[1] if run is not None and run.config.exists() else None
    from fairpate.methods.voting import VotingMethod  # here alone: other commands on ledgers need no methods

    # The plan of the queries is that of voters alone.
    if run is not None and isinstance(config, VotingMethod):
        outcome = read_ledger(place.ledger).outcome_of.get
        try:
            if (dataset := config.own_dataset()) is None:
                dataset = as_trained(run, config, load_for(run, config.data))
        except UserError as error:
            # The chain holds: a data set that cannot be read is reported, and is no fault of the ledger.
            held = f"not compared, because the data set cannot be read ({error})"
        else:
            total, lost = missing_labels(run, config.plan(dataset).queries, outcome)
            if lost:
                raise RunDirectoryError(
                    f"{run.labels}: {lost} of {total} released labels are not in the run's ledger; restore the ledger "
                    "from a later copy."
                )
            held = f"all {total} are in it"
        summary["released_labels"] = held
    if place.anchor is not None:
        summary["anchor"] = shown(place.anchor)
    return summary


def export(path: Path, out: Path) -> None:
    """Write all entries of the ledger in ``path`` to the Parquet or JSON file ``out``. LedgerError if the ledger's hash
    chain is broken."""
    run, place = ledger_of(path)
    ledger_audit.export(place.ledger, out, before=partial(_note_reading, run, "export", out=str(out)))


def audit_lines(path: Path, *, follow: bool, out: Path | None) -> Iterator[str]:
    """Yield the lines of the audit log (charges, limits and operators' actions) of the ledger in ``path``. With
    ``out``, nothing is yielded: the lines that this file lacks are appended to it.

    ``follow``: wait for further lines, without an end.
    """
    run, place = ledger_of(path)
    actions = None if run is None else run.actions
    end = ledger_audit.START if out is None else ledger_audit.log_end(out)
    read = ledger_audit.follow if follow else ledger_audit.lines_after
    lines = read(place.ledger, end, actions)
    if out is None:
        yield from (line for _, line in lines)
        return
    # The first line before the file is touched: a ledger or a log that is refused leaves the file as it was.
    lines = itertools.chain([*itertools.islice(lines, 1)], lines)
    descriptor = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.fchmod(descriptor, 0o600)  # a log that exists too: its lines name who asked, and when
    give_to_owner(descriptor, out.absolute().parent)
    with open(descriptor, "a", encoding="utf-8") as file:  # noqa: PTH123 - of the descriptor, with its rights
        for last, line in lines:
            end = last
            file.write(line + "\n")
            if follow:
                file.flush()
    say(f"{out} ends with the head {end.chain}; note it elsewhere, for --check.")


def _note_reading(run: RunDirectory | None, event: str, **facts: object) -> None:
    """Note in the run's log of operators' actions that an operator read private entries of the ledger; ``event`` names
    the action. If the log cannot be written, print a remark instead."""
    try:
        # An operator can read the files without this command, so refusing here would protect nothing.
        ledger_audit.note_action(None if run is None else run.actions, event, **facts)
    except LedgerError as error:
        say(f"not noted in the journal: {error}")


def last_charges(path: Path, count: int) -> Output:
    """Return a table of the last ``count`` charges of the ledger in ``path``, not to be published."""
    run, place = ledger_of(path)
    rows = [charge.to_json() for charge in ledger_audit.rows(place.ledger)[-count:]]
    _note_reading(run, "show", last=count)  # before they are shown, and after all that may be refused
    table = listing(*ledger_audit.COLUMNS.names[:-1], "charged (UTC)")
    for row in rows:
        at = f"{datetime.fromtimestamp(row['at_s'], UTC):%Y-%m-%d %H:%M:%S}" if row["at_s"] else None
        values = (row | {"key": row["key"][:_KEY_SHOWN], "at_s": at}).values()
        table.add_row(*("" if value is None else str(value) for value in values))
    return Output(facts={"charges": rows}, words=table)


def describe_totals(*, data: str | None, delta: float) -> Output:
    """Return a table of the total privacy cost of all the operator's releases, per data set, unit and relation.

    ``data``: only this data set. OdometerError for a damaged odometer, and if it has no release on ``data``.
    """
    totals = Odometer().totals(delta=delta, data=data)
    if not totals and data is None:
        return Output(facts={"totals": []}, words="No release is counted yet.")
    if not totals:
        raise OdometerError(
            f"--data: no release of {data} was charged; give one of the data sets that `fairpate ledger total` lists."
        )
    table = listing(*(name.replace("epsilon", f"epsilon at {delta_text(delta)}") for name in COLUMNS))
    for total in totals:
        table.add_row(*total.cells)
    return Output(facts={"totals": totals}, words=table)
