"""Sampled training priced by Opacus's accountants, which share no code with ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from fairpate.privacy.accountant import PoissonGaussians, epsilon, epsilon_pld, rdp

pytestmark = pytest.mark.xdist_group("torchvision")  # imports a compiler, as torchvision does

SAMPLED = [(1.0, 0.01, 1000), (2.0, 0.02, 500), (0.7, 0.005, 2000), (4.0, 0.3, 200)]
WHOLE_DATA = (8.0, 1.0, 30)
DELTA = 1e-5


@pytest.fixture(scope="module")
def accountants() -> Any:
    """Imported here, because that takes a second, and every worker collects this file."""
    return pytest.importorskip("opacus.accountants", reason="Opacus is a development dependency")


def priced(noise_multiplier: float, sampling_rate: float, count: int) -> PoissonGaussians:
    return PoissonGaussians(count=count, noise_multiplier=noise_multiplier, sampling_rate=sampling_rate)


@pytest.mark.parametrize(("noise_multiplier", "sampling_rate", "count"), [*SAMPLED, WHOLE_DATA])
def test_renyi_curves_agree_at_whole_orders_and_stay_above_between(
    accountants: Any, noise_multiplier: float, sampling_rate: float, count: int
) -> None:
    def theirs(orders: np.ndarray) -> np.ndarray:
        return np.asarray(
            accountants.analysis.rdp.compute_rdp(
                q=sampling_rate, noise_multiplier=noise_multiplier, steps=count, orders=orders.tolist()
            )
        )

    event = priced(noise_multiplier, sampling_rate, count)
    whole = np.arange(2.0, 257.0)
    assert_allclose(rdp([event], whole), theirs(whole), rtol=1e-6)
    between = np.array([1.5, 2.5, 3.25, 7.5, 20.5])
    ratio = rdp([event], between) / theirs(between)
    assert (ratio > 1 - 1e-9).all()


@pytest.mark.parametrize(("noise_multiplier", "sampling_rate", "count"), [*SAMPLED, WHOLE_DATA])
def test_epsilon_agrees_where_both_convert_the_same_orders(
    accountants: Any, noise_multiplier: float, sampling_rate: float, count: int
) -> None:
    accountant = accountants.RDPAccountant()
    accountant.history = [(noise_multiplier, sampling_rate, count)]
    whole = [float(order) for order in range(2, 257)]
    theirs = accountant.get_epsilon(delta=DELTA, alphas=whole)
    event = priced(noise_multiplier, sampling_rate, count)
    assert epsilon([event], target_delta=DELTA, orders_A=whole).epsilon == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize(
    ("noise_multiplier", "sampling_rate", "count"),
    [pytest.param(*each, marks=pytest.mark.slow if each[2] >= 1000 else ()) for each in SAMPLED],
)
def test_loss_distributions_agree_within_the_error_that_is_asked(
    accountants: Any, noise_multiplier: float, sampling_rate: float, count: int
) -> None:
    accountant = accountants.PRVAccountant()
    accountant.history = [(noise_multiplier, sampling_rate, count)]
    theirs = accountant.get_epsilon(delta=DELTA, eps_error=0.01)
    ours = epsilon_pld([priced(noise_multiplier, sampling_rate, count)], target_delta=DELTA)
    assert theirs == pytest.approx(ours, abs=0.02)
    assert ours <= epsilon([priced(noise_multiplier, sampling_rate, count)], target_delta=DELTA).epsilon
