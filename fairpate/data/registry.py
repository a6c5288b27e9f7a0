"""Data sets by name: find, fetch, load, describe, check and draft them, or take one from memory.

The project has loaders of pictures, and tables that the YAML files in `codebooks/` declare; a user's records are
declared the same way. Loaders scale by public constants, and the division into splits uses only record names. Nothing
is fitted to private records, and to public ones only if an embedding is configured.

Descriptions and checks count private records exactly: they are for people who may see the data, never for `public/`.

One table is made here from a fixed seed: applications for loans by invented customers (:func:`applications`).
"""

import datetime
import hashlib
import itertools
import json
import math
import re
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fairpate.config import DataConfig, nearest, parse_config, read_yaml
from fairpate.data import dataset as datasets
from fairpate.data import tables
from fairpate.data.dataset import (
    Alike,
    Dataset,
    DatasetEntry,
    Described,
    LoadedRecords,
    Part,
    Request,
    SourceFile,
    find,
)
from fairpate.data.declaration import PARTS, entry_of, read_declaration, read_records, rows_of
from fairpate.data.features import embedded, encoder_of, with_features
from fairpate.data.given import as_table
from fairpate.data.large_arrays import Names
from fairpate.data.overlap import doubts_of, require_apart
from fairpate.data.pictures import LEVEL, LOADERS, facts_of, folder_table
from fairpate.data.tables import DATES, ISO_DATE, TYPED_SUFFIXES, USUAL, Layout, TableFaults
from fairpate.lazy import torch
from fairpate.types import Advance, DataError, DataSettingsError, FloatArray, IntArray, Unit, tell


def _chosen(uniform_N: FloatArray, shares: FloatArray, row_N: IntArray) -> IntArray:
    """Return an index for each of N uniform random numbers; number n yields index k with the probability
    ``shares[row_N[n], k]``."""
    return (uniform_N[:, None] >= np.cumsum(shares, axis=1)[row_N, :-1]).sum(axis=1)


def _bell(uniform_N3: FloatArray) -> FloatArray:
    """Return nearly normal numbers (N,) of mean 0 and variance 1, each from three uniform ones."""
    sums_N: FloatArray = uniform_N3.sum(axis=1)
    return 2 * (sums_N - 1.5)


def applications() -> pa.Table:
    """Return the applications for loans of invented customers as the columns of a file: text, ordered by customer.

    Whether a loan is repaid on time depends on work, savings, income, earlier late payments, a habit that no column
    contains, and chance; never on the age group itself. Predictions differ between age groups all the same.
    """
    made = read_yaml(Path(__file__).with_name("applications.yaml"))
    ages, works, funds, homes = (
        {key: np.array(values) for key, values in made[name].items()} for name in ("age", "work", "savings", "housing")
    )
    # The order of draws is part of the table: another order makes other records under the same name. Only uniform
    # numbers are drawn, because numpy keeps their stream from version to version.
    generator = np.random.default_rng(made["seed"])
    of_all = np.zeros(made["customers"], dtype=np.int64)
    uniform = generator.random((len(of_all), 12))
    age = _chosen(uniform[:, 0], ages["shares"][None], of_all)
    work = _chosen(uniform[:, 1], works["shares"], age)
    savings = _chosen(uniform[:, 2], funds["shares"], age)
    housing = _chosen(uniform[:, 3], homes["shares"], age)
    years = np.where(work < 3, uniform[:, 4] ** 2 * ages["most_years"][age], 0).astype(np.int64)
    earns, habit = _bell(uniform[:, 5:8]), _bell(uniform[:, 8:11])
    times = 1 + _chosen(uniform[:, 11], np.array([made["applications"]]), of_all)

    customer = np.repeat(np.arange(len(times)), times)
    earlier = np.arange(len(customer)) - np.repeat(np.cumsum(times) - times, times)
    drawn = generator.random((len(customer), 8))
    income = np.round(works["income"][work] * np.exp(0.35 * earns), -1)[customer]
    terms, purposes = np.array(made["months"]), np.array(made["purposes"])
    months = terms[(drawn[:, 0] * len(terms)).astype(np.int64)]
    amount = np.round(1000 * np.exp(3 * drawn[:, 1] * np.sqrt(months / terms[-1])), -2)
    purpose = (drawn[:, 2] * len(purposes)).astype(np.int64)
    late = np.clip(np.floor(1.2 * (_bell(drawn[:, 3:6]) - habit[customer])), 0, 6).astype(np.int64)
    score = (
        works["score"][work][customer]
        + funds["score"][savings][customer]
        + homes["score"][housing][customer]
        + made["years"] * years[customer]
        + made["log_income"] * np.log(income / 2300)
        - made["burden"] * amount / months / income
        - made["late"] * late
        + made["habit"] * habit[customer]
        + made["chance"] * np.log(drawn[:, 6] / (1 - drawn[:, 6]))
    )
    columns = {
        "application": np.char.add("a", np.char.zfill(np.arange(len(customer)).astype(str), 5)),
        "customer": np.char.add("c", np.char.zfill(customer.astype(str), 5)),
        "age_group": ages["names"][age][customer],
        "income": income.astype(np.int64).astype(str),
        "amount": amount.astype(np.int64).astype(str),
        "months": months.astype(str),
        "purpose": purposes[purpose],
        "employment": works["names"][work][customer],
        "years_employed": years[customer].astype(str),
        "savings": funds["names"][savings][customer],
        "housing": homes["names"][housing][customer],
        "earlier_loans": earlier.astype(str),
        "late_payments": late.astype(str),
        "on_time": np.where(score > made["needed"], "yes", "no"),
    }
    return pa.table(columns)


CODEBOOKS = Path(__file__).with_name("codebooks")
MADE: Mapping[str, Callable[[], pa.Table]] = {"loans": applications}
"""Embedded tables: their records are computed in memory instead of read from the declared file."""


class Registry(Mapping[str, DatasetEntry]):
    """A mapping from names to data sets: the public data sets of pictures, and the tables that the YAML files in
    ``folder`` declare, one each. A file is read when its data set is first looked up.

    :class:`DataSettingsError` for a wrong declaration, and for a file that is not named after its data set.
    """

    def __init__(self, folder: Path) -> None:
        self._files = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
        self._read: dict[str, DatasetEntry] = {}

    def __getitem__(self, name: str) -> DatasetEntry:
        if name in self._read:
            return self._read[name]
        if name in LOADERS:
            facts = facts_of(name) | {"files": tuple(facts_of(name)["files"].values())}
            facts.pop("names")
            entry = DatasetEntry(name=name, kind="image", load=LOADERS[name], **facts)
        else:
            path = self._files[name]
            entry = entry_of(read_declaration(path))
            if entry.name != name:
                raise DataSettingsError(
                    f"{path}: name: expected {name}, as the file is called, got {entry.name}; rename one."
                )
            if name in MADE:
                make, load = MADE[name], entry.load
                entry = replace(
                    entry, files=(), load=lambda request: load(replace(request, tables={"records": make()}))
                )
        self._read[name] = entry
        return entry

    def __iter__(self) -> Iterator[str]:
        # Names alone: listing data sets must not parse every declaration.
        return iter(dict.fromkeys((*LOADERS, *self._files)))

    def __len__(self) -> int:
        return len(list(iter(self)))


