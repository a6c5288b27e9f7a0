"""Choices on a frontier against hand-made tables."""

from __future__ import annotations

import dataclasses
import math

import pytest
from run_records import run_record

from fairpate.report.frontier import SelectionRule, best_error, by_panel, left_out_by, points_of, rounded_up, select
from fairpate.report.frontier_page import ranked
from fairpate.run.specify import Demand, achievable, offer, transfer


def run(name, epsilon, disparity, accuracy, coverage=1.0, *, seed=0, data="adult", method="pate"):
    measured = {"epsilon": epsilon, "disparity": disparity, "accuracy": accuracy, "coverage": coverage}
    return run_record(method, data, seed, config={"name": name, "data": {"name": data}}, **measured)


def points(*runs):
    return points_of(list(runs))


def name_of(point):
    return point.settings["name"]


TABLE = points(
    run("private", 1.0, 0.20, 0.75),
    run("middle", 2.0, 0.05, 0.80),
    run("fair", 5.0, 0.010, 0.78),
    run("almost as fair", 5.0, 0.014, 0.79),
    run("accurate", 10.0, 0.20, 0.88),
    run("constant", 0.1, 0.0, 0.10),
    run("silent", 0.1, 0.0, 0.99, 0.05),
    run("undefined", 0.1, None, 0.99),
)


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [("fair", "almost as fair"), ("private", "private"), ("accurate", "accurate")],
)
def test_the_three_settings(setting, chosen):
    rule = SelectionRule()
    found = select(TABLE, setting, rule=rule, best_error=best_error(TABLE[:5], rule))
    assert name_of(found) == chosen


def test_a_degenerate_predictor_meets_a_demand_behind_all_others():
    def degenerate(name, accuracy, *words):
        record = run(name, 1.0, 0.0, accuracy)
        return dataclasses.replace(record, degenerate=words, majority_accuracy=0.76)

    constant = degenerate("constant", 0.76, "predicts 'no' for every record")
    found = points(constant, run("useful", 1.0, 0.04, 0.75), run("far", 1.0, 0.2, 0.9))
    offered = achievable(found, Demand(disparity=0.05))
    assert [name_of(offer.point) for offer in offered.met] == ["useful", "constant"]
    assert offered.num_degenerate == 1
    nearest = achievable(found, Demand(disparity=0.0, accuracy=0.8)).nearest
    assert [name_of(offer.point) for offer in nearest][-1] == "constant"
    assert left_out_by(found[:1], rule=SelectionRule(), best_error=0.1) == {"degenerate"}


def test_thresholds_decide_who_takes_part():
    loose = SelectionRule(min_coverage=0.0, max_accuracy_loss=1.0, tolerance={})
    assert name_of(select(TABLE, "fair", rule=loose, best_error=0.0)) == "silent"
    strict = SelectionRule(tolerance={})
    assert name_of(select(TABLE, "fair", rule=strict, best_error=0.12)) == "fair"
    assert select(TABLE, "fair", rule=SelectionRule(max_accuracy_loss=0.0), best_error=0.0) is None
    with pytest.raises(ValueError, match="min_coverage"):
        SelectionRule(min_coverage=2)


def test_the_best_accuracy_is_that_of_who_answers_enough():
    assert best_error(TABLE[:7], SelectionRule()) == pytest.approx(0.12)
    assert best_error(TABLE[6:7], SelectionRule()) == math.inf


def test_what_promises_nothing_sets_no_bar_for_what_does():
    plain = run("plain", math.inf, 0.2, 0.98)
    private = run("private", 1.0, 0.2, 0.80)
    assert best_error(points(plain, private), SelectionRule()) == pytest.approx(0.20)
    assert best_error(points(plain), SelectionRule()) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("accuracies_and_coverages", "thresholds"),
    [
        ([(0.5, 1.0), (0.8, 0.6)], set()),
        ([(0.5, 1.0), (0.4, 0.2)], {"accuracy"}),
        ([(0.9, 0.5), (0.4, 0.2)], {"coverage"}),
        ([(0.4, 1.0), (0.9, 0.2)], {"accuracy", "coverage"}),
        ([(None, 1.0)], {"definition"}),
    ],
)
def test_who_is_left_out_is_told_by_which_threshold(accuracies_and_coverages, thresholds):
    found = points(*[run(str(n), 1.0, 0.1, *values) for n, values in enumerate(accuracies_and_coverages)])
    rule = SelectionRule(min_coverage=0.6, max_accuracy_loss=0.15)
    assert left_out_by(found, rule=rule, best_error=0.1) == thresholds
    assert (select(found, "fair", rule=rule, best_error=0.1) is None) == bool(thresholds)


