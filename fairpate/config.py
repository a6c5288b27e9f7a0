"""The sections of a configuration: one schema for YAML, the command line and Python.

Every field documents its unit, range and sentinel; an unknown or impossible value is refused here, before any work
starts. A configuration is frozen: what ran is what is written beside the results.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fairpate.types import GateRule, Relation, UsageError

LARGEST = 1e12
"""No real setting is as large; what is would overflow far from the field that caused it."""
_LARGEST_INT, _LARGEST_SEED = 2**31 - 1, 2**63 - 1
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(gt=0, le=_LARGEST_INT)]
CountOrZero = Annotated[int, Field(ge=0, le=_LARGEST_INT)]
Seed = Annotated[int, Field(ge=0, le=_LARGEST_SEED)]
IMAGENET = "imagenet"
BACKBONES = ("resnet18", "resnet50", "densenet121")


class ConfigError(UsageError, ValueError):
    """A configuration that cannot run; the message lists every fault with its field, value and remedy."""


class Section(BaseModel):
    """A part of the schema: unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class DeclarationConfig(Section):
    """The file that declares a table of one's own; a plain path stands for it in YAML."""

    path: Path = Field(description="YAML, as docs/data.md describes it.")
    sha256: str | None = Field(
        None, pattern="^[0-9a-f]{64}$", description="Of the file; null: as it is when the configuration is read."
    )

    @model_validator(mode="before")
    @classmethod
    def _is_pinned(cls, values: Any) -> Any:
        values = {"path": values} if isinstance(values, (str, Path)) else values
        if not isinstance(values, dict) or values.get("path") is None:
            return values
        path = Path(values["path"]).expanduser().absolute()
        pinned = values.get("sha256") or _sha256_of(path, "give a declaration in YAML")
        # As text: what comes from JSON may be no Path.
        return {"path": str(path), "sha256": pinned}


class EmbeddingConfig(Section):
    """Principal components of what public records look like."""

    num_components: Count = Field(200, description="Fewer where public records have fewer.")
    steps: CountOrZero = Field(
        10, description="Tables: quantiles of public records that a column of more values is compared with."
    )
    pixels: Count | None = Field(16, description="Pictures: also shrunk to so many pixels a side; null: edges alone.")
    mirrored: bool = Field(False, description="Pictures: averaged with the mirror image's.")
    graph_share: Fraction = Field(
        0.2, description="Pictures: how much of the squared norm tells the place in the pool's graph of neighbours."
    )


class DataConfig(Section):
    """Which records, and how they are divided."""

    name: str = Field("color_digits", description="A name from `fairpate data list`, or of the declaration.")
    declaration: DeclarationConfig | None = Field(
        None, description="A table of one's own, whose files lie beside it or in data_dir; null: a known data set."
    )
    data_dir: Path | None = Field(
        None,
        description="Folder with the publisher's files; null reads the environment variable FAIRPATE_DATA.",
    )
    seed: Seed = Field(0, description="Seed of the split; public.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="The loader's own options, such as `sensitive: colour`."
    )
    num_public: Count | None = Field(None, description="Public records; null takes the loader's default.")
    num_validation: CountOrZero | None = Field(None, description="Validation records; null takes the default.")
    num_test: Count | None = Field(None, description="Test records; null takes the default.")
    unit: Literal["record"] | None = Field(
        None,
        description="`record` protects each record by itself; null: all records of a person together, where the data "
        "set names persons.",
    )
    embedding: EmbeddingConfig | None = Field(
        None, description="What every method sees of a record, fitted to public ones; null: the record as it is."
    )


class AugmentConfig(Section):
    """Random label-preserving changes of an image; public knowledge, the same for every method."""

    rotation_degrees: float = Field(0.0, ge=0, le=180, description="Uniform in [-r, r].")
    translation_fraction: float = Field(0.0, ge=0, lt=1, description="Share of width and height.")
    scale_fraction: float = Field(0.0, ge=0, lt=1, description="Zoom uniform in [1 - s, 1 + s].")
    shear_degrees: float = Field(0.0, ge=0, lt=90, description="Uniform in [-s, s].")
    elastic_fraction: float = Field(
        0.0, ge=0, lt=1, description="Largest shift of a point of a coarse grid that bends the image, in sides."
    )
    channel_swap: Fraction = Field(0.0, description="Probability of a random permutation of the channels.")
    horizontal_flip: Fraction = Field(0.0, description="Probability of a mirror image.")
    erase: Fraction = Field(0.0, description="Probability of blanking one random rectangle.")

    @property
    def is_identity(self) -> bool:
        """Whether no change is asked for."""
        return not any(self.model_dump().values())


