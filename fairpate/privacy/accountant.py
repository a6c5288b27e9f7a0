"""Events, and what they cost: Renyi curves, privacy loss distributions and (epsilon, delta).

A mechanism never states its own epsilon. It reports events: everything that touches private data, each with the unit it
protects and the neighbouring relation. This module composes their costs and converts them. There are two currencies,
each with one registry of prices per event type: Renyi curves (:func:`event_rdp`), added order by order, and privacy
loss distributions (:func:`event_pld`), which are tighter but not known for every event. Events under different units or
relations are never added. Costs that depend on private votes are private themselves: ``rdp`` and ``epsilon`` refuse
events that hold votes, ``rdp_data_dependent`` and ``epsilon_data_dependent`` are for the operator alone.

The module reads from single steps to whole runs: events, conversion of a curve (Canonne, Kamath and Steinke 2020,
Proposition 12), amplification by Poisson sampling, prices of events, filters that decide when adaptive queries must
stop, and the search for the least noise that meets a target.

Other modules of this package register further events. Which events a run performs, how they are stored and which budget
it has is decided elsewhere. Shapes: A orders, K moments.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, singledispatch
from operator import itemgetter
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt
import scipy

from fairpate.privacy import gnmax, loss_distributions
from fairpate.privacy.loss_distributions import LossDistribution
from fairpate.types import FloatArray, IntArray, MechanismParameters, Relation, Tail, Unit


class Event(Protocol):
    """Something that touched private data, with the guarantee it is priced under."""

    @property
    def unit(self) -> Unit:
        """The unit whose change the price covers: ``record``, all records of a ``person``, ``sensitive attribute``."""

    @property
    def relation(self) -> Relation:
        """The difference between neighbouring data sets: one unit added or removed, or replaced."""

    @property
    def noun(self) -> str:
        """Singular name of the event for pages and statements; the words before `` of `` take the plural s."""

    @property
    def data_dependent(self) -> bool:
        """True if the price is computed from private values and must stay with the operator."""


class SpentError(ValueError):
    """An error that depends on a release: it ends the work, its message reveals the release, and ``events`` are spent.

    ``noise`` is the label of the noise source.
    """

    def __init__(self, cause: ValueError, events: Sequence[Event], noise: str) -> None:
        super().__init__(str(cause))
        self.events, self.noise = tuple(events), noise


@contextmanager
def spent(events: Sequence[Event], *, noise: str) -> Iterator[None]:
    """Turn a ValueError raised after the release of ``events`` into a SpentError, so that they are still charged."""
    try:
        yield
    # A ValueError's message depends on the release. Any other error is a fault of the program, and passes unchanged.
    except ValueError as error:
        raise SpentError(error, events, noise) from error


class CountedEvent:
    """An event that happened ``count`` times. Subclasses declare the field themselves, at the place where statements
    list it.

    ValueError for a sampling rate outside (0, 1], a norm below 1, and any other number below 0 except a threshold.
    """

    data_dependent: ClassVar[bool] = False
    count: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, str) or name == "threshold" or (name, value) == ("threshold_stddev_votes", None):
                continue
            if name == "sampling_rate":
                is_valid, expected = 0 < value <= 1, f"0 < {name} <= 1"
            else:
                least = 1 if name == "norm" else 0
                is_valid, expected = value >= least, f"{name} >= {least}"
            # NaN fails each comparison.
            if not is_valid:
                raise ValueError(f"Expected {expected}, got {value}.")


@dataclass(frozen=True, kw_only=True)
class TeacherEvent:
    """One ``unit`` touches one teacher, and so moves at most one vote per query."""

    unit: Unit = "record"
    relation: ClassVar[Relation] = "add or remove one"
    data_dependent: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class ThresholdChecks(CountedEvent, TeacherEvent):
    """``count`` noisy comparisons of the largest vote count with a finite threshold, passed or not."""

    noun: ClassVar[str] = "noisy count of teachers who agree"
    count: int
    threshold_stddev_votes: float


@dataclass(frozen=True, kw_only=True)
class NoisyArgmaxes(CountedEvent, TeacherEvent):
    """``count`` noisy argmaxes that ran, including those with labels that were withheld.

    Together with ``ThresholdChecks``, these are the realised charges of confident queries. Each charge is known before
    its step runs, so a Renyi filter with a limit fixed in advance may admit them.
    """

    noun: ClassVar[str] = "noisy vote of teachers"
    count: int
    noise_stddev_votes: float


@dataclass(frozen=True, kw_only=True)
class ConfidentGnmaxQueries(CountedEvent, TeacherEvent):
    """``count`` Confident-GNMax queries submitted, both steps charged for each: holds for any votes."""

    noun: ClassVar[str] = "noisy vote of teachers"
    count: int
    threshold: float
    threshold_stddev_votes: float
    noise_stddev_votes: float


# By identity: an array can neither be compared in one bool nor hashed.
@dataclass(frozen=True, kw_only=True, eq=False)
class ConfidentGnmaxVotes(TeacherEvent):
    """Confident-GNMax queries with the votes they drew: every row is one query submitted, answered or not.

    Priced at the exact joint cost of threshold bit and noisy argmax. ``votes_QC``: whole votes, shape (Q, C).
    """

    noun: ClassVar[str] = "noisy vote of teachers"
    data_dependent: ClassVar[bool] = True
    votes_QC: IntArray
    threshold: float
    threshold_stddev_votes: float
    noise_stddev_votes: float
    # The noise that is drawn is discrete; the continuous tail is for comparison with published numbers.
    tail: Tail = "discrete"


@dataclass(frozen=True, kw_only=True)
class PoissonGaussians(CountedEvent):
    """``count`` Gaussian sums, each over a fresh Poisson sample of the units: records or persons.

    ``noise_multiplier``: standard deviation over the L2 norm that one unit may add. Renyi curves price adding or
    removing one; replacing one is priced by :func:`epsilon_pld` alone.
    """

    noun: ClassVar[str] = "Gaussian sum"
    count: int
    noise_multiplier: float
    sampling_rate: float
    unit: Unit = "record"
    relation: Relation = "add or remove one"


def of_unit(event: Any, unit: Unit) -> Any:
    """The same event at the same price, for ``unit`` (such as a person) instead of a record.

    TypeError for an event that is priced for one unit alone.
    """
    if event.unit == unit:
        return event
    # A unit that is no field belongs to the definition of the event: its price holds for no other unit.
    if "unit" not in {column.name for column in fields(event)}:
        raise TypeError(f"{type(event).__name__} is priced per {event.unit} alone, not per {unit}.")
    if hasattr(event, "trials"):  # of events, each of the same unit
        trials = tuple(tuple(of_unit(each, unit) for each in events) for events in event.trials)
        return replace(event, unit=unit, trials=trials)
    return replace(event, unit=unit)


def epsilon_of_curve(rdp_A: npt.ArrayLike, orders_A: npt.ArrayLike, *, target_delta: float) -> tuple[float, float]:
    """(epsilon, best order) of a given Renyi curve. ValueError for a NaN or negative cost or a bad delta.

    The conversion is that of Canonne, Kamath and Steinke 2020, Proposition 12, digit by digit that of dp_accounting.
    """
    if not 0 < target_delta < 1:
        raise ValueError(f"Expected 0 < target_delta < 1, got {target_delta}.")
    costs, orders = np.asarray(rdp_A, dtype=np.float64), np.asarray(orders_A, dtype=np.float64)
    if not np.all(costs >= 0):
        raise ValueError("Expected a Renyi curve without NaN or negative values.")
    with np.errstate(divide="ignore", invalid="ignore"):
        epsilon_A = costs + np.log1p(-1 / orders) - np.log(target_delta * orders) / (orders - 1)
    # As in dp_accounting: orders near 1 are left out, and a divergence this small is covered by delta alone.
    epsilon_A = np.where(orders > 1.01, epsilon_A, math.inf)
    epsilon_A = np.where(target_delta**2 + np.expm1(-costs) > 0, 0.0, epsilon_A)
    least = epsilon_A.min()
    # Again with the logarithms of `math`, whose last digit NumPy's may miss: slow, so only far within any rounding.
    near_A = epsilon_A <= least + 1e-9 * max(1.0, abs(least))
    values = []
    for cost, order in zip(costs[near_A].tolist(), orders[near_A].tolist(), strict=True):
        if target_delta**2 + math.expm1(-cost) > 0:
            value = 0.0
        elif not order > 1.01:
            value = math.inf
        else:
            value = cost + math.log1p(-1 / order) - math.log(target_delta * order) / (order - 1)
        values.append((value, order))
    value, order = min(values, key=itemgetter(0))  # the first of equal values
    return max(0.0, value), order


LogMoments = Callable[[FloatArray], FloatArray]

# A mixture has as many terms as its order: above this one the bound by two terms is used.
_LARGEST_MIXTURE = 1024


def gaussian_log_moments(noise_multiplier: float) -> LogMoments:
    """ln E[(mu1 / mu0)^k] of a Gaussian with standard deviation ``noise_multiplier`` times its L2 sensitivity."""
    if not noise_multiplier > 0:
        raise ValueError(f"Expected noise_multiplier > 0, got {noise_multiplier}.")
    return lambda k_K: k_K * (k_K - 1) / (2 * noise_multiplier**2)


def laplace_log_moments(scale: float) -> LogMoments:
    """ln E[(mu1 / mu0)^k] of Laplace noise of ``scale`` times its L1 sensitivity, k >= 0."""
    if not scale > 0:
        raise ValueError(f"Expected scale > 0, got {scale}.")

    def log_moments(k_K: FloatArray) -> FloatArray:
        # k / (2 k - 1) e^((k - 1) / b) + (k - 1) / (2 k - 1) e^(-k / b): Mironov 2017, Proposition 6.
        # The floors keep logarithms finite at k = 0 and 1, whose moments are 1.
        up_K = np.log(np.maximum(k_K, 0.75) / (2 * np.maximum(k_K, 0.75) - 1)) + (k_K - 1) / scale
        down_K = np.log(np.maximum(k_K - 1, 1e-300) / (2 * np.maximum(k_K, 0.75) - 1)) - k_K / scale
        return np.where(k_K < 2, 0.0, np.logaddexp(up_K, down_K))

    return log_moments


def poisson_rdp(log_moments: LogMoments, *, sampling_rate: float, orders_A: npt.ArrayLike) -> FloatArray:
    """RDP of one step on a Poisson sample, shape (A,). ValueError for an order <= 1 or a rate outside [0, 1].

    Every record enters independently with probability ``sampling_rate``; the relation is adding or removing one.
    Nothing here holds for shuffled or fixed-size batches. For a mechanism whose worst pair of output distributions is
    mirror symmetric (Gaussian and Laplace noise, products of them) the cost at a whole order is the binomial mixture of
    its moments (Mironov, Talwar and Zhang 2019, arXiv 1908.10530; Zhu and Wang 2019, Theorem 6). Between whole orders
    the chord of (alpha - 1) R, which is convex in alpha, is an upper bound; beyond order 1024 the mixture of the two
    extreme terms is one.
    """
    if not 0 <= sampling_rate <= 1:
        raise ValueError(f"Expected 0 <= sampling_rate <= 1, got {sampling_rate}.")
    orders = np.asarray(orders_A, dtype=np.float64)
    if not np.all(orders > 1):
        raise ValueError("Expected orders > 1.")
    if sampling_rate == 0:
        return np.zeros(len(orders))
    below_A, above_A = np.floor(orders), np.ceil(orders)
    whole = np.unique([below_A, above_A]).astype(int).tolist()
    exponent_of = dict(zip(whole, _exponents(log_moments, sampling_rate, whole), strict=True))
    # Between whole orders the chord of (alpha - 1) R is above the curve, which is convex.
    share_A = orders - below_A
    below = np.array([exponent_of[order] for order in below_A])
    above = np.array([exponent_of[order] for order in above_A])
    rdp_A: FloatArray = ((1 - share_A) * below + share_A * above) / (orders - 1)
    return rdp_A


# A page of costs asks for the same step again and again, each time with another count.
@lru_cache(maxsize=1024)
def poisson_gaussian_rdp(noise_multiplier: float, sampling_rate: float, orders: tuple[float, ...]) -> FloatArray:
    """:func:`poisson_rdp` of one Gaussian sum, read-only; errors as there and as :func:`gaussian_log_moments`."""
    rdp_A = poisson_rdp(gaussian_log_moments(noise_multiplier), sampling_rate=sampling_rate, orders_A=orders)
    # Cached, so every caller gets the same array.
    rdp_A.setflags(write=False)
    return rdp_A


def _exponents(log_moments: LogMoments, sampling_rate: float, orders: Sequence[int]) -> list[float]:
    """(alpha - 1) R at whole orders; 0 at order 1."""
    if sampling_rate == 1:
        return [0.0 if order == 1 else float(log_moments(np.array([float(order)]))[0]) for order in orders]
    log_in, log_out = math.log(sampling_rate), math.log1p(-sampling_rate)
    # The mixture of each order uses the first of these terms: they are computed once for all orders.
    k_K = np.arange(min(max(orders, default=1), _LARGEST_MIXTURE) + 1, dtype=np.float64)
    in_K, out_K, moments_K = k_K * log_in, k_K * log_out, log_moments(k_K)
    exponents = []
    for order in orders:
        if order == 1:
            exponents.append(0.0)
            continue
        # An upper bound, as a power is convex: (1 - q + q L)^alpha <= 1 - q + q L^alpha.
        if order > _LARGEST_MIXTURE:
            exponents.append(float(np.logaddexp(log_out, log_in + log_moments(np.array([float(order)]))[0])))
            continue
        terms_K = _log_choices(order) + in_K[: order + 1] + out_K[order::-1] + moments_K[: order + 1]
        # scipy's logsumexp to the digit, without its checks: they cost ten times as much as the sum, and one
        # calibration takes thousands of sums.
        shift = terms_K.max()
        largest_K = terms_K == shift
        terms_K[largest_K] = -math.inf
        ties = np.count_nonzero(largest_K) or 1  # none where a moment is NaN
        total = np.log1p(np.exp(terms_K - shift).sum() / ties) + math.log(ties) + shift
        exponents.append(float(np.maximum(total, 0.0)))  # which keeps a NaN, for the accountant to refuse
    return exponents


@lru_cache(maxsize=_LARGEST_MIXTURE)
def _log_choices(order: int) -> FloatArray:
    k_K = np.arange(order + 1, dtype=np.float64)
    log_choices_K: FloatArray = (
        scipy.special.gammaln(order + 1) - scipy.special.gammaln(k_K + 1) - scipy.special.gammaln(order - k_K + 1)
    )
    return log_choices_K


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
    """An epsilon at a given delta. ``order`` is the Renyi order that gave it. ``unit`` and ``relation`` are None when
    no event was priced."""

    epsilon: float
    delta: float
    order: float
    data_dependent: bool
    unit: Unit | None
    relation: Relation | None


@singledispatch
def event_rdp(event: object, orders_A: FloatArray) -> FloatArray:  # noqa: ARG001 - the signature of every pricing
    """The Renyi curve of one event, shape (A,). Register a pricing per event type; an unknown type is a TypeError.

    A pricing is never asked about an event whose ``count`` is 0.
    """
    raise TypeError(f"Expected an event with a registered pricing, got {type(event).__name__}.")


@event_rdp.register
def _(
    event: ThresholdChecks | NoisyArgmaxes | ConfidentGnmaxQueries | ConfidentGnmaxVotes, orders_A: FloatArray
) -> FloatArray:
    match event:
        case ThresholdChecks():
            stddev = event.threshold_stddev_votes
            single_A = gnmax.gaussian_rdp(1.0, "threshold_stddev_votes", stddev, orders_A)
        case NoisyArgmaxes():
            stddev = event.noise_stddev_votes
            single_A = gnmax.gnmax_rdp_data_independent(noise_stddev_votes=stddev, orders_A=orders_A)
        case ConfidentGnmaxQueries():
            single_A = gnmax.confident_gnmax_rdp_data_independent(**_confident_gnmax(event), orders_A=orders_A)
        case ConfidentGnmaxVotes():
            mechanism = _confident_gnmax(event)
            return gnmax.confident_gnmax_rdp(
                event.votes_QC, **mechanism, orders_A=orders_A, tail=event.tail, total=True
            )
    return event.count * single_A


@event_rdp.register
def _(event: PoissonGaussians, orders_A: FloatArray) -> FloatArray:
    # The binomial mixture compares a mixture with one plain distribution; replacing compares two mixtures.
    if event.relation != "add or remove one":
        raise ValueError("No Renyi curve for replacing a record of a Poisson sample; use epsilon_pld.")
    if not event.noise_multiplier:
        return np.full(len(orders_A), math.inf)
    return event.count * poisson_gaussian_rdp(event.noise_multiplier, event.sampling_rate, tuple(orders_A.tolist()))


def event_kinds() -> dict[str, type]:
    """The event types with a registered price, by name, as far as their modules are imported."""
    found = [kind for kind in event_rdp.registry if kind is not object]
    for kind in found:  # the list grows while it is read, so that subclasses of subclasses are found
        found += kind.__subclasses__()
    return {kind.__name__: kind for kind in found}


def rdp(events: Sequence[Event], orders_A: npt.ArrayLike = DEFAULT_ORDERS) -> FloatArray:
    """The composed Renyi curve of data-independent events, shape (A,); no events cost 0.

    ValueError for mixed units or relations, for a price that is NaN or negative, for an event that holds private
    votes; TypeError for an event type without a registered price.
    """
    _common_guarantee(events, published=True)
    return rdp_data_dependent(events, orders_A)


def rdp_data_dependent(events: Sequence[Event], orders_A: npt.ArrayLike = DEFAULT_ORDERS) -> FloatArray:
    """``rdp`` for the operator: events may hold private votes, and then the curve must not be published."""
    orders = np.asarray(orders_A, dtype=np.float64)
    _common_guarantee(events)
    total_A = np.zeros(len(orders))
    for event in events:
        # A count of 0 costs 0 even where one release costs infinity.
        if not getattr(event, "count", 1):
            continue
        price_A = event_rdp(event, orders)
        # Event by event: in the sum a negative price could hide behind another one.
        if not np.all(price_A >= 0):
            raise ValueError(f"Expected the price of {type(event).__name__} without NaN or negative values.")
        total_A += price_A
    return total_A


def rdp_of_each_data_dependent(event: ConfidentGnmaxVotes, orders_A: FloatArray) -> FloatArray:
    """The Renyi curve of each query, shape (Q, A), faster together than one by one; for the operator only."""
    return gnmax.confident_gnmax_rdp(event.votes_QC, **_confident_gnmax(event), orders_A=orders_A, tail=event.tail)


def epsilon(
    events: Sequence[Event], *, target_delta: float, orders_A: npt.ArrayLike = DEFAULT_ORDERS
) -> EpsilonAtDelta:
    """The smallest epsilon at ``target_delta`` that the composed curve gives; may be published.

    Errors as ``rdp``, and ValueError unless 0 < target_delta < 1.
    """
    _common_guarantee(events, published=True)
    return epsilon_data_dependent(events, target_delta=target_delta, orders_A=orders_A)


def epsilon_data_dependent(
    events: Sequence[Event], *, target_delta: float, orders_A: npt.ArrayLike = DEFAULT_ORDERS
) -> EpsilonAtDelta:
    """``epsilon`` for the operator: where an event holds private votes the result must not be published."""
    unit, relation = _common_guarantee(events)
    value, order = epsilon_of_curve(rdp_data_dependent(events, orders_A), orders_A, target_delta=target_delta)
    return EpsilonAtDelta(
        epsilon=value,
        delta=target_delta,
        order=order,
        data_dependent=any(event.data_dependent for event in events),
        unit=unit,
        relation=relation,
    )


@singledispatch
def event_pld(event: object, interval: float) -> LossDistribution | None:  # noqa: ARG001 - as every pricing
    """The loss distribution of one event on a grid of ``interval``; None for one without noise: nothing is guaranteed.

    Register one per event type that has it, for a ``count`` of 1 and more; an unknown type is a TypeError.
    """
    raise TypeError(f"Expected an event with a registered loss distribution, got {type(event).__name__}.")


@event_pld.register
def _(event: PoissonGaussians, interval: float) -> LossDistribution | None:
    return loss_distributions.poisson_gaussians(
        event.count,
        event.noise_multiplier,
        sampling_rate=event.sampling_rate,
        relation=event.relation,
        interval=interval,
    )


def has_loss_distributions(events: Sequence[Event]) -> bool:
    """True if every event has a loss distribution, so that :func:`epsilon_pld` can price them."""
    unknown = event_pld.dispatch(object)
    return all(event_pld.dispatch(type(event)) is not unknown for event in events)


def epsilon_pld(events: Sequence[Event], *, target_delta: float, interval: float | None = None) -> float:
    """The epsilon of the composed loss distributions (tighter than Renyi), for either relation; may be published.

    Never below the truth, and with ``interval`` None at most 1 % above it. ``interval`` is the step of the grid that
    losses are rounded up to: each release adds about interval^2 / 12. None chooses it: 1e-4, or 1e-5 times an epsilon
    above 10, which a finer grid hardly lowers, and less where that would add more than a fifth of a percent. Returns
    ``inf`` for an event without noise. Below a delta of 1e-20, where the masses left out of distributions are not
    proven to be negligible, the epsilon is that of Renyi curves. ValueError where there are no such curves, for mixed
    units or relations, for events that hold private votes and unless 0 < target_delta < 1; TypeError for an event
    without a loss distribution.
    """
    if not 0 < target_delta < 1:
        raise ValueError(f"Expected 0 < target_delta < 1, got {target_delta}.")
    _common_guarantee(events, published=True)
    # A count of 0 costs 0 even where one release costs infinity.
    happened = tuple(event for event in events if getattr(event, "count", 1))
    if not happened:
        return 0.0
    # A smaller delta is below what grids leave out; curves have no such limit.
    if target_delta < loss_distributions.LEAST_DELTA:
        try:
            return epsilon(events, target_delta=target_delta).epsilon
        except ValueError as error:
            least = loss_distributions.LEAST_DELTA
            raise ValueError(
                f"Expected target_delta >= {least:g} for loss distributions, got {target_delta}."
            ) from error
    if interval is not None:
        return _epsilon_pld(happened, target_delta, interval)[0]
    # Start coarse: each grid gives an upper bound, and how fine the next one has to be.
    interval = _COARSEST_INTERVAL
    while True:
        found, excess = _epsilon_pld(happened, target_delta, interval)
        finer = max(loss_distributions.DEFAULT_INTERVAL, _INTERVAL_PER_EPSILON * found)
        if excess > _MOST_EXCESS * found:  # it falls with the square of the interval
            finer = min(finer, interval * math.sqrt(_MOST_EXCESS * found / excess) / 2)
        # A first estimate from a coarse grid may ask for far too fine a one.
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
    """The least of the available bounds: Renyi curves, and loss distributions where every event has one.

    Each bound holds for any data, so that choosing the least reveals nothing. Errors as :func:`epsilon`.
    """
    by_curves = epsilon(events, target_delta=target_delta).epsilon
    if not events or not has_loss_distributions(events):
        return by_curves
    return min(by_curves, epsilon_pld(events, target_delta=target_delta))


def _confident_gnmax(event: ConfidentGnmaxQueries | ConfidentGnmaxVotes) -> dict[str, Any]:
    """The mechanism's parameters, as :mod:`fairpate.privacy.gnmax` names them."""
    return {each.name: getattr(event, each.name) for each in fields(MechanismParameters)}


