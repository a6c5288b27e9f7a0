"""Prometheus metrics, request ids, logs and traces. Nothing in them depends on votes.

What an operator's tools hear of every request: an id, a line in the log, a span of a trace. Nothing of votes.

A request has an id, the caller's own (``X-Request-Id``) where that is a plain word, and every response says it. A line
and a span hold method, route, status, caller, number of queries and id: all of that would be the same with other
votes, for both kinds of refusal are one status. How long a request took is in no line. A span begins and ends when the
request and its reply do, which its caller sees as well; nothing inside a request has a span of its own.

Counters for Prometheus, in two scopes.

What an analyst may scrape would be the same with other votes: requests by route and status, how many queries came and
in how many groups they were asked, whether new queries are answered, and the public side of the budget. No label, no
kind of reply, no duration: those follow from votes. A data-dependent budget stops where the votes say so, and then the
budget's numbers are left out too. What only an operator may scrape has all of that, how long requests took, and what
became of queries.
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
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aggregator.budgets import BudgetStatus
from fairpate.types import strict

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


CONTENT_TYPE = CONTENT_TYPE_LATEST
_QUERIES = "/v1/queries"
_LAST = 1000
_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class ServiceMetrics:
    """The counters of one service, in two registries of their own."""

    def __init__(self) -> None:
        self._registry, self._private = CollectorRegistry(), CollectorRegistry()
        self._requests = Counter(
            "fairpate_http_requests", "Requests answered.", ["method", "route", "status"], registry=self._registry
        )
        self._queries = Counter("fairpate_queries_received", "Queries in requests.", registry=self._registry)
        self._groups = Counter("fairpate_groups", "Groups of requests asked together.", registry=self._registry)
        self._started = Gauge("fairpate_started_seconds", "When the process started.", registry=self._registry)
        self._started.set_to_current_time()
        self._latency = Histogram(
            "fairpate_request_seconds", "From request to reply.", ["route"], buckets=_BUCKETS_S, registry=self._private
        )
        self._last_s: deque[float] = deque(maxlen=_LAST)
        self._gauges: dict[str, Gauge] = {}

    def count_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """One request was answered, after so many seconds."""
        self._requests.labels(method, route, str(status)).inc()
        self._latency.labels(route).observe(seconds)
        if route == _QUERIES:
            self._last_s.append(seconds)

    def count_queries(self, number: int) -> None:
        """``number`` queries came in one request."""
        self._queries.inc(number)

    def count_group(self) -> None:
        """One group of requests was asked."""
        self._groups.inc()

    def latency(self) -> dict[str, float | int | None]:
        """A :class:`aggregator.service.wire.Latency`. For the operator."""
        ordered = sorted(self._last_s)
        found = {f"p{p}_ms": 1000 * ordered[(len(ordered) - 1) * p // 100] if ordered else None for p in (50, 90, 99)}
        return {"count": len(ordered), **found}

    def render(self, status: BudgetStatus, reasons: Sequence[str]) -> bytes:
        """The exposition for analysts, with budget and readiness as they are now."""
        self._set(self._registry, "fairpate_ready", "Whether new queries are answered.", float(not reasons))
        if status.kind != "data_dependent":
            for name, (text, value) in _budget(status).items():
                self._set(self._registry, name, text, value)
        return generate_latest(self._registry)

    def render_for_operator(self, status: BudgetStatus, overview: Mapping[str, Any]) -> bytes:
        """The same, and what depends on votes. Private."""
        for name, (text, value) in {**_budget(status), **_overview(overview)}.items():
            self._set(self._private, f"fairpate_operator_{name.removeprefix('fairpate_')}", text, value)
        for group in overview["groups"]:
            for verdict in ("answer", "confidence", "fairness", "free"):
                self._set(
                    self._private,
                    "fairpate_operator_outcomes",
                    "Charges by group and outcome.",
                    group[verdict],
                    group=group["group"],
                    outcome=verdict,
                )
        return self.render(status, overview["health"]["reasons"]) + generate_latest(self._private)

    def _set(self, registry: CollectorRegistry, name: str, text: str, value: float | None, **labels: str) -> None:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, text, list(labels), registry=registry)
        gauge = self._gauges[name].labels(**labels) if labels else self._gauges[name]
        gauge.set(float("inf") if value is None else value)


def _budget(status: BudgetStatus) -> dict[str, tuple[str, float | None]]:
    """Infinite where there is no limit."""
    return {
        "fairpate_queries_submitted": ("Queries charged.", status.queries_submitted),
        "fairpate_queries_limit": ("Queries that may be charged.", status.max_queries),
        "fairpate_epsilon_submitted": ("Spent.", strict(status.epsilon_submitted)),
        "fairpate_epsilon_limit": ("What may be spent.", status.epsilon_limit),
        "fairpate_budget_closed": ("Whether there is no room for a new query.", float(status.closed)),
    }


def _overview(overview: Mapping[str, Any]) -> dict[str, tuple[str, float | None]]:
    backup_s = overview["last_backup_s"]
    return {
        "queries_left": ("Queries that the budget has room for.", overview["queries_left"]),
        "epsilon_data_dependent": ("Not to be published.", overview["epsilon_data_dependent"]),
        "open_reservations": ("Charged and never answered.", overview["open_reservations"]),
        "chain_ok": ("Whether the last verification held.", float(not overview["chain"]["fault"])),
        "chain_verified_seconds": ("When the chain was last verified.", overview["chain"]["at_s"]),
        "last_backup_seconds": ("When the ledger was last copied; 0: never.", backup_s or 0.0),
        "disk_free_bytes": ("On the disk of the ledger.", overview["disk_free_bytes"] or 0),
    }


class CountRequests:
    """ASGI middleware that counts requests by route and status."""

    def __init__(self, app: ASGIApp, *, counters: ServiceMetrics) -> None:
        self._app = app
        self._counters = counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and count it when its response starts."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        began_s = time.perf_counter()

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                seconds = time.perf_counter() - began_s
                self._counters.count_request(method_of(scope), route_of(scope), message["status"], seconds)
            await send(message)

        await self._app(scope, receive, counted_send)
