"""One weighted vote per record: a sum of feature vectors per class, released once, and the linear rule that fits it.

Kin: sufficient statistics perturbation (Foulds et al. 2016, arXiv 1603.07294; Huggins et al. 2017, arXiv 1709.09216),
with public records in the place of what private ones would still have to tell.

    phi(x)       whole numbers of L2 norm at most U: a constant, and coordinates of a public embedding, cut at a radius
    votes        S[c] = the sum of phi(x) over private records of label c
    release      S + N_Z(0, sigma^2), every number of it
    pool         weights p of public records, in proportion to exp(<t, phi>), with which their mean is the sum of S / n
    rule         W minimises  E_p ln sum_c exp(<W_c, phi>)  -  <W, S / n>  +  ridge |W|^2 / 2

Adding or removing a record moves one row by at most U in L2 norm: one event for everything
(:class:`fairpate.privacy.record_votes.VoteSums`). Where the data set names persons, all votes of a person are added up
and shortened to U where they are longer, so that adding or removing a person moves the table by no more; n then counts
a person less than their records. The objective is that of logistic regression, but for the
expectation of its first term over public records instead of private ones. The weights make up for public records that
are not quite like the private ones, as far as their means tell (exponential tilting, Qin 1998; entropy balancing,
Hainmueller 2012). n is the noisy number of records that the constant's sums say. Both fits have a ridge in proportion
to the noise of S / n, so that weights that noise alone asks for stay equal.

The embedding is that of the data set (``data.embedding``), or one of the method's own, of public records alone.

Shapes: N private records, M public ones, C classes, W numbers per class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax
from torch import Tensor

from fairpate.app.released import Released
from fairpate.config import EmbeddingConfig, Positive
from fairpate.data import Dataset
from fairpate.data.embedding import Embedding
from fairpate.data.persons import shortened_by_person, whole_persons
from fairpate.fairness.private_population import KEPT_NOISE, TableByGroup
from fairpate.methods.definition import Training, Voting
from fairpate.methods.trained import Trained
from fairpate.methods.votes_of_records import UNITS, PoolLabels, TaughtConfig, ToldByGroup, VotesOfRecords, with_noise
from fairpate.privacy.events import of_unit
from fairpate.privacy.record_votes import VoteSums
from fairpate.types import IntArray

FloatArray = npt.NDArray[np.float64]
_CONSTANT = 0.5  # beside coordinates of norm one or less
_AT_ONCE = 8192
_COMPARED = 2000  # public records, with one another
_MOST_STEPS = 500


class WeightedVotesConfig(TaughtConfig):
    """The rule, and which of its labels teach."""

    taught_share: float = Field(1.0, gt=0, le=1, description="Of the pool: the records with the least doubtful labels.")
    by_group: bool = Field(
        False, description="A row per class and group: tells how private groups are treated, with more noise in labels."
    )
    ridge: Positive = Field(2.0, description="Of the rule, in standard deviations of the noise per record.")
    embedding: EmbeddingConfig = Field(
        EmbeddingConfig(), description="Of public records; `data.embedding` precedes it."
    )


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """What a record adds to its label's row: a function of that record and of public ones."""

    embedding: Embedding | None
    radius: float

    @classmethod
    def of(cls, dataset: Dataset, config: EmbeddingConfig) -> Ballot:
        """Its radius is the median norm of public records."""
        embedding = None if dataset.embedding is not None else Embedding.of(dataset.public.x, config)
        pool = dataset.public.x if embedding is None else embedding(dataset.public.x)
        return cls(embedding=embedding, radius=float(pool.norm(dim=1).median()) or 1.0)

    def votes(self, x: Tensor) -> IntArray:
        """Whole numbers (N, W) of L2 norm at most :data:`UNITS`; the first is the same for all."""
        embedded = x if self.embedding is None else self.embedding(x)
        # One number that is none would spoil the sums of everybody, and so tell that its record is there.
        coordinates = embedded.double().nan_to_num(0.0).numpy() / self.radius
        lengths_N1 = np.linalg.norm(coordinates, axis=1, keepdims=True)
        # Beside coordinates of norm one at most: over the length of both, a vote has norm one at most.
        constant = np.full((len(x), 1), _CONSTANT)
        phi = np.hstack([constant, coordinates / np.maximum(lengths_N1, 1.0)]) / np.hypot(1.0, _CONSTANT)
        # Towards zero, and a little shorter than U, so that no rounding of floats makes a vote longer.
        whole: IntArray = np.trunc(phi * (UNITS - 1)).astype(np.int64)
        return whole

    def table(self, x: Tensor, labels_N: IntArray, *, num_classes: int, person_N: Tensor | None = None) -> IntArray:
        """S (C, W), exactly."""
        parts = []
        # Whole persons in every part: what a person adds is shortened as one.
        for records in _parts(len(x), person_N):
            votes, rows = self.votes(x[records]), labels_N[records]
            if person_N is not None:
                rows, votes = shortened_by_person(votes, rows, person_N.numpy()[records], norm=UNITS)
            parts.append(np.stack([votes[rows == c].sum(axis=0) for c in range(num_classes)]))
        total: IntArray = np.sum(parts, axis=0)
        return total


