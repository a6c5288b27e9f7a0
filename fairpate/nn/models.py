"""The architectures: logistic regression, MLP, LeNet, two small CNNs, and ResNet / DenseNet backbones.

Everything normalises by GroupNorm, never BatchNorm: a prediction then depends on one record only, and per-example
gradients exist. A model takes ``uint8`` images or float features; bytes are scaled by the public constant 1/255 on
entry, and nothing is fitted to data. The first five architectures are plain sequences of layers, which lets an
ensemble of them run as one program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fairpate.config import ModelConfig
from fairpate.nn.torchvision_compat import prepare_torchvision

CONVOLUTIONAL = frozenset({"lenet", "tanh_cnn", "cnn", "resnet18", "resnet50", "densenet121"})
_MAX_NORM_GROUPS = 8
_SMALLEST_SIDE = {"lenet": 8, "tanh_cnn": 16, "cnn": 8, "resnet18": 8, "resnet50": 8, "densenet121": 32}


def scale_bytes(x: Tensor) -> Tensor:
    """``uint8`` becomes ``float32`` in [0, 1]; floats pass unchanged."""
    return x.float().div_(255) if x.dtype == torch.uint8 else x


class ScaleBytes(nn.Module):
    """:func:`scale_bytes` as the first layer of every model."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``x`` if it holds bytes."""
        return scale_bytes(x)


def build_model(
    config: ModelConfig, *, input_shape: tuple[int, ...], num_classes: int, generator_seed: int
) -> nn.Module:
    """An initialised model (B, *input_shape) -> logits (B, num_classes); equal seeds give equal weights.

    ``input_shape`` is (features,) for a table and (channels, height, width) for images; logistic and mlp flatten
    images. ValueError if the architecture does not fit the shape.
    """
    _check_shape(config.name, input_shape, num_classes)
    with seeded_torch(generator_seed):
        return _BUILDERS[config.name](config, input_shape, num_classes)


def is_convolutional(config: ModelConfig) -> bool:
    """Whether the architecture reads images (B, channels, height, width)."""
    return config.name in CONVOLUTIONAL


def memory_format_for(x: Tensor) -> torch.memory_format:
    """Channels last for a batch of images, which is what convolutions run fastest on."""
    return torch.channels_last if x.ndim == 4 else torch.contiguous_format


def to_memory_format(model: nn.Module, memory_format: torch.memory_format) -> None:
    """Lay out the model's convolution weights in place; values do not change."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)


@contextmanager
def seeded_torch(seed: int) -> Iterator[None]:
    """Seed torch's own random state inside the block (layer initialisation, dropout) and restore it afterwards."""
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def _check_shape(name: str, input_shape: tuple[int, ...], num_classes: int) -> None:
    if num_classes < 2:
        raise ValueError(f"Expected num_classes >= 2, got {num_classes}.")
    if name not in CONVOLUTIONAL:
        return
    if len(input_shape) != 3:
        raise ValueError(
            f"Model {name} reads images (channels, height, width), got input_shape {input_shape}; "
            "use logistic or mlp for a table."
        )
    if min(input_shape[1:]) < _SMALLEST_SIDE[name]:
        raise ValueError(
            f"Model {name} needs images of at least {_SMALLEST_SIDE[name]} pixels a side, got {input_shape[1:]}."
        )


