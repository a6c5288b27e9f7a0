"""Events of single mechanisms and their privacy costs; functions that store, read, merge and convert events.

This module registers Renyi curves and loss distributions with :mod:`fairpate.privacy.accountant`: for steps of
training, and for tables of the records' own votes, which have exact discrete Gaussian noise on whole numbers.

The pairs of output distributions under discrete noise are computed from their definition. Let u be the noise of a count
with standard deviation s. If one unit raises the count by one, the privacy loss is (1 + 2 u) / (2 s^2). If it raises
one count and lowers another, the loss is (d + 1) / s^2, where d is the difference of the two noises. A threshold check
on the same sample adds a loss on a second lattice. A change of one count is a marginal of a change of two. Sampling is
applied to the pair (:func:`fairpate.privacy.on_poisson_sample`), which bounds any sample of the
other records by joint convexity. Renyi curves of discrete Gaussians never exceed the continuous ones, which are used
(Canonne, Kamath and Steinke 2020, arXiv 2004.00010, Proposition 5).

**The best of a secret random number of private trials** and what its publication costs: Papernot and Steinke 2022,
"Hyperparameter Tuning with Renyi Differential Privacy" (arXiv 2110.03620, ICLR 2022), Theorem 2. K is drawn from a
truncated negative binomial law with parameters eta > -1 and 0 < gamma < 1,

    P[K = k]  is in proportion to  (1 - gamma)^k (eta (eta + 1) ... (eta + k - 1)) / k!,      k >= 1

where eta = 0 is the logarithmic law (1 - gamma)^k / k, and eta = 1 the geometric one. K independent trials of one
mechanism, each private together with its score, are run, and the best alone is published. If a trial has the Renyi
curve R, publication has, for every order b >= 1,

    R'(a) = R(a) + (1 + eta) ((1 - 1/b) R(b) + ln(1/gamma) / b) + ln E[K] / (a - 1)

A trial draws its settings at random, with replacement, from a list that was fixed beforehand. Its divergence at any
order is at most the largest of the list. This cost holds only if K and the trials that were not chosen stay secret.

**Publishing a data-dependent cost.** The cost of Confident-GNMax on given votes reveals something of the votes.
Papernot et al. 2018 (arXiv 1802.08908, Section 5.2 and appendices) publish its Renyi cost at one order with Gaussian
noise in proportion to its smooth sensitivity (Nissim, Raskhodnikova and Smith 2007): a bound on how far one record
moves the cost, for votes up to d records away, discounted by exp(-beta d). One record moves at most one vote of every
query at once, so sensitivities are maximised within a query and then added over queries. The cost is the sum over
queries of threshold bit and noisy argmax (Theorem 6), each charged for every query submitted. It is above the joint
cost ``gnmax.confident_gnmax_rdp``, which has no known smooth sensitivity. Both hold for queries that were fixed in
advance; where later queries depended on earlier answers they are estimates.

Shapes: A orders, B orders b, Q queries, C classes, U distinct vote histograms, D numbers of moved votes.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import scipy

from fairpate.privacy import accountant, discrete_gaussian, gnmax, loss_distributions
from fairpate.privacy.accountant import CountedEvent, Event, event_pld, event_rdp
from fairpate.privacy.discrete_gaussian import NoiseSource, require_positive, sample_discrete_gaussian
from fairpate.privacy.loss_distributions import AtomicLoss, LossDistribution, gaussians, on_poisson_sample, repeated
from fairpate.types import FloatArray, IntArray, MechanismParameters, Relation, Tail, Unit, worded

PUBLISHED_DECIMALS = 6


@dataclass(frozen=True, kw_only=True)
class SmoothRelease:
    """The event of publishing a data-dependent cost; its parameters are chosen before any vote is seen.

    ``order``: the Renyi order, 1 < order < 1 / (2 beta). ``beta``: smoothing parameter; the sensitivity at distance d
    is discounted by exp(-beta d). ``noise_stddev``: noise on the cost in multiples of the smooth sensitivity.
    ``scale_noise_stddev``: noise on ln(smooth sensitivity) in multiples of beta; with ``inf`` the smooth sensitivity is
    not published.
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
        require_positive("beta", self.beta)
        if not 1 < self.order < 1 / (2 * self.beta):
            raise ValueError(f"Expected 1 < order < 1 / (2 beta) = {0.5 / self.beta:g}, got {self.order}; lower beta.")
        require_positive("noise_stddev", self.noise_stddev)
        if not self.scale_noise_stddev > 0:
            raise ValueError(f"Expected scale_noise_stddev > 0 (inf is allowed), got {self.scale_noise_stddev}.")