REGISTRY: Mapping[str, DatasetEntry] = Registry(CODEBOOKS)


def option_showing_attribute(name: str, options: Mapping[str, Any], entry: DatasetEntry | None = None) -> str | None:
    """Return which of the given ``options`` makes the sensitive attribute of data set ``name`` a feature; None if none
    does.

    ``entry``: the entry of the data set if it is a declared table. Unknown names and options are left to the loader.
    """
    known = entry.options if entry is not None else REGISTRY[name].options if name in REGISTRY else {}
    for option, choice in known.items():
        if choice.shows_attribute is not None and options.get(option, choice.default) == choice.shows_attribute:
            return option
    return None


def entry_for(source: DataConfig | str) -> DatasetEntry:
    """Return the entry of a data set: of a known one by its name, or, for a configuration, of the known data set or the
    declaration that the configuration names.

    :class:`DataSettingsError` for an unknown name, with the nearest known one, and for a declaration that is wrong or
    was changed since the run began.
    """
    name, declared = (source, None) if isinstance(source, str) else (source.name, source.declaration)
    if declared is None:
        if name not in REGISTRY:
            raise DataSettingsError(f"data.name: unknown data set {name!r}{nearest(name, REGISTRY)}.")
        return REGISTRY[name]
    path, entry = declared.path, entry_of(read_declaration(declared.path))
    # A resumed run must read, name and divide records as before.
    if datasets.sha256_of(path) != declared.sha256:
        raise DataSettingsError(
            f"data.declaration: {path} has changed since the run began; restore it, or start a new run folder."
        )
    if entry.name in REGISTRY:
        raise DataSettingsError(f"{path}: name: {entry.name} is a known data set; give the table another name.")
    if entry.name != name:
        raise DataSettingsError(f"data.name: expected {entry.name}, as {path} says, got {name}; correct one.")
    return entry


def compared_on(config: DataConfig) -> dict[str, bool]:
    """Return the known data sets whose test records ``config`` reads, by name: False if it reads them only as public
    records, otherwise True. The privacy statement names these data sets, because the default settings of this package
    were compared on them.

    A known data set is recognised by its name, or by the content of a file with its test records. Changed files,
    folders of pictures and records in memory are not recognised.
    """
    if config.declaration is None:
        return {config.name: True} if config.name in REGISTRY else {}
    found: dict[str, bool] = {}
    folder = datasets.resolve_data_dir(config.data_dir or config.declaration.path.parent)
    for part, files in read_declaration(config.declaration.path).files.parts.items():
        for file in (one for each in files for one in datasets.expanded(each, folder, has_folders=True)):
            _, path = find(file, folder) or (file, folder)
            if path.is_file():
                name = _files_of_test_records().get(datasets.check_file(file, path, unpack=path.suffix == ".gz"))
                found |= {name: part != "public" or found.get(name, False)} if name else {}
    return found


@cache
def _files_of_test_records() -> dict[str, str]:
    """Return a mapping from the checksum of every file that contains test records of a known data set to the name of
    that data set."""
    found: dict[str, str] = {}
    for name, entry in REGISTRY.items():
        path = CODEBOOKS / f"{name}.yaml"
        own = read_declaration(path).files.test if path.exists() else ()
        # Without a separate file, test records are a part of any of the files.
        found |= {one.sha256: name for file in own or entry.files for one in (file, *file.alternatives) if one.sha256}
    return found


def load_at_site(config: DataConfig, *, has_private: bool) -> Dataset:
    """Return the data set of one party to a computation over several sites: of a site, or of the coordinator if
    ``has_private`` is False.

    A site reads its own private records, which may lack a class or a group, and the public ones. The coordinator reads
    public, validation and test records; with a hashed split only public ones, because each site then sets test records
    aside from its private ones. Files that a party does not read may be missing.

    Errors as in :func:`load_data`. :class:`DataSettingsError` also if private records have no file of their own, or if
    the declaration has no file that the coordinator may read.
    """
    entry, declared = entry_for(config), config.declaration
    table = None if declared is None else read_declaration(declared.path)
    if table is None or not table.files.private:
        raise DataSettingsError(
            f"data.declaration: sites need a declaration with a separate file for private records, got {config.name}; "
            "declare `files: {private: ...}`, with `public: ...` if there is a public pool."
        )
    absent = ("private",) * (not has_private) + ("validation", "test") * (has_private or config.split is not None)
    files = table.files.model_copy(update=dict.fromkeys(absent, ()))
    if not files.parts:
        raise DataSettingsError(
            f"files: {config.name} leaves the coordinator, who reads no private records, without any record; declare "
            "`public: ...`, or `test: ...` without data.split=hashed."
        )
    entry = replace(entry, load=partial(read_records, table.model_copy(update={"files": files})))
    request = request_of(config, entry)
    # From the declaration: a site without any record has no person ids to show that persons are protected.
    is_person = config.unit is None and table.persons(request.options) is not None
    found = dataset_of(entry.load(request), config, entry, shared_unit="person" if is_person else "record")
    return replace(found, is_elsewhere=not has_private)


