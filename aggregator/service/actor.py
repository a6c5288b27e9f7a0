"""One named Ray actor that holds the ledger and serves HTTP, and finds its way back after a crash.

The actor is the ledger's only writer. When its process dies Ray starts another, which opens the ledger again (every
entry verified and replayed), rebuilds what votes, and listens on the same port. What votes is injected as a function
that opens a :class:`Backend`; this module knows no teachers. uvicorn runs in a thread of the actor.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import FastAPI

from aggregator.service.api import Backend, ServiceSettings
from aggregator.service.connections import limited_protocol
from aggregator.service.gateway import Runs
from aggregator.service.observing import log_json_lines, otlp_tracer
from aggregator.service.tokens import is_loopback
from fairpate.types import UsageError, UserError

NAMESPACE = "fairpate"
_BIND_TIMEOUT_S = 30.0
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0
_REOPEN_TIMEOUT_S, _REOPEN_PAUSE_S = 240.0, 2.0
_BACKLOG, _ACCEPTED_TOGETHER = 4096, 64
# Below `_STOP_TIMEOUT_S`: the server gives up its requests before its thread is given up.
_GRACE_S = 10
_log = logging.getLogger(__name__)


class ServiceError(UserError, RuntimeError):
    """A service that cannot start or went away; the message says what to do."""


class ExposureError(ServiceError, UsageError):
    """A service that would be open to everybody."""


class Servable(Protocol):
    """What makes the application that is served."""

    def app(self, settings: ServiceSettings, *, tracer: Any = None) -> FastAPI:
        """Return the application."""


class HttpServer:
    """uvicorn in a thread, on a socket that is bound before the thread starts."""

    def __init__(self, backend: Servable, settings: ServiceSettings, *, tracer: Any = None) -> None:
        """``tracer`` takes the place of the one that the settings ask for."""
        import uvicorn

        # Before anything else runs: a port that is taken ends the start.
        listening = bind(settings.host, settings.port)
        if settings.log_file is not None:
            log_json_lines(settings.log_file)
        if settings.traces and tracer is None:
            tracer = otlp_tracer()
        self._app = app = backend.app(settings, tracer=tracer)
        limits = settings.limits.within_file_limit()
        # Everything is named that uvicorn would choose by what is installed: limits are limits of this parser.
        config = uvicorn.Config(
            app,
            http=limited_protocol(limits),  # type: ignore[arg-type]  # whatever makes a protocol
            loop="asyncio",
            ws="none",
            log_level="error",
            access_log=False,
            server_header=False,
            backlog=_ACCEPTED_TOGETHER,
            h11_max_incomplete_event_size=limits.max_head_bytes,
            timeout_keep_alive=limits.idle_timeout_s,  # type: ignore[arg-type]  # seconds, not whole ones
            timeout_graceful_shutdown=_GRACE_S,
            ssl_certfile=settings.tls.cert if settings.tls else None,
            ssl_keyfile=settings.tls.key if settings.tls else None,
        )
        self._server = _server(config, listening)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Answer what is under way, then close."""
        # First: a graceful end waits for replies, and a stream does not end by itself for minutes.
        if hasattr(self._app.state, "streams"):
            self._app.state.streams.close()
        self._server.should_exit = True
        self._thread.join(timeout=_STOP_TIMEOUT_S)


def _server(config: Any, listening: socket.socket) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            # asyncio has one number for two things: how many connections it accepts before it does anything else
            # (should be few), and how many the kernel keeps waiting for it (should be many).
            listening.listen(_BACKLOG)

    return Server(config)


class AggregatorActor:
    """The actor: opens the backend, then serves it until it is stopped."""

    def __init__(
        self, open_backend: Callable[..., Backend | Runs], arguments: tuple[Any, ...], settings: ServiceSettings
    ):
        self._backend: Backend | Runs | None = None
        self._server: HttpServer | None = None
        self._failure = ""
        try:
            check_exposure(settings)  # here too: a process that takes another's place finds the files of now
            self._backend = _open_patiently(lambda: open_backend(*arguments))
            self._server = HttpServer(self._backend, settings)
        except UserError as error:  # kept for the caller, for Ray would print a traceback of it
            self._failure = str(error)

    def is_serving(self) -> bool:
        """Whether requests are accepted. ServiceError, with the cause, if it could not start."""
        if self._failure:
            raise ServiceError(self._failure)
        return self._server is not None and self._server.is_alive

    def stop(self) -> None:
        """Close server, teachers and ledger in this order."""
        if self._server is not None:
            self._server.stop()
        if self._backend is not None:
            self._backend.close()


