"""Filters that drop records for parity before a model learns, and what one in front of private data costs.

FairPATE names two that differ. ``P_pre`` (Algorithm 3) is a stream: running counts decide record by record. Behind a
mechanism, on released labels, it is post-processing and free; it is the one gate of :mod:`fairpate.fairness.gate`
(CF-GNMax and IDP3 are the others). The filter of Theorem 1 (Appendix) sorts: per label it keeps every record of the
smaller group, m of them, and the first ``m + floor(2 gamma m / (1 - gamma))`` of the larger in a fixed public order.

Theorem 1: in front of an (epsilon, delta)-DP mechanism, with two groups, the *sorted* filter gives
(K epsilon, K e^(K epsilon) delta) for ``K = 2 + ceil(2 gamma / (1 - gamma))``, by group privacy: one record added or
removed changes at most K records that are kept. It does NOT cover the streaming filter, where one record can flip any
number of later decisions; never put :func:`streaming_filter` in front of private training.

Deviations from the paper: its displayed inequality has two terms swapped, and its ratio is a group's share within the
label, not a demographic-parity rate. K is computed in fractions, because in floating point 2 * 0.9 / (1 - 0.9) > 18.

Shapes: N records.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from fairpate.fairness.gate import filter_stream

streaming_filter = filter_stream
"""P_pre on released labels: True where the record is kept, in stream order."""


def preprocessing_factor(max_disparity: float | Fraction) -> int:
    """K of Theorem 1 for the sorted filter: an exact integer; a float means the decimal that it prints as."""
    return 2 + math.ceil(_share(max_disparity))


def cost_behind_sorted_filter(epsilon: float, delta: float, *, max_disparity: float | Fraction) -> tuple[float, float]:
    """(epsilon, delta) of an (``epsilon``, ``delta``)-DP mechanism that sees only what the sorted filter keeps."""
    if not 0 <= epsilon < math.inf or not 0 <= delta < 1:
        raise ValueError(f"Expected a finite epsilon >= 0 and 0 <= delta < 1, got {epsilon} and {delta}.")
    factor = preprocessing_factor(max_disparity)
    try:
        return factor * epsilon, min(1.0, factor * math.exp(factor * epsilon) * delta)
    # A factor too large for a float: any delta above 0 becomes 1, and 0 stays 0.
    except OverflowError:
        return factor * epsilon, 1.0 if delta else 0.0


def target_behind_sorted_filter(
    epsilon: float, delta: float, *, max_disparity: float | Fraction
) -> tuple[float, float]:
    """The largest (epsilon, delta) of a mechanism behind the filter that costs (``epsilon``, ``delta``) with it."""
    factor, _ = preprocessing_factor(max_disparity), cost_behind_sorted_filter(epsilon, delta, max_disparity=0)
    return epsilon / factor, delta * math.exp(-epsilon) / factor


def sorted_filter(
    labels_N: npt.ArrayLike, groups_N: npt.ArrayLike, order_N: npt.ArrayLike, *, max_disparity: float | Fraction
) -> npt.NDArray[np.bool_]:
    """True where the record is kept. ``order_N`` are public ranks that depend on the record alone, all different.

    ValueError for groups other than 0 and 1, for lengths that differ and for equal ranks.
    """
    labels, groups, order = np.asarray(labels_N), np.asarray(groups_N), np.asarray(order_N)
    if not len(labels) == len(groups) == len(order):
        raise ValueError(f"Expected equal lengths, got {len(labels)}, {len(groups)} and {len(order)}.")
    if not np.isin(groups, (0, 1)).all():
        raise ValueError(f"Expected groups 0 and 1: the theorem has two, got {np.unique(groups)}.")
    if len(np.unique(order)) < len(order):
        raise ValueError("Expected an order without ties: equal ranks let the rows' positions decide.")
    share = _share(max_disparity)
    kept = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        members = [np.flatnonzero((labels == label) & (groups == group)) for group in (0, 1)]
        smaller = min(len(rows) for rows in members)
        limit = smaller + math.floor(share * smaller)
        for rows in members:
            # The first of a fixed order: one record more changes at most K that are kept, where a running count has no
            # bound.
            kept[rows[np.argsort(order[rows])][:limit]] = True
    return kept


def _share(max_disparity: float | Fraction) -> Fraction:
    """2 gamma / (1 - gamma), exactly."""
    if not 0 <= max_disparity < 1:
        raise ValueError(f"Expected 0 <= max_disparity < 1, got {max_disparity}.")
    gamma = max_disparity if isinstance(max_disparity, Fraction) else Fraction(repr(float(max_disparity)))
    return 2 * gamma / (1 - gamma)
