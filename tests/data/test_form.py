"""What a person types into a form is the row of a file that says the same, bit for bit."""

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairpate.data.tables import Feature, RecordField, TableFaults, encode, feature_codes, form_of

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
