"""Rows of a comparison as Parquet: one row per cell, in the fields of RunRecord and what belongs to the cell.

``config`` is strict JSON, in which an infinite number is null; ``command`` holds it exactly. A price that depends on
private votes is flagged and belongs into tables of its own: :func:`write_rows` writes rows that may be published, and
takes the others only where it is told that the table is private.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fairpate.evaluation.metrics import nan_to_none
from fairpate.evaluation.rows import Row
from fairpate.files import write_atomically
from fairpate.types import RunRecord, UserError

__all__ = ["SCHEMA", "RecordsTableError", "Row", "read_rows", "read_table", "strict", "write_rows", "write_table"]

SCHEMA = pa.schema(
    [
        pa.field("digest", pa.string(), nullable=False),
        pa.field("method", pa.string(), nullable=False),
        pa.field("data", pa.string(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("unit", pa.string()),
        pa.field("relation", pa.string()),
        pa.field("delta", pa.float64()),
        pa.field("epsilon", pa.float64()),
        pa.field("epsilon_is_data_dependent", pa.bool_()),
        pa.field("accuracy", pa.float64()),
        pa.field("coverage", pa.float64()),
        pa.field("disparity", pa.float64()),
        pa.field("config", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("error", pa.string(), nullable=False),
        pa.field("command", pa.string(), nullable=False),
        pa.field("minutes", pa.float64()),
    ]
)
_GIVE_ONE = "give the results.parquet of `fairpate compare`"
_MAKE_AGAIN = "if it is a damaged table of a sweep, delete it and compare again"
_CELL = ("digest", "method", "data", "seed", "command", "error")
_MEASURED = tuple(field.name for field in fields(RunRecord) if field.name not in {"method", "data", "seed", "config"})


class RecordsTableError(UserError, ValueError):
    """A table that is not one of a comparison; the message names the file and the remedy."""


def write_rows(rows: Sequence[Row], path: Path, *, private: bool = False) -> None:
    """Write ``rows`` in their order, atomically. A private table is for its owner only.

    ValueError for a row with a price that depends on private votes in a table that is not private.
    """
    write_table(pa.Table.from_pylist([_plain(row) for row in rows], schema=SCHEMA), path, private=private)


def write_table(table: pa.Table, path: Path, *, private: bool = False) -> None:
    """As :func:`write_rows`, for rows that are a table of ``SCHEMA`` already."""
    secret = table.filter(pc.fill_null(table["epsilon_is_data_dependent"], False))["digest"].to_pylist()
    if secret and not private:
        raise ValueError(f"Expected rows that may be published, got data-dependent prices of {', '.join(secret)}.")

    def write(temporary: Path) -> None:
        if private:
            temporary.touch(mode=0o600)
        pq.write_table(table, temporary)

    write_atomically(path, write)


def read_rows(path: Path) -> list[Row]:
    """The rows that :func:`write_rows` wrote. RecordsTableError for another or a damaged file."""
    return [_row(values) for values in read_table(path).to_pylist()]


def read_table(path: Path) -> pa.Table:
    """The same as a table of ``SCHEMA``."""
    try:
        with pq.ParquetFile(path) as file:
            table = file.read()
        missing = [name for name in SCHEMA.names if name not in table.column_names]
    except FileNotFoundError:
        raise RecordsTableError(f"{path}: no such file; {_GIVE_ONE}.") from None
    except (OSError, pa.ArrowInvalid) as error:
        raise RecordsTableError(f"{path}: cannot be read ({error}); {_GIVE_ONE}, or {_MAKE_AGAIN}.") from error
    if missing:
        raise RecordsTableError(f"{path}: no table of a comparison, it lacks {', '.join(missing)}; {_GIVE_ONE}.")
    return table.select(SCHEMA.names).cast(SCHEMA)


def strict(value: Any) -> Any:
    """Strict JSON values: an undefined number and an infinite one are null, a tuple is a list."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else nan_to_none(value)


def _plain(row: Row) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(row, name) for name in _CELL}
    values |= {"status": row.status, "config": json.dumps(strict(row.config), allow_nan=False)}
    values["minutes"] = nan_to_none(row.minutes)
    if row.record is not None:
        values |= {name: nan_to_none(getattr(row.record, name)) for name in _MEASURED}
    return values


def _row(values: dict[str, Any]) -> Row:
    config = json.loads(values["config"])
    identity = {"method": values["method"], "data": values["data"], "seed": values["seed"], "config": config}
    record = None
    if values["status"] == "ok":
        record = RunRecord(**identity, **{name: values[name] for name in _MEASURED})
    minutes = math.nan if values["minutes"] is None else values["minutes"]
    return Row(
        digest=values["digest"],
        command=values["command"],
        error=values["error"],
        minutes=minutes,
        record=record,
        **identity,
    )
