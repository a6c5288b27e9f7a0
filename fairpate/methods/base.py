"""One class per method, with its configuration, checks and training; and the registry of all methods.

A method takes private records and gives a model and the events that touched them. It states no epsilon: :func:`price`
asks the one accountant, under the unit and the relation that the events name. The fields of a :class:`Method` are all
that a run of it reads, so that the digest of a run, the command that repeats it, ``--help`` and the estimator are made
from the class. Names of sections are shared: ``dp_sgd`` means the same wherever a method has it.

Each method is one file, named after its paper; a line of ``_OURS`` makes it known to the command line, sweeps,
estimators and pages. Another package adds its own under the entry point group ``fairpate.methods``, or is named as
``module:Class``.

A configuration is read from YAML and ``section.field=value`` for one method. A file may serve several methods: what
another method reads in it is checked and left out, and what none reads is an error. An option that the method does not
read is an error, since it would change nothing, and so is one that other settings leave unread; a file may hold such
options, as the configuration of a finished run does.

Without a configuration, settings are chosen that fit the data set and the budget. The choice reads the kind of the
records, the publisher's own count of them, or of persons if these are protected, and the size of the public pool: never
a record, so that it costs no privacy. The values are defaults; options take precedence.

    every method     a public embedding and logistic regression on it: seconds, and little for noise to spoil
    DP-SGD methods   five epochs of batches of a fiftieth of the records or persons
    trained teachers linear, of about a hundred of them each, no confidence check, all noisy counts released
    neighbours       asked like teachers; few records, about clusters of the pool, so that few queries label all of it

If no method is named, every private record votes (`residual_votes`): its releases are priced before any record is read,
and public records may be few or missing. Where many classes have too few records for that, one count per record is
released instead (:func:`default_method`).

Shapes: N private records, M public ones, G groups, C classes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, get_args

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, model_validator

from fairpate.config import (
    BACKBONES,
    LEARNING_FIELDS,
    PLACE,
    PLACES,
    REMEDY,
    AugmentConfig,
    BackboneConfig,
    ConfigError,
    DataConfig,
    EvaluationConfig,
    FitConfig,
    LearningConfig,
    ModelConfig,
    NetworkConfig,
    Noise,
    Override,
    PrivacyTarget,
    PublicDataConfig,
    Section,
    Seed,
    ShardsConfig,
    StudentConfig,
    StudentTraining,
    TeachersConfig,
    TeachersTraining,
    Terms,
    TrainingConfig,
    apply_override,
    flattened,
    may_run,
    merge,
    named_object,
    nearest,
    parse_config,
    read_yaml,
    unread_because_of,
    values_digest,
    without,
)
from fairpate.data import Dataset, entry_for, option_showing_attribute, pool_size
from fairpate.privacy import accountant
from fairpate.privacy.accountant import Accounting, Event, of_unit
from fairpate.privacy.discrete_gaussian import NoiseSource, OsEntropy, SeededSource
from fairpate.privacy.laplace import pure_epsilon
from fairpate.run.context import RunDirectory, RunFolderError
from fairpate.run.release_log import Released, ReleaseLog, read_release, require_same_settings
from fairpate.terminal import Reporter
from fairpate.types import IntArray, QueryOutcomes, Relation, Unit, torch

if TYPE_CHECKING:
    from torch import nn

    from fairpate.nn.private_fit import PrivateRandomness
    from fairpate.report.records import PrivatePopulation
    from student.student import Student

DEFAULT = "fairpate"
_GROUP = "fairpate.methods"
_OURS = {
    "fairpate": "pate:FairPate",
    "pate": "pate:Pate",
    "pate_s_pre": "pate:PateSPre",
    "pate_s_in": "pate:PateSIn",
    "sf_pate": "sf_pate:SfPate",
    "private_knn": "private_knn:PrivateKnn",
    "record_votes": "record_votes:RecordVotes",
    "weighted_votes": "record_votes:WeightedVotes",
    "residual_votes": "residual_votes:ResidualVotes",
    "ada_ssp": "residual_votes:AdaSsp",
    "teacher_votes": "teacher_votes:TeacherVotes",
    "sgd": "dp_sgd:Sgd",
    "dp_sgd": "dp_sgd:DpSgd",
    "fair_dp_sgd": "dp_sgd:FairDpSgd",
    "dp_fermi": "dp_fermi:DpFermi",
    "f_ld": "f_ld:FLd",
    "covariance_constraint": "f_ld:CovarianceConstraint",
    "pf_ld": "f_ld:PfLd",
    "raco_dp": "raco_dp:RacoDp",
    "dp_postprocessing": "dp_fair_learning:Postprocessing",
    "dp_oracle_learner": "dp_fair_learning:OracleLearner",
    "randomised_response": "randomised_response:RandomisedResponse",
}
_ELSEWHERE = {"own_votes": "own_votes:OwnVotes"}
"""Found by name and not listed: it trains no voters, and needs a file of votes (`fairpate aggregate`)."""


@cache
def method_names() -> Mapping[str, str]:
    """Return every registered method's name, with its class as ``module:Class``."""
    others = {entry.name: entry.value for entry in metadata.entry_points(group=_GROUP)}
    # Ours last: no other package takes the name of one of ours.
    return others | {name: f"{_GROUP}.{place}" for name, place in _OURS.items()}


