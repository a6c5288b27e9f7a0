"""Every private record votes once, and one noisy table of the votes is released.

    votes        every private record adds whole numbers to a table, by its label and its position among public records
    release      the table + N_Z(0, sigma^2), on every cell, also on empty ones
    labels       a label for every public record, from the table; the student learns from the most certain ones

The release is one event, whose cost holds for any records. All steps after the table are post-processing: labels for
the public pool, the student, and every fairness rule. If the data set names persons, all votes of a person are added up
and scaled down to the norm of one vote, in whole numbers: a vote of norm one is U units. Adding or removing a person
then changes the table by at most one vote (:class:`fairpate.privacy.mechanism_events.VoteSums`).

One vote on a public prototype (``record_votes``; related: parallel composition, McSherry 2009; private prototypes of
public embeddings, DPPL, Wahdany et al. 2025, arXiv 2406.08039):

    prototypes   K centres of the public pool, in an embedding of public records alone
    votes        n[k, c] = how many private records of label c are nearest to prototype k
    labels       the most frequent label at a record's prototype, or the label that a linear classifier, fitted to all
                 counts, predicts

Adding or removing a record changes one cell by one, for any K and C: one event with the exact cost of noise on whole
numbers (:class:`fairpate.privacy.mechanism_events.VoteTables`). K and sigma are computed from the configuration and the
size of the pool, never from private records: their number is declared (``num_records``) or not used.

One sum of feature vectors per class (``weighted_votes``; related: sufficient statistics perturbation, Foulds et al.
2016, arXiv 1603.07294; Huggins et al. 2017, arXiv 1709.09216; here public records replace a part of the statistics):

    phi(x)       whole numbers of L2 norm at most U: a constant, and coordinates of a public embedding, cut at a radius
    votes        S[c] = the sum of phi(x) over private records of label c
    pool         weights p of public records, in proportion to exp(<t, phi>), with which their mean is the sum of S / n
    rule         W minimises  E_p ln sum_c exp(<W_c, phi>)  -  <W, S / n>  +  ridge |W|^2 / 2

Adding or removing a record changes one row by at most U in L2 norm. The objective is that of logistic regression,
except that the expectation of its first term is over public records instead of private ones. The weights p correct for
differences between the means of public and private records (exponential tilting, Qin 1998; entropy balancing,
Hainmueller 2012). n is the noisy number of records, from the sums of the constant. Both fits have a ridge penalty in
proportion to the noise of S / n.

Shapes: N private records, M public ones, K prototypes, C classes, G groups, W numbers per class, D or E coordinates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import scipy
from pydantic import Field
from scipy.special import logsumexp, softmax

from fairpate import config as configuration
from fairpate.config import ConfigError, Count, EmbeddingConfig
from fairpate.data import Dataset, Split
from fairpate.data.dataset import row_blocks, shortened_by_person
from fairpate.data.embedding import Embedding, Prototypes, SpaceConfig
from fairpate.data.tables import Floats
from fairpate.fairness import rates
from fairpate.fairness.rates import LabelledRecords, TableByGroup
from fairpate.lazy import sklearn, torch
from fairpate.methods import base, defaults
from fairpate.methods.base import ExpectedVotes, Stream, Trained, Training
from fairpate.methods.learning import fit_student, passing
from fairpate.privacy.audit_bounds import Shadows
from fairpate.privacy.discrete_gaussian import NoiseSource, discrete_gaussians
from fairpate.privacy.mechanism_events import VoteSums, VoteTables
from fairpate.releases.directory import ReleasedArrays
from fairpate.report.population import PrivatePopulation, private_population
from fairpate.types import FloatArray, GateRule, IntArray, LabelledSet, RealArray, Unit, stream_seed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from student.student import Student

UNITS = 2**14
"""U: the number of units of a vote of norm one; votes are whole numbers of units."""
_LARGEST_EPSILON = 20


TaughtShare = Annotated[
    configuration.PositiveShare,
    Field(
        description="Share of the public pool that the student learns from: the records with the most certain labels."
    ),
]


class TaughtConfig(configuration.Section):
    """Settings of how the student learns from labels of public records: the share of records that it learns from, a
    gate against labels that would widen the demographic-parity gap, and a fairness penalty in the loss."""

    taught_share: TaughtShare = 0.7
    gate: configuration.GateConfig | None = Field(
        None,
        description="Demographic-parity gate: labels that would widen the gap are not given to the student; null: no"
        " gate.",
    )
    penalty: configuration.PenaltyConfig | None = Field(
        None, description="Demographic-parity regulariser in the student's loss, on public records; null: none."
    )


@dataclass(frozen=True, kw_only=True)
class PoolLabels:
    """A label for each public record (M,), its certainty (M,), and optionally the probability of each class (M, C)."""

    labels_M: IntArray
    certainty_M: RealArray
    chances_MC: RealArray | None = None

    def of(self, records: Split) -> LabelledSet:
        """Return these labels as those of the public ``records`` (M of them)."""
        ids, groups = tuple(records.record_id), records.z.numpy()
        return LabelledSet(record_ids=ids, labels=self.labels_M, groups=groups, chances=self.chances_MC)


class VotesOfRecords(base.ReleasingMethod):
    """A method in which private records vote in one release, under the relation "add or remove one".

    Noise is calibrated to the target epsilon and delta, which hold for one record or person. ``learned`` names the
    fields of the method's own section that affect only the student, in addition to those of :class:`TaughtConfig`.
    """

    family: ClassVar[str] = "records"
    protects_persons: ClassVar[bool] = True
    reads_public: ClassVar[bool] = True  # public records get the labels
    has_student: ClassVar[bool] = True
    section: ClassVar[str]
    """Name of the method's own section of the configuration."""
    learned: ClassVar[tuple[str, ...]] = ()

    @property
    def own(self) -> TaughtConfig:
        """The section of the configuration that only this method has, such as ``record_votes``."""
        return getattr(self, self.section)

    @property
    def afterwards(self) -> tuple[str, ...]:  # type: ignore[override]
        """The dotted names of the fields that affect only what is learned from the release, but not the release
        itself."""
        own = (*self.learned, *TaughtConfig.model_fields)
        return (*base.ReleasingMethod.afterwards, *(f"{self.section}.{field}" for field in own))

    @property
    def reads_groups(self) -> bool:  # type: ignore[override]
        """True if the released table has separate rows for every group of private records, as the setting ``by_group``
        says."""
        return getattr(self.own, "by_group", False)

    def rows(self, dataset: Dataset) -> tuple[IntArray, int]:
        """Return the row of the table of votes to which each private record adds its vote, and the number of rows.

        The row is the record's label or, if the table is by group, the group and the label.
        """
        labels_N, num_classes = dataset.private.y.numpy(), dataset.num_classes
        if not self.reads_groups:
            return labels_N, num_classes
        return dataset.private.z.numpy() * num_classes + labels_N, dataset.num_groups * num_classes

    def label_noise(self, num_groups: int) -> float:
        """Return the standard deviation of the noise in the table from which the student learns, as a multiple of the
        noise in the released table. It is above 1 if votes are counted by group, because the student then learns from
        one part of the released table, summed over groups (:meth:`thinned`)."""
        # The tables of all groups are added, and their noises are independent.
        return rates.TAUGHT_NOISE * math.sqrt(num_groups) if self.reads_groups else 1.0

    def thinned(self, table_G: IntArray, *, stddev: float) -> tuple[IntArray, float, FloatArray]:
        """Split a released table by group (axis 0) into two tables with independent noise, the same at every call.

        The student learns from the first table; the second is for estimating the student's rates by group. Return the
        first table summed over groups, the standard deviation of its noise, and the second table.
        """
        # A new generator at each call, from one seed: student and estimate need the two tables of the same split.
        generator = np.random.default_rng(stream_seed(self.seed, Stream.THINNING))
        taught_G, kept_G = rates.thinned(table_G, stddev=stddev, generator=generator)
        return taught_G.sum(axis=0), self.label_noise(len(table_G)) * stddev, kept_G

    def table_by_group(self, released: ReleasedArrays) -> tuple[TableByGroup, FloatArray, FloatArray]:
        """Return the part of the released votes by group from which the student does not learn. Return also, for every
        public record, the vote that it would add (M, W), and its label probabilities (M, C)."""
        raise NotImplementedError

    def private_population(
        self, released: ReleasedArrays, dataset: Dataset, student: Student
    ) -> PrivatePopulation | None:
        """Return estimates of the student's rates (accuracy, errors, predictions) in each group of the private records,
        computed from the release and public records alone. Return None if the released table does not count votes by
        group."""
        if not self.reads_groups:
            return None
        public, groups_M = dataset.public, dataset.public.z.numpy()
        table, votes_MW, likely_MY = self.table_by_group(released)
        generator = np.random.default_rng(stream_seed(self.seed, Stream.POPULATION))
        predicted = student.predict(public.x, groups_M, generator=generator)
        # A refusal is one more outcome, after the classes.
        outcome_M = np.where(predicted.answered, predicted.labels, dataset.num_classes)
        outcome_MJ = np.eye(dataset.num_classes + 1)[outcome_M]
        records = LabelledRecords(votes_MW=votes_MW, groups_M=groups_M, likely_MY=likely_MY, outcome_MJ=outcome_MJ)
        return private_population(
            rates.estimated_population(table, records, generator=generator),
            group_names=dataset.group_names,
            class_names=dataset.label_names,
        )

    @property
    def reads_public_groups(self) -> bool:
        """True if a gate, a regulariser, a table by group or a calibration reads the groups of public records."""
        asked = self.own.gate is not None or self.own.penalty is not None
        return asked or self.reads_groups or self.public_data.calibration is not None

    def check(self) -> None:
        """Raise ConfigError for a target epsilon above 20, and for the relation "replace one": the cost of a table of
        votes is not computed for these."""
        if self.target.epsilon > _LARGEST_EPSILON:
            raise ConfigError(
                f"target.epsilon: the cost of a table of votes is computed up to {_LARGEST_EPSILON}, got "
                f"{self.target.epsilon}; lower it."
            )
        if self.target.relation == "replace one":
            raise ConfigError(
                f"target.relation: {self.target.relation!r} moves two votes, for which no cost is computed; use 'add "
                "or remove one'."
            )

    def check_data(self, dataset: Dataset) -> None:
        """Raise ConfigError as the parent class does. Raise it also for votes by group in a data set that protects
        persons: votes of persons are scaled down, so their sums are not counts of records."""
        super().check_data(dataset)
        if self.reads_groups and dataset.unit == "person":
            raise ConfigError(
                f"{self.method}.by_group: counts private records by group, but {dataset.name} protects persons, whose "
                "votes are scaled down; leave it out, or set data.unit=record, which protects less."
            )

    def sum_event(self, unit: Unit, *, norm: float = UNITS, scale: float = UNITS) -> VoteSums:
        """Return the privacy event of one table of sums, with the least noise that the target allows.

        One unit of privacy adds a vector of L2 norm at most ``norm``. The least noise is searched among multiples of
        ``scale``.
        """
        of_table = partial(VoteSums, count=1, norm=norm, unit=unit)
        noise = base.noise_within(self.target, lambda noise: [of_table(noise_stddev_votes=noise * scale)])
        return of_table(noise_stddev_votes=noise * scale)

    def taught(
        self, said: PoolLabels, training: Training, released: ReleasedArrays, *, records: Split | None = None
    ) -> Trained:
        """Train a student on labels of public records, and return it with the privacy events of ``released``.

        ``said`` are labels of the public ``records`` (None: all public records), computed from ``released``. The
        student learns from the most certain of these labels, except those that the demographic-parity gate withholds,
        if there is a gate.
        """
        settings, dataset, public = self.own, training.dataset, training.dataset.public
        num_records = len(said.labels_M)
        kept_M = np.zeros(num_records, dtype=np.bool_)
        num_taught = max(1, round(settings.taught_share * num_records))
        # Stable: among equally certain labels the first ones are used, on every machine.
        kept_M[np.argsort(-said.certainty_M, kind="stable")[:num_taught]] = True
        labelled = said.of(public if records is None else records).take(kept_M)
        if settings.gate is not None:
            labelled = passing(labelled, GateRule(**dict(settings.gate)), dataset)
        training.reporter.note("votes", f"the student learns from {len(labelled.labels)} of {num_records} labels")
        penalty = None
        if settings.penalty is not None:
            from fairpate.nn.fit import public_penalty  # a configuration is read without torch

            generator = training.generator(Stream.PENALTY)
            penalty = public_penalty(public.x, public.z, settings.penalty, generator=generator)
        network = fit_student(self, training, labelled, initial_model=training.model, penalty=penalty)
        count = len(labelled.labels)
        return Trained(model=network, events=released.events, noise=self.source.label, num_training_labels=count)

    @property
    def asking_student(self) -> tuple[str, ...]:
        """The dotted names of the settings that require a student, which learns from the rule's labels of public
        records; without any of them the rule itself is published."""
        asked = {
            f"{self.section}.gate": self.own.gate is not None,
            f"{self.section}.penalty": self.own.penalty is not None,
            f"{self.section}.taught_share": self.own.taught_share < 1,
            "student.model.name": self.student.model.name not in ("logistic", "bounded_logistic"),
            "student.method": self.student.method != "supervised",
        }
        return tuple(field for field, is_asked in asked.items() if is_asked)

    @property
    def publishes_rule(self) -> bool:
        """True if a fitted linear rule is the published model itself: no setting requires a student, and the embedding
        that the rule reads is stored with a model."""
        return self.data.embedding is not None and not self.asking_student

    def published(self, training: Training, released: ReleasedArrays, rule_CW: FloatArray, said: PoolLabels) -> Trained:
        """Return the linear rule as a model or, if settings require a student, a student that is trained on ``said``,
        the rule's labels of the public pool."""
        # An embedding of the method's own is not stored with a model, so that only a student can be published.
        if training.dataset.embedding is None or self.asking_student:
            return self.taught(said, training, released)
        architecture, network = rule_network(rule_CW)
        return Trained(model=network, architecture=architecture, events=released.events, noise=self.source.label)


