"""The HTTP side of the aggregator: routes, refusals that look alike, errors that name field, value and remedy.

An analyst gets labels and refusals and nothing that depends on votes beside them. Which step refused, the price that
depends on votes and everything else private stand under ``/v1/operator/`` only.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response

from aggregator.ledger.ledger import Ledger
from aggregator.ledger.own_limits import QuotaRule, Quotas
from aggregator.service import metrics, wire
from aggregator.service.about import Facts
from aggregator.service.analyst_routes import add_analyst_routes
from aggregator.service.auth import OPEN_PATHS, Auth
from aggregator.service.batching import Batcher
from aggregator.service.connections import ConnectionLimits
from aggregator.service.health import Health
from aggregator.service.observing import Observed
from aggregator.service.operator_routes import add_operator_routes
from aggregator.service.overview import Overview
from aggregator.service.own_routes import add_own_routes
from aggregator.service.page_routes import add_overview_routes, add_page_routes
from aggregator.service.questions import CountVotes, PublicPool
from aggregator.service.rates import STRANGERS, RequestRate
from aggregator.service.request_bodies import max_body_bytes
from aggregator.service.responses import add_error_bodies, json_response
from aggregator.service.token_store import LiveTokens
from aggregator.service.tokens import TokenBook
from aggregator.service.verification import Verification
from aggregator.service.writer import Books, OpenBooks, Writer
from aggregator.session import AggregatorSession
from fairpate import __version__
from fairpate.api_page import HEADERS as PAGE_HEADERS
from fairpate.api_page import api_page

_HISTORY_INTERVAL_S = 5.0
# By name: FastAPI would build the model again for every status of every route, half of the time that all take.
_FAULTS: dict[str, Any] = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Faults"}}}}


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What a service answers from.

    ``close`` ends the teachers; the service closes the ledger itself. ``reopen`` opens ledger and session again after a
    failed write; None: that takes a new start. ``voters_answer`` tells, without waiting, whether what votes is there;
    ``try_vote`` votes on something public, or raises, and is called after a vote that failed. ``last_backup``: when the
    ledger was last copied, in seconds since 1970; None: never.
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
        """As :func:`build_app`."""
        return build_app(self, settings, tracer=tracer)


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """A certificate with its chain, and its key, as PEM; the key needs no password. ValueError for what is none."""

    cert: Path
    key: Path

    def __post_init__(self) -> None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                self.cert, self.key, password=_no_password
            )
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ValueError(
                f"{self.cert} and {self.key}: cannot be used as certificate and key ({error}); give PEM files that "
                "belong together, the key without a password."
            ) from error


def _no_password() -> str:
    # Without a function that refuses, OpenSSL would ask on the terminal and wait there.
    raise ValueError("the key has a password")


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """How a service is reached.

    ``answer_step_s``: replies to new queries leave at whole multiples of it after their request; 0: at once.
    ``health_interval_s``: how often readiness is looked at. ``verification_interval_s``: how long after the ledger was
    verified it is verified again. ``rate``: requests of one caller;
    ``strangers``: of one address without a known token. ``tls``: files of a
    certificate; None: plain HTTP. ``log_file`` gets a JSON line for each request. ``traces`` sends spans where
    OTEL_EXPORTER_OTLP_* say.
    """

    host: str = "127.0.0.1"
    port: int = 8517
    tokens: TokenBook = field(default_factory=TokenBook)
    quota: QuotaRule = field(default_factory=QuotaRule)
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    rate: RequestRate = field(default_factory=RequestRate)
    strangers: RequestRate = STRANGERS
    tls: TlsFiles | None = None
    log_file: Path | None = None
    traces: bool = False
    answer_step_s: float = 0.01
    health_interval_s: float = 1.0
    verification_interval_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.port < 2**16:
            raise ValueError(f"Expected 0 < port < 65536, got {self.port}.")
        if not self.verification_interval_s > 0:
            raise ValueError(f"Expected verification_interval_s > 0, got {self.verification_interval_s}.")
        if not 0 <= self.answer_step_s <= 1:
            raise ValueError(f"Expected 0 <= answer_step_s <= 1, got {self.answer_step_s}.")

    @property
    def url(self) -> str:
        """Where it is reached."""
        return f"{'https' if self.tls else 'http'}://{url_host(self.host)}:{self.port}"


def url_host(host: str) -> str:
    """``host`` as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def build_app(backend: Backend, settings: ServiceSettings, *, tracer: Any = None) -> FastAPI:
    """The service as an ASGI application; closing it waits for the queries under way and closes the ledger.

    ``tracer`` makes a span of every request; None: there are none.
    """
    # Not at the first question, which would wait for the hashes of all records.
    backend.pool.hash_all()
    counters, tokens = metrics.ServiceMetrics(), LiveTokens(settings.tokens)
    writer = Writer(Books(ledger=backend.ledger, session=backend.session), reopen=backend.reopen)
    verification = Verification(writer, interval_s=settings.verification_interval_s)
    health = Health(
        writer,
        chain_fault=lambda: verification.fault,
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
        own_limits=lambda: tokens.limits,
        on_group=counters.count_group,
    )
    overview = Overview(writer, health, verification, backend.pool, counters, last_backup=backend.last_backup)
    app = _empty_app(writer, health, verification, overview)
    add_analyst_routes(app, backend.pool, writer, batcher, counters, health)
    add_operator_routes(app, backend.pool, writer, verification)
    streams = add_page_routes(app, backend.facts, backend.pool, writer, overview, tokens=tokens)
    add_own_routes(app, writer, tokens)
    add_overview_routes(app, writer, overview, counters, streams)
    app.state.streams = streams
    _add_health_routes(app, health)
    add_error_bodies(app)
    _declare_tokens(app)
    _add_documentation(app)
    # The last that is added stands outside: what Auth refuses is counted, logged and traced too.
    max_bytes = max_body_bytes(backend.pool)
    app.add_middleware(Auth, tokens=tokens, max_body_bytes=max_bytes, rate=settings.rate, strangers=settings.strangers)
    app.add_middleware(metrics.CountRequests, counters=counters)
    app.add_middleware(Observed, tracer=tracer)
    return app


