"""Thousands of small teachers: what a run costs beside other methods, and the batched solve on a processor or a GPU.

    OMP_NUM_THREADS=1 python benchmarks/speed/small_teachers.py runs [--turns 3] [--data adult]
    OMP_NUM_THREADS=1 python benchmarks/speed/small_teachers.py solve [--device cuda] [--teachers 500 5000 50000]

``runs``: whole runs at a published epsilon of 1, each in a process of its own, in turns: FairPATE with its default
teachers, with 200 logistic teachers, and DP-SGD. Medians; memory is the peak of the
process. ``solve``: teachers of 12 made-up records in 60 features. Parity compares a GPU's votes with the processor's;
throughput is the share of what a product of large matrices of the same type reaches on the device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from fairpate.config import FitConfig, ModelConfig
from teachers.ensemble import predict_votes
from teachers.ridge import FeatureMap, solve_teachers
from teachers.teacher import Ridge, TeacherSpec

BEFORE = ("teachers.model=logistic", "teachers.num_teachers=200")
VOTING = ("--method", "fairpate", "--set=ray.num_actors=0")
RUNS = {
    "fairpate": VOTING,
    "fairpate, 200 logistic teachers": (*VOTING, *(f"--set={each}" for each in BEFORE)),
    "dp_sgd": ("--method", "dp_sgd"),
}
RECORDS, FEATURES, CLASSES, QUERIES, PENALTY = 12, 60, 2, 10_000, 20.0


def main() -> None:
    """Run one of the two benchmarks and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("runs", "solve"))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--data", default="adult")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--teachers", type=int, nargs="+", default=[500, 5000])
    options = parser.parse_args()
    torch.set_num_threads(1)
    Console().print(
        runs(options.data, options.turns)
        if options.what == "runs"
        else solves(torch.device(options.device), options.teachers, options.turns)
    )


def runs(data: str, turns: int) -> Table:
    """The table of whole runs."""
    measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in RUNS}
    for _ in range(turns):
        for name, words in RUNS.items():
            measured[name].append(one_run(data, words))
    table = Table("method", "seconds", "processor seconds", "over dp_sgd's", "peak memory, MB", title=data)
    medians = {name: [statistics.median(each) for each in zip(*found, strict=True)] for name, found in measured.items()}
    for name, (seconds, processor, memory) in medians.items():
        ratio = processor / medians["dp_sgd"][1]
        table.add_row(name, f"{seconds:.1f}", f"{processor:.1f}", f"{ratio:.2f}", f"{memory:.0f}")
    return table


def one_run(data: str, words: tuple[str, ...]) -> tuple[float, float, float]:
    """Seconds, processor seconds and peak memory in MB of one run in a new folder."""
    usual = ("--data", data, "--epsilon", "1", "--yes", "--set=noise=seeded")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fairpate", "run", *usual, *words, "--out", str(Path(folder, "run"))]
        start = time.perf_counter()
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
            command,
            env=os.environ | {"FAIRPATE_STATE": str(Path(folder, "state"))},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"failed: {' '.join(command)}")
        return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def solves(device: torch.device, counts: list[int], turns: int) -> Table:
    """The table of batched solves, with the votes of the teachers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(counts) * RECORDS, FEATURES, generator=generator)
    y = (x[:, 0] + torch.randn(len(x), generator=generator) > 0).long()
    queries = torch.randn(QUERIES, FEATURES, generator=generator)
    ridge = Ridge(features=FeatureMap.of(queries), penalty=PENALTY)
    spec = TeacherSpec(model=ModelConfig(name="logistic"), fit=FitConfig(), num_classes=CLASSES, seed=0, ridge=ridge)
    phi = ridge.features(x)
    most = products_per_second(device)
    title = f"{device}, {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'one thread'}"
    table = Table("teachers", "teachers a second", "of products", "seconds of votes", "equal votes", title=title)
    for count in counts:
        shards = [
            (phi[start : start + RECORDS], y[start : start + RECORDS]) for start in range(0, count * RECORDS, RECORDS)
        ]
        there = [(features.to(device), labels.to(device)) for features, labels in shards]

        def solved(own: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
            return solve_teachers(own, range(len(own)), num_classes=CLASSES, penalty=PENALTY)

        best_s, voting_s = float("inf"), float("inf")
        for _ in range(turns):
            start = time.perf_counter()
            weights = solved(there)
            middle = time.perf_counter()
            votes = predict_votes(weights, spec, queries.numpy(), device=str(device))
            best_s, voting_s = min(best_s, middle - start), min(voting_s, time.perf_counter() - middle)
        alike = predict_votes(solved(shards), spec, queries.numpy()) == votes
        # Moments and a Cholesky factor; solving for two classes is little beside them.
        width = FEATURES + 1
        operations = count * (2 * RECORDS * width**2 + width**3 / 3)
        share = operations / best_s / most
        table.add_row(f"{count:,}", f"{count / best_s:,.0f}", f"{share:.1%}", f"{voting_s:.2f}", f"{alike.mean():.4%}")
    return table


def products_per_second(device: torch.device, size: int = 2048) -> float:
    """Floating-point operations a second of a product of large ``float64`` matrices."""
    matrix = torch.randn(size, size, dtype=torch.float64, device=device)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        (matrix @ matrix).sum().item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


if __name__ == "__main__":
    main()