def test_epsilons_are_level_as_they_are_promised():
    # .9899 is guaranteed as .99, no further than the tolerance of .01 from 1.
    found = points(run("calibrated", 0.9899, 0.1, 0.75), run("better", 0.99998, 0.1, 0.80))
    assert name_of(select(found, "private", rule=SelectionRule(), best_error=0.2)) == "better"


def test_a_demand_that_is_met_is_answered_by_accuracy():
    found = achievable(TABLE, Demand(epsilon=5, disparity=0.05, coverage=0.9))
    assert [name_of(o.point) for o in found.met] == ["middle", "almost as fair", "fair", "constant"]
    assert found.nearest == ()
    assert found.num_undefined == 1
    assert found.num_points == len(TABLE)


def test_a_demand_at_exactly_the_measured_value_is_met():
    (point,) = points(run("a", 3.0, 0.05, 0.7, 0.9))
    assert offer(point, Demand(epsilon=3.0, disparity=0.05, coverage=0.9, accuracy=0.7)).missed == {}


def test_the_nearest_is_that_with_the_smallest_largest_excess():
    demand = Demand(epsilon=1.0, disparity=0.05, accuracy=0.8, coverage=0.9)
    found = achievable(TABLE, demand)
    assert found.met == ()
    assert achievable(TABLE, demand, num_nearest=1).nearest == found.nearest[:1]
    assert [name_of(near.point) for near in found.nearest] == ["constant", "silent", "middle"]
    assert [near.missed for near in found.nearest] == [
        pytest.approx({"accuracy": 0.7 / 0.8}),
        pytest.approx({"coverage": 0.85 / 0.9}),
        pytest.approx({"epsilon": 1.0}),
    ]
    assert found.nearest[0].distance == pytest.approx(0.875)


def test_of_what_misses_one_demand_alike_the_nearest_misses_least_of_the_others():
    # Both are guaranteed at 1.00 and miss .5 by as much: the slack of a calibration decides nothing.
    table = points(run("unfair", 0.9993, 0.099, 0.95), run("fair", 0.99995, 0.05001, 0.68, 0.8))
    found = achievable(table, Demand(epsilon=0.5, disparity=0.05, coverage=0.9))
    assert [name_of(near.point) for near in found.nearest] == ["fair", "unfair"]
    assert [near.distance for near in found.nearest] == pytest.approx([1.0, 1.0])


def test_of_equal_misses_the_more_accurate_comes_first():
    table = points(run("less", 0.9993, 0.02, 0.6), run("more", 0.99995, 0.04, 0.7))
    found = achievable(table, Demand(epsilon=0.5, disparity=0.05))
    assert [name_of(near.point) for near in found.nearest] == ["more", "less"]


def test_an_epsilon_that_meets_a_finer_demand_than_hundredths_is_not_rounded_out_of_it():
    (point,) = points(run("a", 0.9946, 0.1, 0.8))
    assert offer(point, Demand(epsilon=0.995)).missed == {}
    assert offer(point, Demand(epsilon=0.8)).missed == pytest.approx({"epsilon": 0.25})


def test_only_points_of_the_frontier_are_nearest():
    table = points(run("good", 2.0, 0.1, 0.8), run("worse", 2.0, 0.1, 0.7))
    found = achievable(table, Demand(epsilon=1.0))
    assert [name_of(o.point) for o in found.nearest] == ["good"]


def test_a_demand_of_no_disparity_counts_in_hundredths():
    (point,) = points(run("a", 1.0, 0.02, 0.8))
    assert offer(point, Demand(disparity=0.0)).distance == pytest.approx(2.0)


