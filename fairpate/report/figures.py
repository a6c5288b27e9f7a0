"""Charts of a comparison, for the page and as vector figures for a paper.

How a method looks, on every page and picture the same: shape by family, colour and dash within the family.

Seven colours are told apart by every kind of colour vision (least CIE76 distance above 25 under normal, protan, deutan
and tritan vision, on light and on dark ground), and no family has more methods; a hollow mark says that its epsilon
depends on private votes. Methods of other packages share a family of their own.

Where points are drawn: axes, sizes, what moves apart, and what is joined along epsilon.

A point has four drawn coordinates: the position of its epsilon on a logarithmic axis, disparity, accuracy, coverage.
Size is coverage, by area. Marks that would cover each other move apart along the horizontal axis, by at most
``MOST_SHIFT`` thousandths of its length and always the same way; nothing is drawn at random.

Shapes: N points, 4 drawn coordinates.

What the frontier's charts share: who is on a frontier, words for numbers, and what the page's script draws.

How pictures for paper look, whatever they show: width, size of text, formats.

The frontier's charts as pictures for paper: the same points, shapes, colours and places as the page, by matplotlib.

One file per data set, privacy class and kind of chart; epsilons of different classes share no picture. Pictures are as
wide as one or two columns of a journal, and all their text has its font size. Fonts are embedded in PDF as TrueType, as
journals ask; in SVG, letters are outlines.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import textwrap
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fairpate.config_reader import settings_read, shared_settings
from fairpate.fairness.rates import DEFAULT, NOTIONS
from fairpate.later import matplotlib
from fairpate.report.frontier import (
    OBJECTIVES,
    Objective,
    Panel,
    Point,
    PrivacyClass,
    attainment_surface,
    by_panel,
    by_series,
    defined,
    frontier,
    rounded_up,
    sets_by_seed,
)
from fairpate.report.page import decimal, epsilon_text, percent
from fairpate.types import NotionName, strict
from fairpate.words import delta_text

COLOURS = ("#2b4eff", "#b3181c", "#f28e2b", "#4fa37c", "#7b1fa2", "#b99ae0", "#18212b")
"""On light ground: pages by day, and paper."""
DARK_COLOURS = ("#5cb8ff", "#f55c00", "#ffc185", "#31724b", "#9d4394", "#8d33ff", "#e8ecf0")
"""The same places on dark ground."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "2px,2px,8px,2px")


class Shape(NamedTuple):
    """One shape in every medium: plotly's name, matplotlib's marker, an SVG path in a box of 16."""

    plotly: str
    matplotlib: str | tuple[int, Literal[0, 1, 2], int]
    path: str


