"""Renyi cost of noisy plurality votes: GNMax, its confidence threshold, and the two as one mechanism.

``log_q`` and Theorem 6 are from Papernot et al. 2018 ("Scalable Private Learning with PATE", arXiv 1802.08908). The
joint cost of a confident query is exact in its first step: whether the threshold is passed is one bit, so its
divergence is that of two Bernoulli variables, and the noisy argmax is charged inside the branch where it runs.

Every cost here, except those of functions named ``data_independent``, is computed from private votes and must not be
published. On neighbouring data one teacher's vote differs: one count falls by one, another rises by one. Noise may be
continuous (``tail="gaussian"``) or discrete (``tail="discrete"``); Theorem 6 needs only the Renyi bound of the noise,
which is the same for both, and the probability that the output is not the plurality class.

The first half computes moments for many histograms at once. A cost R at order alpha is represented by its moment
e^((alpha - 1) R) or, at orders where that may overflow a float, by the moment's logarithm (alpha - 1) R, called the
exponent. Orders are increasing there.

Shapes: Q queries, C classes, A orders, U distinct (largest count, log_q) pairs, V distinct largest counts, S the two
neighbouring counts v - 1 and v + 1, K chunks, B rows of one chunk, R the leading orders at which Theorem 6 can lower a
cost, L the two coefficients of a line in alpha.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import scipy

from fairpate.privacy.discrete_gaussian import log_survival_and_complement, log_survival_table, require_positive
from fairpate.types import MAX_THRESHOLD_VOTES, FloatArray, IntArray, Tail

MAX_EXPONENT = 600.0  # moments up to e^600 are handled as numbers, greater ones by their logarithm
NEVER = -1e300  # in place of ln 0, where inf - inf would be NaN: costs come out as exactly 0
_CHUNK_ROWS = 128
_BLOCK_ROWS = 512
_RUN_START = 4  # evenly spaced orders that are exponentiated before factors take over


@dataclass(frozen=True)
class DistinctHistograms:
    """The distinct pairs (largest count, log_q) among the vote histograms of queries, in ascending order. The cost of a
    query depends on its pair alone.

    log_q: ln of a bound on P[the noisy argmax is not the plurality]. ``counts_U``: the number of queries with each
    pair. A chunk (K) is a run of pairs with the same largest count, short enough for the processor's cache;
    ``starts_K`` are the indices of the first pairs of chunks.
    """

    largest_V: IntArray
    log_q_U: FloatArray
    counts_U: FloatArray
    inverse_Q: IntArray
    group_K: IntArray
    starts_K: IntArray

    @classmethod
    def of(cls, largest_Q: IntArray, log_q_Q: FloatArray) -> DistinctHistograms:
        """Find the distinct pairs (largest count, log_q) of all queries; ``inverse_Q`` of the result is the index of
        each query's pair."""
        # One key sorts faster than two; keys that rounding makes equal cost time, never a wrong group.
        # With log_q <= 0 the fraction is at most 1/2: it orders within a largest count and never across two.
        order_Q = np.argsort(largest_Q - 1 / (2 - log_q_Q))
        largest_Q, log_q_Q = largest_Q[order_Q], log_q_Q[order_Q]
        opens_group_Q = np.diff(largest_Q, prepend=-1) != 0
        is_first_Q = opens_group_Q.copy()
        is_first_Q[1:] |= log_q_Q[1:] != log_q_Q[:-1]
        first_U = np.flatnonzero(is_first_Q)
        inverse_Q = np.empty(len(order_Q), dtype=np.int64)
        inverse_Q[order_Q] = np.cumsum(is_first_Q) - 1
        starts_V = np.flatnonzero(opens_group_Q[first_U])
        # Cut every group into chunks: the group each belongs to and the row it starts at.
        num_chunks_V = -(-np.diff(starts_V, append=len(first_U)) // _CHUNK_ROWS)
        group_K = np.repeat(np.arange(len(starts_V)), num_chunks_V)
        position_K = np.arange(len(group_K)) - np.repeat(np.cumsum(num_chunks_V) - num_chunks_V, num_chunks_V)
        starts_K = starts_V[group_K] + _CHUNK_ROWS * position_K
        counts_U = np.diff(first_U, append=len(order_Q)).astype(np.float64)
        return cls(largest_Q[first_U[starts_V]], log_q_Q[first_U], counts_U, inverse_Q, group_K, starts_K)


@dataclass(frozen=True)
class TheoremSix:
    """The bound of Papernot et al. 2018, Theorem 6, on the Renyi cost R of a noisy argmax, prepared for each log_q: the
    moment exp((alpha - 1) R) is e^a + e^b, with a and b linear in alpha.

    a = ln(1 - q) + (alpha - 1) growth and b = log_q + (alpha - 1) slope, where growth and slope depend on q and the
    variance alone. This holds for orders below ``limit_U`` (mu1 in the paper, -inf where a condition of the theorem
    fails). From mu1 on the exponent (alpha - 1) R is the data-independent alpha (alpha - 1) / variance, which b never
    exceeds and equals at mu1. ``lines_2UL``: coefficients of a and b.
    """

    limit_U: FloatArray
    lines_2UL: FloatArray
    variance: float

    @classmethod
    def prepare(cls, log_q_U: FloatArray, variance: float) -> TheoremSix:
        """Compute, for every log_q, the coefficients of the exponents a and b in Theorem 6's moment e^a + e^b. The
        data-independent cost of a query is alpha / ``variance``."""
        # ln 0 would lead to inf - inf in the conditions below.
        log_q_U = np.maximum(log_q_U, NEVER)
        # The theorem holds for any mu1 and mu2 in its range; the paper sets mu2 = sigma sqrt(-ln q) and mu1 = mu2 + 1.
        mu2_U = np.sqrt(-variance * log_q_U)
        cost2_U = mu2_U / variance
        inner_U = np.where(mu2_U > 1, mu2_U, 2.0)  # finite logarithms also where the theorem does not apply
        penalty_U = inner_U * (np.log1p(1 / inner_U) + np.log1p(1 / (inner_U - 1)))
        # The theorem's conditions; the last is q <= e^((mu2 - 1) e2) / (mu1 / (mu1 - 1) mu2 / (mu2 - 1))^mu2.
        applies_U = (mu2_U > 1) & (-log_q_U > cost2_U) & (log_q_U <= (mu2_U - 1) * cost2_U - penalty_U)
        log_stay_U = np.log1p(-np.exp(np.where(applies_U, log_q_U, -1.0)))
        # ln (q e^e2)^((mu2 - 1) / mu2), which is below 0 where the theorem applies.
        overlap_U = np.where(applies_U, (log_q_U + cost2_U) * (1 - 1 / inner_U), -1.0)
        growth_U = log_stay_U - np.log1p(-np.exp(overlap_U))
        slope_U = (2 * mu2_U + 1) / variance  # e1 - log_q / (mu1 - 1), by mu1 - 1 = mu2
        lines_2UL = np.stack([np.stack([growth_U, log_stay_U], -1), np.stack([slope_U, log_q_U], -1)])
        return cls(np.where(applies_U, mu2_U + 1, -math.inf), lines_2UL, variance)

    def moments(
        self, rows: slice, powers_LA: FloatArray, runs: Sequence[slice], independent_A: FloatArray, *, logs: bool
    ) -> FloatArray:
        """Return the moments exp((alpha - 1) R) = e^a + e^b at A orders alpha, shape (B, A), for the B values of log_q
        in ``rows``; with ``logs`` return their logarithms. A moment may be inf.

        ``powers_LA``: two rows, alpha - 1 and 1, by which the coefficients of a and b (``lines_2UL``) are multiplied.
        ``runs``: slices of evenly spaced orders, at which exponentials are faster. ``independent_A``: the
        data-independent moments (with ``logs``, their logarithms), which bound the result.
        """
        moment_BA: FloatArray
        if logs:
            moment_BA = np.logaddexp(*(self.lines_2UL[:, rows] @ powers_LA))
        else:
            stay_BA, leave_BA = _exp_of_lines(self.lines_2UL[:, rows], powers_LA, runs)
            moment_BA = np.add(stay_BA, leave_BA, out=stay_BA)
        # Both are bounds. Close to mu1, e^b alone reaches the data-independent one, and e^a comes on top.
        np.minimum(moment_BA, independent_A, out=moment_BA)
        last_B = self.limit_U[rows] - 1
        sure = int(powers_LA[0].searchsorted(last_B.min()))
        if sure < len(independent_A):
            beyond_BR = powers_LA[0, sure:] >= last_B[:, None]  # 0 or 1: a product and a maximum beat a masked copy
            np.maximum(moment_BA[:, sure:], beyond_BR * independent_A[sure:], out=moment_BA[:, sure:])
        return moment_BA

    def rdp(self, orders_A: FloatArray) -> FloatArray:
        """Return the RDP of each distinct log_q, shape (U, A), with a small relative error even for tiny costs.

        ``orders_A`` need not be sorted.
        """
        stay_UA, leave_UA = self.lines_2UL @ np.stack([orders_A - 1, np.ones_like(orders_A)])
        # Costs near 0 are e^a + e^b - 1 for a near 0: expm1 and log1p keep the digits that logaddexp would lose.
        # Exponents are cut at 1, above which logaddexp is taken: no branch overflows.
        excess_UA = np.expm1(np.minimum(stay_UA, 1.0)) + np.exp(np.minimum(leave_UA, 1.0))
        is_small_UA = np.maximum(stay_UA, leave_UA) <= 1
        exponent_UA = np.where(is_small_UA, np.log1p(excess_UA), np.logaddexp(stay_UA, leave_UA))
        independent_A = orders_A / self.variance
        dependent_UA = np.minimum(exponent_UA / (orders_A - 1), independent_A)
        return np.where(orders_A < self.limit_U[:, None], dependent_UA, independent_A)


def _exp_of_lines(lines_2BL: FloatArray, powers_LA: FloatArray, runs: Sequence[slice]) -> FloatArray:
    """Return e^a and e^b of :class:`TheoremSix` at every order, shape (2, B, A).

    In a run of evenly spaced orders, later values are products of earlier ones, which is faster.
    """
    lines_2LB, exp_2AB = lines_2BL.transpose(0, 2, 1), np.empty((2, powers_LA.shape[1], lines_2BL.shape[1]))
    done = 0
    for run in runs if lines_2BL[..., 1].min() > -MAX_EXPONENT else ():  # what starts near 0 would stay there
        start, known, stop = run.start, run.start + _RUN_START, min(run.stop, exp_2AB.shape[1])
        if known >= stop:
            break
        exp_2AB[:, done:known] = np.exp(powers_LA[:, done:known].T @ lines_2LB)
        factor_21B = np.exp((powers_LA[0, known] - powers_LA[0, start]) * lines_2LB[:, :1])
        while known < stop:
            # By doubling what is known, a run of n orders takes about log2(n) products of whole blocks.
            more = min(stop - known, known - start)
            np.multiply(exp_2AB[:, start : start + more], factor_21B, out=exp_2AB[:, known : known + more])
            known, factor_21B = known + more, factor_21B * factor_21B
        done = stop
    exp_2AB[:, done:] = np.exp(powers_LA[:, done:].T @ lines_2LB)
    return exp_2AB.transpose(0, 2, 1)


class JointPricing:
    """Computes the joint Renyi cost of threshold bit and noisy argmax at ``orders_A``, for many vote histograms.

    p(v) is the probability that v passes the threshold, and w is the largest count on neighbouring data. The joint
    moment is yes * (moment of the argmax) + no, with yes = p(v)^alpha p(w)^(1 - alpha), and no the same for 1 - p. It
    is convex in p(w), and p(v) lies between p(v - 1) and p(v + 1): so w = v is never the largest, and only w = v - 1
    and w = v + 1 are computed. Histograms with the same largest count share the factors yes and no, which are given as
    logarithms. With ``logs`` every moment and factor is stored as its logarithm; without, no moment may overflow a
    float.
    """

    def __init__(
        self,
        distinct: DistinctHistograms,
        argmax: TheoremSix,
        orders_A: FloatArray,
        log_yes_SVA: FloatArray,
        log_no_SVA: FloatArray,
        *,
        logs: bool,
    ) -> None:
        self.distinct, self.argmax, self.logs = distinct, argmax, logs
        shared = (orders_A * (orders_A - 1) / argmax.variance, log_yes_SVA, log_no_SVA)
        factors: Iterable[FloatArray] = shared if logs else map(np.exp, shared)
        self.independent_A, self.yes_SVA, self.no_SVA = factors
        self.powers_LA = np.stack([orders_A - 1, np.ones_like(orders_A)])
        # Runs of evenly spaced orders: powers in one are products of earlier ones (see _exp_of_lines).
        bounds = np.flatnonzero(np.diff(np.diff(orders_A), prepend=np.nan, append=np.nan) != 0)
        self.runs = [slice(i, j + 1) for i, j in pairwise(bounds.tolist()) if j - i > 2 * _RUN_START]
        # For each chunk, the number of leading orders at which Theorem 6 may lower the cost.
        self.reach_K = np.searchsorted(orders_A, np.maximum.reduceat(argmax.limit_U, distinct.starts_K))

    def total_exponents(self) -> FloatArray:
        """Return the sum over all queries of (alpha - 1) R, where R is the Renyi cost at order alpha of a query's
        threshold check and answer together, shape (A,)."""
        # (alpha - 1) R where the argmax is charged in full.
        independent_VA = self._exponents(self._join(self.independent_A, self.yes_SVA, self.no_SVA))
        # Beyond its reach a chunk costs what its largest count alone says: add such chunks up by that count.
        weight_VA = np.zeros((len(independent_VA), len(self.independent_A) + 1))
        counts_K = np.add.reduceat(self.distinct.counts_U, self.distinct.starts_K)
        # Plain indexing would count a reach of one group once, however many of its chunks have it.
        np.add.at(weight_VA, (self.distinct.group_K, self.reach_K), counts_K)
        total_A: FloatArray = np.einsum("va,va->a", np.cumsum(weight_VA, axis=1)[:, :-1], independent_VA)
        for rows, moment_BR in self._live_chunks():
            counts_B, total_R = self.distinct.counts_U[rows], total_A[: moment_BR.shape[1]]
            if self.logs:
                total_R += counts_B @ moment_BR
                continue
            # The logarithm of products of as many rows as a float can hold takes far fewer logarithms than rows.
            # Not below e: moments of about 1 have a logarithm of about 0, which cannot be divided by.
            rows_per_product = max(1, int(MAX_EXPONENT / math.log(max(float(moment_BR.max()), math.e))))
            sum_R = np.zeros(moment_BR.shape[1])
            for first in range(0, len(moment_BR), rows_per_product):
                sum_R += np.log(np.multiply.reduce(moment_BR[first : first + rows_per_product], axis=0))
            # Each row once as a factor and its repetitions as a weight: a moment to that power might overflow.
            repeated_B = counts_B > 1
            if repeated_B.any():
                sum_R += (counts_B[repeated_B] - 1) @ np.log(moment_BR[repeated_B])
            total_R += sum_R
        return total_A

    def write_exponents(self, exponent_UA: FloatArray) -> None:
        """Write (alpha - 1) R of every distinct histogram into ``exponent_UA``, where R is the Renyi cost at order
        alpha of its threshold check and answer together."""
        sizes_K = np.diff(self.distinct.starts_K, append=len(exponent_UA))
        independent_VA = self._exponents(self._join(self.independent_A, self.yes_SVA, self.no_SVA))
        exponent_UA[:] = independent_VA[np.repeat(self.distinct.group_K, sizes_K)]
        for rows, moment_BR in self._live_chunks():
            exponent_UA[rows, : moment_BR.shape[1]] = self._exponents(moment_BR)

    def _live_chunks(self) -> Iterator[tuple[slice, FloatArray]]:
        """Yield the chunks of histograms whose cost Theorem 6 may lower: the range of rows of each chunk, and its joint
        moments (B, R) at the orders where the theorem may lower them."""
        starts_K = self.distinct.starts_K
        stops_K = starts_K + np.diff(starts_K, append=len(self.distinct.log_q_U))
        table_K4 = np.stack([self.distinct.group_K, starts_K, stops_K, self.reach_K], axis=1)[self.reach_K > 0]
        if not len(table_K4):
            return
        # Runs of chunks that together span about ``_BLOCK_ROWS`` rows: one matrix product each.
        block_K = (table_K4[:, 1] - table_K4[0, 1]) // _BLOCK_ROWS
        with np.errstate(over="ignore"):  # a moment beyond any float is above the data-independent one
            for block_K4 in np.split(table_K4, np.flatnonzero(np.diff(block_K)) + 1):
                first, last, reach = block_K4[0, 1], block_K4[-1, 2], block_K4[:, 3].max()
                moment_BA = self.argmax.moments(
                    slice(first, last), self.powers_LA[:, :reach], self.runs, self.independent_A[:reach], logs=self.logs
                )
                for group, start, stop, reach in block_K4.tolist():
                    yes_SR, no_SR = self.yes_SVA[:, group, None, :reach], self.no_SVA[:, group, None, :reach]
                    yield slice(start, stop), self._join(moment_BA[start - first : stop - first, :reach], yes_SR, no_SR)

    def _join(self, moment: FloatArray, yes_S: FloatArray, no_S: FloatArray) -> FloatArray:
        if self.logs:
            return join_exponents(moment, yes_S, no_S)
        joint_S = yes_S * moment
        joint_S += no_S
        return np.maximum(joint_S[0], joint_S[1], out=joint_S[0])

    def _exponents(self, moments: FloatArray) -> FloatArray:
        exponents: FloatArray = moments if self.logs else np.log(moments, out=moments)
        np.maximum(exponents, 0.0, out=exponents)  # a divergence: only rounding makes it negative
        return exponents


def join_exponents(exponent: FloatArray, log_yes_S: FloatArray, log_no_S: FloatArray) -> FloatArray:
    """Return (alpha - 1) R, where R is the joint Renyi cost of threshold bit and argmax, from the argmax's own
    ``exponent`` and the logarithms of the factors yes and no of :class:`JointPricing`."""
    below: FloatArray = np.logaddexp(log_yes_S[0] + exponent, log_no_S[0])
    return np.maximum(below, np.logaddexp(log_yes_S[1] + exponent, log_no_S[1]))


_TINY = 1e-250  # probabilities below are added up as logarithms


def log_q(votes_QC: npt.ArrayLike, *, noise_stddev_votes: float, tail: Tail) -> FloatArray:
    """Return ln of a bound on P[noisy argmax is not the plurality class] per query, shape (Q,), at most ln(1 - 1/C).

    It is a union bound over the other classes (Papernot et al. 2018, Proposition 7). ``tail`` names the noise,
    "gaussian" or "discrete". Discrete noise gives exact ties a positive probability, and every tie counts against the
    plurality. ValueError for votes that are not whole numbers >= 0, for a standard deviation that is not positive, or
    for another ``tail``.
    """
    require_positive("noise_stddev_votes", noise_stddev_votes)
    return _log_q_ranked(np.sort(checked_votes(votes_QC), axis=1), noise_stddev_votes, tail)


def gnmax_rdp(log_q_Q: npt.ArrayLike, *, noise_stddev_votes: float, orders_A: npt.ArrayLike) -> FloatArray:
    """Return the RDP of one noisy argmax per query, shape (Q, A) (Papernot et al. 2018, Theorem 6).

    ``log_q_Q``: natural log of a bound on P[outcome is not the plurality], <= 0; ``-inf`` costs 0. The cost is never
    above the data-independent alpha / noise_stddev_votes^2. ValueError for an order <= 1, a positive or undefined
    ``log_q_Q``.
    """
    require_positive("noise_stddev_votes", noise_stddev_votes)
    orders, log_qs = _checked_orders(orders_A), np.asarray(log_q_Q, dtype=np.float64)
    if log_qs.ndim != 1 or not np.all(log_qs <= 0):
        raise ValueError("Expected log_q_Q to be a vector of logarithms of probabilities, each <= 0 and not NaN.")
    distinct_U, inverse_Q = np.unique(log_qs, return_inverse=True) if len(log_qs) > 1 else (log_qs, slice(None))
    return TheoremSix.prepare(distinct_U, noise_stddev_votes**2).rdp(orders)[inverse_Q]


def threshold_rdp(
    votes_QC: npt.ArrayLike, *, threshold: float, threshold_stddev_votes: float, orders_A: npt.ArrayLike, tail: Tail
) -> FloatArray:
    """Return the RDP of the bit 1[largest count + noise >= threshold] per query, shape (Q, A).

    It is computed by Theorem 6 of Papernot et al. 2018: the bit is a vote between two outcomes whose data-independent
    cost alpha / (2 threshold_stddev_votes^2) is that of GNMax with sqrt(2) times the noise; the result is never above
    it. An infinite ``threshold`` does not read the votes and costs 0. Errors as ``log_q``; ValueError for a
    ``threshold`` that is NaN.
    """
    _check_threshold(threshold, threshold_stddev_votes, tail)
    orders = _checked_orders(orders_A)
    # The bit's cost depends on the largest count alone.
    largest_V, inverse_Q = np.unique(checked_votes(votes_QC).max(axis=1), return_inverse=True)
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
    total: bool = False,
) -> FloatArray:
    """Return the joint RDP of threshold bit and noisy argmax of each Confident-GNMax query, shape (Q, A).

    With p(w) the probability that w votes pass the threshold, v the largest count and g the argmax's cost
    (``gnmax_rdp``), the cost at order a is

        max over w = v - 1, v, v + 1 of  ln( p(v)^a p(w)^(1-a) e^((a-1) g) + (1-p(v))^a (1-p(w))^(1-a) ) / (a - 1)

    It is never above ``confident_gnmax_rdp_data_independent``, nor above the sum of ``threshold_rdp`` and
    ``gnmax_rdp``. ``threshold=-inf`` is GNMax alone, ``threshold=inf`` costs 0. Give the votes of every query
    submitted, also of those whose label was withheld. With ``total``, return the sum over queries, shape (A,), which is
    faster because equal histograms are computed once. Errors as ``log_q`` and ``threshold_rdp``.
    """
    _check_threshold(threshold, threshold_stddev_votes, tail)
    require_positive("noise_stddev_votes", noise_stddev_votes)
    # Every row in increasing order: class names do not matter to a cost.
    ranked_QC, orders, increasing_A = np.sort(checked_votes(votes_QC), axis=1), _checked_orders(orders_A), None
    # Sorted, because Theorem 6 applies to leading orders only.
    if np.any(orders[1:] < orders[:-1]):
        increasing_A = np.argsort(orders)
        orders = orders[increasing_A]
    log_q_Q = _log_q_ranked(ranked_QC, noise_stddev_votes, tail)
    bit = (threshold, threshold_stddev_votes, tail)
    if len(ranked_QC) == 1:
        # One online query: nothing to group, nothing to tabulate.
        argmax = TheoremSix.prepare(log_q_Q, noise_stddev_votes**2)
        log_yes_SVA, log_no_SVA = _log_factors(ranked_QC[:, -1], orders, *bit)
        exponent_QA = np.maximum(join_exponents(argmax.rdp(orders) * (orders - 1), log_yes_SVA, log_no_SVA), 0.0)
        rdp_QA = exponent_QA / (orders - 1)
    else:
        distinct = DistinctHistograms.of(ranked_QC[:, -1], log_q_Q)
        argmax = TheoremSix.prepare(distinct.log_q_U, noise_stddev_votes**2)
        log_yes_SVA, log_no_SVA = _log_factors(distinct.largest_V, orders, *bit)
        # (alpha - 1) times alpha / sigma_2^2 and alpha / (2 sigma_1^2), the two steps for any votes: no exponent is
        # larger. Up to `split`, moments fit a float.
        largest_A = orders * (orders - 1) * (1 / noise_stddev_votes**2 + 0.5 / threshold_stddev_votes**2)
        split = int(np.searchsorted(largest_A, MAX_EXPONENT, side="right"))
        exponent_UA = np.empty((1 if total else len(distinct.log_q_U), len(orders)))
        for columns, logs in ((slice(0, split), False), (slice(split, len(orders)), True)):
            if columns.start == columns.stop:
                continue
            factors = log_yes_SVA[..., columns], log_no_SVA[..., columns]
            pricing = JointPricing(distinct, argmax, orders[columns], *factors, logs=logs)
            if total:
                exponent_UA[0, columns] = pricing.total_exponents()
            else:
                pricing.write_exponents(exponent_UA[:, columns])
        exponent_UA /= orders - 1
        rdp_QA = exponent_UA if total else exponent_UA[distinct.inverse_Q]
    stddevs = {"threshold_stddev_votes": threshold_stddev_votes, "noise_stddev_votes": noise_stddev_votes}
    any_votes_A = confident_gnmax_rdp_data_independent(threshold=threshold, **stddevs, orders_A=orders)
    # Rounding alone may leave the range from 0 to the data-independent cost.
    np.clip(rdp_QA, 0.0, len(ranked_QC) * any_votes_A if total else any_votes_A, out=rdp_QA)
    if increasing_A is not None:
        rdp_QA = rdp_QA[:, np.argsort(increasing_A)]
    return rdp_QA[0] if total else rdp_QA


