"""Thresholds on a model's confidence, so that the error rate of its answers is bounded in every group.

A model answers a record if its confidence, the largest probability that it gives to a class, reaches the threshold of
the record's group; otherwise it leaves the record to a person. The thresholds are computed from a table of test records
that neither trained nor calibrated the model. With probability ``confidence`` over the sample of these records and the
noise of the table, at most a share ``max_error`` of the answers of every group is wrong, in the population from which
the test records were drawn. Nothing is said about another population, about this one after it has changed, or about
records that somebody chose.

    table     A[s, b] records of stratum s in confidence bin b, E[s, b] of them predicted wrongly; + noise on right and
              on wrong ones. A stratum is a group, or a group with a predicted label
    p-value   of "the error rate in the m most confident bins is r or more", with n = A[s, 1..m] and the noises' total
              standard deviation v: P[Binomial(n, r) - r n + v Z <= E - r A]
    sequence  m = m0, m0 + 1, ... until a p-value exceeds the level: the bins before that one are answered

The tests of a stratum are a fixed sequence (Angelopoulos et al. 2021, Learn then Test, arXiv 2110.01052): each is at
the full level, since the first true hypothesis in the order is rejected with at most that probability. This holds only
if m0 is fixed without the outcomes of the test records. It is chosen from the sizes of the groups and from the
confidences of public records, by which test is likely to be passed if the model is as often right as it claims. The
number n is known up to noise: the p-value is that of the largest n of a one-sided interval, which takes a twentieth of
the level. With thresholds of their own the strata divide the level (Bonferroni). With one threshold for all of them,
each test is passed only if every stratum passes it, which needs no division (Berger 1982: intersection-union tests).

**With the reject option IDP3**, which refuses by group and label depending on earlier answers, a bound for a group does
not hold: IDP3 may refuse mostly labels that are right more often. So the strata are then groups with a predicted label.
Whether IDP3 answers a record does not depend on whether its prediction is right, once group and label are given, so the
bound holds for any selection that IDP3 makes.

Shapes: S strata, B bins from the most confident to the least, M public records, N test records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr, gammaln, ndtr, ndtri

from fairpate.types import AnswerRule, ErrorBound, FloatArray, IntArray

NUM_BINS = 12
_OF_SIZE = 1 / 20  # share of the level for the unknown number of records
_LEAST_ERROR = 1 / 4  # of the bound: a model is not believed to be better than this when m0 is chosen


@dataclass(frozen=True, kw_only=True)
class ConfidenceBins:
    """Bins of a model's confidence, fixed by public records.

    ``edges`` (B - 1,) descend: bin b holds the confidences from ``edges[b]`` to below ``edges[b - 1]``, and bin 0 those
    of at least ``edges[0]``. ``shares_SB`` and ``doubts_SB`` are, for the public records of a stratum, the share that
    is in each bin and the mean of one minus their confidence there.
    """

    edges: FloatArray
    shares_SB: FloatArray
    doubts_SB: FloatArray

    @classmethod
    def of(
        cls,
        confidence_M: FloatArray,
        stratum_M: IntArray,
        *,
        num_strata: int,
        num_classes: int,
        num_bins: int = NUM_BINS,
    ) -> ConfidenceBins:
        """Return bins that hold about equally many of the public records with these confidences. Without public records
        the bins are equally wide, from 1 / ``num_classes`` to 1, and each is taken to hold as many."""
        values = np.unique(confidence_M)
        if len(values) > 1:
            # Between two values that occur: no last digit of a sum then decides on which side a record is.
            middles = (values[1:] + values[:-1]) / 2
            wanted = np.quantile(confidence_M, 1 - np.arange(1, num_bins) / num_bins)
            edges = middles[np.minimum(np.searchsorted(middles, wanted), len(middles) - 1)]
        else:
            edges = np.linspace(1, 1 / num_classes, num_bins + 1)[1:-1]
        bin_M = (confidence_M[:, None] < edges).sum(axis=1)
        counts_SB, sums_SB = np.zeros((2, num_strata, num_bins))
        np.add.at(counts_SB, (stratum_M, bin_M), 1.0)
        np.add.at(sums_SB, (stratum_M, bin_M), 1 - confidence_M)
        # A stratum or bin that has no public record is like all of them together; without any, like its bin's middle.
        all_B, ends = counts_SB.sum(axis=0), np.concatenate([[1.0], edges, [1 / num_classes]])
        all_doubts_B = np.where(all_B > 0, sums_SB.sum(axis=0) / np.maximum(all_B, 1), 1 - (ends[1:] + ends[:-1]) / 2)
        all_shares_B = all_B / all_B.sum() if all_B.any() else np.full(num_bins, 1 / num_bins)
        sizes_S1 = counts_SB.sum(axis=1, keepdims=True)
        return cls(
            edges=edges,
            shares_SB=np.where(sizes_S1 > 0, counts_SB / np.maximum(sizes_S1, 1), all_shares_B),
            doubts_SB=np.where(counts_SB > 0, sums_SB / np.maximum(counts_SB, 1), all_doubts_B),
        )

    def numbers(self, confidence_N: FloatArray) -> IntArray:
        """Return the number of each record's bin (N,); it depends on that record alone."""
        return (confidence_N[:, None] < self.edges).sum(axis=1)

    def threshold(self, num_answered: int) -> float | None:
        """Return the least confidence of an answer if the ``num_answered`` most confident bins are answered; None if
        nothing is."""
        if not num_answered:
            return None
        return 0.0 if num_answered > len(self.edges) else float(self.edges[num_answered - 1])


