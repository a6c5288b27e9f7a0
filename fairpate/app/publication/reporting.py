"""From what a run left to its two pages, and the operator's summary of what was really spent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aggregator.ledger.entries import Charge
from aggregator.ledger.terms import LedgerTerms
from fairpate import __version__
from fairpate.app.assess import Assessment
from fairpate.app.publication.card import guarantee_of
from fairpate.app.rundir import RunDirectory, write_text
from fairpate.evaluation.metrics import Evaluation, WithoutPrivacy
from fairpate.evaluation.operator_report import private_report
from fairpate.evaluation.page import made_words
from fairpate.evaluation.private_population import PrivatePopulation
from fairpate.evaluation.report import (
    GroupOutcomes,
    Outcome,
    PrivateReport,
    PublicReport,
    Voting,
    public_report,
)
from fairpate.methods import method_title
from fairpate.privacy import accountant
from fairpate.privacy.accountant import DEFAULT_ORDERS
from fairpate.privacy.conversion import epsilon_of_curve
from fairpate.privacy.events import Event
from fairpate.privacy.smooth_release import SanitisedRdp, SmoothRelease
from fairpate.steps import stepwise
from fairpate.types import IntArray, PrivacyStatement, Relation, Unit

FloatArray = npt.NDArray[np.float64]
_MAX_COURSE_POINTS, _MAX_COMPOSED_POINTS = 200, 8


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What a ledger spent, query by query; all of it but :meth:`submitted` is for the operator alone.

    ``charges_Q[i]`` are the ledger's reservations for query i: one with its outcome, and before it one for each that
    a crash left open. ``published`` is what may be known of the data-dependent privacy cost, if it is not out of date.
    """

    charges_Q: Sequence[Sequence[Charge]]
    terms: LedgerTerms
    num_publications: int = 0
    published: SanitisedRdp | None = None

    @property
    def publications(self) -> list[SmoothRelease]:
        """The events of having published prices."""
        return [] if self.terms.publication is None else [self.terms.publication] * self.num_publications

    @property
    def target_delta(self) -> float:
        """The delta at which prices are stated."""
        return self.terms.budget.delta

    @property
    def outcomes_Q(self) -> list[Outcome]:
        """How each query ended."""
        verdicts = [charges[-1].outcome.verdict for charges in self.charges_Q if charges[-1].outcome is not None]
        return ["answered" if verdict == "answer" else verdict for verdict in verdicts]

    @property
    def num_reservations(self) -> int:
        """How many queries were charged, those that a crash left open included."""
        return sum(len(charges) for charges in self.charges_Q)

    def submitted(self, start: int, stop: int) -> Event:
        """Queries start .. stop - 1 at the price fixed before they were asked: every reservation in full."""
        return self.terms.mechanism.worst_case(sum(len(charges) for charges in self.charges_Q[start:stop]))

    def drawn(self, start: int, stop: int) -> Event:
        """The votes that the same queries touched, as the ledger holds them; free refusals touched none."""
        touched = [
            charge.reservation.votes
            for charges in self.charges_Q[start:stop]
            for charge in charges
            if charge.outcome is None or charge.outcome.is_charged
        ]
        return self.terms.mechanism.realised(self._votes(touched))

    def as_in_paper(self, start: int, stop: int) -> FloatArray:
        """The published code's curve for the same queries: fairness rejections are free, and no crash ever happened."""
        ended = [
            (charges[-1].reservation.votes, charges[-1].outcome.verdict)
            for charges in self.charges_Q[start:stop]
            if charges[-1].outcome is not None and charges[-1].outcome.is_charged
        ]
        rejected = np.array([verdict == "fairness" for _, verdict in ended], dtype=np.bool_)
        return self.terms.mechanism.as_in_paper_rdp(self._votes([votes for votes, _ in ended]), rejected_Q=rejected)

    def _votes(self, rows: Sequence[Sequence[int]]) -> IntArray:
        return np.array(rows, dtype=np.int64).reshape(len(rows), self.terms.num_classes)


