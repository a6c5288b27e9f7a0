"""Data sets: read from the publisher's files, checked, divided and described.

Knows nothing of models or mechanisms, and fits nothing to private records.
"""

from fairpate.data.dataset import SPLIT_NAMES, Dataset, Split
from fairpate.data.declared.given import load_data
from fairpate.data.describe import DatasetDescription, DatasetListing, SplitDescription, describe, list_datasets
from fairpate.data.entry import DataError, DatasetEntry, Option, SourceFile
from fairpate.data.fetch import fetch
from fairpate.data.load import data_dir_of, load_dataset, pool_size
from fairpate.data.registry import REGISTRY, entry_for, find_entry, option_showing_attribute

__all__ = [
    "REGISTRY",
    "SPLIT_NAMES",
    "DataError",
    "Dataset",
    "DatasetDescription",
    "DatasetEntry",
    "DatasetListing",
    "Option",
    "SourceFile",
    "Split",
    "SplitDescription",
    "data_dir_of",
    "describe",
    "entry_for",
    "fetch",
    "find_entry",
    "list_datasets",
    "load_data",
    "load_dataset",
    "option_showing_attribute",
    "pool_size",
]
