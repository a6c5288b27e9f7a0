"""Which record goes where: private, public, validation or test.

Units are ranked by a keyed hash of their name; the lowest hashes become public, the next validation, the next test, and
all others private. Since the private records are the tail of the ranking, adding or removing one moves no other record;
and since no group enters the name of a unit, changing a group moves none at all. The seed is public. A unit is one
record, records that nothing but the group tells apart, or all records of one person: it is never parted.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fairpate.data.dataset import Dataset, Split
from fairpate.data.entry import ORIGINS, DataError, DatasetEntry, DataSettingsError, Origin, Records
from fairpate.data.identity import keyed_hash
from fairpate.data.record_names import Names, as_names
from fairpate.later import torch

PERMITTED: dict[str, frozenset[Origin]] = {
    "public": frozenset({"any", "training", "held_out", "public"}),
    "validation": frozenset({"any", "training", "held_out", "validation"}),
    "test": frozenset({"any", "held_out", "test"}),
    "private": frozenset({"any", "training", "private"}),
}
SET_ASIDE: dict[str, frozenset[Origin]] = {
    "public": frozenset({"public"}),
    "validation": frozenset({"validation"}),
    "test": frozenset({"held_out", "test"}),
}
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class SplitSizes:
    """Records per split; the private split takes the rest.

    Null takes every record that was set aside for the split. Sizes are lower bounds: whole units are taken until each
    is reached. No size may depend on the records, or one of them would move others.
    """

    num_public: int | None
    num_validation: int | None
    num_test: int | None


def divide(records: Records, sizes: SplitSizes, *, seed: int) -> dict[str, Split]:
    """The four splits by name, each in the order of the file; :class:`DataError` where a size cannot be met."""
    ids = records.records.record_id
    wanted_of = {"public": sizes.num_public, "validation": sizes.num_validation, "test": sizes.num_test}
    place_of = {origin: place for place, origin in enumerate(ORIGINS)}
    found = records.origins or itertools.repeat(ORIGINS[0], len(ids))
    origins = np.fromiter(map(place_of.__getitem__, found), np.int8, len(ids))
    ranks = None
    # Hashing every name is slow, and only a part that is drawn needs the ranking.
    if any(wanted_of.values()):
        ranks = _rank(records.person_ids or records.records.unit_id, seed=seed)
    free = np.ones(len(ids), dtype=bool)
    indices = {}
    for name, wanted in wanted_of.items():
        alone = [place_of[origin] for origin in SET_ASIDE[name]]
        own = name != "test" and bool(np.isin(origins, alone).any())  # files of its own: nothing else is taken
        permitted = alone if own or wanted is None else [place_of[origin] for origin in PERMITTED[name]]
        allowed = free & np.isin(origins, permitted)
        chosen = allowed if wanted is None else _lowest(allowed, ranks, wanted, name)
        indices[name] = np.flatnonzero(chosen)
        free &= ~chosen
    indices["private"] = np.flatnonzero(free & np.isin(origins, [place_of[origin] for origin in PERMITTED["private"]]))
    return {name: _taken(records, torch.from_numpy(index)) for name, index in indices.items()}


def _taken(records: Records, index: torch.Tensor) -> Split:
    mapped = records.pixels or records.mapped
    if mapped is None:
        return records.records.take(index)
    return records.records.take_with(mapped.rows(index), index)


def with_persons(records: Records) -> Records:
    """The same records, all of a person's protected together. :class:`DataError` for one without a person."""
    if records.person_ids is None:
        return records
    if missing := as_names(records.person_ids).num_empty:
        raise DataError(
            f"Expected a person for every record, got {missing:,} without; complete the column that names them, or set "
            "data.unit=record to protect each record by itself."
        )
    return replace(records, records=replace(records.records, person_id=records.person_ids))


