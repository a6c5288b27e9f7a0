"""Records of a declared table, by one reader for all of them.

It does what a declaration says and nothing else: read the files, trim, leave rows out, encode, name. Nothing is fitted.
Rows are read batch by batch, and of a batch only features, codes and names stay. Every fault of every file is told at
once.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fairpate.data.dataset import Split
from fairpate.data.declared.columns import Group
from fairpate.data.declared.declaration import Declaration
from fairpate.data.declared.encode import cells, codes_of, encode
from fairpate.data.declared.faults import Faults
from fairpate.data.declared.feature_codes import feature_codes
from fairpate.data.declared.own_pictures import check_paths, read_pictures
from fairpate.data.declared.rows import Rows, kept_rows, rows_of
from fairpate.data.declared.sections import Person
from fairpate.data.declared.tables import (
    is_vectors,
    text_of,
)
from fairpate.data.entry import DataError, DatasetEntry, Origin, Part, Records, Request, holds
from fairpate.data.files import resolve_data_dir
from fairpate.data.identity import content_units, counted
from fairpate.data.record_names import GatheredNames, Names
from fairpate.data.spill import Gathered
from fairpate.types import IntArray

_ONE_PERSON = "name one person, such as the household that protects all of them"


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
        kind="image" if table.pictures else "tabular",
        files=table.files.all,
        load=partial(read_records, table),
        count_public=partial(_count_public, table),
        class_shares=table.label.shares,
        **facts,
    )


@dataclass(kw_only=True)
class _Seen:
    """What stays of the rows that were read, in their order."""

    x: Gathered = field(default_factory=Gathered)
    y: Gathered = field(default_factory=Gathered)
    z: Gathered = field(default_factory=Gathered)
    feature_names: tuple[str, ...] = ()
    units: GatheredNames = field(default_factory=GatheredNames)
    size_of: Counter[Part] = field(default_factory=Counter)
    paths: list[str] = field(default_factory=list)
    header_of: dict[Part, tuple[str, tuple[str, ...]]] = field(default_factory=dict)


def read_records(table: Declaration, request: Request, faults: Faults | None = None) -> Records:
    """All records of the declared table, in the order of its files; ``request`` has every option of its entry.

    :class:`DataError` names file, column, values and number of rows of all that is missing, damaged or not declared.
    ``faults`` also tell what was clipped or missing.
    """
    options = request.options
    groups, features = table.chosen_groups(options), table.visible(options)
    if not features and not table.pictures:
        raise DataError(
            f"{table.name}: with these options no column is a feature; declare one, or change data.options."
        )
    faults, seen = faults or Faults(), _Seen()
    rules = [rule for rule in table.keep if holds(rule.when, options)]
    left_out = np.zeros(len(rules), dtype=np.int64)
    persons = _persons(table, request)
    for read in rows_of(table, request, table.files.parts):
        rows = kept_rows(read, rules, left_out, faults)
        faults.rows[rows.file] += len(rows.table)
        _see_features(seen, rows, table, request, faults)
        label = cells(rows.table, table.label.column, rows.file, faults)
        codes_N = codes_of(label, table.label, "class", may_lack=rows.part == "public").numpy()
        seen.y.append(codes_N)
        seen.z.append(_crossed_codes(groups, rows, faults))
        names = Names.of(_units(table, rows, codes_N, seen, persons, request).cast(pa.large_string()))
        seen.units.append(names.packed)
        seen.size_of[rows.part] += len(names)
        if persons:
            persons.add(rows, names, faults)
    if persons:
        persons.require_whole(faults)
    # All at once: who corrects files should not meet their faults one by one.
    faults.require_none()
    record_ids, unit_ids = _names(table, seen)
    pixels = read_pictures(seen.paths, resolve_data_dir(request.data_dir), table.pictures) if table.pictures else None
    x = pixels.x if pixels else seen.x.tensor()
    return Records(
        kind="image" if pixels else "tabular",
        pixels=pixels,
        records=Split(x=x, y=seen.y.tensor(), z=seen.z.tensor(), record_id=record_ids, unit_id=unit_ids),
        label_names=table.label.names,
        group_names=table.group_names(options),
        sensitive_attribute=table.attribute(options),
        feature_names=seen.feature_names,
        feature_codes=feature_codes(features),
        origins=_origins(table, seen, options),
        person_ids=persons.names.names() if persons else None,
        notes=tuple(f"{count} {rule.note}" for rule, count in zip(rules, left_out, strict=True) if rule.note),
        mapped=seen.x if seen.x.is_mapped else None,
    )


def _persons(table: Declaration, request: Request) -> _Persons | None:
    """Who the records' persons are, where the table names any under these options."""
    if not table.person or not holds(table.person.when, request.options):
        return None
    return _Persons(person=table.person, is_pooled=bool(table.files.pooled), are_protected=request.unit is None)


