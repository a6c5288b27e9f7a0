"""Charts of a comparison: each is drawn once, as a Vega-Lite specification.

The page embeds a specification and changes its parameters (level of epsilon, hidden methods, frontier only); a paper
gets the same specification as PDF, SVG or PNG by vl-convert, which needs neither a browser nor a network.

A method looks the same everywhere: shape by family, colour and dash within the family. Seven colours are told apart by
every kind of colour vision (least CIE76 distance above 25 under normal, protan, deutan and tritan vision, on light and
dark ground), and no family has more methods. A hollow mark has an epsilon that depends on private votes.

A point has four drawn coordinates: its epsilon on a logarithmic axis, disparity, accuracy and coverage. Size is
coverage, by area. Marks that would cover each other move apart along the horizontal axis, by at most ``MOST_SHIFT``
thousandths of its length and always in the same way; nothing is drawn at random.

Shapes: N points, 4 drawn coordinates.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import textwrap
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fairpate.config_reader import is_read, shared_settings
from fairpate.fairness.rates import DEFAULT, NOTIONS
from fairpate.report.frontier import (
    OBJECTIVES,
    Objective,
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
DASHES = ((1, 0), (4, 2), (1, 1.5), (4, 1.5, 1, 1.5), (8, 3), (8, 2, 1, 2), (2, 2, 8, 2))
"""Of lines: lengths drawn and left out, in half pixels of a page."""


class Shape(NamedTuple):
    """A mark: its name, and an SVG path in the square from -1 to 1, as Vega expects it."""

    name: str
    path: str


SHAPES = (
    Shape("circle", "M0 -.7a.7 .7 0 1 0 .001 0z"),
    Shape("square", "M-.625 -.625h1.25v1.25H-.625z"),
    Shape("diamond", "M0 -.875l.875 .875 -.875 .875 -.875 -.875z"),
    Shape("triangle-up", "M0 -.75l.825 1.425H-.825z"),
    Shape("triangle-down", "M0 .75L-.825 -.675h1.65z"),
    Shape("star", "M0-.875l.263.6 .65.062-.487.425 .138.637L0 .512l-.562.338 .138-.637L-.912-.213l.65-.062z"),
    Shape("cross", "M-.25 -.75h.5v.5h.5v.5h-.5v.5H-.25v-.5H-.75V-.25h.5z"),
    Shape(
        "x",
        "M-.44-.75L0-.31 .44-.75 .75-.44 .31 0 .75.44 .44.75 0 .31-.44.75-.75.44-.31 0-.75-.44z",
    ),
    Shape("hexagon", "M0 -.812l.713 .4v.825L0 .812l-.713 -.4V-.412z"),
    Shape("pentagon", "M0 -.812l.825 .6 -.312 .975H-.512L-.825 -.213z"),
    Shape("triangle-right", "M.75 0L-.675 .825V-.825z"),
    Shape("triangle-left", "M-.75 0l1.425 -.825v1.65z"),
    Shape("diamond-tall", "M0 -.9l.55 .9L0 .9 -.55 0z"),
    Shape("hexagram", "M0 -.875l.25 .438h.5L.5 0l.25 .438h-.5L0 .875l-.25 -.438H-.75L-.5 0 -.75 -.438h.5z"),
    Shape("star-diamond", "M0 -.938l.25 .688 .688 .25 -.688 .25 -.25 .688 -.25 -.688L-.938 0 -.25 -.25z"),
    Shape("hexagon2", "M-.812 0l.4 -.713h.825L.812 0l-.4 .713H-.412z"),
    Shape("octagon", "M-.35 -.812h.7l.463 .463v.7l-.463 .463H-.35l-.463 -.463V-.35z"),
    Shape("star-square", "M-.75 -.75l.75 .4L.75 -.75l-.4 .75L.75 .75l-.75 -.4L-.75 .75l.4 -.75z"),
)
_SHAPE_OF = {shape.name: shape for shape in SHAPES}


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
        """Colour on light ground."""
        return COLOURS[self.place]

    @property
    def dash(self) -> tuple[float, ...]:
        """Dashes of its lines."""
        return DASHES[self.place]


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
        ends.append(_with_room(low, high))
    return ends


def _with_room(low: float, high: float) -> tuple[float, float]:
    room = _MARGIN * max(high - low, _LEAST_LENGTH)
    return low - room, high + room


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
    """Everything that the page's script shows, as values of strict JSON: charts, and details of points.

    ``points[i]`` is ``points[i]`` here: buttons and marks on the page refer to it by that index. ``notions`` holds what
    another choice of the disparity changes; charts are those of the points' own notion without one.
    """
    series = looks(points)
    names = {name: number for number, name in enumerate(series)}
    read = {
        id(point): {name: value for name, value in point.settings.items() if is_read(name, value, point.settings)}
        for point in points
    }
    shared = {name: shared_settings([read[id(p)] for p in found]) for name, found in by_series(points).items()}
    members = on_frontier(points)
    seen = [[point.seen_by(notion) for point in points] for notion in notions] or [list(points)]
    data = {
        "points": [
            _plain_point(point, names[point.series], _without(read[id(point)], shared[point.series]))
            | {"front": id(point) in members}
            for point in points
        ],
        "series": [
            {
                "name": look.series,
                "path": look.shape.path,
                "hollow": look.hollow,
                "place": look.place,
                "shared": _without(shared[look.series], {}),
            }
            for look in series.values()
        ],
        "panels": [
            {"data": panel.data, "privacy": class_label(panel.privacy), "charts": charts}
            for panel, charts in _page_charts(seen, series).items()
        ],
        "config": _config(_PAGE, 12),
        "titles": [*titles(points[0].notion if points else DEFAULT).values()],
        "notions": [_plain_notion(found, notion) for found, notion in zip(seen, notions, strict=False)],
    }
    plain: dict[str, Any] = strict(data)
    return plain


def _plain_notion(points: Sequence[Point], notion: NotionName) -> dict[str, Any]:
    """Disparity of every point, its words, whether the point is on the frontier, and in how many runs undefined."""
    members = on_frontier(points)
    return {
        "measure": NOTIONS[notion].measure,
        "points": [
            [round(point.value("disparity"), 5), with_spread(point)[0], id(point) in members, point.num_undefined]
            for point in points
        ],
    }


def _page_charts(seen: Sequence[Sequence[Point]], known: Mapping[str, Look]) -> dict[Any, list[dict[str, Any]]]:
    """For each panel and notion: rows to draw, and the specifications that name them."""
    charts: dict[Any, list[dict[str, Any]]] = {}
    for points in seen:
        index_of = {id(point): index for index, point in enumerate(points)}
        for panel, found in by_panel(points).items():
            view = PanelView.of(found, known)
            stairs = {f"stairs{number}": view.stairs(pair) for number, pair in enumerate(PAIRS)}
            drawn = {
                "data": {"points": view.rows(index_of), **stairs},
                "planes": [plane(view, number, _PAGE) for number in range(len(PLANES))],
                "attained": [attained(view, pair, _PAGE) for pair in PAIRS],
            }
            charts.setdefault(panel, []).append(drawn)
    return charts


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


@dataclass(frozen=True, kw_only=True)
class PanelView:
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
    def of(cls, points: Sequence[Point], known: Mapping[str, Look]) -> PanelView:
        """The view of one panel's points; looks are those of ``known``, which may hold more series."""
        axis = epsilon_axis(points)
        complete, _ = defined(points, OBJECTIVES)
        drawn_N4 = coordinates(complete, axis)
        return cls(
            points=points,
            looks={name: look for name, look in known.items() if name in by_series(points)},
            axis=axis,
            complete=complete,
            drawn_N4=drawn_N4,
            ends=extents(drawn_N4, axis),
            members=on_frontier(points),
            between=coverage_range(points),
        )

    def rows(self, index_of: Mapping[int, int] | None = None, *, scale: float = 1.0) -> list[dict[str, Any]]:
        """A row for each complete point, those on the frontier last, so that they lie above the others.

        ``i`` index of the point, ``s`` series, ``x0`` and so on its place across in each plane, ``e``, ``d``, ``a`` and
        ``c`` its coordinates, ``l`` level of epsilon, ``z`` area (``scale`` multiplies diameters), ``f`` on the
        frontier, ``g`` degenerate, ``h`` hollow, ``j`` joined by a line.
        """
        levels = epsilon_levels(self.points)
        lines = {id(point) for line in joined(self.complete).values() for point in line}
        moved = [shifts(self.drawn_N4, self.ends, plane) for plane in PLANES]
        rows = []
        for rank, (point, drawn_4) in enumerate(zip(self.complete, self.drawn_N4.tolist(), strict=True)):
            across = {
                f"x{number}": round(
                    drawn_4[plane[0]] + moved[number][rank] / 1000 * float(np.diff(self.ends[plane[0]])[0]), 5
                )
                for number, plane in enumerate(PLANES)
            }
            rows.append(
                {
                    "i": (index_of or {}).get(id(point), rank),
                    "s": point.series,
                    **across,
                    **{name: round(value, 5) for name, value in zip(_FIELDS, drawn_4, strict=True)},
                    "l": level_of(point, levels),
                    "z": round((scale * size_of(1 - point.value("refused"), self.between)) ** 2, 1),
                    "f": id(point) in self.members,
                    "g": bool(point.degenerate),
                    "h": point.epsilon_is_data_dependent,
                    "j": id(point) in lines,
                }
            )
        return sorted(rows, key=lambda row: row["f"])

    def stairs(self, pair: tuple[Objective, Objective]) -> list[dict[str, Any]]:
        """Corners of what the seeds of each series attain: ``k`` is best, median or worst, ``o`` the order."""
        return [
            {"s": name, "k": kind, "o": order, "x": x, "y": y}
            for name, found in by_series(sound(self.points)).items()
            for kind, corners in zip(("best", "median", "worst"), attainment(found, pair, self.axis), strict=True)
            for order, (x, y) in enumerate(corners)
        ]


