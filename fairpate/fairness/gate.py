"""The demographic-parity gate: it decides whether a label may be released for a group, given all earlier releases.

The same rule is used by CF-GNMax while it answers (FairPATE, Algorithm 1), by P_pre, which filters a student's training
labels (Algorithm 3), and by IDP3, which filters a student's predictions (Algorithm 2). The gate reads released labels
and public groups only, so its decisions are post-processing.

Let r(z, k) be the share of label k among the labels released to group z, including the label to be decided. A label is
accepted during the cold start, and afterwards if its gap is strictly below the margin ``max_disparity``. The gap is
r(z, k) minus the rate of k in all other groups together (``one_vs_rest``), in the other group with the lowest rate
(``pairwise``), or in all groups (``overall``); FairPATE, Appendix H. All three are signed: a release can only raise its
own rate, and a gate on absolute distances would refuse the very labels that close a gap. While no other group has an
answer, the gap is undefined and the label is accepted, as during the cold start.

Counts and gaps are compared in whole numbers: whether a gap reaches the margin never depends on rounding. The margin is
the decimal number that ``max_disparity`` prints: at 0.1 a gap of exactly 1/10 is refused, although the binary number is
larger. Shapes: G groups, C classes, N records in stream order, R streams; ``counts_GC[z, k]`` counts the labels k
released to group z.
"""

import math
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fairpate.types import GateRule, IntArray


class DemographicParityGate:
    """A demographic-parity gate: it decides whether a label may be released for a record of a group, so that the
    released labels differ little between groups.

    A decision depends on the gate's ``rule`` (such as the largest gap) and on ``counts_GC``, the labels released so far
    by group and class. A new gate starts without released labels, or with the counts of an earlier gate.
    """

    def __init__(self, rule: GateRule, *, num_groups: int, num_classes: int, counts_GC: IntArray | None = None) -> None:
        """Create a gate that applies ``rule`` and starts from ``counts_GC``, the labels already released by group;
        None: no labels yet.

        ValueError if ``counts_GC`` has another shape or does not hold integers >= 0.
        """
        self.rule = rule
        if counts_GC is None:
            counts_GC = np.zeros((num_groups, num_classes), dtype=np.int64)
        if counts_GC.shape != (num_groups, num_classes):
            raise ValueError(
                f"Expected counts_GC of shape {(num_groups, num_classes)}, got {counts_GC.shape}; pass those of a gate "
                "with the same groups and classes."
            )
        if not np.issubdtype(counts_GC.dtype, np.integer) or (counts_GC < 0).any():
            raise ValueError("Expected counts_GC to hold integers >= 0; pass the counts_GC of an earlier gate.")
        # Lists and kept sums: a decision reads a handful of numbers, for which arrays are slow.
        self._rows: list[list[int]] = counts_GC.tolist()
        self._group_sizes = [sum(row) for row in self._rows]
        self._label_sizes = [sum(column) for column in zip(*self._rows, strict=True)]
        self._total = sum(self._group_sizes)
        self._margin = None if math.isinf(rule.max_disparity) else as_decimal(rule.max_disparity).as_integer_ratio()

    @property
    def counts_GC(self) -> IntArray:
        """The number of labels released so far by group and label, as a read-only copy."""
        counts_GC = np.array(self._rows, dtype=np.int64)
        counts_GC.flags.writeable = False
        return counts_GC

    def accepts_any(self, group: int) -> bool:
        """Return False if the gate would refuse every label for this group.

        The caller can then refuse the query before any vote is read, at no privacy cost.
        """
        return any(self.admit(group, label, counted=False) for label in range(len(self._label_sizes)))

    def admit(self, group: int, label: int, *, counted: bool = True) -> bool:
        """Return whether ``label`` may be released for ``group``; with ``counted``, count an accepted label as
        released.

        IndexError for a group or label that the gate does not have.
        """
        # Python would take -1 for the last group, and count there.
        if not 0 <= group < len(self._rows):
            raise IndexError(f"Expected 0 <= group < {len(self._rows)}, got {group}.")
        if not 0 <= label < len(self._label_sizes):
            raise IndexError(f"Expected 0 <= label < {len(self._label_sizes)}, got {label}.")
        rule, hits, size = self.rule, self._rows[group][label], self._group_sizes[group]
        rest = self._total - size
        answers = hits if rule.cold_start == "cell" else size
        if rule.cold_start not in ("group", "cell"):
            answers = min(self._group_sizes)
        # Without another group's answers a gap is undefined; refusing then would leave every group waiting for another.
        if self._margin is None or rest == 0 or answers < rule.min_count:
            accepted = True
        else:
            is_below = partial(_is_below, self._margin, hits + 1, size + 1)
            if rule.gap == "one_vs_rest":
                accepted = bool(is_below(self._label_sizes[label] - hits, rest))
            elif rule.gap == "overall":
                # The label on offer counts in its group, and so in all groups together.
                accepted = bool(is_below(self._label_sizes[label] + 1, self._total + 1))
            else:
                accepted = all(
                    is_below(self._rows[other][label], other_size)
                    for other, other_size in enumerate(self._group_sizes)
                    if other != group and other_size
                )
        if accepted and counted:
            self._rows[group][label] += 1
            self._group_sizes[group] += 1
            self._label_sizes[label] += 1
            self._total += 1
        return accepted


