"""What `fairpate query` does: a shell, one command, or a batch of pool records into a Parquet file."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from aggregator.client import DEFAULT_URL, AggregatorClient, QueryError
from aggregator.shell import QueryShell, parse_range
from aggregator.wire import Reply
from fairpate.app.progress import Reporter
from fairpate.files import write_atomically

_HISTORY = Path(".local/state/fairpate/history")


def query(words: Sequence[str], *, ids: str | None, out: Path | None, batch_size: int, token_file: Path | None) -> None:
    """Run the one command in ``words``, the batch ``ids``, or else a shell. A first word with :// is the URL."""
    url, command = split_url(words)
    with AggregatorClient(url, token=read_token(token_file)) as client:
        if ids is not None:
            if command:
                raise QueryError(f"{' '.join(command)}: give either a command or --ids.")
            label_pool(client, parse_range(ids), out=out, batch_size=batch_size)
            return
        shell = QueryShell(client, Console(highlight=False), history=Path.home() / _HISTORY)
        if command:
            shell.run_once(" ".join(command))
        else:
            client.budget()  # a wrong URL or token is said before the prompt
            shell.run(interactive=sys.stdin.isatty())


def label_pool(client: AggregatorClient, ids: Sequence[int], *, out: Path | None, batch_size: int) -> None:
    """Ask pool records by number and write ``out`` (id, key, status, label), or count the replies on the terminal.

    What was answered before a budget or an error ends the batch is written all the same, and then the error raised.
    """
    reporter, replies = Reporter(), list[Reply]()
    size = client.statement().pool_size
    if max(ids) >= size:
        raise QueryError(f"--ids: expected record numbers below {size}, the size of this pool, got {max(ids)}.")
    try:
        with reporter.stage("queries") as advance:
            for batch in client.ask_many(ids, batch_size=batch_size):
                replies += batch.replies
                advance(len(replies), len(ids))
        if len(replies) < len(ids):
            reporter.note("queries", f"the budget has no room for more; {len(ids) - len(replies)} were not asked")
    finally:
        if out is not None and replies:
            write_atomically(out, lambda path: pq.write_table(_table(ids, replies), path))
    counts = Counter(reply.status for reply in replies)
    Console(highlight=False).print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())))


def split_url(words: Sequence[str]) -> tuple[str, list[str]]:
    """(URL, command): the URL given, that of FAIRPATE_URL, or this machine's."""
    if words and "://" in words[0]:
        return words[0], list(words[1:])
    return os.environ.get("FAIRPATE_URL") or DEFAULT_URL, list(words)


def read_token(path: Path | None) -> str | None:
    """The token in ``path``, or that of FAIRPATE_TOKEN; None without either."""
    text = path.read_text(encoding="utf-8") if path is not None else os.environ.get("FAIRPATE_TOKEN", "")
    words = text.split()
    return words[-1] if words else None


def _table(ids: Sequence[int], replies: Sequence[Reply]) -> pa.Table:
    return pa.table(
        {
            "id": pa.array(ids[: len(replies)], pa.int64()),
            "key": [reply.key for reply in replies],
            "status": [reply.status for reply in replies],
            "label": pa.array([reply.label for reply in replies], pa.int64()),
        }
    )
