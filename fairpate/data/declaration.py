"""A user's records, declared in YAML, and the reader that turns the declared files into a data set.

A declaration says which files hold which part of a data set, what their columns mean, and what is known before a file
is opened. Either `records` are divided by a keyed hash of their names, or each part has files of its own, or both: a
part with files of its own takes no record from `records`. The YAML files in `codebooks/` are the project's own; a
user's records are declared the same way. Every value is read as it is written (`no` and `007` are text), only the
schema makes numbers of it, and nothing in it is evaluated. Record names may not depend on the sensitive attribute, so
no declaration may name records, or group them into persons, by it.

One reader serves all declared tables. It does what a declaration says and nothing else: read the files, trim, leave
rows out, encode, name. Nothing is fitted. Rows are read batch by batch, and of a batch only features, codes and names
are kept. Every fault of every file is reported at once.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BeforeValidator, Field, model_validator

from fairpate.config import ConfigError, Count, CountOrZero, Section, nearest
from fairpate.config_reader import parse_config, read_yaml
from fairpate.data.columns import Feature, Group, Label, Mask, NumberRange, Texts, When, feature_codes, several
from fairpate.data.dataset import (
    SEPARATORS,
    DataError,
    DatasetEntry,
    DataSettingsError,
    LoadedRecords,
    Option,
    Origin,
    Part,
    Request,
    SourceFile,
    Split,
    as_text,
    content_units,
    counted,
    expanded,
    holds,
    resolve_data_dir,
    verified,
)
from fairpate.data.embedding import FEATURES
from fairpate.data.large_arrays import Gathered, GatheredNames, Names
from fairpate.data.pictures import LEVEL, PicturesConfig, check_paths, folder_table, read_pictures
from fairpate.data.tables import (
    TableFaults,
    cells,
    codes_of,
    encode,
    is_vectors,
    keep_rows,
    numbers,
    plain_batches,
    read_batches,
    require_columns,
    text_of,
    with_vectors,
)
from fairpate.types import IntArray


class Choice(Section):
    """An option of a data set, which other parts of the declaration refer to with `when`."""

    default: str = Field(description="Value that applies where a configuration gives none.")
    values: tuple[str, ...] = Field((), description="Allowed values; empty: true or false.")
    description: str = Field(description="Purpose of the option, in a sentence.")

    @model_validator(mode="after")
    def _default_is_allowed(self) -> Choice:
        allowed = self.values or ("true", "false")
        if self.default not in allowed:
            raise ValueError(f"Expected a default among {', '.join(allowed)}, got {self.default!r}")
        return self

    @property
    def option(self) -> Option:
        """The option in the form that all data sets share."""
        if self.values:
            return Option(default=self.default, allowed=self.values, description=self.description)
        default = self.default == "true"
        return Option(default=default, allowed=(default, not default), description=self.description)


class Trim(Section):
    """Characters that are not part of a column's values: removed before anything else, but never a whole value."""

    columns: Texts = Field(description="Names of the columns in the file.")
    start: str = Field("", description="Characters removed from the start, such as 0.")
    end: str = Field("", description="Characters removed from the end.")


class Rule(NumberRange):
    """Keep the rows with a value that is in the range and not in `other_than`."""

    column: str = Field(description="Name of the column in the file.")
    other_than: Texts = Field((), description="Published values of rows that are left out.")
    unknown: Texts = Field(
        (), description="With a range: values that mean a missing one, like an empty cell; such rows are left out."
    )
    note: str = Field("", description="Public remark that follows the count of rows left out; empty: no remark.")
    when: When = Field({}, description="Options and the value at which the rule holds.")

    @model_validator(mode="after")
    def _leaves_something_out(self) -> Rule:
        if not self.other_than and not self.has_range:
            raise ValueError("Expected a range (above, at_least, below, at_most) or other_than")
        return self


class Identity(Section):
    """The name of a record: the publisher's own key, or a hash of its features and label, or of its published text.

    It never contains the sensitive attribute. Names decide the part and the teacher of a record.
    """

    prefix: str = Field("", description="Start of every name; empty: the name of the data set.")
    key: Texts = Field((), description="Columns that name a record together; empty: its features and label do.")
    text: Texts = Field((), description="Columns whose text is hashed instead of features and label.")
    by_text: bool = Field(
        False,
        description="Hash the text of all declared columns instead, without those of groups and those computed from "
        "groups: `30` and `30.0` are then two records.",
    )

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Identity:
        given = [name for name in ("key", "text", "by_text") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"Expected one of key, text and by_text, got {' and '.join(given)}")
        return self


