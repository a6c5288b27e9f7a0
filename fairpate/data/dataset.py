"""A data set in memory, its entry in the registry, its files, its records' names and persons, and its splits.

**In memory.** Every stage reads one :class:`Dataset` in four splits. Images stay ``uint8``, and tabular features are
already scaled by public constants, so that nothing here is fitted to private records. Files are never written to, and
records are read only from bytes with the right checksum.

**Names.** A record's name depends on the record alone, never on other rows, and never on its sensitive attribute:
methods that protect only the attribute publish names, and divide records by them. Records that are equal except for the
attribute are one *unit*. Random choices for a record (its split, its teacher) are a keyed hash of its unit's name, so
adding, removing or changing another record changes nothing for it.

Shapes: N records, R sums (one for each person and row that the person votes for), W numbers of a vote.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, field_validator

from fairpate.config import HashedSplit, Section, nearest, short_for
from fairpate.data.columns import FeatureCode, Mask
from fairpate.data.large_arrays import Gathered, Names, Pixels, as_slice
from fairpate.encoders import PublicEncoder
from fairpate.lazy import torch
from fairpate.types import DataError, DataSettingsError, IntArray, Unit

if TYPE_CHECKING:
    from torch import Tensor

    from fairpate.data.embedding import Embedding

SPLIT_NAMES = ("private", "public", "validation", "test")
NAMED_BY = ("record_id", "unit_id", "person_id")
FeatureKind = Literal["image", "tabular"]


@dataclass(frozen=True, kw_only=True)
class Split:
    """N records: features ``x`` (N, ...), labels ``y`` (N,), groups ``z`` (N,), and a stable ``record_id`` each.

    ``x`` is ``uint8`` (N, channels, height, width) for images and ``float32`` (N, features) for tables; ``y`` and ``z``
    are ``int64``. Each record has up to three identifiers, which reveal nothing about ``z``:

    - ``record_id``: unique within a data set.
    - ``unit_id``: the same for records that differ only in ``z``; by default the ``record_id``.
    - ``person_id``: the person of the record, if all records of a person are protected together; empty if each record
      is protected by itself.

    ``together`` is ``person_id``, or ``unit_id`` without persons: records with an equal value are trained on by the
    same teacher. Identifiers are stored packed (:class:`fairpate.data.large_arrays.Names`).
    """

    x: Tensor
    y: Tensor
    z: Tensor
    record_id: Sequence[str]
    unit_id: Sequence[str] = ()
    person_id: Sequence[str] = ()
    together: Sequence[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in NAMED_BY:
            object.__setattr__(self, name, Names(getattr(self, name)))
        if not self.unit_id:
            object.__setattr__(self, "unit_id", self.record_id)
        object.__setattr__(self, "together", self.person_id or self.unit_id)
        names = (self.record_id, self.unit_id, self.person_id or self.record_id)
        sizes = {*map(len, (self.x, self.y, self.z)), *map(len, names)}
        if len(sizes) != 1:
            raise ValueError(
                f"Expected x, y, z and identifiers of one length, got lengths {sorted(sizes)}; give one per record."
            )
        # A record without a person would be protected by itself alone, unlike the statement says.
        if missing := pc.sum(pc.equal(Names(self.person_id).packed, "")).as_py():
            raise DataError(
                f"Expected a person for every record or for none, got {missing:,} without a person; complete "
                "the column that names persons, or set data.unit=record to protect each record by itself."
            )

    def __len__(self) -> int:
        return len(self.record_id)

    @property
    def num_protected(self) -> int:
        """The number of persons if persons are protected, otherwise the number of records."""
        return Names(self.person_id).num_distinct if self.person_id else len(self)

    @property
    def person_N(self) -> Tensor | None:
        """The number (N,) of each record's person: persons are counted from 0 in order of first appearance. None if
        records are protected."""
        return torch.from_numpy(Names(self.person_id).numbered()) if self.person_id else None

    def rows_of(self, record_ids: Sequence[str]) -> list[int]:
        """Return the row of each of these records."""
        row_of = {record_id: row for row, record_id in enumerate(self.record_id)}
        return [row_of[record_id] for record_id in record_ids]

    def take(self, indices: Tensor | Sequence[int], x: Tensor | None = None) -> Split:
        """Return the records at ``indices`` as a new split, in that order; ``x``: their features, if the caller already
        has them."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        rows = index.numpy()
        # A slice of a tensor is a view, while an index tensor copies the rows.
        taken = index if (run := as_slice(rows)) is None else run
        names = {name: values.take(rows) for name in NAMED_BY if (values := Names(getattr(self, name)))}
        # If units are records, one array serves as both, so that no name is in memory twice.
        if Names(self.unit_id).packed is Names(self.record_id).packed:
            names.pop("unit_id", None)
        return Split(
            x=self.x[index] if x is None else x, y=self.y[taken], z=self.z[taken], **({"record_id": ()} | names)
        )


@dataclass(frozen=True, kw_only=True)
class BeforeEmbedding:
    """A few records as they were before an embedding replaced their features: public ``examples`` (N, ...), and the
    names of a table's features."""

    examples: Tensor
    feature_names: tuple[str, ...]


