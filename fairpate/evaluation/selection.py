"""Choosing on a frontier: the three settings of the FairPATE paper, demands of a regulator, and transfer.

The paper's tables show one configuration per method in three settings: *fair* takes the smallest disparity first,
*private* the smallest epsilon, *accurate* the highest accuracy. Left alone, the first two reward models that answer
nobody or everybody alike, so a configuration has to keep a stated coverage and stay within a stated distance of the
best accuracy, and may not be degenerate (one class for everyone); these thresholds are ours, the paper leaves them
open. Epsilons are ranked as they are guaranteed.

A demand is met by what a configuration measured over its seeds. That choice looked at test records: its cost in
privacy is not part of any epsilon, and the chosen configuration will look better here than on fresh data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fairpate.evaluation.frontier import (
    OBJECTIVES,
    FloatArray,
    Objective,
    Point,
    defined,
    frontier,
    guaranteed,
    matrix,
    rounded_up,
)
from fairpate.evaluation.hypervolume import hypervolume, reference_point

Setting = Literal["fair", "private", "accurate"]
Threshold = Literal["coverage", "accuracy", "degenerate", "definition"]
FIRST: Mapping[Setting, Objective] = {"fair": "disparity", "private": "epsilon", "accurate": "error"}
_THEN: tuple[Objective, ...] = ("error", "disparity", "epsilon", "refused")
_ROUNDING = 1e-9
_ZERO_SCALE = 0.01


@dataclass(frozen=True, kw_only=True)
class SelectionRule:
    """Thresholds of the three settings.

    A configuration takes part with at least ``min_coverage`` and at most ``max_accuracy_loss`` below the best accuracy
    that a finite epsilon reaches in its panel. Values of the first objective that are no further than its ``tolerance``
    from the best are level; among those the highest accuracy wins.
    """

    min_coverage: float = 0.6
    max_accuracy_loss: float = 0.15
    tolerance: Mapping[Objective, float] = field(
        default_factory=lambda: {"disparity": 0.005, "epsilon": 0.01, "error": 0.005}
    )

    def __post_init__(self) -> None:
        for name in ("min_coverage", "max_accuracy_loss"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"Expected 0 <= {name} <= 1, got {value}.")


@dataclass(frozen=True, kw_only=True)
class Demand:
    """At most ``epsilon`` and ``disparity``, at least ``coverage`` and ``accuracy``; None asks nothing."""

    epsilon: float | None = None
    disparity: float | None = None
    coverage: float | None = None
    accuracy: float | None = None

    def __post_init__(self) -> None:
        if self.epsilon is not None and not self.epsilon >= 0:
            raise ValueError(f"epsilon: expected a number >= 0, got {self.epsilon}.")
        for name in ("disparity", "coverage", "accuracy"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name}: expected a share between 0 and 1, got {value}.")

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """The objectives it limits."""
        limits = (self.epsilon, self.disparity, self.accuracy, self.coverage)
        return tuple(name for name, limit in zip(OBJECTIVES, limits, strict=True) if limit is not None)


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


def select(points: Sequence[Point], setting: Setting, *, rule: SelectionRule, best_error: float) -> Point | None:
    """The configuration that one method shows in ``setting``; None if none of ``points`` takes part.

    ``best_error`` is the panel's. Undefined points take no part.
    """
    eligible = [point for point in points if not _below_thresholds(point, rule, best_error)]
    if not eligible:
        return None
    first = FIRST[setting]
    first_N = guaranteed(eligible, [first])[:, 0]
    is_level_N = first_N <= first_N.min() + rule.tolerance.get(first, 0.0) + _ROUNDING
    level = [point for point, is_level in zip(eligible, is_level_N, strict=True) if is_level]
    return min(level, key=lambda point: [round(point.value(name), 9) for name in _THEN])


def left_out_by(points: Sequence[Point], *, rule: SelectionRule, best_error: float) -> frozenset[Threshold]:
    """The thresholds that keep one method out of all settings: those below which each of its points stays, or else all.

    Empty where a point takes part; ``definition`` says that an objective is undefined.
    """
    below = [_below_thresholds(point, rule, best_error) for point in points]
    if not all(below):
        return frozenset()
    return frozenset.intersection(*below) or frozenset.union(*below)


def _below_thresholds(point: Point, rule: SelectionRule, best_error: float) -> frozenset[Threshold]:
    if point.num_undefined:
        return frozenset({"definition"})
    thresholds: Mapping[Threshold, bool] = {
        "coverage": not _is_covered(point, rule),
        "accuracy": point.value("error") > best_error + rule.max_accuracy_loss + _ROUNDING,
        "degenerate": bool(point.degenerate),
    }
    return frozenset(name for name, is_below in thresholds.items() if is_below)


def _is_covered(point: Point, rule: SelectionRule) -> bool:
    return 1 - point.value("refused") >= rule.min_coverage - _ROUNDING


def best_error(points: Sequence[Point], rule: SelectionRule) -> float:
    """Least error of a panel among configurations that keep the rule's coverage; inf if there is none.

    Those that guarantee nothing count only where no other is left.
    """
    covered = [point for point in points if _is_covered(point, rule) and not math.isnan(point.value("error"))]
    protected = [point for point in covered if math.isfinite(point.value("epsilon"))]
    return min((point.value("error") for point in protected or covered), default=math.inf)


def offer(point: Point, demand: Demand) -> Offer:
    """``point`` against ``demand``. An undefined objective misses its demand by infinitely much."""
    by_seed = [_missed(values_O, demand) for values_O in point.values_SO]
    return Offer(point=point, missed=_missed(point.mean_O, demand), seeds_met=sum(not missed for missed in by_seed))


def achievable(points: Sequence[Point], demand: Demand, *, num_nearest: int = 3) -> Achievable:
    """What one panel's points offer for ``demand``.

    Only points that nothing dominates in the four objectives are offered as nearest, so no offer is beaten by another:
    by distance, then by the sum of all they miss, then by accuracy.
    """
    have, lacking = defined(points, demand.objectives)
    offers = [offer(point, demand) for point in have]
    met = sorted((o for o in offers if not o.missed), key=lambda o: (bool(o.point.degenerate), *_by_error(o)))
    complete, _ = defined(have, OBJECTIVES)
    members = set(map(id, frontier(complete).members)) if complete else set()
    near = sorted((o for o in offers if id(o.point) in members), key=lambda o: (bool(o.point.degenerate), *_by_miss(o)))
    return Achievable(
        met=tuple(met),
        nearest=() if met else tuple(near[:num_nearest]),
        num_points=len(points),
        num_undefined=len(lacking),
    )


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


def transfer_frontier(
    source: Sequence[Point], target: Sequence[Point], objectives: Sequence[Objective] = OBJECTIVES
) -> FrontierTransfer:
    """Apply the source's whole Pareto set on the target and compare what it covers there."""
    members = frontier(source, objectives).members
    images = [_image(point, source, target) for point in members]
    found, _ = defined([image for image in images if image is not None], objectives)
    everything, _ = defined(target, objectives)
    reference_O = reference_point(target, objectives)
    return FrontierTransfer(
        num_members=len(members),
        num_missing=sum(image is None for image in images),
        volume_transferred=hypervolume(matrix(found, objectives), reference_O=reference_O),
        volume_best=hypervolume(matrix(everything, objectives), reference_O=reference_O),
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


def _missed(values_O: FloatArray, demand: Demand) -> dict[str, float]:
    epsilon, disparity, error, refused = values_O.tolist()
    excess = {
        "epsilon": _above(epsilon, demand.epsilon) and _above(rounded_up(epsilon), demand.epsilon),
        "disparity": _above(disparity, demand.disparity),
        "coverage": _below(1 - refused, demand.coverage),
        "accuracy": _below(1 - error, demand.accuracy),
    }
    return {name: value for name, value in excess.items() if value > _ROUNDING}


def _above(value: float, limit: float | None) -> float:
    if limit is None or value <= limit:
        return 0.0
    return math.inf if math.isnan(value) else (value - limit) / (limit or _ZERO_SCALE)


def _below(value: float, limit: float | None) -> float:
    if limit is None or value >= limit:
        return 0.0
    return math.inf if math.isnan(value) else (limit - value) / limit


def _by_miss(found: Offer) -> tuple[float, ...]:
    return round(found.distance, 9), round(sum(found.missed.values()), 9), *_by_error(found)


def _by_error(found: Offer) -> tuple[float, ...]:
    values = [found.point.value(name) for name in _THEN]
    return tuple(math.inf if math.isnan(value) else value for value in values)


def _plain(point: Point, name: str) -> str:
    return json.dumps(point.settings.get(name), sort_keys=True, default=str)
