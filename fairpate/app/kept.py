"""What follows from this package's sources alone, kept beside other caches until one changes: it takes seconds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from fairpate import __version__
from fairpate.files import cache_dir, write_atomically

FoundT = TypeVar("FoundT")
_PACKAGE = Path(__file__).parents[1]


def kept(name: str, make: Callable[[], FoundT]) -> FoundT:
    """What ``make`` gives, plain JSON; as it was made from the same sources, where that is kept under ``name``.

    A cache that cannot be used is no reason to fail.
    """
    # All of them: what a field says may come from any file that a configuration imports.
    version = f"{__version__} {max(path.stat().st_mtime_ns for path in _PACKAGE.rglob('*.py'))}"
    path = cache_dir() / "methods" / f"{re.sub(r'[^a-z0-9_]', '', name)}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] == version:
            found: FoundT = content["found"]
            return found
    found = make()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"version": version, "found": found})
        write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    return found
