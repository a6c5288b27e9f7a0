"""A ledger that an earlier version wrote goes on with every entry, or is refused."""

import hashlib
import hmac
import json
import shutil
import sqlite3
from dataclasses import asdict, replace

import pytest
from serving import TERMS
from stored_ledgers import ANSWER, VOTES, fill, holds_all, reserve

from aggregator import audit
from aggregator.chain import LedgerError, canonical
from aggregator.ledger import Asker, Ledger, OwnLimit
from aggregator.sqlite import head_path, ledger_files


def earlier_terms():
    """As earlier versions stored them: the unit stood beside a plan to publish, not in it."""
    values = asdict(TERMS)
    del values["publication"]["unit"]
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def test_whoever_sees_the_digests_cannot_confirm_a_guess_about_the_votes(path, tmp_path):
    """Equal entries of two ledgers have unequal digests: without the key there is nothing to compare a guess with."""
    heads = []
    for ledger_path in (path, tmp_path / "other.sqlite"):
        with Ledger(ledger_path, TERMS) as ledger:
            fill(ledger)
        heads.append(audit.verify(ledger_path).head)
    assert heads[0] != heads[1]
    with sqlite3.connect(path) as database:
        entries = database.execute("SELECT kind, payload FROM entries ORDER BY number").fetchall()
        (terms,) = database.execute("SELECT terms FROM chain").fetchone()
    assert unkeyed(terms, entries)[-1][-1] not in heads


def chained(terms, entries, link):
    """Rows of a ledger whose digests are ``link`` over the predecessor's digest, the kind and the text."""
    digest = link(f"\nterms\n{terms}".encode())
    rows = []
    for number, (kind, text) in enumerate(entries, start=1):
        digest = link(f"{digest}\n{kind}\n{text}".encode())
        rows.append((number, kind, text, digest))
    return rows


def unkeyed(terms, entries):
    """Rows of schema 2: a plain SHA-256."""
    return chained(terms, entries, lambda message: hashlib.sha256(message).hexdigest())


@pytest.fixture
def schema2(path):
    """A ledger as the version before wrote it, with three reservations and two answers."""
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
    with sqlite3.connect(path) as database:
        entries = database.execute("SELECT kind, payload FROM entries ORDER BY number").fetchall()
    for file in ledger_files(path):
        file.unlink()
    terms = earlier_terms()
    rows = unkeyed(terms, entries)
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE chain (version INTEGER, terms TEXT)")
        database.execute("CREATE TABLE entries (number INTEGER PRIMARY KEY, kind TEXT, payload TEXT, digest TEXT)")
        database.execute("INSERT INTO chain VALUES (2, ?)", (terms,))
        database.executemany("INSERT INTO entries VALUES (?, ?, ?, ?)", rows)
    database.close()
    path.with_name("ledger.sqlite.lock").write_text(f"{rows[3][0]:020d} {rows[3][3]}\n")  # the last outcome
    return path


def test_a_ledger_of_the_earlier_schema_goes_on_with_every_entry(schema2):
    with pytest.raises(LedgerError, match="an earlier version; repeat `fairpate run`"):
        audit.verify(schema2)
    before = schema2.read_bytes()
    assert holds_all(schema2)
    found = audit.verify(schema2)
    assert (found.entries, found.reservations, found.answered, found.open) == (5, 3, 2, 1)
    assert {file.name for file in schema2.parent.iterdir()} == {
        "ledger.sqlite",
        "ledger.head",
        "ledger.schema2.sqlite",
    }
    assert (schema2.parent / "ledger.schema2.sqlite").read_bytes() == before


@pytest.fixture
def schema4(path):
    """A ledger as version 2 wrote it later: charges name nobody and no time."""
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
    with sqlite3.connect(path) as database:
        terms, key = database.execute("SELECT terms, key FROM chain").fetchone()
        entries = [
            (kind, canonical({k: v for k, v in json.loads(text).items() if k not in ("asked", "at")}))
            for kind, text in database.execute("SELECT kind, payload FROM entries ORDER BY number").fetchall()
        ]
        rows = chained(terms, entries, lambda message: hmac.new(bytes.fromhex(key), message, "sha256").hexdigest())
        database.execute("UPDATE chain SET version = 4")
        database.execute("DELETE FROM entries")
        database.executemany("INSERT INTO entries VALUES (?, ?, ?, ?)", rows)
    database.close()
    head_path(path).write_text(f"{rows[-1][0]:020d} {rows[-1][3]}\n")
    return path


