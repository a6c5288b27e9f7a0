"""No public number rests on a cell of fewer records than the least size, and none of them shows the size of one.

The attacker of these tests knows how many test records there are and everything that is published of them, as linear
equations over whole counts, that a group without a number has 1 to 9 records, and the seed of what was drawn. A cell is
safe if its size has at least ``FEWEST`` solutions.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from report_pages import GUARANTEE
from scipy.optimize import Bounds, LinearConstraint, milp

from fairpate.config import EvaluationConfig
from fairpate.report.metrics import Evaluation, evaluate
from fairpate.report.records import RunStatement, small_cell_words, smallest_count_words
from fairpate.report.reject_option import reject_option_spread
from fairpate.report.run_page import answered_words
from fairpate.report.small_cells import shown_records
from fairpate.run.private_metrics import assess
from fairpate.types import GateRule

pytestmark = pytest.mark.usefixtures("few_replicates", "remembered_digits")

LEAST = 10
FEWEST = 4
GROUPS = ("women", "men", "children")


def stated(found: Evaluation) -> RunStatement:
    return RunStatement(guarantee=GUARANTEE, measured=found)


def evaluation(table_GYC: Any, *, least: int = LEAST, **changes: Any) -> Evaluation:
    """Of as many records as ``table_GYC[z][y][k]`` says."""
    table = np.asarray(table_GYC)
    groups, labels, predicted = (np.repeat(place, table.ravel()) for place in np.indices(table.shape).reshape(3, -1))
    order = np.random.default_rng(1).permutation(len(groups))
    return evaluate(
        predicted[order],
        labels_N=labels[order],
        groups_N=groups[order],
        class_names=[f"class {k}" for k in range(table.shape[1])],
        generator=np.random.default_rng(0),
        least_cell=least,
        **{"num_replicates": 50, "group_names": GROUPS[: len(table)], **changes},
    )


FOUR = [[[80, 20], [20, 80]], [[78, 22], [22, 78]], [[0, 2], [0, 2]]]
"""Of two groups alike, and four children who are all predicted class 1."""


def test_four_records_decide_no_verdict_and_are_in_no_number() -> None:
    """Predicted class 1: 100 of 200 women and men each, 4 of 4 children; with the children a gap of 1/2."""
    full = evaluation(FOUR, least=1)
    assert full.disparity == pytest.approx(0.5)
    found = evaluation(FOUR)
    assert found.disparity == pytest.approx(0, abs=0.02)
    assert found.not_measured == ("children",)
    assert answered_words(found) == "all test records of groups that are large enough"
    assert answered_words(full) == "all test records"
    children = found.to_json()["groups"][2]
    assert children == {"name": "children", **dict.fromkeys(("num_records", "num_answered", "coverage", "accuracy"))}
    assert found.confusion_GYC[2] is None
    assert found.confusion_GYC[0] is not None
    assert Evaluation.from_json(json.loads(json.dumps(found.to_json()))).to_json() == found.to_json()


def test_the_verdict_names_who_is_measured_and_who_is_not() -> None:
    table = 10 * np.array(FOUR)
    table[2] = [[0, 2], [0, 2]]
    found = evaluation(table, num_replicates=200)
    said = stated(found)
    assert stated(found).fairness == "fair among some"
    assert "; fair among women and men; not known for children. " in said.line
    assert (said.figures[1].word, said.figures[1].mood) == (
        "Fair among women and men; not known for children",
        "doubtful",
    )
    assert stated(evaluation(table[:2], num_replicates=200)).fairness == "fair"


def test_what_is_left_out_holds_the_least_size_at_least() -> None:
    """Of 404 records 4 are children: 6 more are left out, so that the total tells nothing of the children."""
    found = evaluation(FOUR)
    assert found.num_records == 404 - LEAST
    assert sum(group.num_records or 0 for group in found.groups) == 404 - LEAST
    # Nine children and nothing else is left out that is large enough.
    enough = [*FOUR[:2], [[5, 0], [0, 5]]]
    assert evaluation(enough).num_records == 410
    few = evaluation([[[3, 0], [0, 3]], [[4, 0], [0, 4]]])
    assert (few.num_records, few.is_measured, few.not_measured) == (0, False, ("women", "men"))
    assert stated(few).line.endswith("is unknown: no group has enough test records.")


def test_two_small_groups_do_not_follow_from_what_they_leave_out_together() -> None:
    """Two groups of nine leave out 20 records, as two of one do: 18 would say nine and nine."""
    large = [[[80, 20], [20, 80]]]
    nines, ones = ([*large, [[size, 0], [0, 0]], [[size, 0], [0, 0]]] for size in (9, 1))
    assert evaluation(nines).num_records == 218 - 2 * LEAST
    assert evaluation(ones).num_records == 202 - 2 * LEAST


def test_a_group_that_one_of_two_evaluations_leaves_out_does_not_uncover_another() -> None:
    """Of 90 women 5 are answered and of 4 children all: that 90 women are there is published without refusals."""
    groups = np.repeat([0, 1, 2], [200, 90, 4])
    answered = (groups != 1) | (np.cumsum(groups == 1) <= 5)

    def kept(of: Any, apart: Any = None) -> Any:
        return shown_records(groups, of, least=LEAST, num_groups=3, apart_N=apart).kept_N

    with_refusals, without = kept(answered), kept(np.ones(294, dtype=np.bool_), ~answered)
    assert (with_refusals.sum(), without.sum()) == (294 - 90 - LEAST, 294 - LEAST)


def test_no_interval_tells_which_of_the_tables_that_fit_it_is() -> None:
    """Women have 7 of class 1; tables with 1, 3, 5 and 9 have the same numbers, and the same seed."""
    plain = evaluation([[[150, 20], [4, 3]], [[80, 30], [20, 70]]]).to_json()
    assert plain["confusion_GYC"] == [None, None]
    for moved in (-3, -2, -1, 1):
        table = [
            [[150 - moved, 20 - moved], [4 + moved, 3 + moved]],
            [[80 + moved, 30 + moved], [20 - moved, 70 - moved]],
        ]
        assert evaluation(table).to_json() == plain


def test_a_model_without_false_negatives_shows_no_accuracy_by_group() -> None:
    """Then who is of class 1 follows: women have 4."""
    found = evaluation([[[80, 20], [0, 4]], [[70, 20], [0, 90]]])
    assert np.isnan([group.accuracy for group in found.groups]).all()
    assert np.isnan(found.gaps["accuracy_parity"].value)
    assert found.accuracy == pytest.approx(244 / 284)


def test_a_model_of_few_errors_shows_no_accuracy_where_a_class_is_small() -> None:
    """A model that is always right predicts each group's labels: so it predicts class 1 for four women."""
    found = evaluation([[[80, 0], [0, 4]], [[70, 0], [0, 90]]])
    assert np.isnan(found.disparity)
    assert np.isnan(found.rates_GC).all()
    # That all predictions are right tells nothing of how they divide.
    assert (found.accuracy, found.majority_accuracy) == (1, pytest.approx(150 / 244))
    assert (found.gaps["false_negative_rate"].value, found.groups[0].accuracy) == (0, 1)


