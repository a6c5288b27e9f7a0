"""Charts as inline SVG: no script, no request, colours from the page's style sheet.

Every chart is drawn 440 units wide, so that it stays legible in a column and on a phone. Marks differ in shape,
dash or hatch as well as in colour. All text is escaped here; undefined numbers are said, not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 440
_LEFT, _RIGHT = 46, 20
_DASHES = ("", "7 4", "2 4", "9 3 2 3")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line through ``points`` of (x, y) and the words that label it."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One part of a stacked histogram; ``css`` is the style sheet's class for its colour."""

    name: str
    css: str
    counts: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Whisker:
    """A value with its interval; ``detail`` stands beneath the name."""

    name: str
    detail: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class _Scale:
    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.stop - self.start), 1)


def curves(lines: Sequence[Curve], *, x_label: str, y_label: str, title: str) -> str:
    """Lines on linear axes from 0: one is labelled at its end, several in a legend beneath the chart.

    Lines that are empty or not finite are said, not drawn.
    """
    height, bottom = 256 + 20 * (len(lines) if len(lines) > 1 else 0), 212
    points = [point for line in lines for point in line.points]
    if not points or not all(math.isfinite(py) for _, py in points):
        return _empty(title)
    xs = _ticks(0, max(x for x, _ in points), 5)
    ys = _ticks(0, max(y for _, y in points), 5)
    x = _Scale(low=0, high=xs[-1], start=_LEFT, stop=WIDTH - _RIGHT)
    y = _Scale(low=0, high=ys[-1], start=bottom, stop=24)
    parts = [_text(0, 12, y_label, "quiet"), *_y_axis(y, ys), *_x_axis(x, xs, bottom, x_label)]
    if len(lines) == 1:
        parts.append(_area(lines[0], x, y))
    for rank, line in enumerate(lines):
        path = " ".join(f"{x(px)},{y(py)}" for px, py in line.points)
        parts.append(f'<polyline class="curve c{rank}" stroke-dasharray="{_DASHES[rank % 4]}" points="{path}"/>')
        last_x, last_y = line.points[-1]
        if len(lines) == 1:
            parts.append(f'<circle class="mark c0" cx="{x(last_x)}" cy="{y(last_y)}" r="5"/>')
            parts.append(_text(x(last_x) - 9, y(last_y) - 8, line.name, "strong halo", anchor="end"))
        else:
            parts.append(_legend_line(rank, bottom + 60 + 20 * rank, line.name))
    return _svg(height, parts, title)


def dumbbells(rows: Sequence[str], values: Sequence[Sequence[float]], *, x_label: str, title: str) -> str:
    """One row per name, one mark per value (its shape and colour by position), joined by a line: the gap.

    ``values[row][column]`` is a share; NaN draws no mark. Three marks or more get a lane each, so none hides another.
    """
    num_marks = max((len(row) for row in values), default=0)
    lane = 0 if num_marks <= 2 else 9 if len(rows) <= 6 else 5
    row_height, top = (40 if len(rows) <= 4 else 26) + lane * max(num_marks - 2, 0), 8
    bottom = top + row_height * len(rows) + 4
    defined = [value for row in values for value in row if not math.isnan(value)]
    if not defined:
        return _empty(title)
    ticks = _ticks(0, max(*defined, 0.01), 5)
    left = _label_width(rows)
    x = _Scale(low=0, high=ticks[-1], start=left, stop=WIDTH - _RIGHT - 6)
    parts = _x_axis(x, ticks, bottom, x_label, top=top, per_cent=True)
    for row, name in enumerate(rows):
        y = top + row_height * (row + 0.5)
        present = [(column, value) for column, value in enumerate(values[row]) if not math.isnan(value)]
        parts.append(_text(left - 10, y + 4, _short(name, 18), "", anchor="end"))
        if len(present) > 1:
            ends = [value for _, value in present]
            parts.append(_line(x(min(ends)), y, x(max(ends)), y, "span"))
        parts.extend(mark(column, x(value), y + lane * (column - (num_marks - 1) / 2)) for column, value in present)
    return _svg(bottom + 44, parts, title)


