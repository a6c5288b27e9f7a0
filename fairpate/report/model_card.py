"""The card of a published model: what it is, what it was trained on, its guarantee and its measurements, and what for.

One card is a page, a JSON document, and Markdown as hubs of models read it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from fairpate import pages
from fairpate.fairness.rates import NOTIONS
from fairpate.pages import count, delta_text, percent, render
from fairpate.report import records
from fairpate.report.answers import AnswerGuarantee
from fairpate.report.decision import Choice
from fairpate.report.figures import settings_words
from fairpate.report.metrics import Evaluation
from fairpate.report.population import PrivatePopulation
from fairpate.report.records import Guarantee, RunStatement
from fairpate.report.run_page import GAP_NAMES, answered_words
from fairpate.types import TELLS_SIZE, GateRule

_MOST_NAMED = 11
_KINDS = {"image": "pictures", "tabular": "rows of numbers"}


@dataclass(frozen=True, kw_only=True)
class CardModel:
    """The published model as its card describes it: its method, its input and its output.

    If ``reject_option`` is None, the model answers everything. ``sha256``: the digest of the published file.
    ``num_training_labels``: the number of released labels on which it was trained, if recorded. ``method_title``: the
    method's readable name. ``made_on``: an ISO 8601 date.
    """

    method: str
    architecture: str
    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    groups: tuple[str, ...]
    sensitive_attribute: str
    reject_option: GateRule | None
    sha256: str
    made_by: str
    num_training_labels: int | None = None
    method_title: str | None = None
    made_on: str | None = None


@dataclass(frozen=True, kw_only=True)
class CardData:
    """The data set as its publisher describes it, and the options with which it was read.

    Only the name and kind are known of a data set that was passed in from Python (``given_from_python``).
    """

    name: str
    kind: str
    given_from_python: bool = False
    task: str | None = None
    publisher: str | None = None
    address: str | None = None
    licence: str | None = None
    options: Mapping[str, Any] | None = None
    split_seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class IntendedUse:
    """The intended use of the model in its owner's words; the card names what is None as not stated."""

    intended: str | None = None
    out_of_scope: str | None = None
    contact: str | None = None


@dataclass(frozen=True, kw_only=True)
class CardRefusals:
    """The results of a model that may refuse to answer: lowest and highest accuracy and coverage over ``num_orders``
    orders of the test records, and the evaluation of the same model without refusals (``unrefused``)."""

    num_orders: int
    accuracy: tuple[float | None, float | None]
    coverage: tuple[float | None, float | None]
    unrefused: Evaluation | None = None


