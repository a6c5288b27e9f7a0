"""How a command ends: its exit code, and one message for what the user can fix.

What a user can fix ends in one message on standard error that names the field, the value and the remedy. Exit codes:
2 for a request that cannot be carried out as written (an option, a name, a configuration, a place to write to), 1 where
something else failed (a file of data, a damaged run, a service, a cluster), 130 and 143 for an interrupt and SIGTERM.
Only a defect of ours shows a traceback.
"""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

import typer

from fairpate.app.cli.commands import asks_for_help, asks_for_json
from fairpate.app.terminal.console import discard_output, ended_by_signals
from fairpate.app.terminal.output import Output, fail, is_for_program, show, speaking, tell_program
from fairpate.config import ConfigError
from fairpate.faults import expected
from fairpate.types import UsageError, UserError

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