OWN_FILES = "files-"
"""Prefix of :attr:`Dataset.parts` if test or validation records come from files of their own."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """The public description of a data set: the names of its classes and groups, and remarks.

    ``label_names[k]`` names class k and ``group_names[g]`` group g of the ``sensitive_attribute``. ``notes`` are public
    remarks about the files, such as how many malformed names were left out.
    """

    kind: FeatureKind
    label_names: tuple[str, ...]
    group_names: tuple[str, ...]
    sensitive_attribute: str
    feature_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


DESCRIBED = tuple(each.name for each in fields(Described))
"""The names of the fields of :class:`Described`, which several classes have."""


@dataclass(frozen=True, kw_only=True)
class Dataset(Described):
    """Private, public, validation and test records of one data set.

    No private method reads the labels of the public split; they are kept for evaluation. Further fields:

    - ``embedding``: the embedding that computed the features, if any.
    - ``before_embedding``: a few public records and the names of features before the embedding.
    - ``feature_codes``: how a declared table's features (before an embedding) are computed from its columns.
    - ``encoder``: the public encoder that computed the features from pictures, if any, and ``pictures``, a few public
      records as it reads them.
    - ``records_alone``: whether the source names persons although each record is protected by itself.
    - ``parts``: identifies the rule of a hashed split (:func:`divide_by_hash`), in which adding or removing a unit
      changes only one split; empty for other splits.
    - ``keeps_names``: whether a record keeps its name, and so stays in its split, if its content is replaced.
    - ``shared_unit``: the unit of privacy if private records are at several sites; this site may have none of them.
    - ``is_elsewhere``: whether private records are left out, because they are at other sites, or because only the
      privacy cost of a release is to be determined.
    - ``public_persons``: the number of persons behind the public records, even if each record is protected by itself;
      None if the source does not name persons.
    - ``declared_units``: the declared number of protected records or persons, which is public; None if none is.
    """

    name: str
    private: Split
    public: Split
    validation: Split
    test: Split
    embedding: Embedding | None = None
    before_embedding: BeforeEmbedding | None = None
    feature_codes: tuple[FeatureCode, ...] = ()
    encoder: PublicEncoder | None = None
    pictures: Tensor | None = None
    records_alone: bool = False
    parts: str = ""
    keeps_names: bool = False
    shared_unit: Unit | None = None
    is_elsewhere: bool = False
    public_persons: int | None = None
    declared_units: int | None = None

    unit: Unit = field(init=False)
    """The unit of privacy: ``person`` if private records name persons, otherwise ``record``."""
    part: str = field(init=False)
    """Name of the private part of a hashed split; empty for other splits. The odometer, which adds up the privacy cost
    of all runs on a data set, counts releases from different parts separately."""
    num_classes: int = field(init=False)
    num_groups: int = field(init=False)
    splits: Mapping[str, Split] = field(init=False, repr=False)
    """The four splits by name."""

    def __post_init__(self) -> None:
        # No rule decides about records in files of their own: another file could contain what was in a part before.
        has_part = self.parts and not self.parts.startswith(OWN_FILES)
        derived = {
            "unit": self.shared_unit or ("person" if self.private.person_id else "record"),
            "part": f"{self.parts}/private" if has_part else "",
            "num_classes": len(self.label_names),
            "num_groups": len(self.group_names),
            "splits": {name: getattr(self, name) for name in SPLIT_NAMES},
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)


OptionValue = str | int | float | bool
Part = Literal["records", "private", "public", "validation", "test"]
Origin = Literal["any", "private", "training", "public", "validation", "held_out", "test"]
ORIGINS: tuple[Origin, ...] = get_args(Origin)


class SourceFile(Section):
    """One file of a data set's publisher, with its path below the data folder, its checksum and how to get it."""

    path: str = Field(
        description="Path below the data folder; `*` matches any characters and `?` any one. A file that is not an "
        "archive may also be gzipped, as `path` + `.gz`."
    )
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = Field(
        None, description="Checksum of the file as it was published; empty: the publisher's file could not be pinned."
    )
    url: str | None = Field(None, description="Address of the publisher's download.")
    member: str | None = Field(None, description="Path of the file in the zip archive at `url`.")
    manual: str = Field("", description="Without `url`: a sentence on how to get the file.")
    note: str = Field("", description="Differences between this file and the published one.")
    alternatives: tuple[SourceFile, ...] = Field(
        (), description="Other files; if this file is missing, the first of them that exists is read."
    )
    extracted: str | None = Field(None, description="For an archive: the extracted folder that may be used instead.")
    when: dict[str, str] = Field({}, description="Options with the values for which the file is read.")

    _from_text = short_for("path")

    @field_validator("path", "extracted")
    @classmethod
    def _is_below_the_folder(cls, place: str | None) -> str | None:
        # A declaration may come from a stranger: it must not read outside the data folder.
        if place is not None and (not place or {"..", "/"} & set(PurePosixPath(place).parts)):
            raise ValueError(
                f"Expected a path below the data folder, got {place!r}; give it relative to this folder (--data-dir)"
            )
        return place


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a data set, with all values that it accepts.

    ``shows_attribute``: the value of this option with which features depend on the sensitive attribute; None if no
    value has this effect. ``pattern``: a regular expression of further values that are accepted; None: none are.
    """

    default: OptionValue
    allowed: tuple[OptionValue, ...]
    description: str
    shows_attribute: OptionValue | None = None
    pattern: str | None = None

    def accepts(self, value: object) -> bool:
        """Return True if ``value`` is one of this option's values."""
        # By type as well: 1 equals True, which is another choice.
        if any(value == choice and type(value) is type(choice) for choice in self.allowed):
            return True
        return self.pattern is not None and isinstance(value, str) and re.fullmatch(self.pattern, value) is not None


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of a loader: a folder, the public seed, and every option with its value filled in.

    ``tables``, a table in memory for each part of the data set, are read instead of files. ``unit``: the unit of
    privacy if the caller chose it; if it is ``record``, the loader need not name persons.
    """

    data_dir: Path | None
    seed: int
    options: Mapping[str, Any]
    tables: Mapping[Part, pa.Table] | None = None
    unit: Unit | None = None


@dataclass(frozen=True, kw_only=True)
class LoadedRecords(Described):
    """All N records of a data set before they are divided into splits.

    - ``records``: a public record without a label has the label -1.
    - ``origins``: the part of the publisher's files from which each record comes. It restricts the splits that the
      record may enter: a publisher's test record is never trained on. None: any split.
    - ``person_ids``: the name of the person behind each record, if several records may share one and a split must keep
      them together. Equal records then belong to one person.
    - ``mapped``: the features as a view of a memory-mapped file, so that splits can be views too.
    - ``feature_codes``: how a declared table's features are computed.
    - ``encoder``: the public encoder that computed the features from pictures, if any.
    - ``naming``: identifies the rule by which records are named.
    - ``keeps_names``: whether a record keeps its name if its content is replaced. It does if names are read only from
      keys of records or persons.
    """

    records: Split
    origins: tuple[Origin, ...] | None = None
    person_ids: Sequence[str] | None = None
    mapped: Pixels | Gathered | None = None
    feature_codes: tuple[FeatureCode, ...] = ()
    encoder: PublicEncoder | None = None
    naming: str = ""
    keeps_names: bool = False

    def is_from(self, origins: Collection[Origin]) -> Mask:
        """Return for each record whether its origin is one of ``origins``."""
        return np.isin(self._origin_N, [ORIGINS.index(origin) for origin in origins])

    @cached_property
    def _origin_N(self) -> npt.NDArray[np.int8]:
        found = self.origins or itertools.repeat(ORIGINS[0])
        return np.fromiter(map(ORIGINS.index, found), np.int8, len(self.records))


@dataclass(frozen=True, kw_only=True)
class DatasetEntry:
    """One data set: its publisher, licence, files and options, default split sizes, and the loader that reads it.

    - ``rows``, ``persons``: the publisher's numbers of records and persons; None if unknown or not public.
    - ``persons_when``: if the source has persons, the options with which records name them; empty: with any options.
    - ``citation``: the reference for a study.
    - ``intended_use``, ``out_of_scope``, ``contact``: the owner's words on what a model of the records is for.
    - ``num_public``, ``num_validation``, ``num_test``: default sizes of splits. None takes every record that the
      publisher set aside for the split; a test split without such records gets a quarter of ``rows``.
    - ``count_public``: a function that counts public records in files of their own.
    - ``class_shares``: the declared share of each class.
    - ``num_classes``: the number of classes under the default options.
    """

    name: str
    task: str
    sensitive: str
    publisher: str
    address: str
    licence: str
    rows: int | None
    kind: FeatureKind
    load: Callable[[Request], LoadedRecords] = field(repr=False)
    count_public: Callable[[Request], int] | None = field(default=None, repr=False)
    files: tuple[SourceFile, ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict)
    num_public: int | None = 1000
    num_validation: int | None = 500
    num_test: int | None = None
    citation: str = ""
    intended_use: str = ""
    out_of_scope: str = ""
    contact: str = ""
    persons: int | None = None
    persons_when: Mapping[str, str] = field(default_factory=dict)
    class_shares: tuple[float, ...] = ()
    num_classes: int = 2

    def protected(self, options: Mapping[str, Any], unit: Unit | None) -> tuple[int, Unit]:
        """Return a public number of protected units, and the kind of unit. If persons are protected under ``options``,
        this is the publisher's number of persons, otherwise the number ``rows`` of records.

        ``unit``: the unit of privacy if the user chose it. :class:`DataSettingsError` if the declaration gives no
        number.
        """
        if self.persons is not None and unit is None and holds(self.persons_when, self.complete_options(options)):
            return self.persons, "person"
        if self.rows is None:
            raise DataSettingsError(
                f"{self.name}: rows: missing; declare how many private records there are (a public estimate is "
                "enough), or set the sizes of splits, which depend on it: data.num_public, num_validation, num_test."
            )
        return self.rows, "record"

    def complete_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options of this data set with their values: those in ``given``, otherwise the defaults.
        :class:`DataError` for an unknown option or value, with the nearest known one."""
        for name, value in given.items():
            if name not in self.options:
                known = nearest(name, self.options)
                raise DataSettingsError(f"data.options.{name}: unknown option of {self.name}{known}.")
            if not self.options[name].accepts(value):
                known = nearest(value, self.options[name].allowed)
                raise DataSettingsError(f"data.options.{name}: no value {value!r} in {self.name}{known}.")
        return {name: given.get(name, option.default) for name, option in self.options.items()}

    def option_showing_attribute(self, given: Mapping[str, Any]) -> str | None:
        """Return which option, with its value in ``given`` or its default, makes the sensitive attribute a feature;
        None if none does. Unknown options and values are left to :meth:`complete_options`."""
        for name, option in self.options.items():
            if option.shows_attribute is not None and given.get(name, option.default) == option.shows_attribute:
                return name
        return None

    def needed_files(self, given: Mapping[str, Any]) -> tuple[SourceFile, ...]:
        """Return the files that the loader reads under the options ``given``."""
        options = self.complete_options(given)
        return tuple(file for file in self.files if holds(file.when, options))

    def is_in(self, data_dir: Path | None) -> bool:
        """Return True if the files that the loader needs are in the folder ``data_dir``. Without a folder, only a data
        set that needs no file is present."""
        return all(data_dir is not None and find(file, data_dir) is not None for file in self.needed_files({}))

    def located(self, request: Request) -> tuple[Path, ...]:
        """Return the paths of all files, and of all folders of pictures, that the loader reads on ``request``; errors
        as in :func:`locate_all`."""
        files, has_folders = self.needed_files(request.options), self.kind == "image"
        return tuple(path for file in files for _, path in locate_all(file, request.data_dir, has_folders=has_folders))


