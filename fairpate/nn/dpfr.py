"""The demographic-parity regulariser (DPFR) of FairDP-SGD, exact and differentiable (FairPATE, Algorithm 6).

Logits of public records are sharpened by a temperature, ``s_i = softmax(u_i / temperature)``; the gap of a group and
a class is the group's mean of s less the mean of everyone else, and DPFR is the largest gap. ``hardmax`` takes the
largest itself, as the published code does; ``softmax`` weighs all gaps by ``softmax(gap / max_temperature)``, as the
prose reads, and differentiates the weights too.

Groups and the records behind the logits must be public: DPFR of a private batch ties every record's gradient to the
other records, and clipping would then bound nothing. Nothing here draws noise or knows an epsilon.

Shapes: B records of a public batch, C classes, G groups with a member and a complement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fairpate.config import DpfrConfig, PenaltyConfig
from fairpate.nn.models import memory_format_for, scale_bytes


def dpfr(logits_BC: Tensor, groups_B: Tensor, config: DpfrConfig) -> Tensor:
    """The regulariser as a scalar, without its weight; differentiable with respect to ``logits_BC``.

    With fewer than two groups in the batch there is nothing to compare: 0, with a gradient of 0. A temperature much
    smaller than the differences of logits leaves a gradient to records near a tie only, of size 1 / temperature.
    """
    gaps_GC = group_gaps((logits_BC / config.temperature).softmax(dim=1), groups_B)
    if not len(gaps_GC):
        return logits_BC.sum() * 0
    gaps = gaps_GC.flatten()
    if config.maximum == "hardmax":
        # The first of equal gaps, where `max` would share the gradient among them.
        return gaps[gaps.argmax()]
    return (gaps / config.max_temperature).softmax(dim=0) @ gaps


@torch.no_grad()
def dpfr_gradient(logits_BC: Tensor, contrast_GB: Tensor, config: DpfrConfig) -> Tensor:
    """The gradient of :func:`dpfr` with respect to the logits, (B, C), in closed form: for a step that must be quick.

    ``contrast_GB`` is :func:`contrast` of the batch's groups, two at least.
    """
    gradient_BC: Tensor
    mass_BC = (logits_BC / config.temperature).softmax(dim=1)
    gaps_GC = contrast_GB @ mass_BC
    if config.maximum == "hardmax":
        group, label = divmod(int(gaps_GC.argmax()), gaps_GC.shape[1])
        # contrast / T times mass_l (1[k = l] - mass_k), the softmax's derivative at the largest gap's label l.
        pull_B = (contrast_GB[group] / -config.temperature).mul_(mass_BC[:, label])
        gradient_BC = mass_BC.mul_(pull_B[:, None])
        gradient_BC[:, label].sub_(pull_B)
        return gradient_BC
    share_GC = (gaps_GC / config.max_temperature).flatten().softmax(dim=0).view_as(gaps_GC)
    # The derivative of sum softmax(gap / T) gap, the weights' own included.
    slope_GC = share_GC * (1 + (gaps_GC - (share_GC * gaps_GC).sum()) / config.max_temperature)
    slope_BC = contrast_GB.mT @ slope_GC
    gradient_BC = (slope_BC - (slope_BC * mass_BC).sum(dim=1, keepdim=True)) * mass_BC / config.temperature
    return gradient_BC


def group_gaps(probabilities_BC: Tensor, groups_B: Tensor) -> Tensor:
    """Mean of every group less the mean of all others, (G, C); groups in ascending order, none if fewer than two."""
    return contrast(groups_B, probabilities_BC.dtype) @ probabilities_BC


def contrast(groups_B: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """1 / n of a group for its members and -1 / n of all others for these, (G, B); no groups if fewer than two."""
    present_G = groups_B.unique()
    if len(present_G) < 2:
        return torch.zeros(0, len(groups_B), dtype=dtype, device=groups_B.device)
    members_GB = (groups_B == present_G[:, None]).to(dtype)
    size_G1 = members_GB.sum(dim=1, keepdim=True)
    contrast_GB: Tensor = members_GB / size_G1 - (1 - members_GB) / (len(groups_B) - size_G1)
    return contrast_GB


def hard_disparity(logits_NC: Tensor, groups_N: Tensor) -> float:
    """The largest gap of the labels that ``logits_NC`` predict; NaN with fewer than two groups."""
    labels_NC = torch.nn.functional.one_hot(logits_NC.argmax(dim=1), logits_NC.shape[1]).double()
    gaps_GC = group_gaps(labels_NC, groups_N)
    return float(gaps_GC.max()) if len(gaps_GC) else float("nan")


def public_penalty(
    x: Tensor, groups: Tensor, config: PenaltyConfig, *, generator: torch.Generator
) -> Callable[[nn.Module], Tensor] | None:
    """The weighted regulariser of a model on a fresh batch of public ``x`` (M, ...) at each call; None for weight 0."""
    if not config.weight:
        return None
    batches, memory_format = group_batches(groups, config.batch_size, generator), memory_format_for(x)

    def penalty(model: nn.Module) -> Tensor:
        rows = next(batches)
        logits = model(scale_bytes(x[rows]).contiguous(memory_format=memory_format))
        return config.weight * dpfr(logits, groups[rows], config)

    return penalty


def group_batches(groups_M: Tensor, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows of shuffled passes; every batch has the same number of each group, in the proportions of the pool.

    A remainder is left out. Every group has a record in every batch at least, and a batch at most the whole pool.
    ValueError for fewer than two groups, which no regulariser can compare.
    """
    if not len(groups_M) or groups_M.min() == groups_M.max():
        raise ValueError("Expected public records of two groups or more, got fewer; choose another public split.")
    share = min(1.0, batch_size / len(groups_M))
    members = [torch.nonzero(groups_M == group).flatten() for group in sorted(set(groups_M.tolist()))]
    sizes = [max(1, math.floor(share * len(rows))) for rows in members]
    num_batches = min(len(rows) // size for rows, size in zip(members, sizes, strict=True))
    while True:
        orders = [rows[torch.randperm(len(rows), generator=generator)] for rows in members]
        parts = [order[: num_batches * size].view(-1, size) for order, size in zip(orders, sizes, strict=True)]
        yield from torch.cat(parts, dim=1)
