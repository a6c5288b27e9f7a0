"""Weights to start from: torchvision's own state dicts, found, checked by sha256 and read.

Knows the three backbones by torchvision's names of their tensors, and nothing of private data: a file is public, or at
least was learned from other records. Every process reads a file once, from the same path on every node; what it reads
has the checksum that the configuration was pinned to, so two nodes never start from different weights.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from fairpate.config import BACKBONES, ModelConfig, WeightsConfig
from fairpate.nn.torchvision_compat import prepare_torchvision
from fairpate.types import UserError

HEAD_OF = {"resnet18": "fc", "resnet50": "fc", "densenet121": "classifier"}
_PUBLISHED = "IMAGENET1K_V1"
_PARAMETER_FREE = "num_batches_tracked"
# Published DenseNet files still name `norm.1` what is `norm1` today.
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
_SHOWN = 3


class WeightsError(UserError, ValueError):
    """A weights file that a model cannot start from; the message names the field, the file and the remedy."""


def pin_weights(config: ModelConfig) -> ModelConfig:
    """``config`` with the path and checksum of its weights: `imagenet` becomes the file in torch's hub folder.

    WeightsError where that file has to be downloaded and cannot be.
    """
    if config.weights is None or not config.weights.is_imagenet:
        return config
    path = imagenet_file(config.name)
    return config.model_copy(update={"weights": WeightsConfig(path=path, sha256=config.weights.sha256)})


def imagenet_file(name: str) -> Path:
    """torchvision's file of ImageNet weights for a backbone, downloaded where torch's hub folder does not have it."""
    prepare_torchvision()
    from torchvision.models import get_model_weights

    url: str = get_model_weights(name)[_PUBLISHED].url
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:  # the file's name ends with the first digits of its checksum
            torch.hub.download_url_to_file(url, str(path), hash_prefix=path.stem.rpartition("-")[2], progress=False)
        except (OSError, RuntimeError) as error:
            raise WeightsError(
                f"model.weights: imagenet: {url} cannot be downloaded ({error}); fetch it where there is a network and "
                f"put it at {path}, or give the path of your copy."
            ) from error
    return path


def load_weights(config: ModelConfig) -> Mapping[str, Tensor]:
    """Tensors by torchvision's names, without the head and complete otherwise; for ``config.weights`` not null.

    WeightsError for a file that is missing, has another checksum, or is not one of this architecture.
    """
    weights = pin_weights(config).weights
    if weights is None or weights.path is None or weights.sha256 is None:
        raise WeightsError("model.weights.path: none; a published model keeps its start's sha256 only. Give the file.")
    return _read(config.name, weights.path, weights.sha256)


# With the checksum in the key: what is kept had it, and another one is asked of the file anew.
@lru_cache(maxsize=1)
def _read(name: str, path: Path, sha256: str) -> Mapping[str, Tensor]:
    tensors = _tensors(path, sha256)
    if name == "densenet121":
        tensors = {_OLD_DENSENET.sub(r"\1\2", key): value for key, value in tensors.items()}
    fault = _mismatch(name, tensors)
    if fault is not None:
        fitting = [other for other in BACKBONES if _mismatch(other, tensors) is None]
        remedy = f"it is a {fitting[0]}: set model.name to that" if fitting else "give torchvision's own state dict"
        raise WeightsError(f"model.weights: {path}: no weights of {name} ({fault}); {remedy}, or give another file.")
    return {key: tensors[key].float() for key in _expected(name)}


def _tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    try:
        # Read once: what is checked is what is parsed, also where somebody replaces the file meanwhile.
        content = path.read_bytes()
    except OSError as error:
        raise WeightsError(
            f"model.weights: {path}: cannot be read here ({error.strerror}); put it at this path on every node."
        ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise WeightsError(
            f"model.weights: {path}: expected sha256 {sha256}, found {found}; restore that file, or start a new run."
        )
    try:
        loaded = safetensors.torch.load(content) if path.suffix == ".safetensors" else _unpickled_safely(content)
    except Exception as error:  # torch and pickle raise a dozen kinds for a damaged file
        raise WeightsError(f"model.weights: {path}: not a readable .pth or .safetensors file ({error}).") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise WeightsError(f"model.weights: {path}: expected tensors by name; save `model.state_dict()`.")
    return loaded


def _unpickled_safely(content: bytes) -> object:
    # Tensors alone: any other pickle would run code of whoever wrote the file.
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _mismatch(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    """What of ``tensors`` does not belong to the architecture, its head aside."""
    expected = _expected(name)
    ours = {key for key in tensors if not key.startswith(f"{HEAD_OF[name]}.") and not key.endswith(_PARAMETER_FREE)}
    shapes = [key for key in ours & expected.keys() if tensors[key].shape != expected[key]]
    for word, keys in (("missing", expected.keys() - ours), ("unexpected", ours - expected.keys()), ("shape", shapes)):
        if keys:
            shown = ", ".join(sorted(keys)[:_SHOWN])
            return f"{len(keys)} of {len(expected)} tensors {'of other shape' if word == 'shape' else word}: {shown}"
    return None


@lru_cache
def _expected(name: str) -> dict[str, torch.Size]:
    """Shapes by name of what a file of the architecture holds, beside the head."""
    prepare_torchvision()
    from torchvision import models

    # Names and shapes alone: neither memory nor random numbers are used.
    with torch.device("meta"):
        template: nn.Module = getattr(models, name)(weights=None)
    state = template.state_dict()
    return {
        key: value.shape
        for key, value in state.items()
        if not key.startswith(f"{HEAD_OF[name]}.") and not key.endswith(_PARAMETER_FREE)
    }
