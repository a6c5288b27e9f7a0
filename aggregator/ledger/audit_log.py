"""The audit log of a ledger: who was charged with what, when, and whose limits changed, as JSON lines.

One line for each entry, with its number and digest. Nothing in it depends on votes: neither they nor labels, refusals
or prices, nor whether a query was answered; under a budget that votes end, how much was charged does, as everywhere.
Who keeps the log away from the ledger has an anchor of every entry: a log goes on only from the entry it ends with.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from aggregator.ledger.chain import EntryKind, Head, entry_payload, verified_entries
from aggregator.ledger.files import LedgerError
from aggregator.ledger.stores import Place, reading, shown

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
