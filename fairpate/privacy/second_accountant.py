"""A second accountant for tests and ``fairpate verify``: it shares no code with the one that runs use.

It reads events as plain values, as a statement contains them, and imports nothing of this package. It knows the
definition of every kind of event: the worst pair of output distributions with and without one unit, as masses on
points. Losses ln(with / without) are put on a grid so that the masses of both distributions are kept, which makes the
pair easier to distinguish, never harder. Releases are composed by multiplying Fourier transforms of their losses, and
epsilon is read from the composed loss. Adding and removing a unit are two directions; the larger epsilon is the result.

Votes have discrete Gaussian noise, whose exact masses are used. A release by smooth sensitivity has no single worst
pair. A run that contains one is priced by Renyi divergences instead, maximised over all pairs that smoothness allows,
with votes as if their noise were continuous (Canonne, Kamath and Steinke 2020, Propositions 5, 12). For the best of a
secret number of trials only a theorem about Renyi divergences is known; that theorem, and the rounding argument for
sums of weighted votes, are those of :mod:`fairpate.privacy.mechanism_events`; the numbers are computed anew.

Shapes: K points of a pair, M points of the grid, A orders.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_DEVIATIONS, _POINTS_PER_DEVIATION = 20.0, 200  # of a Gaussian: Renyi divergences of high orders need far tails
_LOG_FAR, _LOG_END, _LOG_NOTHING = -56.0, -150.0, 14.0  # of masses
# Sampled Gaussians have a kink at some order: a grid that is finer there misses less of it.
_TRIAL_ORDERS: FloatArray = np.union1d(1 + np.geomspace(1e-2, 1e6, 301), np.arange(3, 257) / 2)
_LAPLACE_POINTS, _FACTOR_POINTS = 512, 2**10
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e6  # less is taken for none; more would need too many points


class NotRecomputedError(Exception):
    """The second accountant cannot compute the cost of an event; the message names the event and the reason."""


class _NoNoiseError(Exception):
    """A release has no noise, so its epsilon is infinite."""


@dataclass(frozen=True)
class Pair:
    """Two discrete output distributions on the same points, with and without one unit, as logarithms of masses."""

    with_K: FloatArray
    without_K: FloatArray


def gaussian(stddev: float) -> Pair:
    """Return the pair of output distributions N(1, stddev^2), with the unit, and N(0, stddev^2), without it."""
    _require_noise(stddev)
    points = _points(stddev, 0.0, 1.0)
    return Pair(_log_normal(points - 1, stddev), _log_normal(points, stddev))


def laplace(scale_inverse: float) -> Pair:
    """Return the pair of a Laplace distribution of scale 1 / ``scale_inverse`` around 1, and the same around 0.

    Each tail is one point, because the loss is constant there; between the centres the masses lie on a grid.
    """
    most = scale_inverse
    if not most < 1 / _LEAST_NOISE:
        raise _NoNoiseError
    if not most:
        return Pair(np.zeros(1), np.zeros(1))
    edges = np.linspace(0.0, 1.0, _LAPLACE_POINTS + 1)
    width = most * (edges[1] - edges[0])
    # A cell's mass: the density at its end nearer the centre, times (1 - exp(-width)) / 2.
    share = math.log(-math.expm1(-width) / 2)
    inside = -most * (1 - edges[1:]) + share, -most * edges[:-1] + share
    tails = np.array([0.0, -most]) - math.log(2)
    return Pair(np.concatenate([tails, inside[0]]), np.concatenate([tails[::-1], inside[1]]))


def discrete_gaussian(stddev: float) -> Pair:
    """Return the pair of output distributions of a count that is 1 with the unit and 0 without, with discrete Gaussian
    noise of ``stddev``."""
    _require_noise(stddev)
    reach = math.ceil(_DEVIATIONS * stddev) + 2
    points = np.arange(-reach, reach + 2, dtype=np.float64)
    masses = -((points - 1) ** 2) / (2 * stddev**2), -(points**2) / (2 * stddev**2)
    return Pair(masses[0] - np.logaddexp.reduce(masses[0]), masses[1] - np.logaddexp.reduce(masses[1]))


def together(*pairs: Pair) -> Pair:
    """Return the pair of output distributions of one release that consists of several independent releases of the same
    sample."""
    # The number of points of a product is that of its factors multiplied, so factors and products are made coarse.
    total, *others = map(_coarse, pairs)
    for other in others:
        sides = zip((total.with_K, total.without_K), (other.with_K, other.without_K), strict=True)
        total = _coarse(Pair(*(np.add.outer(one, another).ravel() for one, another in sides)))
    return total


def _require_noise(stddev: float) -> None:
    if stddev > _MOST_NOISE:
        raise NotRecomputedError(
            f"the second accountant cannot recompute this epsilon: noise of standard deviation {stddev:g} is above "
            f"{_MOST_NOISE:g}, its limit; recompute it by hand"
        )
    if not stddev > _LEAST_NOISE:
        raise _NoNoiseError


def _points(stddev: float, low: float, high: float) -> FloatArray:
    reach = _DEVIATIONS * stddev
    step = stddev / _POINTS_PER_DEVIATION
    count = math.ceil((high - low + 2 * reach) / step) + 1
    return np.asarray(low - reach + step * np.arange(count, dtype=np.float64))


def _log_normal(offsets: FloatArray, stddev: float) -> FloatArray:
    # Points are a deviation over _POINTS_PER_DEVIATION apart; sums over them are integrals to the last digit.
    log_step = -math.log(_POINTS_PER_DEVIATION * math.sqrt(2 * math.pi))
    return np.asarray(log_step - offsets**2 / (2 * stddev**2))


def _mixed(outside: FloatArray, inside: FloatArray, rate: float) -> FloatArray:
    if rate == 1:
        return inside
    return np.asarray(np.logaddexp(math.log1p(-rate) + outside, math.log(rate) + inside))


def spread(pair: Pair, step: float) -> tuple[IntArray, FloatArray]:
    """Return the privacy losses of a pair of output distributions as multiples of ``step``, and their masses.

    Each mass is split between the two nearest multiples so that both distributions keep their total mass.
    """
    losses, masses = pair.with_K - pair.without_K, np.exp(pair.with_K)
    kept = masses > 0
    # Masses that underflow are left out: where pairs are composed, the missing mass is subtracted from delta.
    losses, masses = losses[kept], masses[kept]
    below = np.floor(losses / step)
    # The upper share keeps both sums: of the masses, and of masses times exp(-loss), the masses without the unit.
    up = np.clip(np.expm1(below * step - losses) / math.expm1(-step), 0.0, 1.0)
    first = int(below.min())
    places: IntArray = (below - first).astype(np.int64)
    size = int(places.max()) + 2
    halves = np.bincount(places, masses * (1 - up), size), np.bincount(places + 1, masses * up, size)
    return first + np.arange(size, dtype=np.int64), np.asarray(halves[0] + halves[1], dtype=np.float64)


def _coarse(pair: Pair) -> Pair:
    """Return a pair of distributions with few points, for speed, that is at least as easy to distinguish as
    ``pair``."""
    # Without far tails, across which the steps of the grid would be too wide.
    kept = np.maximum(pair.with_K, pair.without_K) > _LOG_FAR
    pair = Pair(pair.with_K[kept], pair.without_K[kept])
    losses = pair.with_K - pair.without_K
    if len(losses) <= _FACTOR_POINTS:
        return pair
    step = max(float(np.ptp(losses)) / _FACTOR_POINTS, 1e-12)
    places, masses = spread(pair, step)
    kept = masses > 0
    with_K = np.log(masses[kept])
    return Pair(with_K, with_K - step * places[kept])


Events = Sequence[Mapping[str, Any]]

LEAST_DELTA = 1e-9
"""The least delta: below it, the rounding errors of Fourier transforms would be too large."""
_LEAST_GRID, _LARGEST_GRID, _POINTS_PER_SPREAD = 2**15, 2**21, 32
_LOG_LOST = -41.0  # of the composed loss, what may lie outside the grid
_ROUNDING = 3.0  # standard deviation of the rounding of weighted sums
_TEACHERS = ("ThresholdChecks", "NoisyArgmaxes", "ConfidentGnmaxQueries", "AttributeQueries")


_ADDED, _ATTRIBUTE = (None, "add or remove one"), ("sensitive attribute", "replace one")
KINDS: Mapping[str, tuple[str | None, str | None]] = {
    "ThresholdChecks": _ADDED,
    "NoisyArgmaxes": _ADDED,
    "ConfidentGnmaxQueries": _ADDED,
    "AttributeQueries": (None, "replace one"),
    "SmoothRelease": _ADDED,
    "SecretTrials": (None, None),
    "PoissonGaussians": (None, None),
    "PoissonGaussianLaplaces": _ADDED,
    "AttributeGaussians": _ATTRIBUTE,
    "SecretBatchAttributeGaussians": _ATTRIBUTE,
    "PureReleases": (None, None),
    "LaplaceReleases": (None, None),
    "VoteTables": _ADDED,
    "VoteSums": _ADDED,
    "MomentSums": _ADDED,
    "PredictionTables": (None, None),
    "NeighbourVotes": _ADDED,
}
"""The unit and the relation for which each kind of event is defined; None: a field of the event states it."""


def guarantee_of(event: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the unit and the relation for which a privacy event is defined. NotRecomputedError for an unknown kind."""
    if event.get("kind") not in KINDS:
        raise NotRecomputedError(
            f"the second accountant does not know the kind of event {event.get('kind')!r}; recompute its cost by hand"
        )
    unit, relation = KINDS[event["kind"]]
    return unit or event["unit"], relation or event["relation"]


