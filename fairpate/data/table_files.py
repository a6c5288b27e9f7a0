"""Read the files of declared tables, delimited text and files with types, batch by batch.

Nothing is guessed: every field of delimited text stays text, trimmed, until a declaration gives its meaning. In files
with types (Parquet, Arrow), values other than numbers and dates become the text that a delimited file would have. Only
one batch is in memory at a time.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from fairpate.lazy import arrow_dataset
from fairpate.types import DataError, tell

TYPED_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".feather": "feather", ".arrow": "feather"}
_BYTES_AT_ONCE, _ROWS_AT_ONCE = 2**23, 2**15
_RESTORE = "restore the file"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of delimited text.

    - ``columns``: the names of the fields, if the file has no header line.
    - ``separator``: the character between fields; None: a tab in .tsv files, otherwise a comma.
    - ``comment``: a first line that begins with this text is skipped.
    """

    columns: Sequence[str] | None = None
    separator: str | None = None
    comment: str = ""
    encoding: str = "utf-8"

    def of(self, path: Path) -> Layout:
        """Return this layout with the separator of the file at ``path``."""
        return replace(self, separator=self.separator or ("\t" if ".tsv" in path.suffixes else ","))


USUAL = Layout()


def read_batches(
    path: Path, name: str, layout: Layout = USUAL, *, wanted: Sequence[str] | None = None, others: bool = False
) -> Iterator[pa.Table]:
    """Yield the rows of the file at ``path``, batch by batch; its suffix selects Parquet, Feather, Arrow or text.

    ``name`` is the file's name in error messages. ``layout`` describes delimited text, which may be gzipped. In the
    other formats only the columns ``wanted`` are read, or all if it is None; with ``others`` also those of the others
    that :func:`plain_batches` would not leave out. :class:`DataError` as in :func:`read_table`.
    """
    require_readable(path, name)
    if path.suffix not in TYPED_SUFFIXES:
        try:
            # The position in the file on disk, even if gzipped: its unpacked size is unknown.
            size = path.stat().st_size
            with path.open("rb") as file, gzip.open(file) if path.suffix == ".gz" else nullcontext(file) as stream:
                for rows in _text_batches(stream, name, layout.of(path)):
                    tell(file.tell(), size)
                    yield rows
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{name}: damaged or unreadable file ({error}); {_RESTORE}.") from error
        return
    num_rows = 0
    try:
        dataset = arrow_dataset.dataset(path, format=TYPED_SUFFIXES[path.suffix])
        names, total = dataset.schema.names, dataset.count_rows()
        there = None if wanted is None or others else [column for column in names if column in wanted]
        # Threads and reading ahead would keep many batches in memory at once.
        for batch in dataset.to_batches(columns=there, batch_size=_ROWS_AT_ONCE, use_threads=False, batch_readahead=1):
            num_rows += len(batch)
            tell(num_rows, total)
            if len(batch):
                yield _plain_batch(batch, name, wanted)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{name}: not a readable table ({str(error).splitlines()[0]}); {_RESTORE}.") from error
    if not num_rows:
        raise DataError(f"{name}: not a readable table (it has no row); {_RESTORE}.")


