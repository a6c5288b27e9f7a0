"""The durable chain under a ledger: files and locks, hashed entries, the interface of stores, anchors elsewhere.

The files of a ledger: their names, who may open them, and whether they are still the ones that were opened.

Beside the database and SQLite's own two files there is the head, which its one writer holds locked. Making, completing
and migrating a ledger is done under a lock on its folder. While a ledger is open its files are looked at
before and after every write: if one was removed, replaced or cut short, nothing more is written or answered.

Not known here: what the files hold.

Entries in a chain: each with a digest over its predecessor's, so that an edit, a gap or a lost end is noticed.

The digest is keyed (HMAC-SHA256, the key lies in the ledger), because entries hold votes and a plain digest would
confirm a guess about them to its reader. The chain starts from the terms of its ledger. The number and digest of the
last entry also stand in a second file, the head.

Not known here: what entries mean.

Where the entries of a ledger lie: what every back end keeps, and which one a place means.

A ledger knows no difference between back ends but their names in messages. Each of them keeps these, and
``tests/aggregator/test_stores.py`` tries each of these on each of them:

1. *Durable before visible.* What :meth:`Store.append` took is there after the process, its machine or the database
   server ended at any instant. Where it raises, the entry may be there or not, and nothing more is taken.
2. *In order.* Every entry is one transaction and follows the one before; none is changed or removed.
3. *One writer.* Where one is open no other opens, unless it takes over (a back end may not be able to): then no write
   of the one before succeeds from that moment on, whenever it continues.
4. *Nothing in between.* What is read when a writer opens is all that there is until its own first entry.
5. *Whole or not at all.* A ledger that is being made is not there before it is complete, and one that was lost is never
   made again.
6. *The last entry is noted.* A ledger that lacks it is refused, and so is an entry that was edited.
7. *Readers disturb nobody.* They take no lock and write nothing.

A place is the path of a SQLite file (:mod:`aggregator.sqlite`), or ``postgresql://HOST/DATABASE#LEDGER``
(:mod:`aggregator.postgres`).

Where the last entry of a ledger is noted besides: elsewhere, so that a ledger that was rolled back is refused.

A store notices what was taken from it, and not an older copy of the whole of itself. An anchor lies where such a copy
does not reach: a file on another disk, or another database. It holds the number and digest of an entry, which tell
nothing without the ledger's key. It is written after the entry is durable and before anything leaves, and it never goes
back: so a ledger that lacks an answer that left lacks what its anchor notes. An anchor that is missing, cannot be
written or names another entry of the same number ends the writing.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib
import json
import os
import secrets
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias
from urllib.parse import quote

from pydantic_core import from_json

from fairpate.files import sync, write_atomically
from fairpate.types import UserError

# A short write-ahead log is soon written over; one that grows costs the disk half as much again.
_CHECKPOINT_PAGES = 256


class LedgerError(UserError):
    """The ledger cannot be trusted, written or shared, or was made for something else; what was committed stays."""


class UnreachableError(LedgerError):
    """The ledger, or what notes its last entry, cannot be reached or read now. Nothing follows for what it holds."""


def reading_failed(path: Path, error: sqlite3.Error) -> LedgerError:
    """What an error of SQLite says of the ledger at ``path``: that it is damaged, or that it cannot be read now."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # without the extended part
    if code in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_NOTADB):
        return LedgerError(f"{path}: cannot be read as a ledger ({error}); restore it from a copy.")
    return UnreachableError(f"{path}: cannot be read now ({error}); look at its disk.")


class OpenFiles:
    """The files of an open ledger; none may be removed, replaced or cut short under its writer."""

    def __init__(self, path: Path, head_file: int) -> None:
        self._paths = (path, beside(path, "-wal"), beside(path, "-shm"), head_path(path))
        self._seen = tuple(self._look(file) for file in self._paths)
        # The lock is on the file that was opened; its name must still lead there, or it keeps nobody out.
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
        # By lstat, so that a link in its place is seen as another file.
        return found.st_dev, found.st_ino, found.st_size


def head_path(path: Path) -> Path:
    """The file that holds the number and digest of the last entry of the ledger at ``path``."""
    return path.with_suffix(".head")


def beside(path: Path, ending: str) -> Path:
    """The file whose name is that of ``path`` and an ending."""
    return path.with_name(path.name + ending)