def write_reports(
    run: RunDirectory,
    *,
    title: str,
    num_public_records: int,
    spending: Spending | None,
    statement: PrivacyStatement,
    assessment: Assessment,
    num_training_labels: int | None,
    private_population: PrivatePopulation | None,
    without_privacy: WithoutPrivacy | None,
) -> None:
    """Write ``public/report.html``, and ``private/report.html`` where queries were spent."""
    evaluations = assessment.evaluations
    if spending is None:  # without teachers nobody calls it a student
        evaluations = {name.replace("student", "model"): found for name, found in evaluations.items()}
    public = PublicReport(
        title=title,
        method=method_title(statement.method),
        guarantee=guarantee_of(statement),
        voting=None if spending is None else _voting(spending, statement, assessment.headline, num_public_records),
        evaluations=evaluations,
        reject_option=assessment.reject_option,
        num_training_labels=num_training_labels,
        private_population=private_population,
        made=made_words(run.made_on, __version__),
    )
    if spending is not None:
        write_text(run.private_report, private_report(_private_report(public, spending, without_privacy)))
    write_text(run.public_report, public_report(public))


def _voting(spending: Spending, statement: PrivacyStatement, headline: Evaluation, num_public_records: int) -> Voting:
    queries, terms = statement.queries, spending.terms
    assert queries is not None
    return Voting(
        mechanism=terms.mechanism.describe(),
        gate=terms.gate,
        num_teachers=terms.num_teachers,
        voters=terms.mechanism.voters,
        num_public_records=num_public_records,
        queries_submitted=queries.submitted,
        answered=queries.answered,
        rejected_confidence=queries.rejected_confidence,
        rejected_fairness=queries.rejected_fairness,
        refused_free=queries.refused_free,
        epsilon_course_Q=_course_beforehand(spending),
        outcomes=_outcomes_by_group(spending, headline),
        answered_GC=_answers_by_group(spending),
    )


def _private_report(public: PublicReport, spending: Spending, without_privacy: WithoutPrivacy | None) -> PrivateReport:
    submitted = range(len(spending.charges_Q))
    events: list[Event] = [spending.drawn(0, len(submitted)), *spending.publications]
    best = accountant.epsilon_data_dependent(events, target_delta=spending.target_delta)
    depends_on_votes = events[0].data_dependent
    worst = float(accountant.rdp([spending.terms.mechanism.worst_case(1)], [best.order])[0])
    assert public.voting is not None
    beforehand_Q = public.voting.epsilon_course_Q
    return PrivateReport(
        public=public,
        rdp_order=best.order,
        rdp_Q=[
            float(accountant.rdp_data_dependent([spending.drawn(query, query + 1)], [best.order])[0])
            for query in stepwise(submitted)
        ],
        epsilon_data_dependent_course_Q=_course(
            spending,
            lambda a, b: accountant.rdp_data_dependent([spending.drawn(a, b)]),
            accountant.rdp(spending.publications),
        )
        if depends_on_votes
        else beforehand_Q,
        epsilon_as_in_paper_course_Q=_course(spending, spending.as_in_paper) if depends_on_votes else beforehand_Q,
        rdp_worst_Q=[worst * len(charges) for charges in spending.charges_Q],
        outcomes_Q=spending.outcomes_Q,
        without_privacy=without_privacy,
        **_votes_of(spending),
    )


def _votes_of(spending: Spending) -> dict[str, Any]:
    """How each query was voted on, for whom, when and who asked."""
    last_Q = [charges[-1].reservation for charges in spending.charges_Q]
    ranked_Q = [sorted(reservation.votes, reverse=True) for reservation in last_Q]
    return {
        "plurality_votes_Q": [votes[0] for votes in ranked_Q],
        "runner_up_votes_Q": [votes[1] for votes in ranked_Q],
        "num_votes_Q": [sum(votes) for votes in ranked_Q],
        "groups_Q": [reservation.group for reservation in last_Q],
        "at_Q": [reservation.at_s for reservation in last_Q],
        "callers_Q": [reservation.asker.caller for reservation in last_Q],
    }


