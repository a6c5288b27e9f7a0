"""Fairness metrics: the largest difference between groups, and the cell that attains it.

A metric is a set of events (what is predicted, given what) times a comparison of groups (one against the rest,
pairwise, against everyone). One table of prediction mass feeds them all, so hard labels, probabilities and mixtures are
treated alike, and a bootstrap evaluates every replicate at once.

Definitions: FairPATE eq. 1 and RaCO-DP (one against the rest), DP-FERMI eqs. 2, 10 and 11 and its ERMI. A cell without
records is left out and counted; NaN remains when no two groups can be compared. A maximum over noisy cells is biased
upwards: read it beside its smallest cell.

Shapes: as in ``fairpate.fairness.rates``, and E events: ``hits_EG / sizes_EG`` is the rate of an event in a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from fairpate.fairness.rates import FloatArray, divide

ErrorRate = Literal["fnr", "fpr", "fdr"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Where a metric attains its value. ``None`` stands for every group, and for no condition.

    ``label`` is the predicted label (None for a rate that is about no single one, such as accuracy), or the one that is
    missed when ``label_is`` is False;
    ``given_label`` the true label conditioned on, or the one excluded when ``given_is`` is False.
    ``other_group`` is set by pairwise comparisons.
    """

    group: int | None = None
    other_group: int | None = None
    label: int | None = None
    given_label: int | None = None
    given_is: bool = True
    label_is: bool = True


@dataclass(frozen=True, kw_only=True)
class WorstCase:
    """The largest value over the defined cells, NaN when there is none.

    ``n_undefined`` counts the rates left out: without records, or without another group to compare with.
    ``min_cell_size`` is the number of records in the smallest cell that took part (0 when none did); ``where`` is the
    cell that attains ``value``.
    """

    value: float
    n_undefined: int
    min_cell_size: int
    where: Cell | None


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A percentile interval at ``level``; ``n_undefined`` of its replicates had no value and were left out."""

    low: float
    high: float
    level: float
    num_replicates: int
    n_undefined: int


@dataclass(frozen=True, kw_only=True)
class Events:
    """Rates by event and group, as numerators and denominators; ``cells`` says what each event is."""

    hits_EG: FloatArray
    sizes_EG: FloatArray
    cells: Sequence[Cell]


RateEvents = Callable[[FloatArray], Events]
_Comparison = Callable[[FloatArray, FloatArray], FloatArray]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A fairness metric: call it with a ``joint_table`` for its worst case."""

    events: RateEvents
    compare: _Comparison

    def __call__(self, joint_GYC: FloatArray) -> WorstCase:
        """The worst case of one table of shape (G, Y, C)."""
        return _worst_case(self.events(joint_GYC), self.compare)

    def values(self, joint_RGYC: FloatArray) -> FloatArray:
        """The value alone for every replicate, shape (R,); NaN where undefined."""
        events = self.events(joint_RGYC)
        differences = self.compare(events.hits_EG, events.sizes_EG)
        return _nan_max(differences.reshape(len(joint_RGYC), math.prod(differences.shape[1:])))


def bootstrap_interval(metric: Metric, joint_RGYC: FloatArray, *, level: float = 0.95) -> Interval:
    """The percentile interval of ``metric`` over ``resampled_tables``; NaN bounds when no replicate has a value.

    It covers the sampling of the evaluated records, neither training nor privacy noise.
    """
    if not 0 < level < 1:
        raise ValueError(f"Expected 0 < level < 1, got {level}.")
    values_R = metric.values(joint_RGYC)
    # A replicate in which too few groups have records has no value, and must not count as 0.
    defined = values_R[~np.isnan(values_R)]
    tails = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(defined, tails) if defined.size else (math.nan, math.nan)
    return Interval(
        low=float(low),
        high=float(high),
        level=level,
        num_replicates=values_R.size,
        n_undefined=values_R.size - defined.size,
    )


def predicted(joint_GYC: FloatArray) -> Events:
    """Every predicted label, unconditionally."""
    counts_GC = joint_GYC.sum(axis=-2)
    hits_EG = counts_GC.swapaxes(-1, -2)
    sizes_EG = np.broadcast_to(counts_GC.sum(axis=-1)[..., None, :], hits_EG.shape)
    return Events(hits_EG=hits_EG, sizes_EG=sizes_EG, cells=[Cell(label=k) for k in range(counts_GC.shape[-1])])


