"""What a person sees while a command works: bars on a terminal, plain lines in a job's log, nothing with `--json`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Timer

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fairpate.app.terminal.console import terminal
from fairpate.app.terminal.output import is_for_program
from fairpate.steps import Advance, heard_by, tell

_NAME_WIDTH = 12
_PATIENCE_S = 2.0
_FIRST_LINE_S, _NEXT_LINE, _RAREST_S = 10.0, 1.5, 300.0
_LEAST_S = 1.0  # of a pace that says anything


@dataclass
class Pace:
    """How fast steps go on, from the first report on: what was found done then was not done now."""

    clock: Callable[[], float] = lambda: time.monotonic()
    _first: tuple[float, int] | None = field(default=None, init=False)
    _last: tuple[float, int, int] | None = field(default=None, init=False)

    def advance(self, done: int, total: int) -> None:
        """So many of all are done now. Fewer than before, or others, begin anew."""
        now = self.clock()
        if self._first is None or self._last is None or done < self._last[1] or total != self._last[2]:
            self._first = (now, done)
        self._last = (now, done, total)

    def left_s(self) -> float | None:
        """Seconds until all are done, if they go on like this; None as long as nothing tells."""
        if self._first is None or self._last is None:
            return None
        took_s, steps = self._last[0] - self._first[0], self._last[1] - self._first[1]
        if steps <= 0 or took_s < _LEAST_S:
            return None
        return max(0.0, took_s / steps * (self._last[2] - self._last[1]) - (self.clock() - self._last[0]))

    def words(self) -> str:
        """Empty as long as nothing tells."""
        left_s = self.left_s()
        return "" if left_s is None else f"about {duration(left_s)} left"


def duration(seconds: float) -> str:
    """`7 s`, `3 min`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def is_live(console: Console) -> bool:
    """Whether what stands there can be drawn over."""
    return console.is_terminal and not console.is_dumb_terminal


class Reporter:
    """Announces stages. :meth:`stage` yields ``advance(done, total)``; :meth:`note` adds what a stage found."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or terminal(stderr=True, quiet=quiet or is_for_program())

    @contextmanager
    def stage(self, name: str, *, patience_s: float = 0.0) -> Iterator[Advance]:
        """A stage that reports how far it is, also what is told to :mod:`fairpate.steps`.

        With ``patience_s``, nothing is shown of one that takes less. A quiet one hands its steps on to its listener.
        """
        if self.console.quiet:
            yield tell
            return
        shown = _bar if is_live(self.console) else _lines
        with shown(self.console, name, patience_s) as advance, heard_by(advance):
            yield advance

    def note(self, name: str, text: str) -> None:
        """One line under a stage."""
        self.console.print(f"{name:<{_NAME_WIDTH}} {text}", soft_wrap=True)


@contextmanager
def waiting(name: str) -> Iterator[Advance]:
    """A stage of a command that is mostly quick: shown once it has taken two seconds."""
    with Reporter().stage(name, patience_s=_PATIENCE_S) as advance:
        yield advance


@contextmanager
def _bar(console: Console, name: str, patience_s: float) -> Iterator[Advance]:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    words = (TextColumn("{task.fields[count]}"), TextColumn("{task.fields[left]}"))
    bars = Progress(*columns, *words, console=console, transient=patience_s > 0)
    task, pace = bars.add_task(f"{name:<{_NAME_WIDTH}}", total=None, count="", left=""), Pace()

    def advance(done: int, total: int) -> None:
        pace.advance(done, total)
        bars.update(task, completed=done, total=total, count=f"{done}/{total}", left=pace.words())

    with _later(bars, patience_s) if patience_s else bars:
        yield advance
        bars.update(task, completed=1, total=1, left="")


@contextmanager
def _later(bars: Progress, patience_s: float) -> Iterator[None]:
    """Start ``bars`` after a while, unless all is over by then."""
    timer = Timer(patience_s, bars.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # One that had just begun would start the bars after they were stopped.
        timer.join()
        bars.stop()


@contextmanager
def _lines(console: Console, name: str, patience_s: float) -> Iterator[Advance]:
    """Beginning and end; in between lines that become rarer, each with the time left."""
    started, pace, next_line_s, is_shown = time.monotonic(), Pace(), _FIRST_LINE_S, patience_s == 0
    if is_shown:
        console.print(f"{name:<{_NAME_WIDTH}} started")

    def advance(done: int, total: int) -> None:
        nonlocal next_line_s, is_shown
        pace.advance(done, total)
        took_s = time.monotonic() - started
        if took_s < next_line_s or done >= total:
            return
        next_line_s, is_shown = min(took_s * _NEXT_LINE, took_s + _RAREST_S), True
        words = ", ".join(filter(None, (f"{done}/{total}", f"{duration(took_s)} so far", pace.words())))
        console.print(f"{name:<{_NAME_WIDTH}} {words}")

    yield advance
    if is_shown:
        console.print(f"{name:<{_NAME_WIDTH}} done in {time.monotonic() - started:.1f} s")
