"""The HTTP API's requests and responses, the public pool, and the query that a record becomes.

A query is identified by its content. Posted features get the pool's type and shape before they are hashed, so that
another spelling of the same numbers (0.1 or 0.10000000149, 0.0 or -0.0) is the same query; this module never sees a
vote. Request bodies accept exactly what the pool's shape, range and groups allow, and the OpenAPI document is made from
these types, so that it describes what is accepted. Every kind of refusal has one form for analysts. The docstring of a
type that only operators get says "Private".
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

from aggregator.ledger import LedgerTerms
from aggregator.mechanism import Outcome
from aggregator.session import BudgetStatus, OverBudget, Query, epsilon_fixed_beforehand, query_key
from fairpate.data.columns import RecordForm
from fairpate.http_server import Body, FaultError, Health, KnownCaller, largest_body_bytes
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.types import GateRule, IntArray, strict
from fairpate.words import delta_text, meaning

# As many as the batcher asks together: a full request is one group.
MAX_QUERIES_PER_REQUEST = 1024
MAX_KEYS_PER_FILE = 10_000

Status = Literal["answered", "refused", "over_budget"]


class Reply(Body):
    """The reply to one query. All refusals look the same; an ``over_budget`` query was not asked and is free."""

    key: str = Field(description="The query's content hash; GET /v1/queries/{key} gives the same reply again.")
    status: Status
    label: int | None = Field(description="Index into `label_names`; null unless answered.")


class Replies(Body):
    """One reply per query, in the order of the request."""

    replies: list[Reply]
    budget_crossed_at: int | None = Field(description="Position of the first query that the budget had no room for.")


class Budget(Body):
    """The shared budget, in public numbers. Null: a limit that this kind of budget lacks, or an infinite epsilon."""

    kind: str
    epsilon_limit: float | None
    delta: float
    max_queries: int | None
    queries_submitted: int
    epsilon_submitted: float | None
    closed: bool


class OwnLimit(Body):
    """The limits of one caller within the shared budget; null: no limit of its own."""

    epsilon: float | None = Field(
        description="Limit on the worst-case cost of the caller's queries alone, at the budget's delta."
    )
    max_queries: int | None
    per_day: float | None = Field(
        description="Number of new queries that may be asked at once; it refills evenly over a day."
    )


class OwnSpent(Body):
    """The charges of one caller, at their data-independent cost. The guarantee is that of the shared budget."""

    queries: int
    epsilon: float | None


class OwnLeft(Body):
    """The room of the caller's own limit; the shared budget may have less."""

    queries: int


class Me(Body):
    """A caller as this service knows it. Callers with one name share limit and charges."""

    name: str
    scope: Literal["analyst", "operator"]
    limit: OwnLimit
    spent: OwnSpent
    left: OwnLeft | None = Field(description="What is left of the caller's own limit; null: no limit of its own.")
    expires_s: float | None = Field(description="When the token ends, in seconds since 1970; null: never.")


class Estimate(Body):
    """The most that a request would cost if it were made."""

    new_queries: int = Field(description="Queries that have no stored reply; each is charged in full.")
    stored_replies: int = Field(description="Queries with a stored reply; they are free.")
    now: Budget
    afterwards: Budget


class Statement(Body):
    """The privacy guarantee for all replies so far, and the public facts of this service.

    Analysts choose their queries, and when to stop, in view of replies: the guarantee is `epsilon`, the limit that was
    fixed before the first query (null without such a limit). `epsilon_submitted` is the cost of the queries so far.
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
    """One input of a record's form: a number between two bounds, or one of several choices."""

    name: str
    choices: list[str]
    low: float | None
    high: float | None
    is_optional: bool
    takes_other: bool


class Caller(Body):
    """The sender of a request, by name and role."""

    name: str
    role: Literal["analyst", "operator"]


class About(Body):
    """The run in words; `form` is null if a record has no form with one input per column."""

    run: str
    method: str
    data: str
    task: str
    attribute: str
    record: str = Field(description="One record of the data set in words; empty: `record_shape` features.")
    mechanism: str
    gate: str
    guarantee: str
    is_private: bool
    form: list[FormField] | None
    takes_posted: bool = Field(description="Whether records that are not in the pool can be asked.")
    caller: Caller


class State(Body):
    """The state on an analyst's page: the budget, and whether new queries are answered."""

    budget: Budget
    queries_left: int | None = Field(description="New queries that the budget has room for; null: depends on votes.")
    health: Health


class AnswersWanted(Body):
    """The stored replies that are requested as a file."""

    keys: list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = Field(min_length=1, max_length=MAX_KEYS_PER_FILE)
    format: Literal["parquet", "csv"]


