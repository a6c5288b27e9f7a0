"""The JSON that crosses the wire: what may be asked, exactly, and what comes back.

Bodies that are read depend on the pool (its shape, range and groups), so that the OpenAPI document states what is
accepted and nothing else is. Bodies that are written are the same for every kind of refusal.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
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
from aggregator.service.errors import FaultError
from aggregator.service.questions import PublicPool, Question
from aggregator.session import OverBudget
from fairpate.data.declared.form import FormField as RecordField
from fairpate.data.declared.form import RecordForm

MAX_QUERIES_PER_REQUEST = 1024
MAX_COUNT = 1_000_000
MAX_KEYS_PER_FILE = 10_000
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


class OwnLimit(_Body):
    """What a caller may spend of the shared budget; null: no limit of its own."""

    epsilon: float | None = Field(
        description="For the caller's queries alone, at their worst case and the budget's delta."
    )
    max_queries: int | None
    per_day: float | None = Field(description="New queries at once, refilled evenly over a day.")


class OwnSpent(_Body):
    """What was charged to a caller, data-independent. The guarantee is the shared budget's."""

    queries: int
    epsilon: float | None


class OwnLeft(_Body):
    """What the caller's own limit has room for; the shared budget may have less."""

    queries: int


class Me(_Body):
    """A caller as this service knows it. Callers of one name share limit and charges."""

    name: str
    scope: Literal["analyst", "operator"]
    limit: OwnLimit
    spent: OwnSpent
    left: OwnLeft | None = Field(description="Null: no limit of its own.")
    expires_s: float | None = Field(description="When the token ends, in seconds since 1970; null: never.")


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


class FormField(_Body):
    """One input of a record's form: a number between two bounds, or one of its choices."""

    name: str
    choices: list[str]
    low: float | None
    high: float | None
    is_optional: bool
    takes_other: bool


class Caller(_Body):
    """Whom the service takes the sender of a request for."""

    name: str
    role: Literal["analyst", "operator"]


class About(_Body):
    """What this service is about, in words; `form` is null where a record is not written down column by column."""

    run: str
    method: str
    data: str
    task: str
    attribute: str
    mechanism: str
    gate: str
    guarantee: str
    is_private: bool
    may_publish: bool
    form: list[FormField] | None
    takes_posted: bool = Field(description="Whether records beside the pool's can be asked.")
    caller: Caller


class Health(_Body):
    """Whether new queries are being answered, and what is missing if not."""

    status: Literal["ok", "failing"]
    reasons: list[Literal["busy", "disk", "ledger", "votes", "unknown"]]


class State(_Body):
    """What an analyst's page shows and what may change: the budget, and whether new queries are being answered."""

    budget: Budget
    queries_left: int | None = Field(description="New queries that have room; null: votes decide.")
    health: Health


class AnswersWanted(_Body):
    """Which stored replies are wanted as a file."""

    keys: list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = Field(min_length=1, max_length=MAX_KEYS_PER_FILE)
    format: Literal["parquet", "csv"]


class Fault(_Body):
    """What was wrong: the field, its value and the remedy."""

    field: str
    value: str
    remedy: str


class Faults(_Body):
    """The body of every response that is not a success."""

    errors: list[Fault]


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


class Chain(_Body):
    """When every entry of the ledger was last verified, how many there were, and what was wrong (empty: nothing)."""

    at_s: float
    entries: int
    fault: str


class GroupCounts(_Body):
    """What became of the charges of one group."""

    group: str
    answer: int
    confidence: int
    fairness: int
    free: int
    open: int
    answers: list[int] = Field(description="Answers of each class.")


class Spender(_Body):
    """How many queries were charged to one caller."""

    name: str
    queries: int


class PointInTime(_Body):
    """Cumulative charges at one time, in seconds since 1970; answered and refused by group."""

    at_s: float
    charges: int
    answered: list[int]
    refused: list[int]


class Advice(_Body):
    """One thing to know: `ok` needs nothing, `soon` can wait for the day, `now` cannot."""

    level: Literal["ok", "soon", "now"]
    words: str


class Latency(_Body):
    """Of the last requests that asked queries: how long they took, in milliseconds."""

    count: int
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None


class LargeCharge(_Body):
    """One of the charges that cost most; shares of its worst case and of all costs."""

    number: int = Field(description="From 1, in the order in which queries were charged.")
    group: str
    verdict: str
    votes: list[int] = Field(description="For the most popular label, and for the next.")
    of_worst: float
    of_total: float
    caller: str
    at_s: float


class Costs(_Body):
    """What queries cost by these votes, in Renyi divergence of one order. Private: not to be published."""

    order: float
    words: str
    bins: list[int] = Field(
        description="Queries by share of their worst case, in twentieths; none where all are equal."
    )
    dearest: list[LargeCharge]


class Overview(_Body):
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
    kinds = [Annotated[by_id, Tag("id")]]
    if pool.takes_posted:
        kinds.append(Annotated[by_features, Tag("features")])
    if pool.takes_posted and pool.form is not None:
        columns: Any = _record_type(pool.form)
        by_record: Any = create_model("QueryByRecord", __base__=_Body, record=(columns, ...), group=(group, ...))
        kinds.append(Annotated[by_record, Tag("record")])
    kind_of = _kind_of_query if len(kinds) < 3 else _kind_with_form
    query: Any = by_id if len(kinds) == 1 else Annotated[functools.reduce(operator.or_, kinds), Discriminator(kind_of)]
    # FailFast: one fault ends the check, where a body of thousands of wrong values would be answered with as many.
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
    """The question in a validated body. FaultError for a form's record that means nothing."""
    number = getattr(query, "id", None)
    if number is not None:
        return pool.question(number)
    if not hasattr(query, "record"):
        return pool.posted(query.features, query.group)
    values = {field.alias: getattr(query.record, name) for name, field in type(query.record).model_fields.items()}
    try:
        return pool.written(values, query.group)
    except ValueError as error:
        raise FaultError(422, "record", "", f"{error}.") from error


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


def _record_type(form: RecordForm) -> Any:
    """A field per column, under its own name; Python's is a number, because a column may be called anything."""
    fields: dict[str, Any] = {
        f"column_{place}": (_column_type(field), Field(None if field.is_optional else ..., alias=field.name))
        for place, field in enumerate(form.fields)
    }
    return create_model("Record", __base__=_Body, **fields)


def _column_type(field: RecordField) -> Any:
    kind: Any = Annotated[float, Field(allow_inf_nan=False)]
    if field.low is None:
        kind = Annotated[str, Field(min_length=1, max_length=200)] if field.takes_other else _one_of(field.choices)
    return kind | None if field.is_optional else kind


def _one_of(choices: Sequence[str]) -> Any:
    return operator.getitem(Literal, tuple(choices))


def _kind_of_query(value: Any) -> str:
    has = value.__contains__ if isinstance(value, dict) else lambda name: hasattr(value, name)
    return "features" if has("features") or has("group") else "id"


def _kind_with_form(value: Any) -> str:
    has_record = "record" in value if isinstance(value, dict) else hasattr(value, "record")
    return "record" if has_record else _kind_of_query(value)


def _kind_of_estimate(value: Any) -> str:
    has_count = "count" in value if isinstance(value, dict) else hasattr(value, "count")
    return "count" if has_count else "queries"