def recomputed_epsilon(events: Events, *, delta: float) -> float:
    """Return the epsilon of all ``events`` together at ``delta``; ``inf`` if one has no noise.

    NotRecomputedError for events whose cost this accountant cannot compute; KeyError or ValueError for fields that are
    missing or not valid.
    """
    # NaN fails the comparison too.
    if not LEAST_DELTA <= delta < 1:
        raise NotRecomputedError(
            f"the second accountant cannot recompute epsilon at delta {delta:g}: its rounding errors are too large "
            f"below {LEAST_DELTA:g}; state epsilon at a larger delta, below 1"
        )
    for event in events:
        _require_valid(event)
    # A count of 0 costs nothing, whatever a single release would cost.
    events = [event for event in events if event.get("count", 1)]
    try:
        if any(event["kind"] in ("SmoothRelease", "SecretTrials") for event in events):
            # By Renyi curves, converted.
            has_trials = any(event["kind"] == "SecretTrials" for event in events)
            orders = _TRIAL_ORDERS if has_trials else 1 + np.geomspace(1e-3, 1e5, 4001)
            # ``0 * orders`` as the start: a sum without terms still has the shape of the orders.
            costs = sum((_renyi_curve(event, orders) for event in events), 0 * orders)
            found = costs + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
            return float(max(np.min(found), 0.0))
        pairs = [part for event in events for part in _pairs(event)]
    except _NoNoiseError:
        return math.inf
    # Adding a unit, and in mirrored pairs removing it.
    both = (pairs, [(Pair(pair.without_K, pair.with_K), count) for pair, count in pairs])
    composed = max(_composed_epsilon(direction, delta) for direction in both)
    if not all(event["kind"] in ("PureReleases", "LaplaceReleases") for event in events):
        return composed
    # Guarantees of pure differential privacy may also just add up. The grid and its lost masses may come to more.
    return min(composed, math.fsum(event["count"] * float(event["epsilon"]) for event in events))


