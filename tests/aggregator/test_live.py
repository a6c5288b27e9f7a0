"""Live views: whose token is no longer good hears nothing more, and many at once are no more than one by one."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter

import httpx
import pytest
from serving import running

from aggregator.ledger import CallerLimit
from aggregator.service.auth import TokenBook, added, change, expired, revoked, rotated

pytestmark = pytest.mark.usefixtures("light_runs")


def add(store, name, role="analyst"):
    return change(store, lambda s: added(s, name, role=role, limit=CallerLimit(), expires_s=None, now_s=time.time()))


def as_(token):
    return {"Authorization": f"Bearer {token}"}


def opens(address, token):
    with httpx.stream("GET", address, headers=as_(token), timeout=10) as events:
        return events.status_code == 200


ENDS = {
    "revoked": lambda s: revoked(s, "root"),
    "expired": lambda s: expired(s, "root", expires_s=time.time() + 0.5),
    "rotated": lambda s: rotated(s, "root", old_expires_s=time.time(), now_s=time.time())[0],
}


@pytest.mark.parametrize("end", list(ENDS))
def test_a_view_ends_with_its_token_and_tells_nothing_after_it(tmp_path, end):
    store = tmp_path / "tokens.json"
    root, bob = add(store, "root", role="operator"), add(store, "bob")
    with running(tmp_path / "ledger.sqlite", tokens=TokenBook(store=store)) as url:
        heard: list[str] = []

        def listen():
            with httpx.stream("GET", f"{url}/v1/operator/events", headers=as_(root), timeout=20) as events:
                heard.extend(line for line in events.iter_lines() if line.startswith("data"))

        view = threading.Thread(target=listen)
        view.start()
        while not heard:
            time.sleep(0.02)
        change(store, lambda s: (ENDS[end](s), None))
        while httpx.get(f"{url}/v1/operator/overview", headers=as_(root)).status_code != 401:
            time.sleep(0.05)
        before = len(heard)
        assert httpx.post(f"{url}/v1/queries", json={"queries": [{"id": 1}]}, headers=as_(bob)).status_code == 200
        view.join(timeout=5)
        assert not view.is_alive()
        assert len(heard) == before


def test_many_at_once_are_no_more_than_a_caller_may_have(tmp_path):
    store = tmp_path / "tokens.json"
    root, bob = add(store, "root", role="operator"), add(store, "bob")
    with running(tmp_path / "ledger.sqlite", tokens=TokenBook(store=store)) as url:
        host, port = url.removeprefix("http://").split(":")
        request = f"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {bob}\r\n\r\n".encode()
        asking = [socket.create_connection((host, int(port)), timeout=10) for _ in range(60)]
        for each in asking:
            each.sendall(request)
        found = Counter(each.recv(12)[9:12].decode() for each in asking)
        assert found == {"200": 8, "503": 52}
        assert httpx.get(f"{url}/v1/operator/overview", headers=as_(root)).status_code == 200
        with httpx.stream("GET", f"{url}/v1/operator/events", headers=as_(root), timeout=10) as events:
            assert events.status_code == 200
        for each in asking:
            each.close()
        deadline_s = time.monotonic() + 20
        while not opens(f"{url}/v1/events", bob):
            assert time.monotonic() < deadline_s, "places are given back"
            time.sleep(0.2)
