"""A bounded pool of Ray actors, each with a block of teachers at a time.

An item travels to the one worker that computes it, and at most two per worker are under way. A worker that is lost is
replaced, wherever there is room, and its items are computed again, which changes nothing because the function is pure.
What is added up stays on the workers until each gives its total.

Ray's own retries do not take the place of this. A restarted actor keeps its tasks, which wait for a place while others
are idle. A task is not bound to one node; its caller hears of a node that fell silent only from gRPC, which pings every
five minutes, where that of an actor is told by the head at once; and on GPUs each task starts a process of its own.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, cast

from fairpate.config import RayConfig
from fairpate.later import torch
from teachers.pool import Counts, ItemT, PoolError, ResultT, SharedT, added, at_least_one

_ITEMS_PER_ACTOR = 2
_DEFAULT_STALL_TIMEOUT_S = 3600.0
_log = logging.getLogger(__name__)


class Worker:
    """The actor: a process with a number of torch threads, and its share of a GPU's memory."""

    def __init__(self, torch_threads: int, num_gpus: float):
        torch.set_num_threads(torch_threads)
        if num_gpus:
            # To Ray a share of a GPU is a number, and torch would take all of it.
            torch.cuda.set_per_process_memory_fraction(min(1.0, num_gpus))
        self._number, self._total = -1, cast("Counts | None", None)

    def run(self, function: Callable[[Any, Any, str], Any], shared: Any, item: Any, device: str) -> Any:
        """Compute one item."""
        return function(shared, item, device)

    def add(
        self, number: int, function: Callable[[Any, Any, str], Counts], shared: Any, item: Any, device: str
    ) -> None:
        """Add one item to the total of sum ``number``; what an earlier sum left is dropped."""
        # Numbers never repeat in a pool, so a total left by a sum that failed cannot be taken for this one's.
        before = self._total if number == self._number else None
        self._number, self._total = number, added(before, function(shared, item, device))

    def take(self, number: int) -> Counts:
        """The total of sum ``number``, which is given once."""
        assert number == self._number, "a total of another sum"
        total, self._total = self._total, None
        return at_least_one(total)


@dataclass(kw_only=True, eq=False)
class _Task(Generic[ItemT]):
    position: int
    item: ItemT
    losses: int = 0


class _Queue(Generic[ItemT]):
    """Items to compute in order, each read when its turn comes; what is put back comes first. False when empty."""

    def __init__(self, items: Iterable[ItemT]):
        self._fresh = (_Task(position=position, item=item) for position, item in enumerate(items))
        self._waiting: deque[_Task[ItemT]] = deque()

    def __bool__(self) -> bool:
        if not self._waiting:
            self._waiting.extend(itertools.islice(self._fresh, 1))
        return bool(self._waiting)

    def take(self) -> _Task[ItemT]:
        assert self, "an empty queue"
        return self._waiting.popleft()

    def put_back(self, task: _Task[ItemT]) -> None:
        self._waiting.appendleft(task)


