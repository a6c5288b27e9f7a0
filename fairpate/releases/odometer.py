"""The odometer: the database of all releases that one operator made, and of what they cost together.

The costs of two runs on the same private records add up, in whichever folders the runs are. So one database per
operator has a row for every run, written durably before anything of the release becomes visible
(:mod:`fairpate.releases.log`). A release is charged to the sum for its unit and relation; a release whose unit is a
person is charged to the sum for records too, at its cost per person. A release without privacy is listed, and charged
to no sum.

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
import math
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fairpate.files import PathIn, give_to_owner, make_folder, opened
from fairpate.pages import at_most, counted, delta_text, epsilon_text
from fairpate.privacy import accountant, mechanism_events
from fairpate.privacy.accountant import DEFAULT_ORDERS, Event
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.privacy.loss_distributions import LEAST_DELTA
from fairpate.privacy.mechanism_events import beyond, covering, event_from, event_json, merged
from fairpate.types import FloatArray, Relation, Unit, UserError

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
class RunCharge:
    """One row of the odometer, the database of all runs' privacy costs: everything that one run has released of private
    records so far.

    ``events``: the privacy events of what was released. ``plan``: all events that the run fixed before the first of
    them, ``events`` included; empty without a plan. Limits charge the whole plan, however little of it was released,
    or ``events`` if there is no plan. A run has a plan if it reserved one (:meth:`ReleaseLog.fix_plan`), or if a limit
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
    def charged(self) -> RunCharge:
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


def charge_values(release: RunCharge) -> dict[str, Any]:
    """Return ``release`` as JSON values by name, as a receipt (a run's own record of its charges) stores them."""
    values = {column.name: getattr(release, column.name) for column in fields(release) if column.name != "rdp_A"}
    return values | {name: list(map(event_json, values[name])) for name in ("events", "plan")}


def composed_epsilon(releases: Sequence[RunCharge], *, delta: float, is_adaptive: bool = False) -> float:
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


def _by_part(releases: Sequence[RunCharge]) -> list[tuple[Sequence[RunCharge], FloatArray]]:
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
        f"this one, they cost ε = {fixed} at δ = {delta_text(delta)} if all were planned before the first, and ε = "
        f"{adaptive} if later ones depended on earlier ones.",
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