SHAPES = (
    Shape("circle", "o", "M8 2.4a5.6 5.6 0 1 0 .01 0z"),
    Shape("square", "s", "M3 3h10v10H3z"),
    Shape("diamond", "D", "M8 1l7 7-7 7-7-7z"),
    Shape("triangle-up", "^", "M8 2l6.6 11.4H1.4z"),
    Shape("triangle-down", "v", "M8 14L1.4 2.6h13.2z"),
    Shape("star", "*", "M8 1l2.1 4.8 5.2.5-3.9 3.4 1.1 5.1L8 12.1l-4.5 2.7 1.1-5.1L.7 6.3l5.2-.5z"),
    Shape("cross", "P", "M6 2h4v4h4v4h-4v4H6v-4H2V6h4z"),
    Shape("x", "X", "M4.5 2L8 5.5 11.5 2 14 4.5 10.5 8l3.5 3.5-2.5 2.5L8 10.5 4.5 14 2 11.5 5.5 8 2 4.5z"),
    Shape("hexagon", "h", "M8 1.5l5.7 3.2v6.6L8 14.5l-5.7-3.2V4.7z"),
    Shape("pentagon", "p", "M8 1.5l6.6 4.8-2.5 7.8H3.9L1.4 6.3z"),
    Shape("triangle-right", ">", "M14 8L2.6 14.6V1.4z"),
    Shape("triangle-left", "<", "M2 8l11.4-6.6v13.2z"),
    Shape("diamond-tall", "d", "M8 .8l4.4 7.2L8 15.2 3.6 8z"),
    Shape("hexagram", (6, 1, 0), "M8 1l2 3.5h4L12 8l2 3.5h-4L8 15l-2-3.5H2L4 8 2 4.5h4z"),
    Shape("star-diamond", (4, 1, 0), "M8 .5l2 5.5 5.5 2-5.5 2-2 5.5-2-5.5L.5 8 6 6z"),
    Shape("hexagon2", "H", "M1.5 8l3.2-5.7h6.6L14.5 8l-3.2 5.7H4.7z"),
    Shape("octagon", "8", "M5.2 1.5h5.6l3.7 3.7v5.6l-3.7 3.7H5.2l-3.7-3.7V5.2z"),
    Shape("star-square", (4, 1, 45), "M2 2l6 3.2L14 2l-3.2 6L14 14l-6-3.2L2 14l3.2-6z"),
)
_SHAPE_OF = {shape.plotly: shape for shape in SHAPES}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Methods of one kind, which share a shape; each with the place of its colour."""

    title: str
    shape: Shape
    methods: Mapping[str, int]


FAMILIES = (
    Family(
        title="PATE family",
        shape=_SHAPE_OF["circle"],
        methods={"fairpate": 0, "pate": 4, "pate_s_pre": 5, "pate_s_in": 3, "sf_pate": 1, "own_votes": 6},
    ),
    Family(
        title="Records vote",
        shape=_SHAPE_OF["diamond"],
        methods={"weighted_votes": 3, "record_votes": 5, "private_knn": 1},
    ),
    Family(
        title="DP-SGD family",
        shape=_SHAPE_OF["square"],
        methods={"dp_sgd": 2, "fair_dp_sgd": 1, "dp_fermi": 5, "raco_dp": 3, "pf_ld": 4, "f_ld": 0, "sgd": 6},
    ),
    Family(
        title="Noisy rates and labels",
        shape=_SHAPE_OF["cross"],
        methods={"dp_postprocessing": 4, "dp_oracle_learner": 2, "randomised_response": 0},
    ),
    Family(title="Constrained regression", shape=_SHAPE_OF["x"], methods={"covariance_constraint": 0}),
)
_OTHERS = "Other packages"
# A second shape only where another package brings more methods than there are colours.
_OTHER_SHAPES = tuple(_SHAPE_OF[name] for name in ("star", "triangle-up", "triangle-down", "pentagon", "hexagon"))


@dataclass(frozen=True, kw_only=True)
class Look:
    """How one series is drawn; ``place`` is that of its colour among ``COLOURS``, and of its dash."""

    series: str
    family: str
    shape: Shape
    hollow: bool
    place: int

    @property
    def color(self) -> str:
        """On light ground."""
        return COLOURS[self.place]

    @property
    def dash(self) -> str:
        """Of lines, by plotly's name."""
        return DASHES[self.place]

    @property
    def symbol(self) -> str:
        """Plotly's name of the mark in a plane."""
        return self.shape.plotly + ("-open" if self.hollow else "")


def looks(points: Sequence[Point]) -> dict[str, Look]:
    """A look for each series, ordered by family. Only that of other packages' methods depends on what else is there."""
    methods = {point.series: point.method for point in points}
    placed = _placed(set(methods.values()))
    order = {method: rank for rank, method in enumerate(placed)}
    return {
        series: Look(series=series, family=family, shape=shape, hollow=series != methods[series], place=place)
        for series in sorted(methods, key=lambda series: (order[methods[series]], series))
        for family, shape, place in [placed[methods[series]]]
    }


def by_family(found: Iterable[Look]) -> dict[str, list[Look]]:
    """Looks under the title of their family."""
    families: dict[str, list[Look]] = {}
    for look in found:
        families.setdefault(look.family, []).append(look)
    return families


