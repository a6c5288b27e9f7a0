"""One querying session on a ledger: queries in, answers out, one charge each, until the budget is spent.

**Budgets.** A ledger has one of three kinds of limit. The cost of a limit on the *number of queries* is computed before
the first query, by privacy loss distributions where available. A limit on the *data-independent epsilon* is a Renyi
filter (:mod:`fairpate.privacy.accountant`) at one order that is fixed before the first query. Every query costs the
same, so this filter, too, admits a number of queries that is known beforehand, and stopping there is sound although
analysts choose queries adaptively. The guarantee is then the limit, not the cost of the queries submitted so far. With
a limit on the *data-dependent epsilon*, private votes determine when the budget ends, which leaks information.
Reservations count in full, including those of refused and free queries and those that a crash left open.

**Callers.** A caller may have an individual limit and a quota per day. Callers may collude, so the guarantee is that of
the shared budget; individual limits divide it. If several callers submit the same query at the same time, the first
with room is charged; afterwards the answer is free for all callers. Individual limits never depend on votes.

**Answers.** Vote, reserve, draw, commit, release, in this order: the reservation of a block of queries is durable
before its first noise is drawn, and no answer of a block leaves before all its outcomes are durable. Threads may vote
at the same time and write one after another.

**Offsets.** A service of a run whose noisy counts are released adds the ledger's offsets to them, whole numbers of
votes for each class, before the class with most votes is named. The gate reads the label with offsets. Labels of the
run's own queries were named before there were offsets: a service names them again from the counts that were released
with them, in their order, and behind the same gate. This is post-processing, and so is the answer of a public rule to a
query on which the votes would hardly name another class: such an answer passes the gate too, is stored, and is free.

**Queries** are identified by content. Features that are posted are converted to the public pool's type and shape before
they are hashed, so that another spelling of the same numbers (0.1 or 0.10000000149, 0.0 or -0.0) is the same query.

**A batch.** :func:`answer_queries` submits public queries in order and collects the labels that may train a student.
:func:`admit_queries` chooses which queries to submit next. A label that the gate rejects costs as much as an answer,
because the votes were used. A model of the labels released so far predicts the next label, and the gate's counters are
public; so a query that the gate would probably reject is postponed, without using a vote, and may be admitted when the
counters have changed. This is post-processing of released labels, so it is free.

Shapes: N candidates, Q queries, C classes, A orders.
"""

import hashlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from aggregator.ledger import NO_LIMIT, NOBODY, Asker, CallerLimit, Ledger, LedgerTerms, Offsets
from aggregator.mechanism import Mechanism, Outcome, outcome
from fairpate.data.tables import RecordForm
from fairpate.fairness.gate import DemographicParityGate
from fairpate.privacy import accountant
from fairpate.privacy.accountant import DEFAULT_ORDERS, Event, RenyiFilter, least_noise
from fairpate.privacy.discrete_gaussian import NoiseSource
from fairpate.types import BudgetKind, FloatArray, IntArray, LabelledSet, QueryBudget, strict

Features = npt.NDArray[np.generic]
_ORDERS_A = np.array(DEFAULT_ORDERS)
# An integer beyond any count, because counts are subtracted from it; infinity would make them floats.
UNLIMITED = 2**62
DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class BudgetStatus:
    """The public state of a privacy budget: its limits, and how much of it is spent by data-independent accounting.

    ``closed`` is True if no new query has room. For a budget of the kind ``data_dependent``, ``closed`` and
    ``queries_submitted`` depend on votes.
    """

    kind: BudgetKind
    epsilon_limit: float | None
    delta: float
    max_queries: int | None
    queries_submitted: int
    epsilon_submitted: float
    closed: bool

    def to_json(self) -> dict[str, Any]:
        """Return this object's fields as JSON values; an infinite epsilon becomes null."""
        return asdict(self) | {"epsilon_submitted": strict(self.epsilon_submitted)}


