"""Serve an ASGI application over HTTP: callers, rates and bodies, errors, headers, logs, connections, TLS and uvicorn.

The aggregator, the published student and the coordinator of sites share this module: :func:`new_app` creates the
application with its error bodies, health routes and middleware, and :class:`HttpServer` serves it.

**Requests** pass :class:`Guard`, middleware that checks callers, request rates and sizes of bodies. A body must declare
its length, so that one from an unknown caller, or one that is too large, is refused before it is read. The caller and
the rate are checked again when the body has arrived, because a client may hold back its last byte.

**Connections** pass :class:`LimitedProtocol` before anything is parsed or buffered. The header section of a request has
a maximum size, headers and body have deadlines, and a connection has one request at a time. When the maximum number of
connections is reached, the address with the most incomplete requests loses those that have waited longest. A network
that opens many without an admitted request has to wait before anything is read of the next one.

**Logs** and spans contain method, route, status, caller, number of queries and request id. None of these depends on the
teachers' votes, because refusals before and after a vote have the same status. A duration might depend on votes, so no
line contains one. A flood of refused requests fills no disk: after a few lines they are counted (:class:`Observed`).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import http
import ipaddress
import itertools
import json
import logging
import logging.handlers
import math
import os
import re
import resource
import secrets
import select
import socket
import ssl
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import h11
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fairpate import __version__
from fairpate.config import expected
from fairpate.files import file_version
from fairpate.pages import HEADERS as PAGE_HEADERS
from fairpate.pages import render
from fairpate.types import PACKAGES, KnownCaller, UserError

_MAX_FAULTS = 10
OPEN_PATHS = ("/", "/livez", "/readyz", "/healthz")
_OPERATOR_PREFIX = "/v1/operator/"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")
_MAX_FIELDS = 64
_MAX_VALUE_CHARACTERS = 80
MAX_BODY_BYTES = 2 * 2**20
# JSON around a record's features; "255.0," for a byte and "-3.4028234663852886e+38, " for a float.
_BYTES_PER_RECORD, _BYTES_PER_BYTE, _BYTES_PER_FLOAT = 1024, 6, 26
_LARGE_BODY_BYTES = 64 * 2**10
_MAX_LARGE_BODIES, _MAX_LARGE_BODIES_PER_CALLER = 32, 4
_LARGE_BYTES_PER_S = 10e6
_MAX_BUCKETS = 4096

Headers = Mapping[str, str] | None
Reason = Literal["busy", "chain", "cluster", "disk", "ledger", "votes", "unknown"]
"""Why a service does not answer new queries."""


class Body(BaseModel):
    """A JSON object with exactly the declared fields, strictly typed: "3" and true are not numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        # Pydantic reports one error for each unknown field, and a body has room for a hundred thousand.
        most = max(_MAX_FIELDS, len(cls.model_fields))
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"Expected a JSON object with at most {most} fields, got {len(value)}; send fewer")
        return value


class Fault(Body):
    """One error: the field, its value and the remedy."""

    field: str
    value: str
    remedy: str


class Faults(Body):
    """The body of every response that is not a success."""

    errors: list[Fault]


class Health(Body):
    """The body of a readiness check: `ok` if the service answers new queries, else `failing` with the reasons."""

    status: Literal["ok", "failing"]
    reasons: list[Reason]


def health_json(reasons: Sequence[str]) -> dict[str, Any]:
    """Return the :class:`Health` of a service as JSON; ``reasons`` are why it does not answer new queries."""
    return {"status": "failing" if reasons else "ok", "reasons": list(reasons)}


class Tokens(Protocol):
    """Interface to the set of bearer tokens that a service accepts; the set may change while the service runs."""

    @property
    def needs_token(self) -> bool:
        """True if a request must have a token at present."""

    def caller(self, token: str | None) -> KnownCaller | None:
        """Return the caller who owns ``token``; None for an unknown token."""


@dataclass(frozen=True, kw_only=True)
class RequestRate:
    """A limit on requests: ``per_s`` per second on average, and ``burst`` at once; inf: no limit.

    ValueError unless per_s > 0 and burst >= 1.
    """

    per_s: float = math.inf
    burst: float = math.inf

    def __post_init__(self) -> None:
        if not self.per_s > 0 or not self.burst >= 1:
            raise ValueError(
                f"Expected a request rate with per_s > 0 and burst >= 1, got {self.per_s} and {self.burst}."
            )


NO_RATE = RequestRate()
STRANGERS = RequestRate(per_s=2.0, burst=20.0)
"""The rate limit of one address whose requests have no known token; it slows down the guessing of tokens."""
OPEN_REQUESTS = RequestRate(per_s=20.0, burst=100.0)
"""The rate limit of one address, or of one caller, on the paths that need no token: more than probes and pages need."""
_QUICK_REFUSALS = RequestRate(per_s=2.0, burst=50.0)
_HELD_S = 1.0


@dataclass(eq=False)
class Buckets:
    """Rate limits for many callers by token buckets: each name has its own bucket, full at first, and only the most
    recently used names are stored."""

    rule: RequestRate
    _levels: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict, init=False)

    def wait_s(self, name: str, *, now_s: float) -> float:
        """Take one request from the token bucket of ``name`` and return 0; if the bucket is empty, return the seconds
        to wait. ``now_s``: the present time in seconds."""
        rule = self.rule
        if math.isinf(rule.per_s):
            return 0.0
        # Removed and inserted again at the end, so that the first entry is the least recently used name.
        level, filled_s = self._levels.pop(name, (rule.burst, now_s))
        level = min(rule.burst, level + (now_s - filled_s) * rule.per_s)
        taken = level >= 1
        self._levels[name] = (level - taken, now_s)
        if len(self._levels) > _MAX_BUCKETS:
            # The name that asked least recently; if it returns, it begins with a full bucket.
            self._levels.popitem(last=False)
        return 0.0 if taken else (1 - level) / rule.per_s

    def give_back(self, name: str) -> None:
        """Return the token of one request to the bucket of ``name``."""
        if name in self._levels:
            level, filled_s = self._levels[name]
            self._levels[name] = (min(self.rule.burst, level + 1), filled_s)