def dataset_of(
    loaded: LoadedRecords, config: DataConfig, entry: DatasetEntry, *, shared_unit: Unit | None = None
) -> Dataset:
    """Return the records ``loaded`` by the loader of ``entry`` as a data set in four splits, divided as ``config`` asks
    for; errors as in :func:`load_data`."""
    options = entry.complete_options(config.options)
    features = options.get("features", "pixels")
    records = loaded
    if features != "pixels":
        records = with_features(loaded, features, config.weights)
    elif config.weights is not None:
        encoder_of(features, config.weights, ())  # raises: there is no encoder to read the file
    if len(records.records) == 0:
        raise DataError("No record is left after the data set's filters; check its options and the publisher's file.")
    # Names decide splits and teachers, and labels are released by name: no two records may share one.
    names = Names(records.records.record_id)
    copies = names.repeated()
    if len(copies):
        name = Counter(names.take(copies)).most_common(1)[0][0]
        raise DataError(
            f"Expected a different name for each record, got {len(copies):,} repeated names, such as {name!r}; remove "
            "the copies, also those in other files, or name records by more columns (identity.key)."
        )
    if config.unit is None and records.person_ids is not None:
        records = replace(records, records=replace(records.records, person_id=records.person_ids))
    sizes: dict[str, int | None] = {}
    origins = set(records.origins or ("any",))
    for split in ("public", "validation", "test") if config.split is None else ("public",):
        given, default = getattr(config, f"num_{split}"), getattr(entry, f"num_{split}")
        sizes[split] = default if given is None else given
        # Without a size every record that is set aside for the split is taken, and a quarter of the rows if there are
        # none: by the publisher's count, since a size that depended on private records would move others.
        own, permitted = datasets.SET_ASIDE[split], datasets.PERMITTED[split]
        if sizes[split] is None and own.isdisjoint(origins) and not permitted.isdisjoint(origins):
            sizes[split] = entry.protected({}, "record")[0] // 4
    parts = ""
    if (shares := config.split) is not None:
        splits: dict[str, Any] = datasets.divide_by_hash(records, shares, seed=config.seed, num_public=sizes["public"])
        # Everything that assigns a name to a part: parts of one rule are disjoint, and the odometer may count them
        # separately.
        rule = (records.naming, config.seed, shares.test_share, shares.validation_share, sorted(options.items()))
        parts = hashlib.sha256(repr(rule).encode()).hexdigest()[:16]
        if np.isin(records.origins or [], list(datasets.SET_ASIDE["test"] | datasets.SET_ASIDE["validation"])).any():
            parts = datasets.OWN_FILES + parts
    else:
        splits = datasets.divide(records, sizes, seed=config.seed)
    # Persons may be named under some options only; if they always are, every record has a name for its person.
    names_persons = bool(entry.persons_when) or records.person_ids is not None
    public_persons = None
    if records.person_ids is not None:
        is_public_N = pc.is_in(names.packed, value_set=Names(splits["public"].record_id).packed)
        public_persons = pc.count_distinct(Names(records.person_ids).packed.filter(is_public_N)).as_py()
    dataset = Dataset(
        name=entry.name,
        feature_codes=records.feature_codes,
        encoder=records.encoder,
        pictures=None if records.encoder is None else _first_pictures(loaded, splits["public"]),
        records_alone=names_persons and shared_unit != "person" and not splits["private"].person_id,
        parts=parts,
        keeps_names=records.keeps_names,
        shared_unit=shared_unit,
        public_persons=public_persons,
        declared_units=_declared_units(
            config, entry, shared_unit or ("person" if splits["private"].person_id else "record")
        ),
        **{name: getattr(records, name) for name in datasets.DESCRIBED},
        **splits,
    )
    # Few public records may lack a group, which only some methods read.
    datasets.check_members(dataset, "private", "validation", "test")
    require_apart(dataset)
    # After the split, because an embedding is fitted to the public part alone.
    return embedded(dataset, config.embedding)


_PICTURES_KEPT = 16


def _first_pictures(
    loaded: LoadedRecords, public: datasets.Split
) -> "torch.Tensor":  # a name alone: torch takes seconds to import
    """Return the first public records as pictures, before an encoder replaced them."""
    wanted = pa.array(list(itertools.islice(public.record_id, _PICTURES_KEPT)), pa.large_string())
    rows = pc.index_in(wanted, value_set=Names(loaded.records.record_id).packed).to_numpy()
    return loaded.records.x[torch.from_numpy(rows.astype(np.int64))]


def _declared_units(config: DataConfig, entry: DatasetEntry, unit: Unit) -> int | None:
    """Return the declared number of protected units; None if none is declared, or only the number of records although
    persons are protected."""
    if entry.rows is None and entry.persons is None:
        return None
    try:
        count, counted = entry.protected(config.options, config.unit)
    except DataSettingsError:
        return None
    return count if counted == unit else None


def declared_units(config: DataConfig) -> tuple[int | None, Unit]:
    """Return the declared number of protected units of the data set that ``config`` describes, which is public, and
    their kind, without reading any record; the number is None as in :attr:`Dataset.declared_units`."""
    entry = entry_for(config)
    path = CODEBOOKS / f"{config.name}.yaml" if config.declaration is None else config.declaration.path
    persons = entry.persons is not None  # of pictures, which have a loader
    if path.exists():
        persons = read_declaration(path).persons(entry.complete_options(config.options)) is not None
    unit: Unit = "person" if persons and config.unit is None else "record"
    return _declared_units(config, entry, unit), unit


def pool_size(config: DataConfig) -> int:
    """Return the approximate number of public records of the data set that ``config`` describes, without reading
    private ones."""
    entry = entry_for(config)
    size = entry.num_public if config.num_public is None else config.num_public
    if size is None:
        assert entry.count_public is not None
        size = entry.count_public(request_of(config, entry))
    return size


def request_of(config: DataConfig, entry: DatasetEntry) -> Request:
    """Return the arguments for the loader of ``entry``, as ``config`` asks for: folder, seed, and every option with its
    value."""
    options, folder = entry.complete_options(config.options), config.data_dir
    # None: the folder in the environment variable.
    if folder is None and config.declaration is not None:
        folder = config.declaration.path.parent
    return Request(data_dir=folder, seed=config.seed, options=options, unit=config.unit)


@dataclass(frozen=True, kw_only=True)
class DatasetListing:
    """One line of the list of data sets; ``present``: whether the files that it needs are in the data folder."""

    entry: DatasetEntry
    present: bool


@dataclass(frozen=True, kw_only=True)
class SplitDescription:
    """The numbers of records of one split: ``counts_GC[g][k]`` of group g and class k, and ``unlabelled_G`` of each
    group's records without a label."""

    name: str
    records: int
    counts_GC: tuple[tuple[int, ...], ...]
    unlabelled_G: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DatasetDescription(Described):
    """Names and record counts of a loaded data set. ``record_shape`` is the shape of one record's features."""

    name: str
    record_shape: tuple[int, ...]
    splits: tuple[SplitDescription, ...]


def list_datasets(data_dir: Path | None = None) -> tuple[DatasetListing, ...]:
    """Return a line for every data set that the project can read. Without a ``data_dir``, only data sets that need no
    file count as present."""
    return tuple(
        DatasetListing(
            entry=entry,
            present=all(data_dir is not None and find(file, data_dir) is not None for file in entry.needed_files({})),
        )
        for entry in REGISTRY.values()
    )


