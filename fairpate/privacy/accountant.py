"""Events and their privacy costs: Renyi curves, privacy loss distributions and (epsilon, delta).

A mechanism never states its own epsilon. It reports events: everything that touches private data, each with the unit it
protects and the neighbouring relation. This module composes the costs of events and converts them. A cost has two
forms, each with a registry by event type: Renyi curves (:func:`event_rdp`), added order by order, and privacy loss
distributions (:func:`event_pld`), which are tighter but not known for every event. Other modules register further
events. Events under different units or relations are never added. Costs that depend on private votes must not be
published: ``rdp`` and ``epsilon`` refuse events that contain votes, ``rdp_data_dependent`` and
``epsilon_data_dependent`` are for the operator alone.

The module also converts curves, amplifies by Poisson sampling, has the filters that decide when adaptive queries must
stop, and searches for the least noise that meets a target.

Shapes: A orders, K moments.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial, singledispatch
from operator import itemgetter
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import scipy

from fairpate.privacy import gnmax, loss_distributions
from fairpate.privacy.loss_distributions import LossDistribution
from fairpate.types import FloatArray, IntArray, MechanismParameters, Relation, Tail, Unit


class Event(Protocol):
    """A privacy event: one computation that touched private data, with the unit and the relation for which its cost
    holds."""

    @property
    def unit(self) -> Unit:
        """The unit of privacy: one ``record``, all records of a ``person``, or the ``sensitive attribute`` of a
        record."""

    @property
    def relation(self) -> Relation:
        """The difference between neighbouring data sets: one unit added or removed, or replaced."""

    @property
    def noun(self) -> str:
        """Singular name of the event on pages and in privacy statements, such as `sum of votes`. Its plural is formed
        by an s at the end or, as in `sums of votes`, before " of"."""

    @property
    def data_dependent(self) -> bool:
        """True if the cost is computed from private values and must stay with the operator."""


class SpentError(ValueError):
    """A ValueError raised after a release was drawn. Its message may reveal noise or a released value, so the release
    counts as made and its privacy cost must be charged.

    ``events`` are the privacy events of the release; ``noise`` is the label of the noise source, which says whether the
    noise is private.
    """

    def __init__(self, cause: ValueError, events: Sequence[Event], noise: str) -> None:
        super().__init__(str(cause))
        self.events, self.noise = tuple(events), noise


@contextmanager
def spent(events: Sequence[Event], *, noise: str) -> Iterator[None]:
    """Return a context manager for code that runs after a release with the privacy events ``events``. It turns a
    ValueError into a SpentError, so that the events are still charged."""
    try:
        yield
    # A ValueError may depend on the released values. Any other error is a fault of the program, and passes unchanged.
    except ValueError as error:
        raise SpentError(error, events, noise) from error


class CountedEvent:
    """Base class of events that happened ``count`` times; it checks their fields.

    Each subclass declares the field ``count`` itself, because statements list the fields in the subclass's order.
    ValueError for a sampling rate outside (0, 1], a norm below 1, or a negative number in any other field except
    ``threshold``.
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
                raise ValueError(f"Expected {expected} in a privacy event, got {value}; give this field a valid value.")


@dataclass(frozen=True, kw_only=True)
class TeacherEvent:
    """Base class of events of teachers' votes: one ``unit`` is in one teacher's data, and so moves at most one vote per
    query."""

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
    """``count`` noisy argmaxes that ran, including those whose labels were withheld.

    Confident-GNMax queries may be charged as the ``ThresholdChecks`` and ``NoisyArgmaxes`` that ran. The cost of each
    check and each argmax is known before it runs, so a Renyi filter with a limit fixed in advance may admit it.
    """

    noun: ClassVar[str] = "noisy vote of teachers"
    count: int
    noise_stddev_votes: float


@dataclass(frozen=True, kw_only=True)
class ConfidentGnmaxQueries(CountedEvent, TeacherEvent):
    """``count`` Confident-GNMax queries. Each is charged for a threshold check and a noisy argmax, so the cost holds
    for any votes."""

    noun: ClassVar[str] = "noisy vote of teachers"
    count: int
    threshold: float
    threshold_stddev_votes: float
    noise_stddev_votes: float


