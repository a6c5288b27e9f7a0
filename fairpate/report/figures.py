"""Charts of a comparison: each is drawn once, as a Vega-Lite specification, for the page and for a paper.

The page embeds each specification and changes its parameters (level of epsilon, hidden methods, frontier only);
:mod:`fairpate.report.paper_figures` turns the same specification into files.

A method looks the same in every chart: its family decides the shape, and within the family it has its own colour and
dash. The seven colours differ for every kind of colour vision (least CIE76 distance above 25 under normal, protan,
deutan and tritan vision, on light and dark ground), and no family has more methods. A hollow mark has an epsilon that
depends on private votes.

A point (one configuration on one data set, over its seeds) has four drawn coordinates: its epsilon on a logarithmic
axis, disparity, accuracy and coverage. The area of a mark shows coverage. Bars show one standard deviation over seeds,
for points on the frontier; dashed lines show the accuracies of baselines.

Shapes: N points, 4 drawn coordinates.
"""

import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fairpate.config import merge, read_yaml
from fairpate.fairness.rates import DEFAULT, NOTIONS
from fairpate.pages import decimal, delta_text, epsilon_text, most_often_right, percent, strength
from fairpate.report import frontier
from fairpate.report.frontier import OBJECTIVES, Objective, Panel, Point, PrivacyClass, by_panel, by_series
from fairpate.report.records import STRENGTHS, upper
from fairpate.types import FloatArray, NotionName, strict

COLOURS = ("#2b4eff", "#b3181c", "#f28e2b", "#4fa37c", "#7b1fa2", "#b99ae0", "#18212b")
"""Colours of methods on a light background: pages in the light theme, and paper."""
DARK_COLOURS = ("#5cb8ff", "#f55c00", "#ffc185", "#31724b", "#9d4394", "#8d33ff", "#e8ecf0")
"""Colours of methods on a dark background, in the same order."""
DASHES = ((1, 0), (4, 2), (1, 1.5), (4, 1.5, 1, 1.5), (8, 3), (8, 2, 1, 2), (2, 2, 8, 2))
"""Dash patterns of lines: lengths drawn and left out, in half pixels of a page."""


LOOKS = read_yaml(Path(__file__).with_name("looks.yaml"))
SHAPES: Mapping[str, str] = LOOKS["shapes"]
"""Shapes of marks by name: SVG paths in the square from -1 to 1, as Vega expects them."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of similar methods, which have the same shape of mark in charts.

    ``take_when``: words for the purpose for which the family is suitable, which complete "choose it for ...".
    """

    title: str
    shape: str
    take_when: str


FAMILIES = {name: Family(**each | {"shape": SHAPES[each["shape"]]}) for name, each in LOOKS["families"].items()}
# A second shape is used only if other packages bring more methods than there are colours.
_OTHER_SHAPES = tuple(SHAPES[name] for name in ("star", "triangle-up", "triangle-down", "pentagon", "hexagon"))


@dataclass(frozen=True, kw_only=True)
class SeriesStyle:
    """The look in charts of one series, which is the points of one method: shape, colour and dash.

    ``place``: the index of its colour in ``COLOURS`` and of its dash in ``DASHES``.
    """

    series: str
    family: str
    shape: str
    hollow: bool
    place: int


def looks(points: Sequence[Point]) -> dict[str, SeriesStyle]:
    """Return how charts draw each series (the points of one method) among ``points``, sorted by family.

    A method of this package always has the same style, by its class; methods of other packages get the remaining styles
    in alphabetical order.
    """
    methods = {point.series: point.method for point in points}
    rank_of = {name: rank for rank, name in enumerate(FAMILIES)}
    known = {point.method: (rank_of[point.look[0]], *point.look) for point in points if point.look is not None}
    placed = {
        method: (FAMILIES[family].title, FAMILIES[family].shape, place)
        for method, (_, family, place) in sorted(known.items(), key=lambda of: of[1][::2])
    }
    for rank, method in enumerate(sorted(set(methods.values()) - known.keys())):
        turn, place = divmod(rank, len(COLOURS))
        placed[method] = ("Other packages", _OTHER_SHAPES[turn % len(_OTHER_SHAPES)], place)
    order = {method: rank for rank, method in enumerate(placed)}
    return {
        series: SeriesStyle(series=series, family=family, shape=shape, hollow=series != methods[series], place=place)
        for series in sorted(methods, key=lambda series: (order[methods[series]], series))
        for family, shape, place in [placed[methods[series]]]
    }


# Diameters of marks, in pixels of a page.
SMALLEST, LARGEST = 5.0, 14.0
# In the order of the objectives, of two of which the complements are drawn.
EPSILON, DISPARITY, ACCURACY, COVERAGE = range(4)
PLANES = ((EPSILON, ACCURACY), (DISPARITY, ACCURACY), (EPSILON, COVERAGE), (EPSILON, DISPARITY), (COVERAGE, ACCURACY))
"""Pairs of drawn coordinates that a chart may show: horizontal, vertical."""
# Marks that would cover each other are moved apart by at most this, in thousandths of the horizontal axis.
MOST_SHIFT = 100
_STEP = 2  # thousandths of an axis
Side = Literal["left", "center", "right"]
# The part of the axis that the words of a line cover, with half a mark at both ends, and where their anchor is.
_THIRDS: Mapping[Side, tuple[float, float]] = {"left": (0, 0.37), "center": (0.32, 0.68), "right": (0.63, 1)}
_LABEL_X: Mapping[Side, Any] = {"left": 3, "center": {"expr": "width / 2"}, "right": "width"}
_NEAR = 0.08  # of the vertical axis: as high as the words
_ROOM = (300.0, 230.0)  # pixels of the smallest chart, across and up, on which marks must not overlap


