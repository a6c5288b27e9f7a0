"""The row "no balance" of the ablation of small teachers: records of a shard weigh alike, however common their class.

    python benchmarks/papers/unbalanced.py [--seeds 0 1 2]

It adds cells to docs/results/small_teachers_ablation.json, next to those that `papers.py` writes there. No setting
turns the weights off.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import measured
import papers
import torch

from fairpate.run.sweep import cells_of, load_sweep
from teachers import ridge, teacher

NAME = "small_teachers_ablation"
CONFIG = Path(__file__).parents[2] / "configs" / "published" / f"{NAME}.yaml"


def main() -> None:
    """Measure what is missing, and write the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    without = mock.patch.object(teacher, "solve_teachers", partial(ridge.solve_teachers, balanced=False))
    found = measured.read(NAME)
    # Stored teachers are named by their settings and records, which are those of balanced ones.
    with without, tempfile.TemporaryDirectory() as state:
        for cell in cells_of(load_sweep(CONFIG, []), folder=CONFIG.parent):
            name = f"{cell.data}_unbalanced/{cell.method}"
            is_asked = cell.data in ("adult", "bank") and cell.config.seed in options.seeds
            if not is_asked or cell.config.seed in found.get(name, {}).get("seeds", ()):
                continue
            numbers = papers.run_one(cell, Path(state) / str(cell.config.seed))
            print(f"{name}, seed {cell.config.seed}: {numbers.get('failed') or numbers['accuracy']}", flush=True)
            papers.add(found, name, cell.config.seed, numbers)
            command = f"fairpate compare {CONFIG.relative_to(Path(__file__).parents[2])}"
            measured.write(NAME, command=command, cells=found)


if __name__ == "__main__":
    main()
