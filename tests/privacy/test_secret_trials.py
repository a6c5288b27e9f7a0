"""The best of a secret number of trials: its law and its price, against sums over all K and all outcomes."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from fairpate.privacy import accountant
from fairpate.privacy.accountant import PoissonGaussians, PureReleases, of_unit
from fairpate.privacy.discrete_gaussian import SeededSource
from fairpate.privacy.mechanism_events import SecretTrials, event_from, event_json, flat, mean_trials, part_of_unit
from fairpate.report.records import described_event

SHAPES = [(eta, expected) for eta in (-0.5, 0.0, 1.0, 2.5) for expected in (1.5, 3.0, 30.0)]
ADDED = {"unit": "record", "relation": "add or remove one"}


def pure(epsilon: float) -> PureReleases:
    return PureReleases(count=1, epsilon=epsilon, **ADDED)  # type: ignore[arg-type]


def law(event: SecretTrials, most: int = 20_000) -> np.ndarray:
    """P[K = k] for k = 1, 2, ... by its definition, term by term."""
    k = np.arange(1, most + 1)
    rising = np.array([0.0, *np.cumsum(np.log((np.arange(1, most) + event.eta) / (np.arange(1, most) + 1)))])
    weights = np.exp(k * math.log1p(-event.gamma) + rising)
    return weights / weights.sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("eta", "expected"), SHAPES)
def test_the_law_has_the_expected_number_of_trials_and_is_what_is_drawn(eta: float, expected: float) -> None:
    event = SecretTrials(expected_trials=expected, eta=eta, trials=((pure(1.0),),))
    chances_K = law(event)
    assert chances_K @ np.arange(1, len(chances_K) + 1) == pytest.approx(expected, rel=2e-3)
    assert mean_trials(event.gamma, eta) == pytest.approx(expected, rel=1e-9)
    source, count = SeededSource(3), 3000
    drawn = Counter(event.draw(source) for _ in range(count))
    observed = np.array([drawn[1], drawn[2], drawn[3], sum(drawn[k] for k in drawn if k > 3)])
    expected_4 = count * np.array([*chances_K[:3], chances_K[3:].sum()])
    assert float((np.square(observed - expected_4) / expected_4).sum()) < 16.3  # 3 degrees of freedom: one in 1,000


def best_of(outcomes_LY: np.ndarray, chances_K: np.ndarray) -> np.ndarray:
    """Laws of the best of K draws: P[best <= y] is the sum over k of P[K = k] P[one <= y]^k, a polynomial."""
    up_to_LY = np.clip(np.cumsum(outcomes_LY, axis=1), 0, 1)
    return np.diff(np.polynomial.Polynomial([0.0, *chances_K])(up_to_LY), axis=1, prepend=0.0)


@pytest.mark.parametrize(("eta", "expected"), SHAPES)
def test_no_tiny_mechanism_loses_more_than_the_price_and_some_lose_most_of_it(eta: float, expected: float) -> None:
    """Every pair of laws on three ordered outcomes, from a grid, that are 0.8-DP to each other."""
    trial, orders = 0.8, np.array([1.5, 3.0, 10.0, 60.0])
    event = SecretTrials(expected_trials=expected, eta=eta, trials=((pure(trial),),))
    chances_K = law(event)
    laws_L3 = np.array([(a, b, 1 - a - b) for a, b in itertools.product(np.linspace(0.05, 0.9, 18), repeat=2)])
    laws_L3 = laws_L3[laws_L3.min(axis=1) > 0.01]
    bests_L3 = best_of(laws_L3, chances_K)
    priced = accountant.rdp([event], orders)
    first, second = np.nonzero(np.abs(np.log(laws_L3[:, None] / laws_L3)).max(axis=2) <= trial)
    # The divergences of these pairs, which are at most those of any 0.8-DP mechanism.
    moments_A = [(bests_L3[first] ** order * bests_L3[second] ** (1 - order)).sum(axis=1).max() for order in orders]
    most = np.log(moments_A) / (orders - 1)
    assert (most <= priced * (1 + 1e-9)).all()
    # Of a fraction: at high orders, the loss of the best outcome alone approaches the bound (2 + eta) epsilon.
    assert most[-1] > 0.5 * trial
    assert most[-1] > priced[-1] / 4


def test_a_gaussian_trial_against_the_formula_on_a_fine_grid_of_orders() -> None:
    """A trial of 1.0945 costs 1.65, 1.92 and 2.29 where 3, 10 and 100 are expected."""
    stddev, delta = 3.7233, 1e-5
    trial = PoissonGaussians(count=1, noise_multiplier=stddev, sampling_rate=1.0)
    assert accountant.epsilon([trial], target_delta=delta).epsilon == pytest.approx(1.0945, abs=1e-3)
    a = np.linspace(1.01, 200, 100_000)
    for expected, epsilon in ((3, 1.65), (10, 1.92), (100, 2.29)):
        gamma = next(g for g in np.geomspace(1, 1e-4, 200_000)[1:] if (1 / g - 1) / math.log(1 / g) >= expected)
        inside = np.min((1 - 1 / a) * a / (2 * stddev**2) + math.log(1 / gamma) / a)
        curve = a / (2 * stddev**2) + inside + math.log(expected) / (a - 1)
        converted = np.min(curve + np.log(1 - 1 / a) - np.log(delta * a) / (a - 1))
        event = SecretTrials(expected_trials=expected, trials=((trial,),))
        found = accountant.epsilon([event], target_delta=delta).epsilon
        assert found == pytest.approx(converted, rel=1e-3)
        assert found == pytest.approx(epsilon, abs=6e-3)


def test_pure_trials_cost_at_most_two_plus_eta_times_as_much() -> None:
    """Corollary 3, for any expected number; with many trials it is no less."""
    for eta, expected in SHAPES:
        event = SecretTrials(expected_trials=expected, eta=eta, trials=((pure(0.7),),))
        assert accountant.rdp([event], np.array([1e9]))[0] <= (2 + eta) * 0.7 * (1 + 1e-5)
    many = SecretTrials(expected_trials=1000, eta=1.0, trials=((pure(0.7),),))
    assert accountant.rdp([many], np.array([1e9]))[0] == pytest.approx(3 * 0.7, rel=1e-4)


def test_a_list_costs_as_much_as_its_dearest_settings_and_more_trials_cost_more() -> None:
    def cost(expected: float, *trials: tuple[PureReleases, ...]) -> np.ndarray:
        return accountant.rdp([SecretTrials(expected_trials=expected, trials=trials)])

    cheap, dear = (pure(0.2),), (pure(0.3), pure(0.4))
    assert np.array_equal(cost(5, cheap, dear), cost(5, dear))
    assert (cost(5, dear) > cost(5, cheap)).all()
    assert (cost(50, dear) > cost(5, dear)).all()


def test_events_of_trials_are_stored_and_moved_to_other_units() -> None:
    event = SecretTrials(expected_trials=4, trials=((pure(0.2), pure(0.1)), (pure(0.3),)))
    assert event_from(event_json(event)) == event
    assert flat([event, pure(9)]) == (pure(0.2), pure(0.1), pure(0.3), pure(9))
    said = described_event(event_json(event))
    assert said.startswith(
        "1 secret number of trials (expected trials 4, eta 0) of 1 release of pure differential privacy"
    )
    of_person = of_unit(event, "person")
    assert {inner.unit for inner in flat([of_person])} == {"person"}
    # Of a record, a person's event is priced as another one.
    assert np.all(accountant.rdp([part_of_unit(of_person, "record")]) > accountant.rdp([event]))


def test_parameters_out_of_range_are_refused() -> None:
    for fields, words in (
        ({"expected_trials": 1}, "1 < expected_trials"),
        ({"expected_trials": math.nan}, "1 < expected_trials"),
        ({"eta": -1}, "eta > -1"),
        ({"trials": ()}, "Expected events in every trial"),
        ({"trials": ((pure(1),), ())}, "Expected events in every trial"),
        ({"unit": "person"}, "for person"),
    ):
        with pytest.raises(ValueError, match=words):
            SecretTrials(**{"expected_trials": 3, "trials": ((pure(1),),)} | fields)  # type: ignore[arg-type]
