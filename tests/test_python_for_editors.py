"""What editors, type checkers and readers of docstrings get: names, typed parameters, frames, warnings, examples."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

import fairpate
from fairpate.estimators import FairClassifier, Parameters, parameters_of
from fairpate.methods.base import method_names
from fairpate.privacy.mechanism_events import VoteTables
from fairpate.releases.odometer import Odometer, RunCharge

pytestmark = pytest.mark.usefixtures("light_runs")

ROOT = Path(__file__).parents[1]
WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("fairpate", "aggregator", "student", "teachers")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
CLINIC: dict[str, Any] = {
    "name": "clinic",
    "task": "comes back",
    "rows": 600,
    "files": {"private": "visits.csv", "public": "pool.csv"},
    "label": {"column": "back", "classes": ["no", "yes"]},
    "group": {"column": "sex", "values": ["F", "M"]},
    "features": {
        "age": {"bounds": [0, 110], "missing": 50},
        "ward": {"categories": ["A", "B"], "other": True, "missing": "none"},
    },
}


def visits(number: int, seed: int = 0) -> pd.DataFrame:
    """A label that age decides, categories of pandas, and missing values of both kinds."""
    random = np.random.default_rng(seed)
    age = random.uniform(0, 110, number)
    frame = pd.DataFrame(
        {
            "back": np.where(age > 55, "yes", "no"),
            "sex": random.choice(["F", "M"], number),
            "age": np.where(random.random(number) < 0.05, np.nan, age),
            "ward": pd.Categorical(random.choice(["A", "B", "C"], number)),
            "unread": "x",
        }
    )
    frame.loc[::50, "ward"] = None
    return frame


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings_give_what_they_show(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0
    assert found.failed == 0


def test_an_editor_completes_the_public_names_alone() -> None:
    assert set(dir(fairpate)) == set(fairpate.__all__)


def test_parameters_are_typed_for_every_method() -> None:
    known = {name for method in method_names() for name in parameters_of(method)}
    assert set(Parameters.__annotations__) == known, "write those of a new method: make stored"


def test_a_typo_is_refused_at_construction_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match="no parameter 'epsilom'; did you mean epsilon"):
        FairClassifier(epsilom=1.0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"dp_sgd\.epoch: unknown field; did you mean epochs"):
        FairClassifier("dp_sgd", dp_sgd={"epoch": 3})


@pytest.mark.slow
def test_a_typo_is_an_error_of_mypy(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    lines = ("from fairpate import FairClassifier", "FairClassifier(epsilon=1.0)", "FairClassifier(epsilom=1.0)")
    program.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "mypy", str(program)]  # the settings of `make types`, for its cache
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1 and f"{program.name}:3:" in errors[0] and "epsilom" in errors[0], done.stdout


def test_frames_with_categories_and_missing_values_are_read_by_their_declaration(tmp_path: Path) -> None:
    """An age and a flag where it is missing; wards A and B, another one, and a missing one."""
    frame, pool, unseen = visits(600), visits(300, seed=1).drop(columns="back"), visits(200, seed=2)
    model = FairClassifier.from_declaration(CLINIC, "weighted_votes", epsilon=8.0, random_state=0).fit(
        frame, public_X=pool
    )
    assert model.classes_.tolist() == ["no", "yes"]
    assert model.n_features_in_ == 2 + 4
    assert model.score(unseen) > 0.85
    without_labels = unseen.drop(columns=["back", "sex"])
    assert model.predict(without_labels).tolist() == model.predict(unseen).tolist()
    loaded = FairClassifier.load(model.save(tmp_path / "model"))
    assert loaded.predict(unseen).tolist() == model.predict(unseen).tolist()
    assert clone(model).get_params()["declaration"] == CLINIC
    with pytest.raises(ValueError, match=r"column age: .*old"):
        model.predict(unseen.assign(age="old"))
    with pytest.raises(ValueError, match="no column ward"):
        model.predict(unseen.drop(columns="ward"))
    with pytest.raises(ValueError, match="bounds"):
        FairClassifier.from_declaration({**CLINIC, "features": {"age": {"bounds": [1, 0]}}})


def test_unscaled_columns_and_models_no_better_than_a_constant_are_named() -> None:
    random = np.random.default_rng(0)
    x = np.column_stack([random.normal(size=300), 50_000 * random.random(300)])
    y = x[:, 0] > 0
    quick: Any = {"epsilon": 3.0, "dp_sgd": {"epochs": 1, "batch_size": 30}, "random_state": 0}
    with pytest.warns(UserWarning, match="column 1 of X has values beyond 20"):
        FairClassifier("dp_sgd", **quick).fit(x, y)
    with pytest.warns(UserWarning, match="right 50.0% of the time|and always"):
        FairClassifier("dp_sgd", **(quick | {"epsilon": 0.01})).fit(x / 50_000, random.random(300) > 0.1)
    with warnings.catch_warnings(action="error"):
        FairClassifier("weighted_votes", epsilon=8.0, random_state=0).fit(x[:, :1], y, public_X=500)


def test_statements_and_the_odometer_print_as_tables(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(200, 2))
    statement = FairClassifier("dp_sgd", epsilon=1.0, dp_sgd={"epochs": 1}).fit(x, x[:, 0] > 0).statement()
    table = dict(line.split(maxsplit=1) for line in str(statement).splitlines() if line[0] != " ")
    assert table["method"] == "dp_sgd"
    assert float(table["epsilon"]) == statement.epsilon
    odometer = Odometer(tmp_path)
    odometer.charge(
        RunCharge(
            run="1",
            data="clinic",
            unit="record",
            relation="add or remove one",
            noise="os_entropy",
            method="weighted_votes",
            path="runs/1",
            events=(VoteTables(count=1, noise_stddev_votes=10.0),),
        )
    )
    shown = str(odometer).splitlines()
    assert shown[1].split()[:3] == ["data", "set", "unit"]
    (total,) = odometer.totals(delta=1e-5)
    assert shown[2].split()[0] == "clinic"
    assert float(shown[2].split()[8]) >= total.epsilon
