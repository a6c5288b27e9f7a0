"""The chain of a ledger's entries, and the guarantees of every store of ledgers.

Each entry has a digest over its predecessor's, so that an edit, a gap or a lost end is noticed. The digest is keyed
(HMAC-SHA256; the key lies in the ledger), because entries hold votes and a plain digest would let its reader confirm a
guess about them. The chain starts from the terms of its ledger. :mod:`aggregator.ledger` gives entries their meaning.

Entries are kept in a store: a SQLite file (:mod:`aggregator.sqlite`) or ``postgresql://HOST/DATABASE#LEDGER``
(:mod:`aggregator.postgres`). Both have the same methods, described in :class:`aggregator.sqlite.SqliteStore`. Every
store guarantees the following, and ``tests/aggregator/test_stores.py`` tries each point on each store:

1. *Durable before visible.* Once ``append`` returns, the entry survives an end of the process, its machine or the
   database server at any instant. If it raises, the entry may be stored or not, and nothing more is accepted.
2. *In order.* Every entry is one transaction and follows the one before; none is changed or removed.
3. *One writer.* While a writer is open no other can open, unless it takes over (where the store allows it). From then
   on no write of the deposed writer succeeds, whenever it continues.
4. *Nothing in between.* Between a writer's reading of the store and its first entry, no other process adds an entry.
5. *Whole or not at all.* A ledger that is being made is not visible before it is complete, and one that was lost is
   never made again.
6. *The last entry is noted.* A ledger that lacks it is refused, and so is one with an edited entry.
7. *Readers do not disturb the writer.* They take no lock and write nothing.

A store notices if entries were removed, but not if an older copy replaced all of it. An *anchor* notes the last entry
out of reach of such a copy: in a file on another disk, or in another database. It holds the number and digest of an
entry, which reveal nothing without the ledger's key. It is written after the entry is durable and before an answer
leaves, and its number never decreases: a ledger that lacks a released answer also lacks the entry that its anchor
notes. If an anchor is missing, cannot be written or names another entry of the same number, nothing more is written.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from pydantic_core import from_json

from fairpate.types import UserError

# Raised with every change of entries or of the digest: a ledger of another version is refused, never converted.
SCHEMA_VERSION = 6
_BLOCK_BYTES = 64  # of SHA-256
_DATABASE = ("postgresql://", "postgres://")
EntryKind = Literal["reserve", "commit", "limit"]
Row: TypeAlias = tuple[int, EntryKind, str, str]
"""Number, kind, text and digest of an entry, as they are stored."""
Place: TypeAlias = Path | str
"""The place of a ledger or an anchor: a file, or a name in a database."""

# One spelling per value, because digests are over the text.
canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


class LedgerError(UserError):
    """The ledger cannot be trusted, written or shared, or belongs to other terms. What was committed stays in it."""


class UnreachableError(LedgerError):
    """The ledger or its anchor cannot be reached or read now; its content may be intact."""


class StoreError(OSError):
    """An entry could not be stored: it may be in the store or not. The message is the reason."""


class Head(NamedTuple):
    """The last entry of a chain: its number (0: none yet) and its digest."""

    number: int
    digest: str


@dataclass(frozen=True)
class Chain:
    """Computes the digests of entries, keyed with ``key`` of at most 64 bytes."""

    key: bytes

    def after(self, head: Head, kind: str, text: str) -> Head:
        """Return the head once this entry follows ``head``."""
        return Head(number=head.number + 1, digest=self.link(head.digest, kind, text))

    def link(self, previous: str, kind: str, text: str) -> str:
        """Return the digest of an entry after one with the digest ``previous``."""
        # Canonical JSON holds no line break, so the parts cannot be shifted into one another.
        message = f"{previous}\n{kind}\n{text}".encode()
        # HMAC-SHA256 (RFC 2104) with the key hashed once: half of the time that a long ledger takes to open.
        inner, outer = (part.copy() for part in self._keyed)
        inner.update(message)
        outer.update(inner.digest())
        return outer.hexdigest()

    @cached_property
    def _keyed(self) -> tuple[hashlib._Hash, hashlib._Hash]:
        assert len(self.key) <= _BLOCK_BYTES
        block = self.key.ljust(_BLOCK_BYTES, b"\0")
        return hashlib.sha256(bytes(b ^ 0x36 for b in block)), hashlib.sha256(bytes(b ^ 0x5C for b in block))


class Header(NamedTuple):
    """The beginning of a ledger: its schema, its terms as text, and the chain that starts from them."""

    version: int
    terms: str
    chain: Chain

    @classmethod
    def new(cls, terms: str) -> Header:
        """Return the header of a new ledger, with a random key."""
        # As long as the digest: RFC 2104, section 3, discourages shorter keys.
        return cls(SCHEMA_VERSION, terms, Chain(secrets.token_bytes(32)))

    @property
    def start(self) -> Head:
        """The head of the chain without entries."""
        return Head(number=0, digest=self.chain.link("", "terms", self.terms))


def known_header(name: str, version: Any, terms: Any, key: Any) -> Header:
    """Return the header with these stored values. LedgerError for another schema, and for a damaged key."""
    if version != SCHEMA_VERSION:
        raise LedgerError(
            f"{name}: expected ledger schema {SCHEMA_VERSION}, found {version}; start a new run folder, or use the "
            "version that wrote it."
        )
    if not isinstance(key, str) or not re.fullmatch(r"[0-9a-f]{64}", key):
        raise LedgerError(
            f"{name}: its key is damaged: expected 64 hexadecimal digits; restore the ledger from a copy."
        )
    return Header(version=version, terms=terms, chain=Chain(bytes.fromhex(key)))


def verified_entries(rows: Iterable[Row], name: str, chain: Chain, head: Head) -> Iterator[Row]:
    """Yield every entry after ``head``, its digest checked. LedgerError at the first that does not follow."""
    number, digest = head
    for row in rows:
        number, digest = number + 1, chain.link(digest, row[1], row[2])
        # No comparison in constant time: a process that can write entries can read the key in the same store.
        if row[0] != number or row[3] != digest:
            raise LedgerError(f"{name}: entry {number} was changed or removed; restore the ledger from a copy.")
        yield row


def entry_text(payload: Mapping[str, Any]) -> str:
    """Return the stored text of an entry. ValueError for text that no reader accepts: half of a UTF-16 pair."""
    text = canonical(payload)
    if "\\ud" in text:  # without this escape there is no half; parsing every entry would be slow
        from_json(text)
    return text


def entry_payload(name: str, number: int, text: str) -> dict[str, Any]:
    """Return the content of an entry of the ledger ``name``. LedgerError where it cannot be read."""
    try:
        payload: dict[str, Any] = from_json(text)
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{name}: entry {number} cannot be read; restore the ledger from a copy.") from error
    return payload


def is_database(place: Place) -> bool:
    """Return whether ``place`` names a ledger in a database. LedgerError where the driver is not installed."""
    if not isinstance(place, str) or not place.startswith(_DATABASE):
        return False
    try:
        importlib.import_module("psycopg")  # imported, not looked up: it may be installed and lack libpq
    except ImportError as error:
        raise LedgerError(
            f"A ledger in a database needs psycopg ({error}); run `pip install 'fairpate[postgresql]'`."
        ) from error
    return True


def shown(place: Place) -> str:
    """Return a place as messages name it: without a password."""
    if not isinstance(place, str) or "://" not in place:
        return str(place)
    scheme, _, rest = str(place).partition("://")
    address, hash_, name = rest.rpartition("#") if "#" in rest else (rest, "", "")
    before, _, options = address.partition("?")
    if "@" in options and "/" not in before:
        before = address  # the question mark may be part of a password
    # From the right: a password may hold an @, an address cannot.
    login, at, host = before.rpartition("@")
    user = login.partition("?")[0].partition(":")[0]
    return f"{scheme}://{user}{at}{host.partition('?')[0]}{hash_}{name}"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The content of a store: the header, entries that must be among the rows, and the rows in order."""

    header: Header
    noted: tuple[Head, ...]
    rows: Iterable[Row]
