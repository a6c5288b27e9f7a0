"""What a job of a cluster is made of, what is refused before anything is sent, and what may come back.

tests/deploy/test_token_cluster.py runs jobs on a real cluster.
"""

import io
import shlex
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import teachers.ray_cluster
from fairpate.cli import main
from fairpate.run import jobs
from fairpate.run.jobs import Cluster, Job, JobError, plan_job
from fairpate.types import UserError
from teachers.work import PoolError

OUT = ("--out", "/runs/x")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def planned(*words: str) -> Job:
    """The job of a command line, as `fairpate cluster submit` reads it, up to the cluster."""
    with pytest.MonkeyPatch.context() as patched:
        found: list[Job] = []

        def stop_here(*arguments: object, **options: object) -> Job:
            found.append(plan_job(*arguments, **options))  # type: ignore[arg-type]
            raise UserError("planned")

        patched.setattr(jobs, "plan_job", stop_here)
        patched.setattr("sys.argv", ["fairpate", "cluster", "submit", *words])
        with pytest.raises(SystemExit):
            main()
    return found[0]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line in which a command ends that cannot be carried out; no cluster is asked."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["fairpate", "cluster", "submit", "--on", "http://127.0.0.1:1", *words])
        with pytest.raises(SystemExit) as left:
            main()
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2, line
    return line


