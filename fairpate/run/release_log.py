"""What was released, written before it is visible: a receipt in each run, and the operator's odometer over all runs.

What one run released, as its receipt and the odometer hold it, and what releases of one kind cost together.

Events are data-independent and at their worst case; one accountant composes them. A release without privacy (seeded
noise, or none) is listed and adds to no sum.

Not known here: which releases there are on a data set, and what they may cost.

The odometer: what all releases on one data set cost together, per unit and relation.

Two runs on the same private records cost their sum, whatever folders they lie in. So every release writes one row
here, in a file of the operator (:func:`state_folder`), before anything of it becomes visible
(:mod:`fairpate.run.release_log`). Releases under another unit or relation are another sum. One by person counts in
the sum of records too, at the person's price.

A sum of epsilons prices releases that were fixed beforehand. A limit bounds more: releases of which each may be chosen
in view of the earlier ones. It counts them at one Renyi order (:class:`fairpate.privacy.accountant.AdaptiveLimit`),
which is never better and mostly a little worse than the sum. So that a limit of epsilon admits a run planned at that
epsilon, a first run whose plan the sum admits, and the order does not, is admitted as the only release: the plan is
kept and charged in full from then on. Had less of it room for others, which of two bounds holds would depend on what
was released, and both deltas would add up.

Not known here: who trains, how much noise would meet a limit, and what other machines released.

One run's way to the odometer: what it is about to release is counted before anything of it becomes visible.

A ledger that goes on holds room for a block of queries ahead, so that a crash counts too many and never too few; opened
again, it is settled to what it really holds. A run is known by a random id in its ``private/release.json``, with the
same events: repeated it counts once, deleted it stays counted, and where the odometer lost it, it is counted again when
it is next touched.

What a run read private records for, kept in its public part: arrays, their events, and the settings behind them.

Anyone who has the file may go on from it, with other settings of all that comes after, and touches no private record:
the release is counted once, under the id in the file, whatever number of runs go on from it. A release whose file is
lost cannot be drawn again; another one is counted besides. Not known here: what the arrays mean, or who may share
them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from aggregator.budgets import queries_that_fit
from aggregator.chain import LedgerError
from aggregator.ledger import Ledger, LedgerTerms
from aggregator.service.wire import worded
from fairpate.files import write_atomically
from fairpate.privacy import accountant
from fairpate.privacy.accountant import DEFAULT_ORDERS, AdaptiveLimit, epsilon_of_curve, least_adaptive_limit
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.privacy.events import Event
from fairpate.privacy.laplace import pure_epsilon
from fairpate.privacy.loss_distributions import LEAST_DELTA
from fairpate.privacy.mechanism_events import covering, event_from, event_json, merged, of_a_record, of_teachers
from fairpate.report.page import counted, epsilon_text
from fairpate.run.context import RunDirectory, RunDirectoryError, write_json
from fairpate.types import Relation, Unit, UserError
from fairpate.words import delta_text

FloatArray = npt.NDArray[np.float64]
_MOST_DISTRIBUTIONS = 8  # of several releases, composed at once; beyond, Renyi curves alone are added


class OdometerError(UserError):
    """The odometer or a receipt cannot be read or written; nothing was released."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """All that one run released so far. ``num_queries`` is how many its ledger surely holds; 0 without a ledger.

    ``plan``: where a limit admitted the run as the only release, all events that were fixed before the first of them;
    ``events`` are among them. Limits charge the whole plan, however little of it was released; empty where they charge
    the events.
    """

    run: str
    data: str
    unit: Unit
    relation: Relation
    noise: str
    method: str
    path: str
    events: tuple[Event, ...]
    num_queries: int = 0
    plan: tuple[Event, ...] = ()
    rdp_A: FloatArray = field(default_factory=lambda: np.zeros(0), compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.rdp_A) != len(DEFAULT_ORDERS):
            # Also where the order grid has changed since the row was written.
            object.__setattr__(self, "rdp_A", curve_of(self.events))

    @property
    def charged(self) -> Release:
        """The release with the events that limits charge, and no plan."""
        if not self.plan:
            return self
        return replace(self, events=self.plan, plan=(), rdp_A=np.zeros(0))

    @property
    def is_private(self) -> bool:
        """Whether it has any privacy guarantee."""
        if self.noise != OS_ENTROPY:
            return False
        # Any delta would do: the question is whether some bound is finite.
        return bool(np.isfinite(self.rdp_A).any()) or composed_epsilon([self], delta=0.5) < math.inf


def read_receipt(run: RunDirectory) -> Release | None:
    """What the run itself says that it released; None if it has no receipt. OdometerError for a damaged one."""
    if not run.receipt.exists():
        return None
    try:
        return release_from(json.loads(run.receipt.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OdometerError(f"{run.receipt}: damaged ({error}); restore it from a copy.") from error


def release_from(values: Mapping[str, Any]) -> Release:
    """A release from the values of a receipt."""
    # Receipts of earlier versions have no plan.
    events = {name: tuple(map(event_from, values.get(name, ()))) for name in ("events", "plan")}
    return Release(**{**values, **events})


def write_receipt(run: RunDirectory, release: Release) -> None:
    """What :func:`read_receipt` reads."""
    write_json(run.receipt, release_values(release))


def release_values(release: Release) -> dict[str, Any]:
    """A release as plain values, as a receipt holds it."""
    values = {column.name: getattr(release, column.name) for column in fields(release) if column.name != "rdp_A"}
    events = {name: [worded(event_json(event)) for event in values[name]] for name in ("events", "plan")}
    return values | events


def composed_epsilon(releases: Sequence[Release], *, delta: float) -> float:
    """The epsilon of releases of one unit and relation together: the least of the bounds that the accountant has.

    For releases that were fixed before the first of them. All bounds hold for any data, so that taking the least tells
    nothing. ``inf`` where there is none.
    """
    events = merged([event for release in releases for event in release.events])
    curve_A = summed_curve(releases)
    bounds = [pure_epsilon(events)]
    if np.isfinite(curve_A).any():
        bounds.append(epsilon_of_curve(curve_A, DEFAULT_ORDERS, target_delta=delta)[0])
    # One release alone is priced as its statement prices it, so that a limit admits a run planned at it.
    is_quick = len(releases) == 1 or len(events) <= _MOST_DISTRIBUTIONS
    # Below the least delta of loss distributions curves decide, and they may not be known.
    if events and is_quick and delta >= LEAST_DELTA and accountant.has_loss_distributions(events):
        bounds.append(accountant.epsilon_pld(events, target_delta=delta))
    return min(bounds)


def adaptive_epsilon(releases: Sequence[Release], *, delta: float) -> float:
    """The least limit that would have admitted these releases of one unit and relation, in whatever order they came.

    They may have been chosen in view of each other; one alone was fixed beforehand. Charged as limits charge them.
    """
    charged = [release.charged for release in releases]
    if len(charged) == 1:
        return composed_epsilon(charged, delta=delta)
    return least_adaptive_limit(summed_curve(charged), delta=delta)


def summed_curve(releases: Sequence[Release]) -> FloatArray:
    """The Renyi curve of all ``releases`` together."""
    return sum((release.rdp_A for release in releases), np.zeros(len(DEFAULT_ORDERS)))


def curve_of(events: Sequence[Event]) -> FloatArray:
    """The composed Renyi curve, ``inf`` where an event has none; kept with a release, for sums of thousands."""
    try:
        return accountant.rdp(events)
    except ValueError:
        return np.full(len(DEFAULT_ORDERS), math.inf)


_FILE = "odometer.sqlite"


class LimitReachedError(UserError):
    """A release would pass the limit of its data set; nothing was released."""


@dataclass(frozen=True, kw_only=True)
class Total:
    """What the releases on one data set cost together under one unit and relation; ``epsilon_limit`` None: no limit.

    ``epsilon`` holds where all were fixed before the first of them; ``epsilon_adaptive`` is the least limit that would
    have admitted them, each chosen in view of the earlier ones.
    """

    data: str
    unit: Unit
    relation: Relation
    releases: int
    not_private: int
    epsilon: float
    epsilon_adaptive: float
    delta: float
    epsilon_limit: float | None


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a release stands: how many came before it on its data set, and what they cost together with it.

    Both epsilons as those of :class:`Total`.
    """

    earlier: int
    epsilon: float
    epsilon_adaptive: float


