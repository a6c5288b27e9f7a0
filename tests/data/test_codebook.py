"""Features from declared constants: hand arithmetic, and clear refusals."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairpate.data import DataError
from fairpate.data.codebook import Bands, Category, Number, codes, encode, numbers, without_sensitive
from fairpate.data.tables import read_table


def column(*values: str) -> pa.Table:
    return pa.table({"c": pa.array(values, pa.string())})


def features(table: pa.Table, field: Number | Category | Bands) -> list[list[float]]:
    return encode(table, [field], "f.csv")[0].tolist()


def test_a_number_is_scaled_by_its_bounds_and_clipped_to_them() -> None:
    field = Number(column="c", low=10, high=20)
    assert features(column("10", "15", "20", "-3", "99"), field) == [[0.0], [0.5], [1.0], [0.0], [1.0]]


def test_amounts_are_scaled_by_signed_logarithms() -> None:
    field = Number(column="c", low=-99, high=99, scale="log")
    expected = [0.0, 0.5, 0.5 + 0.5 * math.log(10) / math.log(100), 1.0]
    assert torch.allclose(
        torch.tensor(features(column("-99", "0", "9", "99"), field)).ravel(), torch.tensor(expected), atol=1e-6
    )


def test_a_missing_number_is_zero_and_flagged() -> None:
    x, names = encode(column("5", "N"), [Number(column="c", low=0, high=10, missing="N")], "f.csv")
    assert x.tolist() == [[0.5, 0.0], [0.0, 1.0]]
    assert names == ("c", "c=missing")


def test_categories_are_one_hot_with_aliases_and_missing() -> None:
    field = Category(column="c", values=("a", "b"), aliases={"bb": "b"}, missing="?")
    assert features(column("a", "b", "bb", "?"), field) == [[1, 0], [0, 1], [0, 1], [0, 0]]


def test_bands_run_from_start_to_start() -> None:
    field = Bands(column="c", starts=(1, 60, 100), names=("state", "territory", "abroad"))
    assert features(column("1", "59", "60", "99", "554"), field) == [
        [1, 0, 0],
        [1, 0, 0],
        [0, 1, 0],
        [0, 1, 0],
        [0, 0, 1],
    ]
    with pytest.raises(DataError, match=r"column c: expected codes >= 1, got 0"):
        features(column("0"), field)


@given(others=st.lists(st.sampled_from(["0", "3", "10", "1e6"]), max_size=5))
@settings(max_examples=30, deadline=None)
def test_features_of_a_record_do_not_depend_on_other_records(others: list[str]) -> None:
    field = Number(column="c", low=0, high=10, scale="log")
    assert features(column("4", *others), field)[0] == features(column("4"), field)[0]


@pytest.mark.parametrize("bad", ["", "abc", "nan", "inf", "1,5"])
def test_text_where_a_number_is_due_names_column_and_value(bad: str) -> None:
    with pytest.raises(DataError, match=rf"f\.csv: column c: expected a number, got {bad!r}"):
        numbers(column("1", bad), "c", "f.csv")


def test_an_unknown_category_names_column_and_value() -> None:
    with pytest.raises(DataError, match=r"f\.csv: column c: unknown value 'x'; declared: a, b"):
        codes(column("a", "x"), "c", {"a": 0, "b": 1}, "f.csv")


def test_a_missing_column_names_the_nearest() -> None:
    table = pa.table({"education": ["a"], "age": ["1"]})
    with pytest.raises(DataError, match=r"f\.csv: no column edducation; did you mean education\?"):
        encode(table, [Number(column="edducation", low=0, high=1)], "f.csv")


def test_the_sensitive_attribute_is_left_out_unless_asked_for() -> None:
    fields = (Number(column="age", low=0, high=1), Number(column="sex", low=0, high=1))
    assert [f.column for f in without_sensitive(fields, "sex", {"sensitive_as_feature": False})] == ["age"]
    assert without_sensitive(fields, "sex", {"sensitive_as_feature": True}) == fields


def test_a_table_is_trimmed_text() -> None:
    table = read_table(b'"a" ; b\n 1;"x;y"\n2; z \n', "f.csv", separator=";")
    assert table.to_pydict() == {"a": ["1", "2"], "b": ["x;y", "z"]}


def test_repeated_column_names_are_numbered() -> None:
    assert read_table(b"a,b,a\n1,2,3\n", "f.csv").column_names == ["a", "b", "a.1"]


@pytest.mark.parametrize(
    "content", [b"a,b\n1,2\n3\n", b"a,b\n1,2,3\n", b"", b"a,b\n", b"\xff\xfe,b\n1,2\n", b"a,b\n\xff,1\n"]
)
def test_an_unreadable_table_is_refused(content: bytes) -> None:
    with pytest.raises(DataError, match=r"^f\.csv: "):
        read_table(content, "f.csv")
