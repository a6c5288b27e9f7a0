"""What the methods share in which private records vote themselves: one noisy table, and a student of its labels.

    votes        every private record adds whole numbers to a table, by its label and by what public records are like
    release      the table + N_Z(0, sigma^2), every cell of it, empty ones too
    labels       what the table says of every public record; the least doubtful teach the student

One event prices everything, whatever the records are, so the epsilon that is computed is the one that is published.
Everything after the table is post-processing: labels for the whole pool, the student, and every fairness rule.

Shapes: N private records, M public ones, C classes, W numbers per class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fairpate.app.seeds import Stream
from fairpate.app.students import fit_student
from fairpate.config import ConfigError, PenaltyConfig, Section, StudentConfig
from fairpate.fairness.gate import filter_stream
from fairpate.methods.definition import Training
from fairpate.methods.releasing import ReleasingMethod
from fairpate.methods.trained import Trained
from fairpate.nn.dpfr import public_penalty
from fairpate.privacy.accountant import Event
from fairpate.privacy.calibration import least_noise
from fairpate.privacy.discrete_gaussian import NoiseSource, discrete_gaussians
from fairpate.types import GateRule, IntArray, LabelledSet

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


class VotesOfRecords(ReleasingMethod):
    """Within the target for one record or person, added or removed: one release for everything."""

    reads_groups: ClassVar[bool] = False

    student: StudentConfig = StudentConfig()

    @property
    def reads_public(self) -> bool:
        """They get the labels."""
        return True

    @property
    def reads_public_groups(self) -> bool:
        """A gate and a regulariser do."""
        settings = [section for _, section in self if isinstance(section, TaughtConfig)]
        asked = any(each.gate is not None or each.penalty is not None for each in settings)
        return asked or self.public_data.calibration is not None

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
    words = source.words([f"{row} {k}" for k in range(table.shape[0])], table.shape[1])
    return table + discrete_gaussians(stddev, words, source)
