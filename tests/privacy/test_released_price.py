"""A released price: what its own noise costs, its distribution, and the limit that it states."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from method_kinds import quick_and_slow
from numpy.testing import assert_allclose
from two_steps import threshold_sensitivity, two_step_rdp

from fairpate.privacy import accountant, smooth_sensitivity
from fairpate.privacy.accountant import ConfidentGnmaxQueries
from fairpate.privacy.discrete_gaussian import OS_ENTROPY, OsEntropy, SeededSource
from fairpate.privacy.mechanism_events import SmoothRelease, release_rdp
from fairpate.privacy.smooth_sensitivity import SanitisedRdp, sanitised_rdp
from fairpate.types import MechanismParameters

pytestmark = pytest.mark.usefixtures("light_runs")

RELEASE = SmoothRelease(order=3.0, beta=0.05, noise_stddev=4.0, scale_noise_stddev=10.0)
MECHANISM: dict[str, Any] = {"threshold": 60.0, "threshold_stddev_votes": 30.0, "noise_stddev_votes": 20.0}


def gaussian_divergence(order: float, noise: float, ratio: float, shift: float) -> float:
    """Renyi divergence of N(0, s^2) from N(shift, (ratio s)^2) by quadrature around the integrand's peak."""
    a, s, t = mpmath.mpf(order), mpmath.mpf(noise), mpmath.mpf(noise) * ratio
    precision = a / s**2 + (1 - a) / t**2
    peak, width = (1 - a) * shift / t**2 / precision, 1 / mpmath.sqrt(precision)

    def log_integrand(x: Any) -> Any:
        own = -(x**2) / (2 * s**2) - mpmath.log(s)
        return a * own + (1 - a) * (-((x - shift) ** 2) / (2 * t**2) - mpmath.log(t)) - mpmath.log(2 * mpmath.pi) / 2

    top = log_integrand(peak)
    integral = mpmath.quad(lambda x: mpmath.exp(log_integrand(x) - top), [peak + k * width for k in range(-12, 13)])
    return float((top + mpmath.log(integral)) / (a - 1))


@pytest.mark.parametrize(
    ("order", "share", "noise"),
    quick_and_slow(
        [(20.0, 0.49, 4.0), (20.0, 0.49, 20.0), (8.0, 0.32, 5.0), (2.0, 0.2, 3.0), (1.5, 0.01, 2.0)],
        [(20.0, 0.49, 4.0), (1.5, 0.01, 2.0)],
    ),
)
def test_the_price_of_noise_is_the_worst_divergence_that_smoothness_allows(
    order: float, share: float, noise: float
) -> None:
    beta = share / order
    price = float(release_rdp(SmoothRelease(order=order, beta=beta, noise_stddev=noise), [order])[0])
    worst = 0.0
    for ratio in np.exp(np.linspace(-beta, beta, 5)):
        worst = max(worst, gaussian_divergence(order, noise, float(ratio), float(min(1.0, ratio))))
    assert price == pytest.approx(worst, rel=1e-9)


def test_the_published_price_is_too_low_at_the_published_discount() -> None:
    """Papernot et al. 2018, Theorem 23, with their code's beta = 0.49 / order."""
    order, noise = 20.0, 20.0
    beta = 0.49 / order
    published = order * math.exp(2 * beta) / noise**2
    published += (beta * order - 0.5 * math.log(1 - 2 * beta * order)) / (order - 1)
    truth = gaussian_divergence(order, noise, math.exp(-beta), math.exp(-beta))
    assert published == pytest.approx(0.18125, abs=1e-5)
    assert truth == pytest.approx(0.60233, abs=1e-5)


def test_without_a_change_of_scale_the_noise_costs_what_gaussian_noise_costs() -> None:
    release = SmoothRelease(order=4.0, beta=1e-9, noise_stddev=3.0, scale_noise_stddev=6.0)
    assert_allclose(release_rdp(release, [2.0, 4.0]), [2 / 18 + 2 / 72, 4 / 18 + 4 / 72], rtol=1e-6)


def test_a_release_is_an_event_of_the_data_independent_ledger() -> None:
    queries = ConfidentGnmaxQueries(count=100, **MECHANISM)
    orders = [2.0, 3.0, 9.0, 11.0]  # 1 / (1 - e^-0.1) = 10.5
    with_release = accountant.rdp([queries, RELEASE], orders)
    assert_allclose(with_release[:3], (accountant.rdp([queries], orders) + release_rdp(RELEASE, orders))[:3])
    assert with_release[3] == math.inf
    before, after = (accountant.epsilon(events, target_delta=1e-5) for events in ([queries], [queries, RELEASE]))
    assert before.epsilon < after.epsilon < math.inf


def votes_of_a_run() -> np.ndarray:
    generator = np.random.default_rng(3)
    return generator.multinomial(100, generator.dirichlet(np.full(4, 0.2), size=60))