@cache
def find_method(name: str) -> type[Method]:
    """The class of a registered name, or of ``module:Class``. ConfigError if it does not exist or cannot run."""
    place = name if PLACE.fullmatch(name) else method_names().get(name)
    if name in _ELSEWHERE:
        place = f"{_GROUP}.{_ELSEWHERE[name]}"
    if place is None:
        raise ConfigError(f"method: no method {name!r}{nearest(name, list(method_names()))}.")
    try:
        found = named_object(place)
    except Exception as error:  # anything that a module of another package raises
        raise ConfigError(
            f"method: {name} cannot be imported ({type(error).__name__}: {error}); give module:Class, its folder in "
            "PYTHONPATH or as the working directory."
        ) from error

    if not isinstance(found, type) or not issubclass(found, Method):
        raise ConfigError(
            f"method: {name}: expected a subclass of fairpate.methods.base.Method; `fairpate new NAME --example "
            "own-method` writes one."
        )
    missing = [word for word in ("title", "paper") if not hasattr(found, word)]
    if missing or found.train is Method.train:
        raise ConfigError(f"method: {name} is incomplete, it lacks {', '.join(missing) or 'train'}; add it.")
    try:
        # Shows defaults that contradict each other, before a configuration is read over them.
        found()
    except ValueError as error:
        raise ConfigError(f"method: {name} cannot be made from its defaults ({error}); correct its fields.") from error
    return found


def method_title(name: str) -> str:
    """The name of a method on pages. A method of another package appears under its registered name, so that its code
    need not be imported."""
    return find_method(name).title if name in _OURS or name in _ELSEWHERE else name


def all_methods() -> dict[str, type[Method]]:
    """Import every registered method; return them by name. A method of another package that cannot be imported is left
    out."""
    found = {}
    for name in method_names():
        try:
            found[name] = find_method(name)
        except ConfigError:
            # One of ours that cannot be imported is a defect.
            if name in _OURS:
                raise
    return found


class Stream(IntEnum):
    """The parts of a run that draw random numbers other than private noise. The numbers must never change, because
    earlier runs could not be reproduced."""

    STUDENT = 1
    BOOTSTRAP = 2
    ORDERS = 3
    MODEL = 10
    TRAINING = 11
    NOISE = 12
    PRETRAINING = 13
    LABELLING = 14
    CALIBRATION = 15
    HISTOGRAM_NOISE = 16
    PENALTY = 17
    PUBLIC_POOL = 18
    PREDICTION = 20
    POPULATION = 21
    THINNING = 22
    ORDER_OF_RECORDS = 23
    METRICS = 24
    CHOICE = 25


def stream_seed(seed: int, stream: Stream) -> int:
    """The seed of one part of a run with ``seed``, below 2**63."""
    # Hashed together: by a sum, one part of this seed would draw the numbers of another part of the next.
    # 63 bits, because torch's seeds are signed.
    return int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0] >> 1)


def torch_generator(seed: int, stream: Stream) -> torch.Generator:
    """A generator for one part of a run with ``seed``."""
    return torch.Generator().manual_seed(stream_seed(seed, stream))