# By identity: an array can neither be compared in one bool nor hashed.
@dataclass(frozen=True, kw_only=True, eq=False)
class ConfidentGnmaxVotes(TeacherEvent):
    """Confident-GNMax queries with their votes, for the data-dependent cost.

    The cost is the exact joint cost of threshold bit and noisy argmax. ``votes_QC``: whole numbers, shape (Q, C), one
    row for each query submitted, answered or not.
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

    ``noise_multiplier``: standard deviation over the L2 norm that one unit may add. Renyi curves cover only the
    relation "add or remove one"; :func:`epsilon_pld` covers "replace one" too.
    """

    noun: ClassVar[str] = "Gaussian sum"
    count: int
    noise_multiplier: float
    sampling_rate: float
    unit: Unit = "record"
    relation: Relation = "add or remove one"


@dataclass(frozen=True, kw_only=True)
class PureReleases(CountedEvent):
    """``count`` releases by any mechanism, each ``epsilon``-DP for one ``unit`` under ``relation``.

    Each is a post-processing of randomised response between two values, and costs no more (Kairouz, Oh and Viswanath
    2015, arXiv 1311.0776). ``epsilon`` may be ``inf``, which means no guarantee.
    """

    noun: ClassVar[str] = "release of pure differential privacy"
    count: int
    epsilon: float
    unit: Unit = "sensitive attribute"
    relation: Relation = "replace one"


@dataclass(frozen=True, kw_only=True)
class LaplaceReleases(PureReleases):
    """``count`` vectors with independent Laplace noise; ``epsilon`` is the L1 sensitivity over the noise's scale.

    The cost is that of one number with this sensitivity. Proof that a vector moved by at most s in L1, under noise of
    scale 1, costs no more than one number moved by s: let e be the threshold of the hockey-stick divergence. For one
    number moved by a, the divergence is 1 - exp((e - a) / 2) where ``|e| <= a``. For two numbers moved by a <= b, and
    with u = exp((e - a - b) / 2), it is 1 - u (1 + a / 2) where ``|e| <= b - a``, and 1 - u (1 + (a + b - e) / 4) from
    there up to e = a + b. Both are below the divergence of one number moved by a + b. More numbers are added one by
    one, because products preserve dominance. For Renyi costs the proof is shorter: the curve is convex in s and 0 at s
    = 0, hence superadditive.
    """

    noun: ClassVar[str] = "release of sums with Laplace noise"


def of_unit(event: Any, unit: Unit) -> Any:
    """Return a copy of ``event``, at the same cost, for another ``unit`` of privacy, such as a person instead of a
    record.

    TypeError for an event whose cost holds for one unit only.
    """
    if event.unit == unit:
        return event
    # A unit that is no field belongs to the definition of the event: its price holds for no other unit.
    if "unit" not in {column.name for column in fields(event)}:
        raise TypeError(
            f"{type(event).__name__} has a cost per {event.unit} only, not per {unit}; use the unit that has a cost."
        )
    if hasattr(event, "trials"):  # of events, each of the same unit
        trials = tuple(tuple(of_unit(each, unit) for each in events) for events in event.trials)
        return replace(event, unit=unit, trials=trials)
    return replace(event, unit=unit)


class EpsilonOfCurve(NamedTuple):
    """The smallest epsilon that a Renyi curve gives, and the ``order`` at which the curve gives it."""

    epsilon: float
    order: float


def epsilon_of_curve(rdp_A: npt.ArrayLike, orders_A: npt.ArrayLike, *, target_delta: float) -> EpsilonOfCurve:
    """Return the epsilon of a Renyi curve at ``target_delta``, and the order that gives it.

    The conversion is Proposition 12 of Canonne, Kamath and Steinke 2020; it equals that of dp_accounting to the digit.
    ValueError for a NaN or negative cost, and unless 0 < target_delta < 1.
    """
    if not 0 < target_delta < 1:
        raise ValueError(f"Expected 0 < target_delta < 1, got {target_delta}.")
    costs, orders = np.asarray(rdp_A, dtype=np.float64), np.asarray(orders_A, dtype=np.float64)
    if not np.all(costs >= 0):
        raise ValueError("Expected a Renyi curve without NaN or negative values; check the costs that were added up.")
    with np.errstate(divide="ignore", invalid="ignore"):
        epsilon_A = costs + np.log1p(-1 / orders) - np.log(target_delta * orders) / (orders - 1)
    # As in dp_accounting: orders near 1 are left out, and a divergence this small is covered by delta alone.
    epsilon_A = np.where(orders > 1.01, epsilon_A, math.inf)
    epsilon_A = np.where(target_delta**2 + np.expm1(-costs) > 0, 0.0, epsilon_A)
    least = epsilon_A.min()
    # Again with the logarithms of `math`, more exact in the last digit: slow, so only for orders close to the best.
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
    return EpsilonOfCurve(max(0.0, value), order)


