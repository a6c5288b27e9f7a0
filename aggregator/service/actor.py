"""Serve an aggregator over HTTP: its application, and the named Ray actor that holds the ledger.

The actor is the ledger's only writer. When its process dies, Ray starts another, which opens the ledger again (every
entry is verified and replayed), starts the voters again, and listens on the same port. uvicorn runs in a thread of the
actor. Several runs are served by several services, each with its own port.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import FastAPI

from aggregator.ledger import Ledger
from aggregator.service import api
from aggregator.service.auth import LiveTokens, TokenBook, is_loopback
from aggregator.service.page import States
from aggregator.service.writer import (
    Batcher,
    Books,
    OpenBooks,
    PublicLabels,
    Readiness,
    Verification,
    Writer,
    no_public_labels,
)
from aggregator.session import AggregatorSession, CountVotes, PublicPool, QuotaRule, Quotas
from fairpate.http_server import (
    BIND_TIMEOUT_S,
    MAX_BODY_BYTES,
    HttpServer,
    HttpSettings,
    ServiceError,
    largest_body_bytes,
    new_app,
)
from fairpate.types import UsageError, UserError

_log = logging.getLogger(__name__)


_HISTORY_INTERVAL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The parts that a service needs of its run: the ledger, the session, the public pool and the voters.

    ``close`` ends the voters; the service closes the ledger itself. ``reopen`` opens ledger and session again after a
    failed write; None: the service must be restarted for this. ``voters_answer`` returns, without waiting, whether the
    voters answer. ``try_vote`` votes on a public record, or raises; it is called after a vote that failed.
    ``public_labels`` returns the labels that public things alone give to questions, which are then answered for free.
    ``last_backup`` returns when the ledger was last copied, in seconds since 1970, or None for never.
    """

    ledger: Ledger
    session: AggregatorSession
    pool: PublicPool
    count_votes: CountVotes
    reopen: OpenBooks | None = None
    voters_answer: Callable[[], bool] = lambda: True
    try_vote: Callable[[], object] | None = None
    close: Callable[[], None] = lambda: None
    facts: api.Facts = field(default_factory=api.Facts)
    public_labels: PublicLabels = no_public_labels
    last_backup: Callable[[], float | None] = lambda: None

    def app(self, settings: ServiceSettings, *, tracer: Any = None) -> FastAPI:
        """Return the service as an ASGI application. Its shutdown waits for the queries that are being answered, then
        closes the ledger.

        ``tracer`` creates a tracing span for every request; None: no spans.
        """
        pool = self.pool
        pool.questions[0]  # hashes all records now; the first request would wait for it
        counters, tokens = api.ServiceMetrics(), LiveTokens(settings.tokens)
        writer = Writer(Books(ledger=self.ledger, session=self.session), reopen=self.reopen)
        verification = Verification(writer, interval_s=settings.verification_interval_s)
        health = Readiness(
            writer,
            voters_answer=self.voters_answer,
            try_vote=self.try_vote or (lambda: self.count_votes([pool.questions[0]])),
            interval_s=settings.health_interval_s,
        )
        batcher = Batcher(
            writer,
            health,
            count_votes=self.count_votes,
            quotas=Quotas(settings.quota),
            answer_step_s=settings.answer_step_s,
            public_labels=self.public_labels,
            own_limits=lambda: tokens.stored.limits,
            on_group=counters.groups.inc,
        )
        states = States(writer, health, pool, counters.latency, self.last_backup)

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            await health.look()  # before the first request, whose own failure it might report
            watches = [asyncio.create_task(each) for each in (health.watch(), states.watch(_HISTORY_INTERVAL_S))]
            with verification.running():
                yield
            for watch in watches:
                watch.cancel()
            # The ledger last, as the watches read it; in a thread, as it waits for the write under way and its voters.
            await asyncio.to_thread(writer.close)

        max_bytes = largest_body_bytes(
            pool.record_shape, is_bytes=pool.features.dtype == np.uint8, most_records=api.MAX_QUERIES_PER_REQUEST
        )
        if pool.picture is not None:  # a file of a picture may be larger than its vector
            max_bytes = max(max_bytes, MAX_BODY_BYTES)
        app = new_app(
            title="FairPATE aggregator",
            description="Private and fair labels, each paid for from one budget.",
            reasons=health.reasons_now,
            tokens=tokens,
            max_body_bytes=lambda: max_bytes,
            rate=settings.rate,
            strangers=settings.strangers,
            tracer=tracer,
            on_response=counters.count_request,
            field_name=api.field_name,
            lifespan=lifespan,
        )
        api.add_analyst_routes(app, self.facts, states, batcher, counters, tokens)
        api.add_operator_routes(app, states, counters, verification)
        api.add_error_bodies(app)
        return app


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(HttpSettings):
    """The address, limits and tokens of an aggregator's HTTP service.

    ``answer_step_s``: replies to new queries are sent at whole multiples of this time after the request came in, 0 for
    as soon as possible. ``health_interval_s``: time between two checks of whether queries can be answered.
    ``verification_interval_s``: time between the end of one verification of the ledger and the start of the next.
    """

    tokens: TokenBook = field(default_factory=TokenBook)
    quota: QuotaRule = field(default_factory=QuotaRule)
    answer_step_s: float = 0.01
    health_interval_s: float = 1.0
    verification_interval_s: float = 60.0


