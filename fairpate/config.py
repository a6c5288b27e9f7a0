"""The sections of a configuration, and the functions that read it: one schema for YAML files, the command line and
Python.

Every field documents its unit, range and special values. :func:`parse_config` refuses unknown fields and impossible
values before any work starts, and lists all of them. Sections are frozen and mean the same in every method. A field is
not read if another one makes it irrelevant, such as the hidden widths of an architecture without hidden layers: its
section says so (:attr:`Section.disables`), and ``Method.unread`` lists these fields for one method.

A sweep (`fairpate compare`) runs cells: combinations of method, data set, seed and grid values. Everything in its
``settings`` and ``grid`` is a field of some method. A cell starts from the configuration of `fairpate run`. The
settings of the sweep, of the data set and of the method override it in this order; those that the method does not read
are ignored.

A configuration may name the user's own code as ``module:attribute``. Code that the user names in a command or in Python
runs. A name in a *file* (a configuration, a sweep, the folder of a run or of an estimator) may come from anybody: its
code runs only if the user allowed it or if it ran in this process before.
"""

import difflib
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import cache, lru_cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from fairpate import types
from fairpate.types import MAX_THRESHOLD_VOTES, FairRule, Relation, UsageError


def nearest(value: object, known: Iterable[object]) -> str:
    """Return the end of an error message about an unknown ``value``: the most similar of the ``known`` names, and the
    list of all of them."""
    names = [str(name) for name in known]
    close = difflib.get_close_matches(str(value), names, n=1)
    guess = f"; did you mean {close[0]}?" if close else ";"
    return f"{guess} known: {', '.join(names) or 'none'}"


CODE_NAME = re.compile(r"[\w.]+:[\w.]+")
ALLOWED = "FAIRPATE_ALLOW_CODE"
REMEDY = f"if you trust it, set {ALLOWED}=1 in the environment"
_imported: set[str] = set()


def may_run(place: str) -> bool:
    """Return whether code that a file names as ``place`` (``module:attribute``) may run: True if it ran in this process
    before, or if FAIRPATE_ALLOW_CODE is 1."""
    # What ran in this process already may have done anything by now.
    return place in _imported or os.environ.get(ALLOWED) == "1"


def named_object(place: str) -> Any:
    """Import and return the object that ``place`` (``module:attribute``) names.

    The module is searched for on Python's path, then in the working directory. Errors of the module are raised.
    """
    module, _, attribute = place.partition(":")
    try:
        imported = import_module(module)
    except ModuleNotFoundError as error:
        # The named module was found, and one that it imports is missing: looking elsewhere would hide which.
        if error.name != module.partition(".")[0]:
            raise
        here = str(Path.cwd())
        # A command does not search the working directory by itself. Last, so that no file in it replaces a library.
        sys.path.append(here)
        try:
            imported = import_module(module)
        finally:
            sys.path.remove(here)
    found = getattr(imported, attribute)
    # Its code has run in this process, so that a file that names it changes nothing.
    _imported.add(place)
    return found


LARGEST = 1e12
"""The largest value of a setting. No useful setting is larger, and its overflow would be hard to trace to the field."""
# Tables of results hold seeds as int64.
_LARGEST_INT, _LARGEST_SEED = 2**31 - 1, 2**63 - 1
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(gt=0, le=_LARGEST_INT)]
CountOrZero = Annotated[int, Field(ge=0, le=_LARGEST_INT)]
Seed = Annotated[int, Field(ge=0, le=_LARGEST_SEED)]
IMAGENET = "imagenet"
BACKBONES = ("resnet18", "resnet50", "densenet121")


class ConfigError(UsageError, ValueError):
    """Raised for an invalid configuration; the message lists every fault with its field, value and remedy."""


Refused = Mapping[str, Callable[[Any], Any]]
"""Refused combinations of fields: maps a message, in which ``{0.field}`` is a value, to the condition that refuses."""


Disables = Mapping[tuple[str, Any], tuple[str, ...]]
"""Fields of a section that are not read if another of its fields has a value, by that field (dotted for a field of a
section in it) and the value; ``...`` is any value except null."""


class Section(BaseModel):
    """The base class of all sections of a configuration: frozen, and without unknown fields."""

    # Defaults are validated too: a method that declares an impossible one fails at its first use.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    refused: ClassVar[Refused] = {}
    short_forms: ClassVar[Mapping[str, str]] = {}
    """Keys that are accepted in addition to the fields, each with what is expected as its value."""
    disables: ClassVar[Disables] = {}
    """Fields of this section that are not read if another of its fields has a value; :func:`disabled` finds them."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for message, is_met in _refused_by(type(self)):
            if is_met(self):
                raise ValueError(message.format(self))
        return self


@cache
def _refused_by(section: type[Section]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """Return what a section refuses, after what the sections refuse that it extends."""
    kinds = reversed(section.__mro__)
    return tuple(each for kind in kinds for each in vars(kind).get("refused", {}).items())


def short_for(name: str) -> Any:
    """Return a pydantic validator that accepts plain text instead of a section, and reads it as ``{name: text}``."""
    return model_validator(mode="before")(lambda value: {name: value} if isinstance(value, str) else value)


class PinnedFile(Section):
    """A file that is identified by its path and its checksum; in YAML, its path alone is enough."""

    remedy: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _is_pinned(cls, values: Any) -> Any:
        values = {"path": values} if isinstance(values, (str, Path)) else values
        # `imagenet` has no path yet: it gets one, with its checksum, when the file is looked for.
        if not isinstance(values, dict) or values.get("path") in (None, IMAGENET, Path(IMAGENET)):
            return values
        # Absolute: workers may have another working directory.
        path, digest = Path(values["path"]).expanduser().absolute(), values.get("sha256")
        if not digest:
            # Computed when the configuration is read: a file that is edited later is another configuration.
            try:
                with path.open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
            except OSError as error:
                raise ValueError(f"{path} cannot be read ({error.strerror}); {cls.remedy}") from error
        # As text: JSON has no paths.
        return {"path": str(path), "sha256": digest}


Sha256 = Annotated[
    str | None,
    Field(
        pattern="^[0-9a-f]{64}$",
        description="Checksum of the file; null: that of the file when the configuration is read.",
    ),
]


class DeclarationConfig(PinnedFile):
    """The file that declares the user's own records; in YAML, its path alone is enough."""

    remedy = "give a declaration in YAML"
    path: Path = Field(description="Path of the YAML file; docs/data.md describes its form.")
    sha256: Sha256 = None


