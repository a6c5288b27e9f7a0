"""Private-kNN: the nearest records of a fresh secret sample vote (Zhu, Yu, Chandraker and Wang, CVPR 2020).

No teacher is trained. For each public query every private record enters a fresh sample with ``sampling_rate``, the
``num_neighbours`` nearest of the sample vote for their own labels (:mod:`teachers.neighbours`), and the noisy argmax of
the counts is released (:mod:`aggregator.mechanism`), after an optional check of the largest count. Ledger, gate,
student and service are those of :mod:`fairpate.methods.pate`.

Adding or removing a record changes two counts by one each, and only if the record was sampled. If the data set names
persons, persons are sampled, and a person votes only by its nearest record. There is one event per query, whose cost
holds for any votes (:class:`fairpate.privacy.mechanism_events.NeighbourVotes`) and is published. The number of queries
is fixed beforehand: its loss distribution is tighter than a privacy filter.

Records are embedded by :mod:`fairpate.data.embedding`, which is fitted to public records only. Coordinates are rounded
to whole steps, so that distances are exact.

Deviations from the paper: noise is sampled exactly, and samples come from the operating system's entropy; the cost is
computed from the loss distribution of discrete noise, where the paper has Renyi curves; the embedding is fixed, where
the paper's network learns from labels that were released.

Shapes: N private records, M public ones, Q queries, C classes, D or E coordinates.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from aggregator.mechanism import Mechanism, NearestCounts, NearestRecords
from aggregator.session import Ballot
from fairpate.config import BudgetConfig, ConfigError, Count, Disables, GatedQueriesConfig
from fairpate.data import Dataset, Split
from fairpate.data.embedding import Embed, SpaceConfig, clusters_of
from fairpate.lazy import Later, torch
from fairpate.methods.base import ExpectedVotes, Stream, Trained, Training
from fairpate.methods.learning import passing
from fairpate.methods.voting import QueryPlan, ReleasedLabels, StandingVoters, VotingMethod, digest_of_records
from fairpate.privacy import accountant
from fairpate.releases.directory import RunDirectory
from fairpate.types import MAX_THRESHOLD_VOTES, IntArray, LabelledSet, stream_seed

if TYPE_CHECKING:
    from teachers import ensemble, neighbours, ray_pool
else:
    # Both import torch, and a configuration is read without it.
    ensemble = Later("teachers.ensemble")
    neighbours, ray_pool = Later("teachers.neighbours"), Later("teachers.ray_pool")

_AT_ONCE = 1024
_STEPS = 2**15
"""The number of steps to which the pool's largest coordinate is rounded."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeCoordinates:
    """Maps records to whole-number coordinates, for which distances are computed exactly.

    A record is embedded by a rule fitted to public records, and its coordinates are rounded to whole numbers of steps.
    Coordinates far beyond those of public records are clipped.
    """

    embed: Embed
    steps: float

    @classmethod
    def of(cls, pool: torch.Tensor, space: SpaceConfig, *, seed: int) -> WholeCoordinates:
        """Fit the embedding to the public ``pool`` (M, ...). ``seed`` determines the start of the iterative solver for
        eigenvectors, if ``space`` is a neighbourhood graph.
        """
        space = space.model_copy(update={"num_components": min(space.num_components, neighbours.MOST_COORDINATES)})
        # Without steps of its own: coordinates are rounded once, below.
        embed = space.fitted_to(pool, seed=seed)
        # Of the public pool alone: the scale of the grid must not depend on private records.
        largest = max(float(embed(part).abs().max()) for part in torch.split(pool, _AT_ONCE))
        # A pool of equal records has no extent.
        return cls(embed=embed, steps=_STEPS / (largest or 1.0))

    def __call__(self, x: torch.Tensor) -> neighbours.Coordinates:
        """Return the coordinates of records (N, ...) as whole numbers of steps, one row per record."""
        parts = [self.embed(part).double().numpy() for part in torch.split(x, _AT_ONCE)]
        # A private record may lie far outside the pool, where sums of squares would no longer be exact.
        farthest = neighbours.LARGEST_COORDINATE
        whole = np.clip(np.rint(np.concatenate(parts) * self.steps), -farthest, farthest)
        return whole.astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """Clusters of public records: the record nearest to each centre (K,), and the cluster of each record (M,)."""

    typical_K: IntArray
    cluster_M: IntArray

    @classmethod
    def of(cls, coordinates_MD: neighbours.Coordinates, count: int, *, seed: int) -> Clusters:
        """Find ``count`` clusters by k-means. ConfigError for more clusters than different coordinates."""
        found = clusters_of(coordinates_MD.astype(np.float64), count, seed=seed, field="aggregator.num_queries")
        cluster_M = found.labels_.astype(np.int64)
        squared_M = np.square(coordinates_MD - found.cluster_centers_[cluster_M]).sum(axis=1)
        # Among a cluster's own records: one of another cluster may be nearer to its centre.
        nearest_first = np.lexsort((squared_M, cluster_M))
        _, first_K = np.unique(cluster_M[nearest_first], return_index=True)
        return cls(typical_K=nearest_first[first_K], cluster_M=cluster_M)