@dataclass(frozen=True, kw_only=True)
class _Medium:
    """How charts look on a page or on paper; a page's colours are names of its style sheet, which follow its ground."""

    places: tuple[str, ...]
    ink: str
    muted: str
    line: str
    ground: str
    scale: float
    font: str


_PAGE = _Medium(
    places=tuple(f"var(--m{place})" for place in range(len(COLOURS))),
    ink="var(--ink)",
    muted="var(--muted)",
    line="var(--line)",
    ground="var(--paper)",
    scale=1.0,
    font="system-ui, sans-serif",
)
_PAPER = _Medium(
    places=COLOURS,
    ink=COLOURS[-1],
    muted="#5b6672",
    line="#e4e7ea",
    ground="white",
    scale=0.42,  # a mark on paper is smaller than on a screen
    font="Liberation Sans, Arial, Helvetica, sans-serif",
)
_FIELDS = "edac"
_CROSS = "M-.7-.7L.7.7M.7-.7L-.7.7"
_ALL_LEVELS = 1_000_000
_PARAMETERS: Mapping[str, Any] = {"level": _ALL_LEVELS, "only": False, "hidden": [], "chosen": ""}
"""What a page changes in a chart: most level of epsilon, only the frontier, hidden series, the one with its spread."""


def plane(view: PanelView, number: int, medium: _Medium, *, level: int = _ALL_LEVELS) -> dict[str, Any]:
    """The specification of one plane, over data named ``points``; ``level``: only up to this level of epsilon."""
    across, up = PLANES[number]
    place = {
        "x": _axis(view, across, medium, field=f"x{number}"),
        "y": _axis(view, up, medium, field=_FIELDS[up]),
    }
    series = _series(view.looks, medium)
    line = {
        "transform": [{"filter": "datum.j"}],
        "mark": {"type": "line", "strokeWidth": 1.4 * medium.scale, "opacity": 0.6, "aria": False},
        "encoding": {**place, "stroke": series["stroke"], "strokeDash": series["strokeDash"], "order": {"field": "l"}},
    }
    marks = {
        "mark": {"type": "point", "tooltip": {"content": "data"}, "cursor": "pointer", "aria": False},
        "encoding": {
            **place,
            **_marks(series, medium),
            "size": {"field": "z", "type": "quantitative", "scale": None},
            "opacity": {"condition": {"test": "datum.f", "value": 1}, "value": 0.4},
        },
    }
    # A degenerate predictor is crossed out: its gap says nothing.
    crossed = {
        "transform": [{"filter": "datum.g"}],
        "mark": {
            "type": "point",
            "shape": _CROSS,
            "stroke": medium.ink,
            "strokeWidth": 1.4 * medium.scale,
            "aria": False,
        },
        "encoding": {**place, "size": {"field": "z", "type": "quantitative", "scale": None}},
    }
    shown = "datum.l <= level && (!only || datum.f) && indexof(hidden, datum.s) < 0"
    layers: list[dict[str, Any]] = [*([line] if across == EPSILON else []), marks, crossed]
    return _specification("points", shown, layers, level=level)


