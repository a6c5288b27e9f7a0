"""Publishers' files: found as published or gzipped, refused when missing or damaged."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from fairpate.config import DataConfig
from fairpate.data import REGISTRY, DataError, entry_for, load_data
from fairpate.data.dataset import SourceFile, check_file, read_any, resolve_data_dir

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")

CONTENT = b"age,sex\n1,2\n"
FILE = SourceFile(path="toy/toy.csv", sha256=hashlib.sha256(CONTENT).hexdigest(), url="https://example.org/toy.csv")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy").mkdir()
    return tmp_path


def test_a_file_is_read_as_published_or_gzipped(folder: Path) -> None:
    (folder / "toy" / "toy.csv.gz").write_bytes(gzip.compress(CONTENT))
    assert read_any(FILE, folder) == (FILE, CONTENT)
    (folder / "toy" / "toy.csv").write_bytes(CONTENT)
    assert read_any(FILE, folder) == (FILE, CONTENT)


def test_the_checksum_is_that_of_the_file_as_it_was_published(folder: Path) -> None:
    content, path = gzip.compress(CONTENT), folder / "toy" / "toy.csv.gz"
    path.write_bytes(content)
    assert check_file(FILE, path) == FILE.sha256  # a copy
    packed = SourceFile(path="toy/toy.csv.gz", sha256=hashlib.sha256(content).hexdigest())
    assert check_file(packed, path) == packed.sha256
    with pytest.raises(DataError, match="damaged or other file"):
        check_file(packed.model_copy(update={"sha256": FILE.sha256}), path)
    path.write_bytes(content[:-4])
    with pytest.raises(DataError, match=r"toy\.csv\.gz: damaged gzip file"):
        check_file(FILE, path)
    with pytest.raises(OSError, match="Is a directory"):
        check_file(FILE, folder / "toy")


def test_a_missing_file_names_itself_its_address_and_its_place(folder: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_any(FILE, folder)
    message = str(caught.value)
    for part in (str(folder / "toy" / "toy.csv"), "missing", "https://example.org/toy.csv", f"into {folder / 'toy'}."):
        assert part in message


@pytest.mark.parametrize("gzipped", [False, True])
def test_a_damaged_file_names_what_was_expected_and_found(folder: Path, gzipped: bool) -> None:
    damaged = CONTENT.replace(b"1", b"7")
    path = folder / "toy" / ("toy.csv.gz" if gzipped else "toy.csv")
    path.write_bytes(gzip.compress(damaged) if gzipped else damaged)
    with pytest.raises(DataError) as caught:
        read_any(FILE, folder)
    for part in (str(path), f"expected sha256 {FILE.sha256}", f"found {hashlib.sha256(damaged).hexdigest()}", "Delete"):
        assert part in str(caught.value)


@pytest.mark.parametrize("cut", [slice(0, 10), slice(0, -4), slice(5, None)])
def test_a_damaged_gzip_file_is_named(folder: Path, cut: slice) -> None:
    (folder / "toy" / "toy.csv.gz").write_bytes(gzip.compress(CONTENT * 50)[cut])
    with pytest.raises(DataError, match=r"toy\.csv\.gz: damaged gzip file"):
        read_any(FILE, folder)


def test_an_alternative_serves_as_well(folder: Path) -> None:
    other = SourceFile(path="toy/other.csv", alternatives=(FILE,))
    (folder / "toy" / "toy.csv").write_bytes(CONTENT)
    assert read_any(other, folder) == (FILE, CONTENT)


def test_the_folder_comes_from_the_argument_or_the_environment(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setenv("FAIRPATE_DATA", str(elsewhere))
    assert resolve_data_dir(None) == elsewhere
    assert resolve_data_dir(folder) == folder
    monkeypatch.delenv("FAIRPATE_DATA")
    with pytest.raises(DataError, match="set FAIRPATE_DATA"):
        resolve_data_dir(None)
    with pytest.raises(DataError, match="no such data folder"):
        resolve_data_dir(folder / "nowhere")


def test_an_unknown_data_set_names_the_nearest() -> None:
    with pytest.raises(DataError, match=r"data\.name: unknown data set 'colour_mnist'; did you mean color_mnist\?"):
        load_data(DataConfig(name="colour_mnist"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sensitve": "label"}, r"data\.options\.sensitve: unknown option of color_digits; did you mean sensitive\?"),
        ({"sensitive": "color"}, r"data\.options\.sensitive: no value 'color' in color_digits; did you mean colour\?"),
        ({"sensitive": True}, r"data\.options\.sensitive: no value True"),
    ],
)
def test_an_impossible_option_names_the_nearest(options: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_data(DataConfig(name="color_digits", options=options))


def test_a_number_is_no_flag() -> None:
    with pytest.raises(DataError, match="no value 1 in adult"):
        entry_for("adult").complete_options({"sensitive_as_feature": 1})


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_entry_is_complete(name: str) -> None:
    entry = REGISTRY[name]
    assert entry.task
    assert entry.licence
    assert entry.rows > 0
    assert entry.address.startswith("https://") or name == "loans"  # ours has no page of a publisher
    for option in entry.options.values():
        assert option.default in option.allowed
    for file in (*entry.files, *(choice for each in entry.files for choice in each.alternatives)):
        assert file.url or file.manual, f"{file.path}: no way to get it"
        assert file.sha256 is None or len(file.sha256) == 64


@pytest.mark.parametrize("name", sorted(set(REGISTRY) - {"color_digits", "loans"}))
def test_an_empty_data_folder_is_a_clear_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing file\. .+ put|missing file\. .+ Put"):
        load_data(DataConfig(name=name, data_dir=tmp_path))
