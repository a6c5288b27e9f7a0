"""What pages say of a run: its guarantee, its metrics, its verdict, and the estimate for the private population.

How a published student treats the groups of the private population: estimates of a release by group, for pages.

The numbers are post-processing of what was released (:mod:`fairpate.fairness.private_population`), so that they cost no
privacy and may be published with it, unlike metrics on test records.

What the pages of a run show: plain records that the caller fills in.

What the pages of a run say first, in words that are computed from its numbers: a verdict, and four figures.

A guarantee is called private by how often an attacker may guess rightly (:mod:`fairpate.words`), a model fair where
the whole interval of its demographic-parity gap lies at or below ``FAIR_GAP``: a convention of these pages, printed
beside the gap. Of a model that refuses more than it answers, and of fewer than ``FEW`` records of a group, it is called
perhaps fair at best: none of n records may still be a share of 3/n (95 %), which is above ``FAIR_GAP`` then. Where too
few records of a group are answered to measure it, the verdict is of the others and names them. Accuracy stands beside
that of the most common class, and beside that of a model without privacy where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from decimal import Decimal
from functools import partial
from typing import Any, Literal

import numpy as np

from fairpate.fairness import rates as gaps
from fairpate.fairness.private_population import Population, PopulationEstimate, estimated_gap, estimated_rates
from fairpate.fairness.rates import FloatArray
from fairpate.report.metrics import GAPS, Evaluation, GapResult, RejectOptionSpread, WithoutPrivacy, describe_cell
from fairpate.report.page import count, counted, decimal, epsilon_text, percent
from fairpate.types import UNITS, GateRule, Relation, Unit, strict
from fairpate.words import delta_text, meaning, most_often_right, strength

FORMAT = "fairpate.private_population/1"
_ALL = 0.995  # an estimate of a constant is as near to 1


@dataclass(frozen=True, kw_only=True)
class GroupEstimate:
    """One group: private records, the share that gets an answer, and among those: the share that is right, the share
    of each prediction, and of each true label the share that is predicted so."""

    name: str
    records: PopulationEstimate
    coverage: PopulationEstimate
    accuracy: PopulationEstimate
    predicted: tuple[PopulationEstimate, ...]
    found: tuple[PopulationEstimate, ...]


@dataclass(frozen=True, kw_only=True)
class GapBetweenGroups(PopulationEstimate):
    """A largest difference; ``where`` in words, ``n_undefined`` rates of too few records for the noise left out."""

    where: str
    n_undefined: int


@dataclass(frozen=True, kw_only=True)
class PrivatePopulation:
    """Estimates among the private records, each with an interval at ``level``; gaps are over answered records."""

    level: float
    class_names: tuple[str, ...]
    groups: tuple[GroupEstimate, ...]
    gaps: Mapping[str, GapBetweenGroups]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, field for field; undefined numbers are null."""
        return {"format": FORMAT, **strict(asdict(self))}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> PrivatePopulation:
        """What :meth:`to_json` gave. KeyError or TypeError when fields are missing or unknown."""
        return cls(
            level=plain["level"],
            class_names=tuple(plain["class_names"]),
            groups=tuple(_group(values) for values in plain["groups"]),
            gaps={name: GapBetweenGroups(**_numbers(values)) for name, values in plain["gaps"].items()},
        )


def private_population(
    population: Population, *, group_names: Sequence[str], class_names: Sequence[str], level: float = 0.95
) -> PrivatePopulation:
    """All estimates; the last outcome of ``population`` is a refusal."""
    joint, draws = population.joint_GYJ, population.draws_RGYJ
    answered = joint[..., :-1], draws[..., :-1]
    rates = partial(estimated_rates, level=level)
    predicted, correct = rates(gaps.predicted, *answered), rates(gaps.correct, *answered)
    # The first half of the events: of each true label, how many are predicted so.
    found = rates(gaps.found_or_mistaken, *answered)[: len(class_names)]
    coverage, records = rates(_answered, joint, draws), _records(population, level)
    return PrivatePopulation(
        level=level,
        class_names=tuple(class_names),
        groups=tuple(
            GroupEstimate(
                name=name,
                records=records[z],
                coverage=coverage[0][z],
                accuracy=correct[0][z],
                predicted=tuple(row[z] for row in predicted),
                found=tuple(row[z] for row in found),
            )
            for z, name in enumerate(group_names)
        ),
        gaps={
            name: _gap(metric, *answered, level=level, group_names=group_names, class_names=class_names)
            for name, metric in GAPS.items()
        },
    )


