"""Whether the service is alive, and whether a new query can be expected to be answered now.

Alive is a process that answers. Ready is computed from facts: the ledger is there and open for writing, its chain held
when it was last verified, its disk has room, the last votes came in and the teachers' processes answer, Ray's control
process answers, the writer is not stuck. Ledger and Ray are looked at whenever somebody asks, and every second besides,
on threads and connections of their own; a look that does not come back within two seconds counts as bad. A fact that
turned bad is tried again in the background: the ledger is opened again, a vote on something public is tried and thrown
away. So the answer turns good when the cause is gone. Nothing here depends on how anybody voted, and a budget that is
used up does not count: stored replies are still given.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from aggregator.ledger.files import LedgerError
from aggregator.service.writer import Writer

Reason = Literal["busy", "chain", "cluster", "disk", "ledger", "votes", "unknown"]
_STUCK_S = 120.0
_STALE_S = 30.0
_LOOK_LIMIT_S = 2.0
_SHARED_S = 0.2  # so that those who ask anonymously, and often, cost one look in this time
_log = logging.getLogger(__name__)


class Look:
    """A look at something that may hang, on a thread of its own: one at a time, shared by all that wait for it.

    To be used from one event loop. ``ask`` raises where what it looks at is bad.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._under_way: Future[None] | None = None
        self._began_s = -_SHARED_S
        self._failed = False

    @property
    def is_bad(self) -> bool:
        """Whether the last look failed, or the one under way takes too long."""
        hangs = self._under_way is not None and time.monotonic() > self._began_s + _LOOK_LIMIT_S
        return self._failed or hangs

    async def now(self) -> None:
        """Look, for as long as the limit says at most."""
        under_way = self._under_way
        if under_way is None:
            if time.monotonic() < self._began_s + _SHARED_S:
                return
            under_way, self._began_s = Future(), time.monotonic()
            self._under_way = under_way
            # No thread of a pool: the end of the process would wait for one that hangs.
            threading.Thread(target=self._run, args=(under_way,), daemon=True, name="look").start()
        left_s = self._began_s + _LOOK_LIMIT_S - time.monotonic()
        if left_s > 0:
            await asyncio.wait([asyncio.wrap_future(under_way)], timeout=left_s)

    def _run(self, done: Future[None]) -> None:
        try:
            self._ask()
            self._failed = False
        except Exception as error:  # noqa: BLE001 - whatever it met, it is not as it should be
            if not self._failed:
                _log.warning("The service is not ready: %s", error)
            self._failed = True
        # The state first: who waits for this look reads it next.
        self._under_way = None
        done.set_result(None)


class Health:
    """The facts; :meth:`watch` runs beside the service."""

    def __init__(
        self,
        writer: Writer,
        *,
        voters_answer: Callable[[], bool],
        try_vote: Callable[[], object],
        interval_s: float,
        chain_fault: Callable[[], str] = str,
    ) -> None:
        self.votes_failed = False
        self._writer = writer
        self._voters_answer, self._try_vote = voters_answer, try_vote
        self._interval_s, self._chain_fault = interval_s, chain_fault
        self._has_room = True
        self._looked_s = time.monotonic()
        self._ledger, self._cluster = Look(self._look_at_ledger), Look(_look_at_ray)

    def reasons(self) -> list[Reason]:
        """Why a new query would not be answered now, by the last looks; empty: it should be."""
        now_s, busy_since_s = time.monotonic(), self._writer.busy_since_s
        facts: dict[Reason, bool] = {
            "busy": busy_since_s is not None and now_s - busy_since_s > _STUCK_S,
            "chain": bool(self._chain_fault()),
            "cluster": self._cluster.is_bad,
            "disk": not self._has_room,
            "ledger": bool(self._writer.failure) or self._ledger.is_bad,
            "votes": self.votes_failed or not self._voters_answer(),
            "unknown": now_s - self._looked_s > _STALE_S,
        }
        return [reason for reason, holds in facts.items() if holds]

    def to_json(self) -> dict[str, Any]:
        """A :class:`aggregator.service.wire.Health`."""
        reasons = self.reasons()
        return {"status": "failing" if reasons else "ok", "reasons": reasons}

    async def watch(self) -> None:
        """Look at the facts again and again."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.look()

    async def look(self) -> None:
        """Look at the facts once, and try what failed."""
        try:
            await self._look()
            self._looked_s = time.monotonic()
        except Exception:  # noqa: BLE001 - the watch goes on, whatever it met
            _log.exception("The health of the service could not be looked at.")

    async def look_now(self) -> None:
        """Look at what may be gone or hang: the ledger and Ray; within two seconds."""
        await asyncio.gather(self._ledger.now(), self._cluster.now())

    async def _look(self) -> None:
        await self.look_now()
        if self._writer.failure and self._has_room:
            await self._writer.recover()
        # Once they answer again: before, the trial would hold its thread until it timed out.
        if self.votes_failed and self._voters_answer():
            with contextlib.suppress(Exception):
                await asyncio.to_thread(self._try_vote)
                self.votes_failed = False

    def _look_at_ledger(self) -> None:
        books = self._writer.books
        self._has_room = books.ledger.has_room()
        # One that failed is looked at by opening it again.
        if self._writer.failure:
            return
        try:
            books.ledger.look()
        except LedgerError as error:
            _log.error("The ledger is not there: %s", error)
            self._writer.fail(books, str(error))


def _look_at_ray() -> None:
    """Raise unless Ray's control process answers, or there is no Ray here; hang as long as it does not."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.nodes()
