"""Where points are drawn: axes, levels of epsilon, lines along them, and marks that move apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
from run_records import run_record

from fairpate.report.figures import (
    ACCURACY,
    LARGEST,
    MOST_SHIFT,
    SMALLEST,
    EpsilonAxis,
    PanelView,
    coordinates,
    coverage_range,
    epsilon_levels,
    extents,
    joined,
    level_of,
    looks,
    middle_level,
    plane,
    shifts,
    size_of,
)
from fairpate.report.frontier import points_of
from fairpate.report.frontier_page import FrontierReport

pytestmark = pytest.mark.usefixtures("few_replicates", "remembered_digits")


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
    axis = EpsilonAxis(points)
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
        ((1.0, 9.0, 10.0), ["1", "2", "5", "10"]),  # two that touch
        ((1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 10.0), ["1", "2", "5", "10"]),  # too many
    ],
)
def test_epsilons_are_marked_where_they_are_few_and_apart(values, labels):
    axis = EpsilonAxis(points(*(("dp_sgd", epsilon, {}) for epsilon in values)))
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


def test_no_mark_lies_under_another_and_the_same_marks_always_move_alike():
    """Distances are those on the smallest chart, 300 x 230 pixels."""
    found = points(*[("dp_sgd", 1.0, {"accuracy": 0.8})] * 3, ("pate", 3.0, {"accuracy": 0.6}))
    axis = EpsilonAxis(found)
    drawn = coordinates(found, axis)
    ends = extents(drawn, axis)
    # 14 pixels of 300 are 47 thousandths.
    assert shifts(drawn, ends, (0, 2), [14.0] * 4) == [0, 48, -48, 0]
    random = np.random.default_rng(0)
    scattered, diameters = random.random((34, 4)), random.uniform(SMALLEST, LARGEST, 34).tolist()
    unit = [(0.0, 1.0)] * 4
    moved = shifts(scattered, unit, (1, 2), diameters)
    assert max(map(abs, moved)) <= MOST_SHIFT
    places = np.stack([300 * (scattered[:, 1] + np.array(moved) / 1000), 230 * scattered[:, 2]], axis=1)
    apart = np.linalg.norm(places[:, None] - places, axis=2) - np.add.outer(diameters, diameters) / 2
    assert apart[np.triu_indices(34, 1)].min() >= 0
    still = np.stack([300 * scattered[:, 1], 230 * scattered[:, 2]], axis=1)
    overlap = np.linalg.norm(still[:, None] - still, axis=2) - np.add.outer(diameters, diameters) / 2
    assert overlap[np.triu_indices(34, 1)].min() < 0  # they had to move
    crowd = coordinates(points(*[("dp_sgd", 1.0, {})] * 40), axis)
    far = shifts(crowd, ends, (0, 2), [14.0] * 40)
    assert max(map(abs, far)) == MOST_SHIFT
    assert far == shifts(crowd, ends, (0, 2), [14.0] * 40)


def test_bars_show_the_spread_over_seeds_and_lines_what_to_compare_with():
    """By hand: accuracies of .7 and .8 have a mean of .75 and a standard deviation of .0707."""
    runs = [("dp_sgd", 0, 1.0, 0.7), ("dp_sgd", 1, 1.0, 0.8), ("pate", 0, 3.0, 0.6), ("sgd", 0, math.inf, 0.95)]
    found = points_of(
        [
            run_record(method, seed=seed, epsilon=epsilon, accuracy=accuracy, majority_accuracy=0.55)
            for method, seed, epsilon, accuracy in runs
        ]
    )
    view = PanelView(found, looks(found))
    bar = {row["s"]: (row.get("a0"), row.get("a1")) for row in view.rows()}
    assert bar["dp_sgd"] == pytest.approx((0.75 - 0.05 * 2**0.5, 0.75 + 0.05 * 2**0.5), abs=1e-5)
    assert bar["pate"] == bar["sgd"] == (None, None)  # of one seed
    assert view.lines == {"most common class": pytest.approx(0.55), "without privacy": pytest.approx(0.95)}
    layers = [layer for group in plane(view, 0)["layer"] for layer in group["layer"]]
    written = [layer["mark"]["text"] for layer in layers if layer["mark"]["type"] == "text"]
    assert written == ["most common class 55.0\u00a0%", "without privacy 95.0\u00a0%", "your choice"]
    low, high = view.ends[ACCURACY]
    assert low < 0.55
    assert 0.95 < high <= 1


def test_axes_hold_every_point():
    found = points(("dp_sgd", 1.0, {"accuracy": 0.7, "disparity": 0.3}), ("pate", 3.0, {"coverage": 0.4}))
    axis = EpsilonAxis(found)
    drawn = coordinates(found, axis)
    for (low, high), values in zip(extents(drawn, axis), drawn.T, strict=True):
        assert low <= values.min() <= values.max() <= high
    # A share of 100 % ends its axis, and no axis shows more.
    assert extents(drawn, axis)[3][1] == 1.0
    assert np.isfinite(extents(coordinates([], axis), axis)).all()


def test_size_means_coverage_by_area():
    areas = [size_of(coverage, (0.5, 1.0)) ** 2 for coverage in (0.5, 0.75, 1.0)]
    assert areas[1] - areas[0] == pytest.approx(areas[2] - areas[1])
    assert (size_of(0.1, (0.5, 1.0)), size_of(1.0, (0.5, 1.0))) == (SMALLEST, LARGEST)
    assert coverage_range(points(("pate", 1.0, {"coverage": 0.93}))) == (0.5, 1.0)
    assert coverage_range(points(("pate", 1.0, {"coverage": 0.31}))) == (0.3, 1.0)