def with_noise(
    table: IntArray, *, stddev: float, source: NoiseSource, row: str, noisy_sum: base.NoisySum | None = None
) -> IntArray:
    """Return ``table`` (rows, columns) with noise on every cell; with ``noisy_sum``, the noisy sum of the tables of all
    sites.

    Seeded noise of a row is derived from the word ``row`` and the row's number.
    """
    if noisy_sum is not None:
        return noisy_sum(table, stddev=stddev, name=row)
    # Cells without a vote as well: a cell without noise would show that it is empty.
    # A key for each row: under a seed, the noise of a row does not depend on the other rows.
    words = source.machine_words([f"{row} {k}" for k in range(table.shape[0])], table.shape[1])
    return table + discrete_gaussians(stddev, words, source)


_POOL_PER_CELL = 10


class RecordVotesConfig(TaughtConfig, SpaceConfig):
    """Settings of record votes (each private record votes once, at its nearest public prototype): the prototypes, the
    rule that labels public records, and the student's labels."""

    num_prototypes: Count | None = Field(
        None,
        description="Number of prototypes K. null: a tenth of the pool, or fewer so that num_records give each cell "
        "votes of four standard deviations of the noise.",
    )
    num_records: Count | None = Field(
        None,
        description="Declared public number of private records (persons, where these are protected) for the choice "
        "of K; null: K does not depend on it.",
    )
    by_group: bool = Field(
        False,
        description="Whether to release counts per class and group, which show how private groups are treated but "
        "put more noise on labels.",
    )
    rule: Literal["cells", "linear"] = Field(
        "cells",
        description="`cells`: the label with most votes at the record's prototype; `linear`: a linear rule that is "
        "fitted to all votes.",
    )

    def prototypes_of(self, pool: int, *, stddev: float) -> int:
        """Return the number of prototypes K: the configured number or, if there is none, one computed from ``pool``
        (the number of public records), the setting ``num_records`` and the noise."""
        if self.num_prototypes is not None:
            return self.num_prototypes
        # From the declared number: where records are added or removed, the real one is private.
        filled = pool if self.num_records is None else int(self.num_records / (defaults.STDDEVS_PER_CELL * stddev))
        return max(1, min(filled, pool // _POOL_PER_CELL))


def noisy_votes(
    prototype_N: IntArray,
    labels_N: IntArray,
    *,
    shape: tuple[int, int],
    stddev: float,
    source: NoiseSource,
    person_N: IntArray | None = None,
    noisy_sum: base.NoisySum | None = None,
) -> IntArray:
    """Return the released table of votes by prototype and label (K, C): one vote per record, and noise on every cell.

    With ``person_N``, the person of each record, the table counts in units of 1 / :data:`UNITS` of a vote. All votes of
    a person together are then scaled down to at most the norm of one vote.
    """
    votes_KC = np.zeros(shape, dtype=np.int64)
    if person_N is None:
        # Plain indexing would count a cell once, however many records vote in it.
        np.add.at(votes_KC, (prototype_N, labels_N), 1)
    else:
        cell_N = prototype_N * shape[1] + labels_N
        cells, votes = shortened_by_person(np.full((len(cell_N), 1), UNITS), cell_N, person_N, norm=UNITS)
        np.add.at(votes_KC.reshape(-1), cells, votes[:, 0])
        # In units as the votes are: the event is priced for a norm of U of them.
        stddev *= UNITS
    return with_noise(votes_KC, stddev=stddev, source=source, row="prototype", noisy_sum=noisy_sum)


class RecordVotes(VotesOfRecords):
    """Each private record votes once, for its label at the nearest public prototype; one noisy table is released."""

    title: ClassVar[str] = "one vote per record"
    paper: ClassVar[str] = "here; related: McSherry 2009, arXiv 2406.08039"
    colour: ClassVar[int] = 5
    voters: ClassVar[str] = "every record, one count"
    learned: ClassVar[tuple[str, ...]] = ("rule",)
    section: ClassVar[str] = "record_votes"
    sums_over_sites: ClassVar[bool] = True

    method: str = "record_votes"
    record_votes: RecordVotesConfig = RecordVotesConfig()

    def voting(self, dataset: Dataset, num_records: int) -> ExpectedVotes:
        """Estimate, for warnings before a run, how many votes decide a label and how noisy they are, if all prototypes
        have equally many votes."""
        (_, noise), pool, settings = self.event(dataset.unit), len(dataset.public), self.record_votes
        stddev = noise * self.label_noise(dataset.num_groups)
        votes = max(1, num_records // settings.prototypes_of(pool, stddev=stddev))
        return ExpectedVotes(votes=votes, noise_stddev_votes=stddev, labels=round(settings.taught_share * pool))

    def event(self, unit: Unit) -> tuple[VoteTables | VoteSums, float]:
        """Return the privacy event of the released table of votes, with the least noise that the target allows; and the
        standard deviation of this noise, in votes."""
        if unit == "person":
            # A sum in units, of which a vote has U: a power of two, so that no division rounds.
            sums = self.sum_event(unit)
            return sums, sums.noise_stddev_votes / UNITS
        noise = base.noise_within(self.target, lambda noise: [VoteTables(count=1, noise_stddev_votes=noise)])
        return VoteTables(count=1, noise_stddev_votes=noise), noise

    def prototypes(self, dataset: Dataset) -> Prototypes:
        """Return the prototypes, centres of clusters of the public pool, which depend only on public records and
        settings."""
        settings, (_, stddev) = self.record_votes, self.event(dataset.unit)
        return Prototypes.of(
            dataset.public.x,
            settings,
            count=settings.prototypes_of(len(dataset.public), stddev=stddev * self.label_noise(dataset.num_groups)),
            # scikit-learn takes seeds of 32 bits.
            seed=stream_seed(self.seed, Stream.TRAINING) % 2**32,
        )

    def measure(self, training: Training, prototypes: Prototypes | None = None) -> ReleasedArrays:
        """Release one noisy table of votes at ``prototypes``; None: compute the prototypes first."""
        dataset, private = training.dataset, training.dataset.private
        event, stddev = self.event(dataset.unit)
        if prototypes is None:
            with training.reporter.stage("prototypes"):
                prototypes = self.prototypes(dataset)
        with training.reporter.stage("votes"):
            row_N, num_rows = self.rows(dataset)
            person_N = None if private.person_N is None else private.person_N.numpy()
            if person_N is None and dataset.unit == "person":
                # This site has no private record; those of other sites belong to persons, so votes are in units.
                person_N = np.zeros(0, dtype=np.int64)
            nearest_N = prototypes.nearest(private.x)
            training.reserve((event,), self.source.label)
            shape = len(prototypes.centres), num_rows
            given: dict[str, Any] = {"person_N": person_N, "source": self.source, "noisy_sum": training.noisy_sum}
            votes = noisy_votes(nearest_N, row_N, shape=shape, stddev=stddev, **given)
        training.reporter.note("votes", f"{len(votes)} prototypes, noise {stddev:.2f}")
        # The pool's coordinates are stored with the table: recomputed elsewhere, prototypes may come in another order.
        arrays: dict[str, npt.NDArray[Any]] = {
            "prototype_M": prototypes.prototype_M,
            "coordinates_MD": prototypes.coordinates_MD,
        }
        if self.reads_groups:
            # Columns count by group and, within it, by label, as :meth:`rows` numbers them.
            arrays["votes_GKC"] = votes.reshape(len(votes), dataset.num_groups, -1).swapaxes(0, 1)
        else:
            arrays["votes_KC"] = votes
        return ReleasedArrays(arrays=arrays, events=(event,))

    def learn(self, training: Training, released: ReleasedArrays) -> Trained:
        """Label the public pool, train a student on the most certain labels, and return it."""
        prototype_M = released.arrays["prototype_M"]
        votes_KC, stddev = self._votes(released)
        if self.record_votes.rule == "cells":
            said = labels_of_cells(votes_KC, prototype_M, stddev=stddev)
        else:
            said = labels_of_linear_rule(votes_KC, prototype_M, released.arrays["coordinates_MD"], stddev=stddev)
        return self.taught(said, training, released)

    def _votes(self, released: ReleasedArrays) -> tuple[IntArray | RealArray, float]:
        """Return the released votes by prototype and class, and the standard deviation of their noise."""
        arrays, (event,) = released.arrays, released.events
        assert isinstance(event, VoteTables | VoteSums)
        if self.reads_groups:
            return self.thinned(arrays["votes_GKC"], stddev=event.noise_stddev_votes)[:2]
        # A vote of a person has U units.
        units = UNITS if event.unit == "person" else 1
        return arrays["votes_KC"] / units if units > 1 else arrays["votes_KC"], event.noise_stddev_votes / units

    def table_by_group(self, released: ReleasedArrays) -> tuple[TableByGroup, FloatArray, FloatArray]:
        """Return the part of the votes by group from which the student does not learn (:meth:`thinned`). Return also,
        for every public record, the vote that it would add, which is the unit vector of its prototype (M, K), and its
        label probabilities (M, C) by a logistic regression on the votes."""
        arrays, (votes_KC, stddev), (event,) = released.arrays, self._votes(released), released.events
        assert isinstance(event, VoteTables)  # groups of persons are refused
        *_, votes_GKC = self.thinned(arrays["votes_GKC"], stddev=event.noise_stddev_votes)
        chances_MC = chances_of_line(votes_KC, arrays["prototype_M"], arrays["coordinates_MD"], stddev=stddev)
        kept, one_W = rates.KEPT_NOISE * event.noise_stddev_votes, np.ones(len(votes_KC))
        table = TableByGroup(sums_GYW=votes_GKC.transpose(0, 2, 1), stddev=kept, one_W=one_W)
        return table, np.eye(len(votes_KC))[arrays["prototype_M"]], chances_MC.astype(np.float64)

    def attack(self, audited: base.Audited) -> Shadows | None:
        """Return an attack on the cells of the table."""
        # Imports torch, which reading a configuration does not need.
        from fairpate.methods.attack_on_sums import attack_on_counts

        return attack_on_counts(self, audited, unit=UNITS)


def labels_of_cells(votes_KC: IntArray | RealArray, prototype_M: IntArray, *, stddev: float) -> PoolLabels:
    """Label each public record with the class that has most noisy votes at its prototype, and return the labels."""
    ordered_KC: npt.NDArray[Any] = np.sort(votes_KC, axis=1)
    # The lead over the runner-up in standard deviations: of the added noise, and of the sampling of counts this large.
    doubt_K = np.sqrt(np.maximum(ordered_KC[:, -1] + ordered_KC[:, -2], 0) + 2 * stddev**2)
    # Without votes and without noise the doubt is 0, and the lead is 0 too.
    lead_K = (ordered_KC[:, -1] - ordered_KC[:, -2]) / np.maximum(doubt_K, 1e-9)
    return PoolLabels(labels_M=votes_KC.argmax(axis=1)[prototype_M], certainty_M=lead_K[prototype_M])


def labels_of_linear_rule(
    votes_KC: IntArray | RealArray, prototype_M: IntArray, coordinates_MD: Floats, *, stddev: float
) -> PoolLabels:
    """Label public records by a logistic regression that is fitted to all counts, and return the labels."""
    chances_MC = chances_of_line(votes_KC, prototype_M, coordinates_MD, stddev=stddev)
    # A regression needs at least two labels: with votes for one only, the labels of the prototypes are used.
    if (chances_MC.max(axis=0) > 0).sum() < 2:
        return labels_of_cells(votes_KC, prototype_M, stddev=stddev)
    return replace(labels_of_chances(chances_MC), chances_MC=None)


def chances_of_line(
    votes_KC: IntArray | RealArray, prototype_M: IntArray, coordinates_MD: Floats, *, stddev: float
) -> RealArray:
    """Return each public record's label probabilities (M, C), by a logistic regression fitted to all counts.

    Each public record has an equal share of its prototype's counts as sample weight. The ridge penalty is the noise
    variance of all K prototypes relative to the number of votes. A label that alone has votes gets probability 1; if no
    label has votes, all get 0.
    """
    # Noise can make counts negative, and a negative sample weight would reward a wrong label.
    positive_KC = np.maximum(votes_KC, 0)
    # A cell without public records has no record to share its votes.
    shares_KC = positive_KC / np.maximum(np.bincount(prototype_M, minlength=len(votes_KC)), 1)[:, None]
    weights_MC = shares_KC[prototype_M]
    record_R, label_R = np.nonzero(weights_MC)
    found = np.unique(label_R)
    if len(found) < 2:
        return np.tile(np.isin(np.arange(votes_KC.shape[1]), found).astype(np.float64), (len(prototype_M), 1))
    # One scale for all coordinates, so that the ridge means the same in any embedding.
    spread = np.sqrt(coordinates_MD.var(axis=0).sum()) or 1.0
    ridge = stddev**2 * len(votes_KC) / positive_KC.sum()
    # Without noise the ridge is 0, which C, its inverse, cannot express.
    line = sklearn.linear_model.LogisticRegression(C=1 / max(ridge, 1e-6), max_iter=200)
    line.fit(coordinates_MD[record_R] / spread, label_R, sample_weight=weights_MC[record_R, label_R])
    chance_MF = line.predict_proba(coordinates_MD / spread)
    chances_MC: RealArray = np.zeros(weights_MC.shape, dtype=chance_MF.dtype)
    chances_MC[:, line.classes_] = chance_MF
    return chances_MC


_CONSTANT = 0.5  # next to coordinates of norm one or less
_LENGTH = math.hypot(1.0, _CONSTANT)
# Truncated as every number of a vote is.
ONE_RECORD = int(_CONSTANT / _LENGTH * (UNITS - 1))
"""The constant in every vote, in units: divided by it, a sum of constants is a number of records."""
_AT_ONCE = 8192
_COMPARED = 2000  # public records, with one another
# Of convex functions that return their value and gradient. The last step is taken if steps run out: it is
# post-processing, and no guarantee rests on the minimum.
_SOLVER: dict[str, Any] = {"jac": True, "method": "L-BFGS-B", "options": {"maxiter": 500}}


class VectorsConfig(TaughtConfig):
    """Settings for votes that are vectors: the embedding of records, and the student's labels."""

    taught_share: TaughtShare = 1.0
    embedding: EmbeddingConfig = Field(
        EmbeddingConfig(), description="Embedding that is fitted to public records; `data.embedding` takes precedence."
    )


class WeightedVotesConfig(VectorsConfig):
    """Settings of weighted votes: the linear rule, the embedding, and the student's labels."""

    by_group: bool = Field(
        False,
        description="Whether to release a row per class and group, which shows how private groups are treated but "
        "puts more noise on labels.",
    )
    ridge: configuration.Positive = Field(
        2.0,
        description="Ridge penalty of the linear rule, as a multiple of the standard deviation of the noise divided "
        "by the number of records.",
    )


@dataclass(frozen=True, kw_only=True)
class WeightedBallot:
    """The feature map phi of weighted votes. A record votes by adding the vector phi(x) to the row of its label in a
    table of sums.

    phi(x) depends on no other private record. ``embedding`` None: records are already embedded. Embedded records that
    are longer than a typical one, of norm EMBEDDED_NORM, are scaled down to it.
    """

    embedding: Embedding | None

    @classmethod
    def of(cls, dataset: Dataset, config: EmbeddingConfig) -> WeightedBallot:
        """Return the feature map of ``dataset``, with an embedding that is fitted to its public records unless its
        records are embedded already."""
        return cls(embedding=None if dataset.embedding is not None else Embedding.of(dataset.public.x, config))

    def votes(self, x: Tensor) -> IntArray:
        """Return the votes phi(x) (N, W): vectors of whole numbers, of L2 norm at most :data:`UNITS`. The first number
        of a vote is the same constant for all records."""
        embedded = x if self.embedding is None else self.embedding(x)
        # One NaN would spoil all sums, and so reveal that its record is there.
        coordinates = embedded.double().nan_to_num(0.0).numpy() / configuration.EMBEDDED_NORM
        lengths_N1 = np.linalg.norm(coordinates, axis=1, keepdims=True)
        # Coordinates of norm one at most and the constant, over the length of both: a vote has norm one at most.
        constant = np.full((len(x), 1), _CONSTANT)
        phi = np.hstack([constant, coordinates / np.maximum(lengths_N1, 1.0)]) / _LENGTH
        # Towards zero, and a little shorter than U, so that no rounding of floats makes a vote longer.
        return np.trunc(phi * (UNITS - 1)).astype(np.int64)

    def similar(self, x: Tensor, num_records: int) -> int:
        """Estimate how many votes decide a label if ``num_records`` private records are distributed like public ``x``.

        A vote counts for a record by its component, if positive, in the direction of the record's own vote. The
        estimate is the mean, over public records, of the sum of these components.
        """
        votes_MW = self.votes(x[:_COMPARED])[:, 1:] / UNITS  # without the constant, which is the same for all
        alike_MM = np.maximum(votes_MW @ votes_MW.T, 0.0)
        # No record is one of those similar to itself.
        np.fill_diagonal(alike_MM, 0.0)
        norm_M = np.linalg.norm(votes_MW, axis=1)
        share = alike_MM.sum(axis=1)[norm_M > 0] / norm_M[norm_M > 0] / max(1, len(votes_MW) - 1)
        return max(1, round(num_records * float(share.mean()))) if len(share) else 1

    def table(self, x: Tensor, labels_N: IntArray, *, num_classes: int, person_N: Tensor | None = None) -> IntArray:
        """Return the exact sums S (C, W), before noise: votes of W numbers, summed over the records of each label."""
        parts, numbers_N = [], None if person_N is None else person_N.numpy()
        # Whole persons in every part: the sum of a person's votes is scaled down as a whole.
        for records in row_blocks(len(x), _AT_ONCE, numbers_N):
            votes, rows = self.votes(x[records]), labels_N[records]
            if numbers_N is not None:
                rows, votes = shortened_by_person(votes, rows, numbers_N[records], norm=UNITS)
            parts.append(np.stack([votes[rows == c].sum(axis=0) for c in range(num_classes)]))
        return np.sum(parts, axis=0)


class WeightedVotes(VotesOfRecords):
    """Private records add feature vectors to one sum per class; a linear rule is fitted to the noisy sums."""

    title: ClassVar[str] = "weighted record votes"
    paper: ClassVar[str] = "here; related: arXiv 1603.07294, arXiv 1709.09216"
    colour: ClassVar[int] = 3
    voters: ClassVar[str] = "every record, a vector"
    learned: ClassVar[tuple[str, ...]] = ("ridge",)
    section: ClassVar[str] = "weighted_votes"
    sums_over_sites: ClassVar[bool] = True

    method: str = "weighted_votes"
    weighted_votes: WeightedVotesConfig = WeightedVotesConfig()

    def voting(self, dataset: Dataset, num_records: int) -> ExpectedVotes:
        """Estimate, for warnings before a run, how many votes decide a label and how noisy they are, if private records
        are distributed like public ones."""
        ballot = WeightedBallot.of(dataset, self.weighted_votes.embedding)
        votes = ballot.similar(dataset.public.x, num_records)
        labels = round(self.weighted_votes.taught_share * len(dataset.public))
        noise = self.sum_event("record").noise_stddev_votes / UNITS * self.label_noise(dataset.num_groups)
        return ExpectedVotes(votes=votes, noise_stddev_votes=noise, labels=labels)

    def measure(self, training: Training) -> ReleasedArrays:
        """Fit the feature map on public records and release one noisy table of sums."""
        dataset, private = training.dataset, training.dataset.private
        # A person's sum is scaled down to the norm of one vote: the same event, for another unit.
        event = self.sum_event(dataset.unit)
        with training.reporter.stage("votes"):
            ballot = WeightedBallot.of(dataset, self.weighted_votes.embedding)
            row_N, num_rows = self.rows(dataset)
            table = ballot.table(private.x, row_N, num_classes=num_rows, person_N=private.person_N)
            training.reserve((event,), self.source.label)
            stddev, over_sites = event.noise_stddev_votes, training.noisy_sum
            noisy = with_noise(table, stddev=stddev, source=self.source, row="class", noisy_sum=over_sites)
        training.reporter.note("votes", f"{noisy.shape[1]} numbers per class, noise {stddev / UNITS:.2f}")
        # The pool's votes are stored with the table: recomputed elsewhere, components may have other signs.
        # In 16 bits: no number of a vote is above U, which is 2^14.
        arrays: dict[str, npt.NDArray[np.integer]] = {"pool_MW": ballot.votes(dataset.public.x).astype(np.int16)}
        if self.reads_groups:
            arrays["sums_GCW"] = noisy.reshape(dataset.num_groups, dataset.num_classes, -1)
        else:
            arrays["sums_CW"] = noisy
        return ReleasedArrays(arrays=arrays, events=(event,))

    def learn(self, training: Training, released: ReleasedArrays) -> Trained:
        """Fit the linear rule to the released table of sums, train a student on the rule's labels of the public pool,
        and return the student."""
        return self.taught(self._said(released), training, released)

    def _said(self, released: ReleasedArrays) -> PoolLabels:
        """Fit the linear rule to the released table, and return its labels of the public pool."""
        arrays, (event,) = released.arrays, released.events
        assert isinstance(event, VoteSums)
        stddev = event.noise_stddev_votes
        if self.reads_groups:
            sums_CW, stddev, _ = self.thinned(arrays["sums_GCW"], stddev=stddev)
        else:
            sums_CW = arrays["sums_CW"]
        pool_MW = arrays["pool_MW"].astype(np.int64)
        return labels_of_sums(sums_CW, pool_MW, stddev=stddev / UNITS, ridge=self.weighted_votes.ridge)

    def table_by_group(self, released: ReleasedArrays) -> tuple[TableByGroup, FloatArray, FloatArray]:
        """Return the part of the sums of votes by group from which the student does not learn (:meth:`thinned`). Return
        also, for every public record, the vote that it would add (M, W), and its label probabilities (M, C) by the
        linear rule."""
        arrays, (event,), chances_MC = released.arrays, released.events, self._said(released).chances_MC
        assert isinstance(event, VoteSums)
        assert chances_MC is not None
        noise = event.noise_stddev_votes / UNITS
        *_, sums_GCW = self.thinned(arrays["sums_GCW"], stddev=event.noise_stddev_votes)
        pool_MW = arrays["pool_MW"] / UNITS
        one_W = np.zeros(pool_MW.shape[1])
        # The constant alone, scaled to one for every record.
        one_W[0] = UNITS / ONE_RECORD
        table = TableByGroup(sums_GYW=sums_GCW / UNITS, stddev=rates.KEPT_NOISE * noise, one_W=one_W)
        return table, pool_MW, chances_MC.astype(np.float64)

    def attack(self, audited: base.Audited) -> Shadows | None:
        """Return an attack on the noisy sums."""
        from fairpate.methods.attack_on_sums import attack_on_sums  # torch

        return attack_on_sums(self, audited)


def labels_of_sums(noisy_CW: IntArray, pool_MW: IntArray, *, stddev: float, ridge: float) -> PoolLabels:
    """Fit a linear classifier to the released noisy sums of votes, and return the labels that it predicts for the
    public pool. A record's vote is its feature vector of W numbers; ``pool_MW`` are the vectors of the pool."""
    # The constant's column counts records, under the same noise: the real number is never read.
    num_records = max(float(noisy_CW[:, 0].sum()) / ONE_RECORD, 1.0)
    rule_CW, _ = fitted_rule(noisy_CW, pool_MW, num_records=num_records, noise=stddev / num_records, ridge=ridge)
    return labels_of_chances(softmax(pool_MW / UNITS @ rule_CW.T, axis=1))


def fitted_rule(
    noisy_CW: IntArray, pool_MW: npt.NDArray[Any], *, num_records: float, noise: float, ridge: float
) -> tuple[FloatArray, FloatArray]:
    """Fit the linear rule to released sums over about ``num_records`` private records; return the rule (C, W) and the
    weights of the public records, whose votes are ``pool_MW``, (M,).

    ``noise``: standard deviation of the noise of the sums, in votes, over the number of records; ``ridge``: the penalty
    as a multiple of it.
    """
    phi_MW, moments_CW = pool_MW / UNITS, noisy_CW / UNITS / num_records
    # The sum over C classes carries C independent noises.
    weights_M = balancing_weights(phi_MW, moments_CW.sum(axis=0), ridge=noise * math.sqrt(len(moments_CW)))
    return matched_rule(phi_MW, moments_CW, weights_M, ridge=ridge * noise), weights_M


def labels_of_chances(chances_MC: RealArray) -> PoolLabels:
    """Return the most likely label of each record. The certainty of this label is its probability minus that of the
    second most likely label."""
    first_M, lead_M = leads(chances_MC)
    return PoolLabels(labels_M=first_M, certainty_M=lead_M, chances_MC=chances_MC)


def leads(scores_NC: npt.NDArray[Any]) -> tuple[IntArray, npt.NDArray[Any]]:
    """Return the class with the largest score of each record, and by how much it leads."""
    ordered_NC: npt.NDArray[Any] = np.sort(scores_NC, axis=1)
    return scores_NC.argmax(axis=1), ordered_NC[:, -1] - ordered_NC[:, -2]


def rule_network(rule_CW: FloatArray) -> tuple[configuration.ModelConfig, nn.Module]:
    """Return the architecture of a network, and the network, which gives embedded records the scores of the linear rule
    ``rule_CW``.

    The rule reads votes. A record's vote is a constant and its embedded features, whose norm is bounded. The network
    bounds their norm likewise; the bias and the weights of its linear layer are the rule's coefficients, rescaled.
    """
    from fairpate.nn.models import build_model  # a configuration is read without torch

    architecture = configuration.ModelConfig(name="bounded_logistic")
    width, num_classes = rule_CW.shape[1] - 1, len(rule_CW)
    network = build_model(architecture, input_shape=(width,), num_classes=num_classes)
    # The network's features have the norm EMBEDDED_NORM where those of votes have norm one.
    scaled_CW = torch.from_numpy(rule_CW / _LENGTH * np.array([_CONSTANT] + [1 / configuration.EMBEDDED_NORM] * width))
    *_, linear = network.children()
    linear.load_state_dict({"weight": scaled_CW[:, 1:], "bias": scaled_CW[:, 0]})
    return architecture, network.eval()


def balancing_weights(phi_MW: FloatArray, mean_W: FloatArray, *, ridge: float) -> FloatArray:
    """Return weights p (M,) in proportion to exp(<t, phi>), with sum 1: t is chosen so that the weighted mean of phi
    equals ``mean_W`` up to the ridge penalty."""

    def objective(tilt_W: FloatArray) -> tuple[float, FloatArray]:
        scores_M = phi_MW @ tilt_W
        # The dual of the largest entropy: its gradient is 0 where the weighted mean is ``mean_W``.
        value = logsumexp(scores_M) - tilt_W @ mean_W + ridge / 2 * tilt_W @ tilt_W
        return float(value), softmax(scores_M) @ phi_MW - mean_W + ridge * tilt_W

    return softmax(phi_MW @ scipy.optimize.minimize(objective, np.zeros(len(mean_W)), **_SOLVER).x)


def matched_rule(phi_MW: FloatArray, moments_CW: FloatArray, weights_M: FloatArray, *, ridge: float) -> FloatArray:
    """Return the linear rule W (C, W) for which the weighted mean of softmax(W phi) phi over public records equals
    ``moments_CW``, up to the ridge penalty."""

    def objective(flat: FloatArray) -> tuple[float, FloatArray]:
        rule_CW = flat.reshape(moments_CW.shape)
        scores_MC = phi_MW @ rule_CW.T
        value = weights_M @ logsumexp(scores_MC, axis=1) - (rule_CW * moments_CW).sum() + ridge / 2 * flat @ flat
        slope_CW = (softmax(scores_MC, axis=1) * weights_M[:, None]).T @ phi_MW - moments_CW + ridge * rule_CW
        return float(value), slope_CW.ravel()

    return scipy.optimize.minimize(objective, np.zeros(moments_CW.size), **_SOLVER).x.reshape(moments_CW.shape)
