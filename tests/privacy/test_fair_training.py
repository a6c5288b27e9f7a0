"""Events of fair training: published numbers, two-dimensional integration, other accountants, and what is refused."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import mpmath
import numpy as np
import pytest
from divergences import delta_at
from method_kinds import quick_and_slow
from scipy.integrate import quad
from scipy.stats import laplace, norm

from fairpate.privacy import loss_distributions
from fairpate.privacy.accountant import (
    Event,
    NoisyArgmaxes,
    PoissonGaussians,
    epsilon,
    epsilon_of,
    epsilon_pld,
    has_loss_distributions,
    least_noise,
    rdp,
)
from fairpate.privacy.mechanism_events import (
    AttributeGaussians,
    PoissonGaussianLaplaces,
    SecretBatchAttributeGaussians,
    joint_multiplier,
)

pytestmark = pytest.mark.usefixtures("light_runs")


def both(count: int = 1, noise: float = 1.0, scale: float = 1.0, rate: float = 0.1) -> PoissonGaussianLaplaces:
    return PoissonGaussianLaplaces(
        count=count, gradient_noise_multiplier=noise, laplace_scale=scale, sampling_rate=rate
    )


def attribute(count: int = 1, noise: float = 2.0) -> AttributeGaussians:
    return AttributeGaussians(count=count, attribute_noise_multiplier=noise)


def secret(count: int = 1, noise: float = 2.0, rate: float = 0.2) -> SecretBatchAttributeGaussians:
    return SecretBatchAttributeGaussians(count=count, attribute_noise_multiplier=noise, sampling_rate=rate)


def test_a_gaussian_and_a_laplace_release_of_one_sample_cost_what_is_published() -> None:
    np.testing.assert_allclose(rdp([both()], [2, 4]), [0.0396885, 0.2274341], rtol=2e-6)


def integrated_divergence(noise: float, scale: float, rate: float, eps: float, *, removing: bool) -> float:
    """The hockey-stick divergence by integration: over the Laplace output, the Gaussian's solved for its threshold."""

    def given(v: float) -> float:
        without, with_record = laplace.pdf(v, 0, scale), laplace.pdf(v, 1, scale)
        # Densities in u, up to N(u; 0): top - e^eps bottom = (a + b ratio(u)), ratio = N(u; 1) / N(u; 0), increasing.
        first, second = ((1 - rate) * without, rate * with_record)
        if removing:
            a, b = first - math.exp(eps) * without, second
        else:
            a, b = without - math.exp(eps) * first, -math.exp(eps) * second
        if a >= 0 and b >= 0:
            return a + b
        if a <= 0 and b <= 0:
            return 0.0
        at = noise**2 * math.log(-a / b) + 0.5
        if b > 0:
            return float(a * norm.sf(at, 0, noise) + b * norm.sf(at, 1, noise))
        return float(a * norm.cdf(at, 0, noise) + b * norm.cdf(at, 1, noise))

    total = 0.0
    for low, high in ((-60 * scale, 0), (0, 1), (1, 1 + 60 * scale)):
        total += quad(given, low, high, epsabs=1e-13, epsrel=1e-10, limit=400)[0]
    return total


@cache
def sampled_both(noise: float, scale: float, rate: float) -> loss_distributions.LossDistribution:
    base = loss_distributions.GaussianAndLaplace(noise_multiplier=noise, laplace_scale=scale)
    return loss_distributions.on_poisson_sample(base, sampling_rate=rate)


@pytest.mark.parametrize(("noise", "scale", "rate"), [(1.0, 1.0, 0.1), (2.0, 0.5, 0.03), (0.7, 3.0, 0.6)])
@pytest.mark.parametrize("eps", quick_and_slow([-0.02, 0.05, 0.7], [0.7]))
def test_the_sampled_loss_distribution_is_the_integral_and_never_below_it(
    noise: float, scale: float, rate: float, eps: float
) -> None:
    sampled = sampled_both(noise, scale, rate)
    exact = max(integrated_divergence(noise, scale, rate, eps, removing=removing) for removing in (True, False))
    got = float(delta_at(sampled, eps))
    assert exact * (1 - 1e-9) - 1e-12 <= got <= exact + 1e-6


@pytest.mark.parametrize(("noise", "scale", "eps"), [(1.0, 1.0, 0.3), (0.2, 2.0, -0.1), (5.0, 0.3, 2.0)])
def test_the_unsampled_divergence_is_a_two_dimensional_integral(noise: float, scale: float, eps: float) -> None:
    base = loss_distributions.GaussianAndLaplace(noise_multiplier=noise, laplace_scale=scale)
    exact = integrated_divergence(noise, scale, 1.0, eps, removing=True)
    assert float(base.divergence(np.array([eps]))[0]) == pytest.approx(exact, abs=1e-10)