def ledger_files(path: Path) -> list[Path]:
    """The files there are that belong to a ledger at ``path``, its own and those of an earlier version included."""
    names = [path, beside(path, "-wal"), beside(path, "-shm"), head_path(path), beside(path, ".lock")]
    return [name for name in names if os.path.lexists(name)]


def open_read_only(path: Path) -> sqlite3.Connection:
    """A connection that leaves the folder as it is. LedgerError if there is no such file."""
    if not path.is_file():
        raise LedgerError(f"{path}: no such ledger; restore it, or give a run folder or a ledger file that is there.")
    # Without a write-ahead log nobody has the file open, and without `immutable` reading would create one.
    alone = not path.with_name(path.name + "-wal").exists()
    uri = f"file:{quote(str(path.absolute()))}?mode=ro{'&immutable=1' if alone else ''}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=10)


def connect(path: Path) -> sqlite3.Connection:
    """A connection for a writer: what it commits is on the disk. LedgerError where the file system cannot do that."""
    # Without isolation level a statement commits by itself: an entry is durable when its INSERT returns. Threads may
    # differ, since writes come one after another.
    database = sqlite3.connect(path, isolation_level=None, timeout=10, check_same_thread=False)
    try:
        (mode,) = database.execute("PRAGMA journal_mode = WAL").fetchone()
        # NORMAL would bring the log to the disk at checkpoints alone: a loss of power would take commits away.
        database.execute("PRAGMA synchronous = FULL")
        database.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    except BaseException:
        database.close()
        raise
    if mode != "wal":
        database.close()
        raise LedgerError(f"{path}: this file system gives no write-ahead log ({mode}); use a local disk.")
    return database


def abandon(database: sqlite3.Connection) -> None:
    """Leave a connection open until the process ends: closing it would delete a log by name, restored ones included."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(database))


def identity(path: Path) -> tuple[int, int]:
    """Which file this is, by any name. LedgerError for a link or what is no file."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise LedgerError(f"{path}: is a link or no file; put the ledger itself there.")
    return found.st_dev, found.st_ino


@contextmanager
def folder_held(path: Path, *, create: bool) -> Iterator[None]:
    """One process at a time makes, completes or migrates a ledger in this folder."""
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        # On the folder: the files that are made, or brought to another schema, come and go under this lock.
        descriptor = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise LedgerError(f"{path}: cannot be written ({error}); make its folder writable.") from error
    try:
        # Waits, as the head's lock does not: what is done under this one ends by itself.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        os.fsync(descriptor)  # names must outlive a crash
    finally:
        os.close(descriptor)


def lock(path: Path) -> int:
    """The head of a ledger, open for its one writer. LedgerError if it is gone, or another process holds it."""
    try:
        # No link: the head is looked at under this name in this folder later on.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise LedgerError(
            f"{path}: is gone, and says how many entries the ledger must hold; restore both from one copy."
        ) from error
    try:
        # Held by the open file: it ends with its process, so that a crash leaves no stale lock.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise LedgerError(f"{path}: another process writes this ledger; stop it, or use another run folder.") from error
    return descriptor


SCHEMA_VERSION = 5
NAMELESS_VERSION, ONE_MECHANISM_VERSION, UNKEYED_VERSION = 4, 3, 2
"""Of earlier versions: whose charges name nobody, whose terms are spelt otherwise too, and whose chain has no key."""
_GO_ON_AS_THEY_ARE = (SCHEMA_VERSION, NAMELESS_VERSION, ONE_MECHANISM_VERSION)
# More than a head has, so that one with something behind it does not pass for a whole one.
HEAD_BYTES = 128
_BLOCK_BYTES = 64  # of SHA-256
_BRING_UP = "repeat `fairpate run` or `fairpate serve` on its run folder, which brings it to this version"
EntryKind = Literal["reserve", "commit", "publish", "limit"]
Row: TypeAlias = tuple[int, EntryKind, str, str]
"""Number, kind, text and digest of an entry, as they are stored."""

# One spelling per value, because digests are over the text.
canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def entry_text(payload: Mapping[str, Any]) -> str:
    """An entry as it is stored. ValueError for text that no reader would take: half of a pair of UTF-16."""
    text = canonical(payload)
    if "\\ud" in text:  # few hold any such escape
        from_json(text)
    return text