def _common_guarantee(events: Sequence[Event], *, published: bool = False) -> tuple[Unit | None, Relation | None]:
    """The unit and relation that all ``events`` share. ValueError if they differ, and, for a price that is
    ``published``, if an event holds votes; TypeError for an unknown event."""
    for event in events:
        if event_rdp.dispatch(type(event)) is event_rdp.dispatch(object):
            raise TypeError(f"Expected events that the accountant can price, got {type(event).__name__}.")
    holding_votes = sorted({type(event).__name__ for event in events if event.data_dependent})
    if holding_votes and published:
        raise ValueError(
            f"Expected data-independent events, got {', '.join(holding_votes)}: use the function named data_dependent "
            "and keep its result with the operator."
        )
    # Curves add up for one pair of neighbouring data sets; another unit or relation has other pairs.
    guarantees = {(event.unit, event.relation) for event in events}
    if len(guarantees) > 1:
        raise ValueError(f"Expected events under one unit and relation, got {sorted(guarantees)}; price them apart.")
    return guarantees.pop() if guarantees else (None, None)


# Relative error of the few float operations behind a limit, given up on the side of refusing.
_ROUNDING = 16 * sys.float_info.epsilon
# Below 2^63, so that the conversion to int64 cannot overflow.
_UNLIMITED = 2.0**62