def costs(spending: Spending, *, unit: Unit, relation: Relation) -> dict[str, Any]:
    """What was really spent: the operator may know it and nobody may publish it."""
    delta, submitted = spending.target_delta, len(spending.charges_Q)
    events: list[Event] = [spending.drawn(0, submitted), *spending.publications]
    price = accountant.epsilon_data_dependent(events, target_delta=delta)
    as_in_paper = epsilon_of_curve(spending.as_in_paper(0, submitted), DEFAULT_ORDERS, target_delta=delta)[0]
    beforehand = accountant.least_epsilon(
        [spending.submitted(0, submitted), *spending.publications], target_delta=delta
    )
    return {
        "unit": unit,
        "relation": relation,
        "delta": delta,
        "epsilon_data_independent": beforehand,
        # What does not depend on votes may have a tighter price than curves give.
        "epsilon_data_dependent": price.epsilon if events[0].data_dependent else beforehand,
        "epsilon_as_in_paper": as_in_paper if events[0].data_dependent else beforehand,
        "order": price.order,
    }


def _course_beforehand(spending: Spending) -> Sequence[float]:
    """Epsilon after each query, whatever the votes: as :func:`_course`, or by loss distributions where there are."""
    submitted, publications = len(spending.charges_Q), spending.publications
    if not accountant.has_loss_distributions([spending.submitted(0, submitted), *publications]):
        return _course(spending, lambda a, b: accountant.rdp([spending.submitted(a, b)]), accountant.rdp(publications))
    # Composing is slow, and the course bends most at its start.
    ends = np.unique(np.ceil(submitted * np.linspace(0, 1, _MAX_COMPOSED_POINTS + 1)[1:] ** 2).astype(int)).tolist()
    epsilons = [
        accountant.least_epsilon([spending.submitted(0, end), *publications], target_delta=spending.target_delta)
        for end in stepwise(ends)
    ]
    course: list[float] = np.interp(np.arange(1, submitted + 1), ends, epsilons).tolist()
    return course


def _course(
    spending: Spending, price: Callable[[int, int], FloatArray], before_A: FloatArray | None = None
) -> Sequence[float]:
    """Epsilon after each query: exact at up to 200 of them, the last included, straight lines between.

    ``before_A`` is spent from the start: a publication that was planned.
    """
    submitted = len(spending.charges_Q)
    ends = np.unique(np.linspace(1, submitted, min(submitted, _MAX_COURSE_POINTS)).round().astype(int))
    curve_A = np.zeros(len(DEFAULT_ORDERS)) if before_A is None else before_A
    epsilons, start = [], 0
    for end in stepwise(ends.tolist()):
        # Curves add up, so that each query is priced once, not again for every point after it.
        curve_A = curve_A + price(start, end)
        epsilons.append(epsilon_of_curve(curve_A, DEFAULT_ORDERS, target_delta=spending.target_delta)[0])
        start = end
    course: list[float] = np.interp(np.arange(1, submitted + 1), ends, epsilons).tolist()
    return course


def _outcomes_by_group(spending: Spending, evaluation: Evaluation) -> list[GroupOutcomes]:
    groups = np.array([charges[-1].reservation.group for charges in spending.charges_Q])
    outcomes = np.array(spending.outcomes_Q)

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
    counts = [[0] * spending.terms.num_classes for _ in range(spending.terms.num_groups)]
    for charges in spending.charges_Q:
        settled = charges[-1].outcome
        if settled is not None and settled.label is not None:
            counts[charges[-1].reservation.group][settled.label] += 1
    return counts
