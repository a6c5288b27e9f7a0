"""In front of the one writer: requests that wait at the same time are asked together.

The writer is called for one group of requests after another, so that concurrent clients share a durable transaction,
and so that requests answered together leave together. Stored replies are read without waiting.

How long a request took must not say which step refused: a reply to a new query leaves at a whole multiple of
``answer_step_s`` after its request came in. The steps differ by the time of a few noise draws, far below a step.

Quotas count what is charged: whether a request has room is known only when its turn comes. A request for more than its
caller's quota is refused as a whole; whom the session charges, of those who ask for a query together, it decides within
limit and quota of each. What a caller may spend is brought into the ledger before anything is charged under it.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from aggregator.ledger.entries import Asker, OwnLimit
from aggregator.ledger.files import LedgerError
from aggregator.ledger.own_limits import QuotaExceededError, QuotaRoom, Quotas
from aggregator.mechanism import Outcome
from aggregator.service.health import Health
from aggregator.service.questions import CountVotes, Question
from aggregator.service.tokens import Caller
from aggregator.service.writer import Writer
from aggregator.session import AggregatorSession, OverBudget, Query
from fairpate.types import IntArray

Reply = Outcome | OverBudget
_MAX_QUERIES_TOGETHER = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class _Request:
    questions: Sequence[Question]
    caller: Caller
    request_id: str
    answered: asyncio.Future[Sequence[Reply]]


class Batcher:
    """Asks a session on behalf of concurrent requests. To be used from one event loop."""

    def __init__(
        self,
        writer: Writer,
        health: Health,
        *,
        count_votes: CountVotes,
        quotas: Quotas,
        answer_step_s: float,
        own_limits: Callable[[], Mapping[str, OwnLimit]] = dict,
        on_group: Callable[[], None] = lambda: None,
    ) -> None:
        self._writer, self._health = writer, health
        self._count_votes, self._quotas, self._own_limits = count_votes, quotas, own_limits
        self._answer_step_s = answer_step_s
        self._on_group = on_group
        self._line: list[_Request] = []
        self._server: asyncio.Task[None] | None = None

    def stored(self, key: str) -> Outcome | None:
        """The stored outcome of a query, or None if it has none."""
        return self._writer.books.ledger.outcome(key)

    async def ask(self, questions: Sequence[Question], caller: Caller, request_id: str) -> Sequence[Reply]:
        """One reply per question, in order. A request with a new query waits for the end of its step.

        QuotaExceededError if the caller may not have as many new ones; then none is asked. What the session raises is
        raised to every request of the group.
        """
        known = [self.stored(question.query.key) for question in questions]
        replies = [outcome for outcome in known if outcome is not None]
        # At once: whether a reply is stored is no secret, GET /v1/queries/{key} tells it as well.
        if len(replies) == len(questions):
            return replies
        loop = asyncio.get_running_loop()
        came_in_s = loop.time()
        answered: asyncio.Future[Sequence[Reply]] = loop.create_future()
        self._line.append(_Request(questions=questions, caller=caller, request_id=request_id, answered=answered))
        # Between its last look at the line and its end the task awaits nothing, so no request is left behind.
        if self._server is None or self._server.done():
            self._server = loop.create_task(self._serve())
        try:
            return await answered
        finally:
            # Errors wait as well: when a refusal leaves must tell no more than when an answer does.
            await asyncio.sleep(until_next_step(loop.time() - came_in_s, self._answer_step_s))

    async def _serve(self) -> None:
        while self._line:
            group = self._take_group()
            self._on_group()
            results: Sequence[Sequence[Reply] | Exception]
            try:
                results = await self._writer.call(lambda session, group=group: self._ask_together(session, group))  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - it belongs to the requests that wait
                results = [error] * len(group)
            for request, result in zip(group, results, strict=True):
                # Its client left meanwhile.
                if request.answered.done():
                    continue
                if isinstance(result, Exception):
                    request.answered.set_exception(result)
                else:
                    request.answered.set_result(result)

    def _take_group(self) -> list[_Request]:
        """The requests in front, at least one, as many as fit."""
        total, count = 0, 0
        for request in self._line:
            total += len(request.questions)
            if count and total > _MAX_QUERIES_TOGETHER:
                break
            count += 1
        group, self._line = self._line[:count], self._line[count:]
        return group

    def _ask_together(
        self, session: AggregatorSession, group: Sequence[_Request]
    ) -> list[Sequence[Reply] | QuotaExceededError]:
        """The replies to each request, or why it was not asked. On the writer's thread, one group after another."""
        self._bring_limits(session)
        taken: dict[str, str] = {}
        refused = [self._check_quota(request, taken) for request in group]
        admitted = [request for request, error in zip(group, refused, strict=True) if error is None]
        by_key: dict[str, Question] = {}
        askers: dict[str, tuple[Asker, ...]] = {}
        for request in admitted:
            asker = Asker(request.caller.name, request.request_id)
            for question in request.questions:
                by_key[question.query.key] = question
                askers[question.query.key] = (*askers.get(question.query.key, ()), asker)
        replies = self._ask(session, by_key, askers, self._quota_of(admitted))
        return [
            error or [replies[question.query.key] for question in request.questions]
            for request, error in zip(group, refused, strict=True)
        ]

    def _bring_limits(self, session: AggregatorSession) -> None:
        """Store every limit that changed, before anything is charged under it."""
        ledger = self._writer.books.ledger
        for caller, limit in self._own_limits().items():
            if ledger.limit_of(caller) != limit:
                session.limit(caller, limit)

    def _check_quota(self, request: _Request, taken: dict[str, str]) -> QuotaExceededError | None:
        """Whether the caller has room for what nobody has asked yet, in this group or before."""
        caller = request.caller.name
        keys = {question.query.key for question in request.questions}
        new = [key for key in keys if key not in taken and self.stored(key) is None]
        if request.caller.role != "operator":
            # What the caller asks beside it in this group is charged at the same moment.
            wanted = len(new) + Counter(taken.values())[caller]
            refusal = self._quotas.refusal(self._writer.books.ledger, caller, wanted, now_s=time.time())
            if refusal is not None:
                return QuotaExceededError(refusal, len(new))
        taken.update(dict.fromkeys(new, caller))
        return None

    def _quota_of(self, requests: Sequence[_Request]) -> QuotaRoom:
        """The quota of those who ask; an operator has none."""
        analysts = {request.caller.name for request in requests if request.caller.role != "operator"}
        ledger = self._writer.books.ledger

        def room(caller: str) -> float:
            return self._quotas.room(ledger, caller, now_s=time.time()) if caller in analysts else math.inf

        return room

    def _ask(
        self,
        session: AggregatorSession,
        by_key: dict[str, Question],
        askers: Mapping[str, tuple[Asker, ...]],
        quota: QuotaRoom,
    ) -> dict[str, Reply]:
        voted = False

        def vote(queries: Sequence[Query]) -> IntArray:
            nonlocal voted
            voted = True
            return self._count_votes([by_key[query.key] for query in queries])

        try:
            queries = [replace(question.query, askers=askers[key]) for key, question in by_key.items()]
            replies = session.ask(queries, vote, quota=quota)
        # No fault of the teachers: what is known of their health stays.
        except (LedgerError, sqlite3.Error):
            raise
        except Exception:
            self._health.votes_failed = True
            raise
        # Stored replies alone say nothing of the teachers.
        if voted:
            self._health.votes_failed = False
        return dict(zip(by_key, replies, strict=True))


def until_next_step(elapsed_s: float, step_s: float) -> float:
    """Seconds from ``elapsed_s`` to the next whole multiple of ``step_s``; 0 without a step."""
    return max(0.0, math.ceil(elapsed_s / step_s) * step_s - elapsed_s) if step_s else 0.0
