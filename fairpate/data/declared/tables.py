"""Tables of publishers and users, by the batch: text trimmed, typed numbers as they are.

Nothing is guessed: every field of delimited text stays text until a declaration says what it means. Parquet and Arrow
files have types; what is no number there becomes the text that a delimited file would have. Ragged rows and unreadable
bytes are refused. A batch is all that is in memory.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from fairpate.data.entry import DataError
from fairpate.later import arrow_dataset
from fairpate.names import nearest
from fairpate.steps import tell

TYPED_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".feather": "feather", ".arrow": "feather"}
_BYTES_AT_ONCE, _ROWS_AT_ONCE = 2**23, 2**15
_RESTORE = "restore the file"


def read_batches(
    path: Path,
    name: str,
    *,
    columns: Sequence[str] | None = None,
    separator: str | None = None,
    comment: str = "",
    wanted: Sequence[str] | None = None,
) -> Iterator[pa.Table]:
    """The rows of the file at ``path``, batch by batch; Parquet, Feather and Arrow are known by their endings.

    Otherwise it is delimited text, perhaps gzipped: ``columns`` names the fields where there is no header line,
    ``separator`` null is a tab in .tsv files and else a comma, and a first line that begins with ``comment`` is
    skipped. ``wanted``: other columns are left out, where all of these are there. :class:`DataError` as
    :func:`read_table`.
    """
    if path.suffix in TYPED_SUFFIXES:
        yield from _typed_batches(path, name, wanted)
        return
    separator = separator or _usual_separator(path)
    try:
        with path.open("rb") as file, gzip.open(file) if path.suffix == ".gz" else nullcontext(file) as stream:
            size = path.stat().st_size
            yield from _text_batches(
                stream,
                name,
                columns=columns,
                separator=separator,
                comment=comment,
                told=lambda: tell(file.tell(), size),
            )
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name}: damaged or unreadable file ({error}); {_RESTORE}.") from error


def plain_batches(table: pa.Table, name: str) -> Iterator[pa.Table]:
    """The rows of a table in memory, as :func:`read_batches` gives those of a file."""
    if not len(table):
        raise DataError(f"{name}: expected rows, got none.")
    for batch in table.to_batches(max_chunksize=_ROWS_AT_ONCE):
        yield _plain_batch(batch, name)


def column_names(path: Path, name: str, *, separator: str | None = None) -> list[str]:
    """The header of a file, or its schema; no row of it is read."""
    try:
        if path.suffix in TYPED_SUFFIXES:
            return list(arrow_dataset.dataset(path, format=TYPED_SUFFIXES[path.suffix]).schema.names)
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            return _distinct(_read_header(stream, name, separator or _usual_separator(path)))  # type: ignore[arg-type]
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise DataError(f"{name}: damaged or unreadable file ({error}); {_RESTORE}.") from error


def _usual_separator(path: Path) -> str:
    return "\t" if ".tsv" in path.suffixes else ","


def read_table(content: bytes, name: str, *, columns: Sequence[str] | None = None, separator: str = ",") -> pa.Table:
    """All fields as trimmed text; ``columns`` names them where the file has no header line.

    A name that a header repeats gets ``.1``, ``.2``. :class:`DataError` for ragged rows, no row, or bytes that are
    not UTF-8.
    """
    return pa.concat_tables(_text_batches(io.BytesIO(content), name, columns=columns, separator=separator))


def _text_batches(
    stream: Any,
    name: str,
    *,
    columns: Sequence[str] | None,
    separator: str,
    comment: str = "",
    told: Callable[[], object] = tuple,
) -> Iterator[pa.Table]:
    """``told`` is called after each batch."""
    stream = stream if hasattr(stream, "peek") else io.BufferedReader(stream)
    if comment and stream.peek(len(comment)).startswith(comment.encode()):
        stream.readline()
    header = _distinct(columns if columns is not None else _read_header(stream, name, separator))
    rows = 0
    try:
        with arrow_csv.open_csv(
            pa.PythonFile(stream, mode="r"),
            read_options=arrow_csv.ReadOptions(column_names=header, block_size=_BYTES_AT_ONCE, use_threads=False),
            parse_options=arrow_csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            # An empty field stays empty text: what it means is for the declaration to say.
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=False
            ),
        ) as reader:
            for batch in reader:
                rows += len(batch)
                told()
                yield pa.table({column: pc.utf8_trim_whitespace(batch[column]) for column in header})
    except pa.ArrowException as error:
        reason = str(error).removeprefix("CSV parse error: ")
        if "Empty CSV" in reason:
            reason = "it has no row"
        raise DataError(f"{name}: not a readable table ({reason}); {_RESTORE}{_hint(reason)}.") from error
    if not rows:
        raise DataError(f"{name}: not a readable table (it has no row); {_RESTORE}.")


def _read_header(stream: IO[bytes], name: str, separator: str) -> list[str]:
    """The fields of the first line, which quotes may extend over several."""
    # By the line, so that the stream stands at the first row afterwards. A byte-order mark is no part of a name.
    lines = (line.decode("utf-8-sig") for line in iter(stream.readline, b""))
    try:
        first = next(csv.reader(lines, delimiter=separator, strict=False), None)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{name}: not a readable table ({error}); {_RESTORE}{_hint(str(error))}.") from error
    if not first:
        raise DataError(f"{name}: not a readable table (it is empty, or opens with an empty line); {_RESTORE}.")
    return [field.strip().strip('"') for field in first]


def _hint(reason: str) -> str:
    if "utf-8" in reason.lower() or "utf8" in reason.lower():
        return ", in UTF-8"
    return ", or declare its `separator` or `header`" if "columns" in reason else ""


def _typed_batches(path: Path, name: str, wanted: Sequence[str] | None) -> Iterator[pa.Table]:
    rows = 0
    try:
        dataset = arrow_dataset.dataset(path, format=TYPED_SUFFIXES[path.suffix])
        names, total = dataset.schema.names, dataset.count_rows()
        there = None if wanted is None else [column for column in names if column in wanted]
        # Threads and reading ahead would hold many batches at once.
        for batch in dataset.to_batches(columns=there, batch_size=_ROWS_AT_ONCE, use_threads=False, batch_readahead=1):
            rows += len(batch)
            tell(rows, total)
            if len(batch):
                yield _plain_batch(batch, name)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{name}: not a readable table ({str(error).splitlines()[0]}); {_RESTORE}.") from error
    if not rows:
        raise DataError(f"{name}: not a readable table (it has no row); {_RESTORE}.")


def _plain_batch(batch: pa.RecordBatch, name: str) -> pa.Table:
    return pa.table({field.name: _plain(batch[field.name], field.name, name) for field in batch.schema})


def _plain(values: pa.Array, column: str, name: str) -> pa.Array:
    """Numbers as they are; everything else as the text that a delimited file has."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = values.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return values.cast(pa.float32()) if pa.types.is_float16(kind) else values
    if is_vectors(kind):
        return values
    if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        raise DataError(
            f"{name}: column {column}: expected text, numbers or dates, got {kind}; leave the column out of the "
            "file, or name records by other columns (identity)."
        )
    text = pc.utf8_trim_whitespace(pc.fill_null(values.cast(pa.string()), ""))
    if pa.types.is_decimal(kind) and kind.scale > 0:  # 123.00 and 123 are one number, and so one name
        text = pc.replace_substring_regex(text, r"^(-?\d+(\.\d*[1-9])?)\.?0*$", r"\1")
    return text


