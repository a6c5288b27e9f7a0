"""Data sets declared in YAML, and the reader that turns the declared files into records.

A declaration names the files of each part of a data set and gives the meaning of their columns, before any file is
opened. Records come from `records`, which are divided by a keyed hash of their names, from files of each part, or from
both: a part with its own files takes no record from `records`. Every value is read as text (`no` and `007` too), only
the schema converts it to numbers, and nothing in it is evaluated. No declaration may name records by the sensitive
attribute, or group them into persons by it.

One reader serves all declared tables, those of `codebooks/` and the user's own. It fits nothing to the records. Rows
are read batch by batch, and only features, codes of classes and groups, and names of records are kept. The faults of
all files are reported together.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BeforeValidator, Field, model_validator

from fairpate import config
from fairpate.config import ConfigError, Count, CountOrZero, Refused, Section, nearest, short_for
from fairpate.data import columns, dataset, table_files, tables, word_vectors
from fairpate.data.columns import Feature, Group, Label, NumberRange, Texts, When, several
from fairpate.data.dataset import DatasetEntry, LoadedRecords, Option, Origin, Part, Request, SourceFile, Split
from fairpate.data.features import FEATURES
from fairpate.data.large_arrays import Gathered, GatheredNames, Names
from fairpate.data.pictures import LEVEL, PicturesConfig, decode, folder_table, pictures_in
from fairpate.data.tables import TableFaults
from fairpate.types import DataError, DataSettingsError, IntArray, joined_names

QUESTION = "# ?"
"""How a line of a draft ends, before the words of what its user has to answer."""
DRAFTED = "# Drafted "


def open_questions(text: str) -> int:
    """Return the number of lines in the ``text`` of a declaration that still ask the user a question (``# ?``), as a
    draft does."""
    return sum(QUESTION in line and not line.startswith(DRAFTED) for line in text.splitlines())


class DeclaredOption(Section):
    """A declared option of a data set, with its allowed values. Other sections of the declaration name it in `when`, to
    apply only under some of these values."""

    default: str = Field(description="Value that applies if a configuration gives none.")
    values: tuple[str, ...] = Field((), description="Allowed values; empty: true or false.")
    description: str = Field(description="Purpose of the option, in a sentence.")

    refused: ClassVar[Refused] = {
        "Expected a default among values (without values: true or false), got {0.default!r}": lambda choice: (
            choice.default not in (choice.values or ("true", "false"))
        )
    }


class Trim(Section):
    """Characters to remove from the values of some columns before anything else is read; a value that consists of them
    alone is kept."""

    columns: Texts = Field(description="Names of the columns in the file.")
    start: str = Field("", description="Characters removed from the start, such as 0.")
    end: str = Field("", description="Characters removed from the end.")


class Rule(NumberRange):
    """A filter of rows: it keeps a row if the value in `column` is in the range and not in `other_than`."""

    column: str = Field(description="Name of the column in the file.")
    other_than: Texts = Field((), description="Published values of rows that are left out.")
    unknown: Texts = Field(
        (), description="With a range: values that mean a missing one, like an empty cell; such rows are left out."
    )
    note: str = Field("", description="Public remark after the number of rows left out; empty: no remark.")
    when: When = Field({}, description="Options with the values for which the rule applies.")

    refused: ClassVar[Refused] = {
        "Expected a range (above, at_least, below, at_most) or other_than": lambda rule: (
            not rule.other_than and not rule.has_range
        )
    }


class Identity(Section):
    """The rule by which records get their names: the publisher's own key, a hash of features and label, or a hash of a
    record's text.

    Names never contain the sensitive attribute. A record's name decides in which split it is and which teacher it
    trains.
    """

    prefix: str = Field("", description="Start of every name; empty: the name of the data set.")
    key: Texts = Field(
        (), description="Columns whose values together name a record; empty: a hash of its features and label does."
    )
    text: Texts = Field((), description="Columns whose text is hashed instead of features and label.")
    by_text: bool = Field(
        False,
        description="Hash the text of all declared columns instead, without those of groups and those computed from "
        "groups: `30` and `30.0` are then two records.",
    )

    refused: ClassVar[Refused] = {
        "Expected one of key, text and by_text, got key {0.key}, text {0.text} and by_text {0.by_text}": (
            lambda identity: bool(identity.key) + bool(identity.text) + identity.by_text > 1
        )
    }


class Person(Section):
    """The person of each record, if several records share one: all records of a person are protected together.

    No split separates a person's records. In YAML, a column's name alone is short for `{column: NAME}`.
    """

    column: str = Field(description="Name of the column in the file; it may not reveal the sensitive attribute.")
    prefix: str = Field("person", description="Start of every name.")
    separators: str = Field(
        dataset.SEPARATORS,
        description="Characters between several persons in one cell: such a row is refused. Empty: a cell is one name.",
    )
    count: Count | None = Field(None, description="The publisher's count of persons: a public number.")
    when: When = Field({}, description="Options with the values for which persons are protected, and kept together.")

    _from_text = short_for("column")


PARTS: tuple[Part, ...] = get_args(Part)


Sources = Annotated[tuple[SourceFile, ...], BeforeValidator(several)]


class Files(Section):
    """The files of each part of a data set (`records`, `private`, `public`, `test`): a path below the data folder, a
    pattern such as `visits-*.csv`, or a list of them."""

    records: Sources = Field((), description="Records that are divided into the parts without files of their own.")
    private: Sources = Field((), description="Protected records, instead of `records`.")
    public: Sources = Field(
        (), description="Records that are not protected; labels may be missing. Empty with `private`: none."
    )
    validation: Sources = Field((), description="Records for choosing settings; empty with `private`: none.")
    test: Sources = Field(
        (), description="Records on which the result is measured; empty with `private`: it is not measured."
    )
    pooled: When = Field({}, description="Options with the values for which `test` is divided together with `records`.")

    @model_validator(mode="before")
    @classmethod
    def _is_by_part(cls, values: Any) -> Any:
        if isinstance(values, (str, list, tuple)):
            raise ValueError(  # noqa: TRY004
                f"Expected `records:`, or `private:`, `public:` and `test:`, got {values!r}; name each part"
            )
        return values

    refused: ClassVar[Refused] = {
        "Expected `records`, which are divided into splits, or `private`; got both": lambda files: (
            files.records and files.private
        ),
        "Expected `records`, which are divided into splits, or `private`; got neither": lambda files: (
            not files.records and not files.private
        ),
        "Expected `pooled` only together with `records` and `test`": lambda files: (
            files.pooled and not (files.records and files.test)
        ),
    }

    @property
    def parts(self) -> dict[Part, tuple[SourceFile, ...]]:
        """The declared files of each part of the data set; parts without files are left out."""
        return {part: files for part in PARTS if (files := getattr(self, part))}

    @property
    def all(self) -> tuple[SourceFile, ...]:
        """All declared files, in the order in which they are read."""
        return tuple(file for files in self.parts.values() for file in files)

    def origin(self, part: Part, options: Mapping[str, Any]) -> Origin:
        """Return the origin of the records in the files of ``part``: ``any``, ``training`` or the part's name. It
        restricts the splits that these records may enter."""
        if self.pooled and dataset.holds(self.pooled, options):
            return "any"
        if part == "records":
            # The publisher's test records are the whole test split: a record from `records` may not enter it.
            return "training" if self.test else "any"
        return part


SENSITIVE = "sensitive"
SENSITIVE_AS_FEATURE = "sensitive_as_feature"
# Options that the reader adds, or that only pictures have.
RESERVED = (SENSITIVE, SENSITIVE_AS_FEATURE, "features")


class Declaration(Section):
    """The content of a YAML file that declares a data set: its files, and which columns are label, group and
    features."""

    name: str = Field(
        pattern="^[a-z][a-z0-9_]*$", description="Name of the data set in commands, configurations and the odometer."
    )
    kind: Literal["table", "embeddings", "images", "text"] = Field(
        "table",
        description="Kind: rows of a `table`, rows with a vector (`embeddings`) or with a text (`text`), or pictures "
        "(`images`).",
    )
    task: str = Field("", description="Meaning of the label, in a few words.")
    publisher: str = Field("", description="Publisher of the records.")
    address: str = Field("", description="The publisher's page.")
    licence: str = Field("", description="Licence under which the records may be used.")
    citation: str = Field("", description="Reference that a study cites.")
    intended_use: str = Field(
        "", description="What a model of these records is for, in your words: report, card and dossiers state it."
    )
    out_of_scope: str = Field("", description="Uses that such a model is not meant for.")
    contact: str = Field("", description="Whom to ask about such a model.")
    rows: Count | None = Field(
        None, description="Approximate number of records: a public number, never counted from private records."
    )
    files: Files = Field(description="Files of each part.")
    separator: str | None = Field(
        None, min_length=1, max_length=1, description="Sign between fields; empty: a tab in .tsv files, else a comma."
    )
    header: tuple[str, ...] = Field((), description="Names of all columns, for files without a header line.")
    encoding: str = Field("utf-8", description="Encoding of text files, such as cp1252, latin-1 or utf-16.")
    decimal: Literal[".", ","] = Field(
        ".",
        description="Decimal sign of text files: with a comma, points are between thousands. Declared numbers are "
        "written with a decimal point all the same.",
    )
    comment: str = Field("", description="Start of a first line that is skipped, such as #; empty: none is skipped.")
    trim: tuple[Trim, ...] = Field((), description="Characters that are not part of values.")
    options: dict[str, DeclaredOption] = Field(
        {}, description="Options of the data set, whose values `when` refers to."
    )
    keep: tuple[Rule, ...] = Field(
        (), description="Rules that select rows: a row becomes a record if all rules keep it."
    )
    features: dict[str, Feature] = Field(description="Features by name, in this order; none for images.")
    pictures: PicturesConfig | None = Field(
        None, description="For images: where they are, and which features a model sees."
    )
    label: Label = Field(description="The class y.")
    groups: dict[str, Group] = Field(
        description="The group z, by name; `group` if there is only one. Of several the option `sensitive` chooses "
        "one, by default the first."
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
        None, description="Column with the person of each record; empty: no person has two records."
    )
    num_public: CountOrZero | None = Field(
        None, description="Default size of the public split; empty: all of its own files, none with `private`, or 1000."
    )
    num_validation: CountOrZero | None = Field(
        None, description="Default size of the validation split; empty: all of its files, none with `private`, or 500."
    )
    num_test: Count | None = Field(
        None, description="Default size of the test split; empty: all records of its own files, or a quarter of `rows`."
    )
    short_forms: ClassVar[Mapping[str, str]] = {
        "group": "a mapping with `column` and `values`, or several of them by name in `groups`"
    }

    @model_validator(mode="before")
    @classmethod
    def _groups_are_named(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = ({"features": {}} if "pictures" in values else {}) | values
        if isinstance(one := values.get("group"), dict):
            if "groups" in values:
                raise ValueError("group: expected group or groups, got both; leave one out")
            # Without a column the error names the group "group".
            values["groups"] = {str(one.get("column", "group")): values.pop("group")}
        elif isinstance(named := values.get("groups"), dict):
            if isinstance(named.get("column"), str) or isinstance(named.get("values"), list):
                raise ValueError(  # noqa: TRY004 - pydantic collects this kind
                    "groups: expected a name for each group, and `column` and `values` below it; write `group` instead "
                    "of `groups` for a single one"
                )
            values["groups"] = {
                name: {"column": name} | each if isinstance(each, dict) else each for name, each in named.items()
            }
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> Declaration:
        """Raise ValueError, with a line for each fault, if fields of the declaration contradict each other."""
        files, attributes, options = self.files.all, self.attribute_columns, self.all_options
        empty = {"features": not self.features and not self.pictures, "groups": not self.groups}
        faults = [f"{name}: expected one or more, got none" for name, is_empty in empty.items() if is_empty]
        if (self.kind == "images") != (self.pictures is not None) or (self.pictures and self.features):
            faults.append(
                "kind: expected images with `pictures` and without `features`, or another kind without `pictures`"
            )
        if self.kind == "embeddings" and not any(feature.vector for _, feature in self.columns):
            faults.append("features: expected a vector with kind: embeddings, such as `embedding: {vector: 384}`")
        if self.kind == "text" and not any(feature.text for _, feature in self.columns):
            faults.append("features: expected a text with kind: text, such as `review: {text: 2048}`")
        faults += [
            f"files: {file.path}: expected a table, which may be gzipped, got an archive"
            for file in (*files, *(other for each in files for other in each.alternatives))
            if file.extracted or file.path.endswith(".zip")
        ]
        if not table_files.is_encoding(self.encoding):
            faults.append(f"encoding: unknown encoding {self.encoding!r}; give one of text, such as utf-8 or cp1252")
        faults += [f"options.{name}: this name is taken; choose another" for name in self.options if name in RESERVED]
        for name, of in self.intersections.items():
            if name in self.groups:
                faults.append(f"intersections.{name}: this is a group; choose another name")
            if unknown := [each for each in of if each not in self.groups]:
                faults.append(f"intersections.{name}: no group {unknown[0]}{nearest(unknown[0], self.groups)}")
            elif len({self.groups[each].column for each in of}) < max(len(of), 2):
                faults.append(
                    f"intersections.{name}: expected two groups or more, each with its own column, got {', '.join(of)}"
                )

        whens = [(f"files.{file.path}.when", file.when) for file in files] + [("files.pooled", self.files.pooled)]
        whens += [(f"features.{name}.when", feature.when) for name, feature in self.features.items()]
        whens += [(f"keep.{rule.column}.when", rule.when) for rule in self.keep]
        whens += [("person.when", self.person.when)] if self.person else []
        for where, name, value in ((where, *each) for where, when in whens for each in when.items()):
            allowed = [dataset.as_text(choice) for choice in options[name].allowed] if name in options else []
            if name not in options:
                faults.append(f"{where}: no option {name}{nearest(name, options)}")
            elif value not in allowed:
                faults.append(f"{where}: no value {value!r} of option {name}{nearest(value, allowed)}")

        for (one, first), (other, second) in itertools.combinations(self.columns, 2):
            # Two declarations cannot both apply if they need different values of one option.
            excluded = any(second.when.get(name, value) != value for name, value in first.when.items())
            if one == other and not excluded:
                faults.append(f"features: {one} is declared twice; leave one out, or give both a `when`")
        if self.label.column in {column for column, _ in self.columns}:
            faults.append(f"features: {self.label.column} is the label; a model may not see it")

        # The text may contain the column of another group: it is left out if that group is chosen.
        default = {group.column for group in itertools.islice(self.groups.values(), 1)}
        others = {group.column for group in self.groups.values()} - default - set(self.computed_from_group)
        named = [("identity", column, attributes) for column in self.identity.key]
        always = tuple(each for each in attributes if each not in others)
        named += [("identity", column, always) for column in self.identity.text]
        named += [("person", self.person.column, attributes)] if self.person else []
        faults += [
            f"{place}: {column} may be the sensitive attribute, or reveals it; leave it out"
            for place, column, kept_out in named
            if column in kept_out
        ]
        dated = {column for column, feature in self.columns if feature.date}
        faults += [
            f"{place}: {column} is a date, which becomes a year or an age and names nobody; give another column"
            for place, column, _ in named
            if column in dated and place == "person"
        ]
        if self.identity.text and set(self.identity.text) <= set(attributes):
            faults.append("identity.text: expected a column that is not a group")
        faults += [
            f"header: no column {column}{nearest(column, self.header)}"
            for column in (self.used() if self.header else ())
            if column not in self.header
        ]

        if not faults:  # only with valid options can their combinations be tried
            main = self.files.records or self.files.private
            names = sorted({name for file in main for name in file.when})
            for values in itertools.product(*(options[name].allowed for name in names)):
                choice = dict(zip(names, values, strict=True))
                if not any(dataset.holds(file.when, choice) for file in main):
                    missing = ", ".join(f"{name}: {dataset.as_text(value)}" for name, value in choice.items())
                    faults.append(f"files: none with {missing}; add one, or leave the value out")
        if faults:
            raise ValueError("\n".join(faults))
        return self

    @property
    def columns(self) -> tuple[tuple[str, Feature], ...]:
        """Every column that may become features, with its declaration."""
        return tuple(
            (column, feature) for name, feature in self.features.items() for column in feature.columns or (name,)
        )

    def attribute(self, options: Mapping[str, Any]) -> str:
        """Return in words the name of the sensitive attribute that ``options`` choose."""
        return " and ".join(group.attribute or name for name, group in self.chosen_groups(options).items())

    @property
    def all_options(self) -> dict[str, Option]:
        """All options of the data set: those that the declaration lists, and up to two more. One chooses the sensitive
        attribute if several are declared. The other is the kind of features for pictures; for tables it says whether a
        model may see the attribute.
        """
        options = {}
        for name, choice in self.options.items():
            flag = choice.default == "true"
            default, allowed = choice.default if choice.values else flag, choice.values or (flag, not flag)
            options[name] = Option(default=default, allowed=allowed, description=choice.description)
        if len(self.groups) > 1:
            choices = (*self.groups, *self.intersections)
            options[SENSITIVE] = Option(default=choices[0], allowed=choices, description="The group z.")
        if self.pictures is not None:
            features = tuple(dict.fromkeys((*FEATURES.allowed, self.pictures.features)))
            return options | {"features": replace(FEATURES, default=self.pictures.features, allowed=features)}
        options[SENSITIVE_AS_FEATURE] = Option(
            default=False,
            allowed=(False, True),
            description="Whether the model may see the sensitive attribute.",
            shows_attribute=True,
        )
        return options

    @property
    def attribute_columns(self) -> tuple[str, ...]:
        """The columns that are a sensitive attribute under some option, are computed from one, or reveal one."""
        groups = [group.column for group in self.groups.values()]
        # The path of a picture contains the folder that gives its group.
        paths = [self.pictures.column] if self.pictures and any(name.startswith(LEVEL) for name in groups) else []
        return tuple(dict.fromkeys((*groups, *self.computed_from_group, *paths)))

    def used(self, options: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """Return the names of all columns that the reader needs with these ``options``. Without ``options``, return
        every column that is needed with some options."""
        ruled = [(rule.column, rule.when) for rule in self.keep]
        ruled += [(column, feature.when) for column, feature in self.columns]
        conditional = [column for column, when in ruled if options is None or dataset.holds(when, options)]
        trimmed = [column for each in self.trim for column in each.columns]
        named = [*self.identity.key, *self.identity.text, *([self.person.column] if self.person else [])]
        named += [self.pictures.column] if self.pictures else []
        return tuple(dict.fromkeys((*named, *self.attribute_columns, self.label.column, *conditional, *trimmed)))

    def persons(self, options: Mapping[str, Any]) -> Person | None:
        """Return how records name their persons with these ``options``; None if they name none."""
        return self.person if self.person and dataset.holds(self.person.when, options) else None

    def chosen_groups(self, options: Mapping[str, Any]) -> dict[str, Group]:
        """Return by name the sensitive attribute that ``options`` choose, or, if they choose an intersection, all
        attributes that it combines."""
        choice = str(options.get(SENSITIVE, next(iter(self.groups))))
        return {name: self.groups[name] for name in self.intersections.get(choice, (choice,))}

    def group_names(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the groups in the order of their codes. For an intersection, each name joins the groups
        of several attributes, and the last attribute varies fastest."""
        names = (group.names for group in self.chosen_groups(options).values())
        return tuple(joined_names(each, "&") for each in itertools.product(*names))

    def visible(self, options: Mapping[str, Any]) -> tuple[tuple[str, Feature], ...]:
        """Return the columns that become features with these ``options``. The sensitive attribute, and columns computed
        from it, are included only if an option says so."""
        attributes = (*(group.column for group in self.chosen_groups(options).values()), *self.computed_from_group)
        hidden = () if options.get(SENSITIVE_AS_FEATURE) else attributes
        return tuple(
            (column, feature)
            for column, feature in self.columns
            if dataset.holds(feature.when, options) and column not in hidden
        )


def read_declaration(source: Path | Mapping[str, Any], *, given: Collection[Part] = ()) -> Declaration:
    """Return the declaration in a YAML file or a dictionary. The parts in ``given`` are passed as tables in memory, so
    that the declaration need not name files for them.

    :class:`DataSettingsError` lists the faults of the declaration with file, field and remedy.
    """
    where = "declaration" if isinstance(source, Mapping) else str(source)
    try:
        values = _all_text(source) if isinstance(source, Mapping) else config.read_yaml(source, as_text=True)
    except ConfigError as error:  # it names the file
        raise DataSettingsError(str(error)) from error
    if given:  # tables in memory replace the declared files
        values["files"] = {part: part for part in given}
    try:
        return config.parse_config(values, Declaration)
    except ConfigError as error:
        # The message calls the whole declaration `config`: the rest of it names the field.
        lines = [line.removeprefix("config: ") for line in str(error).splitlines()]
        lines = [re.sub("^groups: missing", "group or groups: missing", line) for line in lines]
        if isinstance(one := values.get("group"), dict):  # it became the only one of `groups`
            inside = f"groups.{one.get('column', 'group')}"
            lines = [f"group{line.removeprefix(inside)}" if line.startswith(inside) else line for line in lines]
        raise DataSettingsError("\n".join(f"{where}: {line}" for line in lines)) from error


def _all_text(value: Any) -> Any:
    """Return ``value`` with every number, truth value and date in it as the text that a YAML file would contain."""
    if isinstance(value, Mapping):
        return {_all_text(name): _all_text(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_all_text(each) for each in value]
    return value if value is None else dataset.as_text(value)


def rows_of(
    table: Declaration, request: Request, parts: Mapping[Part, Sequence[SourceFile]], *, others: bool = False
) -> Iterator[tuple[Part, str, pa.Table]]:
    """Yield the rows of every file in batches, one part of the data set after the other. Each batch is a triple: the
    part, the file's name, and a table of the columns that the reader needs, with ``others`` of all columns. Values are
    trimmed, and a public file without labels gets an empty label column."""
    others = others or table.identity.by_text
    used, label = table.used(request.options), table.label.column
    for part, name, rows in _batches_of(table, request, parts, others=others):
        is_unlabelled = part == "public" and label not in rows.column_names
        required = [column for column in used if not (is_unlabelled and column == label)]
        for column in required:
            again = f"{column}.1"
            # If two columns have one name, either may be meant.
            if {column, again} <= set(rows.column_names) and not rows[column].equals(rows[again]):
                raise DataError(
                    f"{name}: column {column}: two columns with different values have this name; rename one."
                )
        tables.require_columns(rows, required, name)
        if is_unlabelled:
            rows = rows.append_column(label, pa.array([""] * len(rows), pa.string()))
        # Columns of other options are part of a name by text too.
        yield part, name, as_declared(table, rows if others else rows.select(used), request.options)


def _batches_of(
    table: Declaration, request: Request, parts: Mapping[Part, Sequence[SourceFile]], *, others: bool
) -> Iterator[tuple[Part, str, pa.Table]]:
    """Yield the rows of every file in batches as :func:`rows_of` does, with the columns and values of the file."""
    wanted = None if table.identity.by_text else table.used(request.options)
    if request.tables is not None:
        for part, given in request.tables.items():
            for rows in table_files.plain_batches(given, part, wanted=wanted):
                yield part, part, rows
        return
    # Vectors next to a file are joined to its rows before any rule leaves one out.
    arrays = {column: each.vector for column, each in table.visible(request.options) if each.array and each.vector}
    layout = table_files.Layout(
        columns=table.header or None, separator=table.separator, comment=table.comment, encoding=table.encoding
    )
    for part, declared in parts.items():
        active = (each for each in declared if dataset.holds(each.when, request.options))
        has_folders = table.pictures is not None
        files = (dataset.locate_all(each, request.data_dir, has_folders=has_folders) for each in active)
        for choice, path in itertools.chain.from_iterable(files):
            if path.is_dir():
                yield part, choice.path, folder_table(path, dataset.resolve_data_dir(request.data_dir))
                continue
            if choice.sha256 is not None:
                dataset.check_file(choice, path)
            batches = table_files.read_batches(path, choice.path, layout, wanted=wanted, others=others)
            for rows in table_files.with_vectors(batches, path, choice.path, arrays):
                yield part, choice.path, rows


def as_declared(table: Declaration, rows: pa.Table, options: Mapping[str, Any]) -> pa.Table:
    """Return ``rows`` with the values that the declaration means: trimmed, with a year or an age for each date and a
    decimal point in each number. Columns that ``rows`` lack are left out.

    Text, numbers and dates with a type are all accepted, so that a file and a frame of the same table mean the same.
    """
    for trim, column in ((each, column) for each in table.trim for column in each.columns):
        if column not in rows.column_names:
            continue
        text = table_files.text_of(rows[column])
        for shorten, characters in ((pc.utf8_rtrim, trim.end), (pc.utf8_ltrim, trim.start)):
            short = shorten(text, characters)
            # A value of such characters alone keeps one of them: the code 00 is 0.
            text = pc.if_else(pc.equal(short, ""), pc.utf8_slice_codeunits(text, 0, 1), short)
        rows = rows.set_column(rows.column_names.index(column), column, text)
    dated = {column: each for column, each in table.columns if each.date and dataset.holds(each.when, options)}
    numeric: list[str] = []
    if table.decimal == ",":
        # Every column whose values are read as numbers under some option.
        numeric += [column for column, each in table.columns if each.bounds is not None or each.bands]
        numeric += [rule.column for rule in table.keep if rule.has_range]
        codings = (table.label, *table.groups.values())
        numeric += [
            each.column for each in codings if all(one.has_range for one in itertools.chain(*each.meanings.values()))
        ]
    for column in (each for each in dict.fromkeys((*dated, *numeric)) if each in rows.column_names):
        values = rows[column].combine_chunks()
        if column in dated:
            values = tables.numbers_of_dates(values, dated[column])
        elif pa.types.is_string(values.type):
            values = tables.with_decimal_points(values)
        rows = rows.set_column(rows.column_names.index(column), column, values)
    return rows


def entry_of(table: Declaration) -> DatasetEntry:
    """Return the entry that the registry of data sets has for a declared table."""
    # Fields that both classes have are equal, except for these two.
    shared = {each.name for each in fields(DatasetEntry)} & Declaration.model_fields.keys() - {"kind", "files"}
    facts = {name: getattr(table, name) for name in shared} | {"options": table.all_options}
    if table.person is not None:
        facts |= {"persons": table.person.count, "persons_when": table.person.when}
    # None takes every record in the part's own files; if there are none, the default of all data sets applies.
    if table.num_public is None and not table.files.public:
        facts["num_public"] = 0 if table.files.private else DatasetEntry.num_public
    if table.num_validation is None and not (table.files.validation or table.files.private):
        facts["num_validation"] = DatasetEntry.num_validation

    def count_public(request: Request) -> int:
        # Public files alone: default settings depend on this number, which must not depend on private records.
        return sum(len(rows) for *_, rows in rows_of(table, request, {"public": table.files.public}))

    choices = [{SENSITIVE: name} for name in (*table.groups, *table.intersections)]
    named = [(table.attribute(choice), len(table.group_names(choice))) for choice in choices]
    return DatasetEntry(
        sensitive=" or ".join(name if count == 2 else f"{name} ({count})" for name, count in named),
        kind="image" if table.pictures else "tabular",
        files=table.files.all,
        load=partial(read_records, table),
        count_public=count_public,
        class_shares=table.label.shares,
        num_classes=len(table.label.names),
        **facts,
    )


def read_records(table: Declaration, request: Request, faults: TableFaults | None = None) -> LoadedRecords:
    """Return all records of the declared table, in the order of its files; ``request`` has a value for every option.

    :class:`DataError` lists everything missing, damaged or undeclared by file, column, values and number of rows.
    ``faults``, if given, also collects the numbers of clipped and missing values.
    """
    options, groups, features = request.options, table.chosen_groups(request.options), table.visible(request.options)
    if not features and not table.pictures:
        raise DataError(f"{table.name}: with these options no column is a feature; declare one, or change the options.")
    faults = faults or TableFaults()
    rules = [rule for rule in table.keep if dataset.holds(rule.when, options)]
    left_out = np.zeros(len(rules), dtype=np.int64)
    person = table.persons(options)
    x, y, z, units, persons = Gathered(), Gathered(), Gathered(), GatheredNames(), GatheredNames()
    paths: list[str] = []
    size_of, headers = Counter[Part](), Headers()
    protected: list[tuple[Part, str, IntArray]] = []
    for part, file, rows in rows_of(table, request, table.files.parts):
        keep = np.ones(len(rows), dtype=bool)
        for place, rule in enumerate(rules):
            found = tables.cells(rows, rule.column, file, faults)
            kept = ~pc.is_in(found.text, pa.array(rule.other_than, pa.string())).to_numpy(zero_copy_only=False)
            if rule.has_range:  # a missing value is NaN, which is in no range
                kept &= rule.holds(tables.numbers(found, rule.unknown))
            left_out[place] += (keep & ~kept).sum()  # a row counts for the first rule that leaves it out
            keep &= kept
        # Before anything is encoded: errors in a row that is left out do not matter.
        rows = rows.filter(pa.array(keep)) if rules else rows
        faults.rows[file] += len(rows)
        if table.pictures:
            column, folder = table.pictures.column, dataset.resolve_data_dir(request.data_dir)
            listed = table_files.text_of(rows[column]).to_pylist()
            paths += listed
            # A table from a stranger must not read files outside the data folder.
            is_outside = [{"..", "/"} & set(PurePosixPath(path).parts) for path in listed]
            wrong = [path for path, out in zip(listed, is_outside, strict=True) if out or not (folder / path).is_file()]
            remedy = "correct the path, which begins in the data folder, or put the picture there"
            faults.add(file, column, expected="a picture", remedy=remedy, rows=len(wrong), values=dict.fromkeys(wrong))
        else:
            x.append(tables.encode(rows, features, file, faults))
        label = tables.cells(rows, table.label.column, file, faults)
        codes_N = tables.codes_of(label, table.label, "class", may_lack=part == "public")
        y.append(codes_N)
        z.append(tables.crossed_codes(rows, groups.values(), file, faults))
        # Pooled files are divided together, so that equal rows of both are numbered together too.
        pool: Part = "records" if table.files.pooled else part
        names = _unit_names(table, request, rows, codes_N, file, pool, headers)
        units.append(names)
        size_of[part] += len(names)
        if person:
            persons.append(_person_names(person, rows, names, file, faults, are_protected=request.unit is None))
            if request.unit is None:
                of_rows = table_files.text_of(rows[person.column]).cast(pa.large_string())
                named = Names(of_rows.filter(pc.not_equal(of_rows, "")))
                # Hashes instead of names, to save memory until the last file is read.
                protected.append((pool, file, np.fromiter(map(hash, named), np.int64, len(named))))
    if person:
        _require_whole_persons(person, protected, faults)
    # All at once, so that a user can correct the files in one go.
    faults.require_none()
    unit_id = Names(units)
    record_id = unit_id
    # A key names one record: a repeated key is refused later, and never numbered.
    if not table.identity.key:
        numbered, start = GatheredNames(), 0
        for count in [len(unit_id)] if table.files.pooled else size_of.values():
            numbered.append(dataset.counted(unit_id[start : start + count]).packed)
            start += count
        record_id = Names(numbered)
    per_part = [(table.files.origin(part, options), count) for part, count in size_of.items()]
    origins = tuple(itertools.chain.from_iterable(itertools.repeat(*each) for each in per_part))
    described = columns.feature_codes(features)
    pixels = None
    if (shown := table.pictures) is not None:
        files = pictures_in(dataset.resolve_data_dir(request.data_dir), paths)
        pixels = decode(files, paths, size=shown.size, mode="RGB" if shown.channels == 3 else "L")
    return LoadedRecords(
        kind="image" if pixels else "tabular",
        records=Split(
            x=pixels.x if pixels else x.tensor(), y=y.tensor(), z=z.tensor(), record_id=record_id, unit_id=unit_id
        ),
        label_names=table.label.names,
        group_names=table.group_names(options),
        sensitive_attribute=table.attribute(options),
        feature_names=tuple(code.feature for code in described),
        feature_codes=described,
        origins=origins if any(origin != "any" for origin, _ in per_part) else None,
        person_ids=Names(persons) if person else None,
        notes=(
            *(f"{count} {rule.note}" for rule, count in zip(rules, left_out, strict=True) if rule.note),
            *([word_vectors.WORDS] if any(code.ngrams == word_vectors.NAME for code in described) else []),
        ),
        mapped=pixels or (x if x.file else None),
        naming=table.model_dump_json(),
        # If each record is protected by itself, a replaced record may belong to another person.
        keeps_names=request.unit is None if person else bool(table.identity.key),
    )


Headers = dict[Part, tuple[str, tuple[str, ...]]]


def _unit_names(
    table: Declaration, request: Request, rows: pa.Table, codes_N: IntArray, file: str, pool: Part, headers: Headers
) -> pa.LargeStringArray:
    """Return a name for each row's record. Names may repeat: the caller appends a number to a repeated name.

    With a declared key, the name is the key. Otherwise it is a hash of declared columns of text, or of features and
    label: rows with equal values then get equal names, even if they are written differently. Hashed names of different
    persons differ, and so do those of different parts of the data set (``pool``) that are divided separately.

    ``headers`` caches, for each pool, its first file and the columns of that file.
    """
    identity, prefix, options = table.identity, table.identity.prefix or table.name, request.options
    if identity.key:
        return dataset.joined_units(prefix, [table_files.text_of(rows[column]) for column in identity.key])
    # Undeclared columns are left out: they might reveal the group, and so would the names.
    chosen = {group.column for group in table.chosen_groups(options).values()}
    declared = set(table.used()) - set(table.attribute_columns) if identity.by_text else ()
    named = identity.text or [column for column in rows.column_names if column in declared]
    columns = tuple(column for column in named if column not in chosen)
    if columns:
        first, header = headers.setdefault(pool, (file, columns))
        if header != columns:
            raise DataError(
                f"{file}: expected the columns of {first}, in their order; restore the publisher's files, or name "
                "records by columns that all files have (identity)."
            )
    if (person := table.persons(options)) and person.column not in columns:
        columns = (*columns, person.column)
    for column in columns:
        _require_no_list(rows, column, file)
    texts = [table_files.text_of(rows[column]) for column in columns]
    if not (identity.text or identity.by_text):
        # Even if a model may see the attribute: no name may depend on a group.
        features = [each for each in table.visible(options) if each[0] not in table.attribute_columns]
        content: Iterable[str] = [""] * len(rows)
        if table.pictures:
            # The picture's content and not its path, which may contain the folder of its group. A missing file is
            # reported elsewhere.
            folder = dataset.resolve_data_dir(request.data_dir)
            files = [folder / path for path in table_files.text_of(rows[table.pictures.column]).to_pylist()]
            content = (dataset.sha256_of(path) if path.is_file() else "" for path in files)
        elif features:
            # Faults in features are reported where the features themselves are computed.
            block = tables.encode(rows, features, file, TableFaults())
            block += 0.0  # no negative zero, which is equal to zero and has other digits
            # Bytes of the features: a name must not depend on how a file writes a number.
            content = (row.tobytes().hex() for row in block)
        texts += [pa.array(content, pa.string()), pa.array(map(str, codes_N.tolist()), pa.string())]
    return dataset.content_units(prefix if pool == "records" else f"{prefix}-{pool}", texts).packed


def _require_no_list(rows: pa.Table, column: str, file: str) -> None:
    if table_files.is_vectors(rows[column].type):
        raise DataError(
            f"{file}: column {column}: lists cannot be names; name records by another column (identity: {{key: id}}), "
            "and persons by a column with one name in each row."
        )


_OR_RECORDS = "or protect each record by itself (data.unit=record)"


def _person_names(
    person: Person, rows: pa.Table, units: pa.Array, file: str, faults: TableFaults, *, are_protected: bool
) -> pa.Array:
    """Return the name of the person of each row. A row without a person counts as a person of its own, with the row's
    name in ``units``.

    If persons are protected, a row without a person is a fault. So is a row that names several persons, because no
    split or sample could keep all rows of each of these persons together.
    """
    _require_no_list(rows, person.column, file)
    persons = table_files.text_of(rows[person.column]).cast(pa.large_string())
    lack = pc.equal(persons, "")
    if are_protected:
        fault = partial(faults.add, file, person.column)
        remedy = f"give each row its person, {_OR_RECORDS}"
        fault(expected="a person", remedy=remedy, rows=pc.sum(lack).as_py() or 0)
        if person.separators:
            joint = persons.filter(pc.match_substring_regex(persons, f"[{re.escape(person.separators)}]"))
            remedy = (
                "name one person, such as the household that protects all of them; where it is one name, declare the "
                f"separators (person: {{separators: ...}}), {_OR_RECORDS}"
            )
            shown = joint.slice(0, 4).to_pylist()
            fault(expected="one person in each row", remedy=remedy, rows=len(joint), values=shown)
    prefix, dash = (pa.scalar(text, pa.large_string()) for text in (person.prefix, "-"))
    return pc.if_else(lack, units, pc.binary_join_element_wise(prefix, persons, dash))


def _require_whole_persons(person: Person, batches: list[tuple[Part, str, IntArray]], faults: TableFaults) -> None:
    """Check that no person has rows in two parts of the data set (such as public and private), as no split could then
    keep a person's rows together. A fault is added for each file with rows of a person of an earlier part.

    ``batches`` are triples of part, file and the number of each row's person.
    """
    earlier = np.zeros(0, dtype=np.int64)
    # Batches are sorted by part and file, so that groupby yields each once.
    for _, of_part in itertools.groupby(batches, key=itemgetter(0)):
        own = [earlier]
        for file, of_file in itertools.groupby(of_part, key=itemgetter(1)):
            persons = np.concatenate([each for _, _, each in of_file])
            own.append(persons)
            again = persons[np.isin(persons, earlier)]
            number = len(np.unique(again))
            whose = "this person" if number == 1 else f"each of these {number:,} persons"
            what = {"expected": "other persons than in other parts", "met": "persons of another part"}
            remedy = f"keep all rows of {whose} in one part, {_OR_RECORDS}"
            faults.add(file, person.column, **what, remedy=remedy, rows=len(again))
        earlier = np.unique(np.concatenate(own))
