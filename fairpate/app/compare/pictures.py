"""A comparison's charts as vector pictures for a paper, from its table of results; nothing is run."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

from fairpate.app.compare.records_table import read_rows
from fairpate.evaluation.figure_style import FigureStyle
from fairpate.evaluation.frontier_figures import frontier_figures
from fairpate.evaluation.frontier_page import FrontierReport
from fairpate.evaluation.rows import FAILED, Row
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
