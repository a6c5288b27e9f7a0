"""What does a network of pictures add to the rule of thousands of small teachers? ColorMNIST, 10,000 public pictures.

    python benchmarks/papers/network_of_pictures.py [--state FOLDER] [--seeds 0] [--methods supervised] [--epochs 20]

The runs are those of configs/published/small_teachers_pictures.yaml, whose published model is a linear rule of a
picture's features. Here a convolutional network learns from that model's probabilities on public pictures, bent and
without colour, as in configs/published/color_mnist.yaml: ``supervised`` from the most certain ones, ``fixmatch`` also
from the others. Both read the published model and public pictures alone, and cost no privacy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import measured
import numpy as np
import papers
import torch

from fairpate.config import AugmentConfig, StudentTraining, parse_config, read_yaml
from fairpate.data import load_data
from fairpate.nn import fit
from fairpate.releases.directory import RunDirectory
from fairpate.run.sweep import cells_of, load_sweep
from student.student import PublicRecords, load_student, train_student

NAME = "network_of_pictures"
CONFIGS = Path(__file__).parents[2] / "configs" / "published"
TAUGHT_SHARE = {"supervised": 0.95, "fixmatch": 0.8}


def main() -> None:
    """Train a network behind every run, and write the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0])
    parser.add_argument("--methods", nargs="+", choices=sorted(TAUGHT_SHARE), default=["supervised"])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--state", type=Path, default=Path("runs"), help="folder that is kept between commands")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found, sweep = measured.read(NAME), CONFIGS / "small_teachers_pictures.yaml"
    for cell in cells_of(load_sweep(sweep, [f"seeds={options.seeds}"]), folder=CONFIGS):
        epsilon, seed = cell.config.target.stated["epsilon"], cell.config.seed
        if cell.data != "color_mnist" or epsilon not in options.epsilons:
            continue
        run = RunDirectory(root=options.state / sweep.stem / f"{cell.method}-{cell.data}-{cell.digest}")
        numbers = papers.numbers_of(run) if run.record.exists() else papers.run_one(cell, run.root.parent)
        fixed = {field: numbers[field] for field in ("unit", "relation", "delta", "epsilon")}
        pictures = load_data(cell.config.data.model_copy(update={"embedding": None}))
        chances_MC = torch.from_numpy(load_student(run.student).probabilities(pictures.public.x))
        for method in options.methods:
            name = f"color_mnist/{method}/epsilon={epsilon:g},epochs={options.epochs}"
            if seed in found.get(name, {}).get("seeds", ()):
                continue
            network = taught(pictures.public.x, chances_MC, method, epochs=options.epochs, seed=seed)
            said_N = fit.said_labels(network, grey(pictures.test.x)).argmax(axis=1)
            right = float(np.mean(said_N == pictures.test.y.numpy()))
            papers.add(found, name, seed, fixed | {"accuracy": right, "rule_accuracy": numbers["accuracy"]})
            print(f"{name}, seed {seed}: {right}, the rule {numbers['accuracy']}", flush=True)
            measured.write(NAME, command=f"python benchmarks/papers/{NAME}.py", cells=found)


def taught(x: torch.Tensor, chances_MC: torch.Tensor, method: str, *, epochs: int, seed: int) -> torch.nn.Module:
    """A network that learned from the published model's probabilities on public pictures."""
    values = read_yaml(CONFIGS / "color_mnist.yaml")
    student, training = values["student"], values["training"]
    loop = student["fit"] | training | {"epochs": epochs, "label_smoothing": student["label_smoothing"]}
    # The most certain ones; ties in the pool's order.
    order = np.argsort(-chances_MC.max(dim=1).values.numpy(), kind="stable")
    count = round(TAUGHT_SHARE[method] * len(order))
    return train_student(
        PublicRecords(
            answered_x=grey(x[order[:count]]), labels=chances_MC[order[:count]], unlabelled_x=grey(x[order[count:]])
        ),
        parse_config({"method": method, "model": student["model"], "fit": loop}, StudentTraining),
        num_classes=chances_MC.shape[1],
        generator=torch.Generator().manual_seed(seed),
        augmentation=parse_config(values["augment"], AugmentConfig),
    )


def grey(x: torch.Tensor) -> torch.Tensor:
    """Pictures without their colour: digits are red or green, and the other channel is empty."""
    return x.amax(dim=1, keepdim=True)


if __name__ == "__main__":
    main()
