"""IDP3 under other orders of the same predictions: how much of its result is the order's doing.

The reject option (FairPATE, Algorithm 2) answers or refuses each prediction in view of the answers before it, so
accuracy, coverage and gap belong to an order of the records and not to the student alone. Here the same predictions
pass a fresh gate in several random orders. What the gate accepts is left to ``fairpate.fairness.gate``.

An interval that left the answered records as they are would resample away what the gate balanced, and leave out the gap
that it holds: so a replicate is a sample of records, or of persons with all of their records, in random order, which
pass a gate of their own.

Accuracy and gaps are over answered records. Undefined numbers are NaN here and null in JSON. Shapes: N records, G
groups, C classes, A states of one order: before its first answer and after each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fairpate.fairness import gaps, rates
from fairpate.fairness.gate import filter_stream
from fairpate.fairness.gate_streams import filter_streams
from fairpate.strict_json import strict
from fairpate.types import GateRule, IntArray


@dataclass(frozen=True, kw_only=True)
class OrderResult:
    """What one order gave. Gaps are ``dp_one_vs_rest`` over the records answered so far.

    ``final_gap`` is the gap after the last answer. ``max_gap`` is the largest gap from answer number
    ``max_gap_from`` on (counted from 1): the answer by which every group that has records got ``rule.min_count``
    answers, and at least ``least_cell`` of the spread. The latter two are undefined (NaN and None) when a group never
    gets that many, or when there is only one group; ``final_gap`` when a group has answers, but fewer than
    ``least_cell``.
    """

    accuracy: float
    coverage: float
    coverage_G: tuple[float, ...]
    final_gap: float
    max_gap: float
    max_gap_from: int | None


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean, least and greatest value over orders, NaN when no order has one; ``n_undefined`` orders were left out."""

    mean: float
    low: float
    high: float
    n_undefined: int