def entry_payload(name: str, number: int, text: str) -> dict[str, Any]:
    """What the text of an entry of the ledger ``name`` holds. LedgerError where it cannot be read."""
    try:
        payload: dict[str, Any] = _parsed(text)
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{name}: entry {number} cannot be read; restore the ledger from a copy.") from error
    return payload


def _parsed(text: str) -> Any:
    try:
        return from_json(text)
    except ValueError:
        # Earlier versions stored a caller's name with bytes that were no text; a question mark stands for each.
        return from_json(json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "replace"))


class Head(NamedTuple):
    """The last entry of a chain: its number (0: none yet) and its digest."""

    number: int
    digest: str


@dataclass(frozen=True)
class Chain:
    """Digests of entries, keyed unless ``key`` is None, as they were before schema 3."""

    key: bytes | None

    def start(self, terms: str) -> Head:
        """The head of the chain without entries."""
        return Head(number=0, digest=self.link("", "terms", terms))

    def after(self, head: Head, kind: str, text: str) -> Head:
        """The head once this entry follows."""
        return Head(number=head.number + 1, digest=self.link(head.digest, kind, text))

    def link(self, previous: str, kind: str, text: str) -> str:
        """The digest of an entry after one with the digest ``previous``."""
        # Canonical JSON holds no line break, so the parts cannot be shifted into one another.
        message = f"{previous}\n{kind}\n{text}".encode()
        if self.key is None:
            return hashlib.sha256(message).hexdigest()
        # HMAC-SHA256 (RFC 2104) with the key taken in once: half of the time that a long ledger takes to open.
        inner, outer = self._keyed
        inner, outer = inner.copy(), outer.copy()
        inner.update(message)
        outer.update(inner.digest())
        return outer.hexdigest()

    @cached_property
    def _keyed(self) -> tuple[hashlib._Hash, hashlib._Hash]:
        assert self.key is not None
        assert len(self.key) <= _BLOCK_BYTES
        block = self.key.ljust(_BLOCK_BYTES, b"\0")
        return hashlib.sha256(bytes(b ^ 0x36 for b in block)), hashlib.sha256(bytes(b ^ 0x5C for b in block))


class Header(NamedTuple):
    """What a ledger begins with: its schema, its terms as text, and the chain that starts from them."""

    version: int
    terms: str
    chain: Chain


def read_header(database: sqlite3.Connection, path: Path) -> Header:
    """Errors as :func:`known_header`."""
    (version,) = database.execute("SELECT version FROM chain").fetchone() or (None,)
    terms, key = "", ""
    # Asked for only where it is known to be: schema 2 has no column for the key.
    if version in _GO_ON_AS_THEY_ARE:
        terms, key = database.execute("SELECT terms, key FROM chain").fetchone()
    return known_header(str(path), version, terms, key)


def known_header(name: str, version: int | None, terms: str, key: str) -> Header:
    """LedgerError for a schema that has to be brought to this version first, or is unknown."""
    if version not in _GO_ON_AS_THEY_ARE:
        remedy = "use the version that wrote it, or start a new run folder"
        if version == UNKEYED_VERSION:
            remedy = _BRING_UP
        raise LedgerError(f"{name}: expected ledger schema {SCHEMA_VERSION}, found {version}; {remedy}.")
    return Header(version=version, terms=terms, chain=Chain(bytes.fromhex(key)))


def verified_entries(rows: Iterable[Row], name: str, chain: Chain, head: Head) -> Iterator[Row]:
    """Every entry, its digest checked; LedgerError at the first that does not follow from the one before."""
    number, digest = head
    for row in rows:
        number, digest = number + 1, chain.link(digest, row[1], row[2])
        # No comparison in constant time: who can write entries reads the key, which lies beside them.
        if row[0] != number or row[3] != digest:
            raise LedgerError(f"{name}: entry {number} was changed or removed; restore the ledger from a copy.")
        yield row


def head_text(head: Head) -> bytes:
    """What the head's file holds: always as many bytes, so that it is written over in place."""
    return f"{head.number:020d} {head.digest}\n".encode()


def write_head(path: Path, head: Head) -> None:
    """Put the head beside a new ledger at ``path``, whole or not at all."""
    write_atomically(head_path(path), lambda unfinished: unfinished.write_bytes(head_text(head)), private=True)


