"""Theorems 4.4 and 4.5: how far a play is from an equilibrium, by enumeration, and what follows for error and gaps."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from parity_data import records, trained_on
from posthoc import compositions, distance, game_bounds, least_errors
from scipy.optimize import linprog

from fairpate.config import PrivacyTarget
from fairpate.methods.dp_fair_learning import (
    RULES_KJ,
    DpOracleLearnerConfig,
    DpPostprocessingConfig,
    GameRules,
    OracleLearner,
    fair_mixing,
    released_counts,
)
from fairpate.methods.parity import ParityCells
from fairpate.nn.fit import said_labels
from fairpate.privacy.discrete_gaussian import SeededSource

pytestmark = pytest.mark.usefixtures("light_runs")

DRAWS = np.random.default_rng(0)
CONSTRAINTS = ("equalized_odds", "equal_false_positives")


def game(num_groups: int, constraint: Any, *, dual_bound: float = 3.0, max_gap: float = 0.05) -> tuple[Any, ...]:
    """Labels, groups the predictions of a classifier on 60 records, and the rules of play."""
    groups = np.arange(60) % num_groups
    labels = (DRAWS.random(60) < 0.35 + 0.2 * groups).astype(np.int64)
    said = np.where(DRAWS.random(60) < 0.75, labels, 1 - labels)
    cells = ParityCells.of(labels, groups, num_groups=num_groups, constraint=constraint)
    rules = GameRules(num_rounds=1, dual_bound=dual_bound, learning_rate=1.0, max_gap=max_gap)
    return cells, said, rules


def error_and_violations(cells: ParityCells, said: Any, table_GJ: Any, max_gap: float) -> tuple[float, list[float]]:
    """Record by record; violations in the order of signs, groups, events."""
    positive = [table_GJ[group, word] for group, word in zip(cells.groups_N, said, strict=True)]
    wrong = [1 - p if label else p for p, label in zip(positive, cells.labels_N, strict=True)]

    def rate(group: int, event: int) -> float:
        inside = (cells.groups_N == group) & (cells.events_N == event)
        return float(np.mean(np.array(positive)[inside]))

    gaps = [rate(a, e) - rate(0, e) for a in range(1, cells.num_groups) for e in range(cells.num_events)]
    return float(np.mean(wrong)), [sign * gap - max_gap for sign in (1, -1) for gap in gaps]


def lagrangian(cells: ParityCells, said: Any, table_GJ: Any, multipliers: Any, max_gap: float) -> float:
    error, violations = error_and_violations(cells, said, table_GJ, max_gap)
    return error + float(np.dot(np.ravel(multipliers), violations))


def any_play(num_groups: int, num_events: int, dual_bound: float) -> tuple[Any, Any]:
    shares = DRAWS.dirichlet(np.ones(2 * (num_groups - 1) * num_events + 1))[:-1]
    return DRAWS.random((num_groups, 2)), dual_bound * shares.reshape(2, num_groups - 1, num_events)


@pytest.mark.parametrize("num_groups", [2, 3])
@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_the_distance_is_the_larger_gain_over_every_rule_and_every_multiplier(num_groups: int, constraint: Any) -> None:
    cells, said, rules = game(num_groups, constraint)
    for _ in range(4):
        table, multipliers = any_play(num_groups, cells.num_events, rules.dual_bound)
        here = lagrangian(cells, said, table, multipliers, rules.max_gap)
        whole_class = (RULES_KJ[list(rule)] for rule in itertools.product(range(4), repeat=num_groups))
        learner = here - min(lagrangian(cells, said, rule, multipliers, rules.max_gap) for rule in whole_class)
        corners = [np.zeros(multipliers.size), *(rules.dual_bound * np.eye(multipliers.size))]
        auditor = max(lagrangian(cells, said, table, corner, rules.max_gap) for corner in corners) - here
        found = distance(cells, said, table, multipliers, rules)
        assert found == pytest.approx(max(learner, auditor))


@pytest.mark.parametrize("num_groups", [2, 3])
@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_no_play_errs_or_differs_by_more_than_its_distance_allows(num_groups: int, constraint: Any) -> None:
    """Any mixture beside any multipliers, good or bad; the best fair rule is a linear programme's."""
    closest = 0.0
    for _ in range(5):
        cells, said, rules = game(num_groups, constraint)
        counts = released_counts(
            said, cells.labels_N, cells.groups_N, epsilon=math.inf, source=SeededSource(0), num_groups=num_groups
        )
        config = DpPostprocessingConfig(constraint=constraint, max_gap=rules.max_gap, min_share=1e-6)
        best = fair_mixing(counts, config, epsilon=math.inf).error
        for _ in range(40):
            table, multipliers = any_play(num_groups, cells.num_events, rules.dual_bound)
            nu = distance(cells, said, table, multipliers, rules)
            error, violations = error_and_violations(cells, said, table, rules.max_gap)
            for has_indicators in {False, constraint == "equal_false_positives"}:
                bound = game_bounds(
                    nu, dual_bound=rules.dual_bound, num_groups=num_groups, has_indicators=has_indicators
                )
                assert error <= best + bound.error + 1e-9
                assert max(violations) <= bound.gap + 1e-9
                closest = max(closest, max(violations) / bound.gap)
    assert closest > 0.15, "a bound six times as small does not hold"


