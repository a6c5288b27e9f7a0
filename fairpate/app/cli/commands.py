"""What every command shares: its function returns an :class:`Output`, and `--json` makes a document of it.

A command with several modes is made of one function for each (:func:`in_modes`). Its options are the parameters of
those functions, so that an option which the chosen mode does not read is refused and never dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any

import typer

from fairpate.app.terminal.output import Output, show, speaking
from fairpate.types import UsageError

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


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to run a command: ``function`` reads the options that are its parameters, and no others.

    ``option`` is the parameter whose value chooses the mode; None: the mode without any such option. ``flag`` declares
    the option where the function does not need its value. ``instead`` ends the message that refuses another option.
    """

    function: Function
    option: str | None = None
    flag: Any = None
    instead: str = ""

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The options and arguments that this mode reads, by name."""
        found = dict(inspect.signature(self.function, eval_str=True).parameters)
        if self.flag is not None:
            assert self.option is not None
            found[self.option] = inspect.Parameter(
                self.option, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, self.flag]
            )
        return {name: each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, each in found.items()}


def in_modes(name: str, words: str, *modes: Mode) -> Function:
    """Return the function of a command ``name`` with the options of all ``modes``; ``words`` are its help.

    The first mode whose option is given runs, or else the one without an option. UsageError for every other option that
    the user gave and that this mode does not read.
    """
    reads = {mode: mode.parameters for mode in modes}
    declared: dict[str, inspect.Parameter] = {}
    for own in reads.values():
        for parameter in own.values():
            assert declared.setdefault(parameter.name, parameter) == parameter, parameter
    (without_option,) = (mode for mode in modes if mode.option is None)

    def command(ctx: typer.Context, **values: Any) -> Output | None:
        given = [name for name in declared if _is_given(ctx, name)]
        chosen = next((mode for mode in modes if mode.option in given), without_option)
        written = {each.name: max(each.opts, key=len) for each in ctx.command.params if each.name}
        for option in given:
            if option not in reads[chosen]:
                readers = [written[mode.option] for mode in modes if mode.option and option in reads[mode]]
                raise UsageError(_not_read(option, chosen, readers, written))
        return chosen.function(**{each: values[each] for each in inspect.signature(chosen.function).parameters})

    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    command.__name__, command.__doc__ = name, words
    command.__signature__ = inspect.Signature([context, *declared.values()])  # type: ignore[attr-defined]
    command.modes = modes  # type: ignore[attr-defined]
    return command


def _is_given(ctx: typer.Context, option: str) -> bool:
    """Whether the user gave the option, on the command line or in the environment."""
    source = ctx.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def _not_read(name: str, chosen: Mode, readers: Sequence[str], written: Mapping[str, str]) -> str:
    """The message that refuses the option ``name``; ``readers`` are the options of the modes that would read it."""
    option = written[name]
    if chosen.option is None:
        return f"{option}: read only with {' or '.join(readers)}; give that too, or leave {option} out."
    rest = [written[name] for name in chosen.parameters if name != chosen.option and written[name].startswith("-")]
    reads = f"reads only {', '.join(rest)}" if rest else "reads no other option"
    return f"{option}: not read with {written[chosen.option]}, which {reads}; leave {option} out{chosen.instead}."


def asks_for_json(words: Sequence[str]) -> bool:
    """Whether a command line does, also one that cannot be parsed."""
    return "--json" in _options(words)


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether a command line does."""
    return not {"-h", "--help"}.isdisjoint(_options(words))


def _options(words: Sequence[str]) -> Sequence[str]:
    return words[: words.index("--")] if "--" in words else words
