"""Thresholds for answers whose error rate is bounded: exact tails by hand, and how often the bound is broken where it
nearly holds."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import binom, norm

from fairpate.fairness import bounded_errors
from fairpate.fairness.bounded_errors import ConfidenceBins, answered_bins, error_p_value, first_tests
from fairpate.types import ErrorBound, FloatArray, IntArray

NUM_BINS = 10
FIVE_PERCENT = ErrorBound(max_error=0.05)
Answered = Callable[[FloatArray, IntArray], IntArray]


def test_without_noise_the_p_value_is_the_binomial_tail() -> None:
    for size in range(1, 40):
        for wrong in range(size + 1):
            tail = sum(math.comb(size, k) * 0.1**k * 0.9 ** (size - k) for k in range(wrong + 1))
            found = error_p_value(wrong, size - wrong, num_bins=3, noise_stddev=0, max_error=0.1, size_risk=0.001)
            assert found == pytest.approx(tail, rel=1e-9)


@pytest.mark.parametrize(
    ("size", "noise_stddev"),
    [(3, 0.4), (3, 8.0), (25, 2.0), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((25, 8.0), (100, 2.0)))],
)
def test_with_noise_a_small_p_value_is_as_rare_as_it_says(size: int, noise_stddev: float) -> None:
    """Counts of records that are wrong with probability r, and their noises, are summed exactly over outcomes and on a
    fine grid; the probability of a p-value of at most 2.5 % is at most 2.5 %."""
    num_bins, rate, level, size_risk = 4, 0.1, 0.025, 0.00125
    stddev = noise_stddev * math.sqrt(num_bins)
    # By quantiles: each pair of noises has the same mass.
    noise = norm.ppf((np.arange(61) + 0.5) / 61) * stddev
    below = 0.0
    for wrong in range(size + 1):
        mass = float(binom.pmf(wrong, size, rate))
        if mass < 1e-4:
            continue
        small = [
            error_p_value(
                wrong + of_wrong,
                size - wrong + of_right,
                num_bins=num_bins,
                noise_stddev=noise_stddev,
                max_error=rate,
                size_risk=size_risk,
            )
            <= level
            for of_wrong in noise
            for of_right in noise
        ]
        below += mass * float(np.mean(small))
    assert below <= level * 1.02


def test_all_records_of_public_bins_are_between_values_that_occur() -> None:
    confidences = np.random.default_rng(0).choice([0.5, 0.6, 0.8, 0.95], size=1000, p=[0.1, 0.4, 0.4, 0.1])
    bins = ConfidenceBins.of(confidences, np.zeros(1000, np.int64), num_strata=1, num_classes=2, num_bins=NUM_BINS)
    assert set(np.round(bins.edges, 12)) <= {0.55, 0.7, 0.875}
    assert bins.numbers(np.array([0.96]))[0] == 0
    nudged = bins.numbers(np.nextafter(confidences, 0))
    np.testing.assert_array_equal(bins.numbers(confidences), nudged)
    assert bins.shares_SB.sum() == pytest.approx(1)
    # What a threshold answers is what its bins hold.
    for answered in range(1, NUM_BINS):
        threshold = bins.threshold(answered)
        assert threshold is not None
        np.testing.assert_array_equal(confidences >= threshold, bins.numbers(confidences) < answered)
    assert bins.threshold(0) is None
    assert bins.threshold(NUM_BINS) == 0


def test_without_public_records_bins_are_equally_wide() -> None:
    bins = ConfidenceBins.of(np.zeros(0), np.zeros(0, np.int64), num_strata=2, num_classes=2, num_bins=4)
    np.testing.assert_allclose(bins.edges, [0.875, 0.75, 0.625])
    np.testing.assert_allclose(bins.shares_SB, 0.25)
    np.testing.assert_allclose(bins.doubts_SB, [[0.0625, 0.1875, 0.3125, 0.4375]] * 2)


def violations(
    answered: Answered,
    *,
    rate: float,
    size: int,
    noise_stddev: float,
    shape: str,
    num_strata: int = 2,
    draws: int = 1000,
    seed: int = 0,
) -> float:
    """Return in which share of draws some stratum has answers although its error rate is ``rate`` in every bin."""
    generator = np.random.default_rng(seed)
    shares_B = {
        "equal": np.ones(NUM_BINS),
        "falling": np.geomspace(1, 0.05, NUM_BINS),
        "rising": np.geomspace(0.05, 1, NUM_BINS),
    }[shape]
    sizes_RSB = generator.multinomial(size, shares_B / shares_B.sum(), size=(draws, num_strata))
    wrong_RSB = generator.binomial(sizes_RSB, rate)
    counts = np.stack([sizes_RSB - wrong_RSB, wrong_RSB], axis=-1) + generator.normal(
        0, noise_stddev, (*sizes_RSB.shape, 2)
    ) * bool(noise_stddev)
    bins = bins_of(shares_B, num_strata)
    first = first_tests(np.full(num_strata, float(size)), bins, FIVE_PERCENT, noise_stddev=noise_stddev)
    return float(np.mean([(answered(each, first) > 0).any() for each in counts]))


def bins_of(shares_B: FloatArray, num_strata: int) -> ConfidenceBins:
    return ConfidenceBins(
        edges=np.linspace(1, 0.5, NUM_BINS + 1)[1:-1],
        shares_SB=np.tile(shares_B / shares_B.sum(), (num_strata, 1)),
        doubts_SB=np.full((num_strata, NUM_BINS), 0.01),
    )


def bounded(noise_stddev: float, **changes: float) -> Answered:
    bound = ErrorBound(**{"max_error": 0.05, **changes})  # type: ignore[arg-type]
    return lambda counts_SB2, first_S: answered_bins(counts_SB2, first_S, bound, noise_stddev=noise_stddev)


@pytest.mark.parametrize("shape", ["equal", "falling", "rising"])
@pytest.mark.parametrize(("size", "noise_stddev"), [(500, 0.0), (500, 2.0), (8000, 5.3), (2000, 16.0)])
def test_a_rate_just_above_the_bound_is_answered_in_at_most_one_draw_of_twenty(
    shape: str, size: int, noise_stddev: float
) -> None:
    share = violations(bounded(noise_stddev), rate=0.051, size=size, noise_stddev=noise_stddev, shape=shape)
    assert share <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 1000)


def test_noise_that_is_left_out_of_the_variance_breaks_the_bound() -> None:
    forgotten = violations(bounded(0.5), rate=0.051, size=2000, noise_stddev=16.0, shape="equal")
    assert forgotten > 0.15


def test_groups_that_are_not_counted_break_the_bound() -> None:
    """Each of five groups alone at the full level."""

    def alone(counts_SB2: FloatArray, first_S: IntArray) -> IntArray:
        each = [bounded(5.3)(counts_SB2[[s]], first_S[[s]]) for s in range(len(counts_SB2))]
        return np.concatenate(each)

    arguments = {"rate": 0.0501, "size": 4000, "noise_stddev": 5.3, "shape": "equal", "num_strata": 5, "draws": 1000}
    assert violations(alone, **arguments) > 0.1  # type: ignore[arg-type]
    assert violations(bounded(5.3), **arguments) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 1000)  # type: ignore[arg-type]


def test_a_run_in_of_tests_at_the_full_level_breaks_the_bound() -> None:
    """Tests that go on after one that was not passed, as if the first of eight were not yet part of the sequence."""

    def run_in(counts_SB2: FloatArray, first_S: IntArray) -> IntArray:
        answered = [bounded(5.3)(counts_SB2, np.full_like(first_S, first)) for first in range(1, 9)]
        return np.max(answered, axis=0)

    assert violations(run_in, rate=0.0501, size=4000, noise_stddev=5.3, shape="equal", draws=1000) > 0.08


def test_one_threshold_for_all_groups_is_answered_only_if_every_group_passes() -> None:
    counts = np.zeros((2, NUM_BINS, 2))
    counts[0, :, 0], counts[0, :, 1] = 400, 2
    counts[1, :, 0], counts[1, :, 1] = 400, 2
    counts[1, 5:, 1] = 200
    one = answered_bins(counts, np.array([1, 2]), ErrorBound(max_error=0.05, groups="all"), noise_stddev=5.3)
    each = answered_bins(counts, np.array([1, 2]), FIVE_PERCENT, noise_stddev=5.3)
    np.testing.assert_array_equal(one, [5, 5])
    np.testing.assert_array_equal(each, [NUM_BINS, 5])


def test_the_first_test_has_enough_records_and_no_more() -> None:
    bins = bins_of(np.ones(NUM_BINS), 1)
    many = first_tests(np.array([80_000.0]), bins, FIVE_PERCENT, noise_stddev=5.3)
    few = first_tests(np.array([2_000.0]), bins, FIVE_PERCENT, noise_stddev=5.3)
    assert many[0] == 1
    assert few[0] > 1
    # Errors of the test records are not among its arguments: only sizes are.
    assert set(bounded_errors.first_tests.__annotations__) == {"sizes_S", "bins", "bound", "noise_stddev", "return"}


@pytest.mark.parametrize(("field", "value"), [("max_error", 0.0), ("max_error", math.nan), ("confidence", 1.0)])
def test_a_bound_that_is_no_share_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        ErrorBound(**{"max_error": 0.05, field: value})
