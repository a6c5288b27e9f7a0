"""The application and the processes that serve it: connections, one run or several behind one port, the Ray actor.

HTTP connections with limits that hold before anything is parsed or buffered: a caller can waste only its own time.

uvicorn's protocol on h11 parses; this one decides what it is given. A head has a size and a deadline, so has a body;
one request at a time is taken from a connection; a reply that nobody fetches is given up. When all places are taken,
the connection that has waited longest with no complete request makes room, of the address that holds most of those.

Limits of a body's size are in :mod:`aggregator.service.auth`, which answers before a byte of it is read. What a refused
caller still sends is thrown away for a moment, so that it gets to read the refusal.

The HTTP side of the aggregator: routes, refusals that look alike, errors that name field, value and remedy.

An analyst gets labels and refusals and nothing that depends on votes beside them. Which step refused, the price that
depends on votes and everything else private stand under ``/v1/operator/`` only.

Several services behind one address: ``/v1/runs/NAME/...`` is what the service of that run answers under ``/...``.

Each run has a service of its own, on a port of this machine's loopback, with its own ledger, tokens and limits. What
comes is passed on as it is, with the caller's address, and so is the answer, as it arrives; nothing is kept, and no
token is read here. A service that starts again is waited for by its callers: until then they get 503.

One named Ray actor that holds the ledger and serves HTTP, and finds its way back after a crash.

The actor is the ledger's only writer. When its process dies Ray starts another, which opens the ledger again (every
entry verified and replayed), rebuilds what votes, and listens on the same port. What votes is injected as a function
that opens a :class:`Backend`; this module knows no teachers. uvicorn runs in a thread of the actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import logging
import re
import resource
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import h11
import httpx
from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from aggregator.budgets import QuotaRule, Quotas
from aggregator.ledger import Ledger
from aggregator.service import metrics, wire
from aggregator.service.auth import OPEN_PATHS, STRANGERS, Auth, LiveTokens, RequestRate, TokenBook, is_loopback
from aggregator.service.metrics import Observed, log_json_lines, otlp_tracer
from aggregator.service.page import Overview, add_overview_routes, add_page_routes, gateway_page, page_headers
from aggregator.service.routes import (
    add_analyst_routes,
    add_error_bodies,
    add_operator_routes,
    add_own_routes,
    json_response,
)
from aggregator.service.wire import CountVotes, Facts, PublicPool, max_body_bytes
from aggregator.service.writer import Batcher, Books, Health, OpenBooks, Verification, Writer
from aggregator.session import AggregatorSession
from fairpate import __version__
from fairpate.pages import HEADERS as PAGE_HEADERS
from fairpate.pages import api_page
from fairpate.request_faults import FaultError, declared_length, fault
from fairpate.types import UsageError, UserError

# A head passes its limit by no more than this before it is refused.
_SLICE_BYTES = 4096
_LINGER_S = 2.0
_FILES_BESIDE = 1024
_EVICTED_SHARE = 16
Phase = Literal["head", "body", "answer", "idle", "closing"]


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """How many connections are held, how large a request's head may be, and how long its parts may take.

    ``body_timeout_s`` and ``write_timeout_s`` are for the whole body and for a reply of which nothing is fetched.
    """

    max_connections: int = 512
    max_head_bytes: int = 16 * 2**10
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    idle_timeout_s: float = 5.0

    def within_file_limit(self) -> ConnectionLimits:
        """The same, after this process was allowed as many open files, or fewer connections if it may not have them."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _FILES_BESIDE + 2 * self.max_connections
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return self
        return replace(self, max_connections=max(1, soft // 4))


class LimitedProtocol(H11Protocol):
    """One connection under :class:`ConnectionLimits`."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.phase: Phase = "head"
        self.phase_since_s = time.monotonic()
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        """Who is connected, without the port."""
        return self.client[0] if self.client else ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, if need be in place of another."""
        super().connection_made(transport)
        # A reply leaves in several pieces, and asyncio leaves this out for a socket that was bound elsewhere.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._enter("head")
        if len(self.connections) > self._limits.max_connections:
            for connection in _longest_waiting(self.connections) or [self]:
                connection.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._unset(self._deadline)
        self._unset(self._write_deadline)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass on what belongs to the one request that is being received, a head in slices."""
        while data and self.phase != "closing" and not self.transport.is_closing():
            if self.phase == "answer":  # a second request before the first is answered
                self.cycle.keep_alive = False
                return
            size = len(data) if self.phase == "body" else _SLICE_BYTES
            super().data_received(data[:size])
            data = data[size:]
            self._follow()

    def on_response_complete(self) -> None:
        """Go on with the next request, if the one that was answered is over."""
        is_over = self.conn.their_state is not h11.SEND_BODY and not self.conn.trailing_data[0]
        if not is_over and not self.transport.is_closing():
            self.server_state.total_requests += 1
            self._linger()
            return
        super().on_response_complete()
        if self.transport.is_closing():
            self._enter("closing")
        elif self.phase != "closing":
            self._enter("idle")

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, also one that does not fetch its last reply."""
        super().timeout_keep_alive_handler()
        self._enter("closing")

    def pause_writing(self) -> None:
        """Give up if nothing of the reply is fetched for too long."""
        super().pause_writing()
        self._write_deadline = self.loop.call_later(self._limits.write_timeout_s, self.abort)

    def resume_writing(self) -> None:
        """Go on."""
        self._unset(self._write_deadline)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or too much of it."""
        size, most = len(self.conn.trailing_data[0]), self._limits.max_head_bytes
        if size > most:
            self._refuse(431, fault("headers", f"{size} bytes", f"Expected at most {most} bytes; send fewer."))
        else:
            self._refuse(400, fault("request", "", msg))

    def abort(self) -> None:
        """End the connection at once, and give its place free."""
        # Not left to `connection_lost`, which comes a turn of the loop later: the place is free at once.
        self.connections.discard(self)
        self.transport.abort()

    def _follow(self) -> None:
        """Enter the phase that the parser is in."""
        if self.phase == "closing":
            return
        if self.conn.their_state is h11.SEND_BODY:
            self._enter("body")
        elif self.conn.their_state is h11.IDLE:
            self._enter("head")
        else:
            self._enter("answer")

    def _enter(self, phase: Phase) -> None:
        # Bytes that trickle in leave the deadline where it is.
        if phase == self.phase and self._deadline is not None:
            return
        self._unset(self._deadline)
        self.phase, self.phase_since_s = phase, time.monotonic()
        limits = self._limits
        seconds = {"head": limits.head_timeout_s, "body": limits.body_timeout_s, "closing": _LINGER_S}.get(phase)
        if seconds is None:
            self._deadline = None
        else:
            late = self.abort if phase == "closing" else self._too_late
            self._deadline = self.loop.call_later(seconds, late)

    def _too_late(self) -> None:
        if self.phase == "head" and not self.conn.trailing_data[0]:
            self.abort()  # it never said anything
            return
        self._refuse(408, fault("request", f"no complete {self.phase}", "Too slow; send it at once."))
        # The application may be waiting for the rest of the body.
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _refuse(self, status: int, found: dict[str, str]) -> None:
        """Answer past the parser, which has no request to answer."""
        body = json.dumps({"errors": [found]}).encode()
        head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        self._linger()

    def _linger(self) -> None:
        """Say that nothing more comes, and throw away what still arrives, for a moment."""
        self._enter("closing")
        # Bytes that nobody reads would make the close a reset, and a reset can take the refusal with it.
        self.flow.resume_reading()
        with contextlib.suppress(OSError):  # the other side may be gone
            self.transport.write_eof()

    def _unset(self, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def limited_protocol(limits: ConnectionLimits) -> Callable[..., LimitedProtocol]:
    """What uvicorn makes a protocol of for each connection."""
    return lambda *arguments, **options: LimitedProtocol(*arguments, limits=limits, **options)


def _longest_waiting(connections: Any) -> list[LimitedProtocol]:
    """Of the address with most connections without a complete request, those that have waited longest.

    Several, because choosing looks at all of them, which a flood would make costly.
    """
    waiting = [connection for connection in connections if connection.phase != "answer"]
    if not waiting:
        return []
    ((busiest, _),) = Counter(connection.address for connection in waiting).most_common(1)
    of_it = sorted((one for one in waiting if one.address == busiest), key=lambda one: one.phase_since_s)
    return of_it[: 1 + len(connections) // _EVICTED_SHARE]


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


PREFIX = "/v1/runs/"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_BODY_BYTES = 64 * 2**20
_HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-authorization"}
# Voters take their time and live events do not end: only the way to a service has a limit.
_TIMEOUTS = httpx.Timeout(None, connect=5.0, pool=30.0)
_LIMITS = httpx.Limits(max_connections=512, max_keepalive_connections=64)
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What a gateway serves: services on these ports of loopback, by name of their run. ValueError for a bad name."""

    ports: Mapping[str, int]

    def __post_init__(self) -> None:
        for name in self.ports:
            if not NAME.fullmatch(name):
                raise ValueError(
                    f"Expected a name of letters, digits, '.', '_' and '-', got {name!r}; rename the run's folder."
                )

    def app(self, settings: ServiceSettings, *, tracer: Any = None) -> FastAPI:  # noqa: ARG002 - each run has its own
        """The application."""
        return gateway_app(self.ports, tracer=tracer)

    def close(self) -> None:
        """Nothing: the process that started the services ends them."""


def gateway_app(ports: Mapping[str, int], *, tracer: Any = None) -> FastAPI:
    """The application in front of services on these ports, by name of their run."""
    # Past any proxy of the environment: all of it is for this machine's loopback.
    client = httpx.AsyncClient(timeout=_TIMEOUTS, limits=_LIMITS, trust_env=False)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await client.aclose()

    app = FastAPI(title="FairPATE aggregators", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.get("/", include_in_schema=False)
    async def front() -> Response:
        return Response(gateway_page(), media_type="text/html", headers=page_headers())

    @app.get("/livez")
    async def livez() -> Response:
        """Whether this process answers."""
        return json_response({"status": "ok", "reasons": []})

    @app.get("/readyz")
    async def readyz() -> Response:
        """Whether every run's service is ready; the reasons of those that are not are under their own address."""
        # At the same time: each may take two seconds to say that its ledger hangs.
        are_ready = await asyncio.gather(*(_is_ready(client, port) for port in ports.values()))
        waiting = not all(are_ready)
        status = {"status": "failing" if waiting else "ok", "reasons": ["runs"] if waiting else []}
        return json_response(status, status=503 if waiting else 200)

    @app.get("/v1/runs")
    async def runs(request: Request) -> Response:
        """The runs that know the caller's token."""
        headers = {name: request.headers[name] for name in ("authorization", "host") if name in request.headers}
        known = [name for name, port in ports.items() if await _admits(client, port, headers)]
        request.state.is_told_behind = bool(known)
        return json_response({"runs": [{"name": name, "path": f"{PREFIX}{name}/"} for name in known]})

    @app.api_route(f"{PREFIX}{{name}}/{{path:path}}", methods=["GET", "POST", "HEAD"])
    async def passed_on(name: str, request: Request) -> Response:
        """What the service of the run ``name`` answers."""
        if name not in ports:
            raise FaultError(404, "run", name, "No run of this name is served here; ask the operator for the address.")
        request.state.is_told_behind = True
        return await _pass_on(client, ports[name], name, request)

    @app.get(f"{PREFIX}{{name}}", include_in_schema=False)
    async def with_slash(name: str) -> Response:
        # The page asks for its routes beside itself, so its address must end like a folder's.
        return Response(status_code=308, headers={"Location": f"{PREFIX}{name}/" if NAME.fullmatch(name) else "/"})

    @app.api_route("/{path:path}", methods=["GET", "POST"], include_in_schema=False)
    async def of_no_run(path: str) -> Response:
        remedy = f"Several runs are served here: give {PREFIX}NAME of one; GET {PREFIX[:-1]} lists those of your token."
        raise FaultError(404, "path", f"/{path}", remedy)

    add_error_bodies(app)
    app.add_middleware(Observed, tracer=tracer)
    return app


async def _pass_on(client: httpx.AsyncClient, port: int, name: str, request: Request) -> Response:
    length = declared_length({key: value.decode("latin-1") for key, value in request.scope["headers"]}, _MAX_BODY_BYTES)
    asked = httpx.Request(
        request.method,
        _inner_url(port, name, request),
        headers=[*_kept(request.scope["headers"]), *_told(request)],
        content=request.stream() if length else None,
        extensions={"timeout": _TIMEOUTS.as_dict()},
    )
    try:
        answer = await client.send(asked, stream=True)
    except httpx.TransportError as error:
        remedy = "Its service does not answer now; it may be starting. Ask again: nothing is drawn or charged twice."
        raise FaultError(503, "run", name, remedy, {"Retry-After": "2"}) from error
    passed = StreamingResponse(_pieces(answer), status_code=answer.status_code)
    # As they came: a dictionary would keep one of two headers of the same name.
    passed.raw_headers = _kept(answer.headers.raw)
    return passed


def _inner_url(port: int, name: str, request: Request) -> httpx.URL:
    """The same path and query at the run's service, made of parts: nothing that was asked for can name another host.

    FaultError where the path as it was sent, before anything in it is decoded, is not below that of the run.
    """
    path, query = request.scope["raw_path"], request.scope["query_string"]
    below = f"{PREFIX}{name}".encode()
    try:
        if not path.startswith(below + b"/"):
            raise httpx.InvalidURL("not below the run")  # noqa: TRY301 - one answer for both
        url = httpx.URL(
            scheme="http", host=_LOOPBACK, port=port, raw_path=path.removeprefix(below) + (query and b"?" + query)
        )
    except httpx.InvalidURL as error:
        raise FaultError(404, "path", "(not shown)", "No such address; ask the operator for it.") from error
    if (url.host, url.port) != (_LOOPBACK, port):
        raise FaultError(404, "path", "(not shown)", "No such address; ask the operator for it.")
    return url


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


def _kept(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers that are for the other end; the host too, which the service checks."""
    # What a caller says of its own address is dropped: the gateway tells what it saw.
    dropped = {*_HOP_BY_HOP, "x-forwarded-for", "x-forwarded-proto", "x-request-id"}
    return [(name, value) for name, value in headers if name.decode("latin-1").lower() not in dropped]


def _told(request: Request) -> list[tuple[bytes, bytes]]:
    """Whom the request is from, and its id."""
    address = request.client.host if request.client else ""
    told = {
        "x-forwarded-for": address,
        "x-forwarded-proto": request.url.scheme,
        "x-request-id": request.scope["state"]["request_id"],
    }
    return [(name.encode(), value.encode()) for name, value in told.items()]


async def _is_ready(client: httpx.AsyncClient, port: int) -> bool:
    return await _status(client, port, "/readyz", {}) == 200


async def _admits(client: httpx.AsyncClient, port: int, headers: Mapping[str, str]) -> bool:
    return await _status(client, port, "/v1/about", headers) == 200


async def _status(client: httpx.AsyncClient, port: int, path: str, headers: Mapping[str, str]) -> int:
    try:
        answer = await client.get(f"http://{_LOOPBACK}:{port}{path}", headers=dict(headers), timeout=5.0)
    except httpx.TransportError:
        return 0
    return answer.status_code


NAMESPACE = "fairpate"
_BIND_TIMEOUT_S = 30.0
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0
_REOPEN_TIMEOUT_S, _REOPEN_PAUSE_S = 240.0, 2.0
_BACKLOG, _ACCEPTED_TOGETHER = 4096, 64
# Below `_STOP_TIMEOUT_S`: the server gives up its requests before its thread is given up.
_GRACE_S = 10
_log = logging.getLogger(__name__)


class ServiceError(UserError, RuntimeError):
    """A service that cannot start or went away; the message says what to do."""


class ExposureError(ServiceError, UsageError):
    """A service that would be open to everybody."""


class Servable(Protocol):
    """What makes the application that is served."""

    def app(self, settings: ServiceSettings, *, tracer: Any = None) -> FastAPI:
        """Return the application."""


class HttpServer:
    """uvicorn in a thread, on a socket that is bound before the thread starts."""

    def __init__(self, backend: Servable, settings: ServiceSettings, *, tracer: Any = None) -> None:
        """``tracer`` takes the place of the one that the settings ask for."""
        import uvicorn

        # Before anything else runs: a port that is taken ends the start.
        listening = bind(settings.host, settings.port)
        if settings.log_file is not None:
            log_json_lines(settings.log_file)
        if settings.traces and tracer is None:
            tracer = otlp_tracer()
        self._app = app = backend.app(settings, tracer=tracer)
        limits = settings.limits.within_file_limit()
        # Everything is named that uvicorn would choose by what is installed: limits are limits of this parser.
        config = uvicorn.Config(
            app,
            http=limited_protocol(limits),  # type: ignore[arg-type]  # whatever makes a protocol
            loop="asyncio",
            ws="none",
            log_level="error",
            access_log=False,
            server_header=False,
            backlog=_ACCEPTED_TOGETHER,
            h11_max_incomplete_event_size=limits.max_head_bytes,
            timeout_keep_alive=limits.idle_timeout_s,  # type: ignore[arg-type]  # seconds, not whole ones
            timeout_graceful_shutdown=_GRACE_S,
            ssl_certfile=settings.tls.cert if settings.tls else None,
            ssl_keyfile=settings.tls.key if settings.tls else None,
        )
        self._server = _server(config, listening)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Answer what is under way, then close."""
        # First: a graceful end waits for replies, and a stream does not end by itself for minutes.
        if hasattr(self._app.state, "streams"):
            self._app.state.streams.close()
        self._server.should_exit = True
        self._thread.join(timeout=_STOP_TIMEOUT_S)


def _server(config: Any, listening: socket.socket) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            # asyncio has one number for two things: how many connections it accepts before it does anything else
            # (should be few), and how many the kernel keeps waiting for it (should be many).
            listening.listen(_BACKLOG)

    return Server(config)


class AggregatorActor:
    """The actor: opens the backend, then serves it until it is stopped."""

    def __init__(
        self, open_backend: Callable[..., Backend | Runs], arguments: tuple[Any, ...], settings: ServiceSettings
    ):
        self._backend: Backend | Runs | None = None
        self._server: HttpServer | None = None
        self._failure = ""
        try:
            check_exposure(settings)  # here too: a process that takes another's place finds the files of now
            self._backend = _open_patiently(lambda: open_backend(*arguments))
            self._server = HttpServer(self._backend, settings)
        except UserError as error:  # kept for the caller, for Ray would print a traceback of it
            self._failure = str(error)

    def is_serving(self) -> bool:
        """Whether requests are accepted. ServiceError, with the cause, if it could not start."""
        if self._failure:
            raise ServiceError(self._failure)
        return self._server is not None and self._server.is_alive

    def stop(self) -> None:
        """Close server, teachers and ledger in this order."""
        if self._server is not None:
            self._server.stop()
        if self._backend is not None:
            self._backend.close()


def _open_patiently(open_backend: Callable[[], Backend | Runs]) -> Backend | Runs:
    """The backend; a process that takes the place of one that died tries again while the disk may still come back."""
    limit_s = _REOPEN_TIMEOUT_S if is_restarted() else 0.0
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            return open_backend()
        except UserError as error:
            if time.monotonic() >= deadline_s:
                raise
            _log.warning("The service cannot start again yet: %s", error)
            time.sleep(_REOPEN_PAUSE_S)


def is_restarted() -> bool:
    """Whether this process is an actor's that Ray started in the place of one that died."""
    import ray

    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and bool(context.was_current_actor_reconstructed)


@dataclass(frozen=True, kw_only=True)
class Service:
    """A running aggregator: its actor's handle and where it listens."""

    actor: Any
    name: str
    url: str

    def is_serving(self, *, timeout_s: float) -> bool:
        """Whether it answers, waiting out a restart. ServiceError if it is gone for good; the cause is named."""
        return bool(_get(self.actor.is_serving.remote(), self.name, timeout_s))

    def stop(self) -> None:
        """Finish the requests under way, close the ledger and end the actor."""
        import ray

        try:
            ray.get(self.actor.stop.remote(), timeout=2 * _STOP_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            # Ended all the same: a ledger outlives its writer at any instant.
            _log.warning("The aggregator did not stop by itself: %s", error)
        self.kill()

    def kill(self) -> None:
        """End the actor at once, and wait until its name is free."""
        import ray

        ray.kill(self.actor)
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        while find_service(self.name) is not None and time.monotonic() < deadline_s:
            time.sleep(0.05)


def start_service(
    name: str,
    open_backend: Callable[..., Backend | Runs],
    arguments: tuple[Any, ...],
    settings: ServiceSettings,
    *,
    detached: bool = False,
    resources: dict[str, float] | None = None,
) -> Service:
    """Start the actor ``name`` and wait until it answers.

    ``detached`` lets it outlive this process on a cluster; ``resources`` pins it, for the ledger stays on one node's
    disk. ServiceError if a service of this name runs, if a host beyond loopback is asked without tokens, or for what
    the backend raised.
    """
    import ray

    check_exposure(settings)
    if find_service(name) is not None:
        raise ServiceError(f"{name}: is served already; stop that service first, or query it.")
    actor_class: Any = ray.remote(AggregatorActor)
    actor = actor_class.options(
        num_cpus=0,
        resources=resources or {},
        max_restarts=-1,
        # A call that finds the actor dead waits for the process that takes its place.
        max_task_retries=-1,
        name=name,
        namespace=NAMESPACE,
        lifetime="detached" if detached else None,
    ).remote(open_backend, arguments, settings)
    service = Service(actor=actor, name=name, url=settings.url)
    try:
        service.is_serving(timeout_s=_START_TIMEOUT_S)
    except ServiceError:
        service.kill()
        raise
    return service


def find_service(name: str) -> Any | None:
    """The handle of the actor ``name``, or None if there is none."""
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def check_exposure(settings: ServiceSettings) -> None:
    """ServiceError for a host that others reach while no token is configured."""
    if settings.tokens.is_empty and not is_loopback(settings.host):
        raise ExposureError(
            f"--host {settings.host}: others could reach it, and no token is configured; set FAIRPATE_ANALYST_TOKEN "
            "and FAIRPATE_OPERATOR_TOKEN or give token files, or listen on 127.0.0.1."
        )


def bind(host: str, port: int, *, timeout_s: float = _BIND_TIMEOUT_S) -> socket.socket:
    """A listening socket; waits while a process that just died still holds the port. ServiceError when it stays."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if time.monotonic() >= deadline_s:
                raise ServiceError(f"{host}:{port}: cannot listen there ({error}); give another --port.") from error
            time.sleep(0.1)


def _get(reference: Any, name: str, timeout_s: float) -> Any:
    import ray

    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise ServiceError(f"{name}: no answer within {timeout_s:g} s; is there room for its teachers?") from error
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise ServiceError(f"{name}: the service ended: {_last_line(str(cause))}") from error


def _last_line(text: str) -> str:
    """The message at the end of a remote traceback, without the exception's name."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^[\w.]+(Error|Exception): ", "", lines[-1]) if lines else "no cause given"
