"""Several services behind one address: each answers as it does by itself, and none hears of another."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager

import httpx
import pytest
from browser import Browser, barriers, faults, needs_axe, opened_tab
from serving import ANALYST, free_port, ids, open_backend, table_votes, tokens_of_both_roles

from aggregator.client import AggregatorClient, QueryError
from aggregator.service.auth import RequestRate, read_tokens
from aggregator.service.server import HttpServer, Runs, ServiceSettings, bind
from fairpate.run.context import RunDirectory
from fairpate.run.serve import _behind_gateway

OTHER = "another-token-of-the-tests"
AS_ANALYST = {"Authorization": f"Bearer {ANALYST}"}


@contextmanager
def in_front(folder):
    """The address in front of the runs ``one`` and ``two``, and their servers."""
    servers, backends = {}, []
    for name, tokens in (
        ("one", tokens_of_both_roles()),
        ("two", read_tokens({"FAIRPATE_ANALYST_TOKEN": f"{ANALYST}\n{OTHER}"})),
    ):
        backend = open_backend(folder / f"{name}.sqlite", count_votes=lambda q, s=name: table_votes(q, salt=len(s)))
        settings = ServiceSettings(port=free_port(), tokens=tokens, rate=RequestRate(per_s=1000, burst=1000))
        servers[name] = (HttpServer(backend, settings), settings)
        backends.append(backend)
    front = ServiceSettings(port=free_port())
    ports = {name: settings.port for name, (_, settings) in servers.items()}
    server = HttpServer(Runs(ports=ports), front)
    yield front.url, servers
    for each, _ in servers.values():
        each.stop()
    server.stop()
    for backend in backends:
        backend.close()


@pytest.fixture
def gateway(tmp_path):
    with in_front(tmp_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def standing(tmp_path_factory):
    """For tests that ask nothing of a run."""
    with in_front(tmp_path_factory.mktemp("standing")) as opened:
        yield opened


def test_the_port_of_a_run_is_kept_for_its_service_until_that_listens(tmp_path):
    run = RunDirectory(root=tmp_path)
    with ExitStack() as held:
        ports = [_behind_gateway(run, ServiceSettings(), held).port for _ in range(3)]
        assert len(set(ports)) == 3
        for port in ports:
            with closing(socket.socket()) as stranger, pytest.raises(OSError, match="in use"):
                stranger.bind(("127.0.0.1", port))
            with closing(bind("127.0.0.1", port, timeout_s=0)) as listening, closing(socket.socket()) as caller:
                caller.connect(listening.getsockname())


def test_each_run_answers_under_its_own_path_as_it_does_by_itself(gateway):
    url, servers = gateway
    _, alone = servers["one"]
    with AggregatorClient(url, token=ANALYST) as client, pytest.raises(QueryError, match="/v1/runs/NAME of one"):
        client.budget()
    through, direct = f"{url}/v1/runs/one", alone.url
    asked = httpx.post(f"{through}/v1/queries", json=ids(range(20)), headers=AS_ANALYST)
    again = httpx.post(f"{direct}/v1/queries", json=ids(range(20)), headers=AS_ANALYST)
    assert asked.json() == again.json()
    for path in ("/v1/statement", "/v1/nothing", "/v1/queries/xyz", "/docs", "/"):
        there, here = (httpx.get(base + path, headers=AS_ANALYST) for base in (through, direct))
        assert (there.status_code, there.text) == (here.status_code, here.text)
        assert there.headers.get("content-security-policy") == here.headers.get("content-security-policy")
    assert httpx.get(f"{url}/v1/runs/two/v1/budget", headers=AS_ANALYST).json()["queries_submitted"] == 0


def test_the_client_of_one_service_is_the_client_of_one_run(gateway):
    url, _ = gateway
    with AggregatorClient(f"{url}/v1/runs/two", token=ANALYST) as client:
        client.ask([1, 2, 3])
        assert client.budget().queries_submitted == 3


def test_tokens_are_those_of_the_run_and_a_list_shows_only_what_knows_them(gateway):
    url, _ = gateway
    for token, expected in ((OTHER, ["two"]), (ANALYST, ["one", "two"]), ("unknown", [])):
        headers = {"Authorization": f"Bearer {token}"}
        assert [run["name"] for run in httpx.get(f"{url}/v1/runs", headers=headers).json()["runs"]] == expected
        assert (httpx.get(f"{url}/v1/runs/one/v1/budget", headers=headers).status_code == 200) == ("one" in expected)
    assert "one" not in httpx.get(url).text.split()


def test_no_line_has_the_address_of_a_caller_whose_token_a_run_knows(gateway, caplog):
    caplog.set_level("INFO", "fairpate.requests")
    for path in ("/v1/runs", "/v1/runs/one/v1/budget"):
        httpx.get(gateway[0] + path, headers=AS_ANALYST)
    told = [record for record in caplog.records if record.name == "fairpate.requests"]
    assert len(told) >= 3
    assert not [record.address for record in told if record.address]


@pytest.mark.parametrize("path", ["/v1/runs/three/", "/v1/runs/..%2fone/v1/budget", "/v1/runs/%00/", "/v1/other"])
def test_what_is_no_run_is_explained(standing, path):
    url, _ = standing
    answer = httpx.get(url + path, headers=AS_ANALYST)
    assert answer.status_code == 404
    assert answer.json()["errors"][0]["remedy"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/runs/one%2F@127.0.0.1:{port}/index.html",
        "/v1/runs/one%2f@127.0.0.1:{port}/v1/budget",
        "/v1/runs/%6fne/@127.0.0.1:{port}/",
        "/v1/runs/one//127.0.0.1:{port}/",
        "/v1/runs/one/@127.0.0.1:{port}/",
        "/v1/runs/one/..%2f..%2f@127.0.0.1:{port}/",
        "/v1/runs/one%3a{port}/livez",
        "/v1/runs/one%2f0/livez",
        "/v1/runs/one/\\127.0.0.1:{port}/",
        "/v1/runs/one/http://127.0.0.1:{port}/",
    ],
)
def test_no_path_leads_to_another_host_or_port(standing, path):
    url, _ = standing
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.1)
        with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)) as asked:
            asked.request("GET", path.format(port=elsewhere.getsockname()[1]))
            assert asked.getresponse().status in (400, 401, 404)
        with pytest.raises(TimeoutError):
            elsewhere.accept()


def test_a_request_is_passed_on_as_it_was_sent(gateway):
    """With no header of the gateway's own: who asks for no compression gets none."""
    url, _ = gateway
    with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)) as asked:
        asked.request("GET", "/v1/runs/one/docs", headers=AS_ANALYST)
        answer = asked.getresponse()
        assert answer.status == 200
        assert answer.headers["Content-Encoding"] is None
        assert b"<html" in answer.read()