def test_a_configuration_is_sent_under_its_name_and_all_else_is_looked_for_on_the_head(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.yaml").write_text("method: mine:Method\nbackbone: {weights: /w.pth}\nstorage: /shared/t\n")
    (tmp_path / "mine.py").write_text("")
    job = planned("run", "a/x.yaml", "--data-dir", "/data dir", *OUT, "--epsilon", "1")
    assert job.words == ("x.yaml", "--data-dir", "/data dir", *OUT, "--epsilon", "1")
    assert {name: str(path) for name, path in job.sent.items()} == {"x.yaml": "a/x.yaml", "mine.py": "mine.py"}
    assert job.on_head == {"backbone.weights": "/w.pth", "--data-dir": "/data dir"}
    assert (job.out, job.to) == ("/runs/x", str(tmp_path / "runs" / "x"))


def test_the_shell_of_a_job_ends_with_2_where_a_file_is_missing_and_runs_the_words_unchanged_otherwise(
    tmp_path: Path,
) -> None:
    words = ("it's; $(touch broken)", "--set", "a.b='c d'")
    there = Job(command="run", words=words, out=None, to="", on_head={"--data-dir": str(tmp_path)})
    entry = there.entrypoint.replace("exec fairpate", "exec printf %s\\\\n")
    ran = subprocess.run(["sh", "-c", entry], capture_output=True, text=True, check=True)  # noqa: S603, S607
    assert ran.stdout.splitlines() == ["run", *words]
    missing = Job(command="run", words=words, out=None, to="", on_head={"--data-dir": "/no where's"})
    ran = subprocess.run(["sh", "-c", missing.entrypoint], capture_output=True, text=True, check=False)  # noqa: S603, S607
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error --data-dir: /no where's is not on the head of the cluster; copy it there")
    assert not (tmp_path / "broken").exists()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("run --data-dir data --out /runs/x", "--data-dir: data lies on this machine alone"),
        ("run --data mine.yaml --out /runs/x", "--data: mine.yaml lies on this machine alone"),
        ("run --weights w.pth --out /runs/x", "--weights: w.pth lies on this machine alone"),
        ("run --release-of runs/y --out /runs/x", "--release-of: runs/y lies on this machine alone"),
        ("run --set storage=teachers --out /runs/x", "storage: teachers lies on this machine alone"),
        ("run local.yaml --out /runs/x", "data.data_dir: data lies on this machine alone"),
        ("compare sweep.yaml --out /runs/x", "data_sets.a.file: data.data_dir: data lies on this machine alone"),
        ("compare sweep.yaml --out /runs/x --figures f", "--figures: not read in a job"),
        ("run --epsilon 1", "--out: missing; give the absolute path"),
        ("run --out runs/x", "--out: runs/x is relative; give the absolute path"),
        ("run --out /runs/x --epsilonn 1", "No such option: --epsilonn"),
        ("run --out /runs/x --json", "--json: not passed on to a job"),
        ("demo", "COMMAND: expected run or compare, got demo"),
        ("--to full run --out /runs/x", "--to: full is not empty and was not fetched from a job"),
    ],
)
def test_what_only_this_machine_has_is_refused_before_the_cluster_is_asked(
    line: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "local.yaml").write_text("data: {data_dir: data}\n")
    (tmp_path / "sweep.yaml").write_text("data_sets: {a: {file: local.yaml}}\nmethods: [pate]\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "private").mkdir()
    assert named in refused(capsys, *shlex.split(line))


def test_a_dry_run_needs_no_folder() -> None:
    assert planned("run", "--epsilon", "1", "--dry-run").out is None


class _Other(BaseHTTPRequestHandler):
    """A server that is not Ray's."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def other_server() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), _Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_an_address_without_a_dashboard_ends_soon_with_the_address_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody listens; somebody listens and is silent; another program answers."""
    monkeypatch.setattr(teachers.ray_cluster, "_JOB_ANSWER_LIMIT_S", 0.3)
    import ray.job_submission  # noqa: F401 - which takes seconds on a busy machine

    before_s = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent, other_server() as other:
        places = {1: "nobody answers", silent.getsockname()[1]: "nobody answers", other: "not the dashboard of a Ray"}
        for port, words in places.items():
            address = f"http://127.0.0.1:{port}"
            with pytest.raises(PoolError, match=rf"--on {address}: .*{words}.*; start the cluster, forward its dash"):
                Cluster(address)
    assert time.monotonic() < before_s + 10


def test_an_address_of_something_else_is_refused() -> None:
    with pytest.raises(UserError, match="--on ray://head:10001: not the address of a dashboard"):
        Cluster("ray://head:10001")


def packed(*names: str, link: bool = False) -> io.BytesIO:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in names:
            entry = tarfile.TarInfo(name)
            if link:
                entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            entry.size = 0 if link else 3
            archive.addfile(entry, io.BytesIO(b"abc"))
    content.seek(0)
    return content


@pytest.mark.parametrize(
    ("names", "link"),
    [
        (("private/votes.parquet",), False),
        (("public/private/votes.parquet",), False),
        (("public/../../x",), False),
        (("public/a", "/etc/x"), False),
        (("public/a", "."), False),
        (("public/a",), True),
    ],
)
def test_nothing_but_public_files_is_unpacked(names: tuple[str, ...], link: bool, tmp_path: Path) -> None:
    with pytest.raises((ValueError, tarfile.TarError)):
        jobs._unpacked(packed(*names, link=link), ("public",), tmp_path / "to", {})
    assert not list((tmp_path / "to").rglob("*"))


def test_what_is_fetched_again_replaces_what_was_fetched_before(tmp_path: Path) -> None:
    assert jobs._unpacked(packed("public/a", "public/b"), ("public",), tmp_path / "to", {"job": "1"}) == [
        "public/a",
        "public/b",
    ]
    jobs._unpacked(packed("public/a"), ("public",), tmp_path / "to", {"job": "2"})
    found = {str(path.relative_to(tmp_path)) for path in (tmp_path / "to").rglob("*")}
    assert found == {"to/public", "to/public/a", "to/job.json"}


class Here(Cluster):
    """A cluster whose jobs run in this machine's shell, and whose log has lines of others in the middle."""

    def __init__(self) -> None:
        self.address = "http://127.0.0.1:8265"

    def _submitted(self, **values: Any) -> str:
        return str(values["entrypoint"])

    def follow(self, job: str, show: Callable[[str], object], *, at_end: bool = False) -> tuple[int, str]:
        ran = subprocess.run(["sh", "-c", job], capture_output=True, text=True, check=False)  # noqa: S603, S607
        for line in ran.stdout.splitlines():
            show(line)
            show(f"Running entrypoint for job 1: {job}")
        return ran.returncode, ""


def test_public_files_arrive_and_private_ones_stay(tmp_path: Path) -> None:
    run, sweep = tmp_path / "head's run", tmp_path / "sweep"
    for name in ("public/report.html", "public/figures/a.svg", "private/votes.parquet"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(name.encode() * 1000)
    for name in ("results.parquet", "report.html", "private/results.parquet", "runs/a/private/votes.parquet"):
        (sweep / name).parent.mkdir(parents=True, exist_ok=True)
        (sweep / name).write_text(name)
    of_run = Job(command="run", words=(), out=str(run), to=str(tmp_path / "a"))
    assert Here().fetch("1", of_run) == ["public/figures/a.svg", "public/report.html"]
    assert (tmp_path / "a/public/report.html").read_bytes() == b"public/report.html" * 1000
    of_sweep = Job(command="compare", words=(), out=str(sweep), to=str(tmp_path / "b"))
    assert Here().fetch("2", of_sweep) == ["report.html", "results.parquet"]
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"report.html", "results.parquet", "job.json"}
    assert Here().fetch("3", Job(command="compare", words=(), out=str(run), to=str(tmp_path / "c"))) == []
    gone = Job(command="compare", words=(), out=str(tmp_path / "gone"), to=str(tmp_path / "d"))
    with pytest.raises(JobError, match=r"did not arrive complete .*; `fairpate cluster follow 4 --on"):
        Here().fetch("4", gone)
    assert Here().fetch("5", gone, has_failed=True) == []
