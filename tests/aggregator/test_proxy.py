"""Several services behind one address, by the configuration for nginx in deploy/: each answers as it does by itself."""

from __future__ import annotations

import http.client
import http.server
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import pytest
from browser import faults, opened_tab
from certificates import certificate
from serving import ANALYST, OPERATOR, free_port, ids, open_backend, table_votes, tokens_of_both_roles

from aggregator.client import AggregatorClient
from aggregator.service.actor import ServiceSettings
from aggregator.service.auth import read_tokens
from fairpate.http_server import HttpServer, RequestRate

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = [
    pytest.mark.usefixtures("light_runs"),
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
]
CONFIGURATION = Path(__file__).parents[2] / "deploy" / "nginx.conf"
OTHER = "another-token-of-the-tests"
AS_ANALYST = {"Authorization": f"Bearer {ANALYST}"}
MAIN = """
user root;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/fairpate.conf;
}}
"""


class Login(http.server.BaseHTTPRequestHandler):
    """A login proxy in the place of oauth2-proxy: a cookie names the person who has logged in."""

    def do_GET(self):
        person = re.search(r"person=(\S+)", self.headers.get("Cookie", ""))
        self.send_response(202 if person else 401)
        if person:
            self.send_header("X-Auth-Request-Email", person[1])
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@contextmanager
def behind_nginx(folder, ports):
    """nginx with the shipped configuration; only ports, certificates and the place of the map are the test's. With
    certificates in ``folder``, it speaks TLS on one port for both names, as shipped."""
    text = CONFIGURATION.read_text(encoding="utf-8")
    for name, port in ports.items():
        assert f"127.0.0.1:{name}" in text
        text = text.replace(f"127.0.0.1:{name}", f"127.0.0.1:{port}")
    text = text.replace("/etc/nginx/fairpate-people.map", f"{folder}/people.map")
    programs = people = free_port()
    if has_tls := (folder / "cert.pem").exists():
        text = text.replace("listen 443 ssl;", f"listen 127.0.0.1:{programs} ssl;")
        text = re.sub(r"/etc/nginx/fairpate-(cert|key)\.pem", rf"{folder}/\1.pem", text)
    else:
        people = free_port()
        for port in (programs, people):
            text = text.replace("listen 443 ssl;", f"listen 127.0.0.1:{port};", 1)
        text = re.sub(r" *ssl_certificate.*\n", "", text)
    (folder / "people.map").write_text(f'alice@example.org "Bearer {ANALYST}";\n', encoding="utf-8")
    (folder / "fairpate.conf").write_text(text, encoding="utf-8")
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder), encoding="utf-8")
    command = [NGINX, "-p", folder, "-c", folder / "nginx.conf"]
    tested = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)  # noqa: S603
    assert tested.returncode == 0 and "test is successful" in tested.stderr, tested.stderr
    assert "[warn]" not in tested.stderr
    command += ["-g", "daemon off;"]
    with subprocess.Popen(command) as process:  # noqa: S603
        try:
            deadline_s = time.monotonic() + 20
            while time.monotonic() < deadline_s and process.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", people), timeout=1).close()
                    break
                except OSError:
                    time.sleep(0.05)
            assert process.poll() is None, (folder / "error.log").read_text()
            scheme = "https" if has_tls else "http"
            yield f"{scheme}://127.0.0.1:{programs}", f"{scheme}://127.0.0.1:{people}"
        finally:
            process.terminate()


@contextmanager
def in_front(folder, votes=None):
    """The address in front of the runs ``adult`` and ``digits``, that for people, and the servers by name."""
    servers, backends = {}, []
    for name, tokens in (
        ("adult", tokens_of_both_roles()),
        ("digits", read_tokens({"FAIRPATE_ANALYST_TOKEN": f"{ANALYST}\n{OTHER}"})),
    ):
        counted = (votes or {}).get(name, lambda q, s=name: table_votes(q, salt=len(s)))
        backend = open_backend(folder / f"{name}.sqlite", count_votes=counted)
        settings = ServiceSettings(port=free_port(), tokens=tokens, rate=RequestRate(per_s=1000, burst=1000))
        servers[name] = (HttpServer(backend.app, settings), settings)
        backends.append(backend)
    login = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Login)
    threading.Thread(target=login.serve_forever, daemon=True).start()
    ports = {8517: servers["adult"][1].port, 8518: servers["digits"][1].port, 4180: login.server_address[1]}
    try:
        with behind_nginx(folder, ports) as (url, people):
            yield url, people, servers
    finally:
        login.shutdown()
        login.server_close()
        for server, _ in servers.values():
            server.stop()
        for backend in backends:
            backend.close()


