"""`fairpate.load_data`: the same declaration over files, frames, tables and dictionaries gives the same data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import fairpate
from fairpate.config import ConfigError
from fairpate.data import DataError, Dataset
from fairpate.data.dataset import DataSettingsError

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")

DECLARED: dict[str, Any] = {
    "name": "clinic",
    "files": {"private": "private.csv", "public": "public.csv", "test": "test.csv"},
    "label": {"column": "y", "classes": {"no": False, "yes": True}},
    "group": {"column": "sex", "values": ["F", "M"]},
    "features": {"age": {"bounds": [0, 100], "missing": 50}, "grade": {"categories": [1, 2], "other": True}},
}
YAML = """
name: clinic
files: {private: private.csv, public: public.csv, test: test.csv}
label: {column: y, classes: {no: "false", yes: "true"}}
group: {column: sex, values: [F, M]}
features: {age: {bounds: [0, 100], missing: 50}, grade: {categories: [1, 2], other: true}}
"""
PARTS = {
    "private": {"age": [10.0, np.nan, 30.0], "grade": [1, 2, 3], "sex": ["F", "M", "F"], "y": [True, False, True]},
    "public": {"age": [1.0, 2.0], "grade": [1, 1], "sex": ["F", "M"]},
    "test": {"age": [5.0, 6.0], "grade": [2, 2], "sex": ["M", "F"], "y": [False, True]},
}
FORMS = {"pandas": pd.DataFrame, "arrow": lambda part: pa.Table.from_pandas(pd.DataFrame(part)), "dictionary": dict}


@pytest.fixture
def from_files(tmp_path: Path) -> Dataset:
    (tmp_path / "clinic.yaml").write_text(YAML, encoding="utf-8")
    for name, part in PARTS.items():
        text = pd.DataFrame(part).to_csv(index=False).replace("True", "true").replace("False", "false")
        (tmp_path / f"{name}.csv").write_text(text, encoding="utf-8")
    return fairpate.load_data(tmp_path / "clinic.yaml")


def require_same(found: Dataset, expected: Dataset) -> None:
    assert found.feature_names == expected.feature_names
    for name, split in expected.splits.items():
        for values in ("x", "y", "z"):
            assert torch.equal(getattr(found.splits[name], values), getattr(split, values)), (name, values)


@pytest.mark.parametrize("form", FORMS)
def test_tables_that_are_given_are_read_as_files_are(form: str, from_files: Dataset, tmp_path: Path) -> None:
    assert from_files.private.y.tolist() == [1, 0, 1]
    assert from_files.public.y.tolist() == [-1, -1]
    given = {name: FORMS[form](part) for name, part in PARTS.items()}
    require_same(fairpate.load_data(DECLARED, **given), from_files)
    require_same(fairpate.load_data(str(tmp_path / "clinic.yaml"), **given), from_files)


def test_a_dictionary_may_name_files(from_files: Dataset, tmp_path: Path) -> None:
    text = {"classes": {"no": "false", "yes": "true"}}
    require_same(fairpate.load_data(DECLARED | {"label": DECLARED["label"] | text}, data_dir=tmp_path), from_files)


def test_records_that_are_given_are_divided() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.integers(0, 100, 200), "grade": 1, "sex": rng.choice(["F", "M"], 200)})
    frame["y"] = frame["age"] > 50
    sizes = {"num_public": 20, "num_validation": 0, "num_test": 30}
    one, two = (fairpate.load_data(DECLARED, records=frame, seed=seed, **sizes) for seed in (0, 1))
    assert [len(split) for split in one.splits.values()][1:3] == [len(one.public), 0]
    assert len(one.public) >= 20
    assert len(one.test) >= 30
    assert one.public.record_id != two.public.record_id


@pytest.mark.parametrize(
    ("declaration", "parts", "message"),
    [
        (DECLARED, {"private": [1, 2], "public": [1]}, r"private: expected a frame, .* got list"),
        (DECLARED, {"private": {"a": [1], "b": [1, 2]}}, r"private: expected a frame, .* of one length, got dict"),
        (
            DECLARED,
            {"records": PARTS["private"], "private": PARTS["private"]},
            r"files: expected `records`, .* got both",
        ),
        (
            DECLARED | {"features": {"aeg": {"bounds": [0, 1]}}},
            dict(PARTS),
            r"private: no column aeg; did you mean age",
        ),
        (DECLARED, PARTS | {"public": {}}, r"public: expected rows, got none"),
        (DECLARED, PARTS | {"public": {"age": []}}, r"public: expected rows, got none"),
        (DECLARED | {"label": 3}, dict(PARTS), r"declaration: label: expected "),
        (3, dict(PARTS), r"declaration: expected the path of a YAML file or a dictionary, got int"),
        ("gone.yaml", dict(PARTS), r"gone\.yaml: no such file"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(declaration: Any, parts: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        fairpate.load_data(declaration, **parts)
    assert isinstance(error.value, DataSettingsError) or "column" in str(error.value) or "rows" in str(error.value)


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_pubic: unknown field"):
        fairpate.load_data(DECLARED, **PARTS, num_pubic=3)
