"""What a command prints on: lines that are never cut where nobody sees them, and signals that end a command cleanly."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table

_UNLIMITED = 100_000  # columns; a line is only as long as what stands on it
_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal obeys and does not show, but for ends of lines and tabs: controls, and turns of direction."""


class Ending:
    """Which signal asked this process to end, if one did."""

    number: int | None = None

    def begin(self, number: int, _: FrameType | None) -> None:
        """The handler. Work may turn what is raised here into other errors, so the signal is kept beside it."""
        self.number = number
        raise SystemExit(128 + number)


class _Console(Console):
    """Shows names and messages of others, and obeys nothing in them. BrokenPipeError where its reader left."""

    def on_broken_pipe(self) -> None:
        """The parent would exit with 1, as if the command had failed."""
        raise

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The parent's, with a mark in the place of whatever steers a terminal."""
        for segment in super().render(renderable, options):
            yield (
                segment
                if segment.control
                else Segment(_STEERS.sub("\N{REPLACEMENT CHARACTER}", segment.text), segment.style)
            )


def terminal(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console for text as it is: no markup, no emoji; into a pipe or a file, no line is wrapped or cut."""
    console = _Console(stderr=stderr, quiet=quiet, highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = _UNLIMITED
    return console


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and values, one pair a line; on a narrow terminal a long value goes on in the next line."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def listing(*headers: str | Column) -> Table:
    """A table whose first column is never broken; on a narrow terminal the others go on in the next line, uncut."""
    first, *others = (Column(header) if isinstance(header, str) else header for header in headers)
    folded = (replace(column, overflow="fold") for column in others)
    # Without edges, which are blank lines: `| head -1` shows the names.
    return Table(replace(first, no_wrap=True), *folded, box=SIMPLE_HEAD, show_edge=False)


@contextmanager
def ended_by_signals() -> Iterator[Ending]:
    """Inside, SIGTERM and SIGHUP raise SystemExit, unless the process was started to ignore them."""
    ending, before = Ending(), {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        # `nohup` ignores SIGHUP for what it starts, and that stays so.
        if signal.getsignal(number) == signal.SIG_DFL:
            before[number] = signal.signal(number, ending.begin)
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def discard_output() -> None:
    """After the reader of a pipe left: what is still to be flushed goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
