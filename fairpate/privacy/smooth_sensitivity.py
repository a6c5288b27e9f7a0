"""Publishing what Confident-GNMax cost on these votes: its Renyi cost at one order, with noise scaled to its stability.

The cost of given votes is as private as the votes. Papernot et al. 2018 (arXiv 1802.08908, Section 5.2 and appendices)
publish it by the smooth sensitivity of Nissim, Raskhodnikova and Smith 2007: a bound on how far one record moves the
cost, for votes up to d records away, discounted by exp(-beta d), scales Gaussian noise. One record touches one teacher
and so moves at most one vote of every query at once; sensitivities are therefore maximised within a query and then
added over queries.

**Which cost.** The sum over queries of threshold bit (Theorem 6 on two outcomes) and noisy argmax (Theorem 6), each
charged for every query submitted: valid by composition, since withholding an argmax that ran is post-processing, and
looser than the joint cost ``gnmax.confident_gnmax_rdp``, whose smooth sensitivity nobody has worked out. Both are the
cost of queries that were fixed in advance; where later queries were chosen in view of answers the sum is an estimate.

**Which tail.** With ``tail="discrete"`` the tail of a difference of two discrete Gaussians is bounded by a continuous
one moved by less than a vote. The bound keeps the continuous form in which every step below is proved.

**Argmax.** With x the gap between two counts over 2 sigma, one moved vote changes x by at most 1 / sigma, so q by no
more than ``_raised`` and ``_lowered`` say (concavity of the receiver operating curve spreads q evenly over classes).
Up to q0 the cost depends on q, beyond it does not. If the cost rises on (0, q0) and its growth by one vote rises on
(0, q1), where one vote leads from q1 to q0, then sensitivity rises up to q1, is at most its plateau on [q1, q0] and
falls beyond: the largest value within d votes is at the votes that come closest to [q1, q0]. Votes come closest by
moving one after the other from the largest count to the second (q too small), or back (q too large).
``check_monotonicity`` tests the two conditions.

What the noise costs and what may then be said is in ``fairpate.privacy.smooth_release``.

Not known here: ledgers, deltas of a budget, fairness. Shapes: Q queries, C classes, A orders, U distinct vote counts,
D distances 0 .. number of teachers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fairpate.privacy import gnmax
from fairpate.privacy._argmax_curve import FARTHEST_STDDEVS, UNTIL_ROUNDING, ArgmaxCurve, DistinctVotes, gaps_of
from fairpate.privacy.discrete_gaussian import NoiseSource, sample_discrete_gaussian
from fairpate.privacy.smooth_release import PUBLISHED_DECIMALS, SanitisedRdp, SmoothRelease
from fairpate.types import Tail

FloatArray = npt.NDArray[np.float64]

_CHECKED_POINTS = 20_001  # what check_monotonicity looks at, below q0 and q1
_VANISHING = 1e-290  # costs below have no digits left in a float


def sanitised_rdp(
    votes_QC: npt.ArrayLike,
    *,
    threshold: float,
    threshold_stddev_votes: float,
    noise_stddev_votes: float,
    release: SmoothRelease,
    source: NoiseSource,
    tail: Tail = "discrete",
) -> SanitisedRdp:
    """Publish the cost of ``votes_QC``, every row a query submitted, shape (Q, C); record and charge ``release`` first.

    ``source``: the operating system's entropy, or nothing is protected. Errors as :func:`smooth_sensitivity`.
    """
    costs = _Costs(threshold, threshold_stddev_votes, noise_stddev_votes, release.order, tail)
    votes = DistinctVotes.of(votes_QC)
    exact, scale = float(votes.counts_U @ costs.rdp(votes)), _smooth(costs, votes, release.beta)
    log_scale = None
    if release.scale_noise_stddev < math.inf:
        spread = release.beta * release.scale_noise_stddev * _normal(source)
        # 0 for all votes of as many teachers or for none, and so public: all lie within the distances looked at.
        log_scale = _published((math.log(scale) if scale else -math.inf) + spread)
    any_votes = gnmax.confident_gnmax_rdp_data_independent(
        threshold=threshold,
        threshold_stddev_votes=threshold_stddev_votes,
        noise_stddev_votes=noise_stddev_votes,
        orders_A=[release.order],
    )
    return SanitisedRdp(
        release=release,
        rdp=_published(exact + scale * release.noise_stddev * _normal(source)),
        log_scale=log_scale,
        rdp_data_independent=float(votes.counts_U.sum() * any_votes[0]),
        noise=source.label,
    )


def smooth_sensitivity(
    votes_QC: npt.ArrayLike,
    *,
    threshold: float,
    threshold_stddev_votes: float,
    noise_stddev_votes: float,
    release: SmoothRelease,
    tail: Tail = "discrete",
) -> float:
    """max over d of exp(-beta d) times the summed sensitivity at distance d; as private as the votes.

    ValueError for votes that are not whole numbers >= 0 of as many teachers in every query, for fewer than two classes,
    for noise or a threshold that ``gnmax`` refuses, and where :func:`check_monotonicity` fails.
    """
    costs = _Costs(threshold, threshold_stddev_votes, noise_stddev_votes, release.order, tail)
    return _smooth(costs, DistinctVotes.of(votes_QC), release.beta)


def two_step_rdp(
    votes_QC: npt.ArrayLike,
    *,
    threshold: float,
    threshold_stddev_votes: float,
    noise_stddev_votes: float,
    order: float,
    tail: Tail = "discrete",
) -> FloatArray:
    """The cost that a release publishes, per query, shape (Q,): threshold and argmax priced apart; private."""
    votes = DistinctVotes.of(votes_QC)
    costs = _Costs(threshold, threshold_stddev_votes, noise_stddev_votes, order, tail)
    return costs.rdp(votes)[votes.inverse_Q]


def argmax_sensitivity(
    votes_QC: npt.ArrayLike, *, noise_stddev_votes: float, order: float, tail: Tail = "discrete"
) -> FloatArray:
    """The most that one moved vote changes the argmax's cost for votes up to d moves away, shape (Q, D); private."""
    votes = DistinctVotes.of(votes_QC)
    check_monotonicity(noise_stddev_votes=noise_stddev_votes, num_classes=votes.num_classes, order=order)
    curve = ArgmaxCurve.of(votes, noise_stddev_votes, order, tail)
    return curve.sensitivity(curve.closest(votes))[votes.inverse_Q]


