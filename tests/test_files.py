"""Atomic files: whole and on the disk, or as before."""

import errno
import os
from pathlib import Path

import pytest

from fairpate.files import write_atomically


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def write(temporary: Path) -> None:
        temporary.write_text("after")
        assert (temporary.parent, path.read_text()) == (tmp_path, "before")

    write_atomically(path, write)
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as full:
        write_atomically(tmp_path / "file", lambda _: Path("/dev/full").write_text("content"))
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(tmp_path / "file"))


def test_the_content_is_on_the_disk_before_its_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    synced = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write_atomically(path, lambda temporary: temporary.write_text("content"))
    assert synced == [(path.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_what_is_private_is_for_its_owner_from_its_first_byte_on(tmp_path: Path) -> None:
    modes = []

    def write(temporary: Path) -> None:
        temporary.write_text("votes")
        modes.append(temporary.stat().st_mode & 0o777)

    write_atomically(tmp_path / "votes", write, private=True)
    assert [*modes, (tmp_path / "votes").stat().st_mode & 0o777] == [0o600, 0o600]
