"""The privacy-and-fairness card of a published student, as records and as one page without scripts.

A card is a function of what was published: the statement of privacy, the student's file, metrics on test records, and
the public entry of the data set. It says what is not stated, undefined or not guaranteed in as many words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fairpate.evaluation.metrics import Evaluation, GapResult
from fairpate.evaluation.page import (
    card,
    cards,
    count,
    counted,
    decimal,
    delta_text,
    epsilon_text,
    page,
    percent,
    resource,
    section,
    table,
)
from fairpate.evaluation.public_page import GAP_NAMES, degenerate_banner, majority_words
from fairpate.types import TELLS_SIZE, GateRule, Relation, Unit

_NOT_STATED = "not stated by the publisher"
_UNKNOWN = "not known: the records were given from Python"


@dataclass(frozen=True, kw_only=True)
class CardModel:
    """The published model: how it came about, what goes in, what comes out. ``reject_option`` None answers everything.

    ``sha256`` is that of the published file, ``num_training_labels`` how many released labels it was trained on, where
    that was recorded.
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


@dataclass(frozen=True, kw_only=True)
class CardPrivacy:
    """The published guarantee; ``epsilon`` is inf where there is none, ``events`` say what touched private records.

    ``noise`` is ``os_entropy``, or says why nothing is private. ``not_protected`` is what the model may reveal without
    noise, ``remarks`` qualify the guarantee, ``tells_size`` says that an event tells the number of private records.
    """

    unit: Unit
    relation: Relation
    epsilon: float
    delta: float
    accounting: str
    noise: str
    tuning_accounted: bool
    events: Sequence[str]
    epsilon_sanitised: float | None = None
    not_protected: str | None = None
    remarks: Sequence[str] = ()
    tells_size: bool = False

    @property
    def protects(self) -> bool:
        """Whether the promise holds of the published file."""
        return math.isfinite(self.epsilon) and self.noise == "os_entropy"


@dataclass(frozen=True, kw_only=True)
class CardData:
    """The data set as its publisher describes it, and the options it was read with.

    One that was ``given_from_python`` has a name and a kind; nothing else is known of it.
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

    @property
    def words(self) -> str:
        """What the records are, for a sentence."""
        return f"for this task: {self.task}" if self.task else f"of {self.kind} records that were given from Python"


@dataclass(frozen=True, kw_only=True)
class IntendedUse:
    """In the publisher's words; None is shown as not stated."""

    intended: str | None = None
    out_of_scope: str | None = None
    contact: str | None = None


@dataclass(frozen=True, kw_only=True)
class CardRefusals:
    """A student that may refuse: lowest and highest figures over orders of the test records, and it unrefused."""

    num_orders: int
    accuracy: tuple[float | None, float | None]
    coverage: tuple[float | None, float | None]
    unrefused: Evaluation | None = None


@dataclass(frozen=True, kw_only=True)
class Card:
    """Everything that a card says."""

    model: CardModel
    privacy: CardPrivacy
    data: CardData
    use: IntendedUse
    evaluation: Evaluation
    refusals: CardRefusals | None = None

    @property
    def publishable(self) -> list[str]:
        """What may be published with the model."""
        bare = self.privacy.not_protected
        return [
            "The model's file, its predictions, and anything computed from them"
            + (f", if these may be public too: {bare}." if bare else "."),
            "Epsilon, delta, unit and relation as stated here, always together.",
            "The metrics of this card, if the test records' owner agrees: they are outside the guarantee.",
        ]

    @property
    def not_publishable(self) -> list[str]:
        """What must stay with the operator."""
        return [
            "The private records, models that were trained on them without noise, and their votes.",
            "Any price that was computed from votes, and any ledger: both depend on private values.",
            "Counts or statistics of the private records that were not released with noise"
            + (", but for the number that a sampling rate tells." if self.privacy.tells_size else "."),
        ]

    @property
    def _attribute(self) -> str:
        return f"the {self.privacy.unit} of private training records"

    @property
    def limits(self) -> list[str]:
        """What the numbers do not say."""
        privacy = self.privacy
        covered = "the private training records" if privacy.unit == "record" else self._attribute
        limits = [
            *privacy.remarks,
            *(f"Degenerate: on the test records the model {words}." for words in self.evaluation.degenerate),
            f"The privacy guarantee is for {covered} alone: not for public or test records, and not for people whom "
            "the model is used on.",
            "The gaps are those of one test set. Other people, or another share of groups, may be treated otherwise.",
            "Demographic parity compares rates of predictions; a small gap does not mean that errors fall evenly.",
        ]
        if privacy.tells_size and TELLS_SIZE not in privacy.remarks:
            limits.append("The sampling rate tells the number of private records, or the one declared: it is public.")
        if not privacy.tuning_accounted:
            limits.append("Choosing the settings was not charged. If private data guided the choice, ε is too low.")
        if privacy.noise != "os_entropy":
            limits.insert(0, f"Noise: {privacy.noise}. This model is not private; ε is what fresh noise would give.")
        if privacy.not_protected is not None:
            limits.insert(0, f"Not protected: {privacy.not_protected}. The model may reveal them.")
        if self.model.reject_option is not None:
            limits.append(
                "What the model refuses depends on its earlier answers; people whom it refuses get no answer."
            )
        return limits