EMBEDDED_NORM = 4.0
"""The norm of a typical embedded record, for which the usual learning rates work."""


class EmbeddingConfig(Section):
    """The settings of an embedding: the features of all records are replaced by coordinates computed from public
    records, and every method uses these. Coordinates are principal components and, for pictures, positions in a graph
    of neighbours.

    If a declared table has fewer than 100 public records, records made up from its declared values are added to them.
    """

    num_components: Count = Field(200, description="Number of components; fewer where public records have fewer.")
    mirrored: bool = Field(False, description="Pictures: average each embedding with that of the mirror image.")
    graph_share: Fraction = Field(
        0.2, description="Pictures: share of the squared norm that encodes the position in the pool's neighbour graph."
    )


class WeightsConfig(PinnedFile):
    """A file of model weights trained on public pictures; in YAML, its path alone is enough."""

    remedy = "give a .pth or .safetensors file"
    path: Path | None = Field(
        None,
        description="State dict of torchvision, .pth or .safetensors, at this path of every node; `imagenet`: the file "
        "that torchvision publishes. null in a published model.",
    )
    sha256: Sha256 = None


class HashedSplit(Section):
    """The shares of test and validation records in a split by a keyed hash."""

    test_share: float = Field(0.25, gt=0, lt=1, description="Expected share of test records.")
    validation_share: BelowOne = Field(0.0, description="Expected share of validation records.")

    _from_text = model_validator(mode="before")(lambda values: {} if values == "hashed" else values)
    refused: ClassVar[Refused] = {
        # What they leave is the training part.
        "Expected test_share + validation_share < 1, got {0.test_share} and {0.validation_share}.": lambda split: (
            split.test_share + split.validation_share >= 1
        )
    }


class DataConfig(Section):
    """The settings of a data set: which records, and how they are split."""

    name: str = Field("color_digits", description="A name from `fairpate data list`, or of the declaration.")
    declaration: DeclarationConfig | None = Field(
        None,
        description="Your own records, whose files are next to the declaration or in data_dir; null: a known data set.",
    )
    data_dir: Path | None = Field(
        None, description="Folder with the publisher's files; null reads the environment variable FAIRPATE_DATA."
    )
    seed: Seed = Field(0, description="Seed of the split; public.")
    split: HashedSplit | None = Field(
        None,
        description="Shares of test and validation records by a keyed hash, so that a record that is added or removed "
        "moves no other; `hashed`: the default shares. Public records must then be in separate files. null: by numbers "
        "of records.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="The loader's own options, such as `sensitive: colour`."
    )
    num_public: CountOrZero | None = Field(None, description="Public records; null takes the loader's default.")
    num_validation: CountOrZero | None = Field(None, description="Validation records; null takes the default.")
    num_test: Count | None = Field(None, description="Test records; null takes the default.")
    unit: Literal["record"] | None = Field(
        None,
        description="`record` protects each record by itself; null: all records of a person together, where the data "
        "set names persons.",
    )
    embedding: EmbeddingConfig | None = Field(
        None,
        description="Embedding, fitted to public records or computed from the declaration, that every method reads "
        "instead of a record; null: the record itself.",
    )
    weights: WeightsConfig | None = Field(
        None,
        description="File of weights of the architecture in options.features, such as `encoder:resnet50`; null: the "
        "features need none.",
    )

    # Settings that read no file have the digest that they had before there was this field.
    disables: ClassVar[Disables] = {("weights", None): ("weights",)}
    refused: ClassVar[Refused] = {
        # A hash decides record by record, so that no number of records can be set.
        "Expected split.test_share with a hashed split, got num_test={0.num_test}; leave it out.": lambda data: (
            data.split is not None and data.num_test is not None
        ),
        "Expected split.validation_share with a hashed split, got num_validation={0.num_validation}; leave it out.": (
            lambda data: data.split is not None and data.num_validation is not None
        ),
    }


class AugmentConfig(Section):
    """The settings of data augmentation: random changes of pictures that preserve their labels, the same for teachers
    and student."""

    rotation_degrees: float = Field(0.0, ge=0, le=180, description="Angle of a random rotation, uniform in [-r, r].")
    translation_fraction: BelowOne = Field(0.0, description="Largest shift, as a share of width and height.")
    scale_fraction: BelowOne = Field(0.0, description="Zoom uniform in [1 - s, 1 + s].")
    shear_degrees: float = Field(0.0, ge=0, lt=90, description="Angle of a random shear, uniform in [-s, s].")
    elastic_fraction: BelowOne = Field(
        0.0,
        description="Bends the image by a coarse grid whose points shift by at most this share of a side.",
    )
    channel_swap: Fraction = Field(0.0, description="Probability of a random permutation of the channels.")
    horizontal_flip: Fraction = Field(0.0, description="Probability of a mirror image.")


Architecture = Literal[
    "logistic",
    "bounded_logistic",
    "hog_logistic",
    "mlp",
    "lenet",
    "tanh_cnn",
    "cnn",
    "resnet18",
    "resnet50",
    "densenet121",
]


