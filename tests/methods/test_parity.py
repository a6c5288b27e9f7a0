"""Parity as rates and as a game, against counting by hand and fairlearn's reduction."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
from fairlearn.reductions import DemographicParity, EqualizedOdds, ExponentiatedGradient
from method_kinds import quick_and_slow
from parity_data import error, odds_gap, records
from sklearn.linear_model import LogisticRegression

from fairpate.methods.dp_fair_learning import (
    GameRules,
    cost_differences,
    fit_mixture,
    multipliers_of,
    play,
    prices,
    violations_of,
)
from fairpate.methods.parity import Constraint, ParityCells, require_shares

pytestmark = pytest.mark.usefixtures("light_runs")

X, Y, Z = records(1500, 0, num_groups=3)
FEATURES = X.double().numpy()


def rules(**changes: Any) -> GameRules:
    return GameRules(**{"num_rounds": 40, "dual_bound": 1.0, "learning_rate": 1.0, "max_gap": 0.02} | changes)


@pytest.mark.parametrize(
    ("constraint", "events"),
    [
        ("demographic_parity", [(0, 1)]),
        ("equalized_odds", [(0,), (1,)]),
        ("equal_opportunity", [(1,)]),
        ("equal_false_positives", [(0,)]),
    ],
)
def test_cells_hold_who_they_say(constraint: Constraint, events: list[tuple[int, ...]]) -> None:
    cells = ParityCells.of(Y, Z, num_groups=4, constraint=constraint)
    said = (X[:, 0] > 0).numpy()
    for group in range(4):
        for event, labels in enumerate(events):
            inside = (Z.numpy() == group) & np.isin(Y.numpy(), labels)
            assert cells.counts()[group, event] == inside.sum()
            np.testing.assert_allclose(cells.sums(FEATURES)[group, event], FEATURES[inside].sum(axis=0))
            if group < 3:
                assert cells.rates(said)[group, event] == pytest.approx(said[inside].mean())
    assert np.isnan(cells.rates(said)[3]).all()


def test_prices_put_every_violation_into_the_cost_of_a_rule() -> None:
    """Sheet 14, step 3: mean cost = error + sum lambda (+-)(rate_a - rate_0), for any rule and any multipliers."""
    generator = np.random.default_rng(1)
    for constraint in get_args(Constraint):
        cells = ParityCells.of(Y, Z, num_groups=3, constraint=constraint)
        lambdas = generator.random((2, 2, cells.num_events))
        for reference in range(3):
            cost = cost_differences(cells, prices(lambdas, cells.counts() / len(Y), reference_group=reference))
            said = generator.random(len(Y)) < 0.3
            others = [group for group in range(3) if group != reference]
            gaps = np.array([cells.rates(said)[group] - cells.rates(said)[reference] for group in others])
            expected = np.mean(said != Y.numpy()) + (lambdas[0] * gaps - lambdas[1] * gaps).sum()
            assert Y.numpy().mean() + (cost * said).mean() == pytest.approx(expected, abs=1e-12)


def test_multipliers_stay_positive_and_within_their_bound_and_follow_violations() -> None:
    theta = np.array([[[800.0, -800.0]], [[3.0, 0.0]]])
    found = multipliers_of(theta, 2.5)
    assert (found >= 0).all()
    assert found.sum() <= 2.5
    assert found[0, 0, 0] == pytest.approx(2.5)
    np.testing.assert_allclose(multipliers_of(np.zeros((2, 1, 2)), 2.0), np.full((2, 1, 2), 2 / 5))
    rates = np.array([[0.2, 0.5], [0.35, 0.4]])
    np.testing.assert_allclose(
        violations_of(rates, max_gap=0.1, reference_group=0), [[[0.05, -0.2]], [[-0.25, 0.0]]], atol=1e-12
    )


def test_the_game_adds_what_the_auditor_says_and_tells_each_round() -> None:
    told: list[tuple[int, int]] = []
    seen: list[Any] = []
    answers, _ = play(
        rules(num_rounds=3, learning_rate=2.0),
        np.full((2, 1), 0.5),
        answer=lambda prices_GE: seen.append(prices_GE) or len(seen),
        violations=lambda _: np.array([[[1.0]], [[0.0]]]),
        on_round=lambda done, total: told.append((done, total)),
    )
    assert answers == (1, 2, 3)
    assert told == [(1, 3), (2, 3), (3, 3)]
    for turn, found in enumerate(seen):
        weight = (math.exp(2 * turn) - 1) / (2 + math.exp(2 * turn))
        np.testing.assert_allclose(found, [[-2 * weight], [2 * weight]])


@pytest.mark.filterwarnings("ignore:Setting a")  # fairlearn under pandas 3
@pytest.mark.parametrize("constraint", quick_and_slow(["equalized_odds", "demographic_parity"], ["equalized_odds"]))
def test_without_privacy_the_game_reaches_what_fairlearns_reduction_reaches(constraint: Constraint) -> None:
    x, y, z = records(1500, 3)
    features = x.double().numpy()
    moments = {"equalized_odds": EqualizedOdds, "demographic_parity": DemographicParity}[constraint]
    # Its bound is on the distance to everybody: half of that between two groups of one size.
    reference = ExponentiatedGradient(LogisticRegression(), moments(difference_bound=0.015), eps=0.01, max_iter=40).fit(
        features, y.numpy(), sensitive_features=z.numpy()
    )
    theirs = reference._pmf_predict(features)[:, 1]
    cells = ParityCells.of(y, z, num_groups=2, constraint=constraint)
    members = fit_mixture(features, cells, LogisticRegression(), rules(max_gap=0.03, dual_bound=2.0, learning_rate=0.5))
    ours = np.mean([member.predict(features) for member in members], axis=0)
    plain = LogisticRegression().fit(features, y.numpy()).predict(features)

    def gap(positive: Any) -> float:
        rates = cells.rates(positive)
        return float(np.abs(rates[1] - rates[0]).max())

    assert gap(plain) > 0.15
    assert gap(ours) < 0.045
    assert gap(theirs) < 0.045
    assert abs(error(ours, y) - error(theirs, y)) < 0.012
    assert error(ours, y) > error(plain, y)
    assert odds_gap(plain, y, z) > 0.1


def test_what_cannot_be_compared_is_refused() -> None:
    for labels, groups, num_groups, message in (
        ([0, 2], [0, 1], 2, "labels to be codes from 0 to 1"),
        ([0, 1], [0, 2], 2, "groups to be codes from 0 to 1"),
        ([0, 1], [0, 0], 1, "at least 2 groups"),
        ([0, 1], [0], 2, "one group per label"),
    ):
        with pytest.raises(ValueError, match=message):
            ParityCells.of(labels, groups, num_groups=num_groups, constraint="equalized_odds")
    empty = ParityCells.of([0, 1, 1], [0, 0, 1], num_groups=2, constraint="equalized_odds")
    with pytest.raises(ValueError, match="none in group 1, event 0"):
        fit_mixture([[1.0], [2.0], [3.0]], empty, LogisticRegression(), rules())
    with pytest.raises(ValueError, match=r"min_share 0.1, got 0.05 in group 1, event 0"):
        require_shares(np.array([[0.5, 0.2], [0.05, 0.25]]), 0.1)
    with pytest.raises(ValueError, match="got nan"):
        require_shares(np.array([0.5, math.nan]), 0.1)
    for wrong, message in (
        ({"num_rounds": 0}, "num_rounds"),
        ({"dual_bound": -1.0}, "dual_bound"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"max_gap": 1.5}, "max_gap"),
    ):
        with pytest.raises(ValueError, match=message):
            rules(**wrong)
