"""Prediction rates per group, the gaps between groups, and the named notions of fairness.

**One table.** Every metric is a function of the prediction mass by group z, true label y and predicted label k. A hard
label has mass 1 on its class; a probabilistic prediction has a mass on every class. A rate with an empty denominator is
NaN, never 0: an empty group has no rate. Rates are over answered records.

**Metrics.** A metric is a set of events (a prediction, given a condition) together with a comparison of groups (one
against the rest, pairwise, against all). Its value is the largest difference of an event's rates between groups, with
the event and the groups that attain it, called its cell. Definitions: FairPATE eq. 1 and RaCO-DP (one against the
rest), DP-FERMI eqs. 2, 10 and 11 and its ERMI. A cell without records is left out and counted; the value is NaN if no
two groups can be compared. So a value may be one of fewer comparisons than its definition asks for: it is then a lower
bound, and ``left_out`` names the groups that a verdict must not cover. A maximum over noisy cells is biased upwards.

**Notions.** A notion is a metric with a name and a description. Five notions compare groups: their value is a gap, and
0 is equal treatment. Three bound how often a prediction is wrong over all groups: their value is that rate (RaCO-DP,
appendix A.2). Of two classes the second is the positive one, to which equal opportunity and the error rates refer; of
more classes, each is compared with all others, and the largest value is taken. Among more than two groups demographic
parity compares each with all others together, as FairPATE and RaCO-DP do; the other gaps compare the two groups that
are furthest apart.

**The private population.** The second half estimates the rates of a published student among *private* records, from a
noisy table and public records. The table has, for every group z and label y, the noisy sum S[z, y] of the votes of its
private records: a vote is a vector phi(x), or, for counts, the unit vector of the record's cell. The number of those
records for which the student predicts j is estimated by

    J[z, y, j] = <beta[z, y, j], S[z, y]>

where beta is the regression of "x is predicted j" on phi(x) over the public records of group z, each weighted by p(y |
x), the probability that the release gives x the label y (regression estimators of surveys: Deville and Sarndal 1992).
Rates and gaps are ratios of such sums. All of it is post-processing. It is assumed that over the private records of a
group and label the residual of the regression is 0 on average, as over the public records of that group under these
weights. For counts this means: a private record is predicted like the public records of its cell and group, weighted by
their probability of that label. Each group's fit is shrunk towards the fit over all groups, and this one towards the
average, with the weight of one record: for cells in which a group has no public record.

Shapes: G groups, Y true labels, C predicted classes, N records, R bootstrap replicates, E events: ``hits_EG /
sizes_EG`` is the rate of an event in a group. Y equals C, or is 1 when true labels are not known. A leading ``...``
means any number of replicates. For the private population: M public records, W numbers per vote, J outcomes (Y
predictions, and perhaps a refusal), R draws of the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import scipy

from fairpate.config import nearest, read_yaml
from fairpate.types import DEFAULT_NOTION, BoolArray, FloatArray, IntArray
from fairpate.types import NotionName as NotionName

_REPLICATES_PER_CHUNK = 64


def joint_table(
    predictions: npt.ArrayLike,
    groups_N: npt.ArrayLike,
    *,
    num_groups: int,
    num_classes: int,
    labels_N: npt.ArrayLike | None = None,
    answered_N: npt.ArrayLike | None = None,
) -> FloatArray:
    """Return the number of predictions by group, true label and predicted label, shape (G, Y, C). A probabilistic
    prediction counts as a fraction for each class.

    ``predictions`` holds hard labels (N,) or probabilities (N, C). Only records where ``answered_N`` is True are read.
    ValueError for lengths that differ, labels or groups out of range and rows that are not probabilities.
    """
    groups, labels, mass_NC = _answered_records(
        predictions, groups_N, labels_N, answered_N, num_groups=num_groups, num_classes=num_classes
    )
    # `np.add.at`, because plain indexing would count a cell once, however many records it has.
    joint_GYC = np.zeros((num_groups, 1 if labels_N is None else num_classes, num_classes))
    np.add.at(joint_GYC, (groups, labels), mass_NC)
    return joint_GYC


def resampled_tables(
    predictions: npt.ArrayLike,
    groups_N: npt.ArrayLike,
    *,
    num_groups: int,
    num_classes: int,
    generator: np.random.Generator,
    num_replicates: int,
    labels_N: npt.ArrayLike | None = None,
    answered_N: npt.ArrayLike | None = None,
    persons_N: npt.ArrayLike | None = None,
) -> FloatArray:
    """Return ``joint_table`` of ``num_replicates`` bootstrap samples of the answered records, shape (R, G, Y, C).

    Hard labels are resampled as one multinomial of the table, which has the same distribution. ``persons_N`` names the
    person of each record: then whole persons are drawn, because the records of one person are alike and drawing single
    records would make intervals too narrow.
    """
    groups, labels, mass_NC = _answered_records(
        predictions, groups_N, labels_N, answered_N, num_groups=num_groups, num_classes=num_classes
    )
    num_labels = 1 if labels_N is None else num_classes
    shape = (num_replicates, num_groups, num_labels, num_classes)
    if len(groups) == 0:
        return np.zeros(shape)
    # In chunks: how often each record is drawn takes R times N numbers.
    chunks = [len(part) for part in np.array_split(range(num_replicates), -(-num_replicates // _REPLICATES_PER_CHUNK))]
    if persons_N is not None:
        # Persons without an answered record are not drawn: a replicate has as many answered persons as the sample.
        kept = slice(None) if answered_N is None else np.asarray(answered_N, dtype=np.bool_)
        names, person_N = np.unique(np.asarray(persons_N)[kept], return_inverse=True)
        tables_P = np.zeros((len(names), *shape[1:]))
        np.add.at(tables_P, (person_N, groups, labels), mass_NC)
        even_P, flat_P = np.full(len(names), 1 / len(names)), tables_P.reshape(len(names), -1)
        sums = [generator.multinomial(len(names), even_P, size=chunk) @ flat_P for chunk in chunks]
        return np.concatenate(sums).reshape(shape)
    if np.asarray(predictions).ndim == 1:
        # A hard label is its cell and nothing else: records drawn evenly are one multinomial over cells.
        joint_GYC = np.zeros(shape[1:])
        np.add.at(joint_GYC, (groups, labels), mass_NC)
        drawn = generator.multinomial(len(groups), joint_GYC.ravel() / len(groups), size=num_replicates)
        return drawn.reshape(shape).astype(np.float64)
    cells_N, tables = groups * num_labels + labels, []
    for chunk in chunks:
        drawn_RN = generator.integers(len(cells_N), size=(chunk, len(cells_N)))
        # Counts of draws: one product per cell replaces gathering the records of every replicate.
        weights_RN = np.stack([np.bincount(row, minlength=len(cells_N)) for row in drawn_RN]).astype(np.float64)
        tables.append(np.zeros((chunk, num_groups * num_labels, num_classes)))
        for cell in np.unique(cells_N):
            members_N = cells_N == cell
            tables[-1][:, cell] = weights_RN[:, members_N] @ mass_NC[members_N]
    return np.concatenate(tables).reshape(shape)


def cumulative_tables(
    labels_N: npt.ArrayLike, groups_N: npt.ArrayLike, *, num_groups: int, num_classes: int
) -> FloatArray:
    """Return the :func:`joint_table` after each released label of a stream, shape (N, G, 1, C), to follow a gap over
    time."""
    groups, _, mass_NC = _answered_records(labels_N, groups_N, num_groups=num_groups, num_classes=num_classes)
    steps_NG1C = np.zeros((len(groups), num_groups, 1, num_classes))
    steps_NG1C[np.arange(len(groups)), groups, 0] = mass_NC
    return steps_NG1C.cumsum(axis=0)


def group_rates(joint_GYC: FloatArray) -> FloatArray:
    """Return r(z, k), the share of group z for which label k is predicted, shape (..., G, C)."""
    counts_GC = joint_GYC.sum(axis=-2)
    return divide(counts_GC, counts_GC.sum(axis=-1, keepdims=True))


def accuracies(joint_GYC: FloatArray) -> tuple[float, FloatArray]:
    """Return the accuracy among answered records, overall and per group (G,); NaN where no record was answered."""
    right_G = np.trace(joint_GYC, axis1=-2, axis2=-1)
    size_G = joint_GYC.sum(axis=(-2, -1))
    return float(divide(right_G.sum(), size_G.sum())), divide(right_G, size_G)


def coverages(groups_N: npt.ArrayLike, answered_N: npt.ArrayLike, *, num_groups: int) -> tuple[float, FloatArray]:
    """Return the share of records that were answered, overall and per group (G,); NaN for a group without records."""
    groups, answered = indices("groups_N", np.asarray(groups_N), num_groups), np.asarray(answered_N, dtype=np.bool_)
    size_G = np.bincount(groups, minlength=num_groups)
    answered_G = np.bincount(groups[answered], minlength=num_groups)
    return float(divide(answered_G.sum(), size_G.sum())), divide(answered_G, size_G)


def divide(numerator: npt.ArrayLike, denominator: npt.ArrayLike) -> FloatArray:
    """Return the quotient, elementwise; NaN where the denominator is 0."""
    top, bottom = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    if bottom.all():
        return np.asarray(top / bottom)
    # Only where it is defined: a division by 0 would warn, and an infinite rate would be compared.
    return np.divide(top, bottom, out=np.full(np.broadcast_shapes(top.shape, bottom.shape), np.nan), where=bottom != 0)


def _answered_records(
    predictions: npt.ArrayLike,
    groups_N: npt.ArrayLike,
    labels_N: npt.ArrayLike | None = None,
    answered_N: npt.ArrayLike | None = None,
    *,
    num_groups: int,
    num_classes: int,
) -> tuple[IntArray, IntArray, FloatArray]:
    predicted, groups = np.asarray(predictions), np.asarray(groups_N)
    labels = np.zeros(len(groups), dtype=np.int64) if labels_N is None else np.asarray(labels_N)
    # Records that were not answered are left out first: their predictions may be placeholders.
    keep = np.ones(len(groups), np.bool_) if answered_N is None else np.asarray(answered_N, dtype=np.bool_)
    if not len(predicted) == len(groups) == len(labels) == len(keep):
        raise ValueError(
            f"Expected equally many predictions, groups, labels and answered flags, got {len(predicted)}, "
            f"{len(groups)}, {len(labels)} and {len(keep)}; give one of each per record."
        )
    predicted, num_labels = predicted[keep], 1 if labels_N is None else num_classes
    if predicted.ndim == 1:
        mass_NC = np.eye(num_classes)[indices("predictions", predicted, num_classes)]
    else:
        mass_NC = predicted.astype(np.float64)
        if mass_NC.ndim != 2 or mass_NC.shape[1] != num_classes:
            raise ValueError(
                f"Expected predictions of shape (N,) or (N, {num_classes}), got {predicted.shape}; reshape them."
            )
        # Softmax in float32 sums to 1 up to rounding.
        if not ((mass_NC >= 0).all() and np.allclose(mass_NC.sum(axis=1), 1, atol=1e-4)):
            raise ValueError(
                "Expected every row of predictions to hold probabilities that sum to 1; apply softmax to logits."
            )
    return indices("groups_N", groups[keep], num_groups), indices("labels_N", labels[keep], num_labels), mass_NC


def indices(name: str, values_N: npt.NDArray[np.generic], stop: int) -> IntArray:
    """Return the values as integers from 0 to ``stop`` - 1.

    ValueError for any other value; the message names the argument as ``name``.
    """
    indices_N = values_N.astype(np.int64)
    # Numbers that are not whole are refused, and not truncated to codes.
    if (indices_N != values_N).any() or (indices_N < 0).any() or (indices_N >= stop).any():
        some = np.unique(values_N)[:5].tolist()
        raise ValueError(f"Expected {name} to be codes from 0 to {stop - 1}, got {some}; number them from 0.")
    return indices_N


ErrorRate = Literal["fnr", "fpr", "fdr"]


@dataclass(frozen=True, kw_only=True)
class GroupCell:
    """The position of one value of a metric: an event, and the group or the two groups in which its rate is measured.

    - ``group``: the group; None: all groups together. ``other_group``: the second group of a pairwise comparison.
    - ``label``: the event is that this label is predicted, or, with ``label_is`` False, that another one is; None: the
      event is about no single label, as for accuracy.
    - ``given_label``: only records with this true label count, or, with ``given_is`` False, only those with another
      one; None: all records count.
    """

    group: int | None = None
    other_group: int | None = None
    label: int | None = None
    given_label: int | None = None
    given_is: bool = True
    label_is: bool = True


@dataclass(frozen=True, kw_only=True)
class WorstCase:
    """The worst case of a metric: ``value`` is the largest value over all defined cells, or NaN if there is none.

    ``where`` is the cell (event and groups) that attains ``value``. ``min_cell_size`` is the number of records in the
    smallest cell that was compared (0 if none was). ``n_undefined`` counts the rates that were not compared, because
    their group has no records or there is no other group to compare with. ``left_out``: the groups that have records,
    but none for some event, such as a true class that the group lacks, or a comparison that is 0 / 0; of a rate over
    all groups together, the labels whose rate is undefined.
    """

    value: float
    n_undefined: int
    min_cell_size: int
    where: GroupCell | None
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A bootstrap percentile interval at ``level``, such as 0.95.

    ``n_undefined`` of the ``num_replicates`` bootstrap replicates had no value and were left out.
    """

    low: float
    high: float
    level: float
    num_replicates: int
    n_undefined: int


