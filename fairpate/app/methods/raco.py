"""RaCO-DP: DP-SGD beside a noisy histogram of every batch."""

from __future__ import annotations

from typing import Any

from fairpate.app.methods.training import Training
from fairpate.app.progress import Advance
from fairpate.app.seeds import Stream, stream_seed
from fairpate.baselines import noisy_histogram, raco_dp
from fairpate.baselines.method import Trained, private_randomness
from fairpate.config import ConfigError
from fairpate.train_config import NoisyHistogramConfig, TrainConfig


def train_raco_dp(training: Training) -> Trained:
    """Within the target; the constraint holds for the groups and labels of private records."""
    dataset, config = training.dataset, training.config.raco_dp
    constraints = raco_dp.constraints_of(config, num_classes=dataset.num_classes, num_groups=dataset.num_groups)
    with training.reporter.stage("raco_dp") as advance:
        trained = raco_dp.train(**_arguments(training, config, advance), constraints=constraints)
    report = trained.report
    worst = max(range(len(report.names)), key=lambda j: report.values[j] - report.bounds[j])
    training.reporter.note(
        "constraint", f"{report.names[worst]} at {report.values[worst]:.3f}, bound {report.bounds[worst]:g}"
    )
    if report.floored:
        training.reporter.note(
            "floor", f"fewer than raco_dp.min_share records behind {', '.join(report.floored)}: held more loosely"
        )
    return trained


def check_raco(config: TrainConfig) -> None:
    """ConfigError for a target that a histogram beside the gradient is not priced under, or two caps at once."""
    if config.target.record_relation != "add or remove one":
        raise ConfigError(
            f"target.relation: {config.target.relation!r} is not priced for {config.method}, whose Laplace and "
            "Gaussian noise fall on one sample; use 'add or remove one'."
        )
    if config.raco_dp.max_multiplier is not None and config.raco_dp.max_total_multiplier is not None:
        raise ConfigError("raco_dp.max_multiplier: expected this or raco_dp.max_total_multiplier, got both; leave one.")


def _arguments(training: Training, config: NoisyHistogramConfig, advance: Advance) -> dict[str, Any]:
    private, whole = training.dataset.private, training.config
    return {
        "model": training.model,
        "x": private.x,
        "y": private.y,
        "groups": private.z,
        "config": config,
        "steps": noisy_histogram.calibrated_steps(whole.dp_sgd, config, whole.target, num_records=len(private)),
        "randomness": private_randomness(whole.dp_sgd.noise, stream_seed(whole.seed, Stream.NOISE)),
        "histogram_randomness": private_randomness(whole.dp_sgd.noise, stream_seed(whole.seed, Stream.HISTOGRAM_NOISE)),
        "generator": training.generator(Stream.TRAINING),
        "on_progress": advance,
    }