def standing_remarks(standing: Standing | None, *, delta: float) -> tuple[str, ...]:
    """What a statement remarks of earlier releases; nothing where there were none."""
    if standing is None or not standing.earlier:
        return ()
    fixed, adaptive = epsilon_text(standing.epsilon), epsilon_text(standing.epsilon_adaptive)
    return (
        f"This operator released {counted(standing.earlier, 'earlier result')} on the same data set. Together with "
        f"this one they cost ε = {fixed} at δ = {delta_text(delta)} if all were fixed beforehand, and the least limit "
        f"that admits them, each chosen in view of the earlier ones, is ε = {adaptive}.",
    )


def state_folder() -> Path:
    """The folder of the operator's own files: ``FAIRPATE_STATE``, or ``fairpate`` in ``XDG_STATE_HOME``.

    Without either it is ``~/.local/state/fairpate``, which stays in use where it holds an odometer: no release is
    forgotten because a variable was set later. OdometerError where the folder of ``XDG_STATE_HOME`` has another.
    """
    if folder := os.environ.get("FAIRPATE_STATE"):
        return Path(folder).absolute()
    usual = Path.home() / ".local/state/fairpate"
    base = Path(os.environ.get("XDG_STATE_HOME") or usual.parent)
    chosen = base / "fairpate"
    if not base.is_absolute() or chosen == usual or not (usual / _FILE).exists():
        return chosen if base.is_absolute() else usual  # the specification ignores a relative folder
    if (chosen / _FILE).exists():
        raise OdometerError(
            f"Two odometers count this operator's releases: in {usual} and in {chosen} (XDG_STATE_HOME). Set "
            "FAIRPATE_STATE to the folder of the one to use; releases of the other are not in its sums."
        )
    return usual


