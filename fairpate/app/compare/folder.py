"""The folder of a sweep: one part file per finished cell, and what is assembled from them.

    results.parquet, report.html,
    figures/                       assembled from the parts; may be published
    private/ (mode 0700)           teachers and votes; the operator's table and page; and
        parts/DIGEST.parquet       a finished cell, whole or absent
        failed/DIGEST.parquet      the cause of one that failed when it was last tried
    runs/                          the cells' run directories, each with its own private and public part

What is published of a cell is what its statement covers, its metrics and its settings. How long a run took and what an
error said depend on private records: they stay under ``private/``, and so does every trace of a cell whose results do.
A cell is finished when its part is there, found by the digest in its name; no table has to be read for that.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from fairpate.app.compare.cells import Cell
from fairpate.app.compare.records_table import (
    SCHEMA,
    RecordsTableError,
    Row,
    publishable,
    read_table,
    write_rows,
    write_table,
)
from fairpate.app.rundir import RunDirectory, RunDirectoryError, sole_worker, write_text
from fairpate.compare_config import SweepConfig
from fairpate.files import PathIn, private_folder


@dataclass(frozen=True, kw_only=True)
class SweepFolder:
    """Paths of one sweep, and its rows. ``publish_unprotected``: results without privacy count as public."""

    root: Path
    publish_unprotected: bool = False

    @property
    def private(self) -> Path:
        """What only the operator may see."""
        return self.root / "private"

    teachers = PathIn("private", "teachers")
    """Checkpoints that all cells share."""
    votes = PathIn("private", "votes")
    """Vote matrices that cells share."""
    parts = PathIn("private", "parts")
    """The rows of each finished cell."""
    failed = PathIn("private", "failed")
    """The row of each cell that failed."""
    results = PathIn("root", "results.parquet")
    """The public table."""
    private_results = PathIn("private", "results.parquet")
    """The operator's table: every row, with its run time and with the cause of a failure."""
    report = PathIn("root", "report.html")
    """The page for everybody."""
    figures = PathIn("root", "figures")
    """The page's figures as pictures."""
    private_report = PathIn("private", "report.html")
    """The operator's page."""
    config = PathIn("root", "sweep.yaml")
    """The sweep as it was asked for last."""

    def run(self, cell: Cell) -> Path:
        """The run directory of one cell."""
        return self.root / "runs" / f"{cell.method}-{cell.data}-{cell.digest}"

    def release(self, name: str) -> RunDirectory:
        """The run directory of a release that cells share."""
        return RunDirectory(root=self.root / "runs" / f"release-{name}")

    def finished(self, cells: Iterable[Cell]) -> set[str]:
        """The digests of finished cells."""
        there = _stems(self.parts)
        return {cell.digest for cell in cells if cell.digest in there}

    def add(self, cell: Cell, rows: Sequence[Row]) -> None:
        """Keep the rows of a finished cell."""
        # The result first: a crash in between leaves both, and a part outranks a failure.
        write_rows(rows, self.parts / f"{cell.digest}.parquet", private=True)
        (self.failed / f"{cell.digest}.parquet").unlink(missing_ok=True)

    def add_failure(self, cell: Cell, row: Row) -> None:
        """Keep the cause; the cell stays unfinished."""
        write_rows([row], self.failed / f"{cell.digest}.parquet", private=True)

    def holds(self, cells: Sequence[Cell]) -> bool:
        """Whether the tables are those of exactly these cells, all finished; no row is read for that."""
        public = [cell.digest for cell in cells if self._is_public(cell)]
        return _digests(self.results) == public and set(_digests(self.private_results)) == {c.digest for c in cells}

    def assemble(self, cells: Sequence[Cell]) -> None:
        """Write both tables for these cells: of those that have no result, that they failed.

        Rows that the operator's table holds already are taken from there, so that only new parts are read.
        """
        digests = [cell.digest for cell in cells]
        # Results first: a crash may have left a failure beside the result that came later.
        done = _gathered(digests, self.parts, known=self.private_results)
        finished = set(done["digest"].to_pylist())
        failed = _gathered([digest for digest in digests if digest not in finished], self.failed)
        rows = _in_order(digests, pa.concat_tables([done, failed]))
        write_table(rows, self.private_results, private=True)
        write_table(publishable(rows, unprotected=self.publish_unprotected), self.results)

    def _is_public(self, cell: Cell) -> bool:
        return cell.config.is_private or self.publish_unprotected


