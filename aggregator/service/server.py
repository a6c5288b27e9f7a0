"""Serve an aggregator over HTTP: its routes and application, and the named Ray actor that holds the ledger.

An analyst gets labels, refusals and public numbers. The step that refused, the data-dependent privacy cost and all else
that depends on votes are available under ``/v1/operator/`` only.

The actor is the ledger's only writer. When its process dies Ray starts another, which opens the ledger again (every
entry is verified and replayed), rebuilds the voters, and listens on the same port. The voters are injected as a
function that opens a :class:`Backend`; this module knows no teachers. uvicorn runs in a thread of the actor. Several
runs are served by several services, each with its own port; a proxy gives them one address.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from aggregator.audit import note_action
from aggregator.ledger import Ledger
from aggregator.service import wire
from aggregator.service.auth import LiveTokens, TokenBook, is_loopback
from aggregator.service.page import Latest, ServiceMetrics, States, Streams, page, page_headers
from aggregator.service.wire import (
    MEDIA_TYPES,
    CountVotes,
    Facts,
    PublicPool,
    answers_file,
    budget_json,
    max_body_bytes,
)
from aggregator.service.writer import Batcher, Books, OpenBooks, Readiness, Snapshot, Verification, Writer
from aggregator.session import (
    AggregatorSession,
    OverBudget,
    QuotaExceededError,
    QuotaRule,
    Quotas,
    VotesUnavailableError,
    epsilon_fixed_beforehand,
    status_of,
)
from aggregator.store import LedgerError, UnreachableError
from fairpate.http_server import (
    FaultError,
    Faults,
    HttpServer,
    HttpSettings,
    KnownCaller,
    ServiceError,
    fault,
    faults_response,
    field_of,
    json_response,
    new_app,
)
from fairpate.types import UsageError, UserError, strict, worded

_TAGS = ("id", "features", "record")
# Longer than the pause between two attempts to open a failed ledger again.
_RETRY_AFTER = {"Retry-After": "2"}
# An operator's state prices the new charges, so it is computed less often.
_ANALYSTS_AGE_S, _OPERATORS_AGE_S = 1.0, 2.0
_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}, 503: {"model": Faults}}
_METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}
_FILES: dict[int | str, dict[str, Any]] = {200: {"content": {kind: {} for kind in MEDIA_TYPES.values()}}}
_FAILURES: dict[int | str, dict[str, Any]] = {status: {"model": Faults} for status in (429, 503)}
Key = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="A query's content hash.")]
_log = logging.getLogger(__name__)


def field_name(error: Mapping[str, Any]) -> str:
    """Return the field of one of pydantic's errors, without the tags of unions."""
    parts = field_of(error)
    # pydantic puts the tag of a union before its fields, as in `queries.queries`.
    if parts[:2] in (["queries", "queries"], ["count", "count"]):
        parts = parts[1:]
    names = [
        part for before, part in zip(["", *parts], parts, strict=False) if not (before.isdigit() and part in _TAGS)
    ]
    return ".".join(names) or "body"


def add_error_bodies(app: FastAPI) -> None:
    """Answer errors of session and ledger with :class:`fairpate.http_server.Faults` too."""

    @app.exception_handler(QuotaExceededError)
    async def over_quota(_: Request, error: QuotaExceededError) -> Response:
        value, refusal = f"{error.num_new} new", error.refusal
        # Without Retry-After: waiting does not help a request that is larger than the whole quota.
        if math.isinf(refusal.retry_after_s):
            remedy = "More than this token may ever ask at once; send fewer new queries in one request."
            return faults_response(429, [fault("queries", value, remedy)])
        wait_s = math.ceil(refusal.retry_after_s)
        remedy = f"This token may ask {refusal.allowed_now} new queries now; wait {wait_s} s, or send fewer."
        return faults_response(429, [fault("queries", value, remedy)], {"Retry-After": str(wait_s)})

    @app.exception_handler(VotesUnavailableError)
    async def votes_unavailable(_: Request, error: VotesUnavailableError) -> Response:
        # The cause goes to the log alone: it is about the operator's machines.
        _log.error("Teachers did not vote: %s", error)
        remedy = "Some teachers are not available; no query was answered. Ask again later."
        return faults_response(503, [fault("votes", "", remedy)], _RETRY_AFTER)

    @app.exception_handler(sqlite3.Error)
    @app.exception_handler(LedgerError)
    async def ledger_failed(_: Request, error: Exception) -> Response:
        _log.error("The ledger failed: %s", error)
        remedy = "The ledger cannot be written, so no new query is answered; the operator's log has the cause."
        return faults_response(503, [fault("ledger", "", remedy)], _RETRY_AFTER)


