"""Rate constraints: values against other libraries and loops, prices against the definition, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from exact_rates import exact_values, histogram_of
from fairlearn.metrics import demographic_parity_difference, equalized_odds_difference
from sklearn.metrics import precision_score, recall_score

from fairpate.fairness import rates
from fairpate.fairness.rates import joint_table
from fairpate.methods.raco_dp import (
    NAMED_CONSTRAINTS,
    Partition,
    Pricer,
    RateConstraint,
    RateConstraints,
    RateTerm,
    combined,
    named_constraints,
)

GENERATOR = np.random.default_rng(0)
NUM_RECORDS, NUM_CLASSES, NUM_GROUPS = 400, 3, 4
SOFT = GENERATOR.dirichlet(np.ones(NUM_CLASSES), size=NUM_RECORDS)
LABELS = GENERATOR.integers(NUM_CLASSES, size=NUM_RECORDS)
GROUPS = GENERATOR.integers(NUM_GROUPS, size=NUM_RECORDS)
BINARY = (LABELS > 0).astype(int)
TWO = (GROUPS > 1).astype(int)
HARD = GENERATOR.integers(2, size=NUM_RECORDS)


def all_named(**changed: Any) -> list[RateConstraints]:
    settings: dict[str, Any] = {"num_classes": NUM_CLASSES, "num_groups": NUM_GROUPS, "bound": 0.1} | changed
    return [named_constraints(name, **settings) for name in NAMED_CONSTRAINTS]


def largest(constraints: RateConstraints, predictions: npt.NDArray[Any], labels: Any, groups: Any) -> float:
    return max(exact_values(constraints, predictions, labels, groups).values())


def test_a_histogram_counts_every_cell_and_a_record_moves_it_by_one() -> None:
    for constraints in all_named():
        cells = constraints.partition.cells(LABELS, GROUPS)
        histogram = histogram_of(constraints, SOFT, cells)
        np.testing.assert_allclose(histogram.sum(axis=1), np.bincount(cells, minlength=len(histogram)))
        without = histogram_of(constraints, SOFT[1:], cells[1:])
        assert np.abs(histogram - without).sum() == pytest.approx(1, abs=1e-12)


def test_parity_between_two_groups_is_fairlearns() -> None:
    one_hot = np.eye(2)[HARD]
    parity = largest(
        named_constraints("demographic_parity", num_groups=2, num_classes=2, bound=0.1), one_hot, BINARY, TWO
    )
    assert parity == pytest.approx(demographic_parity_difference(BINARY, HARD, sensitive_features=TWO))
    odds = largest(named_constraints("equalized_odds", num_groups=2, num_classes=2, bound=0.1), one_hot, BINARY, TWO)
    assert odds == pytest.approx(equalized_odds_difference(BINARY, HARD, sensitive_features=TWO))
    positives = BINARY == 1
    opportunity = largest(
        named_constraints("equal_opportunity", num_groups=2, num_classes=2, bound=0.1), one_hot, BINARY, TWO
    )
    of_positives = demographic_parity_difference(BINARY[positives], HARD[positives], sensitive_features=TWO[positives])
    assert opportunity == pytest.approx(of_positives)


def test_one_vocabulary_with_the_metrics_for_several_groups_and_classes() -> None:
    table = joint_table(SOFT, GROUPS, num_groups=NUM_GROUPS, num_classes=NUM_CLASSES, labels_N=LABELS)
    settings: dict[str, Any] = {"num_groups": NUM_GROUPS, "num_classes": NUM_CLASSES, "bound": 0.1}
    parity = largest(named_constraints("demographic_parity", **settings), SOFT, LABELS, GROUPS)
    assert parity == pytest.approx(rates.dp_one_vs_rest(table).value)
    odds = largest(named_constraints("equalized_odds", **settings), SOFT, LABELS, GROUPS)
    assert odds == pytest.approx(rates.eo_full(table).value)


@pytest.mark.parametrize("label", range(NUM_CLASSES))
def test_error_rates_are_scikit_learns(label: int) -> None:
    hard = SOFT.argmax(axis=1)
    one_hot, is_label, says_label = np.eye(NUM_CLASSES)[hard], label == LABELS, hard == label
    fnr = named_constraints("false_negative_rate", num_classes=NUM_CLASSES, bound=0.1, label=label)
    assert largest(fnr, one_hot, LABELS, GROUPS) == pytest.approx(1 - recall_score(is_label, says_label))
    fpr = named_constraints("false_positive_rate", num_classes=NUM_CLASSES, bound=0.1, label=label)
    specificity = recall_score(~is_label, ~says_label)
    assert largest(fpr, one_hot, LABELS, GROUPS) == pytest.approx(1 - specificity)
    fdr = 1 - precision_score(is_label, says_label)
    for bound, is_kept in ((fdr + 1e-9, True), (fdr - 1e-6, False)):
        constraint = named_constraints("false_discovery_rate", num_classes=NUM_CLASSES, bound=bound, label=label)
        assert (largest(constraint, one_hot, LABELS, GROUPS) <= 0) == is_kept


def test_without_a_label_there_is_one_constraint_per_class() -> None:
    for name in ("false_negative_rate", "false_positive_rate", "false_discovery_rate"):
        every = exact_values(
            named_constraints(name, num_classes=NUM_CLASSES, bound=0.2, label=None), SOFT, LABELS, GROUPS
        )
        single = [named_constraints(name, num_classes=NUM_CLASSES, bound=0.2, label=c) for c in range(NUM_CLASSES)]
        assert every == {
            name: value for each in single for name, value in exact_values(each, SOFT, LABELS, GROUPS).items()
        }


def test_prices_and_values_are_those_of_the_definition() -> None:
    """Loops over constraints, unions and classes, on a histogram with noise and floored sizes."""
    floor, num_records = 45.0, 250.0
    for constraints in all_named():
        cells = constraints.partition.cells(LABELS, GROUPS)
        noisy = histogram_of(constraints, SOFT, cells) + GENERATOR.laplace(scale=5, size=(cells.max() + 1, NUM_CLASSES))
        multipliers = GENERATOR.uniform(size=len(constraints.constraints))
        values = np.zeros(len(multipliers))
        prices = np.zeros_like(noisy)
        for j, constraint in enumerate(constraints.constraints):
            for term in constraint.terms:
                mass = noisy[list(term.cells)].sum(axis=0)
                size = num_records if term.of_all else max(floor, mass.sum())
                values[j] += np.dot(term.weights, mass) / size
                for cell in term.cells:
                    prices[cell] += num_records * multipliers[j] * np.array(term.weights) / size
        pricer = Pricer(constraints, size_floor=floor, num_records=num_records)
        got_values, got_prices = pricer(noisy, multipliers)
        np.testing.assert_allclose(got_values, values, atol=1e-12)
        np.testing.assert_allclose(got_prices, prices, atol=1e-12)


def test_an_exact_histogram_above_the_floor_gives_the_exact_values() -> None:
    for constraints in all_named():
        cells = constraints.partition.cells(LABELS, GROUPS)
        pricer = Pricer(constraints, size_floor=1.0, num_records=NUM_RECORDS)
        values, _ = pricer(histogram_of(constraints, SOFT, cells), np.zeros(len(constraints.constraints)))
        np.testing.assert_allclose(values, list(exact_values(constraints, SOFT, LABELS, GROUPS).values()))


def test_a_constraint_of_ones_own() -> None:
    """Group 0 is predicted class 2 at least half as often as group 3, by hand: .5 r(3, 2) - r(0, 2) <= 0."""
    partition = Partition(num_groups=NUM_GROUPS)
    terms = (RateTerm(cells=(3,), weights=(0, 0, 0.5)), RateTerm(cells=(0,), weights=(0, 0, -1)))
    own = RateConstraints(
        partition=partition,
        constraints=(RateConstraint(name="half as often", terms=terms, bound=0.0),),
    )
    expected = 0.5 * SOFT[GROUPS == 3, 2].mean() - SOFT[GROUPS == 0, 2].mean()
    assert exact_values(own, SOFT, LABELS, GROUPS) == {"half as often": pytest.approx(expected)}


def test_combined_constraints_are_their_parts() -> None:
    parts = all_named()
    together = combined(*parts)
    assert together.partition == Partition(num_labels=NUM_CLASSES, num_groups=NUM_GROUPS)
    expected = [value for part in parts for value in exact_values(part, SOFT, LABELS, GROUPS).values()]
    np.testing.assert_allclose(list(exact_values(together, SOFT, LABELS, GROUPS).values()), expected)
    assert combined(parts[0]) == parts[0]


def test_a_rate_of_nobody_is_undefined_and_one_below_the_floor_is_named() -> None:
    constraints = named_constraints("demographic_parity", num_groups=3, num_classes=2, bound=0.1)
    probabilities = np.full((100, 2), 0.5)
    groups = np.arange(100) % 2
    values = exact_values(constraints, probabilities, groups, groups)
    assert [np.isnan(value) for value in values.values()] == [False] * 4 + [True] * 2
    histogram = histogram_of(constraints, probabilities, groups)
    assert constraints.floored(histogram, size_floor=5) == constraints.names[4:]
    assert constraints.floored(histogram[:, ::-1] + 2, size_floor=3.9) == ()
    discoveries = named_constraints("false_discovery_rate", num_classes=2, bound=0.1)
    assert discoveries.floored(np.zeros((2, 2)), size_floor=5) == ()


PARTITION = Partition(num_groups=2)
TERM = RateTerm(cells=(0,), weights=(0.0, 1.0))
CONSTRAINT = RateConstraint(name="mine", terms=(TERM,), bound=0.1)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (replace(CONSTRAINT, terms=(replace(TERM, cells=(2,)),)), "numbered from 0 and below 2, got .2,"),
        (replace(CONSTRAINT, terms=(replace(TERM, weights=(1.0,)),)), "2 weights in constraint 'mine'"),
        (replace(CONSTRAINT, bound=-0.1), "'mine' cannot be kept: no predictions bring it below 0"),
        (replace(CONSTRAINT, bound=-1.1, terms=(replace(TERM, weights=(0, -1), of_all=True),)), "below -1, and"),
    ],
)
def test_what_makes_no_constraint_is_refused(constraint: RateConstraint, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RateConstraints(partition=PARTITION, constraints=(CONSTRAINT, constraint))


def test_settings_that_make_no_sense_are_refused() -> None:
    for whole, empty in (
        (RateConstraints(partition=PARTITION, constraints=(CONSTRAINT,)), "constraints"),
        (CONSTRAINT, "terms"),
        (TERM, "cells"),
    ):
        with pytest.raises(ValueError, match=rf"{empty}\s+Tuple should have at least 1 item"):
            replace(whole, **{empty: ()})
    for whole, field, value in ((CONSTRAINT, "bound", float("nan")), (TERM, "weights", (0.0, float("inf")))):
        with pytest.raises(ValueError, match=rf"{field}(\.1)?\s+Input should be a finite number"):
            replace(whole, **{field: value})
    with pytest.raises(ValueError, match=r"cells\.0\s+Input should be greater than or equal to 0"):
        replace(TERM, cells=(-1,))
    with pytest.raises(ValueError, match="num_groups >= 2"):
        named_constraints("demographic_parity", num_groups=1, num_classes=2, bound=0.1)
    with pytest.raises(ValueError, match=r"bound >= 0, .* got -0.1"):
        named_constraints("equalized_odds", num_groups=2, num_classes=2, bound=-0.1)
    with pytest.raises(ValueError, match="label below 2, got 2"):
        named_constraints("false_negative_rate", num_classes=2, bound=0.1, label=2)
    with pytest.raises(ValueError, match=r"0 <= bound <= 1 .* got 1\.1"):
        named_constraints("false_discovery_rate", num_classes=2, bound=1.1)
    with pytest.raises(ValueError, match="label for equal_opportunity"):
        named_constraints("equal_opportunity", num_classes=2, num_groups=2, bound=0.1, label=None)
    with pytest.raises(ValueError, match=r"among demographic_parity, .* got 'parity'"):
        named_constraints("parity", num_classes=2, num_groups=2, bound=0.1)
    with pytest.raises(ValueError, match="groups_N to be codes from 0 to 1"):
        PARTITION.cells(LABELS, GROUPS)
    with pytest.raises(ValueError, match="num_labels"):
        Partition(num_labels=0)
    with pytest.raises(ValueError, match="group below 2, got label 0 and group 2"):
        PARTITION.cell(group=2)


def test_only_parts_over_the_same_labels_groups_and_classes_combine() -> None:
    two = named_constraints("demographic_parity", num_groups=2, num_classes=2, bound=0.1)
    with pytest.raises(ValueError, match=r"same number of groups, got \[2, 3\]"):
        combined(two, named_constraints("demographic_parity", num_groups=3, num_classes=2, bound=0.1))
    with pytest.raises(ValueError, match=r"same number of classes, got \[2, 3\]"):
        combined(two, named_constraints("demographic_parity", num_groups=2, num_classes=3, bound=0.1))
