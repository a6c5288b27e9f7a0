"""When to stop: budgets of a ledger, data-independent unless asked otherwise, and limits of single callers.

What a ledger's budget still has room for: three kinds of limit over what it holds.

A limit on the data-independent price is a Renyi filter (see :mod:`fairpate.privacy.accountant`) at one order, the one
that admits most queries, known before the first: each charge is fixed before it is made, so stopping at the limit is
sound although analysts choose their queries adaptively. What is then guaranteed is the limit. The price of the queries
that were submitted is the guarantee only where their number was fixed beforehand: a number that depends on answers is
one that a filter for that number might never have stopped at. A limit on the number of queries is as sound, also for
loss distributions, tighter, which are composed for that number beforehand; it says nothing of publications. A limit on
the price that depends on votes is a filter over those prices; when it stops is a function of private votes and
therefore leaks, which no arithmetic here can fix.

Reservations count in full, refused, free and crashed ones included, and so does every publication of the price of
votes. What an analyst may see is in :class:`BudgetStatus`.

What each caller may spend of what all share: a budget of its own, and a quota per day.

The guarantee is that of the shared budget, because callers may act together; a limit of one's own divides it. Charges
and limits are entries of the ledger, so that both outlive a restart. A query is charged to one caller, the first of
those who ask for it at the same time and have room; its answer is free for everybody from then on.

A limit on epsilon is the Renyi filter of :mod:`aggregator.budgets` over the caller's queries alone, at their
worst case: it admits a number of queries that is known beforehand. No limit here depends on votes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from aggregator.ledger import Asker, Ledger, LedgerTerms, OwnLimit
from aggregator.mechanism import Mechanism
from fairpate.privacy import accountant
from fairpate.privacy.accountant import DEFAULT_ORDERS, RenyiFilter, epsilon_of_curve, least_noise
from fairpate.privacy.events import Event
from fairpate.types import Budget, BudgetKind, IntArray

FloatArray = npt.NDArray[np.float64]
MechanismT = TypeVar("MechanismT", bound=Mechanism)
_ORDERS_A = np.array(DEFAULT_ORDERS)


@dataclass(frozen=True, kw_only=True)
class BudgetStatus:
    """The public side of a budget: its limits, and what is spent of it data-independently.

    ``closed``: no new query has room. Under ``data_dependent`` that, and ``queries_submitted`` with it, follows from
    votes.
    """

    kind: BudgetKind
    epsilon_limit: float | None
    delta: float
    max_queries: int | None
    queries_submitted: int
    epsilon_submitted: float
    closed: bool


def budget_status(terms: LedgerTerms, *, num_queries: int, num_publications: int, closed: bool) -> BudgetStatus:
    """The budget of ``terms`` with so many queries and publications."""
    budget = terms.budget
    return BudgetStatus(
        kind=budget.kind,
        epsilon_limit=budget.epsilon,
        delta=budget.delta,
        max_queries=budget.max_queries,
        queries_submitted=num_queries,
        epsilon_submitted=epsilon_data_independent(terms, num_queries=num_queries, num_publications=num_publications),
        closed=closed,
    )


class BudgetFilter(Protocol):
    """Decides how many of some new queries still fit."""

    def room(self, wanted: int) -> int:
        """How many of ``wanted`` queries may fit, as far as can be said without their votes."""
        ...

    def admit(self, votes_QC: IntArray) -> int:
        """How many of these queries fit, from the first on; they are reserved next."""
        ...

    def admit_publication(self) -> bool:
        """Whether publishing the data-dependent privacy cost fits; if so it comes next."""
        ...


class CountFilter:
    """At most ``limit`` reservations."""

    def __init__(self, ledger: Ledger, limit: int) -> None:
        self._ledger, self._limit = ledger, limit

    def room(self, wanted: int) -> int:
        """Queries up to the limit."""
        return max(0, min(wanted, self._limit - self._ledger.num_reservations))

    def admit(self, votes_QC: IntArray) -> int:
        """The same; votes do not matter."""
        return self.room(len(votes_QC))

    def admit_publication(self) -> bool:
        """Always: this budget limits queries alone."""
        return True


class PriceFilter:
    """Reservations and publications while their price for any votes, at one order, stays within the limit."""

    def __init__(self, ledger: Ledger, renyi: RenyiFilter) -> None:
        self._ledger = ledger
        per_query_A = accountant.rdp([ledger.terms.mechanism.worst_case(1)], np.array(renyi.orders_A))
        # One order for good: a filter that chose its order by what was answered would not be sound.
        order = renyi.best_order(per_query_A)
        self._renyi = replace(renyi, orders_A=(order,))
        self._per_query = per_query_A[list(renyi.orders_A).index(order)]
        # Without a plan no publication ever fits.
        self._per_publication = math.inf
        if ledger.terms.publication is not None:
            self._per_publication = float(accountant.rdp([ledger.terms.publication], [order])[0])
        # For which number of publications, and how many queries then: each new one lowers the limit on queries.
        self._limit = (-1, 0)

    def room(self, wanted: int) -> int:
        """Queries up to the limit."""
        publications, most = self._limit
        if publications != len(self._ledger.publications):
            publications = len(self._ledger.publications)
            most = self._most_queries(self._published(publications))
            # Both at once: a thread that asks meanwhile must not take the limit of before for that of now.
            self._limit = (publications, most)
        return max(0, min(wanted, most - self._ledger.num_reservations))

    def admit(self, votes_QC: IntArray) -> int:
        """The same; votes do not matter."""
        return self.room(len(votes_QC))

    def admit_publication(self) -> bool:
        """Whether one more fits beside what is there."""
        spent = self._ledger.num_reservations * self._per_query + self._published(len(self._ledger.publications))
        return self._renyi.admits([spent], [self._per_publication])

    def _published(self, number: int) -> float:
        # 0 times inf is NaN.
        return number * self._per_publication if number else 0.0

    def _most_queries(self, spent: float) -> int:
        most = self._renyi.max_queries([self._per_query])
        if spent:
            # Publications come out of the limit at the same order as queries.
            most = min(most, max(0, math.floor((self._renyi.limit_A[0] - spent) / self._per_query)))
            # The quotient may be rounded up.
            while most and not self._renyi.admits([spent], [most * self._per_query]):
                most -= 1
        return most


class VotesFilter:
    """Reservations while their price, which depends on votes, stays within the limit. Closes at the first that fails.

    Private: when it closes says something about votes. No filter in the sense of :mod:`fairpate.privacy.accountant`
    either: prices differ from query to query, and any order may be the one that is within its limit.
    """

    def __init__(self, ledger: Ledger, renyi: RenyiFilter) -> None:
        self._terms, self._renyi = ledger.terms, renyi
        self._spent_A = np.zeros(len(_ORDERS_A))
        self._closed = False
        if ledger.num_reservations:
            self._spent_A += self._prices(ledger.votes_QC).sum(axis=0)
        for _ in ledger.publications:
            self._spent_A += self._publication_A

    def room(self, wanted: int) -> int:
        """All, until it closed."""
        return 0 if self._closed else wanted

    def admit(self, votes_QC: IntArray) -> int:
        """The first queries that fit; they are counted as spent."""
        if self._closed or not len(votes_QC):
            return 0
        for number, price_A in enumerate(self._prices(votes_QC)):
            if not self._renyi.admits(self._spent_A, price_A):
                self._closed = True
                return number
            # Counted before it is reserved: a reservation that fails counts too much, never too little.
            self._spent_A = self._spent_A + price_A
        return len(votes_QC)

    def admit_publication(self) -> bool:
        """Whether it fits; it is counted as spent."""
        if not self._renyi.admits(self._spent_A, self._publication_A):
            return False
        self._spent_A = self._spent_A + self._publication_A
        return True

    @property
    def _publication_A(self) -> FloatArray:
        assert self._terms.publication is not None
        return accountant.rdp([self._terms.publication], _ORDERS_A)

    def _prices(self, votes_QC: IntArray) -> FloatArray:
        return self._terms.mechanism.realised_rdp(votes_QC, _ORDERS_A)


def open_filter(ledger: Ledger) -> BudgetFilter:
    """The filter of this ledger's budget, with what the ledger holds already spent."""
    budget = ledger.terms.budget
    if budget.kind == "query_count":
        assert budget.max_queries is not None
        return CountFilter(ledger, budget.max_queries)
    renyi = _renyi(budget)
    return VotesFilter(ledger, renyi) if budget.kind == "data_dependent" else PriceFilter(ledger, renyi)


