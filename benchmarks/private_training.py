"""One step of DP-SGD as a ratio to one of plain SGD, and the same step with per-example gradients by ``vmap``.

    OMP_NUM_THREADS=1 python benchmarks/private_training.py [--repeats 10]

Synthetic batches from a seed; every step includes forward, backward, clipping, noise and the update. Contenders take
turns in one process with one thread, and the best turn of each counts, so that a busy machine disturbs them alike.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairpate.config import ModelConfig
from fairpate.nn.models import build_model, memory_format_for, to_memory_format
from fairpate.nn.per_example import Engine, GradientClipper
from fairpate.nn.private_fit import OsRandomness, add_noise

LEARNING_RATE, CLIP_NORM, NOISE_MULTIPLIER = 0.05, 1.0, 1.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    model: ModelConfig
    input_shape: tuple[int, ...]
    num_classes: int
    batch_size: int


_TABLE: dict[str, Any] = {"input_shape": (102,), "num_classes": 2, "batch_size": 512}
_IMAGES: dict[str, Any] = {"input_shape": (2, 28, 28), "num_classes": 10, "batch_size": 256}
CASES = (
    Case(name="logistic, 102 features", model=ModelConfig(name="logistic"), **_TABLE),
    Case(name="MLP, two hidden layers", model=ModelConfig(name="mlp", hidden=(128, 128)), **_TABLE),
    Case(name="ColorMNIST CNN", model=ModelConfig(name="lenet"), **_IMAGES),
)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy per record."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def plain_step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Forward, backward, update."""
    parameters: list[Tensor] = list(model.parameters())

    def step() -> None:
        gradients = torch.autograd.grad(loss(model(x), y).mean(), parameters)
        _update(parameters, list(gradients))

    return step


def private_step(model: nn.Module, x: Tensor, y: Tensor, engine: Engine) -> Callable[[], None]:
    """The same with clipping and noise."""
    clipper = GradientClipper(model, loss, clip_norm=CLIP_NORM, engine=engine)
    randomness = OsRandomness()

    def step() -> None:
        gradients = clipper.sum(x, y).gradients
        add_noise(gradients, NOISE_MULTIPLIER * CLIP_NORM, randomness)
        torch._foreach_div_(gradients, len(x))
        _update(clipper.parameters, gradients)

    return step


@torch.no_grad()
def _update(parameters: list[Tensor], gradients: list[Tensor]) -> None:
    torch._foreach_add_(parameters, gradients, alpha=-LEARNING_RATE)


def best_seconds(contenders: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Seconds of one call of each, the best of ``repeats`` turns of about a fifth of a second."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(repeats):
        for name, contender in contenders.items():
            start = time.perf_counter()
            count = 0
            while time.perf_counter() - start < 0.2:
                contender()
                count += 1
            best[name] = min(best[name], (time.perf_counter() - start) / count)
    return best


def main() -> None:
    """Print one row per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'model':<24} {'batch':>5} {'plain ms':>9} {'DP-SGD':>7} {'by vmap':>8}")
    for case in CASES:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(case.batch_size, *case.input_shape, generator=generator)
        x = x.contiguous(memory_format=memory_format_for(x))
        y = torch.randint(0, case.num_classes, (case.batch_size,), generator=generator)
        model = build_model(case.model, input_shape=case.input_shape, num_classes=case.num_classes, generator_seed=0)
        to_memory_format(model, memory_format_for(x))
        seconds = best_seconds(
            {
                "plain": plain_step(model, x, y),
                "private": private_step(model, x, y, "book_keeping"),
                "vmap": private_step(model, x, y, "functional"),
            },
            options.repeats,
        )
        ratios = f"{seconds['private'] / seconds['plain']:>6.2f}x {seconds['vmap'] / seconds['plain']:>7.1f}x"
        print(f"{case.name:<24} {case.batch_size:>5} {1e3 * seconds['plain']:>9.3f} {ratios}")


if __name__ == "__main__":
    main()