def threshold_sensitivity(
    votes_QC: npt.ArrayLike, *, threshold: float, threshold_stddev_votes: float, order: float, tail: Tail = "discrete"
) -> FloatArray:
    """The same for the threshold bit's cost, which depends on the largest count alone, shape (Q, D); private."""
    votes = DistinctVotes.of(votes_QC)
    return _threshold_sensitivity(votes, threshold, threshold_stddev_votes, order, tail)[votes.inverse_Q]


@lru_cache(maxsize=64)
def check_monotonicity(*, noise_stddev_votes: float, num_classes: int, order: float) -> None:
    """ValueError unless the argmax's cost rises with q up to q0, and its growth by one vote up to q1.

    On a fine grid, down to where the cost vanishes in a float. Whatever the votes, so it may decide what is asked.
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
class _Costs:
    """The two costs of a query at one order, and their sensitivities. An infinite threshold makes its bit free."""

    threshold: float
    threshold_stddev: float
    noise_stddev: float
    order: float
    tail: Tail

    def rdp(self, votes: DistinctVotes) -> FloatArray:
        bit_UA = gnmax.threshold_rdp(
            votes.ranked_UC,
            threshold=self.threshold,
            threshold_stddev_votes=self.threshold_stddev,
            orders_A=[self.order],
            tail=self.tail,
        )
        if self.threshold == math.inf:
            return bit_UA[:, 0]
        curve = ArgmaxCurve.of(votes, self.noise_stddev, self.order, self.tail)
        total_U: FloatArray = bit_UA[:, 0] + curve.rdp(curve.log_q(gaps_of(votes)))
        return total_U

    def sensitivity(self, votes: DistinctVotes) -> FloatArray:
        """Per distinct query and distance, shape (U, D)."""
        bit_UD = _threshold_sensitivity(votes, self.threshold, self.threshold_stddev, self.order, self.tail)
        if self.threshold == math.inf:
            return bit_UD
        check_monotonicity(noise_stddev_votes=self.noise_stddev, num_classes=votes.num_classes, order=self.order)
        curve = ArgmaxCurve.of(votes, self.noise_stddev, self.order, self.tail)
        return bit_UD + curve.sensitivity(curve.closest(votes))


def _threshold_sensitivity(
    votes: DistinctVotes, threshold: float, threshold_stddev: float, order: float, tail: Tail
) -> FloatArray:
    """Within the largest counts that these teachers can have, from an even split to unanimity, shape (U, D)."""
    least = -(-votes.num_teachers // votes.num_classes)
    possible_V = np.arange(least, votes.num_teachers + 1)
    cost_VA = gnmax.threshold_rdp(
        possible_V[:, None],
        threshold=threshold,
        threshold_stddev_votes=threshold_stddev,
        orders_A=[order],
        tail=tail,
    )
    step = np.abs(np.diff(cost_VA[:, 0]))
    change_V = np.maximum(np.append(0.0, step), np.append(step, 0.0))
    largest_W, inverse_U = np.unique(votes.ranked_UC[:, 0], return_inverse=True)
    within_WD = np.stack([_largest_within(change_V, int(v) - least, votes.num_teachers) for v in largest_W])
    return within_WD[inverse_U]


def _largest_within(values_V: FloatArray, centre: int, reach: int) -> FloatArray:
    """The largest value at most d places from ``centre``, for d = 0 .. reach."""
    below = np.maximum.accumulate(values_V[centre::-1])
    above = np.maximum.accumulate(values_V[centre:])
    distance = np.arange(reach + 1)
    return np.maximum(below[np.minimum(distance, len(below) - 1)], above[np.minimum(distance, len(above) - 1)])


def _smooth(costs: _Costs, votes: DistinctVotes, beta: float) -> float:
    total_D = np.zeros(votes.num_teachers + 1)
    for block in votes.blocks():
        # Up to d away, and within a query before queries are added: one record moves all of them at once.
        total_D += block.counts_U @ np.maximum.accumulate(costs.sensitivity(block), axis=1)
    return float(np.max(np.exp(-beta * np.arange(len(total_D))) * total_D))


def _normal(source: NoiseSource) -> float:
    return sample_discrete_gaussian(2**64, source) / 2**64


def _published(value: float) -> float:
    """Rounded to a public grid, coarse against the one that noise is drawn on."""
    return round(value, PUBLISHED_DECIMALS)
