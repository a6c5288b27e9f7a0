"""Embeddings: a list column, or an array beside a table of ids, become features as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from fairpate import load_data
from fairpate.config import DataConfig
from fairpate.data import DataError, load_once, table_files

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")

DECLARED = """
name: notes
kind: embeddings
files: {private: private.parquet, public: public.parquet}
label: {column: y, classes: [0, 1]}
group: {column: sex, values: [F, M]}
features: {embedding: {vector: 3}, age: {bounds: [0, 100]}}
identity: {key: id}
"""
COUNT = {"private": 7, "public": 4}
VECTORS = {name: np.random.default_rng(len(name)).standard_normal((count, 3)) for name, count in COUNT.items()}


def columns(name: str) -> dict[str, Any]:
    rows = range(COUNT[name])
    known = {
        "id": [f"{name}{row}" for row in rows],
        "age": list(rows),
        "sex": ["FM"[row % 2] for row in rows],
    }
    return known | ({"y": [row // 2 % 2 for row in rows]} if name == "private" else {})


def write(folder: Path, kind: pa.DataType = None, declared: str = DECLARED) -> Path:
    for name, vectors in VECTORS.items():
        cells = pa.array(vectors.tolist(), kind or pa.list_(pa.float64()))
        pq.write_table(pa.table(columns(name) | {"embedding": cells}), folder / f"{name}.parquet")
    (folder / "notes.yaml").write_text(declared, encoding="utf-8")
    return folder / "notes.yaml"


def require_vectors(dataset: Any) -> None:
    for name, vectors in VECTORS.items():
        split = dataset.splits[name]
        expected = np.column_stack([vectors.astype(np.float32), np.arange(len(vectors)) / 100]).astype(np.float32)
        assert np.array_equal(split.x.numpy(), expected)
        assert split.record_id == tuple(f"notes-{name}{row}" for row in range(len(vectors)))
    assert dataset.feature_names == ("embedding[0]", "embedding[1]", "embedding[2]", "age")


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.large_list(pa.float64()), pa.list_(pa.float16(), 3)])
def test_a_list_column_is_a_feature_each(kind: pa.DataType, tmp_path: Path) -> None:
    path = write(tmp_path, kind)
    if kind.value_type == pa.float16():
        found = load_data(path).private.x[:, :3].numpy()
        assert np.array_equal(found, VECTORS["private"].astype(np.float16).astype(np.float32))
    else:
        require_vectors(load_data(path))


def test_frames_hold_lists_too(tmp_path: Path) -> None:
    given = {name: pd.DataFrame(columns(name) | {"embedding": list(VECTORS[name])}) for name in VECTORS}
    require_vectors(load_data(write(tmp_path), **given))


@pytest.mark.parametrize("form", ["csv", "csv.gz", "feather"])
def test_an_array_beside_a_table_of_ids(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "_ROWS_AT_ONCE", 2)
    beside(tmp_path, form)
    require_vectors(load_data(tmp_path / "notes.yaml"))


def beside(folder: Path, form: str = "csv") -> None:
    for name, vectors in VECTORS.items():
        frame = pd.DataFrame(columns(name))
        write_frame = frame.to_csv if form.startswith("csv") else frame.to_feather
        write_frame(folder / f"{name}.{form}", **({"index": False} if form.startswith("csv") else {}))
        np.save(folder / f"{name}.npy", vectors)
    text = DECLARED.replace(".parquet", f".{form}").replace("vector: 3", "vector: 3, array: true")
    (folder / "notes.yaml").write_text(text, encoding="utf-8")


def test_an_array_that_changes_is_read_again(tmp_path: Path) -> None:
    beside(tmp_path)
    config = DataConfig.model_validate({"name": "notes", "declaration": {"path": tmp_path / "notes.yaml"}})
    first = load_once(config)
    assert load_once(config) is first
    np.save(tmp_path / "private.npy", VECTORS["private"] + 1)
    assert np.allclose(load_once(config).private.x[:, :3], VECTORS["private"] + 1)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (None, r"private\.npy: no readable array next to private\.csv"),
        (b"", r"private\.npy: no readable array next to private\.csv \(No data"),
        (np.zeros((6, 3)), r"private\.npy: expected 7 rows, as private\.csv has, got 6"),
        (np.zeros((8, 3)), r"private\.npy: expected 7 rows, as private\.csv has, got 8"),
        (np.zeros((7, 4)), r"private\.npy: expected numbers \(rows, 3\), got float64 \(7, 4\)"),
        (np.zeros(7), r"expected numbers \(rows, 3\)"),
        (np.full((7, 3), "a"), r"expected numbers \(rows, 3\)"),
        (np.array([[{}] * 3] * 7), r"no readable array"),
        (np.full((7, 3), np.inf), r"private\.csv: column embedding: expected finite numbers, got none in 7 rows"),
    ],
)  # fmt: skip
def test_an_array_that_does_not_fit_is_refused(array: Any, message: str, tmp_path: Path) -> None:
    beside(tmp_path)
    (tmp_path / "private.npy").unlink()
    if isinstance(array, bytes):
        (tmp_path / "private.npy").write_bytes(array)
    elif array is not None:
        np.save(tmp_path / "private.npy", array)
    with pytest.raises(DataError, match=message):
        load_data(tmp_path / "notes.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "vector: 3",
            "vector: 4",
            r"column embedding: expected a list of 4 numbers, got 'a list of 3' in 7 rows; correct `vector`",
        ),
        ("vector: 3", "vector: 0", r"features\.embedding\.vector: .*got '0'\."),
        ("vector: 3", "vector: 3, missing: 0", r"features\.embedding: expected no missing value of a vector"),
        ("age: {", "age: {array: true, ", r"features\.age: .*`array` .*`vector`"),
        ("embedding: {vector: 3}, ", "", r"features: expected a vector with kind: embeddings"),
        ("age: {bounds: [0, 100]}", "age: {vector: 3}", r"column age: expected a list of 3 numbers, .*`array: true`"),
        ("identity: {key: id}", "identity: {text: embedding}", r"column embedding: lists cannot be names"),
    ],
)
def test_a_vector_that_is_declared_wrong_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_data(write(tmp_path, declared=DECLARED.replace(old, new)))


def test_a_list_of_another_length_or_with_holes_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path)
    lists = [*VECTORS["private"].tolist()[:3], [1.0, 2.0], None, [1.0, None, 3.0], [0.0, float("nan"), 0.0]]
    feather.write_feather(pa.table(columns("private") | {"embedding": lists}), tmp_path / "private.feather")
    path.write_text(DECLARED.replace("private.parquet", "private.feather"), encoding="utf-8")
    with pytest.raises(DataError) as error:
        load_data(path)
    first, second = str(error.value).splitlines()
    assert "column embedding: expected a list of 3 numbers, got 'nothing', 'a list of 2' in 2 rows" in first
    assert "column embedding: expected finite numbers, got none in 2 rows" in second
