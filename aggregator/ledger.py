"""The ledger: what was asked, what it cost and what came of it, durable before anything becomes visible.

Every query is reserved at its full cost before any noise is drawn, and its outcome is committed before the answer
leaves. A crash in between wastes the reservation and never under-charges; a query asked again gets the stored
outcome. An entry holds the reservations or the outcomes of one transaction, one publication of what they cost, or what
one caller may spend. A reservation names who asked for it, in which request, and when.
Entries are only ever appended, each with a keyed digest over its predecessor's.

The number and digest of the last entry also stand in a second file, the head, as soon as the entry is durable; an
answer leaves only when the head is durable too. So an edit, a gap or a lost end is noticed, a write-ahead log that was
removed or cut short included (:mod:`aggregator.chain`). A ledger without its head, or a head without its ledger, is
refused, and so is one whose files are changed while it is open (:mod:`aggregator.files`). An older copy of all files
together is not noticed here; :mod:`fairpate.app.ledgers` compares it with what was released.

What the ledger is a ledger of (mechanism, gate, budget, teachers) is written when it is made and cannot change under
it. The ledger prices nothing: it lists what happened, and the accountant prices that.

SQLite in WAL mode with full synchronisation; one writer, held by a lock on the head. A write that fails ends the
writing: what was committed stays, and the ledger must be opened again.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from aggregator.chain import (
    UNKEYED_VERSION,
    Chain,
    EntryKind,
    Head,
    canonical,
    complete_or_create,
    head_text,
    noted_head,
    read_header,
    schema_version,
    verified_entries,
)
from aggregator.entries import (
    NO_LIMIT,
    NOBODY,
    Asked,
    Asker,
    Charge,
    LedgerState,
    OwnLimit,
    Publication,
    commit_entry,
    in_runs,
    reserve_entry,
)
from aggregator.files import (
    LedgerError,
    OpenFiles,
    abandon,
    connect,
    folder_held,
    head_path,
    identity,
    lock,
    open_read_only,
)
from aggregator.mechanism import Outcome
from aggregator.migration import current_terms, rewrite_unkeyed
from aggregator.terms import LedgerTerms, check_terms
from fairpate.privacy.smooth_sensitivity import SanitisedRdp
from fairpate.types import IntArray


class Ledger:
    """An open ledger: the only writer of its file. Use as a context manager, or call :meth:`close`.

    Any thread may read; writes must come one after another. ``hold``, where it is set, is called before each charge
    with the numbers of reservations and publications that there would be, and may raise LedgerError to refuse it.
    """

    hold: Callable[[int, int], None] | None = None

    def __init__(self, path: Path, terms: LedgerTerms, *, create: bool = True) -> None:
        """Open ``path``; every entry is verified and replayed before anything is written.

        With ``create``, a ledger under ``terms`` is made where no file of one is. LedgerError if there is none and it
        must not be made, if a file of it is missing or not the one that belongs to it, if another process writes it, if
        it cannot be written, if its chain is broken, or if its terms differ (both values are named).
        """
        self.path = path
        self.terms = terms
        self._failure: str | None = None
        self._head_file: int | None = None
        self._database: sqlite3.Connection | None = None
        self._files: OpenFiles | None = None
        try:
            self._open(create=create)
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise LedgerError(
                f"{path}: cannot be opened for writing ({error}); repair the disk or the folder."
            ) from error
        except BaseException:
            self.close()
            raise

    def _open(self, *, create: bool) -> None:
        with folder_held(self.path, create=create):
            if not os.path.lexists(self.path):
                complete_or_create(self.path, canonical(self.terms.to_json()), create=create)
            before = identity(self.path)
            if schema_version(self.path) == UNKEYED_VERSION:
                rewrite_unkeyed(self.path)
                before = identity(self.path)
        # Locked before it is read: no other writer moves the head in between.
        self._head_file = lock(head_path(self.path))
        stored, self._chain, self._state, self._head = read_ledger(self.path, noted_head(self.path))
        # Before `connect`, which may write: a ledger of something else stays as it was.
        check_terms(stored, self.terms)
        self._database = connect(self.path)
        # The writer must have opened what was verified, not what was put in its place since.
        last = self._database.execute("SELECT number, digest FROM entries ORDER BY number DESC LIMIT 1").fetchone()
        if identity(self.path) != before or (last is not None and Head(*last) != self._head):
            raise LedgerError(f"{self.path}: was replaced while it was opened; open it again.")
        self._files = OpenFiles(self.path, self._head_file)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the files and the lock; safe to call twice."""
        if self._database is not None:
            if self._files is not None and self._files.fault() is None:
                self._database.close()
            else:
                abandon(self._database)
            self._database = None
        # The lock goes last: closing the database may still write the log back.
        if self._head_file is not None:
            os.close(self._head_file)
            self._head_file = None

    def check(self) -> None:
        """LedgerError if a write would be refused: the ledger is closed, a write failed, or a file was changed.

        Any thread may ask; nothing is written.
        """
        if self._failure is None and self._database is not None and self._files is not None:
            self._failure = self._files.fault()
        if self._failure is not None or self._database is None:
            raise LedgerError(f"{self.path}: writing ended ({self._failure or 'closed'}); open the ledger again.")

    def outcome(self, key: str) -> Outcome | None:
        """The committed outcome of a query, or None if it has none."""
        return self._state.outcome_of.get(key)

    @property
    def num_entries(self) -> int:
        """How many entries its chain has."""
        return self._head.number

    @property
    def num_reservations(self) -> int:
        """How many queries were charged, open reservations included."""
        return len(self._state.keys)

    @property
    def num_outcomes(self) -> int:
        """How many different queries have an outcome."""
        return len(self._state.outcome_of)

    @property
    def votes_QC(self) -> IntArray:
        """The votes of every reservation, in order."""
        return np.concatenate([np.zeros((0, self.terms.num_classes), dtype=np.int64), *self._state.votes])

    @property
    def charges(self) -> tuple[Charge, ...]:
        """Every reservation in the order it was made, open ones included."""
        return self._state.charges()

    def charged(self, start: int, stop: int) -> list[tuple[str, int, Outcome | None]]:
        """Key, group and outcome of the reservations ``start`` to ``stop - 1``; open ones have no outcome."""
        state = self._state
        return list(zip(state.keys[start:stop], state.groups[start:stop], state.outcomes[start:stop], strict=True))

    @property
    def publications(self) -> Sequence[Publication]:
        """What was published of prices, in order."""
        return tuple(self._state.publications)

    @property
    def counts_GC(self) -> list[list[int]]:
        """How often each label was answered to each group: the gate's state."""
        counts = [[0] * self.terms.num_classes for _ in range(self.terms.num_groups)]
        for group, settled in zip(self._state.groups, self._state.outcomes, strict=True):
            if settled is not None and settled.label is not None:
                counts[group][settled.label] += 1
        return counts

    @property
    def asked(self) -> Sequence[Asked]:
        """Who asked for which reservations, in order; it only grows."""
        return self._state.asked

    def asked_for(self, number: int) -> Asked:
        """The request that reservation ``number`` came in."""
        return self._state.asked[bisect_right(self._state.asked, number, key=lambda asked: asked.first) - 1]

    def charged_to(self, caller: str) -> int:
        """How many queries ``caller`` was charged with."""
        return self._state.charged_to[caller]

    def limit_of(self, caller: str) -> OwnLimit:
        """What ``caller`` may spend of what all share."""
        return self._state.limits.get(caller, NO_LIMIT)

    def limit(self, caller: str, limit: OwnLimit) -> None:
        """Store, durably, what ``caller`` may spend from now on; what was charged before counts."""
        self._append("limit", {"at": _now_s(), "caller": caller, "limit": asdict(limit)})
        self._state.limits[caller] = limit

    def reserve(
        self, keys: Sequence[str], groups: Sequence[int], votes_QC: IntArray, askers: Sequence[Asker] = ()
    ) -> range:
        """Charge Q queries in full and make that durable in one transaction; returns the reservations' numbers.

        ``askers`` are charged, one for each query; none: the run itself. ValueError for a key that already has an
        outcome: it must not be drawn again. LedgerError if it cannot be written: then nothing may be drawn.
        """
        if not self._state.outcome_of.keys().isdisjoint(keys):
            raise ValueError("One of these queries has an outcome already; return that one.")
        asked, at_s = in_runs(askers or [NOBODY] * len(keys)), _now_s()
        entry = reserve_entry(keys, groups, votes_QC, asked, at_s)
        # The hold comes first: a crash in between counts too many, never too few.
        if self.hold is not None:
            self.hold(self.num_reservations + len(keys), len(self.publications))
        self._append("reserve", entry)
        # Memory follows the disk: what could not be written was not charged.
        first = self.num_reservations
        self._state.reserve(keys, groups, votes_QC, asked, at_s)
        return range(first, first + len(keys))

    def commit(self, reserved: range, outcomes: Sequence[Outcome]) -> None:
        """Store the outcomes of reservations durably in one transaction. Only then may an answer leave."""
        # An outcome that was released must never be written over by another draw.
        stored = self._state.outcomes[reserved.start : reserved.stop]
        if stored != [None] * len(outcomes):
            raise ValueError(
                f"Expected one outcome for each of the open reservations {reserved.start} .. {reserved.stop - 1}; some "
                "are committed already."
            )
        self._append("commit", commit_entry(reserved.start, outcomes))
        self._state.settle(reserved.start, outcomes)

    def publish(self, price: SanitisedRdp) -> None:
        """Store, durably, what may be published of the price of all reservations so far. Only then may it leave."""
        if self.hold is not None:
            self.hold(self.num_reservations, len(self.publications) + 1)
        publication = Publication(num_reservations=self.num_reservations, price=price)
        self._append("publish", {"at": _now_s(), **asdict(publication)})
        self._state.publications.append(publication)

    def _append(self, kind: EntryKind, payload: dict[str, Any]) -> None:
        self.check()
        assert self._database is not None
        assert self._head_file is not None
        text = canonical(payload)
        head = self._chain.after(self._head, kind, text)
        try:
            # The entry first: a head whose entry is missing would make a sound ledger refuse to open.
            self._database.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", (head.number, kind, text, head.digest))
            os.pwrite(self._head_file, head_text(head), 0)
            if kind != "reserve":  # what leaves next must not outlive a loss of power that its head does not
                os.fdatasync(self._head_file)
        except (sqlite3.Error, OSError) as error:
            self._failure = str(error)
            raise LedgerError(
                f"{self.path}: cannot be written ({error}); what was committed stays. Fix the disk, then start again."
            ) from error
        self.check()  # again: SQLite writes into a file that was unlinked meanwhile without an error
        self._head = head


