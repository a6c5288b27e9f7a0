"""SF-PATE: PATE that protects only the sensitive attribute (Tran, Zhu, Fioretto and Van Hentenryck, "SF-PATE: Scalable,
Fair, and Private Aggregation of Teacher Ensembles").

Features x and labels y are public, attributes a are private. Changing one attribute changes one teacher's shard, and so
one vote on every query: a label costs as much as in PATE, for a smaller unit. So queries may be training records.

    SF_S   teachers predict a from (x, y); a fair student, F-LD, learns from (x, y, released a)
    SF_T   each teacher is a fair classifier, F-LD, on its shard; a student learns from released y

Deviations from the paper:
- Noise, number of teachers, and the loss term between SF_T's student and the votes differ from the paper's.
- SF_T's student learns from the released labels alone, and ignores the public ones.
- Labels come from the Confident-GNMax aggregator at a data-independent cost; the paper's cost depends on votes.

Shapes: N records, C classes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fairpate.config import LEARNING_FIELDS, ConfigError, GnmaxConfig, Section
from fairpate.data import Dataset, Split
from fairpate.data.large_arrays import Names
from fairpate.lazy import functional, torch
from fairpate.methods.base import Stream, Trained, Training
from fairpate.methods.f_ld import FairLoopConfig, FldConfig, parity_of, train_f_ld
from fairpate.methods.parity import UNKNOWN
from fairpate.methods.pate import PateFamily
from fairpate.methods.voting import QueryPlan, ReleasedLabels, digest_of_records
from fairpate.terminal import Reporter
from fairpate.types import IntArray, LabelledSet, VoteBatch, stream_seed

if TYPE_CHECKING:
    from teachers.work import BlockPool


class SfPateConfig(Section):
    """Settings of SF-PATE: its variant, which decides what teachers predict. The sections `teachers`, `aggregator` and
    `f_ld` have all other settings."""

    variant: Literal["sf_s", "sf_t"] = Field(
        "sf_s",
        description="`sf_s`: teachers predict attributes for a fair student; `sf_t`: the teachers themselves are fair.",
    )


class SfPate(PateFamily):
    """SF-PATE, with noise calibrated to the target. It protects each record's sensitive attribute.

    In its variant SF_S teachers predict the attributes of private records, and section ``f_ld`` configures the fair
    student. In SF_T teachers are fair classifiers that label the public pool, and ``f_ld`` configures the teachers.
    """

    title: ClassVar[str] = "SF-PATE"
    paper: ClassVar[str] = "Tran, Zhu, Fioretto and Van Hentenryck, SF-PATE"
    colour: ClassVar[int] = 1
    reads_groups: ClassVar[bool] = True
    protects_attribute_only: ClassVar[bool] = True  # features and labels are public

    method: str = "sf_pate"
    sf_pate: SfPateConfig = SfPateConfig()
    f_ld: FairLoopConfig = FairLoopConfig()
    aggregator: GnmaxConfig = GnmaxConfig()

    @property
    def unread(self) -> dict[str, str]:
        """The disabled fields, each with the setting that disables it. F-LD trains the student in SF_S and each teacher
        in SF_T, so the settings of ordinary training of these models are not read."""
        unread = [f"teachers.{field}" for field in ("fit", "max_shard_size")]
        if self.sf_pate.variant == "sf_s":
            # Teachers read how all are trained.
            read, has_student = ("augment", "training"), self.public_data.self_label is not None
            unread = [field for field in LEARNING_FIELDS if field not in read and not has_student]
        return super().unread | dict.fromkeys(unread, "sf_pate.variant")

    def check(self) -> None:
        """Raise ConfigError as the parent class does, and for teachers in closed form."""
        super().check()
        if self.teachers.model.name == "ridge":
            raise ConfigError("teachers.model: sf_pate trains networks, got ridge; choose an architecture.")

    @property
    def reads_public(self) -> bool:  # type: ignore[override]
        return self.sf_pate.variant == "sf_t"

    @property
    def keeps_teachers(self) -> bool:  # type: ignore[override]
        """True in SF_S, where teachers predict attributes. In SF_T teachers are fair classifiers that are trained, vote
        and are discarded one by one."""
        return self.sf_pate.variant == "sf_s"

    @property
    def learner(self) -> FldConfig:
        """The settings of F-LD (fairness by Lagrange multipliers) for the student or the teachers, with the optimiser
        of section ``training``."""
        common = {"optimizer": self.training.optimizer, "schedule": self.training.schedule}
        return FldConfig(**dict(self.f_ld), **common)

    def plan(self, dataset: Dataset) -> QueryPlan:
        """Return the plan of the release of labels: its queries and its mechanism. In SF_S, where teachers predict
        attributes, the queries are the private records without their attributes."""
        return super().plan(attribute_questions(dataset) if self.sf_pate.variant == "sf_s" else dataset)

    def collect_votes(
        self, dataset: Dataset, queries: Split, folder: Path, reporter: Reporter, pool: BlockPool | None = None
    ) -> VoteBatch:
        """Return the votes of all teachers; in SF_T, where each teacher is a fair classifier, F-LD trains the teachers
        one after another."""
        if self.sf_pate.variant == "sf_s":
            return super().collect_votes(dataset, queries, folder, reporter, pool)
        from teachers.ensemble import count_votes, rows_of_teachers  # a configuration is read without torch

        private, count = dataset.private, self.teachers.num_teachers
        rows_T = rows_of_teachers(private, self.teachers, self.seed)
        votes_QC = np.zeros((len(queries), dataset.num_classes), dtype=np.int64)
        with reporter.stage("teachers") as advance:
            for teacher, rows in enumerate(rows_T):
                said = self._fair_vote(private.take(torch.from_numpy(rows)), queries, dataset, teacher=teacher)
                votes_QC += count_votes(said.to(torch.int16).numpy()[None], dataset.num_classes)
                advance(teacher + 1, count)
        # What trains the teachers.
        network, learner = (each.model_dump(mode="json") for each in (self.networks["teachers.model"], self.learner))
        settings = (count, network, learner, self.seed, list(private.record_id))
        digest = digest_of_records(settings, private.x, private.y, private.z)
        return VoteBatch(record_ids=queries.record_id, groups_Q=queries.z.numpy(), votes_QC=votes_QC, ensemble=digest)

    def learn(self, training: Training, labels: ReleasedLabels) -> Trained:
        """Train and return the student. In SF_S it is trained by F-LD on all private records with their released
        attributes; for some records no attribute was released."""
        if self.sf_pate.variant == "sf_t":
            return super().learn(training, labels)
        private = training.dataset.private
        learned = replace(private, z=released_groups(private, labels.labelled))
        generator = training.generator(Stream.TRAINING)
        with training.reporter.stage(self.method) as advance:
            model = self._fair(training.model, learned, training.dataset, generator, on_progress=advance)
        return replace(labels, model=model)

    def _fair(
        self, model: torch.nn.Module, records: Split, dataset: Dataset, generator: torch.Generator, **options: Any
    ) -> torch.nn.Module:
        """Return ``model``, trained on ``records`` by F-LD (fairness by Lagrange multipliers,
        :mod:`fairpate.methods.f_ld`)."""
        parity, groups = parity_of(self.learner, dataset), records.z
        # A shard may lack a group, and a refusal would reveal that; of some cells no attribute may have been released.
        options |= {"parity": parity, "generator": generator, "allow_empty_cells": True}
        return train_f_ld(model, records.x, records.y, groups, self.learner, **options)

    def _fair_vote(self, shard: Split, queries: Split, dataset: Dataset, *, teacher: int) -> torch.Tensor:
        """Train one teacher by F-LD, with a fairness constraint, on ``shard``, and return its label for each query,
        (Q,)."""
        from fairpate.nn.fit import predict_logits  # a configuration is read without torch
        from fairpate.nn.models import build_model

        # Seeded by its number alone: no draw of a teacher may depend on another teacher's records.
        generator = torch.Generator().manual_seed(stream_seed(self.seed, Stream.TRAINING) + teacher)
        shape, seed = tuple(shard.x.shape[1:]), int(torch.randint(2**62, (), generator=generator))
        network = self.networks["teachers.model"]
        model = build_model(network, input_shape=shape, num_classes=dataset.num_classes, generator_seed=seed)
        # Without records a teacher votes by its first weights, which depend on no record.
        if len(shard):
            self._fair(model, shard, dataset, generator)
        return predict_logits(model, queries.x).argmax(dim=1)


def attribute_questions(dataset: Dataset) -> Dataset:
    """Return a data set for teachers that predict attributes: (x, y) are the features, the attribute is the label.

    Its public records, the queries, are the private records without their attributes. Records that differ only in the
    attribute share one query, because teachers vote alike on them. All records are in one group.
    """
    private, labels_N = dataset.private, dataset.private.y
    # A table gets one more column per label, pictures (N, channels, height, width) a channel whose shade is the label.
    if private.x.ndim == 2:
        seen = functional.one_hot(labels_N, dataset.num_classes).to(private.x.dtype)
    else:
        shade_N = (labels_N * 255 // max(dataset.num_classes - 1, 1)).to(private.x.dtype)
        seen = shade_N[:, None, None, None].expand(-1, 1, *private.x.shape[2:])
    # Names and units do not depend on the attribute: otherwise its change would affect two teachers, not one.
    x, no_groups = torch.cat([private.x, seen], dim=1), torch.zeros_like(private.z)
    split = replace(private, x=x, y=private.z, z=no_groups, person_id=())
    labels = dataset.group_names
    questions = split.take(torch.from_numpy(np.unique(first_alike(private))))
    return replace(dataset, private=split, public=questions, label_names=labels, group_names=("everyone",))


def released_groups(private: Split, labelled: LabelledSet) -> torch.Tensor:
    """Return the released groups (N,) of private records; ``UNKNOWN`` for records without a released group.

    Records that differ only in the attribute share one released group.
    """
    groups = torch.full((len(private),), UNKNOWN, dtype=torch.int64)
    groups[private.rows_of(labelled.record_ids)] = torch.from_numpy(labelled.labels)
    return groups[torch.from_numpy(first_alike(private))]


def first_alike(private: Split) -> IntArray:
    """Return, for each record, the row (N,) of the first record with the same unit, features and label."""
    units_N = Names(private.unit_id).numbered()
    first_N = np.arange(len(private))
    seen: dict[tuple[int, bytes, int], int] = {}
    # Equal records have equal units: a record with a unit to itself needs no comparison.
    for row in np.flatnonzero(np.bincount(units_N)[units_N] > 1).tolist():
        alike = (int(units_N[row]), private.x[row].numpy().tobytes(), int(private.y[row]))
        first_N[row] = seen.setdefault(alike, row)
    return first_N
