"""One run's way to the odometer: what it is about to release is counted before anything of it becomes visible.

A ledger that goes on holds room for a block of queries ahead, so that a crash counts too many and never too few; opened
again, it is settled to what it really holds. A run is known by a random id in its ``private/release.json``, with the
same events: repeated it counts once, deleted it stays counted, and where the odometer lost it, it is counted again when
it is next touched.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

from aggregator.ledger.budget import queries_that_fit
from aggregator.ledger.files import LedgerError
from aggregator.ledger.ledger import Ledger
from aggregator.ledger.terms import LedgerTerms
from fairpate.app.rundir import RunDirectory, RunDirectoryError
from fairpate.app.spending.odometer import LimitReachedError, Odometer, Standing
from fairpate.app.spending.receipt import Release, read_receipt, write_receipt
from fairpate.privacy.event_values import merged
from fairpate.privacy.events import Event
from fairpate.privacy.fair_training import of_teachers
from fairpate.types import Unit

_BLOCK = 256
"""Queries that a ledger may take between two writes of the odometer, and that a crash counts too many, at most."""
_log = logging.getLogger(__name__)


class Meter:
    """One run's way to the odometer: told before anything of the run becomes visible.

    Made when a run is opened; a run that has its receipt and is unknown to the odometer is counted again. ``release``:
    the id of the release that the run keeps (:mod:`fairpate.app.released`), which was counted when it was drawn; a run
    that goes on from it, in whatever folder, is no other release.
    """

    def __init__(
        self, run: RunDirectory, odometer: Odometer, *, data: str, method: str, release: str | None = None
    ) -> None:
        self._run, self._odometer = run, odometer
        self._data, self._method = data, method
        self._admitted: tuple[Event, ...] | None = None
        receipt = read_receipt(run)
        self.id = release or (secrets.token_hex(16) if receipt is None else receipt.run)
        if receipt is None:
            return
        stored = odometer.find(receipt.run)
        if release is None and stored is not None and _is_copy(run, stored):
            _log.warning("%s: a copy of %s; counted as another run.", run.root, stored.path)
            self.id = secrets.token_hex(16)
        elif stored is None:
            _log.warning("%s: was released and is not in %s; counted again.", run.root, odometer.path)
            # Past a limit too: it was released, and a refusal would leave it out of the sum.
            odometer.record(receipt, enforce=False)

    def start_another(self) -> None:
        """What the run releases next is another release: what it has a receipt of may have been seen."""
        if self._run.receipt.exists():
            _log.warning("%s: may have released a model that is gone; the next one is counted besides.", self._run.root)
            self.id = secrets.token_hex(16)

    def record(
        self,
        events: Sequence[Event],
        *,
        noise: str,
        num_queries: int | None = None,
        plan: Sequence[Event] | None = None,
        enforce: bool = True,
    ) -> None:
        """What the run released, or is about to; ``num_queries`` None: as many as before.

        ``plan`` and errors as :meth:`Odometer.record`.
        """
        if num_queries is None:
            stored = self.stored()
            num_queries = 0 if stored is None else stored.num_queries
        release = self.release(events, noise=noise, num_queries=num_queries)
        # The row before the receipt: a crash between them counts a release that nobody saw, never the reverse.
        write_receipt(self._run, self._odometer.record(release, plan=plan, enforce=enforce))

    def count_again(self, events: Sequence[Event], *, noise: str) -> None:
        """What another run released and this one goes on from, where the odometer does not know it.

        Without a receipt: this run is not the one that drew it.
        """
        if self.stored() is None:
            _log.warning("%s: goes on from a release that is not in %s; counted.", self._run.root, self._odometer.path)
            self._odometer.record(self.release(events, noise=noise), enforce=False)

    def release(self, events: Sequence[Event], *, noise: str, num_queries: int = 0) -> Release:
        """The row that :meth:`record` would store."""
        return Release(
            run=self.id,
            data=self._data,
            unit=events[0].unit,
            relation=events[0].relation,
            noise=noise,
            method=self._method,
            path=str(self._run.root.absolute()),
            events=merged(events),
            num_queries=num_queries,
        )

    def check(self, events: Sequence[Event], *, noise: str) -> None:
        """LimitReachedError if these events would pass the limit; nothing is stored."""
        self._odometer.check(self.release(events, noise=noise))

    def admit(self, events: Sequence[Event], *, noise: str) -> None:
        """:meth:`check` all that the run will release, for :meth:`record_given_up`; an earlier call holds no more."""
        self.check(events, noise=noise)
        self._admitted = tuple(events)

    def record_given_up(self, events: Sequence[Event], *, noise: str) -> None:
        """Count a release that ended its run, before the reason is shown, which tells what was released.

        LimitReachedError, and then nothing may be shown, where a run that does not give up is refused too: limits are
        asked for what :meth:`admit` was, or ``events``.
        """
        self.record(self._admitted or events, noise=noise)
        self.record(events, noise=noise, enforce=False)

    def standing(self, *, delta: float) -> Standing | None:
        """As :meth:`Odometer.standing`."""
        return self._odometer.standing(self.id, delta=delta)

    def stored(self) -> Release | None:
        """What the odometer holds of this run."""
        return self._odometer.find(self.id)


class LedgerMeter:
    """Holds room in the odometer for what a ledger may charge next; :class:`Ledger` calls it before each charge.

    ``planned`` queries are counted as soon as one is submitted: where released labels decide how many are, fewer tell
    too. ``plan``: all events that were fixed before the first query, as of a run; empty: none were, as of a service.
    """

    def __init__(
        self,
        meter: Meter,
        terms: LedgerTerms,
        *,
        unit: Unit = "record",
        planned: int = 0,
        plan: Sequence[Event] = (),
    ) -> None:
        self._meter, self._terms = meter, terms
        self._planned = queries_that_fit(terms, planned) if planned else 0
        self._unit, self._plan = unit, plan
        self._settled, self._held = 0, (0, 0)
        self._ledger: Ledger | None = None

    def open(self, ledger: Ledger) -> None:
        """Settle to what the ledger holds. RunDirectoryError for one that holds less than was counted."""
        stored = self._meter.stored()
        # `num_queries` is what the ledger surely held, not the room that was counted ahead.
        if stored is not None and ledger.num_reservations < stored.num_queries:
            raise RunDirectoryError(
                f"{ledger.name}: lacks {stored.num_queries - ledger.num_reservations} of {stored.num_queries} queries "
                "that were charged; restore all its files from one copy made later."
            )
        self.settle(ledger)
        self._ledger, ledger.hold = ledger, self

    def settle(self, ledger: Ledger) -> None:
        """Count what the ledger holds, no more."""
        self._settled, publications = ledger.num_reservations, len(ledger.publications)
        # A ledger that was opened and never asked is no release.
        if self._settled or self._meter.stored() is not None:
            self._store(self._settled, publications, enforce=False)

    def __call__(self, num_reservations: int, num_publications: int) -> None:
        """Make room for so many in all, durably. LedgerError where a limit has none."""
        if num_reservations <= self._held[0] and num_publications <= self._held[1]:
            return
        if self._ledger is not None:  # so many it has for good: an older copy of its files is known by them
            self._settled = self._ledger.num_reservations
        # Room for a block: one durable write here serves as many charges.
        ahead = num_reservations + _BLOCK - 1
        try:
            # No further than the ledger's own budget: room beyond it could never be charged.
            self._store(max(num_reservations, queries_that_fit(self._terms, ahead)), num_publications, enforce=True)
        except LimitReachedError:
            # Near the limit a whole block has no room, and what is asked may have.
            self._store_exactly(num_reservations, num_publications)

    def _store_exactly(self, num_reservations: int, num_publications: int) -> None:
        try:
            self._store(num_reservations, num_publications, enforce=True)
        except LimitReachedError as error:
            raise LedgerError(str(error)) from error

    def _store(self, num_reservations: int, num_publications: int, *, enforce: bool) -> None:
        count = max(num_reservations, self._planned) if num_reservations else 0
        publication = self._terms.publication
        publications = [] if publication is None else [publication] * num_publications
        # At their worst case: statements publish the odometer's sums, which must not follow from votes.
        events = [of_teachers(event, self._unit) for event in (self._terms.mechanism.worst_case(count), *publications)]
        noise, plan = self._terms.noise, self._plan
        self._meter.record(events, noise=noise, num_queries=self._settled, plan=plan, enforce=enforce)
        self._held = (num_reservations, num_publications)


def _is_copy(run: RunDirectory, stored: Release) -> bool:
    """Whether the run that was counted still lies elsewhere: two folders that go on are two runs."""
    other = RunDirectory(root=Path(stored.path))
    if other.root == run.root.absolute():
        return False
    # A folder that was moved leaves no receipt at its old place, and is the same run.
    receipt = read_receipt(other)
    return receipt is not None and receipt.run == stored.run
