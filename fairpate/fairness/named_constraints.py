"""The rate constraints that have a name, by groups and labels of any number.

Gaps are signed and against all other groups together, as in FairPATE and RaCO-DP ("Private Rate-Constrained
Optimization with Applications to Fair Learning", appendix A); error rates are levels, of one class or of each.

Deviation from the paper: precision, which is no rate of a fixed set of records, is bounded as a linear function of the
histogram.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Literal, get_args

from fairpate.fairness.rate_constraints import Partition, RateConstraint, RateConstraints, Term

ConstraintName = Literal[
    "demographic_parity",
    "equalized_odds",
    "equal_opportunity",
    "false_negative_rate",
    "false_positive_rate",
    "false_discovery_rate",
]
NAMED_CONSTRAINTS: tuple[ConstraintName, ...] = get_args(ConstraintName)


def demographic_parity(*, num_groups: int, num_classes: int, bound: float) -> RateConstraints:
    """r(z, k) - r(not z, k) <= bound for every group and class, signed."""
    partition = Partition(num_groups=_several(num_groups))
    cases = [(f"group={z}, class={k}", 0, z, k) for z in range(num_groups) for k in range(num_classes)]
    return _gaps("demographic_parity", partition, num_classes, bound, cases)


def equalized_odds(*, num_groups: int, num_classes: int, bound: float) -> RateConstraints:
    """r(z, k | y) - r(not z, k | y) <= bound for every true label, group and class, signed."""
    partition = Partition(num_labels=num_classes, num_groups=_several(num_groups))
    every = itertools.product(range(num_classes), range(num_groups), range(num_classes))
    cases = [(f"label={y}, group={z}, class={k}", y, z, k) for y, z, k in every]
    return _gaps("equalized_odds", partition, num_classes, bound, cases)


def equal_opportunity(*, num_groups: int, num_classes: int, bound: float, label: int = 1) -> RateConstraints:
    """The true positive rate of ``label`` in every group less that of the others <= bound, signed."""
    partition = Partition(num_labels=num_classes, num_groups=_several(num_groups))
    cases = [(f"label={label}, group={z}", label, z, label) for z in range(num_groups)]
    return _gaps("equal_opportunity", partition, num_classes, bound, cases)


def false_negative_rate(*, num_classes: int, bound: float, label: int | None = 1) -> RateConstraints:
    """P[predicted another class | true label] <= bound: 1 - recall. Of every class where ``label`` is None."""

    def constraint(c: int) -> RateConstraint:
        missed = tuple(1.0 - weight for weight in _at(c, num_classes))
        return RateConstraint(name=f"fnr(label={c})", terms=(Term(cells=(c,), weights=missed),), bound=bound)

    return _by_label(num_classes, label, constraint)


def false_positive_rate(*, num_classes: int, bound: float, label: int | None = 1) -> RateConstraints:
    """P[predicted ``label`` | another true label] <= bound. Of every class where ``label`` is None."""

    def constraint(c: int) -> RateConstraint:
        term = Term(cells=_others(c, num_classes), weights=_at(c, num_classes))
        return RateConstraint(name=f"fpr(label={c})", terms=(term,), bound=bound)

    return _by_label(num_classes, label, constraint)


def false_discovery_rate(*, num_classes: int, bound: float, label: int | None = 1) -> RateConstraints:
    """P[true label is another | predicted ``label``] <= bound: 1 - precision. Of every class where ``label`` is None.

    No weighted sum of rates, because its denominator depends on the model. Multiplied out it is linear in the
    histogram: (1 - bound) mass of the mistaken less bound times that of the right, over all records, is at most 0. So
    the value of the constraint is no rate.
    """
    if not 0 <= bound <= 1:
        raise ValueError(f"Expected 0 <= bound <= 1 on a share of discoveries, got {bound}.")

    def constraint(c: int) -> RateConstraint:
        # mistaken / (mistaken + right) <= bound, multiplied by its denominator, which is never negative.
        mistaken, right = _at(c, num_classes, 1 - bound), _at(c, num_classes, -bound)
        terms = (
            Term(cells=_others(c, num_classes), weights=mistaken, of_all=True),
            Term(cells=(c,), weights=right, of_all=True),
        )
        return RateConstraint(name=f"fdr(label={c}) <= {bound:g}", terms=terms, bound=0.0)

    return _by_label(num_classes, label, constraint)


def named_constraints(
    name: str, *, num_classes: int, num_groups: int, bound: float, label: int | None = 1
) -> RateConstraints:
    """One of ``NAMED_CONSTRAINTS``; ``label`` is the positive class where there is one. ValueError for another name."""
    between_groups = {"demographic_parity": demographic_parity, "equalized_odds": equalized_odds}
    if name in between_groups:
        return between_groups[name](num_groups=num_groups, num_classes=num_classes, bound=bound)
    if name == "equal_opportunity":
        if label is None:
            raise ValueError("Expected a label for equal_opportunity, got none; equalized_odds covers all labels.")
        return equal_opportunity(num_groups=num_groups, num_classes=num_classes, bound=bound, label=label)
    by_label = {
        "false_negative_rate": false_negative_rate,
        "false_positive_rate": false_positive_rate,
        "false_discovery_rate": false_discovery_rate,
    }
    if name not in by_label:
        raise ValueError(f"Expected a constraint among {', '.join(NAMED_CONSTRAINTS)}, got {name!r}.")
    return by_label[name](num_classes=num_classes, bound=bound, label=label)


def _gaps(
    name: str, partition: Partition, num_classes: int, bound: float, cases: Iterable[tuple[str, int, int, int]]
) -> RateConstraints:
    """One constraint for each case: its words, a true label, a group, and the predicted class."""
    if not bound >= 0:
        raise ValueError(f"Expected bound >= 0: the largest signed gap between groups is never negative, got {bound}.")
    constraints = tuple(
        RateConstraint(name=f"{name}({words})", terms=_against_rest(partition, y, z, k, num_classes), bound=bound)
        for words, y, z, k in cases
    )
    return RateConstraints(partition=partition, num_classes=num_classes, constraints=constraints)


def _by_label(num_classes: int, label: int | None, constraint: Callable[[int], RateConstraint]) -> RateConstraints:
    labels = range(num_classes) if label is None else [label]
    return RateConstraints(
        partition=Partition(num_labels=num_classes),
        num_classes=num_classes,
        constraints=tuple(constraint(c) for c in labels),
    )


def _others(label: int, num_classes: int) -> tuple[int, ...]:
    return tuple(y for y in range(num_classes) if y != label)


def _against_rest(partition: Partition, label: int, group: int, k: int, num_classes: int) -> tuple[Term, Term]:
    rest = tuple(partition.cell(label=label, group=z) for z in range(partition.num_groups) if z != group)
    return (
        Term(cells=(partition.cell(label=label, group=group),), weights=_at(k, num_classes)),
        Term(cells=rest, weights=_at(k, num_classes, -1.0)),
    )


def _at(label: int, num_classes: int, weight: float = 1.0) -> tuple[float, ...]:
    if not 0 <= label < num_classes:
        raise ValueError(f"Expected a label below {num_classes}, got {label}.")
    return tuple(weight * (k == label) for k in range(num_classes))


def _several(num_groups: int) -> int:
    if num_groups < 2:
        raise ValueError(f"Expected num_groups >= 2: one group has nobody to be compared with, got {num_groups}.")
    return num_groups