def _now_s() -> float:
    return round(time.time(), 3)


def read_ledger(path: Path, noted: Head | None) -> tuple[dict[str, Any], Chain, LedgerState, Head]:
    """Terms as spelt today, chain, state and head of a ledger whose every digest holds; nothing is written beside it.

    ``noted`` is an entry that must be there. LedgerError otherwise, and for a file that is no ledger of this version.
    """
    state = LedgerState()
    try:
        with closing(open_read_only(path)) as database:
            # One snapshot for header and entries, whatever a writer appends meanwhile.
            database.execute("BEGIN")
            header = read_header(database, path)
            chain = header.chain
            head = chain.start(header.terms)
            is_there = noted is None or noted == head
            for head, kind, text in verified_entries(database, path, chain, head):  # noqa: B020 - it walks the chain
                is_there = is_there or noted == head
                state.apply(kind, json.loads(text))
    except sqlite3.Error as error:
        raise LedgerError(f"{path}: cannot be read as a ledger ({error}); restore it from a copy.") from error
    if noted is not None and not is_there:
        raise LedgerError(
            f"{path}: holds {head.number} entries, and not the number {noted.number} that was written; restore it and "
            f"{head_path(path).name}, with {path.name}-wal if there is one, from one copy."
        )
    return current_terms(header), chain, state, head
