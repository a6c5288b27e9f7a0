"""The PATE family: voters answer public queries, the aggregator releases labels, a student learns from them.

With ``target.epsilon`` both noises of ``aggregator.mechanism`` are multiplied by the least factor at which the queries
fit, for any votes. Without a target the noise is as configured, and ``aggregator.budget`` may limit what is spent. Its
kind ``data_dependent``, as in the papers, stops when the data-dependent privacy cost reaches the limit: the moment of
the stop leaks, so the price of the queries submitted is published, and the statement remarks it.

Four members differ in where demographic parity enters (FairPATE, Section 4 and Appendix B): nowhere (``pate``), while
the aggregator answers (``fairpate``), between the released labels and the student (``pate_s_pre``, Algorithm 3), in
the student's loss (``pate_s_in``). ``aggregator.gate`` is the rule of the two in the middle. All that follows the
released labels is post-processing: the four cost what their queries cost.

FairPATE has two filters that drop records for parity before a model learns. ``P_pre`` (Algorithm 3) is a stream:
running counts decide record by record. On released labels it is post-processing and free; it is the one gate of
:mod:`fairpate.fairness.gate` (CF-GNMax and IDP3 are the others). The filter of Theorem 1 (Appendix) sorts: per label it
keeps every record of the smaller group, m of them, and the first ``m + floor(2 gamma m / (1 - gamma))`` of the larger
in a fixed public order. In front of an (epsilon, delta)-DP mechanism, with two groups, it gives
(K epsilon, K e^(K epsilon) delta) for ``K = 2 + ceil(2 gamma / (1 - gamma))``, by group privacy: one record added or
removed changes at most K records that are kept. The theorem does NOT cover the streaming filter, where one record can
flip any number of later decisions; never put :func:`streaming_filter` in front of private training.

Deviations from the paper: Theorem 1's displayed inequality has two terms swapped, and its ratio is a group's share
within the label, not a demographic-parity rate. K is computed in fractions, because in floating point
2 * 0.9 / (1 - 0.9) > 18.

Shapes: N records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator

from aggregator.mechanism import Mechanism, mechanism_of
from aggregator.session import Ballot, mechanism_within
from fairpate.config import (
    AggregatorConfig,
    AskedConfig,
    BudgetConfig,
    ConfigError,
    GateConfig,
    GatedAggregatorConfig,
    GnmaxConfig,
    Noise,
    PenaltyConfig,
    QueriesConfig,
    QueriesTarget,
    RayConfig,
    TeachersConfig,
)
from fairpate.data import Dataset, Split
from fairpate.fairness.gate import filter_stream
from fairpate.files import open_storage
from fairpate.methods.base import ExpectedVotes, Method, Progress, Stream, Trained, Training
from fairpate.methods.label_queries import (
    Labels,
    ReleasePlan,
    StandingVoters,
    VoteCounter,
    check_budget,
    choose_queries,
    fit_student,
    passing,
    release_labels,
    shard_reader,
)
from fairpate.run.context import RunDirectory, RunDirectoryError, read_votes, write_votes
from fairpate.terminal import Reporter
from fairpate.types import GateRule, LabelledSet, VoteBatch

if TYPE_CHECKING:
    from teachers.ensemble import BlockPool, Ensemble

NO_GATE = GateRule(max_disparity=math.inf, min_count=0)


class VotingMethod(Method):
    """A method whose voters answer public queries. A subclass defines who votes and how the student learns.

    ``votes_on_anything``: the voters of a service can also vote on records that are not in the pool.
    ``keeps_teachers``: a service may ask them further queries.
    """

    asks_teachers: ClassVar[bool] = True
    has_student: ClassVar[bool] = True
    releases_model: ClassVar[bool] = False
    reads_groups: ClassVar[bool] = False
    reads_public: ClassVar[bool] = True  # public records are the queries
    votes_on_anything: ClassVar[bool] = True
    keeps_teachers: ClassVar[bool] = True

    target: QueriesTarget = QueriesTarget()
    noise: Noise = Field("os_entropy", description="`seeded` reproduces a run and gives no privacy.")
    ray: RayConfig = RayConfig()
    aggregator: AskedConfig = AskedConfig()

    @property
    def reads_public_groups(self) -> bool:
        """True if a gate or a calibration reads them."""
        return self.gate != NO_GATE or self.public_data.calibration is not None

    @property
    def leaves_room(self) -> bool:
        """True if the budget may have room for queries beyond the run's own. Noise that is calibrated to a target
        leaves none, unless a share is kept."""
        return self.target.epsilon is None or self.queries.keep > 0

    @property
    def num_voters(self) -> int:
        """The largest number of votes on one query."""
        raise NotImplementedError

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that releases labels of votes, with the noise as configured."""
        raise NotImplementedError

    @property
    def queries(self) -> QueriesConfig:
        """The queries, in their order and without a budget of their own where the method has no such settings."""
        asked = self.aggregator
        if isinstance(asked, QueriesConfig):
            return asked
        return QueriesConfig(num_queries=asked.num_queries)

    @property
    def gate(self) -> GateRule:
        """The fairness rule that the aggregator applies to its answers."""
        gate: GateConfig | None = getattr(self.aggregator, "gate", None)
        return NO_GATE if gate is None else gate.rule

    def check(self) -> None:
        """Raise ConfigError for a target and a budget at once."""
        if self.target.epsilon is not None and self.queries.budget is not None:
            raise ConfigError("aggregator.budget: target.epsilon is the budget; leave one of them out.")
        if self.queries.keep and self.target.epsilon is None:
            raise ConfigError(
                "aggregator.keep: a share of target.epsilon, and there is none; set it, or leave room with "
                "aggregator.budget instead."
            )

    def plan(self, dataset: Dataset) -> ReleasePlan:
        """Everything that is fixed before the first vote. Noise is as configured, or scaled to the target."""
        budget, target, mechanism = self.queries.budget, self.target, self.mechanism
        if target.epsilon is not None:
            mechanism = mechanism_within(
                mechanism,
                target_epsilon=target.epsilon,
                target_delta=target.delta,
                # A public number of public records: noise that is scaled to it reveals nothing.
                num_queries=self.planned_queries(dataset),
            )
            # The target limits the ledger as well: a service that asks after the run may not pass it.
            budget = BudgetConfig(epsilon=target.epsilon)
        return ReleasePlan(method=self, mechanism=mechanism, budget=budget, unit=self.unit_of(dataset))

    def planned_queries(self, dataset: Dataset) -> int:
        """The number of queries that the target pays for: the run's own, and those that are kept for later."""
        own = self.aggregator.num_queries or len(choose_queries(dataset, self.queries))
        # Rounded as the decimal that it prints: 1 - 0.3 is a little less than 0.7.
        return math.ceil(own / (1 - Fraction(repr(self.queries.keep))))

    def queried(self, dataset: Dataset) -> Dataset:
        """The data set as the teachers see it: their training records, and the queries as public records."""
        return dataset

    def check_data(self, dataset: Dataset) -> None:
        """Raise ConfigError for a release that is impossible, before any work."""
        super().check_data(dataset)
        self.num_fitting(dataset)

    def num_fitting(self, dataset: Dataset) -> int:
        """Number of queries that the budget has room for. ConfigError if it has none."""
        asked = self.queried(dataset)
        return check_budget(self.plan(asked), asked, choose_queries(asked, self.queries))

    def voting(self, dataset: Dataset, num_records: int) -> ExpectedVotes:  # noqa: ARG002 - as many voters for any number
        """The votes to expect: all voters vote on every query."""
        plan = self.plan(dataset)
        noise = float(plan.mechanism.parameters["noise_stddev_votes"])
        return ExpectedVotes(
            votes=self.num_voters, noise_stddev_votes=noise, labels=len(choose_queries(dataset, self.queries))
        )

    def release(self, training: Training) -> Labels:
        """Release labels within the target or budget. Runs of the same folder return the same release."""
        dataset = self.queried(training.dataset)
        plan = self.plan(dataset)
        queries = choose_queries(dataset, self.queries)
        with self.ballot(dataset, queries, training) as votes:
            return release_labels(plan, dataset, queries, votes, training)

    def ballot(self, dataset: Dataset, queries: Split, training: Training) -> AbstractContextManager[Ballot]:
        """The queries with their voters. The voters stay available inside the context."""
        raise NotImplementedError

    def standing_voters(self, dataset: Dataset, run: RunDirectory) -> StandingVoters:
        """Voters of a finished run that answer further queries of a service, inside a running Ray."""
        raise NotImplementedError

    def train(self, training: Training) -> Trained:
        """Release labels, then learn from them."""
        return self.learn(training, replace(self.release(training), spending=None))

    def learn(self, training: Training, labels: Labels) -> Trained:
        """Train a student on the labels; this costs no privacy."""
        return self.taught(training, labels, labels.labelled)

    def taught(self, training: Training, labels: Labels, kept: LabelledSet, **options: Any) -> Trained:
        """Train a student on the labels ``kept`` and return ``labels`` with this student; ``options`` as
        :func:`fit_student` takes them."""
        # Runs without a target have always drawn the student's first weights from its own stream.
        if self.target.epsilon is not None or self.public_data.pretrain is not None:
            options["initial_model"] = training.model
        options["augmentation"] = self.augment
        network = fit_student(
            self.student_training, training.dataset, kept, training.reporter, seed=self.seed, **options
        )
        return replace(labels, model=network, num_training_labels=len(kept.labels))


