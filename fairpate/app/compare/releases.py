"""Releases of a sweep: one for all cells that differ in what comes afterwards only, drawn before them and charged once.

A release has a run directory of its own in the sweep's folder, without a model. Which fields it follows from, a method
says (:class:`fairpate.methods.releasing.ReleasingMethod`); cells with other values of them have other releases. Where a
release is gone, the next sweep draws another one, which is counted besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fairpate.app.compare.cells import Cell
from fairpate.app.compare.folder import SweepFolder
from fairpate.app.compare.tasks import count_cell, in_time
from fairpate.app.compare.votes import Shared
from fairpate.app.identity import values_digest
from fairpate.app.run import make_release
from fairpate.app.spending.odometer import LimitReachedError
from fairpate.app.spending.receipt import OdometerError, Release, read_receipt
from fairpate.app.terminal.progress import Reporter
from fairpate.compare_config import TasksConfig
from fairpate.files import write_atomically
from fairpate.methods.releasing import ReleasingMethod


def release_name(cell: Cell) -> str | None:
    """What names the release that a cell goes on from; None where what it releases is its own."""
    config = cell.config
    return values_digest(config.release_settings) if isinstance(config, ReleasingMethod) else None


def collect_shared_releases(
    cells: Sequence[Cell], folder: SweepFolder, reporter: Reporter, tasks: TasksConfig
) -> Shared:
    """Draw what is missing, each release as a task; each is counted once, and the next sweep finds it.

    A fault of one release does not stop the others.
    """
    import ray

    cell_of = {name: cell for cell in cells if (name := release_name(cell)) is not None}
    shared = Shared(paths={name: folder.release(name).released for name in cell_of}, faults={})
    # Never tried again by Ray: a worker that died may have drawn a release, and the next one is another.
    remote: Any = ray.remote(num_cpus=tasks.num_cpus, num_gpus=tasks.num_gpus, max_retries=0)(in_time)
    drawn = {
        name: remote.remote(tasks, draw, cell.config, folder.release(name).root)
        for name, cell in cell_of.items()
        if not shared.paths[name].exists()
    }
    for name, reference in drawn.items():
        cell, path = cell_of[name], shared.paths[name]
        reporter.note("release", f"for {cell.method} on {cell.data}, seed {cell.config.seed}")
        try:
            content, release = ray.get(reference)
            # Before the file is there that cells go on from: a crash in between counts it again, under the same id.
            count_cell(release)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, partial(Path.write_bytes, data=content))
        except (ray.exceptions.RayError, LimitReachedError, OdometerError, OSError) as error:
            cause = getattr(error, "cause", None) or error
            shared.faults[name] = f"{type(cause).__name__}: {cause}"
    return shared


def draw(config: ReleasingMethod, out: Path) -> tuple[bytes, Release]:
    """The release of ``config``, drawn in ``out`` or found there: its file, and what the odometer counts of it."""
    alone = config.release_alone.model_copy(update={"out": out})
    run = make_release(alone, Reporter(quiet=True))
    release = read_receipt(run)
    assert release is not None
    return run.released.read_bytes(), release
