"""From a publisher's table to features, by declared public constants only.

A codebook lists the columns that become features: categories as the publisher declares them, and numbers with public
bounds. One-hot and scaling use nothing but these declarations, so no statistic of private records enters a feature.
A value outside the declared categories, or text where a number is due, is an error that names column and value; a
number beyond its bounds is clipped to them. Shapes: N records, F features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from fairpate.data.entry import DataError, Option
from fairpate.data.tables import column_of, require_columns

FloatArray = npt.NDArray[np.float32]
SENSITIVE_AS_FEATURE = Option(
    default=False,
    allowed=(False, True),
    description="Whether the model may see the sensitive attribute.",
    shows_attribute=True,
)


@dataclass(frozen=True, kw_only=True)
class Number:
    """A numeric column, scaled so that ``low`` becomes 0 and ``high`` 1.

    ``scale`` "log" first takes sign(v) ln(1 + |v|): for amounts. A value equal to ``missing`` becomes 0, and a feature
    ``column=missing`` of its own says so.
    """

    column: str
    low: float
    high: float
    scale: Literal["linear", "log"] = "linear"
    missing: str | None = None


@dataclass(frozen=True, kw_only=True)
class Category:
    """A categorical column, one feature per declared value.

    ``aliases`` maps further published values to a declared one; a value equal to ``missing`` is none of them.
    """

    column: str
    values: tuple[str, ...]
    aliases: Mapping[str, str] | None = None
    missing: str | None = None


@dataclass(frozen=True, kw_only=True)
class Bands:
    """A numeric code whose ranges have a meaning: band i holds ``starts[i] <= code < starts[i + 1]``, one feature each.

    A code below the first start is an error; the last band is open.
    """

    column: str
    starts: tuple[float, ...]
    names: tuple[str, ...]


Field = Number | Category | Bands


def without_sensitive(fields: Sequence[Field], column: str, options: Mapping[str, Any]) -> tuple[Field, ...]:
    """``fields`` less the sensitive ``column``, unless the option ``sensitive_as_feature`` asks for it."""
    return tuple(field for field in fields if field.column != column or options["sensitive_as_feature"])


def encode(table: pa.Table, fields: Sequence[Field], name: str) -> tuple[Tensor, tuple[str, ...]]:
    """Features (N, F) in float32 and their names, column by column in the order of ``fields``.

    ``name`` is the file that errors speak of.
    """
    require_columns(table, [field.column for field in fields], name)
    blocks: list[FloatArray] = []
    feature_names: list[str] = []
    for field in fields:
        block, names = _encode_field(table, field, name)
        blocks.append(block)
        feature_names.extend(names)
    return torch.from_numpy(np.concatenate(blocks, axis=1)), tuple(feature_names)


def numbers(table: pa.Table, column: str, name: str, *, missing: str | None = None) -> npt.NDArray[np.float64]:
    """The column as finite numbers, nan where it equals ``missing``; :class:`DataError` names the first other value."""
    text = column_of(table, column, name)
    if missing is not None:
        text = pc.if_else(pc.equal(text, missing), pa.scalar(None, pa.string()), text)
    try:
        values = pc.cast(text, pa.float64())
    except pa.ArrowInvalid:
        values = None
    if values is None or pc.any(pc.invert(pc.is_finite(values))).as_py():
        wrong = next(value for value in text.to_pylist() if value is not None and not _is_number(value))
        raise DataError(f"{name}: column {column}: expected a number, got {wrong!r}.")
    return np.array(values.to_numpy(zero_copy_only=False), dtype=np.float64)


def codes(table: pa.Table, column: str, meanings: Mapping[str, int], name: str) -> Tensor:
    """The column as int64 codes; :class:`DataError` for a value without a declared meaning."""
    text = column_of(table, column, name)
    place = pc.index_in(text, value_set=pa.array(list(meanings), pa.string()))
    if place.null_count:
        unknown = text.filter(pc.is_null(place))[0].as_py()
        raise DataError(f"{name}: column {column}: unknown value {unknown!r}; declared: {', '.join(meanings)}.")
    code_of_place = np.array(list(meanings.values()), dtype=np.int64)
    return torch.from_numpy(code_of_place[place.to_numpy()])


def _encode_field(table: pa.Table, field: Field, name: str) -> tuple[FloatArray, list[str]]:
    match field:
        case Number():
            return _encode_number(table, field, name)
        case Category():
            return _encode_category(table, field, name)
        case Bands():
            return _encode_bands(table, field, name)


def _encode_number(table: pa.Table, field: Number, name: str) -> tuple[FloatArray, list[str]]:
    values = numbers(table, field.column, name, missing=field.missing)
    low, high, stretched = (_stretch(np.asarray(part), field) for part in (field.low, field.high, values))
    missing = np.isnan(values)
    scaled = np.where(missing, 0, np.clip((stretched - low) / (high - low), 0, 1)).astype(np.float32)
    if field.missing is None:
        return scaled[:, None], [field.column]
    return np.stack([scaled, missing.astype(np.float32)], axis=1), [field.column, f"{field.column}=missing"]


def _stretch(values: npt.NDArray[np.float64], field: Number) -> npt.NDArray[np.float64]:
    return np.sign(values) * np.log1p(np.abs(values)) if field.scale == "log" else values


def _encode_category(table: pa.Table, field: Category, name: str) -> tuple[FloatArray, list[str]]:
    places = {value: place for place, value in enumerate(field.values)}
    places |= {alias: places[value] for alias, value in (field.aliases or {}).items()}
    if field.missing is not None:
        places[field.missing] = len(field.values)
    return _one_hot(codes(table, field.column, places, name).numpy(), field.column, field.values)


def _encode_bands(table: pa.Table, field: Bands, name: str) -> tuple[FloatArray, list[str]]:
    values = numbers(table, field.column, name)
    if len(values) and values.min() < field.starts[0]:
        raise DataError(f"{name}: column {field.column}: expected codes >= {field.starts[0]}, got {values.min():g}.")
    place = np.searchsorted(np.asarray(field.starts), values, side="right") - 1
    return _one_hot(place, field.column, field.names)


def _one_hot(place: npt.NDArray[np.int64], column: str, values: Sequence[str]) -> tuple[FloatArray, list[str]]:
    # The last row of zeros encodes a missing value: none of the declared ones.
    rows = np.eye(len(values) + 1, len(values), dtype=np.float32)
    return rows[place], [f"{column}={value}" for value in values]


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