def _see_features(seen: _Seen, rows: Rows, table: Declaration, request: Request, faults: Faults) -> None:
    """Keep what a model sees of ``rows``: their encoded features, or where their pictures lie."""
    if not table.pictures:
        block, seen.feature_names = encode(rows.table, table.visible(request.options), rows.file, faults)
        seen.x.append(block)
        return
    paths = text_of(rows.table[table.pictures.column]).to_pylist()
    check_paths(paths, resolve_data_dir(request.data_dir), rows.file, table.pictures.column, faults)
    seen.paths += paths


def _crossed_codes(groups: Sequence[Group], rows: Rows, faults: Faults) -> IntArray:
    """The group of each row: of several attributes their combination, the last one's code changing first."""
    codes_N = np.zeros(len(rows.table), dtype=np.int64)
    for group in groups:
        own_N = codes_of(cells(rows.table, group.column, rows.file, faults), group, "group").numpy()
        codes_N = codes_N * len(group.names) + own_N
    return codes_N


def _count_public(table: Declaration, request: Request) -> int:
    # Of public files alone: settings follow from this number, and a private one would tell.
    return sum(len(rows.table) for rows in rows_of(table, request, {"public": table.files.public}))


def _origins(table: Declaration, seen: _Seen, options: Mapping[str, Any]) -> tuple[Origin, ...] | None:
    """Where each record may go; null where every one may go anywhere."""
    per_part = [(table.files.origin(part, options), count) for part, count in seen.size_of.items()]
    if all(origin == "any" for origin, _ in per_part):
        return None
    return tuple(itertools.chain.from_iterable(itertools.repeat(*each) for each in per_part))


def _units(
    table: Declaration, rows: Rows, codes_N: IntArray, seen: _Seen, persons: _Persons | None, request: Request
) -> pa.Array:
    """What names each row, but for a counter.

    Parts of their own have names of their own, and so have persons: no name, and no counter behind it, depends on what
    others have. Without a key or text a name is a function of what a model sees and of the label: however a value is
    written, rows of one meaning have one name.
    """
    identity, prefix, options = table.identity, table.identity.prefix or table.name, request.options
    if identity.key:
        return pc.binary_join_element_wise(prefix, *map(rows.text, identity.key), "-")
    pool: Part = "records" if table.files.pooled else rows.part
    columns = table.text_of_names(rows.table.column_names, options)
    if columns:
        first, header = seen.header_of.setdefault(pool, (rows.file, columns))
        if header != columns:
            raise DataError(
                f"{rows.file}: expected the columns of {first}, in their order; restore the publisher's files, or name "
                "what tells records apart (identity)."
            )
    if persons and persons.person.column not in columns:
        columns = (*columns, persons.person.column)
    for column in columns:
        _require_no_list(rows, column)
    texts = [rows.text(column) for column in columns]
    if not (identity.text or identity.as_written):
        texts += [_seen_values(table, rows, request), pa.array(map(str, codes_N.tolist()), pa.string())]
    return content_units(prefix if pool == "records" else f"{prefix}-{pool}", texts).packed


def _seen_values(table: Declaration, rows: Rows, request: Request) -> pa.Array:
    """Of each row what a model sees, all groups' columns left out, as text: hexadecimal digits."""
    if table.pictures:
        # The picture itself: its path may lie in a folder of its group.
        return _contents(rows.text(table.pictures.column), resolve_data_dir(request.data_dir))
    features = table.features_of_names(request.options)
    if not features:
        return pa.array([""] * len(rows.table), pa.string())
    # Its faults are told where the features themselves are made.
    block, _ = encode(rows.table, features, rows.file, Faults())
    block += 0.0  # no negative zero, which is equal to zero and has other digits
    return pa.array((row.tobytes().hex() for row in block), pa.string())


