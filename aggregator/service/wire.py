"""What crosses the wire: the types of requests and responses, the public pool, and how a record becomes a query.

A query is its content. Posted features take the pool's own type and shape before they are hashed, so that another
spelling of the same numbers (0.1 or 0.10000000149, 0.0 or -0.0) is the same query; nothing here sees a vote. Bodies
accept exactly what the pool's shape, range and groups allow, and the OpenAPI document is made of these types, so that
it states what is accepted. Every kind of refusal has one form for analysts; types that only operators get say
"Private".
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    create_model,
)

from aggregator.budgets import epsilon_fixed_beforehand
from aggregator.ledger import LedgerTerms
from aggregator.mechanism import Outcome
from aggregator.session import OverBudget, Query, query_key
from fairpate.data.columns import RecordField as DeclaredField
from fairpate.data.columns import RecordForm
from fairpate.http_requests import Body, FaultError, Health, largest_body_bytes
from fairpate.http_requests import Caller as KnownCaller
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.types import GateRule, IntArray
from fairpate.words import delta_text, meaning

MAX_QUERIES_PER_REQUEST = 1024
MAX_KEYS_PER_FILE = 10_000

Status = Literal["answered", "refused", "over_budget"]


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
    form: list[FormField] | None
    takes_posted: bool = Field(description="Whether records beside the pool's can be asked.")
    caller: Caller


class State(Body):
    """What an analyst's page shows and what may change: the budget, and whether new queries are being answered."""

    budget: Budget
    queries_left: int | None = Field(description="New queries that have room; null: votes decide.")
    health: Health


class AnswersWanted(Body):
    """Which stored replies are wanted as a file."""

    keys: list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = Field(min_length=1, max_length=MAX_KEYS_PER_FILE)
    format: Literal["parquet", "csv"]


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


class PageOfLedger(Body):
    """Which part of the ledger is asked for; values come as text."""

    model_config = ConfigDict(extra="forbid", strict=False)
    start: int = Field(0, ge=0, le=2**31, description="How many charges to leave out in front.")
    limit: int = Field(100, ge=1, le=1000, description="How many charges at most.")


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


Features = npt.NDArray[np.generic]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A query and the features that the teachers must see to answer it."""

    query: Query
    features: Features


CountVotes = Callable[[Sequence[Question]], IntArray]
"""Votes of all teachers on Q questions, shape (Q, C); raises ``VotesUnavailableError`` rather than leave one out."""


@dataclass(frozen=True, kw_only=True)
class PublicPool:
    """N public records that analysts ask by number, and the public words for groups and labels.

    ``features`` (N, ...) is ``uint8`` or ``float32``; ``groups_N`` holds indices into ``group_names``. ``form``: how a
    person writes a record down, where features are those of declared columns, or follow from them by ``place``.
    ``takes_posted``: whether anybody could vote on a record that is not in the pool.
    """

    features: Features
    groups_N: IntArray
    record_ids: Sequence[str]
    group_names: tuple[str, ...]
    label_names: tuple[str, ...]
    form: RecordForm | None = None
    takes_posted: bool = True
    place: Callable[[npt.NDArray[np.float32]], Features] = lambda features: features

    def __post_init__(self) -> None:
        if not len(self.features) == len(self.groups_N) == len(self.record_ids):
            raise ValueError("Expected as many groups and record_ids as records.")
        if self.features.dtype not in (np.uint8, np.float32):
            raise ValueError(f"Expected features of uint8 or float32, got {self.features.dtype}.")

    def __len__(self) -> int:
        return len(self.record_ids)

    @property
    def record_shape(self) -> tuple[int, ...]:
        """Shape of one record's features."""
        return tuple(self.features.shape[1:])

    def hash_all(self) -> None:
        """Compute every record's content hash now rather than at the first question."""
        _ = self._questions

    def question(self, number: int) -> Question:
        """The record at ``number``."""
        return self._questions[number]

    def posted(self, features: Sequence[Any], group: str) -> Question:
        """A record that came with the request; its values were checked against the pool's shape and range."""
        array = _without_negative_zero(np.asarray(features, dtype=self.features.dtype))
        code = self.group_names.index(group)
        key = query_key(array, code)
        return Question(query=Query(key=key, group=code, record_id=f"posted-{key[:16]}"), features=array)

    def written(self, record: Mapping[str, Any], group: str) -> Question:
        """A record as its form has it. ValueError names a column whose value means nothing."""
        assert self.form is not None
        features: Any = self.place(self.form.encode(record))
        return self.posted(features, group)

    def number_of(self, key: str) -> int | None:
        """The record with this content hash; None for one that was posted."""
        return self._numbers.get(key)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {question.query.key: number for number, question in enumerate(self._questions)}

    @cached_property
    def _questions(self) -> tuple[Question, ...]:
        return tuple(
            Question(
                query=Query(key=query_key(_without_negative_zero(x), group), group=group, record_id=record_id),
                features=x,
            )
            for x, group, record_id in zip(self.features, self.groups_N.tolist(), self.record_ids, strict=True)
        )


