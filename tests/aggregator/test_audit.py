"""Looking at a ledger from outside: whole or refused, complete, and nothing is written beside it."""

import dataclasses
import json
import sqlite3

import numpy as np
import pyarrow.parquet as pq
import pytest
from serving import POOL, TERMS, open_backend, table_votes

from aggregator import ledger_audit
from aggregator.ledger import Ledger
from aggregator.store import LedgerError
from fairpate.privacy.accountant import ConfidentGnmaxQueries, epsilon
from fairpate.types import UserError

pytestmark = pytest.mark.usefixtures("light_runs")


@pytest.fixture
def path(tmp_path):
    """A ledger of twelve queries with outcomes and one that a crash left open."""
    path = tmp_path / "run" / "ledger.sqlite"
    backend = open_backend(path)
    questions = [POOL.questions[number] for number in range(12)]
    by_key = {question.query.key: question for question in questions}
    backend.session.ask(
        [question.query for question in questions], lambda new: table_votes([by_key[query.key] for query in new])
    )
    backend.ledger.reserve(["left-open"], [1], np.array([[60, 0, 0]]))
    backend.close()
    return path


def test_a_verified_ledger_is_told_in_numbers(path):
    found = ledger_audit.verify(path)
    assert (found.reservations, found.queries, found.answered + found.refused, found.open) == (13, 13, 12, 1)
    submitted = ConfidentGnmaxQueries(count=13, **dataclasses.asdict(TERMS.mechanism))
    assert found.epsilon_submitted == epsilon([submitted], target_delta=1e-5).epsilon
    assert "10000 queries" in found.budget


def test_rows_are_the_charges_of_the_ledger(path):
    rows = ledger_audit.rows(path)
    with Ledger(path, TERMS) as ledger:
        charges = ledger.charges
    assert [row.key for row in rows] == [charge.key for charge in charges]
    assert [row.votes for row in rows] == [charge.votes for charge in charges]
    assert [row.outcome.label for row in rows[:-1]] == [charge.outcome.label for charge in charges[:-1]]
    last = rows[-1].to_json()
    assert (last["verdict"], last["label"]) == ("open", None)


def test_reading_needs_no_lock_and_leaves_the_folder_as_it_is(path):
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    ledger_audit.verify(path)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
    with Ledger(path, TERMS) as ledger:
        ledger.reserve(["meanwhile"], [0], np.array([[60, 0, 0]]))
        assert ledger_audit.verify(path).reservations == 14


def test_a_changed_ledger_is_not_described(path, tmp_path):
    database = sqlite3.connect(path)
    with database:
        database.execute("UPDATE entries SET payload = replace(payload, '0', '1') WHERE number = 2")
    database.close()
    for look in (ledger_audit.verify, ledger_audit.rows, lambda p: ledger_audit.export(p, tmp_path / "out.json")):
        with pytest.raises(LedgerError, match="entry 2 was changed"):
            look(path)
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("ending", [".json", ".parquet"])
def test_an_export_holds_every_row_and_the_terms_for_its_owner_alone(path, tmp_path, ending):
    out = tmp_path / f"export{ending}"
    ledger_audit.export(path, out)
    if ending == ".json":
        content = json.loads(out.read_text())
        rows, terms = content["rows"], content["terms"]
    else:
        table = pq.read_table(out)
        rows, terms = table.to_pylist(), json.loads(table.schema.metadata[b"terms"])
    assert [(row["key"], tuple(row["votes"])) for row in rows] == [
        (row.key, row.votes) for row in ledger_audit.rows(path)
    ]
    assert terms["mechanism"] == {"name": "confident_gnmax", "parameters": dataclasses.asdict(TERMS.mechanism)}
    assert out.stat().st_mode & 0o077 == 0


def test_an_export_replaces_nothing_and_needs_a_known_ending(path, tmp_path):
    (tmp_path / "there.json").write_text("precious")
    for name in ("there.json", "other.csv"):
        with pytest.raises(UserError, match=name):
            ledger_audit.export(path, tmp_path / name)
    assert (tmp_path / "there.json").read_text() == "precious"
