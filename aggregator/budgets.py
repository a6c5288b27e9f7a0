"""Budgets: the filters that end a ledger's queries, and the limits and quotas of single callers.

Three kinds of budget limit a ledger. A limit on the number of queries is priced beforehand, by privacy loss
distributions where there are any. A limit on the data-independent epsilon is a Renyi filter
(:mod:`fairpate.privacy.accountant`) at one order that is fixed before the first query. Every query costs the same, so
that this filter, too, admits a number of queries that is known beforehand, and stopping there is sound although
analysts choose queries adaptively. The guarantee is then the limit, not the cost of the queries submitted so far. A
limit on the data-dependent epsilon ends when private votes decide it, which leaks (:class:`VotesFilter`).

Reservations count in full, also those of refused and free queries and those that a crash left open.

A caller may have a limit of its own and a quota per day. Callers may act together, so the guarantee is that of the
shared budget; own limits divide it. Charges and limits are entries of the ledger and outlive a restart. A query is
charged to one caller, the first with room of those that ask for it at the same time; afterwards its answer is free for
all callers. Own limits never depend on votes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from aggregator.ledger import Ledger, LedgerTerms, OwnLimit
from aggregator.mechanism import Mechanism
from fairpate.privacy import accountant
from fairpate.privacy.accountant import DEFAULT_ORDERS, RenyiFilter, least_noise
from fairpate.privacy.events import Event
from fairpate.types import Budget, BudgetKind, IntArray

FloatArray = npt.NDArray[np.float64]
MechanismT = TypeVar("MechanismT", bound=Mechanism)
_ORDERS_A = np.array(DEFAULT_ORDERS)
# An integer beyond any count, because counts are subtracted from it; infinity would make them floats.
UNLIMITED = 2**62
DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class BudgetStatus:
    """The public part of a budget: its limits, and how much of it is spent data-independently.

    ``closed``: no new query has room. Under ``data_dependent``, both ``closed`` and ``queries_submitted`` depend on
    votes.
    """

    kind: BudgetKind
    epsilon_limit: float | None
    delta: float
    max_queries: int | None
    queries_submitted: int
    epsilon_submitted: float
    closed: bool


def budget_status(terms: LedgerTerms, *, num_queries: int, closed: bool) -> BudgetStatus:
    """Return the budget of ``terms`` after ``num_queries`` queries."""
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


class CountFilter:
    """Admits at most ``limit`` reservations for any votes."""

    def __init__(self, ledger: Ledger, limit: int) -> None:
        self._ledger, self._limit = ledger, limit

    def room(self, wanted: int) -> int:
        """Return how many of ``wanted`` queries fit."""
        return max(0, min(wanted, self._limit - self._ledger.num_reservations))

    def admit(self, votes_QC: IntArray) -> int:
        """Return how many of these queries fit, from the first on; they are reserved next."""
        return self.room(len(votes_QC))


class VotesFilter:
    """Admits reservations while their data-dependent cost stays within the limit; closes at the first that does not.

    Private: votes decide when it closes. It is also not a filter in the sense of :mod:`fairpate.privacy.accountant`:
    costs differ from query to query, and any order may be the one that is within its limit.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._mechanism, self._renyi = ledger.terms.mechanism, _renyi(ledger.terms.budget)
        self._spent_A = np.zeros(len(_ORDERS_A))
        self._closed = False
        # Reservations without an outcome count: a crash may have come after their noise was drawn.
        if ledger.num_reservations:
            self._spent_A += self._mechanism.realised_rdp(ledger.votes_QC, _ORDERS_A).sum(axis=0)

    def room(self, wanted: int) -> int:
        """Return how many of ``wanted`` queries may fit, as far as known without their votes."""
        return 0 if self._closed else wanted

    def admit(self, votes_QC: IntArray) -> int:
        """Return how many of these queries fit, from the first on; they are reserved next."""
        if self._closed or not len(votes_QC):
            return 0
        for number, price_A in enumerate(self._mechanism.realised_rdp(votes_QC, _ORDERS_A)):
            if not self._renyi.admits(self._spent_A, price_A):
                self._closed = True
                return number
            # Counted before the reservation: one that fails counts too much, never too little.
            self._spent_A = self._spent_A + price_A
        return len(votes_QC)


def open_filter(ledger: Ledger) -> CountFilter | VotesFilter:
    """Return the filter of this ledger's budget, which counts the ledger's reservations as spent."""
    if ledger.terms.budget.kind == "data_dependent":
        return VotesFilter(ledger)
    return CountFilter(ledger, queries_that_fit(ledger.terms, UNLIMITED))