LogMoments = Callable[[FloatArray], FloatArray]

# A mixture has as many terms as its order: above this one the bound by two terms is used.
_LARGEST_MIXTURE = 1024


def gaussian_log_moments(noise_multiplier: float) -> LogMoments:
    """Return the function k -> ln E[(mu1 / mu0)^k] for Gaussian noise of ``noise_multiplier`` times the L2 sensitivity.

    mu0 and mu1 are the output densities without and with one unit; the expectation is over mu0.
    """
    if not noise_multiplier > 0:
        raise ValueError(f"Expected noise_multiplier > 0, got {noise_multiplier}.")
    return lambda k_K: k_K * (k_K - 1) / (2 * noise_multiplier**2)


def laplace_log_moments(scale: float) -> LogMoments:
    """Return the function k -> ln E[(mu1 / mu0)^k], k >= 0, for Laplace noise of ``scale`` times the L1 sensitivity."""
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
    """Return the RDP of one step on a Poisson sample, shape (A,).

    ``log_moments``: the moments of the step without sampling. Every record enters the sample independently with
    probability ``sampling_rate``; the relation is "add or remove one". The result does not hold for shuffled or
    fixed-size batches. For a mechanism whose worst pair of output distributions is mirror symmetric (Gaussian and
    Laplace noise, products of them) the cost at a whole order is the binomial mixture of its moments (Mironov, Talwar
    and Zhang 2019, arXiv 1908.10530; Zhu and Wang 2019, Theorem 6). Between whole orders the chord of (alpha - 1) R,
    which is convex in alpha, is an upper bound. Beyond order 1024 the mixture of the two extreme terms is used, which
    is an upper bound too. ValueError for an order <= 1 or a rate outside [0, 1].
    """
    if not 0 <= sampling_rate <= 1:
        raise ValueError(f"Expected 0 <= sampling_rate <= 1, got {sampling_rate}.")
    orders = np.asarray(orders_A, dtype=np.float64)
    if not np.all(orders > 1):
        raise ValueError(f"Expected Renyi orders > 1, got {orders_A!r}.")
    if sampling_rate == 0:
        return np.zeros(len(orders))
    below_A, above_A = np.floor(orders), np.ceil(orders)
    whole = np.unique([below_A, above_A]).astype(int).tolist()
    exponent_of = dict(zip(whole, _exponents(log_moments, sampling_rate, whole), strict=True))
    # Between whole orders the chord of (alpha - 1) R is above the curve, which is convex.
    share_A = orders - below_A
    below = np.array([exponent_of[order] for order in below_A])
    above = np.array([exponent_of[order] for order in above_A])
    return ((1 - share_A) * below + share_A * above) / (orders - 1)


# A page of costs asks for the same step again and again, each time with another count.
@lru_cache(maxsize=1024)
def poisson_gaussian_rdp(noise_multiplier: float, sampling_rate: float, orders: tuple[float, ...]) -> FloatArray:
    """Return :func:`poisson_rdp` of one Gaussian sum, as a read-only array; errors as in :func:`poisson_rdp` and
    :func:`gaussian_log_moments`."""
    rdp_A = poisson_rdp(gaussian_log_moments(noise_multiplier), sampling_rate=sampling_rate, orders_A=orders)
    # Cached, so every caller gets the same array.
    rdp_A.setflags(write=False)
    return rdp_A


def _exponents(log_moments: LogMoments, sampling_rate: float, orders: Sequence[int]) -> list[float]:
    """Return (alpha - 1) R(alpha) for each alpha in ``orders``, which are whole numbers >= 1. R is the Renyi cost that
    :func:`poisson_rdp` returns."""
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
    return scipy.special.gammaln(order + 1) - scipy.special.gammaln(k_K + 1) - scipy.special.gammaln(order - k_K + 1)


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


@singledispatch
def event_rdp(event: object, orders_A: FloatArray) -> FloatArray:  # noqa: ARG001 - the signature of every pricing
    """Return the Renyi curve of one privacy event, shape (A,). TypeError for an event type without a registered
    function.

    Each event type registers its function with ``event_rdp.register``. An event with a ``count`` of 0 costs 0, and no
    function is called for it.
    """
    raise TypeError(
        f"Expected an event with a known Renyi curve, got {type(event).__name__}; register one with event_rdp.register."
    )


