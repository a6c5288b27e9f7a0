"""Code of the user's own, named as ``module:attribute``; nothing here decides whether it may run."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

PLACE = re.compile(r"[\w.]+:[\w.]+")


def named_object(place: str) -> Any:
    """What ``place`` names, looked for where Python looks and then in the working directory.

    Whatever its module raises goes on to the caller.
    """
    module, _, attribute = place.partition(":")
    return getattr(_import(module), attribute)


def is_own_file(module: ModuleType) -> bool:
    """Whether the module lies in the working directory, where another machine would not find it."""
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(Path.cwd().resolve())


def _import(module: str) -> ModuleType:
    """A command does not search the working directory by itself."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        return import_module(module)
    finally:
        sys.path.remove(here)
