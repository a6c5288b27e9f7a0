"""Command lines of documents and launcher files, held against the real commands of Ray and of this project.

A line is parsed as the command would parse it, with every option and its value, and then nothing is run.
"""

import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import typer
from typer.exceptions import TyperException

OURS = re.compile(r"([A-Z_]+=\S+ )*(ray|fairpate) ")
ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")
CONTROL = {"&&", "||", ";", "|", "&"}
# Programs of others, which a reader has or installs.
FOREIGN = {
    "apt-get",
    "aws",
    "cd",
    "chmod",
    "cp",
    "docker",
    "echo",
    "git",
    "grep",
    "kubectl",
    "openssl",
    "pip",
    "python3",
}
FOREIGN |= {"cat", "curl", "helm", "jq", "promtool", "source", "sqlite3", "systemctl", "ulimit", "umask"}
FOREIGN |= {"scancel", "squeue"}


AT_ONCE = {"--install-completion", "--show-completion"}  # options that act where they are parsed
PLACEHOLDER = re.compile(r"(?<=[ =])[A-Z](?= |$)")
INLINE = re.compile(r"`((?:fairpate|ray)\s[^`]+)`")


class CommandError(AssertionError):
    """A command line that would not run."""


def text_of(path: Path) -> str:
    """A Markdown file, or a notebook as one: what its code cells give to a shell is a block of commands."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    shell = ["\n".join(line[1:] for line in source.splitlines() if line.startswith("!")) for _, source in cells]
    said = [source for kind, source in cells if kind == "markdown"]
    return "\n\n".join([*said, *(f"```\n{lines}\n```" for lines in shell if lines)])


def commands_in_sentences(text: str) -> Iterator[str]:
    """Commands of ours and of Ray's between backticks; a capital letter in the place of a value becomes 1."""
    for found in INLINE.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        yield PLACEHOLDER.sub("1", " ".join(found.split()))


def is_name(line: str) -> bool:
    """Whether a line is the name of a command, or that with the names of options, as a sentence has it."""
    program, *words = line.split()
    command = _tree()[program]
    names = [word for word in words if not word.startswith("--")]
    for name in names:
        command = getattr(command, "commands", {}).get(name)
    return command is not None and {*words} - {*names} <= _options(command)


def _options(command: Any) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts}


def commands_in(text: str) -> Iterator[str]:
    """The lines of those fenced and indented blocks of a Markdown text that have a command of ours or of Ray's."""
    for block in _blocks(text):
        lines = [line.strip() for line in block.replace("\\\n", " ").splitlines() if line.strip()]
        if any(OURS.match(line) for line in lines):
            yield from lines


def _blocks(text: str) -> Iterator[str]:
    """Fenced blocks without a language or of a shell, and indented ones."""
    fence, block = None, ""
    for line in [*text.splitlines(keepends=True), ""]:
        is_fence = line.startswith("```")
        inside = not is_fence and (fence is not None or line.startswith("    "))
        if inside:
            block += line
            continue
        if block and fence in (None, "```", "```sh", "```bash"):
            yield block
        block = ""
        if is_fence:
            fence = None if fence is not None else line.strip()


def check(line: str) -> list[str]:
    """The commands of ours and of Ray's in a shell line, nested ones too. CommandError for one that cannot run."""
    found = []
    for words in _simple_commands(line):
        program, *arguments = words
        name = Path(program).name
        if name in ("ray", "fairpate"):
            path, values = _parse(_tree()[name], name, arguments)
            found.append(path)
            found += [nested for inner in _nested(path, values) for nested in check(inner)]
        elif name == "sbatch":  # whose script is given the words of a command of ours
            script = next(place for place, word in enumerate(arguments) if word.endswith("fairpate.sbatch"))
            found += check(shlex.join(["fairpate", *arguments[script + 1 :]]))
        elif name not in FOREIGN:
            raise CommandError(f"{line}: nothing is known of {program}.")
    return found


def _simple_commands(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in CONTROL:
            words.append(word)
            continue
        while words and (ASSIGNMENT.match(words[0]) or words[0] in ("sudo", "export")):
            words = words[1:]
        if words:
            yield _without_redirections(words)
        words = []


def _without_redirections(words: list[str]) -> list[str]:
    first = next((i for i, word in enumerate(words) if word.startswith((">", "<", "2>"))), len(words))
    return words[:first]


def _nested(path: str, values: dict[str, Any]) -> list[str]:
    """Command lines that a command passes on: what a job runs, what is run on the head."""
    if path == "ray job submit":
        return [shlex.join(values["entrypoint"])]
    if path == "fairpate cluster submit":
        return [shlex.join(["fairpate", values["command"], *values["words"]])]
    return [values["cmd"]] if path == "ray exec" else []


@cache
def _tree() -> dict[str, Any]:
    from ray.scripts.scripts import cli

    from fairpate.cli import app

    return {"ray": cli, "fairpate": typer.main.get_command(app)}


def _parse(command: Any, path: str, arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The full name of the command that ``arguments`` lead to, and its parameters. Typer has a click of its own."""
    if AT_ONCE.intersection(arguments) and _options(command) >= AT_ONCE:
        return path, {}
    try:
        context = command.make_context(path, list(arguments))
        if not hasattr(command, "resolve_command"):
            return path, context.params
        name, subcommand, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    except (click.ClickException, click.exceptions.Exit, TyperException, typer.Exit) as error:
        raise CommandError(f"{path} {shlex.join(arguments)}: {error}") from error
    return _parse(subcommand, f"{path} {name}", rest)