def attained(view: PanelView, pair: tuple[Objective, Objective], medium: _Medium) -> dict[str, Any]:
    """The specification of what half of the seeds attain, over the stairs of ``pair``."""
    coordinate: Mapping[Objective, int] = {"epsilon": EPSILON, "disparity": DISPARITY, "error": ACCURACY}
    place = {}
    for objective, channel in zip(pair, "xy", strict=True):
        # Seeds reach further than the means of configurations do.
        reached = [row[channel] for row in view.stairs(pair)] or [0.0, 1.0]
        ends = view.ends[EPSILON] if objective == "epsilon" else _with_room(min(reached), max(reached))
        place[channel] = _axis(view, coordinate[objective], medium, field=channel, ends=ends)
    series = _series(view.looks, medium)
    step: dict[str, Any] = {"type": "line", "interpolate": "step-after", "aria": False}
    lines = {**place, "stroke": series["stroke"], "order": {"field": "o"}}
    layers = [
        {
            "transform": [{"filter": "datum.k != 'median' && datum.s == chosen"}],
            "mark": {**step, "strokeWidth": 1.2, "strokeDash": [1, 2], "opacity": 0.75},
            "encoding": {**lines, "detail": {"field": "k"}},
        },
        {
            "transform": [{"filter": "datum.k == 'median'"}],
            "mark": {**step, "strokeWidth": 2 * medium.scale},
            "encoding": {**lines, "strokeDash": series["strokeDash"]},
        },
        {
            "transform": [{"filter": "datum.k == 'median'"}],
            "mark": {"type": "point", "size": 64 * medium.scale**2, "tooltip": {"content": "data"}, "aria": False},
            "encoding": {**place, **_marks(series, medium)},
        },
    ]
    return _specification(f"stairs{PAIRS.index(pair)}", "indexof(hidden, datum.s) < 0", layers)


