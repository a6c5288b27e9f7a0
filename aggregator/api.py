"""The HTTP side of the aggregator: routes, refusals that look alike, errors that name field, value and remedy.

An analyst gets labels and refusals and nothing that depends on votes beside them. Which step refused, the price that
depends on votes and everything else private stand under ``/v1/operator/`` only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from aggregator import metrics, wire
from aggregator.auth import OPEN_PATHS, Auth
from aggregator.batching import Batcher
from aggregator.budget import epsilon_fixed_beforehand
from aggregator.connections import ConnectionLimits
from aggregator.errors import FaultError, fault, validation_faults
from aggregator.files import LedgerError
from aggregator.health import Health
from aggregator.ledger import Ledger
from aggregator.mechanism import Outcome
from aggregator.questions import CountVotes, PublicPool
from aggregator.session import (
    AggregatorSession,
    BudgetStatus,
    OverBudget,
    PublicationError,
    VotesUnavailableError,
    sanitised_epsilon,
)
from aggregator.tokens import QuotaExceededError, QuotaRule, Quotas, TokenBook
from aggregator.writer import Books, OpenBooks, Snapshot, Writer
from fairpate import __version__
from fairpate.api_page import HEADERS as PAGE_HEADERS
from fairpate.api_page import api_page
from fairpate.strict_json import strict

_log = logging.getLogger(__name__)
_RETRY_AFTER_S = 2
Key = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="A query's content hash.")]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What a service answers from.

    ``close`` ends the teachers; the service closes the ledger itself. ``reopen`` opens ledger and session again after a
    failed write; None: that takes a new start. ``voters_answer`` tells, without waiting, whether what votes is there;
    ``try_vote`` votes on something public, or raises, and is called after a vote that failed.
    """

    ledger: Ledger
    session: AggregatorSession
    pool: PublicPool
    count_votes: CountVotes
    reopen: OpenBooks | None = None
    voters_answer: Callable[[], bool] = lambda: True
    try_vote: Callable[[], object] | None = None
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """How a service is reached.

    ``answer_step_s``: replies to new queries leave at whole multiples of it after their request; 0: at once.
    ``health_interval_s``: how often readiness is looked at.
    """

    host: str = "127.0.0.1"
    port: int = 8517
    tokens: TokenBook = field(default_factory=TokenBook)
    quota: QuotaRule = field(default_factory=QuotaRule)
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    answer_step_s: float = 0.01
    health_interval_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.port < 2**16:
            raise ValueError(f"Expected 0 < port < 65536, got {self.port}.")
        if not 0 <= self.answer_step_s <= 1:
            raise ValueError(f"Expected 0 <= answer_step_s <= 1, got {self.answer_step_s}.")


