"""The ledger of a run's queries: where it is, and that it has all that the run released before it is written to.

Once labels were released, a missing or incomplete ledger is never replaced: its charges would be forgotten.

Its queries are charged to the operator's odometer before the ledger charges them itself (:class:`LedgerMeter`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from aggregator import session as sessions
from aggregator.ledger import Ledger, LedgerState, LedgerTerms
from aggregator.mechanism import Outcome
from aggregator.session import queries_that_fit
from aggregator.store import Address, LedgerError, is_database
from fairpate.data import Split
from fairpate.privacy import mechanism_events
from fairpate.privacy.accountant import Event
from fairpate.releases.directory import (
    RunDirectory,
    RunDirectoryError,
    read_json,
    read_labels,
    read_statement,
    write_json,
)
from fairpate.releases.odometer import LimitReachedError, RunCharge
from fairpate.types import REMARKS, Unit, strict


@dataclass(frozen=True, kw_only=True)
class LedgerPlace:
    """The location (a path or a database URL) of a ledger, the durable record of queries and charges, and the location
    of its anchor, which repeats the ledger's last entry elsewhere; None: no anchor."""

    ledger: Address
    anchor: Address | None = None


def place_of(run: RunDirectory) -> LedgerPlace:
    """Return the location of the ledger of ``run``: in the run directory, unless a file there names another location.

    RunDirectoryError if that file is damaged.
    """
    if not run.ledger_place.exists():
        return LedgerPlace(ledger=run.ledger)
    values = read_json(run.ledger_place)
    anchor = values.get("anchor")
    if not all(isinstance(value, str | None) for value in values.values()) or values.keys() - {"ledger", "anchor"}:
        raise RunDirectoryError(
            f"{run.ledger_place}: this file, which states the place of the run's ledger, is damaged; restore it from "
            "a copy."
        )
    return LedgerPlace(ledger=values.get("ledger") or run.ledger, anchor=anchor and parsed(anchor))


def parsed(text: str) -> Address:
    """Return ``text`` unchanged if it is the URL of a database that holds a ledger, otherwise as the absolute path of a
    file."""
    return text if is_database(text) else Path(text).absolute()


def state_for_service(run: RunDirectory, terms: LedgerTerms) -> None:
    """Raise the epsilon in the run's privacy statement to the bound of the ledger's budget, before a service answers
    queries from the ledger.

    Analysts may spend the whole budget of the ledger, so from their first query on the epsilon of the run's own queries
    is too small. A statement whose epsilon is at least the bound is not changed.
    """
    statement, bound = read_statement(run), sessions.epsilon_fixed_beforehand(terms)
    if bound is None or statement.epsilon is None or bound <= statement.epsilon:
        return
    # A sum with earlier releases is at least the new epsilon, which is one of its parts.
    sums: dict[str, Any] = {
        name: None if (earlier := getattr(statement, name)) is None else max(earlier, bound)
        for name in ("epsilon_with_earlier", "epsilon_adaptive_with_earlier")
    }
    remarks = (*statement.remarks, REMARKS["answered_by_service"])
    served = replace(statement, epsilon=bound, **sums, remarks=remarks)
    write_json(run.statement, strict(served))


def require_released(run: RunDirectory, queries: Split, ledger: LedgerState) -> None:
    """Raise RunDirectoryError unless ``ledger`` has all labels that the run released on its ``queries``, and as many
    outcomes as the run's statement mentions."""
    _, lost = missing_labels(run, queries, ledger.outcome_of.get)
    stated = read_json(run.statement)["queries"]["submitted"] if run.statement.exists() else 0
    # Without those that were decided without votes, which the statement does not count.
    held = len(ledger.outcome_of) - len(ledger.free)
    if lost or held < stated:
        lacks = f"{lost} labels" if lost else f"{stated - held} of {stated} queries"
        raise RunDirectoryError(
            f"{ledger.name}: this ledger lacks {lacks} that the run has released. Restore all files of the "
            "ledger, and the public records of the data set, from one copy; or start a new run folder."
        )


def open_ledger(
    run: RunDirectory,
    terms: LedgerTerms,
    queries: Split,
    *,
    create: bool,
    meter: LedgerMeter | None,
    take_over: bool = False,
) -> Ledger:
    """Open the run's ledger, the durable record of its queries and charges, if it contains all labels that were
    released from it.

    ``queries`` are the records on which the run queries the voters. With ``create``, a missing ledger is created, but
    only if nothing was released yet. ``meter`` charges the ledger's queries to the odometer, the operator's total of
    all runs. ``take_over`` ends another process that writes to the ledger, if possible. RunDirectoryError for a ledger
    that lacks released labels, or queries that the run's statement mentions; LedgerError as :class:`Ledger`.
    """
    released = sorted(run.public.iterdir()) if run.public.exists() else []
    released = [path for path in released if path != run.embedding]  # of public records alone, before any vote
    place = place_of(run)
    is_file = not is_database(place.ledger)
    if released and is_file and not run.ledger.exists():
        raise RunDirectoryError(
            f"{run.ledger}: this ledger is missing, although {released[0]} was released and charged to it; restore all "
            "files of the ledger from one copy, or start a new run folder."
        )
    # Once something was released, a missing ledger is never replaced: its charges would be forgotten.
    may_create = create and not released and is_file
    ledger = Ledger(place.ledger, terms, create=may_create, anchor=place.anchor, take_over=take_over)
    try:
        ledger.actions = run.actions
        # Its writer is this process from here on; before, `ledger anchor` or `ledger restore` may have moved it.
        if place_of(run) != place:
            raise LedgerError(  # noqa: TRY301 - the ledger is closed below
                f"{ledger.name}: the ledger got an anchor or another place while it was being opened; give the command "
                "again."
            )
        if released:
            require_released(run, queries, ledger)
        # After the check: the meter would settle the odometer to a ledger that lacks what was released.
        if meter is not None:
            meter.settle(ledger)
    # Also after an interrupt: an open ledger would keep its lock.
    except BaseException:
        ledger.close()
        raise
    return ledger


def missing_labels(run: RunDirectory, queries: Split, outcome: Callable[[str], Outcome | None]) -> tuple[int, int]:
    """Return the number of released labels of ``run``, and how many of them are missing in a ledger.

    ``outcome`` returns the ledger's outcome of a query key, or None.
    """
    if not run.labels.exists():
        return 0, 0
    labelled = read_labels(run.labels)
    counts = [None] * len(labelled.labels) if labelled.counts is None else map(tuple, labelled.counts.tolist())
    key_of = dict(zip(queries.record_id, keys_of(queries), strict=True))
    # A released record that is no query here has no key, and counts as lost.
    # Label and counts too: a ledger with another answer is that of another release.
    lost = sum(
        outcome(key_of.get(record_id, "")) != Outcome(verdict="answer", label=label, counts=row)
        for record_id, label, row in zip(labelled.record_ids, labelled.labels.tolist(), counts, strict=True)
    )
    return len(labelled.labels), lost


def keys_of(queries: Split) -> list[str]:
    """Return the key under which the ledger stores each record's query: a digest of its features and group."""
    return [sessions.query_key(x, group) for x, group in zip(queries.x.numpy(), queries.z.tolist(), strict=True)]


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
