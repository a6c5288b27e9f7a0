"""A ledger in a PostgreSQL database, with a fencing epoch for its one writer; and an anchor (a copy of a ledger's last
number and digest) in such a database.

It needs psycopg (`pip install 'fairpate[postgresql]'`). A ledger is a row of ``fairpate_ledgers`` (header, last entry,
epoch of its writer) and rows of ``fairpate_entries``. A new writer takes the next epoch in one transaction that locks
the ledger's row, reads and verifies all entries, and commits. Every new entry is one transaction that locks the row,
checks epoch and last entry, updates the last entry and inserts the new one. So a write of an earlier writer, even after
a long pause, finds another epoch and changes nothing.

An advisory lock refuses a second writer that was started by mistake. ``take_over`` ends the connection that has this
lock. The guarantee does not depend on the lock. A server that confirms commits before they are on its disk is refused,
and so is a standby. If the server has a synchronous standby, a commit waits for it too; if the server stopped waiting,
the commit comes with a warning and counts as failed.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any, LiteralString

import psycopg
from psycopg import Connection, errors

from aggregator import store
from aggregator.store import Address, Head, LedgerError, StoreError, UnreachableError, shown

_TABLES: LiteralString = """
    CREATE TABLE IF NOT EXISTS fairpate_ledgers (
        name text PRIMARY KEY, version integer NOT NULL, terms text NOT NULL, key text NOT NULL,
        epoch bigint NOT NULL, number bigint NOT NULL, digest text NOT NULL);
    CREATE TABLE IF NOT EXISTS fairpate_entries (
        ledger text NOT NULL REFERENCES fairpate_ledgers, number bigint NOT NULL, kind text NOT NULL,
        payload text NOT NULL, digest text NOT NULL, PRIMARY KEY (ledger, number));
    CREATE TABLE IF NOT EXISTS fairpate_anchors (
        name text PRIMARY KEY, number bigint NOT NULL, digest text NOT NULL);
