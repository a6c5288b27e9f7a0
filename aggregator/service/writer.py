"""The one thread that writes the ledger, and what readers see of it meanwhile.

Calls of the session run one after another on a thread of their own. After each of them what readers need is noted in an
immutable :class:`Snapshot`, so that no reader ever waits for the writer: neither behind teachers that are slow to vote
nor behind a slow disk. A snapshot is as new as the last durable transaction.

A ledger whose write failed ends its writing. It is opened again, which verifies and replays every entry, as soon as
its store may take a durable write; until then new queries fail at once and stored replies are still given.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from aggregator.ledger.budget import BudgetStatus, budget_status, queries_that_fit
from aggregator.ledger.files import LedgerError
from aggregator.ledger.ledger import Ledger
from aggregator.ledger.slices import require_entry
from aggregator.ledger.terms import LedgerTerms
from aggregator.session import AggregatorSession
from fairpate.privacy import accountant
from fairpate.privacy.conversion import epsilon_of_curve
from fairpate.privacy.smooth_release import SanitisedRdp
from fairpate.types import UserError

ResultT = TypeVar("ResultT")
OpenBooks = Callable[[], tuple[Ledger, AggregatorSession]]
_REOPEN_PAUSE_S = 1.0
_PRICED_TOGETHER = 256
_MOST_NEW_QUERIES = 10**7
_MOST_PLANNED = 10**6
_ORDERS_A = np.array(accountant.DEFAULT_ORDERS)


class RunningPrice:
    """The data-dependent price of a ledger's charges, for the operator alone. Every charge is priced once."""

    def __init__(self, terms: LedgerTerms) -> None:
        self._lock = threading.Lock()
        self._curve_A = np.zeros(len(_ORDERS_A))
        self._num_priced = 0
        # At the order that prices the whole budget best, whatever the votes.
        planned = [terms.mechanism.worst_case(queries_that_fit(terms, _MOST_PLANNED) or 1)]
        order = accountant.epsilon(planned, target_delta=terms.budget.delta).order
        self._place = int(np.abs(_ORDERS_A - order).argmin())
        self.order = float(_ORDERS_A[self._place])
        self._cost_Q, self._voted_Q = np.zeros(0), np.zeros(0, dtype=np.bool_)

    def epsilon(self, ledger: Ledger, num_charges: int) -> float:
        """The price of the first ``num_charges`` charges, or of more if another thread asked for more."""
        with self._lock:
            self._add(ledger, self._num_priced, max(num_charges, self._num_priced))
            if not self._curve_A.any():
                return 0.0
            return epsilon_of_curve(self._curve_A, _ORDERS_A, target_delta=ledger.terms.budget.delta)[0]

    def costs(self, num_charges: int) -> npt.NDArray[np.float64]:
        """Of the first ``num_charges`` charges, which were priced before, at ``order``; 0 where no votes were used."""
        with self._lock:
            return self._cost_Q[:num_charges]

    def voted(self, num_charges: int) -> npt.NDArray[np.bool_]:
        """For which of them votes were used, as it was known when they were priced."""
        with self._lock:
            return self._voted_Q[:num_charges]

    def _add(self, ledger: Ledger, start: int, stop: int) -> None:
        if start == stop:
            return
        outcomes = [outcome for _, _, outcome in ledger.charged(start, stop)]
        # An open reservation may have been drawn; only outcomes that are known to have cost nothing are left out.
        touched = np.array([outcome is None or outcome.is_charged for outcome in outcomes])
        votes_QC, cost_Q = ledger.votes_QC[start:stop][touched], np.zeros(stop - start)
        curve_A, prices = self._curve_A, []
        for first in range(0, len(votes_QC), _PRICED_TOGETHER):  # a thread that prices much lets others run
            prices_QA = ledger.terms.mechanism.realised_rdp(votes_QC[first : first + _PRICED_TOGETHER], _ORDERS_A)
            curve_A = curve_A + prices_QA.sum(axis=0)
            prices.append(prices_QA[:, self._place])
        cost_Q[touched] = np.concatenate([*prices, np.zeros(0)])
        # All at the end: what a failure left half priced would be added a second time.
        self._curve_A, self._num_priced = curve_A, stop
        self._cost_Q, self._voted_Q = np.append(self._cost_Q, cost_Q), np.append(self._voted_Q, touched)


