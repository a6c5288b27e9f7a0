"""RaCO-DP: DP-SGD under rate constraints ("Private Rate-Constrained Optimization with Applications to Fair Learning").

    min over theta, max over lambda >= 0:   loss(theta) + sum_j lambda_j (Gamma_j(theta) - bound_j)

for generalised rate constraints Gamma_j (its equation 6): bounds on weighted sums of a classifier's prediction rates
over unions of cells. A public rule puts every record into one cell of a partition, and with P_k(S) the mean predicted
probability of class k on the records S

    Gamma_j = sum over terms (I, a) of constraint j, over classes k:  a_k P_k(union of the cells in I)  <=  bound_j

The value of a constraint is computed from one histogram of the records: the predicted probability mass by cell and
class. A term may also be divided by the number of all records instead of its own, which makes it linear in the
histogram and allows a bound on precision, which is not a rate of a fixed set of records. Named constraints
(:func:`named_constraints`) on gaps are signed and against all other groups together, as in FairPATE and RaCO-DP
(appendix A); error rates are rates of one class or of each class, not gaps. A user may state other constraints.

One step (Algorithm 1), with a Poisson sample of rate r, L = r N, soft predictions s(x) = softmax(sharpness h(x)) and
record x in cell q(x):

    H[q, k] = sum of s(x)_k over the sample's records in q, + Laplace(b) on every entry
    size_I  = max(floor, sum of H over the cells of I and all classes)            for every union I of a constraint
    g_x     = grad loss_x + L sum_j lambda_j sum_I,k a_jIk [q(x) in I] / size_I grad s(x)_k, clipped to C as one vector
    theta  <- theta - rate (sum_x clip(g_x) + N(0, (zeta C)^2 I)) / L
    lambda <- P(lambda + dual rate (Gamma of the noisy H and its sizes - bound))

The second term of g_x is the gradient of s(x) times a *price*: the price of a cell and a class is the derivative of the
weighted constraints with respect to predicted mass there. The prices of a step are a function of its noisy H. With
``counts`` labels, H counts predicted labels instead of s(x): the hard dual update of the paper's Appendix E.4. With
``size_share`` each cell's number of records is released too, with Gaussian noise (the paper's Remark 3; cells are a
partition): H is then the histogram nearest to both releases.

A record changes H by 1 in L1 under any model, the sizes by 1 in L2 and, once H is released, the sum by C in L2, all on
the same sample: this is one event, composed before it is amplified, in which the two Gaussians count as one. If the
data set names persons, persons are sampled, s(x) in H and g_x are averages over a person's records, and L and the sizes
count persons: the average of rows that sum to 1 also changes H by 1 in L1, even if the records are in several cells.

Deviations from the paper and its code:
- The paper amplifies Laplace and Gaussian noise separately and adds the costs, which is too low: both read one sample.
- The relation is "add or remove one", for which the paper's sensitivities hold; the paper states "replace one".
- Sizes have a public floor: with noise they may be negative. The paper's code releases group sizes without a charge.
- Remark 3 has Laplace noise on sizes and does not charge it. Here the noise is Gaussian, and also improves H.
- Every entry of H has noise of its own, and there are no padded rows. Sums are divided by L, not by the sample's size.
- The last weights are averaged; the paper takes the best of many checkpoints by private validation data, uncharged.
- Momentum is available.

Shapes: N records, B of a batch, Q cells, C classes, J constraints, U unions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt
from pydantic import Field, FiniteFloat, field_serializer
from pydantic.dataclasses import dataclass as validated

from fairpate.config import (
    ConfigError,
    CountOrZero,
    Disables,
    NotNegative,
    Positive,
    PositiveShare,
    PrivacyTarget,
    Section,
)
from fairpate.fairness.rates import indices
from fairpate.lazy import functional, torch
from fairpate.methods import dp_sgd
from fairpate.methods.base import Stream, Trained, Training, Watch, noise_within
from fairpate.methods.dp_sgd import DpSgdConfig, DpSgdFamily
from fairpate.methods.parity import DualAscent
from fairpate.privacy.mechanism_events import PoissonGaussianLaplaces, joint_multiplier
from fairpate.types import FloatArray, IntArray

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fairpate.nn.per_example import GradientClipper
    from fairpate.nn.private_fit import PrivateRandomness, PrivateSteps, PrivateTraining

NumCodes = Annotated[int, Field(ge=1, le=2**16)]
"""A number of labels or groups."""


@validated(frozen=True, kw_only=True)
class Partition:
    """A partition of records into cells by true label and group: cell = label * ``num_groups`` + group.

    With ``num_labels`` 1 labels are not distinguished, with ``num_groups`` 1 groups are not.
    """

    num_labels: NumCodes = 1
    num_groups: NumCodes = 1

    @property
    def num_cells(self) -> int:
        """The number of cells Q."""
        return self.num_labels * self.num_groups

    def cell(self, *, label: int = 0, group: int = 0) -> int:
        """Return the cell of a label and a group. ValueError for a label or group that the partition does not have."""
        if not 0 <= label < self.num_labels or not 0 <= group < self.num_groups:
            allowed = f"a label below {self.num_labels} and a group below {self.num_groups}"
            raise ValueError(f"Expected {allowed}, got label {label} and group {group}; correct them.")
        return label * self.num_groups + group

    def cells(self, labels_N: npt.ArrayLike, groups_N: npt.ArrayLike) -> IntArray:
        """Return the cell of every record, shape (N,). ValueError for a label or group out of range."""
        cells_N = np.zeros(len(np.asarray(labels_N)), dtype=np.int64)
        sides = (("labels_N", labels_N, self.num_labels), ("groups_N", groups_N, self.num_groups))
        for name, codes_N, stop in sides:
            if stop == 1:  # not distinguished, and not read
                continue
            cells_N = cells_N * stop + indices(name, np.asarray(codes_N), stop)
        return cells_N


@validated(frozen=True, kw_only=True)
class RateTerm:
    """One term of a rate constraint. It reads the records in a union of ``cells``, and adds up, with ``weights``, the
    rates at which these records get each class as their prediction.

    ``of_all``: the rates are relative to the number of all records, not to that of the union.
    """

    # An empty union of cells has no rate.
    cells: Annotated[tuple[CountOrZero, ...], Field(min_length=1)]
    weights: tuple[FiniteFloat, ...]
    of_all: bool = False


@validated(frozen=True, kw_only=True)
class RateConstraint:
    """The constraint that the sum of ``terms`` is at most ``bound``; ``name`` describes it in reports."""

    name: str
    terms: Annotated[tuple[RateTerm, ...], Field(min_length=1)]
    bound: FiniteFloat


@validated(frozen=True, kw_only=True)
class RateConstraints:
    """Rate constraints over one partition of the records, checked when they are created.

    ValueError for a cell that the partition does not have, weights that are not one number for each of the same
    classes, and a bound that no predictions can keep.
    """

    partition: Partition
    constraints: Annotated[tuple[RateConstraint, ...], Field(min_length=1)]

    def __post_init__(self) -> None:
        num_cells = self.partition.num_cells
        for constraint in self.constraints:
            where = f"constraint {constraint.name!r}"
            for term in constraint.terms:
                if max(term.cells) >= num_cells:
                    raise ValueError(
                        f"Expected terms in {where} to list cells of the partition, numbered from 0 and below "
                        f"{num_cells}, got {term.cells}; correct cells."
                    )
                if len(term.weights) != self.num_classes:
                    raise ValueError(
                        f"Expected {self.num_classes} weights in {where}, one per class, got {term.weights}; correct "
                        "weights."
                    )
        # The least value for any predictions; overlapping unions are treated as disjoint. A share of all records may
        # be 0; a rate gives all of its weight to some class.
        _, of_all_U, weights_JUC = self.unions
        least_JU = weights_JUC.min(axis=2)
        least_J = np.where(of_all_U, np.minimum(least_JU, 0.0), least_JU).sum(axis=1)
        for constraint, least in zip(self.constraints, least_J, strict=True):
            if constraint.bound < least:
                raise ValueError(
                    f"Constraint {constraint.name!r} cannot be kept: no predictions bring it below {least:g}, and its "
                    f"bound is {constraint.bound:g}; raise the bound."
                )

    @property
    def num_classes(self) -> int:
        """The number of classes C; every term has one weight per class."""
        return len(self.constraints[0].terms[0].weights)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the constraints, in order."""
        return tuple(constraint.name for constraint in self.constraints)

    @cached_property
    def unions(self) -> tuple[FloatArray, npt.NDArray[np.bool_], FloatArray]:
        """The U different unions of cells that terms use, as three arrays: the cells in each union (U, Q), whether its
        rates are relative to the number of all records (U,), and the weights of its rates in each constraint (J, U, C).
        """
        terms = [term for constraint in self.constraints for term in constraint.terms]
        union_of = {term: (tuple(sorted(set(term.cells))), term.of_all) for term in terms}
        unions = list(dict.fromkeys(union_of.values()))
        members_UQ = np.zeros((len(unions), self.partition.num_cells))
        for row, (cells, _) in enumerate(unions):
            members_UQ[row, list(cells)] = 1
        weights_JUC = np.zeros((len(self.constraints), len(unions), self.num_classes))
        for j, constraint in enumerate(self.constraints):
            for term in constraint.terms:
                weights_JUC[j, unions.index(union_of[term])] += term.weights
        return members_UQ, np.array([of_all for _, of_all in unions], dtype=np.bool_), weights_JUC

    def floored(self, histogram_QC: FloatArray, *, size_floor: float) -> tuple[str, ...]:
        """Return the names of the constraints whose rates are underestimated: a union of cells has fewer records in
        this histogram than ``size_floor``, which then replaces its size."""
        members_UQ, of_all_U, weights_JUC = self.unions
        is_small_U = (members_UQ @ histogram_QC.sum(axis=1) < size_floor) & ~of_all_U
        rests_JU = (weights_JUC != 0).any(axis=2)
        return tuple(np.array(self.names)[(rests_JU & is_small_U).any(axis=1)].tolist())


