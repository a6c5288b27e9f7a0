"""What only an operator may see, under ``/v1/operator/``: which step refused, and the price that depends on votes."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import FastAPI, Query, Response

from aggregator.ledger.entries import Asked
from aggregator.ledger.files import UnreachableError
from aggregator.mechanism import Outcome
from aggregator.service import operator_wire, wire
from aggregator.service.questions import PublicPool
from aggregator.service.responses import json_response
from aggregator.service.verification import Verification
from aggregator.service.writer import Writer
from aggregator.session import PublicationError, sanitised_epsilon
from fairpate.request_faults import FaultError
from fairpate.strict_json import strict


def add_operator_routes(app: FastAPI, pool: PublicPool, writer: Writer, verification: Verification) -> None:
    """Add the routes to ``app``."""
    target_delta = writer.books.ledger.terms.budget.delta

    @app.get("/v1/operator/ledger", response_model=operator_wire.LedgerPage)
    async def ledger(page: Annotated[operator_wire.PageOfLedger, Query()]) -> Response:
        """Charges with the step that refused, and the data-dependent price of all of them. Do not publish."""
        snapshot = writer.snapshot
        books, total = snapshot.books, snapshot.num_charges
        start, stop = min(page.start, total), min(page.start + page.limit, total)
        charged = enumerate(books.ledger.charged(start, stop), start)
        entries = [
            _entry_json(number, key, pool.group_names[group], outcome, books.ledger.asked_for(number))
            for number, (key, group, outcome) in charged
        ]
        epsilon = await asyncio.to_thread(books.price.epsilon, books.ledger, total)
        return json_response({"total": total, "entries": entries, "epsilon_data_dependent": strict(epsilon)})

    @app.post("/v1/operator/verification", response_model=operator_wire.Chain, responses={503: {"model": wire.Faults}})
    async def verify() -> Response:
        """Verify every entry of the ledger now, while the service goes on; 503 where it cannot be read now."""
        try:
            return json_response(await verification.verify_now())
        except UnreachableError as error:
            remedy = f"It cannot be read now, so nothing is known of its chain; ask again later. {error}"
            raise FaultError(503, "ledger", "", remedy) from error

    @app.post(
        "/v1/operator/publication", response_model=operator_wire.Publication, responses={409: {"model": wire.Faults}}
    )
    async def publication() -> Response:
        """Publish the price of all votes so far, with noise, as planned when the ledger was made; charged and kept."""
        try:
            # In one call: nothing is charged between the price and the number of charges that it is of.
            price, submitted = await writer.call(
                lambda session: (session.publish(), writer.books.ledger.num_reservations)
            )
        except PublicationError as error:
            raise FaultError(409, "publication", "refused", str(error)) from error
        epsilon = sanitised_epsilon(price, target_delta=target_delta)
        return json_response(
            {
                "epsilon_sanitised": epsilon,
                "order": price.release.order,
                "delta": target_delta,
                "queries_submitted": submitted,
            }
        )


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
