"""Run deploy/slurm/fairpate.sbatch on a real Slurm of one machine, break its jobs, and check what must never happen.

    python benchmarks/campaigns/slurm.py [--times 1] [--cases run sweep ...]

The cases: a run over two nodes; a comparison; a run whose second node dies; a run whose first node, with the command,
dies; a run that is preempted by a job of a partition of higher priority; one whose time is over. Checkpoints, votes,
labels, ledger, student and the odometer's rows must be those of an undisturbed run on one machine, whatever happened
to the job, and stored blocks must not be written again. Needs root, and Debian's packages slurm-wlm and munge.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import cluster_faults
from cluster_faults import BrokenGuaranteeError, Run, Tally
from local_cluster import PATIENT_RAY, make_environment
from local_slurm import LocalSlurm, SlurmError

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm" / "fairpate.sbatch"
JOB_LIMIT_S = 1500.0
ACTIVE = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED")
SWEEP = """
data_sets: {color_digits: {}}
methods: [pate]
seeds: [0, 1]
settings:
  noise: seeded
  teachers: {num_teachers: 24, block_size: 4, model: {name: logistic}, fit: {epochs: 3}}
  aggregator: {mechanism: {threshold: 12, threshold_stddev_votes: 3, noise_stddev_votes: 2}}
  student: {fit: {epochs: 2}}