@event_rdp.register
def release_rdp(release: SmoothRelease, orders_A: npt.ArrayLike) -> FloatArray:
    """Return the Renyi cost of publishing one data-dependent cost, shape (A,).

    It is ``inf`` from order 1 / (1 - exp(-2 beta)) on. The noise has the standard deviation s S, where S is the smooth
    sensitivity and s is ``noise_stddev``. Its cost is the largest divergence between two Gaussians, one for each of two
    neighbouring votes: their smooth sensitivities differ by a factor of at most exp(beta), and their means by at most
    the smaller of the two smooth sensitivities. The divergence is largest if both bounds are reached and the second
    Gaussian has the smaller standard deviation. (Theorem 23 of Papernot et al. 2018 states another cost, which is below
    this divergence for orders near 1 / (2 beta).) If ln S is published too, with noise, its Gaussian cost is added; the
    sensitivity of ln S is beta. ValueError for an order <= 1.
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
    """A noisy privacy cost of votes at order ``release.order``, which may be published; :func:`release_rdp` is the cost
    of its publication.

    ``rdp``: the data-dependent cost plus noise of mean 0, possibly negative: an estimate, not an upper bound.
    ``log_scale``: noisy ln of the smooth sensitivity S, from which an upper confidence limit on the cost follows; None
    if it was not published. ``rdp_data_independent``: the cost of the same queries for any votes. ``noise``: label of
    the noise source. The noise is an exact discrete Gaussian on a grid of 2^-64 that is then scaled in floats and
    rounded, so the guarantee holds up to rounding, not exactly.
    """

    release: SmoothRelease
    rdp: float
    log_scale: float | None
    rdp_data_independent: float
    noise: str

    def upper(self, confidence: float) -> float:
        """Return a limit that the cost exceeds with probability at most 1 - ``confidence`` over the noise drawn.

        Half of that probability is for each of the two noises. ValueError if the smooth sensitivity was not published.
        """
        if self.log_scale is None:
            raise ValueError(
                "No upper limit on the privacy cost is known, because the smooth sensitivity was not published; "
                "release with a finite scale_noise_stddev."
            )
        if not 0 < confidence < 1:
            raise ValueError(f"Expected 0 < confidence < 1, got {confidence}.")
        quantile = float(scipy.special.ndtri((1 + confidence) / 2))
        # Published numbers were rounded; a unit of their grid is added back so that the limit holds for the exact ones.
        rounding = 10.0**-PUBLISHED_DECIMALS
        log_scale = self.log_scale + rounding + quantile * self.release.scale_noise_stddev * self.release.beta
        limit = self.rdp + rounding + quantile * self.release.noise_stddev * math.exp(log_scale)
        return min(max(limit, 0.0), self.rdp_data_independent)

    def epsilon(self, *, target_delta: float, confidence: float | None = None) -> float:
        """Return the data-dependent epsilon of the queries together with that of publishing their cost.

        It is computed from the released estimate or, with ``confidence``, from the upper confidence limit
        :meth:`upper`. It holds for these votes only: the guarantee for any votes is the data-independent epsilon, with
        the release as one more event.
        """
        cost = min(max(self.rdp, 0.0), self.rdp_data_independent) if confidence is None else self.upper(confidence)
        orders = [self.release.order]
        curve = cost + release_rdp(self.release, orders)
        return accountant.epsilon_of_curve(curve, orders, target_delta=target_delta).epsilon


_FARTHEST_STDDEVS = 40.0  # below q0 and q1: costs vanish in a float before
_UNTIL_ROUNDING = 1e-9  # relative changes that rounding explains
_CHECKED_POINTS = 20_001  # of the two conditions, below q0 and q1
_VANISHING = 1e-290  # costs below have no digits left in a float


def sanitised_rdp(
    votes_QC: npt.ArrayLike, mechanism: MechanismParameters, *, release: SmoothRelease, source: NoiseSource
) -> SanitisedRdp:
    """Return a noisy, publishable cost of the queries with ``votes_QC``, shape (Q, C): one row per query submitted.

    The caller records and charges ``release`` first. ``source`` must be the operating system's entropy: noise from a
    seed is not private. Errors as :func:`smooth_sensitivity`.
    """
    ranked_UC, counts_U, _ = distinct_votes(votes_QC)
    exact = float(counts_U @ two_step_rdp(ranked_UC, mechanism, order=release.order))
    scale, log_scale = smooth_sensitivity(votes_QC, mechanism, release=release), None
    if release.scale_noise_stddev < math.inf:
        # A lattice of 2^-64: no float that rounds decides the draw itself.
        spread = release.beta * release.scale_noise_stddev * (sample_discrete_gaussian(2**64, source) / 2**64)
        # The scale is 0 for all votes of this many teachers or for none (every distance is covered), and so public.
        log_scale = (math.log(scale) if scale else -math.inf) + spread
    # A second draw: with one draw for both numbers, either would show the other's noise.
    drawn = sample_discrete_gaussian(2**64, source) / 2**64
    any_votes = gnmax.confident_gnmax_rdp_data_independent(**vars(mechanism), orders_A=[release.order])
    return SanitisedRdp(
        release=release,
        # Rounded to a public grid, coarse compared with the noise's: the last digits of a float sum follow the exact
        # cost, and noise of limited precision does not hide them.
        rdp=round(exact + scale * release.noise_stddev * drawn, PUBLISHED_DECIMALS),
        log_scale=None if log_scale is None else round(log_scale, PUBLISHED_DECIMALS),
        rdp_data_independent=float(counts_U.sum() * any_votes[0]),
        noise=source.label,
    )


def smooth_sensitivity(votes_QC: npt.ArrayLike, mechanism: MechanismParameters, *, release: SmoothRelease) -> float:
    """Return the smooth sensitivity of the queries' data-dependent cost; it depends on the votes and is not to be
    published.

    It is the maximum over d, the number of moved votes per query, of exp(-beta d) times the sum over queries of the
    sensitivity at distance d. ValueError for votes that are not whole numbers >= 0 with the same sum in every query,
    for fewer than two classes, for noise or a threshold that ``gnmax`` refuses, and where :func:`sensitive_range`
    fails.
    """
    ranked_UC, counts_U, _ = distinct_votes(votes_QC)
    change_UD = threshold_sensitivity(ranked_UC, mechanism, order=release.order)
    if mechanism.threshold < math.inf:
        change_UD = change_UD + argmax_sensitivity(ranked_UC, mechanism, order=release.order)
    # Up to d away, and within a query before queries are added: one record moves all of them at once.
    total_D = counts_U @ np.maximum.accumulate(change_UD, axis=1)
    # Beyond the number of teachers no vote is left to move, and the discount only grows.
    return float(np.max(np.exp(-release.beta * np.arange(len(total_D))) * total_D))


def distinct_votes(votes_QC: npt.ArrayLike) -> tuple[IntArray, FloatArray, IntArray]:
    """Return the distinct vote histograms (U, C), how many queries have each (U,), and for each query the index of its
    histogram (Q,).

    Counts of a histogram are sorted in decreasing order. Errors as :func:`smooth_sensitivity`.
    """
    votes = gnmax.checked_votes(votes_QC)
    if not len(votes) or votes.shape[1] < 2:
        raise ValueError(f"Expected votes of shape (queries >= 1, classes >= 2), got {votes.shape}.")
    num_teachers = np.unique(votes.sum(axis=1))
    if len(num_teachers) > 1 or num_teachers[0] < 1:
        raise ValueError(
            f"Expected every query to hold one vote of each teacher, got sums {num_teachers[:3].tolist()}; "
            "leave out queries that lost teachers, and charge their data-independent cost."
        )
    # Costs and sensitivities depend on ranked counts alone: queries that differ in class names are priced once.
    ranked_QC = np.sort(votes, axis=1)[:, ::-1]
    ranked_UC, inverse_Q, counts_U = np.unique(ranked_QC, axis=0, return_inverse=True, return_counts=True)
    # Some versions of numpy return the inverse of rows with two axes.
    return ranked_UC, counts_U.astype(np.float64), inverse_Q.reshape(-1)


def two_step_rdp(
    ranked_UC: IntArray, mechanism: MechanismParameters, *, order: float, tail: Tail = "discrete"
) -> FloatArray:
    """Return the Renyi cost at ``order`` of a threshold check plus that of a noisy argmax, for each vote histogram,
    shape (U,); it is not to be published.

    An infinite threshold makes the check free.
    """
    noise = mechanism.noise_stddev_votes
    check = {"threshold": mechanism.threshold, "threshold_stddev_votes": mechanism.threshold_stddev_votes}
    bit_U = gnmax.threshold_rdp(ranked_UC, **check, orders_A=[order], tail=tail)[:, 0]
    if mechanism.threshold == math.inf:
        # Nothing is ever answered: no argmax runs.
        return bit_U
    offset = _tail_offset(noise, int(ranked_UC[0].sum()), tail)
    return bit_U + _argmax_rdp(_argmax_log_q(ranked_UC[:, :1] - ranked_UC[:, 1:], noise, offset), noise, order)


def threshold_sensitivity(
    ranked_UC: IntArray, mechanism: MechanismParameters, *, order: float, tail: Tail = "discrete"
) -> FloatArray:
    """Return the sensitivity of the threshold check's cost at each distance d (number of moved votes), shape (U, D); it
    is not to be published.

    It is the largest change of the cost by one moved vote, over all votes that differ in at most d votes.
    """
    num_teachers = int(ranked_UC[0].sum())
    # The possible largest counts: from an even split of the votes to unanimity.
    least = -(-num_teachers // ranked_UC.shape[1])
    check = {"threshold": mechanism.threshold, "threshold_stddev_votes": mechanism.threshold_stddev_votes}
    largest_V1 = np.arange(least, num_teachers + 1)[:, None]
    bit_V = gnmax.threshold_rdp(largest_V1, **check, orders_A=[order], tail=tail)[:, 0]
    # The largest count may move by one in either direction: the larger of the two changes counts.
    step = np.abs(np.diff(bit_V))
    change_V = np.maximum(np.append(0.0, step), np.append(step, 0.0))
    largest_W, inverse_U = np.unique(ranked_UC[:, 0], return_inverse=True)
    distance_D, within_WD = np.arange(num_teachers + 1), []
    for centre in (largest_W - least).tolist():
        # The largest change at most d counts below or above.
        below, above = np.maximum.accumulate(change_V[centre::-1]), np.maximum.accumulate(change_V[centre:])
        sides = [side[np.minimum(distance_D, len(side) - 1)] for side in (below, above)]
        within_WD.append(np.maximum(*sides))
    return np.stack(within_WD)[inverse_U]


def argmax_sensitivity(
    ranked_UC: IntArray, mechanism: MechanismParameters, *, order: float, tail: Tail = "discrete"
) -> FloatArray:
    """Return the sensitivity of the noisy argmax's cost at each distance d (number of moved votes), shape (U, D); it is
    not to be published.

    It is the largest change of the cost by one moved vote, over all votes that differ in at most d votes. Let q bound
    the probability that the output is not the plurality class, let sigma be the standard deviation of the noise, and
    let x be the gap between two counts over 2 sigma. One moved vote changes x by at most 1 / sigma. It changes q by no
    more than if all gaps were equal and changed by as much, because the receiver operating curve is concave.

    Let q0 be the value beyond which the cost no longer depends on q, and q1 the value from which one moved vote leads
    to q0. :func:`sensitive_range` tests two conditions: the cost rises on (0, q0), and its growth by one vote rises on
    (0, q1). The sensitivity then rises up to q1, is on [q1, q0] at most its value at q1, and falls beyond q0. So the
    largest sensitivity within d votes is at the votes whose q is closest to [q1, q0]. If q is too small, it comes
    closer by moving votes from the largest count to the second; if it is too large, by moving them back.
    """
    noise, num_classes, num_teachers = mechanism.noise_stddev_votes, ranked_UC.shape[1], int(ranked_UC[0].sum())
    log_q1, log_q0 = sensitive_range(noise_stddev_votes=noise, num_classes=num_classes, order=order)
    gaps, offset = ranked_UC[:, :1] - ranked_UC[:, 1:], _tail_offset(noise, num_teachers, tail)
    at_U = _argmax_log_q(gaps, noise, offset)
    widen_U = at_U > log_q0
    log_q_DU = np.empty((num_teachers + 1, len(at_U)))
    for distance in range(num_teachers + 1):
        log_q_DU[distance] = at_U
        # A gap of all teachers is unanimity: no vote is left to move.
        can_widen_U = (at_U > log_q0) & (gaps.min(axis=1) < num_teachers)
        rows = np.flatnonzero(np.where(widen_U, can_widen_U, at_U < log_q1))
        if not len(rows):
            # No vote moves any more: all greater distances have the same worst case.
            log_q_DU[distance:] = at_U
            break
        step = np.where(widen_U[rows], 1, -1)
        second = gaps[rows].argmin(axis=1)
        # A vote from one of the two largest counts to the other changes their gap by 2, and every other gap by 1.
        gaps[rows] += step[:, None]
        gaps[rows, second] += step
        moved = _argmax_log_q(gaps[rows], noise, offset)
        arrived = np.where(step > 0, moved <= log_q0, moved >= log_q1)
        # Within [q1, q0] the sensitivity is that at q1, the largest there is: the walk may end there.
        at_U[rows] = np.where(arrived, log_q1, moved)
    log_q_UD = np.where((log_q_DU >= log_q1) & (log_q_DU <= log_q0), log_q1, log_q_DU).T
    cost_UD, one_vote = _argmax_rdp(log_q_UD, noise, order), math.sqrt(2) / noise
    raised, lowered = (_argmax_rdp(_moved(log_q_UD, move, num_classes), noise, order) for move in (one_vote, -one_vote))
    # One vote from just above q1 leads past q0, where the cost may jump.
    plateau = order / noise**2 - cost_UD
    return np.where(log_q_UD == log_q1, plateau, np.maximum(raised - cost_UD, cost_UD - lowered))


@lru_cache(maxsize=64)
def sensitive_range(*, noise_stddev_votes: float, num_classes: int, order: float) -> tuple[float, float]:
    """Return (ln q1, ln q0), the range of q in which one moved vote changes the cost of the argmax the most.

    From q0 on, the cost equals the data-independent cost; at q1, one moved vote leads to q0. ValueError unless the cost
    rises with q up to q0, and its growth by one vote rises up to q1. Both are tested on a fine grid, down to where the
    cost vanishes in a float. The test does not read votes, so its result may decide whether to publish.
    """
    noise = noise_stddev_votes
    if num_classes < 2:
        raise ValueError(
            f"Expected at least 2 classes, got {num_classes}: one class is always the answer and costs nothing."
        )
    require_positive("noise_stddev_votes", noise)
    log_q0 = limit = _log_q_limit(noise, order)
    low = float(_moved(limit, -_FARTHEST_STDDEVS, num_classes))
    # Relative to the logarithm: q0 itself may be too small for a float. The upper end is kept: at q0 the cost must be
    # the data-independent one already.
    while log_q0 - low > 1e-13 * -log_q0:
        middle = (low + log_q0) / 2
        is_below = _argmax_rdp(np.array(middle), noise, order) < order / noise**2
        low, log_q0 = (middle, log_q0) if is_below else (low, middle)
    # A moved vote changes a gap by 2 at most, and the difference of two noises has the deviation sqrt(2) sigma.
    one_vote = math.sqrt(2) / noise
    # Slightly too small, so that rounding leaves no gap.
    log_q1 = float(_moved(log_q0, -one_vote, num_classes)) * (1 + 1e-12)
    below = np.linspace(-_FARTHEST_STDDEVS, 0, _CHECKED_POINTS)
    cost = _argmax_rdp(_moved(limit, below, num_classes), noise, order)
    log_q = _moved(log_q1, below, num_classes)
    growth = _argmax_rdp(_moved(log_q, one_vote, num_classes), noise, order) - _argmax_rdp(log_q, noise, order)
    for what, values, end in (("cost", cost, "q0"), ("growth of the cost by one vote", growth, "q1")):
        if np.any(np.diff(values) < -_UNTIL_ROUNDING * values[1:] - _VANISHING):
            raise ValueError(
                f"The smooth sensitivity is unknown at order {order} with noise_stddev_votes {noise} and {num_classes} "
                f"classes. It needs a {what} of the noisy argmax that rises with q, a bound on P[not the plurality], "
                f"up to {end}. Publish at a lower order, or raise noise_stddev_votes."
            )
    return log_q1, log_q0


def _moved(log_q: float | FloatArray, by_stddevs: float | FloatArray, num_classes: int) -> FloatArray:
    """Return ln q after all gaps between counts, taken to be equal, have shrunk by ``by_stddevs`` standard deviations
    of their noise."""
    log_others = math.log(num_classes - 1)
    moved = log_others + scipy.special.log_ndtr(scipy.special.ndtri_exp(np.asarray(log_q) - log_others) + by_stddevs)
    # A union bound may pass 1.
    return np.minimum(moved, 0.0)


def _argmax_rdp(log_q: FloatArray, noise_stddev: float, order: float) -> FloatArray:
    flat = gnmax.gnmax_rdp(log_q.ravel(), noise_stddev_votes=noise_stddev, orders_A=[order])
    is_below = log_q < _log_q_limit(noise_stddev, order)
    return np.where(is_below, flat[:, 0].reshape(log_q.shape), order / noise_stddev**2)


def _log_q_limit(noise_stddev: float, order: float) -> float:
    """Return the logarithm of the q above which the data-independent cost is always charged, as the code of Papernot et
    al. 2018 does.

    With m = sigma sqrt(-ln q), Theorem 6 requires m > max(1, order - 1) and ln((m + 1) / (m - 1)) <= (2 m - 1) /
    sigma^2. Both hold from m = max(sigma + 1, order - 1) on, since the left side is at most 2 / (m - 1).
    """
    return -((max(noise_stddev + 1, order - 1) / noise_stddev) ** 2)


def _argmax_log_q(gaps_UC: IntArray, noise_stddev: float, offset_votes: float) -> FloatArray:
    """Return ln q (U,), where q bounds P[the noisy argmax is not the plurality], given the gaps between the largest
    count and every other count."""
    log_tails = scipy.special.log_ndtr((offset_votes - gaps_UC) / (math.sqrt(2) * noise_stddev))
    return np.minimum(np.logaddexp.reduce(log_tails, axis=1), math.log1p(-1 / (gaps_UC.shape[1] + 1)))


@lru_cache(maxsize=64)
def _tail_offset(noise_stddev: float, num_teachers: int, tail: Tail) -> float:
    """Return the number of votes, about 1/2, by which the tail of continuous noise must be shifted to be an upper bound
    on the tail of discrete noise at every gap >= 1 between two counts.

    The bound is continuous because the proof of :func:`argmax_sensitivity` needs a continuous tail. No bound is needed
    at gap 0: there q >= 1/2, and the cost no longer depends on q.
    """
    if tail == "gaussian":
        return 0.0
    if tail != "discrete":
        raise ValueError(f"Expected tail 'gaussian' or 'discrete', got {tail!r}.")
    log_tails = discrete_gaussian.log_survival_table(noise_stddev, num_teachers, of_difference=True)
    quantiles = scipy.special.ndtri_exp(log_tails[1:])
    offset = float((np.arange(1, num_teachers + 1) + math.sqrt(2) * noise_stddev * quantiles).max())
    return max(offset + _UNTIL_ROUNDING, 0.0)


@dataclass(frozen=True, kw_only=True)
class AttributeQueries(accountant.ConfidentGnmaxQueries):
    """Confident-GNMax queries that protect only the sensitive attribute of one training record. They cost as much as
    :class:`ConfidentGnmaxQueries`."""

    unit: Unit = "sensitive attribute"
    relation: ClassVar[Relation] = "replace one"


def of_teachers(event: Event, unit: Unit) -> Event:
    """Return the teachers' ``event`` at the same cost for another ``unit``, since any such unit touches only one
    teacher.

    For the unit "sensitive attribute" the relation becomes "replace one".
    """
    if unit != "sensitive attribute":
        return accountant.of_unit(event, unit)
    if not isinstance(event, accountant.ConfidentGnmaxQueries):
        return event
    return AttributeQueries(**vars(event) | {"unit": unit})


@dataclass(frozen=True, kw_only=True)
class PoissonGaussianLaplaces(CountedEvent):
    """``count`` steps, each a Gaussian sum and a Laplace sum over one fresh Poisson sample of records or persons.

    Because both sums read the same sample, they are composed first and then amplified once.
    ``gradient_noise_multiplier``: standard deviation over the L2 norm that a unit may add to the Gaussian sum;
    ``laplace_scale``: noise scale over the L1 norm that a unit may add to the Laplace sum.
    """

    noun: ClassVar[str] = "step of a Gaussian and a Laplace sum"
    unit: Unit = "record"
    relation: ClassVar[Relation] = "add or remove one"
    count: int
    gradient_noise_multiplier: float
    laplace_scale: float
    sampling_rate: float


@dataclass(frozen=True, kw_only=True)
class AttributeGaussians(CountedEvent):
    """``count`` Gaussian releases that protect one record's sensitive attribute; features and labels count as public.

    ``attribute_noise_multiplier``: standard deviation over the L2 distance that a change of one attribute may make.
    """

    noun: ClassVar[str] = "attribute-level Gaussian sum"
    unit: ClassVar[Unit] = "sensitive attribute"
    relation: ClassVar[Relation] = "replace one"
    count: int
    attribute_noise_multiplier: float


@dataclass(frozen=True, kw_only=True)
class SecretBatchAttributeGaussians(AttributeGaussians):
    """``count`` Gaussian releases, each on a fresh secret Poisson batch, that protect only the records' sensitive
    attributes.

    The rest of a batch is not protected, so an attacker may see whether a record is in the batch. A release therefore
    costs as much as a mixture: a Gaussian release with probability ``sampling_rate``, otherwise nothing (joint
    convexity).
    """

    sampling_rate: float


def joint_multiplier(*multipliers: float) -> float:
    """Return the noise multiplier of one Gaussian release that costs as much as releases with ``multipliers`` on the
    same records; 0 if one of them has no noise."""
    if not all(multiplier > 0 for multiplier in multipliers):
        return 0.0
    # Independent Gaussians on the same records: their precisions add.
    return 1 / math.sqrt(sum(multiplier**-2 for multiplier in multipliers))


@event_rdp.register
def _(event: PoissonGaussianLaplaces, orders_A: FloatArray) -> FloatArray:
    if not event.gradient_noise_multiplier or not event.laplace_scale:
        return np.full(len(orders_A), math.inf)
    return event.count * _step_rdp(replace(event, count=1, unit="record"), tuple(orders_A.tolist()))


# A calibration tries many noises, and each training on as many records calibrates anew.
@lru_cache(maxsize=1024)
def _step_rdp(step: PoissonGaussianLaplaces, orders: tuple[float, ...]) -> FloatArray:
    # One sample serves both sums: their moments multiply first and are amplified once.
    gaussian = accountant.gaussian_log_moments(step.gradient_noise_multiplier)
    laplace = accountant.laplace_log_moments(step.laplace_scale)
    return accountant.poisson_rdp(
        lambda k_K: gaussian(k_K) + laplace(k_K), sampling_rate=step.sampling_rate, orders_A=orders
    )


@event_rdp.register
def _(event: AttributeGaussians, orders_A: FloatArray) -> FloatArray:
    if not event.attribute_noise_multiplier:
        return np.full(len(orders_A), math.inf)
    twice_variance = 2 * event.attribute_noise_multiplier**2
    if not isinstance(event, SecretBatchAttributeGaussians):
        return event.count * orders_A / twice_variance
    # Convexity of the moment: with probability 1 - rate the record is not in the batch, and nothing of it is lost.
    exponent_A = (orders_A - 1) * (orders_A / twice_variance)
    log_in = math.log(event.sampling_rate)
    # math.log1p(-1) is an error and not -inf.
    log_out = math.log1p(-event.sampling_rate) if event.sampling_rate < 1 else -math.inf
    return event.count * np.logaddexp(log_out, log_in + exponent_A) / (orders_A - 1)


@event_pld.register
def _(event: PoissonGaussianLaplaces, interval: float) -> LossDistribution | None:
    if not event.gradient_noise_multiplier or not event.laplace_scale:
        return None
    scales = {"noise_multiplier": event.gradient_noise_multiplier, "laplace_scale": event.laplace_scale}
    base = loss_distributions.GaussianAndLaplace(**scales)
    return repeated(on_poisson_sample(base, sampling_rate=event.sampling_rate, interval=interval), event.count)


@event_pld.register
def _(event: AttributeGaussians, interval: float) -> LossDistribution | None:
    if not isinstance(event, SecretBatchAttributeGaussians):
        return gaussians(event.count, event.attribute_noise_multiplier, interval=interval)
    # One step: each is mixed with nothing before steps are composed.
    inside = gaussians(1, event.attribute_noise_multiplier, interval=interval)
    if inside is None:
        return None
    return repeated(loss_distributions.mixed_with_nothing(inside, event.sampling_rate), event.count)


_ROUNDING = 3.0  # t of `VoteSums`: standard deviation of the rounding to whole numbers
_MOST_ATOMS, _MOST_STEPS = 2**20, 2**13


@dataclass(frozen=True, kw_only=True)
class _RecordsVote(CountedEvent):
    """``count`` releases of votes, each from a fresh Poisson sample of the units (records or persons)."""

    unit: Unit = "record"
    relation: ClassVar[Relation] = "add or remove one"
    count: int
    noise_stddev_votes: float
    sampling_rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class VoteTables(_RecordsVote):
    """``count`` tables of vote counts with noise on every cell, also on empty ones; a unit changes one count by one."""

    noun: ClassVar[str] = "noisy table of votes"


@dataclass(frozen=True, kw_only=True)
class VoteSums(_RecordsVote):
    """``count`` tables of sums with noise on every cell; a unit adds a vector of whole numbers to the sums, of L2 norm
    at most ``norm``.

    The privacy loss of such a vector has no simple lattice, so it is bounded by that of a continuous Gaussian. For any
    t < s, noise N_Z(0, s^2) is, up to a factor, the result of replacing every coordinate x of N(0, s^2 - t^2) by an
    integer k with probability proportional to exp(-(k - x)^2 / (2 t^2)). Integrated over x, the product of both
    densities is a multiple of exp(-k^2 / (2 s^2)). The normaliser depends on x by a relative 2 exp(-2 pi^2 t^2) at most
    (Poisson summation): at t = 3 by 1e-77 per coordinate, far below what a float resolves. The replacement reads the
    noisy sum alone, so it is post-processing of a Gaussian release with the multiplier sqrt(s^2 - t^2) / norm.
    """

    noun: ClassVar[str] = "noisy table of weighted votes"
    norm: float = 1


@dataclass(frozen=True, kw_only=True)
class MomentSums(VoteSums):
    """``count`` noisy symmetric matrices of second moments, each released as its diagonal and the numbers above it.

    A unit adds a symmetric matrix of whole numbers with a Frobenius norm of at most ``norm``. Numbers on the diagonal
    have noise of standard deviation ``noise_stddev_votes``. Numbers above the diagonal have noise of at least this
    standard deviation over sqrt(2), because the Frobenius norm counts them twice. The diagonal and the numbers above
    it, multiplied by sqrt(2), are a vector as in :class:`VoteSums`, and have its cost. The rounding of the numbers
    above the diagonal has variance t^2 / 2, so that the normaliser depends on x by a relative 2 exp(-pi^2 t^2) = 5e-39
    per number.
    """

    noun: ClassVar[str] = "noisy matrix of second moments"


@dataclass(frozen=True, kw_only=True)
class NeighbourVotes(_RecordsVote):
    """``count`` queries, each a noisy count of the labels of the nearest records in a fresh Poisson sample.

    A unit has one vote per query (Private-kNN; Zhu, Yu, Chandraker and Wang, CVPR 2020). A sampled unit that is near
    enough replaces the farthest voter, so that two counts change by one each. The largest count, which a threshold
    check may test first, changes by at most one. ``threshold_stddev_votes``: noise of the threshold check on the
    largest count; None if there is no check.
    """

    noun: ClassVar[str] = "noisy vote of nearest records"
    threshold_stddev_votes: float | None = None


@dataclass(frozen=True, kw_only=True)
class PredictionTables(CountedEvent):
    """``count`` noisy tables of predictions on test records that no other step of the run reads.

    A unit adds whole numbers >= 0 to the cells. They sum to at most ``weight``, and so have an L2 norm of at most
    ``weight``. Under "replace one" they are replaced by other such numbers, for example if a record changes its cell:
    the L2 distance is at most sqrt(2) times ``weight``. The noise on every cell is N_Z(0, s^2) with s = ``weight``
    times ``noise_stddev_records``; its cost is that of :class:`VoteSums`.
    """

    noun: ClassVar[str] = "noisy table of predictions"
    count: int
    noise_stddev_records: float
    weight: int
    unit: Unit = "record"
    relation: Relation = "add or remove one"

    @property
    def noise_stddev_weights(self) -> float:
        """The standard deviation of the noise on each cell, in the table's units, of which one record or person adds at
        most ``weight``."""
        return self.noise_stddev_records * self.weight

    @property
    def as_sums(self) -> VoteSums:
        """The event of noisy sums with the same cost."""
        # Rounded up to the whole number that the field takes: a larger norm only costs more.
        norm = self.weight if self.relation == "add or remove one" else math.ceil(math.sqrt(2) * self.weight)
        return VoteSums(count=self.count, noise_stddev_votes=self.noise_stddev_weights, norm=norm)


@lru_cache(maxsize=16)
def one_count_moves(noise_stddev_votes: float) -> AtomicLoss:
    """Return the privacy loss when one count rises by one: N_Z(1, s^2) against N_Z(0, s^2)."""
    noise, log_mass = discrete_gaussian.log_masses(noise_stddev_votes)
    # ln of the density ratio at output 1 + n: ((1 + n)^2 - n^2) / (2 s^2).
    return AtomicLoss(losses=(1 + 2 * noise) / (2 * noise_stddev_votes**2), log_masses=log_mass)


@lru_cache(maxsize=16)
def two_counts_move(noise_stddev_votes: float) -> AtomicLoss:
    """Return the privacy loss when one count rises by one and another falls by one, each with independent noise."""
    difference, log_mass = discrete_gaussian.log_difference_masses(noise_stddev_votes)
    # The losses of both counts added, (1 + 2 n) / (2 s^2) and (1 - 2 n') / (2 s^2), with d = n - n'.
    return AtomicLoss(losses=(difference + 1) / noise_stddev_votes**2, log_masses=log_mass)


# Keyed by identity: the arguments come out of the caches above, where equal noises are one object.
@lru_cache(maxsize=4)
def both(first: AtomicLoss, second: AtomicLoss) -> AtomicLoss:
    """Return the privacy loss of two independent releases of the same records together.

    Where there are too many pairs of losses, each loss is split between points of a grid, which never lowers the cost.
    """
    if len(first.losses) * len(second.losses) <= _MOST_ATOMS:
        losses = np.add.outer(first.losses, second.losses).ravel()
        order = np.argsort(losses)
        masses = np.add.outer(first.log_masses, second.log_masses).ravel()
        return AtomicLoss(losses=losses[order], log_masses=masses[order])
    # Every loss is split between two points of a grid: a pair that dominates, on a sample too.
    step = (max(first.losses[-1], second.losses[-1]) - min(first.losses[0], second.losses[0])) / _MOST_STEPS
    lowest, masses = 0, np.ones(1)
    for part in (first, second):
        start, end = math.floor(part.losses[0] / step), math.floor(part.losses[-1] / step) + 1
        own = np.zeros(end - start + 1)
        loss_distributions.add_split(own, part.losses, np.exp(part.log_masses), interval=step, lowest=start)
        # Sum by sum and not by a transform: the smallest masses keep their digits.
        lowest, masses = lowest + start, np.convolve(masses, own)
    kept = masses > 0
    losses = step * (lowest + np.arange(len(masses)))
    return AtomicLoss(losses=losses[kept], log_masses=np.log(masses[kept]))


@event_rdp.register
def _(event: VoteTables | VoteSums | NeighbourVotes, orders_A: FloatArray) -> FloatArray:
    precision = _precision(event)
    if not math.isfinite(precision):
        return np.full(len(orders_A), math.inf)
    # Continuous curves: those of discrete Gaussians never exceed them, for vectors too. So sums need no t here.
    multiplier, orders = 1 / math.sqrt(precision), tuple(orders_A.tolist())
    return event.count * accountant.poisson_gaussian_rdp(multiplier, event.sampling_rate, orders)


event_rdp.register(PredictionTables, lambda event, orders_A: event_rdp(event.as_sums, orders_A))
event_pld.register(PredictionTables, lambda event, interval: event_pld(event.as_sums, interval))


@event_pld.register
def _(event: VoteTables | NeighbourVotes, interval: float) -> LossDistribution | None:
    if not math.isfinite(_precision(event)):
        return None
    moves = one_count_moves if isinstance(event, VoteTables) else two_counts_move
    pair = moves(event.noise_stddev_votes)
    if isinstance(event, NeighbourVotes) and event.threshold_stddev_votes is not None:
        pair = both(pair, one_count_moves(event.threshold_stddev_votes))
    return repeated(on_poisson_sample(pair, sampling_rate=event.sampling_rate, interval=interval), event.count)


@event_pld.register
def _(event: VoteSums, interval: float) -> LossDistribution | None:
    # The rounding argument needs noise above t. Below, no bound is known, and none is claimed.
    if event.noise_stddev_votes <= _ROUNDING:
        return None
    multiplier = math.sqrt(event.noise_stddev_votes**2 - _ROUNDING**2) / event.norm
    rate = event.sampling_rate
    # Without sampling, n Gaussians are one with sqrt(n) times less noise: there is nothing to compose.
    if rate == 1:
        return gaussians(event.count, multiplier, interval=interval)
    return loss_distributions.poisson_gaussians(event.count, multiplier, sampling_rate=rate, interval=interval)


def _precision(event: VoteTables | VoteSums | NeighbourVotes) -> float:
    """Return the squared L2 sensitivity over the noise variance of one release: without a norm, the sum of 1 / variance
    over the vote counts that one record changes and, if ``event`` has one, the threshold check."""
    if isinstance(event, VoteSums):
        return (event.norm / event.noise_stddev_votes) ** 2 if event.noise_stddev_votes else math.inf
    stddevs = [event.noise_stddev_votes]
    if isinstance(event, NeighbourVotes):
        # The noise of the counts is listed twice, because two counts move.
        stddevs += [stddev for stddev in (event.noise_stddev_votes, event.threshold_stddev_votes) if stddev is not None]
    return math.fsum(1 / stddev**2 if stddev else math.inf for stddev in stddevs)


def as_in_paper_rdp(
    event: accountant.ConfidentGnmaxVotes,
    *,
    fairness_rejected_Q: npt.ArrayLike | None = None,
    orders_A: npt.ArrayLike = accountant.DEFAULT_ORDERS,
) -> FloatArray:
    """Return the cost that the published PATE and FairPATE code computes, shape (A,): NOT a valid privacy cost.

    It is for comparison only. Each query costs the threshold check plus P[answered] times the argmax: an expectation,
    not the cost of what happened. In that code a query whose label was withheld for fairness (``fairness_rejected_Q``)
    costs nothing, although both steps ran.
    """
    rejected = np.zeros(len(event.votes_QC)) if fairness_rejected_Q is None else fairness_rejected_Q
    charged_Q = ~np.asarray(rejected, dtype=bool)
    if charged_Q.shape != (len(event.votes_QC),):
        raise ValueError(
            f"Expected fairness_rejected_Q to hold one flag per query ({len(event.votes_QC)}), got shape "
            f"{charged_Q.shape}."
        )
    votes_QC, noise = np.asarray(event.votes_QC)[charged_Q], event.noise_stddev_votes
    check: dict[str, Any] = {"threshold": event.threshold, "threshold_stddev_votes": event.threshold_stddev_votes}
    check["tail"] = event.tail
    log_q_Q = gnmax.log_q(votes_QC, noise_stddev_votes=noise, tail=event.tail)
    argmax_QA = gnmax.gnmax_rdp(log_q_Q, noise_stddev_votes=noise, orders_A=orders_A)
    answered_Q = gnmax.answer_probability(votes_QC, **check)
    return gnmax.threshold_rdp(votes_QC, **check, orders_A=orders_A).sum(axis=0) + answered_Q @ argmax_QA


MOST_TRIALS = 1e4
"""The largest expected number of trials."""
_LEAST_GAMMA = 1e-12


@dataclass(frozen=True, kw_only=True)
class SecretTrials:
    """The event of publishing the best of a secret number K of trials.

    K follows a truncated negative binomial law with the mean ``expected_trials`` and the shape ``eta``. ``trials`` has
    one tuple for each of the settings that a trial may draw, with the events of a trial under these settings.
    ValueError for parameters out of range, for settings without events, and for events under another unit or relation.
    """

    noun: ClassVar[str] = "secret number of trials"
    data_dependent: ClassVar[bool] = False
    expected_trials: float
    trials: tuple[tuple[Event, ...], ...]
    eta: float = 0.0
    unit: Unit = "record"
    relation: Relation = "add or remove one"

    def __post_init__(self) -> None:
        if not 1 < self.expected_trials <= MOST_TRIALS or not -1 < self.eta < math.inf:
            given = self.expected_trials, self.eta
            raise ValueError(f"Expected 1 < expected_trials <= {MOST_TRIALS:g} and a finite eta > -1, got {given}.")
        guarantees = {(event.unit, event.relation) for events in self.trials for event in events}
        if not all(self.trials) or guarantees != {(self.unit, self.relation)}:
            expected = f"for {self.unit}, {self.relation}"
            raise ValueError(
                f"Expected events in every trial of SecretTrials, all {expected}, got {sorted(guarantees)}; give "
                "SecretTrials the unit and relation of its events."
            )

    @cached_property
    def gamma(self) -> float:
        """The parameter gamma at which K has the mean ``expected_trials``."""
        if mean_trials(_LEAST_GAMMA, self.eta) < self.expected_trials:
            raise ValueError(
                f"No parameter gamma gives a mean of {self.expected_trials} trials at eta {self.eta}; lower "
                "expected_trials or raise eta."
            )
        ends, mean = (math.log(_LEAST_GAMMA), math.log1p(-1e-9)), self.expected_trials
        found = scipy.optimize.brentq(
            lambda log_gamma: math.log(mean_trials(math.exp(log_gamma), self.eta) / mean), *ends, xtol=1e-12
        )
        return math.exp(found)

    def draw(self, source: NoiseSource) -> int:
        """Draw K, the secret number of trials, by inversion. 63 random bits and float sums change the distribution of K
        by less than 1e-12 in total variation."""
        left = (source.randbelow(2**63) + 0.5) / 2**63
        gamma, eta = self.gamma, self.eta
        chance, number = -(1 - gamma) / math.log(gamma), 1
        if eta:
            chance = eta * (1 - gamma) / math.expm1(-eta * math.log(gamma))
        # The second condition ends where rounding has left a remainder that no chance reaches.
        while left > chance and chance > 1e-300:
            left -= chance
            chance *= (1 - gamma) * (number + eta) / (number + 1)
            number += 1
        return number


def mean_trials(gamma: float, eta: float) -> float:
    """Return E[K], the expected number of trials, for the parameters ``gamma`` and ``eta`` of the distribution of K."""
    if not eta:
        return (1 / gamma - 1) / -math.log(gamma)
    return eta * (1 / gamma - 1) / -math.expm1(eta * math.log(gamma))


@event_rdp.register
def _(event: SecretTrials, orders_A: FloatArray) -> FloatArray:
    orders_B = np.array(accountant.DEFAULT_ORDERS)
    of_trial_B, of_trial_A = (
        np.maximum.reduce([accountant.rdp(events, orders) for events in event.trials])
        for orders in (orders_B, orders_A)
    )
    # Any order b will do, the same for all a: the least bound.
    extra = np.min((1 - 1 / orders_B) * of_trial_B - math.log(event.gamma) / orders_B)
    return of_trial_A + (1 + event.eta) * extra + math.log(event.expected_trials) / (orders_A - 1)


def flat(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return ``events``, in which each :class:`SecretTrials` is replaced by the events of its trials."""
    listed = (chain(*event.trials) if isinstance(event, SecretTrials) else (event,) for event in events)
    return tuple(chain.from_iterable(listed))


