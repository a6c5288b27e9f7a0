"""Makes ``import torchvision`` succeed beside a CPU-only torch; import it before torchvision.

The package index's torchvision is compiled against a CUDA build of torch. Beside another build its compiled
operators do not load, and the import fails because torchvision registers shape rules for two operators that do not
exist. Declaring the operators' schemas is enough for transforms, data sets and backbones, which never call them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_TORCH: Any = torch  # torch.library and torch.ops carry no types
_KEPT_ALIVE: list[Any] = []


def prepare_torchvision() -> None:
    """Declare the schemas of torchvision's compiled operators where the compiled library is missing or unusable."""
    if _KEPT_ALIVE or _compiled_operators_load():
        return
    library = _TORCH.library.Library("torchvision", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        if not hasattr(_TORCH.ops.torchvision, name):
            library.define(schema)
    _KEPT_ALIVE.append(library)  # the schemas live as long as the library object


def _compiled_operators_load() -> bool:
    """Whether torchvision's own extension registers its operators in this process."""
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return False
    for extension in Path(package.origin).parent.glob("_C.*"):
        try:
            _TORCH.ops.load_library(str(extension))
        except OSError:  # built against another torch
            return False
        return hasattr(_TORCH.ops.torchvision, "nms")
    return False
