"""Poisson sampling: published numbers, integration, and another library's accountants."""

from __future__ import annotations

import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from fairpate.privacy import accountant as subsampled
from fairpate.privacy.accountant import (
    ConfidentGnmaxQueries,
    PoissonGaussians,
    epsilon,
    epsilon_pld,
    least_noise,
    rdp,
)
from fairpate.privacy.mechanism_events import PoissonGaussianLaplaces

INTEGER_ORDERS = [*range(2, 257), 320, 400, 512]


def steps(count: int, noise_multiplier: float, sampling_rate: float) -> PoissonGaussians:
    return PoissonGaussians(count=count, noise_multiplier=noise_multiplier, sampling_rate=sampling_rate)


def test_one_step_has_the_published_cost() -> None:
    got = rdp([steps(1, 1.0, 0.01)], [2, 8])
    np.testing.assert_allclose(got, [1.7181342e-4, 8.9364391e-4], rtol=1e-7)


@pytest.mark.parametrize(
    ("event", "delta", "improved", "order"),
    [
        (steps(100, 10.0, 1.0), 1e-5, 4.752728, 5),
        (steps(1000, 1.0, 0.01), 1e-5, 2.107753, 8),
        (steps(500, 2.0, 0.02), 1e-6, 1.154468, 18),
    ],
)
def test_training_has_the_published_epsilon(event: PoissonGaussians, delta: float, improved: float, order: int) -> None:
    got = epsilon([event], target_delta=delta, orders_A=INTEGER_ORDERS)
    assert got.epsilon == pytest.approx(improved, rel=1e-6)
    assert got.order == order


def test_the_privacy_loss_distribution_has_the_published_epsilon_under_both_relations() -> None:
    added = steps(1000, 1.0, 0.01)
    replaced = PoissonGaussians(count=1000, noise_multiplier=1.0, sampling_rate=0.01, relation="replace one")
    assert epsilon_pld([added], target_delta=1e-5) == pytest.approx(1.82824, rel=1e-3)
    assert epsilon_pld([replaced], target_delta=1e-5) == pytest.approx(2.84345, rel=1e-3)
    assert epsilon_pld([steps(500, 2.0, 0.02)], target_delta=1e-6) == pytest.approx(1.06261, rel=1e-3)
    with pytest.raises(ValueError, match="epsilon_pld"):
        epsilon([replaced], target_delta=1e-5)


@pytest.mark.parametrize(("count", "noise"), [(25, 1.0), (36, 0.5), (225, 0.5), (10_000, 10 / 3)])
def test_large_epsilons_on_coarser_grids_are_close_bounds(count: int, noise: float) -> None:
    """Without sampling the divergence is known: Balle and Wang 2018, Theorem 8; epsilons of 33 to 576."""
    mu = math.sqrt(count) / noise

    def excess(eps: float) -> float:
        below = math.exp(eps + log_ndtr(-eps / mu - mu / 2))
        return float(ndtr(mu / 2 - eps / mu) - below) - 1e-5

    exact = brentq(excess, mu, mu * (mu + 9), xtol=1e-9)
    found = epsilon_pld([steps(count, noise, 1.0)], target_delta=1e-5)
    interval = 1e-5 * exact
    assert exact <= found <= exact * (1 + 1e-6) + count * interval**2 / 8


def test_the_noise_of_a_target_without_much_privacy_is_found() -> None:
    noise = least_noise(
        lambda noise: [steps(200, noise, 0.1)], target_epsilon=1000, target_delta=1e-5, accounting="pld"
    )
    spent, less = (epsilon_pld([steps(200, factor * noise, 0.1)], target_delta=1e-5) for factor in (1, 0.99))
    assert spent <= 1000 < less


def test_two_mechanisms_on_one_sample_are_composed_before_amplification() -> None:
    step = PoissonGaussianLaplaces(count=1, gradient_noise_multiplier=1.0, laplace_scale=1.0, sampling_rate=0.1)
    got = subsampled.rdp([step], [2, 4])
    np.testing.assert_allclose(got, [0.0396885, 0.2274341], rtol=2e-6)
    apart = [
        subsampled.poisson_rdp(moments, sampling_rate=0.1, orders_A=[2, 4])
        for moments in (subsampled.gaussian_log_moments(1.0), subsampled.laplace_log_moments(1.0))
    ]
    np.testing.assert_allclose(np.sum(apart, axis=0), [0.0255733, 0.0765654], rtol=2e-6)


