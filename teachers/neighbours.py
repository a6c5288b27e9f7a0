"""Private records as voters: exact search for the nearest of a secret sample of them.

Private-kNN (Zhu, Yu, Chandraker and Wang, CVPR 2020): for each query every record enters a fresh secret sample
independently with ``sampling_rate``; the ``num_neighbours`` nearest records of the sample (all, if the sample is
smaller) vote for their own labels. Given the rest of the sample, a record that enters it changes the counts by its own
label, and by the label of the one record that it displaces. Where persons are protected, persons are sampled instead of
records. A person's distance is that of its nearest record, and only this record may vote: so a person changes the
counts no more than a record does.

This holds exactly, without rounding. Coordinates are integers, so that sums of their products are exact in ``float64``
and a distance does not depend on the other records of a computation. Equal distances are ordered by a keyed hash of the
record's (or person's) id, then by label. So the nearest records of all blocks, merged, are the same however the records
are divided into blocks. A sample is drawn when the counts are requested and is not stored: a caller releases at most
one result per sample. Samples come from the operating system's entropy (``seed`` None), or for experiments from a seed
and the query's name.

Shapes: N records, Q queries, D coordinates, K neighbours, C classes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fairpate.config import RayConfig
from fairpate.data.dataset import row_blocks
from fairpate.nn.private_fit import OsRandomness, PoissonBatches, SeededRandomness
from fairpate.types import IntArray
from teachers.ray_pool import ServingActors

Coordinates = npt.NDArray[np.int32]
Nearest = npt.NDArray[np.void]
"""The K nearest sampled records of each query, shape (Q, K), nearest first.

Fields: ``squared`` distance, ``order`` among equal distances, ``label``. If a sample has fewer than K records, the rest
has infinite distance and label -1.
"""
LARGEST_COORDINATE = 2**19
MOST_COORDINATES = 2**12
"""The largest D: with it every sum of products of two coordinates is below 2^53, up to which ``float64`` is exact."""
_BLOCK, _QUERIES_AT_ONCE = 8192, 256
_NOBODY = -1
_RECORD = np.dtype([("squared", np.float64), ("order", np.uint64), ("label", np.int64)])


@dataclass(frozen=True, kw_only=True)
class Voters:
    """The private records of one block, which vote with their labels: coordinates (N, D), labels (N,), and the order
    (N,) of records at equal distances.

    ``person_N`` numbers the person of each record from 0 within the block, which has all records of each of its
    persons; None: one record per person. ``number`` is the number of this block.
    """

    number: int
    coordinates_ND: Coordinates
    labels_N: IntArray
    order_N: npt.NDArray[np.uint64]
    person_N: IntArray | None = None

    @cached_property
    def num_sampled(self) -> int:
        """The number of units of this block that are sampled independently: persons, or records if ``person_N`` is
        None."""
        return len(self.labels_N) if self.person_N is None else int(self.person_N.max(initial=-1)) + 1

    def records_of(self, sampled: IntArray) -> IntArray:
        """Return the row numbers, ascending, of all records of the persons numbered ``sampled`` (if ``person_N`` is
        None, of the records with these numbers)."""
        return sampled if self.person_N is None else np.flatnonzero(np.isin(self.person_N, sampled))


def label_counts(nearest_QK: Nearest, num_classes: int) -> IntArray:
    """Return ``votes_QC``, the number of each query's nearest records that have each label."""
    labels_QK = nearest_QK["label"]
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
    """Yield private records in blocks of ``size``; a block is larger if one person's records would otherwise be in two
    blocks.

    ``key`` is the key of the hash that orders records at equal distances, and need not be secret; ``person_N`` numbers
    the person of each record. ValueError for coordinates beyond ``LARGEST_COORDINATE``, or more than
    ``MOST_COORDINATES`` of them.
    """
    digests = b"".join(hashlib.blake2b(name.encode(), key=key, digest_size=8).digest() for name in unit_ids)
    order_N = np.frombuffer(digests, dtype=np.uint64)
    for number, part in enumerate(row_blocks(len(labels_N), size, person_N)):
        check_coordinates(coordinates_ND[part])
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
            f"Expected at most {MOST_COORDINATES} integer coordinates per record, each at most {LARGEST_COORDINATE} in "
            f"absolute value; got {coordinates_ND.shape[1]} of type {coordinates_ND.dtype}, up to {largest}; "
            "reduce or scale them."
        )


