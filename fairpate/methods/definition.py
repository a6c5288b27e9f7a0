"""What a method is: one class with its configuration, its check and its training.

The fields of a :class:`Method` are all that a run of it reads, so digest, repeat command, ``--help`` and estimator
follow from the class. Names of sections are shared: ``dp_sgd`` means the same wherever a method has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from fairpate.app.rundir import RunDirectory
from fairpate.app.seeds import Stream, stream_seed, torch_generator
from fairpate.app.spending.meter import Meter
from fairpate.app.terminal.progress import Reporter
from fairpate.config import (
    ConfigError,
    DataConfig,
    EvaluationConfig,
    Noise,
    PrivacyTarget,
    PublicDataConfig,
    PublishedConfig,
    Section,
    Seed,
    Terms,
)
from fairpate.data import Dataset, entry_for, option_showing_attribute
from fairpate.later import torch
from fairpate.methods.trained import Price, Trained, price, private_randomness
from fairpate.privacy.discrete_gaussian import NoiseSource, OsEntropy, SeededSource
from fairpate.privacy.events import Event
from fairpate.types import Unit

if TYPE_CHECKING:
    from torch import nn

    from fairpate.nn.private_fit import PrivateRandomness


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a method is given: the data set, the model to start from, the folder, and where progress is told.

    ``meter`` counts what is released in the operator's odometer; None for an estimator, which is not counted.
    """

    dataset: Dataset
    model: nn.Module
    run: RunDirectory
    reporter: Reporter
    seed: int
    meter: Meter | None = None

    def admit(self, events: Sequence[Event], noise: str) -> None:
        """Ask limits for room for all that will be released, before anything is drawn that may end the training.

        LimitReachedError where there is none: asked afterwards, a refusal would tell how the draw turned out.
        """
        if self.meter is not None:
            self.meter.admit(events, noise=noise)

    def generator(self, stream: Stream) -> torch.Generator:
        """A generator for one part of the run, apart from all others."""
        return torch_generator(self.seed, stream)


@dataclass(frozen=True, kw_only=True)
class Voting:
    """How many ``votes`` decide a label, the noise on each count, and of how many public records ``labels`` result."""

    votes: int
    noise_stddev_votes: float
    labels: int


class Method(Section):
    """One method, with the configuration of one run of it. A subclass adds sections, :meth:`train` and a name.

    ``title`` and ``paper`` are its words in pages and documentation; ``asks_teachers``: votes on public records, whose
    ledger a service may go on with; ``reads_groups``: whether it looks at the groups of private records;
    ``protects_persons``: whether its events bound what all records of a person do together, where the data set names
    persons. One that does not is refused such data.
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    asks_teachers: ClassVar[bool] = False
    reads_groups: ClassVar[bool] = True
    protects_persons: ClassVar[bool] = False

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
    student: PublishedConfig = PublishedConfig()
    public_data: PublicDataConfig = PublicDataConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def is_private(self) -> bool:
        """Whether anything is guaranteed; nothing is published of a run where not."""
        return True

    @property
    def protects_attribute_only(self) -> bool:
        """Whether the sensitive attribute alone is protected, and features count as public."""
        return False

    @property
    def reads_public(self) -> bool:
        """Whether it looks at public records, whatever ``public_data`` uses them for."""
        return False

    @property
    def reads_public_groups(self) -> bool:
        """Whether groups of public records decide anything."""
        return self.reads_public or self.public_data.calibration is not None

    @property
    def learns_two_classes(self) -> bool:
        """Whether two classes are all that it can tell apart."""
        return False

    @property
    def unit(self) -> str:
        """What is protected, in words."""
        if not self.is_private:
            return "nothing"
        if self.protects_attribute_only:
            return "sensitive attribute"
        return "record or person" if self.protects_persons else "record"

    def unit_of(self, dataset: Dataset) -> Unit:
        """What its events are priced for on this data set."""
        return "sensitive attribute" if self.protects_attribute_only else dataset.unit

    @property
    def is_seeded(self) -> bool:
        """Whether its noise can be made again, so that the run is not private."""
        return getattr(self, "noise", None) == "seeded"

    @property
    def unread(self) -> Mapping[str, str]:
        """Dotted fields and sections that decide nothing, nor the run's digest, each with the field that says so."""
        return {}

    @property
    def declared_size(self) -> int | None:
        """The public number of private records that a sampling rate was set for, where one was declared."""
        return None

    @property
    def rate_tells_size(self) -> bool:
        """Whether a sampling rate tells the real number of private records."""
        return self.declared_size is None

    def check(self) -> None:
        """ConfigError for settings that exclude each other; before anything is read or written."""

    def check_data(self, dataset: Dataset) -> None:
        """ConfigError for a data set that it cannot learn from; before anything is written."""
        if self.learns_two_classes and dataset.num_classes != 2:
            raise ConfigError(
                f"data.name: {self.method} learns two classes, {dataset.name} has {dataset.num_classes}; choose "
                "another data set or method."
            )

    def require_unit(self, dataset: Dataset) -> None:
        """ConfigError where the data set names persons, and nothing bounds what a person's records do together."""
        # A person with k records would be k changes at once, for which an epsilon of one change is far too small.
        if dataset.unit != "person" or not self.is_private:
            return
        if self.protects_attribute_only:
            reason = "protects the sensitive attribute of one record, and a person's stands in several"
        elif not self.protects_persons:
            reason = "has no bound on what all records of a person do together"
        else:
            return
        raise ConfigError(
            f"data.unit: {self.method} {reason}, but {dataset.name} names persons; set data.unit=record, which "
            "protects each record by itself, or choose another method."
        )

    def voting(self, dataset: Dataset, num_records: int) -> Voting:
        """What to expect of ``num_records`` private records, a public number; of ``dataset`` public ones are read."""
        raise NotImplementedError

    def own_dataset(self) -> Dataset | None:
        """The data set that comes with the configuration itself; None: the one that ``data`` names."""
        return None

    def train(self, training: Training) -> Trained:
        """The model, and the events that touched private records."""
        raise NotImplementedError

    def price(self, trained: Trained) -> Price:
        """What may be published of ``trained``: what the accountant says of its events, or its own larger bound."""
        known = {name: value for name in ("relation", "accounting") if (value := getattr(self.target, name, None))}
        cost = price(trained.events, delta=self.target.delta, **known)
        # A limit that was fixed before the first query holds also where later ones were chosen in view of answers.
        return cost if trained.epsilon_bound is None else replace(cost, epsilon=trained.epsilon_bound)

    def require_trainable(self) -> None:
        """ConfigError for what :meth:`check` refuses, and for an attribute among features that count as public."""
        self.check()
        declared = None if self.data.declaration is None else entry_for(self.data)
        # To such a method features are public: one that shows the attribute would publish it before any noise.
        option = option_showing_attribute(self.data.name, self.data.options, declared)
        if option is not None and self.protects_attribute_only:
            raise ConfigError(
                f"data.options.{option}: {self.method} protects the sensitive attribute alone and counts features as "
                "public, but with true they show it; set it to false, or choose a method that protects whole records."
            )


