"""Sums of clipped per-example gradients: the only values that differentially private SGD reads from a batch.

Abadi et al. 2016 ("Deep Learning with Differential Privacy", arXiv 1607.00133): every record's gradient, over all
parameters together, is scaled down to an L2 norm of at most ``clip_norm`` before the sum. One backward pass stores each
layer's input and output gradient, from which norms and then the weighted sum are computed (Bu et al. 2023, arXiv
2210.00038).

For a dense layer a record's gradient is an outer product, so its norm is the product of two norms and the gradient need
not be computed (Goodfellow 2015, arXiv 1510.01799). A convolution with few positions takes its norms from products of
all pairs of positions: their terms may cancel, and the sum could be too small by any factor, so that a bound on all
rounding is added. Every other layer computes its per-example gradients. Norms are sums of squares over blocks, added up
in double precision: their relative error is below :data:`ROUNDING` times the precision of the layer.

Clipping bounds what one record adds to a sum only if the record's gradient depends on no other record. The closed forms
also need that every layer runs once, on its own weights, with records along the first axis. A list of known layers and
containers ensures both; a model with any other module is refused. :class:`DenseChain` runs a sequence of dense layers
and elementwise functions forward and backward by hand, for small models, where autograd would take most of the time.

Where records belong to owners (persons with several records each), the average gradient of each owner's records is
computed and clipped instead. ``owner_B`` gives each record's owner, in ascending numbers.

The clipping bound holds for floating-point numbers too: ``clip_norm`` is reduced beforehand by the rounding error of
norms, and a record whose gradient is not finite adds nothing. One effect is not covered: leaving out a record changes
the rounding of the *other* records of a batch, by a few units in the last place of the sum.

Shapes: B records of a batch; T positions; I inputs, O outputs, G groups of a layer; C outputs of a model; P values of
one parameter.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from fairpate.nn.models import FrozenBatchNorm, ImageNetScale, OrientedGradients, ScaleBytes, Shortened, scale_bytes

ROUNDING = 64  # in units of the precision that gradients have
# A processor is fast while patches stay in its cache; a GPU once there are enough of them to keep it busy.
_FLOATS_UNFOLDED_AT_ONCE = {"cpu": 2**19, "cuda": 2**28}
_FLOATS_SQUARED_AT_ONCE = 2**9
# By name: torchvision is not imported for a model that has none of it.
_CONTAINERS = {
    "torch.nn.modules.container": {"Sequential"},
    "torchvision.models.resnet": {"ResNet", "BasicBlock", "Bottleneck"},
    "torchvision.models.densenet": {"DenseNet", "_DenseBlock", "_DenseLayer", "_Transition"},
}
_FIXED = {nn.Identity, nn.Dropout, ScaleBytes, ImageNetScale, OrientedGradients, Shortened, FrozenBatchNorm}
_ACTIVATING = {nn.ReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.LeakyReLU}
_POOLING = {nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d}
_WITHOUT_PARAMETERS: set[type[nn.Module]] = _FIXED | _ACTIVATING | _POOLING
WeightedSums = list[tuple[Tensor, Tensor]]


def layer_gradient(layer: nn.Module, layer_input: Tensor, output_gradient: Tensor) -> LayerGradient:
    """Return the per-example gradients of a ``layer``, given its input and the gradient of its output, both with
    records along the first axis."""
    return _GRADIENTS[type(layer)](layer, layer_input, output_gradient)


class _Dense:
    """Per-example gradients of a dense layer: each is the outer product of the record's output gradient and input.

    ``squared_norms()``: the squared norm of each record's gradient over the trainable parameters, ``float64`` (B,).
    ``weighted_sums(weights_B)``: for each trainable parameter, the sum over records of weight times gradient.
    ``per_record()``: for each trainable parameter, the gradient of every record (B, P). ``products(shift)``: the inner
    product of every record's gradient with ``shift``, (B,); ``shift`` maps each parameter's ``id`` to a tensor.
    """

    def __init__(self, layer: nn.Linear, input_BI: Tensor, gradient_BO: Tensor) -> None:
        self._layer, self._input_BI, self._gradient_BO = layer, input_BI, gradient_BO
        self._trains_bias = layer.bias is not None and layer.bias.requires_grad

    def squared_norms(self) -> Tensor:
        bias_B = squared_norms(self._gradient_BO)
        if not self._layer.weight.requires_grad:
            return bias_B
        input_B = squared_norms(self._input_BI)
        # |g a'|^2 = |g|^2 |a|^2, to which the bias adds |g|^2.
        return torch.addcmul(bias_B, bias_B, input_B) if self._trains_bias else bias_B * input_B

    def weighted_sums(self, weights_B: Tensor) -> WeightedSums:
        sums: WeightedSums = []
        if self._layer.weight.requires_grad:
            sums.append((self._layer.weight, (self._gradient_BO * weights_B[:, None]).mT @ self._input_BI))
        if self._trains_bias:
            sums.append((self._layer.bias, weights_B @ self._gradient_BO))
        return sums

    def per_record(self) -> WeightedSums:
        weight_BOI = self._gradient_BO[:, :, None] * self._input_BI[:, None, :]
        return _Formed((self._layer.weight, weight_BOI), (self._layer.bias, self._gradient_BO)).per_record()

    def products(self, shift: Mapping[int, Tensor]) -> Tensor:
        total_B = self._gradient_BO.new_zeros(len(self._gradient_BO))
        if self._layer.weight.requires_grad:
            # <g a', R> = g' R a
            total_B += ((self._gradient_BO @ shift[id(self._layer.weight)]) * self._input_BI).sum(dim=1)
        if self._trains_bias:
            total_B += self._gradient_BO @ shift[id(self._layer.bias)]
        return total_B


def _dense(linear: Any, layer_input: Tensor, output_gradient: Tensor) -> LayerGradient:
    if layer_input.ndim == 2:
        return _Dense(linear, layer_input, output_gradient)
    # A record's gradient is a sum over positions, whose terms may cancel: it is formed, see the module.
    gradient_BTO = output_gradient.flatten(1, -2)
    weight_BOI = gradient_BTO.mT @ layer_input.flatten(1, -2)
    return _Formed((linear.weight, weight_BOI), (linear.bias, gradient_BTO.sum(dim=1)))


class _Formed:
    """Per-example gradients of one layer that are materialised: one tensor (B, ...) per parameter; methods as in
    :class:`_Dense`."""

    def __init__(self, *gradients: tuple[Tensor | None, Tensor]) -> None:
        self._gradients = [(p, values.flatten(1)) for p, values in gradients if p is not None and p.requires_grad]

    def squared_norms(self) -> Tensor:
        return sum((squared_norms(values) for _, values in self._gradients), start=torch.zeros(()))

    def weighted_sums(self, weights_B: Tensor) -> WeightedSums:
        return [(p, (weights_B @ values).reshape(p.shape)) for p, values in self._gradients]

    def per_record(self) -> WeightedSums:
        return self._gradients

    def products(self, shift: Mapping[int, Tensor]) -> Tensor:
        return sum((values @ shift[id(p)].flatten() for p, values in self.per_record()), start=torch.zeros(()))


class _Convolution(_Formed):
    """Per-example gradients of a convolution, computed for a few records at a time.

    A record's gradient of the weights has the axes (output channels, height, width, input channels). This is the order
    in memory if images and output gradients have the channels-last layout.
    """

    @torch.no_grad()
    def __init__(self, convolution: Any, layer_input: Tensor, output_gradient: Tensor) -> None:
        self._layer: nn.Conv2d = convolution
        self._bias = _Formed((convolution.bias, output_gradient.sum(dim=(2, 3))))
        # With the output sides last, where they make the longer runs of neighbours in memory.
        inputs = convolution.in_channels // convolution.groups
        padded_width = layer_input.shape[3] + sum(convolution._reversed_padding_repeated_twice[:2])
        output_width = padded_width - convolution.kernel_size[1] + 1
        positions_come_last = convolution.stride[1] == 1 and output_width > inputs * convolution.kernel_size[1]
        patches = _patches(convolution, layer_input, positions_come_last=positions_come_last)
        # Weight gradients are output gradients times patches, group by group.
        gradient_BGTO = output_gradient.unflatten(1, (convolution.groups, -1)).permute(0, 1, 3, 4, 2).flatten(2, 3)
        num_records, groups, positions, outputs = gradient_BGTO.shape
        size = convolution.weight[0].numel()
        weights = layer_input.new_empty(num_records, groups, outputs, size)
        norms_B = layer_input.new_empty(num_records, dtype=torch.float64)
        floats_at_once = _FLOATS_UNFOLDED_AT_ONCE[layer_input.device.type]
        at_once = max(1, min(num_records, floats_at_once // max(1, groups * positions * size)))
        # One buffer of patches serves all records.
        buffer = layer_input.new_empty(at_once, *patches.shape[1:])
        for start in range(0, num_records, at_once):
            rows = slice(start, min(start + at_once, num_records))
            unfolded = buffer[: rows.stop - start].copy_(patches[rows])
            by_position = (
                unfolded.view(-1, size, positions).mT if positions_come_last else unfolded.view(-1, positions, size)
            )
            torch.bmm(gradient_BGTO[rows].flatten(0, 1).mT, by_position, out=weights[rows].flatten(0, 1))
            norms_B[rows] = squared_norms(weights[rows].flatten(1))
        self._weight, self._squared_norms = weights.flatten(1), norms_B

    def squared_norms(self) -> Tensor:
        return self._squared_norms * int(self._layer.weight.requires_grad) + self._bias.squared_norms()

    def weighted_sums(self, weights_B: Tensor) -> WeightedSums:
        total = _as_weights(self._layer, weights_B @ self._weight)
        weight: WeightedSums = [(self._layer.weight, total)] if self._layer.weight.requires_grad else []
        return weight + self._bias.weighted_sums(weights_B)

    def per_record(self) -> WeightedSums:
        weight = _as_weights(self._layer, self._weight).flatten(1)
        return [*_Formed((self._layer.weight, weight)).per_record(), *self._bias.per_record()]


def _as_weights(convolution: nn.Conv2d, values: Tensor) -> Tensor:
    """Return ``values`` (..., P), in the order of :class:`_Convolution`, in the shape of the weights: (..., output
    channels, input channels, height, width)."""
    outputs, inputs, height, width = convolution.weight.shape
    return values.unflatten(-1, (outputs, height, width, inputs)).movedim(-1, -3)


def _patches(convolution: Any, layer_input: Tensor, *, positions_come_last: bool = False) -> Tensor:
    """Return a view of the patch behind every output position, (B, groups, output sides, kernel sides, inputs of a
    group), or with the output sides last."""
    # Torch's own numbers, in which padding by name (`same`) is resolved.
    padding = convolution._reversed_padding_repeated_twice
    padded = functional.pad(layer_input, padding) if any(padding) else layer_input
    layout = torch.contiguous_format if positions_come_last else torch.channels_last
    patches = padded.contiguous(memory_format=layout).unflatten(1, (convolution.groups, -1))
    options = (convolution.kernel_size, convolution.stride, convolution.dilation)
    for axis, size, stride, dilation in zip((3, 4), *options, strict=True):
        patches = patches.unfold(axis, (size - 1) * dilation + 1, stride)[..., ::dilation]
    return patches.permute((0, 1, 5, 6, 2, 3, 4) if positions_come_last else (0, 1, 3, 4, 5, 6, 2))


class _ConvolutionByPositions:
    """Per-example gradients of a convolution with few positions and many weights, whose norms come from products of all
    pairs of positions (Bu, Mao and Xu 2022, arXiv 2205.10683); methods as in :class:`_Dense`.

    A record's gradient is the sum over positions t of the outer products of g_t, the gradient of the output, and a_t,
    the patch; its squared norm is the sum over pairs of (g_t' g_s) (a_t' a_s). Products are in ``float64``. The terms
    may cancel, in the norm and in the sum of gradients, which is rounded; so the length of all that may be rounded, T
    eps sum_t |g_t| |a_t|, is added to the norm: it is never too small.
    """

    @torch.no_grad()
    def __init__(self, convolution: Any, layer_input: Tensor, output_gradient: Tensor) -> None:
        self._call = (convolution, layer_input, output_gradient)
        self._layer: nn.Conv2d = convolution
        self._bias = _Formed((convolution.bias, output_gradient.sum(dim=(2, 3))))
        groups = convolution.groups
        patches = _patches(convolution, layer_input)
        self._patches_BGTI = patches.reshape(len(layer_input), groups, -1, convolution.weight[0].numel())
        self._gradient_BGTO = output_gradient.unflatten(1, (groups, -1)).permute(0, 1, 3, 4, 2).flatten(2, 3)

    @torch.no_grad()
    def squared_norms(self) -> Tensor:
        if not self._layer.weight.requires_grad:
            return self._bias.squared_norms()
        patches, gradient = self._patches_BGTI.double(), self._gradient_BGTO.double()
        products = (patches @ patches.mT, gradient @ gradient.mT)
        squared_BG = (products[0] * products[1]).sum(dim=(2, 3)).clamp_(min=0)
        lengths_BGT = torch.sqrt(products[0].diagonal(dim1=2, dim2=3) * products[1].diagonal(dim1=2, dim2=3))
        rounding = self._patches_BGTI.shape[2] * torch.finfo(self._patches_BGTI.dtype).eps
        norms_BG = squared_BG.sqrt_() + rounding * lengths_BGT.sum(dim=2)
        return norms_BG.square_().sum(dim=1) + self._bias.squared_norms()

    @torch.no_grad()
    def weighted_sums(self, weights_B: Tensor) -> WeightedSums:
        weighted = self._gradient_BGTO * weights_B.view(-1, 1, 1, 1)
        # One product for each group, over all positions of all records.
        total = weighted.transpose(0, 1).flatten(1, 2).mT @ self._patches_BGTI.transpose(0, 1).flatten(1, 2)
        total = _as_weights(self._layer, total.flatten())
        weight: WeightedSums = [(self._layer.weight, total)] if self._layer.weight.requires_grad else []
        return weight + self._bias.weighted_sums(weights_B)

    def per_record(self) -> WeightedSums:
        return _Convolution(*self._call).per_record()

    def products(self, shift: Mapping[int, Tensor]) -> Tensor:
        return _Convolution(*self._call).products(shift)


def _convolution(convolution: Any, layer_input: Tensor, output_gradient: Tensor) -> LayerGradient:
    # Pairs of positions cost memory, which is what a GPU waits for, and in float64 arithmetic, which a processor does.
    positions, size = output_gradient[0, 0].numel(), convolution.weight[0].numel()
    outputs = convolution.out_channels // convolution.groups
    costs = 2 * positions * (positions if layer_input.is_cuda else outputs + size)
    kind = _ConvolutionByPositions if costs < outputs * size else _Convolution
    return kind(convolution, layer_input, output_gradient)


LayerGradient = _Dense | _Formed | _ConvolutionByPositions
"""The per-example gradients of B records with respect to one layer's parameters."""


