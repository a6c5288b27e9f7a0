"""Queries against a ledger, one charge each, and what is asked, in which order, until a budget is spent.

One querying session: queries in, answers out, with votes, budget and ledger between the two.

Vote, reserve, draw, commit, release, in this order: the reservation of a block of queries is durable before its first
noise is drawn, and no answer of a block leaves before all its outcomes are durable. A query is admitted under the limit
of who asks for it and under the shared one, both right before it is reserved. Threads that ask at the same time share
blocks, so that they share the two waits for the disk: the first thread to reach the ledger writes for all that wait.

Which queries to submit next, decided from what is public, so that the gate refuses fewer of them after they are
paid.

A label that the gate rejects costs what an answer costs, because the votes were drawn. Whether it will be rejected
can be guessed beforehand: a model of the labels already released predicts the next one, and the gate's counters are
public. A query that the gate would then reject is left out for now, without touching a vote, and may be admitted later,
when the counters have moved. All of this is post-processing of released labels and costs nothing; a wrong guess costs
what any query costs and breaks nothing, since the gate itself still decides.

Knows no model: predictions come as probabilities. Shapes: N candidates, C classes.

A batch of public queries through a session: what came of each, and the labels that may train a student.

The queries of a run are asked in their order, a block of them at a time, with the votes of a :class:`Ballot`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from aggregator.budgets import BudgetStatus as BudgetStatus
from aggregator.budgets import QuotaRoom, budget_status, no_quota, open_filter, payers
from aggregator.ledger import NOBODY, Asker, Ledger, LedgerTerms, OwnLimit
from aggregator.mechanism import Outcome
from fairpate.fairness.gate import DemographicParityGate
from fairpate.privacy.discrete_gaussian import NoiseSource
from fairpate.types import Answer, IntArray, LabelledSet, Refusal, RefusalReason

MAX_BLOCK = 1024
"""Queries that share a transaction, and that a crash can waste, at most."""


class VotesUnavailableError(RuntimeError):
    """Not all teachers voted: nothing was reserved, drawn or stored, and the query may be asked again."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """What is asked: the hash of a record's content (see :func:`query_key`), its public group and its public name.

    ``askers``: who asks for it now; the first with room under its own limit and quota is charged.
    """

    key: str
    group: int
    record_id: str
    askers: tuple[Asker, ...] = (NOBODY,)


@dataclass(frozen=True)
class OverBudget:
    """The budget, or the asker's own limit, has no room for this query: nothing was charged, drawn or stored."""


Reply = Outcome | OverBudget
VoteFunction = Callable[[Sequence[Query]], IntArray]
"""Counts of all teachers on Q queries, shape (Q, C); raises VotesUnavailableError rather than leave a teacher out."""

_OVER_BUDGET = OverBudget()


def query_key(features: npt.NDArray[np.generic], group: int) -> str:
    """What a query is: the hash of its features and its public group. The same content is the same query."""
    # Type and shape too: equal bytes of another type are another record.
    digest = hashlib.sha256(f"{features.dtype.str}{features.shape}{group}".encode())
    digest.update(np.ascontiguousarray(features).tobytes())
    return digest.hexdigest()


@dataclass(kw_only=True, eq=False)
class _Request:
    """New queries of one caller, with their votes."""

    queries: Sequence[Query]
    votes_QC: IntArray
    quota: QuotaRoom
    done: bool = False
    error: Exception | None = None


