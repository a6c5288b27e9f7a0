"""A database that is lost under load, and its synchronous standby that is promoted: no answer is lost or doubled.

    python benchmarks/campaigns/failover.py [--rounds 5] [--seed 0] [--json]

A writer answers query after query. At a random instant the primary is killed, the standby is promoted, and a writer
opens the ledger there, by the same place, which names both servers. Checked each time: every answer that was given is
there, with its charge and no other; the writer of before writes no more. Then a new standby is made.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psycopg
from local_postgres import Server

from aggregator.ledger import Ledger
from aggregator.mechanism import Outcome
from aggregator.store import LedgerError

sys.path.append(str(Path(__file__).parents[1] / "speed"))
from ledger import NUM_CLASSES, NUM_TEACHERS, TERMS


def main() -> None:
    """Fail over again and again, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        told = run(Path(folder), rounds=arguments.rounds, generator=random.Random(arguments.seed))
    print(json.dumps(told) if arguments.json else "\n".join(f"{name:32} {value}" for name, value in told.items()))


def run(folder: Path, *, rounds: int, generator: random.Random) -> dict[str, float]:
    """What was seen. RuntimeError where an answer is lost or doubled."""
    given: dict[str, Outcome] = {}
    primary = Server(folder / "server-0")
    primary.start()
    seconds, left_open = [], 0
    Ledger(primary.url("kept"), TERMS).close()
    for number in range(1, rounds + 1):
        standby = Server(folder / f"server-{number}", standby_of=primary)
        standby.start()
        _wait_for(primary, standby)
        writer = threading.Thread(target=_answer_on, args=(primary.url("kept"), given, number))
        writer.start()
        time.sleep(generator.uniform(0.3, 1.5))
        primary.kill()
        lost_s = time.monotonic()
        writer.join()
        standby.promote()
        with Ledger(standby.url("kept"), TERMS, create=False) as ledger:
            seconds.append(time.monotonic() - lost_s)
            charged = [charge.key for charge in ledger.charges]
            left_open = sum(charge.outcome is None for charge in ledger.charges)
            if any(ledger.outcome_of.get(key) != outcome for key, outcome in given.items()):
                raise RuntimeError("An answer was lost.")
            if len(charged) != len(set(charged)):
                raise RuntimeError("A query was charged twice.")
        primary = standby
    primary.stop()
    return {
        "failovers": rounds,
        "answers given": len(given),
        "left open, and charged": left_open,
        "until the ledger is open, longest": round(max(seconds), 2),
        "answers lost or doubled": 0,
    }


def _wait_for(primary: Server, standby: Server) -> None:
    """From now on a commit is on both."""
    with psycopg.connect(primary.url(), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        connection.execute("SELECT pg_reload_conf()")
        while True:
            found = connection.execute(
                "SELECT sync_state FROM pg_stat_replication WHERE application_name = %s", (standby.folder.name,)
            ).fetchone()
            if found == ("sync",):
                return
            time.sleep(0.05)


def _answer_on(place: str, given: dict[str, Outcome], number: int) -> None:
    """Answer query after query, until the ledger can be written no more; an answer is given when it is committed."""
    votes_QC = np.full((1, NUM_CLASSES), NUM_TEACHERS // NUM_CLASSES)
    with Ledger(place, TERMS, create=False) as ledger:
        for query in range(10**9):
            key, outcome = f"{number}-{query}", Outcome(verdict="answer", label=query % NUM_CLASSES)
            try:
                ledger.commit(ledger.reserve([key], [0], votes_QC), [outcome])
            except LedgerError:
                return
            given[key] = outcome


if __name__ == "__main__":
    main()
