"""The aggregator as a Ray actor on a real port: killed, restarted, and refused where it must not start."""

import dataclasses
import logging
import math
import os
import signal
import sys
import threading

import httpx
import pytest
import serving
from ray import cloudpickle
from serving import POOL, TERMS, free_port, open_backend

from aggregator.client import AggregatorClient, QueryError
from aggregator.ledger import Ledger
from aggregator.service.actor import AggregatorActor, ServiceSettings, start_service
from fairpate.http_server import HttpServer, ServiceError, bind

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.usefixtures("light_runs"),
]

cloudpickle.register_pickle_by_value(serving)  # the actor's process does not know this folder
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def open_and_tell(path, pid_file):
    """The backend, with the process that holds it written down so that a test can kill it."""
    pid_file.write_text(str(os.getpid()))
    return open_backend(path)


@pytest.fixture(scope="module")
def served(ray_session, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    path, pid_file = folder / "ledger.sqlite", folder / "pid"
    settings = ServiceSettings(port=free_port())
    service = start_service("test-aggregator", open_and_tell, (path, pid_file), settings)
    yield service, settings.url, path, pid_file
    service.stop()


def test_one_service_per_name_and_no_exposure_without_tokens(served):
    service, _, path, _ = served
    settings = ServiceSettings(port=free_port())
    with pytest.raises(ServiceError, match="runs already"):
        start_service(service.name, open_backend, (path,), settings)
    with pytest.raises(ServiceError, match="another process writes this ledger"):
        start_service("another", open_backend, (path,), settings)
    with pytest.raises(ServiceError, match="FAIRPATE_ANALYST_TOKEN"):
        start_service("third", open_backend, (path,), dataclasses.replace(settings, host="0.0.0.0"))  # noqa: S104


def test_killed_under_load_it_comes_back_with_every_answer_and_every_charge(served):
    service, url, path, pid_file = served
    views, stop = [{} for _ in range(3)], threading.Event()

    def keep_asking(view, numbers):
        with AggregatorClient(url, attempts=9, first_pause_s=0.05) as client:
            for number in numbers:
                (reply,) = client.ask([number]).replies
                assert view.setdefault(reply.key, reply) == reply
            stop.wait()
            for reply in client.ask(list(numbers)).replies:
                assert view[reply.key] == reply

    failures = []

    def guarded(*arguments):
        try:
            keep_asking(*arguments)
        except (QueryError, AssertionError) as error:
            failures.append(error)

    clients = [threading.Thread(target=guarded, args=(view, range(i, 300, 3))) for i, view in enumerate(views)]
    for client in clients:
        client.start()
    first = int(pid_file.read_text())
    threading.Event().wait(0.4)
    os.kill(first, signal.SIGKILL)
    stop.set()
    for client in clients:
        client.join(timeout=60)
    assert failures == []
    assert int(pid_file.read_text()) != first
    with AggregatorClient(url) as client:
        assert client.budget().queries_submitted >= len(POOL) == sum(len(view) for view in views)
    service.stop()  # no test after this one asks it
    with Ledger(path, TERMS) as ledger:
        for view in views:
            assert all(ledger.outcome_of.get(key).label == reply.label for key, reply in view.items())


def test_a_process_that_takes_another_s_place_checks_again_who_could_reach_it(path):
    settings = ServiceSettings(port=free_port(), host="0.0.0.0")  # noqa: S104
    actor = AggregatorActor(open_backend, (path,), settings)
    with pytest.raises(ServiceError, match="FAIRPATE_ANALYST_TOKEN"):
        actor.is_serving()
    assert not path.exists()


def test_a_port_that_is_taken_is_named():
    with (
        bind("127.0.0.1", free_port(), timeout_s=0) as taken,
        pytest.raises(ServiceError, match=r"cannot listen there .*; give another --port"),
    ):
        bind(*taken.getsockname(), timeout_s=0)
    with pytest.raises(ServiceError, match=r"cannot listen there .*; give another --host"):
        bind("192.0.2.1", free_port(), timeout_s=math.inf)  # an address of no machine: waiting would not help


def test_all_addresses_of_ipv6_are_those_of_ipv4_too(path):
    """A health check inside the container asks 127.0.0.1, and a proxy there names its callers."""
    try:
        bind("::1", free_port(), timeout_s=0).close()
    except ServiceError:
        pytest.skip("this machine has no IPv6")
    told = []
    backend = open_backend(path)
    settings = ServiceSettings(port=free_port(), host="::", tokens=serving.tokens_of_both_roles())
    server = HttpServer(backend.app, settings)
    try:
        handler = logging.Handler()
        handler.emit = told.append
        logging.getLogger("fairpate.requests").addHandler(handler)
        logging.getLogger("fairpate.requests").setLevel(logging.INFO)
        for host in ("127.0.0.1", "[::1]"):
            url = f"http://{host}:{settings.port}/livez"
            assert httpx.get(url).status_code == 200
            assert httpx.get(url, headers={"X-Forwarded-For": "192.0.2.9"}).status_code == 200
    finally:
        logging.getLogger("fairpate.requests").removeHandler(handler)
        logging.getLogger("fairpate.requests").setLevel(logging.NOTSET)
        server.stop()
        backend.close()
    assert [record.address for record in told][:3] == ["127.0.0.1", "192.0.2.9", "::1"]


def test_a_server_that_cannot_start_leaves_its_port_free():
    def broken(settings, *, tracer):
        raise ServiceError("no application")

    port = free_port()
    with pytest.raises(ServiceError, match="no application") as raised:  # whose frames hold the socket
        HttpServer(broken, ServiceSettings(port=port))
    with bind("127.0.0.1", port, timeout_s=0):
        del raised


def test_a_client_without_a_service_says_so():
    with (
        AggregatorClient(f"http://127.0.0.1:{free_port()}", attempts=1) as client,
        pytest.raises(QueryError, match="no service answers"),
    ):
        client.budget()