class LayersConfig(Section):
    """The name of a model and the widths of its layers; in YAML, its name alone is enough."""

    name: str
    hidden: tuple[Count, ...] | None = Field(
        None,
        description="Widths of an MLP's hidden layers, null: 64; or the number of channels of the first block of "
        "`cnn`, null: 32.",
    )

    _from_text = short_for("name")
    disables: ClassVar[Disables] = {
        ("name", name): ("hidden",) for name in (*get_args(Architecture), "ridge") if name not in ("mlp", "cnn")
    }
    refused: ClassVar[Refused] = {
        "Expected one number of hidden with cnn, got {0.hidden}.": lambda model: (
            model.name == "cnn" and model.hidden is not None and len(model.hidden) != 1
        )
    }

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the hidden layers: the value of ``hidden``, or its default for this architecture."""
        if self.hidden is not None:
            return self.hidden
        return (32,) if self.name == "cnn" else (64,)


class NetworkConfig(LayersConfig):
    """The architecture of a model; in YAML, its name alone is enough."""

    name: Architecture = Field(
        "mlp",
        description="`hog_logistic`: logistic regression on a picture's oriented gradients; `bounded_logistic`: on "
        "features that are scaled down to a norm of 4.",
    )


class BackboneConfig(Section):
    """The initial weights of ResNets and DenseNets, for teachers and for the published model.

    With a file of weights, BatchNorm layers keep the means and variances in the file; without one, the networks have
    GroupNorm layers instead.
    """

    weights: WeightsConfig | None = Field(None, description="File of initial weights; null: random weights.")
    trainable: Literal["all", "head"] = Field("all", description="`head`: the last layer only; needs weights.")

    disables: ClassVar[Disables] = {("weights", None): ("trainable",)}
    refused: ClassVar[Refused] = {
        # The other layers would stay random.
        "Expected weights with trainable: head, got null; give a file, or leave it out.": lambda backbone: (
            backbone.trainable == "head" and backbone.weights is None
        )
    }


class ModelConfig(NetworkConfig, BackboneConfig):
    """An architecture and its initial weights: everything that is needed to build a model."""

    refused: ClassVar[Refused] = {
        f"Expected no weights with {{0.name}}, got {{0.weights.path}}; only {', '.join(BACKBONES)} have them.": (
            lambda model: model.weights is not None and model.name not in BACKBONES
        )
    }


class TrainingConfig(Section):
    """The optimiser, schedule and precision with which teachers and students are trained."""

    optimizer: Literal["sgd", "adam"] = "adam"
    weight_decay: NotNegative = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="Precision of the forward and backward pass; weights and updates are float32."
    )


class LoopConfig(Section):
    """The settings of one training loop: epochs, batch size and learning rate."""

    epochs: CountOrZero = 30
    batch_size: Count = 32
    learning_rate: Positive = 1e-3


class FitConfig(LoopConfig, TrainingConfig):
    """The settings of one training by stochastic gradient descent: those of its loop and of its optimiser."""

    label_smoothing: BelowOne = 0.0


class LearningConfig(Section):
    """The settings with which a student learns from labels and from public records without a label."""

    method: Literal["supervised", "fixmatch", "pseudo_label"] = "supervised"
    confidence: float = Field(0.95, gt=0, le=1, description="Pseudo-labels with a smaller probability are left out.")


class StudentConfig(LearningConfig):
    """The settings of the published model (the student), and of its training on released labels."""

    model: NetworkConfig = NetworkConfig()
    idp3: types.GateRule | None = Field(None, description="Reject option at prediction; null answers everything.")
    reject: types.ErrorBound | None = Field(
        None,
        description="Answers only where the model is confident enough: at most a share `max_error` of the answers of "
        "every group is wrong, with probability `confidence`; thresholds come from the table of test records. null: "
        "no bound.",
    )
    fit: LoopConfig = LoopConfig()
    label_smoothing: BelowOne = 0.0


LEARNING_FIELDS = (
    *("augment", "training"),
    *(f"student.{name}" for name in StudentConfig.model_fields if name not in ("model", "idp3", "reject")),
)
"""The dotted fields of a configuration that are read only when a student is trained."""


class StudentTraining(LearningConfig):
    """All settings for training a student: the student's own, completed by the run's initial weights and optimiser."""

    model: ModelConfig = ModelConfig()
    fit: FitConfig = FitConfig()


class RayConfig(Section):
    """The settings of Ray: a pool of actors (worker processes), each of which trains one block of teachers at a
    time."""

    num_actors: CountOrZero | None = Field(
        None,
        description="null: one per CPU. 0: no Ray; teachers train and vote, and cells of a comparison run, in this "
        "process. A service needs actors, and reads 0 as null.",
    )
    num_cpus: Positive = Field(
        1.0,
        description="CPUs that one actor reserves, and the number of its threads (of this process if num_actors is 0).",
    )
    num_gpus: NotNegative = Field(0.0, description="GPUs, possibly fractional, that one actor reserves.")
    wait_for_nodes_s: NotNegative = Field(
        0.0, description="Seconds to wait for a first node that an autoscaler adds; 0: none will be added."
    )

    @property
    def num_threads(self) -> int:
        """The number of threads of one actor, at least 1."""
        # An actor with a share of a CPU still computes.
        return max(1, int(self.num_cpus))


class Terms(Section):
    """The delta at which epsilon is stated. A method without privacy has this setting too, so that its results can be
    compared with those of private methods."""

    delta: float = Field(1e-5, gt=0, lt=1)

    @property
    def stated(self) -> dict[str, Any]:
        """What this section states of epsilon, the neighbouring relation and the accounting, by name; what it leaves to
        the method is missing."""
        names = ("epsilon", "relation", "accounting")
        return {name: value for name, value in self if name in names and value is not None}


class RecordTerms(Terms):
    """The delta and the neighbouring relation for which epsilon is stated, with one record as the privacy unit."""

    relation: Relation = "add or remove one"


class PrivacyTarget(Terms):
    """The guarantee to which noise is calibrated, and the accountant that computes the privacy cost."""

    epsilon: float = Field(
        3.0, gt=0, description="Epsilon of the guarantee; inf: no noise, for methods that can run without."
    )
    relation: Relation | None = Field(
        None,
        description="null: the method's own, `add or remove one` record or `replace one` sensitive attribute. `replace "
        "one` record needs accounting: pld.",
    )
    accounting: Literal["rdp", "pld"] = Field(
        "pld", description="`rdp`: Renyi curves; `pld`: privacy loss distributions, which are tighter."
    )

    refused: ClassVar[Refused] = {
        # There is no Renyi curve here for a replaced record of a sample.
        "Expected accounting: pld with relation: replace one, got rdp.": lambda target: (
            target.relation == "replace one" and target.accounting == "rdp"
        )
    }

    @property
    def record_relation(self) -> Relation:
        """The configured neighbouring relation; if none is configured, the default of methods that protect whole
        records."""
        return self.relation or "add or remove one"


class DpfrConfig(Section):
    """The settings of DPFR, a term of the training loss that penalises a model's demographic-parity gaps on public
    records.
    """

    weight: NotNegative = Field(1.0, description="lambda; 0 switches it off.")
    maximum: Literal["hardmax", "softmax"] = Field(
        "hardmax", description="Whether the regulariser is the largest gap or a soft maximum of all gaps."
    )
    temperature: Positive = Field(1.0, description="Temperature of the predictions whose gaps are measured.")
    max_temperature: Positive = Field(0.1, description="Temperature of the soft maximum.")

    disables: ClassVar[Disables] = {("maximum", "hardmax"): ("max_temperature",)}


class PenaltyConfig(Section):
    """The settings of a regulariser in a student's loss that penalises demographic-parity gaps, computed on a separate
    batch of public records in each step."""

    weight: NotNegative = Field(0.3, description="lambda; 0 switches it off.")
    batch_size: Count = Field(256, description="Public records drawn for each step.")


class CalibrationConfig(Section):
    """The settings for fine-tuning a trained model towards demographic parity, on public records."""

    weight: NotNegative = Field(1.0, description="lambda; 0 switches the regulariser off.")
    labels: bool = Field(
        False,
        description="Learn the known labels of public records at the same time, instead of the model's predictions.",
    )


class PublicDataConfig(Section):
    """The settings for further uses of public records, such as self-labelling. They are available with any method and
    have no privacy cost."""

    pretrain: Count | None = Field(
        None, description="Epochs of pretraining on public images, by predicting how each one was rotated; null: none."
    )
    self_label: Architecture | None = Field(
        None,
        description="Architecture of a student that is published instead of the trained model. It learns, as `student` "
        "says, from the labels of public records of which the trained model is as sure as student.confidence; null: "
        "none.",
    )
    calibration: CalibrationConfig | None = Field(None, description="Fine-tune towards parity at the end.")


def fair_rule(said: Any) -> FairRule:
    """Parse the user's definition of fair: the largest allowed demographic-parity gap, ``four-fifths``, or
    ``NOTION=LIMIT``.

    ValueError for another form, an unknown notion, or a limit that is not above 0 and at most 1.
    """
    notion: Any
    limit: Any
    if isinstance(said, Mapping):
        notion, limit = said.get("notion", types.DEFAULT_NOTION), said.get("limit", FairRule().limit)
    # In either spelling, as names of notions have underscores.
    elif str(said).replace("_", "-") == "four-fifths":
        return types.FOUR_FIFTHS
    else:
        notion, has_notion, limit = str(said).rpartition("=")
        # A number alone is a limit of the default notion.
        notion = notion.strip() if has_notion else types.DEFAULT_NOTION
    names = get_args(types.NotionName)
    if notion not in names:
        raise ValueError(
            f"Expected a notion of fairness before the = of NOTION=LIMIT, got {notion!r}{nearest(str(notion), names)}."
        )
    try:
        largest = float(limit)
    except (TypeError, ValueError):
        raise ValueError(
            f"Expected a limit above 0 and at most 1, four-fifths, or NOTION=LIMIT, got {said!r}; give one of these."
        ) from None
    return FairRule(notion=notion, limit=largest)


class EvaluationConfig(Section):
    """The settings for metrics on test records: how the metrics are published, and which numbers are left out of
    them."""

    metrics: types.MetricsKind = Field(
        "outside",
        description="`private`: one noisy table of test records at the epsilon and delta of the model, from which all "
        "metrics are estimated; needs data.split: hashed. `public`: the test records are public. `outside`: metrics "
        "are computed from test records, and no guarantee covers them.",
    )
    score_edges: tuple[Fraction, ...] = Field(
        (),
        description="Edges between bins of the model's score, by which the table of private metrics is divided for "
        "calibration; each bin adds noise to all metrics. Of two classes the score is the probability of the second, "
        "of more that of the predicted class.",
    )
    least_cell: Count = Field(
        10,
        description="Fewest test records of a cell that a public number may rest on: a group, or those of a group with "
        "one true label, one prediction, both, or a right, wrong or refused one; no total shows a smaller cell. "
        "Persons count where the data set names them; 1 shows all.",
    )
    fair_at: Annotated[str, BeforeValidator(lambda said: str(fair_rule(said)))] = Field(
        str(FairRule()),
        description="Your definition of fair in report, card and verdict: largest demographic-parity gap, such as 0.1; "
        "`four-fifths`; or the largest value of another notion, as in equalized_odds=0.1. It changes no number.",
    )

    disables: ClassVar[Disables] = {("metrics", kind): ("score_edges",) for kind in ("outside", "public")}
    refused: ClassVar[Refused] = {
        # With the ends of the score, so that no bin is empty for every record.
        "score_edges: expected ascending edges between 0 and 1, got {0.score_edges}.": lambda evaluation: any(
            not low < high for low, high in itertools.pairwise((0.0, *evaluation.score_edges, 1.0))
        )
    }

    @property
    def rule(self) -> FairRule:
        """The user's definition of fair (``fair_at``), as a :class:`FairRule`."""
        return fair_rule(self.fair_at)


