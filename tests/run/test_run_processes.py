"""A run in processes: interrupted or killed and given again, with Ray and without, it releases the same."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from small_runs import read_json, run

from fairpate.cli.commands import EXAMPLES
from fairpate.config import RayConfig
from student.student import load_student

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.usefixtures("light_runs"),
]

DIVIDED = """
import json, os, sys
import fairpate.run.run, sklearn.linear_model, teachers.ray_pool, teachers.teacher
from fairpate.cli import main

for line in sys.stdin:
    folder, arguments = json.loads(line)
    process = os.fork()
    if not process:
        os.chdir(folder)
        for number, name in ((1, "output"), (2, "errors")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = ["fairpate", *arguments]
        sys.exit(main())
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def begun():
    """Begin a command in a process divided from one that has imported what all of them import, in a folder where its
    output and errors are kept; return its number, and what returns its exit code once it has ended."""
    # A script's background jobs ignore SIGINT, and so would every process that they start.
    fresh = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", DIVIDED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=fresh
    ) as parent:

        def begin(folder, command):
            print(json.dumps([str(folder), command]), file=parent.stdin, flush=True)
            return int(parent.stdout.readline()), lambda: int(parent.stdout.readline())

        yield begin


@pytest.mark.slow  # interrupted before and after the ledger is written: tests/run/test_run_queries.py
@pytest.mark.parametrize("stage", ["teachers", "ledger.sqlite"])
def test_killed_in_the_middle_and_run_again_gives_the_undisturbed_labels(
    finished, small_overrides, fairpate, begun, tmp_path, stage
):
    out = tmp_path / "run"
    idp3 = "student.idp3={max_disparity: 0.1, min_count: 10}"
    settings = [argument for value in [*small_overrides, idp3] for argument in ("--set", value)]
    (tmp_path / "empty.yaml").write_text("")
    command = ["run", str(tmp_path / "empty.yaml"), "--out", str(out), *settings]
    process, ended = begun(tmp_path, command)
    until((out / "private" / stage).exists)
    os.kill(process, signal.SIGKILL)
    assert ended() == -signal.SIGKILL

    code, _, errors = fairpate(*command)
    assert code == 0, errors
    folder, _ = finished
    assert pq.read_table(out / "public/labels.parquet").equals(pq.read_table(folder.labels))
    stated, undisturbed = read_json(out / "public/statement.json"), read_json(folder.statement)
    if stated != undisturbed:  # the kill hit answers that were paid for and not yet stored: they are paid for again
        wasted = [event["count"] for event in stated["events"]]
        assert wasted == [2 * event["count"] for event in undisturbed["events"]]
        assert stated["epsilon"] > undisturbed["epsilon"]


@pytest.mark.slow
def test_ray_gives_what_this_process_gives_bit_for_bit(finished, tmp_path, ray_session):
    alone, config = finished
    update = {"out": tmp_path / "run", "ray": RayConfig(num_actors=2, num_cpus=0.5)}
    with_ray = run(config.model_copy(update=update))
    for path in [*sorted(alone.teachers.iterdir()), alone.votes, alone.labels, alone.statement, alone.metrics]:
        assert (with_ray.root / path.relative_to(alone.root)).read_bytes() == path.read_bytes(), path
    one, other = (load_student(folder.student).network.state_dict() for folder in (alone, with_ray))
    assert all(torch.equal(one[name], other[name]) for name in one | other)


@pytest.mark.slow
def test_a_signal_while_teachers_train_is_one_line_and_the_run_goes_on(fairpate, begun, small_overrides, tmp_path):
    # Of these epochs a second remains after the first line, and not more when the run goes on.
    example = str(EXAMPLES / "color_digits.yaml")
    command = [
        "run",
        example,
        "--out",
        "run",
        *(f"--set={word}" for word in [*small_overrides, "teachers.fit.epochs=40"]),
    ]
    errors = tmp_path / "errors"
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        errors.write_text("")
        process, ended = begun(tmp_path, command)
        until(lambda: "teachers     started\n" in errors.read_text())
        os.kill(process, number)
        assert (ended(), (tmp_path / "output").read_text()) == (code, "")
        assert errors.read_text().partition("teachers     started\n")[2].splitlines() == [
            "error Interrupted; finished stages are kept, and the same command resumes from them."
        ]
        assert (tmp_path / "run/config.yaml").is_file()
    code, output, said = fairpate(*command)
    assert code == 0, said
    assert str(Path("run/public/report.html")) in output


def until(is_true, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
