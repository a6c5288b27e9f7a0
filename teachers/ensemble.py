"""The ensemble's two stages: train all teachers on their shards, then add up their votes on public queries.

Both are a map over blocks of teachers on a :class:`teachers.pool.Pool`. A shard goes to the worker that trains on it
and to no other. Where workers share a storage they read and write checkpoints there themselves; otherwise this process
does. Nothing here prices privacy: votes stay private until the aggregator releases a label.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fairpate.later import torch
from fairpate.nn.models import build_architecture
from fairpate.storage import Storage
from fairpate.votes_config import TeachersConfig
from teachers.blocks import Block, Given, Progress, TeacherCounter, blocks_in, computed, digest_of
from teachers.checkpoint import ArrayWeights, block_name, load_block, save_block
from teachers.pool import InProcessPool, Pool, PoolError
from teachers.shard import IntArray, assign_teachers, shard_key, shard_rows, trim_shards
from teachers.teacher import Shard, TeacherSpec
from teachers.train import Engine, choose_engine, train_teachers
from teachers.vote import Counts, VoteArray, count_block

if TYPE_CHECKING:  # a worker process imports this module and needs no data loaders
    from torch import Tensor

    from fairpate.data.dataset import Split

# Teachers per block, whatever the number of workers, so that a checkpoint is found again with more or fewer of them. A
# stack gains from being wide, most of all on an accelerator; a loop only from workers that finish together. Large
# teachers come in small blocks: a block is what a lost worker costs.
_LOOPED_BLOCK, _STACKED_BLOCK, _ACCELERATED_BLOCK = 4, 50, 100
_MAX_BLOCK_BYTES = 2**29
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Trained teachers on disk, in blocks that cover ``range(num_teachers)`` in order.

    ``storage`` holds them for every node; None means a folder that only this process reads.
    """

    spec: TeacherSpec
    blocks: tuple[Block, ...]
    storage: Storage | None = None

    @property
    def num_teachers(self) -> int:
        """Number of teachers T."""
        return sum(len(block.teacher_indices) for block in self.blocks)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that change with any shard, model, training, seed or library; private."""
        return digest_of(self.blocks)

    def sources(self) -> Iterator[str | ArrayWeights]:
        """Per block, what a worker reads its weights from: their place in the storage, or else the weights."""
        for block in self.blocks:
            yield load_block(block.checkpoint) if self.storage is None else block.checkpoint


@dataclass(frozen=True, kw_only=True)
class _Lessons:
    """What every block is trained with."""

    spec: TeacherSpec
    engine: Engine
    storage: Storage | None
    read: Callable[[], Split] | None


@dataclass(frozen=True, kw_only=True)
class _Ballot:
    """What every block votes on; its counts never exceed ``count_type``."""

    spec: TeacherSpec
    queries: npt.NDArray[np.generic]
    count_type: np.dtype[Any]


class _TrainedBlock(NamedTuple):
    """The weights, or None where the worker has stored them itself, and how many teachers diverged."""

    weights: ArrayWeights | None
    num_diverged: int


@dataclass(frozen=True, kw_only=True)
class _Shards:
    """The private records of every teacher, copied when they are asked for."""

    private: Split
    rows: list[IntArray]

    def of(self, teachers: tuple[int, ...]) -> list[Shard]:
        chosen = (torch.from_numpy(self.rows[teacher]) for teacher in teachers)
        return [Shard(x=self.private.x[row], y=self.private.y[row]) for row in chosen]

    def given(self, teachers: tuple[int, ...], *, as_rows: bool) -> Given:
        """What a worker is sent: rows of what it reads itself, or the records."""
        if as_rows:
            return [self.rows[teacher] for teacher in teachers]
        return [(shard.x.numpy(), shard.y.numpy()) for shard in self.of(teachers)]


def train_ensemble(
    private: Split,
    config: TeachersConfig,
    *,
    num_classes: int,
    seed: int,
    checkpoint_dir: Path | Storage,
    pool: Pool | None = None,
    on_progress: Progress | None = None,
    read: Callable[[], Split] | None = None,
) -> Ensemble:
    """Shard ``private`` by a keyed hash, and train the teachers that ``checkpoint_dir`` does not hold yet.

    ``pool`` None trains in this process. ``on_progress(teachers_done, num_teachers)`` counts restored ones too.
    ``read`` gives ``private`` again, wherever it is called: workers then read their shards and none is sent to them.
    ValueError for labels outside ``range(num_classes)``; PoolError where a worker reads other records.
    """
    _check_labels(private.y, num_classes)
    workers = pool or InProcessPool()
    spec = TeacherSpec(
        model=config.model,
        fit=config.fit,
        num_classes=num_classes,
        seed=seed,
        standardize=config.standardize,
        max_shard_size=config.max_shard_size,
    )
    engine = choose_engine(config.model, workers.device) if config.engine == "auto" else config.engine
    shards = _Shards(private=private, rows=rows_of_teachers(private, config, seed))

    def content_of(teachers: tuple[int, ...]) -> str:
        return block_name(shards.of(teachers), spec, teachers, engine)

    size = config.block_size or _block_size(spec, engine, workers.device, tuple(private.x.shape[1:]))
    blocks, storage = blocks_in(checkpoint_dir, config.num_teachers, size, content_of)
    lessons = _Lessons(spec=spec, engine=engine, storage=storage, read=read)
    _train_missing(blocks, lessons, shards, workers, on_progress)
    return Ensemble(spec=spec, blocks=blocks, storage=storage)


def _train_missing(
    blocks: tuple[Block, ...], lessons: _Lessons, shards: _Shards, workers: Pool, on_progress: Progress | None
) -> None:
    """Train and store the blocks that have no checkpoint yet; a warning says how many teachers diverged."""
    given = partial(shards.given, as_rows=lessons.read is not None)
    num_diverged = 0
    for block, done in computed(_train_block, lessons, blocks, lessons.storage, given, workers, on_progress):
        if done.weights is not None:
            save_block(block.checkpoint, done.weights)
        num_diverged += done.num_diverged
    if num_diverged:
        _log.warning(
            "%d of %d teachers diverged and vote with their initial weights; lower teachers.fit.learning_rate.",
            num_diverged,
            sum(len(block.teacher_indices) for block in blocks),
        )


def collect_votes(
    ensemble: Ensemble, queries_x: Tensor, *, pool: Pool | None = None, on_progress: Progress | None = None
) -> VoteArray:
    """``votes_QC``: how many teachers choose each class for each query; every row sums to T. Private.

    Workers count and add up; one total per worker comes here.
    """
    report = TeacherCounter(ensemble.blocks, on_progress)
    # Counts travel in the smallest type that holds all teachers.
    ballot = _Ballot(
        spec=ensemble.spec, queries=queries_x.numpy(), count_type=np.min_scalar_type(ensemble.num_teachers)
    )
    counts = (pool or InProcessPool()).sum(_count_block, ballot, ensemble.sources(), report.add)
    votes_QC = counts.astype(np.int64)
    # A block that was lost, or counted twice, shows in the sums.
    if (votes_QC.sum(axis=1) != ensemble.num_teachers).any():
        raise PoolError(f"Expected {ensemble.num_teachers} votes per query, got {sorted(set(votes_QC.sum(axis=1)))}.")
    return votes_QC


def rows_of_teachers(private: Split, config: TeachersConfig, seed: int) -> list[IntArray]:
    """The rows of ``private`` that each teacher learns from."""
    rows = shard_rows(assign_teachers(private.together, config.num_teachers, shard_key(seed)), config.num_teachers)
    if config.max_shard_size is not None:
        rows = _trimmed(rows, private.record_id, config.max_shard_size, shard_key(seed))
    return rows


def _trimmed(rows: list[IntArray], record_ids: Sequence[str], max_size: int, key: bytes) -> list[IntArray]:
    """The shards as they are trained on. How many were larger is for the operator's log alone."""
    num_larger = sum(len(row) > max_size for row in rows)
    if num_larger:
        _log.warning(
            "%d shards had more than teachers.max_shard_size=%d records and were trimmed.", num_larger, max_size
        )
    return trim_shards(rows, record_ids, max_size, key)