def is_vectors(kind: pa.DataType) -> bool:
    """Whether each cell is a list of numbers."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list) and bool(pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type))


def with_vectors(batches: Iterator[pa.Table], path: Path, name: str, sizes: dict[str, int]) -> Iterator[pa.Table]:
    """The batches of the file at ``path``, with the rows of its .npy file as columns; ``sizes`` by column."""
    if not sizes:
        yield from batches
        return
    beside = path.with_name(path.name.partition(".")[0] + ".npy")
    try:
        # A pickle would run code of whoever wrote the file.
        array = np.load(beside, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{beside.name}: no readable array beside {name} ({error}); put it there.") from error
    start, wanted = 0, sum(sizes.values())
    if array.ndim != 2 or array.shape[1] != wanted or array.dtype.kind not in "fiu":
        raise DataError(f"{beside.name}: expected numbers (rows, {wanted}), got {array.dtype} {array.shape}.")
    for batch in batches:
        part, place = array[start : start + len(batch)], 0
        for column, size in sizes.items() if len(part) == len(batch) else ():
            flat = pa.array(np.ascontiguousarray(part[:, place : place + size]).ravel())
            batch = batch.append_column(column, pa.FixedSizeListArray.from_arrays(flat, size))
            place += size
        start += len(batch)
        if start <= len(array):
            yield batch
    if start != len(array):
        raise DataError(f"{beside.name}: expected {start:,} rows, as {name} has, got {len(array):,}.")


def text_of(values: Any) -> pa.Array:
    """The values of a column as a delimited file writes them; a missing one is empty."""
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if pa.types.is_string(values.type):
        return values
    if not pa.types.is_floating(values.type):
        return pc.fill_null(values.cast(pa.string()), "")
    text = pc.if_else(pc.fill_null(pc.is_finite(values), False), values.cast(pa.string()), "")
    # Whole numbers as an integer's column has them, not as 1.2e+10: a name is the same in either.
    is_whole = pc.and_(pc.equal(pc.round(values), values), pc.less(pc.abs(values), 2.0**53))
    whole = pc.if_else(pc.fill_null(is_whole, False), values, None).cast(pa.int64())
    return pc.coalesce(whole.cast(pa.string()), text)


def column_of(table: pa.Table, column: str, name: str) -> pa.Array:
    """One column as one array; :class:`DataError` naming the nearest column where there is none."""
    require_columns(table, [column], name)
    return table[column].combine_chunks()


def require_columns(table: pa.Table, columns: Sequence[str], name: str) -> None:
    """:class:`DataError` naming the first column that ``table`` lacks and the nearest one it has."""
    for column in columns:
        if column not in table.column_names:
            (only, *others) = table.column_names
            unlike = not others and re.search(r"[;\t|,]", only)
            remedy = "; its only column looks like several: declare the `separator`" if unlike else ""
            raise DataError(f"{name}: no column {column}{nearest(column, table.column_names)}{remedy}.")


def keep_rows(table: pa.Table, keep: npt.NDArray[np.bool_]) -> pa.Table:
    """The rows where ``keep`` holds."""
    return table.filter(pa.array(keep))


def _distinct(names: Sequence[str]) -> list[str]:
    distinct: list[str] = []
    for name in names:
        copies = sum(other == name or other.startswith(f"{name}.") for other in distinct)
        distinct.append(f"{name}.{copies}" if name in distinct else name)
    return distinct