class Pricer:
    """Computes the values of rate constraints, and the prices of predictions, from noisy histograms: sums of predicted
    probabilities by cell and class.

    A price is the derivative of the Lagrangian with respect to one entry of the histogram. Unions have at least
    the size ``size_floor`` > 0, as noise can make a size negative, and terms ``of_all`` are divided by the constant
    ``num_records``.
    """

    def __init__(self, constraints: RateConstraints, *, size_floor: float, num_records: float) -> None:
        self._members_UQ, of_all_U, weights_JUC = constraints.unions
        of_all_U1, num_classes = of_all_U[:, None], constraints.num_classes
        self._weights = weights_JUC.reshape(len(constraints.constraints), -1)
        self._scaled_members_QU = num_records * self._members_UQ.T
        self._least_sizes_U1 = np.where(of_all_U1, num_records, size_floor)
        self._most_sizes_U1 = np.where(of_all_U1, num_records, np.inf)
        # One product gives the masses by class and, in the last column, the sizes.
        self._with_sum_CK = np.hstack([np.eye(num_classes), np.ones((num_classes, 1))])
        self._shape, self._num_classes = (len(of_all_U1), num_classes), num_classes

    def __call__(self, histogram_QC: FloatArray, multipliers_J: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the values Gamma of the rate constraints (J,), and the price of each entry of the histogram (Q, C).

        A price is the derivative of ``num_records * multipliers @ Gamma`` with sizes fixed, as they do not depend on
        the model.
        """
        # For a small model these calls take much of a step's time; ``dot`` is the fastest product.
        mass_UK = self._members_UQ.dot(histogram_QC.dot(self._with_sum_CK))
        # Sizes of unions are floored. Terms of all records are divided by one constant, which is both of their bounds.
        sizes_U1 = np.minimum(np.maximum(mass_UK[:, self._num_classes :], self._least_sizes_U1), self._most_sizes_U1)
        values_J: FloatArray = self._weights.dot((mass_UK[:, : self._num_classes] / sizes_U1).reshape(-1))
        prices_UC = multipliers_J.dot(self._weights).reshape(self._shape) / sizes_U1
        prices_QC: FloatArray = self._scaled_members_QU.dot(prices_UC)
        return values_J, prices_QC


def combined(*parts: RateConstraints) -> RateConstraints:
    """Return all constraints of the arguments ``parts`` as one set. Its partition of the records is the coarsest one
    that refines the partitions of all parts.

    ValueError for parts with different numbers of classes, and for partitions with different numbers of labels or
    groups.
    """
    # A partition of one label, or of one group, does not distinguish them.
    labels, groups = {1} | {p.partition.num_labels for p in parts}, {1} | {p.partition.num_groups for p in parts}
    classes = {part.num_classes for part in parts}
    for what, found in {"labels": labels - {1}, "groups": groups - {1}, "classes": classes}.items():
        if len(found) > 1:
            raise ValueError(
                f"Expected all constraints to have the same number of {what}, got {sorted(found)}; use one partition "
                "and one classifier."
            )
    partition = Partition(num_labels=max(labels), num_groups=max(groups))
    labels_Q, groups_Q = np.divmod(np.arange(partition.num_cells), partition.num_groups)
    constraints = []
    for part in parts:
        # The cell of this part's partition that each cell of the common one is in.
        coarse_Q = part.partition.cells(labels_Q, groups_Q)
        for constraint in part.constraints:
            terms = [
                replace(term, cells=tuple(np.flatnonzero(np.isin(coarse_Q, term.cells)).tolist()))
                for term in constraint.terms
            ]
            constraints.append(replace(constraint, terms=tuple(terms)))
    return RateConstraints(partition=partition, constraints=tuple(constraints))


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
    """Return the constraints called ``name``, one of ``NAMED_CONSTRAINTS``, for all classes, groups and labels.

    - ``demographic_parity``: r(z, k) - r(not z, k) <= bound for every group z and class k, signed;
    - ``equalized_odds``: r(z, k | y) - r(not z, k | y) <= bound for every true label y, group z and class k, signed;
    - ``equal_opportunity``: the same for y = k = ``label``;
    - ``false_negative_rate``: P[predicted another class | true ``label``] <= bound, which is 1 - recall;
    - ``false_positive_rate``: P[predicted ``label`` | another true label] <= bound;
    - ``false_discovery_rate``: P[true label is another | predicted ``label``] <= bound, which is 1 - precision.

    If ``label`` is None, the last three are stated for every class. The false-discovery rate is not a weighted sum of
    rates, because its denominator depends on the model. Multiplied by its denominator the constraint is linear in the
    histogram: (1 - bound) times the mass of wrong discoveries, minus bound times that of right ones, over all records,
    is at most 0. So the value of that constraint is not a rate. ValueError for another name, and for groups, a label or
    a bound out of range.
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
            raise ValueError(f"Expected 0 <= bound <= 1 for false_discovery_rate, which is a share, got {bound}.")
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
            raise ValueError(f"Expected num_groups >= 2, as this constraint compares groups, got {num_groups}.")
        if not bound >= 0:
            raise ValueError(f"Expected bound >= 0, as the largest signed gap is never negative, got {bound}.")
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
    return RateConstraints(partition=partition, constraints=tuple(constraints))


AVERAGED_SHARE = 0.5  # of the steps, the last ones
SHARE_OF_SMALL_CELLS = 0.3  # the best of 0, .1 and .3 under equalized odds: docs/coverage.md, RaCO-DP


class RacoDpConfig(Section):
    """Settings of RaCO-DP: the rate constraint, its bound, and the updates of multipliers; gradient steps are set in
    `dp_sgd`."""

    histogram_share: float = Field(0.1, gt=0, lt=1, description="Share of the budget for the histograms.")
    min_share: PositiveShare = Field(
        0.01, description="Public lower bound on the size of a set of records, as a share of the expected batch."
    )
    size_share: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Part of the gradient's budget for a release of sizes that makes the histogram more exact; "
        "null: .3 where cells are of a label and a group, 0 elsewhere.",
    )
    constraint: ConstraintName = "demographic_parity"
    bound: Annotated[float, Field(ge=-1, le=1)] = Field(
        0.05, description="Bound on the signed gap of a group to all others, or on the rate itself."
    )
    label: CountOrZero | None = Field(1, description="Code of the positive class; null: one constraint per class.")
    constraints: RateConstraints | None = Field(
        None, description="Other constraints over codes of labels and groups, instead of constraint, bound and label."
    )
    sharpness: Positive = Field(
        1.0, description="Inverse temperature of the softmax whose predictions the rates are computed from."
    )
    counts: Literal["probabilities", "labels"] = Field(
        "probabilities",
        description="Whether histograms, and so multipliers, add up probabilities or predicted labels; the theory "
        "assumes probabilities.",
    )
    dual_learning_rate: NotNegative = Field(0.1, description="Learning rate of the multipliers; 0 leaves them at 0.")

    disables: ClassVar[Disables] = {
        ("constraint", "demographic_parity"): ("label",),
        ("constraint", "equalized_odds"): ("label",),
        ("constraints", ...): ("constraint", "bound", "label"),
    }

    @property
    def resolved_size_share(self) -> float:
        """The setting ``size_share``. If it is null: 0.3 if cells distinguish both labels and groups, else 0."""
        if self.size_share is not None:
            return self.size_share
        if self.constraints is None:
            has_small_cells = self.constraint in ("equalized_odds", "equal_opportunity")
        else:
            has_small_cells = self.constraints.partition.num_labels > 1 and self.constraints.partition.num_groups > 1
        return SHARE_OF_SMALL_CELLS if has_small_cells else 0.0

    # Files and digests contain the resolved share, so that a later default does not change a run.
    @field_serializer("size_share", when_used="json")
    def _resolved(self, _: float | None) -> float:
        return self.resolved_size_share


