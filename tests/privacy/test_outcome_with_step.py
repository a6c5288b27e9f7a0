"""Which step refused a query is an outcome of the priced mechanism: by brute force over all votes of an ensemble."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fairpate.privacy.accountant import ConfidentGnmaxQueries, rdp

TEACHERS, CLASSES = 4, 3
ORDERS = np.array([1.5, 2.0, 4.0, 8.0, 16.0])


def pmf(stddev: float) -> np.ndarray:
    """The discrete Gaussian on -30 .. 30; what lies beyond weighs less than 1e-40 here."""
    weights = np.exp(-(np.arange(-30, 31) ** 2) / (2 * stddev**2))
    return weights / weights.sum()


def outcome_probabilities(votes: tuple[int, ...], threshold: float, check: float, noise: float) -> np.ndarray:
    """P[check refuses], then P[check passes and the noisy argmax is class k] with ties broken uniformly."""
    reach = np.arange(-30, 31) + max(votes)
    passes = pmf(check)[reach >= threshold].sum()
    wins = np.zeros(CLASSES)
    grid, weights = np.arange(-30, 31), pmf(noise)
    for own, weight in zip(grid, weights, strict=True):
        for k in range(CLASSES):
            below, level = [], []
            for other in (c for c in range(CLASSES) if c != k):
                behind = grid + votes[other] - (own + votes[k])
                below.append(weights[behind < 0].sum())
                level.append(weights[behind == 0].sum())
            (b0, b1), (t0, t1) = below, level
            wins[k] += weight * (b0 * b1 + (t0 * b1 + b0 * t1) / 2 + t0 * t1 / 3)
    return np.array([1 - passes, *(passes * wins)])


def divergence(p: np.ndarray, q: np.ndarray, order: float) -> float:
    return float(np.log(np.sum(p**order * q ** (1 - order))) / (order - 1))


@pytest.mark.parametrize("threshold", [2.0, 3.0])
@pytest.mark.parametrize("refused_by_gate", [(), (1,), (1, 2), (0, 1, 2)])
def test_the_outcome_with_the_step_that_refused_costs_no_more_than_the_price(
    threshold: float, refused_by_gate: tuple[int, ...]
) -> None:
    """The gate's refusals of whatever class are one outcome, the check's refusal another, each label one of its own."""
    check, noise = 1.5, 1.2
    price_A = rdp(
        [ConfidentGnmaxQueries(count=1, threshold=threshold, threshold_stddev_votes=check, noise_stddev_votes=noise)],
        ORDERS,
    )
    every = [v for v in itertools.product(range(TEACHERS + 1), repeat=CLASSES) if sum(v) == TEACHERS]
    published = {}
    for votes in every:
        refused, *labels = outcome_probabilities(votes, threshold, check, noise)
        by_gate = sum(labels[k] for k in refused_by_gate)
        kept = [labels[k] for k in range(CLASSES) if k not in refused_by_gate]
        published[votes] = np.array([refused, *([by_gate] if refused_by_gate else []), *kept])
        assert published[votes].sum() == pytest.approx(1.0)
    worst_A = np.zeros(len(ORDERS))
    for one, other in itertools.permutations(every, 2):
        if sum(abs(a - b) for a, b in zip(one, other, strict=True)) == 2:  # one teacher changes its vote
            worst_A = np.maximum(worst_A, [divergence(published[one], published[other], order) for order in ORDERS])
    assert (worst_A > 0).all()
    assert (worst_A <= price_A).all()
