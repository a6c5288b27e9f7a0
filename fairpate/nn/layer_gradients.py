"""Per-example gradients of single layers: their norms in closed form, and their weighted sums.

Each layer is given its input and the gradient of the summed loss with respect to its output, from which the gradient
of every record follows without another backward pass. A dense layer's is an outer product, so its norm is the product
of two norms and it is never formed (Goodfellow 2015, arXiv 1510.01799). Every other layer forms its gradients, for a
norm must be that of what is summed: a closed form of terms that cancel, such as the products of all pairs of positions,
can be too small by any factor. Norms are sums of squares, added up in blocks that double precision joins: their
relative error is below :data:`ROUNDING` times the precision of the layer.

Shapes: B records; T positions; I inputs, O outputs, G groups of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

ROUNDING = 64  # in units of the precision that gradients have
_FLOATS_UNFOLDED_AT_ONCE, _FLOATS_SQUARED_AT_ONCE = 2**19, 2**9
WeightedSums = list[tuple[Tensor, Tensor]]


class LayerGradient(Protocol):
    """The gradients of B records with respect to one layer's parameters."""

    def squared_norms(self) -> Tensor:
        """Squared L2 norm per record over the layer's trainable parameters, ``float64`` of shape (B,)."""

    def weighted_sums(self, weights_B: Tensor) -> WeightedSums:
        """Per trainable parameter the sum over records of weight times gradient."""

    def per_record(self) -> WeightedSums:
        """Per trainable parameter every record's gradient, shape (B, P)."""


def supports(layer: nn.Module) -> bool:
    """Whether the layer has its gradients here, with the options it was made with."""
    if isinstance(layer, nn.Conv2d):
        return type(layer) is nn.Conv2d and layer.padding_mode == "zeros"
    if isinstance(layer, nn.Embedding):
        return type(layer) is nn.Embedding and layer.max_norm is None and not layer.scale_grad_by_freq
    return type(layer) in _GRADIENTS


def layer_gradient(layer: nn.Module, layer_input: Tensor, output_gradient: Tensor) -> LayerGradient:
    """The gradients of one call of ``layer``; both tensors have the records along their first axis."""
    return _GRADIENTS[type(layer)](layer, layer_input, output_gradient)


class _Dense:
    """Each record's gradient is the outer product of its output gradient and its input."""

    def __init__(self, layer: nn.Linear, input_BI: Tensor, gradient_BO: Tensor) -> None:
        self._layer, self._input_BI, self._gradient_BO = layer, input_BI, gradient_BO

    def squared_norms(self) -> Tensor:
        bias_B = squared_norms(self._gradient_BO)
        if not self._layer.weight.requires_grad:
            return bias_B
        input_B = squared_norms(self._input_BI)
        # |g a'|^2 = |g|^2 |a|^2, to which the bias adds |g|^2.
        return torch.addcmul(bias_B, bias_B, input_B) if _trains_bias(self._layer) else bias_B * input_B

    def weighted_sums(self, weights_B: Tensor) -> WeightedSums:
        sums: WeightedSums = []
        if self._layer.weight.requires_grad:
            sums.append((self._layer.weight, (self._gradient_BO * weights_B[:, None]).mT @ self._input_BI))
        if _trains_bias(self._layer):
            sums.append((self._layer.bias, weights_B @ self._gradient_BO))
        return sums

    def per_record(self) -> WeightedSums:
        weight_BOI = self._gradient_BO[:, :, None] * self._input_BI[:, None, :]
        return _trainable((self._layer.weight, weight_BOI.flatten(1)), (self._layer.bias, self._gradient_BO))


def _dense(layer: nn.Module, layer_input: Tensor, output_gradient: Tensor) -> LayerGradient:
    linear = cast("nn.Linear", layer)
    if layer_input.ndim == 2:
        return _Dense(linear, layer_input, output_gradient)
    # A record's gradient is a sum over positions, whose terms may cancel: it is formed, see the module.
    gradient_BTO = output_gradient.flatten(1, -2)
    weight_BOI = gradient_BTO.mT @ layer_input.flatten(1, -2)
    return _Stored((linear.weight, weight_BOI), (linear.bias, gradient_BTO.sum(dim=1)))


def _trains_bias(layer: nn.Linear) -> int:
    return int(layer.bias is not None and layer.bias.requires_grad)


