"""Publishing a data-dependent cost: goldens, brute force over all neighbouring votes, and the noise's exact price."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import mpmath
import numpy as np
import pytest
from numpy.testing import assert_allclose
from two_steps import argmax_sensitivity, threshold_sensitivity, two_step_rdp

from fairpate.privacy import gnmax, smooth_sensitivity
from fairpate.privacy.mechanism_events import SmoothRelease, release_rdp
from fairpate.privacy.smooth_sensitivity import sensitive_range
from fairpate.types import MechanismParameters

Votes = tuple[int, ...]
RELEASE = SmoothRelease(order=3.0, beta=0.05, noise_stddev=4.0, scale_noise_stddev=10.0)
MECHANISM: dict[str, Any] = {"threshold": 60.0, "threshold_stddev_votes": 30.0, "noise_stddev_votes": 20.0}


@cache
def all_votes(num_teachers: int, num_classes: int) -> tuple[Votes, ...]:
    counts = itertools.product(range(num_teachers + 1), repeat=num_classes)
    return tuple(votes for votes in counts if sum(votes) == num_teachers)


def moves_apart(num_teachers: int, num_classes: int) -> np.ndarray:
    """Votes that must move between every two vote vectors."""
    every = np.array(all_votes(num_teachers, num_classes))
    apart: np.ndarray = np.abs(every[:, None] - every[None]).sum(axis=2) // 2
    return apart


def worst_within(change_V: np.ndarray, apart: np.ndarray, num_distances: int) -> np.ndarray:
    return np.array([np.where(apart <= d, change_V, 0.0).max(axis=1) for d in range(num_distances)]).T


def local_sensitivity(cost_V: np.ndarray, apart: np.ndarray) -> np.ndarray:
    """The largest change of cost by one moved vote, by looking at every neighbour."""
    change: np.ndarray = np.where(apart == 1, np.abs(cost_V[:, None] - cost_V[None]), 0.0).max(axis=1)
    return change


def assert_smooth_bound(bound_VD: np.ndarray, cost_V: np.ndarray, apart: np.ndarray) -> None:
    """At or above the true sensitivity at every distance, and never more than one move behind a neighbour's."""
    slack = 1 + 1e-9
    truth = worst_within(local_sensitivity(cost_V, apart), apart, bound_VD.shape[1])
    assert np.all(truth <= bound_VD * slack + 1e-13)
    for one, other in zip(*np.nonzero(apart == 1), strict=True):
        assert np.all(bound_VD[one, :-1] <= bound_VD[other, 1:] * slack + 1e-15)
    assert np.all(np.diff(bound_VD, axis=1) >= -1e-15)


def test_golden_sensitivities() -> None:
    got = argmax_sensitivity([[10, 0, 0]], noise_stddev_votes=0.5, order=1.5, tail="gaussian")
    assert got.shape == (1, 11)
    assert_allclose(got[0, :4], [3.13503646e-17, 1.60178280e-8, 5.90681786e-3, 5.99981308], rtol=2e-8)
    assert_allclose(got[0, 4:], 5.99981308, rtol=2e-9)


def test_known_results_of_the_two_conditions() -> None:
    sensitive_range(noise_stddev_votes=30.0, num_classes=10, order=25.0)
    with pytest.raises(ValueError, match=r"growth of the cost by one vote .* lower order, or raise noise_stddev_votes"):
        sensitive_range(noise_stddev_votes=20.0, num_classes=10, order=25.0)


def tail_at(x: Any) -> Any:
    return mpmath.erfc(x) / 2


def moved_q(q: Any, by: Any, classes: int) -> Any:
    share = q / (classes - 1)
    start = mpmath.sqrt(-mpmath.log(share)) - 0.3
    return (classes - 1) * tail_at(mpmath.findroot(lambda x: mpmath.log(tail_at(x) / share), start) + by)


def theorem_six(q: Any, s: Any, a: Any) -> Any:
    m2 = s * mpmath.sqrt(-mpmath.log(q))
    stay = (1 - q) / (1 - (q * mpmath.exp(m2 / s**2)) ** (1 - 1 / m2))
    leave = mpmath.exp((m2 + 1) / s**2) / q ** (1 / m2)
    return mpmath.log((1 - q) * stay ** (a - 1) + q * leave ** (a - 1)) / (a - 1)


def least_data_independent_q(s: Any, a: Any) -> Any:
    limit = mpmath.exp(-((max(s + 1, a - 1) / s) ** 2))
    if theorem_six(limit, s, a) < a / s**2:
        return limit
    below = limit / 10**6
    for _ in range(120):
        middle = mpmath.sqrt(below * limit)
        below, limit = (middle, limit) if theorem_six(middle, s, a) < a / s**2 else (below, middle)
    return limit


def move_closer(ranked: list[int], step: int) -> list[int]:
    first, second, *others = ranked
    return [first + step, *sorted([second - step, *others], reverse=True)]


