"""Publish what Confident-GNMax cost on given votes: its Renyi cost at one order, with noise scaled to its stability.

The cost of given votes is as private as the votes. Papernot et al. 2018 (arXiv 1802.08908, Section 5.2 and appendices)
publish it by the smooth sensitivity of Nissim, Raskhodnikova and Smith 2007: a bound on how far one record moves the
cost, for votes up to d records away, discounted by exp(-beta d), scales Gaussian noise. One record touches one teacher
and so moves at most one vote of every query at once; sensitivities are therefore maximised within a query and then
added over queries.

**Which cost.** The sum over queries of threshold bit (Theorem 6 on two outcomes) and noisy argmax (Theorem 6), each
charged for every query submitted: valid by composition, since withholding an argmax that ran is post-processing, and
looser than the joint cost ``gnmax.confident_gnmax_rdp``, which has no known smooth sensitivity. Both are the cost of
queries that were fixed in advance; where later queries were chosen in view of answers the sum is an estimate.

:class:`SanitisedRdp` may be published: an unbiased estimate, no upper bound. Ledgers, deltas of a budget and fairness
are elsewhere. Shapes: Q queries, C classes, A orders, U distinct vote counts, D distances 0 .. number of teachers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import scipy

from fairpate.privacy import gnmax
from fairpate.privacy.accountant import epsilon_of_curve, event_rdp
from fairpate.privacy.discrete_gaussian import NoiseSource, log_difference_survival_table, sample_discrete_gaussian
from fairpate.types import IntArray, MechanismParameters, Relation, Tail, Unit

FloatArray = npt.NDArray[np.float64]

PUBLISHED_DECIMALS = 6


@dataclass(frozen=True, kw_only=True)
class SmoothRelease:
    """Parameters for publishing a cost, chosen before any vote is seen; also the accountant's event of publishing it.

    ``order``: the Renyi order, 1 < order < 1 / (2 beta). ``beta``: discount per record. ``noise_stddev``: noise in
    multiples of the smooth sensitivity. ``scale_noise_stddev``: noise on ln(smooth sensitivity) in multiples of beta;
    ``inf`` does not publish it.
    """

    noun: ClassVar[str] = "release of the data-dependent privacy cost"
    unit: Unit = "record"
    relation: ClassVar[Relation] = "add or remove one"
    data_dependent: ClassVar[bool] = False
    order: float
    beta: float
    noise_stddev: float
    scale_noise_stddev: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"Expected 0 < beta < inf, got {self.beta}.")
        if not 1 < self.order < 1 / (2 * self.beta):
            raise ValueError(
                f"Expected 1 < order < 1 / (2 beta) = {1 / (2 * self.beta):g}, got {self.order}; lower beta."
            )
        if not 0 < self.noise_stddev < math.inf:
            raise ValueError(f"Expected 0 < noise_stddev < inf, got {self.noise_stddev}.")
        if not self.scale_noise_stddev > 0:
            raise ValueError(f"Expected scale_noise_stddev > 0 or inf, got {self.scale_noise_stddev}.")


@event_rdp.register
def release_rdp(release: SmoothRelease, orders_A: npt.ArrayLike) -> FloatArray:
    """The Renyi cost of one release, shape (A,); ``inf`` from order 1 / (1 - exp(-2 beta)) on.

    Noise of stddev s times the smooth sensitivity S is priced by the exact divergence between Gaussians: their centres
    differ by at most S and S', their scales by a factor up to exp(beta). Of all such pairs the costliest has the scale
    fall by exp(beta) and the centre move by the smaller scale. (Theorem 23 of the paper prices it otherwise, and for
    orders near 1 / (2 beta) below that divergence.) The noisy logarithm of the scale, of sensitivity beta, adds its
    Gaussian cost. ValueError for an order <= 1.
    """
    orders = np.asarray(orders_A, dtype=np.float64)
    if not np.all(orders > 1):
        raise ValueError(f"Expected Renyi orders > 1, got {orders_A!r}.")
    # From that order on the Gaussian of the smaller scale has too light a tail: the moment diverges.
    finite_A = orders * -math.expm1(-2 * release.beta) < 1
    # A placeholder with finite logarithms: the result is inf at these orders.
    inner = np.where(finite_A, orders, 1.0)
    shift_A = inner / (2 * release.noise_stddev**2 * (1 - (inner - 1) * math.expm1(2 * release.beta)))
    scale_A = -inner * release.beta - 0.5 * np.log1p(inner * math.expm1(-2 * release.beta))
    known_scale_A = orders / (2 * release.scale_noise_stddev**2)
    return np.where(finite_A, shift_A + scale_A / (orders - 1) + known_scale_A, math.inf)


@dataclass(frozen=True, kw_only=True)
class SanitisedRdp:
    """The publishable cost of votes at ``release.order``. Publishing costs ``release_rdp``, for any value of it.

    ``rdp``: the cost plus noise of mean 0, possibly negative. ``log_scale``: noisy ln of the smooth sensitivity, None
    unless paid for: S itself is private, but ln S moves by at most beta from record to record, and gives an upper
    confidence limit. ``rdp_data_independent``: the same queries' cost for any votes. ``noise``: label of its source.
    Noise starts as an exact discrete Gaussian on a grid of 2^-64 and is scaled in floats, then rounded: sound up to
    rounding, not exact.
    """

    release: SmoothRelease
    rdp: float
    log_scale: float | None
    rdp_data_independent: float
    noise: str

    def upper(self, confidence: float) -> float:
        """A limit that the cost exceeds with probability at most 1 - ``confidence`` over the noise drawn.

        Each of the two noises may fail with half of that. ValueError where the scale was not published.
        """
        if self.log_scale is None:
            raise ValueError("Expected a release with a finite scale_noise_stddev: without it only rdp is known.")
        if not 0 < confidence < 1:
            raise ValueError(f"Expected 0 < confidence < 1, got {confidence}.")
        quantile = float(scipy.special.ndtri((1 + confidence) / 2))
        # Published numbers were rounded; a unit of their grid is added back so that the limit holds for the exact ones.
        rounding = 10.0**-PUBLISHED_DECIMALS
        log_scale = self.log_scale + rounding + quantile * self.release.scale_noise_stddev * self.release.beta
        limit = self.rdp + rounding + quantile * self.release.noise_stddev * math.exp(log_scale)
        return min(max(limit, 0.0), self.rdp_data_independent)

    def epsilon(self, *, target_delta: float, confidence: float | None = None) -> float:
        """The epsilon of queries and release together, by the improved conversion at ``release.order``.

        An estimate, or with ``confidence`` from the limit :meth:`upper`. It speaks of these votes only: the guarantee
        for any votes is the data-independent one, with the release as one more event.
        """
        cost = min(max(self.rdp, 0.0), self.rdp_data_independent) if confidence is None else self.upper(confidence)
        orders = [self.release.order]
        return epsilon_of_curve(cost + release_rdp(self.release, orders), orders, target_delta=target_delta)[0]


FARTHEST_STDDEVS = 40.0  # below q0 and q1: costs vanish in a float before
UNTIL_ROUNDING = 1e-9  # relative changes that rounding explains


@dataclass(frozen=True)
class DistinctVotes:
    """The distinct votes of all queries, each sorted in decreasing order. ``inverse_Q`` maps queries to distinct
    votes."""

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
        # Costs and sensitivities depend on ranked counts alone: queries that differ in class names are priced once.
        ranked_QC = np.sort(votes.astype(np.int64), axis=1)[:, ::-1]
        ranked_UC, inverse_Q, counts_U = np.unique(ranked_QC, axis=0, return_inverse=True, return_counts=True)
        # Some versions of numpy return the inverse of rows with two axes.
        return cls(ranked_UC, counts_U.astype(np.float64), inverse_Q.reshape(-1), int(num_teachers[0]))

    @property
    def num_classes(self) -> int:
        return int(self.ranked_UC.shape[1])


@dataclass(frozen=True)
class ArgmaxCurve:
    """The argmax's cost as a function of ln q, and how one moved vote moves ln q.

    With x the gap between two counts over 2 sigma, one moved vote changes x by at most 1 / sigma, so q by no more than
    :meth:`raised` and :meth:`lowered` (concavity of the receiver operating curve spreads q evenly over classes). Up to
    q0 the cost depends on q, beyond it does not. If the cost rises on (0, q0) and its growth by one vote rises on
    (0, q1), where one vote leads from q1 to q0, then sensitivity rises up to q1, is at most its plateau on [q1, q0] and
    falls beyond: the largest value within d votes is at the votes that come closest to [q1, q0]. Votes come closest by
    moving one after the other from the largest count to the second (q too small), or back (q too large).
    :func:`check_monotonicity` tests the two conditions.
    """

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
        """ln of q0, the smallest q from which on the cost equals the data-independent cost."""
        low, high = float(self.moved(self.log_q_limit, -FARTHEST_STDDEVS)), self.log_q_limit
        # Relative to the logarithm: q0 itself may be too small for a float.
        while high - low > 1e-13 * -high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.rdp(np.array(middle)) < self.data_independent else (low, middle)
        # The upper end: at q0 the cost must be the data-independent one already.
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
        """ln q1: one moved vote leads from q1 to q0. Slightly too small, so that rounding leaves no gap."""
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
        """ln q after all gaps, taken to be equal, shrink by ``by_stddevs`` standard deviations of their noise."""
        log_others = math.log(self.num_classes - 1)
        moved = log_others + scipy.special.log_ndtr(
            scipy.special.ndtri_exp(np.asarray(log_q) - log_others) + by_stddevs
        )
        # A union bound may pass 1.
        return np.minimum(moved, 0.0)

    def raised(self, log_q: FloatArray) -> FloatArray:
        # A moved vote changes a gap by 2 at most, and the difference of two noises has the deviation sqrt(2) sigma.
        return self.moved(log_q, math.sqrt(2) / self.noise_stddev)

    def lowered(self, log_q: FloatArray) -> FloatArray:
        return self.moved(log_q, -math.sqrt(2) / self.noise_stddev)

    def sensitivity(self, log_q: FloatArray) -> FloatArray:
        """The largest change of the cost by one moved vote at q; on [q1, q0] the largest change anywhere."""
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
                # No vote moves any more: all greater distances have the same worst case.
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

    The bound keeps the continuous form in which every step of :class:`ArgmaxCurve` is proved. Gap 0 needs no bound:
    q >= 1/2 there, beyond q0 under either tail.
    """
    if tail == "gaussian":
        return 0.0
    if tail != "discrete":
        raise ValueError(f"Expected tail 'gaussian' or 'discrete', got {tail!r}.")
    quantiles = scipy.special.ndtri_exp(log_difference_survival_table(noise_stddev, num_teachers)[1:])
    offset = float((np.arange(1, num_teachers + 1) + math.sqrt(2) * noise_stddev * quantiles).max())
    return max(offset + UNTIL_ROUNDING, 0.0)


