"""Costs of noisy plurality votes: published goldens, identities and bounds, refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import special

from fairpate.privacy import gnmax

ORDERS = np.array([1.5, 2.0, 2.5, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0])
MNIST = {"threshold": 120.0, "threshold_stddev_votes": 110.0}
UNTIL_ROUNDING = 1 + 1e-12


def threshold_only(mechanism: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in mechanism.items() if name != "noise_stddev_votes"}


def argmax_cost(votes: object, mechanism: dict[str, Any], orders: object = ORDERS) -> np.ndarray:
    noise = mechanism["noise_stddev_votes"]
    log_q = gnmax.log_q(votes, noise_stddev_votes=noise, tail=mechanism["tail"])
    return gnmax.gnmax_rdp(log_q, noise_stddev_votes=noise, orders_A=orders)


@st.composite
def votes_and_mechanism(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, Any]]:
    num_classes, num_queries = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    row = st.lists(st.integers(0, 120), min_size=num_classes, max_size=num_classes)
    votes = np.array(draw(st.lists(row, min_size=num_queries, max_size=num_queries)))
    stddev = st.floats(0.3, 150)
    mechanism = {
        "threshold": draw(st.one_of(st.floats(-50, 250), st.sampled_from([-math.inf, math.inf, 1e6, -1e6]))),
        "threshold_stddev_votes": draw(stddev),
        "noise_stddev_votes": draw(stddev),
        "tail": draw(st.sampled_from(["gaussian", "discrete"])),
    }
    return votes, mechanism


cases = pytest.mark.parametrize(
    ("votes", "noise", "log_q", "orders", "rdp"),
    [
        ([100, 0], 20, -8.4999625, [2, 8, 32], [1.377487e-4, 2.665834e-4, 0.0338125603]),
        ([60, 40], 20, math.log(0.5 * special.erfc(0.5)), [2, 8, 32], [0.005, 0.02, 0.08]),
        ([100, 0], 15, math.log(1.2142337e-6), [2, 4, 8], [1.543914e-6, 2.153588e-6, 6.196358e-6]),
        ([80, 20], 15, math.log(2.338867e-3), [2, 4, 8], [1.816200e-3, 2.223350e-3, 3.936850e-3]),
        ([55, 45], 15, math.log(0.3186759), [2, 4, 8], [2 / 225, 4 / 225, 8 / 225]),
    ],
)


@cases
def test_golden_costs(votes: list[int], noise: float, log_q: float, orders: list[int], rdp: list[float]) -> None:
    got = gnmax.log_q([votes], noise_stddev_votes=noise, tail="gaussian")
    assert_allclose(np.exp(got), [math.exp(log_q)], rtol=1e-6)
    assert_allclose(gnmax.gnmax_rdp(got, noise_stddev_votes=noise, orders_A=orders), [rdp], rtol=2e-6)


@given(votes_and_mechanism())
@settings(deadline=None, max_examples=75)
def test_bounds_hold_at_every_order(case: tuple[np.ndarray, dict[str, Any]]) -> None:
    votes, mechanism = case
    joint = gnmax.confident_gnmax_rdp(votes, **mechanism, orders_A=ORDERS)
    check = gnmax.threshold_rdp(votes, **threshold_only(mechanism), orders_A=ORDERS)
    argmax = argmax_cost(votes, mechanism)
    assert joint.shape == check.shape == argmax.shape == (len(votes), len(ORDERS))
    assert min(joint.min(), check.min(), argmax.min()) >= 0
    assert np.all(joint <= (check + argmax) * UNTIL_ROUNDING + 1e-14)
    assert np.all(argmax <= ORDERS / mechanism["noise_stddev_votes"] ** 2)
    assert np.all(check <= ORDERS / (2 * mechanism["threshold_stddev_votes"] ** 2))
    independent = {name: value for name, value in mechanism.items() if name != "tail"}
    assert np.all(joint <= gnmax.confident_gnmax_rdp_data_independent(**independent, orders_A=ORDERS))


@given(votes_and_mechanism(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=30)
def test_names_and_order_of_classes_and_queries_do_not_matter(
    case: tuple[np.ndarray, dict[str, Any]], shuffle: Any
) -> None:
    votes, mechanism = case
    classes, queries, orders = (list(range(n)) for n in (votes.shape[1], len(votes), len(ORDERS)))
    for positions in (classes, queries, orders):
        shuffle.shuffle(positions)
    expected = gnmax.confident_gnmax_rdp(votes, **mechanism, orders_A=ORDERS)
    moved = gnmax.confident_gnmax_rdp(votes[queries][:, classes], **mechanism, orders_A=ORDERS[orders])
    assert_allclose(moved, expected[np.ix_(queries, orders)], rtol=1e-9, atol=1e-14)


@given(votes_and_mechanism(), st.integers(2, 5))
@settings(deadline=None, max_examples=30)
def test_totals_are_sums_over_queries_priced_alone(case: tuple[np.ndarray, dict[str, Any]], times: int) -> None:
    votes, mechanism = case
    alone = [gnmax.confident_gnmax_rdp([row], **mechanism, orders_A=ORDERS)[0] for row in votes]
    assert_allclose(gnmax.confident_gnmax_rdp(votes, **mechanism, orders_A=ORDERS), alone, rtol=1e-9, atol=1e-14)
    total = gnmax.confident_gnmax_rdp(votes, **mechanism, orders_A=ORDERS, total=True)
    assert_allclose(total, np.sum(alone, axis=0), rtol=1e-9, atol=1e-13)
    repeated = gnmax.confident_gnmax_rdp(np.repeat(votes, times, axis=0), **mechanism, orders_A=ORDERS, total=True)
    assert_allclose(repeated, times * total, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("num_queries", [700, 2000])
def test_large_batches_total_like_single_queries(num_queries: int) -> None:
    generator = np.random.default_rng(5)
    votes = generator.multinomial(200, generator.dirichlet(np.full(6, 0.3), size=num_queries))
    mechanism = {"threshold": 110.0, "threshold_stddev_votes": 30.0, "noise_stddev_votes": 9.0, "tail": "discrete"}
    alone = [gnmax.confident_gnmax_rdp([row], **mechanism, orders_A=ORDERS)[0] for row in votes]
    assert_allclose(gnmax.confident_gnmax_rdp(votes, **mechanism, orders_A=ORDERS), alone, rtol=1e-9, atol=1e-14)
    total = gnmax.confident_gnmax_rdp(votes, **mechanism, orders_A=ORDERS, total=True)
    assert_allclose(total, np.sum(alone, axis=0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tail", ["gaussian", "discrete"])
def test_an_open_threshold_leaves_gnmax_and_a_shut_one_nothing(tail: str) -> None:
    votes = [[200, 0, 0], [120, 50, 30], [70, 68, 62], [0, 0, 0]]
    mechanism = {"threshold_stddev_votes": 5.0, "noise_stddev_votes": 20.0, "tail": tail}
    argmax = argmax_cost(votes, mechanism)
    for threshold in (-math.inf, -2000.0):
        opened = gnmax.confident_gnmax_rdp(votes, threshold=threshold, **mechanism, orders_A=ORDERS)
        assert_allclose(opened, argmax, rtol=1e-9, atol=1e-14)
    for threshold in (math.inf, 10_000.0):
        shut = gnmax.confident_gnmax_rdp(votes, threshold=threshold, **mechanism, orders_A=ORDERS)
        assert_allclose(shut, 0, atol=1e-14)
    check = gnmax.threshold_rdp(votes, threshold=math.inf, threshold_stddev_votes=5.0, orders_A=ORDERS, tail="gaussian")
    assert not check.any()


def test_log_q_counts_discrete_ties_against_the_plurality() -> None:
    # With noise on {-1, 0, 1} almost surely, P[N_b - N_a >= 0] and P[>= 1] by hand.
    p1 = math.exp(-1 / (2 * 0.3**2)) / (1 + 2 * math.exp(-1 / (2 * 0.3**2)))
    p0 = 1 - 2 * p1
    behind = 2 * p0 * p1 + p1**2
    got = gnmax.log_q([[4, 3], [5, 1]], noise_stddev_votes=0.3, tail="discrete")
    assert math.exp(got[0]) == pytest.approx(behind, rel=1e-6)
    assert gnmax.log_q([[4, 4]], noise_stddev_votes=0.3, tail="discrete")[0] == pytest.approx(math.log(0.5))


def test_log_q_is_capped_by_chance_and_survives_underflow() -> None:
    got = gnmax.log_q([[7, 7, 7, 7], [10**6, 0, 0, 0]], noise_stddev_votes=2.0, tail="gaussian")
    assert got[0] == pytest.approx(math.log(0.75))
    assert got[1] == pytest.approx(math.log(3) + special.log_ndtr(-(10**6) / math.sqrt(8)), rel=1e-12)
    assert gnmax.log_q([[5]], noise_stddev_votes=2.0, tail="gaussian")[0] == -math.inf


def test_certainty_is_free() -> None:
    assert not gnmax.gnmax_rdp([-math.inf], noise_stddev_votes=3.0, orders_A=ORDERS).any()
    assert_allclose(gnmax.gnmax_rdp([0.0], noise_stddev_votes=3.0, orders_A=ORDERS), [ORDERS / 9])
    single_class = gnmax.confident_gnmax_rdp([[9]], threshold=-math.inf, threshold_stddev_votes=1, noise_stddev_votes=1,
                                             orders_A=ORDERS, tail="discrete")  # fmt: skip
    assert not single_class.any()


def test_no_queries_cost_nothing() -> None:
    mechanism = {**MNIST, "noise_stddev_votes": 20.0, "tail": "discrete"}
    none = np.empty((0, 10), dtype=np.int64)
    assert gnmax.confident_gnmax_rdp(none, **mechanism, orders_A=ORDERS).shape == (0, len(ORDERS))
    assert gnmax.threshold_rdp(none, **threshold_only(mechanism), orders_A=ORDERS).shape == (0, len(ORDERS))
    assert not gnmax.confident_gnmax_rdp(none, **mechanism, orders_A=ORDERS, total=True).any()
    assert gnmax.log_q(none, noise_stddev_votes=20, tail="discrete").shape == (0,)


def test_answer_probability_is_the_noise_tail() -> None:
    votes = [[100, 20], [160, 40]]
    got = gnmax.answer_probability(votes, **MNIST, tail="gaussian")
    assert_allclose(got, special.ndtr([-20 / 110, 40 / 110]))
    always = gnmax.answer_probability(votes, threshold=-math.inf, threshold_stddev_votes=1, tail="discrete")
    assert always.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"votes_QC": [[1.5, 2]]}, "whole numbers"),
        ({"votes_QC": [[-1, 2]]}, "whole numbers"),
        ({"votes_QC": [[math.nan, 2]]}, "whole numbers"),
        ({"votes_QC": [["a", "b"]]}, "whole numbers"),
        ({"votes_QC": [1, 2]}, "shape"),
        ({"threshold": math.nan}, "threshold"),
        ({"threshold": 1e30}, "threshold"),
        ({"threshold_stddev_votes": 0.0}, "0 < threshold_stddev_votes"),
        ({"noise_stddev_votes": -1.0}, "0 < noise_stddev_votes"),
        ({"noise_stddev_votes": math.nan}, "0 < noise_stddev_votes"),
        ({"orders_A": [1.0, 2.0]}, "orders > 1"),
        ({"orders_A": [2.0, math.nan]}, "orders > 1"),
        ({"orders_A": []}, "orders > 1"),
        ({"tail": "laplace"}, "tail"),
    ],
)
def test_bad_input_is_named(change: dict[str, object], message: str) -> None:
    good: dict[str, Any] = {"votes_QC": [[3, 2]], **MNIST, "noise_stddev_votes": 20.0, "orders_A": [2.0],
                            "tail": "discrete"}  # fmt: skip
    for total in (False, True):
        with pytest.raises(ValueError, match=message):
            gnmax.confident_gnmax_rdp(**{**good, **change}, total=total)


@pytest.mark.parametrize("log_q", [[0.1], [math.nan], [[-1.0]]])
def test_a_log_q_that_is_no_probability_is_refused(log_q: list[Any]) -> None:
    with pytest.raises(ValueError, match="log_q_Q"):
        gnmax.gnmax_rdp(log_q, noise_stddev_votes=3.0, orders_A=[2.0])
