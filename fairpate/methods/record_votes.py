"""One vote per record: every private record is a teacher that votes once, on a public prototype.

Kin: parallel composition (McSherry 2009) and private prototypes of public embeddings (DPPL, Wahdany et al. 2025, arXiv
2406.08039).

    prototypes   K centres of the public pool, in an embedding that is computed from public records alone
    votes        n[k, c] = how many private records of label c are nearest to prototype k
    release      n + N_Z(0, sigma^2), every cell of it, empty ones too
    labels       a public record has the label that most votes of its prototype say; the surest teach the student

Adding or removing a record moves one cell by one, whatever K and C: one event for everything
(:class:`fairpate.privacy.record_votes.VoteTables`), priced exactly for noise on whole numbers. Everything after the
table is post-processing: labels for the whole pool, the student, and every fairness rule. The price holds whatever the
records are, so the epsilon that is computed is the one that is published.

Nothing private enters the embedding: a table's columns are scaled by the pool's spread, pictures become oriented
gradients (:mod:`fairpate.data.gradients`), and principal components are the pool's. K and sigma follow from the
configuration. The pool must really be public.

Shapes: N private records, M public ones, K prototypes, C classes, F features, D components.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.metrics import pairwise_distances_argmin
from torch import Tensor

from fairpate.app.seeds import Stream, stream_seed
from fairpate.app.students import fit_student
from fairpate.config import ConfigError, Count, Section, StudentConfig
from fairpate.data.gradients import oriented_gradients
from fairpate.fairness.gate import filter_stream
from fairpate.methods.definition import PrivateMethod, Training
from fairpate.methods.trained import Trained
from fairpate.nn.models import scale_bytes
from fairpate.privacy.calibration import least_noise
from fairpate.privacy.discrete_gaussian import NoiseSource, discrete_gaussians
from fairpate.privacy.record_votes import VoteTables
from fairpate.types import GateRule, IntArray, LabelledSet

FloatArray = npt.NDArray[np.float64]


class RecordVotesConfig(Section):
    """Prototypes, and which of their labels teach."""

    num_prototypes: Count = Field(150, description="K. A cell should hold some three to five sigma of records.")
    num_components: Count = Field(60, description="Principal components of the pool; fewer where it has fewer.")
    taught_share: float = Field(
        0.7, gt=0, le=1, description="Of the pool: the records whose prototypes' votes leave least doubt are labelled."
    )
    gate: GateRule | None = Field(None, description="Keeps from the student what would widen the gap; null: nothing.")


@dataclass(frozen=True, kw_only=True)
class Prototypes:
    """An embedding and its centres, both of public records: ``nearest`` tells the prototype of a record."""

    mean_F: FloatArray
    scale_F: FloatArray
    components: PCA
    centres_KD: FloatArray

    @classmethod
    def of(cls, pool: Tensor, config: RecordVotesConfig, *, seed: int) -> Prototypes:
        """Of the public ``pool`` (M, ...). ConfigError for more prototypes than different public records."""
        plain_MF = plain_features(pool)
        spread_F = plain_MF.std(axis=0)
        mean_F, scale_F = plain_MF.mean(axis=0), np.where(spread_F > 0, spread_F, 1.0) if pool.ndim == 2 else np.ones(1)
        centred_MF = (plain_MF - mean_F) / scale_F
        components = PCA(min(config.num_components, *centred_MF.shape), random_state=seed).fit(centred_MF)
        embedded_MD = components.transform(centred_MF)
        different = len(np.unique(embedded_MD, axis=0))
        if config.num_prototypes > different:
            raise ConfigError(
                f"record_votes.num_prototypes: {config.num_prototypes} of {different} different public records; lower "
                "it, or raise data.num_public."
            )
        centres = KMeans(config.num_prototypes, n_init=1, random_state=seed).fit(embedded_MD).cluster_centers_
        return cls(mean_F=mean_F, scale_F=scale_F, components=components, centres_KD=centres)

    def nearest(self, x: Tensor) -> IntArray:
        """The prototype (N,) of every record of ``x`` (N, ...); a function of that record alone."""
        embedded_ND = self.components.transform((plain_features(x) - self.mean_F) / self.scale_F)
        nearest_N: IntArray = pairwise_distances_argmin(embedded_ND, self.centres_KD)
        return nearest_N


def plain_features(x: Tensor) -> FloatArray:
    """A table as it is; pictures as the roots of their oriented gradients, which tames a few strong edges. (N, F)."""
    if x.ndim == 4:
        return oriented_gradients(x).double().sqrt().numpy()
    return scale_bytes(x).flatten(1).double().numpy()


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

    method: str = "record_votes"
    record_votes: RecordVotesConfig = RecordVotesConfig()
    student: StudentConfig = StudentConfig()

    def check(self) -> None:
        """ConfigError for a relation under which a record moves two cells."""
        if self.target.record_relation != "add or remove one":
            raise ConfigError(
                f"target.relation: {self.target.relation!r} moves two votes and is not priced here; use 'add or remove "
                "one'."
            )

    def train(self, training: Training) -> Trained:
        """Prototypes, one noisy table, labels of the pool, and a student of the surest."""
        dataset, settings = training.dataset, self.record_votes
        with training.reporter.stage("prototypes"):
            prototypes = Prototypes.of(dataset.public.x, settings, seed=stream_seed(self.seed, Stream.TRAINING) % 2**32)
            prototype_M = prototypes.nearest(dataset.public.x)
        stddev = least_noise(
            lambda noise: [VoteTables(count=1, noise_stddev_votes=noise)],
            target_epsilon=self.target.epsilon,
            target_delta=self.target.delta,
            accounting=self.target.accounting,
        )
        with training.reporter.stage("votes"):
            votes_KC = noisy_votes(
                prototypes.nearest(dataset.private.x),
                dataset.private.y.numpy(),
                shape=(settings.num_prototypes, dataset.num_classes),
                stddev=stddev,
                source=self.source,
            )
        labelled = self._labels(votes_KC[prototype_M], training, stddev=stddev)
        training.reporter.note(
            "votes", f"noise {stddev:.2f}; {len(labelled.labels)} of {len(prototype_M)} labels teach"
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

    def _labels(self, votes_MC: IntArray, training: Training, *, stddev: float) -> LabelledSet:
        """The surest labels of the pool, in its order; with a gate, those that it lets through."""
        public = training.dataset.public
        best_M = votes_MC.argmax(axis=1)
        ordered_MC = np.sort(votes_MC, axis=1)
        # The lead over the runner-up, against its noise and that of counts of this size.
        doubt_M = np.sqrt(np.maximum(ordered_MC[:, -1] + ordered_MC[:, -2], 0) + 2 * stddev**2)
        lead_M = (ordered_MC[:, -1] - ordered_MC[:, -2]) / doubt_M
        num_taught = max(1, round(self.record_votes.taught_share * len(best_M)))
        kept_M = np.zeros(len(best_M), dtype=np.bool_)
        kept_M[np.argsort(-lead_M, kind="stable")[:num_taught]] = True
        groups_M = public.z.numpy()
        labelled = LabelledSet(record_ids=tuple(public.record_id), labels=best_M, groups=groups_M).take(kept_M)
        rule = self.record_votes.gate
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
