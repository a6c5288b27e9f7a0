"""How long whole runs take beside one another: FairPATE, PATE, FairDP-SGD and DP-SGD (Table 5 of FairPATE).

    FAIRPATE_DATA=... OMP_NUM_THREADS=1 python benchmarks/papers/run_times.py [--repeats 3]

UTKFace, configs/utkface.yaml and configs/train/utkface.yaml, at the table's epsilon 4, margin .01, batches of 80 and 30
epochs, fairness weight 5; features and networks are ours, so the ratios compare and the times do not. Processor seconds
of one process, teachers, votes, student, metrics and pages included, data not; contenders take turns. Writes
docs/results/run_times.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import measured
import torch

from fairpate.config import DataConfig, RayConfig, merge, read_yaml
from fairpate.data import Dataset, load_data
from fairpate.methods.base import configured
from fairpate.run.run import run_method
from fairpate.terminal import Reporter

FOLDER = Path(__file__).parents[2] / "configs"
BUDGET = {"budget": {"epsilon": 4.0, "accept_leak": True}, "num_queries": 1500}
SGD = {"dp_sgd": {"epochs": 30, "batch_size": 80}, "target": {"epsilon": 4.0}}
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "pate": ("utkface.yaml", {"aggregator": BUDGET}),
    "fairpate": ("utkface.yaml", {"aggregator": {**BUDGET, "gate": {"max_disparity": 0.01, "min_count": 50}}}),
    "dp_sgd": ("train/utkface.yaml", SGD),
    "fair_dp_sgd": ("train/utkface.yaml", {**SGD, "fair_dp_sgd": {"weight": 5.0}}),
}
BESIDE = {"fairpate": "pate", "fair_dp_sgd": "dp_sgd"}


def main() -> None:
    """Time all of them in turn, and write the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = [{name: seconds(name) for name in CONTENDERS} for _ in range(options.repeats)]
    cells: measured.Cells = {}
    for name in CONTENDERS:
        cells[name] = {"seeds": list(range(options.repeats)), "seconds": [round(each[name], 2) for each in rounds]}
        if name in BESIDE:
            cells[name]["ratio"] = [round(each[name] / each[BESIDE[name]], 3) for each in rounds]
    measured.write("run_times", command="python benchmarks/papers/run_times.py", cells=cells)
    print(cells)


@lru_cache(maxsize=2)
def _dataset(config_json: str) -> Dataset:
    return load_data(DataConfig.model_validate_json(config_json))


def seconds(method: str) -> float:
    """Of one run in a fresh folder, its data set loaded beforehand."""
    file, settings = CONTENDERS[method]
    said = merge(settings, {"noise": "seeded", "data": {"num_public": 1510}})
    config: Any = configured(merge(read_yaml(FOLDER / file), said), method=method)
    if "ray" in type(config).model_fields:
        config = config.model_copy(update={"ray": RayConfig(num_actors=0)})
    _dataset(config.data.model_dump_json())
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        config = config.model_copy(update={"out": Path(folder) / "run"})
        run_method(config, Reporter(quiet=True), load=lambda data: _dataset(data.model_dump_json()))
        return time.process_time() - started


if __name__ == "__main__":
    main()
