"""The charts of a comparison as files for a paper, PDF, SVG or PNG, and the picture of one panel for a notebook.

Each is the specification of the page's chart (:mod:`fairpate.report.figures`), drawn by vl-convert, which needs
neither a browser nor a network.
"""

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairpate.pages import epsilon_text
from fairpate.report import figures
from fairpate.report.frontier import Point, by_panel

FORMATS = ("pdf", "svg", "png")
WIDTHS_IN: Mapping[int, float] = {1: 3.35, 2: 7.0}
"""Widths of one and of two columns, in inches (85 and 178 mm)."""


@dataclass(frozen=True, kw_only=True)
class FigureStyle:
    """The style of figures for a paper: their width, the size of their text in points, and the file formats.

    ``columns``: the width in columns of a journal, 1 or 2. ``width_in``: the width in inches; None: that of
    ``columns``. ValueError for an unknown format.
    """

    columns: int = 2
    font_size: float = 8.0
    width_in: float | None = None
    formats: tuple[str, ...] = ("png", "pdf")

    def __post_init__(self) -> None:
        if unknown := [name for name in self.formats if name not in FORMATS]:
            raise ValueError(f"format: expected {', '.join(FORMATS)}, got {unknown[0]!r}.")

    @property
    def width(self) -> float:
        return WIDTHS_IN[self.columns] if self.width_in is None else self.width_in


# A page's colours are variables of its style sheet; a figure for a paper has these instead.
_ON_PAPER = {f"var(--m{place})": colour for place, colour in enumerate(figures.COLOURS)}
_ON_PAPER |= {"var(--ink)": figures.COLOURS[-1], **figures.LOOKS["inks"]}
_LETTER = 0.56  # mean width of a letter, in font sizes
_DPI = 200
_POINTS_PER_INCH = 72
_VARIABLE = re.compile(r"var\(--\w+\)")
_CLIP = re.compile(r"\bclip\d+\b")
_SVG_WIDTH = re.compile(r'width="([0-9.]+)" height="([0-9.]+)"')


def frontier_figures(points: Sequence[Point], style: FigureStyle | None = None) -> dict[str, bytes]:
    """Draw the figures for a paper: for each panel (data set and privacy class) accuracy and coverage over the other
    objectives, and attainment surfaces. Return the contents of the files, one per figure and format of ``style``, by
    file name."""
    style = style or FigureStyle()
    # Of all points: a method looks the same in every picture.
    known = figures.looks(points)
    files: dict[str, bytes] = {}
    names: set[str] = set()
    for panel, found in by_panel(points).items():
        words = f"{panel.data} {panel.privacy.unit} {panel.privacy.relation} {panel.privacy.delta:g}"
        name = re.sub("[^a-z0-9]+", "-", words.lower()).strip("-")
        # Names that differ only in characters that file names exclude are numbered.
        name = next(each for each in (name, *(f"{name}-{n}" for n in range(2, len(names) + 3))) if each not in names)
        names.add(name)
        view = figures.PanelView(found, known)
        narrow = min(style.width, WIDTHS_IN[1])
        stairs = view.stairs(figures.PAIRS[0])
        attainment = figures.attained(view, figures.PAIRS[0], stairs, paper=True)
        # On paper :func:`_pictures` fits the width, so that all text has the same size in every picture.
        del attainment["autosize"]
        attainment["title"] = _caption(view, style, narrow, "reached by at least half of the seeds")
        # On paper the rows are inside; on a page the script adds them.
        attainment["datasets"] = {"stairs0": stairs}
        drawn = {"slices": (_slices(view, style), style.width), "attainment": (attainment, narrow)}
        for kind, (specification, width_in) in drawn.items():
            pictures = _pictures(view, specification, width_in, style)
            files |= {f"{kind}-{name}.{suffix}": content for suffix, content in pictures.items()}
    return files


def slices_picture(points: Sequence[Point]) -> bytes:
    """Return a PNG for a notebook with three charts of one panel's points: accuracy over epsilon, accuracy over
    disparity, and coverage over epsilon."""
    style = FigureStyle(formats=("png",))
    view = figures.PanelView(points, figures.looks(points))
    return _pictures(view, _slices(view, style), style.width, style)["png"]


