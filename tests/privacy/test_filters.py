"""A Renyi filter: against the accountant one query at a time, at its edges, and what it refuses."""

from __future__ import annotations

import math
import sys
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.optimize import brentq
from scipy.stats import norm

from fairpate.privacy import accountant
from fairpate.privacy.accountant import (
    DEFAULT_ORDERS,
    AdaptiveLimit,
    ConfidentGnmaxQueries,
    RenyiFilter,
    epsilon,
    epsilon_of_curve,
    least_adaptive_limit,
)

MECHANISM = {"threshold": 70.0, "threshold_stddev_votes": 40.0, "noise_stddev_votes": 15.0}


def query_curve(**changes: float) -> np.ndarray:
    return accountant.rdp([ConfidentGnmaxQueries(count=1, **{**MECHANISM, **changes})])


@pytest.mark.parametrize("target", [0.05, 0.5, 2.0, 8.0, 60.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9])
def test_the_accountant_agrees_that_the_last_query_fits_and_the_next_does_not(target: float, delta: float) -> None:
    most = RenyiFilter(target_epsilon=target, target_delta=delta).max_queries(query_curve())

    def spent(count: int) -> float:
        return epsilon([ConfidentGnmaxQueries(count=count, **MECHANISM)], target_delta=delta).epsilon

    assert spent(most) <= target < spent(most + 1)


@given(
    target=st.floats(0.3, 6),
    delta=st.sampled_from([1e-3, 1e-5, 1e-8]),
    threshold_stddev=st.floats(5, 60),
    noise=st.floats(3, 40),
)
@settings(deadline=None, max_examples=30)
def test_adding_one_at_a_time_stops_where_the_count_says(
    target: float, delta: float, threshold_stddev: float, noise: float
) -> None:
    renyi = RenyiFilter(target_epsilon=target, target_delta=delta)
    curve = query_curve(threshold_stddev_votes=threshold_stddev, noise_stddev_votes=noise)
    most = renyi.max_queries(curve)
    if not most:
        assert not renyi.admits(np.zeros_like(curve), curve)
        return
    assert renyi.admits((most - 1) * curve, curve)
    assert not renyi.admits(most * curve, curve)
    alone = [RenyiFilter(target_epsilon=target, target_delta=delta, orders_A=(order,)) for order in DEFAULT_ORDERS]
    at_each = [each.max_queries([cost]) for each, cost in zip(alone, curve, strict=True)]
    assert max(at_each) == most  # the whole grid gives what one order fixed in advance gives


Pair = tuple[list[float], list[float]]  # probabilities of the same outcomes under neighbouring data


def renyi(pair: Pair, orders: tuple[float, ...]) -> np.ndarray:
    """The larger divergence of the two directions at each order."""
    one, other = map(np.array, pair)
    ways = [[np.log(np.sum(a**x * b ** (1 - x))) / (x - 1) for x in orders] for a, b in ((one, other), (other, one))]
    return np.max(ways, axis=0)


def spend_at(order: float, room: float, loss: float) -> Pair:
    """Two outcomes, one of them with this privacy loss and as probable as ``room`` at ``order`` lets it be."""
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        pair = [p, 1 - p], [p * math.exp(-loss), 1 - p * math.exp(-loss)]
        low, high = (p, high) if renyi(pair, (order,))[0] <= room else (low, p)
    return [low, 1 - low], [low * math.exp(-loss), 1 - low * math.exp(-loss)]


def test_a_grid_of_orders_lets_an_analyst_who_adapts_charges_past_delta() -> None:
    """Answer a randomised bit; spend the rest at one order if it says yes, at another if no: by hand, both outcomes."""
    epsilon_target, delta, orders = 6.0, 0.02, (2.0, 20.0)
    renyi_filter = RenyiFilter(target_epsilon=epsilon_target, target_delta=delta, orders_A=orders)
    yes = 1 / (1 + math.exp(-0.3))
    bit: Pair = ([1 - yes, yes], [yes, 1 - yes])
    spent_A, beyond = renyi(bit, orders), 0.0
    for outcome, order in enumerate(orders):
        p, q = bit[0][outcome], bit[1][outcome]
        loss = epsilon_target + math.log(order / (order - 1)) - math.log(p / q)
        rest = spend_at(order, float((renyi_filter.limit_A - spent_A)[outcome]) - 1e-12, loss)
        assert renyi_filter.admits(spent_A, renyi(rest, orders))
        beyond += sum(max(0.0, p * a - math.exp(epsilon_target) * q * b) for a, b in zip(*rest, strict=True))
    assert beyond > 1.2 * delta


