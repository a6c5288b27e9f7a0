"""The releases of each run, and the total cost of all runs on one data set, written before a release becomes visible.

The costs of two runs on the same private records add up, in whichever folders the runs are. So each run's folder has a
receipt, the record of what the run was charged, and one database per operator, the odometer, has a row for every run.
Both are written durably before anything of the release becomes visible. A release is charged to the sum for its unit
and relation; a release whose unit is a person is charged to the sum for records too, at its cost per person. A release
without privacy is listed, and charged to no sum.

A sum of epsilons holds for releases that were all fixed beforehand. An operator's limit must hold for more: releases
each of which may be chosen after seeing the earlier ones. So the limit adds up costs at one Renyi order
(:class:`fairpate.privacy.accountant.AdaptiveLimit`), which is never better and mostly a little worse than the sum. A
first run planned at exactly the limit's epsilon may therefore exceed the limit at this order. It is then admitted as
the only release: its plan, all events that were fixed beforehand, is stored and charged in full from then on. If less
were charged, other releases might be admitted too; the released values would then decide which of two bounds holds, and
both deltas would add up.

A data set may be split by a hash into disjoint parts (training, test and validation records), and a release may read
one part alone. A unit (record or person) is in one part of each split, so only releases that read this part, all parts
or parts of other splits add to its cost. Sums and limits are those of the part with the highest cost.
"""

from __future__ import annotations

import itertools
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
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from aggregator.ledger import Ledger, LedgerState, LedgerTerms
from aggregator.session import queries_that_fit
from aggregator.store import LedgerError
from fairpate.files import PathIn, arrays_digest, give_to_owner, make_folder, write_atomically
from fairpate.pages import at_most, counted, delta_text, epsilon_text
from fairpate.privacy import accountant, mechanism_events
from fairpate.privacy.accountant import DEFAULT_ORDERS, Event
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.privacy.loss_distributions import LEAST_DELTA
from fairpate.privacy.mechanism_events import beyond, covering, event_from, event_json, merged
from fairpate.run.context import RunDirectory, RunDirectoryError, RunFolderError, changed_fields, write_json
from fairpate.types import FloatArray, Relation, Unit, UserError

Arrays = Mapping[str, npt.NDArray[Any]]
_log = logging.getLogger(__name__)
# Value of a release's ``rdp_A`` whose Renyi curve is still to be computed from its privacy events.
_NEW = np.zeros(0)
# Most releases whose loss distributions are composed; beyond that number only Renyi curves are added.
_MOST_DISTRIBUTIONS = 8

# Splits whose parts are summed separately; with three parts each there are at most 3^6 sums.
_MOST_RULES = 2


_SHOWN_DELTA = 1e-5  # of tables that name no other


class OdometerError(UserError):
    """Raised if the odometer (the database of all releases and their costs) or a run's receipt (its own record of them)
    cannot be read or written; nothing was released."""


class LimitReachedError(UserError):
    """Raised if a release would exceed the operator's limit on the privacy cost of its data set; nothing was
    released."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """One row of the odometer, the database of all runs' privacy costs: everything that one run has released of private
    records so far.

    ``events``: the privacy events of what was released. ``plan``: all events that the run fixed before the first of
    them, ``events`` included; empty without a plan. Limits charge the whole plan, however little of it was released,
    or ``events`` if there is no plan. A run has a plan if it reserved one (:meth:`ReleaseLog.admit`), or if a limit
    admitted the run only because no other release reads the same data.

    ``num_queries``: the number of queries charged so far in the run's ledger; 0 without a ledger. ``rdp_A``: the
    composed Renyi curve at ``DEFAULT_ORDERS``, ``inf`` if an event has no Renyi curve. ``part``: the part of the data
    set that was read, as ``RULE/PART`` (the rule of the split and the name of its part); empty: the whole data set.
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
    part: str = ""
    rdp_A: FloatArray = field(default_factory=lambda: _NEW, compare=False, repr=False)

    def __post_init__(self) -> None:
        # A stored row may also have the curve of another grid of orders.
        if len(self.rdp_A) == len(DEFAULT_ORDERS):
            return
        try:
            curve_A = accountant.rdp(self.events)
        except ValueError:  # an event has none
            curve_A = np.full(len(DEFAULT_ORDERS), math.inf)
        object.__setattr__(self, "rdp_A", curve_A)

    @property
    def charged(self) -> Release:
        """This release with the privacy events whose cost counts towards a limit. If it has a plan, they are all events
        that were fixed beforehand; otherwise they are the events of what was released so far."""
        return replace(self, events=self.plan, plan=(), rdp_A=_NEW) if self.plan else self

    @property
    def is_private(self) -> bool:
        """True if the release has any finite privacy guarantee: its noise is secret, and some bound on epsilon is
        finite."""
        if self.noise != OS_ENTROPY:
            return False
        # Any delta would do: the question is whether some bound is finite.
        return bool(np.isfinite(self.rdp_A).any()) or composed_epsilon([self], delta=0.5) < math.inf


def release_values(release: Release) -> dict[str, Any]:
    """Return ``release`` as JSON values by name, as a receipt (a run's own record of its charges) stores them."""
    values = {column.name: getattr(release, column.name) for column in fields(release) if column.name != "rdp_A"}
    return values | {name: list(map(event_json, values[name])) for name in ("events", "plan")}


def read_receipt(run: RunDirectory) -> Release | None:
    """Return the receipt of ``run``, its own record of what it released and charged; None if there is none.
    OdometerError if the file is damaged."""
    if not run.receipt.exists():
        return None
    try:
        values = json.loads(run.receipt.read_text(encoding="utf-8"))
        # Receipts of earlier versions have no plan.
        return Release(**values | {name: tuple(map(event_from, values.get(name, ()))) for name in ("events", "plan")})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OdometerError(f"{run.receipt}: damaged ({error}); restore the file from a copy.") from error