def test_a_long_play_without_noise_comes_near_an_equilibrium() -> None:
    x, y, z = records(1500, 3)

    def played(num_rounds: int) -> float:
        settings = {"rules": "by_group", "num_rounds": num_rounds, "learning_rate": 0.5, "min_share": 0.001}
        config = DpOracleLearnerConfig(**settings)
        target = PrivacyTarget(epsilon=math.inf, delta=1e-6, accounting="rdp")
        trained = trained_on(OracleLearner(target=target, noise="seeded", dp_oracle_learner=config), x, y, z)
        cells = ParityCells.of(y.numpy(), z.numpy(), num_groups=2, constraint=config.constraint)
        assert trained.mixing_GCC is not None
        said = said_labels(trained.model, x).argmax(axis=1)
        rules = GameRules(num_rounds=1, dual_bound=config.dual_bound, learning_rate=1.0, max_gap=config.max_gap)
        return distance(cells, said, trained.mixing_GCC[:, :, 1], trained.mean_multipliers, rules)

    few, many = played(5), played(800)
    assert 0 <= many < 0.05 < few


def test_by_hand() -> None:
    """nu 1/10, B 4, three groups: error 2/10; gaps (1 + 2/10) / 4; with indicators 2/10 over 4 - 2."""
    plain, aware = (game_bounds(0.1, dual_bound=4.0, num_groups=3, has_indicators=has) for has in (False, True))
    assert (plain.error, plain.gap) == pytest.approx((0.2, 0.3))
    assert (aware.error, aware.gap) == pytest.approx((0.2, 0.1))
    assert game_bounds(0.1, dual_bound=2.0, num_groups=3, has_indicators=True).gap == math.inf


@pytest.mark.parametrize("bad", [{"nu": -0.1}, {"nu": math.nan}, {"dual_bound": 0.0}, {"num_groups": 1}])
def test_what_is_no_game_is_refused(bad: dict[str, Any]) -> None:
    words: dict[str, Any] = {"nu": 0.1, "dual_bound": 2.0, "num_groups": 2} | bad
    with pytest.raises(ValueError, match="Expected nu >= 0, dual_bound > 0 and num_groups > 1"):
        game_bounds(words.pop("nu"), **words)


@pytest.mark.parametrize("kind", ["blind", "aware"])
@pytest.mark.parametrize("gap", [0.05, 0.25, 0.7])
def test_least_errors_solve_the_linear_program_over_mixtures(kind: str, gap: float) -> None:
    """Against scipy: weights of the classifiers 0, 1 for U, and 1 for R or for B where the group may be read."""
    assert sorted(compositions(2, 2)) == [(0, 2), (1, 1), (2, 0)]
    tables = np.random.default_rng(0).integers(1, 6, size=(40, 2, 2, 2))
    for table in tables:
        negatives, positives = table[..., 0], table[..., 1]
        said = [np.zeros((2, 2)), np.array([[1, 1], [0, 0]]), np.array([[1, 0], [1, 0]]), np.array([[0, 1], [0, 1]])]
        said = said[: 2 if kind == "blind" else 4]
        errors = [((negatives * s).sum() + (positives * (1 - s)).sum()) / table.sum() for s in said]
        rates = [(negatives * s).sum(axis=0) / negatives.sum(axis=0) for s in said]
        gaps = [float(r[0] - r[1]) for r in rates]
        solved = linprog(errors, A_ub=[gaps, [-g for g in gaps]], b_ub=[gap, gap], A_eq=[[1.0] * len(said)], b_eq=[1.0])
        assert least_errors(table[None], gap, kind)[0] == pytest.approx(solved.fun, abs=1e-9)
