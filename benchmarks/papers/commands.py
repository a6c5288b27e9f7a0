"""Run the commands that docs/coverage.md and the pages of results name, and compare the digits with the stored ones.

    python benchmarks/papers/commands.py [--limit 120] [--only TEXT ...] [--pages docs/coverage.md ...]

Each command runs for at most ``--limit`` seconds in a copy of the repository, for one seed: the first that is stored. A
command that writes a file of docs/results/ starts without that file, so that every number is measured anew, and its
numbers are compared with the stored ones of that seed, digit by digit (six digits are stored). Costs that are times
differ on every machine and are left out. The log is docs/results/commands.json, with one cell for every command:

    same          every number that was measured again equals the stored one
    differs       numbers differ, of which ``differing`` names a few, or no stored cell was measured again
    ran           nothing is stored to compare with: the command ended well, or wrote a measurement before the limit
    too long      the limit ended it before anything could be compared
    failed        it ended with an error, which ``message`` has
    placeholder   no command, but the pattern of several (NAME, E, ...)

``share`` is the share of the stored cells of that seed that were measured again before the limit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import measured

ROOT = Path(__file__).parents[2]
PAGES = (
    "coverage",
    "related-methods",
    "results",
    "results-frontier",
    "results-published",
    "results-speed",
    "results-teachers",
)
_WORDS = re.compile(r"`((?:fairpate (?:run|compare|data|methods|audit)|python benchmarks/)[^`]*)`")
_BLANKS = re.compile(r"(?<![\w-])(?:[A-Z]|[A-Z]{3,})(?![\w-])|\.\.\.|\[--|=[A-Z]+\b")
_SWEEPS = re.compile(r"(?:fairpate compare|python benchmarks/papers/papers.py) (configs/\S+\.yaml)(.*)")
# Scripts that take seeds, and how they are given.
_SEEDED = {
    "clipping_bound": "--seeds {}",
    "levelling_down": "--seeds {}",
    "query_experiments": "--seeds {}",
    "posthoc": "--seeds 1",
    "private_metrics": "--seeds {}",
    "run_times": "--repeats 1",
}
_OTHERS = ("papers/commands.py", "papers/measured.py")
_TIMES = ("run_times", "lagrangian")
_SHOWN = 3


def main() -> None:
    """Run every command, and write the log after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one command")
    parser.add_argument("--only", nargs="+", default=[""], help="only commands that contain one of these texts")
    parser.add_argument("--pages", nargs="+", type=Path, default=[ROOT / "docs" / f"{page}.md" for page in PAGES])
    options = parser.parse_args()
    log = measured.read("commands")
    for command in commands_of(options.pages):
        if not any(text in command for text in options.only):
            continue
        log[command] = outcome(command, options.limit)
        said = f"python benchmarks/papers/commands.py --limit {options.limit:g}"
        counts = Counter(cell["outcome"] for cell in log.values())
        measured.write("commands", command=said, cells=log, counts=dict(sorted(counts.items())))
        print(f"{log[command]['outcome']}: {command}", flush=True)


def commands_of(pages: Sequence[Path]) -> list[str]:
    """The commands of the pages, in their order, each once, but for those that measure nothing themselves."""
    texts = (measured.filled(page.read_text(encoding="utf-8")) for page in pages)
    found = (" ".join(words.split()) for text in texts for words in _WORDS.findall(text))
    commands = (words for words in found if len(words.split()) > 2 or words.startswith("python"))
    return list(dict.fromkeys(words for words in commands if not any(name in words for name in _OTHERS)))


def outcome(command: str, limit: float) -> dict[str, Any]:
    """Run one command in a copy of the repository; return its cell of the log."""
    if _BLANKS.search(command):
        return {"outcome": "placeholder"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # a database's server may be another user
        copy = Path(folder) / "repository"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "runs", ".*_cache", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, copy, ignore=ignored)
        name, words = _measuring(command)
        stored = copy / "docs" / "results" / f"{name}.json"
        expected = json.loads(stored.read_text(encoding="utf-8"))["cells"] if stored.is_file() else {}
        seed = min((min(cell["seeds"]) for cell in expected.values() if cell.get("seeds")), default=0)
        stored.unlink(missing_ok=True)
        started = time.monotonic()
        code, message = _run(words.format(seed), copy, limit)
        found = {"seconds": round(time.monotonic() - started, 1)}
        if code:
            return found | {"outcome": "failed", "message": message}
        if expected and name not in _TIMES and stored.is_file():
            again = json.loads(stored.read_text(encoding="utf-8"))["cells"]
            return found | compared(again, expected, seed)
        other = re.search(r"--out (\S+)", command)
        wrote = stored.is_file() or (other is not None and (copy / other[1]).is_file())
        return found | {"outcome": "too long" if code is None and not wrote else "ran"}


