"""A sweep from end to end, and what it ends in: the frontier's pages and figures, a short table on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fairpate.app.compare.cells import cells_of
from fairpate.app.compare.folder import SweepFolder
from fairpate.app.compare.reading import parse_sweep
from fairpate.app.compare.records_table import Row
from fairpate.app.compare.run import Comparison, compare
from fairpate.app.rundir import write_text
from fairpate.app.terminal.progress import Reporter
from fairpate.compare_config import SweepConfig
from fairpate.evaluation.degenerate import GroupsTold
from fairpate.evaluation.frontier import notion_value
from fairpate.evaluation.frontier_figures import frontier_figures
from fairpate.evaluation.frontier_page import FrontierReport, frontier_report
from fairpate.evaluation.page import counted, epsilon_text, in_two_lines
from fairpate.fairness.notions import NOTIONS, NotionName
from fairpate.files import write_atomically
from fairpate.methods.pate import require_allowed


def compare_methods(
    sweep: SweepConfig | Mapping[str, Any],
    *,
    out: Path | None = None,
    data_dir: Path | None = None,
    folder: Path | None = None,
    title: str = "comparison",
    console: Console | None = None,
    allow_code: bool = False,
) -> Comparison:
    """Everything that `fairpate compare` does: check, run what is missing, write tables, pages and figures.

    ``folder`` is where files that the sweep names are looked for (None: here); ``out`` None takes the sweep's own, or
    ``runs/TITLE``. ``allow_code``: whether code that the sweep names may run. ConfigError lists every fault before
    anything runs.
    """
    folder = folder or Path()
    config = sweep if isinstance(sweep, SweepConfig) else parse_sweep(dict(sweep), folder=folder, data_dir=data_dir)
    cells = cells_of(config, folder=folder, data_dir=data_dir)
    for cell in cells:
        require_allowed(cell.config, allow_code=allow_code)
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
