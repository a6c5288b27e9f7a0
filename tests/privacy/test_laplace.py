"""Laplace releases and randomised response: their distribution, and that their price covers what they reveal."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from dp_accounting import LaplaceDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant
from priced import priced
from scipy import integrate, stats

from fairpate.config import PrivacyTarget
from fairpate.privacy import accountant
from fairpate.privacy.accountant import (
    Event,
    LaplaceReleases,
    PoissonGaussians,
    PureReleases,
    pure_epsilon,
)
from fairpate.privacy.discrete_gaussian import SeededSource, sample_discrete_laplace
from fairpate.privacy.laplace import add_laplace, keep_probability, randomise_response, release_epsilon_for

DELTA = 1e-6


def laplace_divergence(epsilon: float, move: float) -> float:
    """Hockey stick of Laplace noise of scale 1 under one move, in closed form for |epsilon| <= move."""
    return 1 - math.exp((epsilon - move) / 2) if abs(epsilon) <= move else max(0.0, 1 - math.exp(epsilon))


def two_number_divergence(epsilon: float, first: float, second: float) -> float:
    """The same for two numbers with noise of their own, by integration over the loss of the first."""

    def loss(x: float) -> float:
        return abs(x - first) - abs(x)

    def inner(x: float) -> float:
        at = epsilon - loss(x)
        return 0.5 * math.exp(-abs(x)) * laplace_divergence(at, second)

    return float(integrate.quad(inner, -40, 40 + first, points=[0, first], limit=400)[0])


@pytest.mark.parametrize("epsilon", [0.01, 0.7, 1.5, 2.4])
@pytest.mark.parametrize(("first", "second"), [(0.5, 2.0), (1.25, 1.25), (0.1, 2.4), (2.0, 0.5)])
def test_a_move_split_over_two_numbers_tells_no_more_than_one_whole_move(
    epsilon: float, first: float, second: float
) -> None:
    """What lets a vector be priced by its L1 sensitivity alone."""
    assert two_number_divergence(epsilon, first, second) <= laplace_divergence(epsilon, first + second) + 1e-9


@pytest.mark.parametrize("order", [1.5, 2.0, 8.0, 32.0])
@pytest.mark.parametrize("epsilon", [0.05, 1.0, 3.0])
def test_renyi_curves_are_those_of_the_densities(order: float, epsilon: float) -> None:
    with mpmath.workdps(30):

        def ratio(x: mpmath.mpf) -> mpmath.mpf:
            here, there = mpmath.exp(-abs(x) * epsilon), mpmath.exp(-abs(x - 1) * epsilon)
            return epsilon / 2 * here**order * there ** (1 - order)

        laplace = mpmath.log(mpmath.quad(ratio, [-mpmath.inf, 0, 1, mpmath.inf])) / (order - 1)
        keep = 1 / (1 + mpmath.exp(-epsilon))
        told = keep**order * (1 - keep) ** (1 - order) + (1 - keep) ** order * keep ** (1 - order)
        response = mpmath.log(told) / (order - 1)
    for kind, expected in ((LaplaceReleases, laplace), (PureReleases, response)):
        found = accountant.rdp([kind(count=3, epsilon=epsilon)], [order])
        np.testing.assert_allclose(found, 3 * float(expected), rtol=1e-9)


def advanced_composition(*, epsilon: float, count: int, delta: float) -> float:
    """Dwork, Rothblum and Vadhan 2010: valid and looser."""
    return math.sqrt(2 * count * math.log(1 / delta)) * epsilon + count * epsilon * math.expm1(epsilon)


def test_composition_of_laplace_releases_agrees_with_direct_integration() -> None:
    """Two releases are two numbers; and more of them cost less than their sum, under either accounting."""
    events = [LaplaceReleases(count=2, epsilon=0.8)]
    epsilon = accountant.epsilon_pld(events, target_delta=0.02)
    assert two_number_divergence(epsilon, 0.8, 0.8) == pytest.approx(0.02, rel=2e-3)
    many = [LaplaceReleases(count=100, epsilon=0.1)]
    pld, renyi = (accountant.epsilon_of(many, target_delta=DELTA, accounting=a) for a in ("pld", "rdp"))
    assert pld < renyi < advanced_composition(epsilon=0.1, count=100, delta=DELTA) < pure_epsilon(many)
    yardstick = RdpAccountant().compose(SelfComposedDpEvent(LaplaceDpEvent(10.0), 100)).get_epsilon(DELTA)
    assert renyi == pytest.approx(yardstick, rel=0.02)


@pytest.mark.parametrize("accounting", ["pld", "rdp"])
@pytest.mark.parametrize(
    "events", [[PureReleases(count=1, epsilon=0.7333333)], [LaplaceReleases(count=2, epsilon=0.3)]]
)
def test_a_price_is_never_above_the_plain_sum(events: list[Event], accounting: str) -> None:
    target = PrivacyTarget(epsilon=1, delta=1e-12, accounting=accounting)
    found = priced(events, target)
    assert (1 - 1e-3) * pure_epsilon(events) < found.epsilon <= pure_epsilon(events)
    assert (found.unit, found.relation) == ("sensitive attribute", "replace one")


def test_what_promises_nothing_is_priced_at_infinity_and_nothing_at_zero() -> None:
    for kind, accounting in itertools.product((PureReleases, LaplaceReleases), ("pld", "rdp")):
        silent, loud = (kind(count=count, epsilon=math.inf) for count in (0, 1))
        assert accountant.epsilon_of([silent], target_delta=DELTA, accounting=accounting) == 0
        assert accountant.epsilon_of([loud], target_delta=DELTA, accounting=accounting) == math.inf
    gaussian = PoissonGaussians(count=1, noise_multiplier=1.0, sampling_rate=1.0)
    assert pure_epsilon([gaussian]) == math.inf
    with pytest.raises(ValueError, match="one unit"):
        accountant.epsilon_pld([gaussian, PureReleases(count=1, epsilon=1.0)], target_delta=DELTA)
    for count, epsilon, field in ((-1, 1.0, "count"), (1, -0.1, "epsilon"), (1, math.nan, "epsilon")):
        with pytest.raises(ValueError, match=f"Expected {field} >= 0"):
            PureReleases(count=count, epsilon=epsilon)


@pytest.mark.parametrize("accounting", ["pld", "rdp"])
@pytest.mark.parametrize("count", [1, 60])
def test_releases_are_planned_within_the_target_and_waste_little_of_it(count: int, accounting: str) -> None:
    others = (LaplaceReleases(count=1, epsilon=0.2),)
    plan = release_epsilon_for(
        target_epsilon=2.0, target_delta=DELTA, count=count, others=others, accounting=accounting
    )
    target = PrivacyTarget(epsilon=2, delta=DELTA, accounting=accounting)
    assert 1.98 < priced([LaplaceReleases(count=count, epsilon=plan), *others], target).epsilon <= 2
    assert plan >= 1.8 / count
    assert release_epsilon_for(target_epsilon=math.inf, target_delta=DELTA, count=count) == math.inf
    with pytest.raises(ValueError, match=r"target_epsilon > 0.2"):
        release_epsilon_for(target_epsilon=0.2, target_delta=DELTA, count=count, others=others)


def test_a_large_target_is_planned_on_the_grid_that_prices_it() -> None:
    # On the grid of small targets this would have tens of millions of points.
    target, count = PrivacyTarget(epsilon=1000, delta=DELTA), 5
    plan = release_epsilon_for(target_epsilon=1000.0, target_delta=DELTA, count=count)
    assert 990 < priced([LaplaceReleases(count=count, epsilon=plan)], target).epsilon <= 1000


@pytest.mark.parametrize("scale", [Fraction(1, 3), Fraction(2), Fraction(31, 7)])
def test_discrete_laplace_has_its_masses(scale: Fraction) -> None:
    source = SeededSource(1)
    draws = np.array([sample_discrete_laplace(scale, source) for _ in range(20_000)])
    decay = math.exp(-1 / float(scale))
    reach = 1 + math.ceil(2 * float(scale))
    masses = np.array([(1 - decay) / (1 + decay) * decay ** abs(x) for x in range(-reach, reach + 1)])
    seen = np.array([(draws == x).sum() for x in range(-reach, reach + 1)])
    expected = np.append(masses, 1 - masses.sum()) * len(draws)
    assert stats.chisquare(np.append(seen, len(draws) - seen.sum()), expected).pvalue > 1e-3


def discrete_divergence(epsilon: float, scale: float, steps: int) -> float:
    grid = np.arange(-60 * math.ceil(scale), 60 * math.ceil(scale) + steps + 1)
    here, there = (np.exp(-np.abs(grid - shift) / scale) for shift in (0, steps))
    return float(np.maximum(here - math.exp(epsilon) * there, 0).sum() / here.sum())


@pytest.mark.parametrize("scale", [3.0, 20.0])
@pytest.mark.parametrize("steps", [1, 7, 40])
def test_one_spare_step_covers_what_discrete_noise_reveals_beyond_continuous(scale: float, steps: int) -> None:
    for epsilon in np.linspace(0, steps / scale, 9):
        discrete = discrete_divergence(epsilon, scale, steps)
        assert discrete <= laplace_divergence(epsilon, (steps + 1) / scale) + 1e-9
        assert discrete >= laplace_divergence(epsilon, steps / scale) - 1e-9


def test_added_noise_is_laplace_of_sensitivity_over_epsilon() -> None:
    values = np.full((100, 60), 1234.567)
    noise = add_laplace(values, l1_sensitivity=3.0, epsilon=0.5, source=SeededSource(2)) - values
    for wrong in (2 / 3, 1.5):
        assert stats.kstest(noise.ravel(), stats.laplace(scale=6 * wrong).cdf).pvalue < 1e-6
    assert stats.kstest(noise.ravel(), stats.laplace(scale=6).cdf).pvalue > 1e-3
    assert noise.shape == values.shape
    for free in ({"l1_sensitivity": 0.0, "epsilon": 1.0}, {"l1_sensitivity": 1.0, "epsilon": math.inf}):
        np.testing.assert_array_equal(add_laplace(values, **free, source=SeededSource(0)), values)


@pytest.mark.parametrize(
    ("value", "sensitivity", "epsilon"), [(math.nan, 1, 1), (0, -1, 1), (0, math.inf, 1), (0, 1, 0), (0, 1, math.nan)]
)
def test_noise_out_of_range_is_refused(value: float, sensitivity: float, epsilon: float) -> None:
    with pytest.raises(ValueError, match="Expected finite values"):
        add_laplace([value], l1_sensitivity=sensitivity, epsilon=epsilon, source=SeededSource(0))


@pytest.mark.parametrize(("num_values", "epsilon", "keep"), [(2, 1.0, 0.7310586), (5, 0.5, 0.2918751)])
def test_randomised_response_keeps_what_it_says(num_values: int, epsilon: float, keep: float) -> None:
    assert keep_probability(epsilon, num_values) == pytest.approx(keep, abs=1e-7)
    codes = np.full(20_000, 1)
    told = randomise_response(codes, num_values=num_values, epsilon=epsilon, source=SeededSource(3))
    expected = np.full(num_values, (1 - keep) / (num_values - 1))
    expected[1] = keep
    assert stats.chisquare(np.bincount(told, minlength=num_values), expected * len(codes)).pvalue > 1e-3


def test_the_limits_of_randomised_response() -> None:
    codes: npt.NDArray[np.int64] = np.arange(9_000) % 3
    np.testing.assert_array_equal(
        randomise_response(codes, num_values=3, epsilon=math.inf, source=SeededSource(0)), codes
    )
    blind = randomise_response(codes, num_values=3, epsilon=0.0, source=SeededSource(0))
    table = np.array([[((codes == a) & (blind == b)).sum() for b in range(3)] for a in range(3)])
    assert stats.chisquare(table.ravel()).pvalue > 1e-3
    for arguments, message in (
        ({"num_values": 2, "epsilon": 1.0}, "integers from 0 to 1"),
        ({"num_values": 1, "epsilon": 1.0}, "num_values >= 2"),
        ({"num_values": 3, "epsilon": -1.0}, "epsilon >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            randomise_response(codes, **arguments, source=SeededSource(0))


def test_a_change_of_one_record_stays_within_the_promise() -> None:
    """Brute force: the likelihood ratio of every report under every pair of neighbouring codes is at most e^epsilon."""
    epsilon, num_values = 0.8, 4
    keep = keep_probability(epsilon, num_values)
    other = (1 - keep) / (num_values - 1)
    channel = np.full((num_values, num_values), other) + np.eye(num_values) * (keep - other)
    ratios = channel[:, None, :] / channel[None, :, :]
    assert ratios.max() == pytest.approx(math.exp(epsilon))