class AggregatorSession:
    """Asks one ledger's teachers, within its budget. All methods may be called from any thread."""

    def __init__(self, ledger: Ledger, *, source: NoiseSource) -> None:
        """ValueError unless ``source`` is the kind of noise that the ledger declares."""
        # What the terms declare is what the statement says of the noise.
        if source.label != ledger.terms.noise:
            raise ValueError(f"Expected a {ledger.terms.noise} source for this ledger, got {source.label}.")
        self._ledger, self._source = ledger, source
        self._gate = _resumed_gate(ledger)
        self._filter = open_filter(ledger)
        self._line: list[_Request] = []
        self._at_line, self._at_ledger = threading.Lock(), threading.Lock()

    @property
    def terms(self) -> LedgerTerms:
        """What its ledger is a ledger of."""
        return self._ledger.terms

    def ask(self, queries: Sequence[Query], vote: VoteFunction, *, quota: QuotaRoom = no_quota) -> tuple[Reply, ...]:
        """One reply per query, in order; a batch stops at the exact query that crosses the budget.

        A query with an outcome gets that one: nothing is charged or drawn, also when the budget is closed. ``vote`` is
        called with new queries only; nobody is charged with more of them than ``quota`` says. VotesUnavailableError if
        not all teachers voted, LedgerError if the ledger cannot be written; what was committed until then is answered
        when it is asked again.
        """
        new = self._new(queries, quota)
        if new:
            # Votes come before any lock is taken, so that slow teachers hold up nobody else.
            self._settle(_Request(queries=new, votes_QC=self._votes(new, vote), quota=quota))
        # As the ledger has it, not as it was drawn: what is not stored does not leave.
        outcome = self._ledger.outcome
        return tuple([outcome(query.key) or _OVER_BUDGET for query in queries])

    def budget_status(self) -> BudgetStatus:
        """The budget as it is now: public values only."""
        return self.estimate(0)

    def estimate(self, num_new_queries: int) -> BudgetStatus:
        """The budget as it would be after that many new queries, whether or not all of them have room."""
        return budget_status(
            self._ledger.terms,
            num_queries=self._ledger.num_reservations + num_new_queries,
            # Whether one more would have room behind them.
            closed=self._filter.room(num_new_queries + 1) <= num_new_queries,
        )

    def room(self, wanted: int) -> int:
        """How many of ``wanted`` new queries the budget may have room for, as far as can be said without votes."""
        return self._filter.room(wanted)

    def limit(self, caller: str, limit: OwnLimit) -> None:
        """Store what ``caller`` may spend from now on. LedgerError if it cannot be written."""
        with self._at_ledger:
            self._ledger.limit(caller, limit)

    def _new(self, queries: Sequence[Query], quota: QuotaRoom) -> Sequence[Query]:
        """The queries without an outcome, each key once, as many as the budget may have room for."""
        outcome = self._ledger.outcome
        new = {query.key: query for query in queries if outcome(query.key) is None}
        # Without the ledger's lock, so that nobody votes on what has no room; under the lock all is decided again.
        paid = _with_payers(self._ledger, list(new.values()), quota)[1]
        return paid[: self._filter.room(len(paid))] if paid else ()

    def _votes(self, queries: Sequence[Query], vote: VoteFunction) -> IntArray:
        terms = self._ledger.terms
        for query in queries:
            if not 0 <= query.group < terms.num_groups:
                raise ValueError(f"Expected 0 <= group < {terms.num_groups}, got {query.group}.")
        votes_QC = vote(queries)
        if votes_QC.shape != (len(queries), terms.num_classes):
            raise ValueError(f"Expected votes of shape {(len(queries), terms.num_classes)}, got {votes_QC.shape}.")
        if not terms.mechanism.is_complete(votes_QC, num_teachers=terms.num_teachers):
            raise VotesUnavailableError(f"Expected the votes of all {terms.num_teachers} teachers on every query.")
        return votes_QC

    def _settle(self, request: _Request) -> None:
        with self._at_line:
            self._line.append(request)
        with self._at_ledger:
            # Another thread may have written for this one while it waited.
            if not request.done:
                with self._at_line:
                    # The line's lock is held for a moment only, inside the ledger's: others can join while one writes.
                    waiting, self._line = self._line, []
                self._settle_together(waiting)
        if request.error is not None:
            raise request.error

    def _settle_together(self, requests: Sequence[_Request]) -> None:
        """Reserve, draw and commit what these requests ask, and tell each that it is done."""
        # Stays where what ends this thread is no Exception: those who wait must not take that for success.
        error: Exception | None = RuntimeError("The thread that wrote for this request was interrupted; ask again.")

        def quota(caller: str) -> float:
            # Requests that share a block may state different quotas; nobody is charged beyond the smallest.
            return min(request.quota(caller) for request in requests)

        try:
            for queries, votes_QC in _blocks(requests, self._ledger):
                # Admitted under the ledger's lock, right before it is reserved: no other thread can take the same room.
                rows, paid, charged = _with_payers(self._ledger, queries, quota)
                admitted = self._filter.admit(votes_QC[rows])
                self._answer(paid[:admitted], votes_QC[rows[:admitted]], charged[:admitted])
            error = None
        except Exception as caught:  # noqa: BLE001 - it belongs to every caller that waits
            error = caught
        finally:
            if error is not None:  # the gate may have counted what was not committed
                self._gate = _resumed_gate(self._ledger)
            for request in requests:
                request.error, request.done = error, True

    def _answer(self, queries: Sequence[Query], votes_QC: IntArray, charged: Sequence[Asker]) -> None:
        if not queries:
            return
        keys, groups = [query.key for query in queries], [query.group for query in queries]
        # Charged first: what a crash leaves from here on is a charge without an answer, never the reverse.
        reserved = self._ledger.reserve(keys, groups, votes_QC, charged)
        outcomes = self._ledger.terms.mechanism.answer(
            votes_QC, groups=groups, keys=keys, gate=self._gate, source=self._source
        )
        self._ledger.commit(reserved, outcomes)


