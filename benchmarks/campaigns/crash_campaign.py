"""Kill -9 the aggregator under load, again and again, and check after each time what must never happen.

    python benchmarks/campaigns/crash_campaign.py [--kills 200] [--seed 0] [--database] [--json]

With --database the ledger lies in a PostgreSQL server of its own, which is killed too, and services are paused, deposed
and continued. A service on loopback with a durable ledger, its anchor, and noise from the operating system answers
several clients that ask single queries and batches, repeats included. It is killed at random instants from outside,
while it starts as well, and at named points inside: before and after the reservation, between draw and commit, between
commit and answer. A witness file notes every draw before it is made. After every kill the ledger is read, and the
campaign ends with an error if

- a query ever had two different answers, or two outcomes,
- an answer that a client received is not in the ledger, with its charge,
- a query was drawn more often than it was charged,
- a copy of the ledger from which files were removed or cut short opens and lacks anything,
- the ledger as it was after the last kill opens beside the anchor of now, and lacks an answer that left since,
- a service that was deposed while it was paused answers a new query after it continues,
- the ledger does not verify, or the service does not answer again within the time limit.

The operating system survives a kill, so what is tested is the order of writes and not the disk's own guarantees.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
from local_postgres import Server

from aggregator import ledger_audit, postgres
from aggregator.client import AggregatorClient, QueryError
from aggregator.ledger import Charge, Ledger, LedgerTerms, back_end
from aggregator.mechanism import ConfidentGnmax
from aggregator.service.actor import Backend, ServiceSettings
from aggregator.service.api import Reply
from aggregator.session import AggregatorSession, PublicPool, Question
from aggregator.store import Address, FileAnchor, Head, Header, LedgerError, Row, ledger_files, rows_after
from fairpate.http_server import HttpServer
from fairpate.privacy.discrete_gaussian import OsEntropy
from fairpate.types import GateRule, IntArray, QueryBudget

NUM_TEACHERS, NUM_CLASSES, POOL_SIZE, NUM_CLIENTS = 60, 3, 20_000, 4
RESTART_LIMIT_S = 60.0
_SERVER, _DEPOSED = "the database, at a random instant", "after it was paused, deposed and continued"
POINTS = ("before the reservation", "after the reservation", "between draw and commit", "between commit and answer")
TERMS = LedgerTerms(
    mechanism=ConfidentGnmax(threshold=36, threshold_stddev_votes=6, noise_stddev_votes=4),
    gate=GateRule(max_disparity=0.1, min_count=5),
    budget=QueryBudget(kind="query_count", delta=1e-5, max_queries=10**7),
    num_teachers=NUM_TEACHERS,
    num_classes=NUM_CLASSES,
    num_groups=2,
    noise=OsEntropy.label,
    ensemble="table",
)
_PROCESSES = multiprocessing.get_context("forkserver")
# Read once, and not by every service that is killed.
_PROCESSES.set_forkserver_preload(
    ["aggregator.service.actor", "aggregator.ledger_audit", "aggregator.client", "aggregator.postgres"]
)


@dataclass(kw_only=True)
class Copy:
    """A whole ledger as it once was."""

    header: Header
    rows: list[Row]
    head: Head


class BrokenGuaranteeError(Exception):
    """What must never happen did."""


@dataclass(kw_only=True)
class Campaign:
    """What was seen so far: replies by key, and how each kill went."""

    folder: Path
    port: int
    server: Server | None = None
    heard: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    restarts_s: list[float] = field(default_factory=list)
    points: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    older: Copy | None = None
    made: bool = False

    @property
    def ledger(self) -> Address:
        """The ledger under attack."""
        return self.folder / "ledger" / "ledger.sqlite" if self.server is None else self.server.url("attacked")

    @property
    def anchor(self) -> Path | None:
        """Its anchor, once there is one."""
        path = self.folder / "anchor"
        return path if path.exists() else None

    @property
    def draws(self) -> Counter[str]:
        """How often each query was drawn, noted before the draw."""
        witness = self.folder / "witness"
        return Counter(witness.read_text().split()) if witness.exists() else Counter()


def main() -> None:
    """Run the campaign and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the instants and the queries")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--database", action="store_true", help="a ledger in PostgreSQL instead of a file")
    arguments = parser.parse_args()
    told = told_after(arguments.kills, seed=arguments.seed, in_database=arguments.database)
    print(json.dumps(told) if arguments.json else "\n".join(f"{name:32} {value}" for name, value in told.items()))


