"""The second accountant against closed forms, and against the first for every kind of event that can be stated."""

from __future__ import annotations

import ast
import importlib
import math
import pkgutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from fairpate import privacy
from fairpate.privacy import accountant, second_accountant
from fairpate.privacy.accountant import (
    ConfidentGnmaxQueries,
    LaplaceReleases,
    NoisyArgmaxes,
    PoissonGaussians,
    PureReleases,
    ThresholdChecks,
    event_kinds,
)
from fairpate.privacy.mechanism_events import (
    AttributeGaussians,
    AttributeQueries,
    MomentSums,
    NeighbourVotes,
    PoissonGaussianLaplaces,
    PredictionTables,
    SecretBatchAttributeGaussians,
    SecretTrials,
    SmoothRelease,
    VoteSums,
    VoteTables,
    event_json,
)
from fairpate.privacy.second_accountant import KINDS, NotRecomputedError, guarantee_of, recomputed_epsilon

for module in pkgutil.iter_modules(privacy.__path__):
    importlib.import_module(f"{privacy.__name__}.{module.name}")  # registers its events

DELTA = 1e-5
MECHANISM = {"threshold": 70.0, "threshold_stddev_votes": 40.0, "noise_stddev_votes": 15.0}
QUERIES = ConfidentGnmaxQueries(count=350, **MECHANISM)


def told(*events: Any) -> list[dict[str, Any]]:
    return [event_json(event) | {"unit": event.unit, "relation": event.relation} for event in events]


def recomputed(*events: Any, delta: float = DELTA) -> float:
    return recomputed_epsilon(told(*events), delta=delta)


HARDLY_A_SPREAD = [VoteTables(count=2781, noise_stddev_votes=0.2876, sampling_rate=4.65e-4)]  # often
WITH_DISTRIBUTION = [
    [PoissonGaussians(count=35, noise_multiplier=0.888, sampling_rate=0.0292)],
    [PoissonGaussians(count=10_000, noise_multiplier=1.1, sampling_rate=0.004, unit="person")],
    [PoissonGaussians(count=1, noise_multiplier=0.1, sampling_rate=1.0)],
    [PoissonGaussians(count=200, noise_multiplier=2.0, sampling_rate=0.05, relation="replace one")],
    [PoissonGaussianLaplaces(count=100, gradient_noise_multiplier=1.5, laplace_scale=3.0, sampling_rate=0.05)],
    [AttributeGaussians(count=100, attribute_noise_multiplier=30.0)],
    [SecretBatchAttributeGaussians(count=200, attribute_noise_multiplier=4.0, sampling_rate=0.02)],
    [PureReleases(count=1, epsilon=3.0)],
    [LaplaceReleases(count=100, epsilon=0.1), PureReleases(count=50, epsilon=0.1)],
    [VoteTables(count=1, noise_stddev_votes=3.0)],
    [VoteTables(count=20, noise_stddev_votes=2.0, sampling_rate=0.1)],
    HARDLY_A_SPREAD,
    [VoteSums(count=20, noise_stddev_votes=2000.0, norm=1000, sampling_rate=0.1)],
    [MomentSums(count=2, noise_stddev_votes=3000.0, norm=1000), VoteSums(count=3, noise_stddev_votes=5000.0, norm=900)],
    [PredictionTables(count=1, noise_stddev_records=3.73, weight=2**20)],
    [PredictionTables(count=2, noise_stddev_records=3.73, weight=2**20, relation="replace one", unit="person")],
    [NeighbourVotes(count=100, noise_stddev_votes=10.0, sampling_rate=0.1)],
    [NeighbourVotes(count=100, noise_stddev_votes=10.0, sampling_rate=0.1, threshold_stddev_votes=20.0)],
]
BY_CURVES = [
    [ThresholdChecks(count=100, threshold_stddev_votes=40.0)],
    [NoisyArgmaxes(count=30, noise_stddev_votes=15.0)],
    [QUERIES],
    [ConfidentGnmaxQueries(count=50, threshold=-math.inf, threshold_stddev_votes=0.0, noise_stddev_votes=20.0)],
    [AttributeQueries(count=50, **MECHANISM)],
    [QUERIES, SmoothRelease(order=8.0, beta=0.01, noise_stddev=9.0)],
    [QUERIES, SmoothRelease(order=8.0, beta=0.01, noise_stddev=9.0, scale_noise_stddev=5.0)],
]

