"""What happened in a ledger: verification, statistics, and an audit log as JSON lines.

Reading a ledger without being its writer: is it whole, what does it hold, a copy of it for other tools.

Everything here verifies every entry first, needs no lock and writes nothing beside the ledger, so that it may run while
a service writes. All of it is for the operator: rows hold votes.

The audit log of a ledger: who was charged with what, when, and whose limits changed, as JSON lines.

One line for each entry, with its number and digest. Nothing in it depends on votes: neither they nor labels, refusals
or prices, nor whether a query was answered; under a budget that votes end, how much was charged does, as everywhere.
Who keeps the log away from the ledger has an anchor of every entry: a log goes on only from the entry it ends with.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from aggregator.budgets import epsilon_data_independent
from aggregator.chain import EntryKind, Head, LedgerError, Place, entry_payload, reading, shown, verified_entries
from aggregator.ledger import Charge, LedgerState, LedgerTerms, OwnLimit, read_ledger
from fairpate.files import write_atomically
from fairpate.types import Budget, UserError, strict
from fairpate.words import delta_text


@dataclass(frozen=True, kw_only=True)
class VerifiedLedger:
    """A ledger whose chain holds, in numbers. ``open`` reservations were left by a crash: charged, never answered."""

    entries: int
    head: str
    reservations: int
    queries: int
    answered: int
    refused: int
    open: int
    publications: int
    epsilon_submitted: float
    delta: float
    budget: str
    noise: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One reservation, what became of it and who asked; ``verdict`` is ``open`` where a crash left it so."""

    number: int
    key: str
    group: int
    verdict: str
    label: int | None
    votes: tuple[int, ...]
    caller: str
    request: str
    at_s: float


def stored_limits(place: Place) -> Mapping[str, OwnLimit]:
    """What each caller may spend, as the ledger has it. LedgerError where an entry was changed."""
    return _read(place, None)[1].limits


def verify(place: Place, *, anchor: Place | None = None) -> VerifiedLedger:
    """Check every entry against its predecessor, and those that were noted as last. LedgerError if one fails."""
    terms, state, head = _read(place, anchor)
    verdicts = Counter("open" if settled is None else settled.verdict for settled in state.outcomes)
    return VerifiedLedger(
        entries=head.number,
        head=head.digest,
        reservations=len(state.keys),
        # Fewer than reservations where a query whose first one a crash left open was asked again.
        queries=len(set(state.keys)),
        answered=verdicts["answer"],
        refused=verdicts["confidence"] + verdicts["fairness"] + verdicts["free"],
        open=verdicts["open"],
        publications=len(state.publications),
        epsilon_submitted=epsilon_data_independent(
            terms, num_queries=len(state.keys), num_publications=len(state.publications)
        ),
        delta=terms.budget.delta,
        budget=_budget_text(terms.budget),
        noise=terms.noise,
    )


def rows(place: Place, *, anchor: Place | None = None) -> Sequence[Row]:
    """Every reservation in the order it was made. LedgerError as :func:`verify`."""
    terms, state, _ = _read(place, anchor)
    return [_row(charge) for charge in state.charges(terms.num_classes)]


def export(place: Place, out: Path) -> None:
    """Write terms and rows to ``out``, whole or not at all: ``.parquet`` (terms in its metadata) or ``.json``.

    LedgerError as :func:`verify`; UserError for another ending or where something is already.
    """
    if out.suffix not in (".parquet", ".json"):
        raise UserError(f"{out}: expected a name that ends in .parquet or .json.")
    if out.exists():
        raise UserError(f"{out}: is there already; remove it, or give another name.")
    terms, state, _ = _read(place)
    found = [asdict(_row(charge)) for charge in state.charges(terms.num_classes)]
    write = _write_json if out.suffix == ".json" else _write_parquet
    write_atomically(out, lambda unfinished: write(unfinished, terms.to_json(), found), private=True)


def _read(place: Place, anchor: Place | None = None) -> tuple[LedgerTerms, LedgerState, Head]:
    stored, _, state, head = read_ledger(place, anchor)
    return _terms_of(stored, shown(place)), state, head


def _terms_of(stored: dict[str, Any], name: str) -> LedgerTerms:
    try:
        return LedgerTerms.from_json(stored)
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerError(f"{name}: its terms are not those of a ledger ({error}); restore it from a copy.") from error


def _row(charge: Charge) -> Row:
    reservation, settled = charge.reservation, charge.outcome
    return Row(
        number=reservation.number,
        key=reservation.key,
        group=reservation.group,
        verdict="open" if settled is None else settled.verdict,
        label=None if settled is None else settled.label,
        votes=reservation.votes,
        caller=reservation.asker.caller,
        request=reservation.asker.request,
        at_s=reservation.at_s,
    )


