"""Decide which HTTP requests a service answers: callers, request rates, body sizes, and the wording of errors.

The aggregator and the published student share this module and :mod:`fairpate.http_server`. :class:`Guard` is ASGI
middleware in front of every route. A body must declare its length, so the body of an unknown caller and a body that is
too large are refused before they are read. Each error names a field, its value and the remedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, model_validator
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairpate.config_reader import expected

MAX_FAULTS = 10
OPEN_PATHS = ("/", "/livez", "/readyz", "/healthz")
_OPERATOR_PREFIX = "/v1/operator/"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")
_MAX_FIELDS = 64
_MAX_VALUE_CHARACTERS = 80
_MAX_BODY_BYTES = 2 * 2**20
# JSON around a record's features; "255.0," for a byte and "-3.4028234663852886e+38, " for a float.
_BYTES_PER_RECORD, _BYTES_PER_BYTE, _BYTES_PER_FLOAT = 1024, 6, 26
_LARGE_BODY_BYTES = 64 * 2**10
_MAX_LARGE_BODIES, _MAX_LARGE_BODIES_PER_CALLER = 32, 4
_LARGE_BYTES_PER_S = 10e6
_MAX_BUCKETS = 4096

Role = Literal["analyst", "operator"]


class Body(BaseModel):
    """A JSON object with exactly these fields, each of its own type: "3" and true are not numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        # Pydantic reports one error for each unknown field, and a body has room for a hundred thousand.
        most = max(_MAX_FIELDS, len(cls.model_fields))
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"Expected at most {most} fields, got {len(value)}")
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
    """The readiness of a service: `ok` if new queries are answered, else `failing` and the reasons."""

    status: Literal["ok", "failing"]
    reasons: list[Literal["busy", "chain", "cluster", "disk", "ledger", "votes", "unknown"]]


@dataclass(frozen=True, kw_only=True)
class KnownCaller:
    """The sender of a request. Callers with one ``name`` share limits and charges.

    ``expires_s``: when the token ends, in seconds since 1970; None: never.
    """

    name: str
    role: Role
    expires_s: float | None = None

    def __post_init__(self) -> None:
        if self.role not in ("analyst", "operator"):
            raise ValueError(f"Expected a role of analyst or operator, got {self.role}.")


LOCAL_ANALYST = KnownCaller(name="local", role="analyst")


class Tokens(Protocol):
    """The tokens that a service accepts now; both members may change while it runs."""

    @property
    def needs_token(self) -> bool:
        """True if callers must send a token."""

    def caller(self, token: str | None) -> KnownCaller | None:
        """Return the owner of ``token``; None for an unknown token."""


class NoTokens:
    """The :class:`Tokens` of a service without tokens."""

    needs_token = False

    def caller(self, token: str | None) -> KnownCaller | None:  # noqa: ARG002 - the protocol's argument
        """Return None: no caller is known by name."""
        return None


@dataclass(frozen=True, kw_only=True)
class RequestRate:
    """``per_s`` requests per second, and ``burst`` at once; inf: no limit. ValueError unless per_s > 0, burst >= 1."""

    per_s: float = math.inf
    burst: float = math.inf

    def __post_init__(self) -> None:
        if not self.per_s > 0 or not self.burst >= 1:
            raise ValueError(f"Expected per_s > 0 and burst >= 1, got {self.per_s} and {self.burst}.")


STRANGERS = RequestRate(per_s=2.0, burst=20.0)
"""The rate of one address whose requests carry no known token; it makes guessing tokens slow."""


class Buckets:
    """One token bucket for each name under one rule, full at the start; the most recently used names are kept."""

    def __init__(self, rule: RequestRate) -> None:
        self._rule = rule
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, name: str, *, now_s: float) -> float:
        """Take one request from the bucket of ``name`` and return 0; if it is empty, return the seconds to wait."""
        rule = self._rule
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


class FaultError(HTTPException):
    """A request that is refused with one error; FastAPI handles it wherever it is raised."""

    def __init__(
        self, status: int, field: str, value: object, remedy: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, detail=remedy, headers=headers)
        self.fault = fault(field, value, remedy)


