"""Labels through the aggregator: the ledger is opened, teachers vote, queries are submitted and answered.

This is the one way from ``private/`` to ``public/`` for a method whose voters answer public queries: votes go in,
labels and their priced events come out. The ledger decides what a repeated run may do. It is opened only if it holds
all that was released; then asking again returns what it holds and draws nothing, and what a service asked of it in
between is priced with the rest. Once anything was released, a ledger that is missing, or lacks a part of it, is never
replaced: its charges would be forgotten.

Teachers are trained on shards of private records and vote on public ones. Checkpoints are kept teacher by teacher, so
that an interrupted training resumes. Queries may be submitted in rounds: after each, a student of the labels released
so far says what to submit next. All between two rounds is computed from public records, released labels and the run's
seed; it is free, and an interrupted run submits the same queries again and gets the stored answers.

Shapes: Q queries, C classes, G groups.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aggregator.ledger import Charge, Ledger, LedgerTerms
from aggregator.mechanism import Mechanism, Outcome
from aggregator.session import (
    AggregatorSession,
    Ballot,
    CountVotes,
    Question,
    SessionResult,
    VotesUnavailableError,
    admit_queries,
    answer_queries,
    epsilon_data_independent,
    epsilon_fixed_beforehand,
    queries_that_fit,
    query_key,
)
from aggregator.store import Place, is_database
from fairpate.config import (
    BudgetConfig,
    ConfigError,
    DataConfig,
    QueriesConfig,
    RayConfig,
    StudentTraining,
)
from fairpate.data import Dataset, Split, load_once
from fairpate.fairness.gate import DemographicParityGate, filter_stream
from fairpate.later import torch
from fairpate.methods.base import Stream, Trained, Training, torch_generator
from fairpate.pages import epsilon_text
from fairpate.privacy import accountant
from fairpate.privacy.accountant import DEFAULT_ORDERS, Event, epsilon_of_curve
from fairpate.privacy.discrete_gaussian import NoiseSource, OsEntropy, SeededSource
from fairpate.privacy.mechanism_events import of_teachers
from fairpate.report import records
from fairpate.run.context import (
    RunDirectory,
    RunDirectoryError,
    read_json,
    read_labels,
    read_statement,
    write_json,
    write_labels,
)
from fairpate.run.release_log import LedgerMeter
from fairpate.terminal import Reporter
from fairpate.types import (
    STOPPED_BY_VOTES,
    Advance,
    Budget,
    GateRule,
    IntArray,
    LabelledSet,
    QueryOutcomes,
    Relation,
    Unit,
    VoteBatch,
    strict,
)
from fairpate.words import delta_text

if TYPE_CHECKING:
    from torch import nn

    from fairpate.methods.pate import VotingMethod
    from student.student import PublicRecords


@dataclass(frozen=True, kw_only=True)
class LedgerPlace:
    """The place of a ledger, and of its anchor, which notes the ledger's last entry elsewhere; None: no anchor."""

    ledger: Place
    anchor: Place | None = None

    @property
    def is_in_folder(self) -> bool:
        """True if the ledger is a file, which belongs to one node."""
        return not is_database(self.ledger)


def place_of(run: RunDirectory) -> LedgerPlace:
    """The place of the ledger of ``run``: its folder, unless a note there names another. RunDirectoryError for a
    damaged note."""
    if not run.ledger_place.exists():
        return LedgerPlace(ledger=run.ledger)
    values = read_json(run.ledger_place)
    anchor = values.get("anchor")
    if not all(isinstance(value, str | None) for value in values.values()) or values.keys() - {"ledger", "anchor"}:
        raise RunDirectoryError(f"{run.ledger_place}: damaged; restore it from a copy.")
    return LedgerPlace(ledger=values.get("ledger") or run.ledger, anchor=anchor and parsed(anchor))


def parsed(text: str) -> Place:
    """Return ``text`` as the address of a ledger in a database, or as the path of a file."""
    return text if is_database(text) else Path(text).absolute()


ANSWERED_BY_SERVICE = (
    "A service answers further queries from the same ledger. ε is the bound that was fixed beforehand for all of them; "
    "a sum with earlier releases is that of the queries submitted so far."
)


