"""The ledger: what was asked, what it cost and what came of it, durable before anything becomes visible.

Every query is reserved at its full cost before any noise is drawn, and its outcome is committed before the answer
leaves. A crash in between wastes the reservation and never under-charges; a query asked again gets the stored
outcome. An entry holds the reservations or the outcomes of one transaction, one publication of what they cost, or what
one caller may spend. A reservation names who asked for it, in which request, and when.
Entries are only ever appended, each with a keyed digest over its predecessor's.

Entries lie in a store: a SQLite file, or a database (:mod:`aggregator.ledger.stores` says what every store keeps).
An edit, a gap or a lost end is noticed, and so is a second writer. An older copy of a whole store is not noticed here:
:mod:`fairpate.app.ledgers.opened` compares it with what was released, and an anchor, where there is one, is an entry
noted elsewhere that must be there (:mod:`aggregator.ledger.anchors`).

What the ledger is a ledger of (mechanism, gate, budget, teachers) is written when it is made and cannot change under
it. The ledger prices nothing: it lists what happened, and the accountant prices that.

A write that fails ends the writing: what was committed stays, and the ledger must be opened again.
"""

from __future__ import annotations

import gc
import sqlite3
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from aggregator.ledger.anchors import noted_at, open_anchor
from aggregator.ledger.chain import Chain, EntryKind, Head, canonical, entry_payload, entry_text, verified_entries
from aggregator.ledger.entries import (
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
from aggregator.ledger.files import LedgerError
from aggregator.ledger.migration import current_terms
from aggregator.ledger.stores import Place, Store, Stored, open_store, reading, shown
from aggregator.ledger.terms import LedgerTerms, check_terms
from aggregator.mechanism import Outcome
from fairpate.privacy.smooth_release import SanitisedRdp
from fairpate.steps import tell
from fairpate.types import IntArray

_TOLD_EVERY = 1024  # entries between two words on how far reading is


class Ledger:
    """An open ledger: the only writer of its store. Use as a context manager, or call :meth:`close`.

    Any thread may read; writes must come one after another. ``hold``, where it is set, is called before each charge
    with the numbers of reservations and publications that there would be, and may raise LedgerError to refuse it.
    """

    hold: Callable[[int, int], None] | None = None

    def __init__(
        self,
        place: Place,
        terms: LedgerTerms,
        *,
        create: bool = True,
        anchor: Place | None = None,
        take_over: bool = False,
    ) -> None:
        """Open the ledger at ``place``; every entry is verified and replayed before anything is written.

        With ``create``, a ledger under ``terms`` is made where none is. ``anchor``: where the last entry is noted
        besides (:mod:`aggregator.ledger.anchors`). ``take_over`` ends another writer, where the store can.

        LedgerError if there is none and it must not be made, if a part of it is missing or not the one that belongs to
        it, if another process writes it, if it cannot be written, if its chain is broken, if it lacks what its anchor
        notes, or if its terms differ (both values are named).
        """
        self.place, self.name = place, shown(place)
        self.terms = terms
        self._failure: str | None = None
        self._is_open = False
        self._store: Store | None = None
        self._anchor = None if anchor is None else open_anchor(anchor)
        try:
            self._store = open_store(place, canonical(terms.to_json()), create=create, take_over=take_over)
            noted = () if self._anchor is None else (self._anchor.noted(),)
            with self._store.read() as found:
                stored, self._chain, self._state, self._head = replayed(self.name, found, noted)
            # Before `begin`, which may write: a ledger of something else stays as it was.
            check_terms(stored, self.terms)
            self._store.begin(self._head)
            if self._anchor is not None:  # a crash may have come between an outcome and its note; now it may leave
                self._anchor.note(self._head)
            self._is_open = True
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise LedgerError(
                f"{self.name}: cannot be opened for writing ({error}); repair the disk or the folder."
            ) from error
        # An interrupt too: a lock that stays with an object that nobody got would refuse every later writer.
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the store; safe to call twice."""
        self._is_open = False
        for part in (self._store, self._anchor):
            if part is not None:
                part.close()

    def check(self) -> None:
        """LedgerError if a write would be refused: it is closed, a write failed, or its store was changed.

        Any thread may ask; nothing is written.
        """
        if self._failure is None and self._is_open and self._store is not None:
            # For good: files that are put back may lack what was written into those that went.
            self._failure = self._store.fault()
        if self._failure is not None or not self._is_open:
            raise LedgerError(f"{self.name}: writing ended ({self._failure or 'closed'}); open the ledger again.")

    def look(self) -> None:
        """LedgerError as :meth:`check`, or if store or anchor, asked on connections of their own, are not there.

        Any thread may ask; it waits as long as they hang, and no write waits for it.
        """
        self.check()
        for part in (self._store, self._anchor):
            if part is not None:
                part.look()

    def has_room(self) -> bool:
        """Whether the store has room for a transaction, as far as is seen from here."""
        return self._store is not None and self._store.has_room()

    def require_writable(self) -> None:
        """LedgerError unless a ledger that failed can be opened again, as far as is seen from here."""
        if self._store is not None:
            self._store.require_writable()

    def outcome(self, key: str) -> Outcome | None:
        """The committed outcome of a query, or None if it has none."""
        return self._state.outcome_of.get(key)

    @property
    def head(self) -> Head:
        """The last entry."""
        return self._head

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
        return self._state.votes_QC(self.terms.num_classes)

    @property
    def charges(self) -> tuple[Charge, ...]:
        """Every reservation in the order it was made, open ones included."""
        return self._state.charges(self.terms.num_classes)

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
            # What a crash left open was answered to nobody, and moves no rate.
            if settled is not None and settled.label is not None:
                counts[group][settled.label] += 1
        return counts

    @property
    def asked(self) -> Sequence[Asked]:
        """Who asked for which reservations, in order; it only grows."""
        return self._state.asked

    def asked_for(self, number: int) -> Asked:
        """The request that reservation ``number`` came in."""
        # Runs stand in order of their first reservation: the last that begins at or before this number holds it.
        return self._state.asked[bisect_right(self._state.asked, number, key=lambda asked: asked.first) - 1]

    def charged_to(self, caller: str) -> int:
        """How many queries ``caller`` was charged with."""
        return self._state.charged_to[caller]

    @property
    def charged_by_caller(self) -> dict[str, int]:
        """How many queries each caller was charged with; the empty name is the run itself."""
        return dict(self._state.charged_to)

    def limit_of(self, caller: str) -> OwnLimit:
        """What ``caller`` may spend of what all share."""
        return self._state.limits.get(caller, NO_LIMIT)

    def limit(self, caller: str, limit: OwnLimit) -> None:
        """Store, durably, what ``caller`` may spend from now on; what was charged before counts."""
        # Stored before it holds: a limit that a restart forgets is none.
        self._append("limit", {"at": _now_s(), "caller": caller, "limit": asdict(limit)})
        self._state.limits[caller] = limit

    def reserve(
        self, keys: Sequence[str], groups: Sequence[int], votes_QC: IntArray, askers: Sequence[Asker] = ()
    ) -> range:
        """Charge Q queries in full and make that durable in one transaction; returns the reservations' numbers.

        ``askers`` are charged, one for each query; none: the run itself. ValueError for a key that already has an
        outcome: it must not be drawn again. LedgerError if it cannot be written: then nothing may be drawn.
        """
        # Open reservations do not count: what a crash left without an outcome is asked, and charged, again.
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
            # As for reservations: a crash before the entry is there counts too much, never too little.
            self.hold(self.num_reservations, len(self.publications) + 1)
        publication = Publication(num_reservations=self.num_reservations, price=price)
        self._append("publish", {"at": _now_s(), **asdict(publication)})
        self._state.publications.append(publication)

    def _append(self, kind: EntryKind, payload: dict[str, Any]) -> None:
        self.check()
        assert self._store is not None
        text = entry_text(payload)
        head = self._chain.after(self._head, kind, text)
        try:
            # The store first: an anchor ahead of it would refuse a ledger from which nothing is missing.
            self._store.append(kind, text, head)
            if self._anchor is not None and kind != "reserve":  # nothing leaves after a reservation alone
                self._anchor.note(head)
        except (sqlite3.Error, OSError) as error:
            self._failure = str(error)
            raise LedgerError(
                f"{self.name}: cannot be written ({error}); what was committed stays. {self._store.remedy}"
            ) from error
        self.check()  # again: a write may succeed into what is not there any more
        self._head = head


def _now_s() -> float:
    return round(time.time(), 3)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the search for circles: nothing of what is made here is in one, and there are millions of it."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def read_ledger(place: Place, anchor: Place | None = None) -> tuple[dict[str, Any], Chain, LedgerState, Head]:
    """Terms as spelt today, chain, state and head of a ledger whose every digest holds; nothing is written beside it.

    LedgerError otherwise, for one that lacks what was noted, and for what is no ledger of this version.
    """
    # The anchor first: read after the rows, it may note an entry that a writer appended in between.
    noted = noted_at(anchor)
    with reading(place) as found:
        return replayed(shown(place), found, noted)


def replayed(name: str, found: Stored, noted: tuple[Head, ...]) -> tuple[dict[str, Any], Chain, LedgerState, Head]:
    """What the rows of a store add up to, each verified. ``noted``: further entries that must be among them."""
    state, header = LedgerState(), found.header
    start = header.chain.start(header.terms)
    # The chain's start in the shape of an entry: the last one of a ledger that has none.
    last = (*start[:1], "", "", *start[1:])
    # What was noted of an empty ledger is its start, which is no row.
    lacking = {*found.noted, *noted} - {start}
    lacking_numbers = {number for number, _ in lacking}
    total = max((head.number for head in found.noted), default=0)
    with _uncollected():
        for last in verified_entries(found.rows, name, header.chain, start):
            number, kind, text, digest = last
            if number in lacking_numbers:
                lacking.discard(Head(number, digest))
            state.apply(kind, entry_payload(name, number, text))
            if number % _TOLD_EVERY == 0:
                tell(number, max(total, number))
    head = Head(last[0], last[3])
    if lacking:
        number = max(lacking).number
        raise LedgerError(
            f"{name}: holds {head.number} entries, and not the number {number} that was written; restore all of it, "
            "what notes its last entry included, from one copy."
        )
    return current_terms(header), header.chain, state, head
