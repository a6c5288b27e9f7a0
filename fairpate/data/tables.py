"""The rows of declared tables as numbers: features, codes of classes and groups, and the form of a record.

**Dates.** A declared date becomes its year, or an age on a public day. A cell that is no day of the calendar, or no
possible birth, never becomes a number: it is refused with the reason.

**Encoding.** One-hot coding and scaling use only the declaration (:mod:`fairpate.data.columns`), so a record's features
do not depend on other records. Messages about faults, and the numbers of clipped, missing and undeclared values, are
for people who may see the records. A :class:`RecordForm` describes the inputs for one record.

Shapes: N records, F features.
"""

from __future__ import annotations

import datetime
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fairpate.config import CODE_NAME, REMEDY, may_run, named_object, nearest
from fairpate.data import word_vectors
from fairpate.data.columns import (
    HASHED,
    OTHER,
    Coding,
    Feature,
    FeatureCode,
    Group,
    Mask,
    PublishedValues,
    Value,
    is_missing,
    number_in,
    stretched,
)
from fairpate.data.dates import ISO_DATE, day_of, is_short
from fairpate.data.table_files import is_dates, is_vectors, text_of
from fairpate.lazy import torch
from fairpate.types import DataError, DataSettingsError, FloatArray, IntArray

if TYPE_CHECKING:
    from torch import Tensor


# Number of values that a message shows, and of characters of each.
_SHOWN, _LENGTH = 3, 40
# From this many values on, a column of which more than this share is clipped is a fault.
_FEW, _NEARLY_ALL = 20, 0.99


@dataclass(kw_only=True)
class TableFaults:
    """Collects the faults of a data set while its files are read, to report them together.

    - ``found``: the number of faulty rows, and some of their values, for each kind of fault. The key of a fault is its
      file, its column, what was expected, the remedy, and a text to show if no values may be shown.
    - ``counts``: numbers of rows by file, column, and what happened to the value: `clipped`, `missing` or `other`.
    - ``rows``: numbers of rows read by file.

    A column of which more than 99 of 100 values are clipped is a fault too: it says nothing, so that the bounds, or the
    way in which it was read, are wrong. Fewer than 20 values may all be clipped by chance. Whether this is so depends
    on the records, as for every fault: a reader of the message must be allowed to see them.
    """

    found: dict[tuple[str, str, str, str, str], tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)

    def add(
        self,
        file: str,
        column: str,
        *,
        expected: str,
        remedy: str,
        rows: int,
        values: Iterable[str] = (),
        met: str = "none",
    ) -> None:
        """Add a fault: ``rows`` rows of ``column`` have values other than ``expected``. The message shows some of these
        ``values`` or, if none are given, the text ``met``."""
        if rows:
            key = (file, column, expected, remedy, met)
            before, shown = self.found.get(key, (0, ()))
            some = (value if len(value) <= _LENGTH else f"{value[:_LENGTH]}..." for value in values)
            # One more than is shown: if it exists, the message ends in "...".
            self.found[key] = before + rows, tuple(dict.fromkeys((*shown, *some)))[: _SHOWN + 1]

    def require_none(self) -> None:
        """Raise :class:`DataError` with a line for every fault; do nothing without faults."""
        lines = []
        for (file, column, what), rows in self.counts.items():
            given = self.rows[file] - self.counts[file, column, "missing"]
            if what == "clipped" and given >= _FEW and rows > _NEARLY_ALL * given:
                self.add(
                    file,
                    column,
                    expected="values within its `bounds`",
                    met="nearly all beyond them",
                    remedy="correct the bounds, or read the column as its file means it (`decimal`, `date`, `unknown`)",
                    rows=rows,
                )
        for (file, column, expected, remedy, met), (rows, values) in self.found.items():
            shown = [repr(value) for value in values][:_SHOWN] + ["..."] * (len(values) > _SHOWN)
            where = f"in {rows:,} row{'s' if rows != 1 else ''}"
            lines.append(
                f"{file}: column {column}: expected {expected}, got {', '.join(shown) or met} {where}; {remedy}."
            )
        if lines:
            raise DataError("\n".join(lines))


_WITH_DECIMAL_COMMA = r"^[-+]?(\d{1,3}(\.\d{3})+|\d+)(,\d+)?$"


