"""What every method here takes and gives: private records in, a model and its events out.

A method states no epsilon. :func:`price` asks the one accountant, under the unit and the relation that the events name.

Shapes: N private records, M public ones, G groups, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from fairpate.privacy import accountant
from fairpate.privacy.accountant import Accounting
from fairpate.privacy.events import Event, of_unit
from fairpate.privacy.laplace import pure_epsilon
from fairpate.types import QueryOutcomes, Relation, Unit

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fairpate.nn.private_fit import PrivateRandomness

Progress = Callable[[int, int], None]
NO_NOISE = "no noise: not private"


@dataclass(frozen=True, kw_only=True)
class PublicPool:
    """Public records without labels: features (M, ...) and groups (M,)."""

    x: Tensor
    groups: Tensor

    def __post_init__(self) -> None:
        if len(self.x) != len(self.groups):
            raise ValueError(f"Expected one group per public record, got {len(self.groups)} for {len(self.x)}.")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a method releases: ``model`` in evaluation mode. ``events`` are all that touched private records.

    ``noise`` says where the noise came from, and so whether anyone is protected. ``mixing_GCC[a, j, k]``, where there
    is one, is the probability of predicting k for a member of group a where the model says j; a
    :class:`fairpate.nn.mixture.Mixture` predicts by a member that it draws. ``remarks`` belong in the statement.
    ``epsilon_as_in_paper`` is what the paper's own accounting says of this training: no guarantee of ours.

    For methods that ask teachers, ``queries`` are how their queries ended, ``epsilon_bound`` is the guarantee that was
    fixed before the first, ``num_training_labels`` how many labels the model learned from.
    """

    model: nn.Module
    events: tuple[Event, ...]
    noise: str
    mixing_GCC: npt.NDArray[np.float64] | None = None
    remarks: tuple[str, ...] = ()
    epsilon_as_in_paper: float | None = None
    queries: QueryOutcomes | None = None
    epsilon_bound: float | None = None
    num_training_labels: int | None = None

    def of_unit(self, unit: Unit) -> Self:
        """The same, where what the events bound is what all that a ``unit`` holds does together."""
        return replace(self, events=tuple(of_unit(event, unit) for event in self.events))


@dataclass(frozen=True, kw_only=True)
class Price:
    """An epsilon with all that it depends on; ``inf`` where nothing is guaranteed."""

    epsilon: float
    delta: float
    unit: Unit
    relation: Relation
    accounting: Accounting


def price(
    events: Sequence[Event], *, delta: float, relation: Relation | None = None, accounting: Accounting = "pld"
) -> Price:
    """What the accountant says of ``events`` at ``delta``; ``relation`` None is the events' own.

    Where an event has no loss distribution, Renyi curves price all; pure guarantees may just add up. ValueError for
    events under another relation, for units or relations that differ, for no event, and for those that hold private
    votes.
    """
    relation = relation or (events[0].relation if events else None)
    if relation is None or any(event.relation != relation for event in events):
        raise ValueError(f"Expected events under relation {relation!r}, got {[e.relation for e in events]}.")
    if not accountant.has_loss_distributions(events):
        accounting = "rdp"
    # Both bounds hold for any data, so that taking the smaller one tells nothing.
    composed = accountant.epsilon_of(events, target_delta=delta, accounting=accounting)
    return Price(
        epsilon=min(composed, pure_epsilon(events)),
        delta=delta,
        unit=events[0].unit,
        relation=relation,
        accounting=accounting,
    )


def private_randomness(noise: str, seed: int) -> PrivateRandomness:
    """The randomness that a configuration's ``noise`` names; ``seed`` is read for ``seeded`` only."""
    from fairpate.nn.private_fit import OsRandomness, SeededRandomness  # of torch: who reads a configuration draws none

    return SeededRandomness(seed) if noise == "seeded" else OsRandomness()