@pytest.fixture
def proxy(tmp_path):
    with in_front(tmp_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def standing(tmp_path_factory):
    """For tests that ask nothing of a run."""
    with in_front(tmp_path_factory.mktemp("standing")) as opened:
        yield opened


def test_each_run_answers_under_its_own_path_as_it_does_by_itself(proxy):
    url, _, servers = proxy
    _, alone = servers["adult"]
    through, direct = f"{url}/v1/runs/adult", alone.url
    asked = httpx.post(f"{through}/v1/queries", json=ids(range(20)), headers=AS_ANALYST)
    again = httpx.post(f"{direct}/v1/queries", json=ids(range(20)), headers=AS_ANALYST)
    assert asked.json() == again.json()
    for path in ("/v1/statement", "/v1/nothing", "/v1/queries/xyz", "/docs", "/"):
        there, here = (httpx.get(base + path, headers=AS_ANALYST) for base in (through, direct))
        assert (there.status_code, there.text) == (here.status_code, here.text)
        for name in ("content-security-policy", "cache-control", "x-content-type-options"):
            assert there.headers.get(name) == here.headers.get(name)
    assert httpx.get(f"{url}/v1/runs/digits/v1/budget", headers=AS_ANALYST).json()["queries_submitted"] == 0


def test_the_client_of_one_service_is_the_client_of_one_run(proxy):
    with AggregatorClient(f"{proxy[0]}/v1/runs/digits", token=ANALYST) as client:
        client.ask([1, 2, 3])
        assert client.budget().queries_submitted == 3


def test_tokens_are_those_of_the_run(standing):
    url, _, _ = standing
    for token, expected in ((OTHER, {"digits"}), (ANALYST, {"adult", "digits"}), ("unknown", set())):
        headers = {"Authorization": f"Bearer {token}"}
        asked = {name: httpx.get(f"{url}/v1/runs/{name}/v1/me", headers=headers) for name in ("adult", "digits")}
        assert {name for name, answer in asked.items() if answer.is_success} == expected


def test_a_person_who_logged_in_elsewhere_is_charged_under_the_token_of_the_map(proxy):
    _, people, _ = proxy
    me = f"{people}/v1/runs/adult/v1/me"
    assert httpx.get(me).headers["location"] == "/oauth2/start"
    with httpx.Client(cookies={"person": "alice@example.org"}) as alice:
        assert alice.get(me).json()["name"] == "analyst-1"
        assert alice.post(f"{people}/v1/runs/adult/v1/queries", json=ids(range(5))).status_code == 200
        assert alice.get(me).json()["spent"]["queries"] == 5
    # A person without a line in the map has no token, and none that is brought along counts.
    brought = {"Authorization": f"Bearer {OPERATOR}"}
    with httpx.Client(cookies={"person": "mallory@example.org"}, headers=brought) as mallory:
        assert mallory.get(me).status_code == 401
    assert httpx.get(f"{people}/oauth2/auth").status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "/v1/runs/adult%2F@127.0.0.1:{port}/index.html",
        "/v1/runs/adult%2f@127.0.0.1:{port}/v1/budget",
        "/v1/runs/%61dult/@127.0.0.1:{port}/",
        "/v1/runs/adult//127.0.0.1:{port}/",
        "/v1/runs/adult/@127.0.0.1:{port}/",
        "/v1/runs/adult/..%2f..%2f@127.0.0.1:{port}/",
        "/v1/runs/adult%3a{port}/livez",
        "/v1/runs/adult%2f0/livez",
        "/v1/runs/adult/\\127.0.0.1:{port}/",
        "/v1/runs/adult/http://127.0.0.1:{port}/",
    ],
)
def test_no_path_leads_to_another_host_or_port(standing, path):
    url, _, _ = standing
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.1)
        with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)) as asked:
            asked.request("GET", path.format(port=elsewhere.getsockname()[1]))
            assert asked.getresponse().status in (400, 401, 404)
        with pytest.raises(TimeoutError):
            elsewhere.accept()


