"""The HTTP API of a service: requests, responses, routes, and metrics for Prometheus.

**Requests.** A query is identified by its content. Request bodies accept exactly what the pool's shape, range and
groups allow, and the OpenAPI document is generated from these types.

**Responses.** An analyst gets labels, refusals and public numbers, and all refusals look the same. The step that
refused, the data-dependent privacy cost and everything else that depends on votes are available only under
``/v1/operator/``. Docstrings of types and routes for operators, which the document shows, say "Private".

**Metrics.** The analysts' metrics contain no label, no kind of reply and no duration, because these depend on votes.
The numbers of a data-dependent budget are left out too, because votes decide when it ends. The operators' metrics
contain all of that, durations of requests, and outcomes of queries.
"""

import asyncio
import base64
import dataclasses
import functools
import io
import logging
import math
import operator
import sqlite3
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import prometheus_client as prometheus
import pyarrow as pa
import pyarrow.parquet as pq
from fastapi import FastAPI, Path, Query, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pyarrow import csv
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag, create_model

from aggregator import session
from aggregator.ledger import NO_LIMIT, CallerLimit, LedgerTerms, Offsets
from aggregator.ledger_audit import note_action
from aggregator.mechanism import Outcome
from aggregator.service.auth import LiveTokens
from aggregator.service.page import Advice, Latest, PointInTime, States, charge_json, page
from aggregator.service.writer import Batcher, Books, Snapshot, Verification
from aggregator.session import BudgetStatus, OverBudget, PublicPool, Question, QuotaExceededError, VotesUnavailableError
from aggregator.store import LedgerError, UnreachableError
from fairpate.data.tables import RecordField
from fairpate.http_server import Body, FaultError, Faults, Health, add_open_route, fault, faults_response, json_response
from fairpate.pages import at_most, delta_text, meaning, percent
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.types import KnownCaller, strict, worded

# As many as the batcher asks together: a full request is one group.
MAX_QUERIES_PER_REQUEST = 1024
MAX_KEYS_PER_FILE = 10_000
_log = logging.getLogger(__name__)

Status = Literal["answered", "refused", "over_budget"]


class Reply(Body):
    """The reply to one query. All refusals look the same; a query with status ``over_budget`` was not processed and is
    free."""

    key: str = Field(description="The query's content hash; GET /v1/queries/{key} gives the same reply again.")
    status: Status
    label: int | None = Field(description="Index into `label_names`; null unless answered.")
    free: bool = Field(False, description="Whether public things alone decided: no votes, and no charge.")
    lead: int | None = Field(
        None, description="By how many noisy votes the label leads the next one; null if no counts are released."
    )
    stands_out: bool | None = Field(
        None, description="Whether `lead` is at least the `lead_needed` of the statement; null without a `lead`."
    )


class Replies(Body):
    """One reply per query, in the order of the request."""

    replies: list[Reply]
    budget_crossed_at: int | None = Field(
        description="Position of the first query for which the budget had no room; null: there was room for all."
    )


class Budget(Body):
    """The privacy budget that all callers share, in public numbers. A limit is null if this kind of budget has no such
    limit; `epsilon_submitted` is null if it is infinite."""

    kind: str
    epsilon_limit: float | None
    delta: float
    max_queries: int | None
    queries_submitted: int
    epsilon_submitted: float | None
    closed: bool


class OwnSpent(Body):
    """The number of queries charged to one caller, and their data-independent cost. This is not the privacy guarantee,
    which covers the queries of all callers."""

    queries: int
    epsilon: float | None


class OwnLeft(Body):
    """The number of new queries that the caller's own limit still allows; the shared budget may allow fewer."""

    queries: int


class Me(Body):
    """A caller with its limits and with what it was charged. All tokens with the same owner's name are one caller."""

    name: str
    scope: Literal["analyst", "operator"]
    limit: CallerLimit
    spent: OwnSpent
    left: OwnLeft | None = Field(description="What is left of the caller's own limit; null: no limit of its own.")
    expires_s: float | None = Field(description="When the token expires, in seconds since 1970; null: never.")


class Estimate(Body):
    """The most that the given queries would cost: how many of them are new, and the budget before and after them."""

    new_queries: int = Field(description="Queries that have no stored reply; each is charged in full.")
    stored_replies: int = Field(description="Queries with a stored reply; they are free.")
    without_votes: int = Field(0, description="Queries that public things alone decide; they are free.")
    now: Budget
    afterwards: Budget


