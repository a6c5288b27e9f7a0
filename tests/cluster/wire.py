"""A driver that trains teachers on a cluster and lets them vote, and says by which bytes somebody who listens between
the nodes would know what was sent.

python tests/cluster/wire.py     on the cluster at RAY_ADDRESS; prints JSON
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairpate.config import FitConfig, ModelConfig, RayConfig, TeachersTraining
from fairpate.data.dataset import Split
from teachers.ensemble import collect_votes, train_ensemble
from teachers.ray_pool import RayPool, start_ray

NUM_RECORDS, NUM_FEATURES, NUM_TEACHERS, NUM_QUERIES = 200, 1000, 4, 300
SAMPLE_BYTES = 64  # of each record, of each block's weights and votes: enough that they cannot come about by chance


class RecordingPool(RayPool):
    """A pool that keeps what workers return."""

    def __init__(self, config: RayConfig):
        super().__init__(config)
        self.returned: list[Any] = []

    def run(self, function: Callable[..., Any], shared: Any, items: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        for position, result in super().run(function, shared, items):
            self.returned.append(result)
            yield position, result


def sample(array: Any) -> str:
    """The hexadecimal digits of bytes in the middle of an array."""
    content = np.ascontiguousarray(array).tobytes()
    start = max(0, len(content) // 2 - SAMPLE_BYTES // 2)
    return content[start : start + SAMPLE_BYTES].hex()


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_RECORDS + NUM_QUERIES, NUM_FEATURES, generator=generator)
    y = (x[:NUM_RECORDS, 0] > 0).long()
    split = Split(x=x[:NUM_RECORDS], y=y, z=y, record_id=tuple(str(i) for i in range(NUM_RECORDS)))
    training = TeachersTraining(
        num_teachers=NUM_TEACHERS, model=ModelConfig(name="logistic"), fit=FitConfig(epochs=1), block_size=1
    )
    config = RayConfig(num_actors=1)
    with start_ray(config), RecordingPool(config) as pool, tempfile.TemporaryDirectory() as folder:
        ensemble = train_ensemble(split, training, num_classes=2, seed=0, checkpoint_dir=Path(folder), pool=pool)
        weights = [array for arrays, _ in pool.returned for array in arrays.values()]
        pool.returned.clear()
        collect_votes(ensemble, x[NUM_RECORDS:], pool=pool)
        sent = {
            "records": [sample(row) for row in split.x.numpy()],
            "weights": [sample(array) for array in weights if array.nbytes >= SAMPLE_BYTES],
            "votes": [sample(votes) for votes in pool.returned],
        }
    sys.stdout.write(json.dumps(sent))


if __name__ == "__main__":
    main()
