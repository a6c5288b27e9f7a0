"""Teacher training and voting: the pool's time as a ratio to one Ray task per teacher and to a plain loop.

    python benchmarks/speed/teacher_training.py [--repeats 3] [--teachers 200] [--cnn-teachers 24]

Synthetic data from a seed. All contenders run in one Ray session with workers already started, on the same shards, and
hand the weights of every teacher to this process (ours also writes its checkpoints). The best of ``--repeats`` turns
counts; contenders take turns, so that a busy machine disturbs them alike. Starting workers is reported apart.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fairpate.config import FitConfig, ModelConfig, RayConfig, ShardsConfig, TeachersTraining
from fairpate.data.dataset import Split
from fairpate.nn.models import build_model
from teachers.ensemble import predict_votes, rows_of_teachers, train_ensemble
from teachers.ray_pool import RayPool, start_ray
from teachers.teacher import Shard, TeacherSpec, train_teachers

NUM_FEATURES = 102
HALF_CPU = 0.5  # pool and tasks each take half of every core: both can use all cores, in turns


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    model: ModelConfig
    input_shape: tuple[int, ...]
    num_classes: int
    num_teachers: int
    records_per_teacher: int
    epochs: int

    @property
    def config(self) -> TeachersTraining:
        """The ensemble's configuration."""
        return TeachersTraining(num_teachers=self.num_teachers, model=self.model, fit=FitConfig(epochs=self.epochs))


def plain_training(x: np.ndarray, y: np.ndarray, case: Case, teacher: int) -> dict[str, np.ndarray]:
    """One teacher as research code trains it: torch.optim, shuffled batches, nothing else."""
    features, labels = torch.from_numpy(x.copy()), torch.from_numpy(y.copy())
    model = build_model(case.model, input_shape=case.input_shape, num_classes=case.num_classes, generator_seed=teacher)
    optimizer = torch.optim.Adam(model.parameters(), lr=case.config.fit.learning_rate)
    loss_function = nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(teacher)
    for _ in range(case.epochs):
        for rows in torch.split(torch.randperm(len(features), generator=generator), case.config.fit.batch_size):
            optimizer.zero_grad()
            loss_function(model(features[rows]), labels[rows]).backward()
            optimizer.step()
    return {name: value.numpy() for name, value in model.state_dict().items()}


@ray.remote(num_cpus=HALF_CPU)
def _task(x: np.ndarray, y: np.ndarray, rows: np.ndarray, case: Case, teacher: int) -> dict[str, np.ndarray]:
    torch.set_num_threads(1)
    return plain_training(x[rows], y[rows], case, teacher)


@ray.remote(num_cpus=HALF_CPU)
def _warm_task() -> None:
    parameter = torch.zeros(1, requires_grad=True)
    torch.optim.Adam([parameter])
    time.sleep(1)


def synthetic_split(case: Case) -> Split:
    """Random records of the case's shape whose classes can be learned."""
    generator = torch.Generator().manual_seed(0)
    count = case.num_teachers * case.records_per_teacher
    if len(case.input_shape) == 3:
        x = torch.randint(0, 256, (count, *case.input_shape), dtype=torch.uint8, generator=generator)
    else:
        x = torch.randn(count, *case.input_shape, generator=generator)
    y = x.flatten(1)[:, : case.num_classes].argmax(dim=1)
    return Split(x=x, y=y, z=torch.zeros_like(y), record_id=tuple(str(i) for i in range(count)))


def measure_training(case: Case, pool: RayPool, repeats: int) -> tuple[float, float, float]:
    """Seconds of one Ray task per teacher, of a plain loop in this process, and of the pool."""
    split = synthetic_split(case)
    x, y = split.x.numpy(), split.y.numpy()
    rows = rows_of_teachers(split, ShardsConfig(num_teachers=case.num_teachers), 0)

    def one_task_per_teacher() -> None:
        shared_x, shared_y = ray.put(x), ray.put(y)
        ray.get([_task.remote(shared_x, shared_y, rows[t], case, t) for t in range(case.num_teachers)], timeout=3600)

    def plain_loop() -> None:
        for t in range(case.num_teachers):
            plain_training(x[rows[t]], y[rows[t]], case, t)

    def ours() -> None:
        with tempfile.TemporaryDirectory() as directory:
            train_ensemble(
                split, case.config, num_classes=case.num_classes, seed=0, checkpoint_dir=Path(directory), pool=pool
            )

    best = _best_in_turns([one_task_per_teacher, plain_loop, ours], repeats)
    return best[0], best[1], best[2]


