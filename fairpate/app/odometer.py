"""The odometer: what all releases on one data set cost together, per unit and relation.

Two runs on the same private records cost their sum, whatever folders they lie in. So every release writes one row
here, in a file of the operator (``FAIRPATE_STATE``, else ``~/.local/state/fairpate``), before anything of it becomes
visible: its events, data-independent and at their worst case, which one accountant composes. A ledger that goes on
holds room for a block of queries ahead, so that a crash counts too many and never too few; opened again, it is settled
to what it really holds.

A run is known by a random id in its ``private/release.json``, with the same events: repeated it counts once, deleted it
stays counted, and where the odometer lost it, it is counted again when it is next touched. A release without privacy
(seeded noise, or none) is listed and adds to no sum. Releases under another unit or relation are another sum.

Not known here: who trains, how much noise would meet a limit, and what other machines released.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aggregator.budget import queries_that_fit
from aggregator.files import LedgerError
from aggregator.ledger import Ledger
from aggregator.terms import LedgerTerms
from aggregator.wire import worded
from fairpate.app.rundir import RunDirectory, RunDirectoryError, write_json
from fairpate.evaluation.page import counted, epsilon_text
from fairpate.privacy import accountant, fair_training, record_votes  # noqa: F401 - registers its events
from fairpate.privacy.accountant import DEFAULT_ORDERS, Event
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.privacy.laplace import pure_epsilon
from fairpate.types import Relation, Unit, UserError

FloatArray = npt.NDArray[np.float64]
_MOST_DISTRIBUTIONS = 8  # of loss distributions composed at once; beyond, Renyi curves alone are added
_BLOCK = 256
"""Queries that a ledger may take between two writes of the odometer, and that a crash counts too many, at most."""
_log = logging.getLogger(__name__)


class OdometerError(UserError):
    """The odometer cannot be read or written; nothing was released."""


class LimitReachedError(UserError):
    """A release would pass the limit of its data set; nothing was released."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """All that one run released so far. ``num_queries`` is how many its ledger surely holds; 0 without a ledger."""

    run: str
    data: str
    unit: Unit
    relation: Relation
    noise: str
    method: str
    path: str
    events: tuple[Event, ...]
    num_queries: int = 0
    rdp_A: FloatArray = field(default_factory=lambda: np.zeros(0), compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.rdp_A) != len(DEFAULT_ORDERS):
            # Also where the order grid has changed since the row was written.
            object.__setattr__(self, "rdp_A", _curve(self.events))

    @property
    def is_private(self) -> bool:
        """Whether it has any privacy guarantee."""
        if self.noise != OS_ENTROPY:
            return False
        # Any delta would do: the question is whether some bound is finite.
        return bool(np.isfinite(self.rdp_A).any()) or composed_epsilon([self], delta=0.5) < math.inf


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
        f"this one they cost ε = {epsilon} at δ = {delta:g}.",
    )


def state_folder() -> Path:
    """Where the operator's own files lie: ``FAIRPATE_STATE``, else ``~/.local/state/fairpate``."""
    folder = os.environ.get("FAIRPATE_STATE")
    return Path(folder).absolute() if folder else Path.home() / ".local/state/fairpate"


