"""The store of a ledger: the chain of entries, the guarantees of every back end, and the back end of SQLite files.

**Chain.** Each entry has a digest over its predecessor's, so that an edited, missing or lost entry is noticed. The
digest is keyed (HMAC-SHA256, with a key stored in the ledger), because entries contain votes: with a plain digest its
reader could confirm a guess about them. The chain starts from the terms of its ledger.

**Guarantees.** Entries are stored in files (:class:`SqliteStore`) or in ``postgresql://HOST/DATABASE#LEDGER``
(:mod:`aggregator.postgres`, with the same methods). Every store guarantees the following, and
``tests/aggregator/test_stores.py`` tests each point on each store:

1. *Durable before visible.* Once ``append`` returns, the entry survives an end of the process, its machine or the
   database server at any instant. If it raises, the entry may be stored or not, and nothing more is accepted.
2. *In order.* Every entry is one transaction and follows its predecessor; none is changed or removed.
3. *One writer.* While a writer is open no other can open, unless it takes over (where the store allows it). From then
   on no write of the deposed writer succeeds, whenever it continues.
4. *Nothing in between.* Between a writer's reading of the store and its first entry, no other process adds an entry.
5. *Whole or not at all.* A ledger that is being created is not visible before it is complete, and a ledger that was
   lost is never created again.
6. *The last entry is noted.* A ledger without the noted entry is refused, and so is one with an edited entry.
7. *Readers do not disturb the writer.* They take no lock and write nothing.

A store notices if entries were removed, but not if an older copy replaced all of it. An *anchor* notes the last entry
in a place that such a copy does not overwrite: in a file on another disk (:class:`FileAnchor`), or in another database.
It is written after the entry is durable and before an answer leaves, and its number never decreases: if a released
answer is missing from a ledger, so is the entry that its anchor notes. If an anchor is missing, cannot be written or
notes another entry of the same number, nothing more is written.

**Files.** SQLite in WAL mode with full synchronisation, and a second file, the *head*, that notes the last entry and is
locked by the one writer. An entry is made durable first, then the head, and an answer leaves when both are durable: so
a write-ahead log that was removed or truncated is noticed. While a ledger is open, its files are checked before and
after every write: if one was removed, replaced or truncated, nothing more is written or answered.
"""

import ctypes
import fcntl
import hashlib
import importlib
import json
import os
import re
import secrets
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias
from urllib.parse import quote

from pydantic_core import from_json

from fairpate.files import give_to_owner, opened, sync, write_atomically
from fairpate.types import UserError

# Increased with every change of entries or of the digest: a ledger of another version is refused, never converted.
# Not with a new kind of entry, which earlier ledgers lack.
SCHEMA_VERSION = 6
_BLOCK_BYTES = 64  # of SHA-256
_DATABASE = ("postgresql://", "postgres://")
EntryKind = Literal["reserve", "commit", "limit", "offsets", "free"]
Row: TypeAlias = tuple[int, EntryKind, str, str]
"""The number, kind, text and digest of an entry, as they are stored."""
Address: TypeAlias = Path | str
"""A place where a ledger or an anchor is stored: a path, or a database URL that ends in #NAME."""

# One spelling per value, because digests are over the text.
canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


class LedgerError(UserError):
    """A ledger cannot be used: it is damaged, cannot be written, has another writer, or was created under other terms.
    Entries that were stored remain in it."""


class DeposedError(LedgerError):
    """Another process took over the ledger. The process that wrote it before must be started again before it can
    write."""


class UnreachableError(LedgerError):
    """The ledger, or the anchor that keeps its last entry's digest elsewhere, cannot be reached or read now; its
    content may be intact."""


class StoreError(OSError):
    """Storing a ledger's entry failed, and it is unknown whether the entry is stored. The message is the reason."""


class Head(NamedTuple):
    """The number and digest of the last entry of a ledger; number 0 means that the ledger has no entry yet."""

    number: int
    digest: str


