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

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fairpate.app.records_table import read_rows
from fairpate.evaluation.frontier import Baselines, Panel, Point, baselines, by_panel, points_of
from fairpate.evaluation.frontier_charts import class_label, with_spread
from fairpate.evaluation.frontier_tables import baseline_words
from fairpate.evaluation.page import epsilon_text
from fairpate.evaluation.selection import (
    Achievable,
    Demand,
    FrontierTransfer,
    Offer,
    Transfer,
    achievable,
    transfer,
    transfer_frontier,
)
from fairpate.strict_json import strict
from fairpate.types import UsageError

_MAKE_ONE = "make one with `fairpate compare configs/quick.yaml` and give its results.parquet with --frontier"
_MOST_OFFERS = 5
_LEAST_SHOWN = 0.0005
_DISTANCE = (
    "the largest relative excess over a demand (0.10: one is missed by 10 % of its value, 0 counts as 0.01), epsilon "
    "rounded up to 0.01; where it is equal, the smaller sum of all excesses comes first"
)
_SEEDED = "noise from a seed: reproducible, not private; epsilon is what the same run would have with fresh noise."
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_CAVEAT = (
    "Disparity, accuracy and coverage are means over seeds on test records, epsilon is the largest of the seeds; "
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
        demand = {name: getattr(self.demand, name) for name in ("epsilon", "disparity", "coverage", "accuracy")}
        plain: dict[str, Any] = strict(
            {
                "demand": demand,
                "frontier": str(self.table),
                "distance": _DISTANCE,
                "caveat": _CAVEAT,
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
    if not demand.objectives:
        raise SpecifyError("nothing is asked for; give one or more of --epsilon, --disparity, --coverage, --accuracy.")
    panels = by_panel(_points(table, data))
    transfers = []
    if transfer_to is not None:
        transfers = _transfers(demand, panels, by_panel(_points(transfer_to, None)))
        if not transfers:
            raise SpecifyError(
                f"--transfer: {transfer_to} has no other data set under the same unit and relation as {table}."
            )
    return Answer(
        demand=demand,
        table=table,
        panels={panel: achievable(found, demand) for panel, found in panels.items()},
        baselines={panel: baselines(found) for panel, found in panels.items()},
        transfers=transfers,
    )


def _newest_table() -> Path:
    tables = sorted(Path("runs").glob("*/results.parquet"), key=lambda path: path.stat().st_mtime)
    if not tables:
        raise SpecifyError(f"--frontier: there is no runs/*/results.parquet here to choose on; {_MAKE_ONE}.")
    return tables[-1]


def _points(table: Path, data: str | None) -> list[Point]:
    rows = [row for row in read_rows(table) if not row.is_private]
    names = sorted({row.data for row in rows})
    if data is not None and data not in names:
        raise SpecifyError(f"--data: {table} has no data set {data}; it has {', '.join(names) or 'none'}.")
    chosen = [row for row in rows if data in (None, row.data)]
    done = [(row.record, row.command) for row in chosen if row.record is not None]
    if not done:
        raise SpecifyError(f"{table}: holds no finished run with a price that may be published; {_MAKE_ONE}.")
    return points_of([record for record, _ in done], commands=[command for _, command in done])


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
        for source, here in sources.items()
        for target, there in targets.items()
        if source.data != target.data
        and (source.privacy.unit, source.privacy.relation) == (target.privacy.unit, target.privacy.relation)
    ]


def describe_answer(answer: Answer) -> Group:
    """The answer for a terminal."""
    parts: list[Any] = [Text(f"frontier: {answer.table}\nasked: {_demand_words(answer.demand)}\n")]
    for panel, found in answer.panels.items():
        parts.append(Text(f"{panel.data}, {class_label(panel.privacy)}", style="bold"))
        compared = baseline_words(answer.baselines[panel])
        parts += [*([Text(compared)] if compared else []), *_panel_parts(found)]
    for moved in answer.transfers:
        parts += _transfer_parts(moved)
    return Group(*parts, Text(_CAVEAT))


def _panel_parts(found: Achievable) -> list[Any]:
    undefined = f" Undefined in what is asked: {found.num_undefined}." if found.num_undefined else ""
    if found.met:
        more = f", the {_MOST_OFFERS} most accurate of them" if len(found.met) > _MOST_OFFERS else ""
        line = f"achievable by {len(found.met)} of {found.num_points} configurations{more}.{_degenerate(found)}"
        recommended = [] if found.num_degenerate == len(found.met) else [_repeat(found.met[0])]
        return [Text(line + undefined), *_offers(found.met[:_MOST_OFFERS]), *recommended]
    line = f"not achievable by any of {found.num_points} configurations.{undefined}"
    if not found.nearest:
        return [Text(f"{line}\n")]
    nearest = f"The nearest on the frontier; distance is {_DISTANCE}."
    first = f"the first misses {_missed_words(found.nearest[0])}"
    recommended = [] if found.nearest[0].point.degenerate else [_repeat(found.nearest[0])]
    return [Text(f"{line} {nearest}"), *_offers(found.nearest), Text(first), *recommended]


def _degenerate(found: Achievable) -> str:
    """How many of those that meet the demand are worth nothing all the same."""
    if not found.num_degenerate:
        return ""
    if found.num_degenerate == len(found.met):
        return " But all of them are degenerate in at least one seed: none is recommended."
    return f" Behind all others, as degenerate in at least one seed: {found.num_degenerate} of them."


def _offers(offers: Sequence[Offer]) -> list[Any]:
    """A table, and below it what is to be known of some of its rows."""
    notes = list(dict.fromkeys(note for offer in offers for note in _notes(offer.point)))
    numbers = {note: str(number).translate(_RAISED) for number, note in enumerate(notes, 1)}
    return [_offers_table(offers, numbers), *(Text(f"{number} {note}") for note, number in numbers.items())]


def _notes(point: Point) -> list[str]:
    return [*([_SEEDED] if point.is_seeded else []), *point.remarks]


def _offers_table(offers: Sequence[Offer], numbers: Mapping[str, str]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("method", no_wrap=True)
    missed = any(offer.missed for offer in offers)
    for name in ("ε", "disparity", "accuracy %", "coverage %", "distance" if missed else "seeds"):
        table.add_column(name, justify="right", no_wrap=True)
    for offer in offers:
        kept = f"{offer.distance:.2f}" if missed else f"{offer.seeds_met} of {len(offer.point.seeds)}"
        method = " ".join([offer.point.method, *(numbers[note] for note in _notes(offer.point))])
        disparity, accuracy, coverage = (words.replace("\N{NO-BREAK SPACE}%", "") for words in with_spread(offer.point))
        coverage, *_ = coverage.partition(" ± ")  # 80 columns hold the longest name, not every spread
        table.add_row(method, epsilon_text(offer.point.value("epsilon")), disparity, accuracy, coverage, kept)
    return table


def _transfer_parts(moved: Transferred) -> list[Any]:
    heading = f"chosen on {moved.source.data}, applied on {moved.target.data}"
    deltas = "" if moved.source.privacy == moved.target.privacy else f" (there {class_label(moved.target.privacy)})"
    parts: list[Any] = [Text(f"{heading}: {class_label(moved.source.privacy)}{deltas}", style="bold")]
    choice, whole = moved.choice, moved.frontier
    if choice is None:
        parts.append(Text("nothing to choose: no configuration has all objectives defined."))
    elif choice.there is None:
        parts.append(Text(f"chosen: {_offer_words(choice.chosen)}; it was not run on {moved.target.data}."))
    else:
        parts.append(Text(f"chosen:  {_offer_words(choice.chosen)}"))
        parts.append(Text(f"there:   {_offer_words(choice.there)}"))
        if choice.best is not None:
            parts.append(Text(f"its own: {_offer_words(choice.best)}"))
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


def _offer_words(offer: Offer) -> str:
    point = offer.point
    disparity, accuracy, coverage = with_spread(point)
    missed = f"; misses {_missed_words(offer)}" if offer.missed else ""
    notes = "".join(f"; {note}" for note in _notes(point))
    return (
        f"{point.method}, epsilon {epsilon_text(point.value('epsilon'))}, disparity {disparity}, accuracy {accuracy}, "
        f"coverage {coverage}{missed}{notes}"
    )


def _missed_words(offer: Offer) -> str:
    words = {
        name: _share(excess) if excess >= _LEAST_SHOWN else "less than 0.1 %" for name, excess in offer.missed.items()
    }
    return ", ".join(f"{name} by {share}" for name, share in words.items()) or "nothing"


def _demand_words(demand: Demand) -> str:
    bounds = {"epsilon": "<=", "disparity": "<=", "coverage": ">=", "accuracy": ">="}
    limits = {name: getattr(demand, name) for name in bounds}
    return ", ".join(f"{name} {bounds[name]} {limit:g}" for name, limit in limits.items() if limit is not None)


def _repeat(offer: Offer) -> Text:
    commands = [repeat_command(command) for command in offer.point.commands if command]
    words = f"repeat the first: {commands[0]}" if commands else "no command is recorded for the first."
    return Text(f"{words}\n", no_wrap=True, overflow="ignore")


def repeat_command(command: str) -> str:
    """``command`` with fresh noise; another command as it is."""
    return re.sub(r" --set noise=seeded(?= |$)", "", command)


def _share(value: float) -> str:
    return "undefined" if value != value else "infinitely much" if value == float("inf") else f"{100 * value:.1f} %"


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
    spread = dict(zip(("disparity", "accuracy", "coverage"), point.spread_O[1:].tolist(), strict=True))
    return {
        "method": point.method,
        "epsilon": point.value("epsilon"),
        "disparity": point.value("disparity"),
        "accuracy": 1 - point.value("error"),
        "coverage": 1 - point.value("refused"),
        "spread": spread,
        "seeds": list(point.seeds),
        "seeds_met": offer.seeds_met,
        "missed": dict(offer.missed),
        "distance": offer.distance,
        "majority_accuracy": point.majority_accuracy,
        "degenerate": list(point.degenerate),
        "noise_from_seed": point.is_seeded,
        "remarks": list(point.remarks),
        "settings": dict(point.settings),
        "commands": [repeat_command(command) for command in point.commands],
    }


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
