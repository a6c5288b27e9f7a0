"""The cost of choosing one of the private releases of a comparison by their results.

A user who compares models learned from several releases of the same records, and publishes the best, has seen all of
them: the choice costs what these releases cost together. The sentence is on the report of each run, on the page
of the comparison and on the terminal (:class:`fairpate.report.decision.Choice`).
"""

from collections.abc import Sequence
from decimal import Decimal

from fairpate.config import values_digest
from fairpate.releases.directory import RunDirectory
from fairpate.releases.log import ChoiceFolder, MetricsFolder, read_receipt
from fairpate.releases.odometer import RunCharge, composed_epsilon
from fairpate.report.decision import Choice
from fairpate.report.frontier import Row
from fairpate.run.publication import state_choice
from fairpate.run.sweep import Cell, SweepFolder, read_rows
from fairpate.types import RunRecord


def choices(cells: Sequence[Cell], rows: Sequence[Row], folder: SweepFolder) -> dict[str, Choice]:
    """Return for each data set, by its name in the odometer, what it costs to choose one of the releases that ``cells``
    made of it by their results ``rows``. A data set with one release is left out: a choice among cells that share a
    release costs no more.

    The cost is composed of the events in the receipts of the runs in ``folder``. It is the sum of the single costs
    where that is less, and where a receipt is on another machine.
    """
    of_cells = {cell.digest: cell for cell in cells}
    made: dict[str, list[tuple[Cell, RunRecord]]] = {}
    for row in rows:
        record, cell = row.record, of_cells.get(row.digest)
        if cell is None or record is None or row.is_unprotected or row.is_private or cell.config.is_seeded:
            continue
        made.setdefault(cell.config.data.name, []).append((cell, record))
    found = {data: _choice(released, folder) for data, released in made.items()}
    return {data: choice for data, choice in found.items() if choice is not None}


def _choice(released: Sequence[tuple[Cell, RunRecord]], folder: SweepFolder) -> Choice | None:
    """Return what it costs to choose one of the releases that cells made of one data set, which may protect different
    units; None for a single release. ``released``: the cells with their records."""
    # For each release a record of the cells that share it, the one with the largest epsilon; and the charges in the
    # receipts of these cells, None for a cell without a receipt.
    records: dict[str, RunRecord] = {}
    charges: dict[str, RunCharge | None] = {}
    for cell, record in released:
        shared = cell.config.shared_release
        # With private metrics each cell released a table of its own, too.
        is_own = shared is None or cell.config.evaluation.metrics == "private"
        name = cell.digest if is_own else values_digest(shared)  # type: ignore[arg-type]
        if name not in records or records[name].epsilon < record.epsilon:
            records[name] = record
        receipts = _receipts(cell, folder)
        charges |= {each.run: each for each in receipts} if receipts else {cell.digest: None}
    if len(records) < 2:
        return None
    if len({(each.unit, each.relation) for each in records.values()}) > 1:
        return Choice(num_releases=len(records), epsilon=None, delta=None)
    # As decimals, which add up without rounding.
    epsilon, delta = (
        float(sum(Decimal(repr(getattr(each, name))) for each in records.values())) for name in ("epsilon", "delta")
    )
    known = [each for each in charges.values() if each is not None]
    if len(known) == len(charges):
        least = max(each.delta for each in records.values())
        if (composed := composed_epsilon(known, delta=least)) <= epsilon:
            epsilon, delta = composed, least
    return Choice(num_releases=len(records), epsilon=epsilon, delta=delta)


def _receipts(cell: Cell, folder: SweepFolder) -> list[RunCharge]:
    """Return what was charged for the model of ``cell`` and its measurements, or for the release that it shares; empty
    if they are not in ``folder``."""
    run, shared = folder.run(cell), folder.shared_file(cell)
    # A release may be here whose run measured on another machine, and was charged for that there.
    if not RunDirectory(root=run).statement.is_file():
        return []
    roots = [run] if shared is None or shared.suffix == ".parquet" else [run, shared.parents[1]]
    released = [receipt for root in roots if (receipt := read_receipt(RunDirectory(root=root))) is not None]
    measured = [read_receipt(part(root=run)) for part in (MetricsFolder, ChoiceFolder)]
    return [*released, *filter(None, measured)] if released else []


def state_choices(cells: Sequence[Cell], folder: SweepFolder) -> dict[str, Choice]:
    """Write into the runs of ``cells``, and on their reports, what a choice among them by results costs, and return it
    (:func:`choices`). Runs on other machines are left as they are."""
    rows = read_rows(folder.results)
    known, done = choices(cells, rows, folder), {row.digest for row in rows if row.record is not None}
    for cell in cells:
        run = RunDirectory(root=folder.run(cell))
        if cell.digest in done and run.statement.is_file() and run.metrics.is_file():
            state_choice(run, known.get(cell.config.data.name))
    return known
