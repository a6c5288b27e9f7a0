"""Accuracy, coverage and fairness gaps of a set of predictions, overall and by group, with their intervals.

The numbers are outside every privacy guarantee unless the evaluated records are public or the numbers come from a
private release (:mod:`fairpate.run.private_metrics`), as ``Evaluation.metrics`` says. An undefined number, or one from
too few records, is NaN in Python, null in JSON and never 0.

Small groups are left out of everything, and numbers from which a small cell follows are hidden
(:mod:`fairpate.report.small_cells`). A gap compares the groups of which the numbers that it needs are shown, and names
the others as left out; the ends of its interval are drawn from these numbers alone. All words, such as which groups are
underserved, are computed from the numbers that are shown.

*Degenerate models.* A model may have small gaps only because it answers almost nobody, predicts one class for nearly
everyone or nearly all of a group, or is right no more often than always predicting the most common class. The
thresholds are ours. A class with at least the share ``NEARLY_ALL`` of the predictions counts as the only one, if true
labels outside the most common class are at least twice as frequent as predictions outside this class. Answering less
than a share ``HARDLY_ANY`` counts as answering nobody, and groups of fewer than ``LEAST_RECORDS`` are not judged.

Shapes: N records, G groups, C classes, Y true labels, R bootstrap replicates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from fairpate.fairness import rates
from fairpate.fairness.rates import NOTIONS
from fairpate.report.reject_option import resampled_reject_option
from fairpate.report.small_cells import HiddenNumbers, few_refused, hidden_numbers, shown_records
from fairpate.types import BoolArray, FairRule, FloatArray, GateRule, MetricsKind, NotionName, restored, strict

if TYPE_CHECKING:
    from fairpate.types import RunRecord

_Array = npt.NDArray[Any]

LEAST_RECORDS = 10
NEARLY_ALL = 0.99
HARDLY_ANY = 0.05
LEAST_OTHERS = 3
LEAST_ANSWERED = 0.5
LEVEL = 0.95
"""The confidence level of all intervals."""
_CHANCE = 2.0  # standard deviations
_ROUNDING = 1e-9

OTHER_READINGS: Mapping[str, rates.Metric] = {
    "dp_pairwise": rates.dp_pairwise,
    "dp_to_overall": rates.dp_to_overall,
    "eo_full": rates.eo_full,
}
"""Other definitions of two notions, from other papers; they differ from ours with several groups or classes."""
GAPS: Mapping[str, rates.Metric] = {**{notion.reading: notion.metric for notion in NOTIONS.values()}, **OTHER_READINGS}
"""The metrics that every evaluation reports, by JSON name: one for each notion, and the other definitions."""
_RATES = frozenset(notion.reading for notion in NOTIONS.values() if notion.bounds_rate)
_BY_CLASS = ("eo_lowy", "equal_opportunity")
"""Gaps that follow from the labels, predictions and right predictions of each class."""


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """The results of one group: the numbers of its evaluated and of its answered records, the share answered
    (``coverage``), and the accuracy on answered records.

    Numbers are None, and shares NaN, for a group that has too few records to be published. If only so few records of a
    group are refused, or right, or wrong, the numbers that would reveal this are missing.
    """

    name: str
    num_records: int | None = None
    num_answered: int | None = None
    coverage: float = math.nan
    accuracy: float = math.nan


@dataclass(frozen=True, kw_only=True)
class GapResult:
    """One fairness gap with its bootstrap percentile interval, which is widened if necessary to include the gap itself.

    A gap compares the rates of cells. A cell is the records of one group, or of one group with one true label.

    - ``min_cell_size``: the number of records in the smallest compared cell.
    - ``n_undefined``: the number of cells left out.
    - ``where``: the outcome (such as a predicted class) and the groups whose rates differ most, in words.
    - ``left_out``: the measured groups for which some comparison is undefined, such as that of a true class which the
      group lacks, or hidden, because it would reveal a small cell; of an error rate of all groups together, the classes
      for which it is undefined. The gap is then a lower bound, and says nothing about these.

    If a cell has too few records, the gap is undefined and its ``min_cell_size`` is 0.
    """

    value: float
    low: float
    high: float
    level: float
    n_undefined: int
    min_cell_size: int
    where: str
    left_out: tuple[str, ...] = ()


NOT_MEASURED = GapResult(
    value=math.nan, low=math.nan, high=math.nan, level=LEVEL, n_undefined=0, min_cell_size=0, where="undefined"
)


TOO_FEW = "too few records in a cell"
"""Where a gap lies that is not shown, because it would reveal a small cell."""


@dataclass(frozen=True, kw_only=True)
class IntervalEstimate:
    """One number estimated from a noisy table that was released, with its confidence interval; NaN if it is
    undefined."""

    name: str
    kind: Literal["share", "ratio", "count"]
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class WithoutPrivacy:
    """A baseline: the accuracy of a logistic model that was trained on ``num_records`` private records without noise.

    It is measured on the test records that the evaluated model answered, and must not be published.
    """

    accuracy: float
    num_records: int


class EvaluationWords(TypedDict):
    """The words with which all pages describe measured numbers.

    ``noun``: "test record" or "test person", the units that numbers count. ``units``: those of which a cell needs
    ``least_cell``, in the plural. ``intervals``: the kind of confidence intervals. ``covered``: whether a guarantee
    covers the numbers. ``why_unknown``: why no record was evaluated; meaningless if some records were evaluated.
    """

    noun: str
    units: str
    intervals: str
    covered: str
    why_unknown: str


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluation of predictions on ``num_records`` records: accuracy, coverage and fairness gaps.

    Accuracy, rates and gaps are over answered records. ``confusion_GYC[z][y][k]`` is the number of records (for
    probabilities, their total) of group z with true label y and prediction k; ``rates_GC[z][k]`` is the rate of
    prediction k in group z.

    ``majority_accuracy`` is the accuracy of always predicting ``majority_class``, the most common true label of the
    same answered records; NaN and None if none was answered. ``degenerate`` holds words such as "predicts 'no' for
    every record" that say why the model's gaps are meaningless; it is empty for a model that answers, is better than a
    constant prediction, and distinguishes records within every group. ``underserved`` holds words on
    ``underserved_groups``, for which always predicting the group's most common class would be right more often, by more
    than chance: a model may reach equal errors by being equally bad for all. ``perfect_gap`` is the demographic-parity
    gap of the true labels, and so of a model that is always right.

    Only records in groups of at least ``least_cell`` records or persons count: smaller groups are in no number, and a
    number that would reveal a smaller cell is None or NaN; with more than two classes ``perfect_gap`` is then rounded
    down to tenths. With ``hides_predictions`` False this does not hold for numbers of predictions. ``num_left_out``
    test records are in no number. If the data set names persons, ``num_persons`` is the number of persons of the
    evaluated records (else None), and ``num_persons_left_out`` that of the records left out.

    ``metrics`` says whether a guarantee covers the numbers. Private ones are estimates from a table whose counts each
    have noise of standard deviation ``noise_stddev``, in records; ``estimates`` are numbers with intervals that no
    other field contains. ``per_person``: every person has a total weight of one, divided among the person's records.
    ``fair_at`` is the user's rule of fairness.
    """

    num_records: int
    num_answered: int
    accuracy: float
    coverage: float
    group_names: tuple[str, ...]
    class_names: tuple[str, ...]
    groups: tuple[GroupResult, ...]
    gaps: Mapping[str, GapResult]
    ermi: float
    ermi_given_label: float
    rates_GC: tuple[tuple[float, ...], ...]
    confusion_GYC: tuple[tuple[tuple[float, ...], ...] | None, ...]
    least_cell: int = 1
    hides_predictions: bool = True
    num_left_out: int = 0
    num_persons: int | None = None
    num_persons_left_out: int = 0
    perfect_gap: float = math.nan
    majority_class: str | None = None
    majority_accuracy: float = math.nan
    degenerate: tuple[str, ...] = ()
    underserved: tuple[str, ...] = ()
    underserved_groups: tuple[str, ...] = ()
    metrics: MetricsKind = "outside"
    noise_stddev: float = 0.0
    per_person: bool = False
    estimates: tuple[IntervalEstimate, ...] = ()
    fair_at: FairRule = field(default_factory=FairRule)

    @property
    def words(self) -> EvaluationWords:
        """The words with which all pages describe the numbers of this evaluation."""
        measured = "Accuracy and gaps, measured on test records with their true labels and groups,"
        people = " Every person counts as one, divided among the person’s records." if self.per_person else ""
        covered: Mapping[MetricsKind, str] = {
            "outside": f"{measured} are outside the privacy guarantee.",
            "public": f"{measured} are of records which the operator declares public.",
            "private": (
                "Estimated from one noisy table of private test records, which the privacy guarantee covers: noise of "
                f"standard deviation {self.noise_stddev:.3g} on every count. Intervals hold this noise and the "
                f"sampling of test records; what does not stand out from the noise is undefined.{people}"
            ),
        }
        units = "test records" if self.num_persons is None and not self.per_person else "test persons"
        return {
            "noun": "test person" if self.per_person else "test record",
            "units": units,
            "intervals": "intervals" if self.metrics == "private" else "bootstrap intervals",
            "covered": covered[self.metrics],
            "why_unknown": f"no group has enough {units}" if self.not_measured else "there were no test records",
        }

    @property
    def is_measured(self) -> bool:
        """True if any record was evaluated; without one, every number is undefined."""
        return self.num_records > 0

    @property
    def disparity(self) -> float:
        """The demographic-parity gap, by which models are compared; NaN also if it leaves out a measured group, since a
        gap of fewer groups is smaller for that reason alone."""
        gap = self.measured("demographic_parity")
        return math.nan if gap.left_out else gap.value

    def measured(self, notion: NotionName) -> GapResult:
        """Return the gap or rate of a notion of fairness; NOT_MEASURED if it was not evaluated."""
        return self.gaps.get(NOTIONS[notion].reading, NOT_MEASURED)

    @property
    def judged(self) -> GapResult:
        """The gap or rate that the user's definition of fair (``fair_at``) limits."""
        return self.measured(self.fair_at.notion)

    def gaps_of(self, kind: Literal["gap", "rate"]) -> dict[str, GapResult]:
        """Return the gaps between groups ("gap"), where 0 is equal treatment, or the error rates of all groups together
        ("rate"), as a mapping by name."""
        return {name: gap for name, gap in self.gaps.items() if (name in _RATES) == (kind == "rate")}

    def fair_from(self, notion: NotionName) -> float:
        """Return the smallest limit on a notion of fairness at which these records suffice to call a small gap fair;
        NaN if they suffice at no limit."""
        size = self.measured(notion).min_cell_size
        # Of n records without an event, the rate may still be 3/n (95 %). And a few answers may be alike across groups
        # just because the other records are refused.
        return math.nan if not size or self.coverage < LEAST_ANSWERED else 3 / size

    @property
    def fairness(self) -> dict[str, dict[str, float | None]]:
        """A mapping from the name of every notion of fairness to its value, its interval and the smallest limit at
        which it may be called fair (:meth:`fair_from`). They are None if they are undefined, also for some group: a gap
        of fewer comparisons is smaller for that reason alone."""
        found = {}
        for name in NOTIONS:
            gap = self.measured(name)
            shown, fair_from = (NOT_MEASURED, math.nan) if gap.left_out else (gap, self.fair_from(name))
            found[name] = {"value": shown.value, "low": shown.low, "high": shown.high, "fair_from": fair_from}
        return strict(found)

    @property
    def group_majorities(self) -> tuple[float, ...]:
        """The share of the most common true label among the answered records of each group; NaN if unknown."""
        labels = [np.zeros(1) if table is None else np.asarray(table).sum(axis=1) for table in self.confusion_GYC]
        return tuple(float(of_C.max() / of_C.sum()) if of_C.sum() else math.nan for of_C in labels)

    @property
    def not_measured(self) -> tuple[str, ...]:
        """The names of the groups that have no answered record, or too few, so that every gap leaves them out."""
        return tuple(
            group.name
            for group in self.groups
            if group.num_answered is None or (self.num_answered and not group.num_answered)
        )

    @property
    def hides_tables(self) -> bool:
        """True if the counts by true label and prediction of some measured group are hidden."""
        by_group = zip(self.groups, self.confusion_GYC, strict=True)
        return any(table is None and bool(group.num_answered) for group, table in by_group)

    @property
    def not_shown(self) -> tuple[str, ...]:
        """The numbers that are missing because they would reveal small cells of the measured groups, in words."""
        by_group = zip(self.groups, self.confusion_GYC, self.rates_GC, strict=True)
        known = [of_group for of_group in by_group if of_group[0].num_answered]
        accuracies = [group.name for group, *_ in known if math.isnan(group.accuracy)]
        refusals = [group.name for group, *_ in known if group.num_records is None]
        tables = [group.name for group, table, _ in known if table is None]
        rates = [group.name for group, _, predicted in known if any(map(math.isnan, predicted))]

        def of(names: Sequence[str]) -> str:
            return f" of {', '.join(names)}" if len(names) < len(known) else ""

        hidden = {
            f"confusion tables and gaps given a true label{of(tables)}": bool(tables),
            f"rates of predictions and their gaps{of(rates)}": bool(rates),
            f"accuracy of {', '.join(accuracies)}": bool(accuracies),
            "accuracy of all": bool(known) and math.isnan(self.accuracy),
            "error rates": any(self.gaps[name].where == TOO_FEW for name in _RATES & self.gaps.keys()),
            f"how many of {', '.join(refusals)} are refused": bool(refusals),
        }
        return tuple(words for words, is_hidden in hidden.items() if is_hidden and self.metrics != "private")

    @property
    def smallest_count(self) -> int | None:
        """The smallest number of records above 0 that a group has in any cell that follows from the numbers shown: by
        true label, prediction, both, right or wrong, or refused; None if no group is measured.

        A cell by prediction follows from a rate and the group's size, so it is as good as shown.
        """
        counts = []
        for group, table, predicted in zip(self.groups, self.confusion_GYC, self.rates_GC, strict=True):
            size = group.num_answered
            if not size:
                continue
            counts += [size, *(rate * size for rate in predicted), size * group.accuracy, size * (1 - group.accuracy)]
            counts.append(math.nan if group.num_records is None else group.num_records - size)
            if table is not None:
                counts += [*np.ravel(table), *np.sum(table, axis=1)]
        above = [count for count in counts if count > 1e-6]
        return round(min(above)) if above else None

    def to_json(self) -> dict[str, Any]:
        """Return all fields of the evaluation, and its property ``not_measured``, as plain JSON values; undefined
        numbers are null."""
        return strict(asdict(self) | {"not_measured": self.not_measured})

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Evaluation:
        """Return the evaluation that ``to_json`` wrote. TypeError when fields are missing or unknown."""
        return restored(cls, {name: plain[name] for name in plain if name != "not_measured"})