@dataclass(frozen=True, kw_only=True)
class Card:
    """The contents of a model card (a description of the published model), with the sentences of ``card.json`` and the
    table rows of its page."""

    model: CardModel
    privacy: Guarantee
    data: CardData
    use: IntendedUse
    evaluation: Evaluation
    refusals: CardRefusals | None = None
    answers: AnswerGuarantee | None = None
    private_population: PrivatePopulation | None = None
    choice: Choice | None = None

    @property
    def choice_words(self) -> str:
        """What ε covers of the choice of this model among others."""
        covered = "part of ε" if self.privacy.tuning_accounted else "not part of ε"
        return ". ".join(filter(None, (covered, self.statement.choice_words)))

    @property
    def statement(self) -> RunStatement:
        return RunStatement(
            guarantee=self.privacy,
            measured=self.evaluation,
            answers=self.answers,
            has_reject_option=self.model.reject_option is not None,
            choice=self.choice,
        )

    @property
    def protected_records(self) -> str:
        """Words for the private records that the privacy guarantee covers."""
        parts = [part for part in ("validation", "test") if part in self.privacy.parts]
        return f"private {pages.listed(['training', *parts])} records"

    @property
    def sentences(self) -> dict[str, Any]:
        """The sentences that a model card's page and its file ``card.json`` share, by topic.

        ``description``: input, output, method and groups of the model. ``publishable``: the items that may be published
        with the model, and ``not_publishable``: those that must stay with the operator. ``limits``: cautions for
        reading the numbers. ``small_cells``: the smallest count of a group that the numbers show.
        """
        privacy, measured = self.privacy, self.evaluation
        unrefused = None if self.refusals is None else self.refusals.unrefused
        # Of many classes the first ones and the last are named.
        model, data, (*others, last) = self.model, self.data, self.model.classes
        shown = [*others[:_MOST_NAMED], *(["…"] if len(others) > _MOST_NAMED else [])]
        classes = f"one of {count(len(others) + 1)} classes: {', '.join(shown)} or {last}"
        inputs = _KINDS.get(data.kind, f"{data.kind} records") + " that were given from Python" * data.given_from_python
        task = f" Task: {data.task}." if data.task else ""
        description = (
            f"For {inputs} like those of {data.name} it predicts {classes}.{task} Method: "
            f"{model.method_title or model.method}. Groups: those of {model.sensitive_attribute} "
            f"({', '.join(model.groups)})."
        )

        # What the guarantee does not protect is a condition of publishing, not a caution below it.
        bare = privacy.not_protected
        publishable = [
            "The model's file, any number of its predictions for public records at no further cost, and anything "
            "computed from these" + (f", if these may be public too: {bare}." if bare else "."),
            "Epsilon, delta, unit and relation as stated here, always together.",
            records.WORDS["publishing_metrics"][measured.metrics],
        ]
        nothing = ["Nothing: neither the model nor its predictions or metrics are protected."]
        not_publishable = [
            "The private records, models that were trained on them without noise, and their votes.",
            "Any price that was computed from votes, and any ledger: both depend on private values.",
            "Counts or statistics of the private records that were not released with noise"
            + (", but for the number that a sampling rate reveals." if privacy.tells_size else "."),
        ]

        covered = f"what the operator calls a {privacy.unit}, each behind one vote,"
        if not privacy.words["attested"]:
            whose = {"person": "the persons behind the ", "sensitive attribute": "the sensitive attribute of "}
            covered = f"{whose.get(privacy.unit, 'the ')}{self.protected_records}"
        other = "public records" if measured.metrics == "private" else "public or test records"
        alone = (
            f"The privacy guarantee is for {covered} alone: not for {other}, and not for people whom the model is "
            "used on."
        )
        limits = [
            *privacy.limits,
            *(f"Degenerate: on the test records the model {words}." for words in measured.degenerate),
            *(f"On the test records the model {words}." for words in measured.underserved),
            *(f"Gaps leave out {name}: too few answered {measured.words['units']}." for name in measured.not_measured),
            *filter(None, (records.left_out_words(measured), records.small_cell_words(measured))),
            *([alone] if privacy.protects else []),
            "The gaps are those of one test set. Other people, or another share of groups, may be treated otherwise."
            if measured.is_measured
            else f"{measured.words['why_unknown'].capitalize()}: how accurate the model is, and how it treats groups, "
            "is unknown.",
            "Demographic parity compares rates of predictions; a small gap does not mean that errors fall evenly: each "
            "notion says another thing.",
        ]
        # If the statement has its own, longer remark on this, it is among the limits already.
        if privacy.tells_size and TELLS_SIZE.get(privacy.unit) not in privacy.remarks:
            units = "persons" if privacy.unit == "person" else "private records"
            limits.append(f"The sampling rate reveals the number of {units}, or the declared number: it is public.")
        limits += filter(None, (privacy.words["uncharged_tuning"],))
        if self.answers is not None:
            limits += [f"{self.answers.sentence}.", *self.answers.conditions]
        if self.model.reject_option is not None:
            limits.append(
                "What the model refuses depends on its earlier answers; people whom it refuses get no answer."
            )
        return {
            "description": description,
            "publishable": publishable if privacy.protects else nothing,
            "not_publishable": not_publishable,
            "limits": limits,
            "small_cells": records.smallest_count_words([measured, *filter(None, (unrefused,))]),
        }

    @property
    def data_rows(self) -> records.Rows:
        """The facts about the data set, as pairs of heading and value."""
        data = self.data
        rows = [
            ("Name", data.name),
            ("Task", data.task),
            ("Sensitive attribute", f"{self.model.sensitive_attribute}: {', '.join(self.model.groups)}"),
            ("Publisher", data.publisher),
            ("Address", data.address),
            ("Licence", data.licence),
        ]
        if data.options is not None:
            options = (f"{name}: {value}" for name, value in settings_words(data.options).items())
            rows += [("Read with", ", ".join(options) or "no options"), ("Seed of the split", str(data.split_seed))]
        return _stated(rows, why="the records were given from Python" if data.given_from_python else "")

    @property
    def use_rows(self) -> records.Rows:
        """What the model is for, in its owner's words, as pairs of heading and words."""
        use = self.use
        return _stated(
            [("Intended use", use.intended), ("Out of scope", use.out_of_scope), ("Contact", use.contact)], why=""
        )


