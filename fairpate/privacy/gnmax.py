"""Renyi cost of noisy plurality votes: GNMax, its confidence threshold, and the two as one mechanism.

``log_q`` and Theorem 6 are from Papernot et al. 2018 ("Scalable Private Learning with PATE", arXiv 1802.08908). The
joint cost of a confident query is exact in its first step: whether the threshold is passed is one bit, so its
divergence is that of two Bernoulli variables, and the noisy argmax is charged inside the branch where it runs.

Every cost here but the two ``data_independent`` ones is computed from private votes, is itself private, and stays with
the operator. A neighbour moves one teacher's vote: one count falls by one, another rises by one.

Both noises may be continuous (``tail="gaussian"``) or discrete (``tail="discrete"``); Theorem 6 needs only the Renyi
bound of the noise, which both share, and the probability of leaving the plurality. This module knows nothing of
fairness, of delta, or of how many queries a budget allows.

Shapes: Q queries, C classes, A orders; U, V, B, R as in ``_moments``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import scipy

from fairpate.privacy._moments import (
    DistinctHistograms,
    JointPricing,
    TheoremSix,
    ThresholdBit,
    join_exponents,
    pricings,
)
from fairpate.privacy.discrete_gaussian_tails import log_difference_survival_table, log_survival_and_complement
from fairpate.types import MAX_THRESHOLD_VOTES, IntArray, Tail

FloatArray = npt.NDArray[np.float64]

_TINY = 1e-250  # probabilities below are added up as logarithms


def log_q(votes_QC: npt.ArrayLike, *, noise_stddev_votes: float, tail: Tail) -> FloatArray:
    """ln of a bound on P[noisy argmax is not the plurality class] per query, shape (Q,), at most ln(1 - 1/C).

    A union bound over the other classes (Papernot et al. 2018, Proposition 7). With discrete noise, in which exact ties
    have positive probability, every tie counts against the plurality. ValueError for votes that are not whole numbers
    >= 0, for a standard deviation that is not positive, for an unknown ``tail``.
    """
    _require_positive("noise_stddev_votes", noise_stddev_votes)
    return _log_q_ranked(_ranked_votes(votes_QC), noise_stddev_votes, tail)


def gnmax_rdp(log_q_Q: npt.ArrayLike, *, noise_stddev_votes: float, orders_A: npt.ArrayLike) -> FloatArray:
    """RDP of one noisy argmax per query, shape (Q, A) (Papernot et al. 2018, Theorem 6).

    ``log_q_Q``: natural log of a bound on P[outcome is not the plurality], <= 0. Never above the data-independent
    alpha / noise_stddev_votes^2; ``-inf`` costs 0. ValueError for an order <= 1, a positive or undefined ``log_q_Q``.
    """
    _require_positive("noise_stddev_votes", noise_stddev_votes)
    orders, log_qs = _checked_orders(orders_A), _checked_log_q(log_q_Q)
    distinct_U, inverse_Q = np.unique(log_qs, return_inverse=True) if len(log_qs) > 1 else (log_qs, slice(None))
    return TheoremSix.prepare(distinct_U, noise_stddev_votes**2).rdp(orders)[inverse_Q]


def threshold_rdp(
    votes_QC: npt.ArrayLike,
    *,
    threshold: float,
    threshold_stddev_votes: float,
    orders_A: npt.ArrayLike,
    tail: Tail,
) -> FloatArray:
    """RDP of the bit 1[largest count + noise >= threshold] per query, shape (Q, A), priced by Theorem 6.

    The bit is a vote between two outcomes whose data-independent cost alpha / (2 threshold_stddev_votes^2) is that of
    GNMax with sqrt(2) times the noise; the price is never above it. An infinite ``threshold`` decides without looking
    and costs 0. Errors as ``log_q``; ValueError for a ``threshold`` that is NaN.
    """
    _check_threshold(threshold, threshold_stddev_votes, tail)
    orders = _checked_orders(orders_A)
    # The bit's cost depends on the largest count alone.
    largest_V, inverse_Q = np.unique(_checked_votes(votes_QC).max(axis=1), return_inverse=True)
    if math.isinf(threshold):
        return np.zeros((len(inverse_Q), len(orders)))
    log_yes_V, log_no_V = _log_answer_probability(largest_V, threshold, threshold_stddev_votes, tail)
    # q is that of the unlikelier outcome; noise of sqrt(2) sigma has the bit's data-independent cost.
    bound = TheoremSix.prepare(np.minimum(log_yes_V, log_no_V), 2 * threshold_stddev_votes**2)
    return bound.rdp(orders)[inverse_Q]


def confident_gnmax_rdp(
    votes_QC: npt.ArrayLike,
    *,
    threshold: float,
    threshold_stddev_votes: float,
    noise_stddev_votes: float,
    orders_A: npt.ArrayLike,
    tail: Tail,
) -> FloatArray:
    """RDP of one Confident-GNMax query each, shape (Q, A): threshold bit and, where it passes, the noisy argmax.

    With p(w) the chance that w votes pass, v the largest count and g the argmax's cost (``gnmax_rdp``):

        max over w = v - 1, v, v + 1 of  ln( p(v)^a p(w)^(1-a) e^((a-1) g) + (1-p(v))^a (1-p(w))^(1-a) ) / (a - 1)

    Never above ``confident_gnmax_rdp_data_independent``, nor above threshold and argmax priced apart.
    ``threshold=-inf`` is GNMax alone, ``threshold=inf`` costs 0. Covers every query submitted, answered or not,
    whatever becomes of its label. Errors as ``log_q`` and ``threshold_rdp``.
    """
    query = _ConfidentQuery(threshold, threshold_stddev_votes, noise_stddev_votes, tail)
    orders, original_A = _increasing(_checked_orders(orders_A))
    ranked_QC = _ranked_votes(votes_QC)
    if len(ranked_QC) == 1:
        rdp_QA = query.single_exponents(ranked_QC, orders) / (orders - 1)
    else:
        distinct = query.distinct(ranked_QC)
        exponent_UA = np.empty((len(distinct.log_q_U), len(orders)))
        for columns, pricing in query.pricings(distinct, orders):
            pricing.write_exponents(exponent_UA[:, columns])
        exponent_UA /= orders - 1
        rdp_QA = exponent_UA[distinct.inverse_Q]
    # The joint cost never exceeds it: only rounding does.
    np.minimum(rdp_QA, query.data_independent_rdp(orders), out=rdp_QA)
    return rdp_QA if original_A is None else rdp_QA[:, original_A]


def confident_gnmax_rdp_total(
    votes_QC: npt.ArrayLike,
    *,
    threshold: float,
    threshold_stddev_votes: float,
    noise_stddev_votes: float,
    orders_A: npt.ArrayLike,
    tail: Tail,
) -> FloatArray:
    """The sum over queries of ``confident_gnmax_rdp``, shape (A,), pricing equal histograms once."""
    query = _ConfidentQuery(threshold, threshold_stddev_votes, noise_stddev_votes, tail)
    orders, original_A = _increasing(_checked_orders(orders_A))
    ranked_QC = _ranked_votes(votes_QC)
    if len(ranked_QC) == 1:
        exponent_A = query.single_exponents(ranked_QC, orders)[0]
    else:
        distinct = query.distinct(ranked_QC)
        parts = [pricing.total_exponents() for _, pricing in query.pricings(distinct, orders)]
        exponent_A = np.concatenate(parts)
    cap_A = len(ranked_QC) * query.data_independent_rdp(orders)
    total_A: FloatArray = np.clip(exponent_A / (orders - 1), 0.0, cap_A)
    return total_A if original_A is None else total_A[original_A]


def threshold_rdp_data_independent(*, threshold_stddev_votes: float, orders_A: npt.ArrayLike) -> FloatArray:
    """RDP of one threshold bit for any votes, shape (A,): the largest count moves by at most 1."""
    return _gaussian_rdp(1.0, "threshold_stddev_votes", threshold_stddev_votes, _checked_orders(orders_A))


def gnmax_rdp_data_independent(*, noise_stddev_votes: float, orders_A: npt.ArrayLike) -> FloatArray:
    """RDP of one noisy argmax for any votes, shape (A,): the counts move by at most sqrt(2) in Euclidean norm."""
    return _gaussian_rdp(2.0, "noise_stddev_votes", noise_stddev_votes, _checked_orders(orders_A))


def confident_gnmax_rdp_data_independent(
    *, threshold: float, threshold_stddev_votes: float, noise_stddev_votes: float, orders_A: npt.ArrayLike
) -> FloatArray:
    """RDP of one Confident-GNMax query for any votes, shape (A,): the sum of its two steps.

    An infinite ``threshold`` makes the first step free, and +inf the second one too. A standard deviation of 0 costs
    ``inf``.
    """
    _require_number(threshold)
    orders = _checked_orders(orders_A)
    if threshold == math.inf:
        return np.zeros(len(orders))
    argmax_A = gnmax_rdp_data_independent(noise_stddev_votes=noise_stddev_votes, orders_A=orders)
    if threshold == -math.inf:
        return argmax_A
    return argmax_A + threshold_rdp_data_independent(threshold_stddev_votes=threshold_stddev_votes, orders_A=orders)


def answer_probability(
    votes_QC: npt.ArrayLike, *, threshold: float, threshold_stddev_votes: float, tail: Tail
) -> FloatArray:
    """P[largest count + noise >= threshold] per query, shape (Q,); as private as the votes."""
    _check_threshold(threshold, threshold_stddev_votes, tail)
    largest_Q = _checked_votes(votes_QC).max(axis=1)
    if math.isinf(threshold):
        return np.full(len(largest_Q), float(threshold < 0))
    return np.exp(_log_answer_probability(largest_Q, threshold, threshold_stddev_votes, tail)[0])


@dataclass(frozen=True)
class _ConfidentQuery:
    threshold: float
    threshold_stddev: float
    noise_stddev: float
    tail: Tail

    def __post_init__(self) -> None:
        _check_threshold(self.threshold, self.threshold_stddev, self.tail)
        _require_positive("noise_stddev_votes", self.noise_stddev)

    def data_independent_rdp(self, orders_A: FloatArray) -> FloatArray:
        return confident_gnmax_rdp_data_independent(
            threshold=self.threshold,
            threshold_stddev_votes=self.threshold_stddev,
            noise_stddev_votes=self.noise_stddev,
            orders_A=orders_A,
        )

    def single_exponents(self, ranked_1C: IntArray, orders_A: FloatArray) -> FloatArray:
        """(alpha - 1) R of one online query, shape (1, A): nothing to group, nothing to tabulate."""
        bound = TheoremSix.prepare(_log_q_ranked(ranked_1C, self.noise_stddev, self.tail), self.noise_stddev**2)
        joint_1A = join_exponents(
            bound.rdp(orders_A) * (orders_A - 1), *self._bit(ranked_1C[:, -1]).log_factors(orders_A)
        )
        exponent_1A: FloatArray = np.maximum(joint_1A, 0.0)
        return exponent_1A

    def distinct(self, ranked_QC: IntArray) -> DistinctHistograms:
        return DistinctHistograms.of(ranked_QC[:, -1], _log_q_ranked(ranked_QC, self.noise_stddev, self.tail))

    def pricings(self, distinct: DistinctHistograms, orders_A: FloatArray) -> Iterator[tuple[slice, JointPricing]]:
        return pricings(
            distinct,
            self._bit(distinct.largest_V),
            noise_variance=self.noise_stddev**2,
            orders_A=orders_A,
            # (alpha - 1) times alpha / sigma_2^2 and alpha / (2 sigma_1^2), the two steps for any votes.
            largest_exponent_A=orders_A * (orders_A - 1) * (1 / self.noise_stddev**2 + 0.5 / self.threshold_stddev**2),
        )

    def _bit(self, largest_V: IntArray) -> ThresholdBit:
        if math.isinf(self.threshold):
            return ThresholdBit.constant(passes=self.threshold < 0, num_counts=len(largest_V))
        # A neighbour's largest count is one less, the same or one more.
        at_3V = largest_V + np.array([[0], [-1], [1]])
        return ThresholdBit.noisy(*_log_answer_probability(at_3V, self.threshold, self.threshold_stddev, self.tail))


def _log_q_ranked(ranked_QC: IntArray, noise_stddev: float, tail: Tail) -> FloatArray:
    num_classes = ranked_QC.shape[1]
    if num_classes == 1:
        return np.full(len(ranked_QC), -math.inf)
    gaps_QC = ranked_QC[:, -1:] - ranked_QC[:, -2::-1]  # the runner-up, with the smallest gap, comes first
    log_tails = _log_difference_survival(noise_stddev, int(gaps_QC.max(initial=0)), tail)
    # Exponentials of the table, looked up: one per gap that there can be, not per query and class.
    sums_Q = np.exp(log_tails)[gaps_QC].sum(axis=1)
    union_Q = np.log(np.maximum(sums_Q, _TINY))
    vanishing_Q = sums_Q < _TINY
    if vanishing_Q.any():
        union_Q[vanishing_Q] = np.logaddexp.reduce(log_tails[gaps_QC[vanishing_Q]], axis=1)
    # No class is likelier than the plurality, so that one comes out with probability 1/C at least.
    capped_Q: FloatArray = np.minimum(union_Q, math.log1p(-1 / num_classes))
    return capped_Q


@lru_cache(maxsize=64)
def _log_difference_survival(noise_stddev: float, max_gap: int, tail: Tail) -> FloatArray:
    """ln P[N_a - N_b >= g] for the gaps g = 0 .. max_gap."""
    if tail == "discrete":
        return log_difference_survival_table(noise_stddev, max_gap)
    if tail == "gaussian":
        log_tails: FloatArray = scipy.special.log_ndtr(-np.arange(max_gap + 1) / (math.sqrt(2) * noise_stddev))
        return log_tails
    raise ValueError(f"Expected tail 'gaussian' or 'discrete', got {tail!r}.")


def _log_answer_probability(
    largest: IntArray, threshold: float, stddev: float, tail: Tail
) -> tuple[FloatArray, FloatArray]:
    """ln p and ln(1 - p) for p = P[N >= threshold - largest], elementwise, for a finite threshold."""
    if tail == "discrete":
        # Counts and discrete noise are whole: reaching the threshold is reaching its ceiling.
        return log_survival_and_complement(stddev, math.ceil(threshold) - largest)
    margin = (threshold - largest) / stddev
    return scipy.special.log_ndtr(-margin), scipy.special.log_ndtr(margin)


def _gaussian_rdp(squared_sensitivity: float, field: str, stddev: float, orders_A: FloatArray) -> FloatArray:
    if not 0 <= stddev < math.inf:
        raise ValueError(f"Expected 0 <= {field} < inf, got {stddev}.")
    if stddev == 0:
        return np.full(len(orders_A), math.inf)
    return orders_A * squared_sensitivity / (2 * stddev**2)


def _ranked_votes(votes_QC: npt.ArrayLike) -> IntArray:
    """Every row in increasing order: class names do not matter to a cost."""
    return np.sort(_checked_votes(votes_QC), axis=1)


def _checked_votes(votes_QC: npt.ArrayLike) -> IntArray:
    votes = np.asarray(votes_QC)
    if votes.ndim != 2 or votes.shape[1] == 0:
        raise ValueError(f"Expected votes of shape (queries, classes) with at least one class, got {votes.shape}.")
    if votes.dtype.kind not in "iuf" or (votes.dtype.kind == "f" and not np.all(np.isfinite(votes))):
        raise ValueError("Expected votes to be finite whole numbers; count whole teachers per class.")
    counts = votes.astype(np.int64, copy=False)
    if counts.min(initial=0) < 0 or (votes.dtype.kind == "f" and np.any(counts != votes)):
        raise ValueError("Expected votes to be whole numbers >= 0; count whole teachers per class.")
    return counts


def _checked_orders(orders_A: npt.ArrayLike) -> FloatArray:
    orders = np.asarray(orders_A, dtype=np.float64)
    if orders.ndim != 1 or not len(orders) or not np.all(np.isfinite(orders) & (orders > 1)):
        raise ValueError(f"Expected a non-empty list of finite Renyi orders > 1, got {orders_A!r}.")
    return orders


def _increasing(orders_A: FloatArray) -> tuple[FloatArray, IntArray | None]:
    """The orders sorted, and where each of the caller's orders is now (None: they were sorted)."""
    if np.all(orders_A[1:] >= orders_A[:-1]):
        return orders_A, None
    increasing_A = np.argsort(orders_A)
    return orders_A[increasing_A], np.argsort(increasing_A)


def _checked_log_q(log_q_Q: npt.ArrayLike) -> FloatArray:
    log_qs = np.asarray(log_q_Q, dtype=np.float64)
    if log_qs.ndim != 1 or not np.all(log_qs <= 0):
        raise ValueError("Expected log_q_Q to be a vector of logarithms of probabilities (<= 0, not NaN).")
    return log_qs


def _check_threshold(threshold: float, threshold_stddev: float, tail: Tail) -> None:
    _require_number(threshold)
    if math.isfinite(threshold) and abs(threshold) > MAX_THRESHOLD_VOTES:
        raise ValueError(f"Expected |threshold| <= 2^23 or an infinite threshold, got {threshold}.")
    _require_positive("threshold_stddev_votes", threshold_stddev)
    if tail not in ("gaussian", "discrete"):
        raise ValueError(f"Expected tail 'gaussian' or 'discrete', got {tail!r}.")


def _require_number(threshold: float) -> None:
    if math.isnan(threshold):
        raise ValueError("Expected threshold to be a number, got nan.")


def _require_positive(field: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"Expected 0 < {field} < inf, got {value}.")
