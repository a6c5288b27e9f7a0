"""Where the entries of a ledger lie: what every back end keeps, and which one a place means.

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

A place is the path of a SQLite file (:mod:`aggregator.ledger.sqlite_store`), or ``postgresql://HOST/DATABASE#LEDGER``
(:mod:`aggregator.ledger.postgres_store`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from aggregator.ledger.chain import EntryKind, Head, Header, Row
from aggregator.ledger.files import LedgerError

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
        from aggregator.ledger.postgres_store import DatabaseReader

        return DatabaseReader(str(place))
    from aggregator.ledger.sqlite_store import SqliteReader

    return SqliteReader(Path(place))


def open_store(place: Place, terms: str, *, create: bool, take_over: bool) -> Store:
    """The ledger at ``place`` for its one writer; with ``create`` it is made under ``terms`` where there is none.

    LedgerError where it was lost, or another writes it. ``take_over`` ends the other, where the back end can.
    """
    if is_database(place):
        from aggregator.ledger.postgres_store import PostgresStore

        return PostgresStore(str(place), terms, create=create, take_over=take_over)
    from aggregator.ledger.sqlite_store import SqliteStore

    return SqliteStore(Path(place), terms, create=create)


@contextmanager
def reading(place: Place, *, after: int = 0) -> Iterator[Stored]:
    """What a ledger holds after entry number ``after``, whatever a writer appends meanwhile; nothing is written.

    LedgerError where there is none.
    """
    if is_database(place):
        from aggregator.ledger.postgres_store import read_database

        with read_database(str(place), after=after) as stored:
            yield stored
    else:
        from aggregator.ledger.sqlite_store import read_file

        with read_file(Path(place), after=after) as stored:
            yield stored


def write_store(place: Place, header: Header, rows: Sequence[Row]) -> None:
    """Put a whole ledger at ``place``, or nothing. LedgerError where one is."""
    last = Head(rows[-1][0], rows[-1][3]) if rows else header.chain.start(header.terms)
    if is_database(place):
        from aggregator.ledger.postgres_store import write_database

        write_database(str(place), header, rows, last)
    else:
        from aggregator.ledger.sqlite_store import write_file

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