@lru_cache(maxsize=_MAX_BUCKETS)
def network_of(address: str) -> str:
    """Return the part of a client's address by which the client is limited: an IPv4 address, or the first 64 bits of an
    IPv6 address, because one client usually has all addresses that begin with them."""
    try:
        return str(ipaddress.IPv6Network((address.partition("%")[0], 64), strict=False)) if ":" in address else address
    except ValueError:
        return address  # whatever a trusted proxy calls its client


class FaultError(HTTPException):
    """Raised to refuse a request with one error; FastAPI turns it into a response."""

    def __init__(self, status: int, field: str, value: object, remedy: str, headers: Headers = None) -> None:
        super().__init__(status, detail=remedy, headers=headers)
        self.fault = fault(field, value, remedy)


class TooManyRequestsError(FaultError):
    """Raised to refuse a request beyond the rate limit of ``name``, which has room for another one after ``wait_s``
    seconds."""

    def __init__(self, name: str, wait_s: float) -> None:
        remedy = f"Too many requests; wait {wait_s:.1f} s, or send several queries in one."
        super().__init__(429, "requests", "too many", remedy, {"Retry-After": str(math.ceil(wait_s))})
        self.name = name


class NotAdmittedError(FaultError):
    """Raised to refuse a request without a token of this service, or whose token ended before the request was
    processed. ``got`` describes the header that the request had, without its token."""

    def __init__(self, got: str = "(not shown)") -> None:
        remedy = "Send a bearer token of this service in the Authorization header."
        super().__init__(401, "Authorization", got, remedy, {"WWW-Authenticate": "Bearer"})


def fault(field: str, value: object, remedy: str) -> dict[str, str]:
    """Return a :class:`Fault` (field, value, remedy) as a JSON mapping; a long value is cut off after 80 characters."""
    if isinstance(value, bytes):
        value = value[: _MAX_VALUE_CHARACTERS + 1].decode("utf-8", "backslashreplace")
    elif not isinstance(value, str):
        # Encoded piece by piece: a value may have megabytes, and only its start is shown.
        pieces = json.JSONEncoder(default=str).iterencode(value)
        value = "".join(itertools.islice(pieces, _MAX_VALUE_CHARACTERS + 1))
    cut = value if len(value) <= _MAX_VALUE_CHARACTERS else value[:_MAX_VALUE_CHARACTERS] + "..."
    # JSON may contain half of a UTF-16 pair, which UTF-8 cannot encode.
    return {"field": field, "value": cut.encode("utf-8", "backslashreplace").decode(), "remedy": remedy}


def largest_body_bytes(record_shape: tuple[int, ...], *, is_bytes: bool, most_records: int) -> int:
    """Return the size limit in bytes for a request body with up to ``most_records`` records of shape ``record_shape``.

    The limit is at most 2 MiB, or the size of one record if that is more. ``is_bytes``: the features of a record are
    bytes, not floats.
    """
    record = _BYTES_PER_RECORD + (_BYTES_PER_BYTE if is_bytes else _BYTES_PER_FLOAT) * math.prod(record_shape)
    return max(record, min(MAX_BODY_BYTES, most_records * record))


