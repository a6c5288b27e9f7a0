"""Histograms of oriented gradients: what a picture's edges look like, cell by cell, with nothing learned.

After Dalal and Triggs 2005 ("Histograms of Oriented Gradients for Human Detection", CVPR): the direction of every
brightness gradient without its sign, counted in proportion to its strength, per cell of a 10 x 10 grid and relative to
the energy of the neighbouring cells. A fixed public function of one record: no statistic of other records enters, so
it costs no privacy. From it a linear teacher learns what a network cannot learn from a few hundred pictures.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from fairpate.data.entry import Option, Records

FEATURES = Option(
    default="pixels",
    allowed=("pixels", "oriented_gradients"),
    description="What a model sees: the picture, or 900 histogram values of its edges as a table.",
)
NUM_CELLS = 10
NUM_DIRECTIONS = 9
_FAINT = 0.01  # of the brightness range: energy below this is left small, so that flat cells stay near 0
_PICTURES_AT_ONCE = 256


def with_features(records: Records, features: str) -> Records:
    """Records of pictures as they are (``pixels``), or as a table of ``oriented_gradients``."""
    if features == "pixels":
        return records
    x = oriented_gradients(records.records.x)
    return replace(
        records, kind="tabular", records=replace(records.records, x=x), feature_names=feature_names(), pixels=None
    )


def feature_names() -> tuple[str, ...]:
    """A name per column of :func:`oriented_gradients`."""
    directions, cells = range(NUM_DIRECTIONS), range(NUM_CELLS)
    return tuple(
        f"direction {180 * d // NUM_DIRECTIONS}, row {i}, column {j}" for d in directions for i in cells for j in cells
    )


def oriented_gradients(pixels: Tensor) -> Tensor:
    """Bytes (N, channels, H, W) to ``float32`` (N, directions * rows * columns), each at least 0."""
    parts = [_histograms(part) for part in torch.split(pixels, _PICTURES_AT_ONCE)]
    return torch.cat(parts) if parts else torch.empty(0, NUM_DIRECTIONS * NUM_CELLS**2)


def _histograms(pixels: Tensor) -> Tensor:
    brightness = pixels.float().div_(255).mean(dim=1, keepdim=True)
    across = functional.pad(brightness[..., 2:] - brightness[..., :-2], (1, 1))
    down = functional.pad(brightness[..., 2:, :] - brightness[..., :-2, :], (0, 0, 1, 1))
    strength = torch.hypot(across, down)
    # Each gradient is shared between the two nearest directions; 0 and 180 degrees are the same one.
    position = torch.atan2(down, across).remainder(math.pi) * (NUM_DIRECTIONS / math.pi)
    lower = position.floor()
    share = position - lower
    lower = lower.long() % NUM_DIRECTIONS
    votes = torch.zeros(len(pixels), NUM_DIRECTIONS, *pixels.shape[2:])
    votes.scatter_add_(1, lower, strength * (1 - share))
    votes.scatter_add_(1, (lower + 1) % NUM_DIRECTIONS, strength * share)
    cells = functional.adaptive_avg_pool2d(votes, NUM_CELLS)
    energy = functional.avg_pool2d(cells.square().sum(dim=1, keepdim=True), 3, stride=1, padding=1).sqrt()
    return (cells / (energy + _FAINT)).flatten(1)