@event_rdp.register
def _(
    event: ThresholdChecks | NoisyArgmaxes | ConfidentGnmaxQueries | ConfidentGnmaxVotes, orders_A: FloatArray
) -> FloatArray:
    match event:
        case ThresholdChecks():
            stddev = event.threshold_stddev_votes
            single_A = gnmax.gaussian_rdp(1.0, "threshold_stddev_votes", stddev, orders_A)
        case NoisyArgmaxes():
            single_A = gnmax.gaussian_rdp(2.0, "noise_stddev_votes", event.noise_stddev_votes, orders_A)
        case ConfidentGnmaxQueries():
            mechanism = {each.name: getattr(event, each.name) for each in fields(MechanismParameters)}
            single_A = gnmax.confident_gnmax_rdp_data_independent(**mechanism, orders_A=orders_A)
        case ConfidentGnmaxVotes():
            return rdp_of_votes_data_dependent(event, orders_A, total=True)
    return event.count * single_A


def rdp_of_votes_data_dependent(event: ConfidentGnmaxVotes, orders_A: FloatArray, *, total: bool = False) -> FloatArray:
    """Return the Renyi curve of each query of ``event``, shape (Q, A), or with ``total`` their sum, shape (A,).

    It depends on votes and must not be published.
    """
    mechanism = {each.name: getattr(event, each.name) for each in fields(MechanismParameters)}
    return gnmax.confident_gnmax_rdp(event.votes_QC, **mechanism, orders_A=orders_A, tail=event.tail, total=total)


@event_rdp.register
def _(event: PoissonGaussians, orders_A: FloatArray) -> FloatArray:
    # The binomial mixture compares a mixture with one plain distribution; replacing compares two mixtures.
    if event.relation != "add or remove one":
        raise ValueError(
            "No Renyi curve is known for replacing a record of a Poisson sample; use epsilon_pld (accounting 'pld')."
        )
    if not event.noise_multiplier:
        return np.full(len(orders_A), math.inf)
    return event.count * poisson_gaussian_rdp(event.noise_multiplier, event.sampling_rate, tuple(orders_A.tolist()))


@event_rdp.register
def _(event: PureReleases, orders_A: FloatArray) -> FloatArray:
    if not math.isfinite(event.epsilon):
        return np.full(len(orders_A), math.inf)
    if isinstance(event, LaplaceReleases):
        # Mironov 2017 (arXiv 1702.07476), Proposition 6.
        forth_A = np.log(orders_A / (2 * orders_A - 1)) + (orders_A - 1) * event.epsilon
        back_A = np.log((orders_A - 1) / (2 * orders_A - 1)) - orders_A * event.epsilon
        exponent_A = np.logaddexp(forth_A, back_A)
    else:
        # ln of e^(alpha eps) + e^((1 - alpha) eps) over 1 + e^eps, in log space: alpha eps may overflow an exponential.
        log_moment_A = np.logaddexp(orders_A * event.epsilon, (1 - orders_A) * event.epsilon)
        exponent_A = log_moment_A - np.logaddexp(0.0, event.epsilon)
    # A cost lies between 0 and epsilon at every order; only rounding leaves that range.
    return event.count * np.clip(exponent_A / (orders_A - 1), 0.0, event.epsilon)


def event_kinds() -> dict[str, type]:
    """Return the event types with a registered Renyi curve, by name; only types of imported modules are found."""
    found = [kind for kind in event_rdp.registry if kind is not object]
    for kind in found:  # the list grows while it is read, so that subclasses of subclasses are found
        found += kind.__subclasses__()
    return {kind.__name__: kind for kind in found}


def rdp(events: Sequence[Event], orders_A: npt.ArrayLike = DEFAULT_ORDERS) -> FloatArray:
    """Return the composed Renyi curve of data-independent events, shape (A,); zeros for no events.

    ValueError for mixed units or relations, for a cost that is NaN or negative, and for an event that contains private
    votes; TypeError for an event type without a registered Renyi curve.
    """
    _require_common_guarantee(events, published=True)
    return rdp_data_dependent(events, orders_A)


