"""One vote per record: every private record is a teacher that votes once, on a public prototype.

Kin: parallel composition (McSherry 2009) and private prototypes of public embeddings (DPPL, Wahdany et al. 2025, arXiv
2406.08039).

    prototypes   K centres of the public pool, in an embedding of public records alone (:mod:`.prototypes`)
    votes        n[k, c] = how many private records of label c are nearest to prototype k
    release      n + N_Z(0, sigma^2), every cell of it, empty ones too
    labels       what a public record's prototype says, or a linear rule that is fitted to all counts; the surest teach

Adding or removing a record moves one cell by one, whatever K and C: one event for everything
(:class:`fairpate.privacy.record_votes.VoteTables`), priced exactly for noise on whole numbers. Where the data set names
persons, a person's votes are added up cell by cell, and that vector is shortened to the length of one vote: in whole
numbers, in units of which a vote has U (:class:`fairpate.privacy.record_votes.VoteSums`). Everything after the table is
post-processing: labels for the whole pool, the student, and every fairness rule. The price holds whatever the records
are, so the epsilon that is computed is the one that is published.

K and sigma follow from the configuration and the size of the pool, never from private records: their number is declared
(``num_records``) or not used. The pool must really be public.

Shapes: N private records, M public ones, K prototypes, C classes, D or E coordinates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fairpate.app.released import Released
from fairpate.app.seeds import Stream, stream_seed
from fairpate.config import Count
from fairpate.data import Dataset
from fairpate.data.neighbour_graph import Floats
from fairpate.data.persons import shortened_by_person
from fairpate.fairness.private_population import KEPT_NOISE, TableByGroup
from fairpate.later import sklearn
from fairpate.methods.definition import Training, Voting
from fairpate.methods.prototypes import EmbeddingName, Prototypes
from fairpate.methods.trained import Trained
from fairpate.methods.votes_of_records import (
    UNITS,
    FloatArray,
    PoolLabels,
    TaughtConfig,
    ToldByGroup,
    VotesOfRecords,
    with_noise,
)
from fairpate.privacy.discrete_gaussian import NoiseSource
from fairpate.privacy.events import Event
from fairpate.privacy.record_votes import VoteSums, VoteTables
from fairpate.types import IntArray, Unit

_STDDEVS_PER_CELL = 4
_POOL_PER_CELL = 10


class RecordVotesConfig(TaughtConfig):
    """Prototypes, and which of their labels teach."""

    embedding: EmbeddingName = Field(
        "components", description="Where prototypes lie: `components` of the pool, or its `graph` of neighbours."
    )
    num_components: Count = Field(60, description="Principal components of the pool; fewer where it has fewer.")
    num_prototypes: Count | None = Field(
        None, description="K. null: a tenth of the pool, or fewer so that num_records fill a cell with four sigma."
    )
    num_records: Count | None = Field(
        None,
        description="Private records (persons, where these are protected), a declared public number that the rule "
        "for K may read; null: it does not.",
    )
    by_group: bool = Field(
        False,
        description="A count per class and group: tells how private groups are treated, with more noise in labels.",
    )
    rule: Literal["cells", "linear"] = Field(
        "cells", description="Labels are what the prototype's own votes say, or a `linear` rule fitted to all of them."
    )

    def prototypes_of(self, pool: int, *, stddev: float) -> int:
        """K, as configured or from public facts."""
        if self.num_prototypes is not None:
            return self.num_prototypes
        filled = pool if self.num_records is None else int(self.num_records / (_STDDEVS_PER_CELL * stddev))
        return max(1, min(filled, pool // _POOL_PER_CELL))


def noisy_votes(
    prototype_N: IntArray,
    labels_N: IntArray,
    *,
    shape: tuple[int, int],
    stddev: float,
    source: NoiseSource,
    person_N: IntArray | None = None,
) -> IntArray:
    """The released table (K, C): one vote per record, and noise on every cell.

    With ``person_N``, whose the records are: in units of which a vote has :data:`UNITS`, and the votes of a person
    together are no longer than one.
    """
    votes_KC = np.zeros(shape, dtype=np.int64)
    if person_N is None:
        np.add.at(votes_KC, (prototype_N, labels_N), 1)
        return with_noise(votes_KC, stddev=stddev, source=source, row="prototype")
    cell_N = prototype_N * shape[1] + labels_N
    cells, votes = shortened_by_person(np.full((len(cell_N), 1), UNITS), cell_N, person_N, norm=UNITS)
    np.add.at(votes_KC.reshape(-1), cells, votes[:, 0])
    # In units as the votes are: the event is priced for a norm of U of them.
    return with_noise(votes_KC, stddev=stddev * UNITS, source=source, row="prototype")


class RecordVotes(VotesOfRecords):
    """Within the target for one record or person, added or removed: one release for everything."""

    protects_persons: ClassVar[bool] = True
    title: ClassVar[str] = "one vote per record"
    paper: ClassVar[str] = "here; kin: McSherry 2009, arXiv 2406.08039"
    afterwards: ClassVar[tuple[str, ...]] = (
        *VotesOfRecords.afterwards,
        *(f"record_votes.{field}" for field in ("rule", *TaughtConfig.model_fields)),
    )

    method: str = "record_votes"
    record_votes: RecordVotesConfig = RecordVotesConfig()

    def voting(self, dataset: Dataset, num_records: int) -> Voting:
        """An equal share of the records in every cell."""
        stddev = self.least_noise(_EVENTS[dataset.unit]) * self.label_noise(dataset.num_groups)
        pool = len(dataset.public)
        votes = max(1, num_records // self.record_votes.prototypes_of(pool, stddev=stddev))
        return Voting(votes=votes, noise_stddev_votes=stddev, labels=round(self.record_votes.taught_share * pool))

    @property
    def by_group(self) -> bool:
        """As configured."""
        return self.record_votes.by_group

    def measure(self, training: Training) -> Released:
        """Prototypes, and one noisy table."""
        dataset, settings, private = training.dataset, self.record_votes, training.dataset.private
        stddev = self.least_noise(event := _EVENTS[dataset.unit])
        with training.reporter.stage("prototypes"):
            prototypes = Prototypes.of(
                dataset.public.x,
                count=settings.prototypes_of(len(dataset.public), stddev=stddev * self.label_noise(dataset.num_groups)),
                embedding=settings.embedding,
                num_components=settings.num_components,
                # scikit-learn takes seeds of 32 bits.
                seed=stream_seed(self.seed, Stream.TRAINING) % 2**32,
            )
        with training.reporter.stage("votes"):
            row_N, num_rows = self.rows(dataset)
            votes = noisy_votes(
                prototypes.nearest(private.x),
                row_N,
                shape=(len(prototypes.centres), num_rows),
                stddev=stddev,
                source=self.source,
                person_N=None if private.person_N is None else private.person_N.numpy(),
            )
        training.reporter.note("votes", f"{len(votes)} prototypes, noise {stddev:.2f}")
        # Where the pool lies goes with the table: made again elsewhere, prototypes may come in another order.
        arrays: dict[str, npt.NDArray[Any]] = {
            "prototype_M": prototypes.prototype_M,
            "coordinates_MD": prototypes.coordinates_MD,
        }
        if self.by_group:
            arrays["votes_GKC"] = votes.reshape(len(votes), dataset.num_groups, -1).swapaxes(0, 1)
        else:
            arrays["votes_KC"] = votes
        return Released(arrays=arrays, events=(event(stddev),))

    def learn(self, training: Training, released: Released) -> Trained:
        """Labels of the pool, and a student of the surest."""
        settings, prototype_M = self.record_votes, released.arrays["prototype_M"]
        votes_KC, stddev = self._votes(released)
        if settings.rule == "cells":
            said = labels_of_cells(votes_KC, prototype_M, stddev=stddev)
        else:
            said = labels_of_line(votes_KC, prototype_M, released.arrays["coordinates_MD"], stddev=stddev)
        return self.taught(said, settings, training, events=released.events)

    def _votes(self, released: Released) -> tuple[IntArray | FloatArray, float]:
        """Counts by cell and class, in votes, and the noise of each."""
        arrays, unit = released.arrays, released.events[0].unit
        stddev = self.least_noise(_EVENTS[unit])
        if self.by_group:
            return self.by_class(arrays["votes_GKC"], stddev=stddev)
        return arrays["votes_KC"] / UNITS if unit == "person" else arrays["votes_KC"], stddev

    def told_by_group(self, released: Released) -> ToldByGroup:
        """The counts, and what the linear rule says of the pool; a vote is the unit vector of its cell."""
        arrays, noise, (votes_KC, stddev) = released.arrays, self.least_noise(_one_vote), self._votes(released)
        _, votes_GKC = self.thinned(arrays["votes_GKC"], stddev=noise)
        chances_MC = chances_of_line(votes_KC, arrays["prototype_M"], arrays["coordinates_MD"], stddev=stddev)
        table = TableByGroup(
            sums_GYW=votes_GKC.transpose(0, 2, 1), stddev=KEPT_NOISE * noise, one_W=np.ones(len(votes_KC))
        )
        votes_MK = np.eye(len(votes_KC))[arrays["prototype_M"]]
        return ToldByGroup(table=table, votes_MW=votes_MK, likely_MY=chances_MC.astype(np.float64))


def _one_vote(stddev: float) -> VoteTables:
    return VoteTables(count=1, noise_stddev_votes=stddev)


def _votes_of_a_person(stddev: float) -> VoteSums:
    return VoteSums(count=1, noise_stddev_votes=stddev * UNITS, norm=UNITS, unit="person")


_EVENTS: dict[Unit, Callable[[float], Event]] = {"record": _one_vote, "person": _votes_of_a_person}


def labels_of_cells(votes_KC: IntArray | FloatArray, prototype_M: IntArray, *, stddev: float) -> PoolLabels:
    """Of every public record what most noisy votes of its prototype say."""
    ordered_KC: npt.NDArray[Any] = np.sort(votes_KC, axis=1)
    # The lead over the runner-up, against its noise and that of counts of this size.
    doubt_K = np.sqrt(np.maximum(ordered_KC[:, -1] + ordered_KC[:, -2], 0) + 2 * stddev**2)
    lead_K = (ordered_KC[:, -1] - ordered_KC[:, -2]) / np.maximum(doubt_K, 1e-9)
    return PoolLabels(labels_M=votes_KC.argmax(axis=1)[prototype_M], certainty_M=lead_K[prototype_M])


def labels_of_line(
    votes_KC: IntArray | FloatArray, prototype_M: IntArray, coordinates_MD: Floats, *, stddev: float
) -> PoolLabels:
    """The same by logistic regression on all counts."""
    chances_MC = chances_of_line(votes_KC, prototype_M, coordinates_MD, stddev=stddev)
    # A line is fitted to two labels or more: with votes for one alone, what the cells say is all there is.
    if (chances_MC.max(axis=0) > 0).sum() < 2:
        return labels_of_cells(votes_KC, prototype_M, stddev=stddev)
    ordered_MC: npt.NDArray[Any] = np.sort(chances_MC, axis=1)
    return PoolLabels(labels_M=chances_MC.argmax(axis=1), certainty_M=ordered_MC[:, -1] - ordered_MC[:, -2])


def chances_of_line(
    votes_KC: IntArray | FloatArray, prototype_M: IntArray, coordinates_MD: Floats, *, stddev: float
) -> FloatArray:
    """How likely each label (M, C) is by logistic regression on the pool's coordinates, all counts together.

    A record stands for a share of its cell's counts. The ridge is what the noise of K cells calls for, against the
    information in as many votes. Where fewer than two labels have votes, theirs are certain.
    """
    positive_KC = np.maximum(votes_KC, 0)
    shares_KC = positive_KC / np.maximum(np.bincount(prototype_M, minlength=len(votes_KC)), 1)[:, None]
    weights_MC = shares_KC[prototype_M]
    record_R, label_R = np.nonzero(weights_MC)
    found = np.unique(label_R)
    if len(found) < 2:
        return np.tile(np.isin(np.arange(votes_KC.shape[1]), found).astype(np.float64), (len(prototype_M), 1))
    # One scale for all coordinates, so that the ridge means the same in any embedding.
    spread = np.sqrt(coordinates_MD.var(axis=0).sum()) or 1.0
    ridge = stddev**2 * len(votes_KC) / positive_KC.sum()
    # Without noise the ridge is 0, which C, its inverse, cannot say.
    line = sklearn.linear_model.LogisticRegression(C=1 / max(ridge, 1e-6), max_iter=200)
    line.fit(coordinates_MD[record_R] / spread, label_R, sample_weight=weights_MC[record_R, label_R])
    chance_MF = line.predict_proba(coordinates_MD / spread)
    chances_MC: FloatArray = np.zeros(weights_MC.shape, dtype=chance_MF.dtype)
    chances_MC[:, line.classes_] = chance_MF
    return chances_MC
