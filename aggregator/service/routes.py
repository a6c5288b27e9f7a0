"""Routes of an aggregator for analysts and operators.

An analyst gets labels, refusals and public numbers. The step that refused, the data-dependent privacy cost and all else
that depends on votes are available under ``/v1/operator/`` only.
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
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from aggregator.audit import note_action
from aggregator.budgets import QuotaExceededError, epsilon_fixed_beforehand, status_of
from aggregator.chain import LedgerError, UnreachableError
from aggregator.service import wire
from aggregator.service.auth import LiveTokens
from aggregator.service.metrics import ServiceMetrics
from aggregator.service.page import Latest, States, Streams, page, page_headers
from aggregator.service.wire import MEDIA_TYPES, Facts, PublicPool, answers_file, budget_json
from aggregator.service.writer import Batcher, Readiness, Snapshot, Verification, Writer
from aggregator.session import OverBudget, VotesUnavailableError
from fairpate.http_requests import FaultError, Faults, KnownCaller, fault, field_of
from fairpate.http_server import faults_response, json_response
from fairpate.types import strict

_TAGS = ("id", "features", "record")
# Longer than the pause between two attempts to open a failed ledger again.
_RETRY_AFTER = {"Retry-After": "2"}
_ANALYSTS_AGE_S, _OPERATORS_AGE_S = 1.0, 2.0
_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}, 503: {"model": Faults}}
_METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}
_FILES: dict[int | str, dict[str, Any]] = {200: {"content": {kind: {} for kind in MEDIA_TYPES.values()}}}
_FAILURES: dict[int | str, dict[str, Any]] = {status: {"model": Faults} for status in (429, 503)}
Key = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="A query's content hash.")]
_log = logging.getLogger(__name__)


def field_name(error: Mapping[str, Any]) -> str:
    """Return the field of one of pydantic's errors, without the tags of unions."""
    parts = field_of(error)
    # pydantic puts the tag of a union before its fields, as in `queries.queries`.
    if parts[:2] in (["queries", "queries"], ["count", "count"]):
        parts = parts[1:]
    names = [
        part for before, part in zip(["", *parts], parts, strict=False) if not (before.isdigit() and part in _TAGS)
    ]
    return ".".join(names) or "body"


def add_error_bodies(app: FastAPI) -> None:
    """Answer errors of session and ledger with :class:`fairpate.http_requests.Faults` too."""

    @app.exception_handler(QuotaExceededError)
    async def over_quota(_: Request, error: QuotaExceededError) -> Response:
        value, refusal = f"{error.num_new} new", error.refusal
        # Without Retry-After: waiting does not help a request that is larger than the whole quota.
        if math.isinf(refusal.retry_after_s):
            remedy = "More than this token may ever ask at once; send fewer new queries in one request."
            return faults_response(429, [fault("queries", value, remedy)])
        wait_s = math.ceil(refusal.retry_after_s)
        remedy = f"This token may ask {refusal.allowed_now} new queries now; wait {wait_s} s, or send fewer."
        return faults_response(429, [fault("queries", value, remedy)], {"Retry-After": str(wait_s)})

    @app.exception_handler(VotesUnavailableError)
    async def votes_unavailable(_: Request, error: VotesUnavailableError) -> Response:
        # The cause goes to the log alone: it is about the operator's machines.
        _log.error("Teachers did not vote: %s", error)
        remedy = "Some teachers are not available; no query was answered. Ask again later."
        return faults_response(503, [fault("votes", "", remedy)], _RETRY_AFTER)

    @app.exception_handler(sqlite3.Error)
    @app.exception_handler(LedgerError)
    async def ledger_failed(_: Request, error: Exception) -> Response:
        _log.error("The ledger failed: %s", error)
        remedy = "The ledger cannot be written, so no new query is answered; the operator's log has the cause."
        return faults_response(503, [fault("ledger", "", remedy)], _RETRY_AFTER)


