"""Epsilons at small deltas against closed forms and contour integrals: never below the truth, at most 1 % above."""

from __future__ import annotations

import itertools
import math
from typing import Any

import mpmath
import numpy as np
import pytest
from contour import (
    Outputs,
    Parts,
    gaussian,
    integers,
    laplace,
    log_delta,
    replaced,
    together,
    two_integers,
)
from method_kinds import quick_and_slow
from scipy.optimize import brentq
from scipy.special import gammaln

from fairpate.privacy import accountant, loss_distributions
from fairpate.privacy.accountant import LaplaceReleases, PoissonGaussians, PureReleases
from fairpate.privacy.mechanism_events import (
    AttributeGaussians,
    NeighbourVotes,
    PoissonGaussianLaplaces,
    SecretBatchAttributeGaussians,
    VoteTables,
)

pytestmark = pytest.mark.usefixtures("light_runs")

SMALL = (1e-3, 1e-6, 1e-9, 1e-12, 1e-14)
ORACLE = 1e-7  # what the integral leaves out, as a share


def sums(count: int, rate: float, noise: float, **others: Any) -> PoissonGaussians:
    return PoissonGaussians(count=count, sampling_rate=rate, noise_multiplier=noise, **others)


def neighbours(count: int, rate: float, noise: float, check: float | None = None) -> NeighbourVotes:
    return NeighbourVotes(count=count, sampling_rate=rate, noise_stddev_votes=noise, threshold_stddev_votes=check)


def expected(event: Any) -> tuple[Outputs, int]:
    """The outputs of one release of ``event`` with a unit and without it, and how many releases there are."""
    match event:
        case PoissonGaussians(relation="replace one"):
            outputs = replaced(event.noise_multiplier, event.sampling_rate)
        case PoissonGaussians():
            outputs = gaussian(event.noise_multiplier).sampled(event.sampling_rate)
        case VoteTables():
            outputs = integers(event.noise_stddev_votes).sampled(event.sampling_rate)
        case NeighbourVotes():
            outputs = two_integers(event.noise_stddev_votes)
            if event.threshold_stddev_votes is not None:
                outputs = together(outputs, integers(event.threshold_stddev_votes))
            outputs = outputs.sampled(event.sampling_rate)
        case PoissonGaussianLaplaces():
            both = together(gaussian(event.gradient_noise_multiplier, points=801), laplace(event.laplace_scale))
            outputs = both.sampled(event.sampling_rate)
        case SecretBatchAttributeGaussians():
            outputs = gaussian(event.attribute_noise_multiplier).with_chance(event.sampling_rate)
        case AttributeGaussians():
            outputs = gaussian(event.attribute_noise_multiplier)
        case _:
            assert isinstance(event, LaplaceReleases)
            outputs = laplace(1 / event.epsilon)
    return outputs, event.count


def require_proven(events: list[Any], delta: float) -> None:
    """No epsilon is below the truth, and none is more than 1 % above it."""
    found = accountant.epsilon_pld(events, target_delta=delta)
    parts: Parts = [expected(event) for event in events]
    # Delta falls as epsilon rises: what it is a little above and 1 % below the epsilon that was found says where the
    # truth lies.
    above, below = (log_delta(parts, epsilon) for epsilon in (found / (1 - ORACLE), found / 1.01))
    assert above <= math.log(delta), (events, delta, found)
    assert found == 0 or below >= math.log(delta), (events, delta, found)


@pytest.mark.parametrize(
    ("event", "delta"),
    [
        (neighbours(2075, 0.389, 25.0), 1e-12),
        (sums(100_000, 0.006, 0.582), 1e-12),
        (sums(100_000, 0.006, 0.582), 1e-14),
        (sums(200, 0.7, 0.6), 1e-14),
        (sums(10_000, 0.01, 1.5, relation="replace one"), 1e-13),
        (VoteTables(count=100_000, sampling_rate=0.01, noise_stddev_votes=12.0), 1e-3),
    ],
)
def test_an_epsilon_is_never_below_the_truth_and_hardly_above_it(event: Any, delta: float) -> None:
    require_proven([event], delta)


@pytest.mark.parametrize(
    "event", [sums(100_000, 0.006, 0.582), pytest.param(neighbours(2075, 0.389, 25.0), marks=pytest.mark.slow)]
)
def test_epsilon_rises_smoothly_as_delta_falls(event: Any) -> None:
    """ln delta is a concave function of epsilon here: each factor of ten costs less than the one before it."""
    epsilons = [accountant.epsilon_pld([event], target_delta=10.0**-n) for n in range(4, 20)]
    assert (np.diff(epsilons) > 0).all()
    assert (np.diff(epsilons, n=2) < 2e-3 * np.array(epsilons[2:])).all()


