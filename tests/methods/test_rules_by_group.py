"""Rules that may read the group: the exponential mechanism and its sensitivity by enumeration, limits, prices."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from parity_data import records, trained_on
from priced import priced

from fairpate.config import PrivacyTarget
from fairpate.estimators import FairClassifier
from fairpate.methods.dp_fair_learning import (
    RULES_KJ,
    DpOracleLearnerConfig,
    DpPostprocessingConfig,
    GroupRules,
    OracleLearner,
    cost_differences,
    fair_mixing,
    published_num_rounds,
    released_counts,
    sensitivity_of,
)
from fairpate.methods.parity import Constraint, ParityCells
from fairpate.nn.fit import said_labels
from fairpate.privacy.discrete_gaussian import SeededSource
from fairpate.privacy.laplace import choose_cheap

pytestmark = pytest.mark.usefixtures("light_runs")

X, Y, Z = records(1500, 3)


def train(epsilon: float = math.inf, **changes: Any) -> Any:
    settings = {"rules": "by_group", "num_rounds": 40, "learning_rate": 0.5, "min_share": 0.001}
    return trained_by(PrivacyTarget(epsilon=epsilon, delta=1e-6, accounting="rdp"), **settings | changes)


def trained_by(target: PrivacyTarget, **settings: Any) -> Any:
    config = DpOracleLearnerConfig(**settings)
    return trained_on(OracleLearner(target=target, noise="seeded", dp_oracle_learner=config), X, Y, Z)


@pytest.mark.parametrize("epsilon", [0.0, 0.7, 4.0])
def test_a_choice_has_the_odds_of_the_exponential_mechanism(epsilon: float) -> None:
    costs, source = [Fraction(3, 2), Fraction(-1), Fraction(0), Fraction(5)], SeededSource(1)
    drawn = [choose_cheap(costs, sensitivity=Fraction(1, 2), epsilon=epsilon, source=source) for _ in range(4000)]
    odds = np.exp([-epsilon * float(cost) for cost in costs])
    found = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(found, odds / odds.sum(), atol=0.02)
    assert choose_cheap(costs, sensitivity=Fraction(1), epsilon=math.inf, source=source) == 1
    assert choose_cheap(costs, sensitivity=Fraction(0), epsilon=epsilon, source=source) == 1


@pytest.mark.parametrize(
    "bad", [{"costs": []}, {"sensitivity": Fraction(-1)}, {"epsilon": -1.0}, {"epsilon": math.nan}]
)
def test_a_choice_refuses_what_has_no_odds(bad: dict[str, Any]) -> None:
    words = {"costs": [Fraction(0)], "sensitivity": Fraction(1), "epsilon": 1.0} | bad
    with pytest.raises(ValueError, match="Expected at least one cost, sensitivity >= 0 and epsilon >= 0"):
        choose_cheap(words.pop("costs"), **words, source=SeededSource(0))


def whole_costs(labels: Any, groups: Any, said: Any, prices_GE: Any, constraint: Any) -> dict[Any, float]:
    """Every rule of the class, and its cost record by record."""
    num_groups = len(prices_GE)
    cells = ParityCells.of(labels, groups, num_groups=num_groups, constraint=constraint)
    differences_N = cost_differences(cells, prices_GE)
    return {
        rule: float(sum(d for d, a, j in zip(differences_N, groups, said, strict=True) if RULES_KJ[rule[a], j]))
        for rule in itertools.product(range(4), repeat=num_groups)
    }


@pytest.mark.parametrize("num_groups", [2, 3])
@pytest.mark.parametrize("constraint", get_args(Constraint))
def test_no_changed_group_changes_the_odds_of_a_rule_by_more_than_epsilon(num_groups: int, constraint: Any) -> None:
    """Over every rule of the class and every changed group of every record; the sensitivity is reached."""
    rng = np.random.default_rng(num_groups)
    labels, said = np.tile([0, 1, 0, 1], 3), np.tile([0, 0, 1, 1], 3)
    groups = np.arange(12) % num_groups
    prices_GE = rng.normal(size=(num_groups, 2 if constraint == "equalized_odds" else 1)) * 2
    cells = ParityCells.of(labels, groups, num_groups=num_groups, constraint=constraint)
    sensitivity = float(sensitivity_of(GroupRules(cells, said).differences(prices_GE)))
    epsilon = 0.8

    def odds(groups: Any) -> npt.NDArray[np.float64]:
        costs = np.array(list(whole_costs(labels, groups, said, prices_GE, constraint).values()))
        weights = np.exp(-epsilon * (costs - costs.min()) / (2 * sensitivity))
        shares: npt.NDArray[np.float64] = weights / weights.sum()
        return shares

    before, moved = whole_costs(labels, groups, said, prices_GE, constraint), []
    for row, other in itertools.product(range(len(groups)), range(num_groups)):
        changed = groups.copy()
        changed[row] = other
        after = whole_costs(labels, changed, said, prices_GE, constraint)
        moved.append(max(abs(after[rule] - before[rule]) for rule in before))
        assert np.abs(np.log(odds(changed) / odds(groups))).max() <= epsilon + 1e-9
    assert max(moved) == pytest.approx(sensitivity)


def test_rules_are_drawn_with_the_odds_of_the_whole_class() -> None:
    """Group by group, and yet as if all 16 rules were weighed against each other."""
    labels, groups, said = np.array([0, 1, 1, 0, 1]), np.array([0, 0, 1, 1, 1]), np.array([0, 1, 0, 1, 1])
    prices_GE = np.array([[0.7], [-1.3]])
    cells = ParityCells.of(labels, groups, num_groups=2, constraint="equal_false_positives")
    rules, source, epsilon = GroupRules(cells, said), SeededSource(2), 3.0
    sensitivity = float(sensitivity_of(rules.differences(prices_GE)))
    costs = whole_costs(labels, groups, said, prices_GE, "equal_false_positives")
    weights = {rule: math.exp(-epsilon * cost / (2 * sensitivity)) for rule, cost in costs.items()}
    place = {tuple(rule): number for number, rule in enumerate(RULES_KJ.tolist())}
    drawn = Counter(
        tuple(place[tuple(row)] for row in rules.choose(prices_GE, epsilon=epsilon, source=source).tolist())
        for _ in range(2000)
    )
    total = sum(weights.values())
    expected = np.array([2000 * weight / total for weight in weights.values()])
    found = np.array([drawn[rule] for rule in weights])
    statistic = float(((found - expected) ** 2 / expected).sum())
    assert 3 < statistic < 38  # of 15 degrees of freedom, between a thousandth and its counterpart


def test_the_auditors_counts_change_by_two_at_most() -> None:
    labels, said = np.array([0, 0, 1, 1, 0, 1]), np.array([0, 1, 0, 1, 1, 1])
    groups, rule_GJ = np.array([0, 0, 0, 1, 1, 2]), np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])

    def counted(groups: Any) -> Any:
        cells = ParityCells.of(labels, groups, num_groups=3, constraint="equalized_odds")
        return GroupRules(cells, said).positives(rule_GJ, epsilon=math.inf, source=SeededSource(0))

    moved = []
    for row, other in itertools.product(range(6), range(3)):
        changed = groups.copy()
        changed[row] = other
        moved.append(np.abs(counted(changed) - counted(groups)).sum())
    assert max(moved) == 2
    cells = ParityCells.of(labels, groups, num_groups=3, constraint="equalized_odds")
    noise = [
        GroupRules(cells, said).positives(rule_GJ, epsilon=0.5, source=SeededSource(seed)) - counted(groups)
        for seed in range(300)
    ]
    assert np.abs(noise).mean() == pytest.approx(2 / 0.5, rel=0.1)


@pytest.mark.parametrize(
    "constraint",
    [
        "equalized_odds",
        pytest.param("equal_false_positives", marks=pytest.mark.slow),
        pytest.param("demographic_parity", marks=pytest.mark.slow),
    ],
)
def test_without_noise_it_is_the_best_fair_mixing_of_the_same_classifier(constraint: Any) -> None:
    """What the class mixes is what the linear programme of DP-postprocessing mixes."""
    trained = train(max_gap=0.03, num_rounds=3000, learning_rate=0.2, dual_bound=4.0, constraint=constraint)
    counts_GYC = released_counts(
        said_labels(trained.model, X),
        Y.numpy(),
        Z.numpy(),
        epsilon=math.inf,
        source=SeededSource(0),
        num_groups=2,
        num_classes=2,
    )
    best = fair_mixing(
        counts_GYC, DpPostprocessingConfig(max_gap=0.03, constraint=constraint, slack=False), epsilon=math.inf
    )
    mixed_GYC = np.einsum("gyj,gjk->gyk", counts_GYC, trained.mixing_GCC)
    wrong = 1 - np.trace(mixed_GYC.sum(axis=0)) / len(Y)
    assert wrong == pytest.approx(best.error, abs=0.01)
    rates_GY = mixed_GYC[:, :, 1] / mixed_GYC.sum(axis=2)
    gaps = {
        "equal_false_positives": [rates_GY[1, 0] - rates_GY[0, 0]],
        "equalized_odds": rates_GY[1] - rates_GY[0],
        "demographic_parity": [np.diff(mixed_GYC[:, :, 1].sum(axis=1) / mixed_GYC.sum(axis=(1, 2)))[0]],
    }
    assert np.abs(gaps[constraint]).max() < 0.03 + 0.01


def test_under_noise_false_positives_come_nearer_and_errors_stay_those_of_the_public_rule() -> None:
    plain = train(dual_bound=0.0, num_rounds=1)
    trained = train(10.0, constraint="equal_false_positives", dual_bound=2.0, num_rounds=20)

    def measured(found: Any) -> tuple[float, float]:
        said = said_labels(found.model, X)
        positive = np.einsum("nj,nj->n", said, found.mixing_GCC[Z.numpy(), :, 1])
        of_negatives = [positive[(Z.numpy() == z) & (Y.numpy() == 0)].mean() for z in (0, 1)]
        return float(np.abs(positive - Y.numpy()).mean()), abs(of_negatives[1] - of_negatives[0])

    (error, gap), (plain_error, plain_gap) = measured(trained), measured(plain)
    assert gap < 0.7 * plain_gap
    assert error < plain_error + 0.1


@pytest.mark.parametrize("accounting", ["pld", "rdp"])
def test_all_releases_are_priced_within_the_target(accounting: Any) -> None:
    target = PrivacyTarget(epsilon=2.0, delta=1e-6, accounting=accounting)
    trained = trained_by(target, rules="by_group", num_rounds=12)
    cost = priced(trained.events, target)
    assert 1.95 < cost.epsilon <= 2
    assert (cost.unit, cost.relation) == ("sensitive attribute", "replace one")
    assert [(type(event).__name__, event.count) for event in trained.events] == [
        ("LaplaceReleases", 1),
        ("PureReleases", 12),
        ("LaplaceReleases", 12),
    ]


def test_the_papers_rounds_know_the_size_of_the_class() -> None:
    """16 rules of two groups: epsilon 1 is enough for ten rounds where linear rules of 100 features have none."""
    config = DpOracleLearnerConfig(rules="by_group", dual_bound=2.0)
    found = published_num_rounds(
        config, PrivacyTarget(epsilon=1.0, delta=1e-7), num_records=2000, num_groups=2, vc_dimension=100
    )
    by_hand = 2 * math.sqrt(math.log(5)) * 2000 / (2 * 9 * math.sqrt(math.log(1e7)) * (math.log(16) + math.log(40)))
    assert found == pytest.approx(by_hand)
    assert found > 10


def test_prediction_needs_the_group() -> None:
    names, groups = np.array(["no", "yes"])[Y.numpy()], np.array(["a", "b"])[Z.numpy()]
    settings = {"rules": "by_group", "num_rounds": 10, "constraint": "equal_false_positives"}
    estimator = FairClassifier(
        "dp_oracle_learner", epsilon=4.0, dp_oracle_learner=settings, noise="seeded", random_state=1
    )
    estimator.fit(X.numpy(), names, sensitive_features=groups)
    probabilities = estimator.predict_proba(X.numpy(), sensitive_features=groups)
    assert (estimator.predict(X.numpy(), sensitive_features=groups) == names).mean() > 0.6
    assert torch.from_numpy(probabilities).sum(dim=1).allclose(torch.ones(len(X)), atol=1e-5)
    with pytest.raises(ValueError, match="sensitive_features"):
        estimator.predict(X.numpy())
