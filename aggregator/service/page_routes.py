"""The page at ``/`` and what it is made from: words, live states, and the operator's overview.

The page itself is for anybody and holds no value of the service; it asks for them with the token that is typed into it.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from aggregator.service import metrics, operator_wire, wire
from aggregator.service.about import Facts, about_json
from aggregator.service.live import Latest, Streams
from aggregator.service.overview import Overview
from aggregator.service.page import page, page_headers
from aggregator.service.questions import PublicPool
from aggregator.service.responses import json_response
from aggregator.service.token_store import LiveTokens
from aggregator.service.writer import Writer

_ANALYSTS_AGE_S, _OPERATORS_AGE_S = 1.0, 2.0
_EVENTS = {200: {"content": {"text/event-stream": {}}}, 503: {"model": wire.Faults}}


def add_page_routes(
    app: FastAPI, facts: Facts, pool: PublicPool, writer: Writer, overview: Overview, *, tokens: LiveTokens
) -> Streams:
    """Add the routes to ``app``; the streams are to be closed before the server waits for its requests."""
    streams = Streams()
    state = Latest(overview.for_analyst, max_age_s=_ANALYSTS_AGE_S)

    @app.get("/", include_in_schema=False)
    async def front() -> Response:
        return Response(page(needs_token=tokens.needs_token), media_type="text/html", headers=page_headers())

    @app.get("/v1/about", response_model=wire.About)
    async def about(request: Request) -> Response:
        """What this service is about, in words, how a record is written down, and whom it takes you for."""
        caller = request.scope["state"]["caller"]
        return json_response(about_json(facts, pool, writer.snapshot.terms, caller))

    @app.get("/v1/state", response_model=wire.State)
    async def now() -> Response:
        """Budget and health, as the events tell them."""
        return json_response(await state())

    @app.get("/v1/events", response_class=Response, responses=_EVENTS)  # type: ignore[arg-type]
    async def events(request: Request) -> Response:
        """Server-sent events: a `State` each, whenever it has changed."""
        return streams.response(request, state)

    return streams


def add_overview_routes(
    app: FastAPI, writer: Writer, overview: Overview, counters: metrics.ServiceMetrics, streams: Streams
) -> None:
    """Add the operator's routes to ``app``."""
    latest = Latest(overview.for_operator, max_age_s=_OPERATORS_AGE_S)

    @app.get("/v1/operator/overview", response_model=operator_wire.Overview)
    async def now() -> Response:
        """Health, what to do, budget with a forecast, outcomes over time by group and class. Private."""
        return json_response(await latest())

    @app.get("/v1/operator/events", response_class=Response, responses=_EVENTS)  # type: ignore[arg-type]
    async def events(request: Request) -> Response:
        """Server-sent events: an `Overview` each. Private."""
        return streams.response(request, latest)

    @app.get("/v1/operator/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def prometheus() -> Response:
        """Metrics for Prometheus with latencies and outcomes. Private."""
        text = counters.render_for_operator(writer.snapshot.budget_status(), await latest())
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})