class GnmaxMethod(VotingMethod):
    """A method whose voters have one vote each and whose labels are released by Confident-GNMax."""

    aggregator: GnmaxConfig = GnmaxConfig()

    @property
    def mechanism(self) -> Mechanism:
        return mechanism_of(self.aggregator.mechanism, self.queries.release)


streaming_filter = filter_stream
"""P_pre on released labels: True where the record is kept, in stream order."""


def preprocessing_factor(max_disparity: float | Fraction) -> int:
    """K of Theorem 1 for the sorted filter: an exact integer; a float means the decimal that it prints as."""
    return 2 + math.ceil(_share(max_disparity))


def cost_behind_sorted_filter(epsilon: float, delta: float, *, max_disparity: float | Fraction) -> tuple[float, float]:
    """(epsilon, delta) of an (``epsilon``, ``delta``)-DP mechanism that sees only what the sorted filter keeps."""
    if not 0 <= epsilon < math.inf or not 0 <= delta < 1:
        raise ValueError(f"Expected a finite epsilon >= 0 and 0 <= delta < 1, got {epsilon} and {delta}.")
    factor = preprocessing_factor(max_disparity)
    try:
        # As the theorem states it; group privacy alone gives e^((K - 1) epsilon), which is less.
        return factor * epsilon, min(1.0, factor * math.exp(factor * epsilon) * delta)
    # A factor too large for a float: any delta above 0 becomes 1, and 0 stays 0.
    except OverflowError:
        return factor * epsilon, 1.0 if delta else 0.0


