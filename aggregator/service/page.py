"""The page at ``/``: its HTML, live states, and the operator's overview of charges, forecast and advice.

The page is one file with its style and script inside, which a browser knows by their digests, so that nothing else that
might get into the page runs; nothing is fetched but this service's own routes. It is for anybody and holds no value of
the service: it asks for them with the token that is typed into it. The analyst's part is made of public numbers alone;
the operator's holds what depends on votes and is not to be published.

Live states are server-sent events (:class:`Streams`). The state is computed at most once a second for everybody, so
that the time of an event says nothing about when anything happened within that second. Streams are few, because each
holds a connection; they end with the service, with the caller's token, and after ten minutes.

Shapes: G groups, C classes.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from aggregator.chain import Place
from aggregator.ledger import NOBODY, Ledger
from aggregator.mechanism import Outcome
from aggregator.service import metrics, wire
from aggregator.service.auth import LiveTokens
from aggregator.service.metrics import ServiceMetrics
from aggregator.service.routes import budget_json
from aggregator.service.wire import Facts, PublicPool, about_json
from aggregator.service.writer import Books, Readiness, Verification, Writer
from fairpate import __version__
from fairpate.http_requests import FaultError, Faults
from fairpate.http_server import json_response
from fairpate.pages import environment
from fairpate.privacy import accountant
from fairpate.types import strict
from fairpate.words import cost_words, dearest, shares_of_worst, votes_matter

_MOST_POINTS = 512
_FIRST_SPACING_S = 1.0


class Point(NamedTuple):
    """So many charges were there at ``at_s``; of them answered and refused, by group."""

    at_s: float
    charges: int
    answered_G: tuple[int, ...]
    refused_G: tuple[int, ...]


_Kind = tuple[int, str, int | None]
"""Group, verdict and label."""


class History:
    """Counts of one ledger's charges; call :meth:`look` now and then, from one thread at a time."""

    def __init__(self, *, num_groups: int, num_classes: int) -> None:
        self.points: list[Point] = []
        self._num_groups, self._num_classes = num_groups, num_classes
        self._counts: Counter[_Kind] = Counter()
        self._open: list[int] = []
        self._seen, self._spacing_s = 0, _FIRST_SPACING_S

    def begin(self, ledger: Ledger, num_charges: int, *, now_s: float) -> None:
        """Take in what was charged before, at the times that the ledger knows.

        What the run asked for itself stands at the beginning, and is no pace of its callers.
        """
        known = [asked for asked in ledger.asked if asked.at_s and asked.asker != NOBODY and asked.first < num_charges]
        for asked in known[:: max(1, len(known) // (_MOST_POINTS // 2))]:
            self.look(ledger, asked.first, now_s=asked.at_s)
        self.look(ledger, num_charges, now_s=now_s)

    def look(self, ledger: Ledger, num_charges: int, *, now_s: float) -> None:
        """Take in the first ``num_charges`` charges as they are now."""
        rows = [(number, ledger.charged(number, number + 1)[0]) for number in self._open]
        # Open ones were counted as such; those among them that have an outcome now count as that.
        self._counts.subtract((group, "open", None) for _, (_, group, _) in rows)
        rows += enumerate(ledger.charged(self._seen, num_charges), self._seen)
        self._counts.update(_kind(group, outcome) for _, (_, group, outcome) in rows)
        self._open = [number for number, (_, _, outcome) in rows if outcome is None]
        self._seen = max(self._seen, num_charges)
        self._note(now_s)

    @property
    def num_open(self) -> int:
        """Reservations without an outcome: charged, and nothing was released."""
        return len(self._open)

    def by_group(self) -> list[dict[str, int]]:
        """Of each group how often which verdict came, open reservations too."""
        found = [
            dict.fromkeys(("answer", "confidence", "fairness", "free", "open"), 0) for _ in range(self._num_groups)
        ]
        for (group, verdict, _), count in self._counts.items():
            found[group][verdict] += count
        return found

    def by_class(self) -> list[list[int]]:
        """Answers (G, C) of each class to each group."""
        found = [[0] * self._num_classes for _ in range(self._num_groups)]
        for (group, _, label), count in self._counts.items():
            if label is not None:
                found[group][label] += count
        return found

    def _note(self, now_s: float) -> None:
        now_s = max(now_s, self.points[-1].at_s if self.points else now_s)  # a clock may be set back
        groups = self.by_group()
        answered_G = tuple(counts["answer"] for counts in groups)
        refused_G = tuple(sum(counts[kind] for kind in ("confidence", "fairness", "free")) for counts in groups)
        point = Point(now_s, self._seen, answered_G, refused_G)
        if len(self.points) > 1 and now_s - self.points[-2].at_s < self._spacing_s:
            self.points[-1] = point  # the last point is always the present
            return
        self.points.append(point)
        if len(self.points) > _MOST_POINTS:
            self.points = [*self.points[:-1:2], self.points[-1]]
            self._spacing_s *= 2


def _kind(group: int, outcome: Outcome | None) -> _Kind:
    return (group, "open", None) if outcome is None else (group, outcome.verdict, outcome.label)


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


_NUM_BINS = 20


def costs_of(books: Books, num_charges: int, pool: PublicPool) -> dict[str, Any]:
    """A :class:`aggregator.service.wire.Costs` of the first charges; the running price has priced them."""
    ledger, cost_Q = books.ledger, books.price.costs(num_charges)
    worst = float(accountant.rdp([ledger.terms.mechanism.worst_case(1)], [books.price.order])[0])
    of_worst_Q = shares_of_worst(cost_Q, np.full(len(cost_Q), worst))
    varies = votes_matter(of_worst_Q, books.price.voted(num_charges))
    total = float(cost_Q.sum())
    return {
        "order": books.price.order,
        "words": cost_words(cost_Q, of_worst_Q, varies=varies),
        "bins": np.histogram(of_worst_Q, bins=_NUM_BINS, range=(0, 1))[0].tolist() if varies else [],
        "dearest": [
            _charge(ledger, pool, number, of_worst=float(of_worst_Q[number]), of_total=float(cost_Q[number]) / total)
            for number in (dearest(cost_Q) if varies else ())
        ],
    }


def _charge(ledger: Ledger, pool: PublicPool, number: int, *, of_worst: float, of_total: float) -> dict[str, Any]:
    (_, group, found), asked = ledger.charged(number, number + 1)[0], ledger.asked_for(number)
    most, second, *_ = sorted(ledger.votes_QC[number].tolist(), reverse=True)
    return {
        "number": number + 1,
        "group": pool.group_names[group],
        "verdict": "open" if found is None else found.verdict,
        "votes": [most, second],
        "of_worst": of_worst,
        "of_total": of_total,
        "caller": asked.asker.caller,
        "at_s": asked.at_s,
    }


_MOST_CALLERS = 20


class Overview:
    """The states of one service; ``last_backup`` tells when its ledger was last copied, None: never."""

    def __init__(
        self,
        writer: Writer,
        health: Readiness,
        verification: Verification,
        pool: PublicPool,
        counters: ServiceMetrics,
        *,
        last_backup: Callable[[], float | None],
    ) -> None:
        self._writer, self._health, self._pool, self._counters = writer, health, pool, counters
        self._verification, self._last_backup = verification, last_backup
        self._started_s = time.time()
        terms = writer.snapshot.terms
        self._history = History(num_groups=terms.num_groups, num_classes=terms.num_classes)
        snapshot = writer.snapshot
        self._history.begin(snapshot.books.ledger, snapshot.num_charges, now_s=self._started_s)

    async def watch(self, interval_s: float) -> None:
        """Note again and again what was charged, so that there is a history."""
        while True:
            await asyncio.sleep(interval_s)
            self._note()

    async def for_analyst(self) -> dict[str, Any]:
        """A :class:`aggregator.service.wire.State`."""
        snapshot = self._writer.snapshot
        status = snapshot.budget_status()
        # What a budget that votes end has room for says how they voted.
        left = None if status.kind == "data_dependent" else snapshot.room
        return {"budget": budget_json(status), "queries_left": left, "health": self._health.to_json()}

    async def for_operator(self) -> dict[str, Any]:
        """A :class:`aggregator.service.wire.Overview`."""
        self._note()
        now_s, snapshot, history = time.time(), self._writer.snapshot, self._history
        status = snapshot.budget_status()
        is_exact = status.kind != "data_dependent"
        ahead = forecast(history.points, left=snapshot.room, is_exact=is_exact, now_s=now_s)
        reasons = self._health.reasons()
        told = advice(
            reasons,
            left=snapshot.room,
            total=status.queries_submitted + snapshot.room,
            lasts_s=ahead.lasts_s,
            chain=self._verification.fault,
            num_open=history.num_open,
        )
        # In this order: costs are those of the charges that the price has just priced.
        price = await asyncio.to_thread(snapshot.books.price.epsilon, snapshot.books.ledger, snapshot.num_charges)
        costs = await asyncio.to_thread(costs_of, snapshot.books, snapshot.num_charges, self._pool)
        return {
            "at_s": now_s,
            "started_s": self._started_s,
            "health": self._health.to_json(),
            "advice": [dataclasses.asdict(each) for each in told],
            "forecast": ahead.words,
            "lasts_s": ahead.lasts_s,
            "budget": budget_json(status),
            "queries_left": snapshot.room if is_exact else None,
            "epsilon_data_dependent": strict(price),
            "costs": costs,
            "points": [_point(point) for point in history.points],
            "groups": self._groups(),
            "callers": _callers(snapshot.books.ledger.charged_by_caller),
            "open_reservations": history.num_open,
            "latency": self._counters.latency(),
            "disk_free_bytes": _free_bytes(snapshot.books.ledger.place),
            "chain": self._verification.chain,
            "last_backup_s": self._last_backup(),
        }

    def _note(self) -> None:
        snapshot = self._writer.snapshot
        self._history.look(snapshot.books.ledger, snapshot.num_charges, now_s=time.time())

    def _groups(self) -> list[dict[str, Any]]:
        columns = zip(self._pool.group_names, self._history.by_group(), self._history.by_class(), strict=True)
        return [{"group": name, **counts, "answers": answers} for name, counts, answers in columns]


def _callers(charged: Mapping[str, int]) -> list[dict[str, Any]]:
    """Those who spent most, the most first."""
    most = sorted(charged.items(), key=lambda each: -each[1])[:_MOST_CALLERS]
    return [{"name": name or "the run itself", "queries": queries} for name, queries in most]


def _point(point: Any) -> dict[str, Any]:
    return {
        "at_s": point.at_s,
        "charges": point.charges,
        "answered": list(point.answered_G),
        "refused": list(point.refused_G),
    }


def _free_bytes(place: Place) -> int | None:
    """On the disk of a ledger's file; None where that is not seen from here."""
    if not isinstance(place, Path):
        return None
    try:
        disk = os.statvfs(place.parent)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize


State = Callable[[], Awaitable[dict[str, Any]]]
_MOST_STREAMS, _MOST_OF_ONE, _FOR_OPERATORS = 64, 8, 8
_LONGEST_S, _SIGN_OF_LIFE_S, _TICK_S = 600.0, 15.0, 0.25
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Latest:
    """A state that is computed at most once in ``max_age_s``, for all callers together. For one event loop."""

    def __init__(self, compute: State, *, max_age_s: float) -> None:
        self._compute, self._max_age_s = compute, max_age_s
        self._made_s, self._state = -max_age_s, dict[str, Any]()
        self._lock = asyncio.Lock()

    async def __call__(self) -> dict[str, Any]:
        """The state, at most that old."""
        async with self._lock:
            now_s = asyncio.get_running_loop().time()
            if now_s - self._made_s >= self._max_age_s:
                self._state, self._made_s = await self._compute(), now_s
            return self._state


class Streams:
    """All event streams of a service."""

    def __init__(self) -> None:
        self._is_closing = False
        self._open: Counter[str] = Counter()

    def close(self) -> None:
        """End all of them; from any thread."""
        self._is_closing = True

    def response(self, request: Request, state: State) -> StreamingResponse:
        """Events of ``state`` for the caller of ``request``. FaultError 503 where too many streams are open."""
        caller, most = request.scope["state"]["caller"], _MOST_STREAMS
        if caller.role != "operator":
            most -= _FOR_OPERATORS
        if self._open.total() >= most or self._open[caller.name] >= _MOST_OF_ONE:
            remedy = "Too many live views; ask for the state itself again and again, or close another one."
            raise FaultError(503, "events", f"{self._open.total()} open", remedy, {"Retry-After": "5"})
        # Its place is taken before anything is awaited: many at once are no more streams than one by one.
        self._open[caller.name] += 1
        events = self._events(state, request.scope["state"]["is_admitted"])
        return _Stream(events, lambda: self._give_back(caller.name))

    def _give_back(self, caller: str) -> None:
        self._open[caller] -= 1

    async def _events(self, state: State, is_admitted: Callable[[], bool]) -> AsyncIterator[str]:
        loop = asyncio.get_running_loop()
        began_s = said_s = loop.time()
        last = ""
        while not self._is_closing and loop.time() - began_s < _LONGEST_S:
            # Asked for each time, and the same for all: a listener costs no computation of its own.
            text = json.dumps(await state(), separators=(",", ":"), allow_nan=False)
            # Right before it leaves: a token may be revoked while the state is computed.
            if not is_admitted():
                return
            if text != last:
                last, said_s = text, loop.time()
                yield f"event: state\ndata: {text}\n\n"
            elif loop.time() - said_s > _SIGN_OF_LIFE_S:
                said_s = loop.time()
                yield ": still here\n\n"
            await asyncio.sleep(_TICK_S)


class _Stream(StreamingResponse):
    """Events, and what is done when they end or never begin."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


_PAGES = environment()
_FILES = files("fairpate") / "templates"
_STYLES = ("service.css", "terms.css")


def page(*, needs_token: bool) -> str:
    """The page; ``needs_token``: whether it begins by asking for one."""
    policy = f"; script-src {_digest('service.js')}; connect-src 'self'"
    return _PAGES.get_template("service.html").render(needs_token=needs_token, version=__version__, policy=policy)


@cache
def page_headers() -> dict[str, str]:
    """Headers of the page."""
    policy = (
        "default-src 'none'",
        f"script-src {_digest('service.js')}",
        f"style-src {_digest(*_STYLES)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return {
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


@cache
def _digest(*names: str) -> str:
    """Of the element that holds the files: a line break before and behind them, as the template has them."""
    text = "\n" + "".join((_FILES / name).read_text(encoding="utf-8") for name in names)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_ANALYSTS_AGE_S, _OPERATORS_AGE_S = 1.0, 2.0
_EVENTS = {200: {"content": {"text/event-stream": {}}}, 503: {"model": Faults}}


def add_page_routes(
    app: FastAPI, facts: Facts, pool: PublicPool, writer: Writer, overview: Overview, *, tokens: LiveTokens
) -> Streams:
    """Add the routes to ``app``; the streams are to be closed before the server waits for its requests."""
    streams = Streams()
    state = Latest(overview.for_analyst, max_age_s=_ANALYSTS_AGE_S)

    @app.get("/", include_in_schema=False)
    async def front() -> Response:
        return Response(page(needs_token=tokens.needs_token), media_type="text/html", headers=page_headers())

    @app.get("/v1/about", response_model=wire.About)
    async def about(request: Request) -> Response:
        """What this service is about, in words, how a record is written down, and whom it takes you for."""
        caller = request.scope["state"]["caller"]
        return json_response(about_json(facts, pool, writer.snapshot.terms, caller))

    @app.get("/v1/state", response_model=wire.State)
    async def now() -> Response:
        """Budget and health, as the events tell them."""
        return json_response(await state())

    @app.get("/v1/events", response_class=Response, responses=_EVENTS)  # type: ignore[arg-type]
    async def events(request: Request) -> Response:
        """Server-sent events: a `State` each, whenever it has changed."""
        return streams.response(request, state)

    return streams


def add_overview_routes(
    app: FastAPI, writer: Writer, overview: Overview, counters: metrics.ServiceMetrics, streams: Streams
) -> None:
    """Add the operator's routes to ``app``."""
    latest = Latest(overview.for_operator, max_age_s=_OPERATORS_AGE_S)

    @app.get("/v1/operator/overview", response_model=wire.Overview)
    async def now() -> Response:
        """Health, what to do, budget with a forecast, outcomes over time by group and class. Private."""
        return json_response(await latest())

    @app.get("/v1/operator/events", response_class=Response, responses=_EVENTS)  # type: ignore[arg-type]
    async def events(request: Request) -> Response:
        """Server-sent events: an `Overview` each. Private."""
        return streams.response(request, latest)

    @app.get("/v1/operator/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def prometheus() -> Response:
        """Metrics for Prometheus with latencies and outcomes. Private."""
        text = counters.render_for_operator(writer.snapshot.budget_status(), await latest())
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})
