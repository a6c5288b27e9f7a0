"""Runs a sweep's cells as Ray tasks that share votes and releases, and reports the frontier.

What every task of a sweep needs: an end to its time, and its release counted where the driver runs.

Teachers and votes of a sweep: trained once per data, seed and settings, and shared by every cell that asks them.

This comes before the cells, with the whole cluster for one ensemble at a time: a cell holds its CPUs while it waits,
and could wait for ever for those of teachers. Votes are private, and so are the checkpoints.

Releases of a sweep: one for all cells that differ in what comes afterwards only, drawn before them and charged once.

A release has a run directory of its own in the sweep's folder, without a model. Which fields it follows from, a method
says (:class:`fairpate.methods.base.ReleasingMethod`); cells with other values of them have other releases.
Where a release is gone, the next sweep draws another one, which is counted besides.

What a person sees of a sweep: a live table on a terminal, a line per finished cell in a job's log.

The sweep itself: what is missing runs as Ray tasks, and every result is on disk before the next is waited for.

:func:`run_cell` computes one cell and needs no Ray. The driver alone writes parts, so cells may run on any node that
reads the same data files; models stay in the run directories of the node that trained them.

A sweep from end to end, and what it ends in: the frontier's pages and figures, a short table on the terminal.

What a sweep ended in, as `fairpate compare` puts it out: in words, and as numbers for a program.

A comparison's charts as vector pictures for a paper, from its table of results; nothing is run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fairpate.config import DataConfig, RayConfig, SweepConfig, TasksConfig
from fairpate.config_reader import determining_values, values_digest
from fairpate.data import Dataset, load_data
from fairpate.fairness.rates import DEFAULT, NOTIONS
from fairpate.files import write_atomically
from fairpate.later import torch
from fairpate.methods.base import Method, ReleasingMethod
from fairpate.methods.label_queries import choose_queries, collect_vote_batch
from fairpate.methods.pate import PateFamily
from fairpate.report.figures import FigureStyle, frontier_figures
from fairpate.report.frontier import FAILED, Row, notion_value
from fairpate.report.frontier_page import FrontierReport, frontier_report
from fairpate.report.metrics import GroupsTold
from fairpate.report.page import counted, epsilon_text, in_two_lines
from fairpate.run.context import RunDirectory, checkpoint_folder, read_json, read_votes, write_text, write_votes
from fairpate.run.folder import create_run_directory
from fairpate.run.release_log import LimitReachedError, Odometer, OdometerError, Release, read_receipt
from fairpate.run.run import make_release, run_method, with_pinned_weights
from fairpate.run.sweep import Cell, SweepFolder, cells_of, open_sweep_folder, parse_sweep, read_rows, sole_driver
from fairpate.terminal import Output, Pace, Reporter, is_live
from fairpate.types import NotionName, RunRecord, UsageError, UserError, VoteBatch, strict
from teachers.ensemble import BlockPool, PoolError
from teachers.ray_pool import open_pool, room_for, start_ray


class CellTimeoutError(RuntimeError):
    """A cell that took longer than it may."""


def in_time(tasks: TasksConfig, work: Callable[..., Any], *arguments: Any) -> Any:
    """``work`` in a worker's main thread, which the operating system interrupts when time is up."""

    def interrupt(*_: object) -> None:
        raise CellTimeoutError(f"ran longer than tasks.max_minutes={tasks.max_minutes:g}; raise it, or train less.")

    signal.signal(signal.SIGALRM, interrupt)
    # 0 sets no timer.
    signal.setitimer(signal.ITIMER_REAL, 60 * (tasks.max_minutes or 0))
    try:
        return work(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def count_cell(release: Release) -> None:
    """Count what a cell released: a worker elsewhere has an odometer of its own, and its model is in a folder already.

    LimitReachedError where it passes a limit that the worker did not know; it is counted all the same.
    """
    odometer = Odometer()
    try:
        odometer.record(release)
    except LimitReachedError:
        odometer.record(release, enforce=False)
        raise


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Where that is which cells share, by its name, and why some of it is missing."""

    paths: dict[str, Path]
    faults: dict[str, str]


def ballot(cell: Cell) -> str | None:
    """What names the teachers of a cell and the queries they vote on; None without teachers, or with its own kind."""
    config = _sharing(cell.config)
    if config is None:
        return None
    values = determining_values(config)
    # Nothing of what follows the votes (mechanism, gate, budget, student): cells that differ there share them.
    asked = {
        **{name: values[name] for name in ("data", "seed", "teachers")},
        "num_queries": config.aggregator.num_queries,
        "all_are_candidates": config.aggregator.admission is not None,
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def _sharing(config: Method) -> PateFamily | None:
    """A configuration whose votes others may use: none that asks in a way, or questions, of its own."""
    if not isinstance(config, PateFamily):
        return None
    method = type(config)
    return config if (method.ask, method.queried) == (PateFamily.ask, PateFamily.queried) else None


def collect_shared_votes(cells: Sequence[Cell], folder: SweepFolder, reporter: Reporter, cluster: RayConfig) -> Shared:
    """Train what is missing and let it vote, one ballot after the other, on the Ray that is there.

    A fault of one ballot does not stop the next.
    """
    cell_of = {name: cell for cell in cells if (name := ballot(cell)) is not None}
    shared = Shared(paths={name: folder.votes / f"{name}.parquet" for name in cell_of}, faults={})
    missing = [name for name, path in shared.paths.items() if not path.exists()]
    if missing:
        with open_pool(cluster) as pool:
            for name in missing:
                cell = cell_of[name]
                reporter.note("teachers", f"for {cell.data}, seed {cell.config.seed}")
                try:
                    write_votes(_collect(cell, folder, reporter, pool), shared.paths[name])
                except (UserError, ValueError, OSError, RuntimeError) as error:
                    shared.faults[name] = f"{type(error).__name__}: {error}"
    return shared


def _collect(cell: Cell, folder: SweepFolder, reporter: Reporter, pool: BlockPool) -> VoteBatch:
    config = _sharing(cell.config)
    assert config is not None
    dataset = load_data(config.data)
    return collect_vote_batch(
        dataset,
        choose_queries(dataset, config.aggregator),
        config.teachers,
        seed=config.seed,
        ray=config.ray,
        checkpoint_dir=checkpoint_folder(config.storage, folder.teachers),
        reporter=reporter,
        pool=pool,
    )


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


_REFRESHES_PER_S = 2


@dataclass
class _Count:
    cells: int = 0
    found: int = 0
    done: int = 0
    failed: int = 0
    minutes: list[float] = field(default_factory=list)


class SweepTable:
    """Counts cells by data set and method; cells that were found finished are counted apart."""

    def __init__(self, cells: Sequence[Cell], found: set[str], console: Console) -> None:
        self.console = console
        self._started, self._pace = time.monotonic(), Pace()
        self._counts: dict[tuple[str, str], _Count] = {}
        for cell in cells:
            count = self._counts.setdefault((cell.data, cell.method), _Count())
            count.cells += 1
            count.found += cell.digest in found
        self._live: Live | None = None

    @property
    def done(self) -> int:
        """Finished cells, found ones and failed ones included."""
        return sum(count.found + count.done + count.failed for count in self._counts.values())

    @property
    def failed(self) -> int:
        """Cells that failed now."""
        return sum(count.failed for count in self._counts.values())

    @property
    def total(self) -> int:
        """All cells."""
        return sum(count.cells for count in self._counts.values())

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the table on a terminal while cells run; in a log say what there is to do."""
        self._pace.advance(self.done, self.total)
        if not is_live(self.console):
            self._line(f"{counted(self.total, 'cell')}, {self.done} of them finished before")
            yield
            return
        with Live(self._render(), console=self.console, refresh_per_second=_REFRESHES_PER_S) as self._live:
            yield
            self.refresh()
        self._live = None

    def add(self, cell: Cell, row: Row) -> None:
        """One more cell has ended."""
        count = self._counts[cell.data, cell.method]
        self._pace.advance(self.done + 1, self.total)
        if row.record is None:
            count.failed += 1
            outcome = f"failed: {row.error}"
        else:
            count.done += 1
            count.minutes.append(row.minutes)
            outcome = f"{60 * row.minutes:.1f} s"
        if self._live is None or row.record is None:
            name = f"{cell.method} on {cell.data}, seed {cell.config.seed}, {cell.digest}"
            self._line(", ".join(filter(None, (f"{self.done}/{self.total} {name}: {outcome}", self._pace.words()))))
        self.refresh()

    def refresh(self) -> None:
        """Show the clock and the counts of now."""
        if self._live is not None:
            self._live.update(self._render())

    def _line(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _render(self) -> Group:
        table = Table("data", "method", box=SIMPLE_HEAD)
        for name in ("cells", "found", "done", "failed", "left", "s per cell"):
            table.add_column(name, justify="right")
        for (data, method), count in self._counts.items():
            left = count.cells - count.found - count.done - count.failed
            mean = 60 * sum(count.minutes) / len(count.minutes) if count.minutes else math.nan
            words = [str(number) for number in (count.cells, count.found, count.done, count.failed, left)]
            table.add_row(data, method, *words, "" if math.isnan(mean) else f"{mean:.1f}")
        line = (f"{self.done} of {self.total} cells", self._clock(), self._pace.words())
        return Group(table, Text(", ".join(filter(None, line))))

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"{minutes}:{seconds:02d} min"


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
        from fairpate.run.publication import comparison_html  # reads comparisons, so not above

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
            # After an interrupt, cells that nobody waits for would keep the cluster busy. Those about to end get a
            # moment: Ray 2.60 aborts the driver if it cancels a task whose result is just arriving.
            _, running = ray.wait(list(pending), num_returns=len(pending), timeout=_WAIT_S) if pending else ([], [])
            for reference in running:
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
    return load_data(DataConfig.model_validate_json(config_json))


def compare_methods(
    sweep: SweepConfig | Mapping[str, Any],
    *,
    out: Path | None = None,
    data_dir: Path | None = None,
    folder: Path | None = None,
    title: str = "comparison",
    console: Console | None = None,
) -> Comparison:
    """Everything that `fairpate compare` does: check, run what is missing, write tables, pages and figures.

    ``folder`` is where files that the sweep names are looked for (None: here); ``out`` None takes the sweep's own, or
    ``runs/TITLE``. ConfigError lists every fault before anything runs.
    """
    folder = folder or Path()
    config = sweep if isinstance(sweep, SweepConfig) else parse_sweep(dict(sweep), folder=folder, data_dir=data_dir)
    cells = cells_of(config, folder=folder, data_dir=data_dir)
    root = out or config.out or Path("runs") / title
    comparison = compare(config, cells, root, console or Reporter().console)
    write_frontier_reports(comparison, title=title)
    return comparison


def write_frontier_reports(comparison: Comparison, *, title: str) -> None:
    """Write what may be published and the operator's page, unless both are newer than the tables."""
    folder = comparison.folder
    if not comparison.changed and _are_newer(folder) and _shows(folder.report, comparison.notion):
        return
    # Of all rows, though it shows no secret one: a page to publish counts what it leaves out.
    public = FrontierReport(
        title=title,
        rows=comparison.operators_rows,
        publish_unprotected=folder.publish_unprotected,
        notion=comparison.notion,
    )
    private = replace(public, for_operator=True)
    folder.figures.mkdir(exist_ok=True)
    for name, content in frontier_figures(public.points()).items():
        write_atomically(folder.figures / name, partial(Path.write_bytes, data=content))
    write_text(folder.private_report, frontier_report(private))
    write_text(folder.report, frontier_report(public))


def _are_newer(folder: SweepFolder) -> bool:
    pages, tables = (folder.report, folder.private_report), (folder.results, folder.private_results)
    if not all(page.exists() for page in pages):
        return False
    # Strictly: a page of the same instant may show the tables of before.
    return min(page.stat().st_mtime_ns for page in pages) > max(table.stat().st_mtime_ns for table in tables)


def _shows(page: Path, notion: NotionName) -> bool:
    """Whether a page opens with this notion."""
    return f'data-opens="{notion}"' in page.read_text(encoding="utf-8")


def summarise_comparison(comparison: Comparison) -> Group:
    """A table per data set with a line per method, then the causes of failures, then where the files are.

    Results without privacy that may not be published are counted.
    """
    by_data = comparison.rows_by_data.items()
    tables = [_methods_table(data, by_method, comparison.notion) for data, by_method in by_data]
    warnings = [_degenerate(row) for row in comparison.rows if row.record is not None and row.record.degenerate]
    warnings += [words for data, by_method in by_data for words in _groups(data, by_method)]
    failures = [_failure(row) for row in comparison.failed]
    folder = comparison.folder
    files = Table.grid(padding=(0, 2))
    if comparison.withheld:
        methods = ", ".join(dict.fromkeys(row.method for row in comparison.withheld))
        files.add_row("left out", f"{counted(len(comparison.withheld), 'result')} without privacy: {methods}")
    files.add_row("results", str(folder.results))
    files.add_row("report", str(folder.report))
    files.add_row("operator only", str(folder.private))
    return Group(*tables, *warnings, *failures, files)


def _failure(row: Row) -> Text:
    """The cause, and the command in one line, to copy."""
    return Text(f"failed: {row.command}\n    {row.error}", no_wrap=True, overflow="ignore")


def _degenerate(row: Row) -> Text:
    """What a cell's model does that leaves nothing to learn from its gaps."""
    assert row.record is not None
    name = f"{row.method} on {row.data}, seed {row.seed}, {row.digest}"
    return Text(f"degenerate: {name}: {'; '.join(row.record.degenerate)}", no_wrap=True, overflow="ignore")


def _groups(data: str, by_method: Mapping[str, Sequence[Row]]) -> Iterator[Text]:
    """Which groups a method's models serve worse than a constant, and which were not measured, in how many cells."""
    for method, rows in by_method.items():
        for words in GroupsTold.of([row.record for row in rows if row.record is not None]).words("cell"):
            yield Text(f"{method} on {data}: {words}", no_wrap=True, overflow="ignore")


def _methods_table(data: str, by_method: Mapping[str, Sequence[Row]], notion: NotionName) -> Table:
    """Ranges over the finished cells; fits 80 columns. The title has the accuracy of always the most common class."""
    found = [row.record for rows in by_method.values() for row in rows if row.record is not None]
    majority = _range([record.majority_accuracy for record in found if record.majority_accuracy is not None])
    title = f"accuracy of always the most common class: {majority}" if majority else None
    table = Table(data, box=SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("cells", "ε", "accuracy", in_two_lines(NOTIONS[notion].measure), "coverage"):
        table.add_column(name, justify="right", no_wrap=True)
    for method, rows in by_method.items():
        records = [row.record for row in rows if row.record is not None]
        table.add_row(
            method,
            str(len(rows)) if len(records) == len(rows) else f"{len(records)} of {len(rows)}",
            _range([record.epsilon for record in records], epsilon_text),
            _range([record.accuracy for record in records]),
            _range([notion_value(record, notion) for record in records]),
            _range([record.coverage for record in records]),
        )
    return table


def _range(
    values: Sequence[float | None], text: Callable[[float], str] = lambda value: f"{value:.3f}".removeprefix("0")
) -> str:
    """The least and the greatest, or the one; undefined values are left out."""
    there = [value for value in values if value is not None]
    if not there:
        return "undefined" if values else ""
    low, high = text(min(there)), text(max(there))
    return low if low == high else f"{low}–{high}"


def comparison_outcome(comparison: Comparison) -> Output:
    """Ranges over finished cells by data set and method, what is degenerate, failed or left out, and the files."""
    folder, failed = comparison.folder, comparison.failed
    facts = {
        "notion": comparison.notion,
        "data_sets": [_data_set(data, rows, comparison.notion) for data, rows in comparison.rows_by_data.items()],
        "degenerate": [_named(row) | {"words": words} for row in comparison.rows if (words := _degenerate_lines(row))],
        "failed": [_named(row) | {"command": row.command, "cause": row.error} for row in failed],
        "left_out": Counter(row.method for row in comparison.withheld),
        "files": {"results": folder.results, "report": folder.report, "operator_only": folder.private},
    }
    failure = f"{counted(len(failed), 'cell')} failed; the same command tries them again." if failed else None
    return Output(facts=facts, words=summarise_comparison(comparison), code=int(bool(failed)), failure=failure)


def _data_set(data: str, by_method: Mapping[str, Sequence[Row]], notion: NotionName) -> dict[str, Any]:
    found = [record for rows in by_method.values() for record in _records(rows)]
    return {
        "data": data,
        "majority_accuracy": _range_of_numbers(record.majority_accuracy for record in found),
        "methods": [_method(method, rows, notion) for method, rows in by_method.items()],
    }


def _method(method: str, rows: Sequence[Row], notion: NotionName) -> dict[str, Any]:
    records = _records(rows)
    told = GroupsTold.of(records)
    return {
        "method": method,
        "cells": len(rows),
        "finished": len(records),
        "epsilon": _range_of_numbers(record.epsilon for record in records),
        "accuracy": _range_of_numbers(record.accuracy for record in records),
        "disparity": _range_of_numbers(notion_value(record, notion) for record in records),
        "coverage": _range_of_numbers(record.coverage for record in records),
        "underserved_groups": dict(told.underserved),
        "unmeasured_groups": dict(told.unmeasured),
    }


def _records(rows: Sequence[Row]) -> list[RunRecord]:
    return [row.record for row in rows if row.record is not None]


def _range_of_numbers(values: Iterable[float | None]) -> list[float] | None:
    """The least and the greatest; None where none is defined."""
    there = [value for value in values if value is not None]
    return [min(there), max(there)] if there else None


def _degenerate_lines(row: Row) -> tuple[str, ...]:
    return () if row.record is None else row.record.degenerate


def _named(row: Row) -> dict[str, Any]:
    return {"method": row.method, "data": row.data, "seed": row.seed, "digest": row.digest}


def write_figures(
    results: Path, *, style: FigureStyle, notion: NotionName = DEFAULT, out: Path | None = None
) -> tuple[Path, ...]:
    """Draw slices and attainment of every data set and privacy class that ``results`` has.

    ``results`` is a results.parquet, or the folder of a sweep. What depends on private votes is in no picture, and of
    an operator's table neither is what has no privacy guarantee. ``out`` None: ``paper`` beside the table. UsageError
    where nothing can be drawn.
    """
    table = results / "results.parquet" if results.is_dir() else results
    rows = read_rows(table)
    publish_unprotected = not (table.resolve().parent.name == "private" or any(map(_is_operators, rows)))
    points = FrontierReport(title="", rows=rows, publish_unprotected=publish_unprotected, notion=notion).points()
    if not points:
        raise UsageError(f"{table}: no finished run that may be published; run `fairpate compare` to its end.")
    folder = out or table.parent / "paper"
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {folder / name: content for name, content in frontier_figures(points, style).items()}
    for path, content in pictures.items():
        write_atomically(path, partial(Path.write_bytes, data=content))
    return tuple(pictures)


def _is_operators(row: Row) -> bool:
    """Whether the row tells what no published table does, wherever a copy of the operator's lies."""
    return row.is_private or not math.isnan(row.minutes) or row.error not in ("", FAILED)
