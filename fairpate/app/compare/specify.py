"""What a regulator may ask for: which guarantees hold together, at what accuracy, by which configuration.

The answer is read from the finished runs of a comparison, per data set and privacy class; nothing is trained. With a
second table the choice is transferred (the third question of the FairPATE paper): made on one data set's frontier,
applied on another's, and compared with what that one would have chosen itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fairpate.app.compare.records_table import read_rows
from fairpate.evaluation.demands import (
    Achievable,
    Demand,
    FrontierTransfer,
    Offer,
    Transfer,
    achievable,
    transfer,
    transfer_frontier,
)
from fairpate.evaluation.frontier import OBJECTIVES, Panel, Point, by_panel, points_of
from fairpate.evaluation.frontier_tables import Baselines, baselines
from fairpate.fairness.notions import DEFAULT, NAMES, NotionName, notion_named
from fairpate.steps import stepwise
from fairpate.strict_json import strict
from fairpate.types import UsageError

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
