"""GNMax, Confident-GNMax and Confident&Fair-GNMax: noisy votes, exactly.

GNMax releases the class with the most votes after noise (Papernot et al. 2018, arXiv 1802.08908); Confident-GNMax
first checks, with noise of its own, that the most votes reach a threshold (their Algorithm 1); CF-GNMax then asks
the demographic-parity gate (FairPATE, arXiv 2302.09183, Algorithm 1). Votes are integers, so the noise is discrete
Gaussian and its sampling exact. The mechanism knows no budget: it says which steps it ran, and the ledger charges.

Queries are drawn many at a time; each has noise of its own, found by its key, so that blocks change nothing.

Shapes: Q queries, C classes; ``votes_QC[i, k]`` counts the teachers that chose class k for query i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from fairpate.fairness.gate import DemographicParityGate
from fairpate.privacy.discrete_gaussian import NoiseSource, discrete_gaussian, discrete_gaussians
from fairpate.types import IntArray, MechanismParameters

Verdict = Literal["answer", "confidence", "fairness", "free"]
NOT_CONFIDENT = -1
"""Stands where Confident-GNMax gives no label."""


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


@lru_cache(maxsize=1024)
def outcome(verdict: Verdict, label: int | None = None) -> Outcome:
    """The :class:`Outcome` of these values: equal ones are one object."""
    return Outcome(verdict=verdict, label=label)


def confident_gnmax(
    votes_QC: IntArray, *, keys: Sequence[str], parameters: MechanismParameters, source: NoiseSource
) -> list[int]:
    """Labels of the queries whose noisy threshold check passes, else ``NOT_CONFIDENT``.

    ``votes_QC`` passes :func:`check_votes`. The noise of the check and of every count are independent; ties are broken
    uniformly. ``keys[i]`` finds the noise of query i.
    """
    words = source.words(keys, 1 + votes_QC.shape[1])
    if len(keys) < _FEW:
        return [
            _confident_gnmax_of_one(votes_C, key, words_C, parameters, source)
            for votes_C, key, words_C in zip(votes_QC.tolist(), keys, words.tolist(), strict=True)
        ]
    noise_Q = discrete_gaussians(parameters.threshold_stddev_votes, words[:, 0], source)
    (confident,) = (votes_QC.max(axis=1) + noise_Q >= parameters.threshold).nonzero()
    noise_QC = discrete_gaussians(parameters.noise_stddev_votes, words[confident, 1:], source)
    labels_Q = np.full(len(keys), NOT_CONFIDENT, dtype=np.int64)
    labels_Q[confident] = _argmax(votes_QC[confident] + noise_QC, [keys[i] for i in confident.tolist()], source)
    labels: list[int] = labels_Q.tolist()
    return labels


_FEW = 8  # fewer queries are faster one by one


def _confident_gnmax_of_one(
    votes_C: Sequence[int], key: str, words: Sequence[int], parameters: MechanismParameters, source: NoiseSource
) -> int:
    """The same for one query, from the same words to the same label."""
    noise = discrete_gaussian(parameters.threshold_stddev_votes, words[0], source)
    if max(votes_C) + noise < parameters.threshold:
        return NOT_CONFIDENT
    stddev = parameters.noise_stddev_votes
    noisy_C = [votes + discrete_gaussian(stddev, word, source) for votes, word in zip(votes_C, words[1:], strict=True)]
    most = max(noisy_C)
    if noisy_C.count(most) == 1:
        return noisy_C.index(most)
    return _among([label for label, votes in enumerate(noisy_C) if votes == most], key, source)


def confident_fair_gnmax(
    votes_QC: IntArray,
    *,
    groups: Sequence[int],
    keys: Sequence[str],
    gate: DemographicParityGate,
    parameters: MechanismParameters,
    source: NoiseSource,
) -> list[Outcome]:
    """CF-GNMax on Q queries in order; answers are counted in ``gate``.

    A refusal is ``free`` when, from public counts alone, the gate would reject every label for the group; what was
    drawn for such a query is not looked at. A ``fairness`` refusal comes after the noisy argmax and therefore costs
    what an answer costs.
    """
    labels = confident_gnmax(votes_QC, keys=keys, parameters=parameters, source=source)
    return [_gated(gate, group, label) for group, label in zip(groups, labels, strict=True)]


def _gated(gate: DemographicParityGate, group: int, label: int) -> Outcome:
    # A label that the gate admits says already that it does not reject them all.
    if label != NOT_CONFIDENT and gate.admit(group, label):
        return outcome("answer", label)
    if not gate.accepts_any(group):
        return outcome("free")
    return outcome("confidence" if label == NOT_CONFIDENT else "fairness")


def _argmax(noisy_QC: IntArray, keys: Sequence[str], source: NoiseSource) -> IntArray:
    """The largest entry of each row, uniformly among equals."""
    labels_Q: IntArray = noisy_QC.argmax(axis=1)
    is_leader_QC = noisy_QC == noisy_QC.max(axis=1, keepdims=True)
    if np.count_nonzero(is_leader_QC) > len(noisy_QC):
        for row in (is_leader_QC.sum(axis=1) > 1).nonzero()[0].tolist():
            labels_Q[row] = _among(is_leader_QC[row].nonzero()[0].tolist(), keys[row], source)
    return labels_Q


def _among(leaders: Sequence[int], key: str, source: NoiseSource) -> int:
    return leaders[source.derive(key, "tie").randbelow(len(leaders))]


def check_votes(votes_QC: IntArray, *, num_teachers: int) -> bool:
    """Whether every teacher voted on every query. ValueError unless these are counts for at least two classes."""
    if votes_QC.ndim != 2 or votes_QC.shape[1] < 2 or votes_QC.dtype.kind != "i":
        raise ValueError(f"Expected integer votes for at least two classes, got {votes_QC.dtype} of {votes_QC.shape}.")
    if votes_QC.size and votes_QC.min() < 0:
        raise ValueError("Expected votes >= 0.")
    totals: list[int] = votes_QC.sum(axis=1).tolist()
    return totals.count(num_teachers) == len(totals)
