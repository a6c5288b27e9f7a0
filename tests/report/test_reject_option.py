"""The reject option in several orders, against streams worked by hand and a count of every prefix."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest

from fairpate.fairness.gate import DemographicParityGate, filter_stream
from fairpate.report.metrics import evaluate
from fairpate.report.reject_option import RejectOptionSpread, reject_option_spread, resampled_reject_option
from fairpate.types import GateRule

pytestmark = pytest.mark.usefixtures("few_replicates", "remembered_digits")

STREAM = [(0, 1), (0, 1), (1, 0), (1, 0), (0, 1), (0, 0), (1, 1), (1, 0), (0, 0), (0, 1), (1, 1), (1, 1)]
RULE = GateRule(max_disparity=0.11, min_count=2)


class Orders:
    """Stands in for a generator and hands out the given permutations."""

    def __init__(self, *orders: list[int]) -> None:
        self.orders = iter(orders)

    def permutation(self, size: int) -> np.ndarray:
        order = np.array(next(self.orders))
        assert sorted(order) == list(range(size))
        return order


def spread(stream, rule=RULE, *, orders=None, seed=0, num_groups=2, num_classes=2, num_orders=None, truth=None):
    groups, labels = np.array(stream, dtype=np.int64).reshape(-1, 2).T
    return reject_option_spread(
        labels,
        groups,
        true_labels_N=np.ones_like(labels) if truth is None else truth,
        rule=rule,
        num_groups=num_groups,
        num_classes=num_classes,
        generator=Orders(*orders) if orders else np.random.default_rng(seed),
        num_orders=num_orders or (len(orders) if orders else 10),
    )


def plain(measured: RejectOptionSpread):
    return json.loads(json.dumps(measured.to_json(), allow_nan=False))


def test_a_stream_and_its_reverse_worked_by_hand() -> None:
    # Forwards the gate keeps 1111 0 1 1 0 1 0 1 1, in the end [[2, 2], [2, 3]]; once both groups have two answers one
    # has label 1 alone and the other label 0. Backwards it keeps 11111 0 0 1 0 0 1 0, in the end [[1, 3], [1, 2]]; the
    # fourth answer leaves [[1, 1], [0, 2]].
    measured = spread(STREAM, orders=[list(range(12)), list(range(11, -1, -1))])
    forward, backward = measured.orders
    assert (forward.coverage, backward.coverage) == (9 / 12, 7 / 12)
    assert (forward.coverage_G, backward.coverage_G) == ((4 / 6, 5 / 6), (4 / 6, 3 / 6))
    assert (forward.accuracy, backward.accuracy) == pytest.approx((5 / 9, 5 / 7))
    assert (forward.final_gap, backward.final_gap) == pytest.approx((1 / 10, 1 / 12))
    assert (forward.max_gap, backward.max_gap) == (1, 1 / 2)
    assert (forward.max_gap_from, backward.max_gap_from) == (4, 4)
    assert measured.num_records == 12
    assert (measured.coverage.low, measured.coverage.high) == (7 / 12, 9 / 12)
    assert measured.coverage.mean == pytest.approx(8 / 12)
    assert measured.coverage_G[1].mean == pytest.approx(4 / 6)
    assert measured.final_gap.mean == pytest.approx((1 / 10 + 1 / 12) / 2)
    assert measured.max_gap.mean == 3 / 4


def test_a_gate_that_is_off_answers_all_whatever_the_order() -> None:
    measured = spread(STREAM, GateRule(max_disparity=math.inf, min_count=1))
    assert all(order.coverage == 1 for order in measured.orders)
    # Of six records each, group 0 has label 1 four times and group 1 three times.
    for value, expected in ((measured.accuracy, 7 / 12), (measured.final_gap, 1 / 6)):
        assert (value.low, value.mean, value.high) == pytest.approx((expected,) * 3)
    assert plain(measured)["rule"]["max_disparity"] is None


def test_an_order_without_a_gap_is_left_out_of_the_mean_and_counted() -> None:
    # Second order: (1, 1) is answered, (0, 0) would leave a gap of 1, (1, 0) has no other group, so one group remains.
    rule = GateRule(max_disparity=0.5, min_count=0)
    measured = spread([(0, 0), (1, 1), (1, 0)], rule, orders=[[0, 1, 2], [1, 0, 2]])
    assert [order.coverage_G for order in measured.orders] == [(1, 1 / 2), (0, 1)]
    assert (measured.final_gap.mean, measured.final_gap.n_undefined) == (0, 1)
    gap = plain(measured)["orders"][1]
    assert gap["final_gap"] is gap["max_gap"] is gap["max_gap_from"] is None


def test_a_group_without_records_changes_nothing_but_its_own_coverage() -> None:
    two, three = plain(spread(STREAM)), plain(spread(STREAM, num_groups=3))
    for order in three["orders"]:
        assert order["coverage_G"].pop() is None
    assert three["coverage_G"].pop() == {"mean": None, "low": None, "high": None, "n_undefined": 10}
    assert three == two


def test_a_group_too_small_to_leave_the_cold_start_has_a_final_gap_alone() -> None:
    measured = spread([*STREAM, (2, 0)], num_groups=3)
    assert not any(math.isnan(order.final_gap) for order in measured.orders)
    assert all(order.max_gap_from is None for order in measured.orders)
    assert plain(measured)["max_gap"] == {"mean": None, "low": None, "high": None, "n_undefined": 10}


@pytest.mark.parametrize("stream", [[], [(0, 1), (0, 0), (0, 1)]])
def test_without_two_groups_no_gap_is_defined(stream) -> None:
    measured = plain(spread(stream))
    assert measured["final_gap"]["mean"] is measured["max_gap"]["mean"] is None
    assert measured["coverage"]["mean"] == (1 if stream else None)
    assert measured["accuracy"]["n_undefined"] == (0 if stream else 10)


def test_every_order_is_what_counting_each_prefix_gives() -> None:
    random = np.random.default_rng(3)
    stream = np.stack([random.integers(0, 3, 150), random.integers(0, 4, 150)], axis=1)
    truth = random.integers(0, 4, 150)
    rule = GateRule(max_disparity=0.15, min_count=5)
    orders = [random.permutation(150).tolist() for _ in range(4)]
    measured = spread(stream, rule, orders=orders, num_groups=3, num_classes=4, truth=truth)
    for order, result in zip(orders, measured.orders, strict=True):
        gate = DemographicParityGate(rule, num_groups=3, num_classes=4)
        answered = [row for row in order if gate.admit(*stream[row].tolist())]
        prefixes = [stream[answered[: end + 1]] for end in range(len(answered))]
        warm = [end for end, prefix in enumerate(prefixes) if np.bincount(prefix[:, 0], minlength=3).min() >= 5]
        gaps = [_largest_gap(prefixes[end]) for end in warm]
        assert result.max_gap_from == warm[0] + 1
        assert result.max_gap == pytest.approx(float(max(gaps)))
        assert result.final_gap == pytest.approx(float(gaps[-1]))
        assert result.accuracy == pytest.approx(np.mean([stream[row, 1] == truth[row] for row in answered]))
        assert result.coverage == len(answered) / 150


def test_the_generator_decides_the_orders() -> None:
    assert spread(STREAM, seed=1) == spread(STREAM, seed=1)
    measured = spread(STREAM, seed=1, num_orders=20)
    assert len(measured.orders) == 20
    assert measured.coverage.low < measured.coverage.high


def test_bad_input_is_named() -> None:
    with pytest.raises(IndexError, match="0 <= group < 2, got 2"):
        spread([*STREAM, (2, 0)])


def _largest_gap(prefix: np.ndarray) -> Fraction:
    gaps = []
    for group in range(3):
        inside, outside = prefix[prefix[:, 0] == group, 1], prefix[prefix[:, 0] != group, 1]
        for label in range(4):
            rates = [Fraction(int((part == label).sum()), len(part)) for part in (inside, outside)]
            gaps.append(rates[0] - rates[1])
    return max(gaps)


def test_an_interval_of_what_the_gate_answers_holds_the_gap_that_it_keeps():
    """Resampling the answered records alone moves them off the margin, and its interval lies above the gap."""
    generator = np.random.default_rng(0)
    groups = generator.integers(2, size=4000)
    predicted = (generator.random(4000) < np.where(groups == 1, 0.7, 0.4)).astype(np.int64)
    truth = np.where(generator.random(4000) < 0.9, predicted, 1 - predicted)
    rule = GateRule(max_disparity=0.02, min_count=50)
    answered = filter_stream(predicted, groups, rule=rule, num_groups=2, num_classes=2)
    names = {"class_names": ("no", "yes"), "group_names": ("a", "b")}

    def interval(rule):
        found = evaluate(
            predicted, labels_N=truth, groups_N=groups, answered_N=answered, **names, generator=generator, rule=rule
        )
        return found.gaps["dp_one_vs_rest"]

    fits, ignores = interval(rule), interval(None)
    assert fits.value == ignores.value < 0.02
    assert fits.low <= fits.value <= fits.high
    assert fits.high < 0.03 < ignores.high
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(4000)
        kept = filter_stream(predicted[order], groups[order], rule=rule, num_groups=2, num_classes=2)
        rates = [predicted[order][kept & (groups[order] == z)].mean() for z in (0, 1)]
        assert fits.low - 0.002 <= abs(rates[1] - rates[0]) <= fits.high + 0.002


def test_whole_persons_are_drawn_where_the_gate_decides_anew():
    """Persons of 1, 2 and 9 records: every replicate has whole persons, in an order that mixes them."""
    persons = np.array(["a"] + ["b"] * 2 + ["c"] * 9)
    groups, predicted = np.array([0] + [1] * 2 + [0] * 9), np.zeros(12, dtype=np.int64)
    options = {"true_labels_N": predicted, "num_groups": 2, "num_classes": 2, "num_replicates": 400}
    free = GateRule(max_disparity=math.inf, min_count=0)
    tables = resampled_reject_option(
        predicted, groups, persons_N=persons, rule=free, **options, generator=np.random.default_rng(0)
    )
    (seen,) = {tables.shape}
    assert seen == (400, 2, 2, 2)
    # Three draws: m of a, n of b, the rest of c.
    possible = {(m + 9 * (3 - m - n), 2 * n) for m in range(4) for n in range(4 - m)}
    assert {tuple(sizes) for sizes in tables.sum(axis=(2, 3)).astype(int).tolist()} == possible
    # The gate stops after 4 answers of a group: whichever come first, not those that fill a line up.
    strict = GateRule(max_disparity=0.0, min_count=4)
    kept = resampled_reject_option(
        predicted, groups, persons_N=persons, rule=strict, **options, generator=np.random.default_rng(0)
    )
    drawn = tables.sum(axis=(2, 3))
    assert (kept.sum(axis=(2, 3)) <= drawn).all()
    both = (drawn > 0).all(axis=1)
    assert (kept.sum(axis=(2, 3))[both] >= np.minimum(drawn[both], 4)).all()


def test_rows_of_one_person_make_the_interval_of_a_gate_wide():
    """Four equal records of each person are as much as one record each: twice as wide as rows drawn one by one."""
    generator = np.random.default_rng(0)
    groups, truth = generator.integers(0, 2, (2, 200))
    predicted = (generator.random(200) < np.where(groups == 1, 0.7, 0.4)).astype(np.int64)
    rule = GateRule(max_disparity=0.4, min_count=20)  # hardly ever refuses
    names = {"class_names": ("no", "yes"), "group_names": ("a", "b"), "rule": rule}

    def width(times, persons):
        found = evaluate(
            np.repeat(predicted, times),
            labels_N=np.repeat(truth, times),
            groups_N=np.repeat(groups, times),
            persons_N=persons,
            **names,
            generator=np.random.default_rng(1),
        )
        return found.gaps["accuracy_parity"].high - found.gaps["accuracy_parity"].low

    persons = np.repeat(np.arange(200), 4)
    assert width(4, persons) == pytest.approx(width(1, None), rel=0.25)
    assert width(4, persons) > 1.5 * width(4, None)