def _is_below(margin: tuple[int, int], hits: Any, size: Any, other_hits: Any, other_size: Any) -> Any:
    """Return True where hits / size - other_hits / other_size is strictly below ``margin`` (numerator, denominator).

    Hits and sizes are integers or arrays of integers.
    """
    numerator, denominator = margin
    # Cross-multiplied: whole numbers compare exactly where quotients would round.
    return (hits * other_size - other_hits * size) * denominator < numerator * size * other_size


def filter_stream(
    labels_N: npt.ArrayLike, groups_N: npt.ArrayLike, *, rule: GateRule, num_groups: int, num_classes: int
) -> npt.NDArray[np.bool_]:
    """Filter a stream of labels as FairPATE's P_pre (training labels) and IDP3 (predictions) do: return True for each
    label that a gate without earlier labels accepts, shape (N,).

    The gate decides in stream order, and the order matters.
    """
    labels, groups = np.asarray(labels_N).tolist(), np.asarray(groups_N).tolist()
    if len(labels) != len(groups):
        raise ValueError(
            f"Expected one group per label, got {len(labels)} labels and {len(groups)} groups; pass as many of both."
        )
    gate = DemographicParityGate(rule, num_groups=num_groups, num_classes=num_classes)
    accepted = [gate.admit(group, label) for label, group in zip(labels, groups, strict=True)]
    return np.array(accepted, dtype=np.bool_)


@lru_cache
def as_decimal(margin: float) -> Fraction:
    """Return the gate's margin as an exact fraction, that of its shortest decimal: 0.1 means 1/10, not the nearest
    binary number."""
    return Fraction(repr(float(margin)))


_LARGEST = 2**62  # the difference of two products below this fits int64


def filter_streams(
    labels_RN: IntArray, groups_RN: IntArray, *, rule: GateRule, num_groups: int, num_classes: int
) -> npt.NDArray[np.bool_]:
    """Return :func:`filter_stream` of R streams of N labels at once, shape (R, N), for bootstraps with thousands of
    streams."""
    num_streams, length = labels_RN.shape
    # An infinite margin refuses nothing.
    if math.isinf(rule.max_disparity):
        return np.ones((num_streams, length), dtype=np.bool_)
    margin = as_decimal(rule.max_disparity).as_integer_ratio()
    is_below = partial(_is_below, margin)
    rows_R, accepted_NR = np.arange(num_streams), np.zeros((length, num_streams), dtype=np.bool_)
    # The left side bounds every product in `_is_below`: what int64 does not hold, Python's integers do.
    is_large = (length + 1) ** 2 * max(margin) >= _LARGEST
    counts_RGC = np.zeros((num_streams, num_groups, num_classes), dtype=object if is_large else np.int64)
    # Sums are kept and not added up again: a step reads a few numbers of each stream.
    sizes_RG, labels_RC, total_R = counts_RGC.sum(axis=2), counts_RGC.sum(axis=1), counts_RGC.sum(axis=(1, 2))
    # A decision depends on all earlier ones of its stream, so only the streams are computed together.
    for step, (group_R, label_R) in enumerate(zip(groups_RN.T, labels_RN.T, strict=True)):
        hits_R, size_R = counts_RGC[rows_R, group_R, label_R], sizes_RG[rows_R, group_R]
        all_hits_R = labels_RC[rows_R, label_R]
        answers_R = {"group": size_R, "cell": hits_R}.get(rule.cold_start)
        answers_R = sizes_RG.min(axis=1) if answers_R is None else answers_R
        # No other group has an answer, or cold start: accepted at any gap.
        accepted_R = (total_R == size_R) | (answers_R < rule.min_count)
        offered_R, in_group_R = hits_R + 1, size_R + 1
        if rule.gap == "one_vs_rest":
            accepted_R |= is_below(offered_R, in_group_R, all_hits_R - hits_R, total_R - size_R)
        elif rule.gap == "overall":
            accepted_R |= is_below(offered_R, in_group_R, all_hits_R + 1, total_R + 1)
        else:
            of_label_RG = counts_RGC[rows_R, :, label_R]
            below_RG = is_below(offered_R[:, None], in_group_R[:, None], of_label_RG, sizes_RG)
            own_RG = np.arange(num_groups) == group_R[:, None]
            accepted_R |= (below_RG | own_RG | (sizes_RG == 0)).all(axis=1)
        # A refused label adds 0; each stream has one label a step, so that no place occurs twice.
        counts_RGC[rows_R, group_R, label_R] = hits_R + accepted_R
        sizes_RG[rows_R, group_R] = size_R + accepted_R
        labels_RC[rows_R, label_R] = all_hits_R + accepted_R
        total_R = total_R + accepted_R
        accepted_NR[step] = accepted_R
    return accepted_NR.T
