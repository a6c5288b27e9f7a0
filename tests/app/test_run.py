"""One run of any method: what it leaves, publishes and prices, and what a repeated command does not do again."""

import dataclasses
import hashlib
import io
import json
import math
import os
import re
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from rich.console import Console

from aggregator.budget import epsilon_fixed_beforehand
from aggregator.files import LedgerError, ledger_files
from aggregator.ledger import Ledger
from aggregator.mechanism import Outcome
from aggregator.session import AggregatorSession, query_key
from aggregator.terms import LedgerTerms
from fairpate.app.card import write_card
from fairpate.app.odometer import LimitReachedError, Odometer
from fairpate.app.progress import Reporter
from fairpate.app.release import ANSWERED_BY_SERVICE, choose_queries, ledger_terms, state_for_service
from fairpate.app.run import finished_run, run_method
from fairpate.app.rundir import (
    RunDirectory,
    RunDirectoryError,
    config_digest,
    create_run_directory,
    open_run_directory,
    read_statement,
)
from fairpate.app.summary import summarise
from fairpate.app.tables import read_votes, write_votes
from fairpate.config import ConfigError, DataConfig, RayConfig
from fairpate.data import find_entry, load_dataset
from fairpate.data.dataset import SPLIT_NAMES
from fairpate.evaluation.page import epsilon_text
from fairpate.methods import find_method, method_names
from fairpate.methods.load import configured, load_method
from fairpate.privacy.accountant import ConfidentGnmaxQueries, ConfidentGnmaxVotes, epsilon, epsilon_data_dependent
from fairpate.privacy.smooth_sensitivity import SmoothRelease
from fairpate.types import PrivacyStatement, RunRecord
from student.predict import load_student

FILES = {"student.safetensors", "statement.json", "record.json", "metrics.json", "report.html"}
QUIET = Reporter(quiet=True)


def run(config):
    return run_method(config, QUIET)


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_run_directory_holds_what_it_promises(finished):
    folder, _config = finished
    assert {path.name for path in folder.public.iterdir()} == FILES | {"labels.parquet"}
    assert {"teachers", "votes.parquet", "ledger.sqlite", "report.html"} <= {p.name for p in folder.private.iterdir()}
    assert stat.S_IMODE(folder.private.stat().st_mode) == 0o700
    assert yaml.safe_load(folder.config.read_text())["teachers"]["num_teachers"] == 12
    assert read_json(folder.environment)["libraries"]["torch"].startswith("2.")
    assert not list(folder.root.rglob("*.tmp"))


def test_the_statement_prices_every_query_that_was_submitted(finished):
    folder, _config = finished
    statement = read_json(folder.statement)
    queries = statement["queries"]
    refused = queries["rejected_confidence"] + queries["rejected_fairness"] + queries["refused_free"]
    assert queries["answered"] + refused == queries["submitted"] == 80
    assert queries["epsilon_sanitised"] is None
    assert statement["noise"] == "seeded: not private"
    assert statement["tuning_accounted"] is False

    # The mechanism's curve is alpha (1 / (2 s1^2) + 1 / s2^2) per query; converted here over a fine grid of orders.
    slope = queries["submitted"] * (1 / (2 * 3**2) + 1 / 2**2)
    orders = np.linspace(1.01, 60, 20_000)
    delta = statement["delta"]
    epsilon = slope * orders + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    assert epsilon.min() <= statement["epsilon"] == queries["epsilon_submitted"] <= 1.02 * epsilon.min()


def test_released_labels_are_the_ledger_s_answers_and_nothing_else(finished):
    folder, config = finished
    labels = pq.read_table(folder.labels)
    assert labels.column_names == ["record_id", "group", "label"]
    public = load_dataset(config.data).public
    group_of = dict(zip(public.record_id, public.z.tolist(), strict=True))
    assert [group_of[record_id] for record_id in labels["record_id"].to_pylist()] == labels["group"].to_pylist()
    assert labels.num_rows == read_json(folder.statement)["queries"]["answered"]


def test_the_published_student_predicts_what_its_metrics_say(finished):
    folder, config = finished
    metrics, test = read_json(folder.metrics), load_dataset(config.data).test
    prediction = load_student(folder.student).predict(test.x, test.z.numpy())
    correct = prediction.labels == test.y.numpy()
    assert metrics["coverage"] == pytest.approx(prediction.answered.mean())
    assert metrics["accuracy"] == pytest.approx(correct[prediction.answered].mean())
    assert metrics["without_refusals"]["accuracy"] == pytest.approx(correct.mean())
    assert metrics["coverage"] < metrics["without_refusals"]["coverage"] == 1


def test_the_operator_sees_three_prices_in_the_right_order(finished):
    folder, _ = finished
    costs = read_json(folder.private / "costs.json")
    assert costs["epsilon_as_in_paper"] < costs["epsilon_data_dependent"] <= costs["epsilon_data_independent"]
    assert costs["epsilon_data_independent"] == pytest.approx(read_json(folder.statement)["epsilon"], rel=1e-12)


