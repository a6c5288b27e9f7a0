"""Features of more records than memory should hold: in a file without a name, mapped.

Few stay in memory. Beyond that they are written below FAIRPATE_CACHE to a file that has no name, so that it goes with
the process that made it, and mapped from there: a page comes when it is touched, and goes when memory runs short.
Shapes: N records, F features.
"""

from __future__ import annotations

import mmap
import tempfile
from dataclasses import dataclass, field
from typing import IO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fairpate.data.mapped import CACHE_VARIABLE, COPIED_BYTES, FLAGS, PROTECTION, cache_dir
from fairpate.types import UserError

_ROWS_AT_ONCE = 2**15
FloatArray = npt.NDArray[np.float32]


@dataclass(kw_only=True)
class Gathered:
    """Blocks (n, F) of ``float32``, one after the other; :meth:`tensor` closes it."""

    _blocks: list[FloatArray] = field(default_factory=list)
    _bytes: int = 0
    _file: IO[bytes] | None = None
    _x: Tensor | None = None

    def __del__(self) -> None:
        if self._file is not None:  # what is mapped stays
            self._file.close()

    def append(self, block: FloatArray) -> None:
        """More records."""
        self._blocks.append(block)
        self._bytes += block.nbytes
        if self._bytes > COPIED_BYTES:
            self._write()

    @property
    def is_mapped(self) -> bool:
        """Whether the records are in a file."""
        return self._file is not None

    def tensor(self) -> Tensor:
        """All records (N, F)."""
        if self._x is None:
            width = self._blocks[0].shape[1] if self._blocks else 0
            if self._file is None:
                self._x = torch.from_numpy(np.concatenate(self._blocks))
            else:
                self._write()
                content = mmap.mmap(self._file.fileno(), 0, flags=FLAGS, prot=PROTECTION)
                self._x = torch.from_numpy(np.frombuffer(content, dtype=np.float32).reshape(-1, width))
            self._blocks.clear()
        return self._x

    def rows(self, index: Tensor) -> Tensor:
        """The records at ``index``: a view where they are a run, a copy of few, and else mapped from another file."""
        x = self.tensor()
        if len(index) and bool((index.diff() == 1).all()):
            return x[int(index[0]) : int(index[-1]) + 1]
        if self._file is None or len(index) * x[:1].nbytes <= COPIED_BYTES:
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
