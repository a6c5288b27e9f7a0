"""Empirical epsilon of a release that is cheap to repeat, beside the epsilon that the accountant claims for it.

    OMP_NUM_THREADS=1 python benchmarks/audit_releases.py [--games 10000000] [--runs 5]

Two data sets, with and without one canary where it is seen best, are released over and over by the code that runs use,
with noise of the operating system's entropy; the best threshold on what the canary moves gives a lower bound with 95 %
confidence (:func:`fairpate.privacy.audit.epsilon_of_best_threshold`). Every audit is repeated with half the noise under
the same claim, which it must refute: that is what shows that it could fail.

- ``one vote``: a canary alone in its cell of a table of votes. Cells have noise of their own, so that every prototype
  of one table is a game.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import numpy.typing as npt

from fairpate.methods.record_votes import noisy_votes
from fairpate.privacy.accountant import Event, epsilon_of
from fairpate.privacy.audit import epsilon_of_best_threshold
from fairpate.privacy.calibration import least_noise
from fairpate.privacy.discrete_gaussian import OsEntropy
from fairpate.privacy.record_votes import VoteTables

DELTA, BROKEN = 1e-5, 0.5
_PROTOTYPES = 100_000
Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """``release(is_in, noise_factor, games)`` scores releases under ``noise_factor`` of what ``event`` claims."""

    name: str
    event: Event
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


def one_vote_audit(target: float) -> Audit:
    """The noise that ``target`` needs."""
    stddev = least_noise(
        lambda noise: [VoteTables(count=1, noise_stddev_votes=noise)],
        target_epsilon=target,
        target_delta=DELTA,
        accounting="pld",
    )
    event = VoteTables(count=1, noise_stddev_votes=stddev)
    return Audit(name=f"one vote, stddev {stddev:.2f}", event=event, release=partial(one_vote, stddev=stddev))


def row(audit: Audit, *, games: int, runs: int) -> str:
    """Claim, then median, largest and number above the claim, at the stated noise and at half of it."""
    claimed = epsilon_of([audit.event], target_delta=DELTA, accounting="pld")
    cells = [f"{audit.name:<24} | {claimed:.3f}"]
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
    options = parser.parse_args()
    print(f"audit | claimed at delta {DELTA:g} | median | largest | above | the same with half the noise")
    for audit in [one_vote_audit(target) for target in (0.1, 0.3, 1.0, 4.0)]:
        print(row(audit, games=options.games, runs=options.runs), flush=True)


if __name__ == "__main__":
    main()
