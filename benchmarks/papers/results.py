"""Run methods over several seeds and print their rows of docs/results.md.

    python benchmarks/papers/results.py configs/adult.yaml --seeds 0 1 2 [--set section.field=value ...]
    python benchmarks/papers/results.py configs/train/color_mnist.yaml dp_sgd fair_dp_sgd --seeds 0 1 2

Without names the method of the configuration is run. Noise is seeded so that a row can be made again; such runs say
themselves that they are not private. With IDP3 a row shows the student as it refuses, and beside it the same student
without refusals. A field that one of several methods does not read is left out for it. Teachers that several rows share
are trained once, in the private folder given by ``--teachers``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from fairpate.config import apply_override, merge, read_yaml
from fairpate.data import load_data
from fairpate.methods.base import DEFAULT, Method, config_digest, configured
from fairpate.methods.voting import VotingMethod
from fairpate.pages import epsilon_text
from fairpate.releases.directory import RunDirectory, read_json, read_labels, read_statement
from fairpate.run.run import run_method
from fairpate.terminal import Reporter

COLUMNS = {
    "epsilon": "epsilon",
    "accuracy": "accuracy",
    "disparity": "disparity",
    "coverage": "coverage",
    "fnr": "false-negative rate",
    "unrefused_accuracy": "accuracy, unrefused",
    "unrefused_disparity": "disparity, unrefused",
    "unrefused_left_out": "records left out, unrefused",
    "label_accuracy": "label accuracy",
    "answered": "answered",
    "epsilon_data_dependent": "epsilon, data-dependent",
    "epsilon_as_in_paper": "as in the paper",
    "minutes": "minutes",
}


def main() -> None:
    """Run every seed of every method, then print a line per seed and one with mean and standard deviation."""
    options = _parse()
    print(f"| method | seed | {' | '.join(COLUMNS.values())} |\n{'|-' * (len(COLUMNS) + 2)}|")
    for method in options.methods or [read_yaml(options.config).get("method", DEFAULT)]:
        rows = [_run(options, method, seed) for seed in options.seeds]
        for seed, row in zip(options.seeds, rows, strict=True):
            print(f"| {method} | {seed} | {' | '.join(_text(name, [row[name]]) for name in COLUMNS)} |")
        if len(rows) > 1:
            summary = " | ".join(_text(name, [row[name] for row in rows]) for name in COLUMNS)
            print(f"| {method} | mean ± sd | {summary} |", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("methods", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--teachers", type=Path, help="private folder of checkpoints that rows share")
    return parser.parse_args()


def _run(options: argparse.Namespace, method: str, seed: int) -> dict[str, float]:
    said: dict[str, Any] = {"noise": "seeded", "seed": seed, "data": {"seed": seed}}
    for override in options.overrides:
        apply_override(said, override)
    if options.teachers is not None:
        said["storage"] = str(options.teachers.absolute())
    config = configured(merge(read_yaml(options.config), said), method=method)
    out = options.runs / f"{method}-{options.config.stem}-{config_digest(config)}"
    started = time.monotonic()
    run = run_method(config.model_copy(update={"out": out}), Reporter(Console(stderr=True)))
    return _numbers(run, config) | {"minutes": (time.monotonic() - started) / 60}


def _numbers(run: RunDirectory, config: Method) -> dict[str, float]:
    metrics = read_json(run.metrics)
    unrefused, statement = metrics.get("without_refusals", metrics), read_statement(run)
    costs = read_json(run.costs) if run.costs.exists() else {}
    gaps = metrics["gaps"]
    found: dict[str, float | None] = {
        "epsilon": math.inf if statement.epsilon is None else statement.epsilon,
        "accuracy": metrics["accuracy"],
        "disparity": gaps["dp_one_vs_rest"]["value"],
        "coverage": metrics["coverage"],
        "fnr": gaps["false_negative_rate"]["value"] if len(metrics["class_names"]) == 2 else None,
        "unrefused_accuracy": unrefused["accuracy"],
        "unrefused_disparity": unrefused["gaps"]["dp_one_vs_rest"]["value"],
        "unrefused_left_out": unrefused["num_left_out"],
        "label_accuracy": _label_accuracy(run, config) if run.labels.exists() else math.nan,
        "answered": math.nan if statement.queries is None else statement.queries.answered,
        "epsilon_data_dependent": costs.get("epsilon_data_dependent", math.nan),
        "epsilon_as_in_paper": costs.get("epsilon_as_in_paper", math.nan),
    }
    # Null where too few test records stand behind it.
    return {name: math.nan if value is None else value for name, value in found.items()}


def _label_accuracy(run: RunDirectory, config: Method) -> float:
    """How many released labels are right: known here because benchmark data come with the queries' labels."""
    dataset, labelled = load_data(config.data), read_labels(run.labels)
    asked = config.plan(dataset).dataset.public if isinstance(config, VotingMethod) else dataset.public
    truth = dict(zip(asked.record_id, asked.y.tolist(), strict=True))
    pairs = zip(labelled.record_ids, labelled.labels.tolist(), strict=True)
    return statistics.fmean(truth[record_id] == label for record_id, label in pairs)


def _text(name: str, values: list[float]) -> str:
    mean = statistics.fmean(values)
    if math.isnan(mean):
        return "–"
    spread = statistics.stdev(values) if len(values) > 1 and math.isfinite(mean) else None
    if "accuracy" in name:
        return f"{100 * mean:.1f} %" if spread is None else f"{100 * mean:.1f} ± {100 * spread:.1f} %"
    if name.startswith("epsilon"):
        return epsilon_text(mean) if not spread else f"{epsilon_text(mean)} ± {spread:.2f}"
    if name in ("answered", "minutes", "unrefused_left_out"):
        return f"{mean:.1f}" if name == "minutes" else f"{mean:.0f}"
    return f"{mean:.3f}" if spread is None else f"{mean:.3f} ± {spread:.3f}"


if __name__ == "__main__":
    main()
