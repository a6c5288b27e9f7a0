"""What the methods share in which private records vote themselves: one noisy table, and a student of its labels.

    votes        every private record adds whole numbers to a table, by its label and by what public records are like
    release      the table + N_Z(0, sigma^2), every cell of it, empty ones too
    labels       what the table says of every public record; the least doubtful teach the student

One event prices everything, whatever the records are, so the epsilon that is computed is the one that is published.
Everything after the table is post-processing: labels for the whole pool, the student, and every fairness rule.

Shapes: N private records, M public ones, C classes, W numbers per class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fairpate.app.released import Released
from fairpate.app.seeds import Stream, stream_seed
from fairpate.app.students import fit_student
from fairpate.config import ConfigError, PenaltyConfig, Section, StudentConfig
from fairpate.data import Dataset
from fairpate.evaluation.private_population import PrivatePopulation, private_population
from fairpate.fairness.gate import filter_stream
from fairpate.fairness.private_population import (
    TAUGHT_NOISE,
    PublicRecords,
    TableByGroup,
    estimated_population,
    thinned,
)
from fairpate.methods.definition import Training
from fairpate.methods.releasing import ReleasingMethod
from fairpate.methods.trained import Trained
from fairpate.nn.dpfr import public_penalty
from fairpate.privacy.calibration import least_noise
from fairpate.privacy.discrete_gaussian import NoiseSource, discrete_gaussians
from fairpate.privacy.events import Event
from fairpate.types import GateRule, IntArray, LabelledSet
from student.predict import Student

FloatArray = npt.NDArray[np.float32] | npt.NDArray[np.float64]
UNITS = 2**14
"""U: a vote of norm one, in whole numbers."""
_LARGEST_EPSILON = 20


class TaughtConfig(Section):
    """Which labels of the pool teach."""

    taught_share: float = Field(0.7, gt=0, le=1, description="Of the pool: the records with the least doubtful labels.")
    gate: GateRule | None = Field(None, description="Keeps from the student what would widen the gap; null: nothing.")
    penalty: PenaltyConfig | None = Field(
        None, description="Demographic-parity regulariser in the student's loss, on public records; null: none."
    )


@dataclass(frozen=True, kw_only=True)
class PoolLabels:
    """Of every public record a label (M,), how sure it is (M,), and perhaps the probability of each class (M, C)."""

    labels_M: IntArray
    certainty_M: FloatArray
    chances_MC: FloatArray | None = None


@dataclass(frozen=True, kw_only=True)
class ToldByGroup:
    """A table by group; of every public record its vote (M, W), and how likely each label is (M, C)."""

    table: TableByGroup
    votes_MW: npt.NDArray[np.float64]
    likely_MY: npt.NDArray[np.float64]


class VotesOfRecords(ReleasingMethod):
    """Within the target for one record or person, added or removed: one release for everything."""

    student: StudentConfig = StudentConfig()

    @property
    def by_group(self) -> bool:
        """Whether the table has a part for every group of private records."""
        raise NotImplementedError

    @property
    def reads_groups(self) -> bool:  # type: ignore[override]
        """For a table by group."""
        return self.by_group

    def rows(self, dataset: Dataset) -> tuple[IntArray, int]:
        """Where each private record votes, by its label and perhaps its group, and how many such rows there are."""
        labels_N, num_classes = dataset.private.y.numpy(), dataset.num_classes
        if not self.by_group:
            return labels_N, num_classes
        return dataset.private.z.numpy() * num_classes + labels_N, dataset.num_groups * num_classes

    def by_class(self, table_G: IntArray, *, stddev: float) -> tuple[IntArray, float]:
        """The part of a table by group that students learn from, over all groups (axis 0), and its noise."""
        taught_G, _ = self.thinned(table_G, stddev=stddev)
        return taught_G.sum(axis=0), self.label_noise(len(table_G)) * stddev

    def label_noise(self, num_groups: int) -> float:
        """The noise that students learn from, in units of the release's."""
        # The parts of all groups are added, and their noises are independent.
        return TAUGHT_NOISE * math.sqrt(num_groups) if self.by_group else 1.0

    def thinned(self, table_G: IntArray, *, stddev: float) -> tuple[IntArray, npt.NDArray[np.float64]]:
        """A released table in two, for students and for what is estimated of them; always the same two."""
        # A new generator at each call, from one seed: student and estimate need the two halves of the same draw.
        return thinned(table_G, stddev=stddev, generator=self._generator(Stream.THINNING))

    def _generator(self, stream: Stream) -> np.random.Generator:
        return np.random.default_rng(stream_seed(self.seed, stream))

    def told_by_group(self, released: Released) -> ToldByGroup:
        """What a release by group tells of the private population."""
        raise NotImplementedError

    def private_population(self, released: Released, dataset: Dataset, student: Student) -> PrivatePopulation | None:
        """How ``student`` treats the groups of private records, from the release and public records alone."""
        if not self.by_group:
            return None
        told, public = self.told_by_group(released), dataset.public
        generator = self._generator(Stream.POPULATION)
        predicted = student.predict(public.x, public.z.numpy(), generator=generator)
        # A refusal is one more outcome, beside the classes.
        outcome_M = np.where(predicted.answered, predicted.labels, dataset.num_classes)
        records = PublicRecords(
            votes_MW=told.votes_MW,
            groups_M=public.z.numpy(),
            likely_MY=told.likely_MY,
            outcome_MJ=np.eye(dataset.num_classes + 1)[outcome_M],
        )
        return private_population(
            estimated_population(told.table, records, generator=generator),
            group_names=dataset.group_names,
            class_names=dataset.label_names,
        )

    @property
    def reads_public(self) -> bool:
        """They get the labels."""
        return True

    @property
    def reads_public_groups(self) -> bool:
        """A gate and a regulariser do."""
        settings = [section for _, section in self if isinstance(section, TaughtConfig)]
        asked = any(each.gate is not None or each.penalty is not None for each in settings)
        return asked or self.by_group or self.public_data.calibration is not None

    def check(self) -> None:
        """ConfigError for a target that leaves hardly any noise, or a relation by which a record moves two cells."""
        if self.target.epsilon > _LARGEST_EPSILON:
            raise ConfigError(
                f"target.epsilon: a table of votes is priced up to {_LARGEST_EPSILON}, got {self.target.epsilon}; "
                "lower it."
            )
        if self.target.record_relation != "add or remove one":
            raise ConfigError(
                f"target.relation: {self.target.relation!r} moves two votes and is not priced here; use 'add or remove "
                "one'."
            )

    def check_data(self, dataset: Dataset) -> None:
        """ConfigError for groups of persons, whose votes are shortened and count no records."""
        super().check_data(dataset)
        if self.by_group and dataset.unit == "person":
            raise ConfigError(
                f"{self.method}.by_group: counts private records by group, but {dataset.name} protects persons, whose "
                "votes are shortened; leave it out, or set data.unit=record, which protects less."
            )

    def least_noise(self, event: Callable[[float], Event]) -> float:
        """The least noise at which ``event`` of it stays within the target."""
        return least_noise(
            lambda noise: [event(noise)],
            target_epsilon=self.target.epsilon,
            target_delta=self.target.delta,
            accounting=self.target.accounting,
        )

    def taught(
        self, said: PoolLabels, settings: TaughtConfig, training: Training, *, events: tuple[Event, ...]
    ) -> Trained:
        """A student of the surest labels; ``events`` are the release that they come from."""
        labelled = surest(said, settings, training)
        training.reporter.note("votes", f"{len(labelled.labels)} of {len(said.labels_M)} labels teach")
        public, penalty = training.dataset.public, None
        if settings.penalty is not None:
            generator = training.generator(Stream.PENALTY)
            penalty = public_penalty(public.x, public.z, settings.penalty, generator=generator)
        network = fit_student(
            self.student,
            training.dataset,
            labelled,
            training.reporter,
            seed=self.seed,
            initial_model=training.model,
            penalty=penalty,
        )
        return Trained(model=network, events=events, noise=self.source.label, num_training_labels=len(labelled.labels))


