"""Theorem 1: its factor in exact arithmetic, and the sorted filter by brute force over neighbouring data sets."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from fairpate.fairness.gate import filter_stream
from fairpate.fairness.sorted_filter import cost_behind_sorted_filter, preprocessing_factor, sorted_filter
from fairpate.types import GateRule


@pytest.mark.parametrize(
    ("max_disparity", "factor"),
    [(0, 2), (0.01, 3), (0.1, 3), (0.2, 3), (Fraction(1, 3), 3), (0.5, 4), (0.8, 10), (0.9, 20)],
)
def test_the_factor_is_exact(max_disparity: float | Fraction, factor: int) -> None:
    assert preprocessing_factor(max_disparity) == factor
    epsilon, delta = cost_behind_sorted_filter(0.5, 1e-9, max_disparity=max_disparity)
    assert epsilon == factor * 0.5
    assert delta == pytest.approx(factor * math.exp(factor * 0.5) * 1e-9)


def test_a_cost_beyond_all_numbers_is_no_promise() -> None:
    assert cost_behind_sorted_filter(1e4, 1e-9, max_disparity=0.1) == (3e4, 1.0)
    assert cost_behind_sorted_filter(1e4, 0.0, max_disparity=0.1) == (3e4, 0.0)


@pytest.mark.parametrize(("max_disparity", "largest"), [(0.1, 3), (0.5, 4), (0.8, 10)])
def test_one_record_changes_at_most_k_kept_ones_and_some_record_changes_k(max_disparity: float, largest: int) -> None:
    """All sizes of the two groups, the new record at any place of the order, in either group."""
    found = 0
    for first, second in itertools.product(range(8), range(14)):
        size = first + second
        groups = np.array([0] * first + [1] * second)
        order = np.random.default_rng(size).permutation(size) if size else np.zeros(0)
        ids = np.arange(size)
        kept = set(ids[sorted_filter(np.zeros(size), groups, order, max_disparity=max_disparity)])
        for group, place in itertools.product((0, 1), (-1, size // 2 - 0.5, size)):
            wider = sorted_filter(
                np.zeros(size + 1), np.append(groups, group), np.append(order, place), max_disparity=max_disparity
            )
            distance = len(kept ^ set(np.append(ids, size)[wider]))
            assert distance <= preprocessing_factor(max_disparity)
            found = max(found, distance)
    assert found == largest == preprocessing_factor(max_disparity)


def test_the_smaller_group_is_kept_whole_and_the_larger_from_the_front_of_the_order() -> None:
    """Gamma 1/3 keeps m + floor(m): label 0 has two of group 0 and five of group 1; label 1 has group 1 alone."""
    labels = [0, 0, 0, 0, 0, 0, 0, 1, 1]
    groups = [0, 1, 1, 1, 0, 1, 1, 1, 1]
    order = [9, 8, 7, 6, 5, 4, 3, 2, 1]
    kept = sorted_filter(labels, groups, order, max_disparity=Fraction(1, 3))
    assert kept.tolist() == [True, False, True, True, True, True, True, False, False]


def test_the_streaming_filter_is_not_covered() -> None:
    """One more record at the front flips far more than K = 3 later decisions."""
    rule = GateRule(max_disparity=0.05, min_count=5)
    worst = 0
    for seed in range(12):
        generator = np.random.default_rng(seed)
        labels, groups = generator.integers(2, size=400), generator.integers(2, size=400)
        kept = filter_stream(labels, groups, rule=rule, num_groups=2, num_classes=2)
        for label, group in itertools.product((0, 1), (0, 1)):
            wider = filter_stream(
                np.append(label, labels), np.append(group, groups), rule=rule, num_groups=2, num_classes=2
            )
            worst = max(worst, int((kept != wider[1:]).sum()))
    assert worst > 10 * preprocessing_factor(0.05)


def test_what_the_theorem_does_not_speak_of_is_refused() -> None:
    with pytest.raises(ValueError, match="groups 0 and 1"):
        sorted_filter([0, 0], [0, 2], [0, 1], max_disparity=0.1)
    with pytest.raises(ValueError, match="ties"):
        sorted_filter([0, 0], [0, 1], [1, 1], max_disparity=0.1)
    with pytest.raises(ValueError, match="lengths"):
        sorted_filter([0], [0, 1], [0, 1], max_disparity=0.1)
    for margin in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="max_disparity"):
            preprocessing_factor(margin)
    with pytest.raises(ValueError, match="epsilon"):
        cost_behind_sorted_filter(-1.0, 0.0, max_disparity=0.1)