@dataclass(eq=False)
class Sampler:
    """Draws secret Poisson samples from blocks of private records; every call draws a new sample."""

    rate: float
    seed: int | None = None
    _randomness: OsRandomness = field(default_factory=OsRandomness, init=False)
    _batches: dict[tuple[int, int], PoissonBatches] = field(default_factory=dict, init=False)
    # Threads that draw at the same time might get one sample twice.
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def rows(self, query: str, block: int, size: int) -> IntArray:
        """Draw a sample for one query from the ``size`` records or persons of block number ``block``. Return the
        numbers of the sampled records or persons within the block, in ascending order."""
        with self._lock:
            if self.seed is not None:
                # Seven bytes, since torch takes seeds of 63 bits.
                digest = hashlib.blake2b(f"{self.seed} {block} {query}".encode(), digest_size=7).digest()
                batches = PoissonBatches(size, self.rate, SeededRandomness(int.from_bytes(digest)))
            else:
                # Kept from query to query: coins drawn beyond one sample are the start of the next.
                if (block, size) not in self._batches:
                    self._batches[block, size] = PoissonBatches(size, self.rate, self._randomness)
                batches = self._batches[block, size]
            rows: IntArray = batches.next().numpy()
        return rows


def merged(parts: Sequence[Nearest]) -> Nearest:
    """Merge the results of a search in each block: return the K records nearest to each query among the records of all
    blocks. ``parts`` has the K nearest records (Q, K) of each block."""
    count, all_Q = parts[0].shape[1], np.concatenate(parts, axis=1)
    # The same three keys as in `_nearest_in`: a record that is not there, at an infinite distance, comes last.
    first = np.lexsort((all_Q["label"], all_Q["order"], all_Q["squared"]), axis=1)[:, :count]
    return np.take_along_axis(all_Q, first, axis=1)


def _nobody(num_queries: int, count: int) -> Nearest:
    return np.full((num_queries, count), np.array((np.inf, 2**64 - 1, _NOBODY), dtype=_RECORD))


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
        # With persons all records are ordered: the nearest `count` records may belong to fewer persons.
        if block.person_N is None and len(rows) > count:
            kept = squared <= np.partition(squared, count - 1)[count - 1]  # all of the farthest's equals
            rows, squared = rows[kept], squared[kept]
        # The last key counts first: distance, then the keyed hash, then the label.
        places = np.lexsort((block.labels_N[rows], block.order_N[rows], squared))
        if block.person_N is not None:
            # The nearest record of each person, who moves the counts no more than a record does.
            _, first = np.unique(block.person_N[rows[places]], return_index=True)
            places = places[np.sort(first)]
        rows = rows[places[:count]]
        near = found[query, : len(rows)]
        near["squared"] = squared_QN[query, rows]
        near["order"], near["label"] = block.order_N[rows], block.labels_N[rows]
    return found


_TIMEOUT_S = 300.0


@dataclass(eq=False, repr=False)
class LocalNeighbourhood:
    """Private records, all in this process, as voters: for each query, the ``count`` nearest records in a random sample
    vote."""

    blocks: Sequence[Voters]
    _: KW_ONLY
    count: int
    sampler: Sampler

    def nearest(self, queries_QD: Coordinates, names: Sequence[str]) -> Nearest:
        """Draw a new sample of the records for each query, and return the ``count`` sampled records nearest to it.

        ``names`` are the names of the queries, from which seeded samples are derived. Distances are computed for one
        block and 256 queries at a time, so that memory does not grow with the number of either.
        """
        check_coordinates(queries_QD)
        parts = [_nobody(0, self.count)]
        for start in range(0, len(names), _QUERIES_AT_ONCE):
            some = slice(start, start + _QUERIES_AT_ONCE)
            found = _nobody(len(names[some]), self.count)
            for block in self.blocks:
                found = merged([found, _nearest_in(block, queries_QD[some], names[some], self.count, self.sampler)])
            parts.append(found)
        return np.concatenate(parts)

    def are_answering(self) -> bool:
        """Return True, as this process always answers."""
        return True

    def close(self) -> None:
        """Drop the private records, so that their memory is freed."""
        self.blocks = []


class RayNeighbourhood(ServingActors):
    """Private records on a bounded number of Ray actors, as voters: for each query, the ``count`` nearest records in a
    random sample vote.

    Use it inside :func:`teachers.ray_pool.start_ray`. Each actor samples its own records and returns the nearest of
    them; the overall nearest are found among these. A restarted actor draws new samples; nothing computed from the lost
    ones was released.
    """

    def __init__(
        self, blocks: Sequence[Voters], *, count: int, sampling_rate: float, seed: int | None, config: RayConfig
    ) -> None:
        def searcher(own: Sequence[Voters]) -> Callable[..., Nearest]:
            # The sampler is made in the actor: its lock and its state belong to one process.
            return LocalNeighbourhood(own, count=count, sampler=Sampler(sampling_rate, seed)).nearest

        super().__init__(searcher, blocks, config, num_gpus=0)

    def nearest(self, queries_QD: Coordinates, names: Sequence[str]) -> Nearest:
        """Draw a new sample of the records for each query, and return the ``count`` sampled records nearest to it.
        ``names`` are the queries' names.

        PoolError unless all actors answer in time.
        """
        return merged(self.ask(queries_QD, names, timeout_s=_TIMEOUT_S, what="private records voted"))


Neighbourhood = LocalNeighbourhood | RayNeighbourhood
