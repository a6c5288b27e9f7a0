"""Noisy counts as answers: where the price holds whatever the votes, they cost what their argmax costs.

The argmax is a function of the noisy counts, and the data-independent price of GNMax is that of the counts: one teacher
moves two of them by one each. Released together they also say how sure the teachers were. A price that depends on
votes would be that of the argmax alone (Papernot et al. 2018, Theorem 6), so there is none here.

What counts m of T teachers and noise sigma say of the label, by Bayes: shares of the classes p are uniform on the
simplex, T votes n are drawn from them, m = n + N_Z(0, sigma^2), and the label is one more vote.

    P[n | m]  ~  prod_c exp(-(m_c - n_c)^2 / (2 sigma^2)),  n_c >= 0,  sum_c n_c = T
    P[label = c | m] = (E[n_c | m] + 1) / (T + C)

for uniform shares make all tables of T votes equally likely, and n + 1 votes over T + C is the mean of p given n
(Laplace's rule of succession). The sum over tables is a convolution over classes. That the check of consensus passed is
not used.

Shapes: Q queries, C classes, K = T + 1 values of a count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import scipy

from aggregator.gnmax import ConfidentVotes, labels_of
from aggregator.mechanism import FloatArray, Outcome, gated
from fairpate.fairness.gate import DemographicParityGate
from fairpate.privacy.discrete_gaussian import NoiseSource
from fairpate.types import IntArray, ReleaseKind

_AT_ONCE = 64
# The shift matters to rounding alone: 2^-40 of where it is looked for is more than enough.
_HALVINGS = 40
_LOG_ROOT_TAU = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, kw_only=True)
class ConfidentCounts(ConfidentVotes):
    """Confident-GNMax whose answers come with all noisy counts. The gate looks at the label alone."""

    name: ClassVar[str] = "confident_counts"
    releases: ClassVar[ReleaseKind] = "counts"

    def answer(
        self,
        votes_QC: IntArray,
        *,
        groups: Sequence[int],
        keys: Sequence[str],
        gate: DemographicParityGate,
        source: NoiseSource,
    ) -> list[Outcome]:
        """The outcomes of Confident-GNMax from the same source, answers with the counts that they come from."""
        words = source.words(keys, 1 + votes_QC.shape[1])
        confident, noisy_QC = self.noisy_counts(votes_QC, words, source)
        outcomes = gated(labels_of(noisy_QC, confident, keys=keys, source=source), groups, gate)
        # After the gate: the counts behind a label that it refused are not released.
        for query, counts_C in zip(confident.tolist(), noisy_QC.tolist(), strict=True):
            if outcomes[query].label is not None:
                outcomes[query] = replace(outcomes[query], counts=tuple(counts_C))
        return outcomes

    def describe(self) -> str:
        """As Confident-GNMax, and what is released."""
        return f"{super().describe()}, noisy counts released with every label"

    def chances(self, counts_QC: IntArray, *, num_teachers: int) -> FloatArray:
        """As :func:`label_chances`."""
        return label_chances(counts_QC, num_teachers=num_teachers, noise_stddev_votes=self.noise_stddev_votes)


def label_chances(counts_QC: IntArray, *, num_teachers: int, noise_stddev_votes: float) -> FloatArray:
    """P[label = c | noisy counts], shape (Q, C), as the module says; exact for discrete Gaussian noise.

    ValueError unless there are two classes or more, a teacher and noise.
    """
    if counts_QC.ndim != 2 or counts_QC.shape[1] < 2:
        raise ValueError(f"Expected counts for at least two classes, got shape {counts_QC.shape}.")
    if num_teachers < 1 or not noise_stddev_votes > 0:
        raise ValueError(
            f"Expected num_teachers >= 1 and noise_stddev_votes > 0, got {num_teachers}, {noise_stddev_votes}."
        )
    num_classes = counts_QC.shape[1]
    parts = [np.zeros((0, num_classes))]
    for start in range(0, len(counts_QC), _AT_ONCE):
        parts.append(_expected_votes(counts_QC[start : start + _AT_ONCE], num_teachers, noise_stddev_votes))
    chances_QC: FloatArray = (np.concatenate(parts) + 1) / (num_teachers + num_classes)
    return chances_QC


def _expected_votes(counts_QC: IntArray, total: int, stddev: float) -> FloatArray:
    """E[n | m], shape (Q, C)."""
    votes_K = np.arange(total + 1)
    # As votes sum to the total, moving all counts together changes nothing but rounding, which is least where the
    # total is a likely sum of independent classes.
    centred_QC = counts_QC + _shift_to(counts_QC, total, stddev)[:, None]
    # Less its maximum, so that no row underflows to zeros: a factor per row cancels in the expectation.
    log_weight_QCK = -0.5 * ((votes_K - centred_QC[:, :, None]) / stddev) ** 2
    weight_CQK = np.exp(log_weight_QCK - log_weight_QCK.max(axis=2, keepdims=True)).swapaxes(0, 1)
    # Of all classes but one, by products from both ends: 3 C convolutions in the place of C^2.
    before, after = list(_products(weight_CQK)), list(_products(weight_CQK[::-1]))[::-1]
    # Reversed: where this class has n votes, the others have the rest of the total.
    joint_CQK = weight_CQK * np.stack([_convolved(b, a)[:, ::-1] for b, a in zip(before, after, strict=True)])
    expected_CQ = (joint_CQK @ votes_K) / joint_CQK.sum(axis=2)
    # Rounding alone moves their sum.
    expected_QC: FloatArray = (total * expected_CQ / expected_CQ.sum(axis=0)).T
    return expected_QC


def _shift_to(counts_QC: IntArray, total: int, stddev: float) -> FloatArray:
    """What to add to all counts of a row, (Q,), for their expectations, were each class alone, to sum to ``total``.

    With u a count over sigma, that of a count that is not negative is sigma (u + phi(u) / Phi(u)); it is below
    sigma / -u where u < 0, and above u sigma always: between these two the shift is halved.
    """
    most_Q, num_classes = counts_QC.max(axis=1).astype(np.float64), counts_QC.shape[1]
    low_Q: FloatArray = -most_Q - num_classes * stddev**2 / total
    high_Q: FloatArray = total - most_Q
    for _ in range(_HALVINGS):
        middle_Q = (low_Q + high_Q) / 2
        u_QC = (counts_QC + middle_Q[:, None]) / stddev
        # The ratio phi / Phi from logarithms: far below 0 both underflow, and their quotient does not.
        expected_Q = stddev * (u_QC + np.exp(-0.5 * u_QC**2 - _LOG_ROOT_TAU - scipy.special.log_ndtr(u_QC))).sum(axis=1)
        too_low_Q = expected_Q < total
        low_Q, high_Q = np.where(too_low_Q, middle_Q, low_Q), np.where(too_low_Q, high_Q, middle_Q)
    return high_Q


def _products(weight_CQK: FloatArray) -> Iterator[FloatArray]:
    """Before each class, the weight of every sum of the votes of the classes before it, up to a factor per query."""
    product_QK = np.zeros(weight_CQK.shape[1:])
    product_QK[:, 0] = 1.0
    for weight_QK in weight_CQK:
        yield product_QK
        product_QK = _convolved(product_QK, weight_QK)


def _convolved(a_QK: FloatArray, b_QK: FloatArray) -> FloatArray:
    # A transform leaves small negative numbers where there is no weight; and only ratios matter, so rows are scaled.
    product_QK = np.maximum(scipy.signal.fftconvolve(a_QK, b_QK, axes=1)[:, : a_QK.shape[1]], 0.0)
    scaled_QK: FloatArray = product_QK / product_QK.max(axis=1, keepdims=True)
    return scaled_QK
