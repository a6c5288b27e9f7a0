"""Privacy loss distributions on a grid, rounded to the safe side: made from a divergence, composed, and read off.

A mechanism's loss distribution is known where its hockey-stick divergence D is: the masses that have D's values at all
points of the grid, and lie above it between them, are the pessimistic connect-the-dots rule (Doroshenko et al. 2022,
arXiv 2207.04380, Algorithm 1). Losses of independent releases add up, so that their masses are convolved. What a tail
is cut by, at most 1e-15 for each composition, counts as an infinite loss. A transform's rounding moves a divergence by
about 1e-12 after 30,000 steps; masses that it leaves below zero are dropped.

None stands for the loss distribution of what guarantees nothing. Not known here: mechanisms, events, units, who is
protected. Shapes: L losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import scipy

FloatArray = npt.NDArray[np.float64]
DEFAULT_INTERVAL = 1e-4
_TAIL = 1e-15
_MOST_ORDER = 20  # of the moments that bound a tail, over the number of losses
_DIGITS = 40.0  # e^-40 of a mass is nothing beside it


@dataclass(frozen=True, kw_only=True, eq=False)
class Losses:
    """The losses seen by one of two neighbours: ``masses_L[i]`` at (``lowest`` + i) times ``interval``, the rest at
    infinity."""

    interval: float
    lowest: int
    masses_L: FloatArray
    infinite: float = 0.0

    @property
    def values_L(self) -> FloatArray:
        """The finite losses, ascending."""
        return self.interval * np.arange(self.lowest, self.lowest + len(self.masses_L), dtype=np.float64)

    def delta_at(self, epsilon: float) -> float:
        """The hockey-stick divergence at one threshold of any sign."""
        above = self.values_L > epsilon
        return self.infinite - float(np.dot(np.expm1(epsilon - self.values_L[above]), self.masses_L[above]))

    def epsilon_at(self, delta: float) -> float:
        """The least epsilon, from 0 on, at which the divergence is at most ``delta``; ``inf`` where there is none."""
        if self.infinite > delta:
            return math.inf
        # The divergence lies below the mass beyond, and is all but that a few dozen below: no epsilon is farther away.
        beyond_L = self.infinite + _from_above(self.masses_L)
        reached = np.flatnonzero(beyond_L > delta)
        farthest = self.interval * (self.lowest + reached[-1]) if len(reached) else 0.0
        if farthest <= 0:
            return 0.0
        start = max(0, math.floor((farthest - _DIGITS) / self.interval) - self.lowest, -self.lowest)
        ahead_L = self.values_L[start:] - farthest
        beyond_L, moved_L = beyond_L[start:], _from_above(self.masses_L[start:] * np.exp(-ahead_L))
        upto = reached[-1] - start + 1
        above = np.flatnonzero(beyond_L[:upto] - np.exp(ahead_L[:upto]) * moved_L[:upto] > delta)
        # Up to the next loss of the grid, the same masses lie above epsilon: the divergence is solved for it.
        first = min(above[-1] + 1, len(moved_L) - 1) if len(above) else 0
        left = beyond_L[first] - delta
        # All but rounding lies above the loss before; where rounding leaves nothing to solve, the farthest is safe.
        least = farthest + ahead_L[above[-1]] if len(above) else 0.0
        return max(0.0, least, farthest + math.log(left / moved_L[first]) if left > 0 else farthest)

    def repeated(self, count: int) -> Losses:
        """The sum of ``count`` independent losses."""
        if count == 1:
            return self
        first, last = self._all_but_tails(count)
        size = last - first + 1
        # A transform wraps around its length: what lies outside the window falls into it, and is a tail's mass at most.
        length = scipy.fft.next_fast_len(max(size, len(self.masses_L)), real=True)
        masses = _no_mass_below_zero(scipy.fft.irfft(scipy.fft.rfft(self.masses_L, length) ** count, length))
        return replace(
            self,
            lowest=self.lowest * count + first,
            masses_L=np.roll(masses, -first)[:size],
            # Both tails count as infinite, wherever the transform has put their mass.
            infinite=_TAIL - math.expm1(count * math.log1p(-self.infinite)),
        )

    def plus(self, other: Losses) -> Losses:
        """The sum with an independent loss on the same grid."""
        masses = _no_mass_below_zero(scipy.signal.fftconvolve(self.masses_L, other.masses_L))
        # Most of a sum's range is empty. What is cut below is moved up, what is cut above counts as infinite.
        first = int(np.argmax(np.cumsum(masses) > _TAIL / 2))
        last = max(first, len(masses) - 1 - int(np.argmax(np.cumsum(masses[::-1]) > _TAIL / 2)))
        kept = masses[first : last + 1].copy()
        kept[0] += masses[:first].sum()
        either = self.infinite + other.infinite - self.infinite * other.infinite
        return replace(
            self,
            lowest=self.lowest + other.lowest + first,
            masses_L=kept,
            infinite=either + float(masses[last + 1 :].sum()),
        )

    def with_chance(self, share: float) -> Losses:
        """This loss with probability ``share``, else none."""
        lowest, end = min(self.lowest, 0), max(self.lowest + len(self.masses_L), 1)
        masses = np.zeros(end - lowest)
        masses[self.lowest - lowest :][: len(self.masses_L)] = share * self.masses_L
        masses[-lowest] += 1 - share
        return replace(self, lowest=lowest, masses_L=masses, infinite=share * self.infinite)

    def _all_but_tails(self, count: int) -> tuple[int, int]:
        """First and last position of a sum of ``count``, outside of which Chernoff's bound leaves ``_TAIL`` at most."""
        size = len(self.masses_L)
        growth_L = np.exp(np.arange(size) / size)
        first, last = 0, (size - 1) * count
        rising_L, falling_L = self.masses_L, self.masses_L
        for order in range(1, _MOST_ORDER + 1):
            # Moments of the positions, at orders that are multiples of one: a product each, and no exponential.
            rising_L, falling_L = rising_L * growth_L, falling_L / growth_L
            above, below = (
                (count * math.log(moment) + math.log(2 / _TAIL)) * size / order if moment > 0 else math.inf
                for moment in (float(rising_L.sum()), float(falling_L.sum()))
            )
            first, last = max(first, math.floor(-below) if below < math.inf else 0), min(last, math.ceil(above))
        return first, last


