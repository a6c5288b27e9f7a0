"""From a publisher's table to features and codes, by declared public constants only.

A codebook declares what each column means: categories as the publisher names them, and numbers with public bounds.
One-hot and scaling use nothing but these declarations, so no statistic of private records enters a feature. A value
outside the declared categories, or text where a number is due, is an error that names column and value; a number beyond
its bounds is clipped to them. Shapes: N records, F features.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from fairpate.config import LARGEST, Section
from fairpate.data.entry import DataError
from fairpate.data.tables import column_of, require_columns

FloatArray = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Finite = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
When = dict[str, str]


class Column(Section):
    """A published column that becomes features: one of a number, a category, or bands of a numeric code."""

    column: str = Field(description="Its name in the file. `columns: [a, b]` declares several alike.")
    low: Finite | None = Field(None, description="Number: what becomes 0; lower values are clipped to it.")
    high: Finite | None = Field(None, description="Number: what becomes 1; higher values are clipped to it.")
    scale: Literal["linear", "log"] = Field(
        "linear", description="Number: `log` first takes sign(v) ln(1 + abs(v)), for amounts."
    )
    values: tuple[str, ...] = Field((), description="Category: the published values, one feature each.")
    aliases: dict[str, str] = Field(
        {}, description="Category: further published values, and which of `values` is meant."
    )
    bands: dict[str, Finite] = Field(
        {}, description="Numeric code: name and first code of each band, one feature each; the last band is open."
    )
    missing: str | None = Field(
        None,
        description="The value that means unknown. A number is then 0 and a feature `column=missing` says so; "
        "a category is none of its values.",
    )
    when: When = Field({}, description="Options and the value at which this declaration holds.")

    @model_validator(mode="after")
    def _is_one_kind(self) -> Column:
        number = self.low is not None and self.high is not None
        kinds = [number, bool(self.values), bool(self.bands)]
        if sum(kinds) != 1 or (self.low is None) != (self.high is None):
            raise ValueError("Expected one of: low and high (a number), values (a category), bands (a numeric code)")
        if number and not _stretch(np.asarray(self.low), self) < _stretch(np.asarray(self.high), self):
            raise ValueError(f"Expected low < high, got {self.low:g} and {self.high:g}")
        if self.scale != "linear" and not number:
            raise ValueError("Expected scale with low and high only")
        if self.bands and (self.missing is not None or not _increase(self.bands.values())):
            raise ValueError("Expected bands whose first codes increase, and no missing value with them")
        return self

    @model_validator(mode="after")
    def _values_are_told_apart(self) -> Column:
        if self.aliases and not self.values:
            raise ValueError("Expected aliases with values only")
        for alias, value in self.aliases.items():
            if value not in self.values:
                raise ValueError(f"Expected aliases of declared values, got {value!r} for {alias!r}")
        every = [*self.values, *self.aliases, *([] if self.missing is None else [self.missing])]
        _require_distinct(every)
        return self


class Interval(Section):
    """A range of numbers; a bound that is left out does not bind."""

    above: Finite | None = Field(None, description="value > above")
    at_least: Finite | None = Field(None, description="value >= at_least")
    below: Finite | None = Field(None, description="value < below")
    at_most: Finite | None = Field(None, description="value <= at_most")

    @model_validator(mode="after")
    def _holds_a_number(self) -> Interval:
        for one, other in (("above", "at_least"), ("below", "at_most")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(f"Expected {one} or {other}, got both")
        lower, upper = self.bounds
        if lower > upper:
            raise ValueError("Expected a range with a number in it")
        return self

    @property
    def bounds(self) -> tuple[tuple[float, int], tuple[float, int]]:
        """Lower and upper end, each with 0 where it is in the range, else with the side on which the range lies."""
        lower = (-math.inf if self.at_least is None else self.at_least, 0)
        upper = (math.inf if self.at_most is None else self.at_most, 0)
        return lower if self.above is None else (self.above, 1), upper if self.below is None else (self.below, -1)

    @property
    def has_range(self) -> bool:
        """Whether there is any bound."""
        return any(bound is not None for bound in (self.above, self.at_least, self.below, self.at_most))

    def holds(self, values: npt.NDArray[np.float64]) -> Mask:
        """Where the value is in the range; never where it is nan."""
        (low, low_side), (high, high_side) = self.bounds
        return (values > low if low_side else values >= low) & (values < high if high_side else values <= high)


class Meaning(Interval):
    """What a class or group stands for: one published value, or a range of numbers. Text alone is a value."""

    value: str | None = Field(None, description="The published value.")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"value": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Meaning:
        if (self.value is None) != self.has_range:
            raise ValueError("Expected a published value, or a range of numbers: above, at_least, below, at_most")
        return self


class Coding(Section):
    """A published column as classes or groups: code k is the k-th name, in the order of the declaration."""

    column: str = Field(description="Its name in the file.")
    values: dict[str, tuple[Meaning, ...]] = Field(
        description="Name, and what it stands for: a published value, a range of numbers (above, at_least, below, "
        "at_most), or a list of them. A list of values without names: each is its own.",
    )

    @field_validator("values", mode="before")
    @classmethod
    def _as_mapping(cls, values: Any) -> Any:
        if isinstance(values, (list, tuple)):
            _require_distinct([str(value) for value in values])
            return {str(value): (value,) for value in values}
        if isinstance(values, dict):
            return {name: each if isinstance(each, (list, tuple)) else (each,) for name, each in values.items()}
        return values

    @model_validator(mode="after")
    def _is_unambiguous(self) -> Coding:
        if len(self.values) < 2 or not all(self.values.values()):
            raise ValueError(f"Expected two names or more, each with a value or a range, got {', '.join(self.values)}")
        every = [meaning for each in self.values.values() for meaning in each]
        ranges = [meaning for meaning in every if meaning.value is None]
        if ranges and len(ranges) < len(every):
            raise ValueError("Expected values or ranges, got both")
        _require_distinct([meaning.value for meaning in every if meaning.value is not None])
        for one, other in itertools.combinations(ranges, 2):
            (low, high), (other_low, other_high) = one.bounds, other.bounds
            if max(low, other_low) <= min(high, other_high):
                raise ValueError("Expected ranges that do not overlap")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each code."""
        return tuple(self.values)


