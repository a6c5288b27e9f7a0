"""What serves an application over HTTP: errors, headers, logs, limits of connections, TLS, and uvicorn in a thread.

The aggregator and the published student share it with :mod:`fairpate.http_requests`: :func:`new_app` makes the
application with its error bodies and health routes, :func:`add_guards` puts the middleware around it, and
:class:`HttpServer` serves it, so that an option of a service holds for both.

Connections have limits that hold before anything is parsed or buffered. uvicorn's protocol on h11 parses;
:class:`LimitedProtocol` decides what it is given. A head has a size and a deadline, so has a body; one request at a
time is taken from a connection; a reply that nobody fetches is given up. When all places are taken, the connection that
has waited longest with no complete request makes room, of the address that holds most of those. What a refused caller
still sends is thrown away for a moment, so that it gets to read the refusal.

Logs and spans hold method, route, status, caller, number of queries and request id: all of that would be the same with
other votes, for both kinds of refusal are one status. How long a request took is in no line, and nothing inside a
request has a span of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import http
import json
import logging
import logging.handlers
import os
import re
import resource
import secrets
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import h11
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fairpate import __version__
from fairpate.files import file_version
from fairpate.http_requests import (
    MAX_FAULTS,
    OPEN_PATHS,
    STRANGERS,
    FaultError,
    Faults,
    Guard,
    Health,
    RequestRate,
    Tokens,
    fault,
    field_of,
    remedy_for,
)
from fairpate.pages import HEADERS as PAGE_HEADERS
from fairpate.pages import api_page
from fairpate.types import UserError

# By name: FastAPI would build the model again for every status of every route, half of the time that all take.
_FAULTS: dict[str, Any] = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Faults"}}}}


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``value`` as compact JSON."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Response(text, status_code=status, headers=headers, media_type="application/json")


def faults_response(
    status: int, faults: Sequence[Mapping[str, str]], headers: Mapping[str, str] | None = None
) -> Response:
    """A :class:`fairpate.http_requests.Faults`."""
    return json_response({"errors": list(faults)}, status=status, headers=headers)


def new_app(
    *,
    title: str,
    description: str,
    reasons: Callable[[], Awaitable[Sequence[str]]],
    field_name: Callable[[Mapping[str, Any]], str] = lambda error: ".".join(field_of(error)) or "body",
    unrouted: str = "see /docs.",
    lifespan: Any = None,
) -> FastAPI:
    """Return an application with error bodies, ``/livez``, ``/readyz``, ``/healthz`` and ``/docs``.

    ``reasons`` looks at what would keep the service from answering now. ``field_name`` names the field of one of
    pydantic's errors; ``unrouted`` ends the remedy for a path that is not a route.
    """
    app = FastAPI(
        title=title,
        version=__version__,
        description=description,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # A redirect to the path with a slash would repeat the Host header, which anybody may choose.
        redirect_slashes=False,
        responses={
            400: {"model": Faults},
            **dict.fromkeys((401, 403, 408, 411, 413, 415, 422, 429, 431), _FAULTS),
        },
    )

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        found = error.errors()[:MAX_FAULTS]
        return faults_response(422, [fault(field_name(each), each.get("input"), remedy_for(each)) for each in found])

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        if isinstance(error, FaultError):
            return faults_response(error.status_code, [error.fault], error.headers)
        at = f"{request.method} {request.url.path}"
        if error.status_code == 400:
            found = fault("body", at, f"{error.detail}; see /docs.")
        else:
            found = fault("path", at, f"{error.detail}; {unrouted}")
        return faults_response(error.status_code, [found], error.headers)

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> Response:
        # Its type alone: the message of an unforeseen error may quote what no analyst may see.
        found = fault("server", type(error).__name__, "A defect; tell the operator.")
        # This response leaves outside of all middleware.
        headers = {name.decode(): value.decode() for name, value in security_headers(request.scope["scheme"])}
        return faults_response(500, [found], headers)

    @app.get("/livez", response_model=Health)
    async def livez() -> Response:
        """Whether the process answers: if not, start it again."""
        return json_response({"status": "ok", "reasons": []})

    async def readyz() -> Response:
        """Whether a new query can be expected to be answered now; the reasons why not."""
        found = list(await reasons())
        status = {"status": "failing" if found else "ok", "reasons": found}
        return json_response(status, status=503 if found else 200)

    for path in ("/readyz", "/healthz"):
        app.get(path, response_model=Health, responses={503: {"model": Health}})(readyz)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(api_page(app.openapi()), media_type="text/html", headers=PAGE_HEADERS)

    return app


def add_guards(
    app: FastAPI,
    *,
    tokens: Tokens,
    max_body_bytes: Callable[[], int],
    rate: RequestRate,
    strangers: RequestRate = STRANGERS,
    open_to_all: bool = False,
    tracer: Any = None,
    inside: Sequence[tuple[Any, Mapping[str, Any]]] = (),
) -> None:
    """Put :class:`Guard`, the middleware of ``inside`` and :class:`Observed` around ``app``.

    The OpenAPI document names the routes that need a token. ``inside``: classes and their arguments.
    """
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        # FastAPI keeps the document that it made: what is added to it here stays.
        if app.openapi_schema is None and (tokens.needs_token or not open_to_all):
            document = describe()
            document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            for path, routes in document["paths"].items():
                for route in routes.values():
                    route["security"] = [] if path in OPEN_PATHS else [{"token": []}]
        return describe()

    app.openapi = openapi  # type: ignore[method-assign]
    # The last that is added stands outside: what Guard refuses is counted, logged and traced too.
    app.add_middleware(
        Guard,
        tokens=tokens,
        max_body_bytes=max_body_bytes,
        rate=rate,
        strangers=strangers,
        open_to_all=open_to_all,
    )
    for middleware, arguments in inside:
        app.add_middleware(middleware, **arguments)
    app.add_middleware(Observed, tracer=tracer)


_REQUESTS = logging.getLogger("fairpate.requests")
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS = ("GET", "HEAD", "POST")
_OWN = ("fairpate", "aggregator", "teachers", "student")
_FIELDS = ("method", "route", "status", "caller", "address", "queries")
_log = logging.getLogger(__name__)
_id_now: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, message, the request's id, and what a request adds."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        seconds, milliseconds = divmod(int(1000 * record.created), 1000)
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
        line: dict[str, Any] = {
            "time": f"{moment}.{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if _id_now.get():
            line["request_id"] = _id_now.get()
        line |= {name: value for name in _FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def open_private(path: Path) -> Any:
    """Open a log file for appending; one that is made can be read by its owner alone, for it names callers."""
    return open(path, "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600))


class _PrivateFile(logging.handlers.WatchedFileHandler):
    def _open(self) -> Any:
        return open_private(Path(self.baseFilename))


def log_json_lines(path: Path) -> None:
    """Append what this process logs to ``path`` as JSON lines, one for each request too.

    Of other packages only warnings: what they tell of, such as addresses that were asked for, is not chosen here. A
    file that was moved away by a rotation is made again.
    """
    handler = _PrivateFile(path, encoding="utf-8")
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in _OWN:
        logging.getLogger(name).setLevel(logging.INFO)


def otlp_tracer() -> Any:
    """A tracer that sends spans where the variables OTEL_EXPORTER_OTLP_* say. ImportError without the extra."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return tracer_to(BatchSpanProcessor(OTLPSpanExporter()))


