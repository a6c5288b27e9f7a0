"""How often some point of one series of a panel beats those of another, pair by pair.

Shapes: N points of the winner, M of the loser, O objectives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fairpate.evaluation.frontier import OBJECTIVES, Point, by_series, defined, guaranteed, require_one_panel


@dataclass(frozen=True, kw_only=True)
class Dominance:
    """How many points of ``loser`` some point of ``winner`` dominates, and at which epsilons of the loser."""

    winner: str
    loser: str
    num_dominated: int
    num_points: int
    epsilons: tuple[float, ...]

    @property
    def share(self) -> float:
        """Share of the loser's points; NaN where it has none."""
        return self.num_dominated / self.num_points if self.num_points else math.nan


def dominance(points: Sequence[Point]) -> list[Dominance]:
    """For each ordered pair of series in one panel: what of the second some point of the first dominates."""
    require_one_panel(points)
    series = by_series(defined(points, OBJECTIVES)[0])
    return [_dominance(winner, loser, series) for winner in series for loser in series if winner != loser]


def _dominance(winner: str, loser: str, series: Mapping[str, Sequence[Point]]) -> Dominance:
    better_NO, worse_MO = guaranteed(series[winner], OBJECTIVES), guaranteed(series[loser], OBJECTIVES)
    nowhere_worse = (better_NO[:, None] <= worse_MO).all(axis=-1)
    somewhere_better = (better_NO[:, None] < worse_MO).any(axis=-1)
    beaten_M = np.any(nowhere_worse & somewhere_better, axis=0)
    return Dominance(
        winner=winner,
        loser=loser,
        num_dominated=int(beaten_M.sum()),
        num_points=len(worse_MO),
        epsilons=tuple(
            sorted({point.value("epsilon") for point, beaten in zip(series[loser], beaten_M, strict=True) if beaten})
        ),
    )
