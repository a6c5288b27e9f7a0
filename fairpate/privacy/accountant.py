"""The one place that prices what was done: events in, an epsilon out.

A mechanism never states its own epsilon. It reports events, each naming the unit it protects and the neighbouring
relation; this module composes what they cost and converts it to (epsilon, delta). There are two currencies, each with
one registry of prices per event type: Renyi curves (:func:`event_rdp`), added order by order and converted in
:mod:`fairpate.privacy.conversion`, and privacy loss distributions (:func:`event_pld`), tighter, which not every event
has. Events under different units or relations are never added.

Prices that depend on private votes are themselves private, so they answer to other names: ``rdp`` and ``epsilon``
refuse events that hold votes, ``rdp_data_dependent`` and ``epsilon_data_dependent`` are for the operator alone.

Not known here: where events come from, how they are stored, what a budget is, how much noise would meet one
(:mod:`fairpate.privacy.calibration`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, singledispatch
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fairpate.privacy import divergences, gnmax, loss_distributions, subsampled
from fairpate.privacy.conversion import Conversion, epsilon_of_curve
from fairpate.privacy.events import (
    ConfidentGnmaxQueries,
    ConfidentGnmaxVotes,
    Event,
    NoisyArgmaxes,
    PoissonGaussians,
    ThresholdChecks,
)
from fairpate.privacy.loss_distributions import LossDistribution
from fairpate.types import Relation, Unit

FloatArray = npt.NDArray[np.float64]
Accounting = Literal["rdp", "pld"]

# The best order falls as epsilon grows: near 1 for large ones, thousands for the smallest.
DEFAULT_ORDERS: tuple[float, ...] = (
    *(1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0),
    *(n / 2 for n in range(5, 128)),
    *map(float, range(64, 257)),
    *(320.0, 400.0, 512.0),
    *(2.0**k for k in range(10, 21)),
)
_COARSEST_INTERVAL, _INTERVAL_PER_EPSILON = 1.0, 1e-5  # of loss distributions
_MOST_EXCESS = 2e-3  # of an epsilon, by its loss distributions' grid


@dataclass(frozen=True, kw_only=True)
class EpsilonAtDelta:
    """A converted privacy loss. ``order`` is the Renyi order that gave it; ``at_grid_end``: no order beyond was tried,
    so a wider grid might give less. ``unit`` and ``relation`` are None when no event was priced."""

    epsilon: float
    delta: float
    order: float
    at_grid_end: bool
    conversion: Conversion
    data_dependent: bool
    unit: Unit | None
    relation: Relation | None


@singledispatch
def event_rdp(event: object, orders_A: FloatArray) -> FloatArray:  # noqa: ARG001 - the signature of every pricing
    """The Renyi curve of one event, shape (A,). Register a pricing per event type; an unknown type is a TypeError."""
    raise TypeError(f"Expected an event with a registered pricing, got {type(event).__name__}.")


@event_rdp.register
def _(event: ThresholdChecks, orders_A: FloatArray) -> FloatArray:
    single_A = gnmax.threshold_rdp_data_independent(
        threshold_stddev_votes=event.threshold_stddev_votes, orders_A=orders_A
    )
    return _repeated(event.count, single_A)


@event_rdp.register
def _(event: NoisyArgmaxes, orders_A: FloatArray) -> FloatArray:
    single_A = gnmax.gnmax_rdp_data_independent(noise_stddev_votes=event.noise_stddev_votes, orders_A=orders_A)
    return _repeated(event.count, single_A)


@event_rdp.register
def _(event: ConfidentGnmaxQueries, orders_A: FloatArray) -> FloatArray:
    return _repeated(
        event.count, gnmax.confident_gnmax_rdp_data_independent(**_confident_gnmax(event), orders_A=orders_A)
    )


@event_rdp.register
def _(event: ConfidentGnmaxVotes, orders_A: FloatArray) -> FloatArray:
    return gnmax.confident_gnmax_rdp_total(
        event.votes_QC, **_confident_gnmax(event), orders_A=orders_A, tail=event.tail
    )


@event_rdp.register
def _(event: PoissonGaussians, orders_A: FloatArray) -> FloatArray:
    if event.relation != "add or remove one":
        raise ValueError("No Renyi curve for replacing a record of a Poisson sample; use epsilon_pld.")
    if event.count and not event.noise_multiplier:
        return np.full(len(orders_A), math.inf)
    if not event.count:
        return np.zeros(len(orders_A))
    return event.count * subsampled.poisson_gaussian_rdp(
        event.noise_multiplier, sampling_rate=event.sampling_rate, orders_A=orders_A
    )


def event_kinds() -> dict[str, type]:
    """The event types that have a price, by name, as far as their modules are imported; refinements included."""
    found = [kind for kind in event_rdp.registry if kind is not object]
    for kind in found:  # grows meanwhile
        found += kind.__subclasses__()
    return {kind.__name__: kind for kind in found}


def rdp(events: Sequence[Event], orders_A: npt.ArrayLike = DEFAULT_ORDERS) -> FloatArray:
    """The composed Renyi curve of data-independent events, shape (A,); no events cost 0.

    ValueError for mixed units or relations, for a price that is NaN or negative, for an event that holds private
    votes; TypeError for an event nobody prices.
    """
    _require_data_independent(events)
    return rdp_data_dependent(events, orders_A)


def rdp_data_dependent(events: Sequence[Event], orders_A: npt.ArrayLike = DEFAULT_ORDERS) -> FloatArray:
    """``rdp`` for the operator: events may hold private votes, and then the curve must not be published."""
    orders = np.asarray(orders_A, dtype=np.float64)
    _common_guarantee(events)
    total_A = np.zeros(len(orders))
    for event in events:
        price_A = event_rdp(event, orders)
        # Event by event: in the sum a negative price could hide behind another one.
        if not np.all(price_A >= 0):
            raise ValueError(f"Expected the price of {type(event).__name__} without NaN or negative values.")
        total_A += price_A
    return total_A


@singledispatch
def rdp_of_each_data_dependent(event: Any, orders_A: FloatArray) -> FloatArray:  # noqa: ARG001 - of each type
    """The Renyi curve of each query of an event, shape (Q, A), for the operator; see :func:`prices_each`.

    Register one per event type that prices many queries at once faster than one by one.
    """
    raise TypeError(f"{type(event).__name__} has no price of each query of its own.")


def prices_each(event: Any) -> bool:
    """Whether :func:`rdp_of_each_data_dependent` knows this type of event."""
    known = rdp_of_each_data_dependent
    return known.dispatch(type(event)) is not known.dispatch(object)


@rdp_of_each_data_dependent.register
def _(event: ConfidentGnmaxVotes, orders_A: FloatArray) -> FloatArray:
    return gnmax.confident_gnmax_rdp(event.votes_QC, **_confident_gnmax(event), orders_A=orders_A, tail=event.tail)


def epsilon(
    events: Sequence[Event],
    *,
    target_delta: float,
    orders_A: Sequence[float] | None = None,
    conversion: Conversion = "improved",
) -> EpsilonAtDelta:
    """The smallest epsilon at ``target_delta`` that the composed curve gives; may be published.

    ``orders_A`` None takes the default grid. ``conversion``
    ``classic`` is RDP + ln(1/delta) / (alpha - 1) (Mironov 2017, Proposition 3): valid, looser. Errors as ``rdp``, and
    ValueError unless 0 < target_delta < 1.
    """
    _require_data_independent(events)
    return epsilon_data_dependent(events, target_delta=target_delta, orders_A=orders_A, conversion=conversion)


def epsilon_data_dependent(
    events: Sequence[Event],
    *,
    target_delta: float,
    orders_A: Sequence[float] | None = None,
    conversion: Conversion = "improved",
) -> EpsilonAtDelta:
    """``epsilon`` for the operator: where an event holds private votes the result must not be published."""
    unit, relation = _common_guarantee(events)
    orders = np.asarray(DEFAULT_ORDERS if orders_A is None else orders_A, dtype=np.float64)
    curve_A = rdp_data_dependent(events, orders)
    value, order = epsilon_of_curve(curve_A, orders, target_delta=target_delta, conversion=conversion)
    return EpsilonAtDelta(
        epsilon=value,
        delta=target_delta,
        order=order,
        at_grid_end=0 < value < math.inf and order in (orders.min(), orders.max()),
        conversion=conversion,
        data_dependent=any(event.data_dependent for event in events),
        unit=unit,
        relation=relation,
    )


@singledispatch
def event_pld(event: object, interval: float) -> LossDistribution | None:  # noqa: ARG001 - as every pricing
    """The loss distribution of one event on a grid of ``interval``; None for one without noise: nothing is guaranteed.

    Register one per event type that has it; an unknown type is a TypeError.
    """
    raise TypeError(f"Expected an event with a registered loss distribution, got {type(event).__name__}.")


@event_pld.register
def _(event: PoissonGaussians, interval: float) -> LossDistribution | None:
    return divergences.poisson_gaussians(
        event.count,
        event.noise_multiplier,
        sampling_rate=event.sampling_rate,
        relation=event.relation,
        interval=interval,
    )


def has_loss_distributions(events: Sequence[Event]) -> bool:
    """Whether every one of ``events`` has a loss distribution, so that :func:`epsilon_pld` can price them."""
    nobody = event_pld.dispatch(object)
    return all(event_pld.dispatch(type(event)) is not nobody for event in events)


def epsilon_pld(events: Sequence[Event], *, target_delta: float, interval: float | None = None) -> float:
    """The epsilon of the composed loss distributions (tighter than Renyi), for either relation; may be published.

    ``interval``: of the grid that losses are rounded to, on the safe side: each release adds about interval^2 / 12.
    None takes 1e-4, and 1e-5 of an epsilon above 10, which a finer grid hardly lowers. ``inf`` for an event
    without noise. ValueError for mixed units or relations, for events that hold private votes and unless
    0 < target_delta < 1; TypeError for an event without a loss distribution.
    """
    if not 0 < target_delta < 1:
        raise ValueError(f"Expected 0 < target_delta < 1, got {target_delta}.")
    _require_data_independent(events)
    _common_guarantee(events)
    if not events:
        return 0.0
    if interval is not None:
        return _epsilon_pld(tuple(events), target_delta, interval)[0]
    # Each grid is fine enough to say how fine the next must be; all give upper bounds.
    interval = _COARSEST_INTERVAL
    while True:
        found, excess = _epsilon_pld(tuple(events), target_delta, interval)
        finer = max(loss_distributions.DEFAULT_INTERVAL, _INTERVAL_PER_EPSILON * found)
        if excess > _MOST_EXCESS * found:  # it falls with the square of the interval
            finer = min(finer, interval * math.sqrt(_MOST_EXCESS * found / excess) / 2)
        finer = max(finer, interval / 100)
        if not found or finer > 0.9 * interval:  # no epsilon is less, or it hardly changes any more
            return found
        interval = finer


# Composing is slow, and a run asks for the same events again and again.
@lru_cache(maxsize=1024)
def _epsilon_pld(events: tuple[Event, ...], target_delta: float, interval: float) -> tuple[float, float]:
    total = loss_distributions.composed([event_pld(event, interval) for event in events])
    return loss_distributions.epsilon_and_excess(total, target_delta)


def epsilon_of(events: Sequence[Event], *, target_delta: float, accounting: Accounting) -> float:
    """The epsilon of ``events`` by Renyi curves (``rdp``) or loss distributions (``pld``); may be published.

    Errors as :func:`epsilon` and :func:`epsilon_pld`; ValueError for another accounting.
    """
    if accounting == "pld":
        return epsilon_pld(events, target_delta=target_delta)
    if accounting == "rdp":
        return epsilon(events, target_delta=target_delta).epsilon
    raise ValueError(f"Expected accounting 'rdp' or 'pld', got {accounting!r}.")


def least_epsilon(events: Sequence[Event], *, target_delta: float) -> float:
    """The least of the bounds that there are: Renyi curves, and loss distributions where every event has one.

    All hold for any data, so that taking the least tells nothing. Errors as :func:`epsilon`.
    """
    by_curves = epsilon(events, target_delta=target_delta).epsilon
    if not events or not has_loss_distributions(events):
        return by_curves
    return min(by_curves, epsilon_pld(events, target_delta=target_delta))


def _confident_gnmax(event: ConfidentGnmaxQueries | ConfidentGnmaxVotes) -> dict[str, float]:
    """The mechanism's parameters, as :mod:`fairpate.privacy.gnmax` names them."""
    return {
        "threshold": event.threshold,
        "threshold_stddev_votes": event.threshold_stddev_votes,
        "noise_stddev_votes": event.noise_stddev_votes,
    }


def _repeated(count: int, single_A: FloatArray) -> FloatArray:
    """``count`` times one curve; nothing done costs nothing, even where one would cost infinity."""
    return count * single_A if count else np.zeros_like(single_A)


def _common_guarantee(events: Sequence[Event]) -> tuple[Unit | None, Relation | None]:
    _require_known(events)
    # Curves add up for one pair of neighbouring data sets; another unit or relation has other pairs.
    guarantees = {(event.unit, event.relation) for event in events}
    if len(guarantees) > 1:
        raise ValueError(f"Expected events under one unit and relation, got {sorted(guarantees)}; price them apart.")
    return guarantees.pop() if guarantees else (None, None)


def _require_known(events: Sequence[Event]) -> None:
    for event in events:
        if event_rdp.dispatch(type(event)) is event_rdp.dispatch(object):
            raise TypeError(f"Expected events that the accountant can price, got {type(event).__name__}.")


def _require_data_independent(events: Sequence[Event]) -> None:
    _require_known(events)
    holding_votes = sorted({type(event).__name__ for event in events if event.data_dependent})
    if holding_votes:
        raise ValueError(
            f"Expected data-independent events, got {', '.join(holding_votes)}: "
            "use the function named data_dependent and keep its result with the operator."
        )
