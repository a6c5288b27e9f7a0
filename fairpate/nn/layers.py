"""Per-example gradients layer by layer, dense chains by hand, and whether a model treats each record by itself.

The gradient of every record follows from a layer's input and the gradient of the summed loss with respect to its
output, without another backward pass. A dense layer's is an outer product, so its norm is the product of two norms and
it is never formed (Goodfellow 2015, arXiv 1510.01799). Every other layer forms its gradients, because the norm must be
that of the summed values: a closed form of terms that cancel, such as the products of all pairs of positions, can be
too small by any factor. Norms are sums of squares in blocks that double precision joins: their relative error is below
:data:`ROUNDING` times the precision of the layer.

Clipping bounds what one record adds to a sum only if a record has a gradient of its own. The closed forms need more:
every layer runs once, on its own weights, with records along the first axis. A list of known layers and containers
proves both. Any other model has to go through ``torch.func.vmap`` one record at a time, where no record can reach
another; a trial then finds a model whose gradients differ from those of its records alone.

:class:`DenseChain` runs a sequence of dense layers and elementwise functions forward and backward by hand, one matrix
product and one mask a layer, for small models whose time autograd would dominate.

Shapes: B records; T positions; I inputs, O outputs, G groups of a layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairpate.nn.models import FrozenBatchNorm, ImageNetScale, OrientedGradients, ScaleBytes, scale_bytes, seeded_torch

ROUNDING = 64  # in units of the precision that gradients have
# A processor is fast while patches stay in its cache; a GPU once there are enough of them to keep it busy.
_FLOATS_UNFOLDED_AT_ONCE = {"cpu": 2**19, "cuda": 2**28}
_FLOATS_SQUARED_AT_ONCE = 2**9
_NUM_TRIED, _TOLERANCE = 3, 1e-3
# By name: torchvision is not imported for a model that has none of it.
_CONTAINERS = frozenset(
    {
        "torch.nn.modules.container.Sequential",
        "torchvision.models.resnet.ResNet",
        "torchvision.models.resnet.BasicBlock",
        "torchvision.models.resnet.Bottleneck",
        "torchvision.models.densenet.DenseNet",
        "torchvision.models.densenet._DenseBlock",
        "torchvision.models.densenet._DenseLayer",
        "torchvision.models.densenet._Transition",
    }
)
_WITHOUT_PARAMETERS: frozenset[type[nn.Module]] = frozenset(
    {
        ScaleBytes,
        ImageNetScale,
        OrientedGradients,
        FrozenBatchNorm,
        nn.Identity,
        nn.Dropout,
        nn.ReLU,
        nn.ELU,
        nn.GELU,
        nn.SiLU,
        nn.Tanh,
        nn.Sigmoid,
        nn.Softplus,
        nn.LeakyReLU,
        nn.MaxPool2d,
        nn.AvgPool2d,
        nn.AdaptiveAvgPool2d,
    }
)
WeightedSums = list[tuple[Tensor, Tensor]]
Gradients = Callable[[nn.Module, Tensor, Tensor], list[Tensor]]


class LayerGradient(Protocol):
    """The gradients of B records with respect to one layer's parameters."""

    def squared_norms(self) -> Tensor:
        """Squared L2 norm per record over the layer's trainable parameters, ``float64`` of shape (B,)."""

    def weighted_sums(self, weights_B: Tensor) -> WeightedSums:
        """For each trainable parameter, the sum over records of weight times gradient."""

    def per_record(self) -> WeightedSums:
        """For each trainable parameter, the gradient of every record, shape (B, P)."""


def layer_gradient(layer: nn.Module, layer_input: Tensor, output_gradient: Tensor) -> LayerGradient:
    """The gradients of one call of ``layer``; both tensors have the records along their first axis."""
    return _GRADIENTS[type(layer)](layer, layer_input, output_gradient)


class _Dense:
    """Each record's gradient is the outer product of its output gradient and its input."""

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
        return _trainable((self._layer.weight, weight_BOI.flatten(1)), (self._layer.bias, self._gradient_BO))


