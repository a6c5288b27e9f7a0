"""Entries in a chain: each with a digest over its predecessor's, so that an edit, a gap or a lost end is noticed.

The digest is keyed (HMAC-SHA256, the key lies in the ledger), because entries hold votes and a plain digest would
confirm a guess about them to its reader. The chain starts from the terms of its ledger. The number and digest of the
last entry also stand in a second file, the head.

Not known here: what entries mean.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from pydantic_core import from_json

from aggregator.ledger.files import (
    LedgerError,
    UnreachableError,
    beside,
    connect,
    head_path,
    ledger_files,
    open_read_only,
    reading_failed,
)
from fairpate.files import write_atomically

SCHEMA_VERSION = 5
NAMELESS_VERSION, ONE_MECHANISM_VERSION, UNKEYED_VERSION = 4, 3, 2
"""Of earlier versions: whose charges name nobody, whose terms are spelt otherwise too, and whose chain has no key."""
_GO_ON_AS_THEY_ARE = (SCHEMA_VERSION, NAMELESS_VERSION, ONE_MECHANISM_VERSION)
# More than a head has, so that one with something behind it does not pass for a whole one.
HEAD_BYTES = 128
_BLOCK_BYTES = 64  # of SHA-256
_BRING_UP = "repeat `fairpate run` or `fairpate serve` on its run folder, which brings it to this version"
EntryKind = Literal["reserve", "commit", "publish", "limit"]
Row: TypeAlias = tuple[int, EntryKind, str, str]
"""Number, kind, text and digest of an entry, as they are stored."""

# One spelling per value, because digests are over the text.
canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def entry_text(payload: Mapping[str, Any]) -> str:
    """An entry as it is stored. ValueError for text that no reader would take: half of a pair of UTF-16."""
    text = canonical(payload)
    if "\\ud" in text:  # few hold any such escape
        from_json(text)
    return text


def entry_payload(name: str, number: int, text: str) -> dict[str, Any]:
    """What the text of an entry of the ledger ``name`` holds. LedgerError where it cannot be read."""
    try:
        payload: dict[str, Any] = _parsed(text)
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{name}: entry {number} cannot be read; restore the ledger from a copy.") from error
    return payload


def _parsed(text: str) -> Any:
    try:
        return from_json(text)
    except ValueError:
        # Earlier versions stored a caller's name with bytes that were no text; a question mark stands for each.
        return from_json(json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "replace"))


class Head(NamedTuple):
    """The last entry of a chain: its number (0: none yet) and its digest."""

    number: int
    digest: str


@dataclass(frozen=True)
class Chain:
    """Digests of entries, keyed unless ``key`` is None, as they were before schema 3."""

    key: bytes | None

    def start(self, terms: str) -> Head:
        """The head of the chain without entries."""
        return Head(number=0, digest=self.link("", "terms", terms))

    def after(self, head: Head, kind: str, text: str) -> Head:
        """The head once this entry follows."""
        return Head(number=head.number + 1, digest=self.link(head.digest, kind, text))

    def link(self, previous: str, kind: str, text: str) -> str:
        """The digest of an entry after one with the digest ``previous``."""
        # Canonical JSON holds no line break, so the parts cannot be shifted into one another.
        message = f"{previous}\n{kind}\n{text}".encode()
        if self.key is None:
            return hashlib.sha256(message).hexdigest()
        # HMAC-SHA256 (RFC 2104) with the key taken in once: half of the time that a long ledger takes to open.
        inner, outer = self._keyed
        inner, outer = inner.copy(), outer.copy()
        inner.update(message)
        outer.update(inner.digest())
        return outer.hexdigest()

    @cached_property
    def _keyed(self) -> tuple[hashlib._Hash, hashlib._Hash]:
        assert self.key is not None
        assert len(self.key) <= _BLOCK_BYTES
        block = self.key.ljust(_BLOCK_BYTES, b"\0")
        return hashlib.sha256(bytes(b ^ 0x36 for b in block)), hashlib.sha256(bytes(b ^ 0x5C for b in block))


class Header(NamedTuple):
    """What a ledger begins with: its schema, its terms as text, and the chain that starts from them."""

    version: int
    terms: str
    chain: Chain


def read_header(database: sqlite3.Connection, path: Path) -> Header:
    """Errors as :func:`known_header`."""
    (version,) = database.execute("SELECT version FROM chain").fetchone() or (None,)
    terms, key = "", ""
    # Asked for only where it is known to be: schema 2 has no column for the key.
    if version in _GO_ON_AS_THEY_ARE:
        terms, key = database.execute("SELECT terms, key FROM chain").fetchone()
    return known_header(str(path), version, terms, key)


def known_header(name: str, version: int | None, terms: str, key: str) -> Header:
    """LedgerError for a schema that has to be brought to this version first, or is unknown."""
    if version not in _GO_ON_AS_THEY_ARE:
        remedy = "use the version that wrote it, or start a new run folder"
        if version == UNKEYED_VERSION:
            remedy = _BRING_UP
        raise LedgerError(f"{name}: expected ledger schema {SCHEMA_VERSION}, found {version}; {remedy}.")
    return Header(version=version, terms=terms, chain=Chain(bytes.fromhex(key)))


def verified_entries(rows: Iterable[Row], name: str, chain: Chain, head: Head) -> Iterator[Row]:
    """Every entry, its digest checked; LedgerError at the first that does not follow from the one before."""
    number, digest = head
    for row in rows:
        number, digest = number + 1, chain.link(digest, row[1], row[2])
        # No comparison in constant time: who can write entries reads the key, which lies beside them.
        if row[0] != number or row[3] != digest:
            raise LedgerError(f"{name}: entry {number} was changed or removed; restore the ledger from a copy.")
        yield row


def head_text(head: Head) -> bytes:
    """What the head's file holds: always as many bytes, so that it is written over in place."""
    return f"{head.number:020d} {head.digest}\n".encode()


