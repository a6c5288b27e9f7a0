"""Carry out `fairpate query`: a shell, one command, or a batch of records of the pool, written to a table."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv
from rich.table import Table

from aggregator.client import (
    DEFAULT_URL,
    AggregatorClient,
    CommandError,
    QueryError,
    QueryShell,
    describe,
    parse_range,
    reply_facts,
)
from aggregator.service.wire import Reply
from fairpate.files import check_output_file, write_atomically
from fairpate.run.release_log import state_folder
from fairpate.terminal import Output, Reporter, is_for_program, say, show, terminal
from fairpate.types import UserError

_WRITERS: Mapping[str, Callable[[pa.Table, Path], None]] = {".parquet": pq.write_table, ".csv": csv.write_csv}


def query_words(words: Sequence[str], *, token_file: Path | None) -> Output | None:
    """Run the command in ``words``, or a shell if there is none. A first word that contains :// is the URL.

    UsageError, before anything is asked, for a URL or a token that cannot be read.
    """
    url, command = split_url(words)
    if is_for_program() and not command:
        raise CommandError("--json: a shell is for a person; give a command such as `budget`, or --ids.")
    heard: dict[str, Any] = {}
    with AggregatorClient(url, token=read_token(token_file)) as client:
        hear = heard.update if is_for_program() else None
        shell = QueryShell(client, terminal(), history=state_folder() / "history", hear=hear)
        if command:
            shell.run_once(" ".join(command))
            return Output(facts=heard, words="")
        client.budget()  # reports a wrong URL or token before the prompt
        shell.run(interactive=sys.stdin.isatty())
    return None


def query_batch(
    words: Sequence[str], ids: str, *, out: Path | None, batch_size: int, token_file: Path | None
) -> Output:
    """Ask the pool records ``ids`` of the service at the URL in ``words``; write ``out``, or return a line for each.

    ``out`` has the columns id, key, status and label. Replies from before a budget or an error ended the batch are
    kept; then the error is raised. The service stores every reply, so the same command asks again for free. UsageError,
    before anything is asked, for another word, for ``ids`` that are no numbers, and for an ``out`` that cannot be
    written.
    """
    url, command = split_url(words)
    if command:
        raise CommandError(f"{' '.join(command)}: give either a command or --ids.")
    numbers = parse_range(ids)
    if out is not None:
        check_output_file(out, "--out", suffixes=tuple(_WRITERS))
    reporter, replies, failure = Reporter(), list[Reply](), None
    with AggregatorClient(url, token=read_token(token_file)) as client:
        statement = client.statement()
        # Before the first batch: a number that is too large would fail the last one, after the others were charged.
        if numbers[-1] >= statement.pool_size:
            raise CommandError(
                f"--ids: expected record numbers below {statement.pool_size}, the size of this pool, got {numbers[-1]}."
            )
        try:
            with reporter.stage("queries") as advance:
                for batch in client.ask_many(numbers, batch_size=batch_size):
                    # Kept batch by batch: what ends the loop must not lose what was answered, and charged.
                    replies += batch.replies
                    advance(len(replies), len(numbers))
            if len(replies) < len(numbers):
                left = len(numbers) - len(replies)
                reporter.note("queries", f"not asked, because the budget has no room: {left}")
        except UserError as error:
            failure = str(error)
            if not replies:
                raise
        # Ctrl-C too: what was answered so far is shown before the command ends.
        except BaseException:
            if replies:
                show(_kept(numbers, replies, out, statement.label_names))
            raise
    return _kept(numbers, replies, out, statement.label_names, failure)


def _kept(
    ids: Sequence[int],
    replies: Sequence[Reply],
    out: Path | None,
    label_names: Sequence[str],
    failure: str | None = None,
) -> Output:
    """Write the replies to ``out`` if it is given, and return what is printed of them."""
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
    shown = Table("query", "reply", box=None)
    for number, reply in zip(ids, replies, strict=False):
        shown.add_row(str(number), describe(reply, label_names))
    found = [{"id": id_} | reply_facts(reply, label_names) for id_, reply in zip(ids, replies, strict=False)]
    return Output(facts={"replies": found, "counts": counts}, words=shown, code=code, failure=failure)


def split_url(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the URL given, that of FAIRPATE_URL, or this machine's, and the command."""
    given = bool(words) and "://" in words[0]
    url = words[0] if given else os.environ.get("FAIRPATE_URL") or DEFAULT_URL
    try:
        parts = urlsplit(url)
        is_known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port or the address is malformed
        is_known = False
    if not is_known:
        raise CommandError(f"{url}: expected a URL of a service, such as {DEFAULT_URL}.")
    return url, list(words[1:] if given else words)


def read_token(path: Path | None) -> str | None:
    """Return the token in ``path``, or that of FAIRPATE_TOKEN; None without either."""
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
