"""Drawings show their numbers to scale, and numbers are printed as they are meant."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from fairpate.pages import delta_text, epsilon_text, number, percent, place, scale_end
from fairpate.report import run_page


def blocks(drawing: str, color: str) -> list[tuple[float, float]]:
    """From where to where every block of this colour reaches up."""
    found = re.findall(rf'<path d="M[^,"]*,([^h"]*)h[^v"]*v([^h"]*)h[^"]*Z" fill="var\(--{color}\)"', drawing)
    return [(float(low), float(low) + float(height)) for low, height in found]


def test_histogram_blocks_are_as_high_as_their_counts() -> None:
    shares = {"answered": np.array([0.02] * 4), "confidence": np.array([0.02, 0.02, 0.98])}
    drawing = run_page.histogram(shares, x_label="x", title="t")
    (four,), (two, one) = (blocks(drawing, color) for color in ("answered", "confidence"))
    ends = [four, two, one]
    unit = ends[2][1] - ends[2][0]
    assert [round((high - low) / unit, 3) for low, high in ends] == [4, 2, 1]
    assert ends[1][1] == pytest.approx(ends[0][0]), "the second stands on the first"
    assert ends[0][1] == pytest.approx(ends[2][1]), "and its other block on the axis"


def test_a_curve_goes_through_its_points() -> None:
    drawing = run_page.curves({"ε": [(0, 0), (50, 5), (100, 10)]}, delta=1e-5, title="t")
    (line,) = re.findall(r'<path d="M([^"]*)" stroke="var\(--answered\)"', drawing)
    first, middle, last = (tuple(map(float, corner.split(","))) for corner in line.split("L"))
    assert middle == pytest.approx(np.add(first, last) / 2)
    grid = [float(y) for y in re.findall(r'translate\(0,([^)]*)\)" x2="[^"]*" y2="0" stroke="var\(--line\)"', drawing)]
    assert first[1] == max(grid)
    assert last[1] == min(grid), "where the scale ends at 10"


def test_printed_numbers() -> None:
    assert epsilon_text(2.001) == "2.01"
    assert epsilon_text(2.0) == "2.00"
    assert epsilon_text(2 + 1e-12) == "2.01"
    assert epsilon_text(0.07) == "0.07"
    assert epsilon_text(0.0) == "0.00"
    assert epsilon_text(math.nan) == "undefined"
    assert epsilon_text(math.inf) == "∞"
    assert epsilon_text(1e300) == f"1{300 * '0'}.00"
    assert delta_text(1e-5) == "10⁻⁵"
    assert delta_text(2e-6) == "2·10⁻⁶"
    assert delta_text(0.00123) == "0.00123"
    assert percent(math.nan) == "undefined"
    assert percent(1.0) == "100\u00a0%"
    assert percent(0.9996) == "100.0\u00a0%"
    assert [number(value) for value in (0.0, 1234.0, 0.12345, 1234567.8)] == ["0", "1,234", "0.123", "1,234,568"]


def test_a_scale_ends_at_a_round_number_that_holds_every_value() -> None:
    assert scale_end([0.11, math.nan, 0.3]) == 0.3
    assert scale_end([0.31, math.inf]) == 0.4
    assert scale_end([]) == scale_end([0.0, math.nan]) == 0.01
    for value in np.random.default_rng(0).uniform(0.01, 3, 200).tolist():
        assert value <= scale_end([value]) <= 2 * value
    assert [place(value, largest=0.4) for value in (-0.1, 0.0, 0.1, 0.4, 0.5)] == [0, 0, 25, 100, 100]