class PricedLoss:
    """The loss of a record in RaCO-DP: its cross entropy, plus the inner product of its predictions s(x) with the
    prices of its cell. Prices are the derivatives of the constraints, weighted by their multipliers, with respect to
    the sums of predictions in a cell, one for each class.

    s(x) = softmax(``sharpness`` * outputs): with a large ``sharpness`` predictions are nearly hard. ``targets`` encodes
    each record's label and cell. Prices are computed for each batch, from the noisy histogram of its predictions:

    - ``release`` maps the exact histogram (Q, C) to prices, adding the noise.
    - ``counts_labels``: the histogram counts predicted labels instead of probabilities.
    - ``prices_QC``: the prices of the present batch. While it is None, the next call must get the outputs of a whole
      batch; it releases their histogram and sets the prices.
    """

    def __init__(
        self,
        *,
        num_cells: int,
        num_classes: int,
        release: Callable[[Tensor], FloatArray],
        sharpness: float = 1.0,
        counts_labels: bool = False,
    ) -> None:
        self._num_cells, self._num_classes, self._release = num_cells, num_classes, release
        self._sharpness, self._counts_labels = sharpness, counts_labels
        # By target: the prices of its cell, then its label one-hot. One look-up per record fetches both.
        one_hot = torch.eye(num_classes).repeat(num_cells, 1)
        self._by_target = torch.cat([torch.zeros_like(one_hot), one_hot], dim=1)
        # A view: prices that are written to it are in the table that records are looked up in.
        self._price_part = self._by_target.numpy().reshape(num_cells, num_classes, -1)[:, :, :num_classes]
        self.prices_QC: FloatArray | None = None

    def targets(self, labels_N: Tensor, cells_N: Tensor) -> Tensor:
        """Return the cell and the label of every record, encoded as one number, shape (N,)."""
        return cells_N * self._num_classes + labels_N

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per record, shape (B,)."""
        rows_BC = self._rows(outputs)
        prices_QC = torch.as_tensor(self._prices(rows_BC, targets), dtype=rows_BC.dtype, device=rows_BC.device)
        cells = torch.div(targets, self._num_classes, rounding_mode="floor")
        labels = targets - cells * self._num_classes
        priced_B: Tensor = (prices_QC[cells] * rows_BC).sum(dim=1)
        return functional.cross_entropy(outputs, labels, reduction="none") + priced_B

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the gradient of the summed losses with respect to ``outputs`` (B, C), in closed form."""
        probability_BC = torch.log_softmax(outputs, dim=1).exp_()
        rows_BC = probability_BC if self._sharpness == 1 else self._rows(outputs)
        self._price_part[...] = self._prices(rows_BC, targets)[:, None]
        table = self._by_target.to(rows_BC).index_select(0, targets)
        prices_BC, truth_BC = table.tensor_split((self._num_classes,), dim=1)
        # The softmax's derivative along the prices: sharpness s (price - <price, s>).
        centred_BC = prices_BC - torch.linalg.vecdot(rows_BC, prices_BC).unsqueeze(1)
        return torch.addcmul(probability_BC, rows_BC, centred_BC, value=self._sharpness).sub_(truth_BC)

    def histogram(self, outputs: Tensor, targets: Tensor, share_B: Tensor | None = None) -> Tensor:
        """Return the exact histogram of the predictions that ``outputs`` give, by cell and class (Q, C).

        ``share_B``: 1 / the number of records of each record's person; None: 1.
        """
        return self._summed(self._rows(outputs), targets, share_B)

    def before_batch(self, clipper: GradientClipper, x: Tensor, targets: Tensor, owner_B: Tensor | None) -> None:
        """Release the noisy histogram of the next batch's predictions, even if the batch is empty, and set the prices
        for its gradients.

        A batch that is later processed in one piece releases its histogram then. Other batches are passed through the
        model here, in addition to the pass for their gradients.
        """
        from fairpate.nn.per_example import shares_of  # a configuration is read without torch

        # Clear the last batch's prices: each batch's histogram is charged once, and so released exactly once.
        self.prices_QC = None
        # An empty batch is one empty part: its zeros get their noise as any others.
        size = clipper.max_records or max(1, len(x))
        # One pass over the whole batch: the loss itself sees all outputs, and releases the histogram.
        if owner_B is None and 0 < len(x) <= size:
            return
        # Shares are of the whole batch: a person may be in two parts.
        share_B = None if owner_B is None else shares_of(owner_B)
        histograms = []
        with torch.no_grad():
            for start in range(0, max(1, len(x)), size):
                part = slice(start, start + size)
                shares = None if share_B is None else share_B[part]
                histograms.append(self.histogram(clipper.model(x[part]), targets[part], shares))
        self.prices_QC = self._release(torch.stack(histograms).sum(dim=0))

    def _rows(self, outputs: Tensor) -> Tensor:
        # For a few classes this is quicker than softmax.
        return torch.log_softmax(outputs if self._sharpness == 1 else self._sharpness * outputs, dim=1).exp()

    def _prices(self, rows_BC: Tensor, targets: Tensor) -> FloatArray:
        if self.prices_QC is None:
            self.prices_QC = self._release(self._summed(rows_BC.detach(), targets))
        return self.prices_QC

    def _summed(self, rows_BC: Tensor, targets: Tensor, share_B: Tensor | None = None) -> Tensor:
        if self._counts_labels:
            rows_BC = functional.one_hot(rows_BC.argmax(dim=1), self._num_classes).to(rows_BC)
        # A row that is not a number would spoil the sums of all others.
        counted_BC = rows_BC.nan_to_num()
        # A person's rows are averaged: together they add 1 in L1 to the histogram, as one record does.
        if share_B is not None:
            counted_BC = counted_BC * share_B[:, None]
        sums = counted_BC.new_zeros(self._num_cells * self._num_classes, self._num_classes)
        # By target, cell and label in one number, so that no cell has to be looked up first; labels are summed out.
        sums.index_add_(0, targets, counted_BC)
        return sums.view(self._num_cells, self._num_classes, -1).sum(dim=1)


