"""Pixels in mapped files: the same bytes, not in this process's memory, its owner's, and never trusted when damaged."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fairpate.data import large_arrays
from fairpate.data.large_arrays import Pixels, kept_pixels, map_pixels

SHAPE = (7, 3, 4, 5)


def pictures(shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def give(pixels: np.ndarray) -> Callable[[], Iterator[np.ndarray]]:
    return lambda: (pixels[start : start + 3] for start in range(0, len(pixels), 3))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    kept_pixels(tmp_path / "file.pixels", SHAPE, give(pictures()))
    return tmp_path / "file.pixels"


def test_a_mapped_file_holds_what_was_written_and_is_its_owners(file: Path) -> None:
    assert np.array_equal(map_pixels(file, SHAPE).numpy(), pictures())
    assert file.stat().st_mode & 0o077 == 0
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_writing_to_a_view_changes_neither_the_file_nor_another_view(file: Path) -> None:
    before, (mine, other) = file.read_bytes(), (map_pixels(file, SHAPE) for _ in range(2))
    mine.zero_()
    assert not mine.any()
    assert np.array_equal(other.numpy(), pictures())
    assert file.read_bytes() == before


def test_pictures_of_another_shape_are_refused(file: Path) -> None:
    with pytest.raises(ValueError, match=r"shape \(7, 3, 5, 4\)"):
        map_pixels(file, (7, 3, 5, 4))


@pytest.mark.parametrize("damage", ["first pixel", "last pixel", "half", "empty", "text"])
def test_a_damaged_file_is_made_again(damage: str, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = bytearray(file.read_bytes())
    start = bytes(content).index(pictures().tobytes())
    place = {"first pixel": start, "last pixel": start + pictures().size - 1}.get(damage, 0)
    content[place] ^= 1
    file.write_bytes({"half": content[: len(content) // 2], "empty": b"", "text": b"hello " * 500}.get(damage, content))
    with caplog.at_level(logging.WARNING):
        again = kept_pixels(file, SHAPE, give(pictures()))
    assert "damaged cache" in caplog.text
    assert np.array_equal(again.x.numpy(), pictures())
    assert np.array_equal(map_pixels(file, SHAPE).numpy(), pictures())


def test_too_few_pictures_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected 420 bytes of pixels, got 360"):
        kept_pixels(tmp_path / "file.pixels", SHAPE, give(pictures()[:6]))
    assert not list(tmp_path.iterdir())


def test_few_rows_are_copied_and_many_kept_in_a_file_of_their_own(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, index = Pixels(x=map_pixels(file, SHAPE), file=file), torch.tensor([5, 0, 6])
    assert np.array_equal(pixels.rows(index).numpy(), pictures()[index])
    assert list(file.parent.iterdir()) == [file]
    monkeypatch.setattr(large_arrays, "COPIED_BYTES", 100)
    assert np.array_equal(pixels.rows(index).numpy(), pictures()[index])
    (kept,) = set(file.parent.iterdir()) - {file}
    made_at = kept.stat().st_mtime_ns
    assert np.array_equal(pixels.rows(index).numpy(), pictures()[index])
    assert np.array_equal(pixels.rows(index.flip(0)).numpy(), pictures()[index.flip(0)])
    assert kept.stat().st_mtime_ns == made_at
    assert len(list(file.parent.iterdir())) == 3


def test_pixels_in_memory_have_rows_too() -> None:
    x = torch.from_numpy(pictures())
    assert torch.equal(Pixels(x=x).rows(torch.tensor([2, 2])), x[[2, 2]])


def in_another_process(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_mapping_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    shape = (96, 1, 1024, 1024)
    kept_pixels(tmp_path / "file.pixels", shape, give(np.repeat(np.arange(96, dtype=np.uint8), 2**20).reshape(shape)))
    script = """
import re, sys, torch
from pathlib import Path
from fairpate.data.large_arrays import Pixels, map_pixels
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
torch.ones(3).sum()
before, path = anonymous(), Path(sys.argv[1])
pixels = Pixels(x=map_pixels(path, (96, 1, 1024, 1024)), file=path)
rows = pixels.rows(torch.arange(95, 5, -1))
total = sum(int(row.max()) for row in rows)
print(total, anonymous() - before < 32)
"""
    assert in_another_process(script, tmp_path / "file.pixels") == f"{sum(range(6, 96))} True"


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
def test_a_full_disk_leaves_the_pictures_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pictures = torch.zeros(9, 1, 32, 32, dtype=torch.uint8).numpy()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        found = kept_pixels(tmp_path / "file.pixels", pictures.shape, give(pictures))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert np.array_equal(found.x.numpy(), pictures)
    assert found.file is None
    assert "pictures are not cached" in caplog.text
    assert not list(tmp_path.iterdir())
