"""Histograms of oriented gradients: features of a picture from the directions of its edges, computed without any
training.

After Dalal and Triggs 2005 ("Histograms of Oriented Gradients for Human Detection", CVPR): for each cell of a 10 x 10
grid, a histogram of the directions of brightness gradients (without sign), weighted by their strength, relative to the
energy of the neighbouring cells. The features are a fixed public function of one picture, so they have no privacy cost.
They do not depend on the other pictures of a batch, not even in the last digit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fairpate.lazy import functional, torch

if TYPE_CHECKING:
    from torch import Tensor

NUM_CELLS = 10
NUM_DIRECTIONS = 9
NUM_VALUES = NUM_DIRECTIONS * NUM_CELLS**2
_FAINT = 0.01  # of the brightness range: energy below this is left small, so that flat cells stay near 0
_PICTURES_AT_ONCE = 256
_ARCTANGENT = (
    *(1.0, -0.3333314528, 0.1999355085, -0.1420889944, 0.1065626393),
    *(-0.0752896400, 0.0429096138, -0.0161657367, 0.0028662257),
)
"""Coefficients of the odd powers of the arctangent, exact to 2e-8 on [0, 1] (Abramowitz and Stegun 1964, 4.4.49)."""


def oriented_gradients(pixels: Tensor) -> Tensor:
    """Return the features of pictures (N, channels, height, width) of bytes: the relative strength of brightness
    gradients in each direction, for each cell of a 10 x 10 grid.

    Features are ``float32``, at least 0, of shape (N, directions * grid rows * grid columns).
    """
    parts = [gradient_histograms(part.float().div_(255)) for part in torch.split(pixels, _PICTURES_AT_ONCE)]
    return torch.cat(parts) if parts else torch.empty(0, NUM_VALUES)


def gradient_histograms(pictures: Tensor) -> Tensor:
    """Return the features of :func:`oriented_gradients` for pictures (N, channels, height, width) of floats in [0,
    1]."""
    brightness = pictures.mean(dim=1, keepdim=True)
    # Central differences, padded to the picture's size: its border counts as flat.
    across = functional.pad(brightness[..., 2:] - brightness[..., :-2], (1, 1))
    down = functional.pad(brightness[..., 2:, :] - brightness[..., :-2, :], (0, 0, 1, 1))
    strength = torch.hypot(across, down)
    # Each gradient is shared between the two nearest directions; 0 and 180 degrees are the same one.
    position = angles(across, down) * (NUM_DIRECTIONS / math.pi)
    lower = position.floor()
    share = position - lower
    lower = lower.long() % NUM_DIRECTIONS
    votes = torch.zeros_like(strength).repeat(1, NUM_DIRECTIONS, 1, 1)
    votes = votes.scatter_add(1, lower, strength * (1 - share))
    votes = votes.scatter_add(1, (lower + 1) % NUM_DIRECTIONS, strength * share)
    cells = functional.adaptive_avg_pool2d(votes, NUM_CELLS)
    energy = functional.avg_pool2d(cells.square().sum(dim=1, keepdim=True), 3, stride=1, padding=1).sqrt()
    return (cells / (energy + _FAINT)).flatten(1)


def angles(across: Tensor, down: Tensor) -> Tensor:
    """Return the directions of gradients (``across``, ``down``) without sign, in radians from 0 to pi."""
    # Not by torch.atan2, whose last digit depends on the position in the batch and on threads: the operations below
    # round correctly.
    wide, high = across.abs(), down.abs()
    # 0 / 0 if the picture is flat: the direction does not matter, because its strength is 0.
    ratio = torch.minimum(wide, high) / torch.maximum(wide, high).clamp(min=torch.finfo(wide.dtype).tiny)
    square, series = ratio.square(), torch.zeros_like(ratio)
    for coefficient in reversed(_ARCTANGENT):
        # In two steps: a fused operation rounds only once, and not every processor has one.
        series.mul_(square).add_(coefficient)
    flat = ratio * series
    steep = torch.where(high > wide, math.pi / 2 - flat, flat)
    return torch.where((across > 0) == (down > 0), steep, math.pi - steep)