# A pool of thousands takes a minute to embed, and a run asks for it at each stage: the last ones are kept.
_COORDINATES: dict[tuple[object, ...], WholeCoordinates] = {}
_CLUSTERS: dict[tuple[object, ...], Clusters] = {}
_LARGEST_EPSILON, _LARGEST_CONFIGURED = 20, 100
_NO_LABEL = -1
NoiseOfVotes = Annotated[float, Field(gt=0, le=MAX_THRESHOLD_VOTES)]


class PrivateKnnConfig(SpaceConfig):
    """Settings of the voters and of the noise. With a target epsilon, the noise on counts and on the threshold check is
    scaled by one factor, so that all queries together meet the target.
    """

    sampling_rate: float = Field(
        0.1, gt=0, le=1, description="Probability that a query samples a given private record, or person."
    )
    num_neighbours: Count = Field(
        50, description="Number of nearest sampled records that vote; all of them if the sample is smaller."
    )
    noise_stddev_votes: NoiseOfVotes = Field(10.0, description="Standard deviation of the noise on each count.")
    threshold: float | None = Field(
        None,
        ge=-MAX_THRESHOLD_VOTES,
        le=MAX_THRESHOLD_VOTES,
        description="Smallest noisy number of votes for which a label is released; null: no threshold.",
    )
    threshold_stddev_votes: NoiseOfVotes = Field(
        20.0, description="Standard deviation of the noise in the threshold check."
    )
    disables: ClassVar[Disables] = {("threshold", None): ("threshold_stddev_votes",)}
    queries: Literal["first", "typical"] = Field(
        "first",
        description="`first`: query the first public records. `typical`: query one record of each of "
        "aggregator.num_queries clusters; the student then learns its label for all records of the "
        "cluster.",
    )