def parse_head(path: Path, text: str) -> Head:
    """The head in the text of the file ``path``. LedgerError where it is damaged."""
    number, _, digest = text.strip().partition(" ")
    if not number.isdecimal() or len(digest) != 64:
        raise LedgerError(f"{path}: was changed or cut short; restore it and the ledger from one copy.")
    return Head(number=int(number), digest=digest)


def noted_head(path: Path) -> Head:
    """The last entry that the writer of ``path`` noted beside it. LedgerError if the file is missing or damaged."""
    try:
        # A byte that is no text is damage like any other, not an error of its own.
        text = head_path(path).read_text("ascii", "replace")
    except FileNotFoundError as error:
        if beside(path, ".lock").exists():
            raise LedgerError(f"{path}: was written by an earlier version; {_BRING_UP}.") from error
        raise LedgerError(
            f"{head_path(path)}: cannot be read ({error.strerror}), and says how many entries {path.name} must hold; "
            "restore both from one copy."
        ) from error
    except OSError as error:
        raise UnreachableError(
            f"{head_path(path)}: cannot be read now ({error.strerror}); look at its disk."
        ) from error
    return parse_head(head_path(path), text)


def schema_version(path: Path) -> int | None:
    """The schema of a ledger. LedgerError for a file that is none."""
    try:
        with closing(open_read_only(path)) as database:
            (version,) = database.execute("SELECT version FROM chain").fetchone() or (None,)
    except sqlite3.Error as error:
        raise reading_failed(path, error) from error
    return version if isinstance(version, int) else None


def complete_or_create(path: Path, terms: str, *, create: bool) -> None:
    """Make the ledger, whole or not at all, or finish what a crash interrupted. LedgerError where one was lost."""
    left, unfinished = ledger_files(path), beside(path, ".new")
    # A crash fell between head and rename: the head proves that the unfinished file is the one it belongs to.
    if left == [head_path(path)] and unfinished.exists() and noted_head(path) == _empty_head(unfinished):
        unfinished.replace(path)
        return
    if left or not create:
        others = f", although {', '.join(file.name for file in left)} is there" if left else ""
        raise LedgerError(f"{path}: is gone{others}; restore all its files from one copy, or start a new run folder.")
    # As long as the digest: RFC 2104, section 3, discourages shorter keys.
    key = secrets.token_bytes(32)
    write_unfinished(unfinished, terms, key, [])
    # The head comes first: a ledger without one is refused, and a head alone says that a ledger was there.
    write_head(path, Chain(key).start(terms))
    unfinished.replace(path)


def write_unfinished(
    path: Path, terms: str, key: bytes, entries: Iterable[tuple[str, str]], *, version: int = SCHEMA_VERSION
) -> Head:
    """A whole ledger with these entries (kind and payload) under a name that nobody opens; returns its head."""
    # A log left by a crash must not be replayed into the new file.
    for file in (path, beside(path, "-wal"), beside(path, "-shm")):
        file.unlink(missing_ok=True)
    # Made here and not by SQLite, which follows the umask and gives its log the rights of this file.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    chain = Chain(key)
    head = chain.start(terms)
    # Closed before it is renamed: that writes the log back, and the file is whole by itself.
    with closing(connect(path)) as database:
        database.execute("BEGIN IMMEDIATE")
        database.execute("CREATE TABLE chain (version INTEGER, terms TEXT, key TEXT)")
        database.execute("CREATE TABLE entries (number INTEGER PRIMARY KEY, kind TEXT, payload TEXT, digest TEXT)")
        database.execute("INSERT INTO chain VALUES (?, ?, ?)", (version, terms, key.hex()))
        for kind, text in entries:
            head = chain.after(head, kind, text)
            database.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", (head.number, kind, text, head.digest))
        database.execute("COMMIT")
    return head


def _empty_head(path: Path) -> Head:
    with closing(open_read_only(path)) as database:
        header = read_header(database, path)
    return header.chain.start(header.terms)


Place: TypeAlias = Path | str
_DATABASE = ("postgresql://", "postgres://")


class StoreError(OSError):
    """An entry could not be stored; it may be there or not. The message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What a store holds now: the header, entries that must be among the rows, and the rows in order."""

    header: Header
    noted: tuple[Head, ...]
    rows: Iterable[Row]


