"""Where blocks of teachers are computed: in this process, or on Ray actors (:mod:`teachers.ray_pool`).

A pool maps a pure function over items beside one shared value, or adds up what it returns, and knows nothing of
teachers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from fairpate.types import UserError

SharedT = TypeVar("SharedT")
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
Counts = npt.NDArray[np.integer[Any]]


class PoolError(UserError, RuntimeError):
    """Work that a pool could not finish; the cause is chained."""


class Pool(Protocol):
    """Computes ``function(shared, item, device)`` for many items."""

    @property
    def device(self) -> str:
        """The torch device of every worker."""
        ...

    def carry(self, module: ModuleType) -> None:
        """Let what comes from ``module`` be computed where that is not installed."""
        ...

    def run(
        self, function: Callable[[SharedT, ItemT, str], ResultT], shared: SharedT, items: Iterable[ItemT]
    ) -> Iterator[tuple[int, ResultT]]:
        """Yield (position of the item, result) as results arrive, in any order; items are read when needed."""
        ...

    def sum(
        self,
        function: Callable[[SharedT, ItemT, str], Counts],
        shared: SharedT,
        items: Iterable[ItemT],
        on_done: Callable[[int], None],
    ) -> Counts:
        """The sum of all results, arrays of equal shape and type. ValueError without items.

        ``on_done(position)`` is told of each item; of one whose result was lost, again.
        """
        ...


class InProcessPool:
    """One item after another in this process: for a machine without Ray, or a single GPU."""

    def __init__(self, device: str = "cpu"):
        self.device = device

    def carry(self, module: ModuleType) -> None:
        """Nothing: it is here."""

    def run(
        self, function: Callable[[SharedT, ItemT, str], ResultT], shared: SharedT, items: Iterable[ItemT]
    ) -> Iterator[tuple[int, ResultT]]:
        """As :meth:`Pool.run`, in order."""
        for position, item in enumerate(items):
            yield position, function(shared, item, self.device)

    def sum(
        self,
        function: Callable[[SharedT, ItemT, str], Counts],
        shared: SharedT,
        items: Iterable[ItemT],
        on_done: Callable[[int], None],
    ) -> Counts:
        """As :meth:`Pool.sum`, in order."""
        total: Counts | None = None
        for position, counts in self.run(function, shared, items):
            total = added(total, counts)
            on_done(position)
        return at_least_one(total)


def added(total: Counts | None, counts: Counts) -> Counts:
    """A total and what comes to it; None: nothing yet."""
    # In fresh memory: what came out of Ray's store is read-only.
    return counts if total is None else total + counts


def at_least_one(total: Counts | None) -> Counts:
    """The total. ValueError where nothing came to it."""
    if total is None:
        raise ValueError("Expected at least one item to add up, got none.")
    return total
