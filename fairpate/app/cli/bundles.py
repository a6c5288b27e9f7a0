"""`fairpate bundle` and `verify`: a finished run as one file, and the check of one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fairpate.app.cli.options import RunFolder
from fairpate.app.terminal.output import Output
from fairpate.app.terminal.progress import waiting


def bundle(
    folder: RunFolder,
    out: Annotated[Path | None, typer.Option(help="A .zip file; bundle.zip in the run directory.")] = None,
) -> Output:
    """Write everything that a finished run published as one zip file, for somebody who checks it.

    Prints the file and the digest of its head, which you may publish elsewhere or sign.
    """
    from fairpate.app.publication.bundle import write_bundle

    with waiting("bundle"):
        path, digest = write_bundle(folder, out)
    return Output(facts={"file": path, "head": digest}, words=f"{path}\n{digest}")


def verify(
    path: Annotated[Path, typer.Argument(help="A file of `fairpate bundle`, or the folder it was unpacked to.")],
    head: Annotated[str | None, typer.Option(help="Digest of the head, as published elsewhere.")] = None,
) -> Output:
    """Check a bundle: files, epsilon by an independent accountant, student and card. Refused, it ends with code 1."""
    from fairpate.app.publication.verify import verify_bundle

    with waiting("verify"):
        verdict = verify_bundle(path, head=head)
    lines = [f"checked      {line}" for line in verdict.checked]
    lines += [f"differs      {line}" for line in verdict.differs]
    lines += [f"not checked  {line}" for line in verdict.not_checked]
    return Output(
        facts={"holds": verdict.holds, **asdict(verdict)},
        words="\n".join([*lines, f"head         {verdict.digest}", verdict.words]),
        code=int(not verdict.holds),
    )