def error_p_value(
    wrong: float, right: float, *, num_bins: int, noise_stddev: float, max_error: float, size_risk: float
) -> float:
    """Return a bound on the probability that the counts are as favourable as these if each record is predicted wrongly
    with probability ``max_error`` or more.

    ``wrong`` and ``right`` are sums over ``num_bins`` cells each, with independent Gaussian noise of standard deviation
    ``noise_stddev`` on every cell. The number of records without noise is at most an upper bound that fails with
    probability ``size_risk``, which is added. Without noise the result is the exact binomial tail.
    """
    total, excess = wrong + right, wrong - max_error * (wrong + right)
    if not noise_stddev:
        return float(bdtr(round(wrong), round(total), max_error))
    if excess >= 0:
        return 1.0
    most = math.floor(total - float(ndtri(size_risk)) * math.sqrt(2 * num_bins) * noise_stddev)
    if most < 1:
        return 1.0
    mean, spread = most * max_error, math.sqrt(most * max_error * (1 - max_error))
    # Ten standard deviations hold all but 1e-20 of the mass.
    wrong_K = np.arange(max(0, math.floor(mean - 10 * spread - 10)), min(most, math.ceil(mean + 10 * spread + 10)) + 1)
    stddev = noise_stddev * math.sqrt(num_bins * ((1 - max_error) ** 2 + max_error**2))
    below_K = ndtr((excess - (wrong_K - mean)) / stddev)
    ways_K = gammaln(most + 1) - gammaln(wrong_K + 1) - gammaln(most - wrong_K + 1)
    log_mass_K = ways_K + wrong_K * math.log(max_error) + (most - wrong_K) * math.log1p(-max_error)
    return min(1.0, float(np.exp(log_mass_K) @ below_K) + size_risk)


