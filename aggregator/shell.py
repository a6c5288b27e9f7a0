"""The interactive shell on an aggregator: ask, estimate, look at budget and statement.

History is kept between sessions. The same commands work one at a time from the command line.
"""

from __future__ import annotations

import cmd
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.json import JSON
from rich.table import Table

from aggregator.client import AggregatorClient, Question
from aggregator.service.wire import Budget, Reply
from fairpate.meaning import delta_text
from fairpate.names import nearest
from fairpate.types import UsageError, UserError

_HISTORY_LENGTH, _LONGEST_RANGE, _MOST_QUESTIONS = 1000, 30, 1_000_000


class CommandError(UsageError, ValueError):
    """A command that was not understood; the message shows how it is written."""


class QueryShell(cmd.Cmd):
    """Reads commands from a person; each is one or two requests. ``hear`` takes facts in the place of printed words."""

    intro = "Type help for the commands, quit to leave."
    prompt = "fairpate> "

    def __init__(
        self,
        client: AggregatorClient,
        console: Console,
        *,
        history: Path | None = None,
        hear: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        super().__init__()
        self._hear = hear
        self._client = client
        self._console = console
        self._history = history

    def run(self, *, interactive: bool = True) -> None:
        """Read and run commands until `quit` or the end of input; Ctrl-C drops a line."""
        if not interactive:
            self.intro, self.prompt = "", ""
        _load_history(self._history)
        try:
            while not self._read_until_interrupted():
                self.intro = ""
        finally:
            _save_history(self._history)

    def onecmd(self, line: str) -> bool:
        """Run one command; what the user can fix is printed and the shell goes on."""
        try:
            return bool(super().onecmd(line))
        except UserError as error:
            self._console.print(str(error), style="red", markup=False)
            return False

    def run_once(self, line: str) -> None:
        """Run one command for a script: errors are raised."""
        super().onecmd(line)

    def default(self, line: str) -> None:
        """An unknown command."""
        word = line.split()[0]
        raise CommandError(f"{word}: unknown command{nearest(word, _commands(self))}.")

    def emptyline(self) -> bool:
        """An empty line does nothing."""
        return False

    def do_ask(self, line: str) -> None:
        """ask 17 | ask 0:20 | ask {"features": [...], "group": "red"}: ask pool records by number, or one of yours."""
        questions = parse_questions(line)
        names = self._client.statement().label_names
        table = Table("query", "reply", box=None)
        replies = [reply for batch in self._client.ask_many(questions) for reply in batch.replies]
        for question, reply in zip(questions, replies, strict=False):
            table.add_row(str(question) if isinstance(question, int) else reply.key[:12], describe(reply, names))
        self._tell({"replies": [reply_facts(reply, names) for reply in replies]}, table)

    def do_estimate(self, line: str) -> None:
        """estimate 17 | estimate 0:20 | estimate {json} | estimate 500 new: what asking would cost, at most."""
        words = line.split()
        count = int(words[0]) if len(words) == 2 and words[0].isdecimal() and words[1] == "new" else None
        found = self._client.estimate(parse_questions(line) if count is None else None, count=count)
        sentence = f"queries: {found.new_queries} new, {found.stored_replies} with a stored reply (free)"
        lines = (sentence, _budget_line("now", found.now), _budget_line("afterwards", found.afterwards))
        self._tell(found.model_dump(mode="json"), *lines)

    def do_budget(self, _: str) -> None:
        """budget: the limits, and what is spent."""
        budget = self._client.budget()
        self._tell(budget.model_dump(mode="json"), _budget_line("spent", budget))

    def do_statement(self, _: str) -> None:
        """statement: the privacy claim that may be published."""
        statement = self._client.statement()
        self._tell(statement.model_dump(mode="json"), JSON(statement.model_dump_json()))

    def do_reply(self, line: str) -> None:
        """reply KEY: the stored reply of a query, by its content hash."""
        reply = self._client.reply(line.strip())
        names = self._client.statement().label_names
        self._tell(reply_facts(reply, names), describe(reply, names))

    def do_quit(self, _: str) -> bool:
        """quit: leave."""
        return True

    def get_names(self) -> list[str]:
        """The parent's, without what a person does not type."""
        return [name for name in super().get_names() if name != "do_EOF"]

    def do_EOF(self, _: str) -> bool:
        """End of input: leave."""
        self._console.print()
        return True

    def _tell(self, facts: Mapping[str, Any], *words: RenderableType) -> None:
        if self._hear is not None:
            self._hear(facts)
            return
        for line in words:
            self._console.print(line)

    def _read_until_interrupted(self) -> bool:
        """Whether the user left."""
        try:
            self.cmdloop()
        except KeyboardInterrupt:
            self._console.print()
            return False
        return True


def parse_questions(text: str) -> list[Question]:
    """Questions from ``17``, ``0:20``, ``3 5 8`` or a JSON object (a list of them too). CommandError otherwise."""
    stripped = text.strip()
    if stripped.startswith(("{", "[")):
        return _parse_json(stripped)
    ranges = [parse_range(word) for word in stripped.split()]
    if (total := sum(map(len, ranges))) > _MOST_QUESTIONS:
        raise CommandError(f"{stripped}: expected at most {_MOST_QUESTIONS} records at once, got {total}.")
    questions: list[Question] = [number for numbers in ranges for number in numbers]
    if not questions:
        raise CommandError('Expected a number, a range such as 0:20, or {"features": [...], "group": "..."}.')
    return questions


def parse_range(word: str) -> Sequence[int]:
    """``17`` or ``0:500`` (the end is left out) as numbers. CommandError otherwise."""
    start, colon, stop = word.partition(":")
    if not start.isdecimal() or (colon and not stop.isdecimal()) or len(word) > _LONGEST_RANGE:
        raise CommandError(f"{word}: expected a record's number, from 0 on, or a range such as 0:500.")
    if colon and not int(start) < int(stop):
        raise CommandError(f"{word}: an empty range; expected its first number below its end, such as 0:500.")
    return range(int(start), int(stop)) if colon else [int(start)]


def describe(reply: Reply, label_names: Sequence[str]) -> str:
    """A reply in words."""
    if reply.label is not None:
        return label_names[reply.label]
    return "no room in the budget" if reply.status == "over_budget" else "refused"


def reply_facts(reply: Reply, label_names: Sequence[str]) -> dict[str, Any]:
    """A reply as it is on the wire, its label as a number and by its name."""
    name = None if reply.label is None else label_names[reply.label]
    return {"key": reply.key, "status": reply.status, "label": reply.label, "label_name": name}


def _parse_json(text: str) -> list[Question]:
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise CommandError(f"Expected JSON ({error}).") from error
    return value if isinstance(value, list) else [value]


def _budget_line(name: str, budget: Budget) -> str:
    spent = "unbounded" if budget.epsilon_submitted is None else f"{budget.epsilon_submitted:.3f}"
    limit = "no limit" if budget.epsilon_limit is None else f"limit {budget.epsilon_limit:g}"
    queries = "" if budget.max_queries is None else f" of {budget.max_queries}"
    closed = "; closed" if budget.closed else ""
    return (
        f"{name:<10} epsilon {spent} ({limit}, delta {delta_text(budget.delta)}, {budget.kind.replace('_', '-')}), "
        f"queries {budget.queries_submitted}{queries}{closed}"
    )


def _commands(shell: QueryShell) -> list[str]:
    return sorted(name[3:] for name in shell.get_names() if name.startswith("do_"))


def _load_history(path: Path | None) -> None:
    """Best effort, as is saving: a home that cannot be read or written is no reason to refuse a question."""
    readline = _readline()
    if readline is not None and path is not None:
        with suppress(OSError):
            readline.read_history_file(path)


def _save_history(path: Path | None) -> None:
    readline = _readline()
    if readline is None or path is None:
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Rights before content: a question that was typed in full is a record.
        path.touch(mode=0o600)
        readline.set_history_length(_HISTORY_LENGTH)
        readline.write_history_file(path)


def _readline() -> Any:
    """The line editor, or None on a system without it: then there is no history."""
    try:
        import readline
    except ImportError:
        return None
    return readline