def test_what_was_spent_is_the_price_of_the_votes_the_ledger_holds(finished):
    folder, config = finished
    with Ledger(folder.ledger, open_terms(folder)) as ledger:
        touched = [charge.reservation.votes for charge in ledger.charges if charge.outcome.is_charged]
    mechanism = config.aggregator.mechanism
    event = ConfidentGnmaxVotes(votes_QC=np.array(touched), **dataclasses.asdict(mechanism))
    spent = epsilon_data_dependent([event], target_delta=1e-5)
    costs = read_json(folder.private / "costs.json")
    assert costs["epsilon_data_dependent"] == pytest.approx(spent.epsilon, rel=1e-9)
    assert costs["order"] == spent.order


@pytest.mark.parametrize("name", ["public_report", "private_report"])
def test_the_reports_ask_for_nothing_from_elsewhere(finished, name):
    folder, _ = finished
    html = getattr(folder, name).read_text(encoding="utf-8")
    assert not re.search(r'(src|href)\s*=\s*"(?!#|data:)', html)
    assert "seeded" in html


def test_running_again_changes_nothing(finished):
    folder, config = finished
    kept = [folder.votes, folder.student, folder.labels, folder.statement, folder.metrics]
    before = {path: path.read_bytes() for path in kept}
    modified = folder.student.stat().st_mtime_ns
    run(config)
    assert {path: path.read_bytes() for path in kept} == before
    assert folder.student.stat().st_mtime_ns == modified


def test_a_lost_stage_is_done_again_with_the_same_result(finished, tmp_path):
    folder, config = finished
    copy = tmp_path / "copy"
    shutil.copytree(folder.root, copy)
    for lost in ("private/votes.parquet", "public/labels.parquet", "public/student.safetensors"):
        (copy / lost).unlink()
    again = run(config.model_copy(update={"out": copy}))
    for path in ("private/votes.parquet", "public/labels.parquet"):
        assert pq.read_table(copy / path).equals(pq.read_table(folder.root / path))
    assert read_json(again.metrics) == read_json(folder.metrics)


def test_a_damaged_student_is_named_and_made_again_from_the_labels_for_nothing(finished, tmp_path):
    run_directory, config = finished
    copy = RunDirectory(root=tmp_path / "copy")
    shutil.copytree(run_directory.root, copy.root)
    content, statement = copy.student.read_bytes(), copy.statement.read_bytes()
    copy.student.write_bytes(content[:-1])
    moved = config.model_copy(update={"out": copy.root})
    with pytest.raises(RunDirectoryError, match=r"student\.safetensors.*delete it.*at no privacy cost"):
        run(moved)
    copy.student.unlink()
    run(moved)
    assert (copy.student.read_bytes(), copy.statement.read_bytes()) == (content, statement)


def test_another_configuration_in_the_same_folder_is_refused_by_field(finished, small_config):
    _folder, config = finished
    other = config.model_copy(update={"seed": 1})
    with pytest.raises(RunDirectoryError, match="seed: 0 -> 1"):
        run(other)


def test_a_run_of_a_version_that_lacked_a_field_goes_on(finished, tmp_path):
    """It ran with what is the default now, so its pages are written again; another value is another run."""
    folder, config = finished
    shutil.copytree(folder.root, tmp_path / "run")
    older = RunDirectory(root=tmp_path / "run")
    values = yaml.safe_load(older.config.read_text())
    del values["student"]["unlabelled_ratio"], values["student"]["fit"]["label_smoothing"]
    older.config.write_text(yaml.safe_dump(values))
    found, opened = finished_run(older.root)
    assert run(opened.model_copy(update={"out": found.root})).student.read_bytes() == folder.student.read_bytes()
    student = config.student.model_copy(update={"unlabelled_ratio": 7})
    with pytest.raises(RunDirectoryError, match=r"student\.unlabelled_ratio: 4 -> 7"):
        run(config.model_copy(update={"out": found.root, "student": student}))


