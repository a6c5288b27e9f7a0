"""The fairness report of predictions that were made elsewhere, with the measures of a run's report.

A table has a row per record: a prediction (empty for a refusal) or a score, the groups, and optionally the true label
and the person. Each column of groups divides the records and, with several columns, their intersections do.

*Selection rates* follow New York City's Local Law 144 of 2021 (6 RCNY 5-301): the share of a group that is selected, or
that gets a score above the median of all records, and the impact ratio, which is the group's rate over the highest
group's. The report points out a ratio below four fifths (29 CFR 1607.4 D). A group with less than ``LEAST_SHARE`` of
the records has no ratio and takes no part in the highest rate, as the rules allow. If nobody is selected, the ratio is
0 / 0: it is undefined, and the report says so. Records whose score equals the median are counted, and the smallest
ratio is stated for both readings, because scores with few values may have most records at the median.

*Small groups.* The finest division is by all columns together. A group there with fewer than ``least_cell`` records (or
persons) is left out of every division, with enough other groups that no difference of shown totals reveals it
(:mod:`fairpate.report.metrics`). If numbers by true label in the other, overlapping divisions would reveal numbers that
one division hides, only the finest division has numbers by true label.

Intervals of rates are Wilson's and those of ratios MOVER's, as for private metrics without noise. If the table names
persons, both are percentiles of a bootstrap over persons.

Shapes: N records, G groups, R bootstrap replicates.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from rich.console import Group
from rich.table import Column
from rich.text import Text

from fairpate import __version__
from fairpate.config import fair_rule, nearest
from fairpate.data.draft import layout_of
from fairpate.data.given import as_table
from fairpate.data.table_files import plain_batches, read_batches, text_of
from fairpate.data.tables import require_columns
from fairpate.fairness import rates
from fairpate.pages import count, counted, interval, made_words, percent, render
from fairpate.report.metrics import LEVEL, Evaluation, IntervalEstimate, evaluate
from fairpate.report.records import Fairness, MeasuredClaims, fair_words, lower, upper
from fairpate.report.run_page import treated
from fairpate.report.small_cells import shown_records
from fairpate.run.private_metrics import selections
from fairpate.terminal import facts, listing
from fairpate.types import (
    DataError,
    DataSettingsError,
    FairRule,
    FloatArray,
    IntArray,
    UsageError,
    joined_names,
    strict,
)

FOUR_FIFTHS = 0.8  # an impact ratio
LEAST_SHARE = 0.02
_REPLICATES = 1000
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?", re.ASCII)
# The report states the worst verdict: a model that is fair by one column of groups may not be by another.
_WORST_FIRST: tuple[Fairness, ...] = ("degenerate", "not fair", "perhaps fair", "unknown", "fair among some", "fair")
OUTSIDE = (
    "Outside any guarantee: these numbers were computed exactly from the records, without noise, and the model was "
    "made elsewhere. Publishing them may reveal records."
)


@dataclass(frozen=True, kw_only=True)
class GroupSelection:
    """The selection rate and the impact ratio of one group, with intervals; NaN where undefined.

    ``num_records`` is the number of the group's records whose prediction is not a refusal, ``num_selected`` how many of
    them are selected. For a group with too few records to be shown both are None, and the rate and ratio are NaN. If no
    group has a record that is selected, the ratio is NaN. ``is_rare``: the group has less than ``LEAST_SHARE`` of all
    records, so it has no impact ratio.
    """

    name: str
    num_records: int | None
    num_selected: int | None
    rate: IntervalEstimate
    ratio: IntervalEstimate
    is_rare: bool = False

    @property
    def remark(self) -> str:
        """The reason why the report points out this group, such as an impact ratio below four fifths; empty if there is
        no reason to."""
        if self.num_records is None:
            return "too few records to be shown"
        if self.is_rare:
            return f"under {percent(LEAST_SHARE, digits=0)} of the records: no ratio"
        if math.isnan(self.ratio.value):
            return "no ratio: nothing to compare with"
        if self.ratio.value >= FOUR_FIFTHS:
            return ""
        return "below four fifths" + (", its interval reaches above" if self.ratio.high >= FOUR_FIFTHS else "")


@dataclass(frozen=True, kw_only=True)
class Division:
    """The results by group for one division of the records: by one column of groups, or by the intersections of several
    columns.

    ``measured``: accuracy and the fairness gaps of all notions of fairness; None if the table has no true labels.
    ``num_tied``: the number of records, if there are several, whose score equals the median of all; they are not
    selected. ``if_tied``: the groups as they would be if these records were selected; empty if there are none.
    """

    name: str
    groups: tuple[GroupSelection, ...]
    measured: Evaluation | None
    num_tied: int = 0
    if_tied: tuple[GroupSelection, ...] = ()

    @property
    def smallest_ratio(self) -> float:
        """The smallest impact ratio of any group, also if records at the median score were selected; inf without a
        ratio."""
        found = [least.ratio.value for groups in (self.groups, self.if_tied) if (least := _least(groups)) is not None]
        return min(found, default=math.inf)

    @property
    def words(self) -> str:
        """Sentences on the smallest impact ratio of any group, on records at the median score, and on the groups that
        have too few records to be compared."""
        sentences = [_ratio_words(self.groups)]
        if self.num_tied:
            sentences.append(
                f"{count(self.num_tied)} records have exactly the median score and are not above it. If they were "
                f"selected too: {lower(_ratio_words(self.if_tied))}"
            )
        if rare := [group.name for group in self.groups if group.is_rare]:
            sentences.append(f"Under {percent(LEAST_SHARE, digits=0)} of the records: {', '.join(rare)}.")
        return " ".join(sentences)


def _least(groups: Sequence[GroupSelection]) -> GroupSelection | None:
    """Return the group with the smallest impact ratio; None if no two groups have one."""
    known = [group for group in groups if not math.isnan(group.ratio.value)]
    return min(known, key=lambda group: group.ratio.value) if len(known) > 1 else None


def _ratio_words(groups: Sequence[GroupSelection]) -> str:
    """Return a sentence on the smallest impact ratio of the ``groups``, or on why there is none."""
    least = _least(groups)
    if least is not None:
        ratio = least.ratio.value
        # With more digits where two would show a ratio below four fifths as four fifths.
        shown = next(text for digits in (2, 3, 6, 17) if (float(text := f"{ratio:.{digits}f}") < 0.8) == (ratio < 0.8))
        words = f"The smallest impact ratio is {shown} ({interval(least.ratio)}), of {least.name}: "
        return words + ("below four fifths." if ratio < FOUR_FIFTHS else "no group is below four fifths.")
    compared = [group for group in groups if group.num_records is not None and not group.is_rare]
    if len(compared) > 1 and not any(group.num_selected for group in compared):
        return "Nobody is selected in the groups that are compared: the impact ratio is 0 / 0 and undefined."
    return "No two groups can be compared."


@dataclass(frozen=True, kw_only=True)
class AssessedPredictions:
    """The fairness report of a table of predictions; displays as a table in a terminal and as a page in a notebook.

    ``selected`` says in words which prediction counts as being selected. ``num_unknown`` records have no known group.
    ``num_left_out`` records are not shown: their groups are too small, or the numbers of small groups could be computed
    from theirs. ``counts_persons``: ``least_cell`` counts persons. ``finest_alone``: only the division by all columns
    together has numbers by true label, because hidden numbers could be computed from those of the other divisions.
    """

    title: str
    selected: str
    num_records: int
    num_unknown: int
    num_left_out: int
    least_cell: int
    divisions: tuple[Division, ...]
    fair_at: FairRule = field(default_factory=FairRule)
    finest_alone: bool = False
    counts_persons: bool = False

    @property
    def judged(self) -> tuple[Division, MeasuredClaims] | None:
        """The division of the records that has the worst verdict under the user's rule of fairness, and its
        measurements; None without true labels. A division is by one column of groups or by several; among equal
        verdicts it is the finest division."""
        # Finest first: among equal verdicts `min` returns the first one.
        found = [
            (each, MeasuredClaims(measured=each.measured))
            for each in reversed(self.divisions)
            if each.measured is not None and each.measured.is_measured
        ]
        return min(found, key=lambda pair: _WORST_FIRST.index(pair[1].fairness)) if found else None

    @property
    def line(self) -> str:
        """The verdict in one line: fair or not by the user's rule, the accuracy, and the smallest impact ratio."""
        # A division without a ratio counts as the best one: any other has more to say.
        ratios = min(self.divisions, key=lambda each: each.smallest_ratio).words
        if self.judged is None:
            return ratios
        division, claims = self.judged
        verdict = f"{upper(claims.fairness_words)} by {division.name} ({fair_words(self.fair_at)})"
        return f"{verdict}. {claims.right_words} {ratios}"

    @property
    def cells(self) -> str:
        """A sentence on the numbers that are shown although they may count few records; empty if all numbers are."""
        if self.least_cell == 1:
            return ""
        return (
            f"Groups, and a group's records with one true label, need {self.least_cell} "
            f"{'persons' if self.counts_persons else 'records'}; how many of a shown group are selected, refused or "
            "predicted a class is shown even if they are fewer, so check these numbers before you publish them."
        )

    @property
    def left_out(self) -> str:
        """A sentence on the records and numbers that the report leaves out, with the reason; empty if it leaves out
        nothing."""
        words = []
        if self.num_unknown:
            words.append(f"{counted(self.num_unknown, 'record')} without a known group")
        if self.num_left_out:
            noun = "persons" if self.counts_persons else "records"
            small = f"{counted(self.num_left_out, 'record')} of groups of fewer than {self.least_cell} {noun}"
            words.append(f"{small}, or left out so that these do not follow")
        said = [f"Left out: {' and '.join(words)}."] if words else []
        if self.finest_alone:
            said.append(
                f"Accuracy and numbers by true label are shown by {self.divisions[-1].name} alone: from those of the "
                f"other divisions, numbers of fewer than {self.least_cell} would follow."
            )
        return " ".join(said)

    def to_json(self) -> dict[str, Any]:
        """Return all numbers and sentences as plain JSON values; undefined numbers are null."""
        divisions = [
            {
                "name": each.name,
                "words": each.words,
                "groups": [
                    {
                        "name": group.name,
                        "num_records": group.num_records,
                        "num_selected": group.num_selected,
                        "selection_rate": group.rate.value,
                        "selection_rate_interval": [group.rate.low, group.rate.high],
                        "impact_ratio": group.ratio.value,
                        "impact_ratio_interval": [group.ratio.low, group.ratio.high],
                        "remark": group.remark,
                    }
                    for group in each.groups
                ],
                "num_tied": each.num_tied,
                "evaluation": None if each.measured is None else each.measured.to_json(),
            }
            for each in self.divisions
        ]
        names = (
            "title",
            "selected",
            "num_records",
            "num_unknown",
            "num_left_out",
            "least_cell",
            "line",
            "left_out",
            "cells",
        )
        stated = {"format": "fairpate.assessment/1", "guarantee": OUTSIDE, "divisions": divisions}
        return strict(stated | {name: getattr(self, name) for name in names})

    def html(self, *, made_on: str | None = None) -> str:
        """Return the report as one self-contained HTML document; ``made_on``: the date that the document states as its
        own."""
        evaluations = {
            f"by {each.name}": each.measured for each in self.divisions if each.measured and each.measured.is_measured
        }
        return render(
            "assess.html",
            report=self,
            outside=OUTSIDE,
            claims=self.judged and self.judged[1],
            evaluations=evaluations,
            **treated(evaluations, "model"),
            made=made_words(made_on, __version__),
            level=LEVEL,
            least_share=LEAST_SHARE,
        )

    def __rich__(self) -> Group:
        parts: list[Any] = [Text(self.line), Text(" ".join(filter(None, (OUTSIDE, self.left_out, self.cells))))]
        parts.append(Text(f"Selected: {self.selected}. Ratio: a group's rate over the highest group's."))
        for each in self.divisions:
            numbers = ("records", "rate", "interval", "ratio", "interval")
            table = listing(each.name, *(Column(name, justify="right") for name in numbers), "")
            for group in each.groups:
                rate, ratio = group.rate, group.ratio
                shares = (count(group.num_records), percent(rate.value), interval(rate, percent))
                ratios = ("", "") if math.isnan(ratio.value) else (f"{ratio.value:.2f}", interval(ratio))
                table.add_row(group.name, *shares, *ratios, group.remark)
            parts += [Text(""), table]
        if self.judged is not None:
            parts += [Text(f"\nby {self.judged[0].name}"), facts(self.judged[1].measured_rows)]
        return Group(*parts)

    _repr_html_ = html