def composed_epsilon(releases: Sequence[Release], *, delta: float, is_adaptive: bool = False) -> float:
    """Return the total epsilon of releases that have one privacy unit and relation; ``inf`` if there is no finite
    bound.

    By default this is the smallest bound that the accountant can prove for releases that were all fixed before the
    first of them. With ``is_adaptive`` it is the least limit on the total epsilon (the least privacy filter) that would
    have admitted the releases, even if each was chosen after seeing the earlier ones. A single release counts as fixed
    beforehand in both cases.
    """
    of_parts = []
    for part, curve_A in _by_part([release.charged for release in releases] if is_adaptive else releases):
        if is_adaptive and len(part) != 1:
            of_parts.append(accountant.least_adaptive_limit(curve_A, delta=delta))
            continue
        events = merged([event for release in part for event in release.events])
        bounds = [accountant.pure_epsilon(events)]
        if np.isfinite(curve_A).any():
            bounds.append(accountant.epsilon_of_curve(curve_A, DEFAULT_ORDERS, target_delta=delta)[0])
        # One release alone is priced as its statement prices it, so that a limit admits a run planned at it.
        is_quick = len(part) == 1 or len(events) <= _MOST_DISTRIBUTIONS
        # Below the least delta of loss distributions only curves decide, and they may not be known.
        if events and is_quick and delta >= LEAST_DELTA and accountant.has_loss_distributions(events):
            bounds.append(accountant.epsilon_pld(events, target_delta=delta))
        # Each bound holds for any data, so that taking the least reveals nothing.
        of_parts.append(min(bounds))
    return max(of_parts)


def _by_part(releases: Sequence[Release]) -> list[tuple[Sequence[Release], FloatArray]]:
    """Return the sets of releases that may all have read the same privacy unit (record or person), each set with its
    summed Renyi curve.

    A unit is in one part (such as training or test records) of each split of the data, so there is one set for each
    combination of parts.
    """
    parts_of: dict[str, dict[str, None]] = {}
    for release in releases:
        parts_of.setdefault(release.part.partition("/")[0], {})[release.part] = None
    choices = [releases]
    # Beyond a few splits all their parts are added up: a larger sum, but the number of choices no longer doubles.
    for rule, parts in itertools.islice(((rule, parts) for rule, parts in parts_of.items() if rule), _MOST_RULES):
        choices = [
            [each for each in chosen if each.part == part or each.part.partition("/")[0] != rule]
            for chosen in choices
            for part in parts
        ]
    nothing_A = np.zeros(len(DEFAULT_ORDERS))
    return [(chosen, sum((release.rdp_A for release in chosen), nothing_A)) for chosen in choices]


@dataclass(frozen=True, kw_only=True)
class Total:
    """The total privacy cost of all releases on one data set under one unit and relation.

    ``releases`` counts the releases that have a privacy guarantee. ``epsilon`` is their cost if all were fixed before
    the first of them; ``epsilon_adaptive`` is the least limit that would have admitted them if each was chosen after
    seeing the earlier ones. ``not_private`` counts the releases without a guarantee, which are in neither epsilon.
    ``epsilon_limit``: the operator's limit; None: no limit.
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

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of this total's row in the table of privacy costs, as texts; :data:`COLUMNS` names the columns."""
        limit = "none" if self.epsilon_limit is None else f"{self.epsilon_limit:g}"
        numbers = (str(self.releases), str(self.not_private), *map(epsilon_text, (self.epsilon, self.epsilon_adaptive)))
        return self.data, self.unit, self.relation, *numbers, limit


COLUMNS = ("data set", "unit", "relation", "releases", "not private", "epsilon, fixed beforehand", "adaptive", "limit")


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The total cost of a run's release and all earlier releases on its data set, with both epsilons of :class:`Total`;
    ``earlier`` is the number of earlier releases."""

    earlier: int
    epsilon: float
    epsilon_adaptive: float


def standing_remarks(standing: Standing | None, *, delta: float) -> tuple[str, ...]:
    """Return the remark for a privacy statement on what the run and earlier releases of the same data cost together
    (``standing``); empty if there were no earlier releases."""
    if standing is None or not standing.earlier:
        return ()
    fixed, adaptive = epsilon_text(standing.epsilon), epsilon_text(standing.epsilon_adaptive)
    return (
        f"This operator released {counted(standing.earlier, 'earlier result')} on the same data set. Together with "
        f"this one they cost ε = {fixed} at δ = {delta_text(delta)} if all were fixed beforehand, and the least limit "
        f"that admits them, each chosen in view of the earlier ones, is ε = {adaptive}.",
    )


_FILE = "odometer.sqlite"


def state_folder() -> Path:
    """Return the folder of the operator's own files, such as the odometer: ``FAIRPATE_STATE``, or ``fairpate`` in
    ``XDG_STATE_HOME``.

    Without either environment variable it is ``~/.local/state/fairpate``. If that folder already contains an odometer,
    it takes precedence over ``XDG_STATE_HOME``, so that no release is forgotten because the variable was set later.
    OdometerError if both folders contain an odometer.
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
            f"Two odometers list this operator's releases: in {usual} and in {chosen} (XDG_STATE_HOME). Set "
            "FAIRPATE_STATE to the folder of the odometer to use; the releases in the other one are not in its sums."
        )
    return usual


