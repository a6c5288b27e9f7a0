"""The ledger: what was asked, what it cost and what came of it, durable before anything becomes visible.

Every query is reserved at its full cost before any noise is drawn, and its outcome is committed before the answer
leaves. A crash in between wastes the reservation and never under-charges; a query asked again gets the stored
outcome. Entries are only ever appended, each with a digest over its predecessor's, so an edit, a gap or a lost end is
noticed and the ledger refuses to open; an older copy of the whole file is not, and whoever opens one compares it with
what was released. The mechanism's parameters are written when the ledger is made and cannot change under it. The
ledger prices nothing: it lists what happened, and the accountant prices that.

SQLite in WAL mode with full synchronisation; one writer, held by a lock on a file beside it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from aggregator.mechanism import Outcome, Verdict
from fairpate.types import GateRule, MechanismParameters, Relation, Unit, UserError

SCHEMA_VERSION = 1
_GENESIS = "0" * 64


class LedgerError(UserError):
    """The ledger cannot be trusted, or is in use, or was made for something else; nothing was changed."""


@dataclass(frozen=True, kw_only=True)
class LedgerTerms:
    """What a ledger is a ledger of; fixed when it is created.

    ``noise`` is the label of the random source. ``ensemble`` names the teachers that vote (a digest of what determines
    them), so that one ledger never mixes the votes of two ensembles.
    """

    mechanism: MechanismParameters
    gate: GateRule
    num_teachers: int
    num_classes: int
    num_groups: int
    noise: str
    ensemble: str
    unit: Unit = "record"
    relation: Relation = "add or remove one"


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """One query, charged in full. ``votes`` are the teachers' counts per class; ``number`` is its ledger entry."""

    number: int
    key: str
    group: int
    votes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Charge:
    """A reservation and its outcome; None where a crash left it open: charged, and nothing was released."""

    reservation: Reservation
    outcome: Outcome | None


class Ledger:
    """An open ledger: the only writer of its file. Use as a context manager, or call :meth:`close`."""

    def __init__(self, path: Path, terms: LedgerTerms) -> None:
        """Open ``path``, or create it under ``terms``; every entry is verified and replayed.

        LedgerError if another process writes it, if its chain is broken, or if its terms differ (both values are
        named).
        """
        self.path = path
        self.terms = terms
        self._charges: dict[int, Charge] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._lock: int | None = _lock(path)
        try:
            self._database = _connect(path)
            self._head = _open_chain(self._database, terms)
            for number, kind, payload in _verified_entries(self._database, path):
                self._replay(number, kind, payload)
        except sqlite3.DatabaseError as error:
            self.close()
            raise LedgerError(f"{path}: cannot be read as a ledger ({error}); restore it from a copy.") from error
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
        if hasattr(self, "_database"):
            self._database.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def outcome(self, key: str) -> Outcome | None:
        """The committed outcome of a query, or None if it has none."""
        return self._outcomes.get(key)

    @property
    def charges(self) -> tuple[Charge, ...]:
        """Every reservation in the order it was made, open ones included."""
        return tuple(self._charges.values())

    @property
    def counts_GC(self) -> list[list[int]]:
        """How often each label was answered to each group: the gate's state."""
        counts = [[0] * self.terms.num_classes for _ in range(self.terms.num_groups)]
        for charge in self._charges.values():
            if charge.outcome is not None and charge.outcome.label is not None:
                counts[charge.reservation.group][charge.outcome.label] += 1
        return counts

    def reserve(self, queries: Sequence[tuple[str, int, Sequence[int]]]) -> tuple[Reservation, ...]:
        """Charge ``(key, group, votes)`` queries in full and make that durable: one transaction for all of them.

        ValueError for a key that already has an outcome: it must not be drawn again.
        """
        for key, _, _ in queries:
            if key in self._outcomes:
                raise ValueError(f"Query {key} has an outcome already; return that one.")
        payloads = [{"key": key, "group": group, "votes": list(map(int, votes))} for key, group, votes in queries]
        numbers = self._append("reserve", payloads)
        return tuple(self._charges[number].reservation for number in numbers)

    def commit(self, outcomes: Mapping[Reservation, Outcome]) -> None:
        """Store outcomes durably: one transaction for all of them. Only then may an answer leave."""
        for reservation in outcomes:
            if self._charges[reservation.number].outcome is not None:
                raise ValueError(f"Reservation {reservation.number} is committed already.")
        self._append(
            "commit",
            [
                {"reservation": reservation.number, "verdict": outcome.verdict, "label": outcome.label}
                for reservation, outcome in outcomes.items()
            ],
        )

    def _append(self, kind: str, payloads: Iterable[dict[str, Any]]) -> list[int]:
        entries = []
        number, digest = self._head
        for payload in payloads:
            text = _canonical(payload)
            number, digest = number + 1, _link(digest, kind, text)
            entries.append((number, kind, text, digest))
        with _transaction(self._database):
            self._database.executemany("INSERT INTO entries VALUES (?, ?, ?, ?)", entries)
            self._database.execute("UPDATE chain SET length = ?, digest = ?", (number, digest))
        self._head = (number, digest)
        for entry_number, _, text, _ in entries:
            self._replay(entry_number, kind, json.loads(text))
        return [entry[0] for entry in entries]

    def _replay(self, number: int, kind: str, payload: dict[str, Any]) -> None:
        if kind == "reserve":
            reservation = Reservation(
                number=number, key=payload["key"], group=payload["group"], votes=tuple(payload["votes"])
            )
            self._charges[number] = Charge(reservation=reservation, outcome=None)
            return
        outcome = Outcome(verdict=cast("Verdict", payload["verdict"]), label=payload["label"])
        reservation = self._charges[payload["reservation"]].reservation
        self._charges[reservation.number] = Charge(reservation=reservation, outcome=outcome)
        self._outcomes[reservation.key] = outcome