def rdp_data_dependent(events: Sequence[Event], orders_A: npt.ArrayLike = DEFAULT_ORDERS) -> FloatArray:
    """Return the composed Renyi curve as :func:`rdp` does, also of ``events`` that contain private votes.

    The curve is then for the operator only and must not be published.
    """
    orders = np.asarray(orders_A, dtype=np.float64)
    _require_common_guarantee(events)
    total_A = np.zeros(len(orders))
    for event in events:
        # A count of 0 costs 0 even where one release costs infinity.
        if not getattr(event, "count", 1):
            continue
        price_A = event_rdp(event, orders)
        # Event by event: in the sum a negative price could hide behind another one.
        if not np.all(price_A >= 0):
            raise ValueError(
                f"Expected the Renyi curve of {type(event).__name__} without NaN or negative values; check the event's "
                "noise and its registered function."
            )
        total_A += price_A
    return total_A


def epsilon(
    events: Sequence[Event], *, target_delta: float, orders_A: npt.ArrayLike = DEFAULT_ORDERS
) -> EpsilonOfCurve:
    """Return the smallest epsilon at ``target_delta`` that the composed Renyi curve gives; it may be published.

    Errors as ``rdp``, and ValueError unless 0 < target_delta < 1.
    """
    return epsilon_of_curve(rdp(events, orders_A), orders_A, target_delta=target_delta)


def epsilon_data_dependent(
    events: Sequence[Event], *, target_delta: float, orders_A: npt.ArrayLike = DEFAULT_ORDERS
) -> EpsilonOfCurve:
    """Return the epsilon as :func:`epsilon` does, also of ``events`` that contain private votes.

    The epsilon is then for the operator only and must not be published.
    """
    return epsilon_of_curve(rdp_data_dependent(events, orders_A), orders_A, target_delta=target_delta)


@singledispatch
def event_pld(event: object, interval: float) -> LossDistribution | None:  # noqa: ARG001 - as every pricing
    """Return the loss distribution of one privacy event on a grid of step ``interval``; None if the event has no noise,
    and so no guarantee. TypeError for an event type without a registered function.

    Event types register their functions with ``event_pld.register``; they are called with a ``count`` of at least 1.
    """
    raise TypeError(
        f"Expected an event with a known loss distribution, got {type(event).__name__}; use Renyi curves ('rdp')."
    )


@event_pld.register
def _(event: PoissonGaussians, interval: float) -> LossDistribution | None:
    rate, relation = event.sampling_rate, event.relation
    return loss_distributions.poisson_gaussians(
        event.count, event.noise_multiplier, sampling_rate=rate, relation=relation, interval=interval
    )


@event_pld.register
def _(event: PureReleases, interval: float) -> LossDistribution | None:
    if not event.epsilon:
        # No loss with certainty, however often.
        return loss_distributions.randomised_response(0.0, interval=interval)
    if math.isinf(event.epsilon):
        return None
    if isinstance(event, LaplaceReleases):
        one = loss_distributions.Laplace(scale=1 / event.epsilon)
        step = loss_distributions.on_poisson_sample(one, sampling_rate=1, interval=interval)
    else:
        step = loss_distributions.randomised_response(event.epsilon, interval=interval)
    return loss_distributions.repeated(step, event.count)


def has_loss_distributions(events: Sequence[Event]) -> bool:
    """Return True if the type of every event has a registered loss distribution, which :func:`epsilon_pld` needs."""
    unknown = event_pld.dispatch(object)
    return all(event_pld.dispatch(type(event)) is not unknown for event in events)


def epsilon_pld(events: Sequence[Event], *, target_delta: float, interval: float | None = None) -> float:
    """Return the epsilon of the composed loss distributions, which are tighter than Renyi curves; it may be published.

    The result is never below the exact epsilon, and with ``interval`` None at most 1 % above it; ``inf`` for an event
    without noise. ``interval`` is the step of the grid on which losses are stored: the error of epsilon grows with its
    square and with the number of releases. If it is None, the step is 1e-4, or 1e-5 times epsilon if epsilon is above
    10, and smaller if such a grid would add more than 0.2 % to epsilon. For a delta below 1e-20, Renyi curves give the
    epsilon, because the masses left out of loss distributions are not proven to be negligible there. ValueError for
    such a delta if no Renyi curve is known, for mixed units or relations, for events that contain private votes, and
    unless 0 < target_delta < 1; TypeError for an event without a loss distribution.
    """
    if not 0 < target_delta < 1:
        raise ValueError(f"Expected 0 < target_delta < 1, got {target_delta}.")
    _require_common_guarantee(events, published=True)
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
                f"Expected target_delta >= {least:g} for loss distributions, got {target_delta}; raise target_delta."
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
    """Return the epsilon of ``events`` by Renyi curves (``rdp``) or loss distributions (``pld``); it may be published.

    Errors as :func:`epsilon` and :func:`epsilon_pld`; ValueError for another accounting.
    """
    if accounting == "pld":
        return epsilon_pld(events, target_delta=target_delta)
    if accounting == "rdp":
        return epsilon(events, target_delta=target_delta).epsilon
    raise ValueError(f"Expected accounting 'rdp' or 'pld', got {accounting!r}.")