class Header:
    """The header of a ledger: its terms as text, and the key for the digests of its entries.

    ``key`` has at most 64 bytes; None creates a random one. ``start`` is the :class:`Head` of a ledger without entries:
    number 0, and a digest of the terms.
    """

    def __init__(self, terms: str, key: bytes | None = None) -> None:
        # As long as the digest: RFC 2104, section 3, discourages shorter keys.
        self.terms, self.key = terms, secrets.token_bytes(32) if key is None else key
        assert len(self.key) <= _BLOCK_BYTES
        # HMAC-SHA256 (RFC 2104) with the key hashed once: half of the time that a long ledger takes to open.
        block = self.key.ljust(_BLOCK_BYTES, b"\0")
        self._inner, self._outer = (hashlib.sha256(bytes(b ^ pad for b in block)) for pad in (0x36, 0x5C))
        self.start = Head(0, self.link("", "terms", terms))

    def link(self, previous: str, kind: str, text: str) -> str:
        """Return the digest of an entry from its ``kind`` and ``text``, and from ``previous``, the digest of its
        predecessor."""
        inner, outer = self._inner.copy(), self._outer.copy()
        # Canonical JSON holds no line break, so the parts cannot be shifted into one another.
        inner.update(f"{previous}\n{kind}\n{text}".encode())
        outer.update(inner.digest())
        return outer.hexdigest()


def known_header(name: str, version: Any, terms: Any, key: Any) -> Header:
    """Return the header of the ledger ``name`` from its stored values. LedgerError for another schema version or a
    damaged key."""
    if version != SCHEMA_VERSION:
        what = f"expected ledger schema {SCHEMA_VERSION}, found {version}"
        raise LedgerError(
            f"{name}: {what}; start a new run folder, or use the version of fairpate that wrote the ledger."
        )
    if not isinstance(key, str) or not re.fullmatch(r"[0-9a-f]{64}", key):
        raise LedgerError(
            f"{name}: the ledger's key is damaged (expected 64 hex digits); restore the ledger from a copy."
        )
    return Header(terms, bytes.fromhex(key))


def verified_entries(rows: Iterable[Row], name: str, header: Header, head: Head) -> Iterator[Row]:
    """Verify the entries ``rows`` of the ledger ``name``, and yield them. ``head`` is the number and digest of the
    entry before the first of them.

    LedgerError at the first entry whose number or digest is wrong.
    """
    number, digest = head
    for row in rows:
        # Without a `Head` for each entry, which is a tenth of the time.
        number, digest = number + 1, header.link(digest, row[1], row[2])
        # No comparison in constant time: a process that can write entries can read the key in the same store.
        if row[0] != number or row[3] != digest:
            raise LedgerError(f"{name}: entry {number} was changed or removed; restore the ledger from a copy.")
        yield row


def entry_payload(name: str, number: int, text: str) -> dict[str, Any]:
    """Parse the text of entry ``number`` of the ledger ``name``. LedgerError if it is not JSON."""
    try:
        payload: dict[str, Any] = from_json(text)
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{name}: entry {number} cannot be read; restore the ledger from a copy.") from error
    return payload


def is_database(place: Address) -> bool:
    """Return whether ``place`` is a database URL and not a path. LedgerError if the database driver is not
    installed."""
    if not isinstance(place, str) or not place.startswith(_DATABASE):
        return False
    try:
        importlib.import_module("psycopg")  # imported, not looked up: it may be installed and lack libpq
    except ImportError as error:
        raise LedgerError(
            f"The PostgreSQL driver psycopg is missing ({error}); run `pip install 'fairpate[postgresql]'`."
        ) from error
    return True


def shown(place: Address) -> str:
    """Return ``place``, a path or a URL, as text for messages, without the URL's password."""
    if not isinstance(place, str) or "://" not in place:
        return str(place)
    scheme, _, rest = str(place).partition("://")
    address, hash_, name = rest.rpartition("#") if "#" in rest else (rest, "", "")
    before, _, options = address.partition("?")
    if "@" in options and "/" not in before:
        before = address  # the question mark may be part of a password
    # From the right: a password may hold an @, an address cannot.
    login, at, host = before.rpartition("@")
    user = login.partition("?")[0].partition(":")[0]
    return f"{scheme}://{user}{at}{host.partition('?')[0]}{hash_}{name}"


