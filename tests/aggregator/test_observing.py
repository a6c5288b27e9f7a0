"""What tools hear of a service: ids, lines and spans of requests that would be the same with other votes."""

from __future__ import annotations

import collections
import concurrent.futures
import http.server
import io
import json
import logging
import pathlib
import re
import socket
import ssl
import subprocess
import sys
import threading
import time

import httpx
import pytest
from certificates import certificate
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from serving import ANALYST, OPERATOR, ids, running, table_votes, tokens_of_both_roles, until

from aggregator.session import VotesUnavailableError
from fairpate.http_server import Buckets, JsonLines, PrivateFile, RequestRate, TlsFiles, network_of, tracer_to

pytestmark = pytest.mark.usefixtures("light_runs")

AS_ANALYST = {"Authorization": f"Bearer {ANALYST}"}


@pytest.fixture
def lines():
    """Everything that is logged, as JSON lines."""
    sink = io.StringIO()
    handler = logging.StreamHandler(sink)
    handler.setFormatter(JsonLines())
    root, requests = logging.getLogger(), logging.getLogger("fairpate.requests")
    root.addHandler(handler)
    requests.setLevel(logging.INFO)
    yield lambda: [
        json.loads(line) for line in sink.getvalue().splitlines() if "fairpate" in line or "aggregator" in line
    ]
    root.removeHandler(handler)
    requests.setLevel(logging.NOTSET)


def spans_of(exporter, *, count):
    deadline_s = time.monotonic() + 10
    while len(exporter.get_finished_spans()) < count and time.monotonic() < deadline_s:
        time.sleep(0.01)  # a span ends a moment after its reply
    return [
        {"name": span.name, "parent": span.parent and f"{span.parent.trace_id:032x}", **dict(span.attributes)}
        for span in exporter.get_finished_spans()
    ]


def test_logs_and_traces_are_the_same_with_other_votes(tmp_path, lines):
    """Two ensembles that disagree everywhere: the same lines and spans, but for times."""

    def told(folder, salt):
        exporter, begun = InMemorySpanExporter(), len(lines())
        with (
            running(
                folder / "ledger.sqlite",
                count_votes=lambda q: table_votes(q, salt=salt),
                tokens=tokens_of_both_roles(),
                tracer=tracer_to(SimpleSpanProcessor(exporter)),
            ) as url,
            httpx.Client(base_url=url, headers=AS_ANALYST) as client,
        ):
            kinds = []
            for number in range(20):
                reply = client.post("/v1/queries", json=ids([number]), headers={"X-Request-Id": f"q-{number}"})
                kinds.append(reply.json()["replies"][0]["label"])
            paths = ("/v1/state", "/v1/nothing", "/metrics", "/")
            for path in paths:
                client.get(path, headers={"X-Request-Id": "read"})
        seen = [{name: value for name, value in line.items() if name != "time"} for line in lines()[begun:]]
        assert len(seen) == 20 + len(paths)
        for each in (*seen, *(spans := spans_of(exporter, count=len(seen)))):
            for name in ("caller", "fairpate.caller"):
                each.pop(name, None)  # a token without a name gets one at random
        return kinds, seen, spans

    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    (kinds, seen, spans), (other_kinds, other_seen, other_spans) = (told(f, salt) for salt, f in enumerate(folders))
    assert kinds != other_kinds
    assert None in kinds
    assert seen == other_seen
    assert spans == other_spans
    assert len(spans) == len(seen)


