"""In front of every route: which host is asked for, who asks, and how large a body may be.

Pure ASGI, so that an unknown caller's body is never read. Every path but the open ones needs a token once one is
configured; without tokens only this machine's own names are served, which also keeps web pages from reaching the
service through a name of theirs (DNS rebinding).
"""

from __future__ import annotations

import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aggregator.faults import FaultError
from aggregator.tokens import LOCAL_ANALYST, LOOPBACK_NAMES, Caller, TokenBook

MAX_BODY_BYTES = 16 * 2**20
OPEN_PATHS = ("/livez", "/readyz", "/healthz", "/docs", "/openapi.json")
OPERATOR_PREFIX = "/v1/operator/"


class Door:
    """ASGI middleware; puts the caller into ``scope["state"]["caller"]``."""

    def __init__(self, app: ASGIApp, *, tokens: TokenBook, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._tokens = tokens
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit the request, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        try:
            caller = self._admit(scope["path"], headers)
            self._check_length(headers)
        except FaultError as refused:
            await _respond(send, refused)
            return
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, self._counted(receive), send)

    def _admit(self, path: str, headers: dict[bytes, str]) -> Caller:
        if self._tokens.is_empty:
            _check_host(headers.get(b"host", ""))
        caller = self._caller(headers.get(b"authorization", ""))
        if path in OPEN_PATHS:
            return caller or LOCAL_ANALYST
        if caller is None:
            raise FaultError(401, "Authorization", "(not shown)", "Send a bearer token of this service.")
        if path.startswith(OPERATOR_PREFIX) and caller.role != "operator":
            raise FaultError(403, "Authorization", caller.role, "For operators; send the operator's token.")
        return caller

    def _caller(self, authorization: str) -> Caller | None:
        if self._tokens.is_empty:
            return LOCAL_ANALYST
        scheme, _, token = authorization.partition(" ")
        return self._tokens.caller(token.strip() if scheme.lower() == "bearer" else None)

    def _check_length(self, headers: dict[bytes, str]) -> None:
        length = headers.get(b"content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > self._max_body_bytes:
            raise self._too_large(int(length))

    def _counted(self, receive: Receive) -> Receive:
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise self._too_large(received)
            return message

        return counted

    def _too_large(self, size: int) -> FaultError:
        remedy = f"Expected at most {self._max_body_bytes} bytes; send fewer queries at once."
        return FaultError(413, "body", f"{size} bytes", remedy)


def _check_host(host: str) -> None:
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name.lower() not in LOOPBACK_NAMES:
        raise FaultError(400, "Host", host, "Without tokens only this machine is served; ask 127.0.0.1.")


async def _respond(send: Send, refused: FaultError) -> None:
    body = json.dumps({"errors": [refused.fault]}).encode()
    length = str(len(body)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length)]
    if refused.status_code == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refused.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
