"""What all commands share: names, options that a mode does not read, errors and exit codes.

What every command shares: its function returns an :class:`Output`, and `--json` makes a document of it.

A command with several modes is made of one function for each (:func:`in_modes`). Its options are the parameters of
those functions, so that an option which the chosen mode does not read is refused and never dropped.

How a command ends: its exit code, and one message for what the user can fix.

What a user can fix ends in one message on standard error that names the field, the value and the remedy. Exit codes:
2 for a request that cannot be carried out as written (an option, a name, a configuration, a place to write to), 1 where
something else failed (a file of data, a damaged run, a service, a cluster), 130 and 143 for an interrupt and SIGTERM.
Only a defect of ours shows a traceback.

Arguments and options that several commands take, and the configuration that they mean.
"""

from __future__ import annotations

import errno
import inspect
import io
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from fairpate.config import ConfigError, DataConfig
from fairpate.config_reader import apply_override, expected, parse_config
from fairpate.terminal import (
    Output,
    discard_output,
    ended_by_signals,
    fail,
    is_for_program,
    show,
    speaking,
    tell_program,
)
from fairpate.types import UsageError, UserError

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
    the option where the function does not need its value.
    """

    function: Function
    option: str | None = None
    flag: Any = None

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
    return f"{option}: not read with {written[chosen.option]}, which {reads}; leave {option} out."


def asks_for_json(words: Sequence[str]) -> bool:
    """Whether a command line does, also one that cannot be parsed."""
    return "--json" in _options(words)


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether a command line does."""
    return not {"-h", "--help"}.isdisjoint(_options(words))


def _options(words: Sequence[str]) -> Sequence[str]:
    return words[: words.index("--")] if "--" in words else words


_INTERRUPTED, _BROKEN_PIPE = 130, 141
_REMEDIES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there",
    errno.EFBIG: "raise what one file may hold (`ulimit -f`), or write to another disk",
}


def exit_with_code(app: typer.Typer) -> None:
    """Run the command that was given; leave with its code, if it is not 0."""
    code = 0
    with speaking(to_program=asks_for_json(sys.argv[1:])):
        with ended_by_signals() as ending:
            try:
                code = _exit_code(app)
            except BaseException:
                if ending.number is None:
                    raise
        if ending.number is not None:
            code = _interrupted(128 + ending.number)
    if code:
        sys.exit(code)


def _exit_code(app: typer.Typer) -> int:
    is_help = is_for_program() and asks_for_help(sys.argv[1:])
    try:
        with redirect_stdout(io.StringIO()) if is_help else nullcontext() as text:
            code: int = app(prog_name="fairpate", standalone_mode=False) or 0
        if text is not None:
            show(Output(facts={"help": text.getvalue()}))
    except (KeyboardInterrupt, typer.Abort) as stop:
        # Click takes the end of any file, such as of damaged bytecode, for that of the keyboard's.
        if isinstance(stop.__cause__, EOFError):
            tell_program(f"EOFError: {stop.__cause__}")
            raise stop.__cause__ from None
        code = _INTERRUPTED
    except BrokenPipeError:  # `| head` has read enough
        discard_output()
        return _BROKEN_PIPE
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help was the message
            return 2
        if not _is_the_users(error):
            tell_program(f"{type(error).__name__}: {error}")
            raise
        return fail(_message(error), code=2 if _is_bad_usage(error) else 1)
    return _interrupted(code) if code == _INTERRUPTED else code


def _interrupted(code: int) -> int:
    return fail("Interrupted; what was finished is kept, and the same command goes on from there.", code=code)


def _is_the_users(error: Exception) -> bool:
    """Whether the error is something the user can fix: bad input, a missing file, a cluster that is not there."""
    return isinstance(error, (UserError, ValueError, OSError)) or _is_bad_usage(error)


def _is_bad_usage(error: Exception) -> bool:
    return isinstance(error, UsageError) or type(error).__module__.startswith(("click", "typer"))


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, UserError) and error.filename is not None:
        remedy = f"; {_REMEDIES[error.errno]}, and give the same command again" if error.errno in _REMEDIES else ""
        return f"{error.filename}: {error.strerror}{remedy}."
    if type(error).__name__ == "BadParameter" and type(error.__cause__).__name__ == "ValidationError":
        return _refused_value(error)
    format_message = getattr(error, "format_message", None)
    message = str(format_message() if callable(format_message) else error) or type(error).__name__
    if type(error).__name__ == "NoSuchOption" and message.endswith(" --json"):
        return f"--json: belongs behind a command; known: {', '.join(error.ctx.command.list_commands(error.ctx))}."  # type: ignore[attr-defined]
    if message.startswith("No such command") and message.endswith("."):  # and nothing near it was found
        return f"{message[:-1]}; known: {', '.join(error.ctx.command.list_commands(error.ctx))}."  # type: ignore[attr-defined]
    return message


