"""The ledger: what was asked, what it cost and what came of it, durable before anything becomes visible.

Every query is reserved at its full cost before any noise is drawn, and its outcome is committed before the answer
leaves. A crash in between wastes the reservation and never under-charges; a query asked again gets the stored outcome.
An entry holds the reservations or the outcomes of one transaction, or what one caller may spend. A reservation names
who asked for it, in which request, and when; a run's own queries name nobody. Entries are only ever appended, each with
a keyed digest over its predecessor's (:mod:`aggregator.chain`).

What the ledger is a ledger of (mechanism, gate, budget, teachers) is written when it is made and cannot change. The
ledger prices nothing: it lists what happened, and the accountant prices that.

A write that fails ends the writing: what was committed stays, and the ledger must be opened again, which verifies and
replays every entry. Entries that are changed later, by hand or by a disk, are found by :func:`verified_slices`. An
older copy of a whole store is not noticed here: :mod:`fairpate.methods.label_queries` compares a ledger with what was
released, and an anchor, where there is one, notes its last entry elsewhere."""

from __future__ import annotations

import base64
import gc
import json
import sqlite3
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aggregator.chain import (
    Anchor,
    Chain,
    EntryKind,
    Head,
    Header,
    LedgerError,
    Place,
    Reader,
    Row,
    Store,
    Stored,
    canonical,
    entry_payload,
    entry_text,
    is_database,
    shown,
    verified_entries,
)
from aggregator.mechanism import Mechanism, Outcome, mechanism_named, outcome
from aggregator.sqlite import FileAnchor, SqliteReader, SqliteStore, read_file, write_file
from fairpate.types import Budget, GateRule, IntArray, Relation, Unit, tell


class Asker(NamedTuple):
    """Who asks: the name of the caller that is charged, and the id of a request. Both are empty for a run itself."""

    caller: str = ""
    request: str = ""


NOBODY = Asker()


class Asked(NamedTuple):
    """Consecutive reservations of one request. ``at_s``: seconds since 1970."""

    first: int
    num_queries: int
    asker: Asker
    at_s: float


@dataclass(frozen=True, kw_only=True)
class OwnLimit:
    """What one caller may spend of the shared budget; None: no limit of its own.

    ``epsilon`` limits the data-independent price of the caller's queries, at the budget's delta; ``max_queries`` their
    number; ``per_day`` how many may be asked at once, refilled evenly over a day. ValueError for a limit that is
    negative, infinite or NaN; zero is allowed for ``max_queries`` only.
    """

    epsilon: float | None = None
    max_queries: int | None = None
    per_day: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is None or (name == "max_queries" and value == 0):
                continue
            if not 0 < value < float("inf"):
                raise ValueError(f"Expected 0 < {name} < inf, got {value}.")


NO_LIMIT = OwnLimit()


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """One query, charged in full; ``votes`` are the teachers' counts per class, ``number`` counts from 0."""

    number: int
    key: str
    group: int
    votes: tuple[int, ...]
    asker: Asker = NOBODY
    at_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Charge:
    """A reservation and its outcome. Without an outcome a crash left it open: charged, and nothing was released."""

    reservation: Reservation
    outcome: Outcome | None


