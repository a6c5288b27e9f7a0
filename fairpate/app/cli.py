"""The command line: parse, build, run, close.

What a user can fix ends in one message on standard error that names the field, the value and the remedy. Exit codes:
2 for a request that cannot be carried out as written (an option, a name, a configuration, a place to write to), 1 where
something else failed (a file of data, a damaged run, a service, a cluster), 130 and 143 for an interrupt and SIGTERM.
Only a defect of ours shows a traceback.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperCommand, TyperOption

from fairpate import __version__
from fairpate.app.terminal import discard_output, ended_by_signals, terminal
from fairpate.config import (
    BACKBONES,
    ConfigError,
    DataConfig,
    apply_override,
    parse_config,
    read_yaml,
)
from fairpate.files import check_output_file, check_output_folder
from fairpate.types import UsageError, UserError

if TYPE_CHECKING:
    from fairpate.methods.definition import Method

app = typer.Typer(
    help="Private and fair learning from many teachers, with an epsilon that is true.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Data sets: what there is, where it comes from, what is in it.", no_args_is_help=True)
app.add_typer(data_app, name="data")
ledger_app = typer.Typer(
    help="A run's ledger, and what all releases cost together. For the operator.", no_args_is_help=True
)
app.add_typer(ledger_app, name="ledger")

ConfigFile = Annotated[Path | None, typer.Argument(help="YAML configuration; none runs the embedded colour digits.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="section.field=value, on top of the file.")]
Out = Annotated[Path | None, typer.Option(help="Run directory; an earlier run of the same configuration goes on.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder with the publisher's files, instead of FAIRPATE_DATA.")]
Weights = Annotated[
    str | None, typer.Option(help="File that every ResNet and DenseNet starts from, or `imagenet`: torchvision's own.")
]
OptionValues = Annotated[list[str] | None, typer.Option("--option", help="The loader's own option, name=value.")]
RunFolder = Annotated[Path, typer.Argument(help="A run directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Folder = Annotated[Path, typer.Argument(help="Folder to write.")]
MethodOption = Annotated[str | None, typer.Option(help="Its name.")]
RunOrLedger = Annotated[Path, typer.Argument(help="A run directory, or a ledger file.")]
Words = Annotated[list[str] | None, typer.Argument(help="[URL] and one command; none opens a shell.")]
Host = Annotated[str, typer.Option(help="Address to listen on; beyond loopback only with tokens.")]
AnalystToken = Annotated[Path | None, typer.Option(help="Analysts' token file, instead of FAIRPATE_ANALYST_TOKEN.")]
OperatorToken = Annotated[Path | None, typer.Option(help="Operator's token file, instead of FAIRPATE_OPERATOR_TOKEN.")]
Quota = Annotated[float, typer.Option(help="New queries per analyst's token and day.")]
DatasetName = Annotated[str, typer.Argument(help="A name from `fairpate data list`, or a declaration.")]

_DEMO = Path(__file__).with_name("color_digits.yaml")
_INTERRUPTED, _BROKEN_PIPE = 130, 141


def main() -> None:
    """Entry point: a user's error ends in one message and exit code 2 (bad usage) or 1, a signal in 128 + number."""
    code = 0
    with ended_by_signals() as ending:
        try:
            code = _exit_code()
        except BaseException:
            if ending.number is None:
                raise
    if ending.number is not None:
        code = _interrupted(128 + ending.number)
    if code:
        sys.exit(code)


