"""The base class of all methods, with configuration, checks and training, and the registry.

A method reads private records and returns a model and the events that touched these records. It states no epsilon:
:func:`price` computes it with the accountant. The fields of a :class:`Method` are all settings that a run reads, so the
digest of a run, the command that repeats it, ``--help`` and the estimator are derived from the class. Sections are
shared: ``dp_sgd`` means the same in every method that has it. A method is registered by standing in this folder;
another package registers one under the entry point group ``fairpate.methods``, or its method is named as
``module:Class``. All that is said of a method (its look, what it needs, its attack, its sums) stands on its class.

The configuration of one method is read from YAML and ``section.field=value``. A file may serve several methods:
settings of other methods are checked and ignored, and settings of no method are an error. An option
``section.field=value`` that the method does not read is an error, and so is one that another setting disables; a file
may contain disabled settings, as the configuration of a finished run does.

Shapes: N private records, M public ones, G groups, C classes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, get_args

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, model_validator

from aggregator.mechanism import lead_needed
from fairpate import config as configuration
from fairpate.config import ConfigError, DataConfig, Noise, Section, Seed, apply_override, parse_config, without
from fairpate.data import REGISTRY, Dataset, Split, entry_for
from fairpate.files import Storage
from fairpate.lazy import torch
from fairpate.pages import percent
from fairpate.privacy import accountant
from fairpate.privacy.accountant import Accounting, Event, PoissonGaussians, of_unit, pure_epsilon
from fairpate.privacy.discrete_gaussian import NoiseSource, OsEntropy, SeededSource
from fairpate.releases.directory import DataRecord, ReleasedArrays, RunDirectory, RunFolderError, read_release
from fairpate.releases.run_ledger import Charging
from fairpate.terminal import Reporter
from fairpate.types import Advance, IntArray, QueryOutcomes, Relation, Unit, VoteBatch, stream_seed

if TYPE_CHECKING:
    from fairpate.nn.private_fit import PrivateRandomness
    from fairpate.privacy.audit_bounds import Shadows
    from fairpate.report.population import PrivatePopulation
    from student.student import Student
    from teachers.ensemble import Ensemble
    from teachers.work import BlockPool

DEFAULT = "fairpate"
_GROUP = "fairpate.methods"


@cache
def standing_here(*, listed: bool = True) -> dict[str, str]:
    """Return the names of the methods of this folder, each with its class as ``module:Class``.

    A class is a method of its own if it states its name as the default of the field ``method``. Files are read for this
    line, because importing all of them takes a second. ``listed`` False: only methods that are found by name and not
    listed (``is_listed``).
    """
    found = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        for part in re.split(r"^class ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            kind, name = re.match(r"\w+", part), re.search(r'^    method: str = "(\w+)"$', part, re.MULTILINE)
            if kind and name and listed != ("\n    is_listed: ClassVar[bool] = False" in part):
                found[name[1]] = f"{_GROUP}.{file.stem}:{kind[0]}"
    return found


@cache
def method_names() -> Mapping[str, str]:
    """Return every registered method's name, with its class as ``module:Class``."""
    others = {entry.name: entry.value for entry in metadata.entry_points(group=_GROUP)}
    # Ours last: no other package takes the name of one of ours.
    return others | standing_here()


@cache
def find_method(name: str) -> type[Method]:
    """Return the class of a method, by its registered name or as ``module:Class``.

    ConfigError if it does not exist, cannot be imported or is incomplete.
    """
    place = (
        name if configuration.CODE_NAME.fullmatch(name) else {**standing_here(listed=False), **method_names()}.get(name)
    )
    if place is None:
        raise ConfigError(f"method: no method {name!r}{configuration.nearest(name, list(method_names()))}.")
    try:
        found = configuration.named_object(place)
    except Exception as error:  # anything that a module of another package raises
        raise ConfigError(
            f"method: {name} cannot be imported ({type(error).__name__}: {error}); name it as module:Class, and start "
            "in the module's folder or add that folder to PYTHONPATH."
        ) from error

    if not isinstance(found, type) or not issubclass(found, Method):
        raise ConfigError(
            f"method: {name}: expected a subclass of fairpate.methods.base.Method; `fairpate new NAME --example "
            "own-method` writes one."
        )
    missing = [word for word in ("title", "paper") if not hasattr(found, word)]
    if missing or found.train is Method.train:
        raise ConfigError(f"method: {name} is incomplete: the class lacks {', '.join(missing) or 'train'}; define it.")
    try:
        # Shows defaults that contradict each other, before a configuration is read over them.
        found()
    except ValueError as error:
        raise ConfigError(
            f"method: {name} cannot be made from its defaults ({error}); correct the defaults in this class."
        ) from error
    return found


def method_title(name: str) -> str:
    """Return the name that reports show for a method: its title, or for a method of another package its registered
    name, so that its code need not be imported."""
    return find_method(name).title if name in standing_here() | standing_here(listed=False) else name


