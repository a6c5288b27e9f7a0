"""A short version of benchmarks/campaigns/failover.py: the same program, two rounds."""

import random
import tempfile
from pathlib import Path

import pytest
from ledger_terms import TERMS
from local_postgres import Server, programs

from aggregator import ledger_audit
from aggregator.ledger import Ledger, back_end
from aggregator.store import UnreachableError

pytest.importorskip("psycopg", reason="needs `pip install 'fairpate[postgresql]'`")


@pytest.mark.slow
@pytest.mark.skipif(programs() is None, reason="PostgreSQL is not installed")
def test_after_a_promotion_every_answer_is_there_and_no_other():
    from failover import run

    with tempfile.TemporaryDirectory(prefix="fairpate-failover-") as folder:
        Path(folder).chmod(0o755)
        told = run(Path(folder), rounds=2, generator=random.Random(1))
    assert (told["failovers"], told["answers lost or doubled"]) == (2, 0)
    assert told["answers given"] > 10


@pytest.mark.slow
@pytest.mark.skipif(programs() is None, reason="PostgreSQL is not installed")
def test_a_standby_is_refused_for_reading_and_is_not_taken_for_a_broken_ledger():
    with tempfile.TemporaryDirectory(prefix="fairpate-standby-") as folder:
        Path(folder).chmod(0o755)
        with Server(Path(folder) / "primary") as primary:
            with Ledger(primary.url("kept"), TERMS):
                pass
            with Server(Path(folder) / "standby", standby_of=primary) as standby:
                for read in (ledger_audit.verify, lambda place: back_end(place).reader(place)):
                    with pytest.raises(UnreachableError, match="is a standby, which accepts no writes and may lag"):
                        read(standby.url("kept"))
