"""The audit's statistics: against known mechanisms, an exact interval, and the theorem summed term by term."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
import pytest
import scipy
from method_kinds import quick_and_slow
from scipy import stats

from fairpate.privacy.accountant import PoissonGaussians, epsilon
from fairpate.privacy.audit_bounds import (
    Guesses,
    IdealAttack,
    NoiseTest,
    Separation,
    answer_scores,
    epsilon_lower_bound,
    gaussian_epsilon,
    gaussian_mu,
    grid_test,
    guess,
    noise_tests,
    normal_scores,
    p_value,
    separate,
    spread_of_samples,
)
from fairpate.privacy.discrete_gaussian import SeededSource, discrete_gaussians

pytestmark = pytest.mark.usefixtures("light_runs")


def all_guessed(num_canaries: int, num_correct: int) -> Guesses:
    return Guesses(num_canaries=num_canaries, num_guesses=num_canaries, num_correct=num_correct)


def randomised_response(epsilon: float, num_canaries: int, rng: np.random.Generator) -> Guesses:
    """Every coin is shown, turned over with probability 1 / (1 + e^epsilon)."""
    included = rng.random(num_canaries) < 0.5
    shown = included ^ (rng.random(num_canaries) < 1 / (1 + math.exp(epsilon)))
    return guess(
        shown + 1e-3 * rng.random(num_canaries),
        included,
        num_guessed_in=int(shown.sum()),
        num_guessed_out=int((~shown).sum()),
    )


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
def test_randomised_response_is_bounded_below_its_epsilon_with_the_stated_confidence(epsilon: float) -> None:
    rng, runs = np.random.default_rng(0), 600
    bound_of = lru_cache(lambda guesses: epsilon_lower_bound(guesses, delta=0.0))
    bounds = np.array([bound_of(randomised_response(epsilon, 300, rng)) for _ in range(runs)])
    failures = int((bounds > epsilon).sum())
    # At most one in twenty may exceed the truth, and a bound that never did would waste its confidence.
    assert stats.binom.sf(failures - 1, runs, 0.05) > 1e-4
    assert failures >= 0.01 * runs
    assert np.median(bounds) > 0.6 * epsilon


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
def test_many_canaries_find_the_epsilon_of_randomised_response(epsilon: float) -> None:
    found = epsilon_lower_bound(randomised_response(epsilon, 200_000, np.random.default_rng(1)), delta=0.0)
    assert epsilon - 0.05 < found < epsilon + 0.02


@pytest.mark.parametrize(("count", "correct"), [(10, 10), (100, 73), (1000, 880), (1000, 510)])
def test_without_delta_the_bound_is_the_exact_binomial_interval(count: int, correct: int) -> None:
    right = stats.beta.ppf(0.05, correct, count - correct + 1)  # Clopper and Pearson 1934
    expected = max(0.0, math.log(right / (1 - right)))
    assert epsilon_lower_bound(all_guessed(count, correct), delta=0.0) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(("canaries", "count", "correct"), [(6, 6, 5), (9, 4, 4), (12, 7, 0), (5, 0, 0)])
def test_p_value_is_the_theorem_term_by_term(canaries: int, count: int, correct: int) -> None:
    right, delta = Fraction(3, 4), Fraction(1, 500)  # e^epsilon = 3

    def probability(k: int) -> Fraction:
        return math.comb(count, k) * right**k * (1 - right) ** (count - k)

    tail = sum((probability(k) for k in range(correct, count + 1)), Fraction(0))
    slopes = [
        sum((probability(k) for k in range(max(0, correct - i), correct)), Fraction(0)) / i
        for i in range(1, canaries + 1)
    ]
    expected = min(Fraction(1), tail + 2 * canaries * delta * max(slopes))
    got = p_value(
        Guesses(num_canaries=canaries, num_guesses=count, num_correct=correct), epsilon=math.log(3), delta=1 / 500
    )
    assert got == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("delta", [1e-4, 1e-2])
def test_no_leak_that_delta_allows_is_called_less_likely_than_it_is(epsilon: float, delta: float) -> None:
    """Two mechanisms that are exactly (epsilon, delta): leak each canary, or all of them, with probability delta."""
    count, right = 40, 1 / (1 + math.exp(-epsilon))
    for correct in range(count + 1):
        bound = p_value(all_guessed(count, correct), epsilon=epsilon, delta=delta)
        each = stats.binom.sf(correct - 1, count, delta + (1 - delta) * right)
        together = delta + (1 - delta) * stats.binom.sf(correct - 1, count, right)
        assert bound >= max(each, together) - 1e-12


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3])
@pytest.mark.parametrize("correct", [150, 190, 200])
def test_a_weaker_claim_is_never_refuted_more_easily(delta: float, correct: int) -> None:
    values = [p_value(all_guessed(200, correct), epsilon=epsilon, delta=delta) for epsilon in np.linspace(0, 9, 400)]
    assert (np.diff(values) >= -1e-12).all()
    tighter = epsilon_lower_bound(all_guessed(200, correct), delta=0.0)
    assert epsilon_lower_bound(all_guessed(200, correct), delta=delta) <= tighter


def test_guesses_take_the_ends_of_the_scores() -> None:
    scores = [0.9, -3.0, 0.1, 5.0, -1.0]
    included = [True, False, True, False, True]
    got = guess(scores, included, num_guessed_in=2, num_guessed_out=1)
    assert got == Guesses(num_canaries=5, num_guesses=3, num_correct=2)  # 5.0 wrong, 0.9 and -3.0 right
    assert guess(scores, included, num_guessed_in=0, num_guessed_out=0).num_correct == 0
    assert guess(scores, included, num_guessed_in=5, num_guessed_out=0).num_correct == 3


def test_guessing_no_better_than_a_coin_proves_nothing() -> None:
    assert epsilon_lower_bound(all_guessed(1000, 500), delta=1e-5) == 0.0
    assert epsilon_lower_bound(all_guessed(0, 0), delta=1e-5) == 0.0


def test_what_makes_no_sense_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="num_correct"):
        Guesses(num_canaries=3, num_guesses=2, num_correct=3)
    with pytest.raises(ValueError, match="NaN"):
        guess([1.0, math.nan], [True, False], num_guessed_in=1, num_guessed_out=1)
    with pytest.raises(ValueError, match="at most 2 guesses"):
        guess([1.0, 2.0], [True, False], num_guessed_in=2, num_guessed_out=1)
    with pytest.raises(ValueError, match="scores_M and included_M"):
        guess([1.0, 2.0], [True], num_guessed_in=1, num_guessed_out=0)
    with pytest.raises(ValueError, match="confidence"):
        epsilon_lower_bound(all_guessed(10, 9), delta=0.0, confidence=1.0)
    with pytest.raises(ValueError, match="delta"):
        p_value(all_guessed(10, 9), epsilon=1.0, delta=-0.1)
    with pytest.raises(ValueError, match="epsilon"):
        p_value(all_guessed(10, 9), epsilon=math.nan, delta=0.1)


@pytest.mark.parametrize("mu", [0.05, 0.3, 1.5])
def test_the_epsilon_of_a_gaussian_is_the_accountant_s(mu: float) -> None:
    event = PoissonGaussians(count=1, noise_multiplier=1 / mu, sampling_rate=1.0)
    found = gaussian_epsilon(mu, 1e-5)
    assert found == pytest.approx(epsilon([event], target_delta=1e-5).epsilon, rel=0.15)  # Renyi curves, from above
    assert found <= epsilon([event], target_delta=1e-5).epsilon
    assert gaussian_mu(found, 1e-5) == pytest.approx(mu, rel=1e-6)


def test_a_gaussian_of_less_than_delta_needs_no_epsilon() -> None:
    assert gaussian_epsilon(1e-6, 1e-5) == gaussian_epsilon(0.0, 1e-5) == 0.0


@pytest.mark.parametrize("mu", quick_and_slow([0.0, 0.2, 2.0], [0.0, 0.2]))
def test_the_shift_of_normal_scores_exceeds_its_bound_as_often_as_stated(mu: float) -> None:
    rng, runs, count = np.random.default_rng(4), 400, 300
    bounds = []
    for _ in range(runs):
        included = rng.random(count) < 0.5
        bounds.append(separate(3 * rng.normal(size=count) + 3 * mu * included - 7, included).mu_lower_bound())
    failures = int((np.array(bounds) > mu).sum())
    assert stats.binom.sf(failures - 1, runs, 0.05) > 1e-4
    assert failures >= 0.02 * runs


def test_scores_that_are_the_wrong_way_round_or_too_few_prove_nothing() -> None:
    assert separate([1.0, 2.0, 3.0, 4.0], [True, True, False, False]).mu_lower_bound() == 0.0
    with pytest.raises(ValueError, match="two or more canaries"):
        Separation(num_included=1, num_left_out=5, t=1.0)
    with pytest.raises(ValueError, match="two or more canaries"):
        separate([1.0, 2.0, 3.0], [True, True, False])
    assert separate([1.0] * 4, [True, True, False, False]).mu_lower_bound() == 0.0


def test_scores_without_noise_prove_more_than_any_claim() -> None:
    apart = separate([1.0] * 50 + [0.0] * 50, [True] * 50 + [False] * 50)
    assert gaussian_epsilon(apart.mu_lower_bound(), 1e-5) > 100


def test_the_ideal_attack_reaches_what_it_promises() -> None:
    """Its plan, from scores that are drawn: of Gaussian releases, and of randomised response in two answers."""
    rng, count = np.random.default_rng(5), 20_000
    included = rng.random(count) < 0.5
    for epsilon_, mu in ((1.0, gaussian_mu(1.0, 1e-5)), (2.0, None)):
        attack = IdealAttack(epsilon=epsilon_, mu=mu)
        planned = attack.guesses(num_canaries=count, delta=1e-5)
        scores = rng.normal(size=count) + (mu or 0.0) * included
        if mu is None:
            agree = 1 / (1 + math.exp(-epsilon_ / 2))
            truth = (rng.random((2, count)) < agree) == included
            scores = truth.sum(axis=0) + 1e-3 * rng.random(count)
        each = planned.num_guesses // 2
        found = guess(scores, included, num_guessed_in=each, num_guessed_out=each)
        assert found.num_correct == pytest.approx(planned.num_correct, abs=5 * math.sqrt(planned.num_guesses) / 2)
        assert epsilon_lower_bound(planned, delta=1e-5) < epsilon_


def test_no_more_canaries_are_guessed_than_there_are() -> None:
    """Where every one is best guessed, as of little epsilon, their number may be odd."""
    for epsilon_ in (0.01, 0.3, 1.0):
        attack = IdealAttack(epsilon=epsilon_, mu=None)
        for count in (101, 20_043):
            assert 0 < attack.guesses(num_canaries=count, delta=1e-5).num_guesses < count


def test_guesses_at_both_ends_prove_more_than_the_limits_of_one_threshold() -> None:
    """Clopper-Pearson limits of both error rates, at the best of many thresholds and exact expectations."""
    count, mu = 20_000, gaussian_mu(1.0, 1e-5)
    guesses = IdealAttack(epsilon=1.0, mu=mu).guesses(num_canaries=count, delta=1e-5)
    best = 0.0
    for threshold in np.linspace(0, 4, 200):
        reached, false = (round(count / 2 * stats.norm.sf(threshold - shift)) for shift in (mu, 0.0))
        low = stats.beta.ppf(0.025, reached, count / 2 - reached + 1) if reached else 0.0
        high = stats.beta.ppf(0.975, false + 1, count / 2 - false)
        best = max(best, math.log(max(low - 1e-5, 1e-300) / high))
    assert 0.36 < best < 0.40
    assert epsilon_lower_bound(guesses, delta=1e-5) == pytest.approx(0.52, abs=0.02)


@pytest.mark.parametrize("confidence", [0.95, 0.99, 0.9996, 1 - 1e-6])
def test_every_statistic_has_a_bound_also_where_the_noncentral_distribution_has_none(confidence: float) -> None:
    """scipy's noncentral t distribution is NaN at 40 with 10,001 degrees of freedom, near a shift of 0."""
    assert math.isnan(scipy.special.nctdtr(10_001, 0.03, 40.0))
    bounds = [
        Separation(num_included=5000, num_left_out=5003, t=t).mu_lower_bound(confidence)
        for t in (1.0, 5.0, 20.0, 39.0, 40.0, 41.0, 60.0, 1e3, 1e4)
    ]
    assert bounds == sorted(bounds) and bounds[4] == pytest.approx((bounds[3] + bounds[5]) / 2, rel=1e-3)


