"""Features from declared constants: hand arithmetic, and every fault by column, number of rows and value."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairpate.config import Section
from fairpate.data import DataError
from fairpate.data.columns import Coding, Feature, Label, Meaning, feature_codes
from fairpate.data.table_files import read_table
from fairpate.data.tables import ColumnCells, TableFaults, codes, codes_of, encode, numbers

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")


def column(*values: Any, kind: Any = None) -> pa.Table:
    return pa.table({"c": pa.array(values, kind or pa.string())})


def cells(table: pa.Table) -> ColumnCells:
    return ColumnCells(file="f.csv", column="c", values=table["c"].combine_chunks(), faults=TableFaults())


def encoded(table: pa.Table, feature: Feature) -> tuple[list[list[float]], tuple[str, ...]]:
    faults = TableFaults()
    x = encode(table, [("c", feature)], "f.csv", faults)
    faults.require_none()
    return x.tolist(), tuple(code.feature for code in feature_codes([("c", feature)]))


def coded(table: pa.Table, coding: Coding, **options: bool) -> list[int]:
    found = cells(table)
    y = codes_of(found, coding, "class", **options).tolist()
    found.faults.require_none()
    return list(y)


def declared(schema: type[Section], **values: Any) -> Any:
    return schema.model_validate(values)


def test_a_number_is_scaled_by_its_bounds_and_clipped_to_them() -> None:
    x, names = encoded(column("10", "15", "20", "-3", "99"), declared(Feature, bounds=[10, 20]))
    assert (x, names) == ([[0.0], [0.5], [1.0], [0.0], [1.0]], ("c",))


def test_amounts_are_scaled_by_signed_logarithms() -> None:
    feature = declared(Feature, bounds=[-99, 99], scale="log", missing="9")
    expected = [0.0, 0.5, 0.5 + 0.5 * math.log(10) / math.log(100), 1.0]
    x = torch.tensor(encoded(column("-99", "0", "9", "99", ""), feature)[0])
    assert torch.allclose(x[:4, 0], torch.tensor(expected), atol=1e-6)
    assert x[4].tolist() == [x[2, 0], 1]


@pytest.mark.parametrize(
    ("feature", "values", "expected"),
    [
        ({"unknown": "N"}, ["5", "N", ""], [[0.5, 0], [0, 1], [0, 1]]),
        ({"missing": "7.5"}, ["5", "", "7.5"], [[0.5, 0], [0.75, 1], [0.75, 0]]),
        ({"missing": "10", "unknown": ["-1", "?"]}, ["-1", "?", "-1.0"], [[1, 1], [1, 1], [1, 1]]),
        ({"unknown": "9"}, ["9", "9.0", "09", "+9", "9e0", "7.5"], [*[[0, 1]] * 5, [0.75, 0]]),
        ({"unknown": "9.00"}, ["9", "90", ""], [[0, 1], [1, 0], [0, 1]]),
    ],
)
def test_a_missing_number_is_a_declared_constant_and_flagged(
    feature: dict[str, Any], values: list[str], expected: list[list[float]]
) -> None:
    x, names = encoded(column(*values), declared(Feature, bounds=[0, 10], **feature))
    assert (x, names) == (expected, ("c", "c=missing"))


@pytest.mark.parametrize(
    ("feature", "values", "names", "expected"),
    [
        (
            {"categories": ["a", "b"], "aliases": {"bb": "b"}, "unknown": "?"},
            ["a", "b", "bb", "?", ""],
            ["c=a", "c=b"],
            [[1, 0], [0, 1], [0, 1], [0, 0], [0, 0]],
        ),
        (
            {"categories": ["a", "b"], "missing": "none"},
            ["a", "", "none"],
            ["c=a", "c=b", "c=none"],
            [[1, 0, 0], [0, 0, 1], [0, 0, 1]],
        ),
        ({"categories": ["a", "b"], "missing": "b"}, ["a", ""], ["c=a", "c=b"], [[1, 0], [0, 1]]),
        (
            {"categories": ["a"], "other": True, "missing": "none", "unknown": "NA"},
            ["a", "z", "other", "NA", ""],
            ["c=a", "c=none", "c=other"],
            [[1, 0, 0], [0, 0, 1], [0, 0, 1], [0, 1, 0], [0, 1, 0]],
        ),
        ({"categories": ["", "b"]}, ["", "b"], ["c=", "c=b"], [[1, 0], [0, 1]]),
    ],
)
def test_categories_are_one_hot_with_others_aliases_and_missing(
    feature: dict[str, Any], values: list[str], names: list[str], expected: list[list[float]]
) -> None:
    assert encoded(column(*values), declared(Feature, **feature)) == (expected, tuple(names))


def test_bands_run_from_start_to_start() -> None:
    feature = declared(Feature, bands={"state": 1, "territory": 60, "abroad": 100})
    expected = [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]]
    assert encoded(column("1", "59", "60", "99", "554"), feature)[0] == expected
    with pytest.raises(DataError, match=r"column c: expected codes >= 1, got '0' in 1 row; declare a band"):
        encoded(column("0"), feature)


@given(others=st.lists(st.sampled_from(["0", "3", "10", "1e6"]), max_size=5))
@settings(max_examples=30, deadline=None)
def test_features_of_a_record_do_not_depend_on_other_records(others: list[str]) -> None:
    feature = declared(Feature, bounds=[0, 10], scale="log")
    assert encoded(column("4", *others), feature)[0][0] == encoded(column("4"), feature)[0][0]


@pytest.mark.parametrize("bad", ["abc", "nan", "inf", "1_0", "1e999", "0x10", "12 kg"])
def test_text_where_a_number_is_due_names_column_and_value(bad: str) -> None:
    found = cells(column("1", bad, bad))
    assert numbers(found)[0] == 1
    with pytest.raises(DataError) as refused:
        found.faults.require_none()
    expected = f"f.csv: column c: expected a number, got {bad!r} in 2 rows; correct it, or declare it as `unknown`."
    assert str(refused.value) == expected


@pytest.mark.parametrize(
    ("bad", "remedy"),
    [
        *(
            (bad, "declare `decimal: ','` if the comma is the point")
            for bad in ("1,5", "-1.234,56", "31,347", "1,234,567.8")
        ),
        *(
            (bad, "declare `date: year` or `date: age`")
            for bad in ("29.03.2023", "3/4/21", "2023-03-29", "2023-03-29 00:00:00.000")
        ),
        *((bad, "correct it") for bad in ("1,", "1-2", "1.2.3.4", "2023-03")),
    ],
)
def test_commas_and_dates_are_called_what_they_are(bad: str, remedy: str) -> None:
    found = cells(column("1", bad))
    numbers(found)
    with pytest.raises(DataError) as refused:
        found.faults.require_none()
    (line,) = str(refused.value).splitlines()
    assert f"got {bad!r} in 1 row; " in line and remedy in line


@pytest.mark.parametrize("feature", [{"bounds": [0, 1]}, {"categories": ["1"]}, {"bands": {"one": 1}}])
def test_an_empty_cell_needs_a_meaning(feature: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"column c: expected a value, got none in 2 rows; declare .*missing"):
        encoded(column("1", "", ""), declared(Feature, **feature))


def test_what_means_a_missing_category_is_compared_as_text() -> None:
    feature = declared(Feature, categories=["1"], unknown="9", other=True)
    assert encoded(column("1", "9", "9.0", "09"), feature)[0] == [[1, 0], [0, 0], [0, 1], [0, 1]]


def test_an_unknown_category_names_column_value_and_remedy() -> None:
    feature = declared(Feature, categories=["a", "b"])
    with pytest.raises(
        DataError,
        match=r"f\.csv: column c: expected a declared category, got 'x', 'y', 'z', \.\.\. in 5 rows; declared: a, b; "
        r"add it to `categories`, or set `other: true`\.$",
    ):
        encoded(column("a", "x", "y", "z", "w", "x"), feature)


def test_codes_of_a_publisher_are_as_declared() -> None:
    assert codes(column("b", "a"), "c", {"a": 0, "b": 1}, "f.csv").tolist() == [1, 0]
    with pytest.raises(DataError, match=r"f\.csv: column c: expected a declared value, got 'x' in 1 row; declared: a"):
        codes(column("a", "x"), "c", {"a": 0, "b": 1}, "f.csv")


def test_a_missing_column_names_the_nearest() -> None:
    table = pa.table({"education": ["a"], "age": ["1"]})
    with pytest.raises(DataError, match=r"f\.csv: no column edducation; did you mean education\?"):
        encode(table, [("edducation", declared(Feature, bounds=[0, 1]))], "f.csv", TableFaults())


def test_classes_are_published_values_in_the_order_of_the_declaration() -> None:
    label = declared(Label, column="c", classes={"white": "1", "other": ["3", "2"]})
    assert coded(column("2", "1", "3"), label) == [1, 0, 1]
    assert label.names == ("white", "other")


def test_a_list_of_values_names_each_as_it_is() -> None:
    assert declared(Label, column="c", classes=["no", "yes"]) == declared(
        Label, column="c", classes={"no": "no", "yes": "yes"}
    )


def test_ranges_hold_their_ends_where_they_say_so() -> None:
    label = declared(
        Label,
        column="c",
        classes={"outside": [Meaning(below=25), Meaning(above=60)], "inside": Meaning(at_least=25, at_most=60)},
    )
    assert coded(column("24.9", "25", "60", "60.1"), label) == [0, 1, 1, 0]


def test_a_number_in_no_range_names_column_and_value() -> None:
    label = declared(Label, column="c", classes={"low": Meaning(below=1), "high": Meaning(above=1)})
    with pytest.raises(DataError, match=r"column c: expected a number in the range of a class, got '1' in 1 row; dec"):
        coded(column("0", "1"), label)


@pytest.mark.parametrize("classes", [["no", "yes"], {"low": Meaning(below=1), "high": Meaning(at_least=1)}])
def test_only_public_records_may_lack_a_label(classes: Any) -> None:
    label = declared(Label, column="c", classes=classes)
    values = ["no", "yes", ""] if isinstance(classes, list) else ["0", "1", ""]
    assert coded(column(*values), label, may_lack=True) == [0, 1, -1]
    with pytest.raises(DataError, match="column c: expected a class, got none in 1 row; only public records"):
        coded(column(*values), label)


@pytest.mark.parametrize(
    ("kind", "values", "classes"),
    [
        (pa.int64(), [0, 1, None], ["0", "1"]),
        (pa.int64(), [0, 1, None], ["0.0", "1.0"]),
        (pa.float64(), [0.0, 1.0, math.nan], ["0", "1"]),
        (pa.float32(), [0.0, 1.0, None], {"low": Meaning(below=1), "high": Meaning(at_least=1)}),
        (pa.int8(), [0, 1, None], {"low": Meaning(below=1), "high": Meaning(at_least=1)}),
    ],
)
def test_numbers_with_a_type_mean_what_their_text_means(kind: Any, values: list[Any], classes: Any) -> None:
    label = declared(Label, column="c", classes=classes)
    assert coded(column(*values, kind=kind), label, may_lack=True) == [0, 1, -1]
    number, category = declared(Feature, bounds=[0, 2], unknown="0"), declared(Feature, categories=["1"], unknown="0.0")
    assert encoded(column(*values, kind=kind), number)[0] == [[0, 1], [0.5, 0], [0, 1]]
    assert encoded(column(*values, kind=kind), category)[0] == [[0], [1], [0]]


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
