"""What `fairpate train` adds to the schema of :mod:`fairpate.config`: a privacy target, and a section per method."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fairpate.config import Count, CountOrZero, FitConfig, Fraction, NotNegative, Positive, RunConfig, Section
from fairpate.types import Relation


class PrivacyTarget(Section):
    """The promise that noise is calibrated to, and the accountant that prices it."""

    epsilon: float = Field(3.0, gt=0, description="inf: no noise, where a method can do without.")
    delta: float = Field(1e-5, gt=0, lt=1)
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


class DpSgdConfig(Section):
    """DP-SGD. Its noise multiplier is not set here: it follows from a target, or is given where training starts."""

    epochs: Positive = Field(20.0, description="Expected passes over the private records.")
    batch_size: Count = Field(256, description="Expected records of a Poisson batch, and the constant denominator.")
    clip_norm: Positive = 1.0
    learning_rate: Positive = 0.5
    momentum: float = Field(0.9, ge=0, lt=1)
    num_records: Count | None = Field(
        None,
        description="Public size that the sampling rate is set for; null: the real size, which is then public.",
    )
    max_records: Count = Field(512, description="Records in memory at once; changes no result.")
    noise: Literal["os_entropy", "seeded"] = Field(
        "os_entropy", description="`seeded` reproduces a run and gives no privacy."
    )


class DpfrConfig(Section):
    """The demographic-parity regulariser on public records."""

    weight: NotNegative = Field(1.0, description="lambda; 0 switches it off.")
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
    epochs: CountOrZero = Field(20, description="At most; 0 leaves the model as it is.")
    max_disparity: Fraction = Field(0.0, description="Stop once the held-out disparity is no larger.")
    anchor: NotNegative = Field(1.0, description="Weight of staying with what the model predicted before.")
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

    weight: NotNegative = Field(0.3, description="lambda; 0 is PATE.")
    temperature: Positive = Field(1.0, description="Of the predictions whose gaps are taken.")
    batch_size: Count = Field(256, description="Public records drawn for each step.")


class ParityConfig(Section):
    """What the methods that protect the sensitive attribute alone keep across groups, and how they draw noise."""

    constraint: Literal["demographic_parity", "equalized_odds", "equal_opportunity"] = "equalized_odds"
    max_gap: Fraction = Field(0.02, description="gamma: to the reference group, in every event and label.")
    min_share: float = Field(1e-3, gt=0, lt=1, description="Least released share of a cell; fewer is an error.")
    reference_group: CountOrZero = Field(0, description="Code of the group that others are compared with.")
    noise: Literal["os_entropy", "seeded"] = Field(
        "os_entropy", description="`seeded` reproduces a run and gives no privacy."
    )


class DpPostprocessingConfig(ParityConfig):
    """Jagielski et al. 2019, Algorithm 1. The base classifier is trained as `sgd` or `dp_sgd` says."""

    base: Literal["sgd", "dp_sgd"] = Field(
        "sgd", description="Which protects the sensitive attribute alone, or the whole record."
    )
    count_share: float = Field(0.1, gt=0, lt=1, description="Of epsilon, for the counts behind a `dp_sgd` base.")
    failure_probability: float = Field(
        0.05, gt=0, lt=1, description="beta: with which the slack may not cover the noise."
    )
    slack: bool = Field(True, description="false allows max_gap alone: fairer, without the paper's bound on the error.")


class DpOracleLearnerConfig(ParityConfig):
    """Jagielski et al. 2019, Algorithm 3."""

    num_rounds: Count | None = Field(25, description="T; null takes the paper's formula.")
    dual_bound: NotNegative = Field(2.0, description="B: what all multipliers add up to at most.")
    learning_rate: Positive | None = Field(0.5, description="eta; null takes the paper's formula.")
    ridge: Positive = Field(1.0, description="Added to X'X.")
    num_directions: Count | None = Field(
        16, description="Principal directions of features in which prices tilt rules; null: all, as printed."
    )
    release: Literal["every_round", "once"] = Field(
        "once", description="Answer every round under noise, as printed, or release the feature sums of cells once."
    )
    frequency_share: float = Field(0.1, gt=0, lt=1, description="Of epsilon, for the sizes of cells.")
    feature_share: float = Field(0.45, gt=0, lt=1, description="Of epsilon, for the feature sums of `once`.")
    min_share: float = Field(0.01, gt=0, lt=1, description="Least released share of a cell; fewer is an error.")
    failure_probability: float = Field(0.05, gt=0, lt=1, description="beta of the paper's T.")
    noise_rule: Literal["accounted", "as_published"] = Field(
        "accounted", description="as_published: the paper's noise and epsilon; nothing is promised."
    )


class RandomisedResponseConfig(ParityConfig):
    """Mozannar et al. 2020. `num_rounds`, `dual_bound` and `learning_rate` are those of the exponentiated gradient."""

    form: Literal["one_step", "two_step"] = "one_step"
    learner: Literal["exponentiated_gradient", "f_ld"] = Field(
        "exponentiated_gradient", description="Over logistic regression, two classes; or F-LD, as `f_ld` says."
    )
    corrects_bound: bool = Field(True, description="Ask the learner for the smaller gap that reported groups show.")
    mixing_gap: Fraction = Field(1e-4, description="What the second step allows over true groups.")
    num_rounds: Count = 50
    dual_bound: Positive = Field(2.0, description="What all multipliers add up to at most.")
    learning_rate: Positive = Field(0.5, description="Of the multipliers.")


class FldConfig(Section):
    """F-LD: means of groups are held to those of the population by Lagrange multipliers."""

    constraint: Literal["demographic_parity", "equalized_odds", "accuracy_parity"] = Field(
        "demographic_parity", description="Means of predictions, of predictions per true label, or of the loss."
    )
    sharpness: Positive = Field(
        1.0, description="Of the logits whose probabilities are compared: means come closer to those of labels."
    )
    warmup_epochs: CountOrZero = Field(20, description="First epochs without constraints; they read no group.")
    epochs: CountOrZero = Field(50, description="Epochs under constraints.")
    batch_size: Count = 256
    optimizer: Literal["sgd", "adam"] = "adam"
    learning_rate: Positive = 1e-3
    momentum: float = Field(0.9, ge=0, lt=1, description="Of SGD.")
    schedule: Literal["constant", "cosine"] = "constant"
    multipliers: Literal["absolute", "two_sided"] = Field(
        "two_sided", description="Rise with |violation| and act in its direction, as printed; or one per direction."
    )
    dual_step: NotNegative = Field(0.5, description="What a violation of 1 adds to its multiplier; 0 switches off.")
    max_multiplier: NotNegative = Field(5.0, description="lambda_max; 0 is plain training.")
    tolerance: NotNegative = Field(0.0, description="Violation that raises no multiplier.")

    @property
    def fit(self) -> FitConfig:
        """The optimiser and its schedule, over all epochs."""
        return FitConfig(
            epochs=self.warmup_epochs + self.epochs,
            batch_size=self.batch_size,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            schedule=self.schedule,
        )


class PfLdConfig(FldConfig):
    """PF-LD: F-LD that hides the sensitive attribute. Its noise follows from the target."""

    clip_norm: Positive = Field(1.0, description="C_p, of a record's gradient in a group's term.")
    clip_value: Positive = Field(1.0, description="C_d, of what a record adds to a group's mean; probabilities need 1.")
    dual_share: float = Field(0.2, gt=0, lt=1, description="Of the budget, for the violations.")
    size_share: float = Field(0.02, gt=0, lt=1, description="Of the budget, for the sizes of groups.")
    group_sizes: tuple[Positive, ...] | None = Field(
        None, description="Public sizes, those of one label after another for equalized odds; null: released once."
    )
    min_group_share: float = Field(
        0.02, gt=0, le=1, description="Declared least share of a group in its population; smaller sizes count as that."
    )
    batches: Literal["public", "poisson"] = Field(
        "public", description="A partition known to everybody, drawn anew for each epoch; or secret samples."
    )
    form: Literal["corrected", "as_printed"] = Field("corrected", description="`as_printed` promises nothing.")
    noise: Literal["os_entropy", "seeded"] = Field(
        "os_entropy", description="`seeded` reproduces a run and gives no privacy."
    )

    @model_validator(mode="after")
    def _shares_leave_a_rest(self) -> PfLdConfig:
        if self.dual_share + self.size_share >= 1:
            raise ValueError(
                f"Expected dual_share + size_share < 1, got {self.dual_share} + {self.size_share}: gradients take the "
                "rest."
            )
        return self


class DpFermiConfig(Section):
    """DP-FERMI. Steps, clipping and learning rate are those of ``dp_sgd``."""

    constraint: Literal["demographic_parity", "equalized_odds", "equal_opportunity"] = "demographic_parity"
    positive_label: CountOrZero = Field(1, description="The label of equal_opportunity.")
    mode: Literal["all", "sens_public_batches", "sens_secret_batches"] = Field(
        "all", description="What is protected: the whole record, or the sensitive attribute alone."
    )
    weight: NotNegative = Field(1.0, description="lambda; 0 is DP-SGD.")
    radius: Positive | None = Field(None, description="R, of each W; null: 1.5 times the root of the classes.")
    matrix_learning_rate: Positive = Field(0.3, description="Of W, lambda included.")
    matrix_noise_ratio: Positive = Field(2.0, description="Noise multiplier of W over that of the model.")
    shares: tuple[tuple[Fraction, ...], ...] | None = Field(
        None, description="Public share of each group in each event, declared; null releases them."
    )
    share_noise: Positive = Field(30.0, description="Standard deviation of the released counts, in records.")
    min_share: float = Field(0.01, gt=0, lt=1, description="Smaller released shares are raised to it.")
    averaged_share: Fraction = Field(0.5, description="Of the last steps, whose weights are averaged; 0: the last.")
    noise_rule: Literal["accounted", "as_published"] = Field(
        "accounted", description="as_published: the paper's closed form, which costs more than the target."
    )


class NoisyHistogramConfig(Section):
    """What the methods share that release a histogram of every batch; their gradients are as `dp_sgd` says."""

    histogram_share: float = Field(0.1, gt=0, lt=1, description="Part of the budget that the histograms take.")
    min_share: float = Field(
        0.01, gt=0, le=1, description="Least share of the expected batch that a set of records counts as: public."
    )
    averaged_share: Fraction = Field(0.5, description="Of the last steps, whose weights are averaged; 0: the last.")


class RacoDpConfig(NoisyHistogramConfig):
    """RaCO-DP: which rate constraint, how tight, and how its multipliers move."""

    constraint: Literal[
        "demographic_parity",
        "equalized_odds",
        "equal_opportunity",
        "false_negative_rate",
        "false_positive_rate",
        "false_discovery_rate",
    ] = "demographic_parity"
    bound: Annotated[float, Field(ge=-1, le=1)] = Field(
        0.05, description="On the signed gap of a group to all others, or on the rate itself."
    )
    label: CountOrZero | None = Field(1, description="Code of the positive class; null: one constraint per class.")
    sharpness: Positive = Field(1.0, description="Inverse temperature of the predictions that rates are taken of.")
    dual_learning_rate: NotNegative = Field(0.1, description="Of the multipliers; 0 leaves them at 0.")
    max_multiplier: Positive | None = Field(None, description="Cap on each multiplier; or:")
    max_total_multiplier: Positive | None = Field(None, description="Cap on the sum of all.")


class SfPateConfig(Section):
    """SF-PATE; `teachers`, `aggregator` and `f_ld` are its other settings."""

    variant: Literal["sf_s", "sf_t"] = Field(
        "sf_s", description="Teachers predict attributes for a fair student; or they are fair themselves."
    )


class TrainConfig(RunConfig):
    """One method on one data set: every section is the same for all methods that read it.

    ``student`` is the published model: its architecture and reject option, whatever trained it.
    """

    method: str = "dp_sgd"
    target: PrivacyTarget = PrivacyTarget()
    sgd: FitConfig = FitConfig()
    dp_sgd: DpSgdConfig = DpSgdConfig()
    fair_dp_sgd: FairDpSgdConfig = FairDpSgdConfig()
    dp_fermi: DpFermiConfig = DpFermiConfig()
    f_ld: FldConfig = FldConfig()
    pf_ld: PfLdConfig = PfLdConfig()
    sf_pate: SfPateConfig = SfPateConfig()
    pate: PateConfig = PateConfig()
    pate_s_in: PateSInConfig = PateSInConfig()
    dp_postprocessing: DpPostprocessingConfig = DpPostprocessingConfig()
    dp_oracle_learner: DpOracleLearnerConfig = DpOracleLearnerConfig()
    randomised_response: RandomisedResponseConfig = RandomisedResponseConfig()
    raco_dp: RacoDpConfig = RacoDpConfig()
    public_data: PublicDataConfig = PublicDataConfig()
