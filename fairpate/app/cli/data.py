"""`fairpate data`: what data sets there are, where they come from, what is in them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from fairpate.app.cli.commands import Commands
from fairpate.app.cli.options import DataDir, DatasetName, OptionValues, data_config
from fairpate.app.terminal.output import Output
from fairpate.app.terminal.progress import Reporter, waiting
from fairpate.config import ConfigError
from fairpate.files import write_atomically
from fairpate.strict_json import strict

app = Commands(help="Data sets: what there is, where it comes from, what is in it.", no_args_is_help=True)


@app.command("list")
def list_data(data_dir: DataDir = None) -> Output:
    """Every data set with its task, sensitive attribute, size and licence."""
    if data_dir is not None and not data_dir.is_dir():
        raise ConfigError(f"--data-dir: {data_dir} is no folder; give the one with the publishers' files.")
    from fairpate.app.terminal.summary import listing_table
    from fairpate.data import list_datasets

    listings = list_datasets(data_dir or _data_dir_from_environment())
    told = ("name", "task", "sensitive", "rows", "licence")
    found = [{name: getattr(each.entry, name) for name in told} | {"here": each.present} for each in listings]
    return Output(facts={"data_sets": found}, words=listing_table(listings))


@app.command("fetch")
def fetch_data(name: DatasetName, data_dir: DataDir = None, options: OptionValues = None) -> Output:
    """Download a data set from its publisher and check it against its pinned checksum."""
    from fairpate.data import fetch

    target = data_dir or _data_dir_from_environment()
    if target is None:
        raise ConfigError("No folder for the files: give --data-dir, or set FAIRPATE_DATA.")
    options_of_loader = data_config(name, options, None).options
    files = fetch(name, target, options=options_of_loader, console=Reporter().console)
    return Output(facts={"files": files}, words="\n".join(map(str, files)))


@app.command("describe")
def describe_data(name: DatasetName, data_dir: DataDir = None, options: OptionValues = None) -> Output:
    """Load a data set and count its records by split, group and label. The counts are exact: do not publish them."""
    from fairpate.app.terminal.summary import describe_table
    from fairpate.data import describe

    with waiting("data"):
        description = describe(data_config(name, options, data_dir))
    return Output(facts=strict(description), words=describe_table(description))


@app.command("declare")
def declare_data(
    file: Annotated[Path, typer.Argument(help="Private records; only the header is read.")],
    public: Annotated[Path, typer.Option(help="Public records with the same columns; the label may be missing.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="YAML to write; none prints it.")] = None,
) -> Output:
    """Draft the declaration of your own records from public ones, with a question where those cannot tell."""
    if output is not None and output.exists():
        raise ConfigError(f"--output: {output} exists already; name another file.")
    for given, whose in ((file, "file"), (public, "--public")):
        if not given.exists():
            raise ConfigError(f"{whose}: {given} is no file; give the path of a table.")
    from fairpate.data.declared.draft import QUESTION, draft_declaration

    with waiting("data"):
        text = draft_declaration(file, public, Path.cwd() if output is None else output.parent)
    from fairpate.evaluation.page import counted

    facts, questions = {"declaration": text, "file": output}, text.count(QUESTION) - 1
    if output is None:
        return Output(facts=facts | {"questions": questions}, words=text.removesuffix("\n"))
    write_atomically(output, lambda partial: partial.write_text(text, encoding="utf-8"))
    words = f"{output}: {counted(questions, 'question')} to answer; then fairpate data check {shlex.quote(str(output))}"
    return Output(facts=facts | {"questions": questions}, words=words)


@app.command("check")
def check_data(
    name: Annotated[str, typer.Argument(help="A declaration (.yaml).")],
    data_dir: DataDir = None,
    options: OptionValues = None,
) -> Output:
    """Count what a declaration clips, fills in or refuses. The counts are exact: do not publish them."""
    from fairpate.app.terminal.summary import check_table
    from fairpate.data.declared.check import check_declaration

    with waiting("data"):
        found = check_declaration(data_config(name, options, data_dir))
    return Output(facts=strict(found), words=check_table(found), code=int(bool(found.refused)))


def _data_dir_from_environment() -> Path | None:
    folder = os.environ.get("FAIRPATE_DATA")
    return Path(folder) if folder else None
