"""A typed client of the aggregator's HTTP service, an interactive shell that uses it, and the command `fairpate query`.

A query is identified by its content, so repeating a request after a lost connection is safe: the service returns the
stored reply and charges nothing. So the client survives a restart of the service by sending its request again.

:class:`QueryShell` reads commands (ask, estimate, budget, statement, reply) and keeps a history between sessions. The
same commands work one at a time from the command line; there ``--ids`` submits a range of public records.
"""

import cmd
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv
from pydantic import BaseModel, ValidationError
from rich.console import Console, RenderableType
from rich.json import JSON
from rich.table import Table

from aggregator.service.api import MAX_QUERIES_PER_REQUEST, Budget, Estimate, LedgerPage, Replies, Reply, Statement
from fairpate.config import nearest
from fairpate.files import check_output, write_atomically
from fairpate.pages import delta_text, epsilon_text
from fairpate.terminal import Output, Reporter, is_for_program, say, show, terminal
from fairpate.types import UsageError, UserError

DEFAULT_URL = "http://127.0.0.1:8517"
BodyT = TypeVar("BodyT", bound=BaseModel)
Question: TypeAlias = int | Mapping[str, Any]
"""A record's number in the public pool, or ``{"features": nested lists, "group": name}``."""
# Not 429: a quota may take hours to refill.
_RETRIED_STATUSES = (502, 503, 504)


class QueryError(UserError):
    """The service refused a request or does not answer. ``status`` is the HTTP status; None if there was no
    response."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class AggregatorClient(AbstractContextManager["AggregatorClient"]):
    """Sends requests to the service at one URL; use it as a context manager.

    ``token`` is sent as a bearer token. A request that gets no answer is sent up to ``attempts`` times;
    ``first_pause_s`` is the pause before the second attempt, and each further pause is twice as long. ``timeout_s``
    limits each attempt. QueryError for a malformed URL, and from every method if the service refuses the request or
    does not answer. ValueError unless attempts >= 1.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        timeout_s: float = 60,
        attempts: int = 5,
        first_pause_s: float = 0.25,
    ) -> None:
        if attempts < 1:
            raise ValueError(f"Expected attempts >= 1, got {attempts}.")
        # A header and not a part of the URL, which servers and proxies log.
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url = url
        self._attempts, self._first_pause_s = attempts, first_pause_s
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)
        except (httpx.InvalidURL, ValueError) as error:
            raise QueryError(f"{url}: not a URL of a service ({error}); give one such as http://HOST:PORT.") from error

    def close(self, *_: object) -> None:
        """Close the connections to the service."""
        self._http.close()

    __exit__ = close

    def ask(self, questions: Sequence[Question]) -> Replies:
        """Submit at most 1024 queries in one request; return one reply per query, in order."""
        return self._request("POST", "/v1/queries", Replies, {"queries": _queries(questions)})

    def ask_many(self, questions: Sequence[Question], *, batch_size: int = 256) -> Iterator[Replies]:
        """Submit any number of queries, ``batch_size`` in a request, and yield the replies to each request.

        The iteration ends early after a request that the privacy budget did not cover in full. ValueError unless 1 <=
        batch_size <= 1024.
        """
        if not 1 <= batch_size <= MAX_QUERIES_PER_REQUEST:
            raise ValueError(f"Expected 1 <= batch_size <= {MAX_QUERIES_PER_REQUEST}, got {batch_size}.")
        for start in range(0, len(questions), batch_size):
            answer = self.ask(questions[start : start + batch_size])
            yield answer
            if answer.budget_crossed_at is not None:
                return

    def reply(self, key: str) -> Reply:
        """Return the stored reply to the query with content hash ``key``. QueryError with status 404 if no reply is
        stored."""
        # Quoted in full: a slash in a mistyped key would lead to another route.
        return self._request("GET", f"/v1/queries/{quote(key, safe='')}", Reply)

    def estimate(self, questions: Sequence[Question] | None = None, *, count: int | None = None) -> Estimate:
        """Return what the given queries, or ``count`` new ones, would cost; nothing is submitted or charged."""
        if (questions is None) == (count is None):
            raise ValueError("Expected either questions or count, got both or none; give one of the two arguments.")
        body = {"count": count} if questions is None else {"queries": _queries(questions)}
        return self._request("POST", "/v1/estimate", Estimate, body)

    def budget(self) -> Budget:
        """Return the limits of the service's privacy budget, and how much of it is spent."""
        return self._request("GET", "/v1/budget", Budget)

    def statement(self) -> Statement:
        """Return the privacy guarantee that the service may publish, with public facts about the service."""
        return self._request("GET", "/v1/statement", Statement)

    def ledger(self, *, start: int = 0, limit: int = 100) -> LedgerPage:
        """Return ``limit`` charges of queries from number ``start`` on, and the data-dependent privacy cost of all
        charges. This needs the operator's token."""
        return self._request("GET", f"/v1/operator/ledger?start={start}&limit={limit}", LedgerPage)

    def _request(self, method: str, path: str, kind: type[BodyT], body: object = None) -> BodyT:
        headers = None if body is None else {"Content-Type": "application/json"}
        try:
            content = (
                None if body is None else json.dumps(body, default=_as_json, allow_nan=False, separators=(",", ":"))
            )
        except (TypeError, ValueError) as error:
            raise QueryError(
                f"queries: expected numbers, text and lists ({error}); send None for a missing value."
            ) from error
        for attempt in range(self._attempts):
            is_last = attempt == self._attempts - 1
            try:
                response = self._http.request(method, path, content=content, headers=headers)
            except httpx.RequestError as error:  # also a body that is not encoded as its header states
                # Another scheme than HTTP fails at every attempt.
                if is_last or isinstance(error, httpx.UnsupportedProtocol):
                    raise QueryError(
                        f"{self.url}: no service answers ({error}); start the service, or correct the URL."
                    ) from error
            else:
                if is_last or response.status_code not in _RETRIED_STATUSES:
                    break
            # Asking again is free: a query that was charged has a stored reply.
            time.sleep(self._first_pause_s * 2**attempt)
        if response.status_code != httpx.codes.OK:
            try:
                # One a line. A fault that concerns no value, such as a full disk, has an empty one.
                faults = response.json()["errors"]
                got = [f"got {each['value']}. " * bool(each["value"]) for each in faults]
                words = "\n".join(
                    f"{each['field']}: {of}{each['remedy']}" for each, of in zip(faults, got, strict=True)
                )
            except (ValueError, KeyError, TypeError):
                words = f"{response.url}: status {response.status_code} and no explanation; is this an aggregator?"
            raise QueryError(words, status=response.status_code)
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            raise QueryError(
                f"{self.url}: the reply cannot be read; use the same version of fairpate here as the service."
            ) from error