class Store(Protocol):
    """A ledger that is open for its one writer. Made by :func:`open_store`; it writes from :meth:`begin` on."""

    @property
    def remedy(self) -> str:
        """What helps where it cannot be written, as a sentence."""
        ...

    def read(self) -> AbstractContextManager[Stored]:
        """What the last writer left."""
        ...

    def begin(self, head: Head) -> None:
        """Begin to write after ``head``, which is the last entry that was read. LedgerError if it is not."""
        ...

    def append(self, kind: EntryKind, text: str, head: Head) -> None:
        """Store the entry that ``head`` names. StoreError or sqlite3.Error where that fails."""
        ...

    def fault(self) -> str | None:
        """Why nothing can be written any more, as far as is seen from here; None: no reason."""
        ...

    def look(self) -> None:
        """LedgerError unless the store is there and this is its writer, asked on a connection of its own; may hang."""
        ...

    def was_deposed(self) -> bool:
        """Whether another process is the writer now. LedgerError if that cannot be asked."""
        ...

    def has_room(self) -> bool:
        """Whether there is room for a transaction, as far as is seen from here."""
        ...

    def require_writable(self) -> None:
        """LedgerError unless a writer that failed can be opened again, as far as is seen from here."""
        ...

    def close(self) -> None:
        """Let go of everything; safe to call twice."""
        ...


class Reader(Protocol):
    """A ledger that another connection writes, read piece by piece; for one thread. Made by :func:`open_reader`.

    All of it raises UnreachableError where nothing can be read now, and LedgerError where there is no such ledger.
    """

    def header(self) -> Header:
        """What the ledger begins with."""
        ...

    def rows(self, after: int, most: int) -> Sequence[Row]:
        """The entries after number ``after``, in order, ``most`` at most."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


def open_reader(place: Place) -> Reader:
    """Open the ledger at ``place`` for reading while any process may write to it. Errors as :class:`Reader`."""
    if is_database(place):
        from aggregator.postgres import DatabaseReader

        return DatabaseReader(str(place))
    from aggregator.sqlite import SqliteReader

    return SqliteReader(Path(place))


def open_store(place: Place, terms: str, *, create: bool, take_over: bool) -> Store:
    """The ledger at ``place`` for its one writer; with ``create`` it is made under ``terms`` where there is none.

    LedgerError where it was lost, or another writes it. ``take_over`` ends the other, where the back end can.
    """
    if is_database(place):
        from aggregator.postgres import PostgresStore

        return PostgresStore(str(place), terms, create=create, take_over=take_over)
    from aggregator.sqlite import SqliteStore

    return SqliteStore(Path(place), terms, create=create)


@contextmanager
def reading(place: Place, *, after: int = 0) -> Iterator[Stored]:
    """What a ledger holds after entry number ``after``, whatever a writer appends meanwhile; nothing is written.

    LedgerError where there is none.
    """
    if is_database(place):
        from aggregator.postgres import read_database

        with read_database(str(place), after=after) as stored:
            yield stored
    else:
        from aggregator.sqlite import read_file

        with read_file(Path(place), after=after) as stored:
            yield stored


def write_store(place: Place, header: Header, rows: Sequence[Row]) -> None:
    """Put a whole ledger at ``place``, or nothing. LedgerError where one is."""
    last = Head(rows[-1][0], rows[-1][3]) if rows else header.chain.start(header.terms)
    if is_database(place):
        from aggregator.postgres import write_database

        write_database(str(place), header, rows, last)
    else:
        from aggregator.sqlite import write_file

        write_file(Path(place), header, rows, last)


def is_database(place: Place) -> bool:
    """Whether ``place`` is a ledger in a database. LedgerError where nothing could speak to one."""
    if not isinstance(place, str) or not place.startswith(_DATABASE):
        return False
    try:  # it may be there and lack libpq
        importlib.import_module("psycopg")
    except ImportError as error:
        raise LedgerError(
            f"A ledger in a database needs psycopg ({error}); run `pip install 'fairpate[postgresql]'`."
        ) from error
    return True


def shown(place: Place) -> str:
    """A place as messages name it: without a password."""
    if not isinstance(place, str) or "://" not in place:
        return str(place)
    scheme, _, rest = str(place).partition("://")
    address, hash_, name = rest.rpartition("#") if "#" in rest else (rest, "", "")
    before, _, options = address.partition("?")
    if "@" in options and "/" not in before:
        before = address  # the question mark may be one of a password
    login, at, host = before.rpartition("@")
    user = login.partition("?")[0].partition(":")[0]
    return f"{scheme}://{user}{at}{host.partition('?')[0]}{hash_}{name}"


_LOCK_S = 5.0


class Anchor(Protocol):
    """One noted entry."""

    def make(self, head: Head) -> None:
        """Note ``head`` where nothing was noted. LedgerError where something was, or nothing can be."""
        ...

    def noted(self) -> Head:
        """The entry that was noted last. LedgerError if none is to be found."""
        ...

    def look(self) -> None:
        """LedgerError as :meth:`noted`, without a lock that a writer would wait for."""
        ...

    def note(self, head: Head) -> None:
        """Note ``head`` durably, unless a later one is. StoreError where that fails, or for another ledger's entry."""
        ...

    def close(self) -> None:
        """Let go of everything; safe to call twice."""
        ...


