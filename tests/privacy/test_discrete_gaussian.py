"""Discrete Gaussian noise against masses summed directly, in floats and in mpmath."""

from __future__ import annotations

import bisect
import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from discrete_normal import masses
from method_kinds import quick_and_slow
from scipy import stats

from fairpate.privacy.discrete_gaussian import (
    OS_ENTROPY,
    OsEntropy,
    SeededSource,
    buffered,
    discrete_gaussians,
    exact_cuts,
    log_survival_and_complement,
    log_survival_table,
    sample_discrete_gaussian,
)

pytestmark = pytest.mark.usefixtures("light_runs")


def has_stddev(samples: list[int], stddev: float) -> bool:
    """Whether the sum of squares is what noise of this scale gives, but for a chance of one in a million."""
    reach = math.ceil(12 * stddev) + 2
    squares = np.arange(-reach, reach + 1.0) ** 2
    mean = float(squares @ masses(stddev, reach))
    spread = math.sqrt(float((squares - mean) ** 2 @ masses(stddev, reach)) / len(samples))
    return (
        abs(float(np.mean(np.square(samples))) - mean) < 5.2 * spread
    )  # more than a normal sum's 4.9: squares are skewed


@pytest.mark.parametrize("stddev", [0.7, 1.0, 5.5, 20.0, 110.0])
def test_noise_has_its_scale_and_no_other(stddev: float) -> None:
    source = SeededSource(7)
    samples = [sample_discrete_gaussian(stddev, source) for _ in range(4000)]
    assert has_stddev(samples, stddev)
    assert not has_stddev(samples, stddev * 2 / 3)
    assert not has_stddev(samples, stddev * 3 / 2)


@pytest.mark.parametrize("source", [OsEntropy(), buffered(OsEntropy())], ids=["alone", "buffered"])
def test_noise_from_the_operating_system_has_its_scale(source: OsEntropy) -> None:
    samples = [sample_discrete_gaussian(15, source) for _ in range(2000)]
    assert has_stddev(samples, 15)
    assert not has_stddev(samples, 10)
    assert not has_stddev(samples, 22.5)