def population_words(found: PrivatePopulation) -> str:
    """The estimates in a sentence or two, and what they assume."""
    parity, level = found.gaps["dp_one_vs_rest"], percent(found.level, digits=0)
    gap = "undefined" if math.isnan(parity.value) else f"{decimal(parity.value)} ({range_words(parity, decimal)})"
    accuracies = (f"{percent(g.accuracy.value)} ({range_words(g.accuracy, percent)}) of {g.name}" for g in found.groups)
    always = [
        name
        for place, name in enumerate(found.class_names)
        if found.groups and all(each.predicted[place].value >= _ALL for each in found.groups)
    ]
    named = f" (it predicts {always[0]!r} for nearly every record)" if always else ""
    return (
        f"Among the private records the demographic-parity gap is {gap}{named}, and the model is right for "
        f"{', '.join(accuracies)}; {level} intervals. Estimated from the released table and public records, at "
        "no privacy cost, assuming that private records are predicted like public ones of their group that vote alike."
    )


def range_words(found: PopulationEstimate, words: Callable[[float], str]) -> str:
    """An interval; undefined without one."""
    return "undefined" if math.isnan(found.low) else f"{words(found.low)} to {words(found.high)}"


def _gap(
    metric: gaps.Metric,
    joint: FloatArray,
    draws: FloatArray,
    *,
    level: float,
    group_names: Sequence[str],
    class_names: Sequence[str],
) -> GapBetweenGroups:
    found = estimated_gap(metric, joint, draws, level=level)
    return GapBetweenGroups(
        value=found.value,
        low=found.low,
        high=found.high,
        where=describe_cell(found.where, group_names=group_names, class_names=class_names),
        n_undefined=found.n_undefined,
    )


def _answered(joint_GYJ: FloatArray) -> gaps.Events:
    """All outcomes but the last."""
    sizes_1G = joint_GYJ.sum(axis=(-2, -1))[..., None, :]
    return gaps.Events(hits_EG=sizes_1G - joint_GYJ[..., -1].sum(axis=-1)[..., None, :], sizes_EG=sizes_1G, cells=[])


def _records(population: Population, level: float) -> list[PopulationEstimate]:
    """Of every group; NaN where nothing is known of it."""
    count_G, count_RG = (joint.sum(axis=(-2, -1)) for joint in (population.joint_GYJ, population.draws_RGYJ))
    low_G, high_G = np.quantile(count_RG, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return [
        PopulationEstimate(value=v, low=a, high=b)
        for v, a, b in zip(count_G.tolist(), low_G.tolist(), high_G.tolist(), strict=True)
    ]


def _group(values: Mapping[str, Any]) -> GroupEstimate:
    fields = dict(values)
    for name in ("records", "coverage", "accuracy"):
        fields[name] = PopulationEstimate(**_numbers(values[name]))
    for name in ("predicted", "found"):
        fields[name] = tuple(PopulationEstimate(**_numbers(each)) for each in values[name])
    return GroupEstimate(**fields)


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in values.items()}


Outcome = Literal["answered", "confidence", "fairness", "free"]
OUTCOMES: Mapping[Outcome, str] = {
    "answered": "answered",
    "fairness": "refused by the fairness gate",
    "confidence": "refused: too little consensus",
    "free": "refused before the vote",
}


@dataclass(frozen=True, kw_only=True)
class GroupOutcomes:
    """How the queries of one public group ended."""

    name: str
    answered: int
    rejected_confidence: int
    rejected_fairness: int
    refused_free: int

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers in the order of ``OUTCOMES``."""
        return self.answered, self.rejected_fairness, self.rejected_confidence, self.refused_free

    @property
    def total(self) -> int:
        """All of the group's queries."""
        return sum(self.counts)


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """The published guarantee; ``epsilon`` is inf where there is none, ``events`` say what touched private records.

    ``noise`` is ``os_entropy``, or says why nothing is private. ``not_protected`` is what the model may reveal without
    noise, ``remarks`` qualify the guarantee, ``tells_size`` says that an event tells the number of private records.
    ``epsilon_with_earlier`` is what ``earlier_releases`` of the same private data cost together with this one if all
    were fixed beforehand, ``epsilon_adaptive_with_earlier`` the least limit that admits them, each chosen in view of
    the earlier ones; None where that is not finite.
    """

    unit: Unit
    relation: Relation
    epsilon: float
    delta: float
    accounting: str
    noise: str
    tuning_accounted: bool
    events: Sequence[str]
    not_protected: str | None = None
    remarks: Sequence[str] = ()
    tells_size: bool = False
    earlier_releases: int = 0
    epsilon_with_earlier: float | None = None
    epsilon_adaptive_with_earlier: float | None = None

    @property
    def is_attested(self) -> bool:
        """Whether the unit is one that the operator declared, for votes that were made elsewhere."""
        return self.unit not in UNITS

    @property
    def protects(self) -> bool:
        """Whether the guarantee holds of what was published."""
        return math.isfinite(self.epsilon) and self.noise == "os_entropy"


