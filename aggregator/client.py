"""The client of a service, and the interactive shell over it.

A typed client of the aggregator's HTTP service.

A query is identified by its content, so asking again after a lost connection is safe: the service returns the stored
reply and charges nothing. The client therefore rides out a restart by asking again.

The interactive shell on an aggregator: ask, estimate, look at budget and statement.

History is kept between sessions. The same commands work one at a time from the command line.
"""

from __future__ import annotations

import cmd
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError
from rich.console import Console, RenderableType
from rich.json import JSON
from rich.table import Table

from aggregator.service.wire import (
    MAX_QUERIES_PER_REQUEST,
    Budget,
    Estimate,
    LedgerPage,
    Replies,
    Reply,
    Statement,
)
from fairpate.config import nearest
from fairpate.types import UsageError, UserError
from fairpate.words import delta_text

DEFAULT_URL = "http://127.0.0.1:8517"
BodyT = TypeVar("BodyT", bound=BaseModel)
Question: TypeAlias = int | Mapping[str, Any]
"""A record's number in the public pool, or ``{"features": nested lists, "group": name}``."""
# Not 429: a quota may take hours to refill.
_RETRIED_STATUSES = (502, 503, 504)


class QueryError(UserError):
    """The service refused a request, or is not there. ``status`` is None where no response came."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class RetryRule:
    """How often a request is sent at most, and the pause before each next time, which doubles."""

    attempts: int = 5
    first_pause_s: float = 0.25


class AggregatorClient:
    """Asks one service; use as a context manager. ``token`` is sent as a bearer token."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        timeout_s: float = 60.0,
        retry: RetryRule | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url = url
        self._retry = retry or RetryRule()
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)
        except (httpx.InvalidURL, ValueError) as error:
            raise QueryError(f"{url}: not a URL of a service ({error}).") from error

    def __enter__(self) -> AggregatorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def ask(self, questions: Sequence[Question]) -> Replies:
        """Ask in one request, at most 1024; one reply per question, in order."""
        return self._request("POST", "/v1/queries", Replies, {"queries": _queries(questions)})

    def ask_many(self, questions: Sequence[Question], *, batch_size: int = 256) -> Iterator[Replies]:
        """Ask any number, ``batch_size`` in a request; ends after the batch that crosses the budget.

        ValueError unless 1 <= batch_size <= 1024.
        """
        if not 1 <= batch_size <= MAX_QUERIES_PER_REQUEST:
            raise ValueError(f"Expected 1 <= batch_size <= {MAX_QUERIES_PER_REQUEST}, got {batch_size}.")
        for start in range(0, len(questions), batch_size):
            answer = self.ask(questions[start : start + batch_size])
            yield answer
            if answer.budget_crossed_at is not None:
                return

    def reply(self, key: str) -> Reply:
        """The stored reply of a query. QueryError with status 404 if there is none."""
        return self._request("GET", f"/v1/queries/{quote(key, safe='')}", Reply)

    def estimate(self, questions: Sequence[Question] | None = None, *, count: int | None = None) -> Estimate:
        """What these questions, or ``count`` new ones, would cost; nothing is asked."""
        if (questions is None) == (count is None):
            raise ValueError("Expected either questions or a count.")
        body = {"count": count} if questions is None else {"queries": _queries(questions)}
        return self._request("POST", "/v1/estimate", Estimate, body)

    def budget(self) -> Budget:
        """Limits and what is spent."""
        return self._request("GET", "/v1/budget", Budget)

    def statement(self) -> Statement:
        """The privacy claim and the service's public facts."""
        return self._request("GET", "/v1/statement", Statement)

    def ledger(self, *, start: int = 0, limit: int = 100) -> LedgerPage:
        """Charges and the data-dependent price; needs the operator's token."""
        return self._request("GET", f"/v1/operator/ledger?start={start}&limit={limit}", LedgerPage)

    def _request(self, method: str, path: str, kind: type[BodyT], body: object = None) -> BodyT:
        response = self._send(method, path, body)
        if response.status_code != httpx.codes.OK:
            raise QueryError(_describe(response), status=response.status_code)
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            raise QueryError(f"{self.url}: does not answer as an aggregator of this version does.") from error

    def _send(self, method: str, path: str, body: object) -> httpx.Response:
        attempts = self._retry.attempts
        for attempt in range(attempts):
            is_last = attempt == attempts - 1
            try:
                response = self._http.request(method, path, json=body)
            except httpx.RequestError as error:  # also a body that is not encoded as it says
                if is_last or isinstance(error, httpx.UnsupportedProtocol):
                    raise QueryError(f"{self.url}: no service answers ({error}); is it running?") from error
            else:
                if is_last or response.status_code not in _RETRIED_STATUSES:
                    return response
            time.sleep(self._retry.first_pause_s * 2**attempt)
        raise ValueError(f"Expected at least one attempt, got {attempts}.")


def _queries(questions: Sequence[Question]) -> list[Mapping[str, Any]]:
    return [{"id": question} if isinstance(question, int) else question for question in questions]


def _describe(response: httpx.Response) -> str:
    try:
        faults = response.json()["errors"]
        # What concerns no value, such as a full disk, has an empty one.
        got = [f"got {fault['value']}. " * bool(fault["value"]) for fault in faults]
        return "\n".join(f"{fault['field']}: {of}{fault['remedy']}" for fault, of in zip(faults, got, strict=True))
    except (ValueError, KeyError, TypeError):
        return f"{response.url}: status {response.status_code} and no explanation; is this an aggregator?"


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
        raise CommandError(f"{word}: expected the number of a record (from 0), or a range such as 0:500.")
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