def _specification(data: str, shown: str, layers: Sequence[Mapping[str, Any]], **values: Any) -> dict[str, Any]:
    """Layers over named data, with the parameters that a page may change."""
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "height": 270,
        "autosize": {"type": "fit", "contains": "padding"},
        "data": {"name": data},
        "params": [{"name": name, "value": values.get(name, value)} for name, value in _PARAMETERS.items()],
        "transform": [{"filter": shown}],
        "layer": list(layers),
    }


def _series(known: Mapping[str, Look], medium: _Medium) -> dict[str, dict[str, Any]]:
    """Channels that show a series."""
    names = list(known)

    def channel(values: Sequence[Any], *, has_legend: bool = True) -> dict[str, Any]:
        legend = {"title": None, "symbolOpacity": 1, "symbolDash": [1, 0]} if has_legend and medium is _PAPER else None
        scale = {"domain": names, "range": list(values)}
        return {"field": "s", "type": "nominal", "scale": scale, "legend": legend}

    colours = [medium.places[look.place] for look in known.values()]
    dashes = [[2 * medium.scale * length for length in look.dash] for look in known.values()]
    return {
        "stroke": channel(colours),
        "fill": channel(
            ["transparent" if look.hollow else ink for look, ink in zip(known.values(), colours, strict=True)]
        ),
        "shape": channel([look.shape.path for look in known.values()]),
        "strokeDash": channel(dashes, has_legend=False),
    }


