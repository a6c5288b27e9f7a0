"""A run and its ledger: all that was charged is stated, and a lost or older ledger is never replaced."""

import dataclasses
import io
import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from small_runs import open_terms, read_json, run

from aggregator.ledger import Ledger
from aggregator.mechanism import Outcome
from aggregator.session import epsilon_fixed_beforehand, query_key
from aggregator.store import LedgerError, ledger_files
from fairpate.cli.summaries import outcome
from fairpate.data import load_data
from fairpate.methods.voting import choose_queries
from fairpate.pages import epsilon_text
from fairpate.privacy.accountant import ConfidentGnmaxQueries, ConfidentGnmaxVotes, epsilon, epsilon_data_dependent
from fairpate.releases.directory import RunDirectory, RunDirectoryError, read_statement, read_votes, write_votes
from fairpate.releases.run_ledger import state_for_service
from fairpate.run.publication import write_card
from fairpate.types import REMARKS
from student.student import load_student

pytestmark = pytest.mark.usefixtures("light_runs")


def test_what_was_spent_is_the_price_of_the_votes_the_ledger_holds(finished):
    folder, config = finished
    with Ledger(folder.ledger, open_terms(folder)) as ledger:
        touched = [charge.votes for charge in ledger.charges if charge.outcome.is_charged]
    mechanism = config.aggregator.mechanism
    event = ConfidentGnmaxVotes(votes_QC=np.array(touched), **dataclasses.asdict(mechanism))
    spent = epsilon_data_dependent([event], target_delta=1e-5)
    costs = read_json(folder.private / "costs.json")
    assert costs["epsilon_data_dependent"] == pytest.approx(spent.epsilon, rel=1e-9)
    assert costs["order"] == spent.order


def test_a_ledger_that_is_gone_or_of_an_older_day_is_not_replaced(finished, tmp_path):
    folder, config = finished
    for damage in ("gone", "older"):
        copy = tmp_path / damage
        shutil.copytree(folder.root, copy)
        for file in ledger_files(copy / "private/ledger.sqlite"):
            file.unlink()
        if damage == "older":
            Ledger(copy / "private/ledger.sqlite", open_terms(folder)).close()
        released = (copy / "public/labels.parquet").read_bytes()
        with pytest.raises(RunDirectoryError, match=r"ledger\.sqlite"):
            run(config.model_copy(update={"out": copy}))
        assert (copy / "public/labels.parquet").read_bytes() == released


@pytest.mark.parametrize("kept", ["labels.parquet", "statement.json", "student.safetensors", "report.html"])
def test_no_ledger_is_made_where_anything_was_released(finished, tmp_path, kept):
    folder, config = finished
    copy = tmp_path / "copy"
    shutil.copytree(folder.root, copy)
    for file in [*ledger_files(copy / "private/ledger.sqlite"), *(copy / "public").iterdir()]:
        if file.name != kept:
            file.unlink()
    with pytest.raises(RunDirectoryError, match=rf"sqlite: this ledger is missing, although .*{kept} was released"):
        run(config.model_copy(update={"out": copy}))
    assert not ledger_files(copy / "private/ledger.sqlite")


def test_an_older_ledger_that_lacks_only_refusals_is_noticed_too(finished, tmp_path):
    folder, config = finished
    copy = tmp_path / "copy"
    shutil.copytree(folder.root, copy)
    statement = read_json(copy / "public/statement.json")
    statement["queries"]["submitted"] += 1  # as if one more had been refused since
    (copy / "public/statement.json").write_text(json.dumps(statement))
    with pytest.raises(RunDirectoryError, match=r"lacks 1 of \d+ queries"):
        run(config.model_copy(update={"out": copy}))


def test_votes_on_other_records_are_not_used(finished, tmp_path):
    folder, config = finished
    copy = tmp_path / "copy"
    shutil.copytree(folder.root, copy)
    votes = read_votes(folder.votes)
    write_votes(dataclasses.replace(votes, groups_Q=1 - votes.groups_Q), copy / "private/votes.parquet")
    with pytest.raises(RunDirectoryError, match="votes on other records"):
        run(config.model_copy(update={"out": copy}))


def test_votes_of_other_teachers_are_refused_by_the_ledger(finished, tmp_path):
    folder, config = finished
    copy = tmp_path / "copy"
    shutil.copytree(folder.root, copy)
    write_votes(dataclasses.replace(read_votes(folder.votes), ensemble="others"), copy / "private/votes.parquet")
    with pytest.raises(LedgerError, match="ensemble"):
        run(config.model_copy(update={"out": copy}))