def describe(dataset: Dataset | DataConfig | str) -> DatasetDescription:
    """Return the shape, names and record counts of a data set; if ``dataset`` is a name or a configuration, the data
    set is loaded first."""
    if isinstance(dataset, str):
        dataset = DataConfig(name=dataset)
    if isinstance(dataset, DataConfig):
        dataset = load_data(dataset)
    num_groups, num_classes = dataset.num_groups, dataset.num_classes
    splits = []
    for name, split in dataset.splits.items():
        cells = (split.z * num_classes + split.y)[split.y >= 0]  # public records may lack a label
        counts_GC = torch.bincount(cells, minlength=num_groups * num_classes).reshape(num_groups, num_classes)
        splits.append(
            SplitDescription(
                name=name,
                records=len(split),
                counts_GC=tuple(map(tuple, counts_GC.tolist())),
                unlabelled_G=tuple(torch.bincount(split.z[split.y < 0], minlength=num_groups).tolist()),
            )
        )
    described = {name: getattr(dataset, name) for name in (*datasets.DESCRIBED, "name")}
    return DatasetDescription(record_shape=tuple(dataset.private.x.shape[1:]), splits=tuple(splits), **described)


def load_data(
    source: DataConfig | str | Path | Mapping[str, Any],
    *,
    records: Any = None,
    private: Any = None,
    public: Any = None,
    validation: Any = None,
    test: Any = None,
    data_dir: str | Path | None = None,
    **settings: Any,
) -> Dataset:
    """Return a data set in four splits: a known one by its name, or one of your own by its declaration.

    Args:
        source: The section `data` of a configuration; or a declaration (docs/data.md), as the path of a YAML file or
            as a dictionary.
        records, private, public, validation, test: Tables to read instead of the files of a declaration: a pandas or
            polars frame, a :class:`pyarrow.Table`, or a dictionary of columns (lists, arrays or series). Pass
            ``records`` to have them divided, or ``private`` and ``public``, as in `files`.
        data_dir: Folder with the files of a declaration; None: the folder of its YAML file.
        settings: Fields of the section `data` for a declaration: ``seed``, ``options``, ``num_public``,
            ``num_validation``, ``num_test``, ``embedding``, ``split``.

    Raises:
        DataError: Before any training, if a name, an option or a size is impossible, a file is missing or damaged,
            a column or category is unknown, or a split lacks a group; for a declaration every fault with its remedy.

    Example::

        dataset = fairpate.load_data("hospital.yaml", private=patients, public=pool)
        config = fairpate.configured({"target": {"epsilon": 1}}, method="weighted_votes")
        run = fairpate.run_method(config, fairpate.Reporter(), dataset)
    """
    if isinstance(source, DataConfig):
        entry = entry_for(source)
        return dataset_of(entry.load(request_of(source, entry)), source, entry)
    parts: dict[Part, Any] = dict(zip(PARTS, (records, private, public, validation, test), strict=True))
    frames = {part: frame for part, frame in parts.items() if frame is not None}
    if not isinstance(source, (Mapping, str, Path)):
        raise DataSettingsError(
            f"declaration: expected the path of a YAML file or a dictionary, got {type(source).__name__}; give either."
        )
    table = read_declaration(source if isinstance(source, Mapping) else Path(source), given=frames)
    wanted = None if table.identity.by_text else table.used()
    given = {part: as_table(frame, part, wanted=wanted) for part, frame in frames.items()}
    entry = entry_of(table)
    config = parse_config({"name": table.name, "data_dir": data_dir} | settings, DataConfig)
    beside = None if isinstance(source, Mapping) else Path(source).expanduser().absolute().parent
    request = replace(request_of(config, entry), data_dir=config.data_dir or beside, tables=given or None)
    return dataset_of(entry.load(request), config, entry)


def load_once(config: DataConfig) -> Dataset:
    """Return the data set that :func:`load_data` loads; consecutive calls with the same configuration and unchanged
    files return the same object."""
    entry = entry_for(config)
    paths = [path.absolute() for path in entry.located(request_of(config, entry))]
    # What is read with a file too: the pictures in a folder, and the array of a table's vectors next to it.
    paths += [each for path in paths for each in (path.rglob("*") if path.is_dir() else [tables.array_of(path)])]
    stats = ((path, path.stat()) for path in paths if path.exists())
    return _loaded(config.model_dump_json(), tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats))


# One data set at a time, since its records may fill much of a worker's memory. The files are only a part of the key.
@lru_cache(maxsize=1)
def _loaded(config_json: str, files: tuple[tuple[Path, int, int], ...]) -> Dataset:  # noqa: ARG001
    return load_data(DataConfig.model_validate_json(config_json))


TIMEOUT_S = 60.0
CHUNK_BYTES = 1 << 18
# Otherwise a server may compress the transfer, httpx unpacks it, and the bytes no longer match the checksum.
AS_PUBLISHED = {"accept-encoding": "identity"}
Stage = Callable[[str], AbstractContextManager[Advance]]
"""Displays a step by its name, and yields ``advance(done, total)``."""


def fetch(
    name: str, data_dir: Path, *, options: Mapping[str, Any] | None = None, stage: Stage = lambda _: nullcontext(tell)
) -> tuple[Path, ...]:
    """Download the files that data set ``name`` needs into ``data_dir`` and return their paths.

    An existing, undamaged file is kept. A download is renamed to its final name only after its sha256 was compared with
    the pinned one, so a damaged or interrupted download leaves nothing behind. ``stage`` displays the progress of each
    download.

    :class:`DataError` if a file cannot be downloaded, is damaged, or needs a registration with its publisher; the last
    is reported before anything is downloaded. The message says how to get the file, and the folder to put it into.
    """
    files = entry_for(name).needed_files(options or {})
    missing = []
    for file in files:
        if (found := find(file, data_dir)) is None:
            missing.append(file)
        elif found[1].is_file():
            # The checksum is of the published bytes: a gzipped copy has to be unpacked for it.
            datasets.check_file(*found, unpack=found[1].name != Path(found[0].path).name)
    # Before anything is downloaded, so that a user is not asked to register after an hour.
    if by_hand := [datasets.how_to_get(file, data_dir) for file in missing if file.url is None]:
        raise DataError(
            f"{name} cannot be fetched without its publisher's consent. " + " ".join(dict.fromkeys(by_hand))
        )
    for file in missing:
        _download(file, data_dir / file.path, stage)
    return tuple(datasets.locate(file, data_dir)[1] for file in files)


