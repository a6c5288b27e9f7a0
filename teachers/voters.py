"""Teachers that stay: Ray actors that keep their blocks of weights and vote whenever they are asked.

One call per actor carries a whole batch of queries; there is never a call per teacher. An actor that dies is started
again, reads its teachers and votes again, which changes nothing because a vote is a pure function. A vote without
all teachers is never returned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fairpate.config import RayConfig
from teachers.checkpoint import ArrayWeights, load_block
from teachers.ensemble import Ensemble
from teachers.pool import PoolError, number_of_actors
from teachers.teacher import TeacherSpec
from teachers.vote import VoteArray, count_block

_VOTE_TIMEOUT_S = 60.0
_MAX_RESTARTS, _MAX_RETRIES = -1, 3


class Voter:
    """The actor: some blocks of teachers, loaded once."""

    def __init__(self, spec: TeacherSpec, torch_threads: int, device: str, *sources: str | ArrayWeights) -> None:
        torch.set_num_threads(torch_threads)
        self._spec, self._device = spec, device
        loaded = (load_block(source) if isinstance(source, str) else source for source in sources)
        self._blocks = [{name: torch.tensor(value) for name, value in block.items()} for block in loaded]

    def counts(self, queries: npt.NDArray[np.generic]) -> VoteArray:
        """How many of this actor's teachers chose each class, (Q, C)."""
        counts = np.zeros((len(queries), self._spec.num_classes), dtype=np.int64)
        for block in self._blocks:
            counts += count_block(block, self._spec, queries, device=self._device)
        return counts


class Voters:
    """All teachers of an ensemble on a bounded number of actors; use inside :func:`teachers.cluster.start_ray`.

    PoolError where the cluster is too small.
    """

    def __init__(self, ensemble: Ensemble, config: RayConfig, *, timeout_s: float = _VOTE_TIMEOUT_S) -> None:
        import ray

        actor_class: Any = ray.remote(
            num_cpus=config.num_cpus,
            num_gpus=config.num_gpus,
            max_restarts=_MAX_RESTARTS,
            max_task_retries=_MAX_RETRIES,
        )(Voter)
        self._num_teachers, self._timeout_s = ensemble.num_teachers, timeout_s
        # References, kept here, so that an actor that is started again, maybe on another node, finds its teachers.
        self._sources = [source if isinstance(source, str) else ray.put(source) for source in ensemble.sources()]
        num_actors = min(number_of_actors(config), len(self._sources))
        device = "cuda" if config.num_gpus else "cpu"
        self.actors = [
            actor_class.remote(ensemble.spec, config.torch_threads, device, *self._sources[i::num_actors])
            for i in range(num_actors)
        ]

    def votes(self, queries: npt.NDArray[np.generic]) -> VoteArray:
        """``votes_QC`` of every teacher on features (Q, ...). PoolError unless all of them voted in time."""
        import ray

        reference = ray.put(queries)
        try:
            counts = ray.get([actor.counts.remote(reference) for actor in self.actors], timeout=self._timeout_s)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
            raise PoolError(f"Not all teachers voted within {self._timeout_s:g} s: {error}") from error
        votes_QC: VoteArray = np.sum(counts, axis=0)
        if not (votes_QC.sum(axis=1) == self._num_teachers).all():
            raise PoolError(f"Expected {self._num_teachers} votes per query, got {sorted(set(votes_QC.sum(axis=1)))}.")
        return votes_QC

    def close(self) -> None:
        """End the actors."""
        import ray

        for actor in self.actors:
            ray.kill(actor)
        self.actors, self._sources = [], []