@dataclass(frozen=True, kw_only=True)
class RenyiFilter:
    """Admits charges while the total converts to at most ``target_epsilon`` at ``target_delta``.

    At one order fixed in advance, charges may be chosen in view of all past answers: while their sum stays within a
    limit, everything released is Renyi private at that order with that limit (the Renyi filter of Feldman and Zrnic
    2021, arXiv 2008.11193, Section 4; Lecuyer 2021, arXiv 2103.01379). With several orders, "some order is within its
    limit" is a weaker statement: which order survives may depend on answers, and up to as many deltas add up as there
    are orders. The grid is sound in one case, that of a ledger whose mechanism cannot change: every charge is the same
    curve or zero. After n charges the total is n times that curve, so the order that admits most of them is known
    before the first, and looking at all orders gives the same answer as looking at that one.

    Charges must not depend on private values: a filter cannot repair a stop that votes decide. ``orders_A``: distinct
    orders > 1, kept as a tuple. ValueError for a negative or undefined ``target_epsilon``, unless 0 < target_delta < 1,
    and for orders that are not finite or not above 1.
    """

    target_epsilon: float
    target_delta: float
    orders_A: Sequence[float] | FloatArray = DEFAULT_ORDERS

    def __post_init__(self) -> None:
        # A copy, so that a frozen filter does not change with the caller's array.
        object.__setattr__(self, "orders_A", tuple(map(float, self.orders_A)))
        if not 0 <= self.target_epsilon < math.inf:
            raise ValueError(f"Expected 0 <= target_epsilon < inf, got {self.target_epsilon}.")
        if not 0 < self.target_delta < 1:
            raise ValueError(f"Expected 0 < target_delta < 1, got {self.target_delta}.")
        if not len(self.orders_A) or not all(1 < order < math.inf for order in self.orders_A):
            raise ValueError("Expected at least one order, each finite and > 1, in orders_A.")

    @cached_property
    def limit_A(self) -> FloatArray:
        """The largest cost at each order that converts to ``target_epsilon``, shape (A,); read-only.

        Improved conversion (Canonne, Kamath and Steinke 2020, Proposition 12). An order too small for the target,
        where that would be negative, keeps what costs no epsilon at all: -ln(1 - delta^2), by the total variation of
        two distributions that close (Bretagnolle and Huber 1979). The last digits are given up to rounding.
        """
        orders = np.array(self.orders_A)
        # log1p keeps the digits of ln(1 - 1 / alpha) at large orders.
        surcharge_A = np.log1p(-1 / orders) - (math.log(self.target_delta) + np.log(orders)) / (orders - 1)
        slack_A = _ROUNDING * (self.target_epsilon + np.abs(surcharge_A))
        free = -math.log1p(-(self.target_delta**2)) * (1 - _ROUNDING)
        limit_A: FloatArray = np.maximum(self.target_epsilon - surcharge_A - slack_A, free)
        # Cached, so every caller gets the same array.
        limit_A.setflags(write=False)
        return limit_A

    def admits(self, spent_rdp_A: npt.ArrayLike, next_rdp_A: npt.ArrayLike) -> bool:
        """True if some order is still within its limit after ``next_rdp_A``; both curves have shape (A,).

        ValueError for a cost that is NaN, negative or of another shape.
        """
        total_A = self._checked("spent_rdp_A", spent_rdp_A) + self._checked("next_rdp_A", next_rdp_A)
        return bool(np.any(total_A <= self.limit_A))

    def max_queries(self, rdp_per_query_A: npt.ArrayLike) -> int:
        """The number of equal charges that an unused filter admits; ``sys.maxsize`` where each costs 0.

        Errors as :meth:`admits`.
        """
        cost_A = self._checked("rdp_per_query_A", rdp_per_query_A)
        # A charge of 0 fits infinitely often.
        with np.errstate(divide="ignore", over="ignore"):
            most_A = np.minimum(np.floor(self.limit_A / cost_A), _UNLIMITED)
        # A quotient that was rounded up would admit one charge too many. Capped costs, as 0 times inf is NaN.
        most_A[most_A * np.minimum(cost_A, sys.float_info.max) > self.limit_A] -= 1
        most = most_A.max()
        return sys.maxsize if most == _UNLIMITED else int(most)

    def _checked(self, name: str, rdp_A: npt.ArrayLike) -> FloatArray:
        costs = np.asarray(rdp_A, dtype=np.float64)
        if costs.shape != self.limit_A.shape or not np.all(costs >= 0):
            raise ValueError(f"Expected {name} of shape {self.limit_A.shape}, each value >= 0, got {rdp_A!r}.")
        return costs