def _queries(questions: Sequence[Question]) -> list[Mapping[str, Any]]:
    return [question if isinstance(question, Mapping) else {"id": question} for question in questions]


def _as_json(value: Any) -> Any:
    """Return an array or a number of NumPy as Python's own; TypeError for anything else."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"got {type(value).__name__}")


# Lines kept in the history, characters of one range, and records that one command may submit.
_HISTORY_LENGTH, _LONGEST_RANGE, _MOST_QUESTIONS = 1000, 30, 1_000_000


class CommandError(UsageError, ValueError):
    """A command could not be parsed; the message shows the expected form."""


class QueryShell(cmd.Cmd):
    """An interactive shell for a service: reads commands that a person types, each of which sends one or two requests.

    ``history`` is the file in which typed lines are stored for the next session. ``facts`` are the values of the last
    answer; ``fairpate query --json`` prints them instead of words.
    """

    intro = "Type help for the commands, quit to leave."
    prompt = "fairpate> "

    def __init__(self, client: AggregatorClient, console: Console, *, history: Path | None = None) -> None:
        super().__init__()
        self.facts: Mapping[str, Any] = {}
        self._client = client
        self._console = console
        self._history = history

    def run(self, *, interactive: bool = True) -> None:
        """Read and run commands until `quit` or the end of input; Ctrl-C discards the line that is being typed."""
        if not interactive:
            self.intro, self.prompt = "", ""
        path = self._history
        try:
            import readline
        except ImportError:  # a system without the line editor: there is no history
            path = None
        # A home folder that cannot be read or written must not prevent queries.
        if path is not None:
            with suppress(OSError):
                readline.read_history_file(path)
        try:
            while True:
                try:
                    self.cmdloop()
                    break
                except KeyboardInterrupt:
                    self._console.print()
                    # `cmdloop` prints the intro each time it is entered.
                    self.intro = ""
        finally:
            if path is not None:
                with suppress(OSError):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    # Rights before content: a question that was typed in full is a record.
                    path.touch(mode=0o600)
                    readline.set_history_length(_HISTORY_LENGTH)
                    readline.write_history_file(path)

    def onecmd(self, line: str) -> bool:
        """Run one command; an error that the user can fix is printed, and the shell continues."""
        try:
            return bool(super().onecmd(line))
        except UserError as error:
            # Without markup: the message may quote brackets that the user typed.
            self._console.print(str(error), style="red", markup=False)
            return False

    def default(self, line: str) -> bool:  # type: ignore[override]  # the base class knows no end of input
        """Handle an unknown command: at the end of input return True, which ends the shell; otherwise raise
        CommandError, which names the most similar command."""
        word = line.split()[0]
        if word == "EOF":
            self._console.print()
            return True
        commands = sorted(name[3:] for name in self.get_names() if name.startswith("do_"))
        raise CommandError(f"{word}: unknown command{nearest(word, commands)}.")

    def emptyline(self) -> bool:
        """Do nothing; the base class would repeat the last command."""
        return False

    def do_ask(self, line: str) -> None:
        """ask 17 | ask 0:20 | ask {"features": [...], "group": "red"}: submit public records by number, or a record of
        yours."""
        questions = parse_questions(line)
        # Before the questions: if this fails, nothing was charged.
        statement = self._client.statement()
        names = statement.label_names
        replies = [reply for batch in self._client.ask_many(questions) for reply in batch.replies]
        # Not strict: there is no reply behind the batch that crossed the budget.
        asked = [
            str(question) if isinstance(question, int) else reply.key[:12]
            for question, reply in zip(questions, replies, strict=False)
        ]
        table = replies_table(asked, replies, names)
        self._tell({"replies": [reply_facts(reply, names) for reply in replies]}, table, *_lead_needed(statement))

    def do_estimate(self, line: str) -> None:
        """estimate 17 | estimate 0:20 | estimate {json} | estimate 500 new: the most that these queries would cost."""
        words = line.split()
        count = int(words[0]) if len(words) == 2 and words[0].isdecimal() and words[1] == "new" else None
        found = self._client.estimate(parse_questions(line) if count is None else None, count=count)
        sentence = f"queries: {found.new_queries} new, {found.stored_replies} with a stored reply (free)"
        if found.without_votes:
            sentence += f", {found.without_votes} that the released model answers (free)"
        lines = (sentence, _budget_line("now", found.now), _budget_line("afterwards", found.afterwards))
        self._tell(found.model_dump(mode="json"), *lines)

    def do_budget(self, _: str) -> None:
        """budget: the limits of the privacy budget, and how much of it is spent."""
        budget = self._client.budget()
        self._tell(budget.model_dump(mode="json"), _budget_line("spent", budget))

    def do_statement(self, _: str) -> None:
        """statement: the privacy guarantee that may be published."""
        statement = self._client.statement()
        self._tell(statement.model_dump(mode="json"), JSON(statement.model_dump_json()))

    def do_reply(self, line: str) -> None:
        """reply KEY: the stored reply to the query with this content hash."""
        reply = self._client.reply(line.strip())
        names, lead = self._client.statement().label_names, lead_words(reply)
        self._tell(reply_facts(reply, names), describe(reply, names) + (f" ({lead})" if lead else ""))

    def do_quit(self, _: str) -> bool:
        """quit: leave the shell."""
        return True

    def _tell(self, facts: Mapping[str, Any], *words: RenderableType) -> None:
        self.facts = facts
        for line in () if is_for_program() else words:
            self._console.print(line)


def parse_questions(text: str) -> list[Question]:
    """Parse typed text into queries: ``17``, ``0:20``, ``3 5 8``, a JSON object or a list of objects. CommandError for
    anything else."""
    stripped = text.strip()
    if stripped.startswith(("{", "[")):
        try:
            value: Any = json.loads(stripped)
        except ValueError as error:
            raise CommandError(f"Expected a query as JSON ({error}); correct its text.") from error
        return value if isinstance(value, list) else [value]
    ranges = [parse_range(word) for word in stripped.split()]
    # Before the list is made, which a long range would fill the memory with.
    if (total := sum(map(len, ranges))) > _MOST_QUESTIONS:
        raise CommandError(f"{stripped}: expected at most {_MOST_QUESTIONS} records at once, got {total}; give fewer.")
    questions: list[Question] = [number for numbers in ranges for number in numbers]
    if not questions:
        raise CommandError(
            'Expected the number of a record, a range such as 0:20, or {"features": [...], "group": "..."}.'
        )
    return questions


def parse_range(word: str) -> Sequence[int]:
    """Return the record numbers that a typed word means: ``17`` is one number, ``0:500`` are the numbers from 0 to 499.
    CommandError for any other word."""
    start, colon, stop = word.partition(":")
    # `isdecimal`, as `isdigit` accepts superscripts, which int() refuses. Length is limited, as int() refuses a number
    # of more than 4300 digits with an error of its own.
    if not start.isdecimal() or (colon and not stop.isdecimal()) or len(word) > _LONGEST_RANGE:
        raise CommandError(f"{word}: expected the number of a record (from 0), or a range such as 0:500.")
    if colon and not int(start) < int(stop):
        raise CommandError(f"{word}: an empty range; expected its first number below its end, such as 0:500.")
    # A longer range has no length in Python.
    if colon and int(stop) > sys.maxsize:
        raise CommandError(f"{word}: expected record numbers below {sys.maxsize}; give smaller ones.")
    return range(int(start), int(stop)) if colon else [int(start)]


def describe(reply: Reply, label_names: Sequence[str]) -> str:
    """Describe a reply in words: the label's name, or why there is no label."""
    if reply.label is not None:
        return label_names[reply.label]
    return "no room in the budget" if reply.status == "over_budget" else "refused"