def _renyi(budget: Budget) -> RenyiFilter:
    assert budget.epsilon is not None
    return RenyiFilter(target_epsilon=budget.epsilon, target_delta=budget.delta, orders_A=_ORDERS_A)


def queries_that_fit(terms: LedgerTerms, wanted: int) -> int:
    """How many of ``wanted`` queries a new ledger under ``terms`` has room for; all, where only votes can tell."""
    budget = terms.budget
    if budget.kind == "query_count":
        assert budget.max_queries is not None
        return min(wanted, budget.max_queries)
    if budget.kind == "data_dependent":
        return wanted
    # From nothing and by equal charges, the whole grid of orders admits what its best order does.
    return min(wanted, _renyi(budget).max_queries(accountant.rdp([terms.mechanism.worst_case(1)], _ORDERS_A)))


def publication_fits(terms: LedgerTerms, *, num_queries: int) -> bool:
    """Whether a publication has room beside so many queries; true where that depends on votes."""
    if terms.publication is None or terms.budget.kind != "data_independent":
        return True
    renyi, per_query_A = _renyi(terms.budget), accountant.rdp([terms.mechanism.worst_case(1)], _ORDERS_A)
    # At the one order at which the ledger will count: another might have room where that has none.
    order = renyi.best_order(per_query_A) == _ORDERS_A
    left = (renyi.limit_A - num_queries * per_query_A)[order]
    return bool(np.all(accountant.rdp([terms.publication], _ORDERS_A[order]) <= left))