class Odometer:
    """The releases of one operator. Processes may share it: each call is one transaction."""

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (folder or state_folder()) / "odometer.sqlite"

    def record(self, release: Release, *, enforce: bool = True) -> None:
        """Store what a run released, or is about to, durably. Once per run: a later call replaces an earlier one's row.

        LimitReachedError, with ``enforce``, for a new release or more of one that would pass the limit.
        """
        with self._transaction() as database:
            rows = _rows(database)
            before = next((row for row in rows if row.run == release.run), None)
            if enforce and (before is None or before.events != release.events):
                self._check(database, release, rows)
            database.execute(_STORE, {**_as_row(release), "time": time.time()})

    def check(self, release: Release) -> None:
        """LimitReachedError if this release would pass the limit; nothing is stored."""
        with self._transaction() as database:
            self._check(database, release, _rows(database))

    def _check(self, database: sqlite3.Connection, release: Release, rows: Sequence[Release]) -> None:
        found = database.execute(
            "SELECT epsilon, delta FROM limits WHERE data = ? AND unit = ?", (release.data, release.unit)
        ).fetchone()
        if found is None or not release.is_private:
            return
        limit, delta = found
        others = [row for row in rows if row.run != release.run and row.data == release.data and row.is_private]
        same = [row for row in others if row.unit == release.unit]
        place = f"{release.data}, unit {release.unit}"
        if any(row.relation != release.relation for row in same):
            raise LimitReachedError(
                f"{place}: has releases under another relation than {release.relation!r}, and the two add up to no one "
                f"epsilon that the limit of {limit:g} could bound; release under the relation that is there."
            )
        spent, total = (composed_epsilon(rows, delta=delta) for rows in (same, [*same, release]))
        if not total <= limit:
            raise LimitReachedError(
                f"{place}: {len(same)} releases cost epsilon {spent:.4g} at delta {delta:g}, this one would make it "
                f"{total:.4g}, and the limit is {limit:g}; add noise, ask less, or raise the limit with "
                "`fairpate ledger limit`."
            )

    def find(self, run: str) -> Release | None:
        """What is stored of a run."""
        with self._transaction() as database:
            return next((row for row in _rows(database) if row.run == run), None)

    def standing(self, run: str, *, delta: float) -> Standing | None:
        """Where a stored release stands among those of its data set, unit and relation; None if it is not private."""
        with self._transaction() as database:
            rows = _rows(database)
        number = next((number for number, row in enumerate(rows) if row.run == run), None)
        if number is None or not rows[number].is_private:
            return None
        same = [row for row in rows[: number + 1] if row.is_private and _kind(row) == _kind(rows[number])]
        return Standing(earlier=len(same) - 1, epsilon=composed_epsilon(same, delta=delta))

    def totals(self, *, delta: float, data: str | None = None) -> list[Total]:
        """One total per data set, unit and relation, in their order."""
        with self._transaction() as database:
            rows = [row for row in _rows(database) if data in (None, row.data)]
            limits = {(name, unit): value for name, unit, value in database.execute(_LIMITS)}
        kinds: dict[tuple[str, Unit, Relation], list[Release]] = {}
        for row in rows:
            kinds.setdefault(_kind(row), []).append(row)
        return [_total(kind, kinds[kind], delta=delta, limit=limits.get((kind[0], kind[1]))) for kind in sorted(kinds)]

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


class Meter:
    """One run's way to the odometer: told before anything of the run becomes visible.

    Made when a run is opened; a run that has its receipt and is unknown to the odometer is counted again.
    """

    def __init__(self, run: RunDirectory, odometer: Odometer, *, data: str, method: str) -> None:
        self._run, self._odometer = run, odometer
        self._data, self._method = data, method
        receipt = read_receipt(run)
        self.id = secrets.token_hex(16) if receipt is None else receipt.run
        if receipt is None:
            return
        stored = odometer.find(self.id)
        if stored is not None and _is_copy(run, stored):
            _log.warning("%s: a copy of %s; counted as another run.", run.root, stored.path)
            self.id = secrets.token_hex(16)
        elif stored is None:
            _log.warning("%s: was released and is not in %s; counted again.", run.root, odometer.path)
            odometer.record(receipt, enforce=False)

    def start_another(self) -> None:
        """What the run releases next is another release: what it has a receipt of may have been seen."""
        if self._run.receipt.exists():
            _log.warning("%s: may have released a model that is gone; the next one is counted besides.", self._run.root)
            self.id = secrets.token_hex(16)

    def record(
        self, events: Sequence[Event], *, noise: str, num_queries: int | None = None, enforce: bool = True
    ) -> None:
        """What the run released, or is about to; ``num_queries`` None: as many as before. Errors as the odometer's."""
        if num_queries is None:
            stored = self.stored()
            num_queries = 0 if stored is None else stored.num_queries
        release = self.release(events, noise=noise, num_queries=num_queries)
        # The row before the receipt: a crash between them counts a release that nobody saw, never the reverse.
        self._odometer.record(release, enforce=enforce)
        write_json(self._run.receipt, _to_json(release))

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
            events=_merged(events),
            num_queries=num_queries,
        )

    def check(self, events: Sequence[Event], *, noise: str) -> None:
        """LimitReachedError if these events would pass the limit; nothing is stored."""
        self._odometer.check(self.release(events, noise=noise))

    def standing(self, *, delta: float) -> Standing | None:
        """As :meth:`Odometer.standing`."""
        return self._odometer.standing(self.id, delta=delta)

    def stored(self) -> Release | None:
        """What the odometer holds of this run."""
        return self._odometer.find(self.id)


