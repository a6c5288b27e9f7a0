"""HTTP connections with limits that hold before anything is parsed or buffered: a caller can waste only its own time.

uvicorn's protocol on h11 parses; this one decides what it is given. A head has a size and a deadline, so has a body;
one request at a time is taken from a connection; a reply that nobody fetches is given up. When all places are taken,
the connection that has waited longest with no complete request makes room, of the address that holds most of those.

Limits of a body's size are in :mod:`aggregator.service.auth`, which answers before a byte of it is read. What a refused
caller still sends is thrown away for a moment, so that it gets to read the refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fairpate.request_faults import fault

# A head passes its limit by no more than this before it is refused.
_SLICE_BYTES = 4096
_LINGER_S = 2.0
_FILES_BESIDE = 1024
_EVICTED_SHARE = 16
Phase = Literal["head", "body", "answer", "idle", "closing"]


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """How many connections are held, how large a request's head may be, and how long its parts may take.

    ``body_timeout_s`` and ``write_timeout_s`` are for the whole body and for a reply of which nothing is fetched.
    """

    max_connections: int = 512
    max_head_bytes: int = 16 * 2**10
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    idle_timeout_s: float = 5.0

    def within_file_limit(self) -> ConnectionLimits:
        """The same, after this process was allowed as many open files, or fewer connections if it may not have them."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _FILES_BESIDE + 2 * self.max_connections
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return self
        return replace(self, max_connections=max(1, soft // 4))


class LimitedProtocol(H11Protocol):
    """One connection under :class:`ConnectionLimits`."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.phase: Phase = "head"
        self.phase_since_s = time.monotonic()
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        """Who is connected, without the port."""
        return self.client[0] if self.client else ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, if need be in place of another."""
        super().connection_made(transport)
        # A reply leaves in several pieces, and asyncio leaves this out for a socket that was bound elsewhere.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._enter("head")
        if len(self.connections) > self._limits.max_connections:
            for connection in _longest_waiting(self.connections) or [self]:
                connection.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._unset(self._deadline)
        self._unset(self._write_deadline)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass on what belongs to the one request that is being received, a head in slices."""
        while data and self.phase != "closing" and not self.transport.is_closing():
            if self.phase == "answer":  # a second request before the first is answered
                self.cycle.keep_alive = False
                return
            size = len(data) if self.phase == "body" else _SLICE_BYTES
            super().data_received(data[:size])
            data = data[size:]
            self._follow()

    def on_response_complete(self) -> None:
        """Go on with the next request, if the one that was answered is over."""
        is_over = self.conn.their_state is not h11.SEND_BODY and not self.conn.trailing_data[0]
        if not is_over and not self.transport.is_closing():
            self.server_state.total_requests += 1
            self._linger()
            return
        super().on_response_complete()
        if self.transport.is_closing():
            self._enter("closing")
        elif self.phase != "closing":
            self._enter("idle")

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, also one that does not fetch its last reply."""
        super().timeout_keep_alive_handler()
        self._enter("closing")

    def pause_writing(self) -> None:
        """Give up if nothing of the reply is fetched for too long."""
        super().pause_writing()
        self._write_deadline = self.loop.call_later(self._limits.write_timeout_s, self.abort)

    def resume_writing(self) -> None:
        """Go on."""
        self._unset(self._write_deadline)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or too much of it."""
        size, most = len(self.conn.trailing_data[0]), self._limits.max_head_bytes
        if size > most:
            self._refuse(431, fault("headers", f"{size} bytes", f"Expected at most {most} bytes; send fewer."))
        else:
            self._refuse(400, fault("request", "", msg))

    def abort(self) -> None:
        """End the connection at once, and give its place free."""
        # Not left to `connection_lost`, which comes a turn of the loop later: the place is free at once.
        self.connections.discard(self)
        self.transport.abort()

    def _follow(self) -> None:
        """Enter the phase that the parser is in."""
        if self.phase == "closing":
            return
        if self.conn.their_state is h11.SEND_BODY:
            self._enter("body")
        elif self.conn.their_state is h11.IDLE:
            self._enter("head")
        else:
            self._enter("answer")

    def _enter(self, phase: Phase) -> None:
        # Bytes that trickle in leave the deadline where it is.
        if phase == self.phase and self._deadline is not None:
            return
        self._unset(self._deadline)
        self.phase, self.phase_since_s = phase, time.monotonic()
        limits = self._limits
        seconds = {"head": limits.head_timeout_s, "body": limits.body_timeout_s, "closing": _LINGER_S}.get(phase)
        if seconds is None:
            self._deadline = None
        else:
            late = self.abort if phase == "closing" else self._too_late
            self._deadline = self.loop.call_later(seconds, late)

    def _too_late(self) -> None:
        if self.phase == "head" and not self.conn.trailing_data[0]:
            self.abort()  # it never said anything
            return
        self._refuse(408, fault("request", f"no complete {self.phase}", "Too slow; send it at once."))
        # The application may be waiting for the rest of the body.
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _refuse(self, status: int, found: dict[str, str]) -> None:
        """Answer past the parser, which has no request to answer."""
        body = json.dumps({"errors": [found]}).encode()
        head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        self._linger()

    def _linger(self) -> None:
        """Say that nothing more comes, and throw away what still arrives, for a moment."""
        self._enter("closing")
        # Bytes that nobody reads would make the close a reset, and a reset can take the refusal with it.
        self.flow.resume_reading()
        with contextlib.suppress(OSError):  # the other side may be gone
            self.transport.write_eof()

    def _unset(self, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def limited_protocol(limits: ConnectionLimits) -> Callable[..., LimitedProtocol]:
    """What uvicorn makes a protocol of for each connection."""
    return lambda *arguments, **options: LimitedProtocol(*arguments, limits=limits, **options)


def _longest_waiting(connections: Any) -> list[LimitedProtocol]:
    """Of the address with most connections without a complete request, those that have waited longest.

    Several, because choosing looks at all of them, which a flood would make costly.
    """
    waiting = [connection for connection in connections if connection.phase != "answer"]
    if not waiting:
        return []
    ((busiest, _),) = Counter(connection.address for connection in waiting).most_common(1)
    of_it = sorted((one for one in waiting if one.address == busiest), key=lambda one: one.phase_since_s)
    return of_it[: 1 + len(connections) // _EVICTED_SHARE]
