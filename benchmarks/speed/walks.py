"""Which modules and functions one label, one noisy table and one charged query pass through, and how long they take.

    python benchmarks/speed/walks.py [--list]
    OMP_NUM_THREADS=1 python benchmarks/speed/walks.py --against FOLDER

Each walk runs in this process, once before it is recorded, so that neither imports nor caches count. Recorded are the
functions of the four packages that are entered, from the command to the labels, from the command to the student, and
from a request to its answer, in every thread. ``--list`` prints the modules in the order in which they are entered.

``--against`` measures instead, in this checkout and in another, the processor seconds of both commands from beginning
to end, and of a hundred requests. Each checkout has a process of its own in each of several turns, in which the walks
are repeated; the ratio is that of the medians. No ``model.onnx`` is written, which would take most of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx

HERE = Path(__file__).parents[2]
ROOT = Path(os.environ.get("WALKS_ROOT", HERE))
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

PACKAGES = tuple(str(ROOT / package) for package in ("fairpate", "aggregator", "teachers", "student"))
DIGITS = (
    *(
        "--data",
        "color_digits",
        "--method",
        "fairpate",
        "--set",
        "ray.num_actors=0",
        "--set",
        "teachers.num_teachers=10",
    ),
    *("--set", "teachers.fit.epochs=1", "--set", "aggregator.num_queries=20", "--set", "student.fit.epochs=1"),
)
TABLE = (*DIGITS[:2], "--method", "weighted_votes", "--epsilon", "1")
TURNS, REPEATS, REQUESTS = 4, 5, 100


class Walk:
    """The functions entered while it is open, up to the first call of ``last``."""

    def __init__(self, last: str = "") -> None:
        self.functions: dict[CodeType, str] = {}
        self._last, self._open, self._importing = last, True, threading.local()

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """A profile function (:func:`sys.setprofile`)."""
        code, here = frame.f_code, self._importing
        if code.co_name == "<module>":
            here.depth = getattr(here, "depth", 0) + {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and self._open and not getattr(here, "depth", 0):
            if code.co_filename.startswith(PACKAGES) and not code.co_name.startswith("<"):
                self.functions.setdefault(code, str(Path(code.co_filename).relative_to(ROOT)))
            self._open = code.co_name != self._last

    def modules(self) -> list[str]:
        """In the order of their first function."""
        return list(dict.fromkeys(self.functions.values()))


@contextlib.contextmanager
def recording(last: str = "") -> Iterator[Walk]:
    """Record this thread and those that it starts."""
    walk = Walk(last)
    threading.setprofile(walk.see)
    sys.setprofile(walk.see)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def command(*words: str) -> None:
    """Run ``fairpate`` with ``words`` in this process."""
    from fairpate import cli

    sys.argv = ["fairpate", *words]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            cli.main()
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(said.getvalue()) from ended


def run_walk(folder: Path, name: str, words: tuple[str, ...], last: str) -> Walk:
    """A run of ``words``, recorded when it is repeated in another folder."""
    command("run", *words, "--out", str(folder / f"{name}-before"))
    with recording(last) as walk:
        command("run", *words, "--out", str(folder / name))
    return walk


@contextlib.contextmanager
def asking(folder: Path) -> Iterator[Callable[[range], object]]:
    """The smallest service that there is; yields what asks it for a label of each record in a range."""
    serving = import_module("serving")
    headers = {"Authorization": f"Bearer {serving.ANALYST}"}
    with (
        serving.running(folder / "ledger.sqlite", tokens=serving.tokens_of_both_roles()) as url,
        httpx.Client(base_url=url, timeout=60, headers=headers) as client,
    ):
        yield lambda numbers: client.post("/v1/queries", json=serving.ids(numbers)).raise_for_status()


def query_walk(folder: Path) -> Walk:
    """One query, from the request to its answer."""
    with recording() as walk, asking(folder) as ask:  # recording first, so that the service's threads are recorded
        ask(range(2))
        walk.functions.clear()
        ask(range(2, 3))
        answered = dict(walk.functions)
    walk.functions = answered
    return walk


def seconds(folder: Path) -> dict[str, float]:
    """Processor seconds of each walk in this process: the median of its repetitions, after one that is not counted."""
    student: Any = import_module("student.student")
    student.missing_packages = lambda: ("onnx",)
    os.environ["FAIRPATE_STATE"] = str(folder / "state")
    found = {}
    for name, words in {"a label": DIGITS, "a table": TABLE}.items():
        used = []
        for repeat in range(REPEATS + 1):
            started_s = time.process_time()
            command("run", *words, "--out", str(folder / f"{name}-{repeat}"))
            used.append(time.process_time() - started_s)
        found[name] = statistics.median(used[1:])
    with asking(folder) as ask:
        ask(range(2))
        started_s = time.process_time()
        for number in range(2, REQUESTS + 2):
            ask(range(number, number + 1))
        found["a charged query"] = (time.process_time() - started_s) / REQUESTS
    return found


def compare(other: Path) -> None:
    """Print the seconds of each walk in this checkout and in the ``other``, and their ratio."""
    turns: dict[Path, list[dict[str, float]]] = {HERE: [], other: []}
    for _ in range(TURNS):
        for root, rows in turns.items():
            output = subprocess.run(  # noqa: S603 - this file
                [sys.executable, __file__, "--seconds"],
                env=os.environ | {"WALKS_ROOT": str(root)},
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            ).stdout
            rows.append(json.loads(output.splitlines()[-1]))
    for name in turns[HERE][0]:
        here, there = (statistics.median(row[name] for row in rows) for rows in turns.values())
        print(f"{name:20} {here:8.4f} s {there:8.4f} s {here / there:6.2f}")


def show(folder: Path, *, listed: bool) -> None:
    """Print the three walks, with their modules if they are to be ``listed``."""
    walks: dict[str, Callable[[], Walk]] = {
        "a label: fairpate run --method fairpate": lambda: run_walk(folder, "labels", DIGITS, "write_labels"),
        "a table: weighted_votes to a student": lambda: run_walk(folder, "table", TABLE, "fit_student"),
        "a query that is charged": lambda: query_walk(folder),
    }
    for number, (title, recorded) in enumerate(walks.items()):
        # No operator's releases, and not those of another walk, which this one would price again.
        os.environ["FAIRPATE_STATE"] = str(folder / f"state-{number}")
        walk = recorded()
        print(f"{title:40} {len(walk.modules()):4} modules {len(walk.functions):4} functions")
        if listed:
            print("    " + " > ".join(walk.modules()))


def main() -> None:
    """Print the walks, or their times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="the modules of each walk")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="measure the walks here and in another checkout")
    parser.add_argument("--seconds", action="store_true", help="measure the walks in one checkout, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.against:
            compare(options.against.absolute())
        elif options.seconds:
            print(json.dumps(seconds(Path(name))))
        else:
            show(Path(name), listed=options.list)


if __name__ == "__main__":
    main()