def test_a_line_names_the_request_and_never_the_token_or_the_question(service, lines):
    url = service(tokens=tokens_of_both_roles())
    asked = httpx.post(f"{url}/v1/queries", json=ids([7, 8]), headers={**AS_ANALYST, "X-Request-Id": "night-1"})
    assert asked.headers["x-request-id"] == "night-1"
    (line,) = lines()
    assert (line["request_id"], line["route"], line["status"], line["queries"]) == ("night-1", "/v1/queries", 200, 2)
    httpx.get(f"{url}/v1/budget?token=secret", headers={"Authorization": "Bearer guessed-guessed-guessed"})
    refused = lines()[-1]
    assert (refused["status"], refused["address"]) == (401, "127.0.0.1")
    assert "caller" not in refused
    text = json.dumps(lines())
    assert not any(word in text for word in (ANALYST, "guessed", "secret"))


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, 'a"b', "<script>"])
def test_a_request_id_that_is_no_plain_word_is_replaced(http, given):
    told = http.get("/livez", headers={"X-Request-Id": given}).headers["x-request-id"]
    assert told != given
    assert len(told) == 16


def test_every_response_says_its_request_id_errors_too(http):
    for path in ("/v1/budget", "/v1/nothing", "/v1/operator/ledger"):
        assert http.get(path, headers={"X-Request-Id": "one"}).headers["x-request-id"] == "one"
    assert http.get("/v1/budget", headers={"Authorization": "", "X-Request-Id": "two"}).headers["x-request-id"] == "two"


def test_what_goes_wrong_is_logged_under_the_id_of_its_request(service, lines):
    def gone(_):
        raise VotesUnavailableError("a teacher is gone")

    url = service(count_votes=gone, health_interval_s=60)
    httpx.post(f"{url}/v1/queries", json=ids([0]), headers={"X-Request-Id": "lost"})
    wrong = [line for line in lines() if line["level"] == "error"]
    assert [line["request_id"] for line in wrong] == ["lost"]