def pure_epsilon(events: Sequence[object]) -> float:
    """Return the sum of the epsilons of all releases, which holds at every delta; ``inf`` unless all ``events`` are of
    pure differential privacy."""
    if not all(isinstance(event, PureReleases) for event in events):
        return math.inf
    return math.fsum(event.count * event.epsilon for event in events if isinstance(event, PureReleases) and event.count)


def least_epsilon(events: Sequence[Event], *, target_delta: float) -> float:
    """Return the smaller of two epsilons: by Renyi curves and, if every event has one, by loss distributions.

    Both bounds hold for any data, so choosing the smaller reveals nothing. Errors as :func:`epsilon`.
    """
    by_curves = epsilon(events, target_delta=target_delta).epsilon
    if not events or not has_loss_distributions(events):
        return by_curves
    return min(by_curves, epsilon_pld(events, target_delta=target_delta))


def _require_common_guarantee(events: Sequence[Event], *, published: bool = False) -> None:
    """Raise ValueError if ``events`` have different units or relations, or if the cost is to be ``published`` and an
    event contains votes; raise TypeError for an event type without a registered Renyi curve."""
    for event in events:
        if event_rdp.dispatch(type(event)) is event_rdp.dispatch(object):
            raise TypeError(
                f"Expected events with known Renyi curves, got {type(event).__name__}; register one with "
                "event_rdp.register."
            )
    holding_votes = sorted({type(event).__name__ for event in events if event.data_dependent})
    if holding_votes and published:
        raise ValueError(
            f"Expected data-independent events, got {', '.join(holding_votes)}: use rdp_data_dependent or "
            "epsilon_data_dependent, and do not publish the result."
        )
    # Curves add up for one pair of neighbouring data sets; another unit or relation has other pairs.
    guarantees = {(event.unit, event.relation) for event in events}
    if len(guarantees) > 1:
        raise ValueError(
            f"Expected events under one unit and relation, got {sorted(guarantees)}; compute one epsilon for "
            "each pair of unit and relation."
        )


# Relative error of the few float operations behind a limit: limits are lowered by it, to err on the side of refusing.
_ROUNDING = 16 * sys.float_info.epsilon
# Below 2^63, so that the conversion to int64 cannot overflow.
_UNLIMITED = 2.0**62