"""
_TABLES_LOCK = 0x66616972  # any number that others do not take
# A peer that is gone is noticed within ten seconds, on both sides.
_CONNECT = {
    "connect_timeout": 10,
    "keepalives_idle": 4,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "application_name": "fairpate",
}
_SESSION: tuple[LiteralString, ...] = (
    "SET tcp_keepalives_idle = 4",
    "SET tcp_keepalives_interval = 2",
    "SET tcp_keepalives_count = 3",
    # In a stricter isolation, an append that waited for a lock would fail instead of seeing the new row.
    "SET default_transaction_isolation = 'read committed'",
    # A commit that did not wait for its standby shows only in a warning, so warnings must be sent.
    "SET client_min_messages = 'warning'",
)
_DAMAGE = (errors.DataCorrupted, errors.IndexCorrupted, errors.UndefinedTable, errors.UndefinedColumn)
# `local`, `remote_write` and `off` return before the disk here, or that of a standby, has the commit.
_DURABLE = {"fsync": ("on",), "full_page_writes": ("on",), "synchronous_commit": ("on", "remote_apply")}


class Commits:
    """A connection to a database on which every statement is one transaction, durable when :meth:`run` returns.

    ``place`` is the URL as messages show it, without a password; ``name`` is the name of the ledger or anchor.
    """

    def __init__(self, place: Address) -> None:
        self._at, self.place, (self.url, self.name) = place, shown(place), split_place(place)
        self.connection = connect(self.url)
        self.close = self.connection.close
        self._warnings: list[str] = []
        try:
            with as_ledger_errors(self.place):
                require_durable(self.connection, self.place)
                (are_there,) = one(self.connection, "SELECT to_regclass(%s) IS NOT NULL", "fairpate_anchors")
                if not are_there:  # only then: making them needs more rights than writing to them
                    with self.connection.transaction():
                        # Two that make a table at the same time would fail.
                        self.connection.execute("SELECT pg_advisory_xact_lock(%s)", (_TABLES_LOCK,))
                        self.connection.execute(_TABLES)
        except BaseException:
            self.close()
            raise
        # To the driver, a commit that stopped waiting for its standby is not an error: only the warning shows it.
        self.connection.add_notice_handler(lambda notice: self._warnings.append(notice.message_primary or ""))

    def run(self, statement: LiteralString, values: Any = ()) -> psycopg.Cursor[Any]:
        """Execute and commit an SQL statement. StoreError if it fails, or if its commit did not wait for the
        standby."""
        try:
            done = self.connection.execute(statement, values)
        except psycopg.Error as error:
            raise StoreError(one_line(error)) from error
        self.require_waited()
        return done

    def require_waited(self) -> None:
        """Raise StoreError if a commit did not wait for the synchronous standby, for which PostgreSQL only issues a
        warning."""
        if self._warnings:
            raise StoreError("; ".join(self._warnings))


def split_place(place: Address) -> tuple[str, str]:
    """Split a ledger's URL ``place`` into the URL of its database and the ledger's name. LedgerError if the name is
    missing."""
    url, _, name = str(place).partition("#")
    if not name:
        raise LedgerError(
            f"{shown(place)}: the URL names no ledger; add a name, as in postgresql://HOST/DATABASE#NAME."
        )
    return url, name


def connect(url: str) -> Connection[Any]:
    """Connect to a database in autocommit mode: every statement is one transaction. UnreachableError if no database
    answers."""
    try:
        connection = psycopg.connect(url, autocommit=True, **_CONNECT)  # type: ignore[arg-type]  # libpq's own options
        for statement in _SESSION:
            connection.execute(statement)
    except psycopg.Error as error:
        raise UnreachableError(f"{shown(url)}: no database answers ({one_line(error)}); start the database.") from error
    return connection


def require_durable(connection: Connection[Any], place: str) -> None:
    """Raise LedgerError unless the database server confirms a commit only once it is on the server's disk, and
    UnreachableError if the server is a standby.

    ``place`` names the database in messages.
    """
    for name, allowed in _DURABLE.items():
        (found,) = one(connection, "SELECT current_setting(%s)", name)
        if found not in allowed:
            raise LedgerError(
                f"{place}: the server may lose commits, as {name} = {found}; set it to {' or '.join(allowed)}."
            )
        if name == "synchronous_commit":  # set here, so that no reload changes it for this session
            connection.execute("SELECT set_config(%s, %s, false)", (name, found))
    require_primary(connection, place)


def require_primary(connection: Connection[Any], place: str) -> None:
    """Raise UnreachableError if the database server is a standby, which may lack the latest entries. ``place`` names
    the database in messages."""
    (is_standby,) = one(connection, "SELECT pg_is_in_recovery()")
    if is_standby:
        raise UnreachableError(
            f"{place}: the server is a standby, which accepts no writes and may lag; promote it, or give the "
            "primary's URL."
        )


def one(connection: Connection[Any], statement: LiteralString, *values: Any) -> tuple[Any, ...]:
    """Run an SQL query that selects exactly one row, and return this row."""
    found = connection.execute(statement, values).fetchone()
    assert found is not None
    return found


@contextmanager
def as_ledger_errors(place: str) -> Iterator[None]:
    """Inside the block, convert errors of the database driver: to LedgerError if one of the ledger's tables or its data
    is lost, otherwise to UnreachableError."""
    try:
        yield
    except _DAMAGE as error:
        raise LedgerError(f"{place}: the ledger is damaged ({one_line(error)}); restore it from a copy.") from error
    except psycopg.Error as error:
        raise UnreachableError(
            f"{place}: the database failed ({one_line(error)}); bring it back, then try again."
        ) from error


def one_line(error: Exception) -> str:
    """Return an error's message without line breaks."""
    return " ".join(str(error).split())


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
# Nothing where a ledger of this name exists.
_MAKE: LiteralString = "INSERT INTO fairpate_ledgers VALUES (%s, %s, %s, %s, 0, %s, %s) ON CONFLICT DO NOTHING"
# pg_locks shows a key of 64 bits in two halves; objsubid 1 says that they are one key.
_END_HOLDER: LiteralString = """
    SELECT pg_terminate_backend(pid) FROM pg_locks, hashtextextended(%s, 0) AS wanted
    WHERE locktype = 'advisory' AND objsubid = 1 AND database = (
        SELECT oid FROM pg_database WHERE datname = current_database())
    AND (classid::bigint << 32 | objid::bigint) = wanted AND pid <> pg_backend_pid()
"""
# How long an ended connection may take to give up the lock; after that the epoch alone decides.
_TAKE_OVER_S = 5.0
_CLOSED_S = 1.0  # a server notices that a connection was closed, and ends its session, a moment later
# By URL and name, the last epoch that this process took: opening again may take one and fail afterwards.
_LAST_EPOCHS: dict[tuple[str, str], int] = {}