def predicted_given_label(joint_GYC: FloatArray) -> Events:
    """Every predicted label given every true label."""
    _require_labels(joint_GYC)
    num_classes = joint_GYC.shape[-1]
    batch = joint_GYC.shape[:-3]
    by_event = np.moveaxis(joint_GYC, -3, -1)
    sizes = np.broadcast_to(by_event.sum(axis=-2, keepdims=True), by_event.shape)
    return Events(
        hits_EG=by_event.reshape(*batch, -1, by_event.shape[-1]),
        sizes_EG=sizes.reshape(*batch, -1, by_event.shape[-1]),
        cells=[Cell(label=k, given_label=y) for y in range(num_classes) for k in range(num_classes)],
    )


def found_or_mistaken(joint_GYC: FloatArray) -> Events:
    """Each label against all others: predicted when true (TPR), then predicted when not true (FPR)."""
    _require_labels(joint_GYC)
    true_YG = joint_GYC.sum(axis=-1).swapaxes(-1, -2)
    size_1G = true_YG.sum(axis=-2, keepdims=True)
    right_CG = _diagonal(joint_GYC)
    predicted_CG = joint_GYC.sum(axis=-2).swapaxes(-1, -2)
    labels = range(joint_GYC.shape[-1])
    return Events(
        hits_EG=np.concatenate([right_CG, predicted_CG - right_CG], axis=-2),
        sizes_EG=np.concatenate([true_YG, size_1G - true_YG], axis=-2),
        cells=[Cell(label=k, given_label=k, given_is=given) for given in (True, False) for k in labels],
    )


def correct(joint_GYC: FloatArray) -> Events:
    """The prediction is right."""
    _require_labels(joint_GYC)
    right_1G = _diagonal(joint_GYC).sum(axis=-2, keepdims=True)
    sizes_1G = joint_GYC.sum(axis=(-2, -1))[..., None, :]
    return Events(hits_EG=right_1G, sizes_EG=sizes_1G, cells=[Cell()])


def one_vs_rest(hits_EG: FloatArray, sizes_EG: FloatArray) -> FloatArray:
    """Each group's rate minus the rate of all others together, signed."""
    rest_EG = divide(_total(hits_EG) - hits_EG, _total(sizes_EG) - sizes_EG)
    return divide(hits_EG, sizes_EG) - rest_EG


def to_overall(hits_EG: FloatArray, sizes_EG: FloatArray) -> FloatArray:
    """Each group's distance to the overall rate."""
    overall_E1 = divide(_total(hits_EG), _total(sizes_EG))
    distance_EG = np.abs(divide(hits_EG, sizes_EG) - overall_E1)
    # One group alone is the whole, and has no distance to it.
    return np.where(_comparable(sizes_EG), distance_EG, np.nan)


def pairwise(hits_EG: FloatArray, sizes_EG: FloatArray) -> FloatArray:
    """Each group's rate minus that of each other group: shape (..., E, G, G)."""
    rates_EG = divide(hits_EG, sizes_EG)
    itself_GG = np.eye(rates_EG.shape[-1], dtype=np.bool_)
    return np.where(itself_GG, np.nan, rates_EG[..., :, None] - rates_EG[..., None, :])


def level(hits_EG: FloatArray, sizes_EG: FloatArray) -> FloatArray:
    """The rates themselves: a bound on levels compares no groups."""
    return divide(hits_EG, sizes_EG)


dp_one_vs_rest = Metric(events=predicted, compare=one_vs_rest)
dp_to_overall = Metric(events=predicted, compare=to_overall)
dp_pairwise = Metric(events=predicted, compare=pairwise)
eo_full = Metric(events=predicted_given_label, compare=one_vs_rest)
eo_lowy = Metric(events=found_or_mistaken, compare=pairwise)
accuracy_parity = Metric(events=correct, compare=pairwise)


def _found(joint_GYC: FloatArray) -> Events:
    """Of the positive classes, predicted when true."""
    return _select(found_or_mistaken(joint_GYC), _positive_classes(joint_GYC))


found_apart = Metric(events=_found, compare=pairwise)
"""Equal opportunity: of two classes that of the second, of more the largest gap of all."""


def error_rate(kind: ErrorRate) -> Metric:
    """A level, not a gap, over everyone: of two classes that of the second, of more the worst of all.

    ``fnr`` is P[not predicted c | true c], ``fpr`` P[predicted c | not true c], ``fdr`` P[not true c | predicted c],
    which is 1 - precision.
    """
    return Metric(events=partial(_errors, kind), compare=level)


def ermi(joint_GYC: FloatArray) -> float:
    """DP-FERMI's exponential Renyi mutual information of prediction and group: sum p_jr^2 / (p_j p_r) - 1.

    0 exactly when they are independent, at most min(G, C) - 1. NaN with fewer than two groups that have records.
    """
    counts_GC = joint_GYC.sum(axis=-2)
    share_G = divide(counts_GC.sum(axis=-1), counts_GC.sum())
    share_C = divide(counts_GC.sum(axis=-2), counts_GC.sum())
    if (share_G > 0).sum() < 2:
        return math.nan
    ratio_GC = divide(divide(counts_GC, counts_GC.sum()) ** 2, np.outer(share_G, share_C))
    # What nobody is in, or nobody is predicted, is NaN here and adds nothing.
    return float(np.nansum(ratio_GC) - 1)