def _placed(methods: set[str]) -> dict[str, tuple[str, Shape, int]]:
    """Family, shape and place of each method, in the order of families."""
    known = {
        method: (family.title, family.shape, place) for family in FAMILIES for method, place in family.methods.items()
    }
    placed = {method: known[method] for method in known if method in methods}
    for rank, method in enumerate(sorted(methods - known.keys())):
        turn, place = divmod(rank, len(COLOURS))
        placed[method] = (_OTHERS, _OTHER_SHAPES[turn % len(_OTHER_SHAPES)], place)
    return placed


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


def titles(notion: NotionName) -> dict[Objective, str]:
    """What each objective is called where disparity is that of ``notion``."""
    return {**TITLES, "disparity": NOTIONS[notion].measure}


def class_label(privacy: PrivacyClass) -> str:
    """A privacy class in words."""
    return f"per {privacy.unit}, {privacy.relation}, δ = {delta_text(privacy.delta)}"


def sound(points: Sequence[Point]) -> list[Point]:
    """Those that are not degenerate: what is says nothing about a method, and strikes no other off a frontier."""
    return [point for point in points if not point.degenerate]


def on_frontier(points: Sequence[Point]) -> set[int]:
    """``id`` of every point that no other point of its panel dominates in the four objectives; none is degenerate.

    An epsilon that depends on private votes is a weaker claim, so such a point never strikes out one that may be
    published: those are judged among themselves.
    """
    members = set()
    for found in by_panel(sound(points)).values():
        published = [point for point in found if not point.epsilon_is_data_dependent]
        members |= {id(point) for point in frontier(published).members}
        members |= {id(point) for point in frontier(found).members if point.epsilon_is_data_dependent}
    return members


def script_data(points: Sequence[Point], *, notions: Sequence[NotionName] = ()) -> dict[str, Any]:
    """Everything that the page's script draws, as values of strict JSON.

    ``points[i]`` is ``points[i]`` here: buttons on the page refer to it by that index. ``notions`` holds what another
    choice of the disparity changes.
    """
    series = looks(points)
    names = {name: number for number, name in enumerate(series)}
    read = {id(point): settings_read(point.settings) for point in points}
    shared = {name: shared_settings([read[id(p)] for p in found]) for name, found in by_series(points).items()}
    members = on_frontier(points)
    panels = by_panel(points)
    index_of = {id(point): index for index, point in enumerate(points)}
    data = {
        "points": [
            _plain_point(point, names[point.series], _without(read[id(point)], shared[point.series]))
            | {"front": id(point) in members}
            for point in points
        ],
        "series": [_plain_look(look, shared[look.series]) for look in series.values()],
        "panels": [_plain_panel(panel, found, index_of, names) for panel, found in panels.items()],
        "planes": PLANES,
        "ink": len(COLOURS) - 1,
        "titles": [*titles(points[0].notion if points else DEFAULT).values()],
        "notions": [_plain_notion([point.seen_by(notion) for point in points], notion, names) for notion in notions],
    }
    plain: dict[str, Any] = strict(data)
    return plain


def _plain_notion(points: Sequence[Point], notion: NotionName, names: Mapping[str, int]) -> dict[str, Any]:
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


def _without(settings: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, str]:
    return {name: _words(value) for name, value in settings.items() if name not in common}


def _plain_point(point: Point, series: int, settings: Mapping[str, str]) -> dict[str, Any]:
    epsilon, disparity, error, refused = point.mean_O.tolist()
    return {
        "series": series,
        "data": point.panel.data,
        "privacy": class_label(point.panel.privacy),
        "values": [round(value, 5) for value in (epsilon, disparity, 1 - error, 1 - refused)],
        "words": [
            f"{epsilon_text(epsilon)}{' †' if point.epsilon_is_data_dependent else ''}",
            *with_spread(point),
        ],
        "undefined": point.num_undefined,
        "seeds": point.seeds,
        "remarks": point.remarks,
        "degenerate": point.degenerate,
        "cautions": point.cautions,
        "settings": settings,
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
        "symbol": look.symbol,
        "path": look.shape.path,
        "hollow": look.hollow,
        "place": look.place,
        "dash": look.dash,
        "shared": _without(common, {}),
    }


