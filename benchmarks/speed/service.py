"""Load of the aggregator over HTTP by wrk, with both ledgers, as ratios of what was measured in one run.

    apt-get install wrk
    python benchmarks/speed/service.py [--rounds 9] [--seconds 3] [--soak 600] [--json FILE]
    python benchmarks/speed/service.py --verification 4000

Two services, one with its ledger in a SQLite file and one in PostgreSQL, and a bare FastAPI handler of the same shape
(body read and validated by the same types, a constant reply), each in a process of its own on loopback. In every round
wrk sends each kind of request to each of them in turn, and the disk does appends with fdatasync; a ratio is the median
over rounds of ratios within one, so that a machine that slows down slows all of them; where others use the machine,
the service's own processor time for a query says more. After a turn of new queries the
ledger must have charged as many as were answered, and no more than were sent.

``--soak`` then sends a mixture (stored answers alone and 256 together, reads, two new queries in a hundred) from 64
clients for so many seconds to each service, and notes its memory.

``--verification`` asks so many new queries, one at a time and in turn, of two services: one verifies its ledger round
after round, the other not at all. It prints p50 and p99 of both and their ratios.

Votes are a table, so that nothing but service, mechanism and ledger is measured; replies wait for no step.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from ledger import NUM_CLASSES, NUM_TEACHERS, TERMS

from aggregator.ledger import Ledger
from aggregator.mechanism import Outcome
from aggregator.service.actor import Backend, ServiceSettings
from aggregator.service.auth import read_tokens
from aggregator.session import AggregatorSession, PublicPool, Question
from aggregator.store import Address
from fairpate.http_server import HttpServer
from fairpate.privacy.discrete_gaussian import OsEntropy
from fairpate.types import IntArray

sys.path.append(str(Path(__file__).parents[1] / "campaigns"))
from local_postgres import Server

POOL_SIZE, NUM_PROFILES, BATCH, CLIENTS = 8192, 4096, 256, 64
TOKENS = {"FAIRPATE_ANALYST_TOKEN": "a" * 32, "FAIRPATE_OPERATOR_TOKEN": "o" * 32}
_HEADERS = {"Authorization": f"Bearer {TOKENS['FAIRPATE_ANALYST_TOKEN']}"}
_SCRIPT = Path(__file__).with_name("load.lua")
_START_LIMIT_S, _SAMPLE_EVERY_S, _NEVER_S = 60.0, 5.0, 1e6
_FILLED = 2000


@dataclass(frozen=True, kw_only=True)
class Load:
    """One kind of request, from so many clients at the same time."""

    kind: str
    queries: int = 1
    clients: int = 1

    def __str__(self) -> str:
        return f"{self.kind}, {self.queries} in a request, {self.clients} clients"


LOADS = tuple(
    Load(kind=kind, queries=queries, clients=clients)
    for kind in ("new", "stored")
    for queries, clients in ((1, 1), (1, CLIENTS), (BATCH, 1))
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A process that is under load."""

    name: str
    port: int
    process: int

    def get(self, path: str) -> Any:
        """What it answers."""
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", headers=_HEADERS, timeout=60).raise_for_status().json()

    def charged(self) -> int:
        """How many queries its ledger holds."""
        return int(self.get("/v1/budget")["queries_submitted"])

    def memory_mb(self) -> float:
        """Memory that it holds now, in 10^6 bytes."""
        status = Path(f"/proc/{self.process}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024 / 1e6

    def processor_s(self) -> float:
        """Processor time that it has used."""
        times = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def open_backend(place: Address) -> Backend:
    """A service's backend; new records are numbers, whose votes are a row of a table."""
    generator = np.random.default_rng(0)
    votes = generator.multinomial(NUM_TEACHERS, generator.dirichlet([0.3] * NUM_CLASSES, NUM_PROFILES))
    pool = PublicPool(
        features=-1 - np.arange(POOL_SIZE, dtype=np.float32).reshape(-1, 1),  # no new record is one of them
        groups_N=generator.integers(0, 2, POOL_SIZE),
        record_ids=tuple(map(str, range(POOL_SIZE))),
        group_names=("red", "green"),
        label_names=tuple(map(str, range(NUM_CLASSES))),
    )

    def count_votes(questions: Sequence[Question]) -> IntArray:
        return votes[[int(question.features[0]) % NUM_PROFILES for question in questions]]

    ledger = Ledger(place, TERMS)
    session = AggregatorSession(ledger, source=OsEntropy())
    return Backend(ledger=ledger, session=session, pool=pool, count_votes=count_votes)


def serve(place: Address, port: int, answer_step_s: float, verification_interval_s: float = 60.0) -> None:
    """The process of a service."""
    settings = ServiceSettings(
        port=port,
        tokens=read_tokens(TOKENS),
        answer_step_s=answer_step_s,
        verification_interval_s=verification_interval_s,
    )
    server = HttpServer(open_backend(place).app, settings)
    while server.is_alive():
        time.sleep(1)


def serve_bare(folder: Path, port: int) -> None:
    """The process of the bare handler."""
    import uvicorn
    from fastapi import FastAPI

    from aggregator.service.api import Replies, Reply, bodies_for

    app = FastAPI()

    async def bare(body: Any) -> Replies:
        row = Reply(key="0" * 64, status="answered", label=3)
        return Replies(replies=[row for _ in body.queries], budget_crossed_at=None)

    bare.__annotations__["body"] = bodies_for(open_backend(folder / "bare.sqlite").pool)[0]
    app.post("/v1/queries", response_model=Replies)(bare)
    app.get("/livez")(lambda: None)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


@contextlib.contextmanager
def target(name: str, function: Any, *arguments: Any) -> Iterator[Target]:
    """A process that runs ``function`` with a port after its first argument, once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    first, *others = arguments
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=function, args=(first, port, *others), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        found = Target(name=name, port=port, process=process.pid)
        _wait_for(found)
        yield found
    finally:
        process.kill()
        process.join()


def _wait_for(found: Target) -> None:
    deadline_s = time.monotonic() + _START_LIMIT_S
    while True:
        try:
            found.get("/livez")
        except httpx.TransportError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
        else:
            return


def ask_pool(found: Target) -> None:
    """Every record of the pool once, so that all replies are stored."""
    for start in range(0, POOL_SIZE, BATCH):
        body = {"queries": [{"id": number} for number in range(start, start + BATCH)]}
        asked = httpx.post(f"http://127.0.0.1:{found.port}/v1/queries", json=body, headers=_HEADERS, timeout=60)
        asked.raise_for_status()


class Hammer:
    """Sends loads by wrk, each new record once."""

    def __init__(self) -> None:
        self._number = 0

    def send(self, found: Target, load: Load, seconds: int) -> dict[str, float]:
        """Queries a second, p50 and p99 of a request, processor time of a query; charges, and what memory they took.

        RuntimeError for a failed request, and for new queries that were answered and not charged.
        """
        draws = load.kind != "stored" and found.name != "bare"
        before, memory_mb, used_s = found.charged() if draws else 0, found.memory_mb(), found.processor_s()
        told = json.loads(self._wrk(found, load, seconds).strip().splitlines()[-1])
        used_s = found.processor_s() - used_s
        charged = found.charged() - before if draws else 0
        heard, under_way = told["requests"] * load.queries, load.clients * BATCH
        self._number += charged + 2 * under_way
        if told["failed"] or (load.kind == "new" and not heard <= charged <= heard + under_way):
            raise RuntimeError(f"{found.name}: {load}: {told['failed']} failed, {heard} answered, {charged} charged.")
        used = {"charged": charged, "memory_mb": found.memory_mb() - memory_mb, "each_s": used_s / max(heard, 1)}
        return {"per_second": heard / told["seconds"], "p50_ms": told["p50_ms"], "p99_ms": told["p99_ms"], **used}

    def _wrk(self, found: Target, load: Load, seconds: int) -> str:
        program = shutil.which("wrk")
        if program is None:
            raise RuntimeError("wrk is not installed; `apt-get install wrk`.")
        told = [load.kind, str(load.queries), str(self._number), str(POOL_SIZE), TOKENS["FAIRPATE_ANALYST_TOKEN"]]
        assert self._number < 2**23  # far from where numbers are no longer whole as float32
        options = [f"-c{load.clients}", f"-d{seconds}s", "--timeout", "30s", "-s", str(_SCRIPT)]
        command = [program, "-t1", *options, f"http://127.0.0.1:{found.port}", "--", *told]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603


def fdatasync_rate(path: Path, seconds: float = 1.0) -> float:
    """Appends of 64 bytes, each made durable, per second."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        os.write(descriptor, b"x" * 64)
        os.fdatasync(descriptor)
        count += 1
    os.close(descriptor)
    return count / (time.perf_counter() - started)


def measure_round(folder: Path, hammer: Hammer, targets: Mapping[str, Target], seconds: int) -> dict[str, Any]:
    """Every load on every target once; what the bare handler cannot tell apart is sent to it once."""
    told: dict[str, Any] = {"load_average": os.getloadavg()[0], "fdatasync": fdatasync_rate(folder / "probe")}
    for load in LOADS:
        for name, found in targets.items():
            if name == "bare" and load.kind == "new":
                continue
            told[f"{name}: {load}"] = hammer.send(found, load, seconds)
    return told


def soak(hammer: Hammer, found: Target, seconds: int) -> dict[str, Any]:
    """Memory, charges and load while the mixture is sent."""
    samples = []
    context = multiprocessing.get_context("fork")
    load = Load(kind="mixed", clients=CLIENTS)
    with context.Pool(1) as pool:
        sent = pool.apply_async(hammer.send, (found, load, seconds))
        while not sent.ready():
            samples.append({"charged": found.charged(), "memory_mb": found.memory_mb(), "load": os.getloadavg()[0]})
            sent.wait(_SAMPLE_EVERY_S)
        return {"sent": sent.get(), "samples": samples}


def measure_verification(places: Mapping[str, tuple[Address, Address]], num_queries: int) -> Iterator[str]:
    """p50 and p99 of a new query while the ledger is verified and while it is not, and their ratios."""
    for name, (place, other) in places.items():
        fill(place, _FILLED)
        fill(other, _FILLED)
        with target(name, serve, place, 0.0, 0.1) as verifying, target(name, serve, other, 0.0, _NEVER_S) as idle:
            took_ms = {found.port: np.zeros(num_queries) for found in (verifying, idle)}
            clients = {port: http.client.HTTPConnection("127.0.0.1", port, timeout=60) for port in took_ms}
            for number in range(num_queries):
                body = b'{"queries":[{"id":%d}]}' % number
                # In turn, and who is first changes too: whatever else the machine does slows both.
                for port in sorted(took_ms, reverse=bool(number % 2)):
                    began_s = time.perf_counter()
                    clients[port].request("POST", "/v1/queries", body, _HEADERS | {"Content-Type": "application/json"})
                    assert clients[port].getresponse().read().startswith(b'{"replies"')
                    took_ms[port][number] = 1e3 * (time.perf_counter() - began_s)
            yield f"{name}: {num_queries} new queries, load average {os.getloadavg()[0]:.1f}"
            own, without = took_ms[verifying.port], took_ms[idle.port]
            drawn = np.random.default_rng(0).integers(0, num_queries, (500, num_queries))
            for percent in (50, 99):
                ratios = np.percentile(own[drawn], percent, axis=1) / np.percentile(without[drawn], percent, axis=1)
                one, other_one = np.percentile(own, percent), np.percentile(without, percent)
                low, high = np.percentile(ratios, [2.5, 97.5])
                ratio = f"{one / other_one:.3f} ({low:.3f} to {high:.3f})"
                yield f"  p{percent} {one:.2f} ms against {other_one:.2f}, ratio {ratio}"


def fill(place: Address, num_answers: int) -> None:
    """Make a ledger with so many answers, in as many transactions."""
    votes, outcome = np.full((1, NUM_CLASSES), NUM_TEACHERS // NUM_CLASSES), Outcome(verdict="answer", label=0)
    votes[0, 0] += NUM_TEACHERS - votes.sum()
    with Ledger(place, TERMS) as ledger:
        for number in range(num_answers):
            ledger.commit(ledger.reserve([f"{number:064x}"], [0], votes), [outcome])


def lines(told: Mapping[str, Any]) -> Iterator[str]:
    """What was measured: medians, and the least and the largest ratio of a round in brackets."""
    rounds = told["rounds"]
    yield f"load average {spread([r['load_average'] for r in rounds])}, {len(rounds)} rounds"
    yield f"append + fdatasync {spread([r['fdatasync'] for r in rounds])} per second"
    for name in ("bare", "SQLite", "PostgreSQL"):
        for load in LOADS:
            key = f"{name}: {load}"
            if key in rounds[0]:
                yield _line(key, load, rounds)
    for name, soaked in told["soaks"].items():
        yield from _soaked(name, soaked, rounds)


def _line(key: str, load: Load, rounds: Sequence[Mapping[str, Any]]) -> str:
    per_second, p50, p99 = (
        statistics.median(r[key][what] for r in rounds) for what in ("per_second", "p50_ms", "p99_ms")
    )
    each_us = spread([r[key]["each_s"] * 1e6 for r in rounds])
    text = f"{key:48} {per_second:7,.0f} /s  p50 {p50:6.1f}  p99 {p99:6.1f} ms  processor {each_us} us"
    if load.kind == "new":
        return f"{text}   of an append: {spread([r[key]['per_second'] / r['fdatasync'] for r in rounds])}"
    pairs = [(r[key], r[f"bare: {load}"]) for r in rounds]
    of_bare = spread([own["per_second"] / bare["per_second"] for own, bare in pairs])
    by_processor = spread([bare["each_s"] / own["each_s"] for own, bare in pairs if own["each_s"]])
    return f"{text}   of bare: {of_bare}, by processor {by_processor}"


def _soaked(name: str, soaked: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Memory from a tenth of the time on, against what new charges are known to take."""
    samples, sent = soaked["samples"], soaked["sent"]
    since = samples[len(samples) // 10]
    key = f"{name}: {Load(kind='new', clients=CLIENTS)}"
    charged, grown = (sum(r[key][what] for r in rounds) for what in ("charged", "memory_mb"))
    later = samples[len(samples) // 10 :]
    rise_mb, new = later[-1]["memory_mb"] - since["memory_mb"], later[-1]["charged"] - since["charged"]
    yield (
        f"{name}: mixture, {sent['per_second']:,.0f} requests /s, p50 {sent['p50_ms']:.1f} ms, "
        f"p99 {sent['p99_ms']:.1f} ms, load average {spread([s['load'] for s in samples])}"
    )
    yield (
        f"  memory {since['memory_mb']:.1f} MB, {rise_mb:+.1f} MB at the end, most "
        f"{max(s['memory_mb'] for s in later) - since['memory_mb']:+.1f} MB, with {new:,} charges "
        f"({grown * 1e6 / charged:,.0f} bytes each in turns of new queries)"
    )


def spread(values: Sequence[float]) -> str:
    """The median, and in brackets the least and the largest."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main() -> None:
    """Print the ratios; keep everything as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=int, default=3, help="of one kind of request in one round")
    parser.add_argument("--soak", type=int, default=0, help="seconds of the mixture for each service")
    parser.add_argument("--verification", type=int, default=0, help="new queries of each service, nothing else")
    parser.add_argument("--json", type=Path, help="a file for all that was measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name, contextlib.ExitStack() as stack:
        folder, hammer = Path(name), Hammer()
        folder.chmod(0o755)
        server = stack.enter_context(Server(folder / "server"))
        if arguments.verification:
            pairs: dict[str, tuple[Address, Address]] = {
                "SQLite": (folder / "verified.sqlite", folder / "idle.sqlite"),
                "PostgreSQL": (server.url("verified"), server.url("idle")),
            }
            print("\n".join(measure_verification(pairs, min(arguments.verification, POOL_SIZE))))
            return
        places: dict[str, Address] = {"SQLite": folder / "ledger.sqlite", "PostgreSQL": server.url("load")}
        targets = {k: stack.enter_context(target(k, serve, place, 0.0)) for k, place in places.items()}
        for found in targets.values():
            ask_pool(found)
        bare = {"bare": stack.enter_context(target("bare", serve_bare, folder))}
        for found in (targets | bare).values():  # what is made at the first request is made
            hammer.send(found, LOADS[-1], 1)
        rounds = [measure_round(folder, hammer, targets | bare, arguments.seconds) for _ in range(arguments.rounds)]
        soaks = {k: soak(hammer, found, arguments.soak) for k, found in targets.items()} if arguments.soak else {}
    told = {"rounds": rounds, "soaks": soaks}
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1))
    print("\n".join(lines(told)))


if __name__ == "__main__":
    main()
