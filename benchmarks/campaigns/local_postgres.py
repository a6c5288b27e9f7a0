"""A PostgreSQL server of one's own on this machine, with a standby if asked for; for tests and campaigns.

From Debian's packages, under a folder that is given, on a socket in that folder alone. Started by root it runs as
another user, because the server refuses root.
"""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_USER = "postgres"


class ServerError(Exception):
    """The server cannot be started; the message is what it said."""


def programs() -> Path | None:
    """The folder of the newest server's programs, or None where none is installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


class Server:
    """A server in ``folder``, which must be new; use as a context manager."""

    def __init__(self, folder: Path, *, standby_of: Server | None = None) -> None:
        self.folder, self.data, self.socket = folder, folder / "data", folder / "s"
        self.settings: dict[str, object] = {"max_connections": 40, "shared_buffers": "32MB"}
        for path in (folder, self.socket):
            path.mkdir(mode=0o700)
            if os.geteuid() == 0:
                found = pwd.getpwnam(_USER)
                os.chown(path, found.pw_uid, found.pw_gid)
        if standby_of is None:
            self._run("initdb", "-D", str(self.data), "-A", "trust", "-U", "fairpate", "--no-sync", "-E", "UTF8")
        else:
            source = f"host={standby_of.socket} user=fairpate application_name={folder.name}"
            self._run("pg_basebackup", "-D", str(self.data), "-R", "-X", "stream", "-c", "fast", "-d", source)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def url(self, ledger: str = "") -> str:
        """A ledger's place on this server; without one, the database."""
        return f"postgresql:///postgres?host={self.socket}&user=fairpate" + (f"#{ledger}" if ledger else "")

    def start(self) -> None:
        """Start it with its settings, and wait until it answers."""
        options = " ".join(f"-c {name}={value}" for name, value in self.settings.items())
        options += f" -k {self.socket} -c listen_addresses="
        self._run("pg_ctl", "-D", str(self.data), "-w", "-l", str(self.folder / "log"), "-o", options, "start")

    def stop(self) -> None:
        """End it in order, if it runs."""
        self._run("pg_ctl", "-D", str(self.data), "-m", "fast", "-w", "stop", may_fail=True)

    def kill(self) -> None:
        """End every process of it at once, as a loss of power does to the processes."""
        processes = self._signal(signal.SIGKILL)
        while any(Path(f"/proc/{process}").exists() for process in processes):
            time.sleep(0.01)
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def pause(self) -> None:
        """Stop every process of it where it is: connections stay, and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let paused processes continue."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> Sequence[str]:
        postmaster = (self.data / "postmaster.pid").read_text().split()[0]
        found = subprocess.run(["pgrep", "-P", postmaster], capture_output=True, text=True, check=False)  # noqa: S603, S607
        processes = [postmaster, *found.stdout.split()]
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(int(process), number)
        return processes

    def promote(self) -> None:
        """Make a standby the primary."""
        self._run("pg_ctl", "-D", str(self.data), "-w", "promote")

    def _run(self, program: str, *arguments: str, may_fail: bool = False) -> None:
        folder = programs()
        if folder is None:
            raise ServerError("PostgreSQL is not installed.")
        command: Sequence[str] = [str(folder / program), *arguments]
        if os.geteuid() == 0:
            command = ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups", "--", *command]
        # Not to a pipe: the server keeps open what it was started with.
        with (self.folder / "said").open("a+") as said:
            done = subprocess.run(command, stdout=said, stderr=said, cwd="/", timeout=120, check=False)  # noqa: S603
            if done.returncode and not may_fail:
                said.seek(0)
                raise ServerError(f"{program}: {said.read()[-2000:]}")