def state_for_service(run: RunDirectory, terms: LedgerTerms) -> None:
    """Raise the statement's epsilon to the ledger's bound before a service answers from the ledger.

    Analysts may spend the whole budget of the ledger, so the epsilon of the run's own queries is too small from their
    first query on. A statement whose epsilon is at least the bound is left as it is.
    """
    statement, bound = read_statement(run), epsilon_fixed_beforehand(terms)
    if bound is None or statement.epsilon is None or bound <= statement.epsilon:
        return
    # A sum with earlier releases is at least the new epsilon, which is one of its parts.
    sums: dict[str, Any] = {
        name: None if (earlier := getattr(statement, name)) is None else max(earlier, bound)
        for name in ("epsilon_with_earlier", "epsilon_adaptive_with_earlier")
    }
    served = replace(statement, epsilon=bound, **sums, remarks=(*statement.remarks, ANSWERED_BY_SERVICE))
    write_json(run.statement, strict(served.to_json()))


def open_ledger(
    run: RunDirectory,
    terms: LedgerTerms,
    queries: Split,
    *,
    create: bool,
    meter: LedgerMeter | None,
    take_over: bool = False,
) -> Ledger:
    """The run's ledger, if it holds all that was released; ``queries`` are the records that the run asks about.

    With ``create``, and only while nothing was released, a missing one is made. From then on ``meter`` counts what it
    charges; ``take_over`` ends another writer, if that is possible. RunDirectoryError for a ledger that lacks released
    labels or stated queries, LedgerError as :class:`Ledger`.
    """
    released = sorted(run.public.iterdir()) if run.public.exists() else []
    released = [path for path in released if path != run.embedding]  # of public records alone, before any vote
    place = place_of(run)
    if released and place.is_in_folder and not run.ledger.exists():
        raise RunDirectoryError(
            f"{run.ledger}: gone, although {released[0]} was released from it; restore all its files from one copy, or "
            "start a new run folder."
        )
    # Once something was released, a missing ledger is never replaced: its charges would be forgotten.
    may_create = create and not released and place.is_in_folder
    ledger = Ledger(place.ledger, terms, create=may_create, anchor=place.anchor, take_over=take_over)
    try:
        ledger.actions = run.actions
        _, lost = missing_labels(run, queries, ledger.outcome)
        stated = read_json(run.statement)["queries"]["submitted"] if run.statement.exists() else 0
        if lost or len(ledger.outcome_of) < stated:
            lacks = f"{lost} labels" if lost else f"{stated - len(ledger.outcome_of)} of {stated} queries"
            raise RunDirectoryError(  # noqa: TRY301 - the ledger is closed below
                f"{ledger.name}: lacks {lacks} that were released; restore the ledger's files and the public records "
                "of this run from one copy, or start a new run folder."
            )
        # After the check: the meter would settle the odometer to a ledger that lacks what was released.
        if meter is not None:
            meter.open(ledger)
    # Also after an interrupt: an open ledger would keep its lock.
    except BaseException:
        ledger.close()
        raise
    return ledger


def missing_labels(run: RunDirectory, queries: Split, outcome: Callable[[str], Outcome | None]) -> tuple[int, int]:
    """The number of released labels, and how many of them ``outcome`` (a ledger's) lacks."""
    if not run.labels.exists():
        return 0, 0
    labelled = read_labels(run.labels)
    counts = [None] * len(labelled.labels) if labelled.counts is None else map(tuple, labelled.counts.tolist())
    key_of = dict(zip(queries.record_id, keys_of(queries), strict=True))
    # A released record that is no query here has no key, and counts as lost.
    # Label and counts too: a ledger with another answer is that of another release.
    lost = sum(
        outcome(key_of.get(record_id, "")) != Outcome(verdict="answer", label=label, counts=row)
        for record_id, label, row in zip(labelled.record_ids, labelled.labels.tolist(), counts, strict=True)
    )
    return len(labelled.labels), lost


def keys_of(queries: Split) -> list[str]:
    """The key of each record as a query: a digest of its content."""
    return [query_key(x, group) for x, group in zip(queries.x.numpy(), queries.z.tolist(), strict=True)]


def _private(config: DataConfig) -> Split:
    """Read the private records of the data set that ``config`` names."""
    return load_once(config).private


def shard_reader(dataset: Dataset, ray: RayConfig) -> Callable[[], Split] | None:
    """A function by which workers read private records; None if these are sent. ConfigError for records without
    files."""
    if not ray.read_shards or ray.num_actors == 0:
        return None
    if dataset.source is None:
        raise ConfigError(
            "ray.read_shards: workers cannot read these records from the data set's files (they came from Python, or "
            "depend on files in the run's folder); set it to false."
        )
    return partial(_private, dataset.source)