@pytest.mark.parametrize(("noise", "scale"), [(100.0, 0.1), (100.0, 0.01), (1000.0, 0.5), (1e4, 1.0)])
def test_two_releases_never_diverge_less_than_the_laplace_release_alone(noise: float, scale: float) -> None:
    epsilons = np.linspace(-1.2 / scale, 1.2 / scale, 481)
    found = loss_distributions.GaussianAndLaplace(noise_multiplier=noise, laplace_scale=scale).divergence(epsilons)
    alone = loss_distributions.Laplace(scale=scale).divergence(epsilons)
    assert (found >= alone - 1e-15).all()
    np.testing.assert_allclose(found, alone, atol=0.4 / noise)  # what the other release's total variation adds


def test_two_releases_with_hardly_any_noise_diverge_all_the_way_and_overflow_nowhere() -> None:
    base = loss_distributions.GaussianAndLaplace(noise_multiplier=1e-3, laplace_scale=1e-3)
    found = base.divergence(np.linspace(-1e6, 1e6, 2001))
    assert (np.diff(found) <= 1e-12).all()
    assert (found[0], found[-1]) == (1, 0)


def test_without_a_laplace_release_to_speak_of_it_is_the_sampled_gaussian() -> None:
    plain = PoissonGaussians(count=1000, noise_multiplier=1.0, sampling_rate=0.01)
    almost = both(count=1000, noise=1.0, scale=1e7, rate=0.01)
    cost = epsilon_pld([almost], target_delta=1e-5)
    assert cost == pytest.approx(1.82824, rel=1e-4)
    assert cost == pytest.approx(epsilon_pld([plain], target_delta=1e-5), rel=1e-6)


@pytest.mark.parametrize("event", [both(count=50, rate=0.05), secret(count=300), attribute(count=20)])
def test_a_loss_distribution_is_tighter_than_a_renyi_curve_but_not_by_much(event: Event) -> None:
    tight, loose = epsilon_pld([event], target_delta=1e-5), epsilon([event], target_delta=1e-5).epsilon
    assert 0.75 * loose < tight < loose


def test_attribute_gaussians_are_one_gaussian() -> None:
    """Delta of the exact epsilon by mpmath (Balle and Wang 2018)."""
    value = epsilon_pld([attribute(count=9, noise=3.0)], target_delta=1e-5)
    delta = mpmath.ncdf(0.5 - value) - mpmath.exp(value) * mpmath.ncdf(-0.5 - value)
    assert float(delta) == pytest.approx(1e-5, rel=2e-3)
    np.testing.assert_allclose(rdp([attribute(count=9, noise=3.0)], [2, 10]), [1.0, 5.0])


def test_secret_batches_cost_a_mixture_of_in_and_out() -> None:
    """q times the Gaussian's divergence, plus what nothing has at negative thresholds; and by hand in Renyi's terms."""
    noise, rate = 2.0, 0.2
    step = loss_distributions.mixed_with_nothing(loss_distributions.gaussians(1, noise), rate)
    for eps in (0.0, 0.1, 0.7):
        mu = 1 / noise
        inside = norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu)
        assert float(delta_at(step, eps)) == pytest.approx(rate * inside, abs=1e-7)
    by_hand = math.log(0.8 + 0.2 * math.exp(3 * 4 / (2 * noise**2))) / 3
    np.testing.assert_allclose(rdp([secret(count=7)], [4]), [7 * by_hand])
    np.testing.assert_allclose(rdp([secret(rate=1.0)], [4]), rdp([attribute()], [4]))
    assert epsilon_pld([secret(count=4, rate=1.0)], target_delta=1e-5) == pytest.approx(
        epsilon_pld([attribute(count=4)], target_delta=1e-5), rel=1e-4
    )


def test_secret_batches_that_show_amplify_less_than_a_hidden_sample() -> None:
    """Adult with the noise that is published for epsilon 1: 6.1 in one stream, 9.0 in both; hidden, 0.852 and 1.227."""
    delta, rate, steps = 36631**-2, 1024 / 36631, 7200
    noise = rate * math.sqrt(2 * steps * math.log(1 / delta))
    for each, shown, hidden in ((noise, 6.135, 0.852), (noise / math.sqrt(2), 9.018, 1.227)):
        got = epsilon([secret(count=steps, noise=each, rate=rate)], target_delta=delta).epsilon
        sampled = PoissonGaussians(count=steps, noise_multiplier=each, sampling_rate=rate)
        assert got == pytest.approx(shown, rel=1e-3)
        assert epsilon_pld([sampled], target_delta=delta) == pytest.approx(hidden, rel=1e-3)