def looks_of(names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Return the family and the colour of those methods in ``names`` that stand in this folder; a page must not import
    the code of others."""
    ours = standing_here() | standing_here(listed=False)
    return {name: (find_method(name).family, find_method(name).colour) for name in names if name in ours}


@cache
def voters_of_each_kind() -> dict[str, str]:
    """Return who votes on a label, in words, by those methods of this folder that stand for a kind of voters."""
    found = {name: find_method(name).voters for name in standing_here()}
    return {name: words for name, words in found.items() if words}


def all_methods() -> dict[str, type[Method]]:
    """Import every registered method and return the classes by name; methods of other packages that cannot be imported
    are left out."""
    return dict(_importable_methods())


def _importable_methods(first: str = "") -> Iterator[tuple[str, type[Method]]]:
    """Yield names and classes as :func:`all_methods` does, starting with the method ``first``; each is imported when it
    is asked for."""
    for name in sorted(method_names(), key=lambda name: name != first):
        try:
            yield name, find_method(name)
        except ConfigError:
            # One of ours that cannot be imported is a defect.
            if name in standing_here():
                raise


class Stream(IntEnum):
    """The parts of a run that draw random numbers of their own. Each part has a number, from which its seed is derived.

    The numbers must never change: earlier runs could not be reproduced otherwise.
    """

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


def torch_generator(seed: int, stream: Stream) -> torch.Generator:
    """Return a generator of random numbers for one part of a run, seeded by ``seed`` and the number of ``stream``."""
    return torch.Generator().manual_seed(stream_seed(seed, stream))


NO_NOISE = "no noise: not private"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The result of training a method: a ``model`` in evaluation mode, and all ``events`` that touched private records.

    ``noise`` is the label of the noise source, which decides whether the run is private. ``mixing_GCC[a, j, k]`` is the
    probability of predicting k for a member of group a if the model's label is j; None: the model's label is the
    prediction. ``remarks`` are written into the run's privacy statement. ``architecture`` is that of ``model``, if it
    differs from ``student.model``.

    Methods whose voters answer queries also set ``queries``, the numbers of queries by outcome, and ``epsilon_bound``,
    the guarantee that was fixed before the first query. ``num_training_labels``: how many released labels the model
    learned from.
    """

    model: torch.nn.Module
    events: tuple[Event, ...]
    noise: str
    mixing_GCC: npt.NDArray[np.float64] | None = None
    remarks: tuple[str, ...] = ()
    architecture: configuration.ModelConfig | None = None
    queries: QueryOutcomes | None = None
    epsilon_bound: float | None = None
    num_training_labels: int | None = None


@dataclass(frozen=True, kw_only=True)
class Price:
    """An epsilon, with the delta, unit, relation and accounting for which it holds; ``inf`` means no guarantee."""

    epsilon: float
    delta: float
    unit: Unit
    relation: Relation
    accounting: Accounting


def price(
    events: Sequence[Event], *, delta: float, relation: Relation | None = None, accounting: Accounting = "pld"
) -> Price:
    """Return the epsilon of ``events`` at ``delta`` as a :class:`Price`; ``relation`` None: the relation of the events.

    All events are composed by one accountant: by Renyi curves if an event has no loss distribution, else by
    ``accounting``. If all events are pure (they hold at delta 0) and the sum of their epsilons is smaller, the sum is
    returned.

    ValueError for no event, for events of different units, and for events under another relation than ``relation``;
    also for events that contain private votes, whose epsilon must not be published.
    """
    relation = relation or (events[0].relation if events else None)
    if relation is None or any(event.relation != relation for event in events):
        raise ValueError(
            f"Expected privacy events under relation {relation!r}, got {[e.relation for e in events]}; set "
            "target.relation to the relation of these events."
        )
    # One accountant for all events: a curve and a loss distribution do not compose with each other.
    if not accountant.has_loss_distributions(events):
        accounting = "rdp"
    composed = accountant.epsilon_of(events, target_delta=delta, accounting=accounting)
    # Both bounds hold for any data, so that taking the smaller one reveals nothing.
    least = min(composed, pure_epsilon(events))
    return Price(epsilon=least, delta=delta, unit=events[0].unit, relation=relation, accounting=accounting)


def noise_within(target: configuration.PrivacyTarget, events_of: Callable[[float], Sequence[Event]]) -> float:
    """Return the least noise at which ``events_of(noise)`` cost at most the target; see
    :func:`accountant.least_noise`."""
    return accountant.least_noise(
        events_of, target_epsilon=target.epsilon, target_delta=target.delta, accounting=target.accounting
    )


class NoisySum(Protocol):
    """Computes noisy sums of tables of whole numbers over several sites; this process has the table of one site."""

    def __call__(self, exact_RW: IntArray, *, stddev: float, name: str, about: bytes = b"") -> IntArray:
        """Return the sum of all sites' tables with noise N_Z(0, stddev^2) on every number, the same at every site.

        ``exact_RW`` is this site's table, and ``name`` identifies the sum within the release. ``about``: the content of
        a model's file, if the table counts the predictions of this model; tables about different models are not added
        up. All sites must request the same sums in the same order.
        """


class Watch(Protocol):
    """Sees every noisy release inside a training, for an audit of made-up records: exact values never leave a run."""

    def __call__(self, name: str, exact: Sequence[Any], released: Sequence[Any], *, norm: float) -> None:
        """See one release: its ``exact`` arrays, the arrays that are ``released``, and the ``norm`` that its noise is
        scaled to, the most that one unit may add."""


class RunLog(Charging, Protocol):
    """All that a method may ask of its run: to charge and store its releases, as
    :class:`fairpate.releases.log.ReleaseLog` does."""

    def check(self, events: Sequence[Event], *, noise: str) -> None:
        """Raise LimitReachedError if a run with the privacy ``events`` would exceed a limit of the data set."""

    def fix_plan(self, events: Sequence[Event], *, noise: str) -> None:
        """Check all ``events`` of the run against the operator's limits, and fix them as its plan."""

    def charge_ahead(self, events: Sequence[Event], *, noise: str) -> None:
        """Charge the ``events`` of a release durably, before its noise is drawn."""

    def step(
        self, draw: Callable[[], ReleasedArrays], *, settings: dict[str, Any], pool: str, noise: str, name: str = ""
    ) -> ReleasedArrays:
        """Return the stored release or else what ``draw`` returns, which is charged and stored."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The inputs of :meth:`Method.train`: data set, initial model, run directory, reporter of progress, and seed.

    ``log`` charges and stores releases; None for a scikit-learn style estimator, whose releases are neither charged nor
    stored. ``noisy_sum`` computes the sums of a release over several sites; None: all private records are on this site.
    ``watch`` sees the releases of each step of an audit's training; None in every run.
    """

    dataset: Dataset
    model: torch.nn.Module
    run: RunDirectory
    reporter: Reporter
    seed: int
    log: RunLog | None = None
    noisy_sum: NoisySum | None = None
    watch: Watch | None = None

    def admit(self, events: Sequence[Event], noise: str) -> None:
        """Check, before the first of several releases, that the operator's limits on privacy cost have room for all of
        them.

        ``events`` are those of all releases. LimitReachedError if there is no room. The first charge then reserves the
        room that the remaining releases need: no other run can use it.
        """
        if self.log is not None:
            self.log.fix_plan(events, noise=noise)

    def reserve(self, events: Sequence[Event], noise: str) -> None:
        """Charge ``events`` to the operator's odometer durably, before their noise is drawn.

        LimitReachedError, with nothing charged, if a limit on releases would be exceeded: a refusal after the draw
        would reveal its outcome. A training that finishes is charged only for what it released; after an error or a
        crash all of ``events`` stay charged. If several sites compute a sum, nothing is charged here: each site charges
        the events itself, when it sends the first message of that sum.
        """
        if self.log is not None and self.noisy_sum is None:
            self.log.charge_ahead(events, noise=noise)

    def release(
        self, draw: Callable[[], ReleasedArrays], *, settings: dict[str, Any], noise: str, name: str = ""
    ) -> ReleasedArrays:
        """Return one release of arrays. The run's stored release is returned if there is one; otherwise ``draw`` makes
        the release, which is then charged and stored.

        ``settings`` are all settings that determine the release together with records, noise and earlier releases
        (:meth:`Method.settings_without`). A method with several releases calls this once for each, and gives each but
        the first a ``name``. Between these calls the method may read only earlier releases, public records and the
        seed. Errors as :meth:`fairpate.releases.log.ReleaseLog.step`.
        """
        if self.log is None:
            return draw()
        # A stored release of other public records is refused, not taken for this one: released arrays have a row for
        # each of them, in their order.
        pool = hashlib.sha256(json.dumps(list(self.dataset.public.record_id)).encode()).hexdigest()
        return self.log.step(draw, settings=settings, pool=pool, noise=noise, name=name)

    def generator(self, stream: Stream) -> torch.Generator:
        """Return a generator for one part of the run, independent of those of other parts."""
        return torch_generator(self.seed, stream)


@dataclass(frozen=True, kw_only=True)
class ExpectedVotes:
    """An estimate made before a run: how many ``votes`` decide a label, the standard deviation of the noise on each
    count, and how many public records get ``labels``.

    ``fitted_together``: one rule is fitted to the answers on all these records, so that their noise averages out.
    ``labels_only``: an answer is the class with the largest noisy count, without the counts.
    """

    votes: int
    noise_stddev_votes: float
    labels: int
    fitted_together: bool = False
    labels_only: bool = False

    @property
    def lead_of_one(self) -> float:
        """The share of the votes by which a class must lead on one record to stand out from the noise 19 times in
        20."""
        return lead_needed(self.noise_stddev_votes) / self.votes

    @property
    def lead_needed(self) -> float:
        """The share of the votes by which a class must lead to stand out from the noise 19 times in 20: on one record
        or, where one rule is fitted to all counts, on average over the records. Above 1: it cannot."""
        lead = self.lead_of_one
        if not self.fitted_together:
            return lead
        # The sign of a small lead under Gaussian noise holds 2 / pi of the information in the noisy lead itself.
        return lead / math.sqrt(self.labels * (2 / math.pi if self.labels_only else 1))

    @property
    def lead_words(self) -> str:
        """The lead that stands out from the noise, as a clause."""
        where = "on average over all queries" if self.fitted_together else "on a record"
        lead = f"a lead of {percent(self.lead_needed)} of {self.votes:,} votes"
        return f"{lead} {where} stands out from the noise 19 times in 20"


@dataclass(frozen=True, kw_only=True)
class Audited:
    """What an attack knows of the run that is audited: its directory, the facts of its data, and the privacy ``events``
    that it states for its private records.

    ``loaded`` is the run's own data set, None for an audit on made-up records. ``is_control``: the releases are to have
    half the noise. ``initial_model(config, dataset)`` returns the model from which a training starts.
    """

    run: RunDirectory
    facts: DataRecord
    events: tuple[Event, ...]
    loaded: Dataset | None
    is_control: bool
    initial_model: Callable[[Method, Dataset], torch.nn.Module]


class Method(Section):
    """A method together with the configuration of one run. A subclass adds sections, :meth:`train` and a name.

    - ``title``, ``paper``: its name and its paper in reports and in the documentation.
    - ``family``, ``colour``: how charts draw it: a family of fairpate/report/looks.yaml, and the index of a colour that
      no other method of this family has.
    - ``is_listed``: `fairpate methods` lists it; other methods are found by name only.
    - ``asks_teachers``: voters answer its queries one by one through a ledger, the durable record of queries and
      charges, so that a service can submit further queries later.
    - ``voters``: who votes on a label, in words; only of one method for each kind of voters, which a dry run then shows
      with others.
    - ``trains_teachers``: it trains teachers on disjoint shards (:class:`TrainsTeachers`).
    - ``keeps_teachers``, ``keeps_votes``: voters, or the votes that they cast, remain after the run; ``lost_voters``
      says in an error what is gone if voters do not. ``votes_on_anything``: they can also vote on records that are not
      in the public pool.
    - ``keeps_release``: it keeps a release of arrays, from which other runs can learn (:class:`ReleasingMethod`).
    - ``sums_over_sites``: its releases are sums that several sites can draw together.
    - ``meets_target``: its noise is calibrated to the target of a training.
    - ``known_before``: None unless its events are known before it trains; else the condition on its settings, in words.
    - ``brings_data``: its records come with a file that its settings name (:meth:`own_dataset`).
    - ``leaves_room``: its privacy budget may have room for further queries after the run.
    - ``publishes_model``: a run trains a model, and does not only release labels.
    - ``has_gate``: a fairness rule refuses some of its answers, by the groups of public records.
    - ``releases_model``: the trained model is itself a release, not only learned from earlier releases.
    - ``reads_groups``: it reads the groups of private records.
    - ``protects_persons``: its events cover all records of a person together; without this, data sets that name persons
      are refused.
    - ``is_private``: it has a privacy guarantee; without one, nothing of a run is published.
    - ``protects_attribute_only``: only the sensitive attribute is protected, and features count as public.
    - ``learns_two_classes``: it refuses data sets with more than two classes.
    - ``publishes_mixture``: it publishes a classifier that draws its predictions at random.
    - ``publishes_linear_rules``: its published model must be linear (``logistic``).
    - ``has_student``: a student learns from released labels, as ``student`` configures. Other methods read these
      settings only for ``public_data.self_label``.
    - ``reads_public``: it uses public records even without a setting in ``public_data``.
    - ``failed_checks``: scikit-learn's checks that its estimator does not pass, each with the reason.
    - ``rate_tells_size``: the published sampling rate was computed from the real number of private records, and so
      reveals this number.
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    family: ClassVar[str]
    colour: ClassVar[int]
    is_listed: ClassVar[bool] = True
    asks_teachers: ClassVar[bool] = False
    voters: ClassVar[str] = ""
    trains_teachers: ClassVar[bool] = False
    keeps_teachers: ClassVar[bool] = False
    keeps_votes: ClassVar[bool] = False
    lost_voters: ClassVar[str] = "teachers were not kept"
    votes_on_anything: ClassVar[bool] = False
    has_gate: ClassVar[bool] = False
    leaves_room: ClassVar[bool] = False
    keeps_release: ClassVar[bool] = False
    sums_over_sites: ClassVar[bool] = False
    meets_target: ClassVar[bool] = False
    known_before: ClassVar[str | None] = None
    brings_data: ClassVar[bool] = False
    publishes_model: ClassVar[bool] = True
    releases_model: ClassVar[bool] = True
    reads_groups: ClassVar[bool] = True
    protects_persons: ClassVar[bool] = False
    is_private: ClassVar[bool] = True
    protects_attribute_only: ClassVar[bool] = False
    reads_public: ClassVar[bool] = False
    learns_two_classes: ClassVar[bool] = False
    publishes_mixture: ClassVar[bool] = False
    publishes_linear_rules: ClassVar[bool] = False
    has_student: ClassVar[bool] = False
    rate_tells_size: ClassVar[bool] = True
    failed_checks: ClassVar[Mapping[str, str]] = {}

    method: str = Field("", description="A name of `fairpate methods`, or module:Class.")
    out: Path | None = Field(None, description="Run directory; null names it after method, data and configuration.")
    names_earlier: bool = Field(
        False,
        description="Whether the statement, the report and the card name the operator's earlier releases on the data "
        "set, and what they cost together. The terminal always shows it.",
    )
    seed: Seed = Field(0, description="Seed of splits into shards, of training and of the bootstrap; never of noise.")
    data: DataConfig = DataConfig()
    target: configuration.Terms = configuration.Terms()
    student: configuration.StudentConfig = Field(
        configuration.StudentConfig(),
        description="The published model. `fit`, `method`, `confidence` and `rounds` configure how a student learns "
        "from released labels; a method that releases none reads them only for public_data.self_label.",
    )
    training: configuration.TrainingConfig = Field(
        configuration.TrainingConfig(),
        description="Optimiser of teachers and students; a method without either reads it only for "
        "public_data.self_label.",
    )
    augment: configuration.AugmentConfig = Field(
        configuration.AugmentConfig(),
        description="Random changes of the pictures that teachers and students train on; a method without either reads "
        "them only for public_data.self_label.",
    )
    backbone: configuration.BackboneConfig = configuration.BackboneConfig()
    public_data: configuration.PublicDataConfig = configuration.PublicDataConfig()
    evaluation: configuration.EvaluationConfig = configuration.EvaluationConfig()

    @property
    def architectures(self) -> dict[str, configuration.LayersConfig]:
        """The architectures of networks, without initial weights, by section (such as ``student.model``)."""
        return {"student.model": self.student.model}

    @property
    def networks(self) -> dict[str, configuration.ModelConfig]:
        """The configured architectures with their initial weights, by section (such as ``student.model``)."""
        found = {}
        for section, model in self.architectures.items():
            # Other architectures have no weights to start from.
            start = dict(self.backbone) if model.name in configuration.BACKBONES else {}
            found[section] = configuration.ModelConfig(**dict(model), **start)
        return found

    @model_validator(mode="after")
    def _has_one_backbone(self) -> Self:
        if self.backbone.weights is None:
            return self
        names = {network.name for network in self.networks.values()}
        # One file, and `imagenet` too becomes one.
        if len(names.intersection(configuration.BACKBONES)) != 1:
            raise ValueError(
                f"backbone.weights: expected one architecture among {', '.join(configuration.BACKBONES)}, got "
                f"{' and '.join(sorted(names))}; set {' or '.join(f'{section}.name' for section in self.networks)}."
            )
        return self

    @property
    def student_training(self) -> configuration.StudentTraining:
        """The settings of the student, with its initial weights and optimiser."""
        student, values = self.student, dict(self.student.fit) | dict(self.training)
        learning = {name: getattr(student, name) for name in configuration.LearningConfig.model_fields}
        fit = configuration.FitConfig(**values, label_smoothing=student.label_smoothing)
        return configuration.StudentTraining(model=self.networks["student.model"], fit=fit, **learning)

    @property
    def reads_public_groups(self) -> bool:
        """True if the method reads the groups of public records."""
        return self.reads_public or self.public_data.calibration is not None

    @property
    def needing_public(self) -> tuple[str, ...]:
        """The names of the settings that need public records, such as ``public_data.self_label``; the name `method` is
        among them if the method itself needs public records."""
        uses = (f"public_data.{name}" for name, use in self.public_data if use is not None)
        return ("method",) * self.reads_public + tuple(uses)

    @property
    def needs(self) -> tuple[str, ...]:
        """What `fairpate methods` lists that a run of this method needs, in words."""
        needs = {
            "teachers": self.trains_teachers,
            "pool": "method" in self.needing_public,
            "groups": self.reads_groups or self.has_gate,
            "two classes": self.learns_two_classes,
        }
        return tuple(what for what, is_needed in needs.items() if is_needed)

    @property
    def unit(self) -> str:
        """The unit of privacy, in words for reports."""
        if not self.is_private:
            return "nothing"
        if self.protects_attribute_only:
            return "sensitive attribute"
        return "record or person" if self.protects_persons else "record"

    def unit_of(self, dataset: Dataset) -> Unit:
        """Return the unit of privacy of the method's events on this data set."""
        return "sensitive attribute" if self.protects_attribute_only else dataset.unit

    @property
    def is_seeded(self) -> bool:
        """True if the method's noise is reproducible, so that the run is not private."""
        return False

    @property
    def draws_fresh_noise(self) -> bool:
        """True if the method draws noise from the operating system."""
        return False

    @property
    def declared_units(self) -> int | None:
        """The number of private records that the settings declare as public; None if they declare none."""
        return None

    @property
    def worker_ray(self) -> configuration.RayConfig | None:
        """The settings of the Ray workers that train or vote; None for a method that has none."""
        # Votes that were made elsewhere need none.
        found: configuration.RayConfig | None = None if self.brings_data else getattr(self, "ray", None)
        return found

    @property
    def service_ray(self) -> configuration.RayConfig:
        """The resources that a service of the published model reserves by default."""
        return configuration.RayConfig()

    @property
    def shared_release(self) -> Values | None:
        """The settings of the release of arrays that runs with the same settings share; None if it keeps none."""
        return None

    @property
    def shared_votes(self) -> Values | None:
        """The settings on which the votes depend that runs with the same settings share; None if it shares none."""
        return None

    @property
    def unread(self) -> dict[str, str]:
        """The fields and sections that have no effect, because another setting disables them. They are mapped to the
        name of that setting, and digests of the configuration leave them out.

        A section lists in ``disables`` which of its fields another of its fields disables by its value. A method whose
        setting disables a field of another section extends this property.
        """
        learns = self.has_student or self.public_data.self_label is not None
        unread = {} if learns else dict.fromkeys(configuration.LEARNING_FIELDS, "public_data.self_label")
        if self.student.method == "supervised" and self.public_data.self_label is None:
            unread.setdefault("student.confidence", "student.method")
        for name, section in self:
            if isinstance(section, Section):
                unread |= configuration.disabled(section, name)
        return unread

    def check(self) -> None:
        """Raise ConfigError for settings that exclude each other, before anything is read or written."""
        for field in ("calibration", "self_label") if self.publishes_mixture else ():
            if getattr(self.public_data, field):
                raise ConfigError(
                    f"public_data.{field}: {self.method} publishes a randomised classifier, which this setting would "
                    "change; leave it out."
                )
        name = self.student.model.name
        if self.publishes_linear_rules and name != "logistic":
            raise ConfigError(f"student.model.name: {self.method} publishes linear rules, got {name}; set logistic.")

    def check_data(self, dataset: Dataset) -> None:
        """Raise ConfigError for a data set that the method cannot learn from, before anything is written.

        Reasons: the data set names persons and the method does not protect all records of a person together; there are
        fewer records than teachers; public records are missing; or a method for two classes gets more.
        """
        # A person with k records would be k changes at once, for which an epsilon of one change is far too small.
        if dataset.unit == "person" and self.is_private and (self.protects_attribute_only or not self.protects_persons):
            reason = "has no privacy guarantee for all records of a person together"
            if self.protects_attribute_only:
                reason = "protects the sensitive attribute of one record, and a person may have several records"
            raise ConfigError(
                f"data.unit: {self.method} {reason}, but {dataset.name} names persons; set data.unit=record, which "
                "protects each record by itself, or choose another method."
            )
        self.check_teachers(dataset)
        if not len(dataset.public) and (needing := self.needing_public):
            others = {"method": "choose residual_votes or dp_sgd", "student.model.name": "set it to logistic"}
            other = others.get(needing[0], "leave it out")
            raise ConfigError(
                f"{needing[0]}: {self.method} needs public records for this setting, and {dataset.name} has none; "
                f"name a file of them (files.public), raise data.num_public, or {other}."
            )
        if self.learns_two_classes and dataset.num_classes != 2:
            raise ConfigError(
                f"data.name: {self.method} learns two classes, {dataset.name} has {dataset.num_classes}; choose "
                "another data set or method."
            )

    def check_teachers(self, dataset: Dataset) -> None:
        """Raise ConfigError for a data set from which the method's teachers cannot learn."""

    def check_sites(self) -> None:
        """Raise ConfigError for settings with which sites cannot draw the releases together."""

    def check_room(self, dataset: Dataset, log: RunLog) -> str:  # noqa: ARG002
        """Raise LimitReachedError if a limit of the operator has no room for what the method plans to release before
        it learns. Return what does not fit a budget, in words; empty if all fits."""
        return ""

    def own_dataset(self, *, to_train: bool = False) -> Dataset | None:  # noqa: ARG002
        """Return the data set that a file in the settings brings (``brings_data``), else None.

        ``to_train``: raise ConfigError if no model can be trained on it.
        """
        return None

    def votes_to_share(
        self, dataset: Dataset, folder: Path, reporter: Reporter, pool: BlockPool | None = None
    ) -> VoteBatch:
        """Train voters, whose checkpoints are stored in ``folder``, and return their votes on the queries of this run,
        which runs with the same ``shared_votes`` share."""
        raise NotImplementedError

    def planned_cost(self, dataset: Dataset) -> Price | None:  # noqa: ARG002
        """Return the largest privacy cost that a run may publish; None for a run without a guarantee."""
        return None

    def release(self, training: Training) -> Any:
        """Draw and return what is released before a model learns from it (:meth:`learn`). Only for methods that release
        something else than the trained model."""
        raise NotImplementedError

    def rehearse(self, dataset: Dataset, noisy_sum: NoisySum) -> ReleasedArrays:
        """Return a release of arrays that reads no private records, for ``keeps_release``: this shows beforehand which
        events it will have. ``noisy_sum`` replaces the noisy sums over private records."""
        raise NotImplementedError

    def learn(self, training: Training, released: Any) -> Trained:
        """Train the model from what was ``released`` and from public records, and return it."""
        raise NotImplementedError

    def private_population(
        self,
        released: ReleasedArrays,  # noqa: ARG002 - most releases hold no groups
        dataset: Dataset,  # noqa: ARG002
        student: Student,  # noqa: ARG002
    ) -> PrivatePopulation | None:
        """Return estimates of how ``student`` treats the groups of private records (its predictions, errors and gaps),
        computed from ``released``; None if this release does not allow any."""
        return None

    def voting(self, dataset: Dataset, num_records: int) -> ExpectedVotes | None:  # noqa: ARG002
        """Return an estimate, for warnings before a run, of how clearly votes decide labels; None for a method without
        votes.

        ``num_records`` is the public number of private records, which are not read.
        """
        return None

    def planned_events(self, dataset: Dataset) -> tuple[Event, ...] | None:  # noqa: ARG002
        """Return all events of a training on ``dataset`` if they are known beforehand, else None.

        Only the number of private records is read, not the records.
        """
        return None

    def train(self, training: Training) -> Trained:
        """Train and return the model, with all events that touched private records.

        Releases before the model go through :meth:`Training.release`, and their events are returned too. If the model
        is learned only from these releases and from public records, the method sets ``releases_model`` to False.
        """
        raise NotImplementedError

    def settings_without(self, *fields: str) -> dict[str, Any]:
        """Return all settings that determine a release, as nested values: those of the run, without the section
        ``evaluation`` and without ``fields``, the dotted names of settings that the release does not read.
        """
        # Evaluation follows the release and does not change it.
        return without(determining_values(self), (*fields, "evaluation"))

    def price(self, trained: Trained) -> Price:
        """Return the epsilon to publish, with its delta, unit and relation: the epsilon of the events of ``trained``,
        or its ``epsilon_bound`` if it has one."""
        known = {name: value for name, value in self.target.stated.items() if name != "epsilon"}
        cost = price(trained.events, delta=self.target.delta, **known)
        # A limit that was fixed before the first query also holds if later queries depended on earlier answers.
        return cost if trained.epsilon_bound is None else replace(cost, epsilon=trained.epsilon_bound)

    def attack(self, audited: Audited) -> Shadows | None:  # noqa: ARG002
        """Return an attack on shadow releases, which the method draws from made-up records for an audit; None if none
        is known for the releases that the run states.
        """
        return None

    def require_trainable(self) -> None:
        """Raise ConfigError for settings that :meth:`check` refuses, and for a sensitive attribute among features that
        count as public."""
        self.check()
        if not self.protects_attribute_only:
            return
        # Records in memory have no entry.
        has_entry = self.data.declaration is not None or self.data.name in REGISTRY
        option = entry_for(self.data).option_showing_attribute(self.data.options) if has_entry else None
        # To such a method features are public: one that shows the attribute would publish it before any noise.
        if option is not None:
            raise ConfigError(
                f"data.options.{option}: {self.method} protects the sensitive attribute alone and counts features as "
                "public, but this option, if true, puts the attribute into the features; set it to false, or choose a "
                "method that protects whole records."
            )


_FEWEST_FEATURES, _MOST_FEATURES, _MOST_OF_PICTURES, _FEATURES = 10, 50, 120, 1.5


def num_features(num_teachers: int, epsilon: float | None, *, of_pictures: bool = False) -> int:
    """Return how many features teachers in closed form read, by default: more for more teachers and a larger published
    ``epsilon``, as the noise on the votes hides what single features contribute."""
    # Chosen on splits that are not reported: more features than the votes can tell apart only blur them.
    most = _MOST_OF_PICTURES if of_pictures else _MOST_FEATURES
    heard = most if epsilon is None else int(_FEATURES * math.sqrt(num_teachers * epsilon))
    return max(_FEWEST_FEATURES, min(heard, most))


class TrainsTeachers(Method):
    """A method with section ``teachers``: it trains teachers on disjoint shards of the private records."""

    trains_teachers: ClassVar[bool] = True

    if TYPE_CHECKING:  # each method declares the sections in their place
        teachers: configuration.TeachersConfig
        ray: configuration.RayConfig

    @property
    def architectures(self) -> dict[str, configuration.LayersConfig]:
        """The architectures of teachers, if they are networks, and of the student."""
        own = {} if self.teachers.model.name == "ridge" else {"teachers.model": self.teachers.model}
        return own | super().architectures

    def checkpoints(self, folder: Path) -> Path | Storage:
        """Return where teachers are stored: ``folder``, unless the method has a place of its own."""
        return folder

    def check_teachers(self, dataset: Dataset) -> None:
        """Raise ConfigError for fewer private records than teachers, and for teachers that do not learn from
        pictures."""
        count = self.teachers.num_teachers
        # Without a word on how many there are. Of several sites, others may have more than this one.
        if dataset.shared_unit is None and count > dataset.private.num_protected:
            raise ConfigError(
                f"teachers.num_teachers: {count} teachers, but fewer private {dataset.unit}s in {dataset.name}, so "
                "that some would have no records; lower it."
            )
        if self.teachers.model.name == "ridge" and dataset.public.x.ndim != 2:
            raise ConfigError(
                f"teachers.model: ridge learns from vectors, and {dataset.name} has pictures; set data.embedding to "
                "{}, or choose a network."
            )

    def train_teachers(
        self, dataset: Dataset, folder: Path, pool: BlockPool, on_progress: Advance | None = None
    ) -> Ensemble:
        """Train those teachers that have no checkpoint, as section ``teachers`` configures, and return the ensemble of
        all teachers.

        ``folder`` is for checkpoints, unless the method keeps them elsewhere (:meth:`checkpoints`).
        """
        from teachers.ensemble import train_ensemble  # torch, which reading a configuration does not need

        teachers = self.teachers
        of_pictures = dataset.embedding is not None and len(dataset.embedding.record_shape) > 1
        chosen = num_features(teachers.num_teachers, self.target.stated.get("epsilon"), of_pictures=of_pictures)
        ridge = teachers.ridge.model_copy(update={"num_features": teachers.ridge.num_features or chosen})
        how: dict[str, Any] = {"ridge": ridge}
        if teachers.model.name != "ridge":
            # With their initial weights and optimiser.
            fit = configuration.FitConfig(**dict(teachers.fit), **dict(self.training))
            how = {"model": self.networks["teachers.model"], "fit": fit}
        training = configuration.TeachersTraining(
            **how, **{name: getattr(teachers, name) for name in configuration.ShardsConfig.model_fields}
        )
        return train_ensemble(
            dataset.private,
            training,
            num_classes=dataset.num_classes,
            seed=self.seed,
            checkpoint_dir=self.checkpoints(folder),
            augment=self.augment,
            public_x=dataset.public.x,
            pool=pool,
            on_progress=on_progress,
        )

    def collect_votes(
        self, dataset: Dataset, queries: Split, folder: Path, reporter: Reporter, pool: BlockPool | None = None
    ) -> VoteBatch:
        """Train the teachers that have no checkpoint yet, and return the votes of all teachers on the queries.

        Votes are private. ``folder`` and ``pool`` as in :meth:`train_teachers`; without a pool, a new one is opened.
        """
        from teachers.ensemble import collect_votes  # torch, which reading a configuration does not need
        from teachers.ray_pool import open_pool

        with open_pool(self.ray) if pool is None else nullcontext(pool) as workers:
            with reporter.stage("teachers") as advance:
                ensemble = self.train_teachers(dataset, folder, workers, on_progress=advance)
            with reporter.stage("votes") as advance:
                votes_QC = collect_votes(ensemble, queries.x, pool=workers, on_progress=advance)
        return VoteBatch(
            record_ids=queries.record_id, groups_Q=queries.z.numpy(), votes_QC=votes_QC, ensemble=ensemble.digest
        )


class UnprotectedMethod(Method):
    """A method without noise and without a privacy guarantee, for comparison only: its epsilon is infinite, and its
    results are for the operator only."""

    is_private: ClassVar[bool] = False

    def unprotected(self, training: Training, *remarks: str) -> Trained:
        """Return the trained model of ``training``, with ``remarks``: sentences that the run's privacy statement adds.

        The one privacy event that is returned is a sum over all private records without noise. It makes the epsilon of
        the run infinite.
        """
        # An unprotected target states the relation alone, if anything.
        relation: Relation = self.target.stated.get("relation", "add or remove one")
        unit = training.dataset.unit
        event = PoissonGaussians(count=1, noise_multiplier=0.0, sampling_rate=1.0, unit=unit, relation=relation)
        return Trained(model=training.model.eval(), events=(event,), noise=NO_NOISE, remarks=remarks)


class DrawsNoise(Method):
    """A method that draws noise, from the source that its setting ``noise`` names."""

    if TYPE_CHECKING:  # each method declares the setting in its place
        noise: Noise

    @property
    def is_seeded(self) -> bool:
        return self.noise == "seeded"

    @property
    def draws_fresh_noise(self) -> bool:
        return self.noise == "os_entropy"


class PrivateMethod(DrawsNoise):
    """A private method whose noise is calibrated to a target epsilon and delta."""

    meets_target: ClassVar[bool] = True

    target: configuration.PrivacyTarget = configuration.PrivacyTarget()
    noise: Noise = Field("os_entropy", description="Source of noise; `seeded` reproduces a run and gives no privacy.")

    @property
    def is_private(self) -> bool:  # type: ignore[override]
        """True if the target epsilon is finite, so that there is noise."""
        return self.target.epsilon < math.inf

    def planned_cost(self, dataset: Dataset) -> Price | None:
        """Return the target, which a run spends in full; None without noise."""
        if not self.is_private:
            return None
        unit, target, relation = self.unit_of(dataset), self.target, self.target.relation
        if relation is None:  # an attribute is exchanged while its record stays: nothing is added or removed
            relation = "replace one" if unit == "sensitive attribute" else "add or remove one"
        return Price(
            epsilon=target.epsilon, delta=target.delta, unit=unit, relation=relation, accounting=target.accounting
        )

    def randomness(self, stream: Stream = Stream.NOISE) -> PrivateRandomness:
        """Return the source of secret samples and Gaussian noise; ``stream`` selects the seed if noise is seeded."""
        # With torch, which reading a configuration does not need.
        from fairpate.nn.private_fit import OsRandomness, SeededRandomness

        return SeededRandomness(stream_seed(self.seed, stream)) if self.noise == "seeded" else OsRandomness()

    @property
    def source(self) -> NoiseSource:
        # Anybody with the configuration can draw seeded noise again and subtract it.
        return OsEntropy() if self.noise == "os_entropy" else SeededSource(stream_seed(self.seed, Stream.NOISE))

    def check(self) -> None:
        """Raise ConfigError as the parent class does, and for another relation than "replace one" if only the sensitive
        attribute is protected."""
        super().check()
        # An attribute is never added or removed: every record has one.
        if self.protects_attribute_only and self.target.relation not in (None, "replace one"):
            raise ConfigError(
                f"target.relation: {self.method} protects a sensitive attribute, so the relation must be replace one, "
                f"got {self.target.relation!r}; leave it out."
            )


class ReleasingMethod(PrivateMethod):
    """A method that draws one release of arrays and then learns from it.

    ``afterwards`` lists, by dotted names, the fields that are read only for learning. Runs that differ in no other
    field share one release, so that only the first of them has a privacy cost. A change of any other field causes a new
    release, which is charged. If the list lacks a field, a release is drawn and charged more often than needed, but the
    guarantee still holds.
    """

    releases_model: ClassVar[bool] = False
    keeps_release: ClassVar[bool] = True
    known_before: ClassVar[str | None] = ""
    afterwards: ClassVar[tuple[str, ...]] = ("student", "training", "augment", "backbone", "public_data")

    @property
    def shared_release(self) -> Values:
        """All settings on which the release depends; it also depends on the records and the noise."""
        return self.settings_without(*self.afterwards)

    @property
    def release_alone(self) -> ReleasingMethod:
        """A copy of this method that draws the same release. Fields on which the release does not depend have their
        default values.
        """
        return type(self).model_validate(self.shared_release | {"data": self.data, "out": self.out})

    def release(self, training: Training) -> ReleasedArrays:
        """Return the stored release of the run; without one, measure the private records once, charge and store the
        release."""
        # With the rule of a hashed split, which data from Python have without any setting that says so.
        rule = {"parts": training.dataset.parts} if training.dataset.parts else {}
        settings = self.shared_release | rule
        return training.release(lambda: self.measure(training), settings=settings, noise=self.source.label)

    def measure(self, training: Training) -> ReleasedArrays:
        """Read the private records, once, and return the release: noisy arrays with their events."""
        raise NotImplementedError

    def rehearse(self, dataset: Dataset, noisy_sum: NoisySum) -> ReleasedArrays:
        """Run :meth:`measure` without private records, and return its result: this shows beforehand which privacy
        events the release will have. The function ``noisy_sum`` replaces the noisy sums over private records.
        """
        training = Training(
            dataset=replace(dataset, private=dataset.private.take(range(0)), is_elsewhere=True),
            # A release is drawn before a model is trained, so none is built.
            model=torch.nn.Identity(),
            run=RunDirectory(root=Path()),
            reporter=Reporter(quiet=True),
            seed=self.seed,
            noisy_sum=noisy_sum,
        )
        return self.measure(training)

    def planned_events(self, dataset: Dataset) -> tuple[Event, ...] | None:
        """Return the events of the method's release, found by a rehearsal of :meth:`measure` that reads no private
        record."""
        events = self.rehearse(dataset, lambda exact_RW, **_: np.zeros_like(exact_RW)).events
        # The rehearsal has no records, so it does not know persons either: the unit is set here.
        return tuple(of_unit(event, dataset.unit) for event in events)

    def train(self, training: Training) -> Trained:
        return self.learn(training, self.release(training))


def config_digest(config: Method) -> str:
    """Return a digest of twelve hexadecimal digits, equal for configurations that compute the same on any machine.

    Paths and disabled settings do not affect it.
    """
    return configuration.values_digest(determining_values(config))


def determining_values(config: Method, values: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the plain values that determine what ``config`` computes, without paths and without disabled settings.

    ``values`` are plain values of a configuration; None: those of ``config``.
    """
    values = config.model_dump(mode="json") if values is None else values
    return without(values, (*configuration.NOT_IN_DIGESTS, *config.unread))


def check_release_of(config: Method, source: Path) -> None:
    """Raise ConfigError or RunDirectoryError unless ``config`` can learn from the release of the run in ``source``."""
    if config.shared_release is None:
        raise ConfigError(
            f"method: {config.method} keeps no release (noisy statistics that another run could learn from); set "
            "method to that of the run whose release is used."
        )
    found = RunDirectory(root=source).released
    if not found.is_file():
        raise RunFolderError(
            f"{source}: holds no release ({found.name} is missing); give the folder of a finished run of this method."
        )
    origin = read_release(found)[1]
    # The rule of a hashed split is compared once the data are read.
    settings = {name: value for name, value in origin.settings.items() if name != "parts"}
    replace(origin, settings=settings).require_settings(config.shared_release, found)


def arguments(training: Training, *, groups: bool = False) -> dict[str, Any]:
    """Return the keyword arguments that most training functions take: model, private records and generator, and with
    ``groups`` also the records' groups."""
    private = training.dataset.private
    records = {"model": training.model, "x": private.x, "y": private.y}
    return records | ({"groups": private.z} if groups else {}) | {"generator": training.generator(Stream.TRAINING)}


Values = dict[str, Any]
Names = tuple[str, ...]
"""The path of a field: the names of its sections, then its own name."""


def require_trusted(method: Any, path: Path) -> None:
    """Raise ConfigError if the configuration file ``path`` names its method as ``module:Class`` and files are not
    trusted to run code."""
    if isinstance(method, str) and configuration.CODE_NAME.fullmatch(method) and not configuration.may_run(method):
        raise ConfigError(
            f"method: {path} names {method}, code that would run with your rights; {configuration.REMEDY}."
        )


def configured(
    source: Values | Path | str | None,
    overrides: Sequence[configuration.Override] = (),
    *,
    method: str | None = None,
    exactly: bool = False,
) -> Method:
    """Return the checked configuration of one method.

    Args:
        source: A mapping of sections, the path of a YAML file, or None for the method's defaults. A file may serve
            several methods: sections of other methods are checked and left out.
        overrides: Strings ``section.field=value``, with the value in YAML, or pairs of a field and its value. They
            replace values of ``source``. A field that the method does not read is an error.
        method: The method's name, or ``module:Class``; None: the method that ``overrides`` or ``source`` name, or
            ``fairpate``.
        exactly: Whether a field in ``source`` that the method does not read is an error, as in ``overrides``.

    Raises:
        ConfigError: The message lists every fault with its field, value and remedy.
    """
    values, said = source if isinstance(source, dict) else {}, apply_override({}, *overrides)
    if isinstance(source, Path | str):
        values = configuration.read_yaml(source)
        if {"methods", "data_sets"} & values.keys():
            raise ConfigError(
                f"{source}: describes a comparison (methods, data_sets), not one run; use `fairpate compare`."
            )
        # A file may come from anybody; an option was typed by its user.
        if method is None and "method" not in said:
            require_trusted(values.get("method"), Path(source))
    if method is not None and said.get("method", method) != method:
        raise ConfigError(f"method: {method} is asked for, and --set says {said['method']}; leave one of them out.")
    # What was typed wins over a file.
    named = (method, said.get("method"), values.get("method"), DEFAULT)
    name = next(name for name in named if name is not None)
    if not isinstance(name, str):
        raise ConfigError(f"method: expected a name that `fairpate methods` lists, or module:Class, got {name!r}.")
    schema = find_method(name)
    faults = []
    fields = [each.partition("=")[0] if isinstance(each, str) else each[0] for each in overrides]
    for given, is_meant in ((values, exactly), (said, True)):
        for path, value in read_and_unread([schema], given)[1]:
            found = refused(path, value)
            # What another method reads in a file is left out; an option was meant for this one.
            if not found and is_meant:
                dotted = ".".join(path)
                # As the user wrote them.
                options = [field for field in fields if field.startswith(f"{dotted}.")] or [dotted]
                found = [f"{option}: {name} does not read it; leave it out." for option in options]
            faults += found
    full = apply_override(configuration.merge(deepcopy(_defaults(schema)), values), *overrides)
    read, _ = read_and_unread([schema], full)
    try:
        config = parse_config(read | {"method": name}, schema)
    except ConfigError as error:
        # Each fault once, although both checks may find it.
        raise ConfigError("\n".join(dict.fromkeys([*faults, str(error)]))) from error
    settings, disabled = configuration.flattened(config.model_dump(mode="json")), config.unread
    reported = {fault.partition(":")[0] for fault in faults}
    for field, value in configuration.flattened(said).items():
        cause = configuration.disabling(field, disabled)
        # A field that does not exist is not disabled too.
        if cause is not None and value is not None and field not in reported:
            at = f"={json.dumps(settings[cause])}".replace('"', "") if cause in settings else ""
            faults.append(f"{field}: not read because of {cause}{at}; leave it out, or change {cause}.")
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(faults)))
    return config


