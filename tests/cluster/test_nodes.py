"""A run on a cluster of two worker nodes: private records go where they are learned from, and faults change nothing.

The long version is benchmarks/campaigns/cluster_faults.py.
"""

import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import cluster_faults
import httpx
import pytest
from local_cluster import Cluster, Node

from fairpate.cli import main

WITNESS = Path(__file__).parent / "witness.py"
SLACK_BYTES = 2 * 2**20  # weights, and Ray's own


# Clusters of nodes; tests/teachers/test_ray_pool.py kills workers of one
pytestmark = [
    pytest.mark.xdist_group("cluster"),
    pytest.mark.usefixtures("light_runs"),
    pytest.mark.slow,
]


def test_a_shard_goes_to_the_node_that_trains_on_it_and_nowhere_else(cluster: Cluster) -> None:
    command = cluster.command(sys.executable, str(WITNESS))
    asked = subprocess.run(  # noqa: S603 our own program
        command, env=cluster.environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert asked.returncode == 0, asked.stderr
    told = json.loads(asked.stdout)
    assert len(told["trained"]) == 2  # both worked
    assert sum(told["trained"].values()) == told["records"]
    for node, trained in told["trained"].items():
        assert trained <= told["arrived"][node] <= trained + SLACK_BYTES
    assert told["left"] < SLACK_BYTES


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a run on this machine alone gives."""
    run = cluster_faults.make_run(tmp_path_factory.mktemp("alone") / "truth", None)
    with pytest.MonkeyPatch.context() as patched:  # in this process: another one imports for seconds
        patched.setattr(sys, "argv", ["fairpate", *run.command[len(cluster_faults.FAIRPATE) :]])
        patched.setenv("FAIRPATE_STATE", str(run.folder / "state"))
        main()
    return run.result()


@contextlib.contextmanager
def metrics_seen(cluster: Cluster) -> Iterator[set[str]]:
    """The metrics of training that the head, where the driver runs, exports to Prometheus inside the block."""
    seen, ended = set[str](), threading.Event()

    def look() -> None:
        while not ended.wait(0.5):
            with contextlib.suppress(httpx.HTTPError):
                seen.update(re.findall(r"^ray_fairpate_\w+", httpx.get(cluster.metrics).text, re.MULTILINE))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield seen
    finally:
        ended.set()
        looking.join()


def test_a_driver_and_nodes_that_die_and_a_node_that_joins_change_nothing(
    cluster: Cluster, truth: dict[str, str], tmp_path: Path
) -> None:
    """The same command after the driver was killed trains nothing twice and spends nothing twice."""
    run = cluster_faults.make_run(tmp_path / "run", cluster)
    run.start()
    run.wait_for(cluster_faults.in_training)
    run.kill()
    before = run.blocks
    run.lines.clear()
    run.start()
    training = list[Node]()

    def trains(run: cluster_faults.Run) -> bool:  # the other worker may only be starting, and would lose no block
        training[:] = [node for node in cluster.workers if node.processes("ray::Worker.run")]
        return len(run.blocks) > len(before) and bool(training)

    run.wait_for(trains)
    assert len(before) < len(run.blocks) < 12, "it is over before a node dies"
    dying, other = sorted(cluster.workers, key=training.__contains__, reverse=True)
    with metrics_seen(cluster) as seen:
        dying.kill()
        cluster.repair()
        run.wait_for(cluster_faults.in_voting)
        other.kill()
        assert run.wait() == 0, run.lines
    assert run.result() == truth
    assert {f"ray_fairpate_{name}_total" for name in ("teachers_trained", "blocks_trained", "votes_collected")} <= seen
    assert before.items() <= run.blocks.items()
    assert 1 <= run.blocks_lost <= 2 + len(run.blocks)  # under way in training; in voting also what the node had added