def event_json(event: Event) -> dict[str, Any]:
    """Return a privacy event as values of strict JSON, with its kind and noun.

    ValueError for an event that depends on private votes.
    """
    # Stored events reach statements and the odometer, which must never contain votes.
    if event.data_dependent:
        raise ValueError(
            f"{type(event).__name__} depends on private votes and must not be stored; store its data-independent event."
        )
    values = {"kind": type(event).__name__, "noun": event.noun, **asdict(event)}  # type: ignore[call-overload]
    if isinstance(event, SecretTrials):
        values["trials"] = [list(map(event_json, events)) for events in event.trials]
    return worded(values)


def event_from(values: Mapping[str, Any]) -> Event:
    """Return the privacy event that :func:`event_json` wrote. ValueError for an unknown kind."""
    kinds = accountant.event_kinds()
    if values.get("kind") not in kinds:
        raise ValueError(f"unknown event {values.get('kind')!r}; read it with the version of fairpate that wrote it.")
    # JSON has no infinite numbers: they are stored as text.
    given = {name: value for name, value in values.items() if name not in ("kind", "noun")}
    fields: dict[str, Any] = {name: float(each) if each in ("inf", "-inf") else each for name, each in given.items()}
    if "trials" in fields:
        fields["trials"] = tuple(tuple(map(event_from, events)) for events in fields["trials"])
    return kinds[values["kind"]](**fields)