_CHECKED_POINTS = 20_001  # of check_monotonicity, below q0 and q1
_VANISHING = 1e-290  # costs below have no digits left in a float


def sanitised_rdp(
    votes_QC: npt.ArrayLike,
    mechanism: MechanismParameters,
    *,
    release: SmoothRelease,
    source: NoiseSource,
) -> SanitisedRdp:
    """Publish the cost of ``votes_QC``, every row a query submitted, shape (Q, C); record and charge ``release`` first.

    ``source``: the operating system's entropy, or the release is not private. Errors as :func:`smooth_sensitivity`.
    """
    steps, votes = TwoSteps(mechanism, release.order), DistinctVotes.of(votes_QC)
    exact, scale = float(votes.counts_U @ steps.rdp(votes)), steps.smooth(votes, release.beta)
    log_scale = None
    if release.scale_noise_stddev < math.inf:
        spread = release.beta * release.scale_noise_stddev * _normal(source)
        # The scale is 0 for all votes of this many teachers or for none (every distance is covered), and so public.
        log_scale = (math.log(scale) if scale else -math.inf) + spread
    any_votes = gnmax.confident_gnmax_rdp_data_independent(**vars(mechanism), orders_A=[release.order])
    return SanitisedRdp(
        release=release,
        # A second draw: with one draw for both numbers, either would show the other's noise.
        # Rounded to a public grid, coarse compared with the noise's: the last digits of a float sum follow the exact
        # cost, and noise of limited precision does not hide them.
        rdp=round(exact + scale * release.noise_stddev * _normal(source), PUBLISHED_DECIMALS),
        log_scale=None if log_scale is None else round(log_scale, PUBLISHED_DECIMALS),
        rdp_data_independent=float(votes.counts_U.sum() * any_votes[0]),
        noise=source.label,
    )


