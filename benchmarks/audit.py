"""Empirical epsilon of one training, or one batch of votes, beside the epsilon that the accountant claims for it.

    python benchmarks/audit.py [--runs 20]

One-run canary audits (:mod:`fairpate.privacy.audit`) at 95 % confidence. Every run draws fresh coins and fresh noise
and gives one lower bound; the table shows the median and the largest of all runs, and how many exceed the claim: at
most one in twenty may. Each audit is repeated with a tenth of the noise under the same claim: a strong attacker then
refutes it.

- ``directions``: DP-SGD where canary i's gradient is the i-th unit vector, so that the final weights hold, for every
  canary, the sum of its own steps. The strongest attacker here.
- ``wrong labels``: DP-SGD on handwritten digits, canaries are digits with a random wrong label, and the score is the
  final loss. All that a user of the model could see.
- ``votes``: GNMax on ties that a canary's vote breaks. A canary is one teacher's record and decides that teacher's vote
  on ``queries_each`` queries of its own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from aggregator.mechanism import ConfidentGnmax
from fairpate.config import ModelConfig
from fairpate.nn.models import build_model
from fairpate.nn.per_example import CrossEntropy
from fairpate.nn.private_fit import PrivateSteps, PrivateTraining, SeededRandomness
from fairpate.privacy.accountant import Event, NoisyArgmaxes, PoissonGaussians, epsilon, noise_multiplier_for
from fairpate.privacy.audit import Guesses, epsilon_lower_bound, guess
from fairpate.privacy.discrete_gaussian import SeededSource

DELTA, BROKEN = 1e-5, 0.1
Run = Callable[[int, float], Guesses]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """``run(seed, noise_factor)`` guesses once, under a noise that is ``noise_factor`` of what ``events`` claim."""

    name: str
    events: tuple[Event, ...]
    run: Run


def directions(
    seed: int, noise_factor: float, *, num_canaries: int, steps: PrivateSteps, share_guessed: float
) -> Guesses:
    """One linear score per canary: its gradient is minus its record, and no other record moves its weight."""
    rng = np.random.default_rng(seed)
    included = rng.random(num_canaries) < 0.5
    model = nn.Linear(num_canaries, 1, bias=False)
    nn.init.zeros_(model.weight)
    records = steps.clip_norm * torch.eye(num_canaries)[torch.from_numpy(included)]
    PrivateTraining(
        model,
        records,
        torch.zeros(len(records), dtype=torch.long),
        lambda outputs, _: -outputs[:, 0],
        _with_noise(steps, noise_factor),
        randomness=SeededRandomness(seed),
    ).run()
    return _guess_ends(model.weight.detach()[0].numpy(), included, share_guessed)


def wrong_labels(
    seed: int, noise_factor: float, *, num_canaries: int, steps: PrivateSteps, share_guessed: float
) -> Guesses:
    """Canaries are shuffled into true records; a low loss on its wrong label says that a canary was in."""
    rng = np.random.default_rng(seed)
    x, y = _digits()
    order = torch.from_numpy(rng.permutation(len(x)))
    x, y = x[order], y[order]
    wrong = (y[:num_canaries] + torch.from_numpy(rng.integers(1, 10, num_canaries))) % 10
    included = rng.random(num_canaries) < 0.5
    kept = torch.from_numpy(np.concatenate([included, np.ones(len(x) - num_canaries, dtype=bool)]))
    labels = torch.cat([wrong, y[num_canaries:]])
    model = build_model(ModelConfig(name="mlp", hidden=(64,)), input_shape=(64,), num_classes=10, generator_seed=seed)
    PrivateTraining(
        model,
        x[kept],
        labels[kept],
        CrossEntropy(),
        _with_noise(steps, noise_factor),
        randomness=SeededRandomness(seed),
    ).run()
    with torch.no_grad():
        losses = CrossEntropy()(model(x[:num_canaries]), wrong)
    return _guess_ends(-losses.numpy(), included, share_guessed)


def votes(
    seed: int,
    noise_factor: float,
    *,
    num_canaries: int,
    queries_each: int,
    noise_stddev_votes: float,
    share_guessed: float,
) -> Guesses:
    """The record turns its teacher's vote from class 1 to class 0, on queries where all others are tied."""
    included = np.random.default_rng(seed).random(num_canaries) < 0.5
    votes_QC = np.repeat([[50 + is_in, 51 - is_in] for is_in in included.astype(int)], queries_each, axis=0)
    noise = ConfidentGnmax(
        threshold=-math.inf, threshold_stddev_votes=1.0, noise_stddev_votes=noise_factor * noise_stddev_votes
    )
    keys = [str(query) for query in range(len(votes_QC))]
    labels_Q = np.array(noise.labels(votes_QC, keys=keys, source=SeededSource(seed)))
    scores = (labels_Q.reshape(num_canaries, queries_each) == 0).sum(axis=1)
    return _guess_ends(scores.astype(float), included, share_guessed)