def holds(when: Mapping[str, str], options: Mapping[str, Any]) -> bool:
    """Return True if ``options`` have all the values in ``when``, the condition under which a file, a column or a
    filter of a declaration is used."""
    return all(as_text(options[name]) == value for name, value in when.items())


def as_text(value: Any) -> str:
    """Return an option's value in the form that declarations use: `true` and `false` for booleans, other values as
    text."""
    return str(value).lower() if isinstance(value, (bool, np.bool_)) else str(value)


def origins(**counts: int) -> tuple[Origin, ...]:
    """Return for each record its origin, which decides what splits it may enter: ``origins(training=9, test=3)`` is for
    nine records of training and three of test. Origins are in the order of :data:`ORIGINS`."""
    return tuple(origin for origin in ORIGINS for _ in range(counts.get(origin, 0)))


DATA_VARIABLE = "FAIRPATE_DATA"
ARCHIVE_SUFFIXES = (".gz", ".zip")


def resolve_data_dir(data_dir: Path | None) -> Path:
    """Return ``data_dir``, or the folder in FAIRPATE_DATA; :class:`DataError` if neither is a folder."""
    chosen = data_dir or (Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None)
    if chosen is None:
        raise DataSettingsError(f"No data folder: set data.data_dir, give --data-dir, or set {DATA_VARIABLE}.")
    folder = chosen.expanduser()
    if not folder.is_dir():
        raise DataSettingsError(f"{folder}: no such data folder; correct data.data_dir, --data-dir or {DATA_VARIABLE}.")
    return folder