class Reader(Protocol):
    """Reads the entries of a ledger, wherever it is stored."""

    def rows(self, after: int, most: int) -> Sequence[Row]:
        """Return at most ``most`` entries of the ledger after entry ``after``."""


def rows_after(reader: Reader, number: int = 0) -> Iterator[Row]:
    """Yield the entries of a ledger after entry ``number``; a writer may append others meanwhile."""
    # In pieces, each a transaction of its own: the log of a file could not be written over while one stayed open.
    while found := reader.rows(number, _READ_TOGETHER):
        yield from found
        number = found[-1][0]


MIN_FREE_BYTES = 2**20
"""Free space for the largest transaction: a disk with less counts as full."""
# A short write-ahead log is soon written over; one that grows costs the disk half as much again.
_CHECKPOINT_PAGES = 256
# A head in its file or anchor: always as many bytes, so that it can be written over in place.
_HEAD_TEXT = "{0.number:020d} {0.digest}\n"
# More than a head has, so that a head followed by further bytes is found to be damaged.
_HEAD_BYTES = 128
# A writer holds the lock of an anchor for one write and its sync; one that takes longer hangs.
_LOCK_S = 5.0
_READ_TOGETHER = 4096  # entries: few messages for a database, little memory
_ENTRIES = "SELECT number, kind, payload, digest FROM entries WHERE number > ? ORDER BY number LIMIT ?"


def head_path(path: Path) -> Path:
    """Return the path of the head file, which contains the number and digest of the last entry of the ledger at
    ``path``."""
    return path.with_suffix(".head")


def ledger_files(path: Path) -> list[Path]:
    """Return those files of the ledger at ``path`` that exist."""
    names = [path, Path(f"{path}-wal"), Path(f"{path}-shm"), head_path(path)]
    return [name for name in names if os.path.lexists(name)]


def lock(path: Path) -> int:
    """Open and lock the head file ``path`` of a ledger for its one writer, and return the file descriptor.

    LedgerError if the file is gone, or if another process has locked it.
    """
    try:
        # Not through a link: the head is looked at under this name in this folder later on.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise LedgerError(
            f"{path}: this file, which notes the ledger's last entry, is gone; restore it and the ledger from one copy."
        ) from error
    try:
        # Held by the open file: it ends with its process, so that a crash leaves no stale lock.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise LedgerError(
            f"{path}: another process writes this ledger; stop that process, or use another run folder."
        ) from error
    return descriptor


@contextmanager
def folder_held(path: Path, *, create: bool) -> Iterator[None]:
    """Lock the folder of the ledger ``path`` inside the block, so that only one process at a time creates or completes
    a ledger in it. ``create``: create the folder if it is missing."""
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        # On the folder: the files that are made come and go under this lock.
        descriptor = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise LedgerError(f"{path}: the ledger cannot be written ({error}); make its folder writable.") from error
    try:
        # Waits, unlike the head's lock: work under this one ends by itself.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        os.fsync(descriptor)  # names must outlive a crash
    finally:
        os.close(descriptor)


def noted_head(file: Path, descriptor: int | None = None) -> Head:
    """Return the number and digest of a ledger's last entry, as written in ``file``, which is a head file or an anchor.

    If the caller has opened the file, ``descriptor`` is the open file, and is read. LedgerError if the file is missing
    or damaged, UnreachableError if it cannot be read now.
    """
    try:
        content = file.read_bytes() if descriptor is None else os.pread(descriptor, _HEAD_BYTES, 0)
    except FileNotFoundError as error:
        what = "this file, which notes the ledger's last entry, is gone; restore it and the ledger from one copy."
        raise LedgerError(f"{file}: {what}") from error
    except OSError as error:
        raise UnreachableError(
            f"{file}: this file with the ledger's last entry cannot be read now ({error.strerror}); check its disk."
        ) from error
    # A byte that is not ASCII is damage like any other, not an error of its own.
    number, _, digest = content.decode("ascii", "replace").strip().partition(" ")
    if not number.isdecimal() or len(digest) != 64:
        raise LedgerError(f"{file}: this file was changed or cut short; restore it and its ledger from one copy.")
    return Head(number=int(number), digest=digest)


