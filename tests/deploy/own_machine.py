# ruff: noqa: S603, S607, S108 - programs of the system, in a namespace of their own
"""A machine of its own, as far as files, users and processes go, on which a page's commands are typed as root.

It is a mount and a process namespace in which /etc, /opt, /srv and /var may be changed without changing this machine's.
`systemctl` is a stand-in that starts a unit's own command as the unit's user, with its environment, its umask, no
privileges, and every folder read-only but those that the unit names: what the unit says, without systemd.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHANGED = ("/etc", "/opt", "/srv", "/var")
_READY_S = 240.0
# What a page writes between backticks and a reader can type, by its first word.
_TYPED = re.compile(r"`((?:fairpate|systemctl|curl|df|find|pgrep|cp|uptime) [^`]+|uptime)`")


def why_not() -> str:
    """Why no machine can be made here; empty if one can."""
    if os.geteuid() != 0:
        return "only root can make a machine of its own"
    tools = ("unshare", "pkill", "mount", "runuser", "useradd", "setpriv", "curl")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"no {', '.join(missing)} on this machine"
    tried = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs t /mnt && mkdir /mnt/u /mnt/w && mount -t overlay "]
    tried[-1] += "-o lowerdir=/srv,upperdir=/mnt/u,workdir=/mnt/w o /srv"
    done = subprocess.run(tried, capture_output=True, text=True, check=False)
    return f"no overlays here: {done.stderr.strip()}" if done.returncode else ""


def commands_of(text: str) -> list[str]:
    """All commands of a page, in order: the lines of its blocks, and what sentences have between backticks."""
    found = []
    for part in re.split(r"^(```.*?^```)$", text, flags=re.MULTILINE | re.DOTALL):
        if part.startswith("```"):
            found += [line for line in part.splitlines()[1:-1] if line.strip() and not line.startswith("#")]
        else:
            found += [" ".join(each.split()) for each in _TYPED.findall(part)]
    return found


def typed(lines: list[str], base: Path, files: dict[Path, str]) -> list[tuple[str, int, str]]:
    """Each line with its exit code and what it printed. ``files``: folders that are copied to the machine first."""
    base.mkdir()
    (base / "lines").write_text("\n".join([*lines, ""]), encoding="utf-8")
    copies = [f"{source}={target}" for source, target in files.items()]
    own = [sys.executable, str(Path(__file__)), "machine", str(base), *copies]
    command = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "--propagation",
        "private",
        *own,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = done.stdout.split("\x00")
    return [(parts[i], int(parts[i + 1]), parts[i + 2]) for i in range(0, len(parts) - 1, 3)]


def _sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _overlay(place: str, uppers: Path) -> None:
    upper, work = (uppers / f"{place.replace('/', '_')}.{kind}" for kind in ("upper", "work"))
    upper.mkdir()
    work.mkdir()
    _sh("mount", "-t", "overlay", "-o", f"lowerdir={place},upperdir={upper},workdir={work}", "overlay", place)


def machine(base: Path, copies: list[str]) -> None:
    """Inside the namespace: make the machine, then type the lines in one shell."""
    uppers = base / "uppers"
    uppers.mkdir()
    _sh("mount", "-t", "tmpfs", "tmpfs", str(uppers))
    for place in CHANGED:
        _overlay(place, uppers)
    # Others must be able to reach this Python and this checkout, which may be below a folder of root's own.
    for place in {*Path(sys.base_prefix).parents, *ROOT.parents, *Path(sys.prefix).parents}:
        if not place.stat().st_mode & 0o001:
            _overlay(str(place), uppers)
            place.chmod(place.stat().st_mode | 0o011)
    Path("/opt/fairpate").mkdir()
    Path("/opt/fairpate/.venv").symlink_to(sys.prefix)
    for copy in copies:
        source, _, target = copy.partition("=")
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target, symlinks=True)
    programs = uppers / "bin"
    programs.mkdir()
    for name in ("systemctl", "protected"):
        (programs / name).write_text(
            f'#!/bin/sh\nexec {sys.executable} {Path(__file__)} {name} {programs} "$@"\n', encoding="utf-8"
        )
        (programs / name).chmod(0o755)
    # Without the tests' own certificates either, which other users cannot read.
    own = ("FAIRPATE_", "RAY_", "SSL_CERT_FILE")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    variables |= {"PATH": f"{programs}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    # One shell for all: the page defines a function in it. A server would never end: it is left when it answers.
    shell = r"""
    while IFS= read -r line <&3; do
        case "$line" in
            "fairpate serve "*)
                port=$(printf %s "$line" | sed -n 's/.*--port \([0-9]*\).*/\1/p')
                eval "$line" > "$0.out" 2>&1 &
                code=1
                for _ in $(seq 480); do
                    curl -sf "http://127.0.0.1:$port/livez" > /dev/null && code=0 && break
                    sleep .5
                done
                pkill --full "fairpate serve .*--port $port" ;;  # of this namespace alone
            *) eval "$line" > "$0.out" 2>&1; code=$? ;;
        esac
        printf '%s\0%s\0' "$line" "$code"; tr -d '\0' < "$0.out"; printf '\0'
    done 3< "$1"
    """
    subprocess.run(["bash", "-c", shell, str(uppers / "shell"), str(base / "lines")], env=variables, check=True)


def _unit(name: str) -> dict[str, list[str]]:
    path = Path("/etc/systemd/system") / (name if "." in name else f"{name}.service")
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key.strip(), []).append(value.strip())
    return found


def protected(unit: dict[str, list[str]], command: list[str]) -> list[str]:
    """The command line that runs ``command`` as a unit's, in a mount namespace of its own."""
    assert unit["ProtectSystem"] == ["strict"]
    (user,) = unit["User"]
    logs = [f"/var/log/{name}" for name in unit.get("LogsDirectory", [])]
    lines = [f"install --directory --owner {user} --group {user} --mode 0755 {path}" for path in logs]
    for path in [*" ".join(unit["ReadWritePaths"]).split(), *logs]:
        place = path.removeprefix("-")
        if Path(place).exists() or not path.startswith("-"):
            lines.append(f"mount --bind {place} {place}")
    assert unit["PrivateTmp"] == ["yes"]
    # A checkout in /tmp must stay there.
    lines.append("mount --bind /tmp /tmp" if ROOT.is_relative_to("/tmp") else "mount -t tmpfs -o mode=1777 tmpfs /tmp")
    # Everything that was mounted before those folders.
    rows = [row.split()[4] for row in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
    kept = ("/proc", "/sys", "/dev", "/run", "/tmp")
    others = [place for place in rows if not place.startswith(kept)]
    lines += [f"mount -o remount,bind,ro {shlex.quote(place)}" for place in others]
    rights = ["--reuid", user, "--regid", user, "--clear-groups", "--no-new-privs", "--inh-caps=-all"]
    variables = [
        "PATH=/usr/bin:/bin",
        f"HOME=/var/lib/{user}",
        "OMP_NUM_THREADS=1",
        f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}",  # with it tests leave out graphs
        *" ".join(unit["Environment"]).split(),
    ]
    own = shlex.join(["setpriv", *rights, "--bounding-set=-all", "env", "-i", *variables, *command])
    lines.append(f"umask {unit['UMask'][0]}; exec {own}")
    return ["unshare", "--mount", "--propagation", "private", "sh", "-e", "-c", "\n".join(lines)]


