"""The packing curve: teachers per device against teachers per second, beside what the device can multiply.

    python benchmarks/speed/packing.py [--device cuda] [--precision float32 ...] [--seconds 5] [--side 224] [--vote 500]

``block`` teachers are one program (a stack), or one after another (a loop); ``actors`` processes share the device, as
`ray.num_gpus: 1 / actors` lets them. Each trains one block to warm up and waits for the others; then all train blocks
for ``--seconds`` at least. Time covers all that a block takes: initial weights, copies to the device and back. Random
pixels; no Ray. FLOPs are those of the forward and backward pass by torch's own counter, times the records; the
yardstick is the best of several large square matrix products in the same precision. A CPU's is one thread's, and a row
is compared with that of its actors; time is then the processes' own, so that other load on the machine hardly counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Barrier
from typing import cast, get_args

import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from fairpate.config import FitConfig, ModelConfig
from fairpate.nn.models import build_model
from teachers.ensemble import predict_votes
from teachers.teacher import Engine, Shard, TeacherSpec, train_teachers

NUM_CLASSES = 2
MATMUL_SIDE = {"cpu": 1536, "cuda": 8192}
MATMUL_REPEATS = 8
# What fits the device: (model, engine, teachers per block, actors).
SWEEPS: dict[str, list[tuple[str, Engine, tuple[int, ...], tuple[int, ...]]]] = {
    "cpu": [
        ("cnn", "loop", (4,), (1, 2)),
        ("cnn", "stacked", (1, 4, 16), (1, 2)),
        ("resnet18", "loop", (1,), (1, 2)),
        ("resnet18", "stacked", (1, 4), (1,)),
    ],
    "cuda": [
        ("cnn", "loop", (10,), (1, 4, 12)),
        ("cnn", "stacked", (1, 10, 50, 200), (1, 4)),
        ("resnet18", "loop", (4,), (1, 4, 12)),
        ("resnet18", "stacked", (1, 4, 20), (1, 4)),
        ("resnet50", "loop", (2,), (1, 4, 12)),
    ],
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row of the table."""

    model: str
    engine: Engine
    block: int
    actors: int
    precision: str
    device: str
    records: int
    epochs: int
    batch_size: int
    input_shape: tuple[int, int, int]
    num_queries: int

    @property
    def spec(self) -> TeacherSpec:
        """The teachers' configuration."""
        fit = FitConfig(epochs=self.epochs, batch_size=self.batch_size, precision=self.precision)
        return TeacherSpec(
            model=self.architecture, fit=fit, num_classes=NUM_CLASSES, seed=0, max_shard_size=self.records
        )

    @property
    def architecture(self) -> ModelConfig:
        """The model."""
        return ModelConfig(name=self.model)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one process did."""

    teachers: int
    seconds: float
    peak_bytes: int


def flops_per_teacher(cell: Cell) -> float:
    """Floating-point operations of the products in all forward and backward passes of one teacher, or in its votes."""
    model = build_model(cell.architecture, input_shape=cell.input_shape, num_classes=NUM_CLASSES, generator_seed=0)
    with FlopCounterMode(display=False) as counter:
        logits = model(torch.zeros(1, *cell.input_shape))
        if not cell.num_queries:
            torch.autograd.backward(functional.cross_entropy(logits, torch.zeros(1, dtype=torch.int64)))
    return float(counter.get_total_flops() * (cell.num_queries or cell.records * cell.epochs))


def matmul_flops_per_second(device: str, precision: str) -> float:
    """The best of several square products; the first ones warm up."""
    side = MATMUL_SIDE[device]
    factor = torch.randn(side, side, device=device, dtype=getattr(torch, precision))
    times = []
    for _ in range(MATMUL_REPEATS):
        _settle(device)
        started = _clock_s(device)
        torch.mm(factor, factor)
        _settle(device)
        times.append(_clock_s(device) - started)
    return float(2 * side**3 / min(times))


def measure(cell: Cell, seconds: float) -> list[Measured]:
    """All actors of a cell, at the same time."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(cell.actors)
    with context.Pool(cell.actors, initializer=_share, initargs=(barrier,)) as pool:
        return pool.map(partial(_actor, cell, seconds), range(cell.actors), chunksize=1)


_barrier: Barrier