def _exit_code() -> int:
    try:
        code: int = app(standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except BrokenPipeError:  # `| head` has read enough
        discard_output()
        return _BROKEN_PIPE
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help was the message
            return 2
        if not _is_the_users(error):
            raise
        return _fail(_message(error), code=2 if _is_bad_usage(error) else 1)
    return _interrupted(code) if code == _INTERRUPTED else code


def _interrupted(code: int) -> int:
    return _fail("Interrupted; what was finished is kept, and the same command goes on from there.", code=code)


def _is_the_users(error: Exception) -> bool:
    """Whether the error is something the user can fix: bad input, a missing file, a cluster that is not there."""
    return isinstance(error, (UserError, ValueError, OSError)) or _is_bad_usage(error)


def _is_bad_usage(error: Exception) -> bool:
    return isinstance(error, UsageError) or type(error).__module__.startswith(("click", "typer"))


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, UserError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    format_message = getattr(error, "format_message", None)
    return str(format_message() if callable(format_message) else error) or type(error).__name__


def _fail(message: str, *, code: int = 1) -> int:
    terminal(stderr=True).print(Text.assemble(("error", "bold red"), " ", message), soft_wrap=True)
    return code


def _say(text: str) -> None:
    terminal(stderr=True).print(text, soft_wrap=True)


class _RunCommand(TyperCommand):
    """Its help names the methods there are."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The parent's, with the registry's names."""
        from fairpate.methods import method_names

        for parameter in self.params:
            if isinstance(parameter, TyperOption) and parameter.name == "method":
                parameter.help = f"One of {', '.join(method_names())}; or module:Class."
        super().format_help(ctx, formatter)


@app.command(cls=_RunCommand)
def run(
    config: ConfigFile = None,
    method: MethodOption = None,
    data: Annotated[
        str | None, typer.Option(help="A name from `fairpate data list`, or a declaration (.yaml).")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="To publish; the noise follows from it.")] = None,
    delta: Annotated[float | None, typer.Option(help="At which epsilon is stated.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of model and training; never of private noise.")] = None,
    overrides: Overrides = None,
    weights: Weights = None,
    out: Out = None,
    data_dir: DataDir = None,
) -> None:
    """Run one method: data, teachers and votes where it has some, model, evaluation, statement, report."""
    given = _data_named(data) | {"target.epsilon": epsilon, "target.delta": delta, "seed": seed}
    options = [f"{field}={json.dumps(value)}" for field, value in given.items() if value is not None]
    base = config or (_DEMO if data in (None, DataConfig().name) else None)
    resolved = _load(base, [*(overrides or []), *options], method, weights)
    from fairpate.app.progress import Reporter
    from fairpate.app.run import run_method
    from fairpate.app.summary import summarise

    finished = run_method(_with_places(resolved, out=out, data_dir=data_dir), Reporter())
    terminal().print(summarise(finished))


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Its fields, defaults and paper; none lists all.")] = None,
) -> None:
    """List every method with what it protects and its source, or one with all of its fields."""
    from fairpate.app.catalogue import describe_method, list_methods

    terminal().print(list_methods() if name is None else describe_method(name))


class _QueryCommand(TyperCommand):
    """A negative number is a wrong record, and no option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The parent's. UsageError for a negative number."""
        for word in args:
            if word[:1] == "-" and word[1:2].isdecimal():
                raise UsageError(f"{word}: expected a record's number, from 0 on, or a range such as 0:500.")
        return super().parse_args(ctx, args)


