"""DP-FERMI on the records of a training."""

from __future__ import annotations

from fairpate.app.methods.training import Training
from fairpate.app.seeds import Stream, stream_seed
from fairpate.baselines import dp_fermi
from fairpate.baselines.dp_fermi import Cells
from fairpate.baselines.method import Trained, private_randomness
from fairpate.config import ConfigError
from fairpate.train_config import TrainConfig


def train_dp_fermi(training: Training) -> Trained:
    """Within the target, for whole records or for their sensitive attribute alone."""
    dataset, config, private = training.dataset, training.config, training.dataset.private
    settings, target = config.dp_fermi, config.target
    randomness = private_randomness(config.dp_sgd.noise, stream_seed(config.seed, Stream.NOISE))
    steps = dp_fermi.calibrated_steps(settings, config.dp_sgd, target, num_records=len(private))
    cells = Cells.of(
        private.y, private.z, config=settings, num_classes=dataset.num_classes, num_groups=dataset.num_groups
    )
    shares = dp_fermi.release_shares(cells, settings, relation=target.record_relation, randomness=randomness)
    for remark in shares.remarks:
        training.reporter.note("shares", remark)
    with training.reporter.stage(config.method) as advance:
        return dp_fermi.train(
            training.model,
            private.x,
            private.y,
            cells,
            steps,
            settings,
            shares=shares,
            randomness=randomness,
            generator=training.generator(Stream.TRAINING),
            on_progress=advance,
        )


def check_dp_fermi(config: TrainConfig) -> None:
    """ConfigError where the mode protects an attribute and the target speaks of records that come and go."""
    if config.dp_fermi.mode != "all" and config.target.relation not in (None, "replace one"):
        raise ConfigError(
            f"target.relation: dp_fermi.mode={config.dp_fermi.mode} protects a sensitive attribute, of which one is "
            f"replaced, got {config.target.relation!r}; leave it out."
        )
