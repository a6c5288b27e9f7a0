"""The meter of a ledger: it charges the queries of a run's ledger to the operator's odometer, before the ledger
charges them itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from aggregator.ledger import Ledger, LedgerState, LedgerTerms
from aggregator.session import queries_that_fit
from aggregator.store import LedgerError
from fairpate.privacy import mechanism_events
from fairpate.privacy.accountant import Event
from fairpate.releases.directory import RunDirectoryError
from fairpate.releases.odometer import LimitReachedError, RunCharge
from fairpate.types import Unit

# Most queries that are charged in advance: a ledger may take them without writing to the odometer again, and a crash
# charges at most this number too many.
_BLOCK = 256


class Charging(Protocol):
    """Charges a run to the operator's odometer, as :class:`fairpate.releases.log.ReleaseLog` does."""

    def charge(
        self,
        events: Sequence[Event],
        *,
        noise: str,
        num_queries: int | None = None,
        plan: Sequence[Event] | None = None,
        enforce: bool = True,
    ) -> None:
        """Charge the privacy ``events`` of everything that the run released or is about to release."""

    def stored(self) -> RunCharge | None:
        """Return what was charged for this run so far; None if nothing was."""


@dataclass(eq=False)
class LedgerMeter:
    """Charges the queries of a ledger to the odometer, the database of privacy costs; :class:`Ledger` calls this object
    before it charges a query itself.

    For an open ledger a block of further queries is charged in advance, so that a crash may charge too many queries but
    never too few. When the ledger is opened again, the charge is reduced to the queries that it contains.

    ``planned``: the number of queries that are charged as soon as one is submitted. It is needed if released labels
    decide how many queries follow: a charge for fewer queries would reveal something about these labels. ``plan``: all
    privacy events that a run fixed before its first query; empty for a service, whose callers choose the queries.
    """

    log: Charging
    terms: LedgerTerms
    unit: Unit = field(default="record", kw_only=True)
    planned: int = field(default=0, kw_only=True)
    plan: Sequence[Event] = field(default=(), kw_only=True)
    _settled: int = field(default=0, init=False)
    _held: int = field(default=0, init=False)
    _ledger: Ledger | None = field(default=None, init=False)

    def check(self, ledger: LedgerState) -> None:
        """Raise RunDirectoryError if ``ledger`` contains fewer queries than were charged before."""
        stored = self.log.stored()
        # `num_queries` is what the ledger surely contained, not the queries charged ahead.
        if stored is not None and len(ledger.keys) < stored.num_queries:
            raise RunDirectoryError(
                f"{ledger.name}: this ledger lacks {stored.num_queries - len(ledger.keys)} of {stored.num_queries} "
                "queries that were charged; restore all of its files from one later copy."
            )

    def settle(self, ledger: Ledger) -> None:
        """Set the charge in the odometer (the database of privacy costs) to the number of queries that ``ledger``
        contains, and from now on charge further queries in advance.

        RunDirectoryError if the ledger contains fewer queries than were charged before.
        """
        self.check(ledger)
        stored = self.log.stored()
        self._ledger, ledger.hold, self._settled = ledger, self, len(ledger.keys)
        # A ledger that was opened but never queried is no release.
        if self._settled or stored is not None:
            # Beyond a limit too: these queries were charged, and a refusal would leave them out of the sum.
            self._held = -1
            self(self._settled, enforce=False)

    def __call__(self, num_reservations: int, *, enforce: bool = True) -> None:
        """Raise the odometer's charge to ``num_reservations`` queries of this ledger in total (a reservation: the
        charge of a query before its answer), and store it durably.

        LedgerError if a limit would be exceeded. Without ``enforce`` no limit is checked, and exactly this number is
        charged, without a block of queries in advance.
        """
        if num_reservations <= self._held:
            return
        if self._ledger is not None:  # the ledger has these for good: an older copy of its files lacks some of them
            self._settled = len(self._ledger.keys)
        # A block ahead: one durable write here serves many charges. No further than the ledger's own budget: more could
        # never be charged.
        rooms = [num_reservations]
        if enforce:
            # Near the limit a whole block may not fit, but the queries that are submitted may.
            rooms.insert(0, max(num_reservations, queries_that_fit(self.terms, num_reservations + _BLOCK - 1)))
        planned = queries_that_fit(self.terms, self.planned) if self.planned else 0
        for room in rooms:
            count = max(room, planned) if room else 0
            # At their worst case: statements publish the odometer's sums, which must not depend on votes.
            charged = self.terms.events(count) if count else [self.terms.mechanism.worst_case(0)]
            events = [mechanism_events.of_teachers(event, self.unit) for event in charged]
            noise, plan = self.terms.noise, self.plan
            try:
                self.log.charge(events, noise=noise, num_queries=self._settled, plan=plan, enforce=enforce)
            except LimitReachedError as error:
                if room == num_reservations:
                    raise LedgerError(str(error)) from error
            else:
                self._held = room
                return