class Statement(Body):
    """The privacy guarantee for all replies so far, and the public facts of this service.

    Analysts choose their queries, and when to stop, after seeing earlier replies. So the guarantee is `epsilon`, the
    limit that was fixed before the first query (null without such a limit). `epsilon_submitted` is the cost of the
    queries so far.
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
    lead_needed: float | None = Field(
        None, description="Lead in votes that stands out from the noise 19 times in 20; null if it is unknown."
    )
    offsets: list[int] | None = Field(
        None, description="Votes that are added to the noisy count of each label; null if none are."
    )
    mechanism: dict[str, float | str]
    gate: dict[str, float | str]
    label_names: list[str]
    group_names: list[str]
    pool_size: int
    record_shape: list[int]


class Caller(Body):
    """The name and role of the caller who sent a request."""

    name: str
    role: Literal["analyst", "operator"]


class Facts(Body):
    """Descriptions in words of the run whose labels a service releases, each empty if unknown."""

    run: str = "this run"
    method: str = ""
    data: str = ""
    task: str = ""
    attribute: str = "group"
    record: str = Field("", description="One record of the data set in words; empty: `record_shape` features.")


class About(Facts):
    """A description in words of the run whose labels a service releases. `form` lists the inputs for a record, one per
    column; null if records have no columns."""

    mechanism: str
    lead: str = Field("", description="The lead that an answer needs to stand out from the noise; empty if unknown.")
    gate: str
    guarantee: str
    is_private: bool
    form: list[RecordField] | None
    takes_posted: bool = Field(description="Whether queries may contain records that are not in the pool.")
    caller: Caller


class State(Body):
    """The state that every page shows: the privacy budget, and whether new queries are answered."""

    budget: Budget
    queries_left: int | None = Field(
        description="Number of new queries for which the budget has room; null: it depends on votes."
    )
    health: Health


class AnswersWanted(Body):
    """A request for a file of stored replies: the content hashes of their queries, and the file's format."""

    keys: list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = Field(min_length=1, max_length=MAX_KEYS_PER_FILE)
    format: Literal["parquet", "csv"]


def reply_json(key: str, reply: Outcome | OverBudget, books: Books) -> dict[str, Any]:
    """Return a query's outcome as the JSON of a :class:`Reply`, which does not show which step refused the query.
    ``key`` is the query's content hash, and ``books`` hold its outcome."""
    # Shown apart from refusals: unless votes decide when the budget ends, its room can be computed from public numbers.
    if isinstance(reply, OverBudget):
        status, label = "over_budget", None
    else:
        status, label = "refused" if reply.label is None else "answered", reply.label
    lead, needed = books.session.lead(reply), books.ledger.terms.mechanism.lead_needed
    stands_out = None if lead is None or needed is None else lead >= needed
    free = key in books.ledger.free
    return {"key": key, "status": status, "label": label, "free": free, "lead": lead, "stands_out": stands_out}


def lead_words(terms: LedgerTerms, offsets: Offsets | None, label_names: Sequence[str]) -> str:
    """Return in words by how many votes an answer must lead to stand out from the noise, and the offsets of the labels,
    which are public; empty if the lead is unknown."""
    needed = terms.mechanism.lead_needed
    if needed is None:
        return ""
    share = needed / terms.num_teachers
    words = f"A lead of {needed:,.0f} of {terms.num_teachers:,} votes ({percent(share)}) stands out 19 times in 20."
    if share > 1:
        words = f"No lead of {terms.num_teachers:,} votes stands out 19 times in 20: {needed:,.0f} would."
    if offsets is not None:
        added = ", ".join(f"{name} {each:+,}" for name, each in zip(label_names, offsets.votes, strict=True))
        words += f" Before labels are compared, votes are added to their noisy counts: {added}."
    return words


class PageOfLedger(Body):
    """The query parameters with which an operator requests a part of the ledger."""

    # A query string is text: a strict model would refuse `limit=100`.
    model_config = ConfigDict(extra="forbid", strict=False)
    start: int = Field(0, ge=0, le=2**31, description="Number of the first charge, from 0.")
    limit: int = Field(100, ge=1, le=1000, description="The largest number of charges to return.")


class ChargedQuery(Body):
    """The charge of one query as the operator sees it; the verdict is `open` if a crash left the query without an
    outcome.

    `caller` is empty for the run's own queries; their `at_s` may be 0, which means unknown.
    """

    number: int
    group: str
    verdict: str
    caller: str
    at_s: float = Field(description="When the query was charged, in seconds since 1970.")


class LedgerEntry(ChargedQuery):
    """A charge in the ledger, with its query and the label. `request` is empty for the run's own queries."""

    key: str
    label: int | None
    request: str


class Chain(Body):
    """The result of the last verification of the ledger's entries: its time, the number of valid entries, and the fault
    (empty if none was found)."""

    at_s: float
    entries: int
    fault: str


class GroupCounts(Body):
    """The charged queries of one group, counted by outcome."""

    group: str
    answer: int
    confidence: int
    fairness: int
    free: int
    open: int
    answers: list[int] = Field(description="Number of answers by class.")


class Spender(Body):
    """The number of queries charged to one caller."""

    name: str
    queries: int