def add_analyst_routes(
    app: FastAPI,
    facts: Facts,
    pool: PublicPool,
    writer: Writer,
    batcher: Batcher,
    health: Readiness,
    counters: ServiceMetrics,
    states: States,
    streams: Streams,
    tokens: LiveTokens,
) -> None:
    """Add the routes of analysts and the page to ``app``."""
    queries_type, estimate_type = wire.bodies_for(pool)

    async def submit(request: Request, body: Any) -> Response:
        """Submit queries; each gets a label, a refusal, or `over_budget` if the budget has no room for it."""
        questions = [wire.question_of(query, pool) for query in body.queries]
        state = request.scope["state"]
        # For the access log and the metrics, which see the request and not its body.
        state["num_queries"] = len(questions)
        replies = await batcher.ask(questions, state["caller"], state["request_id"])
        rows = [wire.reply_json(q.query.key, reply) for q, reply in zip(questions, replies, strict=True)]
        crossed = next((i for i, reply in enumerate(replies) if isinstance(reply, OverBudget)), None)
        return json_response({"replies": rows, "budget_crossed_at": crossed})

    # FastAPI reads the type of a body from the annotation, and this one follows from the pool.
    submit.__annotations__["body"] = queries_type
    # `response_model` documents the reply, here and below: FastAPI sends a Response without validating it.
    app.post("/v1/queries", response_model=wire.Replies, responses=_FAILURES)(submit)

    @app.get("/v1/queries/{key}", response_model=wire.Reply, responses={404: {"model": Faults}})
    async def look_up(key: Key) -> Response:
        """Return the stored reply to a query; free, and never drawn again."""
        # From memory: stored replies are given also while the ledger cannot be written.
        outcome = writer.books.ledger.outcome(key)
        if outcome is None:
            raise FaultError(404, "key", key, "No reply is stored; ask with POST /v1/queries.")
        return json_response(wire.reply_json(key, outcome))

    async def estimate(body: Any) -> Response:
        """Return the cost of queries, or of a number of new ones; none is asked."""
        # A set: a query that is given twice in one request is charged once.
        keys = {wire.question_of(query, pool).query.key for query in getattr(body, "queries", ())}
        # One snapshot, so that both budgets are of one moment.
        snapshot = writer.snapshot
        stored = sum(writer.books.ledger.outcome(key) is not None for key in keys)
        new = getattr(body, "count", len(keys) - stored)
        budgets = {"now": budget_json(snapshot.budget_status()), "afterwards": budget_json(snapshot.budget_status(new))}
        return json_response({"new_queries": new, "stored_replies": stored, **budgets})

    estimate.__annotations__["body"] = estimate_type
    app.post("/v1/estimate", response_model=wire.Estimate)(estimate)

    @app.post("/v1/answers", response_class=Response, responses=_FILES)
    async def answers(wanted: wire.AnswersWanted) -> Response:
        """Return stored replies as a file, a row per key; no query is asked."""
        outcomes = [writer.books.ledger.outcome(key) for key in wanted.keys]
        # In a thread: the event loop answers other requests while thousands of rows are written.
        content = await asyncio.to_thread(answers_file, wanted.keys, outcomes, pool, wanted.format)
        headers = {"Content-Disposition": f'attachment; filename="answers.{wanted.format}"'}
        return Response(content, media_type=MEDIA_TYPES[wanted.format], headers=headers)

    @app.get("/v1/budget", response_model=wire.Budget)
    async def budget() -> Response:
        """Return the budget's limits and its data-independent spending."""
        return json_response(budget_json(writer.snapshot.budget_status()))

    @app.get("/v1/statement", response_model=wire.Statement)
    async def statement() -> Response:
        """Return the privacy guarantee that may be published, and the public facts of this service."""
        return json_response(statement_json(pool, writer.snapshot))

    @app.get("/metrics", response_class=Response, responses=_METRICS)
    async def prometheus() -> Response:
        """Return metrics for Prometheus; none depends on votes."""
        text = counters.render(writer.snapshot.budget_status(), health.reasons())
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    state = Latest(states.for_analyst, max_age_s=_ANALYSTS_AGE_S)

    @app.get("/", include_in_schema=False)
    async def front() -> Response:
        return Response(page(needs_token=tokens.needs_token), media_type="text/html", headers=page_headers())

    @app.get("/v1/about", response_model=wire.About)
    async def about(request: Request) -> Response:
        """Describe the run, the form of a record, and you as the caller."""
        caller: KnownCaller = request.scope["state"]["caller"]
        return json_response(wire.about_json(facts, pool, writer.snapshot.terms, caller))

    @app.get("/v1/state", response_model=wire.State)
    async def now() -> Response:
        """Return budget and health, as in the events."""
        return json_response(await state())

    @app.get("/v1/events", response_class=Response, responses=_EVENTS)
    async def events(request: Request) -> Response:
        """Stream server-sent events: a `State` whenever it has changed."""
        return streams.response(request, state)

    @app.get("/v1/me", response_model=wire.Me)
    async def me(request: Request) -> Response:
        """Return your name and role, your own limit, and what you spent of the shared budget."""
        caller: KnownCaller = request.scope["state"]["caller"]
        ledger = writer.books.ledger
        # The store's limit first: a change enters the ledger with the next new query.
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