def find(file: SourceFile, folder: Path, *, has_folders: bool = False) -> tuple[SourceFile, Path] | None:
    """Return the first existing file among ``file`` and its declared alternatives below ``folder``, with its path; None
    if none exists. With ``has_folders`` a folder (of pictures) counts as a file."""
    for choice in (file, *file.alternatives):
        if choice.extracted and (folder / choice.extracted).is_dir():
            return choice, folder / choice.extracted
        path = folder / choice.path
        if {"*", "?"} & set(choice.path):
            # The first by name: the order of a folder differs between machines.
            path = min((each for each in folder.glob(choice.path) if has_folders or each.is_file()), default=path)
        # An archive is not gzipped again.
        gzipped = [] if path.suffix in ARCHIVE_SUFFIXES else [path.with_name(path.name + ".gz")]
        for place in (path, *gzipped):
            if place.is_file() or (has_folders and place.is_dir()):
                return choice, place
    return None


def expanded(file: SourceFile, data_dir: Path | None, *, has_folders: bool = False) -> tuple[SourceFile, ...]:
    """Return the files whose paths match the pattern in the path of ``file``, sorted by path. If that path has no
    pattern, return ``file`` alone. With ``has_folders``, a pattern that matches no file stands for the folders (of
    pictures) that it matches."""
    if not {"*", "?"} & set(file.path):
        return (file,)
    folder = resolve_data_dir(data_dir)
    found = list(folder.glob(file.path))
    # Files first: a list of pictures may stand next to the folder of them, and match the same pattern.
    matches = [path for path in found if path.is_file()] or [path for path in found if has_folders and path.is_dir()]
    if not matches:
        raise DataError(f"{folder / file.path}: no file matches; correct the pattern, or put files there.")
    paths = sorted(path.relative_to(folder).as_posix() for path in matches)
    return tuple(file.model_copy(update={"path": path}) for path in paths)


