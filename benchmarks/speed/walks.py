"""Which modules and functions one label, one noisy table and one charged query pass through.

    python benchmarks/speed/walks.py [--list]

Each walk runs in this process, once before it is recorded, so that neither imports nor caches count. Recorded are the
functions of the four packages that are entered, from the command to the labels, from the command to the student, and
from a request to its answer, in every thread. ``--list`` prints the modules in the order in which they are entered.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
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


def query_walk(folder: Path) -> Walk:
    """One query of the smallest service that there is, from the request to its answer."""
    serving = import_module("serving")
    headers = {"Authorization": f"Bearer {serving.ANALYST}"}
    with (
        recording() as walk,  # before the service starts, so that its threads are recorded
        serving.running(folder / "ledger.sqlite", tokens=serving.tokens_of_both_roles()) as url,
        httpx.Client(base_url=url, timeout=60, headers=headers) as client,
    ):
        client.post("/v1/queries", json=serving.ids(range(2))).raise_for_status()
        walk.functions.clear()
        client.post("/v1/queries", json=serving.ids(range(2, 3))).raise_for_status()
        answered = dict(walk.functions)
    walk.functions = answered
    return walk


def main() -> None:
    """Print the three walks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="the modules of each walk")
    listed = parser.parse_args().list
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        walks: dict[str, Callable[[], Walk]] = {
            "a label: fairpate run --method fairpate": lambda: run_walk(folder, "labels", DIGITS, "write_labels"),
            "a table: weighted_votes to a student": lambda: run_walk(
                folder, "table", (*DIGITS[:2], "--method", "weighted_votes", "--epsilon", "1"), "fit_student"
            ),
            "a query that is charged": lambda: query_walk(folder),
        }
        for number, (title, recorded) in enumerate(walks.items()):
            # No operator's releases, and not those of another walk, which this one would price again.
            os.environ["FAIRPATE_STATE"] = str(folder / f"state-{number}")
            walk = recorded()
            print(f"{title:40} {len(walk.modules()):4} modules {len(walk.functions):4} functions")
            if listed:
                print("    " + " > ".join(walk.modules()))


if __name__ == "__main__":
    main()
