"""Views of a service: the page at ``/``, live states, and the operator's overview.

The page is one file with its style and script inside. Its content security policy names both by digest, so that a
browser runs no other script, and allows it to fetch this service's own routes only. The page contains no data of the
service: its script fetches them with the token that the user types. The analyst's part shows public numbers; the
operator's part (charges, forecast, advice) depends on votes and must not be published.

Live states are sent as server-sent events (:class:`Streams`). A state is computed at most once a second for all
callers, so that the time of an event reveals nothing within that second.

Shapes: G groups, C classes.
"""

import asyncio
import base64
import hashlib
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from aggregator.ledger import NOBODY, Asked, Ledger
from aggregator.mechanism import Outcome
from aggregator.service.writer import Books, Readiness, Writer
from aggregator.session import DAY_S, PublicPool
from fairpate import __version__
from fairpate.http_server import Body, FaultError, health_json
from fairpate.pages import compared_costs, counted, render
from fairpate.privacy import accountant
from fairpate.types import strict

# Points of the history, and the time between two at first; it doubles whenever they are thinned out.
_MOST_POINTS = 512
_FIRST_SPACING_S = 1.0
_VERDICTS = ("answer", "confidence", "fairness", "free", "open")


class PointInTime(Body):
    """The number of queries charged up to the time `at_s`, in seconds since 1970; `answered` and `refused` count them
    by group."""

    at_s: float
    charges: int
    answered: list[int]
    refused: list[int]


