"""The demographic-parity gate over many streams side by side: what :func:`filter_stream` says of each, step by step.

For resampling, where thousands of streams of one length pass fresh gates. Margins are compared in whole numbers, as in
:mod:`fairpate.fairness.gate`. Shapes: R streams, N labels of each, G groups, C classes.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from fairpate.fairness.gate import as_decimal, filter_stream
from fairpate.types import GateRule, IntArray

Mask = npt.NDArray[np.bool_]
_LARGEST = 2**62  # the difference of two such products is in int64 too


def filter_streams(
    labels_RN: IntArray, groups_RN: IntArray, *, rule: GateRule, num_groups: int, num_classes: int
) -> Mask:
    """True where a fresh gate of its row accepts the label, (R, N)."""
    num_streams, length = labels_RN.shape
    margin = None if math.isinf(rule.max_disparity) else as_decimal(rule.max_disparity)
    if margin is not None and (length + 1) ** 2 * max(margin.as_integer_ratio()) >= _LARGEST:
        # Products that int64 does not hold.
        rows = [
            filter_stream(labels, groups, rule=rule, num_groups=num_groups, num_classes=num_classes)
            for labels, groups in zip(labels_RN, groups_RN, strict=True)
        ]
        return np.array(rows, dtype=np.bool_).reshape(num_streams, length)
    # An infinite margin refuses nothing.
    if margin is None and rule.max_disparity > 0:
        return np.ones((num_streams, length), dtype=np.bool_)
    gates = _Gates(rule, margin, num_streams, num_groups, num_classes)
    accepted_NR = [gates.admit(groups_R, labels_R) for groups_R, labels_R in zip(groups_RN.T, labels_RN.T, strict=True)]
    return np.array(accepted_NR, dtype=np.bool_).reshape(length, num_streams).T


class _Gates:
    """R gates that have each seen as many offers."""

    def __init__(self, rule: GateRule, margin: Fraction | None, num_streams: int, num_groups: int, num_classes: int):
        self._rule, self._margin = rule, margin
        self._rows_R = np.arange(num_streams)
        self._counts_RGC = np.zeros((num_streams, num_groups, num_classes), dtype=np.int64)
        self._sizes_RG = np.zeros((num_streams, num_groups), dtype=np.int64)

    def admit(self, group_R: IntArray, label_R: IntArray) -> Mask:
        """Whether each accepts its label; what is accepted is counted."""
        rows_R = self._rows_R
        hits_R, size_R = self._counts_RGC[rows_R, group_R, label_R], self._sizes_RG[rows_R, group_R]
        total_R = self._sizes_RG.sum(axis=1)
        # Nobody else has an answer, or the cold start: accepted whatever the gap.
        accepted_R = (total_R == size_R) | self._is_cold(hits_R, size_R)
        if self._margin is not None:
            accepted_R |= self._keeps_margin(group_R, label_R, hits_R + 1, size_R + 1, total_R)
        np.add.at(self._counts_RGC, (rows_R, group_R, label_R), accepted_R)
        np.add.at(self._sizes_RG, (rows_R, group_R), accepted_R)
        admitted_R: Mask = accepted_R
        return admitted_R

    def _is_cold(self, hits_R: IntArray, size_R: IntArray) -> Mask:
        counted = {"group": size_R, "cell": hits_R}
        answers_R = counted.get(self._rule.cold_start)
        if answers_R is None:
            answers_R = self._sizes_RG.min(axis=1)
        cold_R: Mask = answers_R < self._rule.min_count
        return cold_R

    def _keeps_margin(
        self, group_R: IntArray, label_R: IntArray, hits_R: IntArray, size_R: IntArray, total_R: IntArray
    ) -> Mask:
        """``hits_R`` and ``size_R`` count the label that is offered, ``total_R`` does not."""
        of_label_RG = self._counts_RGC[self._rows_R, :, label_R]
        all_hits_R = of_label_RG.sum(axis=1)
        if self._rule.gap == "one_vs_rest":
            return self._is_below(hits_R, size_R, all_hits_R - hits_R + 1, total_R - size_R + 1)
        if self._rule.gap == "overall":
            return self._is_below(hits_R, size_R, all_hits_R + 1, total_R + 1)
        below_RG = self._is_below(hits_R[:, None], size_R[:, None], of_label_RG, self._sizes_RG)
        own_RG = np.arange(self._sizes_RG.shape[1]) == group_R[:, None]
        kept_R: Mask = (below_RG | own_RG | (self._sizes_RG == 0)).all(axis=1)
        return kept_R

    def _is_below(self, hits: IntArray, size: IntArray, other_hits: IntArray, other_size: IntArray) -> Mask:
        assert self._margin is not None
        numerator, denominator = self._margin.as_integer_ratio()
        below: Mask = (hits * other_size - other_hits * size) * denominator < numerator * size * other_size
        return below
