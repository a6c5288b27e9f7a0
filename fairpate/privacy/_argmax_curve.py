"""The argmax's cost as a function of ln q, and how one moved vote moves ln q: part of ``smooth_sensitivity``.

Not known here: the threshold, smoothing, releases. Shapes: Q queries, C classes, U distinct vote counts, D distances
0 .. number of teachers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import scipy

from fairpate.privacy import gnmax
from fairpate.privacy.discrete_gaussian_tails import log_difference_survival_table
from fairpate.types import IntArray, Tail

FloatArray = npt.NDArray[np.float64]

FARTHEST_STDDEVS = 40.0  # below q0 and q1: costs vanish in a float before
UNTIL_ROUNDING = 1e-9  # relative changes that rounding explains
_BLOCK_ENTRIES = 2**20


@dataclass(frozen=True)
class DistinctVotes:
    """Vote counts in decreasing order, once each; ``inverse_Q`` leads back to the queries."""

    ranked_UC: IntArray
    counts_U: FloatArray
    inverse_Q: IntArray
    num_teachers: int

    @classmethod
    def of(cls, votes_QC: npt.ArrayLike) -> DistinctVotes:
        votes = np.asarray(votes_QC)
        if votes.ndim != 2 or not votes.shape[0] or votes.shape[1] < 2:
            raise ValueError(f"Expected votes of shape (queries >= 1, classes >= 2), got {votes.shape}.")
        if votes.dtype.kind not in "iuf" or not np.all((votes >= 0) & (votes == np.floor(votes))):
            raise ValueError("Expected votes to be whole numbers >= 0; count whole teachers per class.")
        num_teachers = np.unique(votes.sum(axis=1))
        if len(num_teachers) > 1 or not 1 <= num_teachers[0] < math.inf:
            raise ValueError(
                f"Expected every query to hold one vote of each teacher, got sums {num_teachers[:3].tolist()}; "
                "leave out queries that lost teachers, and price them for any votes."
            )
        ranked_QC = np.sort(votes.astype(np.int64), axis=1)[:, ::-1]
        ranked_UC, inverse_Q, counts_U = np.unique(ranked_QC, axis=0, return_inverse=True, return_counts=True)
        return cls(ranked_UC, counts_U.astype(np.float64), inverse_Q.reshape(-1), int(num_teachers[0]))

    @property
    def num_classes(self) -> int:
        return int(self.ranked_UC.shape[1])

    def blocks(self) -> Iterator[DistinctVotes]:
        """Few enough votes at a time for their sensitivities at every distance to fit in memory."""
        rows = max(1, _BLOCK_ENTRIES // (self.num_teachers + 1))
        for first in range(0, len(self.ranked_UC), rows):
            part = slice(first, first + rows)
            yield replace(self, ranked_UC=self.ranked_UC[part], counts_U=self.counts_U[part])


@dataclass(frozen=True)
class ArgmaxCurve:
    """The argmax's cost as a function of ln q, and how one moved vote moves ln q."""

    noise_stddev: float
    num_classes: int
    order: float
    offset_votes: float  # of the continuous tail that bounds the tail of the noise drawn

    def __post_init__(self) -> None:
        if not 0 < self.noise_stddev < math.inf:
            raise ValueError(f"Expected 0 < noise_stddev_votes < inf, got {self.noise_stddev}.")

    @classmethod
    def of(cls, votes: DistinctVotes, noise_stddev: float, order: float, tail: Tail) -> ArgmaxCurve:
        return cls(noise_stddev, votes.num_classes, order, _tail_offset(noise_stddev, votes.num_teachers, tail))

    @property
    def data_independent(self) -> float:
        return self.order / self.noise_stddev**2

    @cached_property
    def log_q0(self) -> float:
        """ln of the least q whose cost is the data-independent one, as is then all that is above."""
        low, high = float(self.moved(self.log_q_limit, -FARTHEST_STDDEVS)), self.log_q_limit
        # Relative to the logarithm: q0 itself may be too small for a float.
        while high - low > 1e-13 * -high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.rdp(np.array(middle)) < self.data_independent else (low, middle)
        # From above: at q0 the cost must be the data-independent one already.
        return high

    @property
    def log_q_limit(self) -> float:
        """ln of the q above which the data-independent cost is charged in any case, as the paper's code does.

        With m = sigma sqrt(-ln q) Theorem 6 asks for m > max(1, order - 1) and ln((m + 1) / (m - 1)) <= (2 m - 1) /
        sigma^2. From m = sigma + 1 on that holds, since the left side is at most 2 / (m - 1).
        """
        return -((max(self.noise_stddev + 1, self.order - 1) / self.noise_stddev) ** 2)

    @cached_property
    def log_q1(self) -> float:
        """ln of the q from which one vote leads to q0, a little less lest rounding leave a gap."""
        return float(self.lowered(np.array(self.log_q0))) * (1 + 1e-12)

    def log_q(self, gaps: FloatArray) -> FloatArray:
        """ln q of rows of gaps between the largest count and the others."""
        log_tails = scipy.special.log_ndtr((self.offset_votes - gaps) / (math.sqrt(2) * self.noise_stddev))
        bound: FloatArray = np.minimum(np.logaddexp.reduce(log_tails, axis=1), math.log1p(-1 / self.num_classes))
        return bound

    def rdp(self, log_q: FloatArray) -> FloatArray:
        flat = gnmax.gnmax_rdp(log_q.ravel(), noise_stddev_votes=self.noise_stddev, orders_A=[self.order])
        return np.where(log_q < self.log_q_limit, flat[:, 0].reshape(log_q.shape), self.data_independent)

    def moved(self, log_q: float | FloatArray, by_stddevs: float | FloatArray) -> FloatArray:
        """ln q after every gap, taken as equal, shrank by that many standard deviations of its noise."""
        log_others = math.log(self.num_classes - 1)
        moved = log_others + scipy.special.log_ndtr(
            scipy.special.ndtri_exp(np.asarray(log_q) - log_others) + by_stddevs
        )
        # A union bound may pass 1.
        return np.minimum(moved, 0.0)

    def raised(self, log_q: FloatArray) -> FloatArray:
        return self.moved(log_q, math.sqrt(2) / self.noise_stddev)

    def lowered(self, log_q: FloatArray) -> FloatArray:
        return self.moved(log_q, -math.sqrt(2) / self.noise_stddev)

    def sensitivity(self, log_q: FloatArray) -> FloatArray:
        """The most one vote changes the cost at q, or on [q1, q0] the most it changes anywhere."""
        at = np.where((log_q >= self.log_q1) & (log_q <= self.log_q0), self.log_q1, log_q)
        cost = self.rdp(at)
        either = np.maximum(self.rdp(self.raised(at)) - cost, cost - self.rdp(self.lowered(at)))
        # One vote from just above q1 leads past q0, where the cost may jump.
        return np.where(at == self.log_q1, self.data_independent - cost, either)

    def closest(self, votes: DistinctVotes) -> FloatArray:
        """ln q of the votes up to d moves away that come closest to [q1, q0], shape (U, D)."""
        gaps = gaps_of(votes)
        at_U = self.log_q(gaps)
        widen_U = at_U > self.log_q0
        log_q_DU = np.empty((votes.num_teachers + 1, len(at_U)))
        for distance in range(votes.num_teachers + 1):
            log_q_DU[distance] = at_U
            # A gap of all teachers is unanimity: no vote is left to move.
            can_widen_U = (at_U > self.log_q0) & (gaps.min(axis=1) < votes.num_teachers)
            rows = np.flatnonzero(np.where(widen_U, can_widen_U, at_U < self.log_q1))
            if not len(rows):
                log_q_DU[distance:] = at_U
                break
            step = np.where(widen_U[rows], 1.0, -1.0)
            second = gaps[rows].argmin(axis=1)
            # A vote from one of the two largest counts to the other changes their gap by 2, and every other gap by 1.
            gaps[rows] += step[:, None]
            gaps[rows, second] += step
            moved = self.log_q(gaps[rows])
            arrived = np.where(step > 0, moved <= self.log_q0, moved >= self.log_q1)
            # Within [q1, q0] the sensitivity is that at q1, the largest there is: the walk may end there.
            at_U[rows] = np.where(arrived, self.log_q1, moved)
        return log_q_DU.T


def gaps_of(votes: DistinctVotes) -> FloatArray:
    gaps: FloatArray = (votes.ranked_UC[:, :1] - votes.ranked_UC[:, 1:]).astype(np.float64)
    return gaps


@lru_cache(maxsize=64)
def _tail_offset(noise_stddev: float, num_teachers: int, tail: Tail) -> float:
    """The least shift in votes, about 1/2, by which a continuous tail bounds the discrete one at every gap >= 1.

    Gap 0 needs no bound: q >= 1/2 there, beyond q0 under either tail.
    """
    if tail == "gaussian":
        return 0.0
    if tail != "discrete":
        raise ValueError(f"Expected tail 'gaussian' or 'discrete', got {tail!r}.")
    quantiles = scipy.special.ndtri_exp(log_difference_survival_table(noise_stddev, num_teachers)[1:])
    offset = float((np.arange(1, num_teachers + 1) + math.sqrt(2) * noise_stddev * quantiles).max())
    return max(offset + UNTIL_ROUNDING, 0.0)