def surest(said: PoolLabels, settings: TaughtConfig, training: Training) -> LabelledSet:
    """The surest labels of the pool, in its order; with a gate, those that it lets through."""
    public, num_records = training.dataset.public, len(said.labels_M)
    kept_M = np.zeros(num_records, dtype=np.bool_)
    num_taught = max(1, round(settings.taught_share * num_records))
    # Stable: of equally sure labels the first teach, on every machine.
    kept_M[np.argsort(-said.certainty_M, kind="stable")[:num_taught]] = True
    labelled = LabelledSet(
        record_ids=tuple(public.record_id), labels=said.labels_M, groups=public.z.numpy(), chances=said.chances_MC
    ).take(kept_M)
    if settings.gate is None:
        return labelled
    passed = filter_stream(
        labelled.labels,
        labelled.groups,
        rule=settings.gate,
        num_groups=training.dataset.num_groups,
        num_classes=training.dataset.num_classes,
    )
    return labelled.take(passed)


def with_noise(table: IntArray, *, stddev: float, source: NoiseSource, row: str) -> IntArray:
    """The released table (rows, columns): noise on every cell; ``row`` is what a row is called."""
    # Cells without a vote as well: where no noise is, nobody is.
    words = source.words([f"{row} {k}" for k in range(table.shape[0])], table.shape[1])
    return table + discrete_gaussians(stddev, words, source)
