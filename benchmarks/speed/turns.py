"""Contenders timed in turns, so that what else a machine does falls on all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

Step = Callable[[], object]
_TURN_S = 0.05


def seconds_by_round(
    steps: Mapping[str, Step], repeats: int, clock: Callable[[], float] = time.process_time
) -> list[dict[str, float]]:
    """Seconds of one step of each contender, round after round of turns of a twentieth of a second.

    ``clock`` counts processor seconds; of a device that computes on its own it waits for it, and gives seconds.
    """
    rounds = [{name: _seconds_of_a_turn(step, clock) for name, step in steps.items()} for _ in range(repeats + 1)]
    return rounds[1:]  # the first one warms up


def _seconds_of_a_turn(step: Step, clock: Callable[[], float]) -> float:
    start = clock()
    count = 0
    while clock() - start < _TURN_S:
        step()
        count += 1
    return (clock() - start) / count
