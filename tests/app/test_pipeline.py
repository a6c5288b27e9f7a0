import dataclasses
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

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console

from aggregator.files import LedgerError, ledger_files
from aggregator.ledger import Ledger
from aggregator.mechanism import Outcome
from aggregator.session import AggregatorSession, query_key
from aggregator.terms import LedgerTerms
from fairpate.app.odometer import LimitReachedError, Odometer
from fairpate.app.pipeline import run_pipeline
from fairpate.app.progress import Reporter
from fairpate.app.release import choose_queries
from fairpate.app.rundir import RunDirectory, RunDirectoryError, create_run_directory, open_run_directory
from fairpate.app.summary import summarise
from fairpate.app.tables import read_votes, write_votes
from fairpate.config import ConfigError
from fairpate.data import load_dataset
from fairpate.evaluation.page import epsilon_text
from fairpate.privacy.accountant import ConfidentGnmaxQueries, ConfidentGnmaxVotes, epsilon, epsilon_data_dependent
from fairpate.privacy.smooth_sensitivity import SmoothRelease
from student.predict import load_student

PUBLIC = {"labels.parquet", "student.safetensors", "statement.json", "metrics.json", "report.html"}
STATEMENT = {
    "unit",
    "relation",
    "delta",
    "epsilon_data_independent",
    "epsilon_fixed_beforehand",
    "epsilon_sanitised",
    "earlier_releases",
    "epsilon_with_earlier",
    "queries_posed",
    "answered",
    "rejected_confidence",
    "rejected_fairness",
    "refused_free",
    "noise",
    "tuning_accounted",
    "remarks",
}


def run(config):
    return run_pipeline(config, Reporter(quiet=True))


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def finished(small_config, tmp_path_factory, ray_session):
    config = small_config(tmp_path_factory.mktemp("runs") / "run", "student.idp3={max_disparity: 0.1, min_count: 10}")
    return run(config), config


def test_the_run_directory_holds_what_it_promises(finished):
    folder, _config = finished
    assert {path.name for path in folder.public.iterdir()} == PUBLIC
    assert {"teachers", "votes.parquet", "ledger.sqlite", "report.html"} <= {p.name for p in folder.private.iterdir()}
    assert stat.S_IMODE(folder.private.stat().st_mode) == 0o700
    assert yaml.safe_load(folder.config.read_text())["teachers"]["num_teachers"] == 12
    assert read_json(folder.environment)["libraries"]["torch"].startswith("2.")
    assert not list(folder.root.rglob("*.tmp"))


def test_the_statement_prices_every_query_that_was_posed(finished):
    folder, _config = finished
    statement = read_json(folder.statement)
    assert set(statement) == STATEMENT
    refused = statement["rejected_confidence"] + statement["rejected_fairness"] + statement["refused_free"]
    assert statement["answered"] + refused == statement["queries_posed"] == 80
    assert statement["epsilon_sanitised"] is None
    assert statement["noise"] == "seeded: not private"
    assert statement["tuning_accounted"] is False

    # The mechanism's curve is alpha (1 / (2 s1^2) + 1 / s2^2) per query; converted here over a fine grid of orders.
    slope = statement["queries_posed"] * (1 / (2 * 3**2) + 1 / 2**2)
    orders = np.linspace(1.01, 60, 20_000)
    delta = statement["delta"]
    epsilon = slope * orders + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    assert epsilon.min() <= statement["epsilon_data_independent"] <= 1.02 * epsilon.min()


def test_released_labels_are_the_ledger_s_answers_and_nothing_else(finished):
    folder, config = finished
    labels = pq.read_table(folder.labels)
    assert labels.column_names == ["record_id", "group", "label"]
    public = load_dataset(config.data).public
    group_of = dict(zip(public.record_id, public.z.tolist(), strict=True))
    assert [group_of[record_id] for record_id in labels["record_id"].to_pylist()] == labels["group"].to_pylist()
    assert labels.num_rows == read_json(folder.statement)["answered"]


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
    assert costs["epsilon_as_published"] < costs["epsilon_data_dependent"] <= costs["epsilon_data_independent"]
    assert costs["epsilon_data_independent"] == pytest.approx(
        read_json(folder.statement)["epsilon_data_independent"], rel=1e-12
    )


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


