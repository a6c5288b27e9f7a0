"""Names for records, and keyed hashes of those names.

A record's name depends on the record alone, never on the rows around it, and never on its sensitive attribute: methods
that protect the attribute alone publish names, and divide records by them. Records that are equal but for the attribute
are one *unit*: what is drawn for a record (its split, its teacher) is a keyed hash of its unit, so adding, removing or
changing another record changes nothing for it. Only the counter that tells the members of a unit apart may shift.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fairpate.data.record_names import Names, as_names

# A control character, so that fields of text do not run into each other.
FIELD_SEPARATOR = "\x1f"


def content_units(prefix: str, columns: Sequence[pa.Array]) -> Names:
    """``prefix-<sha256 of the row's fields>`` for each row of these columns of text."""
    rows = pc.binary_join_element_wise(*columns, FIELD_SEPARATOR).to_pylist()
    # 80 bits: two of a million different rows share a name with a probability below 1e-12.
    return Names(f"{prefix}-{hashlib.sha256(row.encode()).hexdigest()[:20]}" for row in rows)


def counted(units: Iterable[str]) -> Names:
    """A unique name per record: that of its unit, with ``-1``, ``-2``, ... behind the first of each unit."""
    names, seen = as_names(units), Counter[str]()
    name_of = {}
    for row in names.repeated().tolist():
        seen[names[row]] += 1
        name_of[row] = f"{names[row]}-{seen[names[row]]}"
    return Names(name_of.get(row, name) for row, name in enumerate(names)) if name_of else names


def keyed_hash(names: Iterable[str], *, seed: int, purpose: str) -> npt.NDArray[np.uint64]:
    """64 bits per name, keyed by a public ``seed`` and ``purpose``: uniform, and independent between purposes."""
    key = hashlib.sha256(f"{purpose}:{seed}".encode()).digest()
    # Copied for each name: setting the key is the slow part.
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
