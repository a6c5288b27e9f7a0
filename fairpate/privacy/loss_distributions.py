"""Privacy loss distributions on a grid, as upper bounds: computed from hockey-stick divergences and composed.

A mechanism's worst pair of output distributions gives its divergence at thresholds of any sign (the last part has those
of Gaussian and Laplace noise), on all records or on a Poisson sample. :func:`connected` turns a divergence into losses
on a grid. Losses of independent releases add up, and their distributions are convolved by Fourier transforms, with a
rounding error relative to the *largest* masses, which would exceed a small delta. So every distribution is tilted
first: a mass m(l) becomes m(l) exp(t l) / M(t), where M is the moment generating function. The tilt t is chosen for the
requested delta, so that the losses which decide the result get the largest masses. The masses of a sum are
P(s) = P_t(s) exp(ln M(t) - t s), where M is the product over releases (:class:`_Tail`).

Every delta and epsilon is an upper bound. None instead of a loss distribution means no guarantee. Shapes: L losses of
one release, S of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import scipy

from fairpate.types import FloatArray, Relation

DEFAULT_INTERVAL = 1e-4
LEAST_DELTA = 1e-20
"""The least delta for loss distributions: below it, the mass outside the grids (1e-33 of each release) may matter."""
UNIT = 2.0**-53
"""The largest relative error of one operation on floats."""
_TRANSFORM = 10 * UNIT  # per halving of a transform's length
_LOG_TAIL = math.log(1e-15)  # of a tilted sum, on either side of its window
_LITTLE = 1e-6  # of a delta
_ORDERS = 8  # of the moments that bound these tails
_EXAMINED_AT_ONCE = 4096  # losses, from the least on, of which one is enough
_BINS = 4096  # of a release's losses, where a tilt is looked for
_LARGEST_TILT, _LARGEST_EXPONENT = 4.0, 600.0  # over the interval; of what may overflow


@dataclass(frozen=True, kw_only=True, eq=False)
class Losses:
    """The privacy losses of one release in one direction: for removing a record, or for adding one.

    ``masses_L[i]`` is the probability of the loss (``lowest`` + i) * ``interval``, ``infinite`` the probability of an
    infinite loss.
    """

    interval: float
    lowest: int
    masses_L: FloatArray
    infinite: float = 0.0


Sum = tuple[tuple[Losses, int], ...]
"""Independent losses on one grid, each with its number of repetitions."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossDistribution:
    """The privacy losses when a record is removed and when a record is added: one object for both if they are equal."""

    removing: Sum
    adding: Sum

    @property
    def directions(self) -> tuple[Sum, ...]:
        """The distinct loss distributions: only one if adding and removing a record have the same losses."""
        return (self.removing,) if self.adding is self.removing else (self.removing, self.adding)

    def each(self, done: Callable[[Losses, int], tuple[Losses, int]]) -> LossDistribution:
        """Return this distribution with every part of both directions changed by ``done``. A part is a pair: the losses
        of one step, and the number of times that the step is repeated; ``done`` maps it to a new pair."""
        found = [tuple(done(*part) for part in direction) for direction in self.directions]
        return LossDistribution(removing=found[0], adding=found[-1])


def symmetric(losses: Losses) -> LossDistribution:
    """Return the loss distribution of a release that has the same losses in both directions."""
    direction = ((losses, 1),)
    return LossDistribution(removing=direction, adding=direction)


def randomised_response(epsilon: float, *, interval: float = DEFAULT_INTERVAL) -> LossDistribution:
    """Return the loss distribution of a bit that is reported truthfully with odds e^``epsilon`` to 1.

    It has the losses epsilon and -epsilon; the mass of each is split between the two nearest grid points.
    """
    lowest, highest = math.floor(-epsilon / interval), math.ceil(epsilon / interval)
    masses = np.zeros(highest - lowest + 1)
    for loss in (-epsilon, epsilon):
        add_split(masses, np.array([loss]), np.array([scipy.special.expit(loss)]), interval=interval, lowest=lowest)
    return symmetric(Losses(interval=interval, lowest=lowest, masses_L=masses))


def add_split(masses_L: FloatArray, losses: FloatArray, masses: FloatArray, *, interval: float, lowest: int) -> None:
    """Add ``masses`` at ``losses`` to the grid ``masses_L``, in place; each mass is split between the two nearest
    points.

    The split keeps the total probability under each of the two neighbouring data sets. The original losses can be
    computed from the losses on the grid (post-processing), so the latter are an upper bound.
    """
    below = np.floor(losses / interval).astype(np.int64)
    # Of mass 1 at loss l, x at the upper point: x e^-h + (1 - x) = e^-(l - lower). Rounding is for the upper one.
    share = np.clip(np.expm1(-(losses - interval * below)) / math.expm1(-interval) * (1 + 8 * UNIT), 0.0, 1.0)
    inside = np.minimum(below + 1 - lowest, len(masses_L) - 1)
    np.add.at(masses_L, below - lowest, masses * (1 - share))
    np.add.at(masses_L, inside, masses * share)