def card_page(content: Card) -> str:
    """The card as one HTML document."""
    body = (
        _banner(content)
        + degenerate_banner(content.evaluation)
        + _opening(content)
        + _privacy(content)
        + _groups(content.evaluation)
        + _model_and_data(content)
        + _use(content)
        + f"<footer>Made by {escape(content.model.made_by)}. ε is rounded up; undefined numbers are called undefined, "
        "never 0.</footer>"
    )
    return page(title=f"{content.data.name} · privacy-and-fairness card", body=body, style=resource("card.css"))


def _banner(content: Card) -> str:
    if content.privacy.protects:
        return ""
    return (
        '<div class="banner warn" role="note"><b>This model is not private.</b>'
        f"{escape(_why_not(content.privacy))}.</div>"
    )


def _why_not(privacy: CardPrivacy) -> str:
    return "No ε is finite" if privacy.noise == "os_entropy" else f"Its noise: {privacy.noise}"


def _opening(content: Card) -> str:
    measured, privacy = content.evaluation, content.privacy
    gap = measured.gaps["dp_one_vs_rest"]
    figures = [
        (
            "Privacy budget ε",
            _epsilon(privacy),
            f"at δ = {delta_text(privacy.delta)}; {privacy.relation}: {privacy.unit}",
        ),
        ("Demographic-parity gap", decimal(gap.value), _interval(gap)),
        (
            "Accuracy",
            percent(measured.accuracy),
            f"on {counted(measured.num_answered, 'answered test record')}; {majority_words(measured)}",
        ),
        ("Coverage", percent(measured.coverage), f"of {count(measured.num_records)} test records"),
    ]
    cells = "".join(
        f'<div><dt>{escape(name)}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="detail">{escape(detail)}</dd></div>'
        for name, value, detail in figures
    )
    return (
        f'<header><p class="kicker">Privacy-and-fairness card</p><h1>{escape(content.data.name)}</h1>'
        f'<p class="outcome">A model by <b>{escape(content.model.method)}</b> {escape(content.data.words)}. How the '
        "records it learned from are protected, and how it treats "
        f'groups by {escape(content.model.sensitive_attribute)}.</p><dl class="figures">{cells}</dl></header>\n'
    )


def _privacy(content: Card) -> str:
    privacy = content.privacy
    rows = [
        ("Protected", f"one {privacy.unit} of the private training records"),
        ("Neighbouring data sets", privacy.relation),
        ("ε", _epsilon(privacy)),
        ("δ", delta_text(privacy.delta)),
        (
            "Accounting",
            {"pld": "privacy loss distributions", "rdp": "Rényi curves"}.get(privacy.accounting, privacy.accounting),
        ),
        ("Noise", "from operating-system entropy" if privacy.noise == "os_entropy" else privacy.noise),
        ("Touched private records", "; ".join(privacy.events)),
        ("Choice of settings", "part of ε" if privacy.tuning_accounted else "not part of ε"),
    ]
    if privacy.not_protected is not None:
        rows.insert(1, ("Not protected", privacy.not_protected))
    if privacy.epsilon_sanitised is not None:
        rows.append(("ε of these votes, released with noise", epsilon_text(privacy.epsilon_sanitised)))
    return section(
        "What is protected",
        "The promise belongs to all of these together; epsilon alone says little.",
        cards(
            card("The promise", "", _pairs(rows)),
            card("May be published", "", _bullets(content.publishable)),
            card("Stays with the operator", "", _bullets(content.not_publishable)),
            card("Limits", "", _bullets(content.limits)),
        ),
    )