@dataclass(frozen=True, kw_only=True)
class RejectOptionSpread:
    """The reject option over several orders of the same predictions, measured on ``num_records``: each order, and the
    spread."""

    rule: GateRule
    num_records: int
    orders: tuple[OrderResult, ...]
    least_cell: int = 1

    @property
    def answers_needed(self) -> int:
        """How many answers every group has got before the largest gap on the way counts."""
        return max(self.rule.min_count, self.least_cell, 1)

    @property
    def accuracy(self) -> Spread:
        """Accuracy on answered records."""
        return _spread([order.accuracy for order in self.orders])

    @property
    def coverage(self) -> Spread:
        """The share of records that were answered."""
        return _spread([order.coverage for order in self.orders])

    @property
    def coverage_G(self) -> tuple[Spread, ...]:
        """The same for each group's records."""
        return tuple(_spread(shares) for shares in zip(*(order.coverage_G for order in self.orders), strict=True))

    @property
    def final_gap(self) -> Spread:
        """The gap after the last answer."""
        return _spread([order.final_gap for order in self.orders])

    @property
    def max_gap(self) -> Spread:
        """The largest gap after the cold start."""
        return _spread([order.max_gap for order in self.orders])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; undefined numbers are null, and so is the margin of a gate that is off."""
        spreads = ("accuracy", "coverage", "final_gap", "max_gap")
        plain: dict[str, Any] = strict(
            {
                "rule": asdict(self.rule),
                "num_records": self.num_records,
                **{name: asdict(getattr(self, name)) for name in spreads},
                "coverage_G": [asdict(spread) for spread in self.coverage_G],
                "orders": [asdict(order) for order in self.orders],
            }
        )
        return plain


def reject_option_spread(
    labels_N: npt.ArrayLike,
    groups_N: npt.ArrayLike,
    *,
    true_labels_N: npt.ArrayLike,
    rule: GateRule,
    num_groups: int,
    num_classes: int,
    generator: np.random.Generator,
    num_orders: int = 10,
    kept_N: npt.ArrayLike | None = None,
    least_cell: int = 1,
) -> RejectOptionSpread:
    """Pass the predicted ``labels_N`` through a fresh gate in ``num_orders`` random orders.

    ``true_labels_N`` serve accuracy alone. Everything passes the gate, and ``kept_N`` of it is measured.
    ValueError for lengths or values that do not fit, IndexError for a label or group that the gate does not know.
    """
    labels, groups, truth = np.asarray(labels_N), np.asarray(groups_N), np.asarray(true_labels_N)
    if not len(labels) == len(groups) == len(truth):
        raise ValueError(
            f"Expected as many labels, groups and true labels, got {len(labels)}, {len(groups)} and {len(truth)}."
        )
    if num_orders < 1:
        raise ValueError(f"Expected num_orders >= 1, got {num_orders}.")
    kept = np.ones(len(labels), np.bool_) if kept_N is None else np.asarray(kept_N, np.bool_)
    shuffles = [generator.permutation(len(labels)) for _ in range(num_orders)]
    return RejectOptionSpread(
        rule=rule,
        num_records=int(kept.sum()),
        orders=tuple(
            _one_order(
                *(each[order] for each in (labels, groups, truth, kept)),
                rule=rule,
                num_groups=num_groups,
                num_classes=num_classes,
                least_cell=least_cell,
            )
            for order in shuffles
        ),
        least_cell=least_cell,
    )


def resampled_reject_option(
    labels_N: npt.ArrayLike,
    groups_N: npt.ArrayLike,
    *,
    true_labels_N: npt.ArrayLike,
    rule: GateRule,
    num_groups: int,
    num_classes: int,
    generator: np.random.Generator,
    persons_N: npt.ArrayLike | None = None,
    num_replicates: int = 200,
) -> rates.FloatArray:
    """The table (R, G, Y, C) of what the gate answers of each bootstrap sample of predictions.

    ``persons_N`` says whose each record is: then persons are drawn, each with all of its records.
    """
    labels, groups, truth = np.asarray(labels_N), np.asarray(groups_N), np.asarray(true_labels_N)
    joint_RGYC = np.zeros((num_replicates, num_groups, num_classes, num_classes))
    if not len(labels):
        return joint_RGYC
    if persons_N is None:
        drawn_RN = generator.integers(len(labels), size=(num_replicates, len(labels)))
        length_R = np.full(num_replicates, len(labels))
    else:
        drawn_RN, length_R = _drawn_persons(np.asarray(persons_N), generator, num_replicates)
    answered_RN = filter_streams(
        labels[drawn_RN], groups[drawn_RN], rule=rule, num_groups=num_groups, num_classes=num_classes
    )
    # What fills a line up was answered last, and counts for nothing.
    answered_RN &= np.arange(drawn_RN.shape[1]) < length_R[:, None]
    # One row per answer, of all replicates together: the tables are then one addition.
    replicate_A, place_A = answered_RN.nonzero()
    row_A = drawn_RN[replicate_A, place_A]
    np.add.at(joint_RGYC, (replicate_A, groups[row_A], truth[row_A], labels[row_A]), 1.0)
    return joint_RGYC


def _drawn_persons(
    persons_N: npt.NDArray[Any], generator: np.random.Generator, num_replicates: int
) -> tuple[IntArray, IntArray]:
    """Rows of as many persons as there are, in random order, (R, N), and how many of each line count.

    Samples have different lengths; what fills a line up comes last, when the gate has seen all that counts.
    """
    _, person_N, size_P = np.unique(persons_N, return_inverse=True, return_counts=True)
    by_person_N, start_P = person_N.argsort(kind="stable"), size_P.cumsum() - size_P
    drawn_RP = generator.integers(len(size_P), size=(num_replicates, len(size_P)))
    length_R: IntArray = size_P[drawn_RP].sum(axis=1)
    rows_RN = np.zeros((num_replicates, int(length_R.max())), dtype=np.int64)
    for line_N, drawn_P, length in zip(rows_RN, drawn_RP, length_R, strict=True):
        sizes = size_P[drawn_P]
        # Each person's run of rows, shifted to where it lies among all.
        places = np.arange(length) + np.repeat(start_P[drawn_P] - (sizes.cumsum() - sizes), sizes)
        line_N[:length] = generator.permutation(by_person_N[places])
    return rows_RN, length_R


def _one_order(
    labels_N: npt.NDArray[Any],
    groups_N: npt.NDArray[Any],
    truth_N: npt.NDArray[Any],
    kept_N: npt.NDArray[np.bool_],
    *,
    rule: GateRule,
    num_groups: int,
    num_classes: int,
    least_cell: int,
) -> OrderResult:
    answered = filter_stream(labels_N, groups_N, rule=rule, num_groups=num_groups, num_classes=num_classes)
    labels_N, groups_N, truth_N, answered = (each[kept_N] for each in (labels_N, groups_N, truth_N, answered))
    course_AGYC = rates.cumulative_tables(
        labels_N[answered], groups_N[answered], num_groups=num_groups, num_classes=num_classes
    )
    course_AGYC = np.concatenate([np.zeros((1, *course_AGYC.shape[1:])), course_AGYC])
    gap_A = gaps.dp_one_vs_rest.values(course_AGYC)
    start = _cold_start_end(course_AGYC, present=np.unique(groups_N), min_count=max(rule.min_count, least_cell, 1))
    size_G = course_AGYC[-1].sum(axis=(-2, -1))
    is_known = not ((size_G > 0) & (size_G < least_cell)).any()
    coverage, coverage_G = rates.coverages(groups_N, answered, num_groups=num_groups)
    return OrderResult(
        accuracy=float(rates.divide((labels_N == truth_N)[answered].sum(), answered.sum())),
        coverage=coverage,
        coverage_G=tuple(coverage_G.tolist()),
        final_gap=float(gap_A[-1]) if is_known else math.nan,
        max_gap=math.nan if start is None else float(gap_A[start:].max()),
        max_gap_from=start,
    )


def _cold_start_end(course_AGYC: rates.FloatArray, *, present: npt.NDArray[Any], min_count: int) -> int | None:
    if len(present) < 2:
        return None
    warm_A = (course_AGYC.sum(axis=(-2, -1))[:, present] >= min_count).all(axis=-1)
    return int(warm_A.argmax()) if warm_A.any() else None


def _spread(values: Sequence[float]) -> Spread:
    defined = [value for value in values if not math.isnan(value)]
    mean, low, high = (sum(defined) / len(defined), min(defined), max(defined)) if defined else (math.nan,) * 3
    return Spread(mean=mean, low=low, high=high, n_undefined=len(values) - len(defined))