Progress = Callable[[int, int], None]
NO_NOISE = "no noise: not private"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained ``model`` in evaluation mode, and all ``events`` that touched private records.

    ``noise`` is the label of the noise source, which decides whether the run is private. ``mixing_GCC[a, j, k]`` is the
    probability of predicting k for a member of group a where the model says j, None predicts what it says; a
    :class:`fairpate.nn.fit.Mixture` predicts by a member that it draws. ``remarks`` belong in the statement.
    ``architecture`` is that of ``model``, if it is another than ``student.model``.

    Of methods that ask teachers, ``queries`` are how their queries ended, ``epsilon_bound`` is the guarantee that was
    fixed before the first, ``num_training_labels`` how many labels the model learned from.
    """

    model: nn.Module
    events: tuple[Event, ...]
    noise: str
    mixing_GCC: npt.NDArray[np.float64] | None = None
    remarks: tuple[str, ...] = ()
    architecture: ModelConfig | None = None
    queries: QueryOutcomes | None = None
    epsilon_bound: float | None = None
    num_training_labels: int | None = None

    def of_unit(self, unit: Unit) -> Self:
        """The same training with events for ``unit``, such as a person. They must bound what all records of the unit do
        together."""
        return replace(self, events=tuple(of_unit(event, unit) for event in self.events))


@dataclass(frozen=True, kw_only=True)
class Price:
    """An epsilon with everything that it depends on; ``inf`` if nothing is guaranteed."""

    epsilon: float
    delta: float
    unit: Unit
    relation: Relation
    accounting: Accounting


def price(
    events: Sequence[Event], *, delta: float, relation: Relation | None = None, accounting: Accounting = "pld"
) -> Price:
    """The accountant's epsilon of ``events`` at ``delta``; ``relation`` None is the events' own.

    If an event has no loss distribution, Renyi curves price all; pure guarantees may just add up. ValueError for events
    under another relation, for units or relations that differ, for no event, and for those that hold private votes.
    """
    relation = relation or (events[0].relation if events else None)
    if relation is None or any(event.relation != relation for event in events):
        raise ValueError(f"Expected events under relation {relation!r}, got {[e.relation for e in events]}.")
    # One accountant for all events: a curve and a loss distribution do not compose with each other.
    if not accountant.has_loss_distributions(events):
        accounting = "rdp"
    # Both bounds hold for any data, so that taking the smaller one reveals nothing.
    composed = accountant.epsilon_of(events, target_delta=delta, accounting=accounting)
    return Price(
        epsilon=min(composed, pure_epsilon(events)),
        delta=delta,
        unit=events[0].unit,
        relation=relation,
        accounting=accounting,
    )


def noise_within(target: PrivacyTarget, events_of: Callable[[float], Sequence[Event]]) -> float:
    """The least noise at which ``events_of(noise)`` stay within the target; as :func:`accountant.least_noise`."""
    return accountant.least_noise(
        events_of, target_epsilon=target.epsilon, target_delta=target.delta, accounting=target.accounting
    )


class NoisySum(Protocol):
    """Draws noisy sums of tables of whole numbers over several sites; this process holds the table of one site."""

    def __call__(self, exact_RW: IntArray, *, stddev: float, name: str, about: bytes = b"") -> IntArray:
        """Return the sum of all sites' tables with noise N_Z(0, stddev^2) on every number, the same at every site.

        ``exact_RW`` is this site's table; ``name`` says which sum of the release it is; ``about`` is the file of the
        model that the table describes, if any: tables of different models do not add up. All sites ask for the same
        sums in the same order.
        """


@dataclass(frozen=True, kw_only=True)
class Training:
    """The context that a method trains in: the data set, the model to start from, the folder, and where progress is
    reported.

    ``log`` counts and keeps releases; None for an estimator, whose releases are neither counted nor kept.
    ``noisy_sum`` draws the sums of a release over several sites; None: all private records are here.
    """

    dataset: Dataset
    model: nn.Module
    run: RunDirectory
    reporter: Reporter
    seed: int
    log: ReleaseLog | None = None
    noisy_sum: NoisySum | None = None

    def admit(self, events: Sequence[Event], noise: str) -> None:
        """Check that the release limits have room for all ``events`` of a method of several releases, before the first.

        LimitReachedError if there is no room. Then all of them are one plan: from the first charge on, no other run
        takes the room of the rest.
        """
        if self.log is not None:
            self.log.admit(events, noise=noise)

    def reserve(self, events: Sequence[Event], noise: str) -> None:
        """Charge ``events`` durably, before their noise is drawn.

        LimitReachedError, with nothing charged, if the release limits have no room: a refusal after the draw would
        reveal its outcome. An error or a crash after this call leaves all of them charged, a training that ends charges
        what it released. Sites charge a sum themselves, when its first message leaves.
        """
        if self.log is not None and self.noisy_sum is None:
            self.log.reserve(events, noise=noise)

    def release(
        self, draw: Callable[[], Released], *, settings: dict[str, Any], noise: str, name: str = ""
    ) -> Released:
        """Return one release of arrays: the one that the run has stored, or else the result of ``draw``, which is
        counted before it is stored.

        ``settings`` are all that determines it, except records, noise and earlier releases
        (:meth:`Method.settings_without`). A method of several releases calls it for each, the first without a ``name``;
        what it computes in between follows from the earlier ones, from public records and from the seed. Errors as
        :meth:`fairpate.run.release_log.ReleaseLog.step`.
        """
        if self.log is None:
            return draw()
        # A stored release of other public records is refused, not taken for this one: released arrays have a row for
        # each of them, in their order.
        pool = hashlib.sha256(json.dumps(list(self.dataset.public.record_id)).encode()).hexdigest()
        return self.log.step(draw, settings=settings, pool=pool, noise=noise, name=name)

    def generator(self, stream: Stream) -> torch.Generator:
        """A generator for one part of the run, independent of the others."""
        return torch_generator(self.seed, stream)


@dataclass(frozen=True, kw_only=True)
class ExpectedVotes:
    """The expected number of ``votes`` that decide a label, the noise on each count, and the number of public records
    with ``labels``."""

    votes: int
    noise_stddev_votes: float
    labels: int


class Method(Section):
    """One method, with the configuration of one run of it. A subclass adds sections, :meth:`train` and a name.

    ``title`` and ``paper`` are its words in pages and documentation. ``asks_teachers``: it releases votes on public
    records through a ledger, which a service may continue. ``releases_model``: the trained model is a release itself,
    and not only learned from earlier ones. ``reads_groups``: it looks at the groups of private records.
    ``protects_persons``: its events bound what all records of a person do together, where the data set names persons;
    a method that does not is refused such data. ``is_private``: it guarantees any privacy; nothing is published of a
    run without. ``protects_attribute_only``: the sensitive attribute alone is protected, and features count as public.
    ``has_student``: a student learns from released labels, as ``student`` says; other methods read these settings for
    ``public_data.self_label`` alone. ``reads_public``: it uses public records beyond the settings in ``public_data``.
    ``rate_tells_size``: the sampling rate reveals the real number of private records, as one for a declared number does
    not.
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    asks_teachers: ClassVar[bool] = False
    releases_model: ClassVar[bool] = True
    reads_groups: ClassVar[bool] = True
    protects_persons: ClassVar[bool] = False
    is_private: ClassVar[bool] = True
    protects_attribute_only: ClassVar[bool] = False
    reads_public: ClassVar[bool] = False
    learns_two_classes: ClassVar[bool] = False
    has_student: ClassVar[bool] = False
    rate_tells_size: ClassVar[bool] = True

    method: str = Field("", description="A name of `fairpate methods`, or module:Class.")
    out: Path | None = Field(None, description="Run directory; null names it after method, data and configuration.")
    names_earlier: bool = Field(
        False,
        description="Whether the statement, the report and the card name the operator's earlier releases on the data "
        "set, and what they cost together. The terminal always shows it.",
    )
    seed: Seed = Field(0, description="Seed of splits into shards, of training and of the bootstrap; never of noise.")
    data: DataConfig = DataConfig()
    target: Terms = Terms()
    student: StudentConfig = Field(
        StudentConfig(),
        description="The published model. `fit`, `method`, `confidence` and `rounds` configure how a student learns "
        "from released labels; a method that releases none reads them only for public_data.self_label.",
    )
    training: TrainingConfig = Field(
        TrainingConfig(),
        description="Read where teachers or a student learn; a method without either reads it only for "
        "public_data.self_label.",
    )
    augment: AugmentConfig = Field(
        AugmentConfig(),
        description="Random changes of the pictures that teachers and students train on; a method without either reads "
        "them only for public_data.self_label.",
    )
    backbone: BackboneConfig = BackboneConfig()
    public_data: PublicDataConfig = PublicDataConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def networks(self) -> dict[str, ModelConfig]:
        """The architectures with what they start from, by the section that names them."""
        found = {}
        for section in ("teachers", "student"):
            if getattr(self, section, None) is not None:
                network: NetworkConfig = getattr(self, section).model
                # Other architectures have no weights to start from.
                start = dict(self.backbone) if network.name in BACKBONES else {}
                found[f"{section}.model"] = ModelConfig(**dict(network), **start)
        return found

    @model_validator(mode="after")
    def _has_one_backbone(self) -> Self:
        if self.backbone.weights is None:
            return self
        names = {network.name for network in self.networks.values()}
        # One file, and `imagenet` too becomes one.
        if len(names.intersection(BACKBONES)) != 1:
            raise ValueError(
                f"backbone.weights: expected one architecture among {', '.join(BACKBONES)}, got "
                f"{' and '.join(sorted(names))}; set {' or '.join(f'{section}.name' for section in self.networks)}."
            )
        return self

    @property
    def student_training(self) -> StudentTraining:
        """The student's section, with its initial weights and its optimiser."""
        student = self.student
        learning = {name: getattr(student, name) for name in LearningConfig.model_fields}
        fit = FitConfig(**dict(student.fit), **dict(self.training), label_smoothing=student.label_smoothing)
        return StudentTraining(model=self.networks["student.model"], fit=fit, **learning)

    def teachers_training(self, teachers: TeachersConfig) -> TeachersTraining:
        """The section of the teachers, with their initial weights and their optimiser."""
        shards = {name: getattr(teachers, name) for name in ShardsConfig.model_fields}
        fit = FitConfig(**dict(teachers.fit), **dict(self.training))
        return TeachersTraining(model=self.networks["teachers.model"], fit=fit, **shards)

    @property
    def reads_public_groups(self) -> bool:
        """True if the method reads the groups of public records."""
        return self.reads_public or self.public_data.calibration is not None

    @property
    def needing_public(self) -> tuple[str, ...]:
        """The settings that need public records: the dotted fields, and `method` if the method itself does."""
        uses = (f"public_data.{name}" for name, use in self.public_data if use is not None)
        return ("method",) * self.reads_public + tuple(uses)

    @property
    def unit(self) -> str:
        """The protected unit, in words."""
        if not self.is_private:
            return "nothing"
        if self.protects_attribute_only:
            return "sensitive attribute"
        return "record or person" if self.protects_persons else "record"

    def unit_of(self, dataset: Dataset) -> Unit:
        """The unit of privacy that the method's events are priced for on this data set."""
        return "sensitive attribute" if self.protects_attribute_only else dataset.unit

    @property
    def is_seeded(self) -> bool:
        """True if the method's noise is reproducible, so that the run is not private."""
        return getattr(self, "noise", None) == "seeded"

    @property
    def unread(self) -> dict[str, str]:
        """Fields and sections (dotted) that are not read under these settings, each with the field that switches it
        off. Digests leave them out."""
        if self.has_student or self.public_data.self_label is not None:
            return {}
        return dict.fromkeys(LEARNING_FIELDS, "public_data.self_label")

    def check(self) -> None:
        """Refuse settings that exclude each other with a ConfigError, before anything is read or written."""

    def check_data(self, dataset: Dataset) -> None:
        """Raise ConfigError for a data set that the method cannot learn from, before anything is written; also if it
        names persons and nothing bounds what a person's records do together, or has fewer records than teachers."""
        # A person with k records would be k changes at once, for which an epsilon of one change is far too small.
        if dataset.unit == "person" and self.is_private and (self.protects_attribute_only or not self.protects_persons):
            reason = "has no bound on what all records of a person do together"
            if self.protects_attribute_only:
                reason = "protects the sensitive attribute of one record, and a person's stands in several"
            raise ConfigError(
                f"data.unit: {self.method} {reason}, but {dataset.name} names persons; set data.unit=record, which "
                "protects each record by itself, or choose another method."
            )
        teachers = getattr(self, "teachers", None)
        # Without a word on how many there are. Of several sites, others may have more than this one.
        count = teachers.num_teachers if isinstance(teachers, TeachersConfig) and dataset.shared_unit is None else 0
        if count > dataset.private.num_protected:
            raise ConfigError(
                f"teachers.num_teachers: {count} teachers, but fewer private {dataset.unit}s in {dataset.name}, so "
                "that most would learn from nothing; lower it."
            )
        if not len(dataset.public) and (needing := self.needing_public):
            others = {"method": "choose residual_votes or dp_sgd", "student.model.name": "set it to logistic"}
            other = others.get(needing[0], "leave it out")
            raise ConfigError(
                f"{needing[0]}: {self.method} needs public records for it, and {dataset.name} has none; name a file of "
                f"them (files.public), raise data.num_public, or {other}."
            )
        if self.learns_two_classes and dataset.num_classes != 2:
            raise ConfigError(
                f"data.name: {self.method} learns two classes, {dataset.name} has {dataset.num_classes}; choose "
                "another data set or method."
            )

    def voting(self, dataset: Dataset, num_records: int) -> ExpectedVotes | None:  # noqa: ARG002
        """Return the votes to expect on a public record for a public number ``num_records`` of private records, or None
        for a method without votes."""
        return None

    def planned_events(self, dataset: Dataset) -> tuple[Event, ...] | None:  # noqa: ARG002
        """Return all events of a training on ``dataset``, if they are known before it, or None.

        Of private records their number alone is read.
        """
        return None

    def train(self, training: Training) -> Trained:
        """The model, and all events that touched private records.

        What it releases before the model goes through :meth:`Training.release`. Such a method returns the events of
        all of them, and sets ``releases_model`` to False if the model is learned from them and public records alone.
        """
        raise NotImplementedError

    def settings_without(self, *fields: str) -> dict[str, Any]:
        """All settings that determine the run's result, without the dotted ``fields``, which a release does not
        read."""
        # Evaluation follows the release and does not change it.
        return without(determining_values(self), (*fields, "evaluation"))

    def price(self, trained: Trained) -> Price:
        """The price to publish of ``trained``: the accountant's price of its events, or its own larger bound."""
        known = {name: value for name in ("relation", "accounting") if (value := getattr(self.target, name, None))}
        cost = price(trained.events, delta=self.target.delta, **known)
        # A limit that was fixed before the first query holds also where later ones were chosen in view of answers.
        return cost if trained.epsilon_bound is None else replace(cost, epsilon=trained.epsilon_bound)

    def require_trainable(self) -> None:
        """Raise ConfigError for what :meth:`check` refuses, and for an attribute among features that count as
        public."""
        self.check()
        if not self.protects_attribute_only:
            return
        declared = None if self.data.declaration is None else entry_for(self.data)
        # To such a method features are public: one that shows the attribute would publish it before any noise.
        option = option_showing_attribute(self.data.name, self.data.options, declared)
        if option is not None:
            raise ConfigError(
                f"data.options.{option}: {self.method} protects the sensitive attribute alone and counts features as "
                "public, but with true they show it; set it to false, or choose a method that protects whole records."
            )


