"""The ledger: which queries were submitted, what they cost and what was released, stored before anything is visible.

Every query is reserved at its full cost before any noise is drawn, and its outcome is committed before the answer
leaves. A crash in between wastes the reservation but never charges too little; a query that is submitted again gets the
stored outcome. An entry contains the reservations or the outcomes of one transaction, the limit of one caller, the
offsets of the classes, or outcomes that used no votes. Entries are only ever appended, each with a keyed digest over
its predecessor's (:mod:`aggregator.store`).

The terms of a ledger (mechanism, gate, budget, teachers) are written when it is created and cannot change. A later term
are the offsets, public numbers of votes that are added to noisy counts: they follow from the run's own releases, so
they are written once, after these and before the first query of a caller. The ledger computes no privacy cost: it lists
what happened, and the accountant computes what that costs.

After a failed write nothing more is written, and the ledger must be opened again, which verifies and replays every
entry. :func:`verified_slices` finds entries that were changed later, but not an older copy that replaced the whole
store. Against this, :mod:`fairpate.methods.pate` compares the ledger with the labels that were released, and an anchor,
if there is one, notes the ledger's last entry elsewhere.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from pydantic_core import from_json

from aggregator import store
from aggregator.mechanism import Mechanism, Outcome, mechanism_named, outcome
from aggregator.store import Address, Head, Header, LedgerError, Row, canonical
from fairpate.privacy.accountant import Event, of_unit
from fairpate.privacy.mechanism_events import event_from, event_json
from fairpate.types import GateRule, IntArray, QueryBudget, Relation, Unit, tell

if TYPE_CHECKING:
    from aggregator.postgres import DatabaseAnchor, PostgresReader, PostgresStore

Store: TypeAlias = "store.SqliteStore | PostgresStore"
Anchor: TypeAlias = "store.FileAnchor | DatabaseAnchor"
_TOLD_EVERY = 1024  # entries between two reports of progress
_SLICE_S = 5e-4  # a request may have to wait for a slice
# Most entries in one slice: after short entries a long one may come, and the clock is read only after the slice.
_MOST_ENTRIES = 256


class Asker(NamedTuple):
    """The caller who is charged for a query, and the id of the caller's request. Both are empty for a run's own
    queries."""

    caller: str = ""
    request: str = ""


NOBODY = Asker()


class Asked(NamedTuple):
    """Consecutive reservations (charges of queries, made before their answers are drawn) that one request made.

    ``first`` is the number of the first reservation; ``asker`` is charged; ``at_s`` is in seconds since 1970.
    """

    first: int
    num_queries: int
    asker: Asker
    at_s: float


@dataclass(frozen=True, kw_only=True)
class CallerLimit:
    """The part of the shared privacy budget that one caller may spend. A field that is None sets no such limit.

    ``epsilon`` limits the data-independent cost of the caller's queries, at the budget's delta. ``max_queries`` limits
    their number. ``per_day`` is a quota: that many new queries may be submitted at once, and the quota refills evenly
    within a day. ValueError for a limit that is negative, infinite or NaN; zero is allowed for ``max_queries`` only.
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


NO_LIMIT = CallerLimit()


@dataclass(frozen=True, kw_only=True)
class Offsets:
    """Public whole numbers of ``votes`` for each class, which are added to noisy counts before the class with most
    votes is named. ``released`` is a digest of the released values from which they were computed. ValueError for no
    class."""

    votes: tuple[int, ...]
    released: str

    def __post_init__(self) -> None:
        if not self.votes or any(type(each) is not int for each in self.votes):
            raise ValueError(f"Expected one whole number of votes for each class, got {self.votes}.")

    def label(self, counts_C: Sequence[int]) -> int:
        """Return the class with most votes after the offsets, the first of several."""
        return int(np.argmax(np.add(counts_C, self.votes)))


