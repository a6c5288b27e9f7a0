"""The chain of a service's ledger, verified again and again beside the queries, and what was found last.

A chain that does not hold ends the writing: new queries are refused until the ledger was restored and opened again,
which verifies every entry. A ledger that cannot be read now is another matter: nothing is known of its chain, what was
found before stays, and the next round tries again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

from aggregator.ledger import audit
from aggregator.ledger.files import LedgerError, UnreachableError
from aggregator.ledger.slices import verified_slices
from aggregator.service.writer import Books, Writer

# A slice of half a millisecond holds up one request in fifty, at most, by its own length.
_PAUSE_S, _SHARE = 0.02, 0.02
_log = logging.getLogger(__name__)


class Verification:
    """Rounds over all entries, ``interval_s`` apart, in a thread between :meth:`begin` and :meth:`close`."""

    def __init__(self, writer: Writer, *, interval_s: float) -> None:
        self._writer, self._interval_s = writer, interval_s
        self._ended = threading.Event()
        self._note(writer.books, writer.books.ledger.head.number, "")

    @property
    def chain(self) -> dict[str, Any]:
        """What was found last; a :class:`aggregator.service.operator_wire.Chain`."""
        books = self._writer.books
        if books is not self._books:  # opened again, which verifies every entry
            self._note(books, books.ledger.head.number, "")
        return self._chain

    @property
    def fault(self) -> str:
        """Why the chain does not hold; empty: it does, as far as is known."""
        return str(self.chain["fault"])

    def begin(self) -> None:
        """Start the rounds."""
        # No thread of a pool: the end of the process would wait for a database that hangs.
        threading.Thread(target=self._go_round, daemon=True, name="verification").start()

    def close(self) -> None:
        """End them after the slice under way."""
        self._ended.set()

    async def verify_now(self) -> dict[str, Any]:
        """Verify every entry at once; returns :attr:`chain`. UnreachableError where the ledger cannot be read now."""
        books = self._writer.books
        try:
            entries = (await asyncio.to_thread(audit.verify, books.ledger.place)).entries
        except UnreachableError:
            raise
        except LedgerError as error:
            self._broken(books, error)
        else:
            self._note(books, entries, "")
        return self.chain

    def _go_round(self) -> None:
        while not self._ended.wait(self._interval_s):
            books = self._writer.books
            # A ledger that failed is verified when it is opened again.
            if self._writer.failure:
                continue
            try:
                self._round(books)
            except UnreachableError as error:
                _log.warning("The ledger cannot be verified now: %s", error)
            except LedgerError as error:
                self._broken(books, error)
            except Exception:  # noqa: BLE001 - the next round tries again
                _log.exception("The ledger could not be verified.")

    def _round(self, books: Books) -> None:
        began_s, entries = time.perf_counter(), 0
        for count in verified_slices(books.ledger):
            entries, took_s = count, time.perf_counter() - began_s
            if self._ended.wait(max(_PAUSE_S, took_s / _SHARE)) or books is not self._writer.books:
                return
            began_s = time.perf_counter()
        self._note(books, entries, "")

    def _broken(self, books: Books, error: LedgerError) -> None:
        _log.error("The chain of the ledger does not hold; new queries are refused: %s", error)
        self._note(books, 0, str(error))
        self._writer.fail(books, str(error))

    def _note(self, books: Books, entries: int, fault: str) -> None:
        self._books, self._chain = books, {"at_s": time.time(), "entries": entries, "fault": fault}
