"""The two pages of a run: one to publish, one for the operator alone.

The public page is a function of ``PublicReport``, which holds the published guarantee, metrics on the test records and
what was released, and nothing that depends on votes otherwise. The operator's page adds what depends on the votes:
data-dependent costs, consensus, and the ledger as FairPATE's authors published theirs, where a label that the
fairness gate rejects costs nothing. Each page is one self-contained HTML file without scripts. Sections about votes
stand only where there were votes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from fairpate.evaluation import charts
from fairpate.evaluation.frontier_looks import SHAPES
from fairpate.evaluation.metrics import Evaluation, GapResult
from fairpate.evaluation.page import (
    count,
    counted,
    course,
    decimal,
    delta_text,
    epsilon_text,
    percent,
    power_of_ten,
    render,
    scale_end,
)
from fairpate.evaluation.private_population import population_words
from fairpate.evaluation.records import (
    OUTCOMES,
    GroupOutcomes,
    Guarantee,
    Outcome,
    PrivateReport,
    PublicReport,
    Voting,
)
from fairpate.evaluation.reject_option import RejectOptionSpread
from fairpate.fairness.notions import NOTIONS
from fairpate.fairness.rates import FloatArray
from fairpate.types import STOPPED_BY_VOTES, GateRule, Unit

__all__ = [
    "GroupOutcomes",
    "Guarantee",
    "Outcome",
    "PrivateReport",
    "PublicReport",
    "Voting",
    "private_report",
    "public_report",
]

_UNIT_WORDS: Mapping[Unit, str] = {
    "record": "one record",
    "person": "everything about one person",
    "sensitive attribute": "one sensitive attribute",
}
GAP_NAMES = {
    **{notion.reading: notion.title for notion in NOTIONS.values()},
    "dp_pairwise": "Demographic parity, between two groups",
    "dp_to_overall": "Demographic parity, group to overall",
    "eo_full": "Equalized odds, one group against the rest",
}
_LEDGERS = {
    "Data-independent": "Every submitted query at its worst case, whatever the votes. May be published.",
    "Data-dependent": "Everything that was computed, at what these votes make it cost. Private.",
    "Data-dependent, as in the paper": (
        "As FairPATE’s authors reported theirs: rejections by the fairness gate are free, and a noisy vote counts with "
        "the probability that it is drawn, whether it was or not. No bound; for comparison only."
    ),
}
_SCOPES = {
    "group": "in the group",
    "cell": "in the group and class",
    "all_groups": "in every group",
    "one_vs_rest": "against all other groups",
    "pairwise": "against each other group",
    "overall": "against the overall rate",
}
_MEASURED = ("Demographic-parity gap", "Accuracy", "Coverage")
_FLOOR = 1e-8


def unit_words(unit: Unit) -> str:
    """What is protected, in words; a unit that the operator declared stands for all that is of it."""
    return _UNIT_WORDS.get(unit, f"everything about one {unit}")


def public_report(report: PublicReport) -> str:
    """The page to publish, as one HTML document."""
    gaps = [gap for found in report.evaluations.values() for gap in found.between_groups.values()]
    return render(
        "report.html",
        **_opening(report),
        settings=_settings(report),
        budget_curve=_budget_curve(report),
        released_CG=_released(report),
        outcomes=OUTCOMES,
        gap_names=GAP_NAMES,
        answered=answered_words,
        gap_end=scale_end([end for gap in gaps for end in (gap.value, gap.high)]),
        prediction_words={name: prediction_words(found, report.model) for name, found in report.evaluations.items()},
        order_words=_order_words(report.reject_option),
        margin=None if report.voting is None else _margin(report.voting.gate),
        stopped_by_votes=STOPPED_BY_VOTES,
        sanitised_words=_sanitised_words(report.guarantee),
        population=report.private_population,
        population_words=report.private_population and population_words(report.private_population),
    )


def private_report(report: PrivateReport) -> str:
    """The operator's page, as one HTML document. It depends on private votes: never publish it."""
    public, voting = report.public, report.public.voting
    assert voting is not None
    courses = (
        voting.epsilon_course_Q,
        report.epsilon_data_dependent_course_Q,
        report.epsilon_as_in_paper_course_Q,
    )
    totals = [public.guarantee.epsilon, *(float(epsilon_Q[-1]) if len(epsilon_Q) else 0.0 for epsilon_Q in courses[1:])]
    return render(
        "operator.html",
        **_opening(public),
        ledgers=list(zip(_LEDGERS.items(), totals, strict=True)),
        compared=compared_ledgers(*totals, rejected=voting.rejected_fairness),
        curve=charts.curves(
            [
                charts.Curve(name=f"{name}: {epsilon_text(total)}", points=course(epsilon_Q))
                for name, total, epsilon_Q in zip(_LEDGERS, totals, courses, strict=True)
            ],
            x_label="submitted queries",
            y_label=f"ε at δ = {delta_text(public.guarantee.delta)}",
            title="Three ledgers against submitted queries",
        ),
        **_query_by_query(report, voting),
        outcomes=OUTCOMES,
    )


