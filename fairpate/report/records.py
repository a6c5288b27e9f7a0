"""Claims about a published model: its guarantee and its measurements, and the words for both on all pages.

A :class:`RunStatement` joins the privacy guarantee of a run with the evaluation on test records. Report, card, private
report, terminal and notebook use its sentences, figures and rows, so that no other module decides a verdict.

A guarantee is called private according to how often an attacker can guess rightly (:mod:`fairpate.pages`). A model is
called fair if the whole interval of a gap lies at or below the user's limit (``evaluation.fair_at``; by default a
demographic-parity gap of .1). A model that refuses more than it answers, or was measured on too few records of a group,
is called perhaps fair at best. Groups with too few answered records, or with an undefined comparison, such as that of a
true class which the group lacks, are named and left out of the verdict; among fewer than two other groups fairness is
undefined. :func:`verdict` is this rule; the page of a comparison judges by it too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np

from fairpate import pages, types
from fairpate.config import read_yaml
from fairpate.fairness import rates
from fairpate.pages import counted, decimal, delta_text, epsilon_text, interval, listed, percent
from fairpate.report.answers import AnswerGuarantee
from fairpate.report.decision import Choice, Decision
from fairpate.report.metrics import LEAST_ANSWERED, TOO_FEW, Evaluation, GapResult, GroupResult, WithoutPrivacy
from fairpate.report.population import PrivatePopulation
from fairpate.report.reject_option import RejectOptionSpread
from fairpate.types import FairRule, GateRule, PrivacyStatement, QueryOutcomes, Relation, Unit

Verdict = Literal["fair", "perhaps fair", "not fair", "unknown"]
Fairness = Literal[Verdict, "fair among some", "degenerate"]
Mood = Literal["good", "doubtful", "bad", "none"]
Rows = list[tuple[str, str]]

WORDS = read_yaml(Path(__file__).with_name("words.yaml"))
FAIR_IN_ANSWERS = "fair in its answers"
"""The best verdict on a model that refuses some: a small gap among answers says nothing about those who get none."""
STRENGTHS: Mapping[str, tuple[str, Mood]] = {name: tuple(words) for name, words in WORDS["strengths"].items()}


class GuaranteeWords(TypedDict):
    """The words with which all pages describe a guarantee.

    ``epsilon``: epsilon as text. ``noise``: the source of the noise, or why it is not private. ``why_not_private``: the
    reason why the model is not private; without meaning for a private one. ``protected``: what is protected, in terms
    of the privacy unit. ``several_records``: a sentence on persons with several records. ``attested``: what the
    operator vouches for, empty unless the operator declared the privacy unit. ``uncharged_tuning``: a warning that
    epsilon does not cover the choice of settings, empty if it does. ``with_earlier``: a sentence on epsilon together
    with earlier releases of the same data, empty if there were none.
    """

    epsilon: str
    noise: str
    why_not_private: str
    protected: str
    several_records: str
    attested: str
    with_earlier: str
    uncharged_tuning: str


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """The published guarantee of a run, with an infinite epsilon if nothing is guaranteed.

    ``events``: the privacy events, in words. ``noise``: ``os_entropy``, or the reason why nothing is private.
    ``not_protected``: what the model may reveal without noise. ``remarks`` qualify the guarantee. ``tells_size``: the
    guarantee reveals the number of private records. ``epsilon_with_earlier``: the epsilon of this release together with
    ``earlier_releases`` earlier ones of the same private data, if all were fixed beforehand;
    ``epsilon_adaptive_with_earlier``: the least limit of a privacy filter that admits all of them if each was chosen
    after seeing the earlier ones. These two are None if not finite. ``declared_units``: the public number of protected
    units, None if there is none.
    """

    unit: Unit
    relation: Relation
    epsilon: float
    delta: float
    accounting: str
    noise: str
    tuning_accounted: bool
    events: Sequence[str]
    parts: Sequence[str] = ()
    not_protected: str | None = None
    remarks: Sequence[str] = ()
    tells_size: bool = False
    earlier_releases: int = 0
    epsilon_with_earlier: float | None = None
    epsilon_adaptive_with_earlier: float | None = None
    declared_units: int | None = None

    @classmethod
    def of(cls, statement: PrivacyStatement) -> Guarantee:
        """Return the guarantee that a published privacy statement makes, with its events in words."""
        queries, events = statement.queries, statement.events
        touched = described_events(events, statement.part_events)
        # For queries their number is worded, not the parameters of the mechanism, which are in the events.
        if queries is not None:
            # The table that sets a student's thresholds is released beside the answers.
            tables = [event for event in events if str(event["noun"]).startswith("noisy table")]
            samples = f"the nearest records of Poisson samples{' of persons' * (statement.unit == 'person')}"
            voters = samples if any("sampling_rate" in event for event in events if event not in tables) else "teachers"
            asked = f"{queries.submitted} queries to {voters}, every one priced at its worst case"
            touched = [asked, *described_events(tables, statement.part_events)]
        same = ("unit", "relation", "delta", "accounting", "noise", "tuning_accounted", "not_protected", "remarks")
        others = ("epsilon_with_earlier", "epsilon_adaptive_with_earlier", "declared_units")
        return cls(
            **{name: getattr(statement, name) for name in (*same, *others)},
            epsilon=math.inf if statement.epsilon is None else statement.epsilon,
            events=touched,
            parts=tuple(statement.part_events),
            # The rate at which neighbours are sampled is configured; it does not depend on the number of records.
            tells_size=queries is None and any(event.get("sampling_rate", 1) < 1 for event in events),
            earlier_releases=statement.earlier_releases or 0,
        )

    @property
    def protects(self) -> bool:
        """True if the published output has a privacy guarantee: epsilon is finite and the noise is not seeded."""
        return math.isfinite(self.epsilon) and self.noise == "os_entropy"

    @property
    def strength(self) -> tuple[str, Mood]:
        """A word for how strong the guarantee is, and the mood (good or bad news) that decides the word's colour."""
        if not self.protects:
            return "not private", "bad"
        # However small epsilon is, a large delta lets records be published.
        if pages.is_void_delta(self.delta, self.declared_units):
            return STRENGTHS["void"]
        found = pages.strength(self.epsilon, self.delta)
        return STRENGTHS["weak" if found == "bounded" and self.declared_units and self.delta_caution else found]

    @property
    def delta_caution(self) -> str:
        """A caution that delta is too large for the number of protected units; empty for a small delta, and if nothing
        is guaranteed."""
        is_finite = math.isfinite(self.epsilon)
        return pages.delta_caution(self.delta, self.declared_units, self.unit) if is_finite else ""

    @property
    def words(self) -> GuaranteeWords:
        """The words with which all pages describe this guarantee."""
        # A unit that the operator declared means everything that belongs to it.
        attested = f"The operator attests that one {self.unit} touches one vote of a query at most."
        protected, several = WORDS["units"].get(self.unit, (f"everything about one {self.unit}", attested))
        tuning = "ε does not cover the choice of settings: if private data guided it, the true ε is higher."
        is_private_noise, earlier = self.noise == "os_entropy", ""
        if self.earlier_releases:
            earlier = f"Together with {counted(self.earlier_releases, 'earlier release')} of the same private data"
            epsilon, adaptive = (
                None if each is None or math.isinf(each) else each
                for each in (self.epsilon_with_earlier, self.epsilon_adaptive_with_earlier)
            )
            if epsilon is None:
                earlier += " no ε is finite."
            else:
                chosen = "no ε is finite" if adaptive is None else f"it is ε = {epsilon_text(adaptive)}"
                earlier += (
                    f" it is ε = {epsilon_text(epsilon)}, and a guess is right at most "
                    f"{pages.most_often_right(epsilon, self.delta)} of the time, if all were planned before the first; "
                    f"if later ones depended on earlier ones, {chosen}."
                )
        return {
            "epsilon": epsilon_text(self.epsilon) if math.isfinite(self.epsilon) else "none",
            "noise": "fresh, from the operating system" if is_private_noise else self.noise.replace(": ", ", "),
            "why_not_private": "No ε is finite" if is_private_noise else f"Its noise: {self.noise}",
            "protected": protected,
            "several_records": several,
            "attested": "" if self.unit in types.UNITS else attested,
            "with_earlier": earlier,
            "uncharged_tuning": "" if self.tuning_accounted else tuning,
        }

    @property
    def limits(self) -> list[str]:
        """Sentences that qualify the guarantee. What is not protected is stated first, because it matters most."""
        limits = [remark for remark in self.remarks if remark != types.REMARKS["in_parallel"]]  # it extends the claim
        if self.noise != "os_entropy":
            limits.insert(0, f"Noise: {self.noise}. This model is not private; ε is what fresh noise would give.")
        if self.not_protected is not None:
            limits.insert(0, f"Not protected: {self.not_protected}. The model may reveal them.")
        return limits

    @property
    def meaning(self) -> str:
        """Sentences on how much an attacker can learn about one privacy unit. If the noise is not private, they state
        the bound that fresh noise would give."""
        # Exact metrics are published too; no guarantee covers what they reveal about test records.
        seen = pages.SEEN["test" in self.parts]
        bound = pages.meaning(self.epsilon, self.delta, unit=self.unit, relation=self.relation, seen=seen)
        if self.protects or math.isinf(self.epsilon):
            return bound
        return f"{self.words['why_not_private']}. Nothing is bounded. With fresh noise: {lower(bound)}"

    @property
    def row(self) -> tuple[str, str]:
        """The guarantee as a pair of heading and sentence, which a terminal or a notebook shows in one line."""
        words = self.words
        if not math.isfinite(self.epsilon):
            return "epsilon", f"none: no guarantee ({words['noise']})"
        at = f"{words['epsilon']} at delta {delta_text(self.delta)}, per {self.unit}, {self.relation}"
        return "epsilon", f"{at} ({self.accounting}; noise: {words['noise']})"