def walk(votes: Votes, noise: float, order: float) -> list[float]:
    """Sensitivity of one query at distances 0, 1, ...: one vote after the other, in mpmath."""
    classes, s, a = len(votes), mpmath.mpf(noise), mpmath.mpf(order)
    q0 = least_data_independent_q(s, a)
    q1 = moved_q(q0, 1 / s, classes)

    def cost(q: Any) -> Any:
        return theorem_six(q, s, a) if q < q0 else a / s**2

    ranked, found = sorted(votes, reverse=True), []
    for _ in range(sum(votes) + 1):
        q = sum(tail_at((ranked[0] - other) / (2 * s)) for other in ranked[1:])
        if q1 <= q <= q0:
            return [*found, *[a / s**2 - cost(q1)] * (sum(votes) + 1 - len(found))]
        if q < q1:
            found.append(cost(moved_q(q, -1 / s, classes)) - cost(q))
            ranked = move_closer(ranked, -1)
        else:
            found.append(a / s**2 - cost(moved_q(min(q, 1 - 1 / mpmath.mpf(classes)), 1 / s, classes)))
            ranked = move_closer(ranked, 1) if ranked[1] else ranked
    return found


@pytest.mark.parametrize(
    ("votes", "noise", "order"),
    [
        ((40, 0, 0), 4.0, 2.0),
        ((25, 10, 5), 4.0, 3.0),
        ((14, 13, 13), 4.0, 2.0),
        ((14, 13, 13), 12.0, 3.0),
        ((30, 10), 3.0, 2.5),
        ((10, 10, 10, 10), 5.0, 3.0),
    ],
)
def test_an_independent_walk_in_many_digits(votes: Votes, noise: float, order: float) -> None:
    got = argmax_sensitivity([votes], noise_stddev_votes=noise, order=order, tail="gaussian")[0]
    with mpmath.workdps(40):
        assert_allclose(got, np.array(walk(votes, noise, order), dtype=np.float64), rtol=1e-6)


@pytest.mark.parametrize("tail", ["gaussian", "discrete"])
@pytest.mark.parametrize(
    ("num_teachers", "num_classes", "noise", "order"),
    [
        (10, 3, 0.5, 1.5),
        (10, 3, 1.0, 2.0),
        (11, 3, 2.0, 2.0),
        (9, 3, 0.7, 1.1),
        (12, 3, 3.0, 3.0),
        (7, 4, 1.5, 1.5),
        (21, 2, 2.0, 1.5),
        (40, 2, 5.0, 5.0),
        (20, 3, 5.0, 4.0),
    ],
)
def test_no_neighbouring_votes_move_the_argmax_by_more(
    num_teachers: int, num_classes: int, noise: float, order: float, tail: Any
) -> None:
    votes = np.array(all_votes(num_teachers, num_classes))
    apart = moves_apart(num_teachers, num_classes)
    bound = argmax_sensitivity(votes, noise_stddev_votes=noise, order=order, tail=tail)
    open_bit = {"threshold": -math.inf, "threshold_stddev_votes": 1.0}
    cost = two_step_rdp(votes, **open_bit, noise_stddev_votes=noise, order=order, tail=tail)
    assert np.ptp(cost) > 0  # otherwise nothing was tested
    assert_smooth_bound(bound, cost, apart)


@pytest.mark.parametrize("tail", ["gaussian", "discrete"])
@pytest.mark.parametrize(("threshold", "stddev", "order"), [(6.0, 1.0, 2.0), (8.5, 2.0, 5.0), (3.0, 0.6, 1.5)])
def test_no_neighbouring_votes_move_the_threshold_by_more(
    threshold: float, stddev: float, order: float, tail: Any
) -> None:
    votes, apart = np.array(all_votes(10, 3)), moves_apart(10, 3)
    check = {"threshold": threshold, "threshold_stddev_votes": stddev, "tail": tail}
    bound = threshold_sensitivity(votes, **check, order=order)
    cost = gnmax.threshold_rdp(votes, **check, orders_A=[order])[:, 0]
    assert np.ptp(cost) > 0
    assert_smooth_bound(bound, cost, apart)
    # The largest count can be anything from an even split to unanimity, so the bound is met exactly at its plateau.
    assert_allclose(bound[:, -1], local_sensitivity(cost, apart).max(), rtol=1e-12)