def _opening(report: PublicReport) -> dict[str, Any]:
    """Title, outcome in one sentence, four figures."""
    guarantee = report.guarantee
    return {
        "report": report,
        "guarantee": guarantee,
        "protected": unit_words(guarantee.unit),
        "voting": report.voting,
        "measured": report.headline,
        "shapes": SHAPES,
        "noise": _noise(report),
        "training_labels": _training_labels(report),
        "baseline": majority_words,
        "figures": headline_figures(report.headline, guarantee),
        "why_not": why_not_private(guarantee),
    }


def headline_figures(measured: Evaluation, guarantee: Guarantee) -> list[tuple[str, str, str]]:
    """What may be published of privacy, the gap with its interval, accuracy beside its baseline, and coverage.

    Each has a name, a value and a detail.
    """
    parity, answered = measured.gaps["dp_one_vs_rest"], counted(measured.num_answered, "answered test record")
    held = f"at δ = {delta_text(guarantee.delta)}; per {guarantee.unit}, {guarantee.relation}"
    named = "".join(f"; {words}" for words in measured.degenerate[:1])
    cells = f"{interval_words(parity)}; smallest cell {count(parity.min_cell_size)}{named}"
    privacy = ("Privacy budget ε", published_epsilon(guarantee), held)
    if not measured.is_measured:
        return [privacy, *((name, "unknown", "no test records") for name in _MEASURED)]
    gap, accuracy, coverage = _MEASURED
    return [
        privacy,
        (gap, decimal(parity.value), cells),
        (accuracy, percent(measured.accuracy), f"on {answered}; {majority_words(measured)}"),
        (coverage, percent(measured.coverage), f"of {count(measured.num_records)} test records"),
    ]


def published_epsilon(guarantee: Guarantee) -> str:
    """Epsilon as it is published, or that there is none."""
    return epsilon_text(guarantee.epsilon) if math.isfinite(guarantee.epsilon) else "none"


def why_not_private(guarantee: Guarantee) -> str:
    """What leaves a model without the guarantee, for one that lacks it."""
    return "No ε is finite" if guarantee.noise == "os_entropy" else f"Its noise: {guarantee.noise}"


def majority_words(measured: Evaluation) -> str:
    """The accuracy of a constant on the same records, to stand beside the model's."""
    if measured.majority_class is None:
        return "nothing to compare with"
    return f"always “{measured.majority_class}”, the most common class: {percent(measured.majority_accuracy)}"


def interval_words(gap: GapResult) -> str:
    """The interval of a gap with its level."""
    if math.isnan(gap.low):
        return "interval undefined"
    return f"{gap.low:.3f} to {gap.high:.3f} ({percent(gap.level, digits=0)})"


def answered_words(measured: Evaluation) -> str:
    """Of which records rates are."""
    return "all test records" if measured.num_answered == measured.num_records else "answered test records"


def prediction_words(measured: Evaluation, model: str) -> str:
    """How many classes are predicted at all, for a gap is read beside that."""
    if not measured.num_answered:
        return "No record is answered."
    predicted = sum(any(rates[k] > 0 for rates in measured.rates_GC) for k in range(len(measured.class_names)))
    words = f"{count(predicted)} of {count(len(measured.class_names))} classes are predicted for some record."
    return f"The {model} {'; it '.join(measured.degenerate)}. {words}" if measured.degenerate else words