def replies_table(asked: Sequence[str], replies: Sequence[Reply], names: Sequence[str]) -> Table:
    """Return a table of replies to the queries ``asked``, with their leads if any is known."""
    leads = [lead_words(reply) for reply in replies]
    table = Table("query", "reply", *["lead"] * any(leads), box=None)
    for name, reply, lead in zip(asked, replies, leads, strict=True):
        table.add_row(name, describe(reply, names), *[lead] * any(leads))
    return table


def lead_words(reply: Reply) -> str:
    """Describe in words how far the label of a reply stands out from the noise; empty if that is not known."""
    if reply.free:
        return "no votes used: free"
    if reply.lead is None:
        return ""
    return f"{reply.lead:,} votes" + ("" if reply.stands_out is None else _STANDS_OUT[reply.stands_out])


_STANDS_OUT = {True: ", stands out", False: ", within the noise"}


def _lead_needed(statement: Statement) -> list[str]:
    """Return the line that says which lead stands out from the noise, if that is known."""
    if statement.lead_needed is None:
        return []
    of = f"{statement.lead_needed:,.0f} of {statement.num_teachers:,} votes"
    return [f"A lead of {of} stands out from the noise 19 times in 20."]


def reply_facts(reply: Reply, label_names: Sequence[str]) -> dict[str, Any]:
    """Return a reply as plain values: key, status, the label as a number and by its name, and its lead."""
    name = None if reply.label is None else label_names[reply.label]
    return {**reply.model_dump(), "label_name": name}


