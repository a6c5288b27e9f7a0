"""Objects in a folder that may lie anywhere pyarrow.fs reaches: a local or network folder, S3, Google Cloud Storage.

A location is a local path or a URI. Whatever is written is whole or absent: a file is renamed into place and belongs to
its owner alone, an object of a store appears when its upload is complete. Knows nothing of what is written, and holds
no credentials: those come from the environment or from the role of the node.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fairpate.files import write_atomically
from fairpate.types import UserError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

Location = str | os.PathLike[str]
_MARKER = ".fairpate-storage"


class StorageError(UserError, OSError):
    """A place that cannot be used; the message names the field, the value and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A folder that every node of a cluster reaches by the same URI; made by :func:`open_storage`.

    ``identity`` is what the folder's marker says; another folder of the same name on another node says something else.
    """

    uri: str
    identity: str

    def require_here(self) -> None:
        """StorageError unless ``uri`` is this very folder on the node that asks."""
        if _identity(self.uri) != self.identity:
            raise StorageError(
                f"storage: {self.uri}: not the same place on every node of the cluster; "
                "give a network file system mounted at that path everywhere, or an object store."
            )


def open_storage(uri: str) -> Storage:
    """The storage at ``uri``, after writing and reading there. StorageError where that fails."""
    # Kept where it is there, and written again all the same: writing is what is tried.
    identity = _identity(uri) or secrets.token_hex(16)
    marker = join(uri, _MARKER)
    try:
        write(marker, identity.encode())
        found = read(marker)
    except (OSError, ValueError, ImportError) as error:
        raise StorageError(_unusable(uri, error)) from error
    return Storage(uri=uri, identity=found.decode())


def join(folder: Location, name: str) -> str:
    """The location of ``name`` inside ``folder``; a URI keeps its options (``?region=...``)."""
    text = os.fspath(folder)
    if not _is_uri(text):
        return str(Path(text) / name)
    base, question, options = text.partition("?")
    return f"{base.rstrip('/')}/{name}{question}{options}"


def write(location: Location, content: bytes) -> None:
    """Put ``content`` there, whole or not at all; a new local folder gets mode 0700, a file 0600.

    OSError where that fails, ValueError for a URI that pyarrow.fs does not know.
    """
    place = _local(location)
    if place is None:
        filesystem, path = _remote(location)
        with filesystem.open_output_stream(path) as stream:
            stream.write(content)
        return
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(place, lambda temporary: temporary.write_bytes(content), private=True)


def read(location: Location) -> bytes:
    """What is there. FileNotFoundError or another OSError, ValueError as :func:`write`."""
    place = _local(location)
    if place is not None:
        return place.read_bytes()
    filesystem, path = _remote(location)
    with filesystem.open_input_file(path) as stream:
        content: bytes = stream.read()
    return content


def exists(location: Location) -> bool:
    """Whether something is there, without reading it. Errors as :func:`read`, but not for a missing one."""
    place = _local(location)
    if place is not None:
        return place.is_file()
    filesystem, path = _remote(location)
    return bool(filesystem.get_file_info(path).is_file)


def _identity(uri: str) -> str | None:
    try:
        return read(join(uri, _MARKER)).decode()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ImportError) as error:
        raise StorageError(_unusable(uri, error)) from error


def _unusable(uri: str, error: Exception) -> str:
    return (
        f"storage: {uri}: cannot be written and read from here ({error}); give an absolute path or a URI of pyarrow.fs "
        "(file://, s3://, gs://), and this node the right to read and write there."
    )


def _is_uri(text: str) -> bool:
    return "://" in text


def _local(location: Location) -> Path | None:
    text = os.fspath(location)
    if not _is_uri(text):
        return Path(text)
    if not text.startswith("file://"):
        return None
    # Written without pyarrow, which writes a local file in place and under the umask.
    _, path = _remote(text)
    return Path(path)


def _remote(location: Location) -> tuple[FileSystem, str]:
    from pyarrow.fs import FileSystem

    filesystem, path = FileSystem.from_uri(os.fspath(location))
    return filesystem, path