def _require_no_list(rows: Rows, column: str) -> None:
    if is_vectors(rows.table[column].type):
        raise DataError(
            f"{rows.file}: column {column}: a list names no record; declare what does "
            "(identity: {key: id}), and name one person in each row."
        )


def _contents(paths: pa.Array, folder: Path) -> pa.Array:
    """A hash of each picture's file; empty where there is none, which is a fault of its own."""

    def content(path: str) -> str:
        return hashlib.sha256((folder / path).read_bytes()).hexdigest() if (folder / path).is_file() else ""

    return pa.array(map(content, paths.to_pylist()), pa.string())


def _names(table: Declaration, seen: _Seen) -> tuple[Names, Names]:
    """Record and unit of each row."""
    units = seen.units.names()
    if table.identity.key:
        return units, units
    if table.files.pooled:
        return counted(units), units
    records, start = GatheredNames(), 0
    for count in seen.size_of.values():
        records.append(counted(units[start : start + count]).packed)
        start += count
    return records.names(), units


@dataclass(kw_only=True)
class _Persons:
    """The person behind each row. Where persons are protected, a row without one is a fault, and one in two parts.

    Else a row without a person is its own.
    """

    person: Person
    is_pooled: bool
    are_protected: bool
    names: GatheredNames = field(default_factory=GatheredNames)
    # Of each batch its part, its file, and numbers that stand for its persons.
    _met: list[tuple[Part, str, IntArray]] = field(default_factory=list)

    def add(self, rows: Rows, units: Names, faults: Faults) -> None:
        """The persons of more rows, whose names are ``units``."""
        _require_no_list(rows, self.person.column)
        persons = rows.text(self.person.column).cast(pa.large_string())
        lack = pc.equal(persons, "")
        if self.are_protected:
            self._require(faults, rows.file, "a person", "give each row its person", pc.sum(lack).as_py() or 0)
            self._require_one_person(faults, rows.file, persons)
            # Numbers in the place of names: they are kept until the last file is read.
            named = Names.of(persons.filter(pc.invert(lack)))
            self._met.append(("records" if self.is_pooled else rows.part, rows.file, named.codes()))
        prefix, dash = (pa.scalar(text, pa.large_string()) for text in (self.person.prefix, "-"))
        prefixed = pc.binary_join_element_wise(prefix, persons, dash)
        self.names.append(pc.if_else(lack, units.packed, prefixed))

    def _require_one_person(self, faults: Faults, file: str, persons: pa.Array) -> None:
        """A fault for the rows that name several persons: no split or sample could keep all rows of each together."""
        several = pa.scalar(False)
        for separator in self.person.separators:
            several = pc.or_(several, pc.match_substring(persons, separator))
        if self.person.separators and (count := pc.sum(several).as_py()):
            remedy = f"{_ONE_PERSON}; where it is one name, declare the separators (person: {{separators: ...}})"
            expected = "one person in each row"
            values = persons.filter(several).slice(0, 4).to_pylist()
            self._require(faults, file, expected, remedy, count, values=values)

    def require_whole(self, faults: Faults) -> None:
        """A fault for each file with persons of an earlier part."""
        earlier: list[IntArray] = []
        for _, batches in itertools.groupby(self._met, key=lambda met: met[0]):
            of_part = list(batches)
            known = np.unique(np.concatenate(earlier)) if earlier else np.zeros(0, dtype=np.int64)
            for file, of_file in itertools.groupby(of_part, key=lambda met: met[1]):
                persons = np.concatenate([persons for _, _, persons in of_file])
                again = persons[np.isin(persons, known)]
                number = len(np.unique(again))
                whose = "this person" if number == 1 else f"each of these {number:,} persons"
                remedy = f"keep all rows of {whose} in one part"
                expected, met = "other persons than in other parts", "persons of another part"
                self._require(faults, file, expected, remedy, len(again), met=met)
            earlier += [persons for _, _, persons in of_part]

    def _require(
        self,
        faults: Faults,
        file: str,
        expected: str,
        remedy: str,
        count: int,
        *,
        met: str = "none",
        values: Sequence[str] = (),
    ) -> None:
        remedy = f"{remedy}, or protect each record by itself (data.unit=record)"
        faults.add(file, self.person.column, expected=expected, remedy=remedy, rows=count, met=met, values=values)