def write_head(path: Path, head: Head) -> None:
    """Put the head beside a new ledger at ``path``, whole or not at all."""
    write_atomically(head_path(path), lambda unfinished: unfinished.write_bytes(head_text(head)), private=True)


def parse_head(path: Path, text: str) -> Head:
    """The head in the text of the file ``path``. LedgerError where it is damaged."""
    number, _, digest = text.strip().partition(" ")
    if not number.isdecimal() or len(digest) != 64:
        raise LedgerError(f"{path}: was changed or cut short; restore it and the ledger from one copy.")
    return Head(number=int(number), digest=digest)


def noted_head(path: Path) -> Head:
    """The last entry that the writer of ``path`` noted beside it. LedgerError if the file is missing or damaged."""
    try:
        # A byte that is no text is damage like any other, not an error of its own.
        text = head_path(path).read_text("ascii", "replace")
    except FileNotFoundError as error:
        if beside(path, ".lock").exists():
            raise LedgerError(f"{path}: was written by an earlier version; {_BRING_UP}.") from error
        raise LedgerError(
            f"{head_path(path)}: cannot be read ({error.strerror}), and says how many entries {path.name} must hold; "
            "restore both from one copy."
        ) from error
    except OSError as error:
        raise UnreachableError(
            f"{head_path(path)}: cannot be read now ({error.strerror}); look at its disk."
        ) from error
    return parse_head(head_path(path), text)


def schema_version(path: Path) -> int | None:
    """The schema of a ledger. LedgerError for a file that is none."""
    try:
        with closing(open_read_only(path)) as database:
            (version,) = database.execute("SELECT version FROM chain").fetchone() or (None,)
    except sqlite3.Error as error:
        raise reading_failed(path, error) from error
    return version if isinstance(version, int) else None


def complete_or_create(path: Path, terms: str, *, create: bool) -> None:
    """Make the ledger, whole or not at all, or finish what a crash interrupted. LedgerError where one was lost."""
    left, unfinished = ledger_files(path), beside(path, ".new")
    # A crash fell between head and rename: the head proves that the unfinished file is the one it belongs to.
    if left == [head_path(path)] and unfinished.exists() and noted_head(path) == _empty_head(unfinished):
        unfinished.replace(path)
        return
    if left or not create:
        others = f", although {', '.join(file.name for file in left)} is there" if left else ""
        raise LedgerError(f"{path}: is gone{others}; restore all its files from one copy, or start a new run folder.")
    # As long as the digest: RFC 2104, section 3, discourages shorter keys.
    key = secrets.token_bytes(32)
    write_unfinished(unfinished, terms, key, [])
    # The head comes first: a ledger without one is refused, and a head alone says that a ledger was there.
    write_head(path, Chain(key).start(terms))
    unfinished.replace(path)


def write_unfinished(
    path: Path, terms: str, key: bytes, entries: Iterable[tuple[str, str]], *, version: int = SCHEMA_VERSION
) -> Head:
    """A whole ledger with these entries (kind and payload) under a name that nobody opens; returns its head."""
    # A log left by a crash must not be replayed into the new file.
    for file in (path, beside(path, "-wal"), beside(path, "-shm")):
        file.unlink(missing_ok=True)
    # Made here and not by SQLite, which follows the umask and gives its log the rights of this file.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    chain = Chain(key)
    head = chain.start(terms)
    # Closed before it is renamed: that writes the log back, and the file is whole by itself.
    with closing(connect(path)) as database:
        database.execute("BEGIN IMMEDIATE")
        database.execute("CREATE TABLE chain (version INTEGER, terms TEXT, key TEXT)")
        database.execute("CREATE TABLE entries (number INTEGER PRIMARY KEY, kind TEXT, payload TEXT, digest TEXT)")
        database.execute("INSERT INTO chain VALUES (?, ?, ?)", (version, terms, key.hex()))
        for kind, text in entries:
            head = chain.after(head, kind, text)
            database.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", (head.number, kind, text, head.digest))
        database.execute("COMMIT")
    return head


def _empty_head(path: Path) -> Head:
    with closing(open_read_only(path)) as database:
        header = read_header(database, path)
    return header.chain.start(header.terms)
