"""Rates against hand arithmetic and fairlearn's MetricFrame; bootstrap tables against binomial theory."""

from __future__ import annotations

import numpy as np
import pytest
from fairlearn.metrics import MetricFrame, count, selection_rate
from sklearn.metrics import accuracy_score

from fairpate.fairness import rates

PREDICTED = np.array([0, 1, 1, 1, 0, 1, 0, 0])
GROUPS = np.array([0, 0, 0, 1, 1, 1, 1, 1])
LABELS = np.array([0, 1, 0, 1, 1, 1, 0, 0])


def table(predictions=PREDICTED, groups=GROUPS, labels=LABELS, num_groups=2, answered=None):
    return rates.joint_table(
        predictions, groups, labels_N=labels, answered_N=answered, num_groups=num_groups, num_classes=2
    )


def test_rates_worked_by_hand() -> None:
    joint_GYC = table()
    assert joint_GYC.tolist() == [[[1, 1], [0, 1]], [[2, 0], [1, 2]]]
    assert np.allclose(rates.group_rates(joint_GYC), [[1 / 3, 2 / 3], [3 / 5, 2 / 5]])


def test_group_rates_and_accuracies_equal_fairlearn() -> None:
    random = np.random.default_rng(0)
    predicted, labels = random.integers(0, 2, (2, 400))
    groups = random.integers(0, 4, 400)
    frame = MetricFrame(
        metrics={"rate": selection_rate, "accuracy": accuracy_score, "size": count},
        y_true=labels,
        y_pred=predicted,
        sensitive_features=groups,
    )
    joint_GYC = table(predicted, groups, labels, num_groups=4)
    accuracy, accuracy_G = rates.accuracies(joint_GYC)
    assert np.allclose(rates.group_rates(joint_GYC)[:, 1], frame.by_group["rate"])
    assert np.allclose(accuracy_G, frame.by_group["accuracy"])
    assert accuracy == pytest.approx(frame.overall["accuracy"])
    assert np.array_equal(joint_GYC.sum(axis=(1, 2)), frame.by_group["size"])


def test_only_answered_records_count_and_the_others_are_not_read() -> None:
    answered = np.array([1, 1, 1, 1, 0, 1, 1, 0], dtype=bool)
    unread = np.where(answered, PREDICTED, -1)
    kept = table(PREDICTED[answered], GROUPS[answered], LABELS[answered])
    assert np.array_equal(table(predictions=unread, answered=answered), kept)
    coverage, coverage_G = rates.coverages(GROUPS, answered, num_groups=3)
    assert coverage == 6 / 8
    assert coverage_G[:2].tolist() == [1.0, 3 / 5]
    assert np.isnan(coverage_G[2])


def test_an_empty_group_has_no_rate() -> None:
    joint_GYC = table(num_groups=3)
    assert np.isnan(rates.group_rates(joint_GYC)[2]).all()
    assert np.isnan(rates.accuracies(joint_GYC)[1][2])


def test_certain_probabilities_are_hard_labels() -> None:
    assert np.array_equal(table(np.eye(2)[PREDICTED]), table())


def test_a_mixture_has_the_mean_of_its_members_tables() -> None:
    members = np.random.default_rng(1).integers(0, 2, (5, len(GROUPS)))
    mixture = np.eye(2)[members].mean(axis=0)
    assert np.allclose(table(mixture), np.mean([table(member) for member in members], axis=0))


