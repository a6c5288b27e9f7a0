"""Values that strict JSON can hold."""

from __future__ import annotations

import math
from typing import Any


def strict(value: Any) -> Any:
    """A copy of nested JSON values in which no number is undefined or infinite: None stands there; tuples are lists."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