def scores_of(kind: str, draws: int, places: int, rng: np.random.Generator, seed: int) -> np.ndarray:
    """Normal scores of correct noise of one kind."""
    if kind == "laplace":
        return normal_scores(rng.laplace(size=(draws, places)), math.sqrt(2), laplace=True)
    if kind == "answers":
        chance = rng.uniform(0.05, 0.95, size=(draws, places))
        return answer_scores(rng.random(chance.shape) < chance, chance)
    if kind == "float":
        return normal_scores(3.0 * rng.normal(size=(draws, places)), 3.0)
    stddev, source = float(kind), SeededSource(seed)
    return normal_scores(
        discrete_gaussians(stddev, source.machine_words([str(r) for r in range(draws)], places), source), stddev
    )


@pytest.mark.parametrize("kind", ["laplace", "answers", "float", "0.8", "3.0", "1000.0"])
def test_correct_noise_fails_a_test_of_how_it_is_drawn_as_rarely_as_stated(kind: str) -> None:
    rng, runs, level = np.random.default_rng(4), 150, 0.05
    found: dict[str, list[float]] = {}
    for run in range(runs):
        own, other = (scores_of(kind, 40, 12, rng, 2 * run + which) for which in range(2))
        # Gaussian itself, whatever the noise: over all runs, by an independent test.
        for test in noise_tests([own, other])[1]:
            found.setdefault(test.what, []).append(test.p_value)
    assert set(found) == {"place", "shift", "shape", "distribution", "pair", "draws", "distance"}
    for what, p_values in found.items():
        alarms = int((np.array(p_values) < level).sum())
        assert stats.binom.sf(alarms - 1, runs, level) > 1e-4, what
    pooled = np.concatenate([scores_of(kind, 40, 50, rng, 1000 + run).ravel() for run in range(5)])
    assert stats.kstest(pooled, "norm").pvalue > 1e-4


