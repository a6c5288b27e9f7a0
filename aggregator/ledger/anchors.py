"""Where the last entry of a ledger is noted besides: elsewhere, so that a ledger that was rolled back is refused.

A store notices what was taken from it, and not an older copy of the whole of itself. An anchor lies where such a copy
does not reach: a file on another disk, or another database. It holds the number and digest of an entry, which tell
nothing without the ledger's key. It is written after the entry is durable and before anything leaves, and it never goes
back: so a ledger that lacks an answer that left lacks what its anchor notes. An anchor that is missing, cannot be
written or names another entry of the same number ends the writing.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Protocol

from aggregator.ledger.chain import HEAD_BYTES, Head, head_text, parse_head
from aggregator.ledger.files import LedgerError, UnreachableError
from aggregator.ledger.stores import Place, StoreError, is_database, shown
from fairpate.files import sync

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
        from aggregator.ledger.postgres_anchor import DatabaseAnchor

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