def test_what_a_service_asked_of_the_ledger_is_stated_too(finished, tmp_path):
    folder, config = finished
    copy = tmp_path / "copy"
    shutil.copytree(folder.root, copy)
    with Ledger(copy / "private/ledger.sqlite", open_terms(folder)) as ledger:
        reserved = ledger.reserve(["answered", "open"], [0, 1], np.array([[40] + [0] * 9, [40] + [0] * 9]))
        ledger.commit(reserved[:1], [Outcome(verdict="answer", label=0)])
    again = run(config.model_copy(update={"out": copy}))
    before, after = (read_statement(run_directory) for run_directory in (folder, again))
    assert after.queries.submitted == before.queries.submitted + 1
    assert after.queries.answered == before.queries.answered + 1
    mechanism = dataclasses.asdict(config.aggregator.mechanism)
    submitted = ConfidentGnmaxQueries(count=before.queries.submitted + 2, **mechanism)
    assert after.queries.epsilon_submitted == epsilon([submitted], target_delta=1e-5).epsilon
    assert before.epsilon == before.queries.epsilon_submitted
    assert after.epsilon == open_terms(folder).budget.epsilon > after.queries.epsilon_submitted
    assert f"ε = {epsilon_text(after.epsilon)}" in after.remarks[0]
    own = before.queries.answered
    words = f"trained on {own} of these labels: the other 1 answer queries from outside the run."
    for page in (again.public_report, again.private_report):
        assert words in page.read_text(encoding="utf-8")
    assert "was trained on these labels." in folder.public_report.read_text(encoding="utf-8")
    for deleted in (False, True):  # a student that is trained anew learns from the labels of the run, as before
        if deleted:
            again.student.unlink()
            again = run(config.model_copy(update={"out": copy}))
        assert load_student(again.student).card.num_training_labels == own
    printed = io.StringIO()
    Console(file=printed, width=120).print(outcome(again).words)
    assert f"{own} of these labels, those of the run's own queries" in printed.getvalue()


def test_with_earlier_releases_no_run_costs_less_than_alone(small_config, tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    config = small_config(tmp_path / "run", "noise=os_entropy", "names_earlier=true")
    folder = run(config)
    with Ledger(folder.ledger, open_terms(folder)) as ledger:  # as a service that answers one more
        reserved = ledger.reserve(["answered"], [0], np.array([[12] + [0] * 9]))
        ledger.commit(reserved, [Outcome(verdict="answer", label=0)])
    statement = read_statement(run(config))
    assert statement.epsilon == open_terms(folder).budget.epsilon > statement.queries.epsilon_submitted
    assert statement.epsilon_with_earlier == statement.epsilon


def test_before_a_service_answers_the_statement_is_the_bound_of_the_ledger(finished, tmp_path):
    folder, config = finished
    copy = RunDirectory(root=tmp_path / "run")
    shutil.copytree(folder.root, copy.root)
    before, plan = read_statement(copy), config.plan(load_data(config.data))
    terms = plan.terms("any")
    state_for_service(copy, terms)
    stated = read_statement(copy)
    assert stated.epsilon == epsilon_fixed_beforehand(terms) > before.epsilon
    assert stated.remarks == (*before.remarks, REMARKS["answered_by_service"])
    write_card(copy.root)
    assert read_json(copy.public / "card.json")["privacy"]["epsilon"] == stated.epsilon
    state_for_service(copy, terms)
    assert read_statement(copy) == stated


def test_a_reservation_that_a_crash_left_open_raises_the_stated_epsilon(finished, tmp_path):
    folder, config = finished
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copytree(folder.root, copy, dirs_exist_ok=True)
    for file in [*ledger_files(copy / "private/ledger.sqlite"), *(copy / "public").iterdir()]:
        file.unlink()
    votes = read_votes(folder.votes)
    queries = choose_queries(load_data(config.data), config.queries)
    key = query_key(queries.x[0].numpy(), int(queries.z[0]))
    with Ledger(copy / "private/ledger.sqlite", open_terms(folder)) as ledger:
        ledger.reserve([key], [int(queries.z[0])], votes.votes_QC[:1])
    again = run(config.model_copy(update={"out": copy}))
    assert pq.read_table(again.labels).equals(pq.read_table(folder.labels))
    before, after = (read_statement(run_directory).epsilon for run_directory in (folder, again))
    assert after > before