@dataclass(frozen=True, kw_only=True)
class AdaptiveLimit:
    """A limit of ``epsilon`` at ``delta`` on releases of any kind, where each may depend on all earlier ones.

    A Renyi filter at one order of ``DEFAULT_ORDERS``, over which all curves are given: the order at which a Gaussian
    mechanism has the most room, a function of epsilon and delta alone. Of the room that a Gaussian-DP filter (Smith and
    Thakurta 2022, arXiv 2210.17520) has for Gaussians, it keeps 71 to 94 % between epsilon .01 and 20 and delta 1e-10
    and 1e-4. Errors as :class:`RenyiFilter`.
    """

    epsilon: float
    delta: float
    place: int = field(init=False)
    """Index of the limit's order in ``DEFAULT_ORDERS``: there a curve that is linear in the order has most room."""
    order: float = field(init=False)
    """The order at which everything is counted."""
    budget: float = field(init=False)
    """The Renyi divergence at that order that all releases together may reach."""

    def __post_init__(self) -> None:
        limit_A = RenyiFilter(target_epsilon=self.epsilon, target_delta=self.delta).limit_A
        place = int(np.argmax(limit_A / np.array(DEFAULT_ORDERS)))
        for name, value in {"place": place, "order": DEFAULT_ORDERS[place], "budget": float(limit_A[place])}.items():
            object.__setattr__(self, name, value)

    def admits(self, rdp_A: FloatArray) -> bool:
        """True if releases with the total curve ``rdp_A`` are within the limit; NaN never is."""
        return bool(rdp_A[self.place] <= self.budget)


