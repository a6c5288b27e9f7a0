"""The discrete Gaussian by its definition, for oracles: normalised masses, no table and no recursion."""

from __future__ import annotations

import numpy as np


def masses(stddev: float, reach: int) -> np.ndarray:
    """P[X = x] for x from -reach to reach, beyond which nothing is left."""
    weights = np.exp(-(np.arange(-reach, reach + 1.0) ** 2) / (2 * stddev**2))
    return weights / weights.sum()
