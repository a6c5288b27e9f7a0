"""Masses and tail probabilities of the discrete Gaussian, and of the difference of two, accurate in log space.

N_Z(0, s^2) puts mass proportional to exp(-x^2 / (2 s^2)) on every integer x; :mod:`fairpate.privacy.discrete_gaussian`
draws from it. This module knows nothing of votes, thresholds or privacy costs.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fairpate.privacy.discrete_gaussian import FloatArray, IntArray, require_positive_stddev


def log_survival_table(stddev: float, max_value: int) -> FloatArray:
    """ln P[N >= t] for t = 0 .. max_value and N ~ N_Z(0, stddev^2); read-only, shape (max_value + 1,)."""
    require_positive_stddev(stddev)
    return _survival_table(float(stddev), _bucket(max_value))[: max_value + 1]


def log_difference_survival_table(stddev: float, max_gap: int) -> FloatArray:
    """ln P[N_a - N_b >= g] for g = 0 .. max_gap and independent N_a, N_b ~ N_Z(0, stddev^2); read-only.

    The difference is not a discrete Gaussian: its mass at d is exp(-d^2 / (4 s^2)) times a sum over the integers (d
    even) or over the half integers (d odd), which differ visibly below s = 1.
    """
    require_positive_stddev(stddev)
    return _difference_table(float(stddev), _bucket(max_gap))[: max_gap + 1]


def log_masses(stddev: float) -> tuple[IntArray, FloatArray]:
    """All x that N_Z(0, stddev^2) may be said to take, ascending, and ln P[N = x]."""
    require_positive_stddev(stddev)
    values = np.arange(-_margin(stddev), _margin(stddev) + 1)
    return values, -(values.astype(np.float64) ** 2) / (2 * stddev**2) - _log_lattice_sum(math.sqrt(2) * stddev, 0.0)


def log_difference_masses(stddev: float) -> tuple[IntArray, FloatArray]:
    """All d that the difference of two such variables may be said to take, ascending, and ln P[N_a - N_b = d]."""
    require_positive_stddev(stddev)
    values = np.arange(-2 * _margin(stddev), 2 * _margin(stddev) + 1)
    log_lattice_sums = np.array([_log_lattice_sum(stddev, offset) for offset in (0.0, 0.5)])[values % 2]
    squares = values.astype(np.float64) ** 2 / (4 * stddev**2)
    # The last term is the normaliser of both variables: sum over x of exp(-x^2 / (2 s^2)), squared.
    return values, log_lattice_sums - squares - 2 * _log_lattice_sum(math.sqrt(2) * stddev, 0.0)


def log_survival_and_complement(stddev: float, at_V: npt.NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    """ln P[N >= t] and ln P[N < t] for integers t of either sign; neither is taken as 1 minus a rounded other."""
    # By symmetry P[N < t] = P[N >= 1 - t]; of t and 1 - t exactly one is positive and has the smaller tail.
    upper_V = np.maximum(at_V, 1 - at_V)
    small_V = log_survival_table(stddev, int(upper_V.max(initial=1)))[upper_V]
    large_V = np.log1p(-np.exp(small_V))
    return np.where(at_V >= 1, small_V, large_V), np.where(at_V >= 1, large_V, small_V)


@lru_cache(maxsize=64)
def _survival_table(stddev: float, max_value: int) -> FloatArray:
    values = np.arange(max_value + _margin(stddev), dtype=np.float64)
    log_masses = -(values**2) / (2 * stddev**2)
    log_total = math.log(1 + 2 * float(np.exp(log_masses[1:]).sum()))
    return _log_sums_from_the_right(log_masses - log_total)[: max_value + 1]


@lru_cache(maxsize=64)
def _difference_table(stddev: float, max_gap: int) -> FloatArray:
    gaps = np.arange(max_gap + _margin(stddev))
    log_masses = -(gaps.astype(np.float64) ** 2) / (4 * stddev**2)
    log_masses += np.where(gaps % 2 == 0, _log_lattice_sum(stddev, 0.0), _log_lattice_sum(stddev, 0.5))
    log_total = np.logaddexp(log_masses[0], math.log(2) + np.logaddexp.reduce(log_masses[1:]))
    return _log_sums_from_the_right(log_masses - log_total)[: max_gap + 1]


def _log_lattice_sum(stddev: float, offset: float) -> float:
    """ln sum over the integers x of exp(-(x + offset)^2 / stddev^2)."""
    points = np.arange(-_margin(stddev), _margin(stddev) + 1) + offset
    return float(np.logaddexp.reduce(-(points**2) / stddev**2))


def _log_sums_from_the_right(log_masses: FloatArray) -> FloatArray:
    # From the smallest mass on, in log space: far tails keep their digits.
    tails = np.minimum(np.logaddexp.accumulate(log_masses[::-1])[::-1], 0.0)  # rounding may pass ln 1
    tails.setflags(write=False)
    return tails


def _margin(stddev: float) -> int:
    """Points past the end of a table after which the rest of the mass is below e^-49 of what the table holds."""
    return math.ceil(14 * stddev) + 10


def _bucket(size: int) -> int:
    """The next power of two: neighbouring sizes then share one cached table."""
    if not 0 <= size <= 2**24:
        raise ValueError(f"Expected a table of 0 .. 2^24 values, got {size}; for a larger threshold use inf.")
    return 1 << max(8, int(size).bit_length())
