"""A Ray cluster of several nodes on one machine, each of which can be killed, frozen, or cut off from the network.

Nodes are started by `ray start`, as anywhere else. With namespaces, which need root, each has a network of its own with
a link to a bridge; without, an address of the loopback device. Another Ray on the machine has another token. If it is
asked for, nodes and drivers have certificates of an authority of this cluster's own, and encrypt.

Ray notices a dead node after 2 seconds here (``silent_s``) instead of 15, so that faults can be longer and shorter.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from teachers.certificates import make_authority, make_node_certificate, variables

_CHECKED_EVERY_MS = 500
START_LIMIT_S = 600.0
_ASKED_FOR_S = 15.0
_ROOT = str(Path(__file__).resolve().parents[2])  # the checkout that is tested, also where another is installed
_MARK = "FAIRPATE_FAULTS_NODE"
_ALIVE = """
import os, sys, time
from ray._private.state import GlobalState
from ray._raylet import GcsClientOptions

state = GlobalState()
options = GcsClientOptions.create(
    os.environ["RAY_ADDRESS"], None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
)
state._initialize_global_state(options)
for line in sys.stdin:
    num_nodes, limit_s = line.split()
    deadline_s = time.monotonic() + float(limit_s)
    while True:
        alive = sum(node["Alive"] for node in state.node_table())
        if alive >= int(num_nodes) or time.monotonic() >= deadline_s:
            break
        time.sleep(0.1)
    print(alive, flush=True)
"""

PATIENT_RAY = """
import sys, time
from ray._private import services
from ray.scripts.scripts import main

ask = services.get_node

def get_node(*given):
    # Ray gives up on its own start after half a minute, which a busy machine may need.
    deadline_s = time.monotonic() + 300
    while True:
        try:
            return ask(*given)
        except RuntimeError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.5)

services.get_node = get_node
sys.argv[0] = "ray"
main()
"""


class ClusterError(Exception):
    """A cluster that is not as it should be in time."""


class Node:
    """One Ray node: every process of it can be killed, frozen, or cut off from the network."""

    def __init__(
        self, address: str, namespace: str | None, command: Sequence[str], environment: Mapping[str, str], log: Path
    ):
        self.address, self._namespace, self._log = address, namespace, log
        self._command = [*self.prefix, *command]
        self._mark = f"{_MARK}={secrets.token_hex(8)}"
        self._environment = dict(environment) | dict([self._mark.split("=")])
        self.start()

    @property
    def prefix(self) -> list[str]:
        """What runs a command where this node is."""
        return [] if self._namespace is None else ["ip", "netns", "exec", self._namespace]

    def start(self) -> None:
        """Start it, for the first time or again."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen(  # noqa: S603 our own command
                self._command, env=self._environment, stdout=log, stderr=log
            )

    def processes(self, named: str = "") -> list[int]:
        """The processes that run there, known by a mark in their environment; those with ``named`` in their command."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                marked = self._mark.encode() in (process / "environ").read_bytes().split(b"\0")
                if marked and named.encode() in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
        return found

    @property
    def has_ended(self) -> bool:
        """Whether no process of it is left. Of one that was started just now /proc does not show the mark yet."""
        return self._process.poll() is not None and not self.processes()

    def kill(self) -> None:
        """SIGKILL to everything at once, as when the machine is gone."""
        self._process.kill()
        while self.processes():
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.wait()

    def freeze(self) -> None:
        """Every process stands still."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Every process goes on."""
        self._signal(signal.SIGCONT)

    def cut(self) -> None:
        """Nothing reaches the node or leaves it."""
        self._link("down")

    def repair(self) -> None:
        """The network is back."""
        self._link("up")

    def _link(self, state: str) -> None:
        run_ip("link", "set", f"{self._namespace}-br", state)

    def _signal(self, number: int) -> None:
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)