def reply_json(key: str, reply: Outcome | OverBudget) -> dict[str, Any]:
    """Return a :class:`Reply` as JSON; it does not contain the step that refused."""
    # Not hidden among refusals: unless votes decide when the budget ends, its room follows from public numbers.
    if isinstance(reply, OverBudget):
        return {"key": key, "status": "over_budget", "label": None}
    return {"key": key, "status": "refused" if reply.label is None else "answered", "label": reply.label}


def budget_json(status: BudgetStatus) -> dict[str, Any]:
    """Return a :class:`Budget` as JSON."""
    return dataclasses.asdict(status) | {"epsilon_submitted": strict(status.epsilon_submitted)}


class PageOfLedger(Body):
    """The requested part of the ledger; values arrive as text."""

    # A query string is text: a strict model would refuse `limit=100`.
    model_config = ConfigDict(extra="forbid", strict=False)
    start: int = Field(0, ge=0, le=2**31, description="Number of the first charge, from 0.")
    limit: int = Field(100, ge=1, le=1000, description="The most charges to return.")


class LedgerEntry(Body):
    """One charge as the operator sees it; a reservation that a crash left open has the verdict `open`.

    `caller` and `request` are empty for the run's own queries; then `at_s` may be 0: not known.
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
    """The last verification of the ledger: when, how many entries held, and the fault (empty: the chain holds)."""

    at_s: float
    entries: int
    fault: str


class GroupCounts(Body):
    """The outcomes of one group's charges."""

    group: str
    answer: int
    confidence: int
    fairness: int
    free: int
    open: int
    answers: list[int] = Field(description="Answers of each class.")


class Spender(Body):
    """The number of queries charged to one caller."""

    name: str
    queries: int


class PointInTime(Body):
    """Cumulative charges at one time, in seconds since 1970; `answered` and `refused` are by group."""

    at_s: float
    charges: int
    answered: list[int]
    refused: list[int]


class Advice(Body):
    """One piece of advice: `ok` needs no action, `soon` can wait for a day, `now` cannot."""

    level: Literal["ok", "soon", "now"]
    words: str


class Latency(Body):
    """Quantiles of the duration of the last requests with queries, in milliseconds."""

    count: int
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None


class LargeCharge(Body):
    """One of the most expensive charges; its shares of its worst case and of all costs."""

    number: int = Field(description="Position in the order in which queries were charged, from 1.")
    group: str
    verdict: str
    votes: list[int] = Field(description="Votes for the most popular label, and for the second.")
    of_worst: float
    of_total: float
    caller: str
    at_s: float


class Costs(Body):
    """The data-dependent costs of queries, in Renyi divergence of one order. Private: not to be published."""

    order: float
    words: str
    bins: list[int] = Field(
        description="Number of queries by cost as a share of their worst case, in twentieths; empty if all shares "
        "are equal."
    )
    dearest: list[LargeCharge]


class Overview(Body):
    """The state on an operator's page. Private: not to be published."""

    at_s: float
    started_s: float
    health: Health
    advice: list[Advice]
    forecast: str
    lasts_s: float | None = Field(
        description="How long the budget lasts at the present rate; null: no end, or unknown."
    )
    budget: Budget
    queries_left: int | None = Field(description="New queries that the budget has room for; null: depends on votes.")
    epsilon_data_dependent: float | None
    costs: Costs
    points: list[PointInTime]
    groups: list[GroupCounts]
    callers: list[Spender] = Field(description="The callers with most charges, the highest first.")
    open_reservations: int
    latency: Latency
    disk_free_bytes: int | None
    chain: Chain
    last_backup_s: float | None


class LedgerPage(Body):
    """Part of the ledger, and the data-dependent epsilon of all of it. Private: not to be published."""

    total: int
    entries: list[LedgerEntry]
    epsilon_data_dependent: float | None