def test_a_ledger_whose_charges_name_nobody_goes_on_as_it_is(schema4):
    before = sqlite3.connect(schema4).execute("SELECT * FROM entries").fetchall()
    assert holds_all(schema4)
    with Ledger(schema4, TERMS, create=False) as ledger:
        assert {charge.reservation.asker for charge in ledger.charges} == {Asker()}
        assert (ledger.charged_to("alice"), ledger.charges[0].reservation.at_s) == (0, 0.0)
        ledger.limit("alice", OwnLimit(max_queries=1))
        ledger.commit(ledger.reserve(["third"], [1], VOTES, [Asker("alice", "r")]), [ANSWER])
    with Ledger(schema4, TERMS, create=False) as ledger:
        assert ledger.outcome("third") == ANSWER
        assert (ledger.charged_to("alice"), ledger.limit_of("alice").max_queries) == (1, 1)
    assert sqlite3.connect(schema4).execute("SELECT * FROM entries").fetchall()[: len(before)] == before


@pytest.fixture
def schema3(path):
    """A ledger as version 2 wrote it: the terms know no mechanism's name, and the chain is keyed."""
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
    with sqlite3.connect(path) as database:
        entries = database.execute("SELECT kind, payload FROM entries ORDER BY number").fetchall()
        (key,) = database.execute("SELECT key FROM chain").fetchone()
        terms = earlier_terms()
        rows = chained(terms, entries, lambda message: hmac.new(bytes.fromhex(key), message, "sha256").hexdigest())
        database.execute("UPDATE chain SET version = 3, terms = ?", (terms,))
        database.execute("DELETE FROM entries")
        database.executemany("INSERT INTO entries VALUES (?, ?, ?, ?)", rows)
    database.close()
    head_path(path).write_text(f"{rows[-1][0]:020d} {rows[-1][3]}\n")
    return path


def test_a_ledger_that_knew_one_mechanism_goes_on_as_it_is(schema3):
    before = audit.verify(schema3)
    assert (before.entries, before.reservations, before.answered, before.open) == (5, 3, 2, 1)
    with Ledger(schema3, TERMS, create=False) as ledger:
        assert ledger.outcome("second") == ANSWER
        ledger.commit(reserve(ledger, "third"), [ANSWER])
    with Ledger(schema3, TERMS, create=False) as ledger:
        assert ledger.outcome("third") == ANSWER
    assert {file.name for file in schema3.parent.iterdir()} == {"ledger.sqlite", "ledger.head"}
    with pytest.raises(LedgerError, match="cannot go on with"):
        Ledger(schema3, replace(TERMS, mechanism=replace(TERMS.mechanism, noise_stddev_votes=5)))


@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_ledger_that_claims_another_version_of_its_terms_is_refused(schema3, path, version):
    """No digest covers the version; terms that are read under the wrong one are no terms."""
    if version == 3:
        for file in ledger_files(path):
            file.unlink()
        Ledger(path, TERMS).close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE chain SET version = ?", (version,))
    database.close()
    with pytest.raises(LedgerError, match="cannot go on"):
        Ledger(path, TERMS)
    with pytest.raises(LedgerError, match="not those of a ledger"):
        audit.verify(path)


@pytest.mark.parametrize("damage", ["no note", "empty note", "note of another", "edited", "cut short"])
def test_a_ledger_of_the_earlier_schema_that_does_not_verify_is_refused(schema2, damage):
    note = schema2.with_name("ledger.sqlite.lock")
    if damage == "no note":
        note.unlink()
    elif damage == "empty note":
        note.write_text("")
    elif damage == "note of another":
        note.write_text(f"{4:020d} {'0' * 64}\n")
    else:
        change = "UPDATE entries SET payload = replace(payload, 'first', 'fisrt')"
        with sqlite3.connect(schema2) as database:
            database.execute(change if damage == "edited" else "DELETE FROM entries WHERE number > 3")
        database.close()
    before = schema2.read_bytes()
    with pytest.raises(LedgerError, match=r"ledger\.sqlite.*copy"):
        Ledger(schema2, TERMS)
    assert schema2.read_bytes() == before
    assert not head_path(schema2).exists()


def test_a_migration_that_was_interrupted_is_done_again(schema2):
    Ledger(schema2, TERMS).close()
    kept = schema2.parent / "ledger.schema2.sqlite"
    shutil.copy(kept, schema2)  # the head is of the new ledger, and the ledger is still the old one
    schema2.with_name("ledger.sqlite.lock").write_text("")
    note = sqlite3.connect(kept).execute("SELECT digest FROM entries WHERE number = 4").fetchone()[0]
    schema2.with_name("ledger.sqlite.lock").write_text(f"{4:020d} {note}\n")
    assert holds_all(schema2)
