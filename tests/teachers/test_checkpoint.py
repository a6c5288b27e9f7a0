"""Checkpoints: named by what determines them, whole or absent."""

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from object_store import ACCESS_KEY, SECRET_KEY, object_store

from fairpate.config import AugmentConfig, FitConfig, ModelConfig, TeachersTraining
from fairpate.data.dataset import Split
from fairpate.files import join
from fairpate.types import UserError
from teachers import ensemble
from teachers.ensemble import CheckpointError, is_stored, load_block, save_block
from teachers.work import BlockPool

WEIGHTS: dict[str, Any] = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((2,), dtype=np.float64)}


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


def test_the_name_follows_everything_that_determines_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hashes(*, x: float = 0.0, label: int = 0, engine: str = "loop", **changes: Any) -> list[str]:
        features = torch.zeros(6, 2, 1, 1).index_fill(0, torch.tensor(0), x)
        y = torch.tensor([label, 1, 0, 1, 0, 1])
        private = Split(x=features, y=y, z=y, record_id=tuple("abcdef"))
        fields = {"fit": FitConfig(epochs=1)} | changes.pop("fields", {})
        config = TeachersTraining(num_teachers=3, block_size=1, **fields)
        monkeypatch.setattr(ensemble, "choose_engine", lambda *_: engine)
        settings: dict[str, Any] = {"num_classes": 2, "seed": 0} | changes
        blocks = ensemble.train_ensemble(private, config, checkpoint_dir=tmp_path, **settings).blocks
        return [block.content.rpartition("-")[2] for block in blocks]

    first = int(ensemble.assign_teachers(["a"], 3, ensemble.shard_key(0))[0])
    before = hashes()
    assert hashes() == before
    for changed in (hashes(x=2.0), hashes(label=1)):
        assert [teacher for teacher in range(3) if changed[teacher] != before[teacher]] == [first]
    others = [
        hashes(seed=1),
        hashes(augment=AugmentConfig(channel_swap=0.5)),
        hashes(num_classes=3),
        hashes(engine="stacked"),
        hashes(fields={"fit": FitConfig(epochs=2)}),
        hashes(fields={"model": ModelConfig(name="mlp", hidden=(3,))}),
        hashes(fields={"max_shard_size": 6}),
    ]
    assert len({name for names in (before, *others) for name in names}) == 3 * (1 + len(others))


def test_the_name_follows_the_numbers_of_the_teachers(tmp_path: Path) -> None:
    nothing = torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)
    blocks, _, _ = ensemble.stored_blocks(
        tmp_path,
        2,
        1,
        kind="teachers",
        determined_by={},
        shards_of=lambda _: [nothing],
        function=lambda *_: (WEIGHTS, None),
        shared=None,
        workers=BlockPool(),
        on_progress=None,
    )
    assert len({block.content.rpartition("-")[2] for block in blocks}) == 2


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
        locations = [join(place, "teachers-00000-0.safetensors") for place in (folder, tmp_path)]
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