def _write_head(descriptor: int, head: Head) -> None:
    """Write ``head`` over the open head file or anchor ``descriptor``. StoreError if only a part of it was written."""
    text = _HEAD_TEXT.format(head).encode()
    written = os.pwrite(descriptor, text, 0)
    if written != len(text):  # as on a disk that has just become full, or beyond the limit on a file's size
        raise StoreError(f"only {written} of the {len(text)} bytes that note the last entry were written")


def connect(path: Path) -> sqlite3.Connection:
    """Open a ledger's SQLite file for writing; every commit is on the disk when it returns.

    LedgerError if the file system does not support a write-ahead log.
    """
    # Without isolation level a statement commits by itself: an entry is durable when its INSERT returns. Threads may
    # differ, since writes come one after another.
    database = sqlite3.connect(path, isolation_level=None, timeout=10, check_same_thread=False)
    try:
        (mode,) = database.execute("PRAGMA journal_mode = WAL").fetchone()
        # NORMAL would bring the log to the disk at checkpoints alone: a loss of power would take commits away.
        database.execute("PRAGMA synchronous = FULL")
        database.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        if mode != "wal":
            raise LedgerError(  # noqa: TRY301 - closed below
                f"{path}: its file system does not support a write-ahead log ({mode}); put the ledger on a local disk."
            )
    except BaseException:
        database.close()
        raise
    return database