def tracer_to(processor: Any) -> Any:
    """A tracer of this service whose spans go to ``processor``."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider(resource=Resource.create({"service.name": "fairpate-aggregator"}))
    provider.add_span_processor(processor)
    return provider.get_tracer("fairpate")


class Observed:
    """ASGI middleware around everything: a request id, a log line and a span each, and the headers of every response.

    Puts ``request_id`` into ``scope["state"]``: the caller's own (``X-Request-Id``) where that is a plain word.
    """

    def __init__(self, app: ASGIApp, *, tracer: Any = None) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and log it when its response starts."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        state = scope.setdefault("state", {})
        state["request_id"] = given if _ID.fullmatch(given := headers.get("x-request-id", "")) else secrets.token_hex(8)
        token = _id_now.set(state["request_id"])
        with contextlib.ExitStack() as opened:
            span = opened.enter_context(self._span(scope, headers)) if self._tracer else None

            async def observed(message: Message) -> None:
                if message["type"] == "http.response.start":
                    found = [*message["headers"], (b"x-request-id", state["request_id"].encode())]
                    known = {name.lower() for name, _ in found}
                    # A route's own headers go first: a page has a stricter policy of its own.
                    found += [each for each in security_headers(scope["scheme"]) if each[0] not in known]
                    message["headers"] = found
                    facts = _facts(scope, message["status"])
                    _REQUESTS.info("request", extra=facts)
                    if span is not None:
                        _describe(span, facts, state["request_id"])
                await send(message)

            try:
                await self._app(scope, receive, observed)
            finally:
                _id_now.reset(token)

    @contextlib.contextmanager
    def _span(self, scope: Scope, headers: dict[str, str]) -> Iterator[Any]:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(headers)
        # An exception's text may be anything: it is in the log, and no part of a span.
        with self._tracer.start_as_current_span(
            method_of(scope),
            context=parent,
            kind=SpanKind.SERVER,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            yield span


def security_headers(scheme: str) -> list[tuple[bytes, bytes]]:
    """Headers of every response: not kept by caches, of the stated type only, and over TLS alone once it was used."""
    found = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
    return [*found, (b"strict-transport-security", b"max-age=31536000")] if scheme == "https" else found


def method_of(scope: Scope) -> str:
    """The method of a request: a caller may send any word, and few are told apart."""
    method: str = scope["method"]
    return method if method in _METHODS else "other"


def route_of(scope: Scope) -> str:
    """The route that a request was for, without what it named; ``none`` for no route."""
    return getattr(scope.get("route"), "path", "none")


def _facts(scope: Scope, status: int) -> dict[str, Any]:
    """What may be told of a request; the address only of those that are nobody's, by the service that knows them."""
    state, client = scope["state"], scope.get("client")
    caller = state.get("caller")
    return {
        "method": method_of(scope),
        "route": route_of(scope),
        "status": status,
        "caller": None if caller is None else caller.name,
        "address": client[0] if caller is None and client else None,
        "queries": state.get("num_queries"),
    }


