"""How many requests per second one caller may send: a bucket each, in memory, full at the start.

A request with a token of this service counts for its caller; any other counts for its address, so that guessing tokens
is slow and nobody else waits for it. Few addresses are remembered, those of late.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

_MOST_BUCKETS = 4096


@dataclass(frozen=True, kw_only=True)
class RequestRate:
    """``per_s`` requests per second, and ``burst`` at once; inf: no limit. ValueError for a rate that lets none in."""

    per_s: float = math.inf
    burst: float = math.inf

    def __post_init__(self) -> None:
        if not self.per_s > 0 or not self.burst >= 1:
            raise ValueError(f"Expected per_s > 0 and burst >= 1, got {self.per_s} and {self.burst}.")


STRANGERS = RequestRate(per_s=2.0, burst=20.0)
"""Of requests without a token that is known."""


class Buckets:
    """What everybody may still send under one rule."""

    def __init__(self, rule: RequestRate) -> None:
        self._rule = rule
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, name: str, *, now_s: float) -> float:
        """0 and one request less in ``name``'s bucket; or how long until there is one."""
        rule = self._rule
        if math.isinf(rule.per_s):
            return 0.0
        # Taken out and put back behind all others, so that the first is the one not heard of for longest.
        level, filled_s = self._levels.pop(name, (rule.burst, now_s))
        level = min(rule.burst, level + (now_s - filled_s) * rule.per_s)
        taken = level >= 1
        self._levels[name] = (level - taken, now_s)
        if len(self._levels) > _MOST_BUCKETS:
            self._levels.popitem(last=False)
        return 0.0 if taken else (1 - level) / rule.per_s
