"""Sharding: one record touches one teacher, and equal records are of one."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teachers.shard import assign_teachers, shard_key, shard_rows

KEY = shard_key(0)
identifiers = st.lists(st.text(max_size=8), unique=True, min_size=1, max_size=30)


def _shards(record_ids: list[str], num_teachers: int) -> list[set[str]]:
    rows = shard_rows(assign_teachers(record_ids, num_teachers, KEY), num_teachers)
    return [{record_ids[i] for i in shard} for shard in rows]


@given(identifiers, st.integers(1, 12), st.data())
def test_removing_a_record_changes_exactly_its_shard(record_ids: list[str], teachers: int, data: st.DataObject) -> None:
    removed = data.draw(st.sampled_from(record_ids))
    with_it = _shards(record_ids, teachers)
    without_it = _shards([r for r in record_ids if r != removed], teachers)
    changed = [t for t in range(teachers) if with_it[t] != without_it[t]]
    assert len(changed) == 1
    assert with_it[changed[0]] - without_it[changed[0]] == {removed}


@given(identifiers, st.integers(1, 12))
def test_shards_are_disjoint_and_hold_every_record(record_ids: list[str], teachers: int) -> None:
    shards = _shards(record_ids, teachers)
    assert len(shards) == teachers
    assert sum(len(shard) for shard in shards) == len(record_ids)
    assert set().union(*shards) == set(record_ids)


@given(identifiers, st.randoms(use_true_random=False))
def test_the_order_of_the_records_does_not_matter(record_ids: list[str], random: np.random.Generator) -> None:
    shuffled = list(record_ids)
    random.shuffle(shuffled)
    assert _shards(record_ids, 5) == _shards(shuffled, 5)


def test_the_teacher_is_the_keyed_hash() -> None:
    expected = [
        int(hashlib.blake2b(name.encode(), key=KEY, digest_size=8).hexdigest(), 16) % 7 for name in ("a", "b", "ü")
    ]
    assert assign_teachers(["a", "b", "ü"], 7, KEY).tolist() == expected


def test_records_of_one_unit_share_a_teacher() -> None:
    """Otherwise removing the first of two equal records would rename the second and move it to another teacher."""
    teachers = assign_teachers(["a", "b", "a", "c", "a"], 1000, KEY)
    assert len({teachers[0], teachers[2], teachers[4]}) == 1
    assert len(set(teachers.tolist())) == 3


def test_shards_are_even_and_the_key_decides() -> None:
    record_ids = [f"record-{i}" for i in range(20_000)]
    teachers = assign_teachers(record_ids, 100, KEY)
    chi_square = ((np.bincount(teachers, minlength=100) - 200) ** 2 / 200).sum()
    assert 58 < chi_square < 149  # 99 degrees of freedom: the middle 99.9 %
    other = assign_teachers(record_ids, 100, shard_key(1))
    assert 0.005 < (teachers == other).mean() < 0.015


def test_a_teacher_may_have_no_records() -> None:
    rows = shard_rows(assign_teachers(["only"], 3, KEY), 3)
    assert sorted(len(shard) for shard in rows) == [0, 0, 1]


@pytest.mark.parametrize(
    ("record_ids", "teachers", "key", "message"),
    [
        (["a"], 0, KEY, "num_teachers >= 1, got 0"),
        (["a"], 2, b"short", "16 to 64 bytes, got 5"),
    ],
)
def test_impossible_requests_are_refused(record_ids: list[str], teachers: int, key: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign_teachers(record_ids, teachers, key)
