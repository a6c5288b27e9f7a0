"""Rows of a declared table's files, batch by batch: read, trimmed, and without those that a rule leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fairpate.data.declared.columns import Mask
from fairpate.data.declared.declaration import Declaration
from fairpate.data.declared.encode import cells, numbers
from fairpate.data.declared.faults import Faults
from fairpate.data.declared.own_pictures import folder_table
from fairpate.data.declared.sections import Rule, Trim
from fairpate.data.declared.tables import (
    keep_rows,
    plain_batches,
    read_batches,
    require_columns,
    text_of,
    with_vectors,
)
from fairpate.data.entry import DataError, Part, Request, SourceFile, holds
from fairpate.data.files import expanded, resolve_data_dir, verified


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one file that belong to ``part``, as text or typed numbers."""

    part: Part
    file: str
    table: pa.Table

    def text(self, column: str) -> pa.Array:
        """The text of this column."""
        return text_of(self.table[column])


def rows_of(table: Declaration, request: Request, parts: Mapping[Part, Sequence[SourceFile]]) -> Iterator[Rows]:
    """The rows of every file, part by part, with the columns that names and features need."""
    if request.tables is not None:
        for part, given in request.tables.items():
            yield from (_trimmed_rows(table, part, rows, part, request) for rows in plain_batches(given, part))
        return
    for part, files in parts.items():
        for file in (each for each in files if holds(each.when, request.options)):
            for each in expanded(file, request.data_dir):
                yield from _rows_of_file(table, part, each, request)


def _rows_of_file(table: Declaration, part: Part, file: SourceFile, request: Request) -> Iterator[Rows]:
    folder = resolve_data_dir(request.data_dir)
    if table.pictures and (folder / file.path).is_dir():
        yield _trimmed_rows(table, part, folder_table(folder / file.path, folder), file.path, request)
        return
    choice, path = verified(file, request.data_dir)
    batches = read_batches(
        path,
        choice.path,
        columns=table.header or None,
        separator=table.separator,
        comment=table.comment,
        wanted=None if table.identity.as_written else table.used(request.options),
    )
    vectors = [(column, feature.vector) for column, feature in table.visible(request.options) if feature.array]
    sizes = {column: size for column, size in vectors if size is not None}
    for rows in with_vectors(batches, path, choice.path, sizes):
        yield _trimmed_rows(table, part, rows, choice.path, request)


def _trimmed_rows(table: Declaration, part: Part, rows: pa.Table, name: str, request: Request) -> Rows:
    used, label = table.used(request.options), table.label.column
    is_unlabelled = part == "public" and label not in rows.column_names
    _require_once(rows, [column for column in used if not (is_unlabelled and column == label)], name)
    if is_unlabelled:
        rows = rows.append_column(label, pa.array([""] * len(rows), pa.string()))
    if not table.identity.as_written:  # with which columns of other options are in a name too
        rows = rows.select(used)
    for trim in table.trim:
        for column in trim.columns:
            short = _trimmed(text_of(rows[column]), trim)
            rows = rows.set_column(rows.column_names.index(column), column, short)
    return Rows(part=part, file=name, table=rows)


def _require_once(rows: pa.Table, columns: Sequence[str], name: str) -> None:
    """As :func:`require_columns`, and none twice with other values: which is meant could not be told."""
    for column in columns:
        again = f"{column}.1"
        if {column, again} <= set(rows.column_names) and not rows[column].equals(rows[again]):
            raise DataError(f"{name}: column {column}: stands there twice, with other values; rename one.")
    require_columns(rows, columns, name)


def _trimmed(text: pa.Array, trim: Trim) -> pa.Array:
    for shorten, characters in ((pc.utf8_rtrim, trim.end), (pc.utf8_ltrim, trim.start)):
        short = shorten(text, characters)
        # A value of such characters alone keeps one of them: the code 00 is 0.
        text = pc.if_else(pc.equal(short, ""), pc.utf8_slice_codeunits(text, 0, 1), short)
    return text


def kept_rows(rows: Rows, rules: list[Rule], left_out: npt.NDArray[np.int64], faults: Faults) -> Rows:
    """The rows that all rules keep; ``left_out`` counts the others by the first rule that leaves them out."""
    if not rules:
        return rows
    keep = np.ones(len(rows.table), dtype=bool)
    for place, rule in enumerate(rules):
        kept = _kept(rows, rule, faults)
        left_out[place] += (keep & ~kept).sum()
        keep &= kept
    return replace(rows, table=keep_rows(rows.table, keep))


def _kept(rows: Rows, rule: Rule, faults: Faults) -> Mask:
    found = cells(rows.table, rule.column, rows.file, faults)
    other = pc.is_in(found.text, value_set=pa.array(rule.other_than, pa.string()))
    keep: Mask = ~other.to_numpy(zero_copy_only=False)
    # A missing value is nan, which is in no range.
    return keep & rule.holds(numbers(found, rule.unknown)) if rule.has_range else keep