def priced_training(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    cells: Tensor,
    steps: HistogramSteps,
    config: RacoDpConfig,
    *,
    num_cells: int,
    num_classes: int,
    pricing: Callable[[FloatArray], FloatArray],
    randomness: PrivateRandomness,
    histogram_randomness: PrivateRandomness,
    person_N: Tensor | None = None,
    watch: Watch | None = None,
) -> PrivateTraining:
    """Return a DP-SGD training under rate constraints, ready to run, on private ``x`` (N, ...), ``labels`` (N,) and
    ``cells`` (N,), the number of each record's cell in the partition by label or group.

    Each step first releases a noisy histogram (Q, C) of its batch's predictions by cell and class. ``pricing`` maps the
    histogram to prices (Q, C), which :class:`PricedLoss` adds to the losses of the records. If ``steps.size_noise`` is
    set, the step also releases the number of records in every cell with this noise, and :func:`refined` corrects the
    histogram by these numbers. ``histogram_randomness`` is separate from the randomness of sampling and gradients, so
    that prices of 0 give DP-SGD bit for bit. ``watch`` sees gradients, histograms and sizes.
    """
    from fairpate.nn.private_fit import GaussianNoise, LaplaceNoise, PrivateTraining, StepPlan

    scale, size_noise = steps.laplace_scale, steps.size_noise
    laplace, sizes = LaplaceNoise(histogram_randomness, scale=scale), GaussianNoise(histogram_randomness)

    def release(histogram_QC: Tensor) -> FloatArray:
        exact_QC = histogram_QC.numpy(force=True)
        # Noise on every entry: an entry without noise would show that its cell is empty.
        noisy_QC = exact_QC + laplace.take(exact_QC.size).reshape(exact_QC.shape)
        if watch is not None:
            watch("histograms", [exact_QC], [noisy_QC], norm=1.0)
        if size_noise is not None:
            # Of the exact histogram, under noise of its own: a noisy row's sum has the variance of all its entries.
            exact_Q = exact_QC.sum(axis=1, dtype=np.float64)
            sizes_Q = exact_Q + size_noise * sizes.take(len(exact_QC)).numpy()
            if watch is not None:
                watch("sizes of cells", [exact_Q], [sizes_Q], norm=1.0)
            noisy_QC = refined(noisy_QC, sizes_Q, laplace_scale=scale, size_noise=size_noise)
        return pricing(noisy_QC)

    loss = PricedLoss(
        num_cells=num_cells,
        num_classes=num_classes,
        release=release,
        sharpness=config.sharpness,
        counts_labels=config.counts == "labels",
    )
    # A person's average row sums to 1 as a record's does: the same event holds for persons.
    plan = StepPlan(events=(steps.event if person_N is None else replace(steps.event, unit="person"),))
    targets = loss.targets(labels, cells)
    drawn: dict[str, Any] = {"randomness": randomness, "person_N": person_N, "watch": watch}
    return PrivateTraining(model, x, targets, loss, steps.gradient, plan=plan, **drawn)