def test_a_run_that_is_gone_is_503_and_the_other_goes_on(gateway):
    url, servers = gateway
    assert httpx.get(f"{url}/readyz").status_code == 200
    servers["one"][0].stop()
    gone = httpx.get(f"{url}/v1/runs/one/v1/budget", headers=AS_ANALYST)
    assert (gone.status_code, gone.headers["Retry-After"]) == (503, "2")
    assert httpx.get(f"{url}/v1/runs/two/v1/budget", headers=AS_ANALYST).status_code == 200
    assert httpx.get(f"{url}/readyz").status_code == 503
    assert httpx.get(f"{url}/livez").status_code == 200


def test_bodies_and_headers_keep_their_limits(gateway):
    url, _ = gateway
    there = f"{url}/v1/runs/one/v1/queries"
    assert httpx.post(there, content=iter([b"{}"]), headers=AS_ANALYST).status_code == 411
    assert httpx.post(there, content=b" " * (1 << 20) * 3, headers=AS_ANALYST).status_code == 413
    assert httpx.post(there, content=b"{", headers=AS_ANALYST).status_code == 422
    answer = httpx.get(f"{url}/v1/runs/one/v1/budget", headers={**AS_ANALYST, "X-Request-Id": "night-7"})
    assert answer.headers.get_list("x-request-id") == ["night-7"]