def _dense(layer: nn.Module, layer_input: Tensor, output_gradient: Tensor) -> LayerGradient:
    linear = cast("nn.Linear", layer)
    if layer_input.ndim == 2:
        return _Dense(linear, layer_input, output_gradient)
    # A record's gradient is a sum over positions, whose terms may cancel: it is formed, see the module.
    gradient_BTO = output_gradient.flatten(1, -2)
    weight_BOI = gradient_BTO.mT @ layer_input.flatten(1, -2)
    return _Formed((linear.weight, weight_BOI), (linear.bias, gradient_BTO.sum(dim=1)))


class _Formed:
    """Layers whose per-example gradients are small enough to be materialised: one (B, ...) per parameter."""

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

    @torch.no_grad()
    def __init__(self, layer: nn.Module, layer_input: Tensor, output_gradient: Tensor) -> None:
        self._layer = convolution = cast("nn.Conv2d", layer)
        self._bias = _Formed((convolution.bias, output_gradient.sum(dim=(2, 3))))
        # Torch's own numbers, in which padding by name (`same`) is resolved.
        padding = convolution._reversed_padding_repeated_twice
        padded = functional.pad(layer_input, padding) if any(padding) else layer_input
        # A view of the patch behind every output position, (B, groups, output sides, kernel sides, inputs of a group);
        # or with the output sides last, where they make the longer runs of neighbours in memory.
        inputs = convolution.in_channels // convolution.groups
        output_width = padded.shape[3] - convolution.kernel_size[1] + 1
        positions_come_last = convolution.stride[1] == 1 and output_width > inputs * convolution.kernel_size[1]
        layout = torch.contiguous_format if positions_come_last else torch.channels_last
        patches = padded.contiguous(memory_format=layout).unflatten(1, (convolution.groups, -1))
        options = (convolution.kernel_size, convolution.stride, convolution.dilation)
        for axis, size, stride, dilation in zip((3, 4), *options, strict=True):
            patches = patches.unfold(axis, (size - 1) * dilation + 1, stride)[..., ::dilation]
        patches = patches.permute((0, 1, 5, 6, 2, 3, 4) if positions_come_last else (0, 1, 3, 4, 5, 6, 2))
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
        outputs, inputs, height, width = self._layer.weight.shape
        total = (weights_B @ self._weight).reshape(outputs, height, width, inputs).permute(0, 3, 1, 2)
        weight: WeightedSums = [(self._layer.weight, total)] if self._layer.weight.requires_grad else []
        return weight + self._bias.weighted_sums(weights_B)

    def per_record(self) -> WeightedSums:
        outputs, inputs, height, width = self._layer.weight.shape
        weight = self._weight.reshape(-1, outputs, height, width, inputs).permute(0, 1, 4, 2, 3).flatten(1)
        return [*_trainable((self._layer.weight, weight)), *self._bias.per_record()]


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
    # Normalised without scale and shift: the gradient of the scale is taken against this value.
    normal = functional.group_norm(layer_input, norm.num_groups, eps=norm.eps)
    positions = tuple(range(2, layer_input.ndim))
    weight, bias = output_gradient * normal, output_gradient
    if positions:
        weight, bias = weight.sum(dim=positions), bias.sum(dim=positions)
    return _Formed((norm.weight, weight), (norm.bias, bias))


def _layer_norm(layer: nn.Module, layer_input: Tensor, output_gradient: Tensor) -> LayerGradient:
    norm = cast("nn.LayerNorm", layer)
    normal = functional.layer_norm(layer_input, norm.normalized_shape, eps=norm.eps)
    size = math.prod(norm.normalized_shape)
    weight = (output_gradient * normal).reshape(len(layer_input), -1, size).sum(dim=1)
    return _Formed((norm.weight, weight), (norm.bias, output_gradient.reshape(len(layer_input), -1, size).sum(dim=1)))


def _trainable(*sums: tuple[Tensor | None, Tensor | None]) -> WeightedSums:
    return [(p, value) for p, value in sums if p is not None and p.requires_grad and value is not None]


_GRADIENTS: dict[type[nn.Module], Callable[[nn.Module, Tensor, Tensor], LayerGradient]] = {
    nn.Linear: _dense,
    nn.Conv2d: _Convolution,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
}


