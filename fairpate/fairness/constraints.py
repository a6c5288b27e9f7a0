"""Rate constraints: bounds on weighted sums of a classifier's prediction rates over unions of cells.

RaCO-DP's form ("Private Rate-Constrained Optimization with Applications to Fair Learning", equation 6): a public rule
puts every record into one cell of a partition, and with P_k(S) the mean predicted probability of class k on the
records S

    Gamma_j = sum over terms (I, a) of constraint j, over classes k:  a_k P_k(union of the cells in I)  <=  bound_j

A constraint needs one histogram of the records: the predicted probability mass by cell and class. A term may also be
divided by the number of all records instead of its own, which makes it linear in the histogram and lets precision be
bounded. Values are computed from any histogram, exact or noisy; a rate without records is NaN unless a floor for sizes
is given. :func:`named_constraints` makes the ones with a name, for any number of groups and labels; a user may state
others, and :func:`combined` joins both. Named gaps are signed and against all other groups together, as in FairPATE and
RaCO-DP (appendix A); error rates are levels, of one class or of each.

Deviation from the paper: precision, which is not a rate of a fixed set of records, is bounded as a linear function of
the histogram.

Models, noise and the updates of multipliers are elsewhere. Shapes: N records, Q cells, C classes, J constraints, U
unions.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from fairpate.fairness.rates import FloatArray, IndexArray, divide

_MOST_CODES = 2**16
"""No data set has as many labels or groups."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Cells by true label and by group; 1 label or 1 group does not distinguish them. Cell = label * groups + group."""

    num_labels: int = 1
    num_groups: int = 1

    def __post_init__(self) -> None:
        if not (1 <= self.num_labels <= _MOST_CODES and 1 <= self.num_groups <= _MOST_CODES):
            raise ValueError(
                f"Expected 1 <= num_labels, num_groups <= {_MOST_CODES}, got {self.num_labels} and {self.num_groups}."
            )

    @property
    def num_cells(self) -> int:
        """Number of cells Q."""
        return self.num_labels * self.num_groups

    def cell(self, *, label: int = 0, group: int = 0) -> int:
        """One cell. ValueError for a label or a group that the partition does not have."""
        if not 0 <= label < self.num_labels or not 0 <= group < self.num_groups:
            raise ValueError(
                f"Expected a label below {self.num_labels} and a group below {self.num_groups}, got {label}, {group}."
            )
        return label * self.num_groups + group

    def cells(self, labels_N: npt.ArrayLike, groups_N: npt.ArrayLike) -> IndexArray:
        """The cell of every record, shape (N,). ValueError for a label or group out of range."""
        cells_N = np.zeros(len(np.asarray(labels_N)), dtype=np.int64)
        sides = (("labels_N", labels_N, self.num_labels), ("groups_N", groups_N, self.num_groups))
        for name, codes_N, stop in sides:
            if stop == 1:  # not distinguished, and not read
                continue
            codes = np.asarray(codes_N)
            if ((codes < 0) | (codes >= stop)).any():
                raise ValueError(f"Expected {name} to hold integers from 0 to {stop - 1}, got {np.unique(codes)}.")
            cells_N = cells_N * stop + codes.astype(np.int64)
        return cells_N


@dataclass(frozen=True, kw_only=True)
class RateTerm:
    """A weighted sum of the rates of one union of cells: one weight per predicted class.

    ``of_all``: the mass is divided by the number of all records, not by that of the union.
    """

    cells: tuple[int, ...]
    weights: tuple[float, ...]
    of_all: bool = False


@dataclass(frozen=True, kw_only=True)
class RateConstraint:
    """The constraint ``sum of terms <= bound``; ``name`` says what it bounds."""

    name: str
    terms: tuple[RateTerm, ...]
    bound: float


