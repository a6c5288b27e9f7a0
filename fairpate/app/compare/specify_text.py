"""The answer to a demand in words: what a terminal shows of :mod:`fairpate.app.compare.specify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fairpate.app.compare.specify import CAVEAT, DISTANCE, Answer, Transferred, repeat_command
from fairpate.evaluation.demands import Achievable, Demand, Offer, Transfer
from fairpate.evaluation.frontier import Point
from fairpate.evaluation.frontier_charts import class_label, with_spread
from fairpate.evaluation.frontier_tables import baseline_words
from fairpate.evaluation.page import epsilon_text, in_two_lines
from fairpate.fairness.notions import NOTIONS, NotionName

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
