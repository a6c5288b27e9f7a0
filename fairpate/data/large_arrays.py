"""Arrays larger than memory: mapped files of pixels, arrays that move to disk as they grow, packed names of records.

Processes map files into memory instead of reading them: a page is read from the disk on first use, is shared by all
processes of the machine, and is dropped when memory runs short. Arrays of few records stay in memory. The files contain
records: only their owner may read them.

Shapes: N records, F features.
"""

from __future__ import annotations

import hashlib
import logging
import math
import mmap
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fairpate.files import CACHE_VARIABLE, cache_dir, write_atomically
from fairpate.lazy import torch
from fairpate.types import IntArray, UserError

if TYPE_CHECKING:
    from torch import Tensor

PixelArray = npt.NDArray[np.uint8]
LOGGER = logging.getLogger(__name__)
# Up to this size rows are copied, beyond it they are written to and mapped from a file of their own.
COPIED_BYTES, _ROWS_AT_ONCE, _BYTES_HASHED_AT_ONCE = 2**26, 1024, 2**20
# A private mapping may be written to: only changed pages are copied. No memory is reserved for it.
PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
FLAGS = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)  # MAP_NORESERVE


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """The pixels of N pictures as bytes (N, channels, height, width), or numbers computed from them (N, F). ``file`` is
    the file that they are a view of; None if they are in memory."""

    x: Tensor
    file: Path | None = None

    def rows(self, index: Tensor) -> Tensor:
        """Return the pictures at ``index``. They are a copy in memory if they are few, or if all pictures are in memory
        already; otherwise a view of a new file, written to the folder of ``file``.
        """
        if self.file is None or len(index) * self.x[:1].nbytes <= COPIED_BYTES:
            return self.x[index]
        # The file's name is a hash of everything that determines its pixels: with the rows it identifies the new file.
        key = hashlib.sha256(self.file.name.encode() + index.numpy().tobytes()).hexdigest()[:32]
        path, shape = self.file.with_name(f"rows-{key}.pixels"), (len(index), *self.x.shape[1:])
        blocks, kind = (lambda: (self.x[rows].numpy() for rows in index.split(_ROWS_AT_ONCE))), self.x[:0].numpy().dtype
        return kept_pixels(path, shape, blocks, kind=kind).x


_BYTES = np.dtype(np.uint8)


def kept_pixels(
    path: Path,
    shape: tuple[int, ...],
    blocks: Callable[[], Iterable[npt.NDArray[Any]]],
    *,
    kind: np.dtype[Any] = _BYTES,
) -> Pixels:
    """Return a view of the pixels in the cached file ``path``, which is written from ``blocks`` if missing or damaged.

    ``kind``: the type of the numbers in ``blocks``: bytes for pixels. The file consists of the numbers and the sha256
    of their shape and bytes, which is checked whenever the file is opened. It is written block by block, and is
    complete or missing afterwards. If it cannot be written, log the reason and return the pixels in memory, as those of
    no picture at all.
    """
    if not shape[0]:
        return Pixels(x=torch.from_numpy(np.zeros(shape, dtype=kind)))

    def write(temporary: Path) -> None:
        digest = hashlib.sha256(repr(shape).encode())
        with temporary.open("wb") as stream:
            for block in blocks():
                content = block.tobytes()
                digest.update(content)
                stream.write(content)
            if stream.tell() != (size := math.prod(shape) * kind.itemsize):
                raise ValueError(f"Expected {size} bytes of pixels, got {stream.tell()}; report this as a defect.")
            stream.write(digest.digest())

    if path.is_file():
        try:
            return Pixels(x=map_pixels(path, shape, kind=kind), file=path)
        except (OSError, ValueError) as error:
            LOGGER.warning("%s: damaged cache, recomputed (%s)", path, error)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, write, private=True)
        # Mapped from the written file, so that the checksum of the pixels in use was verified.
        return Pixels(x=map_pixels(path, shape, kind=kind), file=path)
    except OSError as error:
        LOGGER.warning("%s: pictures are not cached (%s); name a folder with room in FAIRPATE_CACHE", path, error)
        flat = np.concatenate([block.ravel() for block in blocks()])
        return Pixels(x=torch.from_numpy(flat.reshape(shape)))


