"""A data set as a declaration: its files, the meaning of its columns, and what is known before a file is opened.

The YAML files in `codebooks/` are the project's own; a user's records are declared the same way. Every value is read as
it is written (`no` and `007` are text), only the schema makes numbers of it, and nothing in it is evaluated. Record
names may not depend on the sensitive attribute, so no declaration may name records, or group them into persons, by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from fairpate.config import ConfigError, Count, CountOrZero, Section
from fairpate.config_reader import parse_config, read_yaml
from fairpate.data.declared.columns import Feature, Group, Interval, Label, Texts, When
from fairpate.data.declared.own_pictures import PicturesConfig
from fairpate.data.declared.sources import Files
from fairpate.data.entry import DataSettingsError, Option, as_text, holds
from fairpate.data.gradients import FEATURES
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


class Trim(Section):
    """Characters that are not part of a column's values: removed before anything else, but never a whole value."""

    columns: Texts = Field(description="Their names in the file.")
    start: str = Field("", description="Characters removed from the start, such as 0.")
    end: str = Field("", description="Characters removed from the end.")


class Rule(Interval):
    """Which rows are kept: those whose value is in the range and none of `other_than`."""

    column: str = Field(description="Its name in the file.")
    other_than: Texts = Field((), description="Published values of rows that are left out.")
    unknown: Texts = Field(
        (), description="With a range: what means a missing value, beside an empty cell; such rows are left out."
    )
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
    key: Texts = Field((), description="Columns that name a record together; empty: its text does.")
    text: Texts = Field(
        (),
        description="Columns whose text is hashed; empty: all but the groups' and those computed from them.",
    )

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Identity:
        if self.key and self.text:
            raise ValueError("Expected key or text, got both")
        return self


class Person(Section):
    """Who stands behind a record, where several records share a person: what is protected, and no split parts.

    The name of a column alone stands for it.
    """

    column: str = Field(description="Its name in the file; it may not tell the sensitive attribute.")
    prefix: str = Field("person", description="Begins every name.")
    count: Count | None = Field(None, description="The publisher's count of persons: a public number.")
    when: When = Field({}, description="Options and the value at which persons are protected, and kept together.")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"column": value} if isinstance(value, str) else value


