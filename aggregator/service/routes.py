"""Routes of the service for analysts and operators.

An analyst gets labels and refusals and nothing that depends on votes beside them. Which step refused, the privacy cost
that depends on votes and everything else private stand under ``/v1/operator/`` only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import sqlite3
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request, Response

from aggregator.audit import note_action
from aggregator.budgets import BudgetStatus, QuotaExceededError, epsilon_fixed_beforehand, status_of
from aggregator.chain import LedgerError, UnreachableError
from aggregator.ledger import Asked
from aggregator.mechanism import Outcome
from aggregator.service import metrics, wire
from aggregator.service.auth import LiveTokens
from aggregator.service.wire import MEDIA_TYPES, PublicPool, answers_file
from aggregator.service.writer import Batcher, Readiness, Snapshot, Verification, Writer
from aggregator.session import OverBudget, VotesUnavailableError
from fairpate.http_requests import Caller, FaultError, Faults, fault, field_of
from fairpate.http_server import faults_response, json_response
from fairpate.types import strict

_TAGS = ("id", "features", "record")
_RETRY_AFTER_S = 2
_log = logging.getLogger(__name__)


def field_name(error: Mapping[str, Any]) -> str:
    """The field of one of pydantic's errors; the tags of unions are not part of its name."""
    parts = field_of(error)
    if parts[:2] in (["queries", "queries"], ["count", "count"]):
        parts = parts[1:]
    names = [
        part for before, part in zip(["", *parts], parts, strict=False) if not (before.isdigit() and part in _TAGS)
    ]
    return ".".join(names) or "body"


def add_error_bodies(app: FastAPI) -> None:
    """Let ``app`` answer the errors of session and ledger too as a :class:`fairpate.http_requests.Faults`."""

    @app.exception_handler(QuotaExceededError)
    async def over_quota(_: Request, error: QuotaExceededError) -> Response:
        value, refusal = f"{error.num_new} new", error.refusal
        if math.isinf(refusal.retry_after_s):
            remedy = "More than this token may ever ask at once; send fewer new queries in one request."
            return faults_response(429, [fault("queries", value, remedy)])
        wait_s = math.ceil(refusal.retry_after_s)
        remedy = f"This token may ask {refusal.allowed_now} new queries now; wait {wait_s} s, or send fewer."
        return faults_response(429, [fault("queries", value, remedy)], {"Retry-After": str(wait_s)})

    @app.exception_handler(VotesUnavailableError)
    async def votes_unavailable(_: Request, error: VotesUnavailableError) -> Response:
        _log.error("Teachers did not vote: %s", error)
        return _unavailable("votes", "Some teachers are not there; nothing was answered. Ask again later.")

    @app.exception_handler(sqlite3.Error)
    @app.exception_handler(LedgerError)
    async def ledger_failed(_: Request, error: Exception) -> Response:
        _log.error("The ledger failed: %s", error)
        return _unavailable(
            "ledger", "The ledger cannot be written, so nothing is answered; the operator's log says more."
        )


def _unavailable(field: str, remedy: str) -> Response:
    return faults_response(503, [fault(field, "", remedy)], {"Retry-After": str(_RETRY_AFTER_S)})


Key = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="A query's content hash.")]
_FILES: dict[str, Any] = {kind: {} for kind in MEDIA_TYPES.values()}


def add_analyst_routes(
    app: FastAPI,
    pool: PublicPool,
    writer: Writer,
    batcher: Batcher,
    counters: metrics.ServiceMetrics,
    health: Readiness,
) -> None:
    """Add the routes to ``app``."""
    _add_queries(app, pool, writer, batcher, counters)
    _add_public_state(app, pool, writer, counters, health)


