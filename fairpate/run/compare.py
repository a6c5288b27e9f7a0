"""Compare methods: run the cells of a sweep, which share votes and releases, then report the frontier.

A cell is one method with one setting, data set and seed. Cells that differ only in settings of the steps after the
teachers' vote (mechanism, rule for refusing queries, budget, student) share the votes. Cells that differ only in
settings of the steps after a release share the release: it is drawn once and charged once. Votes and releases are
stored under a digest of the settings that determine them, so that the next sweep finds them.

Cells are Ray tasks; with ``ray.num_actors`` 0 they run one after the other in this process. The driver, the process
that runs `fairpate compare`, alone writes results and charges releases to the odometer, so cells may run on any node
with the same data files; models stay in the run directories of the node that trained them.
"""

import math
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from fairpate.config import ConfigError, RayConfig, SweepConfig, TasksConfig, values_digest
from fairpate.data import load_data, load_once
from fairpate.data.registry import declared_units
from fairpate.fairness.rates import DEFAULT, NOTIONS
from fairpate.files import make_folder, write_atomically
from fairpate.lazy import torch
from fairpate.methods.base import ReleasingMethod, looks_of
from fairpate.pages import counted, decimal, delta_text, epsilon_text, in_two_lines, percent
from fairpate.releases.directory import RunDirectory, read_votes, sole_worker, write_json, write_text, write_votes
from fairpate.releases.log import MetricsFolder, read_receipt
from fairpate.releases.odometer import LimitReachedError, Odometer, OdometerError, RunCharge, spent, spent_since
from fairpate.report.decision import Choice
from fairpate.report.frontier import FAILED, Row, notion_value
from fairpate.report.frontier_page import FrontierReport, frontier_report
from fairpate.report.metrics import GroupsTold
from fairpate.report.paper_figures import FigureStyle, frontier_figures
from fairpate.report.records import RunStatement, ends_words
from fairpate.run import sweep as sweeps
from fairpate.run.cost_of_choice import state_choices
from fairpate.run.folder import create_run_directory, finished_run
from fairpate.run.forecast import announce_delta, draft_caution, question_above
from fairpate.run.publication import comparison_html, read_claims
from fairpate.run.run import check_data, open_run, run_method, with_pinned_weights
from fairpate.run.sweep import Cell, SweepFolder, read_rows, write_rows
from fairpate.terminal import Output, Reporter, facts, say
from fairpate.types import FairRule, NotionName, UsageError, UserError, VoteBatch, heard_by
from teachers.ray_pool import open_pool, room_for, start_ray
from teachers.vectors import vectors_on
from teachers.work import PoolError, count, tallied

# What a cell gets from other cells: teachers' votes, or the bytes of a release's file; None if it shares nothing.
Handed = VoteBatch | bytes | None
Compute = Callable[[Cell, Path, Handed, int], list[Row]]

