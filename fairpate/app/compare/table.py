"""What a person sees of a sweep: a live table on a terminal, a line per finished cell in a job's log."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fairpate.app.compare.cells import Cell
from fairpate.app.compare.records_table import Row
from fairpate.app.terminal.progress import Pace, is_live
from fairpate.evaluation.page import counted

_REFRESHES_PER_S = 2


@dataclass
class _Count:
    cells: int = 0
    found: int = 0
    done: int = 0
    failed: int = 0
    minutes: list[float] = field(default_factory=list)


class SweepTable:
    """Counts cells by data set and method; cells that were found finished are counted apart."""

    def __init__(self, cells: Sequence[Cell], found: set[str], console: Console) -> None:
        self.console = console
        self._started, self._pace = time.monotonic(), Pace()
        self._counts: dict[tuple[str, str], _Count] = {}
        for cell in cells:
            count = self._counts.setdefault((cell.data, cell.method), _Count())
            count.cells += 1
            count.found += cell.digest in found
        self._live: Live | None = None

    @property
    def done(self) -> int:
        """Finished cells, found ones and failed ones included."""
        return sum(count.found + count.done + count.failed for count in self._counts.values())

    @property
    def failed(self) -> int:
        """Cells that failed now."""
        return sum(count.failed for count in self._counts.values())

    @property
    def total(self) -> int:
        """All cells."""
        return sum(count.cells for count in self._counts.values())

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the table on a terminal while cells run; in a log say what there is to do."""
        self._pace.advance(self.done, self.total)
        if not is_live(self.console):
            self._line(f"{counted(self.total, 'cell')}, {self.done} of them finished before")
            yield
            return
        with Live(self._render(), console=self.console, refresh_per_second=_REFRESHES_PER_S) as self._live:
            yield
            self.refresh()
        self._live = None

    def add(self, cell: Cell, row: Row) -> None:
        """One more cell has ended."""
        count = self._counts[cell.data, cell.method]
        self._pace.advance(self.done + 1, self.total)
        if row.record is None:
            count.failed += 1
            outcome = f"failed: {row.error}"
        else:
            count.done += 1
            count.minutes.append(row.minutes)
            outcome = f"{60 * row.minutes:.1f} s"
        if self._live is None or row.record is None:
            name = f"{cell.method} on {cell.data}, seed {cell.config.seed}, {cell.digest}"
            self._line(", ".join(filter(None, (f"{self.done}/{self.total} {name}: {outcome}", self._pace.words()))))
        self.refresh()

    def refresh(self) -> None:
        """Show the clock and the counts of now."""
        if self._live is not None:
            self._live.update(self._render())

    def _line(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _render(self) -> Group:
        table = Table("data", "method", box=SIMPLE_HEAD)
        for name in ("cells", "found", "done", "failed", "left", "s per cell"):
            table.add_column(name, justify="right")
        for (data, method), count in self._counts.items():
            left = count.cells - count.found - count.done - count.failed
            mean = 60 * sum(count.minutes) / len(count.minutes) if count.minutes else math.nan
            words = [str(number) for number in (count.cells, count.found, count.done, count.failed, left)]
            table.add_row(data, method, *words, "" if math.isnan(mean) else f"{mean:.1f}")
        line = (f"{self.done} of {self.total} cells", self._clock(), self._pace.words())
        return Group(table, Text(", ".join(filter(None, line))))

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"{minutes}:{seconds:02d} min"