@dataclass(frozen=True, kw_only=True)
class StandingVoters:
    """The voters of a service.

    ``ensemble`` is what determines their votes, for the ledger; ``try_vote`` votes on features (1, ...) of no query, or
    raises; ``are_answering`` returns without waiting.
    """

    ensemble: str
    count_votes: CountVotes
    try_vote: Callable[[npt.NDArray[np.generic]], object]
    are_answering: Callable[[], bool]
    close: Callable[[], None]


class VoteCounter:
    """Returns votes from the run's table where they are stored, and asks all teachers in one call for the missing
    ones."""

    def __init__(self, collected: VoteBatch, ask_teachers: Callable[[npt.NDArray[np.generic]], IntArray]) -> None:
        self._collected = dict(zip(collected.record_ids, collected.votes_QC, strict=True))
        self._ask_teachers = ask_teachers

    def __call__(self, questions: Sequence[Question]) -> IntArray:
        """Return ``votes_QC``. VotesUnavailableError unless every teacher voted on every question."""
        # The run's own votes first: teachers on another machine may vote otherwise, because they round otherwise.
        rows = [self._collected.get(question.query.record_id) for question in questions]
        missing = [i for i, row in enumerate(rows) if row is None]
        if missing:
            from teachers.ensemble import PoolError  # with torch, which readers of votes do not need

            features = np.stack([questions[i].features for i in missing])
            try:
                votes_QC = self._ask_teachers(features)
            except PoolError as error:
                raise VotesUnavailableError(str(error)) from error
            for i, row in zip(missing, votes_QC, strict=True):
                rows[i] = row
        return np.array(rows, dtype=np.int64)


_MAX_STUDENT_THREADS = 4


def fit_student(
    config: StudentTraining, dataset: Dataset, labelled: LabelledSet, reporter: Reporter, *, seed: int, **options: Any
) -> nn.Module:
    """Train a student on released labels; ``options`` as :func:`student.student.train_student` takes them."""
    from fairpate.nn.models import is_convolutional  # imports torch, as the next
    from student.student import train_student

    threads = torch.get_num_threads()
    # Small dense layers are slower on several threads.
    torch.set_num_threads(min(threads, _MAX_STUDENT_THREADS) if is_convolutional(config.model) else 1)
    try:
        with reporter.stage("student") as advance:
            return train_student(
                public_records(dataset.public, labelled),
                config,
                num_classes=dataset.num_classes,
                generator=torch_generator(seed, Stream.STUDENT),
                on_progress=advance,
                **options,
            )
    finally:
        torch.set_num_threads(threads)


def digest_of_records(settings: object, *arrays: torch.Tensor) -> str:
    """Sixteen hexadecimal digits that change with ``settings``, as JSON, and with the content of records; private."""
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=8)
    for array in arrays:
        digest.update(array.numpy().tobytes())
    return digest.hexdigest()


def passing(labelled: LabelledSet, rule: GateRule, dataset: Dataset) -> LabelledSet:
    """The labels that a fresh gate lets pass, in their order."""
    # Of released labels and public groups alone, and so post-processing: what it drops stays charged.
    sizes = {"num_groups": dataset.num_groups, "num_classes": dataset.num_classes}
    return labelled.take(filter_stream(labelled.labels, labelled.groups, rule=rule, **sizes))


def public_records(public: Split, labelled: LabelledSet) -> PublicRecords:
    """The public features with the released labels or class probabilities. The labels of the public split itself are
    not read."""
    from student.student import PublicRecords

    row_of = {record_id: row for row, record_id in enumerate(public.record_id)}
    answered = torch.tensor([row_of[record_id] for record_id in labelled.record_ids], dtype=torch.int64)
    is_answered = torch.zeros(len(public), dtype=torch.bool)
    is_answered[answered] = True
    labels = torch.from_numpy(labelled.labels if labelled.chances is None else labelled.chances.astype(np.float32))
    return PublicRecords(answered_x=public.x[answered], labels=labels, unlabelled_x=public.x[~is_answered])


