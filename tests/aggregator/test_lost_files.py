"""Files of a ledger that are removed, cut short, replaced or linked, while it is open, after it was closed and after a
crash: the same answers or a refusal that names the file and the remedy, and never a fresh budget."""

import hashlib
import hmac
import itertools
import json
import os
import shutil
import sqlite3
from dataclasses import asdict, replace

import httpx
import numpy as np
import pytest
from serving import TERMS, running

from aggregator.ledger import audit, sqlite_store
from aggregator.ledger.chain import canonical
from aggregator.ledger.entries import Asker, OwnLimit
from aggregator.ledger.files import LedgerError, head_path, ledger_files
from aggregator.ledger.ledger import Ledger
from aggregator.mechanism import Outcome

VOTES = np.array([[40, 15, 5]])
ANSWER, REFUSAL = Outcome(verdict="answer", label=0), Outcome(verdict="fairness")
NAMES = ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "ledger.head")
SUBSETS = [chosen for count in range(1, 5) for chosen in itertools.combinations(NAMES, count)]


def earlier_terms():
    """As earlier versions stored them: the unit stood beside a plan to publish, not in it."""
    values = asdict(TERMS)
    del values["publication"]["unit"]
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "private"
    folder.mkdir()
    return folder / "ledger.sqlite"


def reserve(ledger, key):
    return ledger.reserve([key], [1], VOTES)


def fill(ledger):
    """Two answers, and a reservation that never gets one."""
    for key in ("first", "second"):
        ledger.commit(reserve(ledger, key), [ANSWER])
    reserve(ledger, "open")


def holds_all(path, *, create=True):
    with Ledger(path, TERMS, create=create) as ledger:
        return ledger.num_reservations == 3 and ledger.outcome("first") == ledger.outcome("second") == ANSWER


@pytest.fixture
def killed(path, tmp_path):
    """A folder as a crash leaves it: everything since the start is in the write-ahead log."""
    copy = tmp_path / "killed"
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
        shutil.copytree(path.parent, copy)
    return copy / path.name


@pytest.mark.parametrize("removed", SUBSETS, ids=" ".join)
def test_after_a_crash_no_missing_file_gives_a_fresh_budget(killed, removed):
    for name in removed:
        (killed.parent / name).unlink()
    if removed == ("ledger.sqlite-shm",):  # an index of the log, which is made again
        assert holds_all(killed)
        return
    for create in (False,) if len(removed) == 4 else (False, True):
        with pytest.raises(LedgerError, match=r"ledger\.(sqlite|head).*from one copy"):
            Ledger(killed, TERMS, create=create)
    assert not any((killed.parent / name).exists() for name in set(removed) - {NAMES[2]})


@pytest.mark.parametrize("removed", [chosen for chosen in SUBSETS if set(chosen) < {NAMES[0], NAMES[3]}], ids=" ".join)
def test_after_an_orderly_end_no_missing_file_gives_a_fresh_budget(path, removed):
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
    for name in removed:
        (path.parent / name).unlink()
    with pytest.raises(LedgerError, match=r"ledger\.(sqlite|head).*from one copy"):
        Ledger(path, TERMS)


def test_a_ledger_is_made_only_where_that_is_asked_for(path):
    with pytest.raises(LedgerError, match="is gone"):
        Ledger(path, TERMS, create=False)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("name", [NAMES[0], NAMES[1], NAMES[3]])
