"""Live state over HTTP: server-sent events, each the whole state, whenever it has changed.

The state is looked at once a second for everybody, so that when an event comes says nothing about when anything
happened within that second. Streams are few, because each holds a connection: beyond them a caller is told to ask again
and again instead. They end when the service does, and after a while by themselves; whoever still listens connects anew.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import StreamingResponse

from aggregator.errors import FaultError

State = Callable[[], Awaitable[dict[str, Any]]]
_MOST_STREAMS, _MOST_OF_ONE = 64, 8
_LONGEST_S, _SIGN_OF_LIFE_S, _TICK_S = 600.0, 15.0, 0.25
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Latest:
    """A state that is computed at most once in ``max_age_s``, whoever asks. For one event loop."""

    def __init__(self, compute: State, *, max_age_s: float) -> None:
        self._compute, self._max_age_s = compute, max_age_s
        self._made_s, self._state = -max_age_s, dict[str, Any]()
        self._lock = asyncio.Lock()

    async def __call__(self) -> dict[str, Any]:
        """The state, at most that old."""
        async with self._lock:
            now_s = asyncio.get_running_loop().time()
            if now_s - self._made_s >= self._max_age_s:
                self._state, self._made_s = await self._compute(), now_s
            return self._state


class Streams:
    """All event streams of a service."""

    def __init__(self) -> None:
        self._is_closing = False
        self._open: Counter[str] = Counter()

    def close(self) -> None:
        """End all of them; from any thread."""
        self._is_closing = True

    def response(self, caller: str, state: State) -> StreamingResponse:
        """Events of ``state``. FaultError 503 where too many streams are open."""
        if self._open.total() >= _MOST_STREAMS or self._open[caller] >= _MOST_OF_ONE:
            remedy = "Too many live views; ask for the state itself again and again, or close another one."
            raise FaultError(503, "events", f"{self._open.total()} open", remedy, {"Retry-After": "5"})
        return StreamingResponse(self._events(caller, state), media_type="text/event-stream", headers=_HEADERS)

    async def _events(self, caller: str, state: State) -> AsyncIterator[str]:
        loop = asyncio.get_running_loop()
        began_s = said_s = loop.time()
        last = ""
        self._open[caller] += 1
        try:
            while not self._is_closing and loop.time() - began_s < _LONGEST_S:
                text = json.dumps(await state(), separators=(",", ":"), allow_nan=False)
                if text != last:
                    last, said_s = text, loop.time()
                    yield f"event: state\ndata: {text}\n\n"
                elif loop.time() - said_s > _SIGN_OF_LIFE_S:
                    said_s = loop.time()
                    yield ": still here\n\n"
                await asyncio.sleep(_TICK_S)
        finally:
            self._open[caller] -= 1