def add_analyst_routes(
    app: FastAPI,
    facts: Facts,
    pool: PublicPool,
    writer: Writer,
    batcher: Batcher,
    health: Readiness,
    counters: ServiceMetrics,
    states: States,
    streams: Streams,
    tokens: LiveTokens,
) -> None:
    """Add the routes of analysts and the page to ``app``."""
    queries_type, estimate_type = wire.bodies_for(pool)

    async def submit(request: Request, body: Any) -> Response:
        """Submit queries; each gets a label, a refusal, or `over_budget` if the budget has no room for it."""
        questions = [wire.question_of(query, pool) for query in body.queries]
        state = request.scope["state"]
        # For the access log and the metrics, which see the request and not its body.
        state["num_queries"] = len(questions)
        replies = await batcher.ask(questions, state["caller"], state["request_id"])
        rows = [wire.reply_json(q.query.key, reply) for q, reply in zip(questions, replies, strict=True)]
        crossed = next((i for i, reply in enumerate(replies) if isinstance(reply, OverBudget)), None)
        return json_response({"replies": rows, "budget_crossed_at": crossed})

    # FastAPI reads the type of a body from the annotation, and this one follows from the pool.
    submit.__annotations__["body"] = queries_type
    # `response_model` documents the reply, here and below: FastAPI sends a Response without validating it.
    app.post("/v1/queries", response_model=wire.Replies, responses=_FAILURES)(submit)

    @app.get("/v1/queries/{key}", response_model=wire.Reply, responses={404: {"model": Faults}})
    async def look_up(key: Key) -> Response:
        """Return the stored reply to a query; free, and never drawn again."""
        # From memory: stored replies are given also while the ledger cannot be written.
        outcome = writer.books.ledger.outcome(key)
        if outcome is None:
            raise FaultError(404, "key", key, "No reply is stored; ask with POST /v1/queries.")
        return json_response(wire.reply_json(key, outcome))

    async def estimate(body: Any) -> Response:
        """Return the cost of queries, or of a number of new ones; none is asked."""
        # A set: a query that is given twice in one request is charged once.
        keys = {wire.question_of(query, pool).query.key for query in getattr(body, "queries", ())}
        # One snapshot, so that both budgets are of one moment.
        snapshot = writer.snapshot
        stored = sum(writer.books.ledger.outcome(key) is not None for key in keys)
        new = getattr(body, "count", len(keys) - stored)
        budgets = {"now": budget_json(snapshot.budget_status()), "afterwards": budget_json(snapshot.budget_status(new))}
        return json_response({"new_queries": new, "stored_replies": stored, **budgets})

    estimate.__annotations__["body"] = estimate_type
    app.post("/v1/estimate", response_model=wire.Estimate)(estimate)

    @app.post("/v1/answers", response_class=Response, responses=_FILES)
    async def answers(wanted: wire.AnswersWanted) -> Response:
        """Return stored replies as a file, a row per key; no query is asked."""
        outcomes = [writer.books.ledger.outcome(key) for key in wanted.keys]
        # In a thread: the event loop answers other requests while thousands of rows are written.
        content = await asyncio.to_thread(answers_file, wanted.keys, outcomes, pool, wanted.format)
        headers = {"Content-Disposition": f'attachment; filename="answers.{wanted.format}"'}
        return Response(content, media_type=MEDIA_TYPES[wanted.format], headers=headers)

    @app.get("/v1/budget", response_model=wire.Budget)
    async def budget() -> Response:
        """Return the budget's limits and its data-independent spending."""
        return json_response(budget_json(writer.snapshot.budget_status()))

    @app.get("/v1/statement", response_model=wire.Statement)
    async def statement() -> Response:
        """Return the privacy guarantee that may be published, and the public facts of this service."""
        return json_response(statement_json(pool, writer.snapshot))

    @app.get("/metrics", response_class=Response, responses=_METRICS)
    async def prometheus() -> Response:
        """Return metrics for Prometheus; none depends on votes."""
        text = counters.render(writer.snapshot.budget_status(), health.reasons())
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    state = Latest(states.for_analyst, max_age_s=_ANALYSTS_AGE_S)

    @app.get("/", include_in_schema=False)
    async def front() -> Response:
        return Response(page(needs_token=tokens.needs_token), media_type="text/html", headers=page_headers())

    @app.get("/v1/about", response_model=wire.About)
    async def about(request: Request) -> Response:
        """Describe the run, the form of a record, and you as the caller."""
        caller: KnownCaller = request.scope["state"]["caller"]
        return json_response(wire.about_json(facts, pool, writer.snapshot.terms, caller))

    @app.get("/v1/state", response_model=wire.State)
    async def now() -> Response:
        """Return budget and health, as in the events."""
        return json_response(await state())

    @app.get("/v1/events", response_class=Response, responses=_EVENTS)
    async def events(request: Request) -> Response:
        """Stream server-sent events: a `State` whenever it has changed."""
        return streams.response(request, state)

    @app.get("/v1/me", response_model=wire.Me)
    async def me(request: Request) -> Response:
        """Return your name and role, your own limit, and what you spent of the shared budget."""
        caller: KnownCaller = request.scope["state"]["caller"]
        ledger = writer.books.ledger
        # The store's limit first: a change enters the ledger with the next new query.
        own = status_of(ledger, caller.name, tokens.limits.get(caller.name, ledger.limit_of(caller.name)))
        return json_response(
            {
                "name": caller.name,
                "scope": caller.role,
                "limit": dataclasses.asdict(own.limit),
                "spent": {"queries": own.queries, "epsilon": strict(own.epsilon)},
                "left": None if own.left is None else {"queries": own.left},
                "expires_s": caller.expires_s,
            }
        )