def _budget_text(budget: Budget) -> str:
    limit = f"{budget.max_queries} queries" if budget.epsilon is None else f"epsilon {budget.epsilon:g}"
    return f"{budget.kind}, {limit} at delta {delta_text(budget.delta)}"


_COLUMNS = pa.schema(
    [
        ("number", pa.int64()),
        ("key", pa.string()),
        ("group", pa.int64()),
        ("verdict", pa.string()),
        ("label", pa.int64()),
        ("votes", pa.list_(pa.int64())),
        ("caller", pa.string()),
        ("request", pa.string()),
        ("at_s", pa.float64()),
    ]
)


def _write_parquet(path: Path, terms: dict[str, Any], found: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(found, schema=_COLUMNS.with_metadata({"terms": json.dumps(strict(terms))}))
    pq.write_table(table, path)


def _write_json(path: Path, terms: dict[str, Any], found: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"terms": strict(terms), "rows": found}, allow_nan=False), encoding="utf-8")


START = Head(0, "")
_BEGINS = b'{"entry": '
"""Every line of a log, as :func:`_line` writes it."""


def lines_after(place: Place, last: Head) -> Iterator[tuple[Head, str]]:
    """The lines of the entries after ``last``, each with its entry. LedgerError where ``last`` is not in the ledger."""
    with reading(place, after=last.number) as found:
        start = found.header.chain.start(found.header.terms)
        before = start if last == START else last
        # What is noted as last: a log that goes beyond it saw entries that the ledger lacks now.
        end = found.noted[0]
        if end.number < before.number or (end.number == before.number and end != before):
            raise LedgerError(
                f"{shown(place)}: holds {end.number} entries, and not the number {before.number} of the log; it was "
                "rolled back, or the log is another ledger's."
            )
        # Where entries follow, the first one's digest is over `before`: another ledger's log fails there.
        for number, kind, text, digest in verified_entries(found.rows, shown(place), found.header.chain, before):
            yield Head(number, digest), _line(number, digest, kind, entry_payload(shown(place), number, text))


def follow(place: Place, last: Head, *, pause_s: float = 1.0) -> Iterator[tuple[Head, str]]:
    """The same, and then every new entry as it comes; never ends."""
    while True:
        for last, line in lines_after(place, last):  # noqa: B020 - it walks on
            yield last, line
        time.sleep(pause_s)


def last_of(log: Path) -> Head:
    """The entry that the last whole line of a log is of; what a crash left of another line is cut off.

    LedgerError for a file that is something else, which stays as it is.
    """
    if not log.exists():
        return START
    content = log.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    rest = content[len(whole) :]
    try:
        if not (rest.startswith(_BEGINS) or _BEGINS.startswith(rest)):
            raise ValueError("its end is no part of a line")  # noqa: TRY301 - one answer for all
        values = json.loads(whole.rstrip(b"\n").rpartition(b"\n")[2]) if whole else None
        last = START if values is None else Head(values["entry"], values["digest"])
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{log}: is no audit log, or damaged; give another file.") from error
    # After the look at what it is: of a file that was named by mistake nothing is cut off.
    if rest:
        os.truncate(log, len(whole))
    return last


def _line(number: int, digest: str, kind: EntryKind, payload: dict[str, Any]) -> str:
    at_s = payload.get("at")
    moment = None if not at_s else datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
    values = {"entry": number, "at": moment, **_EVENTS[kind](payload), "digest": digest}
    return json.dumps({name: value for name, value in values.items() if value is not None}, ensure_ascii=False)


def _charge(payload: dict[str, Any]) -> dict[str, Any]:
    keys, groups = iter(payload["keys"].split()), iter(payload["groups"])
    asked = payload.get("asked") or [["", "", len(payload["groups"])]]
    charges = [
        {"caller": caller, "request": request, "keys": [*islice(keys, count)], "groups": [*islice(groups, count)]}
        for caller, request, count in asked
    ]
    return {"event": "charge", "charges": charges}


_EVENTS: dict[EntryKind, Any] = {
    "reserve": _charge,
    "commit": lambda payload: {"event": "stored", "first": payload["first"], "queries": len(payload["outcomes"])},
    "publish": lambda payload: {"event": "publication", "charged": payload["num_reservations"]},
    "limit": lambda payload: {"event": "limit", "caller": payload["caller"], "limit": payload["limit"]},
}
