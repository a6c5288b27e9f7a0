"""SGD, DP-SGD and FairDP-SGD on the records of a training."""

from __future__ import annotations

from typing import Any

from fairpate.app.methods.training import Training
from fairpate.app.progress import Advance
from fairpate.app.seeds import Stream, stream_seed
from fairpate.baselines import dp_sgd, fair_dp_sgd, sgd
from fairpate.baselines.method import PublicPool, Trained, private_randomness


def train_sgd(training: Training) -> Trained:
    """Without any privacy."""
    private, config = training.dataset.private, training.config
    with training.reporter.stage(config.method) as advance:
        return sgd.train(
            training.model,
            private.x,
            private.y,
            config.sgd,
            generator=training.generator(Stream.TRAINING),
            relation=config.target.record_relation,
            on_progress=advance,
        )


def train_dp_sgd(training: Training) -> Trained:
    """Within the target."""
    with training.reporter.stage(training.config.method) as advance:
        return dp_sgd.train(**_arguments(training, advance))


def train_fair_dp_sgd(training: Training) -> Trained:
    """Within the target; parity is learned from the public pool."""
    public = training.dataset.public
    with training.reporter.stage(training.config.method) as advance:
        return fair_dp_sgd.train(
            **_arguments(training, advance),
            config=training.config.fair_dp_sgd,
            public=PublicPool(x=public.x, groups=public.z),
        )


def _arguments(training: Training, advance: Advance) -> dict[str, Any]:
    private, config = training.dataset.private, training.config
    return {
        "model": training.model,
        "x": private.x,
        "y": private.y,
        "steps": dp_sgd.calibrated_steps(config.dp_sgd, config.target, num_records=len(private)),
        "randomness": private_randomness(config.dp_sgd.noise, stream_seed(config.seed, Stream.NOISE)),
        "generator": training.generator(Stream.TRAINING),
        "relation": config.target.record_relation,
        "on_progress": advance,
    }
