"""HTTP throughput and latency of the aggregator, as ratios taken in one run.

    python benchmarks/service.py [--queries 2048] [--json]

Every number comes from one uvicorn in a process of its own on loopback and clients in this one, over kept-alive
connections that send prepared bytes, so that the client costs as little as it can:

- one id per POST and 256 ids per POST, both for new queries (durable ledger) and for stored replies,
- a bare FastAPI handler of the same shape (body read and validated by the same types, a constant reply),
- p50 and p99 of 16 and 64 concurrent clients, each asking new queries one at a time,
- how well the time of a reply tells which step refused it (area under the ROC curve; 0.5: not at all), with and
  without the step that replies wait for.

Votes are a table, so that nothing but service, mechanism and ledger is measured. Numbers of a noisy machine: compare
ratios, not rates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aggregator.client import AggregatorClient
from aggregator.gnmax import ConfidentGnmax
from aggregator.ledger.ledger import Ledger
from aggregator.ledger.terms import LedgerTerms
from aggregator.service.actor import HttpServer
from aggregator.service.api import Backend, ServiceSettings
from aggregator.service.questions import PublicPool, Question
from aggregator.service.tokens import read_tokens
from aggregator.session import AggregatorSession
from fairpate.privacy.discrete_gaussian import OsEntropy
from fairpate.types import Budget, GateRule, IntArray

NUM_TEACHERS, NUM_CLASSES, POOL_SIZE = 200, 10, 60_000
BATCH = 256
_TOKENS = {"FAIRPATE_ANALYST_TOKEN": "a" * 32, "FAIRPATE_OPERATOR_TOKEN": "o" * 32}


def terms() -> LedgerTerms:
    """The paper's mechanism for ColorMNIST, and a budget that is never reached."""
    return LedgerTerms(
        mechanism=ConfidentGnmax(threshold=120, threshold_stddev_votes=110, noise_stddev_votes=20),
        gate=GateRule(max_disparity=0.01, min_count=50),
        num_teachers=NUM_TEACHERS,
        num_classes=NUM_CLASSES,
        num_groups=2,
        noise=OsEntropy().label,
        ensemble="table",
        budget=Budget(kind="query_count", epsilon=None, delta=1e-5, max_queries=10 * POOL_SIZE),
    )


def serve(path: Path, port: int, answer_step_s: float) -> None:
    """The process under test: the service, and beside it the bare handler on the next port."""
    generator = np.random.default_rng(0)
    votes = generator.multinomial(NUM_TEACHERS, generator.dirichlet([0.3] * NUM_CLASSES, POOL_SIZE))
    pool = PublicPool(
        features=np.arange(POOL_SIZE, dtype=np.float32).reshape(-1, 1),
        groups_N=generator.integers(0, 2, POOL_SIZE),
        record_ids=tuple(map(str, range(POOL_SIZE))),
        group_names=("red", "green"),
        label_names=tuple(map(str, range(NUM_CLASSES))),
    )

    def count_votes(questions: Sequence[Question]) -> IntArray:
        return np.array([votes[int(question.query.record_id)] for question in questions], dtype=np.int64)

    ledger = Ledger(path, terms())
    backend = Backend(
        ledger=ledger, session=AggregatorSession(ledger, source=OsEntropy()), pool=pool, count_votes=count_votes
    )
    settings = ServiceSettings(port=port, tokens=read_tokens(_TOKENS), answer_step_s=answer_step_s)
    HttpServer(backend, settings)
    _serve_bare(pool, port + 1)


def _serve_bare(pool: PublicPool, port: int) -> None:
    import uvicorn
    from fastapi import FastAPI

    from aggregator.service.wire import Replies, Reply, bodies_for

    app = FastAPI()

    async def bare(body: Any) -> Replies:
        row = Reply(key="0" * 64, status="answered", label=3)
        return Replies(replies=[row for _ in body.queries], budget_crossed_at=None)

    bare.__annotations__["body"] = bodies_for(pool).queries
    app.post("/v1/queries", response_model=Replies)(bare)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