Noise = Literal["os_entropy", "seeded"]
"""The source of a run's noise. ``seeded`` makes a run reproducible and gives no privacy."""


class ShardsConfig(Section):
    """The shards of the private records, one per teacher, and the blocks of teachers that are trained together."""

    num_teachers: Count = Field(100, ge=2)
    max_shard_size: Count | None = Field(
        None,
        description="Largest number of records of a teacher, chosen by a keyed hash from a larger shard. null: all.",
    )
    block_size: Count | None = Field(None, description="Teachers per Ray task; null chooses.")


class TeacherModelConfig(LayersConfig):
    """The model of every teacher: a network, or ridge regression in closed form; in YAML, its name alone is enough."""

    name: Literal[Architecture, "ridge"] = Field(
        "mlp",
        description="Architecture of a network, or `ridge`: ridge regression on vectors, in closed form, for thousands "
        "of teachers with a dozen records each (`teachers.ridge`).",
    )


class RidgeConfig(Section):
    """The settings of teachers in closed form: ridge regression in which every class of a shard has the same weight."""

    num_features: Count | None = Field(
        None,
        description="Number of features: those that vary most over the public records. null: by the number of teachers "
        "and target.epsilon, at most 50, of embedded pictures 120.",
    )
    penalty: Positive = Field(20.0, description="Ridge penalty, in records.")


