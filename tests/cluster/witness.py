"""A driver that watches where private records go: which node trained which block, and what came to its object store.

python tests/cluster/witness.py     on the cluster at RAY_ADDRESS; prints JSON
"""

import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from ray._private.internal_api import node_stats

from fairpate.config import FitConfig, ModelConfig, RayConfig, TeachersTraining
from fairpate.data.dataset import Split
from teachers.ensemble import train_ensemble
from teachers.ray_pool import RayPool, start_ray

NUM_RECORDS, NUM_FEATURES, NUM_TEACHERS = 600, 20_000, 12
SETTLE_LIMIT_S, MEETING_LIMIT_S = 10.0, 100.0


class WitnessPool:
    """A pool that notes where each block of shards was trained and how many bytes of records it had."""

    def __init__(self, pool: RayPool):
        self._pool, self.device = pool, pool.device
        self.trained: dict[str, int] = defaultdict(int)

    def run(self, function: Callable[..., Any], shared: Any, items: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        def with_witness(shared: Any, item: Any, device: str) -> Any:
            import ray

            _, shards = item
            num_bytes = sum(x.nbytes + y.nbytes for x, y in shards)
            return function(shared, item, device), ray.get_runtime_context().get_node_id(), num_bytes

        for position, (result, node, num_bytes) in self._pool.run(with_witness, shared, items):
            self.trained[node] += num_bytes
            yield position, result


class Store:
    """What an object store holds and ever held, in bytes."""

    def __init__(self, stats: Any):
        self.used, self.ever = stats.object_store_bytes_used, stats.cumulative_created_bytes


def stores() -> dict[str, Store]:
    """The store of every node."""
    asked = {n["NodeID"]: (n["NodeManagerAddress"], n["NodeManagerPort"]) for n in ray.nodes() if n["Alive"]}
    return {node: Store(node_stats(*place, include_memory_info=False).store_stats) for node, place in asked.items()}


def large_split() -> Split:
    """Records that fill an object store where they are copied."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_RECORDS, NUM_FEATURES, generator=generator)
    y = (x[:, 0] > 0).long()
    return Split(x=x, y=y, z=y, record_id=tuple(str(i) for i in range(NUM_RECORDS)))


def meet(folder: str, item: int, _device: str) -> None:
    """Wait for the other item: the two actors are on one machine."""
    (Path(folder) / f"item-{item}").touch()
    limit = time.monotonic() + MEETING_LIMIT_S
    while len(list(Path(folder).glob("item-*"))) < 2 and time.monotonic() < limit:
        time.sleep(0.05)


def main() -> None:
    split, config = large_split(), RayConfig(num_actors=2)
    teachers = TeachersTraining(
        num_teachers=NUM_TEACHERS, model=ModelConfig(name="logistic"), fit=FitConfig(epochs=1), block_size=1
    )
    with start_ray(config), RayPool(config) as pool, tempfile.TemporaryDirectory() as folder:
        for _ in pool.run(meet, folder, [0, 1]):
            pass  # both actors are there
        before, witness = stores(), WitnessPool(pool)
        train_ensemble(split, teachers, num_classes=2, seed=0, checkpoint_dir=Path(folder), pool=witness)
        after, deadline_s = stores(), time.monotonic() + SETTLE_LIMIT_S
        while any(store.used > 2**20 for store in stores().values()) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        told = {
            "records": split.x.nbytes + split.y.nbytes,
            "trained": witness.trained,
            "arrived": {node: after[node].ever - before[node].ever for node in witness.trained},
            "left": sum(store.used for store in stores().values()),
        }
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
