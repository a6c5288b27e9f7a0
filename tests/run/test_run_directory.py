"""One run of FairPATE: what its folder holds and publishes, and what a repeated command finds and does again."""

import math
import os
import re
import shutil
import stat
import subprocess
from dataclasses import asdict
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from each_method import train
from small_runs import FILES, read_json, run

from fairpate.data import load_data
from fairpate.releases.directory import RunDirectory, RunDirectoryError, read_statement, read_votes, sole_worker
from fairpate.releases.odometer import LimitReachedError, Odometer
from fairpate.run import folder as rundir
from fairpate.run.folder import create_run_directory, finished_run, open_run_directory
from fairpate.run.private_metrics import Assessment
from fairpate.run.publication import read_evaluation
from fairpate.run.run import record_of
from fairpate.types import strict
from student.student import load_student

pytestmark = pytest.mark.usefixtures("light_runs")


def test_the_run_directory_holds_what_it_promises(finished):
    folder, _config = finished
    assert {path.name for path in folder.public.iterdir()} == FILES | {"labels.parquet"}
    assert {"teachers", "votes.parquet", "ledger.sqlite", "report.html"} <= {p.name for p in folder.private.iterdir()}
    assert stat.S_IMODE(folder.private.stat().st_mode) == 0o700
    assert yaml.safe_load(folder.config.read_text())["teachers"]["num_teachers"] == 12
    assert read_json(folder.environment)["libraries"]["torch"].startswith("2.")
    assert not list(folder.root.rglob("*.tmp"))


def test_the_revision_is_that_of_this_project_and_of_no_repository_around_it(tmp_path, monkeypatch):
    for command in (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "-", "--allow-empty"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)  # noqa: S603, S607
    installed = tmp_path / "lib" / "site-packages"
    (installed / "fairpate" / "app").mkdir(parents=True)
    monkeypatch.setattr(rundir, "__file__", str(installed / "fairpate" / "app" / "rundir.py"))
    assert rundir.environment()["revision"] is None


def test_the_statement_prices_every_query_that_was_submitted(finished):
    folder, _config = finished
    statement = read_json(folder.statement)
    queries = statement["queries"]
    refused = queries["rejected_confidence"] + queries["rejected_fairness"] + queries["refused_free"]
    assert queries["answered"] + refused == queries["submitted"] == 80
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
    public = load_data(config.data).public
    group_of = dict(zip(public.record_id, public.z.tolist(), strict=True))
    assert [group_of[record_id] for record_id in labels["record_id"].to_pylist()] == labels["group"].to_pylist()
    assert labels.num_rows == read_json(folder.statement)["queries"]["answered"]


def test_the_published_student_predicts_what_its_metrics_say(finished):
    folder, config = finished
    metrics, test = read_json(folder.metrics), load_data(config.data).test
    prediction = load_student(folder.student).predict(test.x, test.z.numpy())
    correct = prediction.labels == test.y.numpy()
    assert metrics["coverage"] == pytest.approx(prediction.answered.mean())
    assert metrics["accuracy"] == pytest.approx(correct[prediction.answered].mean())
    assert metrics["without_refusals"]["accuracy"] == pytest.approx(correct.mean())
    assert metrics["coverage"] < metrics["without_refusals"]["coverage"] == 1


def test_the_row_of_a_comparison_follows_from_what_is_published(finished):
    folder, config = finished
    assessment = Assessment(evaluations={"student": read_evaluation(folder)}, measured_N=np.zeros(0, np.bool_))
    row = strict(asdict(record_of(config, read_statement(folder), assessment, None)))
    stored = read_json(folder.record)
    assert sum(stored["answered_by_group"]) == stored["answered"]
    assert row | {"answered_by_group": stored["answered_by_group"]} == stored


def test_the_operator_sees_three_prices_in_the_right_order(finished):
    folder, _ = finished
    costs = read_json(folder.private / "costs.json")
    assert costs["epsilon_as_in_paper"] < costs["epsilon_data_dependent"] <= costs["epsilon_data_independent"]
    assert costs["epsilon_data_independent"] == pytest.approx(read_json(folder.statement)["epsilon"], rel=1e-12)


def test_the_operator_finds_what_the_workers_did(finished):
    folder, config = finished
    worked = read_json(folder.private / "work.json")
    teachers = config.teachers.num_teachers
    assert worked.pop("blocks_trained") == len(list(folder.teachers.glob("*.safetensors")))
    assert worked == {"teachers_trained": teachers, "votes_collected": read_votes(folder.votes).votes_QC.sum()}


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
    del values["student"]["confidence"], values["student"]["label_smoothing"]
    older.config.write_text(yaml.safe_dump(values))
    found, opened = finished_run(older.root)
    assert run(opened.model_copy(update={"out": found.root})).student.read_bytes() == folder.student.read_bytes()
    student = config.student.model_copy(update={"method": "pseudo_label"})
    with pytest.raises(RunDirectoryError, match=r"student\.method: supervised -> pseudo_label"):
        run(config.model_copy(update={"out": found.root, "student": student}))


def test_a_folder_that_is_no_run_is_left_alone(small_config, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunDirectoryError, match="not empty"):
        run(small_config(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_without_noise_from_a_seed_says_so_and_counts_once(small_config, tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    folder = run(small_config(tmp_path / "run", "noise=os_entropy", "names_earlier=true"))
    assert read_json(folder.statement)["noise"] == "os_entropy"
    assert "seeded" not in folder.public_report.read_text(encoding="utf-8")
    statement = read_json(folder.statement)
    assert (statement["earlier_releases"], statement["remarks"]) == (0, [])
    again = run(small_config(tmp_path / "run", "noise=os_entropy", "names_earlier=true"))
    assert read_json(again.statement) == statement
    (total,) = Odometer().totals(delta=1e-5)
    assert (total.data, total.releases, total.not_private) == ("color_digits", 1, 0)
    assert total.epsilon == statement["epsilon"] == statement["epsilon_with_earlier"]
    Odometer().set_limit("color_digits", "record", epsilon=1.5 * total.epsilon, delta=1e-5)
    with pytest.raises(LimitReachedError, match="color_digits, unit record: 1 release cost"):
        run(small_config(tmp_path / "other", "noise=os_entropy", "seed=1"))
    assert not (tmp_path / "other/private/teachers").exists()


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
        unfinished.require_finished(with_ledger=True, with_votes=True)


def test_the_lock_of_a_folder_empties_no_file_that_its_name_leads_to(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "run/.lock").symlink_to(tmp_path / "mine")
    work = partial(sole_worker, tmp_path / "run", "fairpate run")
    with work(), pytest.raises(RunDirectoryError, match="is running in this folder"), work():
        pass
    assert (tmp_path / "mine").read_text() == "kept"


def test_no_file_of_a_run_or_odometer_can_be_written_by_others_under_a_umask_of_none(tmp_path, monkeypatch):
    """From Python, where the umask is the caller's; the command has one of its own (tests/test_files.py)."""
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "local" / "state"))
    before = os.umask(0)
    try:
        train(tmp_path / "runs" / "one", "record_votes", "noise=os_entropy")
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if not path.is_symlink()]
    assert {"odometer.sqlite", "statement.json", ".lock"} <= {path.name for path in made}
    assert [path for path in made if path.stat().st_mode & 0o002] == []