def locate(file: SourceFile, data_dir: Path | None, *, has_folders: bool = False) -> tuple[SourceFile, Path]:
    """Return the first existing file among ``file`` and its declared alternatives, with its path. If none exists,
    :class:`DataError` says how to get it. With ``has_folders`` a folder (of pictures) counts as a file."""
    folder = resolve_data_dir(data_dir)
    if (found := find(file, folder, has_folders=has_folders)) is None:
        raise DataError(f"{folder / file.path}: missing file. {how_to_get(file, folder)}")
    return found


def locate_all(file: SourceFile, data_dir: Path | None, *, has_folders: bool) -> Iterator[tuple[SourceFile, Path]]:
    """Yield each file that the path of ``file`` matches (:func:`expanded`), and where :func:`locate` finds it."""
    for each in expanded(file, data_dir, has_folders=has_folders):
        yield locate(each, data_dir, has_folders=has_folders)


def how_to_get(file: SourceFile, folder: Path) -> str:
    """Return a sentence on how to get ``file``: the publisher's address or instruction, and the folder to put the file
    into."""
    target = folder / file.path
    if file.url is None:
        return f"{file.manual} Put {target.name} into {target.parent}.".strip()
    inside = f" ({file.member} in it)" if file.member else ""
    return f"Use `fairpate data fetch`, or get {target.name} from {file.url}{inside}, and put it into {target.parent}."


def read_any(file: SourceFile, data_dir: Path | None) -> tuple[SourceFile, bytes]:
    """Return the first existing file among ``file`` and its declared alternatives, and its content after a check of its
    checksum. A gzipped copy is unpacked before the check."""
    choice, path = locate(file, data_dir)
    # Read into memory before it is checked: a file checked on disk could change before it is read.
    content = path.read_bytes()
    if path.name != Path(choice.path).name:
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: damaged gzip file ({error}); delete it and fetch it again.") from error
    check_sha256(hashlib.sha256(content).hexdigest(), choice, path)
    return choice, content


def check_file(file: SourceFile, path: Path) -> str:
    """Return the sha256 of ``file`` at ``path``, of a gzipped copy that of the bytes inside; :class:`DataError` if a
    different one is pinned. The file is read in pieces."""
    # Gzip adds names and times, so that copies of one table differ.
    found = sha256_of(path, unpack=path.name != PurePosixPath(file.path).name)
    check_sha256(found, file, path)
    return found


def sha256_of(path: Path, *, unpack: bool = False) -> str:
    """Return the SHA-256 of a file, or with ``unpack`` of the bytes in a gzipped one; it is read in pieces. DataError
    for a damaged gzip file."""
    try:
        with gzip.open(path) if unpack else path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file ({error}); delete it and fetch it again.") from error


def check_sha256(found: str, file: SourceFile, path: Path) -> None:
    """Raise :class:`DataError` unless ``found``, the sha256 of the file at ``path``, is the one that is pinned for
    ``file``. A file without a pinned checksum passes."""
    if file.sha256 is not None and found != file.sha256:
        # Back from the file to the data folder, below which its declared path is.
        folder = path.parents[len(PurePosixPath(file.path).parts) - 1]
        raise DataError(
            f"{path}: damaged or other file: expected sha256 {file.sha256}, found {found}. Delete it and put the "
            f"published one there. {how_to_get(file, folder)}"
        )


# A control character, so that fields of text do not run into each other.
FIELD_SEPARATOR = "\x1f"


def content_units(prefix: str, columns: Sequence[pa.Array]) -> Names:
    """Return a name for each row of a table with the text ``columns``: ``prefix-`` and a part of the SHA-256 of the
    row's fields. Equal rows get equal names, and different rows different ones."""
    rows = pc.binary_join_element_wise(*columns, FIELD_SEPARATOR).to_pylist()
    for row, text in enumerate(rows):
        if text.count(FIELD_SEPARATOR) >= len(columns):
            # A field contains the separator. JSON escapes it, and one separator more than between fields tells the two
            # ways of joining apart.
            fields = json.dumps([column[row].as_py() for column in columns])
            rows[row] = FIELD_SEPARATOR * len(columns) + fields
    # 80 bits: two of a million different rows share a name with a probability below 1e-12.
    return Names(f"{prefix}-{hashlib.sha256(row.encode()).hexdigest()[:20]}" for row in rows)


def joined_units(prefix: str, columns: Sequence[pa.Array]) -> pa.LargeStringArray:
    """Return a name for each row of a table with the text ``columns``, such as those of a declared key: ``prefix`` and
    the row's fields, joined by dashes. Equal rows get equal names, and different rows different ones."""
    parts = list(columns)
    # Up to the last field a dash ends a field: one that contains a dash is written as a JSON string.
    for place, column in enumerate(columns[:-1]):
        is_ambiguous = pc.match_substring_regex(column, '^"|-')
        if pc.any(is_ambiguous).as_py():
            texts = zip(column.to_pylist(), is_ambiguous.to_pylist(), strict=True)
            parts[place] = pa.array([json.dumps(text) if quoted else text for text, quoted in texts], pa.string())
    return pc.binary_join_element_wise(prefix, *parts, "-").cast(pa.large_string())


