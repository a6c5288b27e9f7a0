"""The parts that all commands of the command line share: `--json`, modes, checks of options, errors, exit codes and
common options.

Every command is a function that returns an :class:`Output`; the help of an option is in the docstring of its command. A
command with several modes consists of one function per mode (:func:`in_modes`), and an option that the chosen mode does
not read is refused.

A mistake that the user can fix ends in one message on standard error that names the field, the value and the remedy.
Exit codes: 2 for a request that cannot be carried out as written (an option, a name, a configuration, an output path),
1 for any other failure (a data file, a damaged run, a service, a cluster), 130 and 143 for an interrupt and SIGTERM.
Only a defect of this package shows a traceback.
"""

import errno
import inspect
import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from copy import copy
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.models import ParameterInfo

from fairpate import __version__, terminal
from fairpate.config import ConfigError, DataConfig, apply_override, expected, flattened, nearest, parse_config
from fairpate.types import UsageError, UserError

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_CONTEXT = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
_AS_JSON = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson)
Function = Callable[..., terminal.Output | None]


class Sets:
    """An annotation of a command's option: the configuration fields, by dotted names, that the option sets. A command
    is refused if `--set` sets a field that a given option sets already."""

    def __init__(self, *fields: str) -> None:
        self.fields = fields


class Commands(typer.Typer):
    """A typer application in which every command has the option `--json` in addition to its own, and the docstring of a
    command's function is its help. ``words`` are the help of the application, which it prints if no command is given.

    A command is a function that returns an :class:`Output`, or None if it has printed its output itself.
    """

    def __init__(self, words: str = "", **settings: Any) -> None:
        super().__init__(help=words, no_args_is_help=True, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Function], Function]:  # type: ignore[override]
        declare = super().command(name, **settings)

        def declared(function: Function) -> Function:
            signature = inspect.signature(function, eval_str=True)
            words, own = _documented(inspect.getdoc(function) or "", signature.parameters)
            parameters = [*own.values(), _AS_JSON, *([] if "ctx" in own else [_CONTEXT])]

            @wraps(function)
            def command(*, ctx: typer.Context, as_json: bool, **arguments: Any) -> int:
                with terminal.speaking(to_program=as_json):
                    if overrides := arguments.get("overrides"):
                        _refuse_fields_given_twice(ctx, own, overrides)
                    output = function(**arguments | ({"ctx": ctx} if "ctx" in own else {}))
                    return 0 if output is None else terminal.show(output)

            command.__doc__ = words
            command.__signature__ = signature.replace(parameters=parameters, return_annotation=int)  # type: ignore[attr-defined]
            declare(command)
            # The function itself and not the command: other code calls it with plain arguments.
            return function

        return declared


def _documented(text: str, parameters: Mapping[str, inspect.Parameter]) -> tuple[str, dict[str, inspect.Parameter]]:
    """Split ``text``, the docstring of a command's function: return the help of the command, and ``parameters`` with
    the help texts from the docstring's section ``Args:`` added."""
    words, _, section = text.partition("\nArgs:\n")
    # Typer keeps line breaks, which are wrong at any other width; those before an indented line are meant.
    words = re.sub(r"(?<=\S)\n(?=[^\s-])", " ", words)
    found = dict(parameters)
    for name, described in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE):
        annotation = found[name].annotation
        plain, *marks = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
        # A copy, because commands may share the declaration of an option.
        declared = next((mark for mark in marks if isinstance(mark, ParameterInfo)), None)
        # A flag has no opposite, such as --no-dry-run.
        own = copy(declared) or typer.Option(*[f"--{name.replace('_', '-')}"] * (plain is bool))
        own.help = " ".join(described.split())
        others = [mark for mark in marks if not isinstance(mark, ParameterInfo)]
        found[name] = found[name].replace(annotation=Annotated[(plain, own, *others)])
    return words.strip(), found


def _refuse_fields_given_twice(
    ctx: typer.Context, parameters: Mapping[str, inspect.Parameter], overrides: Sequence[str]
) -> None:
    """Raise UsageError if an option sets a configuration field that `--set` (``overrides``) sets too."""
    for override in overrides:
        # With a dot at both ends: `target.epsilon` and `target` overlap, `noise` and `noise_stddev` do not.
        said = [f"{field}." for field in flattened(apply_override({}, override))]
        for name, parameter in parameters.items():
            marks = [mark for mark in getattr(parameter.annotation, "__metadata__", ()) if isinstance(mark, Sets)]
            fields = [f"{field}." for mark in marks for field in mark.fields]
            is_set_twice = any(a.startswith(b) or b.startswith(a) for a in fields for b in said)
            if is_set_twice and (option := _written(ctx, only_given=True).get(name)):
                raise UsageError(f"{option}: --set {override} sets the same field; leave one of the two out.")


