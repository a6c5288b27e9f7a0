"""The sections that only the operator may see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from html import escape

import numpy as np
import numpy.typing as npt

from fairpate.evaluation import charts
from fairpate.evaluation.page import (
    card,
    cards,
    counted,
    course,
    delta_text,
    epsilon_text,
    percent,
    power_of_ten,
    section,
    table,
)
from fairpate.evaluation.public_page import outcome_legend
from fairpate.evaluation.records import OUTCOMES, PrivateReport
from fairpate.fairness.rates import FloatArray

_FLOOR = 1e-8


def operator_banner() -> str:
    """The warning at the top of the page."""
    return (
        '<div class="banner alarm" role="alert"><b>Operator only. Do not publish.</b>'
        "Numbers on this page depend on the private votes of the teachers and carry no privacy guarantee.</div>"
    )


def ledgers(report: PrivateReport) -> str:
    """The same run under three ledgers: totals and courses."""
    statement = report.public.statement
    totals = {
        "Data-independent": statement.epsilon,
        "Data-dependent": _last(report.epsilon_data_dependent_course_Q),
        "Data-dependent, as in the paper": _last(report.epsilon_as_published_course_Q),
    }
    notes = (
        "Every posed query at its worst case, whatever the votes. May be published.",
        "Everything that was computed, at what these votes make it cost. Private.",
        "As FairPATE’s authors reported theirs: rejections by the fairness gate are free, and a noisy vote counts with "
        "the probability that it is drawn, whether it was or not. No bound; for comparison only.",
    )
    rows = [
        [f"<b>{escape(name)}</b><small>{escape(note)}</small>", f"<b>{epsilon_text(value)}</b>"]
        for (name, value), note in zip(totals.items(), notes, strict=True)
    ]
    courses = (
        report.public.epsilon_course_Q,
        report.epsilon_data_dependent_course_Q,
        report.epsilon_as_published_course_Q,
    )
    curve = charts.curves(
        [
            charts.Curve(name=f"{name}: {epsilon_text(total)}", points=course(epsilon_Q))
            for (name, total), epsilon_Q in zip(totals.items(), courses, strict=True)
        ],
        x_label="queries posed",
        y_label=f"ε at δ = {delta_text(statement.delta)}",
        title="Three ledgers against queries posed",
    )
    return section(
        "Three ledgers for the same run",
        compared_ledgers(*totals.values(), rejected=statement.queries.rejected_fairness),
        cards(
            card(
                "Total",
                f"ε at δ = {delta_text(statement.delta)}, per {statement.unit}, {statement.relation}.",
                table(["ledger", "ε"], rows),
            ),
            card("Course", "After each posed query.", curve),
        ),
    )


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


def query_by_query(report: PrivateReport) -> str:
    """What each query cost and how far the teachers agreed on it."""
    outcomes_Q = np.array(report.outcomes_Q, dtype=object)
    voted_Q = outcomes_Q != "free"
    share_Q = np.asarray(report.plurality_votes_Q, dtype=np.float64) / report.public.num_teachers
    consensus_edges = np.linspace(0, 1, 21)
    consensus = charts.histogram(
        consensus_edges.tolist(),
        _stacks(share_Q, outcomes_Q, consensus_edges),
        x_label="teachers that agree on the most popular label, %",
        y_label="queries",
        title="Consensus of the teachers",
        tick_labels=[(tick / 100, str(tick)) for tick in range(0, 101, 20)],
    )
    cost_Q = np.asarray(report.rdp_Q, dtype=np.float64)
    exponent_Q, edges, labels = _log_bins(cost_Q)
    costs = charts.histogram(
        edges.tolist(),
        _stacks(exponent_Q, outcomes_Q, edges),
        x_label=f"Rényi cost of a query at order {report.rdp_order:g}, nats (logarithmic)",
        y_label="queries",
        title="Data-dependent cost per query",
        tick_labels=labels,
    )
    return section(
        "Query by query",
        _cost_words(cost_Q),
        cards(
            card("Cost per query", "What each query added, from its votes.", outcome_legend() + costs),
            card("Consensus", _consensus_words(share_Q[voted_Q], cost_Q[voted_Q]), outcome_legend() + consensus),
        ),
    )


def _cost_words(cost_Q: FloatArray) -> str:
    """How much of the cost the dearest tenth of the queries makes up, at least one of them."""
    if not cost_Q.sum():
        return "No query has cost anything."
    number = max(1, len(cost_Q) // 10)
    share = percent(float(np.sort(cost_Q)[::-1][:number].sum() / cost_Q.sum()), digits=0)
    return f"The dearest {number} of {counted(len(cost_Q), 'query', 'queries')}: {share} of the cost."


def _consensus_words(share_Q: FloatArray, cost_Q: FloatArray) -> str:
    """Where the middle of the consensus lies, and what the clearer half of the votes made up of the cost."""
    if not len(share_Q):
        return "No query was voted on."
    middle = (
        f"On half of the queries that were voted on, {percent(float(np.median(share_Q)), digits=0)} of the teachers or "
    )
    clearer_Q = np.argsort(-share_Q, kind="stable")[: (len(share_Q) + 1) // 2]
    if not cost_Q.sum():
        return middle + "more agree."
    share = percent(float(cost_Q[clearer_Q].sum() / cost_Q.sum()), digits=0)
    return middle + f"more agree. The {len(clearer_Q)} with the clearest votes made up {share} of the cost."


def _stacks(values_Q: FloatArray, outcomes_Q: npt.NDArray[np.object_], edges: FloatArray) -> list[charts.Stack]:
    return [
        charts.Stack(name=words, css=css, counts=np.histogram(values_Q[outcomes_Q == css], bins=edges)[0].tolist())
        for css, words in OUTCOMES.items()
    ]


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


def _last(epsilon_Q: Sequence[float]) -> float:
    return float(epsilon_Q[-1]) if len(epsilon_Q) else 0.0