class PostgresReader:
    """Reads a ledger in a database, like :class:`aggregator.store.SqliteReader`.

    ``connection`` is used for reading; None opens a new one.
    """

    def __init__(self, place: Address, connection: Connection[Any] | None = None) -> None:
        self._place, (url, self._name) = shown(place), split_place(place)
        self._owns = connection is None
        self._connection = connection or connect(url)
        found = None
        statement: LiteralString = "SELECT version, terms, key, number, digest FROM fairpate_ledgers WHERE name = %s"
        try:
            with as_ledger_errors(self._place):
                require_primary(self._connection, self._place)
                if one(self._connection, "SELECT to_regclass(%s) IS NOT NULL", "fairpate_ledgers")[0]:
                    found = self._connection.execute(statement, (self._name,)).fetchone()
            if found is None:
                remedy = "restore it, or give the name of one that exists"
                raise LedgerError(f"{self._place}: no such ledger; {remedy}.")  # noqa: TRY301 - closed below
            version, terms, key, number, digest = found
            # Of one row, read before any entry: a writer only adds to what it names.
            self.header, self.noted = store.known_header(self._place, version, terms, key), Head(number, digest)
        except BaseException:
            self.close()
            raise

    def rows(self, after: int, most: int) -> Sequence[store.Row]:
        statement: LiteralString = """
            SELECT number, kind, payload, digest FROM fairpate_entries
            WHERE ledger = %s AND number > %s ORDER BY number LIMIT %s
        """
        with as_ledger_errors(self._place):
            return self._connection.execute(statement, (self._name, after, most)).fetchall()

    def close(self) -> None:
        if self._owns:
            self._connection.close()


class PostgresStore(Commits):
    """One ledger in a database, open for its one writer; its methods are those of
    :class:`aggregator.store.SqliteStore`. ``close`` ends the advisory lock too, and a transaction that was not
    committed."""

    remedy = "Bring the database back, or stop the other writer; writing then resumes."

    def __init__(self, place: Address, terms: str, *, create: bool, take_over: bool) -> None:
        super().__init__(place)
        # Reads inside the transaction that has locked the row since the epoch was taken.
        self.reader = partial(PostgresReader, place, self.connection)
        try:
            with as_ledger_errors(self.place):
                if create:
                    new = store.Header(terms)
                    self.run(_MAKE, (self.name, store.SCHEMA_VERSION, terms, new.key.hex(), *new.start))
                self._take_advisory_lock(take_over=take_over)
                # Until `begin` commits, this transaction locks the row: no other writer appends while this one reads
                # and verifies.
                self.connection.execute("BEGIN")
                self.connection.execute("UPDATE fairpate_ledgers SET epoch = epoch + 1 WHERE name = %s", (self.name,))
                self._epoch = self._stored_epoch(self.connection)
                self._last = self.reader().noted
        except BaseException:
            self.close()
            raise

    def _stored_epoch(self, connection: Connection[Any]) -> int:
        found = connection.execute("SELECT epoch FROM fairpate_ledgers WHERE name = %s", (self.name,)).fetchone()
        if found is None:
            raise LedgerError(f"{self.place}: the ledger is gone; restore it from a copy, or start a new run folder.")
        return found[0]

    def begin(self, head: Head) -> None:
        """Commit this writer's epoch, a number that every write is compared with: from now on this writer is the only
        one. LedgerError unless ``head``, the last entry that was verified, is the last on record."""
        if head != self._last:
            raise LedgerError(
                f"{self.place}: entry {self._last.number}, the last on record, is not the last that was "
                "verified; restore the ledger from a copy."
            )
        # By `run`: a commit that did not wait for its standby must not make a writer.
        self.run("COMMIT")
        _LAST_EPOCHS[self.url, self.name] = self._epoch

    def append(self, kind: store.EntryKind, text: str, head: Head) -> None:
        """Store the entry with number and digest ``head`` in one transaction. StoreError if that fails, or if another
        writer has taken over or added an entry."""
        values = {"name": self.name, "epoch": self._epoch, "previous": self._last.digest, "kind": kind, "text": text}
        if self.run(_APPEND, {**values, "number": head.number, "digest": head.digest}).rowcount != 1:
            raise StoreError(
                "another writer took over this ledger, its last entry has changed, or the server's fsync was turned "
                "off; stop the other writer, or turn fsync on"
            )
        self._last = head

    def fault(self) -> str | None:
        return "the connection to the database was lost" if self.connection.closed else None

    def look(self) -> None:
        # A new one each time: one that was kept would have to be closed from another thread while it hangs.
        with closing(connect(self.url)) as connection, as_ledger_errors(self.place):
            require_durable(connection, self.place)
            epoch = self._stored_epoch(connection)
        if epoch != self._epoch:
            raise LedgerError(f"{self.place}: another process writes this ledger now; stop one of the two.")

    def has_room(self) -> bool:
        return True  # the server's disk cannot be seen from here

    def require_writable(self) -> None:
        """Raise DeposedError if another process has taken over the ledger; the database is asked on a new connection.

        Whether the ledger accepts writes is not tested: opening it again does that.
        """
        with closing(connect(self.url)) as connection, as_ledger_errors(self.place):
            found = connection.execute("SELECT epoch FROM fairpate_ledgers WHERE name = %s", (self.name,)).fetchone()
        # A ledger that was restored from a copy begins again at a lower epoch.
        if found is not None and found[0] > _LAST_EPOCHS[self.url, self.name]:
            raise store.DeposedError(
                f"{self.place}: another process took this ledger over; stop it, then restart this service."
            )

    def _take_advisory_lock(self, *, take_over: bool) -> None:
        """Take the PostgreSQL advisory lock that keeps a second writer out. LedgerError if another writer's connection
        has the lock.

        With ``take_over`` that connection is ended instead. If the lock still does not become free, this writer
        continues without it: its epoch, a number that every write is compared with, stops the other writer.
        """
        deadline_s = time.monotonic() + (_TAKE_OVER_S if take_over else _CLOSED_S)
        while not one(self.connection, "SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", self.name)[0]:
            is_late = time.monotonic() > deadline_s
            if is_late and not take_over:
                raise LedgerError(
                    f"{self.place}: another process writes this ledger; stop it, or take over from it "
                    "(`fairpate serve --take-over`)."
                )
            if is_late:  # without the lock: the epoch is the guarantee
                return
            if take_over:
                # End the connection that holds it, where this role may.
                with suppress(errors.InsufficientPrivilege):
                    self.connection.execute(_END_HOLDER, (self.name,))
            time.sleep(0.05)


