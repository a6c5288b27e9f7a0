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
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from aggregator import metrics, wire
from aggregator.desk import Desk
from aggregator.door import OPEN_PATHS, Door
from aggregator.faults import FaultError, fault, validation_faults
from aggregator.ledger import Charge, Ledger, LedgerError
from aggregator.questions import CountVotes, PublicPool
from aggregator.session import (
    AggregatorSession,
    BudgetStatus,
    OverBudget,
    PublicationError,
    VotesUnavailableError,
    sanitised_epsilon,
)
from aggregator.tokens import Caller, QuotaRule, Quotas, TokenBook
from fairpate import __version__
from fairpate.privacy import accountant
from fairpate.privacy.smooth_sensitivity import SanitisedRdp
from fairpate.types import MechanismParameters

_log = logging.getLogger(__name__)
_RETRY_AFTER_S = 2
Key = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="A query's content hash.")]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What a service answers from. ``close`` ends teachers and ledger."""

    ledger: Ledger
    session: AggregatorSession
    pool: PublicPool
    count_votes: CountVotes
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """How a service is reached.

    ``answer_step_s``: replies to new queries leave at whole multiples of it after their request; 0: at once.
    """

    host: str = "127.0.0.1"
    port: int = 8517
    tokens: TokenBook = field(default_factory=TokenBook)
    quota: QuotaRule = field(default_factory=QuotaRule)
    answer_step_s: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.port < 2**16:
            raise ValueError(f"Expected 0 < port < 65536, got {self.port}.")
        if not 0 <= self.answer_step_s <= 1:
            raise ValueError(f"Expected 0 <= answer_step_s <= 1, got {self.answer_step_s}.")


def build_app(backend: Backend, settings: ServiceSettings) -> FastAPI:
    """The service as an ASGI application; closing it waits for the queries under way."""
    backend.pool.hash_all()
    counters = metrics.ServiceMetrics()
    desk = Desk(
        backend.session,
        stored=backend.ledger.outcome,
        count_votes=backend.count_votes,
        answer_step_s=settings.answer_step_s,
        on_group=counters.count_group,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        desk.close()

    app = FastAPI(
        title="FairPATE aggregator",
        version=__version__,
        description="Private and fair labels, each paid for from one budget.",
        lifespan=lifespan,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        responses={status: {"model": wire.Faults} for status in (400, 401, 403, 413, 422)},
    )
    _add_analyst_routes(app, backend, desk, Quotas(settings.quota), counters)
    _add_operator_routes(app, backend, desk)
    _add_error_bodies(app)
    _declare_tokens(app)
    app.add_middleware(Door, tokens=settings.tokens)
    app.add_middleware(metrics.CountRequests, counters=counters)
    return app


def _add_analyst_routes(
    app: FastAPI, backend: Backend, desk: Desk, quotas: Quotas, counters: metrics.ServiceMetrics
) -> None:
    pool, ledger = backend.pool, backend.ledger
    bodies = wire.bodies_for(pool)
    health = Health()

    async def pose(request: Request, body: Any) -> Response:
        """Ask queries: each gets a label, a refusal, or word that the budget has no room for it."""
        questions = [wire.question_of(query, pool) for query in body.queries]
        counters.count_queries(len(questions))
        new = {question.query.key for question in questions if ledger.outcome(question.query.key) is None}
        _charge_quota(quotas, request.scope["state"]["caller"], len(new))
        with health:
            replies = await desk.ask(questions)
        rows = [wire.reply_json(q.query.key, reply) for q, reply in zip(questions, replies, strict=True)]
        crossed = next((i for i, reply in enumerate(replies) if isinstance(reply, OverBudget)), None)
        return _json({"replies": rows, "budget_crossed_at": crossed})

    pose.__annotations__["body"] = bodies.queries
    failures: dict[int | str, dict[str, Any]] = {status: {"model": wire.Faults} for status in (429, 503)}
    app.post("/v1/queries", response_model=wire.Replies, responses=failures)(pose)

    @app.get("/v1/queries/{key}", response_model=wire.Reply, responses={404: {"model": wire.Faults}})
    async def look_up(key: Key) -> Response:
        """The stored reply to a query; free, and never drawn again."""
        outcome = ledger.outcome(key)
        if outcome is None:
            raise FaultError(404, "key", key, "No reply is stored; ask with POST /v1/queries.")
        return _json(wire.reply_json(key, outcome))

    async def estimate(body: Any) -> Response:
        """What queries, or a number of new ones, would cost; nothing is asked."""
        keys = {wire.question_of(query, pool).query.key for query in getattr(body, "queries", ())}
        stored = sum(ledger.outcome(key) is not None for key in keys)
        new = getattr(body, "count", len(keys) - stored)
        now, afterwards = await desk.call(lambda session: (session.budget_status(), session.estimate(new)))
        budgets = {"now": budget_json(now), "afterwards": budget_json(afterwards)}
        return _json({"new_queries": new, "stored_replies": stored, **budgets})

    estimate.__annotations__["body"] = bodies.estimate
    app.post("/v1/estimate", response_model=wire.Estimate)(estimate)

    @app.get("/v1/budget", response_model=wire.Budget)
    async def budget() -> Response:
        """The budget's limits and what is spent of it, data-independent."""
        return _json(budget_json(await desk.call(lambda session: session.budget_status())))

    @app.get("/v1/statement", response_model=wire.Statement)
    async def statement() -> Response:
        """The privacy claim that may be published, and the public facts of this service."""
        return _json(
            statement_json(backend, *await desk.call(lambda session: (session.budget_status(), session.published())))
        )

    @app.get("/healthz", response_model=wire.Health, responses={503: {"model": wire.Health}})
    async def healthz() -> Response:
        """Whether the last queries could be answered."""
        return _json({"status": "failing" if health.failing else "ok"}, status=503 if health.failing else 200)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def prometheus() -> Response:
        """Counters for Prometheus; none depends on votes."""
        text = counters.render(await desk.call(lambda session: session.budget_status()))
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})