def counted(units: Iterable[str]) -> Names:
    """Return a unique name for each record, given the name of each record's unit: the unit's name itself for its first
    record, with ``-1``, ``-2``, ... appended for further ones."""
    names, seen = Names(units), Counter[str]()
    name_of = {}
    # Only names that repeat are numbered: most files have none, and unpacking names is slow.
    repeated = names.repeated()
    for row, name in zip(repeated.tolist(), names.take(repeated), strict=True):
        seen[name] += 1
        name_of[row] = f"{name}-{seen[name]}"
    return Names(name_of.get(row, name) for row, name in enumerate(names)) if name_of else names


def keyed_hash(names: Iterable[str], *, seed: int, purpose: str) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each name, keyed by the public ``seed`` and by ``purpose``: uniform, and independent for
    different purposes."""
    # Copied for each name: setting the key is the slow part.
    keyed = hashlib.blake2b(key=hashlib.sha256(f"{purpose}:{seed}".encode()).digest(), digest_size=8)
    digests = bytearray()
    for name in names:
        hasher = keyed.copy()
        hasher.update(name.encode())
        digests += hasher.digest()
    # Little-endian on every machine, so that a seed means the same splits everywhere.
    return np.frombuffer(bytes(digests), dtype="<u8").astype(np.uint64)


def keyed_uniform(names: Iterable[str], *, seed: int, purpose: str) -> npt.NDArray[np.float64]:
    """Return for each name its :func:`keyed_hash` as a number in [0, 1).

    Do not rank names by these numbers: among ten million names, two get the same number for one seed in 200, and a sort
    leaves them in the order of the file.
    """
    # The top 53 bits, so that rounding never reaches 1.
    return (keyed_hash(names, seed=seed, purpose=purpose) >> np.uint64(11)).astype(np.float64) / 2.0**53


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?")
# Signs without a glyph that Unicode does not count as control or format: joiners, selectors, fillers, an empty Braille.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


@dataclass(frozen=True, kw_only=True)
class Alike:
    """A warning that names of records may be misspelt: ``names`` names of the part ``part`` of a data set differ as
    text from another name, and probably mean the same. The other names are those of ``other_part``, or without it those
    of the same part.

    ``how`` is `numbers` for names that are equal as numbers, such as 7, 07 and 7.0; and `signs` for names that are
    equal apart from invisible signs, spaces, capital letters and the forms of Unicode.
    """

    part: str
    how: Literal["numbers", "signs"]
    names: int
    other_part: str = ""

    @property
    def words(self) -> str:
        """In what the names are equal."""
        return "as numbers, like 7, 07 and 7.0" if self.how == "numbers" else "but for invisible signs, spaces or case"


def alike(names: Mapping[str, Iterable[str]]) -> tuple[Alike, ...]:
    """Return how many names in each part of a data set are probably others, within the part and in the earlier parts.
    ``names`` are those of each part."""
    found = []
    spelt: dict[str, dict[str | Decimal, set[str]]] = {}
    for part, given in names.items():
        own: dict[str | Decimal, set[str]] = {}
        for name in set(given):
            plain = name.casefold()
            if not name.isascii() or not name.isprintable():
                seen = "".join(sign for sign in name if unicodedata.category(sign) not in ("Cc", "Cf"))
                plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", _UNSEEN.sub("", seen)).casefold())
            plain = " ".join(plain.split())
            own.setdefault(Decimal(plain) if _NUMBER.fullmatch(plain) else plain, set()).add(name)
        repeated = Counter[tuple[str, bool]]()
        for key, each in own.items():
            repeated["", isinstance(key, Decimal)] += len(each) if len(each) > 1 else 0
            for other, theirs in spelt.items():
                repeated[other, isinstance(key, Decimal)] += len(each - theirs[key]) if key in theirs else 0
        for (other, is_number), count in sorted(repeated.items()):
            if count:
                how: Literal["numbers", "signs"] = "numbers" if is_number else "signs"
                found.append(Alike(part=part, how=how, names=count, other_part=other))
        spelt[part] = own
    return tuple(found)


SEPARATORS = ",;|"
"""A name with one of these characters is refused, as it may stand for several persons."""

MOST_RECORDS = 2**17
"""Most records of one person: squares of sums of votes are then whole numbers that fit into 64 bits."""


def row_blocks(num_rows: int, size: int, person_N: IntArray | None = None) -> Iterator[slice | IntArray]:
    """Divide all rows into blocks of about ``size`` rows, and yield the row numbers of each block; without rows, yield
    one empty block.

    ``person_N`` is the number of each row's person: all rows of a person are then in the same block.
    """
    if person_N is None:
        yield from (slice(start, start + size) for start in range(0, max(num_rows, 1), size))
        return
    rows = np.argsort(person_N, kind="stable")
    starts = np.flatnonzero(np.diff(person_N[rows], prepend=-1))
    # The first person who begins in each stretch of ``size`` records begins a part.
    first = starts[np.unique(starts // size, return_index=True)[1]]
    yield from np.split(rows, first[1:])


def shortened_by_person(
    votes_NW: IntArray, row_N: IntArray, person_N: IntArray, *, norm: int
) -> tuple[IntArray, IntArray]:
    """Add up each person's votes for each row of a table of votes, and shorten the sums: all sums of one person
    together have an L2 norm of at most ``norm``, so that the noise on the released table can protect persons.

    Return for each sum its row in the table (R,), and its numbers (R, W). Record n belongs to person ``person_N[n]``
    and votes ``votes_NW[n]`` for row ``row_N[n]`` of the table; no vote may be longer than ``norm``. Shortened sums are
    whole numbers, rounded towards zero. They depend on the person's own records alone, bit for bit. ValueError for more
    than ``MOST_RECORDS`` records of one person.
    """
    # Rows of one person together, and within them the votes for one row of the table.
    order = np.lexsort((row_N, person_N))
    rows, persons = row_N[order], person_N[order]
    starts_R = np.flatnonzero((np.diff(rows, prepend=-1) != 0) | (np.diff(persons, prepend=-1) != 0))
    firsts_P = np.flatnonzero(np.diff(persons[starts_R], prepend=-1))
    if np.bincount(person_N, minlength=1).max() > MOST_RECORDS:
        raise ValueError(f"Expected at most {MOST_RECORDS} records of one person; leave some out.")
    sums_RW = np.add.reduceat(votes_NW[order], starts_R, axis=0) if len(order) else votes_NW
    squared_P = np.add.reduceat((sums_RW * sums_RW).sum(axis=1), firsts_P) if len(order) else np.zeros(0, np.int64)
    squared_R1 = np.repeat(squared_P, np.diff(firsts_P, append=len(starts_R)))[:, None]
    # Towards zero, and to a little less than the bound, so that no rounding of floats makes a vector longer.
    shorter_RW = np.trunc(sums_RW * (norm - 1) / np.sqrt(np.maximum(squared_R1, 1))).astype(np.int64)
    return rows[starts_R], np.where(squared_R1 > norm**2, shorter_RW, sums_RW)


# Origins of the records that each split may take.
PERMITTED: dict[str, frozenset[Origin]] = {
    "public": frozenset({"any", "training", "held_out", "public"}),
    "validation": frozenset({"any", "training", "held_out", "validation"}),
    "test": frozenset({"any", "held_out", "test"}),
    "private": frozenset({"any", "training", "private"}),
}
# Origins of records that are set aside for a split: if there are any, it takes no others (the test split may).
SET_ASIDE: dict[str, frozenset[Origin]] = {
    "public": frozenset({"public"}),
    "validation": frozenset({"validation"}),
    "test": frozenset({"held_out", "test"}),
}


def divide(records: LoadedRecords, sizes: Mapping[str, int | None], *, seed: int) -> dict[str, Split]:
    """Return the four splits by name, each in the order of the file; :class:`DataError` if a size cannot be met.

    ``sizes``, the numbers of public, validation and test records, in this order, are lower bounds: whole units are
    taken until each is reached. None takes every record that is set aside for the split; private records are the rest.
    No size may depend on the records: otherwise changing one record could move others.

    Units are ranked by a hash of their name, with ``seed`` as its public key; the lowest become public, the next
    validation, the next test, and all others private. A unit is one record, records that differ only in the group, or
    all records of one person: a split never separates it. Since the private records have the highest ranks, adding or
    removing one moves no other record; and since the name of a unit does not depend on the group, changing a group
    moves none.
    """
    rank_N = np.zeros(len(records.records), dtype=np.int64)
    # Hashing every name is slow, and only a split that is drawn needs the ranking.
    if any(sizes.values()):
        hashes_N = keyed_hash(records.person_ids or records.records.unit_id, seed=seed, purpose="split")
        # Records of one unit, and units of equal hashes, share a rank.
        rank_N = np.unique(hashes_N, return_inverse=True)[1]
    free = np.ones(len(rank_N), dtype=bool)
    indices = {}
    for name, wanted in sizes.items():
        alone = records.is_from(SET_ASIDE[name])
        own = name != "test" and alone.any()  # files of its own: nothing else is taken
        chosen = free & (alone if own or wanted is None else records.is_from(PERMITTED[name]))
        if wanted is not None and wanted > (available := int(chosen.sum())):
            raise DataSettingsError(
                f"data.num_{name}: expected at most {available}, the number of records left, got {wanted}; lower it."
            )
        if wanted == 0:
            chosen = np.zeros(len(rank_N), dtype=bool)
        elif wanted is not None:
            # Every record up to that rank: no unit is separated.
            chosen &= rank_N <= np.sort(rank_N[chosen])[wanted - 1]
        indices[name] = np.flatnonzero(chosen)
        free &= ~chosen
    indices["private"] = np.flatnonzero(free & records.is_from(PERMITTED["private"]))
    return _taken(records, indices)


def divide_by_hash(
    records: LoadedRecords, shares: HashedSplit, *, seed: int, num_public: int | None
) -> dict[str, Split]:
    """Return the four splits by name. A unit (a record or person) that is not public goes to the test, validation or
    private split according to a hash of its name.

    Adding or removing a unit moves no other unit, so that releases from different splits compose in parallel. ``seed``
    is the public key of the hash; equal names go together, as do all records of a person. A split with files of its own
    consists of their records; ``num_public`` limits the public split.

    :class:`DataSettingsError` if public records have no files of their own. The hash would have to choose them among
    all records, and a private record that is added could then become public.
    """
    set_aside = {name: records.is_from(origins) for name, origins in SET_ASIDE.items()}
    if num_public != 0 and not set_aside["public"].any():
        raise DataSettingsError(
            "data.split: hashed needs public records in files of their own, because a private record that is added "
            "could otherwise become public; declare them (files: {public: ...}), set data.num_public=0, or leave "
            "split out."
        )
    uniform_N = keyed_uniform(records.person_ids or records.records.unit_id, seed=seed, purpose="parts")
    public_N = set_aside["public"]
    if num_public is not None and num_public < public_N.sum():
        # By hash, as in :func:`divide`: records of one unit come in together.
        least = np.sort(uniform_N[public_N])[num_public - 1] if num_public else -1.0
        public_N = public_N & (uniform_N <= least)
    indices, low = {"public": np.flatnonzero(public_N)}, 0.0
    free_N = ~np.any(list(set_aside.values()), axis=0)
    for name, share in (("test", shares.test_share), ("validation", shares.validation_share)):
        own_N = set_aside[name]
        if not own_N.any():
            # Shares follow each other on [0, 1): a unit's hash falls into one of them, regardless of other records.
            own_N, low = free_N & (low <= uniform_N) & (uniform_N < low + share), low + share
        indices[name] = np.flatnonzero(own_N)
    # All hashes above the shares: a private unit stays private, whatever other units there are.
    indices["private"] = np.flatnonzero(free_N & (uniform_N >= low))
    return _taken(records, indices)


def _taken(records: LoadedRecords, indices: Mapping[str, IntArray]) -> dict[str, Split]:
    """Return splits by name: each has those of ``records`` whose row numbers ``indices`` lists under this name.
    :class:`DataError` if a person has records in the private split and in another one."""
    # Features in a mapped file stay there: a large split is a view of a file and not a copy in memory.
    whole, mapped = records.records, records.mapped
    index_of = {name: torch.from_numpy(rows) for name, rows in indices.items()}
    splits = {
        name: whole.take(index, None if mapped is None else mapped.rows(index)) for name, index in index_of.items()
    }
    private = Names(splits["private"].person_id)
    for name, split in splits.items():
        if name == "private":
            continue
        persons = Names(split.person_id).packed
        # Other splits are read without noise: a person with records there too would not be protected.
        if parted := pc.count_distinct(persons.filter(pc.is_in(persons, value_set=private.packed))).as_py():
            raise DataError(
                f"Expected a person's records in one split, got {parted:,} persons with some in the private and some "
                f"in the {name} split, because the publisher's division separates them; set data.unit=record, which "
                "protects each record by itself."
            )
    return splits


def without_order(split: Split, *, seed: int, secret: bytes) -> Split:
    """Return the records of ``split`` in a new order and with new names, so that neither order nor names reveal the
    order of the file.

    Records are sorted by a keyed hash of their unit; records of the same unit are put in an order drawn from
    ``secret``, and names are replaced by hashes keyed by ``secret``. This is for methods that protect only the
    sensitive attribute: files are often sorted by it, so neither a record's position nor the name of one of several
    equal records may reveal its place in the file. The original names may reveal it too: a name may count the rows of
    the file, or contain the date on which one group was recorded.
    """
    hashes_N = keyed_hash(split.unit_id, seed=seed, purpose="order")
    drawn_N = np.random.default_rng(np.frombuffer(secret, dtype=np.uint8)).permutation(len(split))
    # Stable: within a unit names stay in the order of the file, while records take the random order.
    names = Names(split.record_id).take(np.argsort(hashes_N, kind="stable"))
    hidden = (hashlib.blake2b(name.encode(), key=secret, digest_size=10).hexdigest() for name in names)
    records = split.take(torch.from_numpy(np.lexsort((drawn_N, hashes_N))))
    return replace(records, record_id=Names(f"record-{digits}" for digits in hidden), unit_id=records.unit_id)


def check_members(dataset: Dataset, *names: str) -> None:
    """Raise :class:`DataError` if the private split lacks a class or a group, or if another split lacks a group
    although it has records.

    Only the splits in ``names`` are checked for groups; the classes of private records are always checked.
    """
    groups = (dataset.group_names, f"group of {dataset.sensitive_attribute}")
    splits = {name: split for name, split in dataset.splits.items() if name in names}
    if dataset.parts:
        # In a hashed split, it is private whether a group has a test record, and no reason to refuse a run.
        splits = {name: split for name, split in splits.items() if name not in ("validation", "test")}
    checks = [(name, split.z, *groups) for name, split in splits.items() if len(split) or name == "private"]
    for name, codes_N, words, what in (*checks, ("private", dataset.private.y, dataset.label_names, "class")):
        if name == "private" and dataset.shared_unit:  # another site may have what this one lacks
            continue
        counts = torch.bincount(codes_N, minlength=len(words)).tolist()
        if empty := [each for each, count in zip(words, counts, strict=True) if count == 0]:
            raise DataError(
                f"The {name} split has no member of {what} {', '.join(empty)}. If the split has its own file, add such "
                "records to it, or leave the missing names out of the declaration and their records out of all files; "
                "if it is drawn, choose larger splits (data.num_public, num_validation, num_test) or another data.seed."
            )
