"""No public number rests on a cell of fewer records than the least size, and none of them shows the size of one.

The attacker of these tests knows how many test records there are and everything that is published of them, as linear
equations over counts that are not negative. A cell is safe if its size has more than one solution.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from report_pages import GUARANTEE
from scipy.optimize import linprog

from fairpate.evaluation.metrics import Evaluation, evaluate
from fairpate.evaluation.small_cells import shown_records
from fairpate.evaluation.verdict import fairness_of, verdict

LEAST = 10
GROUPS = ("women", "men", "children")


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
        group_names=GROUPS[: len(table)],
        generator=np.random.default_rng(0),
        least_cell=least,
        **{"num_replicates": 50, **changes},
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
    children = found.to_json()["groups"][2]
    assert children == {"name": "children", **dict.fromkeys(("num_records", "num_answered", "coverage", "accuracy"))}
    assert found.confusion_GYC[2] is None
    assert found.confusion_GYC[0] is not None
    assert Evaluation.from_json(json.loads(json.dumps(found.to_json()))).to_json() == found.to_json()


def test_the_verdict_names_who_is_measured_and_who_is_not() -> None:
    table = 10 * np.array(FOUR)
    table[2] = [[0, 2], [0, 2]]
    found = evaluation(table, num_replicates=200)
    said = verdict(found, GUARANTEE)
    assert fairness_of(found) == "fair among some"
    assert said.line.endswith("; fair among women and men; not known for children.")
    assert (said.figures[1].word, said.figures[1].mood) == (
        "Fair among women and men; not known for children",
        "doubtful",
    )
    assert fairness_of(evaluation(table[:2], num_replicates=200)) == "fair"


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
    assert verdict(few, GUARANTEE).line.endswith("is unknown: no group has enough test records.")


def test_a_small_class_of_one_group_hides_the_class_counts_of_all() -> None:
    found = evaluation([[[80, 20], [20, 80]], [[190, 6], [1, 3]]])
    assert found.not_measured == ()
    assert found.confusion_GYC == (None, None)
    for name in ("eo_lowy", "eo_full", "equal_opportunity"):
        assert np.isnan(found.gaps[name].value)
        assert found.gaps[name].min_cell_size == 0
    assert found.to_json()["ermi_given_label"] is None
    assert found.fairness["equalized_odds"] == {"value": None, "low": None, "high": None}
    assert found.disparity == pytest.approx(0.5 - 9 / 200)
    assert (found.majority_class, found.majority_accuracy) == ("class 0", pytest.approx(296 / 400))


def test_the_gap_of_a_model_that_is_always_right_is_that_of_the_labels() -> None:
    """Class 1 has 20 of 100 women and 60 of 100 men; of two classes a small cell would follow, of three hardly."""
    found = evaluation([[[60, 20], [5, 15]], [[20, 20], [10, 50]]])
    assert found.perfect_gap == pytest.approx(0.4)
    gap = verdict(found, GUARANTEE).figures[1].details
    assert any("always right would have a gap of 0.400 here" in words for words in gap)
    assert np.isnan(evaluation([[[80, 10], [5, 4]], [[20, 20], [10, 50]]]).perfect_gap)
    three = np.zeros((2, 3, 3))
    three[:, range(3), range(3)] = [[91, 5, 4], [44, 40, 16]]
    three[:, 0, 1] = 1
    assert evaluation(three.astype(int)).perfect_gap == pytest.approx(0.4)
    assert any(
        "gap of 0.4 or more here" in words
        for words in verdict(evaluation(three.astype(int)), GUARANTEE).figures[1].details
    )


def test_persons_count_and_not_their_records() -> None:
    """Twelve records of four children are four."""
    groups, answered = np.repeat([0, 1], [40, 12]), np.ones(52, dtype=np.bool_)
    persons = np.r_[np.arange(40), 40 + np.arange(12) // 3]
    labels = np.zeros(52, dtype=np.int64)
    shown = shown_records(groups, labels, answered, least=10, num_groups=2, persons_N=persons)
    assert shown.small_G.tolist() == [False, True]
    assert len(np.unique(persons[~shown.kept_N])) == 10
    assert shown_records(groups, labels, answered, least=10, num_groups=2).small_G.tolist() == [False, False]


def test_the_records_that_one_of_two_evaluations_leaves_out_are_a_cell_too() -> None:
    """Three of 40 women are refused: with and without them together tell of the three."""
    groups, answered = np.repeat([0, 1], 40), np.ones(80, dtype=np.bool_)
    labels, apart = np.arange(80) % 2, np.arange(80) < 3
    shown = shown_records(groups, labels, answered, least=10, num_groups=2, apart_N=apart)
    assert shown.small_G.tolist() == [True, False]


def tables() -> list[Any]:
    """Random tables with small cells, of two and three classes; some models are constant or always right."""
    random, found = np.random.default_rng(0), []
    for case in range(120):
        num_groups, num_classes = int(random.integers(1, 4)), int(random.integers(2, 4))
        table = random.poisson(
            random.choice([1, 4, 15, 60], size=(num_groups, num_classes, 1)), (num_groups, num_classes, num_classes)
        )
        rows = table.sum(axis=2)
        if case % 4 == 1:  # everybody is predicted the first class
            table = np.zeros_like(table)
            table[:, :, 0] = rows
        elif case % 4 == 2:  # everybody is predicted rightly
            table = np.zeros_like(table)
            table[:, range(num_classes), range(num_classes)] = rows
        elif case % 4 == 3:  # one group is
            table[0] = np.diag(rows[0])
        found.append(table)
    return [table for table in found if table.sum() >= LEAST]  # of fewer records the number itself is public


@pytest.mark.parametrize("case", range(len(tables())))
def test_no_small_cell_follows_from_what_is_published(case: int) -> None:
    table = tables()[case]
    plain = json.loads(json.dumps(evaluation(table, num_replicates=2).to_json()))
    small = [(z, None) for z in range(len(table)) if 0 < table[z].sum() < LEAST]
    small += [(z, y) for z in range(len(table)) for y in range(table.shape[1]) if 0 < table[z, y].sum() < LEAST]
    for z, y in small:
        low, high = attacked(plain, table.shape, num_test=int(table.sum()), z=z, y=y)
        assert high - low > 0.5, (z, y, low, high)


def attacked(plain: Any, shape: tuple[int, ...], *, num_test: int, z: int, y: int | None) -> tuple[float, float]:
    """The least and greatest size that the cell may have: published counts first, then those that are left out."""
    published, left_out = np.indices((2, *shape))[0] == 0, np.indices((2, *shape))[0] == 1
    _, group, true, predicted = np.indices((2, *shape))
    rows, values = [], []

    def known(of: Any, value: float | None) -> None:
        if value is not None:
            rows.append(of.astype(float).ravel())
            values.append(value)

    known(published | left_out, num_test)
    known(published, plain["num_records"])
    if plain["accuracy"] is not None:
        known(published & (true == predicted), plain["accuracy"] * plain["num_records"])
    for each, of in enumerate(plain["groups"]):
        here, size = published & (group == each), of["num_records"] or 0
        known(here, size)
        known(here & (true == predicted), None if of["accuracy"] is None else of["accuracy"] * size)
        for k, rate in enumerate(plain["rates_GC"][each]):
            known(here & (predicted == k), None if rate is None else rate * size)
        for place, number in np.ndenumerate(plain["confusion_GYC"][each] or []):
            known(here & (true == place[0]) & (predicted == place[1]), number)
    if plain["majority_class"] is not None:
        common = published & (true == plain["class_names"].index(plain["majority_class"]))
        known(common, plain["majority_accuracy"] * plain["num_records"])
    if shape[1] == 2 and (missed := plain["gaps"]["false_negative_rate"])["value"] is not None:
        known(published & (true == 1), missed["min_cell_size"])
        known(published & (true == 1) & (predicted == 0), missed["value"] * missed["min_cell_size"])
    cell = ((group == z) & (True if y is None else true == y)).astype(float).ravel()
    ends = [
        linprog(sign * cell, A_eq=np.array(rows), b_eq=values, bounds=(0, None), method="highs") for sign in (1, -1)
    ]
    assert all(end.status == 0 for end in ends), [end.message for end in ends]
    return ends[0].fun, -ends[1].fun
