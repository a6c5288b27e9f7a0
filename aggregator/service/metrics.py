"""Counters for Prometheus, in two scopes.

What an analyst may scrape would be the same with other votes: requests by route and status, how many queries came and
in how many groups they were asked, whether new queries are answered, and the public side of the budget. No label, no
kind of reply, no duration: those follow from votes. A data-dependent budget stops where the votes say so, and then the
budget's numbers are left out too. What only an operator may scrape has all of that, how long requests took, and what
became of queries.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aggregator.budgets import BudgetStatus
from fairpate.http_server import method_of, route_of
from fairpate.types import strict

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
    found: dict[str, tuple[str, float | None]] = {
        "queries_left": ("Queries that the budget has room for.", overview["queries_left"]),
        "epsilon_data_dependent": ("Not to be published.", overview["epsilon_data_dependent"]),
        "open_reservations": ("Charged and never answered.", overview["open_reservations"]),
        "chain_ok": ("Whether the last verification held.", float(not overview["chain"]["fault"])),
        "chain_verified_seconds": ("When the chain was last verified.", overview["chain"]["at_s"]),
        "last_backup_seconds": ("When the ledger was last copied; 0: never.", backup_s or 0.0),
    }
    # Left out for a ledger in a database, whose disk is not seen from here: a number would be an alert for ever.
    if overview["disk_free_bytes"] is not None:
        found["disk_free_bytes"] = ("On the disk of the ledger.", overview["disk_free_bytes"])
    return found


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
