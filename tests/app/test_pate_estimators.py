"""The PATE family as estimators: the contract, the price, and that they are the methods of the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fairpate.methods.TODO import PateSInConfig
from sklearn.base import clone
from two_groups import two_groups

from fairpate.app.rundir import RunDirectory
from fairpate.app.tables import read_labels
from fairpate.config import AggregatorConfig, FitConfig, ModelConfig, RayConfig, StudentConfig, TeachersConfig
from fairpate.estimators import FairPateClassifier, PateClassifier, PateSInClassifier, PateSPreClassifier
from fairpate.types import GateRule, MechanismParameters

FIT = FitConfig(epochs=20, batch_size=16, learning_rate=0.02)
SETTINGS: dict[str, Any] = {
    "epsilon": 40.0,
    "teachers": TeachersConfig(num_teachers=40, model=ModelConfig(name="logistic"), fit=FIT),
    "aggregator": AggregatorConfig(
        mechanism=MechanismParameters(threshold=20, threshold_stddev_votes=4, noise_stddev_votes=3),
        gate=GateRule(max_disparity=0.05, min_count=5),
        noise="seeded",
    ),
    "student": StudentConfig(model=ModelConfig(name="logistic"), fit=FIT),
    "ray": RayConfig(num_actors=0),
    "random_state": 0,
}
FAMILY = [FairPateClassifier, PateClassifier, PateSInClassifier, PateSPreClassifier]
X, Y, _ = two_groups(2000, 0)
PUBLIC_X, _, PUBLIC_Z = two_groups(200, 1)
PUBLIC: dict[str, Any] = {"public_X": PUBLIC_X, "public_sensitive_features": PUBLIC_Z}


def disparity(labels: npt.NDArray[Any], groups: npt.NDArray[Any]) -> float:
    return abs(float((labels[groups == "a"] == "yes").mean() - (labels[groups == "b"] == "yes").mean()))


@pytest.mark.parametrize("kind", FAMILY)
def test_a_member_of_the_family_learns_within_its_target(kind: Any) -> None:
    model = clone(kind(**SETTINGS)).fit(X, Y, **PUBLIC)
    assert model.classes_.tolist() == ["no", "yes"]
    assert 30 < model.privacy_.epsilon <= 40
    assert (model.privacy_.unit, model.privacy_.relation) == ("record", "add or remove one")
    assert model.events_[0].count == 200
    assert model.noise_ == "seeded: not private"
    np.testing.assert_allclose(model.predict_proba(X).sum(axis=1), 1, atol=1e-5)
    assert model.score(X, Y) > 0.7
    again = clone(kind(**SETTINGS)).fit(X, Y, **PUBLIC)
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))


def test_parity_in_the_loss_narrows_the_gap_that_pate_leaves() -> None:
    plain = PateClassifier(**SETTINGS).fit(X, Y, **PUBLIC)
    fair = PateSInClassifier(**SETTINGS, parity=PateSInConfig(weight=3.0)).fit(X, Y, **PUBLIC)
    assert disparity(fair.predict(PUBLIC_X), PUBLIC_Z) < 0.5 * disparity(plain.predict(PUBLIC_X), PUBLIC_Z)


def test_the_folder_keeps_the_ledger_and_the_labels(tmp_path: Path) -> None:
    FairPateClassifier(**SETTINGS, folder=tmp_path / "run").fit(X, Y, **PUBLIC)
    run = RunDirectory(root=tmp_path / "run")
    assert run.ledger.is_file()
    labelled = read_labels(run.labels)
    counts = np.zeros((2, 2), dtype=int)
    np.add.at(counts, (labelled.groups, labelled.labels), 1)
    rates = counts[:, 1] / counts.sum(axis=1)
    assert counts.sum(axis=1).min() > 5
    assert abs(rates[0] - rates[1]) < 0.15


def test_public_records_are_asked_for() -> None:
    with pytest.raises(ValueError, match="PATE needs public records"):
        PateClassifier(**SETTINGS).fit(X, Y)


def test_equal_records_are_told_apart() -> None:
    twice = {"X": np.concatenate([X, X[:5]]), "y": np.concatenate([Y, Y[:5]])}
    assert PateClassifier(**SETTINGS).fit(**twice, **PUBLIC).score(X, Y) > 0.7