def refined(histogram_QC: FloatArray, sizes_Q: FloatArray, *, laplace_scale: float, size_noise: float) -> FloatArray:
    """Return the histogram that is closest to a noisy histogram and its noisy row sums, by least squares weighted by
    inverse variances."""
    variance = 2 * laplace_scale**2
    if not variance:
        return histogram_QC
    # The covariance of an entry with the row's misfit, over the misfit's variance: that of C entries and of the size.
    weight = variance / (histogram_QC.shape[1] * variance + size_noise**2)
    return histogram_QC + weight * (sizes_Q - histogram_QC.sum(axis=1))[:, None]


@dataclass(frozen=True, kw_only=True)
class HistogramSteps:
    """The steps of DP-SGD together with the noise of the histograms.

    - ``laplace_scale``: scale of the noise on every entry; a record changes all entries by 1 in L1.
    - ``size_floor``: the least number of records of a union of cells; smaller noisy sizes are replaced by it.
    - ``size_noise``: standard deviation of the noise on the number of records of every cell, which a record changes by
      1 in L2; None: these numbers are not released.
    """

    gradient: PrivateSteps
    laplace_scale: float
    size_floor: float
    size_noise: float | None = None

    @property
    def event(self) -> PoissonGaussianLaplaces:
        """The event of all steps together: gradients, histograms and sizes."""
        # Gradients and sizes are Gaussians on one sample: one of less noise, amplified once with the histogram.
        sizes = () if self.size_noise is None else (self.size_noise,)
        return PoissonGaussianLaplaces(
            count=self.gradient.num_steps,
            gradient_noise_multiplier=joint_multiplier(self.gradient.noise_multiplier, *sizes),
            laplace_scale=self.laplace_scale,
            sampling_rate=self.gradient.sampling_rate,
        )


