"""A typed client of the aggregator's HTTP service.

A query is identified by its content, so asking again after a lost connection is safe: the service returns the stored
reply and charges nothing. The client therefore rides out a restart by asking again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from aggregator.service.operator_wire import LedgerPage, Publication
from aggregator.service.wire import MAX_QUERIES_PER_REQUEST, Budget, Estimate, Replies, Reply, Statement
from fairpate.types import UserError

DEFAULT_URL = "http://127.0.0.1:8517"
BodyT = TypeVar("BodyT", bound=BaseModel)
Question: TypeAlias = int | Mapping[str, Any]
"""A record's number in the public pool, or ``{"features": nested lists, "group": name}``."""
# Not 429: a quota may take hours to refill.
_RETRIED_STATUSES = (502, 503, 504)


class QueryError(UserError):
    """The service refused a request, or is not there. ``status`` is None where no response came."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class RetryRule:
    """How often a request is sent at most, and the pause before each next time, which doubles."""

    attempts: int = 5
    first_pause_s: float = 0.25


class AggregatorClient:
    """Asks one service; use as a context manager. ``token`` is sent as a bearer token."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        timeout_s: float = 60.0,
        retry: RetryRule | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url = url
        self._retry = retry or RetryRule()
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)
        except (httpx.InvalidURL, ValueError) as error:
            raise QueryError(f"{url}: not a URL of a service ({error}).") from error

    def __enter__(self) -> AggregatorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def ask(self, questions: Sequence[Question]) -> Replies:
        """Ask in one request, at most 1024; one reply per question, in order."""
        return self._request("POST", "/v1/queries", Replies, {"queries": _queries(questions)})

    def ask_many(self, questions: Sequence[Question], *, batch_size: int = 256) -> Iterator[Replies]:
        """Ask any number, ``batch_size`` in a request; ends after the batch that crosses the budget.

        ValueError unless 1 <= batch_size <= 1024.
        """
        if not 1 <= batch_size <= MAX_QUERIES_PER_REQUEST:
            raise ValueError(f"Expected 1 <= batch_size <= {MAX_QUERIES_PER_REQUEST}, got {batch_size}.")
        for start in range(0, len(questions), batch_size):
            answer = self.ask(questions[start : start + batch_size])
            yield answer
            if answer.budget_crossed_at is not None:
                return

    def reply(self, key: str) -> Reply:
        """The stored reply of a query. QueryError with status 404 if there is none."""
        return self._request("GET", f"/v1/queries/{quote(key, safe='')}", Reply)

    def estimate(self, questions: Sequence[Question] | None = None, *, count: int | None = None) -> Estimate:
        """What these questions, or ``count`` new ones, would cost; nothing is asked."""
        if (questions is None) == (count is None):
            raise ValueError("Expected either questions or a count.")
        body = {"count": count} if questions is None else {"queries": _queries(questions)}
        return self._request("POST", "/v1/estimate", Estimate, body)

    def budget(self) -> Budget:
        """Limits and what is spent."""
        return self._request("GET", "/v1/budget", Budget)

    def statement(self) -> Statement:
        """The privacy claim and the service's public facts."""
        return self._request("GET", "/v1/statement", Statement)

    def ledger(self, *, start: int = 0, limit: int = 100) -> LedgerPage:
        """Charges and the data-dependent price; needs the operator's token."""
        return self._request("GET", f"/v1/operator/ledger?start={start}&limit={limit}", LedgerPage)

    def publish(self) -> Publication:
        """Publish the data-dependent privacy cost so far; charges the budget, needs the operator's token.

        Sent once: a lost reply may have been charged, and after another query a second request would be charged too.
        """
        return self._request("POST", "/v1/operator/publication", Publication, attempts=1)

    def _request(
        self, method: str, path: str, kind: type[BodyT], body: object = None, *, attempts: int | None = None
    ) -> BodyT:
        response = self._send(method, path, body, attempts or self._retry.attempts)
        if response.status_code != httpx.codes.OK:
            raise QueryError(_describe(response), status=response.status_code)
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            raise QueryError(f"{self.url}: does not answer as an aggregator of this version does.") from error

    def _send(self, method: str, path: str, body: object, attempts: int) -> httpx.Response:
        for attempt in range(attempts):
            is_last = attempt == attempts - 1
            try:
                response = self._http.request(method, path, json=body)
            except httpx.RequestError as error:  # also a body that is not encoded as it says
                if is_last or isinstance(error, httpx.UnsupportedProtocol):
                    raise QueryError(f"{self.url}: no service answers ({error}); is it running?") from error
            else:
                if is_last or response.status_code not in _RETRIED_STATUSES:
                    return response
            time.sleep(self._retry.first_pause_s * 2**attempt)
        raise ValueError(f"Expected at least one attempt, got {attempts}.")


def _queries(questions: Sequence[Question]) -> list[Mapping[str, Any]]:
    return [{"id": question} if isinstance(question, int) else question for question in questions]


def _describe(response: httpx.Response) -> str:
    try:
        faults = response.json()["errors"]
        # What concerns no value, such as a full disk, has an empty one.
        got = [f"got {fault['value']}. " * bool(fault["value"]) for fault in faults]
        return "\n".join(f"{fault['field']}: {of}{fault['remedy']}" for fault, of in zip(faults, got, strict=True))
    except (ValueError, KeyError, TypeError):
        return f"{response.url}: status {response.status_code} and no explanation; is this an aggregator?"
