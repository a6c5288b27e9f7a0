"""The ledger: what was asked, what it cost and what came of it, durable before anything becomes visible.

Every query is reserved at its full cost before any noise is drawn, and its outcome is committed before the answer
leaves. A crash in between wastes the reservation and never under-charges; a query asked again gets the stored
outcome. An entry holds the reservations or the outcomes of one transaction, or one publication of what they cost.
Entries are only ever appended, each with a digest over its predecessor's; the digest is keyed (HMAC-SHA256, the key
lies in the ledger), because entries hold votes and a plain digest would confirm a guess about them to its reader.

The number and digest of the last entry also stand in a second file, the head, as soon as the entry is durable; an
answer leaves only when the head is durable too. So an edit, a gap or a lost end is noticed, a write-ahead log that was
removed or cut short included. A ledger without its head, or a head without its ledger, is refused. While a ledger is
open its files are checked before and after every write: if one was removed, replaced or cut short, nothing more is
written or answered. An older copy of all files together is not noticed here; :mod:`fairpate.app.ledgers` compares it
with what was released.

What the ledger is a ledger of (mechanism, gate, budget, teachers) is written when it is made and cannot change under
it. The ledger prices nothing: it lists what happened, and the accountant prices that.

SQLite in WAL mode with full synchronisation; one writer, held by a lock on the head. A write that fails ends the
writing: what was committed stays, and the ledger must be opened again.
"""

from __future__ import annotations

import base64
import ctypes
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import numpy as np

from aggregator.mechanism import Outcome, outcome
from fairpate.files import write_atomically
from fairpate.privacy.smooth_sensitivity import SanitisedRdp, SmoothRelease
from fairpate.types import Budget, GateRule, IntArray, MechanismParameters, Relation, Unit, UserError

SCHEMA_VERSION = 3
_UNKEYED_VERSION = 2
_BRING_UP = "repeat `fairpate run` or `fairpate serve` on its run folder, which brings it to this version"
# A short write-ahead log is soon written over; one that grows costs the disk half as much again.
_CHECKPOINT_PAGES = 256
EntryKind = Literal["reserve", "commit", "publish"]


class LedgerError(UserError):
    """The ledger cannot be trusted, written or shared, or was made for something else; what was committed stays."""


