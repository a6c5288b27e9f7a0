"""Attacks on a real service by raw sockets: each is cut off in bounded time, and nobody else notices it."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from serving import ANALYST, running, tokens_of_both_roles

from fairpate.http_server import ConnectionLimits, LimitedProtocol, RequestRate

pytestmark = pytest.mark.usefixtures("light_runs")

LIMITS = {"head_timeout_s": 1.0, "body_timeout_s": 1.0, "write_timeout_s": 1.0, "idle_timeout_s": 1.0}
CLOSED_WITHIN_S = 8.0  # the longest limit, the moment for which a refused caller is listened to, and a busy machine
STALL_S = 2.0  # tens of milliseconds on a machine that does nothing else; without limits it is 4 to 9 s
SERVER = """
import json, sys, time
from pathlib import Path

sys.path[:0] = sys.argv[3:]
from serving import running, tokens_of_both_roles
from fairpate.http_server import ConnectionLimits

limits = ConnectionLimits(**json.loads(sys.argv[2]))
with running(Path(sys.argv[1]), limits=limits, tokens=tokens_of_both_roles()) as url:
    print(url, flush=True)
    sys.stdin.read()
"""
TOKEN = f"Authorization: Bearer {ANALYST}\r\n"
GET = f"GET /v1/budget HTTP/1.1\r\nHost: x\r\n{TOKEN}".encode()
POST = f"POST /v1/queries HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{TOKEN}".encode()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A service in a process of its own, with short limits, as (host, port)."""
    tests = Path(__file__).parents[1]
    ledger = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    command = [sys.executable, "-c", SERVER, ledger, json.dumps(LIMITS), tests, tests.parent]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        host, _, port = process.stdout.readline().strip().removeprefix("http://").rpartition(":")
        yield host, int(port)
        process.stdin.close()
        process.wait(30)


@contextlib.contextmanager
def bystander(address):
    """Somebody who asks meanwhile, over a new connection each time; the 99th percentile of its times is bounded."""
    times_s, ended = [], threading.Event()

    def ask():
        while not ended.is_set():
            started = time.perf_counter()
            received, _ = sent(address, [GET + b"Connection: close\r\n\r\n"])
            times_s.append(time.perf_counter() - started if b" 200 " in received else 30.0)
            time.sleep(0.05)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        ended.set()
        asking.join()
    assert np.percentile(times_s, 99) < STALL_S, sorted(times_s)[-3:]


def sent(address, pieces, *, pause_s=0.0):
    """What comes back for these bytes, and the seconds until the service closed the connection."""
    started, received = time.monotonic(), b""
    with socket.create_connection(address, timeout=CLOSED_WITHIN_S) as connection:
        with contextlib.suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause_s)
                if time.monotonic() > started + CLOSED_WITHIN_S:
                    break
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                received += part
    return received, time.monotonic() - started


def repeated(piece, times):
    return (piece for _ in range(times))


def posted(body, headers=b""):
    return [POST + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body]


