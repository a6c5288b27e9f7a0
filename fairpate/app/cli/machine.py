"""`fairpate doctor`: what this machine offers a run."""

from __future__ import annotations

from fairpate.app.terminal.console import facts
from fairpate.app.terminal.output import Output


def doctor() -> Output:
    """Print versions, processors, Ray, disk, folders and optional extras. Code 1 where something has to be fixed."""
    from fairpate.app.terminal.doctor import findings

    found, marks = findings(), {"ok": "", "fix": "fix: "}
    return Output(
        facts={"findings": found},
        words=facts((finding.name, marks[finding.level] + finding.value) for finding in found),
        code=int(any(finding.level == "fix" for finding in found)),
    )
