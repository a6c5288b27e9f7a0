"""A ledger in an SQLite file.

Ledgers of earlier versions: what their terms mean today, and how their entries are taken over.

Schema 2 had digests without a key, and noted its last outcome in ``.lock``; it is written anew, entry by entry, and the
old file stays. Schema 3 knew one mechanism and stored its parameters alone, and until schema 4 charges named nobody;
such a ledger goes on as it is, and only the reading differs.

A ledger in a SQLite file: WAL mode with full synchronisation, and the last entry noted in a second file, the head.

The one writer holds a lock on the head. An entry is durable first, the head after it, and an answer leaves when both
are: so a write-ahead log that was removed or cut short is noticed. Files that are changed while they are open end the
writing (:mod:`aggregator.chain`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from aggregator.chain import (
    HEAD_BYTES,
    ONE_MECHANISM_VERSION,
    UNKEYED_VERSION,
    Chain,
    EntryKind,
    Head,
    Header,
    LedgerError,
    OpenFiles,
    Row,
    Stored,
    abandon,
    beside,
    canonical,
    complete_or_create,
    connect,
    folder_held,
    head_path,
    head_text,
    identity,
    ledger_files,
    lock,
    noted_head,
    open_read_only,
    parse_head,
    read_header,
    reading_failed,
    schema_version,
    verified_entries,
    write_head,
    write_unfinished,
)
from aggregator.mechanism import ConfidentGnmax


def current_terms(header: Header) -> dict[str, Any]:
    """The terms that a ledger began with, as they are spelt today."""
    terms: dict[str, Any] = json.loads(header.terms)
    if header.version <= ONE_MECHANISM_VERSION:
        terms["mechanism"] = {"name": ConfidentGnmax.name, "parameters": terms["mechanism"]}
    return terms


def rewrite_unkeyed(path: Path) -> None:
    """Bring a ledger of schema 2 to this one, every entry verified; the old file stays under another name.

    Its ``.lock`` must be there: an empty one is that of a ledger whose first outcome was never noted. LedgerError where
    an entry does not verify, and while another process reads the ledger.
    """
    note = lock(beside(path, ".lock"))
    try:
        text = os.pread(note, HEAD_BYTES, 0).decode("ascii", "replace")
        noted = parse_head(beside(path, ".lock"), text) if text else None
        terms, entries = _unkeyed_entries(path, noted)
        if noted is None and sum(kind != "reserve" for kind, _ in entries) > 1:
            raise LedgerError(f"{beside(path, '.lock')}: was emptied; restore it and the ledger from one copy.")
        with closing(connect(path)):
            pass  # brings the write-ahead log, which belongs to the old file alone, into it
        if beside(path, "-wal").exists():
            raise LedgerError(f"{path}: another process reads this ledger; let it end, then try again.")
        unfinished, kept = beside(path, ".new"), path.with_suffix(".schema2.sqlite")
        head = write_unfinished(unfinished, canonical(terms), secrets.token_bytes(32), entries)
        # Until the rename `path` is of schema 2 and its `.lock` is there: after a crash all is done again.
        kept.unlink(missing_ok=True)
        kept.hardlink_to(path)
        write_head(path, head)
        unfinished.replace(path)
        beside(path, ".lock").unlink()
    finally:
        os.close(note)


def _unkeyed_entries(path: Path, noted: Head | None) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Terms of today and verified entries of a ledger of schema 2. LedgerError if one does not verify."""
    with closing(open_read_only(path)) as database:
        database.execute("BEGIN")
        # The chain starts from the text as it was stored; how terms are spelt today comes after.
        (terms,) = database.execute("SELECT terms FROM chain").fetchone()
        chain = Chain(None)
        rows = database.execute("SELECT number, kind, payload, digest FROM entries ORDER BY number")
        verified = list(verified_entries(rows, str(path), chain, chain.start(terms)))
    if noted is not None and noted not in [Head(number, digest) for number, _, _, digest in verified]:
        raise LedgerError(
            f"{path}: holds {len(verified)} entries, and not the number {noted.number} that was written; restore it "
            "from a copy."
        )
    header = Header(version=UNKEYED_VERSION, terms=terms, chain=chain)
    return current_terms(header), [(kind, text) for _, kind, text, _ in verified]


MIN_FREE_BYTES = 2**20
"""Room for the largest transaction: a disk with less is as good as full."""
_ENTRIES = "SELECT number, kind, payload, digest FROM entries WHERE number > ? ORDER BY number"


