"""Teachers are trained on shards of private records and vote on public ones: the two stages before the aggregator.

What comes out is private. Checkpoints are kept teacher by teacher, so that an interrupted training goes on. A service
goes on asking what the run asked: :class:`StandingVoters`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aggregator.service.questions import CountVotes, Question
from aggregator.session import VotesUnavailableError
from fairpate.app.rundir import RunDirectory, RunDirectoryError
from fairpate.app.tables import read_votes, write_votes
from fairpate.app.terminal.progress import Reporter
from fairpate.config import ConfigError, DataConfig, RayConfig
from fairpate.data import Dataset, Split, load_dataset
from fairpate.storage import Storage
from fairpate.types import IntArray, VoteBatch
from fairpate.votes_config import TeachersConfig
from teachers.cluster import open_pool
from teachers.pool import Pool, PoolError


def collect_vote_batch(
    dataset: Dataset,
    queries: Split,
    teachers: TeachersConfig,
    *,
    seed: int,
    ray: RayConfig,
    checkpoint_dir: Path | Storage,
    reporter: Reporter,
    pool: Pool | None = None,
) -> VoteBatch:
    """The votes of all teachers on the queries; those that ``checkpoint_dir`` lacks are trained first. Private.

    ``pool`` None opens one for the purpose, as ``ray`` says.
    """
    # Teachers are networks, and who reads votes or configurations needs no torch; so below.
    from teachers.ensemble import collect_votes, train_ensemble
    from teachers.own import ask_own_teachers

    given: dict[str, Any] = {"num_classes": dataset.num_classes, "seed": seed, "checkpoint_dir": checkpoint_dir}
    with open_pool(ray) if pool is None else nullcontext(pool) as workers:
        given |= {"pool": workers, "read": _reader(dataset, ray)}
        if teachers.model.python is not None:
            with reporter.stage("teachers") as advance:
                own = ask_own_teachers(dataset.private, teachers, queries.x, **given, on_progress=advance)
            return _batch(queries, own.votes_QC, own.digest)
        with reporter.stage("teachers") as advance:
            ensemble = train_ensemble(dataset.private, teachers, **given, on_progress=advance)
        with reporter.stage("votes") as advance:
            votes_QC = collect_votes(ensemble, queries.x, pool=workers, on_progress=advance)
    return _batch(queries, votes_QC, ensemble.digest)


@dataclass(frozen=True)
class _Read:
    """Private records of the data set that ``config`` (JSON) names; a process reads them once."""

    config: str

    def __call__(self) -> Split:
        return _private(self.config)


@lru_cache(maxsize=1)
def _private(config: str) -> Split:
    return load_dataset(DataConfig.model_validate_json(config)).private


def _reader(dataset: Dataset, ray: RayConfig) -> Callable[[], Split] | None:
    if not ray.read_shards or ray.num_actors == 0:
        return None
    if dataset.source is None:
        raise ConfigError(
            "ray.read_shards: these records are not what files alone hold (they came from Python, or a run's folder "
            "keeps how they are seen), so no worker can read them; set it to false."
        )
    return _Read(dataset.source.model_dump_json())


def _batch(queries: Split, votes_QC: IntArray, ensemble: str) -> VoteBatch:
    return VoteBatch(record_ids=queries.record_id, groups_Q=queries.z.numpy(), votes_QC=votes_QC, ensemble=ensemble)


def stored_votes(run: RunDirectory, queries: Split) -> VoteBatch | None:
    """The run's votes, None where there are none yet. RunDirectoryError for votes on other records."""
    if not run.votes.exists():
        return None
    votes = read_votes(run.votes)
    if tuple(votes.record_ids) != queries.record_id or votes.groups_Q.tolist() != queries.z.tolist():
        raise RunDirectoryError(
            f"{run.votes}: votes on other records than this configuration asks about; restore the data set's files, or "
            "start a new run folder."
        )
    return votes


def store_votes(run: RunDirectory, votes: VoteBatch) -> None:
    """Keep them for the next command of the same run."""
    write_votes(votes, run.votes)


def check_teachers(dataset: Dataset, num_teachers: int) -> None:
    """ConfigError for more teachers than private records, or persons. It does not tell how many there are."""
    if num_teachers > dataset.private.num_protected:
        raise ConfigError(
            f"teachers.num_teachers: {num_teachers} teachers, but fewer private {dataset.unit}s in {dataset.name}, so "
            "that most would learn from nothing; lower it."
        )


@dataclass(frozen=True, kw_only=True)
class StandingVoters:
    """Voters that stay for a service.

    ``ensemble`` is what determines their votes, for the ledger; ``try_vote`` votes on features (1, ...) of no query, or
    raises; ``are_answering`` tells without waiting.
    """

    ensemble: str
    count_votes: CountVotes
    try_vote: Callable[[npt.NDArray[np.generic]], object]
    are_answering: Callable[[], bool]
    close: Callable[[], None]


def standing_teachers(
    dataset: Dataset,
    teachers: TeachersConfig,
    *,
    seed: int,
    ray: RayConfig,
    checkpoint_dir: Path | Storage,
    collected: Path,
) -> StandingVoters:
    """All teachers in actors; votes that a run ``collected`` are read from its table."""
    from teachers.ensemble import train_ensemble
    from teachers.voters import Voters

    with open_pool(ray) as pool:
        ensemble = train_ensemble(
            dataset.private,
            teachers,
            num_classes=dataset.num_classes,
            seed=seed,
            checkpoint_dir=checkpoint_dir,
            pool=pool,
            read=_reader(dataset, ray),
        )
    # After the pool is closed, whose actors held the CPUs that these need.
    voters = Voters(ensemble, ray)
    return StandingVoters(
        ensemble=ensemble.digest,
        count_votes=VoteCounter(read_votes(collected), voters.votes),
        try_vote=voters.votes,
        are_answering=voters.are_answering,
        close=voters.close,
    )


class VoteCounter:
    """Votes from the run's table where it has them, else from all teachers, in one call for all that are missing."""

    def __init__(self, collected: VoteBatch, ask_teachers: Callable[[npt.NDArray[np.generic]], IntArray]) -> None:
        self._collected = dict(zip(collected.record_ids, collected.votes_QC, strict=True))
        self._ask_teachers = ask_teachers

    def __call__(self, questions: Sequence[Question]) -> IntArray:
        """``votes_QC``. VotesUnavailableError unless every teacher voted on every question."""
        rows = [self._collected.get(question.query.record_id) for question in questions]
        missing = [i for i, row in enumerate(rows) if row is None]
        if missing:
            features = np.stack([questions[i].features for i in missing])
            try:
                votes_QC = self._ask_teachers(features)
            except PoolError as error:
                raise VotesUnavailableError(str(error)) from error
            for i, row in zip(missing, votes_QC, strict=True):
                rows[i] = row
        return np.array(rows, dtype=np.int64)
