"""The ledger: what was asked, what it cost and what came of it, durable before anything becomes visible.

Every query is reserved at its full cost before any noise is drawn, and its outcome is committed before the answer
leaves. A crash in between wastes the reservation and never under-charges; a query asked again gets the stored
outcome. An entry holds the reservations or the outcomes of one transaction, or one publication of what they cost.
Entries are only ever appended, each with a digest over its predecessor's, and the last one is noted in a file beside
the ledger once it is durable; so an edit, a gap or a lost end, a write-ahead log that was cut short included, is
noticed and the ledger refuses to open. An older copy of the whole file with its note is not, and whoever opens one
compares it with what was released.

What the ledger is a ledger of (mechanism, gate, budget, teachers) is written when it is made and cannot change under
it. The ledger prices nothing: it lists what happened, and the accountant prices that.

SQLite in WAL mode with full synchronisation; one writer, held by a lock on the file that has the note. A write that
fails ends the writing: what was committed stays, and the ledger must be opened again.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import numpy as np

from aggregator.mechanism import Outcome, outcome
from fairpate.privacy.smooth_sensitivity import SanitisedRdp, SmoothRelease
from fairpate.types import Budget, GateRule, IntArray, MechanismParameters, Relation, Unit, UserError

SCHEMA_VERSION = 2
_CHECKPOINT_PAGES = (
    256  # a short write-ahead log is soon written over; one that grows costs the disk half as much again
)
EntryKind = Literal["reserve", "commit", "publish"]


class LedgerError(UserError):
    """The ledger cannot be trusted, written or shared, or was made for something else; what was committed stays."""


@dataclass(frozen=True, kw_only=True)
class LedgerTerms:
    """What a ledger is a ledger of; fixed when it is created.

    ``publication`` is how the price of the votes may be published, fixed before any is seen; None: never.
    ``noise`` is the label of the random source. ``ensemble`` names the teachers that vote (a digest of what determines
    them), so that one ledger never mixes the votes of two ensembles.
    """

    mechanism: MechanismParameters
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


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """One query, charged in full. ``votes`` are the teachers' counts per class; ``number`` counts reservations."""

    number: int
    key: str
    group: int
    votes: tuple[int, ...]


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


class Head(NamedTuple):
    """The last entry of a chain: its number (0: none yet) and its digest."""

    number: int
    digest: str


@dataclass(kw_only=True)
class LedgerState:
    """What the entries of a ledger add up to. By reservation number, but for ``votes``: a block per entry."""

    keys: list[str] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    votes: list[IntArray] = field(default_factory=list)
    outcomes: list[Outcome | None] = field(default_factory=list)
    outcome_of: dict[str, Outcome] = field(default_factory=dict)
    publications: list[Publication] = field(default_factory=list)

    def apply(self, kind: EntryKind, payload: dict[str, Any]) -> None:
        """Take in one stored entry."""
        if kind == "publish":
            price = SanitisedRdp(**{**payload["price"], "release": SmoothRelease(**payload["price"]["release"])})
            self.publications.append(Publication(num_reservations=payload["num_reservations"], price=price))
        elif kind == "reserve":
            keys = payload["keys"].split()
            self.reserve(keys, payload["groups"], _votes_from(payload["votes"], len(keys)))
        else:
            words = payload["outcomes"]
            self.settle(payload["first"], [outcome("answer", w) if isinstance(w, int) else outcome(w) for w in words])

    def reserve(self, keys: Sequence[str], groups: Sequence[int], votes_QC: IntArray) -> None:
        """Further reservations, open as yet."""
        self.keys += keys
        self.groups += groups
        self.votes.append(votes_QC)
        self.outcomes += [None] * len(keys)

    def settle(self, first: int, outcomes: Sequence[Outcome]) -> None:
        """The reservations from number ``first`` on have their outcomes."""
        last = first + len(outcomes)
        self.outcomes[first:last] = outcomes
        self.outcome_of.update(zip(self.keys[first:last], outcomes, strict=True))

    def charges(self) -> tuple[Charge, ...]:
        """Every reservation and what became of it."""
        votes = (votes_C for block_QC in self.votes for votes_C in block_QC.tolist())
        columns = zip(self.keys, self.groups, votes, self.outcomes, strict=True)
        return tuple(
            Charge(reservation=Reservation(number=number, key=key, group=group, votes=tuple(votes_C)), outcome=settled)
            for number, (key, group, votes_C, settled) in enumerate(columns)
        )


