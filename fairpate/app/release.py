"""The one way from ``private/`` to ``public/``: votes go in, labels and a priced statement come out.

The ledger decides what a repeated run may do. It is opened only if it is the ledger behind the labels that were
released; then asking again returns what it holds and draws nothing. What a service asked of it in between is priced
and stated with the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from aggregator.labelling import Ballot, SessionResult, answer_queries
from aggregator.ledger.budget import (
    epsilon_data_independent,
    epsilon_fixed_beforehand,
    publication_fits,
    queries_that_fit,
)
from aggregator.ledger.entries import Charge
from aggregator.ledger.terms import LedgerTerms
from aggregator.mechanism import Mechanism
from aggregator.session import AggregatorSession, sanitised_epsilon
from fairpate.app.admission import answer_admitted
from fairpate.app.ledgers.opened import keys_of, open_ledger
from fairpate.app.publication.reporting import Spending
from fairpate.app.rundir import RunDirectory
from fairpate.app.spending.meter import LedgerMeter, Meter
from fairpate.app.tables import write_labels
from fairpate.config import ConfigError, Noise, StudentConfig
from fairpate.data import Dataset, Split
from fairpate.evaluation.page import epsilon_text
from fairpate.meaning import delta_text
from fairpate.privacy import accountant
from fairpate.privacy.discrete_gaussian import NoiseSource, OsEntropy, SeededSource
from fairpate.privacy.events import Event
from fairpate.privacy.fair_training import of_teachers
from fairpate.privacy.smooth_release import SmoothRelease
from fairpate.steps import Advance
from fairpate.types import STOPPED_BY_VOTES, Budget, GateRule, LabelledSet, QueryOutcomes, Unit
from fairpate.votes_config import BudgetConfig, PublicationConfig, QueriesConfig

_BLOCK = 256
"""Queries of a run that share a transaction, and that one crash can waste."""


@dataclass(frozen=True, kw_only=True)
class ReleasePlan:
    """All that fixes a release of labels before the first vote.

    ``mechanism`` is the method's, its noise perhaps scaled to a target; ``delta`` is what prices are stated at;
    ``unit``: whose change moves one vote; ``student`` learns between the rounds of an admission.
    """

    settings: QueriesConfig
    mechanism: Mechanism
    gate: GateRule
    budget: BudgetConfig | None
    delta: float
    num_teachers: int
    noise: Noise
    seed: int
    student: StudentConfig
    publication: PublicationConfig | None = None
    unit: Unit = "record"

    @property
    def source(self) -> NoiseSource:
        """Where the noise comes from."""
        return OsEntropy() if self.noise == "os_entropy" else SeededSource(self.seed)

    def worst_case(self, num_queries: int) -> Event:
        """What so many queries cost whatever the votes, for the unit that is protected."""
        event = self.mechanism.worst_case(num_queries)
        return of_teachers(event, self.unit)

    def all_events(self, num_queries: int, *, num_classes: int) -> tuple[Event, ...]:
        """What a run that submits so many queries releases, its publication included, whatever the votes."""
        publication = _publication(self, num_classes=num_classes)
        published = () if publication is None else (of_teachers(publication, self.unit),)
        return (self.worst_case(num_queries), *published)

    @property
    def counted_beforehand(self) -> int:
        """How many queries count although fewer may be submitted, as released labels decide; 0 where none do."""
        return (self.settings.num_queries or 0) if self.settings.admission is not None else 0


@dataclass(frozen=True, kw_only=True)
class Release:
    """What came out of the aggregator: labels and outcomes for everybody, spending for the operator.

    ``over_budget`` queries found no room and cost nothing. ``events`` were fixed before the first query: what those
    that were submitted cost, unless their number depends on released labels. ``epsilon_bound`` is the guarantee where
    it is above what the events cost; ``remarks`` qualify it.
    """

    labelled: LabelledSet
    queries: QueryOutcomes
    spending: Spending
    over_budget: int
    events: tuple[Event, ...]
    noise: str
    epsilon_bound: float | None
    remarks: tuple[str, ...]


def choose_queries(dataset: Dataset, settings: QueriesConfig) -> Split:
    """The first public records, each content once: equal records are one query. With admission, all candidates."""
    first_of: dict[str, int] = {}
    for row, key in enumerate(keys_of(dataset.public)):
        first_of.setdefault(key, row)
    wanted = settings.num_queries or len(first_of)
    if wanted > len(first_of):
        raise ConfigError(
            f"aggregator.num_queries: expected at most {len(first_of)}, as many as there are different public "
            f"records, got {wanted}; lower it, or raise data.num_public."
        )
    if settings.admission is not None:
        wanted = len(first_of)
    return dataset.public.take(list(first_of.values())[:wanted])


def check_budget(plan: ReleasePlan, dataset: Dataset, queries: Split) -> int:
    """How many of the planned queries the budget has room for; all, where that depends on votes.

    From public facts alone, and before any teacher is trained. ConfigError for a budget without room for one query, or
    for the publication that is planned beside the queries.
    """
    settings, wanted = plan.settings, plan.settings.num_queries or len(queries)
    if plan.budget is None:
        _publication(plan, num_classes=dataset.num_classes)
        return wanted
    terms = ledger_terms(plan, dataset, ensemble="planned")
    fitting = queries_that_fit(terms, wanted)
    if not fitting:
        raise ConfigError(
            f"aggregator.budget: {_budget_words(terms.budget)} has no room for one query, so nothing could be asked; "
            "raise it, or the noise."
        )
    if settings.admission is None and not publication_fits(terms, num_queries=fitting):
        raise ConfigError(
            f"aggregator.budget: {_budget_words(terms.budget)} has no room for aggregator.publication beside {fitting} "
            "queries; raise it, lower aggregator.num_queries, or leave the publication out."
        )
    return fitting


def _budget_words(budget: Budget) -> str:
    limit = f"{budget.max_queries} queries" if budget.epsilon is None else f"epsilon {budget.epsilon:g}"
    return f"{limit} at delta {delta_text(budget.delta)} ({budget.kind})"


def release_labels(
    run: RunDirectory,
    plan: ReleasePlan,
    dataset: Dataset,
    queries: Split,
    votes: Ballot,
    on_progress: Advance,
    *,
    meter: Meter | None,
) -> Release:
    """Ask the aggregator every query, and write the labels. However often it runs, one release results.

    ``meter`` counts it in the operator's odometer, where it is counted.
    """
    keys = keys_of(queries)
    terms = ledger_terms(plan, dataset, ensemble=votes.ensemble)
    ledger_meter = None
    if meter is not None:
        planned = plan.all_events(check_budget(plan, dataset, queries), num_classes=dataset.num_classes)
        ledger_meter = LedgerMeter(meter, terms, unit=plan.unit, planned=plan.counted_beforehand, plan=planned)
    with open_ledger(run, terms, queries, create=True, meter=ledger_meter) as ledger:
        session = AggregatorSession(ledger, source=plan.source)
        result = _submit(votes, keys, queries, session, plan, dataset, on_progress)
        if not result.replies:
            raise ConfigError(
                f"aggregator.budget: {_budget_words(terms.budget)} has no room for one query, so nothing was asked; "
                "raise it, or the noise."
            )
        published = None if terms.publication is None else session.publish()
        spending = Spending(
            charges_Q=_by_query(ledger.charges, keys),
            terms=terms,
            num_publications=len(ledger.publications),
            published=published,
        )
        if ledger_meter is not None:
            # Room that was held ahead is given back, so that the sum with earlier releases is of what was charged.
            ledger_meter.settle(ledger)
    by_service = len(result.replies) < len(spending.charges_Q)
    # After the odometer is settled and the ledger closed: labels are what becomes visible.
    write_labels(result.labelled, run.labels)
    return _priced(result, spending, plan, by_service=by_service)


def _priced(result: SessionResult, spending: Spending, plan: ReleasePlan, *, by_service: bool) -> Release:
    """The release with its events: every reservation and publication at its full cost, whatever came of it.

    Where a service asked too, only the ledger's budget was fixed before the first query.
    """
    outcomes, submitted = spending.outcomes_Q, spending.submitted(0, len(spending.charges_Q))
    planned: tuple[Event, ...] = (_planned(spending, plan), *spending.publications)
    spent = accountant.least_epsilon([submitted, *spending.publications], target_delta=plan.delta)
    bound = epsilon_fixed_beforehand(spending.terms)
    if bound is not None and not by_service:
        # Neither follows from votes or labels, so that the lesser may be stated.
        bound = min(bound, accountant.least_epsilon(planned, target_delta=plan.delta))
    events: tuple[Event, ...] = (submitted, *spending.publications) if by_service else planned
    return Release(
        labelled=result.labelled,
        queries=QueryOutcomes(
            submitted=len(outcomes),
            answered=outcomes.count("answered"),
            rejected_confidence=outcomes.count("confidence"),
            rejected_fairness=outcomes.count("fairness"),
            refused_free=outcomes.count("free"),
            epsilon_submitted=spent,
            epsilon_sanitised=sanitised_epsilon(spending.published, target_delta=plan.delta),
        ),
        spending=spending,
        over_budget=result.over_budget,
        events=tuple(of_teachers(event, plan.unit) for event in events),
        noise=spending.terms.noise,
        epsilon_bound=bound,
        remarks=_remarks(spent, bound, len(outcomes)),
    )


def _planned(spending: Spending, plan: ReleasePlan) -> Event:
    """What the queries cost whatever labels they give.

    Admission in rounds may submit fewer than configured because of released labels. A reservation that a crash left
    open counts as it is: no label decides over a crash.
    """
    count = spending.num_reservations
    if plan.settings.admission is not None:
        count = max((plan.settings.num_queries or 0) + count - len(spending.charges_Q), count)
    return spending.terms.mechanism.worst_case(count)


def _submit(
    votes: Ballot,
    keys: Sequence[str],
    queries: Split,
    session: AggregatorSession,
    plan: ReleasePlan,
    dataset: Dataset,
    on_progress: Advance,
) -> SessionResult:
    """Algorithm 1, or the same in rounds of admitted queries."""
    if plan.settings.admission is None:
        return answer_queries(
            votes,
            keys=keys,
            session=session,
            block_size=_BLOCK,
            on_progress=lambda done: on_progress(done, len(keys)),
        )
    total = plan.settings.num_queries or len(keys)
    return answer_admitted(
        votes,
        keys=keys,
        queries=queries,
        session=session,
        admission=plan.settings.admission,
        total=total,
        gate=plan.gate,
        student=plan.student,
        num_classes=dataset.num_classes,
        num_groups=dataset.num_groups,
        seed=plan.seed,
        block_size=_BLOCK,
        on_progress=lambda done: on_progress(done, total),
    )


def ledger_terms(plan: ReleasePlan, dataset: Dataset, *, ensemble: str) -> LedgerTerms:
    """What the run's ledger is a ledger of. Without a planned budget the run's queries fit, and one wasted block."""
    settings = plan.settings
    terms = LedgerTerms(
        mechanism=plan.mechanism,
        gate=plan.gate,
        # A stand-in: the limit is what the queries cost, and that is asked of terms.
        budget=Budget(kind="query_count", delta=plan.delta, max_queries=1),
        num_teachers=plan.num_teachers,
        num_classes=dataset.num_classes,
        num_groups=dataset.num_groups,
        noise=plan.source.label,
        ensemble=ensemble,
        unit="record" if plan.unit == "sensitive attribute" else plan.unit,
        publication=_publication(plan, num_classes=dataset.num_classes),
    )
    if plan.budget is not None:
        return replace(terms, budget=plan.budget.at(plan.delta))
    epsilon = epsilon_data_independent(
        terms,
        num_queries=(settings.num_queries or len(choose_queries(dataset, settings))) + _BLOCK,
        num_publications=0 if terms.publication is None else 1,
    )
    budget = Budget(kind="data_independent", delta=plan.delta, epsilon=epsilon)
    return replace(terms, budget=budget)


def _publication(plan: ReleasePlan, *, num_classes: int) -> SmoothRelease | None:
    """The plan to publish. ConfigError where smooth sensitivity does not hold for it."""
    planned = plan.publication
    if planned is None:
        return None
    try:
        release = SmoothRelease(**planned.model_dump())
        plan.mechanism.check_publication(release, num_classes=num_classes)
    except ValueError as error:
        raise ConfigError(f"aggregator.publication: {error}") from error
    return release


def _remarks(epsilon: float, bound: float | None, num_queries: int) -> tuple[str, ...]:
    if bound is None:
        return (STOPPED_BY_VOTES,)
    if bound <= epsilon:
        return ()
    return (
        f"Released labels may have decided how many queries were submitted. The guarantee is the bound that was fixed "
        f"before the first, ε = {epsilon_text(bound)}; ε = {epsilon_text(epsilon)} prices the {num_queries} that were "
        "submitted.",
    )


def _by_query(charges: Sequence[Charge], keys: Sequence[str]) -> list[list[Charge]]:
    """The charges of every query with an outcome, the run's first; those of queries without one go with the first."""
    charges_of: dict[str, list[Charge]] = {key: [] for key in keys}
    for charge in charges:
        charges_of.setdefault(charge.reservation.key, []).append(charge)
    by_query = [of_key for of_key in charges_of.values() if of_key and of_key[-1].outcome is not None]
    # They were charged, so some query must carry them: all queries together are priced by their charges.
    abandoned = [charge for of_key in charges_of.values() if of_key and of_key[-1].outcome is None for charge in of_key]
    return [abandoned + by_query[0], *by_query[1:]] if by_query else []