def card_text(card: Card, *, has_graph: bool, licence: str = "unknown") -> str:
    """Return a model card as Markdown with a YAML head, as model hubs read it from the file README.md.

    ``has_graph``: the model is there as an ONNX graph too. ``licence``: the model's, as an identifier of the hub.
    """
    measured, privacy, said = card.evaluation, card.privacy, card.sentences
    is_image = card.data.kind == "image"
    task = {"type": "image-classification" if is_image else "tabular-classification"}
    gaps = measured.gaps_of("gap") if measured.is_measured else {}
    numbers = {"accuracy": measured.accuracy, "coverage": measured.coverage} if measured.is_measured else {}
    numbers |= {name: gap.value for name, gap in gaps.items()}
    results = [
        {"type": name, "name": GAP_NAMES.get(name, name), "value": round(value, 6)}
        for name, value in numbers.items()
        if math.isfinite(value)
    ]
    head = {
        "library_name": "fairpate",
        "license": licence,
        "pipeline_tag": task["type"],
        "tags": ["differential-privacy", "fairness", card.model.method],
        "model-index": [
            {
                "name": card.data.name,
                "results": [{"task": task, "dataset": {"name": card.data.name, "type": "private"}, "metrics": results}],
            }
        ],
    }

    def plain(words: Any) -> str:  # names come from users, and are no markup
        return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", re.sub(r"[\r\n\t]+", " ", str(words)))

    def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
        head, *body = (f"| {' | '.join(map(plain, row))} |" for row in (columns, *rows))
        return [head, f"|{'-|' * len(columns)}", *body, ""]

    lines = [f"# {plain(card.data.name)}", "", f"**{plain(card.statement.line)}**", "", plain(privacy.meaning), ""]
    lines += [plain(said["description"]), "", "## What is protected", ""]
    protected = [("Protected", privacy.words["protected"] if privacy.protects else "nothing")]
    protected += [("Neighbouring data sets", privacy.relation), ("ε", privacy.words["epsilon"])]
    protected += [("δ", delta_text(privacy.delta)), ("Noise", privacy.words["noise"])]
    protected += [("Touched private records", "; ".join(privacy.events))]
    protected += [("Choice of settings", card.choice_words)]
    lines += table(("", ""), protected)
    if measured.is_measured:
        groups = [
            (each.name, count(each.num_records), percent(each.coverage), percent(each.accuracy))
            for each in measured.groups
        ]
        lines += ["## How groups are treated", "", plain(measured.words["covered"]), ""]
        lines += table(("group", "test records", "answered", "accuracy"), groups)
        lines += table(
            ("gap between groups", "value", "95 % interval"),
            [(GAP_NAMES.get(name, name), records.gap_words(gap), pages.interval(gap)) for name, gap in gaps.items()],
        )
    for title, points in (("May be published", said["publishable"]), ("Limits", said["limits"])):
        lines += [f"## {title}", "", *(f"- {plain(each)}" for each in points), ""]
    lines += ["## Use", "", *table(("", ""), card.use_rows)]
    graph = " `model.onnx` runs without FairPATE; `model.json` says what its input is." if has_graph else ""
    lines += [
        "## Files",
        "",
        f"`student.safetensors` is the model, `card.html` this card with every number.{graph}",
        "",
    ]
    lines += ["To check the guarantee, install FairPATE and verify this folder:", "", "    fairpate verify .", ""]
    yaml_head = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    return f"---\n{yaml_head}---\n\n" + "\n".join(lines)


def _stated(rows: Sequence[tuple[str, str | None]], *, why: str) -> records.Rows:
    """Return the ``rows`` that have a value, and one row that names the others, with the reason ``why`` if known."""
    missing = pages.listed([records.lower(name) for name, value in rows if not value])
    known = [(name, value) for name, value in rows if value]
    unknown = ("Not known", f"{missing}: {why}") if why else ("Not stated", missing)
    return [*known, unknown] if missing else known


def card_page(card: Card) -> str:
    """Return the page of a model card as one HTML document."""
    measured = card.evaluation
    of = f"of “{measured.class_names[-1]}”" if len(measured.class_names) == 2 else "of the class where it is largest"
    return render(
        "card.html",
        card=card,
        sentences=card.sentences,
        statement=card.statement,
        made=pages.made_words(card.model.made_on, card.model.made_by.removeprefix("FairPATE ")),
        gap_names=GAP_NAMES,
        words_of={notion.reading: notion.words for notion in NOTIONS.values()},
        answered=answered_words,
        error_rate_words=f"Of all groups together, {of}, among {answered_words(measured)}.",
        baseline=records.majority_words(measured),
        interval=records.interval_words,
        population=card.private_population,
    )