Features = npt.NDArray[np.generic]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A query and the features that the teachers vote on."""

    query: Query
    features: Features


CountVotes = Callable[[Sequence[Question]], IntArray]
"""Votes of all teachers on Q questions, shape (Q, C); raises ``VotesUnavailableError`` if one is missing."""


@dataclass(frozen=True, kw_only=True)
class PublicPool:
    """N public records that analysts ask by number, and the public names of groups and labels.

    ``features`` (N, ...) is ``uint8`` or ``float32``; ``groups_N`` holds indices into ``group_names``. ``form``: the
    declared columns of a record, if it has them; ``place`` maps their values to features. ``takes_posted``: True if
    the voters can vote on records that are not in the pool.
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
        # Only these two: `bodies_for` derives the range of posted values from the type.
        if self.features.dtype not in (np.uint8, np.float32):
            raise ValueError(f"Expected features of uint8 or float32, got {self.features.dtype}.")

    def __len__(self) -> int:
        return len(self.record_ids)

    @property
    def record_shape(self) -> tuple[int, ...]:
        """The shape of one record's features."""
        return tuple(self.features.shape[1:])

    def question(self, number: int) -> Question:
        """Return the record at ``number``. The first call hashes all records."""
        return self._questions[number]

    def posted(self, features: Sequence[Any], group: str) -> Question:
        """Return a record that came with a request; its shape and range were validated."""
        # In the pool's type before it is hashed: all spellings of a number are one query, and charged once.
        array = _without_negative_zero(np.asarray(features, dtype=self.features.dtype))
        code = self.group_names.index(group)
        key = query_key(array, code)
        return Question(query=Query(key=key, group=code, record_id=f"posted-{key[:16]}"), features=array)

    def written(self, record: Mapping[str, Any], group: str) -> Question:
        """Return a record given by its form's columns. ValueError names a column with an undeclared value."""
        assert self.form is not None
        features: Any = self.place(self.form.encode(record))
        return self.posted(features, group)

    def number_of(self, key: str) -> int | None:
        """Return the number of the record with this content hash; None for a record that is not in the pool."""
        return self._numbers.get(key)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {question.query.key: number for number, question in enumerate(self._questions)}

    @cached_property
    def _questions(self) -> tuple[Question, ...]:
        return tuple(
            Question(
                # The key alone needs equal bytes; voters see the stored record.
                query=Query(key=query_key(_without_negative_zero(x), group), group=group, record_id=record_id),
                features=x,
            )
            for x, group, record_id in zip(self.features, self.groups_N.tolist(), self.record_ids, strict=True)
        )


def _without_negative_zero(features: Features) -> Features:
    """Return ``features`` with -0.0 as 0.0: equal values get equal bytes, so that a record has one key."""
    # IEEE 754: -0.0 + 0.0 is 0.0, and no other number changes.
    zeroed: Features = np.add(features, features.dtype.type(0))
    return zeroed


_MAX_COUNT = 1_000_000
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def bodies_for(pool: PublicPool) -> tuple[type[BaseModel], Any]:
    """Return the types of the bodies of queries and of an estimate.

    They accept this pool's numbers, record shape, value range and groups.
    """
    number = _whole_number(ge=0, lt=len(pool), description="A record of the public pool, by number.")
    # Beyond these bounds the pool's float32 is infinite, and different records would be one query.
    value: Any = Annotated[float, Field(ge=-_FLOAT32_MAX, le=_FLOAT32_MAX, allow_inf_nan=False)]
    features: Any = _whole_number(ge=0, le=255) if pool.features.dtype == np.uint8 else value
    # FailFast ends validation at the first fault: a body of thousands of wrong values would get as many errors.
    for size in reversed(pool.record_shape):
        features = Annotated[list[features], Field(min_length=size, max_length=size), FailFast()]
    # `getitem`, because type checkers refuse `Literal[...]` of names that are known at run time only.
    group: Any = operator.getitem(Literal, pool.group_names)
    by_id: Any = create_model("QueryById", __base__=Body, id=(number, ...))
    by_features: Any = create_model("QueryByFeatures", __base__=Body, features=(features, ...), group=(group, ...))
    kinds = [Annotated[by_id, Tag("id")]]
    tags = {"features": "features", "group": "features"}
    if pool.takes_posted:
        kinds.append(Annotated[by_features, Tag("features")])
    if pool.takes_posted and pool.form is not None:
        columns: Any = _record_type(pool.form)
        by_record: Any = create_model("QueryByRecord", __base__=Body, record=(columns, ...), group=(group, ...))
        kinds.append(Annotated[by_record, Tag("record")])
        tags = {"record": "record", **tags}
    # With a discriminator, errors are reported for one kind; a plain union reports them for every kind.
    kind = _tagged_by(tags, "id")
    query: Any = by_id if len(kinds) == 1 else Annotated[functools.reduce(operator.or_, kinds), kind]
    several: Any = Annotated[list[query], Field(min_length=1, max_length=MAX_QUERIES_PER_REQUEST), FailFast()]
    queries: Any = create_model("Queries", __base__=Body, queries=(several, ...))
    count: Any = create_model("Count", __base__=Body, count=(_whole_number(ge=0, le=_MAX_COUNT), ...))
    either = Annotated[queries, Tag("queries")] | Annotated[count, Tag("count")]
    return queries, Annotated[either, _tagged_by({"count": "count"}, "queries")]


def _tagged_by(tags: Mapping[str, str], default: str) -> Discriminator:
    """Return a discriminator for pydantic: a body gets the tag of the first field in ``tags`` that it has, else
    ``default``."""

    def tag(value: Any) -> str:
        """Return the tag of ``value``, which is JSON or a validated model."""
        has = value.__contains__ if isinstance(value, dict) else functools.partial(hasattr, value)
        return next((tag for name, tag in tags.items() if has(name)), default)

    return Discriminator(tag)


