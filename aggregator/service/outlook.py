"""What an operator should know and do now, in words that are computed from numbers.

How long the budget lasts at the pace of before, and what is wrong with a remedy each. Knows no ledger and no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aggregator.service.history import Point

Level = Literal["ok", "soon", "now"]
_WINDOWS_S = ((3600.0, "hour"), (86400.0, "day"))
_NEARLY = 0.1
_DAY_S = 86400.0
_SHORTEST_S = 600.0
_SPANS = ((86400.0 * 365, "year"), (86400.0, "day"), (3600.0, "hour"), (60.0, "minute"), (1.0, "second"))
_REMEDIES = {
    "ledger": "The ledger cannot be reached or written, so new queries are refused; stored replies go on. Look at its "
    "disk or database and at the log; it is opened again by itself once it can be written.",
    "disk": "The disk of the run is full or read-only. Free some room; the service needs no restart.",
    "votes": "Not all voters answer. They are started again by themselves; if they stay away, look at Ray's nodes.",
    "cluster": "Ray's control process does not answer; without it Ray ends the service within minutes. Look at "
    "`ray status` on the head's node.",
    "busy": "The writer has not come back for two minutes. Look at voters and disk; if it stays, restart the service.",
    "unknown": "The state was not looked at for half a minute: the machine is overloaded. Look at its load.",
}


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """``per_hour``: new queries at the pace of before; ``lasts_s``: how long the rest lasts at it, None: no end."""

    per_hour: float
    lasts_s: float | None
    words: str


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One thing to know: ``ok`` needs nothing, ``soon`` can wait for the day, ``now`` cannot."""

    level: Level
    words: str


def forecast(points: Sequence[Point], *, left: int, is_exact: bool, now_s: float) -> Forecast:
    """How long ``left`` queries last at the pace of the last hour; of the last day, where that hour was quiet.

    ``is_exact`` is false where votes decide when the budget ends: then nothing is forecast.
    """
    charged, seconds, window = _pace(points, now_s)
    per_hour = 3600 * charged / seconds if seconds else 0.0
    if not is_exact:
        words = "Votes decide when this budget ends, so no forecast is made."
        return Forecast(per_hour=per_hour, lasts_s=None, words=words)
    if left <= 0:
        return Forecast(per_hour=per_hour, lasts_s=0.0, words="The budget is used up: only stored replies are given.")
    if not charged:
        return Forecast(per_hour=0.0, lasts_s=None, words=f"No new query in the last {window}: {_queries(left)} left.")
    lasts_s = left / charged * seconds
    words = (
        f"At the pace of the last {window} ({_queries(charged)}), the {_queries(left)} left last about {span(lasts_s)}."
    )
    return Forecast(per_hour=per_hour, lasts_s=lasts_s, words=words)


def advice(
    reasons: Sequence[str], *, left: int, total: int, lasts_s: float | None, chain: str, num_open: int
) -> list[Advice]:
    """What to do, the most urgent first; one ``ok`` where there is nothing. ``chain``: what its verification met."""
    found = [Advice(level="now", words=_REMEDIES[reason]) for reason in reasons if reason != "chain"]
    if chain:
        words = (
            f"The chain of the ledger does not hold: {chain} New queries are refused. Stop the service and restore all "
            "of the ledger from one copy."
        )
        found.append(Advice(level="now", words=words))
    if left <= 0:
        words = "The budget is used up. Stored replies go on; for new queries a new run with new records is needed."
        found.append(Advice(level="soon", words=words))
    elif left < _NEARLY * total:
        words = f"The budget is nearly spent: {_queries(left)} of {total:,} left. Tell the analysts."
        found.append(Advice(level="soon", words=words))
    elif lasts_s is not None and lasts_s < _DAY_S:
        words = f"At this pace the budget is used up in about {span(lasts_s)}. Ask who asks, and whether they mean to."
        found.append(Advice(level="soon", words=words))
    if num_open:
        are = "reservation is" if num_open == 1 else "reservations are"
        words = f"{num_open:,} {are} open: charged, and never answered. A crash leaves them so; nothing is to be done."
        found.append(Advice(level="ok", words=words))
    if all(each.level == "ok" for each in found):
        found.insert(0, Advice(level="ok", words="Healthy: new queries are answered, and nothing needs you."))
    return found


def span(seconds: float) -> str:
    """A length of time in one unit, such as ``3 days``."""
    for length, name in _SPANS:
        if seconds >= length or length == 1:
            number = round(seconds / length)
            return f"{number:,} {name}" + ("" if number == 1 else "s")
    raise AssertionError(seconds)


def _pace(points: Sequence[Point], now_s: float) -> tuple[int, float, str]:
    """(charged, seconds, window) of the shortest window with a charge; of the longest where none has one."""
    paces = [_pace_within(points, now_s, window_s, name) for window_s, name in _WINDOWS_S]
    return next((pace for pace in paces if pace[0]), paces[-1])


def _pace_within(points: Sequence[Point], now_s: float, window_s: float, name: str) -> tuple[int, float, str]:
    before = [point for point in points if point.at_s <= now_s - window_s]
    start = before[-1] if before else points[0]
    # A burst right after the start is no pace yet: it counts as that of ten minutes.
    seconds = max(min(window_s, now_s - start.at_s), _SHORTEST_S)
    return points[-1].charges - start.charges, seconds, name if before else span(seconds)


def _queries(number: int) -> str:
    return f"{number:,} {'query' if number == 1 else 'queries'}"
