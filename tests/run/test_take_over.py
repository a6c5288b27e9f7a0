"""Taking a ledger over: the earlier service is stopped last, so that a start that fails leaves it as it was."""

import contextlib
import json
import secrets
import shutil
import socket

import httpx
import pytest
from serving import free_port, ids
from test_votes_made_elsewhere import CLASSES, table, written

from aggregator.service.actor import AggregatorActor, ServiceSettings
from fairpate.http_server import HttpServer, ServiceError
from fairpate.releases.directory import RunDirectory
from fairpate.releases.run_ledger import place_of
from fairpate.run import serve
from fairpate.run.ledgers import back_up_run, restore
from fairpate.run.run import aggregate
from fairpate.run.serve import _run_with_votes, open_backend
from fairpate.terminal import Reporter

pytestmark = pytest.mark.usefixtures("light_runs")

NOISE = "aggregator.mechanism={threshold: 0, threshold_stddev_votes: 1, noise_stddev_votes: 1}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on votes made elsewhere, whose service needs no Ray."""
    folder = tmp_path_factory.mktemp("finished")
    columns = {name: values for name, values in table().items() if name not in ("age", "size")}
    votes = {"path": str(written(folder, columns)), "unit": "hospital", "classes": list(CLASSES), "features": []}
    return aggregate(
        {"votes": votes, "out": str(folder / "run")}, [NOISE, "aggregator.num_queries=10"], Reporter(quiet=True)
    )


@pytest.fixture
def copied(finished, tmp_path, monkeypatch):
    """The run in a folder of the test, with an odometer of its own, and its configuration."""
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    root = shutil.copytree(finished.root, tmp_path / "run")
    return _run_with_votes(root)


@pytest.fixture
def moved(copied, tmp_path, database):
    """The same, with its ledger in a database."""
    run, _ = copied
    back_up_run(run.root, tmp_path / "copy.sqlite")
    restore(run, tmp_path / "copy.sqlite", to=database)
    return copied


@pytest.fixture
def database(postgres):
    return postgres.url(f"moved-{secrets.token_hex(4)}")


@contextlib.contextmanager
def served(run, config):
    """The URL of the run's service."""
    backend = open_backend(run.root, config)
    settings = ServiceSettings(port=free_port(), answer_step_s=0)
    server = HttpServer(backend.app, settings)
    try:
        yield settings.url
    finally:
        server.stop()
        backend.close()


def contents(*folders):
    """Every file of the folders, with what it holds and its rights."""
    return {
        path: (path.stat().st_mode, path.read_bytes())
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file()
    }


def started(run, config, *, port, take_over):
    """Start a service as its Ray actor does; raise what `fairpate serve` reports."""
    settings = ServiceSettings(port=port, answer_step_s=0)
    actor = AggregatorActor(open_backend, (run.root, config, None, take_over), settings)
    assert actor.is_serving()
    return actor


def take_the_port(run, config, sockets):
    return sockets.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]


def lose_the_anchor(run, config, sockets):
    place = json.loads(run.ledger_place.read_text())
    run.ledger_place.write_text(json.dumps(place | {"anchor": str(run.root.parent / "gone")}))
    return free_port()


def lose_the_votes(run, config, sockets):
    config.votes.path.write_text(config.votes.path.read_text().replace("q17", "q71"))
    return free_port()


def state_more_than_was_answered(run, config, sockets):
    stated = json.loads(run.statement.read_text())
    stated["queries"]["submitted"] += 1000
    run.statement.write_text(json.dumps(stated))
    return free_port()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (take_the_port, "cannot listen there"),
        (lose_the_anchor, "anchor"),
        (lose_the_votes, r"created for other teachers|lacks"),
        (state_more_than_was_answered, "queries that the run has released"),
    ],
)
def test_a_start_that_fails_leaves_the_earlier_service_serving(moved, tmp_path, fault, words):
    run, config = moved
    config = config.model_copy(update={"votes": config.votes.model_copy(update={"path": tmp_path / "votes.csv"})})
    shutil.copy(moved[1].votes.path, config.votes.path)
    with served(run, config) as url, contextlib.ExitStack() as sockets:
        assert httpx.post(f"{url}/v1/queries", json=ids([20])).status_code == 200
        port = fault(run, config, sockets)
        before = contents(run.root)
        with pytest.raises(ServiceError, match=words):
            started(run, config, port=port, take_over=True)
        assert contents(run.root) == before
        assert httpx.post(f"{url}/v1/queries", json=ids([21])).status_code == 200
        assert httpx.get(f"{url}/readyz").status_code == 200


def test_a_start_that_succeeds_is_the_only_writer_and_is_noted(moved):
    run, config = moved
    with served(run, config) as url:
        first = httpx.post(f"{url}/v1/queries", json=ids([20])).json()
        actor = started(run, config, port=(port := free_port()), take_over=True)
        try:
            new = f"http://127.0.0.1:{port}"
            assert httpx.post(f"{new}/v1/queries", json=ids([20])).json() == first
            assert httpx.post(f"{new}/v1/queries", json=ids([21])).status_code == 200
            assert httpx.post(f"{url}/v1/queries", json=ids([20])).json() == first
            assert httpx.post(f"{url}/v1/queries", json=ids([22])).status_code == 503
            assert run.actions.read_text().count('"take over"') == 1
        finally:
            actor.stop()
    # As the command says: once the second is stopped, the first may be started again.
    with served(run, config) as again:
        assert httpx.post(f"{again}/v1/queries", json=ids([22])).status_code == 200
    assert "start the earlier one again" in serve.TOOK_OVER


def test_a_service_without_a_port_changes_nothing_of_its_run(copied, tmp_path):
    """Its statement would otherwise claim the epsilon of a service that never answered."""
    run, config = copied
    before = contents(run.root, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ServiceError, match="cannot listen there"):
        started(run, config, port=taken.getsockname()[1], take_over=False)
    assert contents(run.root, tmp_path) == before
    assert place_of(RunDirectory(root=run.root)).ledger == run.ledger
