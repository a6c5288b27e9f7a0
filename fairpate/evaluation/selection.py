"""Choosing on a frontier: the three settings of the FairPATE paper.

The paper's tables show one configuration per method in three settings: *fair* takes the smallest disparity first,
*private* the smallest epsilon, *accurate* the highest accuracy. Left alone, the first two reward models that answer
nobody or everybody alike, so a configuration has to keep a stated coverage and stay within a stated distance of the
best accuracy, and may not be degenerate (one class for everyone); these thresholds are ours, the paper leaves them
open. Epsilons are ranked as they are guaranteed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fairpate.evaluation.frontier import Objective, Point, guaranteed

Setting = Literal["fair", "private", "accurate"]
Threshold = Literal["coverage", "accuracy", "degenerate", "definition"]
FIRST: Mapping[Setting, Objective] = {"fair": "disparity", "private": "epsilon", "accurate": "error"}
THEN: tuple[Objective, ...] = ("error", "disparity", "epsilon", "refused")
"""What decides among configurations that are level, in this order."""
_ROUNDING = 1e-9


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
    # Rounded: means that differ by the order of their sum are equal, and the next objective decides.
    return min(level, key=lambda point: [round(point.value(name), 9) for name in THEN])


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
