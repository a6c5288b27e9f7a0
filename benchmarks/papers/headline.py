"""How much less violation DP-FERMI has than its rivals at the same accuracy: the percentages of its Section 4, ours.

    python benchmarks/papers/headline.py

Reads docs/results/fermi_parity.json and fermi_odds.json, for DP-FERMI in its rivals' unit (cells ``attribute/...``)
fermi_attribute_parity.json and fermi_attribute_odds.json, and writes docs/results/headline.json. A third rival,
``pf_ld_published``, is PF-LD as DP-FERMI's authors ran it: one point a panel, from their files of results, on their
split. Per notion, rival, data set and epsilon, each method is the frontier of its settings, by means over seeds: what
no other setting of it beats in both accuracy and violation. Between two settings the violation is interpolated
linearly, which is what drawing one of both models for each record has at most; below the least accuracy of its
frontier a method stays with that setting.

The paper says "for fixed accuracy level", and not relative to what. So there are two rules and two definitions:

    reduction_*         1 - ours / theirs at 21 evenly spaced accuracies, from the least of either frontier to the most
                        that both reach; a range without width has none
    own_reduction_*     1 - ours / theirs at the settings of the rival's frontier whose accuracy ours reaches
    own_gain_*          theirs / ours - 1 there

Cells of "all" pool data sets and epsilons: the first by the width of their ranges, the others with one vote each, which
is their mean over settings. Settings with a degenerate model in any seed are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Literal

import measured
import numpy as np

FILES = {"parity": "fermi_parity", "odds": "fermi_odds"}
OURS, RIVALS = "dp_fermi", ("pf_ld", "dp_postprocessing", "pf_ld_published")
# Accuracy and violation of PF-LD in the files behind the paper's Figures 2, 3, 4, 7, 8 and 9, rounded.
PUBLISHED = {
    "parity": {
        "adult/epsilon=0.5": (0.8121, 0.0671),
        "adult/epsilon=3": (0.8175, 0.0393),
        "credit_default/epsilon=0.5": (0.8024, 0.0168),
        "credit_default/epsilon=3": (0.8059, 0.0152),
        "parkinsons_row/epsilon=0.5": (0.9224, 0.0496),
        "parkinsons_row/epsilon=3": (0.9449, 0.0644),
    },
    "odds": {
        "adult/epsilon=0.5": (0.7958, 0.0825),
        "adult/epsilon=3": (0.8188, 0.1084),
        "credit_default/epsilon=0.5": (0.7851, 0.0050),
        "credit_default/epsilon=3": (0.7997, 0.0387),
    },
}
DATA, EPSILONS = ("adult", "credit_default", "parkinsons_row"), ("0.5", "3")
_NUM_ACCURACIES = 21
_CDF: Literal["inverted_cdf"] = "inverted_cdf"  # the only definition of a median that weights have

Point = tuple[float, float]


def main() -> None:
    """Write the file of results."""
    found: measured.Cells = {}
    for notion in FILES:
        for unit in ("", "attribute/"):
            cells = compared(notion, unit)
            for rival in RIVALS:
                found |= {unit + name: cell for name, cell in against(cells, rival, notion=notion).items()}
    measured.write("headline", command="python benchmarks/papers/headline.py", cells=found)


def compared(notion: str, unit: str) -> measured.Cells:
    """The cells of all methods under one notion, with DP-FERMI for whole records or for the ``attribute/`` alone."""
    cells = measured.read(FILES[notion])
    if unit:
        cells = {name: cell for name, cell in cells.items() if f"/{OURS}/" not in name}
        cells |= measured.read(f"fermi_attribute_{notion}")
    seeds: list[int] = next((cell["seeds"] for name, cell in cells.items() if f"/{OURS}/" in name), [])
    for panel, (accuracy, violation) in PUBLISHED[notion].items():
        data, _, epsilon = panel.partition("/")
        point = {"seeds": seeds, "accuracy": [accuracy], notion: [violation], "degenerate": [0]}
        cells[f"{data}/pf_ld_published/{epsilon}"] = point
    return cells


def against(cells: measured.Cells, rival: str, *, notion: str) -> measured.Cells:
    """A cell for every data set and epsilon where both methods were run and can be compared, and one of all."""
    found: measured.Cells = {}
    reduced, weights, own = [], [], []
    for data in DATA:
        for epsilon in EPSILONS:
            both = [settings(cells, f"{data}/{method}/", epsilon) for method in (OURS, rival)]
            if not all(both):
                continue
            seeds = _same([cell for method in both for cell in method])
            fronts = [
                frontier([(statistics.fmean(cell["accuracy"]), statistics.fmean(cell[notion])) for cell in method])
                for method in both
            ]
            cell: dict[str, Any] = {}
            accuracies, values = reductions(*fronts)
            if width := accuracies[-1] - accuracies[0]:
                cell |= {"accuracy_least": accuracies[0], "accuracy_most": accuracies[-1]}
                cell |= _summed("reduction", values)
                reduced += values
                weights += [width] * len(values)
            if ratios := at_own_settings(*fronts):
                cell |= _own(ratios)
                own.append(ratios)
            if cell:
                found[f"{notion}/{rival}/{data}/epsilon={epsilon}"] = {"seeds": seeds} | cell
    if found:
        pooled = _summed("reduction", reduced, weights) | _own(own)
        found[f"{notion}/{rival}/all"] = {"seeds": _same(list(found.values()))} | pooled
    return found


def settings(cells: measured.Cells, prefix: str, epsilon: str) -> list[dict[str, Any]]:
    """The cells of one method on one data set at one epsilon whose models are worth something in every seed."""
    chosen = [cell for name, cell in cells.items() if name.startswith(prefix) and name.endswith(f"epsilon={epsilon}")]
    return [cell for cell in chosen if not measured.is_degenerate(cell)]


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


def at_own_settings(ours: Sequence[Point], rival: Sequence[Point]) -> list[float]:
    """``ours / rival`` of the violations at the settings of ``rival`` whose accuracy ours reaches."""
    return [
        float(np.interp(accuracy, *np.transpose(ours))) / violation
        for accuracy, violation in rival
        if accuracy <= ours[-1][0]
    ]


def _own(ratios: Sequence[float] | Sequence[Sequence[float]]) -> dict[str, float]:
    """Both definitions, of ratios or of the means of several lists of them."""
    reduced, gained = (
        [statistics.fmean(map(change, np.atleast_1d(each))) for each in ratios]
        for change in (lambda ratio: 1 - ratio, lambda ratio: 1 / ratio - 1)
    )
    return _summed("own_reduction", reduced) | _summed("own_gain", gained)


def _summed(name: str, values: Sequence[float], weights: Sequence[float] | None = None) -> dict[str, float]:
    """Mean and median, by weight; nothing of nothing."""
    if not values:
        return {}
    median = statistics.median(values) if weights is None else np.quantile(values, 0.5, weights=weights, method=_CDF)
    return {f"{name}_mean": float(np.average(values, weights=weights)), f"{name}_median": float(median)}


def _same(cells: Sequence[dict[str, Any]]) -> list[int]:
    """The seeds of all of them."""
    found = {tuple(cell["seeds"]) for cell in cells}
    if len(found) > 1:
        raise ValueError(f"Expected the same seeds in every cell, got {sorted(found)}; run the others.")
    return list(*found)


if __name__ == "__main__":
    main()
