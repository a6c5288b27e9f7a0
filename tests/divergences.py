"""The divergence of composed loss distributions at any threshold, from the tails in which epsilon is found."""

import math

import numpy as np

from fairpate.privacy.loss_distributions import _LOG_TAIL, UNIT, LossDistribution, Sum, _grid, _Tail, _tilt


def delta_at(distribution: LossDistribution, epsilon: float) -> float:
    """An upper bound on the larger of the two directions' hockey-stick divergences at ``epsilon``, of any sign."""
    return max(_of_direction(losses, epsilon) for losses in distribution.directions)


def _of_direction(losses: Sum, epsilon: float) -> float:
    # The saddle point of the integral in `_epsilon_at`: the derivative of its logarithm is 0.
    tilt = _tilt(losses, lambda t, _, mean: mean - epsilon - 1 / t - 1 / (t + 1))
    # Both are upper bounds. Without a tilt, rounding is smaller where epsilon is in the middle already.
    return min(_above(_Tail.of(losses, each), epsilon) for each in {tilt, 0.0})


def _above(tail: _Tail, epsilon: float) -> float:
    losses_S = _grid(tail.interval, tail.first, len(tail.tilted_S))
    if epsilon < losses_S[0] and tail.tilt:
        return 1.0  # what lies below the window may weigh most
    above_S = losses_S > epsilon
    ahead_S = losses_S[above_S] - epsilon
    weights_S = tail.tilted_S[above_S] * np.exp(-tail.tilt * ahead_S)
    lost = float(np.dot(weights_S, -np.expm1(-ahead_S))) * (1 + 2 * UNIT * len(losses_S))
    below = math.exp(_LOG_TAIL) if epsilon < losses_S[0] else 0.0
    return min(1.0, tail.infinite + below + lost * math.exp(min(tail.log_scale - tail.tilt * epsilon, 700.0)))