class WeightsConfig(Section):
    """A file of weights that were learned on public pictures; a plain path stands for it in YAML."""

    path: Path | None = Field(
        None,
        description="torchvision's state dict, .pth or .safetensors, at this path of every node; `imagenet`: its "
        "published file. null in a published model.",
    )
    sha256: str | None = Field(
        None, pattern="^[0-9a-f]{64}$", description="Of the file; null: as it is when the configuration is read."
    )

    @property
    def is_imagenet(self) -> bool:
        """Whether torchvision's published file is meant, and has not been looked for yet."""
        return self.path == Path(IMAGENET)

    @model_validator(mode="before")
    @classmethod
    def _is_pinned(cls, values: Any) -> Any:
        values = {"path": values} if isinstance(values, (str, Path)) else values
        if not isinstance(values, dict) or values.get("path") in (None, IMAGENET, Path(IMAGENET)):
            return values
        path = Path(values["path"]).expanduser().absolute()
        return {"path": path, "sha256": values.get("sha256") or _sha256_of(path, "give a .pth or .safetensors file")}


class ModelConfig(Section):
    """The architecture, and where it starts; its name alone stands for it."""

    name: Literal[
        "logistic", "hog_logistic", "mlp", "lenet", "tanh_cnn", "cnn", "resnet18", "resnet50", "densenet121"
    ] = Field("mlp", description="`hog_logistic`: logistic regression on a picture's oriented gradients.")
    hidden: tuple[Count, ...] = Field((64,), description="Widths of an MLP's hidden layers.")
    width: Count = Field(32, description="Channels of the first block of `cnn`.")
    dropout: float = Field(0.0, ge=0, lt=1)
    weights: WeightsConfig | None = Field(
        None, description="Of resnet18, resnet50 or densenet121: what to start from; null: random weights."
    )
    norm: Literal["group", "frozen_batch"] | None = Field(
        None, description="`frozen_batch`: BatchNorm with the file's statistics, for good. null: that with a file."
    )
    trainable: Literal["all", "head"] = Field("all", description="`head`: the last layer only; needs weights.")

    @model_validator(mode="before")
    @classmethod
    def _is_named(cls, values: Any) -> Any:
        return {"name": values} if isinstance(values, str) else values

    @property
    def keeps_batch_statistics(self) -> bool:
        """Whether BatchNorm stays as the weights file has it."""
        return self.weights is not None and self.norm != "group"

    @model_validator(mode="after")
    def _has_weights_where_needed(self) -> ModelConfig:
        if self.weights is not None and self.name not in BACKBONES:
            raise ValueError(
                f"Expected no weights with {self.name}, got {self.weights.path}; only {', '.join(BACKBONES)} have them."
            )
        for field, value, needy in (("norm", self.norm, "frozen_batch"), ("trainable", self.trainable, "head")):
            if value == needy and self.weights is None:
                raise ValueError(f"Expected weights with {field}: {needy}, got null; give a file, or leave it out.")
        return self


class FitConfig(Section):
    """One loop of stochastic gradient descent."""

    epochs: CountOrZero = 30
    batch_size: Count = 32
    optimizer: Literal["sgd", "adam"] = "adam"
    learning_rate: Positive = 1e-3
    momentum: float = Field(0.9, ge=0, lt=1, description="Of SGD.")
    weight_decay: NotNegative = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    augment: AugmentConfig = AugmentConfig()
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="Of the forward and backward pass; weights and their updates stay float32."
    )


class LearningConfig(Section):
    """How a model learns from released labels and from the public records that have none."""

    fit: FitConfig = FitConfig()
    method: Literal["supervised", "fixmatch", "pseudo_label"] = "supervised"
    confidence: float = Field(0.95, gt=0, le=1, description="Pseudo-labels below it are left out.")
    unlabelled_weight: NotNegative = Field(1.0, description="Weight of the loss on unanswered records.")
    unlabelled_ratio: Count = Field(
        4,
        description="FixMatch: unlabelled records per labelled one in a step. An epoch visits every record of both "
        "kinds at least once.",
    )
    rounds: Count = Field(1, description="Self-training rounds.")
    strong_augment: AugmentConfig = AugmentConfig()


class PublishedConfig(Section):
    """The model that is published."""

    model: ModelConfig = ModelConfig()
    idp3: GateRule | None = Field(None, description="Reject option at prediction; null answers everything.")


class StudentConfig(LearningConfig, PublishedConfig):
    """The model that is published, and how it learns from labels."""


