"""Gaps against published tables, fairlearn, definitions read literally, and the relations that bind them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from fairlearn import metrics as fairlearn_metrics
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import precision_score

from fairpate.fairness import rates

pytestmark = pytest.mark.usefixtures("light_runs")

# FairPATE, Appendix H: class by group.
APPENDIX_H_GYC = np.array([[324, 287], [420, 274], [445, 250]], dtype=float)[:, None, :]
ALL_GAPS = {
    "dp_one_vs_rest": rates.dp_one_vs_rest,
    "dp_to_overall": rates.dp_to_overall,
    "dp_pairwise": rates.dp_pairwise,
    "eo_full": rates.eo_full,
    "eo_lowy": rates.eo_lowy,
    "accuracy_parity": rates.accuracy_parity,
}


def tables(num_groups: int, num_classes: int, *, smallest: int = 0) -> st.SearchStrategy[np.ndarray]:
    shape = (num_groups, num_classes, num_classes)
    return hnp.arrays(np.float64, shape, elements=st.integers(smallest, 6).map(float))


def records_of(joint_GYC: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups, labels and predictions whose table this is."""
    cells = np.indices(joint_GYC.shape).reshape(3, -1)
    groups, labels, predicted = np.repeat(cells, joint_GYC.astype(int).ravel(), axis=1)
    return groups, labels, predicted


def share(event: np.ndarray, among: np.ndarray) -> float | None:
    return float(event[among].mean()) if among.any() else None


def literal_gap(name: str, joint_GYC: np.ndarray) -> float:
    """Each definition as a sentence over records: no table, no broadcasting."""
    groups, labels, predicted = records_of(joint_GYC)
    num_groups, num_classes = joint_GYC.shape[0], joint_GYC.shape[-1]
    everyone = np.ones(len(groups), dtype=bool)
    events = {
        "dp": [(predicted == k, everyone) for k in range(num_classes)],
        "eo_full": [(predicted == k, labels == y) for k in range(num_classes) for y in range(num_classes)],
        "eo_lowy": [(predicted == k, given) for k in range(num_classes) for given in (labels == k, labels != k)],
        "accuracy": [(predicted == labels, everyone)],
    }[next(stem for stem in ("eo_full", "eo_lowy", "accuracy", "dp") if name.startswith(stem))]
    found = []
    for event, given_ in events:
        for z in range(num_groups):
            here = share(event, given_ & (groups == z))
            rest = share(event, given_ & (groups != z))
            if here is None or rest is None:
                continue
            if name in ("dp_pairwise", "eo_lowy", "accuracy_parity"):
                others = [share(event, given_ & (groups == other)) for other in range(num_groups)]
                found += [abs(here - other) for other in others if other is not None]
            elif name == "dp_to_overall":
                found.append(abs(here - share(event, given_)))
            else:
                found.append(here - rest)
    return max(found, default=math.nan)


def test_published_population() -> None:
    values = {name: ALL_GAPS[name](APPENDIX_H_GYC).value for name in ALL_GAPS if name.startswith("dp")}
    assert values["dp_one_vs_rest"] == pytest.approx(0.0924719, abs=5e-8)
    assert values["dp_to_overall"] == pytest.approx(0.0642218, abs=5e-8)
    assert values["dp_pairwise"] == pytest.approx(0.1100095, abs=5e-8)


@pytest.mark.parametrize(
    ("name", "answered", "published"),
    [
        ("dp_pairwise", [[315, 191], [364, 213], [361, 217]], 0.008320),
        ("dp_to_overall", [[324, 234], [395, 271], [361, 247]], 0.008874),
        ("dp_one_vs_rest", [[318, 218], [371, 244], [342, 229]], 0.007897),
    ],
)
def test_published_answers(name: str, answered: list[list[int]], published: float) -> None:
    assert ALL_GAPS[name](np.array(answered, dtype=float)[:, None, :]).value == pytest.approx(published, abs=5e-7)


@pytest.mark.parametrize("name", ALL_GAPS)
@given(data=st.data())
def test_each_gap_is_its_definition(name: str, data: st.DataObject) -> None:
    joint_GYC = data.draw(tables(3, 3))
    expected = literal_gap(name, joint_GYC)
    assert ALL_GAPS[name](joint_GYC).value == pytest.approx(expected, abs=1e-12, nan_ok=True)