class UnprotectedMethod(Method):
    """A method without noise, for comparison only. Its event has infinite cost, and its run is for the operator
    only."""

    is_private: ClassVar[bool] = False


class PrivateMethod(Method):
    """A method whose noise is computed from a target."""

    target: PrivacyTarget = PrivacyTarget()
    noise: Noise = Field("os_entropy", description="`seeded` reproduces a run and gives no privacy.")

    @property
    def is_private(self) -> bool:  # type: ignore[override]
        """True if the target asks for noise."""
        return self.target.epsilon < math.inf

    def randomness(self, stream: Stream = Stream.NOISE) -> PrivateRandomness:
        """The source of secret samples and Gaussian noise."""
        # With torch, which reading a configuration does not need.
        from fairpate.nn.private_fit import OsRandomness, SeededRandomness

        return SeededRandomness(stream_seed(self.seed, stream)) if self.noise == "seeded" else OsRandomness()

    @property
    def source(self) -> NoiseSource:
        # Anybody with the configuration can draw seeded noise again and subtract it.
        return OsEntropy() if self.noise == "os_entropy" else SeededSource(stream_seed(self.seed, Stream.NOISE))

    def check(self) -> None:
        """Raise ConfigError for a relation that no sensitive attribute has, if the attribute alone is protected."""
        # An attribute is never added or removed: every record has one.
        if self.protects_attribute_only and self.target.relation not in (None, "replace one"):
            raise ConfigError(
                f"target.relation: {self.method} protects a sensitive attribute, so the relation is replace one, got "
                f"{self.target.relation!r}; leave it out."
            )

    def require_mixture(self, *, of_linear_rules: bool) -> None:
        """Raise ConfigError for settings that would change the published randomised classifier, and, if it mixes linear
        rules, for a published model that is not linear."""
        for field in ("calibration", "self_label"):
            if getattr(self.public_data, field):
                raise ConfigError(
                    f"public_data.{field}: {self.method} publishes a randomised classifier; leave it out."
                )
        if of_linear_rules and self.student.model.name != "logistic":
            raise ConfigError(
                f"student.model.name: {self.method} publishes linear rules, got {self.student.model.name}; set "
                "logistic."
            )


