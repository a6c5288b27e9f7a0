"""Throughput of the mechanism with its durable ledger, as ratios to what the disk itself does, taken in one run.

    python benchmarks/speed/ledger.py [--seconds 3] [--directory DIR] [--json]

One unit is a 64-byte append followed by fdatasync on the same disk, one after the other: nothing durable is faster.
Queries are asked of an in-process session over the paper's ColorMNIST mechanism, one at a time and in batches; every
batch waits for the disk twice, once before its noise is drawn and once before its answers leave. Turns of all kinds
alternate, and a ratio is the median over turns, so that a disk that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from aggregator.ledger import Ledger, LedgerTerms
from aggregator.mechanism import ConfidentGnmax
from aggregator.session import AggregatorSession, Query
from fairpate.fairness.gate import DemographicParityGate
from fairpate.privacy.discrete_gaussian import OsEntropy
from fairpate.types import GateRule, IntArray, QueryBudget

NUM_TEACHERS, NUM_CLASSES, NUM_GROUPS = 200, 10, 2
TERMS = LedgerTerms(
    mechanism=ConfidentGnmax(threshold=120, threshold_stddev_votes=110, noise_stddev_votes=20),
    gate=GateRule(max_disparity=0.01, min_count=50),
    budget=QueryBudget(kind="query_count", delta=1e-5, max_queries=10**9),
    num_teachers=NUM_TEACHERS,
    num_classes=NUM_CLASSES,
    num_groups=NUM_GROUPS,
    noise=OsEntropy.label,
    ensemble="table",
)
Turn = Callable[[float], float]
"""Works for so many seconds and says how many queries or appends per second it got done."""


def main() -> None:
    """Measure every kind of turn and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one kind of turn, over all its turns")
    parser.add_argument("--turns", type=int, default=15, help="turns of each kind")
    parser.add_argument("--directory", type=Path, help="on the disk that is measured; none: the working directory")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory or Path.cwd()) as folder:
        rates = measure(Path(folder), seconds=arguments.seconds / arguments.turns, turns=arguments.turns)
    report(rates, as_json=arguments.json)


def measure(folder: Path, *, seconds: float, turns: int) -> dict[str, list[float]]:
    """Rates by kind and turn, in units per second."""
    votes = Votes()
    kinds: dict[str, Turn] = {"append + fdatasync": appends(folder / "appends")}
    ledgers = []
    for size in (1, 128, 512):
        ledger = Ledger(folder / f"ledger-{size}.sqlite", TERMS)
        ledgers.append(ledger)
        kinds[f"batches of {size}"] = queries(AggregatorSession(ledger, source=OsEntropy()), votes, size)
    kinds["batches of 512, no ledger"] = drawn_only(votes, 512)
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(turns):
        for name, turn in kinds.items():
            rates[name].append(turn(seconds))
    for ledger in ledgers:
        ledger.close()
    return rates


class Votes:
    """An endless supply of new queries with votes as confident teachers give them."""

    def __init__(self, size: int = 4096) -> None:
        generator = np.random.default_rng(0)
        profiles = generator.dirichlet(np.full(NUM_CLASSES, 0.2), size=size)
        self._votes_QC: IntArray = np.array([generator.multinomial(NUM_TEACHERS, profile) for profile in profiles])
        self._posed = 0

    def next(self, count: int) -> tuple[list[Query], IntArray]:
        """``count`` queries that were never asked, and their votes."""
        first, self._posed = self._posed, self._posed + count
        asked = [Query(key=f"{n:064x}", group=n % NUM_GROUPS, record_id=str(n)) for n in range(first, first + count)]
        return asked, self._votes_QC[np.arange(first, first + count) % len(self._votes_QC)]


def appends(path: Path) -> Turn:
    """The unit: 64 bytes, then the disk."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def append() -> int:
        os.write(file, b"x" * 64)
        os.fdatasync(file)
        return 1

    return lambda seconds: rate(append, seconds)


def queries(session: AggregatorSession, votes: Votes, size: int) -> Turn:
    """Whole batches through session, mechanism and ledger."""

    def ask() -> int:
        asked, votes_QC = votes.next(size)
        session.ask(asked, lambda _: votes_QC)
        return size

    return lambda seconds: rate(ask, seconds)


def drawn_only(votes: Votes, size: int) -> Turn:
    """The mechanism alone: what the ledger adds is the difference."""
    gate = DemographicParityGate(TERMS.gate, num_groups=NUM_GROUPS, num_classes=NUM_CLASSES)
    source = OsEntropy()

    def draw() -> int:
        asked, votes_QC = votes.next(size)
        TERMS.mechanism.answer(
            votes_QC,
            groups=[query.group for query in asked],
            keys=[query.key for query in asked],
            gate=gate,
            source=source,
        )
        return size

    return lambda seconds: rate(draw, seconds)


def rate(step: Callable[[], int], seconds: float) -> float:
    """Units per second over at least ``seconds`` and one step."""
    start_s, done = time.perf_counter(), 0
    while True:
        done += step()
        elapsed_s = time.perf_counter() - start_s
        if elapsed_s >= seconds:
            return done / elapsed_s


def report(rates: dict[str, list[float]], *, as_json: bool) -> None:
    """Each kind's median rate, and the median of its ratios to the append of the same turn."""
    unit = rates["append + fdatasync"]
    rows = {
        name: {
            "per_second": statistics.median(of_kind),
            "ratio": statistics.median(a / b for a, b in zip(of_kind, unit, strict=True)),
        }
        for name, of_kind in rates.items()
    }
    if as_json:
        print(json.dumps(rows))
        return
    for name, row in rows.items():
        print(f"{name:28} {row['per_second']:10,.0f} per second   {row['ratio']:7.2f} of an append")


if __name__ == "__main__":
    main()
