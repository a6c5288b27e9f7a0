"""What a person sees while a run works: bars on a terminal, plain lines in a job's log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fairpate.app.output import is_for_program
from fairpate.app.terminal import terminal

Advance = Callable[[int, int], None]
_NAME_WIDTH = 12


class Reporter:
    """Announces stages. :meth:`stage` yields ``advance(done, total)``; :meth:`note` adds what a stage found."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or terminal(stderr=True, quiet=quiet or is_for_program())

    @contextmanager
    def stage(self, name: str) -> Iterator[Advance]:
        """A stage that reports how far it is; on a log only its beginning and end are lines."""
        started = time.monotonic()
        if self.console.is_terminal:
            with _bars(self.console) as bars:
                task = bars.add_task(f"{name:<{_NAME_WIDTH}}", total=None, count="")
                yield lambda done, total: bars.update(task, completed=done, total=total, count=f"{done}/{total}")
                bars.update(task, completed=1, total=1)
        else:
            self.console.print(f"{name:<{_NAME_WIDTH}} started")
            yield lambda _done, _total: None
            self.console.print(f"{name:<{_NAME_WIDTH}} done in {time.monotonic() - started:.1f} s")

    def note(self, name: str, text: str) -> None:
        """One line under a stage."""
        self.console.print(f"{name:<{_NAME_WIDTH}} {text}", soft_wrap=True)


def _bars(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[count]}"))
    return Progress(*columns, console=console)
