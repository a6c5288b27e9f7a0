"""What each caller may spend of what all share: a budget of its own, and a quota per day.

The guarantee is that of the shared budget, because callers may act together; a limit of one's own divides it. Charges
and limits are entries of the ledger, so that both outlive a restart. A query is charged to one caller, the first of
those who ask for it at the same time and have room; its answer is free for everybody from then on.

A limit on epsilon is the Renyi filter of :mod:`aggregator.ledger.budget` over the caller's queries alone, at their
worst case: it admits a number of queries that is known beforehand. No limit here depends on votes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from aggregator.ledger.budget import epsilon_data_independent, queries_that_fit
from aggregator.ledger.entries import Asker, OwnLimit
from aggregator.ledger.ledger import Ledger
from aggregator.ledger.terms import LedgerTerms
from fairpate.types import Budget

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
