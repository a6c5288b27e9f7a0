"""Atomic files: whole and on the disk, or as before."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fairpate.files import cache_dir, give_to_owner, make_folder, write_atomically

pytestmark = pytest.mark.usefixtures("light_runs")


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


def others_can_write(folder: Path) -> list[str]:
    """Names of all files and folders below ``folder`` that every user may write."""
    return sorted(path.name for path in folder.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o002)


def test_nothing_is_writable_for_others_under_a_umask_of_none(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_folder(tmp_path / "one" / "two")
        write_atomically(tmp_path / "one" / "two" / "file", lambda path: path.write_text("text"))
        write_atomically(tmp_path / "one" / "private", lambda path: path.write_text("text"), private=True)
    finally:
        os.umask(before)
    assert others_can_write(tmp_path) == []
    # As the umask says for the group.
    assert (tmp_path / "one" / "two" / "file").stat().st_mode & 0o777 == 0o664
    assert (tmp_path / "one" / "private").stat().st_mode & 0o777 == 0o600


def test_no_command_makes_files_that_others_can_write_under_a_umask_of_none(tmp_path: Path) -> None:
    line = f"umask 000; exec {sys.executable} -m fairpate new project"
    subprocess.run(["/bin/sh", "-c", line], cwd=tmp_path, check=True, capture_output=True)  # noqa: S603 - our own
    assert (tmp_path / "project").stat().st_mode & 0o777 == 0o755
    assert others_can_write(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_root_makes_in_a_folder_of_another_user_belongs_to_that_user(tmp_path: Path) -> None:
    """A service that runs as that user could not read it; where the name leads elsewhere, nothing is given away."""
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 4321, 4321)
    path = tmp_path / "theirs" / "file"
    write_atomically(path, lambda partial: partial.write_text("text"), private=True)
    make_folder(tmp_path / "theirs" / "folder")
    assert {each.stat().st_uid for each in (path, tmp_path / "theirs" / "folder")} == {4321}
    own = tmp_path / "own"
    own.write_text("root's")
    os.link(own, tmp_path / "theirs" / "link")
    descriptor = os.open(tmp_path / "theirs" / "link", os.O_RDONLY)
    give_to_owner(descriptor, tmp_path / "theirs")
    os.close(descriptor)
    assert own.stat().st_uid == 0


def test_the_cache_is_where_its_user_says_and_otherwise_where_the_desktop_keeps_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("FAIRPATE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_dir() == tmp_path / ".cache" / "fairpate"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_dir() == tmp_path / "caches" / "fairpate"
    monkeypatch.setenv("FAIRPATE_CACHE", str(tmp_path / "mine"))
    assert cache_dir() == tmp_path / "mine"
