"""Write files on a disk or in an object store, so that each file is complete or absent even after a crash.

A local file is written under a temporary name, flushed to the disk and renamed. A :class:`Storage` is a folder that
pyarrow.fs can access: a local or network folder, S3, Google Cloud Storage. An object appears there when its upload is
complete. Credentials come from the environment or from the role of the node.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fairpate.types import UsageError, UserError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

CACHE_VARIABLE = "FAIRPATE_CACHE"
Location = str | os.PathLike[str]


class PathIn:
    """A descriptor for a class with a folder: the path of a file in that folder. With ``page = PathIn("root",
    "page.html")`` in the class, ``self.page`` is the path of that file in the folder ``self.root``.

    ``of``: the name of the attribute with the folder. ``name``: the file's name. ``meaning``: the docstring.
    """

    def __init__(self, of: str, name: str, meaning: str = "") -> None:
        self._of, self._name, self.__doc__ = of, name, meaning

    def __get__(self, holder: Any, _: type | None = None) -> Path:
        # Read from the object: a subclass may have that folder elsewhere.
        return getattr(holder, self._of) / self._name


class PlaceError(UsageError, OSError):
    """Raised for a path to which nothing can be written; the message names the option, the path and the remedy."""


def cache_dir() -> Path:
    """Return the folder for files that can be recomputed: FAIRPATE_CACHE, or fairpate in XDG_CACHE_HOME (~/.cache)."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(CACHE_VARIABLE) or usual / "fairpate")


def check_output(path: Path, option: str, *, is_file: bool = False, suffixes: tuple[str, ...] = ()) -> None:
    """Raise PlaceError unless output can be written to ``path``. The check leaves no file behind.

    Without ``is_file``, ``path`` must be a folder in which files can be created, or a new folder that can be created.
    With ``is_file``, it must be a file that can be written in an existing folder, and its name must end in one of
    ``suffixes`` (if any). ``option``: the name of the option that gave the path, for messages.
    """
    if suffixes and path.suffix not in suffixes:
        raise PlaceError(f"{option}: expected a file name that ends in {' or '.join(suffixes)}, got {path}; rename it.")
    # By writing an unnamed file into the nearest existing folder: permissions alone do not show that it can be written.
    try:
        with suppress(FileNotFoundError):
            path.lstat()  # raises for a name that is too long or empty
        there = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
        folder = there if there.is_dir() or there != path else there.parent
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlaceError(f"{option}: {str(path)!r} cannot be written ({reason}); give another path.") from error
    if not is_file:
        if path.exists() and not path.is_dir():
            raise PlaceError(f"{option}: {path} is a file, expected a folder; give another path.")
        return
    if path.is_dir():
        raise PlaceError(f"{option}: {path} is a folder, expected a file; add a file name.")
    if path.exists() and not path.is_file():  # a device would be replaced
        raise PlaceError(f"{option}: {path} is a device, expected a file; give another path.")
    if not path.parent.is_dir():
        raise PlaceError(f"{option}: {path.parent} is not a folder; create it, or give another path.")


@contextmanager
def opened(path: Location, flags: int, mode: int = 0o777) -> Iterator[int]:
    """Context manager: open a file or a folder as :func:`os.open` does, yield its descriptor, and close it at the end
    of the ``with`` block."""
    descriptor = os.open(path, flags, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_atomically(path: Path, write: Callable[[Path], object], *, private: bool = False) -> None:
    """Call ``write`` with a temporary path next to ``path``, then rename the file to ``path``.

    ``private``: only its owner can read the file. Other users cannot write to it under any umask. An error in ``write``
    is raised and leaves ``path`` unchanged. An OSError without a file name, such as that of a full disk, is raised with
    ``path`` as its file name.
    """
    # Processes on several nodes may write the same name at once: a process id would not be unique.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        if private:  # rights before content: no one may open it in between
            temporary.touch(mode=0o600)
        write(temporary)
        # Before the rename: no loss of power leaves the name with half of the content.
        with opened(temporary, os.O_RDONLY | os.O_NOFOLLOW) as descriptor:
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) & ~stat.S_IWOTH)
            give_to_owner(descriptor, path.parent)
            os.fsync(descriptor)
        temporary.replace(path)
    except OSError as error:
        # The temporary name is nobody's: what cannot be written is the file that was asked for.
        if error.errno is None or error.filename not in (None, str(temporary), temporary):
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    # The rename too: until the folder is on the disk, a loss of power may bring the old file back.
    sync(path.parent)


def give_to_owner(descriptor: int, folder: Path) -> None:
    """Give the open file or folder ``descriptor``, which this process made in ``folder``, to the owner of ``folder`` if
    this process is root: a service that runs as this owner could not read it otherwise. Nothing happens for other
    users."""
    if os.geteuid() != 0:
        return
    owner, found = folder.stat(), os.fstat(descriptor)
    # By the open file and with one name: the folder's owner could put a link to another file in the place of a name.
    is_own = stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink == 1)
    if owner.st_uid and found.st_uid == 0 and is_own:
        with suppress(PermissionError):  # of a root without this right, as in some containers
            os.fchown(descriptor, owner.st_uid, owner.st_gid)


