"""Readiness over a ledger that is gone, hangs or has another writer: seen by a probe before any query fails."""

import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from serving import TERMS, ids, open_backend, running

from aggregator.ledger import Ledger, back_end

pytestmark = [
    pytest.mark.usefixtures("light_runs"),
    pytest.mark.usefixtures("short_pauses"),
]
NOBODY_LOOKS = 3600.0
_SHARED_S = 0.12  # one look answers all who ask within this time


def readiness(http):
    """Status, reasons, and the seconds until they came; by a look that begins now."""
    time.sleep(_SHARED_S)
    began_s = time.monotonic()
    answer = http.get("/readyz")
    return answer.status_code, answer.json()["reasons"], time.monotonic() - began_s


def until_ready(http, *, timeout_s=20.0):
    deadline_s = time.monotonic() + timeout_s
    while (found := readiness(http))[0] != 200:
        assert time.monotonic() < deadline_s, found


@contextlib.contextmanager
def served(place, *, anchor=None, interval_s=NOBODY_LOOKS):
    """A client of a service that has answered ten queries; by itself it looks at nothing before the test is over."""
    backend = open_backend(place, anchor=anchor)
    with (
        running(place, backend=backend, health_interval_s=interval_s) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        assert http.post("/v1/queries", json=ids(range(10))).status_code == 200
        assert readiness(http)[:2] == (200, [])
        yield http


def anchored(place, anchor):
    with Ledger(place, TERMS) as ledger:
        back_end(anchor).anchor(anchor).make(ledger.head)
    return anchor


@pytest.mark.parametrize("name", ["ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "ledger.head", "anchor"])
def test_a_file_that_is_gone_is_seen_by_the_next_who_asks(path, name):
    anchor = anchored(path, path.parent / "anchor")
    with served(path, anchor=anchor) as http:
        (path.parent / name).rename(path.parent / "gone")
        assert readiness(http)[:2] == (503, ["ledger"])
        stored = http.post("/v1/queries", json=ids(range(10)))
        assert stored.status_code == 200
        assert http.post("/v1/queries", json=ids([20])).status_code == 503


def test_an_anchor_that_is_brought_back_needs_no_restart(path):
    anchor = anchored(path, path.parent / "anchor")
    with served(path, anchor=anchor, interval_s=0.1) as http:
        anchor.rename(path.parent / "gone")
        assert readiness(http)[:2] == (503, ["ledger"])
        (path.parent / "gone").rename(anchor)
        until_ready(http)
        assert http.post("/v1/queries", json=ids([20])).status_code == 200


@pytest.mark.parametrize("ends", ["kill", "stop"])
def test_a_database_that_stopped_is_seen_at_once_and_its_return_too(own_server, ends):
    with served(own_server.url(f"stopped-{ends}"), interval_s=0.2) as http:
        getattr(own_server, ends)()
        try:
            assert readiness(http)[:2] == (503, ["ledger"])
            assert http.post("/v1/queries", json=ids(range(10))).status_code == 200
        finally:
            own_server.start()
        until_ready(http)
        assert http.post("/v1/queries", json=ids([20])).status_code == 200
        assert http.get("/v1/budget").json()["queries_submitted"] == 11


@pytest.mark.parametrize("query_hangs", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_database_that_hangs_is_seen_in_two_seconds_and_nothing_else_waits_for_it(own_server, query_hangs):
    with served(own_server.url(f"paused-{query_hangs}"), interval_s=0.2) as http, contextlib.ExitStack() as ending:
        own_server.pause()
        ending.callback(own_server.resume)
        replies = []
        asking = threading.Thread(
            target=lambda: replies.append(httpx.post(f"{http.base_url}/v1/queries", json=ids([20]), timeout=60))
        )
        if query_hangs:
            asking.start()
        status, reasons, took_s = readiness(http)
        assert (status, reasons) == (503, ["ledger"])
        assert took_s < 2.5
        for _ in range(20):  # the look that hangs is shared: no wait, and no further thread
            status, _, took_s = readiness(http)
            assert (status, took_s < 0.5) == (503, True)
        assert sum(thread.name == "look" for thread in threading.enumerate()) <= 1
        assert http.get("/livez", timeout=1).status_code == 200
        assert http.post("/v1/queries", json=ids(range(10)), timeout=1).status_code == 200
        ending.close()
        until_ready(http)
        if query_hangs:
            asking.join()
            assert replies[0].status_code == 200
        assert http.post("/v1/queries", json=ids([20])).status_code == 200
        assert http.get("/v1/budget").json()["queries_submitted"] == 11


def test_a_service_whose_ledger_another_took_over_is_not_ready(own_server):
    place = own_server.url("deposed")
    with served(place) as http, Ledger(place, TERMS, create=False, take_over=True):
        assert readiness(http)[:2] == (503, ["ledger"])


TAKES_OVER = """
import sys

sys.path[:0] = sys.argv[2:]
from aggregator.ledger import Ledger
from serving import TERMS

Ledger(sys.argv[1], TERMS, create=False, take_over=True).close()
"""


@pytest.mark.slow
def test_a_deposed_writer_does_not_come_back_by_itself(own_server):
    """Its successor, another process, is gone again: who writes next is the operator's choice."""
    place = own_server.url("returning")
    tests = Path(__file__).parents[1]
    with served(place) as http:
        assert http.post("/v1/queries", json=ids([1])).status_code == 200
        subprocess.run([sys.executable, "-c", TAKES_OVER, place, tests, tests.parent], check=True, timeout=60)  # noqa: S603
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            assert http.post("/v1/queries", json=ids([20])).status_code == 503
            time.sleep(0.1)
        assert readiness(http)[:2] == (503, ["ledger"])
        assert http.post("/v1/queries", json=ids([1])).status_code == 200, "a stored reply is given"
    with served(place) as http:
        assert http.post("/v1/queries", json=ids([20])).status_code == 200


WITHOUT_RAY_S_HEAD = """
import os, sys, time
from pathlib import Path

sys.path[:0] = sys.argv[2:]
import httpx, psutil
from serving import ids, running
from teachers.ray_pool import start_ray
from fairpate.config import RayConfig

settings = {"health_interval_s": 0.2}
with start_ray(RayConfig()), running(Path(sys.argv[1]), **settings) as url, httpx.Client(base_url=url) as http:
    assert http.get("/readyz").json()["reasons"] == []
    (head,) = [child for child in psutil.Process().children(recursive=True) if child.name() == "gcs_server"]
    head.suspend()
    time.sleep(0.3)
    began_s = time.monotonic()
    assert http.get("/readyz", timeout=5).json()["reasons"] == ["cluster"]
    assert time.monotonic() < began_s + 2.5
    head.resume()
    while http.get("/readyz").status_code != 200:
        assert time.monotonic() < began_s + 30
        time.sleep(0.1)
    head.kill()
    time.sleep(0.3)
    began_s = time.monotonic()
    assert http.get("/readyz", timeout=5).json()["reasons"] == ["cluster"]
    assert time.monotonic() < began_s + 2.5
    assert http.post("/v1/queries", json=ids([0])).status_code == 200
    print("all seen", flush=True)
    os._exit(0)  # what Ray itself does without its head a minute later
"""


@pytest.mark.slow
def test_a_control_process_of_ray_that_hangs_or_died_is_seen(path):
    here = Path(__file__).parent
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", WITHOUT_RAY_S_HEAD, path, here.parent, here],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "all seen" in done.stdout, done.stderr