@pytest.mark.parametrize(("noise", "rate"), [(0.7, 0.05), (2.0, 0.3)])
@pytest.mark.parametrize("order", [1.3, 2.0, 3.7, 6.0])
def test_a_cost_is_the_integral_at_whole_orders_and_above_it_between(noise: float, rate: float, order: float) -> None:
    def density(x: float, mean: int) -> mpmath.mpf:
        return mpmath.exp(-((x - mean) ** 2) / (2 * noise**2)) / (noise * mpmath.sqrt(2 * mpmath.pi))

    def mixture(x: float) -> mpmath.mpf:
        return (1 - rate) * density(x, 0) + rate * density(x, 1)

    points = [-30, -5, 0, 1, 5, 30]
    removed = mpmath.log(mpmath.quad(lambda x: mixture(x) ** order * density(x, 0) ** (1 - order), points)) / (
        order - 1
    )
    added = mpmath.log(mpmath.quad(lambda x: density(x, 0) ** order * mixture(x) ** (1 - order), points)) / (order - 1)
    exact = float(max(removed, added))
    (got,) = rdp([steps(1, noise, rate)], [order])
    assert got >= exact * (1 - 1e-9)
    if order.is_integer():
        assert got == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(("noise", "rate"), [(0.8, 0.001), (1.3, 0.02), (5.0, 0.5), (3.0, 1.0)])
def test_epsilon_agrees_with_another_accountant(noise: float, rate: float) -> None:
    accountant = RdpAccountant(INTEGER_ORDERS)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), 700)
    got = epsilon([steps(700, noise, rate)], target_delta=1e-5, orders_A=INTEGER_ORDERS)
    assert got.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


def test_beyond_the_largest_mixture_the_cost_is_an_upper_bound_and_still_rises() -> None:
    orders = np.array([512.0, 1024.0, 1025.0, 2048.0])
    costs = rdp([steps(1, 30.0, 0.01)], orders)
    assert (np.diff(costs) > 0).all()
    assert (costs <= orders / (2 * 30.0**2)).all()


@pytest.mark.parametrize("target", [0.5, 3.0])
def test_calibrated_noise_reaches_the_target_and_a_little_less_does_not(target: float) -> None:
    def spent(noise: float) -> float:
        return epsilon([steps(2000, noise, 0.01)], target_delta=1e-6).epsilon

    noise = least_noise(lambda noise: [steps(2000, noise, 0.01)], target_epsilon=target, target_delta=1e-6)
    assert spent(noise) <= target < spent(noise * 0.995)


def test_what_costs_nothing_everything_or_cannot_be() -> None:
    assert epsilon([steps(0, 1.0, 0.1)], target_delta=1e-5).epsilon == 0
    assert math.isinf(epsilon([steps(1, 0.0, 0.1)], target_delta=1e-5).epsilon)
    assert math.isinf(epsilon_pld([steps(1, 0.0, 0.1)], target_delta=1e-5))
    with pytest.raises(ValueError, match="sampling_rate"):
        steps(1, 1.0, 1.3)
    with pytest.raises(ValueError, match="target_epsilon"):
        least_noise(lambda noise: [steps(10, noise, 0.01)], target_epsilon=0.0, target_delta=1e-6)


def test_votes_and_gradients_may_be_added() -> None:
    queries = ConfidentGnmaxQueries(count=50, threshold=60, threshold_stddev_votes=40, noise_stddev_votes=20)
    both = rdp([queries, steps(100, 2.0, 0.05)])
    np.testing.assert_allclose(both, rdp([queries]) + rdp([steps(100, 2.0, 0.05)]))


def test_a_moment_that_is_no_number_is_no_price() -> None:
    cost = subsampled.poisson_rdp(lambda k_K: k_K * math.nan, sampling_rate=0.5, orders_A=[2, 3])
    assert np.isnan(cost).all()
