"""How pictures for paper look, whatever they show: width, size of text, formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
