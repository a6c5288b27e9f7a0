"""A finished run, served: its ledger goes on, its teachers stay, and losing them never changes or loses an answer."""

import concurrent.futures
import contextlib
import csv
import errno
import json
import os
import shutil
import signal
import socket
from functools import partial

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
import torch
from page_references import References
from serving import until

from aggregator.ledger import Ledger
from aggregator.service.actor import Service, ServiceSettings
from aggregator.service.auth import read_tokens
from aggregator.session import VotesUnavailableError
from aggregator.store import ledger_files
from fairpate.config import RayConfig
from fairpate.data import load_data
from fairpate.http_server import HttpServer
from fairpate.methods.voting import StandingVoters
from fairpate.releases.directory import RunDirectory, RunDirectoryError, read_labels, read_votes
from fairpate.run import serve
from fairpate.run.publication import write_card
from fairpate.run.run import run_method
from fairpate.run.serve import open_backend, public_pool
from fairpate.terminal import Output, Reporter
from teachers.ensemble import collect_votes
from teachers.ray_pool import BESIDE_WORK, ServingTeachers, VoterWatch
from teachers.work import BlockPool

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.usefixtures("light_runs"),
]


@pytest.fixture(scope="module")
def finished(small_config, tmp_path_factory, ray_session):
    """A run in whose folder the service goes on, with an actor."""
    config = small_config(tmp_path_factory.mktemp("served") / "run")
    return run_method(config, Reporter(quiet=True)), config.model_copy(update={"ray": RayConfig(num_actors=1)})


@pytest.fixture(scope="module")
def served(finished):
    """The run's aggregator on a port of this machine, with teachers in their actors: (URL, voters)."""
    run, config = finished
    backend = open_backend(run.root, config)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = HttpServer(backend.app, ServiceSettings(port=port, health_interval_s=0.2))
    yield f"http://127.0.0.1:{port}", backend.close.__self__
    server.stop()
    backend.close()


@pytest.fixture
def url(served):
    return served[0]


