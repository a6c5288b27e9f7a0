"""Publishers' delimited text as Arrow tables of trimmed strings.

Nothing is guessed: every field stays text until a codebook says what it means. Ragged rows and unreadable bytes are
refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from fairpate.data.entry import DataError
from fairpate.names import nearest


def read_table(content: bytes, name: str, *, columns: Sequence[str] | None = None, separator: str = ",") -> pa.Table:
    """All fields as trimmed text; ``columns`` names them where the file has no header line.

    A name that a header repeats gets ``.1``, ``.2``. :class:`DataError` for ragged rows, no row, or bytes that are
    not UTF-8.
    """
    header_line, _, rest = content.partition(b"\n")
    body = content if columns is not None else rest
    header = _distinct(columns if columns is not None else _split_header(header_line, name, separator))
    try:
        table = csv.read_csv(
            pa.BufferReader(body),
            read_options=csv.ReadOptions(column_names=header),
            parse_options=csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            convert_options=csv.ConvertOptions(
                column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=False
            ),
        )
    except pa.ArrowException as error:
        reason = str(error).removeprefix("CSV parse error: ")
        raise DataError(f"{name}: not a readable table ({reason}); restore the publisher's file.") from error
    return pa.table({column: pc.utf8_trim_whitespace(table[column].combine_chunks()) for column in header})


def column_of(table: pa.Table, column: str, name: str) -> pa.Array:
    """One column as one array; :class:`DataError` naming the nearest column where there is none."""
    require_columns(table, [column], name)
    return table[column].combine_chunks()


def require_columns(table: pa.Table, columns: Sequence[str], name: str) -> None:
    """:class:`DataError` naming the first column that ``table`` lacks and the nearest one it has."""
    for column in columns:
        if column not in table.column_names:
            raise DataError(f"{name}: no column {column}{nearest(column, table.column_names)}.")


def keep_rows(table: pa.Table, keep: npt.NDArray[np.bool_]) -> pa.Table:
    """The rows where ``keep`` holds."""
    return table.filter(pa.array(keep))


def _split_header(line: bytes, name: str, separator: str) -> list[str]:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not a readable table ({error}); restore the publisher's file.") from error
    return [field.strip().strip('"') for field in text.split(separator)]


def _distinct(names: Sequence[str]) -> list[str]:
    distinct: list[str] = []
    for name in names:
        copies = sum(other == name or other.startswith(f"{name}.") for other in distinct)
        distinct.append(f"{name}.{copies}" if name in distinct else name)
    return distinct
