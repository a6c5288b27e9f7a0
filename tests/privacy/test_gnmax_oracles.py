"""The claimed costs against independent oracles: the formulas at fifty digits, and true divergences by brute force."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
from discrete_normal import masses
from method_kinds import quick_and_slow
from mpmath import mpf
from numpy.testing import assert_allclose

from fairpate.privacy import gnmax

pytestmark = pytest.mark.usefixtures("light_runs")

Histogram = tuple[int, ...]


def precise_log_q(votes: Histogram, stddev: float) -> mpf:
    ranked = sorted(votes)
    tails = [mpmath.erfc((ranked[-1] - n) / (2 * mpf(stddev))) / 2 for n in ranked[:-1]]
    return mpmath.log(min(mpmath.fsum(tails), 1 - mpf(1) / len(votes)))


def precise_theorem_6(log_q: mpf, variance: mpf, order: float) -> mpf:
    """Theorem 6 of Papernot et al. 2018 in its own variables."""
    alpha, q, log = mpf(order), mpmath.exp(log_q), mpmath.log
    independent = alpha / variance
    mu2 = mpmath.sqrt(variance * -log_q)
    mu1 = mu2 + 1
    cost1, cost2 = mu1 / variance, mu2 / variance
    if mu2 <= 1 or -log_q <= cost2 or alpha >= mu1:
        return independent
    if q > mpmath.exp((mu2 - 1) * cost2) / (mu1 / (mu1 - 1) * mu2 / (mu2 - 1)) ** mu2:
        return independent
    a = (1 - q) / (1 - (q * mpmath.exp(cost2)) ** ((mu2 - 1) / mu2))
    b = mpmath.exp(cost1) / q ** (1 / (mu1 - 1))
    return min(independent, log((1 - q) * a ** (alpha - 1) + q * b ** (alpha - 1)) / (alpha - 1))


def precise_pass_probability(largest: int, threshold: float, stddev: float) -> mpf:
    return mpmath.erfc((mpf(threshold) - largest) / (mpf(stddev) * mpmath.sqrt(2))) / 2


def precise_joint(votes: Histogram, threshold: float, stddev1: float, stddev2: float, order: float) -> mpf:
    alpha, largest = mpf(order), max(votes)
    argmax = precise_theorem_6(precise_log_q(votes, stddev2), mpf(stddev2) ** 2, order)
    p = precise_pass_probability(largest, threshold, stddev1)
    costs = []
    for other in (largest - 1, largest, largest + 1):
        w = precise_pass_probability(other, threshold, stddev1)
        answered = p**alpha * w ** (1 - alpha) * mpmath.exp((alpha - 1) * argmax)
        costs.append(mpmath.log(answered + (1 - p) ** alpha * (1 - w) ** (1 - alpha)) / (alpha - 1))
    return max(costs)


ORDERS = [1.25, 2.0, 3.5, 8.0, 20.0, 50.0, 100.0, 300.0]
HISTOGRAMS: list[Histogram] = [(100, 0), (80, 20), (60, 40), (55, 45), (50, 50), (97, 2, 1), (40, 35, 25), (200, 0, 0)]


@pytest.mark.parametrize("stddev", [0.5, 15.0, 300.0])
def test_log_q_at_fifty_digits(stddev: float) -> None:
    histograms = [(100, 0, 0), (80, 15, 5), (36, 34, 30), (199, 1, 0)]
    with mpmath.workdps(50):
        expected = [float(precise_log_q(votes, stddev)) for votes in histograms]
    got = gnmax.log_q(histograms, noise_stddev_votes=stddev, tail="gaussian")
    assert_allclose(got, expected, rtol=1e-11)


@pytest.mark.parametrize("stddev", quick_and_slow([0.5, 3.0, 15.0, 150.0], [15.0]))
def test_theorem_6_at_a_thousand_digits(stddev: float) -> None:
    log_q = [-0.2, -0.7, -2.0, -5.0, -8.5, -40.0, -300.0, -1500.0]
    with mpmath.workdps(1000):
        variance = mpf(stddev) ** 2
        expected = [[float(precise_theorem_6(mpf(q), variance, order)) for order in ORDERS] for q in log_q]
    got = gnmax.gnmax_rdp(log_q, noise_stddev_votes=stddev, orders_A=ORDERS)
    assert_allclose(got, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("threshold", "stddev1", "stddev2"),
    quick_and_slow([(70, 40, 15), (90, 10, 4), (60.5, 8, 30), (130, 20, 9)], [(70, 40, 15), (60.5, 8, 30)]),
)
def test_joint_and_threshold_costs_at_fifty_digits(threshold: float, stddev1: float, stddev2: float) -> None:
    with mpmath.workdps(200):
        joint = [
            [float(precise_joint(votes, threshold, stddev1, stddev2, order)) for order in ORDERS]
            for votes in HISTOGRAMS
        ]
        check = []
        for votes in HISTOGRAMS:
            p = precise_pass_probability(max(votes), threshold, stddev1)
            log_q = mpmath.log(min(p, 1 - p))
            check.append([float(precise_theorem_6(log_q, 2 * mpf(stddev1) ** 2, order)) for order in ORDERS])
    mechanism = {"threshold": threshold, "threshold_stddev_votes": stddev1, "orders_A": ORDERS, "tail": "gaussian"}
    for width in (2, 3):
        rows = [i for i, votes in enumerate(HISTOGRAMS) if len(votes) == width]
        votes = [HISTOGRAMS[i] for i in rows]
        got = gnmax.confident_gnmax_rdp(votes, noise_stddev_votes=stddev2, **mechanism)
        assert_allclose(got, np.array(joint)[rows], rtol=1e-9, atol=2e-15)
        alone = [gnmax.confident_gnmax_rdp([row], noise_stddev_votes=stddev2, **mechanism)[0] for row in votes]
        assert_allclose(alone, np.array(joint)[rows], rtol=1e-9, atol=2e-15)
        assert_allclose(gnmax.threshold_rdp(votes, **mechanism), np.array(check)[rows], rtol=1e-8)


def argmax_distribution(votes: Histogram, stddev: float) -> np.ndarray:
    """P[noisy argmax = k] for discrete noise, the lowest class winning ties, summed over all noisy values."""
    reach = math.ceil(14 * stddev) + 2
    size = max(votes) + 1 + 2 * reach
    mass = np.zeros((len(votes), size))
    for k, count in enumerate(votes):
        mass[k, count : count + 2 * reach + 1] = masses(stddev, reach)
    at_most = np.cumsum(mass, axis=1)
    below = at_most - mass
    wins = [
        mass[k] * np.prod([below[j] if j < k else at_most[j] for j in range(len(votes)) if j != k], axis=0)
        for k in range(len(votes))
    ]
    probabilities = np.sum(wins, axis=1)
    assert probabilities.sum() == pytest.approx(1)
    return probabilities


def pass_probability(votes: Histogram, threshold: float, stddev: float) -> float:
    reach = math.ceil(14 * stddev) + 2
    passing = np.arange(-reach, reach + 1) + max(votes) >= threshold
    return float(masses(stddev, reach)[passing].sum())


def divergence(p: np.ndarray, other: np.ndarray, order: float) -> float:
    terms = order * np.log(p) + (1 - order) * np.log(other)
    return float(np.logaddexp.reduce(terms)) / (order - 1)


def neighbours(votes: Histogram) -> list[Histogram]:
    """One vote moved, and one vote withdrawn."""
    found = []
    for source, target in itertools.product(range(len(votes)), repeat=2):
        if votes[source]:
            changed = list(votes)
            changed[source] -= 1
            found.append(tuple(changed))
            changed[target] += source != target
            found.append(tuple(changed))
    return found


@pytest.mark.parametrize(("num_teachers", "num_classes"), [(8, 2), (5, 3)])
@pytest.mark.parametrize(("stddev1", "stddev2"), [(0.6, 0.5), (1.0, 0.8), (2.0, 1.2), (0.8, 1.3)])
def test_no_neighbour_exceeds_the_claim(num_teachers: int, num_classes: int, stddev1: float, stddev2: float) -> None:
    orders = [1.5, 2.0, 3.0, 6.0]
    threshold = num_teachers - 1.5
    histograms = [
        votes for votes in itertools.product(range(num_teachers + 1), repeat=num_classes) if sum(votes) == num_teachers
    ]
    log_q = gnmax.log_q(histograms, noise_stddev_votes=stddev2, tail="discrete")
    argmax = gnmax.gnmax_rdp(log_q, noise_stddev_votes=stddev2, orders_A=orders)
    mechanism = {"threshold": threshold, "threshold_stddev_votes": stddev1, "orders_A": orders, "tail": "discrete"}
    check = gnmax.threshold_rdp(histograms, **mechanism)
    joint = gnmax.confident_gnmax_rdp(histograms, noise_stddev_votes=stddev2, **mechanism)
    lowered = 0
    for i, votes in enumerate(histograms):
        labels, passes = argmax_distribution(votes, stddev2), pass_probability(votes, threshold, stddev1)
        assert np.delete(labels, np.argmax(votes)).sum() <= math.exp(log_q[i]) * (1 + 1e-9)
        released = np.append(passes * labels, 1 - passes)
        for other in neighbours(votes):
            other_labels, other_passes = (
                argmax_distribution(other, stddev2),
                pass_probability(other, threshold, stddev1),
            )
            other_released = np.append(other_passes * other_labels, 1 - other_passes)
            bits = [np.array([passes, 1 - passes]), np.array([other_passes, 1 - other_passes])]
            for j, order in enumerate(orders):
                assert divergence(labels, other_labels, order) <= argmax[i, j] * (1 + 1e-9) + 1e-12
                assert divergence(bits[0], bits[1], order) <= check[i, j] * (1 + 1e-9) + 1e-12
                assert divergence(released, other_released, order) <= joint[i, j] * (1 + 1e-9) + 1e-12
        lowered += bool(np.any(argmax[i] < np.array(orders) / stddev2**2 * (1 - 1e-9)))
    assert lowered, "the data-dependent bound was never in play"
