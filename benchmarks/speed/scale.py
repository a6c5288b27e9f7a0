"""How a run grows: tiny teachers by the thousand, queries by the million, on Ray on one machine.

    python benchmarks/speed/scale.py [--teachers 100 300 1000 3000 5000] [--queries 1000 10000 100000 1000000]

Teachers are logistic regressions on 8 records of 16 features, so that the engine is measured and not the arithmetic:
sharding, sending shards, storing and reading checkpoints, counting votes. The number of teachers grows at the fewest
queries and the number of queries at the fewest teachers; both middle ones and both largest come together, and the last
of these is what the fit has not seen. Per stage: seconds, those that driver and workers spent on a processor, the rise
of the driver's memory, and bytes put into Ray's object store (small arguments travel with their task and are not
counted). Fits by least squares of logarithms, ``c n^k``; and ``a + b n``, whose knee a / b is where work outgrows what
is paid once. Checkpoints go to a storage that workers write to themselves, as on a cluster.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from rich.console import Console
from rich.table import Table
from scipy.optimize import nnls

from fairpate.config import FitConfig, ModelConfig, RayConfig, TeachersTraining
from fairpate.data.dataset import Split
from fairpate.files import open_storage
from teachers.ensemble import Ensemble, collect_votes, rows_of_teachers, train_ensemble
from teachers.ray_pool import RayPool, start_ray

NUM_FEATURES, NUM_CLASSES, RECORDS_PER_TEACHER = 16, 2, 8
QUANTITIES = {"seconds": 1.0, "CPU seconds": 1.0, "driver MiB": 2.0**-20, "object store MiB": 2.0**-20}
FEWEST_POINTS = 3
_NEGLIGIBLE = 100  # what grows by less than this share of what is paid once does not grow


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one stage took with so many teachers and queries: by the names of :data:`QUANTITIES`, in its units."""

    stage: str
    num_teachers: int
    num_queries: int
    values: dict[str, float]


class Measurements:
    """All that was taken, and the stopwatch that takes it."""

    def __init__(self) -> None:
        self.rows: list[Taken] = []

    @contextmanager
    def stage(self, name: str, *, num_teachers: int, num_queries: int = 0) -> Iterator[None]:
        """Measure the block."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before, stored = status_bytes("VmRSS"), _bytes_ever_stored()
        by_workers, by_driver, started = _workers_cpu_seconds(), time.process_time(), time.perf_counter()
        yield
        seconds, by_driver = time.perf_counter() - started, time.process_time() - by_driver
        by_workers = _workers_cpu_seconds() - by_workers
        amounts = (
            seconds,
            by_driver + by_workers,
            max(0.0, status_bytes("VmHWM") - before),
            _bytes_ever_stored() - stored,
        )
        values = {name: amount * unit for (name, unit), amount in zip(QUANTITIES.items(), amounts, strict=True)}
        self.rows.append(Taken(stage=name, num_teachers=num_teachers, num_queries=num_queries, values=values))

    def best(self) -> list[Taken]:
        """One row per cell, in order: the least seconds, which other load disturbed least, and the most of the rest."""
        cells: dict[tuple[str, int, int], list[dict[str, float]]] = {}
        for row in self.rows:
            cells.setdefault((row.stage, row.num_teachers, row.num_queries), []).append(row.values)
        return [
            Taken(
                stage=stage,
                num_teachers=num_teachers,
                num_queries=num_queries,
                values={q: (min if "seconds" in q else max)(each[q] for each in turns) for q in QUANTITIES},
            )
            for (stage, num_teachers, num_queries), turns in cells.items()
        ]

    def series(self, stage: str, quantity: str, grows: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The sizes and the values of one quantity where only ``grows`` does."""
        fixed = "num_queries" if grows == "num_teachers" else "num_teachers"
        rows = [row for row in self.best() if row.stage == stage]
        least = min(getattr(row, fixed) for row in rows)
        points = {getattr(row, grows): row.values[quantity] for row in rows if getattr(row, fixed) == least}
        return np.array(list(points), dtype=np.float64), np.array(list(points.values()))