class SqliteStore:
    """The files of one ledger, open for writing."""

    remedy = "Fix the disk, then start again."

    def __init__(self, path: Path, terms: str, *, create: bool) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None
        self._files: OpenFiles | None = None
        with folder_held(path, create=create):
            if not os.path.lexists(path):
                complete_or_create(path, terms, create=create)
            self._identity = identity(path)
            if schema_version(path) == UNKEYED_VERSION:
                rewrite_unkeyed(path)
                self._identity = identity(path)
        # Locked before it is read: no other writer moves the head in between.
        self._head_file: int | None = lock(head_path(path))

    def read(self) -> contextlib.AbstractContextManager[Stored]:
        """What the files hold, and the head beside them."""
        return read_file(self._path)

    def begin(self, head: Head) -> None:
        """Open the database for writing. LedgerError if it is not what was read."""
        assert self._head_file is not None
        self._database = connect(self._path)
        # The writer must have opened what was verified, not what was put in its place since.
        last = self._database.execute("SELECT number, digest FROM entries ORDER BY number DESC LIMIT 1").fetchone()
        if identity(self._path) != self._identity or (last is not None and Head(*last) != head):
            raise LedgerError(f"{self._path}: was replaced while it was opened; open it again.")
        self._files = OpenFiles(self._path, self._head_file)
        if noted_head(self._path) != head:  # a crash came between an entry and its note; what it stored may leave now
            self._note(head)

    def append(self, kind: EntryKind, text: str, head: Head) -> None:
        """One transaction, then the head."""
        assert self._database is not None
        assert self._head_file is not None
        # The entry first: a head whose entry is missing would make a sound ledger refuse to open.
        self._database.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", (head.number, kind, text, head.digest))
        if kind != "reserve":  # what leaves next must not outlive a loss of power that its head does not
            self._note(head)
        else:
            # Without waiting for the disk: a head that is behind still names one of the entries.
            os.pwrite(self._head_file, head_text(head), 0)

    def _note(self, head: Head) -> None:
        assert self._head_file is not None
        os.pwrite(self._head_file, head_text(head), 0)
        # Enough without its other data: the head is written over in its own length.
        os.fdatasync(self._head_file)

    def fault(self) -> str | None:
        """What was done to one of the files. SQLite writes into a file that was unlinked without an error."""
        return None if self._files is None else self._files.fault()

    def look(self) -> None:
        """LedgerError as :meth:`fault`: the names are looked up anew each time."""
        fault = self.fault()
        if fault is not None:
            raise LedgerError(f"{self._path}: {fault}.")

    def was_deposed(self) -> bool:
        """No: the lock on the folder cannot be taken from a process that lives."""
        return False

    def has_room(self) -> bool:
        """Whether the disk is there, may be written and has room for a transaction."""
        try:
            disk = os.statvfs(self._path.parent)
        except OSError:
            return False
        return not disk.f_flag & os.ST_RDONLY and disk.f_bavail * disk.f_frsize >= MIN_FREE_BYTES

    def require_writable(self) -> None:
        """LedgerError unless the folder takes as many bytes as a transaction may have, durably."""
        folder = self._path.parent
        trial = folder / ".write-test"
        try:
            with trial.open("wb") as file:
                file.write(bytes(MIN_FREE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise LedgerError(f"{folder}: cannot be written yet ({error}); fix the disk.") from error
        finally:
            with contextlib.suppress(OSError):
                trial.unlink()

    def close(self) -> None:
        """Close the database, then let the lock go."""
        if self._database is not None:
            # Closing removes the log by name, and names of files that were replaced may be another ledger's.
            if self._files is not None and self._files.fault() is None:
                self._database.close()
            else:
                abandon(self._database)
            self._database = None
        # The lock goes last: closing the database may still write the log back.
        if self._head_file is not None:
            os.close(self._head_file)
            self._head_file = None


@contextmanager
def read_file(path: Path, *, after: int = 0) -> Iterator[Stored]:
    """What the files hold. The head is read first: a writer that goes on only adds to what it names."""
    noted = noted_head(path)
    try:
        with closing(open_read_only(path)) as database:
            # One snapshot for header and entries, whatever a writer appends meanwhile.
            database.execute("BEGIN")
            header = read_header(database, path)
            yield Stored(header=header, noted=(noted,), rows=database.execute(_ENTRIES, (after,)))
    except sqlite3.Error as error:
        raise reading_failed(path, error) from error


class SqliteReader:
    """Files of a ledger that another connection writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._errors():
            self._database = open_read_only(path)

    def header(self) -> Header:
        """As it is stored now."""
        with self._errors():
            return read_header(self._database, self._path)

    def rows(self, after: int, most: int) -> Sequence[Row]:
        """In a transaction of their own: the log could not be written over while one stayed open."""
        with self._errors():
            return self._database.execute(f"{_ENTRIES} LIMIT ?", (after, most)).fetchall()

    def close(self) -> None:
        """Close the connection."""
        self._database.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise reading_failed(self._path, error) from error


def write_file(path: Path, header: Header, rows: Sequence[Row], head: Head) -> None:
    """Put a whole ledger and its head there, or nothing. LedgerError where a file of one is."""
    with folder_held(path, create=True):
        left = ledger_files(path)
        if left:
            raise LedgerError(f"{left[0]}: is there; give another place, or move it aside.")
        assert header.chain.key is not None
        unfinished = beside(path, ".new")
        entries = [(kind, text) for _, kind, text, _ in rows]
        written = write_unfinished(unfinished, header.terms, header.chain.key, entries, version=header.version)
        if written != head:
            raise LedgerError(f"{path}: what was to be written there is no whole ledger.")
        # The head comes first: a ledger without one is refused.
        write_head(path, head)
        unfinished.replace(path)
