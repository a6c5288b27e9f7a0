"""Sums of clipped per-example gradients, which is all that differentially private SGD ever sees of a batch.

Abadi et al. 2016 ("Deep Learning with Differential Privacy", arXiv 1607.00133): every record's gradient, over all
parameters together, is scaled down to an L2 norm of at most ``clip_norm`` before the sum. Two engines give the same
sum. ``book_keeping`` runs one backward pass that keeps each layer's input and output gradient, takes the norms in
closed form from these and then the weighted sum from the same tensors (Bu et al. 2023, arXiv 2210.00038).
A chain of dense layers needs no autograd for that. ``functional`` maps ``torch.func.grad`` over the records and works
for any module, more slowly.

A layer that mixes the records of a batch has no per-example gradient and is refused. This module draws no noise and
knows no epsilon.

Shapes: B records of a batch; T positions; P values of one parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from fairpate.nn.dense_chain import DenseChain
from fairpate.nn.layer_gradients import LayerGradient, layer_gradient, squared_norms, supports

Engine = Literal["book_keeping", "functional"]
PerExampleLoss = Callable[[Tensor, Tensor], Tensor]  # with a method ``gradient`` too, as below, where speed matters
_MIXES_RECORDS = (nn.modules.batchnorm._BatchNorm,)


class CrossEntropy:
    """Cross entropy per record for targets (B,) ``int64``; with its gradient, which small models need quickly."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss per record, shape (B,)."""
        return functional.cross_entropy(outputs, targets, reduction="none")

    @torch.no_grad()
    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The gradient of the summed losses with respect to ``outputs`` (B, C): probability less truth."""
        # For the few classes there are, this is quicker than the softmax itself.
        probability = torch.log_softmax(outputs, dim=1).exp_()
        return probability.scatter_(1, targets[:, None], -1.0, reduce="add")


@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """``gradients``: one sum per trainable parameter, in their order. What is known of single records is private."""

    gradients: list[Tensor]
    squared_norms_B: Tensor

    @property
    def norms_B(self) -> Tensor:
        """L2 norm of every record's gradient before clipping, shape (B,)."""
        return self.squared_norms_B.sqrt()


class GradientClipper:
    """Sums the clipped per-example gradients of one model, batch after batch."""

    def __init__(
        self,
        model: nn.Module,
        loss: PerExampleLoss,
        *,
        clip_norm: float,
        engine: Literal["auto"] | Engine = "auto",
        max_records: int | None = None,
    ) -> None:
        """``loss(outputs, targets)`` gives one value per record, shape (B,).

        ``max_records`` bounds how many records are in memory at once; the sum does not depend on it. ValueError for a
        layer that mixes records, and where ``book_keeping`` is asked of a model that it does not cover.
        """
        if not clip_norm > 0:
            raise ValueError(f"Expected clip_norm > 0, got {clip_norm}.")
        _refuse_mixing_layers(model)
        uncovered = _uncovered(model)
        if engine == "book_keeping" and uncovered is not None:
            raise ValueError(f"Parameter {uncovered} has no closed form for its norm; use engine `functional`.")
        self.engine: Engine = engine if engine != "auto" else "functional" if uncovered else "book_keeping"
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._model, self._loss, self._clip_norm, self._max_records = model, loss, clip_norm, max_records
        self._gradient_of_loss: PerExampleLoss | None = getattr(loss, "gradient", None)
        self._layers = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        self._chain = DenseChain.of(model)

    def sum(self, x: Tensor, targets: Tensor) -> ClippedSum:
        """The sum over records of min(1, clip_norm / norm) times the gradient of the record's loss; 0 for no record.

        The model should be in the mode that training wants. ValueError for a gradient that is not finite, and under
        autocast: a norm that was rounded to eight bits bounds nothing.
        """
        if torch.is_autocast_enabled(x.device.type):
            raise ValueError("Per-example gradients are clipped in the parameters' own precision; leave autocast out.")
        part = self._book_keeping if self.engine == "book_keeping" else self._functional
        size = self._max_records or len(x)
        if 0 < len(x) <= size:
            return part(x, targets)
        parts = [part(x[i : i + size], targets[i : i + size]) for i in range(0, len(x), max(1, size))]
        total = [torch.zeros_like(p) for p in self.parameters]
        for each in parts:
            torch._foreach_add_(total, each.gradients)
        nothing = torch.zeros(0, device=x.device)
        return ClippedSum(
            gradients=total, squared_norms_B=torch.cat([nothing, *(each.squared_norms_B for each in parts)])
        )

    def _book_keeping(self, x: Tensor, targets: Tensor) -> ClippedSum:
        layers = self._layer_gradients(x, targets)
        with torch.no_grad():
            squared_norms_B = _total([layer.squared_norms() for layer in layers])
            factors_B = self._clip_factors(squared_norms_B)
            sums = {id(p): value for layer in layers for p, value in layer.weighted_sums(factors_B)}
        # A layer that the outputs do not depend on made no call: its gradient is 0.
        gradients = [sums[id(p)] if id(p) in sums else torch.zeros_like(p) for p in self.parameters]
        return ClippedSum(gradients=gradients, squared_norms_B=squared_norms_B)

    def _layer_gradients(self, x: Tensor, targets: Tensor) -> list[LayerGradient]:
        """One forward and one backward pass: the gradients of every layer that ran."""
        if self._chain is not None and self._chain.reads(x):
            values = self._chain.forward(x)
            return self._chain.backward(values, self._loss_gradient(values[-1], targets))
        with _LayerCalls(self._layers) as calls:
            losses_B = self._loss(self._model(x), targets)
        _check_losses(losses_B, len(x))
        output_gradients = torch.autograd.grad(losses_B.sum(), [call.output for call in calls])
        layers: list[LayerGradient] = []
        with torch.no_grad():
            for call, output_gradient in zip(calls, output_gradients, strict=True):
                _check_input(call, len(x))
                layers.append(layer_gradient(call.layer, call.layer_input, output_gradient))
        return layers

    def _loss_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self._gradient_of_loss is not None:
            return self._gradient_of_loss(outputs, targets)
        outputs = outputs.detach().requires_grad_()
        losses_B = self._loss(outputs, targets)
        _check_losses(losses_B, len(outputs))
        (gradient,) = torch.autograd.grad(losses_B.sum(), outputs)
        return gradient

    def _functional(self, x: Tensor, targets: Tensor) -> ClippedSum:
        named = dict(self._model.named_parameters())
        trainable = {name: p.detach() for name, p in named.items() if p.requires_grad}
        fixed = {name: p.detach() for name, p in named.items() if not p.requires_grad}
        fixed |= dict(self._model.named_buffers())

        def record_loss(parameters: dict[str, Tensor], record: Tensor, target: Tensor) -> Tensor:
            output = functional_call(self._model, parameters | fixed, (record[None],))
            return self._loss(output, target[None])[0]

        per_record = vmap(grad(record_loss), in_dims=(None, 0, 0), randomness="different")
        flat = [gradient.flatten(1) for gradient in per_record(trainable, x, targets).values()]
        squared_norms_B = _total([squared_norms(values) for values in flat])
        factors_B = self._clip_factors(squared_norms_B)
        sums = [(factors_B @ values).reshape(p.shape) for values, p in zip(flat, trainable.values(), strict=True)]
        return ClippedSum(gradients=sums, squared_norms_B=squared_norms_B)

    def _clip_factors(self, squared_norms_B: Tensor) -> Tensor:
        """min(1, clip_norm / norm) per record. ValueError for a norm that is not finite."""
        if not math.isfinite(squared_norms_B.sum()):
            raise ValueError("The gradient of a record is not finite; lower the learning rate or scale the features.")
        return squared_norms_B.rsqrt().mul_(self._clip_norm).clamp_(max=1)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """``output`` is where the layer's output enters the graph: what follows may overwrite the tensor itself."""

    layer: nn.Module
    layer_input: Tensor
    input_version: int
    output: GradientEdge


