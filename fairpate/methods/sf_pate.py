"""SF-PATE: PATE that protects only the sensitive attribute (Tran, Zhu, Fioretto and Van Hentenryck, "SF-PATE: Scalable,
Fair, and Private Aggregation of Teacher Ensembles").

Features x and labels y are public, attributes a are private. Changing one attribute changes one teacher's shard, and so
one vote on every query: a label costs as much as in PATE, for a smaller unit. Queries may therefore be training
records.

    SF_S   teachers predict a from (x, y); a fair student, F-LD, learns from (x, y, released a)
    SF_T   each teacher is a fair classifier, F-LD, on its shard; a student learns from released y

Deviations from the paper:
- Noise, number of teachers, and the loss term between SF_T's student and the votes differ from the paper's.
- SF_T's student learns from the released labels alone, and ignores the public ones.
- Labels come from the Confident-GNMax aggregator at a data-independent cost; the paper's cost depends on votes and
  could not be published.

Shapes: N records, C classes.
"""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fairpate.config import LEARNING_FIELDS, GnmaxConfig, Section
from fairpate.data import Dataset, Split
from fairpate.data.large_arrays import Names
from fairpate.methods.base import Stream, Trained, Training
from fairpate.methods.f_ld import FairLoopConfig, FldConfig, parity_of, train_f_ld
from fairpate.methods.parity import UNKNOWN
from fairpate.methods.pate import Labels, PateFamily, ReleasePlan, digest_of_records
from fairpate.nn.fit import predict_logits
from fairpate.nn.models import build_model
from fairpate.terminal import Reporter
from fairpate.types import IntArray, LabelledSet, VoteBatch, stream_seed
from teachers.ensemble import BlockPool, count_votes, rows_of_teachers


class SfPateConfig(Section):
    """The variant of SF-PATE; its other settings are in `teachers`, `aggregator` and `f_ld`."""

    variant: Literal["sf_s", "sf_t"] = Field(
        "sf_s",
        description="`sf_s`: teachers predict attributes for a fair student; `sf_t`: the teachers themselves are fair.",
    )