class Declaration(Section):
    """A data set with labels and groups."""

    name: str = Field(pattern="^[a-z][a-z0-9_]*$", description="In commands, configurations and the odometer.")
    kind: Literal["table", "embeddings", "images"] = Field(
        "table",
        description="What a record is: a row of a `table`, or of one with a vector, as `embeddings`; or a picture, as "
        "`images`.",
    )
    task: str = Field("", description="What the label says, in a few words.")
    publisher: str = Field("", description="Who publishes the records.")
    address: str = Field("", description="The publisher's page.")
    licence: str = Field("", description="Under which the records may be used.")
    citation: str = Field("", description="What a study cites.")
    rows: Count | None = Field(
        None, description="How many records there are about: a public number, never counted from private records."
    )
    files: Files = Field(description="Where which part lies.")
    separator: str | None = Field(
        None, min_length=1, max_length=1, description="Between two fields; empty: a tab in .tsv files, else a comma."
    )
    header: tuple[str, ...] = Field((), description="Names of all columns, for files without a header line.")
    comment: str = Field("", description="What a first line begins with that is no record; empty: none does.")
    trim: tuple[Trim, ...] = Field((), description="Characters that are not part of values.")
    options: dict[str, Choice] = Field({}, description="Choices that `when` refers to.")
    keep: tuple[Rule, ...] = Field((), description="Which rows are records: those that all rules keep.")
    features: dict[str, Feature] = Field(description="What becomes a feature, by name, in this order; not of images.")
    pictures: PicturesConfig | None = Field(None, description="Of images: where they lie, and what is seen of them.")
    label: Label = Field(description="The class y.")
    groups: dict[str, Group] = Field(
        description="The group z, by name; `group` where there is one. Of several the option `sensitive` takes one; by "
        "default the first.",
    )
    computed_from_group: Texts = Field(
        (),
        description="Further columns that the publisher computed from an attribute: they name no record, and are "
        "features only with `sensitive_as_feature`.",
    )
    identity: Identity = Field(Identity(), description="What names a record.")
    person: Person | None = Field(None, description="Who stands behind a record; empty: each is a person's only one.")
    num_public: Count | None = Field(
        None, description="Default size of the public split; empty: what has files of its own, or 1000."
    )
    num_validation: CountOrZero | None = Field(
        None,
        description="Default size of the validation split; empty: what has files of its own, none with "
        "`private`, or 500.",
    )
    num_test: Count | None = Field(
        None,
        description="Default size of the test split; empty: what has files of its own, or a quarter of `rows`.",
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
            # Without a column it is refused under its own name.
            values["groups"] = {str(one.get("column", "group")): values.pop("group")}
        elif isinstance(values.get("groups"), dict):
            values["groups"] = {
                name: {"column": name} | each if isinstance(each, dict) else each
                for name, each in values["groups"].items()
            }
        return values

    @model_validator(mode="after")
    def _is_consistent(self) -> Declaration:
        checks = (self._tables, self._options, self._conditions, self._columns, self._names, self._header)
        faults = [fault for check in checks for fault in check()]
        if not faults:  # conditions name options
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
            if one == other and not _exclude(first.when, second.when):
                yield f"features: {one} is declared twice; leave one out, or give both a `when`"
        if self.label.column in {column for column, _ in self.columns}:
            yield f"features: {self.label.column} is the label; a model may not see it"

    def _names(self) -> Iterator[str]:
        named = [("identity", column) for column in (*self.identity.key, *self.identity.text)]
        named += [("person", self.person.column)] if self.person else []
        for field, column in named:
            if column in self.kept_out_of_names:
                yield f"{field}: {column} may be the sensitive attribute, or tells it; leave it out"

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
        """Every column that may become features, and what it means."""
        return tuple(
            (column, feature) for name, feature in self.features.items() for column in feature.columns or (name,)
        )

    def attribute(self, options: Mapping[str, Any]) -> str:
        """What the chosen group is called."""
        return _attribute(self.chosen(options), self.groups[self.chosen(options)])

    @property
    def attributes(self) -> str:
        """All of them, in words."""
        named = ((_attribute(name, group), len(group.names)) for name, group in self.groups.items())
        return " or ".join(name if count == 2 else f"{name} ({count})" for name, count in named)

    @property
    def all_options(self) -> dict[str, Option]:
        """What is declared, the choice among several groups, and whether a model may see the attribute."""
        options = {name: choice.option for name, choice in self.options.items()}
        if len(self.groups) > 1:
            first = next(iter(self.groups))
            options[SENSITIVE] = Option(default=first, allowed=tuple(self.groups), description="The group z.")
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
    def kept_out_of_names(self) -> tuple[str, ...]:
        """Every column that may be the attribute, whichever is in force, or that was computed from one."""
        return tuple(dict.fromkeys((*(group.column for group in self.groups.values()), *self.computed_from_group)))

    def used(self, options: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """Every column that has a meaning with ``options``; null: with some."""
        ruled = [(rule.column, rule.when) for rule in self.keep]
        ruled += [(column, feature.when) for column, feature in self.columns]
        conditional = [column for column, when in ruled if options is None or holds(when, options)]
        trimmed = [column for each in self.trim for column in each.columns]
        named = [*self.identity.key, *self.identity.text, *([self.person.column] if self.person else [])]
        named += [self.pictures.column] if self.pictures else []
        return tuple(dict.fromkeys((*named, *self.kept_out_of_names, self.label.column, *conditional, *trimmed)))

    def chosen(self, options: Mapping[str, Any]) -> str:
        """The name of the group that is in force."""
        return str(options.get(SENSITIVE, next(iter(self.groups))))

    def group(self, options: Mapping[str, Any]) -> Group:
        """The one that is in force."""
        return self.groups[self.chosen(options)]

    def visible(self, options: Mapping[str, Any]) -> tuple[tuple[str, Feature], ...]:
        """The columns that become features; the attribute and what tells it only where they are asked for."""
        hidden = () if options.get(SENSITIVE_AS_FEATURE) else (self.group(options).column, *self.computed_from_group)
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
    """What a YAML file says, every value as text; :class:`DataSettingsError` for what is no YAML."""
    try:
        return read_yaml(path, as_text=True)
    except ConfigError as error:
        raise DataSettingsError(str(error)) from error


def parse_declaration(values: dict[str, Any], where: str) -> Declaration:
    """The declaration that ``values`` make; :class:`DataSettingsError` lists its faults, each after ``where``."""
    try:
        return parse_config(values, Declaration)
    except ConfigError as error:
        # `config` is the whole: the message names the field.
        lines = (line.removeprefix("config: ") for line in str(error).splitlines())
        raise DataSettingsError("\n".join(f"{where}: {line}" for line in lines)) from error


def _attribute(name: str, group: Group) -> str:
    return group.attribute or name


def _exclude(one: When, other: When) -> bool:
    return any(other.get(name, value) != value for name, value in one.items())