def _open_patiently(open_backend: Callable[[], Backend | Runs]) -> Backend | Runs:
    """The backend; a process that takes the place of one that died tries again while the disk may still come back."""
    limit_s = _REOPEN_TIMEOUT_S if is_restarted() else 0.0
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            return open_backend()
        except UserError as error:
            if time.monotonic() >= deadline_s:
                raise
            _log.warning("The service cannot start again yet: %s", error)
            time.sleep(_REOPEN_PAUSE_S)


def is_restarted() -> bool:
    """Whether this process is an actor's that Ray started in the place of one that died."""
    import ray

    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and bool(context.was_current_actor_reconstructed)


@dataclass(frozen=True, kw_only=True)
class Service:
    """A running aggregator: its actor's handle and where it listens."""

    actor: Any
    name: str
    url: str

    def is_serving(self, *, timeout_s: float) -> bool:
        """Whether it answers, waiting out a restart. ServiceError if it is gone for good; the cause is named."""
        return bool(_get(self.actor.is_serving.remote(), self.name, timeout_s))

    def stop(self) -> None:
        """Finish the requests under way, close the ledger and end the actor."""
        import ray

        try:
            ray.get(self.actor.stop.remote(), timeout=2 * _STOP_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            # Ended all the same: a ledger outlives its writer at any instant.
            _log.warning("The aggregator did not stop by itself: %s", error)
        self.kill()

    def kill(self) -> None:
        """End the actor at once, and wait until its name is free."""
        import ray

        ray.kill(self.actor)
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        while find_service(self.name) is not None and time.monotonic() < deadline_s:
            time.sleep(0.05)


def start_service(
    name: str,
    open_backend: Callable[..., Backend | Runs],
    arguments: tuple[Any, ...],
    settings: ServiceSettings,
    *,
    detached: bool = False,
    resources: dict[str, float] | None = None,
) -> Service:
    """Start the actor ``name`` and wait until it answers.

    ``detached`` lets it outlive this process on a cluster; ``resources`` pins it, for the ledger stays on one node's
    disk. ServiceError if a service of this name runs, if a host beyond loopback is asked without tokens, or for what
    the backend raised.
    """
    import ray

    check_exposure(settings)
    if find_service(name) is not None:
        raise ServiceError(f"{name}: is served already; stop that service first, or query it.")
    actor_class: Any = ray.remote(AggregatorActor)
    actor = actor_class.options(
        num_cpus=0,
        resources=resources or {},
        max_restarts=-1,
        # A call that finds the actor dead waits for the process that takes its place.
        max_task_retries=-1,
        name=name,
        namespace=NAMESPACE,
        lifetime="detached" if detached else None,
    ).remote(open_backend, arguments, settings)
    service = Service(actor=actor, name=name, url=settings.url)
    try:
        service.is_serving(timeout_s=_START_TIMEOUT_S)
    except ServiceError:
        service.kill()
        raise
    return service


def find_service(name: str) -> Any | None:
    """The handle of the actor ``name``, or None if there is none."""
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def check_exposure(settings: ServiceSettings) -> None:
    """ServiceError for a host that others reach while no token is configured."""
    if settings.tokens.is_empty and not is_loopback(settings.host):
        raise ExposureError(
            f"--host {settings.host}: others could reach it, and no token is configured; set FAIRPATE_ANALYST_TOKEN "
            "and FAIRPATE_OPERATOR_TOKEN or give token files, or listen on 127.0.0.1."
        )


def bind(host: str, port: int, *, timeout_s: float = _BIND_TIMEOUT_S) -> socket.socket:
    """A listening socket; waits while a process that just died still holds the port. ServiceError when it stays."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if time.monotonic() >= deadline_s:
                raise ServiceError(f"{host}:{port}: cannot listen there ({error}); give another --port.") from error
            time.sleep(0.1)


def _get(reference: Any, name: str, timeout_s: float) -> Any:
    import ray

    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise ServiceError(f"{name}: no answer within {timeout_s:g} s; is there room for its teachers?") from error
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise ServiceError(f"{name}: the service ended: {_last_line(str(cause))}") from error


def _last_line(text: str) -> str:
    """The message at the end of a remote traceback, without the exception's name."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^[\w.]+(Error|Exception): ", "", lines[-1]) if lines else "no cause given"
