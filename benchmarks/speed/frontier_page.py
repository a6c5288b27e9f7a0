"""How long the frontier's page takes with many rows: to write, and to draw every chart in headless Chromium.

    python benchmarks/speed/frontier_page.py --rows 10000

Rows are made up: every method on two data sets, at four epsilons and many settings, with one seed, so that each row is
a point. Wall-clock seconds count what else the machine does; of the page's own thread its processor time is there too.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fairpate.methods.base import looks_of, method_names
from fairpate.report.frontier import Row
from fairpate.report.frontier_page import FrontierReport, frontier_report
from fairpate.types import RunRecord

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from browser import browser  # type: ignore[import-not-found]

_DATA, _EPSILONS = ("adult", "color_mnist"), (0.3, 1.0, 3.0, 10.0)


def main() -> None:
    """Make rows, write the page, draw it twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    rows = made_up(parser.parse_args().rows)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page = Path(folder) / "report.html"
        started = time.process_time()
        page.write_text(
            frontier_report(FrontierReport(title="many rows", rows=rows, looks=looks_of(method_names()))),
            encoding="utf-8",
        )
        written = time.process_time() - started
        print(f"{len(rows):,} rows: written in {written:.1f} s of processor time, {page.stat().st_size / 1e6:.1f} MB")
        for turn in ("first", "again"):
            wall, processor, charts, marks = drawn(page, Path(folder) / turn)
            print(
                f"{turn}: {charts} charts, {marks:,} marks in planes, {wall:.1f} s on the clock, {processor:.1f} s of "
                f"the page's thread (load {os.getloadavg()[0]:.1f})"
            )


def made_up(count: int) -> list[Row]:
    """About so many finished rows."""
    generator = random.Random(0)
    methods = list(method_names())
    repeats = max(1, round(count / (len(methods) * len(_DATA) * len(_EPSILONS))))
    return [
        _row(method, data, epsilon, number, generator)
        for data in _DATA
        for method in methods
        for epsilon in _EPSILONS
        for number in range(repeats)
    ]


def _row(method: str, data: str, epsilon: float, number: int, generator: random.Random) -> Row:
    config = {"method": method, "data": {"name": data}, "target": {"epsilon": epsilon}, method: {"weight": number}}
    record = RunRecord(
        method=method,
        data=data,
        seed=0,
        unit="record",
        relation="add or remove one",
        delta=1e-5,
        epsilon=epsilon * generator.uniform(0.98, 1),
        epsilon_is_data_dependent=False,
        accuracy=0.6 + 0.1 * epsilon**0.3 + generator.uniform(0, 0.1),
        coverage=generator.choice((1.0, 1.0, generator.uniform(0.5, 1))),
        disparity=generator.uniform(0, 0.2),
        config=config,
        majority_accuracy=0.5,
    )
    command = f"fairpate run --method {method} --data {data} --epsilon {epsilon:g} --set {method}.weight={number}"
    identity: dict[str, Any] = {"method": method, "data": data, "seed": 0, "config": config}
    return Row(digest=f"{method}{data}{epsilon}{number}", command=command, minutes=1.0, record=record, **identity)


def drawn(page: Path, profile: Path) -> tuple[float, float, int, int]:
    """Seconds until every chart is drawn, the page's thread's own, and how much was drawn."""
    with browser(profile) as tab:
        tab.call("Performance.enable", timeDomain="threadTicks")
        started = time.perf_counter()
        tab.open(f"{page.as_uri()}#all", width=1280, height=900)
        wall = time.perf_counter() - started
        metrics = {each["name"]: each["value"] for each in tab.call("Performance.getMetrics")["metrics"]}
        charts = tab.run("document.querySelectorAll('.plot').length")
        return (
            wall,
            metrics["TaskDuration"],
            charts,
            tab.run("document.querySelectorAll('.plot.planes .mark-symbol path').length"),
        )


if __name__ == "__main__":
    main()
