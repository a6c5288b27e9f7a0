"""Audits of a ledger: verification, listing, export, and the audit log.

Each function verifies every entry first, takes no lock and writes nothing to the ledger, so that it may run while a
service writes. Lists and exports of charges are for the operator only: they contain votes.

The audit log is a file of JSON lines: who was charged with which queries, and when; which queries were answered without
votes; the offsets that are added to noisy counts; whose limits changed; and, from the
run's journal of actions, who read, copied, restored or took over the ledger and changed tokens. It has no votes,
labels, refusals or costs, and does not show whether a query was answered. Every line ends with ``chain``, a digest over
all lines up to this one. So an edited line is noticed, and a truncated log is noticed by a reader who noted the
``chain`` of a later line. A log is continued only if the ledger still has the entry at which the log ended.
"""

import fcntl
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from aggregator.ledger import Charge, LedgerState, LedgerTerms, back_end, read_ledger
from aggregator.session import epsilon_data_independent
from aggregator.store import Address, Head, LedgerError, entry_payload, rows_after, shown, verified_entries
from fairpate.files import give_to_owner, sync, write_atomically
from fairpate.pages import delta_text
from fairpate.types import UserError, strict

COLUMNS = pa.schema(
    {
        "number": pa.int64(),
        "key": pa.string(),
        "group": pa.int64(),
        "verdict": pa.string(),
        "label": pa.int64(),
        "votes": pa.list_(pa.int64()),
        "caller": pa.string(),
        "request": pa.string(),
        "at_s": pa.float64(),
    }
)


@dataclass(frozen=True, kw_only=True)
class VerifiedLedger:
    """The summary of a ledger, the record of all queries and their charges, after every entry was verified.

    ``reservations`` counts charged queries; ``open`` counts those to which a crash left no outcome: they are charged,
    but were not answered. ``without_votes`` counts queries that were decided without votes, which are not charged.
    ``offsets`` are the votes that are added to noisy counts, by class; None without offsets. ``head`` is the digest of
    the last entry.
    """

    entries: int
    head: str
    reservations: int
    queries: int
    answered: int
    refused: int
    open: int
    epsilon_submitted: float
    delta: float
    budget: str
    noise: str
    without_votes: int = 0
    offsets: tuple[int, ...] | None = None


def verify(place: Address, *, anchor: Address | None = None) -> VerifiedLedger:
    """Verify a ledger and return its summary.

    Each entry must have the digest that follows from its predecessor's. The last entries on record in the ledger's head
    file and in ``anchor`` (a copy of the last entry's number and digest at another place, or None) must exist.
    LedgerError at the first fault.
    """
    terms, state = _read(place, anchor)
    budget = terms.budget
    limit = f"{budget.max_queries} queries" if budget.epsilon is None else f"epsilon {budget.epsilon:g}"
    verdicts = Counter("open" if settled is None else settled.verdict for settled in state.outcomes)
    return VerifiedLedger(
        entries=state.head.number,
        head=state.head.digest,
        reservations=len(state.keys),
        # Fewer than reservations where a crash left one open and its query was asked again.
        queries=len(set(state.keys)),
        answered=verdicts["answer"],
        refused=verdicts["confidence"] + verdicts["fairness"] + verdicts["free"],
        open=verdicts["open"],
        epsilon_submitted=epsilon_data_independent(terms, num_queries=len(state.keys)),
        delta=budget.delta,
        budget=f"{budget.kind}, {limit} at delta {delta_text(budget.delta)}",
        noise=terms.noise,
        without_votes=len(state.free),
        offsets=None if state.offsets is None else state.offsets.votes,
    )


def rows(place: Address, *, anchor: Address | None = None) -> Sequence[Charge]:
    """Return all charges in the ledger at ``place``, in the order they were made. LedgerError for a ledger that
    :func:`verify` does not accept."""
    return _read(place, anchor)[1].charges


def export(place: Address, out: Path, *, before: Callable[[], object] = lambda: None) -> None:
    """Write a ledger's terms (mechanism, gate, budget) and all its charges to the file ``out``, atomically. ``before``
    is called after all checks, before anything is written.

    The ending decides the format: ``.parquet`` (with the terms in its metadata) or ``.json``. LedgerError for a ledger
    that :func:`verify` does not accept; UserError for another ending and for a file that exists.
    """
    if out.suffix not in (".parquet", ".json"):
        raise UserError(f"{out}: expected a file name that ends in .parquet or .json; give one of these endings.")
    if out.exists():
        raise UserError(f"{out}: this file already exists; remove it, or give another name.")
    _, state = _read(place)
    terms, written = strict(state.stored_terms), [charge.to_json() for charge in state.charges]

    def write(unfinished: Path) -> None:
        if out.suffix == ".json":
            unfinished.write_text(json.dumps({"terms": terms, "rows": written}, allow_nan=False), encoding="utf-8")
        else:
            schema = COLUMNS.with_metadata({"terms": json.dumps(terms)})
            pq.write_table(pa.Table.from_pylist(written, schema=schema), unfinished)

    before()
    # For its owner alone: rows hold votes.
    write_atomically(out, write, private=True)


