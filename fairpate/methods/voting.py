"""Methods whose voters answer public queries: the plan of the queries, the release of labels, and their cost.

With ``target.epsilon``, both noises of ``aggregator.mechanism`` are multiplied by the least factor at which the queries
cost at most the target, for any votes. Without a target the noise is as configured, and ``aggregator.budget`` may limit
the cost. Its kind ``data_dependent``, as in the papers, stops when the data-dependent privacy cost reaches the limit.
Then the number of queries leaks information about votes, so the data-independent cost of the queries submitted is
published, with a remark in the statement.

**Labels.** This module is the only way from ``private/`` to ``public/`` for a method whose voters answer public
queries: it turns votes into released labels and their events. A repeated query gets the answer stored in the ledger,
without new noise. Once labels were released, a missing or incomplete ledger is never replaced: its charges would be
forgotten.

Queries may be submitted in rounds: after each round, a student of the labels released so far determines the next
queries. Only public records, released labels and the run's seed determine them: this is free, and an interrupted run
submits the same queries again.

Shapes: N records, Q queries, C classes, G groups.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from aggregator import session as sessions
from aggregator.ledger import Charge, LedgerTerms
from aggregator.mechanism import ConfidentCounts, ConfidentGnmax, Mechanism
from aggregator.session import AggregatorSession, Ballot, SessionResult
from fairpate import config as configuration
from fairpate import types
from fairpate.config import ConfigError, Noise, QueriesConfig
from fairpate.data import Dataset, Split
from fairpate.fairness.gate import DemographicParityGate
from fairpate.lazy import torch
from fairpate.methods.base import Audited, DrawsNoise, ExpectedVotes, Price, RunLog, Trained, Training, price
from fairpate.methods.learning import fit_student, public_records, require_labels
from fairpate.methods.noisy_counts import NoisyCounts, ServiceRule
from fairpate.pages import delta_text, epsilon_text
from fairpate.privacy import accountant
from fairpate.privacy.accountant import DEFAULT_ORDERS, Event, epsilon_of_curve
from fairpate.privacy.audit_bounds import Shadows
from fairpate.privacy.discrete_gaussian import NoiseSource, OsEntropy, SeededSource
from fairpate.privacy.mechanism_events import of_teachers
from fairpate.releases.directory import RunDirectory, write_json, write_labels
from fairpate.releases.run_ledger import LedgerMeter, keys_of, open_ledger
from fairpate.report import records
from fairpate.types import GateRule, IntArray, LabelledSet, VoteBatch
from teachers.work import PoolError

NO_GATE = GateRule(max_disparity=math.inf, min_count=0)


@dataclass(frozen=True, kw_only=True)
class StandingVoters:
    """The voters of a service that answers further queries after a run, represented by functions.

    ``ensemble`` is a digest of all that determines their votes, for the ledger. ``ask`` returns their votes on records,
    given features (Q, ...) and names, and raises if they fail. ``collected``: the votes that the run has stored.
    ``are_answering`` returns, without waiting, whether they answer, and ``close`` ends them.
    """

    ensemble: str
    ask: Callable[[npt.NDArray[np.generic], Sequence[str]], IntArray]
    are_answering: Callable[[], bool] = lambda: True
    close: Callable[[], None] = lambda: None
    collected: VoteBatch | None = None

    @cached_property
    def _row_of(self) -> dict[str, IntArray]:
        votes = self.collected
        return {} if votes is None else dict(zip(votes.record_ids, votes.votes_QC, strict=True))

    def count_votes(self, questions: Sequence[sessions.Question]) -> IntArray:
        """Return the votes (Q, C) on ``questions``: those stored by the run, and the missing ones from all voters in
        one call. VotesUnavailableError unless every voter voted on each."""
        # The run's own votes first: teachers on another machine may vote otherwise, because they round otherwise.
        rows = [self._row_of.get(question.query.record_id) for question in questions]
        missing = [i for i, row in enumerate(rows) if row is None]
        if missing:
            features = np.stack([questions[i].features for i in missing])
            try:
                votes_QC = self.ask(features, [questions[i].query.record_id for i in missing])
            except PoolError as error:
                raise sessions.VotesUnavailableError(str(error)) from error
            for i, row in zip(missing, votes_QC, strict=True):
                rows[i] = row
        return np.array(rows, dtype=np.int64)


def digest_of_records(settings: object, *arrays: torch.Tensor) -> str:
    """Return a digest, sixteen hexadecimal digits, of ``settings`` (as JSON) and of ``arrays`` with values of records.

    The digest depends on private records and is not to be published.
    """
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=8)
    for array in arrays:
        digest.update(array.numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Spending:
    """The charges of answered queries in a ledger, by query. They depend on votes, so they are for the operator only,
    except the result of :meth:`submitted`.

    ``charges_Q[i]`` are the ledger's charges for query i: one for each attempt that a crash interrupted, then one with
    the outcome.
    """

    charges_Q: Sequence[Sequence[Charge]]
    terms: LedgerTerms

    @property
    def outcomes_Q(self) -> list[records.Outcome]:
        """The outcome of each query."""
        verdicts = [charges[-1].outcome.verdict for charges in self.charges_Q if charges[-1].outcome is not None]
        return ["answered" if verdict == "answer" else verdict for verdict in verdicts]

    def submitted(self, start: int, stop: int) -> Event:
        """Return the data-independent event of queries start .. stop - 1. It charges a query in full for each
        attempt to answer it: one, and one more for every attempt that a crash interrupted."""
        attempts = sum(len(charges) for charges in self.charges_Q[start:stop])
        return accountant.of_unit(self.terms.mechanism.worst_case(attempts), self.terms.unit)

    @property
    def beside_rdp(self) -> npt.NDArray[np.float64]:
        """The Renyi curve of the releases beside the queries; zeros without any."""
        beside = self.terms.beside
        return accountant.rdp(beside) if beside else np.zeros(len(DEFAULT_ORDERS))

    def drawn(self, start: int, stop: int) -> Event:
        """Return the data-dependent event of queries start .. stop - 1, with the votes on them; queries that were
        refused at no privacy cost are left out."""
        touched = [
            charge.votes
            for charges in self.charges_Q[start:stop]
            for charge in charges
            if charge.outcome is None or charge.outcome.is_charged
        ]
        votes_QC = np.array(touched, dtype=np.int64).reshape(-1, self.terms.num_classes)
        return accountant.of_unit(self.terms.mechanism.realised(votes_QC), self.terms.unit)

    def as_in_paper(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        """Return the Renyi curve that the published code computes for the same queries, which is NOT a valid cost.

        It charges nothing for fairness rejections and ignores attempts that a crash interrupted.
        """
        ended = [
            (charges[-1].votes, charges[-1].outcome.verdict)
            for charges in self.charges_Q[start:stop]
            if charges[-1].outcome is not None and charges[-1].outcome.is_charged
        ]
        rejected = np.array([verdict == "fairness" for _, verdict in ended], dtype=np.bool_)
        votes_QC = np.array([votes for votes, _ in ended], dtype=np.int64).reshape(-1, self.terms.num_classes)
        return self.terms.mechanism.as_in_paper_rdp(votes_QC, rejected_Q=rejected)


def costs(spending: Spending, *, unit: types.Unit, relation: types.Relation) -> dict[str, Any]:
    """Return the data-dependent epsilon of the queries and, for comparison, their data-independent epsilon and the
    epsilon that FairPATE's authors compute in their published code. They are for the operator only and must not be
    published."""
    delta, submitted = spending.terms.budget.delta, len(spending.charges_Q)
    drawn, beside = spending.drawn(0, submitted), spending.terms.beside
    price = accountant.epsilon_data_dependent([drawn, *beside], target_delta=delta)
    as_in_paper_A = spending.as_in_paper(0, submitted) + spending.beside_rdp
    as_in_paper = epsilon_of_curve(as_in_paper_A, DEFAULT_ORDERS, target_delta=delta)[0]
    beforehand = accountant.least_epsilon([spending.submitted(0, submitted), *beside], target_delta=delta)
    return {
        "unit": unit,
        "relation": relation,
        "delta": delta,
        "epsilon_data_independent": beforehand,
        # An event that does not depend on votes may have a loss distribution, which is usually tighter than its curve.
        "epsilon_data_dependent": price.epsilon if drawn.data_dependent else beforehand,
        "epsilon_as_in_paper": as_in_paper if drawn.data_dependent else beforehand,
        "order": price.order,
    }


_BLOCK = 256
"""The number of queries that share a transaction; a crash may leave so many charged without an answer."""


@dataclass(frozen=True, kw_only=True)
class QueryPlan:
    """The plan of a release of labels, fixed before the first vote.

    - ``method``, ``dataset``: the method, and the data set that its voters and queries are from.
    - ``queries``: the public records that are submitted as queries.
    - ``mechanism``: the mechanism that turns votes into a label, with noise scaled to the target if there is one.
    - ``unit``: the unit of privacy; one unit changes at most one vote on each query.
    - ``counted_beforehand``: the number of queries that are charged at the start, if released labels may decide to
      submit fewer; otherwise 0.
    - ``beside``: the events of the other releases of the same target.
    """

    method: VotingMethod
    dataset: Dataset
    queries: Split
    mechanism: Mechanism
    budget: configuration.BudgetConfig | None
    unit: types.Unit
    counted_beforehand: int
    beside: tuple[Event, ...] = ()

    def worst_case(self, num_queries: int) -> list[Event]:
        """Return the events of ``num_queries`` queries, whose cost for the protected unit holds for any votes, and of
        the releases beside them."""
        return [of_teachers(self.mechanism.worst_case(num_queries), self.unit), *self.beside]

    def count_fitting(self) -> int:
        """Return the number of planned queries for which the budget has room. If votes decide when the budget ends,
        return the number of all planned queries.

        So the result depends on public facts only, and is known before any teacher is trained. ConfigError for a budget
        without room for one query.
        """
        wanted = self.method.aggregator.num_queries or len(self.queries)
        # Without a budget the ledger gets one that has room for all.
        if self.budget is None:
            return wanted
        terms = self.terms("planned")
        fitting = sessions.queries_that_fit(terms, wanted)
        if not fitting:
            raise _no_room(terms.budget, "no query could be submitted")
        return fitting

    def terms(self, ensemble: str) -> LedgerTerms:
        """Return the terms of the run's ledger (mechanism, budget and voters); ``ensemble`` is the digest of the
        voters.

        If no budget is configured, the ledger's budget has room for the run's queries and one more block of queries: a
        crash may interrupt a block, whose queries are then charged twice.
        """
        delta = self.method.target.delta
        terms = LedgerTerms(
            mechanism=self.mechanism,
            gate=self.method.gate,
            # A placeholder: the limit follows from the cost of the queries, which is computed from terms.
            budget=types.QueryBudget(kind="query_count", delta=delta, max_queries=1),
            num_teachers=self.method.num_voters,
            num_classes=self.dataset.num_classes,
            num_groups=self.dataset.num_groups,
            noise=self.method.source.label,
            ensemble=ensemble,
            # A changed attribute moves one vote of a query, as a record does, and the ledger prices both alike.
            unit="record" if self.unit == "sensitive attribute" else self.unit,
            beside=self.beside,
        )
        if self.budget is not None:
            return replace(terms, budget=self.budget.at(delta))
        num_queries = (self.method.aggregator.num_queries or len(self.queries)) + _BLOCK
        epsilon = sessions.epsilon_data_independent(terms, num_queries=num_queries)
        return replace(terms, budget=types.QueryBudget(kind="data_independent", delta=delta, epsilon=epsilon))


@dataclass(frozen=True, kw_only=True)
class ReleasedLabels(Trained):
    """Released labels with their events, before a student is trained.

    - ``events``: those of the submitted queries; those of the planned ones, if released labels may have decided how
      many were submitted.
    - ``epsilon_bound``: the guarantee that was fixed before the first query; None if votes decided when to stop.
    - ``spending``: the charges of the queries, for the operator's reports. None after a student was trained, and if the
      queries have other groups than the data set of the run.
    - ``table_KC``: the noisy table of private labels by score, if there is one.
    """

    labelled: LabelledSet
    spending: Spending | None = None
    table_KC: IntArray | None = None


def choose_queries(dataset: Dataset, settings: QueriesConfig) -> Split:
    """Return the public records to be queried: the first ``num_queries``, or all of them as candidates if
    ``settings.admission`` chooses among them.

    Records with equal content are one query, so repeated content is left out. ConfigError for too few public records.
    """
    first_of: dict[str, int] = {}
    for row, key in enumerate(keys_of(dataset.public)):
        # Asked again, equal content would get the stored answer: it is charged once, and is one query.
        first_of.setdefault(key, row)
    wanted = settings.num_queries or len(first_of)
    if wanted > len(first_of):
        raise ConfigError(
            f"aggregator.num_queries: expected at most {len(first_of)}, the number of different public "
            f"records, got {wanted}; lower it, or raise data.num_public."
        )
    if settings.admission is not None:
        wanted = len(first_of)
    return dataset.public.take(list(first_of.values())[:wanted])


def _no_room(budget: types.QueryBudget, consequence: str) -> ConfigError:
    limit = f"{budget.max_queries} queries" if budget.epsilon is None else f"epsilon {budget.epsilon:g}"
    return ConfigError(
        f"aggregator.budget: {limit} at delta {delta_text(budget.delta)} ({budget.kind}) has no room for one query, so "
        f"{consequence}; raise the budget, or the noise."
    )


def _priced(result: SessionResult, spending: Spending, plan: QueryPlan, model: torch.nn.Module) -> ReleasedLabels:
    """Return the released labels with their events, which charge every attempt of a query in full.

    ``epsilon_bound`` is the ledger's budget if a service submitted queries too.
    """
    by_service = len(result.replies) < len(spending.charges_Q)
    outcomes, submitted = spending.outcomes_Q, spending.submitted(0, len(spending.charges_Q))
    num_planned = sum(len(charges) for charges in spending.charges_Q)
    # Released labels may have made the rounds submit fewer than configured. A reservation that a crash left open counts
    # unchanged: no label decides over a crash.
    num_planned += max(0, plan.counted_beforehand - len(spending.charges_Q))
    planned, *beside = spending.terms.events(num_planned)
    spent = accountant.least_epsilon([submitted, *beside], target_delta=plan.method.target.delta)
    bound = sessions.epsilon_fixed_beforehand(spending.terms)
    if bound is not None and not by_service:
        # Both bounds are independent of votes and labels, so that the smaller one may be stated.
        bound = min(bound, accountant.least_epsilon([planned, *beside], target_delta=plan.method.target.delta))
    remarks: tuple[str, ...] = ()
    if bound is None:
        remarks = (types.REMARKS["stopped_by_votes"],)
    elif bound > spent:
        remarks = (
            f"Released labels may have decided how many queries were submitted. The guarantee is the bound that was "
            f"fixed before the first, ε = {epsilon_text(bound)}; ε = {epsilon_text(spent)} prices the {len(outcomes)} "
            "that were submitted.",
        )
    return ReleasedLabels(
        model=model,
        # The plan has none of a service's queries: then it is stated what was submitted.
        events=(of_teachers(submitted if by_service else planned, plan.unit), *beside),
        noise=spending.terms.noise,
        remarks=remarks,
        queries=types.QueryOutcomes(
            submitted=len(outcomes),
            answered=outcomes.count("answered"),
            rejected_confidence=outcomes.count("confidence"),
            rejected_fairness=outcomes.count("fairness"),
            refused_free=outcomes.count("free"),
            epsilon_submitted=spent,
        ),
        epsilon_bound=bound,
        labelled=result.labelled,
        spending=spending,
    )


def _submit(
    votes: Ballot, keys: Sequence[str], session: AggregatorSession, plan: QueryPlan, on_progress: types.Advance
) -> SessionResult:
    """Submit the queries to the aggregator as in FairPATE's Algorithm 1 and return the result.

    With the setting ``aggregator.admission``, queries are submitted in rounds. The first round submits candidates in
    their order. Each later round submits those for which the fairness gate would probably accept the label, as
    predicted by a student of the labels released so far. All rounds together submit the planned number of queries, or
    fewer if the gate would accept no more.
    """
    admission, dataset, queries = plan.method.queries.admission, plan.dataset, plan.queries
    # A rule that is fitted to all counts does not read what single counts make likely.
    how: dict[str, Any] = {"block_size": _BLOCK, "with_chances": not plan.method.fits_rule}
    if admission is None:
        return sessions.answer_queries(
            votes, keys=keys, session=session, on_progress=lambda done: on_progress(done, len(keys)), **how
        )
    from fairpate.nn.fit import predict_probabilities  # torch, which readers of votes and configurations do not need
    from student.student import train_student

    total = plan.method.aggregator.num_queries or len(keys)
    learning = plan.method.student_training.model_copy(update={"method": "supervised"})
    waiting = list(range(len(keys)))
    # Queries of earlier rounds are submitted again with each: their replies are stored and free.
    asked: list[int] = []
    result: SessionResult | None = None
    for number in range(admission.rounds):
        submitted = len(asked)
        # What is left is divided anew: a round that the gate cut short is made up for by those after it.
        size = math.ceil((total - submitted) / (admission.rounds - number))
        chosen = waiting[:size]
        if result is not None and waiting and len(result.labelled.labels):
            labelled = result.labelled
            student = train_student(
                public_records(queries, labelled),
                learning,
                num_classes=dataset.num_classes,
                augmentation=plan.method.augment,
                # From the run's seed and the round: a run that resumes chooses the same queries.
                generator=torch.Generator().manual_seed(plan.method.seed + number),
            )
            rows = torch.tensor(waiting)
            # The gate of the next answers starts from the counts of all labels released so far.
            sizes = {"num_groups": dataset.num_groups, "num_classes": dataset.num_classes}
            counts_GC = np.zeros(tuple(sizes.values()), dtype=np.int64)
            np.add.at(counts_GC, (labelled.groups, labelled.labels), 1)
            admitted = sessions.admit_queries(
                predict_probabilities(student, queries.x[rows]).double().numpy(),
                queries.z[rows].numpy(),
                gate=DemographicParityGate(plan.method.gate, **sizes, counts_GC=counts_GC),
                count=size,
            )
            chosen = [waiting[row] for row in admitted]
        asked += chosen
        result = sessions.answer_queries(
            votes.take(asked),
            keys=[keys[row] for row in asked],
            session=session,
            on_progress=lambda done, before=submitted: on_progress(max(before, done), total),  # type: ignore[misc]
            **how,
        )
        # In public order again: a run that was interrupted must submit the same queries.
        waiting = sorted(set(waiting) - set(chosen))
    assert result is not None
    return result


class VotingMethod(DrawsNoise):
    """A method whose voters answer queries on public records. A subclass defines the voters and how the student learns.

    ``fits_rule``: a linear rule is fitted to the answers to all queries, noisy counts or labels.
    """

    asks_teachers: ClassVar[bool] = True
    has_student: ClassVar[bool] = True
    releases_model: ClassVar[bool] = False
    keeps_teachers: ClassVar[bool] = True
    votes_on_anything: ClassVar[bool] = True
    reads_groups: ClassVar[bool] = False
    reads_public: ClassVar[bool] = True  # public records are the queries
    fits_rule: ClassVar[bool] = False

    target: configuration.QueriesTarget = configuration.QueriesTarget()
    noise: Noise = Field("os_entropy", description="Source of noise; `seeded` reproduces a run and gives no privacy.")
    ray: configuration.RayConfig = configuration.RayConfig()
    aggregator: configuration.AskedConfig = configuration.AskedConfig()

    @property
    def has_gate(self) -> bool:  # type: ignore[override]
        """True if a fairness rule refuses some of the answers."""
        return self.gate != NO_GATE

    @property
    def reads_public_groups(self) -> bool:
        """True if a gate or a calibration reads the groups of public records."""
        return self.has_gate or self.public_data.calibration is not None

    @property
    def service_ray(self) -> configuration.RayConfig:
        return self.ray

    @property
    def leaves_room(self) -> bool:  # type: ignore[override]
        """True if the privacy budget may have room for further queries after the run.

        Noise that is calibrated to a target leaves no room, unless ``aggregator.keep`` reserves a share.
        """
        return self.target.epsilon is None or self.queries.keep > 0

    @property
    def num_voters(self) -> int:
        """The largest number of votes on one query."""
        raise NotImplementedError

    @property
    def source(self) -> NoiseSource:
        """The source of noise; one that is seeded gives no privacy."""
        return OsEntropy() if self.noise == "os_entropy" else SeededSource(self.seed)

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that releases a label from votes, with the noise as configured."""
        raise NotImplementedError

    @property
    def queries(self) -> QueriesConfig:
        """The settings of the queries; a method that configures only their number gets defaults for the rest: no
        budget, records in order."""
        asked = self.aggregator
        return asked if isinstance(asked, QueriesConfig) else QueriesConfig(num_queries=asked.num_queries)

    @property
    def gate(self) -> GateRule:
        """The fairness rule that the aggregator applies to its answers."""
        gate: configuration.GateConfig | None = getattr(self.aggregator, "gate", None)
        return NO_GATE if gate is None else GateRule(**dict(gate))

    def check(self) -> None:
        """Raise ConfigError for a target epsilon together with a budget, and for ``aggregator.keep``, a reserved share
        of the target, without a target."""
        if self.target.epsilon is not None and self.queries.budget is not None:
            raise ConfigError(
                "aggregator.budget: target.epsilon is the budget already; leave one of the two settings out."
            )
        if self.queries.keep and self.target.epsilon is None:
            raise ConfigError(
                "aggregator.keep: reserves a share of target.epsilon, which is not set; set target.epsilon, or leave "
                "room with aggregator.budget instead."
            )

    def planned_cost(self, dataset: Dataset) -> Price | None:
        """Return the cost of the target or, with a budget of queries, of all queries that fit: each is charged in full,
        with any outcome."""
        plan = self.plan(dataset)
        events = plan.worst_case(plan.count_fitting())
        return price(events, delta=self.target.delta, relation=events[0].relation)

    def check_room(self, dataset: Dataset, log: RunLog) -> str:
        """Raise LimitReachedError if a limit of the operator has no room for the planned queries: then no teacher is
        trained. A stored release was admitted already; the ledger's meter checks what is charged beyond it."""
        plan, planned = self.plan(dataset), self.aggregator.num_queries
        fitting = plan.count_fitting()
        if log.stored() is None:
            log.check(plan.worst_case(fitting), noise=self.source.label)
        if planned is None or fitting >= planned:
            return ""
        return f"has room for {fitting} of {planned} queries; the others will not be asked"

    def plan(self, dataset: Dataset) -> QueryPlan:
        """Return the plan of the release, fixed before the first vote; noise is scaled to the target if there is one.

        ``dataset``: the voters' private records, and as its public records those to be queried. A subclass whose voters
        learn from other records than those of the run passes a data set of its own.
        """
        queries = choose_queries(dataset, self.queries)
        budget, target, mechanism = self.queries.budget, self.target, self.mechanism
        if target.epsilon is not None:
            mechanism = sessions.mechanism_within(
                mechanism,
                target_epsilon=target.epsilon,
                target_delta=target.delta,
                # A public number of public records: noise that is scaled to it reveals nothing.
                num_queries=self.planned_queries(queries),
                beside=self.beside(dataset),
            )
            # The target limits the ledger as well: a service that asks after the run may not pass it.
            budget = configuration.BudgetConfig(epsilon=target.epsilon)
        return QueryPlan(
            method=self,
            dataset=dataset,
            queries=queries,
            mechanism=mechanism,
            budget=budget,
            unit=self.unit_of(dataset),
            counted_beforehand=0 if self.queries.admission is None else self.aggregator.num_queries or 0,
            beside=self.beside(dataset),
        )

    def beside(self, dataset: Dataset) -> tuple[Event, ...]:  # noqa: ARG002 - of methods with such releases
        """Return the events of releases of ``dataset`` beside the queries, which share the target; their noise does not
        depend on the queries."""
        return ()

    def planned_queries(self, queries: Sized) -> int:
        """Return the number of queries whose answers together may cost the target epsilon: those of the run, and those
        that ``queries.keep`` reserves for an analyst later."""
        own = self.aggregator.num_queries or len(queries)
        # Rounded as the decimal that it prints: 1 - 0.3 is a little less than 0.7.
        return math.ceil(own / (1 - Fraction(repr(self.queries.keep))))

    def check_data(self, dataset: Dataset) -> None:
        """Raise ConfigError for a data set without enough queries, or a budget without room for one."""
        super().check_data(dataset)
        self.plan(dataset).count_fitting()

    def voting(self, dataset: Dataset, num_records: int) -> ExpectedVotes:  # noqa: ARG002 - as many voters for any number
        """Return an estimate of how clearly votes decide a label; all voters vote on each query."""
        plan = self.plan(dataset)
        noise = float(asdict(plan.mechanism)["noise_stddev_votes"])
        return ExpectedVotes(
            votes=self.num_voters,
            noise_stddev_votes=noise,
            labels=len(plan.queries),
            fitted_together=self.fits_rule,
            labels_only=self.queries.release == "label",
        )

    def release(self, training: Training) -> ReleasedLabels:
        """Submit every query within the target or budget to the aggregator; write and return the released labels.

        Repeated runs in one folder return the same release. The queries are charged to the operator's odometer if
        ``training`` has a log.
        """
        plan, run, reporter = self.plan(training.dataset), training.run, training.reporter
        keys = keys_of(plan.queries)
        voters = self.ballot(plan.dataset, plan.queries, training)
        with voters as votes, reporter.stage("aggregator") as on_progress:
            # With the voters: other votes on the same queries need another ledger.
            terms = plan.terms(votes.ensemble)
            meter = None
            if training.log is not None:
                planned = plan.worst_case(plan.count_fitting())
                meter = LedgerMeter(training.log, terms, unit=plan.unit, planned=plan.counted_beforehand, plan=planned)
            with open_ledger(run, terms, plan.queries, create=True, meter=meter) as ledger:
                session = AggregatorSession(ledger, source=self.source)
                result = _submit(votes, keys, session, plan, on_progress)
                if not result.replies:
                    raise _no_room(terms.budget, "no query was submitted")
                # Queries with an outcome, the run's own first.
                charges_of: dict[str, list[Charge]] = {key: [] for key in keys}
                for charge in ledger.charges:
                    charges_of.setdefault(charge.key, []).append(charge)
                ended = [charges for charges in charges_of.values() if charges and charges[-1].outcome is not None]
                # Abandoned ones were charged, so some query must carry them: all queries are priced by their charges.
                open_ones = [charges for charges in charges_of.values() if charges and charges[-1].outcome is None]
                ended[0] = [*itertools.chain(*open_ones), *ended[0]]
                spending = Spending(charges_Q=ended, terms=terms)
                if meter is not None:
                    # Room that was held ahead is given back: the sum with earlier releases is of what was charged.
                    meter.settle(ledger)
            # Labels are written last: by then what becomes visible is charged, in the closed ledger and in the
            # odometer.
            write_labels(result.labelled, run.labels)
            labels = _priced(result, spending, plan, training.model)
        assert labels.queries is not None
        reporter.note("aggregator", f"{labels.queries.answered} of {labels.queries.submitted} queries answered")
        if result.over_budget:
            reporter.note("aggregator", f"queries not submitted, because the budget has no room: {result.over_budget}")
        event = labels.events[0]
        write_json(run.costs, costs(spending, unit=event.unit, relation=event.relation))
        # Teachers that predict attributes see other groups than the data set: pages could not show charges by group.
        is_named = plan.dataset.group_names == training.dataset.group_names
        return labels if is_named else replace(labels, spending=None)

    def ballot(self, dataset: Dataset, queries: Split, training: Training) -> AbstractContextManager[Ballot]:
        """Return a context manager that yields the votes on ``queries``; the voters are available inside the
        context."""
        raise NotImplementedError

    def standing_voters(self, dataset: Dataset, run: RunDirectory) -> StandingVoters:
        """Return the voters of a finished run, to answer further queries of a service; Ray must be running."""
        raise NotImplementedError

    def service_rule(self, dataset: Dataset, run: RunDirectory) -> ServiceRule | None:  # noqa: ARG002 - of counts
        """Return what the releases of a finished run say about the votes on any record; None if a service names the
        class with most noisy votes."""
        return None

    def train(self, training: Training) -> Trained:
        """Release labels, train a student on them and return it."""
        return self.learn(training, replace(self.release(training), spending=None))

    def learn(self, training: Training, labels: ReleasedLabels) -> Trained:
        """Train a student on the released labels and return it; this costs no privacy."""
        return self.taught(training, labels, labels.labelled)

    def answers_to_fit(self, dataset: Dataset, labels: ReleasedLabels) -> NoisyCounts:
        """Return the released answers as noisy counts, to which a rule is fitted; NoLabelsError if there is none."""
        require_labels(self, labels.labelled)
        return self.counts_of(dataset, labels.labelled)

    def counts_of(self, dataset: Dataset, labelled: LabelledSet) -> NoisyCounts:
        """Return the counts that were released with ``labelled`` or, without counts, the labels as counts."""
        if labelled.counts is None:
            return NoisyCounts.of_labels(labelled.labels, labelled.record_ids, num_classes=dataset.num_classes)
        return NoisyCounts(
            counts_QC=labelled.counts,
            record_ids=labelled.record_ids,
            num_voters=self.num_voters,
            noise_stddev_votes=float(asdict(self.plan(dataset).mechanism)["noise_stddev_votes"]),
        )

    def taught(self, training: Training, labels: ReleasedLabels, kept: LabelledSet, **options: Any) -> Trained:
        """Train a student on ``kept``, all or some of the released ``labels``, and return ``labels`` with this student.
        Further keyword arguments, ``options``, are passed to :func:`fit_student`."""
        # Runs without a target have always drawn the student's first weights from its own stream.
        if self.target.epsilon is not None or self.public_data.pretrain is not None:
            options["initial_model"] = training.model
        network = fit_student(self, training, kept, **options)
        return replace(labels, model=network, num_training_labels=len(kept.labels))


class GnmaxMethod(VotingMethod):
    """A method whose voters have one vote each and whose labels are released by Confident-GNMax."""

    family: ClassVar[str] = "pate"
    aggregator: configuration.GnmaxConfig = configuration.GnmaxConfig()

    @property
    def mechanism(self) -> Mechanism:
        kind = ConfidentGnmax if self.queries.release == "label" else ConfidentCounts
        return kind(**vars(self.aggregator.mechanism))

    def attack(self, audited: Audited) -> Shadows | None:
        """Return an attack on the answers of the voters, and on the table of private labels by score, if there is
        one."""
        from fairpate.methods.attack_on_votes import attack_on_votes  # torch

        return attack_on_votes(self, audited)
