"""Verifying a ledger while its writer goes on: a few entries at a time, read on a connection of its own.

Opening a ledger verifies every entry that is stored then. What is changed later, by hand or by a disk, is found by
reading the entries again and following the chain of digests from its start to the last entry that this process wrote:
an edit, a gap, a lost end, and a whole chain that was written anew by somebody who has the key.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

from aggregator.ledger.chain import Head, verified_entries
from aggregator.ledger.files import LedgerError
from aggregator.ledger.ledger import Ledger
from aggregator.ledger.stores import open_reader

_SLICE_S = 5e-4  # how long a request may have to wait for a slice
_MOST_ENTRIES = 256


def verified_slices(ledger: Ledger) -> Iterator[int]:
    """Verify the entries that an open ledger stored until now; yields how many hold after each slice of half a ms.

    LedgerError where one was changed or removed, UnreachableError where they cannot be read now. To be used up in one
    thread, at whatever pace.
    """
    written, name = ledger.head, ledger.name
    with closing(open_reader(ledger.place)) as reader:
        header = reader.header()
        head, count = header.chain.start(header.terms), 1
        while head.number < written.number:
            began_s = time.perf_counter()
            rows = reader.rows(head.number, min(count, written.number - head.number))
            if not rows:
                raise LedgerError(
                    f"{name}: holds {head.number} entries, and not the number {written.number} that was written; "
                    "restore all of it, what notes its last entry included, from one copy."
                )
            for number, _, _, digest in verified_entries(rows, name, header.chain, head):
                head = Head(number, digest)
            # Entries differ a thousandfold in length, so their number follows the clock.
            took_s = time.perf_counter() - began_s
            count = min(2 * count, _MOST_ENTRIES) if took_s < _SLICE_S / 2 else max(1, int(count * _SLICE_S / took_s))
            yield head.number
    if head != written:
        raise LedgerError(f"{name}: was replaced by other entries; restore the ledger from a copy.")


def require_entry(ledger: Ledger, head: Head) -> None:
    """LedgerError unless the entry that ``head`` names is among those that a ledger stores; errors as above besides."""
    with closing(open_reader(ledger.place)) as reader:
        if head.number == 0:
            header = reader.header()
            found: Head | None = header.chain.start(header.terms)
        else:
            found = next((Head(row[0], row[3]) for row in reader.rows(head.number - 1, 1)), None)
    if found != head:
        raise LedgerError(
            f"{ledger.name}: lacks entry {head.number}, which was written; restore all of it from one copy."
        )
