"""From a configuration to a data set: look up, read, divide, check.

The loaders scale by public constants and the division looks only at record names. Nothing is fitted to private records,
and to public ones only where an embedding is asked for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairpate.config import DataConfig
from fairpate.data.dataset import Dataset
from fairpate.data.embedding import embedded
from fairpate.data.entry import DataError, DatasetEntry, Records, Request
from fairpate.data.gradients import with_features
from fairpate.data.record_names import as_names
from fairpate.data.registry import entry_for
from fairpate.data.splits import SplitSizes, check_members, check_persons, default_size, divide, with_persons


def load_dataset(config: DataConfig) -> Dataset:
    """The data set that ``config`` names, in four splits.

    :class:`DataError` before any training where the name, an option or a size is impossible, a file is missing or
    damaged, a column or category is unknown, or a split lacks a group.
    """
    entry = entry_for(config)
    return replace(dataset_of(entry.load(request_of(config, entry)), config, entry), source=config)


def dataset_of(loaded: Records, config: DataConfig, entry: DatasetEntry) -> Dataset:
    """The records of ``entry`` as ``config`` asks for them, in four splits; errors as :func:`load_dataset`."""
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


def _sizes(config: DataConfig, entry: DatasetEntry, records: Records) -> SplitSizes:
    """As configured, and what the data set says of the others."""
    given = {split: getattr(config, f"num_{split}") for split in ("public", "validation", "test")}
    return SplitSizes(
        **{
            f"num_{split}": default_size(split, entry, records) if size is None else size
            for split, size in given.items()
        }
    )


def _check_names(records: Records) -> None:
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