def statement_json(pool: PublicPool, snapshot: Snapshot) -> dict[str, Any]:
    """Return a :class:`aggregator.service.wire.Statement` as JSON."""
    terms, status = snapshot.terms, snapshot.budget_status()
    return {
        "unit": terms.unit,
        "relation": terms.relation,
        "delta": status.delta,
        "epsilon": strict(epsilon_fixed_beforehand(terms)),
        "epsilon_submitted": strict(status.epsilon_submitted),
        "queries_submitted": status.queries_submitted,
        "noise": terms.noise,
        # How the settings were chosen is not known here, so no choice counts as priced.
        "tuning_accounted": False,
        "num_teachers": terms.num_teachers,
        "mechanism": worded({"name": terms.mechanism.name, **terms.mechanism.parameters}),
        "gate": worded(dataclasses.asdict(terms.gate)),
        "label_names": list(pool.label_names),
        "group_names": list(pool.group_names),
        "pool_size": len(pool),
        "record_shape": list(pool.record_shape),
    }


def add_operator_routes(
    app: FastAPI,
    pool: PublicPool,
    writer: Writer,
    verification: Verification,
    counters: ServiceMetrics,
    states: States,
    streams: Streams,
) -> None:
    """Add the routes of operators to ``app``."""

    @app.get("/v1/operator/ledger", response_model=wire.LedgerPage)
    async def ledger(request: Request, page: Annotated[wire.PageOfLedger, Query()]) -> Response:
        """Return charges with the step that refused, and the data-dependent epsilon of all of them. Private."""
        snapshot = writer.snapshot
        books, total = snapshot.books, snapshot.num_charges
        start, stop = min(page.start, total), min(page.start + page.limit, total)
        caller: KnownCaller = request.scope["state"]["caller"]
        # Noted before anything is read, so that no reading goes unrecorded. In a thread: it waits for the disk.
        await asyncio.to_thread(note_action, books.ledger.actions, "read", caller=caller.name, charges=[start, stop])
        entries = []
        for number, (key, group, outcome) in enumerate(books.ledger.charged(start, stop), start):
            asked = books.ledger.asked_for(number)
            entries.append(
                {
                    "number": number,
                    "key": key,
                    "group": pool.group_names[group],
                    "verdict": "open" if outcome is None else outcome.verdict,
                    "label": None if outcome is None else outcome.label,
                    "caller": asked.asker.caller,
                    "request": asked.asker.request,
                    "at_s": asked.at_s,
                }
            )
        epsilon = await asyncio.to_thread(books.price.epsilon, books.ledger, total)
        return json_response({"total": total, "entries": entries, "epsilon_data_dependent": strict(epsilon)})

    @app.post("/v1/operator/verification", response_model=wire.Chain, responses={503: {"model": Faults}})
    async def verify() -> Response:
        """Verify every entry of the ledger now, while queries are answered; 503 if it cannot be read now."""
        try:
            return json_response(await verification.verify_now())
        except UnreachableError as error:
            remedy = f"It cannot be read now, so the state of its chain is unknown; ask again later. {error}"
            raise FaultError(503, "ledger", "", remedy) from error

    latest = Latest(states.for_operator, max_age_s=_OPERATORS_AGE_S)

    @app.get("/v1/operator/overview", response_model=wire.Overview)
    async def now() -> Response:
        """Return health, advice, the budget with a forecast, and outcomes over time by group and class. Private."""
        return json_response(await latest())

    @app.get("/v1/operator/events", response_class=Response, responses=_EVENTS)
    async def events(request: Request) -> Response:
        """Stream server-sent events: an `Overview` whenever it has changed. Private."""
        return streams.response(request, latest)

    @app.get("/v1/operator/metrics", response_class=Response, responses=_METRICS)
    async def prometheus() -> Response:
        """Return metrics for Prometheus with latencies and outcomes. Private."""
        text = counters.render_for_operator(writer.snapshot.budget_status(), await latest())
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