def _guess_ends(scores: np.ndarray[Any, np.dtype[np.float64]], included: Any, share_guessed: float) -> Guesses:
    each = round(share_guessed * len(scores) / 2)
    return guess(scores, included, num_guessed_in=each, num_guessed_out=each)


def _with_noise(steps: PrivateSteps, noise_factor: float) -> PrivateSteps:
    return PrivateSteps(**vars(steps) | {"noise_multiplier": noise_factor * steps.noise_multiplier})


def _digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target).long()


def dp_sgd_audit(name: str, run: Callable[..., Guesses], target_epsilon: float, **settings: Any) -> Audit:
    """The noise that ``target_epsilon`` needs, and the event that such a training reports."""
    shape = {"sampling_rate": settings.pop("sampling_rate"), "num_steps": settings.pop("num_steps")}
    noise = noise_multiplier_for(target_epsilon=target_epsilon, target_delta=DELTA, **shape)
    steps = PrivateSteps(noise_multiplier=noise, clip_norm=1.0, **shape, **settings.pop("training"))
    event = PoissonGaussians(count=steps.num_steps, noise_multiplier=noise, sampling_rate=steps.sampling_rate)
    return Audit(name=f"{name}, {target_epsilon:g}", events=(event,), run=partial(run, steps=steps, **settings))


def vote_audit(*, queries_each: int, noise_stddev_votes: float) -> Audit:
    """One canary's record meets its own queries only, so the others' cost it nothing."""
    settings: dict[str, Any] = {"queries_each": queries_each, "noise_stddev_votes": noise_stddev_votes}
    event = NoisyArgmaxes(count=queries_each, noise_stddev_votes=noise_stddev_votes)
    run = partial(votes, num_canaries=1000, share_guessed=0.2, **settings)
    return Audit(name=f"votes, {queries_each} queries, stddev {noise_stddev_votes:g}", events=(event,), run=run)


def campaign() -> list[Audit]:
    """Every audit of the table."""
    linear = {"training": {"expected_batch_size": 1.0, "learning_rate": 1.0}, "share_guessed": 0.15}
    digits = {"training": {"expected_batch_size": 260.0, "learning_rate": 8.0}, "share_guessed": 0.1}
    return [
        *(
            dp_sgd_audit("directions", directions, target, num_canaries=2000, sampling_rate=0.5, num_steps=10, **linear)
            for target in (1.0, 2.0, 4.0)
        ),
        *(
            dp_sgd_audit(
                "wrong labels", wrong_labels, target, num_canaries=1000, sampling_rate=0.2, num_steps=400, **digits
            )
            for target in (2.0, 8.0)
        ),
        vote_audit(queries_each=1, noise_stddev_votes=4.0),
        vote_audit(queries_each=10, noise_stddev_votes=8.0),
    ]


def row(audit: Audit, runs: int) -> str:
    """Claim, then median, largest and number above the claim, at the stated noise and at a tenth of it."""
    claimed = epsilon(audit.events, target_delta=DELTA).epsilon
    cells = [f"{audit.name:<32} | {claimed:.2f}"]
    for factor in (1.0, BROKEN):
        bounds = [epsilon_lower_bound(audit.run(seed, factor), delta=DELTA) for seed in range(runs)]
        above = sum(bound > claimed for bound in bounds)
        cells.append(f"{median(bounds):.2f} | {max(bounds):.2f} | {above} of {runs}")
    return " | ".join(cells)


def main() -> None:
    """Print one row per audit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"audit | claimed at delta {DELTA:g} | median | largest | above | the same with a tenth of the noise")
    for audit in campaign():
        print(row(audit, options.runs), flush=True)


if __name__ == "__main__":
    main()