@app.command()
def compare(
    config: Annotated[Path, typer.Argument(help="YAML file: methods, data sets, seeds, grids.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep; what is finished in it is kept.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Run methods over data sets, seeds and grids; only what is missing runs. Ends in one table and one frontier."""
    from fairpate.app.compare.cells import load_sweep
    from fairpate.app.compare.report import compare_methods, summarise_comparison

    sweep = load_sweep(config, overrides or [], data_dir=data_dir)
    check_output_folder(out or sweep.out or Path("runs"), "--out")
    comparison = compare_methods(sweep, out=out, data_dir=data_dir, folder=config.parent, title=config.stem)
    terminal().print(summarise_comparison(comparison), crop=False)
    if comparison.failed:
        raise typer.Exit(_fail(f"{len(comparison.failed)} cells failed; the same command tries them again."))


@app.command()
def specify(
    epsilon: Annotated[float | None, typer.Option(help="At most this privacy budget.")] = None,
    disparity: Annotated[float | None, typer.Option(help="At most this gap between groups.")] = None,
    coverage: Annotated[float | None, typer.Option(help="At least this share of records answered.")] = None,
    accuracy: Annotated[float | None, typer.Option(help="At least this accuracy on them.")] = None,
    frontier: Annotated[Path | None, typer.Option(help="A results.parquet; none takes the newest in runs/.")] = None,
    data: Annotated[str | None, typer.Option(help="Only this data set of the table.")] = None,
    transfer: Annotated[Path | None, typer.Option(help="Another table: apply there what is chosen here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Which guarantees are achievable together: at what accuracy, by which configuration; or the nearest ones."""
    from fairpate.app.specify import describe_answer, specify_guarantees
    from fairpate.evaluation.selection import Demand

    with _arguments():
        demand = Demand(epsilon=epsilon, disparity=disparity, coverage=coverage, accuracy=accuracy)
    answer = specify_guarantees(demand, frontier, data=data, transfer_to=transfer)
    if as_json:
        typer.echo(json.dumps(answer.to_json(), indent=2, allow_nan=False))
    else:
        terminal().print(describe_answer(answer), crop=False)  # commands to copy, in one line


@app.command()
def plan(
    data: Annotated[str, typer.Option(help="A name from `fairpate data list`: its classes and its public pool.")],
    epsilon: Annotated[float, typer.Option(min=0, help="Target.")],
    delta: Annotated[float, typer.Option(min=0, max=1, help="Target.")] = 1e-5,
    teachers: Annotated[list[int] | None, typer.Option(min=2, help="Numbers of teachers to look at.")] = None,
    queries: Annotated[list[int] | None, typer.Option(min=1, help="Numbers of queries to look at.")] = None,
    agreement: Annotated[
        float | None, typer.Option(help="Assumed share of teachers that are right, on average; none: 0.75.")
    ] = None,
    spread: Annotated[
        float | None, typer.Option(help="Assumed standard deviation of that share over queries; none: 0.2.")
    ] = None,
    votes: Annotated[Path | None, typer.Option(help="A run's real votes instead. For the operator: private.")] = None,
    as_json: AsJson = False,
    data_dir: DataDir = None,
) -> None:
    """Noise from budget: teachers, threshold, noises and queries of a PATE method that fit epsilon and delta."""
    from fairpate.app.plan import describe, plan_for, proposal_json

    with _arguments():
        proposal = plan_for(
            _data_config(data, None, data_dir),
            epsilon=epsilon,
            delta=delta,
            teacher_counts=teachers or None,
            query_counts=queries or [100, 300, 1000],
            agreement=agreement,
            spread=spread,
            votes=votes,
        )
    if as_json:
        typer.echo(proposal_json(proposal))
    else:
        terminal().print(describe(proposal))


@app.command()
def card(
    folder: RunFolder,
    intended_use: Annotated[str | None, typer.Option(help="What the model is for, in your words.")] = None,
    out_of_scope: Annotated[str | None, typer.Option(help="What it must not be used for.")] = None,
    contact: Annotated[str | None, typer.Option(help="Who answers questions about it.")] = None,
) -> None:
    """Write the privacy-and-fairness card of a published student, as HTML and JSON, beside it."""
    from fairpate.app.card import write_card

    for path in write_card(folder, intended_use=intended_use, out_of_scope=out_of_scope, contact=contact):
        typer.echo(str(path))


@app.command()
def report(folder: RunFolder) -> None:
    """Write the reports of a finished run again; nothing is trained, asked or charged."""
    from fairpate.app.progress import Reporter
    from fairpate.app.run import finished_run, run_method
    from fairpate.app.summary import summarise

    found, config = finished_run(folder)
    terminal().print(summarise(run_method(config.model_copy(update={"out": found.root}), Reporter(quiet=True))))


@app.command()
def serve(
    folder: RunFolder,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8517,
    analyst_token_file: AnalystToken = None,
    operator_token_file: OperatorToken = None,
    quota: Quota = math.inf,
    data_dir: DataDir = None,
    student: Annotated[bool, typer.Option("--student", help="Serve the published student on Ray Serve.")] = False,
    replicas: Annotated[int, typer.Option(min=1, help="Copies of the student.")] = 2,
    detach: Annotated[bool, typer.Option("--detach", help="Leave it on the cluster at RAY_ADDRESS.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End what --detach left.")] = False,
) -> None:
    """Serve a finished run over HTTP: its aggregator, or with --student its published model."""
    from fairpate.app import serve as serving

    if stop:
        serving.stop_aggregator(folder, say=_say)
    elif student:
        serving.serve_student_of(folder, host=host, port=port, num_replicas=replicas, say=_say)
    else:
        files = {"analyst_file": analyst_token_file, "operator_file": operator_token_file}
        with _arguments():
            settings = serving.settings(host=host, port=port, daily_quota=quota, **files)
        serving.serve_aggregator(folder, settings, data_dir=data_dir, detach=detach, say=_say)


@app.command(cls=_QueryCommand)
def query(
    words: Words = None,
    ids: Annotated[str | None, typer.Option(help="Pool records such as 0:500; prints their labels.")] = None,
    out: Annotated[Path | None, typer.Option(help="A .parquet or .csv file for the batch's replies.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=1024, help="Queries in one request.")] = 256,
    token_file: Annotated[Path | None, typer.Option(help="File with your token, instead of FAIRPATE_TOKEN.")] = None,
) -> None:
    """Query a running aggregator: a shell, one command (`fairpate query ask 17`), or a batch (--ids)."""
    from fairpate.app.query import query as run_query

    run_query(words or [], ids=ids, out=out, batch_size=batch_size, token_file=token_file)


@ledger_app.command("verify")
def verify_ledger(path: RunOrLedger) -> None:
    """Check every entry against the chain; a service may be writing meanwhile."""
    from fairpate.app.ledgers import describe_verified

    terminal().print(describe_verified(path))


@ledger_app.command("export")
def export_ledger(path: RunOrLedger, out: Annotated[Path, typer.Argument(help="A .parquet or .json file.")]) -> None:
    """Write every entry, votes included. Private: keep the file to yourself."""
    check_output_file(out, "out", suffixes=(".parquet", ".json"))
    from fairpate.app.ledgers import export

    export(path, out)
    typer.echo(str(out))


@ledger_app.command("show")
def show_ledger(
    path: RunOrLedger, last: Annotated[int, typer.Option(min=1, help="How many of the last charges.")] = 20
) -> None:
    """Print the last charges and what became of them. Private."""
    from fairpate.app.ledgers import last_charges

    terminal().print(last_charges(path, last))


@ledger_app.command("total")
def total_of_releases(
    data: Annotated[str | None, typer.Option(help="Only this data set.")] = None,
    delta: Annotated[float, typer.Option(help="At which the sums are stated.")] = 1e-5,
) -> None:
    """Print what all releases on each data set cost together: runs, trainings, sweeps and services of this operator."""
    from fairpate.app.ledgers import describe_totals

    _checked_delta(delta)
    terminal().print(describe_totals(data=data, delta=delta))


@ledger_app.command("limit")
def limit_releases(
    data: DatasetName,
    epsilon: Annotated[float, typer.Option(help="At most this, for all releases together.")],
    unit: Annotated[str, typer.Option(help="record, or sensitive attribute.")] = "record",
    delta: Annotated[float, typer.Option(help="At which the sum is compared.")] = 1e-5,
) -> None:
    """Refuse from now on what would make all releases on a data set cost more than this."""
    from typing import get_args

    from fairpate.app.odometer import Odometer
    from fairpate.data import REGISTRY
    from fairpate.names import nearest
    from fairpate.types import Unit

    units: dict[str, Unit] = {name: name for name in get_args(Unit)}
    if unit not in units:
        raise ConfigError(f"--unit: expected one of {', '.join(units)}, got {unit}.")
    if not 0 < epsilon < float("inf"):
        raise ConfigError(f"--epsilon: expected 0 < epsilon < inf, got {epsilon}.")
    _checked_delta(delta)
    odometer = Odometer()
    odometer.set_limit(data, units[unit], epsilon=epsilon, delta=delta)
    typer.echo(f"{data}, unit {unit}: at most epsilon {epsilon:g} at delta {delta:g}")
    known = dict.fromkeys([*REGISTRY, *(total.data for total in odometer.totals(delta=delta))])
    if data not in known:  # a data set given from Python may have any name, and a mistyped one would never be limited
        typer.echo(f"{data} is no known data set, and nothing was released on it yet{nearest(data, known)}", err=True)


def _checked_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ConfigError(f"--delta: expected 0 < delta < 1, got {delta}.")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@data_app.command("list")
def list_data(data_dir: DataDir = None) -> None:
    """Every data set with its task, sensitive attribute, size and licence."""
    if data_dir is not None and not data_dir.is_dir():
        raise ConfigError(f"--data-dir: {data_dir} is no folder; give the one with the publishers' files.")
    from fairpate.app.summary import listing_table
    from fairpate.data import list_datasets

    terminal().print(listing_table(list_datasets(data_dir or _data_dir_from_environment())))


@data_app.command("fetch")
def fetch_data(name: DatasetName, data_dir: DataDir = None, options: OptionValues = None) -> None:
    """Download a data set from its publisher and check it against its pinned checksum."""
    from fairpate.data import fetch

    target = data_dir or _data_dir_from_environment()
    if target is None:
        raise ConfigError("No folder for the files: give --data-dir, or set FAIRPATE_DATA.")
    options_of_loader = _data_config(name, options, None).options
    for path in fetch(name, target, options=options_of_loader, console=terminal(stderr=True)):
        typer.echo(str(path))


@data_app.command("describe")
def describe_data(
    name: DatasetName, data_dir: DataDir = None, options: OptionValues = None, as_json: AsJson = False
) -> None:
    """Load a data set and count its records by split, group and label. The counts are exact: do not publish them."""
    from fairpate.app.summary import describe_table
    from fairpate.data import describe

    description = describe(_data_config(name, options, data_dir))
    if as_json:
        typer.echo(json.dumps(asdict(description), indent=2))
    else:
        terminal().print(describe_table(description))


@data_app.command("export")
def export_data(name: DatasetName, folder: Folder, data_dir: DataDir = None, options: OptionValues = None) -> None:
    """Write the four splits as Parquet, one file each. The private split is private: keep the folder to yourself."""
    check_output_folder(folder, "folder")
    from fairpate.data import load_dataset, save_dataset

    save_dataset(load_dataset(_data_config(name, options, data_dir)), folder)
    typer.echo(str(folder))


@contextmanager
def _arguments() -> Iterator[None]:
    """What an argument's own check refuses is bad usage."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise ConfigError(str(error)) from error


def _data_named(data: str | None) -> dict[str, Any]:
    """The fields that name a data set; a declaration of one's own is known by its ending."""
    if data is None or not data.endswith((".yaml", ".yml")):
        return {"data.name": data}
    from fairpate.data.declaration import read_declaration

    return {"data.name": read_declaration(Path(data)).name, "data.declaration": data}


def _data_config(name: str, options: list[str] | None, data_dir: Path | None) -> DataConfig:
    values = {field.removeprefix("data."): value for field, value in _data_named(name).items()}
    for option in options or []:
        apply_override(values, f"options.{option}")
    return _at(parse_config(values, DataConfig), data_dir)


def _load(path: Path | None, overrides: list[str], method: str | None, weights: str | None) -> Method:
    """The configuration, with ``weights`` for all of its models that can start from a file."""
    from fairpate.methods.load import load_method, merged

    if weights is None:
        return load_method(path, overrides, method=method)
    said = merged({} if path is None else read_yaml(path), overrides, method=method)
    named = {name: _model_name(said[name]) for name in ("teachers", "student") if name in said}
    starting = [section for section, name in named.items() if name in BACKBONES]
    if not starting:
        raise ConfigError(
            f"--weights: expected a model.name among {', '.join(BACKBONES)}, got {' and '.join(named.values())}; "
            f"set {' or '.join(f'{section}.model.name' for section in named)}."
        )
    files = [f"{section}.model.weights={json.dumps(weights)}" for section in starting]
    return load_method(path, [*overrides, *files], method=method)


def _model_name(section: Any) -> str:
    """As it stands there, before anything is checked."""
    model = section.get("model") if isinstance(section, dict) else None
    return str(model.get("name")) if isinstance(model, dict) else "none"


def _with_places(config: Method, *, out: Path | None, data_dir: Path | None) -> Method:
    if out is not None:
        check_output_folder(out, "--out")
    return config.model_copy(update={"out": out or config.out, "data": _at(config.data, data_dir)})


def _at(config: DataConfig, data_dir: Path | None) -> DataConfig:
    return config if data_dir is None else config.model_copy(update={"data_dir": data_dir})


def _data_dir_from_environment() -> Path | None:
    folder = os.environ.get("FAIRPATE_DATA")
    return Path(folder) if folder else None
