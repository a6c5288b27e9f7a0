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

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from fairpate.config import DataConfig
from fairpate.data import DataError, columns, large_arrays, load_data, table_files, tables
from fairpate.data.dataset import DataSettingsError, LoadedRecords, Request
from fairpate.data.declaration import entry_of, read_declaration, read_records
from fairpate.files import CACHE_VARIABLE

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")

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
    found = table_files.text_of(pa.array(numbers).cast(kind, safe=False))
    assert found.to_pylist() == ["0", "-3", "8589934592", "4503599627370496", ""]


def test_other_numbers_are_their_shortest_text() -> None:
    numbers = pa.array([0.5, -0.0, 1e-7, 2.0**60, float("nan"), float("inf")])
    assert table_files.text_of(numbers).to_pylist() == ["0.5", "0", "1e-7", "1.152921504606847e+18", "", ""]


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
    monkeypatch.setattr(table_files, "_BYTES_AT_ONCE", 512)
    monkeypatch.setattr(table_files, "_ROWS_AT_ONCE", 4)
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
    (batch,) = table_files.plain_batches(pa.table({"id": pa.array(map(Decimal, given), pa.decimal128(9, 2))}), "t")
    assert batch["id"].to_pylist() == ["100", "123.5", "0", "-7.1", "0.07", "10"]
    small = pa.table({"id": pa.array([Decimal("1E-10"), Decimal("0E-10"), Decimal(20)], pa.decimal128(18, 10))})
    (batch,) = table_files.plain_batches(small, "t")
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
        ("t.csv.gz", gzip.compress(as_csv(TABLE), mtime=0)[:-20], r"t\.csv\.gz: damaged or unreadable file"),
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


BOUNDED = """
name: accounts
files: {private: FILES}
label: {column: y, classes: ["no", "yes"]}
group: {column: sex, values: [F, M]}
features: {amount: {bounds: [0, 1.0e12]}}
"""


def accounts(amounts: Any) -> pa.Table:
    return pa.table({"amount": amounts, "sex": ["F", "M"] * 50, "y": ["no", "no", "yes", "yes"] * 25})


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64(), pa.decimal128(25, 0), pa.decimal256(40, 2), pa.string()])
@pytest.mark.parametrize("suffix", ["csv", "parquet", "feather", "arrow"])
def test_whole_numbers_of_any_size_are_clipped_as_in_text(kind: pa.DataType, suffix: str, tmp_path: Path) -> None:
    """Beyond 2**53 no float has all digits; between 1 and 99 times 2**50 all are beyond the bounds."""
    table, path = accounts(pa.array([str(place * 2**50) for place in range(100)]).cast(kind)), tmp_path / f"t.{suffix}"
    if suffix == "csv":
        path.write_bytes(as_csv(table))
    elif suffix == "parquet":
        pq.write_table(table, path)
    else:
        feather.write_feather(table, path)
    (tmp_path / "accounts.yaml").write_text(BOUNDED.replace("FILES", path.name), encoding="utf-8")
    faults = tables.TableFaults()
    declared = read_declaration(tmp_path / "accounts.yaml")
    found = read_records(declared, Request(data_dir=tmp_path, seed=0, options={}), faults)
    assert found.records.x[:, 0].tolist() == [0.0] + [1.0] * 99
    assert faults.counts == {(path.name, "amount", "clipped"): 99}


def test_categories_and_vectors_of_large_whole_numbers_are_what_they_are() -> None:
    large = [2**53, 2**53 + 1, 2**62]
    table = pa.table({"code": pa.array([*large, 7], pa.int64()), "v": pa.array([[each] for each in [*large, 7]])})
    code = columns.Feature(categories=(*map(str, large), "7.0"))
    faults = tables.TableFaults()
    x = tables.encode(table, [("code", code), ("v", columns.Feature(vector=1))], "t", faults)
    faults.require_none()
    assert x[:, :4].tolist() == torch.eye(4).tolist()
    assert x[:, 4].tolist() == pytest.approx([*large, 7])


