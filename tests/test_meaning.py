"""The sentence of what an epsilon means is a bound that holds, that some mechanism reaches, and that says so."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal

import numpy as np
import pytest

from fairpate.pages import (
    at_most,
    delta_caution,
    delta_text,
    epsilon_text,
    is_void_delta,
    least_wrong,
    meaning,
    most_often_right,
    percent_at_most,
    right_at_most,
    strength,
)

pytestmark = pytest.mark.usefixtures("light_runs")

EPSILONS = (0.0, 0.1, 1.0, 2.5, 5.0, 12.0)
DELTAS = (0.0, 1e-5, 0.05, 0.3)


def most_right(first, second):
    """The best of all decision rules, tried one by one: each maps every output to one of the two."""
    rules = itertools.product((0, 1), repeat=len(first))
    return max(
        sum((p if decided == 0 else q) / 2 for p, q, decided in zip(first, second, rule, strict=True)) for rule in rules
    )


def delta_of(first, second, epsilon):
    """The least delta for which two distributions over few outputs are (epsilon, delta)-indistinguishable."""
    e = math.exp(epsilon)
    return max(np.maximum(first - e * second, 0).sum(), np.maximum(second - e * first, 0).sum())


@pytest.mark.parametrize(("epsilon", "delta"), [*itertools.product(EPSILONS, DELTAS)])
def test_randomised_response_with_a_leak_reaches_the_bound(epsilon: float, delta: float) -> None:
    """With probability delta it tells the truth and that it does, else randomised response answers."""
    truth = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    lie = (1 - delta) / (1 + math.exp(epsilon))
    first, second = np.array([delta, 0, truth, lie]), np.array([0, delta, lie, truth])
    assert delta_of(first, second, epsilon) == pytest.approx(delta, abs=1e-12)
    assert 1 - least_wrong(epsilon, delta) == pytest.approx(most_right(first, second), abs=1e-12)


def test_no_mechanism_that_keeps_the_guarantee_is_guessed_more_often() -> None:
    generator = np.random.default_rng(0)
    close = 0
    for _ in range(300):
        first, second = generator.dirichlet([0.3] * 5), generator.dirichlet([0.3] * 5)
        epsilon = float(generator.uniform(0, 4))
        bound = 1 - least_wrong(epsilon, delta_of(first, second, epsilon))
        right = most_right(first, second)
        assert right <= bound + 1e-12
        close += right > bound - 0.1
    assert close > 30  # the bound is not far from what is reached


def test_the_printed_share_is_rounded_up_and_never_certain() -> None:
    # e/(1+e) = .731058..., e^2/(1+e^2) = .880797..., e^5/(1+e^5) = .993307..., e^12/(1+e^12) = .99999385...
    printed = [most_often_right(epsilon, 0.0) for epsilon in (0.0, 1.0, 2.0, 5.0, 12.0, 26.0)]
    assert printed == [f"{share}\u00a0%" for share in ("50.0", "73.2", "88.1", "99.4", "99.9994", "practically 100")]
    for epsilon in np.linspace(0, 17, 200).tolist():
        share = Decimal(most_often_right(epsilon, 1e-5).removesuffix("\u00a0%"))
        assert 100 * (1 - least_wrong(epsilon, 1e-5)) <= float(share) < 100
    assert most_often_right(0.0, 1e-5) == "50.1\u00a0%"
    assert least_wrong(800.0, 1e-5) == pytest.approx(0, abs=1e-300)
    assert most_often_right(1.0, 1.0) == most_often_right(math.inf, 0.0) == "practically 100\u00a0%"


def test_how_strong_a_bound_is_follows_from_it() -> None:
    """ln 19 = 2.944 is where 95 % is reached, ln 999 = 6.907 where 99.9 % is."""
    assert [strength(epsilon, 0.0) for epsilon in (0, 2.94, 2.95, 6.90, 6.91, 26, math.inf)] == [
        *("bounded", "bounded", "weak", "weak", "void", "void", "void"),
    ]
    assert strength(0.1, 0.999) == "void"


def test_a_delta_is_cautioned_from_one_in_n_and_void_where_ten_records_or_a_share_of_them_may_be_published() -> None:
    """1/5,000 = .0002, at which one record is published on average; ten are at .002, and .01 is never small."""
    cautions = {delta: delta_caution(delta, 5000, "record") for delta in (1e-5, 1.99e-4, 2e-4, 1e-3, 0.1)}
    assert [bool(words) for words in cautions.values()] == [False, False, True, True, True]
    assert "here 1/5,000" in cautions[2e-4]
    assert "1 of them on average" in cautions[2e-4]
    assert "500 of them on average" in cautions[0.1]
    assert delta_caution(0.1, 80, "person").count("person") == 2
    assert [is_void_delta(delta, 5000) for delta in (1.99e-3, 2e-3, 0.01)] == [False, True, True]
    # Of few records, of many, and where 1/n times n is below 1 in floating point.
    assert [bool(delta_caution(delta, 40, "record")) for delta in (0.0099, 0.01, 0.024)] == [False, True, True]
    assert [bool(delta_caution(1e-5, n, "record")) for n in (99_999, 100_000, 10**6)] == [False, True, True]
    assert all(delta_caution(1 / n, n, "record") for n in range(2, 3000))
    # Without a public number: for which numbers it would do.
    assert [bool(delta_caution(delta, None, "record")) for delta in (1e-5, 9.9e-5, 1e-4)] == [False, False, True]
    assert "only if there are fewer than 1,000;" in delta_caution(1e-3, None, "record")
    assert [is_void_delta(delta, None) for delta in (0.0099, 0.01)] == [False, True]


@pytest.mark.parametrize(
    ("unit", "relation", "guess"),
    [
        ("record", "add or remove one", "whether one given record was among the private ones"),
        ("record", "replace one", "which of two contents one private record has"),
        ("person", "add or remove one", "whether one given person was among the people of the private records"),
        ("person", "replace one", "which of two contents the records of one given person have together"),
        ("sensitive attribute", "replace one", "which of two values the sensitive attribute of one given record has"),
        ("household", "add or remove one", "whether one given household was behind the votes"),
        ("household", "replace one", "whether one given household had one of two contents"),
    ],
)
def test_the_sentence_asks_what_unit_and_relation_compare(unit: str, relation, guess: str) -> None:
    said = meaning(1.0, 1e-5, unit=unit, relation=relation, seen="the model")
    assert said == (
        f"Somebody sees the model, knows all other private data, and has to guess {guess}; both are equally "
        "likely. The guess is right at most 73.2\u00a0% of the time, that of a tossed coin 50\u00a0%."
    )


@pytest.mark.parametrize("epsilon", [12.0, 26.0, 1000.0])
def test_a_large_epsilon_is_said_to_say_next_to_nothing(epsilon: float) -> None:
    said = meaning(epsilon, 1e-5, unit="person", relation="add or remove one", seen="the labels")
    assert "nearly always" in said
    assert said.endswith("this ε says next to nothing about one person.")


def test_a_weak_and_a_missing_bound_are_said() -> None:
    weak = meaning(5.13, 1e-5, unit="record", relation="add or remove one", seen="the student")
    coin = "that of a tossed coin 50\u00a0%"
    assert weak.endswith(f"is right at most 99.5\u00a0% of the time, {coin}. This is a weak bound.")
    none = meaning(math.inf, 1e-5, unit="record", relation="add or remove one", seen="the model")
    assert none == "No ε is finite: there is no bound on what can be learned about one record."


def test_no_printed_bound_is_below_the_bound() -> None:
    """An upper bound that is rounded to the nearest would be below it half of the time."""
    generator = np.random.default_rng(1)
    for value in (10 ** generator.uniform(-9, 3, 300)).tolist():
        exact = Decimal(repr(value))
        assert exact <= Decimal(at_most(value)) <= exact * Decimal("1.0012")
        assert exact <= Decimal(at_most(value, digits=3)) <= exact * Decimal("1.012")
        assert exact <= Decimal(epsilon_text(value, digits=4)) <= exact + Decimal("0.0001")
    for share in generator.random(300).tolist():
        printed = Decimal(percent_at_most(share).removesuffix("\u00a0%"))
        assert 100 * Decimal(repr(share)) <= printed <= 100 * Decimal(repr(share)) + Decimal("0.1")
        assert 100 * Decimal(1 - share) <= Decimal(right_at_most(share).removesuffix("\u00a0%")) + Decimal("1e-9")
    for delta in (10 ** generator.uniform(-9, -1, 300)).tolist():
        assert Decimal(repr(delta)) <= Decimal(delta_text(delta)) <= Decimal(repr(delta)) * Decimal("1.00001")
    # A number that its digits hold is not moved.
    assert (at_most(0.07), at_most(3.0), at_most(math.inf)) == ("0.07", "3", "inf")
    assert (percent_at_most(0.1), percent_at_most(0.0), percent_at_most(1.0)) == (
        "10.0\u00a0%",
        "0\u00a0%",
        "100\u00a0%",
    )
    assert epsilon_text(2.0, digits=4) == "2.0000"
    assert delta_text(2.5e-5) == "2.5e-05"
