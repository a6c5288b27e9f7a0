"""The workers of a run: a pool that applies a function to many items, and what was done, as numbers that an operator
watches while a run works and finds in its record.

Loops call :func:`count` in the process that hands out the work, so that a result of a worker that was lost is not
counted. On a cluster each number is a metric of Ray (``ray.util.metrics``), which Prometheus reads; inside
:func:`tallied` it is added up for the run's own record. A Ray that was started for one process shows no metrics.

No number depends on a value of a private record, but when a teacher was trained may depend on the size of its shard: so
metrics and record are for operators.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from fairpate.types import UserError

COUNTED = {
    "teachers_trained": "Teachers trained and stored.",
    "blocks_trained": "Blocks of teachers trained and stored.",
    "blocks_lost": "Blocks lost together with their worker, in training and in voting.",
    "blocks_repeated": "Lost blocks that another worker has computed since.",
    "votes_collected": "Votes of teachers on queries.",
    "cells_done": "Cells of a comparison that finished.",
    "cells_failed": "Cells of a comparison that failed.",
}
"""The numbers that are added up, with what each of them counts."""
DEVICE_MEMORY = "device_memory_share"
"""The largest share of its accelerator's memory that a worker used, among those that Ray lets it use."""
_SHOWS_METRICS = "RAY_enable_metrics_collection"
_tally: ContextVar[Counter[str] | None] = ContextVar("tally", default=None)
_metrics: dict[tuple[str, str], Any] = {}


class PoolError(UserError, RuntimeError):
    """A pool of workers could not finish its work. The error that caused this is chained."""


Counts = npt.NDArray[np.integer[Any]]
BlockFunction = Callable[[Any, Any, str], Any]
"""A pure function ``function(shared, item, device)``: a value that all items share, one item, and a torch device."""


@dataclass(eq=False)
class BlockPool:
    """Computes ``function(shared, item, device)`` for many items, one after another in this process.

    It is for a machine without Ray or with a single GPU; subclasses use several workers. ``device`` is the torch device
    of every worker.
    """

    device: str = "cpu"

    def carry(self, module: ModuleType) -> None:
        """Send the code of ``module`` to the workers on which it is not installed. This pool has no workers, so nothing
        is done."""

    def run(self, function: BlockFunction, shared: Any, items: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Apply ``function(shared, item, device)`` to the items; yield pairs (position of an item, result) as results
        arrive. Items are read lazily."""
        for position, item in enumerate(items):
            yield position, function(shared, item, self.device)

    def in_order(self, function: BlockFunction, shared: Any, items: Iterable[Any]) -> Iterator[Any]:
        """Apply ``function(shared, item, device)`` to the items as :meth:`run` does; yield the results in the order of
        the items."""
        waiting, position = dict[int, Any](), 0
        for number, result in self.run(function, shared, items):
            waiting[number] = result
            while position in waiting:
                yield waiting.pop(position)
                position += 1

    def sum(
        self,
        function: BlockFunction,
        shared: Any,
        items: Iterable[Any],
        *,
        on_done: Callable[[int], None] = lambda _: None,
    ) -> Counts:
        """Return the sum of ``function(shared, item, device)`` over the items; all results have one shape and type.

        ``on_done(position)`` is called after each item. ValueError without items.
        """
        total: Counts | None = None
        for position, counts in self.run(function, shared, items):
            # Not in place, because arrays from Ray's store are read-only.
            total = counts if total is None else total + counts
            on_done(position)
        if total is None:
            raise ValueError("Expected at least one item in items, got none; give those whose results are added up.")
        return total


@contextmanager
def tallied() -> Iterator[dict[str, float]]:
    """Context manager: add up what is counted inside the ``with`` block; yields the numbers by name, those that are 0
    left out."""
    tally: Counter[str] = Counter()
    token = _tally.set(tally)
    try:
        yield tally  # type: ignore[misc]
    finally:
        _tally.reset(token)


def count(name: str, amount: int = 1) -> None:
    """Add ``amount`` to the number ``name``, one of :data:`COUNTED`."""
    tally = _tally.get()
    if tally is not None:
        tally[name] += amount
    metric = _metric(name, "Counter", COUNTED[name])
    if metric is not None and amount:  # a counter of Ray refuses 0
        metric.inc(amount)


def count_device_memory(share: float | None) -> None:
    """Record the ``share`` of its accelerator's memory that a worker has used at most so far; None: it has none."""
    tally = _tally.get()
    if tally is not None and share is not None:
        tally[DEVICE_MEMORY] = max(tally[DEVICE_MEMORY], share)  # type: ignore[assignment]


def show_device_memory(share: float | None) -> None:
    """Let Prometheus read ``share`` from the worker that this process is."""
    if share is not None and (metric := _metric(DEVICE_MEMORY, "Gauge", "Largest share of device memory used.")):
        metric.set(share)


def _metric(name: str, kind: str, words: str) -> Any:
    """Return Ray's metric ``name``; None in a process without Ray, or with a Ray that shows no metrics."""
    # Not imported for this: without Ray nothing is shown.
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or os.environ.get(_SHOWS_METRICS) == "0":
        return None
    # A metric belongs to one connection to a cluster.
    key = (name, ray.get_runtime_context().get_job_id())
    if key not in _metrics:
        from ray.util import metrics

        _metrics[key] = getattr(metrics, kind)(f"fairpate_{name}", description=words)
    return _metrics[key]