def open_sweep_folder(root: Path, sweep: SweepConfig) -> SweepFolder:
    """The folder of a sweep: a new one, or one of an earlier sweep, whose cells are found by their digests.

    RunDirectoryError for a folder that holds something else.
    """
    folder = SweepFolder(root=root, publish_unprotected=sweep.publish_unprotected)
    if root.exists() and any(root.iterdir()) and not (folder.parts.is_dir() or (root / "parts").is_dir()):
        raise RunDirectoryError(f"{root}: not empty and no sweep; give another folder with --out.")
    (root / "runs").mkdir(parents=True, exist_ok=True)
    private_folder(folder.private)
    for path in (folder.votes, folder.parts, folder.failed):
        path.mkdir(exist_ok=True)
    _take_back_parts(folder)
    return folder


def _take_back_parts(folder: SweepFolder) -> None:
    """Move what earlier versions kept in the open, run times and causes of failures, to where it is private.

    Tables and pages that show it are deleted, and assembled anew. An interrupted move is simply done again.
    """
    for name, target in (("parts", folder.parts), ("failed", folder.failed)):
        source = folder.root / name
        if not source.is_dir():
            continue
        # Before the move: once the old folder is gone, nothing tells that these show what was in it.
        for path in (folder.results, folder.report, folder.private_results, folder.private_report):
            path.unlink(missing_ok=True)
        for path in source.glob("*.parquet"):
            kept = target / path.name
            secret = [read_table(kept).filter(pc.field("epsilon_is_data_dependent"))] if kept.exists() else []
            write_table(pa.concat_tables([read_table(path), *secret]), kept, private=True)
            path.unlink()
        shutil.rmtree(source)


@contextmanager
def sole_driver(folder: SweepFolder, sweep: SweepConfig) -> Iterator[None]:
    """Keep a second driver out of the folder, and leave the sweep in it. RunDirectoryError where one is at work."""
    with sole_worker(folder.root, "fairpate compare"):
        write_text(folder.config, yaml.safe_dump(sweep.model_dump(mode="json"), sort_keys=False))
        yield


def _stems(folder: Path) -> set[str]:
    return {path.name.removesuffix(".parquet") for path in folder.iterdir() if path.suffix == ".parquet"}


def _digests(table: Path) -> list[str]:
    """The digests of a table's finished rows; none where there is no readable table."""
    try:
        columns = pq.read_table(table, columns=["digest"], filters=[("status", "=", "ok")])
    except (OSError, pa.ArrowInvalid):
        return []
    digests: list[str] = columns["digest"].to_pylist()
    return digests


def _gathered(digests: Sequence[str], parts: Path, *, known: Path | None = None) -> pa.Table:
    """The rows of the parts that are there, in the order of ``digests``; read from ``known`` as far as it has them."""
    there = _stems(parts)
    wanted = [digest for digest in digests if digest in there]
    found = _finished_rows(known)
    read = set(found["digest"].to_pylist())
    new = [read_table(parts / f"{digest}.parquet") for digest in wanted if digest not in read]
    return _in_order(wanted, pa.concat_tables([found, *new]))


def _finished_rows(path: Path | None) -> pa.Table:
    """The rows of a table that are results; none where there is no readable table."""
    try:
        table = SCHEMA.empty_table() if path is None or not path.exists() else read_table(path)
    except RecordsTableError:
        return SCHEMA.empty_table()
    return table.filter(pc.equal(table["status"], "ok"))


def _in_order(digests: Sequence[str], table: pa.Table) -> pa.Table:
    """The rows of ``digests``, each with all that the table has of it."""
    rows_of: dict[str, list[int]] = {}
    for row, digest in enumerate(table["digest"].to_pylist()):
        rows_of.setdefault(digest, []).append(row)
    order = [row for digest in digests for row in rows_of.get(digest, [])]
    return table.take(pa.array(order, pa.int64()))