class RayPool:
    """A bounded pool of Ray actors; use as a context manager inside :func:`teachers.cluster.start_ray`.

    Work starts with the first actor that is ready, and others join when there is room for them. ``stall_timeout_s``
    bounds the time in which nothing happens at all. PoolError where the cluster is too small and does not grow.
    """

    def __init__(self, config: RayConfig, *, stall_timeout_s: float = _DEFAULT_STALL_TIMEOUT_S):
        self._config = config
        self._stall_timeout_s = stall_timeout_s
        self.device = "cuda" if config.num_gpus else "cpu"
        self._num_actors = number_of_actors(config)
        self._starting: dict[Any, Any] = {}  # the reference that tells that an actor is ready: the actor
        self._ready: list[Any] = []
        self._failed_starts = 0
        self._sums = itertools.count()

    def carry(self, module: ModuleType) -> None:
        """As :meth:`Pool.carry`: functions and classes of ``module`` travel with their code."""
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(module)

    def __enter__(self) -> RayPool:
        import ray

        self._actor_class: Any = ray.remote(num_cpus=self._config.num_cpus, num_gpus=self._config.num_gpus)(Worker)
        for _ in range(self._num_actors):
            self._start_actor()
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        for actor in [*self._ready, *self._starting.values()]:
            ray.kill(actor)
        self._ready, self._starting = [], {}

    def run(
        self, function: Callable[[SharedT, ItemT, str], ResultT], shared: SharedT, items: Iterable[ItemT]
    ) -> Iterator[tuple[int, ResultT]]:
        """As :meth:`Pool.run`. PoolError if the function raises, an item is lost too often or nothing is finished."""
        import ray

        # Put once: as a plain argument the shared value would travel with every item.
        reference, queue = ray.put(shared), _Queue(items)

        def submit(actor: Any, task: _Task[ItemT]) -> Any:
            return actor.run.remote(function, reference, task.item, self.device)

        for _, task, result in self._compute(queue, submit, lambda _, tasks, error: self._again(queue, tasks, error)):
            yield task.position, result

    def sum(
        self,
        function: Callable[[SharedT, ItemT, str], Counts],
        shared: SharedT,
        items: Iterable[ItemT],
        on_done: Callable[[int], None],
    ) -> Counts:
        """As :meth:`Pool.sum`, errors as :meth:`run`. Each actor adds to a total of its own, which is fetched once.

        What a total held that is lost with its actor is counted again; an actor that may be alive is ended first, so
        that nothing is counted twice.
        """
        import ray

        reference, queue, number = ray.put(shared), _Queue(items), next(self._sums)
        held: dict[Any, list[_Task[ItemT]]] = {}  # the actor: what its total holds
        total: Counts | None = None

        def submit(actor: Any, task: _Task[ItemT]) -> Any:
            return actor.add.remote(number, function, reference, task.item, self.device)

        def lost(actor: Any, tasks: list[_Task[ItemT]], error: Exception) -> None:
            self._again(queue, [*held.pop(actor, []), *tasks], error)

        while queue:
            for actor, task, _ in self._compute(queue, submit, lost):
                if actor in self._ready:
                    held.setdefault(actor, []).append(task)
                    on_done(task.position)
                else:  # added before its actor was lost, and told after
                    lost(actor, [task], PoolError("the worker was lost"))
            # Fetched when the queue is empty, and lost ones counted again, until every total has come.
            for actor in list(held):
                try:
                    total = added(total, ray.get(actor.take.remote(number), timeout=self._stall_timeout_s))
                    del held[actor]
                except ray.exceptions.RayError as error:
                    self._replace(actor)
                    lost(actor, [], error)
        return at_least_one(total)

    def _compute(
        self,
        queue: _Queue[ItemT],
        submit: Callable[[Any, _Task[ItemT]], Any],
        on_loss: Callable[[Any, list[_Task[ItemT]], Exception], None],
    ) -> Iterator[tuple[Any, _Task[ItemT], Any]]:
        """Yield actor, task and the value of the reference that ``submit(actor, task)`` gave for it."""
        import ray

        if not self._ready and not self._starting:
            raise PoolError("The pool is closed; use it as `with RayPool(config) as pool`.")
        pending: dict[Any, tuple[Any, _Task[ItemT]]] = {}
        while queue or pending:
            try:
                self._hand_out(queue, submit, pending)
                reference = self._wait_for_one(pending)
            except ray.exceptions.RayError as error:
                raise PoolError(
                    f"Ray failed: {error} The same command goes on where this one ended; stored blocks stay."
                ) from error
            if reference in self._starting:
                self._welcome(reference)
                continue
            actor, task = pending.pop(reference)
            try:
                value = ray.get(reference, timeout=self._stall_timeout_s)
            except ray.exceptions.RayError as error:
                if (cause := _raised_by_function(error)) is not None:
                    raise PoolError(f"A block of teachers failed on a worker: {cause}") from error
                self._replace(actor)
                on_loss(actor, [task], error)
                continue
            yield actor, task, value

    def _hand_out(
        self,
        queue: _Queue[ItemT],
        submit: Callable[[Any, _Task[ItemT]], Any],
        pending: dict[Any, tuple[Any, _Task[ItemT]]],
    ) -> None:
        """One task per actor, then one that waits; none waits while an actor that starts could do it."""
        load = Counter(actor for actor, _ in pending.values())
        for depth in range(1 if self._starting else _ITEMS_PER_ACTOR):
            for actor in self._ready:
                if load[actor] == depth and queue:
                    task = queue.take()
                    pending[submit(actor, task)] = (actor, task)
                    load[actor] += 1

    def _wait_for_one(self, pending: Mapping[Any, Any]) -> Any:
        """The next reference to be settled: of a task, or of an actor that starts."""
        import ray

        # Without any actor only new nodes help; the operator says how long these may take.
        idle = not pending and not self._ready
        limit_s = (self._config.wait_for_nodes_s or self._stall_timeout_s) if idle else self._stall_timeout_s
        settled, _ = ray.wait([*pending, *self._starting], num_returns=1, timeout=limit_s)
        if settled:
            return settled[0]
        if idle:
            raise PoolError(
                f"No worker found a place within {limit_s:g} s: each asks ray.num_cpus={self._config.num_cpus:g} and "
                f"ray.num_gpus={self._config.num_gpus:g}; add nodes, free some, or raise ray.wait_for_nodes_s."
            )
        raise PoolError(f"No teacher finished within {limit_s:g} s, {len(pending)} blocks under way. Is a worker hung?")

    def _again(self, queue: _Queue[ItemT], tasks: Sequence[_Task[ItemT]], error: Exception) -> None:
        """Put lost tasks back; PoolError if that happened too often to one of them."""
        if tasks:
            _log.warning("Blocks lost with their worker, computed again: %d", len(tasks))
        for task in tasks:
            task.losses += 1
            if task.losses > self._config.max_restarts:
                raise PoolError(
                    f"A block of teachers was lost {task.losses} times, more than ray.max_restarts="
                    f"{self._config.max_restarts}: {error} If memory ran out, lower ray.num_actors."
                ) from error
            queue.put_back(task)

    def _start_actor(self) -> None:
        actor = self._actor_class.remote(self._config.torch_threads, self._config.num_gpus)
        self._starting[actor.__ray_ready__.remote()] = actor

    def _welcome(self, reference: Any) -> None:
        """Count an actor as ready, or start another; PoolError where that fails again and again."""
        import ray

        actor = self._starting.pop(reference)
        try:
            ray.get(reference, timeout=self._stall_timeout_s)
        except ray.exceptions.RayError as error:
            self._failed_starts += 1
            if self._failed_starts > self._config.max_restarts * self._num_actors:
                raise PoolError(f"Workers do not start: {error}") from error
            ray.kill(actor)
            self._start_actor()
        else:
            self._failed_starts = 0
            self._ready.append(actor)

    def _replace(self, actor: Any) -> None:
        import ray

        if actor in self._ready:  # its other task may have told already
            self._ready.remove(actor)
            ray.kill(actor)
            self._start_actor()


