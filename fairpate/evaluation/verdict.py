"""What the pages of a run say first, in words that are computed from its numbers: a verdict, and four figures.

A guarantee is called private by how often an attacker may guess rightly (:mod:`fairpate.meaning`), a model fair where
the whole interval of its demographic-parity gap lies at or below ``FAIR_GAP``: a convention of these pages, printed
beside the gap. Of a model that refuses more than it answers, and of fewer than ``FEW`` records of a group, it is called
perhaps fair at best: none of n records may still be a share of 3/n (95 %), which is above ``FAIR_GAP`` then. Where too
few records of a group are answered to measure it, the verdict is of the others and names them. Accuracy stands beside
that of the most common class, and beside that of a model without privacy where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from fairpate.evaluation.metrics import Evaluation, GapResult, WithoutPrivacy
from fairpate.evaluation.page import count, counted, decimal, epsilon_text, percent
from fairpate.evaluation.records import Guarantee
from fairpate.meaning import delta_text, meaning, most_often_right, strength
from fairpate.types import Unit

FAIR_GAP = 0.1
FEW = round(3 / FAIR_GAP)
Fairness = Literal["fair", "fair among some", "perhaps fair", "not fair", "unknown", "degenerate"]
Mood = Literal["good", "doubtful", "bad", "none"]

_SEEN = "all that is published"
_PRIVATE = {"bounded": "private", "weak": "weakly private", "void": "private in name only"}
_JOINED: dict[tuple[str, str], str] = {
    ("private", "fair"): "Private and fair",
    ("private", "not fair"): "Private but not fair",
    ("weakly private", "fair"): "Weakly private, but fair",
    ("weakly private", "not fair"): "Weakly private and not fair",
    ("private in name only", "fair"): "Private in name only, but fair",
    ("private in name only", "not fair"): "Private in name only and not fair",
    ("not private", "fair"): "Not private, but fair",
    ("not private", "not fair"): "Neither private nor fair",
}
_UNIT_WORDS: dict[Unit, str] = {
    "record": "one record",
    "person": "everything about one person",
    "sensitive attribute": "one sensitive attribute",
}
_SEVERAL: dict[Unit, str] = {
    "record": "If a person has several records, each is protected by itself.",
    "person": "All records of a person are protected together.",
    "sensitive attribute": "All else about a record is not protected.",
}
_NO_BASELINE = (
    "No model without privacy is known to compare with: the operator may train one (method sgd) on the same data, and "
    "keeps its accuracy, which depends on every private record."
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number with its name, a word for it, and sentences; ``mood`` colours the word."""

    name: str
    value: str
    word: str
    mood: Mood
    details: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One line, what ε means for one unit, and the figures that both rest on."""

    line: str
    meaning: str
    figures: tuple[Figure, ...]


def verdict(measured: Evaluation, guarantee: Guarantee, without_privacy: WithoutPrivacy | None = None) -> Verdict:
    """What the pages of a run open with; ``without_privacy`` is for the operator's page alone."""
    return Verdict(
        line=_line(measured, guarantee, without_privacy),
        meaning=_meaning_words(guarantee),
        figures=(
            _privacy_figure(guarantee),
            _fairness_figure(measured),
            _accuracy_figure(measured, without_privacy),
            _coverage_figure(measured),
        ),
    )


def unit_words(unit: Unit) -> str:
    """What is protected, in words; a unit that the operator declared stands for all that is of it."""
    return _UNIT_WORDS.get(unit, f"everything about one {unit}")


def published_epsilon(guarantee: Guarantee) -> str:
    """Epsilon as it is published, or that there is none."""
    return epsilon_text(guarantee.epsilon) if math.isfinite(guarantee.epsilon) else "none"


def why_not_private(guarantee: Guarantee) -> str:
    """What leaves a model without the guarantee, for one that lacks it."""
    return "No ε is finite" if guarantee.noise == "os_entropy" else f"Its noise: {guarantee.noise}"


