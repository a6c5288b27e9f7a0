"""Which requests an HTTP service answers: callers, request rates, sizes of bodies, and how faults are worded.

The aggregator and the published student share this module and :mod:`fairpate.http_server`. :class:`Guard` stands in
front of every route as pure ASGI, so that the body of an unknown caller, or one that is too large, is never read: its
length must be declared. Each fault names a field, its value and the remedy.
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
BODY_TIMEOUT_S = 30.0
OPEN_PATHS = ("/", "/livez", "/readyz", "/healthz")
OPERATOR_PREFIX = "/v1/operator/"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")
_MAX_FIELDS = 64  # or as many as a model has
_MAX_VALUE_CHARACTERS = 80
_MAX_BODY_BYTES = 2 * 2**20
# Room for a record: JSON around its features, "255.0," for a byte and "-3.4028234663852886e+38, " for a float.
_BYTES_BESIDE_FEATURES, _BYTES_PER_BYTE, _BYTES_PER_FLOAT = 1024, 6, 26
_LARGE_BODY_BYTES = 64 * 2**10
_MAX_LARGE_BODIES, _MAX_LARGE_BODIES_OF_ONE = 32, 4
_LARGE_BYTES_PER_S = 10e6
_MAX_BUCKETS = 4096

Role = Literal["analyst", "operator"]


class Body(BaseModel):
    """A JSON object with exactly these fields, each of its own type: "3" and true are not numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        # Each unknown field would be an error of its own, and a body has room for a hundred thousand.
        most = max(_MAX_FIELDS, len(cls.model_fields))
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"Expected at most {most} fields, got {len(value)}")
        return value


class Fault(Body):
    """What was wrong: the field, its value and the remedy."""

    field: str
    value: str
    remedy: str


class Faults(Body):
    """The body of every response that is not a success."""

    errors: list[Fault]


class Health(Body):
    """Whether new queries are being answered, and what is missing if not."""

    status: Literal["ok", "failing"]
    reasons: list[Literal["busy", "chain", "cluster", "disk", "ledger", "votes", "unknown"]]


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who sent a request. Callers of one ``name`` share what they may spend. ``expires_s``: since 1970; None: never."""

    name: str
    role: Role
    expires_s: float | None = None

    def __post_init__(self) -> None:
        if self.role not in ("analyst", "operator"):
            raise ValueError(f"Expected a role of analyst or operator, got {self.role}.")


LOCAL_ANALYST = Caller(name="local", role="analyst")


class Tokens(Protocol):
    """The tokens that a service accepts now; both members may change while it runs."""

    @property
    def needs_token(self) -> bool:
        """Whether callers must send a token."""

    def caller(self, token: str | None) -> Caller | None:
        """Return the owner of ``token``; None for an unknown token."""


class NoTokens:
    """The :class:`Tokens` of a service that asks for none."""

    needs_token = False

    def caller(self, token: str | None) -> Caller | None:  # noqa: ARG002 - the protocol's argument
        """Return None: nobody is known by name."""
        return None


@dataclass(frozen=True, kw_only=True)
class RequestRate:
    """``per_s`` requests per second, and ``burst`` at once; inf: no limit. ValueError for a rate that lets none in."""

    per_s: float = math.inf
    burst: float = math.inf

    def __post_init__(self) -> None:
        if not self.per_s > 0 or not self.burst >= 1:
            raise ValueError(f"Expected per_s > 0 and burst >= 1, got {self.per_s} and {self.burst}.")


STRANGERS = RequestRate(per_s=2.0, burst=20.0)
"""The rate of one address whose requests carry no known token, so that guessing tokens is slow."""


class Buckets:
    """A token bucket for each name under one rule, full at the start; only the names heard of last are kept."""

    def __init__(self, rule: RequestRate) -> None:
        self._rule = rule
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, name: str, *, now_s: float) -> float:
        """Take one request from ``name``'s bucket and return 0; or return the seconds until there is one."""
        rule = self._rule
        if math.isinf(rule.per_s):
            return 0.0
        # Taken out and put back behind all others, so that the first is the one not heard of for longest.
        level, filled_s = self._levels.pop(name, (rule.burst, now_s))
        level = min(rule.burst, level + (now_s - filled_s) * rule.per_s)
        taken = level >= 1
        self._levels[name] = (level - taken, now_s)
        if len(self._levels) > _MAX_BUCKETS:
            self._levels.popitem(last=False)
        return 0.0 if taken else (1 - level) / rule.per_s


