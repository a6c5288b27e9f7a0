"""The frontier's charts as pictures for paper: the same points, shapes, colours and places as the page, by matplotlib.

One file per data set, privacy class and kind of chart; epsilons of different classes share no picture. Pictures are as
wide as one or two columns of a journal, and all their text has its font size. Fonts are embedded in PDF as TrueType, as
journals ask; in SVG, letters are outlines.
"""

from __future__ import annotations

import io
import itertools
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairpate.evaluation.figure_style import WIDTHS_IN, FigureStyle
from fairpate.evaluation.frontier import OBJECTIVES, Point, by_panel, by_series, defined
from fairpate.evaluation.frontier_charts import PAIRS, TITLES, attainment, class_label, on_frontier, sound, titles
from fairpate.evaluation.frontier_looks import COLOURS, Look, looks
from fairpate.evaluation.frontier_planes import (
    ACCURACY,
    COVERAGE,
    DISPARITY,
    EPSILON,
    PLANES,
    EpsilonAxis,
    FloatArray,
    coordinates,
    coverage_range,
    epsilon_axis,
    epsilon_levels,
    extents,
    joined,
    level_of,
    middle_level,
    shifts,
    size_of,
)
from fairpate.evaluation.page import epsilon_text
from fairpate.later import matplotlib

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
    """File names and contents: slices, attainment and frontier of each data set and privacy class, in each format."""
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


def _space(panel: _Panel, style: FigureStyle) -> matplotlib.figure.Figure:
    width = min(style.width, WIDTHS_IN[1])
    figure = matplotlib.figure.Figure(figsize=(style.width, _height(panel, style, 1, width)), layout="constrained")
    axes: Any = figure.add_subplot(projection="3d")
    for name, line in joined(panel.complete).items():
        axes.plot(*coordinates(line, panel.axis).T[:3], color=panel.looks[name].color, linewidth=0.6, alpha=0.6)
    for name, found in by_series(panel.complete).items():
        for inside in (False, True):
            part = [point for point in found if (id(point) in panel.members) == inside]
            mark = _mark(panel.looks[name]) | {"alpha": 1.0 if inside else _PALE, "s": 18 if inside else 6}
            axes.scatter(*coordinates(part, panel.axis).T[:3], depthshade=False, **mark)
    for axis, coordinate in ((axes.xaxis, EPSILON), (axes.yaxis, DISPARITY), (axes.zaxis, ACCURACY)):
        _axis(axis, panel, coordinate)
    axes.set(xlim=panel.ends[EPSILON], ylim=panel.ends[DISPARITY][::-1], zlim=panel.ends[ACCURACY])
    axes.view_init(elev=22, azim=48)
    axes.set_box_aspect(None, zoom=0.85)
    _caption(figure, panel, style, "large: on the frontier")
    return figure


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
    "frontier": _space,
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