class Odometer:
    """The releases of one operator. Processes may share it: each call is one transaction."""

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (folder or state_folder()) / _FILE

    def record(self, release: Release, *, plan: Sequence[Event] | None = None, enforce: bool = True) -> Release:
        """Store what a run released, or is about to, durably. Once per run: a later call replaces an earlier one's row.

        ``plan``: all events of a new run, where they were fixed before the first of them; None: the release is all,
        empty: nothing was fixed. Returns the release as stored, with the plan that it was admitted by.
        LimitReachedError, with ``enforce``, for a new release or more of one that would pass the limit.
        """
        with self._transaction() as database:
            rows = _rows(database, data=release.data)
            before = next((row for row in rows if row.run == release.run), None)
            if before is not None:
                release = replace(release, plan=before.plan)
            # The same events once more, as of a repeated command, were admitted already.
            if enforce and (before is None or before.events != release.events):
                release = _admitted(database, release, rows, plan)
            if release.plan:  # more than was planned is charged too, where it is out already
                release = replace(release, plan=covering(release.plan, release.events))
            values = _as_row(release)
            database.execute(_STORE, {**values, "time": time.time()})
            database.execute(_STORE_PLAN, values)
        return release

    def check(self, release: Release) -> None:
        """LimitReachedError if this release, fixed beforehand, would pass the limit; nothing is stored."""
        with self._transaction() as database:
            _admitted(database, release, _rows(database, data=release.data), None)

    def find(self, run: str) -> Release | None:
        """What is stored of a run."""
        with self._transaction() as database:
            return next(iter(_rows(database, run=run)), None)

    def standing(self, run: str, *, delta: float) -> Standing | None:
        """Where a stored release stands among those of its data set, unit and relation; None if it is not private."""
        with self._transaction() as database:
            found = _rows(database, run=run)
            rows = _rows(database, data=found[0].data) if found else []
        number = next((number for number, row in enumerate(rows) if row.run == run), None)
        if number is None or not rows[number].is_private:
            return None
        own = rows[number]
        # Up to its own row: what was released later is told by the statements of that.
        same = [
            row for row in _counted_by(own.unit, rows[: number + 1]) if row.is_private and row.relation == own.relation
        ]
        return Standing(
            earlier=len(same) - 1,
            epsilon=composed_epsilon(same, delta=delta),
            epsilon_adaptive=adaptive_epsilon(same, delta=delta),
        )

    def totals(self, *, delta: float, data: str | None = None) -> list[Total]:
        """One total per data set, unit and relation, in their order."""
        with self._transaction() as database:
            rows = _rows(database, data=data)
            limits = {(name, unit): value for name, unit, value in database.execute(_LIMITS)}
        kinds = {_kind(row) for row in rows}
        # A limit has its line also where all that counts in it was released under another unit.
        kinds |= {(row.data, unit, row.relation) for row in rows for unit in _IMPLYING if (row.data, unit) in limits}
        totals = [
            _total(
                kind,
                [row for row in _counted_by(kind[1], rows) if _kind(row) == kind],
                delta=delta,
                limit=limits.get((kind[0], kind[1])),
            )
            for kind in sorted(kinds)
        ]
        return [total for total in totals if total.releases or total.not_private]

    def set_limit(self, data: str, unit: Unit, *, epsilon: float, delta: float) -> float:
        """Refuse from now on what makes all releases on ``data`` cost more, each chosen in view of the earlier ones.

        Returns the least limit that would admit another release: 0 where there are none, above that of
        :class:`Total` for one release, which counts there as fixed beforehand. ValueError for values out of range.
        """
        if not 0 < epsilon < math.inf or not 0 < delta < 1:
            raise ValueError(f"Expected 0 < epsilon < inf and 0 < delta < 1, got {epsilon} and {delta}.")
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO limits VALUES (?, ?, ?, ?)", (data, unit, epsilon, delta))
            charged = [row.charged for row in _rows(database, data=data) if row.is_private]
        return least_adaptive_limit(summed_curve(_counted_by(unit, charged)), delta=delta)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(self._connect()) as database:
                # Taken for writing before anything is read: two processes must not find the same room.
                database.execute("BEGIN IMMEDIATE")
                # What is raised inside leaves no trace: the connection closes before its COMMIT.
                yield database
                database.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise OdometerError(
                f"{self.path}: cannot be read and written ({error}); make it writable, set FAIRPATE_STATE to another "
                "folder, or restore the file from a copy."
            ) from error

    def _connect(self) -> sqlite3.Connection:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Made here and not by SQLite, which follows the umask.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        database = sqlite3.connect(self.path, isolation_level=None, timeout=60)
        try:
            # A release becomes visible right after its row, which must outlast a loss of power.
            database.execute("PRAGMA synchronous = FULL")
            database.execute(
                "CREATE TABLE IF NOT EXISTS releases (number INTEGER PRIMARY KEY, run TEXT UNIQUE, data TEXT, "
                "unit TEXT, relation TEXT, noise TEXT, method TEXT, path TEXT, events TEXT, num_queries INTEGER, "
                "rdp BLOB, time REAL)"
            )
            database.execute(
                "CREATE TABLE IF NOT EXISTS limits (data TEXT, unit TEXT, epsilon REAL, delta REAL, "
                "PRIMARY KEY (data, unit))"
            )
            # A table of its own: odometers of earlier versions have no plans.
            database.execute("CREATE TABLE IF NOT EXISTS plans (run TEXT PRIMARY KEY, plan TEXT)")
        except BaseException:
            database.close()
            raise
        return database


