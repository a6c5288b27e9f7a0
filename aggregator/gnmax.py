"""Confident-GNMax: noisy votes, exactly.

GNMax releases the class with the most votes after noise (Papernot et al. 2018, arXiv 1802.08908); Confident-GNMax
first checks, with noise of its own, that the most votes reach a threshold (their Algorithm 1); with the
demographic-parity gate behind it, it is CF-GNMax (FairPATE, arXiv 2302.09183, Algorithm 1). Votes are integers, so the
noise is discrete Gaussian and its sampling exact.

Queries are drawn many at a time; each has noise of its own, found by its key, so that blocks change nothing.

Shapes: Q queries, C classes, A orders, K nodes of a quadrature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
import scipy

from aggregator.mechanism import NOT_CONFIDENT, FloatArray, Mechanism, Outcome, gated
from fairpate.fairness.gate import DemographicParityGate
from fairpate.privacy import gnmax, smooth_sensitivity
from fairpate.privacy.discrete_gaussian import NoiseSource, WordArray, discrete_gaussian, discrete_gaussians
from fairpate.privacy.events import ConfidentGnmaxQueries, ConfidentGnmaxVotes
from fairpate.privacy.ledger_as_in_paper import as_in_paper_rdp
from fairpate.privacy.smooth_release import SanitisedRdp, SmoothRelease
from fairpate.types import IntArray, MechanismParameters

_NODES_K, _WEIGHTS_K = np.polynomial.hermite_e.hermegauss(64)
# Weights for exp(-x^2 / 2), which integrates to sqrt(2 pi), become those of a standard normal.
_WEIGHTS_K = _WEIGHTS_K / _WEIGHTS_K.sum()
_FEW = 8  # fewer queries are faster one by one


@dataclass(frozen=True, kw_only=True)
class ConfidentVotes(MechanismParameters, Mechanism):
    """Votes behind a check of consensus: the draw, its worst case and its words, whatever is released of it."""

    def noisy_counts(self, votes_QC: IntArray, words: WordArray, source: NoiseSource) -> tuple[IntArray, IntArray]:
        """The rows whose noisy threshold check passes, and the noisy counts of those, shape (rows, C).

        The noise of the check and of every count are independent. Word 0 of each row of ``words`` is the check's, the
        others one per class: no draw shifts another, alone or in a block.
        """
        noise_Q = discrete_gaussians(self.threshold_stddev_votes, words[:, 0], source)
        (confident,) = (votes_QC.max(axis=1) + noise_Q >= self.threshold).nonzero()
        # Nothing is drawn for a query that failed the check; its price is that of both steps all the same.
        noise_QC = discrete_gaussians(self.noise_stddev_votes, words[confident, 1:], source)
        return confident, votes_QC[confident] + noise_QC

    def worst_case(self, num_queries: int) -> ConfidentGnmaxQueries:
        """Both steps for every query."""
        return ConfidentGnmaxQueries(count=num_queries, **self.parameters)

    def scaled(self, factor: float) -> Self:
        """Both noises multiplied; the threshold stays."""
        return replace(
            self,
            threshold_stddev_votes=factor * self.threshold_stddev_votes,
            noise_stddev_votes=factor * self.noise_stddev_votes,
        )

    def describe(self) -> str:
        """The check of consensus, or that there is none, and the noise of labels."""
        check = (
            "No check of consensus"
            if self.threshold == -math.inf
            else f"Threshold {self.threshold:g} votes, threshold noise σ₁ = {self.threshold_stddev_votes:g} votes"
        )
        return f"{check}, label noise σ₂ = {self.noise_stddev_votes:g} votes"

    def columns(self) -> dict[str, str]:
        """The symbols of the paper's algorithm; a check that never refuses has no noise to speak of."""
        has_check = math.isfinite(self.threshold)
        return {
            "T": f"{self.threshold:.0f}" if has_check else "none",
            "sigma1": f"{self.threshold_stddev_votes:.1f}" if has_check else "-",
            "sigma2": f"{self.noise_stddev_votes:.1f}",
        }


