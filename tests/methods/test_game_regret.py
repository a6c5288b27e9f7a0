"""A bound on the distance to an equilibrium before play: by hand, and over plays of rules by group."""

from __future__ import annotations

import math
from typing import Any

import pytest
from parity_data import records, trained_on
from posthoc import distance, nu_before_play

from fairpate.config import PrivacyTarget
from fairpate.methods.dp_fair_learning import DpOracleLearnerConfig, GameRules, OracleLearner
from fairpate.methods.parity import ParityCells
from fairpate.nn.fit import said_labels

pytestmark = pytest.mark.usefixtures("light_runs")

RULES = GameRules(num_rounds=100, dual_bound=2.0, learning_rate=0.2, max_gap=0.05)
SIZES: dict[str, Any] = {
    "num_records": 1000,
    "num_groups": 2,
    "num_events": 2,
    "smallest_share": 0.1,
    "round_epsilon": math.inf,
    "size_epsilon": math.inf,
    "failure_probability": 0.05,
}


def test_each_part_by_hand() -> None:
    """4 multipliers; a class of 4^2 rules; costs move by 2 B / .1 = 40; the smallest cell has 100 records."""
    without_noise = 2 * (math.log(5) / 20 + 0.1)
    assert nu_before_play(RULES, **SIZES) == pytest.approx(without_noise)
    sizes = nu_before_play(RULES, **SIZES | {"size_epsilon": 0.5}) - without_noise
    assert sizes == pytest.approx(2 * 4 * 2 * 2 * math.log(2 * 60) / 100)
    rounds = nu_before_play(RULES, **SIZES | {"round_epsilon": 4.0}) - without_noise
    learner = 2 * 40 * math.log(16 * 100 * 60) / 4000
    assert rounds == pytest.approx(learner + 4 * 2 * 0.5 * math.log(100 * 4 * 60) / 100)


@pytest.mark.parametrize(("constraint", "epsilon"), [("equalized_odds", 8.0), ("equal_false_positives", math.inf)])
def test_no_play_ends_further_from_an_equilibrium(constraint: Any, epsilon: float) -> None:
    x, y, z = records(1500, 3)
    settings = {"rules": "by_group", "num_rounds": 40, "learning_rate": 0.3, "min_share": 0.001}
    config = DpOracleLearnerConfig(constraint=constraint, **settings)
    cells = ParityCells.of(y.numpy(), z.numpy(), num_groups=2, constraint=constraint)
    assert config.learning_rate is not None
    rules = GameRules(num_rounds=40, dual_bound=config.dual_bound, learning_rate=0.3, max_gap=config.max_gap)
    target, closest = PrivacyTarget(epsilon=epsilon, delta=1e-6, accounting="rdp"), 0.0
    for seed in range(4):
        method = OracleLearner(target=target, noise="seeded", seed=seed, dp_oracle_learner=config)
        trained = trained_on(method, x, y, z)
        assert trained.mixing_GCC is not None
        said = said_labels(trained.model, x).argmax(axis=1)
        found = distance(cells, said, trained.mixing_GCC[:, :, 1], trained.mean_multipliers, rules)
        bound = nu_before_play(
            rules,
            num_records=len(y),
            num_groups=2,
            num_events=cells.num_events,
            smallest_share=float(trained.shares_GE.min()),
            round_epsilon=trained.round_epsilon,
            size_epsilon=config.frequency_share * epsilon,
            failure_probability=0.05,
        )
        assert found <= bound
        closest = max(closest, found / bound)
    # Without noise; under it the bound is looser still.
    assert closest > (0.02 if math.isinf(epsilon) else 0)


def test_more_rounds_and_more_records_bring_it_to_nothing() -> None:
    long = GameRules(num_rounds=10**6, dual_bound=2.0, learning_rate=0.001, max_gap=0.0)
    assert nu_before_play(long, **SIZES) < 0.01
    noisy = {"round_epsilon": 0.1, "size_epsilon": 0.1}
    assert (
        nu_before_play(long, **SIZES | noisy)
        > 1
        > 0.01
        > nu_before_play(long, **SIZES | noisy | {"num_records": 10**8})
    )


@pytest.mark.parametrize("bad", [{"smallest_share": 0.0}, {"failure_probability": 1.0}, {"num_groups": 1}])
def test_what_is_no_play_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Expected 0 < smallest_share <= 1"):
        nu_before_play(RULES, **SIZES | bad)
