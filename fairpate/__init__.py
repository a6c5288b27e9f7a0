"""FairPATE: accurate, differentially private and fair classifiers from many teachers.

``__all__`` is the public interface; docs/python.md is its page. Names are imported when they are first used, so that
``import fairpate`` takes no time. Everything else may change between versions.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairpate.app.compare.records_table import read_rows
    from fairpate.app.compare.report import compare_methods
    from fairpate.app.compare.specify import specify_guarantees
    from fairpate.app.publication.card import write_card
    from fairpate.app.run import run_method
    from fairpate.app.rundir import RunDirectory, open_run_directory, read_statement
    from fairpate.app.terminal.progress import Reporter
    from fairpate.data import Dataset, load_data, load_dataset
    from fairpate.estimators import FairClassifier
    from fairpate.methods import find_method, method_names
    from fairpate.methods.definition import Method, PrivateMethod, Training
    from fairpate.methods.load import configured, load_method
    from fairpate.methods.trained import Trained

try:
    __version__ = version("fairpate")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"

_PLACES = {
    "fairpate.app.publication.card": ("write_card",),
    "fairpate.app.compare.report": ("compare_methods",),
    "fairpate.app.terminal.progress": ("Reporter",),
    "fairpate.app.compare.records_table": ("read_rows",),
    "fairpate.app.run": ("run_method",),
    "fairpate.app.rundir": ("RunDirectory", "open_run_directory", "read_statement"),
    "fairpate.app.compare.specify": ("specify_guarantees",),
    "fairpate.data": ("Dataset", "load_data", "load_dataset"),
    "fairpate.estimators": ("FairClassifier",),
    "fairpate.methods": ("find_method", "method_names"),
    "fairpate.methods.definition": ("Method", "PrivateMethod", "Training"),
    "fairpate.methods.load": ("configured", "load_method"),
    "fairpate.methods.trained": ("Trained",),
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
