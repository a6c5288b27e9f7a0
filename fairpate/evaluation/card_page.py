"""The privacy-and-fairness card of a published student, as records and as one page without scripts.

A card is a function of what was published: the statement of privacy, the student's file, metrics on test records, and
the public entry of the data set. It says what is not stated, undefined or not guaranteed in as many words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairpate.evaluation.metrics import Evaluation
from fairpate.evaluation.page import count, made_words, percent, render
from fairpate.evaluation.private_population import PrivatePopulation, population_words
from fairpate.evaluation.records import Guarantee
from fairpate.evaluation.report import GAP_NAMES, answered_words
from fairpate.evaluation.verdict import (
    interval_words,
    majority_words,
    published_epsilon,
    several_records,
    small_cell_words,
    unit_words,
    verdict,
    why_not_private,
)
from fairpate.fairness.notions import NOTIONS
from fairpate.types import TELLS_SIZE, GateRule

_MOST_NAMED = 11
_ACCOUNTING = {"pld": "privacy loss distributions", "rdp": "Rényi curves"}


@dataclass(frozen=True, kw_only=True)
class CardModel:
    """The published model: how it came about, what goes in, what comes out. ``reject_option`` None answers everything.

    ``sha256`` is that of the published file, ``num_training_labels`` how many released labels it was trained on, where
    that was recorded. ``method_title`` is what people call the method, ``made_on`` the day in ISO 8601.
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
    def records(self) -> str:
        """What the records are."""
        kinds = {"image": "pictures", "tabular": "rows of numbers"}
        return kinds.get(self.kind, f"{self.kind} records") + " that were given from Python" * self.given_from_python


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
    privacy: Guarantee
    data: CardData
    use: IntendedUse
    evaluation: Evaluation
    refusals: CardRefusals | None = None
    private_population: PrivatePopulation | None = None

    @property
    def description(self) -> str:
        """What the model does, in sentences."""
        model, (*others, last) = self.model, self.model.classes
        shown = [*others[:_MOST_NAMED], *(["…"] if len(others) > _MOST_NAMED else [])]
        classes = f"one of {count(len(others) + 1)} classes: {', '.join(shown)} or {last}"
        task = f" Task: {self.data.task}." if self.data.task else ""
        return (
            f"For {self.data.records} like those of {self.data.name} it predicts {classes}.{task} Method: "
            f"{model.method_title or model.method}. Groups: those of {model.sensitive_attribute} "
            f"({', '.join(model.groups)})."
        )

    @property
    def publishable(self) -> list[str]:
        """What may be published with the model."""
        if not self.privacy.protects:
            return ["Nothing: neither the model nor its predictions or metrics are protected."]
        bare = self.privacy.not_protected
        return [
            "The model's file, any number of its predictions at no further cost, and anything computed from them"
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
    def protected(self) -> str:
        """Whose presence or value does not show."""
        if not self.privacy.protects:
            return "nothing"
        among = "in" if self.privacy.unit == "person" else "of"
        if self.privacy.is_attested:
            return f"{unit_words(self.privacy.unit)} behind the votes"
        return f"{unit_words(self.privacy.unit)} {among} the private training records"

    @property
    def _covered(self) -> str:
        if self.privacy.is_attested:
            return f"what the operator calls a {self.privacy.unit}, each behind one vote,"
        whose = {"person": "the persons behind the ", "sensitive attribute": "the sensitive attribute of "}
        return f"{whose.get(self.privacy.unit, 'the ')}private training records"

    @property
    def _alone(self) -> list[str]:
        if not self.privacy.protects:
            return []
        return [
            f"The privacy guarantee is for {self._covered} alone: not for public or test records, and not for people "
            "whom the model is used on."
        ]

    @property
    def limits(self) -> list[str]:
        """What the numbers do not say."""
        privacy = self.privacy
        limits = [
            *privacy.remarks,
            *(f"Degenerate: on the test records the model {words}." for words in self.evaluation.degenerate),
            *(f"On the test records the model {words}." for words in self.evaluation.underserved),
            *(f"Gaps leave out {name}: too few answered test records." for name in self.evaluation.not_measured),
            *filter(None, (small_cell_words(self.evaluation),)),
            *self._alone,
            "The gaps are those of one test set. Other people, or another share of groups, may be treated otherwise."
            if self.evaluation.is_measured
            else f"{self.evaluation.why_unknown.capitalize()}: how accurate the model is, and how it treats groups, is "
            "unknown.",
            "Demographic parity compares rates of predictions; a small gap does not mean that errors fall evenly: each "
            "notion says another thing.",
        ]
        if privacy.tells_size and TELLS_SIZE.get(privacy.unit) not in privacy.remarks:
            units = "persons" if privacy.unit == "person" else "private records"
            limits.append(f"The sampling rate tells the number of {units}, or the one declared: it is public.")
        if not privacy.tuning_accounted:
            limits.append("Choosing the settings was not charged. If private data guided the choice, ε is too low.")
        # To the front: what is not protected outweighs all other limits.
        if privacy.noise != "os_entropy":
            limits.insert(0, f"Noise: {privacy.noise}. This model is not private; ε is what fresh noise would give.")
        if privacy.not_protected is not None:
            limits.insert(0, f"Not protected: {privacy.not_protected}. The model may reveal them.")
        if self.model.reject_option is not None:
            limits.append(
                "What the model refuses depends on its earlier answers; people whom it refuses get no answer."
            )
        return limits


def card_page(card: Card) -> str:
    """The card as one HTML document."""
    return render(
        "card.html",
        card=card,
        privacy=card.privacy,
        why_not=why_not_private(card.privacy),
        verdict=verdict(card.evaluation, card.privacy),
        made=made_words(card.model.made_on, card.model.made_by.removeprefix("FairPATE ")),
        several=several_records(card.privacy),
        epsilon=published_epsilon(card.privacy),
        accounting=_ACCOUNTING.get(card.privacy.accounting, card.privacy.accounting),
        gap_names=GAP_NAMES,
        words_of={notion.reading: notion.words for notion in NOTIONS.values()},
        answered=answered_words,
        error_rate_words=_error_rate_words(card.evaluation),
        baseline=majority_words(card.evaluation),
        interval=interval_words,
        reject_option=_reject_option(card),
        population=card.private_population,
        population_words=card.private_population and population_words(card.private_population),
    )


def _error_rate_words(measured: Evaluation) -> str:
    """Whose errors, and of which class."""
    *_, last = measured.class_names
    of = f"of “{last}”" if len(measured.class_names) == 2 else "of the class where it is largest"
    return f"Of all groups together, {of}, among {answered_words(measured)}."


def _reject_option(card: Card) -> str:
    rule = card.model.reject_option
    if rule is None:
        return "none: every record is answered"
    words = f"margin γ = {rule.max_disparity:g} after {rule.min_count} answers"
    if card.refusals is None:
        return words
    low, high = card.refusals.coverage
    spread = "" if low is None or high is None else f"; coverage {percent(low)} to {percent(high)}"
    return f"{words}{spread} over {count(card.refusals.num_orders)} orders of the test records"