def with_decimal_points(text: pa.Array) -> pa.Array:
    """Return texts such as 1.234,5 as 1234.5, which programs read as a number; other texts are unchanged."""
    is_number = pc.match_substring_regex(text, _WITH_DECIMAL_COMMA)
    return pc.if_else(is_number, pc.replace_substring(pc.replace_substring(text, ".", ""), ",", "."), text)


def numbers_of_dates(values: pa.Array, feature: Feature) -> pa.Array:
    """Return as text the year of each date, or, if the feature declares the day ``age_on``, the age in whole years on
    that day. ``values`` are text, or of a type of dates: these need no ``date_format``. An empty cell, or one that the
    feature declares as unknown, becomes empty.

    A date counts as the day that is written, in its own time zone. A year of two digits makes a date the last one up to
    ``age_on``, or the one whose year is within the bounds. Every other cell is marked with the reason for which
    :func:`numbers` refuses it: it is no day of the calendar, a date after ``age_on`` (unless the lower bound is below
    0), or one longer ago than anybody lived (and than the upper bound).
    """
    form, text = feature.date_format, text_of(values)
    if is_dates(values.type):
        form, text = ISO_DATE, pc.utf8_slice_codeunits(text, 0, 10)
    # Each value once: reading a date in Python is slow.
    coded = text.dictionary_encode()
    rule = form, feature.bounds or (0.0, 0.0), feature.age_on, feature.unknown
    found = pa.array([_number_of_date(each, *rule) for each in coded.dictionary.to_pylist()], pa.string())
    return found.take(coded.indices)


# A noncharacter of Unicode, which no text contains: it stands before, between and after the words on a cell.
_REFUSED = "\ufdd0"
_OLDEST = 122
"""The most years that a person is known to have lived."""


@lru_cache(maxsize=2**16)  # the days of a column are few, and those of its batches are the same
def _number_of_date(
    text: str, form: str, bounds: tuple[float, float], last: datetime.date | None, unknown: tuple[str, ...]
) -> str:
    """Return the year or the age of the date ``text``, which is written as ``form``; see :func:`numbers_of_dates`."""
    day, is_number = day_of(text, form), re.fullmatch(r"\d+([.,]\d+)?", text)
    if not text or text in unknown or (day and form == ISO_DATE and text[:10] in unknown):
        return ""
    low, high = bounds
    expected, remedy = f"a day of the calendar, written as {form}", _NO_NUMBER
    if is_number and not day:
        expected = f"a date written as {form}, not a number"
        remedy = "read the column as text: its points were taken for those between thousands, or its zeros are lost"
        if 1000 <= (number := float(text.replace(",", "."))) < 3000:
            remedy = "declare years without `date`, or give whole dates"
        elif number < 100_000:
            remedy = "give the column a date format in the spreadsheet before it is written: this is a day number"
    if day and is_short(form):
        start = int(high) if last is None else last.year
        years = (start - (start - day.year) % 100 - each for each in (0, 100))
        moved = [day_of(f"{year:04}-{day.month:02}-{day.day:02}", ISO_DATE) for year in years]
        day = next((each for each in moved if each and (low <= each.year if last is None else each <= last)), None)
        expected = f"a day of a year within the bounds, written as {form}" if last is None else expected
    if day and last is not None:
        age = last.year - day.year - ((day.month, day.day) > (last.month, last.day))
        if min(low, 0) <= age <= max(high, _OLDEST):
            return str(age)
        expected = f"a date up to {last}" if age < 0 else f"a date at most {max(high, _OLDEST):g} years before {last}"
        remedy = "correct it, declare it as `unknown`, or declare `bounds` for such ages"
    elif day:
        return str(day.year)
    return f"{_REFUSED}{expected}{_REFUSED}{remedy}{_REFUSED}{text}"


def require_columns(table: pa.Table, columns: Sequence[str], name: str) -> None:
    """Raise :class:`DataError` if ``table`` lacks one of ``columns``; the message names the first such column, and the
    most similar name that the table has."""
    for column in columns:
        if column not in table.column_names:
            (only, *others) = table.column_names
            unlike = not others and re.search(r"[;\t|,]", only)
            remedy = "; its only column looks like several: declare the `separator`" if unlike else ""
            raise DataError(f"{name}: no column {column}{nearest(column, table.column_names)}{remedy}.")