def plain_batches(table: pa.Table, name: str, *, wanted: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the rows of a table in memory in batches, with values in the form that :func:`read_batches` yields for a
    file. Columns that have no such form are left out unless they are in ``wanted``; None: every column is wanted."""
    if not len(table):
        raise DataError(f"{name}: expected rows, got none; give a table with at least one row.")
    for batch in table.to_batches(max_chunksize=_ROWS_AT_ONCE):
        yield _plain_batch(batch, name, wanted)


_ELSEWHERE = dict.fromkeys((".xlsx", ".xls", ".ods"), "read_excel") | dict.fromkeys((".db", ".sqlite"), "read_sql")


def require_readable(path: Path, name: str) -> None:
    """Raise DataError if the file at ``path`` is a spreadsheet or a database; the message names the function of pandas
    that reads it."""
    if reader := _ELSEWHERE.get(path.suffix.lower()):
        raise DataError(
            f"{name}: a {'spreadsheet' if reader == 'read_excel' else 'database'}, which is not read here; write it as "
            f"CSV or Parquet, or give the frame of pandas.{reader}: fairpate.load_data(DECLARATION, private=FRAME)."
        )


def column_names(path: Path, name: str, layout: Layout = USUAL) -> list[str]:
    """Return the column names in a file's header, or in its schema; no row is read."""
    require_readable(path, name)
    try:
        if path.suffix in TYPED_SUFFIXES:
            return list(arrow_dataset.dataset(path, format=TYPED_SUFFIXES[path.suffix]).schema.names)
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            return _distinct(_read_header(_utf8(stream, layout), name, layout.of(path)))
    except UnicodeError as error:
        raise _not_encoded(error, name, layout) from error
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise DataError(f"{name}: damaged or unreadable file ({error}); {_RESTORE}.") from error


def read_table(content: bytes, name: str, *, separator: str = ",") -> pa.Table:
    """Return all fields of delimited text, which has a header line, as trimmed text.

    A repeated name in a header gets ``.1``, ``.2``. :class:`DataError` for ragged rows, no row, or bytes that are not
    UTF-8.
    """
    return pa.concat_tables(_text_batches(io.BytesIO(content), name, Layout(separator=separator)))


def _text_batches(stream: Any, name: str, layout: Layout) -> Iterator[pa.Table]:
    """Yield the rows of delimited text in batches, with every field as trimmed text."""
    rows = 0
    try:
        stream = _utf8(stream, layout)
        header = _distinct(layout.columns if layout.columns is not None else _read_header(stream, name, layout))
        with arrow_csv.open_csv(
            pa.PythonFile(stream, mode="r"),
            read_options=arrow_csv.ReadOptions(column_names=header, block_size=_BYTES_AT_ONCE, use_threads=False),
            # A quoted field may contain line breaks.
            parse_options=arrow_csv.ParseOptions(delimiter=layout.separator, newlines_in_values=True),
            # An empty field stays empty text: only the declaration knows its meaning.
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=False
            ),
        ) as reader:
            for batch in reader:
                rows += len(batch)
                yield pa.table({column: pc.utf8_trim_whitespace(batch[column]) for column in header})
    except pa.ArrowException as error:
        reason = str(error).removeprefix("CSV parse error: ")
        if "Empty CSV" in reason:
            reason = "it has no row"
        elif ragged := re.search(r"Expected \d+ columns, got \d+", reason):
            # Not the row itself, which Arrow quotes: it may be a private record.
            place = re.match(r"Row #\d+: ", reason)
            reason = f"{place[0] if place else ''}{ragged[0]} in a row"
        raise DataError(f"{name}: not a readable table ({reason}); {_RESTORE}{_hint(reason)}.") from error
    except UnicodeError as error:
        raise _not_encoded(error, name, layout) from error
    if not rows:
        raise DataError(f"{name}: not a readable table (it has no row); {_RESTORE}.")


def _utf8(stream: Any, layout: Layout) -> io.BufferedReader:
    """Return the bytes of delimited text in UTF-8, whatever its encoding, from its header on: a byte-order mark is no
    part of a name, and a first line that is a comment is skipped."""
    if codecs.lookup(layout.encoding).name != "utf-8":
        stream = pa.transcoding_input_stream(pa.PythonFile(stream, mode="r"), layout.encoding, "utf-8")
    # A stream of bytes in memory has no `peek`, nor has one of Arrow.
    stream = stream if hasattr(stream, "peek") else io.BufferedReader(stream)
    if stream.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    if layout.comment and stream.peek(len(layout.comment)).startswith(layout.comment.encode()):
        stream.readline()
    return stream


def _read_header(stream: IO[bytes], name: str, layout: Layout) -> list[str]:
    """Return the column names in the header of delimited text in UTF-8; a header with quoted names may extend over
    several lines."""
    # Read line by line, so that the stream is at the first row afterwards.
    lines = (line.decode("utf-8") for line in iter(stream.readline, b""))
    try:
        first = next(csv.reader(lines, delimiter=layout.separator or ",", strict=False), None)
    except csv.Error as error:
        raise DataError(f"{name}: not a readable table ({error}); {_RESTORE}{_hint(str(error))}.") from error
    if not first:
        raise DataError(f"{name}: not a readable table (it is empty, or opens with an empty line); {_RESTORE}.")
    return [field.strip().strip('"') for field in first]


def _not_encoded(error: UnicodeError, name: str, layout: Layout) -> DataError:
    hint = _hint("utf-8") if codecs.lookup(layout.encoding).name == "utf-8" else ", or declare its own `encoding`"
    return DataError(f"{name}: not a readable table ({error}); {_RESTORE}{hint}.")


def encoding_by_mark(start: bytes) -> str | None:
    """Return the encoding that the byte-order mark at the ``start`` of a file tells; None without a mark."""
    # The mark of UTF-32 begins with that of UTF-16.
    marks = {
        "utf-8": [codecs.BOM_UTF8],
        "utf-32": [codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE],
        "utf-16": [codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE],
    }
    return next((name for name, each in marks.items() if start.startswith(tuple(each))), None)


def is_encoding(name: str) -> bool:
    """Return True if ``name`` is an encoding in which delimited text can be read."""
    sample = "a,b\n1,2\n"
    try:
        return codecs.decode(sample.encode(name), name) == sample
    except (LookupError, UnicodeError, ValueError, TypeError):
        return False


def _hint(reason: str) -> str:
    if "utf-8" in reason.lower() or "utf8" in reason.lower():
        return ", in UTF-8, or declare its `encoding`, such as cp1252 or utf-16"
    return ", or declare its `separator` or `header`" if "columns" in reason else ""


