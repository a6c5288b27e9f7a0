"""From a Renyi curve to (epsilon, delta). Shapes: A orders.

``improved`` is Canonne, Kamath and Steinke 2020, Proposition 12, by dp_accounting; ``classic`` is Mironov 2017,
Proposition 3: valid, looser.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from fairpate.later import dp_accounting

FloatArray = npt.NDArray[np.float64]
Conversion = Literal["improved", "classic"]


def epsilon_of_curve(
    rdp_A: npt.ArrayLike, orders_A: npt.ArrayLike, *, target_delta: float, conversion: Conversion = "improved"
) -> tuple[float, float]:
    """(epsilon, best order) of a given Renyi curve. ValueError for a NaN or negative cost or a bad delta."""
    if not 0 < target_delta < 1:
        raise ValueError(f"Expected 0 < target_delta < 1, got {target_delta}.")
    costs, orders = np.asarray(rdp_A, dtype=np.float64), np.asarray(orders_A, dtype=np.float64)
    if not np.all(costs >= 0):
        raise ValueError("Expected a Renyi curve without NaN or negative values.")
    if conversion == "improved":
        near_A = _best_orders(costs, orders, target_delta)
        value, order = dp_accounting.rdp.compute_epsilon(orders[near_A].tolist(), costs[near_A].tolist(), target_delta)
        return float(value), float(order)
    if conversion == "classic":
        # A Renyi divergence of 0 means equal distributions, which cost no epsilon and no delta.
        epsilon_A = np.where(costs == 0, 0.0, costs - math.log(target_delta) / (orders - 1))
        best = int(np.argmin(epsilon_A))
        return float(epsilon_A[best]), float(orders[best])
    raise ValueError(f"Expected conversion 'improved' or 'classic', got {conversion!r}.")


def _best_orders(costs_A: FloatArray, orders_A: FloatArray, target_delta: float) -> npt.NDArray[np.bool_]:
    """The orders whose epsilons are the least but for rounding, so that dp_accounting converts a few, not hundreds."""
    with np.errstate(divide="ignore", invalid="ignore"):
        epsilon_A = costs_A + np.log1p(-1 / orders_A) - np.log(target_delta * orders_A) / (orders_A - 1)
    # As there: orders near 1 are left out, and so little divergence is covered by delta alone.
    epsilon_A = np.where(orders_A > 1.01, epsilon_A, math.inf)
    epsilon_A = np.where(target_delta**2 + np.expm1(-costs_A) > 0, 0.0, epsilon_A)
    least = epsilon_A.min()
    # Far wider than the rounding between two ways to write the formula, so that the best order there is kept here.
    near_A: npt.NDArray[np.bool_] = epsilon_A <= least + 1e-9 * max(1.0, abs(least))
    return near_A