@dataclass(frozen=True, kw_only=True)
class LedgerTerms:
    """What a ledger is a ledger of; fixed when it is created.

    ``publication`` is how the data-dependent cost may be published, fixed before any vote is seen; None: never.
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
        self._files: _Files | None = None
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
        with _folder_held(self.path, create=create):
            if not os.path.lexists(self.path):
                _complete_or_create(self.path, self.terms, create=create)
            before = _identity(self.path)
            if _version(self.path) == _UNKEYED_VERSION:
                _migrate(self.path)
                before = _identity(self.path)
        self._head_file = _lock(head_path(self.path))
        stored, self._chain, self._state, self._head = read_ledger(self.path, noted_head(self.path))
        _check_terms(stored, self.terms)
        self._database = _connect(self.path)
        # The writer must have opened what was verified, not what was put in its place since.
        last = self._database.execute("SELECT number, digest FROM entries ORDER BY number DESC LIMIT 1").fetchone()
        if _identity(self.path) != before or (last is not None and Head(*last) != self._head):
            raise LedgerError(f"{self.path}: was replaced while it was opened; open it again.")
        self._files = _Files(self.path, self._head_file)

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
                _abandon(self._database)
            self._database = None
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
        if self.hold is not None:
            self.hold(self.num_reservations + len(keys), len(self.publications))
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
        if self.hold is not None:
            self.hold(self.num_reservations, len(self.publications) + 1)
        publication = Publication(num_reservations=self.num_reservations, price=price)
        self._append("publish", asdict(publication))
        self._state.publications.append(publication)

    def _append(self, kind: EntryKind, payload: dict[str, Any]) -> None:
        self.check()
        assert self._database is not None
        assert self._head_file is not None
        text = _canonical(payload)
        head = self._chain.after(self._head, kind, text)
        try:
            # The entry first: a head whose entry is missing would make a sound ledger refuse to open.
            self._database.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", (head.number, kind, text, head.digest))
            os.pwrite(self._head_file, _head_text(head), 0)
            if kind != "reserve":  # what leaves next must not outlive a loss of power that its head does not
                os.fdatasync(self._head_file)
        except (sqlite3.Error, OSError) as error:
            self._failure = str(error)
            raise LedgerError(
                f"{self.path}: cannot be written ({error}); what was committed stays. Mend the disk, then start again."
            ) from error
        self.check()  # again: SQLite writes into a file that was unlinked meanwhile without an error
        self._head = head


class _Files:
    """The files of an open ledger; none may be removed, replaced or cut short under its writer."""

    def __init__(self, path: Path, head_file: int) -> None:
        self._paths = (path, _beside(path, "-wal"), _beside(path, "-shm"), head_path(path))
        self._seen = tuple(self._look(file) for file in self._paths)
        held = os.fstat(head_file)
        if self._seen[-1][:2] != (held.st_dev, held.st_ino):
            raise LedgerError(f"{head_path(path)}: was replaced while it was opened; open the ledger again.")

    def fault(self) -> str | None:
        """What was done to one of them, or None. None of them ever shrinks, for the log is written over in place."""
        seen = []
        for path, before in zip(self._paths, self._seen, strict=True):
            try:
                now = self._look(path)
            except OSError as error:
                return f"{path.name} cannot be found ({error.strerror}); stop, and restore all its files from one copy"
            if now[:2] != before[:2]:
                return f"{path.name} was replaced; stop, and restore all its files from one copy"
            if now[2] < before[2]:
                return f"{path.name} was cut short; stop, and restore all its files from one copy"
            seen.append(now)
        self._seen = tuple(seen)
        return None

    @staticmethod
    def _look(path: Path) -> tuple[int, int, int]:
        found = path.lstat()
        return found.st_dev, found.st_ino, found.st_size


@dataclass(frozen=True)
class _Chain:
    """Digests of entries, keyed unless ``key`` is None, as they were before schema 3."""

    key: bytes | None

    def start(self, terms: str) -> Head:
        """The head of the chain without entries."""
        return Head(number=0, digest=self._link("", "terms", terms))

    def after(self, head: Head, kind: str, text: str) -> Head:
        """The head once this entry follows."""
        return Head(number=head.number + 1, digest=self._link(head.digest, kind, text))

    def _link(self, previous: str, kind: str, text: str) -> str:
        message = f"{previous}\n{kind}\n{text}".encode()
        if self.key is None:
            return hashlib.sha256(message).hexdigest()
        return hmac.digest(self.key, message, "sha256").hex()


def read_ledger(path: Path, noted: Head | None) -> tuple[dict[str, Any], _Chain, LedgerState, Head]:
    """Terms as stored, chain, state and head of a ledger whose every digest holds; nothing is written beside it.

    ``noted`` is an entry that must be there. LedgerError otherwise, and for a file that is no ledger of this version.
    """
    state = LedgerState()
    try:
        with closing(open_read_only(path)) as database:
            database.execute("BEGIN")
            terms, chain = _read_header(database, path)
            head = chain.start(terms)
            is_there = noted is None or noted == head
            for head, kind, text in _verified_entries(database, path, chain, head):  # noqa: B020 - it walks the chain
                is_there = is_there or noted == head
                state.apply(kind, json.loads(text))
    except sqlite3.Error as error:
        raise LedgerError(f"{path}: cannot be read as a ledger ({error}); restore it from a copy.") from error
    if noted is not None and not is_there:
        raise LedgerError(
            f"{path}: holds {head.number} entries, and not the number {noted.number} that was written; restore it and "
            f"{head_path(path).name}, with {path.name}-wal if there is one, from one copy."
        )
    return json.loads(terms), chain, state, head


def head_path(path: Path) -> Path:
    """The file that holds the number and digest of the last entry of the ledger at ``path``."""
    return path.with_suffix(".head")


def noted_head(path: Path) -> Head:
    """The last entry that the writer of ``path`` noted beside it. LedgerError if the file is missing or damaged."""
    try:
        text = head_path(path).read_text("ascii", "replace")
    except OSError as error:
        if _beside(path, ".lock").exists():
            raise LedgerError(f"{path}: was written by an earlier version; {_BRING_UP}.") from error
        raise LedgerError(
            f"{head_path(path)}: cannot be read ({error.strerror}), and says how many entries {path.name} must hold; "
            "restore both from one copy."
        ) from error
    return _parse_head(head_path(path), text)


def open_read_only(path: Path) -> sqlite3.Connection:
    """A connection that leaves the folder as it is. LedgerError if there is no such file."""
    if not path.is_file():
        raise LedgerError(f"{path}: no such ledger; restore it, or give a run folder or a ledger file that is there.")
    # Without a write-ahead log nobody has the file open, and without `immutable` reading would create one.
    alone = not path.with_name(path.name + "-wal").exists()
    uri = f"file:{quote(str(path.absolute()))}?mode=ro{'&immutable=1' if alone else ''}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=10)


def ledger_files(path: Path) -> list[Path]:
    """The files there are that belong to a ledger at ``path``, its own and those of an earlier version included."""
    names = [path, _beside(path, "-wal"), _beside(path, "-shm"), head_path(path), _beside(path, ".lock")]
    return [name for name in names if os.path.lexists(name)]


@contextmanager
def _folder_held(path: Path, *, create: bool) -> Iterator[None]:
    """One process at a time makes, completes or migrates a ledger in this folder."""
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise LedgerError(f"{path}: cannot be written ({error}); make its folder writable.") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        os.fsync(descriptor)  # names must outlive a crash
    finally:
        os.close(descriptor)


def _lock(path: Path) -> int:
    """The head of a ledger, open for its one writer."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise LedgerError(
            f"{path}: is gone, and says how many entries the ledger must hold; restore both from one copy."
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise LedgerError(f"{path}: another process writes this ledger; stop it, or use another run folder.") from error
    return descriptor


