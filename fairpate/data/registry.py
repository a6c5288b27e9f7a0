"""Which data sets there are: find, fetch, load and describe one, or take one from memory.

Every data set the project knows, by name: the loaders of pictures, and the tables that `codebooks/` declares.

From a configuration to a data set: look up, read, divide, check.

The loaders scale by public constants and the division looks only at record names. Nothing is fitted to private records,
and to public ones only where an embedding is asked for.

What a data set holds, as plain records for a table, a report or JSON.

Counts are exact and cover private records too: they are for those who may see the data, and never belong under
`public/`.

A declared data set from Python: its files, or tables that the caller holds, read by the same declaration.

Files from their publishers, checked before they are kept.

A download goes to a temporary name, its sha256 is compared with the pinned one, and only then it takes its place; a
damaged or interrupted download leaves nothing behind. Data sets behind a registration are not downloaded: the error
says what to do. Progress is a bar on a terminal and plain lines in a log.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from fairpate.config import DataConfig, nearest
from fairpate.config_reader import parse_config
from fairpate.data.dataset import (
    DataError,
    Dataset,
    DatasetEntry,
    DataSettingsError,
    FeatureKind,
    LoadedRecords,
    Part,
    Request,
    SourceFile,
    Split,
    SplitSizes,
    check_archive,
    check_members,
    check_persons,
    default_size,
    divide,
    find,
    how_to_get,
    locate,
    read_bytes,
    sha256_of,
    with_persons,
)
from fairpate.data.declaration import PARTS, Declaration, entry_of, parse_declaration, read_declaration, read_values
from fairpate.data.embedding import embedded, with_features
from fairpate.data.large_arrays import as_names
from fairpate.data.published_pictures import CELEBA, CHEXPERT, COLOR_DIGITS, COLOR_MNIST, FAIRFACE, UTKFACE
from fairpate.later import torch

CODEBOOKS = Path(__file__).with_name("codebooks")
_PICTURES = (COLOR_DIGITS, COLOR_MNIST, UTKFACE, FAIRFACE, CELEBA, CHEXPERT)


class Registry(Mapping[str, DatasetEntry]):
    """The loaders of pictures, and a table for each YAML file in ``folder``, read when it is first asked for.

    A file is called as the data set that it declares; :class:`DataSettingsError` where it is not, or is wrong.
    """

    def __init__(self, folder: Path) -> None:
        self._entries: dict[str, DatasetEntry] = {entry.name: entry for entry in _PICTURES}
        self._files = {path.stem: path for path in sorted(folder.glob("*.yaml"))}

    def __getitem__(self, name: str) -> DatasetEntry:
        if name not in self._entries:
            path = self._files[name]
            entry = entry_of(read_declaration(path))
            if entry.name != name:
                raise DataSettingsError(f"{path}: name: expected {name}, as the file is called, got {entry.name}.")
            self._entries[name] = entry
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*(entry.name for entry in _PICTURES), *self._files)))

    def __len__(self) -> int:
        return len(list(iter(self)))


REGISTRY: Mapping[str, DatasetEntry] = Registry(CODEBOOKS)


def option_showing_attribute(name: str, options: Mapping[str, Any], entry: DatasetEntry | None = None) -> str | None:
    """The option of data set ``name`` that makes the sensitive attribute a feature; None where none does.

    ``entry`` is that of a declared table. What else may be wrong with the name or the options is not this function's to
    say.
    """
    known = entry.options if entry is not None else REGISTRY[name].options if name in REGISTRY else {}
    for option, choice in known.items():
        if choice.shows_attribute is not None and options.get(option, choice.default) == choice.shows_attribute:
            return option
    return None


def entry_for(config: DataConfig) -> DatasetEntry:
    """The entry that ``config`` means: of a known data set, or of the declaration that it names.

    :class:`DataSettingsError` for an unknown name, a declaration that is wrong or not the one that was configured.
    """
    if config.declaration is None:
        return find_entry(config.name)
    path, entry = config.declaration.path, entry_of(read_declaration(config.declaration.path))
    if sha256_of(path) != config.declaration.sha256:
        raise DataSettingsError(f"data.declaration: {path} has changed since; restore it, or start a new run folder.")
    if entry.name in REGISTRY:
        raise DataSettingsError(f"{path}: name: {entry.name} is a known data set; give the table another name.")
    if entry.name != config.name:
        raise DataSettingsError(f"data.name: expected {entry.name}, as {path} says, got {config.name}.")
    return entry


def find_entry(name: str) -> DatasetEntry:
    """The entry called ``name``; :class:`DataError` with the nearest known name."""
    if name not in REGISTRY:
        raise DataSettingsError(f"data.name: unknown data set {name!r}{nearest(name, REGISTRY)}.")
    return REGISTRY[name]


def dataset_of(loaded: LoadedRecords, config: DataConfig, entry: DatasetEntry) -> Dataset:
    """The records of ``entry`` as ``config`` asks for them, in four splits; errors as :func:`load_data`."""
    options = entry.complete_options(config.options)
    records = with_features(loaded, options.get("features", "pixels"))
    _check_names(records)
    records = with_persons(records) if config.unit is None else records
    splits: dict[str, Any] = divide(records, _sizes(config, entry, records), seed=config.seed)
    check_persons(splits)
    # Under some options alone, or always: then there are names.
    names_persons = bool(entry.persons_when) or records.person_ids is not None
    dataset = Dataset(
        name=entry.name,
        kind=records.kind,
        label_names=records.label_names,
        group_names=records.group_names,
        sensitive_attribute=records.sensitive_attribute,
        feature_names=records.feature_names,
        notes=records.notes,
        feature_codes=records.feature_codes,
        records_alone=names_persons and not splits["private"].person_id,
        **splits,
    )
    check_members(dataset)
    return embedded(dataset, config.embedding)


def pool_size(config: DataConfig) -> int:
    """How many public records there will be about, without a look at private ones."""
    entry = entry_for(config)
    size = entry.num_public if config.num_public is None else config.num_public
    if size is None:
        assert entry.count_public is not None
        size = entry.count_public(request_of(config, entry))
    return size


def request_of(config: DataConfig, entry: DatasetEntry) -> Request:
    """What the loader of ``entry`` is asked for."""
    options = entry.complete_options(config.options)
    return Request(data_dir=data_dir_of(config), seed=config.seed, options=options, unit=config.unit)


def data_dir_of(config: DataConfig) -> Path | None:
    """Where the files lie: as configured, or beside a declaration; None asks the environment."""
    if config.data_dir is not None or config.declaration is None:
        return config.data_dir
    return config.declaration.path.parent


def _sizes(config: DataConfig, entry: DatasetEntry, records: LoadedRecords) -> SplitSizes:
    """As configured, and what the data set says of the others."""
    given = {split: getattr(config, f"num_{split}") for split in ("public", "validation", "test")}
    return SplitSizes(
        **{
            f"num_{split}": default_size(split, entry, records) if size is None else size
            for split, size in given.items()
        }
    )


def _check_names(records: LoadedRecords) -> None:
    if len(records.records) == 0:
        raise DataError("No record is left; check the data set's options and the publisher's file.")
    names = as_names(records.records.record_id)
    copies = names.repeated()
    if len(copies):
        name = Counter(names.take(copies)).most_common(1)[0][0]
        raise DataError(
            f"Expected a name for each record, got {len(copies):,} that are those of others, such as {name!r}; remove "
            "the copies, also those in other files, or name records by more columns (identity.key)."
        )


@dataclass(frozen=True, kw_only=True)
class DatasetListing:
    """One line of the list of data sets; ``present`` says whether the needed files lie in the data folder."""

    entry: DatasetEntry
    present: bool


@dataclass(frozen=True, kw_only=True)
class SplitDescription:
    """Records of one split, and ``counts_GC[g][k]`` of group g and class k; ``unlabelled_G`` have no class."""

    name: str
    records: int
    counts_GC: tuple[tuple[int, ...], ...]
    unlabelled_G: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DatasetDescription:
    """One loaded data set in words and counts; ``record_shape`` is that of one record's features."""

    name: str
    kind: FeatureKind
    record_shape: tuple[int, ...]
    label_names: tuple[str, ...]
    group_names: tuple[str, ...]
    sensitive_attribute: str
    feature_names: tuple[str, ...]
    notes: tuple[str, ...]
    splits: tuple[SplitDescription, ...]