def _lock(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise LedgerError(f"{path}: another process writes this ledger; stop it, or use another run folder.") from None
    return descriptor


def _connect(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    database = sqlite3.connect(path, isolation_level=None, timeout=10)
    try:
        (mode,) = database.execute("PRAGMA journal_mode = WAL").fetchone()
        database.execute("PRAGMA synchronous = FULL")
    except BaseException:
        database.close()
        raise
    if mode != "wal":
        database.close()
        raise LedgerError(f"{path}: this file system gives no write-ahead log ({mode}); use a local disk.")
    return database


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _open_chain(database: sqlite3.Connection, terms: LedgerTerms) -> tuple[int, str]:
    """The number and digest of the last entry; creates the tables in an empty file."""
    if not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        with _transaction(database):
            database.execute("CREATE TABLE chain (version INTEGER, terms TEXT, length INTEGER, digest TEXT)")
            database.execute("CREATE TABLE entries (number INTEGER PRIMARY KEY, kind TEXT, payload TEXT, digest TEXT)")
            text = _canonical(asdict(terms))
            first = _link(_GENESIS, "terms", text)
            database.execute("INSERT INTO chain VALUES (?, ?, 0, ?)", (SCHEMA_VERSION, text, first))
    row = database.execute("SELECT version, terms, length, digest FROM chain").fetchone()
    if row is None or row[0] != SCHEMA_VERSION:
        found = None if row is None else row[0]
        raise LedgerError(f"Expected ledger schema {SCHEMA_VERSION}, found {found}; use the version that wrote it.")
    _check_terms(json.loads(row[1]), terms)
    return row[2], row[3]


def _check_terms(stored: dict[str, Any], terms: LedgerTerms) -> None:
    asked = json.loads(_canonical(asdict(terms)))
    for field in (field.name for field in fields(terms)):
        if stored.get(field) != asked[field]:
            raise LedgerError(
                f"The ledger was opened with {field} = {stored.get(field)} and cannot go on with {asked[field]}; "
                "give the old value, or start a new run folder."
            )


def _verified_entries(database: sqlite3.Connection, path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Every entry, its digest checked; LedgerError at the first that does not follow from the one before."""
    terms, length, head = database.execute("SELECT terms, length, digest FROM chain").fetchone()
    digest, expected = _link(_GENESIS, "terms", terms), 0
    query = "SELECT number, kind, payload, digest FROM entries ORDER BY number"
    for number, kind, payload, stored in database.execute(query).fetchall():
        expected += 1
        digest = _link(digest, kind, payload)
        if number != expected or stored != digest:
            raise LedgerError(f"{path}: entry {expected} was changed or removed; restore the ledger from a copy.")
        yield number, kind, json.loads(payload)
    if (expected, digest) != (length, head):
        raise LedgerError(f"{path}: holds {expected} entries where {length} were written; restore it from a copy.")


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _link(previous: str, kind: str, text: str) -> str:
    return hashlib.sha256(f"{previous}\n{kind}\n{text}".encode()).hexdigest()