def told_after(kills: int, *, seed: int, in_database: bool) -> dict[str, Any]:
    """Run a campaign in a folder of its own, and return its summary."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        Path(folder).chmod(0o755)  # the server is another user
        server = stack.enter_context(Server(Path(folder) / "server")) if in_database else None
        campaign = Campaign(folder=Path(folder), port=free_port(), server=server)
        run(campaign, kills=kills, generator=random.Random(seed))
        return summary(campaign)


def run(campaign: Campaign, *, kills: int, generator: random.Random) -> None:
    """Start, load, kill and check, ``kills`` times; then once without a kill."""
    points = ["a random instant", "a random instant", "while it starts", *POINTS]
    if campaign.server is not None:
        points += [_SERVER, _SERVER, _DEPOSED, _DEPOSED]
    for number in range(kills):
        point = generator.choice(points if campaign.made else points[:1])
        campaign.points[point] += 1
        _one_life(campaign, point, generator.randrange(2**32))
        check(campaign)
        check_losses(campaign, generator)
        check_rollback(campaign)
        if number % 25 == 24:
            print(f"{number + 1} kills, {len(campaign.heard)} answers heard", flush=True)
    _one_life(campaign, "", generator.randrange(2**32))
    check(campaign)


def _one_life(campaign: Campaign, point: str, seed: int) -> None:
    """One process of the service, from its start to its end, under load."""
    generator = random.Random(seed)
    die_at = (POINTS.index(point), generator.randrange(1, 40)) if point in POINTS else None
    started_s, server = time.monotonic(), _start(campaign, campaign.port, die_at)
    if point == "while it starts":
        time.sleep(generator.uniform(0, 0.3))
    else:
        _wait_until_healthy(campaign, server, started_s)
        stop = threading.Event()
        clients = [
            threading.Thread(target=ask_on, args=(campaign, generator.randrange(2**32), stop))
            for _ in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.start()
        if die_at is None:
            time.sleep(generator.uniform(0.01, 0.5))
            _disturb(campaign, point, server, generator.randrange(2**32))
        else:
            server.join(timeout=RESTART_LIMIT_S)
        stop.set()
        if not point:
            for client in clients:
                client.join()
    if server.is_alive():
        os.kill(server.pid, signal.SIGKILL)
    server.join()
    if point and point != "while it starts":
        for client in clients:
            client.join()


def _start(campaign: Campaign, port: int, die_at: tuple[int, int] | None = None, *, epoch_alone: bool = False) -> Any:
    if isinstance(campaign.ledger, Path):
        campaign.ledger.parent.mkdir(exist_ok=True)
    arguments = (campaign.folder, campaign.ledger, campaign.anchor, port, die_at, not campaign.heard, epoch_alone)
    process: Any = _PROCESSES.Process(target=serve, args=arguments, daemon=True)
    process.start()
    return process


def _disturb(campaign: Campaign, point: str, server: Any, seed: int) -> None:
    """What happens besides to the service under load, before it is killed itself."""
    if point == _DEPOSED:
        _depose(campaign, server, seed)
    elif point == _SERVER:
        assert campaign.server is not None
        campaign.server.kill()
        campaign.server.start()


def _depose(campaign: Campaign, paused: Any, seed: int) -> None:
    """Pause the service, let another take over and answer, and hear what the first says when it continues."""
    os.kill(paused.pid, signal.SIGSTOP)
    started_s, port = time.monotonic(), free_port()
    other = _start(campaign, port, epoch_alone=True)
    try:
        try:
            _wait_until_healthy(campaign, other, started_s, port=port)
        except BrokenGuaranteeError:
            if other.is_alive():
                raise
            # Paused with the anchor's lock in its hand: the next writer waits for it for seconds, and then refuses.
            campaign.losses["refused to the next, while the paused writer held the anchor"] += 1
            os.kill(paused.pid, signal.SIGCONT)
            return
        stop = threading.Event()
        client = threading.Thread(target=ask_on, args=(campaign, seed, stop), kwargs={"port": port})
        client.start()
        os.kill(paused.pid, signal.SIGCONT)
        time.sleep(0.2)
        fresh = random.Random(seed).sample(range(POOL_SIZE), 5)
        with AggregatorClient(f"http://127.0.0.1:{campaign.port}", attempts=1) as deposed:
            for number in fresh:
                with contextlib.suppress(QueryError):
                    (reply,) = deposed.ask([number]).replies
                    hear(campaign, reply)
                    campaign.losses["told by a deposed service, from what it had stored"] += 1
        stop.set()
        client.join()
    finally:
        other.kill()
        other.join()


def _wait_until_healthy(campaign: Campaign, server: Any, started_s: float, *, port: int | None = None) -> None:
    with AggregatorClient(f"http://127.0.0.1:{port or campaign.port}", attempts=1) as client:
        while True:
            try:
                client.budget()
                break
            except QueryError:
                if time.monotonic() > started_s + RESTART_LIMIT_S or not server.is_alive():
                    raise BrokenGuaranteeError("The service did not come back.") from None
                time.sleep(0.01)
    campaign.restarts_s.append(time.monotonic() - started_s)


def ask_on(campaign: Campaign, seed: int, stop: threading.Event, *, port: int | None = None) -> None:
    """A client: single queries and batches, new and repeated, until the service is gone."""
    generator = random.Random(seed)
    with AggregatorClient(f"http://127.0.0.1:{port or campaign.port}", attempts=1) as client:
        while not stop.is_set():
            size = generator.choice([1, 1, 1, 8, 64])
            numbers = [min(int(generator.expovariate(1 / 4000)), POOL_SIZE - 1) for _ in range(size)]
            try:
                replies = client.ask(numbers).replies
            except QueryError:
                return
            for reply in replies:
                hear(campaign, reply)


def hear(campaign: Campaign, reply: Reply) -> None:
    """Note an answer; the same query never has another."""
    said = (reply.status, reply.label)
    if campaign.heard.setdefault(reply.key, said) != said:
        campaign.broken.append(f"{reply.key} had two answers")


def serve(
    folder: Path,
    place: Address,
    anchor: Path | None,
    port: int,
    die_at: tuple[int, int] | None,
    may_create: bool,
    epoch_alone: bool,
) -> None:
    """The service, in a process that is going to be killed; ``epoch_alone``: the connection of the other is left."""
    if epoch_alone:
        postgres._TAKE_OVER_S = 0.1
        postgres._END_HOLDER = "SELECT %s::text"
    _arrange(folder / "witness", die_at)
    ledger = Ledger(place, TERMS, create=may_create, anchor=anchor, take_over=True)
    backend = Backend(
        ledger=ledger, session=AggregatorSession(ledger, source=OsEntropy()), pool=_pool(), count_votes=_table_votes
    )
    server = HttpServer(backend.app, ServiceSettings(port=port, answer_step_s=0.0))
    while server.is_alive():
        time.sleep(1)


def _arrange(witness: Path, die_at: tuple[int, int] | None) -> None:
    """Note every draw before it is made, and die at the chosen time that the chosen point is passed."""
    file = os.open(witness, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    passed: Counter[int] = Counter()

    def pass_point(point: int) -> None:
        passed[point] += 1
        if die_at == (point, passed[point]):
            os.kill(os.getpid(), signal.SIGKILL)

    def between(before: int, work: Callable[..., Any], after: int | None = None) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            pass_point(before)
            result = work(*args, **kwargs)
            if after is not None:
                pass_point(after)
            return result

        return wrapped

    draw = ConfidentGnmax.answer

    def witnessed(*args: Any, **kwargs: Any) -> Any:
        os.write(file, "".join(key + "\n" for key in kwargs["keys"]).encode())
        return draw(*args, **kwargs)

    Ledger.reserve = between(0, Ledger.reserve, after=1)  # type: ignore[method-assign]
    Ledger.commit = between(2, Ledger.commit, after=3)  # type: ignore[method-assign]
    ConfidentGnmax.answer = witnessed  # type: ignore[method-assign]


def _pool() -> PublicPool:
    features = np.arange(POOL_SIZE, dtype=np.float32).reshape(-1, 1)
    ids = [str(number) for number in range(POOL_SIZE)]
    return PublicPool(
        features=features,
        groups_N=np.arange(POOL_SIZE) % 2,
        record_ids=ids,
        group_names=("red", "green"),
        label_names=("zero", "one", "two"),
    )


def _table_votes(questions: Sequence[Question]) -> IntArray:
    rows = []
    for question in questions:
        generator = np.random.default_rng(int(question.features[0]))
        rows.append(generator.multinomial(NUM_TEACHERS, generator.dirichlet([0.4] * NUM_CLASSES)))
    return np.array(rows, dtype=np.int64)


def check(campaign: Campaign) -> None:
    """Read the ledger as the kill left it, and hold it against what clients heard and the witness saw."""
    if campaign.broken:
        raise BrokenGuaranteeError("; ".join(campaign.broken))
    try:
        rows = ledger_audit.rows(campaign.ledger, anchor=campaign.anchor)
    except LedgerError as error:
        if campaign.heard or campaign.made:
            raise BrokenGuaranteeError(f"The ledger is gone or damaged: {error}") from error
        return
    campaign.made = True
    require_kept(campaign, rows)


def require_kept(campaign: Campaign, rows: Sequence[Charge]) -> None:
    """Every answer that was heard and every draw is there; an entry that was not noted yet was neither."""
    require_heard(campaign, rows)
    charged = Counter(row.key for row in rows)
    for key, times in campaign.draws.items():
        if times > charged[key]:
            raise BrokenGuaranteeError(f"{key} was drawn {times} times and charged {charged[key]} times")


def require_heard(campaign: Campaign, rows: Sequence[Charge]) -> None:
    """Every answer that was heard is there, and no other."""
    settled = _settled(rows)
    for key, said in campaign.heard.items():
        if settled.get(key) != said:
            raise BrokenGuaranteeError(f"{key} was answered {said}, and the ledger holds {settled.get(key)}")


def check_losses(campaign: Campaign, generator: random.Random) -> None:
    """Take files from a copy of what the kill left: it is refused, or it still holds every charge and every answer."""
    if not isinstance(campaign.ledger, Path) or not campaign.ledger.exists():
        return
    copy = campaign.folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for file in ledger_files(campaign.ledger):
        shutil.copy(file, copy)
    lost = generator.sample(sorted(copy.iterdir()), generator.randint(1, 2))
    for file in lost:
        if generator.random() < 0.5:
            file.unlink()
        else:
            os.truncate(file, generator.randrange(file.stat().st_size + 1))
    try:
        with Ledger(copy / campaign.ledger.name, TERMS, create=False):
            pass
    except LedgerError:
        campaign.losses["files taken, and refused"] += 1
        return
    campaign.losses["files taken, and nothing lost"] += 1
    try:
        require_kept(campaign, ledger_audit.rows(copy / campaign.ledger.name))
    except BrokenGuaranteeError as error:
        raise BrokenGuaranteeError(f"Without {[file.name for file in lost]} the ledger opens: {error}") from error


def check_rollback(campaign: Campaign) -> None:
    """Open the ledger of the last time beside the anchor of now: refused, unless nothing has left since."""
    if campaign.anchor is None:
        with contextlib.suppress(LedgerError):
            campaign.older = _copy(campaign.ledger)
            FileAnchor(campaign.folder / "anchor").make(campaign.older.head)
        return
    older = campaign.older
    campaign.older = _copy(campaign.ledger)
    assert older is not None
    place: Address = campaign.folder / f"older-{sum(campaign.points.values())}.sqlite"
    if campaign.server is not None:
        place = campaign.server.url(f"older-{sum(campaign.points.values())}")
    back_end(place).write(place, older.header, older.rows)
    try:
        with Ledger(place, TERMS, create=False, anchor=campaign.anchor):
            campaign.losses["rolled back, and nothing was lost"] += 1
        require_heard(campaign, ledger_audit.rows(place))  # a draw whose answer never left is not the anchor's
    except LedgerError:
        campaign.losses["rolled back, and refused"] += 1
    finally:
        _forget(place)


def _forget(place: Address) -> None:
    if isinstance(place, Path):
        for file in ledger_files(place):
            file.unlink()
        return
    url, _, name = place.partition("#")
    with psycopg.connect(url) as connection:
        connection.execute("DELETE FROM fairpate_entries WHERE ledger = %s", (name,))
        connection.execute("DELETE FROM fairpate_ledgers WHERE name = %s", (name,))


def _copy(place: Address) -> Copy:
    with contextlib.closing(back_end(place).reader(place)) as reader:
        rows = list(rows_after(reader))
        return Copy(
            header=reader.header,
            rows=rows,
            head=Head(rows[-1][0], rows[-1][3]) if rows else reader.header.start,
        )


def _settled(rows: Sequence[Charge]) -> dict[str, tuple[str, int | None]]:
    settled: dict[str, tuple[str, int | None]] = {}
    for row in rows:
        if row.outcome is not None:
            if row.key in settled:
                raise BrokenGuaranteeError(f"{row.key} has two outcomes")
            settled[row.key] = ("answered" if row.outcome.verdict == "answer" else "refused", row.outcome.label)
    return settled


def summary(campaign: Campaign) -> dict[str, Any]:
    """The campaign in numbers."""
    rows = ledger_audit.rows(campaign.ledger)
    return {
        "kills": sum(campaign.points.values()),
        **{f"killed at {point}": count for point, count in sorted(campaign.points.items())},
        "answers heard": len(campaign.heard),
        "reservations": len(rows),
        "left open, and charged": sum(row.outcome is None for row in rows),
        "restart, median seconds": round(statistics.median(campaign.restarts_s), 3),
        "restart, longest seconds": round(max(campaign.restarts_s), 3),
        **dict(sorted(campaign.losses.items())),
        "guarantees broken": len(campaign.broken),
    }


def free_port() -> int:
    """A port that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