def evaluate(
    predictions: npt.ArrayLike,
    *,
    labels_N: npt.ArrayLike,
    groups_N: npt.ArrayLike,
    class_names: Sequence[str],
    group_names: Sequence[str],
    generator: np.random.Generator,
    answered_N: npt.ArrayLike | None = None,
    rule: GateRule | None = None,
    offered_N: npt.ArrayLike | None = None,
    persons_N: npt.ArrayLike | None = None,
    least_cell: int = 1,
    apart_N: npt.ArrayLike | None = None,
    hides_predictions: bool = True,
    labels_together: bool = False,
    num_replicates: int = 1000,
) -> Evaluation:
    """Return the evaluation (accuracy, coverage and fairness gaps) of ``predictions``: labels (N,), or probabilities
    (N, C).

    Records for which ``answered_N`` is False affect only coverage; their predictions are not read. ``generator`` draws
    the bootstrap replicates for the gaps' intervals. ``rule``: the rule of the reject option (a demographic-parity
    gate) that decided which records are answered, of those in ``offered_N`` (None: of all). It decides anew in every
    replicate, and fewer replicates are drawn.
    With ``persons_N``, the person of each record, whole persons are resampled. Numbers from fewer than ``least_cell``
    records, or persons, are left out; ``apart_N`` marks records that another published evaluation of the same records
    leaves out. With ``hides_predictions`` False, numbers of predictions may be small: only groups, and their records
    with a true label, need ``least_cell``. With ``labels_together``, numbers by true label are shown of all groups or
    of none, for records that another published evaluation divides into other groups. ValueError for lengths or values
    that do not fit.
    """
    groups, labels = np.asarray(groups_N), np.asarray(labels_N)
    answered = np.ones(len(groups), np.bool_) if answered_N is None else np.asarray(answered_N, np.bool_)
    sizes: dict[str, Any] = {"num_groups": len(group_names), "num_classes": len(class_names)}
    # All records are checked before any is left out.
    rates.joint_table(predictions, groups, labels_N=labels, answered_N=answered, **sizes)
    rates.coverages(groups, answered, num_groups=len(group_names))
    groups, labels = groups.astype(np.int64), labels.astype(np.int64)
    apart = None if apart_N is None else np.asarray(apart_N, np.bool_)
    cells: dict[str, Any] = {"least": least_cell, "num_groups": len(group_names), "persons_N": persons_N}
    least_predicted = least_cell if hides_predictions else 1
    shown = shown_records(groups, answered, apart_N=apart, **cells)
    units_N = np.arange(len(groups)) if persons_N is None else np.unique(persons_N, return_inverse=True)[1]
    refused_N, with_refusals = ~answered, shown
    if apart is not None:
        refused_N = apart
        with_refusals = shown_records(groups, answered & ~apart, **cells)
    refused_N = refused_N & with_refusals.kept_N
    refused_G = few_refused(groups, refused_N, with_refusals, units_N, least_predicted)
    if apart is not None:
        # The evaluation with refusals hides how many these are: with the groups' sizes here it would follow.
        shown = replace(shown, small_G=shown.small_G | refused_G, kept_N=shown.kept_N & ~refused_G[groups])
    kept = shown.kept_N
    predicted = np.asarray(predictions)[kept]
    records = {"groups_N": groups[kept], "labels_N": labels[kept], "answered_N": answered[kept], **sizes}
    joint_GYC = rates.joint_table(predicted, **records)
    # The difference of two evaluations is public as well.
    parts = [answered[kept]] if apart is None else [answered[kept] & of for of in (True, apart[kept], ~apart[kept])]
    hidden = hidden_numbers(
        predicted, records, units_N[kept], parts, least_cell, least_predicted, labels_together=labels_together
    )
    if rule is None:
        of_kept = None if persons_N is None else np.asarray(persons_N)[kept]
        drawn: dict[str, Any] = {"generator": generator, "persons_N": of_kept}
        if hidden.table_G.any():
            drawn_of = _drawn_apart(predicted, records, drawn, hidden, num_replicates)
        else:
            joint_RGYC = rates.resampled_tables(predicted, **records, **drawn, num_replicates=num_replicates)
            drawn_of = dict.fromkeys(GAPS, joint_RGYC)
    else:
        # The gate's answers depend on earlier ones, so it decides again on every resampled set of records. Resampling
        # only the answered records would undo the balance that the gate keeps, and miss the gap that it allows.
        at_gate = np.ones(len(groups), np.bool_) if offered_N is None else np.asarray(offered_N, np.bool_)
        joint_RGYC = resampled_reject_option(
            np.asarray(predictions)[at_gate],
            groups[at_gate],
            true_labels_N=labels[at_gate],
            rule=rule,
            persons_N=None if persons_N is None else np.asarray(persons_N)[at_gate],
            generator=generator,
            **sizes,
        )
        # Only now: the gate takes all records into account, including those of small groups.
        joint_RGYC[:, shown.small_G] = 0
        drawn_of = {name: joint_RGYC * ~hidden.of(name)[:, None, None] for name in GAPS if name not in _RATES}
        drawn_of |= dict.fromkeys(_RATES, joint_RGYC)
    accuracy, accuracy_G = rates.accuracies(joint_GYC)
    coverage, coverage_G = rates.coverages(groups[kept], answered[kept], num_groups=len(group_names))
    measured = Evaluation(
        num_records=int(kept.sum()),
        num_answered=int(answered[kept].sum()),
        accuracy=accuracy,
        coverage=coverage,
        group_names=tuple(group_names),
        class_names=tuple(class_names),
        groups=tuple(
            GroupResult(
                name=name,
                num_records=None if refused_G[z] else int((groups[kept] == z).sum()),
                num_answered=int((answered & kept & (groups == z)).sum()),
                coverage=math.nan if refused_G[z] else float(coverage_G[z]),
                accuracy=float(accuracy_G[z]),
            )
            for z, name in enumerate(group_names)
        ),
        gaps=_gaps(joint_GYC, drawn_of, hidden, group_names=group_names, class_names=class_names),
        ermi=rates.ermi(joint_GYC),
        ermi_given_label=rates.ermi_given_label(joint_GYC),
        rates_GC=tuple(tuple(row) for row in rates.group_rates(joint_GYC).tolist()),
        confusion_GYC=tuple(tuple(tuple(row) for row in table) for table in joint_GYC.tolist()),
        least_cell=least_cell,
        hides_predictions=hides_predictions,
        num_left_out=int((~kept).sum()),
        num_persons=None if persons_N is None else len(np.unique(units_N[kept])),
        num_persons_left_out=0 if persons_N is None else len(np.unique(units_N[~kept])),
        **_of_labels(joint_GYC, class_names),
    )
    measured = _without_small_cells(measured, shown.small_G, hidden)
    measured = with_words(measured)
    # Groups that are too small to be measured are judged by how many of their records are answered: by their size
    # alone, as fewer than `least_cell` answers are known of them, and not how many.
    for z, name in enumerate(group_names):
        size, num_answered = int((groups == z).sum()), int(answered[groups == z].sum())
        is_known = size >= LEAST_RECORDS and max(0, least_cell - 1) < HARDLY_ANY * size
        if shown.small_G[z] and is_known and num_answered < least_cell:
            measured = replace(measured, degenerate=(*measured.degenerate, f"answers hardly any record of {name}"))
    return measured


