"""Data sets: read from the publisher's files, checked, divided and described.

This package knows nothing of models or mechanisms, and fits nothing to private records.
"""

from fairpate.data.dataset import Dataset, Split
from fairpate.data.registry import REGISTRY, describe, entry_for, load_data, load_once
from fairpate.types import DataError

__all__ = ["REGISTRY", "DataError", "Dataset", "Split", "describe", "entry_for", "load_data", "load_once"]