def _groups(measured: Evaluation) -> str:
    by_group = table(
        ["group", "test records", "coverage", "accuracy", *(f"predicted {name}" for name in measured.class_names)],
        [
            [
                escape(group.name),
                count(group.num_records),
                percent(group.coverage),
                percent(group.accuracy),
                *(percent(rate) for rate in rates),
            ]
            for group, rates in zip(measured.groups, measured.rates_GC, strict=True)
        ],
    )
    gaps = table(
        ["gap", "value", "interval", "smallest cell", "largest for"],
        [
            [
                escape(GAP_NAMES.get(name, name)),
                f"<b>{decimal(gap.value)}</b>",
                _interval(gap),
                count(gap.min_cell_size),
                escape(gap.where),
            ]
            for name, gap in measured.gaps.items()
        ],
    )
    return section(
        "How groups are treated",
        "Measured on test records with their true labels and groups; outside the privacy guarantee.",
        cards(
            card("Gaps, with bootstrap intervals", "0 is equal treatment in the sense of the row.", gaps, wide=True),
            card(
                "By group",
                f"Over answered records ({majority_words(measured)}); coverage is the share that got an answer.",
                by_group,
                wide=True,
            ),
        ),
    )


def _model_and_data(content: Card) -> str:
    model, data = content.model, content.data
    about_model = [
        ("Method", model.method),
        ("Architecture", model.architecture),
        ("Input", " × ".join(map(str, model.input_shape))),
        ("Classes", ", ".join(model.classes)),
        ("Reject option", _reject_option(content)),
        ("sha256 of the file", model.sha256),
    ]
    if model.num_training_labels is not None:
        about_model.insert(1, ("Trained on", counted(model.num_training_labels, "released label")))
    about_data = [
        ("Name", data.name),
        ("Task", data.task or _UNKNOWN),
        ("Sensitive attribute", f"{model.sensitive_attribute}: {', '.join(model.groups)}"),
        ("Publisher", data.publisher or _UNKNOWN),
        ("Address", data.address or _UNKNOWN),
        ("Licence", data.licence or _UNKNOWN),
    ]
    if data.options is not None:
        about_data += [
            ("Read with", ", ".join(f"{name}: {value}" for name, value in data.options.items()) or "no options"),
            ("Seed of the split", str(data.split_seed)),
        ]
    return section(
        "Model and data", "", cards(card("Model", "", _pairs(about_model)), card("Data", "", _pairs(about_data)))
    )


def _reject_option(content: Card) -> str:
    rule = content.model.reject_option
    if rule is None:
        return "none: every record is answered"
    words = f"margin γ = {rule.max_disparity:g} after {rule.min_count} answers"
    if content.refusals is None:
        return words
    low, high = content.refusals.coverage
    spread = "" if low is None or high is None else f"; coverage {percent(low)} to {percent(high)}"
    return f"{words}{spread} over {count(content.refusals.num_orders)} orders of the test records"


def _use(content: Card) -> str:
    use = content.use
    rows = [
        ("Intended use", use.intended or _NOT_STATED),
        ("Out of scope", use.out_of_scope or _NOT_STATED),
        ("Contact", use.contact or _NOT_STATED),
    ]
    return section("Use", "", cards(card("As its publisher says", "", _pairs(rows), wide=True)))


def _epsilon(privacy: CardPrivacy) -> str:
    return epsilon_text(privacy.epsilon) if math.isfinite(privacy.epsilon) else "none"


def _interval(gap: GapResult) -> str:
    if math.isnan(gap.low):
        return "interval undefined"
    return f"{gap.low:.3f} to {gap.high:.3f} ({percent(gap.level, digits=0)})"


def _pairs(rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(
        f'<tr><th scope=row>{escape(name)}</th><td class="words">{escape(value)}</td></tr>' for name, value in rows
    )
    return f'<table class="facts"><tbody>{body}</tbody></table>'


def _bullets(items: Sequence[str]) -> str:
    return f'<ul class="points">{"".join(f"<li>{escape(item)}</li>" for item in items)}</ul>'
