"""What it costs when records vote themselves, with exact discrete Gaussian noise on whole numbers.

Three releases. A **table of counts** to which every record adds one vote, in one cell: a record moves one count by one.
A **table of sums** to which it adds a vector of whole numbers, whose L2 norm is bounded. And the counts of the
**nearest neighbours** of a query in a fresh Poisson sample of the records (Private-kNN: Zhu, Yu, Chandraker and Wang,
CVPR 2020): a sampled record that is near enters, the farthest leaves, and two counts move by one each; the largest
count, which a confidence check may look at first, moves by at most one.

Noise on the integers is not continuous noise, so each pair of output distributions is taken as it is. With u the noise
of a count, the loss of a move by one is (1 + 2 u) / (2 s^2); that of two moves, up and down, depends on the difference
d of the two noises alone: it is (d + 1) / s^2. Added to the check's it lies on two lattices. Fewer moves are a marginal
of more.

A vector's loss is a sum over as many lattices as it has lengths, and is bounded instead by a continuous Gaussian's.
Noise N_Z(0, s^2) is, up to a factor, what is left of N(0, s^2 - t^2) when every coordinate x is replaced by an integer
k with probability in proportion to exp(-(k - x)^2 / (2 t^2)): that product of densities integrates to a multiple of
exp(-k^2 / (2 s^2)), and the sum that it is divided by depends on x by 2 exp(-2 pi^2 t^2) of itself at most (Poisson
summation), at t = 3 by 1e-77 per coordinate, far below what a float resolves. Replacing reads the noisy sum alone, so
it is post-processing, of a Gaussian release of multiplier sqrt(s^2 - t^2) / norm.

Sampling is applied to the pair (:func:`fairpate.privacy.divergences.on_poisson_sample`), which bounds any sample
of the other records by joint convexity. Renyi curves need no table: those of discrete Gaussians never exceed the
continuous ones (Canonne, Kamath and Steinke 2020, arXiv 2004.00010, Proposition 5).

Relation: add or remove one record, or one person who adds no more than that. Not known here: who is near, what the
counts are used for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fairpate.privacy import subsampled
from fairpate.privacy.accountant import event_pld, event_rdp
from fairpate.privacy.discrete_gaussian_tails import log_difference_masses, log_masses
from fairpate.privacy.divergences import gaussians, on_poisson_sample, poisson_gaussians
from fairpate.privacy.loss_distributions import UNIT, LossDistribution, add_split, nothing, repeated
from fairpate.types import Relation, Unit

FloatArray = npt.NDArray[np.float64]
_LOG_NO_MASS = math.log(1e-33)
_ROUNDING = 3.0  # t above
_MOST_ATOMS, _MOST_STEPS = 2**20, 2**13


@dataclass(frozen=True, kw_only=True)
class _RecordsVote:
    """``count`` releases, each of a fresh Poisson sample of the units: records or persons."""

    unit: Unit = "record"
    relation: ClassVar[Relation] = "add or remove one"
    data_dependent: ClassVar[bool] = False
    count: int
    noise_stddev_votes: float
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        if self.count < 0 or not self.noise_stddev_votes >= 0 or not 0 < self.sampling_rate <= 1:
            raise ValueError(
                "Expected count >= 0, noise_stddev_votes >= 0 and 0 < sampling_rate <= 1, got "
                f"{self.count}, {self.noise_stddev_votes} and {self.sampling_rate}."
            )


@dataclass(frozen=True, kw_only=True)
class VoteTables(_RecordsVote):
    """``count`` tables with noise on every cell, empty ones too; a unit adds one vote, to one cell of each."""

    noun: ClassVar[str] = "noisy table of votes"


@dataclass(frozen=True, kw_only=True)
class VoteSums(_RecordsVote):
    """``count`` tables of sums with noise on every cell; a unit adds whole numbers of L2 norm at most ``norm``."""

    noun: ClassVar[str] = "noisy table of weighted votes"
    norm: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm < 1:
            raise ValueError(f"Expected norm >= 1, got {self.norm}.")


@dataclass(frozen=True, kw_only=True)
class NeighbourVotes(_RecordsVote):
    """``count`` queries, each answered by the nearest of a sample of its own, a unit once: all noisy counts, or less.

    ``threshold_stddev_votes``: noise of a check on the largest count of the same sample; None: no check.
    """

    noun: ClassVar[str] = "noisy vote of nearest records"
    threshold_stddev_votes: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold_stddev_votes is not None and not self.threshold_stddev_votes >= 0:
            raise ValueError(f"Expected threshold_stddev_votes >= 0, got {self.threshold_stddev_votes}.")


@dataclass(frozen=True, kw_only=True, eq=False)
class AtomicLoss:
    """A privacy loss with countably many values: ``losses``, ascending, with their masses under the moved output."""

    losses: FloatArray
    log_masses: FloatArray

    @property
    def largest_loss(self) -> float:
        """Beyond it there is no mass to speak of."""
        mass_from, _ = self._tails
        return float(self.losses[np.searchsorted(-mass_from[:-1], -_LOG_NO_MASS) - 1])

    def divergence(self, epsilons: FloatArray) -> FloatArray:
        """The hockey-stick divergence at thresholds of any sign: masses above, less what the other distribution has."""
        first = np.searchsorted(self.losses, epsilons, side="right")
        moved, unmoved = self._tails
        with np.errstate(divide="ignore"):
            # As a share of the moved tail, in log space: the difference of two tiny tails would cancel.
            share = -np.expm1(np.minimum(epsilons + unmoved[first] - moved[first], 0.0))
        # Each of the sums rounds, by some units in the last place of a logarithm.
        share += 8 * UNIT * len(self.losses) * (1 + np.abs(moved[first]))
        total: FloatArray = np.where(first < len(self.losses), np.exp(moved[first]) * np.minimum(share, 1.0), 0.0)
        return total

    @cached_property
    def _tails(self) -> tuple[FloatArray, FloatArray]:
        """ln of the mass from each loss on, moved and unmoved; the last entry, past all of them, stands for none."""
        # From the right and in log space: what decides a small delta are the smallest masses.
        moved = np.logaddexp.accumulate(self.log_masses[::-1])[::-1]
        unmoved = np.logaddexp.accumulate((self.log_masses - self.losses)[::-1])[::-1]
        return np.append(moved, 0.0), np.append(unmoved, 0.0)


@lru_cache(maxsize=16)
def one_count_moves(noise_stddev_votes: float) -> AtomicLoss:
    """One count rises by one: N_Z(1, s^2) against N_Z(0, s^2)."""
    noise, log_mass = log_masses(noise_stddev_votes)
    # ln of the density ratio at output 1 + n: ((1 + n)^2 - n^2) / (2 s^2).
    return AtomicLoss(losses=(1 + 2 * noise) / (2 * noise_stddev_votes**2), log_masses=log_mass)


@lru_cache(maxsize=16)
def two_counts_move(noise_stddev_votes: float) -> AtomicLoss:
    """One count rises by one and another falls by one, each with noise of its own."""
    difference, log_mass = log_difference_masses(noise_stddev_votes)
    # The losses of both counts added, (1 + 2 n) / (2 s^2) and (1 - 2 n') / (2 s^2), with d = n - n'.
    return AtomicLoss(losses=(difference + 1) / noise_stddev_votes**2, log_masses=log_mass)


# Keyed by identity: the arguments come out of the caches above, where equal noises are one object.
@lru_cache(maxsize=4)
def both(first: AtomicLoss, second: AtomicLoss) -> AtomicLoss:
    """Two independent releases of the same records; with much noise, their losses rounded up to a grid."""
    if len(first.losses) * len(second.losses) > _MOST_ATOMS:
        return _both_on_grid(first, second)
    losses = np.add.outer(first.losses, second.losses).ravel()
    order = np.argsort(losses)
    masses = np.add.outer(first.log_masses, second.log_masses).ravel()
    return AtomicLoss(losses=losses[order], log_masses=masses[order])


def _both_on_grid(first: AtomicLoss, second: AtomicLoss) -> AtomicLoss:
    """The same with every loss split between two points of a grid: a pair that dominates, on a sample too."""
    step = (max(first.losses[-1], second.losses[-1]) - min(first.losses[0], second.losses[0])) / _MOST_STEPS
    lowest, masses = 0, np.ones(1)
    for part in (first, second):
        start, end = math.floor(part.losses[0] / step), math.floor(part.losses[-1] / step) + 1
        own = np.zeros(end - start + 1)
        add_split(own, part.losses, np.exp(part.log_masses), interval=step, lowest=start)
        # Sum by sum and not by a transform: the smallest masses keep their digits.
        lowest, masses = lowest + start, np.convolve(masses, own)
    kept = masses > 0
    losses = step * (lowest + np.arange(len(masses)))
    return AtomicLoss(losses=losses[kept], log_masses=np.log(masses[kept]))


@event_rdp.register
def _(event: VoteTables, orders_A: FloatArray) -> FloatArray:
    return _repeated_rdp(event, 1 / event.noise_stddev_votes**2 if event.noise_stddev_votes else math.inf, orders_A)


@event_rdp.register
def _(event: VoteSums, orders_A: FloatArray) -> FloatArray:
    stddev = event.noise_stddev_votes
    return _repeated_rdp(event, (event.norm / stddev) ** 2 if stddev else math.inf, orders_A)


@event_rdp.register
def _(event: NeighbourVotes, orders_A: FloatArray) -> FloatArray:
    return _repeated_rdp(event, _precision(event), orders_A)


@event_pld.register
def _(event: VoteTables, interval: float) -> LossDistribution | None:
    if not event.count:
        return nothing(interval)
    if not event.noise_stddev_votes:
        return None
    pair = one_count_moves(event.noise_stddev_votes)
    return repeated(on_poisson_sample(pair, sampling_rate=event.sampling_rate, interval=interval), event.count)


@event_pld.register
def _(event: VoteSums, interval: float) -> LossDistribution | None:
    if not event.count:
        return nothing(interval)
    if event.noise_stddev_votes <= _ROUNDING:
        return None
    multiplier = math.sqrt(event.noise_stddev_votes**2 - _ROUNDING**2) / event.norm
    if event.sampling_rate == 1:
        return gaussians(event.count, multiplier, interval=interval)
    return poisson_gaussians(event.count, multiplier, sampling_rate=event.sampling_rate, interval=interval)


@event_pld.register
def _(event: NeighbourVotes, interval: float) -> LossDistribution | None:
    if not event.count:
        return nothing(interval)
    if not math.isfinite(_precision(event)):
        return None
    pair = two_counts_move(event.noise_stddev_votes)
    if event.threshold_stddev_votes is not None:
        pair = both(pair, one_count_moves(event.threshold_stddev_votes))
    return repeated(on_poisson_sample(pair, sampling_rate=event.sampling_rate, interval=interval), event.count)


def _precision(event: NeighbourVotes) -> float:
    """The squared L2 move over the noise's variance, of the counts and the check together."""
    # The counts' noise stands twice, as two of them move.
    stddevs = (event.noise_stddev_votes, event.noise_stddev_votes, event.threshold_stddev_votes)
    return math.fsum(1 / stddev**2 if stddev else math.inf for stddev in stddevs if stddev is not None)


def _repeated_rdp(event: _RecordsVote, precision: float, orders_A: FloatArray) -> FloatArray:
    if not event.count or not math.isfinite(precision):
        return np.full(len(orders_A), math.inf if event.count else 0.0)
    # Continuous curves: those of discrete Gaussians never exceed them.
    return event.count * subsampled.poisson_gaussian_rdp(
        1 / math.sqrt(precision), sampling_rate=event.sampling_rate, orders_A=orders_A
    )
