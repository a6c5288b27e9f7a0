"""Faults of a body that is none of this service's, in the shape of every error response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fairpate.request_faults import fault, field_of, remedy_for

_MAX_FAULTS = 10


def validation_faults(errors: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Faults from pydantic's errors; the tags of unions are not part of a field's name."""
    return [fault(_field_name(error), error.get("input"), remedy_for(error)) for error in errors[:_MAX_FAULTS]]


def _field_name(error: Mapping[str, Any]) -> str:
    parts = field_of(error)
    if parts[:2] in (["queries", "queries"], ["count", "count"]):
        parts = parts[1:]
    names = [part for before, part in zip(["", *parts], parts, strict=False) if not _is_tag(before, part)]
    return ".".join(names) or "body"


def _is_tag(before: str, part: str) -> bool:
    return before.isdigit() and part in ("id", "features", "record")