def statement_json(pool: PublicPool, snapshot: Snapshot) -> dict[str, Any]:
    """Return a :class:`aggregator.service.wire.Statement` as JSON."""
    terms, status = snapshot.terms, snapshot.budget_status()
    return {
        "unit": terms.unit,
        "relation": terms.relation,
        "delta": status.delta,
        "epsilon": strict(epsilon_fixed_beforehand(terms)),
        "epsilon_submitted": strict(status.epsilon_submitted),
        "queries_submitted": status.queries_submitted,
        "noise": terms.noise,
        # How the settings were chosen is not known here, so no choice counts as priced.
        "tuning_accounted": False,
        "num_teachers": terms.num_teachers,
        "mechanism": wire.worded({"name": terms.mechanism.name, **terms.mechanism.parameters}),
        "gate": wire.worded(dataclasses.asdict(terms.gate)),
        "label_names": list(pool.label_names),
        "group_names": list(pool.group_names),
        "pool_size": len(pool),
        "record_shape": list(pool.record_shape),
    }


def add_operator_routes(
    app: FastAPI,
    pool: PublicPool,
    writer: Writer,
    verification: Verification,
    counters: ServiceMetrics,
    states: States,
    streams: Streams,
) -> None:
    """Add the routes of operators to ``app``."""

    @app.get("/v1/operator/ledger", response_model=wire.LedgerPage)
    async def ledger(request: Request, page: Annotated[wire.PageOfLedger, Query()]) -> Response:
        """Return charges with the step that refused, and the data-dependent epsilon of all of them. Private."""
        snapshot = writer.snapshot
        books, total = snapshot.books, snapshot.num_charges
        start, stop = min(page.start, total), min(page.start + page.limit, total)
        caller: KnownCaller = request.scope["state"]["caller"]
        # Noted before anything is read, so that no reading goes unrecorded. In a thread: it waits for the disk.
        await asyncio.to_thread(note_action, books.ledger.actions, "read", caller=caller.name, charges=[start, stop])
        entries = []
        for number, (key, group, outcome) in enumerate(books.ledger.charged(start, stop), start):
            asked = books.ledger.asked_for(number)
            entries.append(
                {
                    "number": number,
                    "key": key,
                    "group": pool.group_names[group],
                    "verdict": "open" if outcome is None else outcome.verdict,
                    "label": None if outcome is None else outcome.label,
                    "caller": asked.asker.caller,
                    "request": asked.asker.request,
                    "at_s": asked.at_s,
                }
            )
        epsilon = await asyncio.to_thread(books.price.epsilon, books.ledger, total)
        return json_response({"total": total, "entries": entries, "epsilon_data_dependent": strict(epsilon)})

    @app.post("/v1/operator/verification", response_model=wire.Chain, responses={503: {"model": Faults}})
    async def verify() -> Response:
        """Verify every entry of the ledger now, while queries are answered; 503 if it cannot be read now."""
        try:
            return json_response(await verification.verify_now())
        except UnreachableError as error:
            remedy = f"It cannot be read now, so the state of its chain is unknown; ask again later. {error}"
            raise FaultError(503, "ledger", "", remedy) from error

    latest = Latest(states.for_operator, max_age_s=_OPERATORS_AGE_S)

    @app.get("/v1/operator/overview", response_model=wire.Overview)
    async def now() -> Response:
        """Return health, advice, the budget with a forecast, and outcomes over time by group and class. Private."""
        return json_response(await latest())

    @app.get("/v1/operator/events", response_class=Response, responses=_EVENTS)
    async def events(request: Request) -> Response:
        """Stream server-sent events: an `Overview` whenever it has changed. Private."""
        return streams.response(request, latest)

    @app.get("/v1/operator/metrics", response_class=Response, responses=_METRICS)
    async def prometheus() -> Response:
        """Return metrics for Prometheus with latencies and outcomes. Private."""
        text = counters.render_for_operator(writer.snapshot.budget_status(), await latest())
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