class _LayerCalls:
    """The input and the output of every call of the given layers inside the block."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._calls: list[_Call] = []

    def __enter__(self) -> list[_Call]:
        self._handles = [layer.register_forward_hook(self._keep) for layer in self._layers]
        return self._calls

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if any(layer is call.layer for call in self._calls):
            raise ValueError(f"{type(layer).__name__} runs twice for one record; use engine `functional`.")
        layer_input = inputs[0].detach()
        edge, version = get_gradient_edge(output), layer_input._version
        self._calls.append(_Call(layer=layer, layer_input=layer_input, input_version=version, output=edge))


def _total(terms: list[Tensor]) -> Tensor:
    return sum(terms[1:], start=terms[0])


def _refuse_mixing_layers(model: nn.Module) -> None:
    mixing = [(name, module) for name, module in model.named_modules() if isinstance(module, _MIXES_RECORDS)]
    if mixing:
        name, module = mixing[0]
        raise ValueError(
            f"Layer {name} ({type(module).__name__}) mixes the records of a batch, so no record has a gradient of its "
            "own; use GroupNorm or LayerNorm."
        )


def _uncovered(model: nn.Module) -> str | None:
    """The first trainable parameter without a closed form, or that two layers share."""
    seen: set[int] = set()
    for layer_name, module in model.named_modules():
        for name, parameter in module.named_parameters(layer_name, recurse=False):
            if parameter.requires_grad and (not supports(module) or id(parameter) in seen):
                return str(name)
            seen.add(id(parameter))
    return None


def _check_input(call: _Call, num_records: int) -> None:
    name = type(call.layer).__name__
    if len(call.layer_input) != num_records:
        raise ValueError(
            f"{name} reads {len(call.layer_input)} rows for {num_records} records: records must stay along the first "
            "axis; use engine `functional`."
        )
    if call.layer_input._version != call.input_version:
        raise ValueError(f"The input of {name} is overwritten by a later layer; use engine `functional`.")


def _check_losses(losses_B: Tensor, num_records: int) -> None:
    if losses_B.shape != (num_records,):
        raise ValueError(f"Expected one loss per record, shape ({num_records},), got {tuple(losses_B.shape)}.")
