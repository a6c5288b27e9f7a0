"""Responses that are no page: JSON, and errors that name field, value and remedy, all in one shape."""

from __future__ import annotations

import json
import logging
import math
import sqlite3
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from aggregator.ledger.files import LedgerError
from aggregator.ledger.own_limits import QuotaExceededError
from aggregator.service.errors import validation_faults
from aggregator.session import VotesUnavailableError
from fairpate.request_faults import FaultError, fault

_log = logging.getLogger(__name__)
_RETRY_AFTER_S = 2


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``value`` as compact JSON."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Response(text, status_code=status, headers=headers, media_type="application/json")


def add_error_bodies(app: FastAPI) -> None:
    """Let ``app`` answer every error as a :class:`aggregator.service.wire.Faults`."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return _faults(422, validation_faults(error.errors()))

    @app.exception_handler(FaultError)
    async def refused(_: Request, error: FaultError) -> Response:
        return _faults(error.status_code, [error.fault], error.headers)

    @app.exception_handler(QuotaExceededError)
    async def over_quota(request: Request, error: QuotaExceededError) -> Response:
        return await refused(request, _quota_fault(error))

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> Response:
        field = "body" if error.status_code == 400 else "path"
        found = fault(field, f"{request.method} {request.url.path}", f"{error.detail}; see /docs.")
        return _faults(error.status_code, [found], error.headers)

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

    @app.exception_handler(Exception)
    async def defect(_: Request, error: Exception) -> Response:
        # Its type alone: the message of an unforeseen error may quote what no analyst may see.
        return _faults(500, [fault("server", type(error).__name__, "A defect; tell the operator.")])


def _quota_fault(error: QuotaExceededError) -> FaultError:
    value, refusal = f"{error.num_new} new", error.refusal
    if math.isinf(refusal.retry_after_s):
        remedy = "More than this token may ever ask at once; send fewer new queries in one request."
        return FaultError(429, "queries", value, remedy)
    wait_s = math.ceil(refusal.retry_after_s)
    remedy = f"This token may ask {refusal.allowed_now} new queries now; wait {wait_s} s, or send fewer."
    return FaultError(429, "queries", value, remedy, {"Retry-After": str(wait_s)})


def _unavailable(field: str, remedy: str) -> Response:
    return _faults(503, [fault(field, "", remedy)], {"Retry-After": str(_RETRY_AFTER_S)})


def _faults(status: int, faults: list[dict[str, str]], headers: Mapping[str, str] | None = None) -> Response:
    return json_response({"errors": faults}, status=status, headers=headers)
