"""A service whose ledger is in a database, by the commands that an operator types: its node dies, or its process hangs.

What was answered stays answered, alike, and nothing that left is uncharged.
"""

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from local_cluster import Cluster, make_environment
from serving import free_port, ids

from aggregator import ledger_audit
from fairpate.cli import main

# Real clusters; tests/aggregator/test_database_ledgers.py has writers alone
pytestmark = [
    pytest.mark.xdist_group("cluster"),
    pytest.mark.usefixtures("light_runs"),
    pytest.mark.slow,
]

FAIRPATE = (sys.executable, "-c", "from fairpate.cli import main; main()")
CONFIG = """
data: {name: color_digits}
teachers: {num_teachers: 12, model: {name: logistic}, fit: {epochs: 2}}
aggregator:
  mechanism: {threshold: 6, threshold_stddev_votes: 2, noise_stddev_votes: 1}
  gate: {max_disparity: 0.1, min_count: 10}
  num_queries: 40
ray: {num_actors: 1}
student: {fit: {epochs: 1}}
"""
LIMIT_S = 180.0


@pytest.fixture(scope="module")
def place(postgres):
    return postgres.url("moves")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, place):
    """A finished run, with its ledger in the database."""
    folder = tmp_path_factory.mktemp("moves")
    (folder / "config.yaml").write_text(CONFIG)
    assert here(folder, "run", "config.yaml", "--out", "run", "--set", "ray.num_actors=0") == 0
    assert here(folder, "ledger", "backup", "run", "copy.sqlite") == 0
    assert here(folder, "ledger", "restore", "copy.sqlite", "run", "--to", place) == 0
    return folder


@pytest.fixture(scope="module")
def service(cluster: Cluster, folder: Path):
    """Its URL on the cluster, where it stays when the command has ended."""
    ray = {name: value for name, value in cluster.environment.items() if name.startswith("RAY_")}
    port = free_port()
    assert here(folder, "serve", "run", "--detach", "--port", str(port), **ray) == 0
    yield f"http://127.0.0.1:{port}"
    assert here(folder, "serve", "run", "--stop", **ray) == 0


def environment_of(folder: Path) -> dict[str, str]:
    return make_environment() | {"FAIRPATE_STATE": str(folder / "state"), "OMP_NUM_THREADS": "1"}


def here(folder: Path, *words: str, **environment: str) -> int:
    """The status of a command in this process: another one imports for seconds."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for name, value in {"FAIRPATE_STATE": str(folder / "state"), **environment}.items():
            patched.setenv(name, value)
        patched.setattr(sys, "argv", ["fairpate", *words])
        try:
            main()
        except SystemExit as left:
            return int(left.code or 0)
    return 0


def wait_until_ready(url: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"{url} is not ready after {LIMIT_S:g} s")


def replies(url: str, numbers: list[int]) -> dict[int, dict]:
    answer = httpx.post(f"{url}/v1/queries", json=ids(numbers), timeout=60)
    answer.raise_for_status()
    return dict(zip(numbers, answer.json()["replies"], strict=True))


@contextlib.contextmanager
def asking(url: str, first: int):
    """New queries one after another, each again until an answer is heard; all answers when it is over."""
    stop, heard = threading.Event(), {}

    def ask() -> None:
        number = first
        while not stop.wait(0.05):
            with contextlib.suppress(httpx.TransportError, httpx.HTTPStatusError):
                heard.update(replies(url, [number]))
                number += 1

    with concurrent.futures.ThreadPoolExecutor(1) as other:
        asked = other.submit(ask)
        try:
            yield heard
        finally:
            stop.set()
            asked.result(timeout=LIMIT_S)


def require_all_charged(url: str, place: str, heard: dict[int, dict]) -> None:
    """Every answer that was heard is given again, alike, and stands in a ledger whose every digest holds."""
    charged = httpx.get(f"{url}/v1/budget", timeout=30).json()["queries_submitted"]
    assert replies(url, list(heard)) == heard
    assert httpx.get(f"{url}/v1/budget", timeout=30).json()["queries_submitted"] == charged
    assert ledger_audit.verify(place).reservations == charged
    assert {reply["key"] for reply in heard.values()} <= {row.key for row in ledger_audit.rows(place) if row.outcome}


def node_of_the_service(cluster: Cluster):
    """The node that holds the actor. The head is none that may die here: there the process is ended, to move it."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        for node in cluster.workers:
            if node.processes("ray::AggregatorActor"):
                return node
        for process in cluster.nodes[0].processes("ray::AggregatorActor"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(1)
    raise AssertionError("the actor came to no worker")


def test_a_service_whose_node_dies_goes_on_on_another(cluster: Cluster, service: str, place: str) -> None:
    node = node_of_the_service(cluster)
    wait_until_ready(service)
    with asking(service, 100) as heard:
        time.sleep(2)
        node.kill()
        before = len(heard)
        wait_until_ready(service)
        deadline_s = time.monotonic() + LIMIT_S
        while len(heard) < before + 5 and time.monotonic() < deadline_s:
            time.sleep(0.1)
    assert not node.processes()  # it is another that answers
    assert 0 < before < len(heard)
    require_all_charged(service, place, heard)


def test_a_service_that_hangs_is_taken_over_from_and_answers_nothing_new_when_it_continues(
    cluster: Cluster, service: str, folder: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = replies(service, list(range(40, 60)))
    [hanging] = [process for node in cluster.nodes for process in node.processes("ray::AggregatorActor")]
    os.kill(hanging, signal.SIGSTOP)
    try:
        assert here(folder, "ledger", "restore", "copy.sqlite", "run") == 1
        assert "another process writes this ledger" in capsys.readouterr().err
        with served(folder, "--take-over") as second:
            heard = before | replies(second, list(range(50, 70)))
            require_all_charged(second, place, heard)
            os.kill(hanging, signal.SIGCONT)
            assert replies(service, list(range(40, 60))) == before
            asked = httpx.post(f"{service}/v1/queries", json=ids([80]), timeout=120)
            assert asked.status_code == 503
            heard |= replies(second, [80, 81])
            require_all_charged(second, place, heard)
    finally:
        os.kill(hanging, signal.SIGCONT)


@contextlib.contextmanager
def served(folder: Path, *options: str):
    """The URL of `fairpate serve` with a Ray of its own."""
    port = free_port()
    with (folder / "served.log").open("w") as log:
        process = subprocess.Popen(  # noqa: S603 our own program
            [*FAIRPATE, "serve", "run", "--port", str(port), *options],
            cwd=folder,
            env=environment_of(folder),
            stdout=log,
            stderr=log,
        )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
