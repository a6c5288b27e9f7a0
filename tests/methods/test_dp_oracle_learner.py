"""DP-oracle-learner: sensitivities by brute force, limits against regression and fairlearn, rounds and prices."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from fairlearn.reductions import EqualizedOdds, ExponentiatedGradient
from parity_data import error, odds_gap, records, trained_on
from priced import priced
from sklearn.base import BaseEstimator

from fairpate.config import PrivacyTarget
from fairpate.estimators import FairClassifier
from fairpate.methods.dp_fair_learning import (
    DpOracleLearnerConfig,
    OracleLearner,
    cost_differences,
    feature_sensitivity,
    published_num_rounds,
)
from fairpate.methods.parity import Constraint, ParityCells
from fairpate.nn.fit import said_labels

pytestmark = pytest.mark.usefixtures("light_runs")

Floats = npt.NDArray[np.float64]
X, Y, Z = records(1500, 3)


def train(epsilon: float = math.inf, *, data: Any = (X, Y, Z), **changes: Any) -> Any:
    settings = {"max_gap": 0.03, "num_rounds": 40, "dual_bound": 2.0, "learning_rate": 0.5, "min_share": 0.001}
    settings |= {"release": "every_round", "num_directions": None}
    target = PrivacyTarget(epsilon=epsilon, delta=1e-6, accounting="rdp")
    return trained_on(oracle(target, **settings | changes), *data)


def oracle(target: PrivacyTarget, seed: int = 0, **settings: Any) -> OracleLearner:
    config = DpOracleLearnerConfig(**settings)
    return OracleLearner(target=target, noise="seeded", seed=seed, dp_oracle_learner=config)


def positive(trained: Any, x: Any = X) -> Floats:
    said: Floats = said_labels(trained.model, x)[:, 1].astype(np.float64)
    return said


def least_squares(x: Floats, cost_N: Floats, ridge: float) -> Floats:
    """Ridge regression of costs with a constant feature, by an augmented system."""
    features = np.hstack([x, np.ones((len(x), 1))])
    above = np.sqrt(ridge) * np.eye(features.shape[1])
    solution: Floats = np.linalg.lstsq(
        np.vstack([features, above]), np.append(cost_N, np.zeros(len(above))), rcond=None
    )[0]
    return solution


class Regression(BaseEstimator):  # type: ignore[misc]
    """The learner's answer for fairlearn, which gives costs as labels and weights."""

    def fit(self, X: Any, y: Any, sample_weight: Any) -> Regression:
        self.coefficients_ = least_squares(np.asarray(X), np.asarray(sample_weight) * (1 - 2 * np.asarray(y)), 1e-6)
        return self

    def predict(self, X: Any) -> Any:
        features = np.asarray(X)
        return (features @ self.coefficients_[:-1] + self.coefficients_[-1] < 0).astype(int)


@cache
def of_fairlearns_reduction() -> Floats:
    # Its bound is on the distance to everybody: half of that between two groups of one size.
    reference = ExponentiatedGradient(Regression(), EqualizedOdds(difference_bound=0.015), eps=0.01, max_iter=40).fit(
        X.double().numpy(), Y.numpy(), sensitive_features=Z.numpy()
    )
    found: Floats = reference._pmf_predict(X.double().numpy())[:, 1]
    return found


@pytest.mark.filterwarnings("ignore:Setting a")  # fairlearn under pandas 3
@pytest.mark.parametrize("release", ["every_round", "once"])
def test_without_noise_it_reaches_what_fairlearns_reduction_reaches(release: str) -> None:
    theirs = of_fairlearns_reduction()
    ours = positive(train(release=release, ridge=1e-6))
    plain = positive(train(dual_bound=0.0, num_rounds=1))
    assert odds_gap(plain, Y, Z) > 0.15
    assert odds_gap(ours, Y, Z) < 0.045
    assert odds_gap(theirs, Y, Z) < 0.045
    assert abs(error(ours, Y) - error(theirs, Y)) < 0.012