def test_a_request_is_passed_on_as_it_was_sent(proxy):
    url, _, _ = proxy
    with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)) as asked:
        asked.request("GET", "/v1/runs/adult/docs", headers=AS_ANALYST)
        answer = asked.getresponse()
        assert answer.status == 200
        assert answer.headers["Content-Encoding"] is None
        assert b"<html" in answer.read()


def test_a_run_that_is_gone_is_retried_and_the_other_goes_on(proxy):
    url, _, servers = proxy
    servers["adult"][0].stop()
    # The status that clients of this project ask again after.
    assert httpx.get(f"{url}/v1/runs/adult/v1/budget", headers=AS_ANALYST).status_code == 502
    assert httpx.get(f"{url}/v1/runs/digits/v1/budget", headers=AS_ANALYST).status_code == 200


def test_bodies_and_headers_keep_their_limits(proxy):
    url, _, _ = proxy
    there = f"{url}/v1/runs/adult/v1/queries"
    assert httpx.post(there, content=iter([b"{}"]), headers=AS_ANALYST).status_code == 422  # nginx counts its bytes
    assert httpx.post(there, content=b" " * (1 << 20) * 3, headers=AS_ANALYST).status_code == 413
    assert httpx.post(there, content=b" " * (1 << 20) * 5, headers=AS_ANALYST).status_code == 413
    assert httpx.post(there, content=b"{", headers=AS_ANALYST).status_code == 422
    answer = httpx.get(f"{url}/v1/runs/adult/v1/budget", headers={**AS_ANALYST, "X-Request-Id": "night-7"})
    assert answer.headers.get_list("x-request-id") == ["night-7"]


def test_strangers_are_told_apart_by_their_own_address_and_cannot_make_one_up(proxy):
    url, _, _ = proxy
    there, forged = f"{url}/v1/runs/adult/v1/budget", [{"X-Forwarded-For": f"10.0.0.{n}"} for n in range(40)]
    first, second = (httpx.Client(transport=httpx.HTTPTransport(local_address=f"127.0.0.{n}")) for n in (2, 3))
    with first, second:
        assert 429 in [first.get(there, headers=header).status_code for header in forged]
        assert second.get(there).status_code == 401
        assert first.get(there, headers=AS_ANALYST).status_code == 200


def test_live_states_pass_and_a_view_that_leaves_is_noticed(proxy):
    url, _, _ = proxy
    for _ in range(20):  # more than one caller may hold at once
        with httpx.stream("GET", f"{url}/v1/runs/adult/v1/events", headers=AS_ANALYST) as events:
            if events.status_code == 503:
                time.sleep(0.3)
                continue
            assert next(events.iter_lines()) == "event: state"
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        with httpx.stream("GET", f"{url}/v1/runs/adult/v1/events", headers=AS_ANALYST) as events:
            if events.status_code == 200:
                return
        time.sleep(0.2)
    pytest.fail("places stay taken by views that left")


def test_slow_voters_of_one_run_do_not_hold_up_another(tmp_path):
    waiting = threading.Event()

    def slow(questions):
        waiting.wait(20)
        return table_votes(questions)

    def ask(name, timeout_s):
        queries = f"{url}/v1/runs/{name}/v1/queries"
        return httpx.post(queries, json=ids([1]), headers=AS_ANALYST, timeout=timeout_s).status_code

    with in_front(tmp_path, votes={"adult": slow}) as (url, _, _):
        asking = threading.Thread(target=ask, args=("adult", 60))
        asking.start()
        assert ask("digits", 5) == 200
        waiting.set()
        asking.join(20)


def test_a_redirect_does_not_repeat_the_host_that_was_asked_for(standing):
    answer = httpx.get(f"{standing[0]}/v1/runs/adult", headers={"Host": "evil.example"})
    assert (answer.status_code, answer.headers["location"]) == (308, "/v1/runs/adult/")