def status_bytes(name: str) -> float:
    """A size that the kernel reports for this process, such as ``VmHWM``; 0 where it reports none."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024.0 * int(found[1]) if found else 0.0


def _workers_cpu_seconds() -> float:
    """Of the workers, which are children of this process's raylet; other load on the machine does not count."""
    statistics: dict[int, tuple[str, list[str]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            name, _, numbers = path.read_text().partition("(")[2].rpartition(") ")
            statistics[int(path.parent.name)] = (name, numbers.split())
    parents = {process: int(values[1]) for process, (_, values) in statistics.items()}
    ticks = 0
    for process, (name, values) in statistics.items():
        if name.startswith("ray::") and parents.get(parents[process]) == os.getpid():
            ticks += int(values[11]) + int(values[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _bytes_ever_stored() -> float:
    """Bytes of all objects ever made in this node's store."""
    state = get_state_from_address(ray.get_runtime_context().gcs_address)  # type: ignore[no-untyped-call]
    reply = get_memory_info_reply(state)  # type: ignore[no-untyped-call]
    return float(reply.store_stats.cumulative_created_bytes)


def private_records(num_teachers: int) -> Split:
    """Records that a line divides, with noise."""
    generator = torch.Generator().manual_seed(0)
    num_records = RECORDS_PER_TEACHER * num_teachers
    x = torch.randn(num_records, NUM_FEATURES, generator=generator)
    y = (x[:, 0] + torch.randn(num_records, generator=generator) > 0).long()
    return Split(x=x, y=y, z=torch.zeros_like(y), record_id=tuple(f"r{i}" for i in range(num_records)))


def queries(num_queries: int) -> torch.Tensor:
    """Features of public records."""
    return torch.randn(num_queries, NUM_FEATURES, generator=torch.Generator().manual_seed(1))


def train(num_teachers: int, folder: Path, pool: RayPool, taken: Measurements) -> Ensemble:
    """The stages that know no query, into an empty ``folder``."""
    private, storage = private_records(num_teachers), open_storage(str(folder))
    config = TeachersTraining(
        num_teachers=num_teachers, model=ModelConfig(name="logistic"), fit=FitConfig(epochs=1, batch_size=8)
    )
    with taken.stage("shard", num_teachers=num_teachers):
        rows_of_teachers(private, config, 0)
    for name in ("train", "find again"):
        with taken.stage(name, num_teachers=num_teachers):
            ensemble = train_ensemble(
                private, config, num_classes=NUM_CLASSES, seed=0, checkpoint_dir=storage, pool=pool
            )
    return ensemble


def vote(ensemble: Ensemble, num_queries: int, pool: RayPool, taken: Measurements) -> None:
    """The stage that knows both."""
    x, num_teachers = queries(num_queries), ensemble.num_teachers
    with taken.stage("vote", num_teachers=num_teachers, num_queries=num_queries):
        votes_QC = collect_votes(ensemble, x, pool=pool)
    assert votes_QC.sum() == num_teachers * num_queries


def run(teacher_counts: Sequence[int], query_counts: Sequence[int], pool: RayPool, *, repeats: int) -> Measurements:
    """All cells in turn, ``repeats`` times; a first small one starts the workers and is forgotten."""
    taken = Measurements()
    for turn in range(repeats + 1):
        if turn == 1:
            taken = Measurements()
        with tempfile.TemporaryDirectory() as folder:
            _run_once(teacher_counts[:1] if not turn else teacher_counts, query_counts, pool, taken, Path(folder))
    return taken


def _run_once(
    teacher_counts: Sequence[int], query_counts: Sequence[int], pool: RayPool, taken: Measurements, folder: Path
) -> None:
    ensembles = {}
    for num_teachers in teacher_counts:
        ensembles[num_teachers] = train(num_teachers, folder / str(num_teachers), pool, taken)
        vote(ensembles[num_teachers], query_counts[0], pool, taken)
    for num_queries in query_counts[1:]:
        vote(ensembles[teacher_counts[0]], num_queries, pool, taken)
    if len(teacher_counts) > 1:
        for choose in (_middle, max):
            vote(ensembles[choose(teacher_counts)], choose(query_counts), pool, taken)


def _middle(counts: Sequence[int]) -> int:
    return counts[len(counts) // 2]


def power_law(sizes: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """(c, k, largest factor between fit and value) of ``c n^k`` by least squares of logarithms."""
    exponent, log_scale = np.polyfit(np.log(sizes), np.log(values), 1)
    residuals = np.abs(np.log(values) - log_scale - exponent * np.log(sizes))
    return float(np.exp(log_scale)), float(exponent), float(np.exp(residuals.max()))


def once_and_each(sizes: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """(a, b) >= 0 of ``a + b n``, by least squares of relative errors."""
    relative = np.stack([1 / values, sizes / values], axis=1)
    once, each = nnls(relative, np.ones(len(values)))[0]
    return float(once), float(each)


def table_of(taken: Measurements) -> Table:
    """What was measured."""
    table = Table("stage", "teachers", "queries", *QUANTITIES, title="Measured")
    for row in taken.best():
        shown = (f"{row.values[name]:.3g}" for name in QUANTITIES)
        table.add_row(row.stage, f"{row.num_teachers:,}", f"{row.num_queries:,}", *shown)
    return table


def fits_of(taken: Measurements) -> Table:
    """Power laws, and where work outgrows what is paid once."""
    table = Table("stage", "quantity", "grows with", "power law", "within", "once + each", "knee", title="Fitted")
    for stage, grows in [
        *((s, "num_teachers") for s in ("shard", "train", "find again", "vote")),
        ("vote", "num_queries"),
    ]:
        for quantity in QUANTITIES:
            sizes, values = taken.series(stage, quantity, grows)
            seen = values > 0
            if seen.sum() < FEWEST_POINTS:
                continue
            scale, exponent, within = power_law(sizes[seen], values[seen])
            once, each = once_and_each(sizes[seen], values[seen])
            knee = f"{once / each:,.0f}" if each * sizes.max() > once / _NEGLIGIBLE else "none"
            law = f"{scale:.2g} n^{exponent:.2f}"
            word = grows.removeprefix("num_")
            table.add_row(stage, quantity, word, law, f"x {within:.2f}", f"{once:.2g} + {each:.2g} n", knee)
    return table


def foretold(taken: Measurements) -> str:
    """CPU seconds of the largest cell, which the fit has not seen: ``a + b T + c Q + d T Q`` fitted to all others."""
    *seen, largest = [row for row in taken.best() if row.stage == "vote"]
    seconds = np.array([row.values["CPU seconds"] for row in seen])
    factors, _ = nnls(np.stack([_terms(row) for row in seen]) / seconds[:, None], np.ones(len(seen)))
    once, per_teacher, per_query, per_vote = factors
    return (
        f"CPU seconds of a vote: {once:.2g} + {per_teacher:.2g} T + {per_query:.2g} Q + {per_vote:.2g} T Q. "
        f"{largest.num_teachers:,} teachers x {largest.num_queries:,} queries: "
        f"measured {largest.values['CPU seconds']:.1f}, foretold {_terms(largest) @ factors:.1f}."
    )


def _terms(row: Taken) -> npt.NDArray[np.float64]:
    teachers, queries = row.num_teachers, row.num_queries
    return np.array([1.0, teachers, queries, teachers * queries])


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teachers", type=int, nargs="+", default=[100, 300, 1000, 3000, 5000])
    parser.add_argument("--queries", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--actors", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = RayConfig(num_actors=options.actors)
    with start_ray(config), RayPool(config) as pool:
        taken = run(sorted(options.teachers), sorted(options.queries), pool, repeats=options.repeats)
    console = Console(width=120)
    console.print(table_of(taken))
    console.print(fits_of(taken))
    console.print(foretold(taken))


if __name__ == "__main__":
    main()