class FaultError(HTTPException):
    """A request that is refused with one fault; FastAPI passes this type on from wherever it is raised."""

    def __init__(
        self, status: int, field: str, value: object, remedy: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, detail=remedy, headers=headers)
        self.fault = fault(field, value, remedy)


def fault(field: str, value: object, remedy: str) -> dict[str, str]:
    """Return ``field``, ``value`` and ``remedy`` as they are sent; a long value is cut to 80 characters."""
    if isinstance(value, bytes):
        value = value[: _MAX_VALUE_CHARACTERS + 1].decode("utf-8", "backslashreplace")
    if isinstance(value, str):
        text = value
    else:
        text = ""
        # Piece by piece: a value may be megabytes, and only its start is shown.
        for piece in json.JSONEncoder(default=str).iterencode(value):
            text += piece
            if len(text) > _MAX_VALUE_CHARACTERS:
                break
    cut = text if len(text) <= _MAX_VALUE_CHARACTERS else text[:_MAX_VALUE_CHARACTERS] + "..."
    # JSON may bring half of a pair of UTF-16, which cannot leave as UTF-8.
    return {"field": field, "value": cut.encode("utf-8", "backslashreplace").decode(), "remedy": remedy}


def field_of(error: Mapping[str, Any]) -> list[str]:
    """The names that lead to the field of one of pydantic's errors; none where the whole body is meant."""
    if error["type"] == "json_invalid":  # the remedy names the place in the text
        return []
    return [str(part) for part in error["loc"] if part not in ("body", "path", "query")]


def remedy_for(error: Mapping[str, Any]) -> str:
    """What to do about one of pydantic's errors."""
    if error["type"] == "extra_forbidden":
        return "Unknown field; leave it out."
    if error["type"] == "missing":
        return "Required; add this field."
    if error["type"] == "json_invalid":
        return f"Expected JSON; {error['ctx']['error']}."
    if isinstance(error.get("input"), bytes):  # a body of another media type is not parsed
        return "Expected JSON; send Content-Type: application/json."
    said = expected(error)
    return f"{said[:1].upper()}{said[1:]}."


def declared_length(headers: Mapping[bytes, str], most: int) -> int:
    """Return the declared bytes of the body. FaultError where the length is missing, or above ``most``."""
    if b"transfer-encoding" in headers:
        raise FaultError(411, "Transfer-Encoding", headers[b"transfer-encoding"], "Send Content-Length instead.")
    if headers.get(b"content-encoding", "identity").lower() != "identity":
        raise FaultError(415, "Content-Encoding", headers[b"content-encoding"], "Send the body as it is.")
    length = int(headers.get(b"content-length", "0"))  # the parser has checked that these are digits
    if length > most:
        raise FaultError(413, "body", f"{length} bytes", f"Expected at most {most} bytes; send fewer records at once.")
    return length


def largest_body_bytes(record_shape: tuple[int, ...], *, is_bytes: bool, most_records: int) -> int:
    """The largest body that ``most_records`` records of this shape need: 2 MiB, or one record where that is more."""
    record = _BYTES_BESIDE_FEATURES + (_BYTES_PER_BYTE if is_bytes else _BYTES_PER_FLOAT) * math.prod(record_shape)
    return max(record, min(_MAX_BODY_BYTES, most_records * record))