class Ledger:
    """An open ledger: the only writer of its file. Use as a context manager, or call :meth:`close`.

    Any thread may read; writes must come one after another.
    """

    def __init__(self, path: Path, terms: LedgerTerms) -> None:
        """Open ``path``, or create it under ``terms``; every entry is verified and replayed before anything is written.

        LedgerError if another process writes it, if it cannot be written, if its chain is broken, or if its terms
        differ (both values are named).
        """
        self.path = path
        self.terms = terms
        self._failure: str | None = None
        note = _lock(path)
        self._note: int | None = note
        self._database: sqlite3.Connection | None = None
        try:
            noted = _noted_head(path, os.pread(note, _NOTE_BYTES, 0))
            if noted is None and not path.exists():
                _create(path, terms)
            stored, self._state, self._head = read_ledger(path, noted)
            _check_terms(stored, terms)
            self._database = _connect(path)
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise LedgerError(
                f"{path}: cannot be opened for writing ({error}); mend the disk or the folder."
            ) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the file and the lock; safe to call twice."""
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._note is not None:
            os.close(self._note)
            self._note = None

    def outcome(self, key: str) -> Outcome | None:
        """The committed outcome of a query, or None if it has none."""
        return self._state.outcome_of.get(key)

    @property
    def num_reservations(self) -> int:
        """How many queries were charged, open reservations included."""
        return len(self._state.keys)

    @property
    def votes_QC(self) -> IntArray:
        """The votes of every reservation, in order."""
        return np.concatenate([np.zeros((0, self.terms.num_classes), dtype=np.int64), *self._state.votes])

    @property
    def charges(self) -> tuple[Charge, ...]:
        """Every reservation in the order it was made, open ones included."""
        return self._state.charges()

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

    def reserve(self, keys: Sequence[str], groups: Sequence[int], votes_QC: IntArray) -> range:
        """Charge Q queries in full and make that durable in one transaction; returns the reservations' numbers.

        ValueError for a key that already has an outcome: it must not be drawn again. LedgerError if it cannot be
        written: then nothing may be drawn.
        """
        if not self._state.outcome_of.keys().isdisjoint(keys):
            raise ValueError("One of these queries has an outcome already; return that one.")
        words = " ".join(keys)
        if len(words.split()) != len(keys):
            raise ValueError("Expected keys without white space.")
        self._append("reserve", {"groups": groups, "keys": words, "votes": _votes_text(votes_QC)})
        first = self.num_reservations
        self._state.reserve(keys, groups, votes_QC)
        return range(first, first + len(keys))

    def commit(self, reserved: range, outcomes: Sequence[Outcome]) -> None:
        """Store the outcomes of reservations durably in one transaction. Only then may an answer leave."""
        stored = self._state.outcomes[reserved.start : reserved.stop]
        if stored != [None] * len(outcomes):
            raise ValueError(
                f"Expected one outcome for each of the open reservations {reserved.start} .. {reserved.stop - 1}; some "
                "are committed already."
            )
        words = [settled.verdict if settled.label is None else settled.label for settled in outcomes]
        self._append("commit", {"first": reserved.start, "outcomes": words})
        self._state.settle(reserved.start, outcomes)

    def publish(self, price: SanitisedRdp) -> None:
        """Store, durably, what may be published of the price of all reservations so far. Only then may it leave."""
        publication = Publication(num_reservations=self.num_reservations, price=price)
        self._append("publish", asdict(publication))
        self._state.publications.append(publication)

    def _append(self, kind: EntryKind, payload: dict[str, Any]) -> None:
        if self._failure is not None or self._database is None or self._note is None:
            raise LedgerError(f"{self.path}: writing ended ({self._failure or 'closed'}); open the ledger again.")
        text = _canonical(payload)
        head = Head(self._head.number + 1, _link(self._head.digest, kind, text))
        try:
            self._database.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", (head.number, kind, text, head.digest))
            if kind != "reserve":
                os.pwrite(self._note, _note_text(head), 0)
        except (sqlite3.Error, OSError) as error:
            self._failure = str(error)
            raise LedgerError(
                f"{self.path}: cannot be written ({error}); what was committed stays. Mend the disk, then start again."
            ) from error
        self._head = head


def read_ledger(path: Path, noted: Head | None = None) -> tuple[dict[str, Any], LedgerState, Head]:
    """Terms as stored, state and head of a ledger whose every digest holds; nothing is written, not even beside it.

    ``noted`` is an entry that must be there. LedgerError otherwise, and for a file that is no ledger.
    """
    state = LedgerState()
    try:
        with closing(open_read_only(path)) as database:
            database.execute("BEGIN")
            terms, head = _read_header(database, path)
            is_there = noted is None or noted == head
            for head, kind, payload in _verified_entries(database, path, head):  # noqa: B020 - it walks the chain
                is_there = is_there or noted == head
                state.apply(kind, payload)
    except sqlite3.Error as error:
        raise LedgerError(f"{path}: cannot be read as a ledger ({error}); restore it from a copy.") from error
    if noted is not None and not is_there:
        raise LedgerError(
            f"{path}: holds {head.number} entries, and not the number {noted.number} that was written; restore it from "
            "a copy."
        )
    return json.loads(terms), state, head


def noted_head(path: Path) -> Head | None:
    """The last entry that the writer of ``path`` noted beside it; None without a note. LedgerError for a broken one."""
    try:
        return _noted_head(path, _note_path(path).read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LedgerError(f"{_note_path(path)}: cannot be read ({error}).") from error


def open_read_only(path: Path) -> sqlite3.Connection:
    """A connection that leaves the folder as it is. LedgerError if there is no such file."""
    if not path.is_file():
        raise LedgerError(f"{path}: no such ledger; restore it, or give a run folder or a ledger file that is there.")
    # Without a write-ahead log nobody has the file open, and without `immutable` reading would create one.
    alone = not path.with_name(path.name + "-wal").exists()
    uri = f"file:{quote(str(path.absolute()))}?mode=ro{'&immutable=1' if alone else ''}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=10)


def _lock(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(_note_path(path), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise LedgerError(f"{path}: cannot be written ({error}); make its folder writable.") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise LedgerError(f"{path}: another process writes this ledger; stop it, or use another run folder.") from error
    return descriptor


def _create(path: Path, terms: LedgerTerms) -> None:
    """An empty ledger, whole or not there at all."""
    unfinished = path.with_name(path.name + ".new")
    unfinished.unlink(missing_ok=True)
    os.close(os.open(unfinished, os.O_RDWR | os.O_CREAT, 0o600))
    with closing(_connect(unfinished)) as database:
        database.execute("BEGIN IMMEDIATE")
        database.execute("CREATE TABLE chain (version INTEGER, terms TEXT)")
        database.execute("CREATE TABLE entries (number INTEGER PRIMARY KEY, kind TEXT, payload TEXT, digest TEXT)")
        database.execute("INSERT INTO chain VALUES (?, ?)", (SCHEMA_VERSION, _canonical(asdict(terms))))
        database.execute("COMMIT")
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # the name itself must outlive a crash
    os.close(folder)


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, timeout=10, check_same_thread=False)
    try:
        (mode,) = database.execute("PRAGMA journal_mode = WAL").fetchone()
        database.execute("PRAGMA synchronous = FULL")
        database.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    except BaseException:
        database.close()
        raise
    if mode != "wal":
        database.close()
        raise LedgerError(f"{path}: this file system gives no write-ahead log ({mode}); use a local disk.")
    return database


def _read_header(database: sqlite3.Connection, path: Path) -> tuple[str, Head]:
    """The terms and the head of the empty chain that starts from them."""
    version, terms = database.execute("SELECT version, terms FROM chain").fetchone() or (None, "")
    if version != SCHEMA_VERSION:
        raise LedgerError(
            f"{path}: expected ledger schema {SCHEMA_VERSION}, found {version}; use the version that wrote it, or "
            "start a new run folder."
        )
    return terms, Head(number=0, digest=_link("", "terms", terms))


def _verified_entries(
    database: sqlite3.Connection, path: Path, head: Head
) -> Iterator[tuple[Head, EntryKind, dict[str, Any]]]:
    """Every entry, its digest checked; LedgerError at the first that does not follow from the one before."""
    for number, kind, text, digest in database.execute("SELECT * FROM entries ORDER BY number"):
        head = Head(number=head.number + 1, digest=_link(head.digest, kind, text))
        if (number, digest) != (head.number, head.digest):
            raise LedgerError(f"{path}: entry {head.number} was changed or removed; restore the ledger from a copy.")
        yield head, kind, json.loads(text)


def _check_terms(stored: dict[str, Any], terms: LedgerTerms) -> None:
    asked = json.loads(_canonical(asdict(terms)))
    for name in (column.name for column in fields(terms)):
        if stored.get(name) != asked[name]:
            raise LedgerError(
                f"The ledger was opened with {name} = {stored.get(name)} and cannot go on with {asked[name]}; "
                "give the old value, or start a new run folder."
            )


def _note_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


_NOTE_BYTES = 128


def _note_text(head: Head) -> bytes:
    return f"{head.number:020d} {head.digest}\n".encode()


def _noted_head(path: Path, text: bytes) -> Head | None:
    if not text:
        return None
    number, _, digest = text.decode("ascii", "replace").strip().partition(" ")
    if not number.isdecimal() or len(digest) != 64:
        raise LedgerError(f"{_note_path(path)}: was changed; restore it and the ledger from a copy.")
    return Head(number=int(number), digest=digest)


def _votes_text(votes_QC: IntArray) -> str:
    """Counts as base64 of little-endian 32-bit integers, query by query."""
    return base64.b64encode(votes_QC.astype("<i4").tobytes()).decode("ascii")


def _votes_from(text: str, num_queries: int) -> IntArray:
    return np.frombuffer(base64.b64decode(text), dtype="<i4").reshape(num_queries, -1).astype(np.int64)


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def _link(previous: str, kind: str, text: str) -> str:
    return hashlib.sha256(f"{previous}\n{kind}\n{text}".encode()).hexdigest()