def confident_gnmax_rdp_data_independent(
    *, threshold: float, threshold_stddev_votes: float, noise_stddev_votes: float, orders_A: npt.ArrayLike
) -> FloatArray:
    """Return the RDP of one Confident-GNMax query for any votes, shape (A,): the sum of threshold check and argmax.

    A ``threshold`` of -inf makes the check free, +inf makes both free. A standard deviation of 0 costs ``inf``.
    """
    if math.isnan(threshold):
        raise ValueError("Expected threshold to be a number, got nan.")
    orders = _checked_orders(orders_A)
    if threshold == math.inf:
        return np.zeros(len(orders))
    argmax_A = gaussian_rdp(2.0, "noise_stddev_votes", noise_stddev_votes, orders)
    if threshold == -math.inf:
        return argmax_A
    return argmax_A + gaussian_rdp(1.0, "threshold_stddev_votes", threshold_stddev_votes, orders)


def answer_probability(
    votes_QC: npt.ArrayLike, *, threshold: float, threshold_stddev_votes: float, tail: Tail
) -> FloatArray:
    """Return P[largest count + noise >= threshold] per query, shape (Q,); it is not to be published."""
    _check_threshold(threshold, threshold_stddev_votes, tail)
    largest_Q = checked_votes(votes_QC).max(axis=1)
    if math.isinf(threshold):
        return np.full(len(largest_Q), float(threshold < 0))
    return np.exp(_log_answer_probability(largest_Q, threshold, threshold_stddev_votes, tail)[0])