# Ray finds a named actor in its own namespace only, and every driver would have another one.
NAMESPACE = "fairpate"
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0
# Shorter than callers wait for the actor: they get the cause, not a timeout.
_REOPEN_TIMEOUT_S, _REOPEN_PAUSE_S = 240.0, 2.0


class ExposureError(ServiceError, UsageError):
    """A service is not started, because it has no tokens and other machines could reach it."""


class AggregatorActor:
    """The Ray actor of a service: opens the run's backend, then answers requests until it is stopped."""

    def __init__(self, open_backend: Callable[..., Backend], arguments: tuple[Any, ...], settings: ServiceSettings):
        self._backend: Backend | None = None
        self._server: HttpServer | None = None
        self._failure = ""

        def make_app(settings: ServiceSettings, *, tracer: Any) -> FastAPI:
            # A process that replaces one that died tries again for a while: its disk may come back.
            deadline_s = time.monotonic() + (_REOPEN_TIMEOUT_S if is_restarted() else 0.0)
            while self._backend is None:
                try:
                    self._backend = open_backend(*arguments)
                except UserError as error:
                    if time.monotonic() >= deadline_s:
                        raise
                    _log.warning("The service cannot start yet, and tries again: %s", error)
                    time.sleep(_REOPEN_PAUSE_S)
            return self._backend.app(settings, tracer=tracer)

        try:
            check_exposure(settings)  # here too: a restarted process finds the present files
            # The port first, and the backend last: opening it may stop another process that writes the ledger. A
            # process that another replaces may hold the port until its last requests have ended.
            self._server = HttpServer(
                make_app, settings, bind_timeout_s=_STOP_TIMEOUT_S if is_restarted() else BIND_TIMEOUT_S
            )
        except UserError as error:  # stored for the caller, because Ray would print a traceback of it
            self._failure = str(error)
            if self._backend is not None:
                self._backend.ledger.close()
                self._backend.close()

    def is_serving(self) -> bool:
        """Return whether the service accepts requests. ServiceError, with the cause, if it could not start."""
        if self._failure:
            raise ServiceError(self._failure)
        return self._server is not None and self._server.is_alive()

    def stop(self) -> None:
        """Stop the HTTP server, which closes the ledger, and then end the voters."""
        # The server first: its shutdown answers the requests under way, which need the voters, and closes the ledger.
        if self._server is not None:
            self._server.stop()
        if self._backend is not None:
            self._backend.close()


