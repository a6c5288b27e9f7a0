"""What the shell offers for the word that is being typed: methods, data sets, run folders, fields of a configuration.

Nothing here runs code that a file names, reads a record or loads a library that takes seconds, but for the fields of a
method: those are kept beside other caches until the sources change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from pathlib import Path

import typer

from fairpate.app.kept import kept
from fairpate.config_reader import read_yaml
from fairpate.types import UserError

_PACKAGE = Path(__file__).parents[2]
_OPTION = re.compile(r"--[\w-]+")
_PLAIN = re.compile(r"[\w./:@%+,=-]*")


def join_words(environment: MutableMapping[str, str]) -> None:
    """Put together what bash takes apart at every `=` before it asks: `--method`, `=`, `pate` is one word."""
    words, current = environment.get("COMP_WORDS", "").split("\n"), environment.get("COMP_CWORD", "")
    if "=" not in words or not current.isdecimal():
        return
    joined: list[str] = []
    for number, word in enumerate(words[: int(current) + 1]):
        if joined and "=" in (word, words[number - 1]):
            joined[-1] += word
        else:
            joined.append(word)
    option, equals, value = joined[-1].rpartition("=")
    if equals and not _OPTION.fullmatch(option):  # inside a value, of which bash would replace the last part alone
        joined[-1:] = [option + equals, value]
    environment.update(COMP_WORDS="\n".join(joined), COMP_CWORD=str(len(joined) - 1))


def methods(incomplete: str) -> list[str]:
    """Every registered name."""
    from fairpate.methods import method_names

    return _beginning(incomplete, method_names())


def data_sets(incomplete: str) -> list[str]:
    """Every known name, and declarations that lie where the word points to."""
    from fairpate.app.terminal.catalogue import data_set_names

    return _beginning(incomplete, [*data_set_names(), *map(str, _paths(incomplete, "*.yaml"))])


def run_folders(incomplete: str) -> list[str]:
    """Run directories where the word points to, and one folder below."""
    found = [path for path in _paths(incomplete, "*") if path.is_dir()]
    runs = [run for path in found for run in ([path] if _is_run(path) else filter(_is_run, sorted(path.glob("*"))))]
    return _beginning(incomplete, map(str, runs))


def fields(ctx: typer.Context, incomplete: str) -> list[str]:
    """Fields as `--set` takes them, with their defaults: of the method that is named so far, or of a sweep."""
    if ctx.info_name == "compare":
        from fairpate.compare_config import SweepConfig

        return _beginning(incomplete, (f"{name}=" for name in SweepConfig.model_fields))
    method = "own_votes" if ctx.info_name == "aggregate" else _method(ctx)
    return [] if ":" in method else _beginning(incomplete, kept(f"fields_{method}", lambda: _fields_of(method)))


def _method(ctx: typer.Context) -> str:
    from fairpate.methods import DEFAULT

    found = ctx.params.get("method")
    # While an option waits for its value, the file is not a parameter yet.
    for file in filter(None, (ctx.params.get("config"), *ctx.args)):
        with suppress(UserError):
            found = found or read_yaml(Path(file)).get("method")
    return str(found or DEFAULT)


def _fields_of(method: str) -> list[str]:
    from fairpate.app.terminal.catalogue import fields_of
    from fairpate.methods import find_method

    with suppress(UserError):
        return [
            each["set"] if _PLAIN.fullmatch(each["set"]) else f"{each['field']}="
            for each in fields_of(find_method(method)())
            if "set" in each
        ]
    return []


def _paths(incomplete: str, pattern: str) -> list[Path]:
    folder = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent)
    with suppress(OSError, ValueError):
        return [path for path in sorted(folder.glob(pattern)) if str(path).startswith(incomplete.removeprefix("./"))]
    return []


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and ((path / "public").is_dir() or (path / "private").is_dir())


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    """Those that begin so, written as bash reads them back; a name of several lines it could not.

    Other shells are offered plain words alone: zsh evaluates what it is given, so a folder's name might run.
    """
    start = incomplete.removeprefix("./")
    found = [word for word in words if word.startswith(start) and "\n" not in word]
    if "COMP_WORDS" not in os.environ:
        return [word for word in found if _PLAIN.fullmatch(word)]
    return [re.sub(r"([^\w./:@%+,=-])", r"\\\1", word) for word in found]