def least_adaptive_limit(rdp_A: FloatArray, *, delta: float) -> float:
    """The least epsilon, to a thousandth, at which an :class:`AdaptiveLimit` admits ``rdp_A``; ``inf`` where none does.

    An estimate for adaptive releases and not a guarantee, which needs a limit that was fixed before them.
    """
    if not rdp_A.any():
        return 0.0
    # The largest limits are counted at the least order: an infinite cost there is admitted by none.
    if not np.isfinite(rdp_A[0]):
        return math.inf
    # No order converts to less than the best one. Step by step and not by bisection: where a limit's order falls to the
    # next one, it may refuse what a smaller limit admits.
    epsilon = max(epsilon_of_curve(rdp_A, DEFAULT_ORDERS, target_delta=delta)[0], 1e-6)
    while not AdaptiveLimit(epsilon=epsilon, delta=delta).admits(rdp_A):
        epsilon *= 1.001
    return epsilon


EventsOfNoise = Callable[[float], Sequence[Event]]
_SMALLEST_NOISE, _LARGEST_NOISE = 1e-3, 2.0**14
# A step towards less noise aims a factor short of the target, because pricing far too little noise is slow.
_LARGEST_STRIDE, _CAREFUL = 64.0, 4.0
_TOLERANCE = 1e-3