def map_pixels(path: Path, shape: tuple[int, ...], *, kind: np.dtype[Any] = _BYTES) -> Tensor:
    """Return a view of the pixels in ``path``; writing to it changes this process's copy only.

    ValueError for a damaged file and for pictures of another shape.
    """
    digest, size = hashlib.sha256(repr(shape).encode()), math.prod(shape) * kind.itemsize
    with path.open("rb") as stream:
        # Read, not mapped: pages that are only checked do not count as this process's memory.
        for start in range(0, size, _BYTES_HASHED_AT_ONCE):
            digest.update(stream.read(min(_BYTES_HASHED_AT_ONCE, size - start)))
        if stream.read() != digest.digest():
            raise ValueError(f"{path}: this cache of pixels is damaged or not of shape {shape}; delete the file.")
        mapping = mmap.mmap(stream.fileno(), 0, flags=FLAGS, prot=PROTECTION)
    return torch.from_numpy(np.frombuffer(mapping, dtype=kind, count=math.prod(shape)).reshape(shape))


# Up to this size blocks stay in memory, beyond it all of them are moved to a file.
KEPT_BYTES, _ROWS_SPILLED_AT_ONCE = 2**24, 2**15
AnyArray = npt.NDArray[Any]


@dataclass(kw_only=True)
class Gathered:
    """Collects blocks (n,) or (n, F) of records of one type; :meth:`array` joins them in order and ends the collection.

    Large collections are written below FAIRPATE_CACHE to a ``file`` without a name, which disappears with its process.
    """

    _blocks: list[AnyArray] = field(default_factory=list)
    _bytes: int = 0
    file: IO[bytes] | None = field(default=None, init=False)
    _values: AnyArray | None = None

    def append(self, block: AnyArray) -> None:
        self._blocks.append(block)
        # All bytes so far, not those in memory: once a file exists, every block is written to it.
        self._bytes += block.nbytes
        if self._bytes > KEPT_BYTES:
            self._write()

    def array(self) -> AnyArray:
        """Return all collected records as one array. ValueError if no block was added, not even an empty one."""
        if self._values is None:
            if self.file is None:
                self._values = np.concatenate(self._blocks)
            else:
                self._write()
                last = self._blocks[-1]
                content = mmap.mmap(self.file.fileno(), 0, flags=FLAGS, prot=PROTECTION)
                self._values = np.frombuffer(content, dtype=last.dtype).reshape(-1, *last.shape[1:])
            # Joined by now: if kept too, the blocks would use the memory twice.
            self._blocks.clear()
        return self._values

    def tensor(self) -> Tensor:
        """Return all collected records as one tensor, without a copy."""
        return torch.from_numpy(self.array())

    def rows(self, index: Tensor) -> Tensor:
        """Return the records at the row numbers ``index``: a view if the numbers are consecutive, a copy if they are
        few, otherwise a memory map of a new file with these records."""
        x = self.tensor()
        if (run := as_slice(index.numpy())) is not None:
            return x[run]
        if self.file is None or len(index) * x[:1].nbytes <= KEPT_BYTES:
            return x[index]
        # Block by block: the rows of a large split are never in memory together.
        taken = Gathered()
        for part in index.split(_ROWS_SPILLED_AT_ONCE):
            taken.append(x[part].numpy())
        return taken.tensor()

    def _write(self) -> None:
        try:
            if self.file is None:
                cache_dir().mkdir(parents=True, exist_ok=True, mode=0o700)
                self.file = tempfile.TemporaryFile(dir=cache_dir())  # noqa: SIM115 - closed with this object
                # The mapping outlives the file.
                weakref.finalize(self, self.file.close)
            for block in self._blocks:
                self.file.write(np.ascontiguousarray(block).data)
            self.file.flush()
        except OSError as error:
            raise UserError(
                f"{CACHE_VARIABLE}: {cache_dir()} cannot store the records ({error.strerror}); name a folder with room."
            ) from error
        # An empty block is kept for its type and width.
        self._blocks = [self._blocks[-1][:0]]


def as_slice(rows: npt.NDArray[np.int64]) -> slice | None:
    """Return ``rows`` as a slice if they are consecutive and ascending; None for other rows and for no rows at all."""
    if not len(rows) or not bool((rows[1:] > rows[:-1]).all()) or rows[-1] - rows[0] + 1 != len(rows):
        return None
    return slice(int(rows[0]), int(rows[-1]) + 1)