Floats = npt.NDArray[np.float32]
_NO_NUMBER = "correct it, or declare it as `unknown`"
_COMMA = "write a decimal point and nothing between thousands, or declare `decimal: ','` if the comma is the point"
_DATE = "declare `date: year` or `date: age`, with its date_format; or write a number of it, such as its days"
COMMAS = r"^[-+]?\d[\d.]*,[\d.,]*\d$"
DATES = r"^(\d{4}-\d{2}-\d{2}([ T].*)?|\d{1,2}[./]\d{1,2}[./]\d{2,4})$"


@dataclass(frozen=True, kw_only=True)
class ColumnCells:
    """The values of one column in a batch of rows of ``file``: text without nulls, or numbers. Faults in the values are
    added to ``faults``."""

    file: str
    column: str
    values: pa.Array
    faults: TableFaults

    @property
    def text(self) -> pa.Array:
        """The values as text; a missing one is empty."""
        text = text_of(self.values)
        if pa.types.is_string(text.type) and pc.any(pc.starts_with(text, _REFUSED)).as_py():
            text = pc.replace_substring_regex(text, f"(?s)^{_REFUSED}.*{_REFUSED}", "")
        return text

    def count(self, what: str, rows_N: Mask) -> None:
        """Add the number of rows where ``rows_N`` is True to the counts of this column; ``what`` happened to their
        values: clipped, missing or other."""
        if number := int(rows_N.sum()):
            self.faults.counts[self.file, self.column, what] += number

    def require(self, right_N: Mask, *, expected: str, remedy: str, shown: bool = True) -> None:
        """Add a fault for the rows where ``right_N`` is False; ``shown``: the message may show their values."""
        if right_N.all():
            return
        wrong = np.flatnonzero(~right_N)
        # Each value once: a message shows a few, and a column may have millions.
        values = pc.unique(self.text.take(pa.array(wrong))).to_pylist() if shown else ()
        self.faults.add(self.file, self.column, expected=expected, remedy=remedy, rows=len(wrong), values=values[:9])


def cells(table: pa.Table, column: str, file: str, faults: TableFaults) -> ColumnCells:
    """Return the values of one ``column`` in the rows of ``table``; :class:`DataError` if the table has no such column.
    ``file`` is the table's name in messages."""
    require_columns(table, [column], file)
    values = table[column].combine_chunks()
    return ColumnCells(
        file=file, column=column, values=text_of(values) if is_dates(values.type) else values, faults=faults
    )


def encode(table: pa.Table, features: Sequence[tuple[str, Feature]], file: str, faults: TableFaults) -> Floats:
    """Return the features (N, F) of the rows of ``table``; :func:`feature_codes` describes each of them."""
    blocks: list[Floats] = []
    for column, feature in features:
        found = cells(table, column, file, faults)
        if feature.vector is not None:
            blocks.append(_encode_vector(found, feature.vector))
            continue
        if feature.text is not None:
            blocks.append(text_vectors(found.text.to_pylist(), feature.text, feature.ngrams))
            continue
        places, unmarked_N = feature.places, np.zeros(len(found.values), dtype=bool)
        if "" not in places:
            unmarked_N = _mask(pc.equal(found.text, ""))
            remedy = "declare what an empty cell counts as with `missing`, or correct it"
            found.require(~unmarked_N, expected="a value", remedy=remedy, shown=False)
        if feature.bounds is not None:
            # Unknown dates are empty by now, and no year or age is one of them.
            values_N = numbers(found, () if feature.date else feature.unknown)
            missing_N = np.isnan(values_N)
            found.count("clipped", (values_N < feature.bounds[0]) | (values_N > feature.bounds[1]))
            # By the same function as the values, so that a value at a bound is exactly 0 or 1.
            ends = (np.array(number) for number in (*feature.bounds, feature.stands_for_missing))
            low, high, constant = (stretched(end, feature.scale) for end in ends)
            scaled_N = np.clip((stretched(values_N, feature.scale) - low) / (high - low), 0, 1)
            columns = [np.where(missing_N, (constant - low) / (high - low), scaled_N)]
            if feature.may_be_missing:
                found.count("missing", missing_N)
                columns.append(missing_N)
            blocks.append(np.stack(columns, axis=1).astype(np.float32))
        elif feature.bands:
            values_N, starts = numbers(found), np.array(list(feature.bands.values()))
            remedy = "declare a band for it, or correct it"
            found.require(~(values_N < starts[0]), expected=f"codes >= {starts[0]:g}", remedy=remedy)
            # NaN, and codes below the first band, are faults already: their band does not matter.
            place_N = np.maximum(np.searchsorted(starts, values_N, side="right") - 1, 0)
            blocks.append(np.eye(len(starts), dtype=np.float32)[place_N])
        else:
            names = feature.own_categories
            if feature.may_be_missing:
                absent = [value for value in ("", *feature.unknown) if value not in feature.categories]
                found.count("missing", _codes(found, dict.fromkeys(absent, 0))[1])
            codes_N, known_N = _codes(found, places)
            # Only one fault: an empty cell is reported as missing, not also as undeclared.
            known_N |= unmarked_N
            if feature.other:
                found.count("other", ~known_N)
            else:
                declared = ", ".join(value or "(empty)" for value in feature.categories)
                remedy = f"declared: {declared}; add it to `categories`, or set `other: true`"
                found.require(known_N, expected="a declared category", remedy=remedy)
            # The last row, of zeros, is for a value without a category.
            undeclared = names.index(OTHER) if feature.other else len(names)
            one_hot = np.eye(len(names) + 1, len(names), dtype=np.float32)
            blocks.append(one_hot[np.where(codes_N < 0, undeclared, codes_N)])
    return np.concatenate(blocks, axis=1)


