"""Private records as voters: the nearest of a fresh secret Poisson sample vote for their own labels on a query.

Private-kNN (Zhu, Yu, Chandraker and Wang, CVPR 2020). For one query every record enters the sample independently with
``sampling_rate``; the ``num_neighbours`` nearest of the sample vote, or all of a smaller sample. Given the rest of the
sample, a record that enters it moves the counts by its own label, and by that of the one record that it displaces.
Where persons are protected they are sampled instead of records. A person's distance is that of its nearest record, and
only this record may vote: so a person moves the counts no more than a record does.

This holds to the last digit. Coordinates are integers, so that sums of their products are exact in ``float64`` and a
distance does not depend on the other records of a computation. Equal distances are ordered by a keyed hash of the
unit's identifier, then by label: functions of the record alone, whereas the numbers of equal records would change with
another record. So a part of the records gives its nearest, and the nearest of all parts are the nearest of all, however
the records are divided.

A sample is drawn when the counts are requested and is not kept: the same query gets another sample the next time, and a
caller releases from each at most once. Samples come from the operating system's entropy (``seed`` None), or for
experiments from a seed and the name of the query, independent of the number of parts.

This module knows no embeddings, noise or privacy costs. Shapes: N records, Q queries, D coordinates, K neighbours, C
classes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fairpate.data.dataset import whole_persons
from fairpate.nn.private_fit import OsRandomness, PoissonBatches, SeededRandomness
from fairpate.types import IntArray

Coordinates = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
LARGEST_COORDINATE = 2**19
MOST_COORDINATES = 2**12
"""D of them: every sum of products of two is then below 2^53, where ``float64`` stops being exact."""
_BLOCK, _QUERIES_AT_ONCE = 8192, 256
_NOBODY = -1
_RECORD = np.dtype([("squared", np.float64), ("order", np.uint64), ("label", np.int64)])


@dataclass(frozen=True, kw_only=True)
class Voters:
    """Records of one block: coordinates (N, D), labels (N,) and their order among equal distances (N,).

    ``person_N`` numbers the person of each record, from 0 on within the block, which has all records of each person;
    None: one record per person. ``number`` counts blocks over all records. ValueError for coordinates beyond
    ``LARGEST_COORDINATE``, or too many.
    """

    number: int
    coordinates_ND: Coordinates
    labels_N: IntArray
    order_N: npt.NDArray[np.uint64]
    person_N: IntArray | None = None

    def __post_init__(self) -> None:
        check_coordinates(self.coordinates_ND)

    def __len__(self) -> int:
        return len(self.labels_N)

    @cached_property
    def num_sampled(self) -> int:
        """The number of persons, or records, that are sampled independently."""
        return len(self) if self.person_N is None else int(self.person_N.max(initial=-1)) + 1

    def records_of(self, sampled: IntArray) -> IntArray:
        """Return the rows, ascending, of the sampled persons or records."""
        if self.person_N is None:
            return sampled
        is_sampled = np.zeros(self.num_sampled, dtype=np.bool_)
        is_sampled[sampled] = True
        return np.flatnonzero(is_sampled[self.person_N])

    def nearest_first(self, rows: IntArray, squared: Floats) -> IntArray:
        """Return positions in ``rows``, which have these squared distances: nearest first, one of each person."""
        # The last key counts first: distance, then the keyed hash, then the label.
        places = np.lexsort((self.labels_N[rows], self.order_N[rows], squared))
        if self.person_N is None:
            return places
        # The nearest record of each person, who moves the counts no more than a record does.
        _, first = np.unique(self.person_N[rows[places]], return_index=True)
        return places[np.sort(first)]


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """The nearest sampled records of each query (Q, K), nearest first: ``squared`` distance, ``order`` among equals and
    ``label``.

    The places of missing records have an infinite distance and no label.
    """

    records_QK: npt.NDArray[np.void]

    def counts(self, num_classes: int) -> IntArray:
        """Return ``votes_QC``, the number of these records that have each label."""
        labels_QK = self.records_QK["label"]
        votes_QC = np.zeros((len(labels_QK), num_classes), dtype=np.int64)
        queries, places = (labels_QK != _NOBODY).nonzero()
        # `+=` would count several records of one label once.
        np.add.at(votes_QC, (queries, labels_QK[queries, places]), 1)
        return votes_QC


def blocks_of(
    coordinates_ND: Coordinates,
    labels_N: IntArray,
    unit_ids: Sequence[str],
    *,
    key: bytes,
    person_N: IntArray | None = None,
    size: int = _BLOCK,
) -> Iterator[Voters]:
    """Yield the records in blocks of ``size``, or more where a person's records are kept together.

    ``key`` orders equal distances, and need not be secret; ``person_N`` numbers the person of each record.
    """
    digests = b"".join(hashlib.blake2b(name.encode(), key=key, digest_size=8).digest() for name in unit_ids)
    order_N = np.frombuffer(digests, dtype=np.uint64)
    parts: Iterable[slice | IntArray] = (slice(start, start + size) for start in range(0, len(labels_N), size))
    if person_N is not None:
        parts = whole_persons(person_N, size)
    for number, part in enumerate(parts):
        yield Voters(
            number=number,
            coordinates_ND=coordinates_ND[part],
            labels_N=labels_N[part],
            order_N=order_N[part],
            # Numbered from 0 within the block: its sampler tosses one coin for each of these numbers.
            person_N=None if person_N is None else np.unique(person_N[part], return_inverse=True)[1],
        )


def check_coordinates(coordinates_ND: Coordinates) -> None:
    """Raise ValueError unless distances between records with these coordinates are exact in ``float64``."""
    largest = np.abs(coordinates_ND).max(initial=0)
    if coordinates_ND.dtype.kind != "i" or largest > LARGEST_COORDINATE or coordinates_ND.shape[1] > MOST_COORDINATES:
        raise ValueError(
            f"Expected at most {MOST_COORDINATES} whole coordinates of at most {LARGEST_COORDINATE}, got "
            f"{coordinates_ND.shape[1]} of {coordinates_ND.dtype}, up to {largest}."
        )


class Sampler:
    """Draws secret Poisson samples of blocks of records; each call draws another sample."""

    def __init__(self, sampling_rate: float, seed: int | None = None) -> None:
        self._rate, self._seed = sampling_rate, seed
        self._randomness = OsRandomness()
        self._batches: dict[tuple[int, int], PoissonBatches] = {}
        # Threads that draw at the same time might get one sample twice.
        self._lock = threading.Lock()

    def rows(self, query: str, block: int, size: int) -> IntArray:
        """Return the rows, ascending, of a sample for one query of the ``size`` records or persons of a block."""
        with self._lock:
            if self._seed is not None:
                # Seven bytes, since torch takes seeds of 63 bits.
                digest = hashlib.blake2b(f"{self._seed} {block} {query}".encode(), digest_size=7).digest()
                batches = PoissonBatches(size, self._rate, SeededRandomness(int.from_bytes(digest)))
            else:
                # Kept from query to query: coins drawn beyond one sample are the start of the next.
                if (block, size) not in self._batches:
                    self._batches[block, size] = PoissonBatches(size, self._rate, self._randomness)
                batches = self._batches[block, size]
            rows: IntArray = batches.next().numpy()
        return rows


def nearest_of_samples(
    blocks: Sequence[Voters], queries_QD: Coordinates, names: Sequence[str], *, count: int, sampler: Sampler
) -> Nearest:
    """Return the ``count`` records nearest to each query, of a new sample for each; ``names`` seed the samples.

    It takes one matrix product per block and some hundred queries: memory does not grow with either.
    """
    check_coordinates(queries_QD)
    parts = []
    for start in range(0, len(names), _QUERIES_AT_ONCE):
        some = slice(start, start + _QUERIES_AT_ONCE)
        found = _nobody(len(names[some]), count)
        for block in blocks:
            found = merged([found, _nearest_in(block, queries_QD[some], names[some], count, sampler)])
        parts.append(found)
    return Nearest(records_QK=np.concatenate([part.records_QK for part in [_nobody(0, count), *parts]]))


def merged(parts: Sequence[Nearest]) -> Nearest:
    """Return the nearest of all parts: the same K records as one search through all of them would find."""
    count, all_Q = parts[0].records_QK.shape[1], np.concatenate([part.records_QK for part in parts], axis=1)
    # The same three keys as in `nearest_first`: a record that is not there, at an infinite distance, comes last.
    first = np.lexsort((all_Q["label"], all_Q["order"], all_Q["squared"]), axis=1)[:, :count]
    return Nearest(records_QK=np.take_along_axis(all_Q, first, axis=1))


def _nobody(num_queries: int, count: int) -> Nearest:
    absent = np.array((np.inf, 2**64 - 1, _NOBODY), dtype=_RECORD)
    return Nearest(records_QK=np.full((num_queries, count), absent))


def _nearest_in(block: Voters, queries_QD: Coordinates, names: Sequence[str], count: int, sampler: Sampler) -> Nearest:
    found = _nobody(len(names), count)
    queries, records = queries_QD.astype(np.float64), block.coordinates_ND.astype(np.float64)
    # |q|^2 - 2 qr + |r|^2 in floats, and exact: every part is a whole number below 2^53.
    squared_QN = queries @ (-2 * records.T)
    squared_QN += np.square(records).sum(axis=1)
    squared_QN += np.square(queries).sum(axis=1)[:, None]
    for query, name in enumerate(names):
        rows = block.records_of(sampler.rows(name, block.number, block.num_sampled))
        squared = squared_QN[query, rows]
        # Of persons all records are ordered: the nearest `count` records may be of fewer persons.
        if block.person_N is None and len(rows) > count:
            kept = squared <= np.partition(squared, count - 1)[count - 1]  # all of the farthest's equals
            rows, squared = rows[kept], squared[kept]
        rows = rows[block.nearest_first(rows, squared)[:count]]
        near = found.records_QK[query, : len(rows)]
        near["squared"], near["order"], near["label"] = (
            squared_QN[query, rows],
            block.order_N[rows],
            block.labels_N[rows],
        )
    return found
