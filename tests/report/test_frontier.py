"""Pareto sets, hypervolume and attainment against their definitions, computed by other means."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from run_records import run_record

from fairpate.report.frontier import (
    attainment_surface,
    by_panel,
    by_series,
    dominance,
    frontier,
    hypervolume,
    is_seeded,
    pareto_mask,
    points_of,
    reference_point,
    sets_by_seed,
    settings_of,
)

# Few distinct values, so that ties are common.
COORDINATES = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, math.inf])


@st.composite
def sets_of_points(draw, max_points=12, max_objectives=4):
    shape = (draw(st.integers(1, max_points)), draw(st.integers(1, max_objectives)))
    return draw(arrays(np.float64, shape, elements=COORDINATES))


def dominates(better, worse):
    return all(a <= b for a, b in zip(better, worse, strict=True)) and any(
        a < b for a, b in zip(better, worse, strict=True)
    )


@given(sets_of_points())
def test_the_pareto_set_is_what_no_row_dominates(values_NO):
    rows = values_NO.tolist()
    expected = [not any(dominates(other, row) for other in rows) for row in rows]
    assert pareto_mask(values_NO).tolist() == expected


@given(sets_of_points(), st.randoms(use_true_random=False))
def test_the_pareto_set_does_not_depend_on_order(values_NO, random):
    order = list(range(len(values_NO)))
    random.shuffle(order)
    assert (pareto_mask(values_NO[order]) == pareto_mask(values_NO)[order]).all()


def test_pareto_refuses_the_undefined_and_the_shapeless():
    with pytest.raises(ValueError, match="nan"):
        pareto_mask([[0.0, math.nan]])
    with pytest.raises(ValueError, match="shape"):
        pareto_mask([0.0, 1.0])
    assert pareto_mask(np.empty((0, 3))).tolist() == []


@pytest.mark.parametrize(
    ("values_NO", "reference_O", "volume"),
    [
        ([[0.25]], [1.0], 0.75),
        ([[0.0, 0.0]], [2.0, 3.0], 6.0),
        # Two boxes of 2 x 1 and 1 x 2 that share a unit square.
        ([[1.0, 2.0], [2.0, 1.0]], [3.0, 3.0], 3.0),
        # Three slabs through one corner of a cube of side 2: 3 * 2 - 3 * 1 + 1.
        ([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]], [2.0, 2.0, 2.0], 4.0),
        # Four boxes of 2 x 1 x 1 x 1 that share a unit cell: 4 * 2 - 3.
        ((1 - np.eye(4)).tolist(), [2.0, 2.0, 2.0, 2.0], 5.0),
        ([[math.inf, 0.0]], [1.0, 1.0], 0.0),
        ([[1.0, 0.0], [0.0, 2.0]], [1.0, 1.0], 0.0),
    ],
)
def test_hypervolume_by_hand(values_NO, reference_O, volume):
    assert hypervolume(values_NO, reference_O=reference_O) == pytest.approx(volume, abs=1e-12)


@pytest.mark.parametrize("num_objectives", [2, 3, 4])
def test_hypervolume_by_counting_random_points(num_objectives):
    random = np.random.default_rng(num_objectives)
    values_NO = random.random((15, num_objectives))
    reference_O = np.linspace(0.8, 1.1, num_objectives)
    samples = random.random((100_000, num_objectives)) * reference_O
    covered = np.zeros(len(samples), dtype=bool)
    for row in values_NO:
        covered |= (samples >= row).all(axis=1)
    share = covered.mean()
    spread = math.sqrt(share * (1 - share) / len(samples))
    found = hypervolume(values_NO, reference_O=reference_O) / reference_O.prod()
    assert abs(found - share) < 5 * spread


def union_by_inclusion_and_exclusion(values_NO, reference_O):
    boxes = list(np.minimum(values_NO, reference_O))
    total = 0.0
    for size in range(1, len(boxes) + 1):
        for chosen in itertools.combinations(boxes, size):
            total += (-1) ** (size + 1) * np.prod(reference_O - np.max(chosen, axis=0))
    return total


@settings(max_examples=60, deadline=None)
@given(sets_of_points(max_points=6))
def test_hypervolume_is_the_measure_of_a_union_of_boxes(values_NO):
    reference_O = np.linspace(0.7, 1.0, values_NO.shape[1])
    expected = union_by_inclusion_and_exclusion(values_NO, reference_O)
    assert hypervolume(values_NO, reference_O=reference_O) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(sets_of_points(), st.randoms(use_true_random=False), st.integers(0, 11))
def test_hypervolume_grows_with_points_and_ignores_order_and_the_dominated(values_NO, random, chosen):
    reference_O = np.ones(values_NO.shape[1])
    volume = hypervolume(values_NO, reference_O=reference_O)
    order = list(range(len(values_NO)))
    random.shuffle(order)
    assert hypervolume(values_NO[order], reference_O=reference_O) == pytest.approx(volume, abs=1e-12)
    row = values_NO[chosen % len(values_NO)]
    assert hypervolume([*values_NO, row + 0.05], reference_O=reference_O) == pytest.approx(volume, abs=1e-12)
    assert hypervolume([*values_NO, row * 0.5], reference_O=reference_O) >= volume - 1e-12
    assert hypervolume(values_NO[1:], reference_O=reference_O) <= volume + 1e-12


@settings(max_examples=60, deadline=None)
@given(
    st.lists(arrays(np.float64, st.tuples(st.integers(0, 5), st.just(2)), elements=COORDINATES), min_size=1, max_size=5)
)
def test_a_surface_separates_what_enough_seeds_attain(sets_SN2):
    grid = np.array(list(itertools.product([0.0, 0.1, 0.2, 0.25, 0.5, 0.75, 0.9, 1.0], repeat=2)))
    num_attaining = [
        sum(any(x <= qx and y <= qy for x, y in points) for points in map(np.ndarray.tolist, sets_SN2))
        for qx, qy in grid.tolist()
    ]
    for num_seeds in range(1, len(sets_SN2) + 1):
        corners = attainment_surface(sets_SN2, num_seeds=num_seeds)
        above = [any(x <= qx and y <= qy for x, y in corners.tolist()) for qx, qy in grid.tolist()]
        assert above == [number >= num_seeds for number in num_attaining]
        assert (np.diff(corners[:, 0]) > 0).all()
        assert (np.diff(corners[:, 1]) < 0).all()


def test_seeds_of_one_configuration_are_one_point_at_the_largest_epsilon():
    config = {"seed": 0, "data": {"seed": 0, "data_dir": "/a"}, "dp_sgd": {"epochs": 5}, "out": "x"}
    elsewhere = {"seed": 1, "data": {"seed": 1, "data_dir": "/b"}, "dp_sgd": {"epochs": 5}, "out": "y"}
    other = {"seed": 0, "data": {"seed": 0, "data_dir": "/a"}, "dp_sgd": {"epochs": 6}, "out": "x"}
    runs = [
        run_record(seed=1, epsilon=2.0, accuracy=0.9, disparity=0.2, coverage=0.5, config=elsewhere),
        run_record(seed=0, epsilon=1.0, accuracy=0.7, disparity=0.1, coverage=1.0, config=config),
        run_record(seed=0, config=other),
    ]
    first, second = points_of(runs, commands=["b", "a", "c"])
    assert first.seeds == (0, 1)
    assert first.commands == ("a", "b")
    assert first.settings == {"dp_sgd.epochs": 5}
    assert first.mean_O == pytest.approx([2.0, 0.15, 0.2, 0.25])
    # Two values lie one standard deviation of sqrt(2) / 2 times their distance from the mean.
    assert first.spread_O == pytest.approx(np.array([1.0, 0.1, 0.2, 0.5]) / math.sqrt(2))
    assert second.seeds == (0,)
    assert np.isnan(second.spread_O).all()


def test_a_later_record_of_the_same_run_replaces_the_earlier():
    (point,) = points_of([run_record(accuracy=0.1), run_record(accuracy=0.9)])
    assert point.value("error") == pytest.approx(0.1)
    with pytest.raises(ValueError, match="one command per record"):
        points_of([run_record(), run_record(seed=1)], commands=["a"])


def test_classes_and_data_sets_are_never_mixed():
    variants = [
        {},
        {"unit": "sensitive attribute"},
        {"relation": "replace one"},
        {"delta": 1e-6},
        {"data": "credit_default"},
    ]
    points = points_of([run_record(**changes) for changes in variants])
    assert len(by_panel(points)) == len(variants)
    for call in (frontier, dominance, reference_point):
        with pytest.raises(ValueError, match="by_panel"):
            call(points[:2])


def test_an_undefined_objective_leaves_a_point_out_of_its_sets_only():
    points = points_of(
        [
            run_record("a", accuracy=None),
            run_record("b", seed=0, disparity=0.5),
            run_record("b", seed=1, disparity=None),
            run_record("c", epsilon=math.inf, accuracy=0.9),
        ]
    )
    whole = frontier(points)
    assert [p.method for p in whole.undefined] == ["a", "b"]
    assert [p.method for p in whole.members] == ["c"]
    without_accuracy = frontier(points, ("epsilon", "disparity", "refused"))
    assert [p.method for p in without_accuracy.members] == ["a"]
    assert [p.method for p in without_accuracy.dominated] == ["c"]
    assert points[1].num_undefined == 1


def test_claims_that_depend_on_votes_are_a_series_of_their_own():
    points = points_of([run_record(), run_record(epsilon=0.5, epsilon_is_data_dependent=True)])
    assert list(by_series(points)) == ["pate", "pate †"]


def test_dominance_counts_beaten_points_and_says_at_which_epsilon():
    points = points_of(
        [
            run_record("a", epsilon=1.0, accuracy=0.8),
            run_record("b", epsilon=1.0, accuracy=0.8),
            run_record("b", epsilon=2.0, accuracy=0.7, config={"x": 1}),
            run_record("b", epsilon=0.5, accuracy=0.1, config={"x": 2}),
            run_record("c", epsilon=3.0, accuracy=0.7),
        ]
    )
    found = dominance(points)
    assert len(found) == 6
    assert found["a", "b"].share == pytest.approx(1 / 3)
    assert found["a", "b"].epsilons == (2.0,)
    assert found["a", "c"].share == found["b", "c"].share == 1
    assert found["b", "a"].share == found["c", "b"].share == 0


def test_epsilons_that_promise_the_same_are_the_same():
    calibrated = run_record("pate", epsilon=0.9986, accuracy=0.79)
    better = run_record("dp_fermi", epsilon=1.0, accuracy=0.82)
    cheaper = run_record("dp_sgd", epsilon=0.9899, accuracy=0.79)
    found = frontier(points_of([calibrated, better, cheaper]))
    assert [point.method for point in found.members] == ["dp_fermi", "dp_sgd"]
    beaten = {pair for pair, found in dominance(points_of([calibrated, better, cheaper])).items() if found.share}
    assert beaten == {("dp_fermi", "pate"), ("dp_sgd", "pate")}


def test_the_reference_is_a_round_number_above_every_point():
    points = points_of(
        [run_record(epsilon=5.0, disparity=0.05), run_record(epsilon=math.inf, config={"x": 1}, disparity=0.12)]
    )
    assert reference_point(points).tolist() == pytest.approx([10.0, 0.2, 1.0, 1.0])


def test_every_seed_has_its_own_set_of_what_it_reached():
    points = points_of(
        [run_record(seed=0), run_record(seed=1, accuracy=None), run_record(seed=1, config={"x": 1}, accuracy=0.6)]
    )
    first, second = sets_by_seed(points, ("epsilon", "error"))
    assert first.tolist() == pytest.approx(np.array([[1.0, 0.2]]))
    assert second.tolist() == pytest.approx(np.array([[1.0, 0.4]]))


def test_noise_from_a_seed_is_found_wherever_it_is_set():
    seeded = {"noise": "seeded", "dp_sgd": {"epochs": 1}}
    of_an_earlier_version = {"aggregator": {"noise": "os_entropy"}, "dp_sgd": {"noise": "seeded"}}
    for config in (seeded, of_an_earlier_version):
        assert is_seeded(config)
        assert is_seeded(settings_of(config))
    assert not is_seeded({"noise": "os_entropy", "title": "seeded"})
    noisy, plain = points_of([run_record(config=seeded), run_record("sgd", config=seeded, epsilon=math.inf)])
    assert noisy.is_seeded
    assert not plain.is_seeded


@pytest.mark.parametrize("name", ["seed", "out", "ray", "storage", "data_dir", "block_size"])
def test_an_option_of_a_loader_is_a_setting_whatever_its_name(name):
    """Two configurations that differ in it alone are two points, and are not averaged as seeds of one."""
    configs = [{"seed": 0, "data": {"name": "own", "options": {name: value}}} for value in (1, 2)]
    first, second = points_of([run_record(config=config, accuracy=0.5 + k / 4) for k, config in enumerate(configs)])
    assert (first.settings[f"data.options.{name}"], second.settings[f"data.options.{name}"]) == (1, 2)
    assert [point.mean_O[2] for point in (first, second)] == pytest.approx([0.5, 0.25])


def test_settings_are_flat_and_know_no_place():
    config = {"seed": 3, "ray": {"num_cpus": 2}, "student": {"idp3": None, "hidden": [64]}, "empty": {}}
    assert settings_of(config) == {"student.idp3": None, "student.hidden": [64], "empty": {}}
