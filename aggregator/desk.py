"""In front of the one writer: requests that wait at the same time are asked together.

The writer is called for one group of requests after another, so that concurrent clients share a durable transaction,
and so that requests answered together leave together. Stored replies are read without waiting.

How long a request took must not say which step refused: a reply to a new query leaves at a whole multiple of
``answer_step_s`` after its request came in. The steps differ by the time of a few noise draws, far below a step.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
from collections.abc import Callable, Sequence

from aggregator.health import Health
from aggregator.ledger import LedgerError
from aggregator.mechanism import Outcome
from aggregator.questions import CountVotes, Question
from aggregator.session import AggregatorSession, OverBudget, Query
from aggregator.writer import Writer
from fairpate.types import IntArray

Reply = Outcome | OverBudget
_MAX_QUERIES_TOGETHER = 1024


class Desk:
    """Asks a session on behalf of concurrent requests. To be used from one event loop."""

    def __init__(
        self,
        writer: Writer,
        health: Health,
        *,
        count_votes: CountVotes,
        answer_step_s: float,
        on_group: Callable[[], None] = lambda: None,
    ) -> None:
        self._writer, self._health = writer, health
        self._count_votes = count_votes
        self._answer_step_s = answer_step_s
        self._on_group = on_group
        self._line: list[tuple[Sequence[Question], asyncio.Future[Sequence[Reply]]]] = []
        self._server: asyncio.Task[None] | None = None

    def stored(self, key: str) -> Outcome | None:
        """The stored outcome of a query, or None if it has none."""
        return self._writer.books.ledger.outcome(key)

    async def ask(self, questions: Sequence[Question]) -> Sequence[Reply]:
        """One reply per question, in order. A request with a new query waits for the end of its step.

        What the session raises is raised to every request of the group.
        """
        known = [self.stored(question.query.key) for question in questions]
        replies = [outcome for outcome in known if outcome is not None]
        if len(replies) == len(questions):
            return replies
        loop = asyncio.get_running_loop()
        came_in_s = loop.time()
        answered: asyncio.Future[Sequence[Reply]] = loop.create_future()
        self._line.append((questions, answered))
        if self._server is None or self._server.done():
            self._server = loop.create_task(self._serve())
        try:
            return await answered
        finally:
            await asyncio.sleep(until_next_step(loop.time() - came_in_s, self._answer_step_s))

    async def _serve(self) -> None:
        while self._line:
            group = self._take_group()
            self._on_group()
            questions = [question for asked, _ in group for question in asked]
            try:
                replies = await self._writer.call(lambda session, asked=questions: self._ask_together(session, asked))  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - it belongs to the requests that wait
                for _, answered in group:
                    if not answered.done():
                        answered.set_exception(error)
                continue
            for asked, answered in group:
                if not answered.done():
                    answered.set_result([replies[question.query.key] for question in asked])

    def _take_group(self) -> list[tuple[Sequence[Question], asyncio.Future[Sequence[Reply]]]]:
        """The requests in front, at least one, as many as fit."""
        total, count = 0, 0
        for asked, _ in self._line:
            total += len(asked)
            if count and total > _MAX_QUERIES_TOGETHER:
                break
            count += 1
        group, self._line = self._line[:count], self._line[count:]
        return group

    def _ask_together(self, session: AggregatorSession, questions: Sequence[Question]) -> dict[str, Reply]:
        by_key: dict[str, Question] = {}
        for question in questions:
            by_key.setdefault(question.query.key, question)

        voted = False

        def vote(queries: Sequence[Query]) -> IntArray:
            nonlocal voted
            voted = True
            return self._count_votes([by_key[query.key] for query in queries])

        try:
            replies = session.ask([question.query for question in by_key.values()], vote)
        except (LedgerError, sqlite3.Error):
            raise
        except Exception:
            self._health.votes_failed = True
            raise
        if voted:
            self._health.votes_failed = False
        return dict(zip(by_key, replies, strict=True))


def until_next_step(elapsed_s: float, step_s: float) -> float:
    """Seconds from ``elapsed_s`` to the next whole multiple of ``step_s``; 0 without a step."""
    return max(0.0, math.ceil(elapsed_s / step_s) * step_s - elapsed_s) if step_s else 0.0