_HISTORY_INTERVAL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The ledger, the pool and the voters of a service.

    ``close`` ends the voters; the service closes the ledger itself. ``reopen`` opens ledger and session again after a
    failed write; None: only a new start does. ``voters_answer`` returns, without waiting, whether the voters are there;
    ``try_vote`` votes on a public record, or raises, and is called after a vote that failed. ``last_backup`` returns
    when the ledger was last copied, in seconds since 1970; None: never.
    """

    ledger: Ledger
    session: AggregatorSession
    pool: PublicPool
    count_votes: CountVotes
    reopen: OpenBooks | None = None
    voters_answer: Callable[[], bool] = lambda: True
    try_vote: Callable[[], object] | None = None
    close: Callable[[], None] = lambda: None
    facts: Facts = field(default_factory=Facts)
    last_backup: Callable[[], float | None] = lambda: None

    def app(self, settings: ServiceSettings, *, tracer: Any = None) -> FastAPI:
        """Return the service as an ASGI application; closing it waits for queries under way and closes the ledger.

        ``tracer`` makes a span of every request; None: no spans.
        """
        pool = self.pool
        pool.question(0)  # hashes all records now; the first request would wait for it
        counters, tokens, streams = ServiceMetrics(), LiveTokens(settings.tokens), Streams()
        writer = Writer(Books(ledger=self.ledger, session=self.session), reopen=self.reopen)
        verification = Verification(writer, interval_s=settings.verification_interval_s)
        health = Readiness(
            writer,
            chain_fault=lambda: verification.chain["fault"],
            voters_answer=self.voters_answer,
            try_vote=self.try_vote or (lambda: self.count_votes([pool.question(0)])),
            interval_s=settings.health_interval_s,
        )
        batcher = Batcher(
            writer,
            health,
            count_votes=self.count_votes,
            quotas=Quotas(settings.quota),
            answer_step_s=settings.answer_step_s,
            own_limits=lambda: tokens.limits,
            on_group=counters.groups.inc,
        )
        states = States(writer, health, verification, pool, counters, last_backup=self.last_backup)

        async def reasons() -> Sequence[str]:
            await health.look_now()
            return health.reasons()

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            await health.look()  # before the first request, whose own failure it might report
            watches = [asyncio.create_task(each) for each in (health.watch(), states.watch(_HISTORY_INTERVAL_S))]
            verification.begin()
            yield
            verification.close()
            for watch in watches:
                watch.cancel()
            # The ledger last, as the watches read it; in a thread, as it waits for the write under way and its voters.
            await asyncio.to_thread(writer.close)

        max_bytes = max_body_bytes(pool)
        app = new_app(
            title="FairPATE aggregator",
            description="Private and fair labels, each paid for from one budget.",
            reasons=reasons,
            tokens=tokens,
            max_body_bytes=lambda: max_bytes,
            rate=settings.rate,
            strangers=settings.strangers,
            tracer=tracer,
            on_response=counters.count_request,
            field_name=field_name,
            lifespan=lifespan,
        )
        add_analyst_routes(app, self.facts, pool, writer, batcher, health, counters, states, streams, tokens)
        add_operator_routes(app, pool, writer, verification, counters, states, streams)
        add_error_bodies(app)
        app.state.streams = streams
        return app


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(HttpSettings):
    """Address, limits and tokens of an aggregator.

    ``answer_step_s``: replies to new queries leave at whole multiples of it after their request; 0: at once.
    ``health_interval_s``: the time between two checks of readiness. ``verification_interval_s``: the time from the end
    of one verification of the ledger to the next.
    """

    tokens: TokenBook = field(default_factory=TokenBook)
    quota: QuotaRule = field(default_factory=QuotaRule)
    answer_step_s: float = 0.01
    health_interval_s: float = 1.0
    verification_interval_s: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.verification_interval_s > 0:
            raise ValueError(f"Expected verification_interval_s > 0, got {self.verification_interval_s}.")
        if not 0 <= self.answer_step_s <= 1:
            raise ValueError(f"Expected 0 <= answer_step_s <= 1, got {self.answer_step_s}.")


# Ray finds a named actor in its own namespace only, and every driver would have another one.
NAMESPACE = "fairpate"
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0
# Shorter than callers wait for the actor: they get the cause, not a timeout.
_REOPEN_TIMEOUT_S, _REOPEN_PAUSE_S = 240.0, 2.0


class ExposureError(ServiceError, UsageError):
    """A service without tokens that would be open to the whole network."""


class AggregatorActor:
    """The actor: opens the backend, then serves it until it is stopped."""

    def __init__(self, open_backend: Callable[..., Backend], arguments: tuple[Any, ...], settings: ServiceSettings):
        self._backend: Backend | None = None
        self._server: HttpServer | None = None
        self._failure = ""
        try:
            check_exposure(settings)  # here too: a restarted process finds the present files
            # A process that replaces one that died tries again for a while: its disk may come back.
            deadline_s = time.monotonic() + (_REOPEN_TIMEOUT_S if is_restarted() else 0.0)
            while self._backend is None:
                try:
                    self._backend = open_backend(*arguments)
                except UserError as error:
                    if time.monotonic() >= deadline_s:
                        raise
                    _log.warning("The service cannot start again yet: %s", error)
                    time.sleep(_REOPEN_PAUSE_S)
            self._server = HttpServer(self._backend, settings)
        except UserError as error:  # stored for the caller, because Ray would print a traceback of it
            self._failure = str(error)

    def is_serving(self) -> bool:
        """Return whether requests are accepted. ServiceError, with the cause, if the service could not start."""
        if self._failure:
            raise ServiceError(self._failure)
        return self._server is not None and self._server.is_alive

    def stop(self) -> None:
        """Close the server, which closes the ledger, and then the voters."""
        # The server first: its shutdown answers the requests under way, which need the voters, and closes the ledger.
        if self._server is not None:
            self._server.stop()
        if self._backend is not None:
            self._backend.close()


def is_restarted() -> bool:
    """Return whether Ray started this actor's process to replace one that died."""
    import ray

    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and bool(context.was_current_actor_reconstructed)