def _without_negative_zero(features: Features) -> Features:
    """-0.0 becomes 0.0: equal values have equal bytes, so that a record has one key."""
    zeroed: Features = np.add(features, features.dtype.type(0))
    return zeroed


_MAX_COUNT = 1_000_000
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class Bodies:
    """The types of the bodies that a service with one pool reads."""

    queries: type[BaseModel]
    estimate: Any


def bodies_for(pool: PublicPool) -> Bodies:
    """Request bodies that accept this pool's numbers, record shape, value range and groups."""
    number = _whole_number(ge=0, lt=len(pool), description="A record of the public pool, by number.")
    group: Any = operator.getitem(Literal, pool.group_names)
    by_id: Any = create_model("QueryById", __base__=Body, id=(number, ...))
    by_features: Any = create_model(
        "QueryByFeatures", __base__=Body, features=(_features_type(pool), ...), group=(group, ...)
    )
    kinds = [Annotated[by_id, Tag("id")]]
    if pool.takes_posted:
        kinds.append(Annotated[by_features, Tag("features")])
    if pool.takes_posted and pool.form is not None:
        columns: Any = _record_type(pool.form)
        by_record: Any = create_model("QueryByRecord", __base__=Body, record=(columns, ...), group=(group, ...))
        kinds.append(Annotated[by_record, Tag("record")])
    # The kind is told apart first: of a plain union a fault would be told once for every kind.
    kind_of = _kind_of_query if len(kinds) < 3 else _kind_with_form
    query: Any = by_id if len(kinds) == 1 else Annotated[functools.reduce(operator.or_, kinds), Discriminator(kind_of)]
    # FailFast: one fault ends the check, where a body of thousands of wrong values would be answered with as many.
    several: Any = Annotated[list[query], Field(min_length=1, max_length=MAX_QUERIES_PER_REQUEST), FailFast()]
    queries: Any = create_model("Queries", __base__=Body, queries=(several, ...))
    count: Any = create_model("Count", __base__=Body, count=(_whole_number(ge=0, le=_MAX_COUNT), ...))
    estimate: Any = Annotated[
        Annotated[queries, Tag("queries")] | Annotated[count, Tag("count")], Discriminator(_kind_of_estimate)
    ]
    return Bodies(queries=queries, estimate=estimate)


def max_body_bytes(pool: PublicPool) -> int:
    """The largest body that a request for this pool's records needs: 2 MiB, or one record where that is more."""
    is_bytes = pool.features.dtype == np.uint8
    return largest_body_bytes(pool.record_shape, is_bytes=is_bytes, most_records=MAX_QUERIES_PER_REQUEST)


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


