"""The sorted filter of FairPATE's Theorem 1 (Appendix), which drops records for parity before private training.

FairPATE has two filters that drop records before a model learns. ``P_pre`` (Algorithm 3) is a stream: running counts
decide record by record (:func:`fairpate.fairness.gate.filter_stream`). On released labels it is post-processing and
free. The filter of Theorem 1 sorts: per label it keeps every record of the smaller group, m of them, and the first ``m
+ floor(2 gamma m / (1 - gamma))`` of the larger in a fixed public order. In front of an (epsilon, delta)-DP mechanism,
with two groups, it gives (K epsilon, K e^(K epsilon) delta) for ``K = 2 + ceil(2 gamma / (1 - gamma))``, by group
privacy: one record added or removed changes at most K records that are kept. The theorem does NOT cover the streaming
filter, where one record can flip any number of later decisions; never put that one in front of private training.

Deviations from the paper: Theorem 1's displayed inequality has two terms swapped, and its ratio is a group's share
within the label, not a demographic-parity rate.

Shapes: N records.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt


def preprocessing_factor(max_disparity: float | Fraction) -> int:
    """Return the integer K of FairPATE's Theorem 1: :func:`sorted_filter`, applied to the records before a private
    mechanism, multiplies the mechanism's epsilon by K. A float ``max_disparity`` is read as the decimal number that it
    prints.
    """
    return 2 + math.ceil(_share(max_disparity))


def cost_behind_sorted_filter(epsilon: float, delta: float, *, max_disparity: float | Fraction) -> tuple[float, float]:
    """Return the (epsilon, delta) of an (``epsilon``, ``delta``)-DP mechanism whose input has passed FairPATE's
    :func:`sorted_filter`.
    """
    if not 0 <= epsilon < math.inf or not 0 <= delta < 1:
        raise ValueError(f"Expected a finite epsilon >= 0 and 0 <= delta < 1, got {epsilon} and {delta}.")
    factor = preprocessing_factor(max_disparity)
    try:
        # As the theorem states it; group privacy alone gives e^((K - 1) epsilon), which is less.
        return factor * epsilon, min(1.0, factor * math.exp(factor * epsilon) * delta)
    # A factor too large for a float: any delta above 0 becomes 1, and 0 stays 0.
    except OverflowError:
        return factor * epsilon, 1.0 if delta else 0.0


def target_behind_sorted_filter(
    epsilon: float, delta: float, *, max_disparity: float | Fraction
) -> tuple[float, float]:
    """Return the largest (epsilon, delta) that a mechanism may have by itself, so that :func:`sorted_filter` followed
    by the mechanism is (``epsilon``, ``delta``)-DP. It inverts :func:`cost_behind_sorted_filter`.
    """
    # The cost is computed for its checks alone. K changes at epsilon / K together multiply delta by K e^epsilon.
    factor, _ = preprocessing_factor(max_disparity), cost_behind_sorted_filter(epsilon, delta, max_disparity=0)
    return epsilon / factor, delta * math.exp(-epsilon) / factor


def sorted_filter(
    labels_N: npt.ArrayLike, groups_N: npt.ArrayLike, order_N: npt.ArrayLike, *, max_disparity: float | Fraction
) -> npt.NDArray[np.bool_]:
    """Return True for each record that the sorted filter of FairPATE's Theorem 1 keeps, shape (N,). For each label it
    drops records of the larger of two groups, the last ones by rank, so that the groups differ little in size.

    ``max_disparity`` determines how much larger a group may remain. ``order_N`` are distinct public ranks, each a
    function of its record alone. ValueError for groups other than 0 and 1, for lengths that differ and for equal ranks.
    """
    labels, groups, order = np.asarray(labels_N), np.asarray(groups_N), np.asarray(order_N)
    if not len(labels) == len(groups) == len(order):
        raise ValueError(
            f"Expected equal lengths of labels, groups and ranks, got {len(labels)}, {len(groups)} and {len(order)}."
        )
    if not np.isin(groups, (0, 1)).all():
        raise ValueError(
            f"Expected groups 0 and 1, as FairPATE's Theorem 1 is for two groups, got {np.unique(groups)}; number "
            "the two groups 0 and 1, and merge any others."
        )
    if len(np.unique(order)) < len(order):
        raise ValueError("Expected order_N without ties, got equal ranks; give every record a rank of its own.")
    share = _share(max_disparity)
    kept = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        members = [np.flatnonzero((labels == label) & (groups == group)) for group in (0, 1)]
        smaller = min(len(rows) for rows in members)
        # `share` is an exact fraction: rounding could move the limit by a record.
        limit = smaller + math.floor(share * smaller)
        for rows in members:
            # The first of a fixed order: one record more changes at most K that are kept, where a running count has no
            # bound.
            kept[rows[np.argsort(order[rows])][:limit]] = True
    return kept


def _share(max_disparity: float | Fraction) -> Fraction:
    """Return 2 gamma / (1 - gamma) for gamma = ``max_disparity``, as an exact fraction. :func:`sorted_filter` lets the
    larger group exceed the smaller by this fraction of the smaller group's size.
    """
    if not 0 <= max_disparity < 1:
        raise ValueError(f"Expected 0 <= max_disparity < 1, got {max_disparity}.")
    # As the decimal that it prints: the binary 0.8 is a little larger, and would make K 11 instead of 10.
    gamma = max_disparity if isinstance(max_disparity, Fraction) else Fraction(repr(float(max_disparity)))
    return 2 * gamma / (1 - gamma)