CLOSED = (
    "closed: queries that were asked before are answered again, free of charge; new ones need a run that keeps room "
    "for them (`fairpate run --keep 30%`), whose epsilon adds to this one"
)
"""What a user can do when the budget has no room for a new query."""


def _budget_line(name: str, budget: Budget) -> str:
    spent = "unbounded" if budget.epsilon_submitted is None else epsilon_text(budget.epsilon_submitted, digits=3)
    limit = "no limit" if budget.epsilon_limit is None else f"limit {budget.epsilon_limit:g}"
    queries = "" if budget.max_queries is None else f" of {budget.max_queries}"
    closed = f"; {CLOSED}" if budget.closed else ""
    return (
        f"{name:<10} epsilon {spent} ({limit}, delta {delta_text(budget.delta)}, {budget.kind.replace('_', '-')}), "
        f"queries {budget.queries_submitted}{queries}{closed}"
    )


_WRITERS: Mapping[str, Callable[[pa.Table, Path], None]] = {".parquet": pq.write_table, ".csv": csv.write_csv}


def query_words(words: Sequence[str], *, token_file: Path | None, history: Path) -> Output | None:
    """Run the query command in ``words`` and return its output; without a command, run an interactive shell.

    A first word that contains :// is the service's URL. ``history`` is the file in which the shell stores typed lines.
    UsageError, before anything is submitted, for a malformed URL or a token that cannot be read.
    """
    url, command = split_url(words)
    if is_for_program() and not command:
        raise CommandError(
            "--json: the interactive shell has no JSON output; give a command such as `budget`, or --ids."
        )
    with AggregatorClient(url, token=read_token(token_file)) as client:
        shell = QueryShell(client, terminal(), history=history)
        if command:
            cmd.Cmd.onecmd(shell, " ".join(command))  # not the shell's own, which prints an error and goes on
            return Output(facts=shell.facts, words="")
        client.budget()  # reports a wrong URL or token before the prompt
        shell.run(interactive=sys.stdin.isatty())
    return None


