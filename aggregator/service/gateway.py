"""Several services behind one address: ``/v1/runs/NAME/...`` is what the service of that run answers under ``/...``.

Each run has a service of its own, on a port of this machine's loopback, with its own ledger, tokens and limits. What
comes is passed on as it is, with the caller's address, and so is the answer, as it arrives; nothing is kept, and no
token is read here. A service that starts again is waited for by its callers: until then they get 503.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse

from aggregator.service.api import ServiceSettings
from aggregator.service.observing import Observed
from aggregator.service.page import gateway_page, page_headers
from aggregator.service.responses import add_error_bodies, json_response
from fairpate import __version__
from fairpate.request_faults import FaultError, declared_length

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
