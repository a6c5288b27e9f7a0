"""Vectors of pictures from a public encoder, computed by Ray workers in parts.

Inside :func:`vectors_on`, the vectors of many pictures (:mod:`fairpate.encoders`) are computed by a pool of Ray actors,
each of which gets some pictures at a time. A picture has a batch of its own on every worker too, so that its vector has
the same bits as in one process, however the pictures are divided; on GPUs the last bits differ from a processor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from fairpate.encoders import Encoder, computed_by
from fairpate.types import tell

if TYPE_CHECKING:
    from torch import Tensor

    from teachers.ensemble import BlockPool

# Pictures that travel to a worker together, and pictures whose vectors wait in memory for those in front of them.
_SENT, _AT_ONCE = 64, 4096


@contextmanager
def vectors_on(pool: Callable[[], AbstractContextManager[BlockPool]]) -> Iterator[None]:
    """Context manager: vectors of many pictures are computed inside the block by the workers of ``pool``, which opens
    them when they are needed. Vectors that are in the cache need none."""

    def blocks(encoder: Encoder, pictures: Tensor) -> Iterator[Tensor]:
        with pool() as workers:
            for start in range(0, len(pictures), _AT_ONCE):
                parts = pictures[start : start + _AT_ONCE].split(_SENT)
                # Results arrive in any order.
                made: list[Tensor | None] = [None] * len(parts)
                done = start
                for place, vectors in workers.run(_vectors, encoder, (part.clone() for part in parts)):
                    made[place] = vectors
                    done += len(vectors)
                    tell(done, len(pictures))
                yield from (each for each in made if each is not None)

    with computed_by(blocks):
        yield


def _vectors(encoder: Encoder, pictures: Tensor, device: str) -> Tensor:
    return encoder(pictures, device=device)