def _written(ctx: typer.Context, *, only_given: bool = False) -> dict[str, str]:
    """Return a mapping from the Python name of each parameter of the running command to how it is written on the
    command line, such as ``--data-dir``.

    ``only_given``: only parameters that the user gave, on the command line or in the environment.
    """
    found = {}
    for each in ctx.command.params:
        source = ctx.get_parameter_source(each.name or "")
        if each.name and not (only_given and (source is None or source.name == "DEFAULT")):
            # The long form where there is a short one too.
            found[each.name] = max(each.opts, key=len)
    return found


def parameters_of(function: Function, option: str | None = None) -> dict[str, inspect.Parameter]:
    """Return the options and arguments that a mode of a command reads, by name: the parameters of ``function``, which
    runs this mode, and ``option``, by which the user selects it (None: it runs if no other mode is selected)."""
    # Evaluated, because annotations are text under `from __future__ import annotations`.
    found = dict(inspect.signature(function, eval_str=True).parameters)
    if option is not None and option not in found:
        kind, flag = inspect.Parameter.KEYWORD_ONLY, Annotated[bool, typer.Option(f"--{option}")]
        found[option] = inspect.Parameter(option, kind, default=False, annotation=flag)
    return {name: each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, each in found.items()}


def in_modes(**others: Function) -> Callable[[Function], Function]:
    """Return a decorator for the function of a command that runs in one of several modes. ``others`` are the functions
    of its other modes, by the name of the option that selects each: a parameter of that function, or else a flag.

    The command has the name and the help of the decorated function, and the options of all modes. The first of
    ``others`` whose option the user gives is chosen, else the decorated function. UsageError if the user gives an
    option that the chosen mode does not read.
    """

    def declared_in_modes(function: Function) -> Function:
        modes: dict[str | None, Function] = {None: function}
        modes.update(others.items())
        reads = {option: parameters_of(each, option) for option, each in modes.items()}
        declared: dict[str, inspect.Parameter] = {}
        for own in reads.values():
            for parameter in own.values():
                # Modes that share an option have to declare it alike: it is one option of the command.
                assert declared.setdefault(parameter.name, parameter) == parameter, parameter

        def command(ctx: typer.Context, **values: Any) -> terminal.Output | None:
            given = [name for name in _written(ctx, only_given=True) if name in declared]
            # Of several modes whose options were given, the first: options of the others are refused below.
            chosen = next((option for option in others if option in given), None)
            written = _written(ctx)
            for name in (name for name in given if name not in reads[chosen]):
                option = written[name]
                if chosen is None:
                    selecting = " or ".join(written[other] for other in others if name in reads[other])
                    raise UsageError(
                        f"{option}: read only together with {selecting}; add that option, or leave {option} out."
                    )
                rest = [written[each] for each in reads[chosen] if each != chosen and written[each][0] == "-"]
                reads_only = f"only {', '.join(rest)}" if rest else "no other option"
                raise UsageError(
                    f"{option}: not read with {written[chosen]}, which reads {reads_only}; leave {option} out."
                )
            run = modes[chosen]
            return run(**{each: values[each] for each in inspect.signature(run).parameters})

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature([_CONTEXT, *declared.values()])  # type: ignore[attr-defined]
        command.modes = modes  # type: ignore[attr-defined]
        return command

    return declared_in_modes


def options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Read the options that stand in front of a command's name, such as `fairpate --version`."""
    if version:
        typer.echo(f"fairpate {__version__}")
        raise typer.Exit


_INTERRUPTED, _BROKEN_PIPE = 130, 141  # 128 + SIGINT and SIGPIPE, as shells report them
_RESUMES = "Interrupted; finished stages are kept, and the same command resumes from them."
_REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
    errno.EFBIG: "raise the size limit of a file (`ulimit -f`), or write to another disk",
}


