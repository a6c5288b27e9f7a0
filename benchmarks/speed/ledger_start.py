"""How long a ledger of many charges takes to open: every digest verified, every entry replayed, ready to answer.

    python benchmarks/speed/ledger_start.py [--charges 1000000] [--database] [--json]

Each charge is a query of its own, reserved and committed in two entries, which is the longest ledger that so many
charges can make. Time of the wall and of the processor, and as a ratio to hashing as many messages of the same size.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hmac
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ledger import NUM_CLASSES, NUM_TEACHERS, TERMS

from aggregator.ledger import Ledger, back_end
from aggregator.session import AggregatorSession
from aggregator.store import Address, Head, Header, Row, canonical
from fairpate.privacy.discrete_gaussian import OsEntropy

sys.path.append(str(Path(__file__).parents[1] / "campaigns"))
from local_postgres import Server


def main() -> None:
    """Make the ledger, open it, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--charges", type=int, default=1_000_000)
    parser.add_argument("--database", action="store_true", help="in PostgreSQL instead of a file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        Path(folder).chmod(0o755)
        place: Address = Path(folder) / "ledger.sqlite"
        if arguments.database:
            place = stack.enter_context(Server(Path(folder) / "server")).url("long")
        with Ledger(Path(folder) / "empty.sqlite", TERMS) as empty:
            header = Header(empty.header.terms, bytes(range(32)))
        rows = list(entries(header, arguments.charges))
        back_end(place).write(place, header, rows)
        told = measured(place, rows)
    print(json.dumps(told) if arguments.json else "\n".join(f"{name:32} {value}" for name, value in told.items()))


def entries(header: Header, charges: int) -> Iterator[Row]:
    """The rows of so many single queries."""
    votes_QC = np.random.default_rng(0).multinomial(NUM_TEACHERS, [1 / NUM_CLASSES] * NUM_CLASSES, size=4096)
    head: Head = header.start
    for number in range(charges):
        asked = [("alice", f"{number:016x}", 1)]
        votes = base64.b64encode(votes_QC[number % 4096].astype("<i4").tobytes()).decode("ascii")
        at_s, key = 1.7e9 + number, f"{number:064x}"
        reserved = {"asked": asked, "at": at_s, "groups": [number % 2], "keys": key, "votes": votes}
        committed = {"first": number, "outcomes": [number % NUM_CLASSES]}
        for kind, payload in (("reserve", reserved), ("commit", committed)):
            text = canonical(payload)
            head = Head(head.number + 1, header.link(head.digest, kind, text))
            yield head.number, kind, text, head.digest  # type: ignore[misc]  # a kind


def measured(place: Address, rows: list[Row]) -> dict[str, float]:
    """Times of opening, and of the hashing alone."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    with Ledger(place, TERMS, create=False) as ledger:
        AggregatorSession(ledger, source=OsEntropy()).budget_status()
        opened = (time.perf_counter() - wall_s, time.process_time() - cpu_s, len(ledger.keys))
    cpu_s = time.process_time()
    for _, _, text, digest in rows:
        hmac.digest(b"key", (digest + text).encode(), "sha256")
    hashed_s = time.process_time() - cpu_s
    return {
        "charges": opened[2],
        "entries": len(rows),
        "open, seconds": round(opened[0], 2),
        "open, processor seconds": round(opened[1], 2),
        "hashing alone, processor seconds": round(hashed_s, 2),
        "ratio": round(opened[1] / hashed_s, 2),
    }


if __name__ == "__main__":
    main()