@dataclass(frozen=True, kw_only=True, eq=False)
class LossDistribution:
    """The losses when a record is removed and when one is added; the same object where they are mirror images."""

    removing: Losses
    adding: Losses

    def delta_at(self, epsilon: float) -> float:
        """The larger divergence at one threshold of any sign."""
        return max(self.removing.delta_at(epsilon), self.adding.delta_at(epsilon))

    def each(self, done: Callable[[Losses], Losses]) -> LossDistribution:
        """``done`` to both losses, once where they are one."""
        removing = done(self.removing)
        return LossDistribution(removing=removing, adding=removing if self.symmetric else done(self.adding))

    @property
    def symmetric(self) -> bool:
        """Whether adding a record loses what removing it does."""
        return self.adding is self.removing


def symmetric(losses: Losses) -> LossDistribution:
    """A loss distribution whose mirror image is itself."""
    return LossDistribution(removing=losses, adding=losses)


def nothing(interval: float = DEFAULT_INTERVAL) -> LossDistribution:
    """No loss with certainty."""
    return symmetric(Losses(interval=interval, lowest=0, masses_L=np.ones(1)))


def randomised_response(epsilon: float, *, interval: float = DEFAULT_INTERVAL) -> LossDistribution:
    """A bit that is true with odds e^``epsilon`` to 1: two losses, each rounded up."""
    lowest, highest = math.ceil(-epsilon / interval), math.ceil(epsilon / interval)
    masses = np.zeros(highest - lowest + 1)
    masses[0] += scipy.special.expit(-epsilon)
    masses[-1] += scipy.special.expit(epsilon)
    return symmetric(Losses(interval=interval, lowest=lowest, masses_L=masses))


def connected(interval: float, lowest: int, deltas_L: FloatArray) -> Losses:
    """The losses from (``lowest`` times) ``interval`` on, at least two, whose divergences there are ``deltas_L``."""
    # A divergence never rises with epsilon; where rounding lets it, connecting the dots would give negative mass.
    falling_L = np.minimum.accumulate(np.clip(deltas_L, 0.0, 1.0))
    steps = np.diff(falling_L)
    # On the left the first dot is connected with a divergence of 1 at -inf, so that all masses add up to 1.
    masses_L = np.concatenate([[1 - falling_L[0]], steps / math.expm1(-interval)])
    masses_L[:-1] += steps / math.expm1(interval)
    return Losses(interval=interval, lowest=lowest, masses_L=np.maximum(masses_L, 0.0), infinite=float(falling_L[-1]))


def repeated(step: LossDistribution, count: int) -> LossDistribution:
    """``count`` steps, at least one, one after another."""
    return step.each(lambda losses: losses.repeated(count))


def composed(parts: Sequence[LossDistribution | None]) -> LossDistribution | None:
    """All of ``parts``, at least one; each may depend on what those before it released."""
    total = parts[0]
    for part in parts[1:]:
        if total is None or part is None:
            return None
        removing = total.removing.plus(part.removing)
        alike = total.symmetric and part.symmetric
        total = LossDistribution(removing=removing, adding=removing if alike else total.adding.plus(part.adding))
    return total


def mixed_with_nothing(base: LossDistribution, share: float) -> LossDistribution:
    """``base`` with probability ``share``, else nothing happens, and everybody sees which: a bound by convexity."""
    return base.each(lambda losses: losses.with_chance(share))


def epsilon_at(distribution: LossDistribution | None, target_delta: float) -> float:
    """The least epsilon at which the divergence is at most ``target_delta``; ``inf`` where there is none."""
    if distribution is None:
        return math.inf
    return max(distribution.removing.epsilon_at(target_delta), distribution.adding.epsilon_at(target_delta))


def _no_mass_below_zero(masses_L: FloatArray) -> FloatArray:
    """A transform's rounding is as often below zero as above; without the former, a divergence is no smaller."""
    return np.maximum(masses_L, 0.0)


def _from_above(masses_L: FloatArray) -> FloatArray:
    """The sums of each mass and all after it, the smallest first."""
    return np.cumsum(masses_L[::-1])[::-1]