@contextmanager
def _reading_errors(path: Path) -> Iterator[None]:
    """Inside the block, convert errors of SQLite: to LedgerError if the ledger is damaged, to UnreachableError if it
    may be intact."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # without the extended part
        if code in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_NOTADB):
            raise LedgerError(f"{path}: cannot be read as a ledger ({error}); restore it from a copy.") from error
        raise UnreachableError(f"{path}: the ledger cannot be read now ({error}); check its disk.") from error


def _write_whole(path: Path, header: Header, rows: Sequence[Row]) -> None:
    """Write a ledger with the entries ``rows``, and its head file, to ``path``: both completely, or nothing.

    LedgerError unless each entry's digest follows from its predecessor's.
    """
    head = Head(rows[-1][0], rows[-1][3]) if rows else header.start
    unfinished = Path(f"{path}.new")
    # A log left by a crash must not be replayed into the new file.
    for file in (unfinished, Path(f"{unfinished}-wal"), Path(f"{unfinished}-shm")):
        file.unlink(missing_ok=True)
    # Made here and not by SQLite, which follows the umask and gives its log the rights of this file.
    with opened(unfinished, os.O_RDWR | os.O_CREAT, 0o600) as descriptor:
        give_to_owner(descriptor, path.parent)
    last = header.start
    # Closed before it is renamed: that writes the log back, and the file is whole by itself.
    with closing(connect(unfinished)) as database:
        database.execute("BEGIN IMMEDIATE")
        database.execute("CREATE TABLE chain (version INTEGER, terms TEXT, key TEXT)")
        database.execute("CREATE TABLE entries (number INTEGER PRIMARY KEY, kind TEXT, payload TEXT, digest TEXT)")
        database.execute("INSERT INTO chain VALUES (?, ?, ?)", (SCHEMA_VERSION, header.terms, header.key.hex()))
        for _, kind, text, _ in rows:
            last = Head(last.number + 1, header.link(last.digest, kind, text))
            database.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", (last.number, kind, text, last.digest))
        database.execute("COMMIT")
    if last != head:
        raise LedgerError(
            f"{path}: the digests of the given entries are wrong up to entry {head.number}; nothing was written; give "
            "the entries of an undamaged ledger."
        )
    # The head comes first: a ledger without one is refused, and a head alone shows that a ledger was there.
    write_atomically(head_path(path), lambda file: file.write_bytes(_HEAD_TEXT.format(head).encode()), private=True)
    unfinished.replace(path)


def write_file(place: Address, header: Header, rows: Sequence[Row]) -> None:
    """Write a complete ledger and its head file to ``place``, or nothing. LedgerError if ``place`` already has a file
    of a ledger."""
    path = Path(place)
    with folder_held(path, create=True):
        if left := ledger_files(path):
            raise LedgerError(f"{left[0]}: this file of a ledger exists already; move it away, or give another place.")
        _write_whole(path, header, rows)


class SqliteReader:
    """Reads a ledger in files, while another process may write it. Use it in one thread, and close it at the end.

    ``header`` is read on opening; ``noted`` is the last entry's number and digest in the head file; ``rows`` returns at
    most ``most`` entries after number ``after``; ``close()`` ends the connection. UnreachableError from any method if
    nothing can be read now, LedgerError if there is no ledger.
    """

    def __init__(self, place: Address) -> None:
        path = self._path = Path(place)
        if not path.is_file():
            remedy = "restore it, or give a run folder or a ledger file that exists"
            raise LedgerError(f"{path}: no such ledger; {remedy}.")
        # Without a write-ahead log no process has the file open, and without `immutable` reading would create one.
        alone = not Path(f"{path}-wal").exists()
        uri = f"file:{quote(str(path.absolute()))}?mode=ro{'&immutable=1' if alone else ''}"
        with ExitStack() as unusable:
            terms, key = "", ""
            with _reading_errors(path):
                self._database = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=10)
                self.close = self._database.close
                unusable.callback(self.close)
                (version,) = self._database.execute("SELECT version FROM chain").fetchone() or (None,)
                # Asked only under the known schema: another one may have other columns.
                if version == SCHEMA_VERSION:
                    terms, key = self._database.execute("SELECT terms, key FROM chain").fetchone()
            self.header = known_header(str(path), version, terms, key)
            unusable.pop_all()

    @property
    def noted(self) -> Head:
        return noted_head(head_path(self._path))

    def rows(self, after: int, most: int) -> Sequence[Row]:
        with _reading_errors(self._path):
            return self._database.execute(_ENTRIES, (after, most)).fetchall()


class SqliteStore:
    """One ledger in files, opened by its one writer, which first reads it, then calls :meth:`begin`, then appends
    entries.

    ``reader()`` opens a reader of the entries that earlier writers stored. ``remedy`` is a sentence that says what to
    do when the ledger cannot be written.
    """

    remedy = "Repair its disk, then give the command again."

    def __init__(self, place: Address, terms: str, *, create: bool, take_over: bool) -> None:  # noqa: ARG002 - of databases
        path = self._path = Path(place)
        self.reader = partial(SqliteReader, path)
        self._database: sqlite3.Connection | None = None
        # The files of the open ledger at the last look; by lstat, so that a link in its place is seen as another file.
        self._seen: dict[Path, os.stat_result] = {}
        with folder_held(path, create=create):
            if not os.path.lexists(path):
                left, unfinished = ledger_files(path), Path(f"{path}.new")
                is_whole = left == [head_path(path)] and unfinished.exists()
                # A crash fell between head and rename: the head proves that the unfinished file belongs to it.
                if is_whole:
                    with closing(SqliteReader(unfinished)) as reader:
                        is_whole = noted_head(head_path(path)) == reader.header.start
                if is_whole:
                    unfinished.replace(path)
                elif left or not create:
                    others = f", although {', '.join(file.name for file in left)} is there" if left else ""
                    remedy = "restore all its files from one copy, or start a new run folder"
                    raise LedgerError(f"{path}: the ledger is gone{others}; {remedy}.")
                else:
                    _write_whole(path, Header(terms), [])
            self._found = path.lstat()
            if not stat.S_ISREG(self._found.st_mode):
                raise LedgerError(
                    f"{path}: expected a ledger's file, found a link or a folder; put the file itself there."
                )
            self.reader().close()  # a ledger of another schema is refused as such, also where its head is gone
        # Locked before it is read: no other writer moves the head in between.
        self._head_file: int | None = lock(head_path(path))

    def begin(self, head: Head) -> None:
        """Open the ledger for writing after ``head``, the last entry that was verified. LedgerError if the last stored
        entry is another one."""
        assert self._head_file is not None
        self._database = connect(self._path)
        # The writer must have opened what was verified, not what was put in its place since.
        last = self._database.execute("SELECT number, digest FROM entries ORDER BY number DESC LIMIT 1").fetchone()
        is_same = os.path.samestat(self._path.lstat(), self._found)
        if not is_same or (last is not None and Head(*last) != head):
            raise LedgerError(
                f"{self._path}: the ledger was replaced while it was being opened; give the command again."
            )
        head_file = head_path(self._path)
        files = (self._path, Path(f"{self._path}-wal"), Path(f"{self._path}-shm"), head_file)
        seen = {file: file.lstat() for file in files}
        # The lock is on the file that was opened; its name must still lead there, or it excludes no writer.
        if not os.path.samestat(seen[head_file], os.fstat(self._head_file)):
            raise LedgerError(
                f"{head_file}: this file was replaced while its ledger was being opened; give the command again."
            )
        self._seen = seen
        if noted_head(head_file) != head:  # a crash came between an entry and its note; what it stored may leave now
            _write_head(self._head_file, head)
            os.fdatasync(self._head_file)

    def append(self, kind: EntryKind, text: str, head: Head) -> None:
        """Store the entry with number and digest ``head`` in one transaction. StoreError or sqlite3.Error if that
        fails."""
        assert self._database is not None
        assert self._head_file is not None
        # The entry first: a head whose entry is missing would make a sound ledger refuse to open.
        self._database.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", (head.number, kind, text, head.digest))
        _write_head(self._head_file, head)
        # What leaves next must not outlive a loss of power that its head does not. Nothing leaves after a reservation,
        # so it does not wait for the disk: a head that is behind still names one of the entries.
        if kind != "reserve":
            # The data alone is enough: the head is written over in its own length.
            os.fdatasync(self._head_file)

    def fault(self) -> str | None:
        """Return why this ledger can no longer be written, as far as this process can see; None if it can."""
        # SQLite writes into a file that was unlinked without an error.
        for path, before in self._seen.items():
            try:
                now = path.lstat()
            except OSError as error:
                return f"{path.name} cannot be found ({error.strerror}); stop, and restore all its files from one copy"
            # None of the files ever shrinks: the log is written over in place.
            is_same = os.path.samestat(now, before)
            if not is_same or now.st_size < before.st_size:
                change = "cut short" if is_same else "replaced"
                return f"{path.name} was {change}; stop, and restore all its files from one copy"
            self._seen[path] = now
        return None

    def look(self) -> None:
        """Raise LedgerError unless the ledger's files exist and are those that this process opened. This may block if
        the disk hangs."""
        if (fault := self.fault()) is not None:
            raise LedgerError(f"{self._path}: {fault}.")

    def has_room(self) -> bool:
        """Return whether the ledger's disk is present and writable and has free space for a transaction."""
        try:
            disk = os.statvfs(self._path.parent)
        except OSError:
            return False
        return not disk.f_flag & os.ST_RDONLY and disk.f_bavail * disk.f_frsize >= MIN_FREE_BYTES

    def require_writable(self) -> None:
        """Raise LedgerError unless a file as large as the largest transaction can be written durably to the ledger's
        folder."""
        folder = self._path.parent
        trial = folder / ".write-test"
        try:
            with trial.open("wb") as file:
                file.write(bytes(MIN_FREE_BYTES))
                file.flush()
                # A full disk may report it only when the data are flushed.
                os.fsync(file.fileno())
        except OSError as error:
            raise LedgerError(
                f"{folder}: the ledger's folder still cannot be written ({error}); free space on its disk or repair it."
            ) from error
        finally:
            with suppress(OSError):
                trial.unlink()

    def close(self) -> None:
        """Release the ledger's files, lock and connection; safe to call twice."""
        if self._database is not None:
            # Closing removes the log by name, and names of files that were replaced may be another ledger's.
            if self._seen and self.fault() is None:
                self._database.close()
            else:
                # Left open until the process ends: closing would delete a log by name, a restored one included.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._database))
            self._database = None
        # The lock goes last: closing the database may still write the log back.
        if self._head_file is not None:
            os.close(self._head_file)
            self._head_file = None