def _log_factors(
    largest_V: IntArray, orders_A: FloatArray, threshold: float, threshold_stddev: float, tail: Tail
) -> tuple[FloatArray, FloatArray]:
    """Return two arrays (S, V, A) of logarithms, for each largest count v and its neighbours w = v - 1 and v + 1. With
    p(v) the probability that v passes the threshold, they are ln(p(v)^alpha p(w)^(1 - alpha)) and the same for 1 -
    p."""
    # A neighbour's largest count is one less, the same or one more.
    at_3V = largest_V + np.array([[0], [-1], [1]])
    if math.isinf(threshold):  # the bit never looks at the votes
        surely_3V, never_3V = np.zeros(at_3V.shape), np.full(at_3V.shape, NEVER)
        yes_3V, no_3V = (surely_3V, never_3V) if threshold < 0 else (never_3V, surely_3V)
    else:
        yes_3V, no_3V = _log_answer_probability(at_3V, threshold, threshold_stddev, tail)
    log_yes_SVA = (yes_3V[0] - yes_3V[1:])[:, :, None] * (orders_A - 1) + yes_3V[0][:, None]
    return log_yes_SVA, (no_3V[0] - no_3V[1:])[:, :, None] * (orders_A - 1) + no_3V[0][:, None]


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
    return np.minimum(union_Q, math.log1p(-1 / num_classes))