def least_noise(
    events_of: EventsOfNoise,
    *,
    target_epsilon: float,
    target_delta: float,
    accounting: Accounting = "rdp",
    largest_noise: float = _LARGEST_NOISE,
) -> float:
    """The least noise at which ``events_of(noise)`` stay within the target, rounded up by at most a thousandth of it.

    More noise must never cost more. Nothing else is assumed about the events: a method with several noises scales them
    by one factor, and one that has already spent something lists it among the events. No noise above ``largest_noise``
    is tried. ValueError for an infinite target and for one that no noise reaches, such as one that fixed events already
    exceed; other errors as :func:`epsilon_of`.
    """
    if target_epsilon == math.inf:
        raise ValueError("Expected a finite target_epsilon, got inf: there is no least noise; give a number.")

    def spent(noise: float) -> float:
        return epsilon_of(events_of(noise), target_delta=target_delta, accounting=accounting)

    # From much noise on, where loss distributions are quick to compose and epsilon falls about as the inverse.
    low = high = largest_noise
    cost = spent(high)
    # `not >` refuses a NaN as well.
    if not target_epsilon > 0 or cost > target_epsilon:
        raise ValueError(
            f"Expected a target_epsilon that some noise reaches, got {target_epsilon}: the largest noise spends "
            f"{cost:.3g}; raise it, or spend less on what does not scale with the noise."
        )
    while not cost > target_epsilon and low > _SMALLEST_NOISE:
        left = target_epsilon / cost if cost else math.inf
        high, low = low, low / min(max(left / _CAREFUL, 2.0), _LARGEST_STRIDE)
        cost = spent(low)
    if not cost > target_epsilon:  # even the smallest noise is enough
        return low
    # The ends have been priced (and cached) as they are; exp(log(noise)) would differ in the last digit.
    ends = {math.log(noise): noise for noise in (low, high)}

    def excess(log_noise: float) -> float:
        # Epsilon falls about as the inverse of the noise: nearly a line in logarithms. Clipped, because it may be 0 or
        # inf.
        noise = ends.get(log_noise) or math.exp(log_noise)
        return math.log(min(max(spent(noise) / target_epsilon, 1e-9), 1e9))

    noise = math.exp(scipy.optimize.brentq(excess, math.log(low), math.log(high), xtol=_TOLERANCE / 4))
    # The root is found up to a tolerance, on either side; noise is only ever rounded up.
    while spent(noise) > target_epsilon:
        noise *= 1 + _TOLERANCE / 2
    return noise
