"""F-LD and PF-LD on the records of a training."""

from __future__ import annotations

from typing import Any

from fairpate.app.methods.training import Training
from fairpate.app.progress import Advance
from fairpate.app.seeds import Stream, stream_seed
from fairpate.baselines import pf_ld, pf_ld_as_printed
from fairpate.baselines.mean_parity import MeanParity
from fairpate.baselines.method import Trained, private_randomness
from fairpate.config import ConfigError
from fairpate.train_config import FldConfig, TrainConfig


def train_f_ld(training: Training) -> Trained:
    """Without any privacy."""
    config = training.config.f_ld
    with training.reporter.stage(training.config.method) as advance:
        return pf_ld.train_f_ld(**_arguments(training, config, advance), config=config)


def train_pf_ld(training: Training) -> Trained:
    """Within the target for one sensitive attribute; or as printed, and then without a promise."""
    config, target, size = training.config.pf_ld, training.config.target, len(training.dataset.private)
    randomness = private_randomness(config.noise, stream_seed(training.config.seed, Stream.NOISE))
    with training.reporter.stage(training.config.method) as advance:
        arguments = _arguments(training, config, advance)
        if config.form == "as_printed":
            noise = pf_ld_as_printed.published_noise(config, target, num_records=size)
            return pf_ld_as_printed.train_as_printed(
                **arguments, config=config, noise=noise, target=target, randomness=randomness
            )
        noise = pf_ld.calibrated_noise(config, target, num_records=size)
        return pf_ld.train_pf_ld(**arguments, config=config, noise=noise, randomness=randomness)


def check_attribute(config: TrainConfig) -> None:
    """ConfigError for a target under a relation that no sensitive attribute has."""
    if config.target.relation not in (None, "replace one"):
        raise ConfigError(
            f"target.relation: {config.method} protects a sensitive attribute, of which one is replaced, got "
            f"{config.target.relation!r}; leave it out."
        )


def _arguments(training: Training, config: FldConfig, advance: Advance) -> dict[str, Any]:
    dataset = training.dataset
    parity = MeanParity(
        constraint=config.constraint,
        num_groups=dataset.num_groups,
        num_classes=dataset.num_classes,
        sharpness=config.sharpness,
    )
    return {
        "model": training.model,
        "x": dataset.private.x,
        "y": dataset.private.y,
        "groups": dataset.private.z,
        "parity": parity,
        "generator": training.generator(Stream.TRAINING),
        "on_progress": advance,
    }


def pf_ld_promises(config: TrainConfig) -> bool:
    """The printed form releases exact violations and undercharges the rest: it promises nothing."""
    return config.pf_ld.form != "as_printed"