@pytest.mark.parametrize("epsilon", [math.inf, 0.3])
def test_without_multipliers_every_rule_is_plain_regression_and_nothing_private_enters(epsilon: float) -> None:
    trained = train(epsilon, dual_bound=0.0, ridge=0.7, num_rounds=5)
    expected = least_squares(X.double().numpy(), 1.0 - 2.0 * Y.numpy(), 0.7)
    np.testing.assert_allclose(trained.coefficients_RD, np.tile(expected, (5, 1)), atol=1e-9)
    said = X.double().numpy() @ expected[:-1] + expected[-1] < 0
    np.testing.assert_array_equal(positive(trained), said)
    assert not trained.mean_multipliers.any()


@pytest.mark.parametrize("num_directions", [4, 9])
def test_all_forms_are_one_game_where_there_is_no_noise(num_directions: int) -> None:
    """The records have three features and a constant one: four directions are all."""
    printed = train().coefficients_RD
    np.testing.assert_allclose(train(release="once").coefficients_RD, printed, atol=1e-8)
    for release in ("once", "every_round"):
        turned = train(release=release, num_directions=num_directions).coefficients_RD
        np.testing.assert_allclose(turned, printed, atol=1e-8)


def test_few_directions_are_those_that_features_vary_most_in() -> None:
    """With one, rules differ from the public regression along the first principal axis alone."""
    wide = X * torch.tensor([1.0, 40.0, 1.0])
    trained = train(data=(wide, Y, Z), num_directions=1, ridge=0.5)
    features = np.hstack([wide.double().numpy(), np.ones((len(wide), 1))])
    moved = trained.coefficients_RD - least_squares(features[:, :-1], 1.0 - 2.0 * Y.numpy(), 0.5)
    axis = np.linalg.eigh(features.T @ features)[1][:, -1]
    np.testing.assert_allclose(moved - np.outer(moved @ axis, axis), 0, atol=1e-10)
    assert abs(axis[1]) > 0.99
    assert np.abs(moved).max() > 0


@pytest.mark.parametrize("num_groups", [2, 3])
@pytest.mark.parametrize("constraint", get_args(Constraint))
def test_the_sensitivity_of_the_learners_sums_is_exact(num_groups: int, constraint: Any) -> None:
    """Brute force over every change of one group, with prices held as the game holds them."""
    x, y, z = (values.numpy() for values in records(40, 5, num_groups=num_groups))
    features = np.hstack([x.astype(np.float64), np.ones((len(x), 1))])
    prices_GE = np.random.default_rng(0).normal(size=(num_groups, 2 if constraint == "equalized_odds" else 1))

    def sums(groups: Any) -> Floats:
        cells = ParityCells.of(y, groups, num_groups=num_groups, constraint=constraint)
        total: Floats = features.T @ cost_differences(cells, prices_GE)
        return total

    before, moved = sums(z), [0.0]
    for row in range(len(z)):
        for other in range(num_groups):
            changed = z.copy()
            changed[row] = other
            moved.append(float(np.abs(sums(changed) - before).sum()))
    norms = np.abs(features).sum(axis=1)
    inside = {"equalized_odds": [y == 0, y == 1], "demographic_parity": [y >= 0]}
    inside |= {"equal_opportunity": [y == 1], "equal_false_positives": [y == 0]}
    norms_E = np.array([norms[rows].max() for rows in inside[constraint]])
    bound = feature_sensitivity(prices_GE, norms_E)
    assert max(moved) <= bound + 1e-9
    if num_groups == 2:
        assert max(moved) == pytest.approx(bound)


