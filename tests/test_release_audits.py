"""Audits of releases that are repeated: the noisy table stays below its claim, and half its noise is caught.

The long version is benchmarks/audit_releases.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from audit_releases import _moments, _residual, audit_of, residual, second_moments

from aggregator.mechanism import NearestCounts
from fairpate.fairness.gate import DemographicParityGate
from fairpate.methods.record_votes import UNITS, WeightedBallot, noisy_votes, with_noise
from fairpate.privacy.accountant import Event, epsilon_of, least_noise
from fairpate.privacy.audit import epsilon_of_best_threshold
from fairpate.privacy.discrete_gaussian import SeededSource
from fairpate.privacy.mechanism_events import NeighbourVotes, VoteSums, VoteTables
from fairpate.types import GateRule
from teachers.neighbours import Sampler, blocks_of
from teachers.ray_pool import LocalNeighbourhood

DELTA, PROTOTYPES, ROWS = 1e-5, 60_000, 8_000
QUERIES, OTHERS, RATE = 15_000, 12, 0.5


def one_vote(stddev: float, *, is_in: bool, seed: int) -> np.ndarray:
    """A canary alone in its cell, once in every row of one table: rows have noise of their own."""
    canary_N = np.arange(PROTOTYPES if is_in else 0)
    table_KC = noisy_votes(
        canary_N, np.zeros_like(canary_N), shape=(PROTOTYPES, 1), stddev=stddev, source=SeededSource(seed)
    )
    return table_KC[:, 0].astype(float)


def one_weighted_vote(noise: float, *, is_in: bool, seed: int) -> np.ndarray:
    """A canary of full norm in every row of one table of sums; how far each row points where it does."""
    ballot = WeightedBallot(embedding=None, radius=1.0)
    vote_1W = ballot.votes(torch.full((1, 1), 10.0))
    assert np.linalg.norm(vote_1W) > 0.999 * UNITS
    sums_CW = np.repeat(vote_1W * is_in, ROWS, axis=0)
    noisy_CW = with_noise(sums_CW, stddev=noise * UNITS, source=SeededSource(seed), row="class")
    return noisy_CW @ vote_1W[0] / UNITS**2


def asked_neighbours(stddev: float, *, is_in: bool, seed: int) -> np.ndarray:
    """A canary where the query is, nearer than all others and of another label; the one nearest of a sample votes."""
    places, labels = [1] * OTHERS + [0] * is_in, [0] * OTHERS + [1] * is_in
    names = [str(number) for number in range(QUERIES)]
    blocks = blocks_of(np.array(places, np.int32)[:, None], np.array(labels), names[: len(labels)], key=bytes(32))
    found = LocalNeighbourhood(list(blocks), count=1, sampler=Sampler(RATE, seed))
    votes_Q2 = found.nearest(np.zeros((QUERIES, 1), dtype=np.int32), names).counts(2)
    outcomes = NearestCounts(
        sampling_rate=RATE,
        num_neighbours=1,
        threshold=-math.inf,
        threshold_stddev_votes=stddev,
        noise_stddev_votes=stddev,
    ).answer(
        votes_Q2,
        groups=[0] * QUERIES,
        keys=names,
        gate=DemographicParityGate(GateRule(max_disparity=math.inf, min_count=1), num_groups=1, num_classes=2),
        source=SeededSource(seed),
    )
    shown_Q2 = np.array([outcome.counts for outcome in outcomes])
    return (shown_Q2[:, 1] - shown_Q2[:, 0]).astype(float)


@pytest.mark.slow
def test_neighbours_stay_below_their_claim_and_half_the_noise_is_caught() -> None:
    target = 2.0

    def events(stddev: float) -> list[NeighbourVotes]:
        return [NeighbourVotes(count=1, noise_stddev_votes=stddev, sampling_rate=RATE)]

    stddev = least_noise(events, target_epsilon=target, target_delta=DELTA, accounting="pld")

    def bound(factor: float) -> float:
        scores = [asked_neighbours(factor * stddev, is_in=is_in, seed=int(is_in)) for is_in in (True, False)]
        return epsilon_of_best_threshold(*scores, delta=DELTA)

    right, broken = bound(1.0), bound(0.5)
    assert 0.1 * target < right < target < broken


def priced(noise: float, *, weighted: bool) -> list[VoteTables | VoteSums]:
    if weighted:
        return [VoteSums(count=1, noise_stddev_votes=noise * UNITS, norm=UNITS)]
    return [VoteTables(count=1, noise_stddev_votes=noise)]


@pytest.mark.parametrize(
    ("stddev", "release", "broken"),
    [  # of an epsilon of about 2, 1 and a half
        (2.01, one_vote, 0.5),
        (3.73, one_weighted_vote, 0.25),
        pytest.param(7.03, one_vote, 0.5, marks=pytest.mark.slow),  # wide noise is drawn slowly
    ],
)
def test_a_release_stays_below_its_claim_and_a_part_of_the_noise_is_caught(
    stddev: float, release: Callable[..., np.ndarray], broken: float
) -> None:
    claimed = epsilon_of(priced(stddev, weighted=release is one_weighted_vote), target_delta=DELTA, accounting="pld")

    def bound(factor: float) -> float:
        scores = [release(factor * stddev, is_in=is_in, seed=int(is_in)) for is_in in (True, False)]
        return epsilon_of_best_threshold(*scores, delta=DELTA)

    assert 0.1 * claimed < bound(1.0) < claimed
    assert bound(broken) > claimed


@pytest.mark.parametrize(
    ("name", "events", "release"),
    [("residual", _residual, residual), ("second moments", _moments, second_moments)],
)
def test_sums_of_later_rounds_stay_below_their_claim_and_a_quarter_of_the_noise_is_caught(
    name: str,
    events: Callable[[float], list[Event]],
    release: Callable[..., np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds = itertools.count()
    monkeypatch.setattr("audit_releases.OsEntropy", lambda: SeededSource(next(seeds)))
    audit = audit_of(name, 4.0, events, release)

    def bound(factor: float) -> float:
        scores = [audit.release(is_in, factor, 40 * 4000) for is_in in (True, False)]
        return epsilon_of_best_threshold(*scores, delta=DELTA)

    assert 0.8 < bound(1.0) < 4.0 < bound(0.25)
