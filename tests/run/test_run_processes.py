"""A run in processes: killed and given again, with Ray and without, it releases the same."""

import os
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
import torch
from small_runs import read_json, run

from fairpate.config import RayConfig
from student.student import load_student


@pytest.mark.slow  # interrupted before and after the ledger is written: tests/run/test_run_queries.py
@pytest.mark.parametrize("stage", ["teachers", "ledger.sqlite"])
def test_killed_in_the_middle_and_run_again_gives_the_undisturbed_labels(
    finished, small_overrides, fairpate, tmp_path, stage
):
    out = tmp_path / "run"
    idp3 = "student.idp3={max_disparity: 0.1, min_count: 10}"
    settings = [argument for value in [*small_overrides, idp3] for argument in ("--set", value)]
    (tmp_path / "empty.yaml").write_text("")
    command = ["run", str(tmp_path / "empty.yaml"), "--out", str(out), *settings]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "fairpate", *command],
        env=environment,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(out / "private" / stage, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)

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


def wait_for(path, process, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