class UnprotectedMethod(Method):
    """A method without noise, for comparison only: its event costs infinity, and its run stays with the operator."""

    @property
    def is_private(self) -> bool:
        """Nothing is guaranteed."""
        return False


class PrivateMethod(Method):
    """A method whose noise follows from a target."""

    target: PrivacyTarget = PrivacyTarget()
    noise: Noise = Field("os_entropy", description="`seeded` reproduces a run and gives no privacy.")

    @property
    def is_private(self) -> bool:
        """Not without noise."""
        return self.target.epsilon < math.inf

    def randomness(self, stream: Stream = Stream.NOISE) -> PrivateRandomness:
        """Secret samples and Gaussian noise."""
        return private_randomness(self.noise, stream_seed(self.seed, stream))

    @property
    def source(self) -> NoiseSource:
        """Exact discrete noise."""
        # Whoever has the configuration can make seeded noise again, and take it off.
        return OsEntropy() if self.noise == "os_entropy" else SeededSource(stream_seed(self.seed, Stream.NOISE))

    def require_replacing(self) -> None:
        """ConfigError for a relation that no sensitive attribute has, where that alone is protected."""
        # An attribute is never added or removed: every record has one.
        if self.protects_attribute_only and self.target.relation not in (None, "replace one"):
            raise ConfigError(
                f"target.relation: {self.method} protects a sensitive attribute, of which one is replaced, got "
                f"{self.target.relation!r}; leave it out."
            )

    def require_as_released(self) -> None:
        """ConfigError for what would undo the randomised classifier that is published."""
        for field in ("calibration", "self_label"):
            if getattr(self.public_data, field):
                raise ConfigError(
                    f"public_data.{field}: {self.method} publishes a randomised classifier; leave it out."
                )

    def require_linear_mixture(self) -> None:
        """ConfigError besides for a published model that is not linear."""
        self.require_as_released()
        if self.student.model.name != "logistic":
            raise ConfigError(
                f"student.model.name: {self.method} publishes linear rules, got {self.student.model.name}; set "
                "logistic."
            )


class AttributeMethod(PrivateMethod):
    """A private method to which features and labels are public."""

    @property
    def protects_attribute_only(self) -> bool:
        """Features and labels are public."""
        return True

    def check(self) -> None:
        """ConfigError for a target under another relation."""
        self.require_replacing()


def arguments(training: Training, *, groups: bool = False) -> dict[str, Any]:
    """What every trainer takes: the model and private records, with their groups where asked."""
    private = training.dataset.private
    records = {"model": training.model, "x": private.x, "y": private.y}
    return records | ({"groups": private.z} if groups else {}) | {"generator": training.generator(Stream.TRAINING)}