def make_folder(path: Path, *, private: bool = False) -> None:
    """Create a folder, with the parents that are missing, unless it exists. Users who are neither its owner nor of its
    group cannot write there under any umask; with ``private``, only its owner can access a new folder."""
    for each in (*reversed(path.parents), path):
        if each.is_dir():
            continue
        # Not by `parents=True`, which makes parents with the rights of the umask alone.
        each.mkdir(mode=0o700 if private and each == path else 0o775, exist_ok=True)
        with opened(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as descriptor:
            give_to_owner(descriptor, each.parent)


def private_folder(path: Path) -> None:
    """Create a folder that only its owner can access, or restrict an existing folder to its owner."""
    path.mkdir(mode=0o700, exist_ok=True)
    # mkdir sets no mode on a folder that exists already.
    path.chmod(0o700)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    with opened(path, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)


_MARKER = ".fairpate-storage"
_UNUSABLE = (
    "storage: {}: cannot be written and read from here ({}); give an absolute path or a URI of pyarrow.fs (file://, "
    "s3://, gs://), and this node the right to read and write there."
)


class StorageError(UserError, OSError):
    """Raised if the shared storage cannot be used; the message names the field, the value and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A folder that every node of a cluster reaches by the same URI; opened by :func:`open_storage`.

    ``identity`` is the content of a marker file in the folder. A node compares it with the marker that it finds at
    ``uri``, because the same path may lead to another folder on that node.
    """

    uri: str
    identity: str

    def require_here(self) -> None:
        """Raise StorageError unless ``uri`` leads, on the node that calls this, to the same folder as on the node that
        opened the storage."""
        if _identity(self.uri) != self.identity:
            raise StorageError(
                f"storage: {self.uri}: not the same place on every node of the cluster; "
                "give a network file system mounted at that path everywhere, or an object store."
            )


def open_storage(uri: str) -> Storage:
    """Return the storage at ``uri`` after writing and reading a test file there. StorageError if that fails."""
    # An identity that exists is kept and still written again, because writing is what is tried.
    identity = _identity(uri) or secrets.token_hex(16)
    marker = join(uri, _MARKER)
    try:
        write(marker, identity.encode())
        # Read back: a role may write and have no right to read.
        found = read(marker)
    except (OSError, ValueError, ImportError) as error:
        raise StorageError(_UNUSABLE.format(uri, error)) from error
    return Storage(uri=uri, identity=found.decode())


def join(folder: Location, name: str) -> str:
    """Return the location of the file ``name`` inside ``folder``; a URI keeps its options (``?region=...``)."""
    text = os.fspath(folder)
    if "://" not in text:
        return str(Path(text) / name)
    base, question, options = text.partition("?")
    return f"{base.rstrip('/')}/{name}{question}{options}"


def write(location: Location, content: bytes) -> None:
    """Write ``content`` to ``location``, complete or not at all; a new local folder gets mode 0700, a file 0600.

    OSError if that fails, ValueError for a URI that pyarrow.fs does not know.
    """
    filesystem, path = _place(location)
    if filesystem.type_name == "local":
        # Not left to pyarrow, which writes a local file in place and under the umask. The mode is that of the last
        # folder alone, which holds the files; its parents follow the umask.
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(Path(path), lambda temporary: temporary.write_bytes(content), private=True)
        return
    with filesystem.open_output_stream(path) as stream:
        stream.write(content)


def read(location: Location) -> bytes:
    """Return the content of the file at ``location``. OSError if it cannot be read, ValueError for an unknown URI."""
    filesystem, path = _place(location)
    with filesystem.open_input_file(path) as stream:
        return stream.read()


def exists(location: Location) -> bool:
    """Return whether a file exists at ``location``, without reading it.

    A location that cannot be reached raises the errors of :func:`read`; a missing file raises none.
    """
    filesystem, path = _place(location)
    return bool(filesystem.get_file_info(path).is_file)


def _identity(uri: str) -> str | None:
    try:
        return read(join(uri, _MARKER)).decode()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ImportError) as error:
        raise StorageError(_UNUSABLE.format(uri, error)) from error


def _place(location: Location) -> tuple[FileSystem, str]:
    """Return the file system of ``location``, and the path there."""
    from pyarrow.fs import FileSystem, LocalFileSystem

    text = os.fspath(location)
    return FileSystem.from_uri(text) if "://" in text else (LocalFileSystem(), text)


def file_version(path: Path) -> tuple[int, ...]:
    """Return numbers that identify the state of a file, to detect changes. They differ once the file is edited or
    replaced, or its permissions are changed. Empty if the file is not accessible.
    """
    try:
        found = path.stat()
    except OSError:
        return ()
    # All of these: a file may be replaced within a tick of the clock, in its old size.
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode


def arrays_digest(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return a digest of named arrays, which covers their names, types, shapes and values."""
    digest = hashlib.sha256()
    # Sorted, as a file has an order of its own; with type and shape, as equal bytes may be different arrays.
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(json.dumps([name, array.dtype.str, list(array.shape)]).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
