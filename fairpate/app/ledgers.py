"""What `fairpate ledger` prints and writes: for the operator, and safe while a service writes.

Sums of a data set are of releases under one unit and one relation; those under others are not in them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from aggregator import audit
from aggregator.files import ledger_files
from fairpate.app.odometer import Odometer
from fairpate.app.receipt import OdometerError
from fairpate.app.rundir import RunDirectory, RunFolderError
from fairpate.app.terminal import facts
from fairpate.evaluation.page import epsilon_text


def ledger_path(path: Path) -> Path:
    """The ledger of a run directory, or the file itself. RunFolderError where nothing of a ledger is."""
    ledger = RunDirectory(root=path).ledger if path.is_dir() else path
    if not ledger_files(ledger):
        raise RunFolderError(f"{ledger}: no ledger; give a ledger file, or a run of a method that asks teachers.")
    return ledger


def describe_verified(path: Path) -> Table:
    """The summary of a ledger whose chain holds. LedgerError if it does not."""
    summary = dataclasses.asdict(audit.verify(ledger_path(path)))
    return facts((name.replace("_", " "), str(value)) for name, value in summary.items())


def export(path: Path, out: Path) -> None:
    """Write every entry to a Parquet or JSON file. LedgerError for a ledger that cannot be trusted."""
    audit.export(ledger_path(path), out)


def last_charges(path: Path, count: int) -> Table:
    """The last ``count`` charges."""
    rows: Sequence[Any] = list(audit.rows(ledger_path(path)))[-count:]
    names = [field.name for field in dataclasses.fields(rows[0])] if rows else []
    table = Table(*names, box=SIMPLE_HEAD)
    for row in islice(rows, count):
        table.add_row(*(str(getattr(row, name)) for name in names))
    return table


def describe_totals(*, data: str | None, delta: float) -> Table | str:
    """What all releases cost together, per data set, unit and relation. OdometerError, and for a data set without."""
    totals = Odometer().totals(delta=delta, data=data)
    if data is None and not totals:
        return "No release is counted yet."
    if data is not None and not totals:
        raise OdometerError(
            f"{data}: no release is counted; `fairpate ledger total` lists the data sets that have one."
        )
    table = Table("data set", "unit", "relation", "releases", f"epsilon at {delta:g}", "limit", "not private")
    for total in totals:
        limit = "none" if total.epsilon_limit is None else f"{total.epsilon_limit:g}"
        counts = (str(total.releases), epsilon_text(total.epsilon), limit, str(total.not_private))
        table.add_row(total.data, total.unit, total.relation, *counts)
    return table
