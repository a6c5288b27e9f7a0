"""Break a cluster while a run works on it, again and again, and check after each time what must never happen.

    python benchmarks/campaigns/cluster_faults.py [--times 5] [--workers 2] [--small-teachers] [--faults NAME ... |
        --crowd | --sizes | --kills N [--seed S]]

The nodes are real Ray nodes on this machine, started by `ray start` as on any other. For root each has a network
namespace of its own on a bridge, so that its link can be cut; otherwise they have addresses of the loopback device, and
faults of the network are left out. The driver is `fairpate run`, with a storage that all nodes share and a seeded
generator. A run without faults on one machine is the truth. After every fault either the run ends with the same
checkpoints, votes, labels and ledger, byte for byte, or it is refused with one line and a non-zero exit. A driver that
was killed is started again by the same command: what was stored is not written again, and the ledger is the same.

``--kills N`` kills head, GCS, raylets and driver at random moments of a run's life. A run that this ends must do so
with one sentence, and the same command, on a cluster that works, must finish with the result of a run without faults
and the same charges in the odometer. ``--small-teachers``: 240 teachers in closed form instead of 24 networks.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local_cluster import Cluster, ClusterError, Node, make_environment
from safetensors.numpy import load_file

STORE_BYTES = 80 * 2**20  # Ray's least is 75
RUN_LIMIT_S = 600.0
CONFIG = """
data: {name: color_digits}
teachers: {num_teachers: 24, block_size: 2, model: {name: cnn, hidden: [48]}, fit: {epochs: 10}}
aggregator:
  mechanism: {threshold: 12, threshold_stddev_votes: 3, noise_stddev_votes: 2}
  gate: {max_disparity: 0.1, min_count: 10}
noise: seeded
student: {fit: {epochs: 3}}
"""
SMALL_TEACHERS = """
data: {name: color_digits, embedding: {num_components: 20, graph_share: 0}}
target: {epsilon: 3}
teachers: {num_teachers: 240, block_size: 2, model: ridge}
aggregator:
  release: counts
  mechanism: {threshold: -.inf, noise_stddev_votes: 50}
  gate: {max_disparity: 0.1, min_count: 10}
