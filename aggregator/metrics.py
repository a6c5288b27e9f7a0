"""Counters for Prometheus. Every one of them would be the same with other votes.

Requests by route and status, how many queries came and in how many groups they were asked, and the public side of the
budget. No label, no kind of reply, no duration: those follow from votes. A data-dependent budget stops where the votes
say so, and then the budget's numbers are left out too.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aggregator.session import BudgetStatus
from fairpate.strict_json import strict

CONTENT_TYPE = CONTENT_TYPE_LATEST


_METHODS = ("GET", "HEAD", "POST")


class ServiceMetrics:
    """The counters of one service, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "fairpate_http_requests", "Requests answered.", ["method", "route", "status"], registry=self._registry
        )
        self._queries = Counter("fairpate_queries_received", "Queries in requests.", registry=self._registry)
        self._groups = Counter("fairpate_groups", "Groups of requests asked together.", registry=self._registry)
        self._started = Gauge("fairpate_started_seconds", "When the process started.", registry=self._registry)
        self._started.set_to_current_time()
        self._budget: dict[str, Gauge] = {}

    def count_request(self, method: str, route: str, status: int) -> None:
        """One request was answered."""
        self._requests.labels(method, route, str(status)).inc()

    def count_queries(self, number: int) -> None:
        """``number`` queries came in one request."""
        self._queries.inc(number)

    def count_group(self) -> None:
        """One group of requests was asked."""
        self._groups.inc()

    def render(self, status: BudgetStatus) -> bytes:
        """The exposition, with the budget as it is now."""
        if status.kind != "data_dependent":
            self._set("fairpate_queries_posed", "Queries charged.", status.queries_submitted)
            self._set("fairpate_epsilon_submitted", "Spent.", strict(status.epsilon_submitted))
        return generate_latest(self._registry)

    def _set(self, name: str, text: str, value: float | None) -> None:
        if name not in self._budget:
            self._budget[name] = Gauge(name, text, registry=self._registry)
        self._budget[name].set(float("inf") if value is None else value)


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

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._counters.count_request(method, getattr(scope.get("route"), "path", "none"), message["status"])
            await send(message)

        await self._app(scope, receive, counted_send)
