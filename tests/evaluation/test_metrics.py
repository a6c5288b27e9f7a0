"""An evaluation of eight records by hand, and what becomes of numbers that do not exist."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from fairpate.evaluation.metrics import Evaluation, describe_cell, evaluate
from fairpate.fairness.gaps import Cell

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
    assert describe_cell(Cell(group=0, other_group=1, label=1), **names) == "predicted yes: red against green"
    missed = Cell(group=1, label=1, given_label=0, given_is=False)
    assert describe_cell(missed, **names) == "predicted yes, given true not no: green"
    assert describe_cell(Cell(group=0, other_group=1), **names) == "correct: red against green"
    assert describe_cell(Cell(label=1), **names) == "predicted yes"
