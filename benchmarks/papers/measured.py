"""What was measured, as the documents quote it: one JSON file per experiment in docs/results/, written by a benchmark.

    {"command": ..., "cells": {NAME: {"seeds": [...], "unit": ..., "relation": ..., "delta": ..., METRIC: [...]}}}

A metric has one value per seed, in the order of the seeds; null where it is undefined. A document quotes a value as a
link, ``[83.1 ± 1.6 %](results/FILE.json#NAME:METRIC)``, and

    python benchmarks/papers/measured.py docs/coverage.md

writes the text of every such link anew, with a dagger where a seed of the cell is degenerate.
``tests/deploy/test_quoted_results.py`` holds that it is up to date.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairpate.files import write_atomically
from fairpate.types import strict

FOLDER = Path(__file__).parents[2] / "docs" / "results"
QUOTE = re.compile(r"\[([^\]]*)\]\((results/[\w.-]+\.json)#([^):]+):(\w+)\)")
NOT_RUN = "not run"
DAGGER = " †"
_SHARES = (
    "accuracy",
    "error",
    "error_bound",
    "label_accuracy",
    "majority_accuracy",
    "unrefused_accuracy",
    *("held", "exact", "undefined", "private_choice", "free_choice", "by_trials", "defaults", "worst"),
    "fnr",
    "fpr",
)
_LEAST_P = 0.001
_COUNTS = ("answered", "submitted", "submitted_own", "charged", "rejected", "degenerate")

Cells = dict[str, dict[str, Any]]


class QuoteError(ValueError):
    """A quotation of a metric that was not measured."""


def write(name: str, *, command: str, cells: Cells, **remarks: Any) -> Path:
    """Keep the cells of one experiment; ``remarks`` go with them. The file as a whole is written anew."""
    path = FOLDER / f"{name}.json"
    lines = ",\n".join(f"  {json.dumps(cell)}: {json.dumps(strict(cells[cell]))}" for cell in sorted(cells))
    head = "".join(f"{json.dumps(key)}: {json.dumps(strict(value))},\n" for key, value in remarks.items())
    text = f'{{"command": {json.dumps(command)},\n{head}"cells": {{\n{lines}\n}}}}\n'
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8") and None)
    return path


def read(name: str) -> Cells:
    """The cells of an experiment; none where it was never run."""
    path = FOLDER / f"{name}.json"
    cells: Cells = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.exists() else {}
    return cells


def values(cells: Mapping[str, Mapping[str, Any]], cell: str, metric: str) -> list[float]:
    """One value per seed, NaN where it is undefined. QuoteError for an unknown metric."""
    if metric not in cells[cell]:
        raise QuoteError(f"{cell}:{metric}: no such metric; there are {', '.join(sorted(cells[cell]))}.")
    found = cells[cell][metric]
    return [math.nan if value is None else float(value) for value in (found if isinstance(found, list) else [found])]


def is_degenerate(cell: Mapping[str, Any]) -> bool:
    """Whether a model of any of the seeds is worth nothing whatever its gaps; False where it was not recorded."""
    return any(cell.get("degenerate", ()))


def text(metric: str, measured: Sequence[float]) -> str:
    """Mean and standard deviation over seeds, in the metric's own unit; the value alone where there is one seed.

    Of times and their ratios the median, the least and the most; of seeds their names.
    """
    if metric == "seeds":
        return _named([int(seed) for seed in measured])
    known = [value for value in measured if math.isfinite(value)]
    if not known:
        return "undefined"
    mean, spread = statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None
    if metric in _SHARES or (
        metric.startswith(("accuracy_", "clipped_", "reduction_")) and metric != "accuracy_parity"
    ):
        return f"{100 * mean:.1f} %" if spread is None else f"{100 * mean:.1f} ± {100 * spread:.1f} %"
    if metric.startswith("p_") or metric == "p":
        return f"{mean:.3f}" if mean >= _LEAST_P else f"below {_LEAST_P}"
    if metric == "seconds":
        return _median(known, "{:.1f}", " s")
    if metric.startswith("ratio"):
        return _median(known, "{:.2f}", "x")
    digits = 0 if metric in _COUNTS or metric.startswith("answered") else 2 if metric.startswith("epsilon") else 3
    shown = f"{mean:.{digits}f}"
    return shown if spread is None or not round(spread, digits) else f"{shown} ± {spread:.{digits}f}"


def _named(seeds: Sequence[int]) -> str:
    """Such as "0 to 3, 5": three or more that follow each other are one range."""
    runs: list[list[int]] = []
    for seed in sorted(seeds):
        if runs and seed == runs[-1][-1] + 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _median(known: Sequence[float], form: str, unit: str) -> str:
    middle = form.format(statistics.median(known)) + unit
    spread = f" ({form.format(min(known))} to {form.format(max(known))})"
    return middle + spread if len(known) > 1 else middle


def quoted(document: str) -> str:
    """``document`` with the text of every quotation as measured. QuoteError for a metric that the cell lacks."""
    files: dict[str, Cells] = {}

    def anew(match: re.Match[str]) -> str:
        _, file, cell, metric = match.groups()
        if file not in files:
            files[file] = read(Path(file).stem)
        cells = files[file]
        words = text(metric, values(cells, cell, metric)) if cell in cells else NOT_RUN
        mark = DAGGER if metric != "seeds" and is_degenerate(cells.get(cell, {})) else ""
        return f"[{words}{mark}]({file}#{cell}:{metric})"

    return QUOTE.sub(anew, document)


def main() -> None:
    """Write the quotations of the documents that are named."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(quoted(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
