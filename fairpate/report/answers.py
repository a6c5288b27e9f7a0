"""What a bound on the error rate of answers guarantees, in numbers and sentences, as all pages state it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from fairpate.pages import counted, listed
from fairpate.report.metrics import Evaluation, IntervalEstimate
from fairpate.types import AnswerRule, ErrorBound, MetricsKind, Unit, restored, strict


@dataclass(frozen=True, kw_only=True)
class AnswerGuarantee:
    """The thresholds of a model that refuses where it is not confident enough, and what they guarantee.

    ``answered`` has, for each group, the share of its records that are answered: an estimate with an interval from a
    noisy table, or the exact share of the test records, whose ends are equal. ``coverage`` is that of all records
    together, and ``accuracy`` the share of all answers that are right. They are of the records whose errors are
    bounded: with ``of`` false_negative, of those that are of the second class. ``num_records`` is the number of test
    records (of persons, where ``unit`` is the person: one record of each) from which the thresholds were computed,
    rounded if it is noisy.
    """

    rule: AnswerRule
    group_names: tuple[str, ...]
    class_names: tuple[str, ...]
    answered: tuple[IntervalEstimate, ...]
    coverage: IntervalEstimate
    accuracy: IntervalEstimate
    num_records: int
    unit: Unit
    metrics: MetricsKind

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON, with the sentence that they support; undefined numbers are null."""
        return strict(asdict(self)) | {"said": self.sentence}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AnswerGuarantee:
        """Return the guarantee that :meth:`to_json` wrote."""
        return restored(cls, {name: value for name, value in values.items() if name != "said"})

    def shown_as(self, measured: Evaluation) -> AnswerGuarantee:
        """Return the guarantee with the coverages and the number of records that ``measured`` shows, an exact
        evaluation of the same model, which hides small numbers of records."""
        shares = [group.coverage for group in measured.groups]
        estimates = (*self.answered, self.coverage, self.accuracy)
        *answered, coverage, accuracy = (
            replace(each, value=share, low=share, high=share)
            for each, share in zip(estimates, (*shares, measured.coverage, measured.accuracy), strict=True)
        )
        number = measured.num_records if measured.num_persons is None else measured.num_persons
        return replace(self, answered=tuple(answered), coverage=coverage, accuracy=accuracy, num_records=number)

    @property
    def bound(self) -> ErrorBound:
        """The bound that was asked for."""
        return self.rule.bound

    @property
    def unmet(self) -> tuple[str, ...]:
        """The groups none of whose records are answered, since the bound cannot be guaranteed for them."""
        rows = zip(self.group_names, self.rule.thresholds_GC, strict=True)
        return tuple(name for name, row in rows if all(threshold is None for threshold in row))

    @property
    def kept(self) -> dict[str, Any]:
        """The bound that holds for the errors of every group's answers, as fields of a run's record; empty if there is
        none."""
        bound = self.bound
        if bound.of != "error" or self.unmet:
            return {}
        return {"max_error": bound.max_error, "max_error_confidence": bound.confidence}

    @property
    def sentence(self) -> str:
        """What is guaranteed, in one sentence."""
        bound, met = self.bound, [name for name in self.group_names if name not in self.unmet]
        most = _share(bound.max_error)
        if not met:
            return f"The model answers nothing: at most {most} wrong answers cannot be guaranteed for any group"
        each = f"each of {counted(len(met), 'group')}" + (f" ({listed(met)})" if self.unmet else "")
        if len(met) == 1:
            each = f"the group {met[0]}"
        over = "the test sample and the noise" if self.metrics == "private" else "the test sample"
        if bound.of == "error":
            what = f"Of the answers in {each} at most {most} are wrong"
        else:
            true, named = self.class_names if bound.of == "false_positive" else self.class_names[::-1]
            what = f"Of the answered records in {each} that are {true}, at most {most} are called {named}"
        return f"{what}, with probability {_share(bound.confidence)} over {over}"

    @property
    def conditions(self) -> tuple[str, ...]:
        """What the sentence rests on and does not cover, one sentence each."""
        of_persons = "persons (one record of each)" if self.unit == "person" else "test records"
        size = f"about {self.num_records:,}" if self.metrics == "private" else f"{self.num_records:,}"
        lines = [
            f"It speaks of the population from which {size} {of_persons} were drawn at random: not of another one, of "
            "this one after it has changed, or of records that somebody chose."
        ]
        if self.unmet and len(self.unmet) < len(self.group_names):
            lines.append(
                f"Nothing can be guaranteed for {listed(self.unmet)}: the model answers none of their records."
            )
        if self.bound.groups == "all":
            lines.append("All groups have the same threshold, so the model need not know a record's group.")
        if self.metrics == "private":
            lines.append("The thresholds come from the noisy table of test records, which epsilon covers.")
        elif self.metrics == "outside":
            lines.append("The thresholds were computed from test records, and no epsilon covers them.")
        lines.append(
            "Accuracies of answers on these test records are a little too good: the records set the thresholds."
        )
        return tuple(lines)

    @property
    def right_words(self) -> str:
        """How many of all answers are right, and how many records are answered; empty if that is not known."""
        if self.bound.of != "error" or math.isnan(self.accuracy.value) or math.isnan(self.coverage.value):
            return ""
        records = "persons" if self.unit == "person" else "records"
        return (
            f"{_share(self.accuracy.value)} of its answers are right, on {_share(self.coverage.value)} of the {records}"
        )

    @property
    def answered_words(self) -> str:
        """The share of each group's records that are answered, with its interval."""
        found = []
        for name, estimate in zip(self.group_names, self.answered, strict=True):
            words = "not known" if math.isnan(estimate.value) else _share(estimate.value)
            if not math.isnan(estimate.value) and estimate.low != estimate.high:
                words += f" ({_share(estimate.low)} to {_share(estimate.high)})"
            found.append(f"{words} of {name}")
        return "; ".join(found)

    @property
    def mood(self) -> Literal["good", "doubtful", "bad"]:
        """The colour of the verdict: good if the bound holds for every group, bad if it holds for none."""
        if not self.unmet:
            return "good"
        return "bad" if len(self.unmet) == len(self.group_names) else "doubtful"

    @property
    def tile(self) -> dict[str, Any]:
        """The value, verdict and details of the tile on a page's first screen."""
        known = [estimate.value for estimate in self.answered if not math.isnan(estimate.value)]
        ends = list(dict.fromkeys(_share(value) for value in (min(known), max(known)))) if known else []
        met = len(self.group_names) - len(self.unmet)
        word = f"At most {_share(self.bound.max_error)} wrong, for {met} of {counted(len(self.group_names), 'group')}"
        value = f"{ends[0].removesuffix(' %')} to {ends[1]}" if len(ends) > 1 else ends[0] if ends else "not known"
        details = (f"{self.sentence}.", f"Answered: {self.answered_words}.", *self.conditions)
        return {"value": value, "word": word if met else "Answers nothing", "details": details}


def _share(value: float) -> str:
    return f"{100 * value:.3g} %"
