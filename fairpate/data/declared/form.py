"""One record from what a person types into a form: the inputs of a declared table, and its features again.

The inputs follow from :class:`.feature_codes.FeatureCode`, one per published column, and so does the encoding: what a
form says is encoded as the same row of a file would be, bit for bit, so that it is the same query.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fairpate.data.declared.feature_codes import FeatureCode

Value = float | str | None
"""A number, the text of a category, or None: not known."""


@dataclass(frozen=True, kw_only=True)
class FormField:
    """One input: a number between ``low`` and ``high`` (beyond them it is clipped), or one of ``choices``.

    ``is_optional``: a value may be missing; ``takes_other``: any other text has a meaning too.
    """

    name: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    is_optional: bool = False
    takes_other: bool = False


@dataclass(frozen=True, kw_only=True)
class RecordForm:
    """The inputs of a table whose features ``codes`` describe."""

    codes: tuple[FeatureCode, ...]

    @property
    def fields(self) -> tuple[FormField, ...]:
        """One per column, in order."""
        return tuple(_field(column, codes) for column, codes in self._columns.items())

    def encode(self, values: Mapping[str, Value]) -> npt.NDArray[np.float32]:
        """The features (F,) of a record. ValueError names a column without a value, or with one that means nothing."""
        return np.concatenate([_encoded(column, codes, values.get(column)) for column, codes in self._columns.items()])

    @property
    def _columns(self) -> dict[str, list[FeatureCode]]:
        return {column: list(codes) for column, codes in itertools.groupby(self.codes, key=lambda code: code.column)}


def form_of(codes: Sequence[FeatureCode]) -> RecordForm | None:
    """The form of these features; None where there are none, or a person cannot type them: lists of numbers."""
    if not codes or any(code.kind == "element" for code in codes):
        return None
    return RecordForm(codes=tuple(codes))


def _field(column: str, codes: Sequence[FeatureCode]) -> FormField:
    first = codes[0]
    if first.kind == "number":
        return FormField(name=column, low=first.low, high=first.high, is_optional=first.missing is not None)
    if first.kind == "band":
        return FormField(name=column, low=first.at_least, high=codes[-1].at_least)
    values = [value for code in codes if code.kind == "category" for value in code.values or ()]
    return FormField(
        name=column,
        choices=tuple(value for value in values if value),
        is_optional="" in values,
        takes_other=codes[-1].kind == "other",
    )


def _encoded(column: str, codes: Sequence[FeatureCode], value: Value) -> npt.NDArray[np.float32]:
    first = codes[0]
    if first.kind in ("number", "band"):
        number = None if value is None or first.is_unknown(value) else _number(column, value)
        features = _of_number(column, first, number) if first.kind == "number" else _of_band(column, codes, number)
        return np.array(features, dtype=np.float32)
    text = "" if value is None else str(value)
    row = [(text in (code.values or ())) != (code.kind == "other") for code in codes]
    is_declared = any(text in (code.values or ()) for code in codes)
    if not is_declared and (codes[-1].kind != "other" or not text):
        raise ValueError(f"{column}: expected one of its categories, got {text!r}")
    return np.array(row, dtype=np.float32)


def _of_number(column: str, code: FeatureCode, number: float | None) -> list[float]:
    assert code.low is not None
    assert code.high is not None
    if number is None and code.missing is None:
        raise ValueError(f"{column}: expected a number, got none")
    low, high = _stretched(code.low, code.scale), _stretched(code.high, code.scale)
    place = _stretched(code.missing if number is None else number, code.scale)
    scaled = float(np.clip((place - low) / (high - low), 0, 1))
    return [scaled] if code.missing is None else [scaled, float(number is None)]


def _of_band(column: str, codes: Sequence[FeatureCode], number: float | None) -> list[float]:
    if number is None or number < (codes[0].at_least or 0):
        raise ValueError(f"{column}: expected a number from {codes[0].at_least:g} on, got {number}")
    place = sum(number >= (code.at_least or 0) for code in codes) - 1
    return [float(place == each) for each in range(len(codes))]


def _number(column: str, value: float | str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = np.nan
    if not np.isfinite(number):
        raise ValueError(f"{column}: expected a number, got {value!r}")
    return number


def _stretched(value: float | None, scale: str | None) -> np.float64:
    # The same operations as in `encode`, so that the bits agree.
    number = np.float64(value)
    return np.sign(number) * np.log1p(np.abs(number)) if scale == "log" else number
