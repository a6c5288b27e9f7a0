"""Demands on privacy, fairness, accuracy and coverage, answered from a sweep's results.

Demands of a regulator on a frontier: which configurations keep them, which come nearest, and what a choice is worth
elsewhere.

A demand is met by what a configuration measured over its seeds. That choice looked at test records: its cost in
privacy is not part of any epsilon, and the chosen configuration will look better here than on fresh data.

What a regulator may ask for: which guarantees hold together, at what accuracy, by which configuration.

The answer is read from the finished runs of a comparison, per data set and privacy class; nothing is trained. With a
second table the choice is transferred (the third question of the FairPATE paper): made on one data set's frontier,
applied on another's, and compared with what that one would have chosen itself.

The answer to a demand in words: what a terminal shows of :mod:`fairpate.run.specify`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fairpate.fairness.rates import DEFAULT, NAMES, NOTIONS, notion_named
from fairpate.report.figures import class_label, with_spread
from fairpate.report.frontier import (
    OBJECTIVES,
    THEN,
    Objective,
    Panel,
    Point,
    by_panel,
    defined,
    frontier,
    guaranteed,
    hypervolume,
    matrix,
    pareto_mask,
    points_of,
    reference_point,
    rounded_up,
)
from fairpate.report.frontier_page import Baselines, baseline_words, baselines
from fairpate.report.page import epsilon_text, in_two_lines
from fairpate.run.sweep import read_rows
from fairpate.types import NotionName, UsageError, stepwise, strict

_ROUNDING = 1e-9
# Stands for a limit of 0, of which no excess is a share.
_ZERO_SCALE = 0.01


@dataclass(frozen=True, kw_only=True)
class Demand:
    """At most ``epsilon`` and ``disparity``, at least ``coverage`` and ``accuracy``; None asks nothing.

    ``disparity`` is that of demographic parity; ``fairness`` limits any notion by its name.
    """

    epsilon: float | None = None
    disparity: float | None = None
    coverage: float | None = None
    accuracy: float | None = None
    fairness: Mapping[NotionName, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.epsilon is not None and not self.epsilon >= 0:
            raise ValueError(f"epsilon: expected a number >= 0, got {self.epsilon}.")
        for name in ("disparity", "coverage", "accuracy"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name}: expected a share between 0 and 1, got {value}.")
        for name, limit in self.fairness.items():
            if name not in NOTIONS:
                raise ValueError(f"fairness: no notion {name!r}; known: {', '.join(NOTIONS)}.")
            if not 0 <= limit <= 1:
                raise ValueError(f"fairness: {name}: expected a limit between 0 and 1, got {limit}.")
        if self.disparity is not None and DEFAULT in self.fairness:
            raise ValueError(f"disparity: expected disparity or fairness {DEFAULT}, which are the same, got both.")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked for."""
        return not self.limits

    @property
    def limits(self) -> dict[str, float]:
        """What it limits, by name: of epsilon and of notions the most, of coverage and accuracy the least."""
        named = {name: getattr(self, name) for name in ("epsilon", "disparity", "coverage", "accuracy")}
        return {name: limit for name, limit in named.items() if limit is not None} | dict(self.fairness)

    @property
    def notions(self) -> tuple[NotionName, ...]:
        """The notions it limits, or the default."""
        named = (*((DEFAULT,) if self.disparity is not None else ()), *self.fairness)
        return named or (DEFAULT,)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A configuration against a demand.

    ``missed`` holds the relative excess of each demand that is not met, that of epsilon as it is guaranteed;
    ``distance`` is the largest of them, 0 when all are met. ``seeds_met`` counts the seeds whose own run meets all of
    it.
    """

    point: Point
    missed: Mapping[str, float]
    seeds_met: int

    @property
    def distance(self) -> float:
        """The largest relative excess: 0.1 says that a demand is missed by 10 % of its value."""
        return max(self.missed.values(), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Achievable:
    """One panel's answer to a demand: offers that meet it by accuracy, else the nearest; and how many are undefined.

    Degenerate predictors meet many demands and serve nobody: they come last, and ``num_degenerate`` counts them.
    """

    met: tuple[Offer, ...]
    nearest: tuple[Offer, ...]
    num_points: int
    num_undefined: int

    @property
    def num_degenerate(self) -> int:
        """How many of ``met`` are degenerate."""
        return sum(bool(offer.point.degenerate) for offer in self.met)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What a choice on one data set is worth on another.

    ``chosen`` was the best offer on the source; ``there`` is the same configuration on the target and ``best`` the
    target's own choice. ``regret`` is the accuracy that is lost against ``best``; NaN unless both meet the demand.
    """

    chosen: Offer
    there: Offer | None
    best: Offer | None

    @property
    def regret(self) -> float:
        """Accuracy lost by choosing elsewhere."""
        if self.there is None or self.best is None or self.there.missed or self.best.missed:
            return math.nan
        return self.there.point.value("error") - self.best.point.value("error")