def several_records(guarantee: Guarantee) -> str:
    """What holds for somebody to whom several records belong."""
    attested = f"The operator attests that one {guarantee.unit} touches one vote of a query at most."
    return attested if guarantee.is_attested else _SEVERAL[guarantee.unit]


def earlier_words(guarantee: Guarantee) -> str:
    """What this run costs together with earlier releases on the same data; empty where there were none."""
    if not guarantee.earlier_releases:
        return ""
    together = f"Together with {counted(guarantee.earlier_releases, 'earlier release')} of the same private data"
    epsilon, adaptive = guarantee.epsilon_with_earlier, guarantee.epsilon_adaptive_with_earlier
    if epsilon is None or math.isinf(epsilon):
        return f"{together} no ε is finite."
    right = most_often_right(epsilon, guarantee.delta)
    chosen = "no ε is finite" if adaptive is None or math.isinf(adaptive) else f"it is ε = {epsilon_text(adaptive)}"
    return (
        f"{together} it is ε = {epsilon_text(epsilon)}, and a guess is right at most {right} of the time, if all were "
        f"fixed beforehand; if each was chosen in view of the earlier ones, {chosen}."
    )


def majority_words(measured: Evaluation) -> str:
    """The accuracy of a constant on the same records, to stand beside the model's."""
    if measured.majority_class is None:
        return "nothing to compare with"
    return f"always “{measured.majority_class}”, the most common class: {percent(measured.majority_accuracy)}"


def without_privacy_words(found: WithoutPrivacy | None) -> str:
    """The accuracy of a model without privacy, for the operator, or why there is none."""
    if found is None:
        return _NO_BASELINE
    learned = counted(found.num_records, "private record")
    return f"A logistic model without privacy that learned from {learned}: {percent(found.accuracy)}."


def interval_words(gap: GapResult) -> str:
    """The interval of a gap with its level."""
    if math.isnan(gap.low):
        return "interval undefined"
    return f"{gap.low:.3f} to {gap.high:.3f} ({percent(gap.level, digits=0)})"


def fairness_of(measured: Evaluation) -> Fairness:
    """What the demographic-parity gap on test records says."""
    gap = measured.measured("demographic_parity")
    if measured.degenerate:
        return "degenerate"
    if math.isnan(gap.value) or math.isnan(gap.high):
        return "unknown"
    if gap.low > FAIR_GAP:
        return "not fair"
    if gap.high > FAIR_GAP or _too_few(measured, gap):
        return "perhaps fair"
    return "fair among some" if measured.not_measured else "fair"


def small_cell_words(measured: Evaluation) -> str:
    """What is not shown because it rests on too few test records; empty where all is shown."""
    if None not in measured.confusion_GYC:
        return ""
    counts = "of the other groups alone" if any(measured.confusion_GYC) else "of no group"
    return (
        f"Cells of fewer than {measured.least_cell} test records are not shown, nor totals that would tell of them: "
        f"counts by true label are shown {counts}."
    )


def _too_few(measured: Evaluation, gap: GapResult) -> str:
    """Why a small gap does not make a model fair yet; empty where nothing does."""
    if measured.coverage < 0.5:
        return f"It is of the {percent(measured.coverage)} of the test records that the model answers."
    if gap.min_cell_size < FEW:
        return f"Fewer than {FEW} records of a group cannot tell so small a gap."
    return ""


def _privacy_word(guarantee: Guarantee) -> str:
    return _PRIVATE[strength(guarantee.epsilon, guarantee.delta)] if guarantee.protects else "not private"