@dataclass(frozen=True, kw_only=True)
class Events:
    """Several events (a prediction, given a condition) and their rates by group. A rate is ``hits_EG / sizes_EG``: the
    records with the event, divided by those that meet its condition. ``cells`` describes each event.
    """

    hits_EG: FloatArray
    sizes_EG: FloatArray
    cells: Sequence[GroupCell]


RateEvents = Callable[[FloatArray], Events]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A fairness metric. Called with a :func:`joint_table` of predictions, it returns its largest value over events and
    groups."""

    events: RateEvents
    compare: Callable[[FloatArray, FloatArray], FloatArray]

    def __call__(self, joint_GYC: FloatArray) -> WorstCase:
        """Return the metric's largest value, with the event and groups that attain it, for one table of shape (G, Y,
        C)."""
        events = self.events(joint_GYC)
        differences = self.compare(events.hits_EG, events.sizes_EG)
        # A level needs records alone; a comparison needs another group with records as well.
        took_part_EG = events.sizes_EG > 0 if self.compare is level else _comparable(events.sizes_EG)
        defined, sizes = differences[~np.isnan(differences)], events.sizes_EG[took_part_EG]
        return WorstCase(
            value=float(defined.max()) if defined.size else math.nan,
            n_undefined=int((~took_part_EG).sum()),
            min_cell_size=round(sizes.min()) if sizes.size else 0,
            where=located(differences, events.cells) if defined.size else None,
            left_out=self.left_out(
                differences, events.cells, lacks_EG=events.sizes_EG == 0, has_records_G=joint_GYC.sum(axis=(1, 2)) > 0
            ),
        )

    def left_out(
        self, differences: FloatArray, cells: Sequence[GroupCell], *, lacks_EG: BoolArray, has_records_G: BoolArray
    ) -> tuple[int, ...]:
        """Return the groups with records that a verdict must not cover (``WorstCase.left_out``), because the rate of
        some event is undefined for them (``lacks_EG``) or its comparison is for all; of a level, the labels whose rate
        is undefined."""
        if self.compare is level:
            labels = (cells[event].label for event in np.flatnonzero(lacks_EG.all(axis=1)).tolist())
            return tuple(label for label in labels if label is not None)
        # Records suffice for a rate, and not for a ratio of rates that are all 0.
        is_undefined_E = np.isnan(differences).reshape(len(differences), -1).all(axis=1)
        lacks_EG = lacks_EG | np.asarray(is_undefined_E & ~lacks_EG.any(axis=1))[:, None]
        return tuple(np.flatnonzero(lacks_EG.any(axis=0) & has_records_G).tolist())

    def values(self, joint_RGYC: FloatArray) -> FloatArray:
        """Return the metric's value for every replicate, shape (R,); NaN where undefined."""
        events = self.events(joint_RGYC)
        differences = self.compare(events.hits_EG, events.sizes_EG)
        values_RD = differences.reshape(len(joint_RGYC), math.prod(differences.shape[1:]))
        # np.nanmax would warn about a replicate without a defined value.
        largest_R = np.where(np.isnan(values_RD), -np.inf, values_RD).max(axis=1)
        return np.where(np.isneginf(largest_R), np.nan, largest_R)


