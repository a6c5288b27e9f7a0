"""The odometer: what all releases on one data set cost together, per unit and relation.

Two runs on the same private records cost their sum, whatever folders they lie in. So every release writes one row
here, in a file of the operator (:func:`state_folder`), before anything of it becomes visible
(:mod:`fairpate.app.spending.meter`). Releases under another unit or relation are another sum. One by person counts in
the sum of records too, at the person's price.

Not known here: who trains, how much noise would meet a limit, and what other machines released.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fairpate.app.spending.receipt import OdometerError, Release, composed_epsilon, release_values
from fairpate.evaluation.page import counted, epsilon_text
from fairpate.meaning import delta_text
from fairpate.privacy.event_values import event_from
from fairpate.privacy.events import Event
from fairpate.privacy.within_person import of_a_record
from fairpate.types import Relation, Unit, UserError

_FILE = "odometer.sqlite"


class LimitReachedError(UserError):
    """A release would pass the limit of its data set; nothing was released."""


@dataclass(frozen=True, kw_only=True)
class Total:
    """What the releases on one data set cost together under one unit and relation; ``epsilon_limit`` None: no limit."""

    data: str
    unit: Unit
    relation: Relation
    releases: int
    not_private: int
    epsilon: float
    delta: float
    epsilon_limit: float | None


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a release stands: how many came before it on its data set, and what they cost together with it."""

    earlier: int
    epsilon: float


def standing_remarks(standing: Standing | None, *, delta: float) -> tuple[str, ...]:
    """What a statement remarks of earlier releases; nothing where there were none."""
    if standing is None or not standing.earlier:
        return ()
    epsilon = epsilon_text(standing.epsilon)
    return (
        f"This operator released {counted(standing.earlier, 'earlier result')} on the same data set. Together with "
        f"this one they cost ε = {epsilon} at δ = {delta_text(delta)}.",
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

    def record(self, release: Release, *, enforce: bool = True) -> None:
        """Store what a run released, or is about to, durably. Once per run: a later call replaces an earlier one's row.

        LimitReachedError, with ``enforce``, for a new release or more of one that would pass the limit.
        """
        with self._transaction() as database:
            rows = _rows(database, data=release.data)
            before = next((row for row in rows if row.run == release.run), None)
            # The same events once more, as of a repeated command, were admitted already.
            if enforce and (before is None or before.events != release.events):
                self._check(database, release, rows)
            database.execute(_STORE, {**_as_row(release), "time": time.time()})

    def check(self, release: Release) -> None:
        """LimitReachedError if this release would pass the limit; nothing is stored."""
        with self._transaction() as database:
            self._check(database, release, _rows(database, data=release.data))

    def _check(self, database: sqlite3.Connection, release: Release, rows: Sequence[Release]) -> None:
        # It adds to no sum, so that no limit speaks of it; it is listed all the same.
        if not release.is_private:
            return
        # Without its own earlier row, which this one replaces.
        others = [row for row in rows if row.run != release.run and row.is_private]
        for unit, limit, delta in database.execute(_LIMITS_OF, (release.data,)).fetchall():
            for each in _counted_by(unit, [release]):
                _require_room(each, _counted_by(unit, others), limit=limit, delta=delta)

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
        return Standing(earlier=len(same) - 1, epsilon=composed_epsilon(same, delta=delta))

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

    def set_limit(self, data: str, unit: Unit, *, epsilon: float, delta: float) -> None:
        """From now on refuse what would make all releases on ``data`` cost more. ValueError for values out of range."""
        if not 0 < epsilon < math.inf or not 0 < delta < 1:
            raise ValueError(f"Expected 0 < epsilon < inf and 0 < delta < 1, got {epsilon} and {delta}.")
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO limits VALUES (?, ?, ?, ?)", (data, unit, epsilon, delta))

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
_READ = """
    SELECT run, data, unit, relation, noise, method, path, events, num_queries, rdp AS rdp_A FROM releases
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
            Release(**row | {"events": _events(row["events"]), "rdp_A": np.frombuffer(row["rdp_A"], dtype="<f8")})
            for row in rows
        ]
    except (ValueError, TypeError) as error:
        raise sqlite3.DatabaseError(f"a row cannot be understood: {error}") from error


# A run reads the rows of its data set at each of its stages, a service at each block of queries.
@lru_cache(maxsize=4096)
def _events(text: str) -> tuple[Event, ...]:
    return tuple(map(event_from, json.loads(text)))


def _as_row(release: Release) -> dict[str, Any]:
    values = release_values(release)
    return values | {"events": json.dumps(values["events"]), "rdp": release.rdp_A.tobytes()}


def _counted_by(unit: Unit, releases: Sequence[Release]) -> list[Release]:
    """Those that count in a sum of ``unit``, priced for it."""
    return [
        each if each.unit == unit else replace(each, unit=unit, events=tuple(map(of_a_record, each.events)), rdp_A=_NEW)
        for each in releases
        if each.unit == unit or (each.is_private and each.unit in _IMPLYING.get(unit, ()))
    ]


def _require_room(release: Release, same: Sequence[Release], *, limit: float, delta: float) -> None:
    """LimitReachedError if ``release`` beside the ``same`` unit's others would pass the limit."""
    place = f"{release.data}, unit {release.unit}"
    if any(row.relation != release.relation for row in same):
        raise LimitReachedError(
            f"{place}: has releases under another relation than {release.relation!r}, and the two add up to no one "
            f"epsilon that the limit of {limit:g} could bound; release under the relation that is there."
        )
    spent, total = (composed_epsilon(rows, delta=delta) for rows in (same, [*same, release]))
    # In this form NaN is refused too.
    if not total <= limit:
        raise LimitReachedError(
            f"{place}: {counted(len(same), 'release')} cost epsilon {spent:.4g} at delta {delta_text(delta)}, this "
            f"one would make it {total:.4g}, and the limit is {limit:g}; add noise, ask less, or raise the limit with "
            "`fairpate ledger limit`."
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
        delta=delta,
        epsilon_limit=limit,
    )