def _gaps(
    joint_GYC: FloatArray,
    drawn_of: Mapping[str, FloatArray],
    hidden: HiddenNumbers,
    *,
    group_names: Sequence[str],
    class_names: Sequence[str],
) -> dict[str, GapResult]:
    """Return all gaps by name, of the groups whose numbers are shown, with intervals from ``drawn_of``, the replicates
    (R, G, Y, C) of each gap."""
    gaps = {}
    for name, metric in GAPS.items():
        without_G = np.zeros(len(group_names), np.bool_) if name in _RATES else hidden.of(name)
        worst = metric(joint_GYC * ~without_G[:, None, None])
        interval = rates.bootstrap_interval(metric, drawn_of[name], level=LEVEL)
        # A largest gap is biased upwards in every replicate: if groups are treated alike, all replicates exceed the
        # gap.
        ends = (min(interval.low, worst.value), max(interval.high, worst.value))
        low, high = (math.nan, math.nan) if math.isnan(worst.value) else ends
        gaps[name] = GapResult(
            value=worst.value,
            low=low,
            high=high,
            level=LEVEL,
            n_undefined=worst.n_undefined,
            min_cell_size=worst.min_cell_size,
            where=describe_cell(worst.where, group_names=group_names, class_names=class_names),
            left_out=tuple(
                class_names[code] if name in _RATES else group_names[code]
                for code in sorted({*worst.left_out, *np.flatnonzero(without_G).tolist()})
            ),
        )
    return gaps