def assess_predictions(
    table: Path | str | Mapping[str, Sequence[Any]] | Any,
    *,
    groups: str | Sequence[str],
    prediction: str = "prediction",
    label: str | None = None,
    score: str | None = None,
    selected: str | None = None,
    classes: Sequence[Any] | None = None,
    person: str | None = None,
    least_cell: int = 10,
    fair_at: FairRule | None = None,
    seed: int = 0,
) -> AssessedPredictions:
    """Return a fairness report on predictions that were made elsewhere.

    ``table`` is a CSV, Parquet or Feather file, a pandas or polars frame, an Arrow table, or a mapping of columns. Its
    columns are named by ``groups`` (sensitive attributes, one name or several), ``prediction`` (predicted classes;
    empty, missing or masked for a refusal), ``label`` (true classes) and ``person`` (persons, who are then counted and
    resampled with all their records). ``selected`` is the predicted class that counts as being selected; default: of
    two classes the last in alphabetical order. With ``score``, a column of scores instead of classes, a record is
    selected if its score lies above the median of all. Records without a group, and groups of fewer than ``least_cell``
    records or persons, are left out. ``fair_at`` is the user's rule of fairness for the verdict, and ``seed`` seeds the
    bootstrap.

    ``selected`` must be given if the predictions are all of one class and there are no labels of another, because it
    may be the class that selects or not. If predictions and labels each have a class that the other lacks, they are
    taken for two spellings of one class and refused, unless ``classes`` has the names of all classes: then each value
    of both columns has to be one of them. UsageError, or DataError for a damaged file, says what is wrong.

    >>> found = assess_predictions(
    ...     {"prediction": ["yes", "no"] * 20 + ["yes"] * 20, "sex": ["F"] * 40 + ["M"] * 20},
    ...     groups=["sex"],
    ... )
    >>> [(group.name, group.rate.value, group.ratio.value) for group in found.divisions[0].groups]
    [('F', 0.5, 0.5), ('M', 1.0, 1.0)]
    """
    groups = [groups] if isinstance(groups, str) else list(() if groups is None else groups)
    # The command gives text; in Python a list or a number is easily passed by mistake.
    columns: list[tuple[str, Any]] = [("--group", each) for each in groups]
    columns += [("--prediction", score or prediction), ("--score", score), ("--label", label), ("--person", person)]
    for option, each in columns:
        if not isinstance(each, str) and (each is not None or option in ("--group", "--prediction")):
            raise UsageError(
                f"{option}: expected the name of a column of the table, got {type(each).__name__}; give it as text."
            )
    if not groups:
        raise UsageError("--group: expected at least one column of groups, got none; name one, such as --group sex.")
    groups = list(dict.fromkeys(groups))
    if score is not None and label is not None:
        raise UsageError("--label: needs predicted classes, but --score was given; leave out one of the two options.")
    if classes is not None and (isinstance(classes, str) or score is not None):
        raise UsageError(
            "--classes: not read with --score; leave it out."
            if score is not None
            else f"--classes: expected the names of all classes, got the text {classes!r}; give a list of names."
        )
    if least_cell < 1:
        raise UsageError(f"--least-cell: expected 1 or more, got {least_cell}; give 1 to show groups of any size.")
    rule = fair_rule(FairRule() if fair_at is None else fair_at)
    title, text = _text_columns(table, list(dict.fromkeys(each for _, each in columns if each)))
    known_N = np.all([text[name] != "" for name in groups], axis=0)
    if not known_N.any():
        raise UsageError(
            f"--group: no record of {title} has a value in {' and '.join(groups)}; name columns that are filled in."
        )
    # A record without a known group belongs to no division: it is left out and counted.
    text = {name: values[known_N] for name, values in text.items()}
    answered_N = text[score or prediction] != ""
    if not answered_N.any():
        raise UsageError(
            f"--prediction or --score: column {score or prediction} is empty in every record of {title}; name a "
            "column with values."
        )
    for name, option in ((label, "--label"), (person, "--person")):
        if name is not None and (missing := int((text[name] == "").sum())):
            raise UsageError(
                f"{option}: {count(missing)} records have no {name}; complete this column or remove the records."
            )
    if score is not None:
        by = _selected_by_score(text[score], score)
    else:
        by = _selected_by_class(text, prediction, label=label, selected=selected, classes=classes)
    # Names of persons become numbers, with which they are counted and drawn.
    persons_N = None if person is None else np.unique(text[person], return_inverse=True)[1]

    finest, named = _codes([text[name] for name in groups])
    # The finest division decides which records are left out: otherwise totals less its groups would show a small one.
    kept_N = shown_records(finest, answered_N, least=least_cell, num_groups=len(named), persons_N=persons_N).kept_N
    divisions, codes = [], []
    # The intersections last: below, the finest division is known by its place.
    for names in [[name] for name in groups] + ([list(groups)] if len(groups) > 1 else []):
        codes_N, group_names = _codes([text[name] for name in names])
        counted_N = kept_N & answered_N
        num_tied = int((by.tied_N & counted_N).sum())
        # One record alone at the median is the median of an odd number, and ties with none.
        num_tied = num_tied if num_tied > 1 else 0
        by_group: dict[str, Any] = {
            "groups_N": codes_N[counted_N],
            "names": group_names,
            "persons_N": None if persons_N is None else persons_N[counted_N],
            # The same draws for each division, whatever other columns are given.
            "seed": seed,
        }
        chosen = _selections(by.selected_N[counted_N], **by_group)
        if_tied = _selections((by.selected_N | by.tied_N)[counted_N], **by_group) if num_tied else ()
        measured = None
        if label is not None:
            place = {name: code for code, name in enumerate(by.classes)}
            measured = evaluate(
                # A refused record has no class; the 0 in its place is never read.
                np.array([place.get(each, 0) for each in text[prediction][kept_N]], np.int64),
                labels_N=np.array([place[each] for each in text[label][kept_N]], np.int64),
                groups_N=codes_N[kept_N],
                answered_N=answered_N[kept_N],
                class_names=by.classes,
                group_names=group_names,
                persons_N=None if persons_N is None else persons_N[kept_N],
                least_cell=least_cell,
                # How many are selected is the subject of the report.
                hides_predictions=False,
                # Several columns divide the same records in ways that overlap.
                labels_together=len(groups) > 1,
                generator=np.random.default_rng(seed),
            )
            measured = replace(measured, fair_at=rule)
        name = " and ".join(names)
        divisions.append(Division(name=name, groups=chosen, measured=measured, num_tied=num_tied, if_tied=if_tied))
        codes.append(codes_N[kept_N])
    finest_alone = False
    if label is not None and kept_N.any():
        labels_N = np.unique(text[label][kept_N], return_inverse=True)[1]
        units_N = np.arange(len(labels_N)) if persons_N is None else persons_N[kept_N]
        finest_alone = _hidden_follows(divisions, codes, labels_N, units_N, least_cell)
    if finest_alone:
        divisions = [*(replace(each, measured=None) for each in divisions[:-1]), divisions[-1]]
    return AssessedPredictions(
        title=title,
        selected=by.words,
        num_records=int(kept_N.sum()),
        num_unknown=int((~known_N).sum()),
        num_left_out=int((~kept_N).sum()),
        least_cell=least_cell,
        divisions=tuple(divisions),
        fair_at=rule,
        finest_alone=finest_alone,
        counts_persons=persons_N is not None,
    )