@pytest.mark.parametrize("left", [0, 1, 2])
def test_after_a_crash_a_file_that_was_cut_short_is_noticed(killed, name, left):
    file = killed.parent / name
    os.truncate(file, left * file.stat().st_size // 3)
    try:
        assert holds_all(killed)  # the log holds every page of so small a ledger
        assert name == "ledger.sqlite"
    except LedgerError as error:
        assert "from one copy" in str(error) or "from a copy" in str(error)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_from_an_older_copy_is_refused_or_changes_nothing(path, tmp_path, name):
    older = tmp_path / "older"
    with Ledger(path, TERMS) as ledger:
        ledger.commit(reserve(ledger, "first"), [ANSWER])
        shutil.copytree(path.parent, older)
        ledger.commit(reserve(ledger, "second"), [ANSWER])
        reserve(ledger, "open")
        killed = shutil.copytree(path.parent, tmp_path / "killed") / path.name
    shutil.copy(older / name, killed.parent / name)
    try:
        assert holds_all(killed)
        assert name != "ledger.sqlite-wal"
    except LedgerError as error:
        assert "from one copy" in str(error)


def removed(file, _):
    file.unlink()


def replaced(file, _):
    copy = file.with_suffix(".tmp")
    shutil.copy(file, copy)
    copy.replace(file)


def linked(file, elsewhere):
    other = shutil.copy(file, elsewhere / "other")
    file.unlink()
    file.symlink_to(other)


def linked_hard(file, elsewhere):
    other = shutil.copy(file, elsewhere / "other")
    file.unlink()
    file.hardlink_to(other)


def emptied(file, _):
    os.truncate(file, 0)


CHANGES = [(removed, name) for name in NAMES] + [(replaced, name) for name in NAMES]
CHANGES += [(change, name) for change in (linked, linked_hard, emptied) for name in NAMES if name != NAMES[2]]


@pytest.mark.parametrize(("change", "name"), CHANGES, ids=lambda value: getattr(value, "__name__", value))
def test_an_open_ledger_whose_file_was_changed_writes_and_answers_no_more(path, tmp_path, change, name):
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
        reserved = reserve(ledger, "key")
        change(path.parent / name, tmp_path)
        for write in (lambda: ledger.commit(reserved, [REFUSAL]), lambda: reserve(ledger, "other"), ledger.check):
            with pytest.raises(LedgerError, match=rf"{name} (was|cannot be found).*restore all its files"):
                write()
        assert ledger.outcome("key") is None


def test_files_that_were_restored_under_a_refusing_ledger_survive_its_end(path, tmp_path):
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
        copy = shutil.copytree(path.parent, tmp_path / "copy")
        for file in ledger_files(path):
            file.unlink()
        with pytest.raises(LedgerError):
            reserve(ledger, "key")
        shutil.copytree(copy, path.parent, dirs_exist_ok=True)
    assert holds_all(path, create=False)


@pytest.mark.parametrize("names", [NAMES[:3], NAMES[1:2], NAMES[3:], NAMES], ids=" ".join)
def test_a_service_whose_files_vanish_answers_what_it_answered_and_nothing_else(path, names):
    ask = [{"id": 0}, {"id": 1}]
    with running(path) as url, httpx.Client(base_url=url, timeout=60) as http:
        first = http.post("/v1/queries", json={"queries": ask}).json()
        for name in names:
            (path.parent / name).unlink()
        assert http.post("/v1/queries", json={"queries": [{"id": 2}]}).status_code == 503
        assert http.post("/v1/queries", json={"queries": ask}).json() == first
    with pytest.raises(LedgerError, match="from one copy"):
        Ledger(path, TERMS, create=False)


def test_a_ledger_behind_a_link_is_refused(path, tmp_path):
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
    linked(path, tmp_path)
    with pytest.raises(LedgerError, match="is a link"):
        Ledger(path, TERMS)


@pytest.mark.parametrize("stage", ["head", "ledger"])
def test_a_ledger_whose_making_was_interrupted_is_made(path, stage):
    Ledger(path, TERMS).close()
    made = path.with_name(path.name + ".new")
    path.replace(made)
    if stage == "ledger":  # a crash before the head was there
        head_path(path).unlink()
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
    assert not made.exists()
    assert holds_all(path)


def test_a_head_without_entries_is_no_licence_to_start_again(path):
    Ledger(path, TERMS).close()
    empty = head_path(path).read_bytes()
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
    path.unlink()
    head_path(path).write_bytes(empty)
    with pytest.raises(LedgerError, match="is gone"):
        Ledger(path, TERMS)


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
    assert holds_all(schema2, create=False)
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
    assert holds_all(schema4, create=False)
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
    assert holds_all(schema2, create=False)


def test_a_ledger_that_is_replaced_while_it_is_opened_is_refused_and_let_go(path, monkeypatch):
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
    connect = sqlite_store.connect

    def replaced(asked):
        other = asked.with_suffix(".other")
        shutil.copyfile(asked, other)
        other.replace(asked)
        return connect(asked)

    with monkeypatch.context() as changed:
        changed.setattr(sqlite_store, "connect", replaced)
        with pytest.raises(LedgerError, match="was replaced while it was opened"):
            Ledger(path, TERMS)
    assert holds_all(path)
