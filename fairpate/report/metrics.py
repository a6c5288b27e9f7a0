"""Accuracy, coverage and fairness gaps of a set of predictions, overall and by group, with their intervals.

The numbers are outside every privacy guarantee unless the evaluated records are public or the numbers come from a
private release (:mod:`fairpate.run.private_metrics`), as ``Evaluation.metrics`` says. An undefined number, or one from
too few records, is NaN in Python, null in JSON and never 0.

*Small cells.* A cell is a group, or the records of a group with one true label; its size counts records, or persons if
the data set names them. A cell with at least 1 and fewer than ``least`` is small, and no number may reveal it. A small
group is left out of everything: of gaps, of totals, and of the records that other groups are compared with. The total
number of test records may be public (``data.num_test``), so every small group leaves out exactly ``least``: its own and
the last ones of the largest group. The number left out then reveals nothing, even if two groups are small. Counts by
true label are shown for all groups or for none: if a few were missing, they could be computed from the others and the
totals. Two published evaluations of the same records also reveal their difference, so the records that only one of them
includes must not form a small cell either.

*Degenerate models.* A model may have small gaps only because it answers almost nobody, predicts one class for nearly
everyone or nearly all of a group, or is right no more often than always predicting the most common class. The
thresholds are ours. A class with at least the share ``NEARLY_ALL`` of the predictions counts as the only one, if true
labels outside the most common class are at least twice as frequent as predictions outside this class. Answering less
than a share ``HARDLY_ANY`` counts as answering nobody, and groups of fewer than ``LEAST_RECORDS`` are not judged.

*Reject option.* IDP3 (FairPATE, Algorithm 2) answers or refuses each prediction depending on earlier answers, so its
numbers belong to one order of the records. Here the same predictions pass a fresh gate in several random orders, and in
each bootstrap replicate.

Shapes: N records, G groups, C classes, Y true labels, R bootstrap replicates, A states of the gate in one order of the
records (before its first answer and after each answer).
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
from fairpate.fairness.gate import filter_stream, filter_streams
from fairpate.fairness.rates import NOTIONS
from fairpate.types import FairRule, FloatArray, GateRule, MetricsKind, NotionName, restored, strict

if TYPE_CHECKING:
    from fairpate.types import RunRecord

BoolArray = npt.NDArray[np.bool_]
_Array = npt.NDArray[Any]

LEAST_RECORDS = 10
NEARLY_ALL = 0.99
HARDLY_ANY = 0.05
LEAST_OTHERS = 3
LEAST_ANSWERED = 0.5
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
_GIVEN_LABEL = frozenset({"eo_lowy", "eo_full", "equal_opportunity"})


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """The results of one group: the numbers of its evaluated and of its answered records, the share answered
    (``coverage``), and the accuracy on answered records.

    Numbers are None, and shares NaN, for a group that has too few records to be published.
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
      group lacks; of an error rate of all groups together, the classes for which it is undefined. The gap is then a
      lower bound, and says nothing about these.

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
    value=math.nan, low=math.nan, high=math.nan, level=0.95, n_undefined=0, min_cell_size=0, where="undefined"
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
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

    ``noun``: "records" or "persons", the units that numbers count. ``intervals``: the kind of confidence intervals.
    ``covered``: whether a guarantee covers the numbers. ``why_unknown``: why no record was evaluated; meaningless if
    some records were evaluated.
    """

    noun: str
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

    Only records in cells of at least ``least_cell`` records or persons count: smaller groups are in no number, and a
    number that would reveal a smaller cell is None or NaN; with more than two classes ``perfect_gap`` is then rounded
    down to tenths.

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
    perfect_gap: float = math.nan
    majority_class: str | None = None
    majority_accuracy: float = math.nan
    degenerate: tuple[str, ...] = ()
    underserved: tuple[str, ...] = ()
    underserved_groups: tuple[str, ...] = ()
    metrics: MetricsKind = "outside"
    noise_stddev: float = 0.0
    per_person: bool = False
    estimates: tuple[Estimate, ...] = ()
    fair_at: FairRule = field(default_factory=FairRule)

    @property
    def words(self) -> EvaluationWords:
        """The words with which all pages describe the numbers of this evaluation."""
        measured = "Measured on test records with their true labels and groups"
        people = " Every person counts as one, divided among the person’s records." if self.per_person else ""
        covered: Mapping[MetricsKind, str] = {
            "outside": f"{measured}; outside the privacy guarantee.",
            "public": f"{measured}, which the operator declares public.",
            "private": (
                "Estimated from one noisy table of private test records, which the privacy guarantee covers: noise of "
                f"standard deviation {self.noise_stddev:.3g} on every count. Intervals hold this noise and the "
                f"sampling of test records; what does not stand out from the noise is undefined.{people}"
            ),
        }
        return {
            "noun": "test person" if self.per_person else "test record",
            "intervals": "intervals" if self.metrics == "private" else "bootstrap intervals",
            "covered": covered[self.metrics],
            "why_unknown": "no group has enough test records" if self.not_measured else "there were no test records",
        }

    @property
    def is_measured(self) -> bool:
        """True if any record was evaluated; without one, every number is undefined."""
        return self.num_records > 0

    @property
    def disparity(self) -> float:
        """The demographic-parity gap, which is the fairness number that pages state first."""
        return self.measured("demographic_parity").value

    def measured(self, notion: NotionName) -> GapResult:
        """Return the gap or rate of a notion of fairness; NOT_MEASURED if it was not evaluated, for example by an
        earlier version of this package."""
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
            shown = replace(NOT_MEASURED, level=gap.level) if gap.left_out else gap
            fair_from = math.nan if gap.left_out else self.fair_from(name)
            found[name] = {end: getattr(shown, end) for end in ("value", "low", "high")} | {"fair_from": fair_from}
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
    persons_N: npt.ArrayLike | None = None,
    least_cell: int = 1,
    apart_N: npt.ArrayLike | None = None,
    num_replicates: int = 1000,
    level: float = 0.95,
) -> Evaluation:
    """Return the evaluation (accuracy, coverage and fairness gaps) of ``predictions``: labels (N,), or probabilities
    (N, C).

    Records for which ``answered_N`` is False affect only coverage; their predictions are not read. ``generator`` draws
    the bootstrap replicates for the gaps' intervals. ``rule``: the rule of the reject option (a demographic-parity
    gate) that decided which records are answered. It decides anew in every replicate, and fewer replicates are drawn.
    With ``persons_N``, the person of each record, whole persons are resampled. Numbers from fewer than ``least_cell``
    records, or persons, are left out; ``apart_N`` marks records that another published evaluation of the same records
    leaves out. ValueError for lengths or values that do not fit.
    """
    groups, labels = np.asarray(groups_N), np.asarray(labels_N)
    answered = np.ones(len(groups), np.bool_) if answered_N is None else np.asarray(answered_N, np.bool_)
    sizes: dict[str, Any] = {"num_groups": len(group_names), "num_classes": len(class_names)}
    # All records are checked before any is left out.
    rates.joint_table(predictions, groups, labels_N=labels, answered_N=answered, **sizes)
    rates.coverages(groups, answered, num_groups=len(group_names))
    groups, labels = groups.astype(np.int64), labels.astype(np.int64)
    apart = None if apart_N is None else np.asarray(apart_N, np.bool_)
    shown = shown_records(
        groups, labels, answered, least=least_cell, num_groups=len(group_names), persons_N=persons_N, apart_N=apart
    )
    kept = shown.kept_N
    predicted = np.asarray(predictions)[kept]
    records = {"groups_N": groups[kept], "labels_N": labels[kept], "answered_N": answered[kept], **sizes}
    joint_GYC = rates.joint_table(predicted, **records)
    drawn: dict[str, Any] = {"generator": generator}
    drawn_of: dict[str, FloatArray] = {}
    if rule is None:
        drawn["persons_N"] = None if persons_N is None else np.asarray(persons_N)[kept]
        if not shown.by_label:
            drawn_of = _drawn_apart(predicted, records, drawn, num_replicates)
        joint_RGYC = rates.resampled_tables(predicted, **records, **drawn, num_replicates=num_replicates)
    else:
        # The gate's answers depend on earlier ones, so it decides again on every resampled set of records. Resampling
        # only the answered records would undo the balance that the gate keeps, and miss the gap that it allows.
        joint_RGYC = resampled_reject_option(
            predictions, groups, true_labels_N=labels, rule=rule, persons_N=persons_N, **sizes, **drawn
        )
        # Only now: the gate takes all records into account, including those of small groups.
        joint_RGYC[:, shown.small_G] = 0
    accuracy, accuracy_G = rates.accuracies(joint_GYC)
    coverage, coverage_G = rates.coverages(groups[kept], answered[kept], num_groups=len(group_names))
    gaps = {}
    for name, metric in GAPS.items():
        worst = metric(joint_GYC)
        interval = rates.bootstrap_interval(metric, drawn_of.get(name, joint_RGYC), level=level)
        # A largest gap is biased upwards in every replicate: if groups are treated alike, all replicates exceed the
        # gap.
        ends = (min(interval.low, worst.value), max(interval.high, worst.value))
        low, high = (math.nan, math.nan) if math.isnan(worst.value) else ends
        gaps[name] = GapResult(
            value=worst.value,
            low=low,
            high=high,
            level=level,
            n_undefined=worst.n_undefined,
            min_cell_size=worst.min_cell_size,
            where=describe_cell(worst.where, group_names=group_names, class_names=class_names),
            left_out=tuple((class_names if name in _RATES else group_names)[code] for code in worst.left_out),
        )
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
                num_records=int((groups[kept] == z).sum()),
                num_answered=int((answered & kept & (groups == z)).sum()),
                coverage=float(coverage_G[z]),
                accuracy=float(accuracy_G[z]),
            )
            for z, name in enumerate(group_names)
        ),
        gaps=gaps,
        ermi=rates.ermi(joint_GYC),
        ermi_given_label=rates.ermi_given_label(joint_GYC),
        rates_GC=tuple(tuple(row) for row in rates.group_rates(joint_GYC).tolist()),
        confusion_GYC=tuple(tuple(tuple(row) for row in table) for table in joint_GYC.tolist()),
        least_cell=least_cell,
    )
    measured = with_words(measured)
    # Groups that are too small to be measured are judged by how many of their records are answered.
    for z, name in enumerate(group_names):
        size = int((groups == z).sum())
        if shown.small_G[z] and size >= LEAST_RECORDS and (answered & (groups == z)).sum() < HARDLY_ANY * size:
            measured = replace(measured, degenerate=(*measured.degenerate, f"answers hardly any record of {name}"))
    published = [joint_GYC]
    if apart is not None:
        alone = kept & answered & apart
        of_alone = {"labels_N": labels[alone], "groups_N": groups[alone], **sizes}
        published.append(rates.joint_table(np.asarray(predictions)[alone], **of_alone))
    return _without_small_cells(measured, shown, published)


def _drawn_apart(
    predictions_N: npt.NDArray[Any], records: Mapping[str, Any], drawn: Mapping[str, Any], num_replicates: int
) -> dict[str, FloatArray]:
    """Return bootstrap replicates (R,) of fairness gaps by notion, for an evaluation that hides counts by group and
    true label. Only those gaps are included that can be computed from the counts that it shows."""
    # A seed may be public. Few tables agree with the shown counts, and the ends of an interval that was drawn from the
    # whole table would reveal which of them it was.
    if predictions_N.ndim != 1:
        # The probability of the true label: accuracies need no more of a prediction.
        right_NC = np.take_along_axis(predictions_N, records["labels_N"][:, None], axis=1)
        # Clipped, because rounding may leave a probability a little outside.
        right = np.concatenate([1 - right_NC, right_NC], axis=1).clip(0, 1)
    else:
        right = (predictions_N == records["labels_N"]).astype(np.int64)
    ones, zeros = np.ones_like(records["labels_N"]), np.zeros_like(records["groups_N"])
    seed = drawn["generator"].integers(2**63)

    def resampled(predicted: npt.NDArray[Any], **changes: Any) -> FloatArray:
        # The same seed for each table, so that all intervals are of the same replicates.
        generator = np.random.default_rng(seed)
        return rates.resampled_tables(
            predicted, **{**records, **drawn, "generator": generator, **changes}, num_replicates=num_replicates
        )

    predicted = resampled(predictions_N, labels_N=None)
    of_all = resampled(predictions_N, groups_N=zeros)
    return {
        **{name: predicted for name in GAPS if name not in _RATES | _GIVEN_LABEL | {"accuracy_parity"}},
        **dict.fromkeys(_RATES, of_all),
        "accuracy_parity": resampled(right, labels_N=ones, num_classes=2),
    }


def with_words(measured: Evaluation) -> Evaluation:
    """Return ``measured`` with the fields that are computed from its tables of counts: the most common class and its
    accuracy, the gap of the true labels (``perfect_gap``), the words ``degenerate`` and ``underserved``, and
    ``underserved_groups``."""
    table_GYC = np.asarray(measured.confusion_GYC)
    label_GC = table_GYC.sum(axis=2)
    label_C = label_GC.sum(axis=0)
    if label_C.sum() > 0:
        measured = replace(
            measured,
            perfect_gap=rates.dp_one_vs_rest(label_GC[:, None]).value,
            majority_class=measured.class_names[int(label_C.argmax())],
            majority_accuracy=float(label_C.max() / label_C.sum()),
        )
    worse = {}
    for group, table_YC in zip(measured.groups, table_GYC, strict=True):
        if (group.num_answered or 0) < LEAST_RECORDS:
            continue
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
        degenerate=tuple(_degenerate(measured, table_GYC)),
        underserved=tuple(worse.values()),
        underserved_groups=tuple(worse),
    )


def _degenerate(measured: Evaluation, table_GYC: FloatArray) -> Iterator[str]:
    """Yield words, such as "answers no record", that say why a model's gaps are meaningless; nothing if they are
    meaningful, or if no record was evaluated."""
    if not measured.num_answered:
        yield from ["answers no record"] if measured.is_measured else []
        return
    classes, table_YC = measured.class_names, table_GYC.sum(axis=0)
    few = measured.coverage < HARDLY_ANY
    if few:
        yield f"answers {_percent(measured.coverage)} of the records"
    nearly, share, is_only = _only_class(table_YC)
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
    for group, counts_YC in zip(measured.groups, table_GYC, strict=True):
        if (group.num_answered or 0) < LEAST_RECORDS:
            continue
        only, share, is_only = _only_class(counts_YC)
        # A model that predicts one class for a group with almost no other class is simply right. With LEAST_OTHERS
        # records of other classes, a model with the labels' own rates would do so in one case of twenty. Rounded: a
        # randomised model's records are counted by probabilities, whose sums are not quite whole.
        if only is None or round(counts_YC.sum() - counts_YC[only].sum()) < LEAST_OTHERS:
            continue
        if is_only:
            yield f"predicts {classes[only]!r} for every record of {group.name}"
        elif nearly is None:
            yield f"predicts {classes[only]!r} for {_percent(share)} of the records of {group.name}"


def _only_class(counts_YC: FloatArray) -> tuple[int | None, float, bool]:
    """Return the class that has nearly all predictions, the share of the most predicted class, and whether that class
    has all predictions.

    The class is None if none has nearly all predictions, or if true labels are nearly as uneven. ``counts_YC``: counts
    by true label and prediction.
    """
    predicted_C, label_C = counts_YC.sum(axis=0), counts_YC.sum(axis=1)
    share = float(predicted_C.max() / predicted_C.sum())
    mixed = 1 - label_C.max() / label_C.sum()
    is_only = int((predicted_C > _ROUNDING).sum()) == 1
    is_nearly = is_only or 1 - share <= min(1 - NEARLY_ALL, mixed / 2) + _ROUNDING
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


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Which numbers of an evaluation may be published without revealing a small cell. Public numbers may describe only
    the records ``kept_N`` (a mask), which exclude the groups ``small_G`` (a mask).

    ``by_label``: whether counts by true label may be shown for each group; ``totals_by_label``: whether they may be
    shown for all groups together.
    """

    kept_N: BoolArray
    small_G: BoolArray
    by_label: bool
    totals_by_label: bool


