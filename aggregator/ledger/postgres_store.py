"""A ledger in a PostgreSQL database. Needs psycopg (`pip install 'fairpate[postgresql]'`).

A ledger is a row of ``fairpate_ledgers`` with its header, its last entry and its writer's epoch, and its entries. A
new writer takes the next epoch in a transaction that locks the row, reads and verifies all entries in it, and commits.
Every entry is one transaction that locks the row, asserts epoch and last entry, moves the last entry and inserts: so
the write of a deposed writer, however long it was paused, finds another epoch and changes nothing.

A second writer by mistake is refused as long as the connection of the first lives (an advisory lock, a courtesy beside
the epoch); ``take_over`` ends that connection.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, LiteralString

import psycopg
from psycopg import Connection

from aggregator.ledger.chain import SCHEMA_VERSION, Chain, EntryKind, Head, Header, Row, known_header
from aggregator.ledger.files import LedgerError
from aggregator.ledger.postgres import Commits, as_ledger_errors, connect, one, require_durable, split_place
from aggregator.ledger.stores import Stored, StoreError, shown

# One statement, so that nothing comes between the check and the entry: a writer that was deposed updates no row, and so
# inserts none. `fsync` is asked each time, since a server's settings may change under an open connection.
_APPEND: LiteralString = """
    WITH held AS (
        UPDATE fairpate_ledgers SET number = %(number)s, digest = %(digest)s
        WHERE name = %(name)s AND epoch = %(epoch)s AND number = %(number)s - 1 AND digest = %(previous)s
        AND current_setting('fsync') = 'on'
        RETURNING name)
    INSERT INTO fairpate_entries SELECT name, %(number)s, %(kind)s, %(text)s, %(digest)s FROM held