@pytest.mark.slow
def test_a_killed_teacher_votes_again_and_a_lost_one_ends_the_vote(finished):
    run, config = finished
    dataset = load_data(config.data)
    ensemble = config.train_teachers(dataset, run.teachers, BlockPool())
    questions = [public_pool(dataset).questions[number] for number in range(75, 90)]
    x = np.stack([question.features for question in questions])
    expected = collect_votes(ensemble, torch.from_numpy(x))
    voters = ServingTeachers(ensemble, config.ray)
    try:
        np.testing.assert_array_equal(voters.votes(x), expected)
        count = StandingVoters(
            ensemble=ensemble.digest,
            ask=lambda features, _: voters.votes(features),
            collected=read_votes(run.votes),
            are_answering=voters.are_answering,
            close=voters.close,
        ).count_votes
        np.testing.assert_array_equal(count(questions), expected)
        os.kill(ray.get(voters.actors[0].__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        np.testing.assert_array_equal(count(questions), expected)
        until(voters.are_answering)
        ray.kill(voters.actors[0])
        until(lambda: not voters.are_answering(), timeout_s=5)
        with pytest.raises(VotesUnavailableError, match="Not all teachers voted"):
            count(questions)
        np.testing.assert_array_equal(count(questions[:5]), expected[:5])
    finally:
        voters.close()


def test_voters_that_nobody_watches_any_more_do_not_count_as_answering(ray_session, monkeypatch):
    """The thread that watches ended, as an error or a hang of Ray ends it: what it saw last says nothing."""

    @ray.remote(num_cpus=0.1, concurrency_groups={BESIDE_WORK: 1})
    class Lively:
        def ping(self):
            pass

    monkeypatch.setattr("teachers.ray_pool._PING_INTERVAL_S", 0.05)
    watch = VoterWatch([Lively.remote()])
    until(lambda: watch.are_answering())
    watch.close()
    monkeypatch.setattr("teachers.ray_pool._HANG_TIMEOUT_S", 0.5)
    until(lambda: not watch.are_answering(), timeout_s=10)


def test_a_service_makes_no_ledger_and_takes_no_older_one(finished, tmp_path):
    run, config = finished
    dataset = load_data(config.data)
    terms = config.plan(dataset).terms(read_votes(run.votes).ensemble)
    for damage, words in (("gone", "this ledger is missing"), ("older", "this ledger lacks")):
        copy = RunDirectory(root=shutil.copytree(run.root, tmp_path / damage))
        for file in ledger_files(copy.ledger):
            file.unlink()
        if damage == "older":
            Ledger(copy.ledger, terms).close()
        with pytest.raises(RunDirectoryError, match=rf"ledger\.sqlite: {words}"):
            open_backend(copy.root, config)


@pytest.mark.slow
def test_a_voter_that_hangs_is_replaced_and_nobody_else_waits_for_it(served):
    """A stopped process is no dead one: Ray alone would wait for it for ever."""
    url, voters = served
    with httpx.Client(base_url=url, timeout=120) as http:
        until(lambda: http.get("/readyz").status_code == 200)
        before = http.get("/v1/budget").json()["queries_submitted"]
        pid = ray.get(voters.actors[0].__ray_call__.remote(lambda _: os.getpid()))
        os.kill(pid, signal.SIGSTOP)
        try:
            with concurrent.futures.ThreadPoolExecutor(1) as other:
                asked = other.submit(http.post, "/v1/queries", json={"queries": [{"id": 110}, {"id": 111}]})
                until(lambda: http.get("/readyz").status_code == 503)
                for path in ("/livez", "/metrics", "/v1/budget", "/v1/statement"):
                    assert http.get(path, timeout=2).status_code == 200
                assert http.get("/readyz").json()["reasons"] == ["votes"]
                assert http.get("/v1/budget").json()["queries_submitted"] == before
                answered = asked.result(timeout=120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: http.get("/readyz").status_code == 200)
        again = http.post("/v1/queries", json={"queries": [{"id": 110}, {"id": 111}]})
        assert again.status_code == 200
        assert answered.status_code in (200, 503)
        assert answered.status_code == 503 or answered.json() == again.json()
        assert http.get("/v1/budget").json()["queries_submitted"] == before + 2
        assert ray.get(voters.actors[0].__ray_call__.remote(lambda _: os.getpid())) != pid


def test_what_the_run_released_is_answered_again_for_free(finished, url):
    run, config = finished
    pool = public_pool(load_data(config.data))
    with httpx.Client(base_url=url, timeout=120) as http:
        before = http.get("/v1/budget").json()
        asked = http.post("/v1/queries", json={"queries": [{"id": i} for i in range(80)]}).json()["replies"]
        assert http.get("/v1/budget").json() == before
    labelled = read_labels(run.labels)
    released = dict(zip(labelled.record_ids, labelled.labels.tolist(), strict=True))
    assert {pool.record_ids[i]: r["label"] for i, r in enumerate(asked) if r["label"] is not None} == released


def test_no_page_of_a_run_or_of_its_service_asks_another_host(finished, url):
    run, _ = finished
    write_card(run.root)
    for path in ("public/report.html", "private/report.html", "public/card.html"):
        assert References((run.root / path).read_text(encoding="utf-8")).found == []
    assert References(httpx.get(f"{url}/docs").text).found == []


def test_other_records_go_to_the_teachers_and_are_charged(url):
    with httpx.Client(base_url=url, timeout=120) as http:
        before = http.get("/v1/budget").json()["queries_submitted"]
        statement = http.get("/v1/statement").json()
        black = np.zeros(statement["record_shape"], dtype=int).tolist()
        blank = {"features": black, "group": statement["group_names"][0]}
        body = {"queries": [{"id": 100}, blank]}
        first = http.post("/v1/queries", json=body).json()
        assert http.post("/v1/queries", json=body).json() == first
        assert http.get("/v1/budget").json()["queries_submitted"] == before + 2


def test_one_command_and_one_batch_from_the_command_line(fairpate, url, tmp_path):
    code, output, _ = fairpate("query", url, "ask", "0:3")
    assert code == 0
    *table, lead = output.splitlines()
    assert len(table) == 4
    assert lead.endswith("votes stands out from the noise 19 times in 20.")
    out = tmp_path / "labels.parquet"
    code, output, _ = fairpate("query", url, "--ids", "0:30", "--batch-size", "8", "--out", out)
    assert code == 0
    table = pq.read_table(out)
    assert table.column_names == ["id", "key", "status", "label"]
    assert table["id"].to_pylist() == list(range(30))
    assert f"{table['label'].null_count} refused" in output


def test_labels_of_a_batch_are_printed_or_written_as_the_file_s_name_says(fairpate, url, tmp_path):
    code, output, errors = fairpate("query", url, "--ids", "0:10")
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == ["query", *map(str, range(10))]
    assert "answered" in errors
    code, _, _ = fairpate("query", url, "--ids", "0:10", "--out", tmp_path / "labels.csv")
    assert code == 0
    with (tmp_path / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    printed = {line.split()[0]: line.split(maxsplit=1)[1].strip() for line in output.splitlines()[1:]}
    assert {row["id"]: row["label"] or "refused" for row in rows} == printed


def test_a_program_is_told_what_a_person_reads(fairpate, url, tmp_path):
    def told(*arguments):
        return json.loads(fairpate("query", url, *arguments, "--json")[1])

    replies = told("--ids", "0:10")["replies"]
    words = [line.split() for line in fairpate("query", url, "--ids", "0:10")[1].splitlines()[1:]]
    assert [[str(reply["id"]), reply["label_name"] or "refused"] for reply in replies] == words
    asked = told("ask", "0:10")["replies"]
    assert [reply["key"] for reply in asked] == [reply["key"] for reply in replies]
    assert told("reply", replies[0]["key"])["label"] == replies[0]["label"]
    assert told("budget") == httpx.get(f"{url}/v1/budget").json()
    assert told("statement") == httpx.get(f"{url}/v1/statement").json()
    assert told("estimate", "0:10")["stored_replies"] == 10
    assert told("--ids", "0:10", "--out", tmp_path / "labels.csv")["counts"]["answered"] > 0
    assert told("ask", "0:400")["error"]["exit_code"] == 1
    code, output, _ = fairpate("query", url, "--json")
    assert (code, "the interactive shell has no JSON output" in json.loads(output)["error"]["message"]) == (2, True)


def test_replies_that_cannot_be_written_are_not_lost(fairpate, url, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("aggregator.client.write_atomically", full)
        code, _, errors = fairpate("query", url, "--ids", "20:25", "--out", tmp_path / "labels.csv")
    assert code == 1
    assert all(word in errors for word in ("labels.csv", "No space left", "again for free"))
    before = httpx.get(f"{url}/v1/budget").json()
    assert fairpate("query", url, "--ids", "20:25", "--out", tmp_path / "labels.csv")[0] == 0
    assert httpx.get(f"{url}/v1/budget").json() == before


def test_records_beyond_the_pool_are_refused_before_any_is_asked(fairpate, url, tmp_path):
    out = tmp_path / "labels.parquet"
    code, _, errors = fairpate("query", url, "--ids", "250:400", "--out", out)
    assert code == 2
    assert "below 300" in errors
    assert not out.exists()


@pytest.mark.slow
def test_a_run_within_a_target_goes_on_with_what_the_target_leaves(finished, small_config, tmp_path):
    """Released labels again, and nothing beyond: its queries took the whole target."""
    teachers = f"storage={finished[0].teachers}"
    config = small_config(tmp_path / "run", teachers, "target.epsilon=40")
    run = run_method(config, Reporter(quiet=True))
    backend = open_backend(run.root, config.model_copy(update={"ray": RayConfig(num_actors=1)}))
    try:
        assert backend.session.budget_status().queries_submitted == 80
        assert backend.session.room(1) == 0
        assert backend.ledger.terms.budget.epsilon == 40
    finally:
        backend.close()


def test_a_ledger_in_files_has_no_other_writer_to_end(fairpate, finished):
    code, output, errors = fairpate("serve", finished[0].root, "--take-over")
    assert (code, output) == (2, "")
    assert "--take-over" in errors


def test_a_run_without_votes_is_not_served_as_an_aggregator(fairpate, small_config, tmp_path):
    run = run_method(
        small_config(tmp_path / "run", "dp_sgd.epochs=0.5", "target.accounting=rdp", method="dp_sgd"),
        Reporter(quiet=True),
    )
    for arguments in (["serve", run.root], ["serve", run.root, "--stop"]):
        code, _, errors = fairpate(*arguments)
        assert code == 2
        assert "a run of dp_sgd, which has no teachers to ask; serve its model with --student" in errors
    code, output, errors = fairpate("tokens", "add", run.root, "alice")
    assert (code, output) == (2, "")
    assert "this run of dp_sgd has no stored teachers" in errors
    assert not run.tokens.exists()


def test_the_operator_hears_what_the_statement_lacks_and_that_a_target_leaves_no_room(
    small_config, tmp_path, monkeypatch
):
    run = run_method(small_config(tmp_path / "run", "target.epsilon=30"), Reporter(quiet=True))
    monkeypatch.setattr(serve, "_ray", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(serve, "start_service", lambda *_, **__: Service(actor=None, name="none"))
    monkeypatch.setattr(serve, "_watch", lambda *_: None)
    monkeypatch.setattr(Service, "stop", lambda _: None)
    settings = ServiceSettings(port=1)
    said: list[str] = []
    told: list[Output] = []
    monkeypatch.setattr(serve, "say", said.append)
    monkeypatch.setattr(serve, "show", told.append)
    serve.serve_aggregator(run.root, settings, data_dir=None, detach=False)
    assert [output.facts for output in told] == [
        {"served": [{"run": run.root, "url": "http://127.0.0.1:1", "detached": False}]}
    ]
    assert f"{run.statement} with `fairpate report {run.root}`" in said[1]
    assert said[2:] == [serve.SPENT]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--rate", "5"], "--rate"),
        (["--log-file", "log.jsonl"], "--log-file"),
        ([], "FAIRPATE_ANALYST_TOKEN"),
    ],
)
def test_what_ray_serve_would_drop_is_refused(fairpate, small_config, tmp_path, monkeypatch, option, words):
    run = run_method(
        small_config(tmp_path / "run", "dp_sgd.epochs=0.5", "target.accounting=rdp", method="dp_sgd"),
        Reporter(quiet=True),
    )
    monkeypatch.chdir(tmp_path)
    if not option:
        monkeypatch.setenv("FAIRPATE_ANALYST_TOKEN", "a-token-of-the-analysts-of-the-tests")
    code, _, errors = fairpate("serve", run.root, "--student", "--replicas", "2", *option)
    assert code == 2
    assert "--replicas" in errors
    assert words in errors


def test_a_student_asks_for_the_tokens_of_the_environment(small_config, tmp_path, monkeypatch, caplog):
    run = run_method(
        small_config(tmp_path / "run", "dp_sgd.epochs=0.5", "target.accounting=rdp", method="dp_sgd"),
        Reporter(quiet=True),
    )
    token = "a-token-of-the-analysts-of-the-tests"  # noqa: S105
    monkeypatch.setenv("FAIRPATE_ANALYST_TOKEN", token)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = ServiceSettings(port=port, tokens=read_tokens(os.environ))
    said = []
    caplog.set_level("INFO", "fairpate.requests")
    with contextlib.ExitStack() as stack:
        stack.callback(HttpServer(partial(serve.student_app, run.student, None), settings).stop)
        for headers in ({}, {"Authorization": f"Bearer {token}"}):
            said.append(httpx.get(f"{settings.url}/v1/student", headers=headers))
        assert [answer.status_code for answer in said] == [401, 200]
        assert said[1].headers["cache-control"] == "no-store"
        assert httpx.get(f"{settings.url}/readyz").json() == {"status": "ok", "reasons": []}
    # Another test's service in this process may count its requests meanwhile, in lines without a route.
    told = [record for record in caplog.records if getattr(record, "route", None) == "/v1/student"]
    assert [getattr(record, "caller", None) for record in told] == ["analyst-1"]


def test_what_protects_nobody_by_design_is_not_served(fairpate, small_config, tmp_path):
    run = run_method(small_config(tmp_path / "run", "sgd.epochs=1", method="sgd"), Reporter(quiet=True))
    assert "has no teachers to ask" in fairpate("serve", run.root)[2]
    code, _, errors = fairpate("serve", run.root, "--student")
    assert code == 2
    assert "sgd has no privacy guarantee, so its model may not be published" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "nowhere"], ["nowhere", "holds no run"]),
        (["serve", "nowhere", "--host", "0.0.0.0"], ["--host 0.0.0.0", "FAIRPATE_ANALYST_TOKEN"]),  # noqa: S104
        (["serve", "nowhere", "--port", "99999"], ["--port: expected <= 65535, got '99999'"]),
        (["serve", "nowhere", "--quota", "-1"], ["max_queries > 0", "-1"]),
        (["serve", "nowhere", "--analyst-token-file", "missing"], ["missing", "token file"]),
        (["query", "ftp://somewhere", "budget"], ["ftp://somewhere"]),
        (["query", "--ids", "5:x"], ["5:x", "0:500"]),
        (["query", "budget", "--ids", "0:5"], ["either a command or --ids"]),
        (["query", "bogus"], ["bogus", "ask, budget"]),
        (["query", "http://127.0.0.1:99999", "budget"], ["not a URL of a service"]),
        (["query", "http://", "budget"], ["not a URL of a service"]),
        (["query", "budgte"], ["did you mean budget?"]),
        (["query", "--ids", "10:0"], ["10:0", "empty range"]),
        (["query", "ask", "10:10"], ["10:10", "empty range"]),
        (["query", "estimate", "-3"], ["-3", "the number of a record (from 0)"]),
        (["query", "ask", f"0:{10**12}"], ["at most 1000000 records"]),
        (["query", "ask", f"0:{'9' * 40}"], ["expected the number of a record"]),
        (["query", "--ids", "0:5", "--out", "missing/labels.parquet"], ["--out", "missing is not a folder"]),
        (["query", "--ids", "0:5", "--out", "labels.txt"], ["--out", ".parquet or .csv"]),
        (["query", "--ids", "0:5", "--out", "."], ["--out"]),
        (["query", "budget", "--out", "labels.csv"], ["--out", "--ids"]),
        (["query", "--ids", "0:5", "--token-file", "missing"], ["--token-file", "missing"]),
        (["query", "--ids", "0:5", "--token-file", "."], ["--token-file"]),
    ],
)
def test_bad_input_ends_in_one_message_and_no_traceback(fairpate, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, _, errors = fairpate(*arguments)
    assert code == 2
    assert "Traceback" not in errors
    for word in words:
        assert word in errors
