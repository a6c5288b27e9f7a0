"""Runs of randomised classifiers: what is published, and that it is measured by expectation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import read_json

from fairpate.config import ConfigError, DataConfig
from fairpate.data import Dataset, load_data
from fairpate.data.dataset import SPLIT_NAMES
from fairpate.methods.base import configured
from fairpate.releases.directory import RunDirectory
from fairpate.run.run import run_method
from fairpate.terminal import Reporter
from student.student import load_student

pytestmark = pytest.mark.usefixtures("light_runs")

METHODS = ("dp_postprocessing", "dp_oracle_learner", "randomised_response")
SMALL: dict[str, Any] = {
    "noise": "seeded",
    "data": {"options": {"colour_as_feature": False}},
    "sgd": {"epochs": 3},
    "target": {"epsilon": 2},
    "student": {"model": {"name": "logistic"}},
    "dp_oracle_learner": {"num_rounds": 6, "min_share": 0.001},
    "randomised_response": {"num_rounds": 5},
}


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """The embedded digits without their colour, and with two labels: 5 or more."""
    ten = load_data(DataConfig(options={"colour_as_feature": False}))
    halves = {
        name: dataclasses.replace(split, y=(split.y >= 5).long())
        for name, split in ((name, getattr(ten, name)) for name in SPLIT_NAMES)
    }
    dataset = dataclasses.replace(ten, **halves, label_names=("low", "high"))
    monkeypatch.setitem(run_method.__kwdefaults__, "load", lambda _: dataset)
    return dataset


def train(out: Path, method: str, *overrides: str) -> RunDirectory:
    return run_method(configured(SMALL, [f"out={out}", *overrides], method=method), Reporter(quiet=True))


@pytest.mark.parametrize(
    ("method", "settings", "needs_group"),
    [
        ("dp_postprocessing", [], True),
        ("dp_oracle_learner", [], False),
        ("randomised_response", ["randomised_response.form=one_step"], False),
        pytest.param("randomised_response", ["randomised_response.form=two_step"], True, marks=pytest.mark.slow),
    ],
)
def test_a_randomised_classifier_is_published_and_measured_by_expectation(
    method: str, settings: list[str], needs_group: bool, digits: Dataset, tmp_path: Path
) -> None:
    run = train(tmp_path / "run", method, *settings)
    student, test = load_student(run.student), digits.test
    labels, groups = test.y.numpy(), test.z.numpy()
    assert student.card.is_randomised
    assert student.card.needs_group == needs_group
    said = student.predict(test.x, groups).probabilities_NC
    metrics = read_json(run.metrics)
    assert metrics["accuracy"] == pytest.approx(said[np.arange(len(labels)), labels].mean(), abs=1e-6)
    high = [said[groups == group, 1].mean() for group in (0, 1)]
    assert metrics["gaps"]["dp_pairwise"]["value"] == pytest.approx(abs(high[0] - high[1]), abs=1e-6)
    draws = [student.predict(test.x, groups, generator=np.random.default_rng(seed)).labels for seed in range(200)]
    np.testing.assert_allclose(np.mean(draws, axis=0), said[:, 1], atol=0.2)
    assert read_json(run.record)["accuracy"] == metrics["accuracy"]


@pytest.mark.parametrize("method", METHODS)
def test_the_statement_says_what_is_protected_and_what_is_not(method: str, digits: Dataset, tmp_path: Path) -> None:
    assert digits.num_classes == 2
    run = train(tmp_path / "run", method)
    statement = read_json(run.statement)
    assert (statement["unit"], statement["relation"]) == ("sensitive attribute", "replace one")
    assert statement["not_protected"].startswith("features and labels")
    assert 1.9 < statement["epsilon"] <= 2
    assert statement["epsilon_as_in_paper"] is None
    assert any("slack" in remark for remark in statement["remarks"]) == (method == "dp_postprocessing")
    assert {path.name for path in run.private.iterdir()} == {"release.json", "report.html", "without_privacy.json"}


def test_a_private_base_protects_the_record(digits: Dataset, tmp_path: Path) -> None:
    small = ("dp_postprocessing.base=dp_sgd", "target.accounting=rdp", "dp_sgd.epochs=2", "target.epsilon=4")
    statement = read_json(train(tmp_path / digits.name, "dp_postprocessing", *small).statement)
    assert (statement["unit"], statement["relation"]) == ("record", "add or remove one")
    assert statement["not_protected"] is None
    assert statement["epsilon"] <= 4


def test_the_reject_option_draws_labels_and_refuses_some(digits: Dataset, tmp_path: Path) -> None:
    run = train(tmp_path / digits.name, "dp_postprocessing", "student.idp3={max_disparity: 0.02, min_count: 5}")
    metrics = read_json(run.metrics)
    assert metrics["coverage"] < 1
    assert metrics["accuracy"] * metrics["num_answered"] == pytest.approx(
        round(metrics["accuracy"] * metrics["num_answered"])
    )
    assert metrics["without_refusals"]["coverage"] == 1


def test_f_ld_learns_several_classes_from_reports(tmp_path: Path) -> None:
    settings = ("randomised_response.learner=f_ld", "f_ld.epochs=2", "student.model={name: mlp, hidden: [8]}")
    run = train(tmp_path / "run", "randomised_response", *settings)
    assert not load_student(run.student).card.is_randomised
    assert read_json(run.statement)["unit"] == "sensitive attribute"


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("dp_postprocessing", ["public_data.self_label=mlp"], "public_data.self_label: .* leave it out"),
        ("dp_oracle_learner", ["public_data.calibration={}"], "public_data.calibration"),
        ("dp_oracle_learner", ["student.model.name=mlp"], "student.model.name: .* got mlp; set logistic"),
        ("randomised_response", ["target.relation=add or remove one"], "target.relation: .* leave it out"),
        ("dp_oracle_learner", [], "data.name: .* color_digits has 10"),
        ("randomised_response", [], "data.name: .* color_digits has 10"),
    ],
)
def test_what_cannot_be_trained_is_refused(method: str, settings: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tmp_path / "run", method, *settings)


@pytest.mark.parametrize(
    ("method", "settings"),
    [("dp_postprocessing", []), ("dp_oracle_learner", []), ("randomised_response", ["noise=os_entropy"])],
)
def test_without_noise_nothing_is_published(method: str, settings: list[str], digits: Dataset, tmp_path: Path) -> None:
    run = train(tmp_path / "run", method, "target.epsilon=.inf", *settings)
    assert run.student == tmp_path / "run" / "private" / "student.safetensors"
    assert read_json(run.statement)["epsilon"] is None
    assert not (tmp_path / "run" / "public").exists()
    for base in ("dp_sgd", "fair_dp_sgd"):
        with pytest.raises(ValueError, match="finite target_epsilon, got inf"):
            train(tmp_path / base, base, "target.epsilon=.inf")
