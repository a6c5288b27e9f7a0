"""The table of notions: fairlearn for two classes, definitions read literally for more, and what is undefined."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from fairlearn import metrics as fairlearn_metrics

from fairpate.fairness.rates import NAMES, NOTIONS, joint_table


def records(num_classes: int, num_groups: int, *, seed: int, number: int = 400) -> tuple[np.ndarray, ...]:
    """Labels, predictions that depend on group and label, and groups."""
    random = np.random.default_rng(seed)
    groups, labels = random.integers(num_groups, size=number), random.integers(num_classes, size=number)
    guess = random.integers(num_classes, size=number)
    right = random.random(number) < 0.3 + 0.5 * groups / num_groups
    return labels, np.where(right, labels, guess), groups


def values(labels: np.ndarray, predicted: np.ndarray, groups: np.ndarray, **shape: int) -> dict[str, float]:
    answered = predicted >= 0
    joint_GYC = joint_table(predicted, groups, labels_N=labels, answered_N=answered, **shape)
    return {name: notion.metric(joint_GYC).value for name, notion in NOTIONS.items()}


@pytest.mark.parametrize("num_groups", [2, 3, 5])
def test_two_classes_agree_with_fairlearn(num_groups: int) -> None:
    labels, predicted, groups = records(2, num_groups, seed=num_groups)
    found = values(labels, predicted, groups, num_groups=num_groups, num_classes=2)
    by_group = {"y_true": labels, "y_pred": predicted, "sensitive_features": groups}
    assert found["equalized_odds"] == pytest.approx(fairlearn_metrics.equalized_odds_difference(**by_group))
    assert found["equal_opportunity"] == pytest.approx(fairlearn_metrics.equal_opportunity_difference(**by_group))
    accuracy = fairlearn_metrics.MetricFrame(metrics=lambda y_true, y_pred: (y_true == y_pred).mean(), **by_group)
    assert found["accuracy_parity"] == pytest.approx(accuracy.difference())
    for name in ("false_negative_rate", "false_positive_rate"):
        assert found[name] == pytest.approx(getattr(fairlearn_metrics, name)(labels, predicted))
    ratio = fairlearn_metrics.demographic_parity_ratio(**by_group)
    assert found["impact_ratio"] == pytest.approx(1 - ratio)
    if num_groups == 2:
        assert found["demographic_parity"] == pytest.approx(fairlearn_metrics.demographic_parity_difference(**by_group))


def share(event: np.ndarray, among: np.ndarray) -> float:
    return float(event[among].mean())


@pytest.mark.parametrize(("num_classes", "num_groups"), [(2, 2), (3, 2), (4, 5)])
def test_any_number_of_classes_and_groups_by_brute_force(num_classes: int, num_groups: int) -> None:
    """Every formula of the table, read as it stands, among the answered records."""
    y, p, g = records(num_classes, num_groups, seed=7)
    p = np.where(np.random.default_rng(1).random(len(p)) < 0.2, -1, p)
    found = values(y, p, g, num_groups=num_groups, num_classes=num_classes)
    answered, positive = p >= 0, [1] if num_classes == 2 else range(num_classes)
    pairs = list(itertools.product(range(num_groups), repeat=2))
    gap_of = {
        "demographic_parity": max(
            share(p == k, answered & (g == a)) - share(p == k, answered & (g != a))
            for a in range(num_groups)
            for k in range(num_classes)
        ),
        "equalized_odds": max(
            abs(share(p == k, answered & given & (g == a)) - share(p == k, answered & given & (g == b)))
            for k in range(num_classes)
            for given in (y == k, y != k)
            for a, b in pairs
        ),
        "equal_opportunity": max(
            abs(share(p == k, answered & (y == k) & (g == a)) - share(p == k, answered & (y == k) & (g == b)))
            for k in positive
            for a, b in pairs
        ),
        "accuracy_parity": max(
            abs(share(p == y, answered & (g == a)) - share(p == y, answered & (g == b))) for a, b in pairs
        ),
        "impact_ratio": 1
        - min(
            min(share(p == k, answered & (g == a)) for a in range(num_groups))
            / max(share(p == k, answered & (g == a)) for a in range(num_groups))
            for k in positive
        ),
        "false_negative_rate": max(share(p != k, answered & (y == k)) for k in positive),
        "false_positive_rate": max(share(p == k, answered & (y != k)) for k in positive),
        "false_discovery_rate": max(share(y != k, answered & (p == k)) for k in positive),
    }
    assert found == pytest.approx(gap_of)


def test_what_has_no_record_is_undefined_and_never_zero() -> None:
    everyone_no = values(np.array([0, 1, 0, 1]), np.zeros(4, int), np.array([0, 0, 1, 1]), num_groups=2, num_classes=2)
    # Nobody is predicted the positive class: no group has a highest rate, and of those who are nothing can be said.
    assert [name for name in NAMES if math.isnan(everyone_no[name])] == ["impact_ratio", "false_discovery_rate"]
    assert (everyone_no["equalized_odds"], everyone_no["false_negative_rate"]) == (0, 1)
    nobody = values(np.array([0, 1]), np.array([-1, -1]), np.array([0, 1]), num_groups=2, num_classes=2)
    assert all(math.isnan(value) for value in nobody.values())
    # One group alone has error rates, and no gap; nor is there one where only one group has the positive class.
    alone = values(np.array([0, 1, 1]), np.array([0, 1, 0]), np.zeros(3, int), num_groups=2, num_classes=2)
    gaps = {name for name, notion in NOTIONS.items() if not notion.bounds_rate}
    assert {name for name, value in alone.items() if math.isnan(value)} == gaps
    assert alone["false_negative_rate"] == 0.5
    apart = values(np.array([0, 1, 0]), np.array([0, 1, 1]), np.array([0, 0, 1]), num_groups=2, num_classes=2)
    assert math.isnan(apart["equal_opportunity"])
    assert apart["equalized_odds"] == 1.0


def test_the_documentation_lists_every_notion() -> None:
    page = (Path(__file__).parents[2] / "docs" / "comparing.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"| `{name}` |" in page


def test_the_table_has_a_row_for_each_name_and_a_reading_of_its_own() -> None:
    assert tuple(NOTIONS) == NAMES
    assert len({notion.reading for notion in NOTIONS.values()}) == len(NAMES)
    assert len({notion.measure for notion in NOTIONS.values()}) == len(NAMES)
