"""Sharding: one record touches one teacher, and equal records are of one."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairpate.config import ShardsConfig
from fairpate.data.dataset import Split
from teachers.ensemble import assign_teachers, rows_of_teachers, shard_key, trim_shards

KEY = shard_key(0)
identifiers = st.lists(st.text(max_size=8), unique=True, min_size=1, max_size=30)


def _shards(record_ids: list[str], num_teachers: int) -> list[set[str]]:
    nothing = torch.zeros(len(record_ids), dtype=torch.int64)
    private = Split(x=nothing[:, None], y=nothing, z=nothing, record_id=record_ids)
    rows = rows_of_teachers(private, ShardsConfig.model_construct(num_teachers=num_teachers, max_shard_size=None), 0)
    assert all((np.diff(shard) > 0).all() for shard in rows)
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
    assert sorted(map(len, _shards(["only"], 3))) == [0, 0, 1]


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


def test_a_shard_above_the_bound_keeps_a_keyed_choice_that_follows_from_its_own_records_alone() -> None:
    ids = [f"record {i}" for i in range(40)]
    rows = [np.arange(0, 30), np.arange(30, 40), np.arange(0)]
    trimmed = trim_shards(rows, ids, 10, KEY)
    assert [len(row) for row in trimmed] == [10, 10, 0]
    assert set(trimmed[0]) < set(rows[0])
    assert trimmed[0].tolist() == sorted(trimmed[0])
    kept = {ids[row] for row in trimmed[0]}
    shuffled = [f"record {i}" for i in reversed(range(30))]
    assert {shuffled[row] for row in trim_shards([np.arange(30)], shuffled, 10, KEY)[0]} == kept
    for key in (bytes(16), KEY[::-1]):
        assert {ids[row] for row in trim_shards(rows, ids, 10, key)[0]} != kept
    assert [row.tolist() for row in trim_shards(rows, ids, 30, KEY)] == [row.tolist() for row in rows]


def test_a_record_more_replaces_at_most_one_that_stays() -> None:
    ids = [f"record {i}" for i in range(31)]
    before = set(trim_shards([np.arange(30)], ids, 10, KEY)[0])
    after = set(trim_shards([np.arange(31)], ids, 10, KEY)[0])
    assert len(after - before) <= 1
    assert after - before <= {30}