def shown_records(
    groups_N: _Array,
    labels_N: _Array,
    answered_N: BoolArray,
    *,
    least: int,
    num_groups: int,
    persons_N: npt.ArrayLike | None = None,
    apart_N: BoolArray | None = None,
) -> Shown:
    """Choose which of the answered records (mask ``answered_N``) public numbers may describe, so that no number reveals
    a small cell.

    ``least``: a cell of fewer records, or persons, is small. ``apart_N`` marks records that another published
    evaluation of the same records leaves out.
    """
    units_N = np.arange(len(groups_N)) if persons_N is None else np.unique(persons_N, return_inverse=True)[1]
    published = [answered_N] if apart_N is None else [answered_N, answered_N & apart_N]

    def small(cells_N: _Array, num_cells: int, of: list[BoolArray]) -> BoolArray:
        """Return a mask of the cells with too few records (or persons) in any of the sets of records in ``of``, which
        are given as masks. ``cells_N``: the index of each record's cell."""
        found = np.zeros(num_cells, np.bool_)
        for part in of:
            # Each unit once per cell: a person with ten records in a cell is one.
            pairs = np.unique(cells_N[part] * (units_N.max(initial=0) + 1) + units_N[part])
            size = np.bincount(pairs // (units_N.max(initial=0) + 1), minlength=num_cells)
            found |= (size > 0) & (size < least)
        return found

    # Sizes over all records decide, so that the same records are left out for every model that is measured on them.
    small_G = small(groups_N, num_groups, [np.ones(len(groups_N), dtype=np.bool_)])
    kept_N = ~small_G[groups_N]
    while kept_N.any() and (lacking := least * int(small_G.sum()) - len(np.unique(units_N[~kept_N]))) > 0:
        largest = np.bincount(groups_N[kept_N]).argmax()
        # The last records of the largest group fill up the number; the choice depends on no prediction.
        last = list(dict.fromkeys(units_N[kept_N & (groups_N == largest)].tolist()))[-lacking:]
        fewer_N = kept_N & ~np.isin(units_N, last)
        became_small_G = small(groups_N, num_groups, [fewer_N])
        # An empty cell is not small, but a group that was emptied has to be left out all the same.
        became_small_G[largest] |= not fewer_N[groups_N == largest].any()
        if not became_small_G.any():
            kept_N = fewer_N
            break
        # A group that became small leaves out `least` of its own, and the filling begins again.
        small_G = small_G | became_small_G
        kept_N = ~small_G[groups_N]
    # Last, because it may differ between models: a group of enough records may have too few answers.
    small_G = small_G | small(groups_N, num_groups, [kept_N & part for part in published])
    kept_N &= ~small_G[groups_N]
    kept = [kept_N & part for part in published]
    # The difference of two evaluations is public as well.
    by_label = kept if apart_N is None else [*kept, kept_N & answered_N & ~apart_N]
    num_labels = int(labels_N.max(initial=0)) + 1
    return Shown(
        kept_N=kept_N,
        small_G=small_G,
        by_label=not small(groups_N * num_labels + labels_N, num_groups * num_labels, by_label).any(),
        totals_by_label=not small(labels_N, num_labels, kept).any(),
    )


def _without_small_cells(measured: Evaluation, shown: Shown, published: Sequence[FloatArray]) -> Evaluation:
    """Return ``measured`` without the numbers from which the size of a small cell could be computed; ``shown`` says
    which these are.

    ``published``: the counts (G, Y, C) by group, true label and prediction of all published evaluations of these
    records.
    """
    least = measured.least_cell
    hidden = {name for name, gap in measured.gaps.items() if 0 < gap.min_cell_size < least}
    tables, underserved, perfect_gap = list(measured.confusion_GYC), measured.underserved, measured.perfect_gap
    groups, accuracy = list(measured.groups), measured.accuracy
    majority = (measured.majority_class, measured.majority_accuracy)
    if not shown.by_label:
        hidden |= _GIVEN_LABEL
        tables = [None] * len(tables)
        # With two classes, the gap and the totals would reveal the counts.
        perfect_gap = math.nan if len(measured.class_names) == 2 else np.floor(10 * perfect_gap) / 10
        underserved = tuple(
            f"is right about {name} less often than always predicting its most common class would be"
            for name in measured.underserved_groups
        )
        # The fewest and smallest groups lose their accuracy; never one alone, whose accuracy the total would give.
        size_G = published[0].sum(axis=(1, 2))
        by_size = [z for z in size_G.argsort(kind="stable").tolist() if size_G[z] > 0]
        unshown = by_size
        for number in (0, *range(2, len(by_size))):
            if not any(_labels_follow(each, by_size[:number], least, shown.totals_by_label) for each in published):
                unshown = by_size[:number]
                break
        hidden |= {"accuracy_parity"} if unshown else set()
        groups = [replace(group, accuracy=math.nan) if z in unshown else group for z, group in enumerate(groups)]
        with_totals = shown.totals_by_label and not any(_labels_follow_from_totals(each, least) for each in published)
        if not with_totals:
            hidden |= _RATES
            majority = (None, math.nan)
        for table_GYC in published:
            # The accuracy of all reveals labels where errors, right predictions or the records of a class are few.
            size, right = table_GYC.sum(), np.trace(table_GYC, axis1=1, axis2=2).sum()
            other = size if with_totals else size - table_GYC.sum(axis=(0, 1)).max()
            if size > 0 and 2 * min(right, size - right, other) < least:
                hidden |= _RATES
                accuracy = math.nan
    for z in np.flatnonzero(shown.small_G):
        tables[z] = None
        groups[z] = GroupResult(name=groups[z].name)
    too_few = replace(NOT_MEASURED, where="too few records in a cell")
    return replace(
        measured,
        accuracy=accuracy,
        perfect_gap=float(perfect_gap),
        groups=tuple(groups),
        gaps={
            name: replace(too_few, level=gap.level) if name in hidden else gap for name, gap in measured.gaps.items()
        },
        ermi_given_label=measured.ermi_given_label if shown.by_label else math.nan,
        confusion_GYC=tuple(tables),
        majority_class=majority[0],
        majority_accuracy=majority[1],
        underserved=underserved,
    )


def _labels_follow(joint_GYC: FloatArray, hidden: Sequence[int], least: int, with_totals: bool) -> bool:
    """Return True if an outsider can nearly compute how many records have some true label. The outsider knows the
    predictions by group, and the accuracies of all groups except ``hidden``.

    "Nearly" means: within a range narrower than half of ``least``. ``with_totals``: the outsider knows the accuracy and
    most common class of all groups together too.
    """
    # One more record of each kind of error, and one less of each kind of right prediction, changes the size of a class
    # by 2.
    together_HYC = joint_GYC[list(hidden)]
    known_GYC = np.delete(joint_GYC, hidden, axis=0)
    known_GYC = np.concatenate([known_GYC, together_HYC.sum(axis=0, keepdims=True)]) if hidden else known_GYC
    size_G, right_G = known_GYC.sum(axis=(1, 2)), np.trace(known_GYC, axis1=1, axis2=2)
    other_G = size_G - known_GYC.sum(axis=1).max(axis=1)
    moves_G = np.minimum(np.minimum(right_G, size_G - right_G), other_G)
    if joint_GYC.shape[-1] == 2 and with_totals:
        found_G, predicted_G = known_GYC[:, 1, 1], known_GYC[:, :, 1].sum(axis=1)
        # Bounds of an intersection (Fréchet): of the records predicted as class 1 and those predicted correctly.
        fewest_G = np.maximum(0, predicted_G + right_G - size_G)
        moves_G = _moves(found_G - fewest_G, np.minimum(predicted_G, right_G) - fewest_G)
    is_narrow = bool((4 * moves_G < least)[size_G > 0].any())
    return is_narrow or (bool(hidden) and _labels_follow_from_totals(together_HYC, least))


def _labels_follow_from_totals(joint_GYC: FloatArray, least: int) -> bool:
    """Return True if an outsider can nearly compute how many records have some true label, as in
    :func:`_labels_follow`. The outsider knows the predictions by group, and the accuracy and most common class of all
    groups together. False for more than two classes."""
    if joint_GYC.shape[-1] != 2:
        return False
    moves_G = np.sum([_moves(joint_GYC[:, 1, k], joint_GYC[:, :, k].sum(axis=1)) for k in range(2)], axis=0)
    return bool((2 * moves_G < least)[joint_GYC.sum(axis=(1, 2)) > 0].any())


def _moves(count_G: FloatArray, most_G: FloatArray) -> FloatArray:
    """Return, for each group, the range (largest minus smallest possible value) of its unknown count. An outsider knows
    only the sum of the counts ``count_G``, and that no count is negative or exceeds ``most_G``."""
    up_G = np.minimum(most_G - count_G, count_G.sum() - count_G)
    room_G = most_G - count_G
    return up_G + np.minimum(count_G, room_G.sum() - room_G)


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


@dataclass(frozen=True, kw_only=True)
class OrderResult:
    """The results of a reject option (IDP3) for one order of the records. Its gaps are the demographic-parity gaps
    ``dp_one_vs_rest`` over the records answered so far.

    ``final_gap`` is the gap after the last answer; it is NaN if a group has answers, but too few to be shown.
    ``max_gap_from`` is the number of answers after which every group with records has got at least ``rule.min_count``
    answers, and enough answers to be shown. ``max_gap`` is the largest gap from there on. Both are undefined (None and
    NaN) if a group never gets that number of answers, or if there is only one group.
    """

    accuracy: float
    coverage: float
    coverage_G: tuple[float, ...]
    final_gap: float
    max_gap: float
    max_gap_from: int | None


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The mean, least and greatest value of a metric over several orders of the records; NaN if the metric is undefined
    for every order.

    ``n_undefined``: the number of orders for which the metric is undefined; they are left out.
    """

    mean: float
    low: float
    high: float
    n_undefined: int


@dataclass(frozen=True, kw_only=True)
class RejectOptionSpread:
    """The results of a reject option (IDP3) for several orders of the same ``num_records`` records, and their spread
    over these orders.

    ``answers_needed``: the number of answers that every group must have before ``max_gap`` is measured.
    """

    rule: GateRule
    num_records: int
    accuracy: Spread = field(init=False)
    coverage: Spread = field(init=False)
    final_gap: Spread = field(init=False)
    max_gap: Spread = field(init=False)
    coverage_G: tuple[Spread, ...] = field(init=False)
    orders: tuple[OrderResult, ...]
    answers_needed: int

    def __post_init__(self) -> None:
        for name in ("accuracy", "coverage", "final_gap", "max_gap"):
            object.__setattr__(self, name, _spread([getattr(order, name) for order in self.orders]))
        of_groups = zip(*(order.coverage_G for order in self.orders), strict=True)
        object.__setattr__(self, "coverage_G", tuple(map(_spread, of_groups)))

    def to_json(self) -> dict[str, Any]:
        """Return all fields as plain JSON values; undefined numbers are null, and so is the largest disparity of a gate
        that is switched off."""
        plain: dict[str, Any] = strict(asdict(self))
        # It follows from the rule and the least cell of the evaluation.
        del plain["answers_needed"]
        return plain


def reject_option_spread(
    labels_N: npt.ArrayLike,
    groups_N: npt.ArrayLike,
    *,
    true_labels_N: npt.ArrayLike,
    rule: GateRule,
    num_groups: int,
    num_classes: int,
    generator: np.random.Generator,
    num_orders: int = 10,
    kept_N: npt.ArrayLike | None = None,
    least_cell: int = 1,
) -> RejectOptionSpread:
    """Pass the predicted ``labels_N`` through a fresh demographic-parity gate in each of ``num_orders`` random orders;
    return the results of each order and their spread.

    ``true_labels_N`` are used only for accuracy. All records pass the gate, but only those in ``kept_N`` are measured.
    IndexError for a label or group that the gate does not know.
    """
    labels, groups, truth = np.asarray(labels_N), np.asarray(groups_N), np.asarray(true_labels_N)
    kept = np.ones(len(labels), np.bool_) if kept_N is None else np.asarray(kept_N, np.bool_)
    sizes = {"num_groups": num_groups, "num_classes": num_classes}
    needed, orders = max(rule.min_count, least_cell, 1), []
    for order in [generator.permutation(len(labels)) for _ in range(num_orders)]:
        passed = filter_stream(labels[order], groups[order], rule=rule, **sizes)
        of_kept = order[kept[order]]
        answered, labels_K, groups_K = passed[kept[order]], labels[of_kept], groups[of_kept]
        course_AGYC = rates.cumulative_tables(labels_K[answered], groups_K[answered], **sizes)
        # The empty state in front: then the index of a state is its number of answers.
        course_AGYC = np.concatenate([np.zeros((1, *course_AGYC.shape[1:])), course_AGYC])
        gap_A, size_AG = rates.dp_one_vs_rest.values(course_AGYC), course_AGYC.sum(axis=(-2, -1))
        # The cold start ends once every group that has records got enough answers; without a second group, never.
        present = np.unique(groups_K)
        warm_A = (size_AG[:, present] >= needed).all(axis=-1)
        start = int(warm_A.argmax()) if len(present) > 1 and warm_A.any() else None
        # The gap would reveal the answers of a group that has fewer.
        is_known = not ((size_AG[-1] > 0) & (size_AG[-1] < least_cell)).any()
        coverage, coverage_G = rates.coverages(groups_K, answered, num_groups=num_groups)
        right_K = labels_K == truth[of_kept]
        orders.append(
            OrderResult(
                accuracy=float(rates.divide(right_K[answered].sum(), answered.sum())),
                coverage=coverage,
                coverage_G=tuple(coverage_G.tolist()),
                final_gap=float(gap_A[-1]) if is_known else math.nan,
                max_gap=math.nan if start is None else float(gap_A[start:].max()),
                max_gap_from=start,
            )
        )
    return RejectOptionSpread(rule=rule, num_records=int(kept.sum()), orders=tuple(orders), answers_needed=needed)


def resampled_reject_option(
    labels_N: npt.ArrayLike,
    groups_N: npt.ArrayLike,
    *,
    true_labels_N: npt.ArrayLike,
    rule: GateRule,
    num_groups: int,
    num_classes: int,
    generator: np.random.Generator,
    persons_N: npt.ArrayLike | None = None,
    num_replicates: int = 200,
) -> FloatArray:
    """Pass bootstrap samples of the predicted ``labels_N`` through a reject option (a demographic-parity gate by
    ``rule``); return the counts (R, G, Y, C) of answers by replicate, group, true label and prediction.

    With ``persons_N``, the person of each record, persons are drawn, each with all of its records.
    """
    labels, groups, truth = np.asarray(labels_N), np.asarray(groups_N), np.asarray(true_labels_N)
    joint_RGYC = np.zeros((num_replicates, num_groups, num_classes, num_classes))
    if not len(labels):
        return joint_RGYC
    if persons_N is None:
        drawn_RN = generator.integers(len(labels), size=(num_replicates, len(labels)))
        length_R = np.full(num_replicates, len(labels))
    else:
        _, person_N, size_P = np.unique(np.asarray(persons_N), return_inverse=True, return_counts=True)
        by_person_N, start_P = person_N.argsort(kind="stable"), size_P.cumsum() - size_P
        drawn_RP = generator.integers(len(size_P), size=(num_replicates, len(size_P)))
        # Samples differ in length. A shorter one is padded at its end, after everything that counts.
        length_R = size_P[drawn_RP].sum(axis=1)
        drawn_RN = np.zeros((num_replicates, int(length_R.max())), dtype=np.int64)
        for line_N, drawn_P, length in zip(drawn_RN, drawn_RP, length_R, strict=True):
            sizes = size_P[drawn_P]
            # Indices of each person's records among all records sorted by person.
            places = np.arange(length) + np.repeat(start_P[drawn_P] - (sizes.cumsum() - sizes), sizes)
            # In random order: otherwise all records of a person would pass the gate in a row.
            line_N[:length] = generator.permutation(by_person_N[places])
    answered_RN = filter_streams(
        labels[drawn_RN], groups[drawn_RN], rule=rule, num_groups=num_groups, num_classes=num_classes
    )
    # Answers to the padding do not count.
    answered_RN &= np.arange(drawn_RN.shape[1]) < length_R[:, None]
    # One row per answer, of all replicates together: the tables are then one addition.
    replicate_A, place_A = answered_RN.nonzero()
    row_A = drawn_RN[replicate_A, place_A]
    # Not `+=`, which adds once to a cell that occurs several times.
    np.add.at(joint_RGYC, (replicate_A, groups[row_A], truth[row_A], labels[row_A]), 1.0)
    return joint_RGYC


def _spread(values: Sequence[float]) -> Spread:
    defined = [value for value in values if not math.isnan(value)]
    mean, low, high = (sum(defined) / len(defined), min(defined), max(defined)) if defined else (math.nan,) * 3
    return Spread(mean=mean, low=low, high=high, n_undefined=len(values) - len(defined))
