"""A ledger of another schema, or with a damaged key, is refused with what is wrong and what to do."""

import hashlib
import sqlite3
from contextlib import closing

import pytest
from serving import TERMS
from stored_ledgers import fill

from aggregator import ledger_audit
from aggregator.ledger import Ledger
from aggregator.store import LedgerError, head_path

pytestmark = pytest.mark.usefixtures("light_runs")


def test_digests_do_not_confirm_a_guess_about_the_votes(path, tmp_path):
    """Equal entries of two ledgers have unequal digests: without the key there is nothing to compare a guess with."""
    heads = []
    for ledger_path in (path, tmp_path / "other.sqlite"):
        with Ledger(ledger_path, TERMS) as ledger:
            fill(ledger)
        heads.append(ledger_audit.verify(ledger_path).head)
    assert heads[0] != heads[1]
    with closing(sqlite3.connect(path)) as database, database:
        entries = database.execute("SELECT kind, payload FROM entries ORDER BY number").fetchall()
        (terms,) = database.execute("SELECT terms FROM chain").fetchone()
    digest = hashlib.sha256(f"\nterms\n{terms}".encode()).hexdigest()
    for kind, text in entries:
        digest = hashlib.sha256(f"{digest}\n{kind}\n{text}".encode()).hexdigest()
    assert digest not in heads


@pytest.mark.parametrize("with_head", [True, False])  # schema 2 had none
@pytest.mark.parametrize("version", [2, 5, 7])
def test_a_ledger_of_another_schema_is_refused_and_stays_as_it_is(path, version, with_head):
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE chain SET version = ?", (version,))
    database.close()
    if not with_head:
        head_path(path).unlink()
    before = path.read_bytes()
    for read in (lambda: Ledger(path, TERMS), lambda: ledger_audit.verify(path)):
        with pytest.raises(LedgerError, match=rf"ledger schema 6, found {version}; start a new run folder"):
            read()
    assert path.read_bytes() == before


@pytest.mark.parametrize("key", ["", "00ff", "z" * 64, None, 12])
def test_a_damaged_key_is_named(path, key):
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE chain SET key = ?", (key,))
    database.close()
    for read in (lambda: Ledger(path, TERMS), lambda: ledger_audit.verify(path)):
        with pytest.raises(LedgerError, match=r"key is damaged .*restore the ledger from a copy"):
            read()