def _parts(num_records: int, person_N: Tensor | None) -> Iterator[slice | IntArray]:
    if person_N is not None:
        return whole_persons(person_N.numpy(), _AT_ONCE)
    # One part at least: the table of no record is all zeros.
    return (slice(start, start + _AT_ONCE) for start in range(0, max(num_records, 1), _AT_ONCE))


class WeightedVotes(VotesOfRecords):
    """Within the target for one record or person, added or removed: one release for everything."""

    protects_persons: ClassVar[bool] = True
    title: ClassVar[str] = "weighted record votes"
    paper: ClassVar[str] = "here; kin: arXiv 1603.07294, arXiv 1709.09216"
    afterwards: ClassVar[tuple[str, ...]] = (
        *VotesOfRecords.afterwards,
        *(f"weighted_votes.{field}" for field in ("ridge", *TaughtConfig.model_fields)),
    )

    method: str = "weighted_votes"
    weighted_votes: WeightedVotesConfig = WeightedVotesConfig()

    def voting(self, dataset: Dataset, num_records: int) -> Voting:
        """Were private records like public ones: by how much those that lean towards a record do, in whole votes."""
        ballot = Ballot.of(dataset, self.weighted_votes.embedding)
        pool_MW = ballot.votes(dataset.public.x[:_COMPARED])[:, 1:] / UNITS  # the constant leans towards all alike
        alike_MM = np.maximum(pool_MW @ pool_MW.T, 0.0)
        np.fill_diagonal(alike_MM, 0.0)
        norm_M = np.linalg.norm(pool_MW, axis=1)
        share = alike_MM.sum(axis=1)[norm_M > 0] / norm_M[norm_M > 0] / max(1, len(pool_MW) - 1)
        votes = max(1, round(num_records * float(share.mean()))) if len(share) else 1
        labels = round(self.weighted_votes.taught_share * len(dataset.public))
        noise = self.least_noise(_event) * self.label_noise(dataset.num_groups)
        return Voting(votes=votes, noise_stddev_votes=noise, labels=labels)

    @property
    def by_group(self) -> bool:
        """As configured."""
        return self.weighted_votes.by_group

    def measure(self, training: Training) -> Released:
        """A ballot, and one noisy table."""
        dataset = training.dataset
        noise = self.least_noise(_event)
        # A person's sum is shortened to the norm of one vote: the same event, for another unit.
        event = of_unit(_event(noise), dataset.unit)
        with training.reporter.stage("votes"):
            ballot = Ballot.of(dataset, self.weighted_votes.embedding)
            private = dataset.private
            row_N, num_rows = self.rows(dataset)
            table = ballot.table(private.x, row_N, num_classes=num_rows, person_N=private.person_N)
            noisy = with_noise(table, stddev=event.noise_stddev_votes, source=self.source, row="class")
        training.reporter.note("votes", f"{noisy.shape[1]} numbers per class, noise {noise:.2f}")
        # What the pool would vote goes with the table: made again elsewhere, components may have other signs.
        # In 16 bits: no number of a vote is above U, which is 2^14.
        arrays: dict[str, npt.NDArray[np.integer]] = {"pool_MW": ballot.votes(dataset.public.x).astype(np.int16)}
        if self.by_group:
            arrays["sums_GCW"] = noisy.reshape(dataset.num_groups, dataset.num_classes, -1)
        else:
            arrays["sums_CW"] = noisy
        return Released(arrays=arrays, events=(event,))

    def learn(self, training: Training, released: Released) -> Trained:
        """The rule that fits the table, and a student of what it says of the pool."""
        return self.taught(self._said(released), self.weighted_votes, training, events=released.events)

    def _said(self, released: Released) -> PoolLabels:
        """Of the pool."""
        arrays, noise = released.arrays, self.least_noise(_event)
        if self.by_group:
            sums_CW, stddev = self.by_class(arrays["sums_GCW"], stddev=noise * UNITS)
            noise = stddev / UNITS
        else:
            sums_CW = arrays["sums_CW"]
        pool_MW = arrays["pool_MW"].astype(np.int64)
        return labels_of_sums(sums_CW, pool_MW, stddev=noise, ridge=self.weighted_votes.ridge)

    def told_by_group(self, released: Released) -> ToldByGroup:
        """The sums, and what the rule says of the pool; the constant counts records."""
        arrays, noise, chances_MC = released.arrays, self.least_noise(_event), self._said(released).chances_MC
        assert chances_MC is not None
        _, sums_GCW = self.thinned(arrays["sums_GCW"], stddev=noise * UNITS)
        pool_MW = arrays["pool_MW"] / UNITS
        one_W = np.zeros(pool_MW.shape[1])
        # The constant is one number in all votes: over it, a sum of them counts records.
        one_W[0] = 1 / pool_MW[0, 0]
        table = TableByGroup(sums_GYW=sums_GCW / UNITS, stddev=KEPT_NOISE * noise, one_W=one_W)
        return ToldByGroup(table=table, votes_MW=pool_MW, likely_MY=chances_MC.astype(np.float64))