def bootstrap_interval(metric: Metric, joint_RGYC: FloatArray, *, level: float = 0.95) -> Interval:
    """Return the percentile interval of ``metric`` over bootstrap tables (:func:`resampled_tables`); NaN bounds if no
    replicate has a value.

    The interval covers the sampling of the evaluated records, but neither training nor privacy noise.
    """
    if not 0 < level < 1:
        raise ValueError(f"Expected 0 < level < 1, got {level}.")
    values_R = metric.values(joint_RGYC)
    # A replicate in which too few groups have records has no value, and must not count as 0.
    defined = values_R[~np.isnan(values_R)]
    tails = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(defined, tails) if defined.size else (math.nan, math.nan)
    counts = {"num_replicates": values_R.size, "n_undefined": values_R.size - defined.size}
    return Interval(low=float(low), high=float(high), level=level, **counts)


def predicted(joint_GYC: FloatArray) -> Events:
    """Return the events "label k is predicted" for each k, whose rates are selection rates."""
    counts_GC = joint_GYC.sum(axis=-2)
    hits_EG = counts_GC.swapaxes(-1, -2)
    sizes_EG = np.broadcast_to(counts_GC.sum(axis=-1)[..., None, :], hits_EG.shape)
    return Events(hits_EG=hits_EG, sizes_EG=sizes_EG, cells=[GroupCell(label=k) for k in range(counts_GC.shape[-1])])


