"""Records of a declared table, by one reader for all of them.

It does what a declaration says and nothing else: read the files, trim, leave rows out, encode, name. Nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from fairpate.data.codebook import Mask, codes_of, encode, numbers
from fairpate.data.dataset import Split
from fairpate.data.declaration import Declaration, Rule, Trim
from fairpate.data.entry import DataError, DatasetEntry, Origin, Records, Request, SourceFile, holds
from fairpate.data.files import read_any
from fairpate.data.identity import Names, content_ids
from fairpate.data.tables import column_of, keep_rows, read_table, require_columns

NamedTable = tuple[str, pa.Table]


def entry_of(table: Declaration) -> DatasetEntry:
    """The declared table as every data set is known."""
    attributes = " or ".join(
        group.attribute if len(group.names) == 2 else f"{group.attribute} ({len(group.names)})"
        for group in table.groups.values()
    )
    shared = {field.name for field in fields(DatasetEntry)} & Declaration.model_fields.keys()
    facts = {name: getattr(table, name) for name in shared} | {"options": table.all_options}
    return DatasetEntry(sensitive=attributes, kind="tabular", load=partial(read_records, table), **facts)


def read_records(table: Declaration, request: Request) -> Records:
    """All records of the declared table, in the order of its files; ``request`` has every option of its entry.

    :class:`DataError` names file, column and value of what is missing, damaged or not declared.
    """
    options = request.options
    rules = [rule for rule in table.keep if holds(rule.when, options)]
    left_out = np.zeros(len(rules), dtype=np.int64)
    parts: list[NamedTable] = []
    sources: list[Origin] = []
    for file in (each for each in table.files if holds(each.when, options)):
        name, rows = _read(table, file, request)
        keep = np.ones(len(rows), dtype=bool)
        for place, rule in enumerate(rules):
            kept = _kept(rows, rule, name)
            # A row that several rules leave out counts for the first.
            left_out[place] += (keep & ~kept).sum()
            keep &= kept
        rows = keep_rows(rows, keep)
        parts.append((name, rows))
        sources += [table.origins.files[file.path] if table.origins else "any"] * len(rows)
    group, features = table.group(options), table.features(options)
    if not features:
        raise DataError(
            f"{table.name}: with these options no column is a feature; declare one, or change data.options."
        )
    blocks, feature_names = zip(*(encode(rows, features, name) for name, rows in parts), strict=True)
    record_ids, unit_ids = _names(table, parts)
    return Records(
        kind="tabular",
        records=Split(
            x=torch.cat(blocks),
            y=torch.cat([codes_of(rows, table.label, name) for name, rows in parts]),
            z=torch.cat([codes_of(rows, group, name) for name, rows in parts]),
            record_id=record_ids,
            unit_id=unit_ids,
        ),
        label_names=table.label.names,
        group_names=group.names,
        sensitive_attribute=group.attribute,
        feature_names=feature_names[0],
        origins=tuple(sources) if table.origins and holds(table.origins.when, options) else None,
        person_ids=_persons(table, parts) if table.person and holds(table.person.when, options) else None,
        notes=tuple(f"{count} {rule.note}" for rule, count in zip(rules, left_out, strict=True) if rule.note),
    )


def _read(table: Declaration, file: SourceFile, request: Request) -> NamedTable:
    """The file's rows, with the columns that names and features need."""
    choice, content = read_any(file, request.data_dir)
    if table.comment and content.startswith(table.comment.encode()):
        content = content.partition(b"\n")[2]
    rows = read_table(content, choice.path, columns=table.header or None, separator=table.separator)
    used = table.used(request.options)
    require_columns(rows, used, choice.path)
    if table.identity.key or table.identity.text:  # else the whole row is in its name
        rows = rows.select(used)
    for trim in table.trim:
        for column in trim.columns:
            rows = rows.set_column(rows.column_names.index(column), column, _trimmed(rows[column], trim))
    return choice.path, rows


def _trimmed(text: pa.Array, trim: Trim) -> pa.Array:
    for shorten, characters in ((pc.utf8_rtrim, trim.end), (pc.utf8_ltrim, trim.start)):
        short = shorten(text, characters)
        # A value of such characters alone keeps one of them: the code 00 is 0.
        text = pc.if_else(pc.equal(short, ""), pc.utf8_slice_codeunits(text, 0, 1), short)
    return text


def _kept(rows: pa.Table, rule: Rule, name: str) -> Mask:
    other = pc.is_in(column_of(rows, rule.column, name), value_set=pa.array(rule.other_than, pa.string()))
    keep: Mask = ~other.to_numpy(zero_copy_only=False)
    # A missing value is nan, which is in no range.
    return keep & rule.holds(numbers(rows, rule.column, name, missing=rule.missing)) if rule.has_range else keep


def _names(table: Declaration, parts: list[NamedTable]) -> tuple[Names, Names]:
    """Record and unit of each row."""
    identity, prefix = table.identity, table.identity.prefix or table.name
    if identity.key:
        names = tuple("-".join((prefix, *values)) for values in _values(parts, identity.key))
        return names, names
    (first, rows), *others = parts
    columns = identity.text or tuple(name for name in rows.column_names if name not in table.kept_out_of_names)
    for name, other in others:
        if not identity.text and other.column_names != rows.column_names:
            raise DataError(f"{name}: expected the columns of {first}, in their order; restore the publisher's files.")
    return content_ids(prefix, _values(parts, columns))


def _persons(table: Declaration, parts: list[NamedTable]) -> Names:
    assert table.person is not None
    return tuple(f"{table.person.prefix}-{value}" for (value,) in _values(parts, (table.person.column,)))


def _values(parts: list[NamedTable], columns: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The text of each row in these columns."""
    for _, rows in parts:
        yield from zip(*(rows[name].to_pylist() for name in columns), strict=True)