def codes_of(found: ColumnCells, coding: Coding, what: str, *, may_lack: bool = False) -> IntArray:
    """Return the code of the class or group of each row as int64; with ``may_lack`` a missing value gets -1. ``what``
    is the word for a code in messages: class or group."""
    meanings = [(meaning, code) for code, each in enumerate(coding.meanings.values()) for meaning in each]
    published = {meaning.value: code for meaning, code in meanings if meaning.value is not None}
    if published:
        codes_N, known_N = _codes(found, published)
    else:
        values_N = numbers(found)
        codes_N = np.full(len(values_N), -1, dtype=np.int64)
        for meaning, code in meanings:
            # Declared ranges do not overlap, so that the order of these assignments does not matter.
            codes_N[meaning.holds(values_N)] = code
        known_N = (codes_N >= 0) | np.isnan(values_N)
    empty_N = _mask(pc.equal(found.text, "")) & (codes_N < 0)
    names = list(published) or list(coding.meanings)
    found.require(
        known_N | empty_N,
        expected=f"a declared {what}" if published else f"a number in the range of a {what}",
        remedy=f"declared: {', '.join(names)}",
    )
    if not may_lack:
        remedy = "only public records may lack one" if what == "class" else "declare what an empty cell means"
        found.require(~empty_N, expected=f"a {what}", remedy=f"{remedy}, or leave the row out with `keep`", shown=False)
    return codes_N


def crossed_codes(rows: pa.Table, groups: Iterable[Group], file: str, faults: TableFaults) -> IntArray:
    """Return the code of each row's combination of ``groups``: the number of its name in
    :meth:`fairpate.data.declaration.Declaration.group_names`."""
    crossed_N = np.zeros(len(rows), dtype=np.int64)
    for group in groups:
        own_N = codes_of(cells(rows, group.column, file, faults), group, "group")
        crossed_N = crossed_N * len(group.names) + own_N
    return crossed_N


def codes(table: pa.Table, column: str, meanings: Mapping[str, int] | Sequence[str], file: str) -> Tensor:
    """Return the values of a column as int64 codes. ``meanings`` maps values to codes; if it is a sequence, a value's
    code is its index. :class:`DataError` for any other value."""
    found = cells(table, column, file, TableFaults())
    published = meanings if isinstance(meanings, Mapping) else dict(zip(meanings, itertools.count()))
    codes_N, known_N = _codes(found, published)
    found.require(known_N, expected="a declared value", remedy=f"declared: {', '.join(meanings)}")
    found.faults.require_none()
    return torch.from_numpy(codes_N)


