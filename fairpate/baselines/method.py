"""What every method here takes and gives: private records in, a model and its events out.

A method states no epsilon. :func:`price` asks the one accountant, under the unit and the relation that the events name.

Shapes: N private records, M public ones, G groups, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from fairpate.nn.private_fit import OsRandomness, PrivateRandomness, SeededRandomness
from fairpate.privacy import accountant
from fairpate.privacy.accountant import Accounting, Event
from fairpate.privacy.laplace import pure_epsilon
from fairpate.train_config import PrivacyTarget
from fairpate.types import Relation, Unit

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
    ``epsilon_as_published`` is what the paper's own accounting says of this training: never a promise of ours.
    """

    model: nn.Module
    events: tuple[Event, ...]
    noise: str
    mixing_GCC: npt.NDArray[np.float64] | None = None
    remarks: tuple[str, ...] = ()
    epsilon_as_published: float | None = None


@dataclass(frozen=True, kw_only=True)
class Price:
    """An epsilon with all that it depends on; ``inf`` where nothing is promised."""

    epsilon: float
    delta: float
    unit: Unit
    relation: Relation
    accounting: Accounting


def price(events: Sequence[Event], target: PrivacyTarget) -> Price:
    """What the accountant says of ``events`` at the target's delta.

    Where an event has no loss distribution, Renyi curves price all; pure promises may just add up. ValueError for
    events under another relation than the target's, for units or relations that differ, for no event, and for those
    that hold private votes.
    """
    relation = target.relation or (events[0].relation if events else None)
    if relation is None or any(event.relation != relation for event in events):
        raise ValueError(f"Expected events under relation {relation!r}, got {[e.relation for e in events]}.")
    accounting: Accounting = target.accounting if accountant.has_loss_distributions(events) else "rdp"
    composed = accountant.epsilon_of(events, target_delta=target.delta, accounting=accounting)
    return Price(
        epsilon=min(composed, pure_epsilon(events)),
        delta=target.delta,
        unit=events[0].unit,
        relation=relation,
        accounting=accounting,
    )


def private_randomness(noise: str, seed: int) -> PrivateRandomness:
    """The randomness that a configuration's ``noise`` names; ``seed`` is read for ``seeded`` only."""
    return SeededRandomness(seed) if noise == "seeded" else OsRandomness()
