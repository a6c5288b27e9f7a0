"""FairPATE: accurate, differentially private and fair classifiers from many teachers.

``__all__`` is the public interface; docs/python.md is its page. Names are imported when they are first used, so that
``import fairpate`` takes no time. Everything else may change between versions.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairpate.data import Dataset, load_data, load_dataset
    from fairpate.estimators import FairClassifier
    from fairpate.methods.base import (
        Method,
        PrivateMethod,
        Trained,
        Training,
        configured,
        find_method,
        load_method,
        method_names,
    )
    from fairpate.run.compare import compare_methods
    from fairpate.run.context import RunDirectory, read_statement
    from fairpate.run.folder import open_run_directory
    from fairpate.run.publication import write_card
    from fairpate.run.run import run_method
    from fairpate.run.specify import specify_guarantees
    from fairpate.run.sweep import read_rows
    from fairpate.terminal import Reporter

try:
    __version__ = version("fairpate")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"

_PLACES = {
    "fairpate.run.publication": ("write_card",),
    "fairpate.run.compare": ("compare_methods",),
    "fairpate.terminal": ("Reporter",),
    "fairpate.run.sweep": ("read_rows",),
    "fairpate.run.run": ("run_method",),
    "fairpate.run.context": ("RunDirectory", "read_statement"),
    "fairpate.run.folder": ("open_run_directory",),
    "fairpate.run.specify": ("specify_guarantees",),
    "fairpate.data": ("Dataset", "load_data", "load_dataset"),
    "fairpate.estimators": ("FairClassifier",),
    "fairpate.methods.base": (
        *("Method", "PrivateMethod", "Trained", "Training", "configured", "find_method", "load_method", "method_names"),
    ),
}
_PLACE_OF = {name: module for module, names in _PLACES.items() for name in names}
__all__ = [
    "Dataset",
    "FairClassifier",
    "Method",
    "PrivateMethod",
    "Reporter",
    "RunDirectory",
    "Trained",
    "Training",
    "__version__",
    "compare_methods",
    "configured",
    "find_method",
    "load_data",
    "load_dataset",
    "load_method",
    "method_names",
    "open_run_directory",
    "read_rows",
    "read_statement",
    "run_method",
    "specify_guarantees",
    "write_card",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _PLACE_OF:
        raise AttributeError(f"module 'fairpate' has no attribute {name!r}")
    value = getattr(import_module(_PLACE_OF[name]), name)
    globals()[name] = value
    return value