def squared_norms(values_BP: Tensor) -> Tensor:
    """Return the squared L2 norm of every row, ``float64`` of shape (B,)."""
    whole = values_BP.shape[1] - values_BP.shape[1] % _FLOATS_SQUARED_AT_ONCE
    # Short blocks in the layer's precision, joined in double: the error does not grow with the number of weights.
    norms_B: Tensor = torch.linalg.vector_norm(values_BP[:, whole:], dim=1).double().square_()
    if whole:
        blocks = values_BP[:, :whole].unflatten(1, (-1, _FLOATS_SQUARED_AT_ONCE))
        norms_B += torch.linalg.vector_norm(blocks, dim=2).double().square_().sum(dim=1)
    return norms_B


def _group_norm(norm: Any, layer_input: Tensor, output_gradient: Tensor) -> LayerGradient:
    # Normalised without scale and shift: the gradient of the scale is taken against this value.
    normal = functional.group_norm(layer_input, norm.num_groups, eps=norm.eps)
    positions = tuple(range(2, layer_input.ndim))
    weight, bias = output_gradient * normal, output_gradient
    if positions:
        weight, bias = weight.sum(dim=positions), bias.sum(dim=positions)
    return _Formed((norm.weight, weight), (norm.bias, bias))


def _layer_norm(norm: Any, layer_input: Tensor, output_gradient: Tensor) -> LayerGradient:
    normal = functional.layer_norm(layer_input, norm.normalized_shape, eps=norm.eps)
    size = math.prod(norm.normalized_shape)
    weight = (output_gradient * normal).reshape(len(layer_input), -1, size).sum(dim=1)
    return _Formed((norm.weight, weight), (norm.bias, output_gradient.reshape(len(layer_input), -1, size).sum(dim=1)))