def described_events(
    events: Sequence[Mapping[str, Any]], part_events: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[str]:
    """Return a line of words for each privacy event in a privacy statement; ``part_events``: the events on test or
    validation records."""
    parts = [(part, event) for part, of_part in part_events.items() for event in of_part]
    return [
        *map(described_event, events),
        *(f"of {part} records alone: {described_event(event)}" for part, event in parts),
    ]


def described_event(event: Mapping[str, Any]) -> str:
    """Return a line of words for one privacy event in a privacy statement."""

    def shown(name: str, value: float) -> str:
        if name in ("epsilon", "delta"):  # a bound
            return pages.at_most(value)
        # Four digits would show a large count in scientific notation.
        return f"{value:,.0f}" if 1e4 <= abs(value) < math.inf else f"{value:.4g}"

    # Noise over the most that one unit adds is what decides the cost; either of the two alone says nothing.
    left_out, noise = {"count"}, list[str]()
    for spread, reach in (("noise_stddev_votes", "norm"), ("noise_stddev_records", "weight")):
        if spread in event and reach in event:
            ratio = event[spread] / (event[reach] if spread == "noise_stddev_votes" else 1)
            noise.append(f"noise {ratio:.3g} times the most that one {event.get('unit', 'record')} adds")
            left_out |= {spread, reach}
    if event.get("sampling_rate") == 1:  # every record is read
        left_out.add("sampling_rate")
    others = [
        f"{name.replace('_', ' ')} {shown(name, value)}"
        for name, value in event.items()
        if isinstance(value, int | float) and name not in left_out
    ]
    numbers = ", ".join([*noise, *others])
    # The first word gets the plural: 2 tables of votes.
    head, *of = str(event["noun"]).partition(" of ")
    number = event.get("count", 1)
    samples = "over Poisson samples" if event.get("sampling_rate", 1) < 1 else ""
    each = "each: " if number > 1 else ""
    trials = " or ".join(", ".join(map(described_event, events)) for events in event.get("trials", ()))
    words = (counted(number, head) + "".join(of), samples, f"({each}{numbers})" if numbers else "")
    return " ".join(filter(None, (*words, trials and f"of {trials}")))


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number that supports the verdict on a model: its ``name`` and ``value``, a ``word`` that judges it, and
    further sentences (``details``).

    ``mood`` sets the colour of the word.
    """

    name: str
    value: str
    word: str
    mood: Mood
    details: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MeasuredClaims:
    """The claims about one model that rest on measurements. ``without_privacy`` is a baseline trained without noise,
    which must not be published. ``answers``: what is guaranteed about the errors of a model that answers only where it
    is confident enough; None for any other model. ``has_reject_option``: the model may also refuse by IDP3."""

    measured: Evaluation
    without_privacy: WithoutPrivacy | None = None
    answers: AnswerGuarantee | None = None
    has_reject_option: bool = False

    @property
    def before_refusals(self) -> bool:
        """True if the measurements are of all predictions of a model that refuses some, as private metrics are, and not
        of its answers alone."""
        return self.measured.metrics == "private" and (self.has_reject_option or self.answers is not None)

    @property
    def no_baseline(self) -> str:
        """The reason for which a page shows no baseline without privacy, as a sentence; empty if nobody expects one."""
        return ""

    @property
    def fairness(self) -> Fairness:
        """The verdict on fairness by the user's definition, from the confidence interval of a gap on test records."""
        # First, because the gap of a degenerate model is small for that reason alone.
        if self.measured.degenerate:
            return "degenerate"
        gap, rule = self.measured.judged, self.measured.fair_at
        found = verdict(low=gap.low, high=gap.high, fair_from=self.measured.fair_from(rule.notion), limit=rule.limit)
        if found in ("unknown", "not fair"):
            return found
        # A small gap of some comparisons says nothing about the others.
        is_rate = rates.NOTIONS[rule.notion].bounds_rate
        if gap.left_out and (is_rate or len(self.measured.groups) - len(self.unknown_groups) < 2):
            return "unknown"
        return "fair among some" if found == "fair" and self.unknown_groups else found

    @property
    def unknown_groups(self) -> tuple[str, ...]:
        """The groups that the verdict on fairness does not cover: they have too few answered records, or some
        comparison that it rests on is undefined for them."""
        measured, rule = self.measured, self.measured.fair_at
        left_out = () if rates.NOTIONS[rule.notion].bounds_rate else measured.judged.left_out
        return tuple(each.name for each in measured.groups if each.name in {*measured.not_measured, *left_out})

    @property
    def answers_nothing(self) -> bool:
        """True if the model answers no record: of those it was measured on, or for want of a bound on its errors."""
        if self.answers is not None and len(self.answers.unmet) == len(self.answers.group_names):
            return True
        return self.measured.is_measured and not self.measured.num_answered

    @property
    def refuses(self) -> bool:
        """True if the measurements are of the answers of a model that refuses some records."""
        return self.measured.coverage < 1 and not self.before_refusals

    @property
    def uneven_coverage(self) -> tuple[GroupResult, GroupResult] | None:
        """The groups of which the least and the most records are answered, if these shares differ by more than the
        limit of the rule of fairness; else None."""
        shown = [group for group in self.measured.groups if not math.isnan(group.coverage)]
        if not self.refuses or not shown:
            return None
        least, most = (extreme(shown, key=lambda group: group.coverage) for extreme in (min, max))
        return (least, most) if most.coverage - least.coverage > self.measured.fair_at.limit else None

    @property
    def _too_few(self) -> str:
        """The reason why a small gap does not suffice to call the model fair, such as too few records; empty if there
        is no such reason."""
        rule, fair_from = self.measured.fair_at, self.measured.fair_from(self.measured.fair_at.notion)
        if self.measured.coverage < LEAST_ANSWERED:
            return f"It is of the {percent(self.measured.coverage)} of the test records that the model answers."
        if not fair_from <= rule.limit:
            # Rounded, as 3 / 0.1 is a little below 30 in floating point.
            needed = math.ceil(round(3 / rule.limit, 9))
            kind = "rate" if rates.NOTIONS[rule.notion].bounds_rate else "gap"
            return f"Fewer than {needed} records of a group cannot show so small a {kind}."
        return ""

    @property
    def fairness_words(self) -> str:
        """The verdict on fairness in words, with the names of the groups that it covers if some are not measured."""
        measured, verdict = self.measured, self.fairness
        # One comparison above the limit suffices, whatever the undefined ones are.
        unknown = measured.not_measured if verdict == "not fair" else self.unknown_groups
        known = [name for name in measured.group_names if name not in unknown]
        if verdict == "unknown":
            if not known or not unknown:
                return "fairness undefined"
            named = f"not known for {listed(unknown)}"
            return f"fairness undefined ({named})" if measured.judged.left_out else f"fairness {named}"
        # "Fair among some" becomes the names of these groups.
        word: str = "fair" if verdict == "fair among some" else verdict
        if word == "fair" and self.refuses:
            word = FAIR_IN_ANSWERS
        # Of a model that says nothing about fairness no group is known.
        if not unknown or not known or verdict == "degenerate":
            return word
        return f"{word} among {listed(known)}; not known for {listed(unknown)}"

    @property
    def accuracy_words(self) -> str:
        """The difference between the model's accuracy and that of the best baseline, in percentage points, in words."""
        measured, baseline = self.measured, self.without_privacy
        if math.isnan(measured.accuracy):
            return "an accuracy that is not shown"
        # A baseline below the constant prediction is no achievement to exceed.
        if baseline is None or baseline.accuracy < measured.majority_accuracy:
            if measured.majority_class is None:
                return f"{percent(measured.accuracy)} accuracy"
            other, whose = measured.majority_accuracy, f"always “{measured.majority_class}”"
        else:
            other, whose = baseline.accuracy, "a logistic model without privacy"
            if measured.accuracy > other:  # possible because the model had public records too
                whose += f" that learned from {counted(baseline.num_records, 'private record')}"
        # From the numbers as they are printed, so that a reader's subtraction gives the same.
        points = Decimal(f"{100 * measured.accuracy:.1f}") - Decimal(f"{100 * other:.1f}")
        if not points:
            return f"as many as {whose}"
        return f"{abs(points)} points {'more' if points > 0 else 'less'} than {whose}"

    @property
    def right_words(self) -> str:
        """How many records the model answers, and how often it is right compared with the best baseline, as a
        sentence."""
        measured = self.measured
        if math.isnan(measured.accuracy):
            return "How often it is right is not shown."
        right = percent(measured.accuracy)
        words = f"It is right for {right} of the {measured.words['noun']}s"
        if self.refuses:
            share, uneven = percent(measured.coverage), self.uneven_coverage
            least = "" if uneven is None else f" ({percent(uneven[0].coverage)} of “{uneven[0].name}”)"
            words = f"It answers {share} of the {measured.words['noun']}s{least}; {right} of its answers are right"
        compared = self.accuracy_words
        return f"{words}{'' if compared.endswith('accuracy') else f', {compared}'}."

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The numbers that support the verdict on the model: fairness, accuracy and coverage."""
        measured, fair, limit = self.measured, self.fairness, self.measured.fair_at.limit
        notion = rates.NOTIONS[measured.fair_at.notion]
        names = (upper(notion.measure), "Accuracy", "Coverage")
        if not measured.is_measured:
            why = (f"{upper(measured.words['why_unknown'])}.",)
            return tuple(Figure(name=name, value="unknown", word="Unknown", mood="none", details=why) for name in names)

        gap, missing = measured.judged, listed(measured.not_measured)
        unknown = f"Too few answered {measured.words['units']} of {missing}." if missing else ""
        left_out = f"{upper(undefined_words(gap))}." if gap.left_out else ""
        word, is_parity = upper(self.fairness_words), notion.name == rates.DEFAULT
        if fair == "degenerate":
            word = "Says nothing"
            details = [f"The model {'; it '.join(measured.degenerate)}: a small gap is no merit then."]
        elif fair == "unknown":
            word = "Undefined"
            few = f"Fewer than {measured.least_cell} {measured.words['units']} of a group are in a cell of this gap."
            is_hidden = measured.not_shown and gap.where == TOO_FEW
            details = [few if is_hidden else left_out or "No two groups can be compared.", unknown]
        else:
            side = "above" if fair == "not fair" else "on both sides of" if gap.high > limit else "at or below"
            empty = f"; {counted(gap.n_undefined, 'share')} of no record left out" if gap.n_undefined else ""
            perfect = ""
            if is_parity and not math.isnan(measured.perfect_gap):
                # If tables are hidden the gap was rounded down, so it is worded as a bound.
                rounded = f"of {measured.perfect_gap:.1f} or more" if measured.perfect_gap else "below 0.1"
                of = f"of {measured.perfect_gap:.3f}" if not measured.hides_tables else rounded
                those = "Among answered records, a" if self.refuses else "A"
                perfect = (
                    f"{those} model that is always right would have a gap {of}: the true labels of the groups differ "
                    "by as much."
                )
            meant = "The largest difference in how often a class is predicted for one group and for all others"
            details = [
                f"{meant if is_parity else upper(notion.words)} (here {gap.where}).",
                f"{upper(interval_words(gap))}: {side} {limit:g}.",
                "" if fair == "not fair" else self._too_few,
                perfect,
                unknown,
                left_out,
                f"Each compared share is of {pages.count(gap.min_cell_size)} records or more{empty}.",
            ]
        # After the value and its interval, which the rule judges; for undefined gaps, after the reason.
        details.insert(2, f"Fair means here: {_surely_fair_words(measured)}.")
        mood = WORDS["moods"][fair]
        if self.before_refusals:
            word += ", before it refuses any"
            details.insert(0, "Of all predictions: the gap of those that it answers is not known.")
        if self.before_refusals or self.uneven_coverage is not None:
            mood = "doubtful" if mood == "good" else mood
        told = tuple(filter(None, details))
        value = "undefined" if fair == "unknown" else decimal(gap.value)
        fairness = Figure(name=names[0], value=value, word=word, mood=mood, details=told)

        none = ("No test record is answered.",)
        accuracy = Figure(name=names[1], value="undefined", word="Undefined", mood="bad", details=none)
        if measured.num_answered:
            worthless = measured.accuracy <= measured.majority_accuracy or measured.degenerate
            baseline = self.no_baseline
            if self.without_privacy is not None:
                baseline = f"{upper(_learned_without_privacy(self.without_privacy))}."
            answered = ""
            if self.before_refusals:
                answered = "Of all predictions, before it refuses any."
                if self.answers is not None and (right := self.answers.right_words):
                    answered += f" {upper(right)}."
            accuracy = Figure(
                name=names[1],
                value=percent(measured.accuracy),
                word=upper(self.accuracy_words),
                mood="bad" if worthless else "none",
                details=(
                    *filter(None, (answered,)),
                    f"On {_number(measured, measured.num_answered, 'answered ')}.",
                    *filter(None, (left_out_words(measured),)),
                    *(f"Interval: {interval(each, percent)}." for each in measured.estimates[:1]),
                    f"{upper(majority_words(measured))}.",
                    *filter(None, (least_found_words(measured),)),
                    *(f"The model {words}." for words in measured.underserved),
                    *filter(None, (baseline,)),
                ),
            )

        if (answers := self.answers) is not None:
            return fairness, accuracy, Figure(name=names[2], mood=answers.mood, **answers.tile)
        some, uneven = "Refuses some" if measured.num_answered else "Refuses all", self.uneven_coverage
        if uneven is not None:
            some = f"Answers “{uneven[0].name}” least"
        of_all = f"Of {_number(measured, measured.num_records, total=True)}."
        coverage = Figure(
            name=names[2],
            value=percent(measured.coverage),
            word="Answers everything" if measured.coverage == 1 else some,
            mood="bad" if not measured.num_answered else "none" if uneven is None else "doubtful",
            details=tuple(filter(None, (of_all, coverage_by_group(measured)))),
        )
        return fairness, accuracy, coverage

    @property
    def measured_rows(self) -> Rows:
        """The measurements on test records as pairs of heading and words; without measurements, the reason why they are
        missing."""
        measured = self.measured
        if not measured.is_measured:
            return [("accuracy", f"unknown: {measured.words['why_unknown']}")]
        accuracy = "not shown" if math.isnan(measured.accuracy) and measured.not_shown else percent(measured.accuracy)
        before = ", before it refuses any" if self.before_refusals else ""
        missing, units = listed(measured.not_measured), measured.words["units"]
        least, baseline = least_found(measured), self.without_privacy
        if self.answers is None:
            by_group = coverage_by_group(measured).removesuffix(".")
            covered = [("coverage", "; ".join(filter(None, (percent(measured.coverage), lower(by_group)))))]
        else:
            right = self.answers.right_words if self.before_refusals else ""
            covered = [("answers", f"{self.answers.sentence}."), ("answered", self.answers.answered_words)]
            covered.append(("right answers", right))

        def others(kind: Literal["gap", "rate"]) -> str:
            notions = [each for each in rates.NOTIONS.values() if each.bounds_rate == (kind == "rate")]
            return ", ".join(
                f"{notion.measure.removesuffix(f' {kind}')} {gap_words(measured.gaps[notion.reading])}"
                for notion in notions
                if notion.name != rates.DEFAULT
            )

        gap = measured.measured(rates.DEFAULT)
        rows = [
            ("accuracy", f"{accuracy} of {_number(measured, measured.num_answered)}{before}"),
            ("to compare", "" if measured.majority_class is None else majority_words(measured)),
            *(("warning", f"the model {words}") for words in (*measured.degenerate, *measured.underserved)),
            ("warning", f"gaps leave out {missing}: too few answered {units}" if missing else ""),
            ("found least often", f"{least[0]}, in {_share_of_class(measured, least[1])}" if least else ""),
            *covered,
            ("demographic-parity gap", f"{gap_words(gap)}, {interval_words(gap)}"),
            ("other gaps", others("gap")),
            (f"errors{' (worst class)' if len(measured.class_names) > 2 else ''}", others("rate")),
            ("called fair", f"{_surely_fair_words(measured)}: {self.fairness_words}"),
            ("left out", left_out_words(measured)),
            ("not shown", small_cell_words(measured)),
            ("metrics", measured.words["covered"]),
            ("without privacy", f"{_learned_without_privacy(baseline)}; operator only" if baseline else ""),
        ]
        return [(name, words) for name, words in rows if words]


@dataclass(frozen=True, kw_only=True)
class RunStatement(MeasuredClaims):
    """All claims about the model of a run: its privacy guarantee, and its measurements on test records.

    ``for_operator``: for the operator's own page, which shows a baseline without privacy if the run measured one. A
    published page shows none, whether there is one or not. ``intended_use``: what the model is for, in its owner's
    words; None if nobody stated it. ``audited``: whether an audit of the run found no fault; None if there is none.
    ``choice``: what a choice by results costs in the comparison to which the run belongs; None for a run alone.
    """

    guarantee: Guarantee
    for_operator: bool = False
    intended_use: str | None = None
    audited: bool | None = None
    choice: Choice | None = None

    @property
    def decision(self) -> Decision:
        """Whether the model may be published, and what has to be settled first, by whom."""
        guarantee, measured = self.guarantee, self.measured
        is_measured, gap, choice = measured.is_measured, measured.judged, self.shown_choice
        unknown = self.unknown_groups if is_measured else ()
        private, fair, uneven = guarantee.strength[0], self.fairness if is_measured else "", self.uneven_coverage
        is_void, is_large = private == STRENGTHS["void"][0], bool(guarantee.delta_caution)
        values = {
            "unit": guarantee.unit,
            "says": "; it ".join(measured.degenerate),
            "gap": decimal(gap.value),
            "high": decimal(gap.high),
            "limit": f"{measured.fair_at.limit:g}",
            "guess": pages.most_often_right(guarantee.epsilon, guarantee.delta),
            "groups": listed(unknown),
            "epsilon": epsilon_text(guarantee.epsilon),
            "cost": "" if choice is None else choice.cost,
        }
        if uneven is not None:
            least, most = ((percent(1 - group.coverage), group.name) for group in uneven)
            values |= {"least": least[1], "refused": least[0], "most": most[1], "others": most[0]}
        if self.answers_nothing:
            of_gap = "answers_nothing"
        elif is_measured and self.before_refusals and fair != "degenerate":
            of_gap = "gap_of_answers"  # a gap of all predictions neither forbids nor allows
        elif fair == "unknown" and unknown:
            of_gap = ""  # its groups are a point of their own
        else:
            of_gap = fair.replace(" ", "_")
        is_open = {
            "not_private": not guarantee.protects,
            "void": guarantee.protects and is_void,
            "refuted": self.audited is False,
            of_gap: of_gap in WORDS["open_points"],  # other verdicts leave nothing open
            "delta": guarantee.protects and is_large and not is_void,
            "weak": guarantee.protects and not is_large and private == STRENGTHS["weak"][0],
            "not_measured": not is_measured,
            "unknown_groups": bool(unknown),
            "coverage": uneven is not None,
            "metrics": is_measured and measured.metrics == "outside",
            "choice_among": choice is not None and values["cost"] != "",
            "choice_mixed": choice is not None and values["cost"] == "",
            "choice": choice is None and not guarantee.tuning_accounted,
            "use": not self.intended_use,
            "no_audit": self.audited is None,
        }
        said = [WORDS["open_points"][name] for name, is_so in is_open.items() if is_so]
        by = [(point["by"], point["words"].format(**values)) for point in said]
        return Decision(
            forbidding=tuple(words for who, words in by if who == "forbids"),
            to_settle=tuple((WORDS["parties"][who], words) for who, words in by if who in WORDS["parties"]),
            advised=tuple(words for who, words in by if who == "advice"),
        )

    @property
    def shown_choice(self) -> Choice | None:
        """What a choice by results costs; None for a run alone, and if the model has no guarantee."""
        is_open = self.guarantee.protects and not self.guarantee.tuning_accounted
        return self.choice if is_open else None

    @property
    def choice_words(self) -> str:
        """What a choice by results costs, in a sentence; empty where :attr:`shown_choice` is None."""
        return "" if self.shown_choice is None else self.shown_choice.named(self.guarantee.epsilon)

    @property
    def no_baseline(self) -> str:
        if self.for_operator:
            return "The run measured no model without privacy to compare with: method sgd trains one on the same data."
        return (
            "How often a model without privacy is right is not published, as it depends on every private record; the "
            "operator’s own report has it."
        )

    @property
    def line(self) -> str:
        """The verdict on the model in one line: private or not, fair or not, and how accurate."""
        guarantee, measured = self.guarantee, self.measured
        private, _ = guarantee.strength
        alone = " (the sensitive attribute alone)" if guarantee.protects and guarantee.not_protected else ""
        begin = upper(private) + alone
        if not measured.is_measured:
            return f"{begin}; how accurate and how fair is unknown: {measured.words['why_unknown']}."
        if measured.degenerate:
            return f"{begin}, but degenerate: on the test records it {'; it '.join(measured.degenerate)}."
        if self.before_refusals:
            answers, right = self.answers, ""
            if answers is not None:
                if self.answers_nothing:
                    return f"{begin}, but it answers nothing: a bound on its errors is guaranteed for no group."
                right = f" {answers.right_words}." if answers.right_words else ""
            before = lower(self.right_words.removesuffix("."))
            return f"{begin}.{right} Before it refuses any: {before}; {self.fairness_words}."
        # The share that it answers too: a model that refuses most may seem fair and right.
        accuracy = self.right_words
        if (found := least_found(measured)) is not None and found[1] < _HARDLY:
            accuracy += f" It finds “{found[0]}” in {_share_of_class(measured, found[1])}."
        if "; not known for" in self.fairness_words or measured.not_measured:
            return f"{begin}; {self.fairness_words}. {accuracy}"
        joined = WORDS["joined"].get(private, {}).get(self.fairness, f"{upper(private)}, {self.fairness_words}")
        if self.fairness == "fair":
            joined = f"{joined.removesuffix('fair')}{self.fairness_words}"
        # The limitation follows the word for privacy, wherever that stands. The word is found without its first letter,
        # which is a capital at the start of a sentence.
        joined = joined.replace(private[1:], f"{private[1:]}{alone}", 1)
        perfect = ""
        is_parity = measured.fair_at.notion == rates.DEFAULT
        if self.fairness == "not fair" and is_parity and measured.perfect_gap >= measured.fair_at.limit:
            perfect = " A model that is always right would not be called fair here either."
        return f"{joined}. {accuracy}{perfect}"

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The numbers that support the verdict on the model: privacy, fairness, accuracy and coverage."""
        guarantee, words = self.guarantee, self.guarantee.words
        private, mood = guarantee.strength
        held = (
            f"{words['protected']}, {WORDS['relations'][guarantee.relation]} ({guarantee.relation}), δ = "
            f"{delta_text(guarantee.delta)}."
        )
        if guarantee.protects:
            # Earlier releases last: the budget of this run is the one that it was planned for.
            choice = self.choice_words or words["uncharged_tuning"] or "The choice of settings is part of ε."
            delta = pages.delta_words(guarantee.delta, guarantee.declared_units, guarantee.unit)
            details = [f"Protects {held}", delta, words["several_records"], choice, words["with_earlier"]]
        else:
            fresh = f"With fresh noise ε would hold for {held}" if math.isfinite(guarantee.epsilon) else ""
            details = ["Nothing is protected.", fresh]
        told = tuple(filter(None, details))
        privacy = Figure(name="Privacy budget ε", value=words["epsilon"], word=upper(private), mood=mood, details=told)
        return privacy, *super().figures

    @property
    def rows(self) -> Rows:
        """The guarantee and the measurements as pairs of heading and words, for a terminal or a notebook."""
        cautions = [("the choice", self.choice_words), ("warning", self.guarantee.delta_caution)]
        rows = [self.guarantee.row, *(row for row in cautions if row[1]), *self.measured_rows]
        return [*rows, ("may it be published?", self.decision.words)]


def upper(words: str) -> str:
    """Return ``words`` with a capital first letter."""
    return f"{words[:1].upper()}{words[1:]}"


def lower(words: str) -> str:
    """Return ``words`` with a small first letter."""
    return f"{words[:1].lower()}{words[1:]}"


def fair_words(rule: FairRule) -> str:
    """Return the user's definition of fair in words, as a noun phrase."""
    measure = rates.NOTIONS[rule.notion].measure
    named = ", the four-fifths rule" if rule == types.FOUR_FIFTHS else ""
    return f"{'an' if measure[0] in 'aeiou' else 'a'} {measure} of at most {rule.limit:g}{named}"


def _surely_fair_words(measured: Evaluation) -> str:
    """Return the definition of fair with the confidence at which a gap has to be within the limit."""
    return f"{fair_words(measured.fair_at)}, with {percent(measured.judged.level, digits=0)} confidence"


def _number(measured: Evaluation, number: int, which: str = "", *, total: bool = False) -> str:
    """Return words for a number of test records or persons, such as "about 300 test records", with ``which`` before the
    noun. "about" is added if metrics are private, because numbers are then estimates.

    Where records count and the data set names persons, both numbers are stated. ``total``: with the number of all test
    records, if some are in no number.
    """
    about, noun = "about " if measured.metrics == "private" else "", which + measured.words["noun"]
    if total and measured.num_left_out:
        of = f"{pages.count(number)} of {counted(measured.num_records + measured.num_left_out, noun)}"
    else:
        of = counted(number, noun)
    # The persons of answered records alone are not counted.
    has_persons = measured.num_persons is not None and not measured.per_person and number == measured.num_records
    persons = f" ({counted(measured.num_persons or 0, 'person')})" if has_persons else ""
    return f"{about}{of}{persons}"


def coverage_by_group(measured: Evaluation) -> str:
    """Return in one sentence how many records of each group are answered; empty if all are, or if none is shown."""
    shown = [(group.name, group.coverage) for group in measured.groups if not math.isnan(group.coverage)]
    if measured.coverage == 1 or not shown:
        return ""
    return f"Answered by group: {listed([f'{percent(share)} of “{name}”' for name, share in shown])}."


_HARDLY = 0.05  # found so rarely, a class may as well be missing
_FEW = 10  # records of a class that say nothing about how often it is found


def least_found(measured: Evaluation) -> tuple[str, float] | None:
    """Return the class whose records are predicted rightly least often, and how often; None if tables are hidden, or if
    only one class has enough answered records."""
    if None in measured.confusion_GYC or not measured.confusion_GYC:
        return None
    table_YC = np.array(measured.confusion_GYC, dtype=np.float64).sum(axis=0)
    known = [
        (k, size) for k, size in enumerate(table_YC.sum(axis=1).tolist()) if size >= max(measured.least_cell, _FEW)
    ]
    if len(known) < 2:
        return None
    share, name = min((float(table_YC[k, k] / size), measured.class_names[k]) for k, size in known)
    return name, share


def least_found_words(measured: Evaluation) -> str:
    """Return in one sentence which class is found least often; empty if it is not known."""
    found = least_found(measured)
    if found is None:
        return ""
    which = "" if measured.coverage == 1 else "answered "
    return f"“{found[0]}” is missed most often: {percent(1 - found[1])} of its {which}records get another class."


def _share_of_class(measured: Evaluation, share: float) -> str:
    return f"{percent(share)} of the {'' if measured.coverage == 1 else 'answered '}records of this class"


def left_out_words(measured: Evaluation) -> str:
    """Return sentences on the test records that are in no number: how many, whose, why, and what shows them; empty if
    there are none."""
    if not measured.num_left_out:
        return ""
    left, total = measured.num_left_out, measured.num_left_out + measured.num_records
    persons = f" ({counted(measured.num_persons_left_out, 'person')})" if measured.num_persons is not None else ""
    groups, noun = listed(measured.not_measured), measured.words["units"]
    return (
        f"{pages.count(left)} of {counted(total, 'test record')}{persons} are in no number: those of {groups}, of whom "
        f"fewer than {measured.least_cell} {noun} are known or answered, and others without whom their number would "
        f"follow. More {noun} of {groups}, or a smaller evaluation.least_cell, show them."
    )


def verdict(*, low: float | None, high: float | None, fair_from: float | None, limit: float) -> Verdict:
    """Return whether a gap with the interval from ``low`` to ``high`` is fair at ``limit``; None and NaN are undefined.

    The whole interval decides, because a value below the limit may be chance. ``fair_from`` is the smallest limit at
    which the records suffice to call the gap fair (:meth:`Evaluation.fair_from`).
    """
    low, high, fair_from = (math.nan if each is None else each for each in (low, high, fair_from))
    if math.isnan(low) or math.isnan(high):
        return "unknown"
    if low > limit:
        return "not fair"
    return "fair" if high <= limit and fair_from <= limit else "perhaps fair"


def gap_words(gap: GapResult) -> str:
    """Return the value of a fairness gap as text, with the groups for which some comparison is undefined: then the
    value is a lower bound."""
    if not gap.left_out:
        return decimal(gap.value)
    more = "" if math.isnan(gap.value) else f"{decimal(gap.value)} or more, "
    return f"{more}undefined for {listed(gap.left_out)}"


def undefined_words(gap: GapResult) -> str:
    """Return words on why a fairness gap leaves out groups: some comparison is undefined or hidden for them."""
    return (
        f"some of what is compared is undefined for {listed(gap.left_out)}, such as a share of no records, or hidden, "
        "such as one of too few: the gap may be larger"
    )


def interval_words(gap: GapResult) -> str:
    """Return words for the confidence interval of a fairness gap, with its confidence level."""
    if math.isnan(gap.low):
        return "interval undefined"
    return f"with {percent(gap.level, digits=0)} confidence {ends_words(gap.value, gap.low, gap.high)}"


def ends_words(value: float, low: float, high: float) -> str:
    """Return words for the ends of the confidence interval of a gap; the upper one alone where the lower one is the
    estimate, ``value``: resampling moves a largest gap upwards, most of all where a gate holds it at its margin."""
    return f"up to {decimal(high)}" if low == value else f"{decimal(low)} to {decimal(high)}"


def majority_words(measured: Evaluation) -> str:
    """Return in words the accuracy of always predicting the most common class, with which pages compare the model's
    accuracy."""
    if measured.majority_class is None:
        return "nothing to compare with"
    return f"always “{measured.majority_class}”, the most common class: {percent(measured.majority_accuracy)}"


def small_cell_words(measured: Evaluation) -> str:
    """Return sentences on the numbers that are hidden because they rest on too few test records or persons, and on the
    cells that are meant; empty if nothing is hidden."""
    hidden, noun = measured.not_shown, measured.words["units"]
    if not hidden and None not in measured.confusion_GYC:
        return ""
    if not measured.hides_predictions:
        counts = "of the other groups alone" if any(measured.confusion_GYC) else "of no group"
        return (
            f"Groups of fewer than {measured.least_cell} {noun} are not shown, nor numbers by true label of fewer; "
            f"counts by true label are shown {counts}. Numbers of predictions, such as the selected ones of a group "
            "and those in a confusion table, are shown however small they are."
        )
    words = (
        f"Cells of fewer than {measured.least_cell} {noun} are not shown, nor totals that would reveal them. A cell is "
        "a group, or the part of a group with one true label, with one prediction, with both, or with a right, a wrong "
        "or no answer (also by class)."
    )
    return f"{words} Missing for this reason: {'; '.join(hidden)}." if hidden else words


def smallest_count_words(evaluations: Sequence[Evaluation]) -> str:
    """Return sentences on the smallest cell that published numbers of the same records show, as an answer for those who
    check an output before it leaves. They are computed from the numbers, not from the setting that hides small
    ones."""
    measured, noun = evaluations[0], evaluations[0].words["units"]
    if measured.metrics == "private":
        return "Every published count has noise."
    counts = [each.smallest_count for each in evaluations if each.smallest_count is not None]
    if not counts:
        return "No count of a group is shown."
    shown = (
        "The smallest count of test records of a group that is shown, or follows from a rate and the group’s size, is "
        f"{pages.count(min(counts))} (by true label, by prediction, by both, right or wrong, refused)."
    )
    if min(counts) < measured.least_cell:
        return f"{shown} Cells of fewer than {measured.least_cell} {noun} are shown."
    if measured.least_cell == 1:
        return f"{shown} No small cell is hidden: evaluation.least_cell is 1."
    return " ".join(filter(None, (shown, small_cell_words(measured), left_out_words(measured))))


def _learned_without_privacy(found: WithoutPrivacy) -> str:
    learned = counted(found.num_records, "private record")
    return f"a logistic model without privacy that learned from {learned}: {percent(found.accuracy)}"


Outcome = Literal["answered", "confidence", "fairness", "free"]
OUTCOMES: Mapping[Outcome, str] = WORDS["outcomes"]


Course = Sequence[tuple[float, float]]
"""Points (queries submitted, epsilon) from (0, 0) to the last query; empty if none was submitted."""


@dataclass(frozen=True, kw_only=True)
class AnsweredQueries(QueryOutcomes):
    """The publishable facts about the queries that were submitted to teachers, in addition to the numbers of queries by
    outcome.

    At most ``num_teachers`` vote on a query; ``voters`` is the word for them, ``teachers`` or ``neighbours``.
    ``mechanism`` describes how labels are released. ``epsilon_course`` is the data-independent epsilon after each
    number of submitted queries, at the guarantee's delta; a query that is refused before the vote counts too.
    ``outcomes_GO`` is the number of queries by public group and outcome, in the order of ``OUTCOMES``. ``answered_GC``
    is the number of released labels by public group and class.
    """

    mechanism: str
    gate: GateRule
    num_teachers: int
    voters: str
    num_public_records: int
    epsilon_course: Course
    outcomes_GO: Sequence[Sequence[int]]
    answered_GC: Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class PublicReport:
    """The contents of the public report, for a run of any method.

    ``title`` names the data set, ``claims`` are all claims about the model. ``voting``, the facts on answered queries,
    is None for a method without queries. ``evaluations`` maps each set of predictions on the test records to its
    result; the first one is that of ``claims``. ``reject_option`` has the results, over other orders of the test
    records, of a model that may refuse to answer; it is None for any other model. ``num_training_labels`` counts the
    released labels that the student was trained on, which may be fewer than were released; None if not known.
    ``private_population`` are estimates from a release by group. ``made`` states when and by which version of this
    package the report was made.
    """

    title: str
    method: str
    claims: RunStatement
    evaluations: Mapping[str, Evaluation]
    voting: AnsweredQueries | None = None
    reject_option: RejectOptionSpread | None = None
    num_training_labels: int | None = None
    private_population: PrivatePopulation | None = None
    made: str = ""

    @property
    def model(self) -> str:
        """The word that sentences use for the published model: "student" if teachers answered queries, else "model"."""
        return "student" if self.voting else "model"


@dataclass(frozen=True, kw_only=True)
class PrivateReport:
    """The contents of the private report of a run with votes.

    ``operators`` has those of the public report, but that its claims are the operator's own. Every array follows the
    order of the submitted queries and depends on the votes. ``rdp_Q`` is the data-dependent Renyi cost of each query at
    order ``rdp_order``, in nats, ``rdp_worst_Q`` its cost in the worst case. The two courses are data-dependent
    epsilons after each number of queries: ``epsilon_data_dependent_course`` charges every query for which noise was
    drawn, ``epsilon_as_in_paper_course`` leaves out rejections by the fairness gate. ``votes_QC`` counts the voters for
    each label. ``groups_Q`` are codes of groups, ``at_Q`` seconds since 1970 (0: not known), ``callers_Q`` the callers
    who asked (empty: the run itself).
    """

    operators: PublicReport
    rdp_order: float
    rdp_Q: Sequence[float]
    rdp_worst_Q: Sequence[float]
    epsilon_data_dependent_course: Course
    epsilon_as_in_paper_course: Course
    votes_QC: Sequence[Sequence[int]]
    groups_Q: Sequence[int]
    outcomes_Q: Sequence[Outcome]
    at_Q: Sequence[float]
    callers_Q: Sequence[str]