def _command(unit: dict[str, list[str]], field: str) -> list[str]:
    return shlex.split(unit[field][0].replace("$$", "$").replace("%%", "%"))


def systemctl(programs: Path, words: list[str]) -> int:
    """Start, stop and show units as `systemctl` does; a service counts as started when it is ready."""
    action, *names = (word for word in words if word not in ("--now",))
    for name in names:
        if name.endswith(".timer"):
            assert _unit(name)["OnCalendar"]
            continue
        unit, pid_file = _unit(name), programs / f"{name}.pid"
        if action in ("stop", "restart") and pid_file.exists():
            pid = int(pid_file.read_text())
            os.kill(pid, signal.SIGTERM)
            until = time.monotonic() + float(unit["TimeoutStopSec"][0])
            while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
                if time.monotonic() > until:
                    return 1
                time.sleep(0.2)
            pid_file.unlink()
        is_up = pid_file.exists() and Path(f"/proc/{pid_file.read_text()}").exists()
        if action in ("start", "enable") and is_up:
            continue
        if action == "status":
            return 0 if is_up else 3
        if action not in ("start", "restart", "enable"):
            continue
        if unit.get("Type") == ["oneshot"]:
            for field in ("ExecStart", "ExecStartPost"):
                if field in unit and (
                    code := subprocess.run(protected(unit, _command(unit, field)), check=False).returncode
                ):
                    return code
            continue
        with (programs / f"{name}.log").open("a") as log:
            started = subprocess.Popen(
                protected(unit, _command(unit, "ExecStart")), stdout=log, stderr=log, start_new_session=True
            )
        pid_file.write_text(str(started.pid))
        until = time.monotonic() + _READY_S
        while subprocess.run(
            ["curl", "-sf", "http://127.0.0.1:8517/readyz"], capture_output=True, check=False
        ).returncode:
            if started.poll() is not None or time.monotonic() > until:
                sys.stdout.write((programs / f"{name}.log").read_text())
                return 1
            time.sleep(0.5)
    return 0


if __name__ == "__main__":
    kind, place, *rest = sys.argv[1:]
    if kind == "machine":
        machine(Path(place), rest)
    elif kind == "systemctl":
        sys.exit(systemctl(Path(place), rest))
    else:  # protected UNIT COMMAND...
        sys.exit(subprocess.run(protected(_unit(rest[0]), rest[1:]), check=False).returncode)
