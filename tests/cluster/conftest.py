"""Real clusters: nodes of `ray start` on addresses of the loopback device, which needs no rights."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "campaigns"))
from local_cluster import Cluster


@pytest.fixture(scope="package")
def _nodes() -> Iterator[Cluster]:
    cluster = Cluster(2, namespaces=False)
    cluster.environment["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]  # without model.onnx, as other tests
    with cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(_nodes: Cluster) -> Cluster:
    """A head without CPUs for teachers, and two workers of one CPU, whatever the file before did to them."""
    _nodes.repair()
    return _nodes