@dataclass(kw_only=True)
class LedgerState:
    """What the entries of a ledger add up to.

    Lists are by reservation number, except ``votes``: blocks, as stored or decoded, and ``asked``: who asked for which
    reservations, in order. ``charged_to`` counts reservations by caller.
    """

    keys: list[str] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    votes: list[str | IntArray] = field(default_factory=list)
    outcomes: list[Outcome | None] = field(default_factory=list)
    outcome_of: dict[str, Outcome] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    charged_to: Counter[str] = field(default_factory=Counter)
    limits: dict[str, OwnLimit] = field(default_factory=dict)
    _at_votes: threading.Lock = field(default_factory=threading.Lock)

    def apply(self, kind: EntryKind, payload: dict[str, Any]) -> None:
        """Add one stored entry."""
        if kind == "reserve":
            keys = payload["keys"].split()
            self.reserve(keys, payload["groups"], payload["votes"], payload["asked"], payload["at"])
        elif kind == "limit":
            self.limits[payload["caller"]] = OwnLimit(**payload["limit"])
        else:
            self.settle(payload["first"], [_outcome_from(word) for word in payload["outcomes"]])

    def reserve(
        self,
        keys: Sequence[str],
        groups: Sequence[int],
        votes: IntArray | str,
        asked: Sequence[tuple[str, str, int]],
        at_s: float,
    ) -> None:
        """Add reservations without outcomes; votes may be arrays or still encoded as stored.

        ``asked``: caller, request, and how many of the reservations are theirs, in order.
        """
        first = len(self.keys)
        for caller, request, count in asked:
            self.asked.append(Asked(first, count, Asker(caller, request), at_s))
            self.charged_to[caller] += count
            first += count
        self.groups += groups
        self.votes.append(votes)
        self.outcomes += [None] * len(keys)
        # Last: other threads take the number of keys for that of reservations, and each of these must be whole.
        self.keys += keys

    def settle(self, first: int, outcomes: Sequence[Outcome]) -> None:
        """Add the outcomes of the reservations from number ``first`` on."""
        last = first + len(outcomes)
        self.outcomes[first:last] = outcomes
        self.outcome_of.update(zip(self.keys[first:last], outcomes, strict=True))

    def votes_QC(self, num_classes: int) -> IntArray:
        """Return the votes of every reservation, decoded on the first call, since few callers need them."""
        # Locked: of two threads that join blocks at the same time, the second would overwrite later ones.
        with self._at_votes:
            count = len(self.votes)
            if count != 1 or isinstance(self.votes[0], str):
                blocks = [_votes_from(b, num_classes) if isinstance(b, str) else b for b in self.votes[:count]]
                joined = np.concatenate([np.zeros((0, num_classes), dtype=np.int64), *blocks])
                # Only the blocks counted above: the writer may have added another one meanwhile.
                self.votes[:count] = [joined]
            first = self.votes[0]
        assert not isinstance(first, str)
        return first

    def charges(self, num_classes: int) -> tuple[Charge, ...]:
        """Return every reservation with its outcome."""
        count = len(self.keys)  # the writer may be adding to the other columns
        votes = self.votes_QC(num_classes)[:count].tolist()
        asked = islice(((asked.asker, asked.at_s) for asked in self.asked for _ in range(asked.num_queries)), count)
        columns = zip(self.keys[:count], self.groups[:count], votes, asked, self.outcomes[:count], strict=True)
        return tuple(
            Charge(
                reservation=Reservation(
                    number=number, key=key, group=group, votes=tuple(votes_C), asker=asker, at_s=at_s
                ),
                outcome=settled,
            )
            for number, (key, group, votes_C, (asker, at_s), settled) in enumerate(columns)
        )


def reserve_entry(
    keys: Sequence[str],
    groups: Sequence[int],
    votes_QC: IntArray,
    asked: Sequence[tuple[str, str, int]],
    at_s: float,
) -> dict[str, Any]:
    """Return the entry for further reservations. ValueError for a key with white space, which separates keys."""
    words = " ".join(keys)
    if len(words.split()) != len(keys):
        raise ValueError("Expected keys without white space.")
    # Counts as base64 of little-endian 32-bit integers, query by query.
    votes = base64.b64encode(votes_QC.astype("<i4").tobytes()).decode("ascii")
    return {"asked": asked, "at": at_s, "groups": groups, "keys": words, "votes": votes}


def in_runs(askers: Sequence[Asker]) -> list[tuple[str, str, int]]:
    """Return caller, request and how many consecutive queries they asked."""
    return [(*asker, len(list(equal))) for asker, equal in groupby(askers)]


