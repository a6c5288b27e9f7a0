"""FairPATE in one release: teachers on shards vote once on all queries, and one noisy table of counts is released.

    teachers     T shards by a keyed hash of the person or record, one teacher each (:mod:`teachers.ensemble`)
    votes        n[q, c] = how many teachers choose class c for query q, a public record
    release      the table (Q, C) + N_Z(0, sigma^2), every cell of it
    labels       P[label | noisy counts] by Bayes; the student learns from the most certain labels that pass the gate

A record or person that is added, removed or changed under the same name is in one shard. The shard's teacher may then
move its vote on every query from one class to another: the table changes by sqrt(2 Q) in L2 norm, for any votes. So the
whole table is one event, for a number of queries that is known beforehand. (If a person is replaced by another, two
shards change, by 2 sqrt(Q); that relation is not supported here.) Gate, reject option and student read only the table.
Unlike in :mod:`fairpate.methods.pate`, no query can be added later, but the table may be a sum over several sites: each
has T shards of its own records (:mod:`fairpate.sites`).

With thousands of small teachers (``teachers.model: ridge``) single counts say little: a linear rule is fitted to all of
them, and a second noisy table, of private labels by score, gives its thresholds (:mod:`fairpate.methods.noisy_counts`).

Shapes: T teachers, Q queries, C classes.
"""

import math
from fractions import Fraction
from functools import partial
from typing import ClassVar

import numpy as np
from pydantic import Field

from aggregator.mechanism import label_chances
from fairpate.config import Count, QueriesConfig, RayConfig, TeachersConfig
from fairpate.data import Dataset, Split
from fairpate.methods.base import Audited, ExpectedVotes, Trained, Training, TrainsTeachers, noise_within
from fairpate.methods.learning import unread_beside_rule
from fairpate.methods.noisy_counts import NoisyCounts, ThresholdsConfig, table_event
from fairpate.methods.record_votes import TaughtConfig, VotesOfRecords, labels_of_chances, with_noise
from fairpate.methods.voting import choose_queries
from fairpate.privacy.audit_bounds import Shadows
from fairpate.privacy.mechanism_events import VoteSums, VoteTables
from fairpate.releases.directory import ReleasedArrays
from fairpate.types import IntArray, Unit


class TeacherVotesConfig(TaughtConfig):
    """Settings of the queries, and of the labels from which the student learns."""

    num_queries: Count | None = Field(
        None, description="Number of queries: the first public records of different content; null: all of them."
    )