@dataclass(frozen=True, kw_only=True)
class _Selected:
    """Which of N records are selected, also in words, and which have the median score (``tied_N``). ``classes``: all
    classes, the one that selects last; empty for scores."""

    words: str
    selected_N: npt.NDArray[np.bool_]
    tied_N: npt.NDArray[np.bool_]
    classes: tuple[str, ...] = ()


def _selected_by_score(text_N: npt.NDArray[np.str_], column: str) -> _Selected:
    """Return which records have a score above the median of all; UsageError if one has no finite score."""
    # Nothing of the table itself is printed: a column chosen by mistake may hold names.
    is_number_N = np.array([bool(_NUMBER.fullmatch(each)) and math.isfinite(float(each)) for each in text_N.tolist()])
    if not is_number_N.all():
        empty = int((text_N == "").sum())
        wrong = len(is_number_N) - int(is_number_N.sum()) - empty
        raise UsageError(
            f"--score: expected a finite number in every row of column {column!r}, but "
            f"{counted(empty, 'row')} {'is' if empty == 1 else 'are'} empty, NaN or infinite and "
            f"{counted(wrong, 'row')} {'is' if wrong == 1 else 'are'} other text; name a column of scores, or "
            "remove the records without one."
        )
    scores_N = text_N.astype(np.float64)
    median = np.median(scores_N)
    return _Selected(
        words=f"{column} above the median of all records", selected_N=scores_N > median, tied_N=scores_N == median
    )


