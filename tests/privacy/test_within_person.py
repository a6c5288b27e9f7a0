"""One record of a person who stays: what a release by person promises for it."""

from __future__ import annotations

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp as google

from fairpate.privacy.accountant import (
    DEFAULT_ORDERS,
    ConfidentGnmaxQueries,
    PoissonGaussians,
    epsilon_pld,
    event_rdp,
    least_epsilon,
    of_unit,
)
from fairpate.privacy.mechanism_events import (
    PartOfUnit,
    VoteSums,
    VoteTables,
    part_of_unit,
)

ORDERS = np.array(DEFAULT_ORDERS)


def by_person(noise: float, rate: float = 1.0, count: int = 1) -> PoissonGaussians:
    return PoissonGaussians(count=count, noise_multiplier=noise, sampling_rate=rate, unit="person")


def test_a_gaussian_costs_at_least_what_twice_the_sensitivity_costs_and_hardly_more() -> None:
    """The person's clipped average may turn around, by twice the bound: D_a = a (2 / sigma)^2 / 2."""
    ours = event_rdp(part_of_unit(by_person(5.0), "record"), ORDERS)
    true = ORDERS * (2 / 5.0) ** 2 / 2
    assert (ours >= true).all()
    high = ORDERS >= 10
    assert (ours[high] <= 1.2 * true[high]).all()


@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
def test_the_price_covers_replacing_a_person_by_an_independent_accountant(rate: float) -> None:
    """A person who loses a record is a person replaced: dp-accounting prices that by loss distributions."""
    found = least_epsilon([part_of_unit(by_person(4.0, rate, 20), "record")], target_delta=1e-5)
    replaced = PoissonGaussians(
        count=20, noise_multiplier=4.0, sampling_rate=rate, unit="person", relation="replace one"
    )
    assert found >= epsilon_pld([replaced], target_delta=1e-5)
    assert found > least_epsilon([of_unit(by_person(4.0, rate, 20), "record")], target_delta=1e-5)


def test_the_inequality_holds_for_other_distributions() -> None:
    """P and Q are each neighbours of R: votes of one person in one cell, in another, and of nobody."""
    generator = np.random.default_rng(0)
    for _ in range(50):
        p, q, r = generator.dirichlet(np.ones(6), size=3)
        for order in (1.5, 2.0, 7.0):
            bound = (order - 0.5) / (order - 1) * divergence(p, r, 2 * order) + divergence(r, q, 2 * order - 1)
            assert divergence(p, q, order) <= bound + 1e-9


def divergence(p: np.ndarray, q: np.ndarray, order: float) -> float:
    return float(np.log((p**order * q ** (1 - order)).sum()) / (order - 1))


def test_votes_of_a_person_may_move_and_a_teachers_may_not() -> None:
    table = VoteTables(count=1, noise_stddev_votes=8.0, unit="person")
    assert isinstance(part_of_unit(table, "record"), PartOfUnit)
    # One cell loses the vote and another gains it: a Gaussian of sensitivity sqrt(2), as dp-accounting prices it.
    moved = google.RdpAccountant(ORDERS.tolist())
    moved.compose(dp_accounting.GaussianDpEvent(8.0 / np.sqrt(2)))
    assert least_epsilon([part_of_unit(table, "record")], target_delta=1e-5) >= moved.get_epsilon(1e-5)
    sums = VoteSums(count=1, noise_stddev_votes=80.0, norm=10, unit="person")
    assert least_epsilon([part_of_unit(sums, "record")], target_delta=1e-5) > least_epsilon([sums], target_delta=1e-5)
    asked = ConfidentGnmaxQueries(count=3, threshold=5, threshold_stddev_votes=9, noise_stddev_votes=7, unit="person")
    assert part_of_unit(asked, "record") == of_unit(asked, "record")


def test_replacing_is_priced_as_it_is() -> None:
    event = PoissonGaussians(count=1, noise_multiplier=2.0, sampling_rate=0.1, unit="person", relation="replace one")
    assert part_of_unit(event, "record") == of_unit(event, "record")


def test_the_attribute_of_a_record_that_stays_is_a_record_replaced() -> None:
    added = PoissonGaussians(count=20, noise_multiplier=4.0, sampling_rate=0.3)
    replaced = PoissonGaussians(count=20, noise_multiplier=4.0, sampling_rate=0.3, relation="replace one")
    assert least_epsilon([part_of_unit(added, "sensitive attribute")], target_delta=1e-5) >= epsilon_pld(
        [replaced], target_delta=1e-5
    )
    # One teacher sees the record, and casts one vote with either attribute.
    asked = ConfidentGnmaxQueries(count=3, threshold=5, threshold_stddev_votes=9, noise_stddev_votes=7)
    assert (event_rdp(part_of_unit(asked, "sensitive attribute"), ORDERS) == event_rdp(asked, ORDERS)).all()