BAD_NUMBERS = b'{"queries":[' + b",".join([b'{"features":["x",["x"]],"group":"y"}'] * 20_000) + b"]}"
UNKNOWN_FIELDS = json.dumps({f"f{number}": 0 for number in range(80_000)}).encode()
ATTACKS = {
    "a head without end": (lambda: [GET + b"X: ", *repeated(b"a" * 2**20, 60)], b" 431 "),
    "a query string without end": (lambda: [b"GET /?", *repeated(b"a" * 2**16, 160)], b" 431 "),
    "headers without end": (lambda: [GET, *repeated(b"a: b\r\n" * 10_000, 100)], b" 431 "),
    "a large head at once": (lambda: [GET + b"a: b\r\n" * 20_000 + b"\r\n"], b" 431 "),
    "no HTTP": (lambda: [b"\x16\x03\x01" + b"\0" * 10_000], b" 400 "),
    "chunks without end": (
        lambda: [POST + b"Transfer-Encoding: chunked\r\n\r\n", *repeated(b"1\r\na\r\n" * 10_000, 200)],
        b" 411 ",
    ),
    "a body too large": (
        lambda: [POST + b"Content-Length: 50000000\r\n\r\n", *repeated(b" " * 2**20, 50)],
        b" 413 ",
    ),
    "a packed body": (lambda: posted(b"\x1f\x8b" + b"\0" * 1000, b"Content-Encoding: gzip\r\n"), b" 415 "),
    "nested lists": (lambda: posted(b"[" * 1_000_000), b" 400 "),
    "wrong numbers": (lambda: posted(BAD_NUMBERS), b" 422 "),
    "unknown fields": (lambda: posted(UNKNOWN_FIELDS), b" 422 "),
    "one large value": (lambda: posted(b'{"queries": "%b"}' % (b"x" * 1_000_000)), b" 422 "),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_is_too_large_is_refused_before_it_costs_anything(address, name):
    """From two callers at once."""
    pieces, status = ATTACKS[name]
    with bystander(address), ThreadPoolExecutor(2) as callers:
        for received, seconds in callers.map(lambda _: sent(address, pieces()), range(2)):
            assert status in received.split(b"\r\n")[0] or not received  # the kernel may throw the reply away
            assert len(received) < 4000
            assert seconds < CLOSED_WITHIN_S
            if received:
                assert set(json.loads(received.split(b"\r\n\r\n")[-1])["errors"][0]) == {"field", "value", "remedy"}


SLOW = {
    "silence": (list, None),
    "a slow head": (lambda: [GET, *repeated(b"a: b\r\n", 100)], b" 408 "),
    "a slow body": (lambda: [POST + b"Content-Length: 1000\r\n\r\n", *repeated(b" ", 100)], b" 408 "),
    "a slow large body": (lambda: [POST + b"Content-Length: 1000000\r\n\r\n", *repeated(b" ", 100)], b" 408 "),
    "nothing after a reply": (lambda: [GET + b"\r\n"], b" 200 "),
}


@pytest.fixture(scope="module")
def slow_ones(address):
    """All of them at once, as each of them waits."""
    with bystander(address), ThreadPoolExecutor(len(SLOW)) as callers:
        found = callers.map(
            lambda pieces: sent(address, pieces(), pause_s=0.1), [pieces for pieces, _ in SLOW.values()]
        )
        return dict(zip(SLOW, found, strict=True))


@pytest.mark.parametrize("name", SLOW)
def test_what_is_too_slow_is_cut_off(slow_ones, name):
    (received, seconds), (_, status) = slow_ones[name], SLOW[name]
    assert seconds < CLOSED_WITHIN_S
    assert status is None or status in received.split(b"\r\n")[0]


def test_one_request_at_a_time_is_taken_from_a_connection(address):
    with bystander(address):
        received, seconds = sent(address, repeated((GET + b"\r\n") * 100, 100))
    assert seconds < CLOSED_WITHIN_S
    assert received.count(b"HTTP/1.1 200") <= 100


def test_a_reply_that_nobody_fetches_is_given_up(address):
    with bystander(address), contextlib.ExitStack() as stack:
        deaf = []
        for _ in range(20):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(CLOSED_WITHIN_S)
            connection.connect(address)
            connection.sendall(f"GET /openapi.json HTTP/1.1\r\nHost: x\r\n{TOKEN}\r\n".encode())
            deaf.append(connection)
        time.sleep(2)  # longer than the service waits for them
        for connection in deaf:
            with contextlib.suppress(ConnectionError):
                while connection.recv(65536):
                    pass


def test_more_half_open_connections_than_there_are_places_lock_nobody_out(address):
    """They make room for one another and for a caller who completes a request, and none of them stays."""
    with contextlib.ExitStack() as stack:
        held = []
        with bystander(address):
            for number in range(3 * ConnectionLimits().max_connections):
                time.sleep(0.05 * (number % 50 == 0))  # no flash: the machine of the test has to accept them as well
                connection = stack.enter_context(socket.create_connection(address, timeout=CLOSED_WITHIN_S))
                with contextlib.suppress(ConnectionError):
                    connection.sendall(b"GET / HTTP/1.1\r\n")
                held.append(connection)
            started = time.monotonic()
            for connection in held:
                with contextlib.suppress(ConnectionError):
                    while connection.recv(4096):
                        pass
            assert time.monotonic() - started < CLOSED_WITHIN_S


def test_an_unknown_caller_s_body_is_not_waited_for(address):
    head = b"POST /v1/queries HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(head)
        received = connection.recv(4096)
        assert b" 401 " in received.split(b"\r\n")[0]
        assert b"connection: close" in received


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (POST + b"Content-Length: 50000000\r\n\r\n", b" 413 "),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n", b" 411 "),
        (b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n", b" 405 "),
    ],
)
def test_a_connection_ends_with_the_response_to_a_body_that_is_not_read(address, head, status):
    received, seconds = sent(address, [head])
    assert status in received.split(b"\r\n")[0]
    assert b"\r\nconnection: close\r\n" in received
    assert seconds < CLOSED_WITHIN_S