def test_a_span_goes_on_with_the_caller_s_trace(service):
    exporter = InMemorySpanExporter()
    url = service(tracer=tracer_to(SimpleSpanProcessor(exporter)))
    trace = "0af7651916cd43dd8448eb211c80319c"
    httpx.get(f"{url}/v1/budget", headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    (span,) = spans_of(exporter, count=1)
    assert (span["name"], span["parent"]) == ("GET /v1/budget", trace)


def test_spans_reach_a_collector_by_otlp(service, monkeypatch):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    tracer = tracer_to()
    httpx.get(f"{service(tracer=tracer)}/v1/budget")
    deadline_s = time.monotonic() + 10
    while not received and time.monotonic() < deadline_s:  # a span ends a moment after its reply
        tracer.span_processor.force_flush()
    tracer.span_processor.shutdown()
    collector.shutdown()
    collector.server_close()
    names = [span.name for each in received for r in each.resource_spans for s in r.scope_spans for span in s.spans]
    assert names == ["GET /v1/budget"]


def test_a_caller_s_requests_are_slowed_down_and_nobody_else_s(service):
    url = service(tokens=tokens_of_both_roles(), rate=RequestRate(per_s=0.5, burst=3))
    with httpx.Client(base_url=url, headers=AS_ANALYST) as client:
        statuses = [client.get("/v1/budget").status_code for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]
        refused = client.get("/v1/budget")
        assert int(refused.headers["Retry-After"]) in (1, 2)
        assert refused.json()["errors"][0]["field"] == "requests"
        assert client.get("/readyz").status_code == 200
        assert client.get("/v1/budget", headers={"Authorization": f"Bearer {OPERATOR}"}).status_code == 200


def test_guessing_tokens_is_slow_and_a_known_token_of_the_same_address_is_not(service):
    url = service(tokens=tokens_of_both_roles())
    with httpx.Client(base_url=url) as client:
        guesses = [
            client.get("/v1/budget", headers={"Authorization": f"Bearer {guess:032d}"}).status_code
            for guess in range(40)
        ]
        assert guesses.count(401) <= 25
        assert set(guesses) == {401, 429}
        assert client.get("/v1/budget", headers=AS_ANALYST).status_code == 200


FLOOD = {"livez": "/livez", "page": "/", "guess": "/v1/budget"}


@pytest.mark.parametrize("path", FLOOD)
def test_a_stranger_s_flood_is_slowed_down_counted_and_hardly_logged(service, lines, path):
    """Eight connections that ask as fast as they are answered; an analyst of the same address asks beside them."""
    url = service(tokens=tokens_of_both_roles())
    request, ended = f"GET {FLOOD[path]} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), time.monotonic() + 3
    host, _, port = url.removeprefix("http://").rpartition(":")

    def ask():
        statuses = collections.Counter()
        with socket.create_connection((host, int(port)), timeout=10) as connection, connection.makefile("rb") as reply:
            while time.monotonic() < ended:
                connection.sendall(request)
                statuses[int(reply.readline().split()[1])] += 1
                length = 0
                while (line := reply.readline()) != b"\r\n":
                    length = int(line.split(b":")[1]) if line.lower().startswith(b"content-length") else length
                reply.read(length)
        return statuses

    with concurrent.futures.ThreadPoolExecutor(8) as strangers, httpx.Client(base_url=url, headers=AS_ANALYST) as http:
        floods = [strangers.submit(ask) for _ in range(8)]
        time.sleep(0.5)
        assert {http.get("/v1/budget").status_code for _ in range(20)} == {200}
        told = sum((flood.result() for flood in floods), collections.Counter())
        assert httpx.get(f"{url}/livez", headers=AS_ANALYST).status_code == 200
        counted = http.get("/metrics").text
    # At once, and then the rate: 100 and 20 a second on open paths, 20 and 2 a second of guesses; refusals likewise, 50
    # and 2 a second, and one a second on each connection.
    assert told[429] > 0
    assert told.total() < (100 + 20 * 3.5 if path != "guess" else 20 + 2 * 3.5) + 50 + 2 * 3.5 + 8 * 4
    # Requests that are refused before their route is known.
    count = re.findall(r'fairpate_http_requests_total{method="GET",route="none",status="429"} (\S+)', counted)
    assert float(count[0]) == told[429]
    mine = [line for line in lines() if line["logger"] == "fairpate.requests" and "caller" not in line]
    assert len(mine) < 20 + 1 * 4 + 1
    assert {line["address"] for line in mine} == {"127.0.0.1"}


def test_refusals_without_a_line_are_counted_in_a_later_one(service, lines, monkeypatch):
    monkeypatch.setattr("fairpate.http_server._SUMMARY_S", 0.5)
    url = service(tokens=tokens_of_both_roles())
    with httpx.Client(base_url=url) as stranger:
        statuses = collections.Counter(stranger.get("/v1/budget").status_code for _ in range(60))
    until(lambda: sum(line.get("requests", 1) for line in lines() if line.get("status") in statuses) == 60)
    summaries = [line for line in lines() if "requests" in line]
    assert {line["status"] for line in summaries} == {401, 429}.intersection(line["status"] for line in summaries)
    assert summaries
    assert {line["address"] for line in summaries} == {"127.0.0.1"}
    assert len([line for line in lines() if line.get("status") in (401, 429)]) < 30


def test_an_address_counts_as_its_network_and_a_name_as_itself():
    assert network_of("192.0.2.7") == "192.0.2.7"
    assert network_of("2001:db8:1:2:3:4:5:6") == network_of("2001:db8:1:2::") == "2001:db8:1:2::/64"
    assert network_of("fe80::1%eth0") == "fe80::/64"
    assert network_of("unix:") == "unix:"


def test_a_bucket_fills_at_its_rate_and_few_are_kept():
    buckets = Buckets(RequestRate(per_s=2, burst=2))
    assert [buckets.wait_s("a", now_s=0) for _ in range(3)] == [0, 0, 0.5]
    assert buckets.wait_s("a", now_s=0.25) == 0.25
    assert buckets.wait_s("a", now_s=0.5) == 0
    for name in range(10_000):
        buckets.wait_s(str(name), now_s=1)
    assert len(buckets._levels) == 4096


def test_with_a_certificate_the_service_speaks_tls_and_nothing_else(service, tmp_path):
    cert, key = certificate(tmp_path)
    url = service(tls=TlsFiles(cert=cert, key=key), host="localhost", tokens=tokens_of_both_roles())
    assert url.startswith("https://localhost:")
    trusting = ssl.create_default_context(cafile=str(cert))
    with httpx.Client(base_url=url, headers=AS_ANALYST, verify=trusting) as client:
        assert client.post("/v1/queries", json=ids(range(3))).status_code == 200
        with client.stream("GET", "/v1/events") as events:
            assert next(events.iter_lines()) == "event: state"
    head = b"POST /v1/queries HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n"
    address = ("localhost", int(url.rpartition(":")[2]))
    with (
        socket.create_connection(address, timeout=10) as plain,
        trusting.wrap_socket(plain, server_hostname="localhost") as raw,
    ):
        raw.sendall(head + b" " * 100_000)  # refused before it is read, and the refusal arrives all the same
        received = b"".join(iter(lambda: raw.recv(65536), b""))
    assert b" 401 " in received.split(b"\r\n")[0]
    assert b"connection: close" in received
    assert received.endswith(b"}")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{url}/livez")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url.replace('https', 'http')}/livez")