def _training_labels(report: PublicReport) -> str:
    """The labels behind the student, beside those that the ledger has released until now."""
    if report.voting is None:
        return ""
    trained, answered = report.num_training_labels, report.voting.answered
    if trained is None:
        return "released labels, of which the number was not recorded"
    if trained < answered:
        others = f"the other {count(answered - trained)} answer queries beside the run’s own"
        return f"{count(trained)} of these labels: {others}"
    return "these labels" if trained == answered else counted(trained, "released label")


def _settings(report: PublicReport) -> str:
    guarantee, votes = report.guarantee, report.voting
    how = f"Touched private records: {'; '.join(guarantee.events)}" if guarantee.events else "No event was priced"
    if votes:
        how = f"{votes.mechanism}. " + (
            "No fairness gate" if math.isinf(votes.gate.max_disparity) else f"Fairness margin {_gate(votes.gate)}"
        )
    tuning = "is" if guarantee.tuning_accounted else "is not"
    return f"Method: {report.method}. {how}. Noise: {_noise(report)}. Tuning {tuning} part of ε."


def _budget_curve(report: PublicReport) -> Any:
    if report.voting is None:
        return ""
    total = f"ε = {epsilon_text(report.guarantee.epsilon)}"
    return charts.curves(
        [charts.Curve(name=total, points=course(report.voting.epsilon_course_Q))],
        x_label="submitted queries",
        y_label=f"ε at δ = {delta_text(report.guarantee.delta)}",
        title="Data-independent privacy budget spent against submitted queries",
    )


def _released(report: PublicReport) -> list[list[float]]:
    """The share of each class in each group's released labels."""
    if report.voting is None:
        return []
    return [
        [row[k] / sum(row) if sum(row) else math.nan for row in report.voting.answered_GC]
        for k in range(len(report.headline.class_names))
    ]


def _order_words(spread: RejectOptionSpread | None) -> str:
    """Over what the figures of a model that may refuse are spread."""
    if spread is None:
        return ""
    return (
        "A model that may refuse decides on each record in view of its earlier answers: the figures with refusals "
        f"belong to one order. Here are {count(len(spread.orders))} random orders of the same "
        f"{count(spread.num_records)} predictions; margin {_gate(spread.rule)}."
    )


def _sanitised_words(guarantee: Guarantee) -> str:
    """What a smooth-sensitivity release says of these votes, against the bound for any votes."""
    sanitised, bound = guarantee.epsilon_sanitised, guarantee.epsilon
    if sanitised is None:
        return ""
    compared = (
        "less than the bound"
        if sanitised < bound
        else "as much as the bound"
        if sanitised == bound
        else "no less: the bound is smaller, and holds for any votes"
    )
    return (
        "On these votes, by a smooth-sensitivity release, which the bound includes, the labels cost at most "
        f"ε = {epsilon_text(sanitised)}, with 95 % confidence over the release’s own noise: {compared}."
    )


def _gate(rule: GateRule) -> str:
    start, gap = _SCOPES[rule.cold_start], _SCOPES[rule.gap]
    return f"γ = {_margin(rule)} after {rule.min_count} answers ({start}), gap {gap}"


def _margin(rule: GateRule) -> str:
    return "off" if math.isinf(rule.max_disparity) else f"{rule.max_disparity:g}"


def _noise(report: PublicReport) -> str:
    """Where the noise comes from; that of votes is exact, that of training is of floating point."""
    label = report.guarantee.noise
    if label != "os_entropy":
        return label.replace(": ", ", ")
    return "exact, from operating-system entropy" if report.voting else "from operating-system entropy"


def compared_ledgers(independent: float, dependent: float, as_in_paper: float, *, rejected: int) -> str:
    """How the three totals lie to one another, in words; as they are printed, rounded up to hundredths."""
    left_out = f"The paper’s leaves out {counted(rejected, 'rejection')} by the fairness gate"
    gates = left_out if rejected else "The gate rejected none"
    return (
        f"Of these votes the data-dependent ε is {_against(dependent, independent)} the data-independent one. The "
        f"ledger as in the paper is {_against(as_in_paper, dependent)} the data-dependent one. {gates}; whichever "
        "way it differs, it is no privacy guarantee."
    )


