"""A table as a declaration: its files, the meaning of its columns, and what is known of it before a file is opened.

The YAML files in `codebooks/` are the project's own; a user's records are declared the same way. Every value is read as
it is written (`no` and `007` are text), only the schema makes numbers of it, and nothing in it is evaluated. Record
names may not depend on the sensitive attribute, so no declaration may name records, or group them into persons, by it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from fairpate.config import ConfigError, Count, CountOrZero, Section
from fairpate.config_reader import parse_config, read_yaml
from fairpate.data.codebook import Coding, Column, Interval, When
from fairpate.data.entry import DataSettingsError, Option, Origin, SourceFile, as_text, holds
from fairpate.data.files import ARCHIVE_SUFFIXES
from fairpate.names import nearest

SENSITIVE = "sensitive"
SENSITIVE_AS_FEATURE = "sensitive_as_feature"
# Options that the reader adds, or that are of pictures.
RESERVED = (SENSITIVE, SENSITIVE_AS_FEATURE, "features")


class Choice(Section):
    """An option of a data set, which other parts of the declaration refer to with `when`."""

    default: str = Field(description="Where nothing else is asked for.")
    values: tuple[str, ...] = Field((), description="What it may be; empty: true or false.")
    description: str = Field(description="What it decides, in a sentence.")

    @model_validator(mode="after")
    def _default_is_allowed(self) -> Choice:
        allowed = self.values or ("true", "false")
        if self.default not in allowed:
            raise ValueError(f"Expected a default among {', '.join(allowed)}, got {self.default!r}")
        return self

    @property
    def option(self) -> Option:
        """The option as every data set has them."""
        if self.values:
            return Option(default=self.default, allowed=self.values, description=self.description)
        default = self.default == "true"
        return Option(default=default, allowed=(default, not default), description=self.description)


class Group(Coding):
    """One sensitive attribute that the group z may be."""

    column: str = Field(description="Its name in the file; empty: its name in `groups`.")
    attribute: str = Field(description="What it is called; empty: its name in `groups`.")


class Trim(Section):
    """Characters that are not part of a column's values: removed before anything else, but never a whole value."""

    columns: tuple[str, ...] = Field(description="Their names in the file.")
    start: str = Field("", description="Characters removed from the start, such as 0.")
    end: str = Field("", description="Characters removed from the end.")


class Rule(Interval):
    """Which rows are kept: those whose value is in the range and none of `other_than`."""

    column: str = Field(description="Its name in the file.")
    other_than: tuple[str, ...] = Field((), description="Published values of rows that are left out.")
    missing: str | None = Field(None, description="With a range: the value that means unknown; such rows are left out.")
    note: str = Field("", description="Public remark behind the count of rows left out; empty: no remark.")
    when: When = Field({}, description="Options and the value at which the rule holds.")

    @model_validator(mode="after")
    def _leaves_something_out(self) -> Rule:
        if not self.other_than and not self.has_range:
            raise ValueError("Expected a range (above, at_least, below, at_most) or other_than")
        return self


class Identity(Section):
    """What names a record: the publisher's own key, or a hash of its published text. Never the sensitive attribute."""

    prefix: str = Field("", description="Begins every name; empty: the name of the data set.")
    key: tuple[str, ...] = Field((), description="Columns that name a record together; empty: its text does.")
    text: tuple[str, ...] = Field(
        (),
        description="Columns whose text is hashed; empty: all but the groups' and those computed from them.",
    )

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Identity:
        if self.key and self.text:
            raise ValueError("Expected key or text, got both")
        return self


class Person(Section):
    """Who stands behind a record, where several records share a person and a split must not part them."""

    column: str = Field(description="Its name in the file; it may not tell the sensitive attribute.")
    prefix: str = Field("person", description="Begins every name.")
    when: When = Field({}, description="Options and the value at which splits keep persons together.")


class Origins(Section):
    """The publisher's own division, by file."""

    files: dict[str, Origin] = Field(description="Path of each file, and which splits its records may go to.")
    when: When = Field({}, description="Options and the value at which it is kept.")