def test_a_folder_that_is_no_run_is_left_alone(small_config, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunDirectoryError, match="not empty"):
        run(small_config(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_more_queries_than_public_records_are_refused_before_anything_starts(small_config, tmp_path):
    with pytest.raises(ConfigError, match=r"num_queries: 400 queries asked, 300 different public records"):
        run(small_config(tmp_path / "run", "aggregator.num_queries=400"))
    assert not (tmp_path / "run").exists()


def test_a_run_without_noise_from_a_seed_says_so_and_counts_once(small_config, tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    folder = run(small_config(tmp_path / "run", "noise=os_entropy"))
    assert read_json(folder.statement)["noise"] == "os_entropy"
    assert "seeded" not in folder.public_report.read_text(encoding="utf-8")
    statement = read_json(folder.statement)
    assert (statement["earlier_releases"], statement["remarks"]) == (0, [])
    again = run(small_config(tmp_path / "run", "noise=os_entropy"))
    assert read_json(again.statement) == statement
    (total,) = Odometer().totals(delta=1e-5)
    assert (total.data, total.releases, total.not_private) == ("color_digits", 1, 0)
    assert total.epsilon == statement["epsilon"] == statement["epsilon_with_earlier"]
    Odometer().set_limit("color_digits", "record", epsilon=1.5 * total.epsilon, delta=1e-5)
    with pytest.raises(LimitReachedError, match="color_digits, unit record: 1 releases"):
        run(small_config(tmp_path / "other", "noise=os_entropy", "seed=1"))
    assert not (tmp_path / "other/private/teachers").exists()


@pytest.mark.parametrize("stage", [pytest.param("teachers", marks=pytest.mark.slow), "ledger.sqlite"])
def test_killed_in_the_middle_and_run_again_gives_the_undisturbed_labels(finished, small_overrides, tmp_path, stage):
    out = tmp_path / "run"
    idp3 = "student.idp3={max_disparity: 0.1, min_count: 10}"
    settings = [argument for value in [*small_overrides, idp3] for argument in ("--set", value)]
    (tmp_path / "empty.yaml").write_text("")
    command = [sys.executable, "-m", "fairpate", "run", str(tmp_path / "empty.yaml"), "--out", str(out), *settings]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)  # noqa: S603
    wait_for(out / "private" / stage, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)

    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)  # noqa: S603
    assert again.returncode == 0, again.stderr
    folder, _ = finished
    assert pq.read_table(out / "public/labels.parquet").equals(pq.read_table(folder.labels))
    stated, undisturbed = read_json(out / "public/statement.json"), read_json(folder.statement)
    if stated != undisturbed:  # the kill hit answers that were paid for and not yet stored: they are paid for again
        wasted = [event["count"] for event in stated["events"]]
        assert wasted == [2 * event["count"] for event in undisturbed["events"]]
        assert stated["epsilon"] > undisturbed["epsilon"]


def test_ray_gives_what_this_process_gives_bit_for_bit(finished, tmp_path, ray_session):
    alone, config = finished
    update = {"out": tmp_path / "run", "ray": RayConfig(num_actors=2, num_cpus=0.5)}
    with_ray = run(config.model_copy(update=update))
    for path in [*sorted(alone.teachers.iterdir()), alone.votes, alone.labels, alone.statement, alone.metrics]:
        assert (with_ray.root / path.relative_to(alone.root)).read_bytes() == path.read_bytes(), path
    one, other = (load_student(folder.student).network.state_dict() for folder in (alone, with_ray))
    assert all(torch.equal(one[name], other[name]) for name in one | other)


def test_a_run_without_actors_imports_no_ray(small_overrides, tmp_path):
    settings = [argument for value in small_overrides for argument in ("--set", value)]
    watched = "import sys; from fairpate.app.cli import main; main(); sys.exit('ray' in sys.modules)"
    command = [sys.executable, "-c", watched, "run", "--out", str(tmp_path / "run"), *settings]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)  # noqa: S603
    assert ended.returncode == 0, ended.stderr


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
    with pytest.raises(RunDirectoryError, match=rf"ledger\.sqlite: gone, although .*{kept} was released"):
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
    words = f"trained on {own} of these labels: the other 1 answer queries beside the run’s own."
    for page in (again.public_report, again.private_report):
        assert words in page.read_text(encoding="utf-8")
    assert "was trained on these labels." in folder.public_report.read_text(encoding="utf-8")
    for deleted in (False, True):  # a student that is trained anew learns from the labels of the run, as before
        if deleted:
            again.student.unlink()
            again = run(config.model_copy(update={"out": copy}))
        assert load_student(again.student).card.num_training_labels == own
    printed = io.StringIO()
    Console(file=printed, width=120).print(summarise(again))
    assert f"{own} of these labels, those of the run's own queries" in printed.getvalue()