def query_batch(
    words: Sequence[str], ids: str, *, out: Path | None, batch_size: int, token_file: Path | None
) -> Output:
    """Submit the public pool's records with the numbers ``ids``, such as 0:500, to the service at the URL in ``words``;
    write the replies to ``out``, or print them.

    The columns of ``out`` are id, key, status and label. If the budget or an error ends the batch early, the replies
    received until then are written, and the output reports the error. The service stores every reply, so the same
    command gets them again for free. UsageError, before anything is submitted, for ``words`` other than a URL, for
    ``ids`` that are not numbers, and for an ``out`` that cannot be written.
    """
    url, command = split_url(words)
    if command:
        raise CommandError(f"{' '.join(command)}: found both a command and --ids; give either a command or --ids.")
    numbers = parse_range(ids)
    if out is not None:
        check_output(out, "--out", is_file=True, suffixes=tuple(_WRITERS))
    reporter, replies, failure = Reporter(), list[Reply](), None
    with AggregatorClient(url, token=read_token(token_file)) as client:
        statement = client.statement()
        # Before the first batch: a number that is too large would fail the last one, after the others were charged.
        if numbers[-1] >= statement.pool_size:
            size = statement.pool_size
            raise CommandError(
                f"--ids: expected numbers below {size}, the size of the pool, got {numbers[-1]}; give smaller ones."
            )
        try:
            with reporter.stage("queries") as advance:
                for batch in client.ask_many(numbers, batch_size=batch_size):
                    # Kept batch by batch, so that no error loses replies that were charged.
                    replies += batch.replies
                    advance(len(replies), len(numbers))
            if len(replies) < len(numbers):
                left = len(numbers) - len(replies)
                reporter.note("queries", f"not submitted, because the budget has no room: {left}")
        except UserError as error:
            failure = str(error)
            if not replies:
                raise
        # Also after Ctrl-C: the replies received so far are shown before the command ends.
        except BaseException:
            if replies:
                show(_kept(numbers, replies, out, statement.label_names))
            raise
    return _kept(numbers, replies, out, statement.label_names, failure)


def _kept(
    ids: Sequence[int], replies: Sequence[Reply], out: Path | None, names: Sequence[str], failure: str | None = None
) -> Output:
    """Write the replies to the pool records ``ids`` to ``out`` if it is not None, and return the output that the
    command prints. ``failure`` says why the batch ended early."""
    # A failure sets the exit code also where replies are kept, so that scripts do not take a part for the whole.
    code, counts = int(failure is not None), Counter(reply.status for reply in replies)
    counted = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    if out is not None:
        table = pa.table(
            {
                # The batch may have ended early, by the budget or an error.
                "id": pa.array(ids[: len(replies)], pa.int64()),
                "key": [reply.key for reply in replies],
                "status": [reply.status for reply in replies],
                "label": pa.array([reply.label for reply in replies], pa.int64()),
            }
        )
        try:
            write_atomically(out, lambda path: _WRITERS[out.suffix](table, path))
        except OSError as error:
            raise QueryError(
                f"--out: {out} cannot be written ({error.strerror}). No reply is lost: the service stores all "
                f"{len(replies)}, and the same command with another --out gets them again for free."
            ) from error
        return Output(facts={"file": out, "counts": counts}, words=counted, code=code, failure=failure)
    say(counted)
    shown = replies_table([str(number) for number in ids[: len(replies)]], replies, names)
    found = [{"id": id_} | reply_facts(reply, names) for id_, reply in zip(ids, replies, strict=False)]
    return Output(facts={"replies": found, "counts": counts}, words=shown, code=code, failure=failure)


def split_url(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split ``words`` into the URL of the service and the words of the command.

    If the first word is not a URL, the URL is the environment variable FAIRPATE_URL, or else that of a service on this
    machine. CommandError for a malformed URL.
    """
    given = bool(words) and "://" in words[0]
    url = words[0] if given else os.environ.get("FAIRPATE_URL") or DEFAULT_URL
    try:
        parts = urlsplit(url)
        is_known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port or the address is malformed
        is_known = False
    if not is_known:
        raise CommandError(f"{url}: not a URL of a service; give one such as {DEFAULT_URL}.")
    return url, list(words[1:] if given else words)


def read_token(path: Path | None) -> str | None:
    """Return the caller's token: the content of the file ``path`` or, if ``path`` is None, the environment variable
    FAIRPATE_TOKEN. None if neither is given."""
    try:
        text = path.read_text(encoding="utf-8") if path is not None else os.environ.get("FAIRPATE_TOKEN", "")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise CommandError(f"--token-file: {path} cannot be read ({reason}); give the file with your token.") from error
    words = text.split()
    if path is not None and not words:
        raise CommandError(f"--token-file: {path} is empty; give the file with your token.")
    # The last word: a line of a token file may begin with a name.
    return words[-1] if words else None