class TeacherVotes(VotesOfRecords, TrainsTeachers):
    """All teachers vote on all queries, and one noisy table of their counts is released.

    Its noise is calibrated to the target.
    """

    title: ClassVar[str] = "one table of teachers' votes"
    paper: ClassVar[str] = "here; related: Yaghini et al. 2023 (FairPATE), Papernot et al. 2018, arXiv 1802.08908"
    colour: ClassVar[int] = 4
    sums_over_sites: ClassVar[bool] = True
    section: ClassVar[str] = "teacher_votes"

    method: str = "teacher_votes"
    teachers: TeachersConfig = TeachersConfig()
    ray: RayConfig = RayConfig()
    thresholds: ThresholdsConfig = ThresholdsConfig()
    teacher_votes: TeacherVotesConfig = TeacherVotesConfig()

    @property
    def afterwards(self) -> tuple[str, ...]:  # type: ignore[override]
        """The dotted names of the fields that affect only what is learned from the release. Settings of training are
        not among them, because they affect teachers too."""
        return tuple(field for field in super().afterwards if field not in ("training", "augment", "backbone"))

    @property
    def fits_rule(self) -> bool:
        """True if a linear rule is fitted to all noisy counts, as with thousands of small teachers."""
        return self.teachers.model.name == "ridge"

    @property
    def unread(self) -> dict[str, str]:
        """The disabled fields, each with the setting that disables it. A rule that is published has no training."""
        if not self.fits_rule:
            return super().unread | {"thresholds": "teachers.model"}
        return super().unread | (unread_beside_rule(self) if self.publishes_rule else {})

    def events(self, dataset: Dataset) -> tuple[VoteSums | VoteTables, ...]:
        """Return the events of the table of counts and, with small teachers, of the table for their thresholds."""
        share, norm = self.thresholds.share if self.fits_rule else 0.0, two_moves(len(self.queries(dataset)))
        if not share:
            return (self.sum_event(dataset.unit, norm=norm, scale=1),)

        def both(noise: float, unit: Unit = "record") -> tuple[VoteSums | VoteTables, ...]:
            # Of one Gaussian release with this multiplier, the table has its share and the counts have the rest.
            counts = VoteSums(count=1, noise_stddev_votes=noise * norm / math.sqrt(1 - share), norm=norm, unit=unit)
            return (counts, table_event(unit, noise_multiplier=noise / math.sqrt(share)))

        return both(noise_within(self.target, both), dataset.unit)

    def queries(self, dataset: Dataset) -> Split:
        """Return the public records on which teachers vote."""
        return choose_queries(dataset, QueriesConfig(num_queries=self.teacher_votes.num_queries))

    def voting(self, dataset: Dataset, num_records: int) -> ExpectedVotes:  # noqa: ARG002 - as many teachers for any number
        """Estimate, for warnings before a run, how many votes decide a label and how noisy they are. All teachers vote
        on each query."""
        num_queries = len(self.queries(dataset))
        return ExpectedVotes(
            votes=self.teachers.num_teachers,
            noise_stddev_votes=self.events(dataset)[0].noise_stddev_votes,
            labels=num_queries if self.fits_rule else round(self.teacher_votes.taught_share * num_queries),
            fitted_together=self.fits_rule,
        )

    def measure(self, training: Training) -> ReleasedArrays:
        """Train the teachers, collect their votes on all queries, and release one noisy table of counts."""
        dataset, queries = training.dataset, self.queries(training.dataset)
        votes_QC = np.zeros((len(queries), dataset.num_classes), dtype=np.int64)
        # A coordinator has no teachers. Elsewhere all shards vote, even empty ones: one record more must not add the
        # votes of a teacher.
        if not dataset.is_elsewhere:
            votes_QC = self.collect_votes(dataset, queries, training.run.teachers, training.reporter).votes_QC
        return self.noisy(training, votes_QC)

    def noisy(self, training: Training, votes_QC: IntArray) -> ReleasedArrays:
        """Release the noisy table of the exact counts ``votes_QC`` and, with small teachers, the table of private
        labels by score."""
        dataset, reporter = training.dataset, training.reporter
        queries, events = self.queries(dataset), self.events(dataset)
        training.reserve(events, self.source.label)
        noise = events[0].noise_stddev_votes
        draw = partial(with_noise, source=self.source, noisy_sum=training.noisy_sum)
        arrays = {"counts_QC": draw(votes_QC, stddev=noise, row="query")}
        reporter.note("votes", f"{len(queries)} queries, noise {noise:.2f}")
        if len(events) > 1:
            # The bins of the second table follow from the first one and public records alone.
            counts = self.noisy_counts(queries, arrays["counts_QC"], events[0])
            arrays["table_KC"] = counts.table(dataset, events[1], self.thresholds, partial(draw, row="bin"))
        return ReleasedArrays(arrays=arrays, events=events)

    def noisy_counts(self, queries: Split, counts_QC: IntArray, event: VoteSums | VoteTables) -> NoisyCounts:
        """Return the released counts, for the rule that is fitted to all of them."""
        # From the release: over several sites, the number of those that took part is not known here.
        num_teachers = max(1, round(float(counts_QC.sum(axis=1).mean())))
        return NoisyCounts(
            counts_QC=counts_QC,
            record_ids=queries.record_id,
            num_voters=num_teachers,
            noise_stddev_votes=event.noise_stddev_votes,
        )

    def learn(self, training: Training, released: ReleasedArrays) -> Trained:
        """Return a student of the most certain labels; with small teachers, of the whole pool, or the linear rule
        itself that was fitted to all counts."""
        dataset, (event, *others) = training.dataset, released.events
        assert isinstance(event, VoteSums)
        queries = self.queries(dataset)
        counts = self.noisy_counts(queries, released.arrays["counts_QC"], event)
        if not self.fits_rule:
            chances_QC = label_chances(
                counts.counts_QC, num_teachers=counts.num_voters, noise_stddev_votes=event.noise_stddev_votes
            )
            return self.taught(labels_of_chances(chances_QC), training, released, records=queries)
        table = next((each for each in others if isinstance(each, VoteSums | VoteTables)), None)
        rule_CW, said = counts.learned(dataset, table, released.arrays.get("table_KC"), self.thresholds)
        return self.published(training, released, rule_CW, said)

    def attack(self, audited: Audited) -> Shadows | None:
        """Return an attack on the answers of the voters, and on the table of private labels by score."""
        from fairpate.methods.attack_on_votes import attack_on_votes  # torch

        return attack_on_votes(self, audited)


def two_moves(num_queries: int) -> float:
    """Return the L2 norm of the change of a table if one vote of every row moves to another class. The norm is rounded
    up, so that the privacy cost is never underestimated."""
    # A norm that is a rounding error too small would price the table a little too low.
    norm = math.sqrt(2 * num_queries)
    while Fraction(norm) ** 2 < 2 * num_queries:
        norm = math.nextafter(norm, math.inf)
    return norm
