"""What a service's own page shows: to an analyst budget and health, to an operator what happened and what to do.

The analyst's part is made of public numbers alone. The operator's holds what depends on votes and is not to be
published.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aggregator.ledger.stores import Place
from aggregator.service.analyst_routes import budget_json
from aggregator.service.charged import costs_of
from aggregator.service.health import Health
from aggregator.service.history import History
from aggregator.service.metrics import ServiceMetrics
from aggregator.service.outlook import advice, forecast
from aggregator.service.questions import PublicPool
from aggregator.service.verification import Verification
from aggregator.service.writer import Writer
from aggregator.session import sanitised_epsilon
from fairpate.strict_json import strict

_MOST_CALLERS = 20


class Overview:
    """The states of one service; ``last_backup`` tells when its ledger was last copied, None: never."""

    def __init__(
        self,
        writer: Writer,
        health: Health,
        verification: Verification,
        pool: PublicPool,
        counters: ServiceMetrics,
        *,
        last_backup: Callable[[], float | None],
    ) -> None:
        self._writer, self._health, self._pool, self._counters = writer, health, pool, counters
        self._verification, self._last_backup = verification, last_backup
        self._started_s = time.time()
        terms = writer.snapshot.terms
        self._history = History(num_groups=terms.num_groups, num_classes=terms.num_classes)
        snapshot = writer.snapshot
        self._history.begin(snapshot.books.ledger, snapshot.num_charges, now_s=self._started_s)

    async def watch(self, interval_s: float) -> None:
        """Note again and again what was charged, so that there is a history."""
        while True:
            await asyncio.sleep(interval_s)
            self._note()

    async def for_analyst(self) -> dict[str, Any]:
        """A :class:`aggregator.service.wire.State`."""
        snapshot = self._writer.snapshot
        status = snapshot.budget_status()
        # What a budget that votes end has room for says how they voted.
        left = None if status.kind == "data_dependent" else snapshot.room
        return {"budget": budget_json(status), "queries_left": left, "health": self._health.to_json()}

    async def for_operator(self) -> dict[str, Any]:
        """A :class:`aggregator.service.operator_wire.Overview`."""
        self._note()
        now_s, snapshot, history = time.time(), self._writer.snapshot, self._history
        status = snapshot.budget_status()
        is_exact = status.kind != "data_dependent"
        ahead = forecast(history.points, left=snapshot.room, is_exact=is_exact, now_s=now_s)
        reasons = self._health.reasons()
        told = advice(
            reasons,
            left=snapshot.room,
            total=status.queries_submitted + snapshot.room,
            lasts_s=ahead.lasts_s,
            chain=self._verification.fault,
            num_open=history.num_open,
        )
        # In this order: costs are those of the charges that the price has just priced.
        price = await asyncio.to_thread(snapshot.books.price.epsilon, snapshot.books.ledger, snapshot.num_charges)
        costs = await asyncio.to_thread(costs_of, snapshot.books, snapshot.num_charges, self._pool)
        return {
            "at_s": now_s,
            "started_s": self._started_s,
            "health": self._health.to_json(),
            "advice": [dataclasses.asdict(each) for each in told],
            "forecast": ahead.words,
            "lasts_s": ahead.lasts_s,
            "budget": budget_json(status),
            "queries_left": snapshot.room if is_exact else None,
            "epsilon_data_dependent": strict(price),
            "epsilon_sanitised": sanitised_epsilon(snapshot.published, target_delta=status.delta),
            "costs": costs,
            "points": [_point(point) for point in history.points],
            "groups": self._groups(),
            "callers": _callers(snapshot.books.ledger.charged_by_caller),
            "open_reservations": history.num_open,
            "latency": self._counters.latency(),
            "disk_free_bytes": _free_bytes(snapshot.books.ledger.place),
            "chain": self._verification.chain,
            "last_backup_s": self._last_backup(),
        }

    def _note(self) -> None:
        snapshot = self._writer.snapshot
        self._history.look(snapshot.books.ledger, snapshot.num_charges, now_s=time.time())

    def _groups(self) -> list[dict[str, Any]]:
        columns = zip(self._pool.group_names, self._history.by_group(), self._history.by_class(), strict=True)
        return [{"group": name, **counts, "answers": answers} for name, counts, answers in columns]


def _callers(charged: Mapping[str, int]) -> list[dict[str, Any]]:
    """Those who spent most, the most first."""
    most = sorted(charged.items(), key=lambda each: -each[1])[:_MOST_CALLERS]
    return [{"name": name or "the run itself", "queries": queries} for name, queries in most]


def _point(point: Any) -> dict[str, Any]:
    return {
        "at_s": point.at_s,
        "charges": point.charges,
        "answered": list(point.answered_G),
        "refused": list(point.refused_G),
    }


def _free_bytes(place: Place) -> int | None:
    """On the disk of a ledger's file; None where that is not seen from here."""
    if not isinstance(place, Path):
        return None
    try:
        disk = os.statvfs(place.parent)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize
