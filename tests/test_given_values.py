"""Values from Python: missing and masked ones are refused in every container, and errors name the argument."""

from __future__ import annotations

import datetime
import re
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
from sklearn.model_selection import GridSearchCV

from fairpate import FairClassifier, FairSearchCV, assess_predictions, load_data
from fairpate.data.given import as_table, values_of
from fairpate.types import UserError

pytestmark = pytest.mark.usefixtures("light_runs")

N = 240
RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, (N, 3)).astype(np.float32)
WORDS = np.where(X[:, 0] > 0, "yes", "no").tolist()
SEX = np.where(X[:, 1] > 0, "F", "M").tolist()
PERSONS = [f"p{number // 2}" for number in range(N)]
NUMBER = "K102446"

MISSING: dict[str, Any] = {
    "NaN": float("nan"),
    "NaN of NumPy": np.float32("nan"),
    "None": None,
    "NA": pd.NA,
    "NaT": pd.NaT,
    "NaT of NumPy": np.datetime64("NaT"),
}
CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "array": np.array,
    "array of objects": lambda values: np.array(values, dtype=object),
    "array of an array of text": lambda values: np.array(values).tolist(),
    "series": pd.Series,
    "series of text": lambda values: pd.Series(values, dtype="str"),
    "series of objects": lambda values: pd.Series(values, dtype=object),
    "categories": pd.Categorical,
    "series of categories": lambda values: pd.Series(pd.Categorical(values)),
    "index": pd.Index,
}


def masked(values: list[Any]) -> Any:
    return np.ma.masked_array(values, mask=[*[False] * (len(values) - 2), True, True])


def arrow(values: list[Any]) -> Any:
    return pa.array([*values[:-2], None, None])


ENDS: list[Any] = [
    *(
        pytest.param(lambda values, put=put, end=end: put([*values[:-2], end, end]), id=f"{name}, {what}")
        for name, put in CONTAINERS.items()
        for what, end in MISSING.items()
    ),
    pytest.param(masked, id="masked array"),
    pytest.param(lambda values: list(masked(values)), id="list of a masked array"),
    pytest.param(arrow, id="arrow"),
    pytest.param(lambda values: pa.chunked_array([arrow(values)]), id="chunks of arrow"),
    pytest.param(lambda values: arrow(values).dictionary_encode(), id="dictionary of arrow"),
    pytest.param(lambda values: pd.Series(arrow(values), dtype=pd.ArrowDtype(pa.string())), id="series of arrow"),
]


@pytest.mark.parametrize("ended", ENDS)
def test_missing_names_are_refused_in_every_container(ended: Callable[[list[Any]], Any]) -> None:
    """A fit costs nothing where it is refused: classes, groups and persons are checked before anything is released."""
    model = FairClassifier("dp_fermi", epsilon=3.0)
    with pytest.raises(ValueError, match=r"^y: expected a label for every record, got 2 records without one"):
        model.fit(X, ended(WORDS), sensitive_features=SEX)
    with pytest.raises(ValueError, match=r"^sensitive_features: some records have no group"):
        model.fit(X, WORDS, sensitive_features=ended(SEX))
    with pytest.raises(ValueError, match=r"^persons: expected a person for every record, got 2 records without one"):
        FairClassifier("weighted_votes", epsilon=3.0).fit(X, WORDS, public_X=300, persons=ended(PERSONS))


@pytest.mark.parametrize("ended", ENDS)
def test_missing_groups_of_a_table_are_no_group_and_missing_predictions_are_refusals(
    ended: Callable[[list[Any]], Any],
) -> None:
    found = assess_predictions({"prediction": WORDS, "sex": ended(SEX)}, groups="sex", least_cell=1)
    assert [group.name for group in found.divisions[0].groups] == ["F", "M"]
    assert (found.num_records, found.num_unknown) == (N - 2, 2)
    found = assess_predictions({"prediction": ended(WORDS), "sex": SEX}, groups="sex", least_cell=1)
    assert sum(group.num_records or 0 for group in found.divisions[0].groups) == N - 2
    with pytest.raises(UserError, match="2 records have no label"):
        assess_predictions({"prediction": WORDS, "sex": SEX, "label": ended(WORDS)}, groups="sex", label="label")


DECLARED: dict[str, Any] = {
    "name": "clinic",
    "files": {"private": "private.csv"},
    "label": {"column": "y", "classes": ["no", "yes"]},
    "group": {"column": "sex", "values": ["F", "M"]},
    "features": {"ward": {"categories": ["F", "M"], "other": True}},
}


@pytest.mark.parametrize("ended", ENDS)
def test_missing_categories_of_a_table_are_missing_and_no_other_category(ended: Callable[[list[Any]], Any]) -> None:
    test = {"ward": SEX, "sex": SEX, "y": WORDS}
    with pytest.raises(UserError, match="private: column ward: expected a value, got none in 2 rows"):
        load_data(DECLARED, private=test | {"ward": ended(SEX)}, test=test)
    with pytest.raises(ValueError, match="X: column ward: expected a value, got none in 2 rows"):
        FairClassifier.from_declaration(DECLARED, "weighted_votes", epsilon=3.0, public_X=300).fit(
            test | {"ward": ended(SEX)}
        )


def test_masked_and_missing_values_are_refused_after_the_fit_too(tmp_path: Any) -> None:
    frame = pd.DataFrame(X, columns=list("abc"))
    model = FairClassifier("sgd").fit(frame, WORDS)
    for y in (masked(WORDS), [*WORDS[:-1], None], np.array([*WORDS[:-1], np.nan])):
        with pytest.raises(ValueError, match=r"^y: expected a label for every record"):
            model.score(frame, y)
        with pytest.raises(ValueError, match=r"^y: expected a label for every record"):
            model.plot(frame, y)
    for weights in ([*[1.0] * (N - 1), np.nan], np.ma.masked_array(np.ones(N), mask=X[:, 0] > 0.5)):
        with pytest.raises(ValueError, match=r"^sample_weight: some records have no weight"):
            model.score(frame, WORDS, weights)
    with pytest.raises(ValueError, match=r"^sample_weight: expected one value per record, got 2"):
        model.score(frame, WORDS, [1, 2])
    with pytest.raises(ValueError, match=rf"^y: expected one value per record, got {N - 1} values for {N}"):
        model.score(frame, WORDS[:-1])
    with pytest.raises(ValueError, match="masked"):
        model.predict(np.ma.masked_array(X, mask=X > 0.9))
    private = FairClassifier("dp_sgd", epsilon=3.0, dp_sgd={"epochs": 1}).fit(X, WORDS)
    with pytest.raises(ValueError, match=r"^y: expected a label for every record"):
        private.card(tmp_path / "card", X, masked(WORDS))


def test_a_mask_that_masks_nothing_is_no_reason_to_refuse() -> None:
    labels, groups = (np.ma.masked_array(values, mask=False) for values in (WORDS, SEX))
    model = FairClassifier("dp_fermi", epsilon=3.0).fit(np.ma.masked_array(X), labels, sensitive_features=groups)
    assert (model.classes_.tolist(), model.groups_.tolist()) == (["no", "yes"], ["F", "M"])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::sklearn.exceptions.FitFailedWarning")
def test_searches_refuse_what_a_fit_refuses() -> None:
    grid = {"dp_sgd__learning_rate": [0.1, 0.5]}
    search = FairSearchCV(FairClassifier("dp_sgd"), grid, epsilon=3.0)
    for given, message in (
        ({"y": masked(WORDS)}, "^y: expected a label"),
        ({"y": [*WORDS[:-1], np.nan]}, "^y: expected a label"),
        ({"sensitive_features": [*SEX[:-1], np.nan]}, "^sensitive_features: some records"),
        ({"persons": (*PERSONS[:-1], np.nan)}, "^persons: expected a person"),
    ):
        with pytest.raises(ValueError, match=message):
            search.fit(X, **({"y": WORDS} | given))  # type: ignore[arg-type]
    by_grid = GridSearchCV(FairClassifier("dp_sgd", epsilon=1.0), grid, cv=2)
    with pytest.raises(ValueError, match="y: expected a label for every record"):
        by_grid.fit(X, masked(WORDS))


def test_a_column_of_a_list_of_rows_keeps_its_missing_values() -> None:
    rows = [[*map(float, row), sex] for row, sex in zip(X, [*SEX[:-1], float("nan")], strict=True)]
    model = FairClassifier("dp_fermi", epsilon=3.0, sensitive_feature=3)
    with pytest.raises(ValueError, match=r"^sensitive_feature: some records have no group"):
        model.fit(rows, WORDS)
    rows[-1][-1] = "F"
    assert model.fit(rows, WORDS).groups_.tolist() == ["F", "M"]


@pytest.mark.parametrize("name", ["None", "NA", "null", "NaN", "Nan", "", "n/a"])
def test_names_that_only_look_missing_stay_names(name: str) -> None:
    words = [name if word == "no" else word for word in WORDS]
    for put in (list, np.array, pd.Series):
        assert set(values_of(put(words), "y", missing="")) == {name, "yes"}


@pytest.mark.parametrize(
    "table",
    [
        lambda frame: pa.Table.from_pandas(frame),
        lambda frame: pa.RecordBatch.from_pandas(frame),
        lambda frame: pa.RecordBatchReader.from_batches(
            pa.RecordBatch.from_pandas(frame).schema, [pa.RecordBatch.from_pandas(frame)]
        ),
        dict,
        lambda frame: frame.assign(sex=frame["sex"].astype("category")),
        lambda frame: frame.set_index("sex"),
        lambda frame: {name: tuple(values) for name, values in frame.items()},
    ],
)
def test_every_form_of_a_table_of_predictions_is_read(table: Callable[[pd.DataFrame], Any]) -> None:
    frame = pd.DataFrame({"prediction": WORDS, "sex": SEX})
    expected = assess_predictions(frame, groups=["sex"])
    found = assess_predictions(table(frame), groups="sex")
    assert found.to_json() == expected.to_json()


def test_columns_that_nobody_asks_for_do_not_matter() -> None:
    others = {"blob": [b"x"] * N, "objects": [{}] * N, "complex": X[:, 0] + 1j}
    frame = pd.DataFrame({"prediction": WORDS, "sex": SEX})
    expected = assess_predictions(frame, groups="sex").to_json()
    assert assess_predictions(frame.assign(**others), groups="sex").to_json() == expected
    assert assess_predictions(dict(frame) | others, groups="sex").to_json() == expected
    twice = pd.concat([frame, frame.assign(a=1)[["a"]], frame.assign(a=2)[["a"]]], axis=1)
    assert assess_predictions(twice, groups="sex").to_json() == expected
    records = {"ward": SEX, "sex": SEX, "y": WORDS}
    one, other = (load_data(DECLARED, private=each, test=records) for each in (records, records | others))
    assert one.private.record_id == other.private.record_id


INTERVALS = pd.cut(X[:, 1], [-1, 0, 1])


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (INTERVALS, ["(-1, 0]", "(0, 1]"]),
        (pd.Series(INTERVALS), ["(-1, 0]", "(0, 1]"]),
        (pd.Series(INTERVALS).astype(object), ["(-1, 0]", "(0, 1]"]),
        (pd.Series(np.where(X[:, 1] > 0, pd.Period("2020"), pd.Period("2021"))), ["2020", "2021"]),
        (pd.qcut(X[:, 1], 2, labels=["low", "high"]), ["high", "low"]),
        (pd.cut(X[:, 1], [-1, 0, 1], labels=False), ["0", "1"]),
        ([uuid.UUID(int=int(value > 0)) for value in X[:, 1]], [str(uuid.UUID(int=each)) for each in (0, 1)]),
    ],
)
def test_intervals_periods_and_identifiers_are_named_by_their_text(values: Any, names: list[str]) -> None:
    model = FairClassifier("dp_fermi", epsilon=3.0).fit(X, WORDS, sensitive_features=values)
    assert [str(name) for name in model.groups_] == names
    frame = pd.DataFrame({"prediction": WORDS, "group": values})
    for table in (frame, {"prediction": WORDS, "group": values}):
        found = assess_predictions(table, groups="group", least_cell=1)
        assert [group.name for group in found.divisions[0].groups] == names


def test_labels_may_be_intervals_and_numbers_among_objects() -> None:
    model = FairClassifier("sgd").fit(X, INTERVALS)
    assert model.classes_.tolist() == ["(-1, 0]", "(0, 1]"]
    assert FairClassifier("sgd").fit(X, (X[:, 0] > 0).astype(object)).classes_.tolist() == [False, True]
    assert FairClassifier("sgd").fit(X, (X[:, 0] > 0).astype(int).astype(object)).classes_.tolist() == [0, 1]


