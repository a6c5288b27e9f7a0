"""Parity between groups, as rates of events and as differences of means; and dual ascent on Lagrange multipliers.

Most methods that use this module protect one record's sensitive attribute under the relation ``replace one``: features,
labels and the number of records are public.

*Rates* (:class:`ParityCells`). A binary classifier h is compared between groups on events. Demographic parity has one
event (every record), equalized odds one per label, equal opportunity the positive label, equal false positives the
negative label. ``rate[a, e]`` is P[h = 1 | group a, event e]. Gaps are measured to a reference group, so two other
groups may differ by twice as much.

*Means* (:class:`MeanParity`), as in Tran, Fioretto and Van Hentenryck 2021 (arXiv 2009.12562). The violation of group g
in population u is ``mean over u of h - mean over (u, g) of h``.

    demographic parity   h = predicted probabilities   one population: every record
    equalized odds       h = predicted probabilities   one population per true label
    accuracy parity      h = loss                      one population: every record

With two classes h is the probability of the second class alone, as in the paper; with more, the probability of each
class. ``sharpness`` above 1 brings these means closer to those of the predicted labels. A record whose group is
``UNKNOWN`` belongs to its population and to no group.

*Multipliers* (:class:`DualAscent`) rise with the violation of their constraint and are projected onto the values >= 0,
up to a public cap if there is one. If the violations are released values, a step is post-processing and free.

Shapes: N records, B of a batch, C classes, D features, E events, U populations, G groups, K values h of a record, J
multipliers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fairpate.config import CountOrZero, Fraction, Section
from fairpate.fairness.rates import divide, indices
from fairpate.lazy import torch
from fairpate.types import FloatArray, IntArray

if TYPE_CHECKING:
    from torch import Tensor, nn

Constraint = Literal["demographic_parity", "equalized_odds", "equal_opportunity", "equal_false_positives"]
MeanConstraint = Literal["demographic_parity", "equalized_odds", "accuracy_parity"]
NO_EVENT = -1
UNKNOWN = -1


class ParityConfig(Section):
    """Settings of the parity constraint, for methods that protect only the sensitive attribute."""

    constraint: Constraint = "equalized_odds"
    max_gap: Fraction = Field(0.02, description="Largest gap gamma to the reference group, in every event and label.")
    min_share: float = Field(
        1e-3, gt=0, lt=1, description="Smallest allowed released share of a cell; a smaller share is an error."
    )
    reference_group: CountOrZero = Field(0, description="Code of the group that others are compared with.")


def require_shares(shares: FloatArray, floor: float) -> None:
    """Raise ValueError if a released share is below ``floor``; the message names its group and event.

    ``shares`` (G, ...) have groups first. They are released, so the message reveals nothing more.
    """
    # `not >=` refuses a share that is NaN as well.
    for cell in np.argwhere(~(shares >= floor)):
        where = f"group {cell[0]}" + (f", event {cell[1]}" if shares.ndim > 1 else "")
        raise ValueError(
            f"Expected every released share >= min_share {floor:g}, got {shares[tuple(cell)]:.3g} in {where}; merge "
            "groups, lower min_share or raise epsilon. The cost of the released shares has been spent."
        )


@dataclass(frozen=True, kw_only=True)
class ParityCells:
    """The label, group and event of each record, each (N,). An event is a condition on the label under which groups are
    compared; ``NO_EVENT`` means that a record meets none.

    ``cells_N``: the cell of each record, which is its event and group as one code: event times the number of groups,
    plus group; ``num_cells`` for a record without an event.
    """

    labels_N: IntArray
    groups_N: IntArray
    events_N: IntArray
    cells_N: IntArray
    num_groups: int
    num_events: int
    num_cells: int

    @classmethod
    def of(
        cls,
        labels_N: npt.ArrayLike,
        groups_N: npt.ArrayLike,
        *,
        num_groups: int,
        constraint: Constraint,
        num_classes: int = 2,
        positive_label: int = 1,
    ) -> ParityCells:
        """Return the cells (group and event) of records under the parity notion ``constraint``.

        ValueError for labels, groups or a positive label out of range, for lengths that differ, and for fewer than two
        groups.
        """
        labels = indices("labels", np.asarray(labels_N), num_classes)
        groups = indices("groups", np.asarray(groups_N), num_groups)
        if len(labels) != len(groups) or not len(labels):
            raise ValueError(f"Expected one group per label, got {len(groups)} groups for {len(labels)} labels.")
        if num_groups < 2:
            raise ValueError(f"Expected at least 2 groups to compare, got {num_groups}.")
        if constraint in ("equal_opportunity", "equal_false_positives") and not positive_label < num_classes:
            raise ValueError(f"Expected positive_label < {num_classes}, got {positive_label}.")
        events_of: dict[Constraint, IntArray] = {
            "demographic_parity": np.zeros_like(labels),
            "equalized_odds": labels,
            "equal_opportunity": np.where(labels == positive_label, 0, NO_EVENT),
            "equal_false_positives": np.where(labels != positive_label, 0, NO_EVENT),
        }
        events_N, num_events = events_of[constraint], num_classes if constraint == "equalized_odds" else 1
        num_cells = num_events * num_groups
        return cls(
            labels_N=labels,
            groups_N=groups,
            events_N=events_N,
            cells_N=np.where(events_N == NO_EVENT, num_cells, events_N * num_groups + groups),
            num_groups=num_groups,
            num_events=num_events,
            num_cells=num_cells,
        )

    def sums(self, values: npt.ArrayLike) -> FloatArray:
        """Return the sums of ``values`` (N, ...) over the records of each group and event, shape (G, E, ...)."""
        table = np.asarray(values, dtype=np.float64)
        total = np.zeros((self.num_groups, self.num_events, *table.shape[1:]))
        inside = self.events_N != NO_EVENT
        # Plain indexing would count a cell once, however many records it has.
        np.add.at(total, (self.groups_N[inside], self.events_N[inside]), table[inside])
        return total

    def counts(self) -> FloatArray:
        """Return the number of records of each group and event, shape (G, E)."""
        return self.sums(np.ones(len(self.labels_N)))

    def rates(self, positive_N: npt.ArrayLike) -> FloatArray:
        """Return P[h = 1 | group, event] of hard or probabilistic predictions h (N,), shape (G, E); NaN in an empty
        cell."""
        return divide(self.sums(positive_N), self.counts())


@dataclass(frozen=True, kw_only=True)
class MeanParity:
    """A parity constraint on means: which means are compared, and the public numbers of groups and classes.

    ``sharpness`` multiplies the logits before they become probabilities.
    """

    constraint: MeanConstraint
    num_groups: int
    num_classes: int
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        if self.num_groups < 2 or self.num_classes < 2:
            raise ValueError(f"Expected at least 2 groups and 2 classes, got {self.num_groups} and {self.num_classes}.")

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (U, G, K) of violations and multipliers: populations, groups, and values per record; each entry is
        one constraint."""
        # A loss is one number, and of two classes one probability determines the other.
        num_populations = self.num_classes if self.constraint == "equalized_odds" else 1
        is_scalar = self.constraint == "accuracy_parity" or self.num_classes == 2
        return num_populations, self.num_groups, 1 if is_scalar else self.num_classes

    def values(self, outputs_BC: Tensor, labels_B: Tensor) -> Tensor:
        """Return each record's value h, whose means over groups are compared, shape (B, K); ``outputs_BC`` are
        logits."""
        if self.constraint == "accuracy_parity":
            return torch.nn.functional.cross_entropy(outputs_BC, labels_B, reduction="none")[:, None]
        probability_BC = (self.sharpness * outputs_BC).softmax(dim=1)
        # Of two classes, the mean of one determines that of the other.
        return probability_BC[:, 1:] if self.num_classes == 2 else probability_BC

    def populations(self, labels_N: Tensor) -> Tensor:
        """Return the index of every record's population (all records, or those with its label), (N,) ``int64``."""
        return labels_N if self.constraint == "equalized_odds" else torch.zeros_like(labels_N)

    def cells(self, labels_N: Tensor, groups_N: Tensor) -> Tensor:
        """Return the cell of every record, ``population * G + group``, (N,) ``int64``; ``UNKNOWN`` for an unknown
        group.

        ValueError for lengths that differ and for a label or group out of range.
        """
        if labels_N.shape != groups_N.shape:
            raise ValueError(f"Expected one group per label, got {len(groups_N)} groups for {len(labels_N)} labels.")
        indices("labels", labels_N.cpu().numpy(), self.num_classes)
        indices("groups", groups_N[groups_N != UNKNOWN].cpu().numpy(), self.num_groups)
        cells_N = self.populations(labels_N) * self.num_groups + groups_N
        # An unknown group of -1 would give the last group of the population before.
        return torch.where(groups_N == UNKNOWN, UNKNOWN, cells_N)

    def population_sizes(self, labels_N: Tensor) -> Tensor:
        """Return the number of records in each population, (U,) ``float64``, which depends on labels only."""
        return torch.bincount(self.populations(labels_N), minlength=self.shape[0]).double()

    def group_sizes(self, cells_N: Tensor) -> Tensor:
        """Return the number of records of each group in each population, (U, G) ``float64``; it is not to be
        published."""
        num_populations, num_groups, _ = self.shape
        sizes = torch.bincount(cells_N[cells_N != UNKNOWN], minlength=num_populations * num_groups)
        return sizes.double().view(num_populations, num_groups)

    def violations(self, values_NK: Tensor, labels_N: Tensor, cells_N: Tensor, *, sizes_UG: Tensor) -> Tensor:
        """Return the violations of parity by population, group and value (U, G, K): the mean of ``values_NK`` over each
        population, minus the sum over a group divided by its size in ``sizes_UG``.

        They are differentiable in the values, and NaN or infinite if a size or a population is 0.
        """
        num_populations, num_groups, num_values = self.shape
        known_N = cells_N != UNKNOWN
        total_UK = values_NK.new_zeros(num_populations, num_values).index_add(0, self.populations(labels_N), values_NK)
        sums_JK = values_NK.new_zeros(num_populations * num_groups, num_values)
        sums_UGK = sums_JK.index_add(0, cells_N[known_N], values_NK[known_N]).view(self.shape)
        mean_UK = total_UK / self.population_sizes(labels_N).to(total_UK)[:, None]
        # PF-LD passes released sizes, because the exact ones are private.
        return mean_UK[:, None] - sums_UGK / sizes_UG.to(sums_UGK)[..., None]

    def measured(
        self, model: nn.Module, x: Tensor, y: Tensor, cells: Tensor, sizes_UG: Tensor, *, clip_value: float = math.inf
    ) -> Tensor:
        """Return the exact violations of parity by population, group and value (U, G, K), ``float64``, over all
        records; they are not to be published.

        Predictions are made in evaluation mode; the model is left in training mode. ``clip_value`` bounds the L2 norm
        of a record's values.
        """
        from fairpate.nn.fit import predict_logits  # a configuration is read without torch

        with torch.no_grad():
            values_NK = self.values(predict_logits(model, x), y).double()
            # Prediction has left it in evaluation mode.
            model.train()
            # A norm of 0 gives an infinite factor, which is cut to 1 and leaves the value at 0.
            norms_N1 = torch.linalg.vector_norm(values_NK, dim=1, keepdim=True)
            values_NK = values_NK * (clip_value / norms_N1).clamp(max=1)
            return self.violations(values_NK, y, cells, sizes_UG=sizes_UG)

    def slopes(self, multipliers_UGK: Tensor, labels_N: Tensor, *, sizes_UG: Tensor) -> Tensor:
        """Return the slopes (U, G, K): how much the sum of multipliers times violations changes with the value h of one
        record. There is a slope for a record of each population and group.

        ``labels_N`` determine the sizes of the populations. Slopes are 0 if all multipliers are 0.
        """
        # A record has the weight 1 / n_u in its population's mean and -1 / n_ug in the mean of its group.
        # No record is in a population of size 0, so the slope there does not matter but must be finite.
        total_UK = multipliers_UGK.sum(dim=1) / self.population_sizes(labels_N).clamp(min=1)[:, None]
        return total_UK[:, None] - multipliers_UGK / sizes_UG[..., None]