@dataclass(frozen=True, kw_only=True)
class Voting:
    """What teachers were asked and what was answered, as far as it may be published.

    ``voters``, at most ``num_teachers`` a query, are ``teachers`` or ``neighbours``.
    ``mechanism`` says in words how labels are released. ``epsilon_course_Q`` is the data-independent epsilon after each
    submitted query, at the guarantee's delta: it grows with every one, also with those refused before the vote.
    ``answered_GC[z][k]`` counts released labels.
    """

    mechanism: str
    gate: GateRule
    num_teachers: int
    voters: str
    num_public_records: int
    queries_submitted: int
    answered: int
    rejected_confidence: int
    rejected_fairness: int
    refused_free: int
    epsilon_course_Q: Sequence[float]
    outcomes: Sequence[GroupOutcomes]
    answered_GC: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        if len(self.epsilon_course_Q) != self.queries_submitted:
            raise ValueError(
                f"Expected one epsilon for each of {self.queries_submitted} queries, got {len(self.epsilon_course_Q)}."
            )


@dataclass(frozen=True, kw_only=True)
class PublicReport:
    """What the public page shows, of a run of any method.

    ``title`` names the data set. ``voting`` is None for a method whose teachers, if it has any, answer no queries.
    ``num_private_records`` is a declared, public number (the exact count is itself protected when records may be added
    or removed); None leaves it out. ``evaluations`` maps what was measured on the test records to its result; the first
    is the headline. ``reject_option`` is how a model that may refuse fares in other orders of the test records; None
    for one that answers everything. ``num_training_labels``: released labels that the student was trained on, which the
    ledger may have outgrown; None where that is not known. ``private_population``: what a release by group tells.
    ``made`` says when and by which version.
    """

    title: str
    method: str
    guarantee: Guarantee
    evaluations: Mapping[str, Evaluation]
    voting: Voting | None = None
    reject_option: RejectOptionSpread | None = None
    num_private_records: int | None = None
    num_training_labels: int | None = None
    private_population: PrivatePopulation | None = None
    made: str = ""

    def __post_init__(self) -> None:
        if not self.evaluations:
            raise ValueError("Expected at least one evaluation, got none.")
        num_groups = len(self.headline.group_names)
        if self.voting and len(self.voting.answered_GC) != num_groups:
            raise ValueError(
                f"Expected answered_GC to have a row for each of {num_groups} groups, "
                f"got {len(self.voting.answered_GC)}."
            )
        if self.reject_option and len(self.reject_option.coverage_G) != num_groups:
            raise ValueError(
                f"Expected reject_option to cover {num_groups} groups, got {len(self.reject_option.coverage_G)}."
            )

    @property
    def headline(self) -> Evaluation:
        """The first evaluation."""
        return next(iter(self.evaluations.values()))

    @property
    def model(self) -> str:
        """What the published model is called: a student has teachers that answered queries."""
        return "student" if self.voting else "model"


@dataclass(frozen=True, kw_only=True)
class PrivateReport:
    """What the operator's page adds to the report of a run with votes.

    Every array follows the order of the submitted queries and depends on the votes.
    ``rdp_Q`` is the data-dependent Renyi cost of each query at order ``rdp_order``, in nats. The courses are
    data-dependent epsilons after each query: ``epsilon_data_dependent_course_Q`` charges everything that was
    computed, ``epsilon_as_in_paper_course_Q`` leaves out rejections by the fairness gate. ``rdp_worst_Q`` is what each
    query costs at its worst case, whatever its votes. ``plurality_votes_Q`` counts the voters behind the most popular
    label, ``runner_up_votes_Q`` those behind the next, ``num_votes_Q`` all who voted. ``groups_Q`` are places in
    ``voting.outcomes``, ``at_Q`` seconds since 1970 (0: not known), ``callers_Q`` who asked (empty: the run itself).
    ``without_privacy`` is what a model without noise reaches that learned from the same private records.
    """

    public: PublicReport
    rdp_order: float
    rdp_Q: Sequence[float]
    rdp_worst_Q: Sequence[float]
    epsilon_data_dependent_course_Q: Sequence[float]
    epsilon_as_in_paper_course_Q: Sequence[float]
    plurality_votes_Q: Sequence[int]
    runner_up_votes_Q: Sequence[int]
    num_votes_Q: Sequence[int]
    groups_Q: Sequence[int]
    outcomes_Q: Sequence[Outcome]
    at_Q: Sequence[float]
    callers_Q: Sequence[str]
    without_privacy: WithoutPrivacy | None = None

    def __post_init__(self) -> None:
        if self.public.voting is None:
            raise ValueError("Expected a report with votes; without them there is nothing for the operator alone.")
        submitted = self.public.voting.queries_submitted
        for name in (each.name for each in fields(self) if each.name.endswith("_Q")):
            if len(getattr(self, name)) != submitted:
                raise ValueError(f"Expected {name} to have {submitted} entries, got {len(getattr(self, name))}.")


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
