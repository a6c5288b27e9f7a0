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

Shapes: T teachers, Q queries, C classes.
"""

import math
from fractions import Fraction
from typing import ClassVar

import numpy as np
from pydantic import Field

from aggregator.mechanism import label_chances
from fairpate.config import Count, QueriesConfig, RayConfig, TeachersConfig
from fairpate.data import Dataset, Split
from fairpate.methods.base import ExpectedVotes, Trained, Training
from fairpate.methods.pate import choose_queries
from fairpate.methods.record_votes import TaughtConfig, VotesOfRecords, labels_of_chances, with_noise
from fairpate.privacy.mechanism_events import VoteSums
from fairpate.run.release_log import Released


class TeacherVotesConfig(TaughtConfig):
    """Settings of the queries, and of the labels from which the student learns."""

    num_queries: Count | None = Field(
        None, description="Number of queries: the first public records of different content; null: all of them."
    )


class TeacherVotes(VotesOfRecords):
    """All teachers vote on all queries, and one noisy table of their counts is released.

    Its noise is calibrated to the target.
    """

    title: ClassVar[str] = "one table of teachers' votes"
    paper: ClassVar[str] = "here; related: Yaghini et al. 2023 (FairPATE), Papernot et al. 2018, arXiv 1802.08908"
    section: ClassVar[str] = "teacher_votes"

    method: str = "teacher_votes"
    teachers: TeachersConfig = TeachersConfig()
    ray: RayConfig = RayConfig()
    teacher_votes: TeacherVotesConfig = TeacherVotesConfig()

    @property
    def afterwards(self) -> tuple[str, ...]:  # type: ignore[override]
        """The dotted names of the fields that affect only what is learned from the release. Settings of training are
        not among them, because they affect teachers too."""
        return tuple(field for field in super().afterwards if field not in ("training", "augment", "backbone"))

    def queries(self, dataset: Dataset) -> Split:
        """Return the public records on which teachers vote."""
        return choose_queries(dataset, QueriesConfig(num_queries=self.teacher_votes.num_queries))

    def voting(self, dataset: Dataset, num_records: int) -> ExpectedVotes:  # noqa: ARG002 - as many teachers for any number
        """Estimate, for warnings before a run, how many votes decide a label and how noisy they are. All teachers vote
        on each query."""
        num_queries = len(self.queries(dataset))
        return ExpectedVotes(
            votes=self.teachers.num_teachers,
            noise_stddev_votes=self.sum_event("record", norm=two_moves(num_queries), scale=1).noise_stddev_votes,
            labels=round(self.teacher_votes.taught_share * num_queries),
        )

    def measure(self, training: Training) -> Released:
        """Train the teachers, collect their votes on all queries, and release one noisy table of counts."""
        dataset, reporter = training.dataset, training.reporter
        queries = self.queries(dataset)
        event = self.sum_event(dataset.unit, norm=two_moves(len(queries)), scale=1)
        votes_QC = np.zeros((len(queries), dataset.num_classes), dtype=np.int64)
        # A coordinator has no teachers. Elsewhere all shards vote, even empty ones: one record more must not add the
        # votes of a teacher.
        if not dataset.is_elsewhere:
            from teachers.ensemble import collect_votes  # a configuration is read without torch
            from teachers.ray_pool import open_pool

            with open_pool(self.ray) as pool:
                with reporter.stage("teachers") as advance:
                    ensemble = self.train_teachers(dataset, training.run.teachers, pool, on_progress=advance)
                with reporter.stage("votes") as advance:
                    votes_QC = collect_votes(ensemble, queries.x, pool=pool, on_progress=advance)
        training.reserve((event,), self.source.label)
        noise = event.noise_stddev_votes
        noisy_QC = with_noise(votes_QC, stddev=noise, source=self.source, row="query", noisy_sum=training.noisy_sum)
        reporter.note("votes", f"{len(queries)} queries, noise {noise:.2f}")
        return Released(arrays={"counts_QC": noisy_QC}, events=(event,))

    def learn(self, training: Training, released: Released) -> Trained:
        """Label the queries by their noisy counts, train a student on the most certain labels, and return it."""
        counts_QC, (event,) = released.arrays["counts_QC"], released.events
        assert isinstance(event, VoteSums)
        # From the release: over several sites, the number of those that took part is not known here.
        num_teachers = max(1, round(float(counts_QC.sum(axis=1).mean())))
        noise = event.noise_stddev_votes
        said = labels_of_chances(label_chances(counts_QC, num_teachers=num_teachers, noise_stddev_votes=noise))
        return self.taught(said, training, released, records=self.queries(training.dataset))


def two_moves(num_queries: int) -> float:
    """Return the L2 norm of the change of a table if one vote of every row moves to another class. The norm is rounded
    up, so that the privacy cost is never underestimated."""
    # A norm that is a rounding error too small would price the table a little too low.
    norm = math.sqrt(2 * num_queries)
    while Fraction(norm) ** 2 < 2 * num_queries:
        norm = math.nextafter(norm, math.inf)
    return norm
