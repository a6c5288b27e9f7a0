"""Metrics for Prometheus, in two scopes.

The analyst's metrics would be the same with other votes: requests by route and status, the number of queries received
and of groups they were asked in, readiness, and the public side of the budget. They contain no label, no kind of reply
and no duration, because those depend on votes. A data-dependent budget ends where the votes say so, and then the
budget's numbers are left out too. The operator's metrics contain all of that, the durations of requests, and the
outcomes of queries.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from aggregator.budgets import BudgetStatus
from fairpate.types import strict

_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class ServiceMetrics:
    """The metrics of one service, in two registries of their own."""

    def __init__(self) -> None:
        # Not the library's global one, which holds facts of the process and allows one service per process.
        self._registry, self._private = CollectorRegistry(), CollectorRegistry()
        # By route, not by path: each key in a path would be another time series.
        self._requests = Counter(
            "fairpate_http_requests", "Requests answered.", ["method", "route", "status"], registry=self._registry
        )
        self._queries = Counter("fairpate_queries_received", "Queries in requests.", registry=self._registry)
        self.groups = Counter("fairpate_groups", "Groups of requests asked together.", registry=self._registry)
        self._started = Gauge("fairpate_started_seconds", "When the process started.", registry=self._registry)
        self._started.set_to_current_time()
        self._latency = Histogram(
            "fairpate_request_seconds", "From request to reply.", ["route"], buckets=_BUCKETS_S, registry=self._private
        )
        self._last_s: deque[float] = deque(maxlen=1000)
        self._gauges: dict[str, Gauge] = {}

    def count_request(self, facts: Mapping[str, Any], seconds: float) -> None:
        """Count one request (:data:`fairpate.http_server.OnResponse`)."""
        route = facts["route"]
        self._requests.labels(facts["method"], route, str(facts["status"])).inc()
        self._latency.labels(route).observe(seconds)
        if route == "/v1/queries":
            self._last_s.append(seconds)
        self._queries.inc(facts["queries"] or 0)

    def latency(self) -> dict[str, float | int | None]:
        """Return a :class:`aggregator.service.wire.Latency` of the last requests that asked queries; private."""
        ordered = sorted(self._last_s)
        found = {f"p{p}_ms": 1000 * ordered[(len(ordered) - 1) * p // 100] if ordered else None for p in (50, 90, 99)}
        return {"count": len(ordered), **found}

    def render(self, status: BudgetStatus, reasons: Sequence[str]) -> bytes:
        """Return the analyst's metrics, with budget and readiness as they are now."""
        self._set(self._registry, "fairpate_ready", "Whether new queries are answered.", float(not reasons))
        if status.kind != "data_dependent":
            for name, (text, value) in _budget(status).items():
                self._set(self._registry, f"fairpate_{name}", text, value)
        return generate_latest(self._registry)

    def render_for_operator(self, status: BudgetStatus, overview: Mapping[str, Any]) -> bytes:
        """Return the analyst's metrics and, from a :class:`aggregator.service.wire.Overview`, the private ones."""
        chain = overview["chain"]
        found: dict[str, tuple[str, float | None]] = _budget(status) | {
            "queries_left": ("Queries that the budget has room for.", overview["queries_left"]),
            "epsilon_data_dependent": ("Not to be published.", overview["epsilon_data_dependent"]),
            "open_reservations": ("Charged and never answered.", overview["open_reservations"]),
            "chain_ok": ("Whether the last verification held.", float(not chain["fault"])),
            "chain_verified_seconds": ("When the chain was last verified.", chain["at_s"]),
            "last_backup_seconds": ("When the ledger was last copied; 0: never.", overview["last_backup_s"] or 0.0),
        }
        # A ledger in a database has no disk here: a number for it would be an alert that never ends.
        if overview["disk_free_bytes"] is not None:
            found["disk_free_bytes"] = ("On the disk of the ledger.", overview["disk_free_bytes"])
        for name, (text, value) in found.items():
            self._set(self._private, f"fairpate_operator_{name}", text, value)
        for group in overview["groups"]:
            for verdict in ("answer", "confidence", "fairness", "free"):
                labels = {"group": group["group"], "outcome": verdict}
                text = "Charges by group and outcome."
                self._set(self._private, "fairpate_operator_outcomes", text, group[verdict], **labels)
        return self.render(status, overview["health"]["reasons"]) + generate_latest(self._private)

    def _set(self, registry: CollectorRegistry, name: str, text: str, value: float | None, **labels: str) -> None:
        # A registry refuses a second gauge of the same name, so each one is kept.
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, text, list(labels), registry=registry)
        gauge = self._gauges[name].labels(**labels) if labels else self._gauges[name]
        gauge.set(math.inf if value is None else value)


def _budget(status: BudgetStatus) -> dict[str, tuple[str, float | None]]:
    """Return description and value of the budget's metrics; None means no limit and is exported as infinity."""
    return {
        "queries_submitted": ("Queries charged.", status.queries_submitted),
        "queries_limit": ("Queries that may be charged.", status.max_queries),
        "epsilon_submitted": ("Spent.", strict(status.epsilon_submitted)),
        "epsilon_limit": ("What may be spent.", status.epsilon_limit),
        "budget_closed": ("Whether there is no room for a new query.", float(status.closed)),
    }
