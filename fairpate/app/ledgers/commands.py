"""What `fairpate ledger` prints and writes: for the operator, and safe while a service writes.

Sums of a data set are of releases under one unit and one relation; those under others are not in them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aggregator.ledger import audit, audit_log
from aggregator.ledger.files import head_path, ledger_files
from aggregator.ledger.ledger import read_ledger
from aggregator.ledger.stores import shown
from fairpate.app.ledgers import copies as ledger_copies
from fairpate.app.ledgers.copies import labels_held
from fairpate.app.ledgers.place import LedgerPlace, has_ledger, place_of
from fairpate.app.rundir import RunDirectory, RunFolderError, open_run_directory
from fairpate.app.spending.odometer import Odometer
from fairpate.app.spending.receipt import OdometerError
from fairpate.app.terminal.console import listing
from fairpate.app.terminal.output import Output
from fairpate.evaluation.page import epsilon_text
from fairpate.meaning import delta_text
from fairpate.methods.voting import VotingMethod

_KEY_SHOWN = 12  # of 64 digits, which `--json` and an export hold whole


_SQLITE = b"SQLite format 3"


def ledger_of(path: Path) -> tuple[RunDirectory | None, LedgerPlace]:
    """The ledger of a run directory, or the file itself. RunFolderError where nothing of a ledger is."""
    run = RunDirectory(root=path) if path.is_dir() else None
    if run is not None and has_ledger(run):
        return run, place_of(run)
    if run is None and ledger_files(path) and not _is_other_file(path):
        return None, LedgerPlace(ledger=path)
    found = "no ledger" if path.exists() else "no such file or folder"
    raise RunFolderError(f"{path}: {found}; give a ledger file, or a run of a method that asks teachers.")


def _is_other_file(path: Path) -> bool:
    """Whether a file is none of a ledger, also of a damaged one: no head lies beside it, and it is no database."""
    if head_path(path).exists() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_SQLITE)) != _SQLITE


def verified_facts(path: Path) -> dict[str, Any]:
    """The summary of a ledger whose chain holds, and whether it holds what its run released. LedgerError if not."""
    run, place = ledger_of(path)
    summary = dataclasses.asdict(audit.verify(place.ledger, anchor=place.anchor))
    if run is not None and run.config.exists():
        config = open_run_directory(run.root)[1]
        if isinstance(config, VotingMethod):
            outcome = read_ledger(place.ledger)[2].outcome_of.get
            summary["released_labels"] = labels_held(run, config, outcome)
    if place.anchor is not None:
        summary["anchor"] = shown(place.anchor)
    return summary


def export(path: Path, out: Path) -> None:
    """Write every entry to a Parquet or JSON file. LedgerError for a ledger that cannot be trusted."""
    audit.export(ledger_of(path)[1].ledger, out)


def back_up(path: Path, out: Path) -> int:
    """Copy a ledger, verified, to a file; returns how many entries it has."""
    return ledger_copies.back_up(*ledger_of(path), out)


def audit_lines(path: Path, *, follow: bool, out: Path | None) -> Iterator[str]:
    """Write the audit log to ``out``, going on where it ends, or yield its lines; ``follow``: and every new one."""
    place = ledger_of(path)[1].ledger
    last = audit_log.START if out is None else audit_log.last_of(out)
    lines = audit_log.follow(place, last) if follow else audit_log.lines_after(place, last)
    if out is None:
        yield from (line for _, line in lines)
        return
    # For its owner only: lines name who asked, and when.
    descriptor = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with open(descriptor, "a", encoding="utf-8") as file:  # noqa: PTH123 - of the descriptor, with its rights
        for _, line in lines:
            file.write(line + "\n")
            if follow:
                file.flush()


def last_charges(path: Path, count: int) -> Output:
    """The last ``count`` charges."""
    rows: Sequence[Any] = list(audit.rows(ledger_of(path)[1].ledger))[-count:]
    names = [field.name for field in dataclasses.fields(audit.Row)]
    table = listing(*("charged (UTC)" if name == "at_s" else name for name in names))
    for row in rows:
        shown_row = dataclasses.replace(row, key=row.key[:_KEY_SHOWN])
        table.add_row(*(_cell(name, getattr(shown_row, name)) for name in names))
    return Output(facts={"charges": rows}, words=table)


def _cell(name: str, value: Any) -> str:
    """A value for people: times as dates, and nothing where nothing is known."""
    if name == "at_s":
        return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%S}" if value else ""
    return "" if value is None else str(value)


def describe_totals(*, data: str | None, delta: float) -> Output:
    """What all releases cost together, per data set, unit and relation. OdometerError, and for a data set without."""
    totals = Odometer().totals(delta=delta, data=data)
    if data is None and not totals:
        return Output(facts={"totals": []}, words="No release is counted yet.")
    if data is not None and not totals:
        raise OdometerError(
            f"{data}: no release is counted; `fairpate ledger total` lists the data sets that have one."
        )
    at = f"epsilon at {delta_text(delta)}"
    table = listing(
        "data set", "unit", "relation", "releases", f"{at}, fixed beforehand", "adaptive", "limit", "not private"
    )
    for total in totals:
        limit = "none" if total.epsilon_limit is None else f"{total.epsilon_limit:g}"
        sums = (epsilon_text(total.epsilon), epsilon_text(total.epsilon_adaptive))
        counts = (str(total.releases), *sums, limit, str(total.not_private))
        table.add_row(total.data, total.unit, total.relation, *counts)
    return Output(facts={"totals": totals}, words=table)