class RayConfig(Section):
    """The cluster: a bounded pool of actors, each with a block of teachers."""

    num_actors: CountOrZero | None = Field(
        None,
        description="null: one per CPU. 0: none, and no Ray: teachers train and vote in this process. A service needs "
        "actors, and takes 0 as null.",
    )
    num_cpus: Positive = Field(1.0, description="CPUs that one actor reserves.")
    num_gpus: NotNegative = Field(0.0, description="GPUs, possibly fractional, that one actor reserves.")
    torch_threads: Count = Field(1, description="Threads of one actor, or of this process where it is its own pool.")
    read_shards: bool = Field(
        False,
        description="Workers read the shards that they train on from the data set's files, which every node must have, "
        "instead of getting them from this process.",
    )
    max_restarts: CountOrZero = Field(3, description="Times one block may be lost with its actor before the run fails.")
    wait_for_nodes_s: NotNegative = Field(
        0.0, description="Seconds to wait for a first node that an autoscaler adds; 0: the cluster is what it is."
    )


class Terms(Section):
    """What an epsilon is stated at, for methods without any privacy too."""

    delta: float = Field(1e-5, gt=0, lt=1)


class RecordTerms(Terms):
    """The same for one record."""

    relation: Relation = "add or remove one"


class PrivacyTarget(Terms):
    """The guarantee that noise is calibrated to, and the accountant that prices it."""

    epsilon: float = Field(3.0, gt=0, description="inf: no noise, where a method can do without.")
    relation: Relation | None = Field(
        None,
        description="null: the method's own, which is `add or remove one` record or `replace one` sensitive attribute. "
        "Of a record, `replace one` is priced by `pld` only.",
    )
    accounting: Literal["rdp", "pld"] = Field(
        "pld", description="Renyi curves, or privacy loss distributions: tighter."
    )

    @model_validator(mode="after")
    def _is_priced(self) -> PrivacyTarget:
        if self.relation == "replace one" and self.accounting == "rdp":
            raise ValueError("Expected accounting: pld with relation: replace one, got rdp.")
        return self

    @property
    def record_relation(self) -> Relation:
        """The relation for methods that protect whole records."""
        return self.relation or "add or remove one"


class DpfrConfig(Section):
    """The demographic-parity regulariser on public records."""

    weight: NotNegative = Field(1.0, description="lambda; 0 switches it off.")
    maximum: Literal["hardmax", "softmax"] = Field("hardmax", description="The largest gap, or a soft maximum of all.")
    temperature: Positive = Field(1.0, description="Of the predictions whose gaps are taken.")
    max_temperature: Positive = Field(0.1, description="Of the soft maximum.")


class PenaltyConfig(DpfrConfig):
    """The regulariser in a student's loss, of a public batch of its own at each step."""

    weight: NotNegative = Field(0.3, description="lambda; 0 switches it off.")
    batch_size: Count = Field(256, description="Public records drawn for each step.")


class CalibrationConfig(DpfrConfig):
    """Fine-tuning of a trained model on public records."""

    epochs: CountOrZero = Field(20, description="At most; 0 leaves the model as it is.")
    max_disparity: Fraction = Field(0.0, description="Stop once the held-out disparity is no larger.")
    anchor: NotNegative = Field(1.0, description="Weight of staying with what the model predicted before.")
    held_out: float = Field(0.25, gt=0, lt=1, description="Share of the public records that decides when to stop.")
    batch_size: Count = 256
    learning_rate: Positive = 1e-3


class SelfLabelConfig(LearningConfig):
    """How the student of self-labelling learns, and what it is."""

    model: ModelConfig | None = Field(None, description="The model that is then published; null: as student.model.")


class PublicDataConfig(Section):
    """What public records are used for besides queries; open to every method, and free of privacy cost."""

    pretrain: FitConfig | None = Field(None, description="Start from weights that tell how public images are turned.")
    self_label: SelfLabelConfig | None = Field(
        None, description="Publish a student that learned from labels the trained model gives the pool."
    )
    calibration: CalibrationConfig | None = Field(None, description="Fine-tune towards parity at the end.")


class EvaluationConfig(Section):
    """What may be said of test records."""

    least_cell: Count = Field(
        10,
        description="No public number rests on fewer test records (persons, where the data set names them) of a group, "
        "or of a group and class, and no total shows such a cell; 1 shows all.",
    )


Noise = Literal["os_entropy", "seeded"]
"""Where the noise of a run comes from. ``seeded`` reproduces a run and gives no privacy."""


def _sha256_of(path: Path, remedy: str) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {remedy}") from error