def _line(measured: Evaluation, guarantee: Guarantee, without_privacy: WithoutPrivacy | None) -> str:
    private, fair = _privacy_word(guarantee), fairness_of(measured)
    alone = " (the sensitive attribute alone)" if guarantee.protects and guarantee.not_protected else ""
    begin = f"{private[0].upper()}{private[1:]}{alone}"
    if not measured.is_measured:
        return f"{begin}; how accurate and how fair is unknown: {measured.why_unknown}."
    if fair == "degenerate":
        return f"{begin}, but degenerate: on the test records it {'; it '.join(measured.degenerate)}."
    accuracy = f"at {_accuracy_word(measured, without_privacy)}{_answered_words(measured)}"
    if measured.not_measured:
        return f"{begin}, {accuracy}; {_fair_words(measured, fair)}."
    perfect = ""
    if fair == "not fair" and measured.perfect_gap >= FAIR_GAP:
        perfect = " A model that is always right would not be called fair here either."
    joined = _JOINED.get((private, fair))
    if joined is None:
        joined = f"{begin}, {_fair_words(measured, fair)}"
    elif alone:
        joined = joined.replace(private[1:], f"{private[1:]}{alone}", 1)
    return f"{joined}, {accuracy}.{perfect}"


def _fair_words(measured: Evaluation, fair: Fairness) -> str:
    """The word, and among whom where not all groups are measured."""
    if fair == "unknown":
        return (
            "fairness undefined"
            if not measured.not_measured
            else f"fairness not known for {_listed(measured.not_measured)}"
        )
    if not measured.not_measured:
        return fair
    word = "fair" if fair == "fair among some" else fair
    return f"{word} among {_listed(measured.known_groups)}; not known for {_listed(measured.not_measured)}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _answered_words(measured: Evaluation) -> str:
    """What gap and accuracy are of, where the model refuses some: a model that refuses most may seem fair and right."""
    return "" if measured.coverage == 1 else f", on the {percent(measured.coverage)} that it answers"


def _accuracy_word(measured: Evaluation, without_privacy: WithoutPrivacy | None) -> str:
    """How far the accuracy lies from the best that it may be compared with."""
    if math.isnan(measured.accuracy):
        return "an accuracy that is not shown"
    if without_privacy is None or without_privacy.accuracy < measured.majority_accuracy:
        if measured.majority_class is None:
            return f"{percent(measured.accuracy)} accuracy"
        return _apart(measured.accuracy, measured.majority_accuracy, "the most common class")
    # The model had public records too.
    is_surpassed = measured.accuracy > without_privacy.accuracy
    learned = f" that learned from {counted(without_privacy.num_records, 'private record')}" if is_surpassed else ""
    return _apart(measured.accuracy, without_privacy.accuracy, f"a logistic model without privacy{learned}")


def _apart(accuracy: float, other: float, whose: str) -> str:
    """From the numbers as they are printed."""
    points = Decimal(f"{100 * accuracy:.1f}") - Decimal(f"{100 * other:.1f}")
    if not points:
        return f"the accuracy of {whose}"
    return f"{abs(points)} points of accuracy {'above' if points > 0 else 'below'} {whose}"


def _privacy_figure(guarantee: Guarantee) -> Figure:
    word = _privacy_word(guarantee)
    moods: dict[str, Mood] = {"private": "good", "weakly private": "doubtful"}
    return Figure(
        name="Privacy budget ε",
        value=published_epsilon(guarantee),
        word=_upper(word),
        mood=moods.get(word, "bad"),
        details=_privacy_details(guarantee),
    )


def _privacy_details(guarantee: Guarantee) -> tuple[str, ...]:
    """What is held, and for whom; of a run that is not private, that."""
    held = f"{unit_words(guarantee.unit)}, {guarantee.relation}, δ = {delta_text(guarantee.delta)}."
    if guarantee.protects:
        return tuple(filter(None, (_upper(held), several_records(guarantee), earlier_words(guarantee))))
    fresh = (f"With fresh noise ε would hold for {held}",) if math.isfinite(guarantee.epsilon) else ()
    return ("Nothing is protected.", *fresh)


def _meaning_words(guarantee: Guarantee) -> str:
    """The sentence for one unit; of a run whose noise is not private, what fresh noise would do."""
    said = meaning(guarantee.epsilon, guarantee.delta, unit=guarantee.unit, relation=guarantee.relation, seen=_SEEN)
    if guarantee.protects or math.isinf(guarantee.epsilon):
        return said
    return f"{why_not_private(guarantee)}. Nothing is bounded. With fresh noise: {said[0].lower()}{said[1:]}"


