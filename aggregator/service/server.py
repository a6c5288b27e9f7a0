"""The aggregator over HTTP: its application, and the named Ray actor that holds the ledger and serves it.

The actor is the ledger's only writer. When its process dies Ray starts another, which opens the ledger again (every
entry verified and replayed), rebuilds what votes, and listens on the same port. What votes is injected as a function
that opens a :class:`Backend`; this module knows no teachers. uvicorn runs in a thread of the actor. Several runs are
served by as many services, each with its own port; a proxy gives them one address.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

from aggregator.budgets import QuotaRule, Quotas
from aggregator.ledger import Ledger
from aggregator.service import metrics
from aggregator.service.auth import LiveTokens, TokenBook, is_loopback
from aggregator.service.page import Overview, add_overview_routes, add_page_routes
from aggregator.service.routes import (
    add_analyst_routes,
    add_error_bodies,
    add_operator_routes,
    add_own_routes,
    field_name,
)
from aggregator.service.wire import CountVotes, Facts, PublicPool, max_body_bytes
from aggregator.service.writer import Batcher, Books, OpenBooks, Readiness, Verification, Writer
from aggregator.session import AggregatorSession
from fairpate.http_server import HttpServer, HttpSettings, ServiceError, add_guards, new_app
from fairpate.types import UsageError, UserError

_HISTORY_INTERVAL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What a service answers from.

    ``close`` ends the teachers; the service closes the ledger itself. ``reopen`` opens ledger and session again after a
    failed write; None: that takes a new start. ``voters_answer`` tells, without waiting, whether what votes is there;
    ``try_vote`` votes on something public, or raises, and is called after a vote that failed. ``last_backup``: when the
    ledger was last copied, in seconds since 1970; None: never.
    """

    ledger: Ledger
    session: AggregatorSession
    pool: PublicPool
    count_votes: CountVotes
    reopen: OpenBooks | None = None
    voters_answer: Callable[[], bool] = lambda: True
    try_vote: Callable[[], object] | None = None
    close: Callable[[], None] = lambda: None
    facts: Facts = field(default_factory=Facts)
    last_backup: Callable[[], float | None] = lambda: None

    def app(self, settings: ServiceSettings, *, tracer: Any = None) -> FastAPI:
        """As :func:`build_app`."""
        return build_app(self, settings, tracer=tracer)


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(HttpSettings):
    """How an aggregator is reached.

    ``answer_step_s``: replies to new queries leave at whole multiples of it after their request; 0: at once.
    ``health_interval_s``: how often readiness is looked at. ``verification_interval_s``: how long after the ledger was
    verified it is verified again.
    """

    tokens: TokenBook = field(default_factory=TokenBook)
    quota: QuotaRule = field(default_factory=QuotaRule)
    answer_step_s: float = 0.01
    health_interval_s: float = 1.0
    verification_interval_s: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.verification_interval_s > 0:
            raise ValueError(f"Expected verification_interval_s > 0, got {self.verification_interval_s}.")
        if not 0 <= self.answer_step_s <= 1:
            raise ValueError(f"Expected 0 <= answer_step_s <= 1, got {self.answer_step_s}.")


def build_app(backend: Backend, settings: ServiceSettings, *, tracer: Any = None) -> FastAPI:
    """The service as an ASGI application; closing it waits for the queries under way and closes the ledger.

    ``tracer`` makes a span of every request; None: there are none.
    """
    # Not at the first question, which would wait for the hashes of all records.
    backend.pool.hash_all()
    counters, tokens = metrics.ServiceMetrics(), LiveTokens(settings.tokens)
    writer = Writer(Books(ledger=backend.ledger, session=backend.session), reopen=backend.reopen)
    verification = Verification(writer, interval_s=settings.verification_interval_s)
    health = Readiness(
        writer,
        chain_fault=lambda: verification.fault,
        voters_answer=backend.voters_answer,
        try_vote=backend.try_vote or (lambda: backend.count_votes([backend.pool.question(0)])),
        interval_s=settings.health_interval_s,
    )
    batcher = Batcher(
        writer,
        health,
        count_votes=backend.count_votes,
        quotas=Quotas(settings.quota),
        answer_step_s=settings.answer_step_s,
        own_limits=lambda: tokens.limits,
        on_group=counters.count_group,
    )
    overview = Overview(writer, health, verification, backend.pool, counters, last_backup=backend.last_backup)

    async def reasons() -> Sequence[str]:
        await health.look_now()
        return health.reasons()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await health.look()  # before the first request, whose failure it would take for one of before
        watches = [asyncio.create_task(each) for each in (health.watch(), overview.watch(_HISTORY_INTERVAL_S))]
        verification.begin()
        yield
        verification.close()
        for watch in watches:
            watch.cancel()
        await asyncio.to_thread(writer.close)

    app = new_app(
        title="FairPATE aggregator",
        description="Private and fair labels, each paid for from one budget.",
        reasons=reasons,
        field_name=field_name,
        lifespan=lifespan,
    )
    add_analyst_routes(app, backend.pool, writer, batcher, counters, health)
    add_operator_routes(app, backend.pool, writer, verification)
    streams = add_page_routes(app, backend.facts, backend.pool, writer, overview, tokens=tokens)
    add_own_routes(app, writer, tokens)
    add_overview_routes(app, writer, overview, counters, streams)
    app.state.streams = streams
    add_error_bodies(app)
    max_bytes = max_body_bytes(backend.pool)
    add_guards(
        app,
        tokens=tokens,
        max_body_bytes=lambda: max_bytes,
        rate=settings.rate,
        strangers=settings.strangers,
        tracer=tracer,
        inside=[(metrics.CountRequests, {"counters": counters})],
    )
    return app


NAMESPACE = "fairpate"
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0
_REOPEN_TIMEOUT_S, _REOPEN_PAUSE_S = 240.0, 2.0
_log = logging.getLogger(__name__)


class ExposureError(ServiceError, UsageError):
    """A service that would be open to everybody."""


class AggregatorActor:
    """The actor: opens the backend, then serves it until it is stopped."""

    def __init__(self, open_backend: Callable[..., Backend], arguments: tuple[Any, ...], settings: ServiceSettings):
        self._backend: Backend | None = None
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


def _open_patiently(open_backend: Callable[[], Backend]) -> Backend:
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
    open_backend: Callable[..., Backend],
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