def test_columns_of_numbers_and_text_are_what_a_delimited_file_has() -> None:
    mixed = [2, "2", 2.0, "x", None, Decimal(7)]
    for values in (mixed, tuple(mixed), np.array(mixed, dtype=object), pd.Series(mixed, dtype=object)):
        column = as_table({"code": values}, "table")["code"]
        assert column.to_pylist() == ["2", "2", "2", "x", None, "7"]
    large = as_table({"code": [2**70, 1]}, "table")["code"]
    assert large.to_pylist() == [str(2**70), "1"]
    day = datetime.date(2020, 1, 2)
    assert as_table({"day": [day, None]}, "table")["day"].to_pylist() == [day, None]
    assert as_table({"v": np.eye(2)}, "table")["v"].to_pylist() == [[1, 0], [0, 1]]
    sparse = pd.DataFrame({"a": pd.arrays.SparseArray([0, 1, 0])})
    assert as_table(sparse, "table")["a"].to_pylist() == [0, 1, 0]


FRAME = pd.DataFrame(X, columns=list("abc"))
NAMED = "X: column 'id': expected numbers, got "


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (FRAME.assign(id=[NUMBER] * N), NAMED + "text"),
        (FRAME.assign(id=pd.Categorical([NUMBER] * N)), NAMED + "text"),
        (FRAME.assign(id=np.array([NUMBER] * N, dtype=object)), NAMED + "text"),
        (FRAME.assign(id=["1234,56"] * N), NAMED + "text"),
        (FRAME.assign(id=pd.Timestamp("2020-01-01")), NAMED + "dates"),
        (FRAME.assign(id=pd.Timestamp("2020-01-01").date()), NAMED + "date"),
        (FRAME.assign(id=INTERVALS), NAMED + "object with a text"),
        (FRAME.assign(id=np.array([1.0, pd.NA] * (N // 2), dtype=object)), "X: column 'id': contains NaN or NA"),
        (pa.Table.from_pandas(FRAME.assign(id=[NUMBER] * N)), NAMED + "text"),
        (dict(FRAME.assign(id=[NUMBER] * N)), NAMED + "text"),
        (np.column_stack([X.astype(object), [NUMBER] * N]), "X: column 3: expected numbers, got text"),
        ([[*row, NUMBER] for row in X.tolist()], "X: column 3: expected numbers, got text"),
        (np.full((N, 2), np.datetime64("2020-01-01")), "X: column 0: expected numbers, got dates"),
        (pd.concat([FRAME, FRAME["a"]], axis=1), "X: expected distinct names of columns, got 'a' twice"),
        ([[1.0, 2.0], [1.0]], "X: expected rows of one length, got 1 to 2 values"),
        ({"a": X[:, 0], "b": [1.0]}, f"of one length, got dict (a has {N} values, b has 1)"),
        (FRAME.to_dict("records"), "X: expected rows of numbers, got dictionaries"),
        (scipy.sparse.csr_matrix(X), "Sparse data was passed for X"),
    ],
)
def test_records_that_are_no_numbers_are_refused_by_column_and_without_a_value(records: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)) as refused:
        FairClassifier("sgd").fit(records, WORDS[: len(records) if isinstance(records, list) else N])
    assert NUMBER not in str(refused.value)
    assert "2020" not in str(refused.value)


def test_unknown_columns_of_public_and_new_records_are_named_too() -> None:
    words = FRAME.assign(c=[NUMBER] * N)
    with pytest.raises(ValueError, match=r"^public_X: column 'c': expected numbers, got text; .*from_declaration"):
        FairClassifier("weighted_votes", epsilon=3.0).fit(FRAME, WORDS, public_X=words)
    with pytest.raises(ValueError, match=r"^X: column 'c': expected numbers, got text"):
        FairClassifier("sgd").fit(FRAME, WORDS).predict(words)
    with pytest.raises(ValueError, match=r"^public_sensitive_features: some records have no group"):
        FairClassifier("fairpate", epsilon=3.0).fit(
            FRAME, WORDS, sensitive_features=SEX, public_X=FRAME, public_sensitive_features=[*SEX[:-1], None]
        )


NOT_VALUES: list[Any] = [
    ("sex", "a single text"),
    (dict(enumerate(SEX)), "dict"),
    (set(SEX), "set"),
    ((each for each in SEX), "generator"),
    (scipy.sparse.csr_matrix(np.ones((N, 1))), "a sparse matrix"),
    (np.array([SEX, SEX]).T, r"an array of shape \(240, 2\)"),
    (["F" if value > 0 else 1 for value in X[:, 0]], "number and text"),
    ([b"F"] * N, "bytes"),
    ([{"sex": "F"}] * N, "dict"),
    (3, "int"),
]


@pytest.mark.parametrize(("values", "words"), NOT_VALUES)
def test_what_is_not_one_value_per_record_is_refused_by_argument(values: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^y: expected one value for each record, got {words}"):
        FairClassifier("sgd").fit(X, values)
    with pytest.raises(
        ValueError, match=rf"^sensitive_features: expected one (value|group) for each record, got {words}"
    ):
        FairClassifier("dp_fermi", epsilon=3.0).fit(X, WORDS, sensitive_features=values)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"groups": None}, "--group: expected at least one column"),
        ({"groups": [3]}, "--group: expected the name of a column of the table, got int"),
        ({"label": ["label"]}, "--label: expected the name of a column of the table, got list"),
        ({"prediction": None}, "--prediction: expected the name of a column of the table, got NoneType"),
        ({"groups": "sx"}, "no column sx; did you mean sex?"),
        ({"table": {"prediction": WORDS, "sex": SEX[:-1]}}, f"prediction has {N} values, sex has {N - 1}"),
        ({"table": {"prediction": WORDS, "sex": "F"}}, "column sex: expected .* got str"),
        ({"table": {"prediction": WORDS, "sex": [True, *SEX[1:]]}}, "column sex: expected .* got text and truth value"),
        ({"table": {"prediction": WORDS, "sex": [{}] * N}}, "column sex: expected .* got dict"),
        ({"table": {"prediction": WORDS, "sex": np.array([SEX, SEX])}}, r"column sex: .* shape \(2, 240\)"),
        ({"table": {"prediction": WORDS, "sex": scipy.sparse.csr_matrix(X)}}, "column sex: .* sparse"),
        ({"table": {"prediction": WORDS, "sex": X[:, 0] + 1j}}, "column sex: .* got ndarray .complex"),
        ({"table": {"prediction": WORDS, float("nan"): SEX}}, "expected a name for every column, got none"),
        ({"table": pd.DataFrame([WORDS, SEX]).T.set_axis(["sex", "sex"], axis=1)}, "distinct names .* 'sex' twice"),
        ({"table": pa.table([WORDS, SEX], names=["sex", "sex"])}, "distinct names of columns, got 'sex' twice"),
        ({"table": np.array([WORDS, SEX])}, "expected a frame, .* got ndarray"),
        ({"table": [{"prediction": 1}]}, "expected a frame, .* got list"),
        ({"table": pd.Series(WORDS)}, "expected a frame, .* got Series"),
        ({"table": pa.chunked_array([WORDS])}, "expected a frame, .* got ChunkedArray"),
    ],
)
def test_a_table_that_cannot_be_assessed_is_refused_by_its_column(changed: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"table": {"prediction": WORDS, "sex": SEX}, "groups": "sex"} | changed
    with pytest.raises(UserError, match=words) as refused:
        assess_predictions(given.pop("table"), **given)
    if "table" in changed:
        with pytest.raises(UserError, match=words):
            load_data(DECLARED, private=changed["table"])
    assert "yes" not in str(refused.value)


def test_persons_of_a_column_with_gaps_are_the_same_persons() -> None:
    """7, 7.0 and "7" are one person, whatever else the list has."""
    numbers = [number // 2 for number in range(N)]
    mixed = [str(each) if place % 2 else float(each) for place, each in enumerate(numbers)]
    for persons in (mixed, pd.Series(mixed, dtype=object)):
        model = FairClassifier("weighted_votes", epsilon=3.0, noise="seeded", random_state=0)
        model.fit(X, WORDS, public_X=300, persons=persons)
        assert model.statement().unit == "person"
        expected = FairClassifier("weighted_votes", epsilon=3.0, noise="seeded", random_state=0)
        expected.fit(X, WORDS, public_X=300, persons=numbers)
        assert (model.predict_proba(X) == expected.predict_proba(X)).all()