# Plans and parts are tables of their own: few releases have one.
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

    def charge(
        self, release: RunCharge, *, plan: Sequence[Event] | None = None, enforce: bool = True, holds: bool = False
    ) -> RunCharge:
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
            values = charge_values(release)
            values |= {name: json.dumps(values[name]) for name in ("events", "plan")}
            database.execute(_STORE, values | {"rdp": release.rdp_A.tobytes(), "time": time.time()})
            database.execute(_STORE_PLAN, values)
            database.execute(_STORE_PART, values)
        return release

    def charges(self, data: str) -> dict[str, RunCharge]:
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
            kinds |= {(name, unit, row.relation) for row in counted_by(unit, on_data)}
        totals = []
        for name, unit, relation in sorted(kinds):
            same = [
                row for row in counted_by(unit, rows) if (row.data, row.unit, row.relation) == (name, unit, relation)
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

    def row(self, run: str) -> RunCharge | None:
        """Return the row of the run with the id ``run``; None if the odometer has no such row."""
        with self.transaction() as database:
            return next(iter(_rows(database, run=run)), None)

    def check(self, release: RunCharge) -> None:
        """Raise LimitReachedError if ``release``, all of whose events were fixed beforehand, would exceed a limit of
        its data set; nothing is stored."""
        with self.transaction() as database:
            _admitted(database, release, _rows(database, data=release.data), None)

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
            accountant.least_adaptive_limit(curve_A, delta=delta) for _, curve_A in _by_part(counted_by(unit, charged))
        )

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Context manager: open the odometer's database for one transaction; an exception inside the ``with`` block
        rolls it back."""
        try:
            make_folder(self.path.parent, private=True)
            # Made here and not by SQLite, which follows the umask.
            with opened(self.path, os.O_RDWR | os.O_CREAT, 0o600) as descriptor:
                give_to_owner(descriptor, self.path.parent)
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


def _rows(database: sqlite3.Connection, *, data: str | None = None, run: str | None = None) -> list[RunCharge]:
    """Return all releases that are stored in the odometer's ``database``, or only those on the data set ``data`` or of
    the run with the id ``run``, oldest first."""
    found = []
    try:
        for row in database.execute(_READ, {"data": data, "run": run}):
            values = dict(row)
            values |= {name: _events(values[name]) for name in ("events", "plan")}
            found.append(RunCharge(**values | {"rdp_A": np.frombuffer(values["rdp_A"], dtype="<f8")}))
    except (ValueError, TypeError) as error:
        # As an error of the database: `transaction` reports all of them with their remedy.
        raise sqlite3.DatabaseError(f"the odometer's row of a release is damaged: {error}") from error
    return found


# A run reads the rows of its data set at each of its stages, a service at each block of queries.
@lru_cache(maxsize=4096)
def _events(text: str) -> tuple[Event, ...]:
    return tuple(map(event_from, json.loads(text)))


def counted_by(unit: Unit, releases: Sequence[RunCharge]) -> list[RunCharge]:
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
    database: sqlite3.Connection, release: RunCharge, rows: Sequence[RunCharge], plan: Sequence[Event] | None
) -> RunCharge:
    """Check ``release`` against the limits of its data set, and return it; LimitReachedError if it exceeds a limit.

    ``rows``: the stored releases on the data set. ``plan``: all events of the run that were fixed beforehand, as in
    :meth:`Odometer.charge`. Some releases fit a limit only if no other release reads the same data and all events were
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
    release: RunCharge, others: Sequence[RunCharge], limits: Sequence[tuple[Unit, float, float]], *, is_planned: bool
) -> bool:
    """Return True if ``release`` fits every limit even if it was chosen after seeing the ``others``, the releases
    charged before. Return False if it fits some limit only because it is the single release of its data and all its
    events were fixed beforehand (``is_planned``).

    LimitReachedError if the release exceeds a limit either way.
    """
    fits = True
    # Every limit is checked: one that is exceeded refuses, even if another is not.
    asked = [(unit, limit, delta, each) for unit, limit, delta in limits for each in counted_by(unit, [release])]
    for unit, limit, delta, each in asked:
        rule = each.part.partition("/")[0]
        # Another part of the same rule has other units.
        same = [
            row
            for row in counted_by(unit, others)
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


def spent(data: str, odometer: Odometer, *, delta: float) -> str:
    """Return in words, for each unit, the number of releases charged on ``data``, their total cost, and the limit."""
    totals = [
        f"{counted(total.releases, 'release')} at ε = {epsilon_text(total.epsilon)} per {total.unit}, "
        + ("no limit set" if total.epsilon_limit is None else f"limit {epsilon_text(total.epsilon_limit)}")
        for total in odometer.totals(delta=delta, data=data)
        if total.releases
    ]
    return "; ".join(totals) or "nothing"


def spent_since(before: Mapping[str, RunCharge], data: str, odometer: Odometer, *, delta: float) -> str:
    """Return in words what this command's releases on ``data`` cost, and what all releases on ``data`` cost together;
    empty if none of the command's releases is private. ``before`` are the releases in the odometer when the command
    began; all that was added since is the command's own."""
    of_kind: dict[tuple[str, str], list[RunCharge]] = {}
    for run, release in odometer.charges(data).items():
        events = beyond(release.events, before[run].events if run in before else ())
        if events and release.is_private:
            new = replace(release, events=events, plan=(), rdp_A=_NEW)
            of_kind.setdefault((release.unit, release.relation), []).append(new)
    costs = [(unit, composed_epsilon(found, delta=delta)) for (unit, _), found in of_kind.items()]
    now = [f"ε = {epsilon_text(cost)} of each {unit}" for unit, cost in costs]
    return f"{' and '.join(now)} of {data}; so far {spent(data, odometer, delta=delta)}" if now else ""