def _slices(view: figures.PanelView, style: FigureStyle) -> dict[str, Any]:
    """Return the Vega-Lite specification of a panel's three charts side by side: accuracy over epsilon, accuracy over
    disparity up to the middle level of epsilon, and coverage over epsilon."""
    level = figures.middle_level(view.points)
    budget = f"ε up to {epsilon_text(figures.epsilon_levels(view.points)[level])}" if view.complete else ""
    planes = [figures.plane(view, number, paper=True) for number in range(3)]
    planes[1]["title"] = budget
    for each, largest in zip(planes, (figures.ALL_LEVELS, level, figures.ALL_LEVELS), strict=True):
        each["transform"] = [{"filter": f"datum.l <= {largest}"}]
        # Parts of one picture may not define the parameters of a page again, and Vega-Lite fits single charts only.
        del each["params"], each["autosize"]
    bars = "; bars: standard deviation over seeds" if any(len(point.seeds) > 1 for point in view.points) else ""
    crossed = "; crossed out: degenerate" if any(point.degenerate for point in view.points) else ""
    words = f"size: coverage; pale: dominated{crossed}{bars}; lines: the most accurate at each ε"
    return {
        "title": _caption(view, style, style.width, words),
        "datasets": {"points": view.rows(scale=figures.PAPER_SCALE)},
        "hconcat" if style.columns == 2 else "vconcat": planes,
        "spacing": style.font_size,
    }


def _caption(view: figures.PanelView, style: FigureStyle, width_in: float, words: str) -> list[str]:
    """Return the lines of a figure's caption: data set, guarantee, and what the marks mean (``words``)."""
    has_hollow = any(look.hollow for look in view.looks.values())
    dagger = "; †, hollow: ε depends on private votes, operator only" if has_hollow else ""
    seeded = "; noise from a seed: not private" if any(point.is_seeded for point in view.points) else ""
    where = view.points[0].panel
    # Fonts that are free to embed lack raised digits: 1e-05, not 10⁻⁵.
    privacy = f"per {where.privacy.unit}, {where.privacy.relation}, δ = {where.privacy.delta:g}"
    text = f"{where.data}, ε {privacy}; {words}{dagger}{seeded}"
    return textwrap.wrap(text, width=int(_POINTS_PER_INCH * width_in / (_LETTER * style.font_size)))


def _pictures(
    view: figures.PanelView, specification: Mapping[str, Any], width_in: float, style: FigureStyle
) -> dict[str, bytes]:
    """Draw a Vega-Lite specification in each format of ``style``; return the contents of the files by the format's
    name. The pictures are ``width_in`` inches wide; one unit of the drawing is one point on paper."""
    import vl_convert

    planes = specification.get("hconcat") or specification.get("vconcat") or [specification]
    across = len(specification.get("hconcat", [0]))
    config = figures.chart_config(style.font_size, paper=True)
    longest = max(map(len, view.looks), default=1)
    width = _POINTS_PER_INCH * width_in
    # Vega does not wrap a legend, so its columns are counted from the mean width of a letter.
    config["legend"]["columns"] = max(1, int(width / ((longest * _LETTER + 4) * style.font_size)))
    # The room that labels take is known once they are drawn, so the planes are fitted in a few rounds.
    inner = width / across - 5 * style.font_size
    for _ in range(4):
        for each in planes:
            each["width"], each["height"] = round(inner, 2), round(max(0.72 * inner, 60.0), 2)
        drawing = vl_convert.vegalite_to_svg({**specification, "config": config})
        missing = width - float(_SVG_WIDTH.findall(drawing)[0][0])
        # A third of a point is invisible, and a chart 40 points wide cannot shrink further.
        if abs(missing) < 0.3 or inner + missing / across < 40:
            break
        inner += missing / across
    drawing = _VARIABLE.sub(lambda found: _ON_PAPER[found[0]], drawing)
    # The renderer numbers clips on from drawing to drawing; here each file counts from 0.
    numbers = {name: f"clip{number}" for number, name in enumerate(dict.fromkeys(_CLIP.findall(drawing)))}
    drawing = _CLIP.sub(lambda found: numbers[found[0]], drawing)
    make: Mapping[str, Callable[[], bytes]] = {
        "pdf": lambda: vl_convert.svg_to_pdf(drawing),
        # With the unit: numbers without one are pixels, which are smaller than points.
        "svg": lambda: _SVG_WIDTH.sub(r'width="\1pt" height="\2pt"', drawing, count=1).encode(),
        "png": lambda: vl_convert.svg_to_png(drawing, ppi=_DPI),
    }
    return {suffix: make[suffix]() for suffix in style.formats}
