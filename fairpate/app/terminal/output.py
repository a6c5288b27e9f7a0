"""What a command puts out: its facts in words, or for a program (`--json`) as one document of strict JSON.

The document is all that standard output then holds; remarks go to standard error, and progress nowhere. An error is a
document too, ``{"error": {"message": ..., "exit_code": ...}}``, unless the answer is out already.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import RenderableType
from rich.text import Text

from fairpate.app.terminal.console import facts as in_lines
from fairpate.app.terminal.console import terminal
from fairpate.strict_json import strict


@dataclass(frozen=True, kw_only=True)
class Output:
    """The same facts twice. ``words`` None: a line for each fact; an iterator: line by line, as they come.

    ``code`` is the exit code; ``failure`` says on standard error why it is not 0.
    """

    facts: Mapping[str, Any]
    words: RenderableType | Iterator[str] | None = None
    code: int = 0
    failure: str | None = None


@dataclass
class _Document:
    """Where the one document goes, and whether it is there."""

    stream: TextIO
    is_written: bool = False


_document: ContextVar[_Document | None] = ContextVar("document", default=None)


def is_for_program() -> bool:
    """Whether the command that runs was given `--json`."""
    return _document.get() is not None


@contextmanager
def speaking(*, to_program: bool) -> Iterator[None]:
    """Inside, :func:`show` prints words, or the document; whatever else is printed then goes to standard error."""
    document = (_document.get() or _Document(stream=sys.stdout)) if to_program else None
    token = _document.set(document)
    try:
        with redirect_stdout(sys.stderr) if to_program else nullcontext():
            yield
    finally:
        _document.reset(token)


def show(output: Output) -> int:
    """Print it; its exit code comes back. A second document is never written."""
    failed = {} if output.failure is None else _error(output.failure, output.code)
    if is_for_program():
        _write({**output.facts, **failed})
    else:
        _print(output)
    return fail(output.failure, code=output.code) if output.failure is not None else output.code


def fail(message: str, *, code: int = 1) -> int:
    """Say what went wrong, to a person and, where nothing is out yet, to a program; ``code`` comes back."""
    tell_program(message, code=code)
    terminal(stderr=True).print(Text.assemble(("error", "bold red"), " ", message), soft_wrap=True)
    return code


def tell_program(error: str, *, code: int = 1) -> None:
    """The error as the document, where a program asked and nothing is out yet."""
    if is_for_program():
        _write(_error(error, code))


def say(text: str) -> None:
    """A word to the user, beside the output."""
    terminal(stderr=True).print(text, soft_wrap=True)


def _write(values: Mapping[str, Any]) -> None:
    document = _document.get()
    # A second document would make neither of them readable.
    if document is None or document.is_written:
        return
    text = json.dumps(strict(values), indent=2, allow_nan=False, default=_plain)
    document.is_written = True
    document.stream.write(text + "\n")
    document.stream.flush()


def _error(message: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "exit_code": code}}


def _plain(value: Any) -> Any:
    """Numbers of arrays as numbers; all else by its name."""
    return value.item() if hasattr(value, "item") else str(value)


def _print(output: Output) -> None:
    console, words = terminal(), output.words
    if words is None:
        words = in_lines((name.replace("_", " "), str(value)) for name, value in output.facts.items())
    if isinstance(words, str):
        if words:
            console.print(words, soft_wrap=True)
    elif isinstance(words, Iterator):
        for line in words:
            console.print(line, soft_wrap=True)
    else:
        console.print(words, crop=False)  # commands to copy stay in one line