def _fairness_figure(measured: Evaluation) -> Figure:
    gap, fair = measured.measured("demographic_parity"), fairness_of(measured)
    moods: dict[Fairness, Mood] = {
        "fair": "good",
        "fair among some": "doubtful",
        "perhaps fair": "doubtful",
        "unknown": "none",
    }
    words = {"unknown": "Undefined" if measured.is_measured else "Unknown", "degenerate": "Says nothing"}
    return Figure(
        name="Demographic-parity gap",
        value=decimal(gap.value) if measured.is_measured else "unknown",
        word=words.get(fair, _upper(_fair_words(measured, fair))),
        mood=moods.get(fair, "bad"),
        details=_fairness_details(measured, gap, fair),
    )


def _fairness_details(measured: Evaluation, gap: GapResult, fair: Fairness) -> tuple[str, ...]:
    if not measured.is_measured:
        return (f"{_upper(measured.why_unknown)}.",)
    if fair == "degenerate":
        return (f"The model {'; it '.join(measured.degenerate)}: a small gap is no merit then.",)
    unknown = f"Too few answered test records of {_listed(measured.not_measured)}." if measured.not_measured else ""
    if fair == "unknown":
        return tuple(filter(None, ("No two groups can be compared.", unknown)))
    lies = {"not fair": "lies above"}.get(fair, "lies on both sides of" if gap.high > FAIR_GAP else "lies at or below")
    few = () if fair == "not fair" else filter(None, (_too_few(measured, gap),))
    left_out = f"; {counted(gap.n_undefined, 'empty cell')} left out" if gap.n_undefined else ""
    return (
        f"The share of one prediction differs by so much between one group and all others ({gap.where}).",
        f"Its interval, {interval_words(gap)}, {lies} {FAIR_GAP:.2f}, up to which these pages call a model fair.",
        *few,
        *_perfect_words(measured),
        *filter(None, (unknown,)),
        f"Smallest cell: {count(gap.min_cell_size)}{left_out}.",
    )


def _perfect_words(measured: Evaluation) -> tuple[str, ...]:
    """The gap of a model that is always right, where it is known."""
    gap = measured.perfect_gap
    if math.isnan(gap):
        return ()
    of = f"of {gap:.3f}" if any(measured.confusion_GYC) else f"of {gap:.1f} or more" if gap else "below 0.1"
    return (
        f"A model that is always right would have a gap {of} here, that of the true labels, and an equalized-odds gap "
        "of 0.",
    )


def _accuracy_figure(measured: Evaluation, without_privacy: WithoutPrivacy | None) -> Figure:
    if not measured.is_measured:
        return Figure(
            name="Accuracy", value="unknown", word="Unknown", mood="none", details=(f"{_upper(measured.why_unknown)}.",)
        )
    if not measured.num_answered:
        return Figure(
            name="Accuracy", value="undefined", word="Undefined", mood="bad", details=("No test record is answered.",)
        )
    better = not (measured.accuracy <= measured.majority_accuracy or measured.degenerate)
    return Figure(
        name="Accuracy",
        value=percent(measured.accuracy),
        word=_upper(_accuracy_word(measured, without_privacy)),
        mood="none" if better else "bad",
        details=(
            f"On {counted(measured.num_answered, 'answered test record')}.",
            f"{_upper(majority_words(measured))}.",
            *(f"The model {words}." for words in measured.underserved),
            without_privacy_words(without_privacy),
        ),
    )


def _coverage_figure(measured: Evaluation) -> Figure:
    if not measured.is_measured:
        return Figure(
            name="Coverage", value="unknown", word="Unknown", mood="none", details=(f"{_upper(measured.why_unknown)}.",)
        )
    word = (
        "Answers everything" if measured.coverage == 1 else "Refuses some" if measured.num_answered else "Refuses all"
    )
    return Figure(
        name="Coverage",
        value=percent(measured.coverage),
        word=word,
        mood="none" if measured.num_answered else "bad",
        details=(f"Of {counted(measured.num_records, 'test record')}.",),
    )


def _upper(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}"