def whiskers(rows: Sequence[Whisker], *, x_max: float, x_label: str, title: str) -> str:
    """Values as dots on their intervals, written out beside the name; an undefined value is called so.

    Charts that are to be compared share ``x_max``.
    """
    row_height, top = 52, 4
    bottom = top + row_height * len(rows)
    ticks = _ticks(0, max(x_max, 0.01), 5)
    x = _Scale(low=0, high=ticks[-1], start=6, stop=WIDTH - _RIGHT)
    parts = _x_axis(x, ticks, bottom, x_label, top=top)
    for index, row in enumerate(rows):
        y = top + row_height * index
        parts.append(_text(6, y + 15, row.name, "strong halo"))
        parts.append(_text(WIDTH - _RIGHT, y + 15, row.detail, "quiet halo", anchor="end"))
        if not math.isnan(row.low):
            parts.append(_line(x(max(row.low, 0)), y + 33, x(row.high), y + 33, "whisker"))
            parts.extend(
                _line(x(max(end, 0)), y + 29, x(max(end, 0)), y + 37, "whisker") for end in (row.low, row.high)
            )
        if not math.isnan(row.value):
            parts.append(f'<circle class="dot" cx="{x(max(row.value, 0))}" cy="{y + 33}" r="5.5"/>')
    return _svg(bottom + 44, parts, title)


def histogram(
    edges: Sequence[float],
    stacks: Sequence[Stack],
    *,
    x_label: str,
    y_label: str,
    title: str,
    tick_labels: Sequence[tuple[float, str]] | None = None,
) -> str:
    """Counts between ``edges`` (one more than counts), stacked in the order given."""
    bottom = 212
    totals = [sum(column) for column in zip(*(stack.counts for stack in stacks), strict=True)]
    if not any(totals):
        return _empty(title)
    y_ticks = _ticks(0, max(totals), 4, whole=True)
    x = _Scale(low=edges[0], high=edges[-1], start=_LEFT, stop=WIDTH - _RIGHT)
    y = _Scale(low=0, high=y_ticks[-1], start=bottom, stop=24)
    parts = [_HATCH, _text(0, 12, y_label, "quiet"), *_y_axis(y, y_ticks)]
    base = [0] * len(totals)
    for stack in stacks:
        for index, count in enumerate(stack.counts):
            if count:
                parts.extend(
                    _block(stack, x(edges[index]), x(edges[index + 1]), y(base[index]), y(base[index] + count))
                )
                base[index] += count
    x_ticks = tick_labels or [(tick, _number(tick)) for tick in _ticks(edges[0], edges[-1], 6) if tick <= edges[-1]]
    parts.append(_line(_LEFT, bottom, WIDTH - _RIGHT, bottom, "axis"))
    parts.extend(_text(x(at), bottom + 17, label, "quiet", anchor="middle") for at, label in x_ticks)
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, bottom + 36, x_label, "quiet", anchor="middle"))
    return _svg(bottom + 44, parts, title)


def confusion(table: Sequence[Sequence[float]], class_names: Sequence[str], *, title: str) -> str:
    """True labels down, predicted labels across; shade is the share of the row, the number its count."""
    num_classes = len(class_names)
    left = max(_label_width(class_names), 44) + 18
    side = min((WIDTH - left - 4) / num_classes, 84)
    top, down = 40, min(side, 46)
    parts = [_text(left + side * num_classes / 2, 12, "predicted", "quiet", anchor="middle")]
    parts.append(
        f'<text class="quiet" text-anchor="middle" transform="translate(11 {top + down * num_classes / 2:.1f}) '
        'rotate(-90)">true</text>'
    )
    for column, name in enumerate(class_names):
        label = _short(name, max(2, int(side / 7)))
        parts.append(_text(left + side * (column + 0.5), 32, label, "", anchor="middle"))
    for row, counts in enumerate(table):
        parts.append(_text(left - 8, top + down * (row + 0.5) + 4, _short(class_names[row], 18), "", anchor="end"))
        for column, count in enumerate(counts):
            share = count / sum(counts) if sum(counts) else 0.0
            parts.extend(_confusion_cell(left + side * column, top + down * row, side, down, share, count))
    return _svg(top + down * num_classes + 6, parts, title)


