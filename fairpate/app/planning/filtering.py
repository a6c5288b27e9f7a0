"""Theorem 1 of FairPATE as a calculator: what a filter of private records for parity does to a guarantee."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any

from rich.console import RenderableType

from fairpate.app.terminal.console import facts
from fairpate.meaning import delta_text
from fairpate.methods.preprocess import (
    cost_behind_sorted_filter,
    preprocessing_factor,
    target_behind_sorted_filter,
)


def cost_of_filter(epsilon: float, delta: float, disparity: float) -> dict[str, Any]:
    """The factor K; the cost of what is (epsilon, delta) without the filter; and what costs that with it.

    ValueError for numbers that are no guarantee or no disparity.
    """
    cost = cost_behind_sorted_filter(epsilon, delta, max_disparity=disparity)
    target = target_behind_sorted_filter(epsilon, delta, max_disparity=disparity)
    return {
        "factor": preprocessing_factor(disparity),
        "given": {"epsilon": epsilon, "delta": delta, "disparity": disparity},
        "cost": dict(zip(("epsilon", "delta"), cost, strict=True)),
        "target": dict(zip(("epsilon", "delta"), target, strict=True)),
    }


def describe_cost(cost: dict[str, Any]) -> RenderableType:
    """The same in words: what is charged is rounded up, and what may be spent down."""
    given = _guarantee(cost["given"], rounding=None)
    charged = _guarantee(cost["cost"], rounding=ROUND_CEILING)
    allowed = _guarantee(cost["target"], rounding=ROUND_FLOOR)
    return facts(
        [
            ("records", f"one added or removed changes at most {cost['factor']} of those kept"),
            ("cost", f"{given} behind the filter costs {charged}"),
            ("target", f"to cost {given}, spend {allowed} behind it"),
            ("holds for", "two groups and the filter that sorts (docs/training.md); never for a stream of records"),
        ]
    )


def _guarantee(found: dict[str, float], *, rounding: str | None) -> str:
    epsilon, delta = (_rounded(found[name], rounding) for name in ("epsilon", "delta"))
    return f"epsilon {epsilon:.10g}, delta {delta_text(delta)}"


def _rounded(value: float, rounding: str | None) -> float:
    """To four digits; what is wrong in the sixteenth is no reason to round on."""
    return value if rounding is None else float(Context(prec=4, rounding=rounding).create_decimal(f"{value:.12g}"))