_AT_ONCE = 2**15


class Names(Sequence[str]):
    """An ordered collection of N names of records or persons, which compares equal to any sequence of the same strings.

    Names are stored packed, in less memory than Python strings; the names of a large table are in a file.
    """

    packed: pa.LargeStringArray

    def __init__(self, names: Iterable[str] | GatheredNames | pa.LargeStringArray = ()) -> None:
        if isinstance(names, Names):
            names = names.packed
        if isinstance(names, pa.LargeStringArray):
            self.packed = names
            return
        if not isinstance(names, GatheredNames):
            remaining, names = iter(names), GatheredNames()
            while block := list(islice(remaining, _AT_ONCE)):
                names.append(block)
        ends, text = names.ends.array(), names.text.array()
        self.packed = pa.LargeStringArray.from_buffers(len(ends) - 1, pa.py_buffer(ends), pa.py_buffer(text))

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, row: int | slice) -> Any:
        return Names(self.packed[row]) if isinstance(row, slice) else self.packed[row].as_py()

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _AT_ONCE):
            yield from self.packed[start : start + _AT_ONCE].to_pylist()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Names):
            return bool(self.packed.equals(other.packed))
        if isinstance(other, Sequence) and not isinstance(other, str):
            return len(self) == len(other) and all(one == another for one, another in zip(self, other, strict=True))
        return NotImplemented

    def __hash__(self) -> int:
        # The hash of a tuple, because a tuple of the same names is equal to these.
        return hash(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        # As text: packed names may be in a file that no other process has.
        return Names, (list(self),)

    def take(self, rows: IntArray) -> Names:
        """Return the names at ``rows``, in that order; a view if the rows are consecutive."""
        if (run := as_slice(rows)) is not None:
            return Names(self.packed[run])
        gathered = GatheredNames()
        for start in range(0, len(rows), _AT_ONCE):
            gathered.append(self.packed.take(pa.array(rows[start : start + _AT_ONCE])))
        return Names(gathered)

    def repeated(self) -> IntArray:
        """Return the indices of the names that also occur at an earlier index."""
        codes = np.fromiter(map(hash, self), np.int64, len(self))
        ascending = np.sort(codes)
        if not (ascending[1:] == ascending[:-1]).any():
            return np.zeros(0, dtype=np.int64)
        order = np.argsort(codes, kind="stable")
        alike = np.flatnonzero(np.diff(codes[order]) == 0)
        candidates = np.unique(np.concatenate([order[alike], order[alike + 1]]))
        # Equal codes may be a collision of hashes: the names decide.
        first = np.unique(self.take(candidates).numbered(), return_index=True)[1]
        return np.delete(candidates, first)

    def numbered(self) -> IntArray:
        """Return an integer for each name: distinct names are counted from 0 in the order of first appearance."""
        # Arrow builds its dictionary in the order of the column, so the indices are in the order of appearance.
        return self.packed.dictionary_encode().indices.to_numpy().astype(np.int64)

    @property
    def num_distinct(self) -> int:
        """The number of distinct names."""
        return int(pc.count_distinct(self.packed).as_py())


@dataclass(kw_only=True)
class GatheredNames:
    """Collects blocks of names; :class:`Names` joins them in order and ends the collection."""

    text: Gathered = field(default_factory=lambda: Gathered(_blocks=[np.zeros(0, dtype=np.uint8)]))
    # Arrow's layout of text: where each name ends, with a 0 in front.
    ends: Gathered = field(default_factory=lambda: Gathered(_blocks=[np.zeros(1, dtype=np.int64)]))
    _size: int = 0

    def append(self, block: Iterable[str] | pa.Array) -> None:
        text = (block if isinstance(block, pa.Array) else pa.array(block, pa.large_string())).cast(pa.large_string())
        if not len(text):
            return
        # A slice shares the buffers of the whole array: only its own part is taken from both.
        _, ends, content = text.buffers()
        ends_N1 = np.frombuffer(ends, dtype=np.int64)[text.offset : text.offset + len(text) + 1]
        first, last = ends_N1[[0, -1]].tolist()
        self.ends.append(ends_N1[1:] - first + self._size)
        if last > first:
            self.text.append(np.frombuffer(content, dtype=np.uint8)[first:last])
        self._size += last - first
