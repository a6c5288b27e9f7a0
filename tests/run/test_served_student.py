"""`fairpate serve --student` as a user gives it, where Ray Serve cannot be imported: a plain install."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import httpx
import numpy as np
import pytest
import torch

from fairpate import http_server
from fairpate.run.run import run_method
from fairpate.terminal import MODULES, Reporter
from student.student import load_student

pytestmark = pytest.mark.usefixtures("light_runs")

PLAIN_INSTALL = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "grpc":
            raise ModuleNotFoundError("No module named 'grpc'", name="grpc")

sys.meta_path.insert(0, Missing())
from fairpate.cli import main
main()
"""


@pytest.fixture(scope="module")
def trained(small_config, tmp_path_factory):
    settings = ("dp_sgd.epochs=0.5", "target.accounting=rdp")
    return run_method(
        small_config(tmp_path_factory.mktemp("student") / "run", *settings, method="dp_sgd"), Reporter(quiet=True)
    )


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.mark.slow
def test_a_plain_install_serves_the_student_until_it_is_ended(trained, port):
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", PLAIN_INSTALL, "serve", str(trained.root), "--student", "--port", str(port), "--json"],
        stdout=subprocess.PIPE,
        env=os.environ | {"RAY_ADDRESS": ""},
    )
    url, shape = f"http://127.0.0.1:{port}", load_student(trained.student).record_shape
    x = np.random.default_rng(0).integers(0, 256, (20, *shape)).astype(np.uint8)
    try:
        facts = answered(f"{url}/v1/student", process)
        assert facts["input_shape"] == list(shape)
        records = [{"features": each.tolist(), "group": facts["group_names"][0]} for each in x]
        reply = httpx.post(f"{url}/v1/predictions", json={"records": records}).json()
        expected = load_student(trained.student).predict(torch.from_numpy(x), np.zeros(len(x), dtype=np.int64))
        assert reply["labels"] == expected.labels.tolist()
        refused = httpx.post(f"{url}/v1/predictions", content=b" " * 2**22)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (413, "body")
        # A head without an end is refused by the connections' own limit.
        assert httpx.get(url, headers={"x": "y" * 2**15}).status_code == 431
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(output)["served"] == [{"run": str(trained.root), "url": url, "detached": False}]


def answered(url, process):
    """The service's answer, as soon as there is one."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            return httpx.get(url).json()
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError(process.returncode)


def test_copies_on_ray_serve_are_refused_in_one_message_where_it_is_missing(trained, fairpate, monkeypatch):
    monkeypatch.setitem(MODULES, "serve", ("no_such_package",))  # what is found missing: tests/run/test_version.py
    code, output, errors = fairpate("serve", trained.root, "--student", "--replicas", "2")
    assert (code, output) == (2, "")
    assert "--replicas" in errors
    assert "pip install 'fairpate[serve]'" in errors
    assert "Traceback" not in errors


def test_a_port_that_is_taken_is_said_in_one_message(trained, fairpate, monkeypatch):
    monkeypatch.setattr(http_server, "bind", partial(http_server.bind, timeout_s=0.2))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, errors = fairpate("serve", trained.root, "--student", "--port", taken.getsockname()[1])
    assert code != 0
    assert "Traceback" not in errors