def _blocks(requests: Sequence[_Request], ledger: Ledger) -> Iterator[tuple[Sequence[Query], IntArray]]:
    """The queries that still have no outcome, each key once, with their votes; at most MAX_BLOCK at a time."""
    queries, votes_QC = requests[0].queries, requests[0].votes_QC
    if len(requests) > 1:
        queries = [query for request in requests for query in request.queries]
        votes_QC = np.concatenate([request.votes_QC for request in requests])
    # Another request may have got an outcome since these votes were cast.
    # Of a key that several ask one row of votes is taken; the others are thrown away unread.
    rows = {query.key: row for row, query in enumerate(queries) if ledger.outcome(query.key) is None}
    if len(rows) < len(queries):
        kept = sorted(rows.values())
        queries, votes_QC = [queries[row] for row in kept], votes_QC[kept]
    for start in range(0, len(queries), MAX_BLOCK):
        yield queries[start : start + MAX_BLOCK], votes_QC[start : start + MAX_BLOCK]


def _with_payers(
    ledger: Ledger, queries: Sequence[Query], quota: QuotaRoom
) -> tuple[list[int], list[Query], list[Asker]]:
    """The queries that somebody has room for: their rows, themselves, and who is charged."""
    found = payers(ledger, queries, quota)
    rows = [row for row, payer in enumerate(found) if payer is not None]
    return rows, [queries[row] for row in rows], [payer for payer in found if payer is not None]


def _resumed_gate(ledger: Ledger) -> DemographicParityGate:
    terms = ledger.terms
    # Stored nowhere: its state is the counts of the answers that were committed.
    return DemographicParityGate(
        terms.gate,
        num_groups=terms.num_groups,
        num_classes=terms.num_classes,
        counts_GC=np.array(ledger.counts_GC, dtype=np.int64),
    )


FloatArray = npt.NDArray[np.float64]


def admit_queries(
    probabilities_NC: FloatArray, groups_N: IntArray, *, gate: DemographicParityGate, count: int, uncertain_first: bool
) -> list[int]:
    """Rows of at most ``count`` candidates that ``gate`` is expected to accept, in the order to submit them.

    ``gate`` counts what was released; it is used up: each admitted candidate is counted in it as if answered with its
    likeliest label. Candidates are looked at in their order, or those with the least likely likeliest label first, and
    again from the start while one was admitted, for each of them moves the counters.
    """
    likeliest_N, confidence_N = probabilities_NC.argmax(axis=1), probabilities_NC.max(axis=1)
    waiting: list[int] = (
        # Stable: equally sure ones stay in their order, whatever sorts them.
        np.argsort(confidence_N, kind="stable") if uncertain_first else np.arange(len(groups_N))
    ).tolist()
    admitted: list[int] = []
    progress = True
    while progress and len(admitted) < count:
        progress, left = False, []
        for row in waiting:
            if len(admitted) < count and gate.admit(int(groups_N[row]), int(likeliest_N[row])):
                admitted.append(row)
                progress = True
            else:
                left.append(row)
        waiting = left
    return admitted


