"""Would thresholds of their own for every group gain anything? The table of small teachers, split by group or not.

    python benchmarks/papers/thresholds_by_group.py [--state FOLDER] [--seeds 100 101 102]

Each run is that of configs/published/small_teachers.yaml on splits that no reported result uses. From its released
counts, the table by score and label is drawn once over all records and once by group, with the same noise on every cell
and so at the same price, and thresholds are fitted to the whole table or to each group's. The noise of both tables is
seeded. ``parity`` is the gap between groups of 100 test records and more, ``calibration`` the largest difference of
the mean probability from the share of the second class in a group, ``coverage`` that behind IDP3 with a margin of .05.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import measured
import numpy as np
import papers
import torch
from scipy.special import softmax

from fairpate.data import Split, load_data
from fairpate.fairness.gate import filter_stream
from fairpate.methods.record_votes import UNITS, WeightedBallot
from fairpate.releases.directory import RunDirectory, read_labels
from fairpate.run.sweep import Cell, cells_of, load_sweep
from fairpate.types import FloatArray, GateRule

NAME = "thresholds_by_group"
CONFIG = Path(__file__).parents[2] / "configs" / "published" / "small_teachers.yaml"
DATA, EPSILONS = ("adult", "credit_default", "acs", "loans"), (0.3, 1.0)
MARGIN = GateRule(max_disparity=0.05, min_count=25)
_LEAST_GROUP = 100


def main() -> None:
    """Measure every cell, and write the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    parser.add_argument("--state", type=Path, default=Path("runs"), help="folder that is kept between commands")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measured.read(NAME)
    for cell in cells_of(load_sweep(CONFIG, [f"seeds={options.seeds}"]), folder=CONFIG.parent):
        epsilon, seed = cell.config.target.stated["epsilon"], cell.config.seed
        names = {kind: f"{cell.data}/{kind}/epsilon={epsilon:g}" for kind in ("together", "by_group")}
        wanted = cell.data in DATA and epsilon in EPSILONS
        if not wanted or all(seed in found.get(name, {}).get("seeds", ()) for name in names.values()):
            continue
        numbers = papers.run_one(cell, options.state)
        fixed = {field: numbers[field] for field in ("unit", "relation", "delta")}
        for kind, metrics in compared(cell, next(options.state.glob(f"*{cell.digest}"))).items():
            print(names[kind], seed, metrics, flush=True)
            papers.add(found, names[kind], seed, fixed | metrics)
        measured.write(NAME, command="python benchmarks/papers/thresholds_by_group.py", cells=found)


def compared(cell: Cell, folder: Path) -> dict[str, dict[str, Any]]:
    """What a rule with thresholds from one table, and one with thresholds of each group, do on the test records."""
    method: Any = cell.config
    dataset, labelled = load_data(method.data), read_labels(RunDirectory(root=folder).labels)
    bins, ballot = method.counts_of(dataset, labelled).bins(dataset, num_bins=method.thresholds.num_bins)
    (event,), draws = method.beside(dataset), np.random.default_rng(method.seed)

    def noisy_rule(split: Split) -> FloatArray:
        person_N = None if split.person_N is None else split.person_N.numpy()
        exact_KC = bins.table(ballot.votes(split.x), split.y.numpy(), person_N)
        drawn_KC = np.rint(draws.normal(0, event.noise_stddev_votes, exact_KC.shape)).astype(np.int64)
        return bins.calibrated(exact_KC + drawn_KC, event)

    private, groups = dataset.private, range(dataset.num_groups)
    # A person has records of one group, so that a group's table has the units of its own persons.
    own = [noisy_rule(private.take(np.flatnonzero(private.z.numpy() == group).tolist())) for group in groups]
    rules = {"together": [noisy_rule(private)] * len(own), "by_group": own}
    return {kind: _tested(rule, ballot, dataset.test, dataset.num_classes) for kind, rule in rules.items()}


def _tested(rules: list[FloatArray], ballot: WeightedBallot, test: Split, num_classes: int) -> dict[str, Any]:
    x_NW, y_N, z_N = ballot.votes(test.x) / UNITS, test.y.numpy(), test.z.numpy()
    chances_NC = np.stack([softmax(x_NW @ rule_CW.T, axis=1) for rule_CW in rules])[z_N, np.arange(len(z_N))]
    labels_N = chances_NC.argmax(axis=1)
    large = [group for group in range(len(rules)) if (z_N == group).sum() >= _LEAST_GROUP]
    rates = [(labels_N[z_N == group] == 1).mean() for group in large]
    errors = [abs(chances_NC[z_N == group, 1].mean() - (y_N[z_N == group] == 1).mean()) for group in large]
    order = np.random.default_rng(0).permutation(len(y_N))
    sizes = {"num_groups": len(rules), "num_classes": num_classes}
    kept = filter_stream(labels_N[order], z_N[order], rule=MARGIN, **sizes)
    return {
        "accuracy": float((labels_N == y_N).mean()),
        "parity": float(max(rates) - min(rates)),
        "calibration": float(max(errors)),
        "coverage": float(np.mean(kept)),
    }


if __name__ == "__main__":
    main()
