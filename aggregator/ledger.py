"""The ledger: entries and their terms, reserve before noise, commit before an answer, and verification in slices.

What the entries of a ledger mean: reservations and who asked for them, outcomes, publications, limits of one's own.

Every reservation names who asked, in which request, and when. Those of earlier versions, and a run's own queries, name
nobody.

What a ledger is a ledger of, and how that is stored.

The ledger: what was asked, what it cost and what came of it, durable before anything becomes visible.

Every query is reserved at its full cost before any noise is drawn, and its outcome is committed before the answer
leaves. A crash in between wastes the reservation and never under-charges; a query asked again gets the stored
outcome. An entry holds the reservations or the outcomes of one transaction, one publication of what they cost, or what
one caller may spend. A reservation names who asked for it, in which request, and when.
Entries are only ever appended, each with a keyed digest over its predecessor's.

Entries lie in a store: a SQLite file, or a database (:mod:`aggregator.chain` says what every store keeps).
An edit, a gap or a lost end is noticed, and so is a second writer. An older copy of a whole store is not noticed here:
:mod:`fairpate.methods.label_queries` compares it with what was released, and an anchor, where there is one, is an entry
noted elsewhere that must be there (:mod:`aggregator.chain`).

What the ledger is a ledger of (mechanism, gate, budget, teachers) is written when it is made and cannot change under
it. The ledger prices nothing: it lists what happened, and the accountant prices that.

A write that fails ends the writing: what was committed stays, and the ledger must be opened again.

Verifying a ledger while its writer goes on: a few entries at a time, read on a connection of its own.

Opening a ledger verifies every entry that is stored then. What is changed later, by hand or by a disk, is found by
reading the entries again and following the chain of digests from its start to the last entry that this process wrote:
an edit, a gap, a lost end, and a whole chain that was written anew by somebody who has the key.
"""

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
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np

from aggregator.chain import (
    Chain,
    EntryKind,
    Head,
    LedgerError,
    Place,
    Store,
    Stored,
    canonical,
    entry_payload,
    entry_text,
    noted_at,
    open_anchor,
    open_reader,
    open_store,
    reading,
    shown,
    verified_entries,
)
from aggregator.mechanism import Mechanism, Outcome, mechanism_named, outcome
from aggregator.sqlite import current_terms
from fairpate.privacy.smooth_sensitivity import SanitisedRdp, SmoothRelease
from fairpate.types import Budget, GateRule, IntArray, Relation, Unit, tell


class Asker(NamedTuple):
    """Who asks: the name of a caller, by which charges are told apart, and a request's id. Both empty: a run itself."""

    caller: str = ""
    request: str = ""


NOBODY = Asker()


class Asked(NamedTuple):
    """Reservations after each other of one request. ``at_s``: seconds since 1970; 0: not known."""

    first: int
    num_queries: int
    asker: Asker
    at_s: float


@dataclass(frozen=True, kw_only=True)
class OwnLimit:
    """What one caller may spend of what all share; None: no limit of one's own.

    ``epsilon`` is for the price of the caller's queries at their worst, at the budget's delta; ``max_queries`` for
    their number, and ``per_day`` for how many at once, refilled evenly over a day. ValueError for a limit that is
    negative, infinite or undefined; nought is one for ``max_queries`` alone.
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
    """One query, charged in full. ``votes`` are the teachers' counts per class; ``number`` counts reservations."""

    number: int
    key: str
    group: int
    votes: tuple[int, ...]
    asker: Asker = NOBODY
    at_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Charge:
    """A reservation and its outcome; None where a crash left it open: charged, and nothing was released."""

    reservation: Reservation
    outcome: Outcome | None


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What was published of the price of the first ``num_reservations`` reservations; charged as one release."""

    num_reservations: int
    price: SanitisedRdp


@dataclass(kw_only=True)
class LedgerState:
    """What the entries of a ledger add up to. By reservation number, but for ``votes``: blocks, as stored or read.

    ``asked``: who asked for which reservations, in order; ``charged_to`` counts reservations by caller.
    """

    keys: list[str] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    votes: list[str | IntArray] = field(default_factory=list)
    outcomes: list[Outcome | None] = field(default_factory=list)
    outcome_of: dict[str, Outcome] = field(default_factory=dict)
    publications: list[Publication] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    charged_to: Counter[str] = field(default_factory=Counter)
    limits: dict[str, OwnLimit] = field(default_factory=dict)
    _at_votes: threading.Lock = field(default_factory=threading.Lock)

    def apply(self, kind: EntryKind, payload: dict[str, Any]) -> None:
        """Take in one stored entry."""
        if kind == "publish":
            price = SanitisedRdp(**{**payload["price"], "release": SmoothRelease(**payload["price"]["release"])})
            self.publications.append(Publication(num_reservations=payload["num_reservations"], price=price))
        elif kind == "reserve":
            keys = payload["keys"].split()
            # Entries of earlier versions do not say who asked, nor when.
            asked = payload.get("asked") or [["", "", len(keys)]]
            self.reserve(keys, payload["groups"], payload["votes"], asked, payload.get("at", 0.0))
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
        """Further reservations, open as yet, their votes as they are or as stored.

        ``asked``: caller, request, and how many of them, in order.
        """
        first = len(self.keys)
        for caller, request, count in asked:
            self.asked.append(Asked(first, count, Asker(caller, request), at_s))
            self.charged_to[caller] += count
            first += count
        self.groups += groups
        self.votes.append(votes)
        self.outcomes += [None] * len(keys)
        # Last: by their number other threads know how many reservations are there, and each must be whole.
        self.keys += keys

    def settle(self, first: int, outcomes: Sequence[Outcome]) -> None:
        """The reservations from number ``first`` on have their outcomes."""
        last = first + len(outcomes)
        self.outcomes[first:last] = outcomes
        self.outcome_of.update(zip(self.keys[first:last], outcomes, strict=True))

    def votes_QC(self, num_classes: int) -> IntArray:
        """The votes of every reservation. Decoded when they are first asked for: few ever ask."""
        # Of two threads that joined blocks at once, the second would put its own over later ones.
        with self._at_votes:
            count = len(self.votes)
            if count != 1 or isinstance(self.votes[0], str):
                blocks = [_votes_from(b, num_classes) if isinstance(b, str) else b for b in self.votes[:count]]
                joined = np.concatenate([np.zeros((0, num_classes), dtype=np.int64), *blocks])
                # Only what was there then: the writer may have added a block meanwhile.
                self.votes[:count] = [joined]
            first = self.votes[0]
        assert not isinstance(first, str)
        return first

    def charges(self, num_classes: int) -> tuple[Charge, ...]:
        """Every reservation and what became of it."""
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
    """What is stored of further reservations. ValueError for a key that :meth:`LedgerState.apply` would not find."""
    words = " ".join(keys)
    if len(words.split()) != len(keys):
        raise ValueError("Expected keys without white space.")
    return {"asked": asked, "at": at_s, "groups": groups, "keys": words, "votes": _votes_text(votes_QC)}


def in_runs(askers: Sequence[Asker]) -> list[tuple[str, str, int]]:
    """Caller, request, and how many after each other."""
    return [(*asker, len(list(equal))) for asker, equal in groupby(askers)]


def commit_entry(first: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What is stored of the outcomes of the reservations from number ``first`` on."""
    return {"first": first, "outcomes": [_outcome_word(settled) for settled in outcomes]}