class Connection:
    """One kept-alive HTTP/1.1 connection that sends prepared bytes and reads bodies of a stated length."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def post(self, numbers: Sequence[int]) -> bytes:
        """Ask ``numbers`` in one request; the response's body. RuntimeError for any status but 200."""
        body = b'{"queries":[' + b",".join(b'{"id":%d}' % number for number in numbers) + b"]}"
        head = (
            b"POST /v1/queries HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer " + b"a" * 32 + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        self._writer.write(head + body)
        received = await self._reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in received.split(b"\r\n", 1)[0]:
            raise RuntimeError(received.decode())
        length = int(received.lower().split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        return await self._reader.readexactly(length)


async def rate(port: int, numbers: Sequence[int], *, batch: int) -> float:
    """Queries per second of one client."""
    async with Connection(port) as connection:
        started = time.perf_counter()
        for start in range(0, len(numbers), batch):
            await connection.post(numbers[start : start + batch])
        return len(numbers) / (time.perf_counter() - started)


async def concurrent(port: int, numbers: Sequence[int], *, clients: int) -> dict[str, float]:
    """Throughput and latencies of several clients that ask one query at a time."""
    times_s: list[float] = []

    async def client(own: Sequence[int]) -> None:
        async with Connection(port) as connection:
            for number in own:
                started = time.perf_counter()
                await connection.post([number])
                times_s.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*(client(numbers[i::clients]) for i in range(clients)))
    p50_s, p99_s = np.percentile(times_s, [50, 99])
    return {
        "per_second": len(numbers) / (time.perf_counter() - started),
        "p50_ms": float(p50_s * 1e3),
        "p99_ms": float(p99_s * 1e3),
    }


async def refusal_times(port: int, numbers: Sequence[int]) -> dict[str, float]:
    """AUC of the reply's time as a test of fairness refusal against confidence refusal, and how many of each."""
    times_s: dict[str, float] = {}
    async with Connection(port) as connection:
        for number in numbers:
            started = time.perf_counter()
            body = await connection.post([number])
            times_s[json.loads(body)["replies"][0]["key"]] = time.perf_counter() - started
    kinds = _verdicts(port)
    confidence, fairness = (
        np.array([seconds for key, seconds in times_s.items() if kinds[key] == kind])
        for kind in ("confidence", "fairness")
    )
    later = (fairness[:, None] > confidence[None]).mean() + 0.5 * (fairness[:, None] == confidence[None]).mean()
    return {"auc": float(later), "confidence": len(confidence), "fairness": len(fairness)}


def _verdicts(port: int) -> dict[str, str]:
    verdicts: dict[str, str] = {}
    with AggregatorClient(f"http://127.0.0.1:{port}", token=_TOKENS["FAIRPATE_OPERATOR_TOKEN"]) as client:
        while len(verdicts) < (page := client.ledger(start=len(verdicts), limit=1000)).total:
            verdicts |= {entry.key: entry.verdict for entry in page.entries}
    return verdicts


def fsync_rate(folder: Path, seconds: float = 1.0) -> float:
    """Appends of 64 bytes, each made durable, per second."""
    descriptor = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        os.write(descriptor, b"x" * 64)
        os.fdatasync(descriptor)
        count += 1
    os.close(descriptor)
    return count / (time.perf_counter() - started)


async def measure(port: int, count: int) -> dict[str, Any]:
    """Every rate, in one run on one service without a step."""
    numbers = iter(range(POOL_SIZE))

    def fresh(n: int) -> list[int]:
        return [next(numbers) for _ in range(n)]

    await rate(port, fresh(64), batch=1)
    await rate(port + 1, range(64), batch=1)
    results: dict[str, Any] = {"new_single": [], "new_batch": [], "stored_single": [], "stored_batch": [], "bare": []}
    for _ in range(3):
        single, batch = fresh(count // 4), fresh(count * 2)
        results["new_single"].append(await rate(port, single, batch=1))
        results["new_batch"].append(await rate(port, batch, batch=BATCH))
        results["stored_single"].append(await rate(port, single, batch=1))
        results["bare"].append(await rate(port + 1, single, batch=1))
        results["stored_batch"].append(await rate(port, batch, batch=BATCH))
    medians = {name: float(np.median(values)) for name, values in results.items()}
    concurrency = {f"clients_{n}": await concurrent(port, fresh(count), clients=n) for n in (1, 16, 64)}
    return medians | concurrency


async def _wait_for(port: int) -> None:
    for _ in range(300):
        try:
            async with Connection(port) as connection:
                await connection.post([0])
                return
        except OSError:
            await asyncio.sleep(0.1)
    raise RuntimeError("The service did not start within 30 s.")


def on_fresh_service(folder: Path, answer_step_s: float, job: Any) -> Any:
    """``job(port)`` beside a service in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    path = folder / f"ledger-{answer_step_s}.sqlite"
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(path, port, answer_step_s), daemon=True)
    process.start()

    async def session() -> Any:
        await _wait_for(port)
        await _wait_for(port + 1)
        return await job(port)

    try:
        return asyncio.run(session())
    finally:
        process.kill()
        process.join()


def main() -> None:
    """Print the ratios, or everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=2048)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, count = Path(name), arguments.queries
        found = on_fresh_service(folder, 0.0, lambda port: measure(port, count))
        found["fsync"] = fsync_rate(folder)
        for step_s in (0.0, 0.01):
            sub = folder / f"times-{step_s}"
            sub.mkdir()
            found[f"refusals_step_{step_s:g}"] = on_fresh_service(
                sub, step_s, lambda port: refusal_times(port, range(1, count // 2 + 1))
            )
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    print(f"append + fdatasync                      {found['fsync']:8.0f} /s")
    print(f"one new id per POST, one client         {found['new_single']:8.0f} /s")
    print(f"256 new ids per POST                    {found['new_batch']:8.0f} /s")
    print(f"  ratio                                 {found['new_batch'] / found['new_single']:8.1f}   (asked: 50)")
    print(f"one stored id per POST                  {found['stored_single']:8.0f} /s")
    print(f"bare FastAPI handler                    {found['bare']:8.0f} /s")
    print(f"  stored / bare                         {found['stored_single'] / found['bare']:8.2f}   (asked: .5)")
    print(f"256 stored ids per POST                 {found['stored_batch']:8.0f} /s")
    print(f"  ratio to one                          {found['stored_batch'] / found['stored_single']:8.1f}")
    for clients in (1, 16, 64):
        row = found[f"clients_{clients}"]
        print(
            f"{clients:2} clients, new ids one by one         {row['per_second']:8.0f} /s   "
            f"p50 {row['p50_ms']:.1f} ms  p99 {row['p99_ms']:.1f} ms"
        )
    for step in ("0", "0.01"):
        row = found[f"refusals_step_{step}"]
        kinds = f"({row['confidence']} confidence, {row['fairness']} fairness)"
        print(f"time tells the refusal, step {step:4} s       AUC {row['auc']:.3f}   {kinds}")


if __name__ == "__main__":
    main()
