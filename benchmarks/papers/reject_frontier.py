"""One published student and its whole frontier of fairness and coverage: reject options of many margins, at no cost.

    python benchmarks/papers/reject_frontier.py runs/NAME [runs/OTHER ...] [--min-count 300]

A reject option (IDP3) reads predictions and groups, so it may be chosen after a model is published. Two readings of its
gap: a group against the others (``one_vs_rest``), and against all records together (``overall``). For each margin a row
says what is left at the test records: accuracy, the largest one-vs-rest gap, coverage, and that of each group. The
order is that of the test split.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from fairpate.data import load_data
from fairpate.fairness.gate import filter_stream
from fairpate.releases.directory import read_statement
from fairpate.report.metrics import evaluate
from fairpate.run.folder import open_run_directory
from fairpate.types import GapDefinition, GateRule
from student.student import load_student

MARGINS = (0.0025, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1)
GAPS: tuple[GapDefinition, ...] = ("one_vs_rest", "overall")


def main() -> None:
    """Print a row per run, gap and margin."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--min-count", type=int, default=300)
    options = parser.parse_args()
    print("run | epsilon | gap | margin | accuracy | disparity | coverage | coverage of each group")
    for folder in options.runs:
        for line in rows(folder, options.min_count):
            print(f"{folder.name} | {line}", flush=True)


def rows(folder: Path, min_count: int) -> list[str]:
    """Of one run."""
    run, config = open_run_directory(folder)
    dataset, epsilon = load_data(config.data), read_statement(run).epsilon
    test, found = dataset.test, []
    labels, groups = load_student(run.student).predict(test.x, test.z.numpy()).labels, test.z.numpy()
    for gap in GAPS:
        for margin in MARGINS:
            rule = GateRule(max_disparity=margin, min_count=min_count, gap=gap)
            answered = filter_stream(
                labels, groups, rule=rule, num_groups=dataset.num_groups, num_classes=dataset.num_classes
            )
            done = evaluate(
                labels,
                labels_N=test.y.numpy(),
                groups_N=groups,
                answered_N=answered,
                class_names=dataset.label_names,
                group_names=dataset.group_names,
                generator=np.random.default_rng(0),
            )
            by_group = ", ".join(f"{answered[groups == group].mean():.2f}" for group in range(dataset.num_groups))
            found.append(
                f"{epsilon:.2f} | {gap} | {margin:g} | {100 * (done.accuracy or 0):.1f} % | {done.disparity:.4f} | "
                f"{done.coverage:.3f} | {by_group}"
            )
    return found


if __name__ == "__main__":
    main()