@dataclass(kw_only=True, eq=False)
class History:
    """The history of a ledger's charges: counts of queries by outcome at several times. Call :meth:`look` from one
    thread at a time.

    ``open`` lists the numbers of charges to which a crash left no outcome, so that nothing was released. ``_counts``
    are by group, verdict and label.
    """

    num_groups: int
    num_classes: int
    points: list[PointInTime] = field(default_factory=list, init=False)
    open: list[int] = field(default_factory=list, init=False)
    _counts: Counter[tuple[int, str, int | None]] = field(default_factory=Counter, init=False)
    _seen: int = field(default=0, init=False)
    _spacing_s: float = field(default=_FIRST_SPACING_S, init=False)

    def begin(self, ledger: Ledger, num_charges: int, *, now_s: float) -> None:
        """Add the charges made before this service started to the history, at the times recorded in the ledger.

        The run's own queries are part of the first point, so that they do not affect the rate of callers' queries.
        """
        known = [asked for asked in ledger.asked if asked.at_s and asked.asker != NOBODY and asked.first < num_charges]
        # Half of the points at most, so that the first new ones do not thin these out at once.
        for asked in known[:: max(1, len(known) // (_MOST_POINTS // 2))]:
            self.look(ledger, asked.first, now_s=asked.at_s)
        self.look(ledger, num_charges, now_s=now_s)

    def look(self, ledger: Ledger, num_charges: int, *, now_s: float) -> None:
        """Add a point to the history for the time ``now_s``, with the present outcomes of the ledger's first
        ``num_charges`` charges."""
        rows = [(number, ledger.charged(number, number + 1)[0]) for number in self.open]
        # Open reservations were counted as open; those that have an outcome now are counted as that.
        self._counts.subtract((group, "open", None) for _, (_, group, _, _) in rows)
        rows += enumerate(ledger.charged(self._seen, num_charges), self._seen)
        self._counts.update(
            (group, "open", None) if outcome is None else (group, outcome.verdict, outcome.label)
            for _, (_, group, outcome, _) in rows
        )
        self.open = [number for number, (_, _, outcome, _) in rows if outcome is None]
        self._seen = max(self._seen, num_charges)
        now_s = max(now_s, self.points[-1].at_s if self.points else now_s)  # a clock may be set back
        groups = self.by_group()
        answered_G = [counts["answer"] for counts in groups]
        refused_G = [sum(counts[kind] for kind in ("confidence", "fairness", "free")) for counts in groups]
        if len(self.points) > 1 and now_s - self.points[-2].at_s < self._spacing_s:
            self.points.pop()  # the last point is always the present
        self.points.append(PointInTime(at_s=now_s, charges=self._seen, answered=answered_G, refused=refused_G))
        if len(self.points) > _MOST_POINTS:
            # Every second point goes and the spacing doubles: memory stays bounded, and the whole history stays
            # visible.
            self.points = [*self.points[:-1:2], self.points[-1]]
            self._spacing_s *= 2

    def by_group(self) -> list[dict[str, Any]]:
        """Return for each group the number of charges by verdict (``open``: without an outcome), and under ``answers``
        the number of answers by class."""
        found: list[dict[str, Any]] = [
            dict.fromkeys(_VERDICTS, 0) | {"answers": [0] * self.num_classes} for _ in range(self.num_groups)
        ]
        for (group, verdict, label), count in self._counts.items():
            found[group][verdict] += count
            if label is not None:
                found[group]["answers"][label] += count
        return found


_WINDOWS_S = ((3600.0, "hour"), (DAY_S, "day"))
_NEARLY_SPENT = 0.1
_SHORTEST_S = 600.0
_UNITS_S = ((DAY_S * 365, "year"), (DAY_S, "day"), (3600.0, "hour"), (60.0, "minute"), (1.0, "second"))
_REMEDIES = {
    "ledger": "The ledger cannot be reached or written, so new queries are refused; stored replies are still given. "
    "Look at its disk or database and at the log; the service opens it again once it can be written.",
    "disk": "The disk of the run is full or read-only. Free some room; the service needs no restart.",
    "votes": "Not all voters answer. The service starts them again; if they do not come back, look at Ray's nodes.",
    "cluster": "Ray's control process does not answer; without it Ray ends the service within minutes. Look at "
    "`ray status` on the head's node.",
    "busy": "The writer has been busy for two minutes. Look at voters and disk; if this lasts, restart the service.",
    "unknown": "Readiness was not checked for half a minute: the machine is overloaded. Look at its load.",
}


class Advice(Body):
    """One piece of advice to the operator: `ok` needs no action, `soon` needs it within a day, `now` without delay."""

    level: Literal["ok", "soon", "now"]
    words: str


def forecast(points: Sequence[PointInTime], *, left: int, is_exact: bool, now_s: float) -> tuple[float | None, str]:
    """Forecast how long the privacy budget lasts if queries come at the rate of the last hour, or of the last day if
    none came in the last hour. Return the number of seconds, None if the budget does not end or this is unknown, and
    the forecast in words.

    ``points`` are the numbers of charges at several times. The budget has room for ``left`` more queries. ``is_exact``
    is False if votes decide when the budget ends: then no forecast is made.
    """
    charged, seconds, window = 0, 0.0, ""
    for window_s, name in _WINDOWS_S:
        # The shortest window with a charge decides: it shows the present pace.
        if charged:
            break
        before = [point for point in points if point.at_s <= now_s - window_s]
        start = before[-1] if before else points[0]
        # A burst right after the start says little about the rate: it counts as that of ten minutes.
        seconds = max(min(window_s, now_s - start.at_s), _SHORTEST_S)
        charged, window = points[-1].charges - start.charges, name if before else span(seconds)
    lasts_s = None
    if not is_exact:
        words = "Votes decide when this budget ends, so no forecast is made."
    elif left <= 0:
        words, lasts_s = "The budget is used up: only stored replies are given.", 0.0
    elif not charged:
        words = f"No new query in the last {window}: {counted(left, 'query', 'queries')} left."
    else:
        lasts_s = left / charged * seconds
        rate = f"At the pace of the last {window} ({counted(charged, 'query', 'queries')})"
        words = f"{rate}, the {counted(left, 'query', 'queries')} left last about {span(lasts_s)}."
    return lasts_s, words


def advice(
    reasons: Sequence[str], *, left: int, total: int, lasts_s: float | None, chain: str, num_open: int
) -> list[Advice]:
    """Return what the operator should do, most urgent first; a single ``ok`` if there is nothing to do.

    ``reasons`` are why new queries are not answered; the budget has room for ``left`` of ``total`` queries, which last
    ``lasts_s`` seconds; ``chain`` is the fault that the last verification of the ledger found, or empty; ``num_open``
    is the number of charges to which a crash left no outcome.
    """
    # Without `chain`, which follows with the fault that was found.
    found = [Advice(level="now", words=_REMEDIES[reason]) for reason in reasons if reason != "chain"]
    if chain:
        words = (
            f"The ledger's chain of entries is not valid: {chain} New queries are refused. Stop the service and "
            "restore all of the ledger from one copy."
        )
        found.append(Advice(level="now", words=words))
    # `soon` and not `now`: stored replies are still given, and nothing restores a budget.
    if left <= 0:
        words = "The budget is used up. Stored replies are still given; new queries need a new run with new records."
        found.append(Advice(level="soon", words=words))
    elif left < _NEARLY_SPENT * total:
        words = (
            f"The budget is nearly spent: {counted(left, 'query', 'queries')} of {total:,} left. Inform the analysts."
        )
        found.append(Advice(level="soon", words=words))
    elif lasts_s is not None and lasts_s < DAY_S:
        words = f"At this pace the budget is used up in about {span(lasts_s)}. Find out who submits queries, and why."
        found.append(Advice(level="soon", words=words))
    if num_open:
        are = "reservation is" if num_open == 1 else "reservations are"
        words = f"{num_open:,} {are} open: charged and never answered, because of a crash. No action is needed."
        found.append(Advice(level="ok", words=words))
    if all(each.level == "ok" for each in found):
        found.insert(0, Advice(level="ok", words="Healthy: new queries are answered, and no action is needed."))
    return found


def span(seconds: float) -> str:
    """Return a duration in words, in its largest fitting unit, such as ``3 days``."""
    length, name = next((unit for unit in _UNITS_S if seconds >= unit[0]), _UNITS_S[-1])
    return counted(round(seconds / length), name)


Charge = tuple[str, int, Outcome | None, Asked]
_NUM_BINS = 20
_MOST_CALLERS = 20


def charge_json(number: int, charge: Charge, pool: PublicPool) -> dict[str, Any]:
    """Return one charge as the JSON of a :class:`aggregator.service.api.ChargedQuery`. ``charge`` is an item of what
    :meth:`Ledger.charged` returns."""
    _, group, outcome, asked = charge
    verdict, name = "open" if outcome is None else outcome.verdict, pool.group_names[group]
    return {"number": number, "group": name, "verdict": verdict, "caller": asked.asker.caller, "at_s": asked.at_s}


def costs_of(books: Books, num_charges: int, pool: PublicPool) -> dict[str, Any]:
    """Return the :class:`aggregator.service.api.Costs` of the first ``num_charges`` charges as JSON, for the operator.

    Call :meth:`Books.epsilon` before, which computes these costs.
    """
    ledger, (cost_Q, voted_Q) = books.ledger, books.priced(num_charges)
    # At one order, at which the costs of queries add up and compare.
    worst = float(accountant.rdp([ledger.terms.mechanism.worst_case(1)], [books.order])[0])
    found = compared_costs(cost_Q, np.full(len(cost_Q), worst), voted_Q)
    total, charges = float(cost_Q.sum()), []
    for number in found.dearest:
        (charge,) = ledger.charged(number, number + 1)
        shares = {"of_worst": float(found.of_worst_Q[number]), "of_total": float(cost_Q[number]) / total}
        votes = sorted(ledger.votes_QC[number].tolist(), reverse=True)[:2]
        charges.append(charge_json(number + 1, charge, pool) | {"votes": votes} | shares)
    return {
        "order": books.order,
        "words": found.words,
        "bins": np.histogram(found.of_worst_Q, bins=_NUM_BINS, range=(0, 1))[0].tolist() if found.varies else [],
        "dearest": charges,
    }


@dataclass(eq=False)
class States:
    """Computes what the pages of a service show about its present state, to analysts and to operators.

    ``latency`` returns quantiles of the duration of requests; ``last_backup`` returns when the ledger was last copied,
    None for never.
    """

    writer: Writer
    health: Readiness
    pool: PublicPool
    latency: Callable[[], Mapping[str, float | int | None]]
    last_backup: Callable[[], float | None]

    def __post_init__(self) -> None:
        self.streams = Streams()
        self._started_s, snapshot = time.time(), self.writer.snapshot
        self._history = History(num_groups=snapshot.terms.num_groups, num_classes=snapshot.terms.num_classes)
        self._history.begin(snapshot.books.ledger, snapshot.num_charges, now_s=self._started_s)

    async def watch(self, interval_s: float) -> None:
        """Add a point to the history of charges every ``interval_s`` seconds, without end."""
        while True:
            await asyncio.sleep(interval_s)
            snapshot = self.writer.snapshot
            self._history.look(snapshot.books.ledger, snapshot.num_charges, now_s=time.time())

    async def for_analyst(self) -> dict[str, Any]:
        """Return what an analyst's page shows, budget and health, as the JSON of
        :class:`aggregator.service.api.State`."""
        snapshot = self.writer.snapshot
        status = snapshot.budget_status()
        # The room of a budget that ends by votes reveals how they voted.
        left = None if status.kind == "data_dependent" else snapshot.room
        return {"budget": status.to_json(), "queries_left": left, "health": health_json(self.health.reasons())}

    async def for_operator(self) -> dict[str, Any]:
        """Return what an operator's page shows, such as health, advice, budget and private costs, as the JSON of
        :class:`aggregator.service.api.Overview`."""
        now_s, snapshot, history = time.time(), self.writer.snapshot, self._history
        ledger, num_charges, status = snapshot.books.ledger, snapshot.num_charges, snapshot.budget_status()
        history.look(ledger, num_charges, now_s=now_s)
        is_exact = status.kind != "data_dependent"
        lasts_s, ahead = forecast(history.points, left=snapshot.room, is_exact=is_exact, now_s=now_s)
        chain, reasons = self.writer.books.chain, self.health.reasons()
        advised = advice(
            reasons,
            left=snapshot.room,
            total=status.queries_submitted + snapshot.room,
            lasts_s=lasts_s,
            chain=chain["fault"],
            num_open=len(history.open),
        )
        # In this order: costs are those of the charges that the running price has priced.
        price = await asyncio.to_thread(snapshot.books.epsilon, num_charges)
        costs = await asyncio.to_thread(costs_of, snapshot.books, num_charges, self.pool)
        groups = zip(self.pool.group_names, history.by_group(), strict=True)
        spenders = sorted(ledger.charged_to.items(), key=lambda each: -each[1])[:_MOST_CALLERS]
        disk_free_bytes = None
        if isinstance(ledger.place, Path):  # the disk of a database is not visible from here
            with suppress(OSError):
                disk_free_bytes = shutil.disk_usage(ledger.place.parent).free
        return {
            "at_s": now_s,
            "started_s": self._started_s,
            "health": health_json(reasons),
            "advice": [each.model_dump() for each in advised],
            "forecast": ahead,
            "lasts_s": lasts_s,
            "budget": status.to_json(),
            "queries_left": snapshot.room if is_exact else None,
            "epsilon_data_dependent": strict(price),
            "costs": costs,
            "points": [point.model_dump() for point in history.points],
            "groups": [{"group": name, **counts} for name, counts in groups],
            "callers": [{"name": name or "the run itself", "queries": queries} for name, queries in spenders],
            "open_reservations": len(history.open),
            "latency": self.latency(),
            "disk_free_bytes": disk_free_bytes,
            "chain": chain,
            "last_backup_s": self.last_backup(),
        }


State = Callable[[], Awaitable[dict[str, Any]]]
# Few of the connections that a service accepts, as each stream holds one for minutes.
_MOST_STREAMS, _MOST_PER_CALLER, _FOR_OPERATORS = 64, 8, 8
# The life of a stream, the longest silence on it, and the pause between two looks at the state.
_LONGEST_S, _SIGN_OF_LIFE_S, _TICK_S = 600.0, 15.0, 0.25


@dataclass(eq=False)
class Latest:
    """A page's state that all callers share, computed at most once in ``max_age_s`` seconds. Use it from one event
    loop."""

    compute: State
    max_age_s: float
    _made_s: float = field(default=-math.inf, init=False)
    _state: dict[str, Any] = field(default_factory=dict, init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def __call__(self) -> dict[str, Any]:
        """Return the page's state; it is computed again if it is older than ``max_age_s``."""
        # Callers that find the state too old at the same time wait for one computation.
        async with self._lock:
            now_s = asyncio.get_running_loop().time()
            if now_s - self._made_s >= self.max_age_s:
                self._state, self._made_s = await self.compute(), now_s
            return self._state


@dataclass(eq=False)
class Streams:
    """The open event streams of a service, and their limits."""

    _open: Counter[str] = field(default_factory=Counter, init=False)

    def response(self, request: Request, state: State) -> StreamingResponse:
        """Return a response that streams ``state`` to the caller of ``request``. FaultError 503 if too many streams are
        open."""
        caller, most = request.scope["state"]["caller"], _MOST_STREAMS
        # Some streams are reserved for operators: analysts cannot lock them out of their page.
        if caller.role != "operator":
            most -= _FOR_OPERATORS
        if self._open.total() >= most or self._open[caller.name] >= _MOST_PER_CALLER:
            remedy = "Too many live views are open; close another one, or poll the state with GET /v1/state."
            raise FaultError(503, "events", f"{self._open.total()} open", remedy, {"Retry-After": "5"})
        # Counted before anything is awaited, so that simultaneous requests do not exceed the limit.
        self._open[caller.name] += 1
        return _Stream(self._events(request, state), lambda: self._open.subtract([caller.name]))

    async def _events(self, request: Request, state: State) -> AsyncIterator[str]:
        loop = asyncio.get_running_loop()
        began_s = said_s = loop.time()
        last = ""
        # Tasks cannot be cancelled from the thread that stops the service; every stream reads its flag within one tick.
        while not request.app.state.is_closing and loop.time() - began_s < _LONGEST_S:
            # Shared by all streams: a further listener causes no computation.
            text = json.dumps(await state(), separators=(",", ":"), allow_nan=False)
            # Right before it leaves: a token may be revoked while the state is computed.
            if not request.scope["state"]["is_admitted"]():
                return
            if text != last:
                last, said_s = text, loop.time()
                yield f"event: state\ndata: {text}\n\n"
            elif loop.time() - said_s > _SIGN_OF_LIFE_S:
                said_s = loop.time()
                # A comment of the event stream: proxies close a connection on which nothing is sent.
                yield ": still here\n\n"
            await asyncio.sleep(_TICK_S)


class _Stream(StreamingResponse):
    """A response that streams events; ``on_end`` is called when the stream ends, even if it never began."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        # nginx would collect events in a buffer before it forwards any.
        super().__init__(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Here rather than in the generator: if the client leaves before the first event, the generator never
            # starts.
            self._on_end()


_STYLES = ("service.css", "terms.css")


@cache
def page(*, needs_token: bool) -> tuple[str, dict[str, str]]:
    """Return the service's page and its HTTP headers; with ``needs_token`` the page first asks for a token."""
    script = _digest("service.js")
    policy = (
        f"default-src 'none'; script-src {script}; style-src {_digest(*_STYLES)}; connect-src 'self'; img-src data:; "
        # A user types a token here: no form may send it elsewhere, and no other site may frame the page.
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
    # The policy is in the page as well, in case the page is shown without its headers.
    inside = f"; script-src {script}; connect-src 'self'"
    return render("service.html", needs_token=needs_token, version=__version__, policy=inside), headers


def _digest(*names: str) -> str:
    """Return the digest of a script or style element that contains these files, as a content security policy names
    it."""
    # The template puts a line break before and behind them.
    text = "\n" + "".join((files("fairpate") / "templates" / name).read_text(encoding="utf-8") for name in names)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
