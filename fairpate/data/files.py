"""The publisher's files: found, checked by sha256, and never written to.

The folder comes from the caller or from FAIRPATE_DATA. A missing or damaged file is refused with its name, what was
expected and what to do; records are read only from bytes whose checksum was right.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from pathlib import Path, PurePosixPath

from fairpate.data.entry import DataError, DataSettingsError, SourceFile

DATA_VARIABLE = "FAIRPATE_DATA"
ARCHIVE_SUFFIXES = (".gz", ".zip")


def resolve_data_dir(data_dir: Path | None) -> Path:
    """``data_dir``, or the folder in FAIRPATE_DATA; :class:`DataError` where neither is a folder."""
    chosen = data_dir or (Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None)
    if chosen is None:
        raise DataSettingsError(f"No data folder: set data.data_dir, give --data-dir, or set {DATA_VARIABLE}.")
    folder = chosen.expanduser()
    if not folder.is_dir():
        raise DataSettingsError(f"{folder}: no such data folder; correct data.data_dir, --data-dir or {DATA_VARIABLE}.")
    return folder


def find(file: SourceFile, folder: Path) -> tuple[SourceFile, Path] | None:
    """Which of ``file`` and its alternatives lies below ``folder``, and where; null if none does."""
    for choice in (file, *file.alternatives):
        if _is_pattern(choice):
            # The first by name: the order of a folder differs between machines.
            path = next(iter(sorted(folder.glob(choice.path))), folder / choice.path)
        else:
            path = folder / choice.path
        gzipped = [] if path.suffix in ARCHIVE_SUFFIXES else [path.with_name(path.name + ".gz")]
        extracted = [folder / choice.extracted] if choice.extracted else []
        for place in (*extracted, path, *gzipped):
            if place.is_dir() if place in extracted else place.is_file():
                return choice, place
    return None


def expanded(file: SourceFile, data_dir: Path | None) -> tuple[SourceFile, ...]:
    """The files that a pattern means, in the order of their paths; any other file alone."""
    if not _is_pattern(file):
        return (file,)
    folder = resolve_data_dir(data_dir)
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.glob(file.path) if path.is_file())
    if not paths:
        raise DataError(f"{folder / file.path}: no file matches; correct the pattern, or put files there.")
    return tuple(file.model_copy(update={"path": path}) for path in paths)


def _is_pattern(file: SourceFile) -> bool:
    return not {"*", "?"}.isdisjoint(file.path)


def locate(file: SourceFile, data_dir: Path | None) -> tuple[SourceFile, Path]:
    """As :func:`find`, in :func:`resolve_data_dir`; :class:`DataError` tells how to get a missing file."""
    folder = resolve_data_dir(data_dir)
    found = find(file, folder)
    if found is None:
        raise DataError(f"{folder / file.path}: missing file. {how_to_get(file, folder)}")
    return found


def how_to_get(file: SourceFile, folder: Path) -> str:
    """One sentence: the publisher's address or instruction, and the folder to put the file into."""
    target = folder / file.path
    if file.url is None:
        return f"{file.manual} Put {target.name} into {target.parent}.".strip()
    inside = f" ({file.member} in it)" if file.member else ""
    return f"Use `fairpate data fetch`, or get {target.name} from {file.url}{inside}, and put it into {target.parent}."


def verified(file: SourceFile, data_dir: Path | None) -> tuple[SourceFile, Path]:
    """As :func:`locate`, where the checksum of the published bytes is right; a gzipped copy's are unpacked."""
    choice, path = locate(file, data_dir)
    if choice.sha256 is not None:
        try:
            # Of the bytes inside: gzip adds names and times, so that copies of one table differ.
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: damaged gzip file ({error}); delete it and fetch it again.") from error
        check_sha256(found, choice, path)
    return choice, path


def read_bytes(file: SourceFile, data_dir: Path | None) -> bytes:
    """The published bytes of ``file``, checksum verified; a gzipped copy is unpacked first."""
    return read_any(file, data_dir)[1]


def read_any(file: SourceFile, data_dir: Path | None) -> tuple[SourceFile, bytes]:
    """Which of ``file`` and its alternatives is there, and its published bytes, checksum verified."""
    choice, path = locate(file, data_dir)
    content = path.read_bytes()
    if path.name != Path(choice.path).name:
        content = _unzip(content, path)
    check_sha256(hashlib.sha256(content).hexdigest(), choice, path)
    return choice, content


def check_archive(file: SourceFile, path: Path) -> str:
    """The sha256 of the archive at ``path``, found right; for archives that are read in pieces."""
    found = sha256_of(path)
    check_sha256(found, file, path)
    return found


def sha256_of(path: Path) -> str:
    """The file's checksum, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_sha256(found: str, file: SourceFile, path: Path) -> None:
    """:class:`DataError` unless ``found`` is the pinned checksum; a file without one passes."""
    if file.sha256 is not None and found != file.sha256:
        raise DataError(
            f"{path}: damaged or other file: expected sha256 {file.sha256}, found {found}. "
            f"Delete it and put the published one there. {how_to_get(file, _data_dir_of(path, file))}"
        )


def _data_dir_of(path: Path, file: SourceFile) -> Path:
    return path.parents[len(PurePosixPath(file.path).parts) - 1]


def _unzip(content: bytes, path: Path) -> bytes:
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file ({error}); delete it and fetch it again.") from error