# Plans are a table of their own: odometers of earlier versions have none.
_TABLES = """
    CREATE TABLE IF NOT EXISTS releases (
        number INTEGER PRIMARY KEY, run TEXT UNIQUE, data TEXT, unit TEXT, relation TEXT, noise TEXT, method TEXT,
        path TEXT, events TEXT, num_queries INTEGER, rdp BLOB, time REAL);
    CREATE TABLE IF NOT EXISTS limits (data TEXT, unit TEXT, epsilon REAL, delta REAL, PRIMARY KEY (data, unit));
    CREATE TABLE IF NOT EXISTS plans (run TEXT PRIMARY KEY, plan TEXT);
    CREATE TABLE IF NOT EXISTS parts (run TEXT PRIMARY KEY, part TEXT);
"""
# A row keeps its number and its time: later calls do not change the order of releases.
_STORE = """
    INSERT INTO releases (run, data, unit, relation, noise, method, path, events, num_queries, rdp, time)
    VALUES (:run, :data, :unit, :relation, :noise, :method, :path, :events, :num_queries, :rdp, :time)
    ON CONFLICT (run) DO UPDATE SET data = excluded.data, unit = excluded.unit, relation = excluded.relation,
    noise = excluded.noise, method = excluded.method, path = excluded.path, events = excluded.events,
    num_queries = excluded.num_queries, rdp = excluded.rdp
"""
_STORE_PLAN = "INSERT OR REPLACE INTO plans (run, plan) VALUES (:run, :plan)"
_STORE_PART = "INSERT OR REPLACE INTO parts (run, part) VALUES (:run, :part)"
_READ = """
    SELECT run, data, unit, relation, noise, method, path, events, num_queries, ifnull(plan, '[]') AS plan,
    ifnull(part, '') AS part, rdp AS rdp_A FROM releases LEFT JOIN plans USING (run) LEFT JOIN parts USING (run)
    WHERE data = ifnull(:data, data) AND run = ifnull(:run, run) ORDER BY number
"""
# A guarantee for a person holds for each of the person's records, and one for a record for its attribute. The reverse
# bounds nothing: a person may have many records, and a record is more than its attribute.
_IMPLYING: dict[Unit, tuple[Unit, ...]] = {"record": ("person",), "sensitive attribute": ("record", "person")}