def _selected_by_class(
    text: Mapping[str, npt.NDArray[np.str_]],
    prediction: str,
    *,
    label: str | None,
    selected: str | None,
    classes: Sequence[Any] | None,
) -> _Selected:
    """Return which records are predicted to be of the class that selects; arguments and errors as in
    :func:`assess_predictions`."""
    predicted = set(text[prediction].tolist()) - {""}
    true = predicted if label is None else set(text[label].tolist())
    known = None if classes is None else [_whole(str(each)) for each in classes]
    only_predicted, only_true = sorted(predicted - true), sorted(true - predicted)
    if known is None and only_predicted and only_true:
        raise UsageError(
            f"--label: expected the classes of column {prediction} in column {label}, but only {prediction} has "
            f"{_quoted(only_predicted)}, and only {label} has {_quoted(only_true)}; write every class alike in "
            "both columns, or, if these are different classes, name all classes with --classes."
        )
    for column, values in ((prediction, predicted), (label, true)):
        if known is not None and (others := sorted(values - set(known))):
            raise UsageError(
                f"--classes: expected every class of column {column}, but it also has {_quoted(others)}"
                f"{nearest(others[0], known)}; name all classes, as they are written in the table."
            )
    # True labels too: a class that is never predicted is a class all the same.
    found = sorted(predicted | true)
    if selected is None and len(found) != 2:
        several = f"{len(found)} classes"
        one = f"the single class {found[0]!r}, which may be the one that selects or not"
        raise UsageError(
            f"--selected: missing, but column {prediction} has {one if len(found) == 1 else several}; name the "
            "class that counts as being selected."
        )
    if selected is not None and selected not in found and (len(found) == 1 or selected in (known or ())):
        found.append(selected)  # the class that selects is never predicted
    if selected is not None and selected not in found:
        raise UsageError(
            f"--selected: {selected!r} is not a class of column {prediction}{nearest(selected, found)}; name one "
            "of its classes."
        )
    # The class that selects stands last: of two classes it is the positive one.
    chosen_class = found[-1] if selected is None else selected
    predicted_N = text[prediction]
    return _Selected(
        words=f"{prediction} is {chosen_class}",
        selected_N=predicted_N == chosen_class,
        tied_N=np.zeros(len(predicted_N), np.bool_),
        classes=(*(each for each in found if each != chosen_class), chosen_class),
    )


