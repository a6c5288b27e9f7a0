"""How many teachers an accelerator's memory holds at once: measured on real training steps, not guessed.

Where memory is measured is a value, so that the arithmetic needs no accelerator. The answer decides how many teachers
share a program, never what they learn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from fairpate.later import torch

_SAFE_SHARE = 0.8  # the rest is the driver's context, libraries' workspaces, and pieces too small to use


class Memory(Protocol):
    """A device's memory, as far as this process may use it."""

    @property
    def available_bytes(self) -> float:
        """What this process may use."""
        ...

    def peak_bytes(self, compute: Callable[[], None]) -> float:
        """The most that ``compute()`` held at once; infinity where it did not fit."""
        ...


class CudaMemory:
    """Memory of a CUDA device: this process's share of it, which a pool of several workers per device sets."""

    def __init__(self, device: torch.device):
        self._device = device

    @property
    def available_bytes(self) -> float:
        """As :attr:`Memory.available_bytes`."""
        total_bytes = torch.cuda.get_device_properties(self._device).total_memory
        return total_bytes * torch.cuda.get_per_process_memory_fraction(self._device)

    def peak_bytes(self, compute: Callable[[], None]) -> float:
        """As :meth:`Memory.peak_bytes`; what the allocator reserves counts, for nobody else can use it."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            compute()
        except torch.OutOfMemoryError:
            return math.inf
        return torch.cuda.max_memory_reserved(self._device)


def stack_that_fits(train_step: Callable[[int], None], memory: Memory, num_teachers: int) -> int:
    """The most teachers, up to ``num_teachers``, that fit four fifths of ``memory`` side by side.

    ``train_step(k)`` trains k of them for a step. A line through the peaks of one and of two says how many fit; that
    many are then tried, and fewer where the line was wrong. The very first step also sets up libraries' workspaces, so
    that it is made twice and a process's first answer is like its later ones. ValueError where one does not fit.
    """
    limit = _SAFE_SHARE * memory.available_bytes

    def peak(count: int) -> float:
        return memory.peak_bytes(lambda: train_step(count))

    peak(1)
    one = peak(1)
    if one > limit:
        raise ValueError(
            f"One teacher needs {one / 2**30:.3g} GiB for a training step, and {limit / 2**30:.3g} GiB of a worker's "
            "memory may be used; raise ray.num_gpus, or lower teachers.fit.batch_size."
        )
    if num_teachers == 1 or (two := peak(2)) > limit:
        return 1
    # At least a byte each: memory is reserved in large pieces, and a second teacher may need no further one.
    count = min(num_teachers, 1 + int((limit - one) / max(1.0, two - one)))
    while count > 2 and peak(count) > limit:
        count //= 2
    return count