def predicted_given_label(joint_GYC: FloatArray) -> Events:
    """Return the events "label k is predicted" among records with the true label y, for each k and y."""
    _require_labels(joint_GYC)
    num_classes = joint_GYC.shape[-1]
    batch = joint_GYC.shape[:-3]
    # Groups last, as in every set of events: (..., Y, C, G).
    by_event = np.moveaxis(joint_GYC, -3, -1)
    sizes = np.broadcast_to(by_event.sum(axis=-2, keepdims=True), by_event.shape)
    return Events(
        hits_EG=by_event.reshape(*batch, -1, by_event.shape[-1]),
        sizes_EG=sizes.reshape(*batch, -1, by_event.shape[-1]),
        cells=[GroupCell(label=k, given_label=y) for y in range(num_classes) for k in range(num_classes)],
    )


def found_or_mistaken(joint_GYC: FloatArray) -> Events:
    """Return, for each label k against all others, the events "k is predicted" where k is the true label (true-positive
    rate) and where it is not (false-positive rate)."""
    _require_labels(joint_GYC)
    true_YG = joint_GYC.sum(axis=-1).swapaxes(-1, -2)
    size_1G = true_YG.sum(axis=-2, keepdims=True)
    right_CG = np.diagonal(joint_GYC, axis1=-2, axis2=-1).swapaxes(-1, -2)
    predicted_CG = joint_GYC.sum(axis=-2).swapaxes(-1, -2)
    labels = range(joint_GYC.shape[-1])
    return Events(
        hits_EG=np.concatenate([right_CG, predicted_CG - right_CG], axis=-2),
        sizes_EG=np.concatenate([true_YG, size_1G - true_YG], axis=-2),
        cells=[GroupCell(label=k, given_label=k, given_is=given) for given in (True, False) for k in labels],
    )


def correct(joint_GYC: FloatArray) -> Events:
    """Return the single event "the prediction is correct", whose rate is the accuracy."""
    _require_labels(joint_GYC)
    right_1G = np.diagonal(joint_GYC, axis1=-2, axis2=-1).swapaxes(-1, -2).sum(axis=-2, keepdims=True)
    sizes_1G = joint_GYC.sum(axis=(-2, -1))[..., None, :]
    return Events(hits_EG=right_1G, sizes_EG=sizes_1G, cells=[GroupCell()])


def one_vs_rest(hits_EG: FloatArray, sizes_EG: FloatArray) -> FloatArray:
    """Return each group's rate minus the rate of all other groups together, shape (..., E, G), signed."""
    others_EG, of_others_EG = (values.sum(axis=-1, keepdims=True) - values for values in (hits_EG, sizes_EG))
    return divide(hits_EG, sizes_EG) - divide(others_EG, of_others_EG)