def budget_status(terms: LedgerTerms, *, num_queries: int, closed: bool) -> BudgetStatus:
    """Return the state that the budget in ``terms`` has after ``num_queries`` queries. ``closed``: no new query has
    room."""
    budget = terms.budget
    return BudgetStatus(
        kind=budget.kind,
        epsilon_limit=budget.epsilon,
        delta=budget.delta,
        max_queries=budget.max_queries,
        queries_submitted=num_queries,
        epsilon_submitted=epsilon_data_independent(terms, num_queries=num_queries),
        closed=closed,
    )


def queries_that_fit(terms: LedgerTerms, wanted: int) -> int:
    """Return how many of ``wanted`` queries the budget of a new ledger with these ``terms`` has room for. If votes
    decide when the budget ends, ``wanted`` is returned."""
    budget = terms.budget
    if budget.max_queries is not None:
        return min(wanted, budget.max_queries)
    if budget.kind == "data_dependent":
        return wanted
    assert budget.epsilon is not None
    # Equal charges from nothing: the whole grid of orders admits exactly what its best order does, so this is the
    # number at one order fixed in advance. A filter that chose its order by what was answered would not be sound.
    renyi = RenyiFilter(target_epsilon=budget.epsilon, target_delta=budget.delta)
    # So are the releases beside the queries, whose cost is fixed beforehand too.
    beside_A = accountant.rdp(terms.beside)
    return min(wanted, renyi.max_queries(accountant.rdp([terms.mechanism.worst_case(1)]), spent_A=beside_A))


# Cached: a run calls this before it works, while it works and when it reports.
@lru_cache
def mechanism_within(
    mechanism: Mechanism,
    *,
    target_epsilon: float,
    target_delta: float,
    num_queries: int,
    beside: tuple[Event, ...] = (),
) -> Mechanism:
    """Return ``mechanism`` with the least noise for which ``num_queries`` queries cost at most ``target_epsilon``, at
    ``target_delta``, together with the events ``beside`` them, whose noise is fixed.

    The cost is data-independent: it holds for any votes. It is computed by privacy loss distributions where available;
    then no more than ``num_queries`` may be submitted. ValueError for a target that no noise reaches.
    """

    unit = beside[0].unit if beside else "record"

    def events(factor: float) -> list[Event]:
        return [accountant.of_unit(mechanism.scaled(factor).worst_case(num_queries), unit), *beside]

    factor = least_noise(events, target_epsilon=target_epsilon, target_delta=target_delta)
    if (
        accountant.has_loss_distributions(events(factor))
        and accountant.epsilon_pld(events(factor), target_delta=target_delta) <= target_epsilon
    ):
        # From the curves' factor down: with far more noise, distributions on the integers are long.
        factor = least_noise(
            events, target_epsilon=target_epsilon, target_delta=target_delta, accounting="pld", largest_noise=factor
        )
    return mechanism.scaled(factor)


def epsilon_data_independent(terms: LedgerTerms, *, num_queries: int) -> float:
    """Return the data-independent epsilon of ``num_queries`` charged queries and of the releases beside them, at the
    delta of the budget in ``terms``."""
    events = terms.events(num_queries)
    if terms.budget.kind == "query_count":
        return accountant.least_epsilon(events, target_delta=terms.budget.delta)
    # A limit on epsilon is a Renyi filter, which spends by curves.
    return accountant.epsilon(events, target_delta=terms.budget.delta).epsilon


# Cached by terms, which never change once a ledger is made: statements and pages ask for it repeatedly.
@lru_cache(maxsize=16)
def epsilon_fixed_beforehand(terms: LedgerTerms) -> float | None:
    """Return the epsilon that was fixed before the first query, and that holds for any choice and any number of
    queries.

    It holds at the budget's delta. None for a budget on the data-dependent epsilon, for which no such bound is known.
    """
    budget = terms.budget
    if budget.kind == "data_dependent":
        return None
    if budget.max_queries is None:
        return budget.epsilon
    return accountant.least_epsilon(terms.events(budget.max_queries), target_delta=budget.delta)


QuotaRoom = Callable[[str], float]
"""Returns how many new queries a caller's quota allows now."""
Admit = Callable[[Sequence["Query"]], Sequence["Query"]]
"""Returns the given queries, each with those of its askers alone who may still be charged."""


