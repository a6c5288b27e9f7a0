"""Theorem 1, both ways: what training costs behind the sorted filter, and what it may spend to cost no more."""

from __future__ import annotations

import pytest

from fairpate.fairness.sorted_filter import cost_behind_sorted_filter, preprocessing_factor, target_behind_sorted_filter


def test_a_tenth_triples_epsilon_and_the_target_is_its_inverse() -> None:
    """K = 2 + ceil(.2 / .9) = 3: (3, 3 e^3 delta) costs what (1, delta) does; (1/3, delta / (3 e)) costs (1, delta)."""
    assert preprocessing_factor(0.1) == 3
    assert cost_behind_sorted_filter(1, 1e-6, max_disparity=0.1) == (3, pytest.approx(6.0256610769563e-5))
    target = target_behind_sorted_filter(1, 1e-6, max_disparity=0.1)
    assert target == (pytest.approx(1 / 3), pytest.approx(1.2262648039e-7))


@pytest.mark.parametrize("disparity", [0, 0.01, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_what_may_be_spent_costs_what_was_asked(disparity: float, epsilon: float) -> None:
    target = target_behind_sorted_filter(epsilon, 1e-5, max_disparity=disparity)
    assert cost_behind_sorted_filter(*target, max_disparity=disparity) == pytest.approx((epsilon, 1e-5))