def test_a_connection_stays_open_after_a_body_that_was_read(address):
    received, _ = sent(address, posted(b"{}"))
    assert b" 422 " in received.split(b"\r\n")[0]
    assert b"connection: close" not in received


def test_a_large_body_that_is_right_is_answered(address):
    features = np.full((2, 3), 0.1234567890123).tolist()
    body = {"queries": [{"features": features, "group": "red"} for _ in range(1024)]}
    response = httpx.post(
        "http://{}:{}/v1/queries".format(*address),
        json=body,
        headers={"Authorization": f"Bearer {ANALYST}"},
        timeout=60,
    )
    assert len(json.dumps(body)) > 2**16
    assert len(response.json()["replies"]) == 1024


def test_a_reply_in_several_pieces_does_not_wait_for_the_caller_to_acknowledge_the_first(address):
    """The kernel delays that by 40 ms, on a connection that stays open."""
    times_s = []
    with socket.create_connection(address, timeout=10) as connection:
        for _ in range(20):
            started = time.perf_counter()
            connection.sendall(GET + b"\r\n")
            received = b""
            while not received.endswith(b"}"):
                received += connection.recv(65536)
            times_s.append(time.perf_counter() - started)
    assert min(times_s[5:]) < 0.035


def own_address():
    """An address of this machine that is not its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


@pytest.mark.slow
def test_a_network_that_opens_many_connections_waits_and_known_callers_do_not(tmp_path, monkeypatch):
    """Of a stranger that left meanwhile nothing is read."""
    here = own_address()
    if here.startswith("127."):
        pytest.skip("this machine has no address but its loopback")
    held, read = [], []
    begin, receive = LimitedProtocol._begin, LimitedProtocol.data_received
    monkeypatch.setattr(LimitedProtocol, "_begin", lambda self: (held.append(self), begin(self)))
    monkeypatch.setattr(LimitedProtocol, "data_received", lambda self, data: (read.append(data), receive(self, data)))
    limits = ConnectionLimits(arrivals=RequestRate(per_s=0.01, burst=5.0))
    everywhere = "0.0.0.0"  # noqa: S104 - the test asks by two of this machine's addresses
    with running(tmp_path / "ledger.sqlite", host=everywhere, limits=limits, tokens=tokens_of_both_roles()) as url:
        port = int(url.rpartition(":")[2])

        def status(address, head):
            return sent((address, port), [head + b"Connection: close\r\n\r\n"])[0].split(b" ", 2)[1]

        stranger = b"GET /v1/budget HTTP/1.1\r\nHost: x\r\n"
        # Connections of a known caller do not count, and neither do those of this machine, such as a proxy.
        assert {status(here, GET) for _ in range(12)} == {b"200"} and not held
        assert {status("127.0.0.1", stranger) for _ in range(12)} == {b"401"} and not held
        assert [status(here, stranger) for _ in range(5)] == [b"401"] * 5 and not held
        # The next ones wait, those of a neighbour with a token too, and are answered.
        assert status(here, stranger) == b"401" and len(held) == 1
        assert status(here, GET) == b"200" and len(held) == 2
        before = len(read)
        for _ in range(20):
            with socket.create_connection((here, port)) as leaving:
                leaving.sendall(stranger + b"\r\n")
        ended = time.monotonic() + 30
        while len(held) < 22 and time.monotonic() < ended:
            time.sleep(0.05)
        assert len(held) == 22 and len(read) == before
        assert status(here, GET) == b"200"