class PrivateKnn(VotingMethod):
    """Private-kNN: for each query, the nearest records in a random sample of private records vote. It protects one
    record or person, added or removed.
    """

    protects_persons: ClassVar[bool] = True
    rate_tells_size: ClassVar[bool] = False
    title: ClassVar[str] = "Private-kNN"
    paper: ClassVar[str] = "Zhu, Yu, Chandraker and Wang, CVPR 2020"
    family: ClassVar[str] = "records"
    colour: ClassVar[int] = 1
    voters: ClassVar[str] = "nearest records of a secret sample"

    method: str = "private_knn"
    private_knn: PrivateKnnConfig = PrivateKnnConfig()
    aggregator: GatedQueriesConfig = GatedQueriesConfig()

    @property
    def num_voters(self) -> int:
        return self.private_knn.num_neighbours

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that releases a label from counts of neighbours, with the noise as configured."""
        settings = self.private_knn
        kind = NearestCounts if self.queries.release == "counts" else NearestRecords
        others = settings.model_dump(exclude={"threshold", "embedding", "num_components", "queries"})
        return kind(threshold=-math.inf if settings.threshold is None else settings.threshold, **others)

    def check(self) -> None:
        """Raise ConfigError as the parent class does, for a target epsilon above 20, and for a data-dependent budget.

        Typical queries, one per cluster of public records, need ``aggregator.num_queries`` and exclude
        ``aggregator.admission``.
        """
        super().check()
        is_typical = self.private_knn.queries == "typical"
        if is_typical and self.aggregator.num_queries is None:
            raise ConfigError(
                "private_knn.queries: typical needs aggregator.num_queries, the number of clusters, which is not set; "
                "set it, or set private_knn.queries=first."
            )
        if is_typical and self.queries.admission is not None:
            raise ConfigError(
                "aggregator.admission: typical queries are chosen already, one per cluster; leave it out."
            )
        if self.target.epsilon is not None and self.target.epsilon > _LARGEST_EPSILON:
            what = f"the cost of neighbours is computed up to {_LARGEST_EPSILON}, got {self.target.epsilon:g}"
            raise ConfigError(f"target.epsilon: {what}; lower it.")
        if self.queries.budget is not None and self.queries.budget.kind == "data_dependent":
            raise ConfigError(
                "aggregator.budget.accept_leak: expected false: this method's cost never depends on votes; leave it "
                "out."
            )

    def check_data(self, dataset: Dataset) -> None:
        """Raise ConfigError as the parent class does, and for so little noise that epsilon exceeds 100, where loss
        distributions are too long to compose."""
        super().check_data(dataset)
        plan = self.plan(dataset)
        (event,) = plan.worst_case(plan.count_fitting())
        # By the Renyi curve, which is quick at any noise: the loss distribution would fill memory before it could
        # refuse.
        price = accountant.epsilon([event], target_delta=self.target.delta).epsilon
        if price > _LARGEST_CONFIGURED:
            raise ConfigError(
                f"private_knn.noise_stddev_votes: at {self.private_knn.noise_stddev_votes:g} the queries cost epsilon "
                f"{price:.3g}, and at most {_LARGEST_CONFIGURED} is supported; raise the noise, or "
                "lower aggregator.num_queries."
            )

    def voting(self, dataset: Dataset, num_records: int) -> ExpectedVotes:
        """Return an estimate of how clearly the votes of sampled records decide a label. If there is one query for each
        cluster of public records, all records of the clusters get labels."""
        voting = super().voting(dataset, num_records)
        sampled = max(1, round(self.private_knn.sampling_rate * num_records))
        labels = voting.labels if self.private_knn.queries == "first" else len(dataset.public)
        return replace(voting, votes=min(voting.votes, sampled), labels=labels)

    def learn(self, training: Training, labels: ReleasedLabels) -> Trained:
        """Train a student on the labels and return it.

        With typical queries (one per cluster of public records), each label is given to all records of the query's
        cluster that pass the gate.
        """
        if self.private_knn.queries == "first":
            return super().learn(training, labels)
        taught = self.taught(training, labels, self._of_clusters(training.dataset, labels.labelled))
        # The number of released labels: copies to the other records of a cluster are not counted.
        return replace(taught, num_training_labels=len(labels.labelled.labels))

    def _of_clusters(self, dataset: Dataset, labelled: LabelledSet) -> LabelledSet:
        """Give the label of each cluster's typical record to all records of the cluster; return the labels that pass
        the demographic-parity gate."""
        public, clusters = dataset.public, self._clusters(dataset.public)
        row_of = {name: row for row, name in enumerate(labelled.record_ids)}
        row_K = np.array([row_of.get(public.record_id[row], _NO_LABEL) for row in clusters.typical_K.tolist()])
        row_M = row_K[clusters.cluster_M]
        (known,) = (row_M != _NO_LABEL).nonzero()
        rows = row_M[known]
        taught = LabelledSet(
            record_ids=tuple(public.record_id[row] for row in known.tolist()),
            labels=labelled.labels[rows],
            groups=public.z.numpy()[known],
            chances=None if labelled.chances is None else labelled.chances[rows],
        )
        # The gate saw the typical records alone: copies go to members of other groups, and pass it anew.
        return passing(taught, self.gate, dataset)

    def _clusters(self, public: Split) -> Clusters:
        assert self.aggregator.num_queries is not None
        settings, seed = self.private_knn, stream_seed(self.seed, Stream.TRAINING) % 2**32  # as for places
        rows = hashlib.blake2b(public.x.numpy().tobytes()).digest()
        key = (rows, settings.embedding, settings.num_components, self.aggregator.num_queries, seed)
        if (found := _CLUSTERS.get(key)) is None:
            found = Clusters.of(self._places(public)(public.x), self.aggregator.num_queries, seed=seed)
            _CLUSTERS.clear()
            _CLUSTERS[key] = found
        return found

    def plan(self, dataset: Dataset) -> QueryPlan:
        """Return the release plan, in which the number of queries is fixed unless a budget is configured.

        Typical queries (one per cluster of public records), which are chosen from public features only, are moved to
        the front of the public records.
        """
        settings = self.aggregator
        if self.private_knn.queries == "typical":
            typical_K = self._clusters(dataset.public).typical_K
            others = np.setdiff1d(np.arange(len(dataset.public)), typical_K)
            dataset = replace(dataset, public=dataset.public.take(np.concatenate([typical_K, others]).tolist()))
        plan = super().plan(dataset)
        if settings.budget is not None:
            return plan
        # Composed loss distributions are no filter: they price a number of queries that is fixed before the first.
        return replace(plan, budget=BudgetConfig(max_queries=self.planned_queries(plan.queries)))

    @property
    def leaves_room(self) -> bool:  # type: ignore[override]
        return self.queries.budget is not None or self.queries.keep > 0

    @contextmanager
    def ballot(self, dataset: Dataset, queries: Split, training: Training) -> Iterator[Ballot]:
        """Yield the queries as a ballot whose votes are drawn on request, each from a fresh sample.

        Private records are embedded at the first query without a stored answer.
        """
        with ExitStack() as opened:
            # Once, and only for a query without a stored answer: embedding private records takes a while.
            @cache
            def found() -> tuple[WholeCoordinates, neighbours.Neighbourhood]:
                if self.ray.num_actors != 0:
                    opened.enter_context(ray_pool.start_ray(self.ray))
                with training.reporter.stage("neighbours"):
                    places = self._places(dataset.public)
                    return places, opened.enter_context(closing(self._neighbourhood(dataset, places)))

            def ask(x: torch.Tensor, names: Sequence[str]) -> IntArray:
                places, neighbourhood = found()
                return neighbours.label_counts(neighbourhood.nearest(places(x), names), dataset.num_classes)

            asked: dict[str, Any] = {"record_ids": queries.record_id, "groups_Q": queries.z.numpy(), "x": queries.x}
            yield SampledVotes(**asked, ensemble=self._digest(dataset.private), ask=ask)

    def standing_voters(self, dataset: Dataset, run: RunDirectory) -> StandingVoters:  # noqa: ARG002 - no votes kept
        """Return the embedded private records as voters of a service that answers further queries; every query draws a
        fresh sample."""
        places = self._places(dataset.public)
        found = self._neighbourhood(dataset, places)

        def ask(features: npt.NDArray[np.generic], names: Sequence[str]) -> IntArray:
            return neighbours.label_counts(
                found.nearest(places(torch.from_numpy(features)), names), dataset.num_classes
            )

        digest = self._digest(dataset.private)
        return StandingVoters(ensemble=digest, ask=ask, are_answering=found.are_answering, close=found.close)

    def _places(self, public: Split) -> WholeCoordinates:
        settings, seed = self.private_knn, stream_seed(self.seed, Stream.TRAINING) % 2**32  # scikit-learn: 32 bits
        # By name, so that the digest is the same in any order: that of the queries differs from the data set's.
        in_order = np.argsort(np.array(public.record_id))
        pool = hashlib.blake2b(public.x.numpy()[in_order].tobytes()).digest()
        key = (pool, settings.embedding, settings.num_components, seed)
        if (found := _COORDINATES.get(key)) is None:
            found = WholeCoordinates.of(public.x, settings, seed=seed)
            _COORDINATES.clear()
            _COORDINATES[key] = found
        return found

    def _neighbourhood(self, dataset: Dataset, places: WholeCoordinates) -> neighbours.Neighbourhood:
        private, settings = dataset.private, self.private_knn
        seed = stream_seed(self.seed, Stream.NOISE) if self.noise == "seeded" else None
        # The order of equal distances must be the same in every run; it need not be secret.
        key, persons = ensemble.shard_key(self.seed), None if private.person_N is None else private.person_N.numpy()
        voters = places(private.x), private.y.numpy(), private.unit_id
        blocks = list(neighbours.blocks_of(*voters, key=key, person_N=persons))
        if self.ray.num_actors == 0:
            sampler = neighbours.Sampler(settings.sampling_rate, seed)
            return neighbours.LocalNeighbourhood(blocks, count=settings.num_neighbours, sampler=sampler)
        return neighbours.RayNeighbourhood(
            blocks, count=settings.num_neighbours, sampling_rate=settings.sampling_rate, seed=seed, config=self.ray
        )

    def _digest(self, private: Split) -> str:
        """Return a digest of the private records, the settings of the method and the run's seed."""
        # Records themselves too: a ledger must not be continued with other voters.
        persons = [list(private.person_id)] if private.person_id else []
        told = (self.private_knn.model_dump(mode="json"), self.seed, list(private.unit_id), *persons)
        return digest_of_records(told, private.x, private.y)


@dataclass(frozen=True, kw_only=True)
class SampledVotes:
    """Queries of Private-kNN whose votes are drawn on request, each from a fresh Poisson sample of the private
    records."""

    record_ids: Sequence[str]
    groups_Q: IntArray
    x: torch.Tensor
    ensemble: str
    ask: Callable[[torch.Tensor, Sequence[str]], IntArray]

    def counts(self, rows: Sequence[int]) -> IntArray:
        """Return the vote counts (Q, C) on the queries in ``rows``, each from a fresh sample."""
        return self.ask(self.x[list(rows)], [self.record_ids[row] for row in rows])

    def take(self, rows: Sequence[int]) -> SampledVotes:
        """Return a copy that has only the queries in ``rows``; the voters are the same."""
        names = [self.record_ids[row] for row in rows]
        return replace(self, record_ids=names, groups_Q=self.groups_Q[list(rows)], x=self.x[list(rows)])
