"""`fairpate ledger`: a run's ledger, and what all releases cost together. For the operator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fairpate.app.cli.commands import Commands
from fairpate.app.cli.options import DatasetName, RunFolder, RunOrLedger
from fairpate.app.terminal.output import Output, is_for_program, say
from fairpate.app.terminal.progress import waiting
from fairpate.config import ConfigError
from fairpate.files import check_output_file
from fairpate.meaning import delta_text
from fairpate.types import UsageError

app = Commands(help="A run's ledger, and what all releases cost together. For the operator.", no_args_is_help=True)


@app.command("verify")
def verify_ledger(path: RunOrLedger) -> Output:
    """Check every entry against the chain; a service may be writing meanwhile."""
    from fairpate.app.ledgers.commands import verified_facts

    with waiting("ledger"):
        return Output(facts=verified_facts(path))


@app.command("audit")
def audit_ledger(
    path: RunOrLedger,
    follow: Annotated[bool, typer.Option("--follow", help="Then go on with every new entry.")] = False,
    out: Annotated[Path | None, typer.Option(help="A file that is gone on with; without: standard output.")] = None,
) -> Output:
    """Print who was charged with what, when, and whose limits changed, as JSON lines. Nothing depends on votes."""
    if out is not None:
        check_output_file(out, "--out")
    if follow and is_for_program():
        raise UsageError("--follow: has no end, and --json is one document; leave out --json, each line is JSON.")
    from fairpate.app.ledgers.commands import audit_lines

    lines = audit_lines(path, follow=follow, out=out)
    return Output(facts={"file": out, "entries": (json.loads(line) for line in lines)}, words=lines)


@app.command("backup")
def back_up_ledger(
    path: RunOrLedger, out: Annotated[Path, typer.Argument(help="A new .sqlite file; its .head lies beside it.")]
) -> Output:
    """Copy a ledger, every entry verified; a service may be writing meanwhile. Private: keep it to yourself."""
    check_output_file(out, "out", suffixes=(".sqlite",))
    from fairpate.app.ledgers.commands import back_up
    from fairpate.evaluation.page import counted

    with waiting("ledger"):
        entries = back_up(path, out)
    return Output(facts={"file": out, "entries": entries}, words=f"{out}: {counted(entries, 'entry', 'entries')}")


@app.command("restore")
def restore_ledger(
    copy: Annotated[Path, typer.Argument(help="A copy of `fairpate ledger backup`.")],
    folder: RunFolder,
    to: Annotated[
        str | None, typer.Option(help="postgresql://HOST/DATABASE#NAME, to go on there; without: where it was.")
    ] = None,
) -> Output:
    """Put a copy in the ledger's place, or go on with it in another; refused if it would forget a charge."""
    from fairpate.app.ledgers.copies import restore
    from fairpate.app.rundir import run_at

    with waiting("ledger"):
        place = restore(run_at(folder), copy, to=to)
    return Output(facts={"run": folder, "ledger": place}, words=f"The ledger of {folder} is {place}")


@app.command("anchor")
def anchor_ledger(
    folder: RunFolder,
    place: Annotated[str, typer.Argument(help="A file elsewhere, or postgresql://HOST/DATABASE#NAME.")],
) -> Output:
    """Note the last entry elsewhere too from the next start on, so that a rolled-back ledger is refused."""
    from fairpate.app.ledgers.place import add_anchor
    from fairpate.app.rundir import run_at

    with waiting("ledger"):
        anchor = add_anchor(run_at(folder), place)
    words = f"The last entry of {folder} is noted at {anchor}"
    return Output(facts={"run": folder, "anchor": anchor}, words=words)


@app.command("export")
def export_ledger(path: RunOrLedger, out: Annotated[Path, typer.Argument(help="A .parquet or .json file.")]) -> Output:
    """Write every entry, votes included. Private: keep the file to yourself."""
    check_output_file(out, "out", suffixes=(".parquet", ".json"))
    from fairpate.app.ledgers.commands import export

    with waiting("ledger"):
        export(path, out)
    return Output(facts={"file": out}, words=str(out))


@app.command("show")
def show_ledger(
    path: RunOrLedger, last: Annotated[int, typer.Option(min=1, help="How many of the last charges.")] = 20
) -> Output:
    """Print the last charges and what became of them. Private."""
    from fairpate.app.ledgers.commands import last_charges

    with waiting("ledger"):
        return last_charges(path, last)


@app.command("total")
def total_of_releases(
    data: Annotated[str | None, typer.Option(help="Only this data set.")] = None,
    delta: Annotated[float, typer.Option(help="At which the sums are stated.")] = 1e-5,
) -> Output:
    """Print what all releases on each data set cost together: runs, trainings, sweeps and services of this operator."""
    from fairpate.app.ledgers.commands import describe_totals

    _checked_delta(delta)
    with waiting("total"):
        return describe_totals(data=data, delta=delta)


@app.command("limit")
def limit_releases(
    data: DatasetName,
    epsilon: Annotated[float, typer.Option(help="At most this, for all releases together.")],
    unit: Annotated[
        str | None,
        typer.Option(
            help="record, person, sensitive attribute, or a declared one; without: record, which releases by person "
            "count in, or the only other unit that was released under."
        ),
    ] = None,
    delta: Annotated[float, typer.Option(help="At which the sum is compared.")] = 1e-5,
) -> Output:
    """Refuse from now on what would make all releases on a data set cost more, each chosen in view of earlier ones."""
    from fairpate.app.spending.odometer import Odometer
    from fairpate.data import REGISTRY
    from fairpate.names import nearest
    from fairpate.types import UNITS

    _checked_delta(delta)
    odometer = Odometer()
    released = dict.fromkeys(total.unit for total in odometer.totals(delta=delta) if total.data == data)
    units = dict.fromkeys((*UNITS, *released))  # also declared ones, of votes made elsewhere
    if unit is None:
        unit = "record" if len(released) != 1 or "person" in released else next(iter(released))
    if unit not in units:
        raise ConfigError(f"--unit: expected one of {', '.join(units)}, got {unit}.")
    if not 0 < epsilon < float("inf"):
        raise ConfigError(f"--epsilon: expected 0 < epsilon < inf, got {epsilon}.")
    spent = odometer.set_limit(data, unit, epsilon=epsilon, delta=delta)
    known = dict.fromkeys([*REGISTRY, *(total.data for total in odometer.totals(delta=delta))])
    if data not in known:  # a data set given from Python may have any name, and a mistyped one would never be limited
        say(f"{data} is no known data set, and nothing was released on it yet{nearest(data, known)}")
    if spent > epsilon:
        say(
            f"{data}, unit {unit}: earlier releases need a limit of {spent:.4g} where later ones may depend on them, "
            f"which is above {epsilon:g}: every new release is refused"
        )
    counted = "; releases by person count in" if unit == "record" else ""
    return Output(
        facts={"data": data, "unit": unit, "epsilon_limit": epsilon, "delta": delta, "is_known": data in known},
        words=f"{data}, unit {unit}: at most epsilon {epsilon:g} at delta {delta_text(delta)}{counted}",
    )


def _checked_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ConfigError(f"--delta: expected 0 < delta < 1, got {delta}.")