def _add_operator_routes(app: FastAPI, backend: Backend, desk: Desk) -> None:
    terms = backend.ledger.terms

    @app.get("/v1/operator/ledger", response_model=wire.LedgerPage)
    async def ledger(page: Annotated[wire.PageOfLedger, Query()]) -> Response:
        """Charges with the step that refused, and the data-dependent price of all of them. Do not publish."""
        charges = await desk.call(lambda _: backend.ledger.charges)
        entries = [_entry_json(charge, backend.pool) for charge in charges[page.start : page.start + page.limit]]
        epsilon = await asyncio.to_thread(
            _epsilon_data_dependent, charges, terms.mechanism, target_delta=terms.budget.delta
        )
        return _json({"total": len(charges), "entries": entries, "epsilon_data_dependent": wire.finite(epsilon)})

    @app.post("/v1/operator/publication", response_model=wire.Publication, responses={409: {"model": wire.Faults}})
    async def publication() -> Response:
        """Publish the price of all votes so far, with noise, as planned when the ledger was made; charged and kept."""
        try:
            price, posed = await desk.call(lambda session: (session.publish(), backend.ledger.num_reservations))
        except PublicationError as error:
            raise FaultError(409, "publication", "refused", str(error)) from error
        epsilon = sanitised_epsilon(price, target_delta=terms.budget.delta)
        return _json(
            {
                "epsilon_sanitised": epsilon,
                "order": price.release.order,
                "delta": terms.budget.delta,
                "queries_posed": posed,
            }
        )


class Health:
    """Whether asking failed the last time it was tried."""

    failing = False

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.failing = kind is not None


def budget_json(status: BudgetStatus) -> dict[str, Any]:
    """A :class:`wire.Budget`."""
    return {
        "kind": status.kind,
        "epsilon_limit": status.epsilon_limit,
        "delta": status.delta,
        "max_queries": status.max_queries,
        "queries_posed": status.queries_posed,
        "epsilon_data_independent": wire.finite(status.epsilon_data_independent),
        "closed": status.closed,
    }


def statement_json(backend: Backend, status: BudgetStatus, published: SanitisedRdp | None) -> dict[str, Any]:
    """A :class:`wire.Statement`."""
    terms, pool = backend.ledger.terms, backend.pool
    return {
        "unit": terms.unit,
        "relation": terms.relation,
        "delta": status.delta,
        "epsilon_data_independent": wire.finite(status.epsilon_data_independent),
        "epsilon_sanitised": sanitised_epsilon(published, target_delta=status.delta),
        "queries_posed": status.queries_posed,
        "noise": terms.noise,
        "tuning_accounted": False,
        "num_teachers": terms.num_teachers,
        "mechanism": _plain(dataclasses.asdict(terms.mechanism)),
        "gate": _plain(dataclasses.asdict(terms.gate)),
        "label_names": list(pool.label_names),
        "group_names": list(pool.group_names),
        "pool_size": len(pool),
        "record_shape": list(pool.record_shape),
    }


def _entry_json(charge: Charge, pool: PublicPool) -> dict[str, Any]:
    reservation, outcome = charge.reservation, charge.outcome
    return {
        "number": reservation.number,
        "key": reservation.key,
        "group": pool.group_names[reservation.group],
        "verdict": "open" if outcome is None else outcome.verdict,
        "label": None if outcome is None else outcome.label,
    }


def _epsilon_data_dependent(charges: Sequence[Charge], mechanism: MechanismParameters, *, target_delta: float) -> float:
    touched = [c.reservation.votes for c in charges if c.outcome is None or c.outcome.is_charged]
    if not touched:
        return 0.0
    event = accountant.ConfidentGnmaxVotes(votes_QC=np.array(touched, dtype=np.int64), **dataclasses.asdict(mechanism))
    return accountant.epsilon_data_dependent([event], target_delta=target_delta).epsilon


def _charge_quota(quotas: Quotas, caller: Caller, num_new: int) -> None:
    refusal = quotas.take(caller, num_new, now_s=time.monotonic())
    if refusal is None:
        return
    if math.isinf(refusal.retry_after_s):
        remedy = "More than this token may ever ask at once; send fewer new queries in one request."
        raise FaultError(429, "queries", f"{num_new} new", remedy)
    wait_s = math.ceil(refusal.retry_after_s)
    remedy = f"This token may ask {refusal.allowed_now} new queries now; wait {wait_s} s, or send fewer."
    raise FaultError(429, "queries", f"{num_new} new", remedy, {"Retry-After": str(wait_s)})


def _add_error_bodies(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return _faults(422, validation_faults(error.errors()))

    @app.exception_handler(FaultError)
    async def refused(_: Request, error: FaultError) -> Response:
        return _faults(error.status_code, [error.fault], error.headers)

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
    """The OpenAPI document says which routes need a token; the door asks for it."""
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


def _unavailable(field: str, remedy: str) -> Response:
    return _faults(503, [fault(field, "", remedy)], {"Retry-After": str(_RETRY_AFTER_S)})


def _faults(status: int, faults: list[dict[str, str]], headers: Mapping[str, str] | None = None) -> Response:
    return _json({"errors": faults}, status=status, headers=headers)


def _json(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Response(text, status_code=status, headers=headers, media_type="application/json")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Infinities as words: JSON has no number for them."""
    return {
        name: str(value) if isinstance(value, float) and math.isinf(value) else value for name, value in values.items()
    }