@dataclass(frozen=True, kw_only=True)
class RateConstraints:
    """Constraints over one partition, checked.

    ValueError for a constraint without terms, a term without cells, a cell that the partition does not have, weights
    that are not one finite number per class, and a bound that no predictions can keep.
    """

    partition: Partition
    num_classes: int
    constraints: tuple[RateConstraint, ...]

    def __post_init__(self) -> None:
        if not self.constraints:
            raise ValueError("Expected at least one constraint, got none.")
        for constraint in self.constraints:
            where = f"constraint {constraint.name!r}"
            if not constraint.terms or not np.isfinite(constraint.bound):
                raise ValueError(f"Expected terms and a finite bound in {where}.")
            for term in constraint.terms:
                if not term.cells:
                    raise ValueError(f"The {where} rests on an empty union of cells, which has no rate.")
                if not all(0 <= cell < self.partition.num_cells for cell in term.cells):
                    raise ValueError(f"Expected cells below {self.partition.num_cells} in {where}, got {term.cells}.")
                if len(term.weights) != self.num_classes or not np.isfinite(term.weights).all():
                    raise ValueError(f"Expected {self.num_classes} finite weights in {where}, got {term.weights}.")
        # The least value for any predictions; overlapping unions are treated as disjoint. A share of all records may
        # be 0; a rate gives all of its weight to some class.
        least_JU = self._weights_JUC.min(axis=2)
        least_J = np.where(self._of_all_U, np.minimum(least_JU, 0.0), least_JU).sum(axis=1)
        for constraint, least in zip(self.constraints, least_J, strict=True):
            if constraint.bound < least:
                raise ValueError(
                    f"Constraint {constraint.name!r} cannot be kept: no predictions bring it below {least:g}, and its "
                    f"bound is {constraint.bound:g}; raise it."
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the constraints, in order."""
        return tuple(constraint.name for constraint in self.constraints)

    @cached_property
    def bounds_J(self) -> FloatArray:
        """The bounds, shape (J,)."""
        return np.array([constraint.bound for constraint in self.constraints], dtype=np.float64)

    def histogram(self, probabilities_NC: npt.ArrayLike, cells_N: npt.ArrayLike) -> FloatArray:
        """Predicted mass by cell and class, shape (Q, C). One record more adds exactly 1 to the sum of its entries."""
        probabilities, cells = np.asarray(probabilities_NC, np.float64), np.asarray(cells_N)
        histogram_QC = np.zeros((self.partition.num_cells, self.num_classes))
        # Plain indexing would count a cell once, however many records it has.
        np.add.at(histogram_QC, cells, probabilities)
        return histogram_QC

    def values(
        self, histogram_QC: FloatArray, *, size_floor: float = 0.0, num_records: float | None = None
    ) -> FloatArray:
        """Gamma of a histogram, shape (J,); a union smaller than ``size_floor`` counts as that large.

        Terms ``of_all`` are divided by ``num_records``, or with None by the histogram's total. Without a floor the
        value is NaN where a union is empty.
        """
        # The floor also covers a noisy size, which may be negative.
        sizes_U = np.maximum(self._members_UQ @ histogram_QC.sum(axis=1), size_floor)
        sizes_U = np.where(self._of_all_U, histogram_QC.sum() if num_records is None else num_records, sizes_U)
        rates_UC = divide(self._members_UQ @ histogram_QC, sizes_U[:, None])
        # A union that a constraint does not use may be empty, and 0 times NaN is NaN.
        unused_JUC = self._weights_JUC == 0
        values_J: FloatArray = np.where(unused_JUC, 0.0, self._weights_JUC * rates_UC).sum(axis=(1, 2))
        return values_J

    def evaluate(
        self, probabilities_NC: npt.ArrayLike, labels_N: npt.ArrayLike, groups_N: npt.ArrayLike
    ) -> dict[str, float]:
        """The exact value of every constraint on these records, by name; one-hot rows give hard rates."""
        cells_N = self.partition.cells(labels_N, groups_N)
        values_J = self.values(self.histogram(probabilities_NC, cells_N))
        return dict(zip(self.names, values_J.tolist(), strict=True))

    def floored(self, histogram_QC: FloatArray, *, size_floor: float) -> tuple[str, ...]:
        """The names of the constraints that rest on a union smaller than ``size_floor`` in this histogram."""
        is_small_U = (self._members_UQ @ histogram_QC.sum(axis=1) < size_floor) & ~self._of_all_U
        rests_JU = (self._weights_JUC != 0).any(axis=2)
        return tuple(np.array(self.names)[(rests_JU & is_small_U).any(axis=1)].tolist())

    @cached_property
    def _unions(self) -> tuple[tuple[tuple[int, ...], bool], ...]:
        return tuple(dict.fromkeys(_union(term) for each in self.constraints for term in each.terms))

    @cached_property
    def _members_UQ(self) -> FloatArray:
        members_UQ = np.zeros((len(self._unions), self.partition.num_cells))
        for row, (cells, _) in enumerate(self._unions):
            members_UQ[row, list(cells)] = 1
        return members_UQ

    @cached_property
    def _of_all_U(self) -> npt.NDArray[np.bool_]:
        return np.array([of_all for _, of_all in self._unions], dtype=np.bool_)

    @cached_property
    def _weights_JUC(self) -> FloatArray:
        weights_JUC = np.zeros((len(self.constraints), len(self._unions), self.num_classes))
        for j, constraint in enumerate(self.constraints):
            for term in constraint.terms:
                weights_JUC[j, self._unions.index(_union(term))] += term.weights
        return weights_JUC


class Pricer:
    """Computes, for one noisy histogram after another, the constraint values and the derivative of the Lagrangian with
    respect to a record's mass (its price).

    Unions are never smaller than ``size_floor`` > 0, as noise can make a size negative, and terms ``of_all`` are
    divided by the constant ``num_records`` > 0. ValueError where either is not positive.
    """

    def __init__(self, constraints: RateConstraints, *, size_floor: float, num_records: float) -> None:
        if not (size_floor > 0 and num_records > 0):
            raise ValueError(f"Expected size_floor > 0 and num_records > 0, got {size_floor} and {num_records}.")
        of_all_U1, num_classes = constraints._of_all_U[:, None], constraints.num_classes
        self._members_UQ, self._weights = (
            constraints._members_UQ,
            constraints._weights_JUC.reshape(len(constraints.constraints), -1),
        )
        self._scaled_members_QU = num_records * self._members_UQ.T
        self._least_sizes_U1 = np.where(of_all_U1, num_records, size_floor)
        self._most_sizes_U1 = np.where(of_all_U1, num_records, np.inf) if of_all_U1.any() else None
        # One product gives the masses by class and, in the last column, the sizes.
        self._with_sum_CK = np.hstack([np.eye(num_classes), np.ones((num_classes, 1))])
        self._shape, self._num_classes = (len(of_all_U1), num_classes), num_classes

    def __call__(self, histogram_QC: FloatArray, multipliers_J: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Gamma (J,), and the price of mass by cell and class (Q, C).

        The price is the derivative of ``num_records * multipliers @ Gamma`` at sizes held fixed: they do not depend on
        a model.
        """
        # With a model of a few weights, these calls take a good part of a step's time; ``dot`` is the fastest product.
        mass_UK = self._members_UQ.dot(histogram_QC.dot(self._with_sum_CK))
        # Sizes of unions are floored. Terms of all records are divided by one constant, which is both of their bounds.
        sizes_U1 = np.maximum(mass_UK[:, self._num_classes :], self._least_sizes_U1)
        if self._most_sizes_U1 is not None:
            sizes_U1 = np.minimum(sizes_U1, self._most_sizes_U1)
        values_J: FloatArray = self._weights.dot((mass_UK[:, : self._num_classes] / sizes_U1).reshape(-1))
        prices_UC = multipliers_J.dot(self._weights).reshape(self._shape) / sizes_U1
        prices_QC: FloatArray = self._scaled_members_QU.dot(prices_UC)
        return values_J, prices_QC


def combined(*parts: RateConstraints) -> RateConstraints:
    """All constraints of all parts, over the coarsest partition that refines theirs.

    ValueError for parts with other classes, and for partitions by different numbers of labels or groups.
    """
    counts = {
        "labels": {part.partition.num_labels for part in parts},
        "groups": {part.partition.num_groups for part in parts},
    }
    for what, found in counts.items():
        if len(found - {1}) > 1:
            raise ValueError(f"Expected partitions by the same {what}, got {sorted(found)} of them.")
    labels, groups = (max(found, default=1) for found in counts.values())
    classes = {part.num_classes for part in parts}
    if len(classes) != 1:
        raise ValueError(f"Expected parts over the same number of classes, got {sorted(classes)}.")
    partition = Partition(num_labels=labels, num_groups=groups)
    constraints = []
    for part in parts:
        coarse = part.partition
        # The cells of the common partition inside each cell of this part's.
        inside: dict[int, list[int]] = {cell: [] for cell in range(coarse.num_cells)}
        for label in range(labels):
            for group in range(groups):
                # A part distinguishes all labels or has one: the remainder is the label, or 0. Groups likewise.
                here = coarse.cell(label=label % coarse.num_labels, group=group % coarse.num_groups)
                inside[here].append(partition.cell(label=label, group=group))
        for constraint in part.constraints:
            terms = [
                replace(term, cells=tuple(fine for cell in term.cells for fine in inside[cell]))
                for term in constraint.terms
            ]
            constraints.append(replace(constraint, terms=tuple(terms)))
    return RateConstraints(partition=partition, num_classes=classes.pop(), constraints=tuple(constraints))


def _union(term: RateTerm) -> tuple[tuple[int, ...], bool]:
    return tuple(sorted(set(term.cells))), term.of_all


ConstraintName = Literal[
    "demographic_parity",
    "equalized_odds",
    "equal_opportunity",
    "false_negative_rate",
    "false_positive_rate",
    "false_discovery_rate",
]
NAMED_CONSTRAINTS: tuple[ConstraintName, ...] = get_args(ConstraintName)


def named_constraints(
    name: str, *, num_classes: int, num_groups: int = 1, bound: float, label: int | None = 1
) -> RateConstraints:
    """One of ``NAMED_CONSTRAINTS``, for every class, group and label that it has.

    - ``demographic_parity``: r(z, k) - r(not z, k) <= bound for every group z and class k, signed;
    - ``equalized_odds``: r(z, k | y) - r(not z, k | y) <= bound for every true label y, group z and class k, signed;
    - ``equal_opportunity``: the same for y = k = ``label``;
    - ``false_negative_rate``: P[predicted another class | true ``label``] <= bound, which is 1 - recall;
    - ``false_positive_rate``: P[predicted ``label`` | another true label] <= bound;
    - ``false_discovery_rate``: P[true label is another | predicted ``label``] <= bound, which is 1 - precision.

    The last three hold for every class where ``label`` is None. The false-discovery rate is not a weighted sum of
    rates, because its denominator depends on the model. Multiplied out it is linear in the histogram: (1 - bound) mass
    of the mistaken less bound times that of the right, over all records, is at most 0. So the value of that constraint
    is not a rate. ValueError for another name, and for groups, a label or a bound out of range.
    """
    classes = range(num_classes)

    def at(k: int, weight: float = 1.0) -> tuple[float, ...]:
        return tuple(weight * (each == k) for each in classes)

    if name not in NAMED_CONSTRAINTS:
        raise ValueError(f"Expected a constraint among {', '.join(NAMED_CONSTRAINTS)}, got {name!r}.")
    if name not in ("demographic_parity", "equalized_odds") and not 0 <= (label or 0) < num_classes:
        raise ValueError(f"Expected a label below {num_classes}, got {label}.")
    constraints = []
    if name.startswith("false"):
        # Over all groups together: these rates do not compare groups.
        partition = Partition(num_labels=num_classes)
        if name == "false_discovery_rate" and not 0 <= bound <= 1:
            raise ValueError(f"Expected 0 <= bound <= 1 on a share of discoveries, got {bound}.")
        for c in classes if label is None else [label]:
            others = tuple(y for y in classes if y != c)
            if name == "false_negative_rate":
                missed = RateTerm(cells=(c,), weights=tuple(1.0 - weight for weight in at(c)))
                constraints.append(RateConstraint(name=f"fnr(label={c})", terms=(missed,), bound=bound))
            elif name == "false_positive_rate":
                mistaken = RateTerm(cells=others, weights=at(c))
                constraints.append(RateConstraint(name=f"fpr(label={c})", terms=(mistaken,), bound=bound))
            else:
                # mistaken / (mistaken + right) <= bound, multiplied by its denominator, which is never negative.
                mistaken = RateTerm(cells=others, weights=at(c, 1 - bound), of_all=True)
                right = RateTerm(cells=(c,), weights=at(c, -bound), of_all=True)
                name_of = f"fdr(label={c}) <= {bound:g}"
                constraints.append(RateConstraint(name=name_of, terms=(mistaken, right), bound=0.0))
    else:
        if num_groups < 2:
            raise ValueError(f"Expected num_groups >= 2: one group has no other to compare with, got {num_groups}.")
        if not bound >= 0:
            raise ValueError(
                f"Expected bound >= 0: the largest signed gap between groups is never negative, got {bound}."
            )
        groups = range(num_groups)
        partition = Partition(num_labels=1 if name == "demographic_parity" else num_classes, num_groups=num_groups)
        if name == "demographic_parity":
            # Every group in turn: signed gaps of all groups bound both directions.
            cases = [(f"group={z}, class={k}", 0, z, k) for z in groups for k in classes]
        elif name == "equalized_odds":
            every = itertools.product(classes, groups, classes)
            cases = [(f"label={y}, group={z}, class={k}", y, z, k) for y, z, k in every]
        elif label is not None:
            cases = [(f"label={label}, group={z}", label, z, label) for z in groups]
        else:
            raise ValueError("Expected a label for equal_opportunity, got none; equalized_odds covers all labels.")
        for words, y, z, k in cases:
            own = RateTerm(cells=(partition.cell(label=y, group=z),), weights=at(k))
            rest_cells = tuple(partition.cell(label=y, group=other) for other in groups if other != z)
            # One union: the rate of all other members together, and not the mean of their groups' rates.
            rest = RateTerm(cells=rest_cells, weights=at(k, -1.0))
            constraints.append(RateConstraint(name=f"{name}({words})", terms=(own, rest), bound=bound))
    return RateConstraints(partition=partition, num_classes=num_classes, constraints=tuple(constraints))
