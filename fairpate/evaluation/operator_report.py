"""The operator's page of a run with votes: what it really cost, query by query. It depends on votes: never publish it.

Beside the published cost stand the data-dependent one and the ledger as FairPATE's authors published theirs, where a
label that the fairness gate rejects costs nothing. What a query cost is shown as a share of its worst case, which is
what was published for it: close votes cost nearly all of it, clear ones little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from fairpate.evaluation import charts
from fairpate.evaluation.page import count, counted, course, epsilon_text, percent, render
from fairpate.evaluation.records import OUTCOMES, PrivateReport, Voting
from fairpate.evaluation.report import opening
from fairpate.fairness.rates import FloatArray
from fairpate.meaning import delta_text
from fairpate.query_costs import cost_words, dearest, shares_of_worst, votes_matter

_LEDGERS = {
    "Data-independent": "Every submitted query at its worst case, whatever the votes. May be published.",
    "Data-dependent": "Everything that was computed, at what these votes make it cost. Private.",
    "Data-dependent, as in the paper": (
        "As FairPATE’s authors reported theirs: rejections by the fairness gate are free, and a noisy vote counts with "
        "the probability that it is drawn, whether it was or not. No bound; for comparison only."
    ),
}


@dataclass(frozen=True, kw_only=True)
class ChargedQuery:
    """One row of the largest charges; ``number`` counts submitted queries from 1."""

    number: int
    group: str
    outcome: str
    votes: str
    of_worst: float
    of_total: float
    when: str


@dataclass(frozen=True, kw_only=True)
class GroupVotes:
    """How the voters agreed on one group's queries, and what these made up of the cost."""

    name: str
    num_queries: int
    agreement: float
    of_total: float


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
    queries = _query_by_query(report, voting)
    # Where no price depends on votes there is one ledger: the paper's rule is of a mechanism that this one is not.
    are_one = all(np.array_equal(courses[0], other) for other in courses[1:])
    num_ledgers = 1 if are_one and not queries["costs"] else len(_LEDGERS)
    return render(
        "operator.html",
        **opening(public, report.without_privacy),
        ledgers=list(zip(_LEDGERS.items(), totals, strict=True))[:num_ledgers],
        compared=compared_ledgers(*totals, rejected=voting.rejected_fairness)
        if num_ledgers > 1
        else one_ledger(voting.rejected_fairness),
        curve=charts.curves(
            [
                charts.Curve(name=f"{name}: {epsilon_text(total)}", points=course(epsilon_Q))
                for name, total, epsilon_Q in list(zip(_LEDGERS, totals, courses, strict=True))[:num_ledgers]
            ],
            x_label="submitted queries",
            y_label=f"ε at δ = {delta_text(public.guarantee.delta)}",
            title=f"{'Three ledgers' if num_ledgers > 1 else 'The ledger'} against submitted queries",
        ),
        **queries,
        outcomes=OUTCOMES,
    )


def one_ledger(rejected: int) -> str:
    """What is said of a run whose price does not depend on votes."""
    gates = f" {counted(rejected, 'rejection')} by the fairness gate cost the same as an answer." if rejected else ""
    return f"What was released costs the same whatever the votes, and the published ε is the whole cost.{gates}"


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
    votes_Q = np.asarray(report.plurality_votes_Q, dtype=np.float64)
    share_Q = votes_Q / np.maximum(report.num_votes_Q, 1)
    cost_Q, worst_Q = (np.asarray(of_Q, dtype=np.float64) for of_Q in (report.rdp_Q, report.rdp_worst_Q))
    of_worst_Q = shares_of_worst(cost_Q, worst_Q)
    voted_Q = outcomes_Q != "free"
    edges = np.linspace(0, 1, 21)
    ticks = [(tick / 100, str(tick)) for tick in range(0, 101, 20)]
    varies = votes_matter(of_worst_Q, voted_Q)
    return {
        "cost_words": cost_words(cost_Q, of_worst_Q, varies=varies),
        "consensus_words": _consensus_words(share_Q[voted_Q], cost_Q[voted_Q], voting.voters),
        "voters_words": _voters_words(report.num_votes_Q, voting),
        "time_words": _time_words(report.at_Q, report.callers_Q),
        "charges": _largest(report, cost_Q, of_worst_Q) if varies else [],
        "by_group": _by_group(report, share_Q, cost_Q, voted_Q),
        "costs": charts.histogram(
            edges.tolist(),
            _stacks(of_worst_Q, outcomes_Q, edges),
            x_label=f"cost of a query, % of its worst case (Rényi, order {report.rdp_order:g})",
            y_label="queries",
            title="Cost per query",
            ticks=ticks,
        )
        if varies
        else "",
        "consensus": charts.histogram(
            edges.tolist(),
            _stacks(share_Q, outcomes_Q, edges),
            x_label=f"{voting.voters} that agree on the most popular label, %",
            y_label="queries",
            title=f"Consensus of the {voting.voters}",
            ticks=ticks,
        ),
    }


