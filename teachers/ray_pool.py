"""Everything that runs on Ray: clusters, pools of actors that train blocks of teachers, and actors that serve votes.

* :func:`start_ray` uses the Ray that is running, joins the cluster at RAY_ADDRESS, or starts Ray on this machine for as
  long as it is needed. A Ray that it starts is private to this process. If Ray ends this process because its head or
  node died, the user is told so (:mod:`teachers.ray_cluster`).
* :class:`RayPool` is a bounded pool of actors that train or vote, one block of teachers at a time. An item is sent only
  to the worker that computes it. A lost worker is replaced on any node with free resources, and its items are computed
  again, with the same results because the function is pure. Ray's own retries are not enough: tasks of a lost actor
  would wait for resources while other actors are idle, and plain Ray tasks notice a silent node only after minutes.
* :class:`ServingTeachers` are actors that keep their blocks of weights and vote on request. An actor that dies or hangs
  (it answers pings while it works) is restarted, reads its teachers and votes again, with the same result because a
  vote is a pure function. Votes from which a teacher is missing are never returned.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import math
import os
import secrets
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fairpate.config import RayConfig
from fairpate.lazy import Later, torch
from fairpate.types import PACKAGES, IntArray
from teachers import ray_cluster, work
from teachers.ray_cluster import ray
from teachers.work import BlockFunction, BlockPool, PoolError

if TYPE_CHECKING:
    from teachers import ensemble as ensembles
    from teachers.ensemble import Ensemble
else:
    ensembles = Later("teachers.ensemble")  # torch, which the process that starts a service does not need

# The second item travels while the first is computed.
_ITEMS_PER_ACTOR = 2
_DEFAULT_STALL_TIMEOUT_S = 3600.0
_LOOKS_EVERY_S = 5.0  # for nodes that have joined
MOST_LOSSES = 3
"""How often a block may be lost together with its actor before the run fails."""
_log = logging.getLogger(__name__)


class Worker:
    """A Ray actor of a :class:`RayPool`, with its number of torch threads, and its share of a GPU's memory."""

    def __init__(self, torch_threads: int, num_gpus: float):
        torch.set_num_threads(torch_threads)
        if num_gpus:
            # To Ray a share of a GPU is a number, and torch would take all of it.
            torch.cuda.set_per_process_memory_fraction(min(1.0, num_gpus))
        self._has_device = num_gpus > 0

    def run(self, function: BlockFunction, shared: Any, item: Any, device: str) -> tuple[Any, float | None]:
        """Return ``function(shared, item, device)``, and the largest share of its accelerator's memory that this worker
        used so far (None without one)."""
        result, used = function(shared, item, device), None
        if self._has_device:
            from teachers.teacher import CudaMemory

            used = torch.cuda.max_memory_reserved() / CudaMemory(torch.device("cuda")).available_bytes
        work.show_device_memory(used)
        return result, used


@dataclass(kw_only=True, eq=False)
class _Task:
    position: int
    item: Any
    losses: int = 0