def _whole_number(**bounds: Any) -> Any:
    """Return the type of an integer as in JSON Schema: 3.0 is the integer 3; "3" and true are not integers."""
    return Annotated[
        int, Field(**bounds), BeforeValidator(lambda v: int(v) if type(v) is float and v.is_integer() else v)
    ]


def _record_type(form: RecordForm) -> Any:
    """Return a type with one field per column, under the column's own name."""
    fields: dict[str, Any] = {}
    for place, column in enumerate(form.fields):
        kind: Any = Annotated[float, Field(allow_inf_nan=False)]
        if column.low is None and column.takes_other:
            kind = Annotated[str, Field(min_length=1, max_length=200)]
        elif column.low is None:
            kind = operator.getitem(Literal, tuple(column.choices))
        kind, default = (kind | None, None) if column.is_optional else (kind, ...)
        # A column may have any name, so the attribute in Python is numbered.
        fields[f"column_{place}"] = (kind, Field(default, alias=column.name))
    return create_model("Record", __base__=Body, **fields)


def max_body_bytes(pool: PublicPool) -> int:
    """Return the size of the largest body that is read (:func:`fairpate.http_server.largest_body_bytes`)."""
    is_bytes = pool.features.dtype == np.uint8
    return largest_body_bytes(pool.record_shape, is_bytes=is_bytes, most_records=MAX_QUERIES_PER_REQUEST)


def question_of(query: Any, pool: PublicPool) -> Question:
    """Return the question in a validated body. FaultError for a form's record with an undeclared value."""
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


_COLD_STARTS = {"group": "for a group", "cell": "for a group and a class", "all_groups": "for every group"}
_SEEN = "all replies to all analysts together"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Descriptions of the run for the page; empty if unknown. ``record`` describes one record in words."""

    run: str = "this run"
    method: str = ""
    data: str = ""
    task: str = ""
    attribute: str = "group"
    record: str = ""


def about_json(facts: Facts, pool: PublicPool, terms: LedgerTerms, caller: KnownCaller) -> dict[str, Any]:
    """Return an :class:`About` as JSON."""
    form, epsilon = pool.form, epsilon_fixed_beforehand(terms)
    if epsilon is None:
        guarantee = "The budget ends when the votes say so, which leaks: no guarantee was fixed beforehand."
    else:
        guarantee = meaning(epsilon, terms.budget.delta, unit=terms.unit, relation=terms.relation, seen=_SEEN)
        if terms.noise != OS_ENTROPY:
            guarantee = (
                f"Nothing is bounded: the noise is seeded. With fresh noise: {guarantee[0].lower()}{guarantee[1:]}"
            )
        limit = f"ε = {epsilon:.4g}, δ = {delta_text(terms.budget.delta)}, {terms.relation}"
        guarantee += f" That is the limit of this budget ({limit}). Other releases on the same records add to it."
    return {
        **dataclasses.asdict(facts),
        "mechanism": f"{terms.num_teachers:,} {terms.mechanism.voters} vote. {terms.mechanism.describe()}.",
        "gate": gate_words(terms.gate),
        "guarantee": guarantee,
        "is_private": terms.noise == OS_ENTROPY,
        "form": None if form is None else [dataclasses.asdict(field) for field in form.fields],
        "takes_posted": pool.takes_posted,
        "caller": {"name": caller.name, "role": caller.role},
    }


def gate_words(rule: GateRule) -> str:
    """Return a sentence on what the fairness gate refuses."""
    if math.isinf(rule.max_disparity):
        return "No fairness gate: the shares of an answer may differ between groups."
    return (
        f"Shares of an answer may differ between groups by less than {rule.max_disparity:g}, after {rule.min_count} "
        f"answers {_COLD_STARTS[rule.cold_start]}; an answer that would break this is refused and charged all the same."
    )


FileFormat = Literal["parquet", "csv"]
MEDIA_TYPES = {"parquet": "application/vnd.apache.parquet", "csv": "text/csv; charset=utf-8"}


def answers_file(
    keys: Sequence[str], outcomes: Sequence[Outcome | None], pool: PublicPool, file_format: FileFormat
) -> bytes:
    """Return a file with a row per key: the record's number in the pool (null: posted), status and label.

    The status is ``not_stored`` for a key without a reply.
    """
    labels = [None if outcome is None else outcome.label for outcome in outcomes]
    # One word for every refusal: the step that refused depends on votes, and analysts may read this file.
    statuses = {None: "not_stored", "answer": "answered"}
    verdicts = [None if outcome is None else outcome.verdict for outcome in outcomes]
    table = pa.table(
        {
            "key": list(keys),
            "id": pa.array([pool.number_of(key) for key in keys], pa.int64()),
            "status": [statuses.get(verdict, "refused") for verdict in verdicts],
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
