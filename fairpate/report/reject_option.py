"""The reject option IDP3 (FairPATE, Algorithm 2), measured: it answers or refuses each prediction depending on earlier
answers, so its numbers belong to one order of the records. Here the same predictions pass a fresh gate in several
random orders, and in each bootstrap replicate.

Shapes: N records, G groups, R bootstrap replicates, A states of the gate in one order of the records (before its first
answer and after each answer).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fairpate.fairness import rates
from fairpate.fairness.gate import filter_stream, filter_streams
from fairpate.report.small_cells import is_small, unit_counts
from fairpate.types import FloatArray, GateRule, strict


@dataclass(frozen=True, kw_only=True)
class OrderResult:
    """The results of a reject option (IDP3) for one order of the records. Its gaps are the demographic-parity gaps
    ``dp_one_vs_rest`` over the records answered so far.

    ``final_gap`` is the gap after the last answer; it is NaN if a group has answers, or a prediction, but too few to be
    shown. ``coverage_G`` is NaN for a group of which too few records are answered or refused, and ``accuracy`` is NaN
    if too few answers are wrong.
    ``max_gap_from`` is the number of answers after which every group with records has got at least ``rule.min_count``
    answers, and enough answers to be shown. ``max_gap`` is the largest gap from there on. Both are undefined (None and
    NaN) if a group never gets that number of answers, or if there is only one group.
    """

    accuracy: float
    coverage: float
    coverage_G: tuple[float, ...]
    final_gap: float
    max_gap: float
    max_gap_from: int | None


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The mean, least and greatest value of a metric over several orders of the records; NaN if the metric is undefined
    for every order.

    ``n_undefined``: the number of orders for which the metric is undefined; they are left out.
    """

    mean: float
    low: float
    high: float
    n_undefined: int