def _refused_value(error: Any) -> str:
    """What typer's own check of an option found wrong with its value, in the words of a configuration's faults."""
    name, fault = error.param.get_error_hint().replace("'", ""), error.__cause__.errors()[0]
    got = "" if fault["type"] == "value_error" else f", got {fault['input']!r}"  # a choice's words say it
    return f"{name}: {expected(fault)}{got}."


@contextmanager
def checked_arguments() -> Iterator[None]:
    """What an argument's own check refuses is bad usage."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise ConfigError(str(error)) from error


ConfigFile = Annotated[Path | None, typer.Argument(help="YAML configuration; none runs the embedded colour digits.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="section.field=value, on top of the file.")]
Out = Annotated[Path | None, typer.Option(help="Run directory; an earlier run of the same configuration goes on.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder with the publisher's files, instead of FAIRPATE_DATA.")]
Weights = Annotated[
    str | None, typer.Option(help="File that every ResNet and DenseNet starts from, or `imagenet`: torchvision's own.")
]
OptionValues = Annotated[list[str] | None, typer.Option("--option", help="The loader's own option, name=value.")]
RunFolder = Annotated[Path, typer.Argument(help="A run directory.")]
Folder = Annotated[Path, typer.Argument(help="Folder to write.")]
MethodOption = Annotated[str | None, typer.Option(help="Its name.")]
RunOrLedger = Annotated[Path, typer.Argument(help="A run directory, or a ledger file.")]
Words = Annotated[list[str] | None, typer.Argument(help="[URL] and one command; none opens a shell.")]
Host = Annotated[str, typer.Option(help="Address to listen on; an aggregator's beyond loopback only with tokens.")]
Port = Annotated[int, typer.Option(help="Port to listen on.")]
AnalystToken = Annotated[Path | None, typer.Option(help="Analysts' token file, instead of FAIRPATE_ANALYST_TOKEN.")]
OperatorToken = Annotated[Path | None, typer.Option(help="Operator's token file, instead of FAIRPATE_OPERATOR_TOKEN.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with your token, instead of FAIRPATE_TOKEN.")]
TlsCert = Annotated[Path | None, typer.Option(help="Certificate with its chain, PEM; with --tls-key: serve HTTPS.")]
TlsKey = Annotated[Path | None, typer.Option(help="Its key, PEM, without a password.")]
Rate = Annotated[float, typer.Option(help="Requests per second of one token; twice as many at once.")]
LogFile = Annotated[Path | None, typer.Option(help="Append the log to it as JSON lines, one for each request too.")]
Traces = Annotated[bool, typer.Option("--traces", help="Send OpenTelemetry spans where OTEL_EXPORTER_OTLP_* say.")]
Quota = Annotated[float, typer.Option(help="New queries per analyst's token and day.")]
DatasetName = Annotated[str, typer.Argument(help="A name from `fairpate data list`, or a declaration.")]


_TABLES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".pq", ".feather", ".arrow")


def data_named(data: str | None) -> dict[str, Any]:
    """The fields that name a data set; a declaration of one's own is known by its ending."""
    if data is not None and data.endswith(_TABLES):
        raise ConfigError(
            f"{data}: records, and no declaration of them; draft one with `fairpate data declare "
            f"{shlex.quote(data)} --public PUBLIC -o NAME.yaml` and give that."
        )
    if data is None or not data.endswith((".yaml", ".yml")):
        return {"data.name": data}
    from fairpate.data.declaration import read_declaration

    return {"data.name": read_declaration(Path(data)).name, "data.declaration": data}


def data_config(name: str, options: list[str] | None, data_dir: Path | None) -> DataConfig:
    """The section ``data`` that the arguments of a command mean."""
    values = {field.removeprefix("data."): value for field, value in data_named(name).items()}
    for option in options or []:
        apply_override(values, f"options.{option}")
    return with_data_dir(parse_config(values, DataConfig), data_dir)


def with_data_dir(config: DataConfig, data_dir: Path | None) -> DataConfig:
    """The same section, read from ``data_dir`` if one was given."""
    return config if data_dir is None else config.model_copy(update={"data_dir": data_dir})
