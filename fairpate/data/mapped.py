"""Pixels in Arrow files that processes map into memory instead of reading them.

A page of such a file comes from the disk when it is touched, is shared by every process of the machine, and goes again
when memory runs short. All pixels of a file are one uncompressed run of bytes, so a tensor is a view of it and nothing
is copied. The file carries the sha256 of its pixels, which is checked whenever it is opened. Files hold records: they
belong to their owner only.
"""

from __future__ import annotations

import hashlib
import logging
import math
import mmap
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fairpate.files import write_atomically
from fairpate.later import torch

if TYPE_CHECKING:
    from torch import Tensor

PixelArray = npt.NDArray[np.uint8]
Append = Callable[[PixelArray], None]
LOGGER = logging.getLogger(__name__)
_COLUMN, _SHA256 = "x", b"sha256"
COPIED_BYTES, _ROWS_AT_ONCE, _BYTES_HASHED_AT_ONCE = 2**26, 1024, 2**20
# A private mapping may be written to, and then only the page that was is copied; none of it needs memory set aside.
PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
FLAGS = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)  # MAP_NORESERVE


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """Bytes (N, channels, height, width), and the ``file`` that they are a view of; null where they are in memory."""

    x: Tensor
    file: Path | None = None

    def rows(self, index: Tensor) -> Tensor:
        """The pictures at ``index``: a copy of few, and of many a view of a file of their own, beside this one."""
        if self.file is None or len(index) * self.x[:1].numel() <= COPIED_BYTES:
            return self.x[index]
        # The name of the file is a hash of all that its pixels follow from: with the rows it says what is there.
        key = hashlib.sha256(self.file.name.encode() + index.numpy().tobytes()).hexdigest()[:32]
        shape = (len(index), *self.x.shape[1:])
        kept = kept_pixels(self.file.with_name(f"rows-{key}.arrow"), shape, self._append_rows(index))
        return self.x[index] if kept is None else kept

    def _append_rows(self, index: Tensor) -> Callable[[Append], None]:
        def fill(append: Append) -> None:
            for rows in index.split(_ROWS_AT_ONCE):
                append(self.x[rows].numpy())

        return fill


def kept_pixels(path: Path, shape: tuple[int, ...], fill: Callable[[Append], None]) -> Tensor | None:
    """A view of the pixels in ``path``, which ``fill`` gives in order where the file is missing or damaged.

    None where the file cannot be kept; the log says why.
    """
    if path.is_file():
        try:
            return map_pixels(path, shape)
        except (OSError, ValueError, pa.ArrowException) as error:
            LOGGER.warning("%s: damaged cache, made again (%s)", path, error)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_pixels(path, shape, fill)
        return map_pixels(path, shape)
    except OSError as error:
        LOGGER.warning("%s: pictures are not cached (%s)", path, error)
        return None


def write_pixels(path: Path, shape: tuple[int, ...], fill: Callable[[Append], None]) -> None:
    """Write the pictures that ``fill`` appends, however many, without holding them; whole at ``path`` or not there."""
    digest = hashlib.sha256()
    # Without a header first: in the file, the checksum stands before the pixels that it is known after.
    with tempfile.TemporaryFile(dir=path.parent) as plain:

        def append(pixels: PixelArray) -> None:
            content = np.ascontiguousarray(pixels).data.cast("B")
            digest.update(content)
            plain.write(content)

        fill(append)
        plain.flush()
        if plain.tell() != math.prod(shape):
            raise ValueError(f"Expected {math.prod(shape)} bytes of pixels, got {plain.tell()}.")
        content = mmap.mmap(plain.fileno(), 0, prot=mmap.PROT_READ)
        batch = _batch(np.frombuffer(content, dtype=np.uint8).reshape(shape), digest.hexdigest())
        write_atomically(path, lambda temporary: _write_batch(temporary, batch))


def map_pixels(path: Path, shape: tuple[int, ...]) -> Tensor:
    """A view of the pixels in ``path``; writing to it changes this process's copy only.

    ValueError or ArrowException for a damaged file and for pictures of another shape.
    """
    with path.open("rb") as stream:
        mapping = mmap.mmap(stream.fileno(), 0, flags=FLAGS, prot=PROTECTION)
        whole = pa.py_buffer(mapping)
        with pa.ipc.open_file(whole) as reader:
            column, metadata = reader.get_batch(0).column(_COLUMN), reader.schema.metadata or {}
        stored = column.to_numpy_ndarray()
        if stored.shape != shape:
            raise ValueError(f"pictures of shape {stored.shape}, expected {shape}")
        start = stored.ctypes.data - whole.address
        if _sha256_of(stream, start, stored.nbytes) != metadata.get(_SHA256, b"").decode():
            raise ValueError("pixels do not match their checksum")
    return torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8, count=stored.nbytes, offset=start).reshape(shape))


def _batch(pixels: PixelArray, sha256: str) -> pa.RecordBatch:
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(pixels)
    schema = pa.schema([pa.field(_COLUMN, column.type)], metadata={_SHA256: sha256.encode()})
    return pa.RecordBatch.from_arrays([column], schema=schema)


def _write_batch(path: Path, batch: pa.RecordBatch) -> None:
    # Rights before content.
    path.touch(mode=0o600)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _sha256_of(stream: Any, start: int, size: int) -> str:
    """Read, not mapped: pages that are only checked do not count as this process's memory."""
    digest = hashlib.sha256()
    stream.seek(start)
    for position in range(0, size, _BYTES_HASHED_AT_ONCE):
        digest.update(stream.read(min(_BYTES_HASHED_AT_ONCE, size - position)))
    return digest.hexdigest()
