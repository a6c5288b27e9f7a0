"""`fairpate site` as processes on one machine: keys, a plan, a coordinator and two sites; some are killed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hospitals import folder

from fairpate import cli
from fairpate.releases.directory import RunDirectory, read_release, read_statement
from fairpate.releases.log import read_receipt

pytestmark = pytest.mark.usefixtures("light_runs")

NAMES = ("north", "south")
PARTS = (range(700), range(700, 1500))


class Machines:
    """Parties with a folder and an odometer each; those that talk to each other are processes of their own."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.started = root, []
        self.monkeypatch, self.capsys = monkeypatch, capsys
        folder(root / "coordinator", None)
        for name, part in zip(NAMES, PARTS, strict=True):
            folder(root / name, part)
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = str(found.getsockname()[1])

    def start(self, party: str, *words: str) -> subprocess.Popen[str]:
        environment = os.environ | {"FAIRPATE_STATE": str(self.root / party / "state")}
        process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "fairpate", "site", *words],
            cwd=self.root / party,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, party: str, *words: str, code: int = 0) -> tuple[str, str]:
        """Output and errors of a command that talks to no other party, in this process."""
        with self.monkeypatch.context() as patched:
            patched.chdir(self.root / party)
            patched.setenv("FAIRPATE_STATE", str(self.root / party / "state"))
            patched.setattr(sys, "argv", ["fairpate", "site", *words])
            left = 0
            try:
                cli.main()
            except SystemExit as leaving:
                left = leaving.code  # type: ignore[assignment]
        said = self.capsys.readouterr()
        assert left == code, said.err
        return said.out, said.err

    def plan(self) -> None:
        keys = {name: json.loads(self.run(name, "key", "own.key", "--json")[0])["key"] for name in NAMES}
        roster = self.root / "coordinator" / "roster.yaml"
        roster.write_text("".join(f"{name}: {key}\n" for name, key in keys.items()), encoding="utf-8")
        words = ("hospitals.yaml", "--sites", "roster.yaml", "--epsilon", "1", "-o", "plan.json", "--json")
        assert json.loads(self.run("coordinator", "plan", *words)[0])["sites"] == 2

    def serve(self) -> subprocess.Popen[str]:
        words = ("plan.json", "--data", "hospitals.yaml", "--out", "run", "--port", self.port)
        return self.start("coordinator", "serve", *words)

    def join(self, name: str) -> subprocess.Popen[str]:
        url = f"http://127.0.0.1:{self.port}"
        digest = hashlib.sha256((self.root / "coordinator" / "plan.json").read_bytes()).hexdigest()
        words = ("--data", "hospitals.yaml", "--key", "own.key", "--out", "run", "--plan", digest, "--yes")
        return self.start(name, "join", url, *words)

    def folder_of(self, party: str) -> RunDirectory:
        return RunDirectory(root=self.root / party / "run")

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 120
        while not is_so():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    made = Machines(tmp_path, monkeypatch, capsys)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finished(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return output + errors


def _status(pid: int, field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def workers_of(pid: int) -> list[int]:
    """The processes that compute a table for the site's process ``pid``."""
    found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in found if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]


def is_there(pid: int) -> bool:
    """Whether the site's process has one that computes."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return bool(workers_of(pid))
    return False


@pytest.mark.slow  # all parties in one process, interrupted at any message: tests/sites/test_faults_of_sites.py
def test_three_processes_share_a_release_though_some_are_killed(machines: Machines) -> None:
    machines.plan()
    serving, north, south = machines.serve(), machines.join("north"), machines.join("south")
    machines.wait_until(lambda: is_there(south.pid))
    os.kill(workers_of(south.pid)[0], signal.SIGKILL)
    _, errors = south.communicate(timeout=120)
    assert south.returncode == 1
    assert "ended with code -9" in errors
    # It has charged and sent its first message, and waits for the others.
    sent = machines.folder_of("north").receipt
    machines.wait_until(lambda: sent.exists() and not is_there(north.pid))
    assert _status(north.pid, "VmHWM") < 100_000, "kB"
    libraries = Path(f"/proc/{north.pid}/maps").read_text()
    assert "numpy" in libraries
    assert not [name for name in ("/torch/", "/ray/", "/pyarrow/", "/scipy/") if name in libraries]
    south = machines.join("south")
    # Killed as soon as each has a journal: somewhere among their messages.
    for party, process in (("south", south), ("coordinator", serving)):
        machines.wait_until(machines.folder_of(party).journal.exists)
        process.send_signal(signal.SIGKILL)
        process.wait()
    serving = machines.serve()
    assert "800 private records" in finished(machines.join("south"))
    finished(north)
    finished(serving)
    released = [read_release(machines.folder_of(party).released)[0] for party in ("coordinator", *NAMES)]
    assert all((each.arrays["sums_CW"] == released[0].arrays["sums_CW"]).all() for each in released)
    statement = read_statement(machines.folder_of("coordinator"))
    assert statement.epsilon is not None
    assert 0.9 < statement.epsilon <= 1
    for name in NAMES:
        receipt = read_receipt(machines.folder_of(name))
        assert receipt is not None
        assert receipt.events == released[0].events
    # No file of the coordinator names a private record of anybody.
    for path in machines.folder_of("coordinator").root.rglob("*"):
        assert not path.is_file() or b"p342" not in path.read_bytes(), path


def test_what_cannot_be_is_said_in_one_line(machines: Machines) -> None:
    machines.plan()
    words = ("hospitals.yaml", "--sites", "roster.yaml", "-o", "other.json", "--epsilon", "1")

    def refused(party: str, *line: str) -> str:
        _, errors = machines.run(party, *line, code=2)
        assert "Traceback" not in errors
        return errors

    assert "2 * may_vanish + may_collude < sites" in refused("coordinator", "plan", *words, "--may-vanish", "1")
    assert "expected os_entropy" in refused("coordinator", "plan", *words, "--set", "noise=seeded")
    assert "encrypt with --tls-cert and --tls-key" in refused(
        "coordinator", "serve", "plan.json", "--data", "hospitals.yaml", "--host", "192.0.2.1"
    )
    assert "expected https://" in refused(
        "north", "join", "http://hospital.example", "--data", "hospitals.yaml", "--key", "own.key"
    )
    assert "exists already" in refused("north", "key", "own.key")
    # A script that is repeated agrees to one plan, and not to whatever is served next.
    joining = ("join", "http://127.0.0.1:1", "--data", "hospitals.yaml", "--key", "own.key", "--yes")
    assert "name this plan with --plan DIGEST" in refused("north", *joining)
