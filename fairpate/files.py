"""Files that are whole or absent, also after a crash or a loss of power; and whether a place can be written at all.

A file is written under a temporary name in its own folder, brought to the disk, and renamed; then the folder is
brought to the disk too. Knows nothing of what is written.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fairpate.types import UsageError

CACHE_VARIABLE = "FAIRPATE_CACHE"


class PathIn:
    """A path in a folder of folders: of an object that has the folder ``of``, the entry ``name`` in that."""

    def __init__(self, of: str, name: str) -> None:
        self._of, self._name = of, name

    def __get__(self, holder: Any, _: type | None = None) -> Path:
        # Asked of the object: another kind of it may have that folder elsewhere.
        folder: Path = getattr(holder, self._of)
        return folder / self._name


class PlaceError(UsageError, OSError):
    """A place that nothing can be written to; the message names the option, the path and the remedy."""


def cache_dir() -> Path:
    """FAIRPATE_CACHE, or ~/.cache/fairpate: what lies there can be made again."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "fairpate")


def check_output_folder(path: Path, option: str) -> None:
    """PlaceError unless a folder is at ``path`` and takes files, or could be made there. Nothing stays behind."""
    _check_place(path, option)
    if path.exists() and not path.is_dir():
        raise PlaceError(f"{option}: {path} is a file, expected a folder; give another path.")


def check_output_file(path: Path, option: str, *, suffixes: tuple[str, ...] = ()) -> None:
    """PlaceError unless a file can be written at ``path``, whose folder must exist, and ends in one of ``suffixes``."""
    if suffixes and path.suffix not in suffixes:
        raise PlaceError(f"{option}: expected a file name that ends in {' or '.join(suffixes)}, got {path}.")
    _check_place(path, option)
    if path.is_dir():
        raise PlaceError(f"{option}: {path} is a folder, expected a file; add a name.")
    if path.exists() and not path.is_file():  # a device would be replaced
        raise PlaceError(f"{option}: {path} is a device, expected a file; give another path.")
    if not path.parent.is_dir():
        raise PlaceError(f"{option}: {path.parent} is no folder; make it, or give another path.")


def _check_place(path: Path, option: str) -> None:
    """Writes a file without a name into the nearest folder that exists: permissions alone do not tell."""
    try:
        with suppress(FileNotFoundError):
            path.lstat()  # a name that is too long, or no name at all
        there = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
        folder = there if there.is_dir() or there != path else there.parent
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlaceError(f"{option}: {str(path)!r} cannot be written ({reason}); give another path.") from error


def write_atomically(path: Path, write: Callable[[Path], object], *, private: bool = False) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it to ``path``; ``private``: for its owner only.

    Whatever ``write`` raises passes through, with ``path`` as it was before and nothing left behind; a full disk, of
    which the system names no file, with ``path``.
    """
    # Processes on several nodes may write the same name at once: a process id would not tell them apart.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        if private:  # rights before content: nobody may open it in between
            temporary.touch(mode=0o600)
        write(temporary)
        # Before the rename: no loss of power leaves the name with half of the content.
        sync(temporary)
        temporary.replace(path)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    # The rename too: until the folder is on the disk, a loss of power may bring the old file back.
    sync(path.parent)


def private_folder(path: Path) -> None:
    """Make a folder for its owner alone, or make one that is there such a folder."""
    path.mkdir(mode=0o700, exist_ok=True)
    # The mode says nothing of a folder that was there already.
    path.chmod(0o700)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