def mechanism_within(
    mechanism: MechanismT, *, target_epsilon: float, target_delta: float, num_queries: int
) -> MechanismT:
    """``mechanism`` with its noise multiplied by the least factor that keeps ``num_queries`` within the target.

    Whatever the votes. A loss distribution prices queries that have one, and then no more than ``num_queries`` may be
    submitted. ValueError for a target that no noise reaches.
    """
    arguments = (mechanism, target_epsilon, target_delta, num_queries)
    try:
        factor = _factor_within(*arguments)
    except TypeError:  # a parameter of one's own that cannot be looked up
        factor = _factor_within.__wrapped__(*arguments)
    return mechanism.scaled(factor)


# A run plans its release before it works, while it works and when it reports.
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


def epsilon_data_independent(terms: LedgerTerms, *, num_queries: int, num_publications: int = 0) -> float:
    """What so many reservations and publications cost whatever the votes, at the budget's delta."""
    events: list[Event] = [terms.mechanism.worst_case(num_queries)]
    if num_publications:
        assert terms.publication is not None
        events += [terms.publication] * num_publications
    if terms.budget.kind == "query_count":
        return accountant.least_epsilon(events, target_delta=terms.budget.delta)
    # A limit on the price is a Renyi filter, which spends by curves.
    return accountant.epsilon(events, target_delta=terms.budget.delta).epsilon


# By terms, which are fixed when a ledger is made; statements and pages ask again and again.
@lru_cache(maxsize=16)
def epsilon_fixed_beforehand(terms: LedgerTerms) -> float | None:
    """The bound, at the budget's delta, that held before the first query, however queries are chosen and ended.

    None for a budget that votes end: then there is none. A count limits no publications, but none comes without a new
    query, so there are at most as many.
    """
    budget = terms.budget
    if budget.kind == "data_dependent":
        return None
    if budget.max_queries is None:
        return budget.epsilon
    if terms.publication is None:
        return accountant.least_epsilon([terms.mechanism.worst_case(budget.max_queries)], target_delta=budget.delta)
    each_A = accountant.rdp([terms.mechanism.worst_case(1), terms.publication])
    return epsilon_of_curve(budget.max_queries * each_A, _ORDERS_A, target_delta=budget.delta)[0]


QuotaRoom = Callable[[str], float]
"""How many new queries a caller's quota allows now."""

UNLIMITED = 2**62
DAY_S = 86400.0


class HasAskers(Protocol):
    """A query, and who asks for it."""

    @property
    def askers(self) -> tuple[Asker, ...]:
        """In the order in which they are to be charged."""
        ...


@dataclass(frozen=True, kw_only=True)
class OwnStatus:
    """A caller's limit and what it spent of it, data-independent. ``left``: new queries; None: no limit of its own."""

    limit: OwnLimit
    queries: int
    epsilon: float
    left: int | None


def no_quota(caller: str) -> float:  # noqa: ARG001 - the same for every caller
    """The quota of those who have none."""
    return math.inf


def payers(ledger: Ledger, queries: Sequence[HasAskers], quota: QuotaRoom = no_quota) -> list[Asker | None]:
    """Who is charged with each of these new queries: the first that asks and has room; None: nobody has.

    Room is what both the caller's limit and its ``quota`` leave. For the ledger's writer: what it says holds until the
    next charge.
    """
    # Counted down here: the ledger hears of these charges only when their block is reserved.
    left: dict[str, float] = {}
    return [_payer(ledger, query.askers, left, quota) for query in queries]


