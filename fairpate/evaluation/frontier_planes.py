"""Where points are drawn: axes, sizes, what moves apart, and what is joined along epsilon.

A point has four drawn coordinates: the position of its epsilon on a logarithmic axis, disparity, accuracy, coverage.
Size is coverage, by area. Marks that would cover each other move apart along the horizontal axis, by at most
``MOST_SHIFT`` thousandths of its length and always the same way; nothing is drawn at random.

Shapes: N points, 4 drawn coordinates.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fairpate.evaluation.frontier import Point, by_series, rounded_up

FloatArray = npt.NDArray[np.float64]

SMALLEST, LARGEST = 5.0, 14.0
EPSILON, DISPARITY, ACCURACY, COVERAGE = range(4)
PLANES = (
    (EPSILON, ACCURACY),
    (DISPARITY, ACCURACY),
    (EPSILON, COVERAGE),
    (EPSILON, DISPARITY),
    (COVERAGE, ACCURACY),
)
"""Pairs of drawn coordinates that a plane may show: across, up."""
MOST_SHIFT = 20
_STEP, _CELL = 14, 10  # thousandths of an axis
_LEVEL_WIDTH = 0.05
_FACTORS = (1, 2, 5)
_MOST_TICKS, _LEAST_GAP = 7, 0.08  # the gap is a share of the axis
_MARGIN, _LEAST_LENGTH = 0.06, 0.1  # room beyond the outermost points, as a share of the axis, and its least length


@dataclass(frozen=True, kw_only=True)
class EpsilonAxis:
    """Decimal logarithms of epsilon. Zero stands left of the least, infinity right of the largest.

    ``values`` are the epsilons to mark where they are few and apart; else the ticks are round numbers.
    """

    low: float
    high: float
    values: tuple[float, ...] = ()
    has_zero: bool
    has_infinity: bool

    def position(self, epsilon: float) -> float:
        """Where ``epsilon`` is drawn."""
        if epsilon <= 0:
            return self.low - 0.25
        return self.high + 0.25 if math.isinf(epsilon) else math.log10(epsilon)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Positions and labels."""
        zero = [(self.position(0), "0")] if self.has_zero else []
        ticks = [(math.log10(value), f"{value:g}") for value in self._own_values() or self._round_values()]
        return [*zero, *ticks, *([(self.position(math.inf), "∞")] if self.has_infinity else [])]

    def _own_values(self) -> list[float]:
        """``values`` to two digits, or nothing if their labels would be many or touch."""
        room = _LEAST_GAP * (self.high - self.low)
        values = sorted({float(f"{value:.2g}") for value in self.values})
        apart = all(math.log10(right / left) >= room for left, right in itertools.pairwise(values))
        return values if apart and len(values) <= _MOST_TICKS else []

    def _round_values(self) -> list[float]:
        factors = _FACTORS if self.high - self.low < 3 else (1,)
        powers = range(math.floor(self.low) - 1, math.ceil(self.high) + 1)
        values = [factor * 10.0**power for power in powers for factor in factors]
        return [value for value in values if self.low - 1e-9 <= math.log10(value) <= self.high + 1e-9]

    @property
    def range(self) -> tuple[float, float]:
        """What the axis shows."""
        return self.position(0) - 0.1 if self.has_zero else self.low - 0.12, (
            self.position(math.inf) + 0.12 if self.has_infinity else self.high + 0.12
        )


def epsilon_axis(points: Sequence[Point]) -> EpsilonAxis:
    """The axis that shows every defined epsilon of ``points``."""
    levels = epsilon_levels(points)
    finite = [value for value in levels if 0 < value < math.inf]
    logs = [math.log10(value) for point in points if 0 < (value := point.value("epsilon")) < math.inf] or [0.0]
    low, high = min(logs), max(logs)
    middle, half = (low + high) / 2, max((high - low) / 2, 0.2)
    return EpsilonAxis(
        low=middle - half,
        high=middle + half,
        values=tuple(finite),
        has_zero=0.0 in levels,
        has_infinity=math.inf in levels,
    )