"""
_TAKE_OVER_S = 5.0
_CLOSED_S = 1.0  # a server notices that a connection was closed, and ends its session, a moment later
_BLOCK = 256


class PostgresStore:
    """One ledger of a database, open for writing."""

    remedy = "Bring the database back, or stop the other writer; then it goes on."

    def __init__(self, place: str, terms: str, *, create: bool, take_over: bool) -> None:
        self._place, (self._url, self._name) = shown(place), split_place(place)
        self._commits = Commits(self._url, self._place)
        try:
            with as_ledger_errors(self._place):
                if create:
                    self._make(terms)
                self._hold(take_over=take_over)
                self._last, self._epoch, self._header = self._take_epoch()
        except BaseException:
            self.close()
            raise

    @contextmanager
    def read(self) -> Iterator[Stored]:
        """What the database holds, its row locked since the epoch was taken."""
        with (
            as_ledger_errors(self._place),
            closing(_rows(self._commits.connection, self._place, self._name, self._last)) as rows,
        ):
            yield Stored(header=self._header, noted=(self._last,), rows=rows)

    def begin(self, head: Head) -> None:
        """Make the epoch durable: from now on this is the writer. LedgerError where entries follow the last one."""
        if head != self._last:
            raise LedgerError(f"{self._place}: holds entries after number {self._last.number}; restore it from a copy.")
        # By `run`: a commit that did not wait for its standby must not make a writer.
        self._commits.run("COMMIT")

    def append(self, kind: EntryKind, text: str, head: Head) -> None:
        """One transaction, which changes nothing under another epoch or after another entry."""
        values = {"name": self._name, "epoch": self._epoch, "previous": self._last.digest, "kind": kind, "text": text}
        done = self._commits.run(_APPEND, {**values, "number": head.number, "digest": head.digest})
        if done.rowcount != 1:
            raise StoreError(
                "another writer took over, its last entry is another one now, or the server no longer writes to its "
                "disk (fsync)"
            )
        self._last = head

    def fault(self) -> str | None:
        """Whether the connection is known to be lost."""
        return "the connection to the database was lost" if self._commits.connection.closed else None

    def look(self) -> None:
        """Ask the server for the ledger's row, on a connection that is made for it."""
        # A new one each time: one that was kept would have to be closed from another thread while it hangs.
        with closing(connect(self._url)) as connection, as_ledger_errors(self._place):
            require_durable(connection, self._place)
            found = connection.execute("SELECT epoch FROM fairpate_ledgers WHERE name = %s", (self._name,)).fetchone()
        if found is None:
            raise LedgerError(f"{self._place}: is gone; restore it from a copy, or start a new run folder.")
        if found[0] != self._epoch:
            raise LedgerError(f"{self._place}: another writer took over; stop one of the two.")

    def has_room(self) -> bool:
        """Not known here: it is the server's disk."""
        return True

    def require_writable(self) -> None:
        """Opening again tells."""

    def close(self) -> None:
        """End the connection, and with it the courtesy lock and a transaction that was not committed."""
        self._commits.connection.close()

    def _hold(self, *, take_over: bool) -> None:
        """Take the courtesy lock. LedgerError where another writer's connection lives."""
        deadline_s = time.monotonic() + (_TAKE_OVER_S if take_over else _CLOSED_S)
        while not self._try_lock():
            is_late = time.monotonic() > deadline_s
            if is_late and not take_over:
                raise LedgerError(
                    f"{self._place}: another process writes this ledger; stop it, or take over from it "
                    "(`fairpate serve --take-over`)."
                )
            if is_late:  # the epoch alone is the guarantee
                return
            if take_over:
                _end_holder(self._commits.connection, self._name)
            time.sleep(0.05)

    def _try_lock(self) -> bool:
        (taken,) = one(self._commits.connection, "SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", self._name)
        return bool(taken)

    def _make(self, terms: str) -> None:
        """Make the ledger, unless it is there: one statement."""
        key = os.urandom(32)
        self._commits.run(
            "INSERT INTO fairpate_ledgers VALUES (%s, %s, %s, %s, 0, %s, %s) ON CONFLICT DO NOTHING",
            (self._name, SCHEMA_VERSION, terms, key.hex(), *Chain(key).start(terms)),
        )

    def _take_epoch(self) -> tuple[Head, int, Header]:
        """In a transaction that locks the row until :meth:`begin`."""
        connection = self._commits.connection
        connection.execute("BEGIN")
        # The row stays locked until `begin` commits: nobody appends while this writer reads and verifies.
        connection.execute("UPDATE fairpate_ledgers SET epoch = epoch + 1 WHERE name = %s", (self._name,))
        # An aggregate, which gives a row where the ledger is gone as well.
        (epoch,) = connection.execute(
            "SELECT max(epoch) FROM fairpate_ledgers WHERE name = %s", (self._name,)
        ).fetchone() or (None,)
        if epoch is None:
            raise LedgerError(f"{self._place}: is gone; restore it from a copy, or start a new run folder.")
        last, header = _header(connection, self._place, self._name)
        return last, epoch, header


@contextmanager
def read_database(place: str, *, after: int = 0) -> Iterator[Stored]:
    """What the database holds, in one snapshot. LedgerError where there is no such ledger."""
    url, name = split_place(place)
    with closing(connect(url)) as connection, as_ledger_errors(shown(place)):
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        last, header = _header(connection, shown(place), name)
        # Closed first: nothing can be done with a connection while rows are on their way.
        with closing(_rows(connection, shown(place), name, last, after)) as rows:
            yield Stored(header=header, noted=(last,), rows=rows)


class DatabaseReader:
    """A ledger of a database that another connection writes."""

    def __init__(self, place: str) -> None:
        self._place, (url, self._name) = shown(place), split_place(place)
        self._connection = connect(url)

    def header(self) -> Header:
        """As it is stored now."""
        with as_ledger_errors(self._place):
            return _header(self._connection, self._place, self._name)[1]

    def rows(self, after: int, most: int) -> Sequence[Row]:
        """In a statement of their own."""
        statement: LiteralString = """
            SELECT number, kind, payload, digest FROM fairpate_entries
            WHERE ledger = %s AND number > %s ORDER BY number LIMIT %s
        """
        with as_ledger_errors(self._place):
            return self._connection.execute(statement, (self._name, after, most)).fetchall()

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