@dataclass(frozen=True)
class Odometer:
    """The odometer: the database, in the operator's own ``folder``, of all releases that this operator made and of what
    they cost. Several processes may use it at the same time: each call is one transaction."""

    folder: Path = field(default_factory=state_folder)
    path = PathIn("folder", _FILE)

    def __str__(self) -> str:
        """Return the total privacy costs of all releases as a text table, with a line for each data set, unit and
        relation."""
        rows = [COLUMNS, *(total.cells for total in self.totals(delta=_SHOWN_DELTA))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([f"{self.path}, at delta {_SHOWN_DELTA:g}", *lines])

    def record(
        self, release: Release, *, plan: Sequence[Event] | None = None, enforce: bool = True, holds: bool = False
    ) -> Release:
        """Store durably what a run released or is about to release, as one row of the odometer; return this row. A
        later call for the same run replaces the row.

        ``plan``: all privacy events that a new run fixed before the first of them. None means that the plan consists of
        the events of ``release``; an empty plan means that no event was fixed beforehand. ``holds``: from now on limits
        charge the whole plan, even what was not yet released, so that no other run can use its share of the limit.
        ``enforce``: raise LimitReachedError if a new release, or an addition to an old one, would exceed a limit. A
        release that costs no more than the row that it replaces is always admitted.
        """
        with self.transaction() as database:
            rows = _rows(database, data=release.data)
            before = next((row for row in rows if row.run == release.run), None)
            if before is not None:
                # A plan is fixed by the first call: a later one, which has seen releases, cannot exchange it.
                release = replace(release, plan=before.plan)
            # The same events once more, as of a repeated command, or those of a reserved draw, were admitted already.
            is_settled = before is not None and release.events == before.events
            kind = (release.unit, release.relation, release.noise)
            if before is not None and not is_settled and kind == (before.unit, before.relation, before.noise):
                # At no greater cost at any order, except for rounding if one noise was calibrated for both.
                known_A = np.isfinite(before.rdp_A)
                no_more_A = release.rdp_A[known_A] <= before.rdp_A[known_A] * (1 + _SAME_COST)
                is_settled = bool(known_A.any() and no_more_A.all())
            if enforce and is_settled and release.plan and covering(release.plan, release.events) != release.plan:
                # Earlier values of the same release determined its events, at the reserved cost: they are the plan now.
                release, rows = replace(release, plan=()), [row for row in rows if row.run != release.run]
                is_settled = False
            if enforce and not is_settled:
                release = _admitted(database, release, rows, plan)
                if holds and plan:
                    release = replace(release, plan=merged(plan))
            if release.plan:  # more than was planned is charged too, where it is out already
                release = replace(release, plan=covering(release.plan, release.events))
            values = release_values(release)
            values |= {name: json.dumps(values[name]) for name in ("events", "plan")}
            database.execute(_STORE, values | {"rdp": release.rdp_A.tobytes(), "time": time.time()})
            database.execute(_STORE_PLAN, values)
            database.execute(_STORE_PART, values)
        return release

    def released(self, data: str) -> dict[str, Release]:
        """Return the stored releases on the data set ``data``, oldest first, as a mapping from the id of the run."""
        with self.transaction() as database:
            return {row.run: row for row in _rows(database, data=data)}

    def totals(self, *, delta: float, data: str | None = None) -> list[Total]:
        """Return the total privacy cost at ``delta`` for each data set (or only for ``data``), unit and relation, in
        sorted order."""
        if not self.path.exists():  # nothing was charged yet, and reading makes no file
            return []
        with self.transaction() as database:
            rows = _rows(database, data=data)
            limits = {
                (name, unit): value for name, unit, value in database.execute("SELECT data, unit, epsilon FROM limits")
            }
        kinds = {(row.data, row.unit, row.relation) for row in rows}
        # A limit has its line even if everything charged to it was released under another unit.
        for name, unit in limits:
            on_data = [row for row in rows if row.data == name]
            kinds |= {(name, unit, row.relation) for row in _counted_by(unit, on_data)}
        totals = []
        for name, unit, relation in sorted(kinds):
            same = [
                row for row in _counted_by(unit, rows) if (row.data, row.unit, row.relation) == (name, unit, relation)
            ]
            private = [row for row in same if row.is_private]
            totals.append(
                Total(
                    data=name,
                    unit=unit,
                    relation=relation,
                    releases=len(private),
                    not_private=len(same) - len(private),
                    epsilon=composed_epsilon(private, delta=delta),
                    epsilon_adaptive=composed_epsilon(private, delta=delta, is_adaptive=True),
                    delta=delta,
                    epsilon_limit=limits.get((name, unit)),
                )
            )
        return totals

    def limits(self, data: str) -> dict[Unit, float]:
        """Return the operator's limits on the epsilon of all releases on the data set ``data`` together, by privacy
        unit."""
        with self.transaction() as database:
            return dict(database.execute("SELECT unit, epsilon FROM limits WHERE data = ? ORDER BY unit", (data,)))

    def set_limit(self, data: str, unit: Unit, *, epsilon: float, delta: float) -> float:
        """Set a limit on the epsilon of all releases on ``data`` together, which holds even if each release is chosen
        after seeing the earlier ones.

        Return the total epsilon of all releases so far as this limit counts it, 0 without any: a limit must be larger
        to admit another release. For a single release this is above the epsilon in :class:`Total`, where a single
        release counts as fixed beforehand. ValueError for values out of range.
        """
        if not 0 < epsilon < math.inf or not 0 < delta < 1:
            raise ValueError(
                f"Limit: expected 0 < epsilon < inf and 0 < delta < 1, got {epsilon} and {delta}; change these values."
            )
        with self.transaction() as database:
            database.execute("INSERT OR REPLACE INTO limits VALUES (?, ?, ?, ?)", (data, unit, epsilon, delta))
            # As limits will charge it: a plan in full, however little of it was released.
            charged = [row.charged for row in _rows(database, data=data) if row.is_private]
        return max(
            accountant.least_adaptive_limit(curve_A, delta=delta) for _, curve_A in _by_part(_counted_by(unit, charged))
        )

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Context manager: open the odometer's database for one transaction; an exception inside the ``with`` block
        rolls it back."""
        try:
            make_folder(self.path.parent, private=True)
            # Made here and not by SQLite, which follows the umask.
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            give_to_owner(descriptor, self.path.parent)
            os.close(descriptor)
            # A long timeout, because another process may compose loss distributions inside its transaction.
            with closing(sqlite3.connect(self.path, isolation_level=None, timeout=60)) as database:
                database.row_factory = sqlite3.Row
                # A release becomes visible right after its row, which must outlast a loss of power.
                database.execute("PRAGMA synchronous = FULL")
                database.executescript(_TABLES)
                # Taken for writing before anything is read: two processes must not find the same room.
                database.execute("BEGIN IMMEDIATE")
                # After an error the connection closes before its COMMIT.
                yield database
                database.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise OdometerError(
                f"{self.path}: cannot be read and written ({error}); make it writable, set FAIRPATE_STATE to another "
                "folder, or restore the file from a copy."
            ) from error


def _rows(database: sqlite3.Connection, *, data: str | None = None, run: str | None = None) -> list[Release]:
    """Return all releases that are stored in the odometer's ``database``, or only those on the data set ``data`` or of
    the run with the id ``run``, oldest first."""
    found = []
    try:
        for row in database.execute(_READ, {"data": data, "run": run}):
            values = dict(row)
            values |= {name: _events(values[name]) for name in ("events", "plan")}
            found.append(Release(**values | {"rdp_A": np.frombuffer(values["rdp_A"], dtype="<f8")}))
    except (ValueError, TypeError) as error:
        # As an error of the database: `transaction` reports all of them with their remedy.
        raise sqlite3.DatabaseError(f"the odometer's row of a release is damaged: {error}") from error
    return found


# A run reads the rows of its data set at each of its stages, a service at each block of queries.
@lru_cache(maxsize=4096)
def _events(text: str) -> tuple[Event, ...]:
    return tuple(map(event_from, json.loads(text)))


def _counted_by(unit: Unit, releases: Sequence[Release]) -> list[Release]:
    """Return those of ``releases`` that add to the total cost for the privacy unit ``unit``. Their privacy events are
    converted to this unit: those of a release per person, for example, to events per record."""
    found = []
    for each in releases:
        if each.unit == unit:
            found.append(each)
        elif each.is_private and each.unit in _IMPLYING.get(unit, ()):
            events, plan = (
                tuple(mechanism_events.part_of_unit(event, unit) for event in some) for some in (each.events, each.plan)
            )
            relation = events[0].relation if events else each.relation
            found.append(replace(each, unit=unit, relation=relation, events=events, plan=plan, rdp_A=_NEW))
    return found


# Relative difference of two Renyi curves that is attributed to rounding, if both are of the same calibrated noise.
_SAME_COST = 1e-9


def _admitted(
    database: sqlite3.Connection, release: Release, rows: Sequence[Release], plan: Sequence[Event] | None
) -> Release:
    """Check ``release`` against the limits of its data set, and return it; LimitReachedError if it exceeds a limit.

    ``rows``: the stored releases on the data set. ``plan``: all events of the run that were fixed beforehand, as in
    :meth:`Odometer.record`. Some releases fit a limit only if no other release reads the same data and all events were
    fixed beforehand. Such a release is returned with these events as its plan.
    """
    query = "SELECT unit, epsilon, delta FROM limits WHERE data = ? ORDER BY unit"
    limits = database.execute(query, (release.data,)).fetchall()
    # A release without privacy adds to no sum, so that no limit applies to it; it is listed all the same.
    if not limits or not release.is_private:
        return release
    # Without its own earlier row, which this one replaces.
    others = [row.charged for row in rows if row.run != release.run and row.is_private]
    # A run that began without a plan has released what no plan covers: it is charged at the order for good.
    if len(others) == sum(row.is_private for row in rows):
        planned = merged(release.charged.events if plan is None else plan)
        whole = replace(release, events=planned, plan=(), rdp_A=_NEW)
        if not _fits(whole, others, limits, is_planned=True):
            release = replace(release, plan=planned)
    if release.plan and covering(release.plan, release.events) != release.plan:
        raise LimitReachedError(
            f"{release.data}, unit {release.unit}: the limit admitted this run with a fixed plan, and the run would "
            "now release more than was planned; raise the limit with `fairpate ledger limit` and start another run."
        )
    _fits(release.charged, others, limits, is_planned=bool(release.plan))
    return release


def _fits(
    release: Release, others: Sequence[Release], limits: Sequence[tuple[Unit, float, float]], *, is_planned: bool
) -> bool:
    """Return True if ``release`` fits every limit even if it was chosen after seeing the ``others``, the releases
    charged before. Return False if it fits some limit only because it is the single release of its data and all its
    events were fixed beforehand (``is_planned``).

    LimitReachedError if the release exceeds a limit either way.
    """
    fits = True
    # Every limit is checked: one that is exceeded refuses, even if another is not.
    asked = [(unit, limit, delta, each) for unit, limit, delta in limits for each in _counted_by(unit, [release])]
    for unit, limit, delta, each in asked:
        rule = each.part.partition("/")[0]
        # Another part of the same rule has other units.
        same = [
            row
            for row in _counted_by(unit, others)
            if not rule or row.part in ("", each.part) or row.part.partition("/")[0] != rule
        ]
        place = f"{each.data}, unit {each.unit}"
        if any(row.relation != each.relation for row in same):
            raise LimitReachedError(
                f"{place}: earlier releases have another relation than {each.relation!r}, and releases of two "
                f"relations have no common epsilon that the limit of {limit:g} could bound; set target.relation to "
                "that of the earlier releases."
            )
        line = accountant.AdaptiveLimit(epsilon=limit, delta=delta)
        if all(line.admits(curve_A) for _, curve_A in _by_part([*same, each])):
            continue
        is_alone = is_planned and not same
        # In this form NaN is refused too.
        if is_alone and composed_epsilon([each], delta=delta) <= limit:
            fits = False
            continue
        alone = (replace(each, events=(event,), rdp_A=_NEW) for event in each.events)
        unpriced = {type(one.events[0]).__name__ for one in alone if not np.isfinite(one.rdp_A[line.place])}
        if unpriced and not is_alone:
            raise LimitReachedError(
                f"{place}: the limit of {limit:g} adds up Renyi divergences of order {line.order:g}, which are "
                f"infinite or unknown for {', '.join(sorted(unpriced))}; make this the only release, or use another "
                "method."
            )
        spent, total = (
            max(accountant.least_adaptive_limit(curve_A, delta=delta) for _, curve_A in _by_part(rows))
            for rows in (same, [*same, each])
        )
        # A single release was fixed beforehand, so that its message quotes the smaller sum.
        if is_alone:
            total = composed_epsilon([each], delta=delta)
        raise LimitReachedError(
            f"{place}: {counted(len(same), 'release')} cost epsilon {at_most(spent)} at delta {delta_text(delta)} if "
            f"later ones depend on earlier ones; with this release it would be {at_most(total)}, and the limit is "
            f"{limit:g}: add noise, release less, or raise the limit with `fairpate ledger limit`."
        )
    return fits


FORMAT = "fairpate.release/1"


@dataclass(frozen=True, kw_only=True)
class Released:
    """Released arrays by name, and all privacy events of drawing them from private records."""

    arrays: Arrays
    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of released arrays: everything that determines them, except private records and noise. A run compares
    it with its own settings and public records before it uses a stored release.

    ``id``: the id of their run in the odometer (the database of privacy costs). ``settings``: the settings of the
    configuration on which the arrays depend. ``pool``: a digest of the public records. ``after``: digests of the
    earlier releases of the same run.
    """

    id: str
    settings: dict[str, Any]
    pool: str
    after: tuple[str, ...] = ()


def save_release(path: Path, released: Released, origin: Origin) -> None:
    """Write released arrays and their origin to the file ``path``; a student can be trained from this file without any
    private record."""
    arrays = {name: np.ascontiguousarray(array) for name, array in released.arrays.items()}
    header: dict[str, Any] = {"format": FORMAT, "id": origin.id, "settings": origin.settings, "pool": origin.pool}
    header |= {"events": list(map(event_json, released.events)), "sha256": arrays_digest(arrays)}
    if origin.after:
        header["after"] = origin.after
    write_atomically(path, lambda temporary: temporary.write_bytes(save(arrays, {"release": json.dumps(header)})))
    # Released arrays are public, also under a strict umask.
    path.chmod(0o644)


def read_release(path: Path) -> tuple[Released, Origin]:
    """Return the released arrays and their origin that :func:`save_release` wrote to ``path``; RunDirectoryError if the
    file is missing, damaged or of another kind."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads(file.metadata()["release"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        if header["format"] != FORMAT or header["sha256"] != arrays_digest(arrays):
            raise ValueError(f"the file must have format {FORMAT}, and arrays that match its checksum")  # noqa: TRY301
        released = Released(arrays=arrays, events=tuple(map(event_from, header["events"])))
        after = tuple(header.get("after", ()))
        return released, Origin(**{name: header[name] for name in ("id", "settings", "pool")}, after=after)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{path}: not a readable release ({error}). A release cannot be drawn again: restore this file from a "
            "copy, or start a new run folder with --out and add up both epsilons."
        ) from error


def require_same_settings(origin: Origin, settings: Mapping[str, Any], path: Path) -> None:
    """Raise RunFolderError if the release in the file ``path``, whose origin is ``origin``, was made under settings
    other than ``settings``."""
    if changes := changed_fields(origin.settings, settings):
        raise RunFolderError(
            f"{path}: was released under other settings ({'; '.join(changes.values())}); set them back, or let the run "
            "make a release of its own, which costs its epsilon in addition."
        )


def take_release(run: RunDirectory, source: Path, candidate: str) -> None:
    """Copy the release of the run in the folder ``source`` to ``run``, whose model then learns from it.

    ``source`` may also contain a private choice: the release of which candidate settings are best on the validation
    records. If the chosen settings have the digest ``candidate``, the file of the choice is copied too. RunFolderError
    if ``run`` has another release already.
    """
    given = RunDirectory(root=source)
    content = given.released.read_bytes()
    has_started = run.statement.exists() or run.receipt.exists() or run.released.exists()
    # The same release again is not a second one: the command of an interrupted run may be repeated.
    if has_started and not (run.released.exists() and run.released.read_bytes() == content):
        raise RunFolderError(f"{run.root}: this run has a release of its own already; give another folder with --out.")
    write_atomically(run.released, lambda temporary: temporary.write_bytes(content))
    if given.choice.exists() and not run.choice.exists():
        made, origin = read_release(given.choice)
        if origin.settings["candidates"][int(made.arrays["chosen"][0])] == candidate:
            write_atomically(run.choice, lambda temporary: temporary.write_bytes(given.choice.read_bytes()))


@dataclass(frozen=True, kw_only=True)
class _OneFile(RunDirectory):
    """The paths of a release that a run draws from its test or validation records, and that is charged separately from
    the run's training (:meth:`ReleaseLog.of_part`).

    The release has its own file and its own receipt (the record of what was charged). ``statement`` is the file whose
    existence proves that the release was published. If both files were deleted, the release may be drawn
    again. The new file then lists the events of all draws, the latest last, and the run's privacy statement
    includes the cost of all.
    """

    states_all_draws: ClassVar[bool] = True


class MetricsFolder(_OneFile):
    """The paths of the noisy table of predictions from which a run computes private metrics. The table is charged as a
    release of its own, separate from the run's training."""

    released = PathIn("public", "metrics.safetensors")
    receipt = PathIn("private", "metrics_release.json")
    statement = PathIn("public", "metrics.json")


class ChoiceFolder(_OneFile):
    """The paths of a private choice: the release of which of several settings is best on the validation records. It is
    charged separately from the run's training. If its file was deleted, another choice may be made, which is charged
    too."""

    released = PathIn("public", "choice.safetensors")
    receipt = PathIn("private", "choice_release.json")
    statement = PathIn("public", "choice.safetensors")


# The result of a training, with its ``events`` and ``noise``: methods define it, and import this module.
AnyPriced = TypeVar("AnyPriced", bound=Any)


class ReleaseLog:
    """The log of one run's releases of private records. It reads each release from the run's folder, or, if the release
    is missing, draws, charges and stores it.

    A method releases arrays step by step (:meth:`step`), a model that it trains (:meth:`model`), or labels through a
    ledger (:class:`LedgerMeter`). A release is charged durably before anything of it becomes visible, so that a crash
    may charge one release too many but never one too few. A stored release is never drawn again. If the file of a
    release was deleted after the run was published, the log refuses to draw it again; before that, the deleted release
    stays charged, and the next one is charged in addition.

    A run has a random ``id`` in its receipt, the run's own record of what it charged. A run that is repeated is charged
    once; one whose folder is deleted stays charged. If the odometer lost the run's row, the run is charged again as
    soon as it is opened. A copy of a run's folder counts as another run. A run that only learns from the release of
    another run has the id of that release, and no receipt.
    """

    def __init__(self, run: RunDirectory, odometer: Odometer, *, data: str, method: str, part: str = "") -> None:
        self._run, self._odometer = run, odometer
        self._data, self._method, self._part = data, method, part
        self._planned: tuple[Event, ...] | None = None
        self._is_reserved = False
        self._before: tuple[Event, ...] = ()
        self._steps: list[tuple[Released, Origin]] = []
        # Whether the next release continues a draw that was interrupted after it was charged. Set only if its noise was
        # stored: a draw with new noise is another release.
        self.continues = False
        kept = read_release(run.released)[1].id if run.released.exists() else None
        receipt = read_receipt(run)
        # Random, no digest of settings: two runs with equal settings draw noise twice, and cost twice.
        self.id = receipt.run if receipt is not None else kept or secrets.token_hex(16)
        if receipt is None:
            return
        if self.stored(receipt.run) is None:
            _log.warning("%s: this run's release was not in %s, so it is charged there again.", run.root, odometer.path)
            # Beyond a limit too: it was released, and a refusal would leave it out of the sum.
            odometer.record(receipt, enforce=False)
        # A copy that has the released arrays reads the same release, which costs nothing more.
        elif kept is None and self._is_copy(receipt):
            self.id = secrets.token_hex(16)

    def step(
        self,
        draw: Callable[[], Released],
        *,
        settings: dict[str, Any],
        pool: str,
        noise: str,
        name: str = "",
        events: Sequence[Event] = (),
    ) -> Released:
        """Return one release of arrays: the stored release, or else what ``draw`` returns, which is charged before it
        is stored.

        ``settings`` are all settings that determine the release, and ``pool`` is the digest of the public records.
        ``noise`` describes the source of the noise (``os_entropy`` if the noise is secret). The first release of a run
        has no ``name``, each later one has its own. ``events``: the privacy events, if they are known beforehand; they
        are charged before the draw. If they are not given, ``draw`` must either call :meth:`reserve` before it draws
        noise, or make nothing of the release visible before it returns.

        RunDirectoryError if the stored release was made from other settings, public records or earlier releases, or was
        deleted although its run was published. LimitReachedError if a limit would be exceeded.
        """
        path = self._run.released
        if name:
            path = path.with_stem(f"{path.stem}-{name}")
        after = tuple(arrays_digest(released.arrays) for released, _ in self._steps)
        if path.exists():
            released, origin = read_release(path)
            require_same_settings(origin, settings, path)
            if origin.pool != pool:
                raise RunDirectoryError(
                    f"{path}: this release was made with other public records of {self._data}; give the same public "
                    "records as then."
                )
            if origin.after != after:
                raise RunDirectoryError(
                    f"{path}: this release was made after other releases than those in this folder; restore all of its "
                    "releases from one copy."
                )
            self._count_found([*self._steps, (released, origin)], noise=noise)
        else:
            # Before the draw: refuse what must not be drawn again while no noise exists.
            self._begin(path)
            if events:
                self.reserve(events, noise=noise)
            released = draw()
            # Charged as soon as its events are known, and before it is stored: until then nothing of it is visible.
            self.record((*self._before, *released.events), noise=noise, plan=self._planned)
            self._is_reserved = False
            if self._run.states_all_draws:
                released = replace(released, events=(*self._before, *released.events))
            origin = Origin(id=self.id, settings=settings, pool=pool, after=after)
            save_release(path, released, origin)
        self._steps.append((released, origin))
        return released

    def model(self, train: Callable[[], AnyPriced], *, is_release: bool) -> AnyPriced:
        """Return the result of ``train`` after charging its privacy events to the odometer, except those that
        :meth:`step` charged already.

        ``is_release``: True if the model itself is a release of private records, which cannot be repeated; False if it
        is learned from released arrays alone, or without privacy. If ``train`` raises SpentError (it gave up, which
        reveals something), the error's events are charged before it is raised again. RunDirectoryError and
        LimitReachedError as in :meth:`step`.
        """
        if is_release:
            self._begin(self._run.student)
        try:
            trained = train()
        except accountant.SpentError as error:
            reason = error
        else:
            own = beyond(trained.events, [event for released, _ in self._steps for event in released.events])
            if own:
                if self._steps and not self._is_reserved:  # counted with them, under one id
                    self._begin(self._run.student)
                self.record((*self._before, *own), noise=trained.noise)
            return trained
        # Outside of the handler: if a limit refuses the release, its refusal must not carry that message.
        if self._steps and not self._is_reserved:
            self._begin(self._run.student)
        # Limits are checked for the whole plan: giving up must be refused just when a run that does not is refused too.
        self.record(self._planned or (*self._before, *reason.events), noise=reason.noise)
        self.record((*self._before, *reason.events), noise=reason.noise, enforce=False)
        raise reason

    def _begin(self, path: Path) -> None:
        """Set the id under which the release in the file ``path`` will be charged, and read the privacy events that
        were charged under this id before.

        RunDirectoryError if the run was published: then its release was deleted, and drawing it again would be another
        release.
        """
        if self._run.statement.exists():
            raise RunDirectoryError(
                f"{path}: missing, although {self._run.statement} says that it was released. Drawing it again would be "
                "a second release of the same records: restore the file from a copy, or start a new run folder with "
                "--out and add up both epsilons."
            )
        receipt = read_receipt(self._run)
        # The receipt charges this very release already: as earlier events it would be charged twice.
        if self.continues and receipt is not None:
            self.id, self._before = receipt.run, ()
            return
        # A further release of this run: one row charges it together with those before it.
        is_kept = self._run.released.exists()
        if receipt is not None and (is_kept or self._run.states_all_draws) and not self._is_copy(receipt):
            self.id, self._before = receipt.run, receipt.events
            return
        if receipt is not None and not self._run.released.exists():
            _log.warning("%s: may have released a model that was deleted; the next one is charged too.", self._run.root)
        # A new id, so that the row of what was charged before is not replaced.
        if receipt is not None or self._run.released.exists():
            self.id = secrets.token_hex(16)
        self._before = ()

    def count_published(self, events: Sequence[Event], *, noise: str) -> None:
        """Charge the privacy events of the run's published releases to the odometer (the database of privacy costs),
        even beyond a limit, unless they were charged already.

        The events are read from the stored releases; if none is stored, they are the argument ``events``.
        """
        if self._run.released.exists():
            self._count_found([read_release(path) for path in self._run.release_files()], noise=noise)
        elif self.stored() is None:
            self.record(events, noise=noise, enforce=False)

    def _count_found(self, steps: Sequence[tuple[Released, Origin]], *, noise: str) -> None:
        """Charge those of the stored releases ``steps`` that this odometer (the database of privacy costs) does not
        contain, such as a copied release of another operator's run. No receipt is written."""
        for run in dict.fromkeys(origin.id for _, origin in steps):
            events = merged([event for released, origin in steps if origin.id == run for event in released.events])
            known = self.stored(run)
            if known is None or covering(known.events, events) != known.events:
                _log.warning(
                    "%s: learns from a release that was not in %s; it is charged.", self._run.root, self._odometer.path
                )
                # Under the id of the run that drew it: many runs that learn from it charge it once.
                release = replace(self.release(events, noise=noise), run=run)
                self._odometer.record(release, enforce=False)

    def shared_remarks(self) -> tuple[str, ...]:
        """Return remarks for the privacy statement: one for each release of another run from which this run learned.
        The cost of such a release is spent only once."""
        if not self._run.released.exists():
            return ()
        origins = dict.fromkeys(read_release(path)[1].id for path in self._run.release_files())
        receipt = read_receipt(self._run)
        # Without a receipt all of it was drawn by other runs; with one, only what has another id.
        if receipt is None:
            words = "Learned from release {} of another run, whose ε this is: it is spent once, not again."
        else:
            words = "Learned also from release {} of another run: the part of ε that it cost is spent once, not again."
        return tuple(words.format(run) for run in origins if receipt is None or run != receipt.run)

    def record(
        self,
        events: Sequence[Event],
        *,
        noise: str,
        num_queries: int | None = None,
        plan: Sequence[Event] | None = None,
        enforce: bool = True,
    ) -> None:
        """Charge the privacy ``events`` of everything that the run released or is about to release to the odometer, and
        write the run's receipt, its own record of this charge.

        ``noise`` describes the source of the noise (``os_entropy`` if the noise is secret). ``num_queries``: the number
        of queries in the run's ledger; None leaves the stored number unchanged. ``plan``, ``enforce`` and errors as in
        :meth:`Odometer.record`.
        """
        if num_queries is None:
            before = self.stored()
            num_queries = 0 if before is None else before.num_queries
        release = self.release(events, noise=noise, num_queries=num_queries)
        stored = self._odometer.record(release, plan=plan, enforce=enforce, holds=self._planned is not None)
        # The row before the receipt: a crash between them charges a release that was not seen, never the reverse.
        write_json(self._run.receipt, release_values(stored))

    def release(self, events: Sequence[Event], *, noise: str, num_queries: int = 0) -> Release:
        """Return the row of the odometer that :meth:`record` would store for these arguments; nothing is stored."""
        return Release(
            run=self.id,
            data=self._data,
            unit=events[0].unit,
            relation=events[0].relation,
            noise=noise,
            method=self._method,
            path=str(self._run.root.absolute()),
            # Equal events are joined: a row stays short for any number of steps.
            events=merged(events),
            num_queries=num_queries,
            part=self._part,
        )

    def check(self, events: Sequence[Event], *, noise: str) -> None:
        """Raise LimitReachedError if a run with the privacy ``events``, all fixed beforehand, would exceed a limit of
        the data set; nothing is stored. ``noise`` as in :meth:`record`."""
        with self._odometer.transaction() as database:
            _admitted(database, self.release(events, noise=noise), _rows(database, data=self._data), None)

    def admit(self, events: Sequence[Event], *, noise: str) -> None:
        """Check ``events``, all future privacy events of the run, against the limits of the data set (:meth:`check`),
        and fix them as the plan of the run.

        From the first charge on, limits charge the whole plan, so that no other run can use its share of a limit. A
        later call replaces the plan.
        """
        self.check(events, noise=noise)
        self._planned = tuple(events)

    def reserve(self, events: Sequence[Event], *, noise: str) -> None:
        """Charge the privacy ``events`` of a release durably, before its noise is drawn.

        The charge for the finished draw replaces this one. If the draw fails, crashes or never begins, the charge
        stays. LimitReachedError, with nothing charged, if a limit would be exceeded.
        """
        if self._steps and not self._is_reserved:
            self._begin(self._run.student)
        self.record((*self._before, *events), noise=noise, plan=self._planned)
        self._is_reserved = True

    def standing(self, *, delta: float, and_of: Sequence[Release] = ()) -> Standing | None:
        """Return the cost of this run together with all earlier releases of the same data set, unit and relation; None
        if this run has no privacy guarantee.

        ``and_of``: releases of the same run from other parts of the data set, which are included even if they have not
        been charged yet.
        """
        own = self.stored()
        if own is None or not own.is_private:
            return None
        rows = list(self._odometer.released(own.data).values())
        place_of = {row.run: place for place, row in enumerate(rows)}
        others = {other.run for other in and_of}
        # Up to its own last row: later releases are reported by their own statements. A run that learns from another's
        # release may draw its own table long after it; a table that is still to be drawn comes after all rows.
        last = max(place_of.get(each, len(rows) - 1) for each in {self.id, *others})
        before = [row for row in rows[: last + 1] if row.run not in others]
        same = [row for row in _counted_by(own.unit, before) if row.is_private and row.relation == own.relation]
        together = [*same, *and_of]
        return Standing(
            earlier=len(same) - 1,
            epsilon=composed_epsilon(together, delta=delta),
            epsilon_adaptive=composed_epsilon(together, delta=delta, is_adaptive=True),
        )

    def of_part(self, part: Literal["test", "validation"]) -> ReleaseLog:
        """Return the log of the release that the same run makes from the test or the validation records of the data
        set."""
        folder = (MetricsFolder if part == "test" else ChoiceFolder)(root=self._run.root)
        # The split's rule stays: only parts of one split are known to be disjoint.
        rule = self._part.partition("/")[0]
        name = f"{rule}/{part}" if rule else ""
        return ReleaseLog(folder, self._odometer, data=self._data, method=self._method, part=name)

    def stored(self, run: str | None = None) -> Release | None:
        """Return the row of the odometer for this run, or for the run with the id ``run``; None if the odometer has no
        such row."""
        with self._odometer.transaction() as database:
            return next(iter(_rows(database, run=run or self.id)), None)

    def _is_copy(self, receipt: Release) -> bool:
        """Return True if this run's folder is a copy, which is charged as a run of its own. It is a copy if the run
        that ``receipt`` names has another path in the odometer, and the folder at that path still holds this run."""
        stored = self.stored(receipt.run)
        other = type(self._run)(root=Path((stored or receipt).path))
        if other.root == self._run.root.absolute():
            return False
        # A folder that was moved leaves no receipt at its old place, and is the same run.
        try:
            other.receipt.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            # Such as another user's folder, in which the run may go on: charged too much rather than too little.
            _log.warning(
                "%s: charged as another run, because its earlier folder %s cannot be looked into (%s) and may still "
                "hold it.",
                self._run.root,
                other.root,
                error.strerror,
            )
            return True
        found = read_receipt(other)
        if found is None or found.run != receipt.run:
            return False
        _log.warning("%s: a copy of %s, so it is charged as another run.", self._run.root, other.root)
        return True


# Most queries that are charged in advance: a ledger may take them without writing to the odometer again, and a crash
# charges at most this number too many.
_BLOCK = 256


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

    log: ReleaseLog
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
                self.log.record(events, noise=noise, num_queries=self._settled, plan=plan, enforce=enforce)
            except LimitReachedError as error:
                if room == num_reservations:
                    raise LedgerError(str(error)) from error
            else:
                self._held = room
                return


def spent(data: str, odometer: Odometer, *, delta: float) -> str:
    """Return in words, for each unit, the number of releases charged on ``data``, their total cost, and the limit."""
    totals = [
        f"{counted(total.releases, 'release')} at ε = {epsilon_text(total.epsilon)} per {total.unit}, "
        + ("no limit" if total.epsilon_limit is None else f"limit {epsilon_text(total.epsilon_limit)}")
        for total in odometer.totals(delta=delta, data=data)
        if total.releases
    ]
    return "; ".join(totals) or "nothing"


def spent_since(before: Mapping[str, Release], data: str, odometer: Odometer, *, delta: float) -> str:
    """Return in words what this command's releases on ``data`` cost, and what all releases on ``data`` cost together;
    empty if none of the command's releases is private. ``before`` are the releases in the odometer when the command
    began; all that was added since is the command's own."""
    of_kind: dict[tuple[str, str], list[Release]] = {}
    for run, release in odometer.released(data).items():
        events = beyond(release.events, before[run].events if run in before else ())
        if events and release.is_private:
            new = replace(release, events=events, plan=(), rdp_A=_NEW)
            of_kind.setdefault((release.unit, release.relation), []).append(new)
    costs = [(unit, composed_epsilon(found, delta=delta)) for (unit, _), found in of_kind.items()]
    now = [f"ε = {epsilon_text(cost)} of each {unit}" for unit, cost in costs]
    return f"{' and '.join(now)} of {data}; so far {spent(data, odometer, delta=delta)}" if now else ""