def test_steps_that_are_added_up_stop_at_the_same_query() -> None:
    renyi = RenyiFilter(target_epsilon=1.0, target_delta=1e-5)
    curve, spent, count = query_curve(), np.zeros(len(DEFAULT_ORDERS)), 0
    while renyi.admits(spent, curve):
        spent, count = spent + curve, count + 1
    assert count == renyi.max_queries(curve)
    assert renyi.admits(spent, np.zeros_like(curve))  # a free refusal always fits


def test_limits_solve_the_conversion_in_many_digits() -> None:
    orders, target, delta = (1.5, 12.0, 40.0, 300.0), 2.0, 1e-6
    with mpmath.workdps(40):
        exact = []
        for order in map(mpmath.mpf, orders):
            # delta = e^((a - 1) (R - epsilon)) (1 - 1/a)^(a - 1) / a  (Canonne, Kamath and Steinke 2020, Corollary 13)
            gain = mpmath.log(mpmath.mpf(delta) * order / (1 - 1 / order) ** (order - 1))
            exact.append(float(mpmath.mpf(target) + gain / (order - 1)))
    exact[0] = -math.log1p(-(delta**2))  # -25 by the conversion: only what costs no epsilon is left
    got = RenyiFilter(target_epsilon=target, target_delta=delta, orders_A=orders).limit_A
    assert_allclose(got[1:], exact[1:], rtol=1e-13)
    assert_allclose(got[0], exact[0], rtol=1e-10)
    assert np.all(got[1:] <= exact[1:])


def test_free_and_priceless_queries() -> None:
    renyi = RenyiFilter(target_epsilon=1.0, target_delta=1e-5)
    nothing = np.zeros(len(DEFAULT_ORDERS))
    everything = np.full(len(DEFAULT_ORDERS), math.inf)
    assert renyi.max_queries(nothing) == sys.maxsize
    assert renyi.max_queries(everything) == 0
    assert renyi.admits(nothing, nothing)
    assert not renyi.admits(nothing, everything)
    assert not renyi.admits(everything, nothing)
    one_finite = everything.copy()
    one_finite[DEFAULT_ORDERS.index(20.0)] = 0.1  # limit 1 - ln(.95) + ln(20e-5) / 19 = 0.6030
    assert renyi.max_queries(one_finite) == 6


def test_a_target_too_small_for_any_order_leaves_room_for_what_costs_nothing_only() -> None:
    renyi = RenyiFilter(target_epsilon=0.0, target_delta=1e-5)
    assert renyi.max_queries(query_curve()) == 0
    assert renyi.admits(np.zeros(len(DEFAULT_ORDERS)), np.zeros(len(DEFAULT_ORDERS)))


@pytest.mark.parametrize("bad", [math.nan, -1e-9])
def test_costs_that_are_no_costs_are_refused(bad: float) -> None:
    renyi = RenyiFilter(target_epsilon=1.0, target_delta=1e-5, orders_A=(2.0, 3.0))
    for refused in ([bad, 1.0], [1.0, bad], [1.0], [[1.0, 1.0]]):
        with pytest.raises(ValueError, match="Expected next_rdp_A of shape"):
            renyi.admits([0.0, 0.0], refused)
        with pytest.raises(ValueError, match="Expected spent_rdp_A of shape"):
            renyi.admits(refused, [0.0, 0.0])
        with pytest.raises(ValueError, match="Expected rdp_per_query_A of shape"):
            renyi.max_queries(refused)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_epsilon": -0.1}, "target_epsilon"),
        ({"target_epsilon": math.nan}, "target_epsilon"),
        ({"target_epsilon": math.inf}, "target_epsilon"),
        ({"target_delta": 0.0}, "target_delta"),
        ({"target_delta": 1.0}, "target_delta"),
        ({"target_delta": math.nan}, "target_delta"),
        ({"orders_A": ()}, "orders_A"),
        ({"orders_A": (2.0, 1.0)}, "orders_A"),
        ({"orders_A": (2.0, math.inf)}, "orders_A"),
    ],
)
def test_fields_are_checked_where_a_filter_is_made(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"Expected .*{message}"):
        RenyiFilter(**{"target_epsilon": 1.0, "target_delta": 1e-5, **change})