@pytest.mark.parametrize("soft", [False, True])
def test_bootstrap_tables_have_multinomial_mean_and_spread(soft: bool) -> None:
    predictions = np.eye(2)[PREDICTED] if soft else PREDICTED
    drawn_RGYC = rates.resampled_tables(
        predictions,
        GROUPS,
        labels_N=LABELS,
        num_groups=2,
        num_classes=2,
        generator=np.random.default_rng(2),
        num_replicates=4000,
    )
    share_GYC = table() / len(GROUPS)
    assert drawn_RGYC.shape == (4000, 2, 2, 2)
    assert (drawn_RGYC.sum(axis=(1, 2, 3)) == len(GROUPS)).all()
    stddev_GYC = np.sqrt(len(GROUPS) * share_GYC * (1 - share_GYC))
    assert np.allclose(drawn_RGYC.mean(axis=0), table(), atol=5 * stddev_GYC.max() / np.sqrt(4000))
    assert np.allclose(drawn_RGYC.std(axis=0), stddev_GYC, atol=0.06)


def test_bootstrap_of_nothing_is_empty() -> None:
    nothing = rates.resampled_tables(
        [], [], num_groups=2, num_classes=3, generator=np.random.default_rng(0), num_replicates=5
    )
    assert nothing.shape == (5, 2, 1, 3)
    assert not nothing.any()


def test_cumulative_tables_end_at_the_table() -> None:
    course = rates.cumulative_tables(PREDICTED, GROUPS, num_groups=2, num_classes=2)
    for stop in range(1, len(GROUPS) + 1):
        prefix = rates.joint_table(PREDICTED[:stop], GROUPS[:stop], num_groups=2, num_classes=2)
        assert np.array_equal(course[stop - 1], prefix)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"predictions": PREDICTED + 1}, "predictions to be codes from 0 to 1"),
        ({"groups": GROUPS - 1}, "groups_N to be codes from 0 to 1"),
        ({"labels": LABELS + 0.5}, "labels_N to be codes"),
        ({"labels": LABELS[:-1]}, "got 8, 8, 7 and 8"),
        ({"predictions": np.full((8, 2), 0.7)}, "probabilities that sum to 1"),
        ({"predictions": np.full((8, 2), np.nan)}, "probabilities that sum to 1"),
        ({"predictions": np.full((8, 3), 1 / 3)}, r"shape \(N,\) or \(N, 2\), got \(8, 3\)"),
    ],
)
def test_bad_input_is_named(change: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table(**change)


def test_whole_persons_are_drawn() -> None:
    """Four equal records each: as wide as one record each, twice as wide as rows drawn one by one."""
    generator = np.random.default_rng(0)
    one = {"groups_N": generator.integers(0, 2, 300), "labels_N": generator.integers(0, 2, 300)}
    predictions, drawing = generator.integers(0, 2, 300), {"num_groups": 2, "num_classes": 2, "num_replicates": 4000}
    four = {name: np.repeat(values, 4) for name, values in one.items()}
    persons = np.repeat([f"p{number}" for number in range(300)], 4)

    def spread(tables: rates.FloatArray) -> float:
        return float(np.std(rates.group_rates(tables)[:, 0, 1]))

    alone = spread(rates.resampled_tables(predictions, **one, **drawing, generator=generator))
    rows = spread(rates.resampled_tables(np.repeat(predictions, 4), **four, **drawing, generator=generator))
    tables = rates.resampled_tables(
        np.repeat(predictions, 4), persons_N=persons, **four, **drawing, generator=generator
    )
    assert spread(tables) == pytest.approx(alone, rel=0.08)
    assert spread(tables) == pytest.approx(2 * rows, rel=0.08)
    assert (tables.sum(axis=(1, 2, 3)) == 1200).all()


def test_persons_without_an_answer_are_not_drawn_and_nobody_is_nothing() -> None:
    drawing = {"num_groups": 1, "num_classes": 2, "num_replicates": 3, "generator": np.random.default_rng(0)}
    groups, persons = np.zeros(3, dtype=int), ["a", "a", "b"]
    tables = rates.resampled_tables([1, 1, 0], groups, persons_N=persons, answered_N=[True, True, False], **drawing)
    assert tables.tolist() == [[[[0, 2]]]] * 3
    assert not rates.resampled_tables([1, 1, 0], groups, persons_N=persons, answered_N=[False] * 3, **drawing).any()