_GRADIENTS: dict[type[nn.Module], Callable[[Any, Tensor, Tensor], LayerGradient]] = {
    nn.Linear: _dense,
    nn.Conv2d: _convolution,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
}


def unknown_module(model: nn.Module) -> str | None:
    """Return the name and type of the first module whose per-example gradients :class:`GradientClipper` cannot compute;
    None if there is no such module.

    Such a module is not in the list of known layers, was altered (by a hook, an instance's own ``forward`` or an
    additional parameter), or has a trained parameter that the model uses twice.
    """
    seen: set[int] = set()
    # With duplicates: a module that the model has twice has to be met twice.
    for name, module in model.named_modules(remove_duplicate=False):
        kind, own = type(module), dict(module.named_parameters(recurse=False))
        trained = [p for p in own.values() if p.requires_grad]
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        # A hook, or a method of the instance, may compute anything: the type alone would prove nothing.
        if any(hooks) or "forward" in vars(module) or not own.keys() <= {"weight", "bias"}:
            is_known = False
        elif kind is nn.Flatten:
            # From axis 0 on it would join the records into one.
            is_known = cast("nn.Flatten", module).start_dim >= 1
        elif isinstance(module, nn.Unflatten) and kind is nn.Unflatten:
            is_known = isinstance(module.dim, int) and module.dim >= 1
        elif kind.__qualname__ in _CONTAINERS.get(kind.__module__, ()):
            is_known = not own
        elif isinstance(module, nn.LayerNorm) and not trained:
            # Of several normalised axes one could be the records'; that is checked for layers in training alone.
            is_known = kind is nn.LayerNorm and len(module.normalized_shape) == 1
        else:
            # The closed form of a convolution pads with zeros.
            has_zeros = not isinstance(module, nn.Conv2d) or module.padding_mode == "zeros"
            is_known = has_zeros and (kind in _WITHOUT_PARAMETERS or kind in _GRADIENTS)
        if not is_known or any(id(p) in seen for p in trained):
            return f"Module {name or 'of the model itself'} ({kind.__name__})"
        # A parameter that the model has twice has the sum of two gradients; the norm of either is not the sum's.
        seen.update(map(id, trained))
    return None


