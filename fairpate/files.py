"""Files that are whole or absent, also after a crash or a loss of power.

A file is written under a temporary name in its own folder, brought to the disk, and renamed; then the folder is
brought to the disk too. Knows nothing of what is written.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it to ``path``.

    Whatever ``write`` raises passes through, with ``path`` as it was before and nothing left behind.
    """
    # Processes on several nodes may write the same name at once: a process id would not tell them apart.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        write(temporary)
        _sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