@lru_cache(maxsize=64)
def _log_difference_survival(noise_stddev: float, max_gap: int, tail: Tail) -> FloatArray:
    """Return ln P[N_a - N_b >= g] for gaps g = 0 .. max_gap, where N_a and N_b are the noises of two counts."""
    if tail == "discrete":
        return log_survival_table(noise_stddev, max_gap, of_difference=True)
    if tail == "gaussian":
        return scipy.special.log_ndtr(-np.arange(max_gap + 1) / (math.sqrt(2) * noise_stddev))
    raise ValueError(f"Expected tail 'gaussian' or 'discrete', got {tail!r}.")


def _log_answer_probability(
    largest: IntArray, threshold: float, stddev: float, tail: Tail
) -> tuple[FloatArray, FloatArray]:
    """Return ln p and ln(1 - p) for p = P[largest + N >= threshold] with noise N of ``stddev``, elementwise, for a
    finite threshold."""
    if tail == "discrete":
        # Counts and discrete noise are whole: reaching the threshold is reaching its ceiling.
        return log_survival_and_complement(stddev, math.ceil(threshold) - largest)
    # Both tails by themselves: 1 - p would lose all digits where p rounds to 1.
    margin = (threshold - largest) / stddev
    return scipy.special.log_ndtr(-margin), scipy.special.log_ndtr(margin)