def check_persons(splits: Mapping[str, Split]) -> None:
    """:class:`DataError` where a person of the private split has records in another one."""
    private = as_names(splits["private"].person_id)
    for name, split in splits.items():
        if name != "private" and (parted := as_names(split.person_id).num_shared(private)):
            raise DataError(
                f"Expected a person's records in one split, got {parted:,} with some in the private and some in the "
                f"{name} split, because the publisher's division parts them; set data.unit=record, which protects "
                "each record by itself."
            )


def without_order(split: Split, *, seed: int, secret: bytes) -> Split:
    """The same records by a keyed hash of their unit, those of one unit as a permutation from ``secret`` has them, and
    under names that are hashes of their own, keyed by ``secret``.

    For methods that protect the attribute alone: files are often sorted by it, so neither the place of a record nor
    which of several equal ones has which name may follow the file. Nor may a name be read: it may count the rows of
    such a file, or tell a date on which one group was recorded.
    """
    hashes_N = keyed_hash(split.unit_id, seed=seed, purpose="order")
    drawn_N = np.random.default_rng(np.frombuffer(secret, dtype=np.uint8)).permutation(len(split))
    # Stable: of one unit, the names in the order of the file beside the records in the order that was drawn.
    names = as_names(split.record_id).take(np.argsort(hashes_N, kind="stable"))
    hidden = (hashlib.blake2b(name.encode(), key=secret, digest_size=10).hexdigest() for name in names)
    records = split.take(torch.from_numpy(np.lexsort((drawn_N, hashes_N))))
    return replace(records, record_id=Names(f"record-{digits}" for digits in hidden), unit_id=records.unit_id)


def default_size(split: str, entry: DatasetEntry, records: Records) -> int | None:
    """What ``entry`` declares; else null (take what was set aside), or a quarter of the publisher's count to test."""
    declared: int | None = getattr(entry, f"num_{split}")
    origins = set(records.origins or ("any",))
    own = not SET_ASIDE[split].isdisjoint(origins) or PERMITTED[split].isdisjoint(origins)
    return declared if own or declared is not None else entry.public_rows // 4


def _rank(units: Iterable[str], *, seed: int) -> npt.NDArray[np.int64]:
    """Each record's place in the ranking of its unit; records of one unit share a place.

    So would units of one hash: they go together, and no other record moves.
    """
    place: npt.NDArray[np.int64] = np.unique(keyed_hash(units, seed=seed, purpose="split"), return_inverse=True)[1]
    return place


def _lowest(allowed: Mask, ranks: npt.NDArray[np.int64] | None, wanted: int, name: str) -> Mask:
    """The records of the lowest ranks until ``wanted`` are reached, never parting a unit."""
    chosen = np.zeros(len(allowed), dtype=bool)
    if wanted == 0 or ranks is None:
        return chosen
    available = int(allowed.sum())
    if wanted > available:
        raise DataSettingsError(f"data.num_{name}: expected at most {available} records left for it, got {wanted}.")
    # Records of one unit share a rank, so that all of the last unit are taken.
    last = np.sort(ranks[allowed])[wanted - 1]
    return np.asarray(allowed & (ranks <= last))


def check_members(dataset: Dataset) -> None:
    """:class:`DataError` unless each split has every group, and the private split every class.

    Validation and test records may be none at all.
    """
    for name, split in dataset.splits.items():
        if len(split) == 0 and name in ("validation", "test"):
            continue
        _require(split.z, dataset.group_names, f"group of {dataset.sensitive_attribute}", name)
    _require(dataset.private.y, dataset.label_names, "class", "private")


def _require(codes: torch.Tensor, names: tuple[str, ...], what: str, split: str) -> None:
    counts = torch.bincount(codes, minlength=len(names)).tolist()
    empty = [name for name, count in zip(names, counts, strict=True) if count == 0]
    if empty:
        raise DataError(
            f"The {split} split has no member of {what} {', '.join(empty)}; "
            "where a file names the split, add some to it, or leave out of the declaration what no record "
            "has; where it is drawn, choose larger splits (data.num_public, num_validation, num_test) "
            "or another data.seed."
        )