def commit_entry(first: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the entry for the outcomes of the reservations from number ``first`` on."""

    def word(settled: Outcome) -> str | int | list[int]:
        """Return a refusal's verdict, an answer's label, or the label followed by the counts released with it."""
        if settled.label is None:
            return settled.verdict
        return settled.label if settled.counts is None else [settled.label, *settled.counts]

    return {"first": first, "outcomes": [word(settled) for settled in outcomes]}


def _outcome_from(word: Any) -> Outcome:
    if isinstance(word, list):
        return Outcome(verdict="answer", label=word[0], counts=tuple(word[1:]))
    return outcome("answer", word) if isinstance(word, int) else outcome(word)


def _votes_from(text: str, num_classes: int) -> IntArray:
    return np.frombuffer(base64.b64decode(text), dtype="<i4").reshape(-1, num_classes).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class LedgerTerms:
    """What a ledger is a ledger of; fixed when it is made.

    ``noise`` is the label of the random source. ``ensemble`` names the teachers that vote, by a digest of what
    determines them, so that one ledger never mixes the votes of two ensembles. ValueError for a mechanism that is not
    registered.
    """

    mechanism: Mechanism
    gate: GateRule
    budget: Budget
    num_teachers: int
    num_classes: int
    num_groups: int
    noise: str
    ensemble: str
    unit: Unit = "record"
    relation: Relation = "add or remove one"

    def __post_init__(self) -> None:
        # Another class under a registered name would be stored as what it is not.
        if mechanism_named(self.mechanism.name, self.mechanism.parameters) != self.mechanism:
            raise ValueError(f"{type(self.mechanism).__qualname__}: is not the mechanism named {self.mechanism.name}.")

    def to_json(self) -> dict[str, Any]:
        """Return the terms as plain values, the mechanism by name and parameters."""
        mechanism = {"name": self.mechanism.name, "parameters": self.mechanism.parameters}
        return asdict(self) | {"mechanism": mechanism}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LedgerTerms:
        """Return the terms of :meth:`to_json`. KeyError, TypeError or ValueError for other values."""
        mechanism = values["mechanism"]
        typed = {
            "mechanism": mechanism_named(mechanism["name"], mechanism["parameters"]),
            "gate": GateRule(**values["gate"]),
            "budget": Budget(**values["budget"]),
        }
        return cls(**{**values, **typed})


def check_terms(stored: Mapping[str, Any], terms: LedgerTerms) -> None:
    """LedgerError unless a ledger's stored terms are ``terms``; it names the first field that differs."""
    # Through JSON, as the stored terms went: a tuple becomes a list.
    asked = json.loads(canonical(terms.to_json()))
    for name in (column.name for column in fields(terms)):
        if stored.get(name) != asked[name] and name == "ensemble":  # a digest of private shards: not to be shown
            raise LedgerError(
                "The ledger was opened for other teachers (ensemble) and cannot go on with these; restore the private "
                "records, settings and library versions of this run, or start a new run folder."
            )
        if stored.get(name) != asked[name]:
            raise LedgerError(
                f"The ledger was opened with {name} = {stored.get(name)} and cannot go on with {asked[name]}; "
                "give the old value, or start a new run folder."
            )


def open_store(place: Place, terms: str, *, create: bool, take_over: bool) -> Store:
    """Open the ledger at ``place`` for its one writer; with ``create`` it is made under ``terms`` where none exists.

    LedgerError where it was lost, or another process writes it. ``take_over`` ends the other, where the store can.
    """
    if is_database(place):
        from aggregator.postgres import PostgresStore  # psycopg is an extra

        return PostgresStore(str(place), terms, create=create, take_over=take_over)
    return SqliteStore(Path(place), terms, create=create)


def open_reader(place: Place) -> Reader:
    """Open the ledger at ``place`` for reading while any process may write to it. Errors as :class:`Reader`."""
    if is_database(place):
        from aggregator.postgres import DatabaseReader

        return DatabaseReader(str(place))
    return SqliteReader(Path(place))


def reading(place: Place, *, after: int = 0) -> AbstractContextManager[Stored]:
    """Read what a ledger holds after entry number ``after`` in one snapshot, while a writer may append.

    Nothing is written. LedgerError where there is none.
    """
    if is_database(place):
        from aggregator.postgres import read_database

        return read_database(str(place), after=after)
    return read_file(Path(place), after=after)


def write_store(place: Place, header: Header, rows: Sequence[Row]) -> None:
    """Put a whole ledger at ``place``, or nothing. LedgerError where a ledger exists."""
    last = Head(rows[-1][0], rows[-1][3]) if rows else header.chain.start(header.terms)
    if is_database(place):
        from aggregator.postgres import write_database

        write_database(str(place), header, rows, last)
    else:
        write_file(Path(place), header, rows, last)


def open_anchor(place: Place) -> Anchor:
    """Return the anchor at ``place``: a file, or a name in a database, as for ledgers. Nothing is read yet."""
    if is_database(place):
        from aggregator.postgres import DatabaseAnchor

        return DatabaseAnchor(str(place))
    return FileAnchor(Path(place))


def noted_at(place: Place | None) -> tuple[Head, ...]:
    """Return the entry that an anchor notes; none without an anchor. LedgerError as :meth:`Anchor.noted`."""
    if place is None:
        return ()
    with closing(open_anchor(place)) as anchor:
        return (anchor.noted(),)


_TOLD_EVERY = 1024  # entries between two reports of progress


class Ledger:
    """An open ledger: the only writer of its store. Use as a context manager, or call :meth:`close`.

    Any thread may read; writes must come one after another. ``hold``, where it is set, is called before each charge
    with the number of reservations that there would be, and may raise LedgerError to refuse it.
    """

    hold: Callable[[int], None] | None = None
    actions: Path | None = None
    """The run's journal of operators' actions (:func:`aggregator.audit.note_action`)."""

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

        With ``create``, a ledger under ``terms`` is made where none exists. ``anchor``: where else the last entry is
        noted (:mod:`aggregator.chain`). ``take_over`` ends another writer, where the store can.

        LedgerError if there is none and it must not be made, if a part of it is missing or belongs to another ledger,
        if another process writes it, if it cannot be written, if its chain is broken, if it lacks the entry that its
        anchor notes, or if its terms differ (both values are named).
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
        # An interrupt too: a lock held by an object that nobody has would refuse every later writer.
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
            # Remembered: files that are put back may lack what was written into those that went.
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

    def was_deposed(self) -> bool:
        """Return whether another process writes this ledger now, also a closed one. LedgerError if none can tell."""
        return self._store is not None and self._store.was_deposed()

    def has_room(self) -> bool:
        """Return whether the store has room for a transaction, as far as this process can see."""
        return self._store is not None and self._store.has_room()

    def require_writable(self) -> None:
        """LedgerError unless a ledger that failed can be opened again, as far as this process can see."""
        if self._store is not None:
            self._store.require_writable()

    def outcome(self, key: str) -> Outcome | None:
        """Return the committed outcome of a query, or None."""
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
        """Return key, group and outcome of the reservations ``start`` to ``stop - 1``; open ones have no outcome."""
        state = self._state
        return list(zip(state.keys[start:stop], state.groups[start:stop], state.outcomes[start:stop], strict=True))

    @property
    def counts_GC(self) -> list[list[int]]:
        """How often each label was answered to each group: the gate's state."""
        counts = [[0] * self.terms.num_classes for _ in range(self.terms.num_groups)]
        for group, settled in zip(self._state.groups, self._state.outcomes, strict=True):
            # A reservation that a crash left open answered nobody, and moves no rate.
            if settled is not None and settled.label is not None:
                counts[group][settled.label] += 1
        return counts

    @property
    def asked(self) -> Sequence[Asked]:
        """Who asked for which reservations, in order; it only grows."""
        return self._state.asked

    def asked_for(self, number: int) -> Asked:
        """Return the request that reservation ``number`` came in."""
        # Requests are in order of their first reservation: the last that begins at or before this number holds it.
        return self._state.asked[bisect_right(self._state.asked, number, key=lambda asked: asked.first) - 1]

    def charged_to(self, caller: str) -> int:
        """Return how many queries ``caller`` was charged with."""
        return self._state.charged_to[caller]

    @property
    def charged_by_caller(self) -> dict[str, int]:
        """How many queries each caller was charged with; the empty name is the run itself."""
        return dict(self._state.charged_to)

    def limit_of(self, caller: str) -> OwnLimit:
        """Return what ``caller`` may spend of the shared budget."""
        return self._state.limits.get(caller, NO_LIMIT)

    def limit(self, caller: str, limit: OwnLimit) -> None:
        """Store, durably, what ``caller`` may spend from now on; what was charged before counts."""
        # Stored before it holds: a limit must survive a restart.
        self._append("limit", {"at": _now_s(), "caller": caller, "limit": asdict(limit)})
        self._state.limits[caller] = limit

    def reserve(
        self, keys: Sequence[str], groups: Sequence[int], votes_QC: IntArray, askers: Sequence[Asker] = ()
    ) -> range:
        """Charge Q queries in full and make that durable in one transaction; returns the reservations' numbers.

        ``askers`` are charged, one for each query; none: the run itself. ValueError for a key that already has an
        outcome: it must not be drawn again. LedgerError if it cannot be written: then nothing may be drawn.
        """
        # Open reservations do not count: a query that a crash left without an outcome is asked, and charged, again.
        if not self._state.outcome_of.keys().isdisjoint(keys):
            raise ValueError("One of these queries has an outcome already; return that one.")
        asked, at_s = in_runs(askers or [NOBODY] * len(keys)), _now_s()
        entry = reserve_entry(keys, groups, votes_QC, asked, at_s)
        # The hold comes first: a crash in between counts too many, never too few.
        if self.hold is not None:
            self.hold(self.num_reservations + len(keys))
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
        self.check()  # again: a write may succeed into a file that was removed
        self._head = head


def _now_s() -> float:
    return round(time.time(), 3)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the garbage collector: replaying makes millions of objects, none of them in a reference cycle."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def read_ledger(place: Place, anchor: Place | None = None) -> tuple[dict[str, Any], Chain, LedgerState, Head]:
    """Return terms, chain, state and head of a ledger, every digest verified; nothing is written.

    LedgerError where a digest fails, a noted entry is missing, or this is not a ledger of this schema.
    """
    # The anchor first: read after the rows, it may note an entry that a writer appended in between.
    noted = noted_at(anchor)
    with reading(place) as found:
        return replayed(shown(place), found, noted)


def replayed(name: str, found: Stored, noted: tuple[Head, ...]) -> tuple[dict[str, Any], Chain, LedgerState, Head]:
    """Verify the rows of a store and add them up. ``noted``: further entries that must be among them."""
    state, header = LedgerState(), found.header
    start = header.chain.start(header.terms)
    head = start
    # The note of an empty ledger is the chain's start, which is not among the rows.
    lacking = {*found.noted, *noted} - {start}
    lacking_numbers = {number for number, _ in lacking}
    total = max((head.number for head in found.noted), default=0)
    with _uncollected():
        for number, kind, text, digest in verified_entries(found.rows, name, header.chain, start):
            head = Head(number, digest)
            if number in lacking_numbers:
                lacking.discard(head)
            state.apply(kind, entry_payload(name, number, text))
            if number % _TOLD_EVERY == 0:
                tell(number, max(total, number))
    if lacking:
        number = max(lacking).number
        raise LedgerError(
            f"{name}: holds {head.number} entries, and not the number {number} that was written; restore all of it, "
            "head and anchor included, from one copy."
        )
    return json.loads(header.terms), header.chain, state, head


_SLICE_S = 5e-4  # a request may have to wait for a slice
_MOST_ENTRIES = 256


def verified_slices(ledger: Ledger) -> Iterator[int]:
    """Verify the entries that an open ledger stored until now; yield how many hold after each slice of half a ms.

    An edit, a gap, a lost end, and a chain written anew by somebody who has the key are all found: the last entry must
    be the one that this process wrote. LedgerError where an entry was changed or removed, UnreachableError where they
    cannot be read now. To be used up in one thread, at any pace.
    """
    written, name = ledger.head, ledger.name
    with closing(open_reader(ledger.place)) as reader:
        header = reader.header()
        head, count = header.chain.start(header.terms), 1
        while head.number < written.number:
            began_s = time.perf_counter()
            rows = reader.rows(head.number, min(count, written.number - head.number))
            if not rows:
                raise LedgerError(
                    f"{name}: holds {head.number} entries, and not the number {written.number} that was written; "
                    "restore all of it, head and anchor included, from one copy."
                )
            for number, _, _, digest in verified_entries(rows, name, header.chain, head):
                head = Head(number, digest)
            # Entries differ a thousandfold in length, so their number follows the clock.
            took_s = time.perf_counter() - began_s
            count = min(2 * count, _MOST_ENTRIES) if took_s < _SLICE_S / 2 else max(1, int(count * _SLICE_S / took_s))
            yield head.number
    if head != written:
        raise LedgerError(f"{name}: was replaced by other entries; restore the ledger from a copy.")


def require_entry(ledger: Ledger, head: Head) -> None:
    """LedgerError unless a ledger stores the entry that ``head`` names; errors as :func:`verified_slices`."""
    with closing(open_reader(ledger.place)) as reader:
        if head.number == 0:
            header = reader.header()
            found: Head | None = header.chain.start(header.terms)
        else:
            found = next((Head(row[0], row[3]) for row in reader.rows(head.number - 1, 1)), None)
    if found != head:
        raise LedgerError(
            f"{ledger.name}: lacks entry {head.number}, which was written; restore all of it from one copy."
        )