def _read(place: Address, anchor: Address | None = None) -> tuple[LedgerTerms, LedgerState]:
    state = read_ledger(place, anchor)
    try:
        return LedgerTerms.from_json(state.stored_terms), state
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerError(
            f"{shown(place)}: the ledger's terms are damaged ({error}); restore the ledger from a copy."
        ) from error


class LogEnd(NamedTuple):
    """The end of an audit log: the last ledger entry and the last action of an operator that the log contains.
    ``chain`` is the digest of the log's last line, and covers all lines before it."""

    entry: Head = Head(0, "")
    action: Head = Head(0, "")
    chain: str = ""


START = LogEnd()


def lines_after(place: Address, end: LogEnd, actions: Path | None = None) -> Iterator[tuple[LogEnd, str]]:
    """Yield the lines that are to be appended to an audit log that ends at ``end``. Each comes as a pair: the end that
    the log then has, and the line.

    Lines for later entries of the ledger come first, then lines for later actions in ``actions``, the run's journal of
    what its operators did. LedgerError if the ledger lacks the log's last entry, or the journal the log's last action.
    """
    name = shown(place)
    with closing(back_end(place).reader(place)) as reader:
        before = reader.header.start if end.entry == START.entry else end.entry
        # A log that goes beyond the last entry saw entries that the ledger lacks now.
        last = reader.noted
        if last.number < before.number or (last.number == before.number and last != before):
            raise LedgerError(
                f"{name}: the ledger has {last.number} entries, but the audit log ends with entry {before.number}: the "
                "ledger was rolled back, or the log belongs to another ledger; restore the ledger, or give its own log."
            )
        # If entries follow, the digest of the first covers `before`, so that the log of another ledger fails there.
        rows = rows_after(reader, before.number)
        for number, kind, text, digest in verified_entries(rows, name, reader.header, before):
            payload = entry_payload(name, number, text)
            values: dict[str, Any] = {"entry": number}
            if "at" in payload:
                values["at"] = datetime.fromtimestamp(payload["at"], UTC).isoformat(timespec="milliseconds")
            if kind in ("reserve", "free"):
                keys, groups = iter(payload["keys"].split()), iter(payload["groups"])
                asked = [
                    {"caller": who, "request": request, "keys": [*islice(keys, n)], "groups": [*islice(groups, n)]}
                    for who, request, n in payload["asked"]
                ]
                # Of a free answer, which no vote decides, the log shows no more than of a charge.
                values |= (
                    {"event": "charge", "charges": asked} if kind == "reserve" else {"event": kind, "asked": asked}
                )
            elif kind == "offsets":
                values |= {"event": kind, "votes": payload["votes"]}
            elif kind == "limit":
                values |= {"event": "limit", "caller": payload["caller"], "limit": payload["limit"]}
            else:
                # Only how many outcomes: which they are depends on votes.
                values |= {"event": "stored", "first": payload["first"], "queries": len(payload["outcomes"])}
            line, chain = _chained({**values, "digest": digest}, end.chain)
            end = end._replace(entry=Head(number, digest), chain=chain)
            yield end, line
    if actions is None:
        return
    # With the empty start in front, action n has the index n.
    journal = [(Head(0, ""), {}), *_actions(actions, actions.read_bytes() if actions.exists() else b"")]
    number = end.action.number
    if len(journal) <= number or journal[number][0] != end.action:
        raise LedgerError(
            f"{actions}: this journal has no action {number}, with which the audit log ends: the journal was cut, or "
            "the log belongs to another run; restore the journal, or give its own log."
        )
    for head, values in journal[number + 1 :]:
        line, chain = _chained({**values, "digest": head.digest}, end.chain)
        end = end._replace(action=head, chain=chain)
        yield end, line


def follow(
    place: Address, end: LogEnd, actions: Path | None = None, *, pause_s: float = 1.0
) -> Iterator[tuple[LogEnd, str]]:
    """Yield the pairs of :func:`lines_after`, then further pairs as entries and actions are added; never ends.

    The ledger is read every ``pause_s`` seconds.
    """
    while True:
        for end, line in lines_after(place, end, actions):  # noqa: B020 - the next round continues from here
            yield end, line
        time.sleep(pause_s)


def log_end(log: Path) -> LogEnd:
    """Verify an audit log and return its end; an incomplete last line, left by a crash, is removed.

    LedgerError for a log with an edited line, and for a file that is not an audit log (which stays as it is).
    """
    if not log.exists():
        return START
    content = log.read_bytes()
    whole, rest = content[: content.rfind(b"\n") + 1], content[content.rfind(b"\n") + 1 :]
    if rest and not any(rest.startswith(begin) or begin.startswith(rest) for begin in (b'{"entry": ', b'{"action": ')):
        raise LedgerError(f"{log}: this file is not an audit log, or damaged; restore it, or give another file.")
    *_, end = START, *_ends(log, whole)
    # Only after all lines were verified: nothing is cut off a file that was named by mistake.
    if rest:
        os.truncate(log, len(whole))
    return end