def list_datasets(data_dir: Path | None = None) -> tuple[DatasetListing, ...]:
    """Every data set the project reads; without a ``data_dir`` only embedded ones are present."""
    return tuple(DatasetListing(entry=entry, present=_is_present(entry, data_dir)) for entry in REGISTRY.values())


def describe(dataset: Dataset | DataConfig | str) -> DatasetDescription:
    """Shapes, words and counts of a data set; a name or a configuration is loaded first."""
    if isinstance(dataset, str):
        dataset = DataConfig(name=dataset)
    if isinstance(dataset, DataConfig):
        dataset = load_data(dataset)
    return DatasetDescription(
        name=dataset.name,
        kind=dataset.kind,
        record_shape=tuple(dataset.private.x.shape[1:]),
        label_names=dataset.label_names,
        group_names=dataset.group_names,
        sensitive_attribute=dataset.sensitive_attribute,
        feature_names=dataset.feature_names,
        notes=dataset.notes,
        splits=tuple(_describe_split(name, split, dataset) for name, split in dataset.splits.items()),
    )


def _describe_split(name: str, split: Split, dataset: Dataset) -> SplitDescription:
    num_groups, num_classes = dataset.num_groups, dataset.num_classes
    cells = (split.z * num_classes + split.y)[split.y >= 0]  # public records may lack a label
    flat = torch.bincount(cells, minlength=num_groups * num_classes)
    counts = flat.reshape(num_groups, num_classes).tolist()
    unlabelled = torch.bincount(split.z[split.y < 0], minlength=num_groups).tolist()
    return SplitDescription(
        name=name,
        records=len(split),
        counts_GC=tuple(tuple(row) for row in counts),
        unlabelled_G=tuple(unlabelled),
    )