def test_one_record_moves_a_vote_of_every_query_at_once() -> None:
    """Two queries, every neighbour of both together: the smooth sensitivity bounds the change and is itself smooth."""
    every, apart = np.array(all_votes(7, 3)), moves_apart(7, 3)
    mechanism = {"threshold": 5.0, "threshold_stddev_votes": 1.0, "noise_stddev_votes": 1.0}
    release = SmoothRelease(order=1.5, beta=0.2, noise_stddev=1.0)
    cost = two_step_rdp(every, **mechanism, order=1.5)
    pairs = [(one, other) for one in range(0, len(every), 5) for other in range(0, len(every), 7)]

    @cache
    def smooth(one: int, other: int) -> float:
        return smooth_sensitivity.smooth_sensitivity(
            every[[one, other]], MechanismParameters(**mechanism), release=release
        )

    tested = 0
    for one, other in pairs:
        near_one, near_other = (np.flatnonzero(apart[i] <= 1) for i in (one, other))
        for new_one, new_other in list(itertools.product(near_one, near_other))[::12]:
            change = abs(cost[new_one] + cost[new_other] - cost[one] - cost[other])
            assert change <= smooth(one, other) * (1 + 1e-9)
            ratio = math.log(smooth(new_one, new_other) / smooth(one, other))
            assert abs(ratio) <= release.beta + 1e-9
            tested += 1
    assert tested > 100


def test_discounting_is_a_maximum_over_summed_distances() -> None:
    votes = np.array([[95, 3, 2], [60, 39, 1], [34, 33, 33], [95, 3, 2]])
    argmax = argmax_sensitivity(votes, noise_stddev_votes=20.0, order=3.0)
    check = threshold_sensitivity(votes, threshold=60.0, threshold_stddev_votes=30.0, order=3.0)
    summed = (argmax + check).sum(axis=0)
    expected = max(math.exp(-0.05 * d) * total for d, total in enumerate(summed))
    got = smooth_sensitivity.smooth_sensitivity(votes, MechanismParameters(**MECHANISM), release=RELEASE)
    assert got == pytest.approx(expected, rel=1e-12)
    shuffled = votes[::-1][:, [2, 0, 1]]
    assert smooth_sensitivity.smooth_sensitivity(
        shuffled, MechanismParameters(**MECHANISM), release=RELEASE
    ) == pytest.approx(got, rel=1e-12)


@pytest.mark.parametrize(("noise", "num_teachers"), [(0.3, 40), (1.0, 40), (5.0, 100), (20.0, 250)])
def test_the_continuous_tail_bounds_the_discrete_one_closely(noise: float, num_teachers: int) -> None:
    first = np.arange((num_teachers + 1) // 2, num_teachers + 1)
    votes = np.stack([first, num_teachers - first], axis=1)
    open_bit = {"threshold": -math.inf, "threshold_stddev_votes": 1.0}
    moved = two_step_rdp(votes, **open_bit, noise_stddev_votes=noise, order=1.5)
    log_q = gnmax.log_q(votes, noise_stddev_votes=noise, tail="discrete")
    exact = gnmax.gnmax_rdp(log_q, noise_stddev_votes=noise, orders_A=[1.5])[:, 0]
    assert np.all(moved >= exact * (1 - 1e-12))
    if noise >= 5:  # and where the gap is not so large that the cost vanishes anyway
        assert_allclose(moved, exact, rtol=0.02, atol=1e-5 / noise**2)


def test_the_published_cost_adds_both_steps_and_bounds_the_joint_one() -> None:
    votes = np.array([[100, 0], [80, 20], [55, 45]])
    mechanism = {"threshold": 70.0, "threshold_stddev_votes": 40.0, "noise_stddev_votes": 15.0}
    got = two_step_rdp(votes, **mechanism, order=4.0, tail="gaussian")
    argmax = np.array([2.153588e-6, 2.223350e-3, 4 / 225])
    check = gnmax.threshold_rdp(votes, threshold=70, threshold_stddev_votes=40, orders_A=[4.0], tail="gaussian")[:, 0]
    assert_allclose(got, argmax + check, rtol=1e-6)
    assert np.all(gnmax.confident_gnmax_rdp(votes, **mechanism, orders_A=[4.0], tail="gaussian")[:, 0] <= got)


@pytest.mark.parametrize(
    ("votes", "message"),
    [
        ([[3, 2], [3, 3]], "one vote of each teacher.*lost teachers"),
        ([[0, 0]], "one vote of each teacher"),
        ([[3.5, 1.5]], "whole numbers"),
        ([[3, -1]], "whole numbers"),
        ([[math.nan, 1.0]], "whole numbers"),
        ([[3], [3]], "shape"),
        ([3, 2], "shape"),
        (np.zeros((0, 2)), "shape"),
    ],
)
def test_votes_that_are_no_votes_are_refused(votes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        two_step_rdp(votes, **MECHANISM, order=2.0)


def test_parameters_that_make_no_mechanism_are_refused() -> None:
    with pytest.raises(ValueError, match="noise_stddev_votes"):
        argmax_sensitivity([[3, 2]], noise_stddev_votes=0.0, order=2.0)
    with pytest.raises(ValueError, match="tail"):
        argmax_sensitivity([[3, 2]], noise_stddev_votes=2.0, order=2.0, tail="laplace")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 classes"):
        sensitive_range(noise_stddev_votes=2.0, num_classes=1, order=2.0)
    with pytest.raises(ValueError, match="order"):
        release_rdp(RELEASE, [1.0])
