"""From a publisher's columns to features and codes, by declared public constants only.

One-hot and scaling use nothing but a declaration, so no statistic of private records enters a feature, and a record's
features do not depend on the records beside it. A number beyond its bounds is clipped to them; a value without a
declared meaning is a fault (:mod:`fairpate.data.declared.faults`). A column is text, or numbers where its file has
types. Shapes: N records, F features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fairpate.data.declared.columns import OTHER, Coding, Feature, Floats, Mask
from fairpate.data.declared.faults import Faults
from fairpate.data.declared.tables import column_of, is_vectors, text_of
from fairpate.later import torch

if TYPE_CHECKING:
    from torch import Tensor

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
_NO_NUMBER = "correct it, or declare it as `unknown`"
_COMMA = "write numbers with a decimal point, and nothing between thousands"
_DATE = "a date is no number: write what counts of it as one, such as its year, or a number of days"
COMMAS = r"^[-+]?\d[\d.]*,[\d.,]*\d$"
DATES = r"^(\d{4}-\d{2}-\d{2}([ T].*)?|\d{1,2}[./]\d{1,2}[./]\d{2,4})$"


@dataclass(frozen=True, kw_only=True)
class Cells:
    """One column of some rows of ``file``; ``values`` are text without nulls, or numbers."""

    file: str
    column: str
    values: pa.Array
    faults: Faults

    @property
    def text(self) -> pa.Array:
        """The values as they are written; a missing one is empty."""
        return text_of(self.values)

    def count(self, what: str, rows_N: Mask) -> None:
        """Note for how many rows that was so."""
        if number := int(rows_N.sum()):
            self.faults.counts[self.file, self.column, what] += number

    def require(self, right_N: Mask, *, expected: str, remedy: str, shown: bool = True) -> None:
        """Note a fault for each row where ``right_N`` does not hold."""
        wrong = np.flatnonzero(~right_N)
        if len(wrong):
            values = pc.unique(self.text.take(pa.array(wrong))).to_pylist() if shown else ()
            self.faults.add(
                self.file, self.column, expected=expected, remedy=remedy, rows=len(wrong), values=values[:9]
            )


def cells(table: pa.Table, column: str, file: str, faults: Faults) -> Cells:
    """The column of ``table``; :class:`DataError` where there is none."""
    return Cells(file=file, column=column, values=column_of(table, column, file), faults=faults)


def encode(
    table: pa.Table, features: Sequence[tuple[str, Feature]], file: str, faults: Faults
) -> tuple[FloatArray, tuple[str, ...]]:
    """Features (N, F) and their names, column by column in the order of ``features``."""
    blocks: list[FloatArray] = []
    names: list[str] = []
    for column, feature in features:
        found = cells(table, column, file, faults)
        if feature.vector is not None:
            block, own = _encode_vector(found, feature.vector)
        elif feature.bounds is not None:
            block, own = _encode_number(found, feature)
        else:
            block, own = _encode_bands(found, feature) if feature.bands else _encode_category(found, feature)
        blocks.append(block)
        names.extend(own)
    return np.concatenate(blocks, axis=1), tuple(names)


def codes_of(found: Cells, coding: Coding, what: str, *, may_lack: bool = False) -> Tensor:
    """The coded column as int64; ``may_lack``: a missing value is -1 and no fault. ``what`` names a code."""
    meanings = [(meaning, code) for code, each in enumerate(coding.meanings.values()) for meaning in each]
    published = {meaning.value: code for meaning, code in meanings if meaning.value is not None}
    if published:
        codes_N, known_N = _codes(found, published)
    else:
        values_N = numbers(found)
        codes_N = np.full(len(values_N), -1, dtype=np.int64)
        for meaning, code in meanings:
            codes_N[meaning.holds(values_N)] = code
        known_N = (codes_N >= 0) | np.isnan(values_N)
    empty_N = _is_empty(found) & (codes_N < 0)
    names = list(published) or list(coding.meanings)
    found.require(
        known_N | empty_N,
        expected=f"a declared {what}" if published else f"a number in the range of a {what}",
        remedy=f"declared: {', '.join(names)}",
    )
    if not may_lack:
        remedy = "only public records may lack one" if what == "class" else "declare what an empty cell means"
        found.require(~empty_N, expected=f"a {what}", remedy=f"{remedy}, or leave the row out with `keep`", shown=False)
    return torch.from_numpy(codes_N)


def codes(table: pa.Table, column: str, meanings: Mapping[str, int], file: str) -> Tensor:
    """The column as int64 codes; :class:`DataError` for a value without a declared meaning."""
    found = cells(table, column, file, Faults())
    codes_N, known_N = _codes(found, meanings)
    found.require(known_N, expected="a declared value", remedy=f"declared: {', '.join(meanings)}")
    found.faults.require_none()
    return torch.from_numpy(codes_N)


def numbers(found: Cells, unknown: Sequence[str] = ()) -> Floats:
    """The column as finite numbers, nan where a value is missing; text that is no number is a fault, and nan."""
    meant_N = [number for value in unknown if (number := _number(value)) is not None]
    if not pa.types.is_string(found.values.type):
        values_N = np.array(found.values.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)
        found.require(~np.isinf(values_N), expected="a number", remedy=_NO_NUMBER)
        return np.where(np.isinf(values_N) | np.isin(values_N, meant_N), np.nan, values_N)
    is_unknown = pc.is_in(found.values, value_set=pa.array(("", *unknown), pa.string()))
    text = pc.if_else(is_unknown, pa.scalar(None, pa.string()), found.values)
    try:
        values = pc.cast(text, pa.float64())
    except pa.ArrowInvalid:
        values = pa.array([_number(value) for value in text.to_pylist()], pa.float64())
    values_N = np.array(values.to_numpy(zero_copy_only=False), dtype=np.float64)
    right_N = np.isfinite(values_N) | _mask(text.is_null())
    if not right_N.all():
        comma_N, date_N = (_mask(pc.match_substring_regex(found.values, like)) for like in (COMMAS, DATES))
        found.require(right_N | comma_N | date_N, expected="a number", remedy=_NO_NUMBER)
        found.require(right_N | ~comma_N, expected="a number", remedy=_COMMA)
        found.require(right_N | ~date_N, expected="a number", remedy=_DATE)
    # A code that means a missing value may be written as 999.0 too.
    return np.where(right_N & ~np.isin(values_N, meant_N), values_N, np.nan)


def _codes(found: Cells, published: Mapping[str, int]) -> tuple[IntArray, Mask]:
    """A code per row, -1 without one; and where there is one."""
    text = found.text
    if not pa.types.is_string(found.values.type):  # a file with types knows no 1.0 beside 1
        published = {_canonical(value): code for value, code in published.items()}
    place = pc.index_in(text, value_set=pa.array(list(published), pa.string()))
    known_N = _mask(place.is_valid())
    code_of_place = np.array([*published.values(), -1], dtype=np.int64)
    return code_of_place[pc.fill_null(place, len(published)).to_numpy(zero_copy_only=False)], known_N


def _encode_number(found: Cells, feature: Feature) -> tuple[FloatArray, list[str]]:
    values_N = numbers(found, feature.unknown)
    assert feature.bounds is not None
    ends = (np.array(number) for number in (*feature.bounds, feature.stands_for_missing))
    low, high, constant = (feature.stretched(end) for end in ends)
    missing_N = np.isnan(values_N)
    found.count("clipped", (values_N < feature.bounds[0]) | (values_N > feature.bounds[1]))
    scaled_N = np.clip((feature.stretched(values_N) - low) / (high - low), 0, 1)
    scaled_N = np.where(missing_N, (constant - low) / (high - low), scaled_N)
    if not feature.may_be_missing:
        _require_present(found)
        return scaled_N[:, None].astype(np.float32), [found.column]
    found.count("missing", missing_N)
    block = np.stack([scaled_N, missing_N], axis=1).astype(np.float32)
    return block, [found.column, f"{found.column}=missing"]


def _encode_vector(found: Cells, size: int) -> tuple[FloatArray, list[str]]:
    values, names = found.values, [f"{found.column}[{place}]" for place in range(size)]
    if not is_vectors(values.type):
        found.faults.add(
            found.file,
            found.column,
            expected=f"a list of {size} numbers",
            remedy=f"store lists in Parquet, or declare `array: true`; the column holds {values.type}",
            rows=len(values),
        )
        return np.zeros((len(values), size), dtype=np.float32), names
    lengths_N = pc.fill_null(pc.list_value_length(values), -1).to_numpy(zero_copy_only=False)
    right_N = lengths_N == size
    block = np.zeros((len(values), size), dtype=np.float32)
    flat = pc.list_flatten(values.filter(pa.array(right_N))).cast(pa.float32())
    block[right_N] = flat.to_numpy(zero_copy_only=False).reshape(-1, size)
    finite_N = np.isfinite(block).all(axis=1)
    lengths = [f"a list of {length}" if length >= 0 else "nothing" for length in np.unique(lengths_N[~right_N])]
    for wrong_N, expected, got in (
        (~right_N, f"a list of {size} numbers", lengths),
        (~finite_N, "finite numbers", []),
    ):
        found.faults.add(
            found.file,
            found.column,
            expected=expected,
            remedy="correct `vector`, or the file",
            rows=int(wrong_N.sum()),
            values=got,
        )
    return block, names


def _encode_category(found: Cells, feature: Feature) -> tuple[FloatArray, list[str]]:
    names, places = feature.own_categories, feature.places
    none = len(names)  # a row of zeros
    if feature.may_be_missing:
        absent = [value for value in ("", *feature.unknown) if value not in feature.categories]
        _, absent_N = _codes(found, dict.fromkeys(absent, 0))
        found.count("missing", absent_N)
    codes_N, known_N = _codes(found, places)
    if "" not in places:
        _require_present(found)
        # One fault: an empty cell is told as missing, and not as undeclared besides.
        known_N |= _is_empty(found)
    if not feature.other:
        declared = ", ".join(value or "(empty)" for value in feature.categories)
        remedy = f"declared: {declared}; add it to `categories`, or set `other: true`"
        found.require(known_N, expected="a declared category", remedy=remedy)
    else:
        found.count("other", ~known_N)
    undeclared = names.index(OTHER) if feature.other else none
    rows = np.eye(none + 1, none, dtype=np.float32)
    return rows[np.where(codes_N < 0, undeclared, codes_N)], [f"{found.column}={name}" for name in names]


def _encode_bands(found: Cells, feature: Feature) -> tuple[FloatArray, list[str]]:
    values_N, starts = numbers(found), np.array(list(feature.bands.values()))
    _require_present(found)
    found.require(
        ~(values_N < starts[0]), expected=f"codes >= {starts[0]:g}", remedy="declare a band for it, or correct it"
    )
    # What is no number, or below the first band, is a fault already: any place will do.
    place_N = np.maximum(np.searchsorted(starts, values_N, side="right") - 1, 0)
    rows = np.eye(len(starts), dtype=np.float32)
    return rows[place_N], [f"{found.column}={band}" for band in feature.bands]


def _require_present(found: Cells) -> None:
    remedy = "declare what an empty cell counts as with `missing`, or correct it"
    found.require(~_is_empty(found), expected="a value", remedy=remedy, shown=False)


def _is_empty(found: Cells) -> Mask:
    return _mask(pc.equal(found.text, ""))


def _mask(flags: pa.Array) -> Mask:
    return np.array(flags.to_numpy(zero_copy_only=False), dtype=bool)


def _canonical(text: str) -> str:
    """The text of the same number in a file with types."""
    number = _number(text)
    return text if number is None else str(pa.scalar(number).cast(pa.string()).as_py())


def _number(text: str | None) -> float | None:
    """The finite number that Arrow reads in ``text``, else null."""
    try:
        # Not `float`, which also reads 1_000: a value counts the same whether its column was cast as a whole or not.
        number: float = pc.cast(pa.scalar(text), pa.float64()).as_py()
    except pa.ArrowInvalid:
        return None
    return number if number is not None and math.isfinite(number) else None
