"""One step of fair private training as a ratio to one step of the same engine's DP-SGD.

    OMP_NUM_THREADS=1 python benchmarks/speed/fair_training.py [--repeats 15]

Synthetic records from a seed, with as many columns as Adult or Credit has here, logistic regression, two groups. Every
step is whole: it draws its Poisson batch, gathers it, runs forward and backward, clips, adds noise and updates, its
multipliers or matrices included. Contenders take turns in one process with one thread, in processor time; ratios are
taken within a round and the median round is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from turns import Step, seconds_by_round

from fairpate.config import ModelConfig
from fairpate.methods import raco_dp
from fairpate.methods.dp_fermi import DpFermiConfig, FermiSteps, MatrixGame, fermi_training, watched_targets
from fairpate.methods.raco_dp import HistogramSteps, RacoDpConfig, priced_training
from fairpate.nn.models import build_model
from fairpate.nn.per_example import CrossEntropy
from fairpate.nn.private_fit import OsRandomness, PrivateSteps, PrivateTraining
from fairpate.privacy.mechanism_events import AttributeGaussians

NUM_CLASSES, NUM_GROUPS, BATCHES_PER_EPOCH = 2, 2, 40
NUM_FEATURES = {"adult": 102, "credit_default": 87}
LEARNING_RATE, CLIP_NORM, NOISE_MULTIPLIER = 0.05, 1.0, 1.0
CASES = (("adult", 512), ("adult", 1024), ("credit_default", 512))


@dataclass(frozen=True, kw_only=True)
class Case:
    """The records of one row of the table, and what trains on them."""

    batch_size: int
    x: Tensor
    y: Tensor
    groups: Tensor

    @classmethod
    def of(cls, data: str, batch_size: int) -> Case:
        """As many records of that width as make the batch size the expected one at a sampling rate of 1 / 40."""
        generator, count = torch.Generator().manual_seed(0), BATCHES_PER_EPOCH * batch_size
        return cls(
            batch_size=batch_size,
            x=torch.randn(count, NUM_FEATURES[data], generator=generator),
            y=torch.randint(0, NUM_CLASSES, (count,), generator=generator),
            groups=torch.randint(0, NUM_GROUPS, (count,), generator=generator),
        )

    def fresh_model(self) -> nn.Module:
        """Equal weights for every contender."""
        return build_model(
            ModelConfig(name="logistic"), input_shape=tuple(self.x.shape[1:]), num_classes=NUM_CLASSES, generator_seed=0
        )

    def steps(self) -> PrivateSteps:
        """What all contenders share."""
        return PrivateSteps(
            num_steps=0,
            sampling_rate=1 / BATCHES_PER_EPOCH,
            expected_batch_size=self.batch_size,
            clip_norm=CLIP_NORM,
            noise_multiplier=NOISE_MULTIPLIER,
            learning_rate=LEARNING_RATE,
        )


def dp_sgd_step(case: Case) -> Step:
    """What ratios are taken to."""
    training = PrivateTraining(
        case.fresh_model(), case.x, case.y, CrossEntropy(), case.steps(), randomness=OsRandomness()
    )
    return training.step


def dp_fermi_step(case: Case) -> Step:
    """Demographic parity; whole records are hidden."""
    game = MatrixGame([[0.5, 0.5]], num_classes=NUM_CLASSES, weight=1.0)
    training = fermi_training(
        case.fresh_model(),
        case.x,
        watched_targets(case.y, case.groups, num_classes=NUM_CLASSES, num_cells=NUM_GROUPS),
        game,
        FermiSteps(
            steps=case.steps(),
            matrix_noise_multiplier=NOISE_MULTIPLIER,
            event=AttributeGaussians(count=0, attribute_noise_multiplier=1.0),
        ),
        DpFermiConfig(matrix_learning_rate=LEARNING_RATE),
        randomness=OsRandomness(),
    )
    return training.step


def raco_dp_step(constraint: str) -> Callable[[Case], Step]:
    """One of the named constraints, with its multipliers."""

    def make(case: Case) -> Step:
        config = RacoDpConfig.model_validate({"constraint": constraint})
        constraints = raco_dp.constraints_of(config, num_classes=NUM_CLASSES, num_groups=NUM_GROUPS)
        planned = HistogramSteps(
            gradient=case.steps(), laplace_scale=3.0, size_floor=config.min_share * case.batch_size
        )
        training = priced_training(
            case.fresh_model(),
            case.x,
            case.y,
            torch.from_numpy(constraints.partition.cells(case.y.numpy(), case.groups.numpy())),
            planned,
            config,
            num_cells=constraints.partition.num_cells,
            num_classes=NUM_CLASSES,
            pricing=raco_dp.Lagrangian(constraints, config, planned),
            randomness=OsRandomness(),
            histogram_randomness=OsRandomness(),
        )
        return training.step

    return make


CONTENDERS: dict[str, Callable[[Case], Step]] = {
    "DP-SGD": dp_sgd_step,
    "DP-FERMI": dp_fermi_step,
    "RaCO-DP, parity": raco_dp_step("demographic_parity"),
    "RaCO-DP, odds": raco_dp_step("equalized_odds"),
    "RaCO-DP, FNR": raco_dp_step("false_negative_rate"),
}


def main() -> None:
    """Print one row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    others = [name for name in CONTENDERS if name != "DP-SGD"]
    print(" | ".join(["data", "batch", "DP-SGD ms", *(f"{name} / DP-SGD" for name in others)]))
    for data, batch_size in CASES:
        case = Case.of(data, batch_size)
        rounds = seconds_by_round({name: make(case) for name, make in CONTENDERS.items()}, options.repeats)
        ratios = [median(each[name] / each["DP-SGD"] for each in rounds) for name in others]
        milliseconds = 1e3 * median(each["DP-SGD"] for each in rounds)
        print(
            " | ".join([data, str(batch_size), f"{milliseconds:.3f}", *(f"{ratio:.2f}x" for ratio in ratios)]),
            flush=True,
        )


if __name__ == "__main__":
    main()
