"""Where blocks of teachers are computed: in this process, or as tasks of Ray.

A pool maps a pure function over items beside one shared value, or adds up what it returns, and knows nothing of
teachers. An item travels to the worker that computes it, and one per worker is under way. What is lost with a worker or
a node Ray computes again from the same arguments, wherever there is room. That changes nothing, because the function is
pure, and counts nothing twice, because a total is made of named results. What is added up stays on the workers until
one total is left.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fairpate.config import RayConfig
from fairpate.types import UserError

SharedT = TypeVar("SharedT")
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
Counts = npt.NDArray[np.integer[Any]]
_TOTALS_PER_MERGE = 8
_DEFAULT_STALL_TIMEOUT_S = 3600.0
_NOTHING_TO_ADD = "Expected at least one item to add up, got none."
_log = logging.getLogger(__name__)


class PoolError(UserError, RuntimeError):
    """Work that a pool could not finish; the cause is chained."""


class Pool(Protocol):
    """Computes ``function(shared, item, device)`` for many items."""

    @property
    def device(self) -> str:
        """The torch device of every worker."""
        ...

    def run(
        self, function: Callable[[SharedT, ItemT, str], ResultT], shared: SharedT, items: Iterable[ItemT]
    ) -> Iterator[tuple[int, ResultT]]:
        """Yield (position of the item, result) as results arrive, in any order; items are read when needed."""
        ...

    def sum(
        self,
        function: Callable[[SharedT, ItemT, str], Counts],
        shared: SharedT,
        items: Iterable[ItemT],
        on_done: Callable[[int], None],
    ) -> Counts:
        """The sum of all results, arrays of equal shape and type. ValueError without items.

        ``on_done(position)`` is told of each item.
        """
        ...


class InProcessPool:
    """One item after another in this process: for a machine without Ray, or a single GPU."""

    def __init__(self, device: str = "cpu"):
        self.device = device

    def run(
        self, function: Callable[[SharedT, ItemT, str], ResultT], shared: SharedT, items: Iterable[ItemT]
    ) -> Iterator[tuple[int, ResultT]]:
        """As :meth:`Pool.run`, in order."""
        for position, item in enumerate(items):
            yield position, function(shared, item, self.device)

    def sum(
        self,
        function: Callable[[SharedT, ItemT, str], Counts],
        shared: SharedT,
        items: Iterable[ItemT],
        on_done: Callable[[int], None],
    ) -> Counts:
        """As :meth:`Pool.sum`, in order."""
        total: Counts | None = None
        for position, counts in self.run(function, shared, items):
            total = counts if total is None else total + counts
            on_done(position)
        if total is None:
            raise ValueError(_NOTHING_TO_ADD)
        return total


class RayPool:
    """Ray tasks, at most ``ray.num_actors`` at a time; use inside :func:`teachers.cluster.start_ray`.

    ``stall_timeout_s`` bounds the time in which nothing is finished. PoolError where the cluster is too small and does
    not grow.
    """

    def __init__(self, config: RayConfig, *, stall_timeout_s: float = _DEFAULT_STALL_TIMEOUT_S):
        self._config = config
        self._stall_timeout_s = stall_timeout_s
        self.device = "cuda" if config.num_gpus else "cpu"
        self._num_workers = number_of_actors(config)
        self._needs = {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus}

    def run(
        self, function: Callable[[SharedT, ItemT, str], ResultT], shared: SharedT, items: Iterable[ItemT]
    ) -> Iterator[tuple[int, ResultT]]:
        """As :meth:`Pool.run`. PoolError if the function raises, an item is lost too often or nothing is finished."""
        for position, result in self._compute(function, shared, items):
            yield position, self._get(result)

    def sum(
        self,
        function: Callable[[SharedT, ItemT, str], Counts],
        shared: SharedT,
        items: Iterable[ItemT],
        on_done: Callable[[int], None],
    ) -> Counts:
        """As :meth:`Pool.sum`, errors as :meth:`run`. This process fetches the one total at the root of the tree."""
        import ray

        add: Any = ray.remote(num_cpus=self._config.num_cpus, max_retries=self._config.max_restarts)(_add)
        totals: deque[Any] = deque()

        def merge() -> None:
            totals.append(add.remote(*(totals.popleft() for _ in range(min(len(totals), _TOTALS_PER_MERGE)))))

        for position, counts in self._compute(function, shared, items):
            on_done(position)
            totals.append(counts)
            if len(totals) == 2 * _TOTALS_PER_MERGE:
                merge()
        while len(totals) > 1:
            merge()
        if not totals:
            raise ValueError(_NOTHING_TO_ADD)
        return np.array(self._get(self._wait_for_one(list(totals))))

    def _compute(
        self, function: Callable[[Any, Any, str], Any], shared: Any, items: Iterable[Any]
    ) -> Iterator[tuple[int, Any]]:
        """Yield the position of each item and the reference to its result, which stays where it was computed."""
        import ray

        # On a GPU each task has a process of its own, as Ray has it: one used before would stay on the GPU it had.
        options: Any = {**self._needs, "max_retries": self._config.max_restarts, "num_returns": 2}
        task: Any = ray.remote(**options)(_compute)
        reference, waiting = ray.put(shared), enumerate(items)
        pending: dict[Any, tuple[int, Any]] = {}  # the number of losses: position, and the result

        def refill() -> None:
            for position, item in itertools.islice(waiting, self._num_workers - len(pending)):
                result, num_losses = task.remote(function, reference, item, self.device, self._config)
                pending[num_losses] = (position, result)

        refill()
        try:
            while pending:
                finished = self._wait_for_one(list(pending))
                position, result = pending.pop(finished)
                if num_losses := self._get(finished):
                    _log.warning("Blocks lost with their worker, computed again: %d", num_losses)
                refill()
                yield position, result
        finally:
            for unfinished in pending if ray.is_initialized() else ():
                ray.cancel(unfinished, force=True)

    def _wait_for_one(self, references: list[Any]) -> Any:
        import ray

        first_s = min(self._config.wait_for_nodes_s or self._stall_timeout_s, self._stall_timeout_s)
        settled, _ = ray.wait(references, num_returns=1, timeout=first_s)
        if not settled and not room_for(**self._needs)[0]:
            raise PoolError(
                f"No worker found a place within {first_s:g} s: each asks ray.num_cpus={self._config.num_cpus:g} and "
                f"ray.num_gpus={self._config.num_gpus:g}; add nodes, free some, or raise ray.wait_for_nodes_s."
            )
        if not settled:
            settled, _ = ray.wait(references, num_returns=1, timeout=self._stall_timeout_s - first_s)
        if not settled:
            raise PoolError(
                f"No teacher finished within {self._stall_timeout_s:g} s, {len(references)} blocks under way. Is a "
                "worker hung, or the cluster busy with other work?"
            )
        return settled[0]

    def _get(self, reference: Any) -> Any:
        """A result that is there. PoolError with its cause, where the function raised or Ray gave up."""
        import ray

        try:
            return ray.get(reference, timeout=self._stall_timeout_s)
        except ray.exceptions.RayError as error:
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            if not isinstance(cause, ray.exceptions.RayError):
                raise PoolError(f"A block of teachers failed on a worker: {cause or error}") from error
            raise PoolError(
                f"A block of teachers was lost more than ray.max_restarts={self._config.max_restarts} times: {error} "
                "If memory ran out, lower ray.num_actors. The same command goes on where this one ended."
            ) from error


def _compute(
    function: Callable[[Any, Any, str], Any], shared: Any, item: Any, device: str, config: RayConfig
) -> tuple[Any, int]:
    """On a worker: the result of one item, and how often it was lost before."""
    import ray

    torch.set_num_threads(config.torch_threads)
    if config.num_gpus:
        torch.cuda.set_per_process_memory_fraction(min(1.0, config.num_gpus))
    return function(
        shared, item, device
    ), ray.get_runtime_context().worker.core_worker.get_current_task_attempt_number()


def _add(*totals: Counts) -> Counts:
    return functools.reduce(np.add, totals)


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
    return min(math.floor(resources.get(kind, 0) / need + 1e-9) for kind, need in needs.items() if need)