def _empty_app(writer: Writer, health: Health, verification: Verification, overview: Overview) -> FastAPI:
    """The application without routes; it watches itself while it runs, and closes the ledger when it ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await health.look()  # before the first request, whose failure it would take for one of before
        watches = [asyncio.create_task(each) for each in (health.watch(), overview.watch(_HISTORY_INTERVAL_S))]
        verification.begin()
        yield
        verification.close()
        for watch in watches:
            watch.cancel()
        await asyncio.to_thread(writer.close)

    return FastAPI(
        title="FairPATE aggregator",
        version=__version__,
        description="Private and fair labels, each paid for from one budget.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses={
            400: {"model": wire.Faults},
            **dict.fromkeys((401, 403, 408, 411, 413, 415, 422, 429, 431), _FAULTS),
        },
    )


def _add_health_routes(app: FastAPI, health: Health) -> None:
    @app.get("/livez", response_model=wire.Health)
    async def livez() -> Response:
        """Whether the process answers: if not, start it again."""
        return json_response({"status": "ok", "reasons": []})

    async def readyz() -> Response:
        """Whether a new query can be expected to be answered now; the reasons why not."""
        await health.look_now()
        status = health.to_json()
        return json_response(status, status=503 if status["reasons"] else 200)

    for path in ("/readyz", "/healthz"):
        app.get(path, response_model=wire.Health, responses={503: {"model": wire.Health}})(readyz)


def _declare_tokens(app: FastAPI) -> None:
    """The OpenAPI document says which routes need a token; the middleware asks for it."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        # FastAPI keeps the document that it made: what is added to it here stays.
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
