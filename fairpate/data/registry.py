"""Data sets by name: find, fetch, load and describe them, or take one from memory.

The project has loaders of pictures, and tables that the YAML files in `codebooks/` declare; a user's records are
declared the same way. Loaders scale by public constants, and the division into splits uses only record names. Nothing
is fitted to private records, and to public ones only if an embedding is configured (:func:`embedded`).

Descriptions count private records exactly: they are for people who may see the data, never for `public/`.

One table is made here from a fixed seed: applications for loans by invented customers (:func:`applications`).
"""

import hashlib
import itertools
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fairpate.config import DataConfig, EmbeddingConfig, nearest, parse_config, read_yaml
from fairpate.data import dataset as datasets
from fairpate.data import table_files
from fairpate.data.columns import HASHED, even_records
from fairpate.data.dataset import (
    BeforeEmbedding,
    Dataset,
    DatasetEntry,
    Described,
    LoadedRecords,
    Part,
    Request,
    SourceFile,
    find,
)
from fairpate.data.declaration import PARTS, entry_of, read_declaration, read_records
from fairpate.data.embedding import Embedding
from fairpate.data.features import encoder_of, with_features
from fairpate.data.given import as_table
from fairpate.data.large_arrays import Names
from fairpate.data.overlap import require_apart
from fairpate.data.pictures import LOADERS, facts_of
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


@cache
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
                name = _files_of_test_records().get(datasets.sha256_of(path, unpack=path.suffix == ".gz"))
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
        if records.is_from(datasets.SET_ASIDE["test"] | datasets.SET_ASIDE["validation"]).any():
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


_EXAMPLES = 256
_MADE_UP, _REPLACED = 400, 4  # records without public ones, and how many each public record replaces


def embedded(dataset: Dataset, embedding: Embedding | EmbeddingConfig | None) -> Dataset:
    """Return the data set with the features of every split replaced by coordinates, from the given ``embedding`` or
    from one that is fitted to the public records; unchanged if ``embedding`` is None.

    If there are few public records and every feature is a declared number or category, made-up records are added to
    them (:func:`completed_pool`). DataSettingsError if there is no public or made-up record to fit an embedding to.
    """
    if embedding is None:
        return dataset
    pool = completed_pool(dataset)
    if isinstance(embedding, EmbeddingConfig):
        if not len(pool):
            raise DataSettingsError(
                f"data.embedding: {dataset.name} has no public records to fit an embedding to, and some features lack "
                "declared bounds or categories; name a file of public records (files.public), raise data.num_public, "
                "or set data.embedding to null."
            )
        embedding = Embedding.of(pool, embedding, parts=_parts(dataset))
    splits: dict[str, Any] = {name: replace(split, x=embedding(split.x)) for name, split in dataset.splits.items()}
    names = tuple(f"coordinate {e}" for e in range(splits["public"].x.shape[1]))
    # A copy: a view of a few records would keep all of the pool in memory.
    before = BeforeEmbedding(examples=pool[:_EXAMPLES].clone(), feature_names=dataset.feature_names)
    return replace(dataset, kind="tabular", feature_names=names, embedding=embedding, before_embedding=before, **splits)


def _parts(dataset: Dataset) -> tuple[int, ...]:
    """Return the lengths of the vectors that make up a record, if records are vectors of an encoder or contain hashed
    text; empty for others."""
    size = dataset.public.x.shape[-1]
    if dataset.encoder is not None:
        return dataset.encoder.parts(size)
    codes = dataset.feature_codes
    if not any(code.kind == HASHED for code in codes):
        return ()
    # Each column of text is a part, and so are the columns between them together.
    runs = itertools.groupby(codes, key=lambda code: code.column if code.kind == HASHED else "")
    return tuple(len([*run]) for _, run in runs)


def completed_pool(dataset: Dataset) -> "torch.Tensor":
    """Return the public records (M, ...) of ``dataset``, to which an embedding is fitted. If a declared table has fewer
    than 100 of them, made-up records are added.

    The embedding then covers every declared column, and adapts to the public records that exist.
    """
    pool, codes = dataset.public.x, dataset.feature_codes
    # The numbers of a vector have no declared bounds, and no declaration says what a text is.
    count = _MADE_UP - _REPLACED * len(pool)
    if count <= 0 or not codes or any(code.kind in ("element", HASHED) for code in codes):
        return pool
    return torch.cat([pool, torch.from_numpy(even_records(codes, count))])


def _declared_units(config: DataConfig, entry: DatasetEntry, unit: Unit) -> int | None:
    """Return the declared number of protected units; None if none is declared, or only the number of records although
    persons are protected."""
    try:
        count, counted = entry.protected(config.options, config.unit)
    except DataSettingsError:
        return None
    return count if counted == unit else None


def declared_units(config: DataConfig) -> tuple[int | None, Unit]:
    """Return the declared number of protected units of the data set that ``config`` describes, which is public, and
    their kind, without reading any record; the number is None as in :attr:`Dataset.declared_units`."""
    entry = entry_for(config)
    path = declaration_path(config)
    persons = entry.persons is not None  # of pictures, which have a loader
    if path.exists():
        persons = read_declaration(path).persons(entry.complete_options(config.options)) is not None
    unit: Unit = "person" if persons and config.unit is None else "record"
    return _declared_units(config, entry, unit), unit


def declaration_path(config: DataConfig) -> Path:
    """Return the path of the declaration of the data set that ``config`` describes, the user's own or one of ours; the
    file does not exist for a data set with a loader of its own."""
    return CODEBOOKS / f"{config.name}.yaml" if config.declaration is None else config.declaration.path


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


def describe(dataset: Dataset) -> DatasetDescription:
    """Return the shape, names and record counts of a data set."""
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
    paths += [each for path in paths for each in (path.rglob("*") if path.is_dir() else [table_files.array_of(path)])]
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
            datasets.check_file(*found)
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
