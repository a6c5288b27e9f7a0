"""A second opinion on epsilon: an accountant that shares nothing with the one that prices runs.

It reads events as plain values, as a statement holds them, and imports nothing of this package but
:mod:`fairpate.privacy.worst_pairs`. Of every kind of event it knows the definition: the worst pair of output
distributions with and without one unit. Releases are composed by multiplying Fourier transforms of their losses on a
grid, and epsilon is read off. Adding and removing a unit are two directions; the larger epsilon counts.

Votes of teachers and of records have discrete Gaussian noise, which is taken as it is. Only a release of smooth
sensitivity has no single worst pair: with one of them, Renyi divergences are maximised over all that smoothness allows,
and the rest counts as Gaussian (Canonne, Kamath and Steinke 2020, Propositions 5 and 12). Sums of weighted votes are
taken by the rounding argument of :mod:`fairpate.privacy.record_votes`: that theorem is shared, the numbers are not.

Shapes: K points of a pair, M points of the grid, A orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

from fairpate.privacy.worst_pairs import (
    FloatArray,
    NotRecomputedError,
    Pair,
    discrete_gaussian,
    gaussian,
    laplace,
    on_sample,
    on_visible_sample,
    sampled_replacement,
    spread,
    together,
    two_answers,
)

Events = Sequence[Mapping[str, Any]]

LEAST_DELTA = 1e-9
"""Below it, the rounding of Fourier transforms would decide."""
_LEAST_GRID, _LARGEST_GRID, _POINTS_PER_SPREAD = 2**15, 2**21, 32
_LOG_LOST = -41.0  # of the composed loss, what may lie outside the grid
_ROUNDING = 3.0  # standard deviation of the rounding of weighted sums
_TEACHERS = ("ThresholdChecks", "NoisyArgmaxes", "ConfidentGnmaxQueries", "AttributeQueries")


@dataclass(frozen=True)
class Kind:
    """How one kind of event is composed, and what it protects. None: its ``unit`` or ``relation`` field says it."""

    pairs: Callable[[Mapping[str, Any]], list[tuple[Pair | None, int]]]
    unit: str | None = None
    relation: str | None = "add or remove one"


def guarantee_of(event: Mapping[str, Any]) -> tuple[Any, Any]:
    """The unit and the relation that an event is defined for. NotRecomputedError for a kind that is not known here."""
    kind = _kind(event)
    return kind.unit or event["unit"], kind.relation or event["relation"]


def recomputed_epsilon(events: Events, *, delta: float) -> float:
    """The epsilon of all ``events`` together at ``delta``; ``inf`` where one has no noise.

    NotRecomputedError for events that have no independent price; KeyError or ValueError for values that are none.
    """
    if not LEAST_DELTA <= delta < 1:
        raise NotRecomputedError(f"delta {delta:g} is below {LEAST_DELTA:g}, where floats no longer decide")
    for event in events:
        _require_valid(event)
    if any(event["kind"] == "SmoothRelease" for event in events):
        return _renyi_epsilon(events, delta)
    parts = [part for event in events for part in _kind(event).pairs(event) if part[1]]
    pairs = [(pair, count) for pair, count in parts if pair is not None]
    if len(pairs) < len(parts):
        return math.inf
    both = (pairs, [(pair.mirrored(), count) for pair, count in pairs])
    # Both are bounds. Sums of pure guarantees may be less than what a grid and its lost masses come to.
    return min(_sum_of_pure(events), max(_composed_epsilon(direction, delta) for direction in both))


def _kind(event: Mapping[str, Any]) -> Kind:
    kind = KINDS.get(event.get("kind", ""))
    if kind is None:
        raise NotRecomputedError(f"{event.get('kind')}: no independent price is known of this kind of event")
    return kind


def _require_valid(event: Mapping[str, Any]) -> None:
    _kind(event)
    numbers = {name: event[name] for name in event if name not in ("kind", "noun", "unit", "relation", "threshold")}
    for name, value in numbers.items():
        if value is None and name == "threshold_stddev_votes":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float | str) or not float(value) >= 0:
            raise ValueError(f"{event['kind']}.{name}: expected a number of at least 0, got {value!r}")
    if not 0 < float(event.get("sampling_rate", 1)) <= 1 or not isinstance(event.get("count", 1), int):
        raise ValueError(f"{event['kind']}: expected a whole count and 0 < sampling_rate <= 1")


def _composed_epsilon(parts: list[tuple[Pair, int]], delta: float) -> float:
    """Of losses ln(with / without): all ``parts``, each so many times."""
    if not parts:
        return 0.0
    low, high = _range(parts)
    # Splitting a loss between two points moves a sum of n by more than this many steps with e^-41 at most (Hoeffding).
    margin = math.ceil(math.sqrt(-_LOG_LOST / 2 * sum(count for _, count in parts)))
    size, step = _grid(parts, low, high, margin)
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
    return _epsilon_at(losses, found, delta - lost - math.exp(_LOG_LOST))


def _range(parts: list[tuple[Pair, int]]) -> tuple[float, float]:
    """Where the composed loss lies but for a mass that does not count, by Chernoff's bound."""
    ends = []
    for sign in (-1, 1):
        bounds = []
        # A bound at every rate: the choice of rates decides how tight the range is, never whether it holds.
        for rate in np.geomspace(1e-4, 1e4, 81):
            moments = (count * np.logaddexp.reduce(_tilted(pair, sign * rate)) for pair, count in parts)
            bounds.append((math.fsum(map(float, moments)) - _LOG_LOST) / rate)
        ends.append(sign * min(bounds))
    return min(ends[0], 0.0), max(ends[1], 0.0)