@dataclass(frozen=True, kw_only=True)
class Charge:
    """The charge of one query at its full cost, and the query's outcome.

    ``number`` counts charges from 0; ``votes`` are the teachers' counts per class. ``outcome`` is None if a crash left
    the query without one: it stays charged although nothing was released. ``at_s`` is in seconds since 1970.
    """

    number: int
    key: str
    group: int
    votes: tuple[int, ...]
    outcome: Outcome | None
    asker: Asker
    at_s: float

    def to_json(self) -> dict[str, Any]:
        """Return the charge as a dictionary of plain values, one row of an export.

        ``verdict``: ``answer``, or the step that refused the query; ``open`` for a query without an outcome. ``label``
        is None for a query that was refused or has no outcome.
        """
        row: dict[str, Any] = {name: getattr(self, name) for name in ("number", "key", "group")}
        row |= {"verdict": "open", "label": None}
        if self.outcome is not None:
            row |= {"verdict": self.outcome.verdict, "label": self.outcome.label}
        return row | {"votes": self.votes, **self.asker._asdict(), "at_s": self.at_s}


@dataclass(frozen=True, kw_only=True)
class LedgerTerms:
    """The terms under which a ledger answers queries: mechanism, fairness gate, budget and teachers. They are fixed
    when the ledger is created.

    ``noise`` names the source of random numbers. ``ensemble`` is a digest of everything that determines the teachers,
    so that one ledger never mixes the votes of two ensembles. ``beside`` are the privacy events of other releases of
    the same records within the same budget, which counts them from the first query on.
    """

    mechanism: Mechanism
    gate: GateRule
    budget: QueryBudget
    num_teachers: int
    num_classes: int
    num_groups: int
    noise: str
    ensemble: str
    unit: Unit = "record"
    relation: Relation = "add or remove one"
    beside: tuple[Event, ...] = ()

    def events(self, num_queries: int) -> list[Event]:
        """Return the data-independent events of ``num_queries`` charged queries and of the releases beside them."""
        return [of_unit(self.mechanism.worst_case(num_queries), self.unit), *self.beside]

    def to_json(self) -> dict[str, Any]:
        """Return the terms as plain JSON values, as a ledger stores them."""
        mechanism = {"name": self.mechanism.name, "parameters": asdict(self.mechanism)}
        values = asdict(self) | {"mechanism": mechanism, "beside": [event_json(event) for event in self.beside]}
        # Through JSON, as stored terms go: a tuple becomes a list.
        return json.loads(json.dumps(values))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LedgerTerms:
        """Return the terms from ``values``, as a ledger stores them. KeyError, TypeError or ValueError for values that
        are not stored terms."""
        typed = {
            "mechanism": mechanism_named(**values["mechanism"]),
            "gate": GateRule(**values["gate"]),
            "budget": QueryBudget(**values["budget"]),
            "beside": tuple(event_from(event) for event in values["beside"]),
        }
        return cls(**{**values, **typed})