class RayPool(BlockPool):
    """A bounded pool of Ray actors that train teachers or count votes; use it as a context manager inside
    :func:`teachers.ray_pool.start_ray`.

    Actors start with the first item, so that none does where every block is stored. Work starts as soon as one actor is
    ready; the others join when resources are free. If ``ray.num_actors`` is not set, every free place works, also on a
    node that joins later; so no worker stands by. ``stall_timeout_s`` limits the time in which no item is finished.
    PoolError if the cluster is too small and does not grow.
    """

    def __init__(self, config: RayConfig, *, stall_timeout_s: float = _DEFAULT_STALL_TIMEOUT_S):
        self._config = config
        self._stall_timeout_s = stall_timeout_s
        super().__init__("cuda" if config.num_gpus else "cpu")
        self._num_actors = number_of_actors(config)
        self._actor_class: Any = None  # outside the block
        self._starting: dict[Any, Any] = {}  # by the reference that settles when the actor is ready
        self._ready: list[Any] = []
        self._failed_starts = 0
        self._looked_s = time.monotonic()

    def carry(self, module: ModuleType) -> None:
        """From now on, send functions and classes of ``module`` to workers together with their code, because the module
        may not be installed on a worker's node."""
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(module)

    def __enter__(self) -> RayPool:
        self._actor_class = ray.remote(num_cpus=self._config.num_cpus, num_gpus=self._config.num_gpus)(Worker)
        return self

    def __exit__(self, *_: object) -> None:
        for actor in [*self._ready, *self._starting.values()]:
            ray.kill(actor)
        self._actor_class, self._ready, self._starting = None, [], {}

    def run(self, function: BlockFunction, shared: Any, items: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Apply ``function(shared, item, device)`` to the items on the actors; yield pairs as :meth:`BlockPool.run`
        does.

        PoolError if the function raises, or if an item is lost with its worker more than ``MOST_LOSSES`` times.
        """
        if self._actor_class is None:
            raise PoolError("The pool is closed; use it inside the block of `with RayPool(config) as pool`.")
        # Put once: as a plain argument the shared value would travel with every item.
        reference = ray.put(shared)
        fresh = (_Task(position=position, item=item) for position, item in enumerate(items))
        waiting = deque(itertools.islice(fresh, 1))
        if waiting and not self._ready and not self._starting:
            for _ in range(self._num_actors):
                self._start_actor()
        pending: dict[Any, tuple[Any, _Task]] = {}
        while waiting or pending:
            try:
                if waiting:
                    self._grow()
                # One task per actor, then one that waits; none waits while an actor that starts could do it.
                load = Counter(actor for actor, _ in pending.values())
                for depth in range(1 if self._starting else _ITEMS_PER_ACTOR):
                    for actor in self._ready:
                        if load[actor] == depth and waiting:
                            task = waiting.popleft()
                            # One item ahead at most: a shard is copied only when a worker can take it.
                            waiting.extend(itertools.islice(fresh, 0 if waiting else 1))
                            pending[actor.run.remote(function, reference, task.item, self.device)] = (actor, task)
                            load[actor] += 1
                settled = self._wait_for_one(pending)
            except ray.exceptions.RayError as error:
                raise PoolError(f"Ray failed; give the same command again to resume. Cause: {error}") from error
            if settled in self._starting:
                self._welcome(settled)
                continue
            actor, task = pending.pop(settled)
            try:
                result, memory_used = ray.get(settled, timeout=self._stall_timeout_s)
            except ray.exceptions.RayError as error:
                # Raised by the function itself, and not because a worker, a node or an object it needed was lost.
                if isinstance(error, ray.exceptions.RayTaskError) and not isinstance(
                    error.cause, ray.exceptions.RayError
                ):
                    raise PoolError(
                        "A worker's computation failed; remove the cause and give the command again: "
                        f"{error.cause or error}"
                    ) from error
                if actor in self._ready:  # its other task may have reported the loss already
                    # It may be alive and only out of reach: end it, so that no result of it is counted twice.
                    self._ready.remove(actor)
                    ray.kill(actor)
                    self._start_actor()
                _log.warning("Blocks lost with their worker, computed again: 1")
                work.count("blocks_lost")
                task.losses += 1
                if task.losses > MOST_LOSSES:
                    what = f"A block of teachers was lost {task.losses} times together with its worker: {error}"
                    raise PoolError(f"{what} If memory ran out, lower ray.num_actors.") from error
                waiting.appendleft(task)
                continue
            work.count_device_memory(memory_used)
            if task.losses:
                work.count("blocks_repeated")
            yield task.position, result

    def _wait_for_one(self, pending: Mapping[Any, Any]) -> Any:
        """Wait until a task in ``pending`` has ended or an actor has started, and return its Ray reference.

        PoolError if neither happens in time.
        """
        # Without any actor only new nodes help; the operator says how long these may take.
        idle = not pending and not self._ready
        limit_s = (self._config.wait_for_nodes_s or self._stall_timeout_s) if idle else self._stall_timeout_s
        settled, _ = ray.wait([*pending, *self._starting], num_returns=1, timeout=limit_s)
        if settled:
            return settled[0]
        if idle:
            raise PoolError(
                f"No worker started within {limit_s:g} s: each needs ray.num_cpus={self._config.num_cpus:g} and "
                f"ray.num_gpus={self._config.num_gpus:g}; add nodes, free some, or raise ray.wait_for_nodes_s."
            )
        raise PoolError(
            f"No block was finished within {limit_s:g} s, while {len(pending)} blocks were being computed. A worker "
            "may hang: give the same command again, which resumes from the stored blocks."
        )

    def _grow(self) -> None:
        """Start an actor for each place that the cluster has gained, unless the configuration sets their number."""
        if self._config.num_actors is not None or time.monotonic() < self._looked_s + _LOOKS_EVERY_S:
            return
        self._looked_s = time.monotonic()
        fitting, _ = room_for(num_cpus=self._config.num_cpus, num_gpus=self._config.num_gpus)
        for _ in range(fitting - len(self._ready) - len(self._starting)):
            self._start_actor()
        self._num_actors = max(self._num_actors, fitting)

    def _start_actor(self) -> None:
        actor = self._actor_class.remote(self._config.num_threads, self._config.num_gpus)
        self._starting[actor.__ray_ready__.remote()] = actor

    def _welcome(self, reference: Any) -> None:
        """Add the actor of ``reference`` to the ready actors if it has started, or start another if it failed.
        PoolError after repeated failures."""
        actor = self._starting.pop(reference)
        try:
            ray.get(reference, timeout=self._stall_timeout_s)
        except ray.exceptions.RayError as error:
            self._failed_starts += 1
            # Failures of all actors since the last success: repeated failures on one bad node alone do not end a run.
            if self._failed_starts > MOST_LOSSES * self._num_actors:
                raise PoolError(
                    f"Ray workers do not start; look for the reason in the logs of the nodes. Cause: {error}"
                ) from error
            ray.kill(actor)
            self._start_actor()
        else:
            self._failed_starts = 0
            self._ready.append(actor)


def number_of_actors(config: RayConfig) -> int:
    """Return ``ray.num_actors``; if it is not set, the number of actors for which the cluster has room now, at least
    one.

    PoolError if the cluster has no room for ``ray.num_actors`` now, unless ``ray.wait_for_nodes_s`` is set, which says
    that more nodes will join the cluster.
    """
    fitting, cluster = room_for(num_cpus=config.num_cpus, num_gpus=config.num_gpus)
    wanted = config.num_actors or max(1, fitting)
    if wanted > fitting and not config.wait_for_nodes_s:
        raise PoolError(
            f"ray.num_actors: {wanted} actors of ray.num_cpus={config.num_cpus:g} and ray.num_gpus={config.num_gpus:g} "
            f"do not fit: the cluster has {cluster}, room for {fitting}; lower ray.num_actors, ray.num_cpus or "
            "ray.num_gpus, add nodes, or set ray.wait_for_nodes_s if they come on demand."
        )
    return wanted


def room_for(*, num_cpus: float, num_gpus: float) -> tuple[int, str]:
    """Return the number of workers for which the cluster has room if each needs ``num_cpus`` and ``num_gpus``, and the
    cluster's size in words.

    A worker runs on one node, so resources are counted node by node.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = (sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
    needs = [(kind, need) for kind, need in (("CPU", num_cpus), ("GPU", num_gpus)) if need]
    # Shares such as 0.1 are not exact: ten of them fit into one.
    fitting = sum(min(math.floor(node.get(kind, 0) / need + 1e-9) for kind, need in needs) for node in nodes)
    return fitting, f"{cpus:g} CPUs and {gpus:g} GPUs on {len(nodes)} nodes"


# What Ray appends: `/fairpate-abcdefgh/ray/session_2026-01-31_23-59-59_999999_4194304/sockets/plasma_store`.
_LONGEST_PLACE = 107 - 86


@contextmanager
def open_pool(config: RayConfig) -> Iterator[BlockPool]:
    """Context manager: provide a pool of workers, which is a :class:`RayPool`. If ``num_actors`` is 0, it is this
    process alone, and Ray is not imported.

    Code that itself runs in a Ray task must use 0: a pool of actors would wait for the CPUs of the task.
    """
    if config.num_actors == 0:
        threads = torch.get_num_threads()
        torch.set_num_threads(config.num_threads)
        try:
            yield BlockPool("cuda" if config.num_gpus else "cpu")
        finally:
            torch.set_num_threads(threads)
        return
    with start_ray(config), RayPool(config) as pool:
        yield pool


@contextmanager
def start_ray(config: RayConfig) -> Iterator[None]:
    """Provide Ray inside the block: the running Ray, the cluster at RAY_ADDRESS, or a new Ray on this machine, which is
    shut down afterwards.

    Workers of a cluster receive this checkout's packages from the driver; other dependencies must be installed on their
    nodes. PoolError if no cluster answers at RAY_ADDRESS within ten seconds, if it rejects this process, or if Ray does
    not start on this machine in two tries of at most half a minute each.
    """
    # Before the first use of Ray, which imports it. It would start workers at nice 15, and send its makers statistics.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    with ExitStack() as stack:
        address = ray_cluster.cluster_address()
        if address is not None:
            ray_cluster.require_head(address)
            try:
                with _own_sigterm():
                    ray.init(**quiet, runtime_env={"py_modules": _own_packages()})
            except (ConnectionError, ray.exceptions.AuthenticationError) as error:
                raise PoolError(
                    f"RAY_ADDRESS={address}: no cluster answers; start it, or correct the address. If it requires a "
                    "token, set RAY_AUTH_MODE=token, with the token in ~/.ray/auth_token or RAY_AUTH_TOKEN."
                ) from error
        else:
            stack.enter_context(_private_to_this_process())
            stack.enter_context(_without_unused_processes())
            # Removed after Ray's end, with its logs; kept after an error, whose reason these may tell.
            session = _session_folder()
            stack.push(lambda kind, *_: None if kind else shutil.rmtree(session, ignore_errors=True))
            stack.callback(ray.shutdown)
            options = {
                **quiet,
                "include_dashboard": False,
                # None lets Ray count the GPUs; 0 leaves them to others.
                "num_gpus": None if config.num_gpus else 0,
                "_temp_dir": str(session / "ray"),
            }
            try:
                with _own_sigterm():
                    try:
                        ray.init("local", **options)
                    except Exception:  # noqa: BLE001 - Ray raises bare ones
                        # On a busy machine Ray gives up on its own process after 15 seconds; then its files are cached.
                        ray.init("local", **options)
            except Exception as error:
                said = f"{error}".strip().splitlines() or [type(error).__name__]
                raise PoolError(
                    f"Ray did not start on this machine: {said[0].rstrip('.')}. If the machine is busy, or short of "
                    "memory or of disk space, free some and give the same command again; it resumes from stored "
                    f"blocks. Ray's logs are in {session}."
                ) from error
        head, node = ray.get_runtime_context().gcs_address, ray._private.worker._global_node
        if node is not None:  # with Ray Client this process has no node, and Ray does not end it
            stack.enter_context(ray_cluster.last_words(head, node.raylet_socket_name, is_own=address is None))
        # Within, because Ray may end this process while it shuts down.
        stack.callback(ray.shutdown)
        if address is not None:
            stack.enter_context(ray_cluster.head_watched(head))
        yield


def _session_folder() -> Path:
    """Create a folder for the files of a Ray that only this user can enter, and return its path. PoolError if there is
    no place for it.

    Ray lets every user write to its own folders: in the place of its sockets another user could put theirs. So its
    folders are made inside one that is closed. That one is in RAY_TMPDIR, or else in TMPDIR if it is suitable, or else
    in ``/tmp``.
    """
    wanted = os.environ.get("RAY_TMPDIR")
    others = [wanted] if wanted else [os.environ.get("TMPDIR"), "/tmp"]  # noqa: S108 - a folder of its own is made there
    for place in (Path(name).absolute() for name in others if name):
        # A path of a socket has at most 107 bytes. Where all users can write and rename what is not theirs, they could
        # exchange the folder itself.
        mode = place.stat().st_mode if place.is_dir() else 0
        if len(os.fsencode(place)) <= _LONGEST_PLACE and mode & (stat.S_IWOTH | stat.S_ISVTX) != stat.S_IWOTH:
            with suppress(OSError):
                return Path(tempfile.mkdtemp(prefix="fairpate-", dir=place))  # of mode 0700, with a name of its own
    raise PoolError(
        f"Ray did not start on this machine: its files cannot be in {wanted or 'TMPDIR or /tmp'}; set RAY_TMPDIR to a "
        f"folder with a path of at most {_LONGEST_PLACE} bytes to which you can write, and others cannot."
    )


@contextmanager
def _private_to_this_process() -> Iterator[None]:
    """Restrict a Ray that is started inside the block to this machine, and protect it with a token of its own.

    Ray's support of clusters is switched off, as it is by default on macOS. Then Ray accepts connections from this
    machine alone; its option `_node_ip_address` does not achieve this. An authentication mode or a token that the
    user chose in the environment is respected. By default Ray would write its token into a file that all users may
    read.
    """
    from ray._private import ray_constants

    mode = os.environ.get("RAY_AUTH_MODE", "token")
    chosen = {
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
        "RAY_AUTH_MODE": mode,
        # Ray serves its metrics to whom it may concern, without a token, and nothing here reads them.
        "RAY_enable_metrics_collection": "0",
    }
    if mode == "token" and os.environ.keys().isdisjoint({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}):
        chosen["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Ray puts the working directory on a worker's path, where any folder named as a package would be taken for it.
    root = str(Path(_own_packages()[0]).parent)
    if root not in sys.path:  # an editable installation
        chosen["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    clusters = ray_constants.ENABLE_RAY_CLUSTER
    try:
        with ray_cluster.environment(chosen):
            ray_constants.ENABLE_RAY_CLUSTER = False  # the variable is read when Ray is imported
            ray_cluster.read_authentication_again()
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        ray_cluster.read_authentication_again()


@contextmanager
def _without_unused_processes() -> Iterator[None]:
    """Start Ray inside the block without its autoscaler, log monitor and API server, which have nothing to do on one
    machine without dashboard, and with the agent of an installation without the dashboard's packages: the whole agent
    has an HTTP server, for which the start would wait twice as long."""
    from ray._private import utils
    from ray._private.node import Node

    def nothing(*_: Any, **__: Any) -> None:
        pass

    missing = ImportError("no dashboard is started")
    replacements: dict[tuple[Any, str], Callable[..., Any]] = {
        (utils, "get_dashboard_dependency_error"): lambda: missing,
        **{(Node, f"start_{process}"): nothing for process in ("monitor", "log_monitor", "api_server")},
    }
    kept = {(of, name): getattr(of, name) for of, name in replacements if hasattr(of, name)}
    for of, name in kept:
        setattr(of, name, replacements[of, name])
    try:
        yield
    finally:
        for (of, name), own in kept.items():
            setattr(of, name, own)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Context manager: restore this process's handler of the signal SIGTERM after the ``with`` block, in which Ray
    installs another one. Ray's handler would print a C++ stack on the terminal."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        yield
    except SystemExit as ending:
        if ending.code == signal.SIGTERM:  # it came while Ray's handler was there
            handler(signal.SIGTERM, None)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)


def _own_packages() -> list[str]:
    """Return the folders of this project's packages. All are sent to workers, which may need any of them."""
    specs = [importlib.util.find_spec(name) for name in PACKAGES]
    return [str(folder) for spec in specs if spec is not None for folder in spec.submodule_search_locations or []]


_VOTE_TIMEOUT_S = 60.0
# -1: no limit on restarts, since voters serve for as long as the service runs.
_MAX_RESTARTS, _MAX_RETRIES = -1, 3
_PING_INTERVAL_S, _HANG_TIMEOUT_S = 1.0, 5.0
BESIDE_WORK = "signs of life"


AnswerFrom = Callable[[Sequence[Any]], Callable[..., Any]]
"""Loads blocks of data; returns the function that computes an answer from them."""


class ServingActor:
    """A Ray actor that answers requests from blocks of data that it loads once."""

    def __init__(self, answer_from: AnswerFrom, torch_threads: int, *sources: Any) -> None:
        torch.set_num_threads(torch_threads)
        self._answer = answer_from(sources)

    def answer(self, *arguments: Any) -> Any:
        """Return this actor's answer to a request, computed from its own blocks of data."""
        return self._answer(*arguments)

    def ping(self) -> None:
        """Do nothing: a call that returns shows that the actor is alive."""


class ServingActors:
    """A bounded number of Ray actors that answer requests, each from its share of the blocks of data.

    They serve until :meth:`close`; an actor that dies earlier is restarted.
    """

    def __init__(self, answer_from: AnswerFrom, sources: Iterable[Any], config: RayConfig, *, num_gpus: float) -> None:
        options: dict[str, Any] = {
            "num_cpus": config.num_cpus,
            "num_gpus": num_gpus,
            "max_restarts": _MAX_RESTARTS,
            # Safe to repeat: teachers vote the same again, and no result of a lost call's sample was released.
            "max_task_retries": _MAX_RETRIES,
            # A second thread: a busy actor still answers pings, and is not taken for a hung one.
            "concurrency_groups": {BESIDE_WORK: 1},
        }
        actor_class: Any = ray.remote(**options)(ServingActor)
        # References are kept here, so that a restarted actor, maybe on another node, finds its data.
        self._sources = [source if isinstance(source, str) else ray.put(source) for source in sources]
        # Every n-th block, so that actors have equally many.
        num_actors = max(1, min(number_of_actors(config), len(self._sources)))
        shares = (self._sources[i::num_actors] for i in range(num_actors))
        self.actors = [actor_class.remote(answer_from, config.num_threads, *share) for share in shares]
        self._watch = VoterWatch(self.actors)
        self.are_answering = self._watch.are_answering

    def ask(self, shared: Any, *arguments: Any, timeout_s: float, what: str) -> list[Any]:
        """Send all actors the same request, and return their answers. PoolError unless all arrive within ``timeout_s``.

        The request consists of ``shared`` and the further ``arguments``. ``what`` completes the words "Not all" in the
        error's message.
        """
        # Put once: as an argument it would travel to each actor by itself.
        reference = ray.put(shared)
        try:
            answers: list[Any] = ray.get(
                [actor.answer.remote(reference, *arguments) for actor in self.actors], timeout=timeout_s
            )
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
            raise PoolError(
                f"Not all {what} within {timeout_s:g} s; submit the queries again. Cause: {error}"
            ) from error
        return answers

    def close(self) -> None:
        """End the actors, and the thread that pings them."""
        self._watch.close()
        for actor in self.actors:
            ray.kill(actor)
        self.actors, self._sources = [], []


class ServingTeachers(ServingActors):
    """All teachers of an ensemble, ready to vote, on a bounded number of actors; use inside :func:`start_ray`.

    PoolError if the cluster is too small.
    """

    def __init__(self, ensemble: Ensemble, config: RayConfig) -> None:
        self._num_teachers = ensemble.num_teachers
        spec, device = ensemble.spec, "cuda" if config.num_gpus else "cpu"

        def counter(sources: Sequence[str | ensembles.ArrayWeights]) -> Callable[[npt.NDArray[np.generic]], IntArray]:
            blocks = [ensembles.tensors_of(source) for source in sources]

            def votes(queries: npt.NDArray[np.generic]) -> IntArray:
                task = ensembles.CountTask(spec=spec, queries=queries)
                counts: IntArray = np.sum([ensembles.count_block(task, block, device) for block in blocks], axis=0)
                return counts

            return votes

        super().__init__(counter, ensemble.sources, config, num_gpus=config.num_gpus)

    def votes(self, queries: npt.NDArray[np.generic]) -> IntArray:
        """Return ``votes_QC`` of all teachers on the queries' features (Q, ...). PoolError unless all teachers voted in
        time."""
        votes_QC: IntArray = np.sum(self.ask(queries, timeout_s=_VOTE_TIMEOUT_S, what="teachers voted"), axis=0)
        return ensembles.checked_votes(votes_QC, self._num_teachers)


@dataclass(kw_only=True, eq=False)
class _WatchedActor:
    """A voting actor that is watched. ``answers`` is whether its last finished ping was answered. ``ping`` is the ping
    that is waiting for an answer (None: none is), sent at ``asked_s`` (a monotonic time)."""

    actor: Any
    answers: bool = False
    ping: Any = None
    asked_s: float = 0.0


class VoterWatch:
    """A thread that pings voting actors and restarts those that hang; :meth:`close` ends it.

    An actor that has not answered since it was started counts as starting, not as hanging, however long that takes.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        self._voters = [_WatchedActor(actor=actor) for actor in actors]
        self._looked_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="voter watch")
        self._thread.start()

    def are_answering(self) -> bool:
        """Return, without waiting, whether every voting actor answered its last ping; False if the thread that pings
        them died."""
        is_fresh = time.monotonic() < self._looked_s + _HANG_TIMEOUT_S
        return is_fresh and all(voter.answers for voter in self._voters)

    def close(self) -> None:
        """End the thread that pings the voting actors, and wait for it."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_PING_INTERVAL_S):
            try:
                for voter in self._voters:
                    if voter.ping is None:
                        # Not retried: the call fails while the actor is restarted, and that is no sign of hanging.
                        call = voter.actor.ping.options(concurrency_group=BESIDE_WORK, max_task_retries=0)
                        voter.ping, voter.asked_s = call.remote(), time.monotonic()
                    if ray.wait([voter.ping], timeout=0)[0]:
                        try:
                            ray.get(voter.ping)
                            voter.answers = True
                        except ray.exceptions.RayError:
                            voter.answers = False
                        voter.ping = None
                    elif voter.answers and time.monotonic() > voter.asked_s + _HANG_TIMEOUT_S:
                        _log.warning("A voting actor did not answer for %g s and is started again.", _HANG_TIMEOUT_S)
                        voter.answers, voter.ping = False, None
                        # Ray restarts it behind the same handle, which the callers hold.
                        ray.kill(voter.actor, no_restart=False)
                self._looked_s = time.monotonic()
            except Exception:  # noqa: BLE001 - the watch continues, and counts as without an answer meanwhile
                _log.exception(
                    "The voting actors could not be checked; the check is repeated. If this lasts, report it as a "
                    "defect."
                )