@dataclass(frozen=True)
class FileAnchor:
    """An anchor in a file: the number and digest of a ledger's last entry, stored apart from the ledger. If the ledger
    is replaced by an older copy, the copy lacks this entry, and cannot overwrite the anchor."""

    path: Address

    def make(self, head: Head) -> None:
        """Create the anchor's file with ``head``, the ledger's last entry. LedgerError if the file exists already or
        cannot be created."""
        try:
            # Never over another one, which may hold another ledger to its last entry.
            with opened(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600) as descriptor:
                try:
                    give_to_owner(descriptor, Path(self.path).parent)
                    _write_head(descriptor, head)
                    os.fsync(descriptor)
                except BaseException:
                    Path(self.path).unlink()  # an anchor without an entry would refuse its ledger and the next attempt
                    raise
            # The name as well: an anchor that a loss of power takes away refuses its ledger.
            sync(Path(self.path).parent)
        except OSError as error:
            raise LedgerError(f"{self.path}: the anchor cannot be created ({error}); give another place.") from error

    def noted(self) -> Head:
        """Return the ledger's last entry as the anchor has it. LedgerError if the anchor is missing or damaged.

        The file is opened for reading alone and not locked: a reader needs no right to write, and no writer waits.
        """
        try:
            with opened(self.path, os.O_RDONLY | os.O_NOFOLLOW) as descriptor:
                noted = noted_head(Path(self.path), descriptor)
                # A writer overwrites it in place: what is read twice is not half of one head and half of the next.
                while (again := noted_head(Path(self.path), descriptor)) != noted:
                    noted = again
                return noted
        except FileNotFoundError as error:
            raise LedgerError(
                f"{self.path}: the ledger's anchor is gone; restore this file, which notes the last entry."
            ) from error
        except OSError as error:
            what = f"the ledger's anchor cannot be read ({error.strerror})"
            raise UnreachableError(
                f"{self.path}: {what}; restore access to this file, which notes the last entry."
            ) from error

    def look(self) -> None:
        """Raise LedgerError if the anchor is missing or damaged."""
        self.noted()

    def note(self, head: Head) -> None:
        """Write ``head``, the ledger's new last entry, to the anchor durably.

        StoreError if that fails, or if the anchor has a later entry or another entry with this number.
        """
        # Opened anew each time: one that was removed or replaced must not be written on unseen.
        with opened(self.path, os.O_RDWR | os.O_NOFOLLOW) as descriptor:
            # Asked again and again, since flock waits without a limit and a paused writer would hold up its successor.
            deadline_s = time.monotonic() + _LOCK_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline_s:
                        raise StoreError(
                            f"{self.path}: a process that hangs has locked this anchor; end that process"
                        ) from error
                    time.sleep(0.01)
            try:
                noted = noted_head(Path(self.path), descriptor)
            except LedgerError as error:
                raise StoreError(str(error)) from error
            if noted.number > head.number or (noted.number == head.number and noted != head):
                raise StoreError(
                    f"{self.path}: another writer noted entry {noted.number} in this anchor, while this one writes "
                    f"entry {head.number}; stop one of the two"
                )
            # In place, not by a rename: a lock on a file that was renamed over excludes no writer.
            _write_head(descriptor, head)
            os.fdatasync(descriptor)

    def close(self) -> None:
        """Do nothing: an anchor keeps no file open."""