def _whole_number(**bounds: Any) -> Any:
    """An integer as JSON Schema has it: 3.0 is the integer 3; "3" and true are none."""
    return Annotated[
        int, Field(**bounds), BeforeValidator(lambda v: int(v) if type(v) is float and v.is_integer() else v)
    ]


def _features_type(pool: PublicPool) -> Any:
    # Beyond these bounds the pool's float32 is infinite, and different records would be one query.
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
    return create_model("Record", __base__=Body, **fields)


def _column_type(field: DeclaredField) -> Any:
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


_COLD_STARTS = {"group": "for a group", "cell": "for a group and a class", "all_groups": "for every group"}
_SEEN = "all replies to all analysts together"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Public words that only the run knows; empty where nobody told. ``record``: what one is, beside its numbers."""

    run: str = "this run"
    method: str = ""
    data: str = ""
    task: str = ""
    attribute: str = "group"
    record: str = ""


def about_json(facts: Facts, pool: PublicPool, terms: LedgerTerms, caller: KnownCaller) -> dict[str, Any]:
    """A :class:`aggregator.service.wire.About`."""
    form = pool.form
    return {
        **dataclasses.asdict(facts),
        "mechanism": f"{terms.num_teachers:,} {terms.mechanism.voters} vote. {terms.mechanism.describe()}.",
        "gate": gate_words(terms.gate),
        "guarantee": _guarantee(terms),
        "is_private": terms.noise == OS_ENTROPY,
        "form": None if form is None else [dataclasses.asdict(field) for field in form.fields],
        "takes_posted": pool.takes_posted,
        "caller": {"name": caller.name, "role": caller.role},
    }


def gate_words(rule: GateRule) -> str:
    """What is refused for the sake of parity."""
    if math.isinf(rule.max_disparity):
        return "No fairness gate: answers are not held to parity between groups."
    return (
        f"Shares of an answer may differ between groups by less than {rule.max_disparity:g}, after {rule.min_count} "
        f"answers {_COLD_STARTS[rule.cold_start]}; what would break that is refused, and charged like an answer."
    )


def _guarantee(terms: LedgerTerms) -> str:
    epsilon = epsilon_fixed_beforehand(terms)
    if epsilon is None:
        return "Votes decide when the budget ends, which leaks: there is no guarantee that held beforehand."
    said = meaning(epsilon, terms.budget.delta, unit=terms.unit, relation=terms.relation, seen=_SEEN)
    if terms.noise != OS_ENTROPY:
        said = f"Nothing is bounded: the noise is seeded. With fresh noise: {said[0].lower()}{said[1:]}"
    limit = f"ε = {epsilon:.4g}, δ = {delta_text(terms.budget.delta)}, {terms.relation}"
    return f"{said} That is the limit of this budget ({limit}). Other releases on the same records add to it."


FileFormat = Literal["parquet", "csv"]
MEDIA_TYPES = {"parquet": "application/vnd.apache.parquet", "csv": "text/csv; charset=utf-8"}


def answers_file(
    keys: Sequence[str], outcomes: Sequence[Outcome | None], pool: PublicPool, file_format: FileFormat
) -> bytes:
    """A row per key: the pool's number of the record (null: posted), status and label; ``not_stored`` without reply."""
    labels = [None if outcome is None else outcome.label for outcome in outcomes]
    table = pa.table(
        {
            "key": list(keys),
            "id": pa.array([pool.number_of(key) for key in keys], pa.int64()),
            "status": [_status(outcome) for outcome in outcomes],
            "label": pa.array(labels, pa.int64()),
            "label_name": pa.array([None if k is None else pool.label_names[k] for k in labels], pa.string()),
        }
    )
    sink = io.BytesIO()
    if file_format == "parquet":
        pq.write_table(table, sink)
    else:
        csv.write_csv(table, sink)
    return sink.getvalue()


def _status(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not_stored"
    return "refused" if outcome.label is None else "answered"