def _plain_panel(
    panel: Panel, points: Sequence[Point], index_of: Mapping[int, int], names: Mapping[str, int]
) -> dict[str, Any]:
    return {
        "data": panel.data,
        "privacy": class_label(panel.privacy),
        "ticks": epsilon_axis(points).ticks,
        **_drawn_points(points, index_of, names),
    }


def _drawn_points(points: Sequence[Point], index_of: Mapping[int, int], names: Mapping[str, int]) -> dict[str, Any]:
    """What the charts of one panel show, of the points with everything defined; ``lines`` by rank among them."""
    axis, levels, between = epsilon_axis(points), epsilon_levels(points), coverage_range(points)
    complete, _ = defined(points, OBJECTIVES)
    drawn_N4 = coordinates(complete, axis)
    ends = extents(drawn_N4, axis)
    rank_of = {id(point): rank for rank, point in enumerate(complete)}
    return {
        "points": [index_of[id(point)] for point in complete],
        "positions": [round(position, 4) for position in drawn_N4[:, 0].tolist()],
        "levels": [level_of(point, levels) for point in complete],
        "sizes": [round(size_of(1 - point.value("refused"), between), 1) for point in complete],
        "extents": [[round(end, 5) for end in pair] for pair in ends],
        "shifts": [shifts(drawn_N4, ends, plane) for plane in PLANES],
        "lines": [[names[name], [rank_of[id(point)] for point in line]] for name, line in joined(complete).items()],
        "attainment": [_plain_attainment(sound(points), pair, axis, names) for pair in PAIRS],
    }


