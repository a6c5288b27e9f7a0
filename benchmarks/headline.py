"""How much less violation DP-FERMI has than its rivals at the same accuracy: the percentages of its Section 4, ours.

    python benchmarks/headline.py

Reads docs/results/fermi_parity.json and fermi_odds.json, and writes docs/results/headline.json. Per notion, rival, data
set and epsilon, each method is the frontier of its settings, by means over seeds: what no other setting of it beats in
both accuracy and violation. Between two settings the violation is interpolated linearly, which is what drawing one of
both models for each record has at most; below the least accuracy of its frontier a method stays with that setting. The
reduction ``1 - DP-FERMI's violation / the rival's`` is taken at 21 evenly spaced accuracies, from the least of either
frontier to the most that both reach. Cells of "all" pool these of every data set and epsilon. The paper says no more
than "for fixed accuracy level". Settings with a degenerate model in any seed are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import measured
import numpy as np

FILES = {"parity": "fermi_parity", "odds": "fermi_odds"}
OURS, RIVALS = "dp_fermi", ("pf_ld", "dp_postprocessing")
DATA, EPSILONS = ("adult", "credit_default", "parkinsons_row"), ("0.5", "3")
_NUM_ACCURACIES = 21

Point = tuple[float, float]


def main() -> None:
    """Write the file of results."""
    found: measured.Cells = {}
    for notion, file in FILES.items():
        cells = measured.read(file)
        for rival in RIVALS:
            found |= against(cells, rival, notion=notion)
    measured.write("headline", command="python benchmarks/headline.py", cells=found)


def against(cells: measured.Cells, rival: str, *, notion: str) -> measured.Cells:
    """A cell for every data set and epsilon where both methods were run, and one of all."""
    found: measured.Cells = {}
    pooled: list[float] = []
    for data in DATA:
        for epsilon in EPSILONS:
            ours, other = (settings(cells, f"{data}/{method}/", epsilon) for method in (OURS, rival))
            if ours and other:
                cell, reduced = compared(ours, other, notion=notion)
                found[f"{notion}/{rival}/{data}/epsilon={epsilon}"] = cell
                pooled += reduced
    if pooled:
        found[f"{notion}/{rival}/all"] = {"seeds": _same(list(found.values()))} | _summed(pooled)
    return found


def settings(cells: measured.Cells, prefix: str, epsilon: str) -> list[dict[str, Any]]:
    """The cells of one method on one data set at one epsilon whose models are worth something in every seed."""
    chosen = [cell for name, cell in cells.items() if name.startswith(prefix) and name.endswith(f"epsilon={epsilon}")]
    return [cell for cell in chosen if not measured.is_degenerate(cell)]


def compared(
    ours: Sequence[dict[str, Any]], rival: Sequence[dict[str, Any]], *, notion: str
) -> tuple[dict[str, Any], list[float]]:
    """The cell of one comparison, and the reduction at every accuracy. ValueError where seeds differ."""
    fronts = [
        frontier([(statistics.fmean(cell["accuracy"]), statistics.fmean(cell[notion])) for cell in cells])
        for cells in (ours, rival)
    ]
    accuracies, reduced = reductions(*fronts)
    ends = {"accuracy_least": accuracies[0], "accuracy_most": accuracies[-1]}
    return {"seeds": _same([*ours, *rival])} | ends | _summed(reduced), reduced


def frontier(points: Sequence[Point]) -> list[Point]:
    """The (accuracy, violation) that no other beats in both, by rising accuracy and so by rising violation."""
    kept: list[Point] = []
    for accuracy, violation in sorted(points, key=lambda point: (-point[0], point[1])):
        if not kept or violation < kept[-1][1]:
            kept.append((accuracy, violation))
    return kept[::-1]


def reductions(ours: Sequence[Point], rival: Sequence[Point]) -> tuple[list[float], list[float]]:
    """Common accuracies, and ``1 - ours / rival`` of the violations there."""
    least, most = min(ours[0][0], rival[0][0]), min(ours[-1][0], rival[-1][0])
    accuracies = np.linspace(least, most, _NUM_ACCURACIES)
    mine, other = (np.interp(accuracies, *np.transpose(front)) for front in (ours, rival))
    return accuracies.tolist(), (1 - mine / other).tolist()


def _summed(reduced: Sequence[float]) -> dict[str, float]:
    return {"reduction_mean": statistics.fmean(reduced), "reduction_median": statistics.median(reduced)}


def _same(cells: Sequence[dict[str, Any]]) -> list[int]:
    """The seeds of all of them."""
    found = {tuple(cell["seeds"]) for cell in cells}
    if len(found) > 1:
        raise ValueError(f"Expected the same seeds in every cell, got {sorted(found)}; run the others.")
    return list(*found)


if __name__ == "__main__":
    main()
