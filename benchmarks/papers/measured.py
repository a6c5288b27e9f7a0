"""Read and write what was measured: one JSON file per experiment in docs/results/, which the documents quote.

    {"command": ..., "cells": {NAME: {"seeds": [...], "unit": ..., "relation": ..., "delta": ..., METRIC: [...]}}}

A metric has one value per seed, in the order of the seeds; null where it is undefined. docs/results/SHA256SUMS has the
digest of every file: ``write`` keeps it, so that a number which was changed by hand is found. A document quotes a value
as a link, ``[83.1 ± 1.6 %](results/FILE.json#NAME:METRIC)``, and

    python benchmarks/papers/measured.py docs/results-published.md

writes the text of every such link anew, with a dagger where a seed of the cell is degenerate. A table may leave its
numbers to the build of the documentation: ``filled`` writes those of a table whose header names cells,

    | data | bound | accuracy {raco_odds#$1/raco_dp/bound=$2,epsilon=0.5:accuracy} | gap {:odds_full} | 3 {epsilon=3} |

where ``$1`` is the text of the row's first column (or its key, ``Adult {adult}``; an empty cell repeats the one above).
What a reference leaves out is that of the column before it, and settings alone change these in its cell; without a
metric they repeat the columns before them. A body cell may have text or a reference of its own. Sentences quote tables
of their section: ``unsupported`` finds those that do not.

    python benchmarks/papers/measured.py --print docs/coverage.md
    python benchmarks/papers/measured.py docs/results/NAME.json      the digest of a file that something else wrote

``tests/deploy/test_quoted_results.py`` holds that all of it is up to date.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from fairpate.files import write_atomically
from fairpate.types import strict

FOLDER = Path(__file__).parents[2] / "docs" / "results"
QUOTE = re.compile(r"\[([^\]]*)\]\((results/[\w.-]+\.json)#([^):]+):(\w+)\)")
SUMS = "SHA256SUMS"
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
    "broken",
    "fnr",
    "fpr",
)
_LEAST_P = 0.001
_COUNTS = (
    *("answered", "submitted", "submitted_own", "charged", "rejected", "degenerate"),
    *("left_out", "unrefused_left_out"),
)

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
    write_digests([path])
    return path


def digests() -> dict[str, str]:
    """Digest of each file of results by its name, as SHA256SUMS has them."""
    lines = (FOLDER / SUMS).read_text(encoding="utf-8").splitlines() if (FOLDER / SUMS).exists() else []
    return {name: digest for digest, name in (line.split("  ") for line in lines)}


def write_digests(paths: Sequence[Path]) -> None:
    """Keep the digests of files that were measured anew; those of the others stay, so that they are still checked."""
    found = digests() | {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    lines = "".join(f"{found[name]}  {name}\n" for name in sorted(found))
    write_atomically(FOLDER / SUMS, lambda temporary: temporary.write_text(lines, encoding="utf-8") and None)


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
    """Return True if a model of any seed is degenerate, so that its gaps mean nothing; False if not recorded."""
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
        metric.startswith(("accuracy_", "clipped_", "reduction_", "share_")) and metric != "accuracy_parity"
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


class _Reference(NamedTuple):
    file: str
    cell: str
    metric: str

    def resolve(self, words: str) -> _Reference:
        """Complete `words`, the inside of a pair of braces, from this reference of the column before."""
        place, _, metric = words.rpartition(":")
        file, _, cell = place.rpartition("#")
        if "=" in cell and not file and "/" not in cell:  # settings that replace those of the same name
            replaced = dict(setting.split("=") for setting in cell.split(","))
            cell = _SETTING.sub(lambda setting: f"{setting[1]}={replaced.pop(setting[1], setting[2])}", self.cell)
            if replaced:
                raise QuoteError(f"{words}: {self.cell} has no such setting.")
        return _Reference(file or self.file, cell or self.cell, metric)


_FILL = re.compile(r"\{((?:[\w.$-]+#)?[^{}:|]*:[\w$]+)\}")
_AGAIN = re.compile(r"(.*?) ?\{([\w.]+=[^{}:#/|]*)\}")
_KEY = re.compile(r"(.*?) ?\{([^{}:]*)\}")
_SETTING = re.compile(r"([\w.]+)=([^,/]*)")
_OURS = re.compile(
    r"(?<![\w.])-?(?:\d+(?:\.\d+)? ± \d+(?:\.\d+)?(?: %)?|\d\.\d{3}(?!\d)|\d+\.\d\dx(?: \([\d.]+ to [\d.]+\))?)(?: †)?"
)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")


def built(document: str) -> tuple[str, list[tuple[str, str, str, str]]]:
    """``document`` with the numbers of its tables, and below each its files, seeds and commands; and words, file, cell
    and metric of every number that it quotes, in links and in tables."""
    shown: list[str] = []
    found = [(words, Path(file).stem, cell, metric) for words, file, cell, metric in QUOTE.findall(document)]
    for is_table, lines in _blocks(document):
        own, quoted = _filled(lines) if is_table else (lines, [])
        shown += own
        found += quoted
    return "".join(f"{line}\n" for line in shown), found


def filled(document: str) -> str:
    """The first part of :func:`built`: what readers of ``document`` see."""
    return built(document)[0]


def unsupported(document: str) -> list[str]:
    """Numbers in sentences of ``document`` that no table of their section has, or of the section that they link to.

    A section is what stands below a heading. A number of ours has a standard deviation, three digits after the point or
    an x; others, such as a paper's, are not looked at. A link with a number and a place in another file is left out.
    """
    sections: dict[str, tuple[list[str], set[str]]] = {"": ([], set())}
    title = ""
    for is_table, lines in _blocks(document):
        for line in lines:
            if line.startswith("#"):
                title = re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
                sections[title] = ([], set())
            elif not is_table or not _FILL.search(lines[0]):
                sections[title][0].append(line)
        if is_table:
            sections[title][1].update(words for words, *_ in _filled(lines)[1])
    found = []
    for text, numbers in sections.values():
        prose = " ".join(text)
        for words, place in _LINK.findall(prose):
            if place.startswith("#"):
                there = sections.get(place[1:], ([], set()))[1]
                found += [number for number in _OURS.findall(words) if number not in there]
        found += [number for number in _OURS.findall(_LINK.sub("", prose)) if number not in numbers]
    return found


def _blocks(document: str) -> Iterator[tuple[bool, list[str]]]:
    """Tables, and the lines between them."""
    for is_table, lines in groupby(document.splitlines(), lambda line: line.startswith("|")):
        yield is_table, list(lines)


def _filled(lines: Sequence[str]) -> tuple[list[str], list[tuple[str, str, str, str]]]:
    """Return a table with its numbers, and their references; a table without references unchanged."""
    if not _FILL.search(lines[0]):
        return list(lines), []
    head, *rows = _repeated([[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines])
    starts = [_FILL.search(title) for title in head]
    titles = [title[: start.start()].strip() if start else title for title, start in zip(head, starts, strict=True)]
    patterns = [title[start.start() :] if start else "" for title, start in zip(head, starts, strict=True)]
    found: list[tuple[str, str, str, str]] = []
    files: dict[str, Cells] = {}

    def number(reference: _Reference) -> str:
        if reference.file not in files:
            files[reference.file] = read(reference.file)
        cells = files[reference.file]
        if reference.cell not in cells:
            raise QuoteError(f"results/{reference.file}.json has no cell {reference.cell}.")
        words = text(reference.metric, values(cells, reference.cell, reference.metric))
        words += DAGGER if is_degenerate(cells[reference.cell]) else ""
        found.append((words, *reference))
        return words

    body, above = [titles], [""] * len(head)
    for row in rows:
        row += [""] * (len(head) - len(row))
        for place, cell in enumerate(row):
            if not patterns[place]:
                keyed = _KEY.fullmatch(cell)
                row[place] = keyed[1] if keyed else cell
                above[place] = keyed[2] if keyed else cell or above[place]
        keys = [key for key, pattern in zip(above, patterns, strict=True) if not pattern]
        column = _Reference("", "", "")
        for place, pattern in enumerate(patterns):
            for label, key in enumerate(keys, 1):
                pattern = pattern.replace(f"${label}", key)
            parts = _FILL.split(pattern)
            for odd in range(1, len(parts), 2):
                column = column.resolve(parts[odd])
                parts[odd] = "" if row[place] else number(column)
            if pattern:
                own = _FILL.split(row[place])
                own[1::2] = [number(column.resolve(words)) for words in own[1::2]]
                row[place] = "".join(own if row[place] else parts)
        body.append(row)
    shown = [f"| {' | '.join(row)} |" for row in body]
    return [shown[0], f"|{'-|' * len(head)}", *shown[1:], "", _sources(files, found)], found


def _repeated(table: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return head and rows with all columns: ``4 {weight=4}`` in the head repeats its group, with that setting."""
    head, _, *rows = table
    if longer := [row for row in rows if len(row) > len(head)]:
        raise QuoteError(f"| {' | '.join(longer[0])} | has more columns than the head of its table.")
    every: list[list[str]] = [[] for _ in table[1:]]
    group: list[tuple[str, str]] = []  # words and metric
    for place, title in enumerate(head):
        below = [row[place] if place < len(row) else "" for row in rows]
        again, start = _AGAIN.fullmatch(title), _FILL.search(title)
        if again is None:
            if start:
                found = (title[: start.start()].strip(), start[1].rpartition(":")[2])
                group = [*group, found] if start[1].startswith(":") else [found]
            for line, cell in zip(every, [title, *below], strict=True):
                line.append(cell)
            continue
        for odd, (words, metric) in enumerate(group):
            shown = words if odd else ": ".join([again[1], *words.split(": ")[1:]])
            every[0].append(f"{shown} {{{'' if odd else again[2]}:{metric}}}")
            for line, cell in zip(every[1:], below, strict=True):
                line.append(f"{cell[:-1]}:{metric}}}" if _AGAIN.fullmatch(cell) else cell)
    return every


def _sources(files: Mapping[str, Cells], found: Sequence[tuple[str, str, str, str]]) -> str:
    """Return the sentence that names the files of a table, their seeds and the commands that measured them."""
    said = []
    for file, cells in files.items():
        command = json.loads((FOLDER / f"{file}.json").read_text(encoding="utf-8"))["command"]
        seeds = sorted({_named(cells[cell]["seeds"]) for _, name, cell, _ in found if name == file}, key=len)
        said.append(f"[{file}](results/{file}.json), seeds {' or '.join(seeds)}, by `{command}`")
    return f"Numbers: {'; '.join(said)}."


def main() -> None:
    """Write the quotations of the documents that are named, or print them with their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="+", type=Path)
    parser.add_argument("--print", action="store_true", help="print the documents with the numbers of their tables")
    options = parser.parse_args()
    for path in options.documents:
        if path.suffix == ".json":
            write_digests([path])
            continue
        document = quoted(path.read_text(encoding="utf-8"))
        if options.print:
            print(filled(document))
        else:
            path.write_text(document, encoding="utf-8")
            print(*(f"{path}: {number} is in no table of its section" for number in unsupported(document)), sep="\n")


if __name__ == "__main__":
    main()
