"""What every task of a sweep needs: an end to its time, and its release counted where the driver runs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from fairpate.app.spending.odometer import LimitReachedError, Odometer
from fairpate.app.spending.receipt import Release
from fairpate.compare_config import TasksConfig


class CellTimeoutError(RuntimeError):
    """A cell that took longer than it may."""


def in_time(tasks: TasksConfig, work: Callable[..., Any], *arguments: Any) -> Any:
    """``work`` in a worker's main thread, which the operating system interrupts when time is up."""

    def interrupt(*_: object) -> None:
        raise CellTimeoutError(f"ran longer than tasks.max_minutes={tasks.max_minutes:g}; raise it, or train less.")

    signal.signal(signal.SIGALRM, interrupt)
    # 0 sets no timer.
    signal.setitimer(signal.ITIMER_REAL, 60 * (tasks.max_minutes or 0))
    try:
        return work(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def count_cell(release: Release) -> None:
    """Count what a cell released: a worker elsewhere has an odometer of its own, and its model is in a folder already.

    LimitReachedError where it passes a limit that the worker did not know; it is counted all the same.
    """
    odometer = Odometer()
    try:
        odometer.record(release)
    except LimitReachedError:
        odometer.record(release, enforce=False)
        raise