class TeachersConfig(ShardsConfig):
    """The settings of the ensemble of teachers that vote."""

    model: TeacherModelConfig = TeacherModelConfig()
    ridge: RidgeConfig = RidgeConfig()
    fit: LoopConfig = LoopConfig()

    # The settings of the other kind of model.
    disables: ClassVar[Disables] = {
        ("model.name", name): ("fit",) if name == "ridge" else ("ridge",) for name in (*get_args(Architecture), "ridge")
    }


class TeachersTraining(ShardsConfig):
    """All settings for training the teachers: their own, completed by the run's initial weights and optimiser.

    ``ridge``: the settings of teachers in closed form; None: the teachers are networks.
    """

    model: ModelConfig = ModelConfig()
    fit: FitConfig = FitConfig()
    ridge: RidgeConfig | None = None


class BudgetConfig(Section):
    """The limit on the total cost, or on the number, of all queries of a run and of the service after it. It is fixed
    once the run's ledger (the record of queries and their costs) is created."""

    epsilon: Positive | None = Field(None, description="Limit on epsilon at `target.delta`.")
    max_queries: Count | None = Field(None, description="Limit on the number of queries, instead of epsilon.")
    accept_leak: bool = Field(
        False,
        description="Whether `epsilon` limits the data-dependent cost: the query at which such a budget ends depends "
        "on private votes and reveals something about them.",
    )

    refused: ClassVar[Refused] = {
        "Expected epsilon or max_queries, got {0.epsilon} and {0.max_queries}.": lambda budget: (
            (budget.epsilon is None) == (budget.max_queries is None)
        ),
        "Expected epsilon with accept_leak: true, got null; leave accept_leak out.": lambda budget: (
            budget.accept_leak and budget.epsilon is None
        ),
    }

    @property
    def kind(self) -> types.BudgetKind:
        """What this budget limits: ``query_count``, ``data_independent`` or ``data_dependent``
        (:class:`fairpate.types.QueryBudget`)."""
        if self.max_queries is not None:
            return "query_count"
        return "data_dependent" if self.accept_leak else "data_independent"

    def at(self, target_delta: float) -> types.QueryBudget:
        """Return this budget as :class:`fairpate.types.QueryBudget`, whose epsilon is stated at ``target_delta``."""
        return types.QueryBudget(kind=self.kind, delta=target_delta, epsilon=self.epsilon, max_queries=self.max_queries)


class GateConfig(Section):
    """The settings of a demographic-parity gate, which refuses a label that would make the gap too large (Algorithm 1
    of FairPATE)."""

    max_disparity: float = Field(
        ge=0, description="gamma: a label passes while its tentative gap stays below; inf: off."
    )
    min_count: CountOrZero = Field(description="M: answers of a group that the gate waits for before gamma applies.")
    gap: types.GapDefinition = Field(
        "one_vs_rest",
        description="What the rate of a group is compared with: that of all others together, the most distant group's "
        "(`pairwise`), or everyone's (`overall`).",
    )


class AdmissionConfig(Section):
    """The settings for submitting queries in rounds: after each round, a student is trained on the labels released so
    far, and chooses the next round's queries."""

    rounds: Count = Field(10, ge=2, description="Number of rounds; the first takes public records in their order.")


class AskedConfig(Section):
    """The settings that select the public records which are submitted as queries."""

    num_queries: Count | None = Field(None, description="Queries submitted; null submits the whole public split.")


class QueriesConfig(AskedConfig):
    """The settings of queries: which public records are submitted to the teachers, in which order, what is released,
    and the privacy budget."""

    budget: BudgetConfig | None = Field(
        None,
        description="null: the target; without one, epsilon with room for the run's queries and for one block that a "
        "crash may waste.",
    )
    keep: float = Field(
        0.0,
        ge=0,
        le=0.9,
        description="Share of the queries within target.epsilon to keep for later, as for a service; a larger share "
        "needs more noise. With small teachers, num_queries is then as many as leave the lead of a single answer "
        "standing out from the noise.",
    )
    admission: AdmissionConfig | None = Field(
        None, description="null: Algorithm 1, public records in their order. Needs num_queries."
    )
    release: types.ReleaseKind = Field(
        "label",
        description="`counts`: every answer has all noisy counts, which show how sure the voters were, and the student "
        "learns from them. The privacy cost is the same, unless the budget is data-dependent.",
    )

    refused: ClassVar[Refused] = {
        "Expected num_queries with admission, got null: admission chooses that many public records.": lambda queries: (
            queries.admission is not None and queries.num_queries is None
        )
    }