def to_overall(hits_EG: FloatArray, sizes_EG: FloatArray) -> FloatArray:
    """Return the absolute difference between each group's rate and the overall rate, shape (..., E, G)."""
    overall_E1 = divide(hits_EG.sum(axis=-1, keepdims=True), sizes_EG.sum(axis=-1, keepdims=True))
    distance_EG = np.abs(divide(hits_EG, sizes_EG) - overall_E1)
    # One group alone is the whole, and has no distance to it.
    return np.where(_comparable(sizes_EG), distance_EG, np.nan)


def pairwise(hits_EG: FloatArray, sizes_EG: FloatArray) -> FloatArray:
    """Return each group's rate minus that of each other group, shape (..., E, G, G); NaN on the diagonal."""
    rates_EG = divide(hits_EG, sizes_EG)
    # A group's gap to itself is 0: left in, it would hide that there is no other group to compare with.
    itself_GG = np.eye(rates_EG.shape[-1], dtype=np.bool_)
    return np.where(itself_GG, np.nan, rates_EG[..., :, None] - rates_EG[..., None, :])


def below_other(hits_EG: FloatArray, sizes_EG: FloatArray) -> FloatArray:
    """Return 1 - rate / other rate for each pair of groups, shape (..., E, G, G): the relative amount by which the
    first group's rate is below the second group's rate.

    An event's largest value is 1 minus its impact ratio, the lowest rate divided by the highest.
    """
    rates_EG = divide(hits_EG, sizes_EG)
    itself_GG = np.eye(rates_EG.shape[-1], dtype=np.bool_)
    return np.where(itself_GG, np.nan, 1 - divide(rates_EG[..., :, None], rates_EG[..., None, :]))


level = divide
"""The comparison of a metric that is a rate: it returns the rates themselves and compares no groups."""


dp_one_vs_rest = Metric(events=predicted, compare=one_vs_rest)
dp_to_overall = Metric(events=predicted, compare=to_overall)
dp_pairwise = Metric(events=predicted, compare=pairwise)
eo_full = Metric(events=predicted_given_label, compare=one_vs_rest)
eo_lowy = Metric(events=found_or_mistaken, compare=pairwise)
accuracy_parity = Metric(events=correct, compare=pairwise)


found_apart = Metric(
    events=lambda joint_GYC: _select(found_or_mistaken(joint_GYC), _positive_classes(joint_GYC)), compare=pairwise
)
"""Equal opportunity: the gap in true-positive rates, of the second of two classes, or of more classes the largest."""


impact_shortfall = Metric(
    events=lambda joint_GYC: _select(predicted(joint_GYC), _positive_classes(joint_GYC)), compare=below_other
)
"""1 minus the impact ratio: 0.2 means that the lowest selection rate is four fifths of the highest."""


def error_rate(kind: ErrorRate) -> Metric:
    """Return a metric whose value is an error rate over all groups together, not a gap between groups.

    For class c, ``fnr`` is P[not predicted c | true c], ``fpr`` P[predicted c | not true c], and ``fdr`` P[not true c |
    predicted c], which is 1 - precision. Of two classes c is the second; of more, the one with the largest rate.
    """

    def errors(joint_GYC: FloatArray) -> Events:
        all_1YC = joint_GYC.sum(axis=-3, keepdims=True)
        labels, num_classes = _positive_classes(joint_GYC), joint_GYC.shape[-1]
        if kind == "fpr":
            # All true-positive rates stand first, then the false-positive ones.
            return _select(found_or_mistaken(all_1YC), [num_classes + c for c in labels])
        # Transposed, a discovery is a true label and a class that is found its prediction.
        found = _select(found_or_mistaken(all_1YC.swapaxes(-1, -2) if kind == "fdr" else all_1YC), labels)
        missed = [GroupCell(label=c, given_label=c, label_is=False) for c in labels]
        cells = [GroupCell(label=c) for c in labels] if kind == "fdr" else missed
        return Events(hits_EG=found.sizes_EG - found.hits_EG, sizes_EG=found.sizes_EG, cells=cells)

    return Metric(events=errors, compare=level)


def ermi(joint_GYC: FloatArray) -> float:
    """Return DP-FERMI's exponential Renyi mutual information of prediction and group: sum p_jr^2 / (p_j p_r) - 1.

    It is 0 exactly if they are independent, and at most min(G, C) - 1; NaN with fewer than two groups that have
    records.
    """
    counts_GC = joint_GYC.sum(axis=-2)
    share_G = divide(counts_GC.sum(axis=-1), counts_GC.sum())
    share_C = divide(counts_GC.sum(axis=-2), counts_GC.sum())
    if (share_G > 0).sum() < 2:
        return math.nan
    ratio_GC = divide(divide(counts_GC, counts_GC.sum()) ** 2, np.outer(share_G, share_C))
    # Groups without records, and classes that are never predicted, are NaN here and add nothing.
    return float(np.nansum(ratio_GC) - 1)


