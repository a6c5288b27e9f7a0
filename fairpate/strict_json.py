"""Values that strict JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any


def strict(value: Any) -> Any:
    """A copy of nested values that strict JSON can hold: no number is undefined or infinite, None stands there.

    Tuples and iterators are lists, records (dataclasses) are mappings, paths and keys are text.
    """
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple | Iterator):
        return [strict(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: strict(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, PurePath):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
