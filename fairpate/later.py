"""Libraries that take a second to import, each imported when something of it is first used.

A module that only computes with torch in its functions writes ``from fairpate.later import torch`` in place of
``import torch``, so that commands that train nothing do not wait for it. Base classes and decorators are needed while a
module is imported: there, import the library itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any


class _Later:
    """Reads each attribute from the library and keeps none, so that a test may replace one there."""

    def __init__(self, library: str) -> None:
        self._library = library

    def __reduce__(self) -> tuple[Any, ...]:
        # Without it, unpickling looks for __setstate__ before `_library` is set, and __getattr__ calls itself forever.
        return _Later, (self._library,)

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._library), name)


if TYPE_CHECKING:
    import pyarrow.dataset as arrow_dataset
    import safetensors.torch as safetensors_torch
    import sklearn as sklearn
    import torch as torch
    from torch.nn import functional as functional
else:
    arrow_dataset = _Later("pyarrow.dataset")
    functional = _Later("torch.nn.functional")
    safetensors_torch = _Later("safetensors.torch")
    sklearn = _Later("sklearn")
    torch = _Later("torch")

__all__ = [
    "arrow_dataset",
    "functional",
    "safetensors_torch",
    "sklearn",
    "torch",
]
