"""Which teacher learns from which record: a keyed hash of the identifier of the record's unit, or of its person.

PATE's guarantee (Papernot et al. 2017, arXiv:1610.05755) needs one record to touch one teacher. The teacher of a record
is ``BLAKE2b(key, unit_id) mod num_teachers``: it does not depend on any other record, so adding or removing a record
changes exactly one shard. Where persons are protected, their identifiers stand for those of units: all records of a
person reach one teacher, and the guarantee holds for persons. A unit's identifier says nothing about the sensitive
attribute, so changing an attribute moves no record. Shards are ragged and may be empty; nothing here sees features or
labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
_MIN_KEY_BYTES, _MAX_KEY_BYTES = 16, 64
_TRIM = b"fairpate trim"


def shard_key(seed: int) -> bytes:
    """A 32-byte sharding key from a run's seed. The seed decides the shards; the guarantee does not need it secret."""
    return hashlib.blake2b(f"fairpate shard key {seed}".encode(), digest_size=32).digest()


def assign_teachers(unit_ids: Sequence[str], num_teachers: int, key: bytes) -> IntArray:
    """The teacher, in ``range(num_teachers)``, of each record; shape (N,). Records of one unit have one teacher.

    ValueError for fewer than one teacher or a key outside 16..64 bytes.
    """
    if num_teachers < 1:
        raise ValueError(f"Expected num_teachers >= 1, got {num_teachers}.")
    if not _MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES:
        raise ValueError(f"Expected a key of {_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} bytes, got {len(key)}.")
    digests = (hashlib.blake2b(unit_id.encode(), key=key, digest_size=8).digest() for unit_id in unit_ids)
    # Of 64 bits: no teacher is likelier than another by more than num_teachers / 2^64.
    return np.array([int.from_bytes(digest) % num_teachers for digest in digests], dtype=np.int64)


def trim_shards(rows_T: Sequence[IntArray], record_ids: Sequence[str], max_size: int, key: bytes) -> list[IntArray]:
    """The shards with at most ``max_size`` rows each: those whose identifiers come first by a keyed hash, ascending.

    Which rows stay depends on their own shard only. The hash is apart from the one that assigns records to teachers.
    """

    def rank(row: int) -> bytes:
        return hashlib.blake2b(record_ids[row].encode(), key=key, person=_TRIM, digest_size=16).digest()

    def trim(rows: IntArray) -> IntArray:
        return rows if len(rows) <= max_size else np.sort(np.array(sorted(rows.tolist(), key=rank)[:max_size]))

    return [trim(rows) for rows in rows_T]


def shard_rows(teacher_N: IntArray, num_teachers: int) -> list[IntArray]:
    """The rows of each teacher's shard, ascending; one array per teacher, empty shards included."""
    # Stable: a teacher's rows stay in their order.
    order = np.argsort(teacher_N, kind="stable")
    sizes = np.bincount(teacher_N, minlength=num_teachers)
    return list(np.split(order, np.cumsum(sizes)[:-1]))
