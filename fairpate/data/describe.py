"""What a data set holds, as plain records for a table, a report or JSON.

Counts are exact and cover private records too: they are for those who may see the data, and never belong under
`public/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fairpate.config import DataConfig
from fairpate.data.dataset import Dataset, FeatureKind, Split
from fairpate.data.entry import DatasetEntry
from fairpate.data.files import find
from fairpate.data.load import load_dataset
from fairpate.data.registry import REGISTRY
from fairpate.later import torch


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
        dataset = load_dataset(dataset)
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