def _marks(series: Mapping[str, Mapping[str, Any]], medium: _Medium) -> dict[str, Any]:
    """Marks of a series: filled with an outline of the ground's colour, or hollow."""
    width = math.sqrt(medium.scale)
    return {
        "fill": series["fill"],
        "shape": series["shape"],
        "stroke": {"condition": {"test": "!datum.h", "value": medium.ground}, **series["stroke"]},
        "strokeWidth": {"condition": {"test": "datum.h", "value": 1.6 * width}, "value": 0.6 * width},
    }


def _axis(
    view: PanelView, coordinate: int, medium: _Medium, *, field: str, ends: tuple[float, float] | None = None
) -> dict[str, Any]:
    """The channel of one drawn coordinate, over ``ends`` or over the extent of the panel's points."""
    names = titles(view.points[0].notion)
    title = ["ε" if medium is _PAPER else names["epsilon"], names["disparity"], names["error"], names["refused"]]
    axis: dict[str, Any] = {}
    if coordinate == EPSILON:
        places, words = zip(*((round(at, 4), label) for at, label in view.axis.ticks), strict=True)
        axis = {"values": places, "labelExpr": f"{json.dumps(words)}[indexof({json.dumps(places)}, datum.value)]"}
    elif coordinate != DISPARITY:
        axis = {"format": ".3~%", "tickCount": 5}
    else:
        axis = {"tickCount": 5}
    domain = [round(end, 5) for end in ends or view.ends[coordinate]]
    scale = {"domain": domain, "zero": False, "nice": False}
    return {"field": field, "type": "quantitative", "title": title[coordinate], "axis": axis, "scale": scale}


def _config(medium: _Medium, font_size: float) -> dict[str, Any]:
    """How all charts of a medium look; one size for all text."""
    thin = 0.5 if medium is _PAPER else 1.0
    text = {"labelFontSize": font_size, "titleFontSize": font_size, "labelFontWeight": "normal"}
    return {
        "font": medium.font,
        "background": None if medium is _PAGE else medium.ground,
        "padding": 4 if medium is _PAGE else 1,
        "view": {"stroke": None},
        "axis": {
            **text,
            "titleFontWeight": "normal",
            "labelColor": medium.muted,
            "titleColor": medium.muted if medium is _PAGE else medium.ink,
            "domainColor": medium.muted,
            "tickColor": medium.muted,
            "tickSize": 3,
            "gridColor": medium.line,
            "gridWidth": thin,
            "domainWidth": thin,
            "tickWidth": thin,
        },
        "legend": {**text, "labelColor": medium.ink, "labelLimit": 0, "orient": "bottom", "symbolSize": 30},
        "title": {"fontSize": font_size, "fontWeight": "normal", "color": medium.muted, "anchor": "start"},
    }


_LETTER = 0.56  # mean width of a letter, in font sizes
_DPI = 200
_POINTS_PER_INCH = 72


def frontier_figures(points: Sequence[Point], style: FigureStyle | None = None) -> dict[str, bytes]:
    """File names and contents: slices and attainment of each data set and privacy class, in each format."""
    style = style or FigureStyle()
    known = looks(points)
    files: dict[str, bytes] = {}
    for place, found in _places(points).items():
        view = PanelView.of(found, known)
        for kind, draw, widest in (("slices", _slices, math.inf), ("attainment", _attainment, WIDTHS_IN[1])):
            pictures = _pictures(view, draw(view, style), min(style.width, widest), style)
            files |= {f"{kind}-{place}.{suffix}": content for suffix, content in pictures.items()}
    return files


def slices_picture(points: Sequence[Point]) -> bytes:
    """The slices of one panel's points, as PNG: what a notebook shows."""
    style = FigureStyle(width_in=WIDTHS_IN[2], formats=("png",))
    view = PanelView.of(points, looks(points))
    return _pictures(view, _slices(view, style), style.width, style)["png"]


