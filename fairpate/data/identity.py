"""Names for records, and keyed hashes of those names.

A record's name depends on the record alone, never on the rows around it. Everything that is drawn for a record (its
split, its colour) is a keyed hash of its name, so adding or removing another record changes nothing for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

FIELD_SEPARATOR = "\x1f"


def content_ids(prefix: str, rows: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """``prefix-<sha256 of the row's fields>`` for each row; exact duplicates are counted: ``-1``, ``-2``, ...

    Duplicates are interchangeable, so the counter does not depend on row order either.
    """
    seen: dict[str, int] = {}
    names = []
    for row in rows:
        digest = hashlib.sha256(FIELD_SEPARATOR.join(row).encode()).hexdigest()[:20]
        copies = seen.get(digest, 0)
        names.append(f"{prefix}-{digest}-{copies}" if copies else f"{prefix}-{digest}")
        seen[digest] = copies + 1
    return tuple(names)


def keyed_hash(names: Iterable[str], *, seed: int, purpose: str) -> npt.NDArray[np.uint64]:
    """64 bits per name, keyed by a public ``seed`` and ``purpose``: uniform, and independent between purposes."""
    key = hashlib.sha256(f"{purpose}:{seed}".encode()).digest()
    keyed = hashlib.blake2b(key=key, digest_size=8)
    digests = bytearray()
    for name in names:
        hasher = keyed.copy()
        hasher.update(name.encode())
        digests += hasher.digest()
    return np.frombuffer(bytes(digests), dtype="<u8").astype(np.uint64)


def keyed_uniform(names: Iterable[str], *, seed: int, purpose: str) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per name, from :func:`keyed_hash`."""
    # The top 53 bits, so that rounding never reaches 1.
    return (keyed_hash(names, seed=seed, purpose=purpose) >> np.uint64(11)).astype(np.float64) / 2.0**53
