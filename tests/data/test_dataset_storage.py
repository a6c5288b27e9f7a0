"""Parquet and back: exact, and no damaged file is believed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fairpate.data import SPLIT_NAMES, DataError, Dataset, Split, read_dataset, save_dataset


def split_of(x: torch.Tensor, prefix: str) -> Split:
    count = len(x)
    return Split(
        x=x,
        y=torch.arange(count) % 2,
        z=torch.arange(count) % 3,
        record_id=tuple(f"{prefix}-é-{i}" for i in range(count)),
        unit_id=tuple(f"{prefix}-é-{i // 2}" for i in range(count)),
    )


def dataset_of(kind: str) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    sizes = {"private": 5000, "public": 7, "validation": 0, "test": 3}
    if kind == "image":
        parts = {
            name: split_of(torch.randint(256, (n, 2, 3, 4), generator=generator, dtype=torch.uint8), name)
            for name, n in sizes.items()
        }
    else:
        parts = {name: split_of(torch.randn(n, 3, generator=generator), name) for name, n in sizes.items()}
    return Dataset(
        name="t",
        kind=kind,  # type: ignore[arg-type]
        label_names=("no", "yes"),
        group_names=("a", "b", "c"),
        sensitive_attribute="g",
        feature_names=("x", "y=1", "y=2") if kind == "tabular" else (),
        notes=("2 left out",),
        records_alone=kind == "tabular",
        **parts,
    )


def assert_same(first: Dataset, second: Dataset) -> None:
    for name in SPLIT_NAMES:
        ours, theirs = first.splits[name], second.splits[name]
        assert (ours.record_id, ours.unit_id) == (theirs.record_id, theirs.unit_id)
        for field in ("x", "y", "z"):
            mine, other = getattr(ours, field), getattr(theirs, field)
            assert mine.dtype == other.dtype
            assert mine.shape == other.shape
            assert torch.equal(mine, other)
    for field in ("name", "kind", "label_names", "group_names", "sensitive_attribute", "feature_names", "notes"):
        assert getattr(first, field) == getattr(second, field)
    assert first.records_alone == second.records_alone


@pytest.mark.parametrize("kind", ["image", "tabular"])
def test_round_trip_is_exact(kind: str, tmp_path: Path) -> None:
    dataset = dataset_of(kind)
    save_dataset(dataset, tmp_path / "new" / "folder")
    assert_same(dataset, read_dataset(tmp_path / "new" / "folder"))
    assert not list(tmp_path.rglob("*.partial"))


def test_a_folder_without_its_manifest_is_incomplete(tmp_path: Path) -> None:
    save_dataset(dataset_of("tabular"), tmp_path)
    (tmp_path / "dataset.json").unlink()
    with pytest.raises(DataError, match=r"dataset\.json: no complete data set here"):
        read_dataset(tmp_path)


def test_saving_again_first_withdraws_the_old_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_dataset(dataset_of("tabular"), tmp_path)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fairpate.data.storage.pq.write_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_dataset(dataset_of("tabular"), tmp_path)
    with pytest.raises(DataError, match="no complete data set"):
        read_dataset(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    save_dataset(dataset_of("tabular"), tmp_path)
    manifest = tmp_path / "dataset.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 3', '"format_version": 4'))
    with pytest.raises(DataError, match="expected format_version 3, got 4"):
        read_dataset(tmp_path)


@pytest.mark.parametrize("place", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_flipped_byte_is_noticed(place: float, tmp_path: Path) -> None:
    save_dataset(dataset_of("image"), tmp_path)
    path = tmp_path / "private.parquet"
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"private\.parquet: damaged: not what was saved"):
        read_dataset(tmp_path)


def test_a_truncated_file_is_noticed(tmp_path: Path) -> None:
    save_dataset(dataset_of("image"), tmp_path)
    path = tmp_path / "test.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"test\.parquet: damaged: not what was saved"):
        read_dataset(tmp_path)


def test_a_missing_split_is_noticed(tmp_path: Path) -> None:
    save_dataset(dataset_of("image"), tmp_path)
    (tmp_path / "public.parquet").unlink()
    with pytest.raises(DataError, match=r"public\.parquet: damaged: no file"):
        read_dataset(tmp_path)