class Latency(Body):
    """Quantiles, in milliseconds, of the duration of the latest requests with queries."""

    count: int
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None


class LargeCharge(ChargedQuery):
    """One of the queries with the largest data-dependent cost. `of_worst` is its cost as a share of the worst case,
    `of_total` as a share of the cost of all queries."""

    number: int = Field(description="Position in the order in which queries were charged, from 1.")
    votes: list[int] = Field(description="Votes for the most popular label, and for the second.")
    of_worst: float
    of_total: float


class Costs(Body):
    """The data-dependent privacy costs of queries, in Renyi divergence of one `order`. Private: not to be published."""

    order: float
    words: str
    bins: list[int] = Field(
        description="Number of queries by cost as a share of their worst case, in twentieths; empty if all shares "
        "are equal."
    )
    dearest: list[LargeCharge]


class Overview(State):
    """What an operator's page shows about a service: health, advice, budget, costs, and queries by outcome. Private:
    not to be published."""

    at_s: float
    started_s: float
    advice: list[Advice]
    forecast: str
    lasts_s: float | None = Field(
        description="How long the budget lasts at the present rate; null: no end, or unknown."
    )
    epsilon_data_dependent: float | None
    costs: Costs
    points: list[PointInTime]
    groups: list[GroupCounts]
    callers: list[Spender] = Field(description="The callers with most charges, in descending order.")
    open_reservations: int
    latency: Latency
    disk_free_bytes: int | None
    chain: Chain
    last_backup_s: float | None


class LedgerPage(Body):
    """A requested part of the ledger, and the data-dependent epsilon of all charges. Private: not to be published."""

    total: int
    entries: list[LedgerEntry]
    epsilon_data_dependent: float | None