def measure_inference(num_teachers: int, repeats: int) -> tuple[float, float]:
    """Seconds that ``num_teachers`` logistic teachers take for 2,000 queries: one by one, and as one wide product."""
    spec = TeacherSpec(model=ModelConfig(name="logistic"), fit=FitConfig(epochs=1), num_classes=2, seed=0)
    generator = torch.Generator().manual_seed(0)
    shards = [
        Shard(x=torch.randn(20, NUM_FEATURES, generator=generator), y=torch.arange(20) % 2) for _ in range(num_teachers)
    ]
    weights = train_teachers(shards, spec)
    queries = torch.randn(2000, NUM_FEATURES, generator=generator)
    models = []
    for t in range(num_teachers):
        model = build_model(spec.model, input_shape=(NUM_FEATURES,), num_classes=2, generator_seed=0)
        model.load_state_dict({name: value[t] for name, value in weights.items()})
        models.append(model.eval())

    @torch.inference_mode()
    def one_by_one() -> None:
        torch.stack([model(queries).argmax(dim=1) for model in models])

    best = _best_in_turns([one_by_one, lambda: predict_votes(weights, spec, queries.numpy())], 10 * repeats)
    return best[0], best[1]


def _best_in_turns(contenders: list[Callable[[], Any]], repeats: int) -> list[float]:
    seconds: list[list[float]] = [[] for _ in contenders]
    for _ in range(repeats):
        for k, contender in enumerate(contenders):
            start = time.perf_counter()
            contender()
            seconds[k].append(time.perf_counter() - start)
    return [min(turns) for turns in seconds]


def _cases(num_teachers: int, num_cnn_teachers: int) -> list[Case]:
    shared: dict[str, Any] = {"input_shape": (NUM_FEATURES,), "num_classes": 2, "records_per_teacher": 150}
    return [
        Case(name="MLP", model=ModelConfig(name="mlp"), num_teachers=num_teachers, epochs=30, **shared),
        Case(name="logistic", model=ModelConfig(name="logistic"), num_teachers=num_teachers, epochs=30, **shared),
        Case(
            name="CNN",
            model=ModelConfig(name="lenet"),
            input_shape=(2, 28, 28),
            num_classes=10,
            num_teachers=num_cnn_teachers,
            records_per_teacher=197,
            epochs=5,
        ),
    ]


def main() -> None:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--teachers", type=int, default=200)
    parser.add_argument("--cnn-teachers", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="Training time in seconds, and ratios to the pool")
    for column in ("teachers", "of", "epochs", "Ray tasks", "plain loop", "pool", "tasks / pool", "loop / pool"):
        table.add_column(column, justify="right")
    with start_ray(RayConfig()):
        start = time.perf_counter()
        num_actors = len(os.sched_getaffinity(0))
        with RayPool(RayConfig(num_cpus=HALF_CPU, num_actors=num_actors)) as pool:
            list(pool.run(_nothing, None, range(2 * num_actors)))
            start_s = time.perf_counter() - start
            ray.get([_warm_task.remote() for _ in range(num_actors)], timeout=600)
            for case in _cases(options.teachers, options.cnn_teachers):
                tasks_s, loop_s, pool_s = measure_training(case, pool, options.repeats)
                seconds = (f"{value:.2f}" for value in (tasks_s, loop_s, pool_s))
                ratios = (f"{value / pool_s:.2f}" for value in (tasks_s, loop_s))
                table.add_row(str(case.num_teachers), case.name, str(case.epochs), *seconds, *ratios)
    console = Console()
    console.print(table)
    console.print(f"Starting {num_actors} actors: {start_s:.1f} s, once, not in the table.")
    apart_s, wide_s = measure_inference(options.teachers, options.repeats)
    console.print(
        f"Votes of {options.teachers} logistic teachers on 2,000 queries: one by one {apart_s * 1e3:.1f} ms, "
        f"one wide product {wide_s * 1e3:.1f} ms, ratio {apart_s / wide_s:.1f}."
    )


def _nothing(*_: Any) -> None:
    """An item that starts an actor."""


if __name__ == "__main__":
    main()
