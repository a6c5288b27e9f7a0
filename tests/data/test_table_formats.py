"""One table in every form gives the same records; what is larger than memory is mapped, and equal too."""

from __future__ import annotations

import datetime
import gzip
import io
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch

from fairpate.config import DataConfig
from fairpate.data import DataError, large_arrays, load_data, tables
from fairpate.data.dataset import LoadedRecords, Request
from fairpate.data.declaration import entry_of, read_declaration
from fairpate.files import CACHE_VARIABLE

DECLARATION = """
name: visits
files: {records: FILES}
label: {column: again, classes: {no: "false", yes: "true"}}
group: {column: sex, values: [F, M]}
features:
  age: {bounds: [0, 100], missing: 50}
  dose: {bounds: [0, 2], unknown: -1}
  grade: {categories: [1, 2], other: true, missing: 1}
  day: {categories: [2020-01-02, 2020-01-03]}
"""
COUNT = 60
TABLE = pa.table(
    {
        "age": pa.array([None if i % 7 == 0 else i for i in range(COUNT)], pa.int16()),
        "dose": pa.array([-1.0 if i % 5 == 0 else i / 37 for i in range(COUNT)], pa.float64()),
        "grade": pa.array([None if i % 11 == 0 else float(i % 4) for i in range(COUNT)], pa.float64()),
        "day": pa.array([datetime.date(2020, 1, 2 + i % 2) for i in range(COUNT)], pa.date32()),
        "sex": pa.array(["FM"[i // 2 % 2] for i in range(COUNT)]).dictionary_encode(),
        "again": pa.array([i % 3 == 0 for i in range(COUNT)], pa.bool_()),
        "note": pa.array([f" line one\nline, two {i}" for i in range(COUNT)], pa.large_string()),
    }
)


def as_csv(table: pa.Table, separator: str = ",") -> bytes:
    stream = io.BytesIO()
    arrow_csv.write_csv(table, stream, arrow_csv.WriteOptions(delimiter=separator))
    return stream.getvalue()


def write_many(folder: Path) -> str:
    (folder / "part-1.csv.gz").write_bytes(gzip.compress(as_csv(TABLE.slice(0, 20))))
    (folder / "part-2.csv.gz").write_bytes(gzip.compress(as_csv(TABLE.slice(20))))
    return "part-*.csv.gz"


def write_list(folder: Path) -> str:
    pq.write_table(TABLE.slice(0, 20), folder / "a.parquet")
    (folder / "b.csv").write_bytes(as_csv(TABLE.slice(20)))
    return "[a.parquet, b.csv]"


def write_bytes(folder: Path, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    return name


def write_parquet(folder: Path) -> str:
    pq.write_table(TABLE, folder / "t.parquet", row_group_size=7)
    return "t.parquet"


def write_feather(folder: Path) -> str:
    feather.write_feather(TABLE, folder / "t.feather")
    return "t.feather"


FORMS: dict[str, Callable[[Path], str]] = {
    "tsv": lambda folder: write_bytes(folder, "t.tsv", as_csv(TABLE, "\t")),
    "BOM and CRLF": lambda folder: write_bytes(
        folder, "t.csv", b"\xef\xbb\xbf" + re.sub(rb"\n(?!line)", b"\r\n", as_csv(TABLE))
    ),
    "gzip": lambda folder: write_bytes(folder, "t.csv.gz", gzip.compress(as_csv(TABLE))),
    "several files": write_many,
    "files of two forms": write_list,
    "parquet": write_parquet,
    "feather": write_feather,
}  # fmt: skip


def read(folder: Path, files: str, declaration: str = DECLARATION) -> LoadedRecords:
    (folder / "visits.yaml").write_text(declaration.replace("FILES", files), encoding="utf-8")
    entry = entry_of(read_declaration(folder / "visits.yaml"))
    return entry.load(Request(data_dir=folder, seed=0, options=entry.complete_options({})))


@pytest.fixture
def expected(tmp_path: Path) -> LoadedRecords:
    (tmp_path / "csv").mkdir()
    return read(tmp_path / "csv", write_bytes(tmp_path / "csv", "t.csv", as_csv(TABLE)))


def require_same(found: LoadedRecords, expected: LoadedRecords) -> None:
    for name in ("x", "y", "z"):
        assert torch.equal(getattr(found.records, name), getattr(expected.records, name)), name
    assert found.records.record_id == expected.records.record_id
    assert found.feature_names == expected.feature_names


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_table_gives_the_same_records(form: str, tmp_path: Path, expected: LoadedRecords) -> None:
    assert len(expected.records) == COUNT
    require_same(read(tmp_path, FORMS[form](tmp_path)), expected)


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32(), pa.int64()])
def test_whole_numbers_are_the_same_text_whatever_their_type(kind: pa.DataType) -> None:
    numbers = [0, -3, 2**33, 2**52, None]
    found = tables.text_of(pa.array(numbers).cast(kind, safe=False))
    assert found.to_pylist() == ["0", "-3", "8589934592", "4503599627370496", ""]


def test_other_numbers_are_their_shortest_text() -> None:
    numbers = pa.array([0.5, -0.0, 1e-7, 2.0**60, float("nan"), float("inf")])
    assert tables.text_of(numbers).to_pylist() == ["0.5", "0", "1e-7", "1.152921504606847e+18", "", ""]


def test_a_frame_s_own_files_mean_the_same(tmp_path: Path, expected: LoadedRecords) -> None:
    """pandas writes whole numbers beside missing ones as 1.0, and flags with a capital."""
    TABLE.to_pandas().to_csv(tmp_path / "t.csv", index=False)
    TABLE.to_pandas().to_parquet(tmp_path / "t.parquet")
    other = (
        DECLARATION.replace('"false"', "False").replace('"true"', "True").replace("[1, 2], other", "[1.0, 2.0], other")
    )
    found = read(tmp_path, "t.csv", other.replace("missing: 1}", "missing: 1.0}"))
    assert torch.equal(found.records.x, expected.records.x)
    assert torch.equal(found.records.y, expected.records.y)
    found = read(tmp_path, "t.parquet")
    assert torch.equal(found.records.x, expected.records.x)


@pytest.mark.parametrize("form", ["gzip", "parquet"])
def test_batches_and_a_mapped_file_change_nothing(
    form: str, tmp_path: Path, expected: LoadedRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_BYTES_AT_ONCE", 512)
    monkeypatch.setattr(tables, "_ROWS_AT_ONCE", 4)
    monkeypatch.setattr(large_arrays, "KEPT_BYTES", 100)
    found = read(tmp_path, FORMS[form](tmp_path))
    assert found.mapped is not None
    assert found.mapped.file is not None
    require_same(found, expected)
    for rows in (range(10, 30), [3, 1, 50], range(0, COUNT, 2)):
        index = torch.tensor(list(rows))
        assert torch.equal(found.mapped.rows(index), expected.records.x[index])


def test_splits_of_a_mapped_table_are_mapped_and_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = DECLARATION.replace("name:", "num_public: 20\nnum_validation: 0\nnum_test: 10\nname:")
    (tmp_path / "visits.yaml").write_text(declared.replace("FILES", write_parquet(tmp_path)), encoding="utf-8")
    config = DataConfig.model_validate({"name": "visits", "declaration": {"path": tmp_path / "visits.yaml"}})
    before = load_data(config)
    monkeypatch.setattr(large_arrays, "KEPT_BYTES", 100)
    after = load_data(config)
    for name, split in before.splits.items():
        assert torch.equal(split.x, after.splits[name].x)
        assert split.record_id == after.splits[name].record_id


def test_decimals_are_named_as_the_numbers_they_are() -> None:
    given = ["100.00", "123.50", "0.00", "-7.10", "0.07", "10.00"]
    (batch,) = tables.plain_batches(pa.table({"id": pa.array(map(Decimal, given), pa.decimal128(9, 2))}), "t")
    assert batch["id"].to_pylist() == ["100", "123.5", "0", "-7.1", "0.07", "10"]
    small = pa.table({"id": pa.array([Decimal("1E-10"), Decimal("0E-10"), Decimal(20)], pa.decimal128(18, 10))})
    (batch,) = tables.plain_batches(small, "t")
    assert batch["id"].to_pylist() == ["1E-10", "0E-10", "20"]


def test_a_full_disk_names_the_folder(tmp_path: Path, expected: LoadedRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_arrays, "KEPT_BYTES", 100)
    (tmp_path / "blocked").write_text("no folder")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "blocked" / "cache"))
    with pytest.raises(Exception, match=r"FAIRPATE_CACHE: .*cannot store the records .*; name a folder with room"):
        read(tmp_path, write_parquet(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"", r"t\.csv: not a readable table \(it is empty"),
        ("t.csv", b"\nage\n1\n", r"t\.csv: not a readable table \(it is empty, or opens with an empty line"),
        ("t.csv", as_csv(TABLE.slice(0, 0)), r"t\.csv: not a readable table \(it has no row\)"),
        ("t.csv", "ä,b\n1,2\n".encode("latin-1"), r"t\.csv: not a readable table \(.*utf-8.*; .* in UTF-8"),
        ("t.csv", "a,b\n1,ä\n".encode("latin-1"), r"t\.csv: not a readable table \(.*UTF8.*; .* in UTF-8"),
        ("t.csv", b"age;dose\n1;2;3\n", r"t\.csv: no column sex; .* looks like several: declare the `separator`"),
        ("t.csv", as_csv(TABLE, ";"), r"t\.csv: (no column sex|not a readable table).*separator"),
        ("t.csv.gz", b"age,dose\n", r"t\.csv\.gz: damaged or unreadable file"),
        ("t.csv.gz", gzip.compress(as_csv(TABLE))[:-20], r"t\.csv\.gz: damaged or unreadable file"),
        ("t.parquet", b"PAR1 no", r"t\.parquet: not a readable table"),
        ("t.feather", b"", r"t\.feather: not a readable table"),
        ("t.csv", as_csv(TABLE.drop_columns(["sex"])), r"t\.csv: no column sex; .*known: "),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused_by_name_and_reason(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path, name)


@pytest.mark.parametrize(
    ("values", "message"),
    [([{"a": 1}], "got struct"), ([b"x"], "got binary")],
)
def test_a_column_that_is_no_cell_is_refused(values: list[Any], message: str, tmp_path: Path) -> None:
    pq.write_table(TABLE.append_column("more", pa.array(values * COUNT)), tmp_path / "t.parquet")
    named = DECLARATION.replace("name:", "identity: {text: more}\nname:")
    with pytest.raises(DataError, match=rf"t\.parquet: column more: .*{message}"):
        read(tmp_path, "t.parquet", named)
    assert len(read(tmp_path, "t.parquet").records) == COUNT  # nobody declared it


def test_a_frame_with_an_empty_column_is_read(tmp_path: Path) -> None:
    frame = TABLE.to_pandas()
    frame["nothing"] = None
    frame.to_parquet(tmp_path / "t.parquet")
    assert isinstance(frame, pd.DataFrame)
    assert len(read(tmp_path, "t.parquet").records) == COUNT
