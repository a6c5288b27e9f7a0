"""Run one configuration over several seeds and print its row of docs/results.md.

    python benchmarks/results.py configs/adult.yaml --seeds 0 1 2 [--set section.field=value ...]

Noise is seeded so that a row can be made again; such runs say themselves that they are not private. Teachers that
several rows share are trained once, in the private folder given by ``--teachers``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from fairpate.app.pipeline import run_pipeline
from fairpate.app.progress import Reporter
from fairpate.app.rundir import RunDirectory, config_digest
from fairpate.app.tables import read_labels
from fairpate.config import RunConfig, load_config
from fairpate.data import load_dataset
from fairpate.evaluation.page import epsilon_text

HEADER = (
    "| label accuracy | student accuracy | disparity | coverage | answered | epsilon, data-dependent | as published "
    "| data-independent | minutes |"
)


def main() -> None:
    """Run every seed, then print one line per seed and their mean."""
    options = _parse()
    rows = [_run(options, seed) for seed in options.seeds]
    print(f"{HEADER}\n{'|-' * HEADER.count(' | ')}|-|")
    for row in rows:
        print(_line(row))
    if len(rows) > 1:
        print("mean " + _line({name: statistics.fmean(row[name] for row in rows) for name in rows[0]}))
        print("standard deviation " + _line({name: statistics.stdev(row[name] for row in rows) for name in rows[0]}))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--teachers", type=Path, help="private folder of checkpoints that rows share")
    return parser.parse_args()


def _run(options: argparse.Namespace, seed: int) -> dict[str, float]:
    overrides = [*options.overrides, f"seed={seed}", f"data.seed={seed}", "aggregator.noise=seeded"]
    config = load_config(options.config, overrides)
    places: dict[str, Any] = {"out": options.runs / f"{options.config.stem}-{config_digest(config)}"}
    if options.teachers is not None:
        places["storage"] = str(options.teachers.absolute())
    started = time.monotonic()
    run = run_pipeline(config.model_copy(update=places), Reporter(Console(stderr=True)))
    minutes = (time.monotonic() - started) / 60
    return _numbers(run) | {"label_accuracy": _label_accuracy(run, config), "minutes": minutes}


def _label_accuracy(run: RunDirectory, config: RunConfig) -> float:
    """How many released labels are right: known here because benchmark data come with the public split's labels."""
    public, labelled = load_dataset(config.data).public, read_labels(run.labels)
    truth = dict(zip(public.record_id, public.y.tolist(), strict=True))
    pairs = zip(labelled.record_ids, labelled.labels.tolist(), strict=True)
    return statistics.fmean(truth[record_id] == label for record_id, label in pairs)


def _numbers(run: RunDirectory) -> dict[str, float]:
    metrics, statement, costs = (
        json.loads(path.read_text(encoding="utf-8")) for path in (run.metrics, run.statement, run.costs)
    )
    return {
        "accuracy": metrics["accuracy"],
        "disparity": metrics["gaps"]["dp_one_vs_rest"]["value"],
        "coverage": metrics["coverage"],
        "answered": statement["answered"],
        "epsilon_data_dependent": costs["epsilon_data_dependent"],
        "epsilon_as_published": costs["epsilon_as_published"],
        "epsilon_data_independent": costs["epsilon_data_independent"],
    }


def _line(row: dict[str, float]) -> str:
    percent = [f"{100 * row[name]:.1f} %" for name in ("label_accuracy", "accuracy")]
    gaps = [f"{row['disparity']:.3f}", f"{row['coverage']:.2f}", f"{row['answered']:.0f}"]
    prices = [epsilon_text(row[f"epsilon_{name}"]) for name in ("data_dependent", "as_published", "data_independent")]
    return "| " + " | ".join([*percent, *gaps, *prices, f"{row['minutes']:.1f}"]) + " |"


if __name__ == "__main__":
    main()
