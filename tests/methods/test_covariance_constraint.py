"""Logistic regression under covariance constraints: by hand, by scikit-learn, and by another solver."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from method_kinds import quick_and_slow
from parity_data import trained_on
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from fairpate.config import ConfigError, DataConfig
from fairpate.data import load_data
from fairpate.data.dataset import SPLIT_NAMES
from fairpate.estimators import FairClassifier
from fairpate.methods.base import configured
from fairpate.methods.f_ld import CovarianceConfig, CovarianceConstraint, coefficients, covariances
from fairpate.nn.fit import predict_probabilities
from fairpate.releases.directory import read_json, read_statement
from fairpate.run.run import run_method
from fairpate.terminal import Reporter

pytestmark = pytest.mark.usefixtures("light_runs")

LIMITS = (0.0, 0.005, 0.02, 0.05, math.inf)


def records(num_groups: int, *, num_records: int = 600, seed: int = 0) -> tuple[Any, Any, Any]:
    """Features with a constant, labels and groups; the first two features follow the group, and so does the label."""
    draws = np.random.default_rng(seed)
    groups = draws.integers(num_groups, size=num_records)
    plain = draws.normal(size=(num_records, 5))
    plain[:, 0] += 0.8 * groups
    plain[:, 1] -= 0.5 * (groups == 1)
    score = plain @ [1.0, -0.7, 0.5, 0.0, 0.2] - 0.5 + draws.logistic(size=num_records)
    return np.hstack([plain, np.ones((num_records, 1))]), (score > 0).astype(np.int64), groups


def config(limit: float, ridge: float = 1e-3) -> CovarianceConfig:
    return CovarianceConfig(max_covariance=limit, ridge=ridge)


def loss_of(theta: Any, features: Any, labels: Any, ridge: float = 1e-3) -> float:
    """By the definition: the mean of ln(1 + e^-margin), and the ridge without the constant."""
    margins = (2.0 * labels - 1) * (features @ theta)
    return float(np.log1p(np.exp(-margins)).mean() + ridge / 2 * theta[:-1] @ theta[:-1])


def largest(theta: Any, features: Any, groups: Any) -> float:
    """Of covariances by the definition, a group at a time."""
    distance = features @ theta
    found = [np.cov(groups == group, distance, ddof=0)[0, 1] for group in np.unique(groups)]
    return float(np.abs(found).max())


def augmented(features: Any, labels: Any, groups: Any, limit: float, ridge: float) -> Any:
    """The same problem by augmented Lagrangians: multipliers and penalties of its own, no quadratic programmes."""
    signs = 2.0 * labels - 1
    centred = np.stack([(groups == g) - (groups == g).mean() for g in np.unique(groups)])
    rows = np.vstack([centred, -centred]) @ features / len(labels)
    multipliers, theta, penalty = np.zeros(len(rows)), np.zeros(features.shape[1]), 100.0

    def whole(point: Any) -> Any:
        value = loss_of(point, features, labels, ridge)
        weights = signs / (1 + np.exp(signs * (features @ point)))
        slope = ridge * np.append(point[:-1], 0.0) - features.T @ weights / len(labels)
        pushed = np.maximum(0, multipliers + penalty * (rows @ point - limit))
        return value + (pushed @ pushed) / (2 * penalty), slope + rows.T @ pushed

    for _ in range(60):
        theta = minimize(whole, theta, jac=True, method="BFGS", options={"gtol": 1e-9}).x
        multipliers = np.maximum(0, multipliers + penalty * (rows @ theta - limit))
    return theta


def test_four_in_a_hundred_by_hand() -> None:
    """z = x, balanced, labels 1 of 4 and 3 of 4: slope 2 ln 3 without a limit; the covariance is a fourth of the slope.

    By symmetry the constant is minus half of the slope; so a limit of 1/4 has the slope 1, and 0 has none.
    """
    x = np.repeat([0.0, 1.0], 4)
    features, labels = np.column_stack([x, np.ones(8)]), np.array([1, 0, 0, 0, 1, 1, 1, 0])
    for limit, slope in ((0.0, 0.0), (0.25, 1.0), (1.0, 2 * math.log(3)), (math.inf, 2 * math.log(3))):
        theta = coefficients(features, labels, x.astype(np.int64), config(limit, 1e-9), num_groups=2)
        np.testing.assert_allclose(theta, [slope, -slope / 2], atol=1e-5)


def test_uneven_labels_leave_their_log_odds() -> None:
    """No feature may vary with the distance: the constant alone says that three of four are positive."""
    x = np.repeat([0.0, 1.0], 4)
    features, labels = np.column_stack([x, np.ones(8)]), np.array([1, 1, 0, 0, 1, 1, 1, 1])
    theta = coefficients(features, labels, x.astype(np.int64), config(0.0, 1e-9), num_groups=2)
    np.testing.assert_allclose(theta, [0, math.log(3)], atol=1e-5)


@pytest.mark.parametrize("num_groups", [2, 4])
def test_without_a_limit_it_is_scikit_learn_s_logistic_regression(num_groups: int) -> None:
    features, labels, groups = records(num_groups)
    theirs = LogisticRegression(C=1 / (len(labels) * 1e-3), tol=1e-10, max_iter=1000).fit(features[:, :-1], labels)
    ours = coefficients(features, labels, groups, config(math.inf), num_groups=num_groups)
    np.testing.assert_allclose(ours, [*theirs.coef_[0], *theirs.intercept_], atol=1e-4)


@pytest.mark.parametrize("num_groups", [2, 3, 4])
def test_the_limit_holds_on_the_records_and_loss_falls_as_it_is_lifted(num_groups: int) -> None:
    features, labels, groups = records(num_groups)
    losses, free = [], coefficients(features, labels, groups, config(math.inf), num_groups=num_groups)
    assert largest(free, features, groups) > LIMITS[-2], "so every limit here is in force"
    for limit in LIMITS:
        theta = coefficients(features, labels, groups, config(limit), num_groups=num_groups)
        found, expected = largest(theta, features, groups), min(limit, largest(free, features, groups))
        assert found <= expected + 1e-9
        assert found == pytest.approx(expected, abs=1e-6), "to stay below costs loss"
        losses.append(loss_of(theta, features, labels))
    assert all(np.diff(losses) < 0)


@pytest.mark.parametrize("num_groups", quick_and_slow([2, 3], [3]))
@pytest.mark.parametrize("limit", quick_and_slow([0.0, 0.02, 0.05], [0.0, 0.02]))
def test_another_solver_finds_the_same_minimum(num_groups: int, limit: float) -> None:
    features, labels, groups = records(num_groups, num_records=300)
    ours = coefficients(features, labels, groups, config(limit), num_groups=num_groups)
    other = augmented(features, labels, groups, limit, ridge=1e-3)
    assert loss_of(ours, features, labels) == pytest.approx(loss_of(other, features, labels), abs=1e-8)
    np.testing.assert_allclose(ours, other, atol=1e-3)


def test_no_fair_neighbour_has_less_loss() -> None:
    features, labels, groups = records(3)
    theta, draws = coefficients(features, labels, groups, config(0.02), num_groups=3), np.random.default_rng(1)
    least = loss_of(theta, features, labels)
    steps = draws.normal(size=(800, 6)) * 10.0 ** draws.uniform(-4, -1, size=(800, 1))
    fair = [theta + step for step in steps if largest(theta + step, features, groups) <= 0.02]
    assert len(fair) > 100
    assert min(loss_of(point, features, labels) for point in fair) > least


def test_neither_names_nor_order_of_records_and_groups_matter() -> None:
    features, labels, groups = records(3)
    theta = coefficients(features, labels, groups, config(0.02), num_groups=3)
    order = np.random.default_rng(2).permutation(len(labels))
    others = ((features[order], labels[order], groups[order]), (features, labels, np.array([2, 0, 1])[groups]))
    for other in others:
        np.testing.assert_allclose(coefficients(*other, config(0.02), num_groups=3), theta, atol=1e-4)


def test_features_that_determine_each_other_or_the_labels_are_solved() -> None:
    features, _, groups = records(2)
    doubled = np.hstack([features[:, :2], features])
    labels = (features[:, 2] > 0).astype(np.int64)
    for limit in LIMITS:
        theta = coefficients(doubled, labels, groups, config(limit, 1e-6), num_groups=2)
        assert largest(theta, doubled, groups) <= limit + 1e-6
        assert ((doubled @ theta > 0) == labels).mean() > 0.97


def test_the_model_says_what_the_coefficients_do() -> None:
    features, labels, groups = records(2)
    x = torch.from_numpy(features[:, :-1]).float()
    method = CovarianceConstraint(covariance_constraint=config(0.02))
    trained = trained_on(method, x, torch.from_numpy(labels), torch.from_numpy(groups))
    exact = np.hstack([x.double().numpy(), np.ones((len(x), 1))])
    theta = coefficients(exact, labels, groups, config(0.02), num_groups=2)
    np.testing.assert_allclose(
        predict_probabilities(trained.model, x)[:, 1].numpy(), 1 / (1 + np.exp(-exact @ theta)), atol=1e-5
    )
    assert trained.remarks == ("largest covariance of a group with the distance to the boundary: 0.02",)


@pytest.mark.parametrize(
    ("labels", "groups", "words"),
    [
        ([0, 1, 2], [0, 1, 0], "labels to be codes from 0 to 1"),
        ([0, 1, 1], [0, 1, 2], "groups to be codes from 0 to 1"),
        ([0, 1, 1], [0, 0, 0], "none of group 1; merge groups"),
    ],
)
def test_codes_out_of_range_and_groups_without_records_are_refused(labels: Any, groups: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        coefficients(np.ones((3, 2)), np.array(labels), np.array(groups), config(0.0), num_groups=2)


def test_more_features_than_a_square_matrix_is_kept_of_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at most 1000 features.* got 1001; set method=f_ld"):
        coefficients(np.ones((2, 1001)), np.array([0, 1]), np.array([0, 1]), config(0.0), num_groups=2)


def test_covariances_are_those_of_numpy_and_add_up_to_nothing() -> None:
    features, _, groups = records(3, num_records=50)
    found = covariances(features, groups, num_groups=3)
    expected = [[np.cov(groups == g, column, ddof=0)[0, 1] for column in features.T] for g in range(3)]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(found.sum(axis=0), 0, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["student.model.name=mlp"], "student.model.name: .* got mlp; set logistic"),
        (["covariance_constraint.max_covariance=-0.1"], "max_covariance"),
        (["covariance_constraint.ridge=0"], "ridge"),
        ([], "data.name: covariance_constraint learns two classes, color_digits has 10"),
    ],
)
def test_what_it_cannot_do_is_said_before_anything_is_written(tmp_path: Path, settings: list[str], words: str) -> None:
    hidden = "data.options.colour_as_feature=false"
    with pytest.raises(ConfigError, match=words):
        run_method(
            configured({}, [hidden, *settings, f"out={tmp_path / 'run'}"], method="covariance_constraint"),
            Reporter(quiet=True),
        )
    assert not (tmp_path / "run").exists()


def test_a_run_guarantees_nothing_and_says_the_covariance(tmp_path: Path) -> None:
    hidden = DataConfig(options={"colour_as_feature": False})
    ten = load_data(hidden)
    splits = {name: replace(part := getattr(ten, name), y=(part.y >= 5).long()) for name in SPLIT_NAMES}
    two = replace(ten, **splits, label_names=("low", "high"))
    run = run_method(
        configured({"data": hidden.model_dump()}, [f"out={tmp_path / 'run'}"], method="covariance_constraint"),
        Reporter(quiet=True),
        two,
    )
    statement = read_statement(run)
    assert statement.epsilon is None
    assert "not private" in statement.noise
    assert not (tmp_path / "run" / "public").exists()
    (remark,) = statement.remarks
    assert float(remark.rpartition(" ")[2]) < 1e-6
    assert read_json(run.metrics)["accuracy"] > 0.6


def test_the_estimator_takes_more_than_two_groups_and_refuses_a_column_that_tells_them() -> None:
    features, labels, groups = records(4)
    estimator = FairClassifier("covariance_constraint", embedding=None)
    fitted = estimator.fit(features[:, :-1], labels, sensitive_features=groups)
    assert math.isinf(fitted.privacy_.epsilon)
    assert fitted.predict_proba(features[:, :-1]).shape == (len(labels), 2)
    with pytest.raises(ValueError, match="sensitive_features determine"):
        estimator.fit(np.column_stack([features[:, :-1], groups]), labels, sensitive_features=groups)