def test_with_earlier_releases_no_run_costs_less_than_alone(small_config, tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    config = small_config(tmp_path / "run", "noise=os_entropy")
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
    before, plan = read_statement(copy), config.plan(load_dataset(config.data))
    terms = ledger_terms(plan, load_dataset(config.data), ensemble="any")
    state_for_service(copy, terms)
    stated = read_statement(copy)
    assert stated.epsilon == epsilon_fixed_beforehand(terms) > before.epsilon
    assert stated.remarks == (*before.remarks, ANSWERED_BY_SERVICE)
    write_card(copy.root)
    assert read_json(copy.public / "card.json")["privacy"]["epsilon"] == stated.epsilon
    state_for_service(copy, terms)
    assert read_statement(copy) == stated


def test_a_run_stops_at_the_query_that_crosses_its_budget(small_config, tmp_path):
    mechanism = small_config(tmp_path).aggregator.mechanism
    priced = [
        epsilon([ConfidentGnmaxQueries(count=n, **dataclasses.asdict(mechanism))], target_delta=1e-5).epsilon
        for n in (40, 41)
    ]
    limit = sum(priced) / 2
    folder = run(small_config(tmp_path / "run", f"aggregator.budget={{epsilon: {limit!r}}}"))
    statement = read_statement(folder)
    assert statement.queries.submitted == 40
    assert statement.epsilon == statement.queries.epsilon_submitted == priced[0] < limit


def test_a_budget_without_room_for_one_query_ends_the_run(small_config, tmp_path):
    with pytest.raises(ConfigError, match=r"aggregator\.budget: .* no room for one query"):
        run(small_config(tmp_path / "run", "aggregator.budget={epsilon: 0.01}"))


ADMISSION = ("aggregator.admission={rounds: 4, fit: {epochs: 8}}",)


def test_admission_pays_for_fewer_rejections_and_gets_more_labels(small_config, tmp_path):
    found = {}
    for name, overrides in [("rounds", ADMISSION), ("in order", ())]:
        found[name] = read_statement(run(small_config(tmp_path / name, *overrides)))
    rounds, in_order = (found[name].queries for name in ("rounds", "in order"))
    assert rounds.rejected_fairness < in_order.rejected_fairness
    assert rounds.answered >= in_order.answered
    assert rounds.submitted <= in_order.submitted == 80
    assert rounds.answered / rounds.submitted > in_order.answered / in_order.submitted
    assert found["rounds"].epsilon == found["in order"].epsilon  # the cost of all 80
    assert found["in order"].epsilon == in_order.epsilon_submitted
    assert rounds.epsilon_submitted < found["rounds"].epsilon
    (remark,) = found["rounds"].remarks
    assert remark.startswith("Released labels may have decided")
    assert found["in order"].remarks == ()


def test_interrupted_between_rounds_the_same_queries_are_submitted_again(small_config, tmp_path):
    first = run(small_config(tmp_path / "first", *ADMISSION))
    config = small_config(tmp_path / "second", *ADMISSION)
    release, done = AggregatorSession.ask, []

    def interrupted(session, queries, vote):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(queries)
        return release(session, queries, vote)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(AggregatorSession, "ask", interrupted)
        run(config)
    second = run(config)
    assert pq.read_table(second.labels).equals(pq.read_table(first.labels))
    assert read_json(second.statement) == read_json(first.statement)


def test_admission_needs_to_know_how_many(small_config, tmp_path):
    with pytest.raises(ConfigError, match="Expected num_queries with admission"):
        small_config(tmp_path, ADMISSION[0], "aggregator.num_queries=null")


def test_a_planned_publication_is_made_once_stated_and_priced(small_config, tmp_path):
    plan = "{order: 2.0, beta: 0.1, noise_stddev: 5, scale_noise_stddev: 5}"
    config = small_config(
        tmp_path / "run", f"aggregator.publication={plan}", "aggregator.mechanism.noise_stddev_votes=4"
    )
    folder = run(config)
    statement, costs = read_json(folder.statement), read_json(folder.costs)
    submitted = ConfidentGnmaxQueries(count=80, **dataclasses.asdict(config.aggregator.mechanism))
    release = SmoothRelease(**config.aggregator.publication.model_dump())
    assert statement["epsilon"] == epsilon([submitted, release], target_delta=1e-5).epsilon
    assert costs["epsilon_data_independent"] == pytest.approx(statement["epsilon"], rel=1e-12)
    assert costs["epsilon_data_dependent"] < statement["epsilon"]
    assert statement["queries"]["epsilon_sanitised"] > 0
    assert "smooth-sensitivity release" in folder.public_report.read_text(encoding="utf-8")
    again = run(config)
    assert read_json(again.statement) == statement


def test_a_publication_that_smooth_sensitivity_does_not_cover_is_refused(small_config, tmp_path):
    plan = "{order: 30, beta: 0.1, noise_stddev: 5, scale_noise_stddev: 5}"
    with pytest.raises(ConfigError, match=r"aggregator\.publication: Expected 1 < order < 1 / \(2 beta\) = 5"):
        run(small_config(tmp_path / "run", f"aggregator.publication={plan}"))


def test_a_leaking_budget_needs_its_flag(small_config, tmp_path):
    with pytest.raises(ConfigError, match="accept_leak"):
        small_config(tmp_path, "aggregator.budget={kind: data_dependent, epsilon: 2}")


def test_equal_records_are_one_query(small_config, tmp_path):
    config = small_config(tmp_path / "run", "aggregator.num_queries=3")
    dataset = load_dataset(config.data)
    public = dataset.public
    doubled = public.take([0, 0, 1, 2])
    doubled = dataclasses.replace(doubled, record_id=("a", "again", "b", "c"))
    chosen = choose_queries(dataclasses.replace(dataset, public=doubled), config.aggregator)
    assert chosen.record_id == ("a", "b", "c")


def test_interrupted_before_anything_was_in_paper_it_starts_again(small_config, tmp_path):
    config = small_config(tmp_path / "run")
    folder = create_run_directory(config)
    folder.environment.unlink()
    shutil.rmtree(folder.public)
    assert run(config).statement.exists()


def test_a_report_is_not_written_for_an_unfinished_run(finished, tmp_path):
    folder, _ = finished
    copy = tmp_path / "copy"
    shutil.copytree(folder.root, copy)
    (copy / "public/student.safetensors").unlink()
    unfinished, _ = open_run_directory(copy)
    with pytest.raises(RunDirectoryError, match=r"student\.safetensors: missing"):
        unfinished.require_finished(with_votes=True)


def test_a_reservation_that_a_crash_left_open_raises_the_stated_epsilon(finished, tmp_path):
    folder, config = finished
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copytree(folder.root, copy, dirs_exist_ok=True)
    for file in [*ledger_files(copy / "private/ledger.sqlite"), *(copy / "public").iterdir()]:
        file.unlink()
    votes = read_votes(folder.votes)
    queries = choose_queries(load_dataset(config.data), config.aggregator)
    key = query_key(queries.x[0].numpy(), int(queries.z[0]))
    with Ledger(copy / "private/ledger.sqlite", open_terms(folder)) as ledger:
        ledger.reserve([key], [int(queries.z[0])], votes.votes_QC[:1])
    again = run(config.model_copy(update={"out": copy}))
    assert pq.read_table(again.labels).equals(pq.read_table(folder.labels))
    before, after = (read_statement(run_directory).epsilon for run_directory in (folder, again))
    assert after > before


def wait_for(path, process, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def open_terms(folder):
    """The terms that a ledger was made with, read from its file."""
    database = sqlite3.connect(folder.ledger)
    (text,) = database.execute("SELECT terms FROM chain").fetchone()
    database.close()
    return LedgerTerms.from_json(json.loads(text))


# Every method, on digits of two labels without their colour, where all of them can be trained.

METHODS = tuple(method_names())
UNPROTECTED = ("sgd", "f_ld")
ATTRIBUTE = ("pf_ld", "sf_pate", "dp_postprocessing", "dp_oracle_learner", "randomised_response")
RANDOMISED = ("dp_postprocessing", "dp_oracle_learner")  # fine-tuning would undo their mixing: refused there
ASKING = ("pate", "fairpate", "pate_s_pre", "pate_s_in", "sf_pate")
SMALL = {
    "noise": "seeded",
    "data": {"options": {"colour_as_feature": False}, "num_public": 120, "num_test": 200},
    "target": {"epsilon": 2, "delta": 1e-4, "accounting": "rdp"},
    "student": {"model": {"name": "mlp", "hidden": [16]}, "fit": {"epochs": 3}},
    "sgd": {"epochs": 3},
    "dp_sgd": {"epochs": 2, "batch_size": 200, "learning_rate": 1.0},
    "f_ld": {"warmup_epochs": 1, "epochs": 2},
    "pf_ld": {"warmup_epochs": 1, "epochs": 2},
    "dp_oracle_learner": {"num_rounds": 4, "min_share": 0.001},
    "randomised_response": {"learner": "f_ld"},
    "teachers": {"num_teachers": 10, "fit": {"epochs": 2}},
    "aggregator": {
        "num_queries": 40,
        "mechanism": {"threshold": 0, "threshold_stddev_votes": 1, "noise_stddev_votes": 1},
    },
    "ray": {"num_actors": 0},
}
CALIBRATION = "public_data.calibration={epochs: 2, batch_size: 64}"


@pytest.fixture(scope="module", autouse=True)
def two_labels():
    """Of the digits without their colour, five and more are one label; all other data sets stay as they are."""

    def load(config):
        dataset = load_dataset(config)
        if config.options.get("colour_as_feature", True):
            return dataset
        splits = {name: dataclasses.replace(s := getattr(dataset, name), y=(s.y >= 5).long()) for name in SPLIT_NAMES}
        return dataclasses.replace(dataset, **splits, label_names=("low", "high"))

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(run_method.__kwdefaults__, "load", load)
        yield


def config_of(method, out, *overrides):
    linear = ["student.model.name=logistic"] if method == "dp_oracle_learner" else []
    return configured(SMALL, [*linear, *overrides, f"out={out}"], method=method)


def train(out, method, *overrides):
    return run(config_of(method, out, *overrides))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One run of each method, made when it is first asked for; only to be read."""
    root = tmp_path_factory.mktemp("methods")

    def run_of(method):
        train(root / method, method)  # a second time goes on from what is there
        return finished_run(root / method)[0]

    return run_of


def weights(folder):
    return {n: v.flatten().tolist() for n, v in load_student(folder.student).network.state_dict().items()}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_leaves_the_same_files(trained, method):
    folder = trained(method)
    of_votes = {"labels.parquet"} if method in ASKING else set()
    assert {path.name for path in folder.public.iterdir()} - {folder.receipt.name} == FILES | of_votes
    record, statement = read_json(folder.record), read_json(folder.statement)
    assert set(record) == {field.name for field in dataclasses.fields(RunRecord)}
    assert (record["method"], record["data"], record["delta"]) == (method, "color_digits", 1e-4)
    assert 0 <= record["accuracy"] <= 1
    assert record["coverage"] == 1
    assert record["config"]["method"] == method
    assert set(statement) == {field.name for field in dataclasses.fields(PrivacyStatement)}
    assert (statement["method"], statement["delta"]) == (method, 1e-4)
    assert statement["unit"] == record["unit"] == ("sensitive attribute" if method in ATTRIBUTE else "record")
    assert statement["relation"] == ("replace one" if method in ATTRIBUTE else "add or remove one")
    assert (statement["queries"] is not None) == (method in ASKING)
    assert load_student(folder.student).card.model == config_of(method, None).student.model
    assert stat.S_IMODE(folder.private.stat().st_mode) == 0o700
    assert not list(folder.root.rglob("*.tmp"))
    if method in UNPROTECTED:
        assert statement["epsilon"] is record["epsilon"] is None
        assert "not private" in statement["noise"]
        assert not (folder.root / "public").exists()
    else:
        assert record["epsilon"] == statement["epsilon"] <= 2
        assert statement["noise"] == "seeded: not private"
        assert statement["events"]
        assert ({path.name for path in folder.private.iterdir()} == {"release.json"}) == (method not in ASKING)


@pytest.mark.parametrize("method", METHODS)
def test_report_and_card_open_any_run(trained, method, fairpate):
    folder = trained(method)
    before = {path: path.read_bytes() for path in folder.public.iterdir()}
    code, output, errors = fairpate("report", folder.root)
    assert (code, errors) == (0, "")
    assert f"{method} on color_digits, seed 0" in output
    assert {path: path.read_bytes() for path in before} == before
    if method in UNPROTECTED:
        assert "none: no guarantee" in output
        with pytest.raises(RunDirectoryError, match="publishes nothing"):
            write_card(folder.root)
    else:
        _, plain = write_card(folder.root)
        assert read_json(plain)["privacy"]["epsilon"] == read_json(folder.statement)["epsilon"]
    for path in set(folder.public.iterdir()) - set(before):
        path.unlink()


@pytest.mark.parametrize("method", [method for method in METHODS if method not in RANDOMISED])
def test_options_on_public_data_are_open_to_every_method_and_cost_nothing(trained, method, tmp_path):
    plain = trained(method)
    more = [f"storage={plain.teachers}"] if method in ASKING else []
    options = [
        *(CALIBRATION, "public_data.self_label={confidence: 0.1, fit: {epochs: 3}}"),
        *("public_data.pretrain={epochs: 1}", "student.idp3={max_disparity: 0.0, min_count: 10}"),
    ]
    folder = train(tmp_path / "run", method, *more, *options)
    found = finished_run(folder.root)[0]
    assert read_json(found.statement) == read_json(plain.statement)
    assert weights(found) != weights(plain)
    assert read_json(found.record)["coverage"] < 1
    assert {"without_refusals", "orders"} <= set(read_json(found.metrics))


def test_all_methods_see_the_same_splits_and_start_from_the_same_weights(tmp_path):
    """Without a step that moves them, DP-SGD and FairDP-SGD are the model they started from."""
    still = ("dp_sgd.epochs=1.0e-9", "dp_sgd.learning_rate=1.0e-30")
    first, second = (weights(train(tmp_path / method, method, *still)) for method in ("dp_sgd", "fair_dp_sgd"))
    assert first == second


def test_a_seeded_run_can_be_made_again_and_another_seed_changes_it(trained, tmp_path):
    first = trained("fair_dp_sgd")
    assert weights(train(tmp_path / "again", "fair_dp_sgd")) == weights(first)
    assert weights(train(tmp_path / "other", "fair_dp_sgd", "seed=1")) != weights(first)


def test_models_on_one_data_set_are_one_sum_and_older_ones_are_counted_too(tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    private = "noise=os_entropy"
    first, second = (train(tmp_path / f"run-{seed}", "dp_sgd", private, f"seed={seed}") for seed in range(2))
    alone, both = read_statement(first), read_statement(second)
    assert (alone.noise, alone.earlier_releases, both.earlier_releases) == ("os_entropy", 0, 1)
    assert both.epsilon < both.epsilon_with_earlier < both.epsilon + alone.epsilon
    assert "1 earlier result" in both.remarks[-1]
    counted = Odometer().totals(delta=both.delta)
    assert [(total.releases, total.epsilon) for total in counted] == [(2, both.epsilon_with_earlier)]
    Odometer().path.unlink()
    first.receipt.unlink()  # as a version without an odometer left it
    for seed in range(2):
        train(tmp_path / f"run-{seed}", "dp_sgd", private, f"seed={seed}")
    again = Odometer().totals(delta=both.delta)
    assert [(total.releases, total.epsilon) for total in again] == [(2, pytest.approx(both.epsilon_with_earlier))]


def test_a_model_that_would_pass_the_limit_is_not_released(tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    Odometer().set_limit("color_digits", "record", epsilon=1.0, delta=1e-4)
    with pytest.raises(LimitReachedError, match=r"color_digits, unit record: 0 releases.*the limit is 1"):
        train(tmp_path / "run", "dp_sgd", "noise=os_entropy")
    assert list((tmp_path / "run/public").iterdir()) == []
    assert not (tmp_path / "run/private/release.json").exists()


def copied(folder, to):
    """A copy of a run in another folder: what a repeated command finds."""
    return dataclasses.replace(folder, root=Path(shutil.copytree(folder.root, to)))


def test_a_released_model_is_not_trained_again(trained, tmp_path):
    folder = copied(trained("dp_sgd"), tmp_path / "run")
    model, record = folder.student.read_bytes(), folder.record.read_bytes()
    folder.record.unlink()
    folder.metrics.unlink()
    train(folder.root, "dp_sgd")
    assert (folder.student.read_bytes(), folder.record.read_bytes()) == (model, record)


def test_a_run_of_another_method_in_the_same_folder_is_refused_by_field(trained, tmp_path):
    folder = copied(trained("dp_sgd"), tmp_path / "run")
    for other in ("fair_dp_sgd", "fairpate"):
        with pytest.raises(RunDirectoryError, match=f"method: dp_sgd -> {other}"):
            train(folder.root, other)
    with pytest.raises(RunDirectoryError, match=r"dp_sgd\.epochs: 2.0 -> 3.0"):
        train(folder.root, "dp_sgd", "dp_sgd.epochs=3")


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_damaged_or_lost_model_is_never_released_twice(trained, tmp_path, length):
    folder = copied(trained("dp_sgd"), tmp_path / "run")
    statement = folder.statement.read_bytes()
    folder.student.write_bytes(folder.student.read_bytes()[:length])
    with pytest.raises(RunDirectoryError, match=r"student\.safetensors.*second release.*--out"):
        train(folder.root, "dp_sgd")
    folder.student.unlink()
    with pytest.raises(RunDirectoryError, match=r"student\.safetensors: gone.*second release"):
        train(folder.root, "dp_sgd")
    assert folder.statement.read_bytes() == statement
    assert not folder.student.exists()


def test_a_model_without_privacy_is_made_again(trained, tmp_path):
    folder = copied(trained("sgd"), tmp_path / "run")
    before = folder.student.read_bytes()
    folder.student.write_bytes(b"")
    with pytest.raises(RunDirectoryError, match=r"delete it and give the same command again"):
        train(folder.root, "sgd")
    folder.student.unlink()
    train(folder.root, "sgd")
    assert folder.student.read_bytes() == before


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"epsilon": 1}'])
def test_a_damaged_statement_is_named(trained, tmp_path, content):
    folder = copied(trained("dp_sgd"), tmp_path / "run")
    folder.statement.write_text(content)
    with pytest.raises(RunDirectoryError, match=r"statement\.json: damaged"):
        train(folder.root, "dp_sgd")


def test_zero_epochs_of_calibration_change_no_bit(trained, tmp_path):
    folder = train(tmp_path / "zero", "dp_sgd", "public_data.calibration={epochs: 0}")
    assert weights(folder) == weights(trained("dp_sgd"))


def test_the_relation_of_the_target_is_the_statements(tmp_path):
    target = ("target.relation=replace one", "target.accounting=pld")
    folder = train(tmp_path / "run", "dp_sgd", *target, "dp_sgd.epochs=1")
    statement = read_json(folder.statement)
    assert statement["relation"] == statement["events"][0]["relation"] == "replace one"
    assert read_json(folder.record)["relation"] == "replace one"


@pytest.mark.parametrize(
    ("method", "field", "setting", "words"),
    [
        ("sgd", "sgd.augment", "sgd.augment.rotation_degrees=5", "changes images"),
        ("sgd", "public_data.pretrain", "public_data.pretrain={epochs: 1}", "learns from images"),
        ("pate", "teachers.fit.augment", "teachers.fit.augment.erase=0.5", "changes images"),
        ("pate", "student.strong_augment", "student.strong_augment.erase=0.5", "changes images"),
    ],
)
def test_settings_for_images_are_refused_for_a_table(method, field, setting, words, tmp_path):
    table = dataclasses.replace(load_dataset(DataConfig()), kind="tabular")
    with pytest.raises(ConfigError, match=f"{field}: {words}"):
        run_method(config_of(method, tmp_path / "run", setting), QUIET, load=lambda _: table)
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_sure_of_nothing_labels_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"public_data\.self_label\.confidence: .* lower it"):
        train(tmp_path / "run", "dp_sgd", "public_data.self_label={confidence: 1.0}")


CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
OFFERED = [path for path in CONFIGS if "methods" not in yaml.safe_load(path.read_text())]


@pytest.mark.parametrize("path", OFFERED, ids=lambda path: path.stem)
def test_every_configuration_that_is_offered_is_valid_for_every_method(path):
    named = load_method(path)
    assert find_entry(named.data.name).complete_options(named.data.options)
    for method in METHODS:
        assert load_method(path, method=method).data == named.data


@pytest.mark.skipif("FAIRPATE_DATA" not in os.environ, reason="FAIRPATE_DATA is not set: a data set of two classes")
def test_a_printed_form_publishes_nothing(tmp_path):
    bank = ("data.name=bank", "data.num_public=100", "data.options={}")
    folder = train(tmp_path / "run", "pf_ld", "pf_ld.form=as_in_paper", *bank)
    assert not (folder.root / "public").exists()
    statement = read_json(folder.statement)
    assert statement["epsilon"] is None
    assert statement["epsilon_as_in_paper"] > 0


def test_a_model_that_is_trained_again_after_its_files_were_deleted_is_counted_twice(tmp_path, monkeypatch):
    """Its noise is drawn anew, so that both together tell more: a limit sees both."""
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    config = config_of("dp_sgd", tmp_path / "run", "noise=os_entropy", "target.epsilon=1")
    folder = run(config)
    first = folder.student.read_bytes()
    shutil.rmtree(folder.public)
    Odometer().set_limit("color_digits", "record", epsilon=1.01, delta=1e-4)
    with pytest.raises(LimitReachedError, match="1 releases"):
        run(config)
    assert not folder.student.exists()
    assert not folder.statement.exists()
    Odometer().set_limit("color_digits", "record", epsilon=10, delta=1e-4)
    run(config)
    assert folder.student.read_bytes() != first
    assert read_statement(folder).earlier_releases == 1
    (total,) = Odometer().totals(delta=1e-4)
    assert total.releases == 2


def test_a_digest_changes_with_what_a_method_reads_and_nothing_else():
    def digest(method, **sections):
        return config_digest(configured(sections, method=method))

    plain = digest("dp_sgd")
    unread = {"raco_dp": {"bound": 0.2}, "teachers": {"num_teachers": 7}, "f_ld": {"epochs": 3}}
    assert digest("dp_sgd", **unread) == plain
    assert digest("dp_sgd", dp_sgd={"clip_norm": 2.0}) != plain
    assert digest("raco_dp", raco_dp={"bound": 0.2}) != digest("raco_dp")
    assert not configured({"noise": "seeded"}, method="sgd").is_seeded
    assert configured({"noise": "seeded"}, method="dp_sgd").is_seeded


@pytest.mark.parametrize("method", METHODS)
def test_a_configuration_holds_what_its_method_reads_and_is_read_back(method):
    config = config_of(method, "somewhere")
    assert type(config) is find_method(method)
    again = configured(config.model_dump(mode="json"))
    assert again == config
    assert config_digest(again) == config_digest(config)


DECLARED = """
name: loans
task: pays back
rows: 600
files: [{path: loans.csv, sha256: SHA}]
columns:
  - {column: age, low: 18, high: 100}
  - {column: sex, values: [f, m]}
label: {column: paid, values: {defaults: no, pays: yes}}
groups:
  sex: {values: {female: f, male: m}}
identity: {key: [id]}
num_public: 100
num_validation: 0
"""


def test_records_of_ones_own_are_a_declaration_beside_their_file(tmp_path, fairpate, monkeypatch):
    """Known by its ending; from any folder; pinned; named in what is published, and its place is not."""
    own = tmp_path / "own"
    own.mkdir()
    rows = [f"{i},{18 + i % 60},{'fm'[i % 2]},{'yes' if i % 60 > 20 else 'no'}" for i in range(600)]
    (own / "loans.csv").write_text("id,age,sex,paid\n" + "\n".join(rows) + "\n")
    sha = hashlib.sha256((own / "loans.csv").read_bytes()).hexdigest()
    (own / "loans.yaml").write_text(DECLARED.replace("SHA", sha))
    monkeypatch.chdir(own)
    settings = ["--set", "dp_sgd.epochs=2", "--set", "dp_sgd.batch_size=64", "--set", "student.model.name=logistic"]
    command = ["run", "--method", "dp_sgd", "--data", "loans.yaml", "--out", str(tmp_path / "run"), *settings]
    assert fairpate(*command)[0] == 0
    monkeypatch.chdir(tmp_path)
    run, config = finished_run(tmp_path / "run")
    assert (config.data.name, read_json(run.record)["data"]) == ("loans", "loans")
    assert not any(str(tmp_path) in path.read_text() for path in run.public.glob("*.json"))
    assert fairpate("report", str(tmp_path / "run"))[0] == fairpate("card", str(tmp_path / "run"))[0] == 0
    assert fairpate("data", "describe", str(own / "loans.yaml"))[0] == 0
    (own / "loans.yaml").write_text(DECLARED.replace("SHA", sha).replace("high: 100", "high: 90"))
    code, *said = fairpate("report", str(tmp_path / "run"))
    assert code
    assert "has changed since" in "".join(said)