# Between two looks at the cluster, and before cells that still run after an interrupt are cancelled.
_WAIT_S = 0.5
_SUBMITTED_AT_ONCE = 256
_ASSEMBLED_EVERY = 256


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The outcome of a comparison of methods: its ``folder``, and the rows of its results tables, which are read on
    first access.

    ``changed``: whether this call changed the tables. ``notion``: the notion of fairness that the pages show first.
    ``fair_at``: the rule by which the user calls a model fair.
    """

    folder: SweepFolder
    changed: bool
    notion: NotionName = DEFAULT
    fair_at: FairRule = field(default_factory=FairRule)
    cells: tuple[Cell, ...] = ()
    """All cells of the comparison, finished or not."""
    spent: tuple[str, ...] = ()
    """A sentence for each data set on the privacy cost of this call's releases and of all releases of it so far."""
    choices: Mapping[str, Choice] = field(default_factory=dict)
    """What it costs to choose one of the releases of a data set by results (:mod:`fairpate.run.cost_of_choice`)."""

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of the results table that may be published. The row of a failed cell does not state the cause."""
        return read_rows(self.folder.results)

    @cached_property
    def operators_rows(self) -> list[Row]:
        """All rows of the results table, not to be published: they include run times, causes of failures,
        data-dependent epsilons and results without privacy."""
        return read_rows(self.folder.private_results)

    @property
    def withheld(self) -> list[Row]:
        """The rows of methods without privacy that the public table leaves out; empty if the comparison publishes
        them."""
        unprotected = [row for row in self.operators_rows if row.is_unprotected and row.record is not None]
        return [] if self.folder.publish_unprotected else unprotected

    @property
    def failed(self) -> list[Row]:
        """The rows of cells (a method with its settings, a data set and a seed) that failed, with the cause; not to be
        published."""
        return [row for row in self.operators_rows if row.record is None]

    def _repr_html_(self) -> str:
        return comparison_html(self.folder, self.rows, self.notion)


def compare_methods(
    sweep: SweepConfig | Mapping[str, Any],
    *,
    out: Path | None = None,
    data_dir: Path | None = None,
    folder: Path | None = None,
    title: str = "comparison",
    reporter: Reporter | None = None,
) -> Comparison:
    """Compare methods as `fairpate compare` does: check the configuration ``sweep``, run those of its cells (a method
    with its settings, a data set and a seed) that have no result, and write tables, pages and figures.

    ``folder``: the folder to which paths in the sweep are relative (None: the working directory). ``out``: the folder
    for the results (None: the one that the sweep names, or ``runs/TITLE``). ConfigError lists every fault before
    anything runs.
    """
    folder = folder or Path()
    config = sweep if isinstance(sweep, SweepConfig) else sweeps.parse_sweep(dict(sweep))
    cells = sweeps.cells_of(config, folder=folder, data_dir=data_dir)
    root = out or config.out or Path("runs") / title
    comparison = compare(config, cells, root, reporter or Reporter())
    write_frontier_reports(comparison, title=title)
    return comparison


def compare(
    sweep: SweepConfig, cells: Sequence[Cell], root: Path, reporter: Reporter, *, compute: Compute | None = None
) -> Comparison:
    """Run those ``cells`` (a method with its settings, a data set and a seed) that have no result yet, and write the
    tables of all cells in the folder ``root``.

    ``cells`` come from :func:`cells_of`. ``compute`` trains and measures one cell (None: :func:`run_cell`). A cell that
    fails is recorded with its cause, and run again by the next call. The tables have the results of all finished cells
    even if the comparison is interrupted. PoolError if no node of the cluster is large enough for a cell, and none
    joins in time. ``reporter`` may ask the user to confirm the privacy cost (:meth:`Reporter.consent`).
    """
    rules = list(dict.fromkeys(cell.config.evaluation.rule for cell in cells)) or [FairRule()]
    if len(rules) > 1:
        raise ConfigError(
            "evaluation.fair_at: expected the same rule for every run, as the report page states one rule; set the "
            "field once, in the section `settings` of the comparison."
        )
    # A notion that the sweep names stands first, or else the one that the user's rule limits.
    notion = sweep.notion if "notion" in sweep.model_fields_set else rules[0].notion
    shown: dict[str, Any] = {"notion": notion, "fair_at": rules[0], "cells": tuple(cells)}
    # An absolute path, because workers have other working directories.
    folder = sweeps.open_sweep_folder(root.resolve(), sweep)
    with sole_worker(folder.root, "fairpate compare"):
        write_text(folder.config, yaml.safe_dump(sweep.model_dump(mode="json"), sort_keys=False))
        finished = {path.stem for path in folder.parts.glob("*.parquet")}
        missing = [cell for cell in cells if cell.digest not in finished]
        if not missing and folder.holds(cells):
            known = state_choices(cells, folder)  # a run may have been copied here since
            return Comparison(folder=folder, changed=False, choices=known, **shown)
        odometer = Odometer()
        data_sets = {cell.config.data.name: cell.config.target.delta for cell in missing if cell.config.is_private}
        before = {data: odometer.charges(data) for data in data_sets}
        announce_releases(missing, odometer, reporter)
        worked: dict[str, float] = {}
        try:
            if missing:
                # One Ray serves teachers and cells, whose needs differ.
                num_gpus = max(sweep.ray.num_gpus, sweep.tasks.num_gpus)
                cluster = start_ray(sweep.ray.model_copy(update={"num_gpus": num_gpus}))
                with tallied() as worked, nullcontext() if sweep.ray.num_actors == 0 else cluster:
                    _require_room(sweep, since=time.monotonic())
                    # Before the cells: a cell occupies its CPUs while it waits, and could block teachers.
                    faults = collect_shared_votes(missing, folder, reporter, sweep.ray)
                    faults |= collect_shared_releases(missing, folder, reporter, sweep)
                    run_cells(missing, cells, folder, faults, sweep, reporter, compute=compute or run_cell)
        finally:
            # After an error or Ctrl-C too: what was finished enters the tables.
            folder.assemble(cells)
            known = state_choices(cells, folder)
            if worked:
                write_json(folder.work, worked, private=True)
    said = [spent_since(before[data], data, odometer, delta=delta) for data, delta in data_sets.items()]
    return Comparison(folder=folder, changed=True, choices=known, spent=tuple(filter(None, said)), **shown)


def announce_releases(cells: Sequence[Cell], odometer: Odometer, reporter: Reporter) -> None:
    """Print for each data set how many releases ``cells`` make of it, what these may cost, and what earlier releases
    cost.

    A release that several cells share is counted once. Methods without privacy and runs with seeded noise, which is not
    private, are left out. If the total of a data set is above a limit, ``reporter`` asks the user to confirm it.
    """
    of_data: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        if cell.config.is_private and not cell.config.is_seeded:
            # By the settings of a release: cells that share it spend it once.
            shared = cell.config.shared_release
            name = cell.digest if shared is None else values_digest(shared)
            of_data.setdefault(cell.config.data.name, {}).setdefault(name, cell)
    for data, found in of_data.items():
        targets = [cell.config.target for cell in found.values()]
        known = [epsilon for target in targets if (epsilon := target.stated.get("epsilon")) is not None]
        most = "some without a target"
        if len(known) == len(targets):
            most = f"of at most ε = {epsilon_text(sum(known))} in sum"
        before = spent(data, odometer, delta=targets[0].delta)
        reporter.note("spends", f"{counted(len(found), 'release')} on {data}, {most}; so far {before}")
        of_first = next(iter(found.values())).config.data
        is_own = of_first.declaration is not None
        units, unit = declared_units(of_first)
        if caution := draft_caution(of_first):
            reporter.note("caution", caution)
        # Of the largest delta: a smaller one needs less of a caution.
        announce_delta(max(target.delta for target in targets), units, unit, reporter, is_own=is_own)
        question = question_above(data, planned=sum(known), odometer=odometer, delta=targets[0].delta, is_own=is_own)
        if question:
            reporter.consent(question)


class _ThisProcess:
    """The functions of Ray that a comparison calls, for tasks in this process: each runs when its result is read."""

    exceptions = SimpleNamespace(RayError=Exception)

    def remote(self, **_: Any) -> Any:
        # A task is its function with its arguments, which nobody has called.
        return lambda function: SimpleNamespace(remote=partial(partial, function))

    def put(self, value: Any) -> Any:
        return value

    def wait(self, tasks: Sequence[Any], **_: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        return tasks[:1], []

    def get(self, task: Callable[[], Any], **_: Any) -> Any:
        threads = torch.get_num_threads()
        try:
            # The steps of a cell are no cells: like those of a worker, nobody hears of them.
            with heard_by(lambda *_: None):
                return task()
        finally:
            torch.set_num_threads(threads)


def _ray(sweep: SweepConfig) -> Any:
    if sweep.ray.num_actors == 0:
        return _ThisProcess()
    import ray

    return ray


def _require_room(sweep: SweepConfig, *, since: float) -> bool:
    """Return whether a node of the Ray cluster is large enough for a cell of ``sweep`` (a method with its settings, a
    data set and a seed). PoolError if there is no such node ``ray.wait_for_nodes_s`` seconds after ``since``, a time of
    ``time.monotonic``."""
    tasks, wait_s = sweep.tasks, sweep.ray.wait_for_nodes_s
    if sweep.ray.num_actors == 0:
        return True
    fitting, cluster = room_for(num_cpus=tasks.num_cpus, num_gpus=tasks.num_gpus)
    if not fitting and time.monotonic() - since >= wait_s:
        raise PoolError(
            f"tasks: no node is large enough for a run of tasks.num_cpus={tasks.num_cpus:g} and "
            f"tasks.num_gpus={tasks.num_gpus:g}: the cluster has {cluster}. Lower the two fields, add nodes, or, if "
            f"nodes start on demand, raise ray.wait_for_nodes_s, now {wait_s:g}."
        )
    return fitting > 0


def collect_shared_votes(
    cells: Sequence[Cell], folder: SweepFolder, reporter: Reporter, cluster: RayConfig
) -> dict[Path, str]:
    """Train missing teachers and store their votes for all ``cells`` that share them, one ensemble after the other,
    each on the whole cluster.

    Votes and checkpoints must not be published. After an error the next ensemble is tried. Return a mapping from the
    path of each votes file that could not be written to its error message.
    """
    missing = {
        path: cell
        for cell in cells
        if (path := folder.shared_file(cell)) and path.suffix == ".parquet" and not path.exists()
    }
    faults: dict[Path, str] = {}
    if missing:
        # One pool for all ensembles, so that its actors start once.
        with open_pool(cluster) as pool:
            for path, cell in missing.items():
                reporter.note("teachers", f"for {cell.data}, seed {cell.config.seed}")
                try:
                    with vectors_on(lambda: nullcontext(pool)):
                        dataset = load_data(cell.config.data)
                    write_votes(cell.config.votes_to_share(dataset, folder.teachers, reporter, pool), path)
                except (UserError, ValueError, OSError, RuntimeError) as error:
                    faults[path] = _cause(error)
    return faults


def _cause(error: Exception) -> str:
    """Return the kind and the message of an error in a cell: those of the remote error rather than of Ray's wrapper,
    whose text is a traceback."""
    error = getattr(error, "cause", None) or error
    return f"{type(error).__name__}: {error}"


def collect_shared_releases(
    cells: Sequence[Cell], folder: SweepFolder, reporter: Reporter, sweep: SweepConfig
) -> dict[Path, str]:
    """Draw the missing releases of all ``cells``, each as a task on a node that is large enough, and charge each
    release once.

    A release has a run directory of its own, without a model, in the folder of the comparison. If a release was
    deleted, the next comparison draws and charges another one. After an error the next release is tried. Return a
    mapping from the path of each release's file that could not be written to its error message.
    """
    ray = _ray(sweep)
    cells_of: dict[Path, list[Cell]] = {}
    for cell in cells:
        path = folder.shared_file(cell) if cell.config.keeps_release else None
        if path is not None and not path.exists():
            cells_of.setdefault(path, []).append(cell)
    if not cells_of:
        return {}
    started = time.monotonic()
    while not _require_room(sweep, since=started):
        time.sleep(_WAIT_S)
    tasks = sweep.tasks
    # Ray must not retry: a worker that died may have drawn a release, and a retry would draw a second one.
    remote: Any = ray.remote(num_cpus=tasks.num_cpus, num_gpus=tasks.num_gpus, max_retries=0)(_in_time)
    # The file is in the public folder of the release's run directory, hence its second parent.
    drawn = {
        path: remote.remote(tasks, _draw, [cell.config for cell in sharing], path.parents[1])
        for path, sharing in cells_of.items()
    }
    faults: dict[Path, str] = {}
    for path, reference in drawn.items():
        cell = cells_of[path][0]
        reporter.note("release", f"for {cell.method} on {cell.data}, seed {cell.config.seed}")
        try:
            # Without a timeout of its own: `tasks.max_minutes`, where it is set, ends the task.
            content, release = ray.get(reference)
            # Before cells find the file: a crash in between counts it again, under the same id.
            count_cell(release)
            make_folder(path.parent)
            write_atomically(path, partial(Path.write_bytes, data=content))
        except (ray.exceptions.RayError, LimitReachedError, OdometerError, OSError) as error:
            faults[path] = _cause(error)
    return faults


def _draw(configs: Sequence[ReleasingMethod], out: Path) -> tuple[bytes, RunCharge]:
    """Draw the release that the methods ``configs`` share in the folder ``out``, or read the release if it exists
    there. Return the bytes of its file, and its row in the odometer (the database of privacy costs). ConfigError if the
    data set suits none of ``configs``: a release that nobody can use is not charged for."""
    faults = []
    with open_run(configs[0].release_alone.model_copy(update={"out": out}), Reporter(quiet=True)) as opened:
        for config in configs:
            try:
                check_data(config, opened.dataset)
            except ValueError as error:
                faults.append(error)
            else:
                break
        else:
            raise faults[0]
        opened.config.release(opened)
    release = read_receipt(opened.run)
    assert release is not None
    return opened.run.released.read_bytes(), release


def count_cell(release: RunCharge) -> None:
    """Charge ``release``, the release of one cell, to this machine's odometer (the database of privacy costs). The
    worker that ran the cell has an odometer of its own.

    LimitReachedError if the release exceeds a limit that the worker did not know; it is charged nevertheless.
    """
    odometer = Odometer()
    try:
        odometer.charge(release)
    except LimitReachedError:
        # The release has happened: leaving it out would understate the total.
        odometer.charge(release, enforce=False)
        raise


class CellTimeoutError(RuntimeError):
    """Raised in a cell that runs longer than its time limit, to interrupt it."""


def _in_time(tasks: TasksConfig, work: Callable[..., Any], *arguments: Any) -> Any:
    """Return what ``work(*arguments)`` returns; after ``tasks.max_minutes`` it is interrupted by a CellTimeoutError.
    A limit needs the main thread of this process."""
    if tasks.max_minutes is None:
        return work(*arguments)

    def interrupt(*_: object) -> None:
        raise CellTimeoutError(
            f"this run took longer than tasks.max_minutes={tasks.max_minutes:g}; raise this limit, or lower the "
            "number of epochs."
        )

    # A signal rather than a thread: it also interrupts a loop that never waits.
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 60 * tasks.max_minutes)
    try:
        return work(*arguments)
    finally:
        # The process is used again, and the next cell has a time of its own.
        signal.setitimer(signal.ITIMER_REAL, 0)


def run_cells(
    missing: Sequence[Cell],
    cells: Sequence[Cell],
    folder: SweepFolder,
    faults: Mapping[Path, str],
    sweep: SweepConfig,
    reporter: Reporter,
    *,
    compute: Compute,
) -> None:
    """Run the ``missing`` cells (each a method with its settings, a data set and a seed) as tasks, on Ray if it was
    started. Each result is written and charged as soon as it arrives.

    ``faults`` maps the path of each shared file that could not be made to an error message; the cells that need this
    file fail without being run. The tables of all ``cells`` are written from time to time, so that few results have to
    be read from the files of single cells if this process is killed. Cells are submitted before there is room for them,
    so that an autoscaler sees the demand. ``compute`` trains and measures one cell. PoolError as in :func:`compare`.
    """
    ray, tasks = _ray(sweep), sweep.tasks
    reserve = ray.remote(num_cpus=tasks.num_cpus, num_gpus=tasks.num_gpus, max_retries=tasks.max_retries)
    remote: Any = reserve(_in_time)
    pending: dict[Any, Cell] = {}
    stored: dict[Path, Any] = {}

    def fail(cell: Cell, cause: str) -> None:
        row = cell.row(minutes=math.nan, error=" ".join(cause.split()))
        write_rows([row], folder.failed / f"{cell.digest}.parquet", private=True)  # the cell stays unfinished
        count("cells_failed")
        reporter.note("failed", f"{row.name}: {row.error}")

    def submit(cell: Cell) -> None:
        path = folder.shared_file(cell)
        if path is not None and path in faults:
            fail(cell, faults[path])
            return
        if path is not None and path not in stored:
            # Put once: as plain arguments the votes would travel with every cell.
            stored[path] = ray.put(read_votes(path) if path.suffix == ".parquet" else path.read_bytes())
        handed = None if path is None else stored[path]
        reference = remote.remote(tasks, _compute, compute, cell, folder.run(cell), handed, tasks.torch_threads)
        pending[reference] = cell

    def settle(reference: Any) -> None:
        cell = pending.pop(reference)
        try:
            # It has ended: only its result is on the way.
            rows, releases = ray.get(reference, timeout=60.0)
            # Before the cell counts as finished: a crash in between counts it again, under the same id.
            for release in releases:
                count_cell(release)
        except (ray.exceptions.RayError, LimitReachedError, OdometerError) as error:
            fail(cell, _cause(error))
        else:
            folder.add(cell, rows)
            count("cells_done")

    waiting = deque(missing)
    started, has_room, num_settled = time.monotonic(), False, 0
    reporter.note("runs", f"{len(cells)}, {len(cells) - len(missing)} of them finished before")
    with reporter.stage("runs") as advance:
        try:
            while True:
                # A bounded number at once: each submitted task costs memory on the driver, and a sweep may have
                # thousands.
                while len(pending) < _SUBMITTED_AT_ONCE and waiting:
                    submit(waiting.popleft())
                advance(len(cells) - len(waiting) - len(pending), len(cells))
                if not pending:
                    return
                has_room = has_room or _require_room(sweep, since=started)
                done, _ = ray.wait(list(pending), num_returns=1, timeout=_WAIT_S)
                for reference in done:
                    settle(reference)
                    num_settled += 1
                    if num_settled % _ASSEMBLED_EVERY == 0:
                        folder.assemble(cells)
        finally:
            # After an interrupt, the cells that still run would keep the cluster busy. Those about to end get a
            # moment: Ray 2.60 aborts the driver if it cancels a task whose result is just arriving.
            _, running = ray.wait(list(pending), num_returns=len(pending), timeout=_WAIT_S) if pending else ([], [])
            for reference in running:
                ray.cancel(reference, force=True)


def _compute(
    compute: Compute, cell: Cell, out: Path, shared: Handed, torch_threads: int
) -> tuple[list[Row], list[RunCharge]]:
    rows = compute(cell, out, shared, torch_threads)
    # Of the model and of private metrics; a choice among settings is never made in a cell.
    receipts = (read_receipt(folder(root=out)) for folder in (RunDirectory, MetricsFolder))
    return rows, [receipt for receipt in receipts if receipt is not None]


def run_cell(cell: Cell, out: Path, shared: Handed, torch_threads: int = 1) -> list[Row]:
    """Train and measure one cell (a method with its settings, a data set and a seed) in the folder ``out``, without
    Ray. Return its public row of results, and, if its privacy cost depends on votes, a second row with that cost, which
    must not be published.

    ``shared``: the votes or the release that the cell shares with other cells; None if it shares nothing.
    """
    torch.set_num_threads(torch_threads)
    started = time.monotonic()
    config = with_pinned_weights(cell.config.model_copy(update={"out": out}))
    if out.exists() and not RunDirectory(root=out).config.exists():
        shutil.rmtree(out)  # a worker died before it had written what the run is
    if shared is not None:
        # The run finds what it shares as if it had made it.
        run = create_run_directory(config)
        if isinstance(shared, VoteBatch):
            if not run.votes.exists():
                write_votes(shared, run.votes)
        elif not run.released.exists():
            write_atomically(run.released, partial(Path.write_bytes, data=shared))
    run = run_method(config, Reporter(quiet=True), load=load_once)
    return cell.rows(run, minutes=(time.monotonic() - started) / 60)


def write_frontier_reports(comparison: Comparison, *, title: str) -> None:
    """Write the public page of a comparison with its figures, and its private page, unless both pages are newer than
    the results tables."""
    folder = comparison.folder
    pages, tables = (folder.report, folder.private_report), (folder.results, folder.private_results)
    if not comparison.changed and all(page.exists() for page in pages):
        # Strictly newer: a page of the same instant may show the tables of before.
        is_newer = min(page.stat().st_mtime_ns for page in pages) > max(table.stat().st_mtime_ns for table in tables)
        rule = comparison.fair_at
        opens = f'data-opens="{comparison.notion} {rule.notion} {rule.limit}"'
        if is_newer and opens in folder.report.read_text(encoding="utf-8"):
            return
    known = comparison.choices
    names = {cell.data: cell.config.data.name for cell in comparison.cells}
    # All rows: the public page shows no secret one, and counts how many it leaves out.
    public = FrontierReport(
        title=title,
        rows=comparison.operators_rows,
        publish_unprotected=folder.publish_unprotected,
        notion=comparison.notion,
        fair_at=comparison.fair_at,
        looks=looks_of({row.method for row in comparison.operators_rows}),
        choices={data: known[name].words for data, name in names.items() if name in known},
    )
    make_folder(folder.figures)
    for name, content in frontier_figures(public.points()).items():
        write_atomically(folder.figures / name, partial(Path.write_bytes, data=content))
    # Pages after figures: where both pages are newer than the tables, the next command writes nothing.
    write_text(folder.private_report, frontier_report(replace(public, for_operator=True)))
    write_text(folder.report, frontier_report(public))


def comparison_outcome(comparison: Comparison) -> Output:
    """Return what `fairpate compare` prints: the ranges of results by data set and method, warnings, and paths of
    files.

    As text: a table per data set with a line per method, at most 80 columns wide. Non-private results that may not be
    published are only counted.
    """
    folder, failed, notion = comparison.folder, comparison.failed, comparison.notion
    by_data: dict[str, dict[str, list[Row]]] = {}
    for row in comparison.rows:
        by_data.setdefault(row.data, {}).setdefault(row.method, []).append(row)
    data_sets: list[dict[str, Any]] = []
    tables: list[Table] = []
    groups: list[str] = []
    for data, by_method in by_data.items():
        majority = _range(row.record.majority_accuracy for row in comparison.rows if row.record and row.data == data)
        always = _range_words("accuracy", majority)
        title = f"accuracy of always the most common class: {always}" if majority else None
        names = ("runs", "ε", "accuracy", in_two_lines(NOTIONS[notion].measure), "coverage")
        right = [Column(name, justify="right", no_wrap=True) for name in names]
        table = Table(data, *right, box=SIMPLE_HEAD, title=title, title_justify="left")
        methods = []
        for method, rows in by_method.items():
            records = [row.record for row in rows if row.record is not None]
            told = GroupsTold.of(records)
            ranges = {
                "epsilon": _range(record.epsilon for record in records),
                "accuracy": _range(record.accuracy for record in records),
                "disparity": _range(notion_value(record, notion) for record in records),
                "coverage": _range(record.coverage for record in records),
            }
            texts = [_range_words(name, found) if records else "" for name, found in ranges.items()]
            done = str(len(rows)) if len(records) == len(rows) else f"{len(records)} of {len(rows)}"
            table.add_row(method, done, *texts)
            groups += [f"{method} on {data}: {words}" for words in told.words("run")]
            by_group = {"underserved_groups": dict(told.underserved), "unmeasured_groups": dict(told.unmeasured)}
            methods.append({"method": method, "cells": len(rows), "finished": len(records), **ranges, **by_group})
        tables.append(table)
        data_sets.append({"data": data, "majority_accuracy": majority, "methods": methods})

    finished = ((row, row.record.degenerate) for row in comparison.rows if row.record is not None)
    degenerate, named = [each for each in finished if each[1]], ("method", "data", "seed", "digest")
    withheld = Counter(row.method for row in comparison.withheld)
    files = {"results": folder.results, "report": folder.report, "operator_only": folder.private}
    found = {
        "notion": notion,
        "fair_at": comparison.fair_at,
        "data_sets": data_sets,
        "degenerate": [{name: getattr(row, name) for name in named} | {"words": words} for row, words in degenerate],
        "failed": [
            {name: getattr(row, name) for name in named} | {"command": row.command, "cause": row.error}
            for row in failed
        ],
        "left_out": withheld,
        "files": files,
        "spent": comparison.spent,
    }
    lines = [
        *(f"degenerate: {row.name}: {'; '.join(words)}" for row, words in degenerate),
        *groups,
        *(f"failed: {row.command}\n    {row.error}" for row in failed),
    ]
    left_out = f"{counted(withheld.total(), 'result')} without privacy: {', '.join(withheld)}"
    last = [
        *([("left out", left_out)] if withheld else []),
        *((name.replace("_", " "), str(path)) for name, path in files.items()),
        *(("spent", each) for each in comparison.spent),
    ]
    # Commands are not wrapped, so that they can be copied.
    words = Group(*tables, *(Text(line, no_wrap=True, overflow="ignore") for line in lines), facts(last))
    trouble = f"{counted(len(failed), 'run')} failed; the same command tries them again." if failed else None
    return Output(facts=found, words=words, code=int(bool(failed)), failure=trouble)


def _range(values: Iterable[float | None]) -> list[float] | None:
    """Return the least and the greatest of those ``values`` that are defined; None if none of them is."""
    there = [value for value in values if value is not None]
    return [min(there), max(there)] if there else None


def _range_words(name: str, found: Sequence[float] | None) -> str:
    if found is None:
        return "undefined"
    low, high = (epsilon_text(end) if name == "epsilon" else f"{end:.3f}".removeprefix("0") for end in found)
    return low if low == high else f"{low}–{high}"


def write_figures(
    results: Path, *, style: FigureStyle, notion: NotionName = DEFAULT, out: Path | None = None
) -> tuple[Path, ...]:
    """Draw the frontier figures from the table ``results``, one set for each data set and privacy class (unit, relation
    and delta), and return their paths; nothing is run.

    ``results`` is a results.parquet, or the folder of a comparison. No figure shows what depends on private votes;
    figures from a table that must not be published leave out results without a privacy guarantee too. ``out``: the
    folder for the figures; None: the folder ``paper`` next to the table. UsageError if there is nothing to draw.
    """
    table = results / "results.parquet" if results.is_dir() else results
    rows = read_rows(table)
    # An operator's table is known by its content too, wherever a copy lies.
    is_operators = table.resolve().parent.name == "private" or any(
        row.is_private or not math.isnan(row.minutes) or row.error not in ("", FAILED) for row in rows
    )
    looks = looks_of({row.method for row in rows})
    report = FrontierReport(title="", rows=rows, publish_unprotected=not is_operators, notion=notion, looks=looks)
    points = report.points()
    if not points:
        raise UsageError(
            f"{table}: no finished run that may be published; run `fairpate compare` again to finish it, then draw the "
            "figures."
        )
    folder = out or table.parent / "paper"
    make_folder(folder)
    pictures = {folder / name: content for name, content in frontier_figures(points, style).items()}
    for path, content in pictures.items():
        write_atomically(path, partial(Path.write_bytes, data=content))
    return tuple(pictures)


_DEMO = """\
Who gets a loan without a guarantor? 20,000 invented customers applied 35,188 times. Three methods learn from them who
pays on time, each with a privacy budget of ε = 1 for everything about one customer; then a model learns the same
without privacy. The default method also gets a reject option, which leaves some applications to a person so that no age
group is refused much more often than all others: the largest such difference is the gap. This takes about a minute."""
_YOURS = (
    ("your own file", "fairpate data declare yours.csv -o yours.yaml"),
    ("then", "fairpate run --data yours.yaml --epsilon 1"),
)


def demo(sweep: Path, out: Path) -> Output:
    """Compare the methods in the file ``sweep`` in the folder ``out``, or read the results of an earlier demo in this
    folder; return a report of the comparison.

    The sweep measures one method a second time with a reject option, a rule that refuses some predictions; the rule
    reads no private record, so it has no privacy cost. That model is the one that terminal and page show: the sweep's
    file names its method, so that no record chose it. Each number of the report's table and sentences is read from
    what the runs published.
    """
    say(_DEMO)
    comparison = compare_methods(sweeps.load_sweep(sweep), out=out, title="demo")
    if comparison.failed:
        return comparison_outcome(comparison)
    models: dict[str, RunStatement] = {}
    for row in comparison.rows:
        run, config = finished_run(comparison.folder.run(row))
        if config.student.idp3 is None:
            models[config.method] = read_claims(run)
        else:
            shown, rejecting = config.method, read_claims(run)
            page = run.public_report
    private = [name for name, claims in models.items() if claims.guarantee.protects]
    (without,) = models.keys() - private
    claims, bare = models[shown], models[without]
    choice = rejecting.choice
    assert choice is not None  # of several private methods
    sentences = [
        *claims_in_words(claims, bare, rejecting, method=shown),
        f"This ε holds because the method was named before any record was read. {choice.words} `fairpate select` makes "
        "such a choice at an ε that you set.",
    ]
    files = {"all models": out / comparison.folder.report.name, "this model": page}
    rows = {f"{shown}, may reject": rejecting} | {name: models[name] for name in private}
    rows |= {f"{without}, not private": bare}
    names = ("accuracy", "disparity", "coverage")
    numbers = {
        name: {"epsilon": each.guarantee.epsilon} | {of: getattr(each.measured, of) for of in names}
        for name, each in rows.items()
    }
    measured = claims.measured
    headings = ("ε per person", "accuracy", "gap", "answered")
    right = [Column(name, justify="right", no_wrap=True) for name in headings]
    table = Table(counted(measured.num_records, "test record"), *right, box=SIMPLE_HEAD)
    constant = {"epsilon": 0.0, "accuracy": measured.majority_accuracy, "disparity": 0.0, "coverage": 1.0}
    for name, row_of in (numbers | {f"always “{measured.majority_class}”": constant}).items():
        shares = (percent(row_of["accuracy"]), decimal(row_of["disparity"]), percent(row_of["coverage"]))
        table.add_row(name, epsilon_text(row_of["epsilon"]), *shares)
    places = [*((name, str(path)) for name, path in files.items()), *_YOURS]
    found = {"models": numbers, "shown": shown, "fair_at": measured.fair_at.limit, "sentences": sentences}
    words = Group(table, *(Text(f"{sentence}\n") for sentence in sentences), facts(places))
    return Output(facts=found | {"files": files}, words=words)


def claims_in_words(claims: RunStatement, without: RunStatement, rejecting: RunStatement, *, method: str) -> list[str]:
    """Return two sentences about the model that is to be published: that of the default ``method`` with a reject
    option, a rule that refuses some predictions (``rejecting``).

    The first sentence states guarantee, fairness and accuracy of this model, what it refuses, and the accuracy of a
    model trained ``without`` privacy. The second states how the same model treats groups if it refuses nothing
    (``claims``). Each gap is judged by the user's rule of fairness.
    """
    guarantee, measured, chosen = rejecting.guarantee, claims.measured, rejecting.measured
    gap, less = measured.measured(DEFAULT), chosen.measured(DEFAULT)
    # The coverage of a group that is too small is NaN, and such a group is passed over.
    refused = max(chosen.groups, key=lambda each: 1 - each.coverage if each.coverage < 1 else 0.0)
    confidence, limit = percent(less.level, digits=0), f"{chosen.fair_at.limit:g}"
    ends = ends_words(less.value, less.low, less.high)
    model = (
        f"The model to publish is {method}, the default method, with a reject option: {guarantee.strength[0]} at ε = "
        f"{guarantee.words['epsilon']} (δ = {delta_text(guarantee.delta)}) for {guarantee.words['protected']}, and "
        f"{rejecting.fairness_words}, with a gap of {decimal(less.value)} ({ends} with {confidence} "
        f"confidence; at most {limit} is called fair). {percent(chosen.accuracy)} of its answers are right; of a "
        f"model without privacy {percent(without.measured.accuracy)}, which may be shown as these people are invented. "
        f"It leaves {percent(1 - chosen.coverage)} of the records to a person, and {percent(1 - refused.coverage)} of "
        f"those of “{refused.name}”."
    )
    answer, group = gap.where.removeprefix("predicted ").split(": ", 1)
    place, code = measured.group_names.index(group), measured.class_names.index(answer)
    rates_G = np.array(measured.rates_GC)[:, code]
    # Rates are over answered records, so that those of several groups are joined in proportion to these.
    others_G = np.array([each.num_answered for each in measured.groups]) * (np.arange(len(rates_G)) != place)
    refusing_nothing = (
        f"Without the reject option it says “{answer}” to {percent(rates_G[place])} of “{group}” and to "
        f"{percent(rates_G @ others_G / others_G.sum())} of all others: a gap of {decimal(gap.value)}, "
        f"{claims.fairness}."
    )
    return [model, refusing_nothing]
