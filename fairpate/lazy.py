"""Lazy imports of libraries that take seconds: each is imported when one of its attributes is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any


class Later:
    """A lazy import: an object that stands for a slow library. It imports the library when one of its attributes is
    first used.

    A module writes ``from fairpate.lazy import torch`` instead of ``import torch``, so that commands that do not need
    torch start sooner. This does not work for a module that uses a base class or a decorator of the library, because
    these are needed at once: such a module writes ``import torch``. Attributes are looked up at every use, so that a
    test may replace one in the library.
    """

    def __init__(self, library: str) -> None:
        self._library = library

    def __reduce__(self) -> tuple[Any, ...]:
        # Without it, unpickling looks for __setstate__ before `_library` is set, and __getattr__ calls itself forever.
        return Later, (self._library,)

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._library), name)


if TYPE_CHECKING:
    import pyarrow.dataset
    import safetensors.torch
    import sklearn as sklearn
    import torch as torch
    from torch.nn import functional as functional

    arrow_dataset, safetensors_torch = pyarrow.dataset, safetensors.torch
else:
    arrow_dataset = Later("pyarrow.dataset")
    functional = Later("torch.nn.functional")
    safetensors_torch = Later("safetensors.torch")
    sklearn = Later("sklearn")
    torch = Later("torch")
