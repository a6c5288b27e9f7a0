"""Data sets: read from the publisher's files, checked, divided and described.

This package knows nothing of models or mechanisms, and fits nothing to private records.
"""

from fairpate.data.dataset import SPLIT_NAMES, Dataset, DatasetEntry, Option, SourceFile, Split
from fairpate.data.registry import (
    REGISTRY,
    DatasetDescription,
    DatasetListing,
    SplitDescription,
    describe,
    entry_for,
    fetch,
    list_datasets,
    load_data,
    load_once,
    option_showing_attribute,
    pool_size,
    request_of,
)
from fairpate.types import DataError

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
    "describe",
    "entry_for",
    "fetch",
    "list_datasets",
    "load_data",
    "load_once",
    "option_showing_attribute",
    "pool_size",
    "request_of",
]
