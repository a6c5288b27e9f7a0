"""Names of many records, packed: their text, and eight bytes for each, in memory or in a mapped file.

A Python string takes 49 bytes besides its text, and its place in a list eight. Packed, names take eight besides theirs,
and those of a large table lie in a file without a name (:mod:`fairpate.data.spill`). They read as any sequence of
strings. Shapes: N records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fairpate.data.spill import Gathered, run_of

_AT_ONCE = 2**15
IntArray = npt.NDArray[np.int64]


def as_names(names: Iterable[str]) -> Names:
    """The same names, packed."""
    return names if isinstance(names, Names) else Names(names)


class Names(Sequence[str]):
    """N names in order; equal to any sequence of the same strings."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        gathered = GatheredNames()
        remaining = iter(names)
        while block := list(islice(remaining, _AT_ONCE)):
            gathered.append(block)
        self.packed: pa.LargeStringArray = gathered.names().packed

    @classmethod
    def of(cls, packed: pa.LargeStringArray) -> Names:
        """Names that are packed already."""
        names = cls.__new__(cls)
        names.packed = packed
        return names

    def __len__(self) -> int:
        return len(self.packed)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> Names: ...
    def __getitem__(self, row: int | slice) -> str | Names:
        if isinstance(row, slice):
            return Names.of(self.packed[row])
        name: str = self.packed[row].as_py()
        return name

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
        return hash(tuple(self))

    def __repr__(self) -> str:
        few = ", ".join(map(repr, self[:3])) + (", ..." if len(self) > 3 else "")
        return f"Names({len(self)}: {few})"

    def __reduce__(self) -> tuple[Any, ...]:
        # As text: what is packed may lie in a file that no other process has.
        return Names, (list(self),)

    def take(self, rows: IntArray) -> Names:
        """The names at ``rows``, in that order: a view where they are a run."""
        if (run := run_of(rows)) is not None:
            return self[run]
        gathered = GatheredNames()
        for start in range(0, len(rows), _AT_ONCE):
            gathered.append(self.packed.take(pa.array(rows[start : start + _AT_ONCE])))
        return gathered.names()

    def codes(self) -> IntArray:
        """A number for each name, equal for equal names of this process alone; two names share one almost never."""
        return np.fromiter(map(hash, self), np.int64, len(self))

    def repeated(self) -> IntArray:
        """The rows of names that stand before in this order."""
        ascending = np.sort(codes := self.codes())
        if not (ascending[1:] == ascending[:-1]).any():
            return np.zeros(0, dtype=np.int64)
        order = np.argsort(codes, kind="stable")
        alike = np.flatnonzero(np.diff(codes[order]) == 0)
        seen: set[str] = set()
        again = []
        # Few share a code; their names decide.
        for row in np.unique(np.concatenate([order[alike], order[alike + 1]])).tolist():
            if self[row] in seen:
                again.append(row)
            seen.add(self[row])
        return np.array(again, dtype=np.int64)

    def num_shared(self, others: Names) -> int:
        """How many distinct names of these are among ``others``."""
        shared = self.packed.filter(pc.is_in(self.packed, value_set=others.packed))
        return int(pc.count_distinct(shared).as_py())

    def numbered(self) -> IntArray:
        """A number from 0 on for each name, by where it stands first."""
        numbers: IntArray = self.packed.dictionary_encode().indices.to_numpy().astype(np.int64)
        return numbers

    @property
    def num_empty(self) -> int:
        """How many names have no character."""
        return int(np.count_nonzero(pc.binary_length(self.packed).to_numpy(zero_copy_only=False) == 0))

    @property
    def num_distinct(self) -> int:
        """How many names differ."""
        return int(pc.count_distinct(self.packed).as_py())


class GatheredNames:
    """Blocks of names, one after the other; :meth:`names` closes it."""

    def __init__(self) -> None:
        self._text, self._ends, self._size = Gathered(), Gathered(), 0
        self._text.append(np.zeros(0, dtype=np.uint8))
        self._ends.append(np.zeros(1, dtype=np.int64))

    def append(self, block: Iterable[str] | pa.Array) -> None:
        """More names."""
        text = (block if isinstance(block, pa.Array) else pa.array(block, pa.large_string())).cast(pa.large_string())
        if not len(text):
            return
        # A slice has the buffers of the whole: its own part is cut out of both.
        _, ends, content = text.buffers()
        ends_N1 = np.frombuffer(ends, dtype=np.int64)[text.offset : text.offset + len(text) + 1]
        first, last = ends_N1[[0, -1]].tolist()
        self._ends.append(ends_N1[1:] - first + self._size)
        if last > first:
            self._text.append(np.frombuffer(content, dtype=np.uint8)[first:last])
        self._size += last - first

    def names(self) -> Names:
        """All of them."""
        ends = self._ends.array()
        text = pa.LargeStringArray.from_buffers(len(ends) - 1, pa.py_buffer(ends), pa.py_buffer(self._text.array()))
        return Names.of(text)