class LedgerMeter:
    """Holds room in the odometer for what a ledger may charge next; :class:`Ledger` calls it before each charge.

    ``planned`` queries are counted as soon as one is submitted: where released labels decide how many are, fewer tell
    too.
    """

    def __init__(self, meter: Meter, terms: LedgerTerms, *, attribute_only: bool = False, planned: int = 0) -> None:
        self._meter, self._terms = meter, terms
        self._planned = queries_that_fit(terms, planned) if planned else 0
        self._attribute_only = attribute_only
        self._settled, self._held = 0, (0, 0)
        self._ledger: Ledger | None = None

    def open(self, ledger: Ledger) -> None:
        """Settle to what the ledger holds. RunDirectoryError for one that holds less than was counted."""
        stored = self._meter.stored()
        if stored is not None and ledger.num_reservations < stored.num_queries:
            raise RunDirectoryError(
                f"{ledger.path}: lacks {stored.num_queries - ledger.num_reservations} of {stored.num_queries} queries "
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
        queries = self._terms.mechanism.worst_case(count)
        if self._attribute_only:
            queries = fair_training.AttributeQueries(**vars(queries))
        publication = self._terms.publication
        events = [queries, *([publication] * num_publications if publication is not None else [])]
        self._meter.record(events, noise=self._terms.noise, num_queries=self._settled, enforce=enforce)
        self._held = (num_reservations, num_publications)


def _is_copy(run: RunDirectory, stored: Release) -> bool:
    """Whether the run that was counted still lies elsewhere: two folders that go on are two runs."""
    other = RunDirectory(root=Path(stored.path))
    if other.root == run.root.absolute():
        return False
    receipt = read_receipt(other)
    return receipt is not None and receipt.run == stored.run


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
    return Release(**{**values, "events": tuple(map(event_from, values["events"]))})


def composed_epsilon(releases: Sequence[Release], *, delta: float) -> float:
    """The epsilon of releases of one unit and relation together: the least of the bounds that the accountant has.

    All of them hold for any data, so that taking the least tells nothing. ``inf`` where there is none.
    """
    events = _merged([event for release in releases for event in release.events])
    curve_A = sum((release.rdp_A for release in releases), np.zeros(len(DEFAULT_ORDERS)))
    bounds = [pure_epsilon(events)]
    if np.isfinite(curve_A).any():
        bounds.append(accountant.epsilon_of_curve(curve_A, DEFAULT_ORDERS, target_delta=delta)[0])
    if events and len(events) <= _MOST_DISTRIBUTIONS and accountant.has_loss_distributions(events):
        bounds.append(accountant.epsilon_pld(events, target_delta=delta))
    return min(bounds)


def _curve(events: Sequence[Event]) -> FloatArray:
    """The composed Renyi curve, ``inf`` where an event has none; kept with a release, for sums of thousands."""
    try:
        return accountant.rdp(events)
    except ValueError:
        return np.full(len(DEFAULT_ORDERS), math.inf)


def event_json(event: Event) -> dict[str, Any]:
    """An event as plain values, with its kind. ValueError for one that depends on private values."""
    if event.data_dependent:
        raise ValueError(f"{type(event).__name__} depends on private votes and is not to be stored.")
    return {"kind": type(event).__name__, **asdict(event)}  # type: ignore[call-overload]


def event_from(values: Mapping[str, Any], unit: Unit | None = None) -> Event:
    """The event of :func:`event_json`; without a kind, as statements hold it, that of its fields and ``unit``."""
    kinds = accountant.event_kinds()
    rest = {name: _number(value) for name, value in values.items() if name != "kind"}
    if "kind" not in values:
        rest = {name: _not_finite(name) if value is None else value for name, value in rest.items()}
        names = set(rest)
        found = [kind for kind in kinds.values() if {column.name for column in fields(kind)} == names]
        found = [kind for kind in found if unit is None or rest.get("unit", getattr(kind, "unit", unit)) == unit]
        # A kind and its refinement look alike: the first costs at least as much.
        found = [kind for kind in found if not any(kind is not other and issubclass(kind, other) for other in found)]
        if len(found) != 1:
            raise ValueError(f"no event has the fields {sorted(names)} and unit {unit}.")
        event: Event = found[0](**rest)
        return event
    if values["kind"] not in kinds:
        raise ValueError(f"unknown event {values['kind']}; use the version that wrote it.")
    named: Event = kinds[values["kind"]](**rest)
    return named


def _number(value: Any) -> Any:
    """Infinities come as words."""
    return float(value) if value in ("inf", "-inf") else value


def _not_finite(name: str) -> float:
    """What null stands for in a statement; a threshold of 0 costs what any finite one does."""
    return 0.0 if name == "threshold" else math.inf


def _merged(events: Sequence[Event]) -> tuple[Event, ...]:
    """The same events, equal ones counted together."""
    counts: Counter[Event] = Counter()
    single: list[Event] = []
    for event in events:
        count = getattr(event, "count", None)
        if isinstance(count, int):
            counts[replace(event, count=1)] += count  # type: ignore[type-var]
        else:
            single.append(event)
    return (*(replace(event, count=count) for event, count in counts.items()), *single)  # type: ignore[type-var]


_STORE = """
    INSERT INTO releases (run, data, unit, relation, noise, method, path, events, num_queries, rdp, time)
    VALUES (:run, :data, :unit, :relation, :noise, :method, :path, :events, :num_queries, :rdp, :time)
    ON CONFLICT (run) DO UPDATE SET data = excluded.data, unit = excluded.unit, relation = excluded.relation,
    noise = excluded.noise, method = excluded.method, path = excluded.path, events = excluded.events,
    num_queries = excluded.num_queries, rdp = excluded.rdp
"""
_READ = """
    SELECT run, data, unit, relation, noise, method, path, events, num_queries, rdp FROM releases ORDER BY number
"""
_LIMITS = "SELECT data, unit, epsilon FROM limits"


def _rows(database: sqlite3.Connection) -> list[Release]:
    """Every release, in the order in which they came."""
    try:
        return [
            Release(
                run=run,
                data=data,
                unit=unit,
                relation=relation,
                noise=noise,
                method=method,
                path=path,
                events=tuple(map(event_from, json.loads(events))),
                num_queries=num_queries,
                rdp_A=np.frombuffer(rdp, dtype="<f8"),
            )
            for run, data, unit, relation, noise, method, path, events, num_queries, rdp in database.execute(_READ)
        ]
    except (ValueError, TypeError) as error:
        raise sqlite3.DatabaseError(f"a row cannot be understood: {error}") from error


def _as_row(release: Release) -> dict[str, Any]:
    values = _to_json(release)
    return values | {"events": json.dumps(values["events"]), "rdp": release.rdp_A.tobytes()}


def _to_json(release: Release) -> dict[str, Any]:
    values = {column.name: getattr(release, column.name) for column in fields(release) if column.name != "rdp_A"}
    return values | {"events": [worded(event_json(event)) for event in release.events]}


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
