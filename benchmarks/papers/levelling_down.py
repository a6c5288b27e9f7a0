"""What accuracy parity does to the group that fares better: F-LD without noise over the cap on its multipliers.

    FAIRPATE_DATA=... python benchmarks/papers/levelling_down.py [--seeds 0 1 2]

The settings of configs/paper/mean_parity.yaml on Bank and Adult, with forty epochs under constraints, so that
multipliers settle. Writes docs/results/levelling_down.json: of each group (Z = 0, 1) its share of the records, its
accuracy and its mean loss, and whether the model is degenerate, on the records that were learned from. Nothing is
private.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import measured
import numpy as np
import papers
import torch
from torch.nn import functional

from fairpate.data import Dataset, load_data
from fairpate.methods.f_ld import parity_of, train_f_ld
from fairpate.report.metrics import evaluate
from fairpate.run.run import initial_model
from fairpate.run.sweep import Cell, cells_of, load_sweep

SWEEP = Path(__file__).parents[2] / "configs" / "paper" / "mean_parity.yaml"
CAPS = (0.0, 0.03, 0.1, 0.3, 0.5, 5.0)
EPOCHS = 40


def main() -> None:
    """Train for every cap, and write the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: measured.Cells = {}
    for seed in options.seeds:
        sweep = load_sweep(SWEEP, [f"seeds=[{seed}]"])
        for cell in cells_of(sweep, folder=SWEEP.parent):
            if cell.data in ("bank", "adult") and _is_chosen(cell):
                dataset = load_data(cell.config.data)
                for cap in CAPS:
                    papers.add(found, f"{cell.data}/cap={cap:g}", seed, levelled(cell, dataset, cap))
                    print(f"{cell.data}, cap {cap:g}, seed {seed}", flush=True)
    measured.write("levelling_down", command="python benchmarks/papers/levelling_down.py", cells=found)


def _is_chosen(cell: Cell) -> bool:
    settings: Any = getattr(cell.config, "f_ld", None)
    return cell.method == "f_ld" and settings.constraint == "accuracy_parity" and settings.max_multiplier > 1


def levelled(cell: Cell, dataset: Dataset, cap: float) -> dict[str, Any]:
    """Both groups after training with multipliers up to ``cap``."""
    method: Any = cell.config
    config = method.f_ld.model_copy(update={"max_multiplier": cap, "epochs": EPOCHS})
    model, private = initial_model(method, dataset), dataset.private
    trained = train_f_ld(
        model,
        private.x,
        private.y,
        private.z,
        config,
        parity=parity_of(config, dataset),
        generator=torch.Generator().manual_seed(cell.config.seed),
    )
    with torch.no_grad():
        outputs = trained(private.x)
        loss = functional.cross_entropy(outputs, private.y, reduction="none")
    said = outputs.argmax(dim=1)
    judged = evaluate(
        said.numpy(),
        labels_N=private.y.numpy(),
        groups_N=private.z.numpy(),
        class_names=dataset.label_names,
        group_names=dataset.group_names,
        generator=np.random.default_rng(0),
        num_replicates=1,
    )
    right = (said == private.y).double()
    groups = {f"accuracy_{z}": float(right[private.z == z].mean()) for z in (0, 1)}
    groups |= {f"loss_{z}": float(loss[private.z == z].mean()) for z in (0, 1)}
    groups |= {f"share_{z}": float((private.z == z).double().mean()) for z in (0, 1)}
    return {"accuracy": float(right.mean()), "degenerate": len(judged.degenerate), **groups}


if __name__ == "__main__":
    main()