def _require_valid(event: Mapping[str, Any]) -> None:
    # For its error: an event inside of trials may leave out what the outer one names.
    guarantee_of({"unit": None, "relation": None} | dict(event))
    if event["kind"] == "SecretTrials":
        if not 1 < event["expected_trials"] < math.inf or not -1 < event["eta"] < math.inf or not all(event["trials"]):
            raise ValueError(
                "SecretTrials: expected finite expected_trials > 1 and eta > -1, and events in every trial; restore "
                "the statement that contains this event"
            )
        for inner in (each for events in event["trials"] for each in events):
            if inner.get("kind") in ("SecretTrials", "PoissonGaussianLaplaces", "NeighbourVotes"):
                # Pairs of several noises lack their far tails.
                raise NotRecomputedError(
                    "the second accountant cannot recompute this epsilon: it has no Renyi curve for "
                    f"{inner['kind']} inside of SecretTrials; recompute it by hand"
                )
            _require_valid(inner)
            # An inner event that names no unit or relation has those of the outer one.
            found = guarantee_of({"unit": event["unit"], "relation": event["relation"]} | dict(inner))
            if found != guarantee_of(event):
                raise ValueError(
                    f"SecretTrials is for {guarantee_of(event)}, but its event {inner['kind']} is for {found}; state "
                    "the same unit and relation in both"
                )
        return
    not_numbers = ("kind", "noun", "unit", "relation", "threshold")
    for name, value in ((name, event[name]) for name in event if name not in not_numbers):
        if value is None and name == "threshold_stddev_votes":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float | str) or not float(value) >= 0:
            raise ValueError(f"{event['kind']}.{name}: expected a number >= 0, got {value!r}; restore the statement")
    if not 0 < float(event.get("sampling_rate", 1)) <= 1 or not isinstance(event.get("count", 1), int):
        raise ValueError(
            f"{event['kind']}: expected a whole number as count and 0 < sampling_rate <= 1; restore the statement that "
            "contains this event"
        )


