"""What the project knows about a data set before it opens a file.

An entry is public knowledge only: who publishes the records, under which licence, which files with which checksums,
which options the loader takes. It holds no statistic of the records beyond the publisher's own counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import pyarrow as pa
from pydantic import Field, field_validator

from fairpate.config import Section
from fairpate.data.dataset import FeatureKind, Split
from fairpate.data.mapped import Pixels
from fairpate.data.spill import Gathered
from fairpate.names import nearest
from fairpate.types import Unit, UsageError, UserError

if TYPE_CHECKING:
    from fairpate.data.declared.feature_codes import FeatureCode

OptionValue = str | int | float | bool
Part = Literal["records", "private", "public", "validation", "test"]
Origin = Literal["any", "private", "training", "public", "validation", "held_out", "test"]
ORIGINS: tuple[Origin, ...] = get_args(Origin)


class DataError(UserError, ValueError):
    """Records that cannot be used; the message names the file, column or option, the value and the remedy."""


class DataSettingsError(DataError, UsageError):
    """A data set, an option or a size that does not exist, whatever files are there."""


class SourceFile(Section):
    """One file of the publisher, below the data folder."""

    path: str = Field(
        description="Below the data folder; `*` and `?` stand for any characters and any one. A file that is no "
        "archive may also lie there gzipped, as `path` + `.gz`."
    )
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = Field(
        None, description="Of the published bytes, unpacked; empty: the publisher's file could not be pinned."
    )
    url: str | None = Field(None, description="Where the publisher offers it.")
    member: str | None = Field(None, description="Its place in the zip archive behind `url`.")
    manual: str = Field("", description="Without `url`: a sentence on how to get it.")
    note: str = Field("", description="Where the pinned file differs from the published one.")
    alternatives: tuple[SourceFile, ...] = Field((), description="Files that may lie there instead.")
    extracted: str | None = Field(None, description="Of an archive: the folder that may lie there instead.")
    when: dict[str, str] = Field({}, description="Options and the value at which the file is read.")

    @field_validator("path", "extracted")
    @classmethod
    def _is_below_the_folder(cls, place: str | None) -> str | None:
        # A declaration may come from anybody, and reads below the data folder alone.
        if place is not None and (not place or {"..", "/"} & set(PurePosixPath(place).parts)):
            raise ValueError(f"Expected a path below the data folder, got {place!r}; name that folder with --data-dir")
        return place


@dataclass(frozen=True, kw_only=True)
class Option:
    """One choice that a loader offers, with every value it takes.

    ``shows_attribute`` is the value under which features are functions of the sensitive attribute; null for none.
    """

    default: OptionValue
    allowed: tuple[OptionValue, ...]
    description: str
    shows_attribute: OptionValue | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a loader is asked for: a folder, the public seed, and every option with its value filled in.

    ``tables`` by part are read instead of files. ``unit``, where one is asked for: a ``record`` needs no person.
    """

    data_dir: Path | None
    seed: int
    options: Mapping[str, Any]
    tables: Mapping[Part, pa.Table] | None = None
    unit: Unit | None = None


@dataclass(frozen=True, kw_only=True)
class Records:
    """All N records of a data set before they are divided, and the public words for their codes.

    ``origins`` says into which splits a record may go (null: any): a publisher's test record never trains. ``y`` of a
    public record may be -1: it has no label.
    ``person_ids`` names the person behind each record where several records share one and a split must not part them;
    equal records are of one person then.
    ``notes`` are public remarks about the files, such as how many malformed names were left out. ``pixels`` are the
    features again where they may be mapped from a file, so that a split may be too; so are ``mapped`` those of a table.
    ``feature_codes``: of a declared table, how its features are computed.
    """

    kind: FeatureKind
    records: Split
    label_names: tuple[str, ...]
    group_names: tuple[str, ...]
    sensitive_attribute: str
    feature_names: tuple[str, ...] = ()
    origins: tuple[Origin, ...] | None = None
    person_ids: Sequence[str] | None = None
    notes: tuple[str, ...] = ()
    pixels: Pixels | None = None
    feature_codes: tuple[FeatureCode, ...] = ()
    mapped: Gathered | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetEntry:
    """One data set: its publisher, licence, files and options, default split sizes, and the loader that reads it.

    ``rows`` is the publisher's count, null where none is public, and ``persons`` that of the persons behind the rows,
    where they are named (under the options of ``persons_when``) and were counted; ``citation`` is what a study cites. A
    size that is null takes every record that was set aside; ``num_test`` a quarter of ``rows`` where none was.
    ``count_public`` counts public records that have files of their own; ``class_shares`` is how common each class is,
    where that was declared.
    """

    name: str
    task: str
    sensitive: str
    publisher: str
    address: str
    licence: str
    rows: int | None
    kind: FeatureKind
    load: Callable[[Request], Records] = field(repr=False)
    count_public: Callable[[Request], int] | None = field(default=None, repr=False)
    files: tuple[SourceFile, ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict)
    num_public: int | None = 1000
    num_validation: int | None = 500
    num_test: int | None = None
    citation: str = ""
    persons: int | None = None
    persons_when: Mapping[str, str] = field(default_factory=dict)
    class_shares: tuple[float, ...] = ()

    def count_protected(self, options: Mapping[str, Any], unit: Unit | None) -> int:
        """The publisher's count of what is protected under these options: of persons where it is known, or of rows."""
        by_person = unit is None and holds(self.persons_when, self.complete_options(options))
        return self.persons if by_person and self.persons is not None else self.public_rows

    @property
    def public_rows(self) -> int:
        """``rows``; :class:`DataSettingsError` where the declaration has none."""
        if self.rows is None:
            raise DataSettingsError(
                f"{self.name}: rows: missing; declare how many private records there are about, a public number from "
                "which default sizes follow, or configure the sizes yourself."
            )
        return self.rows

    def complete_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Every option with its value; :class:`DataError` names what is unknown and the nearest name."""
        for name, value in given.items():
            if name not in self.options:
                known = nearest(name, self.options)
                raise DataSettingsError(f"data.options.{name}: unknown option of {self.name}{known}.")
            allowed = self.options[name].allowed
            # By type as well: 1 equals True, which is another choice.
            if not any(value == choice and type(value) is type(choice) for choice in allowed):
                known = nearest(value, allowed)
                raise DataSettingsError(f"data.options.{name}: no value {value!r} in {self.name}{known}.")
        return {name: given.get(name, option.default) for name, option in self.options.items()}

    def needed_files(self, given: Mapping[str, Any]) -> tuple[SourceFile, ...]:
        """The files that a load with these options reads."""
        options = self.complete_options(given)
        return tuple(file for file in self.files if holds(file.when, options))


def holds(when: Mapping[str, str], options: Mapping[str, Any]) -> bool:
    """Whether the options have the values that ``when`` asks for."""
    return all(as_text(options[name]) == value for name, value in when.items())


def as_text(value: OptionValue) -> str:
    """The value as a declaration writes it: flags are `true` and `false`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def origins(**counts: int) -> tuple[Origin, ...]:
    """So many records of each origin, in the order of :data:`ORIGINS`: ``origins(training=32561, test=16281)``."""
    return tuple(origin for origin in ORIGINS for _ in range(counts.get(origin, 0)))