@dataclass(eq=False)
class Guard:
    """ASGI middleware in front of all routes: checks tokens, roles, request rates, and size and time of bodies.

    ``tokens`` None admits all callers. ``max_body_bytes``, called for each request, returns the limit on its body. The
    middleware sets ``scope["state"]["caller"]`` (None if all callers are admitted, and for a stranger on an open path)
    and ``scope["state"]["is_admitted"]``, a function that returns whether the caller would still be admitted.

    A caller whose requests stay beyond a rate limit gets its refusals after a second each, so that it takes no time
    from other callers; meanwhile its connection is among the first to be closed if connections run out.

    A service may have ``tokens`` and yet need none at present. It then accepts only this machine's names in the Host
    header. Otherwise a web page could reach it through a host name that resolves to this machine (DNS rebinding).
    """

    app: ASGIApp
    _: KW_ONLY
    tokens: Tokens | None
    max_body_bytes: Callable[[], int]
    rate: RequestRate = NO_RATE
    strangers: RequestRate = STRANGERS
    body_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        self._rates, self._strangers = Buckets(self.rate), Buckets(self.strangers)
        # Requests that were held back would otherwise come in all at once when their last bytes arrive.
        self._arrived = Buckets(self.rate)
        self._open, self._quick = Buckets(OPEN_REQUESTS), Buckets(_QUICK_REFUSALS)
        self._large: Counter[str] = Counter()
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit the request, read its body, and pass both to the application; or refuse the request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        length = int(headers.get(b"content-length", "0"))  # the parser has checked that these are digits
        scheme, _, token = headers.get(b"authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else None

        async def send_without_body(message: Message) -> None:
            # The next request cannot be found behind a body that is not read.
            if message["type"] == "http.response.start" and (length or b"transfer-encoding" in headers):
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        try:
            caller, name = self._admit(scope, headers, given, length)

            def is_admitted() -> bool:
                if caller is None or self.tokens is None:
                    return True
                now = self.tokens.caller(given)
                return now is not None and (now.name, now.role) == (caller.name, caller.role)

            # A stream checks again while it runs: its token may be revoked meanwhile.
            state = scope.setdefault("state", {})
            state.update(caller=caller, is_admitted=is_admitted)
            if caller is not None or self.tokens is None:
                state.get("welcome", lambda: None)()
            # No open path uses a body, so the body of a stranger is never read.
            if length == 0 or scope["path"] in OPEN_PATHS:
                await self.app(scope, receive, send_without_body)
                return
            large = [name] if length > _LARGE_BODY_BYTES else []
            self._large.update(large)
            try:
                try:
                    # Before the turn below: a caller that sends slowly delays no other caller.
                    async with asyncio.timeout(self.body_timeout_s):
                        body = await Request(scope, receive).body()
                except ClientDisconnect:
                    return
                except TimeoutError:
                    raise FaultError(
                        408, "request", "no complete body", "The request arrived too slowly; send it faster."
                    ) from None
                if large:
                    # A pause before a large body is parsed lets the event loop answer other requests.
                    async with self._turn:
                        await asyncio.sleep(length / _LARGE_BYTES_PER_S)
                # Asked again: while the body was on its way, a token may have ended, or the service may have to stop.
                if getattr(getattr(scope.get("app"), "state", None), "is_closing", False):
                    remedy = "The service stops, so nothing was processed or charged; send the request again later."
                    raise FaultError(503, "service", "closing", remedy, {"Retry-After": "2"})
                if not is_admitted():
                    raise NotAdmittedError
                self._take(self._arrived, name)
                messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

                async def replay() -> Message:
                    # After the body come the real messages, which report when the caller leaves.
                    return messages.pop() if messages else await receive()

                await self.app(scope, replay, send)
            finally:
                # This subtraction drops names at 0. Names of strangers are addresses, which would fill the memory.
                self._large -= Counter(large)
        except FaultError as refused:
            if isinstance(refused, TooManyRequestsError) and self._quick.wait_s(refused.name, now_s=time.monotonic()):
                scope.get("state", {}).get("hold", lambda: None)()
                await asyncio.sleep(_HELD_S)
            response = faults_response(refused.status_code, [refused.fault], refused.headers)
            await response(scope, receive, send_without_body)

    def _admit(
        self, scope: Scope, headers: dict[bytes, str], token: str | None, length: int
    ) -> tuple[KnownCaller | None, str]:
        """Return the caller of a request, and the name by which the caller's requests are limited. FaultError for a
        request that is refused."""
        tokens, is_open = self.tokens, scope["path"] in OPEN_PATHS
        # A proxy may read the first of two headers and this service the last.
        is_ambiguous = sum(name == b"authorization" for name, _ in scope["headers"]) > 1
        host, is_foreign = headers.get(b"host", ""), False
        if tokens is not None and not tokens.needs_token:
            own_name = (host if host.endswith("]") else host.rpartition(":")[0] or host).lower()
            is_foreign = own_name not in _LOOPBACK_NAMES
        caller = None if is_ambiguous or is_foreign or tokens is None else tokens.caller(token)
        # A token's name has no blank, so an address cannot be mistaken for one.
        name = caller.name if caller is not None else f"address {network_of((scope.get('client') or ('',))[0])}"
        # Counted before the refusals below, so that guessing tokens is slowed down as well.
        if is_ambiguous or is_foreign or not is_open:
            self._take(self._rates if caller is not None or tokens is None else self._strangers, name)
        else:
            self._take(self._open, name)
        if is_foreign:
            remedy = "A service without tokens answers only its own machine; send to 127.0.0.1."
            raise FaultError(400, "Host", host, remedy)
        if is_ambiguous:
            raise FaultError(400, "Authorization", "(not shown)", "Expected one Authorization header; send one.")
        if caller is None and tokens is not None and not is_open:
            raise NotAdmittedError("(not shown)" if b"authorization" in headers else "no header")
        if scope["path"].startswith(_OPERATOR_PREFIX) and caller is not None and caller.role != "operator":
            remedy = "This path is for operators; send an operator's token."
            raise FaultError(403, "Authorization", caller.role, remedy)
        if (coding := headers.get(b"transfer-encoding")) is not None:
            remedy = "No transfer encoding is supported; send a Content-Length header."
            raise FaultError(411, "Transfer-Encoding", coding, remedy)
        if (coding := headers.get(b"content-encoding", "identity")).lower() != "identity":
            remedy = "A compressed body is not supported; send it without compression."
            raise FaultError(415, "Content-Encoding", coding, remedy)
        if length > (most := self.max_body_bytes()):
            remedy = f"Expected a body of at most {most} bytes; send fewer records."
            raise FaultError(413, "body", f"{length} bytes", remedy)
        # Bodies being received are in memory. One caller may send few at once, so that a caller that sends slowly over
        # many connections cannot block others.
        is_full = self._large.total() >= _MAX_LARGE_BODIES or self._large[name] >= _MAX_LARGE_BODIES_PER_CALLER
        if length > _LARGE_BODY_BYTES and scope["path"] not in OPEN_PATHS and is_full:
            remedy = "Too many large requests at the same time; ask again later, or send fewer queries at once."
            raise FaultError(503, "body", f"{length} bytes", remedy, {"Retry-After": "2"})
        return caller, name

    @staticmethod
    def _take(buckets: Buckets, name: str) -> None:
        """Take one request from the token bucket of ``name``. TooManyRequestsError if the bucket is empty."""
        if wait_s := buckets.wait_s(name, now_s=time.monotonic()):
            raise TooManyRequestsError(name, wait_s)


# A reference: given the model, FastAPI would build its schema for every status of every route, half of its start.
_FAULTS: dict[str, Any] = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Faults"}}}}
_NOT_KEPT = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
_HEADERS = {"http": _NOT_KEPT, "https": [*_NOT_KEPT, (b"strict-transport-security", b"max-age=31536000")]}
"""The headers of every response, by scheme: not cached, read as the stated type only, and over HTTPS always HTTPS
again."""
_log = logging.getLogger(__name__)


def json_response(value: Any, *, status: int = 200, headers: Headers = None) -> Response:
    """Return a response with ``value`` as compact JSON."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Response(text, status_code=status, headers=headers, media_type="application/json")


def faults_response(status: int, faults: Sequence[Mapping[str, str]], headers: Headers = None) -> Response:
    """Return an error response, whose body is :class:`Faults` as JSON."""
    return json_response({"errors": list(faults)}, status=status, headers=headers)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from its keys and values. FaultError for a key that is given twice: a reader that takes the
    first and one that takes the last would see two different requests."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise FaultError(422, "body", twice, "This key is given twice in one object; give it once.")
    return found


class _StrictRequest(Request):
    async def json(self) -> Any:
        return json.loads(await self.body(), object_pairs_hook=_each_key_once)


class _StrictRoute(APIRoute):
    """A route that refuses JSON in which an object has one key twice."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that answers a request; it parses the request's body strictly."""
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strict


OnResponse = Callable[[Mapping[str, Any], float], object]
"""Called when a response starts, with the fields of its log line and the seconds that it took."""


def new_app(
    *,
    title: str,
    description: str,
    tokens: Tokens | None = None,
    reasons: Callable[[], Awaitable[Sequence[str]]] | None = None,
    tracer: Any = None,
    on_response: OnResponse = lambda *_: None,
    field_name: Callable[[list[str]], str] = ".".join,
    unrouted: str = "see /docs.",
    unknown: str = "leave it out, or see /docs for the fields that are known.",
    lifespan: Any = None,
    **guard: Any,
) -> FastAPI:
    """Return an application with error bodies, ``/livez``, ``/readyz``, ``/healthz`` and ``/docs``; the caller adds its
    own routes.

    All requests pass the middleware :class:`Observed`, which gets ``tracer`` and ``on_response``, and then
    :class:`Guard`, which gets ``tokens`` and the other keyword arguments. ``reasons`` returns the reasons why the
    service cannot answer at present; without this function it always can. ``field_name`` turns the path of a field in a
    pydantic error into the field's name. ``unrouted`` is the remedy in the error for an unknown path,
    ``unknown`` that for an unknown field.
    """
    app = FastAPI(
        title=title,
        version=__version__,
        description=description,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # A redirect to the path with a slash would repeat the Host header, which any caller may choose.
        redirect_slashes=False,
        responses={400: {"model": Faults}, **dict.fromkeys((401, 403, 408, 411, 413, 415, 422, 429, 431), _FAULTS)},
    )
    app.router.route_class = _StrictRoute
    app.state.is_closing = False

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        found = []
        for each in error.errors()[:_MAX_FAULTS]:
            if each["type"] == "extra_forbidden":
                remedy = f"Unknown field; {unknown}"
            elif each["type"] == "missing":
                remedy = "Required; add this field."
            elif each["type"] == "json_invalid":
                remedy = f"Expected JSON; {each['ctx']['error']}."
            elif isinstance(each.get("input"), bytes):  # FastAPI parses no body of another media type
                remedy = "Expected JSON; send Content-Type: application/json."
            else:
                text = expected(each)
                remedy = f"{text[:1].upper()}{text[1:]}."
            # Of JSON that cannot be read the path is a position in the text, which the remedy names.
            path = () if each["type"] == "json_invalid" else each["loc"]
            parts = [str(part) for part in path if part not in ("body", "path", "query")]
            found.append(fault(field_name(parts) or "body", each.get("input"), remedy))
        return faults_response(422, found)

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
        # The type alone: the message of an unforeseen error may quote what no analyst may see.
        found = fault("server", type(error).__name__, "A defect; inform the operator.")
        # Starlette sends this response outside all middleware.
        headers = {name.decode(): value.decode() for name, value in _HEADERS.get(request.scope["scheme"], _NOT_KEPT)}
        return faults_response(500, [found], headers)

    async def livez() -> Response:
        """Report that the process is alive; restart it if there is no answer."""
        return json_response(health_json([]))

    async def readyz() -> Response:
        """Report whether a new query can be answered now, and if not, the reasons."""
        found = [] if reasons is None else await reasons()
        return json_response(health_json(found), status=503 if found else 200)

    add_open_route(app, "/livez", livez, response_model=Health)
    for path in ("/readyz", "/healthz"):
        add_open_route(app, path, readyz, response_model=Health, responses={503: {"model": Health}})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(render("api.html", document=app.openapi()), media_type="text/html", headers=PAGE_HEADERS)

    describe = app.openapi

    def openapi() -> dict[str, Any]:
        # The routes that need a token are marked once: FastAPI caches the document.
        if app.openapi_schema is None and tokens is not None:
            document = describe()
            document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            for path, routes in document["paths"].items():
                for route in routes.values():
                    route["security"] = [] if path in OPEN_PATHS else [{"token": []}]
        return describe()

    app.openapi = openapi  # type: ignore[method-assign]
    app.add_middleware(Guard, tokens=tokens, **guard)
    # The middleware added last is outermost: requests that Guard refuses are logged, counted and traced too.
    app.add_middleware(Observed, tracer=tracer, on_response=on_response)
    return app


def add_open_route(app: FastAPI, path: str, answer: Callable[[], Awaitable[Response]], **described: Any) -> None:
    """Add a path that needs no token, one of ``OPEN_PATHS``, to ``app``. It answers GET and HEAD by ``answer()``, and
    OPTIONS with the methods that it has. ``described``: arguments of FastAPI's ``get``, for the document of routes."""

    async def any_method(request: Request) -> Response:
        if request.method != "OPTIONS":
            return await answer()
        return Response(status_code=204, headers={"Allow": ", ".join(_OPEN_METHODS)})

    # The document has GET alone, as a route of its own: FastAPI would give all methods of one route the same id.
    app.api_route(path, methods=list(_OPEN_METHODS), include_in_schema=False)(any_method)
    app.get(path, **described)(answer)


_REQUESTS = logging.getLogger("fairpate.requests")
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS = ("GET", "HEAD", "OPTIONS", "POST")
_OPEN_METHODS = ("GET", "HEAD", "OPTIONS")
_FIELDS = ("method", "route", "status", "caller", "address", "queries", "requests")
# Of refusals and of requests on open paths: 20 lines at once and one a second, then a line with counts every 10 s.
_LINES = RequestRate(per_s=1.0, burst=20.0)
_SUMMARY_S = 10.0
_id_now: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


class JsonLines(logging.Formatter):
    """A log formatter that writes a log record as one line of JSON: time, level, logger, message, and, for a request,
    its id and the logged fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return ``record`` as one line of JSON."""
        moment = datetime.fromtimestamp(record.created, UTC).replace(tzinfo=None)
        line: dict[str, Any] = {
            "time": f"{moment.isoformat(timespec='milliseconds')}Z",
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


class PrivateFile(logging.handlers.WatchedFileHandler):
    """A handler that appends to a log file, also after a rotation moved it. Only its owner may read a new file, because
    it names callers."""

    def _open(self) -> Any:
        return open(self.baseFilename, "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600))


def tracer_to(processor: Any = None) -> Any:
    """Return an OpenTelemetry tracer that passes the service's spans to the span processor ``processor``.

    ``processor`` None exports spans as the environment variables OTEL_EXPORTER_OTLP_* specify. ImportError without the
    OpenTelemetry packages.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    if processor is None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        processor = BatchSpanProcessor(OTLPSpanExporter())
    provider = TracerProvider(resource=Resource.create({"service.name": "fairpate-aggregator"}))
    provider.add_span_processor(processor)
    return provider.get_tracer("fairpate")


@dataclass(eq=False)
class Observed:
    """The outermost ASGI middleware: gives every request an id, a log line and a trace span, and every response its
    common headers.

    Requests that are refused, and those on open paths, have a limited number of lines: for each caller, and for all
    strangers together. Those beyond it are counted in a later line, by status, with the address that sent most of them.

    Sets ``scope["state"]["request_id"]``: the header ``X-Request-Id`` if it is one plain word, else a random id.
    """

    app: ASGIApp
    tracer: Any = None
    on_response: OnResponse = lambda *_: None
    _lines: Buckets = field(default_factory=lambda: Buckets(_LINES), init=False)
    _untold: Counter[tuple[int, str | None, str | None]] = field(default_factory=Counter, init=False)

    def _tell(self, facts: dict[str, Any], *, is_open: bool) -> None:
        """Log a request, or count it for a later line if too many such requests had lines of their own."""
        # One bucket for all strangers, who may have any number of addresses.
        kind = f"{facts['caller'] or ''} {'open' if is_open else 'refused'}"
        is_sampled = is_open or facts["status"] >= 400
        if not is_sampled or not self._lines.wait_s(kind, now_s=time.monotonic()):
            _REQUESTS.info("request", extra=facts)
            return
        if not self._untold:
            asyncio.get_running_loop().call_later(_SUMMARY_S, self._tell_counts)
        key = (facts["status"], facts["caller"], facts["address"])
        # A flood from many addresses must not fill the memory.
        self._untold[key if len(self._untold) < _MAX_BUCKETS or key in self._untold else (*key[:2], None)] += 1

    def _tell_counts(self) -> None:
        """Log how many requests had no line of their own, by status and caller."""
        untold = self._untold.most_common()
        self._untold.clear()
        for status, caller in dict.fromkeys(key[:2] for key, _ in untold):
            of_kind = [(address, count) for (*kind, address), count in untold if kind == [status, caller]]
            facts = {
                "status": status,
                "caller": caller,
                "address": of_kind[0][0],
                "requests": sum(n for _, n in of_kind),
            }
            _REQUESTS.info("requests without a line of their own", extra=facts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on to the next middleware, and log it when its response starts."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            self._tell_counts()  # after the shutdown of the application
            return
        began_s = time.perf_counter()
        # A caller may send any word as the method; few are distinguished.
        method = scope["method"] if scope["method"] in _METHODS else "other"
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given, state = headers.get("x-request-id", ""), scope.setdefault("state", {})
        state["request_id"] = request_id = given if _ID.fullmatch(given) else secrets.token_hex(8)
        token = _id_now.set(request_id)
        with contextlib.ExitStack() as opened:
            span = None
            if self.tracer is not None:
                from opentelemetry.trace import SpanKind
                from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

                # The text of an exception may contain private values: it goes to the log alone.
                quiet = {"record_exception": False, "set_status_on_exception": False}
                context = TraceContextTextMapPropagator().extract(headers)
                started = self.tracer.start_as_current_span(method, context=context, kind=SpanKind.SERVER, **quiet)
                span = opened.enter_context(started)

            async def observed(message: Message) -> None:
                if message["type"] == "http.response.start":
                    found = [*message["headers"], (b"x-request-id", request_id.encode())]
                    known = {name.lower() for name, _ in found}
                    # A header of the route wins: a page has a stricter policy of its own.
                    found += [each for each in _HEADERS.get(scope["scheme"], _NOT_KEPT) if each[0] not in known]
                    message["headers"] = found
                    caller, client = state.get("caller"), scope.get("client")
                    facts = {
                        "method": method,
                        # The template of the route, without the values in the path.
                        "route": getattr(scope.get("route"), "path", "none"),
                        "status": message["status"],
                        "caller": None if caller is None else caller.name,
                        "address": client[0] if caller is None and client else None,
                        "queries": state.get("num_queries"),
                    }
                    self._tell(facts, is_open=scope["path"] in OPEN_PATHS)
                    self.on_response(facts, time.perf_counter() - began_s)
                    if span is not None:
                        span.update_name(f"{method} {facts['route']}")
                        attributes = {
                            "http.request.method": method,
                            "http.route": facts["route"],
                            "http.response.status_code": facts["status"],
                            "fairpate.request_id": request_id,
                            "fairpate.caller": facts["caller"],
                            "fairpate.queries": facts["queries"],
                        }
                        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
                await send(message)

            try:
                await self.app(scope, receive, observed)
            finally:
                _id_now.reset(token)


_SLICE_BYTES = 4096  # a head passes its limit by at most this
_LINGER_S = 2.0
_MAPPED = "::ffff:"
_OTHER_FILES = 1024  # files of the process that are not connections
# When all places are taken, one in 16 connections is given up at once.
_EVICTED_SHARE = 16


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits on the number of connections, the size of a request's header section, and the time for each part of a
    request.

    ``body_timeout_s`` is for the whole body, ``write_timeout_s`` for a response that the client does not fetch.
    ``arrivals``: how many connections one network may open without an admitted request; beyond, each has to wait for a
    second. This machine's own, among them those of a proxy, do not count.
    """

    max_connections: int = 512
    arrivals: RequestRate = OPEN_REQUESTS
    max_head_bytes: int = 16 * 2**10
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    idle_timeout_s: float = 5.0


class LimitedProtocol(H11Protocol):
    """The protocol of one connection, with :class:`ConnectionLimits` on what a client may send and when.

    ``phase`` is what the connection waits for: the headers (``head``) or ``body`` of a request, the application's
    ``answer``, the end of a pause before a refusal or before anything is read (``held``), the next request (``idle``),
    or, after a refusal, the end of what the client sends (``closing``). ``arrivals`` counts the connections of all
    networks.
    """

    def __init__(self, *arguments: Any, limits: ConnectionLimits, arrivals: Buckets, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._arrivals, self._network = arrivals, ""
        self.phase = "head"
        self.phase_since_s = time.monotonic()
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        # In the state of each request, for `Guard`.
        self.app_state = {**self.app_state, "hold": partial(self._enter, "held"), "welcome": self._welcome}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection. If there are now more connections than the limit, abort some that are not waiting for
        the application's answer: the longest waiting ones, of the client address that has most of them.
        """
        super().connection_made(transport)
        # An IPv4 client of a socket for both families, as `::ffff:192.0.2.1`.
        if self.client is not None and self.client[0].startswith(_MAPPED):
            self.client = (self.client[0].removeprefix(_MAPPED), self.client[1])
        # A response leaves in several pieces; asyncio does not set this for a socket that it did not make.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        address = self.client[0] if self.client is not None else ""
        if address and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            self._network = network_of(address)
        is_many = self._network and self._arrivals.wait_s(self._network, now_s=time.monotonic()) > 0
        self._enter("held" if is_many else "head")
        if is_many:
            self._network = ""  # nothing was taken, so nothing may be given back
            transport.pause_reading()
            self._deadline = self.loop.call_later(_HELD_S, self._begin)
        if len(self.connections) <= self._limits.max_connections:
            return
        connections: Any = self.connections  # uvicorn's type does not know this protocol
        waiting = [connection for connection in connections if connection.phase != "answer"]
        # Without the port.
        addresses = {one: network_of(one.client[0]) if one.client else "" for one in waiting}
        busiest = Counter(addresses.values()).most_common(1)[0][0] if waiting else None
        most = sorted((one for one in waiting if addresses[one] == busiest), key=lambda one: one.phase_since_s)
        # Several at once: the choice looks at all connections, which would be slow for each one of a flood.
        for connection in most[: 1 + len(connections) // _EVICTED_SHARE] or [self]:
            connection.abort()

    def _begin(self) -> None:
        """Read what a connection sends that had to wait; close it if its client has left meanwhile, so that nothing of
        it costs more than the connection."""
        left = select.poll()
        left.register(self.transport.get_extra_info("socket"), select.POLLRDHUP)
        if left.poll(0):
            self.abort()
            return
        self._deadline = None
        self._enter("head")
        self.transport.resume_reading()

    def _welcome(self) -> None:
        """Count this connection no longer: its client is known."""
        if self._network:
            self._arrivals.give_back(self._network)
            self._network = ""

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines of the connection."""
        for timer in (self._deadline, self._write_deadline):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass received bytes to the parser: one request at a time, and headers in slices of 4 KiB."""
        while data and self.phase != "closing" and not self.transport.is_closing():
            if self.phase in ("answer", "held"):  # a second request before the first is answered
                self.cycle.keep_alive = False
                return
            size = len(data) if self.phase == "body" else _SLICE_BYTES
            super().data_received(data[:size])
            data = data[size:]
            if self.cycle is not None and self.cycle.transport is self.transport:
                # uvicorn closes the transport of a response at its end, which would cut off a client that still sends.
                own, cycle = self.transport, self.cycle
                cycle.transport = SimpleNamespace(write=own.write, is_closing=own.is_closing, close=self.finish)  # type: ignore[assignment]
            if self.phase != "closing":
                phases: dict[Any, str] = {h11.SEND_BODY: "body", h11.IDLE: "head"}
                self._enter(phases.get(self.conn.their_state, "answer"))

    def on_response_complete(self) -> None:
        """Wait for the next request, or close the connection if the last request was not read completely."""
        if self.phase == "closing":
            self.server_state.total_requests += 1
            return
        # The rest of a body must not be taken for the next request on this connection.
        if not self.is_read and not self.transport.is_closing():
            self.server_state.total_requests += 1
            self.finish()
            return
        super().on_response_complete()
        if self.transport.is_closing():
            self._enter("closing")
        elif self.phase != "closing":
            self._enter("idle")

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, even if its client has not fetched the last response."""
        super().timeout_keep_alive_handler()
        self._enter("closing")

    def pause_writing(self) -> None:
        """Start a deadline, after which the connection is aborted if the client fetches nothing of the response."""
        super().pause_writing()
        self._write_deadline = self.loop.call_later(self._limits.write_timeout_s, self.abort)

    def resume_writing(self) -> None:
        """Cancel the deadline that :meth:`pause_writing` started, because the client has fetched data."""
        if self._write_deadline is not None:
            self._write_deadline.cancel()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not valid HTTP, or whose header section is too large."""
        size, most = len(self.conn.trailing_data[0]), self._limits.max_head_bytes
        if size > most:
            self._refuse(431, fault("headers", f"{size} bytes", f"Expected at most {most} bytes; send fewer headers."))
        else:
            self._refuse(400, fault("request", "", msg))

    def abort(self) -> None:
        """Close the connection immediately, without sending the rest of a response."""
        # asyncio calls `connection_lost` in the next turn of the loop; the place has to be free now.
        self.connections.discard(self)
        self.transport.abort()

    @property
    def is_read(self) -> bool:
        """True if everything that the client sent has been parsed."""
        return self.conn.their_state is not h11.SEND_BODY and not self.conn.trailing_data[0]

    def finish(self, *, is_refused: bool = False) -> None:
        """Close the connection after a response.

        If the client may still be sending, first discard what it sends, for two seconds. An immediate close would reset
        the connection, and the client could lose the response.
        """
        if self.is_read and not is_refused:
            self.transport.close()
            return
        self._enter("closing")
        # Closing a socket with unread bytes resets the connection, and the client may lose the response.
        self.flow.resume_reading()
        # TLS cannot close one direction. OSError: the client may be gone.
        with contextlib.suppress(OSError, NotImplementedError):
            self.transport.write_eof()

    def _enter(self, phase: str) -> None:
        # Bytes that trickle in do not move the deadline.
        if phase == self.phase and self._deadline is not None:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self.phase, self.phase_since_s = phase, time.monotonic()
        limits = self._limits
        seconds = {"head": limits.head_timeout_s, "body": limits.body_timeout_s, "closing": _LINGER_S}.get(phase)
        late = self.abort if phase == "closing" else self._too_late
        self._deadline = None if seconds is None else self.loop.call_later(seconds, late)

    def _too_late(self) -> None:
        if self.phase == "head" and not self.conn.trailing_data[0]:
            self.abort()  # the client has sent nothing
            return
        self._refuse(
            408, fault("request", f"no complete {self.phase}", "The request arrived too slowly; send it faster.")
        )
        # The application may be waiting for the rest of the body.
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _refuse(self, status: int, found: dict[str, str]) -> None:
        """Write an error response directly to the connection, because the HTTP parser has no complete request to
        answer.

        ``found`` is the error, a :class:`Fault` as JSON.
        """
        response = faults_response(status, [found], {"Connection": "close"})
        headers = [*response.raw_headers, *_HEADERS[self.scheme or "http"]]
        head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n".encode()
        self.transport.write(head + b"".join(b"%b: %b\r\n" % each for each in headers) + b"\r\n" + response.body)
        self.finish(is_refused=True)


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """The PEM files for TLS: a certificate with its chain, and its key without a password. ValueError if they cannot be
    used."""

    cert: Path
    key: Path

    def __post_init__(self) -> None:
        try:
            self.load_into(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ValueError(
                f"{self.cert} and {self.key}: cannot be used as certificate and key ({error}); give PEM files that "
                "belong together, the key without a password."
            ) from error

    @classmethod
    def given(cls, cert: Path | None, key: Path | None) -> TlsFiles | None:
        """Return the TLS files named by the options --tls-cert (``cert``) and --tls-key (``key``); None if neither was
        given. ValueError if only one was."""
        if (cert is None) != (key is None):
            raise ValueError(
                "--tls-cert and --tls-key: expected both, got one; give both, or neither and let a proxy terminate TLS."
            )
        # Absolute: the actor that reads them may run in another working directory.
        return cls(cert=cert.absolute(), key=key.absolute()) if cert and key else None

    def load_into(self, context: ssl.SSLContext) -> None:
        """Load both files into ``context``, so that new connections get this certificate."""

        def no_password() -> str:
            # Without a function that refuses, OpenSSL asks on the terminal and waits there.
            raise ValueError("the TLS key has a password; give a key without a password")

        context.load_cert_chain(self.cert, self.key, password=no_password)


BIND_TIMEOUT_S = 2.0
"""How long a server waits for its port, which a process that was killed a moment ago may still hold, in seconds."""
_STOP_TIMEOUT_S = 30.0
_BACKLOG, _ACCEPTED_TOGETHER = 4096, 4
_GRACE_S = 10  # less than `_STOP_TIMEOUT_S`, so that uvicorn ends its requests before its thread is abandoned
_TICKS_PER_LOOK = 20  # ticks of a tenth of a second


class ServiceError(UserError, RuntimeError):
    """Raised if a service cannot start or has ended by itself; the message names the remedy."""


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """The settings of any HTTP service: its address, limits and logs.

    ``rate`` limits the requests of one known caller, ``strangers`` the requests from one network address without a
    known token. ``tls``: the files of a certificate; None: plain HTTP. ``log_file`` gets one JSON line per request.
    ``traces``: export spans as the environment variables OTEL_EXPORTER_OTLP_* specify.
    """

    host: str = "127.0.0.1"
    port: int = 8517
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    rate: RequestRate = NO_RATE
    strangers: RequestRate = STRANGERS
    tls: TlsFiles | None = None
    log_file: Path | None = None
    traces: bool = False

    def __post_init__(self) -> None:
        if self.log_file is not None:
            is_new = not os.path.lexists(self.log_file)
            try:
                # Opened now, because the process that writes it could only fail after the start.
                PrivateFile(self.log_file).close()
                if is_new:  # the command may still be refused
                    self.log_file.unlink()
            except OSError as error:
                raise ValueError(
                    f"--log-file: {self.log_file} cannot be written ({error}); give another file."
                ) from error

    @property
    def url(self) -> str:
        """The URL of the service."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


class HttpServer:
    """An HTTP server: uvicorn in a thread, on a socket that is bound before the thread starts."""

    def __init__(
        self,
        make_app: Callable[..., FastAPI],
        settings: HttpSettings,
        *,
        tracer: Any = None,
        bind_timeout_s: float = BIND_TIMEOUT_S,
    ) -> None:
        """Start to serve the application ``make_app(settings, tracer=tracer)``.

        ``tracer`` creates a span for each request; None: one is made if ``settings.traces`` is set. If the port is in
        use, wait for it up to ``bind_timeout_s``.
        """
        # First: a port that is taken ends the start before anything else is opened, and so do files that are gone.
        listening = bind(settings.host, settings.port, timeout_s=bind_timeout_s)
        try:
            try:
                if settings.log_file is not None:
                    handler = PrivateFile(settings.log_file)
                    handler.setFormatter(JsonLines())
                    # Other packages log warnings only: they may log what this service must not, such as addresses.
                    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
                    for name in PACKAGES:
                        logging.getLogger(name).setLevel(logging.INFO)
                if settings.tls is not None:
                    replace(settings.tls)  # which reads the files: they may not be on this node
                if settings.traces and tracer is None:
                    tracer = tracer_to()
            except (OSError, ValueError, ImportError) as error:
                raise ServiceError(f"The service cannot start: {error}") from error
            self._app = app = make_app(settings, tracer=tracer)
        except BaseException:
            listening.close()  # a program that goes on can use the port
            raise
        limits = settings.limits
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _OTHER_FILES + 2 * limits.max_connections
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            # Fewer connections where this process's limit of open files may not be raised enough.
            if soft < wanted:
                limits = replace(limits, max_connections=max(1, soft // 4))
        # Every choice that uvicorn would make by what is installed is made here: the limits need this parser.
        config = uvicorn.Config(
            app,
            http=partial(LimitedProtocol, limits=limits, arrivals=Buckets(limits.arrivals)),  # type: ignore[arg-type]  # any maker of a protocol
            loop="asyncio",
            ws="none",
            log_level="error",
            access_log=False,
            server_header=False,
            backlog=_ACCEPTED_TOGETHER,
            h11_max_incomplete_event_size=limits.max_head_bytes,
            timeout_keep_alive=limits.idle_timeout_s,  # type: ignore[arg-type]  # a fraction of a second works
            timeout_graceful_shutdown=_GRACE_S,
            ssl_certfile=settings.tls.cert if settings.tls else None,
            ssl_keyfile=settings.tls.key if settings.tls else None,
        )
        self._server = _Server(config, listening, settings.tls)
        # A daemon: a request that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()
        # True while requests are accepted.
        self.is_alive = self._thread.is_alive

    def stop(self) -> None:
        """Finish the requests that have begun, then stop the server."""
        # A request whose body arrives from now on is refused. Streams end too: a graceful stop waits for all responses,
        # and a stream may last for minutes.
        self._app.state.is_closing = True
        self._server.should_exit = True
        self._thread.join(timeout=_STOP_TIMEOUT_S)


class _Server(uvicorn.Server):
    """A uvicorn server with a long queue of pending connections, which reads its TLS certificate again when the files
    change."""

    def __init__(self, config: uvicorn.Config, listening: socket.socket, tls: TlsFiles | None) -> None:
        super().__init__(config)
        self._listening, self._tls = listening, tls
        self._files = () if tls is None else (tls.cert, tls.key)
        self._versions = list(map(file_version, self._files))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio uses one number for the connections it accepts before anything else (should be few) and for those
        # that the kernel queues (should be many).
        self._listening.listen(_BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        if self._tls is not None and counter % _TICKS_PER_LOOK == 0:
            found = list(map(file_version, self._files))
            if found != self._versions:
                self._versions = found
                try:
                    # Tried on a context of its own first: a pair that is half replaced must not end the one in use.
                    replace(self._tls).load_into(self.config.ssl)  # type: ignore[arg-type]
                    _log.info("The TLS certificate was read again.")
                except (ValueError, OSError) as error:
                    _log.error("The new TLS certificate is not used; correct its files: %s", error)
        return await super().on_tick(counter)


def bind(host: str, port: int, *, timeout_s: float) -> socket.socket:
    """Return a listening socket; at ``::`` it listens for IPv4 too. If the port is in use, wait up to ``timeout_s``
    until it is free. ServiceError if it is impossible to listen at this address."""
    # A process that just died may still hold the port.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_dual = host == "::" and socket.has_dualstack_ipv6()
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline_s:
                other = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
                raise ServiceError(f"{host}:{port}: cannot listen there ({error}); give another {other}.") from error
            time.sleep(0.1)
