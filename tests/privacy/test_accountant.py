"""The ledger's arithmetic: published goldens, composition, conversion, and what it refuses to price."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import dp_accounting
import numpy as np
import pytest
from numpy.testing import assert_allclose

from fairpate.privacy import accountant, gnmax
from fairpate.privacy.accountant import (
    DEFAULT_ORDERS,
    ConfidentGnmaxQueries,
    ConfidentGnmaxVotes,
    NoisyArgmaxes,
    ThresholdChecks,
    epsilon,
    epsilon_data_dependent,
    epsilon_of_curve,
)
from fairpate.privacy.mechanism_events import as_in_paper_rdp

INTEGER_ORDERS = np.arange(2.0, 257.0)
MECHANISM = {"threshold": 70.0, "threshold_stddev_votes": 40.0, "noise_stddev_votes": 15.0}
STREAM = ConfidentGnmaxVotes(
    votes_QC=np.array([[100, 0]] * 200 + [[80, 20]] * 100 + [[55, 45]] * 50), **MECHANISM, tail="gaussian"
)


def stream_epsilon(rdp: np.ndarray) -> float:
    return epsilon_of_curve(rdp, INTEGER_ORDERS, target_delta=1e-5)[0]


def test_golden_stream_exact_joint_cost() -> None:
    result = epsilon_data_dependent([STREAM], target_delta=1e-5, orders_A=INTEGER_ORDERS)
    assert result.epsilon == pytest.approx(2.773848, abs=5e-7)
    assert result.order == 7
    rdp = accountant.rdp_data_dependent([STREAM], [2.0, 8.0])
    assert_allclose(rdp, [0.395396254, 1.569018504], rtol=1e-8)


def test_golden_stream_other_ledgers() -> None:
    nobody = np.zeros(len(STREAM.votes_QC), dtype=bool)
    published = as_in_paper_rdp(STREAM, fairness_rejected_Q=nobody, orders_A=INTEGER_ORDERS)
    assert stream_epsilon(published) == pytest.approx(2.954801, abs=5e-7)
    log_q = gnmax.log_q(STREAM.votes_QC, noise_stddev_votes=15, tail="gaussian")
    argmax = gnmax.gnmax_rdp(log_q, noise_stddev_votes=15, orders_A=INTEGER_ORDERS)
    check = gnmax.threshold_rdp(
        STREAM.votes_QC, threshold=70, threshold_stddev_votes=40, orders_A=INTEGER_ORDERS, tail="gaussian"
    )
    assert stream_epsilon((argmax + check).sum(axis=0)) == pytest.approx(4.039757, abs=5e-7)
    submitted = epsilon(
        [ConfidentGnmaxQueries(count=350, **MECHANISM)], target_delta=1e-5, orders_A=INTEGER_ORDERS.tolist()
    )
    assert submitted.epsilon == pytest.approx(9.747584, abs=5e-7)


def test_golden_conversions_of_a_gaussian() -> None:
    rdp = 100 * INTEGER_ORDERS / (2 * 10**2)
    assert epsilon_of_curve(rdp, INTEGER_ORDERS, target_delta=1e-5) == (pytest.approx(4.752728, abs=5e-7), 5)


def test_steps_charged_apart_add_up_to_whole_queries() -> None:
    apart = [
        ThresholdChecks(count=30, threshold_stddev_votes=40),
        NoisyArgmaxes(count=30, noise_stddev_votes=15),
    ]
    together = [ConfidentGnmaxQueries(count=10, **MECHANISM), ConfidentGnmaxQueries(count=20, **MECHANISM)]
    assert_allclose(accountant.rdp(apart), accountant.rdp(together), rtol=1e-12)
    assert_allclose(accountant.rdp(apart, [2.0]), 30 * (2 / (2 * 40**2) + 2 / 15**2))


def test_votes_never_cost_more_than_any_votes_would() -> None:
    submitted = accountant.rdp([ConfidentGnmaxQueries(count=350, **MECHANISM)])
    assert np.all(accountant.rdp_data_dependent([STREAM]) <= submitted)


def test_refusals_by_the_gate_are_free_only_in_the_published_ledger() -> None:
    rejected = np.zeros(350, dtype=bool)
    rejected[:200] = True
    kept = ConfidentGnmaxVotes(votes_QC=STREAM.votes_QC[200:], **MECHANISM, tail="gaussian")
    nobody = np.zeros(150, dtype=bool)
    expected = as_in_paper_rdp(kept, fairness_rejected_Q=nobody)
    assert_allclose(as_in_paper_rdp(STREAM, fairness_rejected_Q=rejected), expected)


def test_private_votes_are_priced_under_a_private_name_only() -> None:
    for price in (lambda: accountant.rdp([STREAM]), lambda: epsilon([STREAM], target_delta=1e-5)):
        with pytest.raises(ValueError, match="data_dependent"):
            price()


def test_nothing_done_costs_nothing() -> None:
    assert epsilon([], target_delta=1e-5).epsilon == 0
    assert epsilon([NoisyArgmaxes(count=0, noise_stddev_votes=0)], target_delta=1e-5).epsilon == 0


def test_no_noise_has_infinite_price() -> None:
    assert epsilon([NoisyArgmaxes(count=1, noise_stddev_votes=0)], target_delta=1e-5).epsilon == math.inf
    shut = {**MECHANISM, "threshold": math.inf, "noise_stddev_votes": 0.0}
    assert epsilon([ConfidentGnmaxQueries(count=5, **shut)], target_delta=1e-5).epsilon == 0


def test_the_default_grid_is_wide() -> None:
    faint = [NoisyArgmaxes(count=1, noise_stddev_votes=4000)]
    wide = epsilon(faint, target_delta=1e-8)
    assert wide.order > 512
    narrow = epsilon(faint, target_delta=1e-8, orders_A=[2.0, 4.0, 8.0])
    assert narrow.epsilon > wide.epsilon


@dataclass(frozen=True, kw_only=True)
class Relabelled:
    noun: ClassVar[str] = "relabelling of records"
    unit: str = "sensitive attribute"
    relation: str = "replace one"
    data_dependent: bool = False
    price: float = 0.1


@accountant.event_rdp.register
def _(event: Relabelled, orders_A: np.ndarray) -> np.ndarray:
    return event.price * orders_A


def test_new_events_register_their_price_but_never_mix_promises() -> None:
    assert_allclose(accountant.rdp([Relabelled()], [2.0]), [0.2])
    with pytest.raises(ValueError, match="one unit and relation"):
        accountant.rdp([Relabelled(), NoisyArgmaxes(count=1, noise_stddev_votes=1)])


@pytest.mark.parametrize("price", [math.nan, -0.1])
def test_impossible_prices_are_errors(price: float) -> None:
    with pytest.raises(ValueError, match="without NaN or negative"):
        accountant.rdp([Relabelled(price=price)])
    with pytest.raises(ValueError, match="without NaN or negative"):
        epsilon_of_curve([0.5, price], [2.0, 3.0], target_delta=1e-5)


def test_unknown_events_are_errors() -> None:
    with pytest.raises(TypeError, match="got str"):
        accountant.rdp(["an event"])
    with pytest.raises(TypeError, match="got str"):
        epsilon_data_dependent(["an event"], target_delta=0.1)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan])
def test_delta_is_a_probability(delta: float) -> None:
    with pytest.raises(ValueError, match="0 < target_delta < 1"):
        epsilon([NoisyArgmaxes(count=1, noise_stddev_votes=1)], target_delta=delta)


def test_counts_are_checked() -> None:
    with pytest.raises(ValueError, match="count >= 0"):
        ConfidentGnmaxQueries(count=-1, **MECHANISM)


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.3])
def test_the_best_order_is_the_one_that_dp_accounting_finds_among_all(delta: float) -> None:
    orders = [1.0, 1.005, *DEFAULT_ORDERS]
    random = np.random.default_rng(0)
    flat, steep = np.zeros(len(orders)), np.asarray(orders) / 2
    endless = np.where(np.asarray(orders) > 3, np.inf, 0.1)
    curves = [
        flat,
        steep,
        1e-12 * steep,
        1e6 * steep,
        endless,
        endless + np.inf,
        *random.exponential(size=(50, len(orders))),
    ]
    for curve in curves:
        theirs = dp_accounting.rdp.compute_epsilon(orders, curve.tolist(), delta)
        assert epsilon_of_curve(curve, orders, target_delta=delta) == theirs
