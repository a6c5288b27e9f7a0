"""Ledgers of earlier versions: what their terms mean today, and how their entries are taken over.

Schema 2 had digests without a key, and noted its last outcome in ``.lock``; it is written anew, entry by entry, and the
old file stays. Schema 3 knew one mechanism and stored its parameters alone, and until schema 4 charges named nobody;
such a ledger goes on as it is, and only the reading differs.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import closing
from pathlib import Path
from typing import Any

from aggregator.gnmax import ConfidentGnmax
from aggregator.ledger.chain import (
    HEAD_BYTES,
    ONE_MECHANISM_VERSION,
    UNKEYED_VERSION,
    Chain,
    Head,
    Header,
    canonical,
    parse_head,
    verified_entries,
    write_head,
    write_unfinished,
)
from aggregator.ledger.files import LedgerError, beside, connect, lock, open_read_only


def current_terms(header: Header) -> dict[str, Any]:
    """The terms that a ledger began with, as they are spelt today."""
    terms: dict[str, Any] = json.loads(header.terms)
    if header.version <= ONE_MECHANISM_VERSION:
        terms["mechanism"] = {"name": ConfidentGnmax.name, "parameters": terms["mechanism"]}
    return terms


def rewrite_unkeyed(path: Path) -> None:
    """Bring a ledger of schema 2 to this one, every entry verified; the old file stays under another name.

    Its ``.lock`` must be there: an empty one is that of a ledger whose first outcome was never noted. LedgerError where
    an entry does not verify, and while another process reads the ledger.
    """
    note = lock(beside(path, ".lock"))
    try:
        text = os.pread(note, HEAD_BYTES, 0).decode("ascii", "replace")
        noted = parse_head(beside(path, ".lock"), text) if text else None
        terms, entries = _unkeyed_entries(path, noted)
        if noted is None and sum(kind != "reserve" for kind, _ in entries) > 1:
            raise LedgerError(f"{beside(path, '.lock')}: was emptied; restore it and the ledger from one copy.")
        with closing(connect(path)):
            pass  # brings the write-ahead log, which belongs to the old file alone, into it
        if beside(path, "-wal").exists():
            raise LedgerError(f"{path}: another process reads this ledger; let it end, then try again.")
        unfinished, kept = beside(path, ".new"), path.with_suffix(".schema2.sqlite")
        head = write_unfinished(unfinished, canonical(terms), secrets.token_bytes(32), entries)
        # Until the rename `path` is of schema 2 and its `.lock` is there: after a crash all is done again.
        kept.unlink(missing_ok=True)
        kept.hardlink_to(path)
        write_head(path, head)
        unfinished.replace(path)
        beside(path, ".lock").unlink()
    finally:
        os.close(note)


def _unkeyed_entries(path: Path, noted: Head | None) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Terms of today and verified entries of a ledger of schema 2. LedgerError if one does not verify."""
    with closing(open_read_only(path)) as database:
        database.execute("BEGIN")
        # The chain starts from the text as it was stored; how terms are spelt today comes after.
        (terms,) = database.execute("SELECT terms FROM chain").fetchone()
        chain = Chain(None)
        rows = database.execute("SELECT number, kind, payload, digest FROM entries ORDER BY number")
        verified = list(verified_entries(rows, str(path), chain, chain.start(terms)))
    if noted is not None and noted not in [Head(number, digest) for number, _, _, digest in verified]:
        raise LedgerError(
            f"{path}: holds {len(verified)} entries, and not the number {noted.number} that was written; restore it "
            "from a copy."
        )
    header = Header(version=UNKEYED_VERSION, terms=terms, chain=chain)
    return current_terms(header), [(kind, text) for _, kind, text, _ in verified]