class Machines:
    """What is started on this machine as a whole or not at all, with network namespaces on a bridge; use as a context
    manager."""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End what was started, of which there may be a part."""
        raise NotImplementedError

    def _start(self) -> None:
        raise NotImplementedError

    @staticmethod
    def _connect(bridge: str, places: Mapping[str, str]) -> None:
        """Make a bridge, and a namespace with a link to it for each of ``places``: names and IP addresses."""
        run_ip("link", "add", bridge, "type", "bridge")
        run_ip("link", "set", bridge, "up")
        for name, address in places.items():
            run_ip("netns", "add", name)
            run_ip("link", "add", f"{name}-br", "type", "veth", "peer", "name", "eth0", "netns", name)
            run_ip("link", "set", f"{name}-br", "master", bridge, "up")
            run_ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            run_ip("-n", name, "link", "set", "eth0", "up")
            run_ip("-n", name, "link", "set", "lo", "up")

    @staticmethod
    def _disconnect(bridge: str, places: Iterable[str]) -> None:
        """Delete what :meth:`_connect` made, as far as it is there."""
        for name in places:
            run_ip("link", "delete", f"{name}-br", check=False)
            run_ip("netns", "delete", name, check=False)
        run_ip("link", "delete", bridge, check=False)


class Cluster(Machines):
    """A head without CPUs for teachers, and workers of one CPU each; use as a context manager."""

    def __init__(
        self,
        num_workers: int,
        *,
        namespaces: bool,
        object_store_bytes: int = 200 * 2**20,
        is_encrypted: bool = False,
        silent_s: float = 2.0,
    ):
        self._tag = f"fp{secrets.token_hex(3)}"
        self._namespaces = [f"{self._tag}n{i}" for i in range(num_workers + 1)] if namespaces else []
        self._store = f"--object-store-memory={object_store_bytes}"
        self._folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # sockets need a short path
        self.environment = {
            **make_environment(),
            "RAY_health_check_initial_delay_ms": f"{round(500 * silent_s)}",
            "RAY_health_check_period_ms": str(_CHECKED_EVERY_MS),
            "RAY_health_check_timeout_ms": f"{round(250 * silent_s)}",
            "RAY_health_check_failure_threshold": f"{round(1000 * silent_s) // _CHECKED_EVERY_MS}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(24),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_metrics_report_interval_ms": "1000",  # instead of 10,000: the runs are short
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        }
        self._num_workers = num_workers
        self.nodes: list[Node] = []
        self._asked: subprocess.Popen[str] | None = None
        self._authority = self._folder / "authority" if is_encrypted else None
        if self._authority:
            make_authority(self._authority, days=1)
            self.environment |= self.certified(self._address(0))

    def _start(self) -> None:
        if self._namespaces:
            addresses = map(self._address, range(len(self._namespaces)))
            self._connect(f"{self._tag}br", dict(zip(self._namespaces, addresses, strict=True)))
        port = 6379 if self._namespaces else _free_port()
        head = f"{self._address(0)}:{port}"
        self.environment["RAY_ADDRESS"] = head
        common = [sys.executable, "-c", PATIENT_RAY, "start", "--block", self._store]
        common.append("--include-log-monitor=false")  # no driver reads the logs of its workers
        role = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self._folder}", "--num-cpus=0"]
        metrics_port = _free_port()
        self.metrics = f"http://{self._address(0)}:{metrics_port}/metrics"
        # And nothing scales.
        self._add(0, [*common, *role, "--no-monitor", f"--metrics-export-port={metrics_port}"])
        self.repair()
        for number in range(1, self._num_workers + 1):
            self._add(number, [*common, f"--address={head}", "--num-cpus=1"])
            # Of nodes that start at the same time two take one socket, and one waits half a minute before it gives up.
            self.repair()

    def __exit__(self, *_: object) -> None:
        self._forget()
        for node in reversed(self.nodes):
            node.kill()
        if self._namespaces:
            self._disconnect(f"{self._tag}br", self._namespaces)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def workers(self) -> list[Node]:
        """All nodes but the head."""
        return self.nodes[1:]

    def command(self, *arguments: str) -> list[str]:
        """``arguments`` as a command on the head node; its environment is :attr:`environment`."""
        return [*self.nodes[0].prefix, *arguments]

    def repair(self) -> None:
        """Every node is there: one that was lost, or that was given up and ended itself, is started anew."""
        deadline_s = time.monotonic() + START_LIMIT_S
        while True:
            for node in self.nodes:
                # Ray gives up on its own start after half a minute, which a busy machine may need.
                if node.has_ended:
                    node.start()
                    self._forget()  # the head may be another
            if self._num_alive(len(self.nodes), limit_s=_ASKED_FOR_S) == len(self.nodes):
                return
            if time.monotonic() > deadline_s:
                raise ClusterError(f"a node is not there after {START_LIMIT_S:g} s: {self._logs()}")

    def replace(self, node: Node) -> None:
        """Start ``node``, which is ending, anew once the head knows that it is lost; until then the head counts on
        it."""
        while not node.has_ended:
            time.sleep(0.1)
        self.wait_until(sum(not each.has_ended for each in self.nodes))
        self.repair()

    def wait_until(self, num_nodes: int) -> None:
        """Return when the head counts on exactly so many nodes."""
        deadline_s = time.monotonic() + START_LIMIT_S
        while (alive := self._num_alive(num_nodes, limit_s=_ASKED_FOR_S)) != num_nodes:
            if time.monotonic() > deadline_s:
                raise ClusterError(f"{alive} nodes instead of {num_nodes} after {START_LIMIT_S:g} s: {self._logs()}")

    def _logs(self) -> str:
        return "".join(path.read_text() for path in sorted(self._folder.glob("*.log")))

    def _add(self, number: int, command: Sequence[str]) -> None:
        address, namespace = self._address(number), self._namespaces[number] if self._namespaces else None
        command = [*command, f"--node-ip-address={address}"]
        environment = self.environment | self.certified(address)
        self.nodes.append(Node(address, namespace, command, environment, self._folder / f"{number}.log"))

    def certified(self, address: str) -> dict[str, str]:
        """The environment that has a certificate for ``address``; empty if this cluster does not encrypt."""
        if self._authority is None:
            return {}
        folder = self._folder / f"certificate-{address}"
        make_node_certificate(self._authority, folder, [address], days=1)
        return variables(folder)

    @property
    def link(self) -> str:
        """The device of this machine through which everything passes that reaches or leaves the head."""
        return f"{self._namespaces[0]}-br" if self._namespaces else "lo"

    def _address(self, number: int) -> str:
        return f"10.231.0.{number + 1}" if self._namespaces else f"127.0.0.{number + 1}"

    def _num_alive(self, num_nodes: int, *, limit_s: float) -> int:
        """How many nodes the head counts on, as soon as there are ``num_nodes`` or the time is over; 0 if it does not
        answer."""
        # One process is asked again and again, as it takes seconds to import Ray.
        if self._asked is None or self._asked.poll() is not None:
            self._asked = subprocess.Popen(  # noqa: S603 our own program
                self.command(sys.executable, "-c", _ALIVE),
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        assert self._asked.stdin is not None and self._asked.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it ended: its answer is then empty
            print(num_nodes, limit_s, file=self._asked.stdin, flush=True)
        return int(self._asked.stdout.readline() or 0)

    def _forget(self) -> None:
        """End the process that is asked for the number of nodes."""
        if self._asked is not None:
            self._asked.kill()
            self._asked.communicate()
            self._asked = None


def make_environment() -> dict[str, str]:
    """This process's, without a Ray of its own and with this checkout first."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return plain | {"PYTHONPATH": _ROOT}


def run_ip(*arguments: str, check: bool = True) -> None:
    """Run `ip` with ``arguments``."""
    subprocess.run(["/usr/bin/env", "ip", *arguments], check=check)  # noqa: S603 our own arguments


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
