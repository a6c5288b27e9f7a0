"""Live state over HTTP: server-sent events, each the whole state, whenever it has changed.

The state is looked at once a second for everybody, so that when an event comes says nothing about when anything
happened within that second. Streams are few, because each holds a connection: beyond them a caller is told to ask
again and again instead. They end when the service does, when the caller would no longer be admitted (a token that was
revoked, rotated or has ended), and after a while by themselves; a caller who still listens connects anew.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from fairpate.request_faults import FaultError

State = Callable[[], Awaitable[dict[str, Any]]]
_MOST_STREAMS, _MOST_OF_ONE, _FOR_OPERATORS = 64, 8, 8
_LONGEST_S, _SIGN_OF_LIFE_S, _TICK_S = 600.0, 15.0, 0.25
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Latest:
    """A state that is computed at most once in ``max_age_s``, for all callers together. For one event loop."""

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

    def response(self, request: Request, state: State) -> StreamingResponse:
        """Events of ``state`` for the caller of ``request``. FaultError 503 where too many streams are open."""
        caller, most = request.scope["state"]["caller"], _MOST_STREAMS
        if caller.role != "operator":
            most -= _FOR_OPERATORS
        if self._open.total() >= most or self._open[caller.name] >= _MOST_OF_ONE:
            remedy = "Too many live views; ask for the state itself again and again, or close another one."
            raise FaultError(503, "events", f"{self._open.total()} open", remedy, {"Retry-After": "5"})
        # Its place is taken before anything is awaited: many at once are no more streams than one by one.
        self._open[caller.name] += 1
        events = self._events(state, request.scope["state"]["is_admitted"])
        return _Stream(events, lambda: self._give_back(caller.name))

    def _give_back(self, caller: str) -> None:
        self._open[caller] -= 1

    async def _events(self, state: State, is_admitted: Callable[[], bool]) -> AsyncIterator[str]:
        loop = asyncio.get_running_loop()
        began_s = said_s = loop.time()
        last = ""
        while not self._is_closing and loop.time() - began_s < _LONGEST_S:
            # Asked for each time, and the same for all: a listener costs no computation of its own.
            text = json.dumps(await state(), separators=(",", ":"), allow_nan=False)
            # Right before it leaves: a token may be revoked while the state is computed.
            if not is_admitted():
                return
            if text != last:
                last, said_s = text, loop.time()
                yield f"event: state\ndata: {text}\n\n"
            elif loop.time() - said_s > _SIGN_OF_LIFE_S:
                said_s = loop.time()
                yield ": still here\n\n"
            await asyncio.sleep(_TICK_S)


class _Stream(StreamingResponse):
    """Events, and what is done when they end or never begin."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
