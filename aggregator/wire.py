"""The JSON that crosses the wire: what may be asked, exactly, and what comes back.

Bodies that are read depend on the pool (its shape, range and groups), so that the OpenAPI document states what is
accepted and nothing else is. Bodies that are written are the same for every kind of refusal.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    create_model,
    model_validator,
)

from aggregator.mechanism import Outcome
from aggregator.questions import PublicPool, Question
from aggregator.session import OverBudget

MAX_QUERIES_PER_REQUEST = 1024
MAX_COUNT = 1_000_000
_MAX_BODY_BYTES = 2 * 2**20
_MAX_FIELDS = 64
_BYTES_BESIDE_FEATURES, _BYTES_PER_BYTE, _BYTES_PER_FLOAT = 1024, 6, 26  # as "255.0," and "-3.4028234663852886e+38, "
_FLOAT32_MAX = float(np.finfo(np.float32).max)

Status = Literal["answered", "refused", "over_budget"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        # Each unknown field would be an error of its own, and a body has room for a hundred thousand.
        if isinstance(value, dict) and len(value) > _MAX_FIELDS:
            raise ValueError(f"Expected at most {_MAX_FIELDS} fields, got {len(value)}")
        return value


class Reply(_Body):
    """What became of one query. Every refusal reads the same; ``over_budget`` was not asked and cost nothing."""

    key: str = Field(description="The query's content hash; GET /v1/queries/{key} gives the same reply again.")
    status: Status
    label: int | None = Field(description="Index into `label_names`; null unless answered.")


class Replies(_Body):
    """One reply per query, in the order asked."""

    replies: list[Reply]
    budget_crossed_at: int | None = Field(description="Position of the first query that the budget had no room for.")


class Budget(_Body):
    """Public numbers only. A limit that the kind of budget does not have is null, and so is an infinite epsilon."""

    kind: str
    epsilon_limit: float | None
    delta: float
    max_queries: int | None
    queries_submitted: int
    epsilon_submitted: float | None
    closed: bool


class Estimate(_Body):
    """What asking would cost, at most, before it is asked."""

    new_queries: int = Field(description="Queries that have no stored reply; each is charged in full.")
    stored_replies: int = Field(description="Queries that have one; they cost nothing.")
    now: Budget
    afterwards: Budget


class Statement(_Body):
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


class Fault(_Body):
    """What was wrong: the field, its value and the remedy."""

    field: str
    value: str
    remedy: str


class Faults(_Body):
    """The body of every response that is not a success."""

    errors: list[Fault]


class Health(_Body):
    """Whether new queries are being answered, and what is missing if not."""

    status: Literal["ok", "failing"]
    reasons: list[Literal["busy", "disk", "ledger", "votes", "unknown"]]


class PageOfLedger(_Body):
    """Which part of the ledger is asked for; values come as text."""

    model_config = ConfigDict(extra="forbid", strict=False)
    start: int = Field(0, ge=0, le=2**31, description="How many charges to leave out in front.")
    limit: int = Field(100, ge=1, le=1000, description="How many charges at most.")


class Publication(_Body):
    """What may be published of the data-dependent privacy cost: a limit with 95 % confidence over its own noise."""

    epsilon_sanitised: float
    order: float
    delta: float
    queries_submitted: int


class LedgerEntry(_Body):
    """One charge as the operator sees it; a reservation that a crash left open has the verdict `open`."""

    number: int
    key: str
    group: str
    verdict: str
    label: int | None


class LedgerPage(_Body):
    """Part of the ledger and the data-dependent price of all of it. Private: not to be published."""

    total: int
    entries: list[LedgerEntry]
    epsilon_data_dependent: float | None


@dataclass(frozen=True, kw_only=True)
class Bodies:
    """The types of the bodies that a service with one pool reads."""

    queries: type[BaseModel]
    estimate: Any


def bodies_for(pool: PublicPool) -> Bodies:
    """Request bodies that accept this pool's numbers, record shape, value range and groups."""
    number = _whole_number(ge=0, lt=len(pool), description="A record of the public pool, by number.")
    group: Any = operator.getitem(Literal, pool.group_names)
    by_id: Any = create_model("QueryById", __base__=_Body, id=(number, ...))
    by_features: Any = create_model(
        "QueryByFeatures", __base__=_Body, features=(_features_type(pool), ...), group=(group, ...)
    )
    query: Any = Annotated[
        Annotated[by_id, Tag("id")] | Annotated[by_features, Tag("features")], Discriminator(_kind_of_query)
    ]
    several: Any = Annotated[list[query], Field(min_length=1, max_length=MAX_QUERIES_PER_REQUEST), FailFast()]
    queries: Any = create_model("Queries", __base__=_Body, queries=(several, ...))
    count: Any = create_model("Count", __base__=_Body, count=(_whole_number(ge=0, le=MAX_COUNT), ...))
    estimate: Any = Annotated[
        Annotated[queries, Tag("queries")] | Annotated[count, Tag("count")], Discriminator(_kind_of_estimate)
    ]
    return Bodies(queries=queries, estimate=estimate)


def max_body_bytes(pool: PublicPool) -> int:
    """The largest body that a request for this pool's records needs: 2 MiB, or one record where that is more."""
    per_number = _BYTES_PER_BYTE if pool.features.dtype == np.uint8 else _BYTES_PER_FLOAT
    record = _BYTES_BESIDE_FEATURES + per_number * math.prod(pool.record_shape)
    return max(record, min(_MAX_BODY_BYTES, MAX_QUERIES_PER_REQUEST * record))


def question_of(query: Any, pool: PublicPool) -> Question:
    """The question in a validated body."""
    number = getattr(query, "id", None)
    return pool.question(number) if number is not None else pool.posted(query.features, query.group)


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


def _whole_number(**bounds: Any) -> Any:
    """An integer as JSON Schema has it: 3.0 is the integer 3; "3" and true are none."""
    return Annotated[
        int, Field(**bounds), BeforeValidator(lambda v: int(v) if type(v) is float and v.is_integer() else v)
    ]


def _features_type(pool: PublicPool) -> Any:
    kind: Any = Annotated[float, Field(ge=-_FLOAT32_MAX, le=_FLOAT32_MAX, allow_inf_nan=False)]
    if pool.features.dtype == np.uint8:
        kind = _whole_number(ge=0, le=255)
    for size in reversed(pool.record_shape):
        kind = Annotated[list[kind], Field(min_length=size, max_length=size), FailFast()]
    return kind


def _kind_of_query(value: Any) -> str:
    has = value.__contains__ if isinstance(value, dict) else lambda name: hasattr(value, name)
    return "features" if has("features") or has("group") else "id"


def _kind_of_estimate(value: Any) -> str:
    has_count = "count" in value if isinstance(value, dict) else hasattr(value, "count")
    return "count" if has_count else "queries"