def _plain_batch(batch: pa.RecordBatch, name: str, wanted: Sequence[str] | None = None) -> pa.Table:
    """Return the batch with columns of numbers, of dates and of lists of numbers unchanged, and all others as the text
    that a delimited file would have; see :func:`plain_batches`."""
    columns = {}
    for column in batch.schema.names:
        values = batch[column]
        values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
        kind = values.type
        # Few functions of Arrow support half floats.
        if pa.types.is_float16(kind):
            values = values.cast(pa.float32())
        elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or is_dates(kind) or is_vectors(kind)):
            is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
            # Durations and the types of other libraries would become numbers without their unit.
            is_bare = pa.types.is_duration(kind) or isinstance(kind, pa.BaseExtensionType)
            try:
                if pa.types.is_nested(kind) or is_bytes or is_bare:
                    raise pa.ArrowTypeError(str(kind))
                text = pc.fill_null(values.cast(pa.string()), "")
                text.validate(full=True)
            except pa.ArrowException as error:
                if wanted is not None and column not in wanted:
                    continue
                # Not Arrow's words: they may quote a private value.
                what = f"text, numbers or dates, got {kind}"
                if isinstance(error, pa.ArrowInvalid):
                    what = "text in UTF-8, got other bytes"
                raise DataError(
                    f"{name}: column {column}: expected {what}; leave the column out of the file, or name records by "
                    "other columns (identity)."
                ) from error
            values = pc.utf8_trim_whitespace(text)
            if pa.types.is_decimal(kind) and kind.scale > 0:  # 123.00 and 123 are one number, and so one name
                values = pc.replace_substring_regex(values, r"^(-?\d+(\.\d*[1-9])?)\.?0*$", r"\1")
        columns[column] = values
    return pa.table(columns)


def is_dates(kind: pa.DataType) -> bool:
    """Return True if ``kind`` is the type of a column of dates, with or without a time of day."""
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def is_vectors(kind: pa.DataType) -> bool:
    """Return True if ``kind`` is the type of a column whose values are lists of numbers."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list) and bool(pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type))


def array_of(path: Path) -> Path:
    """Return the path of the .npy file that contains the vectors of the rows in the file at ``path``."""
    return path.with_name(path.name.partition(".")[0] + ".npy")


def with_vectors(batches: Iterator[pa.Table], path: Path, name: str, sizes: dict[str, int]) -> Iterator[pa.Table]:
    """Yield the ``batches`` of rows of the file at ``path`` with additional columns of vectors, which are in one .npy
    file next to ``path``.

    ``sizes`` maps the name of each of these columns to the length of its vectors.
    """
    if not sizes:
        yield from batches
        return
    beside = array_of(path)
    try:
        # A pickle in the file would run its author's code.
        array = np.load(beside, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{beside.name}: no readable array next to {name} ({error}); put it there.") from error
    start, wanted = 0, sum(sizes.values())
    if array.ndim != 2 or array.shape[1] != wanted or array.dtype.kind not in "fiu":
        raise DataError(
            f"{beside.name}: expected numbers (rows, {wanted}), got {array.dtype} {array.shape}; correct "
            "`vector`, or the file."
        )
    for batch in batches:
        part, place = array[start : start + len(batch)], 0
        for column, size in sizes.items() if len(part) == len(batch) else ():
            flat = pa.array(np.ascontiguousarray(part[:, place : place + size]).ravel())
            batch = batch.append_column(column, pa.FixedSizeListArray.from_arrays(flat, size))
            place += size
        start += len(batch)
        # A batch beyond the array has no vectors: the length is checked below.
        if start <= len(array):
            yield batch
    if start != len(array):
        raise DataError(
            f"{beside.name}: expected {start:,} rows, as {name} has, got {len(array):,}; add or remove rows."
        )


def text_of(values: Any) -> pa.Array:
    """Return the values of a column as the text that a delimited file contains; a missing value is an empty text."""
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if not pa.types.is_floating(values.type):
        return pc.fill_null(values.cast(pa.string()), "")
    text = pc.if_else(pc.fill_null(pc.is_finite(values), False), values.cast(pa.string()), "")
    # Whole numbers as in an integer column, not as 1.2e+10: a record has the same name in files of either type.
    is_whole = pc.and_(pc.equal(pc.round(values), values), pc.less(pc.abs(values), 2.0**53))
    whole = pc.if_else(pc.fill_null(is_whole, False), values, None).cast(pa.int64())
    return pc.coalesce(whole.cast(pa.string()), text)


def _distinct(names: Sequence[str]) -> list[str]:
    distinct: list[str] = []
    for name in names:
        # Named as pandas names them.
        copies = sum(other == name or other.startswith(f"{name}.") for other in distinct)
        distinct.append(f"{name}.{copies}" if name in distinct else name)
    return distinct