class Guard:
    """ASGI middleware in front of all routes: tokens, roles, rates, and the size and time of bodies.

    Puts ``caller`` into ``scope["state"]`` (None: a service that needs no token and is open to everybody), and
    ``is_admitted``, which tells whether the caller would be admitted now. Without tokens a service answers to this
    machine's own names only, which also keeps web pages from reaching it through a name of theirs (DNS rebinding);
    with ``open_to_all`` it answers everybody then. ``max_body_bytes`` is asked at each request.
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
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._app, self._tokens = app, tokens
        self._rates, self._strangers = Buckets(rate), Buckets(strangers)
        self._max_body_bytes, self._body_timeout_s = max_body_bytes, body_timeout_s
        self._open_to_all = open_to_all
        self._large: Counter[str] = Counter()
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit the request, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        try:
            caller = self._admit(scope, headers)
            length = declared_length(headers, self._max_body_bytes())
            state = scope.setdefault("state", {})
            # Streams outlive their admission: they ask again, and end with a token that was revoked meanwhile.
            state["caller"], state["is_admitted"] = caller, lambda: self._is_still(caller, headers)
            # No open path has a use for a body, so that of a stranger is never read.
            if length == 0 or scope["path"] in OPEN_PATHS:
                await self._app(scope, receive, send)
                return
            with self._place(_name_of(caller, scope), length):
                try:
                    # Outside the turn below: a caller that sends slowly holds up nobody else.
                    body = await asyncio.wait_for(_read_body(receive), self._body_timeout_s)
                except TimeoutError:
                    raise FaultError(408, "request", "no complete body", "Too slow; send it at once.") from None
                if body is None:
                    return
                if length > _LARGE_BODY_BYTES:
                    # A pause before a large body is parsed, so that requests beside it go on.
                    async with self._turn:
                        await asyncio.sleep(length / _LARGE_BYTES_PER_S)
                await self._app(scope, _with_body(body, receive), send)
        except FaultError as refused:
            await _respond(send, refused)

    def _admit(self, scope: Scope, headers: dict[bytes, str]) -> Caller | None:
        """The caller of an admitted request. FaultError for any other."""
        needs_token = self._tokens.needs_token
        if not needs_token and not self._open_to_all:
            _check_host(headers.get(b"host", ""))
        # A proxy may read the first of two headers and this service the last.
        is_ambiguous = sum(name == b"authorization" for name, _ in scope["headers"]) > 1
        is_anybody = self._open_to_all and not needs_token
        caller = None if is_ambiguous or is_anybody else self._caller(headers)
        if scope["path"] in OPEN_PATHS and not is_ambiguous:
            return caller or (None if self._open_to_all else LOCAL_ANALYST)
        # Before the refusals below, so that guessing tokens is slowed down as well.
        self._slow_down(caller, scope, is_open=is_anybody)
        if is_ambiguous:
            raise FaultError(400, "Authorization", "(not shown)", "Expected one Authorization header; send one.")
        if caller is None and needs_token:
            raise FaultError(401, "Authorization", "(not shown)", "Send a bearer token of this service.")
        if scope["path"].startswith(OPERATOR_PREFIX) and caller is not None and caller.role != "operator":
            raise FaultError(403, "Authorization", caller.role, "For operators; send the operator's token.")
        return caller

    def _slow_down(self, caller: Caller | None, scope: Scope, *, is_open: bool) -> None:
        """FaultError for a request too many, of a caller or of an address without a known token."""
        buckets = self._rates if caller is not None or is_open else self._strangers
        wait_s = buckets.wait_s(_name_of(caller, scope), now_s=time.monotonic())
        if wait_s:
            remedy = f"Too many requests; wait {wait_s:.1f} s, or send several queries in one."
            raise FaultError(429, "requests", "too many", remedy, {"Retry-After": str(math.ceil(wait_s))})

    def _caller(self, headers: dict[bytes, str]) -> Caller | None:
        scheme, _, token = headers.get(b"authorization", "").partition(" ")
        return self._tokens.caller(token.strip() if scheme.lower() == "bearer" else None)

    def _is_still(self, caller: Caller | None, headers: dict[bytes, str]) -> bool:
        now = self._caller(headers)
        return caller is None or (now is not None and (now.name, now.role) == (caller.name, caller.role))

    @contextlib.contextmanager
    def _place(self, name: str, length: int) -> Iterator[None]:
        """A place for one body of ``name``. FaultError 503 where a large one finds none."""
        if length <= _LARGE_BODY_BYTES:
            yield
            return
        # Refused before it is read, for bodies that wait lie in memory; and by caller, so that one who sends slowly
        # over many connections leaves places for all others.
        if self._large.total() >= _MAX_LARGE_BODIES or self._large[name] >= _MAX_LARGE_BODIES_OF_ONE:
            remedy = "Too many large requests at the same time; ask again later, or send fewer queries at once."
            raise FaultError(503, "body", f"{length} bytes", remedy, {"Retry-After": "2"})
        self._large[name] += 1
        try:
            yield
        finally:
            self._large[name] -= 1
            if not self._large[name]:
                del self._large[name]


def _name_of(caller: Caller | None, scope: Scope) -> str:
    """What a caller is counted under: the name of its token, else its address."""
    # No token's name has a blank, so no address can be taken for one.
    return caller.name if caller is not None else f"address {(scope.get('client') or ('',))[0]}"


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body; None if the caller left."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _with_body(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives the ``body`` that was read already, and then whatever comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        # After the body the real one, which says when the caller leaves.
        return messages.pop() if messages else await receive()

    return replayed


def _check_host(host: str) -> None:
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name.lower() not in LOOPBACK_NAMES:
        raise FaultError(400, "Host", host, "Without tokens only this machine is served; ask 127.0.0.1.")


async def _respond(send: Send, refused: FaultError) -> None:
    body = json.dumps({"errors": [refused.fault]}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in (refused.headers or {}).items()]
    if refused.status_code == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refused.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
