"""What a caller may know of itself."""

from __future__ import annotations

import dataclasses

from fastapi import FastAPI, Request, Response

from aggregator.ledger.own_limits import status_of
from aggregator.service import wire
from aggregator.service.responses import json_response
from aggregator.service.token_store import LiveTokens
from aggregator.service.tokens import Caller
from aggregator.service.writer import Writer
from fairpate.strict_json import strict


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
