"""Projected dual ascent on Lagrange multipliers: one step up each constraint's violation, then back into a public set.

The set is the non-negative orthant, or its part below a cap in every coordinate, or within an L1 ball: convergence
theory asks for a compact one. Violations are released values, exact or noisy, so a step is post-processing and costs
nothing. Not known here: what is constrained, who released it, and where noise comes from.

Shapes: J multipliers.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def project(values_J: npt.ArrayLike, *, cap: float = math.inf, l1_radius: float = math.inf) -> FloatArray:
    """The nearest point with 0 <= entries <= ``cap``, or with non-negative entries that sum to ``l1_radius`` at most.

    ValueError for values that are not finite, for bounds that are not positive, and for both bounds at once.
    """
    _check_bounds(cap, l1_radius)
    return _projected(np.asarray(values_J, dtype=np.float64), cap, l1_radius)


class DualAscent:
    """Multipliers that rise where a constraint is violated; from 0."""

    def __init__(
        self,
        num_multipliers: int,
        *,
        learning_rate: float,
        cap: float = math.inf,
        l1_radius: float = math.inf,
    ) -> None:
        if not 0 <= learning_rate < math.inf:
            raise ValueError(f"Expected a dual learning rate >= 0 and finite, got {learning_rate}.")
        self._learning_rate, self._cap, self._l1_radius = learning_rate, cap, l1_radius
        _check_bounds(cap, l1_radius)
        self.multipliers_J = np.zeros(num_multipliers)

    def step(self, violations_J: FloatArray) -> FloatArray:
        """Ascend ``violations_J``, positive where a constraint fails; the multipliers after it, shape (J,)."""
        raised_J = self.multipliers_J + self._learning_rate * violations_J
        self.multipliers_J = _projected(raised_J, self._cap, self._l1_radius)
        return self.multipliers_J


def _projected(values_J: FloatArray, cap: float, l1_radius: float) -> FloatArray:
    positive_J: FloatArray = np.maximum(values_J, 0.0)
    # One product checks all entries; it overflows from 1e154 on, where multipliers mean nothing any more.
    if not math.isfinite(positive_J.dot(positive_J)):
        raise ValueError(f"Expected finite multipliers, got {values_J}; lower the dual learning rate.")
    if cap < math.inf:
        return np.minimum(positive_J, cap)
    is_inside = l1_radius == math.inf or positive_J.sum() <= l1_radius
    return positive_J if is_inside else _onto_simplex(positive_J, l1_radius)


def _check_bounds(cap: float, l1_radius: float) -> None:
    if not (cap > 0 and l1_radius > 0):
        raise ValueError(f"Expected cap > 0 and l1_radius > 0, got {cap} and {l1_radius}.")
    if math.isfinite(cap) and math.isfinite(l1_radius):
        raise ValueError(f"Expected a cap or an L1 radius, got both: {cap} and {l1_radius}.")


def _onto_simplex(positive_J: FloatArray, total: float) -> FloatArray:
    """The nearest non-negative vector with sum ``total``, below that of ``positive_J``: all entries sink alike."""
    # Duchi et al. 2008: the largest entries alone, those that stay above it, decide how far all sink.
    falling_J = np.sort(positive_J)[::-1]
    sinks_J = (np.cumsum(falling_J) - total) / np.arange(1, len(falling_J) + 1)
    sink = sinks_J[np.flatnonzero(falling_J > sinks_J)[-1]]
    sunk_J: FloatArray = np.maximum(positive_J - sink, 0.0)
    return sunk_J