def test_equal_filters_are_equal_however_their_orders_were_given() -> None:
    given_array = RenyiFilter(target_epsilon=1.0, target_delta=1e-5, orders_A=np.array(DEFAULT_ORDERS))
    assert given_array == RenyiFilter(target_epsilon=1.0, target_delta=1e-5)
    assert not given_array.limit_A.flags.writeable


def mu_of(target: float, delta: float) -> float:
    """The Gaussian that costs exactly the target: Phi(-eps / mu + mu / 2) - e^eps Phi(-eps / mu - mu / 2) = delta."""

    def excess(mu: float) -> float:
        lost = math.exp(target + norm.logcdf(-target / mu - mu / 2))
        return float(norm.cdf(-target / mu + mu / 2) - lost - delta)

    return float(brentq(excess, 1e-4, 50))


@pytest.mark.parametrize(("target", "mu"), [(0.1, 0.0325), (1.0, 0.2681), (3.0, 0.7191)])
def test_an_adaptive_limit_admits_less_than_a_filter_of_gaussian_differential_privacy(target: float, mu: float) -> None:
    limit = AdaptiveLimit(epsilon=target, delta=1e-5)
    assert mu_of(target, 1e-5) == pytest.approx(mu, abs=5e-5)
    assert 0.8 * mu**2 < 2 * limit.budget / limit.order < mu**2


@pytest.mark.parametrize("delta", [1e-4, 1e-10])
@pytest.mark.parametrize("target", [0.01, 0.5, 20.0])
def test_an_adaptive_limit_wastes_less_than_a_third(target: float, delta: float) -> None:
    limit = AdaptiveLimit(epsilon=target, delta=delta)
    assert 0.7 < 2 * limit.budget / limit.order / mu_of(target, delta) ** 2 < 0.95


@given(target=st.floats(0.01, 60), delta=st.floats(1e-12, 1e-2))
@settings(deadline=None, max_examples=40)
def test_an_adaptive_limit_converts_to_its_epsilon(target: float, delta: float) -> None:
    """By the conversion of Canonne, Kamath and Steinke 2020, Proposition 12, at the limit's one order."""
    limit = AdaptiveLimit(epsilon=target, delta=delta)
    order = mpmath.mpf(limit.order)
    converted = limit.budget + mpmath.log1p(-1 / order) - (mpmath.log(delta) + mpmath.log(order)) / (order - 1)
    assert converted <= target
    assert converted == pytest.approx(target, rel=1e-9)


@given(weights=st.lists(st.floats(1e-3, 10), min_size=1, max_size=3), pure=st.floats(0.01, 5))
def test_the_least_adaptive_limit_admits_and_no_smaller_one_does(weights: list[float], pure: float) -> None:
    curve_A = np.minimum(sum(weights) * np.array(DEFAULT_ORDERS), pure + weights[0])
    least = least_adaptive_limit(curve_A, delta=1e-5)
    assert AdaptiveLimit(epsilon=least, delta=1e-5).admits(curve_A)
    best = epsilon_of_curve(curve_A, DEFAULT_ORDERS, target_delta=1e-5)[0]
    assert least >= best
    for smaller in (0.3 * best, 0.9 * best, *np.linspace(0.5, 0.998, 20) * least):
        assert not AdaptiveLimit(epsilon=smaller, delta=1e-5).admits(curve_A)
    assert least_adaptive_limit(np.full(len(DEFAULT_ORDERS), math.inf), delta=1e-5) == math.inf
    assert least_adaptive_limit(0 * curve_A, delta=1e-5) == 0