def test_two_streams_of_noise_count_as_one_with_less() -> None:
    assert joint_multiplier(3.0, 4.0) == pytest.approx(2.4)
    assert joint_multiplier(5.0, math.inf) == 5
    assert joint_multiplier(5.0, 0.0) == 0


@pytest.mark.parametrize("accounting", ["rdp", "pld"])
def test_nothing_done_costs_nothing_and_no_noise_promises_nothing(accounting: Any) -> None:
    def spent(*events: Event) -> float:
        return epsilon_of(events, target_delta=1e-5, accounting=accounting)

    assert spent() == spent(both(count=0)) == spent(attribute(0), secret(0)) == 0
    assert spent(attribute(0, 0.0)) == spent(secret(0, 0.0)) == spent(both(0, 0.0)) == 0
    for event in (both(noise=0.0), both(scale=0.0)):
        assert math.isinf(spent(event))
    assert math.isinf(spent(attribute(noise=0.0), secret()))
    assert math.isinf(spent(secret(), secret(noise=0.0)))


def test_composed_events_cost_more_than_each_and_less_than_their_sum() -> None:
    parts = [secret(count=200), attribute(count=3, noise=4.0)]
    single = [epsilon_pld([part], target_delta=1e-5) for part in parts]
    assert max(single) < epsilon_pld(parts, target_delta=1e-5) < sum(single)


def test_units_are_not_mixed_and_unknown_or_unpriced_events_are_refused() -> None:
    with pytest.raises(ValueError, match="compute one epsilon for each pair"):
        epsilon_pld([both(), attribute()], target_delta=1e-5)
    votes = NoisyArgmaxes(count=3, noise_stddev_votes=20.0)
    assert not has_loss_distributions([votes, both()])
    assert has_loss_distributions([attribute(), secret()])
    with pytest.raises(TypeError, match="NoisyArgmaxes"):
        epsilon_pld([votes], target_delta=1e-5)
    with pytest.raises(TypeError, match="object"):
        epsilon_pld([object()], target_delta=1e-5)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="'rdp' or 'pld'"):
        epsilon_of([both()], target_delta=1e-5, accounting="moments")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (lambda: both(count=-1), "count >= 0"),
        (lambda: both(rate=0.0), "0 < sampling_rate <= 1"),
        (lambda: both(noise=math.nan), "gradient_noise_multiplier >= 0"),
        (lambda: attribute(noise=-1.0), "attribute_noise_multiplier >= 0"),
        (lambda: secret(rate=1.1), "0 < sampling_rate <= 1"),
        (lambda: secret(noise=math.nan), "attribute_noise_multiplier >= 0"),
    ],
)
def test_impossible_events_are_refused(broken: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=f"Expected {expected}"):
        broken()


@pytest.mark.parametrize(
    ("target", "accounting"),
    [(0.3, "rdp"), (4.0, "rdp"), (0.3, "pld"), pytest.param(4.0, "pld", marks=pytest.mark.slow)],
)
def test_the_least_noise_reaches_the_target_and_a_little_less_does_not(accounting: Any, target: float) -> None:
    def events(noise: float) -> list[Event]:
        return [secret(count=30, noise=noise), attribute(noise=40.0)]

    def spent(noise: float) -> float:
        return epsilon_of(events(noise), target_delta=1e-5, accounting=accounting)

    noise = least_noise(events, target_epsilon=target, target_delta=1e-5, accounting=accounting)
    assert spent(noise) <= target < spent(0.995 * noise)


def test_a_target_that_other_events_exceed_is_out_of_reach() -> None:
    with pytest.raises(ValueError, match="some noise reaches"):
        least_noise(lambda noise: [secret(noise=noise), attribute(noise=1.0)], target_epsilon=0.5, target_delta=1e-5)
    with pytest.raises(ValueError, match="some noise reaches"):
        least_noise(lambda noise: [secret(noise=noise)], target_epsilon=math.nan, target_delta=1e-5)


def test_nearly_no_loss_is_composed_without_a_warning() -> None:
    """What a plan for a small epsilon looks at: moments beyond any float bound no tail, and are left out."""
    noisy = both(count=125, noise=636.6894750704607, scale=1910.068425211382, rate=0.16)
    assert 0 < epsilon_pld([noisy], target_delta=1e-5) < 0.05


def test_where_the_smallest_noise_is_enough_the_search_ends() -> None:
    noise = least_noise(lambda noise: [attribute(noise=noise)], target_epsilon=1e9, target_delta=1e-5)
    assert epsilon([attribute(noise=noise)], target_delta=1e-5).epsilon <= 1e9
    assert noise < 0.01