def ermi_given_label(joint_GYC: FloatArray) -> float:
    """``ermi`` within each true label, averaged by its share of the records (DP-FERMI's equalized odds).

    Labels held by fewer than two groups are left out; NaN when none remains.
    """
    _require_labels(joint_GYC)
    within_Y = np.array([ermi(joint_GYC[:, [y]]) for y in range(joint_GYC.shape[1])])
    defined_Y = ~np.isnan(within_Y)
    size_Y = joint_GYC.sum(axis=(0, 2))
    return float(divide(within_Y[defined_Y] @ size_Y[defined_Y], size_Y[defined_Y].sum()))


def _worst_case(events: Events, compare: _Comparison) -> WorstCase:
    differences = compare(events.hits_EG, events.sizes_EG)
    # A level needs records alone; a comparison another group with records as well.
    took_part_EG = events.sizes_EG > 0 if compare is level else _comparable(events.sizes_EG)
    value = float(_nan_max(differences.reshape(1, -1))[0])
    sizes = events.sizes_EG[took_part_EG]
    return WorstCase(
        value=value,
        n_undefined=int((~took_part_EG).sum()),
        min_cell_size=round(sizes.min()) if sizes.size else 0,
        where=None if math.isnan(value) else located(differences, events.cells),
    )


def located(differences: FloatArray, cells: Sequence[Cell]) -> Cell:
    """The cell of the largest of ``differences``, which a comparison gave."""
    event, *groups = map(int, np.unravel_index(np.nanargmax(differences), differences.shape))
    if differences.shape[1] == 1:  # a rate of everyone
        return cells[event]
    return replace(cells[event], group=groups[0], other_group=groups[1] if len(groups) == 2 else None)


def _comparable(sizes_EG: FloatArray) -> npt.NDArray[np.bool_]:
    defined_EG: npt.NDArray[np.bool_] = sizes_EG > 0
    several_E1: npt.NDArray[np.bool_] = defined_EG.sum(axis=-1, keepdims=True) >= 2
    return defined_EG & several_E1


def _nan_max(values_RD: FloatArray) -> FloatArray:
    # np.nanmax would warn of a replicate where nothing is defined.
    largest_R = np.where(np.isnan(values_RD), -np.inf, values_RD).max(axis=1)
    return np.where(np.isneginf(largest_R), np.nan, largest_R)


def _total(values_EG: FloatArray) -> FloatArray:
    total_E1: FloatArray = values_EG.sum(axis=-1, keepdims=True)
    return total_E1


def _diagonal(joint_GYC: FloatArray) -> FloatArray:
    return np.diagonal(joint_GYC, axis1=-2, axis2=-1).swapaxes(-1, -2)


def _select(events: Events, chosen: Sequence[int]) -> Events:
    return Events(
        hits_EG=events.hits_EG[..., chosen, :],
        sizes_EG=events.sizes_EG[..., chosen, :],
        cells=[events.cells[e] for e in chosen],
    )


def _errors(kind: ErrorRate, joint_GYC: FloatArray) -> Events:
    everyone_1YC = joint_GYC.sum(axis=-3, keepdims=True)
    if kind == "fdr":
        # Transposed, a discovery is a true label and a class that is found its prediction.
        everyone_1YC = everyone_1YC.swapaxes(-1, -2)
    labels, num_classes = _positive_classes(joint_GYC), joint_GYC.shape[-1]
    rates = found_or_mistaken(everyone_1YC)
    if kind == "fpr":
        # All true-positive rates stand first, then the false-positive ones.
        return _select(rates, [num_classes + c for c in labels])
    found = _select(rates, labels)
    cells = [Cell(label=c) if kind == "fdr" else Cell(label=c, given_label=c, label_is=False) for c in labels]
    return Events(hits_EG=found.sizes_EG - found.hits_EG, sizes_EG=found.sizes_EG, cells=cells)


def _positive_classes(joint_GYC: FloatArray) -> Sequence[int]:
    """The second of two; all of more."""
    num_classes = joint_GYC.shape[-1]
    return [1] if num_classes == 2 else list(range(num_classes))


def _require_labels(joint_GYC: FloatArray) -> None:
    if joint_GYC.shape[-2] != joint_GYC.shape[-1]:
        raise ValueError("Expected a table with true labels: pass labels_N to joint_table.")