@settings(max_examples=8)
@given(tables(3, 2, smallest=1))
def test_fairlearn_agrees_where_it_defines_the_gap(joint_GYC: np.ndarray) -> None:
    groups, labels, predicted = records_of(joint_GYC)
    theirs = {
        name: getattr(fairlearn_metrics, name)(labels, predicted, sensitive_features=groups)
        for name in (
            "demographic_parity_difference",
            "equalized_odds_difference",
            "equal_opportunity_difference",
        )
    }
    assert rates.dp_pairwise(joint_GYC).value == pytest.approx(theirs["demographic_parity_difference"])
    assert rates.eo_lowy(joint_GYC).value == pytest.approx(theirs["equalized_odds_difference"])
    opportunity = rates.found_apart(joint_GYC).value
    assert opportunity == pytest.approx(theirs["equal_opportunity_difference"])


@given(tables(4, 3))
def test_pairwise_bounds_one_vs_rest_bounds_to_overall(joint_GYC: np.ndarray) -> None:
    pairwise = rates.dp_pairwise(joint_GYC).value
    assume(not math.isnan(pairwise))
    counts_GC = joint_GYC.sum(axis=1)
    one_vs_rest = float(np.nanmax(np.abs(rates.one_vs_rest(counts_GC.T, np.tile(counts_GC.sum(axis=1), (3, 1))))))
    assert pairwise >= one_vs_rest - 1e-12
    assert one_vs_rest >= rates.dp_to_overall(joint_GYC).value - 1e-12
    assert one_vs_rest >= rates.dp_one_vs_rest(joint_GYC).value >= -1e-12


@given(tables(4, 3))
def test_distance_to_overall_is_a_share_of_one_vs_rest(joint_GYC: np.ndarray) -> None:
    counts_GC = joint_GYC.sum(axis=1)
    rest_share_G1 = 1 - rates.divide(counts_GC.sum(axis=1, keepdims=True), counts_GC.sum())
    rest_GC = counts_GC.sum(axis=0) - counts_GC
    difference_GC = rates.group_rates(joint_GYC) - rates.divide(rest_GC, rest_GC.sum(axis=1, keepdims=True))
    to_overall_GC = rates.group_rates(joint_GYC) - rates.divide(counts_GC.sum(axis=0), counts_GC.sum())
    defined = ~np.isnan(difference_GC)
    assert np.allclose(to_overall_GC[defined], (rest_share_G1 * difference_GC)[defined])


@given(tables(2, 4, smallest=1))
def test_with_two_groups_pairwise_is_one_vs_rest(joint_GYC: np.ndarray) -> None:
    pairwise = rates.dp_pairwise(joint_GYC).value
    assert rates.dp_one_vs_rest(joint_GYC).value == pytest.approx(pairwise)


@given(tables(2, 2, smallest=1))
def test_equalized_odds_definitions_meet_for_two_classes_and_groups(joint_GYC: np.ndarray) -> None:
    lowy = rates.eo_lowy(joint_GYC).value
    assert rates.eo_full(joint_GYC).value == pytest.approx(lowy)


def test_equalized_odds_definitions_differ_for_three_classes() -> None:
    joint_GYC = np.array([[[9, 1, 0], [1, 8, 1], [2, 0, 8]], [[9, 0, 1], [4, 6, 0], [0, 3, 7]]], dtype=float)
    assert rates.eo_lowy(joint_GYC).value != pytest.approx(rates.eo_full(joint_GYC).value)


@pytest.mark.parametrize("name", [name for name in ALL_GAPS if not name.startswith("accuracy")])
def test_a_constant_predictor_has_no_gap(name: str) -> None:
    joint_GYC = np.zeros((3, 3, 3))
    joint_GYC[:, :, 1] = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert ALL_GAPS[name](joint_GYC).value == 0


@pytest.mark.parametrize("name", ALL_GAPS)
@given(data=st.data())
def test_renaming_labels_and_groups_changes_no_gap(name: str, data: st.DataObject) -> None:
    joint_GYC = data.draw(tables(3, 3))
    labels, groups = data.draw(st.permutations(range(3))), data.draw(st.permutations(range(3)))
    renamed = joint_GYC[np.ix_(groups, labels, labels)]
    assert ALL_GAPS[name](renamed).value == pytest.approx(ALL_GAPS[name](joint_GYC).value, nan_ok=True)


@pytest.mark.parametrize("name", ALL_GAPS)
@given(data=st.data())
def test_an_empty_group_changes_only_what_is_undefined(name: str, data: st.DataObject) -> None:
    joint_GYC = data.draw(tables(3, 3))
    before = ALL_GAPS[name](joint_GYC)
    after = ALL_GAPS[name](np.concatenate([joint_GYC, np.zeros((1, 3, 3))]))
    assert after.value == pytest.approx(before.value, nan_ok=True)
    assert (after.min_cell_size, after.where) == (before.min_cell_size, before.where)
    assert after.n_undefined > before.n_undefined


