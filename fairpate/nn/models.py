"""Model architectures (logistic regression, MLP, LeNet, two small CNNs, ResNet and DenseNet) and pretrained weights.

Normalisation is GroupNorm, or BatchNorm with the fixed statistics of a weights file, never with statistics of a batch:
a prediction then depends on one record only, and per-example gradients exist. A model reads ``uint8`` images or float
features; no constant is fitted to data. All architectures except the backbones (ResNet and DenseNet) are plain
sequences of layers, so that an ensemble of them can run as one program.

Weights are torchvision's own state dicts. A weights file must be public, or at least learned from other records. Every
process reads it from the same path; the configuration has its checksum, so that all nodes start alike.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairpate.config import BACKBONES, EMBEDDED_NORM, IMAGENET, ModelConfig, WeightsConfig
from fairpate.encoders import WeightsError, misfit, prepare_torchvision, read_tensors
from fairpate.oriented_gradients import NUM_VALUES, gradient_histograms

HEAD_OF = {"resnet18": "fc", "resnet50": "fc", "densenet121": "classifier"}
CONVOLUTIONAL = frozenset({"hog_logistic", "lenet", "tanh_cnn", "cnn", *BACKBONES})
"""Names of the architectures that read images (B, channels, height, width)."""
_PUBLISHED = "IMAGENET1K_V1"
_PARAMETER_FREE = "num_batches_tracked"
# The public mean and spread of ImageNet's channels, which every published file was trained with.
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MAX_NORM_GROUPS = 8
_SMALLEST_SIDE, _SMALLEST_SIDE_OF = 8, {"hog_logistic": 3, "tanh_cnn": 16, "densenet121": 32}


def pin_weights(config: ModelConfig) -> ModelConfig:
    """Return ``config`` with the weights `imagenet` replaced by the path of the file that has them, in torch's hub
    folder. Other weights are left unchanged.

    The file is downloaded if it is missing; WeightsError if the download fails.
    """
    if config.weights is None or config.weights.path != Path(IMAGENET):
        return config
    path = imagenet_file(config.name)
    return config.model_copy(update={"weights": WeightsConfig(path=path, sha256=config.weights.sha256)})


def imagenet_file(name: str) -> Path:
    """Return the path of torchvision's ImageNet weights for a backbone, downloaded if torch's hub folder lacks them."""
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
                f"backbone.weights: imagenet: {url} cannot be downloaded ({error}); download it elsewhere and put it "
                f"at {path}, or give the path of your copy."
            ) from error
    return path


def load_weights(config: ModelConfig) -> Mapping[str, Tensor]:
    """Return the tensors of the file ``config.weights`` by torchvision's names, all except those of the last layer.

    WeightsError if ``config.weights`` has no path or checksum, and for a file that is missing, has another checksum, or
    belongs to another architecture.
    """
    weights = pin_weights(config).weights
    if weights is None or weights.path is None or weights.sha256 is None:
        what = "missing: a published model names its initial weights by sha256 only; give the path of the file."
        raise WeightsError(f"backbone.weights.path: {what}")
    return _read(config.name, weights.path, weights.sha256)


# The checksum is part of the key: a file with another checksum is read again.
@lru_cache(maxsize=1)
def _read(name: str, path: Path, sha256: str) -> Mapping[str, Tensor]:
    tensors = read_tensors(path, sha256, field="backbone.weights")
    if fault := misfit(_expected(name), _shapes(name, tensors)):
        fitting = [other for other in BACKBONES if not misfit(_expected(other), _shapes(other, tensors))]
        remedy = f"it is a {fitting[0]}: set model.name to that" if fitting else "give torchvision's own state dict"
        raise WeightsError(f"backbone.weights: {path}: no weights of {name} ({fault}); {remedy}, or give another file.")
    return {key: tensors[key].float() for key in _expected(name)}


@lru_cache
def _expected(name: str) -> dict[str, torch.Size]:
    """Return the name and shape of each tensor in a weights file of the architecture ``name``, without the last
    layer."""
    prepare_torchvision()
    from torchvision import models

    # Names and shapes alone: neither memory nor random numbers are used.
    with torch.device("meta"):
        return _shapes(name, getattr(models, name)(weights=None).state_dict())


def _shapes(name: str, tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    left_out = f"{HEAD_OF[name]}."
    kept = (key for key in tensors if not key.startswith(left_out) and not key.endswith(_PARAMETER_FREE))
    return {key: tensors[key].shape for key in kept}


def scale_bytes(x: Tensor) -> Tensor:
    """Return ``uint8`` values as ``float32`` in [0, 1]; floats are returned unchanged."""
    # In place, on the copy that `float` has made.
    return x.float().div_(255) if x.dtype == torch.uint8 else x


class ScaleBytes(nn.Module):
    """The first layer of every model: :func:`scale_bytes`."""

    forward = staticmethod(scale_bytes)


class ImageNetScale(nn.Module):
    """The first layer of a model with pretrained weights: :func:`scale_bytes`, then standardisation by ImageNet's
    channel means and standard deviations."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, 3, height, width) for ``x`` (B, 1 or 3, height, width); a grey image becomes three channels."""
        scaled = scale_bytes(x)
        mean, std = (scaled.new_tensor(values)[:, None, None] for values in (_IMAGENET_MEAN, _IMAGENET_STD))
        return (scaled - mean) / std


