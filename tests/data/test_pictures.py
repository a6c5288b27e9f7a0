"""Pictures to pixels: the centre square, from an archive or a folder, cached until damaged."""

from __future__ import annotations

import io
import logging
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fairpate.data import DataError
from fairpate.data import pictures as images
from fairpate.data.dataset import SourceFile
from fairpate.data.pictures import Pictures, open_pictures
from fairpate.files import cache_dir

ARCHIVE = SourceFile(path="toy/faces.zip", extracted="toy/faces", manual="Ask the publisher.")


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def random_picture(height: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def decode(pictures: Pictures, names: Sequence[str], **options: Any) -> np.ndarray:
    """A copy: a view would not survive the damage that is done to its file."""
    return images.decode(pictures, names, **options).x.numpy().copy()


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRPATE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two pictures of the wanted size and two of other shapes, as archive and as folder."""
    pictures = {
        "a.png": png(random_picture(8, 8, 0)),
        "sub/b.png": png(random_picture(8, 8, 1)),
        "wide.png": png(
            np.concatenate([np.full((16, 8, 3), 9, np.uint8), np.full((16, 16, 3), 200, np.uint8)], axis=1)
        ),
        "tall.png": png(random_picture(20, 10, 2)),
    }
    root = tmp_path / "data"
    (root / "toy" / "faces" / "sub").mkdir(parents=True)
    with zipfile.ZipFile(root / "toy" / "faces.zip", "w") as archive:
        archive.writestr("readme.txt", "no picture")
        archive.writestr("__MACOSX/._a.png", b"no picture either")
        for name, content in pictures.items():
            archive.writestr(name, content)
            (root / "toy" / "faces" / name).write_bytes(content)
    return root


def archived(folder: Path) -> Pictures:
    (folder / "toy" / "faces").rename(folder / "toy" / "elsewhere")
    return open_pictures(ARCHIVE, folder)


def test_an_archive_and_its_extracted_folder_give_the_same_pixels(folder: Path) -> None:
    extracted = open_pictures(ARCHIVE, folder)
    names = ("a.png", "sub/b.png", "tall.png", "wide.png")
    assert extracted.names == names
    from_folder = decode(extracted, names, size=8)
    from_zip = decode(archived(folder), names, size=8)
    assert from_folder.shape == (4, 3, 8, 8)
    assert np.array_equal(from_folder, from_zip)


def test_pixels_are_the_picture_and_follow_the_wanted_order(folder: Path) -> None:
    pixels = decode(open_pictures(ARCHIVE, folder), ["sub/b.png", "a.png"], size=8)
    assert np.array_equal(pixels[0], random_picture(8, 8, 1).transpose(2, 0, 1))
    assert np.array_equal(pixels[1], random_picture(8, 8, 0).transpose(2, 0, 1))


def test_the_centre_square_is_kept(folder: Path) -> None:
    # 24 wide, 16 high: the square is columns 4 to 20, of which the first quarter is dark.
    (pixels,) = decode(open_pictures(ARCHIVE, folder), ["wide.png"], size=16)
    assert (pixels[:, :, :4] == 9).all()
    assert (pixels[:, :, 4:] == 200).all()


def test_grey_pictures_have_one_channel(folder: Path) -> None:
    assert decode(open_pictures(ARCHIVE, folder), ["a.png"], size=8, mode="L").shape == (1, 1, 8, 8)


def counting(pictures: Pictures) -> tuple[Pictures, list[int]]:
    calls: list[int] = []

    def read(names: Sequence[str]) -> Iterator[bytes]:
        calls.append(len(names))
        return pictures.read(names)

    return Pictures(origin=pictures.origin, key=pictures.key, names=pictures.names, read=read), calls


def test_pictures_are_decoded_once_and_the_cache_is_the_owners(folder: Path) -> None:
    pictures, calls = counting(archived(folder))
    first = decode(pictures, pictures.names, size=8)
    assert np.array_equal(first, decode(pictures, pictures.names, size=8))
    assert calls == [4]
    (cached,) = cache_dir().iterdir()
    assert cache_dir().stat().st_mode & 0o077 == 0
    assert cached.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "text"])
def test_a_damaged_cache_is_made_again(folder: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    pictures, calls = counting(archived(folder))
    first = decode(pictures, pictures.names, size=8)
    (path,) = cache_dir().iterdir()
    content = bytearray(path.read_bytes())
    content[content.index(first.tobytes()[:64]) + 70] ^= 1
    path.write_bytes({"flip": content, "truncate": content[:-50], "empty": b"", "text": b"hello " * 50}[damage])
    with caplog.at_level(logging.WARNING):
        assert np.array_equal(first, decode(pictures, pictures.names, size=8))
    assert calls == [4, 4]
    assert "damaged cache" in caplog.text
    assert np.array_equal(first, decode(pictures, pictures.names, size=8))
    assert calls == [4, 4]


def test_a_changed_picture_in_a_folder_is_noticed(folder: Path) -> None:
    before = decode(open_pictures(ARCHIVE, folder), ["a.png"], size=8)
    (folder / "toy" / "faces" / "a.png").write_bytes(png(random_picture(8, 8, 9)))
    assert not np.array_equal(before, decode(open_pictures(ARCHIVE, folder), ["a.png"], size=8))


def test_without_a_writable_cache_pictures_are_still_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "file").write_text("in the way")
    monkeypatch.setenv("FAIRPATE_CACHE", str(folder / "file" / "cache"))
    assert decode(open_pictures(ARCHIVE, folder), ["a.png"], size=8).shape == (1, 3, 8, 8)
    assert "not cached" in caplog.text


def test_an_unreadable_picture_is_named(folder: Path) -> None:
    (folder / "toy" / "faces" / "a.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"faces: a\.png: not a readable picture \(of no known format\)"):
        decode(open_pictures(ARCHIVE, folder), ["a.png"], size=8)


def test_a_header_of_billions_of_pixels_is_refused(folder: Path) -> None:
    size = (60_000).to_bytes(4, "big")
    header = b"IHDR" + size + size + bytes([8, 2, 0, 0, 0])
    chunk = (len(header) - 4).to_bytes(4, "big") + header + zlib.crc32(header).to_bytes(4, "big")
    (folder / "toy" / "faces" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk)
    with pytest.raises(DataError, match=r"faces: a\.png: not a readable picture"):
        decode(open_pictures(ARCHIVE, folder), ["a.png"], size=8)


def test_a_damaged_archive_is_named(folder: Path) -> None:
    (folder / "toy" / "faces.zip").write_bytes(b"PK but no archive")
    with pytest.raises(DataError, match=r"faces\.zip: damaged archive"):
        archived(folder)


def test_missing_pictures_name_archive_and_instruction(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"faces\.zip: missing file\. Ask the publisher\. Put faces\.zip into"):
        open_pictures(ARCHIVE, tmp_path)
