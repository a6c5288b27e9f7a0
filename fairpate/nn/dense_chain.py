"""Forward and backward of a sequence of dense layers by hand, for small models whose time autograd would dominate.

The layers' inputs and output gradients are all that per-example clipping asks for (:mod:`fairpate.nn.layer_gradients`);
in a chain of dense layers and elementwise functions each follows from the next by one matrix product and one mask.

Shapes: B records; I inputs, O outputs of a layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairpate.nn.layer_gradients import WeightedSums
from fairpate.nn.models import ScaleBytes, scale_bytes
from fairpate.nn.record_wise import unknown_module


@dataclass(frozen=True, kw_only=True)
class _Activation:
    """An elementwise function whose derivative follows from its value."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


# Each derivative from the value alone, so that what went in need not be kept.
_ACTIVATIONS: dict[type[nn.Module], _Activation] = {
    nn.ReLU: _Activation(
        forward=torch.relu, backward=lambda gradient, value: torch.ops.aten.threshold_backward(gradient, value, 0)
    ),
    nn.Tanh: _Activation(forward=torch.tanh, backward=torch.ops.aten.tanh_backward),
}


class DenseChain:
    """A model of dense layers and elementwise functions, before which records may be scaled and flattened."""

    def __init__(self, layers: list[nn.Module], *, flattens: bool) -> None:
        self._layers, self._flattens = layers, flattens
        self._lowest = next(i for i, layer in enumerate(layers) if _is_trained(layer))

    @classmethod
    def of(cls, model: nn.Module) -> DenseChain | None:
        """The chain that ``model`` is, or None for any other: another layer, a hook, a layer that runs twice."""
        leaves = list(_leaves(model))
        leading = list(itertools.takewhile(lambda leaf: type(leaf) in (ScaleBytes, nn.Flatten), leaves))
        layers = leaves[len(leading) :]
        dense = [layer for layer in layers if type(layer) is nn.Linear]
        is_chain = (
            len(dense) == sum(type(layer) not in _ACTIVATIONS for layer in layers)
            and len(set(map(id, dense))) == len(dense)
            and all((leaf.start_dim, leaf.end_dim) == (1, -1) for leaf in leading if isinstance(leaf, nn.Flatten))
            and unknown_module(model) is None
            and any(map(_is_trained, dense))
            and layers[0] is dense[0]
        )
        return cls(layers, flattens=any(isinstance(leaf, nn.Flatten) for leaf in leading)) if is_chain else None

    def reads(self, x: Tensor) -> bool:
        """Whether a record of ``x`` (B, ...) is one row to the first layer, which this class knows."""
        return x.ndim == 2 or self._flattens

    @torch.no_grad()
    def forward(self, x: Tensor) -> list[Tensor]:
        """The input of every layer, then the output of the last, for an ``x`` that the chain reads."""
        values = [scale_bytes(x) if x.ndim == 2 else scale_bytes(x).flatten(1)]
        for layer in self._layers:
            if isinstance(layer, nn.Linear):
                values.append(functional.linear(values[-1], layer.weight, layer.bias))
            else:
                values.append(_ACTIVATIONS[type(layer)].forward(values[-1]))
        return values

    @torch.no_grad()
    def backward(self, values: list[Tensor], gradient: Tensor) -> list[tuple[nn.Module, Tensor, Tensor]]:
        """Every trained layer, its input and its output's gradient, from what ``forward`` gave and the last one's."""
        return list(self._dense_gradients(values, gradient))

    @torch.no_grad()
    def summed_gradients(self, values: list[Tensor], gradient: Tensor) -> WeightedSums:
        """Per trained parameter its gradient summed over records, as autograd would give it; arguments as above."""
        sums: WeightedSums = []
        for layer, value, of_output in self._dense_gradients(values, gradient):
            if layer.weight.requires_grad:
                sums.append((layer.weight, of_output.mT @ value))
            if layer.bias is not None and layer.bias.requires_grad:
                sums.append((layer.bias, of_output.sum(dim=0)))
        return sums

    def _dense_gradients(self, values: list[Tensor], gradient: Tensor) -> Iterator[tuple[nn.Linear, Tensor, Tensor]]:
        """Trained layers from the last to the lowest, each with its input and the gradient of its output."""
        for i in range(len(self._layers) - 1, self._lowest - 1, -1):
            layer = self._layers[i]
            if not isinstance(layer, nn.Linear):
                gradient = _ACTIVATIONS[type(layer)].backward(gradient, values[i + 1])
                continue
            if _is_trained(layer):
                yield layer, values[i], gradient
            # Below the lowest trained layer nobody asks for a gradient.
            if i > self._lowest:
                gradient = gradient @ layer.weight


def _leaves(model: nn.Module) -> Iterator[nn.Module]:
    # By its very type: a subclass may call its children otherwise.
    if type(model) is not nn.Sequential:
        yield model
        return
    for child in model:
        yield from _leaves(child)


def _is_trained(layer: nn.Module) -> bool:
    return any(p.requires_grad for p in layer.parameters())