def connected(interval: float, lowest: int, excess_L: FloatArray) -> Losses:
    """Return privacy losses on a grid, given the hockey-stick divergence of a release at the points of the grid.

    The losses follow the pessimistic connect-the-dots rule (Doroshenko et al. 2022, arXiv 2207.04380, Algorithm 1):
    they have the divergence D of the release at all points of the grid, and a larger divergence between points.
    ``excess_L`` is X(e) = D(e) - max(0, 1 - exp(e)), the excess over a release without any loss: X vanishes on both
    sides, so that its second differences keep their digits where D is nearly 1. The grid's first point is ``lowest``
    times ``interval``, and 0 is one of its points. If ``excess_L`` is an upper bound on X, so is the excess of the
    result.
    """
    # Slopes of the divergence in e^epsilon, times e^epsilon. On the left of the first point the excess falls to 0 at
    # -inf, on the right of the last one it stays.
    steps = np.diff(excess_L)
    after_L = np.append(steps / math.expm1(interval), 0.0)
    before_L = np.append(excess_L[0], steps / -math.expm1(-interval))
    masses_L = after_L - before_L
    masses_L[-lowest] += 1.0
    # Rounding may move a mass by some units in the last place of what it is the difference of, and below zero.
    masses_L = np.maximum(masses_L, 0.0) + 8 * UNIT * (np.abs(after_L) + np.abs(before_L))
    return Losses(interval=interval, lowest=lowest, masses_L=masses_L, infinite=float(excess_L[-1]))


def repeated(step: LossDistribution, count: int) -> LossDistribution:
    """Return the composition of ``count`` >= 1 equal steps."""
    return step.each(lambda losses, times: (losses, times * count))


def composed(parts: Sequence[LossDistribution | None]) -> LossDistribution | None:
    """Return the composition of one or more ``parts``; a part may depend on the output of earlier ones.

    None if a part is None, which has no guarantee.
    """
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    removing = tuple(losses for part in known for losses in part.removing)
    # One object for both directions, so that the same sum is not composed twice.
    if all(len(part.directions) == 1 for part in known):
        return LossDistribution(removing=removing, adding=removing)
    return LossDistribution(removing=removing, adding=tuple(losses for part in known for losses in part.adding))


def mixed_with_nothing(base: LossDistribution, share: float) -> LossDistribution:
    """Return the losses of a mechanism that releases ``base`` with probability ``share``, and otherwise nothing.

    The output is taken to show which of the two happened. If it does not show that, the result is an upper bound, by
    convexity.
    """
    # Single steps: each step draws its own sample, so that mixing comes before composition.
    assert all(count == 1 for direction in base.directions for _, count in direction)
    assert all(len(direction) == 1 for direction in base.directions)

    def mixed(losses: Losses, count: int) -> tuple[Losses, int]:
        lowest, end = min(losses.lowest, 0), max(losses.lowest + len(losses.masses_L), 1)
        masses = np.zeros(end - lowest)
        masses[losses.lowest - lowest :][: len(losses.masses_L)] = share * losses.masses_L
        # Where nothing was released, the loss is 0.
        masses[-lowest] += 1 - share
        return replace(losses, lowest=lowest, masses_L=masses, infinite=share * losses.infinite), count

    return base.each(mixed)


def epsilon_and_excess(distribution: LossDistribution | None, target_delta: float) -> tuple[float, float]:
    """Return the least epsilon >= 0 at which the hockey-stick divergence is proven to be at most ``target_delta``;
    ``inf`` if there is none. The second value estimates how much of this epsilon is due to the rounding of losses to a
    grid."""
    if distribution is None:
        return math.inf, 0.0
    return max(_epsilon_at(losses, target_delta) for losses in distribution.directions)