def test_a_column_that_is_no_cell_is_refused_without_a_value_and_needs_not_be_read(tmp_path: Path) -> None:
    bad = {
        "duration": pd.Series(pd.to_timedelta(range(100), unit="D")),
        "bytes": pd.Series([b"\xff"] * 100),
    }
    for name, values in bad.items():
        frame = accounts(range(100)).to_pandas().assign(amount=values)
        with pytest.raises(DataError, match=r"private: column amount: expected text, numbers or dates.* got ") as error:
            load_data(yaml.safe_load(BOUNDED.replace("FILES", "t.csv")), private=frame)
        assert "xff" not in str(error.value), name
        unread = accounts(range(100)).to_pandas().assign(note=values)
        assert len(load_data(yaml.safe_load(BOUNDED.replace("FILES", "t.csv")), private=unread).private) == 100
    broken = pa.array([b"a\xffSECRET"] * 100).view(pa.string())
    pq.write_table(accounts(broken), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet: column amount: expected text in UTF-8, got other") as error:
        load_data(yaml.safe_load(BOUNDED.replace("FILES", "t.parquet")), data_dir=tmp_path)
    assert "SECRET" not in str(error.value)


@pytest.mark.parametrize("part", ["private", "public", "test"])
@pytest.mark.parametrize(
    ("num_clipped", "count", "is_refused"),
    [(300, 300, True), (299, 300, True), (297, 300, False), (99, 100, False), (20, 20, True), (19, 19, False)],
)
def test_a_column_of_which_nearly_every_cell_is_clipped_is_refused(
    part: str, num_clipped: int, count: int, is_refused: bool
) -> None:
    """More than 99 of 100, of twenty values or more; a missing one is none."""
    sex, y = (["F", "M"] * count)[:count], (["no", "no", "yes", "yes"] * count)[:count]
    good = {"amount": ["5"] * count, "sex": sex, "y": y}
    amounts = ["9122019"] * num_clipped + ["7"] * (count - num_clipped) + [""] * 4
    bad = {"amount": amounts, "sex": [*sex, *"FMFM"], "y": [*y, "no", "no", "yes", "yes"]}
    declared = yaml.safe_load(BOUNDED.replace("FILES", "t.csv").replace("1.0e12]", "2024], missing: 9"))
    given = {"private": good, "public": good, "test": good} | {part: bad}
    if not is_refused:
        assert load_data(declared, **given).private.x.shape[1] == 2
        return
    message = (
        rf"^{part}: column amount: expected values within its `bounds`, got nearly all beyond them in {num_clipped}"
    )
    with pytest.raises(DataError, match=message) as error:
        load_data(declared, **given)
    assert "9122019" not in str(error.value)


ENCODINGS = ["utf-16", "utf-16-le", "UTF_16_BE", "utf-32", "utf-32-be", "utf8", "UTF-8", "utf-8-sig", "utf-7", "cp1252"]
ENCODINGS += ["latin-1", "cp037", "mac_roman", "cp850", "iso8859-15"]


# Each encoding in a plain file, and each layout in units of one byte, two and four.
FEW = ["utf-16", "utf-32-be", "utf-8-sig", "cp1252"]


@pytest.mark.parametrize(
    ("layout", "encoding"),
    [("plain", encoding) for encoding in ENCODINGS]
    + [
        pytest.param(layout, encoding, marks=() if encoding in FEW else pytest.mark.campaign)
        for layout in ("comment", "gzip", "mark", "no header")
        for encoding in ENCODINGS
    ],
)
def test_text_in_any_encoding_is_read(layout: str, encoding: str, tmp_path: Path) -> None:
    """More text than a buffer holds, and a row that ends in the middle of one."""
    rows = "".join(f'F,{place},"no"\nM,{place},"ja, süß"\n' for place in range(4000))
    text = ("# of 2020, öffentlich\n" if layout == "comment" else "") + "sex,größe,y\n" * (layout != "no header") + rows
    if layout == "mark" and encoding.lower().startswith("utf") and encoding not in ("utf-8-sig", "utf-7"):
        text = f"\N{ZERO WIDTH NO-BREAK SPACE}{text}" if encoding not in ("utf-16", "utf-32") else text
    content = text.encode(encoding)
    name = "t.csv.gz" if layout == "gzip" else "t.csv"
    (tmp_path / name).write_bytes(gzip.compress(content) if layout == "gzip" else content)
    header = "header: [sex, größe, y]\n" if layout == "no header" else ""
    (tmp_path / "t.yaml").write_text(
        f"name: t\nfiles: {{private: {name}}}\nencoding: {encoding}\ncomment: '#'\n{header}"
        "label: {column: y, classes: [no, 'ja, süß']}\ngroup: {column: sex, values: [F, M]}\n"
        "features: {größe: {bounds: [0, 4000]}}\n",
        encoding="utf-8",
    )
    private = load_data(tmp_path / "t.yaml").private
    np.testing.assert_allclose(private.x[:, 0], np.arange(8000) // 2 / 4000, rtol=1e-6, atol=1e-12)
    assert private.y.tolist() == [0, 1] * 4000


@pytest.mark.parametrize("encoding", ["utf-17", "base64", "rot13", "hex", "zip", "undefined", ""])
def test_what_is_no_encoding_of_text_is_refused_in_the_declaration(encoding: str) -> None:
    declared = yaml.safe_load(BOUNDED.replace("FILES", "t.csv")) | {"encoding": encoding}
    with pytest.raises(DataSettingsError, match=rf"encoding: unknown encoding '{encoding}'; give one of text"):
        read_declaration(declared)


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("utf-16", "sex,amount,y\nF,1,no\nM,2,yes\n".encode("utf-16")[:-1]),
        ("utf-16-le", "sex,amount,y\nF,1,".encode("utf-16-le") + b"\x00\xd8" + "o\nM,2,yes\n".encode("utf-16-le")),
        ("utf-16-be", b"\xd8\x00\xd8\x00" * 9),
        ("utf-32", b"sex,amount,y\nF,1,no\nM,2,yes\n"),
        ("cp1252", b"sex,amount,\x81\nF,1,no\nM,2,yes\n"),
        ("utf-8", "sex,amount,y\nF,1,no\nM,2,yes\n".encode("utf-16")),
    ],
)
def test_bytes_of_another_encoding_are_refused_by_name(encoding: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    declared = yaml.safe_load(BOUNDED.replace("FILES", "t.csv")) | {"encoding": encoding}
    with pytest.raises(DataError, match=r"^t\.csv: not a readable table .*; restore the file, .*`encoding`"):
        load_data(declared, data_dir=tmp_path)