def gaussian_rdp(squared_sensitivity: float, field: str, stddev: float, orders_A: npt.ArrayLike) -> FloatArray:
    """Return the RDP of Gaussian noise of standard deviation ``stddev``, for any votes, shape (A,).

    ``squared_sensitivity`` is 1 for a threshold bit, since the largest count changes by at most 1, and 2 for a noisy
    argmax, since the counts change by at most sqrt(2) in L2 norm. ``field`` names the standard deviation in error
    messages.
    """
    orders = _checked_orders(orders_A)
    if not 0 <= stddev < math.inf:
        raise ValueError(f"Expected 0 <= {field} < inf, got {stddev}.")
    if stddev == 0:
        return np.full(len(orders), math.inf)
    return orders * squared_sensitivity / (2 * stddev**2)


def checked_votes(votes_QC: npt.ArrayLike) -> IntArray:
    """Return the votes as integers. ValueError unless they are whole numbers >= 0, shape (Q, C) with C >= 1."""
    votes = np.asarray(votes_QC)
    if votes.ndim != 2 or votes.shape[1] == 0:
        raise ValueError(f"Expected votes of shape (queries, classes) with at least one class, got {votes.shape}.")
    if votes.dtype.kind not in "iuf" or (votes.dtype.kind == "f" and not np.all(np.isfinite(votes))):
        raise ValueError("Expected finite whole numbers: how many teachers voted for each class; correct the votes.")
    counts = votes.astype(np.int64, copy=False)
    if counts.min(initial=0) < 0 or (votes.dtype.kind == "f" and np.any(counts != votes)):
        raise ValueError("Expected votes to be whole numbers >= 0: the number of teachers per class.")
    return counts


def _checked_orders(orders_A: npt.ArrayLike) -> FloatArray:
    orders = np.asarray(orders_A, dtype=np.float64)
    if orders.ndim != 1 or not len(orders) or not np.all(np.isfinite(orders) & (orders > 1)):
        raise ValueError(f"Expected a non-empty list of finite Renyi orders > 1, got {orders_A!r}.")
    return orders


def _check_threshold(threshold: float, threshold_stddev: float, tail: Tail) -> None:
    if math.isnan(threshold):
        raise ValueError("Expected threshold to be a number, got nan.")
    if math.isfinite(threshold) and abs(threshold) > MAX_THRESHOLD_VOTES:
        raise ValueError(f"Expected |threshold| <= 2^23, inf or -inf, got {threshold}; use inf to answer no query.")
    require_positive("threshold_stddev_votes", threshold_stddev)
    if tail not in ("gaussian", "discrete"):
        raise ValueError(f"Expected tail 'gaussian' or 'discrete', got {tail!r}.")
