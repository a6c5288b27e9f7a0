"""The audit by many releases: against mechanisms whose privacy is known, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fairpate.privacy.accountant import PoissonGaussians, epsilon
from fairpate.privacy.audit import epsilon_of_best_threshold

DELTA = 1e-5


def turned(bits: np.ndarray, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """Randomised response."""
    return np.where(rng.random(len(bits)) < 1 / (1 + math.exp(epsilon)), 1 - bits, bits)


@pytest.mark.parametrize("true_epsilon", [0.2, pytest.param(1.0, marks=pytest.mark.slow), 3.0])
def test_randomised_response_exceeds_its_epsilon_as_seldom_as_stated(true_epsilon: float) -> None:
    rng, runs, size = np.random.default_rng(0), 300, 400
    bounds = [
        epsilon_of_best_threshold(
            turned(np.ones(size), true_epsilon, rng), turned(np.zeros(size), true_epsilon, rng), delta=0.0
        )
        for _ in range(runs)
    ]
    failures = int((np.array(bounds) > true_epsilon).sum())
    assert stats.binom.sf(failures - 1, runs, 0.05) > 1e-4
    assert max(bounds) > 0.6 * true_epsilon


def test_many_releases_find_the_epsilon_of_randomised_response() -> None:
    rng, size = np.random.default_rng(1), 200_000
    found = epsilon_of_best_threshold(turned(np.ones(size), 2.0, rng), turned(np.zeros(size), 2.0, rng), delta=0.0)
    assert 1.93 < found <= 2.0


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_gaussian_is_told_apart_whatever_the_direction_and_never_above_its_epsilon(
    sign: int, exchanged: bool
) -> None:
    claimed = epsilon([PoissonGaussians(count=1, noise_multiplier=2.0, sampling_rate=1.0)], target_delta=DELTA).epsilon
    rng, size = np.random.default_rng(2), 400_000
    sides = [sign * rng.normal(size=size) / 0.5 + sign, sign * rng.normal(size=size) / 0.5]
    found = epsilon_of_best_threshold(*(sides[::-1] if exchanged else sides), delta=DELTA)
    assert 0.5 * claimed < found < claimed


def test_what_is_always_told_is_bounded_by_the_number_of_releases_alone() -> None:
    size = 2000
    found = epsilon_of_best_threshold(np.ones(size), np.zeros(size), delta=DELTA)
    # Clopper and Pearson for 1,000 of 1,000 and for none of 1,000, by hand.
    level = 0.025 ** (1 / 1000)
    assert found == pytest.approx(math.log((level - DELTA) / (1 - level)), rel=1e-9)


def test_a_leak_that_delta_allows_refutes_nothing() -> None:
    scores = np.zeros(100_000)
    scores[:900] = 1.0
    rng = np.random.default_rng(3)
    leaked = rng.permutation(scores)
    assert epsilon_of_best_threshold(leaked, np.zeros(100_000), delta=0.01) == 0.0
    assert epsilon_of_best_threshold(leaked, np.zeros(100_000), delta=1e-5) > 3


def test_equal_scores_prove_nothing_and_what_makes_no_sense_is_refused() -> None:
    assert epsilon_of_best_threshold(np.zeros(10), np.zeros(20), delta=0.0) == 0.0
    for with_, without in (([1.0], [0.0, 1.0]), ([math.nan, 1.0], [0.0, 1.0]), ([[1.0, 2.0]], [0.0, 1.0])):
        with pytest.raises(ValueError, match="two scores or more"):
            epsilon_of_best_threshold(with_, without, delta=0.0)
    for delta, confidence in ((-0.1, 0.95), (math.nan, 0.95), (0.1, 1.0)):
        with pytest.raises(ValueError, match="delta"):
            epsilon_of_best_threshold([0.0, 1.0], [0.0, 1.0], delta=delta, confidence=confidence)