def _is_present(entry: DatasetEntry, data_dir: Path | None) -> bool:
    return all(data_dir is not None and find(file, data_dir) is not None for file in entry.needed_files({}))


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
    """A data set in four splits: one that the project reads by its name, or one of your own by its declaration.

    Args:
        source: The section `data` of a configuration; or a declaration (docs/data.md), as the path of a YAML file or
            as a dictionary.
        records, private, public, validation, test: Tables to read instead of the files of a declaration: a pandas or
            polars frame, a :class:`pyarrow.Table`, or a dictionary of columns. ``records`` are divided, or ``private``
            and ``public`` are given, as in `files`.
        data_dir: Where the files of a declaration lie; None: beside its YAML file.
        settings: Fields of the section `data` for a declaration: ``seed``, ``options``, ``num_public``,
            ``num_validation``, ``num_test``, ``embedding``.

    Raises:
        DataError: Before any training, where a name, an option or a size is impossible, a file is missing or damaged,
            a column or category is unknown, or a split lacks a group; of a declaration every fault with its remedy.

    Example::

        dataset = fairpate.load_data("hospital.yaml", private=patients, public=pool)
        config = fairpate.configured({"target": {"epsilon": 1}}, method="weighted_votes")
        run = fairpate.run_method(config, fairpate.Reporter(), dataset)
    """
    if isinstance(source, DataConfig):
        entry = entry_for(source)
        return replace(dataset_of(entry.load(request_of(source, entry)), source, entry), source=source)
    parts: dict[Part, Any] = dict(zip(PARTS, (records, private, public, validation, test), strict=True))
    given = {part: as_table(frame, part) for part, frame in parts.items() if frame is not None}
    table = _declared(source, list(given))
    entry = entry_of(table)
    config = parse_config({"name": table.name, "data_dir": data_dir} | settings, DataConfig)
    beside = None if isinstance(source, Mapping) else Path(source).expanduser().absolute().parent
    request = Request(
        data_dir=config.data_dir or beside,
        seed=config.seed,
        options=entry.complete_options(config.options),
        tables=given or None,
        unit=config.unit,
    )
    return dataset_of(entry.load(request), config, entry)


def as_table(frame: Any, part: str) -> pa.Table:
    """A frame, a table or a dictionary of columns as an Arrow table."""
    try:
        if isinstance(frame, pa.Table):
            return frame
        if isinstance(frame, Mapping):
            return pa.table({str(name): pa.array(np.asarray(column)) for name, column in frame.items()})
        if hasattr(frame, "to_arrow"):
            return frame.to_arrow()
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, AttributeError, TypeError, ValueError) as error:
        raise DataSettingsError(
            f"{part}: expected a frame, a pyarrow.Table or a dictionary of columns of one length, got "
            f"{type(frame).__name__} ({error})."
        ) from error


