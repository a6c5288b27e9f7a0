"""An evaluation of eight records by hand, and what becomes of numbers that do not exist."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fairpate.fairness.rates import GroupCell
from fairpate.report.metrics import Evaluation, describe_cell, evaluate

pytestmark = pytest.mark.usefixtures("few_replicates", "remembered_digits")

LABELS = [0, 1, 0, 1, 1, 1, 0, 0]
GROUPS = [0, 0, 0, 1, 1, 1, 1, 1]
PREDICTED = [0, 1, 1, 1, -1, 1, 0, -1]
ANSWERED = [True, True, True, True, False, True, True, False]


def evaluation(**changes) -> Evaluation:
    arguments = {
        "predictions": PREDICTED,
        "labels_N": LABELS,
        "groups_N": GROUPS,
        "answered_N": ANSWERED,
        "class_names": ["no", "yes"],
        "group_names": ["red", "green"],
        "generator": np.random.default_rng(0),
        "num_replicates": 200,
    } | changes
    return evaluate(arguments.pop("predictions"), **arguments)


def test_numbers_worked_by_hand() -> None:
    measured = evaluation()
    assert (measured.num_records, measured.num_answered) == (8, 6)
    assert measured.coverage == 6 / 8
    assert measured.accuracy == pytest.approx(5 / 6)
    assert [(g.num_records, g.num_answered, g.coverage) for g in measured.groups] == [(3, 3, 1.0), (5, 3, 0.6)]
    assert [group.accuracy for group in measured.groups] == pytest.approx([2 / 3, 1.0])
    assert measured.confusion_GYC == (((1, 1), (0, 1)), ((1, 0), (0, 2)))
    assert measured.rates_GC == ((1 / 3, 2 / 3), (1 / 3, 2 / 3))
    assert measured.disparity == pytest.approx(0)
    assert measured.gaps["accuracy_parity"].value == pytest.approx(1 / 3)
    odds = measured.gaps["eo_full"]
    assert odds.value == pytest.approx(1 / 2)
    assert odds.where == "predicted no, given true no: green"
    assert odds.min_cell_size == 1


def test_the_most_common_class_and_what_is_degenerate_worked_by_hand() -> None:
    measured = evaluation()
    # Answered are records 0, 1, 2, 3, 5, 6 with labels 0, 1, 0, 1, 1, 0: three of each; five of them are right.
    assert (measured.majority_class, measured.majority_accuracy) == ("no", 3 / 6)
    assert measured.degenerate == ()
    everybody = evaluation(predictions=[1] * 8, answered_N=None, labels_N=[0, 1, 0, 1, 1, 1, 1, 0])
    assert (everybody.majority_class, everybody.majority_accuracy) == ("yes", 5 / 8)
    assert everybody.accuracy == 5 / 8
    assert everybody.disparity == 0
    assert everybody.degenerate == ("predicts 'yes' for every record",)
    plain = json.loads(json.dumps(everybody.to_json()))
    assert plain["majority_class"] == "yes"
    assert plain["majority_accuracy"] == 5 / 8
    assert plain["degenerate"] == ["predicts 'yes' for every record"]
    assert Evaluation.from_json(plain).degenerate == everybody.degenerate
    assert Evaluation.from_json(plain).to_json() == everybody.to_json()


GROUPED = [0] * 10 + [1] * 10 + [2] * 3


@pytest.mark.parametrize(
    ("predictions", "labels", "answered", "words"),
    [
        # Nobody is answered; and those who are get one class.
        ([0] * 23, [0] * 23, [False] * 23, ("answers no record",)),
        ([0] * 23, [0, 1] * 11 + [0], [True] * 22 + [False], ("predicts 'no' for every record that it answers",)),
        # All mass on one class is a constant too, half of it is not.
        ([[1.0, 0.0]] * 23, [0] * 20 + [1] * 3, None, ("predicts 'no' for every record",)),
        # One class per group: red no, green yes; the three blue ones are too few to be named. 13 of 23 are no.
        (
            [0] * 10 + [1] * 10 + [0] * 3,
            [0] * 7 + [1] * 10 + [0] * 6,
            None,
            ("predicts 'no' for every record of red", "predicts 'yes' for every record of green"),
        ),
        # A group without an answer; red is told apart.
        ([0, 1] * 5 + [0] * 13, [0, 1] * 5 + [0] * 13, [True] * 10 + [False] * 13, ("answers no record of green",)),
        # Right on 12 of 23 with 12 of the most common class: as often as a constant. One more is better.
        ([1, 0] * 11 + [1], [0] * 12 + [1] * 11, None, ("is right no more often than always predicting 'no'",)),
        ([0] * 11 + [1] * 9 + [0, 0, 1], [0] * 12 + [1] * 11, None, ()),
    ],
)
def test_degenerate_predictors_are_named(predictions, labels, answered, words) -> None:
    measured = evaluation(
        predictions=predictions,
        labels_N=labels,
        groups_N=GROUPED,
        answered_N=answered,
        group_names=["red", "green", "blue"],
        num_replicates=2,
    )
    assert measured.degenerate == words


def test_a_predictor_that_is_nearly_constant_is_named_unless_the_labels_are_too() -> None:
    def told(right: int, labels: list[int]) -> tuple[str, ...]:
        """``right`` of the records of class 1 are found, nobody else is predicted so; both groups have some."""
        predicted = [0] * 1000
        for place in range(right):
            predicted[place] = 1
        found = evaluation(
            predictions=predicted, labels_N=labels, groups_N=[0, 1] * 500, answered_N=None, num_replicates=2
        )
        return found.degenerate

    uneven, rare = [1] * 240 + [0] * 760, [1] * 12 + [0] * 988
    assert told(4, uneven) == ("predicts 'no' for 99.6 % of the records",)
    assert told(13, uneven) == ()
    assert told(8, rare) == ()  # 0.8 % are predicted so, and 1.2 % are


def table_of(*of_groups: Sequence[Sequence[float]], records: Sequence[int] | None = None) -> Evaluation:
    """An evaluation with these confusions, true labels by predicted ones, of as many groups; with more records than
    answers where ``records`` says so."""
    predicted, labels, groups = [], [], []
    for z, table in enumerate(of_groups):
        for y, row in enumerate(table):
            for k, number in enumerate(row):
                predicted += [k] * number
                labels += [y] * number
                groups += [z] * number
    answered = [True] * len(groups)
    for z, number in enumerate(records or ()):
        missing = number - groups.count(z)
        predicted, labels, answered = predicted + [0] * missing, labels + [0] * missing, answered + [False] * missing
        groups += [z] * missing
    names = ["red", "green", "blue"][: len(of_groups)]
    return evaluation(
        predictions=predicted,
        labels_N=labels,
        groups_N=groups,
        answered_N=answered,
        group_names=names,
        num_replicates=2,
    )


def test_a_model_that_hardly_answers_is_named_and_so_is_one_that_hardly_answers_a_group() -> None:
    right = [[5, 1], [1, 5]]
    assert table_of(right, right, records=[240, 240]).degenerate == ()  # 5.0 %
    assert table_of(right, right, records=[300, 300]).degenerate == ("answers 4.0 % of the records",)
    assert table_of(right, [[50, 10], [10, 50]], records=[300, 120]).degenerate == ("answers 12 of 300 records of red",)
    # Nine records tell nothing of a group.
    assert table_of([[0, 0], [0, 0]], right, records=[9, 12]).degenerate == ()


def test_nearly_one_class_for_a_group_is_named_unless_its_labels_are_too() -> None:
    told_apart, nearly = [[150, 50], [50, 150]], [[699, 1], [299, 1]]
    words = ("predicts 'no' for 99.8 % of the records of green",)
    assert table_of(told_apart, nearly).degenerate == words
    assert table_of(told_apart, told_apart, nearly).degenerate == (words[0].replace("green", "blue"),)
    assert table_of(told_apart, [[985, 2], [8, 5]]).degenerate == ()  # .7 % are predicted so, and 1.3 % are
    # Said of everyone, it is not said again of each group.
    assert table_of(nearly, nearly).degenerate == ("predicts 'no' for 99.8 % of the records",)


def test_one_class_for_a_group_that_has_just_that_class_is_right() -> None:
    told_apart = [[40, 10], [10, 40]]
    assert table_of(told_apart, [[60, 0], [0, 0]]).degenerate == ()
    assert table_of([[60, 0], [0, 0]], [[0, 0], [0, 60]]).degenerate == (), "each group its own: the gap is true"
    # Of 60 with 2 others a model at their own rates names none in .966^60 = .13 of cases; with 3 in .05.
    words = ("predicts 'no' for every record of green",)
    assert table_of(told_apart, [[58, 0], [2, 0]]).degenerate == ()
    assert table_of(told_apart, [[57, 0], [3, 0]]).degenerate == words
    assert table_of(told_apart, [[0, 0], [60, 0]]).degenerate[1:] == words, "one class, and the wrong one"
    # A single class for everyone tells nothing, whatever the labels are.
    assert table_of([[60, 0], [0, 0]], [[60, 0], [0, 0]]).degenerate == ("predicts 'no' for every record",)


def test_records_that_probabilities_count_are_whole() -> None:
    told_apart, drawn = [[40.0, 10.0], [10.0, 40.0]], [[57.0, 0.0], [3 - 1e-6, 0.0]]
    measured = table_of([[40, 10], [10, 40]], [[57, 0], [3, 0]])
    confusion_GYC = tuple(tuple(map(tuple, table)) for table in (told_apart, drawn))
    assert replace(measured, confusion_GYC=confusion_GYC).degenerate == measured.degenerate != ()


def test_a_group_that_a_constant_would_serve_better_is_named() -> None:
    """Of green 900 of 1,000 are no: the model loses 80 of these and finds 20 others, 60 > 2 sqrt(100)."""
    red, green = [[400, 100], [100, 400]], [[820, 80], [80, 20]]
    measured = table_of(red, green)
    assert measured.underserved == ("is right about 84.0 % of green, always predicting 'no' about 90.0 %",)
    assert measured.degenerate == ()  # 1,640 of 2,000 are right, of which 1,400 are no
    assert measured.group_majorities == (0.5, 0.9)
    # By chance: 50 lost and 40 found, 10 <= 2 sqrt(90).
    assert table_of(red, [[850, 50], [60, 40]]).underserved == ()


def test_groups_without_an_answer_are_said_to_be_left_out() -> None:
    right, nobody = [[50, 10], [10, 50]], [[0, 0], [0, 0]]
    measured = table_of(right, nobody, right)
    assert measured.not_measured == ("green",)
    assert measured.gaps["dp_one_vs_rest"].n_undefined > 0
    assert table_of(right, right).not_measured == ()
    assert evaluation(answered_N=[False] * 8).not_measured == ()


def test_without_an_answer_there_is_no_baseline() -> None:
    nobody = evaluation(answered_N=[False] * 8)
    assert nobody.majority_class is None
    assert math.isnan(nobody.majority_accuracy)
    assert nobody.to_json()["majority_accuracy"] is None


def test_every_notion_is_recorded_with_its_interval_and_null_where_it_is_undefined() -> None:
    measured = evaluation()
    # Answered: red (0, 0), (1, 1), (0, 1) as true and predicted; green (1, 1), (1, 1), (0, 0).
    by_hand = {
        "demographic_parity": 0,
        "equalized_odds": 1 / 2,
        "equal_opportunity": 0,
        "accuracy_parity": 1 / 3,
        "impact_ratio": 0,
        "false_negative_rate": 0,
        "false_positive_rate": 1 / 3,
        "false_discovery_rate": 1 / 4,
    }
    found = measured.fairness
    assert {name: found[name]["value"] for name in found} == pytest.approx(by_hand)
    assert all(each["low"] <= each["value"] <= each["high"] for each in found.values())
    nobody = evaluation(answered_N=[False] * 8)
    assert nobody.fairness == {name: dict.fromkeys(("value", "low", "high", "fair_from")) for name in by_hand}
    # The smallest cells by hand, and 3 / n; half of the records and more have to be answered.
    smallest = {"demographic_parity": 3, "equalized_odds": 1, "false_negative_rate": 3, "false_positive_rate": 3}
    assert {name: found[name]["fair_from"] for name in smallest} == {name: 3 / n for name, n in smallest.items()}
    few = evaluation(answered_N=[True] * 3 + [False] * 5)
    assert all(each["fair_from"] is None for each in few.fairness.values())


def test_intervals_hold_the_value_of_a_clear_gap() -> None:
    random = np.random.default_rng(1)
    groups = np.repeat([0, 1], 500)
    predictions = (random.random(1000) < np.where(groups == 0, 0.2, 0.6)).astype(int)
    measured = evaluation(predictions=predictions, labels_N=predictions, groups_N=groups, answered_N=None)
    gap = measured.gaps["dp_pairwise"]
    assert gap.low < gap.value < gap.high
    assert gap.high - gap.low < 0.15


def test_probabilities_are_measured_by_expectation() -> None:
    probabilities = np.array([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5], [0.0, 1.0]])
    measured = evaluation(predictions=probabilities, labels_N=[0, 1, 0, 1], groups_N=[0, 0, 1, 1], answered_N=None)
    assert measured.accuracy == pytest.approx((0.9 + 0.8 + 0.5 + 1.0) / 4)
    assert measured.disparity == pytest.approx(0.75 - 0.45)


def test_undefined_numbers_are_null_in_json_and_nan_after_reading() -> None:
    measured = evaluation(answered_N=[True] * 3 + [False] * 5, group_names=["red", "green", "blue"])
    plain = json.loads(json.dumps(measured.to_json(), allow_nan=False))
    assert plain["gaps"]["dp_one_vs_rest"]["value"] is None
    assert plain["gaps"]["dp_one_vs_rest"]["where"] == "undefined"
    assert plain["groups"][1]["accuracy"] is None
    assert plain["groups"][1]["coverage"] == 0
    assert plain["groups"][2]["coverage"] is None
    assert plain["rates_GC"][2] == [None, None]
    restored = Evaluation.from_json(plain)
    assert math.isnan(restored.disparity)
    assert restored.to_json() == plain


def test_nothing_answered_is_undefined_throughout() -> None:
    measured = evaluation(answered_N=[False] * 8)
    assert measured.coverage == 0
    assert math.isnan(measured.accuracy)
    assert all(math.isnan(gap.value) for gap in measured.gaps.values())


def test_json_survives_a_round_trip() -> None:
    measured = evaluation()
    assert Evaluation.from_json(json.loads(json.dumps(measured.to_json()))) == measured


def test_cells_are_told_in_words() -> None:
    names = {"group_names": ["red", "green"], "class_names": ["no", "yes"]}
    assert describe_cell(GroupCell(group=0, other_group=1, label=1), **names) == "predicted yes: red against green"
    missed = GroupCell(group=1, label=1, given_label=0, given_is=False)
    assert describe_cell(missed, **names) == "predicted yes, given true not no: green"
    assert describe_cell(GroupCell(group=0, other_group=1), **names) == "correct: red against green"
    assert describe_cell(GroupCell(label=1), **names) == "predicted yes"


def test_an_interval_holds_the_gap_that_it_is_of():
    """Equal rates in four groups of 25: the largest gap of any resample is above 0."""
    groups, predicted = np.repeat(range(4), 25), np.tile([0, 0, 1, 1, 1], 20)
    found = evaluate(
        predicted,
        labels_N=predicted,
        groups_N=groups,
        class_names=["no", "yes"],
        group_names=["a", "b", "c", "d"],
        generator=np.random.default_rng(0),
    )
    gap = found.gaps["dp_one_vs_rest"]
    assert gap.value == gap.low == 0
    assert gap.high > 0.05