def _against(value: float, other: float) -> str:
    """``0.15 above``, ``0.15 below`` or ``equal to``, from the numbers as they are printed."""
    if not (math.isfinite(value) and math.isfinite(other)):
        return "equal to" if value == other else "above" if value > other else "below"
    difference = Decimal(epsilon_text(value)) - Decimal(epsilon_text(other))
    if not difference:
        return "equal to"
    return f"{abs(difference)} {'above' if difference > 0 else 'below'}"


def _query_by_query(report: PrivateReport, voting: Voting) -> dict[str, Any]:
    """What each query cost and how far the voters agreed on it."""
    outcomes_Q = np.array(report.outcomes_Q, dtype=object)
    voted_Q = outcomes_Q != "free"
    share_Q = np.asarray(report.plurality_votes_Q, dtype=np.float64) / voting.num_teachers
    consensus_edges = np.linspace(0, 1, 21)
    cost_Q = np.asarray(report.rdp_Q, dtype=np.float64)
    exponent_Q, edges, labels = _log_bins(cost_Q)
    return {
        "cost_words": _cost_words(cost_Q),
        "consensus_words": _consensus_words(share_Q[voted_Q], cost_Q[voted_Q], voting.voters),
        "costs": charts.histogram(
            edges.tolist(),
            _stacks(exponent_Q, outcomes_Q, edges),
            x_label=f"Rényi cost of a query at order {report.rdp_order:g}, nats (logarithmic)",
            y_label="queries",
            title="Data-dependent cost per query",
            ticks=labels,
        ),
        "consensus": charts.histogram(
            consensus_edges.tolist(),
            _stacks(share_Q, outcomes_Q, consensus_edges),
            x_label=f"{voting.voters} that agree on the most popular label, %",
            y_label="queries",
            title=f"Consensus of the {voting.voters}",
            ticks=[(tick / 100, str(tick)) for tick in range(0, 101, 20)],
        ),
    }


def _cost_words(cost_Q: FloatArray) -> str:
    """How much of the cost the dearest tenth of the queries makes up, at least one of them."""
    if not cost_Q.sum():
        return "No query has cost anything."
    number = max(1, len(cost_Q) // 10)
    share = percent(float(np.sort(cost_Q)[::-1][:number].sum() / cost_Q.sum()), digits=0)
    return f"The dearest {number} of {counted(len(cost_Q), 'query', 'queries')}: {share} of the cost."


def _consensus_words(share_Q: FloatArray, cost_Q: FloatArray, voters: str) -> str:
    """Where the middle of the consensus lies, and what the clearer half of the votes made up of the cost."""
    if not len(share_Q):
        return "No query was voted on."
    middle = (
        f"On half of the queries that were voted on, {percent(float(np.median(share_Q)), digits=0)} of the {voters} or "
    )
    clearer_Q = np.argsort(-share_Q, kind="stable")[: (len(share_Q) + 1) // 2]
    if not cost_Q.sum():
        return middle + "more agree."
    share = percent(float(cost_Q[clearer_Q].sum() / cost_Q.sum()), digits=0)
    return middle + f"more agree. The {len(clearer_Q)} with the clearest votes made up {share} of the cost."


def _stacks(values_Q: FloatArray, outcomes_Q: npt.NDArray[np.object_], edges: FloatArray) -> Mapping[str, list[int]]:
    return {outcome: np.histogram(values_Q[outcomes_Q == outcome], bins=edges)[0].tolist() for outcome in OUTCOMES}


def _log_bins(cost_Q: FloatArray) -> tuple[FloatArray, FloatArray, list[tuple[float, str]]]:
    """Exponents of ten, half-decade bins and their ticks; what costs less than 1e-8 gets a bin of its own, "0"."""
    free_Q = cost_Q < _FLOOR
    exponent_Q = np.log10(np.maximum(cost_Q, _FLOOR))
    charged = exponent_Q[~free_Q]
    first = math.floor(charged.min()) if charged.size else -1
    last = max(math.floor(charged.max()) + 1 if charged.size else 0, first + 1)
    edges = np.arange(first - 1.0, last + 0.25, 0.5)
    ticks = [(first - 0.75, "0"), *((float(power), power_of_ten(power)) for power in range(first, last + 1))]
    return np.where(free_Q, first - 0.75, exponent_Q), edges, ticks
