"""Labels of the nearest records of a secret sample (Private-kNN: Zhu, Yu, Chandraker and Wang, CVPR 2020).

Per query every private record enters a sample of its own with ``sampling_rate``; the ``num_neighbours`` nearest of them
vote for their own labels, all where there are fewer. What is released of the counts is what
:mod:`aggregator.gnmax` releases of teachers' votes: the noisy argmax, after an optional check of the largest count.

A record moves two counts by one each, and that only where it was sampled. So the price holds for any votes and has no
data-dependent form; the check reads the same sample, and is one event with the counts.

Not known here: who is near, and how the sample is drawn (:mod:`teachers.neighbours`). Every reservation of a ledger
needs votes of a sample that no other one has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from aggregator.gnmax import ConfidentGnmax
from aggregator.mechanism import FloatArray, Mechanism, Outcome, check_votes
from aggregator.noisy_counts import ConfidentCounts
from fairpate.fairness.gate import DemographicParityGate
from fairpate.privacy.discrete_gaussian import NoiseSource
from fairpate.privacy.record_votes import NeighbourVotes
from fairpate.types import IntArray, MechanismParameters, ReleaseKind


@dataclass(frozen=True, kw_only=True)
class NearestRecords(Mechanism):
    """The noisy argmax of the labels of at most ``num_neighbours`` sampled records.

    ``threshold`` and the two noises as in :class:`fairpate.types.MechanismParameters`: ``-inf`` is no check, which
    costs nothing. ValueError for a sampling rate outside (0, 1] or for no neighbours.
    """

    name: ClassVar[str] = "nearest_records"
    voters: ClassVar[str] = "neighbours"
    sampling_rate: float
    num_neighbours: int
    threshold: float
    threshold_stddev_votes: float
    noise_stddev_votes: float

    def __post_init__(self) -> None:
        if not 0 < self.sampling_rate <= 1 or self.num_neighbours < 1:
            raise ValueError(
                "Expected 0 < sampling_rate <= 1 and num_neighbours >= 1, got "
                f"{self.sampling_rate} and {self.num_neighbours}."
            )
        # For its checks of range.
        MechanismParameters(**self._noises)

    def answer(
        self,
        votes_QC: IntArray,
        *,
        groups: Sequence[int],
        keys: Sequence[str],
        gate: DemographicParityGate,
        source: NoiseSource,
    ) -> list[Outcome]:
        """Q queries in order, the gate behind them."""
        return self._labelling.answer(votes_QC, groups=groups, keys=keys, gate=gate, source=source)

    def worst_case(self, num_queries: int) -> NeighbourVotes:
        """Check and counts of so many samples, whatever became of their labels."""
        return NeighbourVotes(
            count=num_queries,
            noise_stddev_votes=self.noise_stddev_votes,
            sampling_rate=self.sampling_rate,
            # A check that every count passes reads none.
            threshold_stddev_votes=None if self.threshold == -math.inf else self.threshold_stddev_votes,
        )

    def scaled(self, factor: float) -> Self:
        """Both noises multiplied; sample, neighbours and threshold stay."""
        return replace(
            self,
            threshold_stddev_votes=factor * self.threshold_stddev_votes,
            noise_stddev_votes=factor * self.noise_stddev_votes,
        )

    def describe(self) -> str:
        """The sample, then check and noise as of teachers' votes."""
        return (
            f"The {self.num_neighbours} nearest records of a fresh secret sample at rate {self.sampling_rate:g} vote. "
            f"{self._labelling.describe()}"
        )

    def columns(self) -> dict[str, str]:
        """Sampling rate and neighbours beside the symbols of teachers' votes."""
        return {"gamma": f"{self.sampling_rate:g}", "k": f"{self.num_neighbours}", **self._labelling.columns()}

    def is_complete(self, votes_QC: IntArray, *, num_teachers: int) -> bool:
        """At most ``num_neighbours`` votes: a sample may be smaller."""
        check_votes(votes_QC, num_teachers=num_teachers)
        return bool((votes_QC.sum(axis=1) <= num_teachers).all())

    @property
    def _noises(self) -> dict[str, float]:
        return {
            "threshold": self.threshold,
            "threshold_stddev_votes": self.threshold_stddev_votes,
            "noise_stddev_votes": self.noise_stddev_votes,
        }

    @property
    def _labelling(self) -> ConfidentGnmax | ConfidentCounts:
        """The same noises and the same argmax; who votes makes the difference, and the price."""
        return ConfidentGnmax(**self._noises)


@dataclass(frozen=True, kw_only=True)
class NearestCounts(NearestRecords):
    """The same with all noisy counts, whose price it is that neighbours have."""

    name: ClassVar[str] = "nearest_counts"
    releases: ClassVar[ReleaseKind] = "counts"

    def chances(self, counts_QC: IntArray, *, num_teachers: int) -> FloatArray:
        """As :func:`aggregator.noisy_counts.label_chances`, of samples in which all neighbours were found."""
        return self._labelling.chances(counts_QC, num_teachers=num_teachers)

    @property
    def _labelling(self) -> ConfidentCounts:
        return ConfidentCounts(**self._noises)
