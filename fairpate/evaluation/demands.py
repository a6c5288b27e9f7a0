"""Demands of a regulator on a frontier: which configurations keep them, which come nearest, and what a choice is worth
elsewhere.

A demand is met by what a configuration measured over its seeds. That choice looked at test records: its cost in
privacy is not part of any epsilon, and the chosen configuration will look better here than on fresh data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fairpate.evaluation.frontier import (
    OBJECTIVES,
    Objective,
    Point,
    defined,
    frontier,
    guaranteed,
    matrix,
    pareto_mask,
    rounded_up,
)
from fairpate.evaluation.hypervolume import hypervolume, reference_point
from fairpate.evaluation.selection import THEN
from fairpate.fairness.notions import DEFAULT, NOTIONS, NotionName

_ROUNDING = 1e-9
# Stands for a limit of 0, of which no excess is a share.
_ZERO_SCALE = 0.01


@dataclass(frozen=True, kw_only=True)
class Demand:
    """At most ``epsilon`` and ``disparity``, at least ``coverage`` and ``accuracy``; None asks nothing.

    ``disparity`` is that of demographic parity; ``fairness`` limits any notion by its name.
    """

    epsilon: float | None = None
    disparity: float | None = None
    coverage: float | None = None
    accuracy: float | None = None
    fairness: Mapping[NotionName, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.epsilon is not None and not self.epsilon >= 0:
            raise ValueError(f"epsilon: expected a number >= 0, got {self.epsilon}.")
        for name in ("disparity", "coverage", "accuracy"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name}: expected a share between 0 and 1, got {value}.")
        for name, limit in self.fairness.items():
            if name not in NOTIONS:
                raise ValueError(f"fairness: no notion {name!r}; known: {', '.join(NOTIONS)}.")
            if not 0 <= limit <= 1:
                raise ValueError(f"fairness: {name}: expected a limit between 0 and 1, got {limit}.")
        if self.disparity is not None and DEFAULT in self.fairness:
            raise ValueError(f"disparity: expected disparity or fairness {DEFAULT}, which are the same, got both.")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked for."""
        return not self.limits

    @property
    def limits(self) -> dict[str, float]:
        """What it limits, by name: of epsilon and of notions the most, of coverage and accuracy the least."""
        named = {name: getattr(self, name) for name in ("epsilon", "disparity", "coverage", "accuracy")}
        return {name: limit for name, limit in named.items() if limit is not None} | dict(self.fairness)

    @property
    def notions(self) -> tuple[NotionName, ...]:
        """The notions it limits, or the default."""
        named = (*((DEFAULT,) if self.disparity is not None else ()), *self.fairness)
        return named or (DEFAULT,)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A configuration against a demand.

    ``missed`` holds the relative excess of each demand that is not met, that of epsilon as it is guaranteed;
    ``distance`` is the largest of them, 0 when all are met. ``seeds_met`` counts the seeds whose own run meets all of
    it.
    """

    point: Point
    missed: Mapping[str, float]
    seeds_met: int

    @property
    def distance(self) -> float:
        """The largest relative excess: 0.1 says that a demand is missed by 10 % of its value."""
        return max(self.missed.values(), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Achievable:
    """One panel's answer to a demand: offers that meet it by accuracy, else the nearest; and how many are undefined.

    Degenerate predictors meet many demands and serve nobody: they come last, and ``num_degenerate`` counts them.
    """

    met: tuple[Offer, ...]
    nearest: tuple[Offer, ...]
    num_points: int
    num_undefined: int

    @property
    def num_degenerate(self) -> int:
        """How many of ``met`` are degenerate."""
        return sum(bool(offer.point.degenerate) for offer in self.met)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What a choice on one data set is worth on another.

    ``chosen`` was the best offer on the source; ``there`` is the same configuration on the target and ``best`` the
    target's own choice. ``regret`` is the accuracy that is lost against ``best``; NaN unless both meet the demand.
    """

    chosen: Offer
    there: Offer | None
    best: Offer | None

    @property
    def regret(self) -> float:
        """Accuracy lost by choosing elsewhere."""
        if self.there is None or self.best is None or self.there.missed or self.best.missed:
            return math.nan
        return self.there.point.value("error") - self.best.point.value("error")


@dataclass(frozen=True, kw_only=True)
class FrontierTransfer:
    """What a whole frontier is worth elsewhere: hypervolumes of what its members reach there and of the best there.

    ``regret`` is the share of hypervolume that is lost. ``num_missing`` members were not run on the target.
    """

    num_members: int
    num_missing: int
    volume_transferred: float
    volume_best: float

    @property
    def regret(self) -> float:
        """Share of the target's hypervolume that the transferred configurations do not reach; NaN if it has none."""
        return 1 - self.volume_transferred / self.volume_best if self.volume_best else math.nan


def offer(point: Point, demand: Demand) -> Offer:
    """``point`` against ``demand``. An undefined objective misses its demand by infinitely much."""
    by_seed = [_missed(_values(point, demand, seed), demand) for seed in range(len(point.seeds))]
    return Offer(
        point=point, missed=_missed(_values(point, demand), demand), seeds_met=sum(not missed for missed in by_seed)
    )


def achievable(points: Sequence[Point], demand: Demand, *, num_nearest: int = 3) -> Achievable:
    """What one panel's points offer for ``demand``.

    Only points that nothing dominates, in epsilon, error, refusals and every notion of the demand, are offered as
    nearest, so no offer is beaten by another: by distance, then by the sum of all they miss, then by accuracy.
    """
    offers = [offer(point, demand) for point in points if not np.isnan([*_values(point, demand).values()]).any()]
    met = sorted((o for o in offers if not o.missed), key=lambda o: (bool(o.point.degenerate), *_by_error(o)))
    members = _undominated([each.point for each in offers], demand.notions)
    near = sorted((o for o in offers if id(o.point) in members), key=lambda o: (bool(o.point.degenerate), *_by_miss(o)))
    return Achievable(
        met=tuple(met),
        nearest=() if met else tuple(near[:num_nearest]),
        num_points=len(points),
        num_undefined=len(points) - len(offers),
    )


