"""The PATE family: voters answer public queries, the aggregator releases labels, a student learns from them.

Four methods of the family differ in where demographic parity is enforced (FairPATE, Section 4 and Appendix B): nowhere
(``pate``), while the aggregator answers (``fairpate``), between the released labels and the student (``pate_s_pre``,
Algorithm 3), or in the student's loss (``pate_s_in``). ``aggregator.gate`` is the rule of ``fairpate`` and
``pate_s_pre``. All steps after the released labels are post-processing: each method costs what its queries cost.

Teachers are trained on shards of private records and vote on public ones (:mod:`fairpate.methods.voting`).

Shapes: N records, Q queries, C classes, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field

from aggregator.session import Ballot
from fairpate import config as configuration
from fairpate.config import AggregatorConfig, GatedAggregatorConfig
from fairpate.data import Dataset, Split
from fairpate.files import Storage, arrays_digest, open_storage
from fairpate.methods.base import NoisySum, Stream, Trained, Training, TrainsTeachers, determining_values
from fairpate.methods.defaults import multiplier_within
from fairpate.methods.learning import passing, unread_beside_rule
from fairpate.methods.noisy_counts import NoisyCounts, ServiceRule, ThresholdsConfig, table_event
from fairpate.methods.record_votes import rule_network, with_noise
from fairpate.methods.voting import NO_GATE, GnmaxMethod, ReleasedLabels, StandingVoters, choose_queries
from fairpate.privacy.mechanism_events import VoteSums, VoteTables
from fairpate.releases.directory import (
    Origin,
    ReleasedArrays,
    RunDirectory,
    RunDirectoryError,
    read_labels,
    read_release,
    read_votes,
    save_release,
    write_votes,
)
from fairpate.terminal import Reporter
from fairpate.types import GateRule, IntArray, LabelledSet, VoteBatch

if TYPE_CHECKING:
    from teachers.work import BlockPool


def _one_place_everywhere(storage: str) -> str:
    if "://" not in storage and not Path(storage).is_absolute():
        raise ValueError(
            f"Expected an absolute path, or a URI such as s3://bucket/x, the same on all nodes, got {storage!r}"
        )
    if urlsplit(storage).password is not None:
        raise ValueError(
            "Expected no password in the URI, as it would be stored with the run; set the password in the environment"
        )
    return storage


class PateFamily(GnmaxMethod, TrainsTeachers):
    """A method whose voters are teachers, trained on disjoint shards."""

    paper: ClassVar[str] = "Yaghini et al. 2023 (FairPATE), Algorithm 1; Papernot et al. 2018, arXiv 1802.08908"
    protects_persons: ClassVar[bool] = True  # all records of a person reach one teacher
    keeps_votes: ClassVar[bool] = True

    storage: Annotated[str, AfterValidator(_one_place_everywhere)] | None = Field(
        None,
        description="Private place of teachers' checkpoints that all nodes of a cluster reach and runs may share: an "
        "absolute path or a URI of pyarrow.fs (s3://, gs://). null: the run directory, which the driver writes.",
    )
    teachers: configuration.TeachersConfig = configuration.TeachersConfig()
    thresholds: ThresholdsConfig = ThresholdsConfig()

    def checkpoints(self, folder: Path) -> Path | Storage:
        return folder if self.storage is None else open_storage(self.storage)

    @property
    def num_voters(self) -> int:
        return self.teachers.num_teachers

    @property
    def shared_votes(self) -> dict[str, Any] | None:
        """The settings of teachers and queries. Cells of a comparison that differ only in mechanism, gate, budget or
        student share votes, so none of these is here. None for a method that asks in a way of its own, or other
        queries: it has votes of its own."""
        if (type(self).collect_votes, type(self).plan) != (PateFamily.collect_votes, PateFamily.plan):
            return None
        # Teachers in closed form are not trained, so settings of training may be missing.
        values = determining_values(self)
        asked = {
            **{name: values.get(name) for name in ("data", "seed", "teachers", "training", "augment", "backbone")},
            "num_queries": self.aggregator.num_queries,
            "all_are_candidates": self.queries.admission is not None,
        }
        if self.teachers.model.name == "ridge" and self.teachers.ridge.num_features is None:
            asked["epsilon"] = self.target.epsilon  # it decides how many features they read
        return asked

    def votes_to_share(
        self, dataset: Dataset, folder: Path, reporter: Reporter, pool: BlockPool | None = None
    ) -> VoteBatch:
        return self.collect_votes(dataset, choose_queries(dataset, self.queries), folder, reporter, pool)

    @property
    def fits_rule(self) -> bool:  # type: ignore[override]
        """True if a linear rule is fitted to all noisy counts or labels: those of thousands of small teachers, whose
        noise is too large for single answers (:mod:`fairpate.methods.noisy_counts`)."""
        return self.teachers.model.name == "ridge"

    @property
    def unread(self) -> dict[str, str]:
        """The disabled fields, each with the setting that disables it. A rule that is published has no training."""
        unread = super().unread
        if not self.fits_rule:
            unread["thresholds"] = "teachers.model"
        elif self.target.epsilon is None:
            unread["thresholds"] = "target.epsilon"
        return unread | unread_beside_rule(self) if self.publishes_rule else unread

    @property
    def publishes_rule(self) -> bool:
        """True if the linear rule that is fitted to all answers is the published model itself; otherwise a student
        learns from its labels."""
        plain = self.student.model.name in ("logistic", "bounded_logistic") and self.student.method == "supervised"
        return self.fits_rule and plain and self.data.embedding is not None

    def beside(self, dataset: Dataset) -> tuple[VoteTables | VoteSums, ...]:
        """Return the event of the noisy table from which thresholds are computed, if there is one."""
        target, share = self.target, self.thresholds.share
        if not self.fits_rule or target.epsilon is None or not share:
            return ()
        multiplier = multiplier_within(target.epsilon, target.delta) / math.sqrt(share)
        return (table_event(dataset.unit, noise_multiplier=multiplier),)

    def release(self, training: Training) -> ReleasedLabels:
        """Release labels or counts through the ledger, then the noisy table of private labels by score, if there is
        one."""
        labels, dataset, run = super().release(training), training.dataset, training.run
        if not (beside := self.beside(dataset)):
            return labels
        counts = self.answers_to_fit(dataset, labels)
        settings = self._settings_of_table(counts)
        if run.thresholds.exists():
            released, origin = read_release(run.thresholds)
            origin.require_settings(settings, run.thresholds)
            return replace(labels, table_KC=released.arrays["table_KC"])
        if run.statement.exists():
            raise RunDirectoryError(
                f"{run.thresholds}: missing, although {run.statement} says that it was released. Restore the file from "
                "a copy, or start a new run folder with --out and add up both epsilons."
            )
        # Charged already, with the first query (`LedgerTerms.beside`).
        with training.reporter.stage("thresholds"):
            table_KC = self.table_by_score(dataset, counts)
            origin = Origin(id="", settings=settings, pool="")
            save_release(run.thresholds, ReleasedArrays(arrays={"table_KC": table_KC}, events=beside), origin)
        return replace(labels, table_KC=table_KC)

    def _settings_of_table(self, counts: NoisyCounts) -> dict[str, Any]:
        # The table is about these counts: of other ones it would be another release, which nobody charged.
        return {"counts": arrays_digest({"counts": counts.counts_QC}), "thresholds": dict(self.thresholds)}

    def service_rule(self, dataset: Dataset, run: RunDirectory) -> ServiceRule | None:
        """Return what the two releases of a finished run say about the votes on any record; None without a table, and
        for labels, which do not say how many voted for them."""
        events = self.beside(dataset)
        if not events or self.queries.release == "label":
            return None
        if not run.thresholds.exists():
            raise RunDirectoryError(
                f"{run.thresholds}: missing, and a service of this run needs the released table; restore the file from "
                "a copy."
            )
        labelled = read_labels(run.labels)
        if labelled.counts is None or not set(labelled.record_ids) <= set(dataset.public.record_id):
            what = "no counts" if labelled.counts is None else "records that are not in the public pool"
            raise RunDirectoryError(
                f"{run.labels}: has {what}, so it is not what this run released on its data set; restore the file, and "
                "the public records, from one copy."
            )
        counts = self.counts_of(dataset, labelled)
        released, origin = read_release(run.thresholds)
        origin.require_settings(self._settings_of_table(counts), run.thresholds)
        table_KC, changed = released.arrays["table_KC"], self.public_data.self_label or self.public_data.calibration
        # A student that learned once more, or that another step changed, is not the rule.
        answers_free = self.publishes_rule and changed is None
        return counts.service_rule(dataset, events[0], table_KC, self.thresholds, answers_free=answers_free)

    def table_by_score(self, dataset: Dataset, counts: NoisyCounts, noisy_sum: NoisySum | None = None) -> IntArray:
        """Read the private records and return their noisy table (K, C) by score and label, for released ``counts``;
        ``noisy_sum`` may add the noise instead."""
        draw = partial(with_noise, source=self.source, row="bin", noisy_sum=noisy_sum)
        return counts.table(dataset, self.beside(dataset)[0], self.thresholds, draw)

    def rule(self, dataset: Dataset, labels: ReleasedLabels) -> tuple[npt.NDArray[np.float64], LabelledSet]:
        """Return the linear rule (C, W) that was fitted to all answers, and its labels of the whole pool."""
        event, counts = next(iter(self.beside(dataset)), None), self.answers_to_fit(dataset, labels)
        rule_CW, said = counts.learned(dataset, event, labels.table_KC, self.thresholds)
        return rule_CW, said.of(dataset.public)

    def said(self, training: Training, labels: ReleasedLabels) -> LabelledSet:
        """Return the labels from which the student learns: those that were released or, from small teachers, those of
        the rule that is fitted to all answers."""
        return self.rule(training.dataset, labels)[1] if self.fits_rule else labels.labelled

    def learn(self, training: Training, labels: ReleasedLabels) -> Trained:
        """Return the rule that is fitted to all answers, or a student that is trained on labels."""
        if not self.publishes_rule or training.dataset.embedding is None:
            return self.taught(training, labels, self.said(training, labels))
        architecture, network = rule_network(self.rule(training.dataset, labels)[0])
        return replace(
            labels, model=network, architecture=architecture, num_training_labels=len(labels.labelled.labels)
        )

    @contextmanager
    def ballot(self, dataset: Dataset, queries: Split, training: Training) -> Iterator[Ballot]:
        """Yield the votes of all teachers. The votes are stored in the run directory, so teachers vote only once."""
        path = training.run.votes
        # What was voted is what is charged: trained again on another machine, teachers may vote otherwise.
        if not path.exists():
            votes = self.collect_votes(dataset, queries, training.run.teachers, training.reporter)
            write_votes(votes, path)
        else:
            votes = read_votes(path)
            if tuple(votes.record_ids) != queries.record_id or votes.groups_Q.tolist() != queries.z.tolist():
                raise RunDirectoryError(
                    f"{path}: holds votes on other records than the queries of this configuration; restore the data "
                    "set's files, or start a new run folder."
                )
            training.reporter.note("teachers", "votes are there already")
        yield votes

    def standing_voters(self, dataset: Dataset, run: RunDirectory) -> StandingVoters:
        """Return all teachers, in Ray actors, as voters of a service; votes on the run's own queries are read from its
        folder."""
        from teachers.ray_pool import ServingTeachers, open_pool  # torch

        with open_pool(self.ray) as pool:
            ensemble = self.train_teachers(dataset, run.teachers, pool)
        # After the pool is closed: its actors used the CPUs that the serving actors need.
        voters = ServingTeachers(ensemble, self.ray)
        return StandingVoters(
            ensemble=ensemble.digest,
            ask=lambda features, _: voters.votes(features),
            collected=read_votes(run.votes),
            are_answering=voters.are_answering,
            close=voters.close,
        )


class Pate(PateFamily):
    """PATE, without a fairness constraint."""

    title: ClassVar[str] = "PATE"
    colour: ClassVar[int] = 4

    method: str = "pate"
    aggregator: AggregatorConfig = AggregatorConfig()


class FairPate(PateFamily):
    """FairPATE: the aggregator enforces parity while it answers."""

    title: ClassVar[str] = "FairPATE"
    colour: ClassVar[int] = 0
    voters: ClassVar[str] = "models trained on shards"

    method: str = "fairpate"
    aggregator: GatedAggregatorConfig = GatedAggregatorConfig()


class PateSPre(PateFamily):
    """PATE-S_pre: a filter enforces parity on PATE's released labels before the student learns from them."""

    title: ClassVar[str] = "PATE-S_pre"
    colour: ClassVar[int] = 5

    reads_public_groups: ClassVar[bool] = True  # the filter reads them
    publishes_rule: ClassVar[bool] = False
    gate: ClassVar[GateRule] = NO_GATE  # the configured rule is that of the filter

    method: str = "pate_s_pre"
    aggregator: GatedAggregatorConfig = GatedAggregatorConfig()

    def learn(self, training: Training, labels: ReleasedLabels) -> Trained:
        """Train a student on the released labels that the demographic-parity filter keeps, and return it."""
        said = self.said(training, labels)
        kept = passing(said, GateRule(**dict(self.aggregator.gate)), training.dataset)
        training.reporter.note("filter", f"{len(kept.labels)} of {len(said.labels)} labels kept")
        return self.taught(training, labels, kept)


class PateSIn(PateFamily):
    """PATE-S_in: a demographic-parity regulariser on public batches is added to the student's loss."""

    title: ClassVar[str] = "PATE-S_in"
    colour: ClassVar[int] = 3

    reads_public_groups: ClassVar[bool] = True  # the regulariser reads them
    publishes_rule: ClassVar[bool] = False

    method: str = "pate_s_in"
    aggregator: AggregatorConfig = AggregatorConfig()
    pate_s_in: configuration.PenaltyConfig = configuration.PenaltyConfig()

    def learn(self, training: Training, labels: ReleasedLabels) -> Trained:
        """Train a student on the released labels, with the demographic-parity regulariser in its loss, and return
        it."""
        from fairpate.nn.fit import public_penalty  # a configuration is read without torch

        public, generator = training.dataset.public, training.generator(Stream.TRAINING)
        penalty = public_penalty(public.x, public.z, self.pate_s_in, generator=generator)
        return self.taught(training, labels, self.said(training, labels), penalty=penalty)