@dataclass(frozen=True, kw_only=True)
class Spending:
    """The charges of a ledger, query by query; all of it but :meth:`submitted` is for the operator alone.

    ``charges_Q[i]`` are the ledger's reservations for query i: one with its outcome, and before it one for each that
    a crash left open.
    """

    charges_Q: Sequence[Sequence[Charge]]
    terms: LedgerTerms

    @property
    def target_delta(self) -> float:
        """The delta at which prices are stated."""
        return self.terms.budget.delta

    @property
    def outcomes_Q(self) -> list[records.Outcome]:
        """The outcome of each query."""
        verdicts = [charges[-1].outcome.verdict for charges in self.charges_Q if charges[-1].outcome is not None]
        return ["answered" if verdict == "answer" else verdict for verdict in verdicts]

    @property
    def num_reservations(self) -> int:
        """Number of charged queries, including those that a crash left open."""
        return sum(len(charges) for charges in self.charges_Q)

    def submitted(self, start: int, stop: int) -> Event:
        """The event of queries start .. stop - 1 at the cost fixed before they were asked: every reservation in
        full."""
        return self.terms.mechanism.worst_case(sum(len(charges) for charges in self.charges_Q[start:stop]))

    def drawn(self, start: int, stop: int) -> Event:
        """The event of the votes that queries start .. stop - 1 used, from the ledger. Free refusals used no votes."""
        touched = [
            charge.votes
            for charges in self.charges_Q[start:stop]
            for charge in charges
            if charge.outcome is None or charge.outcome.is_charged
        ]
        return self.terms.mechanism.realised(self._votes(touched))

    def as_in_paper(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        """The published code's curve for the same queries: fairness rejections are free, and no crash ever happened."""
        ended = [
            (charges[-1].votes, charges[-1].outcome.verdict)
            for charges in self.charges_Q[start:stop]
            if charges[-1].outcome is not None and charges[-1].outcome.is_charged
        ]
        rejected = np.array([verdict == "fairness" for _, verdict in ended], dtype=np.bool_)
        return self.terms.mechanism.as_in_paper_rdp(self._votes([votes for votes, _ in ended]), rejected_Q=rejected)

    def _votes(self, rows: Sequence[Sequence[int]]) -> IntArray:
        return np.array(rows, dtype=np.int64).reshape(len(rows), self.terms.num_classes)


def costs(spending: Spending, *, unit: Unit, relation: Relation) -> dict[str, Any]:
    """The data-dependent privacy cost of the queries, for the operator only: it must not be published."""
    delta, submitted = spending.target_delta, len(spending.charges_Q)
    drawn = spending.drawn(0, submitted)
    price = accountant.epsilon_data_dependent([drawn], target_delta=delta)
    as_in_paper = epsilon_of_curve(spending.as_in_paper(0, submitted), DEFAULT_ORDERS, target_delta=delta)[0]
    beforehand = accountant.least_epsilon([spending.submitted(0, submitted)], target_delta=delta)
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
"""Queries of a run that share a transaction, and that one crash can waste."""


@dataclass(frozen=True, kw_only=True)
class ReleasePlan:
    """All that fixes a release of labels before the first vote: a ``method`` with its settings, and what depends on the
    data set.

    ``mechanism`` is the method's, its noise perhaps scaled to a target; ``unit``: the change that moves one vote.
    """

    method: VotingMethod
    mechanism: Mechanism
    budget: BudgetConfig | None
    unit: Unit

    @property
    def source(self) -> NoiseSource:
        """The source of noise."""
        return OsEntropy() if self.method.noise == "os_entropy" else SeededSource(self.method.seed)

    def worst_case(self, num_queries: int) -> Event:
        """The cost of ``num_queries`` for any votes, for the unit that is protected."""
        event = self.mechanism.worst_case(num_queries)
        return of_teachers(event, self.unit)

    @property
    def counted_beforehand(self) -> int:
        """Number of queries counted although released labels may decide to submit fewer; 0 without such a decision."""
        return (self.method.aggregator.num_queries or 0) if self.method.queries.admission is not None else 0


@dataclass(frozen=True, kw_only=True)
class Labels(Trained):
    """Released labels, as yet without a student.

    ``events`` were fixed before the first query: what the submitted queries cost, unless their number depends on
    released labels. ``epsilon_bound`` is the guarantee that was fixed before the first query; None if only votes ended
    the run. ``spending`` is for the operator; None if the queries are not public records (pages then have no groups to
    show), and after a student was trained.
    """

    labelled: LabelledSet
    spending: Spending | None = None


def choose_queries(dataset: Dataset, settings: QueriesConfig) -> Split:
    """The first public records, without repeated content, because equal records are one query. With admission, all
    candidates."""
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


def check_budget(plan: ReleasePlan, dataset: Dataset, queries: Split) -> int:
    """The number of planned queries that the budget has room for; all of them if that depends on votes.

    From public facts alone, and before any teacher is trained. ConfigError for a budget without room for one query.
    """
    wanted = plan.method.aggregator.num_queries or len(queries)
    # Without a budget the ledger gets one that has room for all.
    if plan.budget is None:
        return wanted
    terms = ledger_terms(plan, dataset, ensemble="planned")
    fitting = queries_that_fit(terms, wanted)
    if not fitting:
        raise _no_room(terms.budget, "nothing could be asked")
    return fitting


def _no_room(budget: Budget, consequence: str) -> ConfigError:
    limit = f"{budget.max_queries} queries" if budget.epsilon is None else f"epsilon {budget.epsilon:g}"
    return ConfigError(
        f"aggregator.budget: {limit} at delta {delta_text(budget.delta)} ({budget.kind}) has no room for one query, so "
        f"{consequence}; raise it, or the noise."
    )


def release_labels(plan: ReleasePlan, dataset: Dataset, queries: Split, votes: Ballot, training: Training) -> Labels:
    """Ask the aggregator every query, and write the labels. One release results, however often it runs.

    ``dataset`` is the data set as the teachers see it; its public records are the queries. The queries are counted in
    the operator's odometer, if ``training`` has a log.
    """
    run, keys = training.run, keys_of(queries)
    # With the voters: other votes on the same queries need another ledger.
    terms = ledger_terms(plan, dataset, ensemble=votes.ensemble)
    meter = None
    if training.log is not None:
        planned = (plan.worst_case(check_budget(plan, dataset, queries)),)
        meter = LedgerMeter(training.log, terms, unit=plan.unit, planned=plan.counted_beforehand, plan=planned)
    with training.reporter.stage("aggregator") as on_progress:
        with open_ledger(run, terms, queries, create=True, meter=meter) as ledger:
            session = AggregatorSession(ledger, source=plan.source)
            result = _submit(votes, keys, queries, session, plan, dataset, on_progress)
            if not result.replies:
                raise _no_room(terms.budget, "nothing was asked")
            spending = Spending(charges_Q=_by_query(ledger.charges, keys), terms=terms)
            if meter is not None:
                # Room that was held ahead is given back, so that the sum with earlier releases is of what was charged.
                meter.settle(ledger)
        # Labels are written last: by then what becomes visible is charged, in the closed ledger and in the odometer.
        write_labels(result.labelled, run.labels)
        labels = _priced(result, spending, plan, training.model)
    assert labels.queries is not None
    training.reporter.note("aggregator", f"{labels.queries.answered} of {labels.queries.submitted} queries answered")
    if result.over_budget:
        training.reporter.note("aggregator", f"not asked, because the budget has no room: {result.over_budget}")
    write_json(run.costs, costs(spending, unit=labels.events[0].unit, relation=labels.events[0].relation))
    # Teachers that predict attributes see other groups than the data set: pages could not show charges by group.
    return labels if dataset.group_names == training.dataset.group_names else replace(labels, spending=None)


def _priced(result: SessionResult, spending: Spending, plan: ReleasePlan, model: nn.Module) -> Labels:
    """The labels with their events: every reservation at its full cost, however it ended.

    If a service asked too, only the ledger's budget was fixed before the first query.
    """
    by_service = len(result.replies) < len(spending.charges_Q)
    outcomes, submitted = spending.outcomes_Q, spending.submitted(0, len(spending.charges_Q))
    num_planned = spending.num_reservations
    if plan.method.queries.admission is not None:
        # Released labels may have made the rounds submit fewer than configured. A reservation that a crash left open
        # counts unchanged: no label decides over a crash.
        configured = (plan.method.aggregator.num_queries or 0) + num_planned - len(spending.charges_Q)
        num_planned = max(configured, num_planned)
    planned = spending.terms.mechanism.worst_case(num_planned)
    spent = accountant.least_epsilon([submitted], target_delta=plan.method.target.delta)
    bound = epsilon_fixed_beforehand(spending.terms)
    if bound is not None and not by_service:
        # Both bounds are independent of votes and labels, so that the smaller one may be stated.
        bound = min(bound, accountant.least_epsilon([planned], target_delta=plan.method.target.delta))
    remarks: tuple[str, ...] = ()
    if bound is None:
        remarks = (STOPPED_BY_VOTES,)
    elif bound > spent:
        remarks = (
            f"Released labels may have decided how many queries were submitted. The guarantee is the bound that was "
            f"fixed before the first, ε = {epsilon_text(bound)}; ε = {epsilon_text(spent)} prices the {len(outcomes)} "
            "that were submitted.",
        )
    return Labels(
        model=model,
        # The plan has none of a service's queries: then it is stated what was submitted.
        events=(of_teachers(submitted if by_service else planned, plan.unit),),
        noise=spending.terms.noise,
        remarks=remarks,
        queries=QueryOutcomes(
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
    votes: Ballot,
    keys: Sequence[str],
    queries: Split,
    session: AggregatorSession,
    plan: ReleasePlan,
    dataset: Dataset,
    on_progress: Advance,
) -> SessionResult:
    """Submit the queries as in Algorithm 1. With admission, submit them in rounds of the planned number of candidates,
    or fewer if the gate would accept no more; the first round takes candidates in their order."""
    admission = plan.method.queries.admission
    if admission is None:
        return answer_queries(
            votes,
            keys=keys,
            session=session,
            block_size=_BLOCK,
            on_progress=lambda done: on_progress(done, len(keys)),
        )
    # Few runs have rounds, and all others release labels without torch.
    from fairpate.nn.fit import predict_probabilities
    from student.student import train_student

    total = plan.method.aggregator.num_queries or len(keys)
    learning = plan.method.student_training.model_copy(update={"method": "supervised"})
    waiting = list(range(len(keys)))
    results: list[SessionResult] = []
    for number in range(admission.rounds):
        submitted = sum(result.num_queries for result in results)
        # What is left is divided anew: a round that the gate cut short is made up for by those after it.
        size = math.ceil((total - submitted) / (admission.rounds - number))
        chosen = waiting[:size]
        labelled = SessionResult.joined(results).labelled if number else None
        if labelled is not None and waiting and len(labelled.labels):
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
            admitted = admit_queries(
                predict_probabilities(student, queries.x[rows]).double().numpy(),
                queries.z[rows].numpy(),
                gate=DemographicParityGate(plan.method.gate, **sizes, counts_GC=counts_GC),
                count=size,
            )
            chosen = [waiting[row] for row in admitted]
        results.append(
            answer_queries(
                votes.take(chosen),
                keys=[keys[row] for row in chosen],
                session=session,
                block_size=_BLOCK,
                on_progress=lambda done, before=submitted: on_progress(before + done, total),  # type: ignore[misc]
            )
        )
        # In public order again: a run that was interrupted must submit the same queries.
        waiting = sorted(set(waiting) - set(chosen))
    return SessionResult.joined(results)


def ledger_terms(plan: ReleasePlan, dataset: Dataset, *, ensemble: str) -> LedgerTerms:
    """The terms of the run's ledger. Without a configured budget, the budget admits the run's queries and one more
    block, which a crash may waste."""
    settings = plan.method.queries
    terms = LedgerTerms(
        mechanism=plan.mechanism,
        gate=plan.method.gate,
        # A placeholder: the limit follows from the cost of the queries, which is computed from terms.
        budget=Budget(kind="query_count", delta=plan.method.target.delta, max_queries=1),
        num_teachers=plan.method.num_voters,
        num_classes=dataset.num_classes,
        num_groups=dataset.num_groups,
        noise=plan.source.label,
        ensemble=ensemble,
        # A changed attribute moves one vote of a query, as a record does, and the ledger prices both alike.
        unit="record" if plan.unit == "sensitive attribute" else plan.unit,
    )
    if plan.budget is not None:
        return replace(terms, budget=plan.budget.at(plan.method.target.delta))
    num_queries = (settings.num_queries or len(choose_queries(dataset, settings))) + _BLOCK
    epsilon = epsilon_data_independent(terms, num_queries=num_queries)
    return replace(terms, budget=Budget(kind="data_independent", delta=plan.method.target.delta, epsilon=epsilon))


def _by_query(charges: Sequence[Charge], keys: Sequence[str]) -> list[list[Charge]]:
    """The charges of each query with an outcome, the run's queries first. Charges of abandoned queries are added to the
    first one."""
    charges_of: dict[str, list[Charge]] = {key: [] for key in keys}
    for charge in charges:
        charges_of.setdefault(charge.key, []).append(charge)
    by_query = [of_key for of_key in charges_of.values() if of_key and of_key[-1].outcome is not None]
    # They were charged, so some query must carry them: all queries together are priced by their charges.
    abandoned = [charge for of_key in charges_of.values() if of_key and of_key[-1].outcome is None for charge in of_key]
    return [abandoned + by_query[0], *by_query[1:]] if by_query else []