def _renyi(budget: Budget) -> RenyiFilter:
    assert budget.epsilon is not None
    return RenyiFilter(target_epsilon=budget.epsilon, target_delta=budget.delta, orders_A=_ORDERS_A)


def queries_that_fit(terms: LedgerTerms, wanted: int) -> int:
    """Return how many of ``wanted`` queries a new ledger under ``terms`` admits; all where votes decide."""
    budget = terms.budget
    if budget.kind == "query_count":
        assert budget.max_queries is not None
        return min(wanted, budget.max_queries)
    if budget.kind == "data_dependent":
        return wanted
    # Equal charges from nothing: the whole grid of orders admits exactly what its best order does, so this is the
    # number at one order fixed in advance. A filter that chose its order by what was answered would not be sound.
    return min(wanted, _renyi(budget).max_queries(accountant.rdp([terms.mechanism.worst_case(1)], _ORDERS_A)))


def mechanism_within(
    mechanism: MechanismT, *, target_epsilon: float, target_delta: float, num_queries: int
) -> MechanismT:
    """Return ``mechanism`` with its noise scaled by the least factor that keeps ``num_queries`` within the target.

    Holds for any votes. Queries that have a loss distribution are priced by it; then no more than ``num_queries`` may
    be submitted. ValueError for a target that no noise reaches.
    """
    arguments = (mechanism, target_epsilon, target_delta, num_queries)
    try:
        factor = _factor_within(*arguments)
    except TypeError:  # a user's mechanism may have a parameter that is not hashable
        factor = _factor_within.__wrapped__(*arguments)
    return mechanism.scaled(factor)


# Cached: a run asks before it works, while it works and when it reports.
@lru_cache
def _factor_within(mechanism: Mechanism, target_epsilon: float, target_delta: float, num_queries: int) -> float:
    def events(factor: float) -> list[Event]:
        return [mechanism.scaled(factor).worst_case(num_queries)]

    factor = least_noise(events, target_epsilon=target_epsilon, target_delta=target_delta)
    if (
        accountant.has_loss_distributions(events(factor))
        and accountant.epsilon_pld(events(factor), target_delta=target_delta) <= target_epsilon
    ):
        # From the curves' factor down: with far more noise, distributions on the integers are long.
        factor = least_noise(
            events,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            accounting="pld",
            largest_noise=factor,
        )
    return factor


def epsilon_data_independent(terms: LedgerTerms, *, num_queries: int) -> float:
    """Return the epsilon of ``num_queries`` reservations for any votes, at the budget's delta."""
    events: list[Event] = [terms.mechanism.worst_case(num_queries)]
    if terms.budget.kind == "query_count":
        return accountant.least_epsilon(events, target_delta=terms.budget.delta)
    # A limit on epsilon is a Renyi filter, which spends by curves.
    return accountant.epsilon(events, target_delta=terms.budget.delta).epsilon


# Cached by terms, which never change once a ledger is made: statements and pages ask for it repeatedly.
@lru_cache(maxsize=16)
def epsilon_fixed_beforehand(terms: LedgerTerms) -> float | None:
    """Return the epsilon that was fixed before the first query, for any way to choose and end queries.

    It is stated at the budget's delta. None for a data-dependent budget, which fixes no such bound.
    """
    budget = terms.budget
    if budget.kind == "data_dependent":
        return None
    if budget.max_queries is None:
        return budget.epsilon
    return accountant.least_epsilon([terms.mechanism.worst_case(budget.max_queries)], target_delta=budget.delta)


QuotaRoom = Callable[[str], float]
"""How many new queries a caller's quota allows now."""


@dataclass(frozen=True, kw_only=True)
class OwnStatus:
    """A caller's limit and how much of it is spent, data-independent.

    ``left``: how many new queries the limit still admits; None without a limit.
    """

    limit: OwnLimit
    queries: int
    epsilon: float
    left: int | None


def status_of(ledger: Ledger, caller: str, limit: OwnLimit) -> OwnStatus:
    """Return how much ``caller`` spent, and how much is left under ``limit``."""
    queries = ledger.charged_to(caller)
    most = most_queries(ledger.terms, limit)
    return OwnStatus(
        limit=limit,
        queries=queries,
        epsilon=epsilon_data_independent(ledger.terms, num_queries=queries),
        left=None if most == UNLIMITED else max(0, most - queries),
    )


