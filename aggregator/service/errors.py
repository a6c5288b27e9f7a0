"""What was wrong with a request: the field, its value and the remedy, in one shape for every error response."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from fairpate.faults import expected

_MAX_VALUE_CHARACTERS = 80
_MAX_FAULTS = 10


class FaultError(HTTPException):
    """A request that is refused with one fault; FastAPI passes this type on from wherever it is raised."""

    def __init__(
        self, status: int, field: str, value: object, remedy: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, detail=remedy, headers=headers)
        self.fault = fault(field, value, remedy)


def fault(field: str, value: object, remedy: str) -> dict[str, str]:
    """A :class:`aggregator.service.wire.Fault`; of a long value no more is written than is shown."""
    text = value if isinstance(value, str) else _start_of(value)
    cut = text if len(text) <= _MAX_VALUE_CHARACTERS else text[:_MAX_VALUE_CHARACTERS] + "..."
    # JSON may bring half of a pair of UTF-16, which cannot leave as UTF-8.
    return {"field": field, "value": cut.encode("utf-8", "backslashreplace").decode(), "remedy": remedy}


def validation_faults(errors: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Faults from pydantic's errors; the tags of unions are not part of a field's name."""
    return [fault(_field_name(error), error.get("input"), _remedy(error)) for error in errors[:_MAX_FAULTS]]


def _start_of(value: object) -> str:
    text = ""
    for piece in json.JSONEncoder(default=str).iterencode(value):
        text += piece
        if len(text) > _MAX_VALUE_CHARACTERS:
            break
    return text


def _field_name(error: Mapping[str, Any]) -> str:
    parts = [str(part) for part in error["loc"] if part not in ("body", "path", "query")]
    if parts[:2] in (["queries", "queries"], ["count", "count"]):
        parts = parts[1:]
    names = [part for before, part in zip(["", *parts], parts, strict=False) if not _is_tag(before, part)]
    return ".".join(names) or "body"


def _is_tag(before: str, part: str) -> bool:
    return before.isdigit() and part in ("id", "features", "record")


def _remedy(error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "Unknown field; leave it out."
    if error["type"] == "missing":
        return "Required; add this field."
    said = expected(error)
    return f"{said[:1].upper()}{said[1:]}."