# A row keeps its number and its time: where a release stands among the others does not change by a later call.
_STORE = """
    INSERT INTO releases (run, data, unit, relation, noise, method, path, events, num_queries, rdp, time)
    VALUES (:run, :data, :unit, :relation, :noise, :method, :path, :events, :num_queries, :rdp, :time)
    ON CONFLICT (run) DO UPDATE SET data = excluded.data, unit = excluded.unit, relation = excluded.relation,
    noise = excluded.noise, method = excluded.method, path = excluded.path, events = excluded.events,
    num_queries = excluded.num_queries, rdp = excluded.rdp
"""
_STORE_PLAN = "INSERT OR REPLACE INTO plans (run, plan) VALUES (:run, :plan)"
_READ = """
    SELECT run, data, unit, relation, noise, method, path, events, num_queries, ifnull(plan, '[]') AS plan, rdp AS rdp_A
    FROM releases LEFT JOIN plans USING (run)
    WHERE data = ifnull(:data, data) AND run = ifnull(:run, run) ORDER BY number
"""
_LIMITS = "SELECT data, unit, epsilon FROM limits"
_LIMITS_OF = "SELECT unit, epsilon, delta FROM limits WHERE data = ? ORDER BY unit"
# A guarantee for a person holds for each record of theirs; the reverse bounds nothing, as a person may have many.
_IMPLYING: dict[Unit, tuple[Unit, ...]] = {"record": ("person",)}
_NEW = np.zeros(0)  # a curve that is to be computed from events


