"""What is wrong with a request to a service, as field, value and remedy; and its body: how large it may be, reading it.

Lengths are declared, so that a body that is too large is refused before it is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from fairpate.config_reader import expected

_MAX_VALUE_CHARACTERS = 80
_MAX_BODY_BYTES = 2 * 2**20
_BYTES_BESIDE_FEATURES, _BYTES_PER_BYTE, _BYTES_PER_FLOAT = 1024, 6, 26  # as "255.0," and "-3.4028234663852886e+38, "


class FaultError(HTTPException):
    """A request that is refused with one fault; FastAPI passes this type on from wherever it is raised."""

    def __init__(
        self, status: int, field: str, value: object, remedy: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, detail=remedy, headers=headers)
        self.fault = fault(field, value, remedy)


def fault(field: str, value: object, remedy: str) -> dict[str, str]:
    """``field``, ``value`` and ``remedy`` as they are sent; of a long value no more is written than is shown."""
    if isinstance(value, bytes):
        value = value[: _MAX_VALUE_CHARACTERS + 1].decode("utf-8", "backslashreplace")
    text = value if isinstance(value, str) else _start_of(value)
    cut = text if len(text) <= _MAX_VALUE_CHARACTERS else text[:_MAX_VALUE_CHARACTERS] + "..."
    # JSON may bring half of a pair of UTF-16, which cannot leave as UTF-8.
    return {"field": field, "value": cut.encode("utf-8", "backslashreplace").decode(), "remedy": remedy}


def _start_of(value: object) -> str:
    text = ""
    for piece in json.JSONEncoder(default=str).iterencode(value):
        text += piece
        if len(text) > _MAX_VALUE_CHARACTERS:
            break
    return text


def field_of(error: Mapping[str, Any]) -> list[str]:
    """The names that lead to the field of one of pydantic's errors; none where the whole body is meant."""
    if error["type"] == "json_invalid":  # where in the text it is said by the remedy
        return []
    return [str(part) for part in error["loc"] if part not in ("body", "path", "query")]


def remedy_for(error: Mapping[str, Any]) -> str:
    """What to do about one of pydantic's errors."""
    if error["type"] == "extra_forbidden":
        return "Unknown field; leave it out."
    if error["type"] == "missing":
        return "Required; add this field."
    if error["type"] == "json_invalid":
        return f"Expected JSON; {error['ctx']['error']}."
    if isinstance(error.get("input"), bytes):  # of another type, a body is not parsed
        return "Expected JSON; send Content-Type: application/json."
    said = expected(error)
    return f"{said[:1].upper()}{said[1:]}."


def declared_length(headers: Mapping[bytes, str], most: int) -> int:
    """How many bytes the body has. FaultError where that is not said, or more than ``most``."""
    if b"transfer-encoding" in headers:
        raise FaultError(411, "Transfer-Encoding", headers[b"transfer-encoding"], "Send Content-Length instead.")
    if headers.get(b"content-encoding", "identity").lower() != "identity":
        raise FaultError(415, "Content-Encoding", headers[b"content-encoding"], "Send the body as it is.")
    length = int(headers.get(b"content-length", "0"))  # the parser saw to it that these are digits
    if length > most:
        raise FaultError(413, "body", f"{length} bytes", f"Expected at most {most} bytes; send fewer records at once.")
    return length


def largest_body_bytes(record_shape: tuple[int, ...], *, is_bytes: bool, most_records: int) -> int:
    """The largest body that ``most_records`` records of this shape need: 2 MiB, or one record where that is more."""
    record = _BYTES_BESIDE_FEATURES + (_BYTES_PER_BYTE if is_bytes else _BYTES_PER_FLOAT) * math.prod(record_shape)
    return max(record, min(_MAX_BODY_BYTES, most_records * record))


async def read_body(receive: Receive) -> bytes | None:
    """The whole body; None if the caller left."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def with_body(body: bytes, receive: Receive) -> Receive:
    """What receives a body that was read already, and then whatever comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        # After the body the real one, which says when the caller leaves.
        return messages.pop() if messages else await receive()

    return replayed
