"""The largest coverage that any reject option can have at a demographic disparity, for a perfect classifier.

    python benchmarks/papers/coverage_ceiling.py configs/color_mnist.yaml --max-disparity 0.01

A reject option may only leave predictions out. With two groups, let it answer the share c_z of group z: the answered
labels' distributions p_z then satisfy p_z(k) <= n_zk / (c_z n_z) and |p_0(k) - p_1(k)| <= gamma. For given shares that
is a linear programme; the shares themselves are searched on a grid of hundredths.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from fairpate.data import Split, load_data
from fairpate.methods.base import configured

FloatArray = npt.NDArray[np.float64]
GRID = np.linspace(0.01, 1, 100)


def main() -> None:
    """Print the ceiling for the test split of a configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--max-disparity", type=float, default=0.01)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    options = parser.parse_args()
    dataset = load_data(configured(options.config, options.overrides).data)
    counts_GC = count(dataset.test, dataset.num_groups, dataset.num_classes)
    coverage, shares = ceiling(counts_GC, options.max_disparity)
    print(f"{dataset.name}, {dataset.sensitive_attribute}: perfect classifier, {len(dataset.test)} test records")
    print(f"disparity when everything is answered: {disparity(counts_GC):.3f}")
    by_group = ", ".join(f"{share:.2f}" for share in shares)
    print(f"largest coverage at disparity {options.max_disparity}: {coverage:.3f}, by group {by_group}")


def count(split: Split, num_groups: int, num_classes: int) -> FloatArray:
    """Records per group and label, (G, C)."""
    counts_GC = np.zeros((num_groups, num_classes))
    np.add.at(counts_GC, (split.z.numpy(), split.y.numpy()), 1)
    return counts_GC


def disparity(counts_GC: FloatArray) -> float:
    """The largest difference of a label's rate between the two groups."""
    rates_GC = counts_GC / counts_GC.sum(axis=1, keepdims=True)
    return float(np.abs(rates_GC[0] - rates_GC[1]).max())


def ceiling(counts_GC: FloatArray, max_disparity: float) -> tuple[float, tuple[float, float]]:
    """The largest feasible coverage on the grid of group shares, and those shares."""
    sizes_G = counts_GC.sum(axis=1)
    if len(sizes_G) != 2:
        raise ValueError(f"Expected two groups, got {len(sizes_G)}.")
    pairs = [(first, second) for first in GRID for second in GRID]
    pairs.sort(key=lambda shares: -float(sizes_G @ np.array(shares)))
    for shares in pairs:
        if is_feasible(counts_GC / (sizes_G * np.array(shares))[:, None], max_disparity):
            return float(sizes_G @ np.array(shares) / sizes_G.sum()), shares
    return 0.0, (0.0, 0.0)


def is_feasible(most_GC: FloatArray, max_disparity: float) -> bool:
    """Whether two distributions below ``most_GC`` differ by at most ``max_disparity`` in every label."""
    num_classes = most_GC.shape[1]
    identity, ones, zeros = np.eye(num_classes), np.ones(num_classes), np.zeros(num_classes)
    difference = np.hstack([identity, -identity])
    result = linprog(
        np.zeros(2 * num_classes),
        A_ub=np.vstack([difference, -difference]),
        b_ub=np.full(2 * num_classes, max_disparity),
        A_eq=np.array([[*ones, *zeros], [*zeros, *ones]]),
        b_eq=[1.0, 1.0],
        bounds=[(0.0, float(most)) for most in most_GC.ravel()],
        method="highs",
    )
    return bool(result.success)


if __name__ == "__main__":
    main()