class GnmaxConfig(AskedConfig):
    """The settings of Confident-GNMax and of its queries."""

    mechanism: types.MechanismParameters = Field(
        types.MechanismParameters(threshold=60, threshold_stddev_votes=30, noise_stddev_votes=12),
        description="With a target, both noises are multiplied by the factor at which the queries fit.",
    )

    # The record allows a standard deviation of 0, for tests; a run without noise would have no price.
    refused: ClassVar[Refused] = {
        f"Expected 0 < mechanism.threshold_stddev_votes <= {MAX_THRESHOLD_VOTES:.0f} in a run, got "
        "{0.mechanism.threshold_stddev_votes}.": lambda queries: (
            not 0 < queries.mechanism.threshold_stddev_votes <= MAX_THRESHOLD_VOTES
        ),
        f"Expected 0 < mechanism.noise_stddev_votes <= {MAX_THRESHOLD_VOTES:.0f} in a run, got "
        "{0.mechanism.noise_stddev_votes}.": lambda queries: (
            not 0 < queries.mechanism.noise_stddev_votes <= MAX_THRESHOLD_VOTES
        ),
    }


class AggregatorConfig(GnmaxConfig, QueriesConfig):
    """The settings of Confident-GNMax, of its queries and of their budget."""

    refused: ClassVar[Refused] = {
        "Expected no budget.accept_leak with release: counts, got true: the data-dependent cost covers the label "
        "alone; leave it out, or set release: label.": lambda queries: (
            queries.release == "counts" and queries.budget is not None and queries.budget.kind == "data_dependent"
        )
    }


class GatedAggregatorConfig(AggregatorConfig):
    """The settings of Confident&Fair-GNMax: Confident-GNMax with a demographic-parity gate."""

    gate: GateConfig = GateConfig(max_disparity=0.1, min_count=25)


class GatedQueriesConfig(QueriesConfig):
    """The settings of queries to teachers, and of the demographic-parity gate that may refuse to release an answer."""

    gate: GateConfig = GateConfig(max_disparity=0.1, min_count=25)


class QueriesTarget(Terms):
    """The privacy guarantee of all released labels together; neighbouring data sets differ by one record, added or
    removed."""

    epsilon: Positive | None = Field(None, description="Epsilon that is published. null: the noise is as configured.")


Settings = dict[str, Any]


def axis_fields(axis: str) -> list[str]:
    """Return the names of the fields that ``axis``, one axis of a sweep's grid, sets: one field, or several that change
    together and are written ``first, second``."""
    return [field.strip() for field in axis.split(",")]


def overlapping(one: str, other: str) -> bool:
    """Return whether two axes of a sweep's grid overlap. ``one`` and ``other`` are dotted names of fields or sections.

    They overlap if they set the same field, or if one sets a section and the other a part of that section.
    """
    # With a dot at the end: `noise` is no part of `noise_stddev`.
    pairs = itertools.product(axis_fields(one), axis_fields(other))
    return any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a, b in pairs)


def _axes(values: Any) -> Any:
    """Return the ``values`` of a sweep's grid as a flat mapping from dotted field names to lists of values; ``values``
    may have nested sections. ValueError if two axes set the same field."""
    if not isinstance(values, dict):
        return values
    flat = {str(axis): value for axis, value in flattened(values).items() if value != {}}
    # Of two axes that set one field, the later would replace the earlier without notice.
    for one, other in itertools.combinations(flat, 2):
        if overlapping(one, other):
            raise ValueError(
                f"Expected axes of the grid that share no field, got {one!r} and {other!r}; leave one out."
            )
    return flat


Grid = Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], BeforeValidator(_axes)]
"""The axes of a grid: dotted fields and their values. Every combination is a cell; ``first, second`` change
together."""


class SweepPart(Section):
    """The settings and grid of a sweep that apply to one method or one data set."""

    settings: Settings = Field(default_factory=dict, description="Sections, or dotted fields, with one value.")
    grid: Grid = Field(default_factory=dict, description="Dotted fields with a list of values each.")


class DataSetPart(SweepPart):
    """The settings and grid of a sweep for one data set. The part's key in the sweep is the name of the data set,
    unless ``settings`` name another."""

    file: Path | None = Field(
        None,
        description="Configuration to start from, relative to the sweep's file; null: settings chosen for the data "
        "set, as in `fairpate run` without a configuration.",
    )


class MethodPart(SweepPart):
    """The settings and grid of a sweep for one method, and the data sets on which it runs."""

    data_sets: tuple[str, ...] | None = Field(None, description="Names of data sets to run it on; null: all.")


class TasksConfig(Section):
    """The resources that one cell of a sweep (a method with its settings, a data set and a seed) reserves on a node,
    and the limits on its run.

    ``ray.wait_for_nodes_s`` limits how long a cell waits until these resources are free.
    """

    num_cpus: Positive = Field(1.0, description="CPUs, possibly a fraction.")
    num_gpus: NotNegative = Field(0.0, description="GPUs, possibly a fraction.")
    max_retries: CountOrZero = Field(2, description="Times that a cell whose worker died is tried again.")
    max_minutes: Positive | None = Field(None, description="Minutes after which a cell counts as failed; null: never.")
    torch_threads: Count = Field(1, description="Threads of one cell.")