def test_each_fault_of_noise_is_found_by_its_own_test() -> None:
    rng, draws, places = np.random.default_rng(5), 60, 50
    good = rng.normal(size=(draws, places))

    def found(score_RP: np.ndarray, *before: np.ndarray) -> set[str]:
        return {test.what for test in noise_tests([*before, score_RP])[-1] if test.is_off(1 - 1e-6)}

    assert found(good) == set()
    assert "place" in found(np.where(np.arange(places) == 4, 0.0, good))
    assert "shift" in found(np.broadcast_to(good[:1], good.shape))
    assert "draws" in found(np.concatenate([good[:1], good]))
    assert "pair" in found(np.where(np.arange(places) == 4, good[:, 9:10], good))
    # Of few draws, pairs show nothing and all of them together do.
    shared = np.hstack([good, good])[:6]
    assert found(shared) == {"distance"} and "distance" in found(good[:6], good[:6].copy())
    # Neighbours that share half of their noise, which no pair shows by itself.
    assert found((good + np.roll(good, 1, axis=1)) / math.sqrt(2)) >= {"distance"}
    wide = rng.normal(size=(200, 100))
    for cut in (np.sign(wide), np.rint(wide), rng.uniform(-1, 1, size=wide.shape) * math.sqrt(3), wide.clip(-2.5, 2.5)):
        assert "shape" in found(cut)
    # Of another shape and the stated mean square, or wider; the last only far out, in one of 2,000 numbers.
    laplace = rng.laplace(scale=math.sqrt(0.5), size=wide.shape)
    assert "distribution" in found(laplace) and found(1.7 * laplace) == {"distribution"}
    assert found(rng.normal(size=(1000, 500)).clip(-3.5, 3.5)) == {"shape"}
    # Noise that a training draws once for three steps, or again in the same order: no two draws show it.
    for order in (np.repeat(np.arange(100), 3), np.tile(np.arange(50), 6)):
        assert found(rng.normal(size=(100, 2))[order]) >= {"draws"}
    # More noise than stated, and numbers that were not released, are no fault.
    assert found(2 * wide) == set() and found(np.where(rng.random(wide.shape) < 0.9, np.nan, wide)) == set()