def test_releases_are_centred_on_the_cost_with_the_stated_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    votes = votes_of_a_run()[:15]
    exact = two_step_rdp(votes, **MECHANISM, order=RELEASE.order).sum()
    scale = smooth_sensitivity.smooth_sensitivity(votes, MechanismParameters(**MECHANISM), release=RELEASE)
    # Equal in all draws, and all of the time.
    monkeypatch.setattr(smooth_sensitivity, "smooth_sensitivity", lambda *_, **__: scale)
    draws = [
        sanitised_rdp(votes, MechanismParameters(**MECHANISM), release=RELEASE, source=SeededSource(seed))
        for seed in range(200)
    ]
    assert len({draw.rdp for draw in draws}) > 195
    centred = np.array([(draw.rdp - exact) / (scale * RELEASE.noise_stddev) for draw in draws])
    logs = np.array([draw.log_scale for draw in draws]) - math.log(scale)
    for values in (centred, logs / (RELEASE.beta * RELEASE.scale_noise_stddev)):
        assert abs(values.mean()) < 4 / math.sqrt(200)
        assert 0.8 < values.std() < 1.2  # four standard errors; 2/3 and 3/2 are far outside
    covered = np.mean([draw.upper(0.8) >= exact for draw in draws])
    assert covered >= 0.8 - 3 * math.sqrt(0.16 / 200)
    capped = accountant.rdp([ConfidentGnmaxQueries(count=15, **MECHANISM)], [RELEASE.order])[0]
    assert draws[0].rdp_data_independent == pytest.approx(capped, rel=1e-12)


def test_what_is_published_says_what_it_is() -> None:
    result = sanitised_rdp(votes_of_a_run(), MechanismParameters(**MECHANISM), release=RELEASE, source=OsEntropy())
    assert result.noise == OS_ENTROPY
    assert result.rdp == round(result.rdp, 6)
    seeded = sanitised_rdp(votes_of_a_run(), MechanismParameters(**MECHANISM), release=RELEASE, source=SeededSource(1))
    assert seeded.noise == "seeded: not private"
    assert seeded == sanitised_rdp(
        votes_of_a_run(), MechanismParameters(**MECHANISM), release=RELEASE, source=SeededSource(1)
    )


def test_epsilon_covers_queries_and_release() -> None:
    release = SmoothRelease(order=5.0, beta=1e-9, noise_stddev=10.0)
    result = SanitisedRdp(release=release, rdp=0.5, log_scale=None, rdp_data_independent=2.0, noise=OS_ENTROPY)
    # R = 0.5 + 5 / 200, converted: R + ln(4/5) - ln(5 delta) / 4
    expected = 0.525 + math.log(0.8) - math.log(5e-5) / 4
    assert result.epsilon(target_delta=1e-5) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="finite scale_noise_stddev"):
        result.upper(0.95)


def test_an_upper_limit_adds_both_quantiles_and_never_passes_what_any_votes_cost() -> None:
    release = SmoothRelease(order=5.0, beta=0.02, noise_stddev=3.0, scale_noise_stddev=10.0)
    result = SanitisedRdp(release=release, rdp=0.5, log_scale=math.log(0.1), rdp_data_independent=2.0, noise=OS_ENTROPY)
    quantile = 1.959963984540054  # 0.05 in two halves of 0.025
    expected = 0.5 + quantile * 3 * 0.1 * math.exp(quantile * 0.2)
    assert result.upper(0.95) == pytest.approx(expected, abs=1e-5)
    assert result.upper(0.95) >= expected
    assert result.upper(1 - 1e-12) == 2.0
    assert result.epsilon(target_delta=1e-5, confidence=0.95) > result.epsilon(target_delta=1e-5)
    for confidence in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="confidence"):
            result.upper(confidence)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": 1.0}, "order"),
        ({"order": 10.0}, r"order < 1 / \(2 beta\) = 10.*lower beta"),
        ({"order": math.nan}, "order"),
        ({"beta": 0.0}, "beta"),
        ({"beta": math.nan}, "beta"),
        ({"noise_stddev": 0.0}, "noise_stddev"),
        ({"noise_stddev": math.inf}, "noise_stddev"),
        ({"scale_noise_stddev": 0.0}, "scale_noise_stddev"),
        ({"scale_noise_stddev": math.nan}, "scale_noise_stddev"),
    ],
)
def test_a_release_is_checked_where_it_is_made(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SmoothRelease(**{"order": 3.0, "beta": 0.05, "noise_stddev": 4.0, **change})


def test_a_shut_threshold_costs_nothing_and_an_open_one_the_argmax_alone() -> None:
    votes = votes_of_a_run()
    shut = sanitised_rdp(
        votes, MechanismParameters(**{**MECHANISM, "threshold": math.inf}), release=RELEASE, source=SeededSource(0)
    )
    assert (shut.rdp, shut.log_scale, shut.rdp_data_independent) == (0.0, -math.inf, 0.0)
    assert shut.upper(0.9) == 0.0
    open_bit = threshold_sensitivity(votes, threshold=-math.inf, threshold_stddev_votes=1.0, order=3.0)
    assert not open_bit.any()