def fault(field: str, value: object, remedy: str) -> dict[str, str]:
    """Return a :class:`Fault` as JSON; a long value is cut to 80 characters."""
    if isinstance(value, bytes):
        value = value[: _MAX_VALUE_CHARACTERS + 1].decode("utf-8", "backslashreplace")
    if isinstance(value, str):
        text = value
    else:
        text = ""
        # Encoded piece by piece: a value may have megabytes, and only its start is shown.
        for piece in json.JSONEncoder(default=str).iterencode(value):
            text += piece
            if len(text) > _MAX_VALUE_CHARACTERS:
                break
    cut = text if len(text) <= _MAX_VALUE_CHARACTERS else text[:_MAX_VALUE_CHARACTERS] + "..."
    # JSON may contain half of a UTF-16 pair, which UTF-8 cannot encode.
    return {"field": field, "value": cut.encode("utf-8", "backslashreplace").decode(), "remedy": remedy}


def field_of(error: Mapping[str, Any]) -> list[str]:
    """Return the path to the field of one of pydantic's errors; empty where the whole body is meant."""
    if error["type"] == "json_invalid":  # the remedy names the position in the text
        return []
    return [str(part) for part in error["loc"] if part not in ("body", "path", "query")]


def remedy_for(error: Mapping[str, Any]) -> str:
    """Return the remedy for one of pydantic's errors."""
    if error["type"] == "extra_forbidden":
        return "Unknown field; leave it out."
    if error["type"] == "missing":
        return "Required; add this field."
    if error["type"] == "json_invalid":
        return f"Expected JSON; {error['ctx']['error']}."
    if isinstance(error.get("input"), bytes):  # FastAPI parses no body of another media type
        return "Expected JSON; send Content-Type: application/json."
    text = expected(error)
    return f"{text[:1].upper()}{text[1:]}."


def largest_body_bytes(record_shape: tuple[int, ...], *, is_bytes: bool, most_records: int) -> int:
    """Return the largest body that ``most_records`` records of this shape need.

    At most 2 MiB, or the size of one record where that is more.
    """
    record = _BYTES_PER_RECORD + (_BYTES_PER_BYTE if is_bytes else _BYTES_PER_FLOAT) * math.prod(record_shape)
    return max(record, min(_MAX_BODY_BYTES, most_records * record))