@pytest.mark.parametrize("delta", [*SMALL, 1e-19])
@pytest.mark.parametrize("noise", quick_and_slow([0.1, 1.0, 30.0], [1.0, 30.0]))
def test_gaussians_have_their_closed_form(noise: float, delta: float) -> None:
    """Balle and Wang 2018, Theorem 8, in fifty digits."""
    value = accountant.epsilon_pld([AttributeGaussians(count=9, attribute_noise_multiplier=noise)], target_delta=delta)
    with mpmath.workdps(50):
        mu = 3 / mpmath.mpf(noise)

        def above(epsilon: Any) -> Any:
            behind = mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
            return mpmath.ncdf(mu / 2 - epsilon / mu) - behind - mpmath.mpf(delta)

        if above(mpmath.mpf(0)) <= 0:
            assert value == 0
        else:
            truth = mpmath.findroot(above, (0.9 * value, value), solver="anderson", tol=1e-40)
            assert truth * (1 - mpmath.mpf(1e-12)) <= value <= truth * mpmath.mpf(1.001)


@pytest.mark.parametrize("delta", SMALL)
@pytest.mark.parametrize(("epsilon", "count"), [(1.0, 1), (0.3, 5), (0.1, 300), (0.01, 20_000)])
def test_randomised_response_is_a_sum_of_binomials(epsilon: float, count: int, delta: float) -> None:
    value = accountant.epsilon_pld([PureReleases(count=count, epsilon=epsilon)], target_delta=delta)
    true = np.arange(count + 1)
    log_share = gammaln(count + 1) - gammaln(true + 1) - gammaln(count - true + 1)
    log_mass = log_share - true * np.logaddexp(0, -epsilon) - (count - true) * np.logaddexp(0, epsilon)
    losses = (2 * true - count) * epsilon

    def divergence(at: float) -> float:
        above = losses > at
        return math.fsum(np.exp(log_mass[above]) * -np.expm1(at - losses[above]))

    assert divergence(value) <= delta * (1 + 1e-9)
    assert value == 0 or divergence(value / 1.01) > delta


@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_one_laplace_release_has_its_closed_form(scale: float) -> None:
    for delta in SMALL:
        value = accountant.epsilon_pld([LaplaceReleases(count=1, epsilon=1 / scale)], target_delta=delta)
        truth = 1 / scale + 2 * math.log1p(-delta)
        assert truth * (1 - 1e-12) <= value <= truth * 1.001


def laplace_masses(epsilon: float, half: int) -> np.ndarray:
    """The losses of one release on ``2 half + 1`` points, the masses between them split, in forty digits.

    Its divergence is 1 - exp((e - epsilon) / 2) between -epsilon and epsilon.
    """
    with mpmath.workdps(40):
        points = [mpmath.mpf(epsilon) * i / half for i in range(-half - 1, half + 2)]
        inside = [0, *(1 - mpmath.exp((e - epsilon) / 2) for e in points[1:-1]), 0]
        inside[0] = -mpmath.expm1(points[0])
        rise = [mpmath.exp(e) for e in points]
        slopes = [(inside[i + 1] - inside[i]) / (rise[i + 1] - rise[i]) for i in range(len(points) - 1)]
        return np.array([float((slopes[i] - slopes[i - 1]) * rise[i]) for i in range(1, len(points) - 1)])


def test_a_sum_of_laplace_releases_is_what_direct_sums_of_products_give() -> None:
    """Masses are summed without a transform. What a grid adds falls with the square of its interval."""
    found = []
    for half in (25, 50, 100):
        masses = laplace_masses(0.1, half)
        total = np.ones(1)
        for _ in range(100):
            total = np.convolve(total, masses)
        losses = 0.1 / half * np.arange(-100 * half, 100 * half + 1)

        def excess(e: float, losses: np.ndarray = losses, total: np.ndarray = total) -> float:
            return float(np.dot(total[losses > e], -np.expm1(e - losses[losses > e]))) - 1e-12

        found.append(brentq(excess, 1.0, 9.9, xtol=1e-12))
    truth = found[2] - (found[1] - found[2]) / 3
    assert truth == pytest.approx(found[1] - (found[0] - found[1]) / 3, rel=1e-6)
    ours = accountant.epsilon_pld([LaplaceReleases(count=100, epsilon=0.1)], target_delta=1e-12)
    assert truth * (1 - 1e-6) <= ours <= found[2]


def test_counts_without_a_sample_are_sums_on_a_lattice() -> None:
    """Where losses lie on a lattice the integral does not end: 20 discrete Gaussians are convolved mass by mass."""
    noise = np.arange(-120, 121)
    masses, total = np.exp(-(noise**2) / 18), np.ones(1)
    for _ in range(20):
        total = np.convolve(total, masses / masses.sum())
    losses = (20 + 2 * (np.arange(len(total)) - 20 * 120)) / 18
    value = accountant.epsilon_pld([VoteTables(count=20, noise_stddev_votes=3.0)], target_delta=1e-9)
    above = [math.fsum(total[losses > at] * -np.expm1(at - losses[losses > at])) for at in (value, value / 1.001)]
    assert above[0] <= 1e-9 * (1 + 1e-9) < above[1]