def _payer(ledger: Ledger, askers: Sequence[Asker], left: dict[str, float], quota: QuotaRoom) -> Asker | None:
    for asker in askers:
        caller = asker.caller
        if caller not in left:
            left[caller] = min(room_of(ledger, caller), quota(caller))
        if left[caller] >= 1:
            left[caller] -= 1
            return asker
    return None


def room_of(ledger: Ledger, caller: str) -> int:
    """How many new queries ``caller`` has room for under its own limit."""
    return max(0, most_queries(ledger.terms, ledger.limit_of(caller)) - ledger.charged_to(caller))


def status_of(ledger: Ledger, caller: str, limit: OwnLimit) -> OwnStatus:
    """What ``caller`` spent, and what is left under ``limit``."""
    queries = ledger.charged_to(caller)
    most = most_queries(ledger.terms, limit)
    return OwnStatus(
        limit=limit,
        queries=queries,
        epsilon=epsilon_data_independent(ledger.terms, num_queries=queries),
        left=None if most == UNLIMITED else max(0, most - queries),
    )


# Frozen values alone decide it; the curve behind a limit on epsilon is too dear for every query.
@lru_cache(maxsize=4096)
def most_queries(terms: LedgerTerms, limit: OwnLimit) -> int:
    """How many queries a caller under ``limit`` may ever be charged with."""
    most = UNLIMITED if limit.max_queries is None else limit.max_queries
    if limit.epsilon is None:
        return most
    budget = Budget(kind="data_independent", delta=terms.budget.delta, epsilon=limit.epsilon)
    return queries_that_fit(replace(terms, budget=budget), most)


@dataclass(frozen=True, kw_only=True)
class QuotaRefusal:
    """Why a request is refused: ``allowed_now`` new queries are left, ``retry_after_s`` (inf: never) until it fits."""

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


class Quotas:
    """How many new queries each caller may ask now: leaking buckets, filled by what the ledger says was charged."""

    def __init__(self, rule: QuotaRule) -> None:
        self._rule = rule
        self._buckets: dict[str, _Bucket] = {}

    def refusal(self, ledger: Ledger, caller: str, num_queries: int, *, now_s: float) -> QuotaRefusal | None:
        """Why ``caller`` may not be charged with so many now, or None; nothing is taken. ``now_s`` as in the ledger."""
        rule, free = self._rule_and_room(ledger, caller, now_s)
        if num_queries <= free:
            return None
        # More than the bucket holds at all comes through at no time.
        wait_s = math.inf
        if num_queries <= rule.max_queries:
            wait_s = (num_queries - free) * rule.period_s / rule.max_queries
        return QuotaRefusal(allowed_now=max(0, math.floor(free)), retry_after_s=wait_s)

    def room(self, ledger: Ledger, caller: str, *, now_s: float) -> float:
        """How many new queries ``caller`` may be charged with now; inf: it has no quota."""
        return self._rule_and_room(ledger, caller, now_s)[1]

    def _rule_and_room(self, ledger: Ledger, caller: str, now_s: float) -> tuple[QuotaRule, float]:
        own = ledger.limit_of(caller).per_day
        rule = self._rule if own is None else QuotaRule(max_queries=own)
        if math.isinf(rule.max_queries):
            return rule, math.inf
        bucket = self._buckets.get(caller)
        if bucket is None or bucket.rule != rule:  # another rule: what was charged before counts under it
            bucket = self._buckets[caller] = _Bucket(rule)
        bucket.catch_up(ledger, caller)
        return rule, rule.max_queries - bucket.level(now_s)


class _Bucket:
    """What one caller was charged with and has not leaked out yet."""

    def __init__(self, rule: QuotaRule) -> None:
        self.rule = rule
        self._level, self._filled_at_s, self._num_seen = 0.0, 0.0, 0

    def catch_up(self, ledger: Ledger, caller: str) -> None:
        """Take in what was charged since the last time, or ever."""
        for asked in ledger.asked[self._num_seen :]:
            if asked.asker.caller == caller:
                self._level = self.level(asked.at_s) + asked.num_queries
                self._filled_at_s = asked.at_s
        self._num_seen = len(ledger.asked)

    def level(self, now_s: float) -> float:
        """What is in it now."""
        passed_s = max(0.0, now_s - self._filled_at_s)  # a clock that was set back empties nothing
        return max(0.0, self._level - passed_s * self.rule.max_queries / self.rule.period_s)