def _download(file: SourceFile, target: Path, stage: Stage) -> None:
    import httpx  # here, as every command imports this module and few download

    assert file.url is not None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # On the file system of the target, so that its place is taken in one step.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            content = Path(scratch) / target.name
            with (
                # Publishers move their files, so the content is compared with the pinned checksum.
                httpx.stream(
                    "GET", file.url, headers=AS_PUBLISHED, follow_redirects=True, timeout=TIMEOUT_S
                ) as response,
                content.open("wb") as stream,
                stage(target.name) as advance,
            ):
                response.raise_for_status()
                total = int(response.headers.get("content-length", 0))
                for chunk in response.iter_bytes(CHUNK_BYTES):
                    stream.write(chunk)
                    # A server need not announce the size.
                    advance(stream.tell(), max(total, stream.tell()))
            if file.member is not None:
                try:
                    with zipfile.ZipFile(content) as archive:
                        content = Path(archive.extract(file.member, Path(scratch) / "members"))
                except (zipfile.BadZipFile, KeyError) as error:
                    raise DataError(
                        f"{file.url}: expected a zip archive with {file.member} in it ({error}); try again."
                    ) from error
            found = datasets.sha256_of(content)
            if file.sha256 not in (None, found):
                raise DataError(
                    f"{file.url}: damaged download of {target.name}: expected sha256 {file.sha256}, found {found}; "
                    "nothing was kept. Try again, or compare with the publisher's page."
                )
            content.replace(target)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{file.url}: cannot be reached ({reason}). Where this machine has no network, get {target.name} on "
            f"another one and put it into {target.parent}."
        ) from error
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error}); choose another data folder or free space.") from error


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Numbers of rows in one column of ``file``: all ``rows``, those with a clipped value, with a missing value, and
    with a value that is not a declared category (``other``)."""

    file: str
    column: str
    rows: int
    clipped: int = 0
    missing: int = 0
    other: int = 0


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """A ``column`` of private records that may name persons: ``values`` values, which repeat in ``rows`` rows."""

    column: str
    values: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of a declaration's check.

    - ``rows``: numbers of rows read by file.
    - ``columns``: counts for the columns in which values were changed.
    - ``refused``: a message for each fault.
    - ``alike``: numbers of names (of persons, otherwise of records by a key) that are probably others.
    - ``repeated``: columns that the declaration leaves out and that may name persons, although it declares none.
    - ``doubts``: a sentence for each part that may contain changed copies of private records.
    """

    rows: dict[str, int]
    columns: tuple[Counted, ...]
    refused: tuple[str, ...]
    alike: tuple[Alike, ...] = ()
    repeated: tuple[Repeated, ...] = ()
    doubts: tuple[str, ...] = ()


def check_declaration(config: DataConfig) -> Check:
    """Read all files of the declaration that ``config`` names, and return its counts and faults.
    :class:`DataSettingsError` for a wrong declaration."""
    if config.declaration is None:
        raise DataSettingsError(
            f"{config.name}: expected the path of your own declaration (.yaml); only declarations can be checked."
        )
    entry, table, faults = entry_for(config), read_declaration(config.declaration.path), TableFaults()
    request, refused = request_of(config, entry), []
    similar: tuple[Alike, ...] = ()
    repeated: list[Repeated] = []
    doubts: tuple[str, ...] = ()
    try:
        records = read_records(table, request, faults)
        # Names of rows without a person, or by several columns, are none that somebody wrote.
        prefix = f"{table.person.prefix if table.person else table.identity.prefix or table.name}-"
        names = records.person_ids or (records.records.record_id if len(table.identity.key) == 1 else ())
        parts = records.origins or itertools.repeat("records")
        by_part: dict[str, set[str]] = {}
        for part, name in zip(parts, names, strict=False):
            if name.startswith(prefix):
                # Records to be divided are one part, whatever splits they may enter.
                part = part if part in PARTS else PARTS[0]
                by_part.setdefault(part, set()).add(name.removeprefix(prefix))
        similar = datasets.alike(by_part)
        if table.persons(request.options) is None and not table.pictures:
            protected: dict[Part, Any] = {"private": table.files.records or table.files.private}
            batches = (rows for *_, rows in rows_of(table, request, protected, others=True))
            traits = [column for column, each in table.visible(request.options) if each.categories]
            traits += [each.column for each in table.groups.values()]
            found = repeats_of(batches, dict.fromkeys(traits), table.used())
            repeated = [
                Repeated(column=column, values=len(each.values), rows=each.rows)
                for column, each in sorted(found.items())
                if each.may_be_persons
            ]
        # Only for its checks: repeated names, and sizes and splits that the records cannot fill.
        doubts = doubts_of(dataset_of(records, config, entry))
    except DataError as error:
        refused = str(error).splitlines()
    columns = []
    # In the order of the files, each once.
    for file, column in dict.fromkeys((file, column) for file, column, _ in faults.counts):
        counts = {what: faults.counts[file, column, what] for what in ("clipped", "missing", "other")}
        columns.append(Counted(file=file, column=column, rows=faults.rows[file], **counts))
    return Check(
        rows=dict(faults.rows),
        columns=tuple(columns),
        refused=tuple(refused),
        alike=similar,
        repeated=tuple(repeated),
        doubts=doubts,
    )


QUESTION = "# ?"
DRAFTED = "# Drafted "
# Limits on listed categories, on whole numbers that look like codes, and on remembered values.
_MOST_CATEGORIES, _MOST_CODES, _MOST_KEPT = 30, 10, 1000
_SEPARATORS = (",", ";", "\t", "|")
_LABELS = re.compile(r"^(label|target|class|outcome|y)$", re.IGNORECASE)
_GROUPS = re.compile(
    r"(^|[^a-z])(sex|gender|geschlecht|sexe|sexo|genero|género|race|ethnic\w*|religion|nationality)([^a-z]|$)",
    re.IGNORECASE,
)
_PERSONS = re.compile(r"(patient|person|subject|client|customer|kunde|user|member|student)(?!s)", re.IGNORECASE)
_IDS = re.compile(r"(^|[^a-z])(id|no|number|key|code)\.?$|nr\.?$|nummer$|n[uú]m[eé]ro$", re.IGNORECASE)
# Date formats, the most usual first; only days after the 12th distinguish the last two.
_DATE_FORMATS = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y")
_FROM_PRIVATE = "confirm from knowledge: read from private rows"
# Rows of one id may differ a fifth as often as by chance; few values in more rows each are categories.
_MOST_MIXED, _MOST_ROWS = 0.2, 20
_MARK = re.compile(r"n/?a|n\.a\.|#n/a|nan|null|none|missing|unknown|k\.a\.|keineangabe|\?|--?|\.")
_DATE, _AMOUNT = re.compile(DATES), re.compile(r"[-+]?\d[\d.,]*$")
# Ids of persons: values have as many rows each, on average, or more; with fewer they may repeat by chance.
_LEAST_ROWS, _MOST_REMEMBERED = 1.5, 2**20


