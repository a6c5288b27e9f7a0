"""Connections to a PostgreSQL server that keeps what it commits, and the tables of ledgers and anchors in it.

A server that does not wait for its disk, or a standby, is refused. A commit on a server with a synchronous standby
waits for it too; one that was told to stop waiting comes with a warning, and counts as failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, LiteralString

import psycopg
from psycopg import Connection

from aggregator.ledger.files import LedgerError, UnreachableError
from aggregator.ledger.stores import StoreError, shown

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
    # In a stricter one, an append that waited for a lock would fail where it should look again.
    "SET default_transaction_isolation = 'read committed'",
    # The warning of a commit that did not wait must be heard.
    "SET client_min_messages = 'warning'",
)
_DAMAGE = (
    psycopg.errors.DataCorrupted,
    psycopg.errors.IndexCorrupted,
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
)
# `local`, `remote_write` and `off` return before the disk here, or that of a standby, has the commit.
_DURABLE = {"fsync": ("on",), "full_page_writes": ("on",), "synchronous_commit": ("on", "remote_apply")}


class Commits:
    """A connection whose statements are transactions of their own, durable when they return."""

    def __init__(self, url: str, place: str) -> None:
        self.connection = connect(url)
        self._warnings: list[str] = []
        try:
            with as_ledger_errors(place):
                require_durable(self.connection, place)
                make_tables(self.connection)
        except BaseException:
            self.connection.close()
            raise
        # A commit that stopped waiting for its standby is no error to the driver: the warning alone tells.
        self.connection.add_notice_handler(lambda notice: self._warnings.append(notice.message_primary or ""))

    def run(self, statement: LiteralString, values: Any = ()) -> psycopg.Cursor[Any]:
        """The statement, committed. StoreError where it failed, or its commit did not wait for the standby."""
        try:
            done = self.connection.execute(statement, values)
        except psycopg.Error as error:
            raise StoreError(one_line(error)) from error
        self.require_waited()
        return done

    def require_waited(self) -> None:
        """StoreError if a commit did not wait for the standby: it succeeds, and warns alone."""
        if self._warnings:
            raise StoreError("; ".join(self._warnings))


def split_place(place: str) -> tuple[str, str]:
    """The address of the database, and the ledger's name in it. LedgerError without a name."""
    url, _, name = place.partition("#")
    if not name:
        raise LedgerError(f"{shown(place)}: names no ledger; add its name, as in postgresql://HOST/DATABASE#NAME.")
    return url, name


def connect(url: str) -> Connection[Any]:
    """A connection on which every statement is a transaction of its own. LedgerError where nothing answers."""
    try:
        connection = psycopg.connect(url, autocommit=True, **_CONNECT)  # type: ignore[arg-type]  # libpq's own options
        for statement in _SESSION:
            connection.execute(statement)
    except psycopg.Error as error:
        raise UnreachableError(f"{shown(url)}: no database answers ({one_line(error)}); bring it back.") from error
    return connection


def require_durable(connection: Connection[Any], place: str) -> None:
    """LedgerError unless what this server commits is on its disk, and it takes writes."""
    for name, allowed in _DURABLE.items():
        (found,) = one(connection, "SELECT current_setting(%s)", name)
        if found not in allowed:
            raise LedgerError(
                f"{place}: the server has {name} = {found} and may lose commits; expected {' or '.join(allowed)}."
            )
        if name == "synchronous_commit":  # set here, so that no reload changes it for this session
            connection.execute("SELECT set_config(%s, %s, false)", (name, found))
    (is_standby,) = one(connection, "SELECT pg_is_in_recovery()")
    if is_standby:
        raise LedgerError(f"{place}: is a standby, which takes no writes; promote it, or name the primary.")


def make_tables(connection: Connection[Any]) -> None:
    """The tables, where they are not."""
    (are_there,) = one(connection, "SELECT to_regclass(%s) IS NOT NULL", "fairpate_anchors")
    if are_there:  # making them would need more rights than writing to them
        return
    with connection.transaction():
        # Two that make a table at the same time would fail.
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_TABLES_LOCK,))
        connection.execute(_TABLES)


def one(connection: Connection[Any], statement: LiteralString, *values: Any) -> tuple[Any, ...]:
    """The one row of a query."""
    found = connection.execute(statement, values).fetchone()
    assert found is not None
    return found  # type: ignore[no-any-return]


@contextmanager
def as_ledger_errors(place: str) -> Iterator[None]:
    """What the database refuses inside is an UnreachableError; a LedgerError where it lost a table or a part of one."""
    try:
        yield
    except _DAMAGE as error:
        raise LedgerError(f"{place}: is damaged ({one_line(error)}); restore it from a copy.") from error
    except psycopg.Error as error:
        raise UnreachableError(
            f"{place}: the database does not answer as a ledger's does ({one_line(error)})."
        ) from error


def one_line(error: Exception) -> str:
    """A message without line breaks."""
    return " ".join(str(error).split())