# Cached: the Renyi curve behind a limit on epsilon is too slow to compute for every query.
@lru_cache(maxsize=4096)
def most_queries(terms: LedgerTerms, limit: OwnLimit) -> int:
    """Return how many queries a caller under ``limit`` may ever be charged with."""
    most = UNLIMITED if limit.max_queries is None else limit.max_queries
    if limit.epsilon is None:
        return most
    budget = Budget(kind="data_independent", delta=terms.budget.delta, epsilon=limit.epsilon)
    return queries_that_fit(replace(terms, budget=budget), most)


@dataclass(frozen=True, kw_only=True)
class QuotaRefusal:
    """A refusal: ``allowed_now`` new queries are left; the request fits after ``retry_after_s`` (inf: never)."""

    allowed_now: int
    retry_after_s: float


class QuotaExceededError(Exception):
    """A request of ``num_new`` new queries that its caller's quota has no room for."""

    def __init__(self, refusal: QuotaRefusal, num_new: int) -> None:
        super().__init__(f"{num_new} new queries, {refusal.allowed_now} allowed now")
        self.refusal, self.num_new = refusal, num_new


@dataclass(frozen=True, kw_only=True)
class QuotaRule:
    """``max_queries`` new queries per caller at once, refilled evenly over ``period_s``; inf: no quota."""

    max_queries: float = math.inf
    period_s: float = DAY_S

    def __post_init__(self) -> None:
        if not self.max_queries > 0 or not 0 < self.period_s < math.inf:
            raise ValueError(
                f"Expected max_queries > 0 and 0 < period_s < inf, got {self.max_queries} and {self.period_s}."
            )


@dataclass(kw_only=True)
class _Bucket:
    """A leaky bucket: the charges of one caller that have not leaked out yet. ``num_seen`` requests were counted."""

    rule: QuotaRule
    level: float = 0.0
    filled_at_s: float = 0.0
    num_seen: int = 0

    def level_at(self, now_s: float) -> float:
        # While a clock that was set back catches up, nothing leaks out.
        passed_s = max(0.0, now_s - self.filled_at_s)
        return max(0.0, self.level - passed_s * self.rule.max_queries / self.rule.period_s)

    def room_at(self, now_s: float) -> float:
        return math.inf if math.isinf(self.rule.max_queries) else self.rule.max_queries - self.level_at(now_s)


class Quotas:
    """Counts how many new queries each caller may ask now: leaky buckets, filled by the charges in the ledger.

    ``now_s`` is in seconds since 1970, on the clock of the ledger's charges.
    """

    def __init__(self, rule: QuotaRule) -> None:
        self._rule = rule
        self._buckets: dict[str, _Bucket] = {}

    def refusal(self, ledger: Ledger, caller: str, num_queries: int, *, now_s: float) -> QuotaRefusal | None:
        """Return why ``caller`` may not be charged with ``num_queries`` now, or None; nothing is taken."""
        bucket = self._bucket(ledger, caller)
        free, rule = bucket.room_at(now_s), bucket.rule
        if num_queries <= free:
            return None
        wait_s = math.inf  # a request for more than the bucket holds never fits
        if num_queries <= rule.max_queries:
            # Nothing leaks until a clock that was set back has caught up.
            still_s = max(0.0, bucket.filled_at_s - now_s)
            wait_s = still_s + (num_queries - free) * rule.period_s / rule.max_queries
        return QuotaRefusal(allowed_now=max(0, math.floor(free)), retry_after_s=wait_s)

    def room(self, ledger: Ledger, caller: str, *, now_s: float) -> float:
        """Return how many new queries ``caller`` may be charged with now; inf without a quota."""
        return self._bucket(ledger, caller).room_at(now_s)

    def _bucket(self, ledger: Ledger, caller: str) -> _Bucket:
        """Return the caller's bucket with all charges counted."""
        # A quota of the caller itself replaces that of the service, in both directions.
        own = ledger.limit_of(caller).per_day
        rule = self._rule if own is None else QuotaRule(max_queries=own)
        bucket = self._buckets.get(caller)
        # Under another rule all earlier charges are counted again, as that rule counts them.
        if bucket is None or bucket.rule != rule:
            bucket = self._buckets[caller] = _Bucket(rule=rule)
        if math.isinf(rule.max_queries):
            return bucket
        for asked in ledger.asked[bucket.num_seen :]:
            if asked.asker.caller == caller:
                bucket.level = bucket.level_at(asked.at_s) + asked.num_queries
                # Never back: after a clock was set back, time that has leaked once must not leak again.
                bucket.filled_at_s = max(bucket.filled_at_s, asked.at_s)
        bucket.num_seen = len(ledger.asked)
        return bucket
