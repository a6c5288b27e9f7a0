"""Where Theorem 4 of PF-LD puts the best C_p, and how many gradients a C_p clips (its Figure 4, right column).

    FAIRPATE_DATA=... python benchmarks/papers/clipping_bound.py [--seeds 0 1 2 3 4]

Bank, demographic parity, the settings of configs/train/bank.yaml, gradients of h (the predicted probability) when
constraints set in, after the warm-up. With equal multipliers the bound on the error of a gradient is, up to their size,

    2 sqrt(S) sigma C / (n - 1) + sum over groups of the mean of max(0, |grad h| - C)

for S weights, n members of the smallest group in a batch and sigma the noise multiplier that epsilon leaves. Writes
docs/results/clipping_bound.json: ``optimum``, the C where it is least, and ``clipped_Z``, the share of group Z beyond
it. Reads exact gradients: of public data only.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import measured
import numpy as np
import papers
import torch

from fairpate.config import merge, read_yaml
from fairpate.data import load_data
from fairpate.methods.base import configured
from fairpate.methods.f_ld import calibrated_noise, parity_of, train_f_ld
from fairpate.run.run import initial_model

FILE = Path(__file__).parents[2] / "configs" / "train" / "bank.yaml"
CLIP_NORMS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
EPSILONS = (0.3, 1.0, 3.0, 10.0)


def main() -> None:
    """Warm up a model per seed, and write the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells: measured.Cells = {}
    for seed in options.seeds:
        for name, numbers in measure(seed):
            papers.add(cells, name, seed, numbers)
    measured.write("clipping_bound", command="python benchmarks/papers/clipping_bound.py", cells=cells)


def measure(seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Both parts for one division of the records."""
    config: Any = configured(merge(read_yaml(FILE), {"seed": seed, "data": {"seed": seed}}), method="pf_ld")
    dataset = load_data(config.data)
    private, settings = dataset.private, config.pf_ld
    norms, groups = gradient_norms(config, dataset), private.z.numpy()
    of_group = [norms[groups == group] for group in range(dataset.num_groups)]
    found: list[tuple[str, dict[str, Any]]] = [
        (f"clip_norm={clip:g}", {f"clipped_{z}": float((own > clip).mean()) for z, own in enumerate(of_group)})
        for clip in CLIP_NORMS
    ]
    smallest = settings.batch_size / len(private) * min(len(own) for own in of_group)
    num_weights = dataset.num_classes * (private.x.shape[1] + 1)
    grid = np.concatenate([[0.0], np.geomspace(1e-3, norms.max(), 400)])
    bias = np.array([sum(np.maximum(own - clip, 0).mean() for own in of_group) for clip in grid])
    for epsilon in EPSILONS:
        target = config.target.model_copy(update={"epsilon": epsilon})
        sigma = calibrated_noise(settings, target, num_records=len(private)).gradient
        bound = 2 * math.sqrt(num_weights) * sigma * grid / (smallest - 1) + bias
        found.append((f"epsilon={epsilon:g}", {"optimum": float(grid[bound.argmin()]), "noise_multiplier": sigma}))
    return found


def gradient_norms(config: Any, dataset: Any) -> np.ndarray[Any, Any]:
    """|grad h| of every record of a logistic model after the warm-up: sqrt(2) p (1 - p) |(x, 1)|."""
    private = dataset.private
    model = initial_model(config, dataset)
    settings = config.pf_ld.model_copy(update={"epochs": 0})
    generator = torch.Generator().manual_seed(config.seed)
    trained = train_f_ld(
        model, private.x, private.y, private.z, settings, parity=parity_of(settings, dataset), generator=generator
    )
    with torch.no_grad():
        chance = trained(private.x).softmax(dim=1)[:, 1].numpy()
    length = np.sqrt((private.x.double().numpy() ** 2).sum(axis=1) + 1)
    norms: np.ndarray[Any, Any] = math.sqrt(2) * chance * (1 - chance) * length
    return norms


if __name__ == "__main__":
    main()
