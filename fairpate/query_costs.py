"""What single queries cost as a share of their worst case, in words and numbers for the operator alone.

The published epsilon counts every query at its worst case; what votes made of it depends on votes. Shapes: Q charges,
in the order in which they came; costs are Renyi divergences of one order, which add up.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
_MOST_SHOWN = 8
_NEARLY = 0.99  # of the worst case


def shares_of_worst(cost_Q: FloatArray, worst_Q: FloatArray) -> FloatArray:
    """Between 0 and 1; NaN where the worst case is not finite, as without noise."""
    known_Q = np.isfinite(worst_Q) & (worst_Q > 0)
    share_Q = np.full(len(cost_Q), math.nan)
    share_Q[known_Q] = np.clip(cost_Q[known_Q] / worst_Q[known_Q], 0, 1)
    return share_Q


def votes_matter(of_worst_Q: FloatArray, voted_Q: npt.NDArray[np.bool_]) -> bool:
    """Whether votes make a difference to the cost of a query that was voted on."""
    charged_Q = of_worst_Q[voted_Q]
    return len(charged_Q) > 0 and not np.isnan(charged_Q).any() and float(charged_Q.min()) < 1 - 1e-9


def dearest(cost_Q: FloatArray) -> list[int]:
    """Those that cost most, the dearest first; none that cost nothing."""
    order: list[int] = np.argsort(-cost_Q, kind="stable")[:_MOST_SHOWN].tolist()
    return [query for query in order if cost_Q[query] > 0]


def cost_words(cost_Q: FloatArray, of_worst_Q: FloatArray, *, varies: bool) -> str:
    """What queries cost against their worst case, and how much of it the dearest made up."""
    if not len(cost_Q) or not cost_Q.sum():
        return "No query has cost anything."
    if not math.isfinite(cost_Q.sum()):
        return "Some query has no finite cost."
    if not varies:
        # What was refused before the vote costs nothing by votes.
        which = "Every query" if (of_worst_Q > 0).all() else "Every query that was voted on"
        return f"{which} costs its worst case: here the price does not depend on votes."
    number = max(1, len(cost_Q) // 10)
    share = _percent(float(np.sort(cost_Q)[::-1][:number].sum() / cost_Q.sum()))
    full = int((of_worst_Q >= _NEARLY).sum())
    queries = f"{len(cost_Q):,} {'query' if len(cost_Q) == 1 else 'queries'}"
    all_of_it = f"{full:,} of {queries}" if full else "none of them"
    return (
        f"The published ε counts every query at its worst case. These votes made half of the queries cost "
        f"{_percent(float(np.median(of_worst_Q)))} of it or more, and {all_of_it} all of it. The "
        f"dearest {number:,} of {len(cost_Q):,} made up {share} of the cost."
    )


def _percent(share: float) -> str:
    return "undefined" if math.isnan(share) else f"{100 * share:.0f}\u00a0%"