def _tilted(pair: Pair, rate: float) -> FloatArray:
    # Logarithms: their exponentials add up to E[exp(rate loss)] with the unit, from which Chernoff's bound is made.
    found: FloatArray = pair.with_K + rate * (pair.with_K - pair.without_K)
    return found


def _grid(parts: list[tuple[Pair, int]], low: float, high: float, margin: int) -> tuple[int, float]:
    """Points and step: fine for the least spread of one release, as far as the largest grid allows; two margins."""
    spreads = []
    for pair, _ in parts:
        losses, masses = pair.with_K - pair.without_K, np.exp(pair.with_K)
        spreads.append(math.sqrt(max(float(masses @ losses**2) - float(masses @ losses) ** 2, 0.0)))
    least = min((spread for spread in spreads if spread > 0), default=1.0)
    wanted = min(max((high - low) * _POINTS_PER_SPREAD / least, _LEAST_GRID), _LARGEST_GRID)
    size = 2 ** math.ceil(math.log2(wanted + 2 * margin))
    # A few points to spare, as both ends are rounded outwards to the grid.
    return size, max((high - low) / (size - 8 - 2 * margin), 1e-12)


def _epsilon_at(losses: FloatArray, masses: FloatArray, delta: float) -> float:
    """The least epsilon >= 0 at which the sum of masses times (1 - exp(epsilon - loss))_+ is at most ``delta``."""
    step = losses[1] - losses[0]
    losses, masses = losses[losses > 0], masses[losses > 0]
    # Nothing of delta is left once it has paid for the mass outside the grid.
    if delta <= 0:
        return math.inf
    above = np.cumsum(masses[::-1])[::-1]
    # Masses from each point on, times exp(point - loss): absolute powers would underflow for large losses.
    discounted = scipy.signal.lfilter([1.0], [1.0, -math.exp(-step)], masses[::-1])[::-1]
    if not len(losses) or above[0] - discounted[0] * math.exp(-losses[0]) <= delta:
        return 0.0
    j = int(np.argmax(above - discounted <= delta))
    # Down to the point before, delta(epsilon) is above[j] - exp(epsilon - losses[j]) discounted[j].
    within = math.log(max(above[j] - delta, 1e-300) / discounted[j]) if discounted[j] > 0 else 0.0
    return float(np.clip(losses[j] + within, max(losses[j] - step, 0.0), losses[j]))


def _sum_of_pure(events: Events) -> float:
    """Guarantees of pure differential privacy may just add up; ``inf`` unless all are."""
    if not all(event["kind"] in ("PureReleases", "LaplaceReleases") for event in events):
        return math.inf
    return math.fsum(event["count"] * float(event["epsilon"]) for event in events if event["count"])


def _renyi_epsilon(events: Events, delta: float) -> float:
    """With a release of smooth sensitivity: Renyi curves on a fine grid of orders, and the improved conversion."""
    others = [event for event in events if event["kind"] != "SmoothRelease"]
    if unknown := {event["kind"] for event in others} - set(_TEACHERS):
        raise NotRecomputedError(f"{', '.join(sorted(unknown))} beside SmoothRelease: no independent Renyi curve")
    orders = 1 + np.geomspace(1e-3, 1e5, 4001)
    costs = sum((_smooth_curve(event, orders) for event in events if event["kind"] == "SmoothRelease"), 0 * orders)
    for count, stddev in (part for event in others for part in _noises(event) if part[0]):
        costs = costs + (count * orders / (2 * stddev**2) if stddev > 0 else math.inf)
    found = costs + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return float(max(np.min(found), 0.0))