def _logistic(_: ModelConfig, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(ScaleBytes(), nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def _mlp(config: ModelConfig, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    layers: list[nn.Module] = [ScaleBytes(), nn.Flatten()]
    width = math.prod(input_shape)
    for hidden in config.hidden:
        layers += [nn.Linear(width, hidden), nn.ReLU(), *_dropout(config)]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


def _lenet(config: ModelConfig, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two 5x5 convolutions and a hidden layer of 500; images under 28 pixels are zero-padded by 2 at each one.

    ReLU follows the maximum, which is the same function and reads a quarter of the values.
    """
    channels, height, width = input_shape
    padding = 0 if min(height, width) >= 28 else 2
    sides = [((side - 4 + 2 * padding) // 2 - 4 + 2 * padding) // 2 for side in (height, width)]
    return nn.Sequential(
        ScaleBytes(),
        nn.Conv2d(channels, 20, 5, padding=padding),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(20, 50, 5, padding=padding),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(50 * math.prod(sides), 500),
        nn.ReLU(),
        *_dropout(config),
        nn.Linear(500, num_classes),
    )


def _tanh_cnn(config: ModelConfig, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two strided convolutions under tanh, 27,000 parameters on 28 pixels: bounded activations keep gradients short.

    The network of Papernot et al. 2021 (arXiv 2007.14191) for DP-SGD on digits.
    """
    channels, *sides = input_shape
    sides = [((side - 4) // 2 - 4) // 2 for side in sides]
    return nn.Sequential(
        ScaleBytes(),
        nn.Conv2d(channels, 16, 8, stride=2, padding=2),
        nn.MaxPool2d(2, stride=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.MaxPool2d(2, stride=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32 * math.prod(sides), 32),
        nn.Tanh(),
        *_dropout(config),
        nn.Linear(32, num_classes),
    )


def _cnn(config: ModelConfig, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Blocks of 3x3 convolution, GroupNorm, halving and ReLU, until a side is about 7; then a global average.

    Channels double from ``width`` up to ``4 width``. From 56 pixels on, the first convolution has stride 2.
    """
    channels, *sides = input_shape
    side = min(sides)
    stride = 2 if side >= 56 else 1
    num_halvings = max(1, round(math.log2(side / stride / 7)))
    layers: list[nn.Module] = [ScaleBytes()]
    for block in range(num_halvings + 1):
        width = config.width * 2 ** min(block, 2)
        layers += [
            nn.Conv2d(channels, width, 3, padding=1, stride=stride if block == 0 else 1, bias=False),
            _group_norm(width),
            *([nn.MaxPool2d(2)] if block < num_halvings else []),
            nn.ReLU(),
        ]
        channels = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *_dropout(config), nn.Linear(channels, num_classes)
    )


def _torchvision(config: ModelConfig, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    prepare_torchvision()
    from torchvision import models

    backbone: nn.Module = getattr(models, config.name)(weights=None, num_classes=num_classes)
    _replace_batch_norm(backbone)
    if config.name == "densenet121":
        backbone.features.conv0 = _with_input_channels(backbone.features.conv0, input_shape[0])  # type: ignore[union-attr]
        backbone.classifier = nn.Sequential(*_dropout(config), backbone.classifier)  # type: ignore[arg-type]
    else:
        backbone.conv1 = _with_input_channels(backbone.conv1, input_shape[0])
        backbone.fc = nn.Sequential(*_dropout(config), backbone.fc)  # type: ignore[arg-type]
    return nn.Sequential(ScaleBytes(), backbone)


def _dropout(config: ModelConfig) -> list[nn.Module]:
    return [nn.Dropout(config.dropout)] if config.dropout else []


def _group_norm(channels: int) -> nn.GroupNorm:
    groups = max(g for g in range(1, _MAX_NORM_GROUPS + 1) if channels % g == 0)
    return nn.GroupNorm(groups, channels)


def _replace_batch_norm(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, _group_norm(child.num_features))
        else:
            _replace_batch_norm(child)


def _with_input_channels(layer: nn.Module | Tensor, channels: int) -> nn.Conv2d:
    assert isinstance(layer, nn.Conv2d)
    if layer.in_channels == channels:
        return layer
    kernel, stride, padding = layer.kernel_size, layer.stride, layer.padding
    return nn.Conv2d(channels, layer.out_channels, kernel, stride=stride, padding=padding, bias=False)  # type: ignore[arg-type]


_BUILDERS = {
    "logistic": _logistic,
    "mlp": _mlp,
    "lenet": _lenet,
    "tanh_cnn": _tanh_cnn,
    "cnn": _cnn,
    "resnet18": _torchvision,
    "resnet50": _torchvision,
    "densenet121": _torchvision,
}
