"""`fairpate filter-cost`: Theorem 1 by hand arithmetic, both ways, in words and as JSON."""

from __future__ import annotations

import json

import pytest

from fairpate.methods.pate import cost_behind_sorted_filter, target_behind_sorted_filter


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
    """K = 2 + ceil(1 / .5) = 4: 4 e^2 1e-5 = 2.95562e-4 is rounded up, 1e-5 / (4 e^.5) = 1.51633e-6 down."""
    code, output, errors = fairpate("filter-cost", "--epsilon", "0.5", "--disparity", "0.5")
    assert (code, errors) == (0, "")
    assert "changes at most 4 of those kept" in output
    assert "epsilon 0.5, delta 10⁻⁵ behind the filter costs epsilon 2, delta 0.0002956" in output
    assert "to cost epsilon 0.5, delta 10⁻⁵, spend epsilon 0.125, delta 1.516e-06 behind it" in output
    assert "never for a stream" in output


@pytest.mark.parametrize(("epsilon", "spent"), [("2", "0.6666"), ("0.5", "0.1666"), ("0.3", "0.1,")])
def test_who_spends_what_it_says_stays_within(fairpate, epsilon: str, spent: str) -> None:
    """Two thirds to four digits are .6667, which would cost 2.0001."""
    _, output, _ = fairpate("filter-cost", "--epsilon", epsilon, "--disparity", "0.1")
    assert f"spend epsilon {spent}" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epsilon", "1", "--disparity", "1"], "0 <= max_disparity < 1, got 1.0"),
        (["--epsilon", "1", "--disparity", "0.1", "--delta", "1"], "0 <= delta < 1"),
        (["--epsilon", "nan", "--disparity", "0.1"], "expected >= 0"),
        (["--epsilon", "-1", "--disparity", "0.1"], "--epsilon"),
        (["--epsilon", "inf", "--disparity", "0.1"], "a finite epsilon >= 0"),
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
