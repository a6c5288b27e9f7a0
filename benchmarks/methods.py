"""Train methods over several seeds and print their rows of docs/results.md.

    python benchmarks/methods.py configs/train/color_mnist.yaml dp_sgd fair_dp_sgd --seeds 0 1 2 [--set field=value ...]

Noise is seeded so that a row can be made again; such runs say themselves that they are not private. With IDP3 a row
shows the student as it refuses, and beside it the same student without refusals. Teachers that several rows share are
trained once, in the private folder given by ``--teachers``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

from fairpate.app.progress import Reporter
from fairpate.app.rundir import RunDirectory, config_digest
from fairpate.app.train import read_statement, train_method
from fairpate.config import load_config
from fairpate.evaluation.page import epsilon_text
from fairpate.methods.TODO import TrainConfig

NOISY = ("aggregator", "dp_sgd", "pf_ld", "dp_postprocessing", "dp_oracle_learner", "randomised_response")
SEEDED = [f"{section}.noise=seeded" for section in NOISY]
COLUMNS = {
    "accuracy": "accuracy",
    "disparity": "disparity",
    "coverage": "coverage",
    "unrefused_accuracy": "accuracy, unrefused",
    "unrefused_disparity": "disparity, unrefused",
    "epsilon": "epsilon, published",
    "epsilon_of_votes": "epsilon of the votes",
}


def main() -> None:
    """Run every seed of every method, then print a line per seed and one with mean and standard deviation."""
    options = _parse()
    print(f"| method | seed | {' | '.join(COLUMNS.values())} |\n{'|-' * (len(COLUMNS) + 2)}|")
    for method in options.methods:
        rows = [_run(options, method, seed) for seed in options.seeds]
        for seed, row in zip(options.seeds, rows, strict=True):
            print(f"| {method} | {seed} | {' | '.join(_text(name, [row[name]]) for name in COLUMNS)} |")
        if len(rows) > 1:
            summary = " | ".join(_text(name, [row[name] for row in rows]) for name in COLUMNS)
            print(f"| {method} | mean ± sd | {summary} |", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--teachers", type=Path, help="private folder of checkpoints that rows share")
    return parser.parse_args()


def _run(options: argparse.Namespace, method: str, seed: int) -> dict[str, float]:
    overrides = [*SEEDED, *options.overrides, f"method={method}", f"seed={seed}", f"data.seed={seed}"]
    config = load_config(options.config, overrides, schema=TrainConfig)
    places: dict[str, Any] = {"out": options.runs / f"{method}-{options.config.stem}-{config_digest(config)}"}
    if options.teachers is not None:
        places["storage"] = str(options.teachers.absolute())
    return _numbers(train_method(config.model_copy(update=places), Reporter(Console(stderr=True))))


def _numbers(run: RunDirectory) -> dict[str, float]:
    metrics = json.loads(run.metrics.read_text(encoding="utf-8"))
    unrefused = metrics.get("without_refusals", metrics)
    epsilon, of_votes = read_statement(run)["epsilon"], math.nan
    if run.costs.exists():
        of_votes = json.loads(run.private_record.read_text(encoding="utf-8"))["epsilon"]
    return {
        "accuracy": metrics["accuracy"],
        "disparity": metrics["gaps"]["dp_one_vs_rest"]["value"],
        "coverage": metrics["coverage"],
        "unrefused_accuracy": unrefused["accuracy"],
        "unrefused_disparity": unrefused["gaps"]["dp_one_vs_rest"]["value"],
        "epsilon": math.inf if epsilon is None else epsilon,
        "epsilon_of_votes": of_votes,
    }


def _text(name: str, values: list[float]) -> str:
    mean = statistics.fmean(values)
    if math.isnan(mean):
        return "–"
    spread = statistics.stdev(values) if len(values) > 1 and math.isfinite(mean) else None
    if "accuracy" in name:
        return f"{100 * mean:.1f} %" if spread is None else f"{100 * mean:.1f} ± {100 * spread:.1f} %"
    if name.startswith("epsilon"):
        return epsilon_text(mean) if not spread else f"{epsilon_text(mean)} ± {spread:.2f}"
    return f"{mean:.3f}" if spread is None else f"{mean:.3f} ± {spread:.3f}"


if __name__ == "__main__":
    main()
