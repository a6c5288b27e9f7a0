"""Records of a declared table, by one reader for all of them.

It does what a declaration says and nothing else: read the files, trim, leave rows out, encode, name. Nothing is fitted.
Every fault of every file is told at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from fairpate.data.columns import Mask
from fairpate.data.dataset import Split
from fairpate.data.declaration import Declaration, Rule, Trim
from fairpate.data.encode import FloatArray, cells, codes_of, encode, numbers
from fairpate.data.entry import DataError, DatasetEntry, Origin, Part, Records, Request, SourceFile, holds
from fairpate.data.faults import Faults
from fairpate.data.feature_codes import feature_codes
from fairpate.data.files import expanded, read_any
from fairpate.data.identity import Names, content_ids
from fairpate.data.tables import keep_rows, read_table, require_columns


def entry_of(table: Declaration) -> DatasetEntry:
    """The declared table as every data set is known."""
    shared = {each.name for each in fields(DatasetEntry)} & Declaration.model_fields.keys() - {"kind", "files"}
    facts = {name: getattr(table, name) for name in shared} | {"options": table.all_options}
    if table.person is not None:
        facts |= {"persons": table.person.count, "persons_when": table.person.when}
    if table.num_public is None and not table.files.public:
        facts["num_public"] = DatasetEntry.num_public
    if table.num_validation is None and not (table.files.validation or table.files.private):
        facts["num_validation"] = DatasetEntry.num_validation
    return DatasetEntry(
        sensitive=table.attributes,
        kind="tabular",
        files=table.files.all,
        load=partial(read_records, table),
        count_public=partial(_count_public, table),
        **facts,
    )


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one file that belong to ``part``, as text or typed numbers."""

    part: Part
    file: str
    table: pa.Table


@dataclass(kw_only=True)
class Collected:
    """What was encoded so far, in the order of the files."""

    x: list[FloatArray] = field(default_factory=list)
    y: list[Tensor] = field(default_factory=list)
    z: list[Tensor] = field(default_factory=list)
    feature_names: tuple[str, ...] = ()


def read_records(table: Declaration, request: Request) -> Records:
    """All records of the declared table, in the order of its files; ``request`` has every option of its entry.

    :class:`DataError` names file, column, values and number of rows of all that is missing, damaged or not declared.
    """
    options = request.options
    group, features = table.group(options), table.visible(options)
    if not features:
        raise DataError(
            f"{table.name}: with these options no column is a feature; declare one, or change data.options."
        )
    faults, found = Faults(), Collected()
    rules = [rule for rule in table.keep if holds(rule.when, options)]
    left_out = np.zeros(len(rules), dtype=np.int64)
    parts = [_kept_rows(rows, rules, left_out, faults) for rows in _read(table, request, table.files.parts)]
    for rows in parts:
        block, found.feature_names = encode(rows.table, features, rows.file, faults)
        found.x.append(block)
        label, attribute = (cells(rows.table, each.column, rows.file, faults) for each in (table.label, group))
        found.y.append(codes_of(label, table.label, "class", may_lack=rows.part == "public"))
        found.z.append(codes_of(attribute, group, "group"))
    faults.require_none()
    record_ids, unit_ids = _names(table, parts)
    return Records(
        kind="tabular",
        records=Split(
            x=torch.from_numpy(np.concatenate(found.x)),
            y=torch.cat(found.y),
            z=torch.cat(found.z),
            record_id=record_ids,
            unit_id=unit_ids,
        ),
        label_names=table.label.names,
        group_names=group.names,
        sensitive_attribute=table.attribute(options),
        feature_names=found.feature_names,
        feature_codes=feature_codes(features),
        origins=_origins(table, parts, request),
        person_ids=_persons(table, parts) if table.person and holds(table.person.when, options) else None,
        notes=tuple(f"{count} {rule.note}" for rule, count in zip(rules, left_out, strict=True) if rule.note),
    )


def _count_public(table: Declaration, request: Request) -> int:
    return sum(len(rows.table) for rows in _read(table, request, {"public": table.files.public}))


def _read(table: Declaration, request: Request, parts: Mapping[Part, Sequence[SourceFile]]) -> Iterator[Rows]:
    """The rows of every file, part by part, with the columns that names and features need."""
    for part, files in parts.items():
        for file in (each for each in files if holds(each.when, request.options)):
            for each in expanded(file, request.data_dir):
                yield _trimmed_rows(table, part, each, request)