def _epsilon_at(losses: Sum, delta: float) -> tuple[float, float]:
    # Losses of a mass far below delta may be so large that a tilt would move them into the middle, instead of those
    # that decide: they count as infinite.
    beyond, parts = _LITTLE * delta / sum(count for _, count in losses), list(losses)
    for place, (part, count) in enumerate(parts):
        from_top_L, size = part.masses_L[::-1], 1024  # the masses that matter here are few: not all are added up
        while (top := int(np.searchsorted(np.cumsum(from_top_L[:size]), beyond, side="right"))) == size:
            size *= 64
        if 0 < top < len(part.masses_L):
            infinite = part.infinite + float(part.masses_L[-top:].sum())
            parts[place] = replace(part, masses_L=part.masses_L[:-top], infinite=infinite), count
    losses = tuple(parts)
    # The saddle point, where the integrand of delta(eps) = 1 / (2 pi i) integral M(t) exp(-t eps) / (t (t + 1)) dt is
    # flat and about delta.
    tilt = _tilt(losses, lambda t, log_moment, mean: t * mean - log_moment + math.log(delta * t * (t + 1)) - 2)
    best = (math.inf, 0.0)
    while True:
        tail = _Tail.of(losses, tilt)
        found, is_lowest = tail.epsilon_at(delta)
        is_less = found < best[0]
        best = min(best, (found, tail.excess))
        if not tilt:
            return best
        rounding = math.inf
        if math.isfinite(found):
            # About the part of the divergence at that epsilon that bounds the transforms' rounding.
            scale = math.exp(min(tail.log_scale - tilt * found, 700.0))
            rounding = tail.error * scale / (tail.interval * tilt * (tilt + 1))
        # Losses far above may take the middle: a smaller tilt then leaves less rounding, or reaches a lower epsilon.
        if not (is_lowest or (is_less and rounding > _LITTLE * delta)):
            return best
        tilt = tilt / 2 if tilt * losses[0][0].interval > 1e-6 else 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tail:
    """The upper tail of a sum of losses, where every mass is an upper bound.

    Three bounds are added to its masses:

    - The transforms' rounding, with the unit roundoff u. Each output of a fast transform of length N sums its inputs
      along one path each of log2 N butterflies, so that it is wrong by at most c u log2 N times the sum of their
      absolute values (Higham 2002, Accuracy and Stability of Numerical Algorithms, section 24.1; c is 4.3 for radix 2,
      below 8 for 3 and 5, and 10 here). A power of n is wrong by n times the error of its base and 3 u n of its own
      (Brent, Percival and Zimmermann 2007: a product by sqrt(5) u). The sum of the errors of all frequencies bounds the
      error of every mass, and is added to every mass.
    - Wrap-around. A transform's window holds all but 1e-15 of the tilted sum on either side (Chernoff's bound). Masses
      outside the window are added to masses inside. The bound on the mass above the window is also added to the
      infinite loss.
    - The rounding of tilting, of sums and of exponentials, as a factor on delta.

    The loss at index i is (``first`` + i) ``interval``, and its mass is ``tilted_S[i]`` exp(``log_scale`` - ``tilt``
    loss). ``error`` is the part of ``tilted_S[i]`` that bounds rounding. ``excess``: an estimate of the part of epsilon
    that the grid adds.
    """

    interval: float
    first: int
    tilt: float
    log_scale: float
    tilted_S: FloatArray
    infinite: float
    excess: float
    error: float

    @classmethod
    def of(cls, losses: Sum, tilt: float) -> _Tail:
        """Return the upper tail of the sum of independent ``losses``, which are tilted here: each mass at a loss l is
        multiplied by exp(``tilt`` l), and normalised."""
        interval, total = losses[0][0].interval, sum(count for _, count in losses)
        tilted, log_moment, error, log_finite, odd = [], 0.0, 0.0, 0.0, 0.0
        for part, count in losses:
            with np.errstate(divide="ignore"):
                log_masses_L = np.log(part.masses_L)
            values_L = _grid(interval, part.lowest, len(part.masses_L))
            exponents_L = log_masses_L + tilt * values_L
            largest = float(exponents_L.max())
            masses_L = np.exp(exponents_L - largest)
            moment = float(masses_L.sum())
            masses_L /= moment
            log_moment += count * (largest + math.log(moment))
            # A bound on every exponent above: 760 is more than |ln x| of any positive float x.
            size = tilt * max(abs(values_L[0]), abs(values_L[-1])) + abs(largest) + 760
            error += 8 * UNIT * count * size
            tilted.append((masses_L, count))
            log_finite += count * math.log1p(-part.infinite) if part.infinite < 1 else -math.inf
            odd += count * float(masses_L[(part.lowest + 1) % 2 :: 2].sum())
        lowest = sum(count * part.lowest for part, count in losses)
        if total == 1:
            first, sums_S, error_of_sums, log_above = 0, tilted[0][0], 0.0, -math.inf
        else:
            first, last = _window(tilted)
            sums_S, error_of_sums = _transformed(tilted, first, last - first + 1)
            length = sum(count * (len(masses_L) - 1) for masses_L, count in tilted)
            log_above = _LOG_TAIL if last < length else -math.inf
        top = interval * (lowest + first + len(sums_S))
        log_scale = log_moment + error + 8 * UNIT * (abs(log_moment) + tilt * abs(top) + len(sums_S))
        beyond = math.exp(min(log_scale - tilt * top + log_above, 0.0)) if log_above > -math.inf else 0.0
        return cls(
            interval=interval,
            first=lowest + first,
            tilt=tilt,
            log_scale=log_scale,
            tilted_S=sums_S,
            error=error_of_sums,
            # 1 less the chance that all losses are finite: `expm1` keeps small masses that 1 - x would round away.
            infinite=beyond - math.expm1(log_finite),
            # A grid of twice the interval splits every other loss; half of it would add a quarter of that.
            excess=odd * (tilt + 1) * interval**2 / 6,
        )

    def epsilon_at(self, delta: float) -> tuple[float, bool]:
        """Return an upper bound on the epsilon at ``delta``. The second value is True if the bound is the lowest loss
        that was examined, so that a smaller epsilon may hold."""
        start = max(0, -self.first)
        if self.infinite > delta or start >= len(self.tilted_S):
            # No finite loss above 0: only the infinite one counts.
            return (math.inf if self.infinite > delta else 0.0), False
        middle = start + int(self.tilted_S[start:].argmax())
        start = max(start, middle - math.floor(_LARGEST_EXPONENT / (self.tilt + 1) / self.interval))
        lowest, reference = self.first + start, middle + self.first
        last = len(self.tilted_S) - 1 - start
        ahead_S = self.interval * np.arange(start - middle, start - middle + last + 1, dtype=np.float64)
        # Masses are the weights below times this factor: counted from the reference, both fit a float.
        scale = math.exp(min(self.log_scale - self.tilt * self.interval * reference, 700.0))
        weights_S = self.tilted_S[start:] * np.exp(-self.tilt * ahead_S)
        # Each with all that is above it, added up from the end.
        above_S, moved_S = (np.cumsum(w_S[::-1])[::-1] for w_S in (weights_S, weights_S * np.exp(-ahead_S)))
        rounding = 1 + 4 * UNIT * len(weights_S)
        # At the last loss itself, nothing is above but what is infinite.
        place = last
        for first in range(0, last + 1, _EXAMINED_AT_ONCE):  # up to the first loss that is enough
            part = slice(first, first + _EXAMINED_AT_ONCE)
            with np.errstate(over="ignore", invalid="ignore"):
                upper = above_S[part] * rounding * scale
                enough = self.infinite + upper - np.exp(ahead_S[part]) * (moved_S[part] * scale) <= delta
            if enough.any():
                place = first + int(enough.argmax())
                break
        if not place:
            return (self.interval * lowest, True) if lowest > 0 else (0.0, False)
        # Between two losses of the grid the same masses lie above epsilon, and the divergence is solved for epsilon.
        left, moved = self.infinite + above_S[place] * rounding * scale - delta, moved_S[place] * scale
        solved = math.inf
        if left > 0 < moved:
            solved = self.interval * reference + math.log(left) - math.log(moved)
        return float(np.clip(solved, self.interval * (lowest + place - 1), self.interval * (lowest + place))), False


