"""Compare methods of the PATE and SGD families on one frontier, then choose from it, in Python.

    fairpate new mine --example compare-families
    python mine/compare_families.py [--out runs/families] [--seeds 0 1]

Finished cells are stored, so a second call with more seeds or a longer grid runs only the missing ones.
"""

import argparse
from pathlib import Path

from fairpate import SelectionRule, best_error, by_panel, compare_methods, frontier, points_of, select

SWEEP = {
    "data_sets": {"color_digits": {"grid": {"target.epsilon": [2, 5]}}},
    "methods": {
        "dp_sgd": {},
        "fair_dp_sgd": {"grid": {"fair_dp_sgd.weight": [0.1, 1.0]}},
        "fairpate": {"grid": {"aggregator.gate.max_disparity": [0.05, 0.15]}},
        "weighted_votes": {"grid": {"student.idp3": [None, {"max_disparity": 0.1, "min_count": 25}]}},
    },
    # Everything else fits the data set, as in `fairpate run`; `fairpate compare --example quick` has more methods.
    "settings": {"dp_sgd": {"epochs": 40, "batch_size": 200}},
}


def main() -> None:
    """Run the cells of the comparison that have no result yet. Then print, for each data set and guarantee, the Pareto
    frontier and the choices by three rules: fair, private and accurate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/families"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()

    comparison = compare_methods(SWEEP | {"seeds": options.seeds}, out=options.out, title="families")
    finished = [(row.record, row.command) for row in comparison.rows if row.record is not None]
    points = points_of([record for record, _ in finished], commands=[command for _, command in finished])
    for panel, found in by_panel(points).items():
        print(f"\n{panel.data}, {panel.privacy.relation} {panel.privacy.unit}, delta {panel.privacy.delta:g}")
        for point in sorted(frontier(found).members, key=lambda point: point.value("epsilon")):
            numbers = ", ".join(
                f"{name} {point.value(name):.3f}" for name in ("epsilon", "disparity", "error", "refused")
            )
            print(f"  {point.method:<14} {numbers}")
        rule = SelectionRule(max_accuracy_loss=0.3)
        for setting in ("fair", "private", "accurate"):
            choice = select(found, setting, rule=rule, best_error=best_error(found, rule))
            print(f"{setting:>9}: {'nothing' if choice is None else choice.commands[0]}")
    print(f"\n{comparison.folder.report}")


if __name__ == "__main__":
    main()
