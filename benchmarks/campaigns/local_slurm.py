"""A Slurm of several nodes on one machine: munge, a controller, and one slurmd for each node, from Debian's packages
slurm-wlm and munge.

Each node has a network namespace with an address of its own on a bridge, so that nodes differ as machines do. Needs
root.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from local_cluster import Machines, run_ip

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
START_LIMIT_S = 60.0
_NETWORK = "10.232.0"
_CONFIG = """
ClusterName=fairpate
SlurmctldHost={host}({network}.254)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
KillWait=20
MinJobAge=3600
SchedulerParameters=sched_interval=5,batch_sched_delay=0,bf_interval=5
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=20 MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


class SlurmError(Exception):
    """A Slurm that is not as it should be in time."""


class LocalSlurm(Machines):
    """Munge, a controller and ``num_nodes`` nodes of ``cpus`` CPUs each; use as a context manager."""

    def __init__(self, num_nodes: int, *, cpus: int = 1):
        self.folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))
        self.names = [f"n{number}" for number in range(num_nodes)]
        self._cpus, self._tag = cpus, f"sl{secrets.token_hex(2)}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    @property
    def _places(self) -> list[str]:
        """The network namespaces of the nodes."""
        return [f"{self._tag}{name}" for name in self.names]

    @staticmethod
    def missing() -> str | None:
        """Why no Slurm can be started here; None if one can."""
        if os.geteuid() != 0:
            return "Slurm's daemons need root"
        lacking = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
        return f"{', '.join(lacking)} not installed (Debian: slurm-wlm, munge)" if lacking else None

    def _start(self) -> None:
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        ports = _free_ports(len(self.names) + 1)
        host = socket.gethostname().partition(".")[0]
        addresses = [f"{_NETWORK}.{number}" for number in range(1, len(self.names) + 1)]
        self._connect(f"{self._tag}br", dict(zip(self._places, addresses, strict=True)))
        run_ip("addr", "add", f"{_NETWORK}.254/24", "dev", f"{self._tag}br")  # of the controller, on this machine
        nodes = []
        for number, (name, address) in enumerate(zip(self.names, addresses, strict=True)):
            known = f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={ports[number + 1]}"
            nodes.append(f"{known} CPUs={self._cpus} RealMemory=4000")
        values = {"host": host, "port": ports[0], "user": getpass.getuser(), "folder": self.folder, "network": _NETWORK}
        text = _CONFIG.format(nodes="\n".join(nodes), **values)
        (self.folder / "slurm.conf").write_text(text, encoding="utf-8")
        munge = [f"--key-file={key}", f"--log-file={self.folder}/munge.log", f"--pid-file={self.folder}/munge.pid"]
        munge += [f"--socket={self.folder}/munge.socket", f"--seed-file={self.folder}/munge.seed", "--foreground"]
        self._run("munged", "munged", "--force", *munge)
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munge")
        self._run("slurmctld", "slurmctld", "-D")
        for name in self.names:
            self.start(name)
        self._wait(lambda: len(self.states("idle")) == len(self.names), "nodes")

    def start(self, name: str) -> None:
        """Start the daemon of a node, for the first time or again."""
        # Not by `ip netns exec`, which hides the control groups that slurmd wants.
        self._run(name, "slurmd", "-D", "-N", name, inside=("nsenter", f"--net=/run/netns/{self._tag}{name}"))

    def kill(self, name: str) -> None:
        """SIGKILL to a node's daemon and all that runs there, as when the machine is gone."""
        daemon = self._processes.pop(name)
        while victims := self._processes_of(name):
            for process in victims:
                _kill(process)
            daemon.wait()
            time.sleep(0.1)

    def _processes_of(self, name: str) -> list[int]:
        """Return the processes in a node's network namespace."""
        asked = subprocess.run(  # noqa: S603 our own words
            ["/usr/bin/env", "ip", "netns", "pids", f"{self._tag}{name}"], capture_output=True, text=True, check=False
        )
        return [int(word) for word in asked.stdout.split()]

    def states(self, state: str) -> list[str]:
        """The nodes that are in a state."""
        listed = self.ask("sinfo", "--noheader", "--Node", f"--states={state}", "--format=%N", "--partition=low")
        return sorted(set(listed.split()))

    def ask(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(  # noqa: S603 our own words
            command, env=environment or self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise SlurmError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What the controller says of a job, by name."""
        words = self.ask("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for name in self.names:
            for left in self._processes_of(name):
                _kill(left)
        self._disconnect(f"{self._tag}br", self._places)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, name: str, *command: str, inside: tuple[str, ...] = ()) -> None:
        program = shutil.which(command[0], path=_path())
        assert program is not None, command
        with (self.folder / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(  # noqa: S603 our own command
                [*inside, program, *command[1:]], env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def _wait(self, happened: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + START_LIMIT_S
        while True:
            with contextlib.suppress(SlurmError):
                if happened():
                    return
            if time.monotonic() > deadline_s:
                logs = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
                said = "".join(path.read_text(encoding="utf-8")[-1500:] for path in logs)
                raise SlurmError(f"{what} not there after {START_LIMIT_S:g} s: {said}")
            time.sleep(0.3)


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _free_ports(number: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in taken]
    for each in taken:
        each.close()
    return ports