def is_restarted() -> bool:
    """Return whether Ray started this actor's process because an earlier one died."""
    import ray

    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and bool(context.was_current_actor_reconstructed)


@dataclass(frozen=True, kw_only=True)
class Service:
    """A running aggregator: the handle of its actor, and its name."""

    actor: Any
    name: str

    def is_serving(self, *, timeout_s: float) -> bool:
        """Return whether the service accepts requests, after waiting for a restart if there is one.

        ServiceError if the service ended, with the cause, or does not answer within ``timeout_s``.
        """
        import ray

        try:
            return bool(ray.get(self.actor.is_serving.remote(), timeout=timeout_s))
        except ray.exceptions.GetTimeoutError as error:
            remedy = f"the service did not answer within {timeout_s:g} s; check that the cluster has free CPUs for it"
            raise ServiceError(f"{self.name}: {remedy}") from error
        except ray.exceptions.RayError as error:
            # The message at the end of a remote traceback, without the exception's name.
            lines = [line.strip() for line in str(getattr(error, "cause", None) or error).splitlines() if line.strip()]
            cause = re.sub(r"^[\w.]+(Error|Exception): ", "", lines[-1]) if lines else "no cause given"
            raise ServiceError(
                f"{self.name}: the service ended ({cause}); remove the cause and start the service again."
            ) from error

    def stop(self) -> None:
        """Finish the requests that are being answered, close the ledger and end the service's actor."""
        import ray

        try:
            ray.get(self.actor.stop.remote(), timeout=2 * _STOP_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            # It is ended in any case: a ledger survives the death of its writer at any instant.
            _log.warning("The aggregator did not stop by itself, and its process is ended: %s", error)
        self.kill()

    def kill(self) -> None:
        """End the service's actor without finishing requests, and wait until its name is free."""
        import ray

        # Ends it for good: `max_restarts` does not apply to an actor that is killed without `no_restart=False`.
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
    """Start a service in an actor called ``name``, and wait until it answers.

    With ``detached``, the actor outlives this process on a cluster; ``resources`` pins it to the node whose disk has
    the ledger. ServiceError if a service of this name runs, if other machines could reach a service without tokens, or
    if ``open_backend``, called with ``arguments``, fails.
    """
    import ray

    check_exposure(settings)
    # For the message: Ray itself refuses a second actor of one name.
    if find_service(name) is not None:
        raise ServiceError(f"{name}: a service of this name runs already; stop that service first, or query it.")
    actor_class: Any = ray.remote(AggregatorActor)
    actor = actor_class.options(
        # A reserved CPU would be missing for its voters on a small machine.
        num_cpus=0,
        resources=resources or {},
        # Without end: every restart verifies and replays the ledger, so that no charge is forgotten.
        max_restarts=-1,
        # A call that finds the actor dead waits for its new process.
        max_task_retries=-1,
        name=name,
        namespace=NAMESPACE,
        lifetime="detached" if detached else None,
    ).remote(open_backend, arguments, settings)
    service = Service(actor=actor, name=name)
    try:
        service.is_serving(timeout_s=_START_TIMEOUT_S)
    except ServiceError:
        # An actor whose start failed still runs and holds the name, so the next start would be refused.
        service.kill()
        raise
    return service


def find_service(name: str) -> Service | None:
    """Return the running service ``name``; None if there is none."""
    import ray

    try:
        return Service(actor=ray.get_actor(name, namespace=NAMESPACE), name=name)
    except ValueError:
        return None


def check_exposure(settings: ServiceSettings) -> None:
    """Raise ExposureError if no token is configured and other machines can reach the service's host."""
    if settings.tokens.is_empty and not is_loopback(settings.host):
        raise ExposureError(
            f"--host {settings.host}: other machines could reach this service, and no token is configured; set "
            "FAIRPATE_ANALYST_TOKEN and FAIRPATE_OPERATOR_TOKEN or give token files, or listen on 127.0.0.1."
        )