@pytest.mark.parametrize("n", [1, 2, 5, 7, 2**12, 3 * 2**4094])
def test_buffered_entropy_is_uniform(n: int) -> None:
    source = buffered(OsEntropy())
    assert source.label == OS_ENTROPY
    drawn = [source.randbelow(n) for _ in range(5000)]
    assert 0 <= min(drawn) <= max(drawn) < n
    parts = min(n, 64)
    observed = np.bincount([part * parts // n for part in drawn], minlength=parts)
    assert parts == 1 or stats.chisquare(observed, _shares(n, parts) * len(drawn)).pvalue > 1e-6


def _shares(n: int, parts: int) -> npt.NDArray[np.float64]:
    """How much of 0 .. n - 1 is in each of ``parts`` intervals."""
    starts = [-(-n * part // parts) for part in range(parts + 1)]
    return np.array([(after - start) / n for start, after in itertools.pairwise(starts)])


def test_no_two_buffers_have_the_same_bits() -> None:
    """Each is of one call, so that a process that was forked between two calls draws others."""
    drawn = [buffered(OsEntropy()).randbelow(2**128) for _ in range(100)]
    source = buffered(OsEntropy())
    drawn += [source.randbelow(2**128) for _ in range(100)]
    assert len(set(drawn)) == 200
    words = np.zeros((4, 1), dtype=np.uint64)
    assert not np.array_equal(*(discrete_gaussians(1e9, words, OsEntropy()) for _ in range(2)))


@pytest.mark.parametrize("stddev", quick_and_slow([0.4, 1.0, 3.3], [0.4, 3.3]))
def test_every_value_has_its_mass(stddev: float) -> None:
    source, count = SeededSource("masses"), 20_000
    samples = np.array([sample_discrete_gaussian(stddev, source) for _ in range(count)])
    reach = math.ceil(10 * stddev)
    expected = count * masses(stddev, reach)
    observed = np.bincount(samples + reach, minlength=2 * reach + 1)
    common = expected >= 5
    observed_binned = np.append(observed[common], observed[~common].sum())
    expected_binned = np.append(expected[common], expected[~common].sum() + 1e-9)
    statistic = ((observed_binned - expected_binned) ** 2 / np.maximum(expected_binned, 1)).sum()
    assert stats.chi2.sf(statistic, len(expected_binned) - 1) > 1e-6


def test_zero_noise_is_zero_and_rationals_are_exact() -> None:
    assert sample_discrete_gaussian(0, SeededSource(1)) == 0
    halves = [sample_discrete_gaussian(Fraction(1, 2), SeededSource(n)) for n in range(50)]
    assert halves == [sample_discrete_gaussian(0.5, SeededSource(n)) for n in range(50)]


@pytest.mark.parametrize("stddev", [-1.0, math.nan, math.inf])
def test_impossible_scales_are_refused(stddev: float) -> None:
    with pytest.raises(ValueError, match="Expected 0 < stddev < inf"):
        sample_discrete_gaussian(stddev, SeededSource(1))


def test_derived_noise_depends_on_its_parts_alone() -> None:
    fresh, used = SeededSource(3), SeededSource(3)
    for _ in range(10):
        sample_discrete_gaussian(20, used)
    used.derive("another query", 0).randbelow(100)
    draws = [source.derive("query", 1).randbelow(2**64) for source in (fresh, used)]
    assert draws[0] == draws[1]
    others = [fresh.derive(*parts).randbelow(2**64) for parts in [("query", 2), ("query", "1"), ("que", "ry1"), ()]]
    assert len({draws[0], SeededSource(4).derive("query", 1).randbelow(2**64), *others}) == 6


def test_labels_say_whether_anyone_is_protected() -> None:
    assert OsEntropy().derive("query").label == "os_entropy"
    assert SeededSource(1).derive("query").label == "seeded: not private"


@pytest.mark.parametrize("stddev", [0.1, 0.5, 1.0, 3.7, 20.0])
def test_tails_match_direct_sums_at_fifty_digits(stddev: float) -> None:
    values = (-40, -3, -1, 0, 1, 2, 3, 60)
    with mpmath.workdps(50):

        def tail(value: int) -> mpmath.mpf:
            points = range(value, max(value, 0) + math.ceil(20 * stddev) + 2)
            return mpmath.fsum(mpmath.exp(-(mpmath.mpf(x) ** 2) / (2 * mpmath.mpf(stddev) ** 2)) for x in points)

        total = tail(-math.ceil(20 * stddev) - 2)
        log_p = [float(mpmath.log(tail(t) / total)) for t in values]
        log_not_p = [float(mpmath.log(tail(1 - t) / total)) for t in values]  # P[N < t] = P[N > -t]
    got_p, got_not_p = log_survival_and_complement(stddev, np.array(values))
    np.testing.assert_allclose(got_p, log_p, rtol=1e-11, atol=1e-45)
    np.testing.assert_allclose(got_not_p, log_not_p, rtol=1e-11, atol=1e-45)
    np.testing.assert_allclose(
        log_survival_table(stddev, 60)[[0, 1, 60]], np.array(log_p)[[3, 4, 7]], rtol=1e-11, atol=1e-20
    )


@pytest.mark.parametrize("stddev", [0.3, 1.0, 4.0, 20.0])
def test_difference_tails_match_a_convolution(stddev: float) -> None:
    reach = math.ceil(30 * stddev)
    difference = np.convolve(masses(stddev, reach), masses(stddev, reach))
    tails = np.cumsum(difference[::-1])[::-1][2 * reach :]  # from a difference of 0 on
    size = math.ceil(8 * stddev)
    np.testing.assert_allclose(
        np.exp(log_survival_table(stddev, size, of_difference=True)), tails[: size + 1], rtol=1e-10
    )


def test_difference_tails_of_tiny_noise_are_dominated_by_one_step() -> None:
    # P[D >= 1] is 2 p0 p1 up to e^-100 terms, with p1 = e^-50 (s = .1).
    assert log_survival_table(0.1, 1, of_difference=True)[1] == pytest.approx(math.log(2) - 50, rel=1e-12)


def test_tables_are_shared_and_cannot_be_overwritten() -> None:
    table = log_survival_table(20.0, 10)
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 0.0
    assert np.shares_memory(table, log_survival_table(20, 100))


def test_wide_noise_is_close_to_continuous() -> None:
    expected = stats.norm.logsf((np.arange(5001) - 0.5) / 1000)
    np.testing.assert_allclose(log_survival_table(1000, 5000), expected, rtol=1e-6)


@pytest.mark.parametrize("stddev", [0.3, 1.0, 2.5, 20.0, pytest.param(110.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_digits", [16, 64, 128])
def test_every_digit_of_every_cut_is_right(stddev: float, num_digits: int) -> None:
    least, cuts = exact_cuts(stddev, num_digits)
    with mpmath.workprec(num_digits + 200):
        reach = 3 * len(cuts)
        weights = [mpmath.exp(-(mpmath.mpf(x) ** 2) / (2 * mpmath.mpf(stddev) ** 2)) for x in range(-reach, reach + 1)]
        total = mpmath.fsum(weights)
        running = mpmath.fsum(weights[: least + reach])
        for x, cut in enumerate(cuts, start=least):
            running += weights[x + reach]
            assert cut == min(int(mpmath.floor(running / total * 2**num_digits)), 2**num_digits - 1)
    assert (cuts[0], cuts[-1]) == (0, 2**num_digits - 1)


class FurtherDigits:
    """A source whose further digits are given."""

    def __init__(self, *words: int) -> None:
        self.words = list(words)

    def randbelow(self, n: int) -> int:
        assert n == 2**64
        return self.words.pop(0)


def test_a_word_that_leaves_the_draw_open_is_decided_by_further_digits() -> None:
    least, cuts = exact_cuts(1.5, 64)
    _, longer = exact_cuts(1.5, 128)
    at = len(cuts) // 2
    further = longer[len(longer) // 2 + at - len(cuts) // 2] & (2**64 - 1)
    assert longer[len(longer) // 2] >> 64 == cuts[at]
    value = least + at
    words = np.array([[cuts[at] - 1, cuts[at]], [cuts[at] + 1, cuts[at]]], dtype=np.uint64)
    drawn = discrete_gaussians(1.5, words, FurtherDigits(further + 1, further - 1))
    np.testing.assert_array_equal(drawn, [[value, value + 1], [value + 1, value]])


@pytest.mark.parametrize("stddev", [0.4, 6.0, 40.0])
def test_many_at_a_time_are_the_draws_of_their_words_and_have_their_masses(stddev: float) -> None:
    source = SeededSource(5)
    words = source.machine_words([str(i) for i in range(10_000)], 2)
    drawn = discrete_gaussians(stddev, words, source)
    least, cuts = exact_cuts(stddev, 64)
    assert drawn[:50].tolist() == [[least + bisect.bisect_right(cuts, w) for w in row] for row in words[:50].tolist()]
    reach = math.ceil(12 * stddev) + 2
    expected = drawn.size * masses(stddev, reach)
    observed = np.bincount(drawn.ravel() + reach, minlength=2 * reach + 1)
    frequent = expected > 20
    statistic = float(((observed - expected)[frequent] ** 2 / expected[frequent]).sum())
    assert stats.chi2.sf(statistic, frequent.sum() - 1) > 1e-6
    samples = drawn.ravel().tolist()
    assert has_stddev(samples, stddev)
    assert not has_stddev(samples, stddev * 2 / 3)
    assert not has_stddev(samples, stddev * 3 / 2)


def test_noise_too_wide_for_a_table_has_its_scale() -> None:
    source = SeededSource(6)
    samples = (
        discrete_gaussians(5000.0, source.machine_words([str(i) for i in range(1000)], 1), source).ravel().tolist()
    )
    assert has_stddev(samples, 5000)
    assert not has_stddev(samples, 3333)


def test_words_of_a_seeded_source_depend_on_their_key_alone_and_those_of_the_system_on_nothing() -> None:
    seeded = SeededSource(1)
    together = seeded.machine_words(["a", "b", "c"], 3)
    np.testing.assert_array_equal(together[1:2], seeded.machine_words(["b"], 3))
    assert len(np.unique(together)) == 9
    assert not np.array_equal(together, SeededSource(2).machine_words(["a", "b", "c"], 3))
    system = OsEntropy()
    assert not np.array_equal(system.machine_words(["a"], 4), system.machine_words(["a"], 4))


@pytest.mark.parametrize("stddev", [-1.0, math.inf, math.nan])
def test_a_scale_that_is_none_is_refused_by_both_ways_to_draw(stddev: float) -> None:
    with pytest.raises(ValueError, match="stddev"):
        discrete_gaussians(stddev, np.zeros(3, dtype=np.uint64), SeededSource(0))
