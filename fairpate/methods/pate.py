"""The PATE family: teachers vote, an aggregator releases labels, a student learns from them.

Four members differ in where demographic parity enters (FairPATE, Section 4 and Appendix B): nowhere (``pate``), while
the aggregator answers (``fairpate``), between the released labels and the student (``pate_s_pre``, Algorithm 3), in
the student's loss (``pate_s_in``). ``aggregator.gate`` is the rule of the two in the middle. What follows the released
labels is post-processing: all four cost what their queries cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from aggregator.labelling import Ballot
from fairpate.app.rundir import RunDirectory, checkpoint_folder
from fairpate.app.seeds import Stream
from fairpate.app.votes import (
    StandingVoters,
    check_teachers,
    collect_vote_batch,
    standing_teachers,
    store_votes,
    stored_votes,
)
from fairpate.config import ConfigError, PenaltyConfig
from fairpate.data import Dataset, Split
from fairpate.methods.definition import Method, Training
from fairpate.methods.preprocess import streaming_filter
from fairpate.methods.trained import Trained
from fairpate.methods.voting import GnmaxMethod, Labels
from fairpate.named_code import REMEDY, is_allowed
from fairpate.types import GateRule, VoteBatch
from fairpate.votes_config import GatedAggregatorConfig, TeachersConfig


class PateFamily(GnmaxMethod):
    """Those whose voters are teachers, trained on disjoint shards."""

    paper: ClassVar[str] = "Yaghini et al. 2023 (FairPATE), Algorithm 1; Papernot et al. 2018, arXiv 1802.08908"
    protects_persons: ClassVar[bool] = True  # all records of a person reach one teacher

    storage: str | None = Field(
        None,
        description="Private place of teachers' checkpoints that all nodes of a cluster reach and runs may share: an "
        "absolute path or a URI of pyarrow.fs (s3://, gs://). null: the run directory, which the driver writes.",
    )
    teachers: TeachersConfig = TeachersConfig()

    @field_validator("storage")
    @classmethod
    def _is_one_place_everywhere(cls, storage: str | None) -> str | None:
        if storage is not None and "://" not in storage and not Path(storage).is_absolute():
            raise ValueError(
                f"Expected an absolute path, or a URI such as s3://bucket/x, the same on all nodes, got {storage!r}"
            )
        if storage is not None and urlsplit(storage).password is not None:
            raise ValueError("Expected no password in the URI, it would be stored with the run; use the environment")
        return storage

    @property
    def keeps_teachers(self) -> bool:
        """Models of the user's own are asked and forgotten: what is kept are their votes."""
        return self.teachers.model.python is None

    @property
    def num_voters(self) -> int:
        """All teachers."""
        return self.teachers.num_teachers

    def check_data(self, dataset: Dataset) -> None:
        """ConfigError besides for more teachers than records."""
        check_teachers(dataset, self.teachers.num_teachers)
        super().check_data(dataset)

    @contextmanager
    def ballot(self, dataset: Dataset, queries: Split, training: Training) -> Iterator[Ballot]:
        """The votes of all teachers, which are kept: they are asked once."""
        # What was voted is what is charged: trained again on another machine, teachers may vote otherwise.
        votes = stored_votes(training.run, queries)
        if votes is None:
            votes = self.ask(dataset, queries, training)
            store_votes(training.run, votes)
        else:
            training.reporter.note("teachers", "votes are there already")
        yield votes

    def ask(self, dataset: Dataset, queries: Split, training: Training) -> VoteBatch:
        """Train the teachers that are missing and let all of them vote on the queries."""
        return collect_vote_batch(
            dataset,
            queries,
            self.teachers,
            seed=self.seed,
            ray=self.ray,
            checkpoint_dir=checkpoint_folder(self.storage, training.run.teachers),
            reporter=training.reporter,
        )

    def standing_voters(self, dataset: Dataset, run: RunDirectory) -> StandingVoters:
        """Teachers in actors; what the run asked them is read from its votes."""
        return standing_teachers(
            dataset,
            self.teachers,
            seed=self.seed,
            ray=self.ray,
            checkpoint_dir=checkpoint_folder(self.storage, run.teachers),
            collected=run.votes,
        )


def require_allowed(config: Method, *, allow_code: bool) -> None:
    """ConfigError for a configuration that names code, where none may run."""
    place = config.teachers.model.python if isinstance(config, PateFamily) else None
    if place is not None and not allow_code and not is_allowed():
        raise ConfigError(
            f"teachers.model.python: {place} is code that would run with your rights; {REMEDY} (from Python: "
            "allow_code=True)."
        )


class Pate(PateFamily):
    """PATE: no parity anywhere."""

    title: ClassVar[str] = "PATE"

    method: str = "pate"


class FairPate(PateFamily):
    """FairPATE: the gate stands in the aggregator."""

    title: ClassVar[str] = "FairPATE"

    method: str = "fairpate"
    aggregator: GatedAggregatorConfig = GatedAggregatorConfig()

    @property
    def gate(self) -> GateRule:
        """As configured."""
        return self.aggregator.gate


class PateSPre(PateFamily):
    """PATE-S_pre: the gate stands between PATE's labels and the student."""

    title: ClassVar[str] = "PATE-S_pre"

    method: str = "pate_s_pre"
    aggregator: GatedAggregatorConfig = GatedAggregatorConfig()

    @property
    def reads_public_groups(self) -> bool:
        """The filter does."""
        return True

    def learn(self, training: Training, labels: Labels) -> Trained:
        """From what the filter keeps."""
        dataset, labelled = training.dataset, labels.labelled
        # Of released labels and public groups alone, and so post-processing: what it drops stays charged.
        kept_N = streaming_filter(
            labelled.labels,
            labelled.groups,
            rule=self.aggregator.gate,
            num_groups=dataset.num_groups,
            num_classes=dataset.num_classes,
        )
        training.reporter.note("filter", f"{int(kept_N.sum())} of {len(kept_N)} released labels kept")
        return self.taught(training, labels, labelled.take(kept_N))


class PateSIn(PateFamily):
    """PATE-S_in: the student's loss holds the demographic-parity regulariser of public batches."""

    title: ClassVar[str] = "PATE-S_in"

    method: str = "pate_s_in"
    pate_s_in: PenaltyConfig = PenaltyConfig()

    @property
    def reads_public_groups(self) -> bool:
        """The regulariser does."""
        return True

    def learn(self, training: Training, labels: Labels) -> Trained:
        """With the regulariser."""
        from fairpate.nn.dpfr import public_penalty  # torch, as above

        public, generator = training.dataset.public, training.generator(Stream.TRAINING)
        penalty = public_penalty(public.x, public.z, self.pate_s_in, generator=generator)
        return self.taught(training, labels, labels.labelled, penalty=penalty)