def _add_queries(
    app: FastAPI, pool: PublicPool, writer: Writer, batcher: Batcher, counters: metrics.ServiceMetrics
) -> None:
    bodies = wire.bodies_for(pool)

    async def submit(request: Request, body: Any) -> Response:
        """Ask queries: each gets a label, a refusal, or word that the budget has no room for it."""
        questions = [wire.question_of(query, pool) for query in body.queries]
        counters.count_queries(len(questions))
        state = request.scope["state"]
        state["num_queries"] = len(questions)
        replies = await batcher.ask(questions, state["caller"], state["request_id"])
        rows = [wire.reply_json(q.query.key, reply) for q, reply in zip(questions, replies, strict=True)]
        crossed = next((i for i, reply in enumerate(replies) if isinstance(reply, OverBudget)), None)
        return json_response({"replies": rows, "budget_crossed_at": crossed})

    # FastAPI reads the type of a body from here, and this one is known when the pool is.
    submit.__annotations__["body"] = bodies.queries
    failures: dict[int | str, dict[str, Any]] = {status: {"model": Faults} for status in (429, 503)}
    app.post("/v1/queries", response_model=wire.Replies, responses=failures)(submit)

    @app.get("/v1/queries/{key}", response_model=wire.Reply, responses={404: {"model": Faults}})
    async def look_up(key: Key) -> Response:
        """The stored reply to a query; free, and never drawn again."""
        outcome = batcher.stored(key)
        if outcome is None:
            raise FaultError(404, "key", key, "No reply is stored; ask with POST /v1/queries.")
        return json_response(wire.reply_json(key, outcome))

    async def estimate(body: Any) -> Response:
        """What queries, or a number of new ones, would cost; nothing is asked."""
        keys = {wire.question_of(query, pool).query.key for query in getattr(body, "queries", ())}
        # Taken once, so that both budgets are of one moment.
        snapshot = writer.snapshot
        stored = sum(batcher.stored(key) is not None for key in keys)
        new = getattr(body, "count", len(keys) - stored)
        budgets = {"now": budget_json(snapshot.budget_status()), "afterwards": budget_json(snapshot.budget_status(new))}
        return json_response({"new_queries": new, "stored_replies": stored, **budgets})

    estimate.__annotations__["body"] = bodies.estimate
    app.post("/v1/estimate", response_model=wire.Estimate)(estimate)

    @app.post("/v1/answers", response_class=Response, responses={200: {"content": _FILES}})
    async def answers(wanted: wire.AnswersWanted) -> Response:
        """Stored replies as a file, a row per key; nothing is asked."""
        outcomes = [batcher.stored(key) for key in wanted.keys]
        # In a thread: the loop answers others while thousands of rows are written.
        content = await asyncio.to_thread(answers_file, wanted.keys, outcomes, pool, wanted.format)
        headers = {"Content-Disposition": f'attachment; filename="answers.{wanted.format}"'}
        return Response(content, media_type=MEDIA_TYPES[wanted.format], headers=headers)


def _add_public_state(
    app: FastAPI, pool: PublicPool, writer: Writer, counters: metrics.ServiceMetrics, health: Readiness
) -> None:
    @app.get("/v1/budget", response_model=wire.Budget)
    async def budget() -> Response:
        """The budget's limits and what is spent of it, data-independent."""
        return json_response(budget_json(writer.snapshot.budget_status()))

    @app.get("/v1/statement", response_model=wire.Statement)
    async def statement() -> Response:
        """The privacy claim that may be published, and the public facts of this service."""
        return json_response(statement_json(pool, writer.snapshot))

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def prometheus() -> Response:
        """Counters for Prometheus; none depends on votes."""
        text = counters.render(writer.snapshot.budget_status(), health.reasons())
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})


def budget_json(status: BudgetStatus) -> dict[str, Any]:
    """A :class:`wire.Budget`."""
    return {
        "kind": status.kind,
        "epsilon_limit": status.epsilon_limit,
        "delta": status.delta,
        "max_queries": status.max_queries,
        "queries_submitted": status.queries_submitted,
        "epsilon_submitted": strict(status.epsilon_submitted),
        "closed": status.closed,
    }