class SweepConfig(Section):
    """The configuration of a sweep: methods x data sets x seeds x grids.

    If several grids name the same field, the method's grid takes precedence, then the data set's. A field in the grid
    of the sweep or of a data set is varied only for methods that read this field.
    """

    out: Path | None = Field(None, description="Folder of the sweep; null: named after the file.")
    seeds: tuple[Seed, ...] = Field((0,), min_length=1)
    split_by_seed: bool = Field(True, description="Divide the records anew for each seed; false: as data.seed says.")
    settings: Settings = Field(default_factory=dict, description="For every cell.")
    grid: Grid = Field(default_factory=dict, description="For every cell.")
    data_sets: dict[str, DataSetPart] = Field(
        min_length=1, description="Data sets by the name that they have in results."
    )
    methods: dict[str, MethodPart] = Field(min_length=1, description="Methods by name; a list where none has settings.")
    notion: types.NotionName = Field(
        types.DEFAULT_NOTION,
        description="Notion of fairness that pages, figures and tables show first; every cell records all.",
    )
    ray: RayConfig = Field(RayConfig(), description="The cluster that the sweep runs on.")
    tasks: TasksConfig = TasksConfig()
    publish_unprotected: bool = Field(
        False, description="Count results of methods without privacy as public: right for public benchmark data only."
    )

    @field_validator("data_sets", "methods", mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return {name: {} for name in value}
        if isinstance(value, dict):
            # In YAML a name without settings, such as `sgd:`, is null.
            return {name: {} if part is None else part for name, part in value.items()}
        return value


def expected(fault: Mapping[str, Any]) -> str:
    """Return in words what the pydantic error ``fault`` says was expected, such as ``expected > 0``; for unusual kinds
    of errors, return pydantic's own words."""
    kind, context, message = str(fault["type"]), fault.get("ctx", {}), str(fault["msg"])
    words_of = read_yaml(Path(__file__).with_name("faults.yaml"))
    if kind == "value_error":  # raised by a check of ours
        said = message.removeprefix("Value error, ").rstrip(".")
        # It follows the field's name, not the start of a sentence.
        return said.replace("Expected", "expected", 1) if said.startswith("Expected ") else said
    if kind in words_of["bounds"]:
        sign, name = words_of["bounds"][kind]
        # In as few digits as are exact: what is typed in a command must mean the same again.
        short = f"{context[name]:g}"
        return f"expected {sign} {short if float(short) == context[name] else context[name]}"
    if kind.endswith(("too_short", "too_long")):  # "List should have at least 1 item after validation, not 0"
        return f"expected {message.partition(' should have ')[2].partition(' after validation')[0]}"
    if kind == "string_pattern_mismatch":
        return f"expected {words_of['forms'].get(context['pattern'], 'text of the form ' + context['pattern'])}"
    for name, words in words_of["types"].items():
        if f"{kind}_".startswith(f"{name}_"):
            return f"expected {words}"
    return message.replace("Input should be", "expected", 1).replace("Input should have", "expected", 1)


_ECHO_LENGTH = 120
_MOST_VALUES = 100_000  # a few nested anchors expand to billions
_SHORT = 2**16  # longer texts are not cached
AnySection = TypeVar("AnySection", bound=Section)


def parse_config(values: dict[str, Any], schema: type[AnySection], *, at: str | None = None) -> AnySection:
    """Validate ``values`` and return them as a section of class ``schema``. :class:`ConfigError` lists every fault as
    ``field: value: remedy``, with the field's whole path if the section stands ``at`` a field of the configuration."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            kind, location, got = fault["type"], fault["loc"], repr(fault["input"])
            # A long value would hide the other faults.
            got = got if len(got) <= _ECHO_LENGTH else f"{got[:_ECHO_LENGTH]}..."
            said = f"{expected(fault)}, got {got}"
            if kind in ("extra_forbidden", "unexpected_keyword_argument"):
                names, short_forms = _names_beside(location, schema)
                last, known = str(location[-1]), [*names, *short_forms]
                said = f"unknown field{nearest(last, known) if known else ''}"
                if last in short_forms:
                    said = f"expected {short_forms[last]}, got {got}"
            elif kind in ("missing", "missing_keyword_only_argument"):
                said = "missing; add it"
            elif kind == "value_error":  # our own checks name the value, and those of a whole file the field
                said = expected(fault)
            path = ".".join(str(part) for part in (*([at] if at else []), *location)) or "config"
            faults.append(f"{path}: {said}." if location or kind != "value_error" else f"{said}.")
        raise ConfigError("\n".join(faults)) from error


def _names_beside(location: tuple[Any, ...], schema: type[Section]) -> tuple[Iterable[str], Mapping[str, str]]:
    """Return the names of all fields of the section that contains ``location`` (a path in a pydantic error), so that
    the message can suggest one, and its short forms; both are empty if that section accepts any name."""
    section: Any = schema
    for name in location[:-1]:
        if (field := getattr(section, "model_fields", {}).get(name)) is None:
            # A mapping of named sections, or a list of them: the name is free, its section is known.
            section = next(reversed([part for part in get_args(section) if part is not ...]), None)
            continue
        section = field.annotation
        parts = [part for part in get_args(section) if part is not type(None)]
        if len(parts) == 1 and type(None) in get_args(section):  # a section that may be null
            (section,) = parts
    # Some sections are records, such as the parameters of a mechanism.
    names = getattr(section, "model_fields", None) or getattr(section, "__dataclass_fields__", {})
    return names, getattr(section, "short_forms", {})


def read_yaml(path: Path | str, *, as_text: bool = False) -> dict[str, Any]:
    """Read a YAML file and return its top-level mapping; :class:`ConfigError` if it cannot be read or has no mapping.

    ``as_text`` reads every value as text, even `no`, `1.0` and `007`.
    """
    try:
        values = _load_yaml(Path(path).read_text(encoding="utf-8"), as_text=as_text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a YAML file.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a YAML file.") from error
    except (UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}; correct the file.") from error
    # An empty file, or one of comments alone.
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: expected a mapping of sections, such as `data:`, at the top level, got {type(values).__name__}; "
            "correct the file."
        )
    return values


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses a name that occurs twice in a mapping, because YAML would silently keep only the last
    value.

    It also refuses anchors that contain themselves or that expand to too many values.
    """

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        # Before any of it becomes a value, which might fill the memory.
        if node is not None and _written_out(node, {}) > _MOST_VALUES:
            raise yaml.YAMLError(f"the YAML aliases expand to more than {_MOST_VALUES} values; use fewer of them")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # `<<` merges an anchor and names no field.
        names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode) and name.value != "<<"]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{name} is given twice in one mapping; leave one out", node.start_mark
                )
        return super().construct_mapping(node, deep=deep)


