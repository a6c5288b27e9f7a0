"""What a person types into a form is the row of a file that says the same, bit for bit."""

import itertools
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairpate.data.columns import Feature, feature_codes
from fairpate.data.table_files import plain_batches
from fairpate.data.tables import RecordField, TableFaults, encode, form_of

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")

FEATURES = [
    ("age", Feature(bounds=(17, 90))),
    ("gain", Feature(bounds=(0, 99999), scale="log")),
    ("debt", Feature(bounds=(-5, 5), missing="1", unknown=("?",))),
    ("work", Feature(categories=("Private", "State"), missing="none given")),
    ("city", Feature(categories=("A", "B"), other=True)),
    ("code", Feature(bands={"low": 0, "middle": 10, "high": 100})),
]
FORM = form_of(feature_codes(FEATURES))


def from_file(row):
    table = pa.table({name: pa.array([text]) for name, text in row.items()})
    faults = TableFaults()
    found = encode(table, FEATURES, "file", faults)
    faults.require_none()
    return found[0]


NUMBERS = st.floats(-1e6, 1e6).map(lambda value: value + 0.0)


@given(
    NUMBERS,
    NUMBERS,
    st.none() | NUMBERS,
    st.sampled_from([None, "Private", "State"]),
    st.sampled_from(["A", "B", "elsewhere", "<script>"]),
    st.floats(0, 1e4),
)
def test_a_form_s_record_is_the_same_row_of_a_file(age, gain, debt, work, city, code):
    typed = {"age": age, "gain": gain, "debt": debt, "work": work, "city": city, "code": code}
    written = {
        name: "" if value is None else value if isinstance(value, str) else repr(value) for name, value in typed.items()
    }
    made = FORM.encode(typed)
    assert made.dtype == np.float32
    assert made.tobytes() == from_file(written).tobytes()


@pytest.mark.parametrize("typed", [9, 9.0, "9", "9.0", "09", "+9", "9e0", "?", -1, "-1.00"])
def test_what_means_a_missing_number_is_compared_as_a_number(typed):
    feature = Feature(bounds=(0, 20), missing="5", unknown=("9", "-1", "?"))
    assert form_of(feature_codes([("age", feature)])).encode({"age": typed}).tolist() == [0.25, 1.0]


CODES = [
    ("level", Feature(categories=("1", "2", "03", "0.5", "9007199254740993", "true"), unknown=("9", "?"))),
    ("place", Feature(categories=("1", "2", "02"), other=True, missing="2", unknown=("-1",))),
    ("area", Feature(categories=("04", "004", "x"), other=True)),
]
CODED = form_of(feature_codes(CODES))
WIDTHS = {"level": 6, "place": 4, "area": 4}


def of_row(column, value):
    """The features of one column of a row of a typed file, or None where they are refused."""
    table, faults = pa.table({column: pa.array([value])}), TableFaults()
    table = pa.concat_tables(plain_batches(table, "file"))
    (found,) = encode(table, [each for each in CODES if each[0] == column], "file", faults)
    return None if faults.found else found.tolist()


def of_record(column, value):
    others = {"level": "1", "place": "1", "area": "x"}
    try:
        made = CODED.encode(others | {column: value}).tolist()
    except ValueError:
        return None
    start = sum(WIDTHS[name] for name in itertools.takewhile(lambda name: name != column, WIDTHS))
    return made[start : start + WIDTHS[column]]