def build_app(backend: Backend, settings: ServiceSettings) -> FastAPI:
    """The service as an ASGI application; closing it waits for the queries under way and closes the ledger."""
    backend.pool.hash_all()
    counters = metrics.ServiceMetrics()
    writer = Writer(Books(ledger=backend.ledger, session=backend.session), reopen=backend.reopen)
    health = Health(
        writer,
        voters_answer=backend.voters_answer,
        try_vote=backend.try_vote or (lambda: backend.count_votes([backend.pool.question(0)])),
        interval_s=settings.health_interval_s,
    )
    batcher = Batcher(
        writer,
        health,
        count_votes=backend.count_votes,
        quotas=Quotas(settings.quota),
        answer_step_s=settings.answer_step_s,
        on_group=counters.count_group,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watch = asyncio.create_task(health.watch())
        yield
        watch.cancel()
        await asyncio.to_thread(writer.close)

    app = FastAPI(
        title="FairPATE aggregator",
        version=__version__,
        description="Private and fair labels, each paid for from one budget.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses={status: {"model": wire.Faults} for status in (400, 401, 403, 408, 411, 413, 415, 422, 431)},
    )
    _add_analyst_routes(app, backend.pool, writer, batcher, counters)
    _add_operator_routes(app, backend.pool, writer)
    _add_health_routes(app, health)
    _add_error_bodies(app)
    _declare_tokens(app)
    _add_documentation(app)
    app.add_middleware(Auth, tokens=settings.tokens, max_body_bytes=wire.max_body_bytes(backend.pool))
    app.add_middleware(metrics.CountRequests, counters=counters)
    return app


def _add_analyst_routes(
    app: FastAPI, pool: PublicPool, writer: Writer, batcher: Batcher, counters: metrics.ServiceMetrics
) -> None:
    bodies = wire.bodies_for(pool)

    async def submit(request: Request, body: Any) -> Response:
        """Ask queries: each gets a label, a refusal, or word that the budget has no room for it."""
        questions = [wire.question_of(query, pool) for query in body.queries]
        counters.count_queries(len(questions))
        replies = await batcher.ask(questions, request.scope["state"]["caller"])
        rows = [wire.reply_json(q.query.key, reply) for q, reply in zip(questions, replies, strict=True)]
        crossed = next((i for i, reply in enumerate(replies) if isinstance(reply, OverBudget)), None)
        return _json({"replies": rows, "budget_crossed_at": crossed})

    submit.__annotations__["body"] = bodies.queries
    failures: dict[int | str, dict[str, Any]] = {status: {"model": wire.Faults} for status in (429, 503)}
    app.post("/v1/queries", response_model=wire.Replies, responses=failures)(submit)

    @app.get("/v1/queries/{key}", response_model=wire.Reply, responses={404: {"model": wire.Faults}})
    async def look_up(key: Key) -> Response:
        """The stored reply to a query; free, and never drawn again."""
        outcome = batcher.stored(key)
        if outcome is None:
            raise FaultError(404, "key", key, "No reply is stored; ask with POST /v1/queries.")
        return _json(wire.reply_json(key, outcome))

    async def estimate(body: Any) -> Response:
        """What queries, or a number of new ones, would cost; nothing is asked."""
        keys = {wire.question_of(query, pool).query.key for query in getattr(body, "queries", ())}
        snapshot = writer.snapshot
        stored = sum(batcher.stored(key) is not None for key in keys)
        new = getattr(body, "count", len(keys) - stored)
        budgets = {"now": budget_json(snapshot.budget_status()), "afterwards": budget_json(snapshot.budget_status(new))}
        return _json({"new_queries": new, "stored_replies": stored, **budgets})

    estimate.__annotations__["body"] = bodies.estimate
    app.post("/v1/estimate", response_model=wire.Estimate)(estimate)

    @app.get("/v1/budget", response_model=wire.Budget)
    async def budget() -> Response:
        """The budget's limits and what is spent of it, data-independent."""
        return _json(budget_json(writer.snapshot.budget_status()))

    @app.get("/v1/statement", response_model=wire.Statement)
    async def statement() -> Response:
        """The privacy claim that may be published, and the public facts of this service."""
        return _json(statement_json(pool, writer.snapshot))

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def prometheus() -> Response:
        """Counters for Prometheus; none depends on votes."""
        text = counters.render(writer.snapshot.budget_status())
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})


def _add_operator_routes(app: FastAPI, pool: PublicPool, writer: Writer) -> None:
    target_delta = writer.books.ledger.terms.budget.delta

    @app.get("/v1/operator/ledger", response_model=wire.LedgerPage)
    async def ledger(page: Annotated[wire.PageOfLedger, Query()]) -> Response:
        """Charges with the step that refused, and the data-dependent price of all of them. Do not publish."""
        snapshot = writer.snapshot
        books, total = snapshot.books, snapshot.num_charges
        start, stop = min(page.start, total), min(page.start + page.limit, total)
        charged = enumerate(books.ledger.charged(start, stop), start)
        entries = [
            _entry_json(number, key, pool.group_names[group], outcome) for number, (key, group, outcome) in charged
        ]
        epsilon = await asyncio.to_thread(books.price.epsilon, books.ledger, total)
        return _json({"total": total, "entries": entries, "epsilon_data_dependent": strict(epsilon)})

    @app.post("/v1/operator/publication", response_model=wire.Publication, responses={409: {"model": wire.Faults}})
    async def publication() -> Response:
        """Publish the price of all votes so far, with noise, as planned when the ledger was made; charged and kept."""
        try:
            price, submitted = await writer.call(
                lambda session: (session.publish(), writer.books.ledger.num_reservations)
            )
        except PublicationError as error:
            raise FaultError(409, "publication", "refused", str(error)) from error
        epsilon = sanitised_epsilon(price, target_delta=target_delta)
        return _json(
            {
                "epsilon_sanitised": epsilon,
                "order": price.release.order,
                "delta": target_delta,
                "queries_submitted": submitted,
            }
        )


def _add_health_routes(app: FastAPI, health: Health) -> None:
    @app.get("/livez", response_model=wire.Health)
    async def livez() -> Response:
        """Whether the process answers: if not, start it again."""
        return _json({"status": "ok", "reasons": []})

    async def readyz() -> Response:
        """Whether a new query can be expected to be answered now; the reasons why not."""
        reasons = health.reasons()
        status = {"status": "failing" if reasons else "ok", "reasons": reasons}
        return _json(status, status=503 if reasons else 200)

    for path in ("/readyz", "/healthz"):
        app.get(path, response_model=wire.Health, responses={503: {"model": wire.Health}})(readyz)


