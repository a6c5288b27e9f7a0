"""Checkpoints: named by what determines them, whole or absent."""

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from object_store import ACCESS_KEY, SECRET_KEY, object_store

from fairpate.config import AugmentConfig, FitConfig, ModelConfig
from fairpate.files import join
from fairpate.types import UserError
from teachers.ensemble import CheckpointError, block_name, is_stored, load_block, save_block
from teachers.teacher import Shard, TeacherSpec

SPEC = TeacherSpec(model=ModelConfig(), fit=FitConfig(), num_classes=2, seed=0)
WEIGHTS: dict[str, Any] = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((2,), dtype=np.float64)}


def _shard(value: float = 0.0, label: int = 0) -> Shard:
    return Shard(x=torch.full((3, 2), value), y=torch.tensor([0, 1, label]))


def test_weights_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "new" / "block.safetensors"
    save_block(path, WEIGHTS)
    loaded = load_block(path)
    assert loaded.keys() == WEIGHTS.keys()
    for name, value in WEIGHTS.items():
        np.testing.assert_array_equal(loaded[name], value)
        assert loaded[name].dtype == value.dtype
    assert [p.name for p in path.parent.iterdir()] == ["block.safetensors"]


def test_folder_and_files_are_for_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    earlier = os.umask(0o022)
    try:
        save_block(folder / "block.safetensors", WEIGHTS)
    finally:
        os.umask(earlier)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "block.safetensors").stat().st_mode) == 0o600


def test_the_name_follows_everything_that_determines_the_weights() -> None:
    def name(
        shards: list[Shard], spec: TeacherSpec = SPEC, teachers: tuple[int, ...] = (0, 1), engine: Any = "loop"
    ) -> str:
        return block_name(shards, spec, teachers, engine)

    shards = [_shard(), _shard(1.0)]
    names = [
        name(shards),
        name([_shard(2.0), _shard(1.0)]),
        name([_shard(label=1), _shard(1.0)]),
        name(shards, replace(SPEC, seed=1)),
        name(shards, replace(SPEC, augment=AugmentConfig(channel_swap=0.5))),
        name(shards, replace(SPEC, num_classes=3)),
        name(shards, replace(SPEC, fit=FitConfig(epochs=1))),
        name(shards, replace(SPEC, model=ModelConfig(hidden=(3,)))),
        name(shards, teachers=(0, 2)),
        name(shards, engine="stacked"),
    ]
    assert len(set(names)) == len(names)
    assert name([_shard(), _shard(1.0)]) == names[0]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_file_is_detected(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "block.safetensors"
    save_block(path, WEIGHTS)
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-1] ^= 1
    path.write_bytes({"cut": content[:-5], "flip": content, "empty": b""}[damage])
    with pytest.raises(CheckpointError, match="train the teachers again"):
        load_block(path)
    assert not is_stored(None, path)


def test_an_object_store_keeps_checkpoints_as_a_disk_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    with object_store() as store:
        folder = store.uri("teachers")
        locations = [join(place, block_name([_shard()], SPEC, (0,), "loop")) for place in (folder, tmp_path)]
        assert not is_stored(None, locations[0])
        for location in locations:
            save_block(location, WEIGHTS)
        [(name, content)] = store.objects.items()
        assert name == f"teachers/{Path(locations[1]).name}"
        assert content == Path(locations[1]).read_bytes()
        loaded = load_block(locations[0])
        assert all((loaded[key] == value).all() for key, value in WEIGHTS.items())
        store.objects[name] = content[:-1]
        assert not is_stored(None, locations[0])


@pytest.mark.parametrize("header", [b"", b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 16])
def test_a_file_without_a_digest_is_damaged(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "block.safetensors"
    path.write_bytes(header)
    with pytest.raises(CheckpointError, match="train the teachers again"):
        load_block(path)


def test_a_missing_file_is_not_intact(tmp_path: Path) -> None:
    assert not is_stored(None, tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read") as raised:
        load_block(tmp_path / "none.safetensors")
    assert isinstance(raised.value, UserError)


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    unwritable: dict[str, Any] = {"a": np.array(["text"])}
    with pytest.raises(Exception, match=r".+"):
        save_block(tmp_path / "block.safetensors", unwritable)
    assert list(tmp_path.iterdir()) == []