@pytest.mark.parametrize(
    ("column", "value", "place"),
    [
        *(("level", value, 1) for value in ("2", 2, 2.0, 2e0, " 2 ", np.int64(2), np.float32(2))),
        *(("level", value, 2) for value in (3, 3.0, "03")),
        *(("level", value, None) for value in ("3", "2.0", "2e0", 4, 2.5, "TRUE", 9007199254740992)),
        *(("level", value, -1) for value in ("9", 9, 9.0, "?", "", None, math.nan)),
        *(("level", value, 3) for value in (0.5, "0.5")),
        *(("level", value, 4) for value in (9007199254740993, "9007199254740993")),
        *(("level", value, 5) for value in (True, "true")),
        *(("level", value, None) for value in ([2], {}, b"2", False)),
        *(("place", value, 1) for value in (2, 2.0, "2", None, math.nan, "", -1, -1.0, "-1")),
        *(("place", value, 2) for value in ("02",)),
        *(("place", value, 3) for value in (0, -0.0, "2.0", True, 10**30, "9")),
        *(("area", value, 3) for value in (4, 4.0, "4")),  # two spellings with different codes: neither
        *(("area", value, None) for value in (None, "", math.nan)),
    ],
)
def test_a_category_that_is_written_as_a_number_is_the_category(column, value, place):
    width = WIDTHS[column]
    expected = None if place is None else [float(place == each) for each in range(width)]
    assert of_record(column, value) == expected
    if not isinstance(value, list | dict | bytes) and value not in (10**30,):
        assert of_row(column, value) == expected


@given(
    st.sampled_from(list(WIDTHS)),
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.integers(-12, 12)
    | st.floats(allow_infinity=False)
    | st.sampled_from([0.0, -0.0, 0.5, 2.0, 4.0, 9.0, 2.0**53, 2.0**53 + 2])
    | st.text("0123459.-? x", max_size=4),
)
def test_a_value_with_a_type_is_the_same_row_of_a_file(column, value):
    assert of_record(column, value) == of_row(column, value)


def test_typed_columns_of_large_codes_are_what_the_declaration_lists():
    codes = ("10000000000", "100000000000000000", "-5")
    coded = [("code", Feature(categories=codes))]
    for values in ([10**10, 10**17, -5], [1e10, 1e17, -5.0]):
        faults = TableFaults()
        found = encode(pa.table({"code": values}), coded, "file", faults)
        faults.require_none()
        assert found.tolist() == np.eye(3).tolist()


def test_a_missing_value_without_a_category_of_its_own_may_be_left_out():
    (level, *_) = CODED.fields
    assert level.is_optional
    assert level.choices == ("1", "2", "03", "0.5", "9007199254740993", "true", "9", "?")


@pytest.mark.parametrize("value", [True, [1], 10**400])
def test_what_is_no_number_is_refused_where_one_is_expected(value):
    with pytest.raises(ValueError, match="age: expected"):
        FORM.encode({"age": value, "gain": 0, "debt": 0, "work": "State", "city": "A", "code": 5})


def test_every_column_has_one_input_that_says_what_it_takes():
    fields = {field.name: field for field in FORM.fields}
    assert list(fields) == [name for name, _ in FEATURES]
    assert fields["age"] == RecordField(name="age", low=17, high=90)
    assert fields["debt"] == RecordField(name="debt", low=-5, high=5, is_optional=True)
    assert fields["work"] == RecordField(name="work", choices=("Private", "State", "none given"), is_optional=True)
    assert fields["city"] == RecordField(name="city", choices=("A", "B"), takes_other=True)
    assert fields["code"] == RecordField(name="code", low=0, high=100)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"age": None}, "age: expected a number, got none"),
        ({"age": "old"}, "age: expected a number from 17 to 90, got 'old'"),
        ({"code": "old"}, "code: expected a number, got 'old'"),
        ({"age": math.inf}, "age: expected a number"),
        ({"age": "1_000"}, "age: expected a number"),  # nor in a file
        ({"city": ""}, "city: expected one of A, B, got ''"),
        ({"work": "Army"}, "work: expected one of Private, State, none given, got 'Army'"),
        ({"code": -1}, "code: expected a number of at least 0"),
    ],
)
def test_what_means_nothing_is_refused_by_column(changed, word):
    typed = {"age": 30, "gain": 0, "debt": 0, "work": "State", "city": "A", "code": 5} | changed
    with pytest.raises(ValueError, match=word):
        FORM.encode(typed)


def test_lists_of_numbers_and_no_features_have_no_form():
    assert form_of(()) is None
    assert form_of(feature_codes([("embedding", Feature(vector=3))])) is None