def unknown_module(model: nn.Module) -> str | None:
    """The first module, by name and type, for which the closed forms do not apply; None if they apply to the whole
    model.

    Such a module is missing from the list, was altered (a hook, a method of its own, a foreign parameter), or is a
    layer or parameter in training that the model has twice.
    """
    seen: set[int] = set()
    # With duplicates: a module that the model has twice has to be met twice.
    for name, module in model.named_modules(remove_duplicate=False):
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if not _is_known(module) or any(id(p) in seen for p in own):
            return _described(name, module)
        # A parameter that the model has twice has the sum of two gradients; the norm of either is not the sum's.
        seen.update(map(id, own))
    return None


def refuse_statistics(model: nn.Module) -> None:
    """Raise ValueError for a layer that computes with statistics of a batch, or keeps some of all records it has
    seen."""
    for name, module in model.named_modules():
        keeps = isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
        if keeps or isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"{_described(name, module)} mixes the records of a batch: it normalises by their statistics, or keeps "
                "them, so no record has a gradient of its own; use GroupNorm or LayerNorm."
            )


def _is_known(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    # A hook, or a method of the instance, may compute anything: the type alone would prove nothing.
    if any(hooks) or "forward" in vars(module) or not own.keys() <= {"weight", "bias"}:
        return False
    kind = type(module)
    if kind is nn.Flatten:
        # From axis 0 on it would join the records into one.
        return cast("nn.Flatten", module).start_dim >= 1
    if isinstance(module, nn.Unflatten) and kind is nn.Unflatten:
        return isinstance(module.dim, int) and module.dim >= 1
    if f"{kind.__module__}.{kind.__qualname__}" in _CONTAINERS:
        return not own
    if isinstance(module, nn.LayerNorm) and not any(p.requires_grad for p in own.values()):
        # Of several normalised axes one could be the records'; that is checked for layers in training alone.
        return kind is nn.LayerNorm and len(module.normalized_shape) == 1
    # The closed form pads with zeros.
    if isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
        return False
    return kind in _WITHOUT_PARAMETERS or kind in _GRADIENTS


def _described(name: str, module: nn.Module) -> str:
    return f"Module {name or 'of the model itself'} ({type(module).__name__})"


def try_records_apart(model: nn.Module, gradients: Gradients, x: Tensor) -> None:
    """Raise ValueError if a record's output or gradient depends on other records or on an earlier call. The model stays
    unchanged.

    ``gradients(model, x, weights)`` returns per-example gradients of the sum of ``weights`` times outputs, computed by
    the engine that will be used: one tensor (B, ...) per trainable parameter. The test uses random records if ``x``
    holds floats or bytes, otherwise the first records of ``x``. Dropout is switched off.
    """
    if x.is_floating_point() or x.dtype == torch.uint8:
        # A generator of its own: a trial moves no stream of the training.
        drawn = torch.rand(_NUM_TRIED, *x.shape[1:], generator=torch.Generator().manual_seed(0))
        tried = (drawn * 255).to(x) if x.dtype == torch.uint8 else drawn.to(x)
    else:
        tried = x[:_NUM_TRIED]
    if not len(tried):
        return
    dropout = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
    for module in dropout:
        module.eval()
    try:
        with _unchanged(model):
            together = _outputs(model, tried)
            alone = [_outputs(model, record[None]) for record in tried]
            # A second call shows layers that draw random numbers of their own, or keep state outside of buffers.
            again = _outputs(model, tried)
        joined = torch.cat([outputs[-1][1] for outputs in alone])
        is_one_each = len(joined) == len(tried) and _are_close(together[-1][1], joined)
        if not is_one_each or not _are_close(again[-1][1], together[-1][1]):
            raise ValueError(
                f"{_first_difference(together, alone)} gives a record another output beside other records, or at "
                "another call: it mixes records, so no record has a gradient of its own. Normalise within a record, "
                "keep records along the first axis, and draw random numbers by nn.Dropout alone."
            )
        # A parameter that the engine does not see everywhere (in a list, in a closure) has another gradient there.
        with torch.enable_grad(), seeded_torch(0):
            outputs = model(tried)
            weights = torch.randn(outputs.shape, dtype=outputs.dtype).to(outputs.device)
            named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            expected = torch.autograd.grad(
                (outputs * weights).sum(), [p for _, p in named], allow_unused=True, materialize_grads=True
            )
        found = [values.sum(dim=0) for values in gradients(model, tried, weights)]
        for (name, _), theirs, ours in zip(named, expected, found, strict=True):
            if not _are_close(ours[None], theirs[None]):
                raise ValueError(
                    f"Parameter {name}: per-example gradients do not sum to autograd's gradient, because the model "
                    "reads the parameter outside of its module; read it inside."
                )
    finally:
        for module in dropout:
            module.train()


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Raise ValueError if the passes inside the block change a parameter or a buffer, which then has its values
    again."""
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    before = {name: value.detach().clone() for name, value in values.items()}
    changed: list[str] = []
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in values.items():
                # NaN does not equal itself, and one that stayed is no change.
                if not torch.equal(value.nan_to_num(), before[name].nan_to_num()):
                    changed.append(name)
                    value.copy_(before[name])
    if changed:
        raise ValueError(
            f"The forward pass changes {changed[0]}, so that records reach the model unclipped and without noise; use "
            "layers that keep nothing of what they see."
        )


@torch.no_grad()
def _outputs(model: nn.Module, x: Tensor) -> list[tuple[str, Any]]:
    """Return the output of every module, in the order of calls: the model itself comes last."""
    found: list[tuple[str, Any]] = []

    def keep(name: str) -> Callable[..., None]:
        return lambda module, _, output: found.append(
            (_described(name, module), output.clone() if isinstance(output, Tensor) else output)
        )

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules()]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _are_close(left: Tensor, right: Tensor) -> bool:
    """True if the values are equal up to the rounding differences of kernels for other shapes."""
    if left.shape != right.shape:
        return False
    scale = float(torch.nan_to_num(right.double()).abs().max()) if right.numel() else 0.0
    return torch.allclose(left.double(), right.double(), rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)


def _first_difference(together: list[tuple[str, Any]], alone: list[list[tuple[str, Any]]]) -> str:
    """The first module, in the order of calls, whose outputs differ; the model where none is found."""
    for position, (name, output) in enumerate(together):
        parts = [outputs[position][1] for outputs in alone if len(outputs) > position]
        if not isinstance(output, Tensor) or not all(isinstance(part, Tensor) and len(part) == 1 for part in parts):
            continue
        if len(parts) == len(output) == len(alone) and not _are_close(output, torch.cat(parts)):
            return name
    return together[-1][0]


# Forward, and backward from the value alone, so that the input need not be kept.
_ACTIVATIONS: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.ReLU: (torch.relu, lambda gradient, value: torch.ops.aten.threshold_backward(gradient, value, 0)),
    nn.Tanh: (torch.tanh, torch.ops.aten.tanh_backward),
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
        """True if the first layer sees each record of ``x`` (B, ...) as one row, the only form this class supports."""
        return x.ndim == 2 or self._flattens

    @torch.no_grad()
    def forward(self, x: Tensor) -> list[Tensor]:
        """The input of every layer, then the output of the last, for an ``x`` that the chain reads."""
        values = [scale_bytes(x) if x.ndim == 2 else scale_bytes(x).flatten(1)]
        for layer in self._layers:
            if isinstance(layer, nn.Linear):
                values.append(functional.linear(values[-1], layer.weight, layer.bias))
            else:
                values.append(_ACTIVATIONS[type(layer)][0](values[-1]))
        return values

    @torch.no_grad()
    def backward(self, values: list[Tensor], gradient: Tensor) -> list[tuple[nn.Module, Tensor, Tensor]]:
        """Every trained layer, its input and its output's gradient, from ``forward``'s values and the last gradient."""
        return list(self._dense_gradients(values, gradient))

    @torch.no_grad()
    def summed_gradients(self, values: list[Tensor], gradient: Tensor) -> WeightedSums:
        """For each trained parameter, the gradient summed over records, as autograd would give it; arguments as for
        :meth:`backward`."""
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
                gradient = _ACTIVATIONS[type(layer)][1](gradient, values[i + 1])
                continue
            if _is_trained(layer):
                yield layer, values[i], gradient
            # Below the lowest trained layer no gradient is needed.
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
