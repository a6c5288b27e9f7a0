"""Worst pairs of output distributions, straight from the definitions of mechanisms, as masses on points.

Part of :mod:`fairpate.privacy.independent`, so nothing of this package is imported. A pair says what one release may
look like with one unit and without it. Losses ln(with / without) are put on a grid so that the masses of both
distributions are kept, which makes the pair easier to tell apart, never harder. Shapes: K points of a pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_DEVIATIONS, _POINTS_PER_DEVIATION = 10.0, 200  # of a Gaussian: 1e-23 lies beyond
_LAPLACE_POINTS, _FACTOR_POINTS = 512, 2**10
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e6  # less is taken for none; more would need too many points


class NotRecomputedError(Exception):
    """Events of which no independent price is known here; the message says which, and why."""


@dataclass(frozen=True)
class Pair:
    """Two distributions on the same points: logarithms of the masses with and without one unit."""

    with_K: FloatArray
    without_K: FloatArray

    def mirrored(self) -> Pair:
        """The other direction."""
        return Pair(self.without_K, self.with_K)


def gaussian(stddev: float) -> Pair | None:
    """One normal variable of ``stddev``, moved by 1."""
    if not _is_noise(stddev):
        return None
    points = _points(stddev, 0.0, 1.0)
    return Pair(_log_normal(points - 1, stddev), _log_normal(points, stddev))


def sampled_replacement(stddev: float, rate: float) -> Pair | None:
    """A normal sum over a Poisson sample that, if one unit is in it, holds 1 in its place, or -1."""
    if not _is_noise(stddev):
        return None
    points = _points(stddev, -1.0, 1.0)
    up, none, down = (_log_normal(points - centre, stddev) for centre in (1.0, 0.0, -1.0))
    return Pair(_mixed(none, up, rate), _mixed(none, down, rate))


def laplace(scale_inverse: float) -> Pair | None:
    """One Laplace variable of scale 1 / ``scale_inverse``, moved by 1: two tails, and cells between the centres."""
    most = scale_inverse
    if not most < 1 / _LEAST_NOISE:
        return None
    if not most:
        return Pair(np.zeros(1), np.zeros(1))
    edges = np.linspace(0.0, 1.0, _LAPLACE_POINTS + 1)
    width = most * (edges[1] - edges[0])
    # A cell's mass: the density at its end nearer the centre, times (1 - exp(-width)) / 2.
    share = math.log(-math.expm1(-width) / 2)
    inside = -most * (1 - edges[1:]) + share, -most * edges[:-1] + share
    tails = np.array([0.0, -most]) - math.log(2)
    return Pair(np.concatenate([tails, inside[0]]), np.concatenate([tails[::-1], inside[1]]))


def two_answers(epsilon: float) -> Pair | None:
    """Randomised response between two values: the most telling release of pure differential privacy."""
    if not epsilon < 1 / _LEAST_NOISE:
        return None
    true, false = -np.logaddexp(0.0, -epsilon), -np.logaddexp(0.0, epsilon)
    return Pair(np.array([true, false]), np.array([false, true]))


def discrete_gaussian(stddev: float) -> Pair | None:
    """One whole number with discrete Gaussian noise, moved by 1."""
    if not _is_noise(stddev):
        return None
    reach = math.ceil(_DEVIATIONS * stddev) + 2
    points = np.arange(-reach, reach + 2, dtype=np.float64)
    masses = -((points - 1) ** 2) / (2 * stddev**2), -(points**2) / (2 * stddev**2)
    return Pair(masses[0] - np.logaddexp.reduce(masses[0]), masses[1] - np.logaddexp.reduce(masses[1]))


def on_sample(pair: Pair | None, rate: float) -> Pair | None:
    """The same where the unit is in a secret Poisson sample with probability ``rate``."""
    return None if pair is None else Pair(_mixed(pair.without_K, pair.with_K, rate), pair.without_K)


def on_visible_sample(pair: Pair | None, rate: float) -> Pair | None:
    """The same where everybody may see whether the unit is in the sample; out of it, nothing is told."""
    if pair is None or rate == 1:
        return pair
    inside, outside = math.log(rate), math.log1p(-rate)
    return Pair(np.append(pair.with_K + inside, outside), np.append(pair.without_K + inside, outside))


def together(*pairs: Pair | None) -> Pair | None:
    """Independent releases of the same sample."""
    found = [pair for pair in pairs if pair is not None]
    if len(found) < len(pairs):
        return None
    # Every factor, and every product again: a pair has thousands of points, and a product as many as all pairs of them.
    total, *others = (_coarse(pair) for pair in found)
    for other in others:
        total = _coarse(
            Pair(
                np.add.outer(total.with_K, other.with_K).ravel(),
                np.add.outer(total.without_K, other.without_K).ravel(),
            )
        )
    return total


def _is_noise(stddev: float) -> bool:
    if stddev > _MOST_NOISE:
        raise NotRecomputedError(f"noise of standard deviation {stddev:g} is above {_MOST_NOISE:g}")
    return stddev > _LEAST_NOISE


def _points(stddev: float, low: float, high: float) -> FloatArray:
    reach = _DEVIATIONS * stddev
    step = stddev / _POINTS_PER_DEVIATION
    count = math.ceil((high - low + 2 * reach) / step) + 1
    found: FloatArray = low - reach + step * np.arange(count, dtype=np.float64)
    return found


def _log_normal(offsets: FloatArray, stddev: float) -> FloatArray:
    # Points are a deviation over _POINTS_PER_DEVIATION apart; sums over them are integrals to the last digit.
    log_step = -math.log(_POINTS_PER_DEVIATION * math.sqrt(2 * math.pi))
    found: FloatArray = log_step - offsets**2 / (2 * stddev**2)
    return found


def _mixed(outside: FloatArray, inside: FloatArray, rate: float) -> FloatArray:
    if rate == 1:
        return inside
    found: FloatArray = np.logaddexp(math.log1p(-rate) + outside, math.log(rate) + inside)
    return found


def spread(pair: Pair, step: float) -> tuple[IntArray, FloatArray]:
    """Losses on multiples of ``step`` and their masses: each is split so that both distributions keep theirs."""
    losses, masses = pair.with_K - pair.without_K, np.exp(pair.with_K)
    kept = masses > 0
    # What underflows is left out: what a pair lacks of 1 is taken off delta where pairs are composed.
    losses, masses = losses[kept], masses[kept]
    below = np.floor(losses / step)
    # So much upwards that both sums stay: of the masses, and of masses times exp(-loss), which are those without.
    up = np.clip(np.expm1(below * step - losses) / math.expm1(-step), 0.0, 1.0)
    first = int(below.min())
    places: IntArray = (below - first).astype(np.int64)
    size = int(places.max()) + 2
    halves = np.bincount(places, masses * (1 - up), size), np.bincount(places + 1, masses * up, size)
    return first + np.arange(size, dtype=np.int64), np.asarray(halves[0] + halves[1], dtype=np.float64)


def _coarse(pair: Pair) -> Pair:
    """A pair of few points that is at least as easy to tell apart."""
    losses = pair.with_K - pair.without_K
    if len(losses) <= _FACTOR_POINTS:
        return pair
    step = max(float(np.ptp(losses)) / _FACTOR_POINTS, 1e-12)
    places, masses = spread(pair, step)
    kept = masses > 0
    with_K = np.log(masses[kept])
    return Pair(with_K, with_K - step * places[kept])
