"""`fairpate filter-cost`: Theorem 1 by hand arithmetic, both ways, in words and as JSON."""

from __future__ import annotations

import json
import math

import pytest

from fairpate.methods.preprocess import cost_behind_sorted_filter, target_behind_sorted_filter


def test_a_tenth_triples_epsilon_and_the_target_is_its_inverse(fairpate) -> None:
    """K = 2 + ceil(.2 / .9) = 3: (3, 3 e^3 delta) costs what (1, delta) does; (1/3, delta / (3 e)) costs (1, delta)."""
    code, output, _ = fairpate("filter-cost", "--epsilon", "1", "--delta", "1e-6", "--disparity", "0.1", "--json")
    found = json.loads(output)
    assert (code, found["factor"]) == (0, 3)
    assert found["given"] == {"epsilon": 1, "delta": 1e-6, "disparity": 0.1}
    assert found["cost"] == {"epsilon": 3, "delta": pytest.approx(6.0256610769563e-5)}  # 3 e^3 = 60.2566...
    assert found["target"] == {"epsilon": pytest.approx(1 / 3), "delta": pytest.approx(1.2262648039e-7)}  # 1 / (3 e)


@pytest.mark.parametrize("disparity", [0, 0.01, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_what_may_be_spent_costs_what_was_asked(disparity: float, epsilon: float) -> None:
    target = target_behind_sorted_filter(epsilon, 1e-5, max_disparity=disparity)
    assert cost_behind_sorted_filter(*target, max_disparity=disparity) == pytest.approx((epsilon, 1e-5))


def test_it_reads_in_words(fairpate) -> None:
    code, output, errors = fairpate("filter-cost", "--epsilon", "0.5", "--disparity", "0.5")
    assert (code, errors) == (0, "")
    assert "changes at most 4 of those kept" in output
    assert f"epsilon 0.5, delta 1e-05 behind the filter costs epsilon 2, delta {4 * math.exp(2) * 1e-5:.3g}" in output
    assert "to cost epsilon 0.5, delta 1e-05, spend epsilon 0.125" in output
    assert "never for a stream" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epsilon", "1", "--disparity", "1"], "0 <= max_disparity < 1, got 1.0"),
        (["--epsilon", "1", "--disparity", "0.1", "--delta", "1"], "0 <= delta < 1"),
        (["--epsilon", "nan", "--disparity", "0.1"], "greater than or equal to 0"),
        (["--epsilon", "-1", "--disparity", "0.1"], "--epsilon"),
        (["--epsilon", "1"], "--disparity"),
    ],
)
def test_what_is_no_guarantee_or_no_disparity_is_bad_usage(fairpate, arguments: list[str], words: str) -> None:
    code, output, errors = fairpate("filter-cost", *arguments)
    assert (code, output) == (2, "")
    assert words in errors


def test_a_cost_beyond_all_numbers_is_no_guarantee(fairpate) -> None:
    _, output, _ = fairpate("filter-cost", "--epsilon", "10000", "--disparity", "0.1", "--json")
    assert json.loads(output)["cost"] == {"epsilon": 30000, "delta": 1}
