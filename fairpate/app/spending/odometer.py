"""The odometer: what all releases on one data set cost together, per unit and relation.

Two runs on the same private records cost their sum, whatever folders they lie in. So every release writes one row
here, in a file of the operator (:func:`state_folder`), before anything of it becomes visible
(:mod:`fairpate.app.spending.meter`). Releases under another unit or relation are another sum. One by person counts in
the sum of records too, at the person's price.

A sum of epsilons prices releases that were fixed beforehand. A limit bounds more: releases of which each may be chosen
in view of the earlier ones. It counts them at one Renyi order (:class:`fairpate.privacy.filters.AdaptiveLimit`), which
is never better and mostly a little worse than the sum. So that a limit of epsilon admits a run planned at that epsilon,
a first run whose plan the sum admits, and the order does not, is admitted as the only release: the plan is kept and
charged in full from then on. Had less of it room for others, which of two bounds holds would depend on what was
released, and both deltas would add up.

Not known here: who trains, how much noise would meet a limit, and what other machines released.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fairpate.app.spending.receipt import (
    OdometerError,
    Release,
    adaptive_epsilon,
    composed_epsilon,
    curve_of,
    release_values,
    summed_curve,
)
from fairpate.evaluation.page import counted, epsilon_text
from fairpate.meaning import delta_text
from fairpate.privacy.event_values import covering, event_from, merged
from fairpate.privacy.events import Event
from fairpate.privacy.filters import AdaptiveLimit, least_adaptive_limit
from fairpate.privacy.within_person import of_a_record
from fairpate.types import Relation, Unit, UserError

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