@dataclass(frozen=True, kw_only=True)
class RenyiFilter:
    """A privacy filter: it admits charges while their total converts to at most ``target_epsilon`` at ``target_delta``.

    At one order fixed in advance, each charge may depend on all past answers: while the sum of the charges stays within
    a limit, everything released is Renyi private at that order with that limit (the Renyi filter of Feldman and Zrnic
    2021, arXiv 2008.11193, Section 4; Lecuyer 2021, arXiv 2103.01379). With several orders, "some order is within its
    limit" is a weaker statement: the order may depend on answers, and up to as many deltas add up as there are orders.
    Several orders are sound in one case: if the mechanism cannot change, so that every charge is the same curve or
    zero. After n charges the total is n times that curve. The order that admits most charges is then known before the
    first charge, and checking all orders gives the same result as checking this order.

    Charges must not depend on private values: a filter gives no guarantee if votes decide when to stop. ``orders_A``:
    distinct orders > 1, stored as a tuple. ValueError for a negative or undefined ``target_epsilon``, unless 0 <
    target_delta < 1, and for orders that are not finite or not above 1.
    """

    target_epsilon: float
    target_delta: float
    orders_A: Sequence[float] | FloatArray = DEFAULT_ORDERS
    limit_A: FloatArray = field(init=False, compare=False, repr=False)
    """The largest cost at each order that converts to ``target_epsilon``, shape (A,); read-only.

    A limit is the inverse of the conversion by :func:`epsilon_of_curve`, but at least -ln(1 - delta^2): a cost this
    small converts to an epsilon of 0, because the total variation is then at most delta (Bretagnolle and Huber 1979).
    The inverse is lower, even negative, at orders too small for the target. Limits are rounded down in the last digits.
    """

    def __post_init__(self) -> None:
        if self.orders_A is not DEFAULT_ORDERS:
            # A copy, so that a frozen filter does not change with the caller's array.
            object.__setattr__(self, "orders_A", tuple(map(float, self.orders_A)))
            if not len(self.orders_A) or not all(1 < order < math.inf for order in self.orders_A):
                raise ValueError("Expected at least one order, each finite and > 1, in orders_A.")
        if not 0 <= self.target_epsilon < math.inf:
            raise ValueError(f"Expected 0 <= target_epsilon < inf, got {self.target_epsilon}.")
        if not 0 < self.target_delta < 1:
            raise ValueError(f"Expected 0 < target_delta < 1, got {self.target_delta}.")
        orders = np.array(self.orders_A)
        # log1p keeps the digits of ln(1 - 1 / alpha) at large orders.
        surcharge_A = np.log1p(-1 / orders) - (math.log(self.target_delta) + np.log(orders)) / (orders - 1)
        slack_A = _ROUNDING * (self.target_epsilon + np.abs(surcharge_A))
        free = -math.log1p(-(self.target_delta**2)) * (1 - _ROUNDING)
        limit_A: FloatArray = np.maximum(self.target_epsilon - surcharge_A - slack_A, free)
        # Every caller gets the same array.
        limit_A.setflags(write=False)
        object.__setattr__(self, "limit_A", limit_A)

    def admits(self, spent_rdp_A: npt.ArrayLike, next_rdp_A: npt.ArrayLike) -> bool:
        """Return True if at some order the spent curve plus the curve of the next charge is within the filter's limit.

        Both curves have shape (A,). ValueError for a cost that is NaN, negative or of another shape.
        """
        total_A = self._checked("spent_rdp_A", spent_rdp_A) + self._checked("next_rdp_A", next_rdp_A)
        return bool(np.any(total_A <= self.limit_A))

    def max_queries(self, rdp_per_query_A: npt.ArrayLike, *, spent_A: npt.ArrayLike = 0.0) -> int:
        """Return how many charges, each with the curve ``rdp_per_query_A``, the filter admits after the curve
        ``spent_A``, which was fixed beforehand; ``sys.maxsize`` if a charge costs 0.

        Errors as :meth:`admits`.
        """
        cost_A = self._checked("rdp_per_query_A", rdp_per_query_A)
        left_A = self.limit_A - self._checked("spent_A", np.broadcast_to(spent_A, self.limit_A.shape))
        # A charge of 0 fits infinitely often, where there is room at all.
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            most_A = np.where(left_A >= 0, np.fmin(np.floor(left_A / cost_A), _UNLIMITED), 0.0)
        # A quotient that was rounded up would admit one charge too many. Capped costs, as 0 times inf is NaN.
        most_A[most_A * np.minimum(cost_A, sys.float_info.max) > np.maximum(left_A, 0.0)] -= 1
        most = most_A.max()
        return sys.maxsize if most == _UNLIMITED else int(most)

    def _checked(self, name: str, rdp_A: npt.ArrayLike) -> FloatArray:
        costs = np.asarray(rdp_A, dtype=np.float64)
        if costs.shape != self.limit_A.shape or not np.all(costs >= 0):
            raise ValueError(f"Expected {name} of shape {self.limit_A.shape}, each value >= 0, got {rdp_A!r}.")
        return costs


@dataclass(frozen=True, kw_only=True)
class AdaptiveLimit:
    """A limit of ``epsilon`` at ``delta`` on releases of any kind, where each release may depend on all earlier ones.

    It is a Renyi filter at a single order: the one of ``DEFAULT_ORDERS`` that admits the most releases of one Gaussian
    mechanism, which depends on epsilon and delta alone. Curves must be evaluated at ``DEFAULT_ORDERS``. The filter
    admits 71 to 94 % of the Gaussian releases that a Gaussian-DP filter (Smith and Thakurta 2022, arXiv 2210.17520)
    admits, for epsilon from .01 to 20 and delta from 1e-10 to 1e-4. Errors as :class:`RenyiFilter`.
    """

    epsilon: float
    delta: float
    place: int = field(init=False)
    """Index of ``order`` in ``DEFAULT_ORDERS``. This order is the best one for Renyi curves that are linear in the
    order, such as those of Gaussian releases."""
    order: float = field(init=False)
    """The Renyi order at which all releases are added up."""
    budget: float = field(init=False)
    """The Renyi divergence at that order that all releases together may reach."""

    def __post_init__(self) -> None:
        limit_A = RenyiFilter(target_epsilon=self.epsilon, target_delta=self.delta).limit_A
        place = int(np.argmax(limit_A / np.array(DEFAULT_ORDERS)))
        for name, value in {"place": place, "order": DEFAULT_ORDERS[place], "budget": float(limit_A[place])}.items():
            object.__setattr__(self, name, value)

    def admits(self, rdp_A: FloatArray) -> bool:
        """Return True if releases with the total curve ``rdp_A`` are within the limit; False if the cost is NaN."""
        return bool(rdp_A[self.place] <= self.budget)


