"""Where the private records are that vote themselves: in this process, or in blocks on Ray actors.

Each actor samples its own records and returns its nearest; the nearest of all parts are the nearest of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fairpate.config import RayConfig
from teachers.neighbours import Coordinates, Nearest, Sampler, Voters, merged, nearest_of_samples
from teachers.pool import PoolError
from teachers.ray_pool import number_of_actors
from teachers.voters import BESIDE_WORK, VoterWatch

_TIMEOUT_S = 300.0


class Neighbourhood(Protocol):
    """All private records, ready to be asked."""

    def nearest(self, queries_QD: Coordinates, names: Sequence[str]) -> Nearest:
        """The nearest of fresh samples. PoolError unless every record was there to be sampled."""
        ...

    def are_answering(self) -> bool:
        """Whether they are all there; known without waiting."""
        ...

    def close(self) -> None:
        """Forget them."""
        ...


class LocalNeighbourhood:
    """All of them in this process."""

    def __init__(self, blocks: Sequence[Voters], *, count: int, sampler: Sampler) -> None:
        self._blocks, self._count, self._sampler = blocks, count, sampler

    def nearest(self, queries_QD: Coordinates, names: Sequence[str]) -> Nearest:
        """As :meth:`Neighbourhood.nearest`."""
        return nearest_of_samples(self._blocks, queries_QD, names, count=self._count, sampler=self._sampler)

    def are_answering(self) -> bool:
        """Always."""
        return True

    def close(self) -> None:
        """Forget the records."""
        self._blocks = []

    def ping(self) -> None:
        """Give a sign of life."""


class RayNeighbourhood:
    """Blocks of records on a bounded number of actors; use inside :func:`teachers.cluster.start_ray`.

    Each samples its own records. An actor that is started again draws new samples, of which nothing was released.
    """

    def __init__(
        self,
        blocks: Sequence[Voters],
        *,
        count: int,
        sampling_rate: float,
        seed: int | None,
        config: RayConfig,
    ) -> None:
        import ray

        options: dict[str, Any] = {
            "num_cpus": config.num_cpus,
            "max_restarts": -1,
            "max_task_retries": 3,
            # A thread beside the one that searches, so that a long search is not taken for a hang.
            "concurrency_groups": {BESIDE_WORK: 1},
        }
        actor_class: Any = ray.remote(**options)(_Part)
        # Kept here, so that an actor that is started again finds its records.
        self._sources = [ray.put(block) for block in blocks]
        num_actors = max(1, min(number_of_actors(config), len(blocks)))
        self.actors = [
            actor_class.remote(count, sampling_rate, seed, config.torch_threads, *self._sources[i::num_actors])
            for i in range(num_actors)
        ]
        self._watch = VoterWatch(self.actors)

    def nearest(self, queries_QD: Coordinates, names: Sequence[str]) -> Nearest:
        """As :meth:`Neighbourhood.nearest`."""
        import ray

        reference = ray.put(queries_QD)
        try:
            parts = ray.get([actor.nearest.remote(reference, names) for actor in self.actors], timeout=_TIMEOUT_S)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
            raise PoolError(f"Not all records could be asked within {_TIMEOUT_S:g} s: {error}") from error
        return merged(parts)

    def are_answering(self) -> bool:
        """Whether every actor gave a sign of life lately."""
        return self._watch.all_answer

    def close(self) -> None:
        """End the actors."""
        import ray

        self._watch.close()
        for actor in self.actors:
            ray.kill(actor)
        self.actors, self._sources = [], []


class _Part(LocalNeighbourhood):
    """The actor: some blocks, and samples of its own."""

    def __init__(self, count: int, sampling_rate: float, seed: int | None, torch_threads: int, *blocks: Voters) -> None:
        import torch

        torch.set_num_threads(torch_threads)
        super().__init__(blocks, count=count, sampler=Sampler(sampling_rate, seed))