@pytest.mark.parametrize("errors", [4, 30])
def test_no_order_shows_an_accuracy_that_the_headline_hides(errors: int) -> None:
    """A student that may refuse, of one group: how many of it are predicted wrongly follows from its accuracy."""
    table = np.array([[[80, errors], [0, 90]], [[0, 0], [0, 0]]])
    groups, labels, predicted = (np.repeat(place, table.ravel()) for place in np.indices(table.shape).reshape(3, -1))
    answered = np.ones(len(groups), dtype=bool)
    prediction = SimpleNamespace(labels=predicted, answered=answered, probabilities_NC=np.eye(2)[predicted])
    student: Any = SimpleNamespace(
        card=SimpleNamespace(answers=None, idp3=GateRule(max_disparity=0.9, min_count=1000), is_randomised=False),
        predict=lambda *_, **__: prediction,
    )
    test = SimpleNamespace(x=None, y=torch.tensor(labels), z=torch.tensor(groups), person_N=None)
    test = type("Split", (SimpleNamespace,), {"__len__": lambda self: len(self.y)})(**vars(test))
    dataset: Any = SimpleNamespace(
        test=test, label_names=("no", "yes"), group_names=GROUPS[:2], num_groups=2, num_classes=2
    )
    metrics = assess(student, dataset, EvaluationConfig(least_cell=LEAST), seed=0).to_json()
    shown = [metrics["accuracy"], *(metrics["orders"]["accuracy"][name] for name in ("mean", "low", "high"))]
    shown += [order["accuracy"] for order in metrics["orders"]["orders"]]
    assert {value is None for value in shown} == {errors < LEAST}