def _event(noise: float) -> VoteSums:
    return VoteSums(count=1, noise_stddev_votes=noise * UNITS, norm=UNITS)


def labels_of_sums(noisy_CW: IntArray, pool_MW: IntArray, *, stddev: float, ridge: float) -> PoolLabels:
    """What the rule that fits the released sums says of the pool, whose votes are ``pool_MW``."""
    # The constant's column counts records, under the same noise: the real number is never read.
    num_records = max(float(noisy_CW[:, 0].sum()) / float(pool_MW[0, 0]), 1.0)
    phi_MW, moments_CW, noise = pool_MW / UNITS, noisy_CW / UNITS / num_records, stddev / num_records
    # The sum over C classes carries C independent noises.
    weights_M = balancing_weights(phi_MW, moments_CW.sum(axis=0), ridge=noise * math.sqrt(len(moments_CW)))
    rule_CW = matched_rule(phi_MW, moments_CW, weights_M, ridge=ridge * noise)
    chances_MC = softmax(phi_MW @ rule_CW.T, axis=1)
    ordered_MC = np.sort(chances_MC, axis=1)
    return PoolLabels(
        labels_M=chances_MC.argmax(axis=1), certainty_M=ordered_MC[:, -1] - ordered_MC[:, -2], chances_MC=chances_MC
    )


def balancing_weights(phi_MW: FloatArray, mean_W: FloatArray, *, ridge: float) -> FloatArray:
    """p (M,), of sum one: exp(<t, phi>) in proportion, such that the mean of phi is ``mean_W``, but for the ridge."""

    def objective(tilt_W: FloatArray) -> tuple[float, FloatArray]:
        scores_M = phi_MW @ tilt_W
        value = logsumexp(scores_M) - tilt_W @ mean_W + ridge / 2 * tilt_W @ tilt_W
        return float(value), softmax(scores_M) @ phi_MW - mean_W + ridge * tilt_W

    weights_M: FloatArray = softmax(phi_MW @ _least(objective, np.zeros(len(mean_W))))
    return weights_M


def matched_rule(phi_MW: FloatArray, moments_CW: FloatArray, weights_M: FloatArray, *, ridge: float) -> FloatArray:
    """W (C, W): the weighted pool's mean of softmax times phi is ``moments_CW``, but for the ridge."""

    def objective(flat: FloatArray) -> tuple[float, FloatArray]:
        rule_CW = flat.reshape(moments_CW.shape)
        scores_MC = phi_MW @ rule_CW.T
        value = weights_M @ logsumexp(scores_MC, axis=1) - (rule_CW * moments_CW).sum() + ridge / 2 * flat @ flat
        slope_CW = (softmax(scores_MC, axis=1) * weights_M[:, None]).T @ phi_MW - moments_CW + ridge * rule_CW
        return float(value), slope_CW.ravel()

    return _least(objective, np.zeros(moments_CW.size)).reshape(moments_CW.shape)


def _least(objective: Callable[[FloatArray], tuple[float, FloatArray]], start: FloatArray) -> FloatArray:
    """Of a convex function with its gradient."""
    # Taken as it is where steps run out: it is post-processing, and no guarantee rests on the minimum.
    found: FloatArray = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": _MOST_STEPS}).x
    return found