def plan_steps(
    training: DpSgdConfig, config: RacoDpConfig, *, num_records: int, noise_multiplier: float, laplace_scale: float
) -> HistogramSteps:
    """Return the steps for ``num_records`` private records or persons, with the given noise.

    ``training`` has the settings of DP-SGD. ``noise_multiplier`` is that of a single Gaussian release with the cost of
    two: the release of gradients and that of the sizes of cells. Costs add up as inverse squares of noise multipliers;
    the sizes have the share ``size_share`` of the sum.
    """
    # Inverse squares add up: (1 - share) / noise^2 for the gradient and share / noise^2 for the sizes.
    size_share = config.resolved_size_share
    of_gradient = noise_multiplier / math.sqrt(1 - size_share)
    gradient = dp_sgd.plan_steps(training, num_records=num_records, noise_multiplier=of_gradient)
    return HistogramSteps(
        gradient=gradient,
        laplace_scale=laplace_scale,
        # Of the expected batch: the realised one is private.
        size_floor=config.min_share * gradient.expected_batch_size,
        size_noise=noise_multiplier / math.sqrt(size_share) if size_share else None,
    )


def calibrated_steps(
    training: DpSgdConfig, config: RacoDpConfig, target: PrivacyTarget, *, num_records: int
) -> HistogramSteps:
    """Return the steps with the least noise at which they cost at most ``target``; ``histogram_share`` is the part of
    the budget for histograms.

    ValueError for a target that no noise reaches.
    """
    # 1 / joint^2 = 1 / multiplier^2 + 1 / scale^2. Where noise is large, each release costs about half its inverse
    # square, so that `histogram_share` is the histogram's part of the budget.
    of_gradient, of_histogram = math.sqrt(1 - config.histogram_share), math.sqrt(config.histogram_share)
    planned = partial(plan_steps, training, config, num_records=num_records)
    silent = planned(noise_multiplier=0.0, laplace_scale=0.0).event

    def event(joint: float) -> PoissonGaussianLaplaces:
        return replace(silent, gradient_noise_multiplier=joint / of_gradient, laplace_scale=joint / of_histogram)

    joint = noise_within(target, lambda joint: [event(joint)])
    return planned(noise_multiplier=joint / of_gradient, laplace_scale=joint / of_histogram)


