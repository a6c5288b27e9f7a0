"""The frontier's charts as pictures for paper: the same points, shapes and scales as the page, by matplotlib.

One file per privacy class and kind of chart, as PNG and as PDF; epsilons of different classes share no picture.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fairpate.evaluation.frontier import OBJECTIVES, Panel, Point, PrivacyClass, by_panel, by_series, defined
from fairpate.evaluation.frontier_charts import (
    CIVIDIS,
    PAIRS,
    TITLES,
    EpsilonAxis,
    Look,
    accuracy_range,
    attainment,
    class_label,
    coverage_range,
    epsilon_axis,
    looks,
    on_frontier,
    size_of,
    titles,
)

_DASHES: Mapping[str, Any] = {
    "solid": "-",
    "dash": "--",
    "dot": ":",
    "dashdot": "-.",
    "longdash": (0, (8, 3)),
}
_INK, _MUTED, _LINE = "#18212b", "#5b6672", "#d8dce1"
_COLUMNS = 3
_LETTERS_PER_INCH, _LEGEND_INCHES = 13, 1.45
_DPI = 200


def frontier_figures(points: Sequence[Point]) -> dict[str, bytes]:
    """File names and contents: frontier, slices and attainment of each privacy class, each as PNG and PDF."""
    files: dict[str, bytes] = {}
    own = looks(points)
    panels = by_panel(points)
    with matplotlib.rc_context({"text.parse_math": False}):  # a name with dollars is no formula
        for privacy in sorted({panel.privacy for panel in panels}):
            part = {panel: found for panel, found in panels.items() if panel.privacy == privacy}
            for kind, draw in _KINDS.items():
                figure = draw(privacy, part, own)
                # Laid out once, not again for each file.
                figure.draw_without_rendering()
                figure.set_layout_engine("none")
                for suffix in ("png", "pdf"):
                    files[f"{kind}-{_file_name(privacy)}.{suffix}"] = _bytes(figure, suffix)
    return files


def _slices(privacy: PrivacyClass, panels: Mapping[Panel, Sequence[Point]], own: Mapping[str, Look]) -> Figure:
    points = [point for found in panels.values() for point in found]
    figure, places = _grid(len(panels))
    hue = _hue(points)
    for axes, (panel, found) in zip(places, panels.items(), strict=True):
        scale, between = epsilon_axis(found), accuracy_range(found)
        for marks in _marks(found, own):
            sizes = [(0.62 * size_of(1 - point.value("error"), between)) ** 2 for point in marks.points]
            axes.scatter(*_coordinates(marks.points, scale)[:2], s=sizes, **marks.style(hue))
        _cross_out(axes, found, scale)
        axes.set_ylim(bottom=0)
        title = f"{panel.data}: accuracy {100 * between[0]:.1f} to {100 * between[1]:.1f} %"
        _finish(axes, title, scale, titles(points[0].notion)["disparity"])
    bar = figure.colorbar(hue, ax=places, shrink=0.7, aspect=28, pad=0.02)
    bar.set_label("coverage", color=_MUTED, fontsize=9)
    bar.ax.tick_params(labelsize=9, labelcolor=_MUTED, color=_LINE)
    crossed = "; crossed out: degenerate" if any(point.degenerate for point in points) else ""
    _caption(figure, privacy, points, own, f"size: accuracy; pale: dominated{crossed}")
    return figure


def _space(privacy: PrivacyClass, panels: Mapping[Panel, Sequence[Point]], own: Mapping[str, Look]) -> Figure:
    points = [point for found in panels.values() for point in found]
    figure, places = _grid(len(panels), in_space=True)
    hue = _hue(points)
    for axes, (panel, found) in zip(places, panels.items(), strict=True):
        scale = epsilon_axis(found)
        for marks in _marks(found, own):
            axes.scatter(
                *_coordinates(marks.points, scale),
                s=34 if marks.on_frontier else 12,
                depthshade=False,
                **marks.style(hue),
            )
        axes.set_xticks([at for at, _ in scale.ticks], [label for _, label in scale.ticks])
        axes.invert_yaxis()
        axes.set(xlabel=TITLES["epsilon"], ylabel=titles(points[0].notion)["disparity"], zlabel="accuracy %")
        axes.set_title(panel.data, fontsize=10, fontweight="bold")
        axes.tick_params(labelsize=7, labelcolor=_MUTED)
        axes.view_init(elev=22, azim=48)
        axes.set_box_aspect(None, zoom=0.86)
    _caption(figure, privacy, points, own, "hue: coverage; small: dominated")
    return figure


def _attained(privacy: PrivacyClass, panels: Mapping[Panel, Sequence[Point]], own: Mapping[str, Look]) -> Figure:
    points = [point for found in panels.values() for point in found]
    figure, places = _grid(len(panels))
    for axes, (panel, found) in zip(places, panels.items(), strict=True):
        scale = epsilon_axis(found)
        for name, members in by_series(found).items():
            _, median, _ = attainment(members, PAIRS[0], scale)
            if median:
                _stairs(axes, median, own[name])
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
        _finish(axes, panel.data, scale, TITLES["error"])
    _caption(figure, privacy, points, own, "reached by at least half of the seeds", lines=True)
    return figure


_KINDS: Mapping[str, Callable[[PrivacyClass, Mapping[Panel, Sequence[Point]], Mapping[str, Look]], Figure]] = {
    "frontier": _space,
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
        linewidth=1.6,
        marker=look.shape.matplotlib,
        markersize=5,
        markerfacecolor="none" if look.hollow else look.color,
    )


@dataclass(frozen=True, kw_only=True)
class _Marks:
    """Points of one look that are all on the frontier, or all dominated."""

    points: Sequence[Point]
    look: Look
    on_frontier: bool

    def style(self, hue: ScalarMappable) -> dict[str, Any]:
        """Arguments of a scatter plot that do not depend on the axes."""
        colors = hue.to_rgba(np.array([1 - point.value("refused") for point in self.points]))
        return {
            "marker": self.look.shape.matplotlib,
            "facecolors": "none" if self.look.hollow else colors,
            "edgecolors": colors if self.look.hollow else _INK,
            "linewidths": 1.3 if self.look.hollow else 0.5 if self.on_frontier else 0.2,
            "alpha": 0.95 if self.on_frontier else 0.35,
            "zorder": 3 if self.on_frontier else 2,
        }


def _marks(points: Sequence[Point], own: Mapping[str, Look]) -> list[_Marks]:
    members = on_frontier(points)
    complete, _ = defined(points, OBJECTIVES)
    parts = [
        _Marks(points=[p for p in found if (id(p) in members) == inside], look=own[series], on_frontier=inside)
        for inside in (False, True)
        for series, found in by_series(complete).items()
    ]
    return [part for part in parts if part.points]


def _cross_out(axes: Any, points: Sequence[Point], scale: EpsilonAxis) -> None:
    """A cross on what is degenerate, whose gap says nothing."""
    crossed = [point for point in defined(points, OBJECTIVES)[0] if point.degenerate]
    if crossed:
        axes.scatter(*_coordinates(crossed, scale)[:2], s=90, marker="x", color=_INK, linewidths=1.0, zorder=4)


def _coordinates(points: Sequence[Point], scale: EpsilonAxis) -> tuple[list[float], list[float], list[float]]:
    return (
        [scale.position(point.value("epsilon")) for point in points],
        [point.value("disparity") for point in points],
        [100 * (1 - point.value("error")) for point in points],
    )


def _grid(number: int, *, in_space: bool = False) -> tuple[Figure, list[Any]]:
    columns = min(number, _COLUMNS)
    rows = math.ceil(number / columns)
    width, height = (4.6, 4.4) if in_space else (4.0, 3.3)
    figure = Figure(figsize=(width * columns + 0.6, height * rows + 1.0), layout="constrained")
    projection = "3d" if in_space else None
    return figure, [figure.add_subplot(rows, columns, place + 1, projection=projection) for place in range(number)]


def _finish(axes: Any, title: str, scale: EpsilonAxis, y_label: str) -> None:
    axes.set_title(title, fontsize=10, fontweight="bold", loc="left", color=_INK)
    axes.set_xlabel(TITLES["epsilon"], fontsize=9, color=_MUTED)
    axes.set_ylabel(y_label, fontsize=9, color=_MUTED)
    axes.set_xticks([at for at, _ in scale.ticks], [label for _, label in scale.ticks])
    axes.set_xlim(*scale.range)
    axes.tick_params(labelsize=9, labelcolor=_MUTED, color=_LINE)
    axes.grid(color="#eceef1")
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(_MUTED)


def _caption(
    figure: Figure,
    privacy: PrivacyClass,
    points: Sequence[Point],
    own: Mapping[str, Look],
    words: str,
    *,
    lines: bool = False,
) -> None:
    names = [name for name in own if name in by_series(points)]
    handles = [
        Line2D(
            [],
            [],
            linestyle=_DASHES[own[name].dash] if lines else "none",
            marker=own[name].shape.matplotlib,
            color=own[name].color if lines else _INK,
            markerfacecolor="none" if own[name].hollow else None,
            markersize=6,
            label=name,
        )
        for name in names
    ]
    dagger = "; †, hollow: ε depends on private votes, operator only" if any(own[n].hollow for n in names) else ""
    seeded = "; noise from a seed: not private" if any(point.is_seeded for point in points) else ""
    width = figure.get_figwidth()
    caption = textwrap.fill(f"ε {class_label(privacy)}; {words}{dagger}{seeded}", width=int(_LETTERS_PER_INCH * width))
    figure.suptitle(caption, fontsize=9.5, color=_MUTED, x=0.01, ha="left")
    columns = min(len(names), int(width / _LEGEND_INCHES))
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=9)


def _hue(points: Sequence[Point]) -> ScalarMappable:
    low, high = coverage_range(points)
    colors = LinearSegmentedColormap.from_list("coverage", [*reversed(CIVIDIS)][1:])
    return ScalarMappable(norm=Normalize(low, high, clip=True), cmap=colors)


def _file_name(privacy: PrivacyClass) -> str:
    return re.sub("[^a-z0-9]+", "-", f"{privacy.unit} {privacy.relation} {privacy.delta:g}".lower()).strip("-")


def _bytes(figure: Figure, suffix: str) -> bytes:
    buffer = io.BytesIO()
    # Without a date the same points give the same file.
    metadata = {"CreationDate": None} if suffix == "pdf" else {"Software": None}
    figure.savefig(buffer, format=suffix, dpi=_DPI, metadata=metadata)
    return buffer.getvalue()
