"""What `fairpate train` adds to the schema of :mod:`fairpate.config`: a privacy target, and a section per method."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from fairpate.config import Count, FitConfig, Positive, RunConfig, Section
from fairpate.types import Relation


class PrivacyTarget(Section):
    """The promise that noise is calibrated to, and the accountant that prices it."""

    epsilon: Positive = 3.0
    delta: float = Field(1e-5, gt=0, lt=1)
    relation: Relation = Field("add or remove one", description="Of one record; `replace one` is priced by `pld` only.")
    accounting: Literal["rdp", "pld"] = Field(
        "pld", description="Renyi curves, or privacy loss distributions: tighter."
    )

    @model_validator(mode="after")
    def _is_priced(self) -> PrivacyTarget:
        if self.relation == "replace one" and self.accounting == "rdp":
            raise ValueError("Expected accounting: pld with relation: replace one, got rdp.")
        return self


class DpSgdConfig(Section):
    """DP-SGD. Its noise multiplier is not set here: it follows from a target, or is given where training starts."""

    epochs: Positive = Field(20.0, description="Expected passes over the private records.")
    batch_size: Count = Field(256, description="Expected records of a Poisson batch, and the constant denominator.")
    clip_norm: Positive = 1.0
    learning_rate: Positive = 0.5
    momentum: float = Field(0.9, ge=0, lt=1)
    num_records: int | None = Field(
        None,
        gt=0,
        description="Public size that the sampling rate is set for; null: the real size, which is then public.",
    )
    max_records: Count = Field(512, description="Records in memory at once; changes no result.")
    noise: Literal["os_entropy", "seeded"] = Field(
        "os_entropy", description="`seeded` reproduces a run and gives no privacy."
    )


class DpfrConfig(Section):
    """The demographic-parity regulariser on public records."""

    weight: float = Field(1.0, ge=0, description="lambda; 0 switches it off.")
    maximum: Literal["hardmax", "softmax"] = Field("hardmax", description="The largest gap, or a soft maximum of all.")
    temperature: Positive = Field(0.01, description="Of the predictions whose gaps are taken.")
    max_temperature: Positive = Field(0.1, description="Of the soft maximum.")


class FairDpSgdConfig(DpfrConfig):
    """How DP-SGD is regularised."""

    variant: Literal["as_written", "post"] = Field(
        "post", description="Added to every gradient before clipping, as printed; or once, after the noise."
    )
    public_batch_size: Count = Field(64, description="Public records drawn for each step.")


class CalibrationConfig(DpfrConfig):
    """Fine-tuning of a trained model on public records."""

    temperature: Positive = Field(1.0, description="Of the predictions whose gaps are taken.")
    epochs: int = Field(20, ge=0, description="At most; 0 leaves the model as it is.")
    max_disparity: float = Field(0.0, ge=0, description="Stop once the held-out disparity is no larger.")
    anchor: float = Field(1.0, ge=0, description="Weight of staying with what the model predicted before.")
    held_out: float = Field(0.25, gt=0, lt=1, description="Share of the public records that decides when to stop.")
    batch_size: Count = 256
    learning_rate: Positive = 1e-3


class PublicDataConfig(Section):
    """What public records are used for besides queries; open to every method, and free of privacy cost."""

    pretrain: FitConfig | None = Field(None, description="Start from weights that tell how public images are turned.")
    self_label: bool = Field(
        False, description="Publish a student that learned, as `student` says, from labels the model gives the pool."
    )
    calibration: CalibrationConfig | None = Field(None, description="Fine-tune towards parity at the end.")


class PateConfig(Section):
    """How the PATE family keeps a target."""

    price: Literal["data_independent", "data_dependent"] = Field(
        "data_independent",
        description="Scale the noises until the queries fit, or stop where the price of the votes says so: leaks.",
    )
    accept_leak: bool = Field(False, description="data_dependent needs true: when it stops depends on private votes.")

    @model_validator(mode="after")
    def _leak_is_accepted(self) -> PateConfig:
        if self.price == "data_dependent" and not self.accept_leak:
            raise ValueError("Expected accept_leak: true with price: data_dependent, got false: when it stops leaks.")
        return self


class PateSInConfig(DpfrConfig):
    """The regulariser in the loss of PATE-S_in's student."""

    weight: float = Field(0.3, ge=0, description="lambda; 0 is PATE.")
    temperature: Positive = Field(1.0, description="Of the predictions whose gaps are taken.")
    batch_size: Count = Field(256, description="Public records drawn for each step.")


class TrainConfig(RunConfig):
    """One method on one data set: every section is the same for all methods that read it.

    ``student`` is the published model: its architecture and reject option, whatever trained it.
    """

    method: str = "dp_sgd"
    target: PrivacyTarget = PrivacyTarget()
    sgd: FitConfig = FitConfig()
    dp_sgd: DpSgdConfig = DpSgdConfig()
    fair_dp_sgd: FairDpSgdConfig = FairDpSgdConfig()
    pate: PateConfig = PateConfig()
    pate_s_in: PateSInConfig = PateSInConfig()
    public_data: PublicDataConfig = PublicDataConfig()