class LedgerState:
    """The state of a ledger, computed from its entries: charges of queries, their outcomes and callers, and callers'
    limits.

    Three lists have one item per charge, in order: ``keys`` (the content hashes of the queries), ``groups``, and
    ``outcomes`` (None for a query that a crash left without an outcome). ``outcome_of`` maps keys to stored outcomes.
    ``asked`` lists which request made which charges, in order; it only grows. ``charged_to`` counts the queries charged
    to each caller; the run itself has the empty name. ``limits`` maps callers to their limits. ``head`` is the number
    and digest of the last entry. ``stored_terms`` are the ledger's terms as plain JSON values.

    ``offsets`` are the offsets of the classes, None if the ledger has none; ``num_before_offsets`` is the number of
    charges that were made before they were fixed. ``free`` maps the key of each query that was decided without votes
    to its group: such queries are not charged, and are in none of the three lists.
    """

    def __init__(self, name: str, header: Header, noted: Sequence[Head], rows: Iterable[Row]) -> None:
        """Verify the entries ``rows`` of the ledger ``name`` and compute the ledger's state from them.

        ``noted`` are the last entries on record: in the head file next to the ledger, and in the anchor at another
        place. LedgerError if an entry is wrong, or if one of ``noted`` is not among the rows.
        """
        self.name, self.header = name, header
        self.keys: list[str] = []
        self.groups: list[int] = []
        self.outcomes: list[Outcome | None] = []
        self.outcome_of: dict[str, Outcome] = {}
        self.asked: list[Asked] = []
        self.limits: dict[str, CallerLimit] = {}
        self.charged_to: Counter[str] = Counter()
        self.offsets: Offsets | None = None
        self.num_before_offsets = 0
        self.free: dict[str, int] = {}
        self._votes: list[str | IntArray] = []  # blocks of reservations, as stored or decoded
        self._votes_lock = threading.Lock()
        self.head = header.start
        # The note of an empty ledger is the chain's start, which is not among the rows.
        lacking = set(noted) - {header.start}
        lacking_numbers, last = {number for number, _ in lacking}, max(noted).number
        # Replaying makes millions of objects, none of them in a reference cycle: collecting garbage would be in vain.
        collects = gc.isenabled()
        gc.disable()
        try:
            for number, kind, text, digest in store.verified_entries(rows, name, header, header.start):
                self.head = Head(number, digest)
                if number in lacking_numbers:
                    lacking.discard(self.head)
                self._add(kind, store.entry_payload(name, number, text))
                if number % _TOLD_EVERY == 0:
                    tell(number, max(last, number))
        finally:
            if collects:
                gc.enable()
        if lacking:
            raise _lacks(name, self.head.number, max(lacking).number)
        self.stored_terms: dict[str, Any] = json.loads(header.terms)

    def _add(self, kind: store.EntryKind, payload: dict[str, Any]) -> None:
        """Add one entry, parsed from the text that :class:`Ledger` stored, to the state."""
        if kind == "reserve":
            keys, first = payload["keys"].split(), len(self.keys)
            # Caller, request, and how many of the reservations are theirs, in order.
            for caller, request, count in payload["asked"]:
                self.asked.append(Asked(first, count, Asker(caller, request), payload["at"]))
                self.charged_to[caller] += count
                first += count
            self.groups += payload["groups"]
            self._votes.append(payload["votes"])
            self.outcomes += [None] * len(keys)
            # Last: other threads count reservations by their keys, and may see complete ones only.
            self.keys += keys
        elif kind == "limit":
            self.limits[payload["caller"]] = CallerLimit(**payload["limit"])
        elif kind == "offsets":
            self.offsets = Offsets(votes=tuple(payload["votes"]), released=payload["released"])
            self.num_before_offsets = len(self.keys)
        elif kind == "free":
            outcomes, keys = [_outcome_from(word) for word in payload["outcomes"]], payload["keys"].split()
            self.free.update(zip(keys, payload["groups"], strict=True))
            self.outcome_of.update(zip(keys, outcomes, strict=True))
        else:
            outcomes = [_outcome_from(word) for word in payload["outcomes"]]
            numbers = slice(payload["first"], payload["first"] + len(outcomes))
            self.outcomes[numbers] = outcomes
            self.outcome_of.update(zip(self.keys[numbers], outcomes, strict=True))

    @property
    def has_callers(self) -> bool:
        """True if a query of a caller was charged, not only those of the run itself."""
        return any(self.charged_to.keys() - {NOBODY.caller})

    def require_offsets(self, offsets: Offsets) -> None:
        """Raise LedgerError if the ledger has other offsets than ``offsets``, or if queries of callers were charged
        before it had any."""
        if self.offsets not in (None, offsets):
            assert self.offsets is not None
            names = [name for name in ("votes", "released") if getattr(self.offsets, name) != getattr(offsets, name)]
            what = f"{getattr(self.offsets, names[0])}, not {getattr(offsets, names[0])}"
            raise LedgerError(
                f"{self.name}: the offsets of this ledger were fixed before its first query with {names[0]} = {what}; "
                "restore the released files of the run from a copy, or start a new run folder."
            )
        if self.offsets is None and self.has_callers:
            raise LedgerError(
                f"{self.name}: this ledger answered queries without offsets, and must not change them now; serve it "
                "without offsets, or start a new run folder."
            )

    def require_terms(self, terms: LedgerTerms) -> None:
        """Raise LedgerError unless the ledger was created with ``terms``; the message names both values."""
        wanted = terms.to_json()
        fields = dict.fromkeys([*wanted, *self.stored_terms])
        other = [field for field in fields if self.stored_terms.get(field) != wanted.get(field)]
        if other[:1] == ["ensemble"]:  # a digest of private shards: not to be shown
            raise LedgerError(
                "The ledger was created for other teachers (ensemble) than those of this run; restore "
                "the private records, settings and library versions of this run, or start a new run folder."
            )
        if other:
            what = f"{other[0]} = {self.stored_terms.get(other[0])}, not {wanted.get(other[0])}"
            raise LedgerError(f"The ledger was created with {what}; give the old value, or start a new run folder.")

    @property
    def votes_QC(self) -> IntArray:
        """The votes on all charged queries, in order; decoded when first used, since few callers need them."""
        num_classes = self.stored_terms["num_classes"]
        # Locked: of two threads that join blocks at the same time, the second would overwrite later ones.
        with self._votes_lock:
            count = len(self._votes)
            if count != 1 or isinstance(self._votes[0], str):
                blocks = [
                    np.frombuffer(base64.b64decode(block), dtype="<i4").reshape(-1, num_classes).astype(np.int64)
                    if isinstance(block, str)
                    else block
                    for block in self._votes[:count]
                ]
                # Only the blocks counted above: the writer may have added another one meanwhile.
                self._votes[:count] = [np.concatenate([np.zeros((0, num_classes), dtype=np.int64), *blocks])]
            first = self._votes[0]
        assert not isinstance(first, str)
        return first

    @property
    def charges(self) -> tuple[Charge, ...]:
        """All charges, in the order they were made, with the outcomes of their queries."""
        rows = zip(self.charged(0, len(self.keys)), self.votes_QC.tolist(), strict=False)  # a writer may add votes
        return tuple(
            Charge(
                number=n, key=key, group=group, votes=tuple(votes_C), outcome=found, asker=asked.asker, at_s=asked.at_s
            )
            for n, ((key, group, found, asked), votes_C) in enumerate(rows)
        )

    def charged(self, start: int, stop: int) -> list[tuple[str, int, Outcome | None, Asked]]:
        """Return for each charge from number ``start`` to ``stop - 1`` the query's key and group, its outcome (None if
        it has none) and the request that made the charge."""
        # Requests are in order of their first reservation: the last that begins at or before a number holds it.
        first, last = (bisect_right(self.asked, number, key=lambda asked: asked.first) for number in (start, stop - 1))
        requests = [
            asked
            for asked in self.asked[max(0, first - 1) : last]
            for _ in range(max(start, asked.first), min(stop, asked.first + asked.num_queries))
        ]
        rows = slice(start, stop)
        return list(zip(self.keys[rows], self.groups[rows], self.outcomes[rows], requests, strict=True))


