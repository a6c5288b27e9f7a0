"""Constraints on means: what a group's mean of h may be, compared with that of the population it belongs to.

The form of Tran, Fioretto and Van Hentenryck 2021 ("Differentially Private and Fair Deep Learning: A Lagrangian Dual
Approach", arXiv 2009.12562): violation of group g in population u is ``mean over u of h - mean over (u, g) of h``.

    demographic parity   h = predicted probabilities   one population: every record
    equalized odds       the same                      one population per true label
    accuracy parity      h = loss                      one population: every record

With two classes h is the probability of the second alone, as in the paper; with more it is that of each class. It may
be taken of sharpened logits, whose means are closer to those of the labels that are predicted. A record whose group is
``UNKNOWN`` belongs to its population and to no group.

Shapes: N records, B of a batch, C classes, U populations, G groups, K values of h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fairpate.methods.parity import require_codes
from fairpate.nn.per_example import CrossEntropy

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
        """U."""
        return self.num_classes if self.constraint == "equalized_odds" else 1

    @property
    def num_values(self) -> int:
        """K."""
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
