"""What tests of ledgers share: entries of a small ledger, and edits past it."""

import sqlite3

import numpy as np
from serving import TERMS

from aggregator.ledger import Asker, Ledger
from aggregator.mechanism import Outcome
from aggregator.store import is_database

VOTES = np.array([[40, 15, 5]])
ANSWER, REFUSAL = Outcome(verdict="answer", label=0), Outcome(verdict="fairness")


def reserve(ledger, key):
    return ledger.reserve([key], [1], VOTES, [Asker("alice", "r1")])


def answer(ledger, key):
    ledger.commit(reserve(ledger, key), [ANSWER])


def fill(ledger):
    """Two answers, and a reservation that never gets an outcome."""
    for key in ("first", "second"):
        answer(ledger, key)
    reserve(ledger, "open")


def holds_all(place, *, create=False):
    with Ledger(place, TERMS, create=create) as ledger:
        outcomes = [ledger.outcome_of.get(key) for key in ("first", "second", "open")]
        return outcomes == [ANSWER, ANSWER, None] and len(ledger.keys) == 3


def execute(place, statement, **values):
    """An edit by hand, past the ledger."""
    tables = ("fairpate_entries", "fairpate_ledgers") if is_database(place) else ("entries", "chain")
    is_of_ledgers = "{ledgers}" in statement
    statement = statement.format(entries=tables[0], ledgers=tables[1])
    for name, value in values.items():
        statement = statement.replace(f":{name}", f"'{value}'")
    if is_database(place):
        import psycopg

        with psycopg.connect(place.partition("#")[0]) as connection:
            connection.execute("SET session_replication_role = replica")  # no foreign key hinders who owns the server
            condition = " AND " if "WHERE" in statement else " WHERE "
            column = "name" if is_of_ledgers else "ledger"
            connection.execute(f"{statement}{condition}{column} = '{place.partition('#')[2]}'")
    else:
        connection = sqlite3.connect(place)
        with connection:
            connection.execute(statement)
        connection.close()
