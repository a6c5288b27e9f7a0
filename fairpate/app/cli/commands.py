"""What every command shares: its function returns an :class:`Output`, and `--json` makes a document of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any

import typer

from fairpate.app.terminal.output import Output, show, speaking

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Function = Callable[..., Output | None]


class Commands(typer.Typer):
    """Commands that all have `--json`. A function returns None where it has put out everything itself."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Function], Function]:  # type: ignore[override]
        """The parent's."""
        declare = super().command(name, **settings)

        def declared(function: Function) -> Function:
            declare(_with_json(function))
            return function

        return declared


def _with_json(function: Function) -> Callable[..., int]:
    """The same with one more option, and its exit code as result."""
    signature = inspect.signature(function, eval_str=True)
    option = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson)
    parameters = [*signature.parameters.values(), option]

    @wraps(function)
    def command(*, as_json: bool, **arguments: Any) -> int:
        with speaking(to_program=as_json):
            output = function(**arguments)
            return 0 if output is None else show(output)

    # What typer reads, in its earlier releases the one and in later the other.
    command.__signature__ = signature.replace(parameters=parameters, return_annotation=int)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def asks_for_json(words: Sequence[str]) -> bool:
    """Whether a command line does, also one that cannot be parsed."""
    return "--json" in _options(words)


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether a command line does."""
    return not {"-h", "--help"}.isdisjoint(_options(words))


def _options(words: Sequence[str]) -> Sequence[str]:
    return words[: words.index("--")] if "--" in words else words
