"""A data set as a declaration: its files, the meaning of its columns, and what is known before a file is opened.

The YAML files in `codebooks/` are the project's own; a user's records are declared the same way. Every value is read as
it is written (`no` and `007` are text), only the schema makes numbers of it, and nothing in it is evaluated. Record
names may not depend on the sensitive attribute, so no declaration may name records, or group them into persons, by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from fairpate.config import ConfigError, Count, CountOrZero, Section
from fairpate.config_reader import parse_config, read_yaml
from fairpate.data.declared.columns import Feature, Group, Label, Texts
from fairpate.data.declared.own_pictures import LEVEL, PicturesConfig
from fairpate.data.declared.sections import Choice, Identity, Person, Rule, Trim
from fairpate.data.declared.sources import Files
from fairpate.data.entry import DataSettingsError, Option, as_text, holds
from fairpate.data.gradients import FEATURES
from fairpate.names import nearest

SENSITIVE = "sensitive"
SENSITIVE_AS_FEATURE = "sensitive_as_feature"
# Options that the reader adds, or that are of pictures.
RESERVED = (SENSITIVE, SENSITIVE_AS_FEATURE, "features")


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
    intersections: dict[str, Texts] = Field(
        {},
        description="Further choices of `sensitive`: names of two groups or more, such as `race_and_sex: [race, sex]`. "
        "Every combination is a group, named `A & B`.",
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
        for field, column, kept_out in named:
            if column in kept_out:
                yield f"{field}: {column} may be the sensitive attribute, or tells it; leave it out"
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
        """Every column that may become features, and what it means."""
        return tuple(
            (column, feature) for name, feature in self.features.items() for column in feature.columns or (name,)
        )

    def attribute(self, options: Mapping[str, Any]) -> str:
        """What the chosen group is called."""
        return " and ".join(self.groups[name].attribute or name for name in self._crossed(self.chosen(options)))

    @property
    def attributes(self) -> str:
        """All of them, in words."""
        choices = [{SENSITIVE: name} for name in (*self.groups, *self.intersections)]
        named = ((self.attribute(choice), len(self.group_names(choice))) for choice in choices)
        return " or ".join(name if count == 2 else f"{name} ({count})" for name, count in named)

    @property
    def all_options(self) -> dict[str, Option]:
        """What is declared, the choice among several groups, and whether a model may see the attribute."""
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
        """Every column that may be the attribute, whichever is in force, or that was computed from one."""
        groups = [group.column for group in self.groups.values()]
        # A picture's path tells the folder in which its group lies.
        paths = [self.pictures.column] if self.pictures and any(name.startswith(LEVEL) for name in groups) else []
        return tuple(dict.fromkeys((*groups, *self.computed_from_group, *paths)))

    def text_of_names(self, columns: Sequence[str], options: Mapping[str, Any]) -> tuple[str, ...]:
        """Those of ``columns`` whose text names a record: of `identity.text` those of no group in force, or with
        `as_written` all declared ones but groups'; none where features and label name it.

        What a column that nobody declared says is not known: it might tell the group, and so would the names.
        """
        in_force = {group.column for group in self.chosen_groups(options)}
        declared = set(self.used()) - set(self.told_by_groups) if self.identity.as_written else ()
        named = self.identity.text or [column for column in columns if column in declared]
        return tuple(column for column in named if column not in in_force)

    def features_of_names(self, options: Mapping[str, Any]) -> tuple[tuple[str, Feature], ...]:
        """The columns whose features name a record: what a model sees with ``options``, but for all groups'."""
        return tuple(
            (column, feature) for column, feature in self.visible(options) if column not in self.told_by_groups
        )

    def used(self, options: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """Every column that has a meaning with ``options``; null: with some."""
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
        """The one that is in force, or those whose combinations are."""
        return tuple(self.groups[name] for name in self._crossed(self.chosen(options)))

    def group_names(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The name of each code, the last group's changing first."""
        names = (group.names for group in self.chosen_groups(options))
        return tuple(" & ".join(each) for each in itertools.product(*names))

    def visible(self, options: Mapping[str, Any]) -> tuple[tuple[str, Feature], ...]:
        """The columns that become features; the attribute and what tells it only where they are asked for."""
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