def mark(rank: int, x: float, y: float) -> str:
    """The mark of the group with this rank: eight colours, five shapes."""
    shape = rank % 5
    if shape == 0:
        return f'<circle class="mark c{rank % 8}" cx="{x}" cy="{y}" r="6"/>'
    corners: dict[int, list[tuple[float, float]]] = {
        1: [(-5.5, -5.5), (5.5, -5.5), (5.5, 5.5), (-5.5, 5.5)],
        2: [(0, -7.5), (7, 5.5), (-7, 5.5)],
        3: [(0, -8), (8, 0), (0, 8), (-8, 0)],
        4: [(0, 7.5), (7, -5.5), (-7, -5.5)],
    }
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners[shape])
    return f'<polygon class="mark c{rank % 8}" points="{points}"/>'


_HATCH = (
    '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path class="hatch" d="M0 0V7"/></pattern></defs>'
)


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _empty(title: str) -> str:
    return _svg(60, [_text(6, 34, "Nothing to draw: no finite value.", "quiet")], title)


def _text(x: float, y: float, words: str, css: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line class="{css}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def _y_axis(y: _Scale, ticks: Sequence[float]) -> list[str]:
    parts = []
    for tick in ticks:
        parts.append(_line(_LEFT, y(tick), WIDTH - _RIGHT, y(tick), "grid"))
        parts.append(_text(_LEFT - 8, y(tick) + 4, _number(tick), "quiet", anchor="end"))
    return parts


def _x_axis(
    x: _Scale, ticks: Sequence[float], bottom: float, label: str, *, top: float | None = None, per_cent: bool = False
) -> list[str]:
    parts = [_line(x.start, bottom, x.stop, bottom, "axis")]
    for tick in ticks:
        if top is not None:
            parts.append(_line(x(tick), top, x(tick), bottom, "grid"))
        words = f"{100 * tick:.3g}" if per_cent else _number(tick)
        parts.append(_text(x(tick), bottom + 17, words, "quiet", anchor="middle"))
    return [*parts, _text((x.start + x.stop) / 2, bottom + 36, label, "quiet", anchor="middle")]


def _area(line: Curve, x: _Scale, y: _Scale) -> str:
    path = " ".join(f"L{x(px)} {y(py)}" for px, py in line.points)
    first, last = line.points[0][0], line.points[-1][0]
    return f'<path class="area" d="M{x(first)} {y(0)} {path} L{x(last)} {y(0)}Z"/>'


def _legend_line(rank: int, y: float, words: str) -> str:
    swatch = f'<line class="curve c{rank}" stroke-dasharray="{_DASHES[rank % 4]}" x1="{_LEFT}" x2="{_LEFT + 34}" '
    return f'{swatch}y1="{y - 4}" y2="{y - 4}"/>' + _text(_LEFT + 44, y, words, "")


def _block(stack: Stack, left: float, right: float, base: float, top: float) -> list[str]:
    box = f'x="{left + 0.5:.1f}" y="{top}" width="{max(right - left - 1, 0.5):.1f}" height="{base - top:.1f}"'
    blocks = [f'<rect class="fill {stack.css}" {box}/>']
    if stack.css == "fairness":
        blocks.append(f'<rect fill="url(#hatch)" {box}/>')
    return blocks


def _confusion_cell(x: float, y: float, width: float, height: float, share: float, count: float) -> list[str]:
    box = f'x="{x + 1:.1f}" y="{y + 1:.1f}" width="{width - 2:.1f}" height="{height - 2:.1f}" rx="3"'
    cell = [
        f'<rect {box} fill="var(--faint)"/>',
        f'<rect {box} fill="var(--answered)" fill-opacity="{share:.2f}"/>',
    ]
    if count and width >= 18:
        colour = "var(--on-dark)" if share > 0.55 else "var(--ink)"
        cell.append(
            f'<text x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}" text-anchor="middle" '
            f'style="fill:{colour}">{_number(round(count, 1))}</text>'
        )
    return cell


def _ticks(low: float, high: float, wanted: int, *, whole: bool = False) -> list[float]:
    """Round numbers from at most ``low`` to at least ``high``."""
    raw = max(high - low, 1e-12) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    if whole:
        step = max(math.ceil(step), 1)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def _number(value: float) -> str:
    if math.isnan(value):
        return "undefined"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"


def _label_width(names: Sequence[str]) -> float:
    return 16 + 7.2 * max(len(_short(name, 18)) for name in names)


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"