def least_adaptive_limit(rdp_A: FloatArray, *, delta: float) -> float:
    """Return the least epsilon, to a thousandth, at which an :class:`AdaptiveLimit` admits ``rdp_A``; ``inf`` if none
    does.

    For adaptive releases this is an estimate, not a guarantee: a guarantee needs a limit fixed before the releases.
    """
    if not rdp_A.any():
        return 0.0
    # The largest limits use the smallest order: no limit admits an infinite cost there.
    if not np.isfinite(rdp_A[0]):
        return math.inf
    # No order converts to less than the best one. Step by step and not by bisection: where a limit's order falls to the
    # next one, it may refuse what a smaller limit admits.
    epsilon = max(epsilon_of_curve(rdp_A, DEFAULT_ORDERS, target_delta=delta)[0], 1e-6)
    while not AdaptiveLimit(epsilon=epsilon, delta=delta).admits(rdp_A):
        epsilon *= 1.001
    return epsilon


_SMALLEST_NOISE, _LARGEST_NOISE = 1e-3, 2.0**14
# A step towards less noise aims a factor short of the target, because pricing far too little noise is slow.
_LARGEST_STRIDE, _CAREFUL = 64.0, 4.0
_TOLERANCE = 1e-3


def least_noise(
    events_of: Callable[[float], Sequence[Event]],
    *,
    target_epsilon: float,
    target_delta: float,
    accounting: Accounting = "rdp",
    largest_noise: float = _LARGEST_NOISE,
) -> float:
    """Return the least noise at which ``events_of(noise)`` cost at most the target, rounded up by at most 0.1 %.

    ``events_of`` returns the events of a run with the given noise; more noise must never cost more. A method with
    several noises scales them by one factor, and events that do not depend on the noise are listed too. No noise above
    ``largest_noise`` is tried. ValueError for an infinite target and for one that no noise reaches, for example because
    fixed events already exceed it; other errors as :func:`epsilon_of`.
    """
    if target_epsilon == math.inf:
        raise ValueError("Expected a finite target_epsilon, got inf: any noise would do; give a number.")
    price = partial(epsilon_of, target_delta=target_delta, accounting=accounting)
    # From much noise on, where loss distributions are quick to compose and epsilon falls about as the inverse.
    low = high = largest_noise
    cost = price(events_of(high))
    # `not >` refuses a NaN as well.
    if not target_epsilon > 0 or cost > target_epsilon:
        raise ValueError(
            f"Expected a target_epsilon that some noise reaches, got {target_epsilon}: the largest noise "
            f"costs {cost:.3g}; raise target_epsilon, or spend less on releases whose noise is fixed."
        )
    while not cost > target_epsilon and low > _SMALLEST_NOISE:
        left = target_epsilon / cost if cost else math.inf
        high, low = low, low / min(max(left / _CAREFUL, 2.0), _LARGEST_STRIDE)
        cost = price(events_of(low))
    if not cost > target_epsilon:  # even the smallest noise is enough
        return low
    # The ends have been priced (and cached) as they are; exp(log(noise)) would differ in the last digit.
    ends = {math.log(noise): noise for noise in (low, high)}

    def excess(log_noise: float) -> float:
        # Epsilon falls about as the inverse of the noise: nearly a line in logarithms. Clipped, because it may be 0 or
        # inf.
        noise = ends.get(log_noise) or math.exp(log_noise)
        return math.log(min(max(price(events_of(noise)) / target_epsilon, 1e-9), 1e9))

    noise = math.exp(scipy.optimize.brentq(excess, math.log(low), math.log(high), xtol=_TOLERANCE / 4))
    # The root is found up to a tolerance, on either side; noise is only ever rounded up.
    while price(events_of(noise)) > target_epsilon:
        noise *= 1 + _TOLERANCE / 2
    return noise