@dataclass(frozen=True, kw_only=True)
class ConstraintReport:
    """The constraints' values on soft predictions of private records, computed from noisy histograms, so that they may
    be published.

    ``values`` are computed from the mean histogram over the second half of the steps. ``floored`` names the constraints
    with a union of cells below the size floor in that histogram: their rates were underestimated, so they may exceed
    their bounds.
    """

    names: tuple[str, ...]
    bounds: tuple[float, ...]
    values: tuple[float, ...]
    multipliers: tuple[float, ...]
    floored: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RacoTrained(Trained):
    """The trained model and the report on its rate constraints, which may be published."""

    report: ConstraintReport


def constraints_of(config: RacoDpConfig, *, num_classes: int, num_groups: int) -> RateConstraints:
    """Return the rate constraints that ``config`` states or names. ValueError if they do not fit the numbers of classes
    and groups."""
    if (own := config.constraints) is not None:
        # A partition of one label, or of one group, does not distinguish them.
        sizes = (("classes", own.num_classes, {num_classes}), ("groups", own.partition.num_groups, {1, num_groups}))
        labels = ("labels", own.partition.num_labels, {1, num_classes})
        for words, found, fitting in (*sizes, labels):
            if found not in fitting:
                raise ValueError(
                    f"Expected raco_dp.constraints for the data set's {max(fitting)} {words}, got constraints for "
                    f"{found}; state them for this data set."
                )
        return own
    return named_constraints(
        config.constraint, num_classes=num_classes, num_groups=num_groups, bound=config.bound, label=config.label
    )


