"""One vote per record: every private record is a teacher that votes once, on a public prototype.

Kin: parallel composition (McSherry 2009) and private prototypes of public embeddings (DPPL, Wahdany et al. 2025, arXiv
2406.08039).

    prototypes   K centres of the public pool, in an embedding of public records alone (:mod:`.prototypes`)
    votes        n[k, c] = how many private records of label c are nearest to prototype k
    release      n + N_Z(0, sigma^2), every cell of it, empty ones too
    labels       what a public record's prototype says, or a linear rule that is fitted to all counts; the surest teach

Adding or removing a record moves one cell by one, whatever K and C: one event for everything
(:class:`fairpate.privacy.record_votes.VoteTables`), priced exactly for noise on whole numbers. Everything after the
table is post-processing: labels for the whole pool, the student, and every fairness rule. The price holds whatever the
records are, so the epsilon that is computed is the one that is published.

K and sigma follow from the configuration and the size of the pool, never from private records: their number is declared
(``num_records``) or not used. The pool must really be public.

Shapes: N private records, M public ones, K prototypes, C classes, D or E coordinates.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from sklearn.linear_model import LogisticRegression

from fairpate.app.seeds import Stream, stream_seed
from fairpate.app.students import fit_student
from fairpate.config import ConfigError, Count, Section, StudentConfig
from fairpate.fairness.gate import filter_stream
from fairpate.methods.definition import PrivateMethod, Training
from fairpate.methods.prototypes import EmbeddingName, Floats, Prototypes
from fairpate.methods.trained import Trained
from fairpate.privacy.calibration import least_noise
from fairpate.privacy.discrete_gaussian import NoiseSource, discrete_gaussians
from fairpate.privacy.record_votes import VoteTables
from fairpate.types import GateRule, IntArray, LabelledSet

_STDDEVS_PER_CELL = 4
_POOL_PER_CELL = 10
_LARGEST_EPSILON = 20


class RecordVotesConfig(Section):
    """Prototypes, and which of their labels teach."""

    embedding: EmbeddingName = Field(
        "components", description="Where prototypes lie: `components` of the pool, or its `graph` of neighbours."
    )
    num_components: Count = Field(60, description="Principal components of the pool; fewer where it has fewer.")
    num_prototypes: Count | None = Field(
        None, description="K. null: a tenth of the pool, or fewer so that num_records fill a cell with four sigma."
    )
    num_records: Count | None = Field(
        None, description="Private records, a declared public number that the rule for K may read; null: it does not."
    )
    rule: Literal["cells", "linear"] = Field(
        "cells", description="Labels are what the prototype's own votes say, or a `linear` rule fitted to all of them."
    )
    taught_share: float = Field(0.7, gt=0, le=1, description="Of the pool: the records with the least doubtful labels.")
    gate: GateRule | None = Field(None, description="Keeps from the student what would widen the gap; null: nothing.")

    def prototypes_of(self, pool: int, *, stddev: float) -> int:
        """K, as configured or from public facts."""
        if self.num_prototypes is not None:
            return self.num_prototypes
        filled = pool if self.num_records is None else int(self.num_records / (_STDDEVS_PER_CELL * stddev))
        return max(1, min(filled, pool // _POOL_PER_CELL))


def noisy_votes(
    prototype_N: IntArray, labels_N: IntArray, *, shape: tuple[int, int], stddev: float, source: NoiseSource
) -> IntArray:
    """The released table (K, C): one vote per record, and noise on every cell."""
    votes_KC = np.zeros(shape, dtype=np.int64)
    np.add.at(votes_KC, (prototype_N, labels_N), 1)
    words_KC = source.words([f"prototype {k}" for k in range(shape[0])], shape[1])
    return votes_KC + discrete_gaussians(stddev, words_KC, source)


class RecordVotes(PrivateMethod):
    """Within the target for one record, added or removed: one release for everything."""

    title: ClassVar[str] = "one vote per record"
    paper: ClassVar[str] = "here; kin: McSherry 2009, arXiv 2406.08039"
    reads_groups: ClassVar[bool] = False

    method: str = "record_votes"
    record_votes: RecordVotesConfig = RecordVotesConfig()
    student: StudentConfig = StudentConfig()

    @property
    def reads_public(self) -> bool:
        """They get the labels."""
        return True

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

    def train(self, training: Training) -> Trained:
        """Prototypes, one noisy table, labels of the pool, and a student of the surest."""
        dataset, settings = training.dataset, self.record_votes
        stddev = least_noise(
            lambda noise: [VoteTables(count=1, noise_stddev_votes=noise)],
            target_epsilon=self.target.epsilon,
            target_delta=self.target.delta,
            accounting=self.target.accounting,
        )
        with training.reporter.stage("prototypes"):
            prototypes = Prototypes.of(
                dataset.public.x,
                count=settings.prototypes_of(len(dataset.public), stddev=stddev),
                embedding=settings.embedding,
                num_components=settings.num_components,
                seed=stream_seed(self.seed, Stream.TRAINING) % 2**32,
            )
        with training.reporter.stage("votes"):
            votes_KC = noisy_votes(
                prototypes.nearest(dataset.private.x),
                dataset.private.y.numpy(),
                shape=(len(prototypes.centres), dataset.num_classes),
                stddev=stddev,
                source=self.source,
            )
        if settings.rule == "cells":
            labels_M, certainty_M = labels_of_cells(votes_KC, prototypes.prototype_M, stddev=stddev)
        else:
            labels_M, certainty_M = labels_of_line(votes_KC, prototypes, stddev=stddev)
        labelled = self._surest(labels_M, certainty_M, training)
        training.reporter.note(
            "votes",
            f"{len(votes_KC)} prototypes, noise {stddev:.2f}; {len(labelled.labels)} of {len(labels_M)} labels teach",
        )
        network = fit_student(
            self.student, dataset, labelled, training.reporter, seed=self.seed, initial_model=training.model
        )
        return Trained(
            model=network,
            events=(VoteTables(count=1, noise_stddev_votes=stddev),),
            noise=self.source.label,
            num_training_labels=len(labelled.labels),
        )

    def _surest(self, labels_M: IntArray, certainty_M: Floats, training: Training) -> LabelledSet:
        """The surest labels of the pool, in its order; with a gate, those that it lets through."""
        public, rule = training.dataset.public, self.record_votes.gate
        num_taught = max(1, round(self.record_votes.taught_share * len(labels_M)))
        kept_M = np.zeros(len(labels_M), dtype=np.bool_)
        kept_M[np.argsort(-certainty_M, kind="stable")[:num_taught]] = True
        labelled = LabelledSet(record_ids=tuple(public.record_id), labels=labels_M, groups=public.z.numpy()).take(
            kept_M
        )
        if rule is None:
            return labelled
        passed = filter_stream(
            labelled.labels,
            labelled.groups,
            rule=rule,
            num_groups=training.dataset.num_groups,
            num_classes=training.dataset.num_classes,
        )
        return labelled.take(passed)


def labels_of_cells(votes_KC: IntArray, prototype_M: IntArray, *, stddev: float) -> tuple[IntArray, Floats]:
    """A label (M,) per public record, that most noisy votes of its prototype say, and how sure it is."""
    ordered_KC = np.sort(votes_KC, axis=1)
    # The lead over the runner-up, against its noise and that of counts of this size.
    doubt_K = np.sqrt(np.maximum(ordered_KC[:, -1] + ordered_KC[:, -2], 0) + 2 * stddev**2)
    lead_K = (ordered_KC[:, -1] - ordered_KC[:, -2]) / np.maximum(doubt_K, 1e-9)
    return votes_KC.argmax(axis=1)[prototype_M], lead_K[prototype_M]


def labels_of_line(votes_KC: IntArray, prototypes: Prototypes, *, stddev: float) -> tuple[IntArray, Floats]:
    """The same by logistic regression on the pool's coordinates: a record stands for a share of its cell's counts.

    The ridge is what the noise of K cells calls for, against the information in as many votes.
    """
    plain_MD, prototype_M = prototypes.coordinates_MD, prototypes.prototype_M
    positive_KC = np.maximum(votes_KC, 0)
    shares_KC = positive_KC / np.maximum(np.bincount(prototype_M, minlength=len(votes_KC)), 1)[:, None]
    weights_MC = shares_KC[prototype_M]
    record_R, label_R = np.nonzero(weights_MC)
    if len(np.unique(label_R)) < 2:
        return labels_of_cells(votes_KC, prototype_M, stddev=stddev)
    spread = np.sqrt(plain_MD.var(axis=0).sum()) or 1.0
    ridge = stddev**2 * len(votes_KC) / positive_KC.sum()
    line = LogisticRegression(C=1 / max(ridge, 1e-6), max_iter=200)
    line.fit(plain_MD[record_R] / spread, label_R, sample_weight=weights_MC[record_R, label_R])
    chance_MC = line.predict_proba(plain_MD / spread)
    ordered_MC = np.sort(chance_MC, axis=1)
    return line.classes_[chance_MC.argmax(axis=1)], ordered_MC[:, -1] - ordered_MC[:, -2]