def _window(tilted: Sequence[tuple[FloatArray, int]]) -> tuple[int, int]:
    """Return a first and a last index of the sum of losses such that at most e^``_LOG_TAIL`` of its mass lies outside
    on either side, by Chernoff's bound."""
    places = [np.arange(len(masses_L), dtype=np.float64) for masses_L, _ in tilted]
    means = [float(np.dot(masses_L, places_L)) for (masses_L, _), places_L in zip(tilted, places, strict=True)]
    centred = [places_L - mean for places_L, mean in zip(places, means, strict=True)]
    middle = sum(count * mean for (_, count), mean in zip(tilted, means, strict=True))
    end = sum(count * (len(masses_L) - 1) for masses_L, count in tilted)
    parts = list(zip((masses_L for masses_L, _ in tilted), (count for _, count in tilted), centred, strict=True))
    spread = math.sqrt(sum(count * float(np.dot(masses_L, x_L * x_L)) for masses_L, count, x_L in parts))
    farthest = max(float(np.abs(x_L).max()) for x_L in centred)
    if not farthest:
        return 0, end
    # Orders: four times the best one for a Gaussian, then halves of it, and none at which an exponential overflows.
    largest = min(4 * math.sqrt(-2 * _LOG_TAIL) / max(spread, 1e-9), _LARGEST_EXPONENT / farthest)
    order = largest / 2 ** (_ORDERS - 1)
    growth = [np.exp(order * x_L) for x_L in centred]
    above = below = math.inf
    for doubling in range(_ORDERS):
        if doubling:
            growth, order = [g_L * g_L for g_L in growth], 2 * order
        rising = sum(count * math.log(np.dot(m_L, g_L)) for (m_L, count, _), g_L in zip(parts, growth, strict=True))
        falling = sum(
            count * math.log(np.dot(m_L, 1 / g_L)) for (m_L, count, _), g_L in zip(parts, growth, strict=True)
        )
        above, below = min(above, (rising - _LOG_TAIL) / order), min(below, (falling - _LOG_TAIL) / order)
    return max(0, math.floor(middle - below) - 1), min(end, math.ceil(middle + above) + 1)