@pytest.mark.parametrize("name", ALL_GAPS)
def test_one_group_alone_is_undefined_not_fair(name: str) -> None:
    joint_GYC = np.zeros((2, 2, 2))
    joint_GYC[0] = [[3, 1], [2, 4]]
    worst = ALL_GAPS[name](joint_GYC)
    assert math.isnan(worst.value)
    assert worst.where is None
    assert worst.min_cell_size == 0


def test_the_worst_cell_and_the_smallest_are_reported() -> None:
    # P[1] is 1/4, 3/4 and 1/2; group 2 has two records, group 3 none.
    joint_GYC = np.array([[[3, 1]], [[2, 6]], [[1, 1]], [[0, 0]]], dtype=float)
    worst = rates.dp_pairwise(joint_GYC)
    assert worst == rates.WorstCase(
        value=0.5, n_undefined=2, min_cell_size=2, where=rates.GroupCell(group=0, other_group=1, label=0)
    )
    assert rates.dp_one_vs_rest(joint_GYC).where == rates.GroupCell(group=0, label=0)


def test_undefined_conditional_cells_are_left_out_one_by_one() -> None:
    # True label 1 exists in group 0 only: only label 0 can be compared, 1/2 against 3/4.
    joint_GYC = np.array([[[2, 2], [0, 5]], [[3, 1], [0, 0]]], dtype=float)
    worst = rates.eo_full(joint_GYC)
    assert worst.value == pytest.approx(1 / 4)
    assert worst.n_undefined == 4
    assert worst.min_cell_size == 4
    assert worst.where == rates.GroupCell(group=1, label=0, given_label=0)


def literal_error_rates(joint_GYC: np.ndarray, c: int) -> dict[rates.ErrorRate, float | None]:
    _, labels, predicted = records_of(joint_GYC)
    return {
        "fnr": share(predicted != c, labels == c),
        "fpr": share(predicted == c, labels != c),
        "fdr": share(labels != c, predicted == c),
    }


@given(tables(2, 2))
def test_error_rates_of_two_classes_are_those_of_the_second(joint_GYC: np.ndarray) -> None:
    for kind, expected in literal_error_rates(joint_GYC, 1).items():
        value = rates.error_rate(kind)(joint_GYC).value
        assert value == pytest.approx(math.nan if expected is None else expected, nan_ok=True)


@given(tables(2, 3))
def test_error_rates_of_more_classes_are_the_worst(joint_GYC: np.ndarray) -> None:
    by_class = [literal_error_rates(joint_GYC, c) for c in range(3)]
    for kind in by_class[0]:
        expected = [rate for each in by_class if (rate := each[kind]) is not None]
        worst = rates.error_rate(kind)(joint_GYC)
        assert worst.value == pytest.approx(max(expected, default=math.nan), nan_ok=True)
        assert worst.n_undefined == 3 - len(expected)


def test_false_discovery_is_one_minus_precision_and_the_worst_class_is_named() -> None:
    joint_GYC = np.array([[[5, 2], [1, 4]], [[3, 3], [2, 1]]], dtype=float)
    _, labels, predicted = records_of(joint_GYC)
    assert rates.error_rate("fdr")(joint_GYC).value == pytest.approx(1 - precision_score(labels, predicted))
    # Missed: 1/4 of class 0, 3/4 of class 1, none of class 2; half of what is called 2 is something else.
    joint_GYC = np.array([[[3, 0, 1], [0, 1, 3], [0, 0, 4]]], dtype=float)
    missed = rates.error_rate("fnr")(joint_GYC)
    assert (missed.value, missed.min_cell_size) == (pytest.approx(3 / 4), 4)
    assert missed.where == rates.GroupCell(label=1, given_label=1, label_is=False)
    discovered = rates.error_rate("fdr")(joint_GYC)
    assert (discovered.value, discovered.min_cell_size) == (pytest.approx(1 / 2), 1)
    assert discovered.where == rates.GroupCell(label=2)


def test_accuracy_parity_equals_fairlearn() -> None:
    joint_GYC = np.array([[[5, 2], [1, 4]], [[3, 3], [2, 1]], [[1, 0], [2, 2]]], dtype=float)
    groups, labels, predicted = records_of(joint_GYC)
    frame = fairlearn_metrics.MetricFrame(
        metrics=lambda y, p: float((y == p).mean()), y_true=labels, y_pred=predicted, sensitive_features=groups
    )
    assert rates.accuracy_parity(joint_GYC).value == pytest.approx(frame.difference("between_groups"))


