"""`fairpate aggregate`: the aggregator on votes that were made elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairpate.app.cli.options import Out, Overrides
from fairpate.app.terminal.console import facts
from fairpate.app.terminal.output import Output
from fairpate.config import ConfigError
from fairpate.meaning import delta_text
from fairpate.types import UsageError

if TYPE_CHECKING:
    from fairpate.app.rundir import RunDirectory

_UNIT = "Whose presence is protected, such as hospital: you attest that each touches one vote of a query at most."


def aggregate(
    votes: Annotated[Path, typer.Argument(help="CSV or Parquet: a row per public record, a column per voter.")],
    unit: Annotated[str, typer.Option(help=_UNIT)],
    classes: Annotated[str, typer.Option(help="All classes, by commas: public constants.")],
    voters: Annotated[
        int | None, typer.Option(min=2, help="A column per class instead: counts of so many voters each.")
    ] = None,
    features: Annotated[str | None, typer.Option(help="Columns of numbers for a student, by commas.")] = None,
    id_column: Annotated[str, typer.Option("--id", help="Column of the public records' names.")] = "record_id",
    group: Annotated[str, typer.Option(help="Column of their public groups.")] = "group",
    test: Annotated[
        Path | None, typer.Option(help="Test records that measure the student: the same columns, and true labels.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Column of the test records' true labels, with --test; none: label.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the data set, in the odometer; none: the file's.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="To publish; the noise follows from it.")] = None,
    delta: Annotated[float | None, typer.Option(help="At which epsilon is stated.")] = None,
    mechanism: Annotated[
        str | None, typer.Option(help="{threshold: 8, threshold_stddev_votes: 2, noise_stddev_votes: 1}, instead.")
    ] = None,
    overrides: Overrides = None,
    out: Out = None,
) -> Output:
    """Release labels from votes made elsewhere: one ledger, one price, and a student where there are features."""
    from fairpate.app.aggregate import aggregate as run_aggregator
    from fairpate.app.terminal.progress import Reporter

    if label is not None and test is None:
        raise UsageError("--label: read only with --test; give that too, or leave --label out.")
    if not votes.is_file():
        raise ConfigError(f"{votes}: no such file; give the CSV or Parquet file of the votes.")
    columns = {"id": id_column, "group": group, "features": _listed(features), "name": name}
    told = {"path": str(votes), "unit": unit, "classes": _listed(classes), "num_voters": voters}
    tested = {"test": None if test is None else str(test), "label": label or "label"}
    given = {"votes": told | columns | tested | {"are_counts": voters is not None}}
    target = {"target.epsilon": epsilon, "target.delta": delta, "out": None if out is None else str(out)}
    options = [f"{field}={json.dumps(value)}" for field, value in target.items() if value is not None]
    options += [] if mechanism is None else [f"aggregator.mechanism={mechanism}"]
    return _outcome(run_aggregator(given, [*(overrides or []), *options], Reporter()))


def _outcome(run: RunDirectory) -> Output:
    """What was released, at what price, and what a student made of it."""
    from fairpate.app.rundir import read_json, read_statement
    from fairpate.app.terminal.summary import measured_rows
    from fairpate.evaluation.page import epsilon_text

    statement = read_statement(run)
    queries = statement.queries
    assert queries is not None
    stated = "none: no guarantee" if statement.epsilon is None else epsilon_text(statement.epsilon)
    rows = [
        ("epsilon", f"{stated} at delta {delta_text(statement.delta)} ({statement.relation} {statement.unit})"),
        ("attested", f"each {statement.unit} touches one vote of a query at most"),
        ("labels released", f"{queries.answered} of {queries.submitted} queries: {run.labels}"),
    ]
    if run.student.exists():
        rows += [*measured_rows(read_json(run.metrics)), ("model", str(run.student))]
    files = {"labels": run.labels, "model": run.student if run.student.exists() else None, "statement": run.statement}
    return Output(
        facts={"run": run.root, "statement": statement, "files": files},
        words=facts([*rows, ("statement", str(run.statement))]),
    )


def _listed(names: str | None) -> list[str]:
    return [name.strip() for name in names.split(",")] if names else []