class Person(Section):
    """The person of each record, where several records share one: all records of a person are protected together.

    No split parts them. A column's name alone is short for `{column: NAME}`.
    """

    column: str = Field(description="Name of the column in the file; it may not reveal the sensitive attribute.")
    prefix: str = Field("person", description="Start of every name.")
    separators: str = Field(
        SEPARATORS,
        description="Characters between several persons in one cell: such a row is refused. Empty: a cell is one name.",
    )
    count: Count | None = Field(None, description="The publisher's count of persons: a public number.")
    when: When = Field({}, description="Options and the value at which persons are protected, and kept together.")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"column": value} if isinstance(value, str) else value


PARTS: tuple[Part, ...] = get_args(Part)


def _as_files(value: Any) -> Any:
    several_files = several(value)
    if not isinstance(several_files, (list, tuple)):
        return several_files
    return tuple({"path": each} if isinstance(each, str) else each for each in several_files)


Sources = Annotated[tuple[SourceFile, ...], BeforeValidator(_as_files)]


class Files(Section):
    """The files of each part: a path below the data folder, a pattern such as `visits-*.csv`, or a list of them."""

    records: Sources = Field((), description="Records that are divided into the parts without files of their own.")
    private: Sources = Field((), description="Protected records, instead of `records`.")
    public: Sources = Field((), description="Records that are not protected; labels may be missing.")
    validation: Sources = Field((), description="Records for choosing settings; empty with `private`: none.")
    test: Sources = Field(
        (), description="Records on which the result is measured; empty with `private`: it is not measured."
    )
    pooled: When = Field({}, description="Options and the value at which `test` is divided together with `records`.")

    @model_validator(mode="before")
    @classmethod
    def _is_by_part(cls, values: Any) -> Any:
        if isinstance(values, (str, list, tuple)):
            raise ValueError(f"Expected `records:`, or `private:`, `public:` and `test:`, got {values!r}")  # noqa: TRY004
        return values

    @model_validator(mode="after")
    def _private_records_come_from_one_place(self) -> Files:
        if self.records and self.private:
            raise ValueError("Expected records, which are divided, or private, got both")
        if not self.records and not self.private:
            raise ValueError("Expected records, which are divided, or private, got neither")
        if self.private and not self.public:
            raise ValueError(
                "Expected public with private: name the file of public records, or name the private one `records`, "
                "from which public ones are then set aside"
            )
        if self.pooled and not (self.records and self.test):
            raise ValueError("Expected pooled with records and test only")
        return self

    @property
    def parts(self) -> dict[Part, tuple[SourceFile, ...]]:
        """The files of each part that has any."""
        return {part: files for part in PARTS if (files := getattr(self, part))}

    @property
    def all(self) -> tuple[SourceFile, ...]:
        """Every file, in the order in which they are read."""
        return tuple(file for files in self.parts.values() for file in files)

    def origin(self, part: Part, options: Mapping[str, Any]) -> Origin:
        """The origin of the records of ``part``, which decides the splits they may enter."""
        if self.pooled and holds(self.pooled, options):
            return "any"
        if part == "records":
            return "training" if self.test else "any"
        return part


SENSITIVE = "sensitive"
SENSITIVE_AS_FEATURE = "sensitive_as_feature"
# Options that the reader adds, or that are of pictures.
RESERVED = (SENSITIVE, SENSITIVE_AS_FEATURE, "features")