def test_what_few_records_hide_of_one_group_is_shown_of_the_others() -> None:
    """Class 1 is predicted for nine elders: the others are compared, and the verdict names them."""
    alike = [[300, 100], [100, 300]]
    table = [*[alike] * 3, [[60, 5], [10, 4]]]
    found = evaluation(table, num_replicates=200, group_names=(*GROUPS, "elders"))
    gap = found.measured("demographic_parity")
    assert (gap.value, gap.left_out) == (pytest.approx(0), ("elders",))
    assert found.rates_GC[0] == (0.5, 0.5)
    assert np.isnan(found.rates_GC[3]).all()
    said = stated(found)
    assert said.fairness_words == "fair among women, men and children; not known for elders"
    assert "rates of predictions and their gaps of elders" in small_cell_words(found)
    assert found.fairness["demographic_parity"]["value"] is None  # a comparison would rank fewer groups


def test_gaps_of_many_classes_are_shown_where_confusions_are_few() -> None:
    """Each class of two groups has 40 right predictions and 12 wrong ones, two of each other class."""
    table = np.array([2 + 38 * np.eye(7, dtype=int)] * 2)
    found = evaluation(table, num_replicates=50)
    assert found.confusion_GYC == (None, None)
    assert np.isnan(found.gaps["eo_full"].value)
    gap = found.gaps["eo_lowy"]
    assert (gap.value, gap.left_out, gap.min_cell_size) == (0, (), 52)
    assert 0 <= gap.low <= gap.value < gap.high < 0.5
    # Which other class is predicted is in no number: one confusion more and one less of a cycle change nothing.
    cycle = np.zeros((7, 7), dtype=int)
    cycle[[0, 1, 2], [1, 2, 0]], cycle[[1, 2, 0], [0, 1, 2]] = 1, -1
    assert evaluation(table + np.array([cycle, -cycle]), num_replicates=50).to_json() == found.to_json()


def test_a_small_class_of_one_group_hides_the_class_counts_of_all() -> None:
    found = evaluation([[[80, 20], [20, 80]], [[180, 16], [1, 3]]])
    assert found.not_measured == ()
    assert found.confusion_GYC == (None, None)
    for name in ("eo_lowy", "eo_full", "equal_opportunity"):
        assert np.isnan(found.gaps[name].value)
        assert found.gaps[name].min_cell_size == 0
    assert found.to_json()["ermi_given_label"] is None
    assert found.fairness["equalized_odds"] == dict.fromkeys(("value", "low", "high", "fair_from"))
    assert found.disparity == pytest.approx(0.5 - 19 / 200)
    assert (found.majority_class, found.majority_accuracy) == ("class 0", pytest.approx(296 / 400))


def test_the_gap_of_a_model_that_is_always_right_is_that_of_the_labels() -> None:
    """Class 1 has 20 of 100 women and 60 of 100 men; of two classes a small cell would follow, of three hardly."""
    found = evaluation([[[60, 20], [10, 10]], [[20, 20], [10, 50]]])
    assert found.perfect_gap == pytest.approx(0.4)
    gap = stated(found).figures[1].details
    assert any("always right would have a gap of 0.400:" in words for words in gap)
    assert np.isnan(evaluation([[[80, 10], [5, 4]], [[20, 20], [10, 50]]]).perfect_gap)
    three = np.zeros((2, 3, 3))
    three[:, range(3), range(3)] = [[180, 12, 12], [44, 40, 26]]
    three[:, 0, 1] = 1
    assert evaluation(three.astype(int)).perfect_gap == pytest.approx(0.4)
    assert any("gap of 0.4 or more:" in words for words in stated(evaluation(three.astype(int))).figures[1].details)