class Lagrangian:
    """Maps noisy histograms to prices of predictions (derivatives of the weighted constraints), and updates the
    Lagrange multipliers.

    The prices of a step use the multipliers from before the step, which are updated afterwards. It reads only released
    histograms, so it is post-processing.
    """

    def __init__(self, constraints: RateConstraints, config: RacoDpConfig, steps: HistogramSteps) -> None:
        self.dual = DualAscent(len(constraints.constraints), learning_rate=config.dual_learning_rate)
        self._constraints, self._size_floor = constraints, steps.size_floor
        self._bounds_J = np.array([constraint.bound for constraint in constraints.constraints], dtype=np.float64)
        # The expected size of a batch, because the realised one is private.
        batch_size = steps.gradient.expected_batch_size
        self._pricer = Pricer(constraints, size_floor=self._size_floor, num_records=batch_size)
        # The first half describes models that are far from the published one.
        self._first_kept, self._num_seen = steps.gradient.num_steps // 2, 0
        self._sum_QC = np.zeros((constraints.partition.num_cells, constraints.num_classes))

    def __call__(self, noisy_histogram_QC: FloatArray) -> FloatArray:
        """Return the prices (Q, C) for one noisy histogram: derivatives with respect to sums over the records of a
        batch of the expected size."""
        # Prices first, of the multipliers that earlier steps released: the gradient and the dual step read one
        # histogram.
        values_J, prices_QC = self._pricer(noisy_histogram_QC, self.dual.multipliers_J)
        self.dual.step(values_J - self._bounds_J)
        if self._num_seen >= self._first_kept:
            self._sum_QC += noisy_histogram_QC
        self._num_seen += 1
        return prices_QC

    def report(self) -> ConstraintReport:
        """Return the report on the constraints' values, computed from the histograms of the steps so far."""
        mean_QC = self._sum_QC / max(1, self._num_seen - self._first_kept)
        values_J, _ = self._pricer(mean_QC, self.dual.multipliers_J)
        return ConstraintReport(
            names=self._constraints.names,
            bounds=tuple(self._bounds_J.tolist()),
            values=tuple(values_J.tolist()),
            multipliers=tuple(self.dual.multipliers_J.tolist()),
            floored=self._constraints.floored(mean_QC, size_floor=self._size_floor),
        )


class RacoDp(DpSgdFamily):
    """RaCO-DP: DP-SGD under constraints on the rates of predictions, such as those of each group.

    It protects one record or person, with its group and label. The noise is calibrated to the target.
    """

    protects_persons: ClassVar[bool] = True
    title: ClassVar[str] = "RaCO-DP"
    paper: ClassVar[str] = "Private Rate-Constrained Optimization with Applications to Fair Learning"
    colour: ClassVar[int] = 3

    method: str = "raco_dp"
    raco_dp: RacoDpConfig = RacoDpConfig()

    def check(self) -> None:
        """Raise ConfigError for the relation "replace one", for which the cost of a step is not known."""
        if self.target.record_relation != "add or remove one":
            raise ConfigError(
                f"target.relation: {self.target.relation!r} is not supported by {self.method}, which adds Laplace and "
                "Gaussian noise to sums over one sample; use 'add or remove one'."
            )

    def train(self, training: Training) -> Trained:
        dataset, config, private = training.dataset, self.raco_dp, training.dataset.private
        randomness = self.randomness()
        with training.reporter.stage(self.method) as advance:
            steps = calibrated_steps(self.dp_sgd, config, self.target, num_records=private.num_protected)
            constraints = constraints_of(config, num_classes=dataset.num_classes, num_groups=dataset.num_groups)
            lagrangian, partition = Lagrangian(constraints, config, steps), constraints.partition
            cells = torch.from_numpy(partition.cells(private.y.numpy(), private.z.numpy()))
            named: dict[str, Any] = {"num_cells": partition.num_cells, "num_classes": constraints.num_classes}
            named |= {"pricing": lagrangian, "randomness": randomness, "person_N": private.person_N}
            # Apart from the gradient's, so that multipliers of 0 give DP-SGD bit for bit.
            named["histogram_randomness"] = self.randomness(Stream.HISTOGRAM_NOISE)
            named["watch"] = training.watch
            priced = priced_training(training.model, private.x, private.y, cells, steps, config, **named)
            events = priced.run(averaged_share=AVERAGED_SHARE, on_progress=advance)
        report = lagrangian.report()
        worst = max(range(len(report.names)), key=lambda j: report.values[j] - report.bounds[j])
        training.reporter.note(
            "constraint", f"{report.names[worst]} at {report.values[worst]:.3f}, bound {report.bounds[worst]:g}"
        )
        if report.floored:
            training.reporter.note(
                "floor",
                f"not fully enforced, as a rate has fewer records than raco_dp.min_share: {', '.join(report.floored)}",
            )
        return RacoTrained(model=training.model, events=events, noise=randomness.label, report=report)

    def noise_of_steps(self, events: Sequence[Any]) -> dict[str, tuple[float, float, float]]:
        """Return the noise of gradients, of histograms (Laplace) and of sizes, as the parent class does."""
        joint, share, normal = events[0].gradient_noise_multiplier, self.raco_dp.resolved_size_share, (1.0, 3.0)
        found = {
            "gradients": (joint / math.sqrt(1 - share), *normal),
            "histograms": (events[0].laplace_scale, 2.0, 6.0),
        }
        return found | ({"sizes of cells": (joint / math.sqrt(share), *normal)} if share else {})
