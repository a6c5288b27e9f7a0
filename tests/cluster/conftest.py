"""Real clusters: nodes of `ray start` on addresses of the loopback device, which needs no rights."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from local_cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A head without CPUs for teachers, and two workers of one CPU."""
    cluster = Cluster(2, namespaces=False)
    cluster.environment["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]  # without model.onnx, as other tests
    with cluster:
        yield cluster