def test_persons_count_and_not_their_records() -> None:
    """Twelve records of four children are four."""
    groups, answered = np.repeat([0, 1], [40, 12]), np.ones(52, dtype=np.bool_)
    persons = np.r_[np.arange(40), 40 + np.arange(12) // 3]
    shown = shown_records(groups, answered, least=10, num_groups=2, persons_N=persons)
    assert shown.small_G.tolist() == [False, True]
    assert len(np.unique(persons[~shown.kept_N])) == 10
    assert shown_records(groups, answered, least=10, num_groups=2).small_G.tolist() == [False, False]


def test_the_records_that_one_of_two_evaluations_leaves_out_are_a_cell_too() -> None:
    """Three of 40 women are refused: with and without them together tell of the three."""
    groups, answered = np.repeat([0, 1], 40), np.ones(80, dtype=np.bool_)
    apart = np.arange(80) < 3
    shown = shown_records(groups, answered, least=10, num_groups=2, apart_N=apart)
    assert shown.small_G.tolist() == [True, False]


def test_a_class_that_is_predicted_for_few_of_a_group_hides_what_is_predicted() -> None:
    """Class 1 is predicted for 9 of 200 men: with two groups and their sizes one rate, or a gap, would tell."""
    found = evaluation([[[80, 20], [20, 80]], [[180, 6], [11, 3]]])
    assert found.rates_GC[0] == (0.5, 0.5)
    assert np.isnan(found.rates_GC[1]).all()
    assert np.isnan(found.disparity)
    assert np.isnan([found.measured(name).value for name in ("demographic_parity", "impact_ratio")]).all()
    assert found.to_json()["ermi"] is None
    assert found.accuracy == pytest.approx(343 / 400)
    assert stated(found).fairness == "unknown"
    assert evaluation([[[80, 20], [20, 80]], [[176, 10], [11, 13]]]).disparity == pytest.approx(0.5 - 23 / 210)


def test_three_false_alarms_show_no_confusion_table_and_no_gap_given_a_label() -> None:
    """Every group, label and prediction has ten records; women of class 0 that are predicted class 1 are three.

    Of two classes they follow from predictions, labels and accuracy, and another model's table shows the labels.
    """
    found = evaluation([[[97, 3], [20, 80]], [[70, 30], [20, 80]]])
    assert found.confusion_GYC == (None, None)
    assert np.isnan([found.gaps[name].value for name in BY_BOTH]).all()
    assert np.isnan(found.group_majorities).all()
    assert found.disparity == pytest.approx(110 / 200 - 83 / 200)
    assert np.isnan([*(group.accuracy for group in found.groups), found.gaps["accuracy_parity"].value]).all()
    assert found.accuracy == pytest.approx(327 / 400)
    assert found.gaps["false_positive_rate"].value == pytest.approx(33 / 200)


def test_which_groups_are_served_worse_than_by_a_constant_follows_from_what_is_shown() -> None:
    """In one group one record more of each cell of a true label, in the other one less: predictions and the numbers of
    right ones stay, and so does every number that is published if a cell is small."""
    random, pairs = np.random.default_rng(5), 0
    step = np.array([[[-1, -1], [1, 1]], [[1, 1], [-1, -1]]])
    for _ in range(24):
        # Women are served badly, and few of them are of class 1.
        women = [[random.integers(5, 40), random.integers(10, 40)], random.integers(1, 6, size=2)]
        table = np.array([women, random.integers(10, 60, size=(2, 2))])
        one = evaluation(table, num_replicates=2).to_json()
        if one["confusion_GYC"] != [None, None]:
            continue
        other = evaluation(table + step, num_replicates=2).to_json()
        words = ("underserved", "underserved_groups", "degenerate")
        numbers = [{name: each[name] for name in each if name not in words} for each in (one, other)]
        if numbers[0] == numbers[1]:
            pairs += 1
            assert [one[name] for name in words] == [other[name] for name in words]
    assert pairs >= 8


def test_few_refusals_of_a_group_do_not_follow_from_the_evaluations_with_and_without_them() -> None:
    """Three of 100 women and none of 90 men are refused, and 40 of 80 children."""
    groups, labels = np.repeat([0, 1, 2], [100, 90, 80]), np.arange(270) % 2
    answered = ~np.isin(np.arange(270), [*range(3), *range(190, 230)])
    of: dict[str, Any] = {"class_names": ["no", "yes"], "group_names": GROUPS, "least_cell": LEAST}
    of |= {"labels_N": labels, "groups_N": groups, "num_replicates": 2}
    predicted = np.random.default_rng(3).integers(2, size=270)
    refusing, unrefused = (
        evaluate(predicted, generator=np.random.default_rng(0), **of, **changes)
        for changes in ({"answered_N": answered}, {"apart_N": ~answered})
    )
    women, men, children = refusing.groups
    for few in (women, men):
        assert (few.num_records, np.isnan(few.coverage)) == (None, True)
    assert (women.num_answered, children.coverage) == (97, 0.5)
    assert "how many of women, men are refused" in small_cell_words(refusing)
    # The sizes of women and men together are known, and not one of them.
    assert unrefused.not_measured == ("women", "men")
    assert unrefused.num_records == 80


def test_few_refusals_are_in_no_order_either() -> None:
    groups, labels = np.repeat([0, 1], [100, 100]), np.arange(200) % 2
    spread = reject_option_spread(
        np.where(np.arange(200) % 20 < 11, labels, 0),
        groups,
        true_labels_N=labels,
        rule=GateRule(max_disparity=0.03, min_count=40),
        num_groups=2,
        num_classes=2,
        generator=np.random.default_rng(0),
        least_cell=LEAST,
    )
    for order in spread.orders:
        refused = 200 * (1 - order.coverage)
        of_group = [100 * (1 - share) for share in order.coverage_G]
        assert np.isnan(order.coverage_G).all() or all(round(number) == 0 or number >= LEAST for number in of_group)
        assert refused >= 0
    assert any(np.isnan(order.coverage_G).all() for order in spread.orders)


def test_persons_are_what_counts_in_cells_by_prediction_and_in_words() -> None:
    """Class 1 is predicted for 30 records of men, which are of three persons, and divers' ten records are of two."""
    groups, persons = np.repeat([0, 1, 2], [100, 100, 10]), np.r_[np.arange(100), 100 + np.arange(100) // 10]
    persons = np.r_[persons, 200 + np.arange(10) // 5]
    labels = np.arange(210) % 2
    predicted = np.where(groups == 1, persons < 103, np.where(np.arange(210) % 5, labels, 1 - labels)).astype(int)
    labels[groups == 1] = predicted[groups == 1]
    predicted[210 - 10 :] = 0
    of: dict[str, Any] = {"class_names": ["no", "yes"], "group_names": ["women", "men", "divers"], "least_cell": 10}
    of |= {"labels_N": labels, "groups_N": groups, "num_replicates": 2}
    found = evaluate(predicted, persons_N=persons, generator=np.random.default_rng(0), **of)
    assert found.rates_GC[0][1] == pytest.approx(47 / 92)
    assert np.isnan(found.rates_GC[1:]).all()
    assert np.isnan(found.disparity)
    # Eight women and both divers: ten persons, whatever the number of divers.
    assert (found.num_left_out, found.num_persons_left_out, found.num_persons) == (18, 10, 102)
    said = stated(found)
    accuracy, coverage = said.figures[2:]
    assert "18 of 210 test records (10 persons) are in no number: those of divers" in accuracy.details[1]
    assert "evaluation.least_cell" in accuracy.details[1]
    assert coverage.details == ("Of 192 of 210 test records (102 persons).",)
    assert any("Too few answered test persons of divers." in words for words in said.figures[1].details)
    assert dict(said.rows)["left out"] == accuracy.details[1]
    assert "Cells of fewer than 10 test persons are not shown" in small_cell_words(found)
    plain = evaluate(predicted, generator=np.random.default_rng(0), **of)
    assert plain.num_left_out == 0
    assert "Cells of fewer than 10 test records" in small_cell_words(plain)


def test_the_smallest_count_is_read_from_the_numbers_and_not_from_the_setting() -> None:
    """Three false alarms of 100 women; without them the smallest cell is of 20."""
    table = [[[97, 3], [20, 80]], [[70, 30], [20, 80]]]
    assert evaluation(table, least=1).smallest_count == 3
    assert "is 3 (" in smallest_count_words([evaluation(table, least=1)])
    assert "evaluation.least_cell is 1" in smallest_count_words([evaluation(table, least=1)])
    assert evaluation(table).smallest_count == 83  # women who are predicted class 1
    words = smallest_count_words([evaluation(table)])
    assert "is 83 (" in words
    assert "Missing for this reason: confusion tables and gaps given a true label" in words
    # What a table shows is said, whatever the setting was.
    forged = replace(evaluation(table, least=1), least_cell=LEAST)
    assert smallest_count_words([evaluation(table), forged]).endswith("Cells of fewer than 10 test records are shown.")


def tables() -> list[Any]:
    """Random tables with small cells, of two and three classes; some models are constant or always right."""
    random, found = np.random.default_rng(0), []
    for case in range(120):
        num_groups, num_classes = int(random.integers(1, 4)), int(random.integers(2, 4))
        table = random.poisson(
            random.choice([1, 4, 15, 60], size=(num_groups, num_classes, 1)), (num_groups, num_classes, num_classes)
        )
        rows = table.sum(axis=2)
        if case % 6 == 4:  # nobody of the last class is missed
            table[:, -1, -1] += table[:, -1, :-1].sum(axis=1)
            table[:, -1, :-1] = 0
        elif case % 6 == 5:  # there are two errors
            table = np.zeros_like(table)
            table[:, range(num_classes), range(num_classes)] = rows
            table[0, 0, :2] += [-min(2, rows[0, 0]), min(2, rows[0, 0])]
        elif case % 6 == 1:  # everybody is predicted the first class
            table = np.zeros_like(table)
            table[:, :, 0] = rows
        elif case % 6 == 2:  # everybody is predicted rightly
            table = np.zeros_like(table)
            table[:, range(num_classes), range(num_classes)] = rows
        elif case % 6 == 3:  # one group is
            table[0] = np.diag(rows[0])
        found.append(table)
    return [table for table in found if table.sum() >= LEAST]  # of fewer records the number itself is public


def some_of(random_ones: list[Any], *, quick: int, slow: int) -> list[Any]:
    """The first ``quick`` ones are tried by `make test`, those up to ``slow`` by `make test-all`."""
    marks = [(), pytest.mark.slow, pytest.mark.campaign]
    return [
        pytest.param(each, marks=marks[(number >= quick) + (number >= slow)]) for number, each in enumerate(random_ones)
    ]


@pytest.mark.parametrize("table", some_of(tables(), quick=15, slow=28))
def test_no_small_cell_follows_from_what_is_published(table: Any) -> None:
    plain = json.loads(json.dumps(evaluation(table, num_replicates=2).to_json()))
    attack = Attack(plain, table.shape, num_test=int(table.sum()))
    for name, cell in attack.cells().items():
        if not 0 < table[cell].sum() < LEAST:
            continue
        possible = attack.sizes(cell)
        assert possible, "an attack that the truth does not fit"
        # All classes of a small group may be one record.
        of_small = table[name[0]].sum() < LEAST and len(name) > 1
        assert len(possible) >= (2 if of_small else FEWEST), (name, possible)


AWKWARD = {
    "one record of each of four classes": [
        [[40, 3, 2, 1], [2, 50, 1, 0], [0, 1, 30, 2], [1, 0, 0, 12]],
        [[35, 2, 1, 1], [1, 44, 3, 1], [2, 0, 28, 1], [0, 1, 0, 11]],
        np.eye(4, dtype=int),
    ],
    "groups of 9, 10, 11 and 1": [
        [[5, 0], [0, 4]],
        [[5, 1], [0, 4]],
        [[6, 0], [1, 4]],
        [[1, 0], [0, 0]],
        [[90, 12], [14, 85]],
    ],
    "a class that is predicted once in each group": [[[60, 1], [30, 0]], [[55, 0], [25, 1]], [[48, 0], [22, 1]]],
    "errors of one group alone": [[[70, 0], [0, 65]], [[50, 0], [0, 48]], [[30, 4], [3, 28]]],
    "nine of a class, of which ten are predicted": [[[81, 1], [0, 9]], [[80, 10], [0, 9]]],
    "two small groups that are large enough together": [
        [[99, 9], [8, 90]],
        [[2, 1], [1, 1]],
        [[3, 1], [0, 1]],
        [[60, 20], [15, 70]],
    ],
}


@pytest.mark.parametrize(
    "table",
    [pytest.param(table, id=name, marks=[pytest.mark.slow] * ("four" in name)) for name, table in AWKWARD.items()],
)
def test_no_small_cell_of_an_awkward_table_follows_from_what_is_published(table: Any) -> None:
    counts = np.array(table)
    names = [f"group {z}" for z in range(len(counts))]
    plain = json.loads(json.dumps(evaluation(counts, num_replicates=2, group_names=names).to_json()))
    attack = Attack(plain, counts.shape, num_test=int(counts.sum()))
    small = [(name, cell) for name, cell in attack.cells().items() if 0 < counts[cell].sum() < LEAST]
    assert len(small) >= 3
    for name, cell in small:
        of_small = counts[name[0]].sum() < LEAST and len(name) > 1
        possible = attack.sizes(cell)
        assert possible and len(possible) >= (2 if of_small else FEWEST), (name, possible)


def of_the_same_records(labels_GY: Any, random: np.random.Generator) -> Any:
    """The table of a model on records with these labels: its predictions are good, constant or right by group."""
    kinds = random.integers(4, size=len(labels_GY))
    num_classes = labels_GY.shape[1]
    chances = {0: np.full((num_classes, num_classes), 0.2 / (num_classes - 1)), 1: np.eye(num_classes)}
    chances[0][np.diag_indices(num_classes)] = 0.8
    chances |= {2: np.tile(np.eye(num_classes)[0], (num_classes, 1)), 3: chances[0]}
    return np.array(
        [
            [random.multinomial(size, chances[kind][y]) for y, size in enumerate(sizes)]
            for kind, sizes in zip(kinds, labels_GY, strict=True)
        ]
    )


def pairs_of_models() -> list[Any]:
    # First three false alarms, beside a model all of whose counts are shown.
    shown = [[[60, 40], [30, 70]], [[60, 40], [35, 65]]]
    random, found = np.random.default_rng(3), [(np.array([[[97, 3], [20, 80]], [[70, 30], [20, 80]]]), np.array(shown))]
    for _ in range(40):
        shape = int(random.integers(1, 4)), int(random.integers(2, 4))
        labels = random.poisson(random.choice([4, 15, 30, 60], size=shape))
        found.append((of_the_same_records(labels, random), of_the_same_records(labels, random)))
    return [pair for pair in found if pair[0].sum() >= LEAST]


@pytest.mark.parametrize("tables", some_of(pairs_of_models(), quick=6, slow=12))
def test_no_small_cell_follows_from_two_models_that_are_measured_on_the_same_records(tables: Any) -> None:
    """What one shows of the labels joins what the other shows of its predictions."""
    attacks = []
    for table in tables:
        plain = json.loads(json.dumps(evaluation(table, num_replicates=2).to_json()))
        attacks.append(Attack(plain, table.shape, num_test=int(table.sum())))
    one, other = attacks
    side, group, true, _ = np.indices((2, *one.shape))
    width = one.rows[0].size
    one.rows, other.rows = (
        [np.r_[row, np.zeros(width)] for row in one.rows],
        [np.r_[np.zeros(width), r] for r in other.rows],
    )
    one.rows, one.lows, one.highs = one.rows + other.rows, one.lows + other.lows, one.highs + other.highs
    for part, z, y in itertools.product(range(2), *map(range, one.shape[:2])):
        same = ((side == part) & (group == z) & (true == y)).astype(float).ravel()
        one.rows.append(np.r_[same, -same])
        one.lows.append(0)
        one.highs.append(0)
    for name, cell in one.cells().items():
        if 0 < tables[0][cell].sum() < LEAST:
            possible = one.sizes(cell)
            of_small = tables[0][name[0]].sum() < LEAST and len(name) > 1
            assert len(possible) >= (2 if of_small else FEWEST), (name, possible)


class Attack:
    """What is known of the counts by group, true label and prediction, published ones and those that are left out."""

    def __init__(self, plain: Any, shape: tuple[int, ...], *, num_test: int) -> None:
        self.shape, self.rows, self.lows, self.highs = shape, list[Any](), list[float](), list[float]()
        self.solutions = list[Any]()
        published, left_out = np.indices((2, *shape))[0] == 0, np.indices((2, *shape))[0] == 1
        _, group, true, predicted = np.indices((2, *shape))
        known = self.known
        known(published | left_out, num_test)
        known(published, plain["num_records"])
        known(left_out, plain["num_left_out"])
        known(published & (true == predicted), times(plain["accuracy"], plain["num_records"]))
        for each, of in enumerate(plain["groups"]):
            here, size = published & (group == each), of["num_records"] or 0
            known(here, size)
            if of["num_records"] is None and plain["num_records"]:
                known(left_out & (group == each), 1, LEAST - 1)
            known(here & (true == predicted), times(of["accuracy"], size))
            for k, rate in enumerate(plain["rates_GC"][each]):
                known(here & (predicted == k), times(rate, size))
            for place, number in np.ndenumerate(plain["confusion_GYC"][each] or []):
                known(here & (true == place[0]) & (predicted == place[1]), number)
        if plain["majority_class"] is not None:
            common = published & (true == plain["class_names"].index(plain["majority_class"]))
            known(common, plain["majority_accuracy"] * plain["num_records"])
            for y in range(shape[1]):
                known(common.astype(float) - (published & (true == y)), 0, 10**6)
        for name, of_error in ERRORS.items():
            rate = plain["gaps"][name]
            if rate["value"] is None:
                continue
            worst = 1 if shape[1] == 2 else int(re.findall(r"class (\d+)", rate["where"])[0])
            among, is_error = of_error(true, predicted, worst)
            if shape[1] == 2:
                known(published & among, rate["min_cell_size"])
            known((published & is_error) - rate["value"] * (published & among), 0)
        self.rates_are_shown = any(rate is not None for rates in plain["rates_GC"] for rate in rates)
        if not self.rates_are_shown:
            # A gap is a quotient of whole numbers, which its digits would give.
            assert {plain["gaps"][name]["value"] for name in BY_PREDICTION} == {plain["ermi"]} == {None}
        if not any(plain["confusion_GYC"]):
            assert {plain["gaps"][name]["value"] for name in BY_BOTH} == {plain["ermi_given_label"]} == {None}
            assert plain["underserved"] == plain["underserved_groups"] == []

    def known(self, of: Any, value: float | None, high: float | None = None) -> None:
        if value is not None:
            self.rows.append(of.astype(float).ravel())
            self.lows.append(round(value, 6) - 1e-6)
            self.highs.append(round(value if high is None else high, 6) + 1e-6)

    def cells(self) -> dict[tuple[Any, ...], Any]:
        """Masks of all cells: a group, and its records by true label, prediction, both, and right or wrong."""
        group, true, predicted = np.indices(self.shape)
        labels, found = range(self.shape[1]), dict[tuple[Any, ...], Any]()
        for z in range(self.shape[0]):
            here = group == z
            found |= {(z,): here, (z, "right"): here & (true == predicted), (z, "wrong"): here & (true != predicted)}
            found |= {(z, "true", y): here & (true == y) for y in labels}
            found |= {(z, "predicted", k): here & (predicted == k) for k in labels}
            found |= {(z, y, k): here & (true == y) & (predicted == k) for y in labels for k in labels}
        return found

    def sizes(self, cell: Any) -> list[int]:
        """Up to ``FEWEST`` sizes that the cell may have: published counts come before those that are left out."""
        row = np.stack([cell, cell]).astype(float).ravel()
        row = np.r_[row, np.zeros(len(self.rows[0]) - len(row))]  # of the first model, where there are two
        # Whole counts that were found for another cell are a size of this one too.
        possible = {size for each in self.solutions if (size := round(float(row @ each))) < 3 * LEAST}
        for size in range(3 * LEAST):
            if len(possible) >= FEWEST:
                break
            if size not in possible:
                counts = solution([*self.rows, row], [*self.lows, size], [*self.highs, size])
                if counts is not None:
                    self.solutions.append(counts)
                    possible.add(size)
        return sorted(possible)[:FEWEST]


def times(share: float | None, size: int) -> float | None:
    return None if share is None else share * size


def solution(rows: list[Any], lows: list[float], highs: list[float]) -> Any:
    """Whole counts between these bounds, or None if there are none."""
    constraints, size = LinearConstraint(np.array(rows), lows, highs), rows[0].size
    return milp(np.zeros(size), constraints=constraints, integrality=np.ones(size), bounds=Bounds(0)).x


ERRORS: dict[str, Callable[[Any, Any, int], tuple[Any, Any]]] = {
    "false_negative_rate": lambda true, predicted, of: (true == of, (true == of) & (predicted != of)),
    "false_positive_rate": lambda true, predicted, of: (true != of, (true != of) & (predicted == of)),
    "false_discovery_rate": lambda true, predicted, of: (predicted == of, (true != of) & (predicted == of)),
}
"""What a rate is of, and what it counts, for the class where it is largest."""
BY_PREDICTION = ("dp_one_vs_rest", "dp_pairwise", "dp_to_overall", "impact_ratio")
BY_BOTH = ("eo_lowy", "eo_full", "equal_opportunity")