def _composed_epsilon(parts: list[tuple[Pair, int]], delta: float) -> float:
    """Return the epsilon at ``delta``, in one direction, of all ``parts`` together: pairs of output distributions, each
    with its number of repetitions."""
    if not parts:
        return 0.0
    # The interval of the composed loss, but for a mass of e^_LOG_LOST on either side, by Chernoff's bound at every
    # rate: the choice of rates decides how tight the interval is, never whether it holds.
    losses_of = [pair.with_K - pair.without_K for pair, _ in parts]

    def bound(sign: int, rate: float, *, is_rough: bool = False) -> float:
        moments = []
        for (pair, count), losses_K in zip(parts, losses_of, strict=True):
            # ln E[exp(rate loss)], in log space: the exponentials may overflow. In a quarter of the time of
            # np.logaddexp.reduce. Its largest term alone is less, and takes a fifth of that time.
            terms_K = pair.with_K + sign * rate * losses_K
            largest = float(terms_K.max())
            if not is_rough and math.isfinite(largest):
                largest += math.log(float(np.exp(terms_K - largest).sum()))
            moments.append(count * largest)
        return (math.fsum(moments) - _LOG_LOST) / rate

    ends = []
    for sign in (-1, 1):
        least = math.inf
        for rough, rate in sorted((bound(sign, rate, is_rough=True), rate) for rate in np.geomspace(1e-4, 1e4, 81)):
            if rough >= least:  # no rate from here on has a smaller bound
                break
            least = min(least, bound(sign, rate))
        ends.append(sign * least)
    low, high = min(ends[0], 0.0), max(ends[1], 0.0)

    # A grid that is fine for the least spread of a release, if the largest grid allows.
    spreads = []
    for pair, _ in parts:
        losses, masses = pair.with_K - pair.without_K, np.exp(pair.with_K)
        spreads.append(math.sqrt(max(float(masses @ losses**2) - float(masses @ losses) ** 2, 0.0)))
    least = min((spread for spread in spreads if spread > 0), default=1.0)
    wanted = min(max((high - low) * _POINTS_PER_SPREAD / least, _LEAST_GRID), _LARGEST_GRID)
    # Splitting a loss between two points moves a sum of n by more than this many steps with e^-41 at most (Hoeffding).
    margin = math.ceil(math.sqrt(-_LOG_LOST / 2 * sum(count for _, count in parts)))
    size = 2 ** math.ceil(math.log2(wanted + 2 * margin))
    # A few points to spare, as both ends are rounded outwards to the grid.
    step = max((high - low) / (size - 8 - 2 * margin), 1e-12)

    transform: npt.NDArray[np.complex128] = np.ones(size // 2 + 1, dtype=np.complex128)
    lost = 0.0
    first, last = math.floor(low / step) - margin, math.ceil(high / step) + margin
    for pair, count in parts:
        places, masses = spread(pair, step)
        beyond = places > last
        # Mass beyond the grid, and what a pair lacks of 1, is given to the attacker: it is taken off delta.
        lost += count * (float(masses[beyond].sum()) + max(0.0, 1 - float(masses.sum())))
        inside = np.maximum(places[~beyond], first)  # raising a loss is safe
        transform *= np.fft.rfft(np.bincount(inside % size, masses[~beyond], size)) ** count
    # The transform is cyclic: point k lies at first + k, modulo its size. Below 0 there is only rounding.
    found: FloatArray = np.maximum(np.roll(np.fft.irfft(transform, size), -(first % size)), 0.0)
    losses = step * (first + np.arange(size, dtype=np.float64))

    # The least epsilon >= 0 at which the sum of masses times (1 - exp(epsilon - loss))_+ is at most what is left.
    left, step = delta - lost - math.exp(_LOG_LOST), losses[1] - losses[0]
    losses, masses = losses[losses > 0], found[losses > 0]
    if left <= 0:  # the mass outside the grid uses up all of delta
        return math.inf
    above = np.cumsum(masses[::-1])[::-1]
    # Masses from each point on, times exp(point - loss): absolute powers would underflow for large losses.
    discounted = scipy.signal.lfilter([1.0], [1.0, -math.exp(-step)], masses[::-1])[::-1]
    if not len(losses) or above[0] - discounted[0] * math.exp(-losses[0]) <= left:
        return 0.0
    j = int(np.argmax(above - discounted <= left))
    # Down to the point before, delta(epsilon) is above[j] - exp(epsilon - losses[j]) discounted[j].
    within = math.log(max(above[j] - left, 1e-300) / discounted[j]) if discounted[j] > 0 else 0.0
    return float(np.clip(losses[j] + within, max(losses[j] - step, 0.0), losses[j]))


def _renyi_curve(event: Mapping[str, Any], orders: FloatArray) -> FloatArray:
    kind = event["kind"]
    if kind == "SmoothRelease":
        return _smooth_curve(event, orders)
    if kind == "SecretTrials":
        return _trials_curve(event, orders)
    total = 0 * orders
    if kind in _TEACHERS:
        for count, stddev in _noises(event):
            total = total + (count * orders / (2 * stddev**2) if stddev > 0 else math.inf)
        return total
    for pair, count in _pairs(event):
        # The larger Renyi divergence of the two directions at each order, inf where the points do not reach far enough
        # to tell.
        found = []
        for first, second in ((pair.with_K, pair.without_K), (pair.without_K, pair.with_K)):
            # Points with so little mass lie at the cut ends of a noise that goes on beyond them.
            ends = np.flatnonzero(np.maximum(first, second) < _LOG_END)
            for order in orders:
                terms = order * first + (1 - order) * second
                largest = terms.max()
                if len(ends) and terms[ends].max() > largest - _LOG_NOTHING:
                    found.append(math.inf)
                else:
                    exponent = largest + math.log(np.exp(terms - largest).sum())
                    found.append(max(exponent, 0.0) / (order - 1))
        total = total + count * np.max(np.reshape(found, (2, len(orders))), axis=0)
    return np.asarray(total)


def _trials_curve(event: Mapping[str, Any], orders: FloatArray) -> FloatArray:
    """Return the Renyi curve of publishing the best of a secret number of trials, by Papernot and Steinke 2022 (arXiv
    2110.03620), Theorem 2.

    It shares no code with :mod:`fairpate.privacy.accountant`, and evaluates the curve of a single trial at other orders
    than that accountant.
    """
    mean, eta = float(event["expected_trials"]), float(event["eta"])
    # E[K] of the law, as a function of ln gamma < 0; it falls as gamma rises.
    log_gammas = -np.geomspace(1e-9, 60, 20_001)
    inverse = np.exp(-log_gammas)
    means = (inverse - 1) / -log_gammas if eta == 0 else eta * (inverse - 1) / (1 - np.exp(eta * log_gammas))
    log_gamma = float(np.interp(mean, means, log_gammas))
    if not means[0] < mean < means[-1]:
        raise NotRecomputedError(
            "the second accountant cannot recompute this epsilon: it finds no gamma at which SecretTrials with eta "
            f"{eta:g} have {mean:g} expected trials; recompute it by hand"
        )
    # The dearest of the settings, at the orders of the trial inside and at those outside.
    trial, outside = (
        np.maximum.reduce(
            [sum((_renyi_curve(each, at) for each in events if each["count"]), 0 * at) for events in event["trials"]]
        )
        for at in (_TRIAL_ORDERS, orders)
    )
    inside = (trial * (_TRIAL_ORDERS - 1) - log_gamma) / _TRIAL_ORDERS
    return np.asarray(outside + (1 + eta) * float(inside.min()) + math.log(mean) / (orders - 1))


def _smooth_curve(event: Mapping[str, Any], orders: FloatArray) -> FloatArray:
    """Return the Renyi curve of a SmoothRelease, the publication of a data-dependent privacy cost.

    It is the largest divergence between normal variables whose standard deviations differ by a factor up to exp(beta)
    and whose means differ by the smaller of the two smooth sensitivities.
    """
    beta, noise = float(event["beta"]), float(event["noise_stddev"])
    largest = np.zeros(len(orders))
    # Either variable may have the larger scale.
    for exponent in np.linspace(-beta, beta, 41):
        ratio = math.exp(2 * exponent)  # of the second variance to the first
        mixed = orders * ratio + (1 - orders)
        safe = np.where(mixed > 0, mixed, 1.0)
        shift = orders * min(1.0, ratio) / (2 * noise**2 * safe)
        scale = exponent + (np.log(ratio) - np.log(safe)) / (2 * (orders - 1))
        largest = np.maximum(largest, np.where(mixed > 0, shift + scale, math.inf))
    return largest + orders / (2 * float(event.get("scale_noise_stddev", math.inf)) ** 2)


def _noises(event: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Return the noisy steps (threshold checks and argmaxes) of an event of teachers' votes. Each step is a pair: the
    number of counts that one teacher changes by one, over all queries, and the standard deviation of the noise on a
    count."""
    count, kind = event["count"], event["kind"]
    if kind == "ThresholdChecks":
        return [(count, float(event["threshold_stddev_votes"]))]
    argmaxes = (2 * count, float(event.get("noise_stddev_votes", 0)))  # one count falls, another rises
    if kind == "NoisyArgmaxes":
        return [argmaxes]
    threshold = float(event["threshold"])
    if threshold == math.inf:
        return []  # nothing is ever answered
    checks = (count, float(event["threshold_stddev_votes"]))
    return [argmaxes] if threshold == -math.inf else [checks, argmaxes]


def _pairs(event: Mapping[str, Any]) -> list[tuple[Pair, int]]:
    """Return the worst pairs of output distributions of one event, each with its number of repetitions."""
    kind, count = event["kind"], event["count"]
    if kind in _TEACHERS:
        return [(discrete_gaussian(stddev), times) for times, stddev in _noises(event)]
    if kind in ("PureReleases", "LaplaceReleases"):
        epsilon = float(event["epsilon"])
        if kind == "LaplaceReleases":
            return [(laplace(epsilon), count)]
        if not epsilon < 1 / _LEAST_NOISE:
            raise _NoNoiseError
        # Randomised response between two values: the worst case of all epsilon-DP releases.
        true, false = -np.logaddexp(0.0, -epsilon), -np.logaddexp(0.0, epsilon)
        return [(Pair(np.array([true, false]), np.array([false, true])), count)]
    if kind == "PredictionTables":
        weight, moved = event["weight"], math.sqrt(2.0 if event["relation"] == "replace one" else 1.0)
        return [(_rounded(float(event["noise_stddev_records"]) * weight, weight * moved), count)]
    rate = 1.0 if kind == "AttributeGaussians" else float(event["sampling_rate"])
    if kind in ("AttributeGaussians", "SecretBatchAttributeGaussians"):
        pair = gaussian(float(event["attribute_noise_multiplier"]))
        if rate < 1:
            # An attacker may see whether the unit was sampled; nothing is released about a unit outside of the sample.
            inside, outside = math.log(rate), math.log1p(-rate)
            pair = Pair(np.append(pair.with_K + inside, outside), np.append(pair.without_K + inside, outside))
        return [(pair, count)]
    if kind == "PoissonGaussians" and event["relation"] == "replace one":
        # The unit adds 1 if it is sampled, the one that replaces it adds -1.
        stddev = float(event["noise_multiplier"])
        _require_noise(stddev)
        points = _points(stddev, -1.0, 1.0)
        up, none, down = (_log_normal(points - centre, stddev) for centre in (1.0, 0.0, -1.0))
        return [(Pair(_mixed(none, up, rate), _mixed(none, down, rate)), count)]
    # All others are releases on a fresh secret sample each.
    if kind == "PoissonGaussians":
        pair = gaussian(float(event["noise_multiplier"]))
    elif kind == "PoissonGaussianLaplaces":
        scale = float(event["laplace_scale"])
        pair = together(gaussian(float(event["gradient_noise_multiplier"])), laplace(1 / scale if scale else math.inf))
    elif kind == "VoteTables":
        pair = discrete_gaussian(float(event["noise_stddev_votes"]))
    elif kind == "NeighbourVotes":
        of_count, check = discrete_gaussian(float(event["noise_stddev_votes"])), event.get("threshold_stddev_votes")
        # Two counts move, and the check where there is one.
        pair = together(of_count, of_count, *([] if check is None else [discrete_gaussian(float(check))]))
    else:
        pair = _rounded(float(event["noise_stddev_votes"]), event["norm"])
    # The unit is in the sample with probability ``rate``.
    return [(Pair(_mixed(pair.without_K, pair.with_K, rate), pair.without_K), count)]


def _rounded(stddev: float, norm: float) -> Pair:
    """Return a pair of output distributions that bounds a release of a vector of L2 norm ``norm`` under discrete
    Gaussian noise of ``stddev``. The pair is of slightly smaller continuous noise: rounding its output at random gives
    the release."""
    return gaussian(math.sqrt(max(stddev**2 - _ROUNDING**2, 0.0)) / norm)
