"""Neighbours that vote: what one record moves, exact merging, fresh samples, by brute force on tiny data sets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from divergences import delta_at
from method_kinds import quick_and_slow

from fairpate.privacy.accountant import event_pld
from fairpate.privacy.mechanism_events import NeighbourVotes
from fairpate.types import IntArray
from teachers.neighbours import (
    LARGEST_COORDINATE,
    MOST_COORDINATES,
    Coordinates,
    LocalNeighbourhood,
    Nearest,
    Sampler,
    Voters,
    blocks_of,
    label_counts,
    merged,
)

pytestmark = pytest.mark.usefixtures("light_runs")

KEY = bytes(32)
Record = tuple[tuple[int, ...], int, str]  # coordinates, label, name


def blocks(records: Sequence[Record], *, size: int = 100) -> list[Voters]:
    places = np.array([place for place, _, _ in records], dtype=np.int32)
    labels = np.array([label for _, label, _ in records], dtype=np.int64)
    return list(blocks_of(places, labels, [name for *_, name in records], key=KEY, size=size)) if records else []


def everybody(records: Sequence[Record], queries: Coordinates, count: int, *, size: int = 100) -> Nearest:
    """Where all are sampled, ``records`` are the sample."""
    names = [str(number) for number in range(len(queries))]
    return LocalNeighbourhood(blocks(records, size=size), count=count, sampler=Sampler(1.0)).nearest(queries, names)


@cache
def order(name: str) -> int:
    (block,) = blocks([((0,), 0, name)])
    return int(block.order_N[0])


def by_hand(records: Sequence[Record], query: tuple[int, ...], count: int) -> list[int]:
    """Labels of the nearest, by whole numbers and sorting."""

    def rank(record: Record) -> tuple[int, int, int]:
        return sum((a - b) ** 2 for a, b in zip(record[0], query, strict=True)), order(record[2]), record[1]

    return [label for _, label, _ in sorted(records, key=rank)[:count]]


def some_records(generator: np.random.Generator, number: int, *, reach: int = 3, width: int = 2) -> list[Record]:
    """Few places, so that many distances are equal."""
    places = generator.integers(-reach, reach + 1, (number, width)).tolist()
    labels = generator.integers(0, 3, number).tolist()
    return [(tuple(place), label, f"record {i}") for i, (place, label) in enumerate(zip(places, labels, strict=True))]


@pytest.mark.parametrize("count", quick_and_slow([1, 2, 3], [3]))
def test_a_record_enters_and_displaces_one_other_and_nothing_else(count: int) -> None:
    """All records against all samples of the others: sampled or not, near or far, fewer than k, of equal labels."""
    generator = np.random.default_rng(count)
    seen = set()
    for _ in range(5):
        records = some_records(generator, 5)
        query = np.array([generator.integers(-3, 4, 2)], dtype=np.int32)
        for one in records:
            others = [record for record in records if record != one]
            for chosen in itertools.product([False, True], repeat=len(others)):
                sample = list(itertools.compress(others, chosen))
                before, after = (label_counts(everybody(s, query, count), 3)[0] for s in (sample, [*sample, one]))
                moved = after - before
                named = by_hand(sample, tuple(query[0]), count), by_hand([*sample, one], tuple(query[0]), count)
                assert before.tolist() == np.bincount(named[0], minlength=3).tolist()
                assert after.tolist() == np.bincount(named[1], minlength=3).tolist()
                assert abs(int(after.max()) - int(before.max())) <= 1
                if len(sample) < count:
                    assert moved.tolist() == [int(label == one[1]) for label in range(3)]
                else:
                    assert moved.sum() == 0
                    assert np.square(moved).sum() in (0, 2)
                    assert moved[one[1]] >= 0
                seen.add((len(sample) < count, int(np.square(moved).sum())))
    assert {(True, 1), (False, 0), (False, 2)} <= seen


RATE, STDDEV, REACH = 0.3, 1.0, 6
VALUES = np.arange(-REACH, REACH + 4)


def masses(votes_C: IntArray) -> npt.NDArray[np.float64]:
    """The joint distribution of noisy counts, flat."""
    joint = np.ones(1)
    for votes in votes_C:
        weights = np.exp(-((VALUES - votes) ** 2.0) / (2 * STDDEV**2))
        joint = np.multiply.outer(joint, weights / weights.sum()).ravel()
    return joint


def told(records: Sequence[Record], count: int) -> npt.NDArray[np.float64]:
    """The same over all samples."""
    total = np.zeros(1)
    for chosen in itertools.product([False, True], repeat=len(records)):
        chance = math.prod(RATE if is_in else 1 - RATE for is_in in chosen)
        sample = list(itertools.compress(records, chosen))
        total = total + chance * masses(label_counts(everybody(sample, np.zeros((1, 1), dtype=np.int32), count), 2)[0])
    return total


@pytest.mark.parametrize("count", quick_and_slow([1, 2], [2]))
def test_no_neighbour_of_a_small_data_set_tells_more_than_is_priced(count: int) -> None:
    """The exact distribution of all noisy counts, over every sample, with one record and without it."""
    event = event_pld(NeighbourVotes(count=1, noise_stddev_votes=STDDEV, sampling_rate=RATE), 1e-3)
    assert event is not None
    kinds: list[Record] = [((place,), label, f"{place} {label}") for place in (1, 2) for label in (0, 1)]
    worst = 0.0
    for others, (place, label, _) in itertools.product(itertools.combinations(kinds, 2), kinds):
        p, q = told([*others, (place, label, "one")], count), told(others, count)
        for epsilon in (0.0, 0.1, 0.5, 1.0):
            bound = delta_at(event, epsilon)
            for left, right in ((p, q), (q, p)):
                divergence = np.maximum(left - math.exp(epsilon) * right, 0).sum()
                assert divergence <= bound + 1e-4
                worst = max(worst, divergence / bound)
    assert worst > 0.5, "the price is of what happens"


def test_equal_records_of_one_unit_go_by_label_wherever_they_stand() -> None:
    """Rows that only their labels tell apart have one name; a counter in it would change with each of them."""
    twins: list[Record] = [((1, 1), label, "one name") for label in (2, 0, 1, 0)]
    query = np.zeros((1, 2), dtype=np.int32)
    for size, arranged in itertools.product((1, 2, 100), itertools.permutations(twins)):
        assert everybody(list(arranged), query, 3, size=size)["label"].tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("count", quick_and_slow([1, 7, 40, 200], [40]))
def test_blocks_and_parts_find_what_one_search_finds(count: int) -> None:
    generator = np.random.default_rng(3)
    records = some_records(generator, 120, reach=4, width=3)
    queries = generator.integers(-4, 5, (9, 3)).astype(np.int32)
    whole = everybody(records, queries, count)
    expected = [np.bincount(by_hand(records, tuple(query), count), minlength=3) for query in queries.tolist()]
    np.testing.assert_array_equal(label_counts(whole, 3), expected)
    names = [str(number) for number in range(len(queries))]
    for size in (1, 5, 64):
        found = everybody(records, queries, count, size=size)
        np.testing.assert_array_equal(found["label"], whole["label"])
        np.testing.assert_array_equal(found["squared"], whole["squared"])
        for num_parts in (2, 3):
            pieces = [blocks(records, size=size)[part::num_parts] for part in range(num_parts)]
            parts = [
                LocalNeighbourhood(piece, count=count, sampler=Sampler(1.0)).nearest(queries, names)
                for piece in pieces[::-1]
            ]
            np.testing.assert_array_equal(merged(parts)["label"], whole["label"])


def test_seeded_samples_do_not_depend_on_how_blocks_are_dealt() -> None:
    generator = np.random.default_rng(4)
    records, queries = some_records(generator, 200, width=3), generator.integers(-4, 5, (50, 3)).astype(np.int32)
    names = [str(number) for number in range(50)]
    every = blocks(records, size=16)

    def found(pieces: Sequence[Sequence[Voters]], seed: int = 5) -> IntArray:
        parts = [
            LocalNeighbourhood(piece, count=6, sampler=Sampler(0.2, seed)).nearest(queries, names)
            for piece in pieces
            if piece
        ]
        return label_counts(merged(parts), 3)

    once = found([every])
    np.testing.assert_array_equal(found([every[1::2], every[::2]]), once)
    alone = LocalNeighbourhood(every, count=6, sampler=Sampler(0.2, 5)).nearest(queries[7:8], ["7"])
    np.testing.assert_array_equal(label_counts(alone, 3)[0], once[7])
    assert (found([every], seed=6) != once).any()


@pytest.mark.parametrize("factor", [2 / 3, 1.0, 3 / 2])
@pytest.mark.parametrize("seed", [None, 8])
def test_every_record_is_sampled_with_the_rate_that_is_priced(factor: float, seed: int | None) -> None:
    """Bounds that chance passes once in a million: a sample without a seed is another one each time."""
    rate, size, queries = 0.2, 50, 600
    sampler = Sampler(factor * rate, seed)
    chosen_QN = np.zeros((queries, size))
    for query in range(queries):
        chosen_QN[query, sampler.rows(str(query), 0, size)] = 1
    deviation = math.sqrt(rate * (1 - rate) / (queries * size))
    assert (abs(chosen_QN.mean() - rate) < 5.5 * deviation) == (factor == 1)
    if factor == 1:
        assert np.abs(chosen_QN.mean(axis=0) - rate).max() < 6.5 * math.sqrt(rate * (1 - rate) / queries)
        among_records = np.corrcoef(chosen_QN.T) - np.eye(size)
        assert np.abs(among_records).max() < 6.5 / math.sqrt(queries), "records enter independently"
        among_queries = np.corrcoef(chosen_QN[:-1].ravel(), chosen_QN[1:].ravel())[0, 1]
        assert abs(among_queries) < 5.5 / math.sqrt(queries * size), "each query has a sample of its own"


def test_the_same_query_gets_another_sample_each_time_unless_seeded() -> None:
    rows = [Sampler(0.5).rows("query", 0, 200).tolist() for _ in range(2)]
    assert rows[0] != rows[1]
    one = Sampler(0.5)
    assert one.rows("query", 0, 200).tolist() != one.rows("query", 0, 200).tolist()
    seeded = Sampler(0.5, 1)
    assert seeded.rows("query", 0, 200).tolist() == seeded.rows("query", 0, 200).tolist()
    assert seeded.rows("query", 0, 200).tolist() != seeded.rows("other", 0, 200).tolist()
    assert seeded.rows("query", 0, 200).tolist() != seeded.rows("query", 1, 200).tolist()


def test_asked_again_a_neighbourhood_gives_the_counts_of_another_sample() -> None:
    generator = np.random.default_rng(9)
    every = blocks(some_records(generator, 300))
    queries = np.zeros((40, 2), dtype=np.int32)
    found = LocalNeighbourhood(every, count=30, sampler=Sampler(0.3))
    counts_QC = label_counts(found.nearest(queries, ["same"] * 40), 3)
    assert (counts_QC.sum(axis=1) == 30).all()
    assert len(np.unique(counts_QC, axis=0)) > 10


def test_a_small_sample_votes_whole_and_an_empty_one_not_at_all() -> None:
    records, query = some_records(np.random.default_rng(0), 4), np.zeros((1, 2), dtype=np.int32)
    assert label_counts(everybody(records, query, 9), 3).sum() == 4
    assert label_counts(everybody(records[:0], query[:, :1], 9), 3).tolist() == [[0, 0, 0]]
    assert label_counts(everybody(records, query[:0], 9), 3).shape == (0, 3)
    rare = LocalNeighbourhood(blocks(records), count=2, sampler=Sampler(1e-12)).nearest(query, ["q"])
    assert label_counts(rare, 3).sum() == 0


def test_distances_are_exact_where_sums_are_largest() -> None:
    """A difference in the last digit of one coordinate decides."""
    far = (-LARGEST_COORDINATE,) * MOST_COORDINATES
    records: list[Record] = [(far, 0, "far"), ((*far[:-1], 1 - LARGEST_COORDINATE), 1, "nearer by a step")]
    query = np.full((1, MOST_COORDINATES), LARGEST_COORDINATE, dtype=np.int32)
    for pair in (records, records[::-1]):
        found = everybody(pair, query, 2)
        assert found["label"].tolist() == [[1, 0]]
        assert found["squared"][0, 1] == MOST_COORDINATES * (2 * LARGEST_COORDINATE) ** 2


@pytest.mark.parametrize(
    "bad",
    [
        np.array([[LARGEST_COORDINATE + 1]], dtype=np.int32),
        np.array([[0.5]]),
        np.zeros((1, MOST_COORDINATES + 1), dtype=np.int32),
    ],
    ids=["far", "fraction", "many"],
)
def test_coordinates_whose_distances_might_be_rounded_are_refused(bad: Coordinates) -> None:
    with pytest.raises(ValueError, match=f"at most {MOST_COORDINATES} integer coordinates"):
        everybody([((0,), 0, "one")], bad, 1)


def blocks_of_persons(records: Sequence[Record], persons: Sequence[int], *, size: int = 100) -> list[Voters]:
    places = np.array([place for place, _, _ in records], dtype=np.int32).reshape(len(records), -1)
    labels, names = np.array([label for _, label, _ in records], dtype=np.int64), [name for *_, name in records]
    numbers = np.array(persons, dtype=np.int64)
    return list(blocks_of(places, labels, names, key=KEY, person_N=numbers, size=size))


OWNERS = [0, 0, 0, 0, 1, 2, 2, 3, 3]


def of_persons(records: Sequence[Record], sample: set[int], query: Coordinates, count: int) -> IntArray:
    """The counts where these persons are the sample."""
    kept = [place for place, person in enumerate(OWNERS) if person in sample]
    if not kept:
        return np.zeros(3, dtype=np.int64)
    found = blocks_of_persons([records[place] for place in kept], [OWNERS[place] for place in kept])
    return label_counts(LocalNeighbourhood(found, count=count, sampler=Sampler(1.0)).nearest(query, ["0"]), 3)[0]


def of_persons_by_hand(records: Sequence[Record], sample: set[int], query: tuple[int, ...], count: int) -> list[int]:
    """By sorting the records of each, then the nearest of each."""
    nearest = []
    for person in sample:
        own = [record for record, owner in zip(records, OWNERS, strict=True) if owner == person]
        distances = [sum((a - b) ** 2 for a, b in zip(place, query, strict=True)) for place, _, _ in own]
        ranks = [(distance, order(name)) for distance, (_, _, name) in zip(distances, own, strict=True)]
        nearest.append(own[ranks.index(min(ranks))])
    return np.bincount(by_hand(nearest, query, count), minlength=3).tolist()


@pytest.mark.parametrize("count", quick_and_slow([1, 2, 3], [3]))
def test_a_person_votes_by_the_nearest_of_their_records_and_moves_what_a_record_moves(count: int) -> None:
    """Brute force: every person added to every sample of the others."""
    generator = np.random.default_rng(count)
    for _ in range(8):
        records = some_records(generator, len(OWNERS))
        query = generator.integers(-3, 4, (1, 2)).astype(np.int32)
        asked = tuple(query[0].tolist())
        for one, chosen in itertools.product(range(4), itertools.product([False, True], repeat=3)):
            others = set(itertools.compress(sorted({0, 1, 2, 3} - {one}), chosen))
            before, after = (of_persons(records, sample, query, count) for sample in (others, others | {one}))
            assert before.tolist() == of_persons_by_hand(records, others, asked, count)
            assert after.tolist() == of_persons_by_hand(records, others | {one}, asked, count)
            assert np.square(after - before).sum() in ((1,) if len(others) < count else (0, 2))


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_blocks_hold_whole_persons_and_find_the_same_neighbours(size: int) -> None:
    generator = np.random.default_rng(0)
    records, persons = some_records(generator, 40, reach=20), generator.integers(0, 11, 40).tolist()
    found = blocks_of_persons(records, persons, size=size)
    assert sum(len(block.labels_N) for block in found) == 40
    assert sum(block.num_sampled for block in found) == len(set(persons))
    queries, names = generator.integers(-20, 21, (6, 2)).astype(np.int32), list("abcdef")
    whole = LocalNeighbourhood(blocks_of_persons(records, persons), count=4, sampler=Sampler(1.0)).nearest(
        queries, names
    )
    parts = [LocalNeighbourhood([block], count=4, sampler=Sampler(1.0)).nearest(queries, names) for block in found]
    for nearest in (LocalNeighbourhood(found, count=4, sampler=Sampler(1.0)).nearest(queries, names), merged(parts)):
        assert (nearest["label"] == whole["label"]).all()
        assert (nearest["squared"] == whole["squared"]).all()


def test_persons_enter_a_sample_with_all_of_their_records_or_none() -> None:
    records: list[Record] = [((place,), 0, f"record {place}") for place in range(6)]
    (block,) = blocks_of_persons(records, [0, 1, 1, 1, 2, 2])
    sampler, draws, entered = Sampler(0.4), 3000, np.zeros(3)
    for _ in range(draws):
        rows = block.records_of(sampler.rows("query", 0, block.num_sampled))
        assert block.person_N is not None
        persons, sizes = np.unique(block.person_N[rows], return_counts=True)
        assert sizes.tolist() == [(1, 3, 2)[person] for person in persons]
        entered[persons] += 1
    assert np.abs(entered / draws - 0.4).max() < 5 * math.sqrt(0.24 / draws)
