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

from fairpate.evaluation.rows import FAILED, Row
from fairpate.fairness.notions import NOTIONS
from fairpate.files import write_atomically
from fairpate.strict_json import strict
from fairpate.types import RunRecord, UserError

__all__ = [
    "SCHEMA",
    "RecordsTableError",
    "Row",
    "publishable",
    "read_rows",
    "read_table",
    "write_rows",
    "write_table",
]

# Every notion of fairness, and the ends of its interval.
_FAIRNESS = {
    name if end == "value" else f"{name}_{end}": (name, end) for name in NOTIONS for end in ("value", "low", "high")
}
_WORDS = ("degenerate", "underserved_groups", "unmeasured_groups")
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
        pa.field("has_guarantee", pa.bool_()),
        pa.field("majority_accuracy", pa.float64()),
        *(pa.field(name, pa.list_(pa.string())) for name in _WORDS),
        pa.field("answered", pa.int64()),
        pa.field("answered_by_group", pa.list_(pa.int64())),
        *(pa.field(column, pa.float64()) for column in _FAIRNESS),
    ]
)
# Columns that tables of earlier versions lack; null there.
_ADDED = frozenset({"has_guarantee", "majority_accuracy", *_WORDS, "answered", "answered_by_group", *_FAIRNESS})
_GIVE_ONE = "give the results.parquet of `fairpate compare`"
_MAKE_AGAIN = "if it is a damaged table of a sweep, delete it and compare again"
_CELL = ("digest", "method", "data", "seed", "command", "error", "has_guarantee")
_OWN = {"method", "data", "seed", "config", "fairness"}
_MEASURED = tuple(field.name for field in fields(RunRecord) if field.name not in _OWN)


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
    write_atomically(path, lambda temporary: pq.write_table(table, temporary), private=private)


def read_rows(path: Path) -> list[Row]:
    """The rows that :func:`write_rows` wrote. RecordsTableError for another or a damaged file."""
    return [_row(values) for values in read_table(path).to_pylist()]


def read_table(path: Path) -> pa.Table:
    """The same as a table of ``SCHEMA``."""
    try:
        with pq.ParquetFile(path) as file:
            table = file.read()
        missing = [name for name in SCHEMA.names if name not in table.column_names and name not in _ADDED]
    except FileNotFoundError:
        raise RecordsTableError(f"{path}: no such file; {_GIVE_ONE}.") from None
    except (OSError, pa.ArrowInvalid) as error:
        raise RecordsTableError(f"{path}: cannot be read ({error}); {_GIVE_ONE}, or {_MAKE_AGAIN}.") from error
    if missing:
        raise RecordsTableError(f"{path}: no table of a comparison, it lacks {', '.join(missing)}; {_GIVE_ONE}.")
    for name in _ADDED.difference(table.column_names):
        table = table.append_column(name, pa.nulls(len(table), SCHEMA.field(name).type))
    return table.select(SCHEMA.names).cast(SCHEMA)


def publishable(table: pa.Table, *, unprotected: bool) -> pa.Table:
    """What may be published of ``table``, a table of ``SCHEMA``.

    Prices that depend on votes are left out, and without ``unprotected`` every row of a run without privacy guarantee,
    failed ones included. Rows that are left tell neither how long a run took nor why it failed.
    """
    # Tables of earlier versions do not say it, but for an epsilon that is infinite.
    has_guarantee = pc.and_(pc.fill_null(table["has_guarantee"], True), _is_finite(table["epsilon"]))
    may_be_seen = pc.or_(has_guarantee, unprotected)
    kept = table.filter(pc.and_not(may_be_seen, pc.fill_null(table["epsilon_is_data_dependent"], False)))
    replaced = {
        "minutes": pa.nulls(len(kept), pa.float64()),
        "error": pc.if_else(pc.equal(kept["status"], "failed"), FAILED, ""),
    }
    for name, values in replaced.items():
        kept = kept.set_column(SCHEMA.names.index(name), SCHEMA.field(name), values)
    return kept


def _is_finite(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """False for infinity; a failed run has no value, and passes."""
    return pc.invert(pc.fill_null(pc.is_inf(column), False))


def _plain(row: Row) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(row, name) for name in _CELL}
    values |= {"status": row.status, "config": json.dumps(strict(row.config), allow_nan=False)}
    values["minutes"] = _defined(row.minutes)
    if row.record is not None:
        values |= {name: _defined(getattr(row.record, name)) for name in _MEASURED}
        values |= {column: row.record.fairness.get(name, {}).get(end) for column, (name, end) in _FAIRNESS.items()}
    return values


def _defined(value: Any) -> Any:
    """Null for an undefined number; an infinite one is a number of the table."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _fairness(values: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """What is defined of every notion."""
    found: dict[str, dict[str, float | None]] = {}
    for column, (name, end) in _FAIRNESS.items():
        found.setdefault(name, {})[end] = values[column]
    return {name: ends for name, ends in found.items() if ends["value"] is not None}


def _row(values: dict[str, Any]) -> Row:
    config = json.loads(values["config"])
    identity = {"method": values["method"], "data": values["data"], "seed": values["seed"], "config": config}
    record = None
    if values["status"] == "ok":
        found = {name: values[name] for name in _MEASURED}
        found |= {name: tuple(values[name] or ()) for name in _WORDS} | {"fairness": _fairness(values)}
        if found["answered_by_group"] is not None:
            found["answered_by_group"] = tuple(found["answered_by_group"])
        record = RunRecord(**identity, **found)
    minutes = math.nan if values["minutes"] is None else values["minutes"]
    return Row(
        digest=values["digest"],
        command=values["command"],
        error=values["error"],
        has_guarantee=values["has_guarantee"] is not False,
        minutes=minutes,
        record=record,
        **identity,
    )
