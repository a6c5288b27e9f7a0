"""How long a first-time reader waits for each step of docs/ten-minutes.md, on this machine.

    python benchmarks/speed/ten_minutes.py [--write]

Runs the commands of the page one after the other in an empty folder, as a reader would: wall-clock seconds, with the
start of Python each time, and processor seconds, which other work on the machine hardly moves. `--write` puts them into
the page, with the number of processors and the load average while they ran. Installing is left out, because it waits
for a network.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "ten-minutes.md"
_URL = "http://127.0.0.1:8527"
STEPS = (
    ("What this machine offers", "fairpate version"),
    ("The whole pipeline on embedded loans: thousands of small teachers", "fairpate run --keep 50% --out runs/first"),
    ("Embedded digits, each with one vote", "fairpate run --epsilon 1.3 --out runs/published"),
    ("A card for what was published", "fairpate card runs/published"),
    ("All that was published, in one file", "fairpate bundle runs/published --out model.zip"),
    ("The epsilon again, by a second accountant", "fairpate verify model.zip"),
    ("A project with made-up records", "fairpate new clinic"),
    ("What its declaration does to its records", "fairpate data check clinic/data.yaml"),
    ("A run on them", "cd clinic && fairpate run settings.yaml"),
    (
        "What another run would spend",
        "fairpate run --data clinic/data.yaml --epsilon 2 --dry-run",
    ),
    ("The first run's teachers as a service", "fairpate serve runs/first --port 8527"),
    ("Labels from it", f"fairpate query {_URL} ask 0:20"),
)
_TABLE = re.compile(r"\| step \|.*?\n\n[^\n]*\n", re.DOTALL)


def main() -> None:
    """Run all steps, print their times, and write them down where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/ten-minutes.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = timed(Path(folder))
    text = table(steps)
    print(text)
    if options.write:
        PAGE.write_text(_TABLE.sub(lambda _: text, PAGE.read_text(encoding="utf-8"), count=1), encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One step: wall-clock and processor seconds, and the load average behind it."""

    waited: float
    worked: float
    load: float


def timed(folder: Path) -> list[Timed]:
    """Every step in turn. CalledProcessError for one that fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "FAIRPATE_STATE": str(folder / "state")}
    services: list[subprocess.Popen[bytes]] = []
    steps: list[Timed] = []
    try:
        for _, command in STEPS:
            started, before = time.monotonic(), _processor_seconds()
            process = subprocess.Popen(  # noqa: S602 - the steps above
                command,
                shell=True,
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if command.startswith("fairpate serve"):
                services.append(process)
                _wait_for(process, b"is served at")
            elif (output := process.communicate()[0]) and process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command, output)
            waited, worked = time.monotonic() - started, _processor_seconds() - before
            steps.append(Timed(waited=waited, worked=worked, load=os.getloadavg()[0]))
    finally:
        for process in services:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate()
    return steps


def _processor_seconds() -> float:
    """Of all commands that have ended; a service counts once it has."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wait_for(process: subprocess.Popen[bytes], words: bytes) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    raise subprocess.CalledProcessError(process.wait(), process.args)


def table(steps: Sequence[Timed]) -> str:
    """The page's table, and the sentence below it."""
    rows = [
        f"| {words} | `{command}` | {_text(step.waited)} | {_text(step.worked) if step.worked else ''} |"
        for (words, command), step in zip(STEPS, steps, strict=True)
    ]
    lines = ["| step | command | waited | processor |", "|-|-|-|-|", *rows]
    loads = [step.load for step in steps]
    place = f"{os.cpu_count()} processors and a load average of {min(loads):.0f} to {max(loads):.0f}"
    waited, worked = sum(step.waited for step in steps), sum(step.worked for step in steps)
    told = f"Together {waited:.0f} s, on a machine with {place} meanwhile; {worked:.0f} s of them on a processor."
    return "\n".join(lines) + f"\n\n{told}\n"


def _text(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


if __name__ == "__main__":
    main()
