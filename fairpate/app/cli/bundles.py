"""`fairpate bundle` and `verify`: a finished run as one file, and the check of one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fairpate.app.cli.options import AsJson, RunFolder
from fairpate.strict_json import strict


def bundle(
    folder: RunFolder,
    out: Annotated[Path | None, typer.Option(help="A .zip file; bundle.zip in the run directory.")] = None,
) -> None:
    """Write everything that a finished run published as one zip file, for somebody who checks it.

    Prints the file and the digest of its head, which you may publish elsewhere or sign.
    """
    from fairpate.app.bundle import write_bundle

    path, digest = write_bundle(folder, out)
    typer.echo(f"{path}\n{digest}")


def verify(
    path: Annotated[Path, typer.Argument(help="A file of `fairpate bundle`, or the folder it was unpacked to.")],
    head: Annotated[str | None, typer.Option(help="Digest of the head, as published elsewhere.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a bundle: files, epsilon by an independent accountant, student and card. Refused, it ends with code 1."""
    from fairpate.app.verify import verify_bundle

    verdict = verify_bundle(path, head=head)
    if as_json:
        typer.echo(json.dumps(strict({"holds": verdict.holds, **asdict(verdict)}), indent=2))
    else:
        lines = [f"checked      {line}" for line in verdict.checked]
        lines += [f"differs      {line}" for line in verdict.differs]
        lines += [f"not checked  {line}" for line in verdict.not_checked]
        typer.echo("\n".join([*lines, f"head         {verdict.digest}", verdict.words]))
    if not verdict.holds:
        raise typer.Exit(1)