_MAX_COUNT = 1_000_000
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def bodies_for(pool: PublicPool) -> tuple[type[BaseModel], Any]:
    """Return two types of request bodies for the routes of a service: one for queries, one for an estimate of their
    cost.

    They accept only record numbers, record shapes, values and groups of this ``pool``.
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
    posted: dict[str, Any] = {}  # by the field that decides which body it is
    if pool.form is not None:
        fields: dict[str, Any] = {}
        for place, column in enumerate(pool.form.fields):
            cell: Any = Annotated[float, Field(allow_inf_nan=False)]
            if column.low is None and column.takes_other:
                cell = Annotated[str, Field(min_length=1, max_length=200)]
            elif column.low is None:
                cell = operator.getitem(Literal, tuple(column.choices))
            cell, default = (cell | None, None) if column.is_optional else (cell, ...)
            # The number 2 for the category `2`, as in a file with types.
            cell = Annotated[cell, BeforeValidator(functools.partial(pool.form.spelling, column.name))]
            # A column may have any name, so the attribute in Python is numbered.
            fields[f"column_{place}"] = (cell, Field(default, alias=column.name))
        posted["record"] = create_model("Record", __base__=Body, **fields)
    if pool.picture is not None:
        words = "A PNG or JPEG file in base64; its centre square is resized."
        posted["picture"] = Annotated[str, Field(description=words)]
    posted["features"] = features
    by_id: Any = create_model("QueryById", __base__=Body, id=(number, ...))
    query: Any = by_id
    if pool.takes_posted:
        kinds: list[Any] = [Annotated[by_id, Tag("id")]]
        for name, kind in posted.items():
            given: dict[str, Any] = {name: (kind, ...), "group": (group, ...)}
            kinds.append(Annotated[create_model(f"QueryBy{name.capitalize()}", __base__=Body, **given), Tag(name)])
        # With a discriminator, errors are reported for one kind; a plain union reports them for every kind.
        tags = {name: name for name in posted} | {"group": "features"}
        query = Annotated[functools.reduce(operator.or_, kinds), _tagged_by(tags, "id")]
    several: Any = Annotated[list[query], Field(min_length=1, max_length=MAX_QUERIES_PER_REQUEST), FailFast()]
    queries: Any = create_model("Queries", __base__=Body, queries=(several, ...))
    count: Any = create_model("Count", __base__=Body, count=(_whole_number(ge=0, le=_MAX_COUNT), ...))
    either = Annotated[queries, Tag("queries")] | Annotated[count, Tag("count")]
    return queries, Annotated[either, _tagged_by({"count": "count"}, "queries")]


def _tagged_by(tags: Mapping[str, str], default: str) -> Discriminator:
    """Return pydantic's discriminator for a union of types of request bodies: it selects the type that validates a
    body.

    ``tags`` maps names of fields to tags of types. The first of these fields that a body contains decides the tag; a
    body with none of them has the tag ``default``.
    """

    def tag(value: Any) -> str:
        """Return the tag of the request body ``value``, which is JSON or a validated model."""
        has = value.__contains__ if isinstance(value, dict) else functools.partial(hasattr, value)
        return next((tag for name, tag in tags.items() if has(name)), default)

    return Discriminator(tag)


def _whole_number(**bounds: Any) -> Any:
    """Return the type of an integer within ``bounds`` as in JSON Schema: accepts 3.0 as the integer 3, but neither "3"
    nor true."""
    return Annotated[
        int, Field(**bounds), BeforeValidator(lambda v: int(v) if type(v) is float and v.is_integer() else v)
    ]


def question_of(query: Any, pool: PublicPool) -> Question:
    """Convert a validated ``query`` of a request body to a :class:`Question`, which has its record's features too.
    FaultError for a value that the declaration of its column does not allow, and for a picture that cannot be read."""
    number: int | None = getattr(query, "id", None)
    if number is not None:
        return pool.questions[number]
    if hasattr(query, "picture"):
        try:
            assert pool.picture is not None
            read: Any = pool.picture(base64.b64decode(query.picture, validate=True))
            return pool.posted(read, query.group)
        except ValueError as error:
            raise FaultError(422, "picture", "", f"Expected a PNG or JPEG file in base64 ({error}).") from error
    if not hasattr(query, "record"):
        return pool.posted(query.features, query.group)
    values = {field.alias: getattr(query.record, name) for name, field in type(query.record).model_fields.items()}
    try:
        assert pool.form is not None
        features: Any = pool.place(pool.form.encode(values))
    except ValueError as error:
        raise FaultError(422, "record", "", f"{error}.") from error
    return pool.posted(features, query.group)


async def questions_of(queries: Sequence[Any], pool: PublicPool) -> list[Question]:
    """Convert validated queries as :func:`question_of` does; those with pictures in a thread, since an encoder takes a
    while."""

    def convert() -> list[Question]:
        return [question_of(query, pool) for query in queries]

    return await asyncio.to_thread(convert) if any(hasattr(each, "picture") for each in queries) else convert()


_COLD_STARTS = {"group": "for a group", "cell": "for a group and a class", "all_groups": "for every group"}
_SEEN = "all replies to all analysts together"


def about_json(
    facts: Facts, pool: PublicPool, terms: LedgerTerms, caller: KnownCaller, *, offsets: Offsets | None = None
) -> dict[str, Any]:
    """Return the :class:`About` of a service as JSON, as ``caller`` sees it; ``offsets`` are those of its ledger."""
    form, epsilon = pool.form, session.epsilon_fixed_beforehand(terms)
    if epsilon is None:
        guarantee = "The budget ends when the votes say so, which leaks: no guarantee was fixed beforehand."
    else:
        guarantee = meaning(epsilon, terms.budget.delta, unit=terms.unit, relation=terms.relation, seen=_SEEN)
        if terms.noise != OS_ENTROPY:
            guarantee = (
                f"Nothing is bounded: the noise is seeded. With fresh noise: {guarantee[0].lower()}{guarantee[1:]}"
            )
        limit = f"ε = {at_most(epsilon)}, δ = {delta_text(terms.budget.delta)}, {terms.relation}"
        guarantee += f" That is the limit of this budget ({limit}). Other releases on the same records add to it."
    rule = terms.gate
    gate = (
        f"Shares of an answer may differ between groups by less than {rule.max_disparity:g}, after {rule.min_count} "
        f"answers {_COLD_STARTS[rule.cold_start]}; an answer that would break this is refused and charged all the same."
    )
    if math.isinf(rule.max_disparity):
        gate = "No fairness gate: the shares of an answer may differ between groups."
    return {
        **facts.model_dump(),
        "mechanism": f"{terms.num_teachers:,} {terms.mechanism.voters} vote. {terms.mechanism.describe()}.",
        "lead": lead_words(terms, offsets, pool.label_names),
        "gate": gate,
        "guarantee": guarantee,
        "is_private": terms.noise == OS_ENTROPY,
        "form": None if form is None else [dataclasses.asdict(field) for field in form.fields],
        "takes_posted": pool.takes_posted,
        "caller": {"name": caller.name, "role": caller.role},
    }


FileFormat = Literal["parquet", "csv"]
MEDIA_TYPES = {"parquet": "application/vnd.apache.parquet", "csv": "text/csv; charset=utf-8"}
_WRITERS: Mapping[FileFormat, Callable[[pa.Table, Any], None]] = {"parquet": pq.write_table, "csv": csv.write_csv}


def answers_file(
    keys: Sequence[str], outcomes: Sequence[Outcome | None], pool: PublicPool, file_format: FileFormat
) -> bytes:
    """Return the content of a file with one row for each query in ``keys``: the number of its record in the pool, the
    status of its reply, and the label.

    The number is null for a record that is not in the pool. The status is ``not_stored`` for a query without a stored
    reply.
    """
    labels = [None if outcome is None else outcome.label for outcome in outcomes]
    # One word for every refusal: the step that refused depends on votes, and analysts may read this file.
    statuses = {None: "not_stored", "answer": "answered"}
    verdicts = [None if outcome is None else outcome.verdict for outcome in outcomes]
    table = pa.table(
        {
            "key": list(keys),
            "id": pa.array([pool.numbers.get(key) for key in keys], pa.int64()),
            "status": [statuses.get(verdict, "refused") for verdict in verdicts],
            "label": pa.array(labels, pa.int64()),
            "label_name": pa.array([None if k is None else pool.label_names[k] for k in labels], pa.string()),
        }
    )
    sink = io.BytesIO()
    _WRITERS[file_format](table, sink)
    return sink.getvalue()


_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class ServiceMetrics:
    """The metrics of one service: a public Prometheus registry, and a private one for operators."""

    def __init__(self) -> None:
        # Not the library's global one, which holds facts of the process and allows one service per process.
        self._registry, self._private = prometheus.CollectorRegistry(), prometheus.CollectorRegistry()
        # By route, not by path: each key in a path would be another time series.
        counter = functools.partial(prometheus.Counter, registry=self._registry)
        self._requests = counter("fairpate_http_requests", "Requests answered.", ["method", "route", "status"])
        self._queries = counter("fairpate_queries_received", "Queries in requests.")
        self.groups = counter("fairpate_groups", "Groups of requests processed together.")
        when = "When the process started, in seconds since 1970."
        prometheus.Gauge("fairpate_started_seconds", when, registry=self._registry).set_to_current_time()
        timing = functools.partial(prometheus.Histogram, buckets=_BUCKETS_S, registry=self._private)
        self._latency = timing("fairpate_request_seconds", "Time from a request to its reply.", ["route"])
        self._last_s: deque[float] = deque(maxlen=1000)

    def count_request(self, facts: Mapping[str, Any], seconds: float) -> None:
        """Count a finished request, described by ``facts``, that took ``seconds``; called as a
        :data:`fairpate.http_server.OnResponse`."""
        route = facts["route"]
        self._requests.labels(facts["method"], route, str(facts["status"])).inc()
        self._latency.labels(route).observe(seconds)
        if route == "/v1/queries":
            self._last_s.append(seconds)
        self._queries.inc(facts["queries"] or 0)

    def latency(self) -> dict[str, float | int | None]:
        """Return the :class:`Latency` of the latest requests with queries as JSON, for operators only."""
        ordered = sorted(self._last_s)
        found = {f"p{p}_ms": 1000 * ordered[(len(ordered) - 1) * p // 100] if ordered else None for p in (50, 90, 99)}
        return {"count": len(ordered), **found}

    def render(self, status: BudgetStatus, reasons: Sequence[str]) -> bytes:
        """Return the analysts' metrics as Prometheus text: the budget in ``status``, and whether new queries are
        answered. ``reasons`` are why they are not; it is empty if they are."""
        found: dict[str, tuple[str, float | None]] = {"ready": ("Whether new queries are answered.", not reasons)}
        if status.kind != "data_dependent":
            found |= _budget(status)
        return prometheus.generate_latest(self._registry) + prometheus.generate_latest(_gauges("fairpate", found))

    def render_for_operator(self, status: BudgetStatus, overview: Mapping[str, Any]) -> bytes:
        """Return the metrics of analysts and operators as Prometheus text; ``overview`` is an :class:`Overview` as
        JSON."""
        chain = overview["chain"]
        found: dict[str, tuple[str, float | None]] = _budget(status) | {
            "queries_left": ("New queries for which the budget has room.", overview["queries_left"]),
            "epsilon_data_dependent": ("Not to be published: depends on votes.", overview["epsilon_data_dependent"]),
            "open_reservations": ("Queries charged but never answered.", overview["open_reservations"]),
            "chain_ok": ("Whether the ledger was valid at the last verification.", float(not chain["fault"])),
            "chain_verified_seconds": ("When the ledger was last verified.", chain["at_s"]),
            "last_backup_seconds": ("When the ledger was last copied; 0: never.", overview["last_backup_s"] or 0.0),
        }
        # A ledger in a database has no disk here: a number for it would be an alert that never ends.
        if overview["disk_free_bytes"] is not None:
            found["disk_free_bytes"] = ("Free space on the disk of the ledger.", overview["disk_free_bytes"])
        gauges = _gauges("fairpate_operator", found)
        outcomes = prometheus.Gauge(
            "fairpate_operator_outcomes", "Charges by group and outcome.", ["group", "outcome"], registry=gauges
        )
        for group in overview["groups"]:
            for verdict in ("answer", "confidence", "fairness", "free"):
                outcomes.labels(group["group"], verdict).set(group[verdict])
        public = self.render(status, overview["health"]["reasons"])
        return public + prometheus.generate_latest(self._private) + prometheus.generate_latest(gauges)


def _gauges(prefix: str, values: Mapping[str, tuple[str, float | None]]) -> prometheus.CollectorRegistry:
    """Return a Prometheus registry with one gauge for each of ``values``, pairs of a description and a number by name.
    None means no limit and is exported as infinity."""
    # Made for each rendering: the numbers are those of one state, and none stays from an earlier one.
    registry = prometheus.CollectorRegistry()
    for name, (text, value) in values.items():
        prometheus.Gauge(f"{prefix}_{name}", text, registry=registry).set(math.inf if value is None else value)
    return registry


def _budget(status: BudgetStatus) -> dict[str, tuple[str, float | None]]:
    """Return the description and value of each metric of the privacy budget, by the metric's name. The value None means
    no limit."""
    return {
        "queries_submitted": ("Queries charged.", status.queries_submitted),
        "queries_limit": ("Most queries that may be charged.", status.max_queries),
        "epsilon_submitted": ("Epsilon of the queries charged.", strict(status.epsilon_submitted)),
        "epsilon_limit": ("Limit on epsilon.", status.epsilon_limit),
        "budget_closed": ("Whether there is no room for a new query.", float(status.closed)),
    }


_TAGS = ("id", "features", "record", "picture")
# Longer than the pause between two attempts to open a failed ledger again.
_RETRY_AFTER = {"Retry-After": "2"}
# For an operator's state the cost of new charges is computed, so it is refreshed less often.
_ANALYSTS_AGE_S = 1.0
_OPERATORS_AGE_S = 2.0
_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}, 503: {"model": Faults}}
_METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}
_FILES: dict[int | str, dict[str, Any]] = {200: {"content": {kind: {} for kind in MEDIA_TYPES.values()}}}
_FAILURES: dict[int | str, dict[str, Any]] = {status: {"model": Faults} for status in (429, 503)}
Key = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="A query's content hash.")]


def field_name(parts: list[str]) -> str:
    """Return the name of an invalid field for messages. ``parts`` is its path in a pydantic error, from which tags of
    unions are left out."""
    # pydantic puts the tag of a union before its fields, as in `queries.queries`.
    if parts[:2] in (["queries", "queries"], ["count", "count"]):
        parts = parts[1:]
    names = [
        part for before, part in zip(["", *parts], parts, strict=False) if not (before.isdigit() and part in _TAGS)
    ]
    return ".".join(names)


def add_error_bodies(app: FastAPI) -> None:
    """Make ``app`` answer errors of the session and the ledger with a JSON body of type
    :class:`fairpate.http_server.Faults`."""

    @app.exception_handler(QuotaExceededError)
    async def over_quota(_: Request, error: QuotaExceededError) -> Response:
        value = f"{error.num_new} new"
        # Without Retry-After: waiting does not help a request that is larger than the whole quota.
        if math.isinf(error.retry_after_s):
            remedy = "These are more new queries than this token may submit at once; send fewer in one request."
            return faults_response(429, [fault("queries", value, remedy)])
        wait_s = math.ceil(error.retry_after_s)
        remedy = f"This token may submit {error.allowed_now} new queries now; wait {wait_s} s, or send fewer."
        return faults_response(429, [fault("queries", value, remedy)], {"Retry-After": str(wait_s)})

    @app.exception_handler(VotesUnavailableError)
    @app.exception_handler(sqlite3.Error)
    @app.exception_handler(LedgerError)
    async def failed(_: Request, error: Exception) -> Response:
        # The cause is written to the log only: it is about the operator's machines.
        if isinstance(error, VotesUnavailableError):
            _log.error("Teachers did not vote, so new queries were refused; look at their workers: %s", error)
            found = fault(
                "votes", "", "Some teachers are not available: no query was answered. Submit them again later."
            )
        else:
            _log.error("The ledger failed, so new queries are refused until it can be written: %s", error)
            remedy = "The ledger cannot be written, so no new query is answered; ask the operator for the cause."
            found = fault("ledger", "", remedy)
        return faults_response(503, [found], _RETRY_AFTER)


def add_analyst_routes(
    app: FastAPI, facts: Facts, states: States, batcher: Batcher, counters: ServiceMetrics, tokens: LiveTokens
) -> None:
    """Add the analysts' routes and the service's page to ``app``.

    ``facts`` describe the run, ``states`` computes what pages show, ``batcher`` submits queries, ``counters`` are the
    service's metrics, and ``tokens`` are the accepted tokens.
    """
    writer, pool, streams = states.writer, states.pool, states.streams
    queries_type, estimate_type = bodies_for(pool)

    async def submit(request: Request, body: Any) -> Response:
        """Submit queries. Each gets a label, a refusal, or `over_budget` if the budget has no room for it."""
        questions = await questions_of(body.queries, pool)
        state = request.scope["state"]
        # For the access log and the metrics, which see the request and not its body.
        state["num_queries"] = len(questions)
        replies = await batcher.ask(questions, state["caller"], state["request_id"], state["is_admitted"])
        rows = [reply_json(q.query.key, reply, writer.books) for q, reply in zip(questions, replies, strict=True)]
        crossed = next((i for i, reply in enumerate(replies) if isinstance(reply, OverBudget)), None)
        return json_response({"replies": rows, "budget_crossed_at": crossed})

    # FastAPI reads the type of a body from the annotation, and this one follows from the pool.
    submit.__annotations__["body"] = queries_type
    # `response_model` documents the reply, here and below: FastAPI sends a Response without validating it.
    app.post("/v1/queries", response_model=Replies, responses=_FAILURES)(submit)

    @app.get("/v1/queries/{key}", response_model=Reply, responses={404: {"model": Faults}})
    async def look_up(key: Key) -> Response:
        """Return the stored reply to a query. This is free: stored replies are never drawn again."""
        # From memory: stored replies are given also while the ledger cannot be written.
        if (outcome := writer.books.session.stored(key)) is None:
            raise FaultError(404, "key", key, "No reply is stored for this query; submit it with POST /v1/queries.")
        return json_response(reply_json(key, outcome, writer.books))

    async def estimate(body: Any) -> Response:
        """Return what the given queries, or a number of new queries, would cost at most. No query is submitted."""
        # By key: a query that is given twice in one request is charged once.
        asked = await questions_of(getattr(body, "queries", ()), pool)
        asked = list({question.query.key: question for question in asked}.values())
        # One snapshot, so that both budgets are of one moment.
        snapshot = writer.snapshot
        unknown = [question for question in asked if writer.books.ledger.outcome_of.get(question.query.key) is None]
        free = sum(label is not None for label in batcher.public_labels(unknown))
        new = getattr(body, "count", len(unknown) - free)
        budgets = {"now": snapshot.budget_status().to_json(), "afterwards": snapshot.budget_status(new).to_json()}
        stored = len(asked) - len(unknown)
        return json_response({"new_queries": new, "stored_replies": stored, "without_votes": free, **budgets})

    estimate.__annotations__["body"] = estimate_type
    app.post("/v1/estimate", response_model=Estimate)(estimate)

    @app.post("/v1/answers", response_class=Response, responses=_FILES)
    async def answers(wanted: AnswersWanted) -> Response:
        """Return stored replies as a file with one row for each requested key. No query is submitted."""
        outcomes = [writer.books.session.stored(key) for key in wanted.keys]
        # In a thread: the event loop answers other requests while thousands of rows are written.
        content = await asyncio.to_thread(answers_file, wanted.keys, outcomes, pool, wanted.format)
        headers = {"Content-Disposition": f'attachment; filename="answers.{wanted.format}"'}
        return Response(content, media_type=MEDIA_TYPES[wanted.format], headers=headers)

    @app.get("/v1/budget", response_model=Budget)
    async def budget() -> Response:
        """Return the privacy budget's limits, and how much of it is spent by data-independent accounting."""
        return json_response(writer.snapshot.budget_status().to_json())

    @app.get("/v1/statement", response_model=Statement)
    async def statement() -> Response:
        """Return the privacy guarantee that may be published, and the public facts of this service."""
        return json_response(statement_json(pool, writer.snapshot))

    @app.get("/metrics", response_class=Response, responses=_METRICS)
    async def prometheus() -> Response:
        """Return the metrics that do not depend on votes, for Prometheus."""
        text = counters.render(writer.snapshot.budget_status(), states.health.reasons())
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    state = Latest(states.for_analyst, max_age_s=_ANALYSTS_AGE_S)

    async def front() -> Response:
        content, headers = page(needs_token=tokens.needs_token)
        return Response(content, media_type="text/html", headers=headers)

    add_open_route(app, "/", front, include_in_schema=False)

    @app.get("/v1/about", response_model=About)
    async def about(request: Request) -> Response:
        """Return a description of the run, the inputs of a record, and your name and role."""
        caller, books = request.scope["state"]["caller"], writer.books
        offsets = books.session.offsets
        return json_response(about_json(facts, pool, books.ledger.terms, caller, offsets=offsets))

    @app.get("/v1/state", response_model=State)
    async def now() -> Response:
        """Return the budget and the service's health, as `/v1/events` streams them."""
        return json_response(await state())

    @app.get("/v1/events", response_class=Response, responses=_EVENTS)
    async def events(request: Request) -> Response:
        """Stream server-sent events: the service's `State` (budget and health) whenever it has changed."""
        return streams.response(request, state)

    @app.get("/v1/me", response_model=Me)
    async def me(request: Request) -> Response:
        """Return your name and role, your own limit, and how much was charged to you."""
        caller: KnownCaller = request.scope["state"]["caller"]
        ledger = writer.books.ledger
        # The store's limit first: a change enters the ledger with the next new query.
        own = tokens.stored.limits.get(caller.name, ledger.limits.get(caller.name, NO_LIMIT))
        queries, most = ledger.charged_to[caller.name], session.most_queries(ledger.terms, own)
        own_terms = dataclasses.replace(ledger.terms, beside=())  # the caller's queries alone
        epsilon = session.epsilon_data_independent(own_terms, num_queries=queries)
        return json_response(
            {
                "name": caller.name,
                "scope": caller.role,
                "limit": dataclasses.asdict(own),
                "spent": {"queries": queries, "epsilon": strict(epsilon)},
                "left": None if most == session.UNLIMITED else {"queries": max(0, most - queries)},
                "expires_s": caller.expires_s,
            }
        )