def _hidden_follows(
    divisions: Sequence[Division], codes: Sequence[IntArray], labels_N: IntArray, units_N: IntArray, least: int
) -> bool:
    """Return True if a hidden number can be computed from the numbers that all divisions of the records show. A
    division hides a number by true label if it counts too few records.

    ``codes``: for each division the group of every record (N,). The finest division is the last entry of both.
    ``units_N``: the record or person that a row of the table belongs to. ``least``: numbers of fewer records or persons
    are hidden.
    """
    first_K = np.unique(codes[-1], return_index=True)[1]  # a record of each group of the finest division
    # Totals over all records are shown too.
    tables, accuracies = [np.ones(len(first_K))], [np.ones(len(first_K))]
    hidden_tables, hidden_accuracies = list[FloatArray](), list[FloatArray]()
    for division, codes_N in zip(divisions, codes, strict=True):
        measured = division.measured
        if measured is None or not measured.is_measured:
            continue
        for z in np.unique(codes_N).tolist():
            made_of_K = (codes_N[first_K] == z).astype(np.float64)
            # A person with several records counts once for each true label.
            of_z = np.unique(np.stack([labels_N, units_N])[:, codes_N == z], axis=1)[0]
            if measured.confusion_GYC[z] is not None:
                tables.append(made_of_K)
            elif np.unique(of_z, return_counts=True)[1].min() < least:
                hidden_tables.append(made_of_K)
            (hidden_accuracies if math.isnan(measured.groups[z].accuracy) else accuracies).append(made_of_K)

    # Each shown number is a sum over groups of the finest division. A hidden one that lies in the span of these sums is
    # a combination of shown numbers.
    for shown, hidden in ((tables, hidden_tables), (accuracies, hidden_accuracies)):
        rank = np.linalg.matrix_rank(np.stack(shown))
        if any(np.linalg.matrix_rank(np.stack([*shown, each])) == rank for each in hidden):
            return True
    return False


