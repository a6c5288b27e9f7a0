"""One-run canary audits of training and of voting: they stay below the claim, and catch noise that is too small."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

import numpy as np
import pytest
import torch
from torch import nn

from aggregator import mechanism
from aggregator.mechanism import ConfidentGnmax
from fairpate.nn import private_fit
from fairpate.nn.private_fit import PrivateSteps, PrivateTraining, SeededRandomness
from fairpate.privacy.accountant import NoisyArgmaxes, PoissonGaussians, epsilon, noise_multiplier_for
from fairpate.privacy.audit import Guesses, epsilon_lower_bound, guess
from fairpate.privacy.discrete_gaussian import SeededSource

DELTA, RUNS = 1e-5, 5
SAMPLED = {"sampling_rate": 0.5, "num_steps": 8}
NOISE_MULTIPLIER = noise_multiplier_for(target_epsilon=2.0, target_delta=DELTA, **SAMPLED)
TRAINING_CLAIM = epsilon(
    [PoissonGaussians(count=8, noise_multiplier=NOISE_MULTIPLIER, sampling_rate=0.5)], target_delta=DELTA
).epsilon
VOTING = {"count": 4, "noise_stddev_votes": 6.0}
VOTING_CLAIM = epsilon([NoisyArgmaxes(**VOTING)], target_delta=DELTA).epsilon


def guess_ends(scores: np.ndarray, included: np.ndarray, share: float) -> Guesses:
    each = round(share * len(scores) / 2)
    return guess(scores, included, num_guessed_in=each, num_guessed_out=each)


def train(seed: int) -> Guesses:
    """The gradient of canary i is minus the i-th unit vector, clipped as it stands: weight i moves for it alone."""
    count = 1500
    included = np.random.default_rng(seed).random(count) < 0.5
    model = nn.Linear(count, 1, bias=False)
    nn.init.zeros_(model.weight)
    records = torch.eye(count)[torch.from_numpy(included)]
    steps = PrivateSteps(
        expected_batch_size=1.0, clip_norm=1.0, noise_multiplier=NOISE_MULTIPLIER, learning_rate=1.0, **SAMPLED
    )
    PrivateTraining(
        model, records, torch.zeros(len(records)), lambda out, _: -out[:, 0], steps, randomness=SeededRandomness(seed)
    ).run()
    return guess_ends(model.weight.detach()[0].numpy(), included, 0.1)


def vote(seed: int) -> Guesses:
    """The record of canary i turns its teacher's vote, on queries where the other hundred are tied."""
    count, queries_each = 400, int(VOTING["count"])
    included = np.random.default_rng(seed).random(count) < 0.5
    votes_QC = np.repeat([[50 + is_in, 51 - is_in] for is_in in included.astype(int)], queries_each, axis=0)
    parameters = ConfidentGnmax(
        threshold=-math.inf, threshold_stddev_votes=1.0, noise_stddev_votes=VOTING["noise_stddev_votes"]
    )
    keys = [str(query) for query in range(len(votes_QC))]
    labels = parameters.labels(votes_QC, keys=keys, source=SeededSource(seed))
    scores = (np.array(labels).reshape(count, queries_each) == 0).sum(axis=1)
    return guess_ends(scores.astype(float), included, 0.2)


def bounds(run: Callable[[int], Guesses]) -> list[float]:
    return [epsilon_lower_bound(run(seed), delta=DELTA) for seed in range(RUNS)]


def test_training_stays_below_its_claim_and_gives_something_away() -> None:
    found = bounds(train)
    assert max(found) < TRAINING_CLAIM
    assert median(found) > 0.2 * TRAINING_CLAIM


def test_training_with_a_tenth_of_the_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = private_fit.GaussianNoise.add_to
    monkeypatch.setattr(
        private_fit.GaussianNoise, "add_to", lambda self, sums, stddev: honest(self, sums, 0.1 * stddev)
    )
    assert min(bounds(train)) > TRAINING_CLAIM


def test_voting_stays_below_its_claim_and_gives_something_away() -> None:
    found = bounds(vote)
    assert max(found) < VOTING_CLAIM
    assert median(found) > 0.1 * VOTING_CLAIM


def test_voting_with_a_tenth_of_the_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = mechanism.discrete_gaussians
    monkeypatch.setattr(
        mechanism, "discrete_gaussians", lambda stddev, words, source: honest(0.1 * stddev, words, source)
    )
    assert min(bounds(vote)) > VOTING_CLAIM