# Cached: the Renyi curve behind a limit on epsilon is too slow to compute for every query.
@lru_cache(maxsize=4096)
def most_queries(terms: LedgerTerms, limit: CallerLimit) -> int:
    """Return the largest number of queries that may be charged in total to a caller whose own ``limit`` is a number of
    queries, an epsilon, or both."""
    most = UNLIMITED if limit.max_queries is None else limit.max_queries
    if limit.epsilon is None:
        return most
    budget = QueryBudget(kind="data_independent", delta=terms.budget.delta, epsilon=limit.epsilon)
    # No caller asked for what was released beside the queries.
    return queries_that_fit(replace(terms, budget=budget, beside=()), most)


@dataclass(kw_only=True, eq=False)
class QuotaExceededError(Exception):
    """A request was refused because it has ``num_new`` new queries and the caller's quota allows only ``allowed_now``.

    The quota allows the request after ``retry_after_s`` seconds (inf: never).
    """

    num_new: int
    allowed_now: int
    retry_after_s: float


@dataclass(frozen=True, kw_only=True)
class QuotaRule:
    """The quota of a caller: at most ``max_queries`` new queries at once, refilled evenly over ``period_s`` seconds. An
    infinite ``max_queries`` means no quota."""

    max_queries: float = math.inf
    period_s: float = DAY_S

    def __post_init__(self) -> None:
        if not self.max_queries > 0 or not 0 < self.period_s < math.inf:
            raise ValueError(
                f"Expected max_queries > 0 and 0 < period_s < inf, got {self.max_queries} and {self.period_s}."
            )


@dataclass(kw_only=True)
class _Bucket:
    """The leaky bucket that tracks one caller's quota: ``level`` is the number of charges that have not leaked out yet,
    computed from the first ``num_seen`` requests in the ledger."""

    rule: QuotaRule
    level: float = 0.0
    filled_at_s: float = 0.0
    num_seen: int = 0

    def level_at(self, now_s: float) -> float:
        # While a clock that was set back catches up, nothing leaks out.
        passed_s = max(0.0, now_s - self.filled_at_s)
        return max(0.0, self.level - passed_s * self.rule.max_queries / self.rule.period_s)


@dataclass(eq=False)
class Quotas:
    """Computes how many new queries each caller may submit now, with one leaky bucket per caller, which its charges
    fill.

    ``now_s`` is in seconds since 1970, on the same clock as the ledger's charges.
    """

    rule: QuotaRule
    _buckets: dict[str, _Bucket] = field(default_factory=dict, init=False)

    def refusal(self, ledger: Ledger, caller: str, num_queries: int, *, now_s: float) -> QuotaExceededError | None:
        """Return an error if the quota of ``caller`` does not allow ``num_queries`` new queries now, else None. Nothing
        is charged."""
        free = self.room(ledger, caller, now_s=now_s)
        if num_queries <= free:
            return None
        bucket = self._buckets[caller]
        rule = bucket.rule
        wait_s = math.inf  # a request for more than the bucket holds never fits
        if num_queries <= rule.max_queries:
            # Nothing leaks until a clock that was set back has caught up.
            still_s = max(0.0, bucket.filled_at_s - now_s)
            wait_s = still_s + (num_queries - free) * rule.period_s / rule.max_queries
        return QuotaExceededError(num_new=num_queries, allowed_now=max(0, math.floor(free)), retry_after_s=wait_s)

    def room(self, ledger: Ledger, caller: str, *, now_s: float) -> float:
        """Return how many new queries the quota of ``caller`` allows now; inf without a quota."""
        # A quota of the caller itself replaces that of the service, in both directions.
        own = ledger.limits.get(caller, NO_LIMIT).per_day
        rule = self.rule if own is None else QuotaRule(max_queries=own)
        bucket = self._buckets.get(caller)
        # Under another rule all earlier charges are counted again, as that rule counts them.
        if bucket is None or bucket.rule != rule:
            bucket = self._buckets[caller] = _Bucket(rule=rule)
        if math.isinf(rule.max_queries):
            return math.inf
        for asked in ledger.asked[bucket.num_seen :]:
            if asked.asker.caller == caller:
                bucket.level = bucket.level_at(asked.at_s) + asked.num_queries
                # Never back: after a clock was set back, time that has leaked once must not leak again.
                bucket.filled_at_s = max(bucket.filled_at_s, asked.at_s)
        bucket.num_seen = len(ledger.asked)
        return rule.max_queries - bucket.level_at(now_s)


