"""The ensemble's two stages: train all teachers on their shards, then collect their votes on public queries.

Both are a map over blocks of teachers on a :class:`teachers.pool.Pool`; this process decides what is missing, and is
the only one that reads and writes checkpoints. Nothing here prices privacy: votes stay private until the aggregator
releases a label.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fairpate.config import TeachersConfig
from teachers.checkpoint import ArrayWeights, block_path, is_intact, load_block, save_block
from teachers.pool import InProcessPool, Pool
from teachers.shard import IntArray, assign_teachers, shard_key, shard_rows
from teachers.teacher import Shard, TeacherSpec
from teachers.train import Engine, choose_engine, train_teachers
from teachers.vote import PredictionArray, predict_votes

if TYPE_CHECKING:  # a worker process imports this module and needs no data loaders
    from fairpate.data.dataset import Split

Progress = Callable[[int, int], None]
# Teachers per block, whatever the number of workers, so that a checkpoint is found again with more or fewer of them. A
# stack gains from being wide, most of all on an accelerator; a loop only from workers that finish together.
_LOOPED_BLOCK, _STACKED_BLOCK, _ACCELERATED_BLOCK = 4, 50, 100


@dataclass(frozen=True, kw_only=True)
class Block:
    """Teachers that are trained and stored together."""

    teacher_indices: tuple[int, ...]
    checkpoint: Path


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Trained teachers on disk, in blocks that cover ``range(num_teachers)`` in order."""

    spec: TeacherSpec
    blocks: tuple[Block, ...]

    @property
    def num_teachers(self) -> int:
        """Number of teachers T."""
        return sum(len(block.teacher_indices) for block in self.blocks)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that change with any teacher's shard, model, training, seed or library."""
        names = "\n".join(block.checkpoint.name for block in self.blocks)
        return hashlib.blake2b(names.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True)
class _TrainingData:
    """What every worker shares: all private records as arrays, of which a block reads its own rows."""

    x: npt.NDArray[np.generic]
    y: npt.NDArray[np.int64]
    spec: TeacherSpec
    engine: Engine

    def shards(self, rows: Sequence[IntArray]) -> list[Shard]:
        return [Shard(x=torch.from_numpy(self.x[r]), y=torch.from_numpy(self.y[r])) for r in rows]


def train_ensemble(
    private: Split,
    config: TeachersConfig,
    *,
    num_classes: int,
    seed: int,
    checkpoint_dir: Path,
    pool: Pool | None = None,
    on_progress: Progress | None = None,
) -> Ensemble:
    """Shard ``private`` by a keyed hash, and train the teachers that ``checkpoint_dir`` does not hold yet.

    ``pool`` None trains in this process. ``on_progress(teachers_done, num_teachers)`` counts restored ones too.
    ValueError for labels outside ``range(num_classes)``.
    """
    _check_labels(private.y, num_classes)
    workers = pool or InProcessPool()
    spec = TeacherSpec(
        model=config.model, fit=config.fit, num_classes=num_classes, seed=seed, standardize=config.standardize
    )
    engine = choose_engine(config.model, workers.device) if config.engine == "auto" else config.engine
    data = _TrainingData(x=private.x.numpy(), y=private.y.numpy(), spec=spec, engine=engine)
    rows = shard_rows(assign_teachers(private.record_id, config.num_teachers, shard_key(seed)), config.num_teachers)
    blocks = tuple(
        Block(
            teacher_indices=t, checkpoint=block_path(checkpoint_dir, data.shards([rows[i] for i in t]), spec, t, engine)
        )
        for t in _split_into_blocks(config, engine, workers.device)
    )
    missing = [block for block in blocks if not is_intact(block.checkpoint)]
    report = _Counter(config.num_teachers, on_progress)
    report.add(config.num_teachers - sum(len(block.teacher_indices) for block in missing))
    items = [(block.teacher_indices, [rows[t] for t in block.teacher_indices]) for block in missing]
    for position, weights in workers.run(_train_block, data, items):
        save_block(missing[position].checkpoint, weights)
        report.add(len(missing[position].teacher_indices))
    return Ensemble(spec=spec, blocks=blocks)


def collect_votes(
    ensemble: Ensemble, queries_x: Tensor, *, pool: Pool | None = None, on_progress: Progress | None = None
) -> PredictionArray:
    """``predictions_TQ``: the class that each teacher chooses for each query, (T, Q) ``int16``. Private."""
    workers = pool or InProcessPool()
    report = _Counter(ensemble.num_teachers, on_progress)
    predictions_TQ = np.zeros((ensemble.num_teachers, len(queries_x)), dtype=np.int16)
    shared = (ensemble.spec, queries_x.numpy())
    for position, predictions in workers.run(_vote_block, shared, _load_blocks(ensemble)):
        teachers = ensemble.blocks[position].teacher_indices
        predictions_TQ[list(teachers)] = predictions
        report.add(len(teachers))
    return predictions_TQ


def _train_block(data: _TrainingData, item: tuple[Sequence[int], list[IntArray]], device: str) -> ArrayWeights:
    teacher_indices, rows = item
    weights = train_teachers(
        data.shards(rows), data.spec, teacher_indices=teacher_indices, engine=data.engine, device=device
    )
    return {name: value.numpy() for name, value in weights.items()}


def _vote_block(
    shared: tuple[TeacherSpec, npt.NDArray[np.generic]], weights: ArrayWeights, device: str
) -> PredictionArray:
    spec, queries = shared
    tensors = {name: torch.from_numpy(value.copy()) for name, value in weights.items()}
    return predict_votes(tensors, spec, torch.from_numpy(queries.copy()), device=device)


def _load_blocks(ensemble: Ensemble) -> Iterator[ArrayWeights]:
    for block in ensemble.blocks:
        yield load_block(block.checkpoint)


def _split_into_blocks(config: TeachersConfig, engine: Engine, device: str) -> list[tuple[int, ...]]:
    stacked = _STACKED_BLOCK if device == "cpu" else _ACCELERATED_BLOCK
    size = config.block_size or (stacked if engine == "stacked" else _LOOPED_BLOCK)
    teachers = range(config.num_teachers)
    return [tuple(teachers[start : start + size]) for start in range(0, config.num_teachers, size)]


def _check_labels(y: Tensor, num_classes: int) -> None:
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        raise ValueError(f"Expected labels in 0..{num_classes - 1}, got {int(y.min())}..{int(y.max())}.")


class _Counter:
    """Adds up finished teachers for a progress callback."""

    def __init__(self, total: int, on_progress: Progress | None):
        self._done, self._total, self._on_progress = 0, total, on_progress

    def add(self, count: int) -> None:
        self._done += count
        if self._on_progress is not None and count:
            self._on_progress(self._done, self._total)