def first_tests(sizes_S: FloatArray, bins: ConfidenceBins, bound: ErrorBound, *, noise_stddev: float) -> IntArray:
    """Return m0 (S,), the number of bins of each stratum's first test: the fewest bins with which the test is passed
    with probability 5/6; if no number of bins reaches 5/6, the one with the largest probability.

    ``sizes_S`` are numbers of records that do not depend on whether they are predicted rightly. The error rate is taken
    to be what the model's confidences on public records say, or a quarter of the bound if that is larger. A model that
    is nowhere as confident as the bound asks for may still be right as often: its error rate is taken to be half of
    the bound.
    """
    rate, z = bound.max_error, -float(ndtri(_level(bound, len(sizes_S))))
    size_SB = np.cumsum(np.maximum(sizes_S, 0.0)[:, None] * bins.shares_SB, axis=1)
    wrong_SB = np.cumsum(np.maximum(sizes_S, 0.0)[:, None] * bins.shares_SB * bins.doubts_SB, axis=1)
    believed_SB = np.maximum(wrong_SB / np.maximum(size_SB, 1e-9), _LEAST_ERROR * rate)
    believed_SB[believed_SB.min(axis=1) >= rate] = rate / 2
    cells_B = np.arange(1, size_SB.shape[1] + 1)
    noise_B = cells_B * noise_stddev**2 * ((1 - rate) ** 2 + rate**2)
    reach_SB = z * np.sqrt(noise_B + size_SB * rate * (1 - rate))
    spread_SB = np.sqrt(noise_B + size_SB * believed_SB * (1 - believed_SB)) + 1e-9
    surplus_SB = (size_SB * (rate - believed_SB) - reach_SB) / spread_SB
    likely_SB = surplus_SB >= 1
    return 1 + np.where(likely_SB.any(axis=1), likely_SB.argmax(axis=1), surplus_SB.argmax(axis=1))


def answered_bins(counts_SB2: FloatArray, first_S: IntArray, bound: ErrorBound, *, noise_stddev: float) -> IntArray:
    """Return how many of the most confident bins of each stratum (S,) are answered; 0 if none can be.

    ``counts_SB2`` are the numbers of right and of wrong records (in this order) by stratum and bin, with independent
    noise of standard deviation ``noise_stddev`` on each. ``first_S`` is m0, fixed without the outcomes.
    """
    right_SB, wrong_SB = np.moveaxis(np.cumsum(counts_SB2, axis=1), -1, 0)
    num_strata, num_bins = right_SB.shape
    level = _level(bound, num_strata)

    def passes(stratum: int, m: int) -> bool:
        return level >= error_p_value(
            wrong_SB[stratum, m - 1],
            right_SB[stratum, m - 1],
            num_bins=m,
            noise_stddev=noise_stddev,
            max_error=bound.max_error,
            size_risk=level * _OF_SIZE,
        )

    together = [range(num_strata)] if bound.groups == "all" else [[stratum] for stratum in range(num_strata)]
    answered_S = np.zeros(num_strata, dtype=np.int64)
    for strata in together:
        for m in range(int(first_S[list(strata)].max()), num_bins + 1):
            if not all(passes(stratum, m) for stratum in strata):
                break
            answered_S[list(strata)] = m
    return answered_S


def _level(bound: ErrorBound, num_strata: int) -> float:
    return (1 - bound.confidence) / (1 if bound.groups == "all" else num_strata)


def is_counted(bound: ErrorBound, labels_N: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Return which records the rate is of (N,): all, or for false negatives and false positives those whose true label
    is the second class and the first class."""
    if bound.of == "error":
        return np.ones(len(labels_N), dtype=np.bool_)
    return labels_N == (1 if bound.of == "false_negative" else 0)


def is_confident(
    rule: AnswerRule, probabilities_NC: npt.NDArray[np.floating], labels_N: IntArray, groups_N: IntArray | None
) -> npt.NDArray[np.bool_]:
    """Return which predictions ``rule`` answers (N,), for these probabilities of classes, predicted labels and groups.

    ``groups_N`` may be None if the rule needs no group.
    """
    thresholds_GC = np.array([[math.inf if each is None else each for each in row] for row in rule.thresholds_GC])
    groups_N = np.zeros(len(labels_N), np.int64) if groups_N is None or not rule.needs_group else groups_N
    return np.asarray(confidences(probabilities_NC) >= thresholds_GC[groups_N, labels_N])


def confidences(probabilities_NC: npt.NDArray[np.floating]) -> FloatArray:
    """Return the confidence of each prediction (N,): the largest probability of a class."""
    return probabilities_NC.max(axis=1).astype(np.float64)
