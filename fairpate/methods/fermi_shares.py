"""The games of DP-FERMI that records play, and the shares of groups in them: declared, or released once under noise.

Demographic parity is one game for all records, equalized odds one of each label, equal opportunity that of one label,
which the other records do not play. What a release of shares costs is named as events; nothing here is priced.

Shapes: N records, E events (games), G groups, Q = E G cells, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fairpate.methods.parity import FloatArray, require_codes
from fairpate.nn.private_fit import GaussianNoise, PrivateRandomness
from fairpate.privacy.events import Event, PoissonGaussians, SpentError, of_unit
from fairpate.privacy.fair_training import AttributeGaussians
from fairpate.types import Relation

if TYPE_CHECKING:
    from fairpate.methods.dp_fermi import DpFermiConfig


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The event and the group of each record as one code (N,), event times groups plus group; Q for no event."""

    cells_N: Tensor
    num_events: int
    num_groups: int
    num_classes: int

    @property
    def num_cells(self) -> int:
        """Q."""
        return self.num_events * self.num_groups

    @classmethod
    def of(cls, y: Tensor, groups: Tensor, *, config: DpFermiConfig, num_classes: int, num_groups: int) -> Cells:
        """ValueError for labels, groups or a positive label out of range, for lengths that differ, for one group."""
        require_codes("labels", y.cpu().numpy(), num_classes)
        require_codes("groups", groups.cpu().numpy(), num_groups)
        if len(y) != len(groups) or num_groups < 2:
            raise ValueError(
                f"Expected one group per label and at least 2 groups, got {len(groups)} for {len(y)} labels and "
                f"{num_groups} groups."
            )
        sizes = {"num_groups": num_groups, "num_classes": num_classes}
        if config.constraint == "demographic_parity":
            return cls(cells_N=groups.long(), num_events=1, **sizes)
        if config.constraint == "equalized_odds":
            return cls(cells_N=y.long() * num_groups + groups, num_events=num_classes, **sizes)
        if not config.positive_label < num_classes:
            raise ValueError(f"Expected dp_fermi.positive_label < {num_classes}, got {config.positive_label}.")
        cells_N = torch.where(y == config.positive_label, groups, num_groups)
        return cls(cells_N=cells_N.long(), num_events=1, **sizes)


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The share of each group in each event, ``shares_EG``: public, positive. ``events`` are what it took to know them.

    ``floored``: the (event, group) pairs whose released share lay below the declared floor and was raised to it; their
    regulariser is weaker than their size asks for.
    """

    shares_EG: FloatArray
    events: tuple[Event, ...] = ()
    floored: tuple[tuple[int, int], ...] = ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader of the result must know."""
        if not self.floored:
            return ()
        pairs = ", ".join(f"group {group} of event {event}" for event, group in self.floored)
        return (f"raised to the least share, and so weighed less than their size asks for: {pairs}",)


def release_shares(
    cells: Cells,
    config: DpFermiConfig,
    *,
    relation: Relation,
    randomness: PrivateRandomness,
    person_N: Tensor | None = None,
) -> Shares:
    """The declared shares, or those of noisy counts, released once. With ``person_N`` each person counts one in all.

    ValueError for declared shares of another shape or sum, and for an event that no record seems to belong to.
    """
    shape = (cells.num_events, cells.num_groups)
    if config.shares is not None:
        return Shares(shares_EG=_declared(config.shares, shape, floor=config.min_share))
    if not config.weight:
        # Without a weight nothing reads the shares, so nothing is released.
        return Shares(shares_EG=np.full(shape, 1 / cells.num_groups))
    # The last code is that of records in no event.
    # A person counts one in all, however many records: a person more moves the counts by 1 in L1, so by no more in L2.
    share_N = None if person_N is None else (1 / torch.bincount(person_N).double())[person_N]
    counts_Q = torch.bincount(cells.cells_N, weights=share_N, minlength=cells.num_cells + 1)[:-1].double()
    noise_Q = GaussianNoise(randomness).take(cells.num_cells).double()
    counts_EG = (counts_Q + config.share_noise * noise_Q.to(counts_Q)).clamp(min=0).cpu().numpy().reshape(shape)
    totals_E1 = counts_EG.sum(axis=1, keepdims=True)
    events = share_events(config, relation)
    if not (totals_E1 > 0).all():
        empty = np.flatnonzero(totals_E1 <= 0).tolist()
        told = ValueError(
            f"Expected records in every event, found none in {empty} (labels, under equalized_odds) under noise of "
            f"{config.share_noise:g} records; declare dp_fermi.shares, or use another constraint. What was released "
            "to find this out has been spent."
        )
        # As the whole training states them: of modes that hide the attribute, records are the unit.
        counted = events if person_N is None else [of_unit(event, "person") for event in events]
        raise SpentError(told, counted, randomness.label)
    # From here on shares are public, and with them the scales of pulls and of W's sensitivity.
    shares_EG = counts_EG / totals_E1
    floored = tuple((int(event), int(group)) for event, group in np.argwhere(shares_EG < config.min_share))
    return Shares(
        # Pulls and sensitivities grow with 1 / sqrt(share): the floor bounds them whatever the noise did.
        shares_EG=np.maximum(shares_EG, config.min_share),
        events=events,
        floored=floored,
    )


def share_events(config: DpFermiConfig, relation: Relation) -> tuple[Event, ...]:
    """A record is in one count; another group moves it from one to another."""
    if not config.weight or config.shares is not None:
        return ()
    if config.mode == "all":
        return (PoissonGaussians(count=1, noise_multiplier=config.share_noise, sampling_rate=1.0, relation=relation),)
    # Two counts move by 1 each.
    return (AttributeGaussians(count=1, attribute_noise_multiplier=config.share_noise / math.sqrt(2)),)


def _declared(shares: Sequence[Sequence[float]], shape: tuple[int, int], *, floor: float) -> FloatArray:
    if len(shares) != shape[0] or any(len(row) != shape[1] for row in shares):
        raise ValueError(
            f"Expected dp_fermi.shares of {shape[0]} events by {shape[1]} groups, got {[len(row) for row in shares]}."
        )
    shares_EG = np.asarray(shares, dtype=np.float64)
    if not np.allclose(shares_EG.sum(axis=1), 1, atol=1e-3) or not (shares_EG >= floor).all():
        raise ValueError(f"Expected dp_fermi.shares >= {floor} that sum to 1 in each event, got {shares_EG.tolist()}.")
    return shares_EG
