"""Figure 2 of FairPATE with thousands of small teachers: models at published epsilons behind IDP3, over its margin.

    python benchmarks/papers/margins_of_rules.py [--state FOLDER] [--seeds 0 1 2 3 4]

The models are those of UTKFace in two other sweeps: at epsilon 1 and 3 FairPATE of
configs/published/small_teachers_pictures.yaml, at 2 and 10 PATE of configs/paper/table1_small_teachers.yaml. Both are
linear rules that are fitted to all noisy counts, which a gate hardly moves. IDP3 reads a published model and public
groups alone, so that one model serves every margin; it waits for 50 answers of a group, in the test order of the split.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import measured
import papers
import torch

from fairpate.data import load_once
from fairpate.fairness import rates
from fairpate.fairness.gate import filter_stream
from fairpate.releases.directory import RunDirectory
from fairpate.run.sweep import Cell, cells_of, load_sweep
from fairpate.types import GateRule
from student.student import load_student

NAME = "margins_of_rules"
CONFIGS = Path(__file__).parents[2] / "configs"
SWEEPS: dict[str, dict[tuple[str, str], tuple[float, ...]]] = {
    "published/small_teachers_pictures": {("utkface", "fairpate"): (1, 3)},
    "paper/table1_small_teachers": {("utkface_private", "pate"): (2,), ("utkface_accurate", "pate"): (10,)},
}
"""Data set, method and epsilons of each sweep."""
MARGINS = (0.01, 0.05, 0.1, 0.2)
MIN_COUNT = 50


def main() -> None:
    """Measure every cell, and write the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--state", type=Path, default=Path("runs"), help="folder that is kept between commands")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measured.read(NAME)
    for name, chosen in SWEEPS.items():
        path = CONFIGS / f"{name}.yaml"
        for cell in cells_of(load_sweep(path, [f"seeds={options.seeds}"]), folder=path.parent):
            epsilon, seed = cell.config.target.stated["epsilon"], cell.config.seed
            if epsilon not in chosen.get((cell.data, cell.method), ()):
                continue
            if seed not in found.get(f"utkface/epsilon={epsilon:g},margin={MARGINS[0]:g}", {}).get("seeds", ()):
                for margin, numbers in behind_margins(cell, options.state / path.stem).items():
                    papers.add(found, f"utkface/epsilon={epsilon:g},margin={margin:g}", seed, numbers)
                    print(f"epsilon {epsilon:g}, margin {margin:g}, seed {seed}: {numbers['accuracy']}", flush=True)
                measured.write(NAME, command=f"python benchmarks/papers/{NAME}.py", cells=found)


def behind_margins(cell: Cell, state: Path) -> dict[float, dict[str, Any]]:
    """What the model of ``cell`` answers on test records by margin: of its answers, accuracy and largest gap."""
    run = RunDirectory(root=state / f"{cell.method}-{cell.data}-{cell.digest}")
    numbers = papers.numbers_of(run) if run.record.exists() else papers.run_one(cell, state)
    # Pictures: the model has the embedding that it reads.
    dataset = load_once(cell.config.data.model_copy(update={"embedding": None}))
    test, by_margin = dataset.test, {}
    labels_N = load_student(run.student).probabilities(test.x).argmax(axis=1)
    y_N, z_N, sizes = test.y.numpy(), test.z.numpy(), {"num_groups": dataset.num_groups}
    sizes["num_classes"] = dataset.num_classes
    for margin in MARGINS:
        rule = GateRule(max_disparity=margin, min_count=MIN_COUNT)
        kept_N = filter_stream(labels_N, z_N, rule=rule, **sizes)
        table_G1C = rates.joint_table(labels_N, z_N, answered_N=kept_N, **sizes)
        by_margin[margin] = {field: numbers[field] for field in ("unit", "relation", "delta", "epsilon")} | {
            "accuracy": float((labels_N == y_N)[kept_N].mean()),
            "coverage": float(kept_N.mean()),
            "parity": rates.dp_one_vs_rest(table_G1C).value,
            "unrefused_accuracy": float((labels_N == y_N).mean()),
        }
    return by_margin


if __name__ == "__main__":
    main()
