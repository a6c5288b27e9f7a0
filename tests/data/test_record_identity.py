"""Record names and keyed hashes: order-free, collision-free, uniform."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fairpate.data.dataset import content_units, counted, joined_units, keyed_hash, keyed_uniform
from fairpate.data.large_arrays import Names

ROWS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["", "a", "é", "\x1f"])), max_size=12)


def content_ids(prefix: str, rows: list[tuple[str, ...]]) -> tuple[Names, Names]:
    columns = [pa.array(values, pa.string()) for values in zip(*rows, strict=True)] or [pa.array([], pa.string())] * 2
    units = content_units(prefix, columns)
    return counted(units), units


@given(rows=ROWS, seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_names_do_not_depend_on_row_order_and_are_unique(rows: list[tuple[str, ...]], seed: int) -> None:
    names, units = content_ids("t", rows)
    order = np.random.default_rng(seed).permutation(len(rows))
    other_names, other_units = content_ids("t", [rows[i] for i in order])
    assert sorted(names) == sorted(other_names)
    assert [units[i] for i in order] == list(other_units)
    assert len(set(names)) == len(rows)
    assert len(set(units)) == len(set(rows))


def test_fields_are_kept_apart() -> None:
    assert content_ids("t", [("ab", "c")])[1] != content_ids("t", [("a", "bc")])[1]


SIGNS = ["", *'ab-"\\\x1f[']
TEXTS = st.text(st.sampled_from(SIGNS[1:]), max_size=4)
TWO_SIGNS = sorted({one + other for one in SIGNS for other in SIGNS})


@pytest.mark.parametrize(("fields", "num_fields"), [(TWO_SIGNS, 2), (SIGNS, 3), (SIGNS, 4)])
def test_different_rows_have_different_names_whatever_their_fields_contain(fields: list[str], num_fields: int) -> None:
    """All rows of as many fields of up to two signs, or one: each has a name of its own, wherever it stands."""
    rows = list(itertools.product(fields, repeat=num_fields))
    columns = [pa.array(values, pa.string()) for values in zip(*rows, *reversed(rows), strict=True)]
    for named in (list(content_units("t", columns)), joined_units("t", columns).to_pylist()):
        assert named == named[::-1]
        assert len(set(named)) == len(rows)


@given(one=st.lists(TEXTS, min_size=1, max_size=4), other=st.lists(TEXTS, min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_rows_of_longer_fields_have_different_names_too(one: list[str], other: list[str]) -> None:
    other = [*other, *one][: len(one)]
    columns = [pa.array(pair, pa.string()) for pair in zip(one, other, strict=True)]
    for named in (content_units("t", columns), joined_units("t", columns).to_pylist()):
        assert (named[0] == named[1]) == (one == other)


def test_keys_whose_fields_contain_the_dash_between_fields_are_kept_apart() -> None:
    def keys(*rows: tuple[str, ...]) -> list[str]:
        return joined_units("t", [pa.array(column) for column in zip(*rows, strict=True)]).to_pylist()

    assert len(set(keys(("a-b", "c"), ("a", "b-c")))) == 2
    assert len(set(keys(('"a', "b"), ('"a-b"', ""), ("a-b", "")))) == 3
    # Most keys are the fields with dashes between them, as in names of earlier versions.
    assert keys(("7", "New-Town"), ("8", "")) == ["t-7-New-Town", "t-8-"]


def test_a_name_is_the_sha256_of_the_row_and_duplicates_are_counted() -> None:
    digest = hashlib.sha256(b"1\x1fx").hexdigest()[:20]
    names, units = content_ids("t", [("1", "x"), ("1", "x"), ("1", "x")])
    assert names == (f"t-{digest}", f"t-{digest}-1", f"t-{digest}-2")
    assert units == (f"t-{digest}",) * 3


def test_a_keyed_hash_is_blake2b_under_the_purpose_and_seed() -> None:
    key = hashlib.sha256(b"split:7").digest()
    expected = int.from_bytes(hashlib.blake2b(b"digit-0001", key=key, digest_size=8).digest(), "little")
    assert keyed_hash(["digit-0001"], seed=7, purpose="split").tolist() == [expected]
    assert keyed_uniform(["digit-0001"], seed=7, purpose="split").tolist() == [(expected >> 11) / 2**53]


def test_keyed_uniforms_are_uniform_and_purposes_are_independent() -> None:
    names = [f"r{i}" for i in range(20_000)]
    first, second = (keyed_uniform(names, seed=0, purpose=purpose) for purpose in ("a", "b"))
    assert first.min() >= 0
    assert first.max() < 1
    assert stats.kstest(first, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
