"""Whether the service is alive, and whether a new query can be expected to be answered now.

Alive is a process that answers. Ready is computed from facts: the ledger is open for writing, its disk has room, the
last votes came in and the teachers' processes answer, the writer is not stuck. A fact that turned bad is tried again
in the background, without anybody asking: the ledger is opened again, a vote on something public is tried and thrown
away. So the answer turns good when the cause is gone. Nothing here depends on how anybody voted, and a budget that is
used up does not count: stored replies are still given.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

from aggregator.service.writer import Writer

Reason = Literal["busy", "disk", "ledger", "votes", "unknown"]
_STUCK_S = 120.0
_STALE_S = 30.0
_log = logging.getLogger(__name__)


class Health:
    """The facts; :meth:`watch` runs beside the service."""

    def __init__(
        self, writer: Writer, *, voters_answer: Callable[[], bool], try_vote: Callable[[], object], interval_s: float
    ) -> None:
        self.votes_failed = False
        self._writer = writer
        self._voters_answer, self._try_vote = voters_answer, try_vote
        self._interval_s = interval_s
        self._has_room = True
        self._looked_s = time.monotonic()

    def reasons(self) -> list[Reason]:
        """Why a new query would not be answered now; empty: it should be."""
        now_s, busy_since_s = time.monotonic(), self._writer.busy_since_s
        facts: dict[Reason, bool] = {
            "busy": busy_since_s is not None and now_s - busy_since_s > _STUCK_S,
            "disk": not self._has_room,
            "ledger": bool(self._writer.failure),
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

    async def _look(self) -> None:
        # In a thread: a disk that hangs may not stop the loop that answers.
        self._has_room = await asyncio.to_thread(self._writer.books.ledger.has_room)
        if self._writer.failure and self._has_room:
            await self._writer.recover()
        # Once they answer again: before, the trial would hold its thread until it timed out.
        if self.votes_failed and self._voters_answer():
            with contextlib.suppress(Exception):
                await asyncio.to_thread(self._try_vote)
                self.votes_failed = False