class EpsilonAxis:
    """A logarithmic axis that shows every defined epsilon of the charted points; ``range`` are the axis's two ends as
    decimal logarithms.

    Zero is placed left of the smallest value, infinity right of the largest. ``ticks`` are pairs of position and label:
    the epsilons themselves if they are few and far enough apart, otherwise round numbers.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self.levels = epsilon_levels(points)
        logs = [math.log10(value) for point in points if 0 < (value := point.value("epsilon")) < math.inf] or [0.0]
        # At least 0.4 of a decade wide, also for a single epsilon.
        middle, half = (min(logs) + max(logs)) / 2, max((max(logs) - min(logs)) / 2, 0.2)
        self.low, self.high = middle - half, middle + half
        has_zero, has_infinity = 0.0 in self.levels, math.inf in self.levels
        self.range = (
            self.position(0) - 0.1 if has_zero else self.low - 0.12,
            self.position(math.inf) + 0.12 if has_infinity else self.high + 0.12,
        )
        # Two digits: a calibrated epsilon is a little below its target. Labels need 8 % of the axis each.
        marked = sorted({float(f"{value:.2g}") for value in self.levels if 0 < value < math.inf})
        room = 0.08 * (self.high - self.low)
        if len(marked) > 7 or any(math.log10(b / a) < room for a, b in itertools.pairwise(marked)):
            marked = []
        if not marked:
            factors = (1, 2, 5) if self.high - self.low < 3 else (1,)
            powers = range(math.floor(self.low) - 1, math.ceil(self.high) + 1)
            rounds = [factor * 10.0**power for power in powers for factor in factors]
            marked = [value for value in rounds if self.low - 1e-9 <= math.log10(value) <= self.high + 1e-9]
        self.ticks = [
            *([(self.position(0), "0")] if has_zero else []),
            *((math.log10(value), f"{value:g}") for value in marked),
            *([(self.position(math.inf), "∞")] if has_infinity else []),
        ]

    def position(self, epsilon: float) -> float:
        # The logarithm of 0 or infinity is infinite: both are placed a quarter of a decade beyond the others.
        if epsilon <= 0:
            return self.low - 0.25
        return self.high + 0.25 if math.isinf(epsilon) else math.log10(epsilon)


def epsilon_levels(points: Sequence[Point]) -> tuple[float, ...]:
    """Return the levels of epsilon among which a page's reader may choose, in ascending order: guaranteed epsilons of
    ``points``. An epsilon that is up to 5 % below a level is not a level of its own."""
    # Noise that is calibrated to 1 costs a little less, by method: these are one level.
    values = {frontier.rounded_up(epsilon) for point in points if not math.isnan(epsilon := point.value("epsilon"))}
    levels: list[float] = []
    for value in sorted(values, reverse=True):
        if not levels or value < levels[-1] * 0.95:
            levels.append(value)
    return tuple(reversed(levels))


def middle_level(points: Sequence[Point]) -> int:
    """Return the index of the level of epsilon that pages show first: the middle one of the finite levels, and of two
    middle ones the lower."""
    return max((sum(map(math.isfinite, epsilon_levels(points))) - 1) // 2, 0)


def level_of(point: Point, levels: Sequence[float]) -> int:
    """Return the index in ``levels`` of the level that the point's epsilon belongs to."""
    # A level is the largest epsilon in it, so it is the first one that is no smaller.
    return bisect_left(levels, frontier.rounded_up(point.value("epsilon")))