def write_database(place: Address, header: store.Header, rows: Sequence[store.Row]) -> None:
    """Write a complete ledger to the database URL ``place`` in one transaction. LedgerError if a ledger of this name
    exists."""
    commits, head = Commits(place), Head(rows[-1][0], rows[-1][3]) if rows else header.start
    with commits.connection as connection, as_ledger_errors(commits.place), connection.transaction():
        made = connection.execute(_MAKE, (commits.name, store.SCHEMA_VERSION, header.terms, header.key.hex(), *head))
        if made.rowcount != 1:
            raise LedgerError(f"{commits.place}: a ledger of this name already exists; give another name.")
        with connection.cursor().copy("COPY fairpate_entries FROM STDIN") as copy:
            for row in rows:
                copy.write_row((commits.name, *row))
    # Behind the transaction: the warning comes with its COMMIT.
    commits.require_waited()


class DatabaseAnchor(Commits):
    """An anchor, the copy of a ledger's last entry's number and digest, in a row of the table ``fairpate_anchors``; its
    methods are those of :class:`aggregator.store.FileAnchor`."""

    def make(self, head: Head) -> None:
        try:
            made = self.run(
                "INSERT INTO fairpate_anchors VALUES (%s, %s, %s) ON CONFLICT DO NOTHING", (self.name, *head)
            )
        except StoreError as error:
            raise LedgerError(f"{self.place}: the anchor cannot be created ({error}); give another place.") from error
        if made.rowcount != 1:
            raise LedgerError(f"{self.place}: an anchor of this name exists already; give another name.")

    def noted(self) -> Head:
        try:
            found = self.run("SELECT number, digest FROM fairpate_anchors WHERE name = %s", (self.name,)).fetchone()
        except StoreError as error:
            raise UnreachableError(
                f"{self.place}: the anchor cannot be read ({error}); bring its database back."
            ) from error
        if found is None:
            raise LedgerError(f"{self.place}: the anchor, which notes the ledger's last entry, is gone; restore it.")
        return Head(*found)

    def look(self) -> None:
        # On a connection of its own: it may hang.
        with closing(DatabaseAnchor(self._at)) as anchor:
            anchor.noted()

    def note(self, head: Head) -> None:
        # Compared and moved by one statement: no other writer's note comes in between.
        moved = self.run(
            "UPDATE fairpate_anchors SET number = %s, digest = %s "
            "WHERE name = %s AND (number < %s OR (number = %s AND digest = %s))",
            (*head, self.name, head.number, *head),
        )
        if moved.rowcount != 1:
            raise StoreError(
                f"{self.place}: the anchor is gone, or another writer noted an entry in it that this ledger lacks; "
                "restore the anchor, or stop the other writer"
            )