@dataclass(frozen=True, kw_only=True)
class FrontierTransfer:
    """What a whole frontier is worth elsewhere: hypervolumes of what its members reach there and of the best there.

    ``regret`` is the share of hypervolume that is lost. ``num_missing`` members were not run on the target.
    """

    num_members: int
    num_missing: int
    volume_transferred: float
    volume_best: float

    @property
    def regret(self) -> float:
        """Share of the target's hypervolume that the transferred configurations do not reach; NaN if it has none."""
        return 1 - self.volume_transferred / self.volume_best if self.volume_best else math.nan


def offer(point: Point, demand: Demand) -> Offer:
    """``point`` against ``demand``. An undefined objective misses its demand by infinitely much."""
    by_seed = [_missed(_values(point, demand, seed), demand) for seed in range(len(point.seeds))]
    return Offer(
        point=point, missed=_missed(_values(point, demand), demand), seeds_met=sum(not missed for missed in by_seed)
    )


def achievable(points: Sequence[Point], demand: Demand, *, num_nearest: int = 3) -> Achievable:
    """What one panel's points offer for ``demand``.

    Only points that nothing dominates, in epsilon, error, refusals and every notion of the demand, are offered as
    nearest, so no offer is beaten by another: by distance, then by the sum of all they miss, then by accuracy.
    """
    offers = [offer(point, demand) for point in points if not np.isnan([*_values(point, demand).values()]).any()]
    met = sorted((o for o in offers if not o.missed), key=lambda o: (bool(o.point.degenerate), *_by_error(o)))
    members = _undominated([each.point for each in offers], demand.notions)
    near = sorted((o for o in offers if id(o.point) in members), key=lambda o: (bool(o.point.degenerate), *_by_miss(o)))
    return Achievable(
        met=tuple(met),
        nearest=() if met else tuple(near[:num_nearest]),
        num_points=len(points),
        num_undefined=len(points) - len(offers),
    )


def _undominated(points: Sequence[Point], notions: Sequence[NotionName]) -> set[int]:
    """Identities of the points with everything defined that no other dominates."""
    others: tuple[Objective, ...] = ("epsilon", "error", "refused")
    values_NO = np.column_stack(
        [guaranteed(points, others), *([point.fairness(name) for point in points] for name in notions)]
    )
    rows = np.flatnonzero(~np.isnan(values_NO).any(axis=1)).tolist()
    kept = pareto_mask(values_NO[rows]).tolist() if rows else []
    return {id(points[row]) for row, is_kept in zip(rows, kept, strict=True) if is_kept}


def _values(point: Point, demand: Demand, seed: int | None = None) -> dict[str, float]:
    """What a demand limits, of one seed or over all; NaN for a limit on groups of which some was not measured."""
    values: dict[str, float] = {}
    for name in demand.limits:
        seen, objective = _objective(point, name)
        value = float((seen.mean_O if seed is None else seen.values_SO[seed])[OBJECTIVES.index(objective)])
        values[name] = value if objective in ("epsilon", "disparity") else 1 - value
        if objective == "disparity" and point.groups.unmeasured:
            values[name] = math.nan
    return values