class SfPate(PateFamily):
    """SF-PATE, with noise calibrated to the target, which protects one sensitive attribute.

    In SF_S teachers predict the attributes of private records, and ``f_ld`` configures the fair student. In SF_T
    teachers label the public pool, and ``f_ld`` configures the teachers.
    """

    title: ClassVar[str] = "SF-PATE"
    paper: ClassVar[str] = "Tran, Zhu, Fioretto and Van Hentenryck, SF-PATE"
    reads_groups: ClassVar[bool] = True
    protects_attribute_only: ClassVar[bool] = True  # features and labels are public

    method: str = "sf_pate"
    sf_pate: SfPateConfig = SfPateConfig()
    f_ld: FairLoopConfig = FairLoopConfig()
    aggregator: GnmaxConfig = GnmaxConfig()

    @property
    def unread(self) -> dict[str, str]:
        """Fields of the training that F-LD replaces: that of the student in SF_S, or of the teachers in SF_T."""
        unread = [f"teachers.{field}" for field in ("fit", "max_shard_size")]
        if self.sf_pate.variant == "sf_s":
            # Teachers read how all are trained.
            read, has_student = ("augment", "training"), self.public_data.self_label is not None
            unread = [field for field in LEARNING_FIELDS if field not in read and not has_student]
        return dict.fromkeys(unread, "sf_pate.variant")

    @property
    def reads_public(self) -> bool:  # type: ignore[override]
        return self.sf_pate.variant == "sf_t"

    @property
    def keeps_teachers(self) -> bool:  # type: ignore[override]
        """True in SF_S; the teachers of SF_T are trained, queried and discarded one by one."""
        return self.sf_pate.variant == "sf_s"

    @property
    def learner(self) -> FldConfig:
        """The settings of F-LD for the student or the teachers, with the optimiser of section ``training``."""
        common = {"optimizer": self.training.optimizer, "schedule": self.training.schedule}
        return FldConfig(**dict(self.f_ld), **common)

    def plan(self, dataset: Dataset) -> ReleasePlan:
        """Return the release plan; in SF_S the queries are private records without their attributes."""
        return super().plan(attribute_questions(dataset) if self.sf_pate.variant == "sf_s" else dataset)

    def collect_votes(
        self, dataset: Dataset, queries: Split, folder: Path, reporter: Reporter, pool: BlockPool | None = None
    ) -> VoteBatch:
        """Return the votes of all teachers; in SF_T each teacher is trained by F-LD, one after another."""
        if self.sf_pate.variant == "sf_s":
            return super().collect_votes(dataset, queries, folder, reporter, pool)
        private, count = dataset.private, self.teachers.num_teachers
        rows_T = rows_of_teachers(private, self.teachers, self.seed)
        votes_QC = np.zeros((len(queries), dataset.num_classes), dtype=np.int64)
        with reporter.stage("teachers") as advance:
            for teacher, rows in enumerate(rows_T):
                said = self._fair_vote(private.take(torch.from_numpy(rows)), queries, dataset, teacher=teacher)
                votes_QC += count_votes(said.to(torch.int16).numpy()[None], dataset.num_classes)
                advance(teacher + 1, count)
        # What trains the teachers.
        settings = (
            self.teachers.num_teachers,
            self.networks["teachers.model"].model_dump(mode="json"),
            self.learner.model_dump(mode="json"),
            self.seed,
            list(private.record_id),
        )
        digest = digest_of_records(settings, private.x, private.y, private.z)
        return VoteBatch(record_ids=queries.record_id, groups_Q=queries.z.numpy(), votes_QC=votes_QC, ensemble=digest)

    def learn(self, training: Training, labels: Labels) -> Trained:
        """Train and return the student. In SF_S it is F-LD on all private records with their released attributes, which
        some records lack."""
        if self.sf_pate.variant == "sf_t":
            return super().learn(training, labels)
        private = training.dataset.private
        with training.reporter.stage(self.method) as advance:
            fair = train_f_ld(
                training.model,
                private.x,
                private.y,
                released_groups(private, labels.labelled),
                self.learner,
                parity=parity_of(self.learner, training.dataset),
                generator=training.generator(Stream.TRAINING),
                # Of some cells no attribute may have been released.
                allow_empty_cells=True,
                on_progress=advance,
            )
        return replace(labels, model=fair.model)

    def _fair_vote(self, shard: Split, queries: Split, dataset: Dataset, *, teacher: int) -> Tensor:
        """Return the labels of the queries by one teacher, trained on ``shard``, (Q,)."""
        # Seeded by its number alone: no draw of a teacher may depend on another teacher's records.
        generator = torch.Generator().manual_seed(stream_seed(self.seed, Stream.TRAINING) + teacher)
        model = build_model(
            self.networks["teachers.model"],
            input_shape=tuple(shard.x.shape[1:]),
            num_classes=dataset.num_classes,
            generator_seed=int(torch.randint(2**62, (), generator=generator)),
        )
        # Without records a teacher votes by its first weights, which depend on no record.
        if len(shard):
            train_f_ld(
                model,
                shard.x,
                shard.y,
                shard.z,
                self.learner,
                parity=parity_of(self.learner, dataset),
                generator=generator,
                # A shard may lack a group, and a refusal would reveal that.
                allow_empty_cells=True,
            )
        return predict_logits(model, queries.x).argmax(dim=1)


def attribute_questions(dataset: Dataset) -> Dataset:
    """Return the data set for teachers that predict attributes: (x, y) as features, the attribute as label, one group.

    The queries are its public records: private records without the attribute. Records that differ only in the attribute
    share one query, because teachers vote alike on them.
    """
    private, labels_N = dataset.private, dataset.private.y
    # A table gets one more column per label, pictures (N, channels, height, width) a channel whose shade is the label.
    if private.x.ndim == 2:
        seen = functional.one_hot(labels_N, dataset.num_classes).to(private.x.dtype)
    else:
        shade_N = (labels_N * 255 // max(dataset.num_classes - 1, 1)).to(private.x.dtype)
        seen = shade_N[:, None, None, None].expand(-1, 1, *private.x.shape[2:])
    split = Split(
        # Names and units do not depend on the attribute: otherwise its change would affect two teachers, not one.
        x=torch.cat([private.x, seen], dim=1),
        y=private.z,
        z=torch.zeros_like(private.z),
        record_id=private.record_id,
        unit_id=private.unit_id,
    )
    labels = dataset.group_names
    questions = split.take(torch.from_numpy(np.unique(first_alike(private))))
    return replace(dataset, private=split, public=questions, label_names=labels, group_names=("everyone",))


def released_groups(private: Split, labelled: LabelledSet) -> torch.Tensor:
    """Return the released groups (N,) of private records; ``UNKNOWN`` for records without a released group.

    Records that differ only in the attribute share one released group.
    """
    row_of = {record_id: row for row, record_id in enumerate(private.record_id)}
    groups = torch.full((len(private),), UNKNOWN, dtype=torch.int64)
    rows = torch.tensor([row_of[record_id] for record_id in labelled.record_ids], dtype=torch.int64)
    groups[rows] = torch.from_numpy(labelled.labels)
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
