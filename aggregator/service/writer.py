"""Write a service's ledger from one thread: batches of waiting requests, verification of the chain, and readiness.

**Writing.** Calls of the session run one after another on a separate thread. After each call, what readers need is
stored in an immutable :class:`Snapshot`, so that no reader waits for slow teachers or a slow disk. After a failed write
the ledger is opened again as soon as its store accepts a durable write, unless another process took it over. Until then
new queries fail at once and stored replies are still returned.

**Batches** (:class:`Batcher`). The writer processes one group of waiting requests after another, so that concurrent
clients share a durable transaction, and the replies of a group leave together. The duration of a request must not
reveal which step refused: a reply to a new query leaves at a whole multiple of ``answer_step_s`` after its request.

:class:`Verification` and :class:`Readiness` check the ledger, and what the writer needs, while queries are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from aggregator import ledger_audit
from aggregator import session as sessions
from aggregator.ledger import NO_LIMIT, Asker, CallerLimit, Ledger, LedgerTerms, require_entry, verified_slices
from aggregator.session import AggregatorSession, BudgetStatus, Query, Question, Reply
from aggregator.store import DeposedError, LedgerError, UnreachableError
from fairpate.http_server import NotAdmittedError, Reason
from fairpate.privacy import accountant
from fairpate.privacy.accountant import epsilon_of_curve
from fairpate.types import IntArray, KnownCaller, UserError

ResultT = TypeVar("ResultT")
OpenBooks = Callable[[], tuple[Ledger, AggregatorSession]]
_REOPEN_PAUSE_S = 1.0
_PRICED_TOGETHER = 256
# A data-dependent budget has room for any number as far as is known without votes, so numbers are bounded here.
_MOST_NEW_QUERIES = 10**7
_MOST_PLANNED = 10**6
_ORDERS_A = np.array(accountant.DEFAULT_ORDERS)
_log = logging.getLogger(__name__)


class Books:
    """An open ledger with the session that writes it; computes the data-dependent privacy cost of the queries that it
    charged.

    The cost is for the operator only; it is computed once for each charge. ``order`` is the Renyi order at which the
    costs of single charges are compared. ``chain`` is the result of the last verification of the ledger's entries, a
    :class:`aggregator.service.api.Chain` as JSON. ``failure`` is the cause why the ledger is no longer written,
    empty if it is written; any thread may set it, and the writer's next call then opens the ledger again.
    """

    def __init__(self, *, ledger: Ledger, session: AggregatorSession) -> None:
        self.ledger, self.session, terms = ledger, session, ledger.terms
        self.failure = ""
        # Opening it has verified every entry.
        self.chain: dict[str, Any] = {"at_s": time.time(), "entries": ledger.head.number, "fault": ""}
        self._lock = threading.Lock()
        self._curve_A = np.zeros(len(_ORDERS_A))
        self._num_priced = 0
        # The order that gives the whole budget its smallest epsilon; it depends on no vote.
        # At least one query: a curve of zeros has no best order.
        planned = [terms.mechanism.worst_case(sessions.queries_that_fit(terms, _MOST_PLANNED) or 1)]
        order = accountant.epsilon(planned, target_delta=terms.budget.delta).order
        self._place = int(np.abs(_ORDERS_A - order).argmin())
        self.order = float(_ORDERS_A[self._place])
        self._cost_Q, self._voted_Q = np.zeros(0), np.zeros(0, dtype=np.bool_)

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the ledger's current state. Call this between two transactions."""
        room = self.session.room(_MOST_NEW_QUERIES)
        return Snapshot(books=self, terms=self.ledger.terms, num_charges=len(self.ledger.keys), room=room)

    def epsilon(self, num_charges: int) -> float:
        """Return the data-dependent epsilon of the ledger's first ``num_charges`` charges, or of more charges if
        another thread has already computed their costs."""
        ledger = self.ledger
        with self._lock:
            start, stop = self._num_priced, num_charges
            if start < stop:
                outcomes = [outcome for _, _, outcome, _ in ledger.charged(start, stop)]
                # An open reservation may have been drawn: only charges known to be free of votes are left out.
                touched = np.array([outcome is None or outcome.is_charged for outcome in outcomes])
                votes_QC, cost_Q = ledger.votes_QC[start:stop][touched], np.zeros(stop - start)
                curve_A, prices = self._curve_A, [np.zeros(0)]
                for first in range(0, len(votes_QC), _PRICED_TOGETHER):  # in parts, so that other threads run between
                    part_QC = votes_QC[first : first + _PRICED_TOGETHER]
                    prices_QA = ledger.terms.mechanism.realised_rdp(part_QC, _ORDERS_A)
                    curve_A = curve_A + prices_QA.sum(axis=0)
                    prices.append(prices_QA[:, self._place])
                cost_Q[touched] = np.concatenate(prices)
                # Stored at the end: after a failure half way the same charges are priced again, and added once.
                self._curve_A, self._num_priced = curve_A, stop
                self._cost_Q, self._voted_Q = np.append(self._cost_Q, cost_Q), np.append(self._voted_Q, touched)
            if not self._curve_A.any():
                return 0.0
            return epsilon_of_curve(self._curve_A, _ORDERS_A, target_delta=ledger.terms.budget.delta)[0]

    def priced(self, num_charges: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Return two arrays about the first ``num_charges`` charges: the data-dependent cost of each at the Renyi order
        ``order``, and a mask of the charges that used votes. The other charges cost 0.

        Call :meth:`epsilon` before, which computes these costs.
        """
        with self._lock:
            return self._cost_Q[:num_charges], self._voted_Q[:num_charges]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a ledger after its last durable transaction.

    ``room`` is the number of new queries for which the budget has room, counted up to ten million.
    """

    books: Books
    terms: LedgerTerms
    num_charges: int
    room: int

    def budget_status(self, num_new_queries: int = 0) -> BudgetStatus:
        """Return the budget as it would be after ``num_new_queries`` more queries, whether or not all of them have
        room."""
        count, closed = self.num_charges + num_new_queries, self.room <= num_new_queries
        return sessions.budget_status(self.terms, num_queries=count, closed=closed)


class Writer:
    """Runs all calls of a session on one thread, and opens its ledger again after a failed write. Call :meth:`close` at
    the end.

    ``books``, ``snapshot`` and ``busy_since_s`` may be read from any thread.
    """

    def __init__(self, books: Books, *, reopen: OpenBooks | None) -> None:
        self.books, self.snapshot = books, books.snapshot()
        self.busy_since_s: float | None = None
        self._reopen = reopen
        # So that the first failure is followed by an attempt at once.
        self._tried_s = -_REOPEN_PAUSE_S
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")

    def close(self) -> None:
        """Wait until the writer's current call has ended, end its thread and close the ledger."""
        self._thread.shutdown()
        self.books.ledger.close()

    async def call(self, function: Callable[[AggregatorSession], ResultT]) -> ResultT:
        """Run ``function(session)`` on the writer's thread and return its result. If an earlier write failed, open the
        ledger again first. LedgerError if the ledger cannot be opened again yet, or cannot be written."""

        def called() -> ResultT:
            self.busy_since_s = time.monotonic()
            try:
                if self.books.failure:
                    self._open_again()
                return function(self.books.session)
            except (LedgerError, sqlite3.Error) as error:
                self.books.failure = str(error)
                raise
            finally:
                # Replaced as a whole and never changed, so that readers need no lock.
                self.snapshot = self.books.snapshot()
                self.busy_since_s = None

        return await asyncio.get_running_loop().run_in_executor(self._thread, called)

    def _open_again(self) -> None:
        """Open the ledger again after a failure. LedgerError if this is not possible yet."""
        if self._reopen is None or time.monotonic() < self._tried_s + _REOPEN_PAUSE_S:
            raise LedgerError(self.books.failure)
        # Before the attempt: one that fails must not be repeated by every request that waits.
        self._tried_s = time.monotonic()
        try:
            self.books.ledger.store.require_writable()
        except DeposedError:
            # It must not come back by itself once its successor is gone: the operator chooses the next writer, by a
            # start or by `--take-over`.
            self._reopen = None
            raise
        self.books.ledger.close()  # a closed ledger still gives stored replies, from memory
        try:
            ledger, session = self._reopen()
        except UserError as error:  # a ledger that was removed, or in which a label is missing, is not replaced
            raise LedgerError(str(error)) from error
        try:
            # A copy from before the last answers is complete in itself, and would charge less than was spent.
            require_entry(ledger, self.books.ledger.head)
        except BaseException:
            ledger.close()
            raise
        self.books = Books(ledger=ledger, session=session)
        self.snapshot = self.books.snapshot()


# A slice of half a millisecond delays one request in fifty, at most, by its own length.
_PAUSE_S, _SHARE = 0.02, 0.02


class Verification:
    """Verifies all entries of the ledger again and again, ``interval_s`` apart, in a separate thread.

    If an entry is not valid, no query is answered any more; a ledger that cannot be read now is verified in the next
    round.
    """

    def __init__(self, writer: Writer, *, interval_s: float) -> None:
        self._writer, self._interval_s = writer, interval_s
        self._ended = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager: run the verifying thread inside the block. At the end of the block the thread finishes its
        present slice of entries, about half a millisecond's work, and ends."""
        # No thread of a pool: the end of the process would wait for a database that hangs.
        threading.Thread(target=self._verify_repeatedly, daemon=True, name="verification").start()
        try:
            yield
        finally:
            self._ended.set()

    async def verify_now(self) -> dict[str, Any]:
        """Verify all entries of the ledger now and return the result (:class:`Books`). UnreachableError if the ledger
        cannot be read now."""
        books = self._writer.books
        try:
            entries = (await asyncio.to_thread(ledger_audit.verify, books.ledger.place)).entries
        # Not a broken chain: the last result stays.
        except UnreachableError:
            raise
        except LedgerError as error:
            self._note(books, 0, error)
        else:
            self._note(books, entries)
        return self._writer.books.chain

    def _verify_repeatedly(self) -> None:
        while not self._ended.wait(self._interval_s):
            books = self._writer.books
            # A failed ledger is verified when it is opened again.
            if books.failure:
                continue
            try:
                began_s, entries = time.perf_counter(), 0
                for count in verified_slices(books.ledger):
                    entries, took_s = count, time.perf_counter() - began_s
                    if self._ended.wait(max(_PAUSE_S, took_s / _SHARE)) or books is not self._writer.books:
                        break
                    began_s = time.perf_counter()
                else:
                    self._note(books, entries)
            except UnreachableError as error:
                _log.warning("The ledger cannot be read now and is verified in the next round: %s", error)
            except LedgerError as error:
                self._note(books, 0, error)
            except Exception:  # noqa: BLE001 - the next round tries again
                _log.exception(
                    "The verification of the ledger failed; it is repeated. If this lasts, report it as a defect."
                )

    def _note(self, books: Books, entries: int, fault: LedgerError | None = None) -> None:
        """Store the result of a verification; if there is a ``fault``, the ledger of ``books`` is no longer written."""
        books.chain = {"at_s": time.time(), "entries": entries, "fault": "" if fault is None else str(fault)}
        if fault is not None:
            _log.error(
                "An entry of the ledger is not valid, so new queries are refused until the ledger is restored: %s",
                fault,
            )
            books.failure = books.failure or str(fault)


# The remedies on the page name these two times.
_STUCK_S = 120.0
_STALE_S = 30.0
_PROBE_LIMIT_S = 2.0
_SHARED_S = 0.2  # anonymous callers that ask often cause one probe in this time


@dataclass(eq=False)
class Probe:
    """Runs a check on a separate thread, because it may hang, and lets callers wait for its result. Callers that come
    while it runs wait for the same run.

    Use it from one event loop. The function ``check`` raises an error if the part that it checks has failed.
    """

    check: Callable[[], None]
    _under_way: Future[None] | None = field(default=None, init=False)
    _began_s: float = field(default=-_SHARED_S, init=False)
    _failed: bool = field(default=False, init=False)

    @property
    def is_bad(self) -> bool:
        """True if the last finished check failed, or the running one has taken longer than two seconds."""
        hangs = self._under_way is not None and time.monotonic() > self._began_s + _PROBE_LIMIT_S
        return self._failed or hangs

    async def now(self) -> None:
        """Run the check, unless one has just finished, and wait at most two seconds for its result."""
        under_way = self._under_way
        if under_way is None:
            if time.monotonic() < self._began_s + _SHARED_S:
                return
            under_way, self._began_s = Future(), time.monotonic()
            self._under_way = under_way
            # No thread of a pool: the end of the process would wait for one that hangs.
            threading.Thread(target=self._run, args=(under_way,), daemon=True, name="look").start()
        left_s = self._began_s + _PROBE_LIMIT_S - time.monotonic()
        if left_s > 0:
            await asyncio.wait([asyncio.wrap_future(under_way)], timeout=left_s)

    def _run(self, done: Future[None]) -> None:
        try:
            self.check()
            self._failed = False
        except Exception as error:  # noqa: BLE001 - any error means not ready
            if not self._failed:
                _log.warning("The service is not ready, because a check failed; it is repeated: %s", error)
            self._failed = True
        # The state first: the callers that wait for this check read it next.
        self._under_way = None
        done.set_result(None)


@dataclass(eq=False)
class Readiness:
    """Reports whether a new query would be answered now; :meth:`watch` checks the conditions for this every
    ``interval_s``.

    The conditions:

    * The ledger is open for writing, and its entries were valid at the last verification.
    * The ledger's disk has room, and its writer is not stuck.
    * The last votes arrived, the voters answer, and Ray's control process answers.

    None of them depends on a vote or on how much of the budget is spent.
    """

    writer: Writer
    _: KW_ONLY
    voters_answer: Callable[[], bool]
    try_vote: Callable[[], object]
    interval_s: float

    def __post_init__(self) -> None:
        self.votes_failed, self._has_room, self._looked_s = False, True, time.monotonic()
        self._ledger, self._cluster = Probe(self._check_ledger), Probe(_check_ray)

    def reasons(self) -> list[Reason]:
        """Return the reasons why a new query would not be answered, according to the last checks; empty if it would be
        answered."""
        now_s, busy_since_s = time.monotonic(), self.writer.busy_since_s
        facts: dict[Reason, bool] = {
            "busy": busy_since_s is not None and now_s - busy_since_s > _STUCK_S,
            "chain": bool(self.writer.books.chain["fault"]),
            "cluster": self._cluster.is_bad,
            "disk": not self._has_room,
            "ledger": bool(self.writer.books.failure) or self._ledger.is_bad,
            "votes": self.votes_failed or not self.voters_answer(),
            "unknown": now_s - self._looked_s > _STALE_S,
        }
        return [reason for reason, holds in facts.items() if holds]

    async def watch(self) -> None:
        """Check the conditions of readiness every ``interval_s`` seconds, without end."""
        while True:
            await asyncio.sleep(self.interval_s)
            await self.look()

    async def look(self) -> None:
        """Check the conditions of readiness once. If the ledger or a vote failed before, also try again to open the
        ledger or to vote."""
        try:
            await self.reasons_now()
            if self.writer.books.failure and self._has_room:
                # Any call opens the ledger again; one that fails is repeated at the next look.
                with contextlib.suppress(LedgerError):
                    await self.writer.call(lambda _: None)
            # Only once they answer: before, the trial vote would hold its thread until it timed out.
            if self.votes_failed and self.voters_answer():
                with contextlib.suppress(Exception):
                    await asyncio.to_thread(self.try_vote)
                    self.votes_failed = False
            self._looked_s = time.monotonic()
        except Exception:  # noqa: BLE001 - the watch continues after any error
            _log.exception(
                "The health of the service could not be checked; the check is repeated. If this lasts, report it "
                "as a defect."
            )

    async def reasons_now(self) -> list[Reason]:
        """Check the ledger and Ray, within two seconds, then return the :meth:`reasons` why a new query would not be
        answered."""
        await asyncio.gather(self._ledger.now(), self._cluster.now())
        return self.reasons()

    def _check_ledger(self) -> None:
        books = self.writer.books
        self._has_room = books.ledger.store.has_room()
        # A failed ledger is checked by opening it again.
        if books.failure:
            return
        try:
            books.ledger.look()
        except LedgerError as error:
            _log.error("The check of the ledger failed, so new queries are refused until it can be written: %s", error)
            books.failure = books.failure or str(error)


def _check_ray() -> None:
    """Raise an error if Ray runs here and its control process has failed; hang while that process does not answer."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.nodes()


PublicLabels = Callable[[Sequence[Question]], Sequence[int | None]]
"""Returns for each question the label that public things alone give it, or None if its voters have to be asked."""


def no_public_labels(questions: Sequence[Question]) -> Sequence[None]:
    """Return None for each question: all voters are asked."""
    return [None] * len(questions)


@dataclass(kw_only=True, eq=False)
class _WaitingRequest:
    """A request with new queries that waits for the ledger's writer, and the future that will receive its replies.

    ``refusal`` is the error that it gets instead. With a refusal for a quota, or for a token that is no longer valid,
    none of its queries is charged.
    """

    questions: Sequence[Question]
    caller: KnownCaller
    asker: Asker
    is_admitted: Callable[[], bool]
    answered: asyncio.Future[Sequence[Reply]]
    refusal: Exception | None = None


@dataclass(eq=False)
class Batcher:
    """Submits the queries of concurrent requests to the session, several requests together. Use it from one event
    loop."""

    writer: Writer
    health: Readiness
    _: KW_ONLY
    count_votes: sessions.CountVotes
    quotas: sessions.Quotas
    answer_step_s: float
    public_labels: PublicLabels = no_public_labels
    own_limits: Callable[[], Mapping[str, CallerLimit]] = dict
    on_group: Callable[[], None] = lambda: None
    _line: list[_WaitingRequest] = field(default_factory=list, init=False)
    _server: asyncio.Task[None] | None = field(default=None, init=False)

    async def ask(
        self,
        questions: Sequence[Question],
        caller: KnownCaller,
        request_id: str,
        is_admitted: Callable[[], bool] = lambda: True,
    ) -> Sequence[Reply]:
        """Submit the questions of a request; return one reply per question, in order.

        If a question is new, the replies are returned when the next multiple of ``answer_step_s`` has passed since the
        call. QuotaExceededError if the request has more new queries than the caller's quota allows now; then none of
        its queries is submitted. An error of the session is raised for all requests that were submitted together.

        ``is_admitted`` returns whether the token of the request is still valid; any thread calls it. It is asked before
        the vote and right before the charge. NotAdmittedError if it is not: then the request is charged nothing, and
        queries that another request submits too are charged to that one.
        """
        stored = self.writer.books.session.stored
        replies = [outcome for q in questions if (outcome := stored(q.query.key)) is not None]
        # Without waiting: GET /v1/queries/{key} also reveals whether a reply is stored.
        if len(replies) == len(questions):
            return replies
        loop = asyncio.get_running_loop()
        came_in_s = loop.time()
        answered: asyncio.Future[Sequence[Reply]] = loop.create_future()
        asker = Asker(caller.name, request_id)
        self._line.append(
            _WaitingRequest(questions=questions, caller=caller, asker=asker, is_admitted=is_admitted, answered=answered)
        )
        # Between its last look at the line and its end the task awaits nothing, so no request is left behind.
        if self._server is None or self._server.done():
            self._server = loop.create_task(self._serve())
        try:
            return await answered
        finally:
            # Errors wait as well, so that the time of a refusal reveals no more than that of an answer.
            await asyncio.sleep(until_next_step(loop.time() - came_in_s, self.answer_step_s))

    async def _serve(self) -> None:
        while self._line:
            totals = itertools.accumulate(len(request.questions) for request in self._line)
            # The first request, and those behind it that fit into one block of the session: as many as a full request.
            count = max(1, sum(total <= sessions.MAX_BLOCK for total in totals))
            group, self._line = self._line[:count], self._line[count:]
            self.on_group()
            replies: Mapping[str, Reply] = {}
            try:
                replies = await self.writer.call(partial(self._ask_together, group))
            except Exception as error:  # noqa: BLE001 - raised to the requests that wait
                for request in group:
                    request.refusal = error
            for request in group:
                # The client may have left meanwhile.
                if request.answered.done():
                    continue
                if request.refusal is not None:
                    request.answered.set_exception(request.refusal)
                else:
                    request.answered.set_result([replies[question.query.key] for question in request.questions])

    def _ask_together(self, group: Sequence[_WaitingRequest], session: AggregatorSession) -> dict[str, Reply]:
        """Submit several requests together; return the replies by the content hashes of queries. A request has a
        ``refusal`` afterwards if its caller's quota refused it or its token is no longer valid.

        Runs on the writer's thread, one group of requests at a time.
        """
        ledger = self.writer.books.ledger

        def look_again() -> None:
            """Refuse the requests whose tokens are no longer valid, and store the limits that have changed."""
            for request in group:
                if request.refusal is None and not request.is_admitted():
                    request.refusal = NotAdmittedError()
            # Before anything is charged under them.
            for name, limit in self.own_limits().items():
                if ledger.limits.get(name, NO_LIMIT) != limit:
                    session.limit(name, limit)

        look_again()
        with_quota: set[str] = set()  # an operator has none
        first_caller: dict[str, str] = {}
        by_key: dict[str, Question] = {}
        unknown = {
            question.query.key: question
            for request in group
            for question in request.questions
            if ledger.outcome_of.get(question.query.key) is None
        }
        labels = dict(zip(unknown, self.public_labels(list(unknown.values())), strict=True))
        asked_by: dict[str, list[_WaitingRequest]] = {}
        for request in group:
            if request.refusal is not None:
                continue
            name = request.caller.name
            keys = {question.query.key for question in request.questions}
            # A key that an earlier request of the group asks too is charged to that one.
            # One that needs no votes is charged to nobody.
            new = [key for key in keys if key not in first_caller and key in labels and labels[key] is None]
            if request.caller.role != "operator":
                # All that the caller asks in this group is charged at the same moment.
                wanted = len(new) + Counter(first_caller.values())[name]
                if (refusal := self.quotas.refusal(ledger, name, wanted, now_s=time.time())) is not None:
                    request.refusal = replace(refusal, num_new=len(new))
                    continue
                with_quota.add(name)
            first_caller.update(dict.fromkeys(new, name))
            for question in request.questions:
                by_key[question.query.key] = question
                asked_by.setdefault(question.query.key, []).append(request)
        voted = False

        def admit(queries: Sequence[Query]) -> Sequence[Query]:
            look_again()
            return [
                replace(query, askers=tuple(each.asker for each in asked_by[query.key] if each.refusal is None))
                for query in queries
            ]

        def vote(queries: Sequence[Query]) -> IntArray:
            nonlocal voted
            voted = True
            return self.count_votes([by_key[query.key] for query in queries])

        try:
            found = session.ask(
                [question.query for question in by_key.values()],
                vote,
                admit=admit,
                public=lambda queries: [labels[query.key] for query in queries],
                quota=lambda name: (
                    self.quotas.room(ledger, name, now_s=time.time()) if name in with_quota else math.inf
                ),
            )
        except (LedgerError, sqlite3.Error):  # not a failure of the teachers
            raise
        except Exception:
            self.health.votes_failed = True
            raise
        # Stored replies alone say nothing about the teachers.
        if voted:
            self.health.votes_failed = False
        return dict(zip(by_key, found, strict=True))


def until_next_step(elapsed_s: float, step_s: float) -> float:
    """Return the seconds from ``elapsed_s`` to the next whole multiple of ``step_s``; 0 if ``step_s`` is 0."""
    return max(0.0, math.ceil(elapsed_s / step_s) * step_s - elapsed_s) if step_s else 0.0