def test_a_new_certificate_is_used_without_a_restart_and_a_bad_one_is_not(service, tmp_path, monkeypatch):
    monkeypatch.setattr("fairpate.http_server._TICKS_PER_LOOK", 2)
    cert, key = certificate(tmp_path)
    (tmp_path / "new").mkdir()
    port = int(service(tls=TlsFiles(cert=cert, key=key)).rpartition(":")[2])
    first = ssl.get_server_certificate(("localhost", port))
    new_cert, new_key = certificate(tmp_path / "new")
    cert.write_bytes(new_cert.read_bytes())  # half of a pair
    time.sleep(0.8)  # several looks
    assert ssl.get_server_certificate(("localhost", port)) == first
    key.write_bytes(new_key.read_bytes())
    deadline_s = time.monotonic() + 10
    while ssl.get_server_certificate(("localhost", port)) == first:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    with httpx.Client(verify=ssl.create_default_context(cafile=cert)) as http:
        answer = http.get(f"https://localhost:{port}/livez")
    assert "max-age" in answer.headers["strict-transport-security"]


def test_a_log_file_is_readable_by_its_owner_alone(tmp_path):
    path = tmp_path / "new.jsonl"
    PrivateFile(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_files_of_tls_that_cannot_be_used_are_refused_when_they_are_given(tmp_path):
    cert, key = certificate(tmp_path, password=b"secret")
    other = tmp_path / "other"
    other.mkdir()
    _, foreign = certificate(other)
    for given in (key, foreign, tmp_path / "missing.pem", cert):
        with pytest.raises(ValueError, match="cannot be used as certificate and key"):
            TlsFiles(cert=cert, key=given)


@pytest.mark.slow
def test_the_log_file_goes_on_after_a_rotation_and_a_restart(path, tmp_path):
    """In a process of its own, as in production: a process has one log."""
    script = """
import sys, httpx, pathlib
sys.path[:0] = sys.argv[3:]
from serving import running
log = pathlib.Path(sys.argv[2])
with running(pathlib.Path(sys.argv[1]), log_file=log) as url:
    httpx.get(f"{url}/v1/budget", headers={"X-Request-Id": "before"})
    log.rename(log.with_suffix(".1"))
    httpx.get(f"{url}/v1/budget", headers={"X-Request-Id": "after"})
"""
    tests, log = pathlib.Path(__file__).parents[1], tmp_path / "service.jsonl"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", script, path, log, tests, tests.parent], check=True, timeout=60)  # noqa: S603
    ours = [json.loads(line) for line in log.read_text().splitlines() if "fairpate.requests" in line]
    assert [line["request_id"] for line in ours] == ["after"]
    before = [json.loads(line) for line in log.with_suffix(".1").read_text().splitlines() if "requests" in line]
    assert [line["request_id"] for line in before if line["logger"] == "fairpate.requests"] == ["after", "before"]