def numbers(found: ColumnCells, unknown: Sequence[str] = ()) -> FloatArray:
    """Return the values of a column as finite numbers, NaN for a missing value or one of ``unknown``. Any other text is
    a fault and becomes NaN."""
    meant_N = [number for value in unknown if (number := number_in(value)) is not None]
    if not pa.types.is_string(found.values.type):
        # To the nearest float, as the same digits in text: whole numbers beyond 2**53 are no errors.
        values = found.values.cast(pa.float64(), safe=False)
        values_N = np.array(values.to_numpy(zero_copy_only=False), dtype=np.float64)
        found.require(~np.isinf(values_N), expected="a number", remedy=_NO_NUMBER)
        return np.where(np.isinf(values_N) | np.isin(values_N, meant_N), np.nan, values_N)
    is_unknown = pc.is_in(found.text, value_set=pa.array(("", *unknown), pa.string()))
    text = pc.if_else(is_unknown, pa.scalar(None, pa.string()), found.values)
    try:
        values = pc.cast(text, pa.float64())
    except pa.ArrowInvalid:
        values = pa.array([number_in(value) for value in text.to_pylist()], pa.float64())
    values_N = np.array(values.to_numpy(zero_copy_only=False), dtype=np.float64)
    right_N = np.isfinite(values_N) | _mask(text.is_null())
    if not right_N.all():
        # Dates that :func:`numbers_of_dates` refused come with their reasons.
        said = Counter(each for each in text.to_pylist() if each is not None and each.startswith(_REFUSED))
        for cell, rows in said.items():
            expected, remedy, value = cell.removeprefix(_REFUSED).split(_REFUSED)
            found.faults.add(found.file, found.column, expected=expected, remedy=remedy, rows=rows, values=[value])
        right_N |= _mask(pc.fill_null(pc.starts_with(text, _REFUSED), False))
        comma_N, date_N = (_mask(pc.match_substring_regex(found.values, like)) for like in (COMMAS, DATES))
        found.require(right_N | comma_N | date_N, expected="a number", remedy=_NO_NUMBER)
        found.require(right_N | ~comma_N, expected="a number", remedy=_COMMA)
        found.require(right_N | ~date_N, expected="a number", remedy=_DATE)
    # A code that means a missing value may also be written as 999.0.
    return np.where(np.isfinite(values_N) & ~np.isin(values_N, meant_N), values_N, np.nan)


def _codes(found: ColumnCells, published: Mapping[str, int]) -> tuple[IntArray, Mask]:
    """Return the code of each row's value by the mapping ``published``, -1 for a value without a code, and a mask of
    the rows with a code."""
    book, cells_N = PublishedValues(published), found.text.dictionary_encode()
    distinct: list[Value] = cells_N.dictionary.to_pylist()
    if not pa.types.is_string(found.values.type):  # a file with types does not distinguish 1.0 from 1
        distinct = [text and book.number(str(text)) for text in distinct]
    codes_N = np.array([book.code(value) for value in distinct], dtype=np.int64)[cells_N.indices.to_numpy()]
    return codes_N, codes_N >= 0


def _encode_vector(found: ColumnCells, size: int) -> Floats:
    values, expected = found.values, f"a list of {size} numbers"
    fault = partial(found.faults.add, found.file, found.column)
    # Faulty rows stay zeros: loading ends with an error, after all faults were found.
    block = np.zeros((len(values), size), dtype=np.float32)
    if not is_vectors(values.type):
        remedy = f"store lists in Parquet, or declare `array: true`; the column holds {values.type}"
        fault(expected=expected, remedy=remedy, rows=len(values))
        return block
    lengths_N = pc.fill_null(pc.list_value_length(values), -1).to_numpy(zero_copy_only=False)
    right_N = lengths_N == size
    flat = pc.list_flatten(values.filter(pa.array(right_N))).cast(pa.float32(), safe=False)
    block[right_N] = flat.to_numpy(zero_copy_only=False).reshape(-1, size)
    num_infinite = int((~np.isfinite(block).all(axis=1)).sum())
    lengths = [f"a list of {length}" if length >= 0 else "nothing" for length in np.unique(lengths_N[~right_N])]
    remedy = "correct `vector`, or the file"
    fault(expected=expected, remedy=remedy, rows=int((~right_N).sum()), values=lengths)
    fault(expected="finite numbers", remedy=remedy, rows=num_infinite)
    return block