class Guard:
    """ASGI middleware in front of all routes: tokens, roles, request rates, and the size and time of bodies.

    Sets ``scope["state"]["caller"]`` (None if the service needs no token and is ``open_to_all``) and
    ``scope["state"]["is_admitted"]``, a function that returns whether the caller would still be admitted. Without
    tokens a service that is not ``open_to_all`` answers to the names of this machine only, so that a web page cannot
    reach it through a host name of its own (DNS rebinding). ``max_body_bytes`` is called for each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Tokens,
        max_body_bytes: Callable[[], int],
        rate: RequestRate,
        strangers: RequestRate = STRANGERS,
        open_to_all: bool = False,
        body_timeout_s: float = 30.0,
    ) -> None:
        self._app, self._tokens = app, tokens
        self._rates, self._strangers = Buckets(rate), Buckets(strangers)
        self._max_body_bytes, self._body_timeout_s = max_body_bytes, body_timeout_s
        self._open_to_all = open_to_all
        self._large: Counter[str] = Counter()
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit the request, read its body and pass both on; or refuse it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
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
                now = self._tokens.caller(given)
                return caller is None or (now is not None and (now.name, now.role) == (caller.name, caller.role))

            # A stream checks again while it runs: its token may be revoked meanwhile.
            scope.setdefault("state", {}).update(caller=caller, is_admitted=is_admitted)
            # No open path uses a body, so the body of a stranger is never read.
            if length == 0 or scope["path"] in OPEN_PATHS:
                await self._app(scope, receive, send_without_body)
                return
            is_large = length > _LARGE_BODY_BYTES
            with self._place(name, length) if is_large else contextlib.nullcontext():
                body = bytearray()
                try:
                    # Before the turn below: a caller that sends slowly delays no other caller.
                    async with asyncio.timeout(self._body_timeout_s):
                        has_more = True
                        while has_more:
                            message = await receive()
                            if message["type"] == "http.disconnect":
                                return
                            body += message.get("body", b"")
                            has_more = message.get("more_body", False)
                except TimeoutError:
                    raise FaultError(408, "request", "no complete body", "Too slow; send it at once.") from None
                if is_large:
                    # A pause before a large body is parsed lets the event loop answer other requests.
                    async with self._turn:
                        await asyncio.sleep(length / _LARGE_BYTES_PER_S)
                messages: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

                async def replay() -> Message:
                    # After the body come the real messages, which report when the caller leaves.
                    return messages.pop() if messages else await receive()

                await self._app(scope, replay, send)
        except FaultError as refused:
            content = json.dumps({"errors": [refused.fault]}).encode()
            replies = {"content-type": "application/json", "content-length": str(len(content))}
            replies |= {name.lower(): value for name, value in (refused.headers or {}).items()}
            if refused.status_code == 401:
                replies["www-authenticate"] = "Bearer"
            encoded = [(name.encode(), value.encode()) for name, value in replies.items()]
            await send_without_body({"type": "http.response.start", "status": refused.status_code, "headers": encoded})
            await send({"type": "http.response.body", "body": content})

    def _admit(
        self, scope: Scope, headers: dict[bytes, str], token: str | None, length: int
    ) -> tuple[KnownCaller | None, str]:
        """Return the caller and the name that its requests are counted under. FaultError for a refused request."""
        needs_token = self._tokens.needs_token
        is_anybody = self._open_to_all and not needs_token
        if not needs_token and not self._open_to_all:
            host = headers.get(b"host", "")
            if (host if host.endswith("]") else host.rpartition(":")[0] or host).lower() not in _LOOPBACK_NAMES:
                raise FaultError(400, "Host", host, "Without tokens only this machine is served; ask 127.0.0.1.")
        # A proxy may read the first of two headers and this service the last.
        is_ambiguous = sum(name == b"authorization" for name, _ in scope["headers"]) > 1
        caller = None if is_ambiguous or is_anybody else self._tokens.caller(token)
        # A token's name has no blank, so an address cannot be mistaken for one.
        name = caller.name if caller is not None else f"address {(scope.get('client') or ('',))[0]}"
        if scope["path"] not in OPEN_PATHS or is_ambiguous:
            # Counted before the refusals below, so that guessing tokens is slowed down as well.
            buckets = self._rates if caller is not None or is_anybody else self._strangers
            if wait_s := buckets.wait_s(name, now_s=time.monotonic()):
                remedy = f"Too many requests; wait {wait_s:.1f} s, or send several queries in one."
                raise FaultError(429, "requests", "too many", remedy, {"Retry-After": str(math.ceil(wait_s))})
            if is_ambiguous:
                raise FaultError(400, "Authorization", "(not shown)", "Expected one Authorization header; send one.")
            if caller is None and needs_token:
                raise FaultError(401, "Authorization", "(not shown)", "Send a bearer token of this service.")
            if scope["path"].startswith(_OPERATOR_PREFIX) and caller is not None and caller.role != "operator":
                raise FaultError(403, "Authorization", caller.role, "For operators; send the operator's token.")
        elif caller is None and not self._open_to_all:
            caller = LOCAL_ANALYST
        if (coding := headers.get(b"transfer-encoding")) is not None:
            raise FaultError(411, "Transfer-Encoding", coding, "Send Content-Length instead.")
        if (coding := headers.get(b"content-encoding", "identity")).lower() != "identity":
            raise FaultError(415, "Content-Encoding", coding, "Send the body without compression.")
        if length > (most := self._max_body_bytes()):
            raise FaultError(
                413, "body", f"{length} bytes", f"Expected at most {most} bytes; send fewer records at once."
            )
        return caller, name

    @contextlib.contextmanager
    def _place(self, name: str, length: int) -> Iterator[None]:
        """Hold one of the few places for large bodies. FaultError 503 where all, or all of this caller, are taken."""
        # Bodies that are received are held in memory. The places of one caller are few, so that a caller that sends
        # slowly over many connections leaves places for others.
        if self._large.total() >= _MAX_LARGE_BODIES or self._large[name] >= _MAX_LARGE_BODIES_PER_CALLER:
            remedy = "Too many large requests at the same time; ask again later, or send fewer queries at once."
            raise FaultError(503, "body", f"{length} bytes", remedy, {"Retry-After": "2"})
        self._large[name] += 1
        try:
            yield
        finally:
            self._large[name] -= 1
            if not self._large[name]:
                # Names of strangers are addresses: kept at 0, they would fill the memory.
                del self._large[name]