def test_a_folder_that_is_no_run_is_left_alone(small_config, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunDirectoryError, match="not empty"):
        run(small_config(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_more_queries_than_public_records_are_refused_before_anything_starts(small_config, tmp_path):
    with pytest.raises(ConfigError, match=r"num_queries: 400 queries asked, 300 different public records"):
        run(small_config(tmp_path / "run", "aggregator.num_queries=400"))
    assert not (tmp_path / "run").exists()


def test_a_run_without_noise_from_a_seed_says_so_and_counts_once(small_config, tmp_path, ray_session, monkeypatch):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    folder = run(small_config(tmp_path / "run", "aggregator.noise=os_entropy"))
    assert read_json(folder.statement)["noise"] == "os_entropy"
    assert "seeded" not in folder.public_report.read_text(encoding="utf-8")
    statement = read_json(folder.statement)
    assert (statement["earlier_releases"], statement["remarks"]) == (0, [])
    again = run(small_config(tmp_path / "run", "aggregator.noise=os_entropy"))
    assert read_json(again.statement) == statement
    (total,) = Odometer().totals(delta=1e-5)
    assert (total.data, total.releases, total.not_private) == ("color_digits", 1, 0)
    assert total.epsilon == statement["epsilon_data_independent"] == statement["epsilon_with_earlier"]
    Odometer().set_limit("color_digits", "record", epsilon=1.5 * total.epsilon, delta=1e-5)
    with pytest.raises(LimitReachedError, match="color_digits, unit record: 1 releases"):
        run(small_config(tmp_path / "other", "aggregator.noise=os_entropy", "seed=1"))
    assert not (tmp_path / "other/private/teachers").exists()


@pytest.mark.parametrize("stage", ["teachers", "ledger.sqlite"])
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
    assert read_json(out / "public/statement.json")["answered"] == read_json(folder.statement)["answered"]


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
    statement["queries_posed"] += 1  # as if one more had been refused since
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
    before, after = (read_json(path) for path in (folder.statement, again.statement))
    assert after["queries_posed"] == before["queries_posed"] + 1
    assert after["answered"] == before["answered"] + 1
    posed = ConfidentGnmaxQueries(count=before["queries_posed"] + 2, **dataclasses.asdict(config.aggregator.mechanism))
    assert after["epsilon_data_independent"] == epsilon([posed], target_delta=1e-5).epsilon
    assert before["epsilon_fixed_beforehand"] == before["epsilon_data_independent"]
    assert after["epsilon_fixed_beforehand"] == open_terms(folder).budget.epsilon > after["epsilon_data_independent"]
    assert f"ε = {epsilon_text(after['epsilon_fixed_beforehand'])}" in after["remarks"][0]
    words = f"trained on {before['answered']} of these labels: the other 1 answer queries beside the run’s own."
    for page in (again.public_report, again.private_report):
        assert words in page.read_text(encoding="utf-8")
    assert "was trained on these labels." in folder.public_report.read_text(encoding="utf-8")
    for deleted in (False, True):  # a student that is trained anew learns from the labels of the run, as before
        if deleted:
            again.student.unlink()
            again = run(config.model_copy(update={"out": copy}))
        assert load_student(again.student).card.num_training_labels == before["answered"]
    printed = io.StringIO()
    Console(file=printed, width=120).print(summarise(again))
    assert f"{before['answered']} of these labels, those of the run's own queries" in printed.getvalue()


def test_a_run_stops_at_the_query_that_crosses_its_budget(small_config, tmp_path, ray_session):
    mechanism = small_config(tmp_path).aggregator.mechanism
    priced = [
        epsilon([ConfidentGnmaxQueries(count=n, **dataclasses.asdict(mechanism))], target_delta=1e-5).epsilon
        for n in (40, 41)
    ]
    limit = sum(priced) / 2
    folder = run(small_config(tmp_path / "run", f"aggregator.budget={{epsilon: {limit!r}}}"))
    statement = read_json(folder.statement)
    assert statement["queries_posed"] == 40
    assert statement["epsilon_data_independent"] == priced[0] < limit


def test_a_budget_without_room_for_one_query_ends_the_run(small_config, tmp_path, ray_session):
    with pytest.raises(ConfigError, match=r"aggregator\.budget: .* no room for one query"):
        run(small_config(tmp_path / "run", "aggregator.budget={epsilon: 0.01}"))


ADMISSION = ("aggregator.admission={rounds: 4, fit: {epochs: 8}}",)


def test_admission_pays_for_fewer_rejections_and_gets_more_labels(small_config, tmp_path, ray_session):
    found = {}
    for name, overrides in [("rounds", ADMISSION), ("in order", ())]:
        found[name] = read_json(run(small_config(tmp_path / name, *overrides)).statement)
    rounds, in_order = found["rounds"], found["in order"]
    assert rounds["rejected_fairness"] < in_order["rejected_fairness"]
    assert rounds["answered"] >= in_order["answered"]
    assert rounds["queries_posed"] <= in_order["queries_posed"] == 80
    assert rounds["answered"] / rounds["queries_posed"] > in_order["answered"] / in_order["queries_posed"]
    assert rounds["epsilon_fixed_beforehand"] == in_order["epsilon_data_independent"]  # the price of all 80
    assert in_order["epsilon_fixed_beforehand"] == in_order["epsilon_data_independent"]
    assert rounds["epsilon_data_independent"] < rounds["epsilon_fixed_beforehand"]
    assert [remark.startswith("Released labels may have decided") for remark in rounds["remarks"]] == [True]
    assert in_order["remarks"] == []


def test_interrupted_between_rounds_the_same_queries_are_posed_again(small_config, tmp_path, ray_session):
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


def test_a_planned_publication_is_made_once_stated_and_priced(small_config, tmp_path, ray_session):
    plan = "{order: 2.0, beta: 0.1, noise_stddev: 5, scale_noise_stddev: 5}"
    config = small_config(
        tmp_path / "run", f"aggregator.publication={plan}", "aggregator.mechanism.noise_stddev_votes=4"
    )
    folder = run(config)
    statement, costs = read_json(folder.statement), read_json(folder.costs)
    posed = ConfidentGnmaxQueries(count=80, **dataclasses.asdict(config.aggregator.mechanism))
    release = SmoothRelease(**config.aggregator.publication.model_dump())
    assert statement["epsilon_data_independent"] == epsilon([posed, release], target_delta=1e-5).epsilon
    assert costs["epsilon_data_independent"] == pytest.approx(statement["epsilon_data_independent"], rel=1e-12)
    assert costs["epsilon_data_dependent"] < statement["epsilon_data_independent"]
    assert statement["epsilon_sanitised"] > 0
    assert "smooth-sensitivity release" in folder.public_report.read_text(encoding="utf-8")
    again = run(config)
    assert read_json(again.statement) == statement


def test_a_publication_that_smooth_sensitivity_does_not_cover_is_refused(small_config, tmp_path, ray_session):
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
    chosen = choose_queries(dataclasses.replace(dataset, public=doubled), config)
    assert chosen.record_id == ("a", "b", "c")


def test_interrupted_before_anything_was_written_it_starts_again(small_config, tmp_path, ray_session):
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
        unfinished.require_finished()


def test_a_reservation_that_a_crash_left_open_raises_the_stated_epsilon(finished, tmp_path):
    folder, config = finished
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copytree(folder.root, copy, dirs_exist_ok=True)
    for file in [*ledger_files(copy / "private/ledger.sqlite"), *(copy / "public").iterdir()]:
        file.unlink()
    votes = read_votes(folder.votes)
    queries = choose_queries(load_dataset(config.data), config)
    key = query_key(queries.x[0].numpy(), int(queries.z[0]))
    with Ledger(copy / "private/ledger.sqlite", open_terms(folder)) as ledger:
        ledger.reserve([key], [int(queries.z[0])], votes.votes_QC[:1])
    again = run(config.model_copy(update={"out": copy}))
    assert pq.read_table(again.labels).equals(pq.read_table(folder.labels))
    before, after = (read_json(path)["epsilon_data_independent"] for path in (folder.statement, again.statement))
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
