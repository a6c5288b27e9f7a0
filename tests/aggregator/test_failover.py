"""A short version of benchmarks/failover.py: the same program, two rounds."""

import random
import tempfile
from pathlib import Path

import pytest
from local_postgres import programs

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