def _written_out(node: yaml.Node, counted: dict[int, int]) -> int:
    """Return the number of values in the YAML ``node`` once every alias is replaced by a copy of its anchor;
    ``counted`` caches these numbers by node id."""
    if id(node) in counted:
        if not counted[id(node)]:
            raise yaml.YAMLError("an anchor contains itself; write its values out without the alias")
        return counted[id(node)]
    # 0 while its parts are counted, so that an alias of it among them is found.
    counted[id(node)] = 0
    parts: list[Any] = [] if isinstance(node, yaml.ScalarNode) else node.value
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in parts for part in pair]
    counted[id(node)] = 1 + sum(_written_out(part, counted) for part in parts)
    return counted[id(node)]


class _TextLoader(_Loader):
    """A YAML loader that reads every value as text, so that a published `no` or `007` is not converted."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as the parent has it


def _load_yaml(text: str, *, as_text: bool = False) -> Any:
    """Return the value that the YAML ``text`` describes. yaml.YAMLError or ValueError if it is invalid or repeats a
    name."""
    try:
        # A copy, because `--set` writes into what was read, and the cached value must stay as the file has it.
        return deepcopy(_parsed(text, as_text)) if len(text) < _SHORT else _parsed.__wrapped__(text, as_text)
    except RecursionError:
        raise yaml.YAMLError("the YAML text is nested too deeply; use fewer levels") from None


# A run reads its configuration several times, and YAML takes a hundred times as long to read as its values to copy.
@lru_cache(maxsize=1024)
def _parsed(text: str, as_text: bool) -> Any:
    return yaml.load(text, Loader=_TextLoader if as_text else _Loader)  # noqa: S506 - safe loaders


def merge(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``defaults`` in which the fields in ``values`` replace those of the same name, also inside
    nested sections."""
    merged = dict(defaults)
    for name, value in values.items():
        # A value replaces a section as a whole, and so does a section a value.
        both_sections = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = merge(merged[name], value) if both_sections else value
    return merged


Override = str | tuple[str, Any]
"""An override of one field: ``section.field=value``, as `--set` takes it, or a dotted field and its value."""


def apply_override(values: dict[str, Any], *overrides: Override) -> dict[str, Any]:
    """Set one field in ``values`` for each override, and return ``values``. The value of an override that is text,
    ``NAME=VALUE``, is parsed as YAML. ConfigError for an invalid override."""
    for override in overrides:
        if isinstance(override, str):
            dotted, separator, text = override.partition("=")
            if not separator or not dotted:
                raise ConfigError(f"--set {override}: expected section.field=value, such as target.epsilon=1.")
            try:
                value = _load_yaml(text)
            except (yaml.YAMLError, ValueError) as error:
                raise ConfigError(f"--set {override}: not a valid YAML value; correct it: {error}") from error
        else:
            dotted, value = override
        *parents, field = dotted.split(".")
        section = values
        for name in parents:
            # A section that is null is off; setting one of its fields switches it on.
            if section.get(name) is None:
                section[name] = {}
            section = section[name]
            if not isinstance(section, dict):
                raise ConfigError(
                    f"--set {override}: {name} is a value without fields, not a section; set it as a whole."
                )
        section[field] = value
    return values


# The fields that no digest of a configuration includes: where a run happens, and what its pages name or call fair, does
# not change what it computes; a file of weights is identified by its checksum.
NOT_IN_DIGESTS = (
    "out",
    "names_earlier",
    "storage",
    "ray",
    "data.data_dir",
    "data.declaration.path",
    "teachers.block_size",
    "data.weights.path",
    "backbone.weights.path",
    "evaluation.fair_at",
    "student.reject.otherwise",
    "votes.path",
    "votes.test",
    "votes.label",
)


# The seeds of a configuration: runs that differ in nothing else repeat one another.
SEEDS = ("seed", "data.seed")


def without(values: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """Return a copy of the nested ``values`` without the dotted ``fields``; unknown fields are ignored."""
    # Sections that lose nothing are shared with ``values``: a sweep asks thousands of times.
    kept = dict(values)
    # A field that the method does not have is no error: the same list of places serves all methods.
    for place in fields:
        section, _, field = place.partition(".")
        if not field:
            kept.pop(section, None)
        elif isinstance(kept.get(section), dict):
            kept[section] = without(kept[section], (field,))
    return kept


def values_digest(values: dict[str, Any]) -> str:
    """Return twelve hexadecimal digits of a hash of ``values``, which identify a configuration on any machine."""
    # 48 bits: of ten thousand configurations two share a digest with a probability below 1e-6.
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def flattened(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested values as a flat mapping from dotted paths to leaves; an empty section is a leaf."""
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    return {
        path: leaf
        for name, value in values.items()
        for path, leaf in flattened(value, f"{prefix}.{name}" if prefix else name).items()
    }


def disabled(section: Any, prefix: str) -> dict[str, str]:
    """Return the fields of ``section``, and of the sections in it, that another field disables
    (:attr:`Section.disables`), each with the name of that field. ``prefix``: the dotted name of the section."""
    found: dict[str, str] = {}
    # Also what the sections disable that this one extends.
    for kind in type(section).__mro__:
        for (cause, value), fields in vars(kind).get("disables", {}).items():
            set_to = attrgetter(cause)(section)
            if set_to == value or (value is ... and set_to is not None):
                found |= {f"{prefix}.{field}": f"{prefix}.{cause}" for field in fields}
    for name, inner in vars(section).items():
        if hasattr(type(inner), "disables"):
            found |= disabled(inner, f"{prefix}.{name}")
    return found


def disabling(field: str, unread: Mapping[str, str]) -> str | None:
    """Return the setting that disables ``field`` or its section, according to ``unread``, which maps disabled fields to
    settings; None if none does."""
    # With a dot behind both, as the name of one field may begin that of another.
    return next((cause for name, cause in unread.items() if f"{field}.".startswith(f"{name}.")), None)
