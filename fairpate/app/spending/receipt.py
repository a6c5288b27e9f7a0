"""What one run released, as its receipt and the odometer hold it, and what releases of one kind cost together.

Events are data-independent and at their worst case; one accountant composes them. A release without privacy (seeded
noise, or none) is listed and adds to no sum.

Not known here: which releases there are on a data set, and what they may cost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from aggregator.service.wire import worded
from fairpate.app.rundir import RunDirectory, write_json
from fairpate.privacy import accountant
from fairpate.privacy.accountant import DEFAULT_ORDERS
from fairpate.privacy.conversion import epsilon_of_curve
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.privacy.event_values import event_from, event_json, merged
from fairpate.privacy.events import Event
from fairpate.privacy.filters import least_adaptive_limit
from fairpate.privacy.laplace import pure_epsilon
from fairpate.privacy.loss_distributions import LEAST_DELTA
from fairpate.types import Relation, Unit, UserError

FloatArray = npt.NDArray[np.float64]
_MOST_DISTRIBUTIONS = 8  # of several releases, composed at once; beyond, Renyi curves alone are added


class OdometerError(UserError):
    """The odometer or a receipt cannot be read or written; nothing was released."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """All that one run released so far. ``num_queries`` is how many its ledger surely holds; 0 without a ledger.

    ``plan``: where a limit admitted the run as the only release, all events that were fixed before the first of them;
    ``events`` are among them. Limits charge the whole plan, however little of it was released; empty where they charge
    the events.
    """

    run: str
    data: str
    unit: Unit
    relation: Relation
    noise: str
    method: str
    path: str
    events: tuple[Event, ...]
    num_queries: int = 0
    plan: tuple[Event, ...] = ()
    rdp_A: FloatArray = field(default_factory=lambda: np.zeros(0), compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.rdp_A) != len(DEFAULT_ORDERS):
            # Also where the order grid has changed since the row was written.
            object.__setattr__(self, "rdp_A", curve_of(self.events))

    @property
    def charged(self) -> Release:
        """The release with the events that limits charge, and no plan."""
        if not self.plan:
            return self
        return replace(self, events=self.plan, plan=(), rdp_A=np.zeros(0))

    @property
    def is_private(self) -> bool:
        """Whether it has any privacy guarantee."""
        if self.noise != OS_ENTROPY:
            return False
        # Any delta would do: the question is whether some bound is finite.
        return bool(np.isfinite(self.rdp_A).any()) or composed_epsilon([self], delta=0.5) < math.inf


def read_receipt(run: RunDirectory) -> Release | None:
    """What the run itself says that it released; None if it has no receipt. OdometerError for a damaged one."""
    if not run.receipt.exists():
        return None
    try:
        return release_from(json.loads(run.receipt.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OdometerError(f"{run.receipt}: damaged ({error}); restore it from a copy.") from error


def release_from(values: Mapping[str, Any]) -> Release:
    """A release from the values of a receipt."""
    # Receipts of earlier versions have no plan.
    events = {name: tuple(map(event_from, values.get(name, ()))) for name in ("events", "plan")}
    return Release(**{**values, **events})


def write_receipt(run: RunDirectory, release: Release) -> None:
    """What :func:`read_receipt` reads."""
    write_json(run.receipt, release_values(release))


def release_values(release: Release) -> dict[str, Any]:
    """A release as plain values, as a receipt holds it."""
    values = {column.name: getattr(release, column.name) for column in fields(release) if column.name != "rdp_A"}
    events = {name: [worded(event_json(event)) for event in values[name]] for name in ("events", "plan")}
    return values | events


def composed_epsilon(releases: Sequence[Release], *, delta: float) -> float:
    """The epsilon of releases of one unit and relation together: the least of the bounds that the accountant has.

    For releases that were fixed before the first of them. All bounds hold for any data, so that taking the least tells
    nothing. ``inf`` where there is none.
    """
    events = merged([event for release in releases for event in release.events])
    curve_A = summed_curve(releases)
    bounds = [pure_epsilon(events)]
    if np.isfinite(curve_A).any():
        bounds.append(epsilon_of_curve(curve_A, DEFAULT_ORDERS, target_delta=delta)[0])
    # One release alone is priced as its statement prices it, so that a limit admits a run planned at it.
    is_quick = len(releases) == 1 or len(events) <= _MOST_DISTRIBUTIONS
    # Below the least delta of loss distributions curves decide, and they may not be known.
    if events and is_quick and delta >= LEAST_DELTA and accountant.has_loss_distributions(events):
        bounds.append(accountant.epsilon_pld(events, target_delta=delta))
    return min(bounds)


def adaptive_epsilon(releases: Sequence[Release], *, delta: float) -> float:
    """The least limit that would have admitted these releases of one unit and relation, in whatever order they came.

    They may have been chosen in view of each other; one alone was fixed beforehand. Charged as limits charge them.
    """
    charged = [release.charged for release in releases]
    if len(charged) == 1:
        return composed_epsilon(charged, delta=delta)
    return least_adaptive_limit(summed_curve(charged), delta=delta)


def summed_curve(releases: Sequence[Release]) -> FloatArray:
    """The Renyi curve of all ``releases`` together."""
    return sum((release.rdp_A for release in releases), np.zeros(len(DEFAULT_ORDERS)))


def curve_of(events: Sequence[Event]) -> FloatArray:
    """The composed Renyi curve, ``inf`` where an event has none; kept with a release, for sums of thousands."""
    try:
        return accountant.rdp(events)
    except ValueError:
        return np.full(len(DEFAULT_ORDERS), math.inf)