def test_with_its_certificates_it_speaks_tls_alone_and_tells_the_names_apart(tmp_path):
    """As shipped: both servers on one port, where the name that a client asks for decides."""
    names = ("fairpate.example.org", "people.fairpate.example.org")
    cert, _ = certificate(tmp_path, names=names)
    trusting = ssl.create_default_context(cafile=str(cert))
    with in_front(tmp_path) as (url, _, _), httpx.Client(verify=trusting, headers=AS_ANALYST) as client:
        programs, people = ({"headers": {"Host": name}, "extensions": {"sni_hostname": name}} for name in names)
        asked = client.post(f"{url}/v1/runs/adult/v1/queries", json=ids(range(3)), **programs)
        spoken = asked.extensions["network_stream"].get_extra_info("ssl_object").version()
        assert asked.status_code == 200 and spoken in ("TLSv1.2", "TLSv1.3")
        assert client.get(f"{url}/v1/runs/adult/v1/me", **people).headers["location"] == "/oauth2/start"
        # A caller of the address alone is a program: the first server is the default.
        assert client.get(f"{url}/v1/runs/adult/v1/me", extensions={"sni_hostname": names[0]}).status_code == 200
        assert httpx.get(url.replace("https", "http")).status_code == 400
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(url)


def test_one_address_sends_no_more_requests_than_its_limit_and_another_is_not_slowed_down(standing):
    url, _, _ = standing
    first, second = (httpx.Client(transport=httpx.HTTPTransport(local_address=f"127.0.0.{n}")) for n in (4, 5))
    with first, second:
        began_s = time.monotonic()
        found = [first.get(f"{url}/v1/runs/adult/nothing", headers=AS_ANALYST).status_code for _ in range(400)]
        # 200 at once, and 100 a second.
        passed, seconds = sum(status != 429 for status in found), time.monotonic() - began_s
        assert set(found[:200]) == {404}
        assert passed <= 202 + 100 * seconds
        assert second.get(f"{url}/v1/runs/adult/v1/me", headers=AS_ANALYST).status_code == 200
        if seconds < 1.5:  # otherwise this machine is too busy to send more than the limit
            assert 429 in found


def test_one_address_holds_no_more_connections_than_its_limit(standing):
    url, _, _ = standing
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    head = b"POST /v1/runs/adult/v1/queries HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
    with ExitStack() as opened:
        # Their bodies are held back, so that none of them ends.
        for _ in range(32):
            held = opened.enter_context(socket.create_connection(address, source_address=("127.0.0.6", 0)))
            held.sendall(head)
        answers = []
        for place in (6, 7):
            transport = httpx.HTTPTransport(local_address=f"127.0.0.{place}")
            client = opened.enter_context(httpx.Client(transport=transport, headers=AS_ANALYST))
            answers.append(client)
        deadline_s = time.monotonic() + 10
        while answers[0].get(f"{url}/v1/runs/adult/v1/me").status_code != 429 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert [each.get(f"{url}/v1/runs/adult/v1/me").status_code for each in answers] == [429, 200]


def test_a_header_longer_than_nginx_reads_does_not_reach_a_service(standing):
    url, _, _ = standing
    answer = httpx.get(f"{url}/v1/runs/adult/v1/me", headers={**AS_ANALYST, "X-Request-Id": "a" * 40_000})
    assert answer.status_code == 400 and "x-request-id" not in answer.headers


@pytest.mark.slow
def test_the_page_of_a_run_works_under_its_path(proxy, tmp_path):
    url, _, _ = proxy
    with opened_tab(tmp_path / "profile") as tab:
        tab.open(f"{url}/v1/runs/adult", width=390, height=800)
        assert tab.run("location.pathname") == "/v1/runs/adult/"
        tab.run(f"byId('token').value = {ANALYST!r}; byId('access').requestSubmit()")
        assert tab.until("!byId('main').hidden && /left/.test(byId('left').textContent)", seconds=20)
        assert faults(tab) == []
        tab.open(f"{url}/v1/runs/digits/", width=390, height=800)
        assert not tab.run("byId('entry').hidden")  # it takes no token that was given to the other
        assert not any("/digits/v1/" in asked for asked in tab.requests)
