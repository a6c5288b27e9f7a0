"""The sweep itself: what is missing runs as Ray tasks, and every result is on disk before the next is waited for.

:func:`run_cell` computes one cell and needs no Ray. The driver alone writes parts, so cells may run on any node that
reads the same data files; models stay in the run directories of the node that trained them.
"""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console

from fairpate.app.backbones import with_pinned_weights
from fairpate.app.compare.cells import Cell
from fairpate.app.compare.folder import SweepFolder, open_sweep_folder, sole_driver
from fairpate.app.compare.records_table import Row, read_rows
from fairpate.app.compare.releases import collect_shared_releases, release_name
from fairpate.app.compare.table import SweepTable
from fairpate.app.compare.tasks import count_cell, in_time
from fairpate.app.compare.votes import Shared, ballot, collect_shared_votes
from fairpate.app.identity import determining_values
from fairpate.app.run import run_method
from fairpate.app.rundir import RunDirectory, create_run_directory, read_json
from fairpate.app.spending.odometer import LimitReachedError
from fairpate.app.spending.receipt import OdometerError, Release, read_receipt
from fairpate.app.tables import read_votes, write_votes
from fairpate.app.terminal.progress import Reporter
from fairpate.compare_config import SweepConfig
from fairpate.config import DataConfig
from fairpate.data import Dataset, load_dataset
from fairpate.fairness.notions import DEFAULT, NotionName
from fairpate.files import write_atomically
from fairpate.later import torch
from fairpate.strict_json import strict
from fairpate.types import RunRecord, VoteBatch
from teachers.cluster import start_ray
from teachers.pool import PoolError
from teachers.ray_pool import room_for

_WAIT_S = 0.5
_SUBMITTED_AT_ONCE = 256
_ASSEMBLED_EVERY = 256

