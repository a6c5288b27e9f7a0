"""Metrics of predictions as tables by group: rates, calibration, thresholds, and disparities to a reference group.

The rates are those of Fairlearn's metrics, and NaN where a group has no such record. Scores, where a model has them,
are judged by the expected calibration error (Guo et al., arXiv 1706.04599, equation 3): they are divided into ten bins
of equal width, and the error is the mean over records of how far the mean score of a record's bin is from the share of
hits in it. With two classes the score is that of the second class and a hit is a record of this class; with more, the
score is that of the predicted class and a hit is a right prediction.

The tables are exact. No guarantee covers them, and no small cell is hidden: they are for the owner of the records.

Shapes: N records, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fairpate.config import nearest

Rows = dict[str, dict[str, Any]]
"""A table: rows by name of the group, each with values by name of the column."""

ALL = "all"
"""The name of the row of all groups together."""
_BINS = 10
_NOT_RATES = {"count", "group", "threshold"}


def rates_by_group(
    truth_N: npt.NDArray[Any],
    labels_N: npt.NDArray[Any],
    groups_N: npt.NDArray[Any],
    *,
    answered_N: npt.NDArray[np.bool_],
    class_names: Sequence[str],
    group_names: Sequence[str],
    scores_NC: npt.NDArray[Any] | None = None,
    reference: str | None = None,
) -> Rows:
    """Return the metrics of each group, if there are two or more, and of all records.

    Columns: ``count`` and ``coverage``; of the answered records ``accuracy``, and ``selection_rate`` and ``recall`` of
    each class; with two classes those of the second class alone, with ``false_negative_rate`` and
    ``false_positive_rate``; with ``scores_NC`` also ``calibration_error``. With ``reference``, the name of a group,
    every rate has two further columns, ``<rate>_difference`` and ``<rate>_ratio``: the rate less that of the reference
    group, and divided by it (NaN if that is 0). ValueError for an unknown reference.
    """
    members = {name: groups_N == code for code, name in enumerate(group_names)} if len(group_names) > 1 else {}
    if reference is not None and reference not in members:
        raise ValueError(f"reference: no group {reference!r}{nearest(reference, members)}.")
    rows = {}
    for name, of_N in {**members, ALL: np.ones(len(truth_N), dtype=np.bool_)}.items():
        truth, labels, answered = truth_N[of_N], labels_N[of_N], answered_N[of_N]
        row = {"count": int(of_N.sum()), "coverage": _share(answered)}
        row |= _rates(truth[answered], labels[answered], class_names)
        if scores_NC is not None:
            scores, place = scores_NC[of_N][answered], labels[answered]
            if len(class_names) == 2:
                row["calibration_error"] = calibration_error(scores[:, 1], truth[answered] == 1)
            else:
                top = scores[np.arange(len(scores)), place]
                row["calibration_error"] = calibration_error(top, place == truth[answered])
        rows[name] = row
    if reference is not None:
        compared = {name: value for name, value in rows[reference].items() if name not in _NOT_RATES}
        for row in rows.values():
            for name, value in compared.items():
                row[f"{name}_difference"] = row[name] - value
                row[f"{name}_ratio"] = row[name] / value if value else math.nan
    return rows


def rates_at_thresholds(
    truth_N: npt.NDArray[Any],
    scores_N: npt.NDArray[Any],
    groups_N: npt.NDArray[Any],
    *,
    class_names: Sequence[str],
    group_names: Sequence[str],
    thresholds: Sequence[float],
) -> list[dict[str, Any]]:
    """Return the rates of each group, and of all records, if the second of two classes is predicted from each threshold
    on: one row per threshold and group. ``scores_N`` are the scores of that class. Every record counts, also those that
    the model refuses to answer. ValueError for other than two classes and for thresholds that are not in 0 to 1."""
    if len(class_names) != 2:
        raise ValueError(f"thresholds: expected two classes, got {len(class_names)}: with more there is no one score.")
    if wrong := [each for each in thresholds if not 0 <= each <= 1]:
        raise ValueError(f"thresholds: expected numbers from 0 to 1, got {wrong[0]}; give shares such as 0.5.")
    rows = []
    for threshold in thresholds:
        found = rates_by_group(
            truth_N,
            (scores_N >= threshold).astype(np.int64),
            groups_N,
            answered_N=np.ones(len(truth_N), dtype=np.bool_),
            class_names=class_names,
            group_names=group_names,
        )
        for name, row in found.items():
            del row["coverage"]
            rows.append({"threshold": float(threshold), "group": name, **row})
    return rows


def calibration_error(scores_N: npt.NDArray[Any], hits_N: npt.NDArray[np.bool_]) -> float:
    """Return the expected calibration error of scores in 0 to 1 for the events ``hits_N``; NaN without a record."""
    if not len(scores_N):
        return math.nan
    # A score on an edge belongs to the bin below it, as scikit-learn has it.
    bin_N = np.searchsorted(np.linspace(0, 1, _BINS + 1)[1:-1], scores_N)
    # The sizes of bins cancel: what remains is the mean of the differences of sums.
    sums = np.bincount(bin_N, weights=scores_N.astype(np.float64) - hits_N, minlength=_BINS)
    return float(np.abs(sums).sum() / len(scores_N))


def as_frame(rows: Rows | list[dict[str, Any]]) -> Any:
    """Return a table as a pandas frame, or as an Arrow table if pandas is not installed.

    The index of the frame is the group, or threshold and group. Of a table by group, ``frame.attrs`` has the largest
    ``difference`` and the smallest ``ratio`` between groups, by column.
    """
    listed = rows if isinstance(rows, list) else [{"group": name} | row for name, row in rows.items()]
    try:
        import pandas as pd
    except ModuleNotFoundError:
        return pa.Table.from_pylist(listed)
    frame = pd.DataFrame.from_records(listed)
    if isinstance(rows, list):
        return frame.set_index(["threshold", "group"])
    frame = frame.set_index("group").rename_axis(None)
    # Of rates alone, and not of columns that compare with a reference group.
    others = [name for name in frame if name in _NOT_RATES or name.endswith(("_difference", "_ratio"))]
    rates = frame.drop(index=ALL, columns=others)
    frame.attrs = {
        "difference": (rates.max() - rates.min()).to_dict(),
        "ratio": (rates.min() / rates.max()).to_dict(),
    }
    return frame


def _rates(truth: npt.NDArray[Any], labels: npt.NDArray[Any], class_names: Sequence[str]) -> Mapping[str, float]:
    """Return the rates of answered records of one group."""
    row, is_binary = {"accuracy": _share(labels == truth)}, len(class_names) == 2
    for code, name in [(1, class_names[1])] if is_binary else enumerate(class_names):
        of = "" if is_binary else f" of {name}"
        row[f"selection_rate{of}"] = _share(labels == code)
        row[f"recall{of}"] = _share((labels == code)[truth == code])
    if is_binary:
        row["false_negative_rate"] = _share((labels == 0)[truth == 1])
        row["false_positive_rate"] = _share((labels == 1)[truth == 0])
    return row


def _share(events: npt.NDArray[np.bool_]) -> float:
    return float(events.mean()) if len(events) else math.nan