def smooth_sensitivity(votes_QC: npt.ArrayLike, mechanism: MechanismParameters, *, release: SmoothRelease) -> float:
    """max over d of exp(-beta d) times the summed sensitivity at distance d; as private as the votes.

    ValueError for votes that are not whole numbers >= 0 of as many teachers in every query, for fewer than two classes,
    for noise or a threshold that ``gnmax`` refuses, and where :func:`check_monotonicity` fails.
    """
    return TwoSteps(mechanism, release.order).smooth(DistinctVotes.of(votes_QC), release.beta)


@lru_cache(maxsize=64)
def check_monotonicity(*, noise_stddev_votes: float, num_classes: int, order: float) -> None:
    """Raise ValueError unless the argmax's cost rises with q up to q0, and its growth by one vote up to q1.

    Tested on a fine grid, down to where the cost vanishes in a float. Independent of votes, so that the result may
    decide whether to publish.
    """
    if num_classes < 2:
        raise ValueError(f"Expected at least 2 classes, got {num_classes}: one class is always the answer, for free.")
    # Offset 0: the conditions are about q, and the tail decides only which q votes have.
    curve = ArgmaxCurve(noise_stddev_votes, num_classes, order, 0.0)
    below = np.linspace(-FARTHEST_STDDEVS, 0, _CHECKED_POINTS)
    cost = curve.rdp(curve.moved(curve.log_q_limit, below))
    log_q = curve.moved(curve.log_q1, below)
    growth = curve.rdp(curve.raised(log_q)) - curve.rdp(log_q)
    for what, values, end in (("cost", cost, "q0"), ("growth of the cost by one vote", growth, "q1")):
        if np.any(np.diff(values) < -UNTIL_ROUNDING * values[1:] - _VANISHING):
            raise ValueError(
                f"Expected the argmax's {what} to rise with q up to {end}, but at order {order} with "
                f"noise_stddev_votes {noise_stddev_votes} and {num_classes} classes it falls: "
                "publish at a lower order, or raise noise_stddev_votes."
            )


