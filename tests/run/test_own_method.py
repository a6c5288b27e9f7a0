"""A method from outside the package, named as module:Class: the example runs as ours do."""

import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest

from fairpate.methods import base
from fairpate.releases.directory import read_statement
from fairpate.run.folder import open_run_directory

pytestmark = pytest.mark.usefixtures("light_runs")

NAME = "own_method:ClassMeans"
EXAMPLES = Path(__file__).parents[2] / "fairpate" / "examples"


@pytest.fixture(autouse=True)
def in_the_working_directory(tmp_path):
    shutil.copy(EXAMPLES / "own_method.py", tmp_path)


def test_it_runs_is_priced_and_is_opened_like_any_other(fairpate):
    chosen = ("--epsilon", 3, "--set", "class_means.least_count=10", "--set", "noise=seeded")
    code, output, errors = fairpate("run", "--method", NAME, *chosen, "--out", "run")
    assert code == 0, errors
    assert f"{NAME} on color_digits" in output
    run, config = open_run_directory(Path("run"))
    assert (config.method, config.class_means.least_count) == (NAME, 10)
    statement = read_statement(run)
    assert (statement.method, statement.unit, statement.noise) == (NAME, "record", "seeded: not private")
    assert statement.epsilon == pytest.approx(3, abs=1e-3)
    assert json.loads(run.metrics.read_text())["accuracy"] > 0.3
    model = run.student.read_bytes()
    for command in (["report", "run"], ["card", "run"], ["run", "--method", NAME, *chosen, "--out", "run"]):
        assert fairpate(*command)[0] == 0
    assert run.student.read_bytes() == model
    code, _, errors = fairpate("run", "--method", "dp_sgd", "--out", "run")
    assert code == 2
    assert f"method: {NAME} -> dp_sgd" in errors


def test_its_fields_are_shown_and_checked(fairpate, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, output, _ = fairpate("methods", NAME)
    assert code == 0
    assert "Dwork, McSherry, Nissim and Smith 2006" in output
    assert "class_means.least_count" in output
    for setting, words in (
        ("class_means.least_count=0", "class_means.least_count: expected > 0, got 0."),
        ("class_means.least=1", "class_means.least: unknown field"),
        ("target.relation=replace one", "target.relation: expected add or remove one"),
        ("teachers.num_teachers=9", f"teachers.num_teachers: {NAME} does not read it"),
    ):
        code, _, errors = fairpate("run", "--method", NAME, "--set", setting)
        assert code == 2, setting
        assert words in errors


def test_one_that_cannot_be_imported_is_named(fairpate, tmp_path):
    (tmp_path / "broken_method.py").write_text("class Broken(\n")
    for name, words in (
        ("broken_method:Broken", "was never closed"),
        ("own_method:Missing", "has no attribute 'Missing'"),
        ("nowhere:Method", "No module named 'nowhere'"),
        ("own_method:ClassMeansConfig", "expected a subclass"),
    ):
        code, _, errors = fairpate("run", "--method", name)
        assert code == 2
        assert f"method: {name}" in errors
        assert words in errors


BROKEN = """
from fairpate.methods.base import Method
from fairpate.methods.dp_sgd import Sgd

class NoTrain(Method):
    title, paper = "none", "none"

class NoDefault(Sgd):
    needed: int
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("part:NoTrain", "lacks train"),
        ("part:NoDefault", "cannot be made from its defaults"),
        ("fairpate.methods.pate:PateFamily", "lacks title"),
        ("raising:Anything", "ZeroDivisionError"),
    ],
)
def test_one_that_could_not_run_is_refused_before_any_work(fairpate, tmp_path, name, words):
    (tmp_path / "part.py").write_text(BROKEN)
    (tmp_path / "raising.py").write_text("1 / 0\n")
    code, _, errors = fairpate("run", "--method", name)
    assert code == 2
    assert f"method: {name}" in errors
    assert words in errors
    assert not (tmp_path / "runs").exists()


def test_a_broken_package_hides_no_other_method(fairpate, tmp_path, monkeypatch):
    (tmp_path / "raising.py").write_text("1 / 0\n")
    entry = metadata.EntryPoint("theirs", "raising:Anything", "fairpate.methods")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [entry])
    monkeypatch.setenv("COLUMNS", "300")
    base.method_names.cache_clear()
    try:
        code, output, _ = fairpate("methods")
        assert code == 0
        assert "ZeroDivisionError" in output
        assert "dp_sgd" in output
        (tmp_path / "shared.yaml").write_text("teachers: {num_teachers: 9}\ndp_sgd: {epoch: 1}\n")
        _, _, errors = fairpate("run", "shared.yaml", "--method", "sgd")
        assert "dp_sgd.epoch: unknown field; did you mean epochs" in errors
        code, _, errors = fairpate("run", "--method", "theirs")
        assert (code, "ZeroDivisionError" in errors) == (2, True)
    finally:
        base.method_names.cache_clear()