def _outcome_word(settled: Outcome) -> str | int | list[int]:
    """Return an outcome as an entry stores it: a refusal's verdict, an answer's label, or the label followed by the
    counts released with it. ValueError for an answer without a label, and for a refusal with one."""
    if (settled.verdict == "answer") != (settled.label is not None):
        what = f"{settled.verdict}, {settled.label}"
        raise ValueError(
            f"Expected a label with an answer and no label with a refusal, got {what}; correct this outcome."
        )
    if settled.label is None:
        return settled.verdict
    return settled.label if settled.counts is None else [settled.label, *settled.counts]


def _outcome_from(word: str | int | list[int]) -> Outcome:
    if isinstance(word, list):
        return Outcome(verdict="answer", label=word[0], counts=tuple(word[1:]))
    known = {"verdict": "answer", "label": word} if isinstance(word, int) else {"verdict": word}
    return outcome(**known)


def _lacks(name: str, held: int, written: int) -> LedgerError:
    return LedgerError(
        f"{name}: the ledger has {held} entries and lacks entry {written}, which was written; restore the ledger, with "
        "its head file and anchor, from one copy."
    )


class BackEnd(NamedTuple):
    """The classes that write and read a ledger and its anchor, in files or in databases, and a function that writes a
    whole ledger.

    * ``store`` writes a ledger, and is opened by the ledger's one writer. With ``create`` it creates a missing ledger.
      Opening raises LedgerError if the ledger was lost, or if another process writes it. In a database, ``take_over``
      ends the other process's access instead.
    * ``reader`` reads a ledger and writes nothing; a writer may be at work at the same time.
    * ``anchor`` is a copy of the number and digest of a ledger's last entry, at another place. Opening it reads
      nothing; UnreachableError if its database does not answer.
    * ``write`` is a function that writes a complete ledger to a place, or nothing. LedgerError if that place has a
      ledger.
    """

    store: type[store.SqliteStore | PostgresStore]
    reader: type[store.SqliteReader | PostgresReader]
    anchor: type[Anchor]
    write: Callable[[Address, Header, Sequence[Row]], None]


