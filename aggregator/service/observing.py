"""What an operator's tools hear of every request: an id, a line in the log, a span of a trace. Nothing of votes.

A request has an id, the caller's own (``X-Request-Id``) where that is a plain word, and every response says it. A line
and a span hold method, route, status, caller, number of queries and id: all of that would be the same with other
votes, for both kinds of refusal are one status. How long a request took is in no line. A span begins and ends when the
request and its reply do, which its caller sees as well; nothing inside a request has a span of its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import logging.handlers
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_REQUESTS = logging.getLogger("fairpate.requests")
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS = ("GET", "HEAD", "POST")
_OWN = ("fairpate", "aggregator", "teachers", "student")
_FIELDS = ("method", "route", "status", "caller", "address", "queries")
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


def log_json_lines(path: Path) -> None:
    """Append what this process logs to ``path`` as JSON lines, one for each request too.

    Of other packages only warnings: what they tell of, such as addresses that were asked for, is not chosen here. A
    file that was moved away by a rotation is made again.
    """
    handler = logging.handlers.WatchedFileHandler(path, encoding="utf-8")
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
    """ASGI middleware around everything; puts ``request_id`` into ``scope["state"]``."""

    def __init__(self, app: ASGIApp, *, tracer: Any = None) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and tell of it when its response starts."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        state = scope.setdefault("state", {})
        state["request_id"] = given if _ID.fullmatch(given := headers.get("x-request-id", "")) else secrets.token_hex(8)
        token = _id_now.set(state["request_id"])
        with contextlib.ExitStack() as opened:
            span = opened.enter_context(self._span(scope, headers)) if self._tracer else None

            async def told(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-request-id", state["request_id"].encode())]
                    facts = _facts(scope, message["status"])
                    _REQUESTS.info("request", extra=facts)
                    if span is not None:
                        _describe(span, facts, state["request_id"])
                await send(message)

            try:
                await self._app(scope, receive, told)
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
        "address": client[0] if caller is None and client and not state.get("is_told_behind") else None,
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