class OrientedGradients(nn.Module):
    """Features of a picture, without parameters: square roots of its histograms of oriented gradients.

    Square roots reduce the weight of a few strong edges.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, 900) features for ``x`` (B, channels, height, width), floats in [0, 1]."""
        return gradient_histograms(x).sqrt()


class Shortened(nn.Module):
    """A layer that scales a record's features down to a fixed L2 norm, that of a typical embedded record, if their norm
    is larger."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (B, features), in which every row of larger norm is scaled down to the fixed norm."""
        # In doubles, as the norms of the private records from which a linear rule was learned.
        rows = x.double()
        lengths_B1 = rows.square().sum(dim=1, keepdim=True).sqrt()
        return (rows * (EMBEDDED_NORM / lengths_B1.clamp(min=EMBEDDED_NORM))).to(x.dtype)


class FrozenBatchNorm(nn.Module):
    """BatchNorm that is always in evaluation mode: an affine map per channel with constants that are not trained."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self._eps = norm.eps
        # Buffers: saved with the state, and no optimiser moves them.
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, getattr(norm, name).detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return exactly what BatchNorm returns in evaluation mode."""
        mean, variance, scale, shift = self.running_mean, self.running_var, self.weight, self.bias
        return functional.batch_norm(x, mean, variance, scale, shift, training=False, eps=self._eps)  # type: ignore[arg-type]


def build_model(
    config: ModelConfig, *, input_shape: tuple[int, ...], num_classes: int, generator_seed: int | None = None
) -> nn.Module:
    """Build a model ``(B, *input_shape) -> logits (B, num_classes)``; equal seeds give equal initial weights.

    ``input_shape`` is (features,) for a table and (channels, height, width) for images; logistic and mlp flatten
    images. With ``config.weights`` all layers except the last start from the file. Leave ``generator_seed`` out if the
    caller loads a state dict afterwards: then no weights file is read. ValueError if the architecture does not fit the
    shape or the file.
    """
    name = config.name
    if num_classes < 2:
        raise ValueError(f"Expected num_classes >= 2, got {num_classes}.")
    if name in CONVOLUTIONAL:
        if len(input_shape) != 3:
            raise ValueError(f"Model {name} reads images (C, H, W), got {input_shape}; use logistic or mlp.")
        smallest = _SMALLEST_SIDE_OF.get(name, _SMALLEST_SIDE)
        if min(input_shape[1:]) < smallest:
            raise ValueError(
                f"Model {name}: expected at least {smallest} pixels a side, got {input_shape[1:]}; use larger images "
                "or another model."
            )
        if config.weights is not None and input_shape[0] not in (1, len(_IMAGENET_MEAN)):
            raise ValueError(
                f"backbone.weights: pretrained weights read images of 3 channels, or of 1 that is repeated, "
                f"got {input_shape[0]}; leave weights out, or choose other channels."
            )
    # Seeded also where the state is overwritten: initialising then leaves the caller's random state as it was.
    with seeded_torch(generator_seed or 0):
        if name in BACKBONES:
            return _backbone(config, input_shape[0], num_classes, reads_file=generator_seed is not None)
        return nn.Sequential(ScaleBytes(), *_layers(config, input_shape, num_classes))


def memory_format_for(x: Tensor) -> torch.memory_format:
    """Return the memory format for ``x``: channels last for images, for which convolutions are fastest."""
    return torch.channels_last if x.ndim == 4 else torch.contiguous_format


