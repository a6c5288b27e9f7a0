"""What was charged when, and what came of it by group and class, for the operator alone.

Every charge is counted once, and once more when an open one gets its outcome. Points in time are cumulative and few:
when there are too many, every second one is left out and the next ones are further apart.

Shapes: G groups, C classes.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from aggregator.ledger.entries import NOBODY
from aggregator.ledger.ledger import Ledger
from aggregator.mechanism import Outcome

_MOST_POINTS = 512
_FIRST_SPACING_S = 1.0


class Point(NamedTuple):
    """So many charges were there at ``at_s``; of them answered and refused, by group."""

    at_s: float
    charges: int
    answered_G: tuple[int, ...]
    refused_G: tuple[int, ...]


_Kind = tuple[int, str, int | None]
"""Group, verdict and label."""


class History:
    """Counts of one ledger's charges; call :meth:`look` now and then, from one thread at a time."""

    def __init__(self, *, num_groups: int, num_classes: int) -> None:
        self.points: list[Point] = []
        self._num_groups, self._num_classes = num_groups, num_classes
        self._counts: Counter[_Kind] = Counter()
        self._open: list[int] = []
        self._seen, self._spacing_s = 0, _FIRST_SPACING_S

    def begin(self, ledger: Ledger, num_charges: int, *, now_s: float) -> None:
        """Take in what was charged before, at the times that the ledger knows.

        What the run asked for itself stands at the beginning, and is no pace of its callers.
        """
        known = [asked for asked in ledger.asked if asked.at_s and asked.asker != NOBODY and asked.first < num_charges]
        for asked in known[:: max(1, len(known) // (_MOST_POINTS // 2))]:
            self.look(ledger, asked.first, now_s=asked.at_s)
        self.look(ledger, num_charges, now_s=now_s)

    def look(self, ledger: Ledger, num_charges: int, *, now_s: float) -> None:
        """Take in the first ``num_charges`` charges as they are now."""
        rows = [(number, ledger.charged(number, number + 1)[0]) for number in self._open]
        # Open ones were counted as such; those among them that have an outcome now count as that.
        self._counts.subtract((group, "open", None) for _, (_, group, _) in rows)
        rows += enumerate(ledger.charged(self._seen, num_charges), self._seen)
        self._counts.update(_kind(group, outcome) for _, (_, group, outcome) in rows)
        self._open = [number for number, (_, _, outcome) in rows if outcome is None]
        self._seen = max(self._seen, num_charges)
        self._note(now_s)

    @property
    def num_open(self) -> int:
        """Reservations without an outcome: charged, and nothing was released."""
        return len(self._open)

    def by_group(self) -> list[dict[str, int]]:
        """Of each group how often which verdict came, open reservations too."""
        found = [
            dict.fromkeys(("answer", "confidence", "fairness", "free", "open"), 0) for _ in range(self._num_groups)
        ]
        for (group, verdict, _), count in self._counts.items():
            found[group][verdict] += count
        return found

    def by_class(self) -> list[list[int]]:
        """Answers (G, C) of each class to each group."""
        found = [[0] * self._num_classes for _ in range(self._num_groups)]
        for (group, _, label), count in self._counts.items():
            if label is not None:
                found[group][label] += count
        return found

    def _note(self, now_s: float) -> None:
        now_s = max(now_s, self.points[-1].at_s if self.points else now_s)  # a clock may be set back
        groups = self.by_group()
        answered_G = tuple(counts["answer"] for counts in groups)
        refused_G = tuple(sum(counts[kind] for kind in ("confidence", "fairness", "free")) for counts in groups)
        point = Point(now_s, self._seen, answered_G, refused_G)
        if len(self.points) > 1 and now_s - self.points[-2].at_s < self._spacing_s:
            self.points[-1] = point  # the last point is always the present
            return
        self.points.append(point)
        if len(self.points) > _MOST_POINTS:
            self.points = [*self.points[:-1:2], self.points[-1]]
            self._spacing_s *= 2


def _kind(group: int, outcome: Outcome | None) -> _Kind:
    return (group, "open", None) if outcome is None else (group, outcome.verdict, outcome.label)