SAMPLED = PoissonGaussians(count=500, noise_multiplier=1.5, sampling_rate=0.01)
SUMS = VoteSums(count=1, noise_stddev_votes=4000.0, norm=1000)
PURE = PureReleases(count=1, epsilon=1.0, unit="record", relation="add or remove one")
OF_TRIALS = [
    [SecretTrials(expected_trials=expected, eta=eta, trials=trials)]
    for expected, eta in ((3.0, 0.0), (100.0, 0.0), (10.0, -0.5), (10.0, 1.0))
    for trials in (((SUMS,),), ((SAMPLED,), (SUMS, SUMS)), ((PURE,),))
]

# Every kind of trials, and every law of their number, is among the quick ones.
QUICK_AND_CAMPAIGNS = [
    pytest.param(events, marks=() if number % 3 == number // 3 % 3 else pytest.mark.campaign)
    for number, events in enumerate(OF_TRIALS)
]

ALL = [*WITH_DISTRIBUTION, *BY_CURVES, *OF_TRIALS]
# Of sums over releases alone: no statement of a run holds one.
NOT_RECOMPUTED = {"PartOfUnit"}


@pytest.mark.parametrize(
    "events",
    [pytest.param(each, marks=[pytest.mark.slow] * (each is HARDLY_A_SPREAD)) for each in WITH_DISTRIBUTION],
    ids=lambda events: type(events[0]).__name__,
)
def test_both_accountants_agree_on_loss_distributions(events: list[Any]) -> None:
    assert recomputed(*events) == pytest.approx(accountant.epsilon_pld(events, target_delta=DELTA), rel=5e-4)


@pytest.mark.parametrize("events", BY_CURVES, ids=lambda events: type(events[-1]).__name__)
def test_where_only_curves_price_a_run_the_second_is_a_little_tighter(events: list[Any]) -> None:
    by_curves = accountant.epsilon(events, target_delta=DELTA).epsilon
    assert 0.9 * by_curves < recomputed(*events) <= by_curves * (1 + 1e-6)


@pytest.mark.parametrize(
    "events", QUICK_AND_CAMPAIGNS, ids=lambda events: f"{events[0].expected_trials:g}, {events[0].eta:g}"
)
def test_both_accountants_agree_on_the_best_of_secret_trials(events: list[Any]) -> None:
    for together in (events, [*events, SUMS]):
        by_curves = accountant.epsilon(together, target_delta=DELTA).epsilon
        # Tighter where the other one's grid of orders is coarse.
        assert 0.998 * by_curves < recomputed(*together) <= by_curves * (1 + 1e-4)


def test_trials_for_another_unit_than_they_claim_are_refused() -> None:
    (event,) = told(*OF_TRIALS[0])
    inner = [[event["trials"][0][0] | {"unit": "person"}]]
    with pytest.raises(ValueError, match="VoteSums is for"):
        recomputed_epsilon([event | {"trials": inner}], delta=DELTA)
    with pytest.raises(NotRecomputedError, match="inside of SecretTrials"):
        recomputed_epsilon([event | {"trials": [[event]]}], delta=DELTA)


def test_every_kind_of_event_is_recomputed_and_tested_or_said_not_to_be() -> None:
    stated = {name for name, kind in event_kinds().items() if kind.__module__.startswith("fairpate.")}
    stated = {name for name in stated if not event_kinds()[name].data_dependent}
    assert stated - NOT_RECOMPUTED == set(KINDS)
    assert set(KINDS) == {type(event).__name__ for events in ALL for event in events}


@pytest.mark.parametrize("events", ALL, ids=lambda events: type(events[-1]).__name__)
def test_both_accountants_mean_the_same_unit_and_relation(events: list[Any]) -> None:
    for event, values in zip(events, told(*events), strict=True):
        assert guarantee_of(values) == (event.unit, event.relation)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Balle and Wang 2018, Theorem 8: two unit Gaussians that lie mu apart."""
    return brentq(
        lambda e: ndtr(mu / 2 - e / mu) - math.exp(e + log_ndtr(-mu / 2 - e / mu)) - delta, 0, mu**2 / 2 + 20 * mu
    )


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
@pytest.mark.parametrize(("count", "multiplier"), [(1, 5.0), (1, 0.5), (10_000, 100.0)])
def test_gaussians_against_their_closed_form(count: int, multiplier: float, delta: float) -> None:
    event = PoissonGaussians(count=count, noise_multiplier=multiplier, sampling_rate=1.0)
    expected = gaussian_epsilon(math.sqrt(count) / multiplier, delta)
    assert recomputed(event, delta=delta) == pytest.approx(expected, rel=3e-4)


def test_teachers_votes_are_gaussians_of_their_moves() -> None:
    """A check moves one count, an argmax two; with as much noise whole numbers are as good as real ones."""
    mu = math.sqrt(350 * (1 / 40**2 + 2 / 15**2))
    assert recomputed(QUERIES) == pytest.approx(gaussian_epsilon(mu, DELTA), rel=3e-4)


def test_pure_releases_against_hand_arithmetic() -> None:
    """Of k answers all are true with probability p^k; delta is what exceeds e^epsilon times the other way round."""
    p = math.e / (1 + math.e)
    for delta in (0.01, 0.3):
        # Two releases of epsilon 1: losses 2, 0, -2 with masses p^2, 2 p (1 - p), (1 - p)^2.
        expected = math.log((p**2 - delta) / (1 - p) ** 2)
        assert recomputed(PureReleases(count=2, epsilon=1.0), delta=delta) == pytest.approx(expected, rel=1e-3)
    assert recomputed(PureReleases(count=1, epsilon=3.0), LaplaceReleases(count=2, epsilon=0.5), delta=1e-9) <= 4


def test_a_release_of_smooth_sensitivity_costs_the_largest_divergence_that_quadrature_finds() -> None:
    event, order = SmoothRelease(order=3.0, beta=0.05, noise_stddev=2.0), 3.0
    x = np.linspace(-60, 60, 400_001)
    found = []
    for exponent in np.linspace(-0.05, 0.05, 21):
        ratio = math.exp(exponent)
        first, second = (
            -((x - centre) ** 2) / (2 * stddev**2) - math.log(stddev * math.sqrt(2 * math.pi))
            for centre, stddev in ((0.0, 2.0), (min(1.0, ratio), 2.0 * ratio))
        )
        moment = np.exp(order * first + (1 - order) * second).sum() * (x[1] - x[0])
        found.append(math.log(moment) / (order - 1))
    curve = second_accountant._smooth_curve(event_json(event), np.array([order]))
    assert curve == pytest.approx(max(found), rel=1e-6)


def test_what_has_no_noise_has_no_epsilon() -> None:
    for event in (
        PoissonGaussians(count=1, noise_multiplier=0.0, sampling_rate=0.5),
        VoteSums(count=1, noise_stddev_votes=3.0),
        ThresholdChecks(count=1, threshold_stddev_votes=0.0),
        NeighbourVotes(count=1, noise_stddev_votes=5.0, threshold_stddev_votes=0.0),
        PureReleases(count=1, epsilon=math.inf),
    ):
        assert recomputed(event) == math.inf
    assert recomputed(NoisyArgmaxes(count=0, noise_stddev_votes=0.0)) == 0
    shut = ConfidentGnmaxQueries(count=5, threshold=math.inf, threshold_stddev_votes=0.0, noise_stddev_votes=0.0)
    assert recomputed(shut) == 0


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"kind": "NoisySums", "count": 2}, "NoisySums"),
        ({"count": 2}, "None"),
        ({"kind": "PartOfUnit", "whole": {}}, "PartOfUnit"),
        (told(VoteTables(count=1, noise_stddev_votes=1e7))[0], "above 1e"),
    ],
)
def test_what_it_does_not_know_it_does_not_price(event: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotRecomputedError, match=reason):
        recomputed_epsilon([event], delta=DELTA)


def test_values_that_mean_nothing_are_errors() -> None:
    event = told(PoissonGaussians(count=1, noise_multiplier=1.0, sampling_rate=0.5))[0]
    for wrong in ({"count": -1}, {"count": 1.5}, {"sampling_rate": 0}, {"sampling_rate": 2}, {"noise_multiplier": "x"}):
        with pytest.raises(ValueError):
            recomputed_epsilon([event | wrong], delta=DELTA)
    with pytest.raises(NotRecomputedError, match="delta"):
        recomputed_epsilon([event], delta=1e-12)


@pytest.mark.parametrize("module", [second_accountant, second_accountant])
def test_it_shares_nothing_with_the_accountant_that_prices_runs(module: Any) -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    named = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    ours = {name for name in named if str(name).split(".")[0] in ("fairpate", "aggregator", "dp_accounting")}
    assert ours <= {"fairpate.privacy.second_accountant"}