@dataclass(frozen=True, kw_only=True)
class ConfidentGnmax(ConfidentVotes):
    """Labels that enough teachers agree on. Realised price: the exact joint cost of threshold bit and noisy argmax."""

    name: ClassVar[str] = "confident_gnmax"

    def answer(
        self,
        votes_QC: IntArray,
        *,
        groups: Sequence[int],
        keys: Sequence[str],
        gate: DemographicParityGate,
        source: NoiseSource,
    ) -> list[Outcome]:
        """CF-GNMax on Q queries in order."""
        return gated(self.labels(votes_QC, keys=keys, source=source), groups, gate)

    def labels(self, votes_QC: IntArray, *, keys: Sequence[str], source: NoiseSource) -> list[int]:
        """Labels of the queries whose noisy threshold check passes, else ``NOT_CONFIDENT``.

        Ties are broken uniformly.
        """
        words = source.words(keys, 1 + votes_QC.shape[1])
        if len(keys) < _FEW:
            return [
                self._label(votes_C, key, words_C, source)
                for votes_C, key, words_C in zip(votes_QC.tolist(), keys, words.tolist(), strict=True)
            ]
        confident, noisy_QC = self.noisy_counts(votes_QC, words, source)
        return labels_of(noisy_QC, confident, keys=keys, source=source)

    def _label(self, votes_C: Sequence[int], key: str, words: Sequence[int], source: NoiseSource) -> int:
        """The same for one query, from the same words to the same label."""
        if max(votes_C) + discrete_gaussian(self.threshold_stddev_votes, words[0], source) < self.threshold:
            return NOT_CONFIDENT
        stddev = self.noise_stddev_votes
        noisy_C = [
            votes + discrete_gaussian(stddev, word, source) for votes, word in zip(votes_C, words[1:], strict=True)
        ]
        most = max(noisy_C)
        if noisy_C.count(most) == 1:
            return noisy_C.index(most)
        return _among([label for label, votes in enumerate(noisy_C) if votes == most], key, source)

    def realised(self, votes_QC: IntArray) -> ConfidentGnmaxVotes:
        """The queries with their votes."""
        return ConfidentGnmaxVotes(votes_QC=votes_QC, **self.parameters)

    def answer_probability(self, votes_QC: IntArray) -> FloatArray:
        """P[the threshold is passed] per query, shape (Q,)."""
        return gnmax.answer_probability(
            votes_QC,
            threshold=self.threshold,
            threshold_stddev_votes=self.threshold_stddev_votes,
            tail="discrete",
        )

    def right_probability(self, votes_QC: IntArray, right_Q: IntArray) -> FloatArray:
        """P[the noisy argmax is class ``right_Q``] per query, shape (Q,), for continuous Gaussian noise.

        With X the noise of the right class, E[prod over other classes of Phi(lead / sigma + X)], by Gauss-Hermite
        quadrature; discrete noise of several votes differs by its rare ties.
        """
        rows = np.arange(len(votes_QC))
        lead_QC = (votes_QC[rows, right_Q][:, None] - votes_QC) / self.noise_stddev_votes
        log_wins_QCK = scipy.special.log_ndtr(lead_QC[:, :, None] + _NODES_K)
        # The right class is not compared with itself.
        log_wins_QCK[rows, right_Q] = 0.0
        won_Q: FloatArray = np.exp(log_wins_QCK.sum(axis=1)) @ _WEIGHTS_K
        return won_Q

    def as_in_paper_rdp(self, votes_QC: IntArray, *, rejected_Q: npt.NDArray[np.bool_]) -> FloatArray:
        """The published code charges nothing where the gate refused a label."""
        return as_in_paper_rdp(self.realised(votes_QC), fairness_rejected_Q=rejected_Q)

    def check_publication(self, release: SmoothRelease, *, num_classes: int) -> None:
        """As :func:`fairpate.privacy.smooth_sensitivity.check_monotonicity`."""
        smooth_sensitivity.check_monotonicity(
            noise_stddev_votes=self.noise_stddev_votes, num_classes=num_classes, order=release.order
        )

    def publish(self, votes_QC: IntArray, *, release: SmoothRelease, source: NoiseSource) -> SanitisedRdp:
        """By smooth sensitivity."""
        return smooth_sensitivity.sanitised_rdp(votes_QC, release=release, source=source, **self.parameters)


def labels_of(noisy_QC: IntArray, confident: IntArray, *, keys: Sequence[str], source: NoiseSource) -> list[int]:
    """The largest of the noisy counts of each query in ``confident``, ties broken uniformly; else ``NOT_CONFIDENT``."""
    labels_Q = np.full(len(keys), NOT_CONFIDENT, dtype=np.int64)
    labels_Q[confident] = _argmax(noisy_QC, [keys[i] for i in confident.tolist()], source)
    labels: list[int] = labels_Q.tolist()
    return labels


def _argmax(noisy_QC: IntArray, keys: Sequence[str], source: NoiseSource) -> IntArray:
    """The largest entry of each row, uniformly among equals."""
    labels_Q: IntArray = noisy_QC.argmax(axis=1)
    is_leader_QC = noisy_QC == noisy_QC.max(axis=1, keepdims=True)
    # Ties are rare; without one no row is looked at.
    if np.count_nonzero(is_leader_QC) > len(noisy_QC):
        for row in (is_leader_QC.sum(axis=1) > 1).nonzero()[0].tolist():
            labels_Q[row] = _among(is_leader_QC[row].nonzero()[0].tolist(), keys[row], source)
    return labels_Q


def _among(leaders: Sequence[int], key: str, source: NoiseSource) -> int:
    # A stream of its own: the same winner in any order and any block.
    return leaders[source.derive(key, "tie").randbelow(len(leaders))]
