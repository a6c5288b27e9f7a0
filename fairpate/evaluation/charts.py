"""Curves and histograms as inline SVG by matplotlib: no script, no request, colours and letters of the page.

Text stays text. A colour is drawn as it stands in the light style sheet and then named by its variable, so that a
reader's dark theme holds for drawings too. What is empty or not finite is said, not drawn.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from fairpate.later import matplotlib

WIDTH, _HEIGHT, _LEGEND_LINE = 440, 256, 20
_COLORS = {
    "answered": "#0b5a8f",
    "fairness": "#c4571b",
    "confidence": "#e8b34a",
    "free": "#d3d8de",
    "muted": "#5b6672",
    "line": "#d8dce1",
    "wash": "#e6eff6",
    "paper": "#ffffff",
    "ink": "#18212b",
}
"""Variables of ``report.css`` and a colour that stands for each."""
_CURVES = (("answered", "-"), ("fairness", (0, (7, 4))), ("muted", (0, (2, 4))))
_SVG = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}"><title>{}</title>{}</svg>')
_NOTHING = Markup('<p class="note">{}: nothing to draw, no finite value.</p>')


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line through ``points`` of (x, y) and the words that label it."""

    name: str
    points: Sequence[tuple[float, float]]


def curves(lines: Sequence[Curve], *, x_label: str, y_label: str, title: str) -> Markup:
    """Up to three lines on linear axes from 0: one is labelled at its end, several in a legend beneath the chart."""
    points = [point for line in lines for point in line.points]
    if not points or not all(math.isfinite(y) for _, y in points):
        return _NOTHING.format(title)
    legend = _LEGEND_LINE * len(lines) if len(lines) > 1 else 0
    figure, axes = _axes(x_label, y_label, legend=legend)
    _ticks(axes, x=max(x for x, _ in points), y=max(y for _, y in points))
    for line, (color, dash) in zip(lines, _CURVES, strict=False):
        xs, ys = zip(*line.points, strict=True)
        axes.plot(xs, ys, color=_COLORS[color], linestyle=dash, linewidth=2.2, clip_on=False, label=line.name)
    if legend:
        figure.legend(loc="lower left", frameon=False, handlelength=3, labelcolor=_COLORS["ink"])
    else:
        (only,) = lines
        axes.fill(
            *zip((0, 0), *only.points, (only.points[-1][0], 0), strict=True), color=_COLORS["wash"], clip_on=False
        )
        axes.annotate(only.name, only.points[-1], (-9, 8), textcoords="offset points", ha="right", color=_COLORS["ink"])
    return _inline(figure, title)


def histogram(
    edges: Sequence[float],
    stacks: Mapping[str, Sequence[int]],
    *,
    x_label: str,
    y_label: str,
    title: str,
    ticks: Sequence[tuple[float, str]],
) -> Markup:
    """Counts between ``edges`` (one more than counts), stacked in the order given by the name of their colour."""
    totals = [sum(column) for column in zip(*stacks.values(), strict=True)]
    if not any(totals):
        return _NOTHING.format(title)
    figure, axes = _axes(x_label, y_label)
    _ticks(axes, y=max(totals), whole=True)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xticks([at for at, _ in ticks], [words for _, words in ticks])
    left, width, base = np.asarray(edges)[:-1], np.diff(edges), np.zeros(len(totals))
    for color, counts in stacks.items():
        kept = np.asarray(counts) > 0
        axes.bar(
            left[kept],
            np.asarray(counts)[kept],
            width[kept],
            bottom=base[kept],
            align="edge",
            color=_COLORS[color],
            edgecolor=_COLORS["paper"],
            hatch="///" if color == "fairness" else None,
            clip_on=False,
        )
        base += counts
    return _inline(figure, title)


def _axes(x_label: str, y_label: str, *, legend: int = 0) -> tuple[matplotlib.figure.Figure, Any]:
    height = _HEIGHT + legend
    figure = matplotlib.figure.Figure(figsize=(WIDTH / 72, height / 72), dpi=72, frameon=False)
    axes = figure.add_axes((46 / WIDTH, (44 + legend) / height, 374 / WIDTH, 188 / height))
    axes.patch.set_visible(False)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(_COLORS["muted"])
    axes.tick_params(length=0, pad=6, labelcolor=_COLORS["muted"])
    axes.set_axisbelow(True)
    axes.set_xlabel(x_label, color=_COLORS["muted"])
    # Places that are said are not looked for among the ticks, each of whose labels would be laid out for it again.
    axes.yaxis.set_label_coords(0, 0)
    axes.set_title(y_label, loc="left", x=-46 / 374, y=1, pad=11, fontsize=10, color=_COLORS["muted"])
    return figure, axes


def _ticks(axes: Any, *, y: float, x: float | None = None, whole: bool = False) -> None:
    """Round numbers from 0 to at least the largest, where the axes end; a line for each of y."""
    if x is not None:
        ends = matplotlib.ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(0, x)
        axes.set_xticks(ends, [f"{end:,g}" for end in ends])
        axes.set_xlim(0, ends[-1])
    ends = matplotlib.ticker.MaxNLocator(4, steps=[1, 2, 2.5, 5, 10], integer=whole).tick_values(0, max(y, 1e-12))
    axes.set_yticks(ends, [f"{end:,g}" for end in ends])
    axes.set_ylim(0, ends[-1])
    for end in ends:
        axes.axhline(end, color=_COLORS["line"], linewidth=1, zorder=0, clip_on=False)


def _inline(figure: matplotlib.figure.Figure, title: str) -> Markup:
    """The drawing inside a page: without the names, the style sheet and the font that a file of its own would need."""
    drawn = io.StringIO()
    # Ids follow from the title: drawings on one page do not share them, and the same numbers give the same page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        canvas = matplotlib.backends.backend_svg.FigureCanvasSVG(figure)
        canvas.print_svg(drawn, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))  # type: ignore[no-untyped-call]
    body = drawn.getvalue()
    body = body[body.index('<g id="figure_1"') : body.rindex("</svg>")]
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r"font[a-z-]*: [^;\"]*;? ?", "", body)
    body = re.sub(r' transform="rotate\(-0 [^"]*"', "", body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    for name, color in _COLORS.items():
        body = body.replace(color, f"var(--{name})")
    height = round(figure.get_figheight() * 72)
    return _SVG.format(WIDTH, height, title, title, Markup(body))  # noqa: S704 - matplotlib escapes its text