def _undominated(points: Sequence[Point], notions: Sequence[NotionName]) -> set[int]:
    """Identities of the points with everything defined that no other dominates."""
    others: tuple[Objective, ...] = ("epsilon", "error", "refused")
    values_NO = np.column_stack(
        [guaranteed(points, others), *([point.fairness(name) for point in points] for name in notions)]
    )
    rows = np.flatnonzero(~np.isnan(values_NO).any(axis=1)).tolist()
    kept = pareto_mask(values_NO[rows]).tolist() if rows else []
    return {id(points[row]) for row, is_kept in zip(rows, kept, strict=True) if is_kept}


def _values(point: Point, demand: Demand, seed: int | None = None) -> dict[str, float]:
    """What a demand limits, of one seed or over all; NaN for a limit on groups of which some was not measured."""
    values: dict[str, float] = {}
    for name in demand.limits:
        seen, objective = _objective(point, name)
        value = float((seen.mean_O if seed is None else seen.values_SO[seed])[OBJECTIVES.index(objective)])
        values[name] = value if objective in ("epsilon", "disparity") else 1 - value
        if objective == "disparity" and point.groups.unmeasured:
            values[name] = math.nan
    return values


def _objective(point: Point, name: str) -> tuple[Point, Objective]:
    """The objective that a limit is about, and the point with its notion."""
    own: Mapping[str, Objective] = {"epsilon": "epsilon", "accuracy": "error", "coverage": "refused"}
    if name in own:
        return point, own[name]
    notion = DEFAULT if name == "disparity" else next(known for known in NOTIONS if known == name)
    return point.seen_by(notion), "disparity"


def transfer(source: Sequence[Point], target: Sequence[Point], demand: Demand) -> Transfer | None:
    """Choose for ``demand`` on one panel, apply the choice on the other; None if the source offers nothing.

    A configuration is the same on both when its method and every setting agree that the method varies on either, the
    data set's own aside: what is constant on each side belongs to the data set.
    """
    chosen = _choice(source, demand)
    if chosen is None:
        return None
    there = _image(chosen.point, source, target)
    return Transfer(chosen=chosen, there=None if there is None else offer(there, demand), best=_choice(target, demand))


def transfer_frontier(source: Sequence[Point], target: Sequence[Point]) -> FrontierTransfer:
    """Apply the source's whole Pareto set on the target and compare what it covers there."""
    members = frontier(source, OBJECTIVES).members
    images = [_image(point, source, target) for point in members]
    found, _ = defined([image for image in images if image is not None], OBJECTIVES)
    everything, _ = defined(target, OBJECTIVES)
    # One corner for both volumes: under different ones they do not compare.
    reference_O = reference_point(target, OBJECTIVES)
    return FrontierTransfer(
        num_members=len(members),
        num_missing=sum(image is None for image in images),
        volume_transferred=hypervolume(matrix(found, OBJECTIVES), reference_O=reference_O),
        volume_best=hypervolume(matrix(everything, OBJECTIVES), reference_O=reference_O),
    )


def varied_settings(points: Sequence[Point]) -> frozenset[str]:
    """Names of settings in which some of ``points`` differ, the data set's own aside."""
    names = {name for point in points for name in point.settings if not name.startswith("data.")}
    return frozenset(name for name in names if len({_plain(point, name) for point in points}) > 1)


def _choice(points: Sequence[Point], demand: Demand) -> Offer | None:
    found = achievable(points, demand)
    return next(iter(found.met or found.nearest), None)


def _image(point: Point, source: Sequence[Point], target: Sequence[Point]) -> Point | None:
    """The point of ``target`` with the same settings, if there is exactly one."""
    here, there = ([p for p in points if p.series == point.series] for points in (source, target))
    varied = varied_settings(here) | varied_settings(there)
    same = [p for p in there if all(_plain(p, name) == _plain(point, name) for name in varied)]
    return same[0] if len(same) == 1 else None


def _missed(values: Mapping[str, float], demand: Demand) -> dict[str, float]:
    """The relative excess over each limit that is not kept; infinite where the value is undefined."""
    excess = {}
    for name, limit in demand.limits.items():
        miss = _below if name in ("coverage", "accuracy") else _above
        # A true epsilon within the limit is no excess, though it is guaranteed rounded up.
        over = miss(values[name], limit)
        excess[name] = over and miss(rounded_up(values[name]), limit) if name == "epsilon" else over
    return {name: value for name, value in excess.items() if value > _ROUNDING}


def _above(value: float, limit: float) -> float:
    if value <= limit:
        return 0.0
    return math.inf if math.isnan(value) else (value - limit) / (limit or _ZERO_SCALE)


def _below(value: float, limit: float) -> float:
    if value >= limit:
        return 0.0
    return math.inf if math.isnan(value) else (limit - value) / limit


def _by_miss(found: Offer) -> tuple[float, ...]:
    return round(found.distance, 9), round(sum(found.missed.values()), 9), *_by_error(found)


def _by_error(found: Offer) -> tuple[float, ...]:
    values = [found.point.value(name) for name in THEN]
    return tuple(math.inf if math.isnan(value) else value for value in values)


def _plain(point: Point, name: str) -> str:
    return json.dumps(point.settings.get(name), sort_keys=True, default=str)