def test_ermi_golden_and_bounds() -> None:
    joint_GYC = np.array([[0.3, 0.2], [0.1, 0.4]])[:, None, :]
    assert rates.ermi(joint_GYC) == pytest.approx(1 / 6)
    independent = np.outer([1.0, 3.0], [2.0, 1.0, 5.0])[:, None, :]
    assert rates.ermi(independent) == pytest.approx(0, abs=1e-12)
    assert rates.ermi(np.diag([2.0, 5.0, 1.0])[:, None, :]) == pytest.approx(2)
    assert math.isnan(rates.ermi(np.array([[[3.0, 1.0]], [[0.0, 0.0]]])))
    with_empty_group = np.concatenate([joint_GYC, np.zeros((1, 1, 2))])
    assert rates.ermi(with_empty_group) == pytest.approx(1 / 6)


@given(tables(3, 2, smallest=1))
def test_conditional_ermi_averages_over_labels(joint_GYC: np.ndarray) -> None:
    within = [rates.ermi(joint_GYC[:, [y]]) for y in range(2)]
    expected = np.average(within, weights=joint_GYC.sum(axis=(0, 2)))
    assert rates.ermi_given_label(joint_GYC) == pytest.approx(expected)


@pytest.mark.parametrize("name", ALL_GAPS)
def test_replicates_are_evaluated_as_one_by_one(name: str) -> None:
    joint_RGYC = np.random.default_rng(3).integers(0, 4, (20, 3, 3, 3)).astype(float)
    joint_RGYC[0] = 0
    one_by_one = [ALL_GAPS[name](joint_GYC).value for joint_GYC in joint_RGYC]
    assert np.allclose(ALL_GAPS[name].values(joint_RGYC), one_by_one, equal_nan=True)


def test_bootstrap_interval_matches_the_normal_approximation() -> None:
    # A large gap between two large groups: the maximum is one cell, so its law is that of a difference of means.
    joint_GYC = np.array([[[800, 200]], [[1000, 1000]]], dtype=float)
    groups, _, predicted = records_of(joint_GYC)
    drawn_RGYC = rates.resampled_tables(
        predicted,
        groups,
        num_groups=2,
        num_classes=2,
        generator=np.random.default_rng(4),
        num_replicates=4000,
    )
    interval = rates.bootstrap_interval(rates.dp_pairwise, drawn_RGYC)
    half_width = 1.96 * math.sqrt(0.2 * 0.8 / 1000 + 0.25 / 2000)
    assert interval.low == pytest.approx(0.3 - half_width, abs=0.003)
    assert interval.high == pytest.approx(0.3 + half_width, abs=0.003)
    assert interval.n_undefined == 0


def test_bootstrap_counts_replicates_without_a_value() -> None:
    joint_RGYC = np.array([[[[1, 1]], [[0, 0]]], [[[1, 1]], [[2, 0]]]], dtype=float)
    interval = rates.bootstrap_interval(rates.dp_pairwise, joint_RGYC)
    assert interval.n_undefined == 1
    assert interval.low == interval.high == 0.5
    nothing = rates.bootstrap_interval(rates.dp_pairwise, np.zeros((3, 2, 1, 2)))
    assert math.isnan(nothing.low)
    assert nothing.n_undefined == 3


def test_gap_of_a_stream_and_its_running_maximum() -> None:
    course = rates.cumulative_tables([1, 0, 1, 0], [0, 1, 1, 0], num_groups=2, num_classes=2)
    values = rates.dp_one_vs_rest.values(course)
    assert np.isnan(values[0])
    assert values[1:].tolist() == [1.0, 0.5, 0.0]


def test_missing_labels_and_too_many_classes_are_named() -> None:
    with pytest.raises(ValueError, match="pass labels_N"):
        rates.eo_full(APPENDIX_H_GYC)
    with pytest.raises(ValueError, match="0 < level < 1, got 95"):
        rates.bootstrap_interval(rates.dp_pairwise, np.ones((2, 2, 2, 2)), level=95)


def test_every_pair_of_groups_is_compared() -> None:
    joint_GYC = np.array([[[7, 3]], [[1, 9]], [[5, 5]], [[10, 0]]], dtype=float)
    shares = (joint_GYC[:, 0] / 10).tolist()
    largest = max(abs(a[k] - b[k]) for a, b in itertools.combinations(shares, 2) for k in range(2))
    assert rates.dp_pairwise(joint_GYC).value == pytest.approx(largest)