def exit_with_code(app: typer.Typer) -> None:
    """Run the command that the command line names, and exit this process with the command's exit code unless that is 0.

    For a user's mistake one message is printed, and the exit code is 1 or 2. After a signal it is 128 + the signal's
    number.
    """
    code, words, received = 0, sys.argv[1:], list[int]()
    if words[:1] == ["help"]:  # as people type it: `fairpate help run` is `fairpate run --help`
        words = [*words[1:], "--help"]
        sys.argv[1:] = words
    # Of a line that cannot be parsed too; behind `--` no word is an option.
    asked = {*words[: words.index("--")]} if "--" in words else {*words}
    # Click prints its help itself: for a program it is caught and becomes a fact.
    is_help = "--json" in asked and not asked.isdisjoint(("-h", "--help"))

    def end(number: int, _: object) -> None:
        # Code that is interrupted may turn the SystemExit into another error, so the signal is kept here too.
        received.append(number)
        raise SystemExit(128 + number)

    # Their default ends a process without `finally`, and would leave actors and temporary files. `nohup` ignores SIGHUP
    # for what it starts, and that stays so.
    ending = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) == signal.SIG_DFL]
    for each in ending:
        signal.signal(each, end)
    # Also around the parser, whose errors are for the program too.
    with terminal.speaking(to_program="--json" in asked):
        try:
            with redirect_stdout(io.StringIO()) if is_help else nullcontext() as text:
                code = app(prog_name="fairpate", standalone_mode=False) or 0
            if code == _INTERRUPTED:  # Click's own answer to an interrupt, without a word
                code = terminal.fail(_RESUMES, code=code)
            if text is not None:
                terminal.show(terminal.Output(facts={"help": text.getvalue()}))
        except BaseException as error:  # noqa: BLE001 - reported there, or raised again
            # After a signal any error is a consequence of it.
            if not received:
                code = _reported(error)
        finally:
            for each in ending:
                signal.signal(each, signal.SIG_DFL)
        if received:
            code = terminal.fail(_RESUMES, code=128 + received[-1])
    if code:
        sys.exit(code)


def _reported(error: BaseException) -> int:
    """Print the message of the error that ended a command, and return the exit code; raise the error again if it is a
    defect of this package."""
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        # Click reports every EOFError, such as that of a damaged .pyc file, as Abort.
        if isinstance(error.__cause__, EOFError):
            terminal.tell_program({}, error=f"EOFError: {error.__cause__}")
            raise error.__cause__ from None
        return terminal.fail(_RESUMES, code=_INTERRUPTED)
    if isinstance(error, BrokenPipeError):  # `| head` has read enough
        # Python flushes standard output at exit, and would print an error and exit with 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    if type(error).__name__ == "NoArgsIsHelpError":  # the help was the message
        return 2
    # By the name of the module: some releases of typer bring a Click of their own.
    is_bad_usage = isinstance(error, UsageError) or type(error).__module__.startswith(("click", "typer"))
    if not is_bad_usage and not isinstance(error, (UserError, ValueError, OSError)):
        if isinstance(error, Exception):
            terminal.tell_program({}, error=f"{type(error).__name__}: {error}")
        raise error
    return terminal.fail(_message(error), code=2 if is_bad_usage else 1)


def _message(error: Any) -> str:
    """Return the message of an error that the user can fix. If a message of the library Click about an unknown command
    names no similar one, the names of all commands are added."""
    if isinstance(error, OSError) and not isinstance(error, UserError) and error.filename is not None:
        remedy = f"; {_REMEDIES[error.errno]}, and run the same command again" if error.errno in _REMEDIES else ""
        return f"{error.filename}: {error.strerror}{remedy}."
    kind = type(error).__name__
    if kind == "BadParameter" and type(error.__cause__).__name__ == "ValidationError":
        # What typer's check of an option found, in the words that errors of a configuration have.
        name, fault = error.param.get_error_hint().replace("'", ""), error.__cause__.errors()[0]
        got = "" if fault["type"] == "value_error" else f", got {fault['input']!r}"  # a choice names it already
        return f"{name}: {expected(fault)}{got}."
    format_message = getattr(error, "format_message", None)
    message = str(format_message() if callable(format_message) else error) or kind
    if kind == "NoSuchOption" and error.option_name == "--json" and hasattr(error.ctx.command, "list_commands"):
        return f"--json: goes after a command; known: {', '.join(error.ctx.command.list_commands(error.ctx))}."
    if message.startswith("Got unexpected extra argument"):
        return f"{message}; is an option missing in front of it? `{error.ctx.command_path} --help` lists them."
    if message.startswith("No such command") and message.endswith("."):  # no similar name was found
        return f"{message[:-1]}; known: {', '.join(error.ctx.command.list_commands(error.ctx))}."
    return message