class _Stored:
    """Layers whose per-example gradients are small enough to be formed: one (B, ...) per parameter."""

    def __init__(self, *gradients: tuple[Tensor | None, Tensor]) -> None:
        self._gradients = [(p, values.flatten(1)) for p, values in gradients if p is not None and p.requires_grad]

    def squared_norms(self) -> Tensor:
        return sum((squared_norms(values) for _, values in self._gradients), start=torch.zeros(()))

    def weighted_sums(self, weights_B: Tensor) -> WeightedSums:
        return [(p, (weights_B @ values).reshape(p.shape)) for p, values in self._gradients]

    def per_record(self) -> WeightedSums:
        return self._gradients


class _Convolution:
    """Forms every record's weight gradient, a few records at a time, in the order (O, height, width, I).

    With images and output gradients in channels-last layout that order is that of memory.
    """

    def __init__(self, layer: nn.Module, layer_input: Tensor, output_gradient: Tensor) -> None:
        self._layer = cast("nn.Conv2d", layer)
        self._weight, self._squared_norms = _convolution_gradients(self._layer, layer_input, output_gradient)
        self._bias = _Stored((self._layer.bias, output_gradient.sum(dim=(2, 3))))

    def squared_norms(self) -> Tensor:
        return self._squared_norms * int(self._layer.weight.requires_grad) + self._bias.squared_norms()

    def weighted_sums(self, weights_B: Tensor) -> WeightedSums:
        outputs, inputs, height, width = self._layer.weight.shape
        total = (weights_B @ self._weight).reshape(outputs, height, width, inputs).permute(0, 3, 1, 2)
        return [*_trainable((self._layer.weight, total)), *self._bias.weighted_sums(weights_B)]

    def per_record(self) -> WeightedSums:
        outputs, inputs, height, width = self._layer.weight.shape
        weight = self._weight.reshape(-1, outputs, height, width, inputs).permute(0, 1, 4, 2, 3).flatten(1)
        return [*_trainable((self._layer.weight, weight)), *self._bias.per_record()]


