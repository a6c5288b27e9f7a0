"""What leaves nothing to learn from a model's gaps, and whom it serves worse than a constant, as predicates in words.

A model that answers hardly anybody, says one class to nearly everyone or to nearly all of a group, or is right no more
often than the most common class has small gaps for that alone. Thresholds are ours: one class for ``NEARLY_ALL`` is as
one for all where true labels are twice as mixed, answers to fewer than ``HARDLY_ANY`` are as none, and groups of fewer
than ``LEAST_RECORDS`` are not spoken of. To say one class to a group that has hardly another is to be right: it counts
from ``LEAST_OTHERS`` records of other classes on, of which a model with the labels' own rates would by chance predict
none in one case of twenty. Numbers are those of the evaluated records.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from fairpate.evaluation.metrics import Evaluation
    from fairpate.types import RunRecord

LEAST_RECORDS = 10
NEARLY_ALL = 0.99
HARDLY_ANY = 0.05
LEAST_OTHERS = 3
_CHANCE = 2.0  # standard deviations
_ROUNDING = 1e-9

Table = npt.NDArray[np.float64]


def what_is_degenerate(measured: Evaluation) -> tuple[str, ...]:
    """Of an evaluation's answered records; nothing where there was no record."""
    if not measured.num_answered:
        return ("answers no record",) if measured.is_measured else ()
    classes, table_YC = measured.class_names, np.asarray(measured.confusion_GYC).sum(axis=0)
    few = measured.coverage < HARDLY_ANY
    words = [f"answers {_percent(measured.coverage)} of the records"] if few else []
    constant, nearly = _only_class(table_YC), _nearly_only_class(table_YC)
    # What holds for everyone is not said again of a group.
    groups = [*([] if few else _hardly_answered(measured)), *_one_class_groups(measured, nearly is None)]
    if constant is not None:
        answered = "" if measured.num_answered == measured.num_records else " that it answers"
        return (*words, f"predicts {classes[constant]!r} for every record{answered}")
    if nearly is not None:
        return (*words, f"predicts {classes[nearly]!r} for {_share(table_YC)} of the records", *groups)
    if measured.accuracy <= measured.majority_accuracy + _ROUNDING:
        words.append(f"is right no more often than always predicting {measured.majority_class!r}")
    return (*words, *groups)


def worse_than_constant(measured: Evaluation) -> dict[str, str]:
    """The groups whose own most common class is right more often than the model, by two standard deviations.

    Only records count on which the two differ, as in a sign test: of ``lost`` the constant alone is right.
    """
    found = {}
    for group, counts in zip(measured.groups, measured.confusion_GYC, strict=True):
        counts_YC = np.asarray(counts)
        if (group.num_answered or 0) < LEAST_RECORDS:
            continue
        common = int(counts_YC.sum(axis=1).argmax())
        lost = float(counts_YC[common].sum() - counts_YC[common, common])
        gained = float(np.trace(counts_YC) - counts_YC[common, common])
        if lost - gained > _CHANCE * math.sqrt(lost + gained):
            always = float(counts_YC[common].sum() / counts_YC.sum())
            found[group.name] = (
                f"is right about {_percent(group.accuracy)} of {group.name}, always predicting "
                f"{measured.class_names[common]!r} about {_percent(always)}"
            )
    return found


@dataclass(frozen=True, kw_only=True)
class GroupsTold:
    """In how many of ``num_runs`` runs a group is served worse than by a constant, or was not measured, by its name."""

    num_runs: int = 0
    underserved: Mapping[str, int] = field(default_factory=dict)
    unmeasured: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Sequence[RunRecord]) -> GroupsTold:
        """What the records of some runs tell together."""
        return cls(
            num_runs=len(records),
            underserved=Counter(name for record in records for name in record.underserved_groups),
            unmeasured=Counter(name for record in records for name in record.unmeasured_groups),
        )

    def words(self, noun: str) -> tuple[str, ...]:
        """A sentence for each of the two, where there is a group; ``noun`` is what a run is one of, such as a seed."""
        told = (
            ("Served worse than by a constant", self.underserved),
            ("In no gap for lack of answered test records", self.unmeasured),
        )
        return tuple(
            f"{words}: {', '.join(self._counted(name, number, noun) for name, number in groups.items())}."
            for words, groups in told
            if groups
        )

    def _counted(self, name: str, number: int, noun: str) -> str:
        return name if self.num_runs == 1 else f"{name} (in {number} of {self.num_runs} {noun}s)"


def hardly_answered(
    groups_N: npt.NDArray[np.int64], answered_N: npt.NDArray[np.bool_], names: Sequence[str], *, of_G: Sequence[bool]
) -> tuple[str, ...]:
    """Predicates of groups ``of_G``, which have too few answered records to be measured, of many."""
    size_G = np.bincount(groups_N, minlength=len(names))
    answered_G = np.bincount(groups_N[answered_N], minlength=len(names))
    return tuple(
        f"answers hardly any record of {name}"
        for name, size, answered, is_meant in zip(names, size_G, answered_G, of_G, strict=True)
        if is_meant and size >= LEAST_RECORDS and answered < HARDLY_ANY * size
    )


def _hardly_answered(measured: Evaluation) -> Iterator[str]:
    for group in measured.groups:
        if (group.num_records or 0) >= LEAST_RECORDS and group.coverage < HARDLY_ANY:
            some = f"{group.num_answered} of {group.num_records} records" if group.num_answered else "no record"
            yield f"answers {some} of {group.name}"


def _one_class_groups(measured: Evaluation, or_nearly: bool) -> Iterator[str]:
    for group, counts in zip(measured.groups, measured.confusion_GYC, strict=True):
        counts_YC = np.asarray(counts)
        if (group.num_answered or 0) < LEAST_RECORDS:
            continue
        constant, nearly = _only_class(counts_YC), _nearly_only_class(counts_YC)
        # Whole numbers, but for the rounding of probabilities that a drawn label's records are counted by.
        if nearly is None or round(counts_YC.sum() - counts_YC[nearly].sum()) < LEAST_OTHERS:
            continue
        if constant is not None:
            yield f"predicts {measured.class_names[constant]!r} for every record of {group.name}"
        elif or_nearly:
            name = measured.class_names[nearly]
            yield f"predicts {name!r} for {_share(counts_YC)} of the records of {group.name}"


def _only_class(counts_YC: Table) -> int | None:
    """The class that has all of the predictions."""
    (classes,) = (counts_YC.sum(axis=0) > _ROUNDING).nonzero()
    return int(classes[0]) if len(classes) == 1 else None


def _nearly_only_class(counts_YC: Table) -> int | None:
    """The class that has nearly all of them, where true labels are less uneven."""
    predicted_C, label_C = counts_YC.sum(axis=0), counts_YC.sum(axis=1)
    rest = 1 - predicted_C.max() / predicted_C.sum()
    mixed = 1 - label_C.max() / label_C.sum()
    return int(predicted_C.argmax()) if rest <= min(1 - NEARLY_ALL, mixed / 2) + _ROUNDING else None


def _share(counts_YC: Table) -> str:
    predicted_C = counts_YC.sum(axis=0)
    return _percent(predicted_C.max() / predicted_C.sum())


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