def _drawn_apart(
    predictions_N: npt.NDArray[Any],
    records: Mapping[str, Any],
    drawn: Mapping[str, Any],
    hidden: HiddenNumbers,
    num_replicates: int,
) -> dict[str, FloatArray]:
    """Return bootstrap replicates (R, G, Y, C) for each fairness gap, for an evaluation that hides some numbers. The
    replicates of a gap are drawn from the counts that the evaluation shows, of the groups that the gap compares."""
    # A seed may be public. Few tables agree with the shown counts, and the ends of an interval that was drawn from the
    # whole table would reveal which of them it was.
    if predictions_N.ndim != 1:
        # The probability of the true label: accuracies need no more of a prediction.
        right_NC = np.take_along_axis(predictions_N, records["labels_N"][:, None], axis=1)
        # Clipped, because rounding may leave a probability a little outside.
        right = np.concatenate([1 - right_NC, right_NC], axis=1).clip(0, 1)
    else:
        right = (predictions_N == records["labels_N"]).astype(np.int64)
    ones = np.ones_like(records["labels_N"])
    seed = drawn["generator"].integers(2**63)

    def counted(hidden_G: BoolArray) -> BoolArray:
        answered_N: BoolArray = records["answered_N"]
        return answered_N & ~hidden_G[records["groups_N"]]

    def resampled(predicted: npt.NDArray[Any], hidden_G: BoolArray, **changes: Any) -> FloatArray:
        # The same seed for each table, so that all intervals are of the same replicates.
        generator = np.random.default_rng(seed)
        arguments = {**records, **drawn, "answered_N": counted(hidden_G), "generator": generator, **changes}
        return rates.resampled_tables(predicted, **arguments, num_replicates=num_replicates)

    drawn_of = dict.fromkeys(GAPS, resampled(predictions_N, hidden.predicted_G, labels_N=None))
    drawn_of["eo_full"] = resampled(predictions_N, hidden.table_G)
    drawn_of["accuracy_parity"] = resampled(right, hidden.right_G, labels_N=ones, num_classes=2)
    nobody_G, zeros = np.zeros_like(hidden.table_G), np.zeros_like(records["groups_N"])
    for names, hidden_G, groups_N in ((_BY_CLASS, hidden.found_G, records["groups_N"]), (_RATES, nobody_G, zeros)):
        if drawn["persons_N"] is not None or records["num_classes"] == 2:
            # Two classes have no other table. And how persons' records differ is not known.
            replicates = resampled(predictions_N, hidden_G, groups_N=groups_N)
        else:
            shown = {**records, "groups_N": groups_N, "answered_N": counted(hidden_G)}
            table_GYC = _spread_errors(rates.joint_table(predictions_N, **shown))
            size = round(table_GYC.sum())
            chances = table_GYC.ravel() / max(table_GYC.sum(), 1)
            counts = np.random.default_rng(seed).multinomial(size, chances, size=num_replicates)
            replicates = counts.reshape(num_replicates, *table_GYC.shape).astype(np.float64)
        drawn_of |= dict.fromkeys(names, replicates)
    return drawn_of