def check_log(log: Path, head: str) -> tuple[int, int, str]:
    """Verify an audit log, and that one of its lines has the ``chain`` that was noted elsewhere as ``head``.

    A line's chain is the digest of all lines up to it. Returns the number of lines, the number of the line with
    ``head``, and the chain of the last line. LedgerError if a line was edited, inserted or removed, and if no line has
    ``head``: then the log was truncated or written anew.
    """
    try:
        content = log.read_bytes()
    except OSError as error:
        raise LedgerError(f"{log}: the audit log cannot be read ({error}); give a readable one.") from error
    chains = [end.chain for end in _ends(log, content)]
    if head not in chains:
        raise LedgerError(
            f"{log}: none of its {len(chains)} lines has the chain {head}: the log was cut or written anew; restore it."
        )
    return len(chains), chains.index(head) + 1, chains[-1]


def _ends(log: Path, content: bytes) -> Iterator[LogEnd]:
    """Verify ``content``, read from the audit log ``log``, line by line. Yield, for each line, the :class:`LogEnd` of a
    log that ends with this line."""
    end = START
    for number, (values, chain) in enumerate(_verified(content, f"{log}: line"), start=1):
        try:
            kind = "entry" if "entry" in values else "action"  # its number in ledger or journal, with its digest
            end = end._replace(**{kind: Head(values[kind], values["digest"])}, chain=chain)
        except (KeyError, TypeError) as error:
            raise LedgerError(
                f"{log}: this file is not an audit log, or damaged at line {number}; restore it."
            ) from error
        yield end


def _verified(content: bytes, name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Verify JSON lines, each of which ends with its chain, the digest of all lines up to it. Yield each line's other
    values and its chain.

    LedgerError at the first line whose chain is wrong. The error's message begins with ``name`` and the line's number.
    """
    before, text = "", content.decode("utf-8", "replace")
    # Not splitlines: a name may hold another character that breaks lines.
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else [], start=1):
        try:
            values = json.loads(line)
            chain = values.pop("chain")
            # The whole line is compared: another spelling of the same values is an edit too.
            follows = (line, chain) == _chained(values, before)
        except (ValueError, KeyError, TypeError, AttributeError):
            follows = False
        if not follows:
            what = "or a line before it was changed or removed, or the file is not an audit log"
            raise LedgerError(f"{name} {number} {what}; restore the file, or give another one.")
        before = chain
        yield values, chain


def _chained(values: Mapping[str, Any], before: str) -> tuple[str, str]:
    """Return a JSON line that contains ``values`` and ends with its chain, and return this chain too. The chain is the
    SHA-256 of ``before``, the previous line's chain, and of ``values`` as JSON."""
    text = json.dumps(values, ensure_ascii=False)
    chain = hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()
    return json.dumps({**values, "chain": chain}, ensure_ascii=False), chain


def note_action(journal: Path | None, event: str, **facts: object) -> None:
    """Append an operator's action, such as a restored copy, to the file ``journal`` of a run, durably and before the
    action itself; do nothing if there is no journal (None).

    ``event`` names the action, ``facts`` its details. LedgerError if the journal is damaged or cannot be written.
    """
    if journal is None:
        return
    try:
        descriptor = os.open(journal, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)  # it names who did what
        with open(descriptor, "r+b") as file:  # noqa: PTH123 - of the descriptor, with its rights
            give_to_owner(descriptor, journal.parent)
            # Two processes that add at the same time would number their actions alike.
            fcntl.flock(file, fcntl.LOCK_EX)
            content = file.read()
            *_, (last, _) = (Head(0, ""), {}), *_actions(journal, content)
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            values = {"action": last.number + 1, "at": now, "event": event, **facts}
            # Overwrites the part of a line that a crash may have left.
            file.seek(content.rfind(b"\n") + 1)
            file.truncate()
            file.write(_chained(values, last.digest)[0].encode() + b"\n")
            file.flush()
            os.fsync(descriptor)
        if not content:  # its name too, or a loss of power could leave an action without a journal
            sync(journal.parent)
    except OSError as error:
        raise LedgerError(
            f"{journal}: the journal of actions cannot be written ({error}); repair its disk or folder."
        ) from error


def _actions(journal: Path, content: bytes) -> Iterator[tuple[Head, dict[str, Any]]]:
    """Verify ``content``, read from a run's journal of operators' actions; yield each action's number and digest, and
    its values."""
    # Up to the last line break: a crash may have left a part of a line.
    whole = content[: content.rfind(b"\n") + 1]
    for number, (values, chain) in enumerate(_verified(whole, f"{journal}: action"), start=1):
        if values.get("action") != number:
            raise LedgerError(f"{journal}: action {number} was changed or removed; restore this journal from a copy.")
        yield Head(number, chain), values