def _trimmed_rows(table: Declaration, part: Part, file: SourceFile, request: Request) -> Rows:
    choice, content = read_any(file, request.data_dir)
    if table.comment and content.startswith(table.comment.encode()):
        content = content.partition(b"\n")[2]
    rows = read_table(content, choice.path, columns=table.header or None, separator=table.separator or ",")
    used = table.used(request.options)
    if part == "public" and table.label.column not in rows.column_names:
        rows = rows.append_column(table.label.column, pa.array([""] * len(rows), pa.string()))
    require_columns(rows, used, choice.path)
    if table.identity.key or table.identity.text:  # else the whole row is in its name
        rows = rows.select(used)
    for trim in table.trim:
        for column in trim.columns:
            rows = rows.set_column(rows.column_names.index(column), column, _trimmed(rows[column], trim))
    return Rows(part=part, file=choice.path, table=rows)


def _trimmed(text: pa.Array, trim: Trim) -> pa.Array:
    for shorten, characters in ((pc.utf8_rtrim, trim.end), (pc.utf8_ltrim, trim.start)):
        short = shorten(text, characters)
        # A value of such characters alone keeps one of them: the code 00 is 0.
        text = pc.if_else(pc.equal(short, ""), pc.utf8_slice_codeunits(text, 0, 1), short)
    return text


def _kept_rows(rows: Rows, rules: list[Rule], left_out: npt.NDArray[np.int64], faults: Faults) -> Rows:
    """The rows that all rules keep; ``left_out`` counts the others by the first rule that leaves them out."""
    keep = np.ones(len(rows.table), dtype=bool)
    for place, rule in enumerate(rules):
        kept = _kept(rows, rule, faults)
        left_out[place] += (keep & ~kept).sum()
        keep &= kept
    return Rows(part=rows.part, file=rows.file, table=keep_rows(rows.table, keep))


def _kept(rows: Rows, rule: Rule, faults: Faults) -> Mask:
    found = cells(rows.table, rule.column, rows.file, faults)
    other = pc.is_in(found.text, value_set=pa.array(rule.other_than, pa.string()))
    keep: Mask = ~other.to_numpy(zero_copy_only=False)
    # A missing value is nan, which is in no range.
    return keep & rule.holds(numbers(found, rule.unknown)) if rule.has_range else keep


def _origins(table: Declaration, parts: list[Rows], request: Request) -> tuple[Origin, ...] | None:
    """Where each record may go; null where every one may go anywhere."""
    per_part = [(table.files.origin(rows.part, request.options), len(rows.table)) for rows in parts]
    if all(origin == "any" for origin, _ in per_part):
        return None
    return tuple(origin for origin, count in per_part for _ in range(count))


def _names(table: Declaration, parts: list[Rows]) -> tuple[Names, Names]:
    """Record and unit of each row.

    Parts of their own have names of their own, so that those of public records do not depend on private ones.
    """
    identity, prefix = table.identity, table.identity.prefix or table.name
    if identity.key:
        names = tuple("-".join((prefix, *values)) for values in _values(parts, identity.key))
        return names, names
    records: list[str] = []
    units: list[str] = []
    for part, each in _by_pool(table, parts).items():
        columns = identity.text or tuple(
            name for name in each[0].table.column_names if name not in table.kept_out_of_names
        )
        for rows in each[1:]:
            if not identity.text and rows.table.column_names != each[0].table.column_names:
                raise DataError(
                    f"{rows.file}: expected the columns of {each[0].file}, in their order; restore the publisher's "
                    "files, or name what tells records apart (identity)."
                )
        record_ids, unit_ids = content_ids(f"{prefix}{part}", _values(each, columns))
        records += record_ids
        units += unit_ids
    return tuple(records), tuple(units)


def _by_pool(table: Declaration, parts: list[Rows]) -> dict[str, list[Rows]]:
    """The parts whose names are told apart by a counter only, by what their names have in common."""
    if table.files.pooled:
        return {"": parts}
    pools: dict[str, list[Rows]] = {}
    for rows in parts:
        pools.setdefault("" if rows.part == "records" else f"-{rows.part}", []).append(rows)
    return pools


def _persons(table: Declaration, parts: list[Rows]) -> Names:
    """The person behind each row; :class:`DataError` for one without, or in two parts that a split must not share."""
    assert table.person is not None
    column, faults = table.person.column, Faults()
    seen: dict[str, str] = {}
    for rows in parts:
        values = rows.table[column].to_pylist()
        faults.add(rows.file, column, expected="a person", remedy="give each row its person", rows=values.count(""))
        pool = "records" if table.files.pooled else rows.part
        elsewhere = [value for value in values if seen.setdefault(value, pool) != pool and value]
        remedy = "keep all rows of a person in one part"
        faults.add(rows.file, column, expected="other persons than in other parts", remedy=remedy, rows=len(elsewhere))
    faults.require_none()
    return tuple(f"{table.person.prefix}-{value}" for (value,) in _values(parts, (column,)))


def _values(parts: list[Rows], columns: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The text of each row in these columns."""
    for rows in parts:
        yield from zip(*(rows.table[name].to_pylist() for name in columns), strict=True)
