"""Real files against their publishers' counts."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from fairpate.config import DataConfig
from fairpate.data import DataError, Dataset, describe, load_data

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")


def counts_of(dataset: Dataset) -> list[list[int]]:
    """Records per group and class over all splits."""
    z, y = (torch.cat([getattr(split, field) for split in dataset.splits.values()]) for field in "zy")
    flat = torch.bincount(z * dataset.num_classes + y, minlength=dataset.num_groups * dataset.num_classes)
    return flat.reshape(dataset.num_groups, dataset.num_classes).tolist()


def load(name: str, data_dir: Path, **options: object) -> Dataset:
    dataset = load_data(DataConfig(name=name, data_dir=data_dir, options=options))
    assert dataset.private.y.dtype == dataset.private.z.dtype == torch.int64
    names = [name for split in dataset.splits.values() for name in split.record_id]
    assert len(names) == len(set(names))
    if dataset.kind == "tabular":
        x = torch.cat([split.x for split in dataset.splits.values()])
        assert x.dtype == torch.float32
        assert x.shape[1] == len(dataset.feature_names) == len(set(dataset.feature_names))
        assert x.min() >= 0
        assert x.max() <= 1
    return dataset


def test_adult_by_sex(data_dir: Path) -> None:
    dataset = load("adult", data_dir)
    assert len(dataset.feature_names) == 102
    assert len(dataset.test) == 16_281
    train = [[0, 0], [0, 0]]
    for part in describe(dataset).splits:
        if part.name != "test":
            train = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(train, part.counts_GC, strict=True)]
    assert dataset.group_names == ("Female", "Male")
    assert train == [[9592, 1179], [15_128, 6662]]


@pytest.mark.slow
def test_adult_pooled_by_race_with_the_group_as_a_feature(data_dir: Path) -> None:
    dataset = load("adult", data_dir, sensitive="race", split="pooled", sensitive_as_feature=True)
    assert sum(map(sum, counts_of(dataset))) == 48_842
    assert len(dataset.test) == 48_842 // 4
    first = dataset.feature_names.index("race=White")
    assert torch.equal(dataset.private.x[:, first : first + 5].argmax(dim=1), dataset.private.z)


def test_credit_default(data_dir: Path) -> None:
    dataset = load("credit_default", data_dir)
    assert counts_of(dataset) == [[9015, 2873], [14_349, 3763]]
    assert len(dataset.feature_names) == 87
    assert "credit-17" in {name for split in dataset.splits.values() for name in split.record_id}


@pytest.mark.parametrize(
    ("file", "rows", "yes"), [pytest.param("additional", 41_188, 4640, marks=pytest.mark.slow), ("full", 45_211, 5289)]
)
def test_bank_by_age(file: str, rows: int, yes: int, data_dir: Path) -> None:
    counts = counts_of(dataset := load("bank", data_dir, file=file))
    assert sum(map(sum, counts)) == rows
    assert counts[0][1] + counts[1][1] == yes
    assert not {"age", "duration"} & set(dataset.feature_names)


@pytest.mark.slow
def test_bank_by_marital_status(data_dir: Path) -> None:
    dataset = load("bank", data_dir, sensitive="marital", duration_as_feature=True)
    assert [sum(row) for row in counts_of(dataset)] == [24_928, 11_568, 4612]
    assert dataset.notes == ("80 calls of unknown marital status left out",)
    assert "duration" in dataset.feature_names


def test_compas(data_dir: Path) -> None:
    counts = counts_of(load("compas", data_dir))
    assert sum(map(sum, counts)) == 6172
    # ProPublica's own table after the filter: African-American, Caucasian, Hispanic, and 343 + 31 + 11.
    assert [sum(row) for row in counts] == [3175, 2103, 509, 385]


@pytest.mark.parametrize("split", ["subject", "row"])
def test_parkinsons(split: str, data_dir: Path) -> None:
    dataset = load("parkinsons", data_dir, split=split)
    assert counts_of(dataset) == [[1945, 2063], [996, 871]]
    assert len(dataset.feature_names) == 19
    age = dataset.feature_names.index("age")
    ages = {name: set(part.x[:, age].tolist()) for name, part in dataset.splits.items()}
    # Subjects of one age exist, so only a division by row puts nearly every age into both parts.
    shared = len(ages["private"] & ages["test"]) / len(ages["private"] | ages["test"])
    assert (shared > 0.9) == (split == "row")
    assert dataset.unit == ("record" if split == "row" else "person")
    assert len(set().union(*(part.person_id for part in dataset.splits.values()))) == (0 if split == "row" else 42)


def test_parkinsons_without_the_motor_score(data_dir: Path) -> None:
    dataset = load("parkinsons", data_dir, motor_updrs_as_feature=False)
    assert len(dataset.feature_names) == 18
    assert not any("UPDRS" in name for name in dataset.feature_names)


def test_communities(data_dir: Path) -> None:
    dataset = load("communities", data_dir)
    assert sum(map(sum, counts_of(dataset))) == 1994
    assert not {"racepctblack", "ViolentCrimesPerPop"} & set(dataset.feature_names)


@pytest.mark.slow
def test_heart(data_dir: Path) -> None:
    dataset = load("heart", data_dir)
    assert dataset.group_names == ("female", "male")
    assert counts_of(dataset) == [[131_769, 10_205], [98_018, 13_688]]


@pytest.mark.parametrize(
    ("excerpt", "sensitive", "adults"), [("national2019", "SEX", 23_006), ("ma2019", "RAC1P", 6514)]
)
def test_acs(excerpt: str, sensitive: str, adults: int, data_dir: Path) -> None:
    dataset = load("acs", data_dir, excerpt=excerpt, sensitive=sensitive)
    assert sum(map(sum, counts_of(dataset))) == adults
    assert not any(name.startswith(("PINCP", "POVPIP", sensitive)) for name in dataset.feature_names)


@pytest.mark.slow
def test_utkface(data_dir: Path) -> None:
    dataset = load("utkface", data_dir)
    assert sum(map(sum, counts_of(dataset))) == 23_702
    assert dataset.private.x.shape[1:] == (3, 64, 64)
    assert [len(dataset.public), len(dataset.validation), len(dataset.test)] == [1500, 750, 1500]
    with zipfile.ZipFile(data_dir / "utkface" / "UTKFace-64px.zip") as archive:
        races: dict[str, set[int]] = {}
        for path in archive.namelist():
            age, gender, race, date = (path.rpartition("/")[2].split("_") + [""] * 3)[:4]
            if race.isdecimal() and date:
                races.setdefault(f"utkface-{age}_{gender}_{date.partition('.')[0]}", set()).add(int(race))
    assert all(int(z) in races[unit] for z, unit in zip(dataset.test.z, dataset.test.unit_id, strict=True))
    assert [name.split("_")[1] for name in dataset.test.record_id] == [str(int(label)) for label in dataset.test.y]


@pytest.mark.slow
def test_utkface_age(data_dir: Path) -> None:
    """Counted from the file names of the archive."""
    counts = counts_of(load("utkface", data_dir, label="age"))
    by_age = [sum(column) for column in zip(*counts, strict=True)]
    assert by_age == [3061, 1531, 7343, 4536, 2245, 2298, 1316, 699, 673]


def test_mnist_files_are_the_official_ones(data_dir: Path) -> None:
    official = {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    }
    for name, expected in official.items():
        content = (data_dir / "mnist" / name).read_bytes()
        assert hashlib.md5(content, usedforsecurity=False).hexdigest() == expected


def test_a_changed_value_is_a_damaged_file(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "parkinsons").mkdir()
    copy = tmp_path / "parkinsons" / "parkinsons_updrs.csv"
    shutil.copyfile(data_dir / "parkinsons" / copy.name, copy)
    content = copy.read_bytes()
    copy.write_bytes(content.replace(b"1,72,0,5.6431", b"1,72,1,5.6431", 1))
    with pytest.raises(DataError, match=r"parkinsons_updrs\.csv: damaged or other file: expected sha256"):
        load("parkinsons", tmp_path)
