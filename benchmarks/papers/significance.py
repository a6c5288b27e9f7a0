"""Whether two methods of a sweep differ by more than seeds do: paired tests over the seeds that both ran.

    python benchmarks/papers/significance.py

Differences of one cell to another, seed by seed on the same division of the records; a paired t-test, as in PF-LD, and
Wilcoxon's signed-rank test, which assumes no normal differences. Writes docs/results/significance.json from the files
of the sweeps, so it runs in a second. P-values are of one comparison each, not corrected for their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import measured
from scipy import stats

NOTIONS = {"demographic_parity": "parity", "equalized_odds": "odds"}
PAIRS = [
    ("mean_parity_epsilon", f"bank/pf_ld/{said}", f"bank/randomised_response/{said}", metric)
    for notion, gap in NOTIONS.items()
    for epsilon in ("0.1", "0.3", "1", "3")
    for said in [f"constraint={notion},epsilon={epsilon}"]
    for metric in ("accuracy", gap)
]
_FEWEST = 3


def main() -> None:
    """Compare every pair that was run."""
    cells: measured.Cells = {}
    for file, one, other, metric in PAIRS:
        known = measured.read(file)
        found = compared(known[one], known[other], metric) if one in known and other in known else None
        if found is not None:
            cells[f"{one}/{metric}"] = {"file": file, "one": one, "other": other, **found}
    measured.write("significance", command="python benchmarks/papers/significance.py", cells=cells)
    for name, cell in cells.items():
        print(f"{name}: {measured.text('difference', cell['difference'])}, p {cell['p']:.2g}, {cell['p_wilcoxon']:.2g}")


def compared(one: Mapping[str, Any], other: Mapping[str, Any], metric: str) -> dict[str, Any] | None:
    """Differences ``one - other`` by seed, and p-values; None for fewer than three seeds in common."""
    ones, others = (dict(zip(cell["seeds"], cell[metric], strict=True)) for cell in (one, other))
    seeds = sorted(ones.keys() & others.keys())
    if len(seeds) < _FEWEST:
        return None
    pairs = [(ones[seed], others[seed]) for seed in seeds]
    return {
        "seeds": seeds,
        "difference": [round(a - b, 6) for a, b in pairs],
        "p": float(stats.ttest_rel([a for a, _ in pairs], [b for _, b in pairs]).pvalue),
        "p_wilcoxon": float(stats.wilcoxon([a - b for a, b in pairs]).pvalue),
    }


if __name__ == "__main__":
    main()
