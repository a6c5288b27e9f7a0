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

    from teachers.work import BlockPool

_SENT = 64  # pictures that travel to a worker together


@contextmanager
def vectors_on(pool: Callable[[], AbstractContextManager[BlockPool]]) -> Iterator[None]:
    """Context manager: vectors of many pictures are computed inside the block by the workers of ``pool``, which opens
    them when they are needed. Vectors that are in the cache need none."""

    def blocks(encoder: Encoder, pictures: Tensor) -> Iterator[Tensor]:
        done = 0
        with pool() as workers:
            for vectors in workers.in_order(_vectors, encoder, (part.clone() for part in pictures.split(_SENT))):
                done += len(vectors)
                tell(done, len(pictures))
                yield vectors

    with computed_by(blocks):
        yield


def _vectors(encoder: Encoder, pictures: Tensor, device: str) -> Tensor:
    return encoder(pictures, device=device)