@contextmanager
def checked_arguments() -> Iterator[None]:
    """Context manager: convert a ValueError in the ``with`` block to ConfigError, so that the running command ends with
    exit code 2."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise ConfigError(str(error)) from error


Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Set a field, as in section.field=value; `fairpate methods NAME` lists the fields."),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Run directory. A run of the same configuration that is already there is resumed."),
    Sets("out"),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder with the publisher's files; default: FAIRPATE_DATA."),
    Sets("data.data_dir", "settings.data.data_dir"),
]
Epsilon = Annotated[
    float | None,
    typer.Option(help="Privacy budget of the published result; the noise is calibrated to it."),
    Sets("target.epsilon"),
]
Delta = Annotated[float | None, typer.Option(help="Delta at which epsilon is stated."), Sets("target.delta")]
Yes = Annotated[
    bool,
    typer.Option(
        "--yes", help="Do not ask before spending, even if the sum of all releases or delta is above a limit."
    ),
]
FairAt = Annotated[
    str | None,
    typer.Option(
        "--fair-at",
        help="Your definition of fair: largest demographic-parity gap (default: 0.1), four-fifths, or NOTION=LIMIT.",
    ),
    Sets("evaluation.fair_at", "settings.evaluation.fair_at"),
]
OptionValues = Annotated[
    list[str] | None, typer.Option("--option", help="Option of the data set's loader, as in name=value.")
]
RunFolder = Annotated[Path, typer.Argument(help="A run directory.")]
RunOrLedger = Annotated[Path, typer.Argument(help="A run directory, or a ledger file.")]
Host = Annotated[
    str, typer.Option(help="Address to listen on. Beyond this machine, an aggregator needs tokens and TLS.")
]
Port = Annotated[int, typer.Option(min=1, max=2**16 - 1, help="Port to listen on.")]
TlsCert = Annotated[Path | None, typer.Option(help="Certificate chain (PEM); with --tls-key, serves HTTPS.")]
TlsKey = Annotated[Path | None, typer.Option(help="Private key of the certificate (PEM), without a password.")]
LogFile = Annotated[Path | None, typer.Option(help="Append the log, with each request, to this file as JSON lines.")]
DatasetName = Annotated[str, typer.Argument(help="A name from `fairpate data list`, or a declaration (.yaml).")]


EXAMPLES = Path(__file__).parents[1] / "examples"
# The files of each example; the first of them is the one to run.
EXAMPLE_FILES: Mapping[str, tuple[str, ...]] = {
    "demo": ("demo.yaml",),
    "quick": ("quick.yaml", "color_digits.yaml"),
    "own-method": ("own_method.py",),
    "own-mechanism": ("own_mechanism.py",),
    "compare-families": ("compare_families.py",),
    "ask-the-aggregator": ("ask_the_aggregator.py",),
    "three-hospitals": ("three_hospitals.py",),
    "letters": ("letters.py",),
}


def example_files(name: str) -> tuple[Path, ...]:
    """Return the paths of the files of the example ``name``. UsageError for an unknown example."""
    if name not in EXAMPLE_FILES:
        raise UsageError(f"--example: no example is named {name!r}{nearest(name, list(EXAMPLE_FILES))}.")
    return tuple(EXAMPLES / file for file in EXAMPLE_FILES[name])


_TABLES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".pq", ".feather", ".arrow")


def data_named(data: str | None) -> dict[str, Any]:
    """Return the configuration fields that select the data set ``data``, as a mapping from dotted names to values.

    ``data`` is the name of a known data set, or the path of a declaration, the YAML file that describes one. With
    ``data`` None the value of ``data.name`` is None.
    """
    if data is not None and data.endswith(_TABLES):
        raise ConfigError(
            f"--data: {data} is a table of records, not a declaration; draft a declaration with `fairpate data declare "
            f"{shlex.quote(data)} --public PUBLIC -o NAME.yaml` and give NAME.yaml."
        )
    if data is None or not data.endswith((".yaml", ".yml")):
        return {"data.name": data}
    from fairpate.data.declaration import read_declaration

    return {"data.name": read_declaration(Path(data)).name, "data.declaration": data}


def settings_of(options: list[str] | None, section: str) -> list[str]:
    """Return the values NAME=VALUE of `--option` as settings of a ``section``. UsageError for another form."""
    for each in options or []:
        name, is_given, _ = each.partition("=")
        if not (name.strip() and is_given):
            raise UsageError(f"--option: expected NAME=VALUE, got {each!r}; give one such as {name or 'seed'}=1.")
    return [f"{section}.{each}" for each in options or []]


def data_config(name: str, options: list[str] | None, data_dir: Path | None) -> DataConfig:
    """Return the section ``data`` of a configuration, from a data set's name and the values of `--option` and
    `--data-dir`."""
    values = {field.removeprefix("data."): value for field, value in data_named(name).items()} | {"data_dir": data_dir}
    return parse_config(apply_override(values, *settings_of(options, "options")), DataConfig)
