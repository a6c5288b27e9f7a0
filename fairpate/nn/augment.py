"""Random label-preserving changes of a batch of images, drawn and applied for the whole batch at once.

Drawing is apart from applying: ``draw_changes`` takes as many random numbers per image whatever the configuration
asks for, and ``apply_changes`` is a pure function of them. An ensemble can therefore draw per teacher and apply to
many teachers' images together. What augmentation does is public; it looks at one record at a time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from fairpate.config import AugmentConfig

# Rotation, shift (2), zoom, shear; flip, channel swap, erasing; position and size of the erased rectangle (4).
_FIXED_DRAWS = 12
_ELASTIC_SIDE = 5  # an elastic change moves a coarse grid of points, this many on a side
_ELASTIC_DRAWS = 2 * _ELASTIC_SIDE**2
_SMALLEST_ERASED_SHARE = 0.1
_LARGEST_ERASED_SHARE = 0.4


def augment(x_BCHW: Tensor, config: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Changed copies of float images, one independent change each; what leaves the frame is lost, what enters is 0."""
    if config.is_identity:
        return x_BCHW
    changes = draw_changes(len(x_BCHW), num_channels=x_BCHW.shape[1], generator=generator)
    # Drawn on the generator's device and moved: a GPU sees the same changes as a CPU.
    return apply_changes(x_BCHW, config, changes.to(x_BCHW.device))


def draw_changes(num_images: int, *, num_channels: int, generator: torch.Generator) -> Tensor:
    """Uniform numbers in [0, 1) of shape (num_images, draws): the randomness of one change per image."""
    return torch.rand(num_images, _FIXED_DRAWS + num_channels + _ELASTIC_DRAWS, generator=generator)


def apply_changes(x_BCHW: Tensor, config: AugmentConfig, changes: Tensor) -> Tensor:
    """The images after the changes that ``changes`` (of :func:`draw_changes`) stands for under ``config``."""
    if x_BCHW.ndim != 4:
        raise ValueError(f"Augmentation reads images (batch, channels, height, width), got {tuple(x_BCHW.shape)}.")
    changes = changes.to(x_BCHW.dtype)
    elastic_from = _FIXED_DRAWS + x_BCHW.shape[1]
    flip = changes[:, 5] < config.horizontal_flip
    x = _warp(x_BCHW, config, changes[:, :5], elastic=changes[:, elastic_from:], flip=flip)
    if config.channel_swap:
        x = _swap_channels(x, swapped=changes[:, 6] < config.channel_swap, keys=changes[:, _FIXED_DRAWS:elastic_from])
    if config.erase:
        x = _erase(x, erased=changes[:, 7] < config.erase, rectangle=changes[:, 8:12])
    return x


def _warp(x: Tensor, config: AugmentConfig, uniform: Tensor, *, elastic: Tensor, flip: Tensor) -> Tensor:
    affine = (config.rotation_degrees, config.translation_fraction, config.scale_fraction, config.shear_degrees)
    if not any((*affine, config.elastic_fraction)):
        return torch.where(flip[:, None, None, None], x.flip(-1), x) if config.horizontal_flip else x
    matrix = _inverse_map(config, 2 * uniform - 1, flip, x.shape)
    grid = functional.affine_grid(matrix, list(x.shape), align_corners=False)
    if config.elastic_fraction:
        grid = grid + _displacement(2 * elastic - 1, config.elastic_fraction, x.shape)
    return functional.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _displacement(signed: Tensor, fraction: float, shape: torch.Size) -> Tensor:
    """Shifts (B, H, W, 2) that vary smoothly between those of a coarse grid, each up to ``fraction`` of a side."""
    # Coordinates run over [-1, 1]: a side is 2.
    coarse = 2 * fraction * signed.view(-1, 2, _ELASTIC_SIDE, _ELASTIC_SIDE)
    fine = functional.interpolate(coarse, size=list(shape[-2:]), mode="bicubic", align_corners=True)
    return fine.permute(0, 2, 3, 1)


def _inverse_map(config: AugmentConfig, signed: Tensor, flip: Tensor, shape: torch.Size) -> Tensor:
    """Output to input coordinates, (B, 2, 3): the inverse of shear, zoom, rotation and shift about the centre.

    Coordinates run over [-1, 1] on both axes, so a rotation of a non-square image is corrected by its aspect ratio.
    """
    height, width = shape[-2:]
    angle = signed[:, 0] * math.radians(config.rotation_degrees)
    shift = 2 * signed[:, 1:3] * config.translation_fraction
    zoom = 1 + signed[:, 3] * config.scale_fraction
    shear = torch.tan(signed[:, 4] * math.radians(config.shear_degrees))
    cosine, sine = torch.cos(angle), torch.sin(angle)
    rotation = torch.stack([cosine, sine, -sine, cosine], dim=1).view(-1, 2, 2)
    ones, zeros = torch.ones_like(shear), torch.zeros_like(shear)
    unshear = torch.stack([ones, -shear, zeros, ones], dim=1).view(-1, 2, 2)
    linear = (unshear @ rotation) / zoom[:, None, None]
    aspect = torch.tensor([[1.0, height / width], [width / height, 1.0]], dtype=signed.dtype, device=signed.device)
    linear = linear * aspect
    offset = -(linear @ shift[:, :, None])
    mirror = torch.where(flip, -1.0, 1.0).to(signed.dtype)
    matrix = torch.cat([linear, offset], dim=2)
    return torch.cat([matrix[:, :1] * mirror[:, None, None], matrix[:, 1:]], dim=1)


def _swap_channels(x: Tensor, *, swapped: Tensor, keys: Tensor) -> Tensor:
    """A uniform permutation of the channels of the images in ``swapped``."""
    identity = torch.arange(x.shape[1], device=x.device)
    order = torch.where(swapped[:, None], keys.argsort(dim=1), identity)
    return x.gather(1, order[:, :, None, None].expand_as(x))


def _erase(x: Tensor, *, erased: Tensor, rectangle: Tensor) -> Tensor:
    """Zero one rectangle, of sides between 0.1 and 0.4 of the image's, in the images in ``erased``."""
    inside = erased[:, None, None].clone()
    for axis, side in enumerate(x.shape[-2:]):
        spread = _LARGEST_ERASED_SHARE - _SMALLEST_ERASED_SHARE
        share = _SMALLEST_ERASED_SHARE + spread * rectangle[:, axis]
        length = (share * side).ceil()
        start = (rectangle[:, 2 + axis] * (side - length + 1)).floor()
        pixel = torch.arange(side, device=x.device)
        covered = (pixel >= start[:, None]) & (pixel < (start + length)[:, None])
        inside = inside & (covered[:, :, None] if axis == 0 else covered[:, None, :])
    return x.masked_fill(inside[:, None], 0.0)