class Declaration(Section):
    """A table with labels and groups."""

    name: str = Field(pattern="^[a-z][a-z0-9_]*$", description="In commands, configurations and the odometer.")
    task: str = Field(description="What the label says, in a few words.")
    publisher: str = Field("", description="Who publishes the records.")
    address: str = Field("", description="The publisher's page.")
    licence: str = Field("", description="Under which the records may be used.")
    citation: str = Field("", description="What a study cites.")
    rows: Count = Field(description="The publisher's count: a public number, never counted from private records.")
    files: tuple[SourceFile, ...] = Field(description="Below the data folder; several are joined.")
    separator: str = Field(",", min_length=1, max_length=1, description="Between two fields.")
    header: tuple[str, ...] = Field((), description="Names of all columns, for files without a header line.")
    comment: str = Field("", description="What a first line begins with that is no record; empty: none does.")
    trim: tuple[Trim, ...] = Field((), description="Characters that are not part of values.")
    options: dict[str, Choice] = Field({}, description="Choices that `when` refers to.")
    keep: tuple[Rule, ...] = Field((), description="Which rows are records: those that all rules keep.")
    columns: tuple[Column, ...] = Field(description="What becomes a feature, in this order.")
    label: Coding = Field(description="The class y.")
    groups: dict[str, Group] = Field(
        description="The group z, by name. Of several the option `sensitive` takes one; by default the first.",
    )
    computed_from_group: tuple[str, ...] = Field(
        (),
        description="Further columns that the publisher computed from an attribute: they name no record, and are "
        "features only with `sensitive_as_feature`.",
    )
    identity: Identity = Field(Identity(), description="What names a record.")
    person: Person | None = Field(None, description="Who stands behind a record; empty: each is a person's only one.")
    origins: Origins | None = Field(None, description="The publisher's division; empty: any record may go anywhere.")
    num_public: Count = Field(1000, description="Default size of the public split.")
    num_validation: CountOrZero = Field(500, description="Default size of the validation split.")
    num_test: Count | None = Field(
        None,
        description="Default size of the test split; empty: what the publisher set aside, or a quarter of `rows`.",
    )

    @field_validator("groups", mode="before")
    @classmethod
    def _named_by_their_columns(cls, groups: Any) -> Any:
        if not isinstance(groups, dict):
            return groups
        return {
            name: {"column": name, "attribute": name, **group} if isinstance(group, dict) else group
            for name, group in groups.items()
        }

    @model_validator(mode="after")
    def _has_features_and_groups(self) -> Declaration:
        for name in ("files", "columns", "groups"):
            if not getattr(self, name):
                raise ValueError(f"{name}: expected one or more, got none")
        for file in (*self.files, *(other for each in self.files for other in each.alternatives)):
            if file.extracted or file.path.endswith(ARCHIVE_SUFFIXES):
                raise ValueError(
                    f"files: {file.path}: expected a text file, which may lie there gzipped, got an archive"
                )
        return self

    @model_validator(mode="after")
    def _conditions_name_options(self) -> Declaration:
        for name in self.options:
            if name in RESERVED:
                raise ValueError(f"options.{name}: this name is taken; choose another")
        options = self.all_options
        for where, when in self._conditions():
            for name, value in when.items():
                if name not in options:
                    raise ValueError(f"{where}: no option {name}{nearest(name, options)}")
                allowed = [as_text(choice) for choice in options[name].allowed]
                if value not in allowed:
                    raise ValueError(f"{where}: no value {value!r} of option {name}{nearest(value, allowed)}")
        return self

    @model_validator(mode="after")
    def _features_are_columns_of_their_own(self) -> Declaration:
        for one, other in itertools.combinations(self.columns, 2):
            if one.column == other.column and not _exclude(one.when, other.when):
                raise ValueError(f"columns: {one.column} is declared twice; leave one out, or give both a `when`")
        if self.label.column in {each.column for each in self.columns}:
            raise ValueError(f"columns: {self.label.column} is the label; a model may not see it")
        return self

    @model_validator(mode="after")
    def _names_do_not_tell_the_group(self) -> Declaration:
        named = [("identity", column) for column in (*self.identity.key, *self.identity.text)]
        named += [("person", self.person.column)] if self.person else []
        for field, column in named:
            if column in self.kept_out_of_names:
                raise ValueError(f"{field}: {column} may be the sensitive attribute, or tells it; leave it out")
        return self

    @model_validator(mode="after")
    def _columns_are_in_the_header(self) -> Declaration:
        for column in self.used() if self.header else ():
            if column not in self.header:
                raise ValueError(f"header: no column {column}{nearest(column, self.header)}")
        return self

    @model_validator(mode="after")
    def _every_choice_has_files(self) -> Declaration:
        paths = {file.path for file in self.files}
        if self.origins and set(self.origins.files) != paths:
            raise ValueError(f"origins.files: expected {', '.join(sorted(paths))}")
        names = sorted({name for file in self.files for name in file.when})
        for values in itertools.product(*(self.all_options[name].allowed for name in names)):
            choice = dict(zip(names, values, strict=True))
            if not any(holds(file.when, choice) for file in self.files):
                missing = ", ".join(f"{name}: {as_text(value)}" for name, value in choice.items())
                raise ValueError(f"files: none with {missing}; add one, or leave the value out")
        return self

    @property
    def all_options(self) -> dict[str, Option]:
        """What is declared, the choice among several groups, and whether a model may see the attribute."""
        options = {name: choice.option for name, choice in self.options.items()}
        if len(self.groups) > 1:
            first = next(iter(self.groups))
            options[SENSITIVE] = Option(default=first, allowed=tuple(self.groups), description="The group z.")
        options[SENSITIVE_AS_FEATURE] = Option(
            default=False,
            allowed=(False, True),
            description="Whether the model may see the sensitive attribute.",
            shows_attribute=True,
        )
        return options

    @property
    def kept_out_of_names(self) -> tuple[str, ...]:
        """Every column that may be the attribute, whichever is in force, or that was computed from one."""
        return tuple(dict.fromkeys((*(group.column for group in self.groups.values()), *self.computed_from_group)))

    def used(self, options: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """Every column that has a meaning with ``options``; null: with some."""
        conditional: tuple[Rule | Column, ...] = (*self.keep, *self.columns)
        ruled = [each.column for each in conditional if options is None or holds(each.when, options)]
        trimmed = [column for each in self.trim for column in each.columns]
        named = [*self.identity.key, *self.identity.text, *([self.person.column] if self.person else [])]
        return tuple(dict.fromkeys((*named, *self.kept_out_of_names, self.label.column, *ruled, *trimmed)))

    def group(self, options: Mapping[str, Any]) -> Group:
        """The chosen one."""
        return self.groups[options.get(SENSITIVE, next(iter(self.groups)))]

    def features(self, options: Mapping[str, Any]) -> tuple[Column, ...]:
        """The columns that become features; the attribute and what tells it only where they are asked for."""
        hidden = () if options[SENSITIVE_AS_FEATURE] else (self.group(options).column, *self.computed_from_group)
        return tuple(each for each in self.columns if holds(each.when, options) and each.column not in hidden)

    def _conditions(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        yield from ((f"files.{file.path}.when", file.when) for file in self.files)
        yield from ((f"columns.{each.column}.when", each.when) for each in self.columns)
        yield from ((f"keep.{rule.column}.when", rule.when) for rule in self.keep)
        for where, part in (("person", self.person), ("origins", self.origins)):
            if part is not None:
                yield f"{where}.when", part.when


def read_declaration(path: Path) -> Declaration:
    """The declaration in a YAML file; :class:`DataSettingsError` lists its faults with file, field and remedy."""
    try:
        values = read_yaml(path, as_text=True)
    except ConfigError as error:
        raise DataSettingsError(str(error)) from error
    columns = values["columns"] = list(_one_by_one(values.get("columns", [])))
    try:
        return parse_config(values, Declaration)
    except ConfigError as error:
        lines = (f"{path}: {_with_name(line, columns)}" for line in str(error).splitlines())
        raise DataSettingsError("\n".join(lines)) from error


def _one_by_one(items: Any) -> Iterator[Any]:
    """Every declared column by itself, where several were declared alike."""
    for item in items if isinstance(items, list) else [items]:
        if isinstance(item, dict) and isinstance(item.get("columns"), list):
            rest = {name: value for name, value in item.items() if name != "columns"}
            yield from (rest | {"column": column} for column in item["columns"])
        else:
            yield item


def _with_name(line: str, columns: list[Any]) -> str:
    """The fault, with the name of its column instead of a number."""
    line = line.removeprefix("config: ")  # of the whole: the message names the field
    found = re.match(r"columns\.(\d+)", line)
    item = columns[int(found[1])] if found else None
    return (
        f"columns.{item['column']}{line[found.end() :]}"
        if found and isinstance(item, dict) and "column" in item
        else line
    )


def _exclude(one: When, other: When) -> bool:
    return any(other.get(name, value) != value for name, value in one.items())