def open_anchor(place: Place) -> Anchor:
    """The anchor at ``place``: a file, or a name in a database, as for ledgers. Nothing is looked at yet."""
    if is_database(place):
        from aggregator.postgres import DatabaseAnchor

        return DatabaseAnchor(str(place))
    return FileAnchor(Path(place))


def noted_at(place: Place | None) -> tuple[Head, ...]:
    """The entry that an anchor notes; none without one. LedgerError as :meth:`Anchor.noted`."""
    if place is None:
        return ()
    with closing(open_anchor(place)) as anchor:
        return (anchor.noted(),)


def require_follows(place: Place, noted: Head, head: Head) -> None:
    """StoreError if another writer went on beyond ``head``, or noted another entry in its place."""
    if noted.number > head.number or (noted.number == head.number and noted != head):
        raise StoreError(f"{shown(place)}: another writer noted entry {noted.number}, and this one is at {head.number}")


class FileAnchor:
    """An anchor in a file of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def make(self, head: Head) -> None:
        """Put a new file there."""
        try:
            # Never over another one, which may hold another ledger to its last entry.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                os.write(descriptor, head_text(head))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            # The name as well: an anchor that a loss of power takes away refuses its ledger.
            sync(self._path.parent)
        except OSError as error:
            raise LedgerError(f"{self._path}: no anchor can be made there ({error}); give another place.") from error

    def noted(self) -> Head:
        """What the file holds."""
        return self._noted(self._held())

    def look(self) -> None:
        """Read the file without its lock."""
        self._noted(self._opened())

    def _noted(self, opened: AbstractContextManager[int]) -> Head:
        try:
            with opened as descriptor:
                return self._read(descriptor)
        except StoreError as error:
            raise LedgerError(str(error)) from error
        except OSError as error:
            raise UnreachableError(
                f"{self._path}: the ledger's anchor cannot be read ({error.strerror}), and says which entry the ledger "
                "must hold; bring it back."
            ) from error

    def note(self, head: Head) -> None:
        """Write the file over in place, under a lock."""
        with self._held() as descriptor:
            require_follows(self._path, self._read(descriptor), head)
            # In place, not by a rename: a lock on a file that was renamed over keeps nobody out.
            os.pwrite(descriptor, head_text(head), 0)
            os.fdatasync(descriptor)

    def close(self) -> None:
        """Nothing stays open."""

    @contextmanager
    def _opened(self) -> Iterator[int]:
        # Opened anew each time: one that was removed or replaced must not be written on unseen.
        descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _held(self) -> Iterator[int]:
        with self._opened() as descriptor:
            self._lock(descriptor)
            yield descriptor

    def _lock(self, descriptor: int) -> None:
        """Held for a moment by the writer that notes: one that is paused in it holds its successor up for ever."""
        # Asked again and again, since flock itself waits without a limit.
        deadline_s = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline_s:
                    raise StoreError(f"{self._path}: the anchor is held by a process that hangs; end it") from error
                time.sleep(0.01)
            else:
                return

    def _read(self, descriptor: int) -> Head:
        try:
            return parse_head(self._path, os.pread(descriptor, HEAD_BYTES, 0).decode("ascii", "replace"))
        except LedgerError as error:
            raise StoreError(str(error)) from error
