"""Empirical epsilon of a release that is cheap to repeat, beside the epsilon that the accountant claims for it.

    OMP_NUM_THREADS=1 python benchmarks/audit_releases.py [--games 10000000] [--runs 5] [--only neighbours]

Two data sets, with and without one canary where it is seen best, are released over and over by the code that runs use,
with noise of the operating system's entropy; the best threshold on what the canary moves gives a lower bound with 95 %
confidence (:func:`fairpate.privacy.audit.epsilon_of_best_threshold`). Every audit is repeated with half the noise under
the same claim, which it must refute: that is what shows that it could fail.

- ``one vote``: a canary alone in its cell of a table of votes. Cells have noise of their own, so that every prototype
  of one table is a game.
- ``weighted vote``: a canary of full norm, alone in its label's row of sums; the score is the row's product with what
  it added. Every row of one table is a game, one in forty of those above: noise so wide is drawn one by one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from aggregator.mechanism import NearestCounts
from fairpate.config import EmbeddingConfig
from fairpate.data import Dataset
from fairpate.data.dataset import Split
from fairpate.data.embedding import Embedding
from fairpate.fairness.gate import DemographicParityGate
from fairpate.methods.ada_ssp import AdaSsp, events_of, least_eigenvalue
from fairpate.methods.base import ReleasingMethod, Training
from fairpate.methods.record_votes import UNITS, WeightedBallot, noisy_votes, with_noise
from fairpate.methods.residual_votes import (
    RecordSums,
    ResidualVotes,
    ResidualVotesConfig,
    residuals,
    symmetric_noise,
    whole_rule,
)
from fairpate.privacy.accountant import Event, epsilon_of, least_noise
from fairpate.privacy.audit import epsilon_of_best_threshold
from fairpate.privacy.discrete_gaussian import OsEntropy
from fairpate.privacy.mechanism_events import MomentSums, NeighbourVotes, VoteSums, VoteTables
from fairpate.run.context import RunDirectory
from fairpate.terminal import Reporter
from fairpate.types import GateRule, IntArray
from teachers.ensemble import BlockPool
from teachers.neighbours import Sampler, Voters, blocks_of
from teachers.ray_pool import LocalNeighbourhood

DELTA, BROKEN = 1e-5, 0.5
_PROTOTYPES, _ROWS, _ASKED, _OTHERS = 100_000, 2_000, 10_000, 40
_RESIDUAL_NORM = UNITS // 2 * UNITS
_PRIVATE: dict[str, Any] = {"curvature": "private"}
Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """``release(is_in, noise_factor, games)`` scores releases under ``noise_factor`` of what ``events`` claim."""

    name: str
    events: Sequence[Event]
    release: Callable[[bool, float, int], Scores]


def one_vote(is_in: bool, noise_factor: float, games: int, *, stddev: float) -> Scores:
    """The count of the canary's cell; the rest of the table has noise alone."""
    canary_N = np.arange(_PROTOTYPES if is_in else 0)
    tables = [
        noisy_votes(
            canary_N,
            np.zeros_like(canary_N),
            shape=(_PROTOTYPES, 2),
            stddev=noise_factor * stddev,
            source=OsEntropy(),
        )
        for _ in range(-(-games // _PROTOTYPES))
    ]
    return np.concatenate([table_KC[:, 0] for table_KC in tables]).astype(np.float64)


def weighted_vote(is_in: bool, noise_factor: float, games: int, *, stddev: float) -> Scores:
    """How far the row of the canary's label points where the canary does; ``stddev`` in units of its norm."""
    ballot = WeightedBallot(embedding=None, radius=1.0)
    far_N = torch.full((_ROWS if is_in else 0, 1), 10.0)
    table_CW = ballot.table(far_N, np.arange(len(far_N)), num_classes=_ROWS)
    direction_W = ballot.votes(torch.full((1, 1), 10.0))[0] / UNITS
    scores = []
    for _ in range(-(-games // (40 * _ROWS))):
        noisy_CW = with_noise(table_CW, stddev=noise_factor * stddev * UNITS, source=OsEntropy(), row="class")
        scores.append(noisy_CW @ direction_W)
    return np.concatenate(scores)


def residual(is_in: bool, noise_factor: float, games: int, *, stddev: float) -> Scores:
    """How far a noisy sum of residuals points where the canary's does; ``stddev`` in units of the bound."""
    phi_1W = WeightedBallot(embedding=None, radius=1.0).votes(torch.full((1, 1), 10.0))
    left = partial(residuals, rule_CW=whole_rule(np.array([[0.0, 0.0], [30.0, 30.0]])), bound=UNITS // 2)

    def exact_CW(num_canaries: int) -> IntArray:
        records = RecordSums(
            phi_NW=phi_1W[:num_canaries],
            labels_N=np.zeros(num_canaries, dtype=np.int64),
            person_N=None,
            pool=BlockPool(),
        )
        return records.total(left, norm=_RESIDUAL_NORM)

    tables_RW = np.tile(exact_CW(int(is_in)), (-(-games // 40), 1))
    noisy_RW = with_noise(tables_RW, stddev=noise_factor * stddev * _RESIDUAL_NORM, source=OsEntropy(), row="class")
    return noisy_RW.reshape(-1, 4) @ (exact_CW(1).ravel() / _RESIDUAL_NORM)


def second_moments(is_in: bool, noise_factor: float, games: int, *, stddev: float) -> Scores:
    """How far noisy second moments point where the canary's do; ``stddev`` in units of their norm."""
    phi_W = np.full(2, math.isqrt(UNITS**2 // 2))
    exact_WW = np.outer(phi_W, phi_W)
    source, noise = OsEntropy(), noise_factor * stddev * UNITS**2
    noises_RWW = [symmetric_noise(2, noise, source.derive(game)) for game in range(-(-games // 40))]
    return np.reshape(np.stack(noises_RWW) + is_in * exact_WW, (-1, 4)) @ (exact_WW.ravel() / UNITS**2)


class ResidualVotesAt(ResidualVotes):
    """Residual votes under a given noise multiplier instead of the one that a target needs."""

    noise_multiplier: float = 1.0

    def multiplier(self) -> float:
        return self.noise_multiplier


class AdaSspAt(AdaSsp):
    """AdaSSP under a given noise multiplier instead of the one that a target needs."""

    noise_multiplier: float = 1.0

    def events(self) -> tuple[VoteSums, MomentSums, VoteSums]:
        return events_of(self.noise_multiplier)


Gains = dict[str, tuple[IntArray, IntArray, float]]
"""By released array: its exact value without the canary, what the canary adds, and the noise's standard deviation."""


def all_of_residual_votes(is_in: bool, noise_factor: float, games: int, *, stddev: float) -> Scores:
    """The canary is the only record: its residual is then nearly always as long as may be."""
    method = ResidualVotesAt(noise_multiplier=noise_factor * stddev, residual_votes=_PRIVATE)
    dataset = of_one_column([], is_in=is_in)
    phi_W = WeightedBallot.of(dataset, method.residual_votes.embedding).votes(torch.tensor([[10.0]]))[0]
    label_C, residual_C = np.array([1, 0]), np.array([1, -1]) * math.isqrt(method.residual_votes.bound**2 // 2)
    sums, moments, step = _residual_events(stddev)
    added = {
        "sums_CW": (np.outer(label_C, phi_W), sums),
        "moments_WW": (np.outer(phi_W, phi_W), moments),
        "residuals_RCW": (np.outer(residual_C, phi_W), step),
    }
    nothing = np.zeros((2, 2), dtype=np.int64)
    gains = {name: (nothing, gain, event.noise_stddev_votes) for name, (gain, event) in added.items()}
    return measured(method, dataset, gains, games)


def all_of_ada_ssp(is_in: bool, noise_factor: float, games: int, *, stddev: float) -> Scores:
    """Without the canary the other records leave one direction empty: it moves the least eigenvalue as well."""
    method = AdaSspAt(noise_multiplier=noise_factor * stddev)
    dataset = of_one_column([0.0] * _OTHERS, is_in=is_in)
    ballot = WeightedBallot.of(dataset, method.ada_ssp.embedding)
    phi_W, other_W = ballot.votes(torch.tensor([[10.0], [0.0]]))
    exact_WW, gain_WW = _OTHERS * np.outer(other_W, other_W), np.outer(phi_W, phi_W)
    least = least_eigenvalue(exact_WW)
    exact = {"sums_CW": _OTHERS * np.outer([0, 1], other_W), "moments_WW": exact_WW, "eigenvalue_11": least}
    gain = {
        "sums_CW": np.outer([1, 0], phi_W),
        "moments_WW": gain_WW,
        "eigenvalue_11": least_eigenvalue(exact_WW + gain_WW) - least,
    }
    stddevs = [event.noise_stddev_votes for event in events_of(stddev)]
    gains = {name: (exact[name], gain[name], noise) for name, noise in zip(exact, stddevs, strict=True)}
    return measured(method, dataset, gains, games)


def of_one_column(others: list[float], *, is_in: bool) -> Dataset:
    """Private records of label 1 with these values, and perhaps a canary of label 0 with a large one."""

    def split(values: list[float], labels: list[int]) -> Split:
        x, y = torch.tensor(values).reshape(-1, 1), torch.tensor(labels, dtype=torch.int64)
        return Split(x=x, y=y, z=torch.zeros_like(y), record_id=[str(number) for number in range(len(y))])

    public = split([-1.0, -1.0, 1.0, 1.0], [0, 1, 0, 1])
    return Dataset(
        name="one column",
        kind="tabular",
        private=split([*others, *[10.0] * is_in], [1] * len(others) + [0] * is_in),
        public=public,
        validation=public,
        test=public,
        label_names=("canary", "other"),
        group_names=("all",),
        sensitive_attribute="group",
        embedding=Embedding.of(public.x, EmbeddingConfig()),  # as if made: votes are of the column itself
    )


def measured(method: ReleasingMethod, dataset: Dataset, gains: Gains, games: int) -> Scores:
    """The scores of that many hundredths of games, each with all releases of the method."""
    run, reporter = RunDirectory(root=Path()), Reporter(quiet=True)
    training = Training(dataset=dataset, model=nn.Identity(), run=run, reporter=reporter, seed=0)

    def score() -> float:
        arrays = method.measure(training).arrays
        return sum(
            float(((arrays[name] - exact) * (gain / stddev**2)).sum()) for name, (exact, gain, stddev) in gains.items()
        )

    return np.array([score() for _ in range(-(-games // 100))])


def neighbours(
    is_in: bool, noise_factor: float, games: int, *, stddev: float, sampling_rate: float, queries: int
) -> Scores:
    """How much more likely noisy counts are with the canary than without, over all queries of a game."""
    found = LocalNeighbourhood(list(around_the_query(is_in=is_in)), count=1, sampler=Sampler(sampling_rate))
    mechanism = NearestCounts(
        sampling_rate=sampling_rate,
        num_neighbours=1,
        threshold=-math.inf,
        threshold_stddev_votes=stddev,
        noise_stddev_votes=noise_factor * stddev,
    )
    answered = -(-games // 40) * queries
    shown_Q2 = np.concatenate([noisy_counts(mechanism, found, _ASKED) for _ in range(-(-answered // _ASKED))])
    difference_Q = (shown_Q2[:, 1] - shown_Q2[:, 0]).astype(np.float64)
    # Two counts move by one: the loss of a sampled record is the difference over the variance.
    ratio_Q = np.log1p(sampling_rate * np.expm1(difference_Q / stddev**2))
    losses: npt.NDArray[np.float64] = ratio_Q[:answered].reshape(-1, queries).sum(axis=1)
    return losses


def around_the_query(*, is_in: bool) -> Iterator[Voters]:
    """Records at distance one of label 0, so many that a sample has some, and perhaps the canary."""
    place_N, label_N = [1] * _OTHERS + [0] * is_in, [0] * _OTHERS + [1] * is_in
    names = [str(number) for number in range(len(place_N))]
    return blocks_of(np.array(place_N, dtype=np.int32)[:, None], np.array(label_N), names, key=bytes(32))


def noisy_counts(mechanism: NearestCounts, found: LocalNeighbourhood, queries: int) -> IntArray:
    """What queries at one place are answered, each by a sample of its own."""
    names = [str(number) for number in range(queries)]
    votes_Q2 = found.nearest(np.zeros((queries, 1), dtype=np.int32), names).counts(2)
    no_gate = DemographicParityGate(GateRule(max_disparity=math.inf, min_count=1), num_groups=1, num_classes=2)
    outcomes = mechanism.answer(votes_Q2, groups=[0] * queries, keys=names, gate=no_gate, source=OsEntropy())
    return np.array([outcome.counts for outcome in outcomes], dtype=np.int64)


def audit_of(
    name: str, target: float, events: Callable[[float], Sequence[Event]], release: Callable[..., Scores]
) -> Audit:
    """At the noise that ``target`` needs."""
    stddev = least_noise(events, target_epsilon=target, target_delta=DELTA, accounting="pld")
    return Audit(name=f"{name}, {stddev:.2f}", events=events(stddev), release=partial(release, stddev=stddev))


def campaign() -> list[Audit]:
    """Every audit of the table."""
    return [
        *(audit_of("one vote", target, _one, one_vote) for target in (0.1, 0.3, 1.0, 4.0)),
        *(audit_of("weighted vote", target, _weighted, weighted_vote) for target in (1.0, 4.0)),
        *(audit_of("residual", target, _residual, residual) for target in (1.0, 4.0)),
        *(audit_of("second moments", target, _moments, second_moments) for target in (1.0, 4.0)),
        audit_of("all of residual votes", 4.0, _residual_events, all_of_residual_votes),
        audit_of("all of AdaSSP", 4.0, events_of, all_of_ada_ssp),
        *(asked(target, rate, queries) for target, rate, queries in ((1.0, 0.5, 1), (2.0, 0.5, 1), (4.0, 0.5, 3))),
    ]


def asked(target: float, sampling_rate: float, queries: int) -> Audit:
    """Of so many queries of neighbours."""

    def events(noise: float) -> list[Event]:
        return [NeighbourVotes(count=queries, noise_stddev_votes=noise, sampling_rate=sampling_rate)]

    release = partial(neighbours, sampling_rate=sampling_rate, queries=queries)
    return audit_of(f"{queries} of neighbours at {sampling_rate:g}", target, events, release)


def _one(noise: float) -> list[Event]:
    return [VoteTables(count=1, noise_stddev_votes=noise)]


def _weighted(noise: float) -> list[Event]:
    return [VoteSums(count=1, noise_stddev_votes=noise * UNITS, norm=UNITS)]


def _residual(noise: float) -> list[Event]:
    return [VoteSums(count=1, noise_stddev_votes=noise * _RESIDUAL_NORM, norm=_RESIDUAL_NORM)]


def _moments(noise: float) -> list[Event]:
    return [MomentSums(count=1, noise_stddev_votes=noise * UNITS**2, norm=UNITS**2)]


def _residual_events(noise: float) -> tuple[VoteSums, ...]:
    return ResidualVotesConfig(**_PRIVATE).events(noise, "private")


def row(audit: Audit, *, games: int, runs: int) -> str:
    """Claim, then median, largest and number above the claim, at the stated noise and at half of it."""
    claimed = epsilon_of(audit.events, target_delta=DELTA, accounting="pld")
    cells = [f"{audit.name:<32} | {claimed:.3f}"]
    for factor in (1.0, BROKEN):
        bounds = [
            epsilon_of_best_threshold(
                audit.release(True, factor, games), audit.release(False, factor, games), delta=DELTA
            )
            for _ in range(runs)
        ]
        above = sum(bound > claimed for bound in bounds)
        cells.append(f"{median(bounds):.3f} | {max(bounds):.3f} | {above} of {runs}")
    return " | ".join(cells)


def main() -> None:
    """Print one row per audit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=10_000_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default="", help="audits whose name has this in it")
    options = parser.parse_args()
    print(f"audit | claimed at delta {DELTA:g} | median | largest | above | the same with half the noise")
    for audit in (audit for audit in campaign() if options.only in audit.name):
        print(row(audit, games=options.games, runs=options.runs), flush=True)


if __name__ == "__main__":
    main()
