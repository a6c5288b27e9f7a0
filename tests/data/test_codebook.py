"""Features from declared constants: hand arithmetic, and clear refusals."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairpate.data import DataError
from fairpate.data.codebook import Coding, Column, Meaning, codes, codes_of, encode, numbers
from fairpate.data.tables import read_table


def column(*values: str) -> pa.Table:
    return pa.table({"c": pa.array(values, pa.string())})


def features(table: pa.Table, field: Column) -> list[list[float]]:
    return encode(table, [field], "f.csv")[0].tolist()


def test_a_number_is_scaled_by_its_bounds_and_clipped_to_them() -> None:
    field = Column(column="c", low=10, high=20)
    assert features(column("10", "15", "20", "-3", "99"), field) == [[0.0], [0.5], [1.0], [0.0], [1.0]]


def test_amounts_are_scaled_by_signed_logarithms() -> None:
    field = Column(column="c", low=-99, high=99, scale="log")
    expected = [0.0, 0.5, 0.5 + 0.5 * math.log(10) / math.log(100), 1.0]
    assert torch.allclose(
        torch.tensor(features(column("-99", "0", "9", "99"), field)).ravel(), torch.tensor(expected), atol=1e-6
    )


def test_a_missing_number_is_zero_and_flagged() -> None:
    x, names = encode(column("5", "N"), [Column(column="c", low=0, high=10, missing="N")], "f.csv")
    assert x.tolist() == [[0.5, 0.0], [0.0, 1.0]]
    assert names == ("c", "c=missing")


def test_categories_are_one_hot_with_aliases_and_missing() -> None:
    field = Column(column="c", values=("a", "b"), aliases={"bb": "b"}, missing="?")
    assert features(column("a", "b", "bb", "?"), field) == [[1, 0], [0, 1], [0, 1], [0, 0]]


def test_bands_run_from_start_to_start() -> None:
    field = Column(column="c", bands={"state": 1, "territory": 60, "abroad": 100})
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
    field = Column(column="c", low=0, high=10, scale="log")
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
        encode(table, [Column(column="edducation", low=0, high=1)], "f.csv")


def test_classes_are_published_values_in_the_order_of_the_declaration() -> None:
    coding = Coding(column="c", values={"white": "1", "other": ["3", "2"]})
    assert codes_of(column("2", "1", "3"), coding, "f.csv").tolist() == [1, 0, 1]
    assert coding.names == ("white", "other")


def test_a_list_of_values_names_each_as_it_is() -> None:
    assert Coding(column="c", values=["no", "yes"]) == Coding(column="c", values={"no": "no", "yes": "yes"})


def test_ranges_hold_their_ends_where_they_say_so() -> None:
    coding = Coding(
        column="c",
        values={"outside": [Meaning(below=25), Meaning(above=60)], "inside": Meaning(at_least=25, at_most=60)},
    )
    assert codes_of(column("24.9", "25", "60", "60.1"), coding, "f.csv").tolist() == [0, 1, 1, 0]


def test_a_number_in_no_range_names_column_and_value() -> None:
    coding = Coding(column="c", values={"low": Meaning(below=1), "high": Meaning(above=1)})
    with pytest.raises(DataError, match=r"f\.csv: column c: 1 is in no declared range; declared: low, high"):
        codes_of(column("0", "1"), coding, "f.csv")


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
