"""Teachers that stay: Ray actors that keep their blocks of weights and vote whenever they are asked.

One call per actor carries a whole batch of queries; there is never a call per teacher. An actor that dies is started
again, reads its teachers and votes again, which changes nothing because a vote is a pure function. So is one that
hangs: every actor is asked for signs of life, which it gives beside its work, and is ended when none comes. A vote
without all teachers is never returned.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fairpate.config import RayConfig
from fairpate.later import torch
from teachers.checkpoint import ArrayWeights, load_block
from teachers.ensemble import Ensemble
from teachers.pool import PoolError
from teachers.ray_pool import number_of_actors
from teachers.teacher import TeacherSpec
from teachers.vote import VoteArray, count_block

_VOTE_TIMEOUT_S = 60.0
# -1: restarted without end, since voters serve for as long as the service does.
_MAX_RESTARTS, _MAX_RETRIES = -1, 3
_PING_INTERVAL_S, _HANG_TIMEOUT_S = 1.0, 5.0
BESIDE_WORK = "signs of life"
_log = logging.getLogger(__name__)


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

    def ping(self) -> None:
        """Give a sign of life."""


class Voters:
    """All teachers of an ensemble on a bounded number of actors; use inside :func:`teachers.cluster.start_ray`.

    PoolError where the cluster is too small.
    """

    def __init__(self, ensemble: Ensemble, config: RayConfig) -> None:
        import ray

        options: dict[str, Any] = {
            "num_cpus": config.num_cpus,
            "num_gpus": config.num_gpus,
            "max_restarts": _MAX_RESTARTS,
            "max_task_retries": _MAX_RETRIES,
            # A thread beside the one that votes: a voter that is busy still answers pings.
            "concurrency_groups": {BESIDE_WORK: 1},
        }
        actor_class: Any = ray.remote(**options)(Voter)
        self._num_teachers = ensemble.num_teachers
        # References, kept here, so that an actor that is started again, maybe on another node, finds its teachers.
        self._sources = [source if isinstance(source, str) else ray.put(source) for source in ensemble.sources()]
        num_actors = min(number_of_actors(config), len(self._sources))
        device = "cuda" if config.num_gpus else "cpu"
        self.actors = [
            actor_class.remote(ensemble.spec, config.torch_threads, device, *self._sources[i::num_actors])
            for i in range(num_actors)
        ]
        self._watch = VoterWatch(self.actors)

    def are_answering(self) -> bool:
        """Whether every actor gave a sign of life lately; known without waiting."""
        return self._watch.all_answer

    def votes(self, queries: npt.NDArray[np.generic]) -> VoteArray:
        """``votes_QC`` of every teacher on features (Q, ...). PoolError unless all of them voted in time."""
        import ray

        reference = ray.put(queries)
        try:
            counts = ray.get([actor.counts.remote(reference) for actor in self.actors], timeout=_VOTE_TIMEOUT_S)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
            raise PoolError(f"Not all teachers voted within {_VOTE_TIMEOUT_S:g} s: {error}") from error
        votes_QC: VoteArray = np.sum(counts, axis=0)
        if not (votes_QC.sum(axis=1) == self._num_teachers).all():
            raise PoolError(f"Expected {self._num_teachers} votes per query, got {sorted(set(votes_QC.sum(axis=1)))}.")
        return votes_QC

    def close(self) -> None:
        """End the actors."""
        import ray

        self._watch.close()
        for actor in self.actors:
            ray.kill(actor)
        self.actors, self._sources = [], []


class VoterWatch:
    """A thread that asks voters for signs of life and starts again those that hang; :meth:`close` ends it.

    A voter that has not answered yet since it was started is starting, however long that takes, and does not hang.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        self._voters = [_WatchedVoter(actor) for actor in actors]
        self._looked_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="voter watch")
        self._thread.start()

    @property
    def all_answer(self) -> bool:
        """Whether every voter answers, as far as the watch itself goes on: what it saw long ago says nothing."""
        is_fresh = time.monotonic() < self._looked_s + _HANG_TIMEOUT_S
        return is_fresh and all(voter.answers for voter in self._voters)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_PING_INTERVAL_S):
            try:
                for voter in self._voters:
                    voter.look()
                self._looked_s = time.monotonic()
            except Exception:  # noqa: BLE001 - the watch goes on, and counts as without an answer meanwhile
                _log.exception("The voters could not be looked at.")


class _WatchedVoter:
    def __init__(self, actor: Any) -> None:
        self.answers = False
        self._actor = actor
        self._ping: Any = None
        self._asked_s = 0.0

    def look(self) -> None:
        """Take in the last sign of life, ask for another, end the voter if it hangs."""
        import ray

        if self._ping is None:
            # Not retried: the call fails while the actor is started again, and that is no sign of hanging.
            self._ping = self._actor.ping.options(concurrency_group=BESIDE_WORK, max_task_retries=0).remote()
            self._asked_s = time.monotonic()
        if ray.wait([self._ping], timeout=0)[0]:
            self.answers, self._ping = _succeeded(self._ping), None
        elif self.answers and time.monotonic() > self._asked_s + _HANG_TIMEOUT_S:
            _log.warning("A voter gave no sign of life for %g s and is started again.", _HANG_TIMEOUT_S)
            self.answers, self._ping = False, None
            ray.kill(self._actor, no_restart=False)


def _succeeded(reference: Any) -> bool:
    import ray

    try:
        ray.get(reference)
    except ray.exceptions.RayError:
        return False
    return True
