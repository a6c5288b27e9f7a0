"""Audits of releases that are repeated: the noisy table stays below its claim, and half its noise is caught.

The long version is benchmarks/audit_releases.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from fairpate.methods.record_votes import noisy_votes
from fairpate.privacy.accountant import epsilon_of
from fairpate.privacy.audit import epsilon_of_best_threshold
from fairpate.privacy.calibration import least_noise
from fairpate.privacy.discrete_gaussian import SeededSource
from fairpate.privacy.record_votes import VoteTables

DELTA, PROTOTYPES = 1e-5, 150_000


def one_vote(stddev: float, *, is_in: bool, seed: int) -> np.ndarray:
    """A canary alone in its cell, once in every row of one table: rows have noise of their own."""
    canary_N = np.arange(PROTOTYPES if is_in else 0)
    table_KC = noisy_votes(
        canary_N, np.zeros_like(canary_N), shape=(PROTOTYPES, 1), stddev=stddev, source=SeededSource(seed)
    )
    return table_KC[:, 0].astype(float)


@pytest.mark.parametrize("target", [0.5, 2.0])
def test_one_vote_stays_below_its_claim_and_half_the_noise_is_caught(target: float) -> None:
    def events(noise: float) -> list[VoteTables]:
        return [VoteTables(count=1, noise_stddev_votes=noise)]

    stddev = least_noise(events, target_epsilon=target, target_delta=DELTA, accounting="pld")
    claimed = epsilon_of(events(stddev), target_delta=DELTA, accounting="pld")

    def bound(factor: float) -> float:
        scores = [one_vote(factor * stddev, is_in=is_in, seed=int(is_in)) for is_in in (True, False)]
        return epsilon_of_best_threshold(*scores, delta=DELTA)

    assert 0.3 * claimed < bound(1.0) < claimed
    assert bound(0.5) > claimed
