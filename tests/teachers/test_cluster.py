"""What is said when no cluster answers or its head goes away, and who reaches a Ray of this machine."""

import concurrent.futures
import contextlib
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import ray

from fairpate.config import RayConfig
from teachers import ray_cluster
from teachers.ray_cluster import head_watched, last_words, read_authentication_again, require_head
from teachers.ray_pool import _session_folder, start_ray
from teachers.work import PoolError

pytestmark = pytest.mark.xdist_group("ray")

LIMIT_S = 20.0


def listening(port: int = 0) -> socket.socket:
    return socket.create_server(("", port))


def wait_until(happened: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < limit, "nothing was said"
        time.sleep(0.01)


def test_a_head_that_goes_away_and_comes_back_is_told_of_once_each(caplog: pytest.LogCaptureFixture) -> None:
    head = listening()
    port = head.getsockname()[1]
    with caplog.at_level(logging.WARNING), head_watched(f"127.0.0.1:{port}", interval_s=0.02):
        time.sleep(0.2)
        assert not caplog.messages
        head.close()
        wait_until(lambda: len(caplog.messages) == 1)
        time.sleep(0.2)
        assert len(caplog.messages) == 1
        assert f"127.0.0.1:{port}, does not answer" in caplog.messages[0]
        with listening(port):
            wait_until(lambda: len(caplog.messages) == 2)
    assert "answers again" in caplog.messages[1]


@contextlib.contextmanager
def answering(reply: bytes | None) -> Iterator[str]:
    """The address of a server that says ``reply`` to every client, and ends the connection; None: never a word."""
    with listening() as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while reply is not None:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(100)
                        connection.sendall(reply)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.2:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (None, "nobody answers at 127.0.0.2:.* \\(timed out\\); start the cluster, correct the address, or unset"),
        (
            b"HTTP/1.1 505 HTTP Version Not Supported\r\n\r\n",
            "is not the head of a Ray cluster; give the head's own port",
        ),
        (b"SSH-2", "is not the head of a Ray cluster"),
    ],
)
def test_what_is_no_head_is_said_at_once(reply: bytes | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself waits for minutes, whatever listens there."""
    monkeypatch.setattr(ray_cluster, "_HEAD_LIMIT_S", 0.4)
    with answering(reply) as address, pytest.raises(PoolError, match=f"RAY_ADDRESS={address}: .*{words}"):
        require_head(address)
    with answering(reply) as address, pytest.raises(PoolError, match=words):
        require_head(f"ray://{address}")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.2:1", "nobody answers at 127.0.0.2:1 \\(Connection refused\\)"),
        ("ray://127.0.0.2:1", "nobody answers at 127.0.0.2:1"),
        ("[::2]:1", "nobody answers at ::2:1"),
        ("no-such-host.invalid:6379", "nobody answers at no-such-host.invalid:6379 "),
        ("6379", "not an address of a Ray cluster; give HOST:PORT"),
        ("host", "not an address"),
        ("host:port", "not an address"),
        ("host:70000", "not an address"),
        ("ray://host:70000", "not an address"),
        ("http://", "not an address"),
    ],
)
def test_an_address_where_nobody_is_and_one_that_is_none(address: str, words: str) -> None:
    with pytest.raises(PoolError, match=f"^RAY_ADDRESS={re.escape(address)}: .*{words}"):
        require_head(address)


def test_a_process_without_a_token_that_shall_have_one_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own client would end this process."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    read_authentication_again()
    try:
        settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
        with answering(settings) as address, pytest.raises(PoolError, match="refuses this process's token"):
            require_head(address)
    finally:
        monkeypatch.undo()
        read_authentication_again()


def test_a_server_of_the_heads_protocol_is_taken_for_one_with_and_without_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's own server; a process without the cluster's certificates is told which variables name them."""
    grpc = pytest.importorskip("grpc", reason="the package grpcio is not installed")
    authority, server_files, stranger = certificates(tmp_path)
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    plain = f"ray://127.0.0.2:{server.add_insecure_port('127.0.0.2:0')}"
    files = [(server_files[1].read_bytes(), server_files[0].read_bytes())]
    credentials = grpc.ssl_server_credentials(files, authority.read_bytes(), require_client_auth=True)
    encrypted = f"ray://127.0.0.2:{server.add_secure_port('127.0.0.2:0', credentials)}"
    server.start()
    try:
        require_head(plain)
        with pytest.raises(PoolError, match="is not the head of a Ray cluster"):
            require_head(plain.removeprefix("ray://"))  # asked for its cluster, it has none
        with pytest.raises(PoolError, match="set RAY_USE_TLS=1 if the cluster is encrypted"):
            require_head(encrypted)
        monkeypatch.setenv("RAY_USE_TLS", "1")
        monkeypatch.setenv("RAY_TLS_CA_CERT", str(authority))
        for name, path in zip(("CERT", "KEY"), server_files, strict=True):
            monkeypatch.setenv(f"RAY_TLS_SERVER_{name}", str(path))
        require_head(encrypted)
        with pytest.raises(PoolError, match="does not accept an encrypted connection"):
            require_head(plain)
        for name, path in zip(("CERT", "KEY"), stranger, strict=True):
            monkeypatch.setenv(f"RAY_TLS_SERVER_{name}", str(path))
        with pytest.raises(PoolError, match=r"does not accept an encrypted connection .*RAY_TLS_CA_CERT"):
            require_head(encrypted)
    finally:
        server.stop(None)


def certificates(folder: Path) -> tuple[Path, tuple[Path, Path], tuple[Path, Path]]:
    """An authority, a certificate that it signed with its key, and one that signed itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, capture_output=True, check=True)  # noqa: S603, S607

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("authority", "stranger"):
        openssl("req", "-x509", *new, "-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", f"/CN={name}")
    openssl("req", *new, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    signer = ("-CA", "authority.crt", "-CAkey", "authority.key", "-CAcreateserial")
    openssl("x509", "-req", "-in", "node.csr", *signer, "-out", "node.crt", "-days", "2")
    node, stranger = ((folder / f"{name}.crt", folder / f"{name}.key") for name in ("node", "stranger"))
    return folder / "authority.crt", node, stranger


@pytest.mark.parametrize("lost", ["head", "node", "nobody"])
@pytest.mark.parametrize("is_own", [False, True])
def test_a_process_that_is_ended_without_an_exception_leaves_one_sentence(lost: str, is_own: bool) -> None:
    """As Ray ends it; what was lost is found out after its end."""
    with tempfile.TemporaryDirectory() as short, listening() as head, socket.socket(socket.AF_UNIX) as node:
        place, address = f"{short}/raylet", f"127.0.0.1:{head.getsockname()[1]}"
        node.bind(place)
        node.listen()
        if lost == "head":
            head.close()
        if lost in ("head", "node"):
            node.close()
        said, saying = os.pipe()
        process = os.fork()
        if not process:
            os.dup2(saying, 2)
            with last_words(address, place, is_own=is_own):
                os._exit(1)
        os.close(saying)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
        with os.fdopen(said) as to_its_end:
            (line,) = to_its_end.read().splitlines()
    expected = {
        ("head", False): f"The head of the Ray cluster, {address}, is gone",
        ("node", False): "The Ray node of this machine died",
        ("head", True): "Ray on this machine died",
        ("node", True): "Ray on this machine died",
    }.get((lost, is_own), "This command was killed")
    assert line.startswith(f"error {expected}")
    assert "give the same command again" in line
    assert line.endswith("; it resumes from what is stored, and what was charged stays charged.")


def test_a_process_that_ends_itself_leaves_its_last_words_unsaid(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="own"), last_words("127.0.0.1:1", "/nowhere", is_own=False):
        raise ValueError("own words")
    assert capfd.readouterr().err == ""


def of_this_ray() -> set[int]:
    """The processes of this session's Ray: other clusters that this process started are none of it."""
    session = Path(ray._private.worker._global_node.get_session_dir_path()).name.encode()
    roots = [pid for pid in family_of(os.getpid()) - {os.getpid()} if session in command_of(pid)]
    return set().union(*(family_of(root) for root in roots))


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def family_of(root: int) -> set[int]:
    """``root`` and the processes that it started."""
    rows = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout  # noqa: S607
    parents = [tuple(map(int, row.split())) for row in rows.splitlines()]
    family, size = {root}, 0
    while len(family) > size:
        size = len(family)
        family |= {pid for pid, parent in parents if parent in family}
    return family


def listening_addresses(family: set[int]) -> set[str]:
    """Where these processes listen, as `ss` shows it, without the ports."""
    sockets = subprocess.run(["ss", "-H", "-ltnp"], capture_output=True, text=True, check=True).stdout.splitlines()  # noqa: S607
    of_ray = [row for row in sockets if family & set(map(int, re.findall(r"pid=(\d+)", row)))]
    return {row.split()[3].rpartition(":")[0] for row in of_ray}


@pytest.mark.skipif(shutil.which("ss") is None, reason="`ss` (iproute2) is not installed")
def test_a_ray_of_this_machine_listens_on_loopback_alone(ray_session: None) -> None:
    ray.get(ray.remote(lambda: None).remote())  # a worker is there
    addresses = listening_addresses(of_this_ray())
    assert addresses
    assert {address.strip("[]").removeprefix("::ffff:") for address in addresses} <= {"127.0.0.1", "::1"}


def test_a_ray_of_this_machine_asks_for_a_token_that_is_in_no_file(ray_session: None) -> None:
    """Its processes were told so; that Ray then refuses others is tested on the cluster of tests/deploy."""
    found = []
    for pid in of_this_ray():
        command = command_of(pid)
        if b"gcs_server" in command or b"/raylet " in command.replace(b"\0", b" "):
            with contextlib.suppress(OSError):
                found.append(dict(line.split(b"=", 1) for line in environment_of(pid)))
    if not found:
        pytest.skip("the processes of Ray cannot be seen here")
    assert {variables[b"RAY_AUTH_MODE"] for variables in found} == {b"token"}
    (token,) = {variables[b"RAY_AUTH_TOKEN"].decode() for variables in found}
    kept = Path.home() / ".ray" / "auth_token"
    assert len(token) == 64
    assert not kept.exists() or kept.read_text(encoding="utf-8").strip() != token


def environment_of(pid: int) -> list[bytes]:
    return [line for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in line]


def test_a_ray_that_cannot_start_is_told_with_a_remedy_and_leaves_the_environment_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = []

    def refuse(*_: object, **__: object) -> None:
        tries.append(os.environ["RAY_AUTH_MODE"])
        raise Exception("The current node timed out during startup.")  # noqa: TRY002 - as Ray does

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = dict(os.environ)
    words = "did not start on this machine: The current node timed out during startup. .* give the same command again"
    with pytest.raises(PoolError, match=words), start_ray(RayConfig()):
        pass
    assert tries == ["token", "token"]
    changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
    assert changed <= {"RAY_worker_niceness", "RAY_USAGE_STATS_ENABLED"}


def test_the_files_of_a_ray_are_in_a_folder_of_its_user_alone(ray_session: None) -> None:
    """Ray's own folders are open to all users, who could put another socket in the place of the raylet's."""
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    folder, raylet = session.parents[1], session / "sockets" / "raylet"
    found = folder.stat()
    assert (found.st_uid, found.st_mode & 0o777) == (os.geteuid(), 0o700)
    assert folder.name.startswith("fairpate-")
    commands = b"".join(command_of(pid) for pid in of_this_ray())
    assert str(raylet).encode() in commands
    assert b"/tmp/ray" not in commands
    if os.geteuid() == 0:  # a user that exists on every machine: tried for real
        tried = f"import os; os.setgid(65534); os.setuid(65534); os.rename({str(raylet)!r}, {str(raylet)!r} + '.old')"
        done = subprocess.run([sys.executable, "-c", tried], capture_output=True, text=True, check=False)  # noqa: S603
        assert "PermissionError" in done.stderr
    assert raylet.is_socket()


def test_a_ray_of_this_machine_has_no_server_of_a_dashboard(ray_session: None) -> None:
    """Its start would wait for one, and a port more would listen."""
    commands = [command_of(pid).replace(b"\0", b" ") for pid in of_this_ray()]
    (raylet,) = [command for command in commands if command.partition(b" ")[0].endswith(b"/raylet")]
    assert b"dashboard/agent.py" in raylet
    assert b" --minimal" in raylet
    assert not [command for command in commands if b"dashboard/dashboard.py" in command]


def test_no_port_of_a_ray_of_this_machine_shows_its_metrics(ray_session: None) -> None:
    """Ray would serve them to every user, without its token."""
    ray.get(ray.remote(lambda: None).remote())
    rows = subprocess.run(["ss", "-H", "-ltnp"], capture_output=True, text=True, check=True).stdout.splitlines()  # noqa: S607
    family = of_this_ray()
    ports = {
        int(row.split()[3].rpartition(":")[2])
        for row in rows
        if family & {int(pid) for pid in re.findall(r"pid=(\d+)", row)}
    }
    assert ports
    for port in ports:
        for path in ("/", "/metrics"):
            try:
                told = httpx.get(f"http://127.0.0.1:{port}{path}", timeout=1).text
            except httpx.HTTPError:
                continue
            assert "ray_" not in told


STRANGER = """
import json, os, socket, sys
import ray
from ray._raylet import InnerGcsClient

if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)  # a user that exists on every machine
said = {}
for port in json.loads(sys.argv[2]):
    for words in ("GET / HTTP/1.1", "GET /api/jobs/ HTTP/1.1", "POST /get_or_create_runtime_env HTTP/1.1"):
        try:
            with socket.create_connection(("127.0.0.1", port), 5) as stream:
                stream.sendall(f"{words}\\r\\nHost: x\\r\\nContent-Length: 0\\r\\n\\r\\n".encode())
                answer = stream.recv(12).decode(errors="replace")
        except OSError:
            answer = ""
        said[f"{port} {words}"] = answer.partition(" ")[2] if answer.startswith("HTTP/") else ""
try:
    InnerGcsClient.standalone(sys.argv[1], None, 4000)
    said["head"] = "joined"
except Exception as error:
    said["head"] = type(error).__name__
print(json.dumps(said))
"""


@pytest.mark.skipif(shutil.which("ss") is None, reason="`ss` (iproute2) is not installed")
def test_another_user_of_this_machine_is_answered_by_no_port_without_the_token(ray_session: None) -> None:
    ray.get(ray.remote(lambda: None).remote())
    rows = subprocess.run(["ss", "-H", "-ltnp"], capture_output=True, text=True, check=True).stdout.splitlines()  # noqa: S607
    family = of_this_ray()
    ports = [
        int(row.split()[3].rpartition(":")[2])
        for row in rows
        if family & {int(pid) for pid in re.findall(r"pid=(\d+)", row)}
    ]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    head = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", STRANGER, head, json.dumps(ports)]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=True)  # noqa: S603 - our own program
    said = json.loads(done.stdout)
    assert said.pop("head") == "AuthenticationError"
    # gRPC's own ports hang up on HTTP/1.1; others ask for the token.
    assert set(said.values()) <= {"", "401"}
    assert "401" in said.values()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "/tmp"),  # noqa: S108
        ({"TMPDIR": "/var/tmp"}, "/var/tmp"),  # noqa: S108
        ({"TMPDIR": "LONG"}, "/tmp"),  # noqa: S108
        ({"TMPDIR": "OPEN"}, "/tmp"),  # noqa: S108
        ({"TMPDIR": "MISSING"}, "/tmp"),  # noqa: S108
        ({"RAY_TMPDIR": "/var/tmp", "TMPDIR": "/tmp"}, "/var/tmp"),  # noqa: S108
        ({"RAY_TMPDIR": "LONG"}, None),
        ({"RAY_TMPDIR": "OPEN"}, None),
        ({"RAY_TMPDIR": "MISSING"}, None),
    ],
    ids=str,
)
def test_the_folder_of_a_ray_is_where_its_sockets_fit_and_others_cannot_exchange_it(
    variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        places = {"LONG": Path(short) / ("x" * 20), "OPEN": Path(short) / "o", "MISSING": Path(short) / "m"}
        places["LONG"].mkdir()
        places["OPEN"].mkdir()
        places["OPEN"].chmod(0o777)
        monkeypatch.delenv("TMPDIR", raising=False)
        monkeypatch.delenv("RAY_TMPDIR", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(places.get(value, value)))
        if expected is None:
            with pytest.raises(PoolError, match="set RAY_TMPDIR to a folder with a path of at most 21 bytes"):
                _session_folder()
            return
        made = _session_folder()
        try:
            assert (str(made.parent), made.stat().st_mode & 0o777) == (expected, 0o700)
            # The longest name that Ray gives, on a machine with as many processes as Linux has.
            longest = made / "ray" / "session_2026-01-31_23-59-59_999999_4194304" / "sockets" / "plasma_store"
            assert len(os.fsencode(longest)) <= 107
        finally:
            made.rmdir()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The session's folder of a Ray of another process that has ended, and the file of the package that a worker took.
    The process ran in a folder that has one of the package's name, as with `fairpate run --out fairpate`."""
    here = tmp_path_factory.mktemp("ended")
    (here / "fairpate" / "public").mkdir(parents=True)
    program = (
        "import ray\nfrom fairpate.config import RayConfig\nfrom teachers.ray_pool import start_ray\n"
        "def package():\n    import fairpate\n    return fairpate.__file__\n"
        "with start_ray(RayConfig(num_actors=1)):\n"
        "    print(ray._private.worker._global_node.get_session_dir_path())\n"
        "    print(ray.get(ray.remote(package).remote()))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", program]  # without the working directory on the path, as the command
    done = subprocess.run(  # noqa: S603 - our own program
        command, cwd=here, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    session, package = map(Path, done.stdout.splitlines())
    return session, package


@pytest.mark.slow  # a Ray of its own
def test_the_files_of_a_ray_are_gone_after_its_end(ended: tuple[Path, Path]) -> None:
    session, _ = ended
    assert session.name.startswith("session_")
    assert not session.parents[1].exists()


@pytest.mark.slow  # the same
def test_a_folder_named_as_the_package_is_not_taken_for_it_by_workers(ended: tuple[Path, Path]) -> None:
    """Of an editable installation too."""
    _, package = ended
    assert package.name == "__init__.py"


@pytest.mark.slow  # a Ray of its own
def test_a_ray_that_dies_under_a_run_ends_it_with_one_sentence() -> None:
    """Ray ends the process without an exception, when it next touches the object store."""
    program = (
        "import os, signal, time\nimport ray\nfrom pathlib import Path\nfrom fairpate.config import RayConfig\n"
        "from teachers.ray_pool import start_ray\n"
        "with start_ray(RayConfig(num_actors=1)):\n"
        "    for process in Path('/proc').glob('[0-9]*/stat'):\n"
        "        words = process.read_text().split()\n"
        "        if words[1] == '(raylet)' and int(words[3]) == os.getpid():\n"
        "            os.kill(int(words[0]), signal.SIGKILL)\n"
        "    for _ in range(600):\n        ray.put(0)\n        time.sleep(.1)\n"
    )
    done = subprocess.run(  # noqa: S603 our own program
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if line.startswith("error ")] == [
        "error Ray on this machine died, and ended this command: free memory if it ran out, and give the same command "
        "again; it resumes from what is stored, and what was charged stays charged."
    ]
    assert "Traceback" not in done.stderr


@pytest.mark.slow  # Ray itself waits for half a minute
def test_a_ray_that_dies_while_it_starts_is_started_again_and_its_files_are_kept_after_an_error() -> None:
    """In a process of its own, as one of this session may run here; its raylet is killed once."""
    asked = subprocess.run(  # noqa: S603 our own program
        [sys.executable, "-c", STARTED_AGAIN], capture_output=True, text=True, timeout=200, check=False
    )
    assert asked.returncode == 1, asked.stderr
    assert "ValueError: an error inside" in asked.stderr
    said, session = asked.stdout.splitlines()
    assert said == "killed 1, works"
    assert Path(session).exists()
    shutil.rmtree(Path(session).parents[1])


STARTED_AGAIN = """
import os, signal, threading, time
from pathlib import Path
from fairpate.config import RayConfig
from teachers.ray_pool import start_ray

killed = []

def kill():
    while not killed:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "stat").read_text().split()
                if words[1] == "(raylet)" and int(words[3]) == os.getpid():
                    os.kill(int(process.name), signal.SIGKILL)
                    killed.append(process.name)
            except OSError:
                pass
        time.sleep(0.02)

threading.Thread(target=kill, daemon=True).start()
with start_ray(RayConfig()):
    import ray
    print(f"killed {len(killed)},", ray.get(ray.remote(lambda: "works").remote()))
    print(ray._private.worker._global_node.get_session_dir_path())
    raise ValueError("an error inside")
"""
