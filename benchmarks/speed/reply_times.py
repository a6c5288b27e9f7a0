"""How well the time of a reply tells which step refused the query: the area under the ROC curve (.5: not at all).

    python benchmarks/speed/reply_times.py [--queries 1024]

One client on loopback asks new queries one at a time over one connection that is kept, of a service whose replies wait
for the step of 10 ms, and of one whose replies do not. Which step refused each, the operator's ledger says afterwards.
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from service import POOL_SIZE, TOKENS, Target, serve, target

from aggregator.client import AggregatorClient


def main() -> None:
    """Print the area, and of how many refusals of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=1024)
    arguments = parser.parse_args()
    for step_s in (0.0, 0.01):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "ledger.sqlite"
            with target("SQLite", serve, place, step_s) as found:
                area, confidence, fairness = told_by_time(found, min(arguments.queries, POOL_SIZE))
        print(f"step {step_s:4g} s: area {area:.3f} ({confidence} refused by confidence, {fairness} by fairness)")


def told_by_time(found: Target, num_queries: int) -> tuple[float, int, int]:
    """Area under the ROC curve of the time, fairness against confidence, and how many there were of each."""
    seconds = times(found, num_queries)
    kinds = verdicts(found)
    confidence, fairness = (
        np.array([taken for key, taken in seconds.items() if kinds[key] == kind]) for kind in ("confidence", "fairness")
    )
    later = (fairness[:, None] > confidence[None]).mean() + 0.5 * (fairness[:, None] == confidence[None]).mean()
    return float(later), len(confidence), len(fairness)


def times(found: Target, num_queries: int) -> dict[str, float]:
    """How long each query took, by its key."""
    connection = http.client.HTTPConnection("127.0.0.1", found.port, timeout=60)
    headers = {"Authorization": f"Bearer {TOKENS['FAIRPATE_ANALYST_TOKEN']}", "Content-Type": "application/json"}
    seconds = {}
    for number in range(num_queries):
        started = time.perf_counter()
        connection.request("POST", "/v1/queries", b'{"queries":[{"id":%d}]}' % number, headers)
        body = connection.getresponse().read()
        seconds[json.loads(body)["replies"][0]["key"]] = time.perf_counter() - started
    connection.close()
    return seconds


def verdicts(found: Target) -> dict[str, str]:
    """Which step decided each query, by its key."""
    url = f"http://127.0.0.1:{found.port}"
    kinds: dict[str, str] = {}
    with AggregatorClient(url, token=TOKENS["FAIRPATE_OPERATOR_TOKEN"]) as client:
        while len(kinds) < (page := client.ledger(start=len(kinds), limit=1000)).total:
            kinds |= {entry.key: entry.verdict for entry in page.entries}
    return kinds


if __name__ == "__main__":
    main()
