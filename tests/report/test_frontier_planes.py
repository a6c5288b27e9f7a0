"""Where points are drawn: axes, levels of epsilon, lines along them, and marks that move apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
from run_records import run_record

from fairpate.report.figures import (
    LARGEST,
    MOST_SHIFT,
    SMALLEST,
    EpsilonAxis,
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
from fairpate.report.frontier import points_of
from fairpate.report.frontier_page import FrontierReport


def points(*runs):
    """A configuration each: (method, epsilon, what else)."""
    return points_of(
        [
            run_record(method, epsilon=epsilon, config={"number": n}, **more)
            for n, (method, epsilon, more) in enumerate(runs)
        ]
    )


def test_epsilon_stands_at_its_logarithm_and_infinity_beyond(comparison):
    points = FrontierReport(title="", rows=comparison()).points()
    axis = epsilon_axis(points)
    assert axis.position(10.0) - axis.position(1.0) == pytest.approx(1.0)
    assert axis.position(math.inf) > axis.position(10.0)
    assert axis.position(0.0) < axis.position(1.0)
    assert [label for _, label in axis.ticks] == ["1", "3", "10"]
    low, high = axis.range
    assert low < axis.position(1.0) < axis.position(10.0) < high


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((0.9996, 3.0), ["1", "3"]),  # a calibrated epsilon stays a little below its target
        ((1.0, 9.9, 10.0), ["1", "2", "5", "10"]),  # two that touch
        ((1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 10.0), ["1", "2", "5", "10"]),  # too many
    ],
)
def test_epsilons_are_marked_where_they_are_few_and_apart(values, labels):
    low, high = math.log10(values[0]), math.log10(values[-1])
    axis = EpsilonAxis(low=low, high=high, values=values, has_zero=False, has_infinity=False)
    assert [label for _, label in axis.ticks] == labels


def test_epsilons_within_five_per_cent_are_one_level():
    found = points(*(("dp_sgd", e, {}) for e in (0.9512, 0.999, 1.0, 0.94, 3.0, math.inf)))
    levels = epsilon_levels(found)
    assert levels == (0.94, 1.0, 3.0, math.inf)
    assert [level_of(point, levels) for point in found] == [1, 1, 1, 0, 2, 3]
    assert middle_level(found) == 1
    assert middle_level([]) == 0
    assert [f"{level:.2f}" for level in epsilon_levels(points(("dp_sgd", 0.0, {})))] == ["0.00"]


def test_lines_join_the_most_accurate_at_each_level_and_nothing_degenerate():
    found = points(
        ("dp_sgd", 1.0, {"accuracy": 0.70}),
        ("dp_sgd", 0.99, {"accuracy": 0.75}),
        ("dp_sgd", 3.0, {"accuracy": 0.80}),
        ("dp_sgd", 0.3, {"accuracy": 0.90, "degenerate": ("predicts 'no' for every record",)}),
        ("dp_sgd", 10.0, {"accuracy": None}),
        ("pate", 1.0, {}),
    )
    lines = joined(found)
    assert list(lines) == ["dp_sgd"]  # one level alone has nothing to join
    assert [point.value("epsilon") for point in lines["dp_sgd"]] == [0.99, 3.0]


def test_marks_in_one_place_move_apart_by_a_bounded_way_and_always_the_same():
    found = points(*[("dp_sgd", 1.0, {"accuracy": 0.8})] * 3, ("pate", 3.0, {"accuracy": 0.6}))
    axis = epsilon_axis(found)
    drawn = coordinates(found, axis)
    moved = shifts(drawn, extents(drawn, axis), (0, 2))
    assert moved == [-14, 0, 14, 0]
    crowd = coordinates(points(*[("dp_sgd", 1.0, {})] * 40), axis)
    far = shifts(crowd, extents(drawn, axis), (0, 2))
    assert (min(far), max(far)) == (-MOST_SHIFT, MOST_SHIFT)
    assert far == shifts(crowd, extents(drawn, axis), (0, 2))
    assert far == sorted(far)


def test_axes_hold_every_point():
    found = points(("dp_sgd", 1.0, {"accuracy": 0.7, "disparity": 0.3}), ("pate", 3.0, {"coverage": 0.4}))
    axis = epsilon_axis(found)
    drawn = coordinates(found, axis)
    for (low, high), values in zip(extents(drawn, axis), drawn.T, strict=True):
        assert low < values.min() <= values.max() < high
    assert np.isfinite(extents(coordinates([], axis), axis)).all()


def test_size_means_coverage_by_area():
    areas = [size_of(coverage, (0.5, 1.0)) ** 2 for coverage in (0.5, 0.75, 1.0)]
    assert areas[1] - areas[0] == pytest.approx(areas[2] - areas[1])
    assert (size_of(0.1, (0.5, 1.0)), size_of(1.0, (0.5, 1.0))) == (SMALLEST, LARGEST)
    assert coverage_range(points(("pate", 1.0, {"coverage": 0.93}))) == (0.5, 1.0)
    assert coverage_range(points(("pate", 1.0, {"coverage": 0.31}))) == (0.3, 1.0)
