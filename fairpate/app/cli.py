"""The command line: parse, build, run, close.

What a user can mend ends in one message on standard error that names the field, the value and the remedy, and a
non-zero exit; only a defect of ours shows a traceback.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fairpate import __version__
from fairpate.config import DataConfig, RunConfig, load_config

app = typer.Typer(
    help="Private and fair learning from many teachers, with an epsilon that is true.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Data sets: what there is, where it comes from, what is in it.", no_args_is_help=True)
app.add_typer(data_app, name="data")

ConfigFile = Annotated[Path | None, typer.Argument(help="YAML configuration; none runs the embedded colour digits.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="section.field=value, on top of the file.")]
Out = Annotated[Path | None, typer.Option(help="Run directory; an earlier run of the same configuration goes on.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder with the publisher's files, instead of FAIRPATE_DATA.")]
OptionValues = Annotated[list[str] | None, typer.Option("--option", help="The loader's own option, name=value.")]
RunFolder = Annotated[Path, typer.Argument(help="A run directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Folder = Annotated[Path, typer.Argument(help="Folder to write.")]
DatasetName = Annotated[str, typer.Argument(help="A name from `fairpate data list`.")]

_DEMO = Path(__file__).with_name("color_digits.yaml")
_INTERRUPTED = 130


def main() -> None:
    """Entry point: turns a user's error into one message and a non-zero exit."""
    try:
        code = app(standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except Exception as error:
        if not _is_the_users(error):
            raise
        code = _fail(_message(error))
    if code == _INTERRUPTED:
        _fail("Interrupted; what was finished is kept, and the same command goes on from there.")
    if code:
        sys.exit(code)


def _is_the_users(error: Exception) -> bool:
    """Whether the error is something the user can mend: bad input, a missing file, a cluster that is not there."""
    from fairpate.types import UserError

    return isinstance(error, (UserError, ValueError, OSError)) or type(error).__module__.startswith(("click", "typer"))


def _message(error: Exception) -> str:
    format_message = getattr(error, "format_message", None)
    return str(format_message() if callable(format_message) else error) or type(error).__name__


def _fail(message: str) -> int:
    Console(stderr=True, highlight=False).print(f"[bold red]error[/] {_escaped(message)}", soft_wrap=True)
    return 1


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


@app.command()
def run(config: ConfigFile = None, overrides: Overrides = None, out: Out = None, data_dir: DataDir = None) -> None:
    """Run every stage: data, teachers, votes, aggregator, student, evaluation, reports."""
    resolved = _with_places(load_config(config or _DEMO, overrides), out=out, data_dir=data_dir)
    from fairpate.app.pipeline import run_pipeline
    from fairpate.app.progress import Reporter
    from fairpate.app.summary import summarise

    finished = run_pipeline(resolved, Reporter())
    Console(highlight=False).print(summarise(finished))


@app.command()
def report(folder: RunFolder) -> None:
    """Write the two reports of a finished run again; nothing is trained, asked or charged."""
    from fairpate.app.pipeline import run_pipeline
    from fairpate.app.progress import Reporter
    from fairpate.app.rundir import open_run_directory
    from fairpate.app.summary import summarise

    found, config = open_run_directory(folder)
    found.require_finished()
    run_pipeline(config.model_copy(update={"out": found.root}), Reporter(quiet=True))
    Console(highlight=False).print(summarise(found))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@data_app.command("list")
def list_data(data_dir: DataDir = None) -> None:
    """Every data set with its task, sensitive attribute, size and licence."""
    from fairpate.app.summary import listing_table
    from fairpate.data import list_datasets

    Console().print(listing_table(list_datasets(data_dir or _data_dir_from_environment())))


@data_app.command("fetch")
def fetch_data(name: DatasetName, data_dir: DataDir = None, options: OptionValues = None) -> None:
    """Download a data set from its publisher and check it against its pinned checksum."""
    from fairpate.data import fetch

    target = data_dir or _data_dir_from_environment()
    if target is None:
        raise ValueError("No folder for the files: give --data-dir, or set FAIRPATE_DATA.")
    for path in fetch(name, target, options=_data_config(name, options, None).options):
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
        Console(highlight=False).print(describe_table(description))


@data_app.command("export")
def export_data(name: DatasetName, folder: Folder, data_dir: DataDir = None, options: OptionValues = None) -> None:
    """Write the four splits as Parquet, one file each. The private split is private: keep the folder to yourself."""
    from fairpate.data import load_dataset, save_dataset

    save_dataset(load_dataset(_data_config(name, options, data_dir)), folder)
    typer.echo(str(folder))


def _data_config(name: str, options: list[str] | None, data_dir: Path | None) -> DataConfig:
    settings = [f"data.options.{option}" for option in options or []]
    return _at(load_config(None, [f"data.name={name}", *settings]).data, data_dir)


def _with_places(config: RunConfig, *, out: Path | None, data_dir: Path | None) -> RunConfig:
    return config.model_copy(update={"out": out or config.out, "data": _at(config.data, data_dir)})


def _at(config: DataConfig, data_dir: Path | None) -> DataConfig:
    return config if data_dir is None else config.model_copy(update={"data_dir": data_dir})


def _data_dir_from_environment() -> Path | None:
    folder = os.environ.get("FAIRPATE_DATA")
    return Path(folder) if folder else None