def test_a_distribution_is_said_to_be_seen_where_laplace_noise_is_found_in_nine_of_ten_audits() -> None:
    rng, confidence = np.random.default_rng(7), 1 - 1e-4

    def test_of(scores: np.ndarray) -> NoiseTest:
        return next(test for test in noise_tests([scores])[0] if test.what == "distribution")

    least = next(
        num for num in range(100, 10_000, 100) if test_of(rng.normal(size=(20, num // 20))).sees_shape(confidence)
    )
    share = np.mean(
        [test_of(rng.laplace(scale=math.sqrt(0.5), size=(20, least // 20))).is_off(confidence) for _ in range(60)]
    )
    assert 1000 < least < 4000 and share > 0.85


def test_coarse_noise_and_samples_that_are_no_poisson_samples_are_found() -> None:
    assert grid_test(4, 100).is_off(0.999) and grid_test(0, 100).is_off(0.999)
    assert not grid_test(1, 100).is_off(0.99) and not grid_test(2, 3).is_off(0.99)
    rng, steps, rate, canaries = np.random.default_rng(6), 40, 0.1, 2000
    alarms = sum(
        spread_of_samples(rng.binomial(steps, rate, canaries), num_steps=steps, rate=rate).is_off(0.95)
        for _ in range(300)
    )
    assert stats.binom.sf(alarms - 1, 300, 0.05) > 1e-4
    # A partition of the records in each of four epochs; one batch in all steps.
    for counts in (np.full(100, 4), steps * rng.binomial(1, rate, 100)):
        assert spread_of_samples(counts, num_steps=steps, rate=rate).is_off(1 - 1e-6)