noise: seeded
"""
FAIRPATE = (sys.executable, "-c", "from fairpate.cli import main; main()")
LOST = "Blocks lost with their worker, computed again: "


class BrokenGuaranteeError(Exception):
    """What must never happen did."""


@dataclass(kw_only=True)
class Run:
    """One `fairpate run` in a process of its own, with what it says line by line."""

    folder: Path
    command: list[str]
    environment: dict[str, str]
    lines: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Start it, or the same command again."""
        self.started_s = time.monotonic()
        self._process = subprocess.Popen(  # noqa: S603 our own command
            self.command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self) -> int:
        """Its exit status. BrokenGuaranteeError if it does not end."""
        try:
            status = self._process.wait(timeout=RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise BrokenGuaranteeError(f"still running after {RUN_LIMIT_S:g} s: {self.lines[-3:]}") from None
        self._reader.join()
        return status

    def kill(self) -> None:
        """SIGKILL; its workers find out by themselves."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def wait_for(self, happened: Callable[[Run], bool]) -> None:
        """Return as soon as it happened, or the run ended."""
        while not happened(self) and self._process.poll() is None:
            time.sleep(0.01)

    @property
    def works(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def blocks(self) -> dict[str, tuple[int, int]]:
        """Stored blocks, and what changes when one is written again."""
        stored = (self.folder / "teachers").glob("*.safetensors")
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in stored}

    @property
    def blocks_lost(self) -> int:
        """Blocks that were under way on a worker that was lost."""
        return sum(int(line.rpartition(LOST)[2]) for line in self.lines if LOST in line)

    def result(self) -> dict[str, str]:
        """Digests of all that must be the same whatever happened; keys, of the ledger and of names, are drawn anew."""
        out = self.folder / "run"
        paths = [*sorted((self.folder / "teachers").glob("*.safetensors")), out / "private" / "votes.parquet"]
        paths += [out / "public" / name for name in ("labels.parquet", "statement.json")]
        digests = {path.name.rpartition("-")[0] or path.name: _sha256(path.read_bytes()) for path in paths}
        student = load_file(out / "public" / "student.safetensors")  # its header has no fixed order
        digests["student"] = _sha256(repr([(k, v.tobytes()) for k, v in sorted(student.items())]).encode())
        with contextlib.closing(sqlite3.connect(out / "private" / "ledger.sqlite")) as ledger:
            entries = ledger.execute("SELECT number, kind, payload FROM entries ORDER BY number").fetchall()
        untimed = [(number, kind, json.loads(payload) | {"at": None}) for number, kind, payload in entries]
        return digests | {"ledger": _sha256(repr(untimed).encode())}

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def in_training(run: Run) -> bool:
    """A third of the blocks are stored, the others are not."""
    return len(run.blocks) >= 4


def in_voting(run: Run) -> bool:
    """All teachers are trained and vote."""
    return any(line.startswith("votes") and "started" in line for line in run.lines)


def in_release(run: Run) -> bool:
    """The aggregator has begun to ask."""
    return any(line.startswith("aggregator") and "started" in line for line in run.lines)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """When to break what, and how."""

    when: Callable[[Run], bool]
    breaks: Callable[[Node], None] | None = None  # None kills the driver
    delay_s: float = 0.0
    needs_network: bool = False


def _frozen(seconds: float) -> Callable[[Node], None]:
    def inject(node: Node) -> None:
        node.freeze()
        time.sleep(seconds)
        node.thaw()

    return inject


def _cut(seconds: float) -> Callable[[Node], None]:
    def inject(node: Node) -> None:
        node.cut()
        time.sleep(seconds)
        node.repair()

    return inject


def _slow(node: Node) -> None:
    """A fifth of its speed for ten seconds."""
    for _ in range(100):
        node.freeze()
        time.sleep(0.08)
        node.thaw()
        time.sleep(0.02)


def _kill_worker_process(node: Node) -> None:
    for process in node.processes(named="ray::Worker"):
        os.kill(process, signal.SIGKILL)


FAULTS = {
    "no fault": Fault(when=in_training, breaks=lambda _: None),
    "worker process killed while training": Fault(when=in_training, breaks=_kill_worker_process),
    "node killed while training": Fault(when=in_training, breaks=Node.kill),
    "node killed while voting": Fault(when=in_voting, breaks=Node.kill, delay_s=0.3),
    "node frozen for 1 s while training": Fault(when=in_training, breaks=_frozen(1.0)),
    "node frozen for 8 s while training": Fault(when=in_training, breaks=_frozen(8.0)),
    "node frozen for 8 s while voting": Fault(when=in_voting, breaks=_frozen(8.0), delay_s=0.2),
    "node at a fifth of its speed": Fault(when=in_training, breaks=_slow),
    "network cut for 1 s while training": Fault(when=in_training, breaks=_cut(1.0), needs_network=True),
    "network cut for 8 s while training": Fault(when=in_training, breaks=_cut(8.0), needs_network=True),
    # For good as far as the run can tell: it ends meanwhile, or gives up.
    "network cut for good while training": Fault(when=in_training, breaks=_cut(90.0), needs_network=True),
    "network cut for 8 s while voting": Fault(when=in_voting, breaks=_cut(8.0), delay_s=0.2, needs_network=True),
    "driver killed while training": Fault(when=in_training),
    "driver killed while voting": Fault(when=in_voting, delay_s=0.3),
    "driver killed while releasing": Fault(when=in_release),
}


@dataclass(kw_only=True)
class Tally:
    """What one fault did, every time it was injected."""

    identical: int = 0
    refused: int = 0
    ended: int = 0  # of --kills: by one sentence, after which the same command finished
    blocks_again: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def times(self) -> int:
        """Injections."""
        return self.identical + self.refused + len(self.broken)


def inject(fault: Fault, run: Run, victim: Node) -> None:
    """Break something once, when its time has come. A driver that was killed is started again."""
    run.start()
    run.wait_for(fault.when)
    time.sleep(fault.delay_s)
    if fault.breaks is not None:
        fault.breaks(victim)
        return
    run.kill()
    before = run.blocks
    run.lines.clear()
    run.start()
    run.wait()
    if again := [name for name, stamp in before.items() if run.blocks.get(name) != stamp]:
        raise BrokenGuaranteeError(f"stored blocks were written again: {again}")


def judge(run: Run, truth: Mapping[str, str], tally: Tally) -> None:
    """How the run ended. BrokenGuaranteeError for anything but the same result or a refusal in one line."""
    status = run.wait()
    if status == 0:
        result = run.result()
        if wrong := sorted(name for name in truth.keys() | result.keys() if truth.get(name) != result.get(name)):
            raise BrokenGuaranteeError(f"not the result of the undisturbed run: {wrong}")
        tally.identical += 1
    elif any(line.startswith("Traceback") for line in run.lines):
        raise BrokenGuaranteeError(f"exit {status} with a traceback: {run.lines[-3:]}")
    else:
        tally.refused += 1
        print(f"  refused: {run.lines[-1]}", file=sys.stderr)
    tally.blocks_again.append(run.blocks_lost)
    tally.seconds.append(time.monotonic() - run.started_s)


def campaign(
    cluster: Cluster, names: Sequence[str], times: int, truth: Mapping[str, str], folder: Path
) -> dict[str, Tally]:
    """Inject every fault ``times`` times, in a fresh run each, into one worker after another."""
    tallies = {name: Tally() for name in names}
    for turn in range(times):
        for number, name in enumerate(names):
            run = make_run(folder / f"{turn}-{number}", cluster)
            tally = tallies[name]
            try:
                inject(FAULTS[name], run, cluster.workers[(turn + number) % len(cluster.workers)])
                judge(run, truth, tally)
                shutil.rmtree(run.folder)
            except (BrokenGuaranteeError, ClusterError) as error:
                tally.broken.append(str(error))
                print(f"  BROKEN: {name}: {error}", file=sys.stderr)
            finally:
                cluster.repair()
            print(f"{name}: {tally.identical} of {tally.times} identical", file=sys.stderr)
        print(markdown(tallies), file=sys.stderr)
    return tallies


def lose_head(num_workers: int, truth: Mapping[str, str], folder: Path, *, namespaces: bool) -> Tally:
    """The head is lost while teachers train, which ends the run; the same command on another cluster finishes it."""
    tally = Tally()
    with Cluster(num_workers, namespaces=namespaces) as cluster:
        run = make_run(folder / "head", cluster)
        run.start()
        run.wait_for(in_training)
        cluster.nodes[0].kill()
        status = run.wait()
        print(f"  the head was lost: exit {status}, {run.lines[-1]}", file=sys.stderr)
    before = run.blocks
    with Cluster(num_workers, namespaces=namespaces) as cluster:
        run = make_run(folder / "head", cluster)
        run.start()
        judge(run, truth, tally)
    if status == 0 or any(run.blocks[name] != stamp for name, stamp in before.items()):
        tally.broken.append(f"exit {status}, or stored blocks were written again")
    return tally


def make_run(folder: Path, cluster: Cluster | None) -> Run:
    """The command, on a cluster or in one process of this machine."""
    configuration = SMALL_TEACHERS if "--small-teachers" in sys.argv else CONFIG
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "run.yaml"
    config.write_text(configuration + f"out: {folder / 'run'}\nstorage: {folder / 'teachers'}\n", encoding="utf-8")
    command, state = [*FAIRPATE, "run", str(config)], {"FAIRPATE_STATE": str(folder / "state")}
    if cluster is None:
        command += ["--set", "ray.num_actors=0"]
        return Run(folder=folder, command=command, environment=make_environment() | state)
    return Run(folder=folder, command=cluster.command(*command), environment=cluster.environment | state)


def undisturbed(folder: Path, cluster: Cluster | None = None) -> dict[str, str]:
    """The result of a run to which nothing happens."""
    run = make_run(folder, cluster)
    run.start()
    if run.wait() != 0:
        raise BrokenGuaranteeError(f"a run without faults failed: {run.lines[-5:]}")
    return run.result()


def _killing(named: str) -> Callable[[Node], None]:
    def kill(node: Node) -> None:
        for process in node.processes(named=named):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    return kill


VICTIMS: Mapping[str, tuple[int | None, Callable[[Node], None]]] = {
    "head": (0, Node.kill),
    "GCS": (0, _killing("gcs_server")),
    "raylet of the head, where the driver runs": (0, _killing("raylet/raylet")),
    "raylet of the worker": (1, _killing("raylet/raylet")),
    "driver": (None, lambda _: None),
}
"""Which node of a cluster with one worker is hit (None: the driver), and how."""


def kills(number: int, folder: Path, *, namespaces: bool, seed: int) -> dict[str, Tally]:
    """Kill one victim after another at random moments of a run, and give the same command again until it finishes; then
    the same with a new run, until ``number`` victims were killed while a run worked."""
    moments, tallies = random.Random(seed), {name: Tally() for name in VICTIMS}
    truth = undisturbed(folder / "truth") | {"charges": charges(folder / "truth")}
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(1, namespaces=namespaces, silent_s=10))
        run = make_run(folder / "0", cluster)
        run.start()
        if run.wait() != 0:
            raise BrokenGuaranteeError(f"a run without faults failed: {run.lines[-5:]}")
        lasts_s, killed, hit, run_number = time.monotonic() - run.started_s, 0, list[str](), 1
        while killed < number or hit:
            run = make_run(folder / str(run_number), cluster)
            before = run.blocks
            name = [*VICTIMS][killed % len(VICTIMS)]
            place, breaks = VICTIMS[name]
            run.start()
            # The command that follows the last kill is left alone, to finish.
            moment_s = run.started_s + (moments.uniform(0, lasts_s) if killed < number else RUN_LIMIT_S)
            while run.works and time.monotonic() < moment_s:
                time.sleep(0.01)
            if run.works and killed < number:
                killed_s, killed = time.monotonic(), killed + 1
                stage = next((line.split()[0] for line in reversed(run.lines) if line.strip()), "start")
                hit.append(name)
                if place is None:
                    run.kill()
                else:
                    breaks(cluster.nodes[place])
                if place:  # its only worker: the run waits for another
                    cluster.replace(cluster.nodes[place])
                status = run.wait()
                tallies[name].seconds.append(time.monotonic() - killed_s)
                said = [line for line in run.lines if line.startswith("error ")]
                after = f"{killed_s - run.started_s:.0f} s ({stage})"
                print(f"{killed}: {name} after {after}: exit {status}, {said}", file=sys.stderr)
                if status:
                    tallies[name].ended += 1
                    # A driver that is killed while it imports has no witness yet.
                    silent = place is None and not said
                    if (len(said) != 1 and not silent) or any("Traceback" in line for line in run.lines):
                        tallies[name].broken.append(f"exit {status} in other words than one sentence: {run.lines[-8:]}")
                if place == 0:
                    stack.close()
                    cluster = stack.enter_context(Cluster(1, namespaces=namespaces, silent_s=10))
            elif status := run.wait():
                raise BrokenGuaranteeError(f"the command failed on a cluster that works: {run.lines[-5:]}")
            if again := [block for block, stamp in before.items() if run.blocks.get(block) != stamp]:
                tallies[name].broken.append(f"stored blocks were written again: {again}")
            if status == 0:
                same = run.result() | {"charges": charges(run.folder)} == truth
                for each in hit:
                    if same:
                        tallies[each].identical += 1
                    else:
                        tallies[each].broken.append(f"not the result of the undisturbed run, after {hit}")
                print(f"run {run_number}, hit {len(hit)} times: {same and 'identical'}", file=sys.stderr)
                shutil.rmtree(run.folder)
                hit, run_number = [], run_number + 1
    return tallies


def charges(folder: Path) -> str:
    """What the odometer of a run counts, release by release."""
    with contextlib.closing(sqlite3.connect(folder / "state" / "odometer.sqlite")) as odometer:
        columns = "data, unit, relation, noise, method, events, num_queries"
        return repr(odometer.execute(f"SELECT {columns} FROM releases ORDER BY number").fetchall())  # noqa: S608 constant


def crowd(num_workers: int, folder: Path, times: int, *, namespaces: bool) -> dict[str, Tally]:
    """Runs whose shards do not fit the object stores: blocks of a quarter of a store, and blocks larger than one."""
    tallies = {}
    for name, block_size in (("object stores overfull", 1), ("a block larger than an object store", 5)):
        tallies[name] = tally = Tally()
        command = [sys.executable, __file__, "--as-crowd", str(block_size)]
        alone = Run(folder=folder, command=[*command, "--alone"], environment=make_environment())
        alone.start()
        alone.wait()
        truth = json.loads(alone.lines[-1])["votes"]
        for _ in range(times):
            with Cluster(num_workers, namespaces=namespaces, object_store_bytes=STORE_BYTES) as cluster:
                run = Run(folder=folder, command=cluster.command(*command), environment=cluster.environment)
                run.start()
                status = run.wait()
            told = json.loads(run.lines[-1]) if status == 0 else {}
            tally.seconds.append(time.monotonic() - run.started_s)
            tally.blocks_again.append(run.blocks_lost)
            if status == 0 and told["votes"] == truth:
                tally.identical += 1
                print(f"  spilled {told['spilled'] / 2**20:.0f} MiB to disk", file=sys.stderr)
            elif status != 0 and not any(line.startswith("Traceback") for line in run.lines):
                tally.refused += 1
            else:
                tally.broken.append(f"exit {status}: {run.lines[-3:]}")
    return tallies


def as_crowd(block_size: int, *, alone: bool) -> None:
    """A driver whose private records are many times an object store: prints a digest of its votes and bytes spilled."""
    import torch

    from fairpate.config import FitConfig, ModelConfig, RayConfig, TeachersTraining
    from fairpate.data.dataset import Split
    from teachers.ensemble import collect_votes, train_ensemble
    from teachers.ray_pool import RayPool, start_ray
    from teachers.work import BlockPool

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(320, 20 * STORE_BYTES // 4 // 4 // 320, generator=generator)
    split = Split(x=x, y=(x[:, 0] > 0).long(), z=torch.zeros(320).long(), record_id=tuple(map(str, range(320))))
    teachers = TeachersTraining(
        num_teachers=20, block_size=block_size, model=ModelConfig(name="logistic"), fit=FitConfig(epochs=1)
    )
    config, spilled = RayConfig(), 0
    with scratch() as folder, contextlib.ExitStack() as stack:
        if alone:
            pool: Any = BlockPool()
        else:
            stack.enter_context(start_ray(config))
            pool = stack.enter_context(RayPool(config))
        ensemble = train_ensemble(split, teachers, num_classes=2, seed=0, checkpoint_dir=folder, pool=pool)
        votes = collect_votes(ensemble, x[:32], pool=pool)
        if not alone:
            spilled = _spilled_bytes()
    print(json.dumps({"votes": hashlib.sha256(votes.tobytes()).hexdigest(), "spilled": spilled}))


def _spilled_bytes() -> int:
    """What the object stores of all nodes ever moved to disk."""
    import ray
    from ray._private import internal_api

    nodes: Any = ray.nodes  # Ray's own functions have no types
    stats: Any = internal_api.node_stats
    places = [(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in nodes()]
    return sum(stats(*place, include_memory_info=False).store_stats.spilled_bytes_total for place in places)


def sizes(truth: Mapping[str, str], folder: Path, *, namespaces: bool) -> None:
    """The same run on one, two and four workers. BrokenGuaranteeError if one differs."""
    for num_workers in (1, 2, 4):
        with Cluster(num_workers, namespaces=namespaces) as cluster:
            same = undisturbed(folder / f"workers-{num_workers}", cluster) == truth
        print(f"{num_workers} workers: {'identical' if same else 'DIFFERENT'}", file=sys.stderr)
        if not same:
            raise BrokenGuaranteeError(f"{num_workers} workers give another result")


def join_late(cluster: Cluster, truth: Mapping[str, str], folder: Path) -> Tally:
    """A run that begins on a head alone, as where nodes come on demand."""
    for node in cluster.workers:
        node.kill()
    cluster.wait_until(1)
    run, tally = make_run(folder / "late", cluster), Tally()
    run.command += ["--set", f"ray.num_actors={len(cluster.workers)}", "--set", "ray.wait_for_nodes_s=100"]
    run.start()
    run.wait_for(lambda run: any(line.startswith("teachers") for line in run.lines))
    cluster.repair()
    judge(run, truth, tally)
    return tally


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def markdown(tallies: Mapping[str, Tally]) -> str:
    """The campaign as a table."""
    rows = ["| fault | injected | finished identical | refused clearly | blocks computed again | seconds |"]
    rows.append("|---|---:|---:|---:|---:|---:|")
    for name, tally in tallies.items():
        again = f"{min(tally.blocks_again, default=0)} to {max(tally.blocks_again, default=0)}"
        seconds = f"{min(tally.seconds, default=0):.0f} to {max(tally.seconds, default=0):.0f}"
        broken = f" (and {len(tally.broken)} BROKEN)" if tally.broken else ""
        rows.append(f"| {name} | {tally.times} | {tally.identical}{broken} | {tally.refused} | {again} | {seconds} |")
    return "\n".join(rows)


def main() -> None:
    """Run the campaign and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--small-teachers", action="store_true", help="teachers in closed form instead of networks")
    parser.add_argument("--crowd", action="store_true", help="overfull object stores instead of the faults")
    parser.add_argument("--sizes", action="store_true", help="the same run on 1, 2 and 4 workers instead of the faults")
    parser.add_argument("--kills", type=int, help="so many kills at random moments instead of the faults")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of --kills")
    parser.add_argument("--as-crowd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_crowd:
        as_crowd(options.as_crowd, alone=options.alone)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nodes and namespaces must not outlive this
    namespaces = os.geteuid() == 0 and shutil.which("ip") is not None
    names = [name for name in options.faults if namespaces or not FAULTS[name].needs_network]
    with scratch() as folder:
        if options.crowd:
            tallies = crowd(options.workers, folder, options.times, namespaces=namespaces)
        elif options.kills:
            tallies = kills(options.kills, folder, namespaces=namespaces, seed=options.seed)
            print("| killed | times | the run ended, in one sentence | finished identical | seconds until its end |")
            print("|---|---:|---:|---:|---:|")
            for name, tally in tallies.items():
                seconds = f"{min(tally.seconds, default=0):.0f} to {max(tally.seconds, default=0):.0f}"
                print(f"| {name} | {len(tally.seconds)} | {tally.ended} | {tally.identical} | {seconds} |")
        elif options.sizes:
            sizes(undisturbed(folder / "truth"), folder, namespaces=namespaces)
            return
        else:
            truth = undisturbed(folder / "truth")
            with Cluster(options.workers, namespaces=namespaces) as cluster:
                tallies = campaign(cluster, names, options.times, truth, folder)
                tallies["nodes join after the start"] = join_late(cluster, truth, folder)
            tallies["head lost while training"] = lose_head(options.workers, truth, folder, namespaces=namespaces)
    if not options.kills:
        print(markdown(tallies))
    if broken := [words for tally in tallies.values() for words in tally.broken]:
        raise SystemExit("\n".join(["A guarantee was broken:", *broken]))


if __name__ == "__main__":
    main()