@dataclass(frozen=True, kw_only=True)
class Books:
    """An open ledger, the session that writes it and the running price of its charges."""

    ledger: Ledger
    session: AggregatorSession
    price: RunningPrice = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "price", RunningPrice(self.ledger.terms))

    def snapshot(self) -> Snapshot:
        """The state now; to be taken between two transactions."""
        return Snapshot(
            books=self,
            num_charges=self.ledger.num_reservations,
            num_publications=len(self.ledger.publications),
            room=self.session.room(_MOST_NEW_QUERIES),
            published=self.session.published(),
        )


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a ledger and its budget held after the last durable transaction.

    ``room``: how many new queries the budget admits, at least.
    """

    books: Books
    num_charges: int
    num_publications: int
    room: int
    published: SanitisedRdp | None

    @property
    def terms(self) -> LedgerTerms:
        """What the ledger is a ledger of."""
        return self.books.ledger.terms

    def budget_status(self, num_new_queries: int = 0) -> BudgetStatus:
        """The budget as it would be after that many new queries, whether or not all of them have room."""
        return budget_status(
            self.terms,
            num_queries=self.num_charges + num_new_queries,
            num_publications=self.num_publications,
            closed=self.room <= num_new_queries,
        )


class Writer:
    """Calls a session from one thread, and opens its ledger again after a failed write; :meth:`close` at the end.

    ``books``, ``snapshot``, ``failure`` (empty: none) and ``busy_since_s`` may be read from any thread.
    """

    def __init__(self, books: Books, *, reopen: OpenBooks | None) -> None:
        self.books, self.snapshot = books, books.snapshot()
        self.failure = ""
        self.busy_since_s: float | None = None
        self._reopen = reopen
        # The first failure is followed by an attempt at once.
        self._tried_s = -_REOPEN_PAUSE_S
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")

    def close(self) -> None:
        """Wait for the call under way, end the thread and close the ledger."""
        self._thread.shutdown()
        self.books.ledger.close()

    async def call(self, function: Callable[[AggregatorSession], ResultT]) -> ResultT:
        """``function(session)`` on the writer's thread. LedgerError at once while the ledger cannot be written."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, function)

    def fail(self, books: Books, failure: str) -> None:
        """End the writing of ``books``, unless others are open by now; it goes on as after a failed write."""
        if books is self.books and not self.failure:
            self.failure = failure

    async def recover(self) -> None:
        """Open the ledger again if a write failed and the disk is back; says nothing where it is not."""
        with contextlib.suppress(LedgerError):
            await asyncio.get_running_loop().run_in_executor(self._thread, self._recover)

    def _call(self, function: Callable[[AggregatorSession], ResultT]) -> ResultT:
        self.busy_since_s = time.monotonic()
        try:
            self._recover()
            return function(self.books.session)
        except (LedgerError, sqlite3.Error) as error:
            self.failure = str(error)
            raise
        finally:
            # Replaced as a whole and never changed, so that readers need no lock.
            self.snapshot = self.books.snapshot()
            self.busy_since_s = None

    def _recover(self) -> None:
        """LedgerError if the ledger failed and cannot be opened again yet."""
        if not self.failure:
            return
        if self._reopen is None or time.monotonic() < self._tried_s + _REOPEN_PAUSE_S:
            raise LedgerError(self.failure)
        self._tried_s = time.monotonic()
        self.books.ledger.require_writable()
        self.books.ledger.close()  # it goes on giving stored replies from memory
        try:
            ledger, session = self._reopen()
        except UserError as error:  # a ledger that was removed, or lacks what was released, is not made again
            raise LedgerError(str(error)) from error
        try:
            # A copy that is older than the last answers is whole in itself, and would charge less than was spent.
            require_entry(ledger, self.books.ledger.head)
        except BaseException:
            ledger.close()
            raise
        self.books = Books(ledger=ledger, session=session)
        self.snapshot, self.failure = self.books.snapshot(), ""