def back_end(place: Address) -> BackEnd:
    """Return the back end (files or databases) for ``place``, the path or the database URL of a ledger."""
    if store.is_database(place):
        from aggregator import postgres  # here only: psycopg is an extra

        return BackEnd(
            postgres.PostgresStore, postgres.PostgresReader, postgres.DatabaseAnchor, postgres.write_database
        )
    return BackEnd(store.SqliteStore, store.SqliteReader, store.FileAnchor, store.write_file)


def noted_at(place: Address | None) -> tuple[Head, ...]:
    """Return the number and digest of a ledger's last entry, as stored in the anchor at ``place``. They are the only
    item of a tuple, which is empty if ``place`` is None.

    An anchor is a copy of this number and digest at another place, so that an older copy of the ledger is noticed.
    LedgerError if the anchor is missing or damaged, UnreachableError if it cannot be read now.
    """
    if place is None:
        return ()
    with closing(back_end(place).anchor(place)) as anchor:
        return (anchor.noted(),)


class Ledger(LedgerState, AbstractContextManager["Ledger"]):
    """A ledger that is open for writing, by this one process. Use it as a context manager, or call :meth:`close`.

    Any thread may read; writes must come one after another. ``hold``, if set, is called before each charge with the
    number of charges that the ledger would then have, and may raise LedgerError to refuse the charge. ``store`` reports
    the state of the disk or database.
    """

    hold: Callable[[int], None] | None = None
    actions: Path | None = None
    """The file of the run's journal of operators' actions (:func:`aggregator.ledger_audit.note_action`)."""

    def __init__(
        self,
        place: Address,
        terms: LedgerTerms,
        *,
        create: bool = True,
        anchor: Address | None = None,
        take_over: bool = False,
    ) -> None:
        """Open the ledger at ``place``; every entry is verified and replayed before anything is written.

        ``create``: create a ledger under ``terms`` if none exists. ``anchor``: another place at which the last entry's
        number and digest are kept (:mod:`aggregator.store`). ``take_over``: end another process that writes the ledger,
        where the store can.

        LedgerError in these cases:

        * No ledger exists and ``create`` is False, or a part of it is missing or belongs to another ledger.
        * Another process writes the ledger, or it cannot be written.
        * The digest of an entry is wrong, or the entry that the anchor notes is missing.
        * Its terms differ from ``terms``; the message names both values.

        ValueError for a mechanism that is not registered.
        """
        self.place, self.terms, name, wanted = place, terms, store.shown(place), terms.to_json()
        # The ledger stores a name: another class under it would be read back as the registered one.
        if mechanism_named(**wanted["mechanism"]) != terms.mechanism:
            kind = type(terms.mechanism).__qualname__
            raise ValueError(
                f"{kind}: another mechanism class is registered as {terms.mechanism.name}; give this class "
                "another `name`."
            )
        self._failure: str | None = None
        self._is_open = False
        try:
            # Closed after an interrupt too: a lock of a lost object would refuse every later writer.
            with ExitStack() as opened:
                self._anchor = None
                if anchor is not None:
                    self._anchor = opened.enter_context(closing(back_end(anchor).anchor(anchor)))
                self.store: Store = opened.enter_context(
                    closing(back_end(place).store(place, canonical(wanted), create=create, take_over=take_over))
                )
                noted = [] if self._anchor is None else [self._anchor.noted()]
                with closing(self.store.reader()) as reader:
                    super().__init__(name, reader.header, [reader.noted, *noted], store.rows_after(reader))
                # Before `begin`, which may write: a ledger of other terms stays as it was.
                self.require_terms(terms)
                self.store.begin(self.head)
                # A crash may have come between an outcome and its note; from here on the outcome may leave.
                if self._anchor is not None:
                    self._anchor.note(self.head)
                self._is_open = True
                self._opened = opened.pop_all()
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(
                f"{name}: the ledger cannot be opened for writing ({error}); repair its disk or folder."
            ) from error

    def close(self, *_: object) -> None:
        """Close the ledger's files or its database connection, then its anchor (a copy of the last entry's digest at
        another place); safe to call twice."""
        self._is_open = False
        # The mark above comes first: no thread begins a write into a store that is being closed.
        self._opened.close()

    __exit__ = close

    def check(self) -> None:
        """Raise LedgerError if the ledger can no longer be written: it is closed, a write failed, or its files or
        database connection are gone.

        Any thread may call this; nothing is written.
        """
        if self._failure is None and self._is_open:
            # Remembered: files that are put back may lack what was written into those that were removed.
            self._failure = self.store.fault()
        if self._failure is not None or not self._is_open:
            raise LedgerError(f"{self.name}: writing to the ledger ended ({self._failure or 'closed'}); open it again.")

    def look(self) -> None:
        """Raise LedgerError in the cases of :meth:`check`, or if the ledger's files, database or anchor are lost or do
        not answer.

        A database is queried on a new connection. Any thread may call this. If a disk or database hangs, this call
        waits for it; writes do not wait for this call.
        """
        self.check()
        self.store.look()
        if self._anchor is not None:
            self._anchor.look()

    def limit(self, caller: str, limit: CallerLimit) -> None:
        """Store durably how much ``caller`` may spend in total; what was charged to the caller before counts too."""
        self._append("limit", {"at": round(time.time(), 3), "caller": caller, "limit": asdict(limit)})

    def reserve(
        self, keys: Sequence[str], groups: Sequence[int], votes_QC: IntArray, askers: Sequence[Asker] = ()
    ) -> range:
        """Charge Q queries at full cost, durably and in one transaction; return the numbers of the charges.

        ``askers`` are charged, one per query; if empty, the run itself. ValueError for a key whose outcome is already
        stored, since it must not be drawn again, and for a key with white space, which separates keys in an entry.
        LedgerError if the charge cannot be written: then no noise may be drawn.
        """
        entry, first = self._asked(keys, groups, askers), len(self.keys)
        # Counts as base64 of little-endian 32-bit integers, query by query.
        entry["votes"] = base64.b64encode(votes_QC.astype("<i4").tobytes()).decode("ascii")
        # The hold comes first: a crash in between counts too many, never too few.
        if self.hold is not None:
            self.hold(first + len(keys))
        self._append("reserve", entry)
        return range(first, first + len(keys))

    def commit(self, reserved: range, outcomes: Sequence[Outcome]) -> None:
        """Store the outcomes of the charged queries ``reserved`` durably, in one transaction. Only after this returns
        may the answers be sent to a caller."""
        # An outcome that was released must never be written over by another draw.
        if self.outcomes[reserved.start : reserved.stop] != [None] * len(outcomes):
            raise ValueError(
                f"Expected one outcome for each charge in {reserved} that has none yet; store no outcome twice."
            )
        words = [_outcome_word(settled) for settled in outcomes]
        self._append("commit", {"first": reserved.start, "outcomes": words})

    def fix_offsets(self, offsets: Offsets) -> None:
        """Store durably the offsets with which queries are answered from now on; do nothing if the ledger has these
        offsets already.

        ``offsets`` must follow from released values alone. LedgerError for other offsets than those of the ledger, and
        if queries of callers were charged without offsets. ValueError for another number of classes, and for a
        mechanism that takes none.
        """
        if len(offsets.votes) != self.terms.num_classes or not self.terms.mechanism.takes_offsets:
            raise ValueError(
                f"Expected offsets for {self.terms.num_classes} classes of a mechanism that takes offsets, got "
                f"{offsets.votes} for {self.terms.mechanism.name}."
            )
        self.require_offsets(offsets)
        if self.offsets is None:
            entry = {"at": round(time.time(), 3), "votes": offsets.votes, "released": offsets.released}
            self._append("offsets", entry)

    def answer_free(
        self, keys: Sequence[str], groups: Sequence[int], outcomes: Sequence[Outcome], askers: Sequence[Asker]
    ) -> None:
        """Store durably the outcomes of queries that were answered from public things, without votes; nothing is
        charged. Only after this returns may the answers be sent to a caller.

        The outcomes must follow from released values alone. ValueError for a key whose outcome is stored already.
        """
        entry = self._asked(keys, groups, askers)
        entry["outcomes"] = [_outcome_word(settled) for settled in outcomes]
        self._append("free", entry)

    def _asked(self, keys: Sequence[str], groups: Sequence[int], askers: Sequence[Asker]) -> dict[str, Any]:
        """Return the part of an entry that says which new queries were submitted, by whom and when. ValueError for a
        key that has an outcome already, and for one with white space."""
        # Open reservations do not count: a query that a crash left without an outcome is asked, and charged, again.
        if not self.outcome_of.keys().isdisjoint(keys):
            raise ValueError("One of these queries has an outcome already; return the stored outcome instead.")
        # Consecutive queries of one request are one item: a request of a thousand queries does not repeat its caller.
        asked = [(*asker, len(list(equal))) for asker, equal in groupby(askers or [NOBODY] * len(keys))]
        words = " ".join(keys)
        # An empty key is found too: it would vanish between the spaces.
        if len(words.split()) != len(keys):
            raise ValueError(
                "Expected keys of queries that are not empty and have no white space; give hashes of their content."
            )
        # Milliseconds, as the audit log shows; more digits would only lengthen every entry.
        return {"asked": asked, "at": round(time.time(), 3), "groups": groups, "keys": words}

    def _append(self, kind: store.EntryKind, payload: dict[str, Any]) -> None:
        """Store an entry, then add it to the ledger's state in memory. LedgerError if the entry cannot be stored; then
        the state is unchanged."""
        self.check()
        text = canonical(payload)
        # ValueError for half of a UTF-16 pair, which no reader accepts. Only entries with such an escape are parsed,
        # since parsing all of them would be slow.
        if "\\ud" in text:
            from_json(text)
        head = Head(self.head.number + 1, self.header.link(self.head.digest, kind, text))
        try:
            # The store first: an anchor ahead of it would refuse a ledger from which nothing is missing.
            self.store.append(kind, text, head)
            if self._anchor is not None and kind != "reserve":  # nothing leaves after a reservation alone
                self._anchor.note(head)
        except (sqlite3.Error, OSError) as error:
            self._failure = str(error)
            raise LedgerError(f"{self.name}: the ledger cannot be written ({error}). {self.store.remedy}") from error
        self.check()  # again: a write may succeed into a file that was removed
        # Last: the next entry must not follow one that may be lost.
        self.head = head
        self._add(kind, payload)