@pytest.mark.parametrize("num_groups", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_released_counts_have_the_noise_of_their_sensitivity_and_add_up(num_groups: int) -> None:
    """One change moves one group's count when the other follows from public totals, and two with a third group."""
    x, y, z = records(3000, 6, num_groups=num_groups)
    cells = ParityCells.of(y, z, num_groups=num_groups, constraint="equalized_odds")
    epsilon = 0.2 * 4.0
    noise = []
    for seed in range(60):
        target = PrivacyTarget(epsilon=4.0, delta=1e-6, accounting="rdp")
        trained = trained_on(oracle(target, seed, num_rounds=1, frequency_share=0.2, min_share=1e-6), x, y, z)
        found = len(y) * trained.shares_GE
        np.testing.assert_allclose(found.sum(axis=0), [(y == 0).sum(), (y == 1).sum()])
        noise.append((found - cells.counts())[1:].ravel())
    scale = (1 if num_groups == 2 else 2) / epsilon
    assert np.abs(np.concatenate(noise)).mean() == pytest.approx(scale, rel=0.2)


@pytest.mark.parametrize(("release", "count"), [("every_round", 24), ("once", 12)])
@pytest.mark.parametrize("accounting", ["pld", "rdp"])
def test_all_releases_are_priced_within_the_target(release: str, count: int, accounting: str) -> None:
    target = PrivacyTarget(epsilon=2.0, delta=1e-6, accounting=accounting)
    trained = trained_on(oracle(target, num_rounds=12, release=release), X, Y, Z)
    cost = priced(trained.events, target)
    assert 1.98 < cost.epsilon <= 2
    assert (cost.unit, cost.relation) == ("sensitive attribute", "replace one")
    assert [event.count for event in trained.events] == ([1, 1, count] if release == "once" else [1, count])
    assert trained.events[-1].epsilon == trained.round_epsilon


def test_the_papers_rounds_and_noise() -> None:
    """Sheet 14: at epsilon 1, 2,000 records and dimension 100 the formula gives 0.08 rounds."""
    target = PrivacyTarget(epsilon=1.0, delta=1e-7)
    found = published_num_rounds(
        DpOracleLearnerConfig(dual_bound=1.0), target, num_records=2000, num_groups=2, vc_dimension=100
    )
    by_hand = math.sqrt(math.log(5)) * 2000 / (2 * 5 * math.sqrt(math.log(1e7)) * (100 * math.log(2000) + math.log(40)))
    assert found == pytest.approx(by_hand)
    assert found == pytest.approx(0.08, abs=0.005)
    with pytest.raises(ValueError, match=r"gives 0\.\d+ rounds .* epsilon 0.01 .* set dp_oracle_learner.num_rounds"):
        train(0.01, num_rounds=None)
    with pytest.raises(ValueError, match=r"gives inf rounds .* epsilon inf"):
        train(math.inf, num_rounds=None)
    assert len(train(200.0, num_rounds=None, learning_rate=None).coefficients_RD) == math.floor(
        published_num_rounds(
            DpOracleLearnerConfig(dual_bound=2.0),
            PrivacyTarget(epsilon=200.0, delta=1e-6),
            num_records=1500,
            num_groups=2,
            vc_dimension=4,
        )
    )


def test_several_groups_and_much_data_are_learned_under_noise() -> None:
    data = records(20_000, 9, num_groups=3)
    trained = train(10.0, data=data, num_rounds=25, release="once", max_gap=0.05)
    said = positive(trained, data[0])
    assert error(said, data[1]) < 0.35
    assert odds_gap(said, *data[1:]) < 0.6 * odds_gap(positive(train(data=data, dual_bound=0.0), data[0]), *data[1:])


def test_what_cannot_be_learned_is_refused() -> None:
    with pytest.raises(ValueError, match=r"min_share 0.4, got 0.\d+ in group 0, event 0"):
        train(min_share=0.4)
    with pytest.raises(ValueError, match="labels to be codes from 0 to 1"):
        train(data=(X, Y + 1, Z))
    with pytest.raises(ValueError, match="reference_group < 2"):
        train(reference_group=2)


def test_the_estimator_needs_no_group_at_prediction() -> None:
    x, names = X.numpy(), np.array(["no", "yes"])[Y.numpy()]
    estimator = FairClassifier(
        "dp_oracle_learner",
        epsilon=math.inf,
        dp_oracle_learner={"num_rounds": 20, "learning_rate": 0.5, "dual_bound": 2.0},
        noise="seeded",
        random_state=1,
    )
    estimator.fit(x, names, sensitive_features=np.array(["a", "b"])[Z.numpy()])
    probabilities = estimator.predict_proba(x)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)
    drawn = estimator.predict(x)
    np.testing.assert_array_equal(drawn[probabilities[:, 1] == 1], "yes")
    np.testing.assert_array_equal(drawn[probabilities[:, 1] == 0], "no")
    assert odds_gap(probabilities[:, 1], Y, Z) < 0.06
    assert estimator.privacy_.epsilon == math.inf
    with pytest.raises(ValueError, match="Only binary classification is supported"):
        estimator.fit(x[:3], ["a", "b", "c"], sensitive_features=[0, 1, 1])
    with pytest.raises(ValueError, match="sensitive_features: expected one value per record, got 2"):
        estimator.fit(x, names, sensitive_features=[0, 1])
