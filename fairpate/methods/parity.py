"""What the methods that protect the sensitive attribute alone share: parity as rates of events.

The unit is one record's ``sensitive attribute``, the relation ``replace one``: features and labels are public, the
number of records too. A classifier h is compared between groups on *events*: demographic parity has one (every
record), equalized odds one per label, equal opportunity the positive label, equal false positives the other one.
``rate[a, e]`` is P[h = 1 | group a, event e], and its gap is taken to a reference group: two other groups may differ
by twice as much.

Shapes: N records, G groups, E events, C classes, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fairpate.config import CountOrZero, Fraction, Section
from fairpate.types import IntArray

FloatArray = npt.NDArray[np.float64]
Constraint = Literal["demographic_parity", "equalized_odds", "equal_opportunity", "equal_false_positives"]


class ParityConfig(Section):
    """What the methods that protect the sensitive attribute alone keep across groups, and how they draw noise."""

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
class Cells:
    """Binary labels (N,), groups (N,) and the event (N,) that each record belongs to, ``NO_EVENT`` for none."""

    labels_N: IntArray
    groups_N: IntArray
    events_N: IntArray
    num_groups: int
    num_events: int

    @classmethod
    def of(cls, labels_N: npt.ArrayLike, groups_N: npt.ArrayLike, *, num_groups: int, constraint: Constraint) -> Cells:
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
        """How many records each group and event has, shape (G, E)."""
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
