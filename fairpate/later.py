"""Libraries that take a second to import, each imported when something of it is first used.

``from fairpate.later import torch`` stands for ``import torch`` where a module only computes with it, so that commands
which train nothing do not wait for it. Base classes and decorators are needed while a module is imported: there, import
the library itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any


class _Later:
    """Reads each attribute from the library, nothing being kept: a test may replace one there."""

    def __init__(self, library: str, *parts: str) -> None:
        self._library, self._parts = library, parts

    def __reduce__(self) -> tuple[Any, ...]:
        # Else unpickling would look for __setstate__ before `_parts` is there, and __getattr__ call itself for ever.
        return _Later, (self._library, *self._parts)

    def __getattr__(self, name: str) -> Any:
        for part in self._parts:
            import_module(f"{self._library}.{part}")
        return getattr(import_module(self._library), name)


if TYPE_CHECKING:
    import dp_accounting as dp_accounting
    import pyarrow.dataset as arrow_dataset
    import safetensors.torch as safetensors_torch
    import sklearn as sklearn
    import torch as torch
    from torch.nn import functional as functional
else:
    arrow_dataset = _Later("pyarrow.dataset")
    dp_accounting = _Later("dp_accounting")
    functional = _Later("torch.nn.functional")
    safetensors_torch = _Later("safetensors.torch")
    sklearn = _Later("sklearn")
    torch = _Later("torch")

__all__ = [
    "arrow_dataset",
    "dp_accounting",
    "functional",
    "safetensors_torch",
    "sklearn",
    "torch",
]
