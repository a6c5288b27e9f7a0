"""`fairpate new`: a project to begin with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from fairpate.app.terminal.output import Output


def new(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="Folder to write; nothing may be there yet.")],
    kind: Annotated[
        Literal["table", "images", "embeddings"],
        typer.Option(help="What a record is: a row of a table, a picture, or a vector."),
    ] = "table",
) -> Output:
    """Write a project that runs: declaration, made-up records to replace, configuration, README and a test."""
    from fairpate.app.new_project import write_project

    data, files = write_project(name, kind)
    words = [f"{name}: data set {data}, with made-up records to replace; README.md says how. To begin with:"]
    place = f"./{name}" if str(name).startswith("-") else str(name)
    words += [f"  cd {shlex.quote(place)}", "  fairpate run settings.yaml"]
    return Output(facts={"folder": name, "kind": kind, "data": data, "files": files}, words="\n".join(words))