def _plain_attainment(
    points: Sequence[Point], pair: tuple[Objective, Objective], axis: EpsilonAxis, names: Mapping[str, int]
) -> list[dict[str, Any]]:
    return [
        {"series": names[series], "best": best, "median": median, "worst": worst}
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


FORMATS = ("pdf", "svg", "png")


WIDTHS_IN: Mapping[int, float] = {1: 3.35, 2: 7.0}
"""Inches of one column and of two (85 and 178 mm)."""


@dataclass(frozen=True, kw_only=True)
class FigureStyle:
    """How wide pictures are, how large their text, and in which formats they are written.

    ``columns``: 1 or 2; ``width_in`` None is that of so many columns. ValueError for values out of range.
    """

    columns: int = 2
    font_size: float = 8.0
    width_in: float | None = None
    formats: tuple[str, ...] = ("png", "pdf")

    def __post_init__(self) -> None:
        if self.columns not in WIDTHS_IN:
            raise ValueError(f"columns: expected 1 or 2, got {self.columns}.")
        if not 4 <= self.font_size <= 24:
            raise ValueError(f"font_size: expected 4 to 24 points, got {self.font_size:g}.")
        if self.width_in is not None and not 1 <= self.width_in <= 40:
            raise ValueError(f"width: expected 1 to 40 inches (25 to 1,000 mm), got {self.width_in:g}.")

        unknown = [name for name in self.formats if name not in FORMATS]
        if unknown:
            raise ValueError(f"format: expected {', '.join(FORMATS)}, got {unknown[0]!r}.")

    @property
    def width(self) -> float:
        """Inches."""
        return WIDTHS_IN[self.columns] if self.width_in is None else self.width_in

    @property
    def settings(self) -> dict[str, Any]:
        """Matplotlib's: one font size, embedded fonts, and the same file every time."""
        sizes = ("font.size", "axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize")
        return dict.fromkeys((*sizes, "legend.fontsize", "figure.titlesize"), self.font_size) | {
            "pdf.fonttype": 42,
            "svg.fonttype": "path",
            "svg.hashsalt": "fairpate",
            "text.parse_math": False,  # a name with dollars is no formula
            "axes.linewidth": 0.6,
            "grid.color": "#e4e7ea",
            "grid.linewidth": 0.5,
        }


_DASHES: Mapping[str, Any] = {
    "solid": "-",
    "dash": (0, (4, 2)),
    "dot": (0, (1, 1.5)),
    "dashdot": (0, (4, 1.5, 1, 1.5)),
    "longdash": (0, (8, 3)),
    "longdashdot": (0, (8, 2, 1, 2)),
    "2px,2px,8px,2px": (0, (2, 2, 8, 2)),
}
_INK, _MUTED = COLOURS[-1], "#5b6672"
_POINTS_PER_PIXEL = 0.42  # a mark on paper is smaller than on a screen
_PALE = 0.4
_LETTER = 0.56  # mean width of a letter, in font sizes
_DPI = 200


def frontier_figures(points: Sequence[Point], style: FigureStyle | None = None) -> dict[str, bytes]:
    """File names and contents: slices and attainment of each data set and privacy class, in each format."""
    style = style or FigureStyle()
    files: dict[str, bytes] = {}
    own = looks(points)
    settings: Any = style.settings
    with matplotlib.rc_context(settings):
        for place, found in _places(points).items():
            for kind, draw in _KINDS.items():
                pictures = _pictures(draw(_Panel.of(found, own), style), style)
                files |= {f"{kind}-{place}.{suffix}": content for suffix, content in pictures.items()}
    return files


def slices_picture(points: Sequence[Point]) -> bytes:
    """The slices of one panel's points, as PNG: what a notebook shows."""
    style = FigureStyle(width_in=WIDTHS_IN[2], formats=("png",))
    settings: Any = style.settings
    with matplotlib.rc_context(settings):
        return _pictures(_slices(_Panel.of(points, looks(points)), style), style)["png"]


def _pictures(figure: matplotlib.figure.Figure, style: FigureStyle) -> dict[str, bytes]:
    """A figure in each format; laid out once, not again for each file."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return {suffix: _bytes(figure, suffix) for suffix in style.formats}


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """The points of one data set and privacy class, with where they are drawn: of the complete ones (N, 4).

    ``between`` is the range of coverage that sizes show.
    """

    points: Sequence[Point]
    looks: Mapping[str, Look]
    axis: EpsilonAxis
    complete: Sequence[Point]
    drawn_N4: FloatArray
    ends: Sequence[tuple[float, float]]
    members: set[int]
    between: tuple[float, float]

    @classmethod
    def of(cls, points: Sequence[Point], own: Mapping[str, Look]) -> _Panel:
        axis = epsilon_axis(points)
        complete, _ = defined(points, OBJECTIVES)
        drawn_N4 = coordinates(complete, axis)
        return cls(
            points=points,
            looks={name: look for name, look in own.items() if name in by_series(points)},
            axis=axis,
            complete=complete,
            drawn_N4=drawn_N4,
            ends=extents(drawn_N4, axis),
            members=on_frontier(points),
            between=coverage_range(points),
        )

    def size(self, point: Point) -> float:
        """Diameter of a mark in points."""
        return _POINTS_PER_PIXEL * size_of(1 - point.value("refused"), self.between)


def _slices(panel: _Panel, style: FigureStyle) -> matplotlib.figure.Figure:
    """Accuracy over epsilon, accuracy over disparity within the middle epsilon, coverage over epsilon."""
    rows = 1 if style.columns == 2 else 3
    figure = matplotlib.figure.Figure(
        figsize=(style.width, _height(panel, style, rows, style.width / (3 if rows == 1 else 1)))
    )
    figure.set_layout_engine("constrained")
    level = middle_level(panel.points)
    budget = f"ε up to {epsilon_text(epsilon_levels(panel.points)[level])}" if panel.complete else ""
    for place, (number, title, most) in enumerate(((0, "", None), (1, budget, level), (2, "", None))):
        axes = figure.add_subplot(rows, 3 if rows == 1 else 1, place + 1)
        _plane(axes, panel, number, most)
        if title:
            axes.set_title(title, loc="left", color=_MUTED)
    crossed = "; crossed out: degenerate" if any(point.degenerate for point in panel.points) else ""
    words = f"size: coverage; pale: dominated{crossed}; lines: the most accurate at each ε"
    _caption(figure, panel, style, words)
    return figure


def _plane(axes: Any, panel: _Panel, number: int, most: int | None) -> None:
    """One plane; ``most``: only up to this level of epsilon."""
    across, up = PLANES[number]
    levels = epsilon_levels(panel.points)
    low, high = panel.ends[across]
    moved = shifts(panel.drawn_N4, panel.ends, PLANES[number])
    places = {
        id(point): (drawn_4[across] + shift / 1000 * (high - low), drawn_4[up])
        for point, drawn_4, shift in zip(panel.complete, panel.drawn_N4.tolist(), moved, strict=True)
    }
    shown = [point for point in panel.complete if most is None or level_of(point, levels) <= most]
    for name, line in joined(panel.complete).items() if across == EPSILON else ():
        look = panel.looks[name]
        xs, ys = zip(*(places[id(point)] for point in line), strict=True)
        axes.plot(xs, ys, color=look.color, linestyle=_DASHES[look.dash], linewidth=0.7, alpha=0.6, zorder=2)
    for name, found in by_series(shown).items():
        _scatter(axes, panel, found, places, panel.looks[name])
    _axis(axes.xaxis, panel, across)
    _axis(axes.yaxis, panel, up)
    axes.set(xlim=panel.ends[across], ylim=panel.ends[up])
    axes.grid()
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _scatter(
    axes: Any, panel: _Panel, points: Sequence[Point], places: Mapping[int, Sequence[float]], look: Look
) -> None:
    """The marks of one series, those on the frontier above; a cross on what is degenerate, whose gap says nothing."""
    for inside in (False, True):
        part = [point for point in points if (id(point) in panel.members) == inside]
        if part:
            axes.scatter(
                *zip(*(places[id(point)] for point in part), strict=True),
                s=[panel.size(point) ** 2 for point in part],
                zorder=4 if inside else 3,
                alpha=1.0 if inside else _PALE,
                **_mark(look),
            )
    crossed = [point for point in points if point.degenerate]
    if crossed:
        where = zip(*(places[id(point)] for point in crossed), strict=True)
        axes.scatter(*where, s=28, marker="x", color=_INK, linewidths=0.6, zorder=5)


def _mark(look: Look) -> dict[str, Any]:
    return {
        "marker": look.shape.matplotlib,
        "facecolors": "none" if look.hollow else look.color,
        "edgecolors": look.color if look.hollow else "white",
        "linewidths": 0.9 if look.hollow else 0.3,
    }


def _axis(axis: Any, panel: _Panel, coordinate: int) -> None:
    names = {**titles(panel.points[0].notion)}
    label = {EPSILON: "ε", DISPARITY: names["disparity"], ACCURACY: names["error"], COVERAGE: names["refused"]}
    axis.set_label_text(label[coordinate], color=_INK)
    axis.set_tick_params(color=_MUTED, width=0.5, length=2, pad=2)
    if coordinate == EPSILON:
        axis.set_ticks([at for at, _ in panel.axis.ticks], [words for _, words in panel.axis.ticks])
    else:
        axis.set_major_locator(matplotlib.ticker.MaxNLocator(nbins=4))
    if coordinate in (ACCURACY, COVERAGE):
        axis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")


def _attained(panel: _Panel, style: FigureStyle) -> matplotlib.figure.Figure:
    width = min(style.width, WIDTHS_IN[1])
    figure = matplotlib.figure.Figure(figsize=(width, _height(panel, style, 1, width)), layout="constrained")
    axes = figure.add_subplot()
    for name, members in by_series(sound(panel.points)).items():
        _, median, _ = attainment(members, PAIRS[0], panel.axis)
        if median:
            _stairs(axes, median, panel.looks[name])
    _axis(axes.xaxis, panel, EPSILON)
    _axis(axes.yaxis, panel, ACCURACY)
    axes.set_xlim(*panel.ends[EPSILON])
    axes.set_ylabel(TITLES["error"], color=_INK)
    axes.grid()
    axes.spines[["top", "right"]].set_visible(False)
    _caption(figure, panel, style, "reached by at least half of the seeds")
    return figure


_KINDS: Mapping[str, Callable[[_Panel, FigureStyle], matplotlib.figure.Figure]] = {
    "slices": _slices,
    "attainment": _attained,
}


def _stairs(axes: Any, corners: Sequence[Sequence[float]], look: Look) -> None:
    axes.step(
        [x for x, _ in corners],
        [y for _, y in corners],
        where="post",
        color=look.color,
        linestyle=_DASHES[look.dash],
        linewidth=1.0,
        marker=look.shape.matplotlib,
        markersize=3.5,
        markerfacecolor="none" if look.hollow else look.color,
    )


def _legend_columns(panel: _Panel, style: FigureStyle, width: float) -> int:
    """As many as the longest name allows."""
    longest = max(map(len, panel.looks), default=1)
    inches = (longest * _LETTER + 4) * style.font_size / 72
    return max(1, min(len(panel.looks), int(width / inches)))


def _height(panel: _Panel, style: FigureStyle, rows: int, plane_width: float) -> float:
    """Inches: the planes, and a line of text for each row of the legend and of the caption."""
    lines = -(-len(panel.looks) // _legend_columns(panel, style, style.width)) + 4
    return rows * max(0.78 * plane_width, 1.4) + lines * 1.6 * style.font_size / 72


def _caption(figure: matplotlib.figure.Figure, panel: _Panel, style: FigureStyle, words: str) -> None:
    """Data set, guarantee and what marks mean above; the methods below."""
    dagger = (
        "; †, hollow: ε depends on private votes, operator only" if any(x.hollow for x in panel.looks.values()) else ""
    )
    seeded = "; noise from a seed: not private" if any(point.is_seeded for point in panel.points) else ""
    where = panel.points[0].panel
    text = f"{where.data}, ε {class_label(where.privacy)}; {words}{dagger}{seeded}"
    letters = int(72 * figure.get_figwidth() / (_LETTER * style.font_size))
    figure.suptitle(textwrap.fill(text, width=letters), color=_MUTED, x=0.01, ha="left")
    handles = [_handle(look) for look in panel.looks.values()]
    columns = _legend_columns(panel, style, figure.get_figwidth())
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, frameon=False, handlelength=2.4)


def _handle(look: Look) -> matplotlib.lines.Line2D:
    return matplotlib.lines.Line2D(
        [],
        [],
        color=look.color,
        linestyle=_DASHES[look.dash],
        linewidth=0.9,
        marker=look.shape.matplotlib,
        markersize=4.5,
        markerfacecolor="none" if look.hollow else look.color,
        label=look.series,
    )


def _places(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points of each panel under a name for files; of names that read alike the later ones are numbered."""
    places: dict[str, list[Point]] = {}
    for panel, found in by_panel(points).items():
        privacy = panel.privacy
        words = f"{panel.data} {privacy.unit} {privacy.relation} {privacy.delta:g}"
        name = re.sub("[^a-z0-9]+", "-", words.lower()).strip("-")
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        places[name if name not in places else next(each for each in numbered if each not in places)] = found
    return places


def _bytes(figure: matplotlib.figure.Figure, suffix: str) -> bytes:
    buffer = io.BytesIO()
    # Without a date the same points give the same file.
    metadata: Mapping[str, dict[str, Any]] = {
        "pdf": {"CreationDate": None},
        "svg": {"Date": None},
        "png": {"Software": None},
    }
    figure.savefig(buffer, format=suffix, dpi=_DPI, metadata=metadata[suffix])
    return buffer.getvalue()