class ReleasingMethod(PrivateMethod):
    """A method that draws one release of arrays and then learns from it.

    ``afterwards`` lists the dotted fields that only learning reads. Runs that differ in these fields alone may share a
    release at no privacy cost. A change of any other field makes a new release, which is counted: a field that is
    missing from the list costs budget but never breaks the guarantee.
    """

    releases_model: ClassVar[bool] = False
    afterwards: ClassVar[tuple[str, ...]] = ("student", "training", "augment", "backbone", "public_data")

    @property
    def release_settings(self) -> dict[str, Any]:
        """The settings that determine the release, together with records and noise."""
        return self.settings_without(*self.afterwards)

    @property
    def release_alone(self) -> ReleasingMethod:
        """The same method with all fields that only learning reads at their defaults: it draws the same release."""
        return type(self).model_validate(self.release_settings | {"data": self.data, "out": self.out})

    def release(self, training: Training) -> Released:
        """Return the stored release of the run, or measure the private records once, count the release and store it."""
        # With the rule of a hashed split, which data from Python have without any setting that says so.
        rule = {"parts": training.dataset.parts} if training.dataset.parts else {}
        settings = self.release_settings | rule
        return training.release(lambda: self.measure(training), settings=settings, noise=self.source.label)

    def measure(self, training: Training) -> Released:
        """Read the private records, once, and return the noisy arrays."""
        raise NotImplementedError

    def rehearse(self, dataset: Dataset, noisy_sum: NoisySum) -> Released:
        """The release where ``noisy_sum`` answers for all private records: those of ``dataset`` are not read."""
        training = Training(
            dataset=replace(dataset, private=dataset.private.take(range(0)), is_elsewhere=True),
            model=torch.nn.Identity(),
            run=RunDirectory(root=Path()),
            reporter=Reporter(quiet=True),
            seed=self.seed,
            noisy_sum=noisy_sum,
        )
        return self.measure(training)

    def planned_events(self, dataset: Dataset) -> tuple[Event, ...] | None:
        """Return the events of the release, rehearsed without a private record."""
        events = self.rehearse(dataset, lambda exact_RW, **_: np.zeros_like(exact_RW)).events
        # Without records, persons are not known either.
        return tuple(of_unit(event, dataset.unit) for event in events)

    def learn(self, training: Training, released: Released) -> Trained:
        """Train the model from the release and from public records."""
        raise NotImplementedError

    def train(self, training: Training) -> Trained:
        return self.learn(training, self.release(training))

    def private_population(
        self,
        released: Released,  # noqa: ARG002 - most releases hold no groups
        dataset: Dataset,  # noqa: ARG002
        student: Student,  # noqa: ARG002
    ) -> PrivatePopulation | None:
        """Estimate how ``student`` treats the groups of private records; None if the release does not allow an
        estimate."""
        return None