def text_vectors(texts: Sequence[str], size: int, ngrams: str) -> Floats:
    """Return a vector (N, ``size``) for each text, which depends on this text alone.

    ``ngrams``: lower-cased `words` and their pairs, or `characters` within words, are counted at the place that a hash
    of each gives, with a sign by the same hash, and scaled to the norm 1. Nothing is fitted to texts, and a text
    without words is a vector of zeros. Or `glove`, the mean of public vectors of words
    (:mod:`fairpate.data.word_vectors`), or the user's own ``module:function``, which gets one text at a time; DataError
    if it fails.
    """
    if ngrams == word_vectors.NAME:
        return word_vectors.mean_vectors(texts)
    if CODE_NAME.fullmatch(ngrams):
        expected = f"a vector of {size} finite numbers for each text, as `text` says"
        return vectors_by_code(ngrams, texts, size=size, field="ngrams", expected=expected, remedy="correct either")
    from sklearn.feature_extraction.text import HashingVectorizer  # costs a second, and only text needs it

    analyzer, lengths = ("word", (1, 2)) if ngrams == "words" else ("char_wb", (3, 5))
    hashed = HashingVectorizer(n_features=size, dtype=np.float32, analyzer=analyzer, ngram_range=lengths)
    made: Floats = hashed.transform(texts).toarray()
    return made


def vectors_by_code(
    place: str, given: Iterable[Any], *, size: int | None = None, field: str, expected: str, remedy: str
) -> Floats:
    """Return the vectors (N, ``size``) that the user's own function ``place``, a ``module:function``, makes of N texts
    or pictures. It gets one at a time, so that no vector depends on another's. ``size`` None: any length, the same for
    all.

    Messages name the ``field``, what is ``expected``, and the ``remedy``. DataSettingsError if the user does not allow
    files to name code (:mod:`fairpate.config`), DataError if the function fails or returns anything else.
    """
    if not may_run(place):
        raise DataSettingsError(f"{field}: {place} is code that would run with your rights; {REMEDY}.")
    try:
        function = named_object(place)
        rows = [np.asarray(function(each), dtype=np.float32) for each in given]
    except Exception as error:  # the user's module may raise anything
        raise DataError(f"{field}: {place} failed ({type(error).__name__}: {error}); correct the function.") from error
    shapes = sorted({row.shape for row in rows})
    wanted = shapes[:1] if size is None else [(size,)]
    is_right = not shapes or (shapes == wanted and len(wanted[0]) == 1)
    if not is_right or not all(np.isfinite(row).all() for row in rows):
        raise DataError(f"{field}: {place}: expected {expected}, got shapes {shapes[:3]}; {remedy}.")
    return np.stack(rows) if rows else np.zeros((0, size or 0), dtype=np.float32)


def _mask(flags: pa.Array) -> Mask:
    return np.array(flags.to_numpy(zero_copy_only=False), dtype=bool)


@dataclass(frozen=True, kw_only=True)
class RecordField:
    """One input of a form for a record: a number between ``low`` and ``high`` (values outside are clipped), or one of
    ``choices``.

    ``is_optional``: the value may be missing; ``takes_other``: any other text is accepted too.
    """

    name: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    is_optional: bool = False
    takes_other: bool = False