# Forward, and backward from the value alone, so that the input need not be kept.
_ACTIVATIONS: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.ReLU: (torch.relu, lambda gradient, value: torch.ops.aten.threshold_backward(gradient, value, 0)),
    nn.Tanh: (torch.tanh, torch.ops.aten.tanh_backward),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class DenseChain:
    """A model of dense layers and elementwise functions; scaling and flattening may come first.

    ``trained`` are the indices of the layers that are trained, in ascending order.
    """

    layers: list[nn.Module]
    flattens: bool
    trained: list[int]

    @classmethod
    def of(cls, model: nn.Module) -> DenseChain | None:
        """Return ``model`` as a chain; None if it has any other kind of layer, a hook, or a layer that runs twice."""
        # A module that occurs twice is met twice; a container of any other kind makes the model no chain.
        modules = [module for _, module in model.named_modules(remove_duplicate=False)]
        leaves = [module for module in modules if type(module) is not nn.Sequential]
        # Scaling and flattening may only come first: no gradient passes through them.
        leading = list(itertools.takewhile(lambda leaf: type(leaf) in (ScaleBytes, nn.Flatten), leaves))
        layers = leaves[len(leading) :]
        dense = [layer for layer in layers if type(layer) is nn.Linear]
        trained = [i for i, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters())]
        is_chain = (
            len(dense) == sum(type(layer) not in _ACTIVATIONS for layer in layers)
            and len(set(map(id, dense))) == len(dense)
            and all((leaf.start_dim, leaf.end_dim) == (1, -1) for leaf in leading if isinstance(leaf, nn.Flatten))
            and unknown_module(model) is None
            and len(trained) > 0
            and layers[0] is dense[0]
        )
        flattens = any(isinstance(leaf, nn.Flatten) for leaf in leading)
        return cls(layers=layers, flattens=flattens, trained=trained) if is_chain else None

    def reads(self, x: Tensor) -> bool:
        """Return True if the first layer reads each record of ``x`` (B, ...) as one vector, the only form that this
        class supports."""
        return x.ndim == 2 or self.flattens

    @torch.no_grad()
    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the input of every layer, and then the output of the last. ``x`` must be of the form that
        :meth:`reads` checks."""
        values = [scale_bytes(x) if x.ndim == 2 else scale_bytes(x).flatten(1)]
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                values.append(functional.linear(values[-1], layer.weight, layer.bias))
            else:
                values.append(_ACTIVATIONS[type(layer)][0](values[-1]))
        return values

    @torch.no_grad()
    def backward(self, values: list[Tensor], gradient: Tensor) -> list[tuple[nn.Linear, Tensor, Tensor]]:
        """Return every trained layer with its input and the gradient of its output.

        ``values`` is the list that :meth:`forward` returned, ``gradient`` the gradient with respect to the last layer's
        output.
        """
        calls, lowest = [], self.trained[0]
        for i in range(len(self.layers) - 1, lowest - 1, -1):
            layer = self.layers[i]
            if not isinstance(layer, nn.Linear):
                gradient = _ACTIVATIONS[type(layer)][1](gradient, values[i + 1])
                continue
            if i in self.trained:
                calls.append((layer, values[i], gradient))
            # Below the lowest trained layer no gradient is needed.
            if i > lowest:
                gradient = gradient @ layer.weight
        return calls

    @torch.no_grad()
    def summed_gradients(self, values: list[Tensor], gradient: Tensor) -> WeightedSums:
        """Return each trained parameter with its gradient summed over records, as autograd would compute it. ``values``
        and ``gradient`` are as in :meth:`backward`."""
        sums: WeightedSums = []
        for layer, value, of_output in self.backward(values, gradient):
            if layer.weight.requires_grad:
                sums.append((layer.weight, of_output.mT @ value))
            if layer.bias is not None and layer.bias.requires_grad:
                sums.append((layer.bias, of_output.sum(dim=0)))
        return sums


PerExampleLoss = Callable[[Tensor, Tensor], Tensor]
"""A loss ``(outputs, targets)`` with one value per record. For speed it may have a method ``gradient``, as
:class:`CrossEntropy`; a method ``before_batch(clipper, x, targets, owner_B)``, if any, is called first for each batch.
"""
# One call of a layer: the layer, its input and the gradient of its output.
LayerCall = tuple[nn.Module, Tensor, Tensor]
_LONGEST = 1e30  # in clip norms: the factor of anything longer has no precision left, and the record adds nothing
_log = logging.getLogger(__name__)


def part_bounds(num_records: int, size: int, owner_B: Tensor | None = None) -> list[tuple[int, int]]:
    """Return the bounds (start, stop) of the parts in which a batch is processed to save memory: at most ``size``
    records each.

    With ``owner_B``, the person (owner) of each record, all records of a person are in one part, which may then be
    longer.
    """
    if owner_B is None or not num_records:
        return [(start, min(start + size, num_records)) for start in range(0, num_records, max(1, size))]
    # Owners ascend, so that one ends where the number changes.
    firsts = [0, *(torch.diff(owner_B).nonzero()[:, 0] + 1).tolist()]
    starts: list[int] = []
    for first, after in zip(firsts, [*firsts[1:], num_records], strict=True):
        # Never through an owner, whose average needs all of its records.
        if not starts or after - starts[-1] > size:
            starts.append(first)
    return list(zip(starts, [*starts[1:], num_records], strict=True))


def shares_of(owner_B: Tensor) -> Tensor:
    """Return for each record 1 / n, ``float32`` (B,), where n is the number of records of its owner (a person) in the
    batch. With these weights, sums over records are sums of the owners' averages."""
    _, owner_B, counts = torch.unique_consecutive(owner_B, return_inverse=True, return_counts=True)
    return (1 / counts.float())[owner_B]