def _spread_errors(table_GYC: FloatArray) -> FloatArray:
    """Return the table with the same labels, predictions and right predictions of each class in which the errors of
    each group are spread as evenly as these allow (by iterative proportional fitting)."""
    others_YC = 1 - np.eye(table_GYC.shape[2])
    wrong_GYC = table_GYC * others_YC
    sums_GY1, sums_G1C = wrong_GYC.sum(axis=2, keepdims=True), wrong_GYC.sum(axis=1, keepdims=True)
    errors_GYC = others_YC * (table_GYC.sum(axis=(1, 2), keepdims=True) > 0)
    for _ in range(100):
        before_GYC = errors_GYC
        for axis, wanted in ((2, sums_GY1), (1, sums_G1C)):
            found = errors_GYC.sum(axis=axis, keepdims=True)
            errors_GYC = errors_GYC * np.divide(wanted, found, out=np.zeros_like(found), where=found != 0)
        if np.array_equal(errors_GYC, before_GYC):
            break
    return table_GYC - wrong_GYC + errors_GYC


def _of_labels(table_GYC: FloatArray, class_names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of an evaluation that are computed from counts by true label: the most common class, its
    accuracy, and the gap of the true labels (``perfect_gap``); no fields if there are no records."""
    label_GC = table_GYC.sum(axis=2)
    label_C = label_GC.sum(axis=0)
    if not label_C.sum() > 0:
        return {}
    return {
        "perfect_gap": rates.dp_one_vs_rest(label_GC[:, None]).value,
        "majority_class": class_names[int(label_C.argmax())],
        "majority_accuracy": float(label_C.max() / label_C.sum()),
    }


def with_labels(measured: Evaluation) -> Evaluation:
    """Return ``measured``, all of whose tables of counts are shown, with all fields that are computed from them."""
    found = _of_labels(np.asarray(measured.confusion_GYC), measured.class_names)
    return with_words(replace(measured, **found))


def with_words(measured: Evaluation) -> Evaluation:
    """Return ``measured`` with the words ``degenerate`` and ``underserved``, and ``underserved_groups``. They are
    computed from the other fields alone, and so reveal nothing that these do not show."""
    worse = {}
    for group, shown_YC in zip(measured.groups, measured.confusion_GYC, strict=True):
        if shown_YC is None or (group.num_answered or 0) < LEAST_RECORDS:
            continue
        table_YC = np.asarray(shown_YC)
        # As in a sign test, only records count on which model and constant differ: for `lost` ones the constant is
        # right.
        common = int(table_YC.sum(axis=1).argmax())
        lost = float(table_YC[common].sum() - table_YC[common, common])
        gained = float(np.trace(table_YC) - table_YC[common, common])
        # Each is a sum over all cells of such records, including their noise.
        noise = 2 * (len(table_YC) - 1) * measured.noise_stddev**2
        # Where neither is better, lost - gained has the variance lost + gained.
        if lost - gained > _CHANCE * math.sqrt(lost + gained + noise):
            always = float(table_YC[common].sum() / table_YC.sum())
            worse[group.name] = (
                f"is right about {_percent(group.accuracy)} of {group.name}, always predicting "
                f"{measured.class_names[common]!r} about {_percent(always)}"
            )
    return replace(
        measured,
        degenerate=tuple(_degenerate(measured)),
        underserved=tuple(worse.values()),
        underserved_groups=tuple(worse),
    )


def _degenerate(measured: Evaluation) -> Iterator[str]:
    """Yield words, such as "answers no record", that say why a model's gaps are meaningless; nothing if they are
    meaningful, if no record was evaluated, or if the numbers that are shown do not decide it."""
    if not measured.num_answered:
        yield from ["answers no record"] if measured.is_measured else []
        return
    classes = measured.class_names
    few = measured.coverage < HARDLY_ANY
    if few:
        yield f"answers {_percent(measured.coverage)} of the records"
    # Counts by prediction, and the share of the most common true label, of each group and of all; NaN if not shown.
    size_G = np.array([group.num_answered or 0 for group in measured.groups])
    predicted_GC = np.array(measured.rates_GC, np.float64) * size_G[:, None]
    for z, table in enumerate(measured.confusion_GYC):
        if table is not None:
            predicted_GC[z] = np.sum(table, axis=0)
        elif not size_G[z]:
            predicted_GC[z] = 0.0
    nearly, share, is_only = _only_class(predicted_GC.sum(axis=0), measured.majority_accuracy)
    if nearly is not None and is_only:
        answered = "" if measured.num_answered == measured.num_records else " that it answers"
        yield f"predicts {classes[nearly]!r} for every record{answered}"
        return
    if nearly is not None:
        yield f"predicts {classes[nearly]!r} for {_percent(share)} of the records"
    elif measured.accuracy <= measured.majority_accuracy + _ROUNDING:
        yield f"is right no more often than always predicting {measured.majority_class!r}"
    # A predicate of all records is not repeated for a group.
    for group in [] if few else measured.groups:
        if (group.num_records or 0) >= LEAST_RECORDS and group.coverage < HARDLY_ANY:
            some = f"{group.num_answered} of {group.num_records} records" if group.num_answered else "no record"
            yield f"answers {some} of {group.name}"
    for group, predicted_C, table, common in zip(
        measured.groups, predicted_GC, measured.confusion_GYC, measured.group_majorities, strict=True
    ):
        if (group.num_answered or 0) < LEAST_RECORDS:
            continue
        only, share, is_only = _only_class(predicted_C, common)
        if only is None:
            continue
        # Records of other classes; of a group with one prediction these are the wrong ones.
        wrong = (group.num_answered or 0) * (1 - group.accuracy) if is_only else math.nan
        others = wrong if table is None else np.sum(table) - np.sum(table[only])
        # A model that predicts one class for a group with almost no other class is simply right. With LEAST_OTHERS
        # records of other classes, a model with the labels' own rates would do so in one case of twenty. Rounded: a
        # randomised model's records are counted by probabilities, whose sums are not quite whole.
        if math.isnan(others) or round(others) < LEAST_OTHERS:
            continue
        if is_only:
            yield f"predicts {classes[only]!r} for every record of {group.name}"
        elif nearly is None:
            yield f"predicts {classes[only]!r} for {_percent(share)} of the records of {group.name}"


def _only_class(predicted_C: FloatArray, common: float) -> tuple[int | None, float, bool]:
    """Return the class that has nearly all predictions, the share of the most predicted class, and whether that class
    has all predictions.

    The class is None if none has nearly all predictions, if true labels are nearly as uneven, or if this is not known.
    ``predicted_C``: counts by prediction; ``common``: the share of the most common true label. Both may be NaN.
    """
    if np.isnan(predicted_C).any():
        return None, math.nan, False
    share = float(predicted_C.max() / predicted_C.sum())
    is_only = int((predicted_C > _ROUNDING).sum()) == 1
    is_nearly = is_only or 1 - share <= min(1 - NEARLY_ALL, (1 - common) / 2) + _ROUNDING
    # `min` passes over a NaN that stands second.
    is_nearly &= is_only or not math.isnan(common)
    return int(predicted_C.argmax()) if is_nearly else None, share, is_only


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def describe_cell(cell: rates.GroupCell | None, *, group_names: Sequence[str], class_names: Sequence[str]) -> str:
    """Return words for the rates that a fairness gap compares in ``cell``, such as "predicted 3, given true 5: red
    against green"; "undefined" if ``cell`` is None."""
    if cell is None:
        return "undefined"
    negated = "" if cell.label_is else "not "
    event = "correct" if cell.label is None else f"{negated}predicted {class_names[cell.label]}"
    if cell.given_label is not None:
        event += f", given true {'' if cell.given_is else 'not '}{class_names[cell.given_label]}"
    if cell.group is None:
        return event
    against = "" if cell.other_group is None else f" against {group_names[cell.other_group]}"
    return f"{event}: {group_names[cell.group]}{against}"


def _without_small_cells(measured: Evaluation, small_G: BoolArray, hidden: HiddenNumbers) -> Evaluation:
    """Return ``measured`` without the numbers of small groups (mask ``small_G``) and those that ``hidden`` names."""
    tables, perfect_gap = list(measured.confusion_GYC), measured.perfect_gap
    if hidden.table_G.any():
        # With two classes, the gap and the totals would reveal the counts.
        perfect_gap = math.nan if len(measured.class_names) == 2 else float(np.floor(10 * perfect_gap) / 10)
    groups = [replace(each, accuracy=math.nan) if hidden.right_G[z] else each for z, each in enumerate(measured.groups)]
    for z in np.flatnonzero(small_G | hidden.table_G):
        tables[z] = None
    for z in np.flatnonzero(small_G):
        groups[z] = GroupResult(name=groups[z].name)
    gaps = dict(measured.gaps)
    for name, gap in gaps.items():
        is_hidden = hidden.errors if name in _RATES else math.isnan(gap.value) and hidden.of(name).any()
        if is_hidden or 0 < gap.min_cell_size < measured.least_cell:
            gaps[name] = replace(NOT_MEASURED, where=TOO_FEW)
    return replace(
        measured,
        accuracy=math.nan if hidden.accuracy else measured.accuracy,
        perfect_gap=perfect_gap,
        groups=tuple(groups),
        gaps=gaps,
        ermi=math.nan if hidden.predicted_G.any() else measured.ermi,
        ermi_given_label=math.nan if hidden.table_G.any() else measured.ermi_given_label,
        rates_GC=tuple(
            (math.nan,) * len(row) if hidden.predicted_G[z] else row for z, row in enumerate(measured.rates_GC)
        ),
        confusion_GYC=tuple(tables),
        majority_class=None if hidden.labels else measured.majority_class,
        majority_accuracy=math.nan if hidden.labels else measured.majority_accuracy,
    )


@dataclass(frozen=True, kw_only=True)
class GroupsTold:
    """The groups for which a small gap is weak evidence of fairness, each with the number of runs, out of ``num_runs``,
    in which this holds.

    For the groups ``underserved``, a constant prediction would be more accurate in these runs; the groups
    ``unmeasured`` were not measured in these runs.
    """

    num_runs: int = 0
    underserved: Mapping[str, int] = field(default_factory=dict)
    unmeasured: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Sequence[RunRecord]) -> GroupsTold:
        return cls(
            num_runs=len(records),
            underserved=Counter(name for record in records for name in record.underserved_groups),
            unmeasured=Counter(name for record in records for name in record.unmeasured_groups),
        )

    def words(self, noun: str) -> tuple[str, ...]:
        """Return up to two sentences about the groups ``underserved`` and ``unmeasured``; ``noun`` names one run, such
        as "seed"."""
        sentences = []
        for words, groups in (
            ("Served worse than by a constant", self.underserved),
            ("In no gap for lack of answered test records", self.unmeasured),
        ):
            several = ((name, f" (in {number} of {self.num_runs} {noun}s)") for name, number in groups.items())
            named = [name + (counted if self.num_runs > 1 else "") for name, counted in several]
            sentences += [f"{words}: {', '.join(named)}."] if named else []
        return tuple(sentences)