def _slices(view: PanelView, style: FigureStyle) -> dict[str, Any]:
    """Accuracy over epsilon, accuracy over disparity within the middle epsilon, coverage over epsilon."""
    level = middle_level(view.points)
    budget = f"ε up to {epsilon_text(epsilon_levels(view.points)[level])}" if view.complete else ""
    planes = [plane(view, 0, _PAPER), plane(view, 1, _PAPER, level=level), plane(view, 2, _PAPER)]
    planes[1]["title"] = budget
    for each in planes:
        # Parameters of a page are constants here: parts of one picture may not define them again.
        values = {parameter["name"]: parameter["value"] for parameter in each.pop("params")}
        each["transform"] = [{"filter": f"datum.l <= {values['level']}"}]
        del each["autosize"]
    crossed = "; crossed out: degenerate" if any(point.degenerate for point in view.points) else ""
    words = f"size: coverage; pale: dominated{crossed}; lines: the most accurate at each ε"
    return {
        "title": _caption(view, style, style.width, words),
        "datasets": {"points": view.rows(scale=_PAPER.scale)},
        "hconcat" if style.columns == 2 else "vconcat": planes,
        "spacing": style.font_size,
    }


def _attainment(view: PanelView, style: FigureStyle) -> dict[str, Any]:
    words = "reached by at least half of the seeds"
    spec = attained(view, PAIRS[0], _PAPER)
    del spec["autosize"]
    width = min(style.width, WIDTHS_IN[1])
    return {**spec, "title": _caption(view, style, width, words), "datasets": {"stairs0": view.stairs(PAIRS[0])}}


def _caption(view: PanelView, style: FigureStyle, width_in: float, words: str) -> list[str]:
    """Lines with the data set, the guarantee and what marks mean."""
    has_hollow = any(look.hollow for look in view.looks.values())
    dagger = "; †, hollow: ε depends on private votes, operator only" if has_hollow else ""
    seeded = "; noise from a seed: not private" if any(point.is_seeded for point in view.points) else ""
    where = view.points[0].panel
    # Fonts that are free to embed lack raised digits: 1e-05, not 10⁻⁵.
    privacy = f"per {where.privacy.unit}, {where.privacy.relation}, δ = {where.privacy.delta:g}"
    text = f"{where.data}, ε {privacy}; {words}{dagger}{seeded}"
    return textwrap.wrap(text, width=int(_POINTS_PER_INCH * width_in / (_LETTER * style.font_size)))


def _pictures(
    view: PanelView, specification: Mapping[str, Any], width_in: float, style: FigureStyle
) -> dict[str, bytes]:
    """A specification in each format, as wide as asked; a unit of the drawing is a point of paper."""
    import vl_convert

    planes = specification.get("hconcat") or specification.get("vconcat") or [specification]
    across = len(specification.get("hconcat", [0]))
    config = _config(_PAPER, style.font_size)
    longest = max(map(len, view.looks), default=1)
    width = _POINTS_PER_INCH * width_in
    config["legend"]["columns"] = max(1, int(width / ((longest * _LETTER + 4) * style.font_size)))
    # How much room labels take is known once they are drawn, so the planes are fitted in a few rounds.
    inner = width / across - 5 * style.font_size
    for _ in range(4):
        for each in planes:
            each["width"], each["height"] = round(inner, 2), round(max(0.72 * inner, 60.0), 2)
        drawing = vl_convert.vegalite_to_svg({**specification, "config": config})
        missing = width - float(_SVG_WIDTH.findall(drawing)[0][0])
        if abs(missing) < 0.3 or inner + missing / across < 40:
            break
        inner += missing / across
    make: Mapping[str, Callable[[], bytes]] = {
        "pdf": lambda: vl_convert.svg_to_pdf(drawing),
        "svg": lambda: _SVG_WIDTH.sub(r'width="\1pt" height="\2pt"', drawing, count=1).encode(),
        "png": lambda: vl_convert.svg_to_png(drawing, ppi=_DPI),
    }
    return {suffix: make[suffix]() for suffix in style.formats}


_SVG_WIDTH = re.compile(r'width="([0-9.]+)" height="([0-9.]+)"')


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