class CrossEntropy:
    """Cross entropy per record for targets (B,) ``int64``, with a quick closed form of its gradient."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per record, shape (B,)."""
        return functional.cross_entropy(outputs, targets, reduction="none")

    @torch.no_grad()
    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the gradient of the summed losses with respect to ``outputs`` (B, C): probability minus one-hot
        label."""
        # For a few classes this is quicker than softmax.
        probability = torch.log_softmax(outputs, dim=1).exp_()
        return probability.scatter_(1, targets[:, None], -1.0, reduce="add")


@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """The sum of clipped gradients of a batch: one tensor per trainable parameter, in the model's order.

    ``squared_norms_B`` describes single records and is not to be published.
    """

    gradients: list[Tensor]
    squared_norms_B: Tensor
    """Squared L2 norm of every record's or owner's gradient before clipping, shape (B,)."""


class GradientClipper:
    """Computes the sum of clipped per-example gradients of one model for each batch that it is given."""

    _values: list[Tensor] | None = None  # of the next batch's forward pass through the chain, if it is made already

    def __init__(
        self, model: nn.Module, loss: PerExampleLoss, *, clip_norm: float, max_records: int | None = None
    ) -> None:
        """Create a clipper for ``model`` and ``loss(outputs, targets)``, which returns one value per record, shape
        (B,).

        ``max_records`` bounds how many records are in memory at once; the sum does not depend on it. ValueError for a
        model with a module that :func:`unknown_module` finds.
        """
        if not clip_norm > 0:
            raise ValueError(f"Expected clip_norm > 0, got {clip_norm}.")
        unknown = unknown_module(model)
        if unknown is not None:
            raise ValueError(
                f"{unknown}: clipping needs layers that are known to run once, on their own weights and on each record "
                "separately; use linear and convolutional layers, GroupNorm or LayerNorm, and layers without "
                "parameters."
            )
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._trained, self._has_warned = self.parameters, False
        self.model, self.max_records, self._loss, self._clip_norm = model, max_records, loss, clip_norm
        self._gradient_of_loss: PerExampleLoss | None = getattr(loss, "gradient", None)
        self._before_batch: Callable[..., None] = getattr(loss, "before_batch", lambda *_: None)
        self._layers = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        self._chain = DenseChain.of(model)
        self.share_B: Tensor | None = None
        """During the forward pass of a part of a batch: 1 / the number of records of each record's owner; None without
        owners."""

    def sum(self, x: Tensor, targets: Tensor, owner_B: Tensor | None = None) -> ClippedSum:
        """Return the sum over records of min(1, clip_norm / norm) times the gradient of the record's loss.

        The sum is 0 for an empty batch. With ``owner_B``, the sum is over owners (persons), each with the average
        gradient of the owner's records; ``owner_B`` gives each record's owner as a number, from 0 in ascending order. A
        record whose gradient is not finite adds nothing; the log reports this once. The model runs in the mode
        (training or evaluation) that the caller has set. ValueError for weights that are not finite, and under
        autocast, where norms are too inexact to bound a record.
        """
        self._before_batch(self, x, targets, owner_B)
        if torch.is_autocast_enabled(x.device.type):
            raise ValueError(
                "Per-example gradients must be computed in the parameters' own precision; leave autocast out."
            )
        size = self.max_records or len(x)
        if owner_B is None and 0 < len(x) <= size:
            return self._part(x, targets)
        bounds = part_bounds(len(x), size, owner_B)
        parts = [self._part(x[i:j], targets[i:j], None if owner_B is None else owner_B[i:j]) for i, j in bounds]
        if not parts:
            nothing = torch.zeros(0, device=x.device, dtype=torch.float64)
            return ClippedSum(gradients=[torch.zeros_like(p) for p in self.parameters], squared_norms_B=nothing)
        total = parts[0].gradients
        for each in parts[1:]:
            torch._foreach_add_(total, each.gradients)
        return ClippedSum(gradients=total, squared_norms_B=torch.cat([each.squared_norms_B for each in parts]))

    def _part(self, x: Tensor, targets: Tensor, owner_B: Tensor | None = None) -> ClippedSum:
        if owner_B is not None:
            # Owners need formed gradients: the norm of an average does not follow from its records' norms.
            self.share_B = shares_of(owner_B)
            return self._clipped_rows(self._rows(self._layer_calls(x, targets), owner_B))
        calls = self._layer_calls(x, targets)
        return self._clipped(lambda kept: [layer_gradient(layer, *kept(*values)) for layer, *values in calls])

    def _clipped_rows(self, rows: list[Tensor]) -> ClippedSum:
        """Return the clipped sum of materialised gradients: ``rows`` has one tensor (B, P) per trainable parameter."""
        return self._clipped(lambda kept: [_Formed(*zip(self._trained, kept(*rows), strict=True))])

    @torch.no_grad()
    def _clipped(
        self, formed: Callable[[Callable[..., list[Tensor]]], Sequence[Any]], layers: Sequence[Any] | None = None
    ) -> ClippedSum:
        """Return the clipped sum of per-example gradients; gradients that are not finite add nothing.

        ``formed(kept)`` computes the gradients and returns one object per layer, with ``squared_norms`` and
        ``weighted_sums``. ``kept`` is a function that sets the rows of left-out records to 0: ``formed`` applies it to
        the tensors from which it computes gradients. ``layers``: the gradients of all records, if the caller has
        computed them already.
        """
        layers = layers or formed(lambda *values: list(values))
        squared_norms_B = sum((layer.squared_norms() for layer in layers[1:]), start=layers[0].squared_norms())
        # NaN fails the comparison, as it should.
        is_counted_B = squared_norms_B <= (_LONGEST * self._clip_norm) ** 2
        if not bool(is_counted_B.all()):
            # No error for a record's gradient, which would reveal the record; weights are released anyway.
            if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
                raise ValueError("The model's weights are not finite; lower the learning rate.")
            if not self._has_warned:
                _log.warning("The gradients of some records are not finite; such records add nothing to a step.")
                self._has_warned = True
            # Formed again from zeros: a weight of 0 would not remove what is not finite from a sum.
            left_out_B = ~is_counted_B
            layers = formed(
                lambda *values: [each.masked_fill(left_out_B.view(-1, *[1] * (each.ndim - 1)), 0) for each in values]
            )
            # Not a norm of 0, which would give a factor of 1.
            factors_B = self._clip_factors(squared_norms_B).where(is_counted_B, 0)
        else:
            factors_B = self._clip_factors(squared_norms_B)
        sums = {id(p): value for layer in layers for p, value in layer.weighted_sums(factors_B)}
        # A layer that the outputs do not depend on made no call: its gradient is 0.
        gradients = [sums[id(p)] if id(p) in sums else torch.zeros_like(p) for p in self._trained]
        return ClippedSum(gradients=gradients, squared_norms_B=squared_norms_B)

    @torch.no_grad()
    def _rows(self, calls: Sequence[LayerCall], owner_B: Tensor | None = None) -> list[Tensor]:
        """Return every record's gradient or, with ``owner_B``, every owner's average gradient: one tensor (B, P) per
        trainable parameter."""
        rows = {id(p): values for call in calls for p, values in layer_gradient(*call).per_record()}
        # A layer that the outputs do not depend on made no call: its gradient is 0.
        missing = {id(p): p.new_zeros(len(calls[0][1]), p.numel()) for p in self._trained if id(p) not in rows}
        formed = [(rows | missing)[id(p)] for p in self._trained]
        if owner_B is None:
            return formed
        _, place_B, counts = torch.unique_consecutive(owner_B, return_inverse=True, return_counts=True)
        sums = [rows.new_zeros(len(counts), rows.shape[1]).index_add_(0, place_B, rows) for rows in formed]
        return [total.div_(counts[:, None]) for total in sums]

    def _layer_calls(self, x: Tensor, targets: Tensor) -> Sequence[LayerCall]:
        """Run one forward and one backward pass; return every trained layer that ran, with its input and the gradient
        of its output."""
        if self._chain is not None and self._chain.reads(x):
            values = self._values or self._chain.forward(x)
            if self._gradient_of_loss is not None:
                return self._chain.backward(values, self._gradient_of_loss(values[-1], targets))
            outputs = values[-1].detach().requires_grad_()
            losses_B = self._loss(outputs, targets)
            _check_losses(losses_B, len(outputs))
            (gradient,) = torch.autograd.grad(losses_B.sum(), outputs)
            return self._chain.backward(values, gradient)
        # A later version shows that a layer has overwritten the input. Outputs may be overwritten: an edge of the graph
        # refers to the value before.
        calls: list[tuple[nn.Module, Tensor, int, GradientEdge]] = []

        def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            layer_input = inputs[0].detach()
            calls.append((layer, layer_input, layer_input._version, get_gradient_edge(output)))

        handles = [layer.register_forward_hook(keep) for layer in self._layers]
        try:
            losses_B = self._loss(self.model(x), targets)
        finally:
            for handle in handles:
                handle.remove()
        _check_losses(losses_B, len(x))
        # The gradient of the sum: that of a mean would divide every record's gradient by the number of records.
        output_gradients = torch.autograd.grad(losses_B.sum(), [edge for *_, edge in calls])
        for layer, layer_input, version, _ in calls:
            name = type(layer).__name__
            if len(layer_input) != len(x):
                raise ValueError(
                    f"Layer {name} reads {len(layer_input)} rows for {len(x)} records; keep records on the first axis."
                )
            own_axes = len(layer.normalized_shape) if isinstance(layer, nn.LayerNorm) else 1
            if layer_input.ndim < 1 + (3 if isinstance(layer, nn.Conv2d) else own_axes):
                raise ValueError(
                    f"Layer {name} reads an input without an axis for records, of shape {tuple(layer_input.shape)}; "
                    "keep records on the first axis."
                )
            if layer_input._version != version:
                raise ValueError(
                    f"The input of layer {name} is overwritten by a later layer; use no in-place operation on it."
                )
        return [(call[0], call[1], gradient) for call, gradient in zip(calls, output_gradients, strict=True)]

    def _clip_factors(self, squared_norms_B: Tensor) -> Tensor:
        """Return each record's clipping factor min(1, clip_norm / norm) in the parameters' precision, lowered by the
        rounding error of norms."""
        precision = torch.finfo(self._trained[0].dtype).eps
        # A norm of 0 gives inf and so the factor 1. The bound is lowered by what the norm may be rounded down by.
        factors_B = squared_norms_B.rsqrt().mul_(self._clip_norm * (1 - ROUNDING * precision)).clamp_(max=1)
        return factors_B.to(self._trained[0].dtype)


def _check_losses(losses_B: Tensor, num_records: int) -> None:
    if losses_B.shape != (num_records,):
        raise ValueError(f"Expected one loss per record, shape ({num_records},), got {tuple(losses_B.shape)}.")


class GuidedGradients(GradientClipper):
    """Computes two gradients of one batch of float records, in a single forward pass if the model is a
    :class:`DenseChain`.

    The first is the gradient of the summed cross entropy. The second is a weighted sum of clipped gradients of
    ``loss``, which may be any value per record: for fairness terms, where a record's weight depends on its group.
    """

    _weights_B: Tensor

    def cross_entropy(self, x: Tensor, labels: Tensor) -> list[Tensor]:
        """Return the gradients of the summed cross entropy; 0 for an empty batch. ``x`` (B, ...), ``labels`` (B,)."""
        self._values = None
        if not len(x):
            return [torch.zeros_like(p) for p in self.parameters]
        if self._chain is None or not self._chain.reads(x):
            loss = functional.cross_entropy(self.model(x), labels, reduction="sum")
            return list(torch.autograd.grad(loss, self.parameters))
        self._values = self._chain.forward(x)
        slope = CrossEntropy().gradient(self._values[-1], labels)
        sums = {id(p): total for p, total in self._chain.summed_gradients(self._values, slope)}
        return [sums[id(p)] for p in self.parameters]

    def both(self, x: Tensor, labels: Tensor, targets: Tensor, weights_B: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of the summed cross entropy on ``labels``, and the sum over records of ``weights_B``
        times the clipped gradient of ``loss`` on ``targets``."""
        gradients, self._weights_B = self.cross_entropy(x, labels), weights_B
        return gradients, self.sum(x, targets).gradients

    def _clip_factors(self, squared_norms_B: Tensor) -> Tensor:
        # After clipping: weights are public, and the noise is scaled to them.
        return super()._clip_factors(squared_norms_B) * self._weights_B