def _objective(point: Point, name: str) -> tuple[Point, Objective]:
    """The objective that a limit is about, and the point with its notion."""
    own: Mapping[str, Objective] = {"epsilon": "epsilon", "accuracy": "error", "coverage": "refused"}
    if name in own:
        return point, own[name]
    notion = DEFAULT if name == "disparity" else next(known for known in NOTIONS if known == name)
    return point.seen_by(notion), "disparity"


def transfer(source: Sequence[Point], target: Sequence[Point], demand: Demand) -> Transfer | None:
    """Choose for ``demand`` on one panel, apply the choice on the other; None if the source offers nothing.

    A configuration is the same on both when its method and every setting agree that the method varies on either, the
    data set's own aside: what is constant on each side belongs to the data set.
    """
    chosen = _choice(source, demand)
    if chosen is None:
        return None
    there = _image(chosen.point, source, target)
    return Transfer(chosen=chosen, there=None if there is None else offer(there, demand), best=_choice(target, demand))


def transfer_frontier(source: Sequence[Point], target: Sequence[Point]) -> FrontierTransfer:
    """Apply the source's whole Pareto set on the target and compare what it covers there."""
    members = frontier(source, OBJECTIVES).members
    images = [_image(point, source, target) for point in members]
    found, _ = defined([image for image in images if image is not None], OBJECTIVES)
    everything, _ = defined(target, OBJECTIVES)
    # One corner for both volumes: under different ones they do not compare.
    reference_O = reference_point(target, OBJECTIVES)
    return FrontierTransfer(
        num_members=len(members),
        num_missing=sum(image is None for image in images),
        volume_transferred=hypervolume(matrix(found, OBJECTIVES), reference_O=reference_O),
        volume_best=hypervolume(matrix(everything, OBJECTIVES), reference_O=reference_O),
    )


def varied_settings(points: Sequence[Point]) -> frozenset[str]:
    """Names of settings in which some of ``points`` differ, the data set's own aside."""
    names = {name for point in points for name in point.settings if not name.startswith("data.")}
    return frozenset(name for name in names if len({_plain(point, name) for point in points}) > 1)


def _choice(points: Sequence[Point], demand: Demand) -> Offer | None:
    found = achievable(points, demand)
    return next(iter(found.met or found.nearest), None)


def _image(point: Point, source: Sequence[Point], target: Sequence[Point]) -> Point | None:
    """The point of ``target`` with the same settings, if there is exactly one."""
    here, there = ([p for p in points if p.series == point.series] for points in (source, target))
    varied = varied_settings(here) | varied_settings(there)
    same = [p for p in there if all(_plain(p, name) == _plain(point, name) for name in varied)]
    return same[0] if len(same) == 1 else None


def _missed(values: Mapping[str, float], demand: Demand) -> dict[str, float]:
    """The relative excess over each limit that is not kept; infinite where the value is undefined."""
    excess = {}
    for name, limit in demand.limits.items():
        miss = _below if name in ("coverage", "accuracy") else _above
        # A true epsilon within the limit is no excess, though it is guaranteed rounded up.
        over = miss(values[name], limit)
        excess[name] = over and miss(rounded_up(values[name]), limit) if name == "epsilon" else over
    return {name: value for name, value in excess.items() if value > _ROUNDING}


def _above(value: float, limit: float) -> float:
    if value <= limit:
        return 0.0
    return math.inf if math.isnan(value) else (value - limit) / (limit or _ZERO_SCALE)


def _below(value: float, limit: float) -> float:
    if value >= limit:
        return 0.0
    return math.inf if math.isnan(value) else (limit - value) / limit


def _by_miss(found: Offer) -> tuple[float, ...]:
    return round(found.distance, 9), round(sum(found.missed.values()), 9), *_by_error(found)


def _by_error(found: Offer) -> tuple[float, ...]:
    values = [found.point.value(name) for name in THEN]
    return tuple(math.inf if math.isnan(value) else value for value in values)


def _plain(point: Point, name: str) -> str:
    return json.dumps(point.settings.get(name), sort_keys=True, default=str)