def _rows(database: sqlite3.Connection, *, data: str | None = None, run: str | None = None) -> list[Release]:
    """The releases, or those on one data set or of one run, in the order in which they came."""
    cursor = database.execute(_READ, {"data": data, "run": run})
    columns = [column for column, *_ in cursor.description]
    rows = [dict(zip(columns, row, strict=True)) for row in cursor]
    try:
        return [
            Release(**row | _both(row, _events) | {"rdp_A": np.frombuffer(row["rdp_A"], dtype="<f8")}) for row in rows
        ]
    except (ValueError, TypeError) as error:
        raise sqlite3.DatabaseError(f"a row cannot be understood: {error}") from error


# A run reads the rows of its data set at each of its stages, a service at each block of queries.
@lru_cache(maxsize=4096)
def _events(text: str) -> tuple[Event, ...]:
    return tuple(map(event_from, json.loads(text)))


def _as_row(release: Release) -> dict[str, Any]:
    values = release_values(release)
    return values | _both(values, json.dumps) | {"rdp": release.rdp_A.tobytes()}


def _both(values: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """The events of a row and those of its plan, converted."""
    return {name: convert(values[name]) for name in ("events", "plan")}


def _counted_by(unit: Unit, releases: Sequence[Release]) -> list[Release]:
    """Those that count in a sum of ``unit``, priced for it."""
    return [
        each if each.unit == unit else _per_record(each)
        for each in releases
        if each.unit == unit or (each.is_private and each.unit in _IMPLYING.get(unit, ()))
    ]


def _per_record(release: Release) -> Release:
    """The release with all its events priced for a record."""
    events, plan = (tuple(map(of_a_record, each)) for each in (release.events, release.plan))
    return replace(release, unit="record", events=events, plan=plan, rdp_A=_NEW)


def _admitted(
    database: sqlite3.Connection, release: Release, rows: Sequence[Release], plan: Sequence[Event] | None
) -> Release:
    """``release``, with its plan where it is admitted by that. LimitReachedError where a limit has no room."""
    # Without privacy it adds to no sum, so that no limit speaks of it; it is listed all the same.
    if not release.is_private:
        return release
    limits = database.execute(_LIMITS_OF, (release.data,)).fetchall()
    # Without its own earlier row, which this one replaces.
    others = [row.charged for row in rows if row.run != release.run and row.is_private]
    # A run that began without a plan has released what no plan covers: it is counted at the order for good.
    if len(others) == sum(row.is_private for row in rows):
        planned = merged(release.charged.events if plan is None else plan)
        whole = replace(release, events=planned, plan=(), rdp_A=_NEW)
        if not _fit(whole, others, limits, is_planned=True):
            release = replace(release, plan=planned)
    if release.plan and covering(release.plan, release.events) != release.plan:
        raise LimitReachedError(
            f"{release.data}, unit {release.unit}: this run was admitted as the only release by its plan, and asks for "
            "more than was planned; raise the limit with `fairpate ledger limit` and start another run."
        )
    _fit(release.charged, others, limits, is_planned=bool(release.plan))
    return release


def _fit(
    release: Release, others: Sequence[Release], limits: Sequence[tuple[Unit, float, float]], *, is_planned: bool
) -> bool:
    """Whether ``release`` has room at the order of every limit; False where one has room for a plan without others.

    LimitReachedError for a limit without any.
    """
    # Every limit is asked: one without room refuses, whatever the one before it said.
    found = [
        _fits(each, _counted_by(unit, others), limit=limit, delta=delta, is_planned=is_planned)
        for unit, limit, delta in limits
        for each in _counted_by(unit, [release])
    ]
    return all(found)


def _fits(release: Release, same: Sequence[Release], *, limit: float, delta: float, is_planned: bool) -> bool:
    """As :func:`_fit`, beside the ``same`` unit's others and for one limit."""
    place = f"{release.data}, unit {release.unit}"
    if any(row.relation != release.relation for row in same):
        raise LimitReachedError(
            f"{place}: has releases under another relation than {release.relation!r}, and the two add up to no one "
            f"epsilon that the limit of {limit:g} could bound; release under the relation that is there."
        )
    line = AdaptiveLimit(epsilon=limit, delta=delta)
    if line.admits(summed_curve([*same, release])):
        return True
    is_alone = is_planned and not same
    # In this form NaN is refused too.
    if is_alone and composed_epsilon([release], delta=delta) <= limit:
        return False
    unpriced = {type(event).__name__ for event in release.events if not np.isfinite(curve_of([event])[line.place])}
    if unpriced and not is_alone:
        raise LimitReachedError(
            f"{place}: {', '.join(sorted(unpriced))} has no Renyi divergence of order {line.order:g}, at which the "
            f"limit of {limit:g} counts; it may be released first and alone, or with another method."
        )
    spent, total = (least_adaptive_limit(summed_curve(rows), delta=delta) for rows in (same, [*same, release]))
    if is_alone:
        total = composed_epsilon([release], delta=delta)
    raise LimitReachedError(
        f"{place}: {counted(len(same), 'release')} cost epsilon {spent:.4g} at delta {delta_text(delta)} where later "
        f"ones may depend on earlier ones, this one would make it {total:.4g}, and the limit is {limit:g}; add noise, "
        "ask less, or raise the limit with `fairpate ledger limit`."
    )


def _kind(release: Release) -> tuple[str, Unit, Relation]:
    return release.data, release.unit, release.relation


def _total(kind: tuple[str, Unit, Relation], rows: Sequence[Release], *, delta: float, limit: float | None) -> Total:
    private = [row for row in rows if row.is_private]
    return Total(
        data=kind[0],
        unit=kind[1],
        relation=kind[2],
        releases=len(private),
        not_private=len(rows) - len(private),
        epsilon=composed_epsilon(private, delta=delta),
        epsilon_adaptive=adaptive_epsilon(private, delta=delta),
        delta=delta,
        epsilon_limit=limit,
    )


_BLOCK = 256
"""Queries that a ledger may take between two writes of the odometer, and that a crash counts too many, at most."""
_log = logging.getLogger(__name__)


class Meter:
    """One run's way to the odometer: told before anything of the run becomes visible.

    Made when a run is opened; a run that has its receipt and is unknown to the odometer is counted again. ``release``:
    the id of the release that the run keeps (:mod:`fairpate.run.release_log`), which was counted when it was drawn; a
    run that goes on from it, in whatever folder, is no other release.
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
        self._settled, self._held = 0, 0
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
        self._settled = ledger.num_reservations
        # A ledger that was opened and never asked is no release.
        if self._settled or self._meter.stored() is not None:
            self._store(self._settled, enforce=False)

    def __call__(self, num_reservations: int) -> None:
        """Make room for so many in all, durably. LedgerError where a limit has none."""
        if num_reservations <= self._held:
            return
        if self._ledger is not None:  # so many it has for good: an older copy of its files is known by them
            self._settled = self._ledger.num_reservations
        # Room for a block: one durable write here serves as many charges.
        ahead = num_reservations + _BLOCK - 1
        try:
            # No further than the ledger's own budget: room beyond it could never be charged.
            self._store(max(num_reservations, queries_that_fit(self._terms, ahead)), enforce=True)
        except LimitReachedError:
            # Near the limit a whole block has no room, and what is asked may have.
            try:
                self._store(num_reservations, enforce=True)
            except LimitReachedError as error:
                raise LedgerError(str(error)) from error

    def _store(self, num_reservations: int, *, enforce: bool) -> None:
        count = max(num_reservations, self._planned) if num_reservations else 0
        # At their worst case: statements publish the odometer's sums, which must not depend on votes.
        events = [of_teachers(self._terms.mechanism.worst_case(count), self._unit)]
        noise, plan = self._terms.noise, self._plan
        self._meter.record(events, noise=noise, num_queries=self._settled, plan=plan, enforce=enforce)
        self._held = num_reservations


def _is_copy(run: RunDirectory, stored: Release) -> bool:
    """Whether the run that was counted still lies elsewhere: two folders that go on are two runs."""
    other = RunDirectory(root=Path(stored.path))
    if other.root == run.root.absolute():
        return False
    # A folder that was moved leaves no receipt at its old place, and is the same run.
    receipt = read_receipt(other)
    return receipt is not None and receipt.run == stored.run


FORMAT = "fairpate.release/1"
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Released:
    """Arrays by name, and all events that touched private records on the way to them."""

    arrays: Arrays
    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """``id`` of the release in the operator's odometer, the ``settings`` it was made under, the ``pool`` it reads."""

    id: str
    settings: dict[str, Any]
    pool: str


def pool_digest(record_ids: Sequence[str]) -> str:
    """What public records, in which order: the arrays belong to them."""
    return hashlib.sha256(json.dumps(list(record_ids)).encode()).hexdigest()


def save_release(path: Path, released: Released, origin: Origin) -> None:
    """Write the file that :func:`read_release` reads."""
    arrays = {name: np.ascontiguousarray(array) for name, array in released.arrays.items()}
    header = {
        "format": FORMAT,
        "id": origin.id,
        "settings": origin.settings,
        "pool": origin.pool,
        "events": [worded(event_json(event)) for event in released.events],
        "sha256": _digest(arrays),
    }
    write_atomically(path, lambda temporary: temporary.write_bytes(save(arrays, {"release": json.dumps(header)})))
    path.chmod(0o644)


def read_release(path: Path) -> tuple[Released, Origin]:
    """What :func:`save_release` wrote. RunDirectoryError for a file that is missing, damaged or something else."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads(file.metadata()["release"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        _check(header, arrays)
        released = Released(arrays=arrays, events=tuple(map(event_from, header["events"])))
        return released, Origin(**{name: header[name] for name in ("id", "settings", "pool")})
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{path}: no release that can be read ({error}). It cannot be drawn again: restore it from a copy, or "
            "start a new run folder with --out and count both epsilons."
        ) from error


def release_id(run: RunDirectory) -> str | None:
    """The id of the release that ``run`` holds; None without one. Errors as :func:`read_release`."""
    return read_release(run.released)[1].id if run.released.exists() else None


def _check(header: dict[str, Any], arrays: Arrays) -> None:
    if header["format"] != FORMAT or header["sha256"] != _digest(arrays):
        raise ValueError(f"expected {FORMAT}, and the arrays of its checksum")


def _digest(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    # By name, for a file has an order of its own; with type and shape, by which equal bytes are other arrays.
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(json.dumps([name, array.dtype.str, list(array.shape)]).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
