"""`fairpate doctor`: what this machine offers a run."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from fairpate.app.cli.options import AsJson
from fairpate.app.terminal import facts, terminal


def doctor(as_json: AsJson = False) -> None:
    """Print versions, processors, Ray, disk, folders and optional extras. Code 1 where something has to be fixed."""
    from fairpate.app.doctor import findings

    found = findings()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        marks = {"ok": "", "fix": "fix: "}
        terminal().print(facts((finding.name, marks[finding.level] + finding.value) for finding in found))
    if any(finding.level == "fix" for finding in found):
        raise typer.Exit(1)