def read_and_unread(
    schemas: Sequence[Any], values: Mapping[str, Any], *sections: str
) -> tuple[Values, list[tuple[Names, Any]]]:
    """Divide nested ``values`` into two parts. The first has the fields that one of ``schemas`` (methods or sections)
    declares, the second lists the path and value of every other field."""
    own = [_fields(schema) for schema in schemas]
    if not all(own):  # any name is allowed here, as in the options of a loader, or its own type says which
        return dict(values), []
    read: Values = {}
    unread: list[tuple[Names, Any]] = []
    for name, value in values.items():
        inner = [fields[name] for fields in own if name in fields]
        if not inner:
            unread.append(((*sections, str(name)), value))
        elif isinstance(value, Mapping):
            read[name], others = read_and_unread(inner, value, *sections, name)
            unread += others
        else:
            read[name] = value
    return read, unread


def refused(path: Names, value: Any) -> list[str]:
    """Return the reasons why no method accepts ``value`` for the field ``path``; an empty list if some method does.

    Methods are imported one by one until one accepts it, starting with the method after which the section is named: a
    file with sections of several methods is read without importing all methods.
    """
    *sections, last = path
    for name in reversed(path):
        value = {name: value}
    faults, names, others, closest = [], dict[str, None](), list[type[Method]](), 0
    for _, other in _importable_methods(path[0]):
        others.append(other)
        fields: Mapping[str, Any] = _fields(other)
        for section in sections:
            fields = _fields(fields.get(section))
        names |= dict.fromkeys(fields)
        if last not in fields:
            continue
        try:
            parse_config(configuration.merge(_defaults(other), value), other)
        except ConfigError as error:
            found = str(error).splitlines()
            depth = max(fault.partition(":")[0].count(".") for fault in found)
            if depth >= closest:  # of the method that has most of the path
                faults, closest = found, depth
        else:
            return []
    if faults:
        return faults
    # A field without its section, such as `epsilon`.
    of_methods = () if sections else (each for other in others for each in _fields(other).items())
    inside = dict.fromkeys(f"{name}.{last}" for name, section in of_methods if last in _fields(section))
    meant = f"; did you mean {' or '.join(inside)}?" if inside else f"{configuration.nearest(last, names)}."
    return [f"{'.'.join(path)}: unknown field{meant}"]


@cache
def _defaults(schema: type[Method]) -> Values:
    """Return the default configuration of the method class ``schema`` as nested dictionaries; they are cached, so
    callers must not write into them."""
    return schema().model_dump()


def _fields(annotation: Any) -> Mapping[str, Any]:
    """Return the types of a section's fields by name; ``annotation`` may be the type of a section that may be null."""
    # A section that may be null is a union, and one of its parts the section.
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return _fields_of_section(part)
    return {}


@cache  # a sweep asks a hundred thousand times
def _fields_of_section(section: type[BaseModel]) -> Mapping[str, Any]:
    return {name: field.annotation for name, field in section.model_fields.items()}