def _outcome_word(settled: Outcome) -> str | int | list[int]:
    """A refusal's verdict, an answer's label, or its label and then the counts that were released with it."""
    if settled.label is None:
        return settled.verdict
    return settled.label if settled.counts is None else [settled.label, *settled.counts]


def _outcome_from(word: Any) -> Outcome:
    if isinstance(word, list):
        return Outcome(verdict="answer", label=word[0], counts=tuple(word[1:]))
    return outcome("answer", word) if isinstance(word, int) else outcome(word)


def _votes_text(votes_QC: IntArray) -> str:
    """Counts as base64 of little-endian 32-bit integers, query by query."""
    return base64.b64encode(votes_QC.astype("<i4").tobytes()).decode("ascii")


def _votes_from(text: str, num_classes: int) -> IntArray:
    return np.frombuffer(base64.b64decode(text), dtype="<i4").reshape(-1, num_classes).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class LedgerTerms:
    """What a ledger is a ledger of; fixed when it is created.

    ``publication`` is how the data-dependent cost may be published, fixed before any vote is seen; None: never.
    ``noise`` is the label of the random source. ``ensemble`` names the teachers that vote (a digest of what determines
    them), so that one ledger never mixes the votes of two ensembles. ValueError for a mechanism that is not registered.
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
    publication: SmoothRelease | None = None

    def __post_init__(self) -> None:
        # Another class under a registered name would be stored as what it is not.
        if mechanism_named(self.mechanism.name, self.mechanism.parameters) != self.mechanism:
            raise ValueError(f"{type(self.mechanism).__qualname__}: is not the mechanism named {self.mechanism.name}.")

    def to_json(self) -> dict[str, Any]:
        """The terms as plain values, the mechanism by name and parameters."""
        mechanism = {"name": self.mechanism.name, "parameters": self.mechanism.parameters}
        values = asdict(self) | {"mechanism": mechanism}
        if self.publication is not None:
            values["publication"].pop("unit")  # that of the terms; earlier ledgers have it there alone
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LedgerTerms:
        """The terms of :meth:`to_json`. KeyError, TypeError or ValueError for other values."""
        mechanism, publication = values["mechanism"], values["publication"]
        typed = {
            "mechanism": mechanism_named(mechanism["name"], mechanism["parameters"]),
            "gate": GateRule(**values["gate"]),
            "budget": Budget(**values["budget"]),
            "publication": publication and SmoothRelease(**publication),
        }
        return cls(**{**values, **typed})


def check_terms(stored: Mapping[str, Any], terms: LedgerTerms) -> None:
    """LedgerError unless the terms that a ledger was made under are ``terms``; both values are named."""
    # Through JSON, as the stored ones went, in which a tuple is a list.
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
        besides (:mod:`aggregator.chain`). ``take_over`` ends another writer, where the store can.

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

    def was_deposed(self) -> bool:
        """Whether another process writes this ledger now, also of a closed one. LedgerError if that cannot be asked."""
        return self._store is not None and self._store.was_deposed()

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


_SLICE_S = 5e-4  # how long a request may have to wait for a slice
_MOST_ENTRIES = 256


def verified_slices(ledger: Ledger) -> Iterator[int]:
    """Verify the entries that an open ledger stored until now; yields how many hold after each slice of half a ms.

    LedgerError where one was changed or removed, UnreachableError where they cannot be read now. To be used up in one
    thread, at whatever pace.
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
                    "restore all of it, what notes its last entry included, from one copy."
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
    """LedgerError unless the entry that ``head`` names is among those that a ledger stores; errors as above besides."""
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
