"""Arrays of more records than memory should hold: in a file without a name, mapped.

Few stay in memory. Beyond that they are written below FAIRPATE_CACHE to a file that has no name, so that it goes with
the process that made it, and mapped from there: a page comes when it is touched, and goes when memory runs short.
Shapes: N records, F features.
"""

from __future__ import annotations

import mmap
import tempfile
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fairpate.data.mapped import FLAGS, PROTECTION
from fairpate.files import CACHE_VARIABLE, cache_dir
from fairpate.later import torch
from fairpate.types import UserError

if TYPE_CHECKING:
    from torch import Tensor

KEPT_BYTES, _ROWS_AT_ONCE = 2**24, 2**15
AnyArray = npt.NDArray[Any]


@dataclass(kw_only=True)
class Gathered:
    """Blocks (n,) or (n, F) of one type, one after the other; :meth:`array` closes it."""

    _blocks: list[AnyArray] = field(default_factory=list)
    _bytes: int = 0
    _file: IO[bytes] | None = None
    _values: AnyArray | None = None

    def __del__(self) -> None:
        if self._file is not None:  # what is mapped stays
            self._file.close()

    def append(self, block: AnyArray) -> None:
        """More records."""
        self._blocks.append(block)
        self._bytes += block.nbytes
        if self._bytes > KEPT_BYTES:
            self._write()

    @property
    def is_mapped(self) -> bool:
        """Whether the records are in a file."""
        return self._file is not None

    def array(self) -> AnyArray:
        """All records; ValueError where there was no block, not even an empty one."""
        if self._values is None:
            if self._file is None:
                self._values = np.concatenate(self._blocks)
            else:
                self._write()
                last = self._blocks[-1]
                content = mmap.mmap(self._file.fileno(), 0, flags=FLAGS, prot=PROTECTION)
                self._values = np.frombuffer(content, dtype=last.dtype).reshape(-1, *last.shape[1:])
            self._blocks.clear()
        return self._values

    def tensor(self) -> Tensor:
        """The same as a tensor."""
        return torch.from_numpy(self.array())

    def rows(self, index: Tensor) -> Tensor:
        """The records at ``index``: a view where they are a run, a copy of few, and else mapped from another file."""
        x = self.tensor()
        if (run := run_of(index.numpy())) is not None:
            return x[run]
        if self._file is None or len(index) * x[:1].nbytes <= KEPT_BYTES:
            return x[index]
        taken = Gathered()
        for part in index.split(_ROWS_AT_ONCE):
            taken.append(x[part].numpy())
        return taken.tensor()

    def _write(self) -> None:
        try:
            if self._file is None:
                cache_dir().mkdir(parents=True, exist_ok=True, mode=0o700)
                self._file = tempfile.TemporaryFile(dir=cache_dir())  # noqa: SIM115 - lives as long as the mapping
            for block in self._blocks:
                self._file.write(np.ascontiguousarray(block).data)
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"{CACHE_VARIABLE}: {cache_dir()} cannot take the records ({error.strerror}); name a folder with room."
            ) from error
        # The last stays to tell the width.
        self._blocks = [self._blocks[-1][:0]]


def run_of(rows: npt.NDArray[np.int64]) -> slice | None:
    """The slice that these rows are, one after the other; None where they are none, or no rows at all."""
    if not len(rows) or not bool((rows[1:] > rows[:-1]).all()) or rows[-1] - rows[0] + 1 != len(rows):
        return None
    return slice(int(rows[0]), int(rows[-1]) + 1)