def _transformed(tilted: Sequence[tuple[FloatArray, int]], first: int, size: int) -> tuple[FloatArray, float]:
    """Return upper bounds on the masses of the sum of tilted losses at ``size`` indices from ``first`` on, and the
    bound on rounding errors that was added to each mass."""
    length = scipy.fft.next_fast_len(size, real=True)
    rounding, total, least, of_bases, atom = _TRANSFORM * math.log2(length), 0, math.inf, 0.0, 1.0
    product = np.ones(length // 2 + 1, dtype=np.complex128)
    for masses_L, count in tilted:
        # What is longer than the window wraps around, as the sum does.
        folded = np.pad(masses_L, (0, -len(masses_L) % length)).reshape(-1, length).sum(axis=0)
        # The largest mass, often nearly 1 at no loss at all, is put at 0, where its transform is a constant.
        place = int(folded.argmax())
        others = np.roll(folded, -place)
        largest, others[0] = float(others[0]), 0.0
        base = np.asarray(scipy.fft.rfft(others) + largest, dtype=np.complex128)
        exponent = count
        while True:  # by repeated squaring, in place
            if exponent % 2:
                product *= base
            exponent //= 2
            if not exponent:
                break
            base *= base
        total, least, first, atom = total + count, min(least, count), first - count * place, atom * largest**count
        of_bases += count * (rounding * float(others.sum()) + 2 * UNIT)
    product -= atom
    sums_S = scipy.fft.irfft(product, length)
    sums_S[0] += atom
    mean = 2 * float(np.abs(product).sum()) / length
    # An error e of a base makes one of n |base|^(n - 1) e in its power n: at most 2 n e |base|^n where |base| >= 1/2,
    # and at most n e / 2^(n - 1) elsewhere.
    of_bases *= math.exp(min(2 * of_bases, 700.0))
    of_powers = (mean + atom) * (4 * UNIT * total + 2 * of_bases) + of_bases * 0.5 ** (least - 1)
    error = mean * rounding + of_powers
    return np.maximum(np.roll(sums_S, -(first % length))[:size], 0.0) + error, error


def _tilt(losses: Sum, excess: Callable[[float, float, float], float]) -> float:
    """Return approximately the exponential tilt t >= 0 of ``losses`` at which the function ``excess`` rises to 0.

    The arguments of ``excess`` are t, the logarithm of the moment-generating function at t, and the mean of the losses
    tilted by t.
    """
    # ln of the masses of coarse bins, none of them empty, and the mean loss of each: a rough tilt is enough.
    bins = []
    for part, count in losses:
        starts = np.arange(0, len(part.masses_L), -(-len(part.masses_L) // _BINS))
        masses = np.add.reduceat(part.masses_L, starts)
        sums = np.add.reduceat(part.masses_L * _grid(part.interval, part.lowest, len(part.masses_L)), starts)
        kept = masses > 0
        bins.append((np.log(masses[kept]), sums[kept] / masses[kept], count))

    def at(log_t: float) -> float:
        tilt, log_moment, mean = math.exp(log_t), 0.0, 0.0
        for log_masses, losses_B, count in bins:
            exponents = log_masses + tilt * losses_B
            largest = exponents.max()
            masses = np.exp(exponents - largest)
            moment = masses.sum()
            log_moment += count * float(largest + math.log(moment))
            mean += count * float(np.dot(masses, losses_B) / moment)
        return excess(tilt, log_moment, mean)

    # In ln t, because the tilt that is looked for may be of any order of magnitude.
    high = math.log(_LARGEST_TILT / losses[0][0].interval)
    if at(high) <= 0:
        return math.exp(high)
    low = high - 1.0
    while at(low) > 0:
        high, low = low, low - 2.0
        # The excess is positive for every tilt that matters: none is used.
        if low < -40:
            return 0.0
    return math.exp(scipy.optimize.brentq(at, low, high, xtol=1e-3))


_MOST_DEVIATIONS = 12.0  # of a Gaussian: 1e-33 lies beyond
_LOG_NO_MASS = math.log(1e-33)


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """One Gaussian release of sensitivity 1, as a worst pair of output distributions."""

    noise_multiplier: float

    @property
    def largest_loss(self) -> float:
        """The largest privacy loss taken into account; larger losses have a probability below 1e-33."""
        return (0.5 / self.noise_multiplier + _MOST_DEVIATIONS) / self.noise_multiplier

    def divergence(self, epsilons: FloatArray) -> FloatArray:
        """Return the hockey-stick divergence of a Gaussian release at thresholds of any sign (Balle and Wang 2018,
        Theorem 8)."""
        mu = 1 / self.noise_multiplier
        # In log space: e^epsilon overflows where the tail that it multiplies vanishes.
        behind, ahead = -epsilons / mu - mu / 2, mu / 2 - epsilons / mu
        below, above = np.exp(epsilons + scipy.special.log_ndtr(behind)), scipy.special.ndtr(ahead)
        return above - below + _rounding(above + below, behind, np.abs(epsilons))


@dataclass(frozen=True, kw_only=True)
class Laplace:
    """One release of sensitivity 1 with Laplace noise, as a worst pair of output distributions."""

    scale: float

    @property
    def largest_loss(self) -> float:
        """The largest possible privacy loss, 1 / scale."""
        return 1 / self.scale

    def divergence(self, epsilons: FloatArray) -> FloatArray:
        """Return the hockey-stick divergence at thresholds of any sign: 1 - e^((eps - a) / 2) for ``|eps| <= a``, with
        the largest loss a."""
        most = self.largest_loss
        half = (np.minimum(epsilons, most) - most) / 2
        inside = np.where(epsilons < most, -np.expm1(half) + _rounding(np.exp(half), 0.0, np.abs(epsilons) + most), 0.0)
        return np.where(epsilons < -most, -np.expm1(np.minimum(epsilons, 0.0)), inside)


@dataclass(frozen=True, kw_only=True)
class GaussianAndLaplace:
    """One Gaussian and one Laplace release of the same records, each of sensitivity 1."""

    noise_multiplier: float
    laplace_scale: float

    @property
    def largest_loss(self) -> float:
        """The largest privacy loss taken into account; larger losses have a probability below 1e-33."""
        return 1 / self.laplace_scale + Gaussian(noise_multiplier=self.noise_multiplier).largest_loss

    def divergence(self, epsilons: FloatArray) -> FloatArray:
        """Return the hockey-stick divergence of the two releases together, at thresholds of any sign.

        It is the divergence of the Gaussian release alone at the threshold minus the Laplace release's loss, averaged
        over that loss. The Laplace losses are a = 1 / scale with mass 1/2, -a with mass exp(-a) / 2, and between them
        have the density exp((loss - a) / 2) / 4. With Gaussian noise s and mu = 1 / s, integrated by parts, the
        divergence at e is

            Phi(s (a - e) + mu / 2) - exp(e) Phi(-s (a + e) - mu / 2)
                - exp((e - a) / 2 - mu^2 / 8) (Phi(s (a - e)) - Phi(-s (a + e)))
        """
        most, noise, half = 1 / self.laplace_scale, self.noise_multiplier, 0.5 / self.noise_multiplier
        ahead, behind = noise * (most - epsilons), -noise * (most + epsilons)
        log_scale, log_tail = (epsilons - most - half**2) / 2, scipy.special.log_ndtr
        # In log space: e^epsilon overflows where the tails that it multiplies vanish.
        near, less_near = scipy.special.ndtr(ahead + half), np.exp(log_scale + log_tail(ahead))
        far, less_far = np.exp(log_scale + log_tail(behind)), np.exp(epsilons + log_tail(behind - half))
        rounding = _rounding(near + less_near, np.minimum(ahead, 0.0), np.abs(log_scale))
        rounding += _rounding(far + less_far, np.minimum(behind - half, 0.0), np.abs(log_scale))
        return np.clip(near - less_near + far - less_far + rounding, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class AtomicLoss:
    """A privacy loss ln(P / P') with countably many values, for two neighbouring data sets with the outputs P (shifted
    by the privacy unit) and P': ``losses`` in ascending order, and the logarithms of their probabilities under P."""

    losses: FloatArray
    log_masses: FloatArray

    @property
    def largest_loss(self) -> float:
        """The largest privacy loss taken into account; larger losses have a probability below 1e-33."""
        mass_from, _ = self._tails
        return float(self.losses[np.searchsorted(-mass_from[:-1], -_LOG_NO_MASS) - 1])

    def divergence(self, epsilons: FloatArray) -> FloatArray:
        """Return the hockey-stick divergence at thresholds of any sign."""
        first = np.searchsorted(self.losses, epsilons, side="right")
        moved, unmoved = self._tails
        with np.errstate(divide="ignore"):
            # As a share of the moved tail, in log space: the difference of two tiny tails would cancel.
            share = -np.expm1(np.minimum(epsilons + unmoved[first] - moved[first], 0.0))
        # A bound on the rounding of the sums: a few units in the last place of a logarithm each.
        share += 8 * UNIT * len(self.losses) * (1 + np.abs(moved[first]))
        return np.where(first < len(self.losses), np.exp(moved[first]) * np.minimum(share, 1.0), 0.0)

    @cached_property
    def _tails(self) -> tuple[FloatArray, FloatArray]:
        """For each loss, the logarithm of the probability of this loss or a larger one: an array for the outputs P and
        one for P'. The last entry of each array is a placeholder, 0, for thresholds above all losses."""
        # Summed from the right and in log space, because the smallest masses decide a small delta.
        moved = np.logaddexp.accumulate(self.log_masses[::-1])[::-1]
        unmoved = np.logaddexp.accumulate((self.log_masses - self.losses)[::-1])[::-1]
        return np.append(moved, 0.0), np.append(unmoved, 0.0)


WorstPair = Gaussian | Laplace | GaussianAndLaplace | AtomicLoss
"""A pair of output distributions that dominates those of all neighbours and is mirror symmetric, given by its
hockey-stick divergence at thresholds of any sign."""


def _rounding(terms: FloatArray, deviations: FloatArray | float, exponents: FloatArray) -> FloatArray:
    """Return a bound on the rounding error of a difference x - y, given ``terms``, the sum x + y.

    x and y are products of an exponential and a Gaussian tail: ``exponents`` are the absolute values of the exponents,
    and the tails begin at ``deviations`` standard deviations.
    """
    return 4 * UNIT * terms * (16 + deviations**2 + exponents)


def gaussians(count: int, noise_multiplier: float, *, interval: float = DEFAULT_INTERVAL) -> LossDistribution | None:
    """Return the loss distribution of ``count`` >= 1 Gaussian releases of sensitivity 1; None without noise.

    They cost as much as one release with sqrt(count) times less noise.
    """
    if not noise_multiplier:
        return None
    one = Gaussian(noise_multiplier=noise_multiplier / math.sqrt(count))
    return on_poisson_sample(one, sampling_rate=1, interval=interval)


def poisson_gaussians(
    count: int,
    noise_multiplier: float,
    *,
    sampling_rate: float,
    relation: Relation = "add or remove one",
    interval: float = DEFAULT_INTERVAL,
) -> LossDistribution | None:
    """Return the loss distribution of ``count`` >= 1 Gaussian sums, each over a fresh Poisson sample; None without
    noise.

    A record in the sample adds a vector of L2 norm at most 1.
    """
    if not noise_multiplier:
        return None
    if relation == "replace one":
        step = _replacing(noise_multiplier, sampling_rate, interval)
    else:
        base = Gaussian(noise_multiplier=noise_multiplier)
        step = on_poisson_sample(base, sampling_rate=sampling_rate, interval=interval)
    return repeated(step, count)


def on_poisson_sample(base: WorstPair, *, sampling_rate: float, interval: float = DEFAULT_INTERVAL) -> LossDistribution:
    """Return the loss distribution of the release ``base`` on a Poisson sample, for adding or removing a record.

    If D is the divergence of ``base`` on all records, the divergences on a sample of rate r are

        removing:  r D(ln((e^eps - 1 + r) / r))                                for e^eps > 1 - r, else 1 - e^eps
        adding:    (1 - (1 - r) e^eps) D(ln(r e^eps / (1 - (1 - r) e^eps)))    for e^eps < 1 / (1 - r), else 0

    Both are non-negative multiples of D: if ``base`` is an upper bound, so is the result. ``base`` must be mirror
    symmetric. Replacing a record has another worst pair (:func:`_replacing`).
    """
    if sampling_rate == 1:
        return _mirrored(base.divergence, base.largest_loss, interval)
    log_out = math.log1p(-sampling_rate)
    # A sample shifts the largest loss to ln(1 - rate + rate e^loss), and no loss of removing is below ln(1 - rate).
    highest = math.ceil(float(np.logaddexp(log_out, math.log(sampling_rate) + base.largest_loss)) / interval) + 1
    lowest = math.floor(log_out / interval) - 1
    epsilons = _grid(interval, lowest, highest - lowest + 1)
    excess = _removing(base, epsilons, sampling_rate)
    # For adding, it is the mirror image: e^epsilon times that at -epsilon.
    mirrored = (np.exp(-epsilons) * excess * (1 + 4 * UNIT))[::-1]
    removing, adding = connected(interval, lowest, excess), connected(interval, -highest, mirrored)
    return LossDistribution(removing=((removing, 1),), adding=((adding, 1),))


def _grid(interval: float, lowest: int, size: int) -> FloatArray:
    return interval * np.arange(lowest, lowest + size, dtype=np.float64)


def _excess(divergence: Callable[[FloatArray], FloatArray], epsilons: FloatArray) -> FloatArray:
    """Return the hockey-stick divergence minus max(0, 1 - e^epsilon), which is the divergence of a release without
    loss.

    By symmetry its value at -epsilon is e^-epsilon times that at epsilon.
    """
    return np.exp(np.minimum(epsilons, 0.0)) * divergence(np.abs(epsilons)) * (1 + 4 * UNIT)


def _mirrored(divergence: Callable[[FloatArray], FloatArray], largest_loss: float, interval: float) -> LossDistribution:
    """Return the loss distribution of a mirror symmetric pair, given its divergence at thresholds >= 0."""
    highest = math.ceil(largest_loss / interval) + 1
    # The divergence takes most of the time, and its excess at -epsilon follows from that at epsilon (`_excess`).
    above = divergence(_grid(interval, 0, highest + 1))
    below = np.exp(_grid(interval, -highest, highest)) * above[:0:-1]
    return symmetric(connected(interval, -highest, np.concatenate([below, above]) * (1 + 4 * UNIT)))


def _removing(base: WorstPair, epsilons: FloatArray, rate: float) -> FloatArray:
    """Return the excess, as defined in :func:`_excess`, for removing a record from a Poisson sample of ``rate``.

    It is the rate times the excess of ``base`` at the threshold ln((e^epsilon - 1 + rate) / rate).
    """
    # ln of (e^epsilon - 1 + rate) / rate, with its digits kept near epsilon 0, and far from it without an overflow.
    ratio = np.expm1(np.minimum(epsilons, 1.0)) / rate
    inside = ratio > -1
    far = epsilons - math.log(rate) + np.log1p((rate - 1) * np.exp(-np.maximum(epsilons, 1.0)))
    at = np.where(epsilons < 1, np.log1p(np.where(inside, ratio, 0.0)), far)
    # Up to ln(1 - rate) the mixture exceeds e^epsilon times the other everywhere: there is no excess.
    return np.where(inside, rate * _excess(base.divergence, at) * (1 + 4 * UNIT), 0.0)


def _replacing(noise_multiplier: float, rate: float, interval: float) -> LossDistribution:
    """Return the loss distribution of one Gaussian sum over a Poisson sample in which one record is replaced by another
    that adds the opposite vector.

    The pair is (1 - r) N(0, s^2) + r N(1, s^2) against its mirror image, as in dp_accounting. The loss is eps at the
    output x = s^2 (eps / 2 + asinh(a sinh(eps / 2))), with a = (1 - r) / r e^(1 / (2 s^2)).
    """
    variance = noise_multiplier**2
    log_in, log_out = math.log(rate), math.log1p(-rate) if rate < 1 else -math.inf

    def divergence(epsilons: FloatArray) -> FloatArray:
        half = epsilons / 2
        with np.errstate(divide="ignore"):
            # asinh(e^y) in log space, as each factor may overflow.
            log_sinh = log_out - log_in + 1 / (2 * variance) + half + np.log(-np.expm1(-2 * half) / 2)
        output = variance * (half + np.logaddexp(log_sinh, np.logaddexp(0.0, 2 * log_sinh) / 2))
        log_seen, log_mirrored = (
            np.logaddexp(
                log_out + scipy.special.log_ndtr(-output / noise_multiplier),
                log_in + scipy.special.log_ndtr((move - output) / noise_multiplier),
            )
            for move in (1, -1)
        )
        seen, mirrored = np.exp(log_seen), np.exp(epsilons + log_mirrored)
        return seen - mirrored + _rounding(seen + mirrored, (output + 1) / noise_multiplier, epsilons)

    # The loss at the largest output with a mass that matters.
    most = 1 + _MOST_DEVIATIONS * noise_multiplier
    against, for_it = (np.logaddexp(log_out, log_in + (2 * move * most - 1) / (2 * variance)) for move in (-1, 1))
    return _mirrored(divergence, for_it - against, interval)