def test_seeds_are_counted_that_meet_the_demand_themselves():
    (point,) = points(run("a", 1.0, 0.04, 0.8), run("a", 1.0, 0.06, 0.8, seed=1), run("a", 1.0, 0.02, 0.8, seed=2))
    found = offer(point, Demand(disparity=0.05))
    assert found.missed == {}
    assert found.seeds_met == 2


@pytest.mark.parametrize("limits", [{"epsilon": -1}, {"disparity": 1.2}, {"coverage": math.nan}, {"accuracy": -0.1}])
def test_impossible_demands_are_refused(limits):
    with pytest.raises(ValueError, match=next(iter(limits))):
        Demand(**limits)


SOURCE = points(run("x", 1.0, 0.04, 0.80), run("y", 1.0, 0.05, 0.75), run("z", 9.0, 0.3, 0.9))
TARGET = points(
    run("x", 1.0, 0.05, 0.70, data="credit_default"),
    run("y", 1.0, 0.02, 0.78, data="credit_default"),
    run("z", 9.0, 0.3, 0.9, data="credit_default"),
)


def test_the_regret_of_a_choice_made_elsewhere():
    moved = transfer(SOURCE, TARGET, Demand(epsilon=1.0, disparity=0.05))
    assert [name_of(o.point) for o in (moved.chosen, moved.there, moved.best)] == ["x", "x", "y"]
    assert moved.regret == pytest.approx(0.08)


def test_no_regret_is_stated_where_the_choice_misses_the_demand_there():
    moved = transfer(SOURCE, TARGET, Demand(epsilon=1.0, disparity=0.04))
    assert moved.there.missed
    assert math.isnan(moved.regret)


def test_a_configuration_that_was_not_run_there_has_no_image():
    moved = transfer(SOURCE, TARGET[1:], Demand(epsilon=1.0, disparity=0.05))
    assert moved.there is None
    assert math.isnan(moved.regret)


def test_the_regret_of_a_whole_frontier_is_lost_hypervolume():
    # All three are on the source's frontier but y, which x dominates; on the target y covers what x does not.
    whole = transfer(SOURCE, TARGET, Demand(epsilon=1.0))
    assert whole.num_members == 2
    assert whole.num_missing == 0
    # Against (10, .5, 1, 1): x covers 9 * .45 * .7, y 9 * .48 * .78 and all of x; z adds 1 * .2 * its lead.
    assert whole.hypervolume_transferred == pytest.approx(9 * 0.45 * 0.7 + 0.2 * 0.2)
    assert whole.hypervolume_own == pytest.approx(9 * 0.48 * 0.78 + 0.2 * 0.12)
    assert whole.regret_hypervolume == pytest.approx(1 - whole.hypervolume_transferred / whole.hypervolume_own)


@pytest.mark.parametrize("epsilon", [1, 3, 10])
@pytest.mark.parametrize("disparity", [0.0, 0.02, 0.1, 0.3])
def test_the_page_offers_what_the_terminal_offers(comparison, epsilon, disparity):
    """The first of the ranked points within both limits is the first that `specify` finds, where it recommends any."""
    records = [(row.record, row.command) for row in comparison() if row.record is not None]
    points = points_of([record for record, _ in records], commands=[command for _, command in records])
    for found in by_panel(points).values():
        kept = [
            point
            for point in ranked(found)
            if rounded_up(point.value("epsilon")) <= epsilon and point.value("disparity") <= disparity
        ]
        met = [each.point for each in achievable(found, Demand(epsilon=epsilon, disparity=disparity)).met]
        assert kept == [point for point in met if not point.degenerate]


def test_no_point_is_offered_whose_gap_says_too_little():
    one = TABLE[0]
    assert ranked([one]) == [one]
    assert ranked([dataclasses.replace(one, degenerate=("it says one class",))]) == []
    assert ranked([dataclasses.replace(one, epsilon_is_data_dependent=True)]) == []
    assert ranked([dataclasses.replace(one, groups=dataclasses.replace(one.groups, unmeasured={"few": 1}))]) == []
    assert name_of(ranked(TABLE)[0]) == "silent"  # coverage is no limit here: accuracy decides
