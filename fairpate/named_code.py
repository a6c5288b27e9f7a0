"""Code of the user's own, named as ``module:attribute``, and whether a file that names it is trusted to.

What a command or Python names runs: it was typed. What a *file* names (a configuration, a sweep, the folder of a run or
of an estimator) may come from anybody, and runs only where the user allowed it, or where it runs in this process
already.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

PLACE = re.compile(r"[\w.]+:[\w.]+")
ALLOWED = "FAIRPATE_ALLOW_CODE"
REMEDY = f"if you trust it, give --allow-code where a command has it, or {ALLOWED}=1 in the environment of any"
_INSTALLED = ("fairpate", "teachers", "aggregator", "student")
_imported: set[str] = set()


@contextmanager
def allowing(allow: bool) -> Iterator[None]:
    """What files name may run meanwhile, if ``allow``, in this process and in those that it starts."""
    before = os.environ.get(ALLOWED)
    if allow:
        os.environ[ALLOWED] = "1"
    try:
        yield
    finally:
        if allow and before is None:
            del os.environ[ALLOWED]
        elif allow and before is not None:
            os.environ[ALLOWED] = before


def is_allowed() -> bool:
    """Whether files may name any code."""
    return os.environ.get(ALLOWED) == "1"


def may_run(place: str) -> bool:
    """Whether a file may name ``place``."""
    return place in _imported or is_allowed()


def named_object(place: str) -> Any:
    """What ``place`` names, looked for where Python looks and then in the working directory.

    Whatever its module raises goes on to the caller.
    """
    module, _, attribute = place.partition(":")
    found = getattr(_import(module), attribute)
    # Its code has run in this process, so that a file that names it changes nothing.
    _imported.add(place)
    return found


def is_own_file(module: ModuleType) -> bool:
    """Whether the module lies in the working directory, where another machine would not find it."""
    file, name = getattr(module, "__file__", None), module.__name__.partition(".")[0]
    if file is None or name in _INSTALLED:
        return False
    place = Path(file).resolve()
    return place.is_relative_to(Path.cwd().resolve()) and "site-packages" not in place.parts


def _import(module: str) -> ModuleType:
    """A command does not search the working directory by itself."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # Its package is there, and something else is missing: to look elsewhere would hide what.
        if error.name != module.partition(".")[0]:
            raise
    here = str(Path.cwd())
    # Behind all other places: no file in the working directory stands in for a library.
    sys.path.append(here)
    try:
        return import_module(module)
    finally:
        sys.path.remove(here)