def read_ledger(place: Address, anchor: Address | None = None) -> LedgerState:
    """Read and verify the ledger at ``place``, and return its state; nothing is written.

    LedgerError if an entry's digest is wrong, or if this is not a ledger of the current schema. LedgerError also if the
    ledger lacks the entry that is noted as its last one in the head file next to it, or in the file or database
    ``anchor``.
    """
    # The anchor first: read after the rows, it may note an entry that a writer appended in between.
    noted = noted_at(anchor)
    with closing(back_end(place).reader(place)) as reader:
        return LedgerState(store.shown(place), reader.header, [reader.noted, *noted], store.rows_after(reader))


def verified_slices(ledger: Ledger) -> Iterator[int]:
    """Verify the stored entries of an open ledger, in slices of half a millisecond; yield after each slice the number
    of entries verified so far.

    Edited, missing and lost entries are found. A ledger whose digests were all computed again with its key is found
    too, because the last entry must be the one that this process wrote. LedgerError if an entry was changed or removed,
    UnreachableError if entries cannot be read now. Iterate to the end in one thread, at any pace.
    """
    # Up to the present end: what is appended meanwhile is verified in the next round.
    written, name = ledger.head, ledger.name
    with closing(back_end(ledger.place).reader(ledger.place)) as reader:
        head, count = reader.header.start, 1
        while head.number < written.number:
            began_s = time.perf_counter()
            rows = reader.rows(head.number, min(count, written.number - head.number))
            if not rows:
                raise _lacks(name, head.number, written.number)
            for number, _, _, digest in store.verified_entries(rows, name, reader.header, head):
                head = Head(number, digest)
            # Entries differ a thousandfold in length, so their number follows the clock.
            took_s = time.perf_counter() - began_s
            count = min(2 * count, _MOST_ENTRIES) if took_s < _SLICE_S / 2 else max(1, int(count * _SLICE_S / took_s))
            yield head.number
    if head != written:
        raise LedgerError(f"{name}: the ledger's entries were replaced by others; restore the ledger from a copy.")


def require_entry(ledger: Ledger, head: Head) -> None:
    """Raise LedgerError unless the ledger contains the entry with the number and digest ``head``. Other errors are
    those of :func:`verified_slices`."""
    with closing(back_end(ledger.place).reader(ledger.place)) as reader:
        # The start of the chain is not among the rows.
        found = [reader.header.start]
        if head.number:
            found = [Head(row[0], row[3]) for row in reader.rows(head.number - 1, 1)]
    if found != [head]:
        raise LedgerError(f"{ledger.name}: entry {head.number} was written but is missing; restore the ledger.")
