"""The JSON that crosses the wire: what comes back, the same for every kind of refusal, and what any service reads.

Queries depend on the pool: :mod:`aggregator.service.request_bodies`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from aggregator.mechanism import Outcome
from aggregator.session import OverBudget

MAX_QUERIES_PER_REQUEST = 1024
MAX_KEYS_PER_FILE = 10_000
_MAX_FIELDS = 64  # or as many as a record has columns

Status = Literal["answered", "refused", "over_budget"]


class Body(BaseModel):
    """Exactly its fields, each of its own type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        # Each unknown field would be an error of its own, and a body has room for a hundred thousand.
        most = max(_MAX_FIELDS, len(cls.model_fields))
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"Expected at most {most} fields, got {len(value)}")
        return value


class Reply(Body):
    """What became of one query. Every refusal reads the same; ``over_budget`` was not asked and cost nothing."""

    key: str = Field(description="The query's content hash; GET /v1/queries/{key} gives the same reply again.")
    status: Status
    label: int | None = Field(description="Index into `label_names`; null unless answered.")


class Replies(Body):
    """One reply per query, in the order asked."""

    replies: list[Reply]
    budget_crossed_at: int | None = Field(description="Position of the first query that the budget had no room for.")


class Budget(Body):
    """Public numbers only. A limit that the kind of budget does not have is null, and so is an infinite epsilon."""

    kind: str
    epsilon_limit: float | None
    delta: float
    max_queries: int | None
    queries_submitted: int
    epsilon_submitted: float | None
    closed: bool


class OwnLimit(Body):
    """What a caller may spend of the shared budget; null: no limit of its own."""

    epsilon: float | None = Field(
        description="For the caller's queries alone, at their worst case and the budget's delta."
    )
    max_queries: int | None
    per_day: float | None = Field(description="New queries at once, refilled evenly over a day.")


class OwnSpent(Body):
    """What was charged to a caller, data-independent. The guarantee is the shared budget's."""

    queries: int
    epsilon: float | None


class OwnLeft(Body):
    """What the caller's own limit has room for; the shared budget may have less."""

    queries: int


class Me(Body):
    """A caller as this service knows it. Callers of one name share limit and charges."""

    name: str
    scope: Literal["analyst", "operator"]
    limit: OwnLimit
    spent: OwnSpent
    left: OwnLeft | None = Field(description="Null: no limit of its own.")
    expires_s: float | None = Field(description="When the token ends, in seconds since 1970; null: never.")


class Estimate(Body):
    """What asking would cost, at most, before it is asked."""

    new_queries: int = Field(description="Queries that have no stored reply; each is charged in full.")
    stored_replies: int = Field(description="Queries that have one; they cost nothing.")
    now: Budget
    afterwards: Budget


class Statement(Body):
    """The privacy claim for everything answered so far, and the public facts of this service.

    Analysts choose and end their queries in view of replies: the guarantee is `epsilon`, the limit
    that held before the first query (null where there is none). `epsilon_submitted` prices those submitted so
    far.
    """

    unit: str
    relation: str
    delta: float
    epsilon: float | None
    epsilon_submitted: float | None
    epsilon_sanitised: float | None
    queries_submitted: int
    noise: str
    tuning_accounted: bool
    num_teachers: int
    mechanism: dict[str, float | str]
    gate: dict[str, float | str]
    label_names: list[str]
    group_names: list[str]
    pool_size: int
    record_shape: list[int]


class FormField(Body):
    """One input of a record's form: a number between two bounds, or one of its choices."""

    name: str
    choices: list[str]
    low: float | None
    high: float | None
    is_optional: bool
    takes_other: bool


class Caller(Body):
    """Whom the service takes the sender of a request for."""

    name: str
    role: Literal["analyst", "operator"]


class About(Body):
    """What this service is about, in words; `form` is null where a record is not written down column by column."""

    run: str
    method: str
    data: str
    task: str
    attribute: str
    record: str = Field(description="What one record of the data set is; empty: `record_shape` features.")
    mechanism: str
    gate: str
    guarantee: str
    is_private: bool
    may_publish: bool
    form: list[FormField] | None
    takes_posted: bool = Field(description="Whether records beside the pool's can be asked.")
    caller: Caller


class Health(Body):
    """Whether new queries are being answered, and what is missing if not."""

    status: Literal["ok", "failing"]
    reasons: list[Literal["busy", "chain", "cluster", "disk", "ledger", "votes", "unknown"]]


class State(Body):
    """What an analyst's page shows and what may change: the budget, and whether new queries are being answered."""

    budget: Budget
    queries_left: int | None = Field(description="New queries that have room; null: votes decide.")
    health: Health


class AnswersWanted(Body):
    """Which stored replies are wanted as a file."""

    keys: list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = Field(min_length=1, max_length=MAX_KEYS_PER_FILE)
    format: Literal["parquet", "csv"]


class Fault(Body):
    """What was wrong: the field, its value and the remedy."""

    field: str
    value: str
    remedy: str


class Faults(Body):
    """The body of every response that is not a success."""

    errors: list[Fault]


def reply_json(key: str, reply: Outcome | OverBudget) -> dict[str, Any]:
    """A :class:`Reply`; which step refused is not in it."""
    if isinstance(reply, OverBudget):
        return {"key": key, "status": "over_budget", "label": None}
    return {"key": key, "status": "refused" if reply.label is None else "answered", "label": reply.label}


def worded(values: dict[str, Any]) -> dict[str, Any]:
    """The same with infinities as words, which ``float`` reads: JSON has no number for them."""
    return {
        name: str(value) if isinstance(value, float) and math.isinf(value) else value for name, value in values.items()
    }
