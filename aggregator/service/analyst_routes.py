"""What an analyst may ask: labels and refusals, and nothing that depends on votes beside them."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request, Response

from aggregator.ledger.budget import epsilon_fixed_beforehand
from aggregator.service import metrics, request_bodies, wire
from aggregator.service.answers_file import MEDIA_TYPES, answers_file
from aggregator.service.batching import Batcher
from aggregator.service.health import Health
from aggregator.service.questions import PublicPool
from aggregator.service.responses import json_response
from aggregator.service.writer import Snapshot, Writer
from aggregator.session import BudgetStatus, OverBudget, sanitised_epsilon
from fairpate.request_faults import FaultError
from fairpate.strict_json import strict

Key = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="A query's content hash.")]
_FILES: dict[str, Any] = {kind: {} for kind in MEDIA_TYPES.values()}


def add_analyst_routes(
    app: FastAPI,
    pool: PublicPool,
    writer: Writer,
    batcher: Batcher,
    counters: metrics.ServiceMetrics,
    health: Health,
) -> None:
    """Add the routes to ``app``."""
    _add_queries(app, pool, writer, batcher, counters)
    _add_public_state(app, pool, writer, counters, health)


def _add_queries(
    app: FastAPI, pool: PublicPool, writer: Writer, batcher: Batcher, counters: metrics.ServiceMetrics
) -> None:
    bodies = request_bodies.bodies_for(pool)

    async def submit(request: Request, body: Any) -> Response:
        """Ask queries: each gets a label, a refusal, or word that the budget has no room for it."""
        questions = [request_bodies.question_of(query, pool) for query in body.queries]
        counters.count_queries(len(questions))
        state = request.scope["state"]
        state["num_queries"] = len(questions)
        replies = await batcher.ask(questions, state["caller"], state["request_id"])
        rows = [wire.reply_json(q.query.key, reply) for q, reply in zip(questions, replies, strict=True)]
        crossed = next((i for i, reply in enumerate(replies) if isinstance(reply, OverBudget)), None)
        return json_response({"replies": rows, "budget_crossed_at": crossed})

    # FastAPI reads the type of a body from here, and this one is known when the pool is.
    submit.__annotations__["body"] = bodies.queries
    failures: dict[int | str, dict[str, Any]] = {status: {"model": wire.Faults} for status in (429, 503)}
    app.post("/v1/queries", response_model=wire.Replies, responses=failures)(submit)

    @app.get("/v1/queries/{key}", response_model=wire.Reply, responses={404: {"model": wire.Faults}})
    async def look_up(key: Key) -> Response:
        """The stored reply to a query; free, and never drawn again."""
        outcome = batcher.stored(key)
        if outcome is None:
            raise FaultError(404, "key", key, "No reply is stored; ask with POST /v1/queries.")
        return json_response(wire.reply_json(key, outcome))

    async def estimate(body: Any) -> Response:
        """What queries, or a number of new ones, would cost; nothing is asked."""
        keys = {request_bodies.question_of(query, pool).query.key for query in getattr(body, "queries", ())}
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
    app: FastAPI, pool: PublicPool, writer: Writer, counters: metrics.ServiceMetrics, health: Health
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
        "epsilon_sanitised": sanitised_epsilon(snapshot.published, target_delta=status.delta),
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
