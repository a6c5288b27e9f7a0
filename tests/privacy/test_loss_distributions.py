"""Loss distributions made, composed and read off: those of another library, and identities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from divergences import delta_at
from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_distribution as pld

from fairpate.privacy import accountant, loss_distributions
from fairpate.privacy.accountant import PoissonGaussians
from fairpate.privacy.loss_distributions import (
    Laplace,
    LossDistribution,
    composed,
    epsilon_and_excess,
    gaussians,
    on_poisson_sample,
    poisson_gaussians,
    randomised_response,
)

INTERVAL = 1e-3
DELTAS = (0.1, 1e-3, 1e-5, 1e-8)


def gaussian(noise: float, rate: float = 1.0, relation: str = "ADD_OR_REMOVE_ONE", interval: float = INTERVAL):
    return pld.from_gaussian_mechanism(
        noise,
        value_discretization_interval=interval,
        sampling_prob=rate,
        neighboring_relation=pld.NeighborRel[relation],
    )


def agree(ours: LossDistribution | None, theirs: pld.PrivacyLossDistribution, *, rel: float = 5e-6) -> None:
    found = [epsilon_and_excess(ours, delta)[0] for delta in DELTAS]
    np.testing.assert_allclose(found, [theirs.get_epsilon_for_delta(delta) for delta in DELTAS], rtol=rel, atol=1e-9)


@pytest.mark.parametrize("relation", ["add or remove one", "replace one"])
@pytest.mark.parametrize(
    ("count", "noise", "rate"), [(1, 0.8, 0.3), (1, 1.0, 1.0), (1000, 1.0, 0.01), (40, 5.0, 0.5), (9, 0.5, 1e-5)]
)
def test_sampled_gaussians_are_those_of_dp_accounting(count: int, noise: float, rate: float, relation: str) -> None:
    names = {"add or remove one": "ADD_OR_REMOVE_ONE", "replace one": "REPLACE_ONE"}
    theirs = gaussian(noise, rate, names[relation]).self_compose(count)
    ours = poisson_gaussians(count, noise, sampling_rate=rate, relation=relation, interval=INTERVAL)
    # The bound on the transforms' rounding is what a record adds that is hardly ever sampled.
    agree(ours, theirs, rel=5e-6 if rate > 1e-4 else 1e-5)


@pytest.mark.parametrize(("epsilon", "count"), [(0.1, 100), (0.8, 2), (5.0, 3), (50.0, 2), (1e-4, 1)])
def test_laplace_releases_are_those_of_dp_accounting(epsilon: float, count: int) -> None:
    ours = loss_distributions.repeated(
        on_poisson_sample(Laplace(scale=1 / epsilon), sampling_rate=1, interval=INTERVAL), count
    )
    agree(ours, pld.from_laplace_mechanism(1 / epsilon, value_discretization_interval=INTERVAL).self_compose(count))


@pytest.mark.parametrize(("epsilon", "count"), [(0.1, 100), (0.8, 2), (5.0, 3), (50.0, 2)])
def test_randomised_response_is_that_of_dp_accounting(epsilon: float, count: int) -> None:
    theirs = pld.from_privacy_parameters(common.DifferentialPrivacyParameters(epsilon, 0.0), INTERVAL)
    agree(
        loss_distributions.repeated(randomised_response(epsilon, interval=INTERVAL), count), theirs.self_compose(count)
    )


def test_different_releases_and_chances_compose_as_in_dp_accounting() -> None:
    sampled, pure = (
        gaussian(1.0, 0.1).self_compose(10),
        pld.from_laplace_mechanism(1.0, value_discretization_interval=INTERVAL),
    )
    maybe = gaussian(2.0).compute_mixture(pld.identity(INTERVAL), 0.2)
    ours = [
        poisson_gaussians(10, 1.0, sampling_rate=0.1, interval=INTERVAL),
        on_poisson_sample(Laplace(scale=1.0), sampling_rate=1, interval=INTERVAL),
        loss_distributions.mixed_with_nothing(gaussians(1, 2.0, interval=INTERVAL), 0.2),
    ]
    agree(composed(ours), sampled.compose(pure).compose(maybe))
    agree(composed([*ours, randomised_response(0.0, interval=INTERVAL)]), sampled.compose(pure).compose(maybe))
    assert composed([*ours, None]) is None
    assert epsilon_and_excess(None, 1e-5)[0] == math.inf


@pytest.mark.parametrize("epsilon", [-2.0, -0.3, 0.0, 0.4, 3.0])
def test_divergences_at_any_threshold_are_those_of_dp_accounting(epsilon: float) -> None:
    sampled = poisson_gaussians(5, 0.7, sampling_rate=0.2, interval=INTERVAL)
    theirs = gaussian(0.7, 0.2).self_compose(5)
    expected = theirs.get_delta_for_epsilon(epsilon)
    # Theirs lacks the rounding of its transforms, ours has a bound of it added.
    assert expected - 1e-12 <= delta_at(sampled, epsilon) <= expected + 1e-10


@pytest.mark.parametrize("delta", DELTAS)
def test_an_epsilon_that_is_read_off_has_the_divergence_that_was_asked_for(delta: float) -> None:
    for distribution in (
        poisson_gaussians(200, 0.7, sampling_rate=0.05, interval=INTERVAL),
        poisson_gaussians(20, 0.05, sampling_rate=0.5, interval=1.0),  # losses of thousands, e^loss beyond any float
    ):
        epsilon = epsilon_and_excess(distribution, delta)[0]
        # Losses whose mass is 1e-6 of delta count as infinite, and rounding is added.
        assert delta * (1 - 2e-6) <= delta_at(distribution, epsilon) <= delta * (1 + 1e-6)


def test_nothing_is_needed_where_the_divergence_is_small_anyway_and_nothing_suffices_where_mass_is_infinite() -> None:
    little = gaussians(1, 1e4, interval=INTERVAL)
    assert (
        epsilon_and_excess(little, 0.01)[0]
        == 0
        == epsilon_and_excess(randomised_response(0.0, interval=INTERVAL), 1e-12)[0]
    )
    assert epsilon_and_excess(randomised_response(0.0, interval=INTERVAL), 1e-12)[0] == 0
    some = little.each(lambda losses, count: (loss_distributions.replace(losses, infinite=1e-4), count))
    assert epsilon_and_excess(some, 9e-5)[0] == math.inf > epsilon_and_excess(some, 2e-4)[0]


def test_a_delta_that_infinite_losses_use_up_needs_the_largest_finite_loss() -> None:
    for mass in np.linspace(0.05, 0.95, 19):
        masses = np.array([1 - mass, mass, 0.0, 1e-30])
        losses = loss_distributions.Losses(interval=0.5, lowest=1, masses_L=masses, infinite=1e-5)
        assert epsilon_and_excess(loss_distributions.symmetric(losses), 1e-5)[0] == pytest.approx(1.0)


def test_an_epsilon_of_zero_is_found_on_the_coarsest_grid() -> None:
    """A record that is hardly ever sampled, with hardly any noise: a fine grid of its losses would fill memory."""
    rare = PoissonGaussians(count=1, noise_multiplier=0.0731, sampling_rate=1e-7)
    before = accountant._epsilon_pld.cache_info().misses
    assert accountant.epsilon_pld([rare], target_delta=1e-6) == 0
    assert accountant._epsilon_pld.cache_info().misses == before + 1


def test_a_divergence_far_from_zero_neither_overflows_nor_rises() -> None:
    far = np.linspace(-3000.0, 3000.0, 601)
    for base in (loss_distributions.Gaussian(noise_multiplier=0.02), Laplace(scale=5e-4)):
        for rate in (1e-4, 0.5):
            deltas = loss_distributions._removing(base, far, rate) - np.expm1(np.minimum(far, 0.0))
            assert (np.diff(deltas) <= 1e-12).all()
            assert (deltas[0], deltas[-1]) == pytest.approx((1, 0))