def statement_json(pool: PublicPool, snapshot: Snapshot) -> dict[str, Any]:
    """Return the :class:`Statement` of a service as JSON."""
    terms, status, offsets = snapshot.terms, snapshot.budget_status(), snapshot.books.session.offsets
    return {
        "unit": terms.unit,
        "relation": terms.relation,
        "delta": status.delta,
        "epsilon": strict(session.epsilon_fixed_beforehand(terms)),
        "epsilon_submitted": strict(status.epsilon_submitted),
        "queries_submitted": status.queries_submitted,
        "noise": terms.noise,
        # The service does not know how the settings were chosen, so their cost does not count as included.
        "tuning_accounted": False,
        "num_teachers": terms.num_teachers,
        "lead_needed": terms.mechanism.lead_needed,
        "offsets": None if offsets is None else list(offsets.votes),
        "mechanism": worded({"name": terms.mechanism.name, **dataclasses.asdict(terms.mechanism)}),
        "gate": worded(dataclasses.asdict(terms.gate)),
        "label_names": list(pool.label_names),
        "group_names": list(pool.group_names),
        "pool_size": len(pool),
        "record_shape": list(pool.record_shape),
    }


def add_operator_routes(app: FastAPI, states: States, counters: ServiceMetrics, verification: Verification) -> None:
    """Add the operators' routes to ``app``; ``states`` computes what their page shows, ``counters`` are the service's
    metrics, and ``verification`` verifies its ledger."""
    writer, pool, streams = states.writer, states.pool, states.streams

    @app.get("/v1/operator/ledger", response_model=LedgerPage)
    async def ledger(request: Request, page: Annotated[PageOfLedger, Query()]) -> Response:
        """Return a part of the ledger's charges with their outcomes, and the data-dependent epsilon of all charges.
        Private."""
        snapshot = writer.snapshot
        books, total = snapshot.books, snapshot.num_charges
        start, stop = min(page.start, total), min(page.start + page.limit, total)
        caller: KnownCaller = request.scope["state"]["caller"]
        # Noted before anything is read, so that no reading goes unrecorded. In a thread: it waits for the disk.
        await asyncio.to_thread(note_action, books.ledger.actions, "read", caller=caller.name, charges=[start, stop])
        entries = []
        for number, charge in enumerate(books.ledger.charged(start, stop), start):
            key, _, outcome, asked = charge
            own = {"key": key, "label": None if outcome is None else outcome.label, "request": asked.asker.request}
            entries.append(charge_json(number, charge, pool) | own)
        epsilon = await asyncio.to_thread(books.epsilon, total)
        return json_response({"total": total, "entries": entries, "epsilon_data_dependent": strict(epsilon)})

    @app.post("/v1/operator/verification", response_model=Chain, responses={503: {"model": Faults}})
    async def verify() -> Response:
        """Verify all entries of the ledger now, while queries are answered. Status 503 if the ledger cannot be read."""
        try:
            return json_response(await verification.verify_now())
        except UnreachableError as error:
            remedy = f"The ledger cannot be read now, so it was not verified; try again later. {error}"
            raise FaultError(503, "ledger", "", remedy) from error

    latest = Latest(states.for_operator, max_age_s=_OPERATORS_AGE_S)

    @app.get("/v1/operator/overview", response_model=Overview)
    async def now() -> Response:
        """Return the operator's overview: health, advice, budget and forecast, and outcomes over time and by group and
        class. Private."""
        return json_response(await latest())

    @app.get("/v1/operator/events", response_class=Response, responses=_EVENTS)
    async def events(request: Request) -> Response:
        """Stream server-sent events: the operator's `Overview` whenever it has changed. Private."""
        return streams.response(request, latest)

    @app.get("/v1/operator/metrics", response_class=Response, responses=_METRICS)
    async def prometheus() -> Response:
        """Return all metrics for Prometheus, including latencies and outcomes. Private."""
        text = counters.render_for_operator(writer.snapshot.budget_status(), await latest())
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