def target_behind_sorted_filter(
    epsilon: float, delta: float, *, max_disparity: float | Fraction
) -> tuple[float, float]:
    """The largest (epsilon, delta) of a mechanism behind the filter that costs (``epsilon``, ``delta``) with it."""
    # The cost is computed for its checks alone. K changes at epsilon / K together multiply delta by K e^epsilon.
    factor, _ = preprocessing_factor(max_disparity), cost_behind_sorted_filter(epsilon, delta, max_disparity=0)
    return epsilon / factor, delta * math.exp(-epsilon) / factor


def sorted_filter(
    labels_N: npt.ArrayLike, groups_N: npt.ArrayLike, order_N: npt.ArrayLike, *, max_disparity: float | Fraction
) -> npt.NDArray[np.bool_]:
    """True where the record is kept. ``order_N`` are public ranks that depend on the record alone, all different.

    ValueError for groups other than 0 and 1, for lengths that differ and for equal ranks.
    """
    labels, groups, order = np.asarray(labels_N), np.asarray(groups_N), np.asarray(order_N)
    if not len(labels) == len(groups) == len(order):
        raise ValueError(f"Expected equal lengths, got {len(labels)}, {len(groups)} and {len(order)}.")
    if not np.isin(groups, (0, 1)).all():
        raise ValueError(f"Expected groups 0 and 1: the theorem has two, got {np.unique(groups)}.")
    if len(np.unique(order)) < len(order):
        raise ValueError("Expected an order without ties: equal ranks let the rows' positions decide.")
    share = _share(max_disparity)
    kept = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        members = [np.flatnonzero((labels == label) & (groups == group)) for group in (0, 1)]
        smaller = min(len(rows) for rows in members)
        # `share` is an exact fraction: rounding could move the limit by a record.
        limit = smaller + math.floor(share * smaller)
        for rows in members:
            # The first of a fixed order: one record more changes at most K that are kept, where a running count has no
            # bound.
            kept[rows[np.argsort(order[rows])][:limit]] = True
    return kept