Handed = VoteBatch | bytes | None
"""What a cell shares with others: votes, or the file of a release."""
Compute = Callable[[Cell, Path, Handed, int], list[Row]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A sweep that ended: its folder, whether its tables changed, and the notion of fairness that its pages show first.

    Rows are read when asked for.
    """

    folder: SweepFolder
    changed: bool
    notion: NotionName = DEFAULT

    @cached_property
    def rows(self) -> list[Row]:
        """What may be published; a cell that failed has a row too, without its cause."""
        return read_rows(self.folder.results)

    @cached_property
    def operators_rows(self) -> list[Row]:
        """The same with run times and causes, prices that depend on votes, and results without privacy."""
        return read_rows(self.folder.private_results)

    @property
    def rows_by_data(self) -> dict[str, dict[str, list[Row]]]:
        """What may be published, by data set and method in their order."""
        found: dict[str, dict[str, list[Row]]] = {}
        for row in self.rows:
            found.setdefault(row.data, {}).setdefault(row.method, []).append(row)
        return found

    @property
    def withheld(self) -> list[Row]:
        """Results without privacy that only the operator may see."""
        unprotected = [row for row in self.operators_rows if row.is_unprotected and row.record is not None]
        return [] if self.folder.publish_unprotected else unprotected

    @property
    def failed(self) -> list[Row]:
        """The cells that have no result, with the cause: for the operator."""
        return [row for row in self.operators_rows if row.record is None]

    def _repr_html_(self) -> str:
        from fairpate.app.compare.notebook import comparison_html  # reads comparisons, so not above

        return comparison_html(self)


def compare(
    sweep: SweepConfig, cells: Sequence[Cell], root: Path, console: Console, *, compute: Compute | None = None
) -> Comparison:
    """Run the cells that have no result yet, and assemble the tables. Cells come from :func:`cells_of`.

    ``compute`` None trains and measures, as :func:`run_cell`. A cell that fails is kept with its cause and tried again
    by the next call. Whatever ends the sweep, finished cells stay, and the tables hold them. PoolError where no node
    can hold a cell and none comes in time.
    """
    folder = open_sweep_folder(root.resolve(), sweep)
    with sole_driver(folder, sweep):
        finished = folder.finished(cells)
        missing = [cell for cell in cells if cell.digest not in finished]
        if not missing and folder.holds(cells):
            return Comparison(folder=folder, changed=False, notion=sweep.notion)
        try:
            if missing:
                # One Ray serves teachers and cells, whose needs differ.
                num_gpus = max(sweep.ray.num_gpus, sweep.tasks.num_gpus)
                with start_ray(sweep.ray.model_copy(update={"num_gpus": num_gpus})):
                    _require_room(sweep)
                    votes = collect_shared_votes(missing, folder, Reporter(console), sweep.ray)
                    if any(release_name(cell) for cell in missing):
                        _await_room(sweep)
                    releases = collect_shared_releases(missing, folder, Reporter(console), sweep.tasks)
                    shared = Shared(paths=votes.paths | releases.paths, faults=votes.faults | releases.faults)
                    table = SweepTable(cells, finished, console)
                    run_cells(missing, cells, folder, shared, sweep, table, compute=compute or run_cell)
        finally:
            folder.assemble(cells)
    return Comparison(folder=folder, changed=True, notion=sweep.notion)


def run_cell(cell: Cell, out: Path, shared: Handed, torch_threads: int = 1) -> list[Row]:
    """Train and measure one cell in ``out``: its row, and the operator's where a price depends on votes."""
    torch.set_num_threads(torch_threads)
    started = time.monotonic()
    config = with_pinned_weights(cell.config.model_copy(update={"out": out}))
    if out.exists() and not RunDirectory(root=out).config.exists():
        shutil.rmtree(out)  # a worker died before it had written what the run is
    if shared is not None:
        _hand_over(shared, create_run_directory(config))
    run = run_method(config, Reporter(quiet=True), load=lambda data: _dataset(data.model_dump_json()))
    minutes = (time.monotonic() - started) / 60
    paths = [path for path in (run.record, run.private_record) if path.exists()]
    return [_row(cell, _read_record(path, cell), minutes) for path in dict.fromkeys(paths)]


def _hand_over(shared: VoteBatch | bytes, run: RunDirectory) -> None:
    """Let a run find what it shares, as if it had made it."""
    if isinstance(shared, bytes):
        if not run.released.exists():
            write_atomically(run.released, lambda temporary: temporary.write_bytes(shared))
    elif not run.votes.exists():
        write_votes(shared, run.votes)


def run_cells(
    missing: Sequence[Cell],
    cells: Sequence[Cell],
    folder: SweepFolder,
    shared: Shared,
    sweep: SweepConfig,
    table: SweepTable,
    *,
    compute: Compute = run_cell,
) -> None:
    """Run ``missing`` on the Ray that is there; each ends in the folder and in the table as soon as it is done.

    Now and then the results of all ``cells`` are assembled, so that a driver that is killed leaves few parts to read.
    Cells are submitted before there is room, so that an autoscaler sees what is wanted; PoolError as :func:`compare`.
    """
    import ray

    pending: dict[Any, Cell] = {}
    submit = _submitter(pending, folder, shared, sweep, table, compute)
    waiting, settled = iter(missing), itertools.count(1)
    started, has_room = time.monotonic(), False
    with table.shown():
        try:
            while True:
                _refill(waiting, submit, pending)
                if not pending:
                    return
                has_room = has_room or _require_room(sweep, waited_s=time.monotonic() - started)
                done, _ = ray.wait(list(pending), num_returns=1, timeout=_WAIT_S)
                for reference in done:
                    _settle(pending.pop(reference), reference, folder, table)
                    if next(settled) % _ASSEMBLED_EVERY == 0:
                        folder.assemble(cells)
                table.refresh()
        finally:
            # Also after an interrupt: cells that nobody waits for would keep the cluster busy.
            for reference in pending:
                ray.cancel(reference, force=True)


def _submitter(
    pending: dict[Any, Cell],
    folder: SweepFolder,
    shared: Shared,
    sweep: SweepConfig,
    table: SweepTable,
    compute: Compute,
) -> Callable[[Cell], None]:
    """What makes a Ray task of a cell and puts it among ``pending``."""
    import ray

    tasks = sweep.tasks
    reserve = ray.remote(num_cpus=tasks.num_cpus, num_gpus=tasks.num_gpus, max_retries=tasks.max_retries)
    remote: Any = reserve(in_time)

    @cache
    def put_once(name: str) -> Any:
        """As plain arguments the votes would travel with every cell."""
        path = shared.paths[name]
        return ray.put(read_votes(path) if path.suffix == ".parquet" else path.read_bytes())

    def submit(cell: Cell) -> None:
        name = ballot(cell) or release_name(cell)
        if name in shared.faults:
            _fail(cell, shared.faults[name], folder, table)
            return
        handed = None if name is None else put_once(name)
        pending[remote.remote(tasks, _compute, compute, cell, folder.run(cell), handed, tasks.torch_threads)] = cell

    return submit


def _compute(
    compute: Compute, cell: Cell, out: Path, shared: Handed, torch_threads: int
) -> tuple[list[Row], Release | None]:
    return compute(cell, out, shared, torch_threads), read_receipt(RunDirectory(root=out))


def _require_room(sweep: SweepConfig, *, waited_s: float = 0.0) -> bool:
    """Whether some node can hold a cell already. PoolError where none can and ``ray.wait_for_nodes_s`` has passed."""
    tasks, wait_s = sweep.tasks, sweep.ray.wait_for_nodes_s
    fitting, cluster = room_for(num_cpus=tasks.num_cpus, num_gpus=tasks.num_gpus)
    if not fitting and waited_s >= wait_s:
        raise PoolError(
            f"tasks: no node can hold a cell of tasks.num_cpus={tasks.num_cpus:g} and tasks.num_gpus="
            f"{tasks.num_gpus:g}: the cluster has {cluster}; lower them, add nodes, or set ray.wait_for_nodes_s, now "
            f"{wait_s:g}, if they come on demand."
        )
    return fitting > 0


def _await_room(sweep: SweepConfig) -> None:
    """Until some node can hold a cell; PoolError where none comes in time."""
    started = time.monotonic()
    while not _require_room(sweep, waited_s=time.monotonic() - started):
        time.sleep(_WAIT_S)


def _refill(waiting: Iterable[Cell], submit: Callable[[Cell], None], pending: dict[Any, Cell]) -> None:
    for cell in waiting:
        submit(cell)
        if len(pending) >= _SUBMITTED_AT_ONCE:
            return


def _settle(cell: Cell, reference: Any, folder: SweepFolder, table: SweepTable) -> None:
    import ray

    try:
        # It has ended: only its result is on the way.
        rows, release = ray.get(reference, timeout=60.0)
        # Before the cell counts as finished: a crash in between counts it again, under the same id.
        if release is not None:
            count_cell(release)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if error.cause is not None else error
        _fail(cell, f"{type(cause).__name__}: {cause}", folder, table)
    except ray.exceptions.RayError as error:
        _fail(cell, f"{type(error).__name__}: {error}", folder, table)
    except (LimitReachedError, OdometerError) as error:
        _fail(cell, f"{type(error).__name__}: {error}", folder, table)
    else:
        folder.add(cell, rows)
        table.add(cell, rows[0])


def _fail(cell: Cell, cause: str, folder: SweepFolder, table: SweepTable) -> None:
    row = failure(cell, cause)
    folder.add_failure(cell, row)
    table.add(cell, row)


def failure(cell: Cell, cause: str) -> Row:
    """The operator's row of a cell that failed."""
    return Row(
        digest=cell.digest,
        method=cell.method,
        data=cell.data,
        seed=cell.config.seed,
        config=strict(determining_values(cell.config)),
        command=cell.command,
        minutes=math.nan,
        error=" ".join(cause.split()),
        has_guarantee=cell.config.is_private,
    )


def _row(cell: Cell, record: RunRecord, minutes: float) -> Row:
    return Row(
        digest=cell.digest,
        method=record.method,
        data=record.data,
        seed=record.seed,
        config=record.config,
        command=cell.command,
        minutes=minutes,
        record=record,
        has_guarantee=cell.config.is_private,
    )


def _read_record(path: Path, cell: Cell) -> RunRecord:
    """The record of a run, under the name that the sweep gives its data set and without the places where it ran."""
    stored = read_json(path)
    values: dict[str, Any] = {n: tuple(each) if isinstance(each, list) else each for n, each in stored.items()}
    epsilon = math.inf if values["epsilon"] is None else values["epsilon"]
    return replace(
        RunRecord(**values),
        epsilon=epsilon,
        data=cell.data,
        config=strict(determining_values(cell.config)),
    )


@lru_cache(maxsize=1)
def _dataset(config_json: str) -> Dataset:
    """The data set, once for all cells in a row that read it."""
    return load_dataset(DataConfig.model_validate_json(config_json))