def write_database(place: str, header: Header, rows: Sequence[Row], head: Head) -> None:
    """Put a whole ledger there, in one transaction. LedgerError where one of this name is."""
    url, name = split_place(place)
    assert header.chain.key is not None
    commits = Commits(url, shown(place))
    with commits.connection as connection, as_ledger_errors(shown(place)), connection.transaction():
        made = connection.execute(
            "INSERT INTO fairpate_ledgers VALUES (%s, %s, %s, %s, 0, %s, %s) ON CONFLICT DO NOTHING",
            (name, header.version, header.terms, header.chain.key.hex(), *head),
        )
        if made.rowcount != 1:
            raise LedgerError(f"{shown(place)}: a ledger of this name is there; give another name.")
        with connection.cursor().copy("COPY fairpate_entries FROM STDIN") as copy:
            for row in rows:
                copy.write_row((name, *row))
    commits.require_waited()


def _header(connection: Connection[Any], place: str, name: str) -> tuple[Head, Header]:
    """The last entry and the header. LedgerError where there is no such ledger."""
    found = None
    if one(connection, "SELECT to_regclass(%s) IS NOT NULL", "fairpate_ledgers")[0]:
        statement: LiteralString = "SELECT version, terms, key, number, digest FROM fairpate_ledgers WHERE name = %s"
        found = connection.execute(statement, (name,)).fetchone()
    if found is None:
        raise LedgerError(f"{place}: no such ledger; restore it, or give the name of one that is there.")
    version, terms, key, number, digest = found
    return Head(number, digest), known_header(place, version, terms, key)


def _rows(connection: Connection[Any], place: str, name: str, last: Head, after: int = 0) -> Generator[Row]:
    """Every entry after number ``after``, in order. LedgerError where entries follow ``last``."""
    (end,) = one(connection, "SELECT coalesce(max(number), 0) FROM fairpate_entries WHERE ledger = %s", name)
    if end > last.number:
        raise LedgerError(f"{place}: holds entries after number {last.number}; restore it from a copy.")
    # Many entries in one message, which costs the client more than an entry does. Canonical JSON has no tab or line
    # break in it.
    statement: LiteralString = """
        COPY (SELECT (
            SELECT string_agg(concat_ws(E'\\t', number, kind, payload, digest), E'\\n' ORDER BY number)
            FROM fairpate_entries
            WHERE ledger = %(name)s AND number > first AND number <= least(first + %(block)s, %(end)s))
        FROM generate_series(%(after)s::bigint, %(end)s - 1, %(block)s) AS first) TO STDOUT
    """
    with connection.cursor().copy(statement, {"name": name, "after": after, "end": end, "block": _BLOCK}) as copy:
        copy.set_types(["text"])
        for (lines,) in copy.rows():
            if lines is not None:  # nothing is left of a block
                yield from map(_row, lines.split("\n"))


def _row(line: str) -> Row:
    """An entry; one that is none where it was edited into something else, so that its digest does not hold."""
    try:
        number, kind, text, digest = line.split("\t")
        return int(number), kind, text, digest  # type: ignore[return-value]  # a kind, if its digest holds
    except ValueError:
        return -1, "reserve", line, ""


def _end_holder(connection: Connection[Any], name: str) -> None:
    """End the connection that has the courtesy lock, as far as this role may."""
    # pg_locks shows a key of 64 bits in two halves; objsubid 1 says that they are one key.
    with suppress(psycopg.errors.InsufficientPrivilege):
        connection.execute(
            """
            SELECT pg_terminate_backend(pid) FROM pg_locks, hashtextextended(%s, 0) AS wanted
            WHERE locktype = 'advisory' AND objsubid = 1 AND database = (
                SELECT oid FROM pg_database WHERE datname = current_database())
            AND (classid::bigint << 32 | objid::bigint) = wanted AND pid <> pg_backend_pid()
            """,
            (name,),
        )
