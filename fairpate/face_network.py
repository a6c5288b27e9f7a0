"""dlib's network for faces, read from dlib's own file of weights into a network of torch.

``dlib_face_recognition_resnet_model_v1.dat`` by Davis King is a ResNet of 29 convolutions for pictures of 150 pixels,
whose vectors of 128 numbers are near to each other for pictures of one person. Its layers are those of dlib's example
``dnn_face_recognition_ex.cpp``. Each normalisation, a scale and a shift of every channel, is computed with the
convolution before it. Where the two sides of a sum differ in rows, columns or channels, zeros stand in place of what
one of them lacks.

dlib serialises layers from the first to the last, a name in front of each. Whole numbers have a byte that counts their
bytes; weights are plain floats of 32 bits behind the four sizes of their array. Only names, sizes and floats are read,
so that no file can run code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise, repeat

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

_VECTOR = 128
# The number of channels of each block, and whether it halves the sides of its input.
_BLOCKS = (
    *repeat((32, False), 3),
    *((64, True), *repeat((64, False), 3)),
    *((128, True), *repeat((128, False), 2)),
    *((256, True), *repeat((256, False), 2)),
    (256, True),
)
_LAYER = re.compile(rb"con_4|affine_|fc_2")
_NUMBERS_OF_ARRAY = 5  # in front of the floats: the format and four sizes
_ARRAY_FORMAT = 2  # dlib's version of an array whose floats are stored as they are
_KERNEL, _FIRST_KERNEL = 3, 7


class _Block(nn.Module):
    """Two convolutions around which their input is led."""

    def __init__(self, before: int, channels: int, *, halves: bool) -> None:
        super().__init__()
        self.halves = halves
        self.first = nn.Conv2d(before, channels, _KERNEL, stride=1 + halves, padding=int(not halves))
        self.second = nn.Conv2d(channels, channels, _KERNEL, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).relu())
        around = functional.avg_pool2d(x, 2) if self.halves else x
        sizes = [max(pair) for pair in zip(y.shape[1:], around.shape[1:], strict=True)]
        return (_filled(y, sizes) + _filled(around, sizes)).relu()


def network() -> nn.Module:
    """Return the network, which maps pictures (N, 3, 150, 150), standardised, to vectors (N, 128)."""
    blocks = [
        _Block(before, channels, halves=halves)
        for (before, _), (channels, halves) in pairwise(((_BLOCKS[0][0], False), *_BLOCKS))
    ]
    return nn.Sequential(
        nn.Conv2d(3, _BLOCKS[0][0], _FIRST_KERNEL, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(_BLOCKS[-1][0], _VECTOR, bias=False),
    )


def _filled(x: Tensor, sizes: list[int]) -> Tensor:
    """Return ``x`` (N, channels, height, width) with zeros behind, up to ``sizes``."""
    missing = [size - length for size, length in zip(sizes, x.shape[1:], strict=True)]
    return functional.pad(x, [each for size in reversed(missing) for each in (0, size)]) if any(missing) else x


def read_weights(content: bytes) -> dict[str, Tensor]:
    """Return the tensors of :func:`network` by name, from the ``content`` of dlib's file. ValueError for other content,
    such as that of another network of dlib."""
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in network().state_dict().items()}
    last, last_shape = shapes.popitem()
    arrays, names, made = list(_arrays(content)), list(shapes), {}
    if len(arrays) != len(shapes) + 1:
        raise ValueError(
            f"Expected {len(shapes) + 1} arrays, got {len(arrays)}: another network, or the file ends early."
        )
    # For each convolution an array with its filters, then its biases, and one with the scales, then the shifts.
    for weight, bias, convolution, affine in zip(names[::2], names[1::2], arrays[:-1:2], arrays[1:-1:2], strict=True):
        (channels,) = shapes[bias]
        filters, biases = convolution[:-channels].reshape(shapes[weight]), convolution[-channels:]
        scale, shift = affine.reshape(2, channels)
        made[weight] = filters * scale[:, None, None, None]
        made[bias] = biases * scale + shift
    made[last] = arrays[-1].reshape(last_shape[::-1]).T
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in made.items()}


def _arrays(content: bytes) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the arrays of all layers with weights, in the order of the file."""
    place = 0
    while layer := _LAYER.search(content, place):  # floats are skipped: their bytes may look like a name
        place = layer.end()
        # Two whole numbers, of the sides of its array, come first in the last layer.
        numbers = []
        for _ in range(_NUMBERS_OF_ARRAY + 2 * (layer.group() == b"fc_2")):
            length = content[place] & 15
            numbers.append(int.from_bytes(content[place + 1 : place + 1 + length], "little"))
            place += 1 + length
        version, *sizes = numbers[-_NUMBERS_OF_ARRAY:]
        if version != _ARRAY_FORMAT:
            raise ValueError(f"Expected arrays of format {_ARRAY_FORMAT}, got {version}.")
        end = place + 4 * math.prod(sizes)
        if end > len(content):
            raise ValueError("An array is not complete: the file ends early.")
        yield np.frombuffer(content, "<f4", math.prod(sizes), place).astype(np.float32)
        place = end
