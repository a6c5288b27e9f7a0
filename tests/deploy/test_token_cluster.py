"""A real cluster of two nodes, started by the launcher's own commands: jobs with the token, and nothing without it."""

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest
import yaml
from object_store import ACCESS_KEY, SECRET_KEY, ObjectStore, object_store

from fairpate.cli import main
from fairpate.config import apply_override
from teachers.certificates import make_authority, variables

ROOT = Path(__file__).parents[2]
SMALL = (
    "data.name=color_digits",
    "teachers.num_teachers=8",
    "teachers.block_size=2",
    "teachers.fit.epochs=1",
    "aggregator.num_queries=20",
    "aggregator.mechanism={threshold: 0, threshold_stddev_votes: 1, noise_stddev_votes: 1}",
    "target.epsilon=null",
    "student.fit.epochs=1",
)
AWS_VARIABLES = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_EC2_METADATA_DISABLED": "true",
}
COMPARISON = """
data_sets: {color_digits: {}}
methods: [residual_votes]
seeds: [0]
settings: {target: {epsilon: 3}}
"""
TIMEOUT_S = 200
pytestmark = [pytest.mark.usefixtures("light_runs"), pytest.mark.slow]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """How to reach it, and an environment that has its token."""

    head: str
    dashboard: str
    environment: dict[str, str]

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / program), *arguments]
        return subprocess.run(  # noqa: S603
            command, env=self.environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )

    def get(self, path: str) -> httpx.Response:
        """What the dashboard answers to somebody with the token."""
        token = (Path(self.environment["HOME"]) / ".ray" / "auth_token").read_text(encoding="utf-8")
        return httpx.get(self.dashboard + path, headers={"Authorization": f"Bearer {token}"}, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as running:
        yield running


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # Ray's socket names have little room
        yield from cluster_at(Path(folder))


def cluster_at(home: Path) -> Iterator[Cluster]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    python_path = os.pathsep.join([str(ROOT), environment["PYTHONPATH"]])
    environment |= {"HOME": str(home), "PATH": path, "PYTHONPATH": python_path, "RAY_HEAD_IP": "127.0.0.1"}
    environment |= {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"} | AWS_VARIABLES
    token = home / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text(secrets.token_hex(32), encoding="utf-8")
    token.chmod(0o600)
    head_port, dashboard_port, *agent_ports = free_ports(4)
    head_line, worker_line = start_lines(head_port)
    make_authority(home / ".ray" / "authority", days=1)
    for line in certificate_lines():
        subprocess.run(["bash", "-c", line], env=environment, check=True, capture_output=True)  # noqa: S603, S607
    with (
        node(f"{head_line} --temp-dir={home}/r --dashboard-port={dashboard_port}", agent_ports[0], environment),
        node(f"{worker_line} --num-cpus=1", agent_ports[1], environment),
    ):
        dashboard = f"http://127.0.0.1:{dashboard_port}"
        own = {"RAY_AUTH_MODE": "token"} | variables(home / ".ray" / "certificate")
        reached = Cluster(head=f"127.0.0.1:{head_port}", dashboard=dashboard, environment=environment | own)
        wait_for_nodes(reached, 2)
        yield reached


def certificate_lines() -> list[str]:
    """How the launcher gives each node its certificate."""
    config = yaml.safe_load((ROOT / "deploy" / "cluster-onprem.yaml").read_text(encoding="utf-8"))
    lines = [config[f"{kind}_start_ray_commands"][-2] for kind in ("head", "worker")]
    assert all("fairpate cluster certificates" in line for line in lines)
    return lines


def start_lines(port: int) -> tuple[str, str]:
    """How the launcher starts head and workers, on another port, without the autoscaler and what copies their logs."""
    config = yaml.safe_load((ROOT / "deploy" / "cluster-onprem.yaml").read_text(encoding="utf-8"))
    lines = [config[f"{kind}_start_ray_commands"][-1].replace("6379", str(port)) for kind in ("head", "worker")]
    head, worker = (re.sub(r" --autoscaling-config=\S+", "", line) + " --include-log-monitor=false" for line in lines)
    return f"{head} --no-monitor", worker


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


@contextlib.contextmanager
def node(line: str, agent_port: int, environment: dict[str, str]) -> Iterator[None]:
    """One node while the block lasts: `ray start` waits and takes its processes with it. On a busy machine Ray gives up
    on its own start after half a minute; it is started again."""
    start = f"env {line} --block --dashboard-agent-listen-port={agent_port} & ray=$!; wait $ray"
    command = f"trap 'kill $ray; wait $ray; exit' TERM; for try in 1 2 3 4; do {start}; done"
    process = subprocess.Popen(["bash", "-c", command], env=environment, stdout=subprocess.DEVNULL)  # noqa: S603, S607
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_S)


def wait_for_nodes(cluster: Cluster, count: int) -> None:
    deadline, found = time.monotonic() + TIMEOUT_S, 0
    while found < count:
        assert time.monotonic() < deadline, f"{found} of {count} nodes have come."
        with contextlib.suppress(httpx.ConnectError):
            found = len(cluster.get("/nodes?view=summary").json()["data"]["summary"])
        time.sleep(0.5)


def submitting(cluster: Cluster, here: Path, *words: str) -> subprocess.Popen[str]:
    """`fairpate cluster` in the folder ``here`` of a user's machine."""
    command = [str(Path(sys.executable).parent / "fairpate"), "cluster", *words]
    environment = cluster.environment | {"RAY_API_SERVER_ADDRESS": cluster.dashboard}
    # A script's background jobs ignore SIGINT, and so would every process that they start.
    fresh = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(  # noqa: S603
        command,
        cwd=here,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=fresh,
    )


def called(cluster: Cluster, here: Path, *words: str) -> tuple[int, str]:
    """The exit code of `fairpate cluster WORDS`, and what it said."""
    with submitting(cluster, here, *words) as process:
        assert process.stdout is not None
        return process.wait(TIMEOUT_S), process.stdout.read()


def test_a_job_is_left_followed_and_stopped_and_once_submitted_again_what_it_publishes_is_fetched(
    cluster: Cluster, store: ObjectStore, tmp_path: Path
) -> None:
    """It trains on the workers, which store their teachers themselves; its configuration is sent, its log is shown."""
    out, here = tmp_path / "head" / "run", tmp_path / "here"
    here.mkdir()
    values = apply_override({}, *SMALL, ("storage", store.uri("teachers")))
    (here / "mine.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    words = ("run", "mine.yaml", "--yes", "--out", str(out))
    with submitting(cluster, here, "submit", *words) as left:
        assert left.stdout is not None
        line = next(line for line in left.stdout if line.startswith("teachers"))
        left.send_signal(signal.SIGINT)
        said = left.stdout.read()
    assert left.returncode == 130, line + said
    (name,) = set(re.findall(r"`fairpate cluster follow (\S+) --on", said))
    with submitting(cluster, here, "follow", name) as followed:
        code, said = called(cluster, here, "stop", name)
        assert (code, said) == (0, f"{name}: asked to end\n")
        assert followed.stdout is not None
        told = followed.stdout.read()
    assert followed.returncode == 1, told
    assert f"error {name} was stopped; submit the same command again to resume." in told
    assert called(cluster, here, "stop", name) == (0, f"{name}: had ended\n")
    code, told = called(cluster, here, "submit", *words)
    assert code == 0, told
    assert "of 20 queries" in told
    fetched = here / "runs" / "run"
    assert (fetched / "public" / "statement.json").read_bytes() == (out / "public" / "statement.json").read_bytes()
    assert {path.name for path in fetched.iterdir()} == {"public", "job.json"}
    assert files_of(fetched / "public") == files_of(out / "public")
    assert len([name for name in store.objects if name.endswith(".safetensors")]) == 4
    assert not (out / "private" / "teachers").exists()


# Of a run, which takes the same path, above; which files of a comparison: tests/run/test_jobs.py
@pytest.mark.campaign
def test_of_a_comparison_the_table_the_report_and_the_figures_are_fetched(cluster: Cluster, tmp_path: Path) -> None:
    out, here = tmp_path / "head" / "sweep", tmp_path / "here"
    here.mkdir()
    (here / "sweep.yaml").write_text(COMPARISON, encoding="utf-8")
    code, told = called(cluster, here, "submit", "--to", "got", "compare", "sweep.yaml", "--yes", "--out", str(out))
    assert code == 0, told
    names = {"results.parquet", "report.html"} | {f"figures/{name}" for name in files_of(out / "figures")}
    assert files_of(here / "got") == names | {"job.json"}
    assert any(name.endswith(".pdf") for name in names)
    assert all((here / "got" / name).read_bytes() == (out / name).read_bytes() for name in names)


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_job_whose_data_the_head_lacks_ends_with_the_exit_code_of_a_request_that_cannot_be_carried_out(
    cluster: Cluster, tmp_path: Path
) -> None:
    words = ("run", "--data-dir", str(tmp_path / "nowhere"), "--out", str(tmp_path / "run"))
    with submitting(cluster, tmp_path, "submit", *words) as refused:
        assert refused.stdout is not None
        said = refused.stdout.read()
    assert refused.returncode == 2, said
    assert f"error --data-dir: {tmp_path / 'nowhere'} is not on the head of the cluster; copy it there" in said
    assert not (tmp_path / "run").exists()
    with submitting(cluster, tmp_path, "jobs") as listed:
        assert listed.stdout is not None
        assert "FAILED" in listed.stdout.read()


@pytest.mark.parametrize("token", [None, "0" * 64], ids=["without a token", "with another token"])
def test_nothing_is_told_to_others_and_nothing_is_run(cluster: Cluster, tmp_path: Path, token: str | None) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    job = {"entrypoint": f"touch {tmp_path / 'proof'}"}
    assert httpx.post(f"{cluster.dashboard}/api/jobs/", json=job, headers=headers).status_code in (401, 403)
    for path in ("/api/jobs/", "/api/version", "/nodes?view=summary"):
        assert httpx.get(cluster.dashboard + path, headers=headers).status_code in (401, 403)
        assert cluster.get(path).status_code == 200


def test_no_node_serves_metrics_which_ray_shows_without_a_token(cluster: Cluster) -> None:
    """Each node writes its port into the session's folder: -1 where it serves none."""
    files = list((Path(cluster.environment["HOME"]) / "r" / "session_latest").glob("metrics_export_port_*"))
    assert [file.read_text(encoding="ascii") for file in files] == ["-1", "-1"]


@pytest.mark.parametrize("mode", [None, "token"], ids=["knows nothing of tokens", "has no token"])
def test_a_driver_without_the_token_is_told_what_to_do(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str | None,
) -> None:
    monkeypatch.setattr(sys, "argv", ["fairpate", "run", "--out", str(tmp_path / "run")])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", cluster.head)
    for name, value in variables(Path(cluster.environment["HOME"]) / ".ray" / "certificate").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    said = capsys.readouterr().err
    assert f"error RAY_ADDRESS={cluster.head}: the cluster refuses this process's token; set RAY_AUTH_MODE=" in said
    assert "Traceback" not in said