MAX_BLOCK = 1024
"""The largest number of queries in one transaction, and so the most that a crash can waste."""


class VotesUnavailableError(RuntimeError):
    """A teacher did not vote: nothing was charged, drawn or stored, and the queries may be submitted again."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """A query about one record: ``key`` is the hash of the record's content (:func:`query_key`); ``group`` and
    ``record_id`` are the record's public group and name.

    ``askers`` are the callers who submit the query now; the first with room in its own limit and quota is charged.
    """

    key: str
    group: int
    record_id: str
    askers: tuple[Asker, ...] = (NOBODY,)


@dataclass(frozen=True)
class OverBudget:
    """The reply to a query for which the budget, or the caller's own limit, has no room: nothing was charged or
    drawn."""


Reply = Outcome | OverBudget
VoteFunction = Callable[[Sequence[Query]], IntArray]
"""Returns the votes of all teachers on Q queries, shape (Q, C); raises VotesUnavailableError if a teacher is
missing."""


def query_key(features: npt.NDArray[np.generic], group: int) -> str:
    """Return the hash of a record's features and public group, which identifies the query."""
    # Type and shape too: equal bytes of another type are another record.
    digest = hashlib.sha256(f"{features.dtype.str}{features.shape}{group}".encode())
    digest.update(np.ascontiguousarray(features).tobytes())
    return digest.hexdigest()


PublicAnswers = Callable[[Sequence[Query]], Sequence[int | None]]
"""Returns for each query the label that public things alone give it, or None if its voters have to be asked."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A query together with the features of its record, from which the teachers predict their votes."""

    query: Query
    features: Features


CountVotes = Callable[[Sequence[Question]], IntArray]
"""Returns the votes of all teachers on Q questions, shape (Q, C); raises ``VotesUnavailableError`` if one is
missing."""


@dataclass(frozen=True, kw_only=True)
class PublicPool:
    """N public records that analysts submit by number, and the public names of groups and labels.

    ``features`` (N, ...) is ``uint8`` or ``float32``; ``groups_N`` are indices into ``group_names``. ``form`` declares
    the columns of a record, if it has columns; ``place`` maps their encoded values to features. ``picture`` maps the
    bytes of a PNG or JPEG file to features if records are pictures, and raises ValueError for other bytes.
    ``takes_posted`` is True if the voters can vote on records that are not in the pool.
    """

    features: Features
    groups_N: IntArray
    record_ids: Sequence[str]
    group_names: tuple[str, ...]
    label_names: tuple[str, ...]
    form: RecordForm | None = None
    takes_posted: bool = True
    place: Callable[[npt.NDArray[np.float32]], Features] = lambda features: features
    picture: Callable[[bytes], Features] | None = None

    def __post_init__(self) -> None:
        assert len(self.features) == len(self.groups_N) == len(self.record_ids)
        # Only these two: `bodies_for` derives the range of posted values from the type.
        assert self.features.dtype in (np.uint8, np.float32)

    def __len__(self) -> int:
        return len(self.record_ids)

    @property
    def record_shape(self) -> tuple[int, ...]:
        """The shape of one record's features."""
        return tuple(self.features.shape[1:])

    def posted(self, features: Sequence[Any], group: str) -> Question:
        """Return a query with features about a record that was sent in a request; shape and range of ``features`` must
        have been validated."""
        # In the pool's type before it is hashed, and -0.0 as 0.0, which is their sum: all spellings of a number are one
        # query, and charged once.
        array: Features = np.add(np.asarray(features, dtype=self.features.dtype), self.features.dtype.type(0))
        code = self.group_names.index(group)
        key = query_key(array, code)
        return Question(query=Query(key=key, group=code, record_id=f"posted-{key[:16]}"), features=array)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """A mapping from the content hash of each record in the pool to its number."""
        return {question.query.key: number for number, question in enumerate(self.questions)}

    @cached_property
    def questions(self) -> tuple[Question, ...]:
        """A query with features for every record of the pool, in order of the records' numbers; hashed on first use."""
        zero = self.features.dtype.type(0)
        return tuple(
            Question(
                # The key alone needs equal bytes, with -0.0 as 0.0; voters see the stored record.
                query=Query(key=query_key(np.add(x, zero), group), group=group, record_id=record_id),
                features=x,
            )
            for x, group, record_id in zip(self.features, self.groups_N.tolist(), self.record_ids, strict=True)
        )