def _describe(span: Any, facts: dict[str, Any], request_id: str) -> None:
    span.update_name(f"{facts['method']} {facts['route']}")
    span.set_attribute("http.request.method", facts["method"])
    span.set_attribute("http.route", facts["route"])
    span.set_attribute("http.response.status_code", facts["status"])
    span.set_attribute("fairpate.request_id", request_id)
    for name in ("caller", "queries"):
        if facts[name] is not None:
            span.set_attribute(f"fairpate.{name}", facts[name])


# A head passes its limit by no more than this before it is refused.
_SLICE_BYTES = 4096
_LINGER_S = 2.0
_FILES_BESIDE = 1024  # files that a process opens beside its connections
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
        scheme = "https" if self.transport.get_extra_info("sslcontext") else "http"
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(b"connection", b"close"), *security_headers(scheme)]
        head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n".encode()
        self.transport.write(head + b"".join(b"%b: %b\r\n" % each for each in headers) + b"\r\n" + body)
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


_BIND_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 30.0
_BACKLOG, _ACCEPTED_TOGETHER = 4096, 64
# Below `_STOP_TIMEOUT_S`: the server gives up its requests before its thread is given up.
_GRACE_S = 10
_TICKS_PER_LOOK = 20  # of a tenth of a second


class ServiceError(UserError, RuntimeError):
    """A service that cannot start or went away; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """How a service is reached.

    ``rate``: requests of one caller; ``strangers``: of one address without a known token. ``tls``: files of a
    certificate; None: plain HTTP. ``log_file`` gets a JSON line for each request. ``traces`` sends spans where
    OTEL_EXPORTER_OTLP_* say.
    """

    host: str = "127.0.0.1"
    port: int = 8517
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    rate: RequestRate = field(default_factory=RequestRate)
    strangers: RequestRate = STRANGERS
    tls: TlsFiles | None = None
    log_file: Path | None = None
    traces: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.port < 2**16:
            raise ValueError(f"Expected 0 < port < 65536, got {self.port}.")

    @property
    def url(self) -> str:
        """The service's address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


class Servable(Protocol):
    """What makes the application that is served."""

    def app(self, settings: Any, *, tracer: Any = None) -> FastAPI:
        """Return the application."""


class HttpServer:
    """uvicorn in a thread, on a socket that is bound before the thread starts."""

    def __init__(self, servable: Servable, settings: HttpSettings, *, tracer: Any = None) -> None:
        """``tracer`` takes the place of the one that the settings ask for."""
        import uvicorn

        # Before anything else runs: a port that is taken ends the start.
        listening = bind(settings.host, settings.port)
        if settings.log_file is not None:
            log_json_lines(settings.log_file)
        if settings.traces and tracer is None:
            tracer = otlp_tracer()
        self._app = app = servable.app(settings, tracer=tracer)
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
        self._server = _server(config, listening, settings.tls)
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


def _server(config: Any, listening: socket.socket, tls: TlsFiles | None) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            # asyncio has one number for two things: how many connections it accepts before it does anything else
            # (should be few), and how many the kernel keeps waiting for it (should be many).
            listening.listen(_BACKLOG)

        async def on_tick(self, counter: int) -> bool:
            if tls is not None and counter % _TICKS_PER_LOOK == 0:
                certificate.look(config.ssl)
            return await super().on_tick(counter)

    certificate = _Certificate(tls)
    return Server(config)


class _Certificate:
    """The files of a certificate, and which version of them the server uses."""

    def __init__(self, tls: TlsFiles | None) -> None:
        self._tls = tls
        self._seen = self._versions()

    def look(self, context: ssl.SSLContext) -> None:
        """Load the files into ``context`` if they changed; new connections get the new certificate."""
        found = self._versions()
        if self._tls is None or found == self._seen:
            return
        self._seen = found
        try:
            # Tried first on a context of its own: a pair that is half replaced must not end the one in use.
            TlsFiles(cert=self._tls.cert, key=self._tls.key)
            context.load_cert_chain(self._tls.cert, self._tls.key, password=_no_password)
            _log.info("The certificate was read again.")
        except (ValueError, OSError) as error:
            _log.error("The certificate that was replaced is not used: %s", error)

    def _versions(self) -> tuple[tuple[int, ...], ...]:
        return () if self._tls is None else tuple(map(file_version, (self._tls.cert, self._tls.key)))


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
