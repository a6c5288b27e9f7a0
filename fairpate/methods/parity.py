"""Parity as rates of events and as means, and dual ascent on its multipliers, for methods that protect the attribute.

The unit is one record's ``sensitive attribute``, the relation ``replace one``: features, labels and the number of
records are public.

*Rates* (:class:`ParityCells`). A classifier h is compared between groups on events: demographic parity has one (every
record), equalized odds one per label, equal opportunity the positive label, equal false positives the other one.
``rate[a, e]`` is P[h = 1 | group a, event e], and its gap is taken to a reference group: two other groups may differ by
twice as much.

*Means* (:class:`MeanParity`), as in Tran, Fioretto and Van Hentenryck 2021 (arXiv 2009.12562): the violation of
group g in population u is ``mean over u of h - mean over (u, g) of h``.

    demographic parity   h = predicted probabilities   one population: every record
    equalized odds       the same                      one population per true label
    accuracy parity      h = loss                      one population: every record

With two classes h is the probability of the second alone, as in the paper; with more it is that of each class. It may
be taken of sharpened logits, whose means are closer to those of the predicted labels. A record whose group is
``UNKNOWN`` belongs to its population and to no group.

*Multipliers* (:class:`DualAscent`) rise with each constraint's violation and are projected into a public set: the
non-negative orthant, its part below a cap in every coordinate, or within an L1 ball, as convergence theory asks for a
compact one. Violations are released values, exact or noisy, so a step is post-processing and costs nothing.

Shapes: N records, B of a batch, C classes, D features, E events, U populations, G groups, K values of h, J multipliers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fairpate.config import CountOrZero, Fraction, Section
from fairpate.nn.per_example import CrossEntropy
from fairpate.types import IntArray

FloatArray = npt.NDArray[np.float64]
Constraint = Literal["demographic_parity", "equalized_odds", "equal_opportunity", "equal_false_positives"]


class ParityConfig(Section):
    """Parity that methods for the sensitive attribute alone keep across groups."""

    constraint: Constraint = "equalized_odds"
    max_gap: Fraction = Field(0.02, description="gamma: to the reference group, in every event and label.")
    min_share: float = Field(1e-3, gt=0, lt=1, description="Least released share of a cell; fewer is an error.")
    reference_group: CountOrZero = Field(0, description="Code of the group that others are compared with.")


NO_EVENT = -1
_NUM_EVENTS: dict[Constraint, int] = {
    "demographic_parity": 1,
    "equalized_odds": 2,
    "equal_opportunity": 1,
    "equal_false_positives": 1,
}


@dataclass(frozen=True, kw_only=True)
class ParityCells:
    """Binary labels (N,), groups (N,) and the event (N,) that each record belongs to, ``NO_EVENT`` for none."""

    labels_N: IntArray
    groups_N: IntArray
    events_N: IntArray
    num_groups: int
    num_events: int

    @classmethod
    def of(
        cls, labels_N: npt.ArrayLike, groups_N: npt.ArrayLike, *, num_groups: int, constraint: Constraint
    ) -> ParityCells:
        """ValueError for labels other than 0 and 1, groups out of range, lengths that differ, one group alone."""
        labels, groups = np.asarray(labels_N), np.asarray(groups_N)
        require_codes("labels", labels, 2)
        require_codes("groups", groups, num_groups)
        if len(labels) != len(groups) or not len(labels):
            raise ValueError(f"Expected one group per label, got {len(groups)} for {len(labels)}.")
        if num_groups < 2:
            raise ValueError(f"Expected at least 2 groups to compare, got {num_groups}.")
        return cls(
            labels_N=labels.astype(np.int64),
            groups_N=groups.astype(np.int64),
            events_N=_events(labels.astype(np.int64), constraint),
            num_groups=num_groups,
            num_events=_NUM_EVENTS[constraint],
        )

    def sums(self, values: npt.ArrayLike) -> FloatArray:
        """The sums of ``values`` (N, ...) over the records of each group and event, shape (G, E, ...)."""
        table = np.asarray(values, dtype=np.float64)
        total = np.zeros((self.num_groups, self.num_events, *table.shape[1:]))
        inside = self.events_N != NO_EVENT
        # Plain indexing would count a cell once, however many records it has.
        np.add.at(total, (self.groups_N[inside], self.events_N[inside]), table[inside])
        return total

    def counts(self) -> FloatArray:
        """Count the records of each group and event, shape (G, E)."""
        return self.sums(np.ones(len(self.labels_N)))

    def rates(self, positive_N: npt.ArrayLike) -> FloatArray:
        """P[h = 1 | group, event] of hard or probabilistic predictions, shape (G, E); NaN in an empty cell."""
        count_GE = self.counts()
        rate_GE: FloatArray = np.divide(
            self.sums(positive_N), count_GE, out=np.full(count_GE.shape, np.nan), where=count_GE > 0
        )
        return rate_GE


def require_codes(name: str, values: npt.NDArray[Any], stop: int) -> None:
    """ValueError unless every value is one of 0 .. ``stop`` - 1."""
    if values.ndim != 1 or not np.isin(values, np.arange(stop)).all():
        raise ValueError(f"Expected {name} to be codes from 0 to {stop - 1}, got {np.unique(values)[:5].tolist()}.")


def require_shares(shares: FloatArray, floor: float) -> None:
    """ValueError naming the cells of ``shares`` (released, so public; groups first) below the declared ``floor``."""
    # `not >=` names a share that is NaN as well.
    for cell in np.argwhere(~(shares >= floor)):
        where = f"group {cell[0]}" + (f", event {cell[1]}" if shares.ndim > 1 else "")
        raise ValueError(
            f"Expected every released share >= min_share {floor:g}, got {shares[tuple(cell)]:.3g} in {where}; merge "
            "groups, lower min_share or raise epsilon. What was released to find this out has been spent."
        )


def _events(labels_N: IntArray, constraint: Constraint) -> IntArray:
    if constraint == "equalized_odds":
        return labels_N
    if constraint == "demographic_parity":
        return np.zeros_like(labels_N)
    if constraint in ("equal_opportunity", "equal_false_positives"):
        return np.where(labels_N == (constraint == "equal_opportunity"), 0, NO_EVENT)
    raise ValueError(f"Expected constraint to be one of {', '.join(_NUM_EVENTS)}, got {constraint!r}.")


MeanConstraint = Literal["demographic_parity", "equalized_odds", "accuracy_parity"]
UNKNOWN = -1


@dataclass(frozen=True, kw_only=True)
class MeanParity:
    """Which means are compared, of how many groups and classes; both numbers are public.

    ``sharpness`` multiplies the logits before they become probabilities.
    """

    constraint: MeanConstraint
    num_groups: int
    num_classes: int
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        if self.num_groups < 2 or self.num_classes < 2:
            raise ValueError(
                f"Expected at least 2 groups and 2 classes to compare, got {self.num_groups} and {self.num_classes}."
            )

    @property
    def num_populations(self) -> int:
        """Return U."""
        return self.num_classes if self.constraint == "equalized_odds" else 1

    @property
    def num_values(self) -> int:
        """Return K."""
        return 1 if self.constraint == "accuracy_parity" or self.num_classes == 2 else self.num_classes

    @property
    def shape(self) -> tuple[int, int, int]:
        """(U, G, K): one constraint each."""
        return self.num_populations, self.num_groups, self.num_values

    def values(self, outputs_BC: Tensor, labels_B: Tensor) -> Tensor:
        """h of every record, shape (B, K), from logits."""
        if self.constraint == "accuracy_parity":
            return functional.cross_entropy(outputs_BC, labels_B, reduction="none")[:, None]
        probability_BC = (self.sharpness * outputs_BC).softmax(dim=1)
        # Of two classes, the mean of one determines that of the other.
        return probability_BC[:, 1:] if self.num_classes == 2 else probability_BC

    def populations(self, labels_N: Tensor) -> Tensor:
        """The population of every record, (N,) ``int64``."""
        return labels_N if self.constraint == "equalized_odds" else torch.zeros_like(labels_N)

    def cells(self, labels_N: Tensor, groups_N: Tensor) -> Tensor:
        """``population * G + group`` of every record, (N,) ``int64``; ``UNKNOWN`` without a group.

        ValueError for lengths that differ and for a label or group out of range.
        """
        if labels_N.shape != groups_N.shape:
            raise ValueError(f"Expected one group per label, got {len(groups_N)} for {len(labels_N)}.")
        require_codes("labels", labels_N.cpu().numpy(), self.num_classes)
        require_codes("groups", groups_N[groups_N != UNKNOWN].cpu().numpy(), self.num_groups)
        cells_N = self.populations(labels_N) * self.num_groups + groups_N
        # Added as it is, -1 would be the last group of the population before.
        return torch.where(groups_N == UNKNOWN, UNKNOWN, cells_N)

    def population_sizes(self, labels_N: Tensor) -> Tensor:
        """How many records each population has, (U,) ``float64``. Labels alone decide them."""
        return torch.bincount(self.populations(labels_N), minlength=self.num_populations).double()

    def group_sizes(self, cells_N: Tensor) -> Tensor:
        """How many records each group has in each population, (U, G) ``float64``: private."""
        sizes = torch.bincount(cells_N[cells_N != UNKNOWN], minlength=self.num_populations * self.num_groups)
        return sizes.double().view(self.num_populations, self.num_groups)

    def violations(self, values_NK: Tensor, labels_N: Tensor, cells_N: Tensor, *, sizes_UG: Tensor) -> Tensor:
        """``mean over u - sum over (u, g) / sizes_UG`` of h, shape (U, G, K), differentiable in the values.

        NaN or infinite where a size or a population is 0.
        """
        num_populations, num_groups, _ = self.shape
        total_UK = _sums(values_NK, self.populations(labels_N), num_populations)
        known_N = cells_N != UNKNOWN
        sums_UGK = _sums(values_NK[known_N], cells_N[known_N], num_populations * num_groups).view(self.shape)
        mean_UK = total_UK / self.population_sizes(labels_N).to(total_UK)[:, None]
        # By sizes that are given: a sum over a private, counted size would move with two groups at once.
        return mean_UK[:, None] - sums_UGK / sizes_UG.to(sums_UGK)[..., None]

    def slopes(self, multipliers_UGK: Tensor, labels_N: Tensor, *, sizes_UG: Tensor) -> Tensor:
        """The derivative of ``sum of multipliers times violations`` with respect to h of a record in (u, g), (U, G, K).

        ``labels_N`` give the sizes of the populations. 0 where no multiplier is at work.
        """
        # No record is in a population of size 0: there any finite slope does.
        total_UK = multipliers_UGK.sum(dim=1) / self.population_sizes(labels_N).clamp(min=1)[:, None]
        return total_UK[:, None] - multipliers_UGK / sizes_UG[..., None]

    def levels_down(self, max_multiplier: float) -> str | None:
        """A warning where equal losses may be reached by raising the loss of the group that fares better; else None.

        The loss of a group with share s weighs at least ``1 - c / s`` in what two groups under multipliers up to c
        minimise together. Below 0 it is raised; the group that fares better may be the smaller one, whose share is
        private and 1 / 2 at most.
        """
        if self.constraint != "accuracy_parity" or max_multiplier * self.num_groups <= 1:
            return None
        return (
            f"multipliers up to {max_multiplier:g} may keep accuracy parity by serving the better group worse: above a "
            "group's share of the records they raise its loss. Look at the accuracy of each group, or keep "
            f"max_multiplier below the smallest share, which is at most {1 / self.num_groups:.2g}."
        )


class ValueAlong:
    """h of a record along a direction, as a value to differentiate: targets (B, 1 + K) hold label and direction."""

    def __init__(self, parity: MeanParity) -> None:
        self._parity = parity

    def __call__(self, outputs_BC: Tensor, targets: Tensor) -> Tensor:
        """One value per record, shape (B,)."""
        return (self._parity.values(outputs_BC, targets[:, 0].long()) * targets[:, 1:]).sum(dim=1)

    @torch.no_grad()
    def gradient(self, outputs_BC: Tensor, targets: Tensor) -> Tensor:
        """The gradient of the summed values with respect to the outputs, (B, C), in closed form."""
        directions_BK = targets[:, 1:]
        if self._parity.constraint == "accuracy_parity":
            return CrossEntropy().gradient(outputs_BC, targets[:, 0].long()) * directions_BK
        sharpness = self._parity.sharpness
        probability_BC = (sharpness * outputs_BC).softmax(dim=1)
        if self._parity.num_classes == 2:
            # The derivative of p_1 is p_0 p_1 with respect to its own logit, and the negative for the other.
            slope_B1 = sharpness * probability_BC[:, :1] * probability_BC[:, 1:] * directions_BK
            return torch.cat([-slope_B1, slope_B1], dim=1)
        # The Jacobian of softmax, diag(p) - p p^T, times the direction.
        mean_B1 = (probability_BC * directions_BK).sum(dim=1, keepdim=True)
        return sharpness * probability_BC * (directions_BK - mean_B1)


def _sums(values_NK: Tensor, index_N: Tensor, size: int) -> Tensor:
    return values_NK.new_zeros(size, values_NK.shape[1]).index_add(0, index_N, values_NK)


def project(values_J: npt.ArrayLike, *, cap: float = math.inf, l1_radius: float = math.inf) -> FloatArray:
    """The nearest point with 0 <= entries <= ``cap``, or with non-negative entries that sum to ``l1_radius`` at most.

    ValueError for values that are not finite, for bounds that are not positive, and for both bounds at once.
    """
    _check_bounds(cap, l1_radius)
    return _projected(np.asarray(values_J, dtype=np.float64), cap, l1_radius)


class DualAscent:
    """Multipliers that rise where a constraint is violated; from 0."""

    def __init__(
        self,
        num_multipliers: int,
        *,
        learning_rate: float,
        cap: float = math.inf,
        l1_radius: float = math.inf,
    ) -> None:
        if not 0 <= learning_rate < math.inf:
            raise ValueError(f"Expected a dual learning rate >= 0 and finite, got {learning_rate}.")
        self._learning_rate, self._cap, self._l1_radius = learning_rate, cap, l1_radius
        _check_bounds(cap, l1_radius)
        self.multipliers_J = np.zeros(num_multipliers)

    def step(self, violations_J: FloatArray) -> FloatArray:
        """Ascend ``violations_J``, positive where a constraint fails; the multipliers after it, shape (J,)."""
        raised_J = self.multipliers_J + self._learning_rate * violations_J
        self.multipliers_J = _projected(raised_J, self._cap, self._l1_radius)
        return self.multipliers_J


def _projected(values_J: FloatArray, cap: float, l1_radius: float) -> FloatArray:
    positive_J: FloatArray = np.maximum(values_J, 0.0)
    # One product checks all entries; it overflows from 1e154 on, where multipliers mean nothing any more.
    if not math.isfinite(positive_J.dot(positive_J)):
        raise ValueError(f"Expected finite multipliers, got {values_J}; lower the dual learning rate.")
    if cap < math.inf:
        return np.minimum(positive_J, cap)
    is_inside = l1_radius == math.inf or positive_J.sum() <= l1_radius
    return positive_J if is_inside else _onto_simplex(positive_J, l1_radius)


def _check_bounds(cap: float, l1_radius: float) -> None:
    if not (cap > 0 and l1_radius > 0):
        raise ValueError(f"Expected cap > 0 and l1_radius > 0, got {cap} and {l1_radius}.")
    if math.isfinite(cap) and math.isfinite(l1_radius):
        raise ValueError(f"Expected a cap or an L1 radius, got both: {cap} and {l1_radius}.")


def _onto_simplex(positive_J: FloatArray, total: float) -> FloatArray:
    """The nearest non-negative vector with sum ``total``, below that of ``positive_J``: all entries sink alike."""
    # Duchi et al. 2008: the largest entries alone, those that stay above it, decide how far all sink.
    falling_J = np.sort(positive_J)[::-1]
    sinks_J = (np.cumsum(falling_J) - total) / np.arange(1, len(falling_J) + 1)
    sink = sinks_J[np.flatnonzero(falling_J > sinks_J)[-1]]
    sunk_J: FloatArray = np.maximum(positive_J - sink, 0.0)
    return sunk_J