@dataclass(kw_only=True)
class Repeats:
    """How the values of a column repeat, whatever its name: the signs of ids of persons who have several rows.

    Rows are added batch by batch, with their ``traits``: hashes of the values of other columns by name, such as the
    group. Of a column and of its pairs with each trait, hashes of distinct values are remembered, up to a million.
    """

    values: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    counts: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    pairs: dict[str, IntArray] = field(default_factory=dict)
    shares: dict[str, Counter[int]] = field(default_factory=dict)
    is_name: bool = True
    is_number: bool = True

    def add(self, text: pa.Array, traits: Mapping[str, IntArray]) -> None:
        is_given = pc.not_equal(text, "")
        text, given_N = text.filter(is_given), np.asarray(is_given)
        distinct = pc.unique(text).to_pylist()
        # Dates and amounts repeat too, and name nobody.
        self.is_name = self.is_name and not any(
            _DATE.match(each) or (_AMOUNT.match(each) and not re.fullmatch(r"\d+(\.0+)?", each)) for each in distinct
        )
        self.is_number = self.is_number and all(map(_AMOUNT.match, distinct))
        if not self.is_name or not distinct or len(self.values) > _MOST_REMEMBERED:
            return
        value_N = hashes(text)
        self.values, place_N = np.unique(np.concatenate([self.values, value_N]), return_inverse=True)
        counts_N = np.concatenate([self.counts, np.ones(len(value_N), dtype=np.int64)])
        self.counts = np.bincount(place_N, weights=counts_N).astype(np.int64)
        for name, trait_N in traits.items():
            own_N = trait_N[given_N]
            codes, numbers = np.unique(own_N, return_counts=True)
            self.shares.setdefault(name, Counter()).update(dict(zip(codes.tolist(), numbers.tolist(), strict=True)))
            known = self.pairs.get(name, self.values[:0])
            self.pairs[name] = np.union1d(known, value_N ^ (own_N >> 1))

    @property
    def rows(self) -> int:
        """The number of rows with a value."""
        return int(self.counts.sum())

    @property
    def mixed(self) -> float | None:
        """How often rows of one value differ in a trait, as a share of what chance would give, for the trait in which
        they differ least; None if chance would give too few differences to tell."""
        found, (times, number) = [], np.unique(self.counts, return_counts=True)
        for name, shares in self.shares.items():
            # Each value has one trait at least; so many further ones are expected of unrelated columns.
            by_chance = -float(len(self.values))
            for share in shares.values():
                by_chance += float(number @ (1 - (1 - share / self.rows) ** times))
            if by_chance >= _MOST_CODES:
                found.append((len(self.pairs[name]) - len(self.values)) / by_chance)
        return min(found, default=None)

    @property
    def may_be_persons(self) -> bool:
        """True if there are many values, none of them a date or an amount, that have several rows each, and the rows of
        one value nearly always share a trait. Where traits do not tell, values that are no numbers suffice."""
        if not self.is_name or len(self.values) <= _MOST_CATEGORIES or self.rows < _LEAST_ROWS * len(self.values):
            return False
        return not self.is_number if self.mixed is None else self.mixed < _MOST_MIXED


def hashes(text: pa.Array) -> IntArray:
    """Return a hash of each value, which differs between processes."""
    encoded = text.dictionary_encode()
    distinct = encoded.dictionary.to_pylist()
    return np.fromiter(map(hash, distinct), np.int64, len(distinct))[encoded.indices.to_numpy()]


def repeats_of(
    batches: Iterator[pa.Table], traits: Collection[str], left_out: Collection[str] = ()
) -> dict[str, Repeats]:
    """Return how the values of every column of a table repeat, compared with those in the columns ``traits``; columns
    in ``left_out``, and those of vectors, are left out."""
    found: dict[str, Repeats] = {}
    for rows in batches:
        own = {column: hashes(tables.text_of(rows[column])) for column in traits if column in rows.column_names}
        for column in rows.column_names:
            if column not in left_out and not tables.is_vectors(rows[column].type):
                others = {trait: each for trait, each in own.items() if trait != column}
                found.setdefault(column, Repeats()).add(tables.text_of(rows[column]), others)
    return found


# Names of files and folders that say which part of the records they hold, and not of which data set.
_NAMES_OF_PARTS = {"private", "public", "pool", "test", "train", "training", "validation", "data", "records"}
_PLAIN = re.compile(r"^[A-Za-z_][\w.() -]*$")