def statement_json(pool: PublicPool, snapshot: Snapshot) -> dict[str, Any]:
    """A :class:`wire.Statement`."""
    terms, status = snapshot.terms, snapshot.budget_status()
    return {
        "unit": terms.unit,
        "relation": terms.relation,
        "delta": status.delta,
        "epsilon": strict(epsilon_fixed_beforehand(terms)),
        "epsilon_submitted": strict(status.epsilon_submitted),
        "queries_submitted": status.queries_submitted,
        "noise": terms.noise,
        "tuning_accounted": False,
        "num_teachers": terms.num_teachers,
        "mechanism": wire.worded({"name": terms.mechanism.name, **terms.mechanism.parameters}),
        "gate": wire.worded(dataclasses.asdict(terms.gate)),
        "label_names": list(pool.label_names),
        "group_names": list(pool.group_names),
        "pool_size": len(pool),
        "record_shape": list(pool.record_shape),
    }


def add_operator_routes(app: FastAPI, pool: PublicPool, writer: Writer, verification: Verification) -> None:
    """Add the routes to ``app``."""

    @app.get("/v1/operator/ledger", response_model=wire.LedgerPage)
    async def ledger(request: Request, page: Annotated[wire.PageOfLedger, Query()]) -> Response:
        """Charges with the step that refused, and the data-dependent price of all of them. Do not publish."""
        snapshot = writer.snapshot
        books, total = snapshot.books, snapshot.num_charges
        start, stop = min(page.start, total), min(page.start + page.limit, total)
        caller: Caller = request.scope["state"]["caller"]
        # In a thread: the journal waits for its disk.
        await asyncio.to_thread(note_action, books.ledger.actions, "read", caller=caller.name, charges=[start, stop])
        charged = enumerate(books.ledger.charged(start, stop), start)
        entries = [
            _entry_json(number, key, pool.group_names[group], outcome, books.ledger.asked_for(number))
            for number, (key, group, outcome) in charged
        ]
        epsilon = await asyncio.to_thread(books.price.epsilon, books.ledger, total)
        return json_response({"total": total, "entries": entries, "epsilon_data_dependent": strict(epsilon)})

    @app.post("/v1/operator/verification", response_model=wire.Chain, responses={503: {"model": Faults}})
    async def verify() -> Response:
        """Verify every entry of the ledger now, while the service goes on; 503 where it cannot be read now."""
        try:
            return json_response(await verification.verify_now())
        except UnreachableError as error:
            remedy = f"It cannot be read now, so nothing is known of its chain; ask again later. {error}"
            raise FaultError(503, "ledger", "", remedy) from error


def _entry_json(number: int, key: str, group: str, outcome: Outcome | None, asked: Asked) -> dict[str, Any]:
    return {
        "number": number,
        "key": key,
        "group": group,
        "verdict": "open" if outcome is None else outcome.verdict,
        "label": None if outcome is None else outcome.label,
        "caller": asked.asker.caller,
        "request": asked.asker.request,
        "at_s": asked.at_s,
    }


def add_own_routes(app: FastAPI, writer: Writer, tokens: LiveTokens) -> None:
    """Add the route to ``app``."""

    @app.get("/v1/me", response_model=wire.Me)
    async def me(request: Request) -> Response:
        """Who you are to this service, what you may spend of the shared budget, and what you spent."""
        caller: Caller = request.scope["state"]["caller"]
        ledger = writer.books.ledger
        # The store's first: a limit that changed enters the ledger with the next new query.
        own = status_of(ledger, caller.name, tokens.limits.get(caller.name, ledger.limit_of(caller.name)))
        return json_response(
            {
                "name": caller.name,
                "scope": caller.role,
                "limit": dataclasses.asdict(own.limit),
                "spent": {"queries": own.queries, "epsilon": strict(own.epsilon)},
                "left": None if own.left is None else {"queries": own.left},
                "expires_s": caller.expires_s,
            }
        )
