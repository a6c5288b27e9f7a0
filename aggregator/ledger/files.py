"""The files of a ledger: their names, who may open them, and whether they are still the ones that were opened.

Beside the database and SQLite's own two files there is the head, which its one writer holds locked. Making, completing
and migrating a ledger is done under a lock on its folder. While a ledger is open its files are looked at
before and after every write: if one was removed, replaced or cut short, nothing more is written or answered.

Not known here: what the files hold.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

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
