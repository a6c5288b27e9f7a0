"""DP-postprocessing, DP-oracle-learner and randomised response on the records of a training.

Most publish a randomised classifier, which is measured by expectation: a network whose labels are mixed by group, or a
mixture of linear rules. Fine-tuning or relabelling it would undo what was released, so that is refused.
"""

from __future__ import annotations

from torch import Tensor, nn

from fairpate.app.methods.training import Training
from fairpate.app.seeds import Stream, stream_seed
from fairpate.baselines import dp_oracle_learner, dp_postprocessing, pf_ld, randomised_response
from fairpate.baselines.mean_parity import MeanParity
from fairpate.baselines.method import Trained, private_randomness
from fairpate.baselines.randomised_response import Learner
from fairpate.config import ConfigError
from fairpate.privacy.discrete_gaussian import NoiseSource, OsEntropy, SeededSource
from fairpate.train_config import ParityConfig, TrainConfig


def train_dp_postprocessing(training: Training) -> Trained:
    """A base classifier, then its mixing; the slack is told."""
    private, config = training.dataset.private, training.config
    with training.reporter.stage(config.method) as advance:
        trained = dp_postprocessing.train(
            training.model,
            private.x,
            private.y,
            private.z,
            config.dp_postprocessing,
            target=config.target,
            sgd_config=config.sgd,
            dp_sgd_config=config.dp_sgd,
            num_groups=training.dataset.num_groups,
            source=_source(config.dp_postprocessing, config),
            randomness=private_randomness(config.dp_sgd.noise, stream_seed(config.seed, Stream.NOISE)),
            generator=training.generator(Stream.TRAINING),
            on_progress=advance,
        )
    for remark in trained.remarks:
        training.reporter.note("mixing", remark)
    return trained


def train_dp_oracle_learner(training: Training) -> Trained:
    """A mixture of linear rules within the target; two classes."""
    private, config = training.dataset.private, training.config
    _require_two_classes(training)
    with training.reporter.stage(config.method) as advance:
        return dp_oracle_learner.train(
            private.x,
            private.y,
            private.z,
            config.dp_oracle_learner,
            target=config.target,
            num_groups=training.dataset.num_groups,
            source=_source(config.dp_oracle_learner, config),
            on_progress=advance,
        )


def train_randomised_response(training: Training) -> Trained:
    """Of reported groups: a mixture of linear rules for two classes, or the network that F-LD trains."""
    private, config = training.dataset.private, training.config
    settings = config.randomised_response
    if settings.learner == "exponentiated_gradient":
        _require_two_classes(training)
    with training.reporter.stage(config.method):
        return randomised_response.train(
            private.x,
            private.y,
            private.z,
            settings,
            epsilon=config.target.epsilon,
            num_groups=training.dataset.num_groups,
            num_classes=training.dataset.num_classes,
            source=_source(settings, config),
            generator=training.generator(Stream.TRAINING),
            learner=_f_ld(training) if settings.learner == "f_ld" else None,
        )


def check_dp_postprocessing(config: TrainConfig) -> None:
    """ConfigError for what would undo the mixing, and for a target under another relation."""
    _require_as_released(config)
    if config.dp_postprocessing.base == "sgd":
        _require_replacing(config)


def check_dp_oracle_learner(config: TrainConfig) -> None:
    """ConfigError besides for a published model that is not linear."""
    _require_replacing(config)
    _require_linear_mixture(config)


def check_randomised_response(config: TrainConfig) -> None:
    """The same, unless F-LD trains a network."""
    settings = config.randomised_response
    _require_replacing(config)
    if settings.learner == "exponentiated_gradient":
        _require_linear_mixture(config)
    elif settings.form == "two_step":
        _require_as_released(config)


def _f_ld(training: Training) -> Learner:
    """F-LD of the model that training starts from; it drives violations to 0, whatever gap is allowed."""
    settings, dataset = training.config.f_ld, training.dataset

    def learn(x: Tensor, labels: Tensor, reported: Tensor, max_gap: float) -> nn.Module:  # noqa: ARG001
        parity = MeanParity(
            constraint=settings.constraint,
            num_groups=dataset.num_groups,
            num_classes=dataset.num_classes,
            sharpness=settings.sharpness,
        )
        generator = training.generator(Stream.TRAINING)
        return pf_ld.train_f_ld(training.model, x, labels, reported, settings, parity=parity, generator=generator).model

    return learn


def _require_linear_mixture(config: TrainConfig) -> None:
    _require_as_released(config)
    if config.student.model.name != "logistic":
        raise ConfigError(
            f"student.model.name: {config.method} publishes linear rules, got {config.student.model.name}; set "
            "logistic."
        )


def _require_as_released(config: TrainConfig) -> None:
    for field in ("calibration", "self_label"):
        if getattr(config.public_data, field):
            raise ConfigError(f"public_data.{field}: {config.method} publishes a randomised classifier; leave it out.")


def _require_replacing(config: TrainConfig) -> None:
    if config.target.relation not in (None, "replace one"):
        raise ConfigError(
            f"target.relation: {config.method} protects one sensitive attribute against being replaced, got "
            f"{config.target.relation!r}; leave it out."
        )


def _require_two_classes(training: Training) -> None:
    if training.dataset.num_classes != 2:
        raise ConfigError(
            f"data.name: {training.config.method} learns two classes, {training.dataset.name} has "
            f"{training.dataset.num_classes}; choose another data set or method."
        )


def _source(section: ParityConfig, config: TrainConfig) -> NoiseSource:
    seed = stream_seed(config.seed, Stream.NOISE)
    return OsEntropy() if section.noise == "os_entropy" else SeededSource(seed)


def dp_oracle_learner_promises(config: TrainConfig) -> bool:
    """The printed noise follows from private counts: it promises nothing."""
    return config.dp_oracle_learner.noise_rule != "as_published"