@dataclass(frozen=True)
class ValueAlong:
    """A loss per record: the inner product of the record's value h, whose group means are compared, with a direction
    (K,).

    Its gradient, which can be clipped per record, is that of h in this direction. Targets (B, 1 + K) contain the label
    and the direction of each record.
    """

    parity: MeanParity

    def __call__(self, outputs_BC: Tensor, targets: Tensor) -> Tensor:
        """Return the inner product of each record's value h with its direction, shape (B,)."""
        return (self.parity.values(outputs_BC, targets[:, 0].long()) * targets[:, 1:]).sum(dim=1)

    def gradient(self, outputs_BC: Tensor, targets: Tensor) -> Tensor:
        """Return the gradient of the summed values with respect to the outputs, (B, C), in closed form."""
        from fairpate.nn.per_example import CrossEntropy  # a configuration is read without torch

        directions_BK, sharpness = targets[:, 1:], self.parity.sharpness
        with torch.no_grad():
            if self.parity.constraint == "accuracy_parity":
                return CrossEntropy().gradient(outputs_BC, targets[:, 0].long()) * directions_BK
            probability_BC = (sharpness * outputs_BC).softmax(dim=1)
            if self.parity.num_classes == 2:
                # The derivative of p_1 is p_0 p_1 with respect to its own logit, and the negative for the other.
                slope_B1 = sharpness * probability_BC[:, :1] * probability_BC[:, 1:] * directions_BK
                return torch.cat([-slope_B1, slope_B1], dim=1)
            # The Jacobian of softmax, diag(p) - p p^T, times the direction.
            mean_B1 = (probability_BC * directions_BK).sum(dim=1, keepdim=True)
            return sharpness * probability_BC * (directions_BK - mean_B1)


class DualAscent:
    """Lagrange multipliers (J,) that start at 0 and rise where a constraint is violated."""

    def __init__(self, num_multipliers: int, *, learning_rate: float, cap: float = math.inf) -> None:
        self._learning_rate, self._cap = learning_rate, cap
        self.multipliers_J = np.zeros(num_multipliers)

    def step(self, violations_J: FloatArray) -> FloatArray:
        """Add the learning rate times ``violations_J`` to the multipliers, project them onto [0, cap], and return them,
        shape (J,).

        A violation is positive where its constraint does not hold. ValueError for infinite or NaN violations.
        """
        raised_J = np.maximum(self.multipliers_J + self._learning_rate * violations_J, 0.0)
        # One product checks all entries; it overflows from 1e154 on, where multipliers mean nothing any more.
        if not math.isfinite(raised_J.dot(raised_J)):
            raise ValueError(f"Expected finite multipliers, got {raised_J}; lower the dual learning rate.")
        self.multipliers_J = np.minimum(raised_J, self._cap)
        return self.multipliers_J