def _consensus_words(share_Q: FloatArray, cost_Q: FloatArray, voters: str) -> str:
    """Where the middle of the consensus lies, and what the clearer half of the votes made up of the cost."""
    if not len(share_Q):
        return "No query was voted on."
    median = float(np.median(share_Q))
    agree = f"all {voters} agree" if median == 1 else f"{percent(median, digits=0)} of the {voters} or more agree"
    middle = f"On half of the queries that were voted on, {agree}."
    clearer_Q = np.argsort(-share_Q, kind="stable")[: (len(share_Q) + 1) // 2]
    if not cost_Q.sum() or not math.isfinite(cost_Q.sum()):
        return middle
    share = percent(float(cost_Q[clearer_Q].sum() / cost_Q.sum()), digits=0)
    return f"{middle} The {count(len(clearer_Q))} with the clearest votes made up {share} of the cost."


def _voters_words(num_votes_Q: Sequence[int], voting: Voting) -> str:
    """Whether all voters voted, where all should; else how many were near enough."""
    if not num_votes_Q:
        return "Nobody was asked."
    least, most = min(num_votes_Q), max(num_votes_Q)
    if voting.voters != "teachers":
        return f"{_upper(voting.voters)} that voted on a query: {count(least)} to {count(most)}."
    if least == most == voting.num_teachers:
        return f"All {count(voting.num_teachers)} teachers voted on every query."
    fewer = sum(votes < voting.num_teachers for votes in num_votes_Q)
    return (
        f"Not all {count(voting.num_teachers)} teachers voted on {counted(fewer, 'query', 'queries')}: "
        f"{count(least)} at least."
    )


def _time_words(at_Q: Sequence[float], callers_Q: Sequence[str]) -> str:
    """When the queries were charged, and by whom."""
    known = [at_s for at_s in at_Q if at_s]
    if not known:
        return "When the queries were charged was not recorded."
    first, last = (datetime.fromtimestamp(at_s, UTC) for at_s in (min(known), max(known)))
    until = f"{last:%H:%M:%S}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M:%S}"
    asked = sum(bool(caller) for caller in callers_Q)
    whose = f"{counted(asked, 'query', 'queries')} came from callers of a service" if asked else "All are the run’s own"
    return f"Charged from {first:%Y-%m-%d %H:%M:%S} to {until} (UTC). {whose}."


def _largest(report: PrivateReport, cost_Q: FloatArray, of_worst_Q: FloatArray) -> list[ChargedQuery]:
    """Those that cost most, the dearest first."""
    total = float(cost_Q.sum())
    names = [group.name for group in report.public.voting.outcomes] if report.public.voting else []
    return [
        ChargedQuery(
            number=query + 1,
            group=names[report.groups_Q[query]],
            outcome=OUTCOMES[report.outcomes_Q[query]],
            votes=f"{report.plurality_votes_Q[query]} : {report.runner_up_votes_Q[query]}",
            of_worst=float(of_worst_Q[query]),
            of_total=float(cost_Q[query]) / total,
            when=_moment(report.at_Q[query]),
        )
        for query in dearest(cost_Q)
    ]


def _moment(at_s: float) -> str:
    # Day and time may stand on two lines where the column is narrow; neither is broken itself.
    return f"{datetime.fromtimestamp(at_s, UTC):%Y\u2011%m\u2011%d %H:%M:%S}" if at_s else "not recorded"


def _by_group(
    report: PrivateReport, share_Q: FloatArray, cost_Q: FloatArray, voted_Q: npt.NDArray[np.bool_]
) -> list[GroupVotes]:
    """Median agreement and share of the cost of each group's queries."""
    voting, groups_Q, total = report.public.voting, np.asarray(report.groups_Q, dtype=np.int64), float(cost_Q.sum())
    assert voting is not None
    found = []
    for group, outcomes in enumerate(voting.outcomes):
        of_group = groups_Q == group
        voted = share_Q[of_group & voted_Q]
        found.append(
            GroupVotes(
                name=outcomes.name,
                num_queries=int(of_group.sum()),
                agreement=float(np.median(voted)) if len(voted) else math.nan,
                of_total=float(cost_Q[of_group].sum()) / total if total and math.isfinite(total) else math.nan,
            )
        )
    return found


def _stacks(values_Q: FloatArray, outcomes_Q: npt.NDArray[np.object_], edges: FloatArray) -> Mapping[str, list[int]]:
    return {outcome: np.histogram(values_Q[outcomes_Q == outcome], bins=edges)[0].tolist() for outcome in OUTCOMES}


def _upper(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}"
