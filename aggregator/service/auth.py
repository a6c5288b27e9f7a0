"""In front of every route: which host is asked for, who asks, and how large a body may be.

Pure ASGI, so that the body of an unknown caller, or one that is too large, is never read: its length must be declared.
Large bodies are read and parsed in turns, with a pause before each in proportion to its size, so that requests beside
them go on. Every path but the open ones needs a token once one is
configured; without tokens only this machine's own names are served, which also keeps web pages from reaching the
service through a name of theirs (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import json
import math
import time

from starlette.types import ASGIApp, Receive, Scope, Send

from aggregator.service.rates import Buckets, RequestRate
from aggregator.service.token_store import LiveTokens
from aggregator.service.tokens import LOCAL_ANALYST, LOOPBACK_NAMES, Caller
from fairpate.request_faults import FaultError, declared_length, read_body, with_body

_LARGE_BODY_BYTES = 64 * 2**10
_MAX_LARGE_BODIES = 16
_LARGE_BYTES_PER_S = 10e6
OPEN_PATHS = ("/", "/livez", "/readyz", "/healthz", "/docs", "/openapi.json")
OPERATOR_PREFIX = "/v1/operator/"


class Auth:
    """ASGI middleware; puts ``caller`` into ``scope["state"]``, and ``is_admitted``: whether it would be so now."""

    def __init__(
        self, app: ASGIApp, *, tokens: LiveTokens, max_body_bytes: int, rate: RequestRate, strangers: RequestRate
    ) -> None:
        self._app = app
        self._rates, self._strangers = Buckets(rate), Buckets(strangers)
        self._tokens = tokens
        self._max_body_bytes = max_body_bytes
        self._num_large = 0
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit the request, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        # The keys of an issuer may have to be fetched: awaited here, so that no lookup below blocks the loop.
        await self._tokens.prepare(_bearer(headers.get(b"authorization", "")) or "")
        try:
            caller = self._admit(scope, headers)
            length = self._body_bytes(headers)
        except FaultError as refused:
            await _respond(send, refused)
            return
        state = scope.setdefault("state", {})
        # Streams outlive their admission: they ask again, and end with a token that was revoked meanwhile.
        state["caller"], state["is_admitted"] = caller, lambda: self._is_still(caller, headers)
        if length > _LARGE_BODY_BYTES:
            await self._take_turn(length, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _admit(self, scope: Scope, headers: dict[bytes, str]) -> Caller:
        path: str = scope["path"]
        if not self._tokens.needs_token:
            _check_host(headers.get(b"host", ""))
        caller = self._caller(headers.get(b"authorization", ""))
        if path in OPEN_PATHS:
            return caller or LOCAL_ANALYST
        # Before the refusal below, so that guessing tokens is slowed down as well.
        self._slow_down(caller, scope)
        if caller is None:
            raise FaultError(401, "Authorization", "(not shown)", "Send a bearer token of this service.")
        if path.startswith(OPERATOR_PREFIX) and caller.role != "operator":
            raise FaultError(403, "Authorization", caller.role, "For operators; send the operator's token.")
        return caller

    def _slow_down(self, caller: Caller | None, scope: Scope) -> None:
        """FaultError for a request too many, of a caller or of an address that nobody knows."""
        if caller is not None:
            wait_s = self._rates.wait_s(caller.name, now_s=time.monotonic())
        else:
            wait_s = self._strangers.wait_s((scope.get("client") or ("",))[0], now_s=time.monotonic())
        if wait_s:
            remedy = f"Too many requests; wait {wait_s:.1f} s, or send several queries in one."
            raise FaultError(429, "requests", "too many", remedy, {"Retry-After": str(math.ceil(wait_s))})

    def _caller(self, authorization: str) -> Caller | None:
        return self._tokens.caller(_bearer(authorization))

    def _is_still(self, caller: Caller, headers: dict[bytes, str]) -> bool:
        now = self._caller(headers.get(b"authorization", ""))
        return now is not None and (now.name, now.role) == (caller.name, caller.role)

    def _body_bytes(self, headers: dict[bytes, str]) -> int:
        """The declared length of the body. FaultError if it may not be read."""
        length = declared_length(headers, self._max_body_bytes)
        # Refused before it is read: those that wait for their turn lie in memory.
        if length > _LARGE_BODY_BYTES and self._num_large >= _MAX_LARGE_BODIES:
            remedy = "Too many large requests at the same time; ask again later, or send fewer queries at once."
            raise FaultError(503, "body", f"{length} bytes", remedy, {"Retry-After": "2"})
        return length

    async def _take_turn(self, length: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the large body, wait, then pass the request on; what parses it does not wait before that."""
        self._num_large += 1
        try:
            # Outside the turn: a caller that sends slowly holds up nobody else.
            body = await read_body(receive)
            if body is not None:
                async with self._turn:
                    await asyncio.sleep(length / _LARGE_BYTES_PER_S)
                await self._app(scope, with_body(body, receive), send)
        finally:
            self._num_large -= 1


def _bearer(authorization: str) -> str | None:
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _check_host(host: str) -> None:
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name.lower() not in LOOPBACK_NAMES:
        raise FaultError(400, "Host", host, "Without tokens only this machine is served; ask 127.0.0.1.")


async def _respond(send: Send, refused: FaultError) -> None:
    body = json.dumps({"errors": [refused.fault]}).encode()
    length = str(len(body)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length)]
    headers += [(name.lower().encode(), value.encode()) for name, value in (refused.headers or {}).items()]
    if refused.status_code == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refused.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