@dataclass(frozen=True, kw_only=True)
class Service:
    """A running aggregator: the handle of its actor, its name and its URL."""

    actor: Any
    name: str
    url: str

    def is_serving(self, *, timeout_s: float) -> bool:
        """Return whether it answers, after a restart if there is one. ServiceError, with the cause, if it ended."""
        import ray

        try:
            return bool(ray.get(self.actor.is_serving.remote(), timeout=timeout_s))
        except ray.exceptions.GetTimeoutError as error:
            remedy = f"no answer within {timeout_s:g} s; is there room for its teachers?"
            raise ServiceError(f"{self.name}: {remedy}") from error
        except ray.exceptions.RayError as error:
            # The message at the end of a remote traceback, without the exception's name.
            lines = [line.strip() for line in str(getattr(error, "cause", None) or error).splitlines() if line.strip()]
            cause = re.sub(r"^[\w.]+(Error|Exception): ", "", lines[-1]) if lines else "no cause given"
            raise ServiceError(f"{self.name}: the service ended: {cause}") from error

    def stop(self) -> None:
        """Finish the requests under way, close the ledger and end the actor."""
        import ray

        try:
            ray.get(self.actor.stop.remote(), timeout=2 * _STOP_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            # It is ended in any case: a ledger survives the death of its writer at any instant.
            _log.warning("The aggregator did not stop by itself: %s", error)
        self.kill()

    def kill(self) -> None:
        """End the actor at once, and wait until its name is free."""
        import ray

        # Ends it for good: `max_restarts` does not apply to an actor that is killed without `no_restart=False`.
        ray.kill(self.actor)
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        while find_service(self.name) is not None and time.monotonic() < deadline_s:
            time.sleep(0.05)


def start_service(
    name: str,
    open_backend: Callable[..., Backend],
    arguments: tuple[Any, ...],
    settings: ServiceSettings,
    *,
    detached: bool = False,
    resources: dict[str, float] | None = None,
) -> Service:
    """Start the actor ``name`` and wait until it answers.

    ``detached`` lets it outlive this process on a cluster; ``resources`` pins it to the node that has the ledger on its
    disk. ServiceError if a service of this name runs, if others could reach a service without tokens, or with the
    error of ``open_backend``.
    """
    import ray

    check_exposure(settings)
    # For the message: Ray itself refuses a second actor of one name.
    if find_service(name) is not None:
        raise ServiceError(f"{name}: is served already; stop that service first, or query it.")
    actor_class: Any = ray.remote(AggregatorActor)
    actor = actor_class.options(
        # A reserved CPU would be missing for its voters on a small machine.
        num_cpus=0,
        resources=resources or {},
        # Without end: every restart verifies and replays the ledger, so that no charge is forgotten.
        max_restarts=-1,
        # A call that finds the actor dead waits for its new process.
        max_task_retries=-1,
        name=name,
        namespace=NAMESPACE,
        lifetime="detached" if detached else None,
    ).remote(open_backend, arguments, settings)
    service = Service(actor=actor, name=name, url=settings.url)
    try:
        service.is_serving(timeout_s=_START_TIMEOUT_S)
    except ServiceError:
        # An actor whose start failed still runs and holds the name, so the next start would be refused.
        service.kill()
        raise
    return service


def find_service(name: str) -> Any | None:
    """Return the handle of the actor ``name``; None if no such actor runs."""
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def check_exposure(settings: ServiceSettings) -> None:
    """Raise ExposureError for a host that other machines reach while no token is configured."""
    if settings.tokens.is_empty and not is_loopback(settings.host):
        raise ExposureError(
            f"--host {settings.host}: others could reach it, and no token is configured; set FAIRPATE_ANALYST_TOKEN "
            "and FAIRPATE_OPERATOR_TOKEN or give token files, or listen on 127.0.0.1."
        )