def ermi_given_label(joint_GYC: FloatArray) -> float:
    """Return :func:`ermi` within each true label, averaged by the labels' shares of the records (DP-FERMI's equalized
    odds).

    True labels that occur in fewer than two groups are left out; NaN if none remains.
    """
    _require_labels(joint_GYC)
    within_Y = np.array([ermi(joint_GYC[:, [y]]) for y in range(joint_GYC.shape[1])])
    defined_Y = ~np.isnan(within_Y)
    size_Y = joint_GYC.sum(axis=(0, 2))
    return float(divide(within_Y[defined_Y] @ size_Y[defined_Y], size_Y[defined_Y].sum()))


def located(differences: FloatArray, cells: Sequence[GroupCell]) -> GroupCell:
    """Return the cell (event and groups) with the largest of the ``differences`` that a comparison of groups returned;
    ``cells`` describe the compared events."""
    event, *groups = map(int, np.unravel_index(np.nanargmax(differences), differences.shape))
    if differences.shape[1] == 1:  # a rate over all groups
        return cells[event]
    return replace(cells[event], group=groups[0], other_group=groups[1] if len(groups) == 2 else None)


def _comparable(sizes_EG: FloatArray) -> BoolArray:
    defined_EG: BoolArray = sizes_EG > 0
    several_E1: BoolArray = defined_EG.sum(axis=-1, keepdims=True) >= 2
    return defined_EG & several_E1


def _select(events: Events, chosen: Sequence[int]) -> Events:
    hits_EG, sizes_EG = events.hits_EG[..., chosen, :], events.sizes_EG[..., chosen, :]
    return Events(hits_EG=hits_EG, sizes_EG=sizes_EG, cells=[events.cells[e] for e in chosen])


def _positive_classes(joint_GYC: FloatArray) -> Sequence[int]:
    # By convention the second of two classes is the positive one; of more, each is in turn.
    num_classes = joint_GYC.shape[-1]
    return [1] if num_classes == 2 else list(range(num_classes))


def _require_labels(joint_GYC: FloatArray) -> None:
    if joint_GYC.shape[-2] != joint_GYC.shape[-1]:
        raise ValueError("Expected a table with true labels: pass labels_N to joint_table.")


DEFAULT = DEFAULT_NOTION


@dataclass(frozen=True, kw_only=True)
class Notion:
    """A notion of fairness with its name and description: one row of :data:`NOTIONS`.

    ``measure`` is its name on axes and in columns of a page, ``words`` describe what is compared, ``formula`` is its
    definition (g, h: groups; k: a class; y: the true, p: the predicted class), and ``source`` cites the definition.
    """

    name: NotionName
    title: str
    measure: str
    words: str
    formula: str
    metric: Metric
    source: str

    @property
    def bounds_rate(self) -> bool:
        """True if the value is an error rate over all groups and not a gap between groups."""
        return self.metric.compare is level

    @property
    def reading(self) -> str:
        """The key under which the published ``metrics.json`` has the value of this notion."""
        return {"demographic_parity": "dp_one_vs_rest", "equalized_odds": "eo_lowy"}.get(self.name, self.name)


_METRICS: Mapping[NotionName, Metric] = {
    "demographic_parity": dp_one_vs_rest,
    "equalized_odds": eo_lowy,
    "equal_opportunity": found_apart,
    "accuracy_parity": accuracy_parity,
    "impact_ratio": impact_shortfall,
    "false_negative_rate": error_rate("fnr"),
    "false_positive_rate": error_rate("fpr"),
    "false_discovery_rate": error_rate("fdr"),
}
_WORDS = read_yaml(Path(__file__).with_name("notions.yaml"))
NOTIONS: Mapping[NotionName, Notion] = {
    name: Notion(name=name, metric=metric, **_WORDS[name]) for name, metric in _METRICS.items()
}
"""All notions of fairness, in the order in which pages list them."""
NAMES: tuple[NotionName, ...] = get_args(NotionName)


def notion_named(name: str) -> NotionName:
    """Return ``name`` unchanged if it is the name of a notion. ValueError, with the nearest known name, for any
    other."""
    found = next((known for known in NAMES if known == name.strip()), None)
    if found is None:
        raise ValueError(f"no notion of fairness is called {name!r}{nearest(name, NAMES)}.")
    return found


TAUGHT_NOISE, KEPT_NOISE = math.sqrt(1.5), math.sqrt(3.0)  # variance 1, and 1 / 2 or 2 by thinning
_LEAST_LIKELY = 1e-3  # a label that the release rules out keeps a weight
_RIDGE = 1.0  # records, of norm one
_LEAST_STDDEVS = 4.0  # of a count: below, it is no denominator


def thinned(table: IntArray, *, stddev: float, generator: np.random.Generator) -> tuple[IntArray, FloatArray]:
    """Split a released noisy table, with noise of ``stddev`` on every number, into two tables with independent noise.

    The student learns from the first table. Its rates are estimated from the second, because a student fits the noise
    from which it learned and would look too good under the same noise (Leiner et al. 2023, arXiv 2112.11079). The
    standard deviation of the noise is ``TAUGHT_NOISE`` times ``stddev`` in the first table and ``KEPT_NOISE`` times in
    the second. The noisy table is already released, so ``generator`` may be seeded.
    """
    # Floats will do here: both tables are made of one that is released already.
    drawn = generator.normal(scale=stddev, size=table.shape)
    # Covariance stddev^2 (1 - sqrt(2) sqrt(1 / 2)) = 0.
    return np.rint(table + math.sqrt(0.5) * drawn).astype(np.int64), table - math.sqrt(2.0) * drawn