def _share(max_disparity: float | Fraction) -> Fraction:
    """2 gamma / (1 - gamma), exactly."""
    if not 0 <= max_disparity < 1:
        raise ValueError(f"Expected 0 <= max_disparity < 1, got {max_disparity}.")
    # As the decimal that it prints: the binary 0.8 is a little larger, and would make K 11 instead of 10.
    gamma = max_disparity if isinstance(max_disparity, Fraction) else Fraction(repr(float(max_disparity)))
    return 2 * gamma / (1 - gamma)


def check_teachers(dataset: Dataset, num_teachers: int) -> None:
    """Raise ConfigError for more teachers than private records, or persons. It does not reveal how many there are."""
    if num_teachers > dataset.private.num_protected:
        raise ConfigError(
            f"teachers.num_teachers: {num_teachers} teachers, but fewer private {dataset.unit}s in {dataset.name}, so "
            "that most would learn from nothing; lower it."
        )


class PateFamily(GnmaxMethod):
    """A method whose voters are teachers, trained on disjoint shards."""

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
    def num_voters(self) -> int:
        return self.teachers.num_teachers

    def check_data(self, dataset: Dataset) -> None:
        """Raise ConfigError also for more teachers than records."""
        check_teachers(dataset, self.teachers.num_teachers)
        super().check_data(dataset)

    @contextmanager
    def ballot(self, dataset: Dataset, queries: Split, training: Training) -> Iterator[Ballot]:
        """Yield the votes of all teachers. The votes are stored in the run directory, so teachers vote only once."""
        path = training.run.votes
        # What was voted is what is charged: trained again on another machine, teachers may vote otherwise.
        if not path.exists():
            votes = self.ask(dataset, queries, training)
            write_votes(votes, path)
        else:
            votes = read_votes(path)
            if tuple(votes.record_ids) != queries.record_id or votes.groups_Q.tolist() != queries.z.tolist():
                raise RunDirectoryError(
                    f"{path}: votes on other records than this configuration asks about; restore the data set's files, "
                    "or start a new run folder."
                )
            training.reporter.note("teachers", "votes are there already")
        yield votes

    def ask(self, dataset: Dataset, queries: Split, training: Training) -> VoteBatch:
        """The votes of all teachers on the queries; private."""
        return self.collect_votes(dataset, queries, training.run.teachers, training.reporter)

    def collect_votes(
        self, dataset: Dataset, queries: Split, folder: Path, reporter: Reporter, pool: BlockPool | None = None
    ) -> VoteBatch:
        """Train the teachers that are missing and let all of them vote on the queries; private.

        ``folder`` holds their checkpoints unless a storage is configured. ``pool`` None opens one for the purpose.
        """
        # Teachers are networks, and commands that read votes or configurations need no torch; so below.
        from teachers.ensemble import collect_votes
        from teachers.ray_pool import open_pool

        with open_pool(self.ray) if pool is None else nullcontext(pool) as workers:
            with reporter.stage("teachers") as advance:
                ensemble = self.train_teachers(dataset, folder, workers, on_progress=advance)
            with reporter.stage("votes") as advance:
                votes_QC = collect_votes(ensemble, queries.x, pool=workers, on_progress=advance)
        return VoteBatch(
            record_ids=queries.record_id, groups_Q=queries.z.numpy(), votes_QC=votes_QC, ensemble=ensemble.digest
        )

    def train_teachers(
        self, dataset: Dataset, folder: Path, pool: BlockPool, on_progress: Progress | None = None
    ) -> Ensemble:
        """Train the teachers whose checkpoints are missing."""
        from teachers.ensemble import train_ensemble

        return train_ensemble(
            dataset.private,
            self.teachers_training(self.teachers),
            num_classes=dataset.num_classes,
            seed=self.seed,
            checkpoint_dir=folder if self.storage is None else open_storage(self.storage),
            augment=self.augment,
            pool=pool,
            on_progress=on_progress,
            read=shard_reader(dataset, self.ray),
        )

    def standing_voters(self, dataset: Dataset, run: RunDirectory) -> StandingVoters:
        """All teachers, in actors. Votes on the run's own queries are read from its table."""
        from teachers.ray_pool import ServingTeachers, open_pool

        with open_pool(self.ray) as pool:
            ensemble = self.train_teachers(dataset, run.teachers, pool)
        # After the pool is closed, whose actors held the CPUs that these need.
        voters = ServingTeachers(ensemble, self.ray)
        return StandingVoters(
            ensemble=ensemble.digest,
            count_votes=VoteCounter(read_votes(run.votes), voters.votes),
            try_vote=voters.votes,
            are_answering=voters.are_answering,
            close=voters.close,
        )