class AggregatorSession:
    """Answers queries with the teachers' votes, within the privacy budget of one ``ledger``. Any thread may call its
    methods.

    A budget on the data-dependent epsilon is closed by the first query whose data-dependent cost has no room.
    """

    def __init__(self, ledger: Ledger, *, source: NoiseSource, with_offsets: bool = False) -> None:
        """Open a session on ``ledger``. ``with_offsets``: add the offsets of the ledger, if it has some, as a service
        does; a run repeats its own answers without them. ValueError unless ``source`` is the kind of noise that the
        ledger's terms declare."""
        # The terms are what the published statement says about the noise.
        if source.label != ledger.terms.noise:
            raise ValueError(
                f"source: the ledger's terms declare {ledger.terms.noise} noise, got {source.label}; give the "
                "declared kind."
            )
        self.ledger, self._source = ledger, source
        self._gate: DemographicParityGate | None = None
        self.offsets = ledger.offsets if with_offsets else None
        # Reads no vote, only what the run released.
        self._named_again = {} if self.offsets is None else _with_offsets(ledger, self.offsets)
        # Reentrant: `admit`, which is called under it, may store changed limits.
        self._lock = threading.RLock()
        self._most_queries = queries_that_fit(ledger.terms, UNLIMITED)
        budget, self._votes_filter, self._spent_A = ledger.terms.budget, None, np.zeros(len(_ORDERS_A))
        if budget.kind == "data_dependent":
            assert budget.epsilon is not None
            self._votes_filter = RenyiFilter(target_epsilon=budget.epsilon, target_delta=budget.delta)
            # Reservations without an outcome count: a crash may have come after their noise was drawn.
            if ledger.keys:
                self._spent_A += ledger.terms.mechanism.realised_rdp(ledger.votes_QC, _ORDERS_A).sum(axis=0)

    def budget_status(self, num_new_queries: int = 0) -> BudgetStatus:
        """Return the public state that the budget will have after ``num_new_queries`` more queries, whether or not all
        of them have room."""
        return budget_status(
            self.ledger.terms,
            num_queries=len(self.ledger.keys) + num_new_queries,
            # Whether one more would have room behind them.
            closed=self.room(num_new_queries + 1) <= num_new_queries,
        )

    def room(self, wanted: int) -> int:
        """Return how many of ``wanted`` new queries the budget has room for, as far as this is known without votes."""
        return max(0, min(wanted, self._most_queries - len(self.ledger.keys)))

    def limit(self, caller: str, limit: CallerLimit) -> None:
        """Store in the ledger how much ``caller`` may spend from now on. LedgerError if the ledger cannot be
        written."""
        with self._lock:
            self.ledger.limit(caller, limit)

    def stored(self, key: str) -> Outcome | None:
        """Return the outcome of the query ``key``, with the offsets if this session adds some; None if it has none.
        Any thread may call this."""
        return self._named_again.get(key) or self.ledger.outcome_of.get(key)

    def lead(self, reply: Reply) -> int | None:
        """Return by how many noisy votes, with offsets, the label of an answer leads the next one; None if no counts
        were released with it. It follows from released counts alone."""
        if not isinstance(reply, Outcome) or reply.counts is None:
            return None
        counts_C = np.array(reply.counts) + (0 if self.offsets is None else np.array(self.offsets.votes))
        second, first = np.sort(counts_C)[-2:].tolist()
        return int(first - second)

    def ask(
        self,
        queries: Sequence[Query],
        vote: VoteFunction,
        *,
        quota: QuotaRoom = lambda _: math.inf,
        admit: Admit = lambda queries: queries,
        public: PublicAnswers | None = None,
    ) -> tuple[Reply, ...]:
        """Submit queries; return one reply per query, in order. The first new query for which the budget has no room is
        not charged, and neither are the new queries after it.

        A query whose outcome is stored gets this outcome again: nothing is charged or drawn, even if the budget is
        closed. ``vote`` is called with new queries only; no caller is charged with more of them than ``quota`` allows.
        ``admit`` decides who may be charged at all. Both are asked before the vote, and again right before the charge,
        because a vote may take a minute. A new query to which ``public`` gives a label gets this label if the gate
        admits it, and is refused otherwise: neither is charged, also if the budget is closed.

        VotesUnavailableError if not all teachers voted, LedgerError if the ledger cannot be written; outcomes that were
        stored before the error are returned when the queries are submitted again.
        """
        ledger, terms = self.ledger, self.ledger.terms
        # A query that is given twice is voted on and charged once.
        distinct = list({query.key: query for query in queries if ledger.outcome_of.get(query.key) is None}.values())
        for query in distinct:
            if not 0 <= query.group < terms.num_groups:
                raise ValueError(
                    f"Expected 0 <= group < {terms.num_groups} in each query, got {query.group}; give the "
                    "index of a group."
                )
        if public is not None and distinct:
            answers = zip(distinct, public(distinct), strict=True)
            known = {query.key: label for query, label in answers if label is not None}
            with self._lock:
                self._write_free([query for query in distinct if query.key in known], known, admit)
            distinct = [query for query in distinct if query.key not in known]
        # Without the lock, so that no teacher votes on queries without room; decided again under the lock.
        payers = self._payers(admit(distinct), quota)
        new = [query for query, payer in zip(distinct, payers, strict=True) if payer is not None]
        new = new[: self.room(len(new))]
        if new:
            # Votes come before the lock is taken, so that slow teachers hold up no other thread.
            votes_QC = vote(new)
            # Signed integers only: noise is negative too, and other types would wrap around or be rounded.
            if votes_QC.shape != (len(new), max(2, terms.num_classes)) or votes_QC.dtype.kind != "i":
                what = (
                    f"{(len(new), terms.num_classes)} for at least two classes, got {votes_QC.dtype} {votes_QC.shape}"
                )
                raise ValueError(f"Expected the vote function to return votes as integers of shape {what}.")
            if votes_QC.min() < 0:
                raise ValueError(
                    "Expected votes >= 0, but the vote function returned a negative count; correct this function."
                )
            totals_Q = votes_QC.sum(axis=1)
            if (totals_Q > terms.num_teachers).any() or (
                terms.mechanism.all_vote and (totals_Q < terms.num_teachers).any()
            ):
                raise VotesUnavailableError(
                    f"Expected the votes of all {terms.num_teachers} teachers on every query, got fewer or more; "
                    "submit the queries again."
                )
            with self._lock:
                self._write(new, votes_QC, quota, admit)
        # From the ledger, not from the draw: an outcome that is not stored does not leave.
        return tuple([self.stored(query.key) or OverBudget() for query in queries])

    def _payers(self, queries: Sequence[Query], quota: QuotaRoom) -> list[Asker | None]:
        """Return who is to be charged for each new query: the first of its askers who has room, None if none has.

        A caller has room if both its individual limit and its ``quota`` allow one more query. The result is valid until
        the next charge, so only the thread that has the session's lock may rely on it.
        """
        ledger = self.ledger
        # Counted down here: the ledger knows these charges only when their block is reserved.
        left: dict[str, float] = {}
        payers: list[Asker | None] = []
        for query in queries:
            payers.append(None)
            for asker in query.askers:
                caller = asker.caller
                if caller not in left:
                    own = most_queries(ledger.terms, ledger.limits.get(caller, NO_LIMIT)) - ledger.charged_to[caller]
                    left[caller] = min(own, quota(caller))
                if left[caller] >= 1:
                    left[caller] -= 1
                    payers[-1] = asker
                    break
        return payers

    def _write(self, queries: Sequence[Query], votes_QC: IntArray, quota: QuotaRoom, admit: Admit) -> None:
        """Charge queries, draw their outcomes and store them, block by block. Queries that already have an outcome, or
        for which the budget has no room, are left out."""
        ledger, terms, gate = self.ledger, self.ledger.terms, self._present_gate()
        offsets = {} if self.offsets is None else {"offsets_C": self.offsets.votes}
        # Another thread may have got an outcome since these votes were cast.
        new = [row for row, query in enumerate(queries) if ledger.outcome_of.get(query.key) is None]
        try:
            for start in range(0, len(new), MAX_BLOCK):
                block = new[start : start + MAX_BLOCK]
                # Admitted under the lock, right before it is reserved: no other thread can take the same room.
                payers = self._payers(admit([queries[row] for row in block]), quota)
                charged = [(row, payer) for row, payer in zip(block, payers, strict=True) if payer is not None]
                charged = charged[: self.room(len(charged))]
                if self._votes_filter is not None and charged:
                    prices_QA = terms.mechanism.realised_rdp(votes_QC[[row for row, _ in charged]], _ORDERS_A)
                    for count, price_A in enumerate(prices_QA):
                        if not self._votes_filter.admits(self._spent_A, price_A):
                            self._most_queries, charged = 0, charged[:count]
                            break
                        # Counted before the reservation: one that fails counts too much, never too little.
                        self._spent_A = self._spent_A + price_A
                if not charged:
                    continue
                asked, block_QC = [queries[row] for row, _ in charged], votes_QC[[row for row, _ in charged]]
                keys, groups = [query.key for query in asked], [query.group for query in asked]
                # Charged first: a crash from here on leaves a charge without an answer, never the reverse.
                reserved = ledger.reserve(keys, groups, block_QC, [payer for _, payer in charged])
                outcomes = terms.mechanism.answer(
                    block_QC, groups=groups, keys=keys, gate=gate, source=self._source, **offsets
                )
                ledger.commit(reserved, outcomes)
        except BaseException:
            # The gate may have counted answers that were not committed; also after an interrupt.
            self._gate = None
            raise

    def _write_free(self, queries: Sequence[Query], labels: Mapping[str, int], admit: Admit) -> None:
        """Store the public ``labels`` (by key) of new queries if the gate admits them, block by block; nothing is
        charged. A query that nobody may submit any more is left out."""
        ledger, gate = self.ledger, self._present_gate()
        new = [query for query in queries if ledger.outcome_of.get(query.key) is None]
        try:
            for start in range(0, len(new), MAX_BLOCK):
                block = [query for query in admit(new[start : start + MAX_BLOCK]) if query.askers]
                if not block:
                    continue
                keys, groups = [query.key for query in block], [query.group for query in block]
                outcomes = []
                for query in block:
                    label = labels[query.key]
                    is_admitted = gate.admit(query.group, label)
                    outcomes.append(outcome(verdict="answer", label=label) if is_admitted else outcome(verdict="free"))
                ledger.answer_free(keys, groups, outcomes, [query.askers[0] for query in block])
        except BaseException:
            # As in `_write`.
            self._gate = None
            raise

    def _present_gate(self) -> DemographicParityGate:
        """Return the gate with the counts of all answers that were released; the caller has the session's lock."""
        ledger, terms = self.ledger, self.ledger.terms
        if self._gate is None:
            # Stored nowhere: its state is the counts of the answers that were committed. A reservation that a crash
            # left open released no answer, and moves no rate.
            counts_GC = np.zeros((terms.num_groups, terms.num_classes), dtype=np.int64)
            charged = zip(ledger.groups, map(self._shown, ledger.keys, ledger.outcomes), strict=True)
            free = [(group, ledger.outcome_of[key]) for key, group in ledger.free.items()]
            for group, settled in [*charged, *free]:
                if settled is not None and settled.label is not None:
                    counts_GC[group, settled.label] += 1
            self._gate = DemographicParityGate(
                terms.gate, num_groups=terms.num_groups, num_classes=terms.num_classes, counts_GC=counts_GC
            )
        return self._gate

    def _shown(self, key: str, settled: Outcome | None) -> Outcome | None:
        return None if settled is None else self._named_again.get(key, settled)


