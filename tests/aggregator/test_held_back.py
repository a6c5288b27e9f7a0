"""Requests that are held back: who may be charged is asked when the request is complete, and again at the charge."""

import concurrent.futures
import socket
import threading
import time
from collections import Counter

import httpx
import pytest
from serving import ANALYST, OPERATOR, free_port, ids, open_backend, running, table_votes, tokens_of_both_roles, until

from aggregator.ledger import CallerLimit
from aggregator.service.actor import ServiceSettings
from aggregator.service.auth import TokenBook, added, change, expired, limited, revoked, rotated
from fairpate.http_server import HttpServer, RequestRate

pytestmark = pytest.mark.usefixtures("light_runs")


def add(store, name, **limit):
    return change(
        store, lambda s: added(s, name, role="analyst", limit=CallerLimit(**limit), expires_s=None, now_s=time.time())
    )


def as_(token):
    return {"Authorization": f"Bearer {token}"}


class Held:
    """A request for one record of the pool, of which the last byte is not sent yet."""

    def __init__(self, url, number, token):
        body = b'{"queries": [{"id": %d}]}' % number
        self._last = body[-1:]
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._connection = socket.create_connection((host, int(port)), timeout=20)
        head = f"POST /v1/queries HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._connection.sendall(head.encode() + body[:-1])

    def status(self):
        """Send the last byte, and return the status of the answer."""
        with self._connection as connection:
            connection.sendall(self._last)
            return int(connection.recv(65536).split()[1])


def submitted(url, token):
    return httpx.get(f"{url}/v1/budget", headers=as_(token)).json()["queries_submitted"]


ENDS = {
    "revoked": lambda s: revoked(s, "alice"),
    "expired": lambda s: expired(s, "alice", expires_s=time.time() + 0.1),
    "rotated": lambda s: rotated(s, "alice", old_expires_s=time.time(), now_s=time.time())[0],
}


@pytest.mark.parametrize("end", list(ENDS))
def test_a_token_that_ended_while_its_requests_were_held_back_is_charged_nothing(tmp_path, end):
    store = tmp_path / "tokens.json"
    alice, bob = add(store, "alice"), add(store, "bob")
    with running(tmp_path / "ledger.sqlite", tokens=TokenBook(store=store)) as url:
        held = [Held(url, number, alice) for number in range(20)]
        assert held.pop().status() == 200
        change(store, lambda s: (ENDS[end](s), None))
        until(lambda: httpx.get(f"{url}/v1/me", headers=as_(alice)).status_code == 401)
        assert Counter(each.status() for each in held) == {401: 19}
        assert submitted(url, bob) == 1


def test_a_service_that_needs_tokens_by_now_admits_no_request_that_was_held_back_without_one(tmp_path):
    store = tmp_path / "tokens.json"
    with running(tmp_path / "ledger.sqlite", tokens=TokenBook(store=store)) as url:
        held = Held(url, 3, "none")
        time.sleep(0.3)  # the service has read the head
        alice = add(store, "alice")
        until(lambda: httpx.get(f"{url}/v1/me", headers=as_(alice)).json()["name"] == "alice")
        assert held.status() == 401
        assert submitted(url, alice) == 0


def test_requests_that_were_held_back_keep_to_the_rate_when_they_are_released_together(tmp_path):
    """Each head is sent within the rate, which lets two requests in at once and eight a second."""
    rate = RequestRate(per_s=8, burst=2)
    with running(tmp_path / "ledger.sqlite", tokens=tokens_of_both_roles(), rate=rate) as url:
        held = []
        for number in range(10):
            held.append(Held(url, number, ANALYST))
            time.sleep(0.13)
        with concurrent.futures.ThreadPoolExecutor(len(held)) as callers:
            told = Counter(callers.map(Held.status, held))
        assert told.keys() == {200, 429}
        assert told[200] <= 5  # two at once, and what a slow machine lets in while they come
        assert submitted(url, OPERATOR) == told[200]