def test_strangers_are_told_apart_by_their_own_address_and_cannot_make_one_up(gateway):
    url, _ = gateway
    there, forged = f"{url}/v1/runs/one/v1/budget", [{"X-Forwarded-For": f"10.0.0.{n}"} for n in range(40)]
    first, second = (httpx.Client(transport=httpx.HTTPTransport(local_address=f"127.0.0.{n}")) for n in (2, 3))
    with first, second:
        assert 429 in [first.get(there, headers=header).status_code for header in forged]
        assert second.get(there).status_code == 401
        assert first.get(there, headers=AS_ANALYST).status_code == 200


def test_live_states_pass_and_a_view_that_leaves_is_noticed(gateway):
    url, _ = gateway
    for _ in range(20):  # more than one caller may hold at once
        with httpx.stream("GET", f"{url}/v1/runs/one/v1/events", headers=AS_ANALYST) as events:
            if events.status_code == 503:
                time.sleep(0.3)
                continue
            assert next(events.iter_lines()) == "event: state"
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        with httpx.stream("GET", f"{url}/v1/runs/one/v1/events", headers=AS_ANALYST) as events:
            if events.status_code == 200:
                return
        time.sleep(0.2)
    pytest.fail("places stay taken by views that left")


def test_slow_voters_of_one_run_do_not_hold_up_another(tmp_path):
    waiting = threading.Event()

    def slow(questions):
        waiting.wait(20)
        return table_votes(questions)

    servers, backends = [], []
    for name, votes in (("slow", slow), ("quick", table_votes)):
        backend = open_backend(tmp_path / f"{name}.sqlite", count_votes=votes)
        backends.append(backend)
        servers.append((name, HttpServer(backend, settings := ServiceSettings(port=free_port())), settings.port))
    front = ServiceSettings(port=free_port())
    gateway = HttpServer(Runs(ports={name: port for name, _, port in servers}), front)
    try:
        asking = threading.Thread(
            target=lambda: httpx.post(f"{front.url}/v1/runs/slow/v1/queries", json=ids([1]), timeout=60)
        )
        asking.start()
        assert httpx.post(f"{front.url}/v1/runs/quick/v1/queries", json=ids([1]), timeout=5).status_code == 200
        waiting.set()
        asking.join(20)
    finally:
        for _, server, _ in servers:
            server.stop()
        gateway.stop()
        for backend in backends:
            backend.close()


@pytest.mark.slow
def test_the_page_of_a_run_works_under_its_path(gateway, tmp_path):
    url, _ = gateway
    with opened_tab(tmp_path / "profile") as tab:
        tab.open(f"{url}/v1/runs/one", width=390, height=800)
        assert tab.run("location.pathname") == "/v1/runs/one/"
        tab.run(f"byId('token').value = {ANALYST!r}; byId('access').requestSubmit()")
        assert tab.until("!byId('main').hidden && /left/.test(byId('left').textContent)", seconds=20)
        assert faults(tab) == []
        tab.open(f"{url}/v1/runs/two/", width=390, height=800)
        assert not tab.run("byId('entry').hidden")  # it takes no token that was given to the other
        assert not any("/two/v1/" in asked for asked in tab.requests)


@needs_axe
@pytest.mark.slow
def test_the_front_page_has_no_barrier(gateway, tmp_path, monkeypatch):
    """It has no script that says that it is drawn."""
    url, _ = gateway
    monkeypatch.setattr(Browser, "is_drawn", "document.readyState === 'complete'")
    with opened_tab(tmp_path / "profile") as tab:
        tab.open(url, width=1280, height=800)
        for width in (1280, 390):
            tab.resize(width=width, height=800)
            assert barriers(tab) == []
            assert tab.run("document.documentElement.scrollWidth") <= width
        assert tab.run("getComputedStyle(document.body).maxWidth") == "1024px"  # its style is allowed
        assert faults(tab) == []


def test_a_name_that_is_no_plain_word_is_refused():
    with pytest.raises(ValueError, match="rename the run's folder"):
        Runs(ports={"a b": 1})