def _text_columns(table: Any, columns: Sequence[str]) -> tuple[str, dict[str, npt.NDArray[np.str_]]]:
    """Read ``columns`` of a table; return the table's name and a mapping from each column's name to its values as text.
    Whole numbers are written without a decimal point, and a missing value is empty text."""
    if isinstance(table, str | Path):
        path = Path(table)
        if not path.is_file():
            raise UsageError(f"{path}: not found; give a CSV, Parquet or Feather file of predictions.")
        title = path.name
        batches = read_batches(path, title, layout_of(path, with_rows=True), wanted=columns)
    else:
        title = "the table"
        # Groups may be levels of a frame's index.
        levels = [name for name in getattr(getattr(table, "index", None), "names", ()) if name in columns]
        levels = [name for name in levels if name not in table]
        frame = as_table(table.reset_index(levels) if levels else table, title, wanted=columns)
        batches = plain_batches(frame, title, wanted=columns)
    read = pa.concat_tables(batches)
    try:
        require_columns(read, columns, title)
    except DataError as error:
        raise DataSettingsError(f"{error} Name the columns by options such as --prediction and --group.") from error
    values = {name: map(_whole, text_of(read[name]).to_pylist()) for name in columns}
    return title, {name: np.array(list(each), dtype=np.str_) for name, each in values.items()}