def test_the_transform_bounds_its_own_rounding() -> None:
    """Masses of a sum of 16 equal losses against products of polynomials in forty digits."""
    generator = np.random.default_rng(0)
    for peak in (1.0, 1e3):
        masses = generator.exponential(size=24) * np.where(np.arange(24) == 7, peak, 1.0)
        masses /= masses.sum()
        exact = [mpmath.mpf(float(mass)) for mass in masses]
        with mpmath.workdps(40):
            for _ in range(4):
                exact = mpmath_product(exact)
        whole = np.array([float(mass) for mass in exact])
        found, error = loss_distributions._transformed([(masses, 16)], 0, len(whole))
        assert (found >= whole).all()
        assert (found <= whole + 2 * error).all()
        assert error < 1e-11 * whole.max()


def mpmath_product(masses: list[Any]) -> list[Any]:
    total = [mpmath.mpf(0)] * (2 * len(masses) - 1)
    for (i, left), (j, right) in itertools.product(enumerate(masses), repeat=2):
        total[i + j] += left * right
    return total


def test_below_the_least_delta_that_is_proven_renyi_curves_decide() -> None:
    event = sums(100, 0.1, 1.0)
    by_curve = accountant.epsilon([event], target_delta=1e-30).epsilon
    assert accountant.epsilon_pld([event], target_delta=1e-30) == by_curve < math.inf
    assert accountant.least_epsilon([event], target_delta=1e-30) == by_curve
    just_above = accountant.epsilon_pld([event], target_delta=loss_distributions.LEAST_DELTA)
    assert just_above < accountant.epsilon([event], target_delta=loss_distributions.LEAST_DELTA).epsilon
    with pytest.raises(ValueError, match="target_delta >= 1e-20"):
        accountant.epsilon_pld([sums(100, 0.1, 1.0, relation="replace one")], target_delta=1e-30)


GRID: list[Any] = [
    *(sums(count, rate, noise) for count, rate, noise in [(10, 0.1, 0.7), (100, 0.05, 1.0), (1000, 0.01, 1.0)]),
    *(sums(count, rate, noise) for count, rate, noise in [(10_000, 0.02, 2.0), (100_000, 0.006, 0.582)]),
    *(
        sums(count, rate, noise)
        for count, rate, noise in [(100_000, 0.001, 1.0), (30, 1.0, 4.0), (2859, 1.07e-4, 0.48)]
    ),
    *(sums(count, rate, 1.5, relation="replace one") for count, rate in [(100, 0.1), (10_000, 0.01)]),
    *(
        neighbours(count, rate, noise)
        for count, rate, noise in [(50, 0.2, 6.0), (2075, 0.389, 25.0), (100_000, 0.01, 12.0)]
    ),
    neighbours(300, 0.2, 5.0, check=7.0),
    *(
        VoteTables(count=count, sampling_rate=rate, noise_stddev_votes=noise)
        for count, rate, noise in [(10_000, 0.1, 40.0), (100_000, 0.01, 12.0)]
    ),
    PoissonGaussianLaplaces(count=400, gradient_noise_multiplier=1.5, laplace_scale=3.0, sampling_rate=0.05),
    SecretBatchAttributeGaussians(count=2000, attribute_noise_multiplier=4.0, sampling_rate=0.02),
    LaplaceReleases(count=100_000, epsilon=0.003),
]


@pytest.mark.slow
@pytest.mark.parametrize("event", GRID, ids=str)
@pytest.mark.timeout(900)  # contour integrals in many digits, on a busy machine too
def test_no_epsilon_of_a_grid_is_below_the_truth(event: Any) -> None:
    for delta in SMALL:
        require_proven([event], delta)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(3, 24))]
)
def test_no_epsilon_of_a_random_composition_is_below_the_truth(seed: int) -> None:
    generator = np.random.default_rng(seed)

    def drawn() -> Any:
        count = int(10 ** generator.uniform(1.5, 4))
        rate = float(10 ** generator.uniform(-2, 0))
        spread = math.sqrt(count) * rate * 10 ** generator.uniform(-0.7, 0.7)  # an epsilon of about 1
        return [
            sums(count, rate, max(0.7, spread)),
            neighbours(count, rate, max(2.0, spread)),
            VoteTables(count=count, sampling_rate=rate, noise_stddev_votes=max(1.5, spread)),
            LaplaceReleases(count=count, epsilon=0.3 / math.sqrt(count), unit="record", relation="add or remove one"),
        ][generator.integers(4)]

    events = [drawn() for _ in range(generator.integers(1, 4))]
    require_proven(events, float(10 ** generator.uniform(-14, -3)))
