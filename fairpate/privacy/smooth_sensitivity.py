"""Publish a data-dependent privacy cost of votes: its smooth sensitivity, and the noise in proportion to it.

The cost of Confident-GNMax on given votes reveals something of the votes. Papernot et al. 2018 (arXiv 1802.08908,
Section 5.2 and appendices) publish its Renyi cost at one order with Gaussian noise in proportion to its smooth
sensitivity (Nissim, Raskhodnikova and Smith 2007): a bound on how far one record moves the cost, for votes up to d
records away, discounted by exp(-beta d). One record moves at most one vote of every query at once, so sensitivities are
maximised within a query and then added over queries. The cost is the sum over queries of threshold bit and noisy argmax
(Theorem 6), each charged for every query submitted. It is above the joint cost ``gnmax.confident_gnmax_rdp``, which has
no known smooth sensitivity. Both hold for queries that were fixed in advance; where later queries depended on earlier
answers they are estimates.

Shapes: Q queries, C classes, U distinct vote histograms, D numbers of moved votes.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import scipy

from fairpate.privacy import accountant, discrete_gaussian, gnmax
from fairpate.privacy.discrete_gaussian import NoiseSource, require_positive, sample_discrete_gaussian
from fairpate.privacy.mechanism_events import SmoothRelease, release_rdp
from fairpate.types import FloatArray, IntArray, MechanismParameters, Tail

PUBLISHED_DECIMALS = 6


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