@dataclass(frozen=True, kw_only=True)
class RejectOptionSpread:
    """The results of a reject option (IDP3) for several orders of the same ``num_records`` records, and their spread
    over these orders.

    ``answers_needed``: the number of answers that every group must have before ``max_gap`` is measured.
    """

    rule: GateRule
    num_records: int
    accuracy: Spread = field(init=False)
    coverage: Spread = field(init=False)
    final_gap: Spread = field(init=False)
    max_gap: Spread = field(init=False)
    coverage_G: tuple[Spread, ...] = field(init=False)
    orders: tuple[OrderResult, ...]
    answers_needed: int

    def __post_init__(self) -> None:
        for name in ("accuracy", "coverage", "final_gap", "max_gap"):
            object.__setattr__(self, name, _spread([getattr(order, name) for order in self.orders]))
        of_groups = zip(*(order.coverage_G for order in self.orders), strict=True)
        object.__setattr__(self, "coverage_G", tuple(map(_spread, of_groups)))

    def to_json(self) -> dict[str, Any]:
        """Return all fields as plain JSON values; undefined numbers are null, and so is the largest disparity of a gate
        that is switched off."""
        plain: dict[str, Any] = strict(asdict(self))
        # It follows from the rule and the least cell of the evaluation.
        del plain["answers_needed"]
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
    persons_N: npt.ArrayLike | None = None,
    offered_N: npt.ArrayLike | None = None,
    least_cell: int = 1,
) -> RejectOptionSpread:
    """Pass the predicted ``labels_N`` through a fresh demographic-parity gate in each of ``num_orders`` random orders;
    return the results of each order and their spread.

    ``true_labels_N`` are used only for accuracy. The records in ``offered_N`` pass the gate and others are refused
    without it; those in ``kept_N`` are measured. None: all records.
    As in an evaluation, numbers are left out that would reveal fewer than ``least_cell`` records (or persons) of a
    group that are answered, refused or predicted a class; ``max_gap`` is over changing parts of the answers, and only
    needs that many answers of every group. IndexError for a label or group that the gate does not know.
    """
    labels, groups, truth = np.asarray(labels_N), np.asarray(groups_N), np.asarray(true_labels_N)
    kept, offered = (
        np.ones(len(labels), np.bool_) if each is None else np.asarray(each, np.bool_) for each in (kept_N, offered_N)
    )
    units_N = np.arange(len(labels)) if persons_N is None else np.unique(persons_N, return_inverse=True)[1]
    sizes = {"num_groups": num_groups, "num_classes": num_classes}
    needed, orders = max(rule.min_count, least_cell, 1), []
    for order in [generator.permutation(len(labels)) for _ in range(num_orders)]:
        passed, at_gate = np.zeros(len(order), np.bool_), order[offered[order]]
        passed[offered[order]] = filter_stream(labels[at_gate], groups[at_gate], rule=rule, **sizes)
        of_kept = order[kept[order]]
        answered, labels_K, groups_K = passed[kept[order]], labels[of_kept], groups[of_kept]
        course_AGYC = rates.cumulative_tables(labels_K[answered], groups_K[answered], **sizes)
        # The empty state in front: then the index of a state is its number of answers.
        course_AGYC = np.concatenate([np.zeros((1, *course_AGYC.shape[1:])), course_AGYC])
        gap_A, size_AG = rates.dp_one_vs_rest.values(course_AGYC), course_AGYC.sum(axis=(-2, -1))
        # The cold start ends once every group that has records got enough answers; without a second group, never.
        present = np.unique(groups_K)
        warm_A = (size_AG[:, present] >= needed).all(axis=-1)
        start = int(warm_A.argmax()) if len(present) > 1 and warm_A.any() else None
        coverage, coverage_G = rates.coverages(groups_K, answered, num_groups=num_groups)
        right_K = labels_K == truth[of_kept]
        units_K, outcomes_K = units_N[of_kept], np.where(answered, labels_K, num_classes)
        counts_GJ = unit_counts(np.eye(num_classes + 1)[outcomes_K], groups_K, num_groups, units_K)
        answers_G = unit_counts(np.eye(2)[answered.astype(np.int64)], groups_K, num_groups, units_K)
        # The gap would reveal small numbers of predictions, and a coverage those of answers or refusals.
        is_known = not is_small(np.concatenate([counts_GJ[:, :-1], answers_G[:, 1:]], axis=1), least_cell).any()
        if is_small(answers_G, least_cell).any():
            # Of all groups: with one missing, the total would give it.
            coverage_G = np.full_like(coverage_G, math.nan)
        wrong = int((~right_K[answered]).sum())
        hides_accuracy = min(wrong, int(answered.sum()) - wrong) * 2 in range(1, least_cell)
        orders.append(
            OrderResult(
                accuracy=math.nan if hides_accuracy else float(rates.divide(right_K[answered].sum(), answered.sum())),
                coverage=coverage,
                coverage_G=tuple(coverage_G.tolist()),
                final_gap=float(gap_A[-1]) if is_known else math.nan,
                max_gap=math.nan if start is None else float(gap_A[start:].max()),
                max_gap_from=start,
            )
        )
    return RejectOptionSpread(rule=rule, num_records=int(kept.sum()), orders=tuple(orders), answers_needed=needed)


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
) -> FloatArray:
    """Pass bootstrap samples of the predicted ``labels_N`` through a reject option (a demographic-parity gate by
    ``rule``); return the counts (R, G, Y, C) of answers by replicate, group, true label and prediction.

    With ``persons_N``, the person of each record, persons are drawn, each with all of its records.
    """
    labels, groups, truth = np.asarray(labels_N), np.asarray(groups_N), np.asarray(true_labels_N)
    joint_RGYC = np.zeros((num_replicates, num_groups, num_classes, num_classes))
    if not len(labels):
        return joint_RGYC
    if persons_N is None:
        drawn_RN = generator.integers(len(labels), size=(num_replicates, len(labels)))
        length_R = np.full(num_replicates, len(labels))
    else:
        _, person_N, size_P = np.unique(np.asarray(persons_N), return_inverse=True, return_counts=True)
        by_person_N, start_P = person_N.argsort(kind="stable"), size_P.cumsum() - size_P
        drawn_RP = generator.integers(len(size_P), size=(num_replicates, len(size_P)))
        # Samples differ in length. A shorter one is padded at its end, after everything that counts.
        length_R = size_P[drawn_RP].sum(axis=1)
        drawn_RN = np.zeros((num_replicates, int(length_R.max())), dtype=np.int64)
        for line_N, drawn_P, length in zip(drawn_RN, drawn_RP, length_R, strict=True):
            sizes = size_P[drawn_P]
            # Indices of each person's records among all records sorted by person.
            places = np.arange(length) + np.repeat(start_P[drawn_P] - (sizes.cumsum() - sizes), sizes)
            # In random order: otherwise all records of a person would pass the gate in a row.
            line_N[:length] = generator.permutation(by_person_N[places])
    answered_RN = filter_streams(
        labels[drawn_RN], groups[drawn_RN], rule=rule, num_groups=num_groups, num_classes=num_classes
    )
    # Answers to the padding do not count.
    answered_RN &= np.arange(drawn_RN.shape[1]) < length_R[:, None]
    # One row per answer, of all replicates together: the tables are then one addition.
    replicate_A, place_A = answered_RN.nonzero()
    row_A = drawn_RN[replicate_A, place_A]
    # Not `+=`, which adds once to a cell that occurs several times.
    np.add.at(joint_RGYC, (replicate_A, groups[row_A], truth[row_A], labels[row_A]), 1.0)
    return joint_RGYC


def _spread(values: Sequence[float]) -> Spread:
    defined = [value for value in values if not math.isnan(value)]
    mean, low, high = (sum(defined) / len(defined), min(defined), max(defined)) if defined else (math.nan,) * 3
    return Spread(mean=mean, low=low, high=high, n_undefined=len(values) - len(defined))
