"""The rule by which a run's model answers only where the error rate of its answers is bounded in every group.

The bins of confidence come from the public pool and the model, which are released. The table of right and wrong
predictions by bin is that of the test records: exact, or with noise and priced with the table of private metrics
(:mod:`fairpate.run.private_metrics`). The thresholds are functions of it (:mod:`fairpate.fairness.bounded_errors`), so
they have no further privacy cost. The model is fixed before the table is drawn: its file is written once without the
rule, and once more with it.

Shapes: N test records, M public records, G groups, C classes, S strata (groups, or groups with a predicted label), K
bins of confidence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fairpate.config import ConfigError
from fairpate.data import Dataset
from fairpate.data.dataset import Split
from fairpate.fairness.bounded_errors import ConfidenceBins, answered_bins, confidences, first_tests, is_counted
from fairpate.methods.base import Method
from fairpate.types import AnswerRule, ErrorBound, FloatArray, IntArray
from student.card import StudentCard

if TYPE_CHECKING:
    from student.student import Student


def check_bound(bound: ErrorBound, config: Method, dataset: Dataset) -> None:
    """Raise ConfigError if ``bound``, the setting ``student.reject``, cannot be tested on the data set."""
    if bound.of != "error" and dataset.num_classes != 2:
        raise ConfigError(
            f"student.reject.of: {bound.of} needs two classes, and {dataset.name} has {dataset.num_classes}; set "
            "student.reject.of to error."
        )
    if bound.of != "error" and config.student.idp3 is not None:
        raise ConfigError(
            f"student.reject.of: {bound.of} is not bounded behind the reject option IDP3, which refuses by predicted "
            "label; leave student.idp3 out, or set student.reject.of to error."
        )
    if config.evaluation.metrics != "private" and not len(dataset.test):
        raise ConfigError("student.reject: needs test records with labels, and there are none; leave it out.")


_STORED = {"edges": "confidence_edges", "shares_SB": "public_shares_SK", "doubts_SB": "public_doubts_SK"}
"""The names of released arrays, by the fields of the bins that they store."""


@dataclass(frozen=True, kw_only=True)
class AskedBound:
    """A bound that is asked for, with the bins of confidence of the model that it is about.

    ``by_label``: thresholds are by group and predicted label, as needed behind the reject option IDP3.
    """

    bound: ErrorBound
    bins: ConfidenceBins
    by_label: bool
    num_classes: int

    @classmethod
    def of(cls, bound: ErrorBound, student: Student, dataset: Dataset) -> AskedBound:
        """Return ``bound`` for a model, with bins from its confidences on the public pool."""
        by_label, num_classes = student.card.idp3 is not None, dataset.num_classes
        groups_M = dataset.public.z.numpy()
        chances_MC = np.zeros((0, num_classes), np.float32)
        if len(dataset.public):
            chances_MC = student.probabilities(dataset.public.x, groups_M)
        bins = ConfidenceBins.of(
            confidences(chances_MC),
            _strata(groups_M, chances_MC.argmax(axis=1), num_classes if by_label else None),
            num_strata=dataset.num_groups * (num_classes if by_label else 1),
            num_classes=num_classes,
        )
        return cls(bound=bound, bins=bins, by_label=by_label, num_classes=num_classes)

    @classmethod
    def read(cls, arrays: Mapping[str, npt.NDArray[Any]], card: StudentCard, bound: ErrorBound) -> AskedBound:
        """Return the bound with the bins that were released with a table (:attr:`arrays`)."""
        bins = ConfidenceBins(**{name: arrays[stored] for name, stored in _STORED.items()})
        return cls(bound=bound, bins=bins, by_label=card.idp3 is not None, num_classes=len(card.label_names))

    @property
    def arrays(self) -> dict[str, FloatArray]:
        """The bins as arrays, released with the table so that anybody can compute the thresholds again."""
        return {stored: getattr(self.bins, name) for name, stored in _STORED.items()}

    def table(
        self, test: Split, labels_N: IntArray, chances_NC: npt.NDArray[np.floating], *, weight: int = 1
    ) -> IntArray:
        """Return the exact table (S, K, 2) of right and wrong predictions of test records, in this order. Each record
        weighs ``weight``; where units are persons, one record of each is counted, chosen by a hash of its name."""
        counted_N = is_counted(self.bound, test.y.numpy()) & _one_of_each_person(test)
        wrong_N = (labels_N != test.y.numpy()).astype(np.int64)
        bins_N = self.bins.numbers(confidences(chances_NC))
        table_SK2 = np.zeros((*self.bins.shares_SB.shape, 2), np.int64)
        strata_N = _strata(test.z.numpy(), labels_N, self.num_classes if self.by_label else None)
        where = (strata_N, bins_N, wrong_N)
        np.add.at(table_SK2, tuple(each[counted_N] for each in where), weight)
        return table_SK2

    def rule(
        self, counts_SK2: FloatArray, sizes_GYC: FloatArray, *, noise_stddev: float
    ) -> tuple[AnswerRule, IntArray]:
        """Return the rule of thresholds, and how many bins of each stratum (S,) it answers.

        ``counts_SK2``: right and wrong records by stratum and bin, with noise of standard deviation ``noise_stddev``.
        ``sizes_GYC``: numbers of records by group, true label and prediction, whose noise is independent of it; only
        sums that do not depend on whether predictions are right are read.
        """
        if self.by_label:
            sizes_S = sizes_GYC.sum(axis=1).ravel()
        elif self.bound.of == "error":
            sizes_S = sizes_GYC.sum(axis=(1, 2))
        else:
            sizes_S = sizes_GYC[:, 1 if self.bound.of == "false_negative" else 0].sum(axis=-1)
        first_S = first_tests(sizes_S, self.bins, self.bound, noise_stddev=noise_stddev)
        answered_S = answered_bins(counts_SK2, first_S, self.bound, noise_stddev=noise_stddev)
        thresholds_S = np.array([self.bins.threshold(int(number)) for number in answered_S], dtype=object)
        # Without strata by label, the threshold of a group holds for all its labels.
        thresholds_GC = np.repeat(thresholds_S, 1 if self.by_label else self.num_classes).reshape(-1, self.num_classes)
        return AnswerRule(bound=self.bound, thresholds_GC=tuple(map(tuple, thresholds_GC.tolist()))), answered_S


def _strata(groups_N: IntArray, labels_N: IntArray, num_classes: int | None) -> IntArray:
    """Return the stratum of each prediction (N,): its group, or with ``num_classes`` its group and predicted label."""
    return groups_N if num_classes is None else groups_N * num_classes + labels_N


def _one_of_each_person(test: Split) -> npt.NDArray[np.bool_]:
    if test.person_N is None:
        return np.ones(len(test), np.bool_)
    # By names, so that another person's records or the order of a file change nothing.
    order_N = np.argsort([hashlib.blake2b(name.encode()).digest() for name in test.record_id], kind="stable")
    _, first_of_each = np.unique(test.person_N[order_N], return_index=True)
    chosen_N = np.zeros(len(test), np.bool_)
    chosen_N[order_N[first_of_each]] = True
    return chosen_N


def without_rule(student: Student) -> bytes:
    """Return the bytes of the file of ``student`` without a rule for its answers: those of the model that the table
    was drawn about."""
    from student.student import student_bytes  # with torch, which most readers of a run do not need

    return student_bytes(replace(student, card=replace(student.card, answers=None)))