"""


def patient_programs(folder: Path) -> Path:
    """Return a folder of this environment's programs, whose `ray` does not give up on a busy machine."""
    own, place = Path(sys.executable).parent, folder / "bin"
    place.mkdir(exist_ok=True)
    for name, words in {"ray": ["-c", PATIENT_RAY], "python3": [], "fairpate": ["-m", "fairpate"]}.items():
        command = shlex.join([str(own / "python"), *words])
        (place / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
        (place / name).chmod(0o755)
    return place


class Job:
    """A job of the script, with the folder that its command writes."""

    def __init__(self, slurm: LocalSlurm, folder: Path, words: list[str], *options: str):
        self._slurm, self.folder = slurm, folder
        environment = slurm.environment | make_environment() | {"SLURM_CONF": slurm.environment["SLURM_CONF"]}
        environment |= {"FAIRPATE_STATE": str(folder / "state"), "FAIRPATE_BIN": str(patient_programs(slurm.folder))}
        command = ["sbatch", "--parsable", "--cpus-per-task=1", f"--output={folder}/log", *options, str(SCRIPT), *words]
        self.number = slurm.ask(*command, environment=environment).strip()
        self.started_s = time.monotonic()

    @property
    def known(self) -> dict[str, str]:
        """What Slurm says of it."""
        return self._slurm.job(self.number)

    @property
    def log(self) -> str:
        """What it printed so far, in all its lives."""
        path = self.folder / "log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def wait_for(self, happened: Callable[[Job], bool]) -> None:
        """Return when it happened. BrokenGuaranteeError after the limit, or if the job ended before."""
        while not happened(self):
            # Asked again, because the job may have ended between both questions.
            if (state := self.known["JobState"]) not in ACTIVE and not happened(self):
                raise BrokenGuaranteeError(f"{state}: {self.log[-2000:]}")
            if time.monotonic() > self.started_s + JOB_LIMIT_S:
                raise BrokenGuaranteeError(f"{self.known['JobState']} after {JOB_LIMIT_S:g} s: {self.log[-2000:]}")
            time.sleep(0.5)

    def wait(self) -> None:
        """Return when it has finished its work. BrokenGuaranteeError if it ends otherwise."""
        self.wait_for(lambda job: job.known["JobState"] not in ACTIVE)
        if (state := self.known["JobState"]) != "COMPLETED":
            raise BrokenGuaranteeError(f"{state}: {self.log[-2000:]}")


def in_training(job: Job) -> bool:
    """A third of the blocks are stored."""
    return len(list((job.folder / "teachers").glob("*.safetensors"))) >= 4


def losing(node: int) -> Callable[[Job, LocalSlurm], None]:
    """A node dies, and is back when Slurm has taken the job from both."""

    def lose(job: Job, slurm: LocalSlurm) -> None:
        slurm.kill(slurm.names[node])
        job.wait_for(lambda job: job.known["JobState"] != "RUNNING")
        slurm.start(slurm.names[node])

    return lose


def preempt(job: Job, slurm: LocalSlurm) -> None:
    """A job of higher priority takes the nodes for ten seconds."""
    slurm.ask("sbatch", "--partition=high", "--nodes=2", "--wrap=sleep 10", "--output=/dev/null")
    job.wait_for(lambda job: int(job.known["Restarts"]) > 0)


def end_time(job: Job, slurm: LocalSlurm) -> None:
    """Slurm warns as before the end of the job's time."""
    slurm.ask("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for(lambda job: int(job.known["Restarts"]) > 0)


DISTURBANCES: Mapping[str, Callable[[Job, LocalSlurm], None]] = {
    "run": lambda *_: None,
    "second node dies": losing(1),
    "first node dies, with the command": losing(0),
    "preempted": preempt,
    "its time is over": end_time,
}


def run_case(name: str, slurm: LocalSlurm, folder: Path, truth: Mapping[str, str], tally: Tally) -> None:
    """One run, disturbed when a third of its blocks are stored."""
    run = cluster_faults.make_run(folder, None)
    job = Job(slurm, folder, ["run", str(folder / "run.yaml")])
    job.wait_for(in_training)
    before = run.blocks
    DISTURBANCES[name](job, slurm)
    job.wait()
    tally.seconds.append(time.monotonic() - job.started_s)
    tally.blocks_again.append(job.log.count(cluster_faults.LOST))
    found = run.result() | {"charges": cluster_faults.charges(folder)}
    wrong = sorted(each for each in truth.keys() | found.keys() if truth.get(each) != found.get(each))
    if wrong or any(run.blocks[block] != stamp for block, stamp in before.items()):
        raise BrokenGuaranteeError(f"not the result of the undisturbed run: {wrong}; {job.log[-1000:]}")
    tally.identical += 1
    print(f"  restarts: {job.known['Restarts']}", file=sys.stderr)


def sweep_case(slurm: LocalSlurm, folder: Path, tally: Tally) -> None:
    """A comparison over two nodes, and on this machine alone."""
    tables = []
    for name in ("here", "job"):
        place = folder / name
        place.mkdir(parents=True)
        config = place / "sweep.yaml"
        config.write_text(SWEEP, encoding="utf-8")
        words = ["compare", str(config), "--out", str(place / "out"), "--yes"]
        if name == "job":
            job = Job(slurm, place, words)
            job.wait()
            tally.seconds.append(time.monotonic() - job.started_s)
        else:
            state = make_environment() | {"FAIRPATE_STATE": str(place / "state")}
            command = [*cluster_faults.FAIRPATE, *words, "--set", "ray.num_actors=0"]
            alone = Run(folder=place, command=command, environment=state)
            alone.start()
            if alone.wait() != 0:
                raise BrokenGuaranteeError(f"the comparison without Slurm failed: {alone.lines[-5:]}")
        records = sorted((place / "out" / "runs").glob("*/public/record.json"))
        tables.append([json.loads(path.read_text(encoding="utf-8")) for path in records])
    if len(tables[0]) != 2 or tables[0] != tables[1]:
        raise BrokenGuaranteeError("the comparison has other results than without Slurm")
    tally.blocks_again.append(0)
    tally.identical += 1


def main() -> None:
    """Run the cases and print their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1)
    names = [*DISTURBANCES, "comparison"]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    if reason := LocalSlurm.missing():
        raise SystemExit(f"No Slurm can be started here: {reason}.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # daemons and namespaces must not outlive this
    tallies = {name: Tally() for name in options.cases}
    with cluster_faults.scratch() as folder:
        truth = cluster_faults.undisturbed(folder / "truth") | {"charges": cluster_faults.charges(folder / "truth")}
        for turn in range(options.times):
            for name, tally in tallies.items():
                place = folder / f"{turn}-{names.index(name)}"
                try:
                    with LocalSlurm(2) as slurm:
                        if name == "comparison":
                            sweep_case(slurm, place, tally)
                        else:
                            run_case(name, slurm, place, truth, tally)
                except (BrokenGuaranteeError, SlurmError) as error:
                    tally.broken.append(str(error))
                    print(f"  BROKEN: {name}: {error}", file=sys.stderr)
                print(f"{name}: {tally.identical} of {tally.times} identical", file=sys.stderr)
    print(cluster_faults.markdown(tallies))
    if any(tally.broken for tally in tallies.values()):
        raise SystemExit("A guarantee was broken; see above.")


if __name__ == "__main__":
    main()
