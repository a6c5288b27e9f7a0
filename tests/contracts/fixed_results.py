"""What every method gives on small data from fixed seeds, in numbers that a rewrite must not change.

python tests/contracts/fixed_results.py          adds the results of new methods to fixed_results.json
python tests/contracts/fixed_results.py --all    writes all of it anew, where a change of results is meant
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairpate.config import DataConfig
from fairpate.data import Dataset, load_data
from fairpate.data.dataset import SPLIT_NAMES
from fairpate.methods.base import configured, standing_here
from fairpate.releases.directory import RunDirectory
from fairpate.run.run import run_method
from fairpate.terminal import Reporter
from student.student import load_student

STORED = Path(__file__).with_name("fixed_results.json")
PIPELINE = "run"
SMALL = {
    "seed": 3,
    "noise": "seeded",
    "evaluation": {"least_cell": 1},  # of ten classes: nearly every cell is small
    "teachers": {"num_teachers": 12, "fit": {"epochs": 20, "batch_size": 16, "learning_rate": 0.01}},
    "aggregator": {
        "num_queries": 150,
        "gate": {"max_disparity": 0.2, "min_count": 10},
        "mechanism": {"threshold": 4, "threshold_stddev_votes": 3, "noise_stddev_votes": 2},
    },
    "student": {
        "model": {"name": "logistic"},
        "fit": {"epochs": 30, "learning_rate": 0.02},
        "idp3": {"max_disparity": 0.2, "min_count": 20},
    },
    "ray": {"num_actors": 0},
}
TARGET = {
    "target": {"epsilon": 8, "delta": 1.0e-4, "accounting": "rdp"},
    "sgd": {"epochs": 5, "learning_rate": 0.01},
    "dp_sgd": {"epochs": 8, "batch_size": 200, "learning_rate": 0.3},
    "fair_dp_sgd": {"temperature": 1.0, "weight": 0.5},  # hard predictions follow the last digit of a weight
    "f_ld": {"warmup_epochs": 3, "epochs": 4},
    "pf_ld": {"warmup_epochs": 3, "epochs": 4},
    "dp_oracle_learner": {"num_rounds": 6, "min_share": 0.001},
    "randomised_response": {"num_rounds": 5},
}


def two_labels() -> Dataset:
    """The embedded digits without colour, of which five and more are one label: every method runs on them."""
    ten = load_data(DataConfig(options={"colour_as_feature": False}))
    splits = {name: dataclasses.replace(s := getattr(ten, name), y=(s.y >= 5).long()) for name in SPLIT_NAMES}
    return dataclasses.replace(ten, **splits, label_names=("low", "high"))


def result_of(name: str, out: Path) -> dict[str, Any]:
    """Train ``name`` (a method, or ``run`` for FairPATE with the noise as configured) in ``out`` and describe it."""
    if name == PIPELINE:
        return _described(run_method(configured(SMALL, [f"out={out}"]), Reporter(quiet=True)))
    # A randomised student is measured by expectation where nothing is refused; refusals would draw labels.
    values = {**SMALL, **TARGET, "student": {**SMALL["student"], "idp3": None}}
    config = configured(values, [f"out={out}"], method=name)
    return _described(run_method(config, Reporter(quiet=True), two_labels()))


def _described(run: RunDirectory) -> dict[str, Any]:
    metrics, statement = (json.loads(path.read_text(encoding="utf-8")) for path in (run.metrics, run.statement))
    weights = torch.cat([value.double().flatten() for value in load_student(run.student).network.state_dict().values()])
    described = {
        "accuracy": metrics["accuracy"],
        "coverage": metrics["coverage"],
        "disparity": metrics["gaps"]["dp_one_vs_rest"]["value"],
        "weights": [float(weights.sum()), float(weights.abs().sum()), float(weights.square().sum())],
        "epsilon": statement["epsilon"],
    }
    if run.labels.exists():
        from fairpate.releases.directory import read_labels

        described["labels"] = np.bincount(read_labels(run.labels).labels, minlength=2).tolist()
    return described


def main() -> None:
    """Make the stored numbers that are missing, or all of them."""
    torch.set_num_threads(1)
    stored = {} if "--all" in sys.argv else json.loads(STORED.read_text(encoding="utf-8"))
    names = (PIPELINE, *standing_here())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FAIRPATE_STATE"] = folder  # these releases are no operator's
        results = stored | {name: result_of(name, Path(folder) / name) for name in names if name not in stored}
    STORED.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