@dataclass(frozen=True, kw_only=True)
class RecordForm:
    """The inputs for a record of a table: one for each published column. ``columns`` maps a column's name to its
    features.

    The inputs are encoded exactly as a row of a file with the same values, so that a typed record and a row of a file
    are the same query.
    """

    columns: Mapping[str, Sequence[FeatureCode]]

    @property
    def fields(self) -> tuple[RecordField, ...]:
        """The inputs of the form, one for each published column, in order."""
        found = []
        for column, codes in self.columns.items():
            first, last = codes[0], codes[-1]
            if first.kind == HASHED:
                found.append(RecordField(name=column, is_optional=True, takes_other=True))
            elif first.kind == "number":
                is_optional = first.missing is not None
                found.append(RecordField(name=column, low=first.low, high=first.high, is_optional=is_optional))
            elif first.kind == "band":
                # The last band is open: the form suggests no number above its start.
                found.append(RecordField(name=column, low=first.at_least, high=last.at_least))
            else:
                values, other = self._published[column].codes, last.kind == "other"
                choices = tuple(filter(None, values))
                found.append(RecordField(name=column, choices=choices, is_optional="" in values, takes_other=other))
        return tuple(found)

    @cached_property
    def _published(self) -> Mapping[str, PublishedValues]:
        """The values of each column of categories, with the index of their feature; the index after the last feature
        means none of them."""
        found = {}
        for column, codes in self.columns.items():
            if codes[-1].kind in ("category", "other"):
                listed = [(place, code.values or ()) for place, code in enumerate(codes) if code.kind == "category"]
                listed.append((len(codes), codes[0].unknown or ()))
                found[column] = PublishedValues({text: place for place, values in listed for text in values})
        return found

    def spelling(self, column: str, value: Value) -> Value:
        """Return the text of the category of ``column`` that ``value`` means, such as `2` for the number 2.0, or the
        value's own text; None for a missing value. Lists, and the values of a column of numbers that do not mark a
        missing one, are unchanged."""
        if not isinstance(value, Value):
            return value
        if column in self._published:
            return self._published[column].spelling(value) or None
        is_unknown = isinstance(value, str) and value.strip() in (self.columns[column][0].unknown or ())
        return None if is_unknown else value

    def encode(self, values: Mapping[str, Value]) -> npt.NDArray[np.float32]:
        """Return the features (F,) of a record, given its ``values`` by column. ValueError, naming the column, for a
        value that is missing or not declared."""
        features: list[float] = []
        for column, codes in self.columns.items():
            first, value = codes[0], values.get(column)
            value = None if is_missing(value) else value.item() if isinstance(value, np.generic) else value
            if not isinstance(value, Value):
                found = type(value).__name__
                raise ValueError(f"{column}: expected text or a number, got {found}")  # noqa: TRY004 - one error for all
            if first.kind == HASHED:
                text = PublishedValues.text(value)
                features += text_vectors([text], len(codes), first.ngrams or "words")[0].tolist()
                continue
            if column in self._published:
                published = self._published[column]
                text, place = published.spelling(value), published.code(value)
                if place < 0 and (codes[-1].kind != "other" or not text):
                    declared = ", ".join(filter(None, published.codes))
                    raise ValueError(f"{column}: expected one of {declared}, got {value if text else ''!r}")
                # The feature for undeclared values is the last one.
                place = place if place >= 0 else len(codes) - 1
                features += [place == each for each in range(len(codes))]
                continue
            text, unknown = PublishedValues.text(value), first.unknown or ()
            number = None if isinstance(value, bool) else number_in(value)
            if text in unknown or (number is not None and number in map(number_in, unknown)):
                number = None
            elif text and number is None:
                bounds = "" if first.low is None else f" from {first.low:g} to {first.high:g}"
                raise ValueError(f"{column}: expected a number{bounds}, got {value!r}")
            if first.kind == "band":
                if number is None or number < (first.at_least or 0):
                    raise ValueError(f"{column}: expected a number of at least {first.at_least:g}, got {number}")
                # Bands ascend, so that the number is in the last one whose start it reaches.
                place = sum(number >= (code.at_least or 0) for code in codes) - 1
                features += [place == each for each in range(len(codes))]
                continue
            if number is None and first.missing is None:
                raise ValueError(f"{column}: expected a number, got none")
            # The same operations as for a file, so that a typed record gets exactly the features of the same row.
            given = np.array([first.low, first.high, first.missing if number is None else number], dtype=np.float64)
            low, high, scaled = stretched(given, first.scale)
            features.append(np.clip((scaled - low) / (high - low), 0, 1))
            features += [] if first.missing is None else [number is None]
        return np.array(features, dtype=np.float32)


def form_of(codes: Sequence[FeatureCode]) -> RecordForm | None:
    """Return the input form for records with the features ``codes``; None if there are no features, or if a column
    contains vectors, which are too long to type."""
    if not codes or any(code.kind == "element" for code in codes):
        return None
    columns = itertools.groupby(codes, key=lambda code: code.column)
    return RecordForm(columns={column: tuple(own) for column, own in columns})
