"""What every method here takes and gives: private records in, a model and its events out.

A method states no epsilon. :func:`price` asks the one accountant, under the unit and the relation that the events name.

Shapes: N private records, M public ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fairpate.nn.private_fit import OsRandomness, PrivateRandomness, SeededRandomness
from fairpate.privacy import accountant
from fairpate.privacy.accountant import Accounting, Event, PoissonGaussians
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

    ``noise`` says where the noise came from, and so whether anyone is protected.
    """

    model: nn.Module
    events: tuple[Event, ...]
    noise: str


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

    Loss distributions price sampled sums alone; where other events are among them, Renyi curves price all. ValueError
    for events under another relation, for none, and for those that hold private votes.
    """
    if not events or any(event.relation != target.relation for event in events):
        raise ValueError(f"Expected events under relation {target.relation!r}, got {[e.relation for e in events]}.")
    sampled = [event for event in events if isinstance(event, PoissonGaussians)]
    if len(sampled) == len(events):
        accounting = target.accounting
        epsilon = accountant.sampled_epsilon(sampled, target_delta=target.delta, accounting=accounting)
    else:
        accounting, epsilon = "rdp", accountant.epsilon(events, target_delta=target.delta).epsilon
    return Price(
        epsilon=epsilon,
        delta=target.delta,
        unit=events[0].unit,
        relation=target.relation,
        accounting=accounting,
    )


def private_randomness(noise: str, seed: int) -> PrivateRandomness:
    """The randomness that a configuration's ``noise`` names; ``seed`` is read for ``seeded`` only."""
    return SeededRandomness(seed) if noise == "seeded" else OsRandomness()