_MAKE_ONE = "make one with `fairpate compare configs/quick.yaml` and give its results.parquet with --frontier"
DISTANCE = (
    "the largest relative excess over a demand (0.10: one is missed by 10 % of its value, 0 counts as 0.01), epsilon "
    "rounded up to 0.01; where it is equal, the smaller sum of all excesses comes first"
)
CAVEAT = (
    "Gaps, rates and accuracy are means over seeds among answered test records, epsilon is the largest of the seeds; "
    "seeds: how many meet the demand by themselves. "
    "Choosing by them costs privacy that no epsilon here includes."
)


class SpecifyError(UsageError):
    """A question that cannot be answered from these tables; the message says what to give instead."""


@dataclass(frozen=True, kw_only=True)
class Transferred:
    """A choice and a frontier moved from one panel to another of the same unit and relation."""

    source: Panel
    target: Panel
    choice: Transfer | None
    frontier: FrontierTransfer


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What each data set and privacy class of ``table`` offers for ``demand``; what the choices are worth elsewhere."""

    demand: Demand
    table: Path
    panels: Mapping[Panel, Achievable]
    baselines: Mapping[Panel, Baselines]
    transfers: Sequence[Transferred]

    def to_json(self) -> dict[str, Any]:
        """Strict JSON values; infinite and undefined numbers are null."""
        demand = asdict(self.demand)
        plain: dict[str, Any] = strict(
            {
                "demand": demand,
                "frontier": str(self.table),
                "distance": DISTANCE,
                "caveat": CAVEAT,
                "answers": [
                    _plain_panel(panel) | _plain_answer(found) | {"baselines": asdict(self.baselines[panel])}
                    for panel, found in self.panels.items()
                ],
                "transfers": [_plain_transfer(moved) for moved in self.transfers],
            }
        )
        return plain


def specify_guarantees(
    demand: Demand, table: Path | None, *, data: str | None = None, transfer_to: Path | None = None
) -> Answer:
    """Answer ``demand`` from the rows of ``table`` (None: of the newest comparison under ``runs``).

    Only prices that may be published count. SpecifyError without a table, for a demand of nothing, or where no finished
    run or no common class is found.
    """
    for option, path in (("--frontier", table), ("--transfer", transfer_to)):
        if path is not None and not path.is_file():
            raise SpecifyError(f"{option}: {path} is no file; give the results.parquet of `fairpate compare`.")
    table = table or _newest_table()
    if demand.is_empty:
        raise SpecifyError(
            "nothing is asked for; give one or more of --epsilon, --disparity, --fairness, --coverage, --accuracy."
        )
    notion = demand.notions[0]
    panels = by_panel(_points(table, data, notion))
    transfers = []
    if transfer_to is not None:
        transfers = _transfers(demand, panels, by_panel(_points(transfer_to, None, notion)))
        if not transfers:
            raise SpecifyError(
                f"--transfer: {transfer_to} has no other data set under the same unit and relation as {table}."
            )
    return Answer(
        demand=demand,
        table=table,
        panels={panel: achievable(found, demand) for panel, found in stepwise(list(panels.items()))},
        baselines={panel: baselines(found) for panel, found in panels.items()},
        transfers=transfers,
    )


def fairness_limits(given: Sequence[str]) -> dict[NotionName, float]:
    """The limits of ``NOTION=LIMIT`` each. ValueError for another form, an unknown notion, or one that comes twice."""
    limits: dict[NotionName, float] = {}
    for each in given:
        name, _, text = each.partition("=")
        try:
            notion = notion_named(name)
        except ValueError as error:
            raise ValueError(f"fairness: {error}") from None
        if notion in limits:
            raise ValueError(f"fairness: {notion} is limited twice; leave one out.")
        try:
            limits[notion] = float(text)
        except ValueError:
            raise ValueError(f"fairness: expected {notion}=LIMIT with a number, got {each!r}.") from None
    return limits


def _newest_table() -> Path:
    tables = sorted(Path("runs").glob("*/results.parquet"), key=lambda path: path.stat().st_mtime)
    if not tables:
        raise SpecifyError(f"--frontier: there is no runs/*/results.parquet here to choose on; {_MAKE_ONE}.")
    return tables[-1]


def _points(table: Path, data: str | None, notion: NotionName) -> list[Point]:
    rows = [row for row in read_rows(table) if not row.is_private]
    names = sorted({row.data for row in rows})
    if data is not None and data not in names:
        raise SpecifyError(f"--data: {table} has no data set {data}; it has {', '.join(names) or 'none'}.")
    chosen = [row for row in rows if data in (None, row.data)]
    done = [(row.record, row.command) for row in chosen if row.record is not None]
    if not done:
        raise SpecifyError(f"{table}: holds no finished run with a price that may be published; {_MAKE_ONE}.")
    return points_of([record for record, _ in done], commands=[command for _, command in done], notion=notion)


def _transfers(
    demand: Demand, sources: Mapping[Panel, Sequence[Point]], targets: Mapping[Panel, Sequence[Point]]
) -> list[Transferred]:
    """Deltas may differ, because they follow the number of records; unit and relation may not."""
    return [
        Transferred(
            source=source,
            target=target,
            choice=transfer(here, there, demand),
            frontier=transfer_frontier(here, there),
        )
        for source, here in stepwise(list(sources.items()))
        for target, there in targets.items()
        if source.data != target.data
        and (source.privacy.unit, source.privacy.relation) == (target.privacy.unit, target.privacy.relation)
    ]


def repeat_command(command: str) -> str:
    """``command`` with fresh noise; another command as it is."""
    return re.sub(r" --set noise=seeded(?= |$)", "", command)


def _plain_panel(panel: Panel) -> dict[str, Any]:
    privacy = panel.privacy
    return {"data": panel.data, "unit": privacy.unit, "relation": privacy.relation, "delta": privacy.delta}


def _plain_answer(found: Achievable) -> dict[str, Any]:
    return {
        "achievable": bool(found.met),
        "num_configurations": found.num_points,
        "num_undefined": found.num_undefined,
        "num_degenerate": found.num_degenerate,
        "met": [_plain_offer(offer) for offer in found.met],
        "nearest": [_plain_offer(offer) for offer in found.nearest],
    }


def _plain_offer(offer: Offer | None) -> dict[str, Any] | None:
    if offer is None:
        return None
    point = offer.point
    spread = dict(zip(("disparity", "accuracy", "coverage"), point.seen_by(DEFAULT).spread_O[1:].tolist(), strict=True))
    return {
        "method": point.method,
        "epsilon": point.value("epsilon"),
        "disparity": point.fairness(DEFAULT),
        "fairness": {name: _mean_and_spread(point.seen_by(name)) for name in NAMES},
        "accuracy": 1 - point.value("error"),
        "coverage": 1 - point.value("refused"),
        "spread": spread,
        "seeds": list(point.seeds),
        "seeds_met": offer.seeds_met,
        "missed": dict(offer.missed),
        "distance": offer.distance,
        "majority_accuracy": point.majority_accuracy,
        "degenerate": list(point.degenerate),
        "underserved_groups": dict(point.groups.underserved),
        "unmeasured_groups": dict(point.groups.unmeasured),
        "noise_from_seed": point.is_seeded,
        "remarks": list(point.remarks),
        "settings": dict(point.settings),
        "commands": [repeat_command(command) for command in point.commands],
    }


def _mean_and_spread(seen: Point) -> dict[str, float]:
    place = OBJECTIVES.index("disparity")
    return {"mean": float(seen.mean_O[place]), "spread": float(seen.spread_O[place])}


def _plain_transfer(moved: Transferred) -> dict[str, Any]:
    choice, whole = moved.choice, moved.frontier
    return {
        "source": _plain_panel(moved.source),
        "target": _plain_panel(moved.target),
        "chosen": None if choice is None else _plain_offer(choice.chosen),
        "there": None if choice is None else _plain_offer(choice.there),
        "its_own": None if choice is None else _plain_offer(choice.best),
        "regret_accuracy": None if choice is None else choice.regret,
        "frontier": {
            "num_members": whole.num_members,
            "num_missing": whole.num_missing,
            "hypervolume_transferred": whole.volume_transferred,
            "hypervolume_own": whole.volume_best,
            "regret_hypervolume": whole.regret,
        },
    }


_MOST_OFFERS = 5
_LEAST_SHOWN = 0.0005
_SEEDED = "noise from a seed: reproducible, not private; epsilon is what the same run would have with fresh noise."
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def describe_answer(answer: Answer) -> Group:
    """The answer for a terminal."""
    parts: list[Any] = [Text(f"frontier: {answer.table}\nasked: {_demand_words(answer.demand)}\n")]
    for panel, found in answer.panels.items():
        parts.append(Text(f"{panel.data}, {class_label(panel.privacy)}", style="bold"))
        compared = baseline_words(answer.baselines[panel])
        parts += [*([Text(compared)] if compared else []), *_panel_parts(found, answer.demand.notions)]
    for moved in answer.transfers:
        parts += _transfer_parts(moved, answer.demand.notions)
    return Group(*parts, Text(CAVEAT))


def _panel_parts(found: Achievable, notions: Sequence[NotionName]) -> list[Any]:
    undefined = (
        f" Undefined in what is asked, or not known for every group: {found.num_undefined}."
        if found.num_undefined
        else ""
    )
    if found.met:
        more = f", the {_MOST_OFFERS} most accurate of them" if len(found.met) > _MOST_OFFERS else ""
        line = f"achievable by {len(found.met)} of {found.num_points} configurations{more}.{_degenerate(found)}"
        recommended = [] if found.num_degenerate == len(found.met) else [_repeat(found.met[0])]
        return [Text(line + undefined), *_offers(found.met[:_MOST_OFFERS], notions), *recommended]
    line = f"not achievable by any of {found.num_points} configurations.{undefined}"
    if not found.nearest:
        return [Text(f"{line}\n")]
    nearest = f"The nearest on the frontier; distance is {DISTANCE}."
    first = f"the first misses {_missed_words(found.nearest[0])}"
    recommended = [] if found.nearest[0].point.degenerate else [_repeat(found.nearest[0])]
    return [Text(f"{line} {nearest}"), *_offers(found.nearest, notions), Text(first), *recommended]


def _degenerate(found: Achievable) -> str:
    """How many of those that meet the demand are worth nothing all the same."""
    if not found.num_degenerate:
        return ""
    if found.num_degenerate == len(found.met):
        return " But all of them are degenerate in at least one seed: none is recommended."
    return f" Behind all others, as degenerate in at least one seed: {found.num_degenerate} of them."


def _offers(offers: Sequence[Offer], notions: Sequence[NotionName]) -> list[Any]:
    """A table, and below it what is to be known of some of its rows."""
    notes = list(dict.fromkeys(note for offer in offers for note in _notes(offer.point)))
    numbers = {note: str(number).translate(_RAISED) for number, note in enumerate(notes, 1)}
    return [_offers_table(offers, notions, numbers), *(Text(f"{number} {note}") for note, number in numbers.items())]


def _notes(point: Point) -> list[str]:
    return [*([_SEEDED] if point.is_seeded else []), *point.remarks]


def _offers_table(offers: Sequence[Offer], notions: Sequence[NotionName], numbers: Mapping[str, str]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("method", no_wrap=True)
    missed = any(offer.missed for offer in offers)
    gaps = [in_two_lines(NOTIONS[notion].measure) for notion in notions]
    for name in ("ε", *gaps, "accuracy %", "coverage %", "distance" if missed else "seeds"):
        table.add_column(name, justify="right", no_wrap=True)
    for offer in offers:
        kept = f"{offer.distance:.2f}" if missed else f"{offer.seeds_met} of {len(offer.point.seeds)}"
        method = " ".join([offer.point.method, *(numbers[note] for note in _notes(offer.point))])
        _, accuracy, coverage = (words.replace("\N{NO-BREAK SPACE}%", "") for words in with_spread(offer.point))
        coverage, *_ = coverage.partition(" ± ")  # 80 columns hold the longest name, not every spread
        fairness = [with_spread(offer.point.seen_by(notion))[0] for notion in notions]
        table.add_row(method, epsilon_text(offer.point.value("epsilon")), *fairness, accuracy, coverage, kept)
    return table


def _transfer_parts(moved: Transferred, notions: Sequence[NotionName]) -> list[Any]:
    heading = f"chosen on {moved.source.data}, applied on {moved.target.data}"
    deltas = "" if moved.source.privacy == moved.target.privacy else f" (there {class_label(moved.target.privacy)})"
    parts: list[Any] = [Text(f"{heading}: {class_label(moved.source.privacy)}{deltas}", style="bold")]
    choice, whole = moved.choice, moved.frontier
    if choice is None:
        parts.append(Text("nothing to choose: no configuration has all objectives defined."))
    elif choice.there is None:
        parts.append(Text(f"chosen: {_offer_words(choice.chosen, notions)}; it was not run on {moved.target.data}."))
    else:
        parts.append(Text(f"chosen:  {_offer_words(choice.chosen, notions)}"))
        parts.append(Text(f"there:   {_offer_words(choice.there, notions)}"))
        if choice.best is not None:
            parts.append(Text(f"its own: {_offer_words(choice.best, notions)}"))
        parts.append(Text(_regret_words(choice)))
    missing = f"; {whole.num_missing} of them were not run there" if whole.num_missing else ""
    parts.append(
        Text(
            f"whole frontier: {whole.num_members} configurations reach {_share(1 - whole.regret)} of the hypervolume "
            f"on {moved.target.data}{missing}.\n"
        )
    )
    return parts


def _regret_words(choice: Transfer) -> str:
    if choice.regret == choice.regret:
        return f"regret:  {100 * choice.regret:.1f} points of accuracy"
    if choice.there is not None and choice.there.missed:
        own = "misses it too" if choice.best is None or choice.best.missed else "meets it"
        return f"regret:  the choice misses the demand there ({_missed_words(choice.there)}); its own {own}"
    return "regret:  undefined, its own choice misses the demand"


def _offer_words(offer: Offer, notions: Sequence[NotionName]) -> str:
    point = offer.point
    _, accuracy, coverage = with_spread(point)
    fairness = ", ".join(f"{NOTIONS[notion].measure} {with_spread(point.seen_by(notion))[0]}" for notion in notions)
    missed = f"; misses {_missed_words(offer)}" if offer.missed else ""
    notes = "".join(f"; {note}" for note in _notes(point))
    return (
        f"{point.method}, epsilon {epsilon_text(point.value('epsilon'))}, {fairness}, accuracy {accuracy}, "
        f"coverage {coverage}{missed}{notes}"
    )


def _missed_words(offer: Offer) -> str:
    words = {
        name: _share(excess) if excess >= _LEAST_SHOWN else "less than 0.1 %" for name, excess in offer.missed.items()
    }
    return ", ".join(f"{_limited(name)} by {share}" for name, share in words.items()) or "nothing"


def _demand_words(demand: Demand) -> str:
    least = ("coverage", "accuracy")
    return ", ".join(
        f"{_limited(name)} {'>=' if name in least else '<='} {limit:g}" for name, limit in demand.limits.items()
    )


def _limited(name: str) -> str:
    """What a limit is about, in words."""
    notion = next((known for known in NOTIONS.values() if name == known.name), None)
    measure = "demographic-parity gap" if name == "disparity" else name
    return measure if notion is None else notion.measure


def _repeat(offer: Offer) -> Text:
    commands = [repeat_command(command) for command in offer.point.commands if command]
    words = f"repeat the first: {commands[0]}" if commands else "no command is recorded for the first."
    return Text(f"{words}\n", no_wrap=True, overflow="ignore")


def _share(value: float) -> str:
    return "undefined" if value != value else "infinitely much" if value == float("inf") else f"{100 * value:.1f} %"
