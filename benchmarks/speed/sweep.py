"""What a sweep costs beside its cells: scheduling against a bare loop, and finding 10,000 finished cells.

    python benchmarks/speed/sweep.py overhead [--cells 8] [--seconds 10] [--slots 1]
    python benchmarks/speed/sweep.py resume [--cells 10000]

Both print ratios or times of one run. Cells of ``overhead`` sleep, so that a busy machine disturbs neither side; the
bare loop calls the same function. ``resume`` writes synthetic parts, then measures three repeated commands: without any
table, which no driver leaves behind; after a complete sweep; after a driver that was killed with 255 parts unread.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fairpate.config import RayConfig, SweepConfig, parse_config
from fairpate.report.frontier import Row
from fairpate.run.compare import Handed, compare
from fairpate.run.sweep import Cell, cells_of, open_sweep_folder
from fairpate.terminal import Reporter
from fairpate.types import RunRecord
from teachers.ray_pool import start_ray

QUIET = Reporter(quiet=True)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    overhead = commands.add_parser("overhead")
    overhead.add_argument("--cells", type=int, default=8)
    overhead.add_argument("--seconds", type=float, default=10.0)
    overhead.add_argument("--slots", type=int, default=1, help="cells at the same time")
    overhead.set_defaults(measure=lambda options: measure_overhead(options.cells, options.seconds, options.slots))
    resume = commands.add_parser("resume")
    resume.add_argument("--cells", type=int, default=10_000)
    resume.add_argument("--seeds", type=int, default=5)
    resume.set_defaults(measure=lambda options: measure_resume(options.cells, options.seeds))
    options = parser.parse_args()
    options.measure(options)


def measure_overhead(num_cells: int, seconds: float, slots: int) -> None:
    """The same cells in a bare loop and in a sweep: once workers are there, with their start, and with that of Ray."""
    num_cpus = (os.cpu_count() or 1) / slots
    sweep = _sweep(num_cells, num_seeds=1, settings={"dp_sgd.learning_rate": seconds}, num_cpus=num_cpus)
    cells = cells_of(sweep, folder=Path())
    started = time.perf_counter()
    for cell in cells:
        sleep(cell, Path(), None, 1)
    bare = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        with start_ray(RayConfig()):
            begun = time.perf_counter()
            compare(sweep, cells, Path(folder) / "sweep", QUIET, compute=sleep)
            ended = time.perf_counter()
            written = [path.stat().st_mtime for path in (Path(folder) / "sweep" / "private" / "parts").iterdir()]
    loop = bare / slots
    print(f"{num_cells} cells of {seconds:g} s, {slots} at the same time")
    print(f"bare loop        {bare:8.2f} s, divided by {slots}: {loop:.2f} s")
    steady, expected = max(written) - min(written), (num_cells - slots) * seconds / slots
    print(f"first to last    {steady:8.2f} s, {100 * (steady / expected - 1):.1f} % more than {expected:.2f} s")
    print(f"sweep            {ended - begun:8.2f} s, {100 * ((ended - begun) / loop - 1):.1f} % more")
    print(f"with Ray's start {ended - started:8.2f} s, {100 * ((ended - started) / loop - 1):.1f} % more")


def measure_resume(num_cells: int, num_seeds: int) -> None:
    """How long a repeated command takes from its configuration to its tables when all cells are finished."""
    sweep = _sweep(num_cells // num_seeds, num_seeds=num_seeds)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "sweep"
        cells = cells_of(sweep, folder=Path())
        opened = open_sweep_folder(root, sweep)
        for cell in cells:
            opened.add(cell, [record(cell)])
        print(f"{len(cells)} finished cells")
        print(f"no table at all  {_timed(lambda: _resume(sweep, root)):s}")
        print(f"nothing to do    {_timed(lambda: _resume(sweep, root)):s}")
        opened.assemble(cells[:-255])
        print(f"255 parts unread {_timed(lambda: _resume(sweep, root)):s}")


def _resume(sweep: SweepConfig, root: Path) -> None:
    compare(sweep, cells_of(sweep, folder=Path()), root, QUIET, compute=refuse)


def _timed(work: Callable[[], None]) -> str:
    started, spent = time.perf_counter(), time.process_time()
    work()
    return f"{time.perf_counter() - started:8.2f} s, of which {time.process_time() - spent:.2f} s of a CPU"


def _sweep(
    num_cells: int, *, num_seeds: int, settings: dict[str, float] | None = None, num_cpus: float = 1.0
) -> SweepConfig:
    values = {
        "data_sets": ["color_digits"],
        "methods": ["fair_dp_sgd"],
        "settings": settings or {},
        "seeds": list(range(num_seeds)),
        "grid": {"fair_dp_sgd.weight": [number / 1000 for number in range(num_cells)]},
        "tasks": {"num_cpus": num_cpus},
    }
    return parse_config(values, SweepConfig)


def sleep(cell: Cell, _out: Path, _shared: Handed, _torch_threads: int) -> list[Row]:
    """A cell that takes ``dp_sgd.learning_rate`` seconds."""
    time.sleep(cell.config.model_dump()["dp_sgd"]["learning_rate"])
    return [record(cell)]


def refuse(cell: Cell, _out: Path, _shared: Handed, _torch_threads: int) -> list[Row]:
    """A cell that must not run again."""
    raise AssertionError(f"Cell {cell.digest} was finished.")


def record(cell: Cell) -> Row:
    """A result that nobody computed."""
    result = RunRecord(
        method=cell.method,
        data=cell.data,
        seed=cell.config.seed,
        unit="record",
        relation="add or remove one",
        delta=1e-5,
        epsilon=1.0,
        epsilon_is_data_dependent=False,
        accuracy=0.5,
        coverage=1.0,
        disparity=0.1,
        config=cell.config.model_dump(mode="json"),
    )
    shared = {name: getattr(result, name) for name in ("method", "data", "seed", "config")}
    return Row(**shared, digest=cell.digest, command=cell.command, minutes=0.0, record=result)


if __name__ == "__main__":
    main()
