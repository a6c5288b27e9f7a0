"""GNMax, Confident-GNMax and Confident&Fair-GNMax: one noisy vote, exactly.

GNMax releases the class with the most votes after noise (Papernot et al. 2018, arXiv 1802.08908); Confident-GNMax
first checks, with noise of its own, that the most votes reach a threshold (their Algorithm 1); CF-GNMax then asks
the demographic-parity gate (FairPATE, arXiv 2302.09183, Algorithm 1). Votes are integers, so the noise is discrete
Gaussian and its sampling exact. The mechanism knows no budget: it says which steps it ran, and the ledger charges.

Shapes: C classes; ``votes_C[k]`` counts the teachers that chose class k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fairpate.fairness.gate import DemographicParityGate
from fairpate.privacy.discrete_gaussian import RandomSource, sample_discrete_gaussian
from fairpate.types import MechanismParameters

Verdict = Literal["answer", "confidence", "fairness", "free"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a query: an ``answer`` with its label, or the step that refused it (``free``: before the vote).

    ``label`` is None for every refusal: the noisy argmax that the gate rejected is forgotten, not its cost.
    """

    verdict: Verdict
    label: int | None = None

    def __post_init__(self) -> None:
        if (self.verdict == "answer") != (self.label is not None):
            raise ValueError(f"Expected a label for an answer and for nothing else, got {self.verdict}, {self.label}.")

    @property
    def is_charged(self) -> bool:
        """Whether private votes were touched."""
        return self.verdict != "free"


def is_confident(votes_C: npt.NDArray[np.int64], *, parameters: MechanismParameters, source: RandomSource) -> bool:
    """Whether the most votes, plus noise, reach the threshold."""
    noise = sample_discrete_gaussian(parameters.threshold_stddev_votes, source)
    return int(votes_C.max()) + noise >= parameters.threshold


def gnmax(votes_C: npt.NDArray[np.int64], *, noise_stddev_votes: float, source: RandomSource) -> int:
    """The class with the most votes after independent noise on every count; ties are broken uniformly."""
    noisy_C = [int(votes) + sample_discrete_gaussian(noise_stddev_votes, source) for votes in votes_C]
    most = max(noisy_C)
    leaders = [label for label, votes in enumerate(noisy_C) if votes == most]
    return leaders[0] if len(leaders) == 1 else leaders[source.randbelow(len(leaders))]


def confident_gnmax(
    votes_C: npt.NDArray[np.int64], *, parameters: MechanismParameters, source: RandomSource
) -> int | None:
    """A label when the noisy threshold check passes, else None. The two noises are independent."""
    if not is_confident(votes_C, parameters=parameters, source=source):
        return None
    return gnmax(votes_C, noise_stddev_votes=parameters.noise_stddev_votes, source=source)


def confident_fair_gnmax(
    votes_C: npt.NDArray[np.int64],
    *,
    group: int,
    gate: DemographicParityGate,
    parameters: MechanismParameters,
    source: RandomSource,
) -> Outcome:
    """One query of CF-GNMax; an answer is counted in ``gate``.

    A ``free`` refusal comes first, from public counts alone, when the gate would reject every label for ``group``.
    A ``fairness`` refusal comes after the noisy argmax and therefore costs what an answer costs.
    """
    if not gate.accepts_any(group):
        return Outcome(verdict="free")
    label = confident_gnmax(_checked(votes_C), parameters=parameters, source=source)
    if label is None:
        return Outcome(verdict="confidence")
    if not gate.offer(group, label).accepted:
        return Outcome(verdict="fairness")
    return Outcome(verdict="answer", label=label)


def _checked(votes_C: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if votes_C.ndim != 1 or len(votes_C) < 2 or not np.issubdtype(votes_C.dtype, np.integer):
        raise ValueError(f"Expected integer votes for at least two classes, got {votes_C.dtype} of {votes_C.shape}.")
    if votes_C.min() < 0 or not math.isfinite(votes_C.sum()):
        raise ValueError("Expected votes >= 0.")
    return votes_C
