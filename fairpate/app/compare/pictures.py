"""A comparison's charts as vector pictures for a paper, from its table of results; nothing is run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fairpate.app.records_table import read_rows
from fairpate.evaluation.frontier_figures import FigureStyle, frontier_figures
from fairpate.evaluation.frontier_page import FrontierReport
from fairpate.fairness.notions import DEFAULT, NotionName
from fairpate.files import write_atomically
from fairpate.types import UsageError


def write_figures(
    results: Path, *, style: FigureStyle, notion: NotionName = DEFAULT, out: Path | None = None
) -> tuple[Path, ...]:
    """Draw slices, attainment and frontier of every data set and privacy class that ``results`` has.

    ``results`` is a results.parquet, or the folder of a sweep. What depends on private votes is in no picture, and of
    an operator's table neither is what has no privacy guarantee. ``out`` None: ``paper`` beside the table. UsageError
    where nothing can be drawn.
    """
    table = results / "results.parquet" if results.is_dir() else results
    is_operators = table.resolve().parent.name == "private"
    rows = read_rows(table)
    points = FrontierReport(title="", rows=rows, publish_unprotected=not is_operators, notion=notion).points()
    if not points:
        raise UsageError(f"{table}: no finished run that may be published; run `fairpate compare` to its end.")
    folder = out or table.parent / "paper"
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {folder / name: content for name, content in frontier_figures(points, style).items()}
    for path, content in pictures.items():
        write_atomically(path, partial(Path.write_bytes, data=content))
    return tuple(pictures)
