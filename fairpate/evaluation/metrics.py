"""What a set of predictions is worth: accuracy, coverage and fairness, overall and by group.

The numbers describe the evaluated records with their true labels and groups. They are outside every privacy
guarantee unless those records are public or the numbers are released privately. An undefined number is NaN in
Python, null in JSON and never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fairpate.evaluation.degenerate import what_is_degenerate, worse_than_constant
from fairpate.evaluation.reject_option import resampled_reject_option
from fairpate.fairness import gaps, rates
from fairpate.fairness.notions import NOTIONS, NotionName
from fairpate.strict_json import strict
from fairpate.types import GateRule

OTHER_READINGS: Mapping[str, gaps.Metric] = {
    "dp_pairwise": gaps.dp_pairwise,
    "dp_to_overall": gaps.dp_to_overall,
    "eo_full": gaps.eo_full,
}
"""Definitions of two notions that differ from ours with several groups or classes, as some papers have them."""
GAPS: Mapping[str, gaps.Metric] = {**{notion.reading: notion.metric for notion in NOTIONS.values()}, **OTHER_READINGS}
"""The metrics every evaluation reports, by their names in JSON: one for each notion, and the other readings."""
_RATES = frozenset(notion.reading for notion in NOTIONS.values() if notion.bounds_rate)
_DERIVED = ("majority_class", "majority_accuracy", "degenerate", "underserved", "not_measured")


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """One group: records evaluated, records answered, their share and the accuracy on them."""

    name: str
    num_records: int
    num_answered: int
    coverage: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class GapResult:
    """One gap with its bootstrap percentile interval, widened to the gap where that lies outside.

    ``min_cell_size`` is the smallest cell that took part, ``n_undefined`` the cells left out, ``where`` the cell that
    attains the value, in words.
    """

    value: float
    low: float
    high: float
    level: float
    n_undefined: int
    min_cell_size: int
    where: str


_NOT_MEASURED = GapResult(
    value=math.nan, low=math.nan, high=math.nan, level=0.95, n_undefined=0, min_cell_size=0, where="undefined"
)


@dataclass(frozen=True, kw_only=True)
class WithoutPrivacy:
    """What a logistic model reaches that learned from ``num_records`` test records and from no private one.

    ``accuracy`` is over test records that it did not learn from, and that the measured model answered.
    """

    accuracy: float
    num_records: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Selective accuracy, coverage and gaps of predictions on ``num_records`` records.

    Accuracy, rates and gaps are over answered records. ``confusion_GYC[z][y][k]`` is how many (for probabilities,
    how much mass) of group z with true label y was predicted k; ``rates_GC[z][k]`` is r(z, k).

    ``majority_accuracy`` is what stands beside the accuracy: that of always predicting ``majority_class``, the most
    common true label of the same answered records. ``degenerate`` names what makes a good gap worth nothing.
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
    confusion_GYC: tuple[tuple[tuple[float, ...], ...], ...]

    @property
    def is_measured(self) -> bool:
        """Whether there was any record; without, every number is undefined."""
        return self.num_records > 0

    @property
    def disparity(self) -> float:
        """The headline gap: that of demographic parity."""
        return self.measured("demographic_parity").value

    def measured(self, notion: NotionName) -> GapResult:
        """What was measured of a notion; undefined in files of earlier versions, which lack some."""
        return self.gaps.get(NOTIONS[notion].reading, _NOT_MEASURED)

    @property
    def between_groups(self) -> dict[str, GapResult]:
        """What compares groups: gaps, of which 0 is equal treatment."""
        return {name: gap for name, gap in self.gaps.items() if name not in _RATES}

    @property
    def error_rates(self) -> dict[str, GapResult]:
        """What bounds a rate of everyone; none in files of earlier versions."""
        return {name: gap for name, gap in self.gaps.items() if name in _RATES}

    @property
    def fairness(self) -> dict[str, dict[str, float | None]]:
        """Every notion by its name, with its interval; null where it is undefined."""
        found = {name: self.measured(name) for name in NOTIONS}
        ends = ("value", "low", "high")
        values = {name: {end: getattr(each, end) for end in ends} for name, each in found.items()}
        return {name: {end: None if math.isnan(v) else v for end, v in each.items()} for name, each in values.items()}

    @property
    def majority_class(self) -> str | None:
        """The most common true label of the answered records, the first of several; None where none was answered."""
        label_C = np.asarray(self.confusion_GYC).sum(axis=(0, 2))
        return self.class_names[int(label_C.argmax())] if label_C.sum() > 0 else None

    @property
    def majority_accuracy(self) -> float:
        """The share of ``majority_class`` among the answered records; NaN where none was answered."""
        label_C = np.asarray(self.confusion_GYC).sum(axis=(0, 2))
        return float(label_C.max() / label_C.sum()) if label_C.sum() > 0 else math.nan

    @property
    def group_majorities(self) -> tuple[float, ...]:
        """For each group the share of its most common true label among its answered records; NaN without any."""
        label_GC = np.asarray(self.confusion_GYC).sum(axis=2)
        return tuple(float(of_C.max() / of_C.sum()) if of_C.sum() > 0 else math.nan for of_C in label_GC)

    @property
    def not_measured(self) -> tuple[str, ...]:
        """The groups without an answered record, which every gap leaves out."""
        return tuple(group.name for group in self.groups if not group.num_answered) if self.num_answered else ()

    @property
    def degenerate(self) -> tuple[str, ...]:
        """What a predictor does that leaves nothing to learn from its gaps: predicates, such as "predicts 'no' for
        every record"; empty for one that is better than a constant, answers and tells records of every group apart."""
        return what_is_degenerate(self)

    @property
    def underserved(self) -> tuple[str, ...]:
        """Predicates of groups whom their own most common class would serve better, by more than chance: a model may
        have come to equal errors by levelling down."""
        return tuple(worse_than_constant(self).values())

    @property
    def underserved_groups(self) -> tuple[str, ...]:
        """The names of these groups."""
        return tuple(worse_than_constant(self))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, field for field and what is computed from them; undefined numbers are null."""
        derived = {name: getattr(self, name) for name in _DERIVED}
        plain: dict[str, Any] = strict(asdict(self) | derived)
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Evaluation:
        """The evaluation that ``to_json`` wrote. KeyError or TypeError when fields are missing or unknown."""
        fields = {name: value for name, value in plain.items() if name not in _DERIVED}
        fields["groups"] = tuple(GroupResult(**_none_to_nan(group)) for group in plain["groups"])
        fields["gaps"] = {name: GapResult(**_none_to_nan(gap)) for name, gap in plain["gaps"].items()}
        fields["rates_GC"] = tuple(tuple(_none_to_nan(row)) for row in plain["rates_GC"])
        fields["confusion_GYC"] = tuple(tuple(tuple(row) for row in table) for table in plain["confusion_GYC"])
        for name in ("group_names", "class_names"):
            fields[name] = tuple(plain[name])
        for name in ("accuracy", "coverage", "ermi", "ermi_given_label"):
            fields[name] = _none_to_nan(plain[name])
        return cls(**fields)


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
    num_replicates: int = 1000,
    level: float = 0.95,
) -> Evaluation:
    """Measure hard labels (N,) or probabilities (N, C) against true labels and groups.

    Records that ``answered_N`` marks False count towards coverage alone; their predictions are not read.
    ``generator`` drives the bootstrap of the gaps' intervals; where ``rule`` decided which are answered, it decides
    anew in every replicate, of which there are then fewer. ``persons_N`` says whose each record is: whole persons are
    then drawn. ValueError for lengths or values that do not fit.
    """
    groups = np.asarray(groups_N)
    answered = np.ones(len(groups), np.bool_) if answered_N is None else np.asarray(answered_N, np.bool_)
    sizes: dict[str, Any] = {"num_groups": len(group_names), "num_classes": len(class_names)}
    records: dict[str, Any] = {"groups_N": groups, "labels_N": labels_N, "answered_N": answered, **sizes}
    joint_GYC = rates.joint_table(predictions, **records)
    drawn: dict[str, Any] = {"persons_N": persons_N, "generator": generator}
    if rule is None:
        joint_RGYC = rates.resampled_tables(predictions, **records, **drawn, num_replicates=num_replicates)
    else:
        # The gate's answers depend on those before, so that it decides anew on every drawn set of records.
        joint_RGYC = resampled_reject_option(predictions, groups, true_labels_N=labels_N, rule=rule, **sizes, **drawn)
    return Evaluation(
        num_records=len(groups),
        num_answered=int(answered.sum()),
        accuracy=rates.accuracies(joint_GYC)[0],
        coverage=rates.coverages(groups, answered, num_groups=len(group_names))[0],
        group_names=tuple(group_names),
        class_names=tuple(class_names),
        groups=_by_group(joint_GYC, groups, answered, group_names),
        gaps={n: _measure(m, joint_GYC, joint_RGYC, level, group_names, class_names) for n, m in GAPS.items()},
        ermi=gaps.ermi(joint_GYC),
        ermi_given_label=gaps.ermi_given_label(joint_GYC),
        rates_GC=tuple(tuple(row) for row in rates.group_rates(joint_GYC).tolist()),
        confusion_GYC=tuple(tuple(tuple(row) for row in table) for table in joint_GYC.tolist()),
    )


def describe_cell(cell: gaps.Cell | None, *, group_names: Sequence[str], class_names: Sequence[str]) -> str:
    """A cell in words, such as "predicted 3, given true 5: red against green"; "undefined" for None."""
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


def _by_group(
    joint_GYC: rates.FloatArray,
    groups_N: npt.NDArray[Any],
    answered_N: npt.NDArray[np.bool_],
    group_names: Sequence[str],
) -> tuple[GroupResult, ...]:
    _, accuracy_G = rates.accuracies(joint_GYC)
    _, coverage_G = rates.coverages(groups_N, answered_N, num_groups=len(group_names))
    return tuple(
        GroupResult(
            name=name,
            num_records=int((groups_N == z).sum()),
            num_answered=int((answered_N & (groups_N == z)).sum()),
            coverage=float(coverage_G[z]),
            accuracy=float(accuracy_G[z]),
        )
        for z, name in enumerate(group_names)
    )


def _measure(
    metric: gaps.Metric,
    joint_GYC: rates.FloatArray,
    joint_RGYC: rates.FloatArray,
    level: float,
    group_names: Sequence[str],
    class_names: Sequence[str],
) -> GapResult:
    worst = metric(joint_GYC)
    interval = gaps.bootstrap_interval(metric, joint_RGYC, level=level)
    # A largest gap leans upwards in every replicate: of groups treated alike none is as small as the gap itself.
    ends = (min(interval.low, worst.value), max(interval.high, worst.value))
    low, high = (math.nan, math.nan) if math.isnan(worst.value) else ends
    return GapResult(
        value=worst.value,
        low=low,
        high=high,
        level=level,
        n_undefined=worst.n_undefined,
        min_cell_size=worst.min_cell_size,
        where=describe_cell(worst.where, group_names=group_names, class_names=class_names),
    )


def _none_to_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _none_to_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_none_to_nan(item) for item in value]
    return math.nan if value is None else value
