"""Blocks of teachers: what is stored of them and where, which are missing, and the work of those that are.

A block is named by what determines its teachers, so that it is found again for the same shards, settings and library,
and computed where it is not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fairpate.storage import Storage, join
from teachers.checkpoint import is_intact, keyed_name
from teachers.pool import InProcessPool, Pool, ResultT, SharedT
from teachers.shard import IntArray

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Teachers that are trained and stored together. ``content`` names what determines them; private, as shards are."""

    teacher_indices: tuple[int, ...]
    content: str
    checkpoint: str


ArrayShard = tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]]
Given = list[ArrayShard] | list[IntArray]
"""Of a block's teachers: their records, or the rows of them in what a worker reads itself."""


def blocks_in(
    checkpoint_dir: Path | Storage, num_teachers: int, size: int, content_of: Callable[[tuple[int, ...]], str]
) -> tuple[tuple[Block, ...], Storage | None]:
    """All teachers by blocks of ``size``, with the places of their checkpoints, named by what determines them."""
    storage = checkpoint_dir if isinstance(checkpoint_dir, Storage) else None
    folder = checkpoint_dir.uri if isinstance(checkpoint_dir, Storage) else checkpoint_dir.absolute()

    def block(indices: tuple[int, ...]) -> Block:
        content = content_of(indices)
        # All who may read checkpoints may read the storage's marker; names are seen by all who may list them.
        name = content if storage is None else keyed_name(content, storage.identity)
        return Block(teacher_indices=indices, content=content, checkpoint=join(folder, name))

    teachers = range(num_teachers)
    return tuple(block(tuple(teachers[start : start + size])) for start in range(0, num_teachers, size)), storage


def computed(
    function: Callable[[SharedT, tuple[Block, Given], str], ResultT],
    shared: SharedT,
    blocks: tuple[Block, ...],
    storage: Storage | None,
    given: Callable[[tuple[int, ...]], Given],
    workers: Pool,
    on_progress: Progress | None,
) -> Iterator[tuple[Block, ResultT]]:
    """What ``function`` gives for every block that has no checkpoint yet, in any order; progress is told of all.

    ``given(teachers)`` is what a worker is sent of a block.
    """
    missing, report = missing_blocks(blocks, storage, workers), TeacherCounter(blocks, on_progress)
    report.add(*(position for position in range(len(blocks)) if position not in missing))
    # A generator: a shard is copied when a worker asks for it, not all shards at once.
    items = ((blocks[position], given(blocks[position].teacher_indices)) for position in missing)
    for number, result in workers.run(function, shared, items):
        yield blocks[missing[number]], result
        report.add(missing[number])  # once its caller has stored it


def digest_of(blocks: Sequence[Block]) -> str:
    """Sixteen hexadecimal digits of all that determines these blocks; private."""
    names = "\n".join(block.content for block in blocks)
    return hashlib.blake2b(names.encode(), digest_size=8).hexdigest()


def missing_blocks(blocks: tuple[Block, ...], storage: Storage | None, workers: Pool) -> list[int]:
    """The blocks that are to be trained. What writes checkpoints also reads them, to see which are intact."""
    readers = InProcessPool() if storage is None else workers
    found = dict(readers.run(_is_stored, storage, (block.checkpoint for block in blocks)))
    return [position for position in range(len(blocks)) if not found[position]]


def _is_stored(storage: Storage | None, checkpoint: str, _: str) -> bool:
    if storage is not None:
        storage.require_here()
    return is_intact(checkpoint)


class TeacherCounter:
    """Tells a progress callback how many teachers are done; a block that is done again counts once."""

    def __init__(self, blocks: tuple[Block, ...], on_progress: Progress | None):
        self._sizes = [len(block.teacher_indices) for block in blocks]
        self._done: set[int] = set()
        self._on_progress = on_progress

    def add(self, *positions: int) -> None:
        """These blocks are done."""
        self._done.update(positions)
        if self._on_progress is not None and positions:
            self._on_progress(sum(self._sizes[position] for position in self._done), sum(self._sizes))