def to_memory_format(model: nn.Module, memory_format: torch.memory_format) -> None:
    """Convert the model's convolution weights to ``memory_format`` in place; values do not change."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            # Through `data`: the parameter stays the object that an optimiser may hold.
            parameter.data = parameter.data.contiguous(memory_format=memory_format)


@contextmanager
def seeded_torch(seed: int) -> Iterator[None]:
    """Seed torch's own random state inside the block (layer initialisation) and restore it afterwards."""
    # All devices, since `manual_seed` seeds each of them.
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        # Without an accelerator, manual_seed would write down the whole call stack for one that may come.
        (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(seed)
        yield


def _layers(config: ModelConfig, input_shape: tuple[int, ...], num_classes: int) -> list[nn.Module]:
    """Return the layers of an architecture that is a plain sequence of layers, without the first layer, which scales
    inputs."""
    if config.name == "logistic":
        return [nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes)]
    if config.name == "bounded_logistic":
        return [nn.Flatten(), Shortened(), nn.Linear(math.prod(input_shape), num_classes)]
    if config.name == "hog_logistic":
        return [OrientedGradients(), nn.Linear(NUM_VALUES, num_classes)]
    if config.name == "mlp":
        layers: list[nn.Module] = [nn.Flatten()]
        width = math.prod(input_shape)
        for hidden in config.widths:
            layers += [nn.Linear(width, hidden), nn.ReLU()]
            width = hidden
        return [*layers, nn.Linear(width, num_classes)]
    channels, *sides = input_shape
    if config.name == "lenet":
        # Two 5x5 convolutions and a hidden layer of 500; images under 28 pixels are zero-padded by 2 at each one. ReLU
        # follows the maximum, which is the same function and reads a quarter of the values.
        padding = 0 if min(sides) >= 28 else 2
        sides = [((side - 4 + 2 * padding) // 2 - 4 + 2 * padding) // 2 for side in sides]
        first = [nn.Conv2d(channels, 20, 5, padding=padding), nn.MaxPool2d(2), nn.ReLU()]
        second = [nn.Conv2d(20, 50, 5, padding=padding), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()]
        return [*first, *second, nn.Linear(50 * math.prod(sides), 500), nn.ReLU(), nn.Linear(500, num_classes)]
    if config.name == "tanh_cnn":
        # Two strided convolutions under tanh, 27,000 parameters on 28 pixels: bounded activations keep gradients short.
        # The network of Papernot et al. 2021 (arXiv 2007.14191) for DP-SGD on digits.
        sides = [((side - 4) // 2 - 4) // 2 for side in sides]
        first = [nn.Conv2d(channels, 16, 8, stride=2, padding=2), nn.MaxPool2d(2, stride=1), nn.Tanh()]
        second = [nn.Conv2d(16, 32, 4, stride=2), nn.MaxPool2d(2, stride=1), nn.Tanh(), nn.Flatten()]
        return [*first, *second, nn.Linear(32 * math.prod(sides), 32), nn.Tanh(), nn.Linear(32, num_classes)]
    # cnn: blocks of 3x3 convolution, GroupNorm, halving and ReLU, until a side is about 7; then a global average.
    # Channels double from ``hidden`` up to ``4 hidden``. From 56 pixels on, the first convolution has stride 2.
    stride = 2 if min(sides) >= 56 else 1
    num_halvings = max(1, round(math.log2(min(sides) / stride / 7)))
    layers = []
    for block in range(num_halvings + 1):
        width = config.widths[0] * 2 ** min(block, 2)
        layers += [
            nn.Conv2d(channels, width, 3, padding=1, stride=stride if block == 0 else 1, bias=False),
            _group_norm(width),
            *([nn.MaxPool2d(2)] if block < num_halvings else []),
            nn.ReLU(),
        ]
        channels = width
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]


def _backbone(config: ModelConfig, channels: int, num_classes: int, *, reads_file: bool) -> nn.Module:
    prepare_torchvision()
    from torchvision import models

    backbone: nn.Module = getattr(models, config.name)(weights=None, num_classes=num_classes)
    head = HEAD_OF[config.name]
    if config.weights is not None and reads_file:
        backbone.load_state_dict(load_weights(config), strict=False)  # all but the head, as load_weights has checked
    # After loading, because the tensors of the file have the names of BatchNorm's. A frozen one, or GroupNorm with its
    # scale and shift per channel, takes the place of each.
    for block in list(backbone.modules()):
        for name, norm in block.named_children():
            if not isinstance(norm, nn.BatchNorm2d):
                continue
            if config.weights is not None:
                setattr(block, name, FrozenBatchNorm(norm))
            else:
                group_norm = _group_norm(norm.num_features)
                group_norm.load_state_dict({"weight": norm.weight, "bias": norm.bias})
                setattr(block, name, group_norm)
    if config.weights is None:
        parent, name = (backbone.features, "conv0") if hasattr(backbone, "features") else (backbone, "conv1")
        layer = getattr(parent, name)
        if layer.in_channels != channels:
            kernel, stride, padding = layer.kernel_size, layer.stride, layer.padding
            other = nn.Conv2d(channels, layer.out_channels, kernel, stride=stride, padding=padding, bias=False)
            setattr(parent, name, other)
    if config.trainable == "head":
        backbone.requires_grad_(requires_grad=False)
    # The head is new, and trained in any case.
    setattr(backbone, head, nn.Sequential(getattr(backbone, head).requires_grad_()))
    return nn.Sequential(ScaleBytes() if config.weights is None else ImageNetScale(), backbone)


def _group_norm(channels: int) -> nn.GroupNorm:
    # GroupNorm takes groups of one size: the most, up to eight, that divide the channels.
    groups = max(g for g in range(1, _MAX_NORM_GROUPS + 1) if channels % g == 0)
    return nn.GroupNorm(groups, channels)