def _smooth_curve(event: Mapping[str, Any], orders: FloatArray) -> FloatArray:
    """The largest divergence of normal variables whose scales differ by exp(beta), their centres by the smaller one."""
    beta, noise = float(event["beta"]), float(event["noise_stddev"])
    largest = np.zeros(len(orders))
    for exponent in np.linspace(-beta, beta, 41):
        ratio = math.exp(2 * exponent)  # of the second variance to the first
        mixed = orders * ratio + (1 - orders)
        safe = np.where(mixed > 0, mixed, 1.0)
        shift = orders * min(1.0, ratio) / (2 * noise**2 * safe)
        scale = exponent + (np.log(ratio) - np.log(safe)) / (2 * (orders - 1))
        largest = np.maximum(largest, np.where(mixed > 0, shift + scale, math.inf))
    return largest + orders / (2 * float(event.get("scale_noise_stddev", math.inf)) ** 2)


def _noises(event: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Numbers with noise that one teacher's vote moves by one each: how many, and the noise's deviation."""
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


def _of_teachers(event: Mapping[str, Any]) -> list[tuple[Pair | None, int]]:
    return [(discrete_gaussian(stddev) if count else None, count) for count, stddev in _noises(event)]


def _gaussian_sums(event: Mapping[str, Any]) -> list[tuple[Pair | None, int]]:
    stddev, rate = float(event["noise_multiplier"]), float(event["sampling_rate"])
    if event["relation"] == "replace one":
        return [(sampled_replacement(stddev, rate), event["count"])]
    return [(on_sample(gaussian(stddev), rate), event["count"])]


def _gaussian_laplaces(event: Mapping[str, Any]) -> list[tuple[Pair | None, int]]:
    scale = float(event["laplace_scale"])
    step = together(gaussian(float(event["gradient_noise_multiplier"])), laplace(1 / scale if scale else math.inf))
    return [(on_sample(step, float(event["sampling_rate"])), event["count"])]


def _attribute_gaussians(event: Mapping[str, Any]) -> list[tuple[Pair | None, int]]:
    base = gaussian(float(event["attribute_noise_multiplier"]))
    return [(on_visible_sample(base, float(event.get("sampling_rate", 1))), event["count"])]


def _vote_tables(event: Mapping[str, Any]) -> list[tuple[Pair | None, int]]:
    base = discrete_gaussian(float(event["noise_stddev_votes"]))
    return [(on_sample(base, float(event["sampling_rate"])), event["count"])]


def _vote_sums(event: Mapping[str, Any]) -> list[tuple[Pair | None, int]]:
    variance = float(event["noise_stddev_votes"]) ** 2 - _ROUNDING**2
    base = gaussian(math.sqrt(variance) / event["norm"]) if variance > 0 else None
    return [(on_sample(base, float(event["sampling_rate"])), event["count"])]


def _neighbour_votes(event: Mapping[str, Any]) -> list[tuple[Pair | None, int]]:
    count = discrete_gaussian(float(event["noise_stddev_votes"]))
    check = event.get("threshold_stddev_votes")
    moved = [count, count] if check is None else [count, count, discrete_gaussian(float(check))]
    return [(on_sample(together(*moved), float(event["sampling_rate"])), event["count"])]


KINDS: Mapping[str, Kind] = {
    "ThresholdChecks": Kind(_of_teachers),
    "NoisyArgmaxes": Kind(_of_teachers),
    "ConfidentGnmaxQueries": Kind(_of_teachers),
    "AttributeQueries": Kind(_of_teachers, relation="replace one"),
    "SmoothRelease": Kind(lambda event: []),  # noqa: ARG005 - by Renyi divergences alone
    "PoissonGaussians": Kind(_gaussian_sums, relation=None),
    "PoissonGaussianLaplaces": Kind(_gaussian_laplaces),
    "AttributeGaussians": Kind(_attribute_gaussians, "sensitive attribute", "replace one"),
    "SecretBatchAttributeGaussians": Kind(_attribute_gaussians, "sensitive attribute", "replace one"),
    "PureReleases": Kind(lambda event: [(two_answers(float(event["epsilon"])), event["count"])], relation=None),
    "LaplaceReleases": Kind(lambda event: [(laplace(float(event["epsilon"])), event["count"])], relation=None),
    "VoteTables": Kind(_vote_tables),
    "VoteSums": Kind(_vote_sums),
    "NeighbourVotes": Kind(_neighbour_votes),
}