def config_digest(config: Method) -> str:
    """Return twelve hexadecimal digits that identify what ``config`` computes, on any machine.

    Left out are the places where that happens, and what the configuration does not read.
    """
    return values_digest(determining_values(config))


def determining_values(config: Method, values: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the plain values that determine what ``config`` computes, without paths and without unread settings.

    ``values`` None are those of ``config``.
    """
    kept = without(config.model_dump(mode="json") if values is None else values, (*PLACES, *config.unread))
    # Left out at their defaults, so that runs from before they could be set keep their digests.
    if kept.get("evaluation") == EvaluationConfig().model_dump(mode="json", exclude={"fair_at"}):
        del kept["evaluation"]
    elif kept.get("evaluation", {}).get("metrics") == "outside":
        kept = without(kept, ("evaluation.metrics", "evaluation.score_edges"))
    if kept["data"].get("split") is None:
        kept = without(kept, ("data.split",))
    if "keep" in (aggregator := kept.get("aggregator", {})) and not aggregator["keep"]:
        kept = without(kept, ("aggregator.keep",))
    return kept


def check_release_of(config: Method, source: Path) -> None:
    """Raise ConfigError or RunDirectoryError unless ``config`` can learn from the release of the run in ``source``."""
    if not isinstance(config, ReleasingMethod):
        raise ConfigError(f"method: {config.method} keeps no release that another run could learn from.")
    found = RunDirectory(root=source).released
    if not found.is_file():
        raise RunFolderError(f"{source}: holds no release ({found.name}); give the folder of a finished run.")
    origin = read_release(found)[1]
    # The rule of a hashed split is compared once the data are read.
    settings = {name: value for name, value in origin.settings.items() if name != "parts"}
    require_same_settings(replace(origin, settings=settings), config.release_settings, found)


def arguments(training: Training, *, groups: bool = False) -> dict[str, Any]:
    """The arguments that every trainer takes: the model and private records, with their groups if asked."""
    private = training.dataset.private
    records = {"model": training.model, "x": private.x, "y": private.y}
    return records | ({"groups": private.z} if groups else {}) | {"generator": training.generator(Stream.TRAINING)}


Values = dict[str, Any]
Names = tuple[str, ...]
"""A field: the names of the sections that it is in, then its own."""


def require_trusted(method: Any, path: Path) -> None:
    """Raise ConfigError if the file ``path`` names a method as ``module:Class`` and may not name code."""
    if isinstance(method, str) and PLACE.fullmatch(method) and not may_run(method):
        raise ConfigError(f"method: {path} names {method}, code that would run with your rights; {REMEDY}.")


def configured(
    source: Values | Path | str | None,
    overrides: Sequence[Override] = (),
    *,
    method: str | None = None,
    exactly: bool = False,
) -> Method:
    """The checked configuration of one method.

    Args:
        source: A mapping of sections, the path of a YAML file, or None for the method's defaults. A file may serve
            several methods: sections of other methods are checked and left out.
        overrides: ``section.field=value``, read as YAML, or a field and its value, on top of ``source``. One that the
            method does not read is an error.
        method: The method's name, or ``module:Class``; None: the one that ``overrides`` or ``source`` name, or
            ``fairpate``.
        exactly: Whether a field in ``source`` that the method does not read is an error, as in ``overrides``.

    Raises:
        ConfigError: Lists every fault with its field, value and remedy.
    """
    values, said = source if isinstance(source, dict) else {}, _said(overrides)
    if isinstance(source, Path | str):
        values = read_yaml(source)
        if {"methods", "data_sets"} & values.keys():
            raise ConfigError(f"{source}: a sweep, with methods and data_sets; `fairpate compare` runs it.")
        # A file may come from anybody; an option was typed by its user.
        if method is None and "method" not in said:
            require_trusted(values.get("method"), Path(source))
    if method is not None and said.get("method", method) != method:
        raise ConfigError(f"method: {method} is asked for, and --set says {said['method']}; leave one of them out.")
    # What was typed wins over a file.
    named = (method, said.get("method"), values.get("method"), DEFAULT)
    name = next(name for name in named if name is not None)
    if not isinstance(name, str):
        raise ConfigError(f"method: expected a name, got {name!r}.")
    schema = find_method(name)
    faults = []
    fields = [each.partition("=")[0] if isinstance(each, str) else each[0] for each in overrides]
    for given, is_meant in ((values, exactly), (said, True)):
        for path, value in unread_by([schema], given):
            found = refused(path, value)
            # What another method reads in a file is left out; an option was meant for this one.
            if not found and is_meant:
                dotted = ".".join(path)
                # As the user wrote them.
                options = [field for field in fields if field.startswith(f"{dotted}.")] or [dotted]
                found = [f"{option}: {name} does not read it; leave it out." for option in options]
            faults += found
    full = merge(schema().model_dump(), values)
    for override in overrides:
        apply_override(full, override)
    try:
        config = parse_config(read_of(schema, full) | {"method": name}, schema)
    except ConfigError as error:
        # Each fault once, although both checks may find it.
        raise ConfigError("\n".join(dict.fromkeys([*faults, str(error)]))) from error
    settings = flattened(config.model_dump(mode="json"))
    for field, value in flattened(said).items():
        cause = why_unread(config, field, settings)
        if cause is not None and value is not None:
            at = f"={json.dumps(settings[cause])}".replace('"', "") if cause in settings else ""
            faults.append(f"{field}: {cause}{at} leaves it unread; leave it out, or change {cause}.")
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(faults)))
    return config


def why_unread(config: Method, field: str, settings: Mapping[str, Any]) -> str | None:
    """The setting that keeps ``config`` from reading ``field``, or None. ``settings`` are its values by dotted
    names."""
    # With a dot behind both, as the name of one field may begin that of another.
    own = (cause for unread, cause in config.unread.items() if f"{field}.".startswith(f"{unread}."))
    return next(own, None) or unread_because_of(field, settings)


def _said(overrides: Sequence[Override]) -> Values:
    said: Values = {}
    for override in overrides:
        apply_override(said, override)
    return said


def read_of(schema: Any, values: Mapping[str, Any]) -> Values:
    """``values`` without the fields that the method or section does not read."""
    # Without fields of its own it takes any name, as the options of a loader do.
    own = _fields(schema)
    return {
        name: read_of(own[name], value) if name in own and isinstance(value, Mapping) else value
        for name, value in values.items()
        if name in own or not own
    }


def unread_by(schemas: Sequence[Any], values: Mapping[str, Any], *sections: str) -> Iterator[tuple[Names, Any]]:
    """Fields that none of ``schemas`` has, with their values."""
    own = [_fields(schema) for schema in schemas]
    if not all(own):  # any name is allowed here, or its own type says which
        return
    for name, value in values.items():
        inner = [fields[name] for fields in own if name in fields]
        if not inner:
            yield (*sections, str(name)), value
        elif isinstance(value, Mapping):
            yield from unread_by(inner, value, *sections, name)


def refused(path: Names, value: Any) -> list[str]:
    """The reasons why no method takes ``value`` as its field ``path``; none if one does.

    Methods are imported one by one until one takes it, the method that the section is named after first: a file with
    sections of several methods is read without importing them all.
    """
    *sections, last = path
    for name in reversed(path):
        value = {name: value}
    faults, names, inside, closest = [], dict[str, None](), dict[str, None](), 0
    for method in sorted(method_names(), key=lambda method: method != path[0]):
        try:
            other = find_method(method)
        except ConfigError:  # another package's that cannot be imported
            if method in _OURS:
                raise
            continue
        fields = _fields(other)
        inside |= {f"{name}.{last}": None for name, section in fields.items() if last in _fields(section)}
        for section in sections:
            fields = _fields(fields.get(section))
        names |= dict.fromkeys(fields)
        if last not in fields:
            continue
        try:
            parse_config(merge(other().model_dump(), value), other)
        except ConfigError as error:
            found = str(error).splitlines()
            depth = max(fault.partition(":")[0].count(".") for fault in found)
            if depth >= closest:  # of the method that has most of the path
                faults, closest = found, depth
        else:
            return []
    # A field without its section, such as `epsilon`.
    meant = f"; did you mean {' or '.join(inside)}?" if inside and not sections else f"{nearest(last, names)}."
    return faults or [f"{'.'.join(path)}: unknown field{meant}"]


def _fields(annotation: Any) -> Values:
    """The fields of a section, also of one that may be null."""
    # A section that may be null is a union, and one of its parts the section.
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return {name: field.annotation for name, field in part.model_fields.items()}
    return {}


FITTED = "residual_votes"
"""The method that is used if none is named and :func:`default_method` finds no reason for another."""
COUNTS = "record_votes"
STDDEVS_PER_CELL = 4
"""How far a count of `record_votes` should stand out from its noise, in standard deviations."""
_PER_TEACHER, _FEWEST_TEACHERS, _MOST_TEACHERS, _FEWEST_EACH = 100, 20, 500, 4
_MOST_QUERIES = 1000
_MANY_RECORDS, _SMALL_RATE, _LARGE_RATE = 5000, 0.1, 0.5
_SMALL_SHARE, _LARGE_SHARE = 0.05, 0.1  # of a sample that votes
_FEWEST_NEIGHBOURS, _CLUSTERS = 20, 30
_RECORDS_PER_COMPONENT, _FEWEST_COMPONENTS, _MOST_COMPONENTS = 100, 10, 200
_FOLLOW_FROM_COUNT = frozenset({"teachers", "private_knn", "record_votes", "dp_sgd"})
_BATCHES, _SMALLEST_BATCH, _LARGEST_BATCH = 50, 32, 512


def resolved(overrides: Sequence[Override], method: str | None = None, *, num_sites: int = 1) -> Method:
    """The configuration of a run without a file: settings that suit the data set, with ``overrides`` on top.

    `fairpate run` without a file uses it, and commands that are printed rely on it. ``num_sites`` sites each have as
    many records as the data set declares.
    """
    said, start = _said(overrides), Values()
    name = said.get("method") if method is None else method
    if name is None:
        name, _ = default_method(overrides, num_sites=num_sites)
    # Anything else than a name is refused with the rest of the configuration.
    if isinstance(name, str):
        start = fitted(parse_config(said.get("data", {}), DataConfig), name, num_sites=num_sites)
    return configured(start, overrides, method=method)


def default_method(overrides: Sequence[Override], *, num_sites: int = 1) -> tuple[str, str]:
    """The method that is used under ``overrides`` if none is named, and the reason; both from public facts alone.

    The first release of residual votes is a sum of vectors of norm at most one for each of C classes, with noise of
    standard deviation s on each number. The means of C classes differ in C - 1 directions, in which the noise has norm
    s sqrt(C - 1); the n / C records of a class make its sum n / C long at most. Where the noise is longer, the sums
    tell classes apart badly. Then each record adds one count, at the nearest of few prototypes (`record_votes`), if the
    counts allow as many prototypes as there are classes. Both never hold for fewer than five classes. Not for persons,
    whose one vote is spread over the cells of all their records.
    """
    said = _said(overrides)
    data = parse_config(said.get("data", {}), DataConfig)
    entry = entry_for(data)
    if any(unread_by([find_method(COUNTS)], said)):
        return FITTED, "its settings are given."
    if entry.rows is None:
        return FITTED, "the data set declares no number of records."
    if pool_size(data) == 0:
        return FITTED, "there are no public records."
    if entry.num_persons(data.options, data.unit) is not None:
        return FITTED, "persons are protected."
    count, num_classes = entry.rows * num_sites, entry.num_classes
    try:
        usual: Any = find_method(FITTED)(target=parse_config(said.get("target", {}), PrivacyTarget))
        noise = usual.noise_of_sums * math.sqrt(num_classes - 1)
        cells = int(count / (STDDEVS_PER_CELL * usual.multiplier()))
    except ValueError:  # refused with the rest of the configuration, or by the run
        return FITTED, "no noise meets the target."
    facts = (
        f"{noise:,.0f}, and a class has {count / num_classes:,.0f} records on average by the publisher's count "
        f"({num_classes} classes)"
    )
    if noise <= count / num_classes:
        return FITTED, f"its sums stand out: their noise has norm {facts}."
    if cells < num_classes:
        return FITTED, f"counts are no better: {cells} of them stand out, for {num_classes} classes."
    return COUNTS, f"sums of vectors do not stand out: their noise would have norm {facts}; {cells} counts do."


def fitted(data: DataConfig, method: str | None = None, *, num_sites: int = 1) -> Values:
    """Settings of ``method`` that suit ``data``; None: of :data:`FITTED`."""
    name, entry = FITTED if method is None else method, entry_for(data)
    # A declaration need not say how many records there are, unless a section is computed from it. Then they are many.
    needed = _FOLLOW_FROM_COUNT & find_method(name).model_fields.keys() or entry.rows is not None
    count = _RECORDS_PER_COMPONENT * _MOST_COMPONENTS
    if needed:
        count = entry.num_persons(data.options, data.unit) or entry.public_rows
    return fitted_to(name, count=count, num_public=pool_size(data), num_sites=num_sites)


def fitted_to(name: str, *, count: int, num_public: int, num_sites: int = 1) -> Values:
    """Settings that suit ``count`` protected records or persons at each site and ``num_public`` public records.

    Teachers are those of a site; what is computed from the sum over all sites follows from all records.

    Values that the method's class sets itself take precedence.
    """
    method = find_method(name)()
    own = {section: value for section, value in method if isinstance(value, Section)}
    linear = {"model": {"name": "logistic"}, "fit": {"epochs": 60, "batch_size": 128, "learning_rate": 0.01}}
    # Only a part of few persons is private; teachers and batches must have some of them.
    most = max(2, count // _FEWEST_EACH)
    teachers = min(max(_FEWEST_TEACHERS, min(count // _PER_TEACHER, _MOST_TEACHERS)), most)
    many = count > _MANY_RECORDS
    rate, share = (_SMALL_RATE, _SMALL_SHARE) if many else (_LARGE_RATE, _LARGE_SHARE)
    # None: a smaller pool is queried in full.
    num_queries = _MOST_QUERIES if num_public > _MOST_QUERIES else None
    values: Values = {
        "method": name,
        "student": linear,
        "teachers": linear | {"num_teachers": teachers},
        "aggregator": {
            "num_queries": num_queries,
            # Counts teach no student that learns from released attributes.
            "release": "label" if method.protects_attribute_only else "counts",
            # A start: where there is a target, the noise is scaled until the queries fit.
            "mechanism": {"threshold": float("-inf"), "noise_stddev_votes": teachers / 10},
        },
        "private_knn": {
            "queries": "first" if many else "typical",
            "sampling_rate": rate,
            "num_neighbours": max(_FEWEST_NEIGHBOURS, int(share * rate * count)),
        },
        "record_votes": {"rule": "linear", "num_records": count * num_sites},
        "dp_sgd": {
            "epochs": 5,
            "batch_size": min(max(_SMALLEST_BATCH, min(count // _BATCHES, _LARGEST_BATCH)), most),
            "learning_rate": 0.5,
        },
    }
    if name == "private_knn":
        asked = num_queries if many else max(1, min(_CLUSTERS, num_public))
        values["aggregator"] = {"num_queries": asked, "release": "counts"}
    if not method.protects_attribute_only:
        # Every number of a record gets the same noise, and few records stand out against it in few numbers only.
        wanted = max(_FEWEST_COMPONENTS, count * num_sites // _RECORDS_PER_COMPONENT)
        values["data"] = {"embedding": {"num_components": min(wanted, _MOST_COMPONENTS)}}
    # What the class sets itself counts as set in its sections; defaults of a section do not.
    own_values = {section: value.model_dump(exclude_unset=True) for section, value in own.items()}
    return read_of(type(method), merge(values, own_values))