def test_a_service_that_stops_answers_what_is_complete_and_charges_nothing_else(tmp_path):
    backend, votes = open_backend(tmp_path / "ledger.sqlite", count_votes=lambda q: waiting_votes(q)), threading.Event()
    asked = threading.Event()

    def waiting_votes(questions):
        asked.set()
        assert votes.wait(20)
        return table_votes(questions)

    settings = ServiceSettings(port=free_port(), answer_step_s=0.0, tokens=tokens_of_both_roles())
    server = HttpServer(backend.app, settings)
    held, complete = Held(settings.url, 1, ANALYST), Held(settings.url, 2, ANALYST)
    with concurrent.futures.ThreadPoolExecutor(2) as others:
        answered = others.submit(complete.status)
        assert asked.wait(20)
        stopped = others.submit(server.stop)
        time.sleep(0.3)
        assert held.status() == 503
        votes.set()
        assert answered.result() == 200
        stopped.result()
    assert len(backend.ledger.keys) == 1
    backend.close()


def test_a_token_that_is_revoked_during_the_vote_is_not_charged_and_another_asker_is(tmp_path):
    """Alice and bob ask for two records each, one of them the same; alice's token ends while the voters work."""
    store = tmp_path / "tokens.json"
    alice, bob = add(store, "alice"), add(store, "bob")
    calls, voting, go = [], threading.Event(), threading.Event()

    def slow_votes(questions):
        calls.append(len(questions))
        if len(calls) == 2:  # of the group behind the first request
            voting.set()
            assert go.wait(20)
        elif len(calls) == 1:
            time.sleep(0.5)  # the others come together meanwhile
        return table_votes(questions)

    backend = open_backend(tmp_path / "ledger.sqlite", count_votes=slow_votes)

    def status(token, numbers):
        return httpx.post(f"{url}/v1/queries", json=ids(numbers), headers=as_(token), timeout=30)

    with (
        running(None, backend=backend, tokens=TokenBook(store=store)) as url,
        concurrent.futures.ThreadPoolExecutor(3) as callers,
    ):
        first = callers.submit(status, bob, [0])
        time.sleep(0.2)
        of_alice = callers.submit(status, alice, [1, 2])
        time.sleep(0.1)
        of_bob = callers.submit(status, bob, [2, 3])
        assert voting.wait(20)
        change(store, lambda s: (revoked(s, "alice"), None))
        time.sleep(0.7)
        go.set()
        assert (first.result().status_code, of_alice.result().status_code) == (200, 401)
        assert [reply["status"] == "over_budget" for reply in of_bob.result().json()["replies"]] == [False, False]
        assert calls == [1, 3]
        assert dict(backend.ledger.charged_to) == {"bob": 3}
        # Record 1 has no stored reply.
        assert httpx.get(f"{url}/v1/me", headers=as_(bob)).json()["spent"]["queries"] == 3


def test_a_limit_that_is_lowered_during_the_vote_holds_for_its_charge(tmp_path):
    store = tmp_path / "tokens.json"
    alice = add(store, "alice", max_queries=100)
    voting, go = threading.Event(), threading.Event()

    def slow_votes(questions):
        voting.set()
        assert go.wait(20)
        return table_votes(questions)

    with (
        running(tmp_path / "ledger.sqlite", count_votes=slow_votes, tokens=TokenBook(store=store)) as url,
        concurrent.futures.ThreadPoolExecutor(1) as callers,
    ):
        asked = callers.submit(httpx.post, f"{url}/v1/queries", json=ids(range(9)), headers=as_(alice), timeout=30)
        assert voting.wait(20)
        change(store, lambda s: (limited(s, "alice", CallerLimit(max_queries=4)), None))
        until(lambda: httpx.get(f"{url}/v1/me", headers=as_(alice)).json()["limit"]["max_queries"] == 4)
        go.set()
        statuses = [reply["status"] for reply in asked.result().json()["replies"]]
        assert [status == "over_budget" for status in statuses] == [False] * 4 + [True] * 5
        assert submitted(url, alice) == 4
