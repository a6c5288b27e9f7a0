"""From what a run left to its two pages, and the operator's summary of what was really spent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aggregator.ledger import LedgerTerms
from aggregator.session import SessionResult
from fairpate.app.rundir import RunDirectory, write_json, write_text
from fairpate.evaluation.metrics import Evaluation
from fairpate.evaluation.report import (
    GroupOutcomes,
    Outcome,
    PrivateReport,
    PublicReport,
    private_report,
    public_report,
)
from fairpate.privacy import accountant
from fairpate.privacy.accountant import DEFAULT_ORDERS, ConfidentGnmaxQueries, ConfidentGnmaxVotes
from fairpate.privacy.gnmax import confident_gnmax_rdp
from fairpate.types import Answer, PrivacyStatement, Tail, VoteBatch

FloatArray = npt.NDArray[np.float64]
_MAX_COURSE_POINTS = 200


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What a session spent, query by query, for the operator alone.

    ``charges_Q[i]`` is how often query i was charged: once if votes were touched, again for each reservation that a
    crash left open, 0 if it was refused for free or repeats an earlier query.
    """

    votes: VoteBatch
    session: SessionResult
    charges_Q: npt.NDArray[np.int64]
    terms: LedgerTerms
    target_delta: float
    tail: Tail

    @property
    def outcomes_Q(self) -> list[Outcome]:
        """How each query ended."""
        return ["answered" if isinstance(reply, Answer) else reply.reason for reply in self.session.replies]

    def queries(self, start: int, stop: int) -> ConfidentGnmaxQueries:
        """The data-independent event of queries start .. stop - 1."""
        return ConfidentGnmaxQueries(count=int(self.charges_Q[start:stop].sum()), **self._parameters)

    def votes_drawn(self, start: int, stop: int) -> ConfidentGnmaxVotes:
        """The data-dependent event of the same queries."""
        charged_QC = np.repeat(self.votes.votes_QC[start:stop], self.charges_Q[start:stop], axis=0)
        return ConfidentGnmaxVotes(votes_QC=charged_QC, tail=self.tail, **self._parameters)

    def as_published(self, start: int, stop: int) -> FloatArray:
        """The published code's curve for the same queries: fairness rejections are free, no crash ever happened."""
        posed = self.charges_Q[start:stop] > 0
        event = ConfidentGnmaxVotes(votes_QC=self.votes.votes_QC[start:stop][posed], tail=self.tail, **self._parameters)
        rejected = np.array([outcome == "fairness" for outcome in self.outcomes_Q[start:stop]])[posed]
        return accountant.as_published_rdp(event, fairness_rejected_Q=rejected)

    @property
    def _parameters(self) -> dict[str, Any]:
        return dataclasses.asdict(self.terms.mechanism)


def write_reports(
    run: RunDirectory,
    *,
    title: str,
    num_public_records: int,
    spending: Spending,
    statement: PrivacyStatement,
    evaluations: dict[str, Evaluation],
) -> None:
    """Write ``public/report.html``, ``private/report.html`` and ``private/costs.json``."""
    public = PublicReport(
        title=title,
        statement=statement,
        mechanism=spending.terms.mechanism,
        gate=spending.terms.gate,
        num_private_records=None,
        num_teachers=spending.terms.num_teachers,
        num_public_records=num_public_records,
        epsilon_course_Q=_course(spending, lambda a, b: accountant.rdp([spending.queries(a, b)])),
        outcomes=_outcomes_by_group(spending, next(iter(evaluations.values()))),
        answered_GC=_answers_by_group(spending),
        evaluations=evaluations,
    )
    private = _private_report(public, spending)
    write_json(run.costs, _costs(private))
    write_text(run.private_report, private_report(private))
    write_text(run.public_report, public_report(public))


def _private_report(public: PublicReport, spending: Spending) -> PrivateReport:
    posed = len(spending.charges_Q)
    everything = spending.votes_drawn(0, posed)
    best = accountant.epsilon_data_dependent([everything], target_delta=spending.target_delta)
    once_Q = confident_gnmax_rdp(
        spending.votes.votes_QC,
        orders_A=[best.order],
        tail=spending.tail,
        **dataclasses.asdict(spending.terms.mechanism),
    )[:, 0]
    return PrivateReport(
        public=public,
        rdp_order=best.order,
        rdp_Q=(once_Q * spending.charges_Q).tolist(),
        epsilon_data_dependent_course_Q=_course(
            spending, lambda a, b: accountant.rdp_data_dependent([spending.votes_drawn(a, b)])
        ),
        epsilon_as_published_course_Q=_course(spending, spending.as_published),
        plurality_votes_Q=spending.votes.votes_QC.max(axis=1).tolist(),
        outcomes_Q=spending.outcomes_Q,
    )


def _costs(private: PrivateReport) -> dict[str, Any]:
    """The last point of each course: what the operator may know and nobody may publish."""
    statement = private.public.statement
    return {
        "unit": statement.unit,
        "relation": statement.relation,
        "delta": statement.delta,
        "epsilon_data_independent": statement.epsilon_data_independent,
        "epsilon_data_dependent": private.epsilon_data_dependent_course_Q[-1],
        "epsilon_as_published": private.epsilon_as_published_course_Q[-1],
        "order": private.rdp_order,
    }


def _course(spending: Spending, price: Callable[[int, int], FloatArray]) -> Sequence[float]:
    """Epsilon after each query: exact at up to 200 of them, the last included, straight lines between."""
    posed = len(spending.charges_Q)
    ends = np.unique(np.linspace(1, posed, min(posed, _MAX_COURSE_POINTS)).round().astype(int))
    curve_A, epsilons, start = np.zeros(len(DEFAULT_ORDERS)), [], 0
    for end in ends.tolist():
        curve_A = curve_A + price(start, end)
        epsilons.append(accountant.epsilon_of_curve(curve_A, DEFAULT_ORDERS, target_delta=spending.target_delta)[0])
        start = end
    course: list[float] = np.interp(np.arange(1, posed + 1), ends, epsilons).tolist()
    return course


def _outcomes_by_group(spending: Spending, evaluation: Evaluation) -> list[GroupOutcomes]:
    groups, outcomes = spending.votes.groups_Q, np.array(spending.outcomes_Q)

    def count(group: int, outcome: Outcome) -> int:
        return int(((groups == group) & (outcomes == outcome)).sum())

    return [
        GroupOutcomes(
            name=name,
            answered=count(group, "answered"),
            rejected_confidence=count(group, "confidence"),
            rejected_fairness=count(group, "fairness"),
            refused_free=count(group, "free"),
        )
        for group, name in enumerate(evaluation.group_names)
    ]


def _answers_by_group(spending: Spending) -> list[list[int]]:
    counts_GC = np.zeros((spending.terms.num_groups, spending.terms.num_classes), dtype=np.int64)
    labelled = spending.session.labelled
    np.add.at(counts_GC, (labelled.groups, labelled.labels), 1)
    counts: list[list[int]] = counts_GC.tolist()
    return counts
