"""Where blocks of teachers are computed: in this process, or on a bounded pool of Ray actors.

A pool maps a pure function over items beside one shared value, and knows nothing of teachers. Ray's part is thin: the
shared value travels once by reference, every actor has at most one item under way and one waiting, and an actor that
dies is restarted and its item computed again, which changes nothing because the function is pure.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch

from fairpate.config import RayConfig
from fairpate.types import UserError

SharedT = TypeVar("SharedT")
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
_ITEMS_PER_ACTOR = 2
_DEFAULT_STALL_TIMEOUT_S = 3600.0
_SHUTDOWN_TIMEOUT_S = 10.0


class PoolError(UserError, RuntimeError):
    """Work that a pool could not finish; the cause is chained."""


class Pool(Protocol):
    """Computes ``function(shared, item, device)`` for many items."""

    @property
    def num_workers(self) -> int:
        """How many items are computed at the same time."""
        ...

    @property
    def device(self) -> str:
        """The torch device of every worker."""
        ...

    def run(
        self, function: Callable[[SharedT, ItemT, str], ResultT], shared: SharedT, items: Iterable[ItemT]
    ) -> Iterator[tuple[int, ResultT]]:
        """Yield (position of the item, result) as results arrive, in any order; items are read when needed."""
        ...


class InProcessPool:
    """One item after another in this process: for a machine without Ray, or a single GPU."""

    num_workers = 1

    def __init__(self, device: str = "cpu"):
        self.device = device

    def run(
        self, function: Callable[[SharedT, ItemT, str], ResultT], shared: SharedT, items: Iterable[ItemT]
    ) -> Iterator[tuple[int, ResultT]]:
        """As :meth:`Pool.run`, in order."""
        for position, item in enumerate(items):
            yield position, function(shared, item, self.device)


class Worker:
    """The actor: a process with a number of torch threads."""

    def __init__(self, torch_threads: int):
        torch.set_num_threads(torch_threads)

    def run(self, function: Callable[[Any, Any, str], Any], shared: Any, item: Any, device: str) -> Any:
        """Compute one item."""
        return function(shared, item, device)


class RayPool:
    """A bounded pool of Ray actors; use as a context manager inside :func:`start_ray`.

    ``stall_timeout_s`` bounds the time in which no item at all is finished. PoolError where the cluster is too small.
    """

    def __init__(self, config: RayConfig, *, stall_timeout_s: float = _DEFAULT_STALL_TIMEOUT_S):
        self._config = config
        self._stall_timeout_s = stall_timeout_s
        self.device = "cuda" if config.num_gpus else "cpu"
        self.num_workers = _number_of_actors(config)
        self.actors: list[Any] = []

    def __enter__(self) -> RayPool:
        import ray

        actor_class: Any = ray.remote(
            num_cpus=self._config.num_cpus,
            num_gpus=self._config.num_gpus,
            max_restarts=self._config.max_restarts,
            max_task_retries=self._config.max_restarts,
        )(Worker)
        self.actors = [actor_class.remote(self._config.torch_threads) for _ in range(self.num_workers)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)
        self.actors = []

    def run(
        self, function: Callable[[SharedT, ItemT, str], ResultT], shared: SharedT, items: Iterable[ItemT]
    ) -> Iterator[tuple[int, ResultT]]:
        """As :meth:`Pool.run`. PoolError if the function raises, actors keep dying or nothing finishes in time."""
        import ray

        if not self.actors:
            raise PoolError("The pool is closed; use it as `with RayPool(config) as pool`.")
        reference = ray.put(shared)
        waiting = enumerate(items)
        pending: dict[Any, tuple[int, Any]] = {}

        def submit(actor: Any) -> None:
            position, item = next(waiting, (None, None))
            if position is not None:
                pending[actor.run.remote(function, reference, item, self.device)] = (position, actor)

        for _ in range(_ITEMS_PER_ACTOR):
            for actor in self.actors:
                submit(actor)
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=self._stall_timeout_s)
            if not done:
                raise PoolError(
                    f"No teacher finished within {self._stall_timeout_s:g} s, {len(pending)} blocks under way. "
                    "Is a worker hung, or does the cluster lack the resources that ray.num_cpus and ray.num_gpus ask?"
                )
            position, actor = pending.pop(done[0])
            submit(actor)
            yield position, self._result(done[0])

    def _result(self, reference: Any) -> Any:
        import ray

        try:
            return ray.get(reference, timeout=self._stall_timeout_s)
        except ray.exceptions.RayTaskError as error:
            raise PoolError(f"A block of teachers failed on a worker: {error.cause}") from error
        except ray.exceptions.RayError as error:
            raise PoolError(
                f"A block of teachers was lost: {error} Workers are restarted ray.max_restarts="
                f"{self._config.max_restarts} times; if memory ran out, lower ray.num_actors."
            ) from error


@contextmanager
def start_ray(config: RayConfig) -> Iterator[None]:
    """Ray inside the block: the running one, the cluster at RAY_ADDRESS, or a new one here, shut down afterwards.

    Workers of a cluster receive this checkout's packages from the driver; other dependencies must be installed there.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would start workers at nice 15
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet, runtime_env={"py_modules": _own_packages()})
    else:
        ray.init("local", **quiet, include_dashboard=False, num_gpus=None if config.num_gpus else 0)
    try:
        yield
    finally:
        ray.shutdown()


def _own_packages() -> list[str]:
    import fairpate
    import teachers

    return [str(Path(package.__file__).parent) for package in (fairpate, teachers) if package.__file__]


def _number_of_actors(config: RayConfig) -> int:
    """``ray.num_actors``, or as many as fit; one that found no place would be waited for without end."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = sum(_actors_on_node(node, config) for node in nodes)
    wanted = config.num_actors or max(1, fitting)
    if wanted > fitting:
        cpus, gpus = (sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
        raise PoolError(
            f"ray.num_actors: {wanted} actors of ray.num_cpus={config.num_cpus:g} and ray.num_gpus={config.num_gpus:g} "
            f"do not fit: the cluster has {cpus:g} CPUs and {gpus:g} GPUs on {len(nodes)} nodes, room for {fitting}; "
            "lower ray.num_actors, ray.num_cpus or ray.num_gpus, or add nodes."
        )
    return wanted


def _actors_on_node(resources: Mapping[str, float], config: RayConfig) -> int:
    needs = {"CPU": config.num_cpus, "GPU": config.num_gpus}
    return min(math.floor(resources.get(kind, 0) / need + 1e-9) for kind, need in needs.items() if need)