class Ballot(Protocol):
    """Public queries and who votes on them, as :class:`fairpate.types.VoteBatch` holds them; private.

    Where voters are drawn anew for each query, votes exist from the moment they are asked for.
    """

    @property
    def record_ids(self) -> Sequence[str]:
        """The public name of each query."""
        ...

    @property
    def groups_Q(self) -> IntArray:
        """The public group of each query."""
        ...

    @property
    def ensemble(self) -> str:
        """Who votes: a digest of what determines the votes."""
        ...

    def counts(self, rows: Sequence[int]) -> IntArray:
        """``votes_QC`` on the queries in ``rows``; for one answer each."""
        ...

    def take(self, rows: Sequence[int]) -> Self:
        """The queries in ``rows``, in their order."""
        ...


@dataclass(frozen=True, kw_only=True)
class SessionResult:
    """Answers and refusals in the order asked, and the part of them that may train a student.

    ``replies`` leaves out the ``over_budget`` queries, for which nothing was charged or drawn.
    """

    replies: tuple[Answer | Refusal, ...]
    labelled: LabelledSet
    over_budget: int = 0

    @property
    def num_queries(self) -> int:
        """How many were put to the session, those without room included."""
        return len(self.replies) + self.over_budget

    @classmethod
    def joined(cls, results: Sequence[SessionResult]) -> SessionResult:
        """Several results one after the other."""
        labelled = [result.labelled for result in results]
        return cls(
            replies=tuple(reply for result in results for reply in result.replies),
            labelled=LabelledSet(
                record_ids=tuple(record_id for part in labelled for record_id in part.record_ids),
                labels=np.concatenate([part.labels for part in labelled]),
                groups=np.concatenate([part.groups for part in labelled]),
                counts=_joined([part.counts for part in labelled]),
                chances=_joined([part.chances for part in labelled]),
            ),
            over_budget=sum(result.over_budget for result in results),
        )

    def count(self, reason: RefusalReason) -> int:
        """How many queries were refused for ``reason``."""
        return sum(isinstance(reply, Refusal) and reply.reason == reason for reply in self.replies)


def answer_queries(
    batch: Ballot,
    *,
    keys: Sequence[str],
    session: AggregatorSession,
    block_size: int = 256,
    on_progress: Callable[[int], None] = lambda _: None,
) -> SessionResult:
    """Ask every query of ``batch`` in order, with its votes; ``keys[i]`` identifies query i.

    ``on_progress`` hears how many queries of the batch are done.
    """
    # Reversed, so that the first of equal keys counts.
    row_of = {key: row for row, key in reversed(list(enumerate(keys)))}
    queries = [
        Query(key=key, group=group, record_id=record_id)
        for key, group, record_id in zip(keys, batch.groups_Q.tolist(), batch.record_ids, strict=True)
    ]
    replies: list[Reply] = []
    for start in range(0, len(queries), block_size):
        replies += session.ask(
            queries[start : start + block_size], lambda new: batch.counts([row_of[query.key] for query in new])
        )
        on_progress(len(replies))
    return _collect(queries, replies, session.terms)


def _joined(parts: Sequence[npt.NDArray[Any] | None]) -> npt.NDArray[Any] | None:
    found = [part for part in parts if part is not None]
    return np.concatenate(found) if found else None


def _collect(queries: Sequence[Query], replies: Sequence[Reply], terms: LedgerTerms) -> SessionResult:
    submitted = [(query, reply) for query, reply in zip(queries, replies, strict=True) if isinstance(reply, Outcome)]
    answered = [(query, reply) for query, reply in submitted if reply.label is not None]
    counts = None
    if terms.mechanism.releases == "counts":
        rows = [reply.counts for _, reply in answered]
        counts = np.array(rows, dtype=np.int64).reshape(len(rows), terms.num_classes)
    labelled = LabelledSet(
        record_ids=tuple(query.record_id for query, _ in answered),
        labels=np.array([reply.label for _, reply in answered], dtype=np.int64),
        groups=np.array([query.group for query, _ in answered], dtype=np.int64),
        counts=counts,
        chances=None if counts is None else terms.mechanism.chances(counts, num_teachers=terms.num_teachers),
    )
    return SessionResult(
        replies=tuple(_published(query, reply) for query, reply in submitted),
        labelled=labelled,
        over_budget=len(replies) - len(submitted),
    )


def _published(query: Query, reply: Outcome) -> Answer | Refusal:
    if reply.verdict == "answer":
        assert reply.label is not None
        return Answer(record_id=query.record_id, label=reply.label)
    return Refusal(record_id=query.record_id, reason=reply.verdict)