def epsilon_levels(points: Sequence[Point]) -> tuple[float, ...]:
    """The epsilons of ``points``, as guaranteed, ascending; of those within 5 % of a larger one only that.

    Noise that is calibrated to 1 costs a little less, by method; these are one level.
    """
    values = {rounded_up(epsilon) for point in points if not math.isnan(epsilon := point.value("epsilon"))}
    levels: list[float] = []
    for value in sorted(values, reverse=True):
        if not levels or value < levels[-1] * (1 - _LEVEL_WIDTH):
            levels.append(value)
    return tuple(reversed(levels))


def middle_level(points: Sequence[Point]) -> int:
    """The number of the level in the middle of the finite ones, the lower of two; where slices and sentences begin."""
    return max((sum(map(math.isfinite, epsilon_levels(points))) - 1) // 2, 0)


def level_of(point: Point, levels: Sequence[float]) -> int:
    """The number of the level that an epsilon belongs to."""
    # A level is the largest epsilon in it: the first that is no smaller is the one.
    return bisect_left(levels, rounded_up(point.value("epsilon")))


def joined(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Of each series its most accurate configuration at each level of epsilon; none that is degenerate or undefined.

    A series with one level alone has nothing to join.
    """
    levels = epsilon_levels(points)
    sound = [point for point in points if not point.degenerate and not point.num_undefined]
    found = {
        series: [min(same, key=lambda point: point.value("error")) for same in _by_level(own, levels)]
        for series, own in by_series(sound).items()
    }
    return {series: line for series, line in found.items() if len(line) > 1}


def _by_level(points: Sequence[Point], levels: Sequence[float]) -> list[list[Point]]:
    parts: dict[int, list[Point]] = {}
    for point in points:
        parts.setdefault(level_of(point, levels), []).append(point)
    return [parts[number] for number in sorted(parts)]


def coordinates(points: Sequence[Point], axis: EpsilonAxis) -> FloatArray:
    """The drawn coordinates (N, 4)."""
    rows = [
        (
            axis.position(point.value("epsilon")),
            point.value("disparity"),
            1 - point.value("error"),
            1 - point.value("refused"),
        )
        for point in points
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def extents(drawn_N4: FloatArray, axis: EpsilonAxis) -> list[tuple[float, float]]:
    """From where to where each drawn coordinate's axis reaches; of disparity always from 0."""
    if not len(drawn_N4):
        return [axis.range, (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)]
    ends = [axis.range]
    for coordinate in (DISPARITY, ACCURACY, COVERAGE):
        values_N = drawn_N4[:, coordinate]
        low, high = (0.0 if coordinate == DISPARITY else float(values_N.min())), float(values_N.max())
        room = _MARGIN * max(high - low, _LEAST_LENGTH)
        ends.append((low - room, high + room))
    return ends


def shifts(drawn_N4: FloatArray, ends: Sequence[tuple[float, float]], plane: tuple[int, int]) -> list[int]:
    """How far each mark moves along the horizontal axis of a plane, in thousandths of its length.

    Marks of one cell, as large as a small mark, stand side by side in the order of points.
    """
    cells_N2 = [
        np.round(1000 / _CELL * (drawn_N4[:, coordinate] - ends[coordinate][0]) / np.diff(ends[coordinate]))
        for coordinate in plane
    ]
    members: dict[tuple[float, float], list[int]] = {}
    for index, cell in enumerate(zip(*(column.tolist() for column in cells_N2), strict=True)):
        members.setdefault(cell, []).append(index)
    moved = [0] * len(drawn_N4)
    for indices in members.values():
        step = min(_STEP, 2 * MOST_SHIFT / max(len(indices) - 1, 1))
        for rank, index in enumerate(indices):
            moved[index] = round((rank - (len(indices) - 1) / 2) * step)
    return moved


def size_of(coverage: float, between: tuple[float, float]) -> float:
    """Diameter in pixels of a mark: its area grows with coverage."""
    low, high = between
    share = min(max((coverage - low) / (high - low), 0.0), 1.0) if high > low else 1.0
    return math.sqrt(SMALLEST**2 + share * (LARGEST**2 - SMALLEST**2))


def coverage_range(points: Sequence[Point]) -> tuple[float, float]:
    """From a round number below the least coverage, at most .5, to 1: the range of the sizes."""
    values = [1 - refused for point in points if not math.isnan(refused := point.value("refused"))]
    return min(math.floor(10 * min(values, default=0.5) + 1e-9) / 10, 0.5), 1.0