@dataclass(kw_only=True)
class Seen:
    """Facts about one column of a file, from which a declaration of this column is drafted: its values, their range,
    the number of missing ones. They are collected batch by batch.

    ``marks`` are values such as `n/a`, which often mean that a value is missing. In a column of numbers they are taken
    as missing values, in a column of words as text.
    """

    rows: int = 0
    missing: int = 0
    values: dict[str, None] = field(default_factory=dict)
    marks: dict[str, None] = field(default_factory=dict)
    repeats: bool = False
    low: float = math.inf
    high: float = -math.inf
    is_number: bool = True

    def add(self, text: pa.Array) -> None:
        present = text.filter(pc.not_equal(text, ""))
        self.rows += len(text)
        self.missing += len(text) - len(present)
        distinct = pc.unique(present).to_pylist()
        self.repeats |= len(distinct) < len(present) or any(value in self.values for value in distinct)
        # Bounded: otherwise all values of a column of names would stay in memory.
        self.values |= dict.fromkeys(distinct[: max(0, _MOST_KEPT - len(self.values))])
        marks = [value for value in distinct if _MARK.fullmatch(value.replace(" ", "").lower())]
        self.marks |= dict.fromkeys(marks)
        others = pa.array([value for value in distinct if value not in marks], pa.string())
        try:
            numbers = np.array(pc.cast(others, pa.float64()).to_numpy(zero_copy_only=False))
        except pa.ArrowInvalid:
            self.is_number = False
            return
        if len(numbers):
            self.low, self.high = min(self.low, float(numbers.min())), max(self.high, float(numbers.max()))

    @property
    def is_repeated_id(self) -> bool:
        """True if the column looks like the id of persons who have several rows: some values repeat, and there are more
        distinct values than a column of categories has."""
        return self.repeats and len(self.values) > _MOST_CATEGORIES and len(self.values) < self.rows - self.missing

    @property
    def may_be_id(self) -> bool:
        """False if the column cannot name persons: it has dates or amounts, or few values in many rows each."""
        is_few = len(self.values) <= _MOST_CATEGORIES and self.rows > _MOST_ROWS * len(self.values)
        return not is_few and self.kind not in ("date", "comma")

    @property
    def date_format(self) -> str | None:
        """The one usual date format that fits all values of the column; None if several or none fit."""
        plain = [value[:10] for value in self.values if value not in self.marks]
        fitting = [each for each in _DATE_FORMATS if all(_date(value, each) for value in plain)]
        return fitting[0] if len(fitting) == 1 else None

    @property
    def years(self) -> tuple[int, int]:
        """The first and the last year of the column's dates, as bounds. If all dates are of one year, the second number
        is the year after it."""
        form = self.date_format
        assert form is not None
        years = [date.year for value in self.values if (date := _date(value[:10], form))]
        return min(years), max(*years, min(years) + 1)

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest number, rounded outwards."""
        return outwards(self.low, self.high)

    @property
    def kind(self) -> str:
        """The likely kind of the column: `number`, `category`, `name` (of a record), `date`, `comma` (numbers with
        commas), `text`, `constant` or `empty`."""
        if not self.values:
            return "empty"
        if len(self.values) == 1:
            return "constant"
        plain = self.values.keys() - (self.marks.keys() if self.is_number else ())
        # Dates and amounts are checked before names of records, because each may differ in each row.
        if len(words := self.values.keys() - self.marks.keys()) > _MOST_CODES:
            if all(map(_DATE.match, words)):
                return "date"
            if any("," in word for word in words) and all(map(_AMOUNT.match, words)):
                return "comma"
        is_whole = all(re.fullmatch(r"[-+]?\d+", value) for value in plain)
        # A different value in each row suggests names of records; with few rows it may be chance.
        if not self.repeats and self.rows > _MOST_CODES and (is_whole or not self.is_number):
            return "name"
        # A few whole numbers are codes, and 0.5 and 1.5 may be classes; many different numbers are amounts.
        if self.is_number and math.isfinite(self.low + self.high):
            return "number" if len(plain) > (_MOST_CODES if is_whole else 2) else "category"
        return "category" if len(self.values) <= _MOST_CATEGORIES else "text"


def open_questions(text: str) -> int:
    """Return the number of lines in the ``text`` of a declaration that still ask the user a question (``# ?``), as a
    draft does."""
    return sum(QUESTION in line and not line.startswith(DRAFTED) for line in text.splitlines())


def draft_declaration(
    file: Path,
    public: Path | None,
    folder: Path,
    *,
    label: str | None = None,
    group: str | None = None,
    person: str | None = None,
    test: Path | None = None,
    intended_use: str | None = None,
    reads_private: bool = False,
) -> str:
    """Return a draft of a declaration from public records: YAML with a comment on each line, questions after ``# ?``.

    Only the header of the private ``file`` is read. Bounds are those of the ``public`` file, rounded outwards, and its
    categories are listed; both are questions, because private records may have others. Columns that look like names of
    records or free text are left out with a remark. A column whose values repeat as ids of persons do is asked about,
    whatever its name. Without a ``public`` file, every column is a question. Both files are below ``folder``, and may
    be folders of pictures.

    ``label``, ``group`` and ``person`` name columns; if None, they are guessed. The ``test`` file is listed, not read.
    ``intended_use``: what a model of the records is for; None: the draft asks.
    ``reads_private``: private rows are read too, for the classes of the label and for ids that repeat, never for bounds
    and categories; each such line asks the user to confirm it. :class:`DataError` for a file that cannot be
    read, :class:`DataSettingsError` for a column that does not exist.
    """
    kind = "a folder of pictures" if file.is_dir() else "a table"
    for option, given in (("public", public), ("test", test)):
        if given is not None and given.is_dir() != file.is_dir():
            raise DataSettingsError(
                f"--{option}: expected {kind}, as {file.name} is, got {given.name}; give the same kind."
            )
    if file.is_dir():
        return _draft_of_pictures(file, public, test, folder, intended_use=intended_use, reads_private=reads_private)
    layout = layout_of(public or file, with_rows=public is not None)
    columns = tables.column_names(file, file.name, layout)
    for option, column in (("label", label), ("group", group), ("person", person)):
        if column is not None and column not in columns:
            raise DataSettingsError(f"--{option}: {file.name} has no column {column}{nearest(column, columns)}.")
    seen, seen_private = (
        {} if each is None else _seen(each, layout) for each in (public, file if reads_private else None)
    )
    # If another sign separates the fields, a comma in a number is its decimal sign.
    has_decimal_comma = layout.separator not in (None, ",") and any(each.kind == "comma" for each in seen.values())
    if has_decimal_comma and public:
        seen = _seen(public, layout, [each for each in seen if seen[each].kind in ("comma", "number")])
    known = seen_private | seen
    free = [column for column in columns if column not in (group, person)]
    categories = [column for column in columns if column in seen and seen[column].kind == "category"]
    # Public records often lack the label: a column that they lack is likelier to be it than the last category.
    lacking = [column for column in free if column not in seen] if public else []
    labels = [column for column in free if _LABELS.match(column)]
    # Without public records only names tell; where none does, the label is often the last column.
    last = [each for each in reversed(free) if not any(like.search(each) for like in (_GROUPS, _PERSONS, _IDS))]
    likely = (*labels, *lacking, *([each for each in reversed(categories) if each in free] if public else last))
    label = label or next(iter(likely), None)
    candidates = categories if public else columns
    named = (each for each in candidates if _GROUPS.search(each) and each not in (label, person))
    group = group or next(named, None)
    others = [column for column in columns if column not in (label, group)]
    is_given = person is not None
    person_words = "all rows of one person have one value; the unit of splits"
    decisive = seen | seen_private
    traits = [column for column in decisive if column == group or decisive[column].kind == "category"]
    of_public, of_private = (
        {} if each is None else repeats_of(tables.read_batches(each, each.name, layout), traits)
        for each in (public, file if reads_private else None)
    )
    repeats = {column: each for column, each in (of_public | of_private).items() if column in others}
    # What is read decides before a name does: a customer's type, or a date, is no customer.
    named = (column for column in others if _PERSONS.search(column))
    person = person or next((each for each in named if each not in decisive or decisive[each].may_be_id), None)
    if person is None:
        # Repeated ids: many different values, each in few rows. Every trait of a person, such as a date of birth, has
        # at most as many values as the id.
        ids = (column for column in others if column in decisive and _IDS.search(column))
        person = next((column for column in ids if decisive[column].is_repeated_id), None)
        found = [column for column, each in repeats.items() if each.may_be_persons]
        person = person or max(found, key=lambda column: len(repeats[column].values), default=None)
        if person is not None:
            person_words = f"its values repeat: {person_words}"
            if not (person in seen and (seen[person].is_repeated_id or of_public[person].may_be_persons)):
                person_words = f"{_FROM_PRIVATE}. Its values repeat there: all rows of one person have one value"
    asked = [] if is_given else [each for each in repeats if each != person and repeats[each].may_be_persons]
    what = f"the {'rows' if reads_private else 'header'} of {file.name}"
    values = sorted(known[label].values) if label in known else []
    return _drafted(
        file,
        public,
        test,
        folder,
        source=f"from {public.name}, and {what}" if public else f"from {what}",
        intended_use=intended_use,
        separator=layout.separator,
        encoding=layout.encoding,
        has_decimal_comma=has_decimal_comma,
        label=label,
        classes=values if 2 <= len(values) <= _MOST_CATEGORIES else [],
        group=group,
        person=person,
        is_given=is_given,
        person_words=person_words,
        asked=asked,
        seen=seen,
        columns=columns,
        # In the order of the private file, which the user knows.
        rest=[column for column in columns if column not in (label, group, person)],
    )


def _seen(path: Path, layout: Layout, with_commas: Collection[str] = ()) -> dict[str, Seen]:
    """Return facts about every column of a file. In the columns ``with_commas`` the comma is the decimal sign."""
    seen: dict[str, Seen] = {}
    for batch in tables.read_batches(path, path.name, layout):
        for column in batch.column_names:
            text = tables.text_of(batch[column])
            seen.setdefault(column, Seen()).add(tables.with_decimal_points(text) if column in with_commas else text)
    return seen


def _drafted(file: Path, public: Path | None, test: Path | None, folder: Path, **facts: Any) -> str:
    """Return a drafted declaration: the template ``draft.txt``, filled in with ``facts`` about the columns of a table
    or the levels of folders."""
    import jinja2  # no other use of data needs it

    # Of a file or folder that is called after its part, such as private/, the folder above it names the data set.
    names = (file.name.partition(".")[0], file.absolute().parent.name, "my_data")
    own, *_ = plain = [re.sub("[^a-z0-9]+", "_", each.lower()).strip("_") for each in names]
    name = next(each for each in plain if each and each not in _NAMES_OF_PARTS)
    name = f"my_{name}" if name in REGISTRY else name
    is_table = "levels" not in facts
    words = jinja2.Environment(  # noqa: S701 - YAML, not HTML
        line_statement_prefix="%", keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    words.filters |= {"listed": _listed, "number": "{:.10g}".format, "quoted": _quoted, "sorted": sorted}
    words.filters["text"] = partial(json.dumps, ensure_ascii=False)
    return words.from_string(Path(__file__).with_name("draft.txt").read_text(encoding="utf-8")).render(
        facts,
        name=name if name[:1].isalpha() else f"data_{name}",
        is_named_by_file=name == own,
        private=_below(file, folder),
        public=public and _below(public, folder),
        test=test and _below(test, folder),
        file_name=file.name,
        public_name=public and public.name,
        is_table=is_table,
        records="records" if is_table else "pictures",
        suffix=".csv" if is_table else "",
        from_private=_FROM_PRIVATE,
        most_categories=_MOST_CATEGORIES,
        iso_date=ISO_DATE,
    )


def _date(text: str, form: str) -> datetime.date | None:
    try:
        return datetime.datetime.strptime(text, form).date()
    except ValueError:
        return None


def layout_of(file: Path, *, with_rows: bool) -> Layout:
    """Return the likely layout of a table: the separator that splits the header into most fields, and the encoding.

    For a file format with column types, such as Parquet, the separator is None. The encoding is that of a byte-order
    mark at the start, otherwise UTF-8, or cp1252 if the header (``with_rows``: any line) is not valid UTF-8.
    """
    if file.suffix in TYPED_SUFFIXES:
        return USUAL
    encoding = "utf-8"
    if ".gz" not in file.suffixes and file.is_file():
        with file.open("rb") as stream:
            encoding = tables.encoding_by_mark(stream.peek(4)) or encoding
            try:
                for line in stream if with_rows and encoding == "utf-8" else [stream.readline()]:
                    line.decode("utf-8")
            except UnicodeDecodeError:
                encoding = "cp1252" if encoding == "utf-8" else encoding
    layouts = (Layout(separator=each, encoding=encoding) for each in _SEPARATORS)
    return max(layouts, key=lambda layout: len(tables.column_names(file, file.name, layout)))


def _draft_of_pictures(
    file: Path,
    public: Path | None,
    test: Path | None,
    folder: Path,
    *,
    intended_use: str | None,
    reads_private: bool,
) -> str:
    """Return a drafted declaration for folders of pictures: each split is a folder, with pictures arranged as
    CLASS/GROUP/PICTURE."""
    if (file / "private").is_dir():  # its folders would be read as classes
        others = [f" --{each} {file / name}" for each, name in (("public", "pool"), ("test", "test"))]
        there = [words for words, name in zip(others, ("pool", "test"), strict=True) if (file / name).is_dir()]
        raise DataSettingsError(
            f"{file}: has a folder `private`, so its folders are parts of the records and not classes; name each part, "
            f"as in `fairpate data declare {file / 'private'}{''.join(there)}`."
        )
    # The names of the folders between a folder and its pictures, by level.
    own, pool = (
        [set(table[name].to_pylist()) for name in table.column_names if name.startswith(LEVEL)] if table else []
        for table in (each and folder_table(each, each) for each in (file if reads_private else None, public))
    )
    levels = []
    parts = ("label", "classes", ["no", "yes"]), ("group", "values", ["a", "b"])
    for place, (what, values, names) in enumerate(parts):
        asks = "which?"
        for found, question in ((own, f"{_FROM_PRIVATE}. Are these all?"), (pool, "are these all?")):
            if len(found) > place and len(found[place]) >= 2:
                names, asks = sorted(found[place]), question
        levels.append((what, values, names, asks))
    return _drafted(
        file, public, test, folder, source="for folders of pictures", intended_use=intended_use, levels=levels
    )


def outwards(low: float, high: float) -> tuple[float, float]:
    """Return bounds that contain ``low`` and ``high``, rounded outwards to two digits of their difference."""
    # A column with one value gets a range as wide as the value is large.
    width = high - low or abs(high) or 1.0
    step = 10.0 ** (math.floor(math.log10(width)) - 1)
    return float(f"{math.floor(low / step) * step:.10g}"), float(f"{math.ceil(high / step) * step:.10g}")


def _listed(values: Sequence[str] | dict[str, None]) -> str:
    return f"[{', '.join(map(_quoted, values))}]"


def _quoted(text: str | None) -> str:
    """Return ``text`` in the form for a YAML file: in quotes if YAML would read it as another value than this text."""
    assert text is not None
    return text if _PLAIN.match(text) and text == text.strip() else json.dumps(text, ensure_ascii=False)


def _below(path: Path, folder: Path) -> str:
    try:
        return _quoted(path.absolute().relative_to(folder.absolute()).as_posix())
    except ValueError:
        raise DataSettingsError(
            f"{path}: expected a file below {folder.absolute()}, where the declaration will be written; give -o in a "
            "folder above both files."
        ) from None