def _measuring(command: str) -> tuple[str, str]:
    """The name of the file that a command writes, if any, and the command that measures one seed of it (``{}``)."""
    sweep = _SWEEPS.fullmatch(command)
    if sweep:
        config, rest = sweep.groups()
        name, rest = Path(config).stem, rest.replace("{", "{{").replace("}", "}}")
        words = f"python benchmarks/papers/papers.py {config}{rest} --seeds {{}} --state runs"
        return name, words
    script = re.match(r"python benchmarks/papers/(\w+)\.py", command)
    name = script[1] if script else ""
    plain = command.replace("{", "{{").replace("}", "}}")
    if name == "results":
        plain = re.sub(r"(--seeds \d+)( \d+)+", r"\1", plain)
    if name in _SEEDED and "--seeds" not in plain:
        plain = f"{plain} {_SEEDED[name]}"
    return name, plain


def _run(words: str, folder: Path, limit: float) -> tuple[int | None, str]:
    """Run a command there; return its exit status, None at the limit, and the last line that it wrote."""
    argv = shlex.split(words)
    argv = [sys.executable, *argv[1:]] if argv[0] == "python" else [sys.executable, "-m", *argv]
    if argv[2:4] == ["fairpate", "run"] and "--dry-run" not in argv:
        argv.append("--yes")
    environment = os.environ | {"FAIRPATE_STATE": str(folder / "state"), "PYTHONPATH": str(folder)}
    process = subprocess.Popen(  # noqa: S603 - the commands are those of this repository's pages
        argv,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the workers that it started
        process.communicate()
        return None, ""
    lines = said.strip().splitlines()
    last = lines[-1] if lines else ""
    for place, called in ((environment.get("FAIRPATE_DATA", "\0"), "FAIRPATE_DATA"), (str(folder), ".")):
        last = last.replace(place, called)
    return process.returncode, last


def compared(again: measured.Cells, stored: measured.Cells, seed: int) -> dict[str, Any]:
    """What a log says of the cells that were measured again, beside the stored ones of that seed."""
    of_seed = {name: cell for name, cell in stored.items() if seed in cell.get("seeds", (seed,))}
    cells = {name: cell for name, cell in again.items() if name in of_seed}
    differing = [f"{name}:{metric}" for name in cells for metric in _differing(cells[name], of_seed[name], seed)]
    # A command whose cells have other names now measures none of what is stored.
    kind = "differs" if differing or not cells else "same"
    found = {"outcome": kind, "seed": seed, "cells": len(cells), "share": round(len(cells) / max(len(of_seed), 1), 3)}
    if not differing:
        return found
    pairs = ((cells[name], of_seed[name]) for name in cells if "accuracy" in cells[name])
    moves = [abs(_of_seed(cell, "accuracy", seed) - _of_seed(old, "accuracy", seed)) for cell, old in pairs]
    moved = (
        {"accuracy_moves_median": round(median(moves), 4), "accuracy_moves_most": round(max(moves), 4)} if moves else {}
    )
    return found | moved | {"differing": differing[:_SHOWN], "num_differing": len(differing)}


def _differing(cell: dict[str, Any], stored: dict[str, Any], seed: int) -> Iterator[str]:
    for metric in sorted(cell.keys() & stored.keys() - {"seeds", "seconds"}):
        one, other = _of_seed(cell, metric, seed), _of_seed(stored, metric, seed)
        both_numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
        if not (math.isclose(one, other, rel_tol=2e-6, abs_tol=5e-7) if both_numbers else one == other):
            yield metric


def _of_seed(cell: dict[str, Any], metric: str, seed: int) -> Any:
    value = cell[metric]
    return value[cell["seeds"].index(seed)] if isinstance(value, list) and "seeds" in cell else value


if __name__ == "__main__":
    main()
