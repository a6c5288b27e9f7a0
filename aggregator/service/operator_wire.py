"""The JSON that only operators get: which step refused, what votes cost, and how the service is doing. Private."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from aggregator.service.wire import Body, Budget, Health


class PageOfLedger(Body):
    """Which part of the ledger is asked for; values come as text."""

    model_config = ConfigDict(extra="forbid", strict=False)
    start: int = Field(0, ge=0, le=2**31, description="How many charges to leave out in front.")
    limit: int = Field(100, ge=1, le=1000, description="How many charges at most.")


class Publication(Body):
    """What may be published of the data-dependent privacy cost: a limit with 95 % confidence over its own noise."""

    epsilon_sanitised: float
    order: float
    delta: float
    queries_submitted: int


class LedgerEntry(Body):
    """One charge as the operator sees it; a reservation that a crash left open has the verdict `open`.

    Who asked is empty for the run's own queries and those of earlier versions; then `at_s` may be 0: not known.
    """

    number: int
    key: str
    group: str
    verdict: str
    label: int | None
    caller: str
    request: str
    at_s: float = Field(description="When it was charged, in seconds since 1970.")


class Chain(Body):
    """When every entry of the ledger was last verified, how many there were, and what was wrong (empty: nothing)."""

    at_s: float
    entries: int
    fault: str


class GroupCounts(Body):
    """What became of the charges of one group."""

    group: str
    answer: int
    confidence: int
    fairness: int
    free: int
    open: int
    answers: list[int] = Field(description="Answers of each class.")


class Spender(Body):
    """How many queries were charged to one caller."""

    name: str
    queries: int


class PointInTime(Body):
    """Cumulative charges at one time, in seconds since 1970; answered and refused by group."""

    at_s: float
    charges: int
    answered: list[int]
    refused: list[int]


class Advice(Body):
    """One thing to know: `ok` needs nothing, `soon` can wait for the day, `now` cannot."""

    level: Literal["ok", "soon", "now"]
    words: str


class Latency(Body):
    """Of the last requests that asked queries: how long they took, in milliseconds."""

    count: int
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None


class LargeCharge(Body):
    """One of the charges that cost most; shares of its worst case and of all costs."""

    number: int = Field(description="From 1, in the order in which queries were charged.")
    group: str
    verdict: str
    votes: list[int] = Field(description="For the most popular label, and for the next.")
    of_worst: float
    of_total: float
    caller: str
    at_s: float


class Costs(Body):
    """What queries cost by these votes, in Renyi divergence of one order. Private: not to be published."""

    order: float
    words: str
    bins: list[int] = Field(
        description="Queries by share of their worst case, in twentieths; none where all are equal."
    )
    dearest: list[LargeCharge]


class Overview(Body):
    """What an operator's page shows. Private: not to be published."""

    at_s: float
    started_s: float
    health: Health
    advice: list[Advice]
    forecast: str
    lasts_s: float | None = Field(
        description="How long the budget lasts at the pace of before; null: no end, or unknown."
    )
    budget: Budget
    queries_left: int | None = Field(description="New queries that the budget has room for; null: votes decide.")
    epsilon_data_dependent: float | None
    epsilon_sanitised: float | None
    costs: Costs
    points: list[PointInTime]
    groups: list[GroupCounts]
    callers: list[Spender] = Field(description="Those who spent most, the most first.")
    open_reservations: int
    latency: Latency
    disk_free_bytes: int | None
    chain: Chain
    last_backup_s: float | None


class LedgerPage(Body):
    """Part of the ledger and the data-dependent price of all of it. Private: not to be published."""

    total: int
    entries: list[LedgerEntry]
    epsilon_data_dependent: float | None