def _counted(events: Sequence[Event]) -> Counter[Event]:
    counts: Counter[Event] = Counter()
    for event in events:
        # A count of 1 in the key: events that differ in their count alone are added up.
        key = replace(event, count=1) if hasattr(event, "count") else event  # type: ignore[type-var]
        counts[key] += getattr(event, "count", 1)
    return counts


def _listed(counts: Counter[Event]) -> tuple[Event, ...]:
    found: list[Event] = []
    for event, count in counts.items():
        found += [replace(event, count=count)] if hasattr(event, "count") else [event] * count  # type: ignore[type-var]
    return tuple(found)


def merged(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return ``events``, with events that differ only in their count merged into one, whose count is the sum."""
    return _listed(_counted(events))


def covering(events: Sequence[Event], others: Sequence[Event]) -> tuple[Event, ...]:
    """Return the union of two lists of privacy events, in which each event has the larger of its counts in the two
    lists."""
    # The union of two Counters takes the larger count of each key.
    return _listed(_counted(events) | _counted(others))


def beyond(events: Sequence[Event], others: Sequence[Event]) -> tuple[Event, ...]:
    """Return the part of the privacy events ``events`` that ``others`` do not contain: counts of equal events are
    subtracted."""
    # Without others the events are unchanged: a subtraction would drop events of count 0.
    return _listed(_counted(events) - _counted(others)) if others else tuple(events)


@dataclass(frozen=True, kw_only=True)
class PartOfUnit:
    """The event ``whole``, whose cost is for a record or a person, converted to a smaller unit of privacy: one record
    of a person who stays in the data, or the sensitive attribute of one record.

    If one record of a person goes and the person stays, the person's contribution to the release is replaced by another
    one: an average of clipped gradients changes by up to twice the clipping bound, a vote moves from one cell to
    another. Likewise, a record whose attribute changes is replaced. If the cost of ``whole`` is for "add or remove
    one", replacing is two steps: one removes the old contribution, one adds the new one. Their Renyi curves combine by
    the weak triangle inequality (Mironov 2017, arXiv:1702.07476, proposition 11, p = q = 2):

        D_a(P || Q) <= (a - 1/2) / (a - 1) D_2a(P || R) + D_(2a - 1)(R || Q).

    A Gaussian's curve, linear in a, becomes four times as high, as when its sensitivity doubles. Events of teachers
    need no conversion: all records of a person reach one teacher, who has one vote with or without any of them.
    """

    whole: Event
    unit: Unit = "record"
    relation: Relation = "add or remove one"
    noun: ClassVar[str] = "release by record or person"
    data_dependent: ClassVar[bool] = False


@event_rdp.register
def _(event: PartOfUnit, orders_A: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    whole = event.whole
    if isinstance(whole, accountant.TeacherEvent | SmoothRelease) or whole.relation == "replace one":
        return event_rdp(whole, orders_A)
    # Renyi curves alone: this triangle inequality has no counterpart here for loss distributions.
    out_A, in_A = (event_rdp(whole, orders) for orders in (2 * orders_A, 2 * orders_A - 1))
    return np.asarray((orders_A - 0.5) / (orders_A - 1) * out_A + in_A)


def part_of_unit(event: Any, unit: Unit) -> Any:
    """Return an event whose cost covers the smaller ``unit``: one record, from an ``event`` priced per person, or the
    sensitive attribute of one record, from an ``event`` priced per record or per person.

    If ``unit`` is a record and the relation is "replace one", only the unit changes: replacing a record of a person by
    another record of the same person is one way to replace the person. Replacing it by another person's record changes
    two persons and is not covered. TypeError if ``unit`` is a record and the cost of ``event`` cannot be stated per
    record (:func:`of_unit`).
    """
    if unit == "sensitive attribute":
        return PartOfUnit(whole=event, unit=unit, relation="replace one")
    # For its TypeError too: what is priced for persons alone has no price for a record.
    found = accountant.of_unit(event, "record")
    if isinstance(event, accountant.TeacherEvent | SmoothRelease) or event.relation != "add or remove one":
        return found
    return PartOfUnit(whole=event)