def budget_json(status: BudgetStatus) -> dict[str, Any]:
    """A :class:`wire.Budget`."""
    return {
        "kind": status.kind,
        "epsilon_limit": status.epsilon_limit,
        "delta": status.delta,
        "max_queries": status.max_queries,
        "queries_submitted": status.queries_submitted,
        "epsilon_submitted": strict(status.epsilon_submitted),
        "closed": status.closed,
    }


def statement_json(pool: PublicPool, snapshot: Snapshot) -> dict[str, Any]:
    """A :class:`wire.Statement`."""
    terms, status = snapshot.terms, snapshot.budget_status()
    return {
        "unit": terms.unit,
        "relation": terms.relation,
        "delta": status.delta,
        "epsilon": strict(epsilon_fixed_beforehand(terms)),
        "epsilon_submitted": strict(status.epsilon_submitted),
        "epsilon_sanitised": sanitised_epsilon(snapshot.published, target_delta=status.delta),
        "queries_submitted": status.queries_submitted,
        "noise": terms.noise,
        "tuning_accounted": False,
        "num_teachers": terms.num_teachers,
        "mechanism": wire.worded({"name": terms.mechanism.name, **terms.mechanism.parameters}),
        "gate": wire.worded(dataclasses.asdict(terms.gate)),
        "label_names": list(pool.label_names),
        "group_names": list(pool.group_names),
        "pool_size": len(pool),
        "record_shape": list(pool.record_shape),
    }


def _entry_json(number: int, key: str, group: str, outcome: Outcome | None) -> dict[str, Any]:
    return {
        "number": number,
        "key": key,
        "group": group,
        "verdict": "open" if outcome is None else outcome.verdict,
        "label": None if outcome is None else outcome.label,
    }


def _quota_fault(error: QuotaExceededError) -> FaultError:
    value, refusal = f"{error.num_new} new", error.refusal
    if math.isinf(refusal.retry_after_s):
        remedy = "More than this token may ever ask at once; send fewer new queries in one request."
        return FaultError(429, "queries", value, remedy)
    wait_s = math.ceil(refusal.retry_after_s)
    remedy = f"This token may ask {refusal.allowed_now} new queries now; wait {wait_s} s, or send fewer."
    return FaultError(429, "queries", value, remedy, {"Retry-After": str(wait_s)})


def _add_error_bodies(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return _faults(422, validation_faults(error.errors()))

    @app.exception_handler(FaultError)
    async def refused(_: Request, error: FaultError) -> Response:
        return _faults(error.status_code, [error.fault], error.headers)

    @app.exception_handler(QuotaExceededError)
    async def over_quota(request: Request, error: QuotaExceededError) -> Response:
        return await refused(request, _quota_fault(error))

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> Response:
        field = "body" if error.status_code == 400 else "path"
        found = fault(field, f"{request.method} {request.url.path}", f"{error.detail}; see /docs.")
        return _faults(error.status_code, [found], error.headers)

    @app.exception_handler(VotesUnavailableError)
    async def votes_unavailable(_: Request, error: VotesUnavailableError) -> Response:
        _log.error("Teachers did not vote: %s", error)
        return _unavailable("votes", "Some teachers are not there; nothing was answered. Ask again later.")

    @app.exception_handler(sqlite3.Error)
    @app.exception_handler(LedgerError)
    async def ledger_failed(_: Request, error: Exception) -> Response:
        _log.error("The ledger failed: %s", error)
        return _unavailable(
            "ledger", "The ledger cannot be written, so nothing is answered; the operator's log says more."
        )

    @app.exception_handler(Exception)
    async def defect(_: Request, error: Exception) -> Response:
        return _faults(500, [fault("server", type(error).__name__, "A defect; tell the operator.")])


def _declare_tokens(app: FastAPI) -> None:
    """The OpenAPI document says which routes need a token; the middleware asks for it."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = describe()
            document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            for path, routes in document["paths"].items():
                for route in routes.values():
                    route["security"] = [] if path in OPEN_PATHS else [{"token": []}]
        return describe()

    app.openapi = openapi  # type: ignore[method-assign]


def _add_documentation(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(api_page(app.openapi()), media_type="text/html", headers=PAGE_HEADERS)


def _unavailable(field: str, remedy: str) -> Response:
    return _faults(503, [fault(field, "", remedy)], {"Retry-After": str(_RETRY_AFTER_S)})


def _faults(status: int, faults: list[dict[str, str]], headers: Mapping[str, str] | None = None) -> Response:
    return _json({"errors": faults}, status=status, headers=headers)


def _json(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Response(text, status_code=status, headers=headers, media_type="application/json")