@dataclass(frozen=True, kw_only=True)
class TableByGroup:
    """A released table of sums of votes by group and label; every number has noise of standard deviation ``stddev``.

    ``one_W``: coefficients whose inner product with every single vote is 1. So their inner product with a sum of votes
    is the number of records that voted.
    """

    sums_GYW: FloatArray
    stddev: float
    one_W: FloatArray


@dataclass(frozen=True, kw_only=True)
class LabelledRecords:
    """M public records, from which a student's predictions among private records are estimated.

    ``votes_MW``: the vote that each record would cast as a private record. ``groups_M``: its group. ``likely_MY``: the
    probabilities of its label. ``outcome_MJ``: the student's prediction for it, or refusal, one-hot.
    """

    votes_MW: FloatArray
    groups_M: IntArray
    likely_MY: FloatArray
    outcome_MJ: FloatArray


@dataclass(frozen=True, kw_only=True)
class Population:
    """Estimated counts of private records by group, label and outcome (G, Y, J), and random draws around the estimate
    that show its error (R, G, Y, J)."""

    joint_GYJ: FloatArray
    draws_RGYJ: FloatArray


@dataclass(frozen=True, kw_only=True)
class PopulationEstimate:
    """An estimated number with its confidence interval; NaN where it is undefined."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class GapEstimate(PopulationEstimate):
    """An estimated gap between groups, the cell (event and groups) that attains it, and the number of rates left out
    because they have too few records compared with the noise."""

    where: GroupCell | None
    n_undefined: int


def estimated_population(
    table: TableByGroup, public: LabelledRecords, *, generator: np.random.Generator, num_draws: int = 2000
) -> Population:
    """Return the estimated counts of a student's predictions among private records by group and label, with random
    draws around them that show their error.

    The counts come from a regression of predictions on votes among public records. Groups without public records are
    NaN. The error has three sources:

    - the noise of the release: its variance times the squared norm of the regression's coefficients;
    - the sampling of public records: the influence of each record on a count;
    - the sampling of private records: the residuals of the regression.

    The error does not cover a difference between private and public records: the estimate assumes that the regression
    also holds on average for the private records of each group and label.
    """
    num_groups, num_labels, _ = table.sums_GYW.shape
    num_outcomes = public.outcome_MJ.shape[1]
    joint_GYJ = np.full((num_groups, num_labels, num_outcomes), np.nan)
    draws_RGYJ = np.full((num_draws, *joint_GYJ.shape), np.nan)
    # Fits over all groups, shrunk towards the label's average; each group's fit is then shrunk towards them.
    coarse = []
    for label in range(num_labels):
        weights_M = np.maximum(public.likely_MY[:, label], _LEAST_LIKELY)
        average_WJ = np.outer(table.one_W, weights_M @ public.outcome_MJ / weights_M.sum())
        coarse.append(_Fit.of(public.votes_MW, weights_M, public.outcome_MJ, average_WJ))
    for group in range(num_groups):
        (rows,) = (public.groups_M == group).nonzero()
        if not len(rows):
            continue
        influences, noises = [], []
        for label, all_groups in enumerate(coarse):
            votes_MW, sum_W = public.votes_MW, table.sums_GYW[group, label]
            own = _Fit.of(votes_MW[rows], all_groups.weights_M[rows], public.outcome_MJ[rows], all_groups.beta_WJ)
            joint_GYJ[group, label] = sum_W @ own.beta_WJ
            # The derivative of J by a record's outcome: through the group's own fit, and through the coarser one.
            direct_W = np.linalg.solve(own.gram_WW, sum_W)
            # Of the coarser coefficients, a group's fit keeps the ridge times the inverse of its Gram matrix.
            drawn_W = _RIDGE * np.linalg.solve(all_groups.gram_WW, direct_W)
            influence_MJ = (all_groups.weights_M * (votes_MW @ drawn_W))[:, None] * all_groups.residual_MJ
            influence_MJ[rows] += (own.weights_M * (votes_MW[rows] @ direct_W))[:, None] * own.residual_MJ
            influences.append(influence_MJ)
            # A noisy count may be negative, a variance may not.
            count = max(float(table.one_W @ sum_W), 0.0)
            left_JJ = (own.residual_MJ * own.weights_M[:, None]).T @ own.residual_MJ / own.weights_M.sum()
            noises.append(table.stddev**2 * own.beta_WJ.T @ own.beta_WJ + count * left_JJ)
        influence = np.concatenate(influences, axis=1)
        # Public records are drawn independently: the squares of their influences add up.
        covariance = influence.T @ influence + scipy.linalg.block_diag(*noises)
        # An outcome that no public record has leaves the covariance singular, which a Cholesky factor refuses.
        errors = generator.multivariate_normal(np.zeros(len(covariance)), covariance, size=num_draws, method="eigh")
        draws_RGYJ[:, group] = joint_GYJ[group] + errors.reshape(num_draws, num_labels, num_outcomes)
    return Population(joint_GYJ=joint_GYJ, draws_RGYJ=draws_RGYJ)


def estimated_rates(
    events: RateEvents, joint_GYC: FloatArray, draws_RGYC: FloatArray, *, level: float = 0.95
) -> list[list[PopulationEstimate]]:
    """Return estimated rates of fairness events, such as a predicted class: a list for every event, with one estimate
    for every group.

    Each estimate has its confidence interval at ``level``, clipped to [0, 1]. It is NaN if the group has too few
    records compared with the noise. ``joint_GYC``: estimated counts by group, label and prediction; ``draws_RGYC``:
    random draws around these counts, as :func:`estimated_population` returns them.
    """
    hits_EG, sizes_EG, hits_REG, sizes_REG = _large_enough(events, joint_GYC, draws_RGYC)
    value_EG, rates_REG = divide(hits_EG, sizes_EG), divide(hits_REG, sizes_REG)
    low_EG, high_EG = np.quantile(rates_REG, [(1 - level) / 2, (1 + level) / 2], axis=0)
    ends = (np.clip(values, 0, 1).tolist() for values in (value_EG, low_EG, high_EG))
    return [
        [PopulationEstimate(value=v, low=a, high=b) for v, a, b in zip(*row, strict=True)]
        for row in zip(*ends, strict=True)
    ]


def estimated_gap(metric: Metric, joint_GYC: FloatArray, draws_RGYC: FloatArray, *, level: float = 0.95) -> GapEstimate:
    """Return the estimated value of the fairness ``metric`` among the private records, with its confidence interval.

    The interval comes from simultaneous intervals for all differences, so it covers the true value with probability at
    least ``level``.
    """
    hits_EG, sizes_EG, hits_REG, sizes_REG = _large_enough(metric.events, joint_GYC, draws_RGYC)
    differences = metric.compare(hits_EG, sizes_EG)
    value_D, value_RD = differences.ravel(), metric.compare(hits_REG, sizes_REG).reshape(len(draws_RGYC), -1)
    known_D = ~np.isnan(value_D)
    n_undefined = int((sizes_EG == 0).sum())
    if not known_D.any():
        return GapEstimate(value=math.nan, low=math.nan, high=math.nan, where=None, n_undefined=n_undefined)
    value_D, error_RD = value_D[known_D], value_RD[:, known_D] - value_D[known_D]
    spread_D = np.sqrt(np.square(error_RD).mean(axis=0))
    # One quantile of the largest standardised error serves every difference: the intervals hold together.
    farthest_R = np.abs(divide(error_RD, spread_D))
    # A difference without any error cannot be standardised, and is never the farthest.
    reach_D = spread_D * np.quantile(np.nan_to_num(farthest_R).max(axis=1), level)
    value, low, high = (float(np.clip(v.max(), 0, 1)) for v in (value_D, value_D - reach_D, value_D + reach_D))
    where = located(differences, metric.events(joint_GYC).cells)
    return GapEstimate(value=value, low=low, high=high, where=where, n_undefined=n_undefined)


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """A ridge regression of outcomes on votes, whose coefficients are shrunk towards those of a coarser regression.

    ``residual_MJ`` are leave-one-out residuals, because ordinary residuals of a fit to few records would be too small.
    """

    beta_WJ: FloatArray
    gram_WW: FloatArray
    residual_MJ: FloatArray
    weights_M: FloatArray

    @classmethod
    def of(cls, votes_MW: FloatArray, weights_M: FloatArray, outcome_MJ: FloatArray, coarse_WJ: FloatArray) -> _Fit:
        weighted_WM = (votes_MW * weights_M[:, None]).T
        gram_WW = weighted_WM @ votes_MW
        gram_WW[np.diag_indices_from(gram_WW)] += _RIDGE
        pulled_WM = np.linalg.solve(gram_WW, weighted_WM)
        left_MJ = outcome_MJ - votes_MW @ coarse_WJ
        fitted_WJ = pulled_WM @ left_MJ
        leverage_M = np.einsum("mw,wm->m", votes_MW, pulled_WM)
        return cls(
            beta_WJ=coarse_WJ + fitted_WJ,
            gram_WW=gram_WW,
            # Divided by 1 - leverage: the residual of the fit without this record, without fitting again.
            residual_MJ=(left_MJ - votes_MW @ fitted_WJ) / (1 - leverage_M)[:, None],
            weights_M=weights_M,
        )


def _large_enough(
    events: RateEvents, joint_GYC: FloatArray, draws_RGYC: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return hits (records with the event) and sizes (records that could have it) of every event and group. The first
    two arrays are of the table, each (E, G); the last two are of the random draws around it, each (R, E, G).

    Hits and sizes are 0 where the size is not significantly above 0, so that no rate is computed there.
    """
    found, drawn = events(joint_GYC), events(draws_RGYC)
    # A ratio over a size that may be 0 has no interval, so such rates are left out beforehand.
    error_EG = np.sqrt(np.square(drawn.sizes_EG - found.sizes_EG).mean(axis=0))
    is_known_EG = found.sizes_EG > _LEAST_STDDEVS * error_EG
    # `divide` turns sizes of 0 into undefined rates, as for groups without records.
    hits_EG, sizes_EG, hits_REG, sizes_REG = (
        np.where(is_known_EG, values, 0.0) for values in (found.hits_EG, found.sizes_EG, drawn.hits_EG, drawn.sizes_EG)
    )
    return hits_EG, sizes_EG, hits_REG, sizes_REG
