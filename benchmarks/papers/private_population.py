"""What a release by group says of the private population, beside what is true of it, and how often intervals hold.

    python benchmarks/papers/private_population.py configs/published/adult.yaml --seeds 200 201 [--set ...]

Every seed is a split of the data, a release with seeded noise and a student of its own. Per quantity a row says, on
average over seeds: what is true of the private records (read here because the data are public), what is estimated from
the release, the deviation of the error, half the interval's width, and of how many seeds the interval holds the truth.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fairpate.config import read_yaml
from fairpate.data import Dataset, load_data
from fairpate.fairness import rates
from fairpate.fairness.rates import PopulationEstimate
from fairpate.methods.base import configured
from fairpate.releases.directory import read_json
from fairpate.report.metrics import GAPS
from fairpate.report.population import PrivatePopulation
from fairpate.run.folder import read_student
from fairpate.run.run import run_method
from fairpate.terminal import Reporter
from fairpate.types import FloatArray
from student.student import Student


def main() -> None:
    """Print a row per quantity."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--method", help="another than that of the configuration")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    options = parser.parse_args()
    values = read_yaml(options.config)
    values["method"] = options.method or values["method"]
    found = [dict(quantities(values, options.overrides, seed)) for seed in options.seeds]
    print("quantity | true | estimate | error, sd | half width | held")
    for name in found[0]:
        print(row(name, [each[name] for each in found]), flush=True)


def quantities(
    values: dict[str, Any], overrides: list[str], seed: int
) -> Iterator[tuple[str, tuple[float, PopulationEstimate]]]:
    """Of one seed: the truth and its estimate, by name; a student's accuracy on the test split comes first."""
    with TemporaryDirectory() as folder:
        chosen = [f"out={folder}/run", f"seed={seed}", f"data.seed={seed}", "noise=seeded", *overrides]
        by_group = f"{values['method']}.by_group=true"
        settings = configured(values, [*chosen, by_group], method=values["method"])
        dataset = load_data(settings.data)
        run = run_method(settings, Reporter(quiet=True), dataset)
        student = read_student(run, is_free=True)
        found = PrivatePopulation.from_json(read_json(run.private_population))
        accuracy = read_json(run.metrics)["accuracy"]
    yield "accuracy, test", (accuracy, PopulationEstimate(value=accuracy, low=accuracy, high=accuracy))
    yield from beside(table_of(student, dataset), found)


def table_of(student: Student, dataset: Dataset) -> FloatArray:
    """Private records by group, label and prediction."""
    private = dataset.private
    said = student.predict(private.x, private.z.numpy())
    return rates.joint_table(
        said.labels,
        private.z.numpy(),
        num_groups=dataset.num_groups,
        num_classes=dataset.num_classes,
        labels_N=private.y.numpy(),
        answered_N=said.answered,
    )


def beside(truth: FloatArray, found: PrivatePopulation) -> Iterator[tuple[str, tuple[float, PopulationEstimate]]]:
    """Every gap, every group's accuracy, and how often each true label is predicted."""
    for name, gap in found.gaps.items():
        yield name, (GAPS[name](truth).value, gap)
    conditional = rates.divide(truth, truth.sum(axis=-1, keepdims=True))
    _, accuracy_G = rates.accuracies(truth)
    for z, group in enumerate(found.groups):
        yield f"accuracy, {group.name}", (float(accuracy_G[z]), group.accuracy)
        for y, name in enumerate(found.class_names):
            yield f"predicted {name} of {name}, {group.name}", (float(conditional[z, y, y]), group.found[y])


def row(name: str, pairs: list[tuple[float, PopulationEstimate]]) -> str:
    """Means over seeds; undefined estimates are left out and not counted."""
    known = [(true, found) for true, found in pairs if not math.isnan(found.low)]
    if not known:
        return f"{name} | undefined"
    true, value, low, high = (
        np.array(values) for values in zip(*((t, f.value, f.low, f.high) for t, f in known), strict=True)
    )
    held = int(((low <= true) & (true <= high)).sum())
    means = (true.mean(), value.mean(), (value - true).std(), (high - low).mean() / 2)
    return f"{name} | {' | '.join(f'{mean:.3f}' for mean in means)} | {held} of {len(known)}"


if __name__ == "__main__":
    main()