class Declaration(Section):
    """A data set with labels and groups."""

    name: str = Field(
        pattern="^[a-z][a-z0-9_]*$", description="Name of the data set in commands, configurations and the odometer."
    )
    kind: Literal["table", "embeddings", "images"] = Field(
        "table",
        description="Kind of the records: rows of a `table`, rows with a vector (`embeddings`), or pictures "
        "(`images`).",
    )
    task: str = Field("", description="Meaning of the label, in a few words.")
    publisher: str = Field("", description="Publisher of the records.")
    address: str = Field("", description="The publisher's page.")
    licence: str = Field("", description="Licence under which the records may be used.")
    citation: str = Field("", description="Reference that a study cites.")
    rows: Count | None = Field(
        None, description="Approximate number of records: a public number, never counted from private records."
    )
    files: Files = Field(description="Files of each part.")
    separator: str | None = Field(
        None,
        min_length=1,
        max_length=1,
        description="Character between two fields; empty: a tab in .tsv files, else a comma.",
    )
    header: tuple[str, ...] = Field((), description="Names of all columns, for files without a header line.")
    comment: str = Field("", description="Start of a first line that is skipped, such as #; empty: none is skipped.")
    trim: tuple[Trim, ...] = Field((), description="Characters that are not part of values.")
    options: dict[str, Choice] = Field({}, description="Choices that `when` refers to.")
    keep: tuple[Rule, ...] = Field((), description="Rules for rows: a row is a record if all rules keep it.")
    features: dict[str, Feature] = Field(description="Features by name, in this order; none for images.")
    pictures: PicturesConfig | None = Field(
        None, description="For images: where they are, and which features a model sees."
    )
    label: Label = Field(description="The class y.")
    groups: dict[str, Group] = Field(
        description="The group z, by name; `group` if there is only one. Of several the option `sensitive` chooses "
        "one, by default the first.",
    )
    intersections: dict[str, Texts] = Field(
        {},
        description="Further choices of `sensitive`: names of two groups or more, such as `race_and_sex: [race, sex]`. "
        "Every combination is a group, named `A & B`.",
    )
    computed_from_group: Texts = Field(
        (),
        description="Further columns that the publisher computed from an attribute: they are not used for names of "
        "records, and are features only with `sensitive_as_feature`.",
    )
    identity: Identity = Field(Identity(), description="How records are named.")
    person: Person | None = Field(
        None, description="Column of the person of each record; empty: each record is a person's only one."
    )
    num_public: Count | None = Field(
        None, description="Default size of the public split; empty: all records of its own files, or 1000."
    )
    num_validation: CountOrZero | None = Field(
        None,
        description="Default size of the validation split; empty: all records of its own files, none with "
        "`private`, or 500.",
    )
    num_test: Count | None = Field(
        None,
        description="Default size of the test split; empty: all records of its own files, or a quarter of `rows`.",
    )

    @model_validator(mode="before")
    @classmethod
    def _groups_are_named(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = ({"features": {}} if "pictures" in values else {}) | values
        if isinstance(one := values.get("group"), dict):
            if "groups" in values:
                raise ValueError("group: expected group or groups, got both")
            # Without a column the error names the group "group".
            values["groups"] = {str(one.get("column", "group")): values.pop("group")}
        elif isinstance(values.get("groups"), dict):
            values["groups"] = {
                name: {"column": name} | each if isinstance(each, dict) else each
                for name, each in values["groups"].items()
            }
        return values

    @model_validator(mode="after")
    def _is_consistent(self) -> Declaration:
        checks = (
            self._tables,
            self._options,
            self._intersections,
            self._conditions,
            self._columns,
            self._names,
            self._header,
        )
        faults = [fault for check in checks for fault in check()]
        if not faults:  # only with valid options can their combinations be tried
            faults = list(self._choices_without_files())
        if faults:
            raise ValueError("\n".join(faults))
        return self

    def _tables(self) -> Iterator[str]:
        for name in ("features", "groups"):
            if not getattr(self, name) and not (name == "features" and self.pictures):
                yield f"{name}: expected one or more, got none"
        if (self.kind == "images") != (self.pictures is not None) or (self.pictures and self.features):
            yield "kind: expected images with `pictures` and without `features`, or another kind without `pictures`"
        if self.kind == "embeddings" and not any(feature.vector for _, feature in self.columns):
            yield "features: expected a vector with kind: embeddings, such as `embedding: {vector: 384}`"
        for file in (*self.files.all, *(other for each in self.files.all for other in each.alternatives)):
            if file.extracted or file.path.endswith(".zip"):
                yield f"files: {file.path}: expected a table, which may be gzipped, got an archive"

    def _options(self) -> Iterator[str]:
        for name in self.options:
            if name in RESERVED:
                yield f"options.{name}: this name is taken; choose another"

    def _conditions(self) -> Iterator[str]:
        options = self.all_options
        for where, when in self._whens():
            for name, value in when.items():
                allowed = [as_text(choice) for choice in options[name].allowed] if name in options else []
                if name not in options:
                    yield f"{where}: no option {name}{nearest(name, options)}"
                elif value not in allowed:
                    yield f"{where}: no value {value!r} of option {name}{nearest(value, allowed)}"

    def _columns(self) -> Iterator[str]:
        for (one, first), (other, second) in itertools.combinations(self.columns, 2):
            excluded = any(second.when.get(name, value) != value for name, value in first.when.items())
            if one == other and not excluded:
                yield f"features: {one} is declared twice; leave one out, or give both a `when`"
        if self.label.column in {column for column, _ in self.columns}:
            yield f"features: {self.label.column} is the label; a model may not see it"

    def _intersections(self) -> Iterator[str]:
        for name, of in self.intersections.items():
            if name in self.groups:
                yield f"intersections.{name}: this is a group; choose another name"
            if unknown := [each for each in of if each not in self.groups]:
                yield f"intersections.{name}: no group {unknown[0]}{nearest(unknown[0], self.groups)}"
            elif len({self.groups[each].column for each in of}) < max(len(of), 2):
                yield f"intersections.{name}: expected two groups or more, of a column each, got {', '.join(of)}"

    def _names(self) -> Iterator[str]:
        told = self.told_by_groups
        # The text may hold another group's column: it is left out where that group is in force.
        first = {group.column for group in itertools.islice(self.groups.values(), 1)}
        others = {group.column for group in self.groups.values()} - first - set(self.computed_from_group)
        first_told = tuple(column for column in told if column not in others)
        named = [("identity", column, told) for column in self.identity.key]
        named += [("identity", column, first_told) for column in self.identity.text]
        named += [("person", self.person.column, told)] if self.person else []
        for place, column, kept_out in named:
            if column in kept_out:
                yield f"{place}: {column} may be the sensitive attribute, or tells it; leave it out"
        if self.identity.text and set(self.identity.text) <= set(told):
            yield "identity.text: expected a column that is no group's"

    def _header(self) -> Iterator[str]:
        for column in self.used() if self.header else ():
            if column not in self.header:
                yield f"header: no column {column}{nearest(column, self.header)}"

    def _choices_without_files(self) -> Iterator[str]:
        files = self.files.records or self.files.private
        names = sorted({name for file in files for name in file.when})
        for values in itertools.product(*(self.all_options[name].allowed for name in names)):
            choice = dict(zip(names, values, strict=True))
            if not any(holds(file.when, choice) for file in files):
                missing = ", ".join(f"{name}: {as_text(value)}" for name, value in choice.items())
                yield f"files: none with {missing}; add one, or leave the value out"

    @property
    def columns(self) -> tuple[tuple[str, Feature], ...]:
        """Every column that may become features, with its declaration."""
        return tuple(
            (column, feature) for name, feature in self.features.items() for column in feature.columns or (name,)
        )

    def attribute(self, options: Mapping[str, Any]) -> str:
        """The name of the chosen attribute, in words."""
        return " and ".join(self.groups[name].attribute or name for name in self._crossed(self.chosen(options)))

    @property
    def attributes(self) -> str:
        """All attributes, in words."""
        choices = [{SENSITIVE: name} for name in (*self.groups, *self.intersections)]
        named = ((self.attribute(choice), len(self.group_names(choice))) for choice in choices)
        return " or ".join(name if count == 2 else f"{name} ({count})" for name, count in named)

    @property
    def all_options(self) -> dict[str, Option]:
        """The declared options, the choice among several groups, and whether a model may see the attribute."""
        options = {name: choice.option for name, choice in self.options.items()}
        if len(self.groups) > 1:
            choices = (*self.groups, *self.intersections)
            options[SENSITIVE] = Option(default=choices[0], allowed=choices, description="The group z.")
        if self.pictures is not None:
            allowed = tuple(dict.fromkeys((*FEATURES.allowed, self.pictures.features)))
            return options | {"features": replace(FEATURES, default=self.pictures.features, allowed=allowed)}
        options[SENSITIVE_AS_FEATURE] = Option(
            default=False,
            allowed=(False, True),
            description="Whether the model may see the sensitive attribute.",
            shows_attribute=True,
        )
        return options

    @property
    def told_by_groups(self) -> tuple[str, ...]:
        """Every column that may be the attribute under some option, or that was computed from one."""
        groups = [group.column for group in self.groups.values()]
        # The path of a picture contains the folder that gives its group.
        paths = [self.pictures.column] if self.pictures and any(name.startswith(LEVEL) for name in groups) else []
        return tuple(dict.fromkeys((*groups, *self.computed_from_group, *paths)))

    def text_of_names(self, columns: Sequence[str], options: Mapping[str, Any]) -> tuple[str, ...]:
        """The ``columns`` with text that names a record: none where features and label do.

        Those of `identity.text` but for the groups in force, or with `by_text` all declared ones but those of
        groups. Undeclared columns are left out: they might reveal the group, and so would the names.
        """
        in_force = {group.column for group in self.chosen_groups(options)}
        declared = set(self.used()) - set(self.told_by_groups) if self.identity.by_text else ()
        named = self.identity.text or [column for column in columns if column in declared]
        return tuple(column for column in named if column not in in_force)

    def features_of_names(self, options: Mapping[str, Any]) -> tuple[tuple[str, Feature], ...]:
        """The columns with features that name a record: those a model sees with ``options``, without all groups."""
        return tuple(
            (column, feature) for column, feature in self.visible(options) if column not in self.told_by_groups
        )

    def used(self, options: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """Every column that is used with ``options``, or with None under any option."""
        ruled = [(rule.column, rule.when) for rule in self.keep]
        ruled += [(column, feature.when) for column, feature in self.columns]
        conditional = [column for column, when in ruled if options is None or holds(when, options)]
        trimmed = [column for each in self.trim for column in each.columns]
        named = [*self.identity.key, *self.identity.text, *([self.person.column] if self.person else [])]
        named += [self.pictures.column] if self.pictures else []
        return tuple(dict.fromkeys((*named, *self.told_by_groups, self.label.column, *conditional, *trimmed)))

    def chosen(self, options: Mapping[str, Any]) -> str:
        """The name of the group that is in force."""
        return str(options.get(SENSITIVE, next(iter(self.groups))))

    def _crossed(self, choice: str) -> tuple[str, ...]:
        return self.intersections.get(choice, (choice,))

    def chosen_groups(self, options: Mapping[str, Any]) -> tuple[Group, ...]:
        """The group that is in force, or several where their combinations are."""
        return tuple(self.groups[name] for name in self._crossed(self.chosen(options)))

    def group_names(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The name of each code, the last group's changing first."""
        names = (group.names for group in self.chosen_groups(options))
        return tuple(" & ".join(each) for each in itertools.product(*names))

    def visible(self, options: Mapping[str, Any]) -> tuple[tuple[str, Feature], ...]:
        """The columns that become features; the attribute and columns computed from it only if asked for."""
        attributes = (*(group.column for group in self.chosen_groups(options)), *self.computed_from_group)
        hidden = () if options.get(SENSITIVE_AS_FEATURE) else attributes
        return tuple(
            (column, feature)
            for column, feature in self.columns
            if holds(feature.when, options) and column not in hidden
        )

    def _whens(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        yield from ((f"files.{file.path}.when", file.when) for file in self.files.all)
        yield "files.pooled", self.files.pooled
        yield from ((f"features.{name}.when", feature.when) for name, feature in self.features.items())
        yield from ((f"keep.{rule.column}.when", rule.when) for rule in self.keep)
        if self.person is not None:
            yield "person.when", self.person.when


def read_declaration(path: Path) -> Declaration:
    """The declaration in a YAML file; :class:`DataSettingsError` lists its faults with file, field and remedy."""
    return parse_declaration(read_values(path), str(path))


def read_values(path: Path) -> dict[str, Any]:
    """The values of a YAML file, all as text; :class:`DataSettingsError` for a file that is not YAML."""
    try:
        return read_yaml(path, as_text=True)
    except ConfigError as error:
        raise DataSettingsError(str(error)) from error


def parse_declaration(values: dict[str, Any], where: str) -> Declaration:
    """The declaration with these ``values``; :class:`DataSettingsError` lists its faults, each after ``where``."""
    try:
        return parse_config(values, Declaration)
    except ConfigError as error:
        # `config` is the whole declaration: the rest of the message names the field.
        lines = (line.removeprefix("config: ") for line in str(error).splitlines())
        raise DataSettingsError("\n".join(f"{where}: {line}" for line in lines)) from error


@dataclass(frozen=True, kw_only=True)
class FileRows:
    """Rows of one file that belong to ``part``, as text or typed numbers."""

    part: Part
    file: str
    table: pa.Table

    def text(self, column: str) -> pa.Array:
        """The text of this column."""
        return text_of(self.table[column])


def rows_of(table: Declaration, request: Request, parts: Mapping[Part, Sequence[SourceFile]]) -> Iterator[FileRows]:
    """The rows of every file, part by part, with the columns that names and features need."""
    if request.tables is not None:
        for part, given in request.tables.items():
            yield from (_trimmed_rows(table, part, rows, part, request) for rows in plain_batches(given, part))
        return
    for part, files in parts.items():
        for file in (each for each in files if holds(each.when, request.options)):
            for each in expanded(file, request.data_dir):
                yield from _rows_of_file(table, part, each, request)


def _rows_of_file(table: Declaration, part: Part, file: SourceFile, request: Request) -> Iterator[FileRows]:
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
        wanted=None if table.identity.by_text else table.used(request.options),
    )
    vectors = [(column, feature.vector) for column, feature in table.visible(request.options) if feature.array]
    sizes = {column: size for column, size in vectors if size is not None}
    for rows in with_vectors(batches, path, choice.path, sizes):
        yield _trimmed_rows(table, part, rows, choice.path, request)


def _trimmed_rows(table: Declaration, part: Part, rows: pa.Table, name: str, request: Request) -> FileRows:
    used, label = table.used(request.options), table.label.column
    is_unlabelled = part == "public" and label not in rows.column_names
    _require_once(rows, [column for column in used if not (is_unlabelled and column == label)], name)
    if is_unlabelled:
        rows = rows.append_column(label, pa.array([""] * len(rows), pa.string()))
    if not table.identity.by_text:  # otherwise columns of other options are part of a name too
        rows = rows.select(used)
    for trim in table.trim:
        for column in trim.columns:
            short = _trimmed(text_of(rows[column]), trim)
            rows = rows.set_column(rows.column_names.index(column), column, short)
    return FileRows(part=part, file=name, table=rows)


def _require_once(rows: pa.Table, columns: Sequence[str], name: str) -> None:
    """:func:`require_columns`, and DataError for a column given twice with other values: either may be meant."""
    for column in columns:
        again = f"{column}.1"
        if {column, again} <= set(rows.column_names) and not rows[column].equals(rows[again]):
            raise DataError(f"{name}: column {column}: is given twice, with other values; rename one.")
    require_columns(rows, columns, name)


def _trimmed(text: pa.Array, trim: Trim) -> pa.Array:
    for shorten, characters in ((pc.utf8_rtrim, trim.end), (pc.utf8_ltrim, trim.start)):
        short = shorten(text, characters)
        # A value of such characters alone keeps one of them: the code 00 is 0.
        text = pc.if_else(pc.equal(short, ""), pc.utf8_slice_codeunits(text, 0, 1), short)
    return text


def kept_rows(rows: FileRows, rules: list[Rule], left_out: npt.NDArray[np.int64], faults: TableFaults) -> FileRows:
    """The rows that all rules keep; ``left_out`` counts the others by the first rule that leaves them out."""
    if not rules:
        return rows
    keep = np.ones(len(rows.table), dtype=bool)
    for place, rule in enumerate(rules):
        found = cells(rows.table, rule.column, rows.file, faults)
        other = pc.is_in(found.text, value_set=pa.array(rule.other_than, pa.string()))
        kept: Mask = ~other.to_numpy(zero_copy_only=False)
        if rule.has_range:  # a missing value is NaN, which is in no range
            kept &= rule.holds(numbers(found, rule.unknown))
        left_out[place] += (keep & ~kept).sum()
        keep &= kept
    return replace(rows, table=keep_rows(rows.table, keep))


_ONE_PERSON = "name one person, such as the household that protects all of them"


def entry_of(table: Declaration) -> DatasetEntry:
    """The registry entry of the declared table."""
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
    """What is kept of the rows that were read, in their order."""

    x: Gathered = field(default_factory=Gathered)
    y: Gathered = field(default_factory=Gathered)
    z: Gathered = field(default_factory=Gathered)
    feature_names: tuple[str, ...] = ()
    units: GatheredNames = field(default_factory=GatheredNames)
    size_of: Counter[Part] = field(default_factory=Counter)
    paths: list[str] = field(default_factory=list)
    header_of: dict[Part, tuple[str, tuple[str, ...]]] = field(default_factory=dict)


def read_records(table: Declaration, request: Request, faults: TableFaults | None = None) -> LoadedRecords:
    """All records of the declared table, in the order of its files; ``request`` has every option of its entry.

    :class:`DataError` names file, column, values and number of rows of all that is missing, damaged or not declared.
    ``faults`` also count the values that were clipped or missing.
    """
    options = request.options
    groups, features = table.chosen_groups(options), table.visible(options)
    if not features and not table.pictures:
        raise DataError(
            f"{table.name}: with these options no column is a feature; declare one, or change data.options."
        )
    faults, seen = faults or TableFaults(), _Seen()
    rules = [rule for rule in table.keep if holds(rule.when, options)]
    left_out = np.zeros(len(rules), dtype=np.int64)
    persons = None
    if table.person and holds(table.person.when, options):
        persons = _Persons(person=table.person, is_pooled=bool(table.files.pooled), are_protected=request.unit is None)
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
    # All at once, so that a user corrects the files once.
    faults.require_none()
    record_ids, unit_ids = _names(table, seen)
    per_part = [(table.files.origin(part, options), count) for part, count in seen.size_of.items()]
    origins = tuple(itertools.chain.from_iterable(itertools.repeat(*each) for each in per_part))
    pixels = read_pictures(seen.paths, resolve_data_dir(request.data_dir), table.pictures) if table.pictures else None
    x = pixels.x if pixels else seen.x.tensor()
    return LoadedRecords(
        kind="image" if pixels else "tabular",
        pixels=pixels,
        records=Split(x=x, y=seen.y.tensor(), z=seen.z.tensor(), record_id=record_ids, unit_id=unit_ids),
        label_names=table.label.names,
        group_names=table.group_names(options),
        sensitive_attribute=table.attribute(options),
        feature_names=seen.feature_names,
        feature_codes=feature_codes(features),
        origins=origins if any(origin != "any" for origin, _ in per_part) else None,
        person_ids=persons.names.names() if persons else None,
        notes=tuple(f"{count} {rule.note}" for rule, count in zip(rules, left_out, strict=True) if rule.note),
        mapped=seen.x if seen.x.is_mapped else None,
    )


def _see_features(seen: _Seen, rows: FileRows, table: Declaration, request: Request, faults: TableFaults) -> None:
    """Keep what a model sees of ``rows``: their encoded features, or the paths of their pictures."""
    if not table.pictures:
        block, seen.feature_names = encode(rows.table, table.visible(request.options), rows.file, faults)
        seen.x.append(block)
        return
    paths = text_of(rows.table[table.pictures.column]).to_pylist()
    check_paths(paths, resolve_data_dir(request.data_dir), rows.file, table.pictures.column, faults)
    seen.paths += paths


def _crossed_codes(groups: Sequence[Group], rows: FileRows, faults: TableFaults) -> IntArray:
    """The group of each row: of several attributes their combination, the last one's code changing first."""
    codes_N = np.zeros(len(rows.table), dtype=np.int64)
    for group in groups:
        own_N = codes_of(cells(rows.table, group.column, rows.file, faults), group, "group").numpy()
        codes_N = codes_N * len(group.names) + own_N
    return codes_N


def _count_public(table: Declaration, request: Request) -> int:
    # Public files alone: default settings depend on this number, which must not depend on private records.
    return sum(len(rows.table) for rows in rows_of(table, request, {"public": table.files.public}))


def _units(
    table: Declaration, rows: FileRows, codes_N: IntArray, seen: _Seen, persons: _Persons | None, request: Request
) -> pa.Array:
    """The name of each row, without the counter of equal rows.

    Names differ between parts with files of their own, and between persons: no name, and no counter behind it, depends
    on the rows of others. Without a key or text a name is a function of what a model sees and of the label: rows of one
    meaning have one name, also where they write it in different ways.
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
                "records by columns that all files have (identity)."
            )
    if persons and persons.person.column not in columns:
        columns = (*columns, persons.person.column)
    for column in columns:
        _require_no_list(rows, column)
    texts = [rows.text(column) for column in columns]
    if not (identity.text or identity.by_text):
        texts += [_seen_values(table, rows, request), pa.array(map(str, codes_N.tolist()), pa.string())]
    return content_units(prefix if pool == "records" else f"{prefix}-{pool}", texts).packed


def _seen_values(table: Declaration, rows: FileRows, request: Request) -> pa.Array:
    """What a model sees of each row, without the columns of groups, as text: hexadecimal digits."""
    if table.pictures:
        # The picture's content and not its path, which may name the folder of its group.
        return _contents(rows.text(table.pictures.column), resolve_data_dir(request.data_dir))
    features = table.features_of_names(request.options)
    if not features:
        return pa.array([""] * len(rows.table), pa.string())
    # Its faults are reported where the features themselves are made.
    block, _ = encode(rows.table, features, rows.file, TableFaults())
    block += 0.0  # no negative zero, which is equal to zero and has other digits
    return pa.array((row.tobytes().hex() for row in block), pa.string())


def _require_no_list(rows: FileRows, column: str) -> None:
    if is_vectors(rows.table[column].type):
        raise DataError(
            f"{rows.file}: column {column}: a list cannot name a record; declare a column that does "
            "(identity: {key: id}), and name one person in each row."
        )


def _contents(paths: pa.Array, folder: Path) -> pa.Array:
    """A hash of each picture's file; empty for a missing file, which is reported elsewhere."""

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
    """The person of each row. Where persons are protected, a row without one is a fault, and so is one in two parts.

    Otherwise a row without a person counts as a person of its own.
    """

    person: Person
    is_pooled: bool
    are_protected: bool
    names: GatheredNames = field(default_factory=GatheredNames)
    # Part and file of each batch, and numbers for its persons.
    _met: list[tuple[Part, str, IntArray]] = field(default_factory=list)

    def add(self, rows: FileRows, units: Names, faults: TableFaults) -> None:
        """Add the persons of more rows, with the names ``units``."""
        _require_no_list(rows, self.person.column)
        persons = rows.text(self.person.column).cast(pa.large_string())
        lack = pc.equal(persons, "")
        if self.are_protected:
            self._require(faults, rows.file, "a person", "give each row its person", pc.sum(lack).as_py() or 0)
            self._require_one_person(faults, rows.file, persons)
            # Numbers instead of names, because they are kept until the last file is read.
            named = Names.of(persons.filter(pc.invert(lack)))
            self._met.append(("records" if self.is_pooled else rows.part, rows.file, named.codes()))
        prefix, dash = (pa.scalar(text, pa.large_string()) for text in (self.person.prefix, "-"))
        prefixed = pc.binary_join_element_wise(prefix, persons, dash)
        self.names.append(pc.if_else(lack, units.packed, prefixed))

    def _require_one_person(self, faults: TableFaults, file: str, persons: pa.Array) -> None:
        """Add a fault for rows that name several persons: no split or sample could keep all rows of each together."""
        several = pa.scalar(False)
        for separator in self.person.separators:
            several = pc.or_(several, pc.match_substring(persons, separator))
        if self.person.separators and (count := pc.sum(several).as_py()):
            remedy = f"{_ONE_PERSON}; where it is one name, declare the separators (person: {{separators: ...}})"
            expected = "one person in each row"
            values = persons.filter(several).slice(0, 4).to_pylist()
            self._require(faults, file, expected, remedy, count, values=values)

    def require_whole(self, faults: TableFaults) -> None:
        """Add a fault for each file with persons of an earlier part."""
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
        faults: TableFaults,
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