class Pate(PateFamily):
    """PATE, without a fairness constraint."""

    title: ClassVar[str] = "PATE"

    method: str = "pate"
    aggregator: AggregatorConfig = AggregatorConfig()


class FairPate(PateFamily):
    """FairPATE: the aggregator enforces parity while it answers."""

    title: ClassVar[str] = "FairPATE"

    method: str = "fairpate"
    aggregator: GatedAggregatorConfig = GatedAggregatorConfig()


class PateSPre(PateFamily):
    """PATE-S_pre: a filter between PATE's labels and the student enforces parity."""

    title: ClassVar[str] = "PATE-S_pre"

    reads_public_groups: ClassVar[bool] = True  # the filter reads them
    gate: ClassVar[GateRule] = NO_GATE  # the configured rule is that of the filter

    method: str = "pate_s_pre"
    aggregator: GatedAggregatorConfig = GatedAggregatorConfig()

    def learn(self, training: Training, labels: Labels) -> Trained:
        """Train a student on the labels that the filter keeps."""
        kept = passing(labels.labelled, self.aggregator.gate.rule, training.dataset)
        training.reporter.note("filter", f"{len(kept.labels)} of {len(labels.labelled.labels)} released labels kept")
        return self.taught(training, labels, kept)


class PateSIn(PateFamily):
    """PATE-S_in: the demographic-parity regulariser of public batches is part of the student's loss."""

    title: ClassVar[str] = "PATE-S_in"

    reads_public_groups: ClassVar[bool] = True  # the regulariser reads them

    method: str = "pate_s_in"
    aggregator: AggregatorConfig = AggregatorConfig()
    pate_s_in: PenaltyConfig = PenaltyConfig()

    def learn(self, training: Training, labels: Labels) -> Trained:
        """Train a student on the labels, with the regulariser in its loss."""
        from fairpate.nn.fit import public_penalty  # torch, as above

        public, generator = training.dataset.public, training.generator(Stream.TRAINING)
        penalty = public_penalty(public.x, public.z, self.pate_s_in, generator=generator)
        return self.taught(training, labels, labels.labelled, penalty=penalty)