def number_of_actors(config: RayConfig) -> int:
    """``ray.num_actors``, or as many as fit now and at least one.

    PoolError where they do not fit and ``ray.wait_for_nodes_s`` does not say that nodes will come.
    """
    fitting, cluster = room_for(num_cpus=config.num_cpus, num_gpus=config.num_gpus)
    wanted = config.num_actors or max(1, fitting)
    if wanted > fitting and not config.wait_for_nodes_s:
        raise PoolError(
            f"ray.num_actors: {wanted} actors of ray.num_cpus={config.num_cpus:g} and ray.num_gpus={config.num_gpus:g} "
            f"do not fit: the cluster has {cluster}, room for {fitting}; "
            "lower ray.num_actors, ray.num_cpus or ray.num_gpus, add nodes, or set ray.wait_for_nodes_s if they come "
            "on demand."
        )
    return wanted


def room_for(*, num_cpus: float, num_gpus: float) -> tuple[int, str]:
    """How many workers with these needs the nodes hold, none of them spread over several; and the nodes in words."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = (sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
    fitting = sum(_workers_on_node(node, {"CPU": num_cpus, "GPU": num_gpus}) for node in nodes)
    return fitting, f"{cpus:g} CPUs and {gpus:g} GPUs on {len(nodes)} nodes"


def _workers_on_node(resources: Mapping[str, float], needs: Mapping[str, float]) -> int:
    # Shares such as 0.1 are not exact: ten of them fit into one.
    return min(math.floor(resources.get(kind, 0) / need + 1e-9) for kind, need in needs.items() if need)


def _raised_by_function(error: Exception) -> BaseException | None:
    """What the function itself raised; None where a worker, a node or an object it needed was lost."""
    import ray

    if not isinstance(error, ray.exceptions.RayTaskError):
        return None
    lost = isinstance(error.cause, ray.exceptions.RayError)
    return None if lost else error.cause or error
