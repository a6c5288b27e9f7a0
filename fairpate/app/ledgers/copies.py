"""Copies of a run's ledger: taken while a service writes, and put back where no charge is forgotten by it.

A copy is a ledger in files, its head beside it, whatever the back end it is of. It is put back only if it holds the
last entry of what is there, or was noted there or at the anchor, and as many queries as were stated. What was there is
set aside, never removed. Put back into another place, a copy is how a ledger moves between back ends.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from aggregator.ledger.anchors import noted_at
from aggregator.ledger.chain import Head, Header, Row, noted_head
from aggregator.ledger.files import LedgerError, beside, head_path, ledger_files, lock
from aggregator.ledger.ledger import replayed
from aggregator.ledger.stores import Place, Stored, open_store, reading, shown, write_store
from aggregator.mechanism import Outcome
from fairpate.app.ledgers.opened import missing_labels
from fairpate.app.ledgers.place import LedgerPlace, note_place, parsed, place_of
from fairpate.app.release import choose_queries
from fairpate.app.rundir import RunDirectory, RunDirectoryError, read_json
from fairpate.app.trained_on import as_trained, load_for
from fairpate.app.votes_file import read_votes_file
from fairpate.config import ConfigError
from fairpate.methods.own_votes import OwnVotes
from fairpate.methods.voting import VotingMethod
from fairpate.types import UserError


def back_up(run: RunDirectory | None, source: LedgerPlace, out: Path) -> int:
    """Write a verified copy of a ledger to ``out``; returns the number of its entries. A service may write meanwhile.

    ConfigError where something is at ``out``, LedgerError for a ledger that cannot be trusted.
    """
    if ledger_files(out):
        raise ConfigError(f"{out}: is there already; give another name.")
    header, rows, _ = verified(source.ledger, source.anchor)
    write_store(out, header, rows)
    if run is not None:
        run.ledger_backup.touch(mode=0o600)
    return len(rows)


def last_backup_s(run: RunDirectory) -> float | None:
    """When the ledger of ``run`` was last copied by :func:`back_up`, in seconds since 1970."""
    with suppress(OSError):
        return run.ledger_backup.stat().st_mtime
    return None


def restore(run: RunDirectory, copy: Place, *, to: str | None) -> str:
    """Make a copy the ledger of ``run``, in its place or in another one; returns the place in words.

    LedgerError for a copy that cannot be trusted or is older than what is known of the ledger, and where another
    process writes it; RunDirectoryError for one that lacks queries that were stated.
    """
    before = place_of(run)
    header, rows, num_outcomes = verified(copy, before.anchor)
    target = LedgerPlace(ledger=before.ledger if to is None else parsed(to), anchor=before.anchor)
    with _held(run, before):
        # With the lock in hand: a service that ended a moment ago may have charged after a look without it.
        _require_newest(run, before, copy, rows, num_outcomes)
        if target.is_in_folder:
            _set_aside(Path(target.ledger))
            write_store(target.ledger, header, rows)
        elif not _is_there(target.ledger, rows):
            write_store(target.ledger, header, rows)
        # Before the old files are set aside: a crash in between leaves them there, where nobody asks for them.
        note_place(run, target)
        if not target.is_in_folder:
            _set_aside(run.ledger)
    return shown(target.ledger)


def verified(place: Place, anchor: Place | None) -> tuple[Header, list[Row], int]:
    """Header, entries and number of outcomes of a ledger whose chain holds, with what its anchor notes."""
    noted = noted_at(anchor)
    with reading(place) as found:
        rows = list(found.rows)
        _, _, state, _ = replayed(shown(place), Stored(header=found.header, noted=found.noted, rows=rows), noted)
        return found.header, rows, len(state.outcome_of)


def labels_held(run: RunDirectory, config: VotingMethod, outcome: Callable[[str], Outcome | None]) -> str:
    """In words, whether a ledger holds every label that the run released. RunDirectoryError if it does not."""
    try:
        if isinstance(config, OwnVotes):
            dataset = read_votes_file(config.votes).dataset
        else:
            dataset = config.queried(as_trained(run, config, load_for(run, config.data)))
    except UserError as error:
        return f"not compared, because the data set cannot be read ({error})"
    total, lost = missing_labels(run, choose_queries(dataset, config.plan(dataset).settings), outcome)
    if lost:
        raise RunDirectoryError(f"{run.labels}: {lost} of {total} released labels are not in the ledger; restore it.")
    return f"all {total} are in it"


def _require_newest(run: RunDirectory, before: LedgerPlace, copy: Place, rows: list[Row], num_outcomes: int) -> None:
    heads = {Head(number, digest) for number, _, _, digest in rows}
    for head in _known_heads(run, before):
        if head.number and head not in heads:
            raise LedgerError(
                f"{shown(copy)}: holds {len(rows)} entries, and not the number {head.number} of the ledger it would "
                "replace: charges would be forgotten. Give a copy made later."
            )
    stated = read_json(run.statement)["queries"]["submitted"] if run.statement.exists() else 0
    if num_outcomes < stated:
        raise RunDirectoryError(
            f"{shown(copy)}: holds the outcomes of {num_outcomes} queries, and {stated} were stated; give a later copy."
        )


@contextmanager
def _held(run: RunDirectory, before: LedgerPlace) -> Iterator[None]:
    """Nobody writes the ledger that is to be replaced, as far as it is there. LedgerError where somebody does."""
    with ExitStack() as stack:
        # A writer of files keeps the head locked: with that lock in hand nothing is charged meanwhile.
        if head_path(run.ledger).exists():
            stack.callback(os.close, lock(head_path(run.ledger)))
        # A database that is lost or damaged has no writer to keep out, and is what a copy is put back for.
        if not before.is_in_folder and _can_be_read(before.ledger):
            store = open_store(before.ledger, "", create=False, take_over=False)
            stack.callback(store.close)
        yield


def _can_be_read(place: Place) -> bool:
    try:
        verified(place, None)
    except LedgerError:
        return False
    return True


def _known_heads(run: RunDirectory, before: LedgerPlace) -> list[Head]:
    """The last entries that are known of the ledger that is there, as far as it can be read."""
    known = []
    with suppress(LedgerError):
        known.append(noted_head(run.ledger))
    with suppress(LedgerError):
        # Without the anchor: what a ledger holds was charged, also where it lacks what its anchor notes.
        rows = verified(before.ledger, None)[1]
        known += [Head(rows[-1][0], rows[-1][3])] if rows else []
    return known


def _is_there(place: Place, rows: list[Row]) -> bool:
    """Whether the ledger at ``place`` is this one already: a crash came before it was noted."""
    with suppress(LedgerError):
        return verified(place, None)[1] == rows
    return False


def _set_aside(path: Path) -> None:
    """Give the files of a ledger other names, under which they are a ledger still."""
    for number in itertools.count(1):
        aside = path.with_name(f"{path.stem}.replaced-{number}{path.suffix}")
        if not ledger_files(aside):
            break
    for ending in ("", "-wal"):
        with suppress(FileNotFoundError):
            beside(path, ending).rename(beside(aside, ending))
    # An index of the log, which is made again.
    with suppress(FileNotFoundError):
        beside(path, "-shm").unlink()
    # The head last: until then it says that a ledger was here, and none is made in its place.
    with suppress(FileNotFoundError):
        head_path(path).rename(head_path(aside))
