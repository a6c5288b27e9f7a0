"""Dual ascent: the projection is the nearest point of its set, and a step follows the violations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from fairpate.methods.parity import DualAscent


@pytest.mark.parametrize("cap", [math.inf, 0.7])
def test_the_projection_is_the_nearest_point(cap: float) -> None:
    """A general solver looks for a nearer one."""
    generator = np.random.default_rng(0)
    for _ in range(5):
        values = generator.normal(scale=1.5, size=4)
        found = DualAscent(4, learning_rate=1.0, cap=cap).step(values)
        bounds = [(0, None if math.isinf(cap) else cap)] * 4
        best = minimize(lambda x, v=values: ((x - v) ** 2).sum(), np.full(4, 0.1), bounds=bounds)
        np.testing.assert_allclose(found, best.x, atol=1e-3)


def test_a_step_raises_what_is_violated_and_never_goes_below_zero() -> None:
    dual = DualAscent(3, learning_rate=0.5)
    dual.step(np.array([2.0, 0.2, 0.0]))
    np.testing.assert_allclose(dual.step(np.array([2.0, -1.0, 0.0])), [2.0, 0.0, 0.0])
    np.testing.assert_allclose(dual.multipliers_J, [2.0, 0.0, 0.0])
    capped = DualAscent(2, learning_rate=1.0, cap=0.25)
    np.testing.assert_allclose(capped.step(np.array([1.0, 0.1])), [0.25, 0.1])
    assert not DualAscent(1, learning_rate=1.0, cap=0.0).step(np.array([1.0])).any()


def test_what_is_no_number_or_no_set_is_refused() -> None:
    for values in ([math.nan], [math.inf], [-1.0, math.nan]):
        with pytest.raises(ValueError, match="finite multipliers"):
            DualAscent(len(values), learning_rate=1.0).step(np.array(values))
