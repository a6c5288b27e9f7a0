"""The page of a run that is published, and what the operator's page opens with too.

It is a function of ``PublicReport``, which holds the published guarantee, metrics on the test records and what was
released, and nothing that depends on votes otherwise. It opens with a verdict in words
(:mod:`fairpate.evaluation.verdict`) and is one self-contained HTML file without scripts. Sections about votes stand
only where there were votes.
"""

from __future__ import annotations

import math
from typing import Any

from fairpate.evaluation import charts
from fairpate.evaluation.frontier_looks import SHAPES
from fairpate.evaluation.metrics import Evaluation, WithoutPrivacy
from fairpate.evaluation.page import (
    count,
    counted,
    course,
    epsilon_text,
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
from fairpate.evaluation.verdict import (
    earlier_words,
    majority_words,
    small_cell_words,
    unit_words,
    verdict,
    why_not_private,
)
from fairpate.fairness.notions import NOTIONS
from fairpate.meaning import delta_text
from fairpate.types import STOPPED_BY_VOTES, GateRule

__all__ = [
    "GroupOutcomes",
    "Guarantee",
    "Outcome",
    "PrivateReport",
    "PublicReport",
    "Voting",
    "public_report",
]

GAP_NAMES = {
    **{notion.reading: notion.title for notion in NOTIONS.values()},
    "dp_pairwise": "Demographic parity, between two groups",
    "dp_to_overall": "Demographic parity, group to overall",
    "eo_full": "Equalized odds, one group against the rest",
}
_SCOPES = {
    "group": "in the group",
    "cell": "in the group and class",
    "all_groups": "in every group",
    "one_vs_rest": "against all other groups",
    "pairwise": "against each other group",
    "overall": "against the overall rate",
}


def public_report(report: PublicReport) -> str:
    """The page to publish, as one HTML document."""
    gaps = [gap for found in report.evaluations.values() for gap in found.between_groups.values()]
    return render(
        "report.html",
        **opening(report),
        settings=_settings(report),
        budget_curve=_budget_curve(report),
        released_CG=_released(report),
        outcomes=OUTCOMES,
        gap_names=GAP_NAMES,
        answered=answered_words,
        small_cells=small_cell_words(report.headline),
        gap_end=scale_end([end for gap in gaps for end in (gap.value, gap.high)]),
        prediction_words={name: prediction_words(found, report.model) for name, found in report.evaluations.items()},
        order_words=_order_words(report.reject_option),
        margin=None if report.voting is None else _margin(report.voting.gate),
        stopped_by_votes=STOPPED_BY_VOTES,
        sanitised_words=_sanitised_words(report.guarantee),
        population=report.private_population,
        population_words=report.private_population and population_words(report.private_population),
    )


def opening(report: PublicReport, without_privacy: WithoutPrivacy | None = None) -> dict[str, Any]:
    """Title, verdict, what was done; ``without_privacy`` for the operator's page alone."""
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
        "verdict": verdict(report.headline, guarantee, without_privacy),
        "earlier": earlier_words(guarantee),
        "why_not": why_not_private(guarantee),
    }


def answered_words(measured: Evaluation) -> str:
    """Of which records rates are."""
    return "all test records" if measured.num_answered == measured.num_records else "answered test records"


def prediction_words(measured: Evaluation, model: str) -> str:
    """How many classes are predicted at all, for a gap is read beside that."""
    if not measured.num_answered:
        return "No record is answered."
    predicted = sum(any(rates[k] > 0 for rates in measured.rates_GC) for k in range(len(measured.class_names)))
    words = f"{count(predicted)} of {count(len(measured.class_names))} classes are predicted for some record."
    said = (*measured.degenerate, *measured.underserved)
    return f"The {model} {'; it '.join(said)}. {words}" if said else words


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
