"""Data sets: read from the publisher's files, checked, divided and described.

This package knows nothing of models or mechanisms, and fits nothing to private records.
"""

from fairpate.data.dataset import SPLIT_NAMES, Dataset, DatasetEntry, SourceFile, Split
from fairpate.data.registry import (
    REGISTRY,
    DatasetDescription,
    describe,
    entry_for,
    fetch,
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
    "SourceFile",
    "Split",
    "describe",
    "entry_for",
    "fetch",
    "load_data",
    "load_once",
    "option_showing_attribute",
    "pool_size",
    "request_of",
]