def encode(table: pa.Table, columns: Sequence[Column], name: str) -> tuple[Tensor, tuple[str, ...]]:
    """Features (N, F) in float32 and their names, column by column in the order of ``columns``.

    ``name`` is the file that errors speak of.
    """
    require_columns(table, [each.column for each in columns], name)
    blocks: list[FloatArray] = []
    feature_names: list[str] = []
    for each in columns:
        block, names = _encode_column(table, each, name)
        blocks.append(block)
        feature_names.extend(names)
    return torch.from_numpy(np.concatenate(blocks, axis=1)), tuple(feature_names)


def codes_of(table: pa.Table, coding: Coding, name: str) -> Tensor:
    """The coded column as int64 codes; :class:`DataError` for a value without a declared meaning."""
    meanings = [(meaning, code) for code, each in enumerate(coding.values.values()) for meaning in each]
    published = {meaning.value: code for meaning, code in meanings if meaning.value is not None}
    if published:
        return codes(table, coding.column, published, name)
    values = numbers(table, coding.column, name)
    found = np.full(len(values), -1, dtype=np.int64)
    for meaning, code in meanings:
        found[meaning.holds(values)] = code
    if (found < 0).any():
        value = values[found < 0][0]
        raise DataError(
            f"{name}: column {coding.column}: {value:g} is in no declared range; declared: {', '.join(coding.names)}."
        )
    return torch.from_numpy(found)


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


def _encode_column(table: pa.Table, each: Column, name: str) -> tuple[FloatArray, list[str]]:
    if each.values:
        return _encode_category(table, each, name)
    return _encode_bands(table, each, name) if each.bands else _encode_number(table, each, name)


def _encode_number(table: pa.Table, each: Column, name: str) -> tuple[FloatArray, list[str]]:
    values = numbers(table, each.column, name, missing=each.missing)
    low, high, stretched = (_stretch(np.asarray(part), each) for part in (each.low, each.high, values))
    missing = np.isnan(values)
    scaled = np.where(missing, 0, np.clip((stretched - low) / (high - low), 0, 1)).astype(np.float32)
    if each.missing is None:
        return scaled[:, None], [each.column]
    return np.stack([scaled, missing.astype(np.float32)], axis=1), [each.column, f"{each.column}=missing"]


def _stretch(values: npt.NDArray[np.float64], each: Column) -> npt.NDArray[np.float64]:
    return np.sign(values) * np.log1p(np.abs(values)) if each.scale == "log" else values


def _encode_category(table: pa.Table, each: Column, name: str) -> tuple[FloatArray, list[str]]:
    places = {value: place for place, value in enumerate(each.values)}
    places |= {alias: places[value] for alias, value in each.aliases.items()}
    if each.missing is not None:
        places[each.missing] = len(each.values)
    return _one_hot(codes(table, each.column, places, name).numpy(), each.column, each.values)


def _encode_bands(table: pa.Table, each: Column, name: str) -> tuple[FloatArray, list[str]]:
    values, starts = numbers(table, each.column, name), np.array(list(each.bands.values()))
    if len(values) and values.min() < starts[0]:
        raise DataError(f"{name}: column {each.column}: expected codes >= {starts[0]:g}, got {values.min():g}.")
    place = np.searchsorted(starts, values, side="right") - 1
    return _one_hot(place, each.column, list(each.bands))


def _one_hot(place: npt.NDArray[np.int64], column: str, values: Sequence[str]) -> tuple[FloatArray, list[str]]:
    # The last row of zeros encodes a missing value: none of the declared ones.
    rows = np.eye(len(values) + 1, len(values), dtype=np.float32)
    return rows[place], [f"{column}={value}" for value in values]


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(pc.cast(pa.scalar(text), pa.float64()).as_py())
    except pa.ArrowInvalid:
        return False


def _increase(starts: Any) -> bool:
    return all(one < other for one, other in itertools.pairwise(starts))


def _require_distinct(values: Sequence[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"Expected each value once, got {value!r} twice")