@dataclass(frozen=True)
class TwoSteps:
    """The costs of threshold check and argmax of a query at one order, priced separately, with their sensitivities by
    distinct query and distance, (U, D). An infinite threshold makes the check free."""

    mechanism: MechanismParameters
    order: float
    tail: Tail = "discrete"

    def rdp(self, votes: DistinctVotes) -> FloatArray:
        """The cost of both steps, (U,); private."""
        bit_U = self._bit(votes.ranked_UC)
        if self.mechanism.threshold == math.inf:
            # Nothing is ever answered: no argmax runs.
            return bit_U
        curve = ArgmaxCurve.of(votes, self.mechanism.noise_stddev_votes, self.order, self.tail)
        total_U: FloatArray = bit_U + curve.rdp(curve.log_q(gaps_of(votes)))
        return total_U

    def argmax_sensitivity(self, votes: DistinctVotes) -> FloatArray:
        """The largest change of the argmax's cost by one moved vote, among votes at most d moves away; private."""
        noise = self.mechanism.noise_stddev_votes
        check_monotonicity(noise_stddev_votes=noise, num_classes=votes.num_classes, order=self.order)
        curve = ArgmaxCurve.of(votes, noise, self.order, self.tail)
        return curve.sensitivity(curve.closest(votes))

    def threshold_sensitivity(self, votes: DistinctVotes) -> FloatArray:
        """The largest change of the check's cost by one moved vote, among counts at most d votes away; private."""
        # The possible largest counts: from an even split of the votes to unanimity.
        least = -(-votes.num_teachers // votes.num_classes)
        # The largest count may move by one in either direction: the larger of the two changes counts.
        step = np.abs(np.diff(self._bit(np.arange(least, votes.num_teachers + 1)[:, None])))
        change_V = np.maximum(np.append(0.0, step), np.append(step, 0.0))
        largest_W, inverse_U = np.unique(votes.ranked_UC[:, 0], return_inverse=True)
        distance_D, within_WD = np.arange(votes.num_teachers + 1), []
        for centre in (largest_W - least).tolist():
            # The largest change at most d counts below or above.
            below, above = np.maximum.accumulate(change_V[centre::-1]), np.maximum.accumulate(change_V[centre:])
            sides = [side[np.minimum(distance_D, len(side) - 1)] for side in (below, above)]
            within_WD.append(np.maximum(*sides))
        return np.stack(within_WD)[inverse_U]

    def smooth(self, votes: DistinctVotes, beta: float) -> float:
        """:func:`smooth_sensitivity` of grouped votes."""
        change_UD = self.threshold_sensitivity(votes)
        if self.mechanism.threshold < math.inf:
            change_UD = change_UD + self.argmax_sensitivity(votes)
        # Up to d away, and within a query before queries are added: one record moves all of them at once.
        total_D = votes.counts_U @ np.maximum.accumulate(change_UD, axis=1)
        # Beyond the number of teachers no vote is left to move, and the discount only grows.
        return float(np.max(np.exp(-beta * np.arange(len(total_D))) * total_D))

    def _bit(self, counts_UC: IntArray) -> FloatArray:
        """The cost of the threshold check, (U,)."""
        return gnmax.threshold_rdp(
            counts_UC,
            threshold=self.mechanism.threshold,
            threshold_stddev_votes=self.mechanism.threshold_stddev_votes,
            orders_A=[self.order],
            tail=self.tail,
        )[:, 0]


def _normal(source: NoiseSource) -> float:
    # A lattice of 2^-64: no float that rounds decides the draw itself.
    return sample_discrete_gaussian(2**64, source) / 2**64