def _complete_or_create(path: Path, terms: LedgerTerms, *, create: bool) -> None:
    """Make the ledger, whole or not at all, or finish what a crash interrupted. LedgerError where one was lost."""
    left, unfinished = ledger_files(path), _beside(path, ".new")
    if left == [head_path(path)] and unfinished.exists() and noted_head(path) == _empty_head(unfinished):
        unfinished.replace(path)
        return
    if left or not create:
        others = f", although {', '.join(file.name for file in left)} is there" if left else ""
        raise LedgerError(f"{path}: is gone{others}; restore all its files from one copy, or start a new run folder.")
    key = secrets.token_bytes(32)
    _write_unfinished(unfinished, _canonical(asdict(terms)), key, [])
    # The head comes first: a ledger without one is refused, and a head alone says that a ledger was there.
    _write_head(path, _Chain(key).start(_canonical(asdict(terms))))
    unfinished.replace(path)


def _write_unfinished(path: Path, terms: str, key: bytes, entries: Sequence[tuple[str, str]]) -> Head:
    """A whole ledger with these entries (kind and payload) under a name that nobody opens; returns its head."""
    for file in (path, _beside(path, "-wal"), _beside(path, "-shm")):
        file.unlink(missing_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    chain = _Chain(key)
    head = chain.start(terms)
    with closing(_connect(path)) as database:
        database.execute("BEGIN IMMEDIATE")
        database.execute("CREATE TABLE chain (version INTEGER, terms TEXT, key TEXT)")
        database.execute("CREATE TABLE entries (number INTEGER PRIMARY KEY, kind TEXT, payload TEXT, digest TEXT)")
        database.execute("INSERT INTO chain VALUES (?, ?, ?)", (SCHEMA_VERSION, terms, key.hex()))
        for kind, text in entries:
            head = chain.after(head, kind, text)
            database.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", (head.number, kind, text, head.digest))
        database.execute("COMMIT")
    return head


def _empty_head(path: Path) -> Head:
    with closing(open_read_only(path)) as database:
        terms, chain = _read_header(database, path)
    return chain.start(terms)


def _migrate(path: Path) -> None:
    """Bring a ledger of schema 2 to this one, every entry verified; the old file stays under another name.

    Schema 2 had no key, and noted its last outcome in ``.lock``, which must be there: an empty one is that of a ledger
    whose first outcome was never noted.
    """
    note = _lock(_beside(path, ".lock"))
    try:
        text = os.pread(note, _HEAD_BYTES, 0).decode("ascii", "replace")
        noted = _parse_head(_beside(path, ".lock"), text) if text else None
        terms, entries = _unkeyed_entries(path, noted)
        if noted is None and sum(kind != "reserve" for kind, _ in entries) > 1:
            raise LedgerError(f"{_beside(path, '.lock')}: was emptied; restore it and the ledger from one copy.")
        with closing(_connect(path)):
            pass  # brings the write-ahead log, which belongs to the old file alone, into it
        if _beside(path, "-wal").exists():
            raise LedgerError(f"{path}: another process reads this ledger; let it end, then try again.")
        unfinished, kept = _beside(path, ".new"), path.with_suffix(".schema2.sqlite")
        head = _write_unfinished(unfinished, terms, secrets.token_bytes(32), entries)
        kept.unlink(missing_ok=True)
        kept.hardlink_to(path)
        _write_head(path, head)
        unfinished.replace(path)
        _beside(path, ".lock").unlink()
    finally:
        os.close(note)


def _unkeyed_entries(path: Path, noted: Head | None) -> tuple[str, list[tuple[str, str]]]:
    """Terms and verified entries of a ledger of schema 2. LedgerError if one does not verify."""
    with closing(open_read_only(path)) as database:
        database.execute("BEGIN")
        (terms,) = database.execute("SELECT terms FROM chain").fetchone()
        chain = _Chain(None)
        verified = list(_verified_entries(database, path, chain, chain.start(terms)))
    if noted is not None and noted not in [head for head, _, _ in verified]:
        raise LedgerError(
            f"{path}: holds {len(verified)} entries, and not the number {noted.number} that was written; restore it "
            "from a copy."
        )
    return terms, [(kind, text) for _, kind, text in verified]


def _version(path: Path) -> int | None:
    try:
        with closing(open_read_only(path)) as database:
            (version,) = database.execute("SELECT version FROM chain").fetchone() or (None,)
    except sqlite3.Error as error:
        raise LedgerError(f"{path}: cannot be read as a ledger ({error}); restore it from a copy.") from error
    return version if isinstance(version, int) else None


def _abandon(database: sqlite3.Connection) -> None:
    """Leave a connection open until the process ends: closing it would delete a log by name, restored ones included."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(database))


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise LedgerError(f"{path}: is a link or no file; put the ledger itself there.")
    return found.st_dev, found.st_ino


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


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


def _read_header(database: sqlite3.Connection, path: Path) -> tuple[str, _Chain]:
    """The terms, and the chain that starts from them."""
    (version,) = database.execute("SELECT version FROM chain").fetchone() or (None,)
    if version != SCHEMA_VERSION:
        remedy = "use the version that wrote it, or start a new run folder"
        if version == _UNKEYED_VERSION:
            remedy = _BRING_UP
        raise LedgerError(f"{path}: expected ledger schema {SCHEMA_VERSION}, found {version}; {remedy}.")
    terms, key = database.execute("SELECT terms, key FROM chain").fetchone()
    return terms, _Chain(bytes.fromhex(key))


def _verified_entries(
    database: sqlite3.Connection, path: Path, chain: _Chain, head: Head
) -> Iterator[tuple[Head, EntryKind, str]]:
    """Every entry, its digest checked; LedgerError at the first that does not follow from the one before."""
    for number, kind, text, digest in database.execute("SELECT * FROM entries ORDER BY number"):
        head = chain.after(head, kind, text)
        if (number, digest) != (head.number, head.digest):
            raise LedgerError(f"{path}: entry {head.number} was changed or removed; restore the ledger from a copy.")
        yield head, kind, text


def _check_terms(stored: dict[str, Any], terms: LedgerTerms) -> None:
    asked = json.loads(_canonical(asdict(terms)))
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


_HEAD_BYTES = 128


def _head_text(head: Head) -> bytes:
    return f"{head.number:020d} {head.digest}\n".encode()


def _write_head(path: Path, head: Head) -> None:
    def write(unfinished: Path) -> None:
        unfinished.touch(mode=0o600)
        unfinished.write_bytes(_head_text(head))

    write_atomically(head_path(path), write)


def _parse_head(path: Path, text: str) -> Head:
    number, _, digest = text.strip().partition(" ")
    if not number.isdecimal() or len(digest) != 64:
        raise LedgerError(f"{path}: was changed or cut short; restore it and the ledger from one copy.")
    return Head(number=int(number), digest=digest)


def _votes_text(votes_QC: IntArray) -> str:
    """Counts as base64 of little-endian 32-bit integers, query by query."""
    return base64.b64encode(votes_QC.astype("<i4").tobytes()).decode("ascii")


def _votes_from(text: str, num_queries: int) -> IntArray:
    return np.frombuffer(base64.b64decode(text), dtype="<i4").reshape(num_queries, -1).astype(np.int64)


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
