"""Liveness, readiness and readers while the writer cannot write, or is not done: all of them true, and at once."""

import threading
import time

import httpx
import pytest
from own_disk import told_beside_own_disk
from serving import ANALYST, OPERATOR, ids, running, table_votes, tokens_of_both_roles, until

from aggregator.session import VotesUnavailableError

pytestmark = pytest.mark.usefixtures("light_runs")

AS_ANALYST = {"Authorization": f"Bearer {ANALYST}"}
AS_OPERATOR = {"Authorization": f"Bearer {OPERATOR}"}
READERS = ("/livez", "/readyz", "/metrics", "/v1/budget", "/v1/statement", "/v1/operator/ledger")


def test_no_reader_waits_for_the_writer(tmp_path):
    """One voter that does not come back: everything but new queries goes on, with what was durable before."""
    voting, come_back = threading.Event(), threading.Event()

    def slow_votes(questions):
        if questions[0].query.record_id == "record-200":
            voting.set()
            assert come_back.wait(60)
        return table_votes(questions)

    settings = {"tokens": tokens_of_both_roles(), "count_votes": slow_votes, "health_interval_s": 0.1}
    with (
        running(tmp_path / "ledger.sqlite", **settings) as url,
        httpx.Client(base_url=url, headers=AS_OPERATOR) as http,
    ):
        first = http.post("/v1/queries", json=ids(range(50))).json()
        waiting = threading.Thread(
            target=lambda: httpx.post(f"{url}/v1/queries", json=ids([200]), headers=AS_ANALYST, timeout=60)
        )
        waiting.start()
        try:
            assert voting.wait(10)
            for path in READERS:
                response = http.get(path, timeout=1)
                assert response.status_code == 200, path
            assert http.post("/v1/estimate", json={"count": 3}, timeout=1).json()["now"]["queries_submitted"] == 50
            assert http.post("/v1/queries", json=ids(range(50)), timeout=1).json() == first
            page = http.get("/v1/operator/ledger?start=48&limit=10", timeout=1).json()
            assert (page["total"], [entry["number"] for entry in page["entries"]]) == (50, [48, 49])
        finally:
            come_back.set()
            waiting.join()
        assert http.get("/v1/budget").json()["queries_submitted"] == 51


def test_the_operator_s_price_is_that_of_all_charges_however_often_it_is_asked(tmp_path):
    """Asked after every few queries it is, in the end, what a service that is asked once says."""
    prices = []
    for folder, step in (("often", 4), ("once", 24)):
        path = tmp_path / folder / "ledger.sqlite"
        with (
            running(path, tokens=tokens_of_both_roles()) as url,
            httpx.Client(base_url=url, headers=AS_OPERATOR) as http,
        ):
            for number in range(24):  # asked one by one in both, for the gate's sake
                http.post("/v1/queries", json=ids([number]))
                if (number + 1) % step == 0:
                    page = http.get("/v1/operator/ledger").json()
            prices.append(page["epsilon_data_dependent"])
    assert prices[0] == pytest.approx(prices[1], rel=1e-9)
    assert prices[0] > 0


def test_stored_replies_hide_no_failure_and_readiness_returns_without_a_query(tmp_path):
    there = threading.Event()
    there.set()

    def votes(questions):
        if not there.is_set():
            raise VotesUnavailableError("a voter is gone")
        return table_votes(questions)

    with (
        running(tmp_path / "ledger.sqlite", count_votes=votes, health_interval_s=0.05) as url,
        httpx.Client(base_url=url) as http,
    ):
        assert http.post("/v1/queries", json=ids([0])).status_code == 200
        there.clear()
        assert http.post("/v1/queries", json=ids([1])).status_code == 503
        assert http.post("/v1/queries", json=ids([0])).status_code == 200
        time.sleep(0.2)
        assert http.get("/readyz").json() == {"status": "failing", "reasons": ["votes"]}
        assert http.get("/livez").json() == {"status": "ok", "reasons": []}
        there.set()
        until(lambda: http.get("/readyz").status_code == 200)
        assert http.get("/v1/budget").json()["queries_submitted"] == 1


DISK_SCRIPT = """
import json, os, subprocess, sys, time
from pathlib import Path

sys.path[:0] = sys.argv[2:]
import httpx
from serving import ids, running

disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=True)
told = {}

def ready(want):
    deadline = time.monotonic() + 10
    while (response := http.get("/readyz")).status_code != want and time.monotonic() < deadline:
        time.sleep(0.02)
    return [response.status_code, response.json()["reasons"]]

with running(disk / "ledger.sqlite", health_interval_s=0.05) as url, httpx.Client(base_url=url, timeout=20) as http:
    first = http.post("/v1/queries", json=ids(range(20))).json()
    told["before"] = ready(200)
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    told["full"] = ready(503)
    for start in range(20, 300, 40):
        told["asked"] = http.post("/v1/queries", json=ids(range(start, start + 40))).status_code
    told["reasons"] = http.get("/readyz").json()["reasons"]
    told["live"] = http.get("/livez").status_code
    told["stored"] = http.post("/v1/queries", json=ids(range(20))).json() == first
    submitted = http.get("/v1/budget").json()["queries_submitted"]
    filler.unlink()
    told["after"] = ready(200)
    told["kept"] = http.post("/v1/queries", json=ids(range(20))).json() == first
    told["answered"] = http.post("/v1/queries", json=ids(range(299, 300))).status_code
    told["submitted"] = http.get("/v1/budget").json()["queries_submitted"] >= submitted + 1
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=False)
print(json.dumps(told))
"""


def test_a_full_disk_shows_before_a_query_fails_and_is_forgotten_when_it_has_room_again(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    told = told_beside_own_disk(DISK_SCRIPT, disk)
    assert told["before"] == [200, []]
    assert told["full"] == [503, ["disk"]]
    assert told["asked"] == 503
    assert told["reasons"] == ["disk", "ledger"]
    assert told["live"] == 200
    assert told["after"] == [200, []]
    assert told["answered"] == 200
    assert told["stored"]
    assert told["kept"]
    assert told["submitted"]