def _whole(text: str) -> str:
    """Return ``text`` without spaces around it, and a whole number such as ``1.0`` as ``1``: predictions may be written
    as floats where labels are whole numbers."""
    return re.sub(r"^(-*\d+)\.0$", r"\1", text.strip())


def _quoted(names: Sequence[str]) -> str:
    """Return the first five of ``names``, each in quotation marks, as text."""
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _codes(columns: Sequence[npt.NDArray[np.str_]]) -> tuple[IntArray, tuple[str, ...]]:
    """Return the index of each record's group (N,), and the names of all groups. Each combination of values that occurs
    in ``columns`` is a group."""
    joined = [
        parts[0] if len(parts) == 1 else joined_names(parts, "·")
        for parts in zip(*(column.tolist() for column in columns), strict=True)
    ]
    names, codes_N = np.unique(np.array(joined, dtype=np.str_), return_inverse=True)
    return codes_N.astype(np.int64), tuple(names.tolist())


def _selections(
    selected_N: npt.NDArray[np.bool_],
    *,
    groups_N: IntArray,
    names: Sequence[str],
    persons_N: IntArray | None,
    seed: int,
) -> tuple[GroupSelection, ...]:
    """Return the selection rate and impact ratio of each group in ``names``, with intervals.

    ``selected_N`` and ``groups_N`` say of each shown record whether it is selected, and the index of its group; records
    of groups that the report leaves out are not among them. With ``persons_N``, the person of each record, the
    intervals are from a bootstrap over persons, drawn from ``seed``.
    """
    sizes: dict[str, Any] = {"num_groups": len(names), "num_classes": 2}
    chosen_N = selected_N.astype(np.int64)
    joint_GYC = rates.joint_table(chosen_N, groups_N, **sizes)
    size_G = joint_GYC.sum(axis=(1, 2))
    is_rare_G = size_G < LEAST_SHARE * size_G.sum()
    # Rare groups have no ratio, and do not count as the group with the highest rate.
    common = np.flatnonzero(~is_rare_G & (size_G > 0))
    rate_3G, ratio_3G = selections(joint_GYC)[0], np.full((3, len(names)), np.nan)
    if len(common):
        ratio_3G[:, common] = selections(joint_GYC[common])[1]
    if persons_N is not None:
        drawing: dict[str, Any] = {"generator": np.random.default_rng(seed), "num_replicates": _REPLICATES, **sizes}
        drawn_RG2 = rates.resampled_tables(chosen_N, groups_N, persons_N=persons_N, **drawing).sum(axis=2)
        rate_RG = rates.divide(drawn_RG2[..., 1], drawn_RG2.sum(axis=2))
        # Anew in each replicate: the group with the highest rate is itself estimated.
        highest_R1 = np.nanmax(rate_RG[:, common], axis=1, keepdims=True) if len(common) else math.nan
        tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
        for found_3G, drawn_RG in ((rate_3G, rate_RG), (ratio_3G, rates.divide(rate_RG, highest_R1))):
            known = np.flatnonzero(~np.isnan(found_3G[0]))
            found_3G[1:, known] = np.nanquantile(drawn_RG[:, known], tails, axis=0)
    groups = []
    for z, name in enumerate(names):
        (rate, low, high), (ratio, least, most) = rate_3G[:, z].tolist(), ratio_3G[:, z].tolist()
        groups.append(
            GroupSelection(
                name=name,
                num_records=None if not size_G[z] else round(size_G[z]),
                num_selected=None if not size_G[z] else round(joint_GYC[z, 0, 1]),
                rate=IntervalEstimate(name="", kind="share", value=rate, low=low, high=high),
                ratio=IntervalEstimate(name="", kind="ratio", value=ratio, low=least, high=most),
                is_rare=bool(is_rare_G[z] and size_G[z] > 0),
            )
        )
    return tuple(groups)