def joined(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return, for each series (method), the points that a chart joins by a line: the most accurate configuration at
    each level of epsilon.

    Points with undefined values and degenerate ones, whose models' gaps are meaningless, are left out. A series with
    one level has no line.
    """
    levels = epsilon_levels(points)
    lines = {}
    for series, own in by_series([point for point in sound(points) if not point.num_undefined]).items():
        best: dict[int, Point] = {}
        # By error, so that the first point at a level is the most accurate there.
        for point in sorted(own, key=lambda point: point.value("error")):
            best.setdefault(level_of(point, levels), point)
        if len(best) > 1:
            lines[series] = [best[level] for level in sorted(best)]
    return lines


def coordinates(points: Sequence[Point], axis: EpsilonAxis) -> FloatArray:
    """Return the four drawn coordinates of each point as columns (N, 4): position on the epsilon axis, disparity,
    accuracy and coverage."""
    drawn_N4 = frontier.matrix(points, OBJECTIVES)
    drawn_N4[:, EPSILON] = [axis.position(epsilon) for epsilon in drawn_N4[:, EPSILON].tolist()]
    drawn_N4[:, [ACCURACY, COVERAGE]] = 1 - drawn_N4[:, [ACCURACY, COVERAGE]]
    return drawn_N4


def extents(drawn_N4: FloatArray, axis: EpsilonAxis, accuracies: Sequence[float] = ()) -> list[tuple[float, float]]:
    """Return the ends of the axis of each of the four drawn coordinates, as pairs; the accuracy axis also includes
    ``accuracies``.

    The disparity axis always begins at 0, and no axis of a share extends beyond 0 % or 100 %.
    """
    if not len(drawn_N4):
        return [axis.range, (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)]
    low_4, high_4 = drawn_N4.min(axis=0).tolist(), drawn_N4.max(axis=0).tolist()
    # 0 means no gap: on an axis that began at the smallest gap, that gap would look like none.
    low_4[DISPARITY] = 0.0
    low_4[ACCURACY] = min(low_4[ACCURACY], *accuracies, 1.0)
    high_4[ACCURACY] = max(high_4[ACCURACY], *accuracies, 0.0)
    return [axis.range, *(_with_room(low_4[each], high_4[each]) for each in (DISPARITY, ACCURACY, COVERAGE))]


def _with_room(low: float, high: float) -> tuple[float, float]:
    """Return the ends of an axis: a little beyond the outermost values ``low`` and ``high``, and within 0 and 1."""
    room = 0.06 * max(high - low, 0.1)
    return max(low - room, 0.0), min(high + room, 1.0)


def shifts(
    drawn_N4: FloatArray, ends: Sequence[tuple[float, float]], plane: tuple[int, int], diameters_N: Sequence[float]
) -> list[int]:
    """Return a horizontal shift for each mark of a chart, in thousandths of the axis's length, such that marks do not
    cover each other.

    ``plane``: the indices of the two drawn coordinates of the chart; ``ends``: the axis ends of all four. In the order
    of the points, each mark takes the nearest free position, without random numbers. If no position within
    ``MOST_SHIFT`` is free, it takes the one farthest from the other marks.
    """
    # Each row: a mark's horizontal and vertical position, and its diameter.
    across_up = list(plane)
    low_2, high_2 = np.array(ends)[across_up].T
    places_N2 = np.array(_ROOM) * (drawn_N4[:, across_up] - low_2) / (high_2 - low_2)
    marks_N3 = np.column_stack([places_N2, diameters_N])
    # 0 first, then alternately to the right and to the left.
    tried_T = np.array(sorted(range(-MOST_SHIFT, MOST_SHIFT + 1, _STEP), key=lambda shift: (abs(shift), -shift)))
    across_T = tried_T * _ROOM[0] / 1000
    side = LARGEST + 2 * across_T.max()  # no mark meets another that is farther
    moved = []
    for number, (x, y, diameter) in enumerate(marks_N3.tolist()):
        near_K3 = marks_N3[:number][(np.abs(marks_N3[:number, :2] - (x, y)) < side).all(axis=1)]
        best = 0
        if len(near_K3):
            distances_TK = np.hypot(x + across_T[:, None] - near_K3[:, 0], y - near_K3[:, 1])
            spare_T = (distances_TK - (near_K3[:, 2] + diameter) / 2).min(axis=1)
            # Beyond the axis a mark would show an impossible value, such as a gap below 0.
            spare_T[np.abs(x + across_T - _ROOM[0] / 2) > _ROOM[0] / 2] = -np.inf
            best = int(np.argmax(spare_T >= 0)) if (spare_T >= 0).any() else int(spare_T.argmax())
        moved.append(int(tried_T[best]))
        marks_N3[number, 0] += across_T[best]
    return moved


def size_of(coverage: float, between: tuple[float, float]) -> float:
    """Return the diameter of a mark in pixels. Its area grows with coverage; ``between`` are the ends of the scale."""
    low, high = between
    share = min(max((coverage - low) / (high - low), 0.0), 1.0)
    # The eye compares areas, so the squares of diameters are interpolated.
    return math.sqrt(SMALLEST**2 + share * (LARGEST**2 - SMALLEST**2))


def coverage_range(points: Sequence[Point]) -> tuple[float, float]:
    """Return the ends of the scale of coverage for mark sizes: the smallest coverage, rounded down to tenths and at
    most 0.5, and 1."""
    values = [1 - refused for point in points if not math.isnan(refused := point.value("refused"))]
    # A share of whole tenths may be a little too small in floating point.
    return min(math.floor(10 * min(values, default=0.5) + 1e-9) / 10, 0.5), 1.0


PAIRS: tuple[tuple[Objective, Objective], ...] = (
    ("epsilon", "error"),
    ("disparity", "error"),
    ("epsilon", "disparity"),
)


def titles(notion: NotionName) -> dict[Objective, str]:
    """Return the title that a chart's axis has for each objective, if disparity is measured by ``notion``."""
    measure = NOTIONS[notion].measure
    return {"epsilon": "privacy budget ε", "disparity": measure, "error": "accuracy", "refused": "coverage"}


def class_label(privacy: PrivacyClass) -> str:
    """Return a privacy class (unit, relation and delta) in words."""
    return f"per {privacy.unit}, {privacy.relation}, δ = {delta_text(privacy.delta)}"


def sound(points: Sequence[Point]) -> list[Point]:
    """Return the points whose models are not degenerate: the gaps of a constant prediction, for example, say
    nothing."""
    # A degenerate predictor's gap is meaningless, so it must dominate no other point.
    return [point for point in points if not point.degenerate]


def on_frontier(points: Sequence[Point]) -> set[Point]:
    """Return every point on the Pareto frontier of its panel (one data set and privacy class): those that no other
    point dominates in the four objectives. Degenerate points, whose gaps are meaningless, are left out.

    An epsilon that depends on private votes is a weaker claim, so points with a publishable epsilon are compared only
    with each other.
    """
    members = set[Point]()
    for found in by_panel(sound(points)).values():
        published = [point for point in found if not point.epsilon_is_data_dependent]
        members.update(frontier.frontier(published).members)
        members.update(point for point in frontier.frontier(found).members if point.epsilon_is_data_dependent)
    return members


def script_data(points: Sequence[Point], *, notions: Sequence[NotionName]) -> dict[str, Any]:
    """Return everything that the script on a comparison's page reads, as strict JSON values: specifications and data of
    the charts, and details of points.

    Buttons and marks on the page refer to ``points[i]`` by its index. ``notions``: the notions of fairness among which
    the reader may choose.
    """
    series = looks(points)
    names = {name: number for number, name in enumerate(series)}
    read = {
        point: {
            name: value
            for name, value in point.settings.items()
            # Without what is switched off, for example by a share or an angle of 0.
            if value is not None and value != {} and not (name.startswith("augment.") and not value)
        }
        for point in points
    }
    shared = {
        series_name: {
            name: value
            for name, value in read[found[0]].items()
            if all(read[point].get(name, ...) == value for point in found)
        }
        for series_name, found in by_series(points).items()
    }
    seen = [[point.seen_by(notion) for point in points] for notion in notions]
    members = on_frontier(points)

    plain_points, sentences = [], dict[str, int]()
    for point in points:
        epsilon, disparity, error, refused = point.mean_O.tolist()
        own = {name: value for name, value in read[point].items() if name not in shared[point.series]}
        privacy = point.panel.privacy
        if math.isinf(epsilon):
            private = "Not private: there is no bound on what can be learned."
        elif point.is_seeded:
            private = "Not private: its noise is reproducible, from a seed."
        else:
            word, _ = STRENGTHS[strength(epsilon, privacy.delta)]
            right = most_often_right(epsilon, privacy.delta)
            private = (
                f"{upper(word)}: a guess about one {privacy.unit} is right at most {right} of the time, that of "
                "a tossed coin 50\u00a0%."
            )
        plain_points.append(
            {
                "series": names[point.series],
                "data": point.panel.data,
                # Sentences that many points share are in the page once; points have their numbers.
                "privacy": sentences.setdefault(class_label(privacy), len(sentences)),
                # Five digits are finer than a pixel, and keep a page of thousands of points small.
                "values": [round(epsilon, 5), up_to_five(disparity), round(1 - error, 5), round(1 - refused, 5)],
                "words": [
                    f"{epsilon_text(epsilon)}{' †' if point.epsilon_is_data_dependent else ''}",
                    *with_spread(point),
                ],
                "private": sentences.setdefault(private, len(sentences)),
                "undefined": point.num_undefined,
                "seeds": point.seeds,
                "remarks": point.remarks,
                "degenerate": point.degenerate,
                "cautions": point.cautions,
                "settings": settings_words(own),
                "commands": [command for command in point.commands if command],
                "front": point in members,
            }
        )

    plain_notions = []
    for notion, found in zip(notions, seen, strict=True):
        front = on_frontier(found)
        values = [[up_to_five(p.value("disparity")), with_spread(p)[0], p in front, p.num_undefined] for p in found]
        plain_notions.append({"name": notion, "measure": NOTIONS[notion].measure, "points": values})

    specifications: list[dict[str, Any]] = []

    def number_of(specification: dict[str, Any]) -> int:
        # Half of the specifications do not depend on the notion: the page holds each once.
        if specification not in specifications:
            specifications.append(specification)
        return specifications.index(specification)

    # For each panel one entry per notion: the rows to draw, and the numbers of the specifications that name them.
    charts: dict[Panel, list[dict[str, Any]]] = {}
    for found in seen:
        index_of = {point: index for index, point in enumerate(found)}
        for panel, of_panel in by_panel(found).items():
            view = PanelView(of_panel, series)
            stairs = [view.stairs(pair) for pair in PAIRS]
            charts.setdefault(panel, []).append(
                {
                    "data": {
                        "points": _table(view.rows(index_of)),
                        **{f"stairs{n}": _table(rows) for n, rows in enumerate(stairs)},
                    },
                    "planes": [number_of(plane(view, number)) for number in range(len(PLANES))],
                    "attained": [
                        number_of(attained(view, pair, rows)) for pair, rows in zip(PAIRS, stairs, strict=True)
                    ],
                }
            )

    shared_words = {name: settings_words(settings) for name, settings in shared.items()}
    data = {
        "points": plain_points,
        "sentences": list(sentences),
        "series": [
            {"name": name, "path": look.shape, "hollow": look.hollow, "place": look.place, "shared": shared_words[name]}
            for name, look in series.items()
        ],
        "panels": [
            {"data": panel.data, "privacy": class_label(panel.privacy), "charts": found}
            for panel, found in charts.items()
        ],
        "specifications": specifications,
        "config": chart_config(12),
        "titles": [*titles(points[0].notion if points else DEFAULT).values()],
        "notions": plain_notions,
    }
    return strict(data)


def _table(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return ``rows`` as compact JSON values: a list of column names, and for each row a list of its values."""
    # Repeated names would be most of a page's data, and true, false and 1.0 a good part of the rest.
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {"names": names, "rows": [[_short(row.get(name)) for name in names] for row in rows]}


def _short(value: Any) -> Any:
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole or isinstance(value, bool) else value


def up_to_five(gap: float) -> float:
    """Return a fairness gap rounded up to five digits, so that a gap above a limit stays above the limit. `fairpate
    specify` rounds gaps in the same way."""
    return gap if math.isnan(gap) else math.ceil(gap * 1e5 - 1e-4) / 1e5


def settings_words(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of ``settings`` as text: text as it is, other values as JSON."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in settings.items()
    }


def with_spread(point: Point, divisor: float = 1.0) -> list[str]:
    """Return disparity, accuracy and coverage of a point as texts: the mean ± the standard deviation over seeds,
    divided by ``divisor`` (for a standard error, the square root of the number of seeds)."""
    _, disparity, error, refused = point.mean_O.tolist()
    _, *spreads = (point.spread_O / divisor).tolist()
    gap = "" if math.isnan(spreads[0]) else f" ± {decimal(spreads[0])}"
    shares = [
        percent(1 - value) + ("" if math.isnan(spread) else f" ± {100 * spread:.1f}")
        for value, spread in zip((error, refused), spreads[1:], strict=True)
    ]
    return [decimal(disparity) + gap, *shares]


class PanelView:
    """All that the charts of one panel (data set and privacy class) show: its points, axes, styles and baselines.

    ``complete`` are the points without undefined values, and ``drawn_N4`` their drawn coordinates. ``known``: the style
    of every series, including series of other panels.
    """

    def __init__(self, points: Sequence[Point], known: Mapping[str, SeriesStyle]) -> None:
        self.points = points
        series = by_series(points)
        self.looks = {name: look for name, look in known.items() if name in series}
        self.axis = EpsilonAxis(points)
        self.complete, _ = frontier.defined(points, OBJECTIVES)
        self.drawn_N4 = coordinates(self.complete, self.axis)
        compared = frontier.baselines(points)
        named = {"most common class": compared.majority, "without privacy": compared.unprotected}
        self.lines = {name: accuracy for name, accuracy in named.items() if not math.isnan(accuracy)}
        self.ends = extents(self.drawn_N4, self.axis, tuple(self.lines.values()))

    def label_sides(self, across: int) -> list[Side]:
        """Return where the words of each line of :attr:`lines` stand in a chart of accuracy over the coordinate
        ``across``: at the end of the line, or in its middle, where they cover the fewest points and no other words."""
        start, end = self.ends[across]
        low, high = self.ends[ACCURACY]
        x_N = (self.drawn_N4[:, across] - start) / ((end - start) or 1.0)
        taken: list[tuple[float, Side]] = []
        for number, accuracy in enumerate(self.lines.values()):
            near_N = np.abs(self.drawn_N4[:, ACCURACY] - accuracy) < _NEAR * (high - low)

            def covered(side: Side, near_N: Any = near_N, accuracy: float = accuracy) -> int:
                from_x, to_x = _THIRDS[side]
                words = sum(side == other and abs(accuracy - at) < _NEAR * (high - low) for at, other in taken)
                return int((near_N & (from_x <= x_N) & (x_N <= to_x)).sum()) + len(x_N) * words

            # The most accurate points lie to the right, a constant prediction to the left: usually away from them.
            sides: tuple[Side, ...] = ("right", "left", "center") if number == 0 else ("left", "right", "center")
            taken.append((accuracy, min(sides, key=covered)))
        return [side for _, side in taken]

    def rows(self, index_of: Mapping[Point, int] | None = None, *, scale: float = 1.0) -> list[dict[str, Any]]:
        """Return the chart data of the points without undefined values: a row for each point, in the order of drawing.

        Columns of a row:

        - ``i``: the point's index in ``index_of``, which maps points to indices; without it the point's rank.
        - ``s``: series. ``l``: level of epsilon.
        - ``x0`` and so on: horizontal position in each chart. ``e``, ``d``, ``a``, ``c``: the four drawn coordinates.
        - ``z``: area of the mark; ``scale`` multiplies its diameter.
        - ``f``: on the frontier. ``g``: degenerate. ``h``: drawn hollow. ``j``: joined by a line.
        - ``d0`` and ``d1``, and likewise for ``a`` and ``c``: ends of the bar over seeds, for a point on the frontier.
        """
        lines = {point for line in joined(self.complete).values() for point in line}
        members, sizes = on_frontier(self.points), coverage_range(self.points)
        diameters = [size_of(1 - point.value("refused"), sizes) for point in self.complete]
        moved = [shifts(self.drawn_N4, self.ends, plane, diameters) for plane in PLANES]
        lengths = [high - low for low, high in self.ends]
        rows = []
        for rank, (point, drawn_4) in enumerate(zip(self.complete, self.drawn_N4.tolist(), strict=True)):
            across = {
                f"x{number}": round(drawn_4[across] + moved[number][rank] / 1000 * lengths[across], 5)
                for number, (across, _) in enumerate(PLANES)
            }
            bars: dict[str, float] = {}
            if point in members and len(point.seeds) > 1:
                # The spread of a share is that of its complement.
                for name, value, spread in zip(_FIELDS[1:], drawn_4[1:], point.spread_O.tolist()[1:], strict=True):
                    ends = (value - spread, value + spread)
                    bars |= {f"{name}{end}": round(min(max(at, 0), 1), 5) for end, at in enumerate(ends)}
            rows.append(
                {
                    "i": (index_of or {}).get(point, rank),
                    "s": point.series,
                    **across,
                    **{name: round(value, 5) for name, value in zip(_FIELDS, drawn_4, strict=True)},
                    "l": level_of(point, self.axis.levels),
                    "z": round((scale * diameters[rank]) ** 2, 1),
                    "f": point in members,
                    "g": bool(point.degenerate),
                    "h": point.epsilon_is_data_dependent,
                    "j": point in lines,
                    **bars,
                }
            )
        # The last rows are drawn on top: those on the frontier, and small marks, which large ones would hide.
        return sorted(rows, key=lambda row: (row["f"], -row["z"]))

    def stairs(self, pair: tuple[Objective, Objective]) -> list[dict[str, Any]]:
        """Return the chart data of the attainment surfaces of each series (method): a row for each corner. A surface is
        a staircase that bounds the values of two objectives (``pair``) that seeds reach.

        Columns: ``s`` series; ``k`` the surface, which one seed ("best"), at least half of the seeds ("median") or all
        seeds ("worst") reach; ``o`` the corner's rank on the surface; ``x`` and ``y`` its position.
        """

        def drawn(objective: Objective, value: float) -> float:
            if objective == "epsilon":
                return round(self.axis.position(value), 4)
            return round(1 - value if objective in ("error", "refused") else value, 5)

        rows = []
        for name, found in by_series(sound(self.points)).items():
            sets = frontier.sets_by_seed(found, pair)
            # The best seed alone, at least half of the seeds, all of them.
            for kind, num_seeds in zip(("best", "median", "worst"), (1, -(-len(sets) // 2), len(sets)), strict=True):
                for order, corner in enumerate(frontier.attainment_surface(sets, num_seeds=num_seeds).tolist()):
                    x, y = map(drawn, pair, corner)
                    rows.append({"s": name, "k": kind, "o": order, "x": x, "y": y})
        return rows


PAPER_SCALE = 0.42  # a mark on paper is smaller than on a screen
# The letters of epsilon, disparity, accuracy and coverage in a row, in the order of drawn coordinates.
_FIELDS = "edac"
_CROSS = "M-.7-.7L.7.7M.7-.7L-.7.7"
# More than any panel has: JSON has no infinity.
ALL_LEVELS = 1_000_000
_PARAMETERS: Mapping[str, Any] = {"level": ALL_LEVELS, "only": False, "hidden": [], "chosen": ""} | {
    "budget": 0,
    "gap": -1,
    "picked": -1,
}
"""Parameters of a chart that a page changes: largest level, frontier only, hidden series, the series with spread; of
the chart beside the reader's limits the largest epsilon, the largest gap (-1: none) and the index of the choice."""


def plane(view: PanelView, number: int, *, paper: bool = False) -> dict[str, Any]:
    """Return the Vega-Lite specification of a chart of points in two coordinates, the pair ``PLANES[number]``, drawn
    from the data set named ``points``.

    ``paper``: draw for a paper, with a legend, instead of for a page.
    """
    across, up = PLANES[number]
    place = {
        "x": _axis(view, across, paper=paper, field=f"x{number}"),
        "y": _axis(view, up, paper=paper, field=_FIELDS[up]),
    }
    scale = PAPER_SCALE if paper else 1.0
    series, width = _series(view.looks, scale, has_legend=paper), 1.4 * scale
    # Without a scale: the areas were computed, and are the same in every chart.
    area = {"field": "z", "type": "quantitative", "scale": None}
    line = {
        "transform": [{"filter": "datum.j"}],
        "mark": {"type": "line", "strokeWidth": width, "opacity": 0.6, "aria": False},
        "encoding": {"stroke": series["stroke"], "strokeDash": series["strokeDash"], "order": {"field": "l"}},
    }
    marks = {
        "mark": {"type": "point", "tooltip": {"content": "data"}, "cursor": "pointer", "aria": False},
        "encoding": {
            **_marks(series, scale),
            "size": area,
            "opacity": {"condition": {"test": "datum.f", "value": 1}, "value": 0.4},
        },
    }
    # A degenerate predictor is crossed out: its gap is meaningless.
    crossed = {
        "transform": [{"filter": "datum.g"}],
        "mark": {"type": "point", "shape": _CROSS, "stroke": "var(--ink)", "strokeWidth": width, "aria": False},
        "encoding": {"size": area},
    }
    bars: list[dict[str, Any]] = [
        {
            "transform": [{"filter": f"isValid(datum.{_FIELDS[coordinate]}0)"}],
            "mark": {"type": "rule", "strokeWidth": width, "opacity": 0.5, "clip": True, "aria": False},
            "encoding": {
                channel: {"field": f"{_FIELDS[coordinate]}0"},
                f"{channel}2": {"field": f"{_FIELDS[coordinate]}1"},
                "stroke": series["stroke"],
            },
        }
        for channel, coordinate in (("x", across), ("y", up))
        if coordinate != EPSILON
    ]
    compared: list[dict[str, Any]] = []
    lines = view.lines.items() if up == ACCURACY else ()
    for (name, accuracy), side in zip(lines, view.label_sides(across) if lines else (), strict=True):
        rule = {"type": "rule", "stroke": "var(--muted)", "strokeDash": [2, 3], "strokeWidth": width}
        # The best private points lie close below what no private one reaches: clear of the ring around the choice.
        above = {"baseline": "bottom", "dy": -9 if name == "without privacy" else -2}
        label = {"type": "text", "text": f"{name} {percent(accuracy)}", "fill": "var(--muted)", "aria": False} | above
        compared.append(
            {
                "data": {"values": [{"y": round(accuracy, 5)}]},
                "encoding": {"y": {**place["y"], "field": "y"}},
                "layer": [
                    {"mark": rule},
                    {
                        "mark": label | {"align": side},
                        "encoding": {"x": {"value": _LABEL_X[side]}},
                    },
                ],
            }
        )
    shown = "datum.l <= level && (!only || datum.f) && indexof(hidden, datum.s) < 0"
    own = {"encoding": place, "layer": [*([line] if across == EPSILON else []), *bars, marks, crossed]}
    if paper:
        return _specification("points", shown, [*compared, own])
    # Only the rows of the chart beside the reader's limits have a `v`, their epsilon as it is printed.
    shown += " && (!isValid(datum.v) || datum.v <= budget)"
    if across == DISPARITY:
        limit = {"type": "rule", "stroke": "var(--accent)", "strokeWidth": 1.6, "clip": True, "aria": False}
        compared.append(
            {
                "data": {"values": [{}]},
                "transform": [{"filter": "gap >= 0"}, {"calculate": "gap", "as": "x"}],
                "encoding": {"x": {**place["x"], "field": "x"}},
                "layer": [{"mark": limit}],
            }
        )
    # The reader's choice: a ring, and words on its side with more room.
    ring = {"type": "point", "shape": "circle", "fill": "transparent", "stroke": "var(--ink)", "strokeWidth": 2}
    words = {"type": "text", "text": "your choice", "fontWeight": 600, "fill": "var(--ink)", "aria": False}
    start, end = view.ends[across]
    room = 0.22 * (end - start)  # as wide as the words
    where = f"datum.x{number} > {(start + end) / 2:g}"
    if across == DISPARITY:  # not over the line of the reader's limit
        where += f" || (datum.x{number} > {start + room:g} && abs(gap - datum.x{number} - {room / 2:g}) < {room / 2:g})"
    where += " ? 'right' : 'left'"
    # Towards the middle: above the highest points is the edge, and what they are compared with.
    beside = f"datum.{_FIELDS[up]} > {sum(view.ends[up]) / 2:g} ? 26 : -20"
    picked = {
        "transform": [{"filter": "datum.i == picked"}, {"calculate": "2 * datum.z + 260", "as": "ring"}],
        "encoding": place,
        "layer": [
            {"mark": ring | {"opacity": 1, "aria": False}, "encoding": {"size": {**area, "field": "ring"}}},
            {"mark": words | {"align": {"expr": where}, "dy": {"expr": beside}}},
        ],
    }
    return _specification("points", shown, [*compared, own, picked])


def attained(
    view: PanelView, pair: tuple[Objective, Objective], stairs: Sequence[Mapping[str, Any]], *, paper: bool = False
) -> dict[str, Any]:
    """Return the Vega-Lite specification of a chart of attainment surfaces. A surface bounds the values of the two
    objectives in ``pair`` that at least half of the seeds reach.

    ``stairs``: the rows of :meth:`PanelView.stairs`, from which the chart is drawn. ``paper`` as in :func:`plane`.
    """
    place = {}
    for objective, channel in zip(pair, "xy", strict=True):
        # Seeds reach further than the means of configurations do.
        reached = [row[channel] for row in stairs] or [0.0, 1.0]
        ends = view.ends[EPSILON] if objective == "epsilon" else _with_room(min(reached), max(reached))
        place[channel] = _axis(view, OBJECTIVES.index(objective), paper=paper, field=channel, ends=ends)
    scale = PAPER_SCALE if paper else 1.0
    series = _series(view.looks, scale, has_legend=paper)
    step: dict[str, Any] = {"type": "line", "interpolate": "step-after", "aria": False}
    lines = {"stroke": series["stroke"], "order": {"field": "o"}}
    layers = [
        {
            "transform": [{"filter": "datum.k != 'median' && datum.s == chosen"}],
            "mark": {**step, "strokeWidth": 1.2, "strokeDash": [1, 2], "opacity": 0.75},
            "encoding": {**lines, "detail": {"field": "k"}},
        },
        {
            "transform": [{"filter": "datum.k == 'median'"}],
            "mark": {**step, "strokeWidth": 2 * scale},
            "encoding": {**lines, "strokeDash": series["strokeDash"]},
        },
        {
            "transform": [{"filter": "datum.k == 'median'"}],
            "mark": {"type": "point", "size": 64 * scale**2, "tooltip": {"content": "data"}, "aria": False},
            "encoding": _marks(series, scale),
        },
    ]
    own = {"encoding": place, "layer": layers}
    return _specification(f"stairs{PAIRS.index(pair)}", "indexof(hidden, datum.s) < 0", [own])


def _specification(data: str, shown: str, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the Vega-Lite specification that draws ``layers`` from the data set named ``data``, with the parameters
    that a page may change. ``shown``: the Vega expression that selects the rows to draw."""
    return {
        **LOOKS["frame"],
        "data": {"name": data},
        # The same parameters in every chart, so that the page's script can set them in all.
        "params": [{"name": name, "value": value} for name, value in _PARAMETERS.items()],
        "transform": [{"filter": shown}],
        "layer": list(layers),
    }


def _series(known: Mapping[str, SeriesStyle], size: float, *, has_legend: bool) -> dict[str, dict[str, Any]]:
    """Return the Vega-Lite encoding channels (colour, shape and dash) by which charts distinguish series; ``size``
    scales dashes."""

    def channel(values: Sequence[Any], *, is_shown: bool = True) -> dict[str, Any]:
        # A page has buttons in place of a legend.
        legend = {"title": None, "symbolOpacity": 1, "symbolDash": [1, 0]} if has_legend and is_shown else None
        # One domain for stroke, fill and shape: Vega-Lite joins their legends into one.
        scale = {"domain": list(known), "range": list(values)}
        return {"field": "s", "type": "nominal", "scale": scale, "legend": legend}

    colours = [f"var(--m{look.place})" for look in known.values()]
    dashes = [[2 * size * length for length in DASHES[look.place]] for look in known.values()]
    fills = ["transparent" if look.hollow else ink for look, ink in zip(known.values(), colours, strict=True)]
    return {
        "stroke": channel(colours),
        "fill": channel(fills),
        "shape": channel([look.shape for look in known.values()]),
        "strokeDash": channel(dashes, is_shown=False),
    }


def _marks(series: Mapping[str, Mapping[str, Any]], scale: float) -> dict[str, Any]:
    """Return the Vega-Lite encoding channels for marks: filled with an outline in the background colour, or hollow if
    epsilon depends on private votes."""
    width = math.sqrt(scale)
    return {
        "fill": series["fill"],
        "shape": series["shape"],
        "stroke": {"condition": {"test": "!datum.h", "value": "var(--paper)"}, **series["stroke"]},
        "strokeWidth": {"condition": {"test": "datum.h", "value": 1.6 * width}, "value": 0.6 * width},
    }


def _axis(
    view: PanelView, coordinate: int, *, paper: bool, field: str, ends: tuple[float, float] | None = None
) -> dict[str, Any]:
    """Return the Vega-Lite encoding channel of one drawn coordinate, whose values are in the column ``field``, on an
    axis from ``ends[0]`` to ``ends[1]``; without ``ends`` the axis covers the panel's points."""
    title = titles(view.points[0].notion)[OBJECTIVES[coordinate]]
    axis: dict[str, Any] = {"tickCount": 5}
    if coordinate == EPSILON:
        title = "ε" if paper else title
        # Rounded once for both: Vega finds the label of a tick by equality.
        places, words = zip(*((round(at, 4), label) for at, label in view.axis.ticks), strict=True)
        axis = {"values": places, "labelExpr": f"{json.dumps(words)}[indexof({json.dumps(places)}, datum.value)]"}
    elif coordinate != DISPARITY:
        axis = {"format": ".3~%", "tickCount": 5}
    domain = [round(end, 5) for end in ends or view.ends[coordinate]]
    # The extents have room already: neither 0 nor round numbers are added to them.
    scale = {"domain": domain, "zero": False, "nice": False}
    return {"field": field, "type": "quantitative", "title": title, "axis": axis, "scale": scale}


def chart_config(font_size: float, *, paper: bool = False) -> dict[str, Any]:
    """Return the Vega configuration that all charts of a page, or of a paper, share; all text has size
    ``font_size``."""
    labels, text = {"labelFontSize": font_size, "titleFontSize": font_size}, {"fontSize": font_size}
    sizes = {"axis": labels, "legend": labels, "title": text, "text": text}
    return merge(merge(LOOKS["chart"], LOOKS["paper"] if paper else {}), sizes)