def _shards_of(block: Block, given: Any, lessons: _Lessons) -> list[Shard]:
    """The records that a block learns from: those that came, or the rows of what this process reads."""
    if lessons.read is None:
        # Copied, because arrays out of Ray's store are read-only.
        return [Shard(x=torch.tensor(x), y=torch.tensor(y)) for x, y in given]
    shards = read_shards(lessons.read, given)
    # What it is called follows from the records: by other ones it would be stored as what it is not.
    if block_name(shards, lessons.spec, block.teacher_indices, lessons.engine) != block.content:
        raise other_records()
    return shards


def read_shards(read: Callable[[], Split], given: Sequence[IntArray]) -> list[Shard]:
    """The records in rows ``given`` of what ``read`` gives. PoolError where it has no such rows."""
    private = read()
    if any(int(rows.max(initial=-1)) >= len(private) for rows in given):
        raise other_records()
    return [Shard(x=private.x[rows], y=private.y[rows]) for rows in map(torch.tensor, given)]


def other_records() -> PoolError:
    """What a worker raises that reads other records than the block's content says."""
    return PoolError(
        "ray.read_shards: a worker reads other private records than the run does; give every node the same files, or "
        "set it to false."
    )


def _train_block(lessons: _Lessons, item: tuple[Block, Given], device: str) -> _TrainedBlock:
    block, given = item
    shards = _shards_of(block, given, lessons)
    diverged: list[int] = []
    trained = train_teachers(
        shards,
        lessons.spec,
        teacher_indices=block.teacher_indices,
        engine=lessons.engine,
        device=device,
        on_diverged=diverged.append,
    )
    weights: ArrayWeights = {name: value.numpy() for name, value in trained.items()}
    if lessons.storage is None:
        return _TrainedBlock(weights, len(diverged))
    # A path may lead elsewhere on this node, and then nobody would find the checkpoint.
    lessons.storage.require_here()
    save_block(block.checkpoint, weights)
    return _TrainedBlock(None, len(diverged))


def _count_block(ballot: _Ballot, source: str | ArrayWeights, device: str) -> Counts:
    weights = load_block(source) if isinstance(source, str) else source
    tensors = {name: torch.tensor(value) for name, value in weights.items()}
    return count_block(tensors, ballot.spec, ballot.queries, count_type=ballot.count_type, device=device)


def _block_size(spec: TeacherSpec, engine: Engine, device: str, input_shape: tuple[int, ...]) -> int:
    stacked = _STACKED_BLOCK if device == "cpu" else _ACCELERATED_BLOCK
    if spec.model.trainable == "head":  # what is stored is small, and every block computes features of all queries
        return stacked
    model = build_architecture(spec.model, input_shape=input_shape, num_classes=spec.num_classes)
    teacher_bytes = sum(int(value.nbytes) for value in model.state_dict().values())
    return max(1, min(stacked if engine == "stacked" else _LOOPED_BLOCK, _MAX_BLOCK_BYTES // teacher_bytes))


def _check_labels(y: Tensor, num_classes: int) -> None:
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        raise ValueError(f"Expected labels in 0..{num_classes - 1}, got {int(y.min())}..{int(y.max())}.")