def _declared(declaration: str | Path | Mapping[str, Any], parts: list[Part]) -> Declaration:
    """The declaration; of given tables, ``parts`` stand in the place of its files."""
    if isinstance(declaration, Mapping):
        values, where = _as_text(dict(declaration)), "declaration"
    elif isinstance(declaration, (str, Path)):
        values, where = read_values(Path(declaration)), str(declaration)
    else:
        raise DataSettingsError(
            f"declaration: expected the path of a YAML file or a dictionary, got {type(declaration).__name__}."
        )
    if parts:
        values["files"] = {part: part for part in parts}
    return parse_declaration(values, where)


def _as_text(value: Any) -> Any:
    """What a YAML file would say: every value as text."""
    if isinstance(value, Mapping):
        return {_as_text(name): _as_text(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_text(each) for each in value]
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value)).lower()
    return value if value is None else str(value)


TIMEOUT_S = 60.0
CHUNK_BYTES = 1 << 18
# Else a server may compress on the way, httpx unpacks, and the bytes are not those of the checksum.
AS_PUBLISHED = {"accept-encoding": "identity"}
LINES_PER_FILE = 10


def fetch(
    name: str, data_dir: Path, *, options: Mapping[str, Any] | None = None, console: Console | None = None
) -> tuple[Path, ...]:
    """Download what data set ``name`` needs into ``data_dir`` and return the paths of its files.

    A file that is there and undamaged is kept. :class:`DataError` names the address, the file and the folder to put
    it into where it cannot be downloaded, arrives damaged, or needs a registration (said before anything starts).
    """
    console = console or Console(stderr=True)
    files = find_entry(name).needed_files(options or {})
    missing = [file for file in files if not _is_there(file, data_dir)]
    by_hand = [how_to_get(file, data_dir) for file in missing if file.url is None]
    if by_hand:
        raise DataError(
            f"{name} cannot be fetched without its publisher's consent. " + " ".join(dict.fromkeys(by_hand))
        )
    for file in missing:
        _download(file, data_dir, console)
    return tuple(locate(file, data_dir)[1] for file in files)


def _is_there(file: SourceFile, data_dir: Path) -> bool:
    found = find(file, data_dir)
    if found is None:
        return False
    choice, path = found
    # The checksum is of the published bytes: a gzipped copy has to be unpacked for it.
    if path.name == Path(choice.path).name and path.is_file():
        check_archive(choice, path)
    elif path.is_file():
        read_bytes(choice, data_dir)
    return True


def _download(file: SourceFile, data_dir: Path, console: Console) -> None:
    target = data_dir / file.path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # On the file system of the target, so that its place is taken in one step.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            partial = Path(scratch) / target.name
            _stream(file, partial, console)
            content = partial if file.member is None else _extract(file, partial)
            found = sha256_of(content)
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
    console.print(f"{target.name}: kept, sha256 {found}", highlight=False)


def _stream(file: SourceFile, partial: Path, console: Console) -> None:
    assert file.url is not None
    with (
        httpx.stream("GET", file.url, headers=AS_PUBLISHED, follow_redirects=True, timeout=TIMEOUT_S) as response,
        partial.open("wb") as stream,
    ):
        response.raise_for_status()
        total = int(response.headers.get("content-length", 0)) or None
        with _progress(Path(file.path).name, total, console) as advance:
            for chunk in response.iter_bytes(CHUNK_BYTES):
                stream.write(chunk)
                advance(len(chunk))


def _extract(file: SourceFile, archive: Path) -> Path:
    """The wanted member of a downloaded archive, beside it."""
    assert file.member is not None
    member = archive.with_name("member")
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(file.member) as source, member.open("wb") as stream:
            shutil.copyfileobj(source, stream)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataError(f"{file.url}: expected a zip archive with {file.member} in it ({error}); try again.") from error
    return member


@contextmanager
def _progress(name: str, total: int | None, console: Console) -> Iterator[Callable[[int], None]]:
    """A function that is told of every chunk's bytes, and shows them."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(name, total=total)
            yield lambda count: progress.advance(task, count)
        return
    done = 0
    printed = 0

    def advance(count: int) -> None:
        nonlocal done, printed
        done += count
        step = LINES_PER_FILE * done // total if total else 0
        if step > printed:
            printed = step
            console.print(f"{name}: {100 * done // (total or done)} % of {total} bytes", highlight=False)

    yield advance