def _with_offsets(ledger: Ledger, offsets: Offsets) -> dict[str, Outcome]:
    """Return the outcomes, by key, of the queries that were answered before the ledger had ``offsets``: named again
    from the counts that were released with them, in their order, behind a gate of their own."""
    terms, found = ledger.terms, dict[str, Outcome]()
    gate = DemographicParityGate(terms.gate, num_groups=terms.num_groups, num_classes=terms.num_classes)
    before = slice(ledger.num_before_offsets)
    for key, group, settled in zip(ledger.keys[before], ledger.groups[before], ledger.outcomes[before], strict=True):
        if settled is not None and settled.counts is not None:
            label = offsets.label(settled.counts)
            is_admitted = gate.admit(group, label)
            found[key] = replace(settled, label=label) if is_admitted else outcome(verdict="fairness")
    return found


def admit_queries(
    probabilities_NC: FloatArray, groups_N: IntArray, *, gate: DemographicParityGate, count: int
) -> list[int]:
    """Choose at most ``count`` candidates that the demographic-parity ``gate`` will probably accept; return their rows
    in submission order.

    ``probabilities_NC`` are the predicted probabilities of each candidate's label. ``gate`` counts the labels released
    so far and is modified: each chosen candidate is counted as if answered with its likeliest label. Candidates are
    tried in order, and all over again as long as one was chosen, since each choice changes the counts.
    """
    likeliest_N = probabilities_NC.argmax(axis=1)
    waiting = list(range(len(groups_N)))
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
    """Public queries together with the private votes on them; :class:`fairpate.types.VoteBatch` is one implementation.

    If voters are sampled anew for each query, the votes are drawn when :meth:`counts` is called.
    """

    @property
    def record_ids(self) -> Sequence[str]:
        """The public name of each query's record."""

    @property
    def groups_Q(self) -> IntArray:
        """The public group of each query's record."""

    @property
    def ensemble(self) -> str:
        """A digest of everything that determines the votes."""

    def counts(self, rows: Sequence[int]) -> IntArray:
        """Return ``votes_QC`` on the queries in ``rows``. Each returned vote may be used for one answer only."""

    def take(self, rows: Sequence[int]) -> Self:
        """Return a ballot of the queries in ``rows``, in this order."""


