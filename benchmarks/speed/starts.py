"""What the start of each command costs: processor seconds, and which large libraries it imports.

    python benchmarks/speed/starts.py [--against FOLDER] [--only card serve query]

Every command runs once in a process of its own, on a small finished run; a service counts until it says where it is,
with all processes that it started. ``--against`` measures another checkout of this project besides, command by command,
and prints how many times as long it takes. Processor seconds hardly move with what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parents[2]
_URL = "http://127.0.0.1:8537"
_SMALL = (
    "teachers.num_teachers=4",
    "teachers.fit.epochs=1",
    "student.fit.epochs=1",
    "aggregator.num_queries=20",
    "ray.num_actors=0",
)
LIBRARIES = (
    *("torch", "sklearn", "scipy.stats", "scipy.optimize", "scipy.special", "pandas", "ray", "matplotlib", "pyarrow"),
    *("dp_accounting", "fastapi", "jinja2", "httpx", "torchvision", "onnx", "vl_convert"),
)
SERVE = "serve run --port 8537"
COMMANDS = (
    *("--help", "version", "methods", "methods fairpate", "new project", "data list", "data check clinic/data.yaml"),
    *(
        "run --data color_digits --epsilon 2 --dry-run",
        "card run",
        "bundle run",
        "verify run/bundle.zip",
        "report run",
    ),
    *("ledger verify run", "ledger audit run", "ledger show run", "ledger backup run copy.sqlite", "ledger total"),
    *("tokens add run ada", "tokens list run", SERVE, f"query {_URL} budget", f"query {_URL} ask 0:10"),
)
_WATCHED = f"""
import atexit, os, sys
atexit.register(lambda: open(os.environ["STARTS_MODULES"], "w").write(
    " ".join(name for name in {LIBRARIES!r} if name in sys.modules)))
sys.argv[0] = "fairpate"
from fairpate.__main__ import main
main()
"""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One command: processor seconds, of itself and of what it waited for, and the libraries in it."""

    seconds: float
    libraries: str


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of the commands to measure; without: all")
    options = parser.parse_args()
    checkouts = [_HERE] if options.against is None else [_HERE, options.against.absolute()]
    chosen = [each for each in COMMANDS if not options.only or each.startswith(tuple(options.only))]
    with tempfile.TemporaryDirectory() as folder:
        found = [starts(checkout, Path(folder) / str(number), chosen) for number, checkout in enumerate(checkouts)]
    print(table(chosen, found))


def starts(checkout: Path, folder: Path, commands: Sequence[str]) -> dict[str, Start]:
    """Every command, run in ``folder`` with the code of ``checkout``. CalledProcessError for one that fails."""
    folder.mkdir()
    marks = {"STARTS_MARK": uuid.uuid4().hex, "STARTS_MODULES": str(folder / "modules")}
    environment = os.environ | marks | {"PYTHONPATH": str(checkout), "FAIRPATE_STATE": str(folder / "state")}
    settings = [word for each in _SMALL for word in ("--set", each)]
    _done(["run", "--method", "fairpate", *settings, "--out", "run", "--yes"], folder, environment)
    _done(["new", "clinic"], folder, environment)
    queries = [each for each in commands if each.startswith("query")]
    alone = [each for each in commands if each != SERVE and each not in queries]
    found = {command: _done(command.split(), folder, environment) for command in alone}
    return found | (_served(folder, environment, queries) if len(alone) < len(commands) else {})


def _done(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Start:
    process = _started(words, folder, environment)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words, output)
    modules = Path(environment["STARTS_MODULES"]).read_text(encoding="utf-8")
    return Start(seconds=used.ru_utime + used.ru_stime, libraries=modules)


def _started(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - the commands above
        [sys.executable, "-c", _WATCHED, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _served(folder: Path, environment: Mapping[str, str], queries: Sequence[str]) -> dict[str, Start]:
    add = [sys.executable, "-m", "fairpate", "tokens", "add", "run", "grace"]
    added = subprocess.run(add, cwd=folder, env=environment, capture_output=True, text=True, check=True)  # noqa: S603 - as above
    environment = {**environment, "FAIRPATE_TOKEN": added.stdout.strip()}
    service = _started(SERVE.split(), folder, environment)
    assert service.stdout is not None
    try:
        if not any(b"is served at" in line for line in service.stdout):
            raise subprocess.CalledProcessError(service.wait(), SERVE)
        ready = _seconds_of_all(environment["STARTS_MARK"])
        return {SERVE: Start(seconds=ready, libraries="")} | {
            command: _done(command.split(), folder, environment) for command in queries
        }
    finally:
        service.terminate()
        service.communicate()


def _seconds_of_all(mark: str) -> float:
    """Of all processes whose environment holds ``mark``: those that a service started are not its children."""
    ticks = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                fields = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))
        except OSError:  # ended meanwhile, or another user's
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def table(commands: Sequence[str], found: Sequence[Mapping[str, Start]]) -> str:
    """One line per command, and where there are two checkouts the ratio of the other's time to this one's."""
    lines = []
    for command in commands:
        times = [each[command].seconds for each in found]
        numbers = "".join(f"{seconds:7.2f} s" for seconds in times)
        ratio = f"{times[1] / times[0]:6.1f}x" if len(times) > 1 else ""
        lines.append(f"{command.replace(_URL, 'URL'):40}{numbers}{ratio}  {found[0][command].libraries}")
    if len(found) > 1:
        ratios = [found[1][command].seconds / found[0][command].seconds for command in commands]
        lines.append(f"{'median ratio':40}{statistics.median(ratios):6.1f}x")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
