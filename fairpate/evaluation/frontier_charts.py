"""What the frontier's charts share: shapes, colours and axes, and the data that the page's script draws from.

A shape belongs to a method, filled or hollow (hollow: its epsilon depends on private votes), so charts can be read
without colour. Hue is coverage, in cividis: readable with any colour vision, and in grey because its lightness is
monotone. Size is accuracy. Epsilon is drawn on a logarithmic axis, on which infinity has a place of its own.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fairpate.evaluation.frontier import (
    OBJECTIVES,
    Objective,
    Panel,
    Point,
    PrivacyClass,
    by_panel,
    by_series,
    defined,
    frontier,
)
from fairpate.evaluation.hypervolume import attainment_surface, sets_by_seed
from fairpate.evaluation.page import decimal, delta_text, epsilon_text, percent
from fairpate.fairness.notions import DEFAULT, NOTIONS, NotionName
from fairpate.strict_json import strict

CIVIDIS = ("#00224e", "#1f386d", "#434e6c", "#61646f", "#7d7c78", "#9b9476", "#bcae6c", "#dfcb5d", "#fee838")
OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8a6d00", "#000000", "#e69f00")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SMALLEST, LARGEST = 6.0, 17.0
PAIRS: tuple[tuple[Objective, Objective], ...] = (
    ("epsilon", "error"),
    ("disparity", "error"),
    ("epsilon", "disparity"),
)
TITLES: Mapping[Objective, str] = {
    "epsilon": "privacy budget ε",
    "disparity": "disparity",
    "error": "accuracy",
    "refused": "coverage",
}
_FACTORS = (1, 2, 5)
_MOST_TICKS, _LEAST_GAP = 7, 0.08  # the gap is a share of the axis


class Shape(NamedTuple):
    """One shape in every medium: plotly's name for planes, characters for space, matplotlib's marker, an SVG path."""

    plotly: str
    filled: str
    hollow: str
    matplotlib: str | tuple[int, Literal[0, 1, 2], int]
    path: str


SHAPES = (
    Shape("circle", "●", "○", "o", "M8 2.4a5.6 5.6 0 1 0 .01 0z"),
    Shape("square", "■", "□", "s", "M3 3h10v10H3z"),
    Shape("diamond", "◆", "◇", "D", "M8 1l7 7-7 7-7-7z"),
    Shape("triangle-up", "▲", "△", "^", "M8 2l6.6 11.4H1.4z"),
    Shape("triangle-down", "▼", "▽", "v", "M8 14L1.4 2.6h13.2z"),
    Shape("star", "★", "☆", "*", "M8 1l2.1 4.8 5.2.5-3.9 3.4 1.1 5.1L8 12.1l-4.5 2.7 1.1-5.1L.7 6.3l5.2-.5z"),
    Shape("cross", "✚", "✛", "P", "M6 2h4v4h4v4h-4v4H6v-4H2V6h4z"),
    Shape("x", "✖", "✕", "X", "M4.5 2L8 5.5 11.5 2 14 4.5 10.5 8l3.5 3.5-2.5 2.5L8 10.5 4.5 14 2 11.5 5.5 8 2 4.5z"),
    Shape("hexagon", "⬢", "⬡", "h", "M8 1.5l5.7 3.2v6.6L8 14.5l-5.7-3.2V4.7z"),
    Shape("pentagon", "⬟", "⬠", "p", "M8 1.5l6.6 4.8-2.5 7.8H3.9L1.4 6.3z"),
    Shape("triangle-right", "▶", "▷", ">", "M14 8L2.6 14.6V1.4z"),
    Shape("triangle-left", "◀", "◁", "<", "M2 8l11.4-6.6v13.2z"),
    Shape("diamond-tall", "♦", "♢", "d", "M8 .8l4.4 7.2L8 15.2 3.6 8z"),
    Shape("hexagram", "✶", "✡", (6, 1, 0), "M8 1l2 3.5h4L12 8l2 3.5h-4L8 15l-2-3.5H2L4 8 2 4.5h4z"),
    Shape("star-diamond", "✦", "✧", (4, 1, 0), "M8 .5l2 5.5 5.5 2-5.5 2-2 5.5-2-5.5L.5 8 6 6z"),
    Shape("hexagon2", "⬣", "⎔", "H", "M1.5 8l3.2-5.7h6.6L14.5 8l-3.2 5.7H4.7z"),
    Shape("octagon", "⯃", "⯄", "8", "M5.2 1.5h5.6l3.7 3.7v5.6l-3.7 3.7H5.2l-3.7-3.7V5.2z"),
    Shape("star-square", "✴", "✳", (4, 1, 45), "M2 2l6 3.2L14 2l-3.2 6L14 14l-6-3.2L2 14l3.2-6z"),
)


@dataclass(frozen=True, kw_only=True)
class Look:
    """How one series is drawn, on every panel the same."""

    series: str
    shape: Shape
    hollow: bool
    color: str
    dash: str


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


def titles(notion: NotionName) -> dict[Objective, str]:
    """What each objective is called where disparity is that of ``notion``."""
    return {**TITLES, "disparity": NOTIONS[notion].measure}


def epsilon_axis(points: Sequence[Point]) -> EpsilonAxis:
    """The axis that shows every defined epsilon of ``points``."""
    values = {value for point in points if not math.isnan(value := point.value("epsilon"))}
    finite = sorted(value for value in values if 0 < value < math.inf)
    logs = [math.log10(value) for value in finite] or [0.0]
    low, high = min(logs), max(logs)
    middle, half = (low + high) / 2, max((high - low) / 2, 0.2)
    return EpsilonAxis(
        low=middle - half,
        high=middle + half,
        values=tuple(finite),
        has_zero=0.0 in values,
        has_infinity=math.inf in values,
    )


def looks(points: Sequence[Point]) -> dict[str, Look]:
    """A look for each series: the shape and colour belong to the method, hollow says data-dependent."""
    methods = sorted({point.method for point in points})
    rank = {method: index for index, method in enumerate(methods)}
    return {
        point.series: Look(
            series=point.series,
            shape=SHAPES[rank[point.method] % len(SHAPES)],
            hollow=point.epsilon_is_data_dependent,
            color=OKABE_ITO[rank[point.method] % len(OKABE_ITO)],
            dash=DASHES[rank[point.method] % len(DASHES)],
        )
        for point in sorted(points, key=lambda point: point.series)
    }


def class_label(privacy: PrivacyClass) -> str:
    """A privacy class in words."""
    return f"per {privacy.unit}, {privacy.relation}, δ = {delta_text(privacy.delta)}"


def accuracy_range(points: Sequence[Point]) -> tuple[float, float]:
    """Least and largest accuracy; (0, 1) where none is defined."""
    values = [1 - error for point in points if not math.isnan(error := point.value("error"))]
    return (min(values), max(values)) if values else (0.0, 1.0)


def size_of(accuracy: float, between: tuple[float, float]) -> float:
    """Diameter in pixels of a mark: its area grows with accuracy."""
    low, high = between
    share = (accuracy - low) / (high - low) if high > low else 1.0
    return math.sqrt(SMALLEST**2 + share * (LARGEST**2 - SMALLEST**2))


def coverage_range(points: Sequence[Point]) -> tuple[float, float]:
    """From a round number below the least coverage to 1: the range of the colours."""
    values = [1 - refused for point in points if not math.isnan(refused := point.value("refused"))]
    return min(math.floor(10 * min(values, default=0.9) + 1e-9) / 10, 0.9), 1.0


def on_frontier(points: Sequence[Point]) -> set[int]:
    """``id`` of every point that no other point of its panel dominates in the four objectives.

    An epsilon that depends on private votes is a weaker claim, so such a point never strikes out one that may be
    published: those are judged among themselves.
    """
    members = set()
    for found in by_panel(points).values():
        published = [point for point in found if not point.epsilon_is_data_dependent]
        members |= {id(point) for point in frontier(published).members}
        members |= {id(point) for point in frontier(found).members if point.epsilon_is_data_dependent}
    return members


def shared_settings(points: Sequence[Point]) -> dict[str, Any]:
    """Settings that all the points have in common."""
    first = points[0].settings
    names = [name for name in first if all(name in p.settings and p.settings[name] == first[name] for p in points)]
    return {name: first[name] for name in names}


def script_data(points: Sequence[Point], *, notions: Sequence[NotionName] = ()) -> dict[str, Any]:
    """Everything that the page's script draws, as values of strict JSON.

    ``points[i]`` is ``points[i]`` here: buttons on the page refer to it by that index. ``notions`` holds what another
    choice of the disparity changes.
    """
    series = looks(points)
    names = list(series)
    shared = {name: shared_settings(found) for name, found in by_series(points).items()}
    members = on_frontier(points)
    panels = by_panel(points)
    index_of = {id(point): index for index, point in enumerate(points)}
    data = {
        "points": [_plain_point(point, names, shared, id(point) in members) for point in points],
        "series": [_plain_look(look, shared[look.series]) for look in series.values()],
        "panels": [_plain_panel(panel, found, index_of, names) for panel, found in panels.items()],
        "coverage": coverage_range(points),
        "cividis": CIVIDIS,
        "titles": [*titles(points[0].notion if points else DEFAULT).values()],
        "notions": [_plain_notion([point.seen_by(notion) for point in points], notion, names) for notion in notions],
    }
    plain: dict[str, Any] = strict(data)
    return plain


def _plain_notion(points: Sequence[Point], notion: NotionName, names: Sequence[str]) -> dict[str, Any]:
    """Of every point disparity, its words, whether it is on the frontier and undefined; and what panels draw."""
    members = on_frontier(points)
    index_of = {id(point): index for index, point in enumerate(points)}
    return {
        "measure": NOTIONS[notion].measure,
        "points": [
            [round(point.value("disparity"), 5), with_spread(point)[0], id(point) in members, point.num_undefined]
            for point in points
        ],
        "panels": [_drawn_points(found, index_of, names) for found in by_panel(points).values()],
    }


def _plain_point(
    point: Point, names: Sequence[str], shared: Mapping[str, Mapping[str, Any]], is_member: bool
) -> dict[str, Any]:
    epsilon, disparity, error, refused = point.mean_O.tolist()
    common = shared[point.series]
    return {
        "series": names.index(point.series),
        "data": point.panel.data,
        "privacy": class_label(point.panel.privacy),
        "values": [round(value, 5) for value in (epsilon, disparity, 1 - error, 1 - refused)],
        "words": [
            f"{epsilon_text(epsilon)}{' †' if point.epsilon_is_data_dependent else ''}",
            *with_spread(point),
        ],
        "front": is_member,
        "undefined": point.num_undefined,
        "seeds": point.seeds,
        "remarks": point.remarks,
        "degenerate": point.degenerate,
        "settings": {name: _words(value) for name, value in point.settings.items() if name not in common},
        "commands": point.commands if any(point.commands) else [],
    }


def with_spread(point: Point) -> list[str]:
    """Disparity, accuracy and coverage in words: mean ± standard deviation over seeds."""
    _, disparity, error, refused = point.mean_O.tolist()
    _, *spreads = point.spread_O.tolist()
    gap = "" if math.isnan(spreads[0]) else f" ± {decimal(spreads[0])}"
    shares = [
        percent(1 - value) + ("" if math.isnan(spread) else f" ± {100 * spread:.1f}")
        for value, spread in zip((error, refused), spreads[1:], strict=True)
    ]
    return [decimal(disparity) + gap, *shares]


def _plain_look(look: Look, common: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": look.series,
        "symbol": look.shape.plotly + ("-open" if look.hollow else ""),
        "glyph": look.shape.hollow if look.hollow else look.shape.filled,
        "color": look.color,
        "dash": look.dash,
        "shared": {name: _words(value) for name, value in common.items()},
    }


def _plain_panel(
    panel: Panel, points: Sequence[Point], index_of: Mapping[int, int], names: Sequence[str]
) -> dict[str, Any]:
    axis = epsilon_axis(points)
    return {
        "data": panel.data,
        "privacy": class_label(panel.privacy),
        "ticks": axis.ticks,
        "range": axis.range,
        **_drawn_points(points, index_of, names),
    }


def _drawn_points(points: Sequence[Point], index_of: Mapping[int, int], names: Sequence[str]) -> dict[str, Any]:
    """What the charts of one panel show, of the points with everything defined."""
    axis, between = epsilon_axis(points), accuracy_range(points)
    complete, _ = defined(points, OBJECTIVES)
    return {
        "points": [index_of[id(point)] for point in complete],
        "positions": [round(axis.position(point.value("epsilon")), 4) for point in complete],
        "sizes": [round(size_of(1 - point.value("error"), between), 2) for point in complete],
        "attainment": [_plain_attainment(points, pair, axis, names) for pair in PAIRS],
    }


def _plain_attainment(
    points: Sequence[Point], pair: tuple[Objective, Objective], axis: EpsilonAxis, names: Sequence[str]
) -> list[dict[str, Any]]:
    return [
        {"series": names.index(series), "best": best, "median": median, "worst": worst}
        for series, found in by_series(points).items()
        for best, median, worst in [attainment(found, pair, axis)]
    ]


def attainment(
    points: Sequence[Point], pair: tuple[Objective, Objective], axis: EpsilonAxis
) -> list[list[list[float]]]:
    """Staircases of one series as drawn: attained by the best seed, by at least half of them, by all of them."""
    sets = sets_by_seed(points, pair)
    numbers = (1, math.ceil(len(sets) / 2), len(sets))
    surfaces = [attainment_surface(sets, num_seeds=number) for number in numbers]
    return [[[_drawn(pair[0], x, axis), _drawn(pair[1], y, axis)] for x, y in surface.tolist()] for surface in surfaces]


def _drawn(objective: Objective, value: float, axis: EpsilonAxis) -> float:
    if objective == "epsilon":
        return round(axis.position(value), 4)
    return round(1 - value if objective in ("error", "refused") else value, 5)


def _words(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
