"""FairPATE: accurate, differentially private and fair classifiers from many teachers.

``__all__`` is the public interface, which docs/python.md describes; other names may change between versions. Each name
is imported when it is first used, so that ``import fairpate`` takes no time.
"""

import ast
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

try:
    __version__ = version("fairpate")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"

# Plain names, which a file of the user's own may have too. Known by a module each, and not by their place: Ray sends
# packages to its workers one by one, into folders of their own.
for _name, _module in {"aggregator": "ledger.py", "student": "card.py", "teachers": "ray_pool.py"}.items():
    _spec = find_spec(_name)
    _found = None if _spec is None else _spec.origin or next(iter(_spec.submodule_search_locations or ()), None)
    if _found is None or not Path(_found).with_name(_module).is_file():
        raise ImportError(
            f"FairPATE needs its own package {_name}, and Python finds {_found or 'none'}; rename the one found, take "
            "its folder out of PYTHONPATH, or install fairpate again."
        )

# The stub next to this file is the only list of public names, for type checkers and for __getattr__.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULE_OF = {name.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for name in node.names}
__all__ = ["__version__", *_MODULE_OF]


def __dir__() -> list[str]:
    """Return the public names, so that an editor can suggest them before they are imported."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import the public name ``name`` when it is first used, and return it. AttributeError for any other name."""
    if (module := _MODULE_OF.get(name)) is None:
        raise AttributeError(f"module 'fairpate' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value