@dataclass(frozen=True, kw_only=True)
class SessionResult:
    """The replies to a batch of queries, in order, and the answered records, which may train a student.

    ``over_budget`` counts the queries for which the budget had no room; ``replies`` does not contain them.
    """

    replies: tuple[Outcome, ...]
    labelled: LabelledSet
    over_budget: int = 0


def answer_queries(
    batch: Ballot,
    *,
    keys: Sequence[str],
    session: AggregatorSession,
    block_size: int = 256,
    with_chances: bool = True,
    on_progress: Callable[[int], None] = lambda _: None,
) -> SessionResult:
    """Submit all queries of ``batch`` with their votes, in order and in blocks; ``keys[i]`` identifies query i.

    ``with_chances``: where counts are released, compute the probabilities of all labels of each query from them.
    ``on_progress`` is called with the number of queries that are done.
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
    outcomes = [(query, reply) for query, reply in zip(queries, replies, strict=True) if isinstance(reply, Outcome)]
    answered = [(query, reply) for query, reply in outcomes if reply.verdict == "answer"]
    terms, counts, chances = session.ledger.terms, None, None
    if terms.mechanism.releases == "counts":
        rows = [reply.counts for _, reply in answered]
        counts = np.array(rows, dtype=np.int64).reshape(len(rows), terms.num_classes)
        if with_chances:
            chances = terms.mechanism.chances(counts, num_teachers=terms.num_teachers)
    labelled = LabelledSet(
        record_ids=tuple(query.record_id for query, _ in answered),
        labels=np.array([reply.label for _, reply in answered], dtype=np.int64),
        groups=np.array([query.group for query, _ in answered], dtype=np.int64),
        counts=counts,
        chances=chances,
    )
    return SessionResult(
        replies=tuple(reply for _, reply in outcomes), labelled=labelled, over_budget=len(replies) - len(outcomes)
    )
