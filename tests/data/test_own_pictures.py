"""Pictures of one's own: a column of paths, or folders of classes and groups; decoded as those of publishers are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fairpate import load_data
from fairpate.config import ALLOWED, DataConfig
from fairpate.data import DataError, Dataset, describe, load_once
from fairpate.oriented_gradients import NUM_VALUES, oriented_gradients

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")

TABLE = """
name: scans
kind: images
files: {private: private.csv, public: public.csv}
pictures: {size: 16, channels: 1}
label: {column: ill, classes: [no, yes]}
group: {column: sex, values: [F, M]}
person: patient
"""
FOLDERS = """
name: scans
kind: images
files: {private: private, public: public}
pictures: {size: 16, channels: 1}
label: {column: level_1, classes: [no, yes]}
group: {column: level_2, values: [F, M]}
"""
PARTS = {"private": 8, "public": 4}


def shade(part: str, place: int) -> int:
    return 10 * place + (100 if part == "public" else 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures of one shade each, in folders of classes and groups, and tables of their paths."""
    for part, count in PARTS.items():
        lines = ["path,patient,sex" + ",ill" * (part == "private")]
        for place in range(count):
            ill, sex = ("no", "yes")[place % 2], "FM"[place // 2 % 2]
            path = tmp_path / part / ill / sex / f"{place}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 24), (shade(part, place),) * 3).save(path)
            row = [path.relative_to(tmp_path).as_posix(), f"{part}{place}", sex, ill]
            lines.append(",".join(row if part == "private" else row[:-1]))
        (tmp_path / f"{part}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "scans.yaml").write_text(TABLE, encoding="utf-8")
    return tmp_path


def by_shade(dataset: Dataset, part: str) -> dict[int, tuple[int, int]]:
    split = dataset.splits[part]
    assert bool((split.x == split.x[:, :, :1, :1]).all())
    return {int(x[0, 0, 0]): (y, z) for x, y, z in zip(split.x, split.y.tolist(), split.z.tolist(), strict=True)}


def test_a_column_of_paths(folder: Path) -> None:
    dataset = load_data(folder / "scans.yaml")
    assert (dataset.kind, dataset.private.x.dtype, tuple(dataset.private.x.shape)) == (
        "image",
        torch.uint8,
        (8, 1, 16, 16),
    )
    assert by_shade(dataset, "private") == {shade("private", i): (i % 2, i // 2 % 2) for i in range(8)}
    assert by_shade(dataset, "public") == {shade("public", i): (-1, i // 2 % 2) for i in range(4)}
    assert describe(dataset).record_shape == (1, 16, 16)


def test_a_folder_of_classes_and_groups(folder: Path) -> None:
    (folder / "scans.yaml").write_text(FOLDERS, encoding="utf-8")
    (folder / "private" / "no" / "F" / "._0.png").write_bytes(b"attributes of macOS")
    dataset = load_data(folder / "scans.yaml")
    assert by_shade(dataset, "private") == {shade("private", i): (i % 2, i // 2 % 2) for i in range(8)}
    assert by_shade(dataset, "public") == {shade("public", i): (i % 2, i // 2 % 2) for i in range(4)}


def test_folders_are_read_once_until_a_picture_changes(folder: Path) -> None:
    (folder / "scans.yaml").write_text(FOLDERS, encoding="utf-8")
    config = DataConfig.model_validate({"name": "scans", "declaration": {"path": folder / "scans.yaml"}})
    first = load_once(config)
    assert load_once(config) is first
    # Deep in a folder, whose own time does not change.
    Image.new("RGB", (20, 24), (7, 7, 7)).save(folder / "private" / "no" / "F" / "0.png")
    assert by_shade(load_once(config), "private")[7] == (0, 0)
    for path in sorted((folder / "public").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (folder / "public").rmdir()
    with pytest.raises(DataError, match=r"public: missing file\. "):
        load_once(config)


def test_a_pattern_stands_for_the_folders_of_several_clinics(folder: Path) -> None:
    (folder / "scans.yaml").write_text(FOLDERS.replace("private: private", "private: 'clinic-?'"), encoding="utf-8")
    for place in range(8):
        ill, sex, clinic = ("no", "yes")[place % 2], "FM"[place // 2 % 2], "ab"[place // 4]
        path = folder / f"clinic-{clinic}" / ill / sex / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        (folder / "private" / ill / sex / f"{place}.png").rename(path)
    config = DataConfig.model_validate({"name": "scans", "declaration": {"path": folder / "scans.yaml"}})
    dataset = load_once(config)
    assert by_shade(dataset, "private") == {shade("private", i): (i % 2, i // 2 % 2) for i in range(8)}
    assert load_once(config) is dataset
    # Lists that match the pattern too are read instead of the folders next to them.
    (folder / "clinic-1").write_text("path,level_1,level_2\nclinic-a/no/F/0.png,no,F\nclinic-a/yes/M/3.png,yes,M\n")
    assert len(load_once(config).private) == 2


def test_names_do_not_tell_the_folder_of_a_group(folder: Path) -> None:
    (folder / "scans.yaml").write_text(FOLDERS, encoding="utf-8")
    before = set(load_data(folder / "scans.yaml").private.record_id)
    (folder / "private" / "no" / "F" / "0.png").rename(folder / "private" / "no" / "M" / "0.png")
    after = load_data(folder / "scans.yaml")
    assert set(after.private.record_id) == before
    assert by_shade(after, "private")[shade("private", 0)] == (0, 1)


@pytest.mark.parametrize("how", ["declared", "option"])
def test_oriented_gradients(how: str, folder: Path) -> None:
    pixels = load_data(folder / "scans.yaml")
    if how == "declared":
        (folder / "scans.yaml").write_text(TABLE.replace("size: 16", "size: 16, features: oriented_gradients"))
    options = {} if how == "declared" else {"features": "oriented_gradients"}
    dataset = load_data(folder / "scans.yaml", options=options)
    assert (dataset.kind, dataset.private.x.shape[1]) == ("tabular", NUM_VALUES)
    assert np.allclose(dataset.private.x.numpy(), oriented_gradients(pixels.private.x).numpy())


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("private.csv", "/0.png", "/gone.png", r"column path: expected a picture, got 'private/no/F/gone\.png' in 1"),
        ("private.csv", "private/no/F/0.png", "../private.csv", r"expected a picture, got '\.\./private\.csv' in 1"),
        ("private.csv", "private/no/F/0.png", "/etc/hostname", r"expected a picture, got '/etc/hostname' in 1 row"),
        ("private.csv", "private/no/F/0.png", "private.csv", r"private\.csv: not a readable picture"),
        ("private.csv", "path,", "file,", r"private\.csv: no column path"),
        ("scans.yaml", "pictures: {size: 16, channels: 1}\n", "", r"features: missing"),
        ("scans.yaml", "kind: images\n", "", r"kind: expected images with `pictures`"),
        ("scans.yaml", "person: patient", "features: {sex: {categories: [F]}}", r"kind: .* without `features`"),
        ("scans.yaml", "size: 16", "size: 4", r"pictures\.size: .*got '4'\."),
        ("scans.yaml", "channels: 1", "channels: 2", r"pictures\.channels: .*got '2'\."),
        ("scans.yaml", "size: 16", "features: edges", r"pictures\.features: .*got "),
        ("scans.yaml", "private.csv", "public/yes", r"public/yes: no column patient"),
        ("scans.yaml", "public.csv", "empty", r"empty: missing file"),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_refused(file: str, old: str, new: str, message: str, folder: Path) -> None:
    text = (folder / file).read_text(encoding="utf-8")
    assert old in text
    (folder / file).write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        load_data(folder / "scans.yaml")


def test_pictures_at_several_depths_are_refused(folder: Path) -> None:
    (folder / "scans.yaml").write_text(FOLDERS, encoding="utf-8")
    Image.new("RGB", (8, 8)).save(folder / "private" / "stray.png")
    with pytest.raises(
        DataError, match=r"private: expected pictures .* at one depth, got 9 at 2 depths; arrange them as CLASS"
    ):
        load_data(folder / "scans.yaml")


FUNCTION = """
import pathlib

import torch

pathlib.Path("ran").touch()


def rows(picture):
    return picture.float().mean(dim=2).flatten() / 255


def ragged(picture):
    return torch.zeros(1 + int(picture[0, 0, 0]) % 2 + int(picture[0, 0, 0] > 10))


def nothing(picture):
    return torch.tensor([float("nan")])
"""


def test_a_function_of_one_s_own_makes_features_where_code_may_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"features_of_mine_{abs(hash(folder)) % 10**9}"
    (folder / f"{module}.py").write_text(FUNCTION, encoding="utf-8")
    monkeypatch.chdir(folder)

    def declare(function: str) -> Path:
        text = TABLE.replace("size: 16", f"size: 16, features: '{module}:{function}'")
        (folder / "scans.yaml").write_text(text, encoding="utf-8")
        return folder / "scans.yaml"

    with pytest.raises(DataError, match=r"pictures\.features: .* is code that would run .* set FAIRPATE_ALLOW_CODE=1"):
        load_data(declare("rows"))
    assert not (folder / "ran").exists()
    with monkeypatch.context() as allowed:
        allowed.setenv(ALLOWED, "1")
        dataset = load_data(declare("rows"))
        assert (dataset.kind, tuple(dataset.private.x.shape)) == ("tabular", (8, 16))
        plain = load_data(declare("rows"), options={"features": "pixels"})
        torch.testing.assert_close(dataset.private.x, plain.private.x.float().mean(dim=3).flatten(1) / 255)
        for function, words in (
            ("ragged", "all of one length"),
            ("nothing", "finite"),
            ("missing", "has no attribute"),
        ):
            with pytest.raises(DataError, match=rf"pictures\.features: (.|\n)*{words}"):
                load_data(declare(function))