@torch.no_grad()
def _convolution_gradients(layer: nn.Conv2d, layer_input: Tensor, output_gradient: Tensor) -> tuple[Tensor, Tensor]:
    """(B, weights) and their squared norms (B,): output gradients times the patches that they saw, group by group.

    One buffer of patches that fits a processor's cache serves all records.
    """
    patches, positions_come_last = _patches(layer, _padded(layer, layer_input))
    gradient_BGTO = output_gradient.unflatten(1, (layer.groups, -1)).permute(0, 1, 3, 4, 2).flatten(2, 3)
    num_records, groups, positions, outputs = gradient_BGTO.shape
    size = layer.weight[0].numel()
    weights = layer_input.new_empty(num_records, groups, outputs, size)
    norms_B = layer_input.new_empty(num_records, dtype=torch.float64)
    at_once = max(1, _FLOATS_UNFOLDED_AT_ONCE // max(1, groups * positions * size))
    buffer = layer_input.new_empty(at_once, *patches.shape[1:])
    for start in range(0, num_records, at_once):
        rows = slice(start, min(start + at_once, num_records))
        unfolded = buffer[: rows.stop - start].copy_(patches[rows])
        by_position = (
            unfolded.view(-1, size, positions).mT if positions_come_last else unfolded.view(-1, positions, size)
        )
        torch.bmm(gradient_BGTO[rows].flatten(0, 1).mT, by_position, out=weights[rows].flatten(0, 1))
        norms_B[rows] = squared_norms(weights[rows].flatten(1))
    return weights.flatten(1), norms_B


def _patches(layer: nn.Conv2d, padded_input: Tensor) -> tuple[Tensor, bool]:
    """A view of what every output position sees, (B, groups, output sides, kernel sides, inputs of a group).

    Or with the output sides last, and then True: where they make the longer runs of neighbours in memory.
    """
    inputs, output_width = layer.in_channels // layer.groups, padded_input.shape[3] - layer.kernel_size[1] + 1
    positions_come_last = layer.stride[1] == 1 and output_width > inputs * layer.kernel_size[1]
    layout = torch.contiguous_format if positions_come_last else torch.channels_last
    patches = padded_input.contiguous(memory_format=layout).unflatten(1, (layer.groups, -1))
    for axis, size, stride, dilation in zip((3, 4), layer.kernel_size, layer.stride, layer.dilation, strict=True):
        patches = patches.unfold(axis, (size - 1) * dilation + 1, stride)[..., ::dilation]
    order = (0, 1, 5, 6, 2, 3, 4) if positions_come_last else (0, 1, 3, 4, 5, 6, 2)
    return patches.permute(order), positions_come_last


def _padded(layer: nn.Conv2d, layer_input: Tensor) -> Tensor:
    # Torch's own numbers, in which padding by name (`same`) is resolved.
    left, right, above, below = layer._reversed_padding_repeated_twice
    if not any((left, right, above, below)):
        return layer_input
    return functional.pad(layer_input, (left, right, above, below))


def squared_norms(values_BP: Tensor) -> Tensor:
    """Squared L2 norm of every row, ``float64`` of shape (B,)."""
    whole = values_BP.shape[1] - values_BP.shape[1] % _FLOATS_SQUARED_AT_ONCE
    # Short blocks in the layer's precision, joined in double: the error does not grow with the number of weights.
    norms_B: Tensor = torch.linalg.vector_norm(values_BP[:, whole:], dim=1).double().square_()
    if whole:
        blocks = values_BP[:, :whole].unflatten(1, (-1, _FLOATS_SQUARED_AT_ONCE))
        norms_B += torch.linalg.vector_norm(blocks, dim=2).double().square_().sum(dim=1)
    return norms_B


def _group_norm(layer: nn.Module, layer_input: Tensor, output_gradient: Tensor) -> LayerGradient:
    norm = cast("nn.GroupNorm", layer)
    normal = functional.group_norm(layer_input, norm.num_groups, eps=norm.eps)
    positions = tuple(range(2, layer_input.ndim))
    weight, bias = output_gradient * normal, output_gradient
    if positions:
        weight, bias = weight.sum(dim=positions), bias.sum(dim=positions)
    return _Stored((norm.weight, weight), (norm.bias, bias))


def _layer_norm(layer: nn.Module, layer_input: Tensor, output_gradient: Tensor) -> LayerGradient:
    norm = cast("nn.LayerNorm", layer)
    normal = functional.layer_norm(layer_input, norm.normalized_shape, eps=norm.eps)
    size = math.prod(norm.normalized_shape)
    weight = (output_gradient * normal).reshape(len(layer_input), -1, size).sum(dim=1)
    return _Stored((norm.weight, weight), (norm.bias, output_gradient.reshape(len(layer_input), -1, size).sum(dim=1)))


class _Embedding:
    """A word that stands at n positions of a record has one gradient, their sum: each of them holds an n-th of it."""

    def __init__(self, layer: nn.Module, layer_input: Tensor, output_gradient: Tensor) -> None:
        self._layer = cast("nn.Embedding", layer)
        self._index_BT = layer_input.reshape(len(layer_input), -1)
        gradient_BTO = output_gradient.reshape(*self._index_BT.shape, -1)
        # Torch gives the padding word no gradient either; -1 is no word.
        is_padding_BT = self._index_BT == (-1 if self._layer.padding_idx is None else self._layer.padding_idx)
        same_BTT = (self._index_BT[:, :, None] == self._index_BT[:, None, :]).to(gradient_BTO.dtype)
        self._count_BT1 = same_BTT.sum(dim=2, keepdim=True)
        self._share_BTO = same_BTT @ gradient_BTO.masked_fill(is_padding_BT[..., None], 0) / self._count_BT1

    def squared_norms(self) -> Tensor:
        # n positions with a share each: n |sqrt(n) share|^2 = |n share|^2.
        return squared_norms((self._share_BTO * self._count_BT1.sqrt()).flatten(1))

    def weighted_sums(self, weights_B: Tensor) -> WeightedSums:
        total = torch.zeros_like(self._layer.weight)
        weighted = (self._share_BTO * weights_B[:, None, None]).flatten(0, 1)
        return [(self._layer.weight, total.index_add_(0, self._index_BT.flatten(), weighted))]

    def per_record(self) -> WeightedSums:
        total_BVO = self._share_BTO.new_zeros(len(self._index_BT), *self._layer.weight.shape)
        index_BTO = self._index_BT[:, :, None].expand_as(self._share_BTO)
        return [(self._layer.weight, total_BVO.scatter_add_(1, index_BTO, self._share_BTO).flatten(1))]


def _trainable(*sums: tuple[Tensor | None, Tensor | None]) -> WeightedSums:
    return [(p, value) for p, value in sums if p is not None and p.requires_grad and value is not None]


_GRADIENTS: dict[type[nn.Module], Callable[[nn.Module, Tensor, Tensor], LayerGradient]] = {
    nn.Linear: _dense,
    nn.Conv2d: _Convolution,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Embedding: _Embedding,
}