def _share(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier
    torch.set_num_threads(1)


def _actor(cell: Cell, seconds: float, actor: int) -> Measured:
    generator = torch.Generator().manual_seed(actor)
    shards = [_shard(cell, generator) for _ in range(cell.block)]
    train = partial(train_teachers, shards, cell.spec, engine=cell.engine, device=cell.device)
    weights, work = train(), cast("Callable[[], object]", train)
    if cell.num_queries:
        queries = torch.rand(cell.num_queries, *cell.input_shape, generator=generator).numpy()
        work = partial(predict_votes, weights, cell.spec, queries, device=cell.device)
        work()
    _barrier.wait(timeout=600)
    started, blocks = _clock_s(cell.device), 0
    while not blocks or _clock_s(cell.device) - started < seconds:
        work()
        blocks += 1
    elapsed = _clock_s(cell.device) - started
    on_device = torch.cuda.max_memory_reserved() if cell.device == "cuda" else 0
    peak = on_device or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Measured(teachers=blocks * cell.block, seconds=elapsed, peak_bytes=peak)


def _shard(cell: Cell, generator: torch.Generator) -> Shard:
    x = torch.randint(0, 256, (cell.records, *cell.input_shape), dtype=torch.uint8, generator=generator)
    return Shard(x=x, y=torch.randint(0, NUM_CLASSES, (cell.records,), generator=generator))


def _clock_s(device: str) -> float:
    return time.process_time() if device == "cpu" else time.perf_counter()


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def cells(options: argparse.Namespace) -> list[Cell]:
    """The rows, in order."""
    size = {
        "records": options.records,
        "epochs": options.epochs,
        "batch_size": options.batch_size,
        "input_shape": (3, options.side, options.side),
        "num_queries": options.vote,
    }
    return [
        Cell(model=model, engine=engine, block=block, actors=actors, precision=p, device=options.device, **size)
        for model, engine, blocks, counts in SWEEPS[options.device]
        for p in options.precision
        for block in blocks
        for actors in counts
        if options.models is None or model in options.models
    ]


def row_of(cell: Cell, measured: list[Measured], matmul: float) -> list[str]:
    """A row of the table. Teachers per second are the sum of what each actor did in its own time."""
    rate = sum(each.teachers / each.seconds for each in measured)
    flops = rate * flops_per_teacher(cell)
    possible = matmul * (cell.actors if cell.device == "cpu" else 1)
    peak = max(each.peak_bytes for each in measured) / 2**20
    shown = [cell.model, cell.engine, cell.precision, str(cell.block), str(cell.actors), str(cell.block * cell.actors)]
    return [*shown, f"{rate:.2f}", f"{flops / 1e9:,.0f}", f"{100 * flops / possible:.0f} %", f"{peak:,.0f}"]


def main() -> None:
    """Run the benchmark and print its table."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    small = default == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(SWEEPS), default=default)
    parser.add_argument("--precision", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--models", nargs="+", choices=get_args(ModelConfig.model_fields["name"].annotation))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--records", type=int, default=32 if small else 200, help="Records of a teacher.")
    parser.add_argument("--epochs", type=int, default=1 if small else 5)
    parser.add_argument("--batch-size", type=int, default=16 if small else 50)
    parser.add_argument("--side", type=int, default=64, help="Height and width of a picture.")
    parser.add_argument("--vote", type=int, default=0, metavar="QUERIES", help="Time votes instead of training.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if options.device == "cuda" else f"{os.cpu_count()} cores, 1 thread"
    yardsticks = {p: matmul_flops_per_second(options.device, p) for p in options.precision}
    for precision, flops in yardsticks.items():
        print(f"{options.device} ({name}), matrix products in {precision}: {flops / 1e9:,.0f} GFLOP/s")
    work = (
        f"votes on {options.vote} queries" if options.vote else f"{options.records} records x {options.epochs} epochs"
    )
    print(f"{work} of {options.side} pixels per teacher")
    print("model | engine | precision | block | actors | at once | teachers/s | GFLOP/s | of products | MiB per actor")
    for cell in cells(options):
        print(" | ".join(row_of(cell, measure(cell, options.seconds), yardsticks[cell.precision])), flush=True)


if __name__ == "__main__":
    main()
