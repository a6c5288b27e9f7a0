"""The demographic-parity gate: may this label be released for this group, given what was released before?

One rule serves three places: CF-GNMax while it answers (FairPATE, Algorithm 1), P_pre in front of a student
(Algorithm 3) and IDP3 behind one (Algorithm 2). The gate sees released labels and public groups only, so each of
its decisions is post-processing; votes, models and budgets are unknown to it.

Counts are integers and gaps are fractions: whether a gap reaches the margin never depends on rounding. Shapes: G
groups, C classes, N records in stream order; ``counts_GC[z, k]`` counts the labels k released to group z.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from fairpate.types import GapDefinition, GateRule, IntArray

DecisionReason = Literal["cold_start", "within_margin", "gap_exceeded"]


@dataclass(frozen=True, kw_only=True)
class GateDecision:
    """Whether a label may be released, why, and the gap its release would leave (NaN during the cold start)."""

    accepted: bool
    reason: DecisionReason
    gap: float


def tentative_gap(counts_GC: IntArray, *, group: int, label: int, gap: GapDefinition) -> Fraction | None:
    """The gap after one more ``label`` for ``group``; None while no other group has an answer.

    The excess of r(group, label) over the rate of the label in all other groups together (``one_vs_rest``), in the
    other group that has it least (``pairwise``), or in all groups (``overall``); FairPATE, Appendix H. All three
    are signed: a release can only raise its own rate, and a gate on absolute distances would refuse the very
    labels that close a gap. (On the appendix's data it soon refuses everything; signed, it answers about as many
    as published.)
    """
    rows_GC = counts_GC.tolist()
    size_G = [sum(row) for row in rows_GC]
    hits_G = [row[label] for row in rows_GC]
    size_G[group] += 1
    hits_G[group] += 1
    rest_size, rest_hits = sum(size_G) - size_G[group], sum(hits_G) - hits_G[group]
    if rest_size == 0:
        return None
    rate = Fraction(hits_G[group], size_G[group])
    if gap == "one_vs_rest":
        return rate - Fraction(rest_hits, rest_size)
    if gap == "overall":
        return rate - Fraction(sum(hits_G), sum(size_G))
    return max(
        rate - Fraction(hits, size)
        for other, (hits, size) in enumerate(zip(hits_G, size_G, strict=True))
        if other != group and size
    )


def decide(counts_GC: IntArray, *, rule: GateRule, group: int, label: int) -> GateDecision:
    """Accept during the cold start; afterwards accept if the tentative gap is strictly below the margin.

    A gap that is undefined because no other group has an answer counts as cold start. The margin is the decimal
    that ``max_disparity`` prints: at 0.1 a gap of exactly 1/10 is refused, although the binary number is larger.
    IndexError for a group or label outside ``counts_GC``. Changes nothing.
    """
    num_groups, num_classes = counts_GC.shape
    _check_cell(num_groups, num_classes, group, label)
    gap = None
    if not _is_cold(counts_GC, rule, group, label):
        gap = tentative_gap(counts_GC, group=group, label=label, gap=rule.gap)
    if gap is None:
        return GateDecision(accepted=True, reason="cold_start", gap=math.nan)
    within = _is_below(gap, rule.max_disparity)
    return GateDecision(accepted=within, reason="within_margin" if within else "gap_exceeded", gap=float(gap))


class DemographicParityGate:
    """A rule and the counts of what was released under it.

    Starts empty, or from ``counts_GC`` of an earlier gate to resume: decisions depend on the counts alone.
    """

    def __init__(self, rule: GateRule, *, num_groups: int, num_classes: int, counts_GC: IntArray | None = None) -> None:
        """ValueError when ``counts_GC`` has another shape, or holds anything but integers >= 0."""
        self.rule = rule
        if counts_GC is None:
            counts_GC = np.zeros((num_groups, num_classes), dtype=np.int64)
        if counts_GC.shape != (num_groups, num_classes):
            raise ValueError(f"Expected counts_GC of shape {(num_groups, num_classes)}, got {counts_GC.shape}.")
        if not np.issubdtype(counts_GC.dtype, np.integer) or (counts_GC < 0).any():
            raise ValueError("Expected counts_GC to hold integers >= 0.")
        # Lists and kept sums: a decision reads a handful of numbers, for which arrays are slow.
        self._rows: list[list[int]] = counts_GC.tolist()
        self._group_sizes = [sum(row) for row in self._rows]
        self._label_sizes = [sum(column) for column in zip(*self._rows, strict=True)]
        self._total = sum(self._group_sizes)
        self._margin: tuple[int, int] | None = None
        if not math.isinf(rule.max_disparity):
            self._margin = as_decimal(rule.max_disparity).as_integer_ratio()

    @property
    def counts_GC(self) -> IntArray:
        """How often each label was released to each group: a read-only copy."""
        counts_GC = np.array(self._rows, dtype=np.int64)
        counts_GC.flags.writeable = False
        return counts_GC

    def offer(self, group: int, label: int) -> GateDecision:
        """Decide on ``label`` for ``group`` and, when accepted, count it as released."""
        decision = decide(self.counts_GC, rule=self.rule, group=group, label=label)
        if decision.accepted:
            self._count(group, label)
        return decision

    def admit(self, group: int, label: int) -> bool:
        """``offer(group, label).accepted`` without the words: an order of magnitude faster."""
        accepted = self._accepts(group, label)
        if accepted:
            self._count(group, label)
        return accepted

    def accepts_any(self, group: int) -> bool:
        """False if every label would be refused for this group: refuse before any vote is read, at no cost."""
        return any(self._accepts(group, label) for label in range(len(self._label_sizes)))

    def _count(self, group: int, label: int) -> None:
        self._rows[group][label] += 1
        self._group_sizes[group] += 1
        self._label_sizes[label] += 1
        self._total += 1

    def _accepts(self, group: int, label: int) -> bool:
        """``decide(...).accepted`` in whole numbers, from sums that are kept."""
        _check_cell(len(self._rows), len(self._label_sizes), group, label)
        rule, hits, size = self.rule, self._rows[group][label], self._group_sizes[group]
        rest = self._total - size
        if rest == 0 or self._is_cold(group, label):
            return True
        if self._margin is None:
            return rule.max_disparity > 0
        rest_hits = self._label_sizes[label] - hits
        if rule.gap == "one_vs_rest":
            return self._is_below(hits + 1, size + 1, rest_hits, rest)
        if rule.gap == "overall":
            # The label on offer counts in its group, and so in all groups together.
            return self._is_below(hits + 1, size + 1, rest_hits + hits + 1, self._total + 1)
        return all(
            self._is_below(hits + 1, size + 1, self._rows[other][label], other_size)
            for other, other_size in enumerate(self._group_sizes)
            if other != group and other_size
        )

    def _is_cold(self, group: int, label: int) -> bool:
        if self.rule.cold_start == "group":
            answers: int = self._group_sizes[group]
        elif self.rule.cold_start == "cell":
            answers = self._rows[group][label]
        else:
            answers = min(self._group_sizes)
        return answers < self.rule.min_count

    def _is_below(self, hits: int, size: int, other_hits: int, other_size: int) -> bool:
        """Whether hits / size - other_hits / other_size stays strictly below the margin."""
        assert self._margin is not None
        numerator, denominator = self._margin
        # Cross-multiplied: whole numbers compare exactly where quotients would round.
        return (hits * other_size - other_hits * size) * denominator < numerator * size * other_size


def filter_stream(
    labels_N: npt.ArrayLike, groups_N: npt.ArrayLike, *, rule: GateRule, num_groups: int, num_classes: int
) -> npt.NDArray[np.bool_]:
    """P_pre and IDP3: True where a fresh gate accepts the label, in stream order (the order matters)."""
    labels, groups = np.asarray(labels_N).tolist(), np.asarray(groups_N).tolist()
    if len(labels) != len(groups):
        raise ValueError(f"Expected one group per label, got {len(labels)} labels and {len(groups)} groups.")
    gate = DemographicParityGate(rule, num_groups=num_groups, num_classes=num_classes)
    accepted = [gate.offer(group, label).accepted for label, group in zip(labels, groups, strict=True)]
    return np.array(accepted, dtype=np.bool_)


def _is_cold(counts_GC: IntArray, rule: GateRule, group: int, label: int) -> bool:
    if rule.cold_start == "group":
        return int(counts_GC[group].sum()) < rule.min_count
    if rule.cold_start == "cell":
        return int(counts_GC[group, label]) < rule.min_count
    return int(counts_GC.sum(axis=1).min()) < rule.min_count


def _is_below(gap: Fraction, margin: float) -> bool:
    return margin > 0 if math.isinf(margin) else gap < as_decimal(margin)


@lru_cache
def as_decimal(margin: float) -> Fraction:
    """A margin as the shortest decimal of its float: 0.1 means 1/10 and not the binary number."""
    return Fraction(repr(float(margin)))


def _check_cell(num_groups: int, num_classes: int, group: int, label: int) -> None:
    if not 0 <= group < num_groups:
        raise IndexError(f"Expected 0 <= group < {num_groups}, got {group}.")
    if not 0 <= label < num_classes:
        raise IndexError(f"Expected 0 <= label < {num_classes}, got {label}.")
