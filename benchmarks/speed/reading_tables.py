"""Tables larger than memory: reading one and voting on it takes memory that hardly grows with its rows.

    OMP_NUM_THREADS=1 python benchmarks/speed/reading_tables.py [--rows 500000 2000000] [--columns 50]
        [--format parquet] [--divided] [--persons]

A declared table of 50 columns (a label, a group, a key, numbers and categories) is read, and its records cast weighted
votes over a public pool of 10,000: the file's own, or with ``--divided`` those that a ranking of all records sets
aside. With ``--persons`` ten rows on average share a person, and persons are ranked. Each number of rows has a process
of its own. Its memory is counted without pages of mapped files, which go when memory runs short: what it had before,
and the highest it rose above that.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from fairpate.config import DataConfig, EmbeddingConfig
from fairpate.data import load_data
from fairpate.methods.record_votes import WeightedBallot

NUM_PUBLIC, ROWS_PER_PERSON, _PART, _SECONDS_BETWEEN = 10_000, 10, 100_000, 0.02


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one table took; memory in bytes."""

    num_rows: int
    file: int
    reading: float
    voting: float
    before: float
    rise: float


class Peak(threading.Thread):
    """Watches this process's memory."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.value, self._stop_now = 0.0, threading.Event()

    def run(self) -> None:
        """Until it is stopped."""
        while not self._stop_now.wait(_SECONDS_BETWEEN):
            self.value = max(self.value, memory())

    def stop(self) -> float:
        """The highest value."""
        self._stop_now.set()
        self.join()
        return max(self.value, memory())


def memory() -> float:
    """Bytes of this process that are no pages of a file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024.0 * int(found[1]) if found else 0.0


def rows(count: int, num_columns: int, start: int, num_persons: int, rng: np.random.Generator) -> pa.Table:
    """A part of a table: a key, a person, a label, a group, and columns of which every fifth is a category."""
    columns: dict[str, object] = {
        "id": np.arange(start, start + count),
        "person": rng.integers(0, num_persons, count),
        "y": np.where(rng.random(count) < 0.5, "yes", "no"),
        "sex": np.where(rng.random(count) < 0.5, "F", "M"),
    }
    for place in range(num_columns - len(columns)):
        is_category = place % 5 == 0
        columns[f"c{place}"] = rng.integers(0, 4, count) if is_category else rng.standard_normal(count).round(4)
    return pa.table(columns)


def write_table(
    folder: Path, num_rows: int, num_columns: int, file_format: str, *, is_divided: bool, has_persons: bool
) -> None:
    """The files and their declaration."""
    rng, num_persons = np.random.default_rng(0), num_rows // ROWS_PER_PERSON
    parts = (("private", num_rows, 0),) if is_divided else (("private", num_rows, 0), ("public", NUM_PUBLIC, num_rows))
    for name, count, first in parts:
        for start in range(0, count, _PART):
            part = rows(min(_PART, count - start), num_columns, first + start, num_persons, rng)
            if name == "public":  # no person of the private part has a row in it
                people = pa.array(np.arange(start, start + len(part)) + num_persons)
                part = part.set_column(part.column_names.index("person"), "person", people)
            path = folder / f"{name}-{start:09d}.{file_format}"
            if file_format == "csv":
                arrow_csv.write_csv(part, path)
            else:
                pq.write_table(part, path)
    features = [
        f"  c{place}: {'{categories: [0, 1, 2, 3]}' if place % 5 == 0 else '{bounds: [-3, 3]}'}"
        for place in range(num_columns - 4)
    ]
    files = f"private: private-*.{file_format}, public: public-*.{file_format}"
    if is_divided:
        files = f"records: private-*.{file_format}"
    head = f"name: large\nfiles: {{{files}}}\n" + ("person: person\n" if has_persons else "")
    head += (
        f"rows: {num_rows}\nnum_public: {NUM_PUBLIC}\nnum_validation: 0\nnum_test: {NUM_PUBLIC}\n" if is_divided else ""
    )
    meaning = "label: {column: y, classes: [no, yes]}\ngroup: {column: sex, values: [F, M]}\nidentity: {key: id}\n"
    (folder / "large.yaml").write_text(f"{head}{meaning}features:\n" + "\n".join(features) + "\n", encoding="utf-8")


def take(folder: Path, num_rows: int) -> Taken:
    """Read the table and let its records vote, in this process."""
    config = DataConfig.model_validate({"name": "large", "declaration": {"path": folder / "large.yaml"}})
    before, peak = memory(), Peak()
    peak.start()
    started = time.perf_counter()
    dataset = load_data(config)
    read = time.perf_counter()
    ballot = WeightedBallot.of(dataset, EmbeddingConfig(num_components=60))
    ballot.table(dataset.private.x, dataset.private.y.numpy(), num_classes=2)
    return Taken(
        num_rows=num_rows,
        file=sum(path.stat().st_size for path in folder.glob("private-*")),
        reading=read - started,
        voting=time.perf_counter() - read,
        before=before,
        rise=peak.stop() - before,
    )


def main() -> None:
    """Print one line per number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[500_000, 2_000_000])
    parser.add_argument("--columns", type=int, default=50)
    parser.add_argument("--format", choices=("parquet", "csv"), default="parquet")
    parser.add_argument("--divided", action="store_true")
    parser.add_argument("--persons", action="store_true")
    options = parser.parse_args()
    table = Table("rows", "file, MB", "reading, s", "voting, s", "MB before", "rise, MB", "bytes a row")
    for num_rows in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            write_table(
                Path(folder),
                num_rows,
                options.columns,
                options.format,
                is_divided=options.divided,
                has_persons=options.persons,
            )
            with multiprocessing.get_context("spawn").Pool(1) as process:
                taken = process.apply(take, (Path(folder), num_rows))
        numbers = (taken.file / 1e6, taken.reading, taken.voting, taken.before / 1e6, taken.rise / 1e6)
        table.add_row(f"{num_rows:,}", *(f"{number:,.0f}" for number in numbers), f"{taken.rise / num_rows:,.0f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
